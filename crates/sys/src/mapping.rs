//! Owned, isolated memory mappings with a safe interface, for memory with known content in labs, tests and benchmarks.
//!
//! Each [`Mapping`] lies between two inaccessible guard pages. So the kernel never merges its VMA with a neighbor, and
//! `/proc/PID/smaps` shows it as a separate region (`vma_merge` in `mm/vma.c` joins adjacent VMAs with equal flags).
//! Anonymous memory is mapped with `MAP_NORESERVE`: 20 TiB of untouched memory are possible unless
//! `vm.overcommit_memory` is 2.
//!
//! The constants are those of `include/uapi/asm-generic/mman-common.h` and `include/uapi/linux/prctl.h` of Linux 6.18.
//! Limits: a mapping is created and dropped as a whole; it neither grows nor moves.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::ptr;
use std::slice;

use rustix::fs::{Mode, OFlags};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};

/// The size of a base page of this host, in bytes.
#[must_use]
pub fn page_size() -> usize {
    rustix::param::page_size()
}

/// Access rights of memory, in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Access {
    /// No access: an access ends the program.
    None,
    /// Reading.
    Read,
    /// Reading and writing.
    ReadWrite,
}

impl Access {
    fn mmap_protection(self) -> ProtFlags {
        match self {
            Self::None => ProtFlags::empty(),
            Self::Read => ProtFlags::READ,
            Self::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        }
    }

    fn mprotect_protection(self) -> MprotectFlags {
        match self {
            Self::None => MprotectFlags::empty(),
            Self::Read => MprotectFlags::READ,
            Self::ReadWrite => MprotectFlags::READ | MprotectFlags::WRITE,
        }
    }
}

/// Advice to the kernel about a range of memory (`madvise(2)`). The list is closed, because none of these frees, moves
/// or changes memory that is still borrowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MadviseAdvice {
    /// ksmd may merge it. Fails with `EINVAL` on a kernel without KSM; no effect on shared memory.
    Mergeable,
    /// ksmd may not merge it, and the kernel copies merged pages back now.
    Unmergeable,
    /// Back it with transparent huge pages. Fails with `EINVAL` on a kernel without them.
    HugePage,
    /// Back it with base pages only. Fails with `EINVAL` on a kernel without transparent huge pages.
    NoHugePage,
    /// Collapse it into huge pages now (Linux 6.1).
    Collapse,
    /// Drop it. Private anonymous memory reads as zeros afterwards, a private file mapping as its file.
    DontNeed,
    /// Exclude it from forked children.
    DontFork,
    /// Reclaim it now, to swap or to its file.
    PageOut,
}

impl MadviseAdvice {
    fn madvise_number(self) -> libc::c_int {
        match self {
            Self::Mergeable => libc::MADV_MERGEABLE,
            Self::Unmergeable => libc::MADV_UNMERGEABLE,
            Self::HugePage => libc::MADV_HUGEPAGE,
            Self::NoHugePage => libc::MADV_NOHUGEPAGE,
            Self::Collapse => libc::MADV_COLLAPSE,
            Self::DontNeed => libc::MADV_DONTNEED,
            Self::DontFork => libc::MADV_DONTFORK,
            Self::PageOut => libc::MADV_PAGEOUT,
        }
    }
}

/// A memory mapping between two guard pages. Unmapped when dropped.
#[derive(Debug)]
pub struct Mapping {
    /// The complete mapped range: the guards, alignment padding, and the memory itself.
    span: *mut c_void,
    span_bytes: usize,
    start: *mut u8,
    byte_len: usize,
    /// The lowest access right that any page may have.
    min_access: Access,
}

