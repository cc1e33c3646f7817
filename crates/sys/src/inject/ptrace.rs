//! The requests of ptrace(2) that injection makes, on one thread that the calling thread traces.
//!
//! Mirrors kernel/ptrace.c and include/uapi/linux/ptrace.h (6.18). Every request answers `ESRCH` unless the thread is
//! traced by the caller and stopped, so none can touch a thread that was not seized by it.

use std::io;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::tracer;

/// PTRACE_EVENT_STOP, which the C library does not name everywhere.
const PTRACE_EVENT_STOP: i32 = 128;
const SYSCALL_STOP_SIGNAL: i32 = libc::SIGTRAP | 0x80;

const PTRACE_O_TRACESYSGOOD: usize = 1;
const PTRACE_O_TRACEEXEC: usize = 1 << 4;
const PTRACE_O_SUSPEND_SECCOMP: usize = 1 << 21;

const PTRACE_CONT: u32 = 7;
const PTRACE_DETACH: u32 = 17;
const PTRACE_SETOPTIONS: u32 = 0x4200;
const PTRACE_SYSCALL: u32 = 24;
const PTRACE_SEIZE: u32 = 0x4206;
const PTRACE_INTERRUPT: u32 = 0x4207;
const PTRACE_GETREGSET: u32 = 0x4204;
const PTRACE_SETREGSET: u32 = 0x4205;
const PTRACE_GETSIGMASK: u32 = 0x420a;
const PTRACE_SETSIGMASK: u32 = 0x420b;
const PTRACE_GET_RSEQ_CONFIGURATION: u32 = 0x420f;
const PTRACE_GET_SYSCALL_USER_DISPATCH: u32 = 0x4211;

/// How long to wait for word of a stop before looking, while it may come any moment, and later.
const FIRST_POLL_INTERVAL: Duration = Duration::from_micros(200);
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Make a tracer of the calling thread, which is to end soon: word of stops (SIGCHLD) comes to it while it waits, and
/// when it wakes it has a processor at once, so that a stopped thread need not wait for its tracer.
pub fn become_tracer() {
    let set = sigchld_set();
    // SAFETY: `set` is valid; no old set is asked for.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
    // Refused without CAP_SYS_NICE: it matters only when the machine is busy.
    let parameters = libc::sched_param { sched_priority: 1 };
    // SAFETY: `parameters` is valid; thread 0 is the calling one.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_RR, &raw const parameters) };
}

/// Run on this processor only: a tracer and its tracee take turns, and handing over is quickest where neither has to be
/// woken on another.
pub fn pin_to_cpu(cpu: usize) {
    // SAFETY: an empty set of processors is all zeros.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    if cpu < libc::CPU_SETSIZE as usize {
        // SAFETY: the number was found to be within the set.
        unsafe { libc::CPU_SET(cpu, &mut set) };
        // SAFETY: `set` is valid for its size; thread 0 is the calling one. Where it is refused, that costs some time.
        unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) };
    }
}

fn sigchld_set() -> libc::sigset_t {
    let mut set = std::mem::MaybeUninit::uninit();
    // SAFETY: `set` is a place for a set.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: `sigemptyset` has initialised all of it.
    let mut set: libc::sigset_t = unsafe { set.assume_init() };
    // SAFETY: `set` is a valid set.
    unsafe { libc::sigaddset(&raw mut set, libc::SIGCHLD) };
    set
}

/// Sleep until SIGCHLD comes, at most for `longest`. It may come too soon to be noticed, so that is all this is for.
fn sleep_until_sigchld(timeout: Duration) {
    let set = sigchld_set();
    let longest = libc::timespec { tv_sec: 0, tv_nsec: timeout.subsec_nanos() as _ };
    // SAFETY: `set` and `longest` are valid; nothing is to be told of the signal.
    unsafe { libc::sigtimedwait(&raw const set, std::ptr::null_mut(), &raw const longest) };
}

/// The time since some moment in the past, the same for all processes (CLOCK_MONOTONIC).
pub fn monotonic_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// `struct ptrace_rseq_configuration`.
#[repr(C)]
#[derive(Default)]
struct RseqConfiguration {
    pointer: u64,
    size: u32,
    signature: u32,
    flags: u32,
    pad: u32,
}

/// `struct ptrace_sud_config`.
#[repr(C)]
#[derive(Default)]
struct SyscallUserDispatch {
    mode: u64,
    selector: u64,
    offset: u64,
    len: u64,
}

/// Why a thread reports to its tracer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// PTRACE_EVENT_STOP: within `get_signal`, before it returns to user mode. By interruption or by group stop.
    EventStop,
    /// Entry to or exit from a system call.
    Syscall,
    /// A signal is about to be delivered.
    Signal(i32),
    /// Another event: of those asked for only exec.
    Exec,
    /// The thread has ended, or is no longer ours because another thread's exec took its number.
    Ended,
}

/// A thread that the calling thread traces.
#[derive(Clone, Copy, Debug)]
pub struct TracedThread(i32);

impl TracedThread {
    /// Begin to trace a thread without stopping it.
    pub fn seize(tid: i32) -> io::Result<Self> {
        let thread = Self(tid);
        thread.ptrace_request(PTRACE_SEIZE, 0, PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACEEXEC)?;
        Ok(thread)
    }

    /// From here until it is let go no seccomp filter judges what the thread calls, whether it has one now or gets one.
    /// Refused without CAP_SYS_ADMIN, to a tracer that has a filter itself, and by kernels without
    /// CONFIG_CHECKPOINT_RESTORE (`check_ptrace_options`).
    pub fn suspend_seccomp(self) -> io::Result<()> {
        self.ptrace_request(PTRACE_SETOPTIONS, 0, PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACEEXEC | PTRACE_O_SUSPEND_SECCOMP)
    }

