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
//!   [`FORK_PAUSE`] has passed without a fork; in the child, too.
//!
//! Limits: a program that forks more often than that is not merged meanwhile, nor is one that allocates nothing more
//! after a fork. Where the program has an allocator of its own, which may ask for memory with a lock held, the thread is
//! made when the program begins, and stays over forks. After `unshare(CLONE_NEWPID)` the kernel makes no thread, which
//! is said. System calls past the C library are not seen.

use crate::blocks::{BLOCKS, State};
use crate::guest;
use crate::mappings::{keeping_errno, set_errno};
use crate::merge::{self, MERGER};
use crate::next::{self, next};
use pagefold_engine::clock;
use std::ffi::{c_int, c_long, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// Before the first merge: what ends soon is not merged.
const FIRST_REST: Duration = Duration::from_millis(300);
/// How long after a fork an allocation makes the thread anew.
const FORK_PAUSE: Duration = Duration::from_millis(100);
/// The thread ends after so many rounds without a block, which free what the blocks had in the store; and how long it
/// rests between them at most.
const ROUNDS_WITHOUT_BLOCKS: u32 = 3;
const REST_WITHOUT_BLOCKS: Duration = Duration::from_millis(500);
/// For how long at most the kernel is waited for to forget a thread that has ended.
const EXIT_PATIENCE: Duration = Duration::from_secs(1);

/// Values of [`STATE`].
const NONE: u32 = 0;
const CHANGING: u32 = 1;
const RUNS: u32 = 2;

/// Whether there is a thread. The one who changes it to [`CHANGING`] begins or ends the thread.
static STATE: AtomicU32 = AtomicU32::new(NONE);
/// The thread, as pthread_join(3) takes it; and as the kernel calls it, 0 before the first.
static THREAD: AtomicUsize = AtomicUsize::new(0);
static ID: AtomicI32 = AtomicI32::new(0);
/// What the thread sleeps on: 1 when it is to end.
static END: AtomicU32 = AtomicU32::new(0);
/// The main thread has ended: the process ends with the last thread of the program.
static MAIN_ENDED: AtomicBool = AtomicBool::new(false);
/// When the next round is due, in nanoseconds of [`clock`], whichever thread does it.
static NEXT_ROUND: AtomicU64 = AtomicU64::new(0);
/// From when on an allocation makes the thread anew; 0 if none is to.
static RESUMES: AtomicU64 = AtomicU64::new(0);
/// The process of [`RESUMES`]: a child of vfork(2) has the same memory.
static PROCESS: AtomicU32 = AtomicU32::new(0);

fn now() -> u64 {
    clock().as_nanos() as u64
}

/// There is a block. Have a thread that merges beside the program, unless MPI's safe points do it. Signals are blocked
/// in it from its beginning.
pub fn begin() {
    if STATE.load(Ordering::Relaxed) != NONE
        || guest::is_by_mpi()
        || merge::is_over()
        || MAIN_ENDED.load(Ordering::Relaxed)
        || RESUMES.load(Ordering::Relaxed) > now()
        || STATE.compare_exchange(NONE, CHANGING, Ordering::Acquire, Ordering::Relaxed).is_err()
    {
        return;
    }
    END.store(0, Ordering::Relaxed);
    let mut thread = MaybeUninit::uninit();
    // SAFETY: `thread` is there to be written, `rounds` stays loaded and asks nothing of its argument.
    let make = || unsafe { libc::pthread_create(thread.as_mut_ptr(), ptr::null(), rounds, ptr::null_mut()) };
    let error = guest::without_signals(make).unwrap_or(libc::EAGAIN);
    if error == 0 {
        // SAFETY: the thread was made, so this was written.
        THREAD.store(unsafe { thread.assume_init() } as usize, Ordering::Relaxed);
        RESUMES.store(0, Ordering::Relaxed);
        STATE.store(RUNS, Ordering::Release);
        return;
    }
    if error == libc::EINVAL {
        merge::say("the kernel makes no thread in a process that has changed its children's PID namespace");
    }
    // The next block tries again, and so does an allocation.
    resume_later();
    STATE.store(NONE, Ordering::Release);
}

/// End the thread once the merge in hand is done, and wait until the kernel no longer counts it. Whether there was one.
pub fn end() -> bool {
    // The thread may wait for what this one has.
    if MERGER.is_own() || BLOCKS.is_own() {
        return false;
    }
    let former = loop {
        let former = STATE.load(Ordering::Relaxed);
        let changes = STATE.compare_exchange(former, CHANGING, Ordering::Acquire, Ordering::Relaxed);
        if former != CHANGING && changes.is_ok() {
            break former;
        }
        std::thread::yield_now();
    };
    if former == RUNS {
        wake_to_end();
        let thread = THREAD.load(Ordering::Relaxed) as libc::pthread_t;
        // SAFETY: the thread was made, is nobody else's to join, and is joined once.
        unsafe { libc::pthread_join(thread, ptr::null_mut()) };
    }
    // The thread that is joined is counted for some microseconds more (exit_mm_release comes before release_task in
    // kernel/exit.c), and so is one that has ended by itself.
    let until = clock() + EXIT_PATIENCE;
    while is_counted(ID.load(Ordering::Relaxed)) && clock() < until {
        std::thread::sleep(Duration::from_micros(20));
    }
    ID.store(0, Ordering::Relaxed);
    STATE.store(NONE, Ordering::Release);
    former == RUNS
}

/// Whether a thread of this process is there for the kernel.
fn is_counted(thread: i32) -> bool {
    let process = std::process::id();
    // SAFETY: signal 0 is not delivered; the call only asks.
    thread != 0 && unsafe { libc::syscall(libc::SYS_tgkill, process, thread, 0) } == 0
}

/// The main thread ends by pthread_exit(3), before its process does, which no thread of ours must hold up.
pub fn main_ends() {
    MAIN_ENDED.store(true, Ordering::Relaxed);
    wake_to_end();
}

fn wake_to_end() {
    END.store(1, Ordering::Relaxed);
    let one: c_int = 1;
    // SAFETY: the futex is a static; waking reads and writes nothing.
    unsafe { libc::syscall(libc::SYS_futex, END.as_ptr(), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, one) };
}

/// The program forks: end the thread if it is the only one beside the caller.
pub fn end_before_fork() {
    if STATE.load(Ordering::Relaxed) != RUNS || !guest::is_plain() {
        return;
    }
    // One of two is ours, also where it has not come to say which.
    let alone = guest::threads().len() == 2;
    if alone && end() {
        RESUMES.store(u64::MAX, Ordering::Relaxed);
    }
}

/// The program has forked, and this is the parent.
pub fn has_forked() {
    if RESUMES.load(Ordering::Relaxed) != 0 {
        resume_later();
    }
}

/// The program has forked, and this is the child, which has no thread of ours.
pub fn is_forked() {
    let had_one = STATE.swap(NONE, Ordering::Relaxed) != NONE;
    ID.store(0, Ordering::Relaxed);
    MAIN_ENDED.store(false, Ordering::Relaxed);
    if had_one && !guest::is_plain() {
        begin();
    } else if had_one || RESUMES.load(Ordering::Relaxed) != 0 {
        resume_later();
    }
}

fn resume_later() {
    PROCESS.store(std::process::id(), Ordering::Relaxed);
    RESUMES.store((clock() + FORK_PAUSE).as_nanos() as u64, Ordering::Relaxed);
}

/// The program allocates: make the thread anew if a fork has ended it some time ago.
pub fn resume() {
    if RESUMES.load(Ordering::Relaxed) != 0 {
        keeping_errno(resume_if_due);
    }
}

#[cold]
fn resume_if_due() {
    // It is there again, or never will be.
    if STATE.load(Ordering::Relaxed) == RUNS || merge::is_over() || MAIN_ENDED.load(Ordering::Relaxed) {
        return RESUMES.store(0, Ordering::Relaxed);
    }
    let ours = MERGER.is_own() || BLOCKS.is_own() || next::is_seeking();
    if !ours && now() >= RESUMES.load(Ordering::Relaxed) && PROCESS.load(Ordering::Relaxed) == std::process::id() {
        begin();
    }
}

extern "C" fn rounds(_: *mut c_void) -> *mut c_void {
    // SAFETY: it only asks.
    ID.store(unsafe { libc::gettid() }, Ordering::Relaxed);
    let due = Duration::from_nanos(NEXT_ROUND.load(Ordering::Relaxed));
    sleep(due.checked_sub(clock()).unwrap_or(if due.is_zero() { FIRST_REST } else { Duration::ZERO }));
    let mut without_blocks = 0;
    while END.load(Ordering::Relaxed) == 0 {
        without_blocks = if has_blocks() { 0 } else { without_blocks + 1 };
        if without_blocks > ROUNDS_WITHOUT_BLOCKS && retires(has_blocks) {
            break;
        }
        let Some(rest) = merge::beside() else {
            retires(|| false);
            break;
        };
        let rest = if without_blocks > 0 { rest.min(REST_WITHOUT_BLOCKS) } else { rest };
        NEXT_ROUND.store((clock() + rest).as_nanos() as u64, Ordering::Relaxed);
        sleep(rest);
    }
    ptr::null_mut()
}

/// Whether there is anything that may be merged.
fn has_blocks() -> bool {
    BLOCKS.lock().is_none_or(|blocks| blocks.has(State::New) || blocks.has(State::Adopted))
}

/// Whether this thread of ours may end by itself: unless it is being ended, or is needed after all.
fn retires(is_needed: impl FnOnce() -> bool) -> bool {
    if !guest::is_plain() || STATE.compare_exchange(RUNS, NONE, Ordering::AcqRel, Ordering::Relaxed).is_err() {
        return false;
    }
    // A block that came before this found a thread. One that comes after it makes another.
    if is_needed() && STATE.compare_exchange(NONE, RUNS, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
        return false;
    }
    NEXT_ROUND.store(0, Ordering::Relaxed);
    let this = next::this_thread() as libc::pthread_t;
    // SAFETY: the thread is nobody's to join: `end` joins in the state that was just left only.
    unsafe { libc::pthread_detach(this) };
    true
}

/// Sleep for a time, or until it is to end.
fn sleep(time: Duration) {
    let time = libc::timespec {
        tv_sec: time.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_nsec: c_long::from(time.subsec_nanos().cast_signed()),
    };
    let unchanged: c_long = 0;
    let wait = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the futex is a static, `time` outlives the call, and the kernel only reads both.
    unsafe { libc::syscall(libc::SYS_futex, END.as_ptr(), wait, unchanged, &raw const time) };
}

/// Make a call that the kernel may refuse beside another thread, without ours if it does.
fn alone(call: impl Fn() -> c_int) -> c_int {
    let answer = call();
    let errno = std::io::Error::last_os_error().raw_os_error();
    let refused = answer == -1 && matches!(errno, Some(libc::EINVAL | libc::EUSERS));
    let had_one = STATE.load(Ordering::Relaxed) != NONE || ID.load(Ordering::Relaxed) != 0;
    if !refused || !had_one {
        return answer;
    }
    let ended = end();
    let answer = call();
    if ended {
        keeping_errno(begin);
    }
    answer
}

/// unshare(2), which may be refused beside another thread.
#[unsafe(no_mangle)]
pub extern "C" fn unshare(flags: c_int) -> c_int {
    match next!(c"unshare", unsafe extern "C" fn(c_int) -> c_int) {
        // SAFETY: any flags may be given.
        Some(next) => alone(|| unsafe { next(flags) }),
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
        Some(next) => alone(|| unsafe { next(file, kind) }),
        None => {
            set_errno(libc::ENOSYS);
            -1
        }
    }
}
