//! mmap(2) and other functions that change mappings. Large mappings that the program makes become blocks, too, and
//! operations on blocks have the same effect as on ordinary memory.
//!
//! Merging splits one mapping into many, some of them of a file. So for `MADV_DONTNEED` merged pages are first replaced
//! with ordinary memory, because the range would not read as zeros otherwise. mremap(2) moves only one mapping; it is
//! called for each mapping.

use crate::blocks::{AdoptableBlock, BLOCKS, BlockState};
use crate::merger::{self, MERGER, ProcessMerger};
use crate::next::next;
use crate::{merge_thread, mpi, process_hooks, program_mappings, settings};
use pagefold_base::AddressRange;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr;

/// `MADV_*` constants that libc does not define (include/uapi/asm-generic/mman-common.h, Linux 6.18).
const MADV_GUARD_INSTALL: c_int = 102;
const MADV_GUARD_REMOVE: c_int = 103;

type MmapFn = unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, c_int, i64) -> *mut c_void;
type MremapFn = unsafe extern "C" fn(*mut c_void, usize, usize, c_int, *mut c_void) -> *mut c_void;
type RangeFn = unsafe extern "C" fn(*mut c_void, usize) -> c_int;
type RangeAndFlagsFn = unsafe extern "C" fn(*mut c_void, usize, c_int) -> c_int;

fn next_mmap() -> Option<MmapFn> {
    next!(c"mmap", MmapFn)
}

fn next_munmap() -> Option<RangeFn> {
    next!(c"munmap", RangeFn)
}

fn next_mremap() -> Option<MremapFn> {
    next!(c"mremap", MremapFn)
}

fn next_mprotect() -> Option<RangeAndFlagsFn> {
    next!(c"mprotect", RangeAndFlagsFn)
}

/// Look up the functions that are called while this library or an allocator holds a lock.
pub fn resolve_functions() {
    next_mmap();
    next_munmap();
    next_mremap();
    next_mprotect();
}

/// Bytes in a page.
pub fn page_bytes() -> u64 {
    // SAFETY: the call only reads a value.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as u64 }
}

/// Set the error number of this thread.
pub fn set_errno(errno: c_int) {
    // SAFETY: the address is that of this thread's own error number.
    let location = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    unsafe { location.write(errno) };
}

/// Run `work` and restore the error number of this thread afterwards.
pub fn keeping_errno(work: impl FnOnce()) {
    let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
    work();
    set_errno(errno);
}

fn pointer(address: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address as usize)
}

/// The whole pages that contain so many bytes.
fn page_range(address: *mut c_void, bytes: usize) -> AddressRange {
    let (start, page) = (address as u64 / page_bytes() * page_bytes(), page_bytes());
    let end = (address as u64).saturating_add(bytes as u64).checked_next_multiple_of(page).unwrap_or(u64::MAX);
    AddressRange { start, end: end.max(start) }
}

/// Map ordinary memory. Returns its address.
///
/// # Safety
/// With `MAP_FIXED`, the present contents of the range are no longer needed.
unsafe fn map_ordinary(start: u64, bytes: u64, protection: c_int, flags: c_int) -> Option<u64> {
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let next = next_mmap()?;
    // SAFETY: the caller's promise; without `MAP_FIXED` nothing is replaced.
    let start = unsafe { next(pointer(start), bytes as usize, protection, flags, -1, 0) };
    (start != libc::MAP_FAILED).then(|| start.expose_provenance() as u64)
}

const PROT_READ_WRITE: c_int = libc::PROT_READ | libc::PROT_WRITE;

/// Map new memory of whole pages at a multiple of `alignment`.
pub fn map_aligned(bytes: u64, alignment: u64) -> Option<AddressRange> {
    let padding = if alignment > page_bytes() { alignment } else { 0 };
    // SAFETY: nothing is replaced.
    let start = unsafe { map_ordinary(0, bytes.checked_add(padding)?, PROT_READ_WRITE, 0) }?;
    let aligned_start = start.next_multiple_of(alignment.max(1));
    unmap_range(AddressRange { start, end: aligned_start });
    unmap_range(AddressRange { start: aligned_start + bytes, end: start + bytes + padding });
    Some(AddressRange { start: aligned_start, end: aligned_start + bytes })
}

