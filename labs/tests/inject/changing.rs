//! Targets whose threads end while others begin, and that become other programs, in the midst of a visit.

use super::*;
use pagefold_sys::inject::{Error, Target, inside};
use std::io::Write;

#[test]
fn a_target_that_becomes_another_program_is_never_harmed() {
    if !possible() {
        return;
    }
    let mut victim = Victim::start("execs");
    let mut taken = 0;
    // On a slow machine it may be long until it is caught.
    for _ in 0..cycles(300).max(300) {
        // It may have begun another program meanwhile: then it is refused.
        taken += usize::from(advise(victim.pid(), &["mergeable"], "").status.success());
    }
    drop(victim.child.stdin.take());
    let mut said = String::new();
    victim.output.take().expect("taken once").read_to_string(&mut said).expect("its output");
    assert!(victim.child.wait().expect("its end").success() && said.contains("OK\n"), "{said}");
    assert_ne!(taken, 0, "never taken");
}

/// A process whose children of vfork(2) become `program`, each once it is told to.
struct Nursery(Victim);

impl Nursery {
    fn of(program: &Path) -> Self {
        let mut command = Command::new(self::program("dynamic").expect("a compiler"));
        command.env("PROGRAM", program);
        Self(Victim::by(command, "newborn"))
    }

    /// The next child, which has its parent's memory until it is told.
    fn newborn(&self) -> u32 {
        let parent = self.0.pid();
        let children = || fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).expect("it lives");
        eventually("it has a child", || !children().is_empty());
        children().trim().parse().expect("one child")
    }

    /// Tell the child to become the other program.
    fn tell(&mut self) {
        self.0.child.stdin.as_mut().expect("piped").write_all(b"x").expect("it listens");
    }

    fn expect(&mut self, words: &str) {
        let mut said = vec![0; words.len()];
        self.0.output.as_mut().expect("piped").read_exact(&mut said).expect("it speaks");
        assert_eq!(text(&said), words);
    }

    /// Have a child that is the other program check itself and end.
    fn end(&mut self, child: u32) {
        done(child, &["whole"]);
        kill(Pid::from_raw(child.cast_signed()), Signal::SIGUSR1).expect("it lives");
        self.expect("OK\n");
        eventually("it is gone", || !Path::new(&format!("/proc/{child}")).exists());
    }
}

/// What a visit of a child comes to that was looked at and is then given a moment.
fn visit(child: u32, meanwhile: impl FnOnce()) -> Result<i64, Error> {
    let directory = fs::File::open(format!("/proc/{child}")).expect("it lives");
    let target = Target::new(&directory, child.cast_signed())?;
    meanwhile();
    let number = if cfg!(target_arch = "x86_64") { 39 } else { 172 };
    inside(&target, |inside| inside.call(number, [0; 6])).map(|(answer, _)| answer)
}

/// Whether the kernel lists the children of a thread; says so if not.
fn children_are_listed() -> bool {
    let listed = Path::new("/proc/thread-self/children").exists();
    if !listed {
        println!("skipped: needs a kernel with CONFIG_PROC_CHILDREN");
    }
    listed
}

#[test]
fn a_child_that_has_become_another_program_is_not_taken_for_its_parent() {
    if !possible() || !children_are_listed() {
        return;
    }
    for program in ["dynamic", "static"].into_iter().filter_map(program) {
        let mut nursery = Nursery::of(&program);
        let stack = nursery.0.status("VmStk");
        for _ in 0..5 {
            let child = nursery.newborn();
            let outcome = visit(child, || {
                nursery.tell();
                nursery.expect("READY\n");
            });
            assert_eq!(outcome, Err(Error::Gone));
            nursery.end(child);
        }
        assert_eq!(nursery.0.status("VmStk"), stack, "its parent's stack grows");
        let child = nursery.newborn();
        assert_eq!(visit(child, || ()), Ok(i64::from(child)), "it has its parent's memory still");
        nursery.0.finish();
    }
}

#[test]
fn newborn_children_are_visited_whatever_they_become_meanwhile() {
    if !possible() || !children_are_listed() {
        return;
    }
    let mut nursery = Nursery::of(&program("static").or_else(|| program("dynamic")).expect("a compiler"));
    for round in 0..cycles(100) {
        let child = nursery.newborn();
        let outcome = thread::scope(|scope| {
            let visiting = scope.spawn(|| visit(child, || ()));
            // At another moment of the visit each time.
            thread::sleep(Duration::from_micros(u64::from(round % 50) * 20));
            nursery.tell();
            visiting.join().expect("no panic")
        });
        match outcome {
            Ok(answer) => assert_eq!(answer, i64::from(child)),
            Err(why) => assert!(matches!(why, Error::Gone | Error::Busy(_)), "{why:?}"),
        }
        nursery.expect("READY\n");
        nursery.end(child);
    }
    nursery.0.finish();
}

#[test]
fn nobody_is_told_to_have_ended_whose_threads_come_and_go() {
    if !possible() {
        return;
    }
    for state in ["churn", "leaderless"] {
        let victim = Victim::start(state);
        let mut actions = vec!["whole"];
        if state == "leaderless" {
            eventually("its main thread has ended", || victim.status("State").starts_with('Z'));
            // Before 6.16 its memory looks empty. Since then it is seen by other threads.
            if fs::read(format!("/proc/{}/smaps", victim.pid())).is_err() {
                actions.push("mergeable");
            }
        } else {
            eventually("it waits for its child", || victim.status("State").starts_with('D'));
        }
        // To be refused takes long.
        for _ in 0..(cycles(50) / 10).max(5) {
            for action in &actions {
                let output = advise(victim.pid(), &[action], "");
                let said = text(&output.stderr);
                assert!(output.status.success() || said.contains("busy: "), "{state}, {action}: {said}");
            }
        }
        victim.finish();
    }
}
