//! Which process is visited, and by how many tracers: locks, and process numbers that are used again.

use super::*;
#[cfg(feature = "fault-points")]
use pagefold_sys::lock::is_locked_beside;
use pagefold_sys::lock::lock_for_reading;

#[test]
fn a_lock_of_the_target_on_its_own_maps_holds_nothing_up() {
    if !possible() {
        return;
    }
    let victim = Victim::start("locked_maps");
    done(victim.pid(), &["mergeable", "--cycles", "5"]);
    // A tracer of another thread than the one to visit may use the same stack.
    let tasks = fs::read_dir(format!("/proc/{}/task", victim.pid())).expect("it lives");
    let tids = tasks.flatten().map(|task| task.file_name().to_string_lossy().parse::<i32>().expect("a number"));
    let other = tids.filter(|&tid| tid != victim.pid().cast_signed()).max().expect("it has two threads");
    ptrace::seize(Pid::from_raw(other), ptrace::Options::empty()).expect("we may trace it");
    assert!(refused(victim.pid(), &["mergeable"]).contains("traces it"));
    ptrace::interrupt(Pid::from_raw(other)).expect("it can be interrupted");
    nix::sys::wait::waitpid(Pid::from_raw(other), Some(nix::sys::wait::WaitPidFlag::__WALL)).expect("it stops");
    ptrace::detach(Pid::from_raw(other), None).expect("it is let go");
    done(victim.pid(), &["mergeable"]);
    victim.finish();
    // A helper of the target may have locked it as well: this test is no Pagefold.
    let victim = Victim::start("futex");
    let maps = fs::File::open(format!("/proc/{}/maps", victim.pid())).expect("it lives");
    maps.lock().expect("no other process locks it");
    done(victim.pid(), &["mergeable"]);
    done(victim.pid(), &["unmergeable"]);
    assert_eq!(enrolled(victim.pid()), 0);
    maps.unlock().expect("it is ours");
    victim.finish();
}

/// It began beside the lock of another program, which has unlocked since.
#[test]
fn a_visit_without_the_lock_is_seen_by_one_that_has_it() {
    if !possible() {
        return;
    }
    let victim = Victim::start("futex");
    let tasks = fs::read_dir(format!("/proc/{}/task", victim.pid())).expect("it lives");
    let tids = tasks.flatten().map(|task| task.file_name().to_string_lossy().parse::<i32>().expect("a number"));
    let other = Pid::from_raw(tids.filter(|&tid| tid != victim.pid().cast_signed()).max().expect("it has two threads"));
    ptrace::seize(other, ptrace::Options::empty()).expect("we may trace it");
    // A debugger at another thread is in nobody's way.
    let beside_debugger = advise(victim.pid(), &["mergeable"], "");
    let maps = fs::File::open(format!("/proc/{}/maps", victim.pid())).expect("it lives");
    let locked = lock_for_reading(&maps);
    let beside_visit = advise(victim.pid(), &["unmergeable"], "");
    // Before anything can fail: the end of a process is not told while a thread of it is traced.
    ptrace::interrupt(other).expect("it can be interrupted");
    nix::sys::wait::waitpid(other, Some(nix::sys::wait::WaitPidFlag::__WALL)).expect("it stops");
    ptrace::detach(other, None).expect("it is let go");
    assert!(beside_debugger.status.success(), "{}", text(&beside_debugger.stderr));
    assert!(locked.expect("it can be asked"), "it can be locked");
    assert!(text(&beside_visit.stderr).contains("traces it"), "{}", text(&beside_visit.stdout));
    done(victim.pid(), &["unmergeable"]);
    victim.finish();
}

#[cfg(feature = "fault-points")]
#[test]
fn a_visit_without_the_lock_leaves_a_mark() {
    if !possible() {
        return;
    }
    let victim = Victim::start("futex");
    let maps = fs::File::open(format!("/proc/{}/maps", victim.pid())).expect("it lives");
    maps.lock().expect("no other process locks it");
    let mut visit = Command::new(lab());
    visit.args(["advise", &victim.pid().to_string(), "mergeable"]).env("PAGEFOLD_FAULT_POINT", "stop 1 thread chosen");
    let mut visit = visit.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the lab runs");
    let stat = || fs::read_to_string(format!("/proc/{}/stat", visit.id())).unwrap_or_default();
    eventually("it stops", || stat().rsplit(')').next().is_some_and(|rest| rest.starts_with(" T")));
    assert!(is_locked_beside(&maps).expect("it is asked"));
    kill(Pid::from_raw(visit.id().cast_signed()), Signal::SIGCONT).expect("it lives");
    assert!(visit.wait().expect("its end").success());
    assert!(!is_locked_beside(&maps).expect("it is asked"));
    victim.finish();
}

#[cfg(feature = "fault-points")]
#[test]
fn a_lock_of_another_pagefold_is_respected_and_told() {
    if !possible() {
        return;
    }
    let victim = Victim::start("futex");
    let mut first = Command::new(lab());
    first.args(["advise", &victim.pid().to_string(), "mergeable"]).env("PAGEFOLD_FAULT_POINT", "stop 1 thread chosen");
    let mut first = first.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the lab runs");
    let stat = || fs::read_to_string(format!("/proc/{}/stat", first.id())).unwrap_or_default();
    eventually("it stops", || stat().rsplit(')').next().is_some_and(|rest| rest.starts_with(" T")));
    let said = refused(victim.pid(), &["mergeable"]);
    assert!(said.contains(&format!("process {} has locked /proc/{}/maps", first.id(), victim.pid())), "{said}");
    kill(Pid::from_raw(first.id().cast_signed()), Signal::SIGCONT).expect("it lives");
    assert!(first.wait().expect("its end").success());
    victim.finish();
}

#[cfg(feature = "fault-points")]
#[test]
fn a_process_with_the_number_of_one_that_ended_is_left_alone() {
    const LAST_PID: &str = "/proc/sys/kernel/ns_last_pid";
    if !possible() {
        return;
    }
    if fs::OpenOptions::new().write(true).open(LAST_PID).is_err() {
        return println!("skipped: needs a writable {LAST_PID} (CONFIG_CHECKPOINT_RESTORE)");
    }
    // The injector knows its target and has chosen a thread of it when that ends.
    let mut first = Victim::start("futex");
    let pid = first.pid();
    let mut injector = Command::new(lab());
    injector.args(["advise", &pid.to_string(), "mergeable"]).env("PAGEFOLD_FAULT_POINT", "stop 1 thread chosen");
    let injector = injector.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the lab runs");
    let injector_pid = Pid::from_raw(injector.id().cast_signed());
    let stat = || fs::read_to_string(format!("/proc/{injector_pid}/stat")).unwrap_or_default();
    eventually("the injector stops", || stat().rsplit(')').next().is_some_and(|rest| rest.starts_with(" T")));
    first.child.kill().expect("it lives");
    first.child.wait().expect("its end");
    // Other processes of this machine may come first, and keep the number for a while.
    let deadline = Instant::now() + Duration::from_secs(20);
    let second = loop {
        assert!(Instant::now() < deadline, "number {pid} is not to be had again");
        fs::write(LAST_PID, (pid - 1).to_string()).expect("it is writable");
        let second = Victim::start("futex");
        if second.pid() == pid {
            break second;
        }
    };
    kill(injector_pid, Signal::SIGCONT).expect("it lives");
    let output = injector.wait_with_output().expect("its end");
    let said = text(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("has ended"), "{:?}: {said}", output.status);
    assert_eq!((enrolled(pid), second.status("TracerPid")), (0, "0".to_owned()));
    second.finish();
}
