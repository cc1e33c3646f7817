//! The process that traces a target during one visit.
//!
//! A stopped tracer leaves its target stopped. Job control (SIGTSTP from Ctrl-Z, SIGTTIN, SIGTTOU) and SIGSTOP stop all
//! threads of a process. So the tracer is a separate process in its own session, with all signals blocked. It shares
//! Pagefold's memory and open files, and the thread-local state of the thread that starts it. That thread only makes
//! raw system calls until the tracer has ended.
//!
//! Both end together. When Pagefold is killed, the kernel kills the tracer (`PR_SET_PDEATHSIG`). When the tracer is
//! killed, Pagefold kills itself, because the tracer may have been in the middle of a change to their common memory. A
//! kernel timer kills a tracer that has not run for [`WATCHDOG_TIMEOUT`], because of a SIGSTOP or a frozen cgroup. The
//! end of the tracer releases the target. The timer restarts only where the tracer waits for its target. So while a
//! thread is stopped, memory that may belong to a file is read only if it is present (`InjectTarget::read_if_present`).
//! A page on a FUSE or NFS server that does not answer would block the tracer until its timer ends it, and Pagefold
//! with it.
//!
//! A tracer may be limited to the target's CPU (`super::ptrace::pin_to_cpu`). If a real-time program occupies that CPU,
//! the waiting thread moves the tracer to the other CPUs after [`STALL_TIMEOUTS`]. Later it removes the tracer's
//! real-time priority, so that it gets the CPU share that the kernel reserves for ordinary tasks.
//!
//! Mirrors kernel/fork.c, kernel/exit.c and kernel/time/posix-timers.c (6.18). Limits: a freezer of cgroup v1 keeps a
//! killed process, and with it the target, until it is thawed. Two cases still block the tracer: a page that is dropped
//! between check and read, and a target whose mappings the kernel has locked. If Yama lets a process trace only its
//! descendants (`kernel.yama.ptrace_scope` 1, without CAP_SYS_PTRACE), it refuses this process. Then
//! `super::with_stopped_thread` traces from a thread of Pagefold. Job control is deferred meanwhile
//! ([`StopSignalDeferral`]), but SIGSTOP and a frozen cgroup then keep the target stopped until Pagefold continues.

use std::cell::Cell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::fault;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, getpid, getppid, kill_process, set_parent_process_death_signal, setsid};
use rustix::thread::{CpuSet, futex, sched_getaffinity, sched_setaffinity, set_name};
use rustix::time::{ClockId, Timespec, clock_gettime};

/// How long a tracer may go without running before the kernel kills it.
const WATCHDOG_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a tracer may go without running before it is moved to other CPUs, and then before it loses its priority.
const STALL_TIMEOUTS: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(200)];
/// Bytes of the tracer's stack, and of the inaccessible page below it.
const TRACER_STACK_BYTES: usize = 512 << 10;
const STACK_GUARD_BYTES: usize = 64 << 10;

/// CPU nanoseconds of all tracers that have ended.
static TRACER_CPU_NANOSECONDS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The timer of the tracer that runs on behalf of this thread.
    static WATCHDOG_TIMER: Cell<Option<libc::timer_t>> = const { Cell::new(None) };
    /// The stack of this thread's last tracer. Its pages are present already, so a target is not stopped while they
    /// fault in.
    static CACHED_STACK: Cell<Option<TracerStack>> = const { Cell::new(None) };
    /// How often a tracer restarted its timer. A change shows that the tracer has run.
    static WATCHDOG_RESTARTS: AtomicU32 = const { AtomicU32::new(0) };
}

/// CPU time of the tracers that have ended. It is not part of the CPU time of this process.
#[must_use]
pub fn tracer_cpu_time() -> Duration {
    Duration::from_nanos(TRACER_CPU_NANOSECONDS.load(Ordering::Relaxed))
}

