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
use ptrace::{Stop, Thread};
pub use target::Target;
use target::{Call, VisitLock};
pub use tracer::cpu_time;

/// Room for arguments in the target's memory, in bytes.
pub const ROOM: usize = 4096;

/// How long to wait for a call to be entered, and for the thread to trap after the last one.
const PROMPT: Duration = Duration::from_secs(2);
/// How long a call may take. Unmerging many gigabytes takes seconds.
const LONGEST: Duration = Duration::from_secs(600);
/// How often a call is begun again that the kernel wants restarted.
const RESTARTS: usize = 1000;

const ALL_SIGNALS: u64 = u64::MAX;

/// Why nothing was injected, or not all. The target goes on as it was in every case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The process has ended, or has begun another program, or the threads of it that were tried have ended.
    Gone,
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
struct Home {
    /// The code that ends signal handlers.
    stub: u64,
    /// Where an injected call returns to.
    landing: u64,
}

/// An I/O error, with what was being done. The errors of a thread that is no longer there are `Gone`.
fn failed(doing: &'static str) -> impl Fn(io::Error) -> Error {
    move |error| match error.raw_os_error() {
        Some(libc::ESRCH) => Error::Gone,
        Some(libc::EPERM | libc::EACCES) => Error::Denied(doing.to_owned()),
        _ => Error::Failed(format!("{doing}: {error}")),
    }
}

/// A stopped thread, from which system calls can be made.
#[derive(Debug)]
pub struct Inside<'a> {
    target: &'a Target,
    thread: Thread,
    home: Home,
    parked: arch::Registers,
    base: u64,
    room: u64,
    stopped: Instant,
}

impl Inside<'_> {
    /// For how long the thread has been stopped.
    #[must_use]
    pub fn stopped(&self) -> Duration {
        self.stopped.elapsed()
    }

    /// Lay out at most [`ROOM`] bytes for a call to read; where they lie in the target. Replaces what was there.
    ///
    /// # Errors
    /// `Gone` when the process is.
    ///
    /// # Panics
    /// If it is too much.
    pub fn place(&self, bytes: &[u8]) -> Result<u64, Error> {
        assert!(bytes.len() <= ROOM, "{} bytes", bytes.len());
        self.target.memory.write_all_at(bytes, self.room).map_err(failed("writing to its stack"))?;
        Ok(self.room)
    }

    /// Make a system call. What it answers is the kernel's: a negative number is an error.
    ///
    /// # Errors
    /// `Gone` when the process ended, `Busy` when it was frozen; nothing more can be called then.
    pub fn call(&self, number: i64, arguments: [u64; 6]) -> Result<i64, Error> {
        let deadline = Instant::now() + LONGEST;
        for _ in 0..RESTARTS {
            in_time(deadline)?;
            self.run_to_syscall(PROMPT)?;
            fault::point("at the entry of the call that heals");
            let registers = arch::registers(self.thread).map_err(failed("reading registers"))?;
            if !arch::is_at_entry(&registers, self.home) {
                // Whatever is at the stub now, it makes no call of its own choice here: seccomp is suspended.
                arch::set_registers(self.thread, &self.parked).map_err(failed("writing registers"))?;
                return Err(Error::Failed("the thread is not where it was parked".to_owned()));
            }
            arch::set_call(self.thread, &self.parked, self.base, self.home, number, arguments)
                .map_err(failed("writing registers"))?;
            fault::point("call turned");
            self.run_to_syscall(LONGEST)?;
            fault::point("at the exit of the call");
            let registers = arch::registers(self.thread).map_err(failed("reading registers"))?;
            arch::set_registers(self.thread, &self.parked).map_err(failed("writing registers"))?;
            fault::point("parked again");
            let result = arch::result(&registers);
            // Something woke it: a stop signal, which cannot be blocked, or another kind of work.
            if !arch::is_restart(result) {
                return Ok(result);
            }
        }
        Err(Error::Busy("the call is interrupted again and again".to_owned()))
    }

    fn run_to_syscall(&self, patience: Duration) -> Result<(), Error> {
        let resuming = failed("resuming it");
        let deadline = Instant::now() + patience;
        self.thread.run_to_syscall(0).map_err(&resuming)?;
        loop {
            // Stop signals may come without end.
            in_time(deadline)?;
            match self.thread.wait(deadline).map_err(failed("waiting for it"))? {
                Some(Stop::Syscall) => return Ok(()),
                // A group stop: it goes back to it when it is let go.
                Some(Stop::Trap) => self.thread.run_to_syscall(0).map_err(&resuming)?,
                // Only stop signals get here, the others are blocked.
                Some(Stop::Signal(signal)) => self.thread.run_to_syscall(signal).map_err(&resuming)?,
                Some(Stop::Exec | Stop::Ended) => return Err(Error::Gone),
                None => return Err(Error::Busy("it does not run: is it frozen?".to_owned())),
            }
        }
    }
}

