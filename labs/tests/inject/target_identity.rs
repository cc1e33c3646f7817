//! The identity of the visited process, and concurrent tracers: locks, and process numbers that are reused.

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
    // A tracer of another thread than the visited one may use the same stack.
    let tasks = fs::read_dir(format!("/proc/{}/task", victim.pid())).expect("it is alive");
    let tids = tasks.flatten().map(|task| task.file_name().to_string_lossy().parse::<i32>().expect("a number"));
    let other = tids.filter(|&tid| tid != victim.pid().cast_signed()).max().expect("it has two threads");
    ptrace::seize(Pid::from_raw(other), ptrace::Options::empty()).expect("we may trace it");
    assert!(advise_expecting_refusal(victim.pid(), &["mergeable"]).contains("traces it"));
    ptrace::interrupt(Pid::from_raw(other)).expect("it can be interrupted");
    nix::sys::wait::waitpid(Pid::from_raw(other), Some(nix::sys::wait::WaitPidFlag::__WALL)).expect("it stops");
    ptrace::detach(Pid::from_raw(other), None).expect("it can be released");
    advise_successfully(victim.pid(), &["mergeable"]);
    victim.finish_and_check();
    // A helper process of the target may have locked it as well: the holder, this test, is not Pagefold.
    let victim = SelfCheckingTarget::start("futex");
    let maps = fs::File::open(format!("/proc/{}/maps", victim.pid())).expect("it is alive");
    maps.lock().expect("no other process locks it");
    advise_successfully(victim.pid(), &["mergeable"]);
    advise_successfully(victim.pid(), &["unmergeable"]);
    assert_eq!(count_enrolled_regions(victim.pid()), 0);
    maps.unlock().expect("our child");
    victim.finish_and_check();
}

/// The visit started while another program held the lock, which that program has released since.
#[test]
fn a_visit_without_the_lock_is_seen_by_one_that_has_it() {
    if !can_run() {
        return;
    }
    let victim = SelfCheckingTarget::start("futex");
    let tasks = fs::read_dir(format!("/proc/{}/task", victim.pid())).expect("it is alive");
    let tids = tasks.flatten().map(|task| task.file_name().to_string_lossy().parse::<i32>().expect("a number"));
    let other = Pid::from_raw(tids.filter(|&tid| tid != victim.pid().cast_signed()).max().expect("it has two threads"));
    ptrace::seize(other, ptrace::Options::empty()).expect("we may trace it");
    // A debugger of another thread does not prevent a visit.
    let beside_debugger = run_advise(victim.pid(), &["mergeable"], "");
    let maps = fs::File::open(format!("/proc/{}/maps", victim.pid())).expect("it is alive");
    let locked = lock_for_reading(&maps);
    let beside_visit = run_advise(victim.pid(), &["unmergeable"], "");
    // Before any check can fail: waiting for a process does not report its end while a thread of it is traced.
    ptrace::interrupt(other).expect("it can be interrupted");
    nix::sys::wait::waitpid(other, Some(nix::sys::wait::WaitPidFlag::__WALL)).expect("it stops");
    ptrace::detach(other, None).expect("it can be released");
    assert!(beside_debugger.status.success(), "{}", lossy_text(&beside_debugger.stderr));
    assert!(locked.expect("the lock can be queried"), "it can be locked");
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
    let maps = fs::File::open(format!("/proc/{}/maps", victim.pid())).expect("it is alive");
    maps.lock().expect("no other process locks it");
    let mut visit = Command::new(lab_binary());
    visit.args(["advise", &victim.pid().to_string(), "mergeable"]).env("PAGEFOLD_FAULT_POINT", "stop 1 thread chosen");
    let mut visit = visit.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the lab runs");
    let stat = || fs::read_to_string(format!("/proc/{}/stat", visit.id())).unwrap_or_default();
    wait_until("it stops", || stat().rsplit(')').next().is_some_and(|rest| rest.starts_with(" T")));
    assert!(is_locked_beside(&maps).expect("the lock can be queried"));
    kill(Pid::from_raw(visit.id().cast_signed()), Signal::SIGCONT).expect("it is alive");
    assert!(visit.wait().expect("its exit").success());
    assert!(!is_locked_beside(&maps).expect("the lock can be queried"));
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
    let first = first.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the lab runs");
    let stat = || fs::read_to_string(format!("/proc/{}/stat", first.id())).unwrap_or_default();
    wait_until("the first visitor stops", || stat().rsplit(')').next().is_some_and(|rest| rest.starts_with(" T")));
    let output = advise_expecting_refusal(victim.pid(), &["mergeable"]);
    assert!(output.contains(&format!("process {} has locked /proc/{}/maps", first.id(), victim.pid())), "{output}");
    kill(Pid::from_raw(first.id().cast_signed()), Signal::SIGCONT).expect("it is alive");
    let output = first.wait_with_output().expect("its exit");
    assert!(output.status.success(), "{}: {}", output.status, lossy_text(&output.stderr));
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
    // The target ends when the injector has opened it and chosen a thread of it.
    let mut first = SelfCheckingTarget::start("futex");
    let pid = first.pid();
    let mut injector = Command::new(lab_binary());
    injector.args(["advise", &pid.to_string(), "mergeable"]).env("PAGEFOLD_FAULT_POINT", "stop 1 thread chosen");
    let injector = injector.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the lab runs");
    let injector_pid = Pid::from_raw(injector.id().cast_signed());
    let stat = || fs::read_to_string(format!("/proc/{injector_pid}/stat")).unwrap_or_default();
    wait_until("the injector stops", || stat().rsplit(')').next().is_some_and(|rest| rest.starts_with(" T")));
    first.child.kill().expect("it is alive");
    first.child.wait().expect("its exit");
    // Other processes of this machine may take the number first, and keep it for a while.
    let deadline = Instant::now() + Duration::from_secs(20);
    let second = loop {
        assert!(Instant::now() < deadline, "number {pid} is not assigned again");
        fs::write(NS_LAST_PID_PATH, (pid - 1).to_string()).expect("it is writable");
        let second = SelfCheckingTarget::start("futex");
        if second.pid() == pid {
            break second;
        }
    };
    kill(injector_pid, Signal::SIGCONT).expect("it is alive");
    let output = injector.wait_with_output().expect("its exit");
    let stderr = lossy_text(&output.stderr);
    assert!(output.status.code() == Some(2) && stderr.contains("has ended"), "{:?}: {stderr}", output.status);
    assert_eq!((count_enrolled_regions(pid), second.status_field("TracerPid")), (0, "0".to_owned()));
    second.finish_and_check();
}
