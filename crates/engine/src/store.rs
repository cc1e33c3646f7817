//! The memory for contents that members share: a memfd, divided into slots of one page.
//!
//! A slot that an index entry has named never changes while any process refers to it. It is written once, between being
//! reserved and being published, and freed once no process refers to it any more. If no entry names the slot in the
//! end, the member that reserved it releases it. A file of the domain has one bit per slot that is taken; it changes
//! only under the domain's lock.
//!
//! The memfd has no name. A new member opens it through the descriptor of an existing member (`/proc/PID/fd`). So its
//! memory is freed when the last member has ended or was killed.

use crate::file_limits::check_file_size;
use crate::shared_words::SharedWords;
use pagefold_base::engine::STORE_MEMFD_NAME;
use pagefold_sys::numa;
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, fstat, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, IntoRawFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::ptr;
use std::sync::atomic::Ordering;

/// Device and inode, which identify a store while it exists.
pub type FileIdentity = (u64, u64);

/// The store, as opened by this process.
#[derive(Debug)]
pub struct ContentStore {
    /// Always `Some`, until drop.
    file: Option<File>,
    identity: FileIdentity,
    page_bytes: u64,
}

impl ContentStore {
    /// Create an empty store.
    ///
    /// # Errors
    /// Those of memfd_create(2); `FileTooLarge` if this process may not have a file of that size.
    pub fn new(slot_count: u32, page_bytes: u64) -> io::Result<Self> {
        check_file_size(u64::from(slot_count) * page_bytes)?;
        let file = File::from(
            memfd_create(STORE_MEMFD_NAME, MemfdFlags::CLOEXEC | MemfdFlags::NOEXEC_SEAL)
                // This flag exists since 6.3.
                .or_else(|_| memfd_create(STORE_MEMFD_NAME, MemfdFlags::CLOEXEC))?,
        );
        file.set_len(u64::from(slot_count) * page_bytes)?;
        Self::from_file(file, page_bytes)
    }

    /// Prefer a NUMA node for the memory of its slots, while the node has free memory.
    ///
    /// # Errors
    /// Those of mmap(2) and mbind(2).
    pub fn prefer_node(&self, slot_count: u32, node: u32) -> io::Result<()> {
        let bytes = self.slot_offset(slot_count) as usize;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: without MAP_FIXED the kernel chooses addresses that nothing else uses.
        let start = unsafe { mmap(ptr::null_mut(), bytes, ProtFlags::empty(), flags, self.file(), 0) }?;
        let result = numa::prefer_node(start.expose_provenance(), bytes, node);
        // SAFETY: this function owns the range, and there is no borrow of it.
        unsafe { munmap(start, bytes) }?;
        result
    }