fn in_time(deadline: Instant) -> Result<(), Error> {
    if Instant::now() < deadline { Ok(()) } else { Err(Error::Busy("signals keep it from getting there".to_owned())) }
}

/// Wait until a thread that was interrupted traps within `get_signal`. Signals that come before that are delivered.
fn wait_for_trap(thread: Thread, deadline: Instant) -> Result<(), Error> {
    loop {
        in_time(deadline)?;
        match thread.wait(deadline).map_err(failed("waiting for it"))? {
            Some(Stop::Trap) => return Ok(()),
            Some(Stop::Signal(signal)) => thread.run(signal).map_err(failed("resuming it"))?,
            Some(Stop::Syscall) => thread.run(0).map_err(failed("resuming it"))?,
            Some(Stop::Exec | Stop::Ended) => return Err(Error::Gone),
            None => {
                return Err(Error::Busy("it does not stop: it waits in the kernel, or gets no processor".to_owned()));
            }
        }
    }
}

/// How an attempt at one thread went wrong.
enum Miss {
    /// Another thread may do.
    Thread(Error),
    /// No thread will.
    Process(Error),
    /// This tracer may not trace the process. A thread of Pagefold may if the process is a descendant (Yama).
    Denied(Error),
}

/// [`visit`] in a process of its own or, where that may not trace the target, on a thread of this process.
fn visit_from_outside<T: Send>(
    target: &Target,
    tid: i32,
    patience: Duration,
    lock: &VisitLock,
    work: &mut (dyn FnMut(&Inside<'_>) -> Result<T, Error> + Send),
) -> Result<(Result<T, Error>, Duration), Miss> {
    let starting = failed("starting its tracer");
    match tracer::run(|| visit(target, tid, patience, lock, work)).map_err(&starting).map_err(Miss::Process)? {
        Err(Miss::Denied(_)) => {}
        visited => return visited,
    }
    let _stops = tracer::StopsHeld::new();
    let visited = std::thread::scope(|scope| {
        let name = "pagefold-inject".to_owned();
        let tracer =
            std::thread::Builder::new().name(name).spawn_scoped(scope, || visit(target, tid, patience, lock, work));
        // A panic in it is ours; the thread it visited has been released by the kernel.
        tracer.map(|tracer| tracer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    visited.map_err(starting).map_err(Miss::Process)?
}

/// Stop one thread of `target`, let `work` make calls in it, and let it go; for how long it was stopped.
///
/// Must run in a process or on a thread of its own: a thread that was seized but does not stop is released by the
/// tracer's end alone.
fn visit<T>(
    target: &Target,
    tid: i32,
    patience: Duration,
    lock: &VisitLock,
    work: &mut dyn FnMut(&Inside<'_>) -> Result<T, Error>,
) -> Result<(Result<T, Error>, Duration), Miss> {
    ptrace::become_tracer();
    let thread = Thread::seize(tid).map_err(|error| match target.why_not_seized(tid, &error) {
        Error::Gone => Miss::Thread(Error::Gone),
        Error::Denied(why) => Miss::Denied(Error::Denied(why)),
        why => Miss::Process(why),
    })?;
    fault::point("seized");
    // What has the number now may be another process's thread. Traced, it keeps the number.
    if !target.has_thread(tid) {
        return Err(Miss::Thread(Error::Gone));
    }
    // Two visits lock first, then seize, then look, so that one of them sees the other.
    if lock.may_be_shared()
        && let Some(tracer) = target.is_traced_beside(tid)
    {
        return Err(Miss::Process(Error::Traced(tracer)));
    }
    if let Some(processor) = target.processor(tid) {
        ptrace::run_on(processor);
    }
    // Now that it is traced: the handler of a signal would run only after a stop.
    let waited = if arch::KEEPS_ARGUMENTS { None } else { target.call(tid) };
    thread.interrupt().map_err(failed("interrupting it")).map_err(Miss::Thread)?;
    fault::point("interrupted");
    let (mut deadline, last) = (Instant::now() + patience, Instant::now() + PROMPT);
    loop {
        match wait_for_trap(thread, deadline) {
            // On its way, but without a processor. Let go now, a call that was interrupted already would end with
            // EINTR.
            Err(Error::Busy(_)) if Instant::now() < last && target.is_runnable(tid) => {
                deadline = last.min(Instant::now() + patience);
            }
            waited => break waited.map_err(Miss::Thread)?,
        }
    }
    let stopped = Instant::now();
    fault::point("stopped");
    let parked = park(target, tid, thread, waited.as_ref(), stopped).map_err(|why| {
        // As it was: nothing has been written but unused stack, or that its call is to be restarted.
        let _ = thread.detach();
        match why {
            Error::Unsupported(_) | Error::Gone => Miss::Process(why),
            _ => Miss::Thread(why),
        }
    })?;
    let outcome = work(&parked.inside);
    match parked.leave() {
        Ok(()) => Ok((outcome, stopped.elapsed())),
        // The calls were made; whether the process ended since is not their business.
        Err(Error::Gone) => Ok((outcome, stopped.elapsed())),
        Err(why) => Err(Miss::Process(why)),
    }
}

/// A thread at the stub, with what it takes to put it back.
struct Parked<'a> {
    inside: Inside<'a>,
    state: arch::State,
    mask: u64,
    /// What is to be on the stack at `base` afterwards.
    after: Vec<u8>,
}

/// Where to look at memory to know whether it is the one in which `frame` is written over `before`: at the first word
/// that changes. Where a killed tracer left the very same frame none does; then at the first that is not zero, as it
/// would be in memory that nobody has touched.
fn telling(before: &[u8], frame: &[u8]) -> usize {
    let words = || before.as_chunks::<8>().0.iter().zip(frame.as_chunks::<8>().0);
    let changed = words().position(|(before, frame)| before != frame);
    let place = changed.or_else(|| words().position(|(_, frame)| *frame != [0; 8]));
    8 * place.expect("a frame holds more than zeros")
}

fn park<'a>(
    target: &'a Target,
    tid: i32,
    thread: Thread,
    waited: Option<&Call>,
    stopped: Instant,
) -> Result<Parked<'a>, Error> {
    let mut state = arch::State::save(thread)?;
    let read = |at: u64| {
        let mut bytes = [0; 16];
        target.read_present(&mut bytes, at).ok().map(|()| bytes)
    };
    // At once: it may be let go soon, refused.
    if state.forgive_interruption(ptrace::monotonic(), read, waited) {
        arch::set_registers(thread, &state.registers).map_err(failed("writing registers"))?;
    }
    let home = target.verified_home()?;
    // Not before it is stopped: until then it runs code of its own. In any case: another thread may put a filter on it
    // at any time (SECCOMP_FILTER_FLAG_TSYNC).
    let suspended = thread.suspend_seccomp();
    fault::point("seccomp suspended");
    target.check_seccomp(tid, suspended.is_ok())?;
    if thread.dispatches_syscalls() {
        return Err(Error::Unsupported(
            "it dispatches its system calls itself (as emulators of Windows do)".to_owned(),
        ));
    }
    let mask = thread.signal_mask().map_err(failed("reading its signal mask"))?;
    let sequence = match state.user_ip().and_then(|ip| Some((thread.rseq()?, ip))) {
        Some((rseq, ip)) => target.rseq_abort(rseq, ip),
        None => Ok(None),
    };
    if let Ok(Some(abort)) = sequence {
        state.set_ip(abort);
    }
    let bytes = state.frame_bytes().next_multiple_of(64) + ROOM;
    let stack::Room { base, before, after } = target.room_on_stack(tid, &state, bytes)?;
    let frame = state.frame(base, mask, home);
    // The memory that is held outlives an exec if a process that shares it does. It must still be this thread's: what
    // is written to the one has to change the other.
    let at = telling(&before, &frame);
    let sees = |bytes: &[u8]| {
        let word = thread.peek(base + at as u64);
        word.is_ok_and(|word| bytes[at..].starts_with(&word.to_ne_bytes()))
    };
    if !sees(&before) {
        return Err(Error::Gone);
    }
    target.memory.write_all_at(&frame, base).map_err(failed("writing to its stack"))?;
    fault::point("frame written");
    // Only now is it known whether its sequence was looked for in its own memory.
    let refusal = if sees(&frame) { sequence.err() } else { Some(Error::Gone) };
    if let Some(why) = refusal {
        // With the mark, or whoever has this memory would be left less and less stack that nobody has touched.
        target.memory.write_all_at(&after, base).map_err(failed("restoring its stack"))?;
        return Err(why);
    }
    let parked = arch::parked(&state, base, home);
    arch::set_registers(thread, &parked).map_err(failed("writing registers"))?;
    fault::point("parked");
    thread.set_signal_mask(ALL_SIGNALS).map_err(failed("blocking its signals"))?;
    fault::point("signals blocked");
    let room = base + frame.len().next_multiple_of(64) as u64;
    Ok(Parked { inside: Inside { target, thread, home, parked, base, room, stopped }, state, mask, after })
}

impl Parked<'_> {
    /// Put everything back and let the thread go.
    fn leave(self) -> Result<(), Error> {
        let Inside { target, thread, base, .. } = self.inside;
        thread.interrupt().map_err(failed("interrupting it"))?;
        fault::point("interrupted to leave");
        thread.run(0).map_err(failed("resuming it"))?;
        fault::point("resumed to leave");
        wait_for_trap(thread, Instant::now() + PROMPT)?;
        fault::point("stopped to leave");
        thread.set_signal_mask(self.mask).map_err(failed("restoring its signal mask"))?;
        fault::point("signal mask restored");
        self.state.restore(thread).map_err(failed("restoring its registers"))?;
        fault::point("registers restored");
        // From here the frame is of no use to it. Leaving it there would harm nobody either: it lies where nobody is.
        target.memory.write_all_at(&self.after, base).map_err(failed("restoring its stack"))?;
        fault::point("stack restored");
        thread.detach().map_err(failed("letting it go"))?;
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
pub fn inside<T: Send>(
    target: &Target,
    work: impl FnOnce(&Inside<'_>) -> Result<T, Error> + Send,
) -> Result<(T, Duration), Error> {
    let lock = target.lock()?;
    let mut work = Some(work);
    let mut once = |inside: &Inside<'_>| (work.take().expect("a thread is visited once"))(inside);
    let mut why = Error::Gone;
    // Looked for only where the preferred one fails: that reads of many threads.
    let mut listed = false;
    let mut waiting: VecDeque<_> = target.preferred().into_iter().collect();
    loop {
        let Some((tid, patience)) = waiting.pop_front() else {
            if listed {
                return Err(why);
            }
            (listed, waiting) = (true, target.candidates()?.into());
            continue;
        };
        fault::point("thread chosen");
        let visited = visit_from_outside(target, tid, patience, &lock, &mut once);
        target.note_visit(tid, visited.is_ok());
        match visited {
            Ok((outcome, stopped)) => return outcome.map(|outcome| (outcome, stopped)),
            Err(Miss::Process(error) | Miss::Denied(error)) => return Err(error),
            Err(Miss::Thread(error)) => why = error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_looked_for_where_it_changes_something() {
        let words = |words: [u64; 3]| words.map(u64::to_ne_bytes).concat();
        let frame = words([0, 7, 8]);
        for (before, place) in [([0, 0, 0], 8), ([5, 5, 5], 0), ([0, 7, 0], 16), ([0, 7, 8], 8)] {
            assert_eq!(telling(&[words(before), vec![1; 8]].concat(), &frame), place, "{before:?}");
        }
    }
}
