//! Words in memory that several processes share: the basis of all shared state of a domain.
//!
//! A [`SharedWords`] is a shared mapping of a file as atomic words of 64 bits. All access is atomic. So whatever
//! another member writes, or leaves incomplete when it dies, is some value and never undefined behavior. Each user of
//! this type documents the order that its accesses need: see `content_index` and `slot_references`. The words are the
//! same frames in all members, so atomic operations have the same order for all processes as for the threads of one.
//! The file gets its full length before it is mapped and is never made shorter, so that no access hits a missing page.
//! A full tmpfs would kill the program by SIGBUS; allocating blocks first prevents that
//! ([`SharedWords::allocate_blocks`]).

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
// SAFETY: through `&SharedWords` the memory is accessed only by atomic operations.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// Map the first `count` words of a file. Extends the file if necessary; it must never be made shorter.
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

    /// Words without a file, for tests.
    #[cfg(test)]
    pub fn anonymous(count: usize) -> Self {
        let (bytes, access) = (count * WORD_BYTES as usize, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: without MAP_FIXED the kernel chooses addresses that nothing else uses.
        let start = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), bytes, access, MapFlags::PRIVATE) };
        Self { base: NonNull::new(start.expect("memory").cast()).expect("nonzero address"), word_count: count }
    }

    /// Keep the words mapped until the process ends.
    pub fn leak_mapping(mut self) {
        self.word_count = 0;
    }

    /// Allocate the blocks under some words of the file, so that access to them cannot fail.
    ///
    /// # Errors
    /// Those of fallocate(2): `ENOSPC` if the file system is full.
    pub fn allocate_blocks(file: &File, words: Range<u64>) -> io::Result<()> {
        let bytes = (words.end - words.start) * WORD_BYTES;
        Ok(fallocate(file, FallocateFlags::KEEP_SIZE, words.start * WORD_BYTES, bytes)?)
    }
}

impl std::ops::Deref for SharedWords {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: `word_count` words are mapped there, page-aligned, until drop. Other processes change them, but only
        // atomically, and every value of the bytes is valid for the type.
        unsafe { slice::from_raw_parts(self.base.as_ptr(), self.word_count) }
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        if self.word_count == 0 {
            return;
        }
        // SAFETY: this value owns the mapping, and no borrow of it outlives it.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.word_count * WORD_BYTES as usize) };
        debug_assert!(unmapped.is_ok(), "unmapping shared words: {unmapped:?}");
    }
}
