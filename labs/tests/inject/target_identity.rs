//! Which process is visited, and by how many tracers: locks, and process numbers that are used again.

use super::*;
#[cfg(feature = "fault-points")]
use pagefold_sys::ofd_lock::is_locked_beside;
use pagefold_sys::ofd_lock::lock_for_reading;

#[test]
fn flock_on_maps_by_the_target_does_not_block() {
    if !can_run() {
        return;
    }
    let victim = SelfCheckingTarget::start("locked_maps");
    advise_successfully(victim.pid(), &["mergeable", "--cycles", "5"]);
    // A tracer of another thread than the one to visit may use the same stack.
    let tasks = fs::read_dir(format!("/proc/{}/task", victim.pid())).expect("it lives");
    let tids = tasks.flatten().map(|task| task.file_name().to_string_lossy().parse::<i32>().expect("a number"));
    let other = tids.filter(|&tid| tid != victim.pid().cast_signed()).max().expect("it has two threads");
    ptrace::seize(Pid::from_raw(other), ptrace::Options::empty()).expect("we may trace it");
    assert!(advise_expecting_refusal(victim.pid(), &["mergeable"]).contains("traces it"));
    ptrace::interrupt(Pid::from_raw(other)).expect("it can be interrupted");
    nix::sys::wait::waitpid(Pid::from_raw(other), Some(nix::sys::wait::WaitPidFlag::__WALL)).expect("it stops");
    ptrace::detach(Pid::from_raw(other), None).expect("it is let go");
    advise_successfully(victim.pid(), &["mergeable"]);
    victim.finish_and_check();
    // A helper of the target may have locked it as well: this test is no Pagefold.
    let victim = SelfCheckingTarget::start("futex");
    let maps = fs::File::open(format!("/proc/{}/maps", victim.pid())).expect("it lives");
    maps.lock().expect("no other process locks it");
    advise_successfully(victim.pid(), &["mergeable"]);
    advise_successfully(victim.pid(), &["unmergeable"]);
    assert_eq!(count_enrolled_regions(victim.pid()), 0);
    maps.unlock().expect("it is ours");
    victim.finish_and_check();
}

/// It began beside the lock of another program, which has unlocked since.
#[test]
fn a_visit_without_the_lock_is_seen_by_one_that_has_it() {
    if !can_run() {
        return;
    }
    let victim = SelfCheckingTarget::start("futex");
    let tasks = fs::read_dir(format!("/proc/{}/task", victim.pid())).expect("it lives");
    let tids = tasks.flatten().map(|task| task.file_name().to_string_lossy().parse::<i32>().expect("a number"));
    let other = Pid::from_raw(tids.filter(|&tid| tid != victim.pid().cast_signed()).max().expect("it has two threads"));
    ptrace::seize(other, ptrace::Options::empty()).expect("we may trace it");
    // A debugger at another thread is in nobody's way.
    let beside_debugger = run_advise(victim.pid(), &["mergeable"], "");
    let maps = fs::File::open(format!("/proc/{}/maps", victim.pid())).expect("it lives");
    let locked = lock_for_reading(&maps);
    let beside_visit = run_advise(victim.pid(), &["unmergeable"], "");
    // Before anything can fail: the end of a process is not told while a thread of it is traced.
    ptrace::interrupt(other).expect("it can be interrupted");
    nix::sys::wait::waitpid(other, Some(nix::sys::wait::WaitPidFlag::__WALL)).expect("it stops");
    ptrace::detach(other, None).expect("it is let go");
    assert!(beside_debugger.status.success(), "{}", lossy_text(&beside_debugger.stderr));
    assert!(locked.expect("it can be asked"), "it can be locked");
    assert!(lossy_text(&beside_visit.stderr).contains("traces it"), "{}", lossy_text(&beside_visit.stdout));
    advise_successfully(victim.pid(), &["unmergeable"]);
    victim.finish_and_check();
}

