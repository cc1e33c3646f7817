//! The keeper on a host in memory and in virtual time: two nodes with two CPUs each, and virtual machines with one
//! virtual CPU. Its placements are also tested in an emulated machine (`labs/tests/guests/numa_apply.rs`).

use super::*;
use crate::decide::pricing::{FIRST_MOVE_GAIN_SHARE, OperatorPrices};
use pagefold_base::domain::TrustDomain;
use pagefold_base::{Absent, AddressRange, Fingerprint, Pages, Pid};
use pagefold_census::decide::sketch::{ContentSketches, Sketch};
use pagefold_host::fake_host::{FakeHost, MERGED_PAGE_NAME};
use pagefold_host::faulty_host::{FaultyHost, InjectedFault};
use pagefold_host::resource::ResourceClass;
use pagefold_host::transaction::Session;
use pagefold_host::transaction::session::ChangeLifetime;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

const START: u64 = 0x10_0000;
const PAGE: u64 = 4096;

/// Pages of a machine that is worth moving: two batches.
const MANY_PAGES: u64 = 10_000;

const VM: u32 = 7;
const INTERVAL: Duration = Duration::from_secs(30);
const REPLAN_INTERVAL: Duration = Duration::from_secs(3600);

const NO_MACHINE: &str = "no virtual machine runs";
const SETTLING: &str = "a new virtual machine still fills its memory";
const RECENT_PLAN: &str = "no new virtual machine since the last plan";
const RETRY: &str = "the last plan was not completed, and is made again";
const PRESSURE: &str = "tasks of the host wait for memory";
const ALL_WELL_PLACED: &str = "the virtual machine is well placed";
const PLACED: &str = "placed 1 of 1 virtual machine: 39.1 MiB moved, for a gain of 720 CPU s/h (memory 0, remote reads \
                      +720, CPU 0, huge pages 0, crowding 0)";

fn host(nodes: u32) -> FakeHost {
    let host = FakeHost::booted();
    host.enable_virtual_time();
    for node in 0..nodes {
        host.put_node(node, &format!("{}-{}", 2 * node, 2 * node + 1), 900_000);
    }
    host
}

fn range(pages: u64) -> AddressRange {
    AddressRange { start: START, end: START + pages * PAGE }
}

/// Starts a machine whose memory is on node 0. Its virtual CPU may run on `cpus`, and ran on the first of them.
fn start_machine(host: &FakeHost, pid: u32, pages: u64, cpus: &str) {
    host.start_process(pid, pages);
    host.map_pages(pid, (START, START + pages * PAGE), "heap", false);
    host.put_pages_on_node(pid, range(pages), 0);
    host.put_file(&format!("proc/{pid}/cmdline"), &format!("qemu-system-x86_64\0-name\0vm-{pid}\0"));
    host.put_file(&format!("proc/{pid}/status"), "Mems_allowed_list:\t0-1\n");
    let last_cpu = cpus.parse::<pagefold_base::IdSet>().unwrap().iter().next().unwrap();
    let unused = "0 ".repeat(16);
    let stat = format!("{pid} (CPU 0/KVM) S 1 1 1 0 -1 0 9 0 0 0 9 0 0 0 20 0 1 0 1 {unused}{last_cpu}\n");
    host.put_file(&format!("proc/{pid}/task/{pid}/stat"), &stat);
    host.put_file(&format!("proc/{pid}/task/{pid}/cpus"), cpus);
}

/// A host with a machine that runs on node 1 and has its memory on node 0.
fn host_with_remote_machine(pages: u64) -> FakeHost {
    let host = host(2);
    start_machine(&host, VM, pages, "2-3");
    host
}

/// The number of pages of a machine on each node.
fn pages_by_node(host: &FakeHost, pages: u64) -> [usize; 2] {
    let nodes = host.open(Pid(VM)).unwrap().page_nodes(range(pages)).unwrap();
    [0, 1].map(|id| nodes.iter().filter(|node| **node == Some(id)).count())
}

fn set_pressure(host: &FakeHost, percent: u32) {
    let line = format!("avg10={percent}.00 avg60=0.00 avg300=0.00 total=1");
    host.put_file("proc/pressure/memory", &format!("some {line}\nfull {line}\n"));
}

