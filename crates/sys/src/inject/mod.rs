//! System calls made inside another running process, from outside.
//!
//! Some of what a process may do to its memory the kernel takes only from itself: `MADV_MERGEABLE` and
//! `PR_SET_MEMORY_MERGE` among it. So one thread of it is stopped for a moment by ptrace(2), makes the call, and goes
//! on where it was; the other threads never stop.
//!
//! **The thread is at all times one instruction away from healing itself.** Before anything of it is changed, a signal
//! frame is laid out on its stack, below what is in use: the one that the kernel would write if a signal came just
//! then, holding every register, the vector state and the signal mask. The thread is then parked at the code that ends
//! signal handlers (`rt_sigreturn`), with the stack pointer at that frame. Whenever the tracer is gone from here on, by
//! `kill -9` or a crash, the kernel lets the thread go and it restores itself.
//!
//! A call is made by letting the thread enter `rt_sigreturn` and turning that, at its entry, into the call that is
//! wanted, with a return address that leads back to the stub. There the thread is again at the next call's beginning.
//! While it is parked all signals are blocked; they stay pending and are delivered afterwards.
//!
//! At the end the thread is made to trap before it returns to user mode. That is the place in the kernel (`get_signal`)
//! at which it was found, so that its registers, among them the number of an interrupted call, can be put back as they
//! were: the kernel restarts the call as if nothing had happened, on x86-64 a sleep with the time that is left. A
//! tracer that died takes that last finesse with it: the call then begins anew. What is left is a mark in a few KiB of
//! stack that nobody had ever used, by which they are known the next time.
//!
//! Nor does a tracer that is itself stopped keep the thread: it is a process beside Pagefold that job control does not
//! reach, and a timer of the kernel ends one that a SIGSTOP or a frozen cgroup holds (`tracer`).
//!
//! Mirrors kernel/ptrace.c, kernel/signal.c, kernel/entry/common.c, kernel/rseq.c (6.18); what depends on the processor
//! is in one module each. Limits: a thread with a seccomp filter needs it suspended (CAP_SYS_ADMIN), which is so only
//! while the thread is parked, and ends with the tracer: if that is killed in the microseconds between turning a call
//! and the kernel's check of it, a filter that forbids the call judges it. Without that privilege the same goes for a
//! filter that another thread puts on this one while it is parked. A few calls (epoll_wait(2), sigwaitinfo(2), sockets
//! with a timeout: signal(7)) end with EINTR when their thread is stopped by whatever means; that is undone, with a
//! socket's timeout begun anew, but not by a tracer that is killed before the thread is parked. What a socket had sent
//! or received in part is told as a short count, as after any stop. A signal that only the mask of ppoll(2) and its
//! like held back ends that wait. 32-bit programs, strict seccomp, shadow stacks, and programs that dispatch system
//! calls themselves are refused.

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

/// Room for arguments in the target's memory, in bytes.
pub const ARGUMENT_SPACE_BYTES: usize = 4096;

/// How long to wait for a call to be entered, and for the thread to trap after the last one.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a call may take. Unmerging many gigabytes takes seconds.
const CALL_TIMEOUT: Duration = Duration::from_secs(600);
/// How often a call is begun again that the kernel wants restarted.
const MAX_CALL_RESTARTS: usize = 1000;

const ALL_SIGNALS: u64 = u64::MAX;

/// Why nothing was injected, or not all. The target goes on as it was in every case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InjectError {
    /// The process has ended, or has begun another program, or the threads of it that were tried have ended.
    Vanished,
    /// The privilege is missing; for what.
    Denied(String),
    /// This thread or process traces it.
    Traced(u32),
    /// It cannot be done to this process; why.
    Unsupported(String),
    /// It cannot be done now; why.
    Busy(String),
    /// Something else went wrong; what.
    Failed(String),
}

/// Where code lies in the target's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct InjectionSites {
    /// The code that ends signal handlers.
    sigreturn_stub: u64,
    /// Where an injected call returns to.
    return_site: u64,
}

/// An I/O error, with what was being done. The errors of a thread that is no longer there are `Gone`.
fn operation_failed(operation: &'static str) -> impl Fn(io::Error) -> InjectError {
    move |error| match error.raw_os_error() {
        Some(libc::ESRCH) => InjectError::Vanished,
        Some(libc::EPERM | libc::EACCES) => InjectError::Denied(operation.to_owned()),
        _ => InjectError::Failed(format!("{operation}: {error}")),
    }
}

