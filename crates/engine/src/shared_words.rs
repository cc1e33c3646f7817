//! Words in memory that several processes share: the ground of everything that a domain has in common.
//!
//! A [`SharedWords`] is a shared mapping of a file as atomic words of 64 bits. All access is atomic, so that whatever another
//! member writes, or leaves half written when it dies, is some value and never undefined behaviour; each user of it
//! says what order its accesses need: `index` and `references` have a table of that. The words are the same frames in
//! all members, so that the order which one process's atomic operations have for its threads, they have for all. The
//! file is as long as the mapping before it is mapped and never made shorter, so that no access finds nothing there; a
//! full tmpfs, which would end the program by SIGBUS, is met by allocating blocks first ([`SharedWords::allocate_blocks`]).

use crate::file_limits::check_file_size;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::atomic::AtomicU64;

/// Bytes in a word.
pub const WORD_BYTES: u64 = 8;

/// A shared mapping of a file. Unmapped when dropped.
#[derive(Debug)]
pub struct SharedWords {
    base: NonNull<AtomicU64>,
    word_count: usize,
}

// SAFETY: the memory belongs to the process and not to a thread.
unsafe impl Send for SharedWords {}
// SAFETY: through `&Words` memory is accessed by atomic operations only.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// Map so many words of a file from its beginning. The file is made long enough, and is never to be made shorter.
    ///
    /// # Errors
    /// `InvalidInput` for none or too many words; `FileTooLarge`; those of ftruncate(2) and mmap(2).
    pub fn map(file: &File, count: usize) -> io::Result<Self> {
        let bytes = count.checked_mul(WORD_BYTES as usize).filter(|&bytes| bytes > 0 && isize::try_from(bytes).is_ok());
        let bytes = bytes.ok_or(io::ErrorKind::InvalidInput)?;
        if file.metadata()?.len() < bytes as u64 {
            check_file_size(bytes as u64)?;
            file.set_len(bytes as u64)?;
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: without MAP_FIXED the kernel chooses addresses that nothing else uses.
        let start = unsafe { mmap(ptr::null_mut(), bytes, access, MapFlags::SHARED, file, 0) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { base: start, word_count: count })
    }

    /// So many words that no file has, for tests.
    #[cfg(test)]
    pub fn anonymous(count: usize) -> Self {
        let (bytes, access) = (count * WORD_BYTES as usize, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: without MAP_FIXED the kernel chooses addresses that nothing else uses.
        let start = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), bytes, access, MapFlags::PRIVATE) };
        Self { base: NonNull::new(start.expect("memory").cast()).expect("it is not at 0"), word_count: count }
    }

    /// Keep them mapped until the process ends.
    pub fn leak_mapping(mut self) {
        self.word_count = 0;
    }

    /// Give the blocks under some words to the file, so that touching them cannot fail.
    ///
    /// # Errors
    /// Those of fallocate(2): `ENOSPC` where the file system is full.
    pub fn allocate_blocks(file: &File, words: Range<u64>) -> io::Result<()> {
        let bytes = (words.end - words.start) * WORD_BYTES;
        Ok(fallocate(file, FallocateFlags::KEEP_SIZE, words.start * WORD_BYTES, bytes)?)
    }
}

impl std::ops::Deref for SharedWords {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: so many words are mapped there, aligned to a page, until drop. Others change them, but all do it
        // atomically, and every value of the bytes is one of the type.
        unsafe { slice::from_raw_parts(self.base.as_ptr(), self.word_count) }
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        if self.word_count == 0 {
            return;
        }
        // SAFETY: the mapping is this value's own, and no borrow of it outlives it.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.word_count * WORD_BYTES as usize) };
        debug_assert!(unmapped.is_ok(), "unmapping one's own words: {unmapped:?}");
    }
}