const RIVAL: &str = "a rival runs";

/// A rival runs while this file has a process ID.
const RIVAL_FILE: &str = "run/rival.pid";

fn find_rival(host: &dyn Host) -> Option<String> {
    host.read(RIVAL_FILE).is_ok_and(|pid| !pid.is_empty()).then(|| RIVAL.to_owned())
}

fn settings() -> KeeperSettings {
    KeeperSettings {
        acts: true,
        interval: INTERVAL,
        replan_interval: REPLAN_INTERVAL,
        limits: PlanLimits::default(),
        bandwidth: Bytes(u64::MAX),
    }
}

/// Runs a keeper, and calls `follow` with the number of checks so far after each check, until it returns false.
/// Returns all reports.
fn run(
    host: &dyn Host,
    settings: KeeperSettings,
    control: &KeeperControl,
    follow: impl FnMut(usize) -> bool,
) -> Vec<KeeperReport> {
    run_in(tempfile::tempdir().unwrap().path(), host, settings, control, follow)
}

/// As [`run`], with the directory of the journals.
fn run_in(
    directory: &Path,
    host: &dyn Host,
    settings: KeeperSettings,
    control: &KeeperControl,
    mut follow: impl FnMut(usize) -> bool,
) -> Vec<KeeperReport> {
    let mut keeper = PlacementKeeper::new(host, directory.to_owned(), settings, find_rival);
    let (mut reports, mut checks) = (Vec::new(), 0);
    keeper.run(control, &mut |report| {
        reports.push(report.clone());
        if matches!(report.activity, KeeperActivity::Idle(_) | KeeperActivity::Paused) {
            checks += 1;
            if !follow(checks) {
                control.end();
            }
        }
    });
    reports
}

fn run_checks(host: &dyn Host, checks: usize) -> Vec<KeeperReport> {
    run(host, settings(), &KeeperControl::default(), |done| done < checks)
}

/// Why the keeper was idle or paused after each check.
fn idle_reasons(reports: &[KeeperReport]) -> Vec<String> {
    let is_idle = |report: &&KeeperReport| matches!(report.activity, KeeperActivity::Idle(_) | KeeperActivity::Paused);
    reports.iter().filter(is_idle).map(|report| report.activity.describe()).collect()
}

/// The results of the plans.
fn plan_results(reports: &[KeeperReport]) -> Vec<&str> {
    let mut plans: Vec<&PlanResult> = reports.iter().filter_map(|report| report.last_plan.as_ref()).collect();
    plans.dedup();
    plans.into_iter().map(|plan| plan.result.as_str()).collect()
}

#[test]
fn host_with_one_node_needs_no_keeper() {
    assert_eq!(idle_reasons(&run_checks(&host(1), 9)), ["the host has one node"]);
}

#[test]
fn host_without_machines_is_checked_again_and_again() {
    assert_eq!(idle_reasons(&run_checks(&host(2), 3)), [NO_MACHINE; 3]);
}

#[test]
fn unreadable_host_is_reported_and_checked_again() {
    let fake = host(2);
    let hidden = FaultyHost::new(&fake, |path| (path == "proc").then_some(InjectedFault::Absent(Absent::Denied)));
    let expected = "the processes cannot be listed: permission denied";
    assert_eq!(idle_reasons(&run_checks(&hidden, 2)), [expected; 2]);
}

#[test]
fn machine_that_arrives_is_placed_once_it_has_settled() {
    let host = host(2);
    let reports = run(&host, settings(), &KeeperControl::default(), |checks| {
        if checks == 1 {
            start_machine(&host, VM, MANY_PAGES, "2-3");
        }
        checks < 4
    });
    assert_eq!(idle_reasons(&reports), [NO_MACHINE, SETTLING, RECENT_PLAN, RECENT_PLAN]);
    assert_eq!(plan_results(&reports), [PLACED]);
    assert_eq!(pages_by_node(&host, MANY_PAGES), [0, MANY_PAGES as usize]);
    let last = reports.last().unwrap();
    assert_eq!((last.placed_machines, last.moved_bytes), (1, MANY_PAGES * PAGE));
    assert_eq!((last.failed_machines, last.failed_undos), (0, 0));
}

