//! System calls made inside another running process, from outside.
//!
//! The kernel accepts some memory operations only from the process itself, among them `MADV_MERGEABLE` and
//! `PR_SET_MEMORY_MERGE`. So ptrace(2) stops one thread of the process for a moment, the thread makes the call, and
//! then continues where it was. The other threads never stop.
//!
//! **The thread can restore itself with one instruction at any time.** Before anything changes, a signal frame is
//! written on the thread's stack, below the part in use. It is the frame that the kernel would write for a signal at
//! this moment: all registers, the vector state and the signal mask. The thread is then parked at the code that ends
//! signal handlers (`rt_sigreturn`), with the stack pointer at that frame. If the tracer ends from here on, by
//! `kill -9` or a crash, the kernel releases the thread and the thread restores itself.
//!
//! To make a call, the thread enters `rt_sigreturn`. At its entry the tracer replaces that call by the wanted one, with
//! a return address that leads back to the stub. There the thread can begin the next call. While it is parked, all
//! signals are blocked; they stay pending and are delivered afterwards.
//!
//! At the end the thread is made to trap before it returns to user mode. That is the place in the kernel (`get_signal`)
//! at which it was first stopped. Its registers, among them the number of an interrupted call, can then be restored
//! exactly. The kernel restarts the call without any difference; on x86-64 a sleep continues with the time that is
//! left. If the tracer dies, the call restarts from its beginning instead. The only trace is a mark in a few KiB of
//! stack that were never used. It identifies these pages at the next visit.
//!
//! A stopped tracer does not keep the thread stopped either. The tracer is a separate process that job control does not
//! reach. A kernel timer ends a tracer that a SIGSTOP or a frozen cgroup stopped (`tracer`).
//!
//! Mirrors kernel/ptrace.c, kernel/signal.c, kernel/entry/common.c, kernel/rseq.c (6.18). Each architecture has its own
//! module.
//!
//! Limits:
//!
//! - A thread with a seccomp filter needs the filter suspended (CAP_SYS_ADMIN). The suspension lasts only while the
//!   thread is parked, and ends with the tracer. If the tracer is killed in the microseconds between replacing a call
//!   and the kernel's check of it, the filter applies to the call. Without that privilege the same is true for a filter
//!   that another thread installs on this one while it is parked.
//! - A few calls (epoll_wait(2), sigwaitinfo(2), sockets with a timeout: signal(7)) end with EINTR when their thread is
//!   stopped for any reason. The tracer undoes that; a socket's timeout starts again. A tracer that is killed before
//!   the thread is parked cannot undo it.
//! - A partial send or receive on a socket returns a short count, as after any stop.
//! - A signal that only the mask of ppoll(2) or a similar call blocked ends that wait.
//! - 32-bit programs, strict seccomp, shadow stacks, and programs that dispatch system calls themselves are refused.

#[cfg_attr(target_arch = "x86_64", path = "x86_64.rs")]
#[cfg_attr(target_arch = "aarch64", path = "aarch64.rs")]
mod arch;
mod ptrace;
mod stack;
mod target;
mod tracer;

use std::collections::VecDeque;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use crate::fault;
use ptrace::{StopReason, TracedThread};
pub use target::InjectTarget;
use target::{BlockedCall, VisitLock};
pub use tracer::tracer_cpu_time;

/// Space for arguments in the target's memory, in bytes.
pub const ARGUMENT_SPACE_BYTES: usize = 4096;

/// How long to wait for a call to be entered, and for the thread to trap after the last one.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a call may take. Unmerging many gigabytes takes seconds.
const CALL_TIMEOUT: Duration = Duration::from_secs(600);
/// How many times a call is restarted if the kernel asks for that.
const MAX_CALL_RESTARTS: usize = 1000;

const ALL_SIGNALS: u64 = u64::MAX;

/// Why nothing was injected, or not everything. In each case the target continues unchanged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InjectError {
    /// The process has ended or executes another program, or all threads that were tried have ended.
    Vanished,
    /// A privilege is missing; the text says which operation needs it.
    Denied(String),
    /// This thread or process already traces it.
    Traced(u32),
    /// This process does not support injection; the text says why.
    Unsupported(String),
    /// Injection is not possible now; the text says why.
    Busy(String),
    /// Another error; the text says which.
    Failed(String),
}

/// Addresses of code in the target's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct InjectionSites {
    /// The code that ends signal handlers.
    sigreturn_stub: u64,
    /// Where an injected call returns to.
    return_site: u64,
}

