//! The process that traces a target during one visit.
//!
//! A tracer that is stopped leaves its target stopped. Job control (SIGTSTP from Ctrl-Z, SIGTTIN, SIGTTOU) and SIGSTOP
//! stop all threads of a process, so the tracer is a process of its own: in its own session, with all signals blocked.
//! It shares the memory and the open files of Pagefold, and the thread that starts it waits for its end, as with
//! vfork(2). Pagefold therefore stops between two visits.
//!
//! Both end together. When Pagefold is killed, the kernel kills the tracer (`PR_SET_PDEATHSIG`). When the tracer is
//! killed, Pagefold kills itself: the memory of both may be in the middle of a change. A kernel timer kills a tracer
//! that has not run for [`WATCHDOG`], because a SIGSTOP was sent to it or its cgroup was frozen; the end of the tracer
//! releases the target.
//!
//! Mirrors kernel/fork.c, kernel/exit.c and kernel/time/posix-timers.c (6.18). Limits: a freezer of cgroup v1 holds a
//! killed process until it is thawed, and the target with it. Where Yama lets a process trace only its descendants
//! (`kernel.yama.ptrace_scope` 1, without CAP_SYS_PTRACE) this process is refused, and `super::inside` traces from a
//! thread of Pagefold: there a stop of Pagefold can hold the target until SIGCONT.

use std::cell::Cell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal, getpid, getppid, kill_process, set_parent_process_death_signal, setsid};
use rustix::thread::set_name;
use rustix::time::{ClockId, clock_gettime};

/// How long a tracer may go without running before the kernel kills it.
const WATCHDOG: Duration = Duration::from_secs(5);
/// Bytes of the tracer's stack, and of the inaccessible page below it.
const STACK: usize = 512 << 10;
const GUARD: usize = 64 << 10;

/// CPU nanoseconds of all tracers that have ended.
static CPU_NANOSECONDS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The timer of the tracer that runs on behalf of this thread.
    static TIMER: Cell<Option<libc::timer_t>> = const { Cell::new(None) };
}

/// CPU time of the tracers that have ended. It is not part of the CPU time of this process.
#[must_use]
pub fn cpu_time() -> Duration {
    Duration::from_nanos(CPU_NANOSECONDS.load(Ordering::Relaxed))
}

/// Restart the watchdog timer. Does nothing outside a tracer.
pub(super) fn restart_watchdog() {
    let Some(timer) = TIMER.get() else { return };
    // SAFETY: all zeros are a valid `itimerspec`.
    let mut when: libc::itimerspec = unsafe { std::mem::zeroed() };
    when.it_value.tv_sec = WATCHDOG.as_secs() as libc::time_t;
    // SAFETY: the timer belongs to this process, which never deletes it; `when` is valid and no old value is asked for.
    unsafe { libc::timer_settime(timer, 0, &raw const when, std::ptr::null_mut()) };
}

/// Create the watchdog timer: SIGKILL for this process, which neither a stop nor a blocked signal holds back.
fn start_watchdog() -> bool {
    // SAFETY: all zeros are a valid `sigevent`.
    let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
    event.sigev_notify = libc::SIGEV_SIGNAL;
    event.sigev_signo = libc::SIGKILL;
    let mut timer: libc::timer_t = std::ptr::null_mut();
    // SAFETY: `event` and `timer` are valid; the kernel deletes the timer when this process ends.
    let created = unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) } == 0;
    TIMER.set(created.then_some(timer));
    restart_watchdog();
    created
}

/// A mapping to run the tracer on, unmapped when dropped.
struct Stack(*mut libc::c_void);

impl Stack {
    fn new() -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_STACK | libc::MAP_NORESERVE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), GUARD + STACK, access, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let stack = Self(base);
        // SAFETY: the range is the lower end of the mapping made above, which is not in use yet.
        match unsafe { libc::mprotect(base, GUARD, libc::PROT_NONE) } {
            0 => Ok(stack),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn top(&self) -> *mut libc::c_void {
        // Never dereferenced beyond the mapping: stacks grow downwards.
        self.0.wrapping_byte_add(GUARD + STACK)
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's, and the tracer that ran on it has ended.
        unsafe { libc::munmap(self.0, GUARD + STACK) };
    }
}

/// Blocks all signals of the calling thread until dropped. A tracer that is started meanwhile begins with them blocked.
struct SignalsBlocked(libc::sigset_t);

impl SignalsBlocked {
    fn new() -> Self {
        let mut all = std::mem::MaybeUninit::uninit();
        // SAFETY: `all` is a place for a set.
        unsafe { libc::sigfillset(all.as_mut_ptr()) };
        let mut before = std::mem::MaybeUninit::uninit();
        // SAFETY: `sigfillset` has initialized `all`; `before` is a place for a set.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) };
        // SAFETY: `pthread_sigmask` fails only for an unknown first argument, so it has initialized `before`.
        Self(unsafe { before.assume_init() })
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        // SAFETY: the set is valid; no old set is asked for.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut()) };
    }
}