#[test]
fn monitors_are_asked_for_each_plan() {
    let fake = host_with_remote_machine(MANY_PAGES);
    start_machine(&fake, 8, 100, "2-3");
    let asked = AtomicU64::new(0);
    let host = FaultyHost::new(&fake, |path| {
        asked.fetch_add(u64::from(path.ends_with("#qemu_monitor")), Ordering::Relaxed);
        None
    });
    let reports = run_checks(&host, 4);
    assert_eq!(plan_results(&reports).len(), 1, "{reports:?}");
    assert_eq!(asked.load(Ordering::Relaxed), 2, "each machine once");
}

#[test]
fn progress_of_a_placement_is_reported() {
    let reports = run_checks(&host_with_remote_machine(MANY_PAGES), 2);
    let activities: Vec<String> = reports.iter().map(|report| report.activity.describe()).collect();
    let progress = |moved: &str| format!("{moved} of 39.1 MiB moved, now vm-7");
    // Batches end at multiples of 32 MiB, and the memory begins at 1 MiB.
    let (planning, placing) = (KeeperActivity::Planning.describe(), ["0 B", "31.0 MiB", "39.1 MiB"]);
    let mut expected = vec![SETTLING.to_owned(), planning];
    expected.extend(placing.map(progress));
    expected.push(RECENT_PLAN.to_owned());
    assert_eq!(activities, expected);
}

#[test]
fn keeper_that_only_advises_moves_nothing() {
    let host = host_with_remote_machine(MANY_PAGES);
    let advises = KeeperSettings { acts: false, ..settings() };
    let reports = run(&host, advises, &KeeperControl::default(), |checks| checks < 3);
    assert_eq!(plan_results(&reports), [PLACED.replace("placed 1", "would place 1").replace(": 39.1 MiB moved", "")]);
    assert_eq!(pages_by_node(&host, MANY_PAGES), [MANY_PAGES as usize, 0]);
}

#[test]
fn imbalance_that_does_not_pay_is_left() {
    // Its remote reads cost 720 CPU s/h, less than a first move must gain.
    let host = host_with_remote_machine(MANY_PAGES);
    let prices = OperatorPrices { min_gain: 1000.0 / FIRST_MOVE_GAIN_SHARE, ..OperatorPrices::default() };
    let limits = PlanLimits { prices, ..PlanLimits::default() };
    let reports = run(&host, KeeperSettings { limits, ..settings() }, &KeeperControl::default(), |checks| checks < 3);
    assert_eq!(plan_results(&reports), [ALL_WELL_PLACED]);
    assert_eq!(pages_by_node(&host, MANY_PAGES), [MANY_PAGES as usize, 0]);
}

/// Plans a machine on node 0 whose pages equal those of a larger machine on node 1. Twice as many other pages of it are
/// merged on node 0. KSM merges within nodes. Returns the report after the plan, and its pages on each node.
fn plan_beside_equal_pages(cpus_per_gib: f64) -> (KeeperReport, [usize; 2]) {
    let host = host(2);
    host.put_setting("merge_across_nodes", "0");
    let (merged, larger) = (2 * MANY_PAGES, 8);
    start_machine(&host, VM, MANY_PAGES + merged, "0-3");
    host.map_pages(VM, (range(MANY_PAGES).end, range(MANY_PAGES + merged).end), MERGED_PAGE_NAME, true);
    host.put_pages_on_node(VM, range(MANY_PAGES), 0);
    start_machine(&host, larger, 4 * MANY_PAGES, "2-3");
    host.put_pages_on_node(larger, range(4 * MANY_PAGES), 1);
    let sketches = |pages: u64| {
        let sketch = Sketch::from_contents(Pages(pages), (0..pages).map(Fingerprint));
        let contents = ContentSketches { all: sketch.clone(), unmerged: sketch };
        (TrustDomain::Host, Arc::new(contents))
    };
    let process = |pid: u32| observe::process(&host, &*host.open(Pid(pid)).unwrap()).unwrap().id;
    let control = KeeperControl::default();
    control.set_contents([(process(VM), sketches(MANY_PAGES)), (process(larger), sketches(4 * MANY_PAGES))].into());
    let prices = OperatorPrices { cpus_per_gib: Some(cpus_per_gib), ..OperatorPrices::default() };
    let limits = PlanLimits { prices, ..PlanLimits::default() };
    let reports = run(&host, KeeperSettings { limits, ..settings() }, &control, |checks| checks < 3);
    (reports.last().unwrap().clone(), pages_by_node(&host, MANY_PAGES))
}

