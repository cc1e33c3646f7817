//! The injector killed at every step, in each state of a target.

use super::*;
use std::collections::BTreeSet;
use std::sync::Mutex;

/// The names of all fault points that a visit passes.
fn fault_point_names() -> impl Iterator<Item = &'static str> {
    let source = include_str!("../../../crates/sys/src/inject/mod.rs");
    source.split("fault::point(\"").skip(1).map(|rest| rest.split('"').next().expect("a string"))
}

/// How many fault points an undisturbed run reaches.
fn count_fault_points(pid: u32, action: &str) -> u32 {
    let output = run_advise(pid, &[action], "count");
    let stderr = lossy_text(&output.stderr);
    let count =
        stderr.lines().find_map(|line| line.strip_prefix("fault points: ")).unwrap_or_else(|| panic!("{stderr}"));
    count.parse().expect("a number")
}

/// Kill the injector at one point, and check that the target is unaffected.
///
/// Returns the name of the point, if the injector reached it: on a busy machine one run may try more threads than
/// another.
fn kill_injector_at(state: &str, action: &str, point: u32, is_stopped: bool) -> Option<String> {
    let victim = SelfCheckingTarget::start(state);
    if is_stopped {
        victim.send_signal(Signal::SIGSTOP);
        wait_until("it stops", || victim.status_field("State").starts_with('T'));
    }
    let mask = victim.status_field("SigBlk");
    let output = run_advise(victim.pid(), &[action], &point.to_string());
    let ended = output.status.code();
    let fault_point = lossy_text(&output.stderr);
    let is_released = |victim: &SelfCheckingTarget| {
        let state = victim.status_field("State");
        victim.status_field("TracerPid") == "0" && !state.starts_with('t') && state.starts_with('T') == is_stopped
    };
    wait_until(&format!("{state} is released at {fault_point}"), || is_released(&victim));
    if is_stopped {
        victim.send_signal(Signal::SIGCONT);
    }
    wait_until(&format!("{state} has its signal mask again at {fault_point}"), || {
        victim.status_field("SigBlk") == mask
    });
    victim.finish_and_check();
    let name = fault_point.trim().strip_prefix(&format!("fault point {point}: ")).map(str::to_owned);
    assert_eq!(ended.is_none(), name.is_some(), "{fault_point}");
    name
}

fn kill_injector_at_every_point(state: &'static str, action: &'static str, is_stopped: bool) {
    let victim = SelfCheckingTarget::start(state);
    let points = count_fault_points(victim.pid(), action);
    drop(victim);
    let reached = Mutex::new(BTreeSet::new());
    // If more threads were tried than when the points were counted, a point has another number: then repeat.
    for _ in 0..12 {
        // Targets that sleep, in parallel: each takes time.
        let next = AtomicU32::new(1);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    loop {
                        let point = next.fetch_add(1, Ordering::Relaxed);
                        if point > points {
                            break;
                        }
                        let name = kill_injector_at(state, action, point, is_stopped);
                        reached.lock().expect("no panic").extend(name);
                    }
                });
            }
        });
        if fault_point_names().all(|name| reached.lock().expect("no panic").contains(name)) {
            return;
        }
    }
    let reached = reached.into_inner().expect("no panic");
    let never: Vec<_> = fault_point_names().filter(|&name| !reached.contains(name)).collect();
    panic!("never killed when {never:?}");
}

macro_rules! killed_in {
    ($($state:ident)*) => {$(
        #[test]
        fn $state() {
            if can_run() {
                kill_injector_at_every_point(stringify!($state), "mergeable", false);
            }
        }
    )*};
}

killed_in! {
    spin recurse sleep futex pipe epoll_again ppoll threads coroutine coroutine_above_zeros coroutine_above_untouched
    coroutine_on_main_stack stack_in_pieces stack_in_untouched_pieces vfork sandboxed signals storm
}

#[cfg(target_arch = "x86_64")]
killed_in! { poll single_step compat_read }

#[test]
fn injection_works_after_forty_killed_injectors() {
    if !can_run() {
        return;
    }
    let victim = SelfCheckingTarget::start("coroutine_alone");
    let parked = |point: &u32| {
        let output = run_advise(victim.pid(), &["mergeable"], &point.to_string());
        lossy_text(&output.stderr).contains(": signals blocked")
    };
    let point = (1..40).find(parked).expect("it is parked").to_string();
    for _ in 0..40 {
        // No range is enrolled at this point.
        assert_eq!(run_advise(victim.pid(), &["mergeable"], &point).status.code(), None);
        wait_until("it is released", || victim.status_field("TracerPid") == "0");
    }
    advise_successfully(victim.pid(), &["mergeable"]);
    advise_successfully(victim.pid(), &["unmergeable"]);
    victim.finish_and_check();
}

#[test]
fn stopped_target_survives_killed_injector() {
    if can_run() {
        kill_injector_at_every_point("spin", "whole-process", true);
        kill_injector_at_every_point("futex", "mergeable", true);
    }
}
