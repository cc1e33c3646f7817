//! Injection on a busy host: targets with many threads, and a real-time program that occupies a CPU.

use super::*;
use pagefold_sys::inject::{self, InjectTarget};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

#[test]
fn visit_cost_does_not_grow_with_threads() {
    if !can_run() {
        return;
    }
    let reads = || {
        let io = fs::read_to_string("/proc/thread-self/io").ok()?;
        io.lines().find_map(|line| line.strip_prefix("syscr: ")?.parse::<u64>().ok())
    };
    if reads().is_none() {
        return println!("skipped: needs a kernel with CONFIG_TASK_IO_ACCOUNTING");
    }
    let victim = SelfCheckingTarget::start("crowd");
    assert!(victim.status_field("Threads").parse::<u32>().expect("a number") > 500);
    let directory = fs::File::open(format!("/proc/{}", victim.pid())).expect("it is alive");
    let target = InjectTarget::new(&directory, victim.pid().cast_signed()).expect("it can be opened");
    let getpid = if cfg!(target_arch = "x86_64") { 39 } else { 172 };
    let before = reads();
    for _ in 0..10 {
        let answer = inject::with_stopped_thread(&target, |inside| inside.call_syscall(getpid, [0; 6]))
            .expect("a thread stops")
            .0;
        assert_eq!(answer, i64::from(victim.pid()));
    }
    let reads = reads().zip(before).map(|(after, before)| after - before).expect("read before");
    // Two reads of each thread would be ten thousand. On a loaded machine, where other threads are tried, there are
    // reads of 32 threads.
    assert!(reads < 2_000, "{reads} reads for ten visits");
    victim.finish_and_check();
}

/// A program that occupies a CPU under SCHED_FIFO for seconds.
struct RealTimeLoop(Child);

impl RealTimeLoop {
    /// `None` if the kernel forbids it.
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

    fn is_running(&mut self) -> bool {
        self.0.try_wait().expect("its state").is_none()
    }
}

impl Drop for RealTimeLoop {
    fn drop(&mut self) {
        // timeout(1) forwards the signal to the loop.
        let _ = kill(Pid::from_raw(self.0.id().cast_signed()), Signal::SIGTERM);
        let _ = self.0.wait();
    }
}

#[test]
fn visit_succeeds_beside_real_time_task_on_same_cpu() {
    if !can_run() {
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
        let victim = SelfCheckingTarget::start("futex");
        let pid = rustix::process::Pid::from_raw(victim.pid().cast_signed());
        // Its main thread runs on that CPU, and may then run anywhere.
        sched_setaffinity(pid, &one).expect("it is alive");
        advise_successfully(victim.pid(), &["mergeable"]);
        sched_setaffinity(pid, &all).expect("it is alive");
        let Some(mut poller) = RealTimeLoop::start(cpu) else {
            return println!("skipped: needs chrt(1) and the right to SCHED_FIFO");
        };
        let output = run_advise(victim.pid(), &["unmergeable"], "");
        if output.status.success() && poller.is_running() {
            drop(poller);
            return drop(victim.finish_and_check());
        }
        println!("{}", lossy_text(&output.stderr));
    }
    panic!("three visits ended no sooner than the real-time program");
}

