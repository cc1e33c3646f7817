//! The requests of ptrace(2) that injection makes, on one thread that the calling thread traces.
//!
//! Mirrors kernel/ptrace.c and include/uapi/linux/ptrace.h (6.18). Each request returns `ESRCH` unless the caller
//! traces the thread and the thread is stopped. So no request can affect a thread that the caller did not seize.

use std::ffi::c_void;
use std::time::{Duration, Instant};
use std::{io, ptr};

use rustix::io::Errno;

use super::tracer;

/// PTRACE_EVENT_STOP, which some C libraries do not define.
const PTRACE_EVENT_STOP: i32 = 128;
const SYSCALL_STOP_SIGNAL: i32 = libc::SIGTRAP | 0x80;

const PTRACE_O_TRACESYSGOOD: usize = 1;
const PTRACE_O_TRACEEXEC: usize = 1 << 4;
const PTRACE_O_SUSPEND_SECCOMP: usize = 1 << 21;

const PTRACE_GETREGSET: u32 = 0x4204;
const PTRACE_SETREGSET: u32 = 0x4205;
const PTRACE_GETSIGMASK: u32 = 0x420a;
const PTRACE_SETSIGMASK: u32 = 0x420b;
const PTRACE_GET_RSEQ_CONFIGURATION: u32 = 0x420f;
const PTRACE_GET_SYSCALL_USER_DISPATCH: u32 = 0x4211;

/// How long to wait for SIGCHLD between two polls: first while a stop may come at any moment, then later.
const FIRST_POLL_INTERVAL: Duration = Duration::from_micros(200);
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Make the calling thread a tracer. The thread is to end soon. It blocks SIGCHLD so that it can wait for it. It gets
/// real-time priority so that a stopped thread does not wait for its tracer.
pub fn become_tracer() {
    let set = sigchld_set();
    // SAFETY: `set` is valid; the old set is not requested.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
    // Fails without CAP_SYS_NICE. That matters only when the machine is busy.
    let parameters = libc::sched_param { sched_priority: 1 };
    // SAFETY: `parameters` is valid; thread 0 is the calling thread.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_RR, &raw const parameters) };
}

/// Run on this CPU only. A tracer and its tracee take turns, and the switch is fastest if both use one CPU.
pub fn pin_to_cpu(cpu: usize) {
    // SAFETY: an empty set of processors is all zeros.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    if cpu < libc::CPU_SETSIZE as usize {
        // SAFETY: the number is within the set.
        unsafe { libc::CPU_SET(cpu, &mut set) };
        // SAFETY: `set` is valid for its size; thread 0 is the calling thread. A failure only costs time.
        unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) };
    }
}

fn sigchld_set() -> libc::sigset_t {
    let mut set = std::mem::MaybeUninit::uninit();
    // SAFETY: `set` is writable memory for a set.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: `sigemptyset` has initialized all of it.
    let mut set: libc::sigset_t = unsafe { set.assume_init() };
    // SAFETY: `set` is a valid set.
    unsafe { libc::sigaddset(&raw mut set, libc::SIGCHLD) };
    set
}

/// Sleep until SIGCHLD arrives, at most for `timeout`. The signal may arrive before this call and be missed, so the
/// caller must check the state again.
fn sleep_until_sigchld(timeout: Duration) {
    let set = sigchld_set();
    let max_wait = libc::timespec { tv_sec: 0, tv_nsec: timeout.subsec_nanos() as _ };
    // SAFETY: `set` and `max_wait` are valid; signal information is not requested.
    unsafe { libc::sigtimedwait(&raw const set, std::ptr::null_mut(), &raw const max_wait) };
}

/// The time since a fixed moment in the past, the same for all processes (CLOCK_MONOTONIC).
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
    /// PTRACE_EVENT_STOP: within `get_signal`, before the return to user mode. Caused by interruption or by a group
    /// stop.
    EventStop,
    /// Entry to or exit from a system call.
    Syscall,
    /// A signal is about to be delivered.
    Signal(i32),
    /// Another event. Only exec is requested.
    Exec,
    /// The thread has ended, or is no longer ours because another thread's exec took its TID.
    Ended,
}

/// A thread that the calling thread traces.
#[derive(Clone, Copy, Debug)]
pub struct TracedThread(i32);

/// Requests whose `data` is a number (include/uapi/linux/ptrace.h).
#[derive(Clone, Copy)]
#[repr(u32)]
enum NumberRequest {
    Resume = 7,
    Detach = 17,
    ResumeToSyscall = 24,
    SetOptions = 0x4200,
    Seize = 0x4206,
    Interrupt = 0x4207,
}

impl TracedThread {
    /// Begin to trace a thread without stopping it.
    pub fn seize(tid: i32) -> io::Result<Self> {
        let thread = Self(tid);
        thread.request(NumberRequest::Seize, PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACEEXEC)?;
        Ok(thread)
    }

    /// From here until the thread is released, no seccomp filter applies to its calls, now or installed later. Fails
    /// without CAP_SYS_ADMIN, for a tracer that has a filter itself, and on kernels without CONFIG_CHECKPOINT_RESTORE
    /// (`check_ptrace_options`).
    pub fn suspend_seccomp(self) -> io::Result<()> {
        self.request(NumberRequest::SetOptions, PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACEEXEC | PTRACE_O_SUSPEND_SECCOMP)
    }

    /// Make a request that accesses no memory of this process.
    fn request(self, request: NumberRequest, data: usize) -> io::Result<()> {
        // SAFETY: `data` is a number for each of these requests (`ptrace_request`, kernel/ptrace.c, 6.18).
        unsafe { self.request_with_buffer(request as u32, 0, ptr::without_provenance_mut(data)) }
    }

