//! Hooks of this library in the program's process: start and exit, forks, and a check of the open files.

use crate::blocks::BLOCKS;
use crate::merger::{self, ENGINE_FOR_FREEING, MERGER};
use crate::next::{next, this_thread};
use crate::{mappings, merge_thread, mpi, settings};
use pagefold_base::Bytes;
use rustix::fs::{CWD, Dir, Mode, OFlags, readlinkat};
use std::ffi::{CStr, c_int, c_void};
use std::io::Write;
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The main thread.
static MAIN_THREAD: AtomicUsize = AtomicUsize::new(0);
/// Whether only MPI's safe points merge.
static IS_MERGED_AT_SAFE_POINTS: AtomicBool = AtomicBool::new(false);
/// Whether the program uses the C library's allocator.
static USES_LIBC_ALLOCATOR: AtomicBool = AtomicBool::new(false);

/// The loader calls it before the program starts.
#[used]
#[unsafe(link_section = ".init_array")]
static INIT_ARRAY_ENTRY: extern "C" fn() = on_load;

/// The loader calls it when the program has called exit(3).
#[used]
#[unsafe(link_section = ".fini_array")]
static FINI_ARRAY_ENTRY: extern "C" fn() = on_exit;

extern "C" fn on_exit() {
    merger::on_exit();
}

extern "C" fn on_load() {
    MAIN_THREAD.store(this_thread(), Ordering::Relaxed);
    IS_MERGED_AT_SAFE_POINTS.store(mpi::is_linked(), Ordering::Relaxed);
    let mut key = 0;
    // SAFETY: `key` is valid for writes, and `on_main_thread_exit` stays loaded: a preloaded library is never unloaded.
    let is_key_created = unsafe { libc::pthread_key_create(&raw mut key, Some(on_main_thread_exit)) } == 0;
    // SAFETY: the key was created; its value is never dereferenced, it only has to differ from null.
    let is_set = is_key_created && unsafe { libc::pthread_setspecific(key, MAIN_THREAD.as_ptr().cast()) } == 0;
    // SAFETY: all three stay loaded.
    let has_fork_handlers = is_set
        && unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork_in_parent), Some(after_fork_in_child)) }
            == 0;
    if has_fork_handlers {
        // Look up functions that are called with a lock held in advance: the loader has locks of its own.
        mappings::resolve_functions();
        USES_LIBC_ALLOCATOR.store(crate::next::has_libc_malloc_next(), Ordering::Relaxed);
        settings::load();
        if settings::settings().is_some() {
            give_up_if_tool_intercepts_mpi();
            if !uses_libc_allocator() {
                merge_thread::start();
            }
        }
    }
}

/// Merge nothing if a tool intercepts MPI's functions before this library: then this library sees neither safe points
/// nor buffers to which MPI may write.
fn give_up_if_tool_intercepts_mpi() {
    if let Some(tool_function) = is_merged_at_safe_points().then(mpi::function_of_tool).flatten() {
        merger::stop_merging(&format!(
            "{tool_function} is called in place of this library's, so that MPI calls are not seen: name the tool after \
             libpagefold_adopt.so in LD_PRELOAD, or run without it"
        ));
    }
}

/// Whether the calling thread is the main thread.
pub fn is_main_thread() -> bool {
    this_thread() == MAIN_THREAD.load(Ordering::Relaxed)
}

/// Whether the program uses the C library's allocator. Another allocator may request memory while it holds a lock that
/// creating a thread would wait for. In such programs the thread is created at the start.
pub fn uses_libc_allocator() -> bool {
    USES_LIBC_ALLOCATOR.load(Ordering::Relaxed)
}

/// Whether only MPI's safe points merge.
pub fn is_merged_at_safe_points() -> bool {
    IS_MERGED_AT_SAFE_POINTS.load(Ordering::Relaxed)
}

/// Which locks the current fork has taken; only the holder of a lock changes its flag.
static FORK_HOLDS_MERGER: AtomicBool = AtomicBool::new(false);
static FORK_HOLDS_FREEING: AtomicBool = AtomicBool::new(false);
static FORK_HOLDS_BLOCKS: AtomicBool = AtomicBool::new(false);