/// Convert an I/O error, with the operation that failed. Errors because the thread has ended become `Vanished`.
fn operation_failed(operation: &'static str) -> impl Fn(io::Error) -> InjectError {
    move |error| match error.raw_os_error() {
        Some(libc::ESRCH) => InjectError::Vanished,
        Some(libc::EPERM | libc::EACCES) => InjectError::Denied(operation.to_owned()),
        _ => InjectError::Failed(format!("{operation}: {error}")),
    }
}

/// A stopped thread that can make system calls.
#[derive(Debug)]
pub struct StoppedThread<'a> {
    target: &'a InjectTarget,
    thread: TracedThread,
    sites: InjectionSites,
    parked_registers: arch::Registers,
    frame_address: u64,
    argument_space: u64,
    stopped_at: Instant,
}

impl StoppedThread<'_> {
    /// For how long the thread has been stopped.
    #[must_use]
    pub fn stopped_for(&self) -> Duration {
        self.stopped_at.elapsed()
    }

    /// Write at most [`ARGUMENT_SPACE_BYTES`] bytes for a call to read. Returns their address in the target. Replaces
    /// earlier arguments.
    ///
    /// # Errors
    /// `Vanished` when the process has ended.
    ///
    /// # Panics
    /// If there are too many bytes.
    pub fn write_arguments(&self, bytes: &[u8]) -> Result<u64, InjectError> {
        assert!(bytes.len() <= ARGUMENT_SPACE_BYTES, "{} bytes", bytes.len());
        self.target
            .memory
            .write_all_at(bytes, self.argument_space)
            .map_err(operation_failed("writing to its stack"))?;
        Ok(self.argument_space)
    }

    /// Make a system call. Returns the kernel's result: a negative number is an error.
    ///
    /// # Errors
    /// `Vanished` when the process ended, `Busy` when it was frozen. No further call is possible then.
    pub fn call_syscall(&self, number: i64, arguments: [u64; 6]) -> Result<i64, InjectError> {
        let deadline = Instant::now() + CALL_TIMEOUT;
        for _ in 0..MAX_CALL_RESTARTS {
            check_deadline(deadline)?;
            self.wait_for_syscall_stop(STOP_TIMEOUT)?;
            fault::point("at the entry of sigreturn");
            let registers = arch::read_registers(self.thread).map_err(operation_failed("reading registers"))?;
            if !arch::is_at_sigreturn_entry(&registers, self.sites) {
                // Whatever code is at the stub now, it makes no call of its own here: seccomp is suspended.
                arch::write_registers(self.thread, &self.parked_registers)
                    .map_err(operation_failed("writing registers"))?;
                return Err(InjectError::Failed("the thread is not where it was parked".to_owned()));
            }
            arch::replace_call(self.thread, &self.parked_registers, self.frame_address, self.sites, number, arguments)
                .map_err(operation_failed("writing registers"))?;
            fault::point("system call replaced");
            self.wait_for_syscall_stop(CALL_TIMEOUT)?;
            fault::point("at the exit of the call");
            let registers = arch::read_registers(self.thread).map_err(operation_failed("reading registers"))?;
            arch::write_registers(self.thread, &self.parked_registers)
                .map_err(operation_failed("writing registers"))?;
            fault::point("parked again");
            let result = arch::call_result(&registers);
            // The wait was interrupted by a stop signal, which cannot be blocked, or by other task work.
            if !arch::is_restart_code(result) {
                return Ok(result);
            }
        }
        Err(InjectError::Busy("the call is interrupted repeatedly".to_owned()))
    }

    fn wait_for_syscall_stop(&self, timeout: Duration) -> Result<(), InjectError> {
        let resuming = operation_failed("resuming it");
        let deadline = Instant::now() + timeout;
        self.thread.resume_to_syscall(0).map_err(&resuming)?;
        loop {
            // Stop signals may arrive without end.
            check_deadline(deadline)?;
            match self.thread.wait_for_stop(deadline).map_err(operation_failed("waiting for it"))? {
                Some(StopReason::Syscall) => return Ok(()),
                // A group stop: the thread returns to it when it is released.
                Some(StopReason::EventStop) => self.thread.resume_to_syscall(0).map_err(&resuming)?,
                // Only stop signals arrive here; all others are blocked.
                Some(StopReason::Signal(signal)) => self.thread.resume_to_syscall(signal).map_err(&resuming)?,
                Some(StopReason::Exec | StopReason::Ended) => return Err(InjectError::Vanished),
                None => return Err(InjectError::Busy("it does not run: is it frozen?".to_owned())),
            }
        }
    }
}

fn check_deadline(deadline: Instant) -> Result<(), InjectError> {
    if Instant::now() < deadline {
        Ok(())
    } else {
        Err(InjectError::Busy("repeated signals keep it from stopping".to_owned()))
    }
}