/// A stopped thread, from which system calls can be made.
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

    /// Lay out at most [`ARGUMENT_SPACE_BYTES`] bytes for a call to read; where they lie in the target. Replaces what was there.
    ///
    /// # Errors
    /// `Gone` when the process is.
    ///
    /// # Panics
    /// If it is too much.
    pub fn write_arguments(&self, bytes: &[u8]) -> Result<u64, InjectError> {
        assert!(bytes.len() <= ARGUMENT_SPACE_BYTES, "{} bytes", bytes.len());
        self.target
            .memory
            .write_all_at(bytes, self.argument_space)
            .map_err(operation_failed("writing to its stack"))?;
        Ok(self.argument_space)
    }

    /// Make a system call. What it answers is the kernel's: a negative number is an error.
    ///
    /// # Errors
    /// `Gone` when the process ended, `Busy` when it was frozen; nothing more can be called then.
    pub fn call_syscall(&self, number: i64, arguments: [u64; 6]) -> Result<i64, InjectError> {
        let deadline = Instant::now() + CALL_TIMEOUT;
        for _ in 0..MAX_CALL_RESTARTS {
            check_deadline(deadline)?;
            self.wait_for_syscall_stop(STOP_TIMEOUT)?;
            fault::point("at the entry of the call that heals");
            let registers = arch::read_registers(self.thread).map_err(operation_failed("reading registers"))?;
            if !arch::is_at_sigreturn_entry(&registers, self.sites) {
                // Whatever is at the stub now, it makes no call of its own choice here: seccomp is suspended.
                arch::write_registers(self.thread, &self.parked_registers)
                    .map_err(operation_failed("writing registers"))?;
                return Err(InjectError::Failed("the thread is not where it was parked".to_owned()));
            }
            arch::replace_call(self.thread, &self.parked_registers, self.frame_address, self.sites, number, arguments)
                .map_err(operation_failed("writing registers"))?;
            fault::point("call turned");
            self.wait_for_syscall_stop(CALL_TIMEOUT)?;
            fault::point("at the exit of the call");
            let registers = arch::read_registers(self.thread).map_err(operation_failed("reading registers"))?;
            arch::write_registers(self.thread, &self.parked_registers)
                .map_err(operation_failed("writing registers"))?;
            fault::point("parked again");
            let result = arch::call_result(&registers);
            // Something woke it: a stop signal, which cannot be blocked, or another kind of work.
            if !arch::is_restart_code(result) {
                return Ok(result);
            }
        }
        Err(InjectError::Busy("the call is interrupted again and again".to_owned()))
    }

    fn wait_for_syscall_stop(&self, timeout: Duration) -> Result<(), InjectError> {
        let resuming = operation_failed("resuming it");
        let deadline = Instant::now() + timeout;
        self.thread.resume_to_syscall(0).map_err(&resuming)?;
        loop {
            // Stop signals may come without end.
            check_deadline(deadline)?;
            match self.thread.wait_for_stop(deadline).map_err(operation_failed("waiting for it"))? {
                Some(StopReason::Syscall) => return Ok(()),
                // A group stop: it goes back to it when it is let go.
                Some(StopReason::EventStop) => self.thread.resume_to_syscall(0).map_err(&resuming)?,
                // Only stop signals get here, the others are blocked.
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
        Err(InjectError::Busy("signals keep it from getting there".to_owned()))
    }
}

/// Wait until a thread that was interrupted traps within `get_signal`. Signals that come before that are delivered.
fn wait_for_trap(thread: TracedThread, deadline: Instant) -> Result<(), InjectError> {
    loop {
        check_deadline(deadline)?;
        match thread.wait_for_stop(deadline).map_err(operation_failed("waiting for it"))? {
            Some(StopReason::EventStop) => return Ok(()),
            Some(StopReason::Signal(signal)) => thread.resume(signal).map_err(operation_failed("resuming it"))?,
            Some(StopReason::Syscall) => thread.resume(0).map_err(operation_failed("resuming it"))?,
            Some(StopReason::Exec | StopReason::Ended) => return Err(InjectError::Vanished),
            None => {
                return Err(InjectError::Busy(
                    "it does not stop: it waits in the kernel, or gets no processor".to_owned(),
                ));
            }
        }
    }
}

/// How an attempt at one thread went wrong.
enum VisitError {
    /// Another thread may do.
    TryAnotherThread(InjectError),
    /// No thread will.
    Unreachable(InjectError),
    /// This tracer may not trace the process. A thread of Pagefold may if the process is a descendant (Yama).
    TracerDenied(InjectError),
}

/// [`visit_thread`] in a process of its own or, where that may not trace the target, on a thread of this process.
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
        visited => return visited,
    }
    let _stops = tracer::StopSignalDeferral::new();
    let visited = std::thread::scope(|scope| {
        let name = "pagefold-inject".to_owned();
        let tracer = std::thread::Builder::new()
            .name(name)
            .spawn_scoped(scope, || visit_thread(target, tid, stop_timeout, lock, work));
        // A panic in it is ours; the thread it visited has been released by the kernel.
        tracer.map(|tracer| tracer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    visited.map_err(starting).map_err(VisitError::Unreachable)?
}

/// Stop one thread of `target`, let `work` make calls in it, and let it go; for how long it was stopped.
///
/// Must run in a process or on a thread of its own: a thread that was seized but does not stop is released by the
/// tracer's end alone.
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
        InjectError::Denied(why) => VisitError::TracerDenied(InjectError::Denied(why)),
        why => VisitError::Unreachable(why),
    })?;
    fault::point("seized");
    // What has the number now may be another process's thread. Traced, it keeps the number.
    if !target.has_thread(tid) {
        return Err(VisitError::TryAnotherThread(InjectError::Vanished));
    }
    // Two visits lock first, then seize, then look, so that one of them sees the other.
    if lock.may_be_shared()
        && let Some(tracer) = target.tracer_of_other_thread(tid)
    {
        return Err(VisitError::Unreachable(InjectError::Traced(tracer)));
    }
    if let Some(processor) = target.last_cpu(tid) {
        ptrace::pin_to_cpu(processor);
    }
    // Now that it is traced: the handler of a signal would run only after a stop.
    let waited = if arch::KEEPS_FIRST_ARGUMENT { None } else { target.blocked_call(tid) };
    thread.interrupt().map_err(operation_failed("interrupting it")).map_err(VisitError::TryAnotherThread)?;
    fault::point("interrupted");
    let (mut deadline, last) = (Instant::now() + stop_timeout, Instant::now() + STOP_TIMEOUT);
    loop {
        match wait_for_trap(thread, deadline) {
            // On its way, but without a processor. Let go now, a call that was interrupted already would end with
            // EINTR.
            Err(InjectError::Busy(_)) if Instant::now() < last && target.is_runnable(tid) => {
                deadline = last.min(Instant::now() + stop_timeout);
            }
            waited => break waited.map_err(VisitError::TryAnotherThread)?,
        }
    }
    let stopped = Instant::now();
    fault::point("stopped");
    let parked = park_thread(target, tid, thread, waited.as_ref(), stopped).map_err(|why| {
        // As it was: nothing has been written but unused stack, or that its call is to be restarted.
        let _ = thread.detach();
        match why {
            InjectError::Unsupported(_) | InjectError::Vanished => VisitError::Unreachable(why),
            _ => VisitError::TryAnotherThread(why),
        }
    })?;
    let outcome = work(&parked.thread);
    match parked.restore_and_detach() {
        Ok(()) => Ok((outcome, stopped.elapsed())),
        // The calls were made; whether the process ended since is not their business.
        Err(InjectError::Vanished) => Ok((outcome, stopped.elapsed())),
        Err(why) => Err(VisitError::Unreachable(why)),
    }
}