/// Unmap a range of this library, if it is not empty.
pub fn unmap_range(range: AddressRange) {
    if let Some(munmap) = next_munmap()
        && range.start < range.end
    {
        // SAFETY: no code uses this range of the library any more. If the limit on mappings prevents it, the range
        // stays.
        unsafe { munmap(pointer(range.start), range.bytes().0 as usize) };
    }
}

/// Map memory of zeros over a range, with some protection. Returns whether that succeeded.
fn map_zeros_at(range: AddressRange, protection: c_int) -> bool {
    // SAFETY: the caller no longer needs the contents of the range.
    unsafe { map_ordinary(range.start, range.bytes().0, protection, libc::MAP_FIXED) }.is_some()
}

/// Replace the merged parts of a range with zeros. Returns whether that succeeded.
fn zero_merged(range: AddressRange) -> bool {
    let Some(blocks) = BLOCKS.lock() else { return true };
    let known_blocks: Vec<AdoptableBlock> =
        blocks.blocks_in(range).into_iter().filter(|block| block.state != BlockState::Unknown).collect();
    drop(blocks);
    let mappings =
        known_blocks.iter().filter_map(|block| block.range.overlap(range)).flat_map(program_mappings::read_mappings);
    mappings.filter(|mapping| mapping.is_file).all(|mapping| map_zeros_at(mapping.range, mapping.protection))
}

/// `None` if no block overlaps the range; otherwise whether the engine knows one of those blocks.
fn has_known_block(range: AddressRange) -> Option<bool> {
    BLOCKS.lock()?.has_known_block(range)
}

/// Run a system call that unmaps or replaces a range, and remove the range from the blocks. If the call fails according
/// to `succeeded`, the parts that the engine knew are not merged from then on.
fn remove_while<T>(range: AddressRange, syscall: impl FnOnce() -> T, succeeded: impl FnOnce(&T) -> bool) -> T {
    let Some(mut blocks) = BLOCKS.lock() else { return syscall() };
    match blocks.has_known_block(range) {
        None => {}
        Some(false) => drop(blocks.remove_range(range)),
        Some(true) => {
            drop(blocks);
            let mut merger_guard = None;
            let removed = match merger::remove_without_waiting(range) {
                Some(removed) => removed,
                None => {
                    let Some(mut merger) = MERGER.lock() else { return syscall() };
                    let removed = merger.remove_blocks(range);
                    merger_guard = Some(merger);
                    removed
                }
            };
            let result = syscall();
            if !succeeded(&result)
                && let Some(mut blocks) = BLOCKS.lock()
            {
                for part in removed.into_iter().filter(|part| part.state != BlockState::Unknown) {
                    blocks.set_state(part, BlockState::Excluded);
                }
            }
            drop(merger_guard);
            return result;
        }
    }
    drop(blocks);
    syscall()
}

/// Run `work` while no block that overlaps a range is merged; with the engine, if it knows one of those blocks.
fn without_merge_in<T>(range: AddressRange, work: impl FnOnce(Option<&mut ProcessMerger>) -> T) -> T {
    let blocks = BLOCKS.lock();
    match blocks.as_ref().and_then(|blocks| blocks.has_known_block(range)) {
        // While this thread holds the lock, no merge adopts a new block.
        Some(false) => work(None),
        has_known_block => {
            drop(blocks);
            let mut merger = if has_known_block.is_some() { MERGER.lock() } else { None };
            work(merger.as_deref_mut())
        }
    }
}

/// Whether a range may be unmapped or replaced, as far as this library can tell: it consists of whole pages.
fn can_unmap_or_replace(start: u64, bytes: usize) -> bool {
    start.is_multiple_of(page_bytes()) && bytes > 0 && start.checked_add(bytes as u64).is_some()
}