/// Restart the watchdog timer. Does nothing outside a tracer.
pub(super) fn restart_watchdog() {
    let Some(timer) = WATCHDOG_TIMER.get() else { return };
    WATCHDOG_RESTARTS.with(|restarts| restarts.fetch_add(1, Ordering::Relaxed));
    // SAFETY: all zeros are a valid `itimerspec`.
    let mut expiry: libc::itimerspec = unsafe { std::mem::zeroed() };
    expiry.it_value.tv_sec = WATCHDOG_TIMEOUT.as_secs() as libc::time_t;
    // SAFETY: the timer belongs to this process, which never deletes it; `expiry` is valid and no old value is asked
    // for.
    unsafe { libc::timer_settime(timer, 0, &raw const expiry, std::ptr::null_mut()) };
}

/// Create the watchdog timer. It sends SIGKILL to this process; neither a stop nor a blocked signal prevents that.
fn start_watchdog() -> bool {
    // SAFETY: all zeros are a valid `sigevent`.
    let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
    event.sigev_notify = libc::SIGEV_SIGNAL;
    event.sigev_signo = libc::SIGKILL;
    let mut timer: libc::timer_t = std::ptr::null_mut();
    // SAFETY: `event` and `timer` are valid; the kernel deletes the timer when this process ends.
    let is_created = unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) } == 0;
    WATCHDOG_TIMER.set(is_created.then_some(timer));
    restart_watchdog();
    is_created
}

/// A mapping to run the tracer on, unmapped when dropped.
struct TracerStack(*mut libc::c_void);

