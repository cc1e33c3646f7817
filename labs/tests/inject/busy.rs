//! Visits on a host that is busy: targets with many threads, and a real-time program that keeps a CPU.

use super::*;
use pagefold_sys::inject::{self, Target};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

#[test]
fn a_visit_reads_no_more_of_a_process_with_many_threads() {
    if !possible() {
        return;
    }
    let reads = || {
        let io = fs::read_to_string("/proc/thread-self/io").ok()?;
        io.lines().find_map(|line| line.strip_prefix("syscr: ")?.parse::<u64>().ok())
    };
    if reads().is_none() {
        return println!("skipped: needs a kernel with CONFIG_TASK_IO_ACCOUNTING");
    }
    let victim = Victim::start("crowd");
    assert!(victim.status("Threads").parse::<u32>().expect("a number") > 500);
    let directory = fs::File::open(format!("/proc/{}", victim.pid())).expect("it lives");
    let target = Target::new(&directory, victim.pid().cast_signed()).expect("it can be visited");
    let number = if cfg!(target_arch = "x86_64") { 39 } else { 172 };
    let before = reads();
    for _ in 0..10 {
        let answer = inject::inside(&target, |inside| inside.call(number, [0; 6])).expect("a thread stops").0;
        assert_eq!(answer, i64::from(victim.pid()));
    }
    let reads = reads().zip(before).map(|(after, before)| after - before).expect("told before");
    // Two of each thread would be ten thousand; a machine so loaded that other threads are tried reads of 32.
    assert!(reads < 2_000, "{reads} reads for ten visits");
    victim.finish();
}

/// A program that keeps a CPU under SCHED_FIFO for seconds.
struct Poller(Child);

impl Poller {
    /// Nothing where the kernel forbids it.
    fn start(cpu: usize) -> Option<Self> {
        let mut command = Command::new("chrt");
        command.args(["--fifo", "50", "timeout", "6", "sh", "-c", "while :; do :; done"]);
        let poller = Self(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok()?);
        let mut one = CpuSet::new();
        one.set(cpu);
        let of = |pid: u32| fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let policy = |pid: u32| of(pid).rsplit(')').next()?.split(' ').nth(39)?.parse::<u32>().ok();
        let deadline = Instant::now() + Duration::from_secs(2);
        loop {
            let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", poller.0.id())).ok()?;
            let child = children.split_whitespace().next().and_then(|pid| pid.parse::<u32>().ok());
            if let Some(child) = child.filter(|&child| policy(child) == Some(1)) {
                sched_setaffinity(rustix::process::Pid::from_raw(child.cast_signed()), &one).ok()?;
                return Some(poller);
            }
            if Instant::now() > deadline {
                return None;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn runs(&mut self) -> bool {
        self.0.try_wait().expect("its state").is_none()
    }
}

impl Drop for Poller {
    fn drop(&mut self) {
        // timeout(1) hands it on to the loop.
        let _ = kill(Pid::from_raw(self.0.id().cast_signed()), Signal::SIGTERM);
        let _ = self.0.wait();
    }
}

#[test]
fn a_target_is_visited_beside_a_real_time_program_on_its_cpu() {
    if !possible() {
        return;
    }
    let all = sched_getaffinity(None).expect("a set of CPUs");
    let mut cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| all.is_set(cpu));
    let (Some(cpu), Some(_)) = (cpus.next(), cpus.next()) else {
        return println!("skipped: needs two CPUs");
    };
    let mut one = CpuSet::new();
    one.set(cpu);
    for _ in 0..3 {
        let victim = Victim::start("futex");
        let pid = rustix::process::Pid::from_raw(victim.pid().cast_signed());
        // Its main thread runs there, and may then run anywhere.
        sched_setaffinity(pid, &one).expect("it lives");
        done(victim.pid(), &["mergeable"]);
        sched_setaffinity(pid, &all).expect("it lives");
        let Some(mut poller) = Poller::start(cpu) else {
            return println!("skipped: needs chrt(1) and the right to SCHED_FIFO");
        };
        let output = advise(victim.pid(), &["unmergeable"], "");
        if output.status.success() && poller.runs() {
            drop(poller);
            return drop(victim.finish());
        }
        println!("{}", text(&output.stderr));
    }
    panic!("three visits ended no sooner than the real-time program");
}
