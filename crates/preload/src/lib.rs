//! `libpagefold_preload.so`: enrolls the program that loads it in KSM, from within (`LD_PRELOAD`, set by `pagefold
//! run`).
//!
//! It is for hosts on which programs cannot inherit enrollment over exec. When it is loaded it calls
//! `prctl(PR_SET_MEMORY_MERGE)`, which covers all present and future mappings of the process (kernel/sys.c, mm/ksm.c
//! `ksm_enable_merge_any`, Linux 6.4). If the kernel refuses, a thread marks the whole address space as
//! `MADV_MERGEABLE`, at once and then twice a second: mm/madvise.c `madvise_walk_vmas` skips holes and returns `ENOMEM`
//! in the end, and mm/ksm.c `ksm_madvise` skips regions that cannot be merged.
//!
//! The library runs inside another program, and changes as little of it as possible:
//! - the thread opens no file (a program that closes or counts its descriptors sees nothing of it), allocates nothing
//!   while it runs, takes no signal, and makes two system calls: `madvise` and `futex`;
//! - a forked child gets a thread of its own; the child of a `vfork` has its parent's memory and needs none;
//! - when the main thread ends by `pthread_exit` this one ends too, since a process whose other threads have ended
//!   must end.
//!
//! It prints nothing, even if nothing can be marked: `pagefold run` checks the result from outside.
//!
//! Limits: a mapping that exists only between two rounds is missed. A process with a second thread cannot
//! `unshare(CLONE_NEWUSER)`. A child of a bare `clone` system call has no thread. A seccomp filter that is set on all
//! threads at once (`SECCOMP_FILTER_FLAG_TSYNC`) applies to this thread too; one that kills for `madvise` or `futex`
//! would kill the process. For glibc only: other C libraries do not load it.

