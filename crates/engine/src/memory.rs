//! Operations on memory. After each of them the program reads the same bytes as before.
//!
//! To exchange pages, the engine maps the replacement at an address of its own and compares it there with the original.
//! Then it moves it over the original with mremap(2), which replaces the old mapping in one step for all threads
//! (mm/mremap.c, 6.18). The page tables move with it, so no page faults twice. If the kernel has unmapped the
//! destination and then fails for lack of memory, the engine copies the replacement there. If there is no memory for
//! the copy either, the process must end.

use crate::store::ContentStore;
use pagefold_base::merge_lifetime::COW_BREAK_CPU_SECONDS;
use pagefold_base::{AddressRange, Bytes};
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap, mmap_anonymous, mremap_fixed, munmap};
use std::ffi::c_void;
use std::io;
use std::ptr;
use std::slice;
use std::time::{Duration, Instant};

fn pointer(address: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address as usize)
}

/// The bytes of a range of this process.
///
/// # Safety
/// All of it is mapped readable, and no thread writes or unmaps any of it while the borrow lives.
pub unsafe fn range_bytes<'a>(range: AddressRange) -> &'a [u8] {
    // SAFETY: the caller's promise. Every byte value is valid.
    unsafe { slice::from_raw_parts(pointer(range.start).cast(), range.bytes().0 as usize) }
}

/// Memory that is to replace other memory. Unmapped when dropped before that.
#[derive(Debug)]
pub struct ReplacementMemory {
    start: *mut c_void,
    bytes: usize,
}

impl ReplacementMemory {
    /// Map slots of the store, from `slot` on, privately, with their page tables filled.
    ///
    /// # Errors
    /// Those of mmap(2) and of MADV_POPULATE_READ, which exists since 5.14: without it the comparison faults pages in.
    pub fn map_store(store: &ContentStore, slot: u32, bytes: u64) -> io::Result<Self> {
        let bytes = bytes as usize;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: without MAP_FIXED the kernel chooses addresses that nothing else uses.
        let start =
            unsafe { mmap(ptr::null_mut(), bytes, access, MapFlags::PRIVATE, store.file(), store.slot_offset(slot)) }?;
        let replacement = Self { start, bytes };
        // SAFETY: this value owns the range; the advice changes no content.
        match unsafe { madvise(start, bytes, Advice::LinuxPopulateRead) } {
            Ok(()) | Err(rustix::io::Errno::INVAL) => Ok(replacement),
            Err(error) => Err(error.into()),
        }
    }