#[cfg(feature = "fault-points")]
#[test]
fn a_visit_without_the_lock_leaves_a_mark() {
    if !can_run() {
        return;
    }
    let victim = SelfCheckingTarget::start("futex");
    let maps = fs::File::open(format!("/proc/{}/maps", victim.pid())).expect("it lives");
    maps.lock().expect("no other process locks it");
    let mut visit = Command::new(lab_binary());
    visit.args(["advise", &victim.pid().to_string(), "mergeable"]).env("PAGEFOLD_FAULT_POINT", "stop 1 thread chosen");
    let mut visit = visit.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the lab runs");
    let stat = || fs::read_to_string(format!("/proc/{}/stat", visit.id())).unwrap_or_default();
    wait_until("it stops", || stat().rsplit(')').next().is_some_and(|rest| rest.starts_with(" T")));
    assert!(is_locked_beside(&maps).expect("it is asked"));
    kill(Pid::from_raw(visit.id().cast_signed()), Signal::SIGCONT).expect("it lives");
    assert!(visit.wait().expect("its end").success());
    assert!(!is_locked_beside(&maps).expect("it is asked"));
    victim.finish_and_check();
}

#[cfg(feature = "fault-points")]
#[test]
fn flock_by_another_pagefold_is_respected() {
    if !can_run() {
        return;
    }
    let victim = SelfCheckingTarget::start("futex");
    let mut first = Command::new(lab_binary());
    first.args(["advise", &victim.pid().to_string(), "mergeable"]).env("PAGEFOLD_FAULT_POINT", "stop 1 thread chosen");
    let mut first = first.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the lab runs");
    let stat = || fs::read_to_string(format!("/proc/{}/stat", first.id())).unwrap_or_default();
    wait_until("it stops", || stat().rsplit(')').next().is_some_and(|rest| rest.starts_with(" T")));
    let said = advise_expecting_refusal(victim.pid(), &["mergeable"]);
    assert!(said.contains(&format!("process {} has locked /proc/{}/maps", first.id(), victim.pid())), "{said}");
    kill(Pid::from_raw(first.id().cast_signed()), Signal::SIGCONT).expect("it lives");
    assert!(first.wait().expect("its end").success());
    victim.finish_and_check();
}

#[cfg(feature = "fault-points")]
#[test]
fn recycled_pid_is_not_visited() {
    const NS_LAST_PID_PATH: &str = "/proc/sys/kernel/ns_last_pid";
    if !can_run() {
        return;
    }
    if fs::OpenOptions::new().write(true).open(NS_LAST_PID_PATH).is_err() {
        return println!("skipped: needs a writable {NS_LAST_PID_PATH} (CONFIG_CHECKPOINT_RESTORE)");
    }
    // The injector knows its target and has chosen a thread of it when that ends.
    let mut first = SelfCheckingTarget::start("futex");
    let pid = first.pid();
    let mut injector = Command::new(lab_binary());
    injector.args(["advise", &pid.to_string(), "mergeable"]).env("PAGEFOLD_FAULT_POINT", "stop 1 thread chosen");
    let injector = injector.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the lab runs");
    let injector_pid = Pid::from_raw(injector.id().cast_signed());
    let stat = || fs::read_to_string(format!("/proc/{injector_pid}/stat")).unwrap_or_default();
    wait_until("the injector stops", || stat().rsplit(')').next().is_some_and(|rest| rest.starts_with(" T")));
    first.child.kill().expect("it lives");
    first.child.wait().expect("its end");
    // Other processes of this machine may come first, and keep the number for a while.
    let deadline = Instant::now() + Duration::from_secs(20);
    let second = loop {
        assert!(Instant::now() < deadline, "number {pid} is not to be had again");
        fs::write(NS_LAST_PID_PATH, (pid - 1).to_string()).expect("it is writable");
        let second = SelfCheckingTarget::start("futex");
        if second.pid() == pid {
            break second;
        }
    };
    kill(injector_pid, Signal::SIGCONT).expect("it lives");
    let output = injector.wait_with_output().expect("its end");
    let said = lossy_text(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("has ended"), "{:?}: {said}", output.status);
    assert_eq!((count_enrolled_regions(pid), second.status_field("TracerPid")), (0, "0".to_owned()));
    second.finish_and_check();
}
