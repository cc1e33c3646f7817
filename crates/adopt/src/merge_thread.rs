//! The thread that merges beside a program.
//!
//! It is there only while there are blocks to merge, because a program can see it, and some calls fail beside another
//! thread:
//!
//! - **unshare(2) and setns(2)** refuse to change the user namespace of a process with several threads
//!   (`check_unshare_flags` in kernel/fork.c, `userns_install` in kernel/user_namespace.c, Linux 6.18). Where they do,
//!   the thread ends, the call is made again, and the thread is made anew.
//! - **fork(2)**: runtimes count the threads of a process that forks, and warn (Python 3.12 reads `/proc/self/stat`
//!   right after the fork). So in a program with one thread ours ends before a fork. An allocation makes it anew, once
//!   [`RESTART_DELAY_AFTER_FORK`] has passed without a fork; in the child, too.
//!
//! Limits: a program that forks more often than that is not merged meanwhile, nor is one that allocates nothing more
//! after a fork. Where the program has an allocator of its own, which may ask for memory with a lock held, the thread is
//! made when the program begins, and stays over forks. After `unshare(CLONE_NEWPID)` the kernel makes no thread, which
//! is said. System calls past the C library are not seen.

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

/// Before the first merge: what ends soon is not merged.
const FIRST_MERGE_DELAY: Duration = Duration::from_millis(300);
/// How long after a fork an allocation makes the thread anew.
const RESTART_DELAY_AFTER_FORK: Duration = Duration::from_millis(100);
/// The thread ends after so many rounds without a block, which free what the blocks had in the store; and how long it
/// rests between them at most.
const MAX_ROUNDS_WITHOUT_BLOCKS: u32 = 3;
const PAUSE_WITHOUT_BLOCKS: Duration = Duration::from_millis(500);
/// For how long at most the kernel is waited for to forget a thread that has ended.
const THREAD_EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// Values of [`THREAD_STATE`].
const THREAD_NONE: u32 = 0;
const THREAD_CHANGING: u32 = 1;
const THREAD_RUNNING: u32 = 2;

/// Whether there is a thread. The one who changes it to [`THREAD_CHANGING`] begins or ends the thread.
static THREAD_STATE: AtomicU32 = AtomicU32::new(THREAD_NONE);
/// The thread, as pthread_join(3) takes it; and as the kernel calls it, 0 before the first.
static PTHREAD_HANDLE: AtomicUsize = AtomicUsize::new(0);
static THREAD_ID: AtomicI32 = AtomicI32::new(0);
/// What the thread sleeps on: 1 when it is to end.
static STOP_FUTEX: AtomicU32 = AtomicU32::new(0);
/// The main thread has ended: the process ends with the last thread of the program.
static HAS_MAIN_THREAD_ENDED: AtomicBool = AtomicBool::new(false);
/// When the next round is due, in nanoseconds of [`merge_clock`], whichever thread does it.
static NEXT_ROUND_NS: AtomicU64 = AtomicU64::new(0);
/// From when on an allocation makes the thread anew; 0 if none is to.
static RESTART_NS: AtomicU64 = AtomicU64::new(0);
/// The process of [`RESTART_NS`]: a child of vfork(2) has the same memory.
static RESTART_PID: AtomicU32 = AtomicU32::new(0);

fn now_ns() -> u64 {
    merge_clock().as_nanos() as u64
}

/// There is a block. Have a thread that merges beside the program, unless MPI's safe points do it. Signals are blocked
/// in it from its beginning.
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
    // SAFETY: `thread` is there to be written, `rounds` stays loaded and asks nothing of its argument.
    let make = || unsafe { libc::pthread_create(thread.as_mut_ptr(), ptr::null(), run_rounds, ptr::null_mut()) };
    let error = process_hooks::without_signals(make).unwrap_or(libc::EAGAIN);
    if error == 0 {
        // SAFETY: the thread was made, so this was written.
        PTHREAD_HANDLE.store(unsafe { thread.assume_init() } as usize, Ordering::Relaxed);
        RESTART_NS.store(0, Ordering::Relaxed);
        THREAD_STATE.store(THREAD_RUNNING, Ordering::Release);
        return;
    }
    if error == libc::EINVAL {
        merger::print_reason_once(
            "the kernel makes no thread in a process that has changed its children's PID namespace",
        );
    }
    // The next block tries again, and so does an allocation.
    schedule_restart();
    THREAD_STATE.store(THREAD_NONE, Ordering::Release);
}

