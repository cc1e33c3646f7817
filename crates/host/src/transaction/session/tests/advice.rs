//! Advice over a host in memory: it comes back to what it was given about, and to nothing else.

use super::*;
use crate::fake::{State, Trouble};
use pagefold_base::Pid;
use std::mem;
use std::sync::Mutex;

const PROCESS: ProcessId = ProcessId { pid: Pid(7), start_time: 1 };

fn advise(advice: Advice, ranges: &[(u64, u64)]) -> Action {
    let ranges = ranges.iter().map(|&(start, end)| AddressRange { start, end }).collect();
    Action::Advise { process: PROCESS, advice, ranges }
}

/// A host with a process of two mappings, of which the first is enrolled in part.
fn host() -> Fake {
    let host = Fake::booted();
    host.put("pages_to_scan", "777");
    host.map(7, (0x10000, 0x20000), "", true);
    host.map(7, (0x20000, 0x24000), "", false);
    host.map(7, (0x40000, 0x44000), "[heap]", true);
    host
}

/// A session that was killed after it had withdrawn ranges of both mappings.
fn killed(host: &Fake, directory: &Path) {
    let mut session = begin(host, directory);
    let withdraw = advise(Advice::Unmergeable, &[(0x12000, 0x14000), (0x1e000, 0x22000), (0x40000, 0x44000)]);
    session.apply(&withdraw, Stays::ForNow).unwrap();
    kill_now(session, directory);
}

/// The regions of a process that are enrolled.
fn enrolled(host: &Fake) -> Vec<(u64, u64)> {
    let regions = host.regions(PROCESS.pid).unwrap().into_iter();
    regions.filter(|&(.., enrolled)| enrolled).map(|(range, ..)| (range.start, range.end)).collect()
}

/// Every step of a session is a question to the host, an action or a write of the journal. Killed after any of them, it
/// leaves a journal from which the next session puts everything back.
#[test]
fn killed_after_any_step_everything_comes_back() {
    let (fake, directory) = (host(), tempfile::tempdir().unwrap());
    let before = fake.state();
    let journal = directory.path().join(SESSION);
    // What there was at each question or action: the actions are the only thing that changes the host, so that right
    // after one there is what the next question finds, with the journal that this one found.
    let moments: Mutex<Vec<(State, Option<Vec<u8>>)>> = Mutex::default();
    let look = |_: &str| {
        moments.lock().unwrap().push((fake.state(), fs::read(&journal).ok()));
        None
    };
    let host = Faulty::new(&fake, look);
    let mut session = begin(&host, directory.path());
    session.set(&busy()).unwrap();
    let withdraw = advise(Advice::Unmergeable, &[(0x12000, 0x14000), (0x1e000, 0x22000)]);
    session.apply(&withdraw, Stays::ForNow).unwrap();
    session.apply(&advise(Advice::Mergeable, &[(0x21000, 0x23000)]), Stays::OnceDone).unwrap();
    session.apply(&Action::MergeAny { process: PROCESS, on: true }, Stays::ForNow).unwrap();
    session.set(&advised()).unwrap();
    assert!(session.set(&settings(&[(Setting::MaxPageSharing, "1")])).is_err());
    session.set(&busy()).unwrap();
    assert_eq!(session.stops().len(), 3);
    assert_eq!(session.finish().unwrap(), Vec::new());
    assert_eq!(session.stops().len(), 7);
    drop(session);
    let mut moments = mem::take(&mut *moments.lock().unwrap());
    moments.push((fake.state(), None));
    let mut changed = 0;
    let mut last = None;
    for (step, (state, journal)) in moments.into_iter().enumerate() {
        for left in [&last, &journal] {
            let (host, directory) = (Fake::of(&state), tempfile::tempdir().unwrap());
            if let Some(left) = left {
                fs::write(directory.path().join(SESSION), left).unwrap();
            }
            let (session, _, remains) = Session::begin(&host, directory.path()).unwrap();
            assert_eq!(remains, Vec::new(), "step {step}");
            drop(session);
            assert_same(&host.state(), &before, step);
            assert!(!directory.path().join(SESSION).exists(), "step {step}");
            changed += usize::from(state != before);
        }
        last = journal;
    }
    assert!(changed > 50, "{changed}");
}

/// What a session is for stays once it is done, and not before.
#[test]
fn what_is_enrolled_stays_once_that_is_done() {
    let enrol = advise(Advice::Mergeable, &[(0x21000, 0x23000)]);
    let before = enrolled(&host());
    for done in [false, true] {
        let (host, directory) = (host(), tempfile::tempdir().unwrap());
        let mut session = begin(&host, directory.path());
        session.apply(&enrol, Stays::OnceDone).unwrap();
        assert_ne!(enrolled(&host), before);
        if done {
            session.done().unwrap();
            assert!(!directory.path().join(SESSION).exists());
        } else {
            kill_now(session, directory.path());
            assert_eq!(Session::begin(&host, directory.path()).unwrap().1.len(), 1);
        }
        assert_eq!(enrolled(&host) == before, !done);
    }
}