#[test]
fn machine_comes_to_equal_pages_if_memory_is_worth_the_remote_reads() {
    let (report, pages) = plan_beside_equal_pages(100.0);
    assert_eq!(pages, [0, MANY_PAGES as usize], "{report:?}");
    let gain = report.planned_gain;
    assert!(gain.memory > 10_000.0 && gain.remote_reads < -400.0 && gain.cpu < 0.0, "{gain:?}");
    assert_eq!((report.placed_machines, report.placed_gain), (1, gain));
}

#[test]
fn machine_stays_away_from_equal_pages_if_remote_reads_cost_more() {
    let (report, pages) = plan_beside_equal_pages(1.0);
    assert_eq!(pages, [MANY_PAGES as usize, 0], "{report:?}");
    // It is bound to the node of its memory.
    assert_eq!((report.placed_machines, report.planned_gain), (1, PricedGain::default()));
    let result = report.last_plan.unwrap().result;
    assert!(result.starts_with("placed 1 of 1 virtual machine: 0 B moved"), "{result}");
}

#[test]
fn machine_stays_near_its_merged_memory() {
    // Node 0 has no room for the remote memory of the machine. On node 1 its merged memory would be remote.
    let host = host(2);
    let merged = 20_000;
    start_machine(&host, VM, MANY_PAGES + merged, "0-3");
    host.put_pages_on_node(VM, range(MANY_PAGES), 1);
    host.map_pages(VM, (range(MANY_PAGES).end, range(MANY_PAGES + merged).end), MERGED_PAGE_NAME, true);
    host.put_node(0, "0-1", 0);
    assert_eq!(plan_results(&run_checks(&host, 3)), [ALL_WELL_PLACED]);
    assert_eq!(pages_by_node(&host, MANY_PAGES), [0, MANY_PAGES as usize]);
    assert_eq!(host.read(&format!("proc/{VM}/task/{VM}/cpus")).unwrap(), b"0-3");
}

/// Plans a machine that runs on node 1, and has no memory but merged pages of node 0. Returns the results of the plans.
fn plan_with_remote_merges(cpus_per_gib: f64) -> Vec<String> {
    let host = host(2);
    start_machine(&host, VM, MANY_PAGES, "2-3");
    host.map_pages(VM, (START, range(MANY_PAGES).end), MERGED_PAGE_NAME, true);
    let prices = OperatorPrices { cpus_per_gib: Some(cpus_per_gib), ..OperatorPrices::default() };
    let limits = PlanLimits { prices, ..PlanLimits::default() };
    // Its threads may run on node 1 only, so it does not come to its merged pages.
    let reports = run(&host, KeeperSettings { limits, ..settings() }, &KeeperControl::default(), |checks| checks < 3);
    plan_results(&reports).into_iter().map(str::to_owned).collect()
}

#[test]
fn merges_whose_remote_reads_cost_more_than_their_memory_are_reported() {
    // All its reads are remote: 720 CPU s/h. 39.1 MiB are worth 137 CPU s/h at a CPU for each GiB.
    let expected = "the virtual machine is well placed; merged pages of 1 virtual machine on other nodes cost more remote \
                    reads than they save memory, most those of process 7, by 583 CPU s/h: unmerge it, or set \
                    merge_across_nodes=0";
    assert_eq!(plan_with_remote_merges(1.0), [expected]);
    assert_eq!(plan_with_remote_merges(10.0), [ALL_WELL_PLACED]);
}