    /// Make any request.
    ///
    /// # Safety
    /// If the request accesses memory of this process, `buffer` must be valid for that access, with the size that
    /// `request` and `address` say. Memory of the tracee is not memory of this process.
    unsafe fn request_with_buffer(self, request: u32, address: usize, buffer: *mut c_void) -> io::Result<()> {
        // SAFETY: the caller vouches for `buffer`; the other arguments are numbers.
        let result = unsafe { libc::ptrace(request as _, self.0, address, buffer) };
        if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// A word of the thread's current memory. After an exec that is another memory than before.
    pub fn peek_word(self, address: u64) -> io::Result<u64> {
        let mut word: libc::c_ulong = 0;
        // SAFETY: the kernel writes one word to `word`. The C library's wrapper would return the word itself, and an
        // error could not be distinguished from it.
        let result = unsafe { libc::syscall(libc::SYS_ptrace, libc::PTRACE_PEEKDATA, self.0, address, &raw mut word) };
        if result == -1 { Err(io::Error::last_os_error()) } else { Ok(word) }
    }

    /// Make the thread trap before it next returns to user mode.
    pub fn interrupt(self) -> io::Result<()> {
        self.request(NumberRequest::Interrupt, 0)
    }

    /// Let the thread run to the next entry or exit of a system call, and deliver a signal (0: none).
    pub fn resume_to_syscall(self, signal: i32) -> io::Result<()> {
        self.request(NumberRequest::ResumeToSyscall, signal as usize)
    }

    /// Let the thread run, and deliver a signal (0: none).
    pub fn resume(self, signal: i32) -> io::Result<()> {
        self.request(NumberRequest::Resume, signal as usize)
    }

    /// Release the thread.
    pub fn detach(self) -> io::Result<()> {
        self.request(NumberRequest::Detach, 0)
    }

    /// Read a register set into `buffer`. Returns how many bytes the kernel filled.
    pub fn read_register_set(self, set: usize, buffer: &mut [u8]) -> io::Result<usize> {
        let mut vector = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        // SAFETY: the kernel fills at most the bytes of `buffer`, to which the vector points, and updates the vector.
        unsafe { self.request_with_buffer(PTRACE_GETREGSET, set, (&raw mut vector).cast()) }?;
        Ok(vector.iov_len)
    }

    /// Write a register set.
    pub fn write_register_set(self, set: usize, bytes: &[u8]) -> io::Result<()> {
        let mut vector = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        // SAFETY: the kernel reads the bytes to which the vector points, and updates the vector only.
        unsafe { self.request_with_buffer(PTRACE_SETREGSET, set, (&raw mut vector).cast()) }
    }

    /// The thread's signal mask outside of a call that replaces it temporarily (ppoll(2)).
    pub fn read_signal_mask(self) -> io::Result<u64> {
        let mut mask = 0_u64;
        // SAFETY: the kernel writes as many bytes as `mask` has.
        unsafe { self.request_with_buffer(PTRACE_GETSIGMASK, size_of::<u64>(), (&raw mut mask).cast()) }?;
        Ok(mask)
    }

    /// Set the signal mask. A saved mask that such a call would restore is lost.
    pub fn write_signal_mask(self, mut mask: u64) -> io::Result<()> {
        // SAFETY: the kernel reads as many bytes as `mask` has.
        unsafe { self.request_with_buffer(PTRACE_SETSIGMASK, size_of::<u64>(), (&raw mut mask).cast()) }
    }

    /// The address of the thread's `struct rseq`. None if the thread has none or the kernel (before 5.13) does not
    /// report it.
    pub fn rseq_address(self) -> Option<u64> {
        let mut configuration = RseqConfiguration::default();
        let size = size_of::<RseqConfiguration>();
        let buffer = (&raw mut configuration).cast();
        // SAFETY: the kernel writes at most `size` bytes, and any bytes are a valid configuration.
        unsafe { self.request_with_buffer(PTRACE_GET_RSEQ_CONFIGURATION, size, buffer) }.ok()?;
        (configuration.pointer != 0).then_some(configuration.pointer)
    }

    /// Whether the program dispatches system calls itself (`PR_SET_SYSCALL_USER_DISPATCH`).
    pub fn dispatches_syscalls(self) -> bool {
        let mut dispatch = SyscallUserDispatch::default();
        let size = size_of::<SyscallUserDispatch>();
        // SAFETY: the kernel writes at most `size` bytes, and any bytes are a valid state.
        let result =
            unsafe { self.request_with_buffer(PTRACE_GET_SYSCALL_USER_DISPATCH, size, (&raw mut dispatch).cast()) };
        // A kernel that does not report it (before 6.4) may still have it. Only emulators of other systems use it.
        result.is_ok() && dispatch.mode != 0
    }

    /// Wait until the thread reports a stop, at most until `deadline`.
    ///
    /// waitpid(2) has no timeout. So it is called after each SIGCHLD, and from time to time in between, because a
    /// SIGCHLD may have arrived before the wait began.
    pub fn wait_for_stop(self, deadline: Instant) -> io::Result<Option<StopReason>> {
        let mut polls = 0_u32;
        loop {
            tracer::restart_watchdog();
            let mut status = 0;
            // SAFETY: `status` is a valid place for the status.
            let result = unsafe { libc::waitpid(self.0, &raw mut status, libc::__WALL | libc::WNOHANG) };
            match result {
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