/// A thread at the stub, with what it takes to put it back.
struct ParkedThread<'a> {
    thread: StoppedThread<'a>,
    state: arch::ThreadState,
    signal_mask: u64,
    /// What is to be on the stack at `base` afterwards.
    restored_stack: Vec<u8>,
}

/// Where to look at memory to know whether it is the one in which `frame` is written over `before`: at the first word
/// that changes. Where a killed tracer left the very same frame none does; then at the first that is not zero, as it
/// would be in memory that nobody has touched.
fn distinguishing_offset(previous: &[u8], frame: &[u8]) -> usize {
    let words = || previous.as_chunks::<8>().0.iter().zip(frame.as_chunks::<8>().0);
    let changed = words().position(|(before, frame)| before != frame);
    let place = changed.or_else(|| words().position(|(_, frame)| *frame != [0; 8]));
    8 * place.expect("a frame holds more than zeros")
}

fn park_thread<'a>(
    target: &'a InjectTarget,
    tid: i32,
    thread: TracedThread,
    blocked_call: Option<&BlockedCall>,
    stopped_at: Instant,
) -> Result<ParkedThread<'a>, InjectError> {
    let mut state = arch::ThreadState::capture(thread)?;
    let read = |at: u64| {
        let mut bytes = [0; 16];
        target.read_if_present(&mut bytes, at).ok().map(|()| bytes)
    };
    // At once: it may be let go soon, refused.
    if state.restart_interrupted_call(ptrace::monotonic_time(), read, blocked_call) {
        arch::write_registers(thread, &state.registers).map_err(operation_failed("writing registers"))?;
    }
    let home = target.verify_sites()?;
    // Not before it is stopped: until then it runs code of its own. In any case: another thread may put a filter on it
    // at any time (SECCOMP_FILTER_FLAG_TSYNC).
    let suspended = thread.suspend_seccomp();
    fault::point("seccomp suspended");
    target.check_seccomp(tid, suspended.is_ok())?;
    if thread.dispatches_syscalls() {
        return Err(InjectError::Unsupported(
            "it dispatches its system calls itself (as emulators of Windows do)".to_owned(),
        ));
    }
    let mask = thread.read_signal_mask().map_err(operation_failed("reading its signal mask"))?;
    let sequence = match state.user_ip().and_then(|ip| Some((thread.rseq_address()?, ip))) {
        Some((rseq, ip)) => target.rseq_abort_address(rseq, ip),
        None => Ok(None),
    };
    if let Ok(Some(abort)) = sequence {
        state.set_ip(abort);
    }
    let bytes = state.max_frame_bytes().next_multiple_of(64) + ARGUMENT_SPACE_BYTES;
    let stack::StackSpace { address: base, previous_bytes: before, restored_bytes: after } =
        target.find_stack_space(tid, &state, bytes)?;
    let frame = state.build_frame(base, mask, home);
    // The memory that is held outlives an exec if a process that shares it does. It must still be this thread's: what
    // is written to the one has to change the other.
    let at = distinguishing_offset(&before, &frame);
    let sees = |bytes: &[u8]| {
        let word = thread.peek_word(base + at as u64);
        word.is_ok_and(|word| bytes[at..].starts_with(&word.to_ne_bytes()))
    };
    if !sees(&before) {
        return Err(InjectError::Vanished);
    }
    target.memory.write_all_at(&frame, base).map_err(operation_failed("writing to its stack"))?;
    fault::point("frame written");
    // Only now is it known whether its sequence was looked for in its own memory.
    let refusal = if sees(&frame) { sequence.err() } else { Some(InjectError::Vanished) };
    if let Some(why) = refusal {
        // With the mark, or whoever has this memory would be left less and less stack that nobody has touched.
        target.memory.write_all_at(&after, base).map_err(operation_failed("restoring its stack"))?;
        return Err(why);
    }
    let parked = arch::parked_registers(&state, base, home);
    arch::write_registers(thread, &parked).map_err(operation_failed("writing registers"))?;
    fault::point("parked");
    thread.write_signal_mask(ALL_SIGNALS).map_err(operation_failed("blocking its signals"))?;
    fault::point("signals blocked");
    let room = base + frame.len().next_multiple_of(64) as u64;
    Ok(ParkedThread {
        thread: StoppedThread {
            target,
            thread,
            sites: home,
            parked_registers: parked,
            frame_address: base,
            argument_space: room,
            stopped_at,
        },
        state,
        signal_mask: mask,
        restored_stack: after,
    })
}

