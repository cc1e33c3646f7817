//! The few things that are done to memory, each of them so that the program sees the same bytes before and after.
//!
//! Pages are exchanged by mapping what is to come at an address of our own, comparing it there with what is in the
//! place, and moving it over with mremap(2), which replaces the old mapping in one step for all who look (mm/mremap.c,
//! 6.18). The page tables move with it, so that nothing is faulted in twice. Where the kernel has unmapped the place
//! and then fails for want of memory, what was to come is copied there; if there is no memory for that either the
//! process must end.

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
/// All of it is mapped readable, and nobody writes or unmaps any of it while the borrow lives.
pub unsafe fn range_bytes<'a>(range: AddressRange) -> &'a [u8] {
    // SAFETY: the caller's promise. Every value of a byte is a valid one.
    unsafe { slice::from_raw_parts(pointer(range.start).cast(), range.bytes().0 as usize) }
}

/// Memory that is on its way to another place. Unmapped when dropped on the way.
#[derive(Debug)]
pub struct ReplacementMemory {
    start: *mut c_void,
    bytes: usize,
}

impl ReplacementMemory {
    /// Slots of the store from one on, privately, with their page tables filled.
    ///
    /// # Errors
    /// Those of mmap(2) and of MADV_POPULATE_READ, which is 5.14's: without it pages are faulted in as they are
    /// compared.
    pub fn map_store(store: &ContentStore, slot: u32, bytes: u64) -> io::Result<Self> {
        let bytes = bytes as usize;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: without MAP_FIXED the kernel chooses addresses that nothing else uses.
        let start =
            unsafe { mmap(ptr::null_mut(), bytes, access, MapFlags::PRIVATE, store.file(), store.slot_offset(slot)) }?;
        let incoming = Self { start, bytes };
        // SAFETY: the range is this value's own; the advice changes no content.
        match unsafe { madvise(start, bytes, Advice::LinuxPopulateRead) } {
            Ok(()) | Err(rustix::io::Errno::INVAL) => Ok(incoming),
            Err(error) => Err(error.into()),
        }
    }

    /// Ordinary memory with the content of a range.
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
        let incoming = Self { start, bytes };
        // SAFETY: the source is readable by the caller's promise, the destination new and of the same length.
        unsafe { ptr::copy_nonoverlapping(pointer(range.start).cast::<u8>(), start.cast::<u8>(), bytes) };
        Ok(incoming)
    }

    /// Its bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: it is mapped readable until drop; what it maps of the store is not written while it is referred to,
        // and nobody else knows this address.
        unsafe { slice::from_raw_parts(self.start.cast(), self.bytes) }
    }

    /// Put it in the place of what is at an address.
    ///
    /// # Safety
    /// There lies private memory with the same content, nobody writes to it until this returns, and no borrow of it is
    /// mutable.
    ///
    /// # Errors
    /// Those of mremap(2), with the content as it was: `ENOMEM` where there would be too many mappings.
    pub unsafe fn replace_at(self, address: u64) -> io::Result<()> {
        // Memory that is enrolled in KSM is withdrawn as it moves, which a signal may interrupt when it is too late.
        // SAFETY: the range is this value's own; the advice changes no content. Where there is no KSM it is refused.
        let _ = unsafe { madvise(self.start, self.bytes, Advice::LinuxUnmergeable) };
        // SAFETY: the source is this value's own; the caller lets the destination be replaced.
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

    /// Copy it to an address, if nothing is mapped there any more; whether that was so.
    fn copy_to(&self, address: u64) -> io::Result<bool> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
        // SAFETY: nothing is replaced.
        match unsafe { mmap_anonymous(pointer(address), self.bytes, access, flags) } {
            Ok(start) => {
                // SAFETY: both are mapped, of the same length, and the destination is new.
                unsafe { ptr::copy_nonoverlapping(self.start.cast::<u8>(), start.cast::<u8>(), self.bytes) };
                Ok(true)
            }
            Err(rustix::io::Errno::EXIST) => Ok(false),
            Err(_) => {
                // The program's memory is not there, and cannot be brought back: whatever it did next would be wrong.
                eprintln!("pagefold: no memory to put {} bytes back at {address:#x}", self.bytes);
                std::process::abort()
            }
        }
    }
}

impl Drop for ReplacementMemory {
    fn drop(&mut self) {
        // SAFETY: the range is this value's own, and no borrow of it outlives it.
        let unmapped = unsafe { munmap(self.start, self.bytes) };
        debug_assert!(unmapped.is_ok(), "unmapping what did not go anywhere: {unmapped:?}");
    }
}

/// Give back the frames of ordinary memory that holds zeros: it reads as zeros afterwards.
///
/// # Safety
/// The range is private anonymous memory, holds zeros, and nobody writes to it until this returns.
///
/// # Errors
/// Those of madvise(2).
pub unsafe fn free_zero_pages(range: AddressRange) -> io::Result<()> {
    // SAFETY: the caller's promise makes the content afterwards what it was before.
    Ok(unsafe { madvise(pointer(range.start), range.bytes().0 as usize, Advice::LinuxDontNeed) }?)
}