// SAFETY: the memory belongs to the process, not to a thread, and `Mapping` is its only owner.
unsafe impl Send for Mapping {}
// SAFETY: through `&Mapping` memory is only read; each change takes `&mut Mapping`.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Private anonymous memory, untouched: it reads as zeros. `bytes` is rounded up to whole pages.
    ///
    /// # Errors
    /// `InvalidInput` when `bytes` is 0 or not addressable, else the error of `mmap(2)`.
    pub fn anonymous(bytes: usize) -> io::Result<Self> {
        Self::anonymous_aligned(bytes, page_size())
    }

    /// As [`Mapping::anonymous`], starting at a multiple of `alignment` bytes, a power of two (2 MiB for huge pages of
    /// x86-64).
    ///
    /// # Errors
    /// As [`Mapping::anonymous`]; `InvalidInput` also when `alignment` is no power of two.
    pub fn anonymous_aligned(bytes: usize, alignment: usize) -> io::Result<Self> {
        Self::map_between_guards(bytes, alignment, Access::ReadWrite, MapFlags::PRIVATE | MapFlags::NORESERVE, None)
    }

    /// Shared anonymous memory (`MAP_SHARED`), untouched: KSM never merges it.
    ///
    /// # Errors
    /// As [`Mapping::anonymous`].
    pub fn shared(bytes: usize) -> io::Result<Self> {
        Self::map_between_guards(bytes, page_size(), Access::ReadWrite, MapFlags::SHARED, None)
    }

    /// Address space only, inaccessible until [`Mapping::protect`] changes that.
    ///
    /// # Errors
    /// As [`Mapping::anonymous`].
    pub fn reserve(bytes: usize) -> io::Result<Self> {
        Self::map_between_guards(bytes, page_size(), Access::None, MapFlags::PRIVATE | MapFlags::NORESERVE, None)
    }

    /// A private mapping of an unnamed file in `directory` with these `contents`. No other process can open the file,
    /// so the mapped content changes only through this mapping. The rest of the last page is zeros.
    ///
    /// # Errors
    /// As [`Mapping::anonymous`]; the error of `open(2)` if the file system has no `O_TMPFILE`; errors of writing.
    pub fn private_file(directory: &Path, contents: &[u8]) -> io::Result<Self> {
        let file = rustix::fs::open(directory, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, Mode::RUSR)?;
        let file = File::from(file);
        file.write_all_at(contents, 0)?;
        Self::map_between_guards(contents.len(), page_size(), Access::ReadWrite, MapFlags::PRIVATE, Some(&file))
    }

    fn map_between_guards(
        bytes: usize,
        alignment: usize,
        access: Access,
        flags: MapFlags,
        file: Option<&File>,
    ) -> io::Result<Self> {
        let page = page_size();
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        if bytes == 0 || !alignment.is_power_of_two() {
            return Err(invalid());
        }
        let bytes = bytes.checked_next_multiple_of(page).ok_or_else(invalid)?;
        let alignment = alignment.max(page);
        // One guard before, one after, and padding to move the start up to the next multiple of the alignment.
        let span_bytes = bytes.checked_add(alignment).and_then(|sum| sum.checked_add(page)).ok_or_else(invalid)?;
        if isize::try_from(span_bytes).is_err() {
            return Err(invalid());
        }
        let reserved = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: without MAP_FIXED the kernel chooses unused addresses.
        let span = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), span_bytes, ProtFlags::empty(), reserved) }?;
        let offset = (span.addr() + page).next_multiple_of(alignment) - span.addr();
        let start = span.cast::<u8>().wrapping_add(offset);
        // From here on dropping it unmaps the whole span.
        let mapping = Self { span, span_bytes, start, byte_len: bytes, min_access: access };
        let flags = flags | MapFlags::FIXED;
        let protection = access.mmap_protection();
        match file {
            None => {
                // SAFETY: `start` and `bytes` lie within the span above. This mapping owns it and no other code has its
                // address.
                unsafe { rustix::mm::mmap_anonymous(start.cast(), bytes, protection, flags) }?;
            }
            Some(file) => {
                // SAFETY: as above. `Mapping::private_file` created the file without a name and closes it, so no
                // process can change or truncate it under the mapping.
                unsafe { rustix::mm::mmap(start.cast(), bytes, protection, flags, file.as_fd(), 0) }?;
            }
        }
        Ok(mapping)
    }

    /// The first address.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.start.addr() as u64
    }

    /// The size in bytes, a multiple of the page size.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a mapping is never empty")]
    pub fn len(&self) -> usize {
        self.byte_len
    }

    /// The bytes. Reading an untouched page maps the shared zero page.
    ///
    /// # Panics
    /// If a part of it is not readable.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        assert!(self.min_access >= Access::Read, "a part of the mapping is not readable");
        // SAFETY: `start` and `byte_len` are a live mapping until drop. By the assertion all of it is readable; the
        // kernel initialized it. It is at most isize::MAX long (checked in `map_between_guards`), and written only
        // through `&mut self`.
        unsafe { slice::from_raw_parts(self.start, self.byte_len) }
    }

    /// The bytes, to write.
    ///
    /// # Panics
    /// If a part of it is not writable.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        assert!(self.min_access >= Access::ReadWrite, "a part of the mapping is not writable");
        // SAFETY: as in `as_slice`. By the assertion all of it is writable, and `&mut self` makes this the only borrow.
        unsafe { slice::from_raw_parts_mut(self.start, self.byte_len) }
    }

    /// Advise the kernel about a range: offsets in bytes, multiples of the page size.
    ///
    /// # Errors
    /// `InvalidInput` if the range is not made of whole pages of this mapping, else the error of `madvise(2)`.
    pub fn advise(&mut self, range: Range<usize>, advice: MadviseAdvice) -> io::Result<()> {
        let (address, bytes) = self.checked_range(range)?;
        // SAFETY: the range lies in this mapping, which is borrowed mutably, so no slice of it exists. No
        // `MadviseAdvice` makes a readable page unreadable.
        let result = unsafe { libc::madvise(address, bytes, advice.madvise_number()) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Set the access rights of a range: offsets in bytes, multiples of the page size. A range with other rights than
    /// its neighbors becomes a separate VMA. Slices are available again after the whole mapping was given access with
    /// one call.
    ///
    /// # Errors
    /// `InvalidInput` if the range is not made of whole pages of this mapping, else the error of `mprotect(2)`:
    /// `ENOMEM` if the process would have more than `vm.max_map_count` VMAs.
    pub fn protect(&mut self, range: Range<usize>, access: Access) -> io::Result<()> {
        let is_whole = range == (0..self.byte_len);
        let (address, bytes) = self.checked_range(range)?;
        // Lowered before the call, because a failed call may have changed a part.
        self.min_access = self.min_access.min(access);
        // SAFETY: the range lies in this mapping, which is borrowed mutably, so no slice of it exists. `min_access`
        // keeps later slices from covering inaccessible pages.
        unsafe { rustix::mm::mprotect(address, bytes, access.mprotect_protection()) }?;
        if is_whole {
            self.min_access = access;
        }
        Ok(())
    }

    fn checked_range(&self, range: Range<usize>) -> io::Result<(*mut c_void, usize)> {
        let page = page_size();
        let is_page_aligned = range.start.is_multiple_of(page) && range.end.is_multiple_of(page);
        if !is_page_aligned || range.start > range.end || range.end > self.byte_len {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        Ok((self.start.wrapping_add(range.start).cast(), range.len()))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the span is this mapping's own, and no slice of it outlives the mapping.
        let unmapped = unsafe { rustix::mm::munmap(self.span, self.span_bytes) };
        debug_assert!(unmapped.is_ok(), "munmap of the mapping's own span failed: {unmapped:?}");
    }
}

/// Make all memory of this process and of its children mergeable, now and in the future (`prctl(PR_SET_MEMORY_MERGE)`,
/// Linux 6.4), or no longer mergeable.
///
/// # Errors
/// The error of `prctl(2)`: `EINVAL` on a kernel without it, `EPERM` where the kernel requires `CAP_SYS_RESOURCE`,
/// `ENOMEM` without enough memory to copy merged pages.
pub fn set_merge_any(enable: bool) -> io::Result<()> {
    let zero: libc::c_ulong = 0;
    // SAFETY: this option takes only numbers, and changes neither content nor access of memory.
    let result = unsafe { libc::prctl(libc::PR_SET_MEMORY_MERGE, libc::c_ulong::from(enable), zero, zero, zero) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines of `/proc/self/maps` that begin within an address range, as `(start, end, permissions)`.
    fn maps_entries(range: Range<u64>) -> Vec<(u64, u64, String)> {
        std::fs::read_to_string("/proc/self/maps")
            .unwrap()
            .lines()
            .map(|line| {
                let mut words = line.split_ascii_whitespace();
                let (start, end) = words.next().unwrap().split_once('-').unwrap();
                let address = |text| u64::from_str_radix(text, 16).unwrap();
                (address(start), address(end), words.next().unwrap().to_owned())
            })
            .filter(|(start, ..)| range.contains(start))
            .collect()
    }

    fn address_range(mapping: &Mapping) -> Range<u64> {
        mapping.address()..mapping.address() + mapping.len() as u64
    }

    #[test]
    fn anonymous_memory_starts_zeroed_and_keeps_writes() {
        let page = page_size();
        let mut mapping = Mapping::anonymous(3 * page - 1).unwrap();
        assert_eq!(mapping.len(), 3 * page);
        assert!(mapping.as_slice().iter().all(|&byte| byte == 0));
        mapping.as_mut_slice()[page] = 7;
        assert_eq!(mapping.as_slice()[page], 7);
        mapping.advise(page..2 * page, MadviseAdvice::DontNeed).unwrap();
        assert_eq!(mapping.as_slice()[page], 0);
    }

    #[test]
    fn each_mapping_is_one_vma_between_guards() {
        let page = page_size() as u64;
        let mappings = [Mapping::anonymous(8192).unwrap(), Mapping::anonymous(8192).unwrap()];
        for mapping in &mappings {
            let Range { start, end } = address_range(mapping);
            assert_eq!(maps_entries(start..end), [(start, end, "rw-p".to_owned())]);
            // The memory after it is inaccessible; guards of neighbors may have become one region.
            let maps = maps_entries(end..end + page);
            assert_eq!(maps.iter().map(|region| region.2.as_str()).collect::<Vec<_>>(), ["---p"]);
        }
    }

    #[test]
    fn requested_alignment_is_kept() {
        for alignment in [1, 4096, 1 << 21, 1 << 30] {
            let mapping = Mapping::anonymous_aligned(page_size(), alignment).unwrap();
            assert!(mapping.address().is_multiple_of(alignment as u64));
        }
        assert_eq!(Mapping::anonymous_aligned(1, 3).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn impossible_sizes_are_rejected() {
        for bytes in [0, usize::MAX, isize::MAX as usize] {
            assert_eq!(Mapping::anonymous(bytes).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
    }

    #[test]
    fn shared_mapping_is_map_shared() {
        let mut mapping = Mapping::shared(page_size()).unwrap();
        mapping.as_mut_slice().fill(1);
        let range = address_range(&mapping);
        assert_eq!(maps_entries(range.clone()), [(range.start, range.end, "rw-s".to_owned())]);
    }

    #[test]
    fn twenty_tebibytes_can_be_reserved_and_partly_used() {
        let page = page_size();
        let mut mapping = Mapping::reserve(20 << 40).unwrap();
        mapping.protect(10 << 40..(10 << 40) + page, Access::ReadWrite).unwrap();
        let range = address_range(&mapping);
        let permissions: Vec<_> = maps_entries(range).into_iter().map(|region| region.2).collect();
        assert_eq!(permissions, ["rw-p", "---p"]);
    }

    #[test]
    fn file_mapping_is_private() {
        let page = page_size();
        let mut mapping = Mapping::private_file(&std::env::temp_dir(), &vec![b'x'; page + 1]).unwrap();
        assert_eq!(mapping.len(), 2 * page);
        assert_eq!(mapping.as_slice()[page..page + 2], [b'x', 0]);
        mapping.as_mut_slice()[0] = b'y';
        assert_eq!(mapping.as_slice()[..2], *b"yx");
        mapping.advise(0..page, MadviseAdvice::DontNeed).unwrap();
        assert_eq!(mapping.as_slice()[..2], *b"xx");
    }

    #[test]
    fn mprotect_splits_and_rejoins_vmas() {
        let page = page_size();
        let mut mapping = Mapping::anonymous(4 * page).unwrap();
        mapping.as_mut_slice().fill(9);
        mapping.protect(page..2 * page, Access::Read).unwrap();
        assert_eq!(maps_entries(address_range(&mapping)).len(), 3);
        assert_eq!(mapping.as_slice()[page], 9);
        mapping.protect(0..4 * page, Access::ReadWrite).unwrap();
        assert_eq!(maps_entries(address_range(&mapping)).len(), 1);
        mapping.as_mut_slice()[page] = 8;
    }

    #[test]
    #[should_panic(expected = "not writable")]
    fn writing_a_read_only_mapping_panics() {
        let mut mapping = Mapping::anonymous(2 * page_size()).unwrap();
        mapping.protect(0..page_size(), Access::Read).unwrap();
        mapping.as_mut_slice()[0] = 1;
    }

    #[test]
    #[should_panic(expected = "not readable")]
    fn reading_reserved_memory_panics() {
        let _ = Mapping::reserve(page_size()).unwrap().as_slice();
    }

    #[test]
    fn unaligned_or_outside_ranges_are_rejected() {
        let page = page_size();
        let mut mapping = Mapping::anonymous(2 * page).unwrap();
        for range in [0..1, 1..page, 0..3 * page, page..0] {
            assert_eq!(
                mapping.advise(range.clone(), MadviseAdvice::DontNeed).unwrap_err().kind(),
                io::ErrorKind::InvalidInput
            );
            assert_eq!(mapping.protect(range, Access::Read).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
    }

    #[test]
    fn memory_is_unmapped_on_drop() {
        let mapping = Mapping::anonymous(64 * page_size()).unwrap();
        let range = address_range(&mapping);
        drop(mapping);
        // A thread of another test may have mapped something there since, but not exactly this range.
        assert!(!maps_entries(range.clone()).contains(&(range.start, range.end, "rw-p".to_owned())));
    }
}