#[test]
fn imbalance_that_pays_is_planned_again() {
    let host = host_with_remote_machine(MANY_PAGES);
    let checks_until_replan = (REPLAN_INTERVAL.as_secs() / INTERVAL.as_secs()) as usize;
    let reports = run(&host, settings(), &KeeperControl::default(), |checks| {
        if checks == 3 {
            host.put_pages_on_node(VM, range(MANY_PAGES), 0);
        }
        checks < 3 + checks_until_replan
    });
    assert_eq!(plan_results(&reports), [PLACED, PLACED]);
    let times: Vec<SystemTime> = reports.iter().filter_map(|report| Some(report.last_plan.as_ref()?.time)).collect();
    let between = times[times.len() - 1].duration_since(times[0]).unwrap();
    assert!(between >= REPLAN_INTERVAL, "{between:?}");
    assert_eq!(pages_by_node(&host, MANY_PAGES), [0, MANY_PAGES as usize]);
    assert_eq!(reports.last().unwrap().placed_machines, 2);
}

#[test]
fn memory_pressure_delays_the_plan() {
    let host = host_with_remote_machine(MANY_PAGES);
    set_pressure(&host, 40);
    let reports = run(&host, settings(), &KeeperControl::default(), |checks| {
        if checks == 4 {
            assert_eq!(pages_by_node(&host, MANY_PAGES), [MANY_PAGES as usize, 0]);
            set_pressure(&host, 0);
        }
        checks < 5
    });
    assert_eq!(idle_reasons(&reports), [PRESSURE, PRESSURE, PRESSURE, PRESSURE, RECENT_PLAN]);
    assert_eq!(plan_results(&reports), [PLACED]);
}

#[test]
fn nothing_is_placed_beside_a_rival() {
    let host = host_with_remote_machine(MANY_PAGES);
    host.put_file(RIVAL_FILE, "9");
    let end_of_rival = |checks| {
        if checks == 6 {
            host.put_file(RIVAL_FILE, "");
        }
        checks < 12
    };
    let reports = run(&host, settings(), &KeeperControl::default(), end_of_rival);
    assert_eq!(idle_reasons(&reports)[..6], [RIVAL; 6]);
    assert_eq!(plan_results(&reports), [PLACED]);
    assert_eq!(pages_by_node(&host, MANY_PAGES), [0, MANY_PAGES as usize]);
}

#[test]
fn rival_does_not_keep_the_keeper_from_advising() {
    let host = host_with_remote_machine(MANY_PAGES);
    host.put_file(RIVAL_FILE, "9");
    let advising = KeeperSettings { acts: false, ..settings() };
    let reports = run(&host, advising, &KeeperControl::default(), |checks| checks < 6);
    assert!(plan_results(&reports)[0].starts_with("would place 1 of 1 virtual machine"), "{reports:?}");
}

#[test]
fn memory_pressure_during_a_placement_stops_it() {
    let fake = host_with_remote_machine(MANY_PAGES);
    let busy = FaultyHost::new(&fake, |path| {
        if path.ends_with("#move_pages") {
            set_pressure(&fake, 40);
        }
        None
    });
    let reports = run_checks(&busy, 2);
    let expected =
        format!("{}, then stopped, because tasks of the host wait for memory", PLACED.replace("39.1", "31.0"));
    assert_eq!(plan_results(&reports), [expected]);
    let last = reports.last().unwrap();
    assert_eq!((last.placed_machines, last.failed_machines), (1, 1));
    assert_eq!(last.activity, KeeperActivity::Idle(RETRY.to_owned()));
}

#[test]
fn pause_delays_a_plan_and_resume_goes_on_at_once() {
    let host = host_with_remote_machine(MANY_PAGES);
    let control = KeeperControl::default();
    let mut resumed = None;
    let reports = run(&host, settings(), &control, |checks| {
        match checks {
            1 => control.set_paused(true),
            3 => {
                assert_eq!(pages_by_node(&host, MANY_PAGES), [MANY_PAGES as usize, 0]);
                control.set_paused(false);
                resumed = Some(host.unix_time());
            }
            _ => {}
        }
        checks < 4
    });
    let paused = "paused by an operator";
    assert_eq!(idle_reasons(&reports), [SETTLING, paused, paused, RECENT_PLAN]);
    assert_eq!(plan_results(&reports), [PLACED]);
    let planned = reports.last().unwrap().last_plan.as_ref().unwrap().time;
    assert!(planned.duration_since(resumed.unwrap()).unwrap() < INTERVAL, "{reports:?}");
}

