//! Steps of a merge over a host in memory.

use super::*;
use crate::decide::plan::Guest;
use pagefold_base::Pid;
use pagefold_base::domain::Domain;
use pagefold_base::process::Process;
use pagefold_host::fake::{Fake, Trouble};

/// A guest with these backends, whole.
fn guest(pid: u32, backends: &[&str]) -> Target {
    let process = Process::absent(ProcessId { pid: Pid(pid), start_time: 1 }, &Absent::Denied);
    let backends = backends.iter().map(|&backend| backend.to_owned()).collect();
    let way = Way::Guest(Guest { socket: "/run/qmp".into(), backends, memory: Vec::new() });
    Target { process, domain: Domain::Host, ranges: Vec::new(), huge: Bytes::ZERO, way }
}

/// Enroll all of a plan: whether any of it was taken, and what was not.
fn enrol(host: &Fake, plan: &Plan) -> (bool, Vec<Missed>) {
    let directory = tempfile::tempdir().unwrap();
    let (mut session, ..) = Session::begin(host, directory.path()).unwrap();
    let (progress, stop, started) = (Progress::default(), AtomicBool::new(false), Instant::now());
    let options = Options { share: 1.0, deadline: None, watch: Duration::ZERO, after: After::PutBack };
    let mut work = Work {
        plan,
        trial: &mut Trial::new(host),
        withdrawn: Pages::ZERO,
        withdrawn_from: BTreeSet::new(),
        found_fleeting: started,
        enrolled: false,
        unskipping: false,
        ksmd: Ksmd::find(host),
        gauge: Gauge::new(host, plan),
        ksmd_before: Err(Absent::NotOnThisKernel),
        pace: Pace::new(1.0),
        session: &mut session,
        options: &options,
        started,
        progress: &progress,
        stop: &stop,
        timeline: Vec::new(),
        missed: Vec::new(),
    };
    work.enrol(false).unwrap();
    let told = (work.enrolled, work.missed);
    session.done().unwrap();
    told
}

#[test]
fn each_hung_guest_is_asked_for_one_backend_when_it_is_enrolled() {
    let host = Fake::booted();
    [7, 8].into_iter().for_each(|pid| host.map(pid, (0x1000, 0x3000), "", false));
    let backends = ["/objects/a", "/objects/b"];
    let plan = Plan { whole: true, targets: vec![guest(7, &backends), guest(8, &backends)], ..Plan::default() };
    host.trouble(Some(Trouble::GuestsHang));
    let (enrolled, missed) = enrol(&host, &plan);
    assert_eq!(host.written(), ["/objects/a of 7=true", "/objects/a of 8=true"]);
    assert!(!enrolled && missed.len() == 2, "{missed:?}");
    host.trouble(None);
    let (enrolled, missed) = enrol(&host, &plan);
    assert_eq!(host.written().len(), 2 + 4);
    assert!(enrolled && missed.is_empty(), "{missed:?}");
}
