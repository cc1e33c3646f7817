//! Pagefold itself is stopped during a visit to a target: by job control, by SIGSTOP and by a frozen cgroup. The target
//! never waits for it.

use super::*;

/// An injector that runs cycles in a process group of its own.
struct Injector(Child);

impl Injector {
    fn start(pid: u32, fault: &str) -> Self {
        let mut command = Command::new(lab_binary());
        command.args(["advise", &pid.to_string(), "mergeable", "--cycles", "1000000"]);
        command.stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
        if !fault.is_empty() {
            command.env("PAGEFOLD_FAULT_POINT", fault);
        }
        Self(command.spawn().expect("the lab runs"))
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Send a signal to its process group, as a terminal does.
    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(-self.pid().cast_signed()), signal).expect("it is alive");
    }

    fn state(&self) -> char {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid())).expect("it is not reaped");
        let state = status.lines().find_map(|line| line.strip_prefix("State:")).expect("a state");
        state.trim().chars().next().expect("a letter")
    }
}

impl Drop for Injector {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Whether a thread of the process is stopped or traced.
fn is_stopped_or_traced(pid: u32) -> bool {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("it is alive");
    let mut statuses = tasks.flatten().filter_map(|task| fs::read_to_string(task.path().join("status")).ok());
    statuses.any(|status| {
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).expect("a field").trim();
        field("TracerPid:") != "0" || field("State:").starts_with(['t', 'T'])
    })
}

/// Wait until one of a target's threads is traced, at most for seconds.
fn wait_until_visited(pid: u32) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_stopped_or_traced(pid) {
        assert!(Instant::now() < deadline, "no thread of the target is ever traced");
    }
}

/// Wait until no thread of a target is traced for [`UNVISITED_TIME`]. A tracer that was started before its injector was
/// stopped may begin its visit after that.
fn wait_until_unvisited(pid: u32) {
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut last_visit = Instant::now();
    while last_visit.elapsed() < UNVISITED_TIME {
        if is_stopped_or_traced(pid) {
            last_visit = Instant::now();
        }
        assert!(Instant::now() < deadline, "the target is traced again and again");
        thread::sleep(Duration::from_millis(1));
    }
}

/// An injector that is not stopped visits its target many times in this time.
const UNVISITED_TIME: Duration = Duration::from_millis(20);

#[test]
fn target_runs_while_pagefold_is_stopped() {
    if !can_run() {
        return;
    }
    for signal in [Signal::SIGTSTP, Signal::SIGTTIN, Signal::SIGTTOU, Signal::SIGSTOP] {
        let victim = SelfCheckingTarget::start("threads");
        let injector = Injector::start(victim.pid(), "");
        for round in 0..cycle_count(12) {
            wait_until_visited(victim.pid());
            // At a different moment of a visit each time.
            thread::sleep(Duration::from_micros(u64::from(round % 12) * 40));
            injector.signal(signal);
            wait_until(&format!("{signal} stops it"), || injector.state() == 'T');
            wait_until_unvisited(victim.pid());
            assert_eq!(injector.state(), 'T', "round {round}: {signal}");
            injector.signal(Signal::SIGCONT);
            wait_until("it continues", || injector.state() != 'T');
        }
        drop(injector);
        wait_until("the target is released", || !is_stopped_or_traced(victim.pid()));
        victim.finish_and_check();
    }
}

#[test]
fn target_is_released_when_pagefold_is_killed() {
    if !can_run() {
        return;
    }
    let victim = SelfCheckingTarget::start("threads");
    for round in 0..cycle_count(30) {
        let injector = Injector::start(victim.pid(), "");
        wait_until_visited(victim.pid());
        thread::sleep(Duration::from_micros(u64::from(round % 30) * 30));
        drop(injector);
        wait_until("the target is released", || !is_stopped_or_traced(victim.pid()));
    }
    victim.finish_and_check();
}