    /// A request whose `data` is a number, or the address of what the caller keeps alive and of the right size.
    fn ptrace_request(self, request: u32, address: usize, data: usize) -> io::Result<()> {
        // SAFETY: of the requests made here only those of the functions below that say so write to this process: to a
        // buffer that they pass by its address with its length and that outlives the call. What is written to the
        // tracee is no memory of this process.
        let answer = unsafe { libc::ptrace(request as _, self.0, address, data) };
        if answer == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// A word of the memory that the thread has now, which after an exec is another than before.
    pub fn peek_word(self, address: u64) -> io::Result<u64> {
        let mut word: libc::c_ulong = 0;
        // SAFETY: the kernel writes one word to `word`. Called without the C library, which would return the word
        // itself and leave an error to be told from it.
        let answer = unsafe { libc::syscall(libc::SYS_ptrace, libc::PTRACE_PEEKDATA, self.0, address, &raw mut word) };
        if answer == -1 { Err(io::Error::last_os_error()) } else { Ok(word) }
    }

    /// Have it trap before it next returns to user mode.
    pub fn interrupt(self) -> io::Result<()> {
        self.ptrace_request(PTRACE_INTERRUPT, 0, 0)
    }

    /// Let it run to the next system call's entry or exit, delivering a signal (0: none).
    pub fn resume_to_syscall(self, signal: i32) -> io::Result<()> {
        self.ptrace_request(PTRACE_SYSCALL, 0, signal as usize)
    }

    /// Let it run, delivering a signal (0: none).
    pub fn resume(self, signal: i32) -> io::Result<()> {
        self.ptrace_request(PTRACE_CONT, 0, signal as usize)
    }

    /// Let it go.
    pub fn detach(self) -> io::Result<()> {
        self.ptrace_request(PTRACE_DETACH, 0, 0)
    }

    /// A register set into `buffer`; how many bytes of it the kernel filled.
    pub fn read_register_set(self, set: usize, buffer: &mut [u8]) -> io::Result<usize> {
        let mut vector = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        self.ptrace_request(PTRACE_GETREGSET, set, (&raw mut vector) as usize)?;
        Ok(vector.iov_len)
    }

    /// Write a register set.
    pub fn write_register_set(self, set: usize, bytes: &[u8]) -> io::Result<()> {
        // The kernel reads only what the vector points to.
        let mut vector = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        self.ptrace_request(PTRACE_SETREGSET, set, (&raw mut vector) as usize)
    }

    /// The signal mask that the thread has outside of a call that replaces it for its duration (ppoll(2)).
    pub fn read_signal_mask(self) -> io::Result<u64> {
        let mut mask = 0_u64;
        self.ptrace_request(PTRACE_GETSIGMASK, size_of::<u64>(), (&raw mut mask) as usize)?;
        Ok(mask)
    }

    /// Set the signal mask; a mask to come back from is forgotten with it.
    pub fn write_signal_mask(self, mask: u64) -> io::Result<()> {
        self.ptrace_request(PTRACE_SETSIGMASK, size_of::<u64>(), (&raw const mask) as usize)
    }

    /// Where the thread's `struct rseq` lies; nothing if it has none or the kernel (before 5.13) does not tell.
    pub fn rseq_address(self) -> Option<u64> {
        let mut configuration = RseqConfiguration::default();
        let size = size_of::<RseqConfiguration>();
        self.ptrace_request(PTRACE_GET_RSEQ_CONFIGURATION, size, (&raw mut configuration) as usize).ok()?;
        (configuration.pointer != 0).then_some(configuration.pointer)
    }

    /// Whether the program dispatches system calls itself (`PR_SET_SYSCALL_USER_DISPATCH`).
    pub fn dispatches_syscalls(self) -> bool {
        let mut dispatch = SyscallUserDispatch::default();
        let size = size_of::<SyscallUserDispatch>();
        // A kernel that does not tell (before 6.4) may still have it; emulators of other systems are its only users.
        self.ptrace_request(PTRACE_GET_SYSCALL_USER_DISPATCH, size, (&raw mut dispatch) as usize).is_ok()
            && dispatch.mode != 0
    }

    /// Wait until it reports, at most until `deadline`.
    ///
    /// waitpid(2) knows no deadline, so it is asked whenever SIGCHLD says that something happened, and from time to
    /// time in between: the signal may have come while nobody waited for it.
    pub fn wait_for_stop(self, deadline: Instant) -> io::Result<Option<StopReason>> {
        let mut polls = 0_u32;
        loop {
            tracer::restart_watchdog();
            let mut status = 0;
            // SAFETY: `status` is a valid place for the status.
            let answer = unsafe { libc::waitpid(self.0, &raw mut status, libc::__WALL | libc::WNOHANG) };
            match answer {
                0 => {}
                -1 => match Errno::from_io_error(&io::Error::last_os_error()) {
                    Some(Errno::INTR) => {}
                    Some(Errno::CHILD) => return Ok(Some(StopReason::Ended)),
                    _ => return Err(io::Error::last_os_error()),
                },
                _ => return Ok(Some(stop_reason(status))),
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            polls += 1;
            sleep_until_sigchld(if polls < 50 { FIRST_POLL_INTERVAL } else { POLL_INTERVAL });
        }
    }
}

fn stop_reason(wait_status: i32) -> StopReason {
    if !libc::WIFSTOPPED(wait_status) {
        return StopReason::Ended;
    }
    match (libc::WSTOPSIG(wait_status), wait_status >> 16) {
        (_, PTRACE_EVENT_STOP) => StopReason::EventStop,
        (SYSCALL_STOP_SIGNAL, 0) => StopReason::Syscall,
        (signal, 0) => StopReason::Signal(signal),
        _ => StopReason::Exec,
    }
}