/// A fork waits for a running merge, so that the child finds consistent data. A thread that forks from within this
/// library holds the locks already, and keeps them.
extern "C" fn before_fork() {
    merge_thread::stop_before_fork();
    let (takes_merger, takes_freeing, takes_blocks) = (
        !MERGER.is_held_by_this_thread(),
        !ENGINE_FOR_FREEING.is_held_by_this_thread(),
        !BLOCKS.is_held_by_this_thread(),
    );
    if takes_merger {
        MERGER.hold_until_release();
    }
    FORK_HOLDS_MERGER.store(takes_merger, Ordering::Relaxed);
    if takes_freeing {
        ENGINE_FOR_FREEING.hold_until_release();
    }
    FORK_HOLDS_FREEING.store(takes_freeing, Ordering::Relaxed);
    if takes_blocks {
        BLOCKS.hold_until_release();
    }
    FORK_HOLDS_BLOCKS.store(takes_blocks, Ordering::Relaxed);
}

extern "C" fn after_fork_in_parent() {
    release_fork_locks();
    merge_thread::after_fork_in_parent();
}

fn release_fork_locks() {
    if FORK_HOLDS_BLOCKS.load(Ordering::Relaxed) {
        BLOCKS.release();
    }
    if FORK_HOLDS_FREEING.load(Ordering::Relaxed) {
        ENGINE_FOR_FREEING.release();
    }
    if FORK_HOLDS_MERGER.load(Ordering::Relaxed) {
        MERGER.release();
    }
}

extern "C" fn after_fork_in_child() {
    release_fork_locks();
    MAIN_THREAD.store(this_thread(), Ordering::Relaxed);
    if let Some(mut merger) = MERGER.lock() {
        merger.reset_after_fork();
    }
    merge_thread::after_fork_in_child();
}

/// The main thread ends by pthread_exit(3).
extern "C" fn on_main_thread_exit(_: *mut c_void) {
    merge_thread::stop_when_main_thread_exits();
}

/// MPI starts: merge at its safe points instead of in the thread.
pub fn merge_at_safe_points_only() {
    IS_MERGED_AT_SAFE_POINTS.store(true, Ordering::Relaxed);
    merge_thread::stop();
}

/// Run `work` while this thread receives no signals, except those that its own instructions raise. `None` if signals
/// cannot be blocked.
pub fn without_signals<T>(work: impl FnOnce() -> T) -> Option<T> {
    let mut blocked = MaybeUninit::uninit();
    let mut previous_mask = MaybeUninit::uninit();
    // SAFETY: `blocked` is valid for writes.
    unsafe { libc::sigfillset(blocked.as_mut_ptr()) };
    for signal in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP] {
        // SAFETY: `blocked` was filled.
        unsafe { libc::sigdelset(blocked.as_mut_ptr(), signal) };
    }
    // SAFETY: `blocked` was filled; `previous_mask` is valid for writes.
    if unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, blocked.as_ptr(), previous_mask.as_mut_ptr()) } != 0 {
        return None;
    }
    let result = work();
    // SAFETY: `previous_mask` was written above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, previous_mask.as_ptr(), ptr::null_mut()) };
    Some(result)
}

/// Print a message on standard error, in one write. If standard error is closed, the message is lost.
pub fn write_to_stderr(message: &str) {
    let line = format!("pagefold: {}: {message}\n", std::process::id());
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Major numbers of devices that do not write to memory by themselves: memory (null, zero, random), terminals
/// (Documentation/admin-guide/devices.txt).
const MEMORY_SAFE_DEVICE_MAJORS: [u32; 11] = [1, 4, 5, 136, 137, 138, 139, 140, 141, 142, 143];

/// The numeric names in a directory, as in `/proc`. Without opendir(3), which allocates by the program's malloc(3):
/// that may wait for a lock that the caller holds.
fn numeric_entries(path: &CStr) -> rustix::io::Result<Vec<u32>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut numbers = Vec::new();
    for entry in Dir::new(rustix::fs::open(path, flags, Mode::empty())?)? {
        numbers.extend(entry?.file_name().to_str().ok().and_then(|name| name.parse::<u32>().ok()));
    }
    Ok(numbers)
}

/// The threads of this process; empty if they cannot be read.
pub fn thread_ids() -> Vec<u32> {
    numeric_entries(c"/proc/self/task").unwrap_or_default()
}