/// A SIGSTOP for the process group of Pagefold reaches a tracer that has no session of its own yet; the SIGCONT for the
/// group does not.
#[cfg(feature = "fault-points")]
#[test]
fn a_tracer_that_is_stopped_before_it_leaves_the_group_goes_on() {
    if !can_run() {
        return;
    }
    let victim = SelfCheckingTarget::start("threads");
    let injector = Injector::start(victim.pid(), "stop 1 tracer started");
    wait_until_visited(victim.pid());
    drop(injector);
    victim.finish_and_check();
}

/// The children of a process.
#[cfg(feature = "fault-points")]
fn child_pids(parent: u32) -> Vec<u32> {
    let entries = fs::read_dir("/proc").expect("processes");
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let is_child = |pid: &u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        status.lines().any(|line| line.strip_prefix("PPid:").is_some_and(|id| id.trim() == parent.to_string()))
    };
    pids.filter(is_child).collect()
}

#[cfg(feature = "fault-points")]
#[test]
fn stopped_tracer_ends_with_pagefold() {
    if !can_run() {
        return;
    }
    // Killed with its parent, and killed by its timer.
    for kills_parent in [true, false] {
        let victim = SelfCheckingTarget::start("futex");
        let mut injector = Injector::start(victim.pid(), "stop 1 system call replaced");
        let tracer = || {
            child_pids(injector.pid()).into_iter().find(|pid| {
                let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
                status.contains("State:\tT")
            })
        };
        wait_until("the tracer stops", || tracer().is_some());
        let tracer = tracer().expect("it is stopped");
        assert!(is_stopped_or_traced(victim.pid()));
        if kills_parent {
            injector.0.kill().expect("it is alive");
        }
        wait_until("the target is released", || !is_stopped_or_traced(victim.pid()));
        assert!(!injector.0.wait().expect("its exit").success());
        wait_until("the tracer has ended", || !Path::new(&format!("/proc/{tracer}")).exists());
        victim.finish_and_check();
    }
}

/// A cgroup v2 below the root, removed on drop.
struct TestCgroup(PathBuf);

impl TestCgroup {
    fn new() -> Option<Self> {
        let mounts = fs::read_to_string("/proc/mounts").ok()?;
        let mut fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let mount = fields.find(|fields| fields.get(2) == Some(&"cgroup2"))?[1].to_owned();
        let directory = Path::new(&mount).join(format!("pagefold-test-{}", std::process::id()));
        fs::create_dir(&directory).ok()?;
        let cgroup = Self(directory);
        cgroup.0.join("cgroup.freeze").exists().then_some(cgroup)
    }

    fn write(&self, file: &str, value: &str) {
        fs::write(self.0.join(file), value).unwrap_or_else(|why| panic!("{file}: {why}"));
    }

    fn is_frozen(&self) -> bool {
        fs::read_to_string(self.0.join("cgroup.events")).is_ok_and(|events| events.contains("frozen 1"))
    }
}

impl Drop for TestCgroup {
    fn drop(&mut self) {
        let _ = fs::write(self.0.join("cgroup.freeze"), "0");
        // Killed processes leave the cgroup after a moment.
        for _ in 0..1000 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

#[test]
fn target_runs_while_pagefold_cgroup_is_frozen() {
    let Some(cgroup) = TestCgroup::new().filter(|_| can_run()) else {
        println!("skipped: needs root and a writable cgroup v2 hierarchy");
        return;
    };
    for round in 0..4 {
        let victim = SelfCheckingTarget::start("threads");
        let injector = Injector::start(victim.pid(), "");
        cgroup.write("cgroup.procs", &injector.pid().to_string());
        wait_until_visited(victim.pid());
        thread::sleep(Duration::from_micros(round * 100));
        cgroup.write("cgroup.freeze", "1");
        wait_until("the cgroup is frozen, or Pagefold has ended", || cgroup.is_frozen());
        wait_until_unvisited(victim.pid());
        cgroup.write("cgroup.freeze", "0");
        drop(injector);
        wait_until("the target is released", || !is_stopped_or_traced(victim.pid()));
        victim.finish_and_check();
    }
}