impl ParkedThread<'_> {
    /// Put everything back and let the thread go.
    fn restore_and_detach(self) -> Result<(), InjectError> {
        let StoppedThread { target, thread, frame_address: base, .. } = self.thread;
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
        // From here the frame is of no use to it. Leaving it there would harm nobody either: it lies where nobody is.
        target.memory.write_all_at(&self.restored_stack, base).map_err(operation_failed("restoring its stack"))?;
        fault::point("stack restored");
        thread.detach().map_err(operation_failed("letting it go"))?;
        fault::point("let go");
        Ok(())
    }
}

/// Stop one thread of a process for a moment and let `work` make system calls in it. What `work` came to, and for how
/// long the thread was stopped.
///
/// `work` is called at most once. Whatever goes wrong, the thread goes on as it was.
///
/// # Errors
/// Why no thread could be stopped, or what `work` said.
pub fn with_stopped_thread<T: Send>(
    target: &InjectTarget,
    work: impl FnOnce(&StoppedThread<'_>) -> Result<T, InjectError> + Send,
) -> Result<(T, Duration), InjectError> {
    let lock = target.lock()?;
    let mut work = Some(work);
    let mut once = |inside: &StoppedThread<'_>| (work.take().expect("a thread is visited once"))(inside);
    let mut why = InjectError::Vanished;
    // Looked for only where the preferred one fails: that reads of many threads.
    let mut listed = false;
    let mut waiting: VecDeque<_> = target.preferred_thread().into_iter().collect();
    loop {
        let Some((tid, patience)) = waiting.pop_front() else {
            if listed {
                return Err(why);
            }
            (listed, waiting) = (true, target.candidate_threads()?.into());
            continue;
        };
        fault::point("thread chosen");
        let visited = visit_from_tracer_process(target, tid, patience, &lock, &mut once);
        target.note_visit(tid, visited.is_ok());
        match visited {
            Ok((outcome, stopped)) => return outcome.map(|outcome| (outcome, stopped)),
            Err(VisitError::Unreachable(error) | VisitError::TracerDenied(error)) => return Err(error),
            Err(VisitError::TryAnotherThread(error)) => why = error,
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
        for (before, place) in [([0, 0, 0], 8), ([5, 5, 5], 0), ([0, 7, 0], 16), ([0, 7, 8], 8)] {
            assert_eq!(distinguishing_offset(&[words(before), vec![1; 8]].concat(), &frame), place, "{before:?}");
        }
    }
}
