//! What the C library's allocator does with memory that is freed.

use std::fs;
use std::io;

/// Blocks of at least so many bytes are mappings of their own.
#[cfg(target_env = "gnu")]
const MMAP_THRESHOLD_BYTES: libc::c_int = 1 << 20;

/// Have big blocks given back to the kernel the moment they are freed, and threads share two arenas. For who needs much
/// for a moment, now and then, and should be small meanwhile: by itself glibc serves ever bigger blocks, up to 32 MiB,
/// from arenas of which it keeps what is freed, one for each thread (`M_MMAP_THRESHOLD` and `M_ARENA_MAX` of
/// mallopt(3)). Other C libraries are left as they are.
///
/// # Errors
/// `ResourceBusy` where there are other threads already, which mallopt(3) does not allow for; otherwise those of reading
/// how many there are.
pub fn return_large_blocks_when_freed() -> io::Result<()> {
    if fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::ErrorKind::ResourceBusy.into());
    }
    #[cfg(target_env = "gnu")]
    for (parameter, value) in [(libc::M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES), (libc::M_ARENA_MAX, 2)] {
        // SAFETY: this is the only thread, so nobody else reads or sets what mallopt sets, and both parameters only say
        // where later blocks come from. It returns 0 for a value that it does not take, and changes nothing then.
        let _ = unsafe { libc::mallopt(parameter, value) };
    }
    Ok(())
}

/// Have what lies free in the arenas given back to the kernel (malloc_trim(3)): glibc by itself gives back the top of each
/// of them only, so that what much small work took for a moment stays. Other C libraries are left as they are.
pub fn trim_free_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it may be called by any thread at any time (MT-Safe), and gives back pages in which nothing is allocated.
    // Whether there were any is all that it returns.
    let _ = unsafe { libc::malloc_trim(0) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages among all of a process that are present now (Documentation/admin-guide/mm/pagemap.rst, bit 63).
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
        // Each sixteenth stays; asked for are pages in the middle of what is freed between.
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
        // Other tests may take a few of them.
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