    /// Map ordinary memory with a copy of a range.
    ///
    /// # Safety
    /// As for [`range_bytes`], until this returns.
    ///
    /// # Errors
    /// Those of mmap(2).
    pub unsafe fn copy_range(range: AddressRange) -> io::Result<Self> {
        let bytes = range.bytes().0 as usize;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: without MAP_FIXED the kernel chooses addresses that nothing else uses.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), bytes, access, MapFlags::PRIVATE) }?;
        let replacement = Self { start, bytes };
        // SAFETY: the caller promises that the source is readable; the destination is new and of the same length.
        unsafe { ptr::copy_nonoverlapping(pointer(range.start).cast::<u8>(), start.cast::<u8>(), bytes) };
        Ok(replacement)
    }

    /// Its bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: it is mapped readable until drop. The slots that it maps are not written while they are referenced,
        // and no other code knows this address.
        unsafe { slice::from_raw_parts(self.start.cast(), self.bytes) }
    }

    /// Replace the memory at an address by this.
    ///
    /// # Safety
    /// The memory there is private and has the same content, no thread writes to it until this returns, and no borrow
    /// of it is mutable.
    ///
    /// # Errors
    /// Those of mremap(2), with the content unchanged: `ENOMEM` if there would be too many mappings.
    pub unsafe fn replace_at(self, address: u64) -> io::Result<()> {
        // The kernel unenrolls KSM memory as it moves, which a signal may interrupt too late. So unenroll it first.
        // SAFETY: this value owns the range; the advice changes no content. A kernel without KSM refuses it.
        let _ = unsafe { madvise(self.start, self.bytes, Advice::LinuxUnmergeable) };
        // SAFETY: this value owns the source; the caller permits replacing the destination.
        match unsafe { mremap_fixed(self.start, self.bytes, self.bytes, MremapFlags::MAYMOVE, pointer(address)) } {
            Ok(_) => std::mem::forget(self),
            Err(error) => {
                if !self.copy_to(address)? {
                    return Err(error.into());
                }
            }
        }
        Ok(())
    }

    /// Copy it to an address if no mapping is there any more. Returns whether it was copied.
    fn copy_to(&self, address: u64) -> io::Result<bool> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
        // SAFETY: MAP_FIXED_NOREPLACE replaces no mapping.
        match unsafe { mmap_anonymous(pointer(address), self.bytes, access, flags) } {
            Ok(start) => {
                // SAFETY: both are mapped, of the same length, and the destination is new.
                unsafe { ptr::copy_nonoverlapping(self.start.cast::<u8>(), start.cast::<u8>(), self.bytes) };
                Ok(true)
            }
            Err(rustix::io::Errno::EXIST) => Ok(false),
            Err(_) => {
                // The program's memory is lost and cannot be restored: any further step of the program would be wrong.
                eprintln!("pagefold: cannot restore {} bytes at {address:#x}: no memory; aborting", self.bytes);
                std::process::abort()
            }
        }
    }
}

impl Drop for ReplacementMemory {
    fn drop(&mut self) {
        // SAFETY: this value owns the range, and no borrow of it outlives it.
        let unmapped = unsafe { munmap(self.start, self.bytes) };
        debug_assert!(unmapped.is_ok(), "unmapping unused replacement memory: {unmapped:?}");
    }
}

/// Free the frames of ordinary memory that contains zeros: it reads as zeros afterwards.
///
/// # Safety
/// The range is private anonymous memory, contains zeros, and no thread writes to it until this returns.
///
/// # Errors
/// Those of madvise(2).
pub unsafe fn free_zero_pages(range: AddressRange) -> io::Result<()> {
    // SAFETY: by the caller's promise the content before is zeros, as it is afterwards.
    Ok(unsafe { madvise(pointer(range.start), range.bytes().0 as usize, Advice::LinuxDontNeed) }?)
}

/// Cost on this host of the page faults that merging causes.
#[derive(Clone, Copy, Debug)]
pub struct FaultCosts {
    /// A write to a page of zeros that replaced a page of the program: the fault, a frame, and filling it. At least the
    /// known cost of such faults ([`COW_BREAK_CPU_SECONDS`]).
    pub after_merge_write: Duration,
    /// A read of an address without a page, as after zeros were freed.
    pub after_free_read: Duration,
}

/// Measure fault costs: the median of a few samples.
///
/// # Errors
/// Those of mmap(2).
pub fn measure_fault_costs() -> io::Result<FaultCosts> {
    const SAMPLE_COUNT: usize = 5;
    const PAGES_PER_SAMPLE: usize = 16;
    let page_bytes = rustix::param::page_size();
    let range = map_ordinary((SAMPLE_COUNT * PAGES_PER_SAMPLE * page_bytes) as u64)?;
    // SAFETY: this function owns the range; the advice changes no content. Kernels without huge pages refuse it.
    let _ = unsafe { madvise(pointer(range.start), range.bytes().0 as usize, Advice::LinuxNoHugepage) };
    let page_pointers = (range.start..range.end).step_by(page_bytes).map(|address| pointer(address).cast::<u8>());
    let page_pointers: Vec<*mut u8> = page_pointers.collect();
    let median_fault_time = |touch: fn(*mut u8)| {
        let time_per_page = |pages: &[*mut u8]| {
            let began = Instant::now();
            pages.iter().copied().for_each(touch);
            began.elapsed() / PAGES_PER_SAMPLE as u32
        };
        let mut samples: Vec<Duration> = page_pointers.chunks(PAGES_PER_SAMPLE).map(time_per_page).collect();
        samples.sort_unstable();
        samples[SAMPLE_COUNT / 2]
    };
    let read = median_fault_time(|page| {
        // SAFETY: it is mapped readable, and no other code knows its address.
        let _ = unsafe { page.read_volatile() };
    });
    // SAFETY: it is mapped writable, and no other code knows its address.
    let write = median_fault_time(|page| unsafe { page.write_volatile(1) });
    // SAFETY: this function owns the range, and no borrow of it is left.
    unsafe { unmap_range(range) }?;
    Ok(FaultCosts {
        after_free_read: read,
        after_merge_write: write.max(Duration::from_secs_f64(COW_BREAK_CPU_SECONDS)),
    })
}