/// What the tracer is to do, and what came of it: in memory that both processes share.
struct Job<W, T> {
    parent: Pid,
    work: Option<W>,
    outcome: Option<std::thread::Result<T>>,
}

/// The main function of the tracer; `job` is the address of its [`Job`].
extern "C" fn trace<W: FnOnce() -> T, T>(job: *mut libc::c_void) -> libc::c_int {
    // SAFETY: `run` passes the address of its job and does not touch it until this process has ended.
    let job = unsafe { &mut *job.cast::<Job<W, T>>() };
    let bound = set_parent_process_death_signal(Some(Signal::KILL)).is_ok();
    // A parent that ended before the signal was requested sends none.
    let protected = bound && getppid() == Some(job.parent) && setsid().is_ok() && start_watchdog();
    if let Some(work) = job.work.take().filter(|_| protected) {
        // The name is only shown.
        let _ = set_name(c"pagefold-inject");
        job.outcome = Some(catch_unwind(AssertUnwindSafe(work)));
    }
    TIMER.set(None);
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let nanoseconds = Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0)).as_nanos();
    CPU_NANOSECONDS.fetch_add(u64::try_from(nanoseconds).unwrap_or(u64::MAX), Ordering::Relaxed);
    0
}

/// Run `work` in a tracer process while the calling thread waits. What it has seized is released when this returns.
///
/// # Errors
/// No process could be started, or it could not be protected from stops; `work` has not run then.
///
/// # Panics
/// If `work` does.
pub(super) fn run<T>(work: impl FnOnce() -> T) -> io::Result<T> {
    fn entry<W: FnOnce() -> T, T>(_: &Job<W, T>) -> extern "C" fn(*mut libc::c_void) -> libc::c_int {
        trace::<W, T>
    }
    let stack = Stack::new()?;
    let mut job = Job { parent: getpid(), work: Some(work), outcome: None };
    let enter = entry(&job);
    let blocked = SignalsBlocked::new();
    // Without an exit signal, so that other waits of this process do not see the tracer.
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_FILES;
    // SAFETY: the tracer runs `trace` on a stack of its own and uses the thread-local state of this thread, which is
    // suspended until the tracer has ended, as is everything that `job` refers to.
    let tracer = unsafe { libc::clone(enter, stack.top(), flags, (&raw mut job).cast()) };
    if tracer == -1 {
        return Err(io::Error::last_os_error());
    }
    // Its end is not complete when this thread goes on: it releases what it traces later than its memory.
    let mut status = 0;
    // SAFETY: `status` is a valid place for the status. All signals are blocked, so the call is not interrupted.
    let waited = unsafe { libc::waitpid(tracer, &raw mut status, libc::__WALL) };
    if waited == tracer && libc::WIFSIGNALED(status) {
        // See the head: this memory cannot be relied upon.
        let _ = kill_process(getpid(), Signal::KILL);
        loop {
            std::thread::park();
        }
    }
    drop(blocked);
    match job.outcome {
        Some(outcome) => Ok(outcome.unwrap_or_else(|panic| resume_unwind(panic))),
        None => Err(io::Error::other("the process could not be protected from stops")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_runs_in_a_process_of_its_own_session_that_shares_memory() {
        let (mut seen, name) = (0, "shared".to_owned());
        let answer = run(|| {
            seen += 1;
            let session = rustix::process::getsid(None).expect("its own session");
            (getpid(), session, name.clone() + "!", rustix::process::getpgrp())
        });
        let (pid, session, name, group) = answer.expect("a process starts");
        assert_eq!((seen, name.as_str()), (1, "shared!"));
        assert!(pid != getpid() && session == pid && group == pid);
        assert!(!std::fs::exists(format!("/proc/{pid}")).expect("a look at /proc"), "it has ended and is reaped");
        assert!(cpu_time() > Duration::ZERO);
    }

    #[test]
    fn the_signal_mask_comes_back_and_a_panic_passes_through() {
        let mask = || {
            let status = std::fs::read_to_string("/proc/thread-self/status").expect("a status");
            status.lines().find(|line| line.starts_with("SigBlk:")).expect("a mask").to_owned()
        };
        let before = mask();
        let within = run(mask).expect("a process starts");
        assert_eq!(mask(), before);
        let job_control = [libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU, libc::SIGCHLD];
        let blocked = u64::from_str_radix(within.trim_start_matches("SigBlk:").trim(), 16).expect("hexadecimal");
        assert!(job_control.iter().all(|signal| blocked >> (signal - 1) & 1 == 1), "{within}");
        let panic = catch_unwind(|| run(|| panic!("on purpose")));
        assert_eq!(panic.expect_err("it panics").downcast_ref::<&str>(), Some(&"on purpose"));
        assert_eq!(mask(), before);
    }
}