impl TracerStack {
    fn new() -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_STACK | libc::MAP_NORESERVE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let base =
            unsafe { libc::mmap(std::ptr::null_mut(), STACK_GUARD_BYTES + TRACER_STACK_BYTES, access, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let stack = Self(base);
        // SAFETY: the range is the lower end of the mapping made above, which is not in use yet.
        match unsafe { libc::mprotect(base, STACK_GUARD_BYTES, libc::PROT_NONE) } {
            0 => Ok(stack),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn top(&self) -> *mut libc::c_void {
        // Never dereferenced beyond the mapping: stacks grow downwards.
        self.0.wrapping_byte_add(STACK_GUARD_BYTES + TRACER_STACK_BYTES)
    }
}

impl Drop for TracerStack {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's, and the tracer that ran on it has ended.
        unsafe { libc::munmap(self.0, STACK_GUARD_BYTES + TRACER_STACK_BYTES) };
    }
}

/// Blocks all signals of the calling thread until dropped. A tracer that is started meanwhile begins with blocked
/// signals.
struct SignalMaskGuard(libc::sigset_t);

impl SignalMaskGuard {
    fn new() -> Self {
        let mut all_signals = std::mem::MaybeUninit::uninit();
        // SAFETY: `all_signals` is writable memory for a set.
        unsafe { libc::sigfillset(all_signals.as_mut_ptr()) };
        let mut previous_mask = std::mem::MaybeUninit::uninit();
        // SAFETY: `sigfillset` has initialized `all_signals`; `previous_mask` is writable memory for a set.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all_signals.as_ptr(), previous_mask.as_mut_ptr()) };
        // SAFETY: `pthread_sigmask` fails only for an unknown first argument, so it has initialized `previous_mask`.
        Self(unsafe { previous_mask.assume_init() })
    }
}

impl Drop for SignalMaskGuard {
    fn drop(&mut self) {
        // SAFETY: the set is valid; the old set is not requested.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut()) };
    }
}

/// Stop signals of job control. SIGSTOP cannot be deferred.
const JOB_CONTROL_SIGNALS: [libc::c_int; 3] = [libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];

/// The signals of [`JOB_CONTROL_SIGNALS`] that arrived while a [`StopSignalDeferral`] existed, as bits by number, with
/// [`DEFERRAL_ACTIVE_BIT`].
static DEFERRED_STOP_SIGNALS: AtomicU32 = AtomicU32::new(0);

/// The bit of [`DEFERRED_STOP_SIGNALS`] that is set while a [`StopSignalDeferral`] exists. No signal has the number 0.
const DEFERRAL_ACTIVE_BIT: u32 = 1;

/// The handler of [`JOB_CONTROL_SIGNALS`] and SIGCONT.
extern "C" fn defer_stop_signal(signal: libc::c_int) {
    if signal == libc::SIGCONT {
        // The kernel also drops pending stop signals then (kernel/signal.c, `prepare_signal`).
        DEFERRED_STOP_SIGNALS.fetch_and(DEFERRAL_ACTIVE_BIT, Ordering::Relaxed);
    } else if DEFERRED_STOP_SIGNALS.fetch_or(1 << signal, Ordering::Relaxed) & DEFERRAL_ACTIVE_BIT == 0 {
        // This handler began before the actions were restored, and the deferred signals have been sent since.
        DEFERRED_STOP_SIGNALS.fetch_and(!(1 << signal), Ordering::Relaxed);
        send_to_self(signal);
    }
}

fn send_to_self(signal: libc::c_int) {
    // SAFETY: the call has no preconditions: it sends a signal to this process.
    unsafe { libc::kill(getpid().as_raw_nonzero().get(), signal) };
}

/// Defers the stop signals of job control for all threads of this process until dropped. Then they take effect, except
/// those followed by a SIGCONT. Used for a visit by a thread of Pagefold itself. Only one exists at a time, because
/// signal actions belong to the process.
///
/// It uses a handler, because programs started meanwhile would inherit an ignored signal.
pub(super) struct StopSignalDeferral {
    previous_actions: Vec<(libc::c_int, libc::sigaction)>,
    _guard: MutexGuard<'static, ()>,
}

impl StopSignalDeferral {
    pub(super) fn new() -> Self {
        static DEFERRAL_LOCK: Mutex<()> = Mutex::new(());
        let guard = DEFERRAL_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: all zeros are a valid `sigaction`, with an empty mask.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = defer_stop_signal as extern "C" fn(libc::c_int) as libc::sighandler_t;
        action.sa_flags = libc::SA_RESTART;
        DEFERRED_STOP_SIGNALS.fetch_or(DEFERRAL_ACTIVE_BIT, Ordering::Relaxed);
        let previous_actions = JOB_CONTROL_SIGNALS.into_iter().chain([libc::SIGCONT]).filter_map(|signal| {
            let mut previous_action = std::mem::MaybeUninit::uninit();
            // SAFETY: `action` is valid. Its handler changes an atomic and calls kill(2), which is async-signal-safe.
            // `previous_action` is writable memory for the old action.
            let result = unsafe { libc::sigaction(signal, &raw const action, previous_action.as_mut_ptr()) };
            // SAFETY: the call has succeeded, so it has initialized `previous_action`.
            (result == 0).then(|| (signal, unsafe { previous_action.assume_init() }))
        });
        Self { previous_actions: previous_actions.collect(), _guard: guard }
    }
}

impl Drop for StopSignalDeferral {
    fn drop(&mut self) {
        for (signal, previous_action) in &self.previous_actions {
            // SAFETY: the action was the process's before; the old action is not requested.
            unsafe { libc::sigaction(*signal, previous_action, std::ptr::null_mut()) };
        }
        let deferred = DEFERRED_STOP_SIGNALS.swap(0, Ordering::Relaxed);
        JOB_CONTROL_SIGNALS.into_iter().filter(|signal| deferred >> signal & 1 == 1).for_each(send_to_self);
    }
}

/// The tracer's work and its result, in memory that both processes share.
struct TracerJob<W, T> {
    parent: Pid,
    work: Option<W>,
    outcome: Option<std::thread::Result<T>>,
}

/// The main function of the tracer; `job` is the address of its [`TracerJob`].
extern "C" fn tracer_main<W: FnOnce() -> T, T>(job: *mut libc::c_void) -> libc::c_int {
    // SAFETY: `run_in_tracer_process` passes the address of its job and does not touch it until this process has left
    // the memory.
    let job = unsafe { &mut *job.cast::<TracerJob<W, T>>() };
    let has_death_signal = set_parent_process_death_signal(Some(Signal::KILL)).is_ok();
    fault::point("tracer started");
    // If the parent ended before the signal was requested, the kernel sends none. A process group of its own instead of
    // a session made stops slower on a loaded machine (two CPUs, load 30): 1.8 ms instead of 0.6 ms at the 99th
    // percentile.
    let is_protected = has_death_signal && getppid() == Some(job.parent) && setsid().is_ok() && start_watchdog();
    if let Some(work) = job.work.take().filter(|_| is_protected) {
        // The name is only for display.
        let _ = set_name(c"pagefold-inject");
        job.outcome = Some(catch_unwind(AssertUnwindSafe(work)));
    }
    WATCHDOG_TIMER.set(None);
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let nanoseconds = Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0)).as_nanos();
    TRACER_CPU_NANOSECONDS.fetch_add(u64::try_from(nanoseconds).unwrap_or(u64::MAX), Ordering::Relaxed);
    0
}