/// End the thread once the merge in hand is done, and wait until the kernel no longer counts it. Whether there was one.
pub fn stop() -> bool {
    // The thread may wait for what this one has.
    if MERGER.is_held_by_this_thread() || BLOCKS.is_held_by_this_thread() {
        return false;
    }
    let former = loop {
        let former = THREAD_STATE.load(Ordering::Relaxed);
        let changes = THREAD_STATE.compare_exchange(former, THREAD_CHANGING, Ordering::Acquire, Ordering::Relaxed);
        if former != THREAD_CHANGING && changes.is_ok() {
            break former;
        }
        std::thread::yield_now();
    };
    if former == THREAD_RUNNING {
        request_stop();
        let thread = PTHREAD_HANDLE.load(Ordering::Relaxed) as libc::pthread_t;
        // SAFETY: the thread was made, is nobody else's to join, and is joined once.
        unsafe { libc::pthread_join(thread, ptr::null_mut()) };
    }
    // The thread that is joined is counted for some microseconds more (exit_mm_release comes before release_task in
    // kernel/exit.c), and so is one that has ended by itself.
    let until = merge_clock() + THREAD_EXIT_TIMEOUT;
    while is_known_to_kernel(THREAD_ID.load(Ordering::Relaxed)) && merge_clock() < until {
        std::thread::sleep(Duration::from_micros(20));
    }
    THREAD_ID.store(0, Ordering::Relaxed);
    THREAD_STATE.store(THREAD_NONE, Ordering::Release);
    former == THREAD_RUNNING
}

/// Whether a thread of this process is there for the kernel.
fn is_known_to_kernel(thread: i32) -> bool {
    let process = std::process::id();
    // SAFETY: signal 0 is not delivered; the call only asks.
    thread != 0 && unsafe { libc::syscall(libc::SYS_tgkill, process, thread, 0) } == 0
}

/// The main thread ends by pthread_exit(3), before its process does, which no thread of ours must hold up.
pub fn stop_when_main_thread_exits() {
    HAS_MAIN_THREAD_ENDED.store(true, Ordering::Relaxed);
    request_stop();
}

fn request_stop() {
    STOP_FUTEX.store(1, Ordering::Relaxed);
    let one: c_int = 1;
    // SAFETY: the futex is a static; waking reads and writes nothing.
    unsafe { libc::syscall(libc::SYS_futex, STOP_FUTEX.as_ptr(), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, one) };
}

/// The program forks: end the thread if it is the only one beside the caller.
pub fn stop_before_fork() {
    if THREAD_STATE.load(Ordering::Relaxed) != THREAD_RUNNING || !process_hooks::uses_libc_allocator() {
        return;
    }
    // One of two is ours, also where it has not come to say which.
    let alone = process_hooks::thread_ids().len() == 2;
    if alone && stop() {
        RESTART_NS.store(u64::MAX, Ordering::Relaxed);
    }
}

/// The program has forked, and this is the parent.
pub fn after_fork_in_parent() {
    if RESTART_NS.load(Ordering::Relaxed) != 0 {
        schedule_restart();
    }
}

/// The program has forked, and this is the child, which has no thread of ours.
pub fn after_fork_in_child() {
    let had_one = THREAD_STATE.swap(THREAD_NONE, Ordering::Relaxed) != THREAD_NONE;
    THREAD_ID.store(0, Ordering::Relaxed);
    HAS_MAIN_THREAD_ENDED.store(false, Ordering::Relaxed);
    if had_one && !process_hooks::uses_libc_allocator() {
        start();
    } else if had_one || RESTART_NS.load(Ordering::Relaxed) != 0 {
        schedule_restart();
    }
}

fn schedule_restart() {
    RESTART_PID.store(std::process::id(), Ordering::Relaxed);
    RESTART_NS.store((merge_clock() + RESTART_DELAY_AFTER_FORK).as_nanos() as u64, Ordering::Relaxed);
}

/// The program allocates: make the thread anew if a fork has ended it some time ago.
pub fn restart_on_allocation() {
    if RESTART_NS.load(Ordering::Relaxed) != 0 {
        keeping_errno(restart_if_due);
    }
}