#[test]
fn what_has_merged_is_not_withdrawn_where_there_is_no_memory_for_it() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    let before = enrolled(&host);
    let mut session = begin(&host, directory.path());
    session.apply(&advise(Advice::Mergeable, &[(0x21000, 0x23000)]), Stays::OnceDone).unwrap();
    host.file("proc/7/ksm_merging_pages", "2\n");
    host.free(4);
    kill_now(session, directory.path());
    let (session, _, remains) = Session::begin(&host, directory.path()).unwrap();
    assert!(matches!(&remains[..], [one] if one.kept && one.why.contains("no memory for copies")), "{remains:?}");
    assert_ne!(enrolled(&host), before);
    drop(session);
    host.free(5_000_000);
    assert_eq!(Session::begin(&host, directory.path()).unwrap().1.len(), 1, "the next one tries again");
    assert_eq!(enrolled(&host), before);
}

#[test]
fn what_has_merged_is_not_withdrawn_while_memory_is_waited_for() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    let before = enrolled(&host);
    let mut session = begin(&host, directory.path());
    session.apply(&advise(Advice::Mergeable, &[(0x21000, 0x23000)]), Stays::OnceDone).unwrap();
    host.free(5_000_000);
    let waits = |percent: &str| {
        let line = |word: &str| format!("{word} avg10={percent} avg60=0.00 avg300=0.00 total=1\n");
        host.file("proc/pressure/memory", &(line("some") + &line("full")));
    };
    waits("10.00");
    host.file("proc/7/ksm_merging_pages", "2\n");
    kill_now(session, directory.path());
    let (session, _, remains) = Session::begin(&host, directory.path()).unwrap();
    assert!(matches!(&remains[..], [one] if one.kept && one.why.contains("memory is short")), "{remains:?}");
    assert_ne!(enrolled(&host), before);
    drop(session);
    waits("9.90");
    assert_eq!(Session::begin(&host, directory.path()).unwrap().1.len(), 1, "the next one tries again");
    assert_eq!(enrolled(&host), before);

    // What is done for the same process meanwhile is not taken back with it.
    waits("10.00");
    let mut session = begin(&host, directory.path());
    session.apply(&advise(Advice::Mergeable, &[(0x21000, 0x23000)]), Stays::OnceDone).unwrap();
    kill_now(session, directory.path());
    let (mut session, ..) = Session::begin(&host, directory.path()).unwrap();
    session.apply(&advise(Advice::Mergeable, &[(0x23000, 0x24000)]), Stays::OnceDone).unwrap();
    session.done().unwrap();
    drop(session);
    waits("0.00");
    assert_eq!(Session::begin(&host, directory.path()).unwrap().1, []);
    assert_ne!(enrolled(&host), before);
}

/// Before 6.14 `ksm_stat` does not tell who is enrolled whole.
#[test]
fn who_was_enrolled_whole_before_stays_so_on_any_kernel() {
    let whole = |on| Action::MergeAny { process: PROCESS, on };
    for (before, tells) in [(true, true), (true, false), (false, true), (false, false)] {
        let (fake, directory) = (host(), tempfile::tempdir().unwrap());
        fake.apply(&whole(before)).unwrap();
        fake.file("proc/7/ksm_merging_pages", "0\n");
        let was = fake.state();
        let hidden =
            |path: &str| (!tells && path == "proc/7/ksm_stat").then(|| Fault::Replaced(b"ksm_rmap_items 0\n".to_vec()));
        let host = Faulty::new(&fake, hidden);
        let mut session = begin(&host, directory.path());
        session.apply(&whole(true), Stays::OnceDone).unwrap();
        if before {
            assert!(!directory.path().join(SESSION).exists(), "nothing changes, and nothing is to be put back");
            drop(session);
        } else {
            kill_now(session, directory.path());
        }
        let (_, undone, remains) = Session::begin(&host, directory.path()).unwrap();
        assert_eq!((undone.len(), remains), (usize::from(!before), Vec::new()), "{before} {tells}");
        assert_eq!(fake.state(), was, "{before} {tells}");
    }
}

/// Nothing is enrolled that could not be put back.
#[test]
fn who_does_not_say_whether_he_is_enrolled_whole_is_left_alone() {
    let (fake, directory) = (host(), tempfile::tempdir().unwrap());
    let before = fake.state();
    let silent = |path: &str| (path == "proc/7#ask_merge_any").then_some(Fault::Absent(Absent::Denied));
    let host = Faulty::new(&fake, silent);
    let mut session = begin(&host, directory.path());
    let refused = session.apply(&Action::MergeAny { process: PROCESS, on: true }, Stays::OnceDone);
    assert!(matches!(refused, Err(Error::Refused(Refusal::Denied(_)))), "{refused:?}");
    assert_eq!(fake.state(), before);
    assert_eq!(session.finish().unwrap(), Vec::new());
}

