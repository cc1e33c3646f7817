//! Targets whose threads end while others start, and that execute other programs, during a visit.

use super::*;
use pagefold_sys::inject::{InjectError, InjectTarget, with_stopped_thread};
use std::io::Write;

#[test]
fn exec_during_injection_is_harmless() {
    if !can_run() {
        return;
    }
    let mut victim = SelfCheckingTarget::start("execs");
    let mut taken = 0;
    // On a slow machine it may take long until a visit succeeds.
    for _ in 0..cycle_count(300).max(300) {
        // It may have executed another program meanwhile: then the action is refused.
        taken += usize::from(run_advise(victim.pid(), &["mergeable"], "").status.success());
    }
    drop(victim.child.stdin.take());
    let mut printed = String::new();
    victim.stdout.take().expect("taken once").read_to_string(&mut printed).expect("its output");
    assert!(victim.child.wait().expect("its exit").success() && printed.contains("OK\n"), "{printed}");
    assert_ne!(taken, 0, "never taken");
}

/// A process whose children of vfork(2) execute `program`, each on request.
struct VforkParent(SelfCheckingTarget);

impl VforkParent {
    fn start(program: &Path) -> Self {
        let mut command = Command::new(self::build_target("dynamic").expect("a compiler"));
        command.env("PROGRAM", program);
        Self(SelfCheckingTarget::start_command(command, "newborn"))
    }

    /// The next child, which shares its parent's memory until its exec.
    fn next_child(&self) -> u32 {
        let parent = self.0.pid();
        let children = || fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).expect("it is alive");
        wait_until("it has a child", || !children().is_empty());
        children().trim().parse().expect("one child")
    }

    /// Tell the child to execute the other program.
    fn let_child_exec(&mut self) {
        self.0.child.stdin.as_mut().expect("piped").write_all(b"x").expect("it listens");
    }

    fn expect_output(&mut self, text: &str) {
        let mut output = vec![0; text.len()];
        self.0.stdout.as_mut().expect("piped").read_exact(&mut output).expect("it speaks");
        assert_eq!(lossy_text(&output), text);
    }

    /// Let a child that has executed the other program check itself and end.
    fn finish_child(&mut self, child: u32) {
        advise_successfully(child, &["whole-process"]);
        kill(Pid::from_raw(child.cast_signed()), Signal::SIGUSR1).expect("it is alive");
        self.expect_output("OK\n");
        wait_until("it has ended", || !Path::new(&format!("/proc/{child}")).exists());
    }
}

/// The result of a visit to a child that is opened first; `meanwhile` runs before the visit.
fn inject_getpid(child: u32, meanwhile: impl FnOnce()) -> Result<i64, InjectError> {
    let directory = fs::File::open(format!("/proc/{child}")).expect("it is alive");
    let target = InjectTarget::new(&directory, child.cast_signed())?;
    meanwhile();
    let getpid = if cfg!(target_arch = "x86_64") { 39 } else { 172 };
    with_stopped_thread(&target, |inside| inside.call_syscall(getpid, [0; 6])).map(|(answer, _)| answer)
}

/// Whether the kernel lists the children of a thread; prints the reason for skipping if not.
fn can_list_children() -> bool {
    let listed = Path::new("/proc/thread-self/children").exists();
    if !listed {
        println!("skipped: needs a kernel with CONFIG_PROC_CHILDREN");
    }
    listed
}

#[test]
fn execed_vfork_child_is_not_mistaken_for_parent() {
    if !can_run() || !can_list_children() {
        return;
    }
    for program in ["dynamic", "static"].into_iter().filter_map(build_target) {
        let mut nursery = VforkParent::start(&program);
        let stack = nursery.0.status_field("VmStk");
        for _ in 0..5 {
            let child = nursery.next_child();
            let outcome = inject_getpid(child, || {
                nursery.let_child_exec();
                nursery.expect_output("READY\n");
            });
            assert_eq!(outcome, Err(InjectError::Vanished));
            nursery.finish_child(child);
        }
        assert_eq!(nursery.0.status_field("VmStk"), stack, "its parent's stack grows");
        let child = nursery.next_child();
        assert_eq!(inject_getpid(child, || ()), Ok(i64::from(child)), "it still has its parent's memory");
        nursery.0.finish_and_check();
    }
}

#[test]
fn vfork_child_visit_survives_exec_at_any_moment() {
    if !can_run() || !can_list_children() {
        return;
    }
    let mut nursery =
        VforkParent::start(&build_target("static").or_else(|| build_target("dynamic")).expect("a compiler"));
    for round in 0..cycle_count(100) {
        let child = nursery.next_child();
        let outcome = thread::scope(|scope| {
            let visiting = scope.spawn(|| inject_getpid(child, || ()));
            // At a different moment of the visit each time.
            thread::sleep(Duration::from_micros(u64::from(round % 50) * 20));
            nursery.let_child_exec();
            visiting.join().expect("no panic")
        });
        match outcome {
            Ok(answer) => assert_eq!(answer, i64::from(child)),
            Err(why) => assert!(matches!(why, InjectError::Vanished | InjectError::Busy(_)), "{why:?}"),
        }
        nursery.expect_output("READY\n");
        nursery.finish_child(child);
    }
    nursery.0.finish_and_check();
}

#[test]
fn thread_churn_is_not_reported_as_process_end() {
    if !can_run() {
        return;
    }
    for state in ["churn", "leaderless"] {
        let victim = SelfCheckingTarget::start(state);
        let mut actions = vec!["whole-process"];
        if state == "leaderless" {
            wait_until("its main thread has ended", || victim.status_field("State").starts_with('Z'));
            // Before 6.16 its memory looks empty. Since then other threads give access to it.
            if fs::read(format!("/proc/{}/smaps", victim.pid())).is_err() {
                actions.push("mergeable");
            }
        } else {
            wait_until("it waits for its child", || victim.status_field("State").starts_with('D'));
        }
        // A refusal takes a long time.
        for _ in 0..(cycle_count(50) / 10).max(5) {
            for action in &actions {
                let output = run_advise(victim.pid(), &[action], "");
                let stderr = lossy_text(&output.stderr);
                assert!(output.status.success() || stderr.contains("busy: "), "{state}, {action}: {stderr}");
            }
        }
        victim.finish_and_check();
    }
}