/// The domain of a socket, as socket(2) takes it.
fn socket_domain(socket: RawFd) -> Option<c_int> {
    let mut domain: c_int = 0;
    let mut bytes = size_of::<c_int>() as libc::socklen_t;
    let output = (&raw mut domain).cast();
    // SAFETY: both are valid for writes, and `bytes` is the length of the first.
    let result = unsafe { libc::getsockopt(socket, libc::SOL_SOCKET, libc::SO_DOMAIN, output, &raw mut bytes) };
    (result == 0).then_some(domain)
}

/// Reports an open file through which memory may be written without the kernel's page tables: devices, direct I/O and
/// io_uring. Also one that watches page faults. `None` if there is none.
pub fn find_external_writer() -> Option<String> {
    match pagefold_engine::pinned_bytes() {
        Ok(Bytes::ZERO) => {}
        Ok(_) => return Some("some of its memory is pinned, as for a device that may write to it".to_owned()),
        Err(error) => {
            return Some(format!("whether its memory is pinned cannot be read from /proc/self/status: {error}"));
        }
    }
    let Ok(descriptors) = numeric_entries(c"/proc/thread-self/fd") else {
        return Some("its open files cannot be read from /proc/thread-self/fd".to_owned());
    };
    descriptors.into_iter().find_map(|descriptor| {
        let descriptor = RawFd::try_from(descriptor).ok()?;
        let mut status = MaybeUninit::<libc::stat>::uninit();
        // SAFETY: `status` is valid for writes; the call refuses an invalid descriptor.
        if unsafe { libc::fstat(descriptor, status.as_mut_ptr()) } != 0 {
            return None;
        }
        // SAFETY: the call succeeded, so it was written.
        let status = unsafe { status.assume_init() };
        let name = || {
            let link = readlinkat(CWD, format!("/proc/thread-self/fd/{descriptor}"), Vec::new());
            link.map_or_else(|_| "a file".to_owned(), |path| path.to_string_lossy().into_owned())
        };
        match status.st_mode & libc::S_IFMT {
            libc::S_IFCHR if !MEMORY_SAFE_DEVICE_MAJORS.contains(&libc::major(status.st_rdev)) => {
                Some(format!("{} is open, and a device may write to memory that it has pinned", name()))
            }
            libc::S_IFREG | libc::S_IFBLK => {
                // SAFETY: F_GETFL takes no argument and changes nothing.
                let flags = unsafe { libc::fcntl(descriptor, libc::F_GETFL) };
                let is_direct = flags != -1 && flags & libc::O_DIRECT != 0;
                is_direct
                    .then(|| format!("{} is open for direct I/O, which writes to memory that it has pinned", name()))
            }
            libc::S_IFSOCK if socket_domain(descriptor) == Some(libc::AF_XDP) => {
                Some("an AF_XDP socket is open, and the network writes to memory that it has pinned".to_owned())
            }
            // Anonymous inodes have no type.
            0 => {
                let name = name();
                let may_write = ["io_uring", "userfaultfd", "kvm", "vfio"].iter().any(|kind| name.contains(kind));
                may_write.then(|| format!("{name} is open, and may write to memory without the program's page tables"))
            }
            _ => None,
        }
    })
}

/// pthread_mutexattr_setprotocol(3). The kernel writes to mutexes with priority inheritance.
///
/// # Safety
/// The same as in its manual page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_mutexattr_setprotocol(attributes: *mut c_void, protocol: c_int) -> c_int {
    if protocol == libc::PTHREAD_PRIO_INHERIT {
        merger::note_unblockable_writers();
    }
    match next!(c"pthread_mutexattr_setprotocol", unsafe extern "C" fn(*mut c_void, c_int) -> c_int) {
        // SAFETY: the caller's promise.
        Some(next) => unsafe { next(attributes, protocol) },
        None => libc::ENOTSUP,
    }
}

/// pthread_mutexattr_setrobust(3). The kernel writes to a robust mutex when its owner dies.
///
/// # Safety
/// The same as in its manual page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_mutexattr_setrobust(attributes: *mut c_void, robust: c_int) -> c_int {
    if robust == libc::PTHREAD_MUTEX_ROBUST {
        merger::note_unblockable_writers();
    }
    match next!(c"pthread_mutexattr_setrobust", unsafe extern "C" fn(*mut c_void, c_int) -> c_int) {
        // SAFETY: the caller's promise.
        Some(next) => unsafe { next(attributes, robust) },
        None => libc::EINVAL,
    }
}