#[cold]
fn restart_if_due() {
    // It is there again, or never will be.
    if THREAD_STATE.load(Ordering::Relaxed) == THREAD_RUNNING
        || merger::is_merging_over()
        || HAS_MAIN_THREAD_ENDED.load(Ordering::Relaxed)
    {
        return RESTART_NS.store(0, Ordering::Relaxed);
    }
    let ours = MERGER.is_held_by_this_thread() || BLOCKS.is_held_by_this_thread() || next::is_in_lookup();
    if !ours
        && now_ns() >= RESTART_NS.load(Ordering::Relaxed)
        && RESTART_PID.load(Ordering::Relaxed) == std::process::id()
    {
        start();
    }
}

extern "C" fn run_rounds(_: *mut c_void) -> *mut c_void {
    // SAFETY: it only asks.
    THREAD_ID.store(unsafe { libc::gettid() }, Ordering::Relaxed);
    let due = Duration::from_nanos(NEXT_ROUND_NS.load(Ordering::Relaxed));
    sleep_until_stop(due.checked_sub(merge_clock()).unwrap_or(if due.is_zero() {
        FIRST_MERGE_DELAY
    } else {
        Duration::ZERO
    }));
    let mut without_blocks = 0;
    while STOP_FUTEX.load(Ordering::Relaxed) == 0 {
        without_blocks = if has_blocks() { 0 } else { without_blocks + 1 };
        if without_blocks > MAX_ROUNDS_WITHOUT_BLOCKS && try_to_retire(has_blocks) {
            break;
        }
        let Some(rest) = merger::merge_beside_program() else {
            try_to_retire(|| false);
            break;
        };
        let rest = if without_blocks > 0 { rest.min(PAUSE_WITHOUT_BLOCKS) } else { rest };
        NEXT_ROUND_NS.store((merge_clock() + rest).as_nanos() as u64, Ordering::Relaxed);
        sleep_until_stop(rest);
    }
    ptr::null_mut()
}

/// Whether there is anything that may be merged.
fn has_blocks() -> bool {
    BLOCKS.lock().is_none_or(|blocks| blocks.has_any(BlockState::Unknown) || blocks.has_any(BlockState::Adopted))
}

/// Whether this thread of ours may end by itself: unless it is being ended, or is needed after all.
fn try_to_retire(is_needed: impl FnOnce() -> bool) -> bool {
    if !process_hooks::uses_libc_allocator()
        || THREAD_STATE.compare_exchange(THREAD_RUNNING, THREAD_NONE, Ordering::AcqRel, Ordering::Relaxed).is_err()
    {
        return false;
    }
    // A block that came before this found a thread. One that comes after it makes another.
    if is_needed()
        && THREAD_STATE.compare_exchange(THREAD_NONE, THREAD_RUNNING, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    {
        return false;
    }
    NEXT_ROUND_NS.store(0, Ordering::Relaxed);
    let this = next::this_thread() as libc::pthread_t;
    // SAFETY: the thread is nobody's to join: `end` joins in the state that was just left only.
    unsafe { libc::pthread_detach(this) };
    true
}

/// Sleep for a time, or until it is to end.
fn sleep_until_stop(time: Duration) {
    let time = libc::timespec {
        tv_sec: time.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_nsec: c_long::from(time.subsec_nanos().cast_signed()),
    };
    let unchanged: c_long = 0;
    let wait = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the futex is a static, `time` outlives the call, and the kernel only reads both.
    unsafe { libc::syscall(libc::SYS_futex, STOP_FUTEX.as_ptr(), wait, unchanged, &raw const time) };
}

/// Make a call that the kernel may refuse beside another thread, without ours if it does.
fn retry_without_thread(call: impl Fn() -> c_int) -> c_int {
    let answer = call();
    let errno = std::io::Error::last_os_error().raw_os_error();
    let refused = answer == -1 && matches!(errno, Some(libc::EINVAL | libc::EUSERS));
    let had_one = THREAD_STATE.load(Ordering::Relaxed) != THREAD_NONE || THREAD_ID.load(Ordering::Relaxed) != 0;
    if !refused || !had_one {
        return answer;
    }
    let ended = stop();
    let answer = call();
    if ended {
        keeping_errno(start);
    }
    answer
}

/// unshare(2), which may be refused beside another thread.
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

/// setns(2), as for [`unshare`].
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