/// How often tracers of this thread have restarted their timer.
fn watchdog_restarts() -> u32 {
    WATCHDOG_RESTARTS.with(|restarts| restarts.load(Ordering::Relaxed))
}

/// Wait until the tracer has left this memory, and check that it runs. `alive` is not 0 until then; `restarts_before`
/// is the value of [`watchdog_restarts`] before the tracer was started.
///
/// All code here makes raw system calls, because the thread-local state belongs to the tracer. Only the last step
/// writes to `errno`, and only if the tracer has ended.
fn wait_for_tracer_exit(tracer: Pid, alive: &AtomicU32, restarts_before: u32) {
    let (mut last_restarts, mut stage) = (restarts_before, 0);
    loop {
        let value = alive.load(Ordering::Acquire);
        if value == 0 {
            return;
        }
        let timeout = STALL_TIMEOUTS.get(stage).map(|timeout| Timespec {
            tv_sec: timeout.as_secs().cast_signed(),
            tv_nsec: timeout.subsec_nanos().into(),
        });
        // The kernel wakes only a shared futex here, not a private one.
        let wait_result = futex::wait(alive, futex::Flags::empty(), value, timeout.as_ref());
        if wait_result == Err(Errno::TIMEDOUT) {
            if watchdog_restarts() == restarts_before {
                // Before it begins, the tracer is an ordinary task on any CPU. Before it has its own session, a SIGSTOP
                // for the process group stops it, too, and the group's SIGCONT arrives too late for it.
                let _ = kill_process(tracer, Signal::CONT);
            } else if watchdog_restarts() == last_restarts {
                match stage {
                    0 => move_to_other_cpus(tracer),
                    _ => lower_priority(tracer),
                }
                stage += 1;
            }
            last_restarts = watchdog_restarts();
        }
    }
}

/// Move a tracer that is limited to one CPU to the others that this thread may use.
fn move_to_other_cpus(tracer: Pid) {
    let (Ok(allowed), Ok(pinned)) = (sched_getaffinity(None), sched_getaffinity(Some(tracer))) else { return };
    if let Some(remaining) = other_cpus(&allowed, &pinned) {
        // If this fails, the tracer waits for its CPU, at most until its timer ends it.
        let _ = sched_setaffinity(Some(tracer), &remaining);
    }
}

/// The allowed CPUs without the one of `pinned`. None if `pinned` has more than one CPU, or if no CPU is left.
fn other_cpus(allowed: &CpuSet, pinned: &CpuSet) -> Option<CpuSet> {
    let mut remaining = *allowed;
    (0..CpuSet::MAX_CPU).filter(|&cpu| pinned.is_set(cpu)).for_each(|cpu| remaining.unset(cpu));
    (pinned.count() == 1 && remaining.count() > 0).then_some(remaining)
}

/// Give a tracer ordinary priority.
fn lower_priority(tracer: Pid) {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: `parameters` is valid.
    unsafe { libc::sched_setscheduler(tracer.as_raw_nonzero().get(), libc::SCHED_OTHER, &raw const parameters) };
    if let Ok(allowed) = sched_getaffinity(None) {
        let _ = sched_setaffinity(Some(tracer), &allowed);
    }
}

