//! Replaces this process by another program that starts in the same state as if its parent had started it.
//!
//! The Rust runtime changes the inherited state before `main` begins. It ignores SIGPIPE and opens `/dev/null` in place
//! of closed standard descriptors (library/std/src/sys/pal/unix/mod.rs, `init`). An ignored signal stays ignored over
//! exec, so the program would start in a different state. A function that the loader calls before the runtime records
//! the initial state, and [`exec_program`] restores it.
//!
//! [`spawn_companion`] creates the only process that may stay behind. It is detached, so the program neither waits for
//! it nor shares its signals. Limits: glibc and musl on Linux, whose loaders process `.init_array`.

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
/// Which of the descriptors 0, 1 and 2 were closed when this process began, one bit each.
static CLOSED_STANDARD_DESCRIPTORS: AtomicU8 = AtomicU8::new(0);

// Miri has no sigaction(2).
#[used]
#[cfg_attr(not(miri), unsafe(link_section = ".init_array"))]
static INIT_ARRAY_ENTRY: extern "C" fn() = record_initial_state;

/// Runs before the Rust runtime: system calls and atomics only.
extern "C" fn record_initial_state() {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: a null action only queries; `action` is writable.
    if unsafe { libc::sigaction(libc::SIGPIPE, ptr::null(), action.as_mut_ptr()) } == 0 {
        // SAFETY: the call succeeded, so it was written.
        let action = unsafe { action.assume_init() };
        SIGPIPE_IGNORED.store(action.sa_sigaction == libc::SIG_IGN, Ordering::Relaxed);
    }
    for descriptor in 0..3 {
        // SAFETY: F_GETFD reads and changes nothing, for open and for closed descriptors.
        if unsafe { libc::fcntl(descriptor, libc::F_GETFD) } == -1 {
            CLOSED_STANDARD_DESCRIPTORS.fetch_or(1 << descriptor, Ordering::Relaxed);
        }
    }
}

/// Execute a program, found as execvp(3) finds it, with the environment, signals and descriptors that this process
/// inherited. Only the given variables are set in addition. Returns only on failure, with the error.
///
/// # Panics
/// If variables are given and this process has more than one thread, because the environment belongs to all of them.
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
        // SAFETY: the runtime opened this descriptor in place of a closed one, and it stays open while this program
        // runs.
        unsafe { libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
    let sigpipe_action = if SIGPIPE_IGNORED.load(Ordering::Relaxed) { libc::SIG_IGN } else { libc::SIG_DFL };
    // SAFETY: neither of the two values is a handler of this program.
    unsafe { libc::signal(libc::SIGPIPE, sigpipe_action) };
    let Err(errno) = nix::unistd::execvp(program, arguments);
    // SAFETY: as above. This program continues, to report the error.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    errno.into()
}

/// Disable address space randomization for this process, for what it executes and for what it starts
/// (`ADDR_NO_RANDOMIZE` of personality(2)), from the next exec on.
///
/// # Errors
/// The error of personality(2).
pub fn disable_address_randomization() -> io::Result<()> {
    const QUERY_PERSONALITY: libc::c_ulong = 0xffff_ffff;
    // SAFETY: this value only queries.
    let current = unsafe { libc::personality(QUERY_PERSONALITY) };
    // SAFETY: no memory of this process moves; the kernel reads the flag at exec.
    let result = unsafe { libc::personality((current | libc::ADDR_NO_RANDOMIZE) as libc::c_ulong) };
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Remove a pending SIGCHLD of our own children. If the parent left the signal blocked, it would stay pending over
/// exec.
pub fn discard_pending_sigchld() {
    let mut pending = MaybeUninit::uninit();
    // SAFETY: `pending` is writable.
    if unsafe { libc::sigpending(pending.as_mut_ptr()) } != 0 {
        return;
    }
    // SAFETY: the call above succeeded, so the set was written. SIGCHLD is a signal.
    if unsafe { libc::sigismember(pending.as_ptr(), libc::SIGCHLD) } != 1 {
        return;
    }
    let mut sigchld = MaybeUninit::uninit();
    // SAFETY: `sigchld` is writable.
    unsafe { libc::sigemptyset(sigchld.as_mut_ptr()) };
    // SAFETY: `sigchld` was written, and SIGCHLD is a signal.
    unsafe { libc::sigaddset(sigchld.as_mut_ptr(), libc::SIGCHLD) };
    let no_wait = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the set and the time are initialized and outlive the call; no output is requested.
    unsafe { libc::sigtimedwait(sigchld.as_ptr(), ptr::null_mut(), &raw const no_wait) };
}

/// Which standard error a companion process keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StderrPolicy {
    /// Only a terminal or a file. A program that reads a pipe to its end, such as a shell's `$(...)`, must not wait for
    /// the companion.
    KeepIfNoReader,
    /// Keep it in any case, for work that ends soon.
    Keep,
}