/// Bytes of this process's memory that are pinned long-term, as for a device, io_uring's registered buffers, or large
/// perf buffers (`pinned_vm`; Documentation/core-api/pin_user_pages.rst, 6.18).
///
/// # Errors
/// Those of reading `/proc/thread-self/status`; `InvalidData` if it has no `VmPin` line.
pub fn pinned_bytes() -> io::Result<Bytes> {
    let status = std::fs::read_to_string("/proc/thread-self/status")?;
    let value = status.lines().find_map(|line| line.strip_prefix("VmPin:"));
    let kibibytes: Option<u64> = value.and_then(|value| value.trim().strip_suffix(" kB")?.parse().ok());
    kibibytes.map(|count| Bytes(count << 10)).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Map ordinary memory without content, at any address.
///
/// # Errors
/// Those of mmap(2).
pub fn map_ordinary(bytes: u64) -> io::Result<AddressRange> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: without MAP_FIXED the kernel chooses addresses that nothing else uses.
    let start = unsafe { mmap_anonymous(ptr::null_mut(), bytes as usize, access, MapFlags::PRIVATE) }?;
    let start = start.expose_provenance() as u64;
    Ok(AddressRange { start, end: start + bytes })
}

/// Replace a range by ordinary memory without content.
///
/// # Safety
/// Its content is no longer needed, and no borrow of it lives.
///
/// # Errors
/// Those of mmap(2).
pub unsafe fn clear_range(range: AddressRange) -> io::Result<()> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::PRIVATE | MapFlags::FIXED;
    // SAFETY: the caller permits replacing the range.
    unsafe { mmap_anonymous(pointer(range.start), range.bytes().0 as usize, access, flags) }?;
    Ok(())
}

/// Unmap a range.
///
/// # Safety
/// As for [`clear_range`].
///
/// # Errors
/// Those of munmap(2).
pub unsafe fn unmap_range(range: AddressRange) -> io::Result<()> {
    // SAFETY: the caller permits unmapping the range.
    Ok(unsafe { munmap(pointer(range.start), range.bytes().0 as usize) }?)
}

/// The bytes of a range of this process, to write.
///
/// # Safety
/// All of it is mapped writable, and no other code uses any of it while the borrow lives.
pub unsafe fn range_bytes_mut<'a>(range: AddressRange) -> &'a mut [u8] {
    // SAFETY: the caller's promise. Every byte value is valid.
    unsafe { slice::from_raw_parts_mut(pointer(range.start).cast(), range.bytes().0 as usize) }
}

/// Include private file mappings, such as merged memory, in core dumps. If that fails, core dumps lack them.
pub fn include_merged_in_core_dumps() {
    const FILE_BACKED_PRIVATE_BIT: u64 = 1 << 2;
    let path = "/proc/self/coredump_filter";
    let filter = std::fs::read_to_string(path).ok().and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
    if let (Some(filter), Ok(mut file)) = (filter, std::fs::File::options().write(true).open(path)) {
        let _ = io::Write::write_all(&mut file, format!("{:#x}", filter | FILE_BACKED_PRIVATE_BIT).as_bytes());
    }
}