    /// Open the store through the descriptor of another member, if it has the given identity.
    ///
    /// # Errors
    /// Those of open(2): the member may have ended. `NotFound` if it is another file.
    pub fn open_from_member(pid: u32, descriptor: u32, identity: FileIdentity, page_bytes: u64) -> io::Result<Self> {
        let path = PathBuf::from(format!("/proc/{pid}/fd/{descriptor}"));
        // Check before opening: opening a pipe or a device may have side effects.
        let status = rustix::fs::stat(&path)?;
        if (status.st_dev, status.st_ino) != identity {
            return Err(io::ErrorKind::NotFound.into());
        }
        let store = Self::from_file(File::options().read(true).write(true).open(path)?, page_bytes)?;
        if store.identity == identity { Ok(store) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    fn from_file(file: File, page_bytes: u64) -> io::Result<Self> {
        let status = fstat(&file)?;
        // Otherwise this member could not write to all of it.
        check_file_size(status.st_size.cast_unsigned())?;
        Ok(Self { file: Some(file), identity: (status.st_dev, status.st_ino), page_bytes })
    }

    /// Its device and inode.
    pub fn identity(&self) -> FileIdentity {
        self.identity
    }

    /// This process's descriptor of it.
    pub fn descriptor(&self) -> u32 {
        self.file().as_raw_fd().cast_unsigned()
    }

    /// Whether the descriptor still refers to the store: programs close descriptors that they do not know.
    pub fn is_descriptor_valid(&self) -> bool {
        fstat(self.file()).is_ok_and(|status| (status.st_dev, status.st_ino) == self.identity)
    }

    fn check_descriptor(&self) -> io::Result<()> {
        if self.is_descriptor_valid() { Ok(()) } else { Err(rustix::io::Errno::BADF.into()) }
    }

    /// The file.
    pub fn file(&self) -> &File {
        self.file.as_ref().expect("the file is there until drop")
    }

    /// Offset of a slot in the file.
    pub fn slot_offset(&self, slot: u32) -> u64 {
        u64::from(slot) * self.page_bytes
    }

    /// Write consecutive slots from `slot` on. No other member may map them yet.
    ///
    /// # Errors
    /// `ENOSPC` and `ENOMEM` if there is no memory for them, `FileTooLarge`.
    pub fn write_slots(&self, slot: u32, pages: &[u8]) -> io::Result<()> {
        self.check_descriptor()?;
        check_file_size(self.slot_offset(slot) + pages.len() as u64)?;
        self.file().write_all_at(pages, self.slot_offset(slot))
    }

    /// Free the memory of slots.
    ///
    /// # Errors
    /// Those of fallocate(2).
    pub fn punch_slots(&self, slots: Range<u32>) -> io::Result<()> {
        self.check_descriptor()?;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let bytes = u64::from(slots.end - slots.start) * self.page_bytes;
        Ok(fallocate(self.file(), flags, self.slot_offset(slots.start), bytes)?)
    }

    /// Bytes of memory that it uses.
    ///
    /// # Errors
    /// Those of fstat(2).
    pub fn allocated_bytes(&self) -> io::Result<u64> {
        Ok(fstat(self.file())?.st_blocks.cast_unsigned() * 512)
    }
}

impl Drop for ContentStore {
    fn drop(&mut self) {
        // The descriptor may now belong to a file that the program has opened since, and only the program may close
        // that.
        if !self.is_descriptor_valid() {
            let _ = self.file.take().map(IntoRawFd::into_raw_fd);
        }
    }
}

/// Which slots are taken. Changed only under the domain's lock.
#[derive(Debug)]
pub struct SlotBitmap {
    words: SharedWords,
    slot_count: u32,
}

impl SlotBitmap {
    /// Map the bitmap in a file; in a new file all slots are free.
    ///
    /// # Errors
    /// Those of mapping it.
    pub fn map(file: &File, slot_count: u32) -> io::Result<Self> {
        Ok(Self { words: SharedWords::map(file, (slot_count as usize).div_ceil(64))?, slot_count })
    }

    /// Whether a slot is taken.
    pub fn is_taken(&self, slot: u32) -> bool {
        self.words[slot as usize / 64].load(Ordering::Relaxed) >> (slot % 64) & 1 == 1
    }

    /// Find `slot_count` free slots below a bound: in the first gap that fits all of them, or else in as few gaps as
    /// possible. Fewer if there are not enough. The file's words below the bound must have blocks.
    pub fn find_free(&self, slot_count: u32, bound: u32) -> Vec<Range<u32>> {
        let mut gaps: Vec<Range<u32>> = Vec::new();
        let mut slot = 0;
        while slot < bound.min(self.slot_count) {
            let word = self.words[slot as usize / 64].load(Ordering::Relaxed);
            if word == u64::MAX && slot.is_multiple_of(64) {
                slot += 64;
                continue;
            }
            if word >> (slot % 64) & 1 == 0 {
                match gaps.last_mut() {
                    Some(last) if last.end == slot => last.end += 1,
                    _ => gaps.push(slot..slot + 1),
                }
            }
            slot += 1;
        }
        if let Some(index) = gaps.iter().position(|gap| gap.end - gap.start >= slot_count) {
            gaps = vec![gaps.swap_remove(index)];
        }
        // Largest first, to fragment contiguous free slots as little as possible.
        gaps.sort_by_key(|gap| std::cmp::Reverse(gap.end - gap.start));
        let mut remaining = slot_count;
        let mut ranges = Vec::new();
        for gap in gaps {
            if remaining == 0 {
                break;
            }
            let count = remaining.min(gap.end - gap.start);
            ranges.push(gap.start..gap.start + count);
            remaining -= count;
        }
        ranges
    }

    /// Mark slots as taken or free.
    pub fn set_taken(&self, slots: Range<u32>, taken: bool) {
        for slot in slots {
            let word = &self.words[slot as usize / 64];
            if taken {
                word.fetch_or(1 << (slot % 64), Ordering::Relaxed);
            } else {
                word.fetch_and(!(1 << (slot % 64)), Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE_BYTES: u64 = 4096;

    #[test]
    fn slot_keeps_its_content_until_punched() {
        let store = ContentStore::new(1000, PAGE_BYTES).unwrap();
        assert_eq!(store.allocated_bytes().unwrap(), 0);
        store.write_slots(7, &[1; 2 * PAGE_BYTES as usize]).unwrap();
        assert_eq!(store.allocated_bytes().unwrap(), 2 * PAGE_BYTES);
        store.punch_slots(8..9).unwrap();
        assert_eq!(store.allocated_bytes().unwrap(), PAGE_BYTES);
        let reopened =
            ContentStore::open_from_member(std::process::id(), store.descriptor(), store.identity(), PAGE_BYTES)
                .unwrap();
        let mut byte = [0];
        reopened.file().read_exact_at(&mut byte, reopened.slot_offset(7)).unwrap();
        assert_eq!(byte, [1]);
        let foreign = (store.identity().0, store.identity().1 + 1);
        assert!(ContentStore::open_from_member(std::process::id(), store.descriptor(), foreign, PAGE_BYTES).is_err());
    }

    #[test]
    fn free_slots_are_contiguous_where_possible() {
        let slots = SlotBitmap::map(&tempfile::tempfile().unwrap(), 1000).unwrap();
        let check = |count, bound, expected: &[(u32, u32)]| {
            let ranges: Vec<_> =
                slots.find_free(count, bound).into_iter().map(|slots| (slots.start, slots.end)).collect();
            assert_eq!(ranges, expected, "{count} below {bound}");
        };
        check(10, 1000, &[(0, 10)]);
        slots.set_taken(0..10, true);
        slots.set_taken(15..700, true);
        assert!(slots.is_taken(699) && !slots.is_taken(700));
        check(5, 1000, &[(10, 15)]);
        check(6, 1000, &[(700, 706)]);
        check(303, 1000, &[(700, 1000), (10, 13)]);
        check(400, 1000, &[(700, 1000), (10, 15)]);
        check(6, 700, &[(10, 15)]);
        slots.set_taken(0..10, false);
        check(6, 1000, &[(0, 6)]);
    }
}