/// What faults cost here that a program takes because its memory was merged.
#[derive(Clone, Copy, Debug)]
pub struct FaultCosts {
    /// A write that finds a page of zeros in the place of one of the program's own: the fault, a frame, and filling it.
    /// No less than is known of such faults ([`COW_BREAK_CPU_SECONDS`]).
    pub after_merge_write: Duration,
    /// A read where nothing is, as where zeros were given back.
    pub after_free_read: Duration,
}

/// The median of a few tries.
///
/// # Errors
/// Those of mmap(2).
pub fn measure_fault_costs() -> io::Result<FaultCosts> {
    const SAMPLE_COUNT: usize = 5;
    const PAGES_PER_SAMPLE: usize = 16;
    let page = rustix::param::page_size();
    let range = map_ordinary((SAMPLE_COUNT * PAGES_PER_SAMPLE * page) as u64)?;
    // SAFETY: the range is this function's own; the advice changes no content. Kernels without huge pages refuse it.
    let _ = unsafe { madvise(pointer(range.start), range.bytes().0 as usize, Advice::LinuxNoHugepage) };
    let each = (range.start..range.end).step_by(page).map(|address| pointer(address).cast::<u8>());
    let each: Vec<*mut u8> = each.collect();
    let each_takes = |touch: fn(*mut u8)| {
        let one = |pages: &[*mut u8]| {
            let began = Instant::now();
            pages.iter().copied().for_each(touch);
            began.elapsed() / PAGES_PER_SAMPLE as u32
        };
        let mut tries: Vec<Duration> = each.chunks(PAGES_PER_SAMPLE).map(one).collect();
        tries.sort_unstable();
        tries[SAMPLE_COUNT / 2]
    };
    let read = each_takes(|page| {
        // SAFETY: it is mapped readable, and nobody else knows of it.
        let _ = unsafe { page.read_volatile() };
    });
    // SAFETY: it is mapped writable, and nobody else knows of it.
    let write = each_takes(|page| unsafe { page.write_volatile(1) });
    // SAFETY: it is this function's own, and no borrow of it is left.
    unsafe { unmap_range(range) }?;
    Ok(FaultCosts {
        after_free_read: read,
        after_merge_write: write.max(Duration::from_secs_f64(COW_BREAK_CPU_SECONDS)),
    })
}

/// How much memory of this process is pinned for long, as for a device, io_uring's registered buffers, or perf's big ones
/// (`pinned_vm`; Documentation/core-api/pin_user_pages.rst, 6.18).
///
/// # Errors
/// Those of reading `/proc/thread-self/status`, `InvalidData` where it does not say.
pub fn pinned_bytes() -> io::Result<Bytes> {
    let status = std::fs::read_to_string("/proc/thread-self/status")?;
    let words = status.lines().find_map(|line| line.strip_prefix("VmPin:"));
    let kibibytes: Option<u64> = words.and_then(|words| words.trim().strip_suffix(" kB")?.parse().ok());
    kibibytes.map(|count| Bytes(count << 10)).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Ordinary memory without content, somewhere.
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

/// Make a range ordinary memory without content, whatever it was.
///
/// # Safety
/// Nobody needs what is there, and no borrow of it lives.
///
/// # Errors
/// Those of mmap(2).
pub unsafe fn clear_range(range: AddressRange) -> io::Result<()> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::PRIVATE | MapFlags::FIXED;
    // SAFETY: the caller lets the range be replaced.
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
    // SAFETY: the caller lets the range go.
    Ok(unsafe { munmap(pointer(range.start), range.bytes().0 as usize) }?)
}

/// The bytes of a range of this process, to write.
///
/// # Safety
/// All of it is mapped writable, and nobody else uses any of it while the borrow lives.
pub unsafe fn range_bytes_mut<'a>(range: AddressRange) -> &'a mut [u8] {
    // SAFETY: the caller's promise. Every value of a byte is a valid one.
    unsafe { slice::from_raw_parts_mut(pointer(range.start).cast(), range.bytes().0 as usize) }
}

/// Have core dumps hold private mappings of files, which merged memory is. Where that cannot be, they do without.
pub fn include_merged_in_core_dumps() {
    const FILE_BACKED_PRIVATE_BIT: u64 = 1 << 2;
    let path = "/proc/self/coredump_filter";
    let filter = std::fs::read_to_string(path).ok().and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
    if let (Some(filter), Ok(mut file)) = (filter, std::fs::File::options().write(true).open(path)) {
        let _ = io::Write::write_all(&mut file, format!("{:#x}", filter | FILE_BACKED_PRIVATE_BIT).as_bytes());
    }
}
