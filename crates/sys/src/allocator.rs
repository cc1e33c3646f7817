//! What the C library's allocator does with memory that is freed.

use std::fs;
use std::io;

/// Blocks of at least so many bytes are mappings of their own.
#[cfg(target_env = "gnu")]
const MAPPED_FROM: libc::c_int = 1 << 20;

/// Have big blocks given back to the kernel the moment they are freed, and threads share two arenas. For who needs much
/// for a moment, now and then, and should be small meanwhile: by itself glibc serves ever bigger blocks, up to 32 MiB,
/// from arenas of which it keeps what is freed, one for each thread (`M_MMAP_THRESHOLD` and `M_ARENA_MAX` of
/// mallopt(3)). Other C libraries are left as they are.
///
/// # Errors
/// `ResourceBusy` where there are other threads already, which mallopt(3) does not allow for; otherwise those of reading
/// how many there are.
pub fn give_back_big_blocks() -> io::Result<()> {
    if fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::ErrorKind::ResourceBusy.into());
    }
    #[cfg(target_env = "gnu")]
    for (parameter, value) in [(libc::M_MMAP_THRESHOLD, MAPPED_FROM), (libc::M_ARENA_MAX, 2)] {
        // SAFETY: this is the only thread, so nobody else reads or sets what mallopt sets, and both parameters only say
        // where later blocks come from. It returns 0 for a value that it does not take, and changes nothing then.
        let _ = unsafe { libc::mallopt(parameter, value) };
    }
    Ok(())
}

/// Have what lies free in the arenas given back to the kernel (malloc_trim(3)): glibc by itself gives back the top of one
/// of them only, so that what much small work took for a moment stays. Takes some milliseconds. Other C libraries are
/// left as they are.
pub fn give_back_free_blocks() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it may be called by any thread at any time (MT-Safe), and gives back pages in which nothing is allocated.
    // Whether there were any is all that it returns.
    let _ = unsafe { libc::malloc_trim(0) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_env = "gnu")]
    #[test]
    fn what_is_freed_below_what_is_kept_is_given_back() {
        let resident = || {
            let statm = fs::read_to_string("/proc/self/statm").unwrap();
            statm.split(' ').nth(1).unwrap().parse::<i64>().unwrap()
        };
        // 64 MiB in blocks of which each sixteenth stays.
        let mut blocks: Vec<Vec<u8>> = (0..1 << 12).map(|_| vec![1; 16 << 10]).collect();
        let full = resident();
        let mut number = 0;
        blocks.retain(|_| {
            number += 1;
            number % 16 == 0
        });
        give_back_free_blocks();
        let kept = resident();
        assert!(blocks.iter().all(|block| block.iter().all(|&byte| byte == 1)));
        assert!(full - kept > 1 << 13, "{full} pages before, {kept} after");
    }

    #[test]
    fn nothing_is_changed_beside_other_threads() {
        std::thread::scope(|scope| {
            let (end, ended) = std::sync::mpsc::channel::<()>();
            scope.spawn(move || ended.recv());
            assert_eq!(give_back_big_blocks().unwrap_err().kind(), io::ErrorKind::ResourceBusy);
            drop(end);
        });
    }
}