/// Make `helper` ask the kernel to evict a range of another process. Returns whether no page of it is left in memory,
/// or the kernel's error.
fn paged_out(helper: &InjectTarget, pid: u32, range: &std::ops::Range<u64>) -> Result<bool, Errno> {
    const PIDFD_OPEN: i64 = 434;
    const PROCESS_MADVISE: i64 = 440;
    const MADV_PAGEOUT: u64 = 21;
    let result = inject::with_stopped_thread(helper, |inside| {
        let process = inside.call_syscall(PIDFD_OPEN, [u64::from(pid), 0, 0, 0, 0, 0])?.cast_unsigned();
        let vector = [range.start, range.end - range.start].map(u64::to_ne_bytes).concat();
        inside.call_syscall(PROCESS_MADVISE, [process, inside.write_arguments(&vector)?, 1, MADV_PAGEOUT, 0, 0])
    });
    let (answer, _) = result.expect("the helper can be visited");
    if answer < 0 {
        return Err(Errno::from_raw(i32::try_from(-answer).expect("an error number")));
    }
    let pagemap = fs::File::open(format!("/proc/{pid}/pagemap")).expect("it is alive");
    let mut is_mapped = false;
    pagefold_sys::pagemap::scan_mapped(&pagemap, range.clone(), pagefold_sys::pagemap::RangeContents::Anything, |_| {
        is_mapped = true
    })
    .expect("it is alive");
    Ok(!is_mapped)
}

/// Instead of a file server that does not answer, the test checks that nothing is read from a file during the visit.
#[test]
fn visit_is_busy_if_code_must_be_read_from_file() {
    let Some(shared) = build_target("static").filter(|_| can_run()) else {
        return println!("skipped: needs a static C library");
    };
    // The kernel does not evict pages that other processes map, too.
    let program = shared.with_file_name(format!("states-alone-{}", std::process::id()));
    // Another program copies it: a concurrent test that forks while this process has the copy open for writing would
    // prevent its execution (ETXTBSY).
    assert!(Command::new("cp").args([&shared, &program]).status().is_ok_and(|status| status.success()));
    fs::File::open(&program).and_then(|file| file.sync_all()).expect("dirty pages are not dropped");
    let (helper, victim) = (SelfCheckingTarget::start("futex"), SelfCheckingTarget::start_program(&program, "futex"));
    let target = |pid: u32| {
        let directory = fs::File::open(format!("/proc/{pid}")).expect("it is alive");
        InjectTarget::new(&directory, pid.cast_signed()).expect("it can be visited")
    };
    let maps = fs::read_to_string(format!("/proc/{}/maps", victim.pid())).expect("it is alive");
    let name = program.to_str().expect("text");
    let code = maps.lines().find(|line| line.contains("r-xp") && line.ends_with(name)).expect("it has code");
    let (start, end) = code.split(' ').next().and_then(|range| range.split_once('-')).expect("a range");
    let address = |text| u64::from_str_radix(text, 16).expect("an address");
    let range = address(start)..address(end);
    let (helping, prepared) = (target(helper.pid()), target(victim.pid()));
    let getpid = if cfg!(target_arch = "x86_64") { 39 } else { 172 };
    let visit = |target: &InjectTarget| {
        inject::with_stopped_thread(target, |inside| inside.call_syscall(getpid, [0; 6])).map(|done| done.0)
    };
    assert_eq!(visit(&prepared), Ok(i64::from(victim.pid())));
    // Otherwise its threads would run between two attempts, and fault the code in.
    victim.send_signal(Signal::SIGSTOP);
    wait_until("it stops", || victim.status_field("State").starts_with('T'));
    // The kernel may use the pages for a moment.
    let mut tries = (0..100).map(|_| paged_out(&helping, victim.pid(), &range));
    match tries.find(|dropped| *dropped != Ok(false)) {
        Some(Ok(_)) => {
            let visited = visit(&prepared);
            assert!(
                matches!(&visited, Err(inject::InjectError::Busy(why)) if why.contains("from a file")),
                "{visited:?}"
            );
            // The code is read again before a thread is stopped.
            assert_eq!(visit(&target(victim.pid())), Ok(i64::from(victim.pid())));
        }
        Some(Err(Errno::EPERM)) => println!("skipped: MADV_PAGEOUT for another process is not permitted here"),
        Some(Err(errno)) => panic!("MADV_PAGEOUT for another process: {errno}"),
        None => println!("skipped: this kernel does not evict the code of a program"),
    }
    victim.send_signal(Signal::SIGCONT);
    victim.finish_and_check();
    helper.finish_and_check();
    let _ = fs::remove_file(program);
}