/// The same settings and memory; a process that was never asked says nothing, which is as if it said no.
fn assert_same(now: &State, before: &State, step: usize) {
    let mut files = now.0.clone();
    if files.get("proc/7/ksm_stat").is_some_and(|stat| stat == "ksm_merge_any: no\n") {
        files.remove("proc/7/ksm_stat");
    }
    assert_eq!((&files, &now.1), (&before.0, &before.1), "step {step}");
}

#[test]
fn what_was_mapped_anew_is_left_alone() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    killed(&host, directory.path());
    // Something larger in place of the first mapping, nothing in place of the heap.
    host.map(7, (0x8000, 0x24000), "", false);
    host.unmap(7, (0x40000, 0x44000));
    let (_, _, remains) = Session::begin(&host, directory.path()).unwrap();
    assert_eq!(enrolled(&host), []);
    assert_eq!(remains.len(), 1, "{remains:?}");
    assert_eq!(remains[0].undo, advise(Advice::Mergeable, &[(0x12000, 0x14000), (0x1e000, 0x20000)]));
    assert!(!remains[0].kept);
    begin(&host, directory.path());
}

#[test]
fn what_is_smaller_than_the_range_is_another_mapping() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    killed(&host, directory.path());
    host.unmap(7, (0x10000, 0x24000));
    host.map(7, (0x13000, 0x14000), "", false);
    host.map(7, (0x1e000, 0x20000), "", false);
    let (_, _, remains) = Session::begin(&host, directory.path()).unwrap();
    assert_eq!(remains.len(), 1, "{remains:?}");
    assert_eq!(remains[0].undo, advise(Advice::Mergeable, &[(0x12000, 0x14000)]));
    // One that lies within what was there cannot be told from what is left of it.
    assert_eq!(enrolled(&host), [(0x1e000, 0x20000), (0x40000, 0x44000)]);
}

#[test]
fn the_heap_grows_and_is_the_same() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    killed(&host, directory.path());
    host.map(7, (0x44000, 0x60000), "[heap]", false);
    let (_, _, remains) = Session::begin(&host, directory.path()).unwrap();
    assert_eq!(remains, Vec::new());
    assert_eq!(enrolled(&host), [(0x10000, 0x20000), (0x40000, 0x44000)]);
}

#[test]
fn what_is_missed_is_tried_again() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    let before = host.state();
    let mut session = begin(&host, directory.path());
    session.apply(&advise(Advice::Unmergeable, &[(0x12000, 0x14000), (0x1e000, 0x20000)]), Stays::ForNow).unwrap();
    host.trouble(Some(Trouble::Misses(AddressRange { start: 0x13000, end: 0x1f000 })));
    let remains = session.finish().unwrap();
    assert_eq!(remains.len(), 1, "{remains:?}");
    assert_eq!(remains[0].undo, advise(Advice::Mergeable, &[(0x13000, 0x14000), (0x1e000, 0x1f000)]));
    assert!(remains[0].kept);
    drop(session);
    host.trouble(None);
    let (_, undone, remains) = Session::begin(&host, directory.path()).unwrap();
    assert_eq!((undone.len(), remains), (1, Vec::new()));
    assert_eq!(host.state(), before);
}

#[test]
fn what_was_done_before_it_was_busy_comes_back() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    let before = host.state();
    let mut session = begin(&host, directory.path());
    host.trouble(Some(Trouble::BusyAfter(1)));
    let withdraw = advise(Advice::Unmergeable, &[(0x12000, 0x14000)]);
    assert!(matches!(session.apply(&withdraw, Stays::ForNow), Err(Error::Refused(Refusal::Busy(_)))));
    assert_ne!(host.state(), before);
    host.trouble(None);
    assert_eq!(session.finish().unwrap(), Vec::new());
    assert_eq!(host.state(), before);
}

#[test]
fn what_would_come_back_of_the_dead_is_forgotten() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    let mut session = begin(&host, directory.path());
    session.set(&settings(&[(Setting::Run, "1")])).unwrap();
    session.apply(&advise(Advice::Unmergeable, &[(0x12000, 0x14000)]), Stays::ForNow).unwrap();
    session.forget_ended().unwrap();
    assert_eq!(session.journal.entries.len(), 2, "it lives");
    host.end(PROCESS.pid);
    session.forget_ended().unwrap();
    assert_eq!(session.journal.entries.len(), 1, "settings stay");
    assert_eq!(session.finish().unwrap(), Vec::new());
    assert_eq!(host.value("run"), "0");
}
