//! Steps of a merge over a host in memory.

use super::*;
use crate::decide::plan::GuestMemoryControl;
use pagefold_base::Pid;
use pagefold_base::domain::TrustDomain;
use pagefold_base::process::Process;
use pagefold_host::fake_host::{AdviceFault, FakeHost};

/// A guest with these backends, enrolled whole.
fn guest(pid: u32, backends: &[&str]) -> PlanTarget {
    let process = Process::absent(ProcessId { pid: Pid(pid), start_time: 1 }, &Absent::Denied);
    let backends = backends.iter().map(|&backend| backend.to_owned()).collect();
    let way =
        EnrollMethod::GuestControl(GuestMemoryControl { socket: "/run/qmp".into(), backends, memory: Vec::new() });
    PlanTarget {
        process,
        domain: TrustDomain::Host,
        ranges: Vec::new(),
        huge_page_bytes: Bytes::ZERO,
        enroll_method: way,
    }
}

/// Enroll a whole plan. Returns whether any of it was enrolled, and the failed changes.
fn enrol(host: &FakeHost, plan: &MergePlan) -> (bool, Vec<FailedChange>) {
    let directory = tempfile::tempdir().unwrap();
    let (mut session, ..) = Session::begin(host, directory.path()).unwrap();
    let (progress, stop, started) = (MergeProgress::default(), AtomicBool::new(false), Instant::now());
    let options = MergeOptions {
        ksmd_cpu_share: 1.0,
        deadline: None,
        watch_time: Duration::ZERO,
        after_merge: AfterMerge::UndoChanges,
    };
    let mut work = MergeRun {
        plan,
        monitor: &mut MergeMonitor::new(host),
        unenrolled_pages: Pages::ZERO,
        unenrolled_processes: BTreeSet::new(),
        volatile_found_at: started,
        any_enrolled: false,
        smart_scan_disabled: false,
        ksmd: KsmdThread::find(host),
        page_counter: MergedPageCounter::new(host, plan),
        ksmd_cpu_before: Err(Absent::NotOnThisKernel),
        pace: KsmdPace::new(1.0),
        session: &mut session,
        options: &options,
        started_at: started,
        progress: &progress,
        stop: &stop,
        timeline: Vec::new(),
        failed_changes: Vec::new(),
    };
    work.enroll_targets(false).unwrap();
    let told = (work.any_enrolled, work.failed_changes);
    session.commit().unwrap();
    told
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
    let (enrolled, missed) = enrol(&host, &plan);
    assert_eq!(host.written_settings(), ["/objects/a of 7=true", "/objects/a of 8=true"]);
    assert!(!enrolled && missed.len() == 2, "{missed:?}");
    host.set_advice_fault(None);
    let (enrolled, missed) = enrol(&host, &plan);
    assert_eq!(host.written_settings().len(), 2 + 4);
    assert!(enrolled && missed.is_empty(), "{missed:?}");
}