/// Pauses a placement in its first batch, and resumes it after the third check. Returns the reports and the number of
/// pages on each node during the pause.
fn interrupt_placement(is_undo_refused: bool) -> (Vec<KeeperReport>, [usize; 2]) {
    let fake = host_with_remote_machine(MANY_PAGES);
    let (control, moves) = (KeeperControl::default(), AtomicU64::new(0));
    let host = FaultyHost::new(&fake, |path| {
        if !path.ends_with("#move_pages") {
            return None;
        }
        let earlier_moves = moves.fetch_add(1, Ordering::Relaxed);
        if earlier_moves == 0 {
            control.set_paused(true);
        }
        (earlier_moves == 1 && is_undo_refused).then_some(InjectedFault::Absent(Absent::Denied))
    });
    let mut pages_during_pause = [0; 2];
    let reports = run(&host, settings(), &control, |checks| {
        if checks == 3 {
            pages_during_pause = pages_by_node(&fake, MANY_PAGES);
            control.set_paused(false);
        }
        checks < 4
    });
    assert_eq!(idle_reasons(&reports), [SETTLING, RETRY, "paused by an operator", RECENT_PLAN]);
    assert_eq!(pages_by_node(&fake, MANY_PAGES), [0, MANY_PAGES as usize], "it went on");
    (reports, pages_during_pause)
}

#[test]
fn placement_that_a_pause_interrupts_is_undone_and_made_again() {
    let (reports, pages_during_pause) = interrupt_placement(false);
    assert_eq!(plan_results(&reports), ["interrupted, and undone", PLACED]);
    assert_eq!(pages_during_pause, [MANY_PAGES as usize, 0]);
    let last = reports.last().unwrap();
    assert_eq!((last.placed_machines, last.failed_machines, last.failed_undos), (1, 0, 0));
}

#[test]
fn failed_undo_is_counted() {
    let (reports, pages_during_pause) = interrupt_placement(true);
    let results = plan_results(&reports);
    assert_eq!(results.len(), 2);
    assert!(results[0].starts_with("interrupted; 1 changes could not be undone, the first: "), "{results:?}");
    assert!(pages_during_pause[1] > 0, "the first batch was not undone");
    let last = reports.last().unwrap();
    assert_eq!((last.placed_machines, last.failed_undos), (1, 1));
}

#[test]
fn failed_undo_of_a_killed_command_is_counted_once() {
    let fake = host_with_remote_machine(MANY_PAGES);
    let process = fake.open(Pid(VM)).unwrap().id();
    let (killed, directory) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (mut session, ..) = Session::begin(&fake, killed.path(), ResourceClass::MemoryPlacement).unwrap();
    let first_page = Action::MovePages { process, ranges: vec![range(1)], node: 1 };
    session.apply(&first_page, ChangeLifetime::Temporary).unwrap();
    // The journal as the command would leave it.
    for file in fs::read_dir(killed.path()).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), directory.path().join(file.file_name())).unwrap();
    }
    drop(session);
    let undos = AtomicU64::new(0);
    let host = FaultyHost::new(&fake, |path| {
        // Three plans try to undo it. The first two fail.
        let is_refused = path.ends_with("#move_pages") && undos.fetch_add(1, Ordering::Relaxed) < 2;
        is_refused.then_some(InjectedFault::Absent(Absent::Denied))
    });
    let settings = KeeperSettings { replan_interval: INTERVAL, ..settings() };
    let reports = run_in(directory.path(), &host, settings, &KeeperControl::default(), |checks| checks < 6);
    assert!(undos.load(Ordering::Relaxed) > 2, "{reports:?}");
    assert_eq!(reports.last().unwrap().failed_undos, 1, "{reports:?}");
}