/// Start a process that outlives exec. It is not a child of the new program. It runs in a session of its own, in `/`,
/// with standard error as requested and no other descriptor of this process. It calls `work` after this process has
/// executed another program, and ends when `work` returns. If the returned handle is dropped, for example because exec
/// failed and this process ended, the companion sees that as an exec, too.
///
/// # Errors
/// `ResourceBusy` if this process has more than one thread, of which a fork would copy only one. Otherwise the errors
/// of pipe(2) and fork(2).
pub fn spawn_companion(stderr_policy: StderrPolicy, work: impl FnOnce()) -> io::Result<CompanionHandle> {
    if count_threads()? != 1 {
        return Err(io::ErrorKind::ResourceBusy.into());
    }
    // Both ends close on exec. Only this process has the writing end.
    let (exec, until_exec) = io::pipe()?;
    match fork()? {
        0 => {
            drop(until_exec);
            let is_detached = nix::unistd::setsid().is_ok();
            if is_detached && fork().is_ok_and(|child| child == 0) && detach_companion(stderr_policy, exec).is_ok() {
                // A panic prints its message and must not unwind into the original's code.
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
                fault::report_before_exit();
            }
            // SAFETY: ends this copy without the exit functions that the original registered.
            unsafe { libc::_exit(0) }
        }
        child => {
            // If SIGCHLD is ignored, waitpid reports that there is no such child after it has ended.
            let _ = nix::sys::wait::waitpid(nix::unistd::Pid::from_raw(child), None);
            Ok(CompanionHandle { _until_exec: until_exec })
        }
    }
}

/// Makes the process of [`spawn_companion`] wait until this process executes another program.
#[derive(Debug)]
pub struct CompanionHandle {
    _until_exec: io::PipeWriter,
}

/// Close what the original had open, except standard error if it may stay, and wait for the original's exec.
fn detach_companion(stderr_policy: StderrPolicy, mut exec: PipeReader) -> io::Result<()> {
    std::env::set_current_dir("/")?;
    // The runtime opened the first three descriptors, so this is another one.
    let exec_descriptor = exec.as_raw_fd() as u32;
    let null = File::options().read(true).write(true).open("/dev/null")?;
    let last_replaced = if stderr_policy == StderrPolicy::Keep || has_no_reader(io::stderr().as_fd()) { 1 } else { 2 };
    for descriptor in 0..=last_replaced {
        // SAFETY: all are open, and no object in this copy owns a standard descriptor.
        if unsafe { libc::dup2(null.as_raw_fd(), descriptor) } == -1 {
            return Err(io::Error::last_os_error());
        }
    }
    drop(null);
    close_all_but(exec_descriptor)?;
    let _ = exec.read(&mut [0])?;
    Ok(())
}

/// Close all descriptors from 3 on except one.
fn close_all_but(kept_descriptor: u32) -> io::Result<()> {
    let mut is_complete = true;
    for (first, last) in
        [(3, kept_descriptor - 1), (kept_descriptor + 1, u32::MAX)].into_iter().filter(|(first, last)| first <= last)
    {
        // SAFETY: this copy uses none of them again. Their owners were the original's and are never dropped here.
        is_complete &= unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } == 0;
    }
    if !is_complete {
        // close_range came with 5.9, and old seccomp filters of containers do not know it.
        let open_descriptors: Vec<c_int> = std::fs::read_dir("/proc/self/fd")?
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .filter(|&descriptor| descriptor > 2 && descriptor != kept_descriptor.cast_signed())
            .collect();
        for descriptor in open_descriptors {
            // SAFETY: as above. The descriptor that was read is closed by now; closing a closed one only returns an
            // error.
            unsafe { libc::close(descriptor) };
        }
    }
    Ok(())
}

/// Whether it is a terminal or a file, so that no process waits for its end.
#[must_use]
pub fn has_no_reader(descriptor: BorrowedFd<'_>) -> bool {
    let is_file = |status: rustix::fs::Stat| FileType::from_raw_mode(status.st_mode).is_file();
    descriptor.is_terminal() || rustix::fs::fstat(descriptor).is_ok_and(is_file)
}

fn fork() -> io::Result<c_int> {
    // SAFETY: the process has one thread, so locks and memory of the copy are consistent.
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
        // The subordinate end of a new terminal.
        let Ok(terminal) = File::options().read(true).write(true).open("/dev/ptmx") else {
            return println!("skipped: needs /dev/ptmx");
        };
        assert!(has_no_reader(terminal.as_fd()));
    }
}
