//! Becoming another program without leaving a trace on it.
//!
//! The Rust runtime changes what a process was given before `main` begins: it ignores SIGPIPE and opens `/dev/null` in
//! place of standard descriptors that were closed (library/std/src/sys/pal/unix/mod.rs, `init`). An ignored signal
//! stays ignored over exec, so a program that is started in place of this one would find another world than its parent
//! made. What there was is noted by a function that the loader calls before the runtime, and [`exec_program`] puts it
//! back.
//!
//! [`spawn_companion`] makes the one process that may stay behind: detached, so that the program neither waits for it nor
//! gets its signals. Limits: glibc and musl on Linux, whose loaders honour `.init_array`.

use crate::fault;
use rustix::fs::FileType;
use std::ffi::{CStr, CString, c_int};
use std::fs::File;
use std::io::{self, IsTerminal, PipeReader, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

/// Whether SIGPIPE was ignored when this process began.
static SIGPIPE_IGNORED: AtomicBool = AtomicBool::new(false);
/// Which of the descriptors 0, 1 and 2 were closed when this process began: a bit each.
static CLOSED_STANDARD_DESCRIPTORS: AtomicU8 = AtomicU8::new(0);

// Miri has no sigaction(2).
#[used]
#[cfg_attr(not(miri), unsafe(link_section = ".init_array"))]
static INIT_ARRAY_ENTRY: extern "C" fn() = record_initial_state;

/// Runs before the Rust runtime: system calls and atomics only.
extern "C" fn record_initial_state() {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: a null action asks only; `action` is there to be written.
    if unsafe { libc::sigaction(libc::SIGPIPE, ptr::null(), action.as_mut_ptr()) } == 0 {
        // SAFETY: the call succeeded, so it was written.
        let action = unsafe { action.assume_init() };
        SIGPIPE_IGNORED.store(action.sa_sigaction == libc::SIG_IGN, Ordering::Relaxed);
    }
    for descriptor in 0..3 {
        // SAFETY: F_GETFD takes and changes nothing, whether the descriptor is open or not.
        if unsafe { libc::fcntl(descriptor, libc::F_GETFD) } == -1 {
            CLOSED_STANDARD_DESCRIPTORS.fetch_or(1 << descriptor, Ordering::Relaxed);
        }
    }
}

/// Become a program, found as execvp(3) finds it, with the environment, signals and descriptors that this process was
/// given, but for the variables that are set here. Returns only when that fails, with why.
///
/// # Panics
/// If the environment is to be changed and this process has more than one thread, to all of which it belongs.
#[must_use]
pub fn exec_program(program: &CStr, arguments: &[CString], variables: &[(CString, CString)]) -> io::Error {
    for (name, value) in variables {
        assert_eq!(count_threads().ok(), Some(1), "the environment belongs to all threads");
        // SAFETY: no other thread reads the environment; both strings end in NUL and are copied.
        if unsafe { libc::setenv(name.as_ptr(), value.as_ptr(), 1) } != 0 {
            return io::Error::last_os_error();
        }
    }
    for descriptor in
        (0..3).filter(|descriptor| CLOSED_STANDARD_DESCRIPTORS.load(Ordering::Relaxed) >> descriptor & 1 == 1)
    {
        // SAFETY: it is what the runtime opened in place of a closed one, and stays open while this program runs.
        unsafe { libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
    let inherited = if SIGPIPE_IGNORED.load(Ordering::Relaxed) { libc::SIG_IGN } else { libc::SIG_DFL };
    // SAFETY: neither of the two is a handler of ours.
    unsafe { libc::signal(libc::SIGPIPE, inherited) };
    let Err(errno) = nix::unistd::execvp(program, arguments);
    // SAFETY: as above; this program goes on as it was, to say what went wrong.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    errno.into()
}

/// Have this process and what it becomes or starts laid out at the same addresses each time (`ADDR_NO_RANDOMIZE` of
/// personality(2)), from the next exec on.
///
/// # Errors
/// That of personality(2).
pub fn disable_address_randomization() -> io::Result<()> {
    const QUERY_PERSONALITY: libc::c_ulong = 0xffff_ffff;
    // SAFETY: this value only asks.
    let now = unsafe { libc::personality(QUERY_PERSONALITY) };
    // SAFETY: nothing of this process moves; the flag is read at exec.
    let answer = unsafe { libc::personality((now | libc::ADDR_NO_RANDOMIZE) as libc::c_ulong) };
    if answer == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Take away a SIGCHLD of children of our own: blocked, as a parent may have left it, it would stay pending over exec.
pub fn discard_pending_sigchld() {
    let mut pending = MaybeUninit::uninit();
    // SAFETY: `pending` is there to be written.
    if unsafe { libc::sigpending(pending.as_mut_ptr()) } != 0 {
        return;
    }
    // SAFETY: the call above succeeded, so the set was written, and SIGCHLD is a signal.
    if unsafe { libc::sigismember(pending.as_ptr(), libc::SIGCHLD) } != 1 {
        return;
    }
    let mut child = MaybeUninit::uninit();
    // SAFETY: `child` is there to be written.
    unsafe { libc::sigemptyset(child.as_mut_ptr()) };
    // SAFETY: `child` was written, and SIGCHLD is a signal.
    unsafe { libc::sigaddset(child.as_mut_ptr(), libc::SIGCHLD) };
    let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the set and the time are initialized and outlive the call; nothing is asked to be written.
    unsafe { libc::sigtimedwait(child.as_ptr(), ptr::null_mut(), &raw const at_once) };
}

/// Which standard error a process keeps that is left behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StderrPolicy {
    /// A terminal or a file alone: whoever reads a pipe to its end, as a shell's `$(...)` does, waits for the program
    /// and for nobody else.
    KeepIfNoReader,
    /// Whatever it is, for work that soon ends.
    Keep,
}

/// Leave a process behind that outlives exec: not a child of the program to come, in a session of its own, in `/`, with
/// standard error as said, and no other descriptor of this process. There `work` is called once this process has become
/// another program, and the process ends when it returns. Dropping the returned handle, as a failed exec does by ending
/// this process, looks to it as an exec does.
///
/// # Errors
/// `ResourceBusy` if this process has more than one thread, of which a fork would copy one; else those of pipe(2) and
/// fork(2).
pub fn spawn_companion(stderr_policy: StderrPolicy, work: impl FnOnce()) -> io::Result<CompanionHandle> {
    if count_threads()? != 1 {
        return Err(io::ErrorKind::ResourceBusy.into());
    }
    // Both ends are closed on exec; the writing one is in nobody's hands but this process's.
    let (exec, until_exec) = io::pipe()?;
    match fork()? {
        0 => {
            drop(until_exec);
            let detached = nix::unistd::setsid().is_ok();
            if detached && fork().is_ok_and(|child| child == 0) && detach_companion(stderr_policy, exec).is_ok() {
                // A panic says why and must not unwind into what the original goes on with.
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
                fault::report_before_exit();
            }
            // SAFETY: ends this copy without running what the original registered for its own exit.
            unsafe { libc::_exit(0) }
        }
        child => {
            // Who ignores SIGCHLD is told that there is no such child, once it has ended.
            let _ = nix::sys::wait::waitpid(nix::unistd::Pid::from_raw(child), None);
            Ok(CompanionHandle { _until_exec: until_exec })
        }
    }
}

/// Holds back the process that [`spawn_companion`] left behind, until this one becomes another program.
#[derive(Debug)]
pub struct CompanionHandle {
    _until_exec: io::PipeWriter,
}

/// Let go of what the original had, but for standard error where it may stay, and wait for its exec.
fn detach_companion(stderr_policy: StderrPolicy, mut exec: PipeReader) -> io::Result<()> {
    std::env::set_current_dir("/")?;
    // The runtime made sure that the first three descriptors are open, so this is another.
    let waiting = exec.as_raw_fd() as u32;
    let null = File::options().read(true).write(true).open("/dev/null")?;
    let last = if stderr_policy == StderrPolicy::Keep || has_no_reader(io::stderr().as_fd()) { 1 } else { 2 };
    for descriptor in 0..=last {
        // SAFETY: all are open, and nothing in this copy owns a standard descriptor as an object.
        if unsafe { libc::dup2(null.as_raw_fd(), descriptor) } == -1 {
            return Err(io::Error::last_os_error());
        }
    }
    drop(null);
    close_all_but(waiting)?;
    let _ = exec.read(&mut [0])?;
    Ok(())
}

/// Close all descriptors from 3 on but one.
fn close_all_but(kept: u32) -> io::Result<()> {
    let mut whole = true;
    for (first, last) in [(3, kept - 1), (kept + 1, u32::MAX)].into_iter().filter(|(first, last)| first <= last) {
        // SAFETY: this copy uses none of them again: what owned them was the original's and is never dropped here.
        whole &= unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } == 0;
    }
    if !whole {
        // It came with 5.9, and old filters of containers do not know it.
        let open: Vec<c_int> = std::fs::read_dir("/proc/self/fd")?
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .filter(|&descriptor| descriptor > 2 && descriptor != kept.cast_signed())
            .collect();
        for descriptor in open {
            // SAFETY: as above. The one that was read from is closed by now, and one that is not open is an error alone.
            unsafe { libc::close(descriptor) };
        }
    }
    Ok(())
}

/// Whether it is a terminal or a file: nothing of which somebody waits for the end.
#[must_use]
pub fn has_no_reader(descriptor: BorrowedFd<'_>) -> bool {
    let is_file = |status: rustix::fs::Stat| FileType::from_raw_mode(status.st_mode).is_file();
    descriptor.is_terminal() || rustix::fs::fstat(descriptor).is_ok_and(is_file)
}

fn fork() -> io::Result<c_int> {
    // SAFETY: the process has one thread, so the copy's locks and memory are as consistent as the original's.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        child => Ok(child),
    }
}

fn count_threads() -> io::Result<usize> {
    Ok(std::fs::read_dir("/proc/self/task")?.count())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn only_terminals_and_files_have_no_reader() {
        let (_reader, pipe) = io::pipe().unwrap();
        let (socket, _other) = UnixStream::pair().unwrap();
        assert!(!has_no_reader(pipe.as_fd()));
        assert!(!has_no_reader(socket.as_fd()));
        assert!(has_no_reader(File::open(std::env::current_exe().unwrap()).unwrap().as_fd()));
        // A new terminal, of which this is the far end.
        let Ok(terminal) = File::options().read(true).write(true).open("/dev/ptmx") else {
            return println!("skipped: needs /dev/ptmx");
        };
        assert!(has_no_reader(terminal.as_fd()));
    }
}
