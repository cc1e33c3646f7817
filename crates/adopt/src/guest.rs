//! What it takes to live in somebody else's process: a beginning and an end, forks, a thread that nobody notices, and
//! a look at what the process has open.

use crate::blocks::BLOCKS;
use crate::merge::{self, MERGER};
use crate::next::{next, this_thread};
use crate::{mpi, settings};
use std::ffi::{c_int, c_long, c_void};
use std::io::Write;
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

/// Before the first merge: what ends soon is not merged.
const FIRST_REST: Duration = Duration::from_millis(300);

/// The main thread.
static MAIN: AtomicUsize = AtomicUsize::new(0);
/// Whether merging is MPI's safe points' alone.
static BY_MPI: AtomicBool = AtomicBool::new(false);
/// Whether this process has, or had, a thread that merges.
static RUNNING: AtomicBool = AtomicBool::new(false);
/// What that thread sleeps on: 1 when it is to end.
static END: AtomicU32 = AtomicU32::new(0);
/// That thread.
static THREAD: AtomicUsize = AtomicUsize::new(0);

/// The loader calls it before the program begins.
#[used]
#[unsafe(link_section = ".init_array")]
static LOADED: extern "C" fn() = loaded;

/// The loader calls it when the program has called exit(3).
#[used]
#[unsafe(link_section = ".fini_array")]
static ENDS: extern "C" fn() = ends;

extern "C" fn ends() {
    merge::ends();
}

extern "C" fn loaded() {
    MAIN.store(this_thread(), Ordering::Relaxed);
    BY_MPI.store(mpi::is_linked(), Ordering::Relaxed);
    let mut key = 0;
    // SAFETY: `key` is there to be written, and `main_ends` stays loaded: a preloaded library is never unloaded.
    let keyed = unsafe { libc::pthread_key_create(&raw mut key, Some(main_ends)) } == 0;
    // SAFETY: the key was made; its value is never followed, it only has to differ from null.
    let told = keyed && unsafe { libc::pthread_setspecific(key, END.as_ptr().cast()) } == 0;
    // SAFETY: all three stay loaded.
    let followed = told && unsafe { libc::pthread_atfork(Some(forks), Some(forked), Some(is_forked)) } == 0;
    if followed {
        settings::read();
    }
}

/// Whether the calling thread is the main one.
pub fn is_main() -> bool {
    this_thread() == MAIN.load(Ordering::Relaxed)
}

/// Whether merging is MPI's safe points' alone.
pub fn is_by_mpi() -> bool {
    BY_MPI.load(Ordering::Relaxed)
}

/// A fork waits for the merge in hand, so that the child finds everything whole.
extern "C" fn forks() {
    if !MERGER.is_own() {
        MERGER.hold();
    }
    if !BLOCKS.is_own() {
        BLOCKS.hold();
    }
}

extern "C" fn forked() {
    BLOCKS.release();
    MERGER.release();
}

extern "C" fn is_forked() {
    forked();
    MAIN.store(this_thread(), Ordering::Relaxed);
    if let Some(mut merger) = MERGER.lock() {
        merger.begin_anew();
    }
    // The thread was not forked.
    if RUNNING.swap(false, Ordering::Relaxed) {
        begin();
    }
}

/// The main thread ends by pthread_exit(3), before its process does, which other threads must not hold up.
extern "C" fn main_ends(_: *mut c_void) {
    wake_to_end();
}

fn wake_to_end() {
    END.store(1, Ordering::Relaxed);
    let one: c_int = 1;
    // SAFETY: the futex is a static; waking reads and writes nothing.
    unsafe { libc::syscall(libc::SYS_futex, END.as_ptr(), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, one) };
}

/// MPI begins: its safe points take the thread's place.
pub fn leave_to_mpi() {
    BY_MPI.store(true, Ordering::Relaxed);
    if RUNNING.swap(false, Ordering::Relaxed) {
        wake_to_end();
        // SAFETY: the thread was made, is nobody else's to join, and is joined once.
        unsafe { libc::pthread_join(THREAD.load(Ordering::Relaxed) as libc::pthread_t, ptr::null_mut()) };
    }
}

/// There is a block. Have a thread that merges beside the program, unless MPI's safe points do it. Signals are
/// blocked in it from its beginning.
pub fn begin() {
    if is_by_mpi() || RUNNING.swap(true, Ordering::Relaxed) {
        return;
    }
    END.store(0, Ordering::Relaxed);
    let mut thread = MaybeUninit::uninit();
    // SAFETY: `thread` is there to be written, `rounds` stays loaded and asks nothing of its argument.
    let make = || unsafe { libc::pthread_create(thread.as_mut_ptr(), ptr::null(), rounds, ptr::null_mut()) } == 0;
    let made = without_signals(make) == Some(true);
    if made {
        // SAFETY: the thread was made, so this was written.
        THREAD.store(unsafe { thread.assume_init() } as usize, Ordering::Relaxed);
    }
    // Where there can be no thread now, the next block tries again.
    RUNNING.store(made, Ordering::Relaxed);
}

