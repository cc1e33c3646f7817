//! malloc(3) and related functions: a large allocation becomes a block; the next library makes all others.
//!
//! A block starts at a page boundary. So equal arrays of equal programs have equal pages. Few other allocations start
//! there, so that free(3) can usually decide by the address alone.

use crate::blocks::{AdoptableBlock, BLOCKS, BlockState};
use crate::merger::{self, MERGER};
use crate::{mappings, merge_thread, mpi, next, settings};
use pagefold_base::AddressRange;
use std::ffi::{c_int, c_void};
use std::ptr;

fn pointer(address: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address as usize)
}

fn is_block_size(bytes: usize) -> bool {
    settings::is_block_size(bytes) && mpi::may_adopt() && bytes < isize::MAX as usize / 2
}

/// A new block, filled with zeros if `zeroed`. `None` if there is no memory, or if this thread must not adopt memory
/// now.
fn allocate_block(bytes: usize, alignment: usize, zeroed: bool) -> Option<*mut c_void> {
    let page_bytes = mappings::page_bytes();
    let (bytes, alignment) = ((bytes as u64).next_multiple_of(page_bytes), alignment as u64);
    let reused = if alignment <= page_bytes { BLOCKS.lock()?.take_spare(bytes) } else { None };
    let range = match reused {
        Some(range) => {
            if zeroed {
                // SAFETY: spare blocks are mapped writable, and no other code uses them.
                unsafe { ptr::write_bytes(pointer(range.start).cast::<u8>(), 0, range.bytes().0 as usize) };
            }
            range
        }
        None => mappings::map_aligned(bytes, alignment)?,
    };
    let Some(mut blocks) = BLOCKS.lock() else {
        mappings::unmap_range(range);
        return None;
    };
    blocks.insert(AdoptableBlock { range, state: BlockState::Unknown, is_heap: true });
    drop(blocks);
    merge_thread::start();
    Some(pointer(range.start))
}

/// The block whose start is this address.
fn block_at(address: *mut c_void) -> Option<AdoptableBlock> {
    let address = address as u64;
    if address == 0 || !address.is_multiple_of(mappings::page_bytes()) {
        return None;
    }
    BLOCKS.lock()?.heap_block_at(address)
}

/// malloc(3).
#[unsafe(no_mangle)]
pub extern "C" fn malloc(bytes: usize) -> *mut c_void {
    merge_thread::restart_on_allocation();
    let block = if is_block_size(bytes) { allocate_block(bytes, 1, false) } else { None };
    block.unwrap_or_else(|| next::malloc(bytes))
}

/// calloc(3).
#[unsafe(no_mangle)]
pub extern "C" fn calloc(count: usize, bytes: usize) -> *mut c_void {
    merge_thread::restart_on_allocation();
    let total_bytes = count.checked_mul(bytes).filter(|&total_bytes| is_block_size(total_bytes));
    total_bytes
        .and_then(|total_bytes| allocate_block(total_bytes, 1, true))
        .unwrap_or_else(|| next::calloc(count, bytes))
}

/// free(3).
///
/// # Safety
/// The same as in its manual page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(address: *mut c_void) {
    match block_at(address) {
        Some(block) => mappings::keeping_errno(|| free_block(block)),
        // SAFETY: the caller's promise, and the address is not that of a block.
        None => unsafe { next::free(address) },
    }
}

/// free_sized(3) of C23.
///
/// # Safety
/// As for free(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free_sized(address: *mut c_void, _: usize) {
    // SAFETY: the caller's promise.
    unsafe { free(address) };
}

/// free_aligned_sized(3) of C23.
///
/// # Safety
/// As for free(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free_aligned_sized(address: *mut c_void, _: usize, _: usize) {
    // SAFETY: the caller's promise.
    unsafe { free(address) };
}

fn free_block(block: AdoptableBlock) {
    let Some(mut blocks) = BLOCKS.lock() else { return };
    // The engine does not know this block, so there is nothing to tell it.
    if blocks.remove_unknown(block.range.start) {
        if blocks.keep_spare(block.range) {
            return;
        }
        drop(blocks);
        return mappings::unmap_range(block.range);
    }
    drop(blocks);
    if merger::remove_without_waiting(block.range).is_none() {
        let Some(mut merger) = MERGER.lock() else { return };
        merger.remove_blocks(block.range);
    }
    mappings::unmap_range(block.range);
}