use std::ffi::{c_int, c_long, c_ulong, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// The address space that mmap(2) uses by default: 47 bits on x86-64, less the last page
/// (Documentation/arch/x86/x86_64/5level-paging.rst), 48 bits elsewhere (Documentation/arch/arm64/memory.rst).
const ADDRESS_SPACE_BYTES: usize = if cfg!(target_arch = "x86_64") { (1 << 47) - 4096 } else { 1 << 48 };

/// Pause between the first two rounds, in nanoseconds; doubled up to [`MARK_INTERVAL_NS`]. Programs map most when they
/// start.
const FIRST_MARK_INTERVAL_NS: i64 = 15_625_000;
/// Pause between later rounds, in nanoseconds.
const MARK_INTERVAL_NS: i64 = 500_000_000;

/// The futex on which the thread sleeps: 1 tells it to end.
static STOP_FUTEX: AtomicU32 = AtomicU32::new(0);
/// Whether the thread runs.
static IS_MARKER_RUNNING: AtomicBool = AtomicBool::new(false);
/// The key of [`on_thread_exit`].
static THREAD_EXIT_KEY: AtomicU32 = AtomicU32::new(0);

/// The loader calls it before the program starts.
#[used]
#[unsafe(link_section = ".init_array")]
static INIT_ARRAY_ENTRY: extern "C" fn() = on_load;

extern "C" fn on_load() {
    let (enable, zero): (c_ulong, c_ulong) = (1, 0);
    // SAFETY: this option takes only numbers, and changes neither the content nor the protection of memory.
    let is_enrolled = unsafe { libc::prctl(libc::PR_SET_MEMORY_MERGE, enable, zero, zero, zero) } == 0;
    if is_enrolled || !mark_address_space() {
        return;
    }
    let mut key = 0;
    // SAFETY: `key` is valid for writes, and `on_thread_exit` stays loaded: a preloaded library is never unloaded.
    let is_key_created = unsafe { libc::pthread_key_create(&raw mut key, Some(on_thread_exit)) } == 0;
    THREAD_EXIT_KEY.store(key, Ordering::Relaxed);
    // SAFETY: `on_fork_in_child` stays loaded.
    let has_fork_handler = is_key_created && unsafe { libc::pthread_atfork(None, None, Some(on_fork_in_child)) } == 0;
    if has_fork_handler {
        start_marker_thread();
    }
}

/// In a forked child only the forking thread remains. glibc calls this once its own locks are usable again.
extern "C" fn on_fork_in_child() {
    if IS_MARKER_RUNNING.load(Ordering::Relaxed) {
        start_marker_thread();
    }
}

/// The calling thread, which loaded this library or forked, ends before its process does.
extern "C" fn on_thread_exit(_: *mut c_void) {
    STOP_FUTEX.store(1, Ordering::Relaxed);
    let max_woken: c_int = 1;
    // SAFETY: the futex is a static; waking reads and writes nothing.
    unsafe {
        libc::syscall(libc::SYS_futex, STOP_FUTEX.as_ptr(), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, max_woken)
    };
}

/// Mark all present mappings. Returns whether this kernel supports that.
fn mark_address_space() -> bool {
    // SAFETY: this advice changes neither the content nor the protection of memory, and the kernel skips holes.
    let result = unsafe { libc::madvise(ptr::null_mut(), ADDRESS_SPACE_BYTES, libc::MADV_MERGEABLE) };
    result == 0 || io::Error::last_os_error().raw_os_error() == Some(libc::ENOMEM)
}

/// Start the thread, with every signal blocked from its start. If it cannot be created, the ranges marked so far stay
/// marked.
fn start_marker_thread() {
    STOP_FUTEX.store(0, Ordering::Relaxed);
    let mut all_signals = MaybeUninit::uninit();
    let mut previous_mask = MaybeUninit::uninit();
    // SAFETY: `all_signals` is valid for writes.
    unsafe { libc::sigfillset(all_signals.as_mut_ptr()) };
    // SAFETY: `all_signals` was filled; `previous_mask` is valid for writes.
    if unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all_signals.as_ptr(), previous_mask.as_mut_ptr()) } != 0 {
        return;
    }
    let mut thread = MaybeUninit::uninit();
    // SAFETY: `thread` is valid for writes; `run_marker_thread` stays loaded and ignores its argument.
    let is_created =
        unsafe { libc::pthread_create(thread.as_mut_ptr(), ptr::null(), run_marker_thread, ptr::null_mut()) } == 0;
    if is_created {
        // SAFETY: the thread was created, so this was written.
        let thread = unsafe { thread.assume_init() };
        // SAFETY: no code joins the thread.
        unsafe { libc::pthread_detach(thread) };
        // SAFETY: the key was created; its value is never dereferenced, it only has to differ from null.
        unsafe { libc::pthread_setspecific(THREAD_EXIT_KEY.load(Ordering::Relaxed), STOP_FUTEX.as_ptr().cast()) };
    }
    IS_MARKER_RUNNING.store(is_created, Ordering::Relaxed);
    // SAFETY: `previous_mask` was written above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, previous_mask.as_ptr(), ptr::null_mut()) };
}

extern "C" fn run_marker_thread(_: *mut c_void) -> *mut c_void {
    let mut pause = FIRST_MARK_INTERVAL_NS;
    while STOP_FUTEX.load(Ordering::Relaxed) == 0 && mark_address_space() {
        sleep_unless_stopped(pause);
        pause = (pause * 2).min(MARK_INTERVAL_NS);
    }
    ptr::null_mut()
}

/// Sleep for so many nanoseconds, or until the thread is told to end.
fn sleep_unless_stopped(nanoseconds: i64) {
    let time = libc::timespec { tv_sec: 0, tv_nsec: nanoseconds };
    let expected: c_long = 0;
    let futex_operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the futex is a static, `time` outlives the call, and the kernel only reads both.
    unsafe { libc::syscall(libc::SYS_futex, STOP_FUTEX.as_ptr(), futex_operation, expected, &raw const time) };
}