/// mmap(2).
///
/// # Safety
/// The same as in its manual page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    start: *mut c_void,
    bytes: usize,
    access: c_int,
    flags: c_int,
    file: c_int,
    offset: i64,
) -> *mut c_void {
    let Some(next) = next_mmap() else {
        set_errno(libc::ENOSYS);
        return libc::MAP_FAILED;
    };
    // SAFETY: the caller's promise.
    let call = || unsafe { next(start, bytes, access, flags, file, offset) };
    let replaces = flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) == libc::MAP_FIXED;
    let mapped = if replaces && can_unmap_or_replace(start as u64, bytes) {
        remove_while(page_range(start, bytes), call, |mapped| *mapped != libc::MAP_FAILED)
    } else {
        call()
    };
    let is_ordinary =
        flags & !libc::MAP_POPULATE == libc::MAP_PRIVATE | libc::MAP_ANONYMOUS && access == PROT_READ_WRITE;
    if mapped != libc::MAP_FAILED && is_ordinary && settings::is_block_size(bytes) && mpi::may_adopt() {
        if let Some(mut blocks) = BLOCKS.lock() {
            blocks.insert(AdoptableBlock {
                range: page_range(mapped, bytes),
                state: BlockState::Unknown,
                is_heap: false,
            });
        }
        if process_hooks::uses_libc_allocator() {
            merge_thread::start();
        }
    }
    mapped
}

/// mmap(2), under its name for 64-bit offsets.
///
/// # Safety
/// The same as in its manual page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    start: *mut c_void,
    bytes: usize,
    access: c_int,
    flags: c_int,
    file: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { mmap(start, bytes, access, flags, file, offset) }
}

/// munmap(2).
///
/// # Safety
/// The same as in its manual page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(start: *mut c_void, bytes: usize) -> c_int {
    let Some(next) = next_munmap() else { return fail_with(libc::ENOSYS) };
    // SAFETY: the caller's promise.
    let call = || unsafe { next(start, bytes) };
    if can_unmap_or_replace(start as u64, bytes) {
        remove_while(page_range(start, bytes), call, |result| *result == 0)
    } else {
        call()
    }
}

fn fail_with(errno: c_int) -> c_int {
    set_errno(errno);
    -1
}

/// mremap(2).
///
/// # Safety
/// The same as in its manual page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    start: *mut c_void,
    bytes: usize,
    new_bytes: usize,
    flags: c_int,
    target: *mut c_void,
) -> *mut c_void {
    let range = page_range(start, bytes);
    let is_fixed = flags & libc::MREMAP_FIXED != 0;
    let target_range = page_range(target, new_bytes);
    let known_flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
    // The kernel refuses a call before it unmaps anything.
    let is_target_valid = !is_fixed
        || (flags & libc::MREMAP_MAYMOVE != 0
            && can_unmap_or_replace(target as u64, new_bytes)
            && target_range.overlap(range).is_none());
    let are_arguments_valid = can_unmap_or_replace(start as u64, bytes)
        && new_bytes > 0
        && new_bytes <= isize::MAX as usize
        && flags & !known_flags == 0;
    let call = || {
        let Some(next) = next_mremap() else {
            set_errno(libc::ENOSYS);
            return libc::MAP_FAILED;
        };
        // SAFETY: the caller's promise.
        unsafe { next(start, bytes, new_bytes, flags, target) }
    };
    if !are_arguments_valid || !is_target_valid {
        return call();
    }
    if has_known_block(range).is_none() {
        return if is_fixed { remove_while(target_range, call, |moved| *moved != libc::MAP_FAILED) } else { call() };
    }
    if is_fixed {
        // Moving takes the same lock.
        remove_while(target_range, || (), |()| true);
    }
    let new_bytes = (new_bytes as u64).next_multiple_of(page_bytes());
    remap_blocks(range, new_bytes, flags, is_fixed.then_some(target as u64)).map_or(libc::MAP_FAILED, pointer)
}