/// realloc(3).
///
/// # Safety
/// The same as in its manual page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(address: *mut c_void, bytes: usize) -> *mut c_void {
    if address.is_null() {
        return malloc(bytes);
    }
    merge_thread::restart_on_allocation();
    let Some(block) = block_at(address) else {
        if !is_block_size(bytes) {
            // SAFETY: the caller's promise, and the address is not that of a block.
            return unsafe { next::realloc(address, bytes) };
        }
        // SAFETY: as above.
        let old_bytes = unsafe { next::usable_size(address) };
        // A large allocation that did not become a block stays with its allocator.
        let new_address = if settings::is_block_size(old_bytes) { None } else { self::allocate_block(bytes, 1, false) };
        let Some(new_address) = new_address else {
            // SAFETY: as above.
            return unsafe { next::realloc(address, bytes) };
        };
        // SAFETY: both are at least that long, and no other code uses the new one.
        unsafe { ptr::copy_nonoverlapping(address.cast::<u8>(), new_address.cast::<u8>(), old_bytes.min(bytes)) };
        // SAFETY: as above.
        unsafe { next::free(address) };
        return new_address;
    };
    if bytes == 0 {
        free_block(block);
        return ptr::null_mut();
    }
    let block_bytes = block.range.bytes().0 as usize;
    if !settings::is_block_size(bytes) && bytes < block_bytes {
        let new_address = next::malloc(bytes);
        if !new_address.is_null() {
            // SAFETY: both are at least that long, and no other code uses the new one.
            unsafe { ptr::copy_nonoverlapping(address.cast::<u8>(), new_address.cast::<u8>(), bytes) };
            free_block(block);
        }
        return new_address;
    }
    let new_bytes = (bytes as u64).next_multiple_of(mappings::page_bytes());
    if bytes > isize::MAX as usize / 2 {
        mappings::set_errno(libc::ENOMEM);
        return ptr::null_mut();
    }
    if new_bytes == block.range.bytes().0 {
        return address;
    }
    mappings::remap_blocks(block.range, new_bytes, libc::MREMAP_MAYMOVE, None).map_or(ptr::null_mut(), pointer)
}

/// memalign(3).
#[unsafe(no_mangle)]
pub extern "C" fn memalign(alignment: usize, bytes: usize) -> *mut c_void {
    let is_large = is_block_size(bytes) && alignment.is_power_of_two() && alignment < isize::MAX as usize / 2;
    let block = if is_large { allocate_block(bytes, alignment, false) } else { None };
    block.unwrap_or_else(|| next::memalign(alignment, bytes))
}

/// aligned_alloc(3).
#[unsafe(no_mangle)]
pub extern "C" fn aligned_alloc(alignment: usize, bytes: usize) -> *mut c_void {
    memalign(alignment, bytes)
}

/// posix_memalign(3).
///
/// # Safety
/// The same as in its manual page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_memalign(output: *mut *mut c_void, alignment: usize, bytes: usize) -> c_int {
    let is_alignment_valid = alignment.is_power_of_two() && alignment.is_multiple_of(size_of::<usize>());
    let is_large = is_block_size(bytes) && is_alignment_valid && alignment < isize::MAX as usize / 2;
    match if is_large { allocate_block(bytes, alignment, false) } else { None } {
        Some(block) => {
            // SAFETY: the caller's promise.
            unsafe { output.write(block) };
            0
        }
        // SAFETY: the caller's promise.
        None => unsafe { next::posix_memalign(output, alignment, bytes) },
    }
}

/// valloc(3).
#[unsafe(no_mangle)]
pub extern "C" fn valloc(bytes: usize) -> *mut c_void {
    memalign(mappings::page_bytes() as usize, bytes)
}

/// pvalloc(3).
#[unsafe(no_mangle)]
pub extern "C" fn pvalloc(bytes: usize) -> *mut c_void {
    let page = mappings::page_bytes() as usize;
    match bytes.checked_next_multiple_of(page) {
        Some(bytes) => memalign(page, bytes),
        None => {
            mappings::set_errno(libc::ENOMEM);
            ptr::null_mut()
        }
    }
}

/// malloc_usable_size(3).
///
/// # Safety
/// The same as in its manual page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc_usable_size(address: *mut c_void) -> usize {
    match block_at(address) {
        Some(AdoptableBlock { range: AddressRange { start, end }, .. }) => (end - start) as usize,
        // SAFETY: the caller's promise, and the address is not that of a block.
        None => unsafe { next::usable_size(address) },
    }
}
