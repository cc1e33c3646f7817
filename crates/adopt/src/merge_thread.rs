//! The thread that merges beside a program.
//!
//! It runs only while there are blocks to merge, because a program can see it, and some calls fail if there is another
//! thread:
//!
//! - **unshare(2) and setns(2)** refuse to change the user namespace of a process with several threads
//!   (`check_unshare_flags` in kernel/fork.c, `userns_install` in kernel/user_namespace.c, Linux 6.18). After such a
//!   refusal the thread ends, the call is repeated, and a new thread starts.
//! - **fork(2)**: runtimes count the threads of a process that forks, and warn (Python 3.12 reads `/proc/self/stat`
//!   right after the fork). So in a program with one thread this thread ends before a fork. An allocation starts a new
//!   one, once [`RESTART_DELAY_AFTER_FORK`] has passed without a fork; in the child, too.
//!
//! Limits: a program that forks more often than that is not merged in the meantime. Neither is a program that allocates
//! nothing after a fork. If the program has its own allocator, which may request memory while it holds a lock, the
//! thread starts with the program and stays during forks. After `unshare(CLONE_NEWPID)` the kernel creates no thread; a
//! message reports that. System calls that bypass the C library are not seen.

use crate::blocks::{BLOCKS, BlockState};
use crate::mappings::{keeping_errno, set_errno};
use crate::merger::{self, MERGER};
use crate::next::{self, next};
use crate::process_hooks;
use pagefold_engine::merge_clock;
use std::ffi::{c_int, c_long, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// Delay before the first merge, so that short-lived blocks are not merged.
const FIRST_MERGE_DELAY: Duration = Duration::from_millis(300);
/// Time after a fork from which an allocation starts a new thread.
const RESTART_DELAY_AFTER_FORK: Duration = Duration::from_millis(100);
/// The thread ends after this many rounds without a block, which free the blocks' contents in the store; and the
/// maximum pause between these rounds.
const MAX_ROUNDS_WITHOUT_BLOCKS: u32 = 3;
const PAUSE_WITHOUT_BLOCKS: Duration = Duration::from_millis(500);
/// How long to wait at most until the kernel no longer counts a thread that has ended.
const THREAD_EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// Values of [`THREAD_STATE`].
const THREAD_NONE: u32 = 0;
const THREAD_CHANGING: u32 = 1;
const THREAD_RUNNING: u32 = 2;

/// The state of the thread. The caller that changes it to [`THREAD_CHANGING`] starts or ends the thread.
static THREAD_STATE: AtomicU32 = AtomicU32::new(THREAD_NONE);
/// The thread's handle for pthread_join(3); and its kernel thread number, 0 before the first thread.
static PTHREAD_HANDLE: AtomicUsize = AtomicUsize::new(0);
static THREAD_ID: AtomicI32 = AtomicI32::new(0);
/// The futex on which the thread sleeps: 1 tells it to end.
static STOP_FUTEX: AtomicU32 = AtomicU32::new(0);
/// Whether the main thread has ended: then the process ends with the last thread of the program.
static HAS_MAIN_THREAD_ENDED: AtomicBool = AtomicBool::new(false);
/// When the next round is due, in nanoseconds of [`merge_clock`], on any thread.
static NEXT_ROUND_NS: AtomicU64 = AtomicU64::new(0);
/// The time from which an allocation starts a new thread; 0 for never.
static RESTART_NS: AtomicU64 = AtomicU64::new(0);
/// The process that has set [`RESTART_NS`]: a child of vfork(2) shares this memory.
static RESTART_PID: AtomicU32 = AtomicU32::new(0);

fn now_ns() -> u64 {
    merge_clock().as_nanos() as u64
}

/// There is a block: start a thread that merges beside the program, unless MPI's safe points merge. The thread starts
/// with all signals blocked.
pub fn start() {
    if THREAD_STATE.load(Ordering::Relaxed) != THREAD_NONE
        || process_hooks::is_merged_at_safe_points()
        || merger::is_merging_over()
        || HAS_MAIN_THREAD_ENDED.load(Ordering::Relaxed)
        || RESTART_NS.load(Ordering::Relaxed) > now_ns()
        || THREAD_STATE.compare_exchange(THREAD_NONE, THREAD_CHANGING, Ordering::Acquire, Ordering::Relaxed).is_err()
    {
        return;
    }
    STOP_FUTEX.store(0, Ordering::Relaxed);
    let mut thread = MaybeUninit::uninit();
    // SAFETY: `thread` is valid for writes; `run_rounds` stays loaded and ignores its argument.
    let create_thread =
        || unsafe { libc::pthread_create(thread.as_mut_ptr(), ptr::null(), run_rounds, ptr::null_mut()) };
    let error = process_hooks::without_signals(create_thread).unwrap_or(libc::EAGAIN);
    if error == 0 {
        // SAFETY: the thread was created, so this was written.
        PTHREAD_HANDLE.store(unsafe { thread.assume_init() } as usize, Ordering::Relaxed);
        RESTART_NS.store(0, Ordering::Relaxed);
        THREAD_STATE.store(THREAD_RUNNING, Ordering::Release);
        return;
    }
    if error == libc::EINVAL {
        merger::print_reason_once(
            "the kernel creates no thread after unshare(CLONE_NEWPID) or setns to a PID namespace",
        );
    }
    // The next block tries again, and so does an allocation.
    schedule_restart();
    THREAD_STATE.store(THREAD_NONE, Ordering::Release);
}

/// End the thread after the running merge, and wait until the kernel no longer counts it. Returns whether there was
/// one.
pub fn stop() -> bool {
    // The thread may wait for a lock that this thread holds.
    if MERGER.is_held_by_this_thread() || BLOCKS.is_held_by_this_thread() {
        return false;
    }
    let old_state = loop {
        let old_state = THREAD_STATE.load(Ordering::Relaxed);
        let exchange = THREAD_STATE.compare_exchange(old_state, THREAD_CHANGING, Ordering::Acquire, Ordering::Relaxed);
        if old_state != THREAD_CHANGING && exchange.is_ok() {
            break old_state;
        }
        std::thread::yield_now();
    };
    if old_state == THREAD_RUNNING {
        request_stop();
        let thread = PTHREAD_HANDLE.load(Ordering::Relaxed) as libc::pthread_t;
        // SAFETY: the thread was created, no other code joins it, and it is joined once.
        unsafe { libc::pthread_join(thread, ptr::null_mut()) };
    }
    // The kernel counts the joined thread for some microseconds more (exit_mm_release comes before release_task in
    // kernel/exit.c), and also one that has ended by itself.
    let deadline = merge_clock() + THREAD_EXIT_TIMEOUT;
    while is_known_to_kernel(THREAD_ID.load(Ordering::Relaxed)) && merge_clock() < deadline {
        std::thread::sleep(Duration::from_micros(20));
    }
    THREAD_ID.store(0, Ordering::Relaxed);
    THREAD_STATE.store(THREAD_NONE, Ordering::Release);
    old_state == THREAD_RUNNING
}

/// Whether the kernel still knows a thread of this process.
fn is_known_to_kernel(tid: i32) -> bool {
    let pid = std::process::id();
    // SAFETY: signal 0 is not delivered; the call only checks.
    tid != 0 && unsafe { libc::syscall(libc::SYS_tgkill, pid, tid, 0) } == 0
}

/// The main thread ends by pthread_exit(3), before its process does. This library's thread must not delay the end of
/// the process.
pub fn stop_when_main_thread_exits() {
    HAS_MAIN_THREAD_ENDED.store(true, Ordering::Relaxed);
    request_stop();
}

fn request_stop() {
    STOP_FUTEX.store(1, Ordering::Relaxed);
    let max_woken: c_int = 1;
    // SAFETY: the futex is a static; waking reads and writes nothing.
    unsafe {
        libc::syscall(libc::SYS_futex, STOP_FUTEX.as_ptr(), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, max_woken)
    };
}

/// Before a fork: end the thread if it is the only one besides the caller.
pub fn stop_before_fork() {
    if THREAD_STATE.load(Ordering::Relaxed) != THREAD_RUNNING || !process_hooks::uses_libc_allocator() {
        return;
    }
    // One of the two is this library's, even if it has not stored its number yet.
    let is_only_other_thread = process_hooks::thread_ids().len() == 2;
    if is_only_other_thread && stop() {
        RESTART_NS.store(u64::MAX, Ordering::Relaxed);
    }
}

/// After a fork, in the parent.
pub fn after_fork_in_parent() {
    if RESTART_NS.load(Ordering::Relaxed) != 0 {
        schedule_restart();
    }
}

/// After a fork, in the child, which has no thread of this library.
pub fn after_fork_in_child() {
    let had_thread = THREAD_STATE.swap(THREAD_NONE, Ordering::Relaxed) != THREAD_NONE;
    THREAD_ID.store(0, Ordering::Relaxed);
    HAS_MAIN_THREAD_ENDED.store(false, Ordering::Relaxed);
    if had_thread && !process_hooks::uses_libc_allocator() {
        start();
    } else if had_thread || RESTART_NS.load(Ordering::Relaxed) != 0 {
        schedule_restart();
    }
}

fn schedule_restart() {
    RESTART_PID.store(std::process::id(), Ordering::Relaxed);
    RESTART_NS.store((merge_clock() + RESTART_DELAY_AFTER_FORK).as_nanos() as u64, Ordering::Relaxed);
}

/// The program allocates: start a new thread if a fork ended the last one some time ago.
pub fn restart_on_allocation() {
    if RESTART_NS.load(Ordering::Relaxed) != 0 {
        keeping_errno(restart_if_due);
    }
}

#[cold]
fn restart_if_due() {
    // The thread runs again, or never will.
    if THREAD_STATE.load(Ordering::Relaxed) == THREAD_RUNNING
        || merger::is_merging_over()
        || HAS_MAIN_THREAD_ENDED.load(Ordering::Relaxed)
    {
        return RESTART_NS.store(0, Ordering::Relaxed);
    }
    let is_inside_library = MERGER.is_held_by_this_thread() || BLOCKS.is_held_by_this_thread() || next::is_in_lookup();
    if !is_inside_library
        && now_ns() >= RESTART_NS.load(Ordering::Relaxed)
        && RESTART_PID.load(Ordering::Relaxed) == std::process::id()
    {
        start();
    }
}

extern "C" fn run_rounds(_: *mut c_void) -> *mut c_void {
    // SAFETY: the call only reads a number.
    THREAD_ID.store(unsafe { libc::gettid() }, Ordering::Relaxed);
    let next_round = Duration::from_nanos(NEXT_ROUND_NS.load(Ordering::Relaxed));
    sleep_until_stop(next_round.checked_sub(merge_clock()).unwrap_or(if next_round.is_zero() {
        FIRST_MERGE_DELAY
    } else {
        Duration::ZERO
    }));
    let mut rounds_without_blocks = 0;
    while STOP_FUTEX.load(Ordering::Relaxed) == 0 {
        rounds_without_blocks = if has_blocks() { 0 } else { rounds_without_blocks + 1 };
        if rounds_without_blocks > MAX_ROUNDS_WITHOUT_BLOCKS && try_to_retire(has_blocks) {
            break;
        }
        let Some(pause) = merger::merge_beside_program() else {
            try_to_retire(|| false);
            break;
        };
        let pause = if rounds_without_blocks > 0 { pause.min(PAUSE_WITHOUT_BLOCKS) } else { pause };
        NEXT_ROUND_NS.store((merge_clock() + pause).as_nanos() as u64, Ordering::Relaxed);
        sleep_until_stop(pause);
    }
    ptr::null_mut()
}

/// Whether there is any block to merge.
fn has_blocks() -> bool {
    BLOCKS.lock().is_none_or(|blocks| blocks.has_any(BlockState::Unknown) || blocks.has_any(BlockState::Adopted))
}

/// Whether this library's thread may end by itself. Not while another thread is ending it or it is still needed.
fn try_to_retire(is_needed: impl FnOnce() -> bool) -> bool {
    if !process_hooks::uses_libc_allocator()
        || THREAD_STATE.compare_exchange(THREAD_RUNNING, THREAD_NONE, Ordering::AcqRel, Ordering::Relaxed).is_err()
    {
        return false;
    }
    // A block that was added before this point found a thread. A later block starts a new one.
    if is_needed()
        && THREAD_STATE.compare_exchange(THREAD_NONE, THREAD_RUNNING, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    {
        return false;
    }
    NEXT_ROUND_NS.store(0, Ordering::Relaxed);
    let thread = next::this_thread() as libc::pthread_t;
    // SAFETY: no code joins the thread: `stop` joins only in the state that was just left.
    unsafe { libc::pthread_detach(thread) };
    true
}

/// Sleep for some time, or until the thread is told to end.
fn sleep_until_stop(time: Duration) {
    let time = libc::timespec {
        tv_sec: time.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_nsec: c_long::from(time.subsec_nanos().cast_signed()),
    };
    let expected: c_long = 0;
    let futex_operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the futex is a static, `time` outlives the call, and the kernel only reads both.
    unsafe { libc::syscall(libc::SYS_futex, STOP_FUTEX.as_ptr(), futex_operation, expected, &raw const time) };
}

/// Make a call that the kernel may refuse if there is another thread; if it does, repeat it without this library's.
fn retry_without_thread(call: impl Fn() -> c_int) -> c_int {
    let result = call();
    let errno = std::io::Error::last_os_error().raw_os_error();
    let is_refused = result == -1 && matches!(errno, Some(libc::EINVAL | libc::EUSERS));
    let had_thread = THREAD_STATE.load(Ordering::Relaxed) != THREAD_NONE || THREAD_ID.load(Ordering::Relaxed) != 0;
    if !is_refused || !had_thread {
        return result;
    }
    let was_stopped = stop();
    let result = call();
    if was_stopped {
        keeping_errno(start);
    }
    result
}

/// unshare(2), which the kernel may refuse if there is another thread.
#[unsafe(no_mangle)]
pub extern "C" fn unshare(flags: c_int) -> c_int {
    match next!(c"unshare", unsafe extern "C" fn(c_int) -> c_int) {
        // SAFETY: any flags may be given.
        Some(next) => retry_without_thread(|| unsafe { next(flags) }),
        None => {
            set_errno(libc::ENOSYS);
            -1
        }
    }
}

/// setns(2), like [`unshare`].
#[unsafe(no_mangle)]
pub extern "C" fn setns(file: c_int, kind: c_int) -> c_int {
    match next!(c"setns", unsafe extern "C" fn(c_int, c_int) -> c_int) {
        // SAFETY: any numbers may be given.
        Some(next) => retry_without_thread(|| unsafe { next(file, kind) }),
        None => {
            set_errno(libc::ENOSYS);
            -1
        }
    }
}
