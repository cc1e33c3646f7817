//! How the C library's allocator returns freed memory to the kernel.

use std::fs;
use std::io;

/// The allocator maps blocks of at least this size separately.
#[cfg(target_env = "gnu")]
const MMAP_THRESHOLD_BYTES: libc::c_int = 1 << 20;

/// Return large blocks to the kernel as soon as they are freed, and let all threads share two arenas. This suits a
/// process that needs much memory for short moments and must be small between them.
///
/// By default glibc serves ever larger blocks, up to 32 MiB, from arenas. It has one arena for each thread and keeps
/// freed memory there (`M_MMAP_THRESHOLD` and `M_ARENA_MAX` of mallopt(3)). Other C libraries are not changed.
///
/// # Errors
/// `ResourceBusy` if the process has other threads, which mallopt(3) does not allow. Otherwise the errors of counting
/// the threads.
pub fn return_large_blocks_when_freed() -> io::Result<()> {
    if fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::ErrorKind::ResourceBusy.into());
    }
    #[cfg(target_env = "gnu")]
    for (parameter, value) in [(libc::M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES), (libc::M_ARENA_MAX, 2)] {
        // SAFETY: this is the only thread, so no other code reads or sets what mallopt sets. Both parameters only
        // choose where later blocks come from. mallopt returns 0 for a value that it rejects, and changes nothing then.
        let _ = unsafe { libc::mallopt(parameter, value) };
    }
    Ok(())
}

/// Return free memory inside the arenas to the kernel (malloc_trim(3)). By itself glibc returns only the top of each
/// arena, so memory of many small temporary allocations would stay. Other C libraries are not changed.
pub fn trim_free_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: any thread may call it at any time (MT-Safe). It returns only pages in which nothing is allocated. The
    // result only says whether there were any.
    let _ = unsafe { libc::malloc_trim(0) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of these pages of this process are present (Documentation/admin-guide/mm/pagemap.rst, bit 63).
    #[cfg(target_env = "gnu")]
    fn count_present_pages(addresses: &[usize]) -> usize {
        use std::os::unix::fs::FileExt;
        let pagemap = fs::File::open("/proc/self/pagemap").unwrap();
        let is_present = |address: &&usize| {
            let mut entry = [0; 8];
            let offset = **address / crate::mapping::page_size() * 8;
            pagemap.read_exact_at(&mut entry, offset as u64).unwrap();
            u64::from_ne_bytes(entry) >> 63 == 1
        };
        addresses.iter().filter(is_present).count()
    }

    #[cfg(target_env = "gnu")]
    #[test]
    fn trim_returns_pages_below_live_blocks() {
        let page = crate::mapping::page_size();
        let mut blocks: Vec<Vec<u8>> = (0..2048).map(|_| vec![1; page]).collect();
        // Each sixteenth block stays. The test checks pages in the middle of the freed blocks between them.
        let middles: Vec<usize> = blocks.iter().skip(8).step_by(16).map(|block| block.as_ptr().addr()).collect();
        let mut number = 0;
        blocks.retain(|_| {
            number += 1;
            number % 16 == 1
        });
        let before = count_present_pages(&middles);
        trim_free_memory();
        let after = count_present_pages(&middles);
        assert!(blocks.iter().flatten().all(|&byte| byte == 1));
        // Other tests may use a few of these pages.
        assert!(before > 100 && after < 28, "of {} pages {before} before and {after} after", middles.len());
    }

    #[test]
    fn allocator_is_unchanged_in_multithreaded_process() {
        std::thread::scope(|scope| {
            let (end, ended) = std::sync::mpsc::channel::<()>();
            scope.spawn(move || ended.recv());
            assert_eq!(return_large_blocks_when_freed().unwrap_err().kind(), io::ErrorKind::ResourceBusy);
            drop(end);
        });
    }
}