/// Wait until an interrupted thread traps within `get_signal`. Signals that arrive before are delivered.
fn wait_for_trap(thread: TracedThread, deadline: Instant) -> Result<(), InjectError> {
    loop {
        check_deadline(deadline)?;
        match thread.wait_for_stop(deadline).map_err(operation_failed("waiting for it"))? {
            Some(StopReason::EventStop) => return Ok(()),
            Some(StopReason::Signal(signal)) => thread.resume(signal).map_err(operation_failed("resuming it"))?,
            Some(StopReason::Syscall) => thread.resume(0).map_err(operation_failed("resuming it"))?,
            Some(StopReason::Exec | StopReason::Ended) => return Err(InjectError::Vanished),
            None => {
                return Err(InjectError::Busy("it does not stop: it waits in the kernel, or gets no CPU".to_owned()));
            }
        }
    }
}

/// Why an attempt on one thread failed.
enum VisitError {
    /// Another thread might succeed.
    TryAnotherThread(InjectError),
    /// No thread can succeed.
    Unreachable(InjectError),
    /// This tracer is not permitted to trace the process. A thread of Pagefold may trace it if the process is a descendant (Yama).
    TracerDenied(InjectError),
}

/// [`visit_thread`] in a separate process. If that process may not trace the target, on a thread of this process.
fn visit_from_tracer_process<T: Send>(
    target: &InjectTarget,
    tid: i32,
    stop_timeout: Duration,
    lock: &VisitLock,
    work: &mut (dyn FnMut(&StoppedThread<'_>) -> Result<T, InjectError> + Send),
) -> Result<(Result<T, InjectError>, Duration), VisitError> {
    let starting = operation_failed("starting its tracer");
    match tracer::run_in_tracer_process(|| visit_thread(target, tid, stop_timeout, lock, work))
        .map_err(&starting)
        .map_err(VisitError::Unreachable)?
    {
        Err(VisitError::TracerDenied(_)) => {}
        result => return result,
    }
    let _deferral = tracer::StopSignalDeferral::new();
    let result = std::thread::scope(|scope| {
        let name = "pagefold-inject".to_owned();
        let tracer = std::thread::Builder::new()
            .name(name)
            .spawn_scoped(scope, || visit_thread(target, tid, stop_timeout, lock, work));
        // Pass its panic on. The kernel has released the thread that it visited.
        tracer.map(|tracer| tracer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    result.map_err(starting).map_err(VisitError::Unreachable)?
}

/// Stop one thread of `target`, let `work` make calls in it, and release it. Returns for how long it was stopped.
///
/// Must run in a process or on a thread of its own. The kernel releases a thread that was seized but does not stop only
/// when the tracer ends.
fn visit_thread<T>(
    target: &InjectTarget,
    tid: i32,
    stop_timeout: Duration,
    lock: &VisitLock,
    work: &mut dyn FnMut(&StoppedThread<'_>) -> Result<T, InjectError>,
) -> Result<(Result<T, InjectError>, Duration), VisitError> {
    ptrace::become_tracer();
    let thread = TracedThread::seize(tid).map_err(|error| match target.seize_error(tid, &error) {
        InjectError::Vanished => VisitError::TryAnotherThread(InjectError::Vanished),
        InjectError::Denied(error) => VisitError::TracerDenied(InjectError::Denied(error)),
        error => VisitError::Unreachable(error),
    })?;
    fault::point("seized");
    // The TID may now belong to another process's thread. A traced thread keeps its TID.
    if !target.has_thread(tid) {
        return Err(VisitError::TryAnotherThread(InjectError::Vanished));
    }
    // Two visits first lock, then seize, then check. So at least one of them sees the other.
    if lock.may_be_shared()
        && let Some(tracer) = target.tracer_of_other_thread(tid)
    {
        return Err(VisitError::Unreachable(InjectError::Traced(tracer)));
    }
    if let Some(processor) = target.last_cpu(tid) {
        ptrace::pin_to_cpu(processor);
    }
    // Only now that the thread is traced: a signal handler would run only after a stop.
    let blocked_call = if arch::KEEPS_FIRST_ARGUMENT { None } else { target.blocked_call(tid) };
    thread.interrupt().map_err(operation_failed("interrupting it")).map_err(VisitError::TryAnotherThread)?;
    fault::point("interrupted");
    let (mut deadline, final_deadline) = (Instant::now() + stop_timeout, Instant::now() + STOP_TIMEOUT);
    loop {
        match wait_for_trap(thread, deadline) {
            // The thread is runnable, but has no CPU. If released now, a call that was interrupted already would end
            // with EINTR.
            Err(InjectError::Busy(_)) if Instant::now() < final_deadline && target.is_runnable(tid) => {
                deadline = final_deadline.min(Instant::now() + stop_timeout);
            }
            result => break result.map_err(VisitError::TryAnotherThread)?,
        }
    }
    let stopped_at = Instant::now();
    fault::point("stopped");
    let parked = park_thread(target, tid, thread, blocked_call.as_ref(), stopped_at).map_err(|error| {
        // Nothing else changed: only unused stack was written, or the call was set to restart.
        let _ = thread.detach();
        match error {
            InjectError::Unsupported(_) | InjectError::Vanished => VisitError::Unreachable(error),
            _ => VisitError::TryAnotherThread(error),
        }
    })?;
    let outcome = work(&parked.thread);
    match parked.restore_and_detach() {
        Ok(()) => Ok((outcome, stopped_at.elapsed())),
        // The calls were made. Their result does not depend on whether the process ended since.
        Err(InjectError::Vanished) => Ok((outcome, stopped_at.elapsed())),
        Err(error) => Err(VisitError::Unreachable(error)),
    }
}

/// A thread at the stub, with all that restores it.
struct ParkedThread<'a> {
    thread: StoppedThread<'a>,
    state: arch::ThreadState,
    signal_mask: u64,
    /// The bytes that the stack must have at the frame's address afterwards.
    restored_stack: Vec<u8>,
}

/// The offset at which to read memory to find out whether `frame` was written over `previous` in it: the first word
/// that differs. If a killed tracer left the same frame, no word differs. Then it is the first word that is not zero,
/// as untouched memory is.
fn distinguishing_offset(previous: &[u8], frame: &[u8]) -> usize {
    let words = || previous.as_chunks::<8>().0.iter().zip(frame.as_chunks::<8>().0);
    let changed_word = words().position(|(previous, frame)| previous != frame);
    let word_index = changed_word.or_else(|| words().position(|(_, frame)| *frame != [0; 8]));
    8 * word_index.expect("a frame has words that are not zero")
}

fn park_thread<'a>(
    target: &'a InjectTarget,
    tid: i32,
    thread: TracedThread,
    blocked_call: Option<&BlockedCall>,
    stopped_at: Instant,
) -> Result<ParkedThread<'a>, InjectError> {
    let mut state = arch::ThreadState::capture(thread)?;
    let read = |address: u64| {
        let mut bytes = [0; 16];
        target.read_if_present(&mut bytes, address).ok().map(|()| bytes)
    };
    // At once, because the thread may soon be released and refused.
    if state.restart_interrupted_call(ptrace::monotonic_time(), read, blocked_call) {
        arch::write_registers(thread, &state.registers).map_err(operation_failed("writing registers"))?;
    }
    let sites = target.verify_sites()?;
    // Only after the stop: until then the thread runs its own code. Always: another thread may install a filter on it
    // at any time (SECCOMP_FILTER_FLAG_TSYNC).
    let suspension = thread.suspend_seccomp();
    fault::point("seccomp suspended");
    target.check_seccomp(tid, suspension.is_ok())?;
    if thread.dispatches_syscalls() {
        return Err(InjectError::Unsupported(
            "it dispatches its system calls itself (as emulators of Windows do)".to_owned(),
        ));
    }
    let signal_mask = thread.read_signal_mask().map_err(operation_failed("reading its signal mask"))?;
    let rseq_abort = match state.user_ip().and_then(|ip| Some((thread.rseq_address()?, ip))) {
        Some((rseq, ip)) => target.rseq_abort_address(rseq, ip),
        None => Ok(None),
    };
    if let Ok(Some(abort)) = rseq_abort {
        state.set_ip(abort);
    }
    let space_bytes = state.max_frame_bytes().next_multiple_of(64) + ARGUMENT_SPACE_BYTES;
    let stack::StackSpace { address: frame_address, previous_bytes, restored_bytes } =
        target.find_stack_space(tid, &state, space_bytes)?;
    let frame = state.build_frame(frame_address, signal_mask, sites);
    // The open memory outlives an exec if another process shares it. It must still be this thread's memory: a write to
    // one must change the other.
    let offset = distinguishing_offset(&previous_bytes, &frame);
    let thread_sees = |bytes: &[u8]| {
        let word = thread.peek_word(frame_address + offset as u64);
        word.is_ok_and(|word| bytes[offset..].starts_with(&word.to_ne_bytes()))
    };
    if !thread_sees(&previous_bytes) {
        return Err(InjectError::Vanished);
    }
    target.memory.write_all_at(&frame, frame_address).map_err(operation_failed("writing to its stack"))?;
    fault::point("frame written");
    // Only now is it certain that the rseq critical section was read from the memory of this thread.
    let refusal = if thread_sees(&frame) { rseq_abort.err() } else { Some(InjectError::Vanished) };
    if let Some(error) = refusal {
        // Restore with the mark. Otherwise each visit would leave less untouched stack to the owner of this memory.
        target.memory.write_all_at(&restored_bytes, frame_address).map_err(operation_failed("restoring its stack"))?;
        return Err(error);
    }
    let parked_registers = arch::parked_registers(&state, frame_address, sites);
    arch::write_registers(thread, &parked_registers).map_err(operation_failed("writing registers"))?;
    fault::point("parked");
    thread.write_signal_mask(ALL_SIGNALS).map_err(operation_failed("blocking its signals"))?;
    fault::point("signals blocked");
    let argument_space = frame_address + frame.len().next_multiple_of(64) as u64;
    Ok(ParkedThread {
        thread: StoppedThread { target, thread, sites, parked_registers, frame_address, argument_space, stopped_at },
        state,
        signal_mask,
        restored_stack: restored_bytes,
    })
}

impl ParkedThread<'_> {
    /// Restore everything and release the thread.
    fn restore_and_detach(self) -> Result<(), InjectError> {
        let StoppedThread { target, thread, frame_address, .. } = self.thread;
        thread.interrupt().map_err(operation_failed("interrupting it"))?;
        fault::point("interrupted to leave");
        thread.resume(0).map_err(operation_failed("resuming it"))?;
        fault::point("resumed to leave");
        wait_for_trap(thread, Instant::now() + STOP_TIMEOUT)?;
        fault::point("stopped to leave");
        thread.write_signal_mask(self.signal_mask).map_err(operation_failed("restoring its signal mask"))?;
        fault::point("signal mask restored");
        self.state.restore(thread).map_err(operation_failed("restoring its registers"))?;
        fault::point("registers restored");
        // From here the thread does not need the frame. Leaving it there would do no harm, because that stack is
        // unused.
        target
            .memory
            .write_all_at(&self.restored_stack, frame_address)
            .map_err(operation_failed("restoring its stack"))?;
        fault::point("stack restored");
        thread.detach().map_err(operation_failed("releasing it"))?;
        fault::point("detached");
        Ok(())
    }
}

/// Stop one thread of a process for a moment and let `work` make system calls in it. Returns the result of `work` and
/// for how long the thread was stopped.
///
/// `work` is called at most once. After any error the thread continues unchanged.
///
/// # Errors
/// Why no thread could be stopped, or the error of `work`.
pub fn with_stopped_thread<T: Send>(
    target: &InjectTarget,
    work: impl FnOnce(&StoppedThread<'_>) -> Result<T, InjectError> + Send,
) -> Result<(T, Duration), InjectError> {
    let lock = target.lock()?;
    let mut work = Some(work);
    let mut visit_once = |thread: &StoppedThread<'_>| (work.take().expect("a thread is visited once"))(thread);
    let mut last_error = InjectError::Vanished;
    // Threads are listed only if the preferred one fails, because listing reads files of many threads.
    let mut has_listed_threads = false;
    let mut untried: VecDeque<_> = target.preferred_thread().into_iter().collect();
    loop {
        let Some((tid, stop_timeout)) = untried.pop_front() else {
            if has_listed_threads {
                return Err(last_error);
            }
            (has_listed_threads, untried) = (true, target.candidate_threads()?.into());
            continue;
        };
        fault::point("thread chosen");
        let result = visit_from_tracer_process(target, tid, stop_timeout, &lock, &mut visit_once);
        target.note_visit(tid, result.is_ok());
        match result {
            Ok((outcome, stopped)) => return outcome.map(|outcome| (outcome, stopped)),
            Err(VisitError::Unreachable(error) | VisitError::TracerDenied(error)) => return Err(error),
            Err(VisitError::TryAnotherThread(error)) => last_error = error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distinguishing_offset_is_the_first_changed_word() {
        let words = |words: [u64; 3]| words.map(u64::to_ne_bytes).concat();
        let frame = words([0, 7, 8]);
        for (previous, offset) in [([0, 0, 0], 8), ([5, 5, 5], 0), ([0, 7, 0], 16), ([0, 7, 8], 8)] {
            assert_eq!(distinguishing_offset(&[words(previous), vec![1; 8]].concat(), &frame), offset, "{previous:?}");
        }
    }
}
