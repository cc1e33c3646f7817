//! Steps of a merge over a host in memory.

use super::*;
use crate::decide::plan::{GuestMemoryControl, PlannedRange};
use pagefold_base::Pid;
use pagefold_base::domain::TrustDomain;
use pagefold_base::process::Process;
use pagefold_host::fake_host::{AdviceFault, FakeHost};
use pagefold_host::resource::ResourceClass;

/// A guest with these backends, enrolled whole.
fn guest(pid: u32, backends: &[&str]) -> PlanTarget {
    let process = Process::absent(ProcessId { pid: Pid(pid), start_time: 1 }, &Absent::Denied);
    let backends = backends.iter().map(|&backend| backend.to_owned()).collect();
    let enroll_method =
        EnrollMethod::GuestControl(GuestMemoryControl { socket: "/run/qmp".into(), backends, memory: Vec::new() });
    PlanTarget { process, domain: TrustDomain::Host, ranges: Vec::new(), huge_page_bytes: Bytes::ZERO, enroll_method }
}

/// Run steps of a merge of a plan that starts now, and commit.
fn run_steps<T>(
    host: &FakeHost,
    plan: &MergePlan,
    deadline: Option<Duration>,
    steps: impl FnOnce(&mut MergeRun<'_, '_>) -> T,
) -> T {
    let directory = tempfile::tempdir().unwrap();
    let (mut session, ..) = Session::begin(host, directory.path(), ResourceClass::Ksm).unwrap();
    let (progress, stop, started) = (MergeProgress::default(), AtomicBool::new(false), host.now());
    let options = MergeOptions {
        ksmd_cpu_share: 1.0,
        deadline,
        watch_time: Duration::ZERO,
        after_merge: AfterMerge::UndoChanges,
    };
    let mut monitor = MergeMonitor::new(host);
    let mut run = MergeRun::new(&mut session, plan, &options, &mut monitor, (&progress, &stop), started);
    let result = steps(&mut run);
    session.commit().unwrap();
    result
}

/// Enroll a whole plan. Returns whether any of it was enrolled, and the failed changes.
fn enroll(host: &FakeHost, plan: &MergePlan) -> (bool, Vec<FailedChange>) {
    run_steps(host, plan, None, |run| {
        run.enroll_targets(false).unwrap();
        (run.any_enrolled, std::mem::take(&mut run.failed_changes))
    })
}

#[test]
fn each_hung_guest_is_asked_for_one_backend_when_it_is_enrolled() {
    let host = FakeHost::booted();
    [7, 8].into_iter().for_each(|pid| host.map_pages(pid, (0x1000, 0x3000), "", false));
    let backends = ["/objects/a", "/objects/b"];
    let plan = MergePlan {
        whole_processes: true,
        targets: vec![guest(7, &backends), guest(8, &backends)],
        ..MergePlan::default()
    };
    host.set_advice_fault(Some(AdviceFault::GuestsHang));
    let (enrolled, failed) = enroll(&host, &plan);
    assert_eq!(host.written_settings(), ["/objects/a of 7=true", "/objects/a of 8=true"]);
    assert!(!enrolled && failed.len() == 2, "{failed:?}");
    host.set_advice_fault(None);
    let (enrolled, failed) = enroll(&host, &plan);
    assert_eq!(host.written_settings().len(), 2 + 4);
    assert!(enrolled && failed.is_empty(), "{failed:?}");
}

/// A host in virtual time, so the test takes no such time itself.
#[test]
fn merge_without_progress_ends_at_its_deadline() {
    const DEADLINE: Duration = Duration::from_secs(600);
    let range = AddressRange { start: 0x1000, end: 0x5000 };
    let host = FakeHost::booted();
    host.enable_virtual_time();
    host.put_setting("full_scans", "7");
    host.map_pages(7, (range.start, range.end), "", false);
    let planned = PlannedRange {
        range,
        region: range,
        pages: Pages(4),
        merging: Pages(4),
        zero: Pages::ZERO,
        freed_bytes: Bytes(0x3000),
        split_huge_pages: Pages::ZERO,
        enrolled: false,
        late: false,
    };
    let target = PlanTarget { ranges: vec![planned], enroll_method: EnrollMethod::InProcess, ..guest(7, &[]) };
    let plan = MergePlan { targets: vec![target], ..MergePlan::default() };
    let (real_start, virtual_start) = (Instant::now(), host.now());
    let (end, timeline) =
        run_steps(&host, &plan, Some(DEADLINE), |run| (run.merge().unwrap(), std::mem::take(&mut run.timeline)));
    assert_eq!(end, MergeEnd::Deadline);
    assert!(timeline.iter().map(|point| point.at).is_sorted_by(|a, b| a < b), "each read follows a pause");
    let elapsed = elapsed_since(&host, virtual_start);
    assert!((DEADLINE..DEADLINE + settle::FAR_POLL_INTERVAL).contains(&elapsed), "{elapsed:?}");
    assert!(real_start.elapsed() < DEADLINE / 2, "the merge waited on the real clock");
    assert_eq!(host.regions(Pid(7)).unwrap(), [(range, "", false)], "unmerged ranges are unenrolled");
}