/// Change the length of a range of blocks, and perhaps its address, as mremap(2) does. Returns the new start; `None`
/// sets the error number.
pub fn remap_blocks(range: AddressRange, new_bytes: u64, flags: c_int, target: Option<u64>) -> Option<u64> {
    let Some(mut blocks) = BLOCKS.lock() else {
        set_errno(libc::ENOMEM);
        return None;
    };
    if blocks.has_known_block(range) == Some(true) {
        drop(blocks);
        return remap_by_mapping(range, new_bytes, flags, target);
    }
    let old_blocks = blocks.blocks_in(range);
    blocks.remove_range(range);
    let new_start = move_mapping(range, new_bytes, flags, target.unwrap_or(0));
    match new_start {
        Some(start) if flags & libc::MREMAP_DONTUNMAP == 0 => {
            let is_heap = old_blocks.first().is_some_and(|block| block.is_heap);
            blocks.insert(AdoptableBlock {
                range: AddressRange { start, end: start + new_bytes },
                state: BlockState::Unknown,
                is_heap,
            });
        }
        _ => old_blocks.into_iter().for_each(|block| blocks.insert(block)),
    }
    // The program has split the range into several mappings.
    if new_start.is_none() && std::io::Error::last_os_error().raw_os_error() == Some(libc::EFAULT) {
        drop(blocks);
        return remap_by_mapping(range, new_bytes, flags, target);
    }
    new_start
}

fn move_mapping(range: AddressRange, new_bytes: u64, flags: c_int, target: u64) -> Option<u64> {
    let next = next_mremap()?;
    let (start, bytes) = (pointer(range.start), range.bytes().0 as usize);
    // SAFETY: the caller may move the range, and no other part of this library has its address.
    let result = unsafe { next(start, bytes, new_bytes as usize, flags, pointer(target)) };
    (result != libc::MAP_FAILED).then(|| result.expose_provenance() as u64)
}

/// Like [`remap_blocks`], for a range of several mappings.
fn remap_by_mapping(range: AddressRange, new_bytes: u64, flags: c_int, target: Option<u64>) -> Option<u64> {
    let failed = |errno| {
        set_errno(errno);
        None
    };
    let Some(mut merger) = MERGER.lock() else { return failed(libc::ENOMEM) };
    if flags & !(libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) != 0 {
        // MREMAP_DONTUNMAP works on one mapping of ordinary memory only; this range may be another kind.
        return failed(libc::EINVAL);
    }
    let blocks_in_range = BLOCKS.lock().map_or_else(Vec::new, |blocks| blocks.blocks_in(range));
    let is_heap = blocks_in_range.iter().any(|block| block.is_heap && block.range.start == range.start);
    let state = blocks_in_range
        .iter()
        .map(|block| block.state)
        .reduce(|all, next| if all == next { all } else { BlockState::Excluded });
    let state = state.unwrap_or(BlockState::Excluded);
    let kept_range = AddressRange { start: range.start, end: range.end.min(range.start + new_bytes) };
    let mappings = program_mappings::read_mappings(kept_range);
    if mappings.iter().map(|mapping| mapping.range.bytes().0).sum::<u64>() != kept_range.bytes().0 {
        return failed(libc::EFAULT);
    }
    if target.is_none() && kept_range.bytes().0 == new_bytes {
        let tail = AddressRange { start: kept_range.end, end: range.end };
        merger.remove_blocks(tail);
        unmap_range(tail);
        return Some(range.start);
    }
    let protection = mappings.last().map_or(PROT_READ_WRITE, |mapping| mapping.protection);
    if target.is_none() && map_behind(range.end, new_bytes - kept_range.bytes().0, protection) {
        merger.remove_blocks(range);
        merger.insert_moved(AddressRange { start: range.start, end: range.start + new_bytes }, is_heap, state);
        return Some(range.start);
    }
    if flags & libc::MREMAP_MAYMOVE == 0 {
        return failed(libc::ENOMEM);
    }
    let fixed_flag = if target.is_some() { libc::MAP_FIXED } else { 0 };
    // SAFETY: if a target was given, its present contents are to be replaced.
    let Some(start) = (unsafe { map_ordinary(target.unwrap_or(0), new_bytes, protection, fixed_flag) }) else {
        return failed(libc::ENOMEM);
    };
    merger.remove_blocks(range);
    for mapping in mappings {
        let destination = start + (mapping.range.start - range.start);
        let move_flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        if move_mapping(mapping.range, mapping.range.bytes().0, move_flags, destination).is_none()
            && !copy_mapping(mapping, destination)
        {
            process_hooks::write_to_stderr("cannot move a block of the program: out of memory");
            std::process::abort();
        }
    }
    unmap_range(range);
    merger.insert_moved(AddressRange { start, end: start + new_bytes }, is_heap, state);
    Some(start)
}