/// Run `work` in a tracer process while the calling thread waits. Threads that it has seized are released when this
/// returns.
///
/// # Errors
/// The process could not be started, or could not be protected from stops. `work` has not run then.
///
/// # Panics
/// If `work` does.
pub(super) fn run_in_tracer_process<T>(work: impl FnOnce() -> T) -> io::Result<T> {
    fn entry<W: FnOnce() -> T, T>(_: &TracerJob<W, T>) -> extern "C" fn(*mut libc::c_void) -> libc::c_int {
        tracer_main::<W, T>
    }
    let stack = CACHED_STACK.take().map_or_else(TracerStack::new, Ok)?;
    let mut job = TracerJob { parent: getpid(), work: Some(work), outcome: None };
    let entry_point = entry(&job);
    let signal_guard = SignalMaskGuard::new();
    let (alive, restarts_before) = (AtomicU32::new(1), watchdog_restarts());
    // Without an exit signal, so that other waits of this process do not see the tracer.
    let flags = libc::CLONE_VM | libc::CLONE_FILES | libc::CLONE_CHILD_CLEARTID;
    let (job_address, parent_tid, tls) =
        ((&raw mut job).cast(), std::ptr::null_mut::<i32>(), std::ptr::null_mut::<()>());
    // SAFETY: the tracer runs `tracer_main` on a stack of its own. It uses the thread-local state of this thread, which
    // this thread does not touch (`wait_for_tracer_exit`) until the tracer has left this memory. Until then this frame
    // keeps everything that `job` refers to.
    let tracer = unsafe { libc::clone(entry_point, stack.top(), flags, job_address, parent_tid, tls, alive.as_ptr()) };
    let Some(pid) = Pid::from_raw(tracer).filter(|_| tracer > 0) else {
        return Err(io::Error::last_os_error());
    };
    wait_for_tracer_exit(pid, &alive, restarts_before);
    // The tracer's end is not complete yet: it releases its tracees after its memory.
    let mut status = 0;
    // SAFETY: `status` is writable memory for the status. All signals are blocked, so the call is not interrupted.
    let reaped_pid = unsafe { libc::waitpid(tracer, &raw mut status, libc::__WALL) };
    if reaped_pid == tracer && libc::WIFSIGNALED(status) {
        // The memory may be inconsistent now: see the module documentation.
        let _ = kill_process(getpid(), Signal::KILL);
        loop {
            std::thread::park();
        }
    }
    drop(signal_guard);
    CACHED_STACK.set(Some(stack));
    match job.outcome {
        Some(outcome) => Ok(outcome.unwrap_or_else(|panic| resume_unwind(panic))),
        None => Err(io::Error::other("the process could not be protected from stops")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tracer_process_has_own_group_and_shared_memory() {
        let (mut runs, name) = (0, "shared".to_owned());
        let result = run_in_tracer_process(|| {
            runs += 1;
            (getpid(), name.clone() + "!", rustix::process::getpgrp())
        });
        let (pid, name, group) = result.expect("a process starts");
        assert_eq!((runs, name.as_str()), (1, "shared!"));
        assert!(pid != getpid() && group == pid);
        assert!(!std::fs::exists(format!("/proc/{pid}")).expect("/proc is readable"), "it has ended and is reaped");
        assert!(tracer_cpu_time() > Duration::ZERO);
    }

    #[test]
    fn pinned_tracer_moves_to_other_allowed_cpus() {
        let set = |cpus: &[usize]| {
            let mut set = CpuSet::new();
            cpus.iter().for_each(|&cpu| set.set(cpu));
            set
        };
        assert_eq!(other_cpus(&set(&[0, 1, 5]), &set(&[1])), Some(set(&[0, 5])));
        assert_eq!(other_cpus(&set(&[0, 1, 5]), &set(&[7])), Some(set(&[0, 1, 5])), "a cpuset that changed");
        assert_eq!(other_cpus(&set(&[1]), &set(&[1])), None);
        assert_eq!(other_cpus(&set(&[0, 1]), &set(&[0, 1])), None, "it is not pinned");
    }

    #[test]
    fn signal_mask_is_restored_and_panics_propagate() {
        let mask = || {
            let status = std::fs::read_to_string("/proc/thread-self/status").expect("a status");
            status.lines().find(|line| line.starts_with("SigBlk:")).expect("a mask").to_owned()
        };
        let initial = mask();
        let tracer_mask = run_in_tracer_process(mask).expect("a process starts");
        assert_eq!(mask(), initial);
        let job_control = [libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU, libc::SIGCHLD];
        let blocked = u64::from_str_radix(tracer_mask.trim_start_matches("SigBlk:").trim(), 16).expect("hexadecimal");
        assert!(job_control.iter().all(|signal| blocked >> (signal - 1) & 1 == 1), "{tracer_mask}");
        let panic = catch_unwind(|| run_in_tracer_process(|| panic!("on purpose")));
        assert_eq!(panic.expect_err("it panics").downcast_ref::<&str>(), Some(&"on purpose"));
        assert_eq!(mask(), initial);
    }

    const CASE: &str = "PAGEFOLD_TEST_STOPS_HELD";
    const FILE: &str = "PAGEFOLD_TEST_STOPS_HELD_FILE";

    /// The child of the test below. Writes a file when it reaches its last step.
    fn child(case: &str) {
        // The signal may be ignored where the tests are started, and programs inherit that. SAFETY: the default action
        // is valid for this signal, and no code in this process relies on another one.
        unsafe { libc::signal(libc::SIGTSTP, libc::SIG_DFL) };
        let write_marker =
            || std::fs::write(std::env::var_os(FILE).expect("a file"), "held").expect("it can be written");
        if case == "late handler" {
            write_marker();
            return defer_stop_signal(libc::SIGTSTP);
        }
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        let send = |signal: Signal, expected: u32| {
            kill_process(getpid(), signal).expect("a signal for itself");
            while DEFERRED_STOP_SIGNALS.load(Ordering::Relaxed) != expected {
                assert!(
                    std::time::Instant::now() < deadline,
                    "{signal:?} leaves {}",
                    DEFERRED_STOP_SIGNALS.load(Ordering::Relaxed)
                );
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        let deferral = StopSignalDeferral::new();
        send(Signal::TSTP, DEFERRAL_ACTIVE_BIT | 1 << libc::SIGTSTP);
        if case == "continued" {
            send(Signal::CONT, DEFERRAL_ACTIVE_BIT);
        }
        write_marker();
        drop(deferral);
        assert_eq!(DEFERRED_STOP_SIGNALS.load(Ordering::Relaxed), 0);
    }

    /// The child process is this test again.
    #[test]
    fn job_control_stops_this_process_after_a_visit_by_a_thread_of_it() {
        if let Ok(case) = std::env::var(CASE) {
            return child(&case);
        }
        let name = "inject::tracer::tests::job_control_stops_this_process_after_a_visit_by_a_thread_of_it";
        let file = std::env::temp_dir().join(format!("pagefold-held-{}", std::process::id()));
        for (case, stops) in [("held", true), ("continued", false), ("late handler", true)] {
            let mut command = std::process::Command::new(std::env::current_exe().expect("a test"));
            command.args([name, "--exact", "--nocapture"]).env(CASE, case).env(FILE, &file);
            command.stdout(std::process::Stdio::null());
            // Its parent is in another group of its session, so it is no orphan. Job control would not stop an orphan.
            std::os::unix::process::CommandExt::process_group(&mut command, 0);
            let mut child = command.spawn().expect("it starts");
            let status = format!("/proc/{}/status", child.id());
            let deadline = std::time::Instant::now() + Duration::from_secs(30);
            let stopped = loop {
                let status = std::fs::read_to_string(&status).expect("it is not reaped");
                let ended = status.contains("State:\tZ") || std::time::Instant::now() > deadline;
                if status.contains("State:\tT") || ended {
                    break !ended;
                }
                std::thread::sleep(Duration::from_millis(2));
            };
            let marker = std::fs::read_to_string(&file);
            let _ = std::fs::remove_file(&file);
            kill_process(Pid::from_child(&child), Signal::CONT).expect("it is not reaped");
            assert!(child.wait().expect("its end").success(), "{case}");
            assert!(marker.is_ok_and(|marker| marker == "held"), "{case}: it has come to the last step");
            assert_eq!(stopped, stops, "{case}");
        }
    }
}