/// Do something while this thread takes no signal, but for those that its own instructions raise. `None` if signals
/// cannot be blocked.
pub fn without_signals<T>(work: impl FnOnce() -> T) -> Option<T> {
    let mut all = MaybeUninit::uninit();
    let mut before = MaybeUninit::uninit();
    // SAFETY: `all` is there to be written.
    unsafe { libc::sigfillset(all.as_mut_ptr()) };
    for signal in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP] {
        // SAFETY: `all` was filled.
        unsafe { libc::sigdelset(all.as_mut_ptr(), signal) };
    }
    // SAFETY: `all` was filled; `before` is there to be written.
    if unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) } != 0 {
        return None;
    }
    let done = work();
    // SAFETY: `before` was written above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut()) };
    Some(done)
}

extern "C" fn rounds(_: *mut c_void) -> *mut c_void {
    sleep(FIRST_REST);
    while END.load(Ordering::Relaxed) == 0
        && let Some(rest) = merge::beside()
    {
        sleep(rest);
    }
    ptr::null_mut()
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

/// Say something on standard error, in one write. Where that is closed nobody wanted to know.
pub fn tell(what: &str) {
    let line = format!("pagefold: {}: {what}\n", std::process::id());
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Majors of devices that touch no memory of their own accord: memory (null, zero, random), terminals
/// (Documentation/admin-guide/devices.txt).
const HARMLESS: [u32; 11] = [1, 4, 5, 136, 137, 138, 139, 140, 141, 142, 143];

/// What the process has open that may write to its memory behind the kernel's page tables: devices, direct I/O and
/// io_uring, or that watches its page faults.
pub fn reason_against() -> Option<String> {
    let entries = std::fs::read_dir("/proc/self/fd").ok()?;
    entries.flatten().find_map(|entry| {
        let descriptor: RawFd = entry.file_name().to_str()?.parse().ok()?;
        let mut status = MaybeUninit::<libc::stat>::uninit();
        // SAFETY: `status` is there to be written; a descriptor that is none is refused.
        if unsafe { libc::fstat(descriptor, status.as_mut_ptr()) } != 0 {
            return None;
        }
        // SAFETY: the call succeeded, so it was written.
        let status = unsafe { status.assume_init() };
        let name =
            || std::fs::read_link(entry.path()).map_or_else(|_| "a file".to_owned(), |p| p.display().to_string());
        match status.st_mode & libc::S_IFMT {
            libc::S_IFCHR if !HARMLESS.contains(&libc::major(status.st_rdev)) => {
                Some(format!("{} is open, and a device may write to memory that it has pinned", name()))
            }
            libc::S_IFREG | libc::S_IFBLK => {
                // SAFETY: F_GETFL takes and changes nothing.
                let flags = unsafe { libc::fcntl(descriptor, libc::F_GETFL) };
                let direct = flags != -1 && flags & libc::O_DIRECT != 0;
                direct.then(|| format!("{} is open for direct I/O, which writes to memory that it has pinned", name()))
            }
            // Anonymous inodes have no type.
            0 => {
                let name = name();
                let writes = ["io_uring", "userfaultfd", "kvm", "vfio"].iter().any(|kind| name.contains(kind));
                writes.then(|| format!("{name} is open, and may write to memory behind the program's back"))
            }
            _ => None,
        }
    })
}

/// pthread_mutexattr_setprotocol(3). Mutexes with priority inheritance are written by the kernel.
///
/// # Safety
/// As its manual says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_mutexattr_setprotocol(attributes: *mut c_void, protocol: c_int) -> c_int {
    if protocol == libc::PTHREAD_PRIO_INHERIT {
        merge::is_unwaiting();
    }
    match next!(c"pthread_mutexattr_setprotocol", unsafe extern "C" fn(*mut c_void, c_int) -> c_int) {
        // SAFETY: the caller's promise.
        Some(next) => unsafe { next(attributes, protocol) },
        None => libc::ENOTSUP,
    }
}

/// pthread_mutexattr_setrobust(3). Robust mutexes are written by the kernel when their owner dies.
///
/// # Safety
/// As its manual says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_mutexattr_setrobust(attributes: *mut c_void, robust: c_int) -> c_int {
    if robust == libc::PTHREAD_MUTEX_ROBUST {
        merge::is_unwaiting();
    }
    match next!(c"pthread_mutexattr_setrobust", unsafe extern "C" fn(*mut c_void, c_int) -> c_int) {
        // SAFETY: the caller's promise.
        Some(next) => unsafe { next(attributes, robust) },
        None => libc::EINVAL,
    }
}