/// Map so many bytes at an address, if that range is free. Returns whether that succeeded.
fn map_behind(address: u64, bytes: u64, protection: c_int) -> bool {
    // SAFETY: nothing is replaced.
    match unsafe { map_ordinary(address, bytes, protection, libc::MAP_FIXED_NOREPLACE) } {
        Some(start) if start == address => true,
        // Kernels before 4.17 do not know the flag, and take an address as a hint.
        Some(start) => {
            unmap_range(AddressRange { start, end: start + bytes });
            false
        }
        None => false,
    }
}

/// Copy a mapping that the limit on mappings prevents from being moved.
fn copy_mapping(source: program_mappings::ProgramMapping, target: u64) -> bool {
    let bytes = source.range.bytes().0;
    let is_readable = source.protection & libc::PROT_READ != 0;
    // The kernel may have unmapped the target before the call failed.
    if !is_readable || !map_zeros_at(AddressRange { start: target, end: target + bytes }, PROT_READ_WRITE) {
        return false;
    }
    // SAFETY: both are mapped and of the same length, and no other code uses the new range yet.
    unsafe {
        ptr::copy_nonoverlapping(pointer(source.range.start).cast::<u8>(), pointer(target).cast::<u8>(), bytes as usize)
    };
    let protect = next_mprotect();
    // SAFETY: the range is mapped, and gets the protection that the program has set.
    source.protection == PROT_READ_WRITE
        || protect.is_some_and(|next| unsafe { next(pointer(target), bytes as usize, source.protection) } == 0)
}

/// madvise(2).
///
/// # Safety
/// The same as in its manual page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(start: *mut c_void, bytes: usize, advice: c_int) -> c_int {
    let range = page_range(start, bytes);
    let Some(next) = next!(c"madvise", RangeAndFlagsFn) else { return fail_with(libc::ENOSYS) };
    // SAFETY: the caller's promise.
    let call = || unsafe { next(start, bytes, advice) };
    if range.start != start as u64 {
        return call();
    }
    match advice {
        libc::MADV_DONTNEED | libc::MADV_FREE | libc::MADV_DONTNEED_LOCKED | MADV_GUARD_INSTALL => {
            if advice == MADV_GUARD_INSTALL {
                merger::exclude_blocks_in(range);
            }
            without_merge_in(range, |merger| {
                let result = if zero_merged(range) { call() } else { fail_with(libc::ENOMEM) };
                if let Some(merger) = merger {
                    keeping_errno(|| merger.forget_pages(range));
                }
                result
            })
        }
        libc::MADV_REMOVE
        | libc::MADV_DONTFORK
        | libc::MADV_DONTDUMP
        | libc::MADV_WIPEONFORK
        | libc::MADV_UNMERGEABLE
        | libc::MADV_HWPOISON
        | libc::MADV_SOFT_OFFLINE
        | MADV_GUARD_REMOVE => {
            merger::exclude_blocks_in(range);
            call()
        }
        _ => call(),
    }
}

/// mprotect(2).
///
/// # Safety
/// The same as in its manual page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mprotect(start: *mut c_void, bytes: usize, access: c_int) -> c_int {
    let Some(next) = next_mprotect() else { return fail_with(libc::ENOSYS) };
    let range = page_range(start, bytes);
    // A freed block would become spare with the new protection.
    if let Some(mut blocks) = BLOCKS.lock() {
        for block in
            blocks.blocks_in(range).into_iter().filter(|block| block.is_heap && block.state == BlockState::Unknown)
        {
            blocks.set_state(block, BlockState::Excluded);
        }
    }
    // SAFETY: the caller's promise.
    without_merge_in(range, |_| unsafe { next(start, bytes, access) })
}

/// pkey_mprotect(2).
///
/// # Safety
/// The same as in its manual page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkey_mprotect(start: *mut c_void, bytes: usize, access: c_int, key: c_int) -> c_int {
    merger::exclude_blocks_in(page_range(start, bytes));
    match next!(c"pkey_mprotect", unsafe extern "C" fn(*mut c_void, usize, c_int, c_int) -> c_int) {
        // SAFETY: the caller's promise.
        Some(next) => unsafe { next(start, bytes, access, key) },
        None => fail_with(libc::ENOSYS),
    }
}

/// mlock(2).
///
/// # Safety
/// The same as in its manual page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock(start: *mut c_void, bytes: usize) -> c_int {
    merger::exclude_blocks_in(page_range(start, bytes));
    match next!(c"mlock", RangeFn) {
        // SAFETY: the caller's promise.
        Some(next) => unsafe { next(start, bytes) },
        None => fail_with(libc::ENOSYS),
    }
}

/// mlock2(2).
///
/// # Safety
/// The same as in its manual page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock2(start: *mut c_void, bytes: usize, flags: c_uint) -> c_int {
    merger::exclude_blocks_in(page_range(start, bytes));
    match next!(c"mlock2", unsafe extern "C" fn(*mut c_void, usize, c_uint) -> c_int) {
        // SAFETY: the caller's promise.
        Some(next) => unsafe { next(start, bytes, flags) },
        None => fail_with(libc::ENOSYS),
    }
}

/// mlockall(2).
#[unsafe(no_mangle)]
pub extern "C" fn mlockall(flags: c_int) -> c_int {
    if settings::settings().is_some() {
        merger::stop_merging("the program locks all of its memory (mlockall)");
    }
    match next!(c"mlockall", unsafe extern "C" fn(c_int) -> c_int) {
        // SAFETY: any flags may be given.
        Some(next) => unsafe { next(flags) },
        None => fail_with(libc::ENOSYS),
    }
}

/// pthread_attr_setstack(3). A stack that the program supplies is not merged, because the kernel writes to it.
///
/// # Safety
/// The same as in its manual page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_attr_setstack(attributes: *mut c_void, start: *mut c_void, bytes: usize) -> c_int {
    merger::exclude_blocks_in(page_range(start, bytes));
    match next!(c"pthread_attr_setstack", unsafe extern "C" fn(*mut c_void, *mut c_void, usize) -> c_int) {
        // SAFETY: the caller's promise.
        Some(next) => unsafe { next(attributes, start, bytes) },
        None => libc::EINVAL,
    }
}

/// close_range(2). It waits for a running merge, whose descriptors it could close.
#[unsafe(no_mangle)]
pub extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let next = next!(c"close_range", unsafe extern "C" fn(c_uint, c_uint, c_int) -> c_int);
    let _guard = MERGER.lock();
    match next {
        // SAFETY: any numbers may be given.
        Some(next) => unsafe { next(first, last, flags) },
        None => fail_with(libc::ENOSYS),
    }
}

/// closefrom(3), like [`close_range`].
#[unsafe(no_mangle)]
pub extern "C" fn closefrom(first: c_int) {
    let next = next!(c"closefrom", unsafe extern "C" fn(c_int));
    let _guard = MERGER.lock();
    if let Some(next) = next {
        // SAFETY: any number may be given.
        unsafe { next(first) };
    }
}
