//! mmap(2) and what else changes mappings: large ones of the program's own are blocks, too, and whatever is done to
//! blocks does what it would do to ordinary memory.
//!
//! Merging makes many mappings of one, some of them of a file. So `MADV_DONTNEED` first puts ordinary memory in the
//! place of what is merged, or there would not be zeros afterwards, and mremap(2), which moves one mapping, is done
//! mapping by mapping.

use crate::blocks::{BLOCKS, Block, State};
use crate::merge::{self, MERGER, Merger};
use crate::next::next;
use crate::{beside, guest, maps, mpi, settings};
use pagefold_base::AddressRange;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr;

/// Of `MADV_*`, those that libc does not name (include/uapi/asm-generic/mman-common.h, Linux 6.18).
const MADV_GUARD_INSTALL: c_int = 102;
const MADV_GUARD_REMOVE: c_int = 103;

type Mmap = unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, c_int, i64) -> *mut c_void;
type Mremap = unsafe extern "C" fn(*mut c_void, usize, usize, c_int, *mut c_void) -> *mut c_void;
type OfRange = unsafe extern "C" fn(*mut c_void, usize) -> c_int;
type OfRangeAnd = unsafe extern "C" fn(*mut c_void, usize, c_int) -> c_int;

fn next_mmap() -> Option<Mmap> {
    next!(c"mmap", Mmap)
}

fn next_munmap() -> Option<OfRange> {
    next!(c"munmap", OfRange)
}

fn next_mremap() -> Option<Mremap> {
    next!(c"mremap", Mremap)
}

fn next_mprotect() -> Option<OfRangeAnd> {
    next!(c"mprotect", OfRangeAnd)
}

/// Look up what is called with a lock held, of this library or of an allocator.
pub fn look_up() {
    next_mmap();
    next_munmap();
    next_mremap();
    next_mprotect();
}

/// Bytes of a page.
pub fn page() -> u64 {
    // SAFETY: it only asks.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as u64 }
}

/// Set the error number of this thread.
pub fn set_errno(errno: c_int) {
    // SAFETY: it is this thread's own.
    let at = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    unsafe { at.write(errno) };
}

/// Do something that leaves the error number of this thread as it was.
pub fn keeping_errno(work: impl FnOnce()) {
    let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
    work();
    set_errno(errno);
}

fn pointer(address: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address as usize)
}

/// The whole pages that hold so many bytes.
fn whole(address: *mut c_void, bytes: usize) -> AddressRange {
    let (start, page) = (address as u64 / page() * page(), page());
    let end = (address as u64).saturating_add(bytes as u64).checked_next_multiple_of(page).unwrap_or(u64::MAX);
    AddressRange { start, end: end.max(start) }
}

/// Map ordinary memory; the address it came to.
///
/// # Safety
/// With `MAP_FIXED`, nobody needs what is in the place.
unsafe fn map(start: u64, bytes: u64, access: c_int, flags: c_int) -> Option<u64> {
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let next = next_mmap()?;
    // SAFETY: the caller's promise; in other places nothing is replaced.
    let start = unsafe { next(pointer(start), bytes as usize, access, flags, -1, 0) };
    (start != libc::MAP_FAILED).then(|| start.expose_provenance() as u64)
}

const BOTH: c_int = libc::PROT_READ | libc::PROT_WRITE;

/// New memory of whole pages at a multiple of a number.
pub fn aligned(bytes: u64, alignment: u64) -> Option<AddressRange> {
    let more = if alignment > page() { alignment } else { 0 };
    // SAFETY: nothing is replaced.
    let start = unsafe { map(0, bytes.checked_add(more)?, BOTH, 0) }?;
    let first = start.next_multiple_of(alignment.max(1));
    unmap(AddressRange { start, end: first });
    unmap(AddressRange { start: first + bytes, end: start + bytes + more });
    Some(AddressRange { start: first, end: first + bytes })
}

/// Unmap a range that is ours, if it is any.
pub fn unmap(range: AddressRange) {
    if let Some(munmap) = next_munmap()
        && range.start < range.end
    {
        // SAFETY: nobody uses what is ours any more. What cannot be unmapped, for want of mappings, stays.
        unsafe { munmap(pointer(range.start), range.bytes().0 as usize) };
    }
}

/// Put memory of zeros in a place, of some access; whether that could be done.
fn zeros_at(range: AddressRange, access: c_int) -> bool {
    // SAFETY: whoever calls wants what is there no more.
    unsafe { map(range.start, range.bytes().0, access, libc::MAP_FIXED) }.is_some()
}

/// Have zeros where a range is merged; whether that could be done.
fn zero(range: AddressRange) -> bool {
    let Some(blocks) = BLOCKS.lock() else { return true };
    let known: Vec<Block> = blocks.touching(range).into_iter().filter(|block| block.state != State::New).collect();
    drop(blocks);
    let parts = known.iter().filter_map(|block| block.range.overlap(range)).flat_map(maps::parts);
    parts.filter(|part| part.file).all(|part| zeros_at(part.range, part.access))
}

/// What has part in a range: nothing, blocks that the engine does not know, or one that it does.
fn touches(range: AddressRange) -> Option<bool> {
    BLOCKS.lock()?.touches(range)
}

/// Do what unmaps or replaces a range, and take that out of blocks. If it fails, according to `is_done`, what was
/// known to the engine is left alone from then on.
fn ending<T>(range: AddressRange, work: impl FnOnce() -> T, is_done: impl FnOnce(&T) -> bool) -> T {
    let Some(mut blocks) = BLOCKS.lock() else { return work() };
    match blocks.touches(range) {
        None => {}
        Some(false) => drop(blocks.cut(range)),
        Some(true) => {
            drop(blocks);
            let mut held = None;
            let taken = match merge::cut_beside(range) {
                Some(taken) => taken,
                None => {
                    let Some(mut merger) = MERGER.lock() else { return work() };
                    let taken = merger.cut(range);
                    held = Some(merger);
                    taken
                }
            };
            let answer = work();
            if !is_done(&answer)
                && let Some(mut blocks) = BLOCKS.lock()
            {
                for part in taken.into_iter().filter(|part| part.state != State::New) {
                    blocks.set(part, State::Left);
                }
            }
            drop(held);
            return answer;
        }
    }
    drop(blocks);
    work()
}

/// Do something while no block is merged that has part in a range; with the engine, where it knows one of those.
fn between_merges<T>(range: AddressRange, work: impl FnOnce(Option<&mut Merger>) -> T) -> T {
    let blocks = BLOCKS.lock();
    match blocks.as_ref().and_then(|blocks| blocks.touches(range)) {
        // With this lock no new block becomes one that may be merged.
        Some(false) => work(None),
        touches => {
            drop(blocks);
            let mut held = if touches.is_some() { MERGER.lock() } else { None };
            work(held.as_deref_mut())
        }
    }
}

/// Whether a range may be unmapped or replaced, as far as is seen before: it is of whole pages.
fn is_sound(start: u64, bytes: usize) -> bool {
    start.is_multiple_of(page()) && bytes > 0 && start.checked_add(bytes as u64).is_some()
}

/// mmap(2).
///
/// # Safety
/// As its manual says.
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
    let mapped = if replaces && is_sound(start as u64, bytes) {
        ending(whole(start, bytes), call, |mapped| *mapped != libc::MAP_FAILED)
    } else {
        call()
    };
    let ordinary = flags & !libc::MAP_POPULATE == libc::MAP_PRIVATE | libc::MAP_ANONYMOUS && access == BOTH;
    if mapped != libc::MAP_FAILED && ordinary && settings::is_large(bytes) && mpi::may_adopt() {
        if let Some(mut blocks) = BLOCKS.lock() {
            blocks.insert(Block { range: whole(mapped, bytes), state: State::New, heap: false });
        }
        if guest::is_plain() {
            beside::begin();
        }
    }
    mapped
}

/// mmap(2), by the name that it has with 64-bit offsets.
///
/// # Safety
/// As its manual says.
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
/// As its manual says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(start: *mut c_void, bytes: usize) -> c_int {
    let Some(next) = next_munmap() else { return refused(libc::ENOSYS) };
    // SAFETY: the caller's promise.
    let call = || unsafe { next(start, bytes) };
    if is_sound(start as u64, bytes) { ending(whole(start, bytes), call, |answer| *answer == 0) } else { call() }
}

fn refused(errno: c_int) -> c_int {
    set_errno(errno);
    -1
}

/// mremap(2).
///
/// # Safety
/// As its manual says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    start: *mut c_void,
    bytes: usize,
    wanted: usize,
    flags: c_int,
    target: *mut c_void,
) -> *mut c_void {
    let range = whole(start, bytes);
    let fixed = flags & libc::MREMAP_FIXED != 0;
    let place = whole(target, wanted);
    let known = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
    // What the kernel refuses it does so before it unmaps anything.
    let fits = !fixed
        || (flags & libc::MREMAP_MAYMOVE != 0 && is_sound(target as u64, wanted) && place.overlap(range).is_none());
    let sound = is_sound(start as u64, bytes) && wanted > 0 && wanted <= isize::MAX as usize && flags & !known == 0;
    let call = || {
        let Some(next) = next_mremap() else {
            set_errno(libc::ENOSYS);
            return libc::MAP_FAILED;
        };
        // SAFETY: the caller's promise.
        unsafe { next(start, bytes, wanted, flags, target) }
    };
    if !sound || !fits {
        return call();
    }
    if touches(range).is_none() {
        return if fixed { ending(place, call, |moved| *moved != libc::MAP_FAILED) } else { call() };
    }
    if fixed {
        // Moving takes the same lock.
        ending(place, || (), |()| true);
    }
    let wanted = (wanted as u64).next_multiple_of(page());
    resize(range, wanted, flags, fixed.then_some(target as u64)).map_or(libc::MAP_FAILED, pointer)
}

/// Give a range of blocks another length, and perhaps another place, as mremap(2) does; where it is then. Without,
/// the error number says why.
pub fn resize(range: AddressRange, wanted: u64, flags: c_int, target: Option<u64>) -> Option<u64> {
    let Some(mut blocks) = BLOCKS.lock() else {
        set_errno(libc::ENOMEM);
        return None;
    };
    if blocks.touches(range) == Some(true) {
        drop(blocks);
        return resize_in_parts(range, wanted, flags, target);
    }
    let before = blocks.touching(range);
    blocks.cut(range);
    let moved = move_mapping(range, wanted, flags, target.unwrap_or(0));
    match moved {
        Some(start) if flags & libc::MREMAP_DONTUNMAP == 0 => {
            let heap = before.first().is_some_and(|block| block.heap);
            blocks.insert(Block { range: AddressRange { start, end: start + wanted }, state: State::New, heap });
        }
        _ => before.into_iter().for_each(|block| blocks.insert(block)),
    }
    // The program has made several mappings of it.
    if moved.is_none() && std::io::Error::last_os_error().raw_os_error() == Some(libc::EFAULT) {
        drop(blocks);
        return resize_in_parts(range, wanted, flags, target);
    }
    moved
}

fn move_mapping(range: AddressRange, wanted: u64, flags: c_int, target: u64) -> Option<u64> {
    let next = next_mremap()?;
    let (start, bytes) = (pointer(range.start), range.bytes().0 as usize);
    // SAFETY: the range is the caller's to move, and nothing else of ours knows where it is.
    let moved = unsafe { next(start, bytes, wanted as usize, flags, pointer(target)) };
    (moved != libc::MAP_FAILED).then(|| moved.expose_provenance() as u64)
}

/// The same for what is more than one mapping.
fn resize_in_parts(range: AddressRange, wanted: u64, flags: c_int, target: Option<u64>) -> Option<u64> {
    let failed = |errno| {
        set_errno(errno);
        None
    };
    let Some(mut merger) = MERGER.lock() else { return failed(libc::ENOMEM) };
    if flags & !(libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) != 0 {
        // MREMAP_DONTUNMAP is for one mapping of ordinary memory, which this need not be.
        return failed(libc::EINVAL);
    }
    let touched = BLOCKS.lock().map_or_else(Vec::new, |blocks| blocks.touching(range));
    let heap = touched.iter().any(|block| block.heap && block.range.start == range.start);
    let state = touched.iter().map(|block| block.state).reduce(|all, next| if all == next { all } else { State::Left });
    let state = state.unwrap_or(State::Left);
    let kept = AddressRange { start: range.start, end: range.end.min(range.start + wanted) };
    let parts = maps::parts(kept);
    if parts.iter().map(|part| part.range.bytes().0).sum::<u64>() != kept.bytes().0 {
        return failed(libc::EFAULT);
    }
    if target.is_none() && kept.bytes().0 == wanted {
        let tail = AddressRange { start: kept.end, end: range.end };
        merger.cut(tail);
        unmap(tail);
        return Some(range.start);
    }
    let access = parts.last().map_or(BOTH, |part| part.access);
    if target.is_none() && grow(range.end, wanted - kept.bytes().0, access) {
        merger.cut(range);
        merger.insert(AddressRange { start: range.start, end: range.start + wanted }, heap, state);
        return Some(range.start);
    }
    if flags & libc::MREMAP_MAYMOVE == 0 {
        return failed(libc::ENOMEM);
    }
    let fixed = if target.is_some() { libc::MAP_FIXED } else { 0 };
    // SAFETY: where a place was named, what is there is to be replaced.
    let Some(start) = (unsafe { map(target.unwrap_or(0), wanted, access, fixed) }) else { return failed(libc::ENOMEM) };
    merger.cut(range);
    for part in parts {
        let to = start + (part.range.start - range.start);
        let both = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        if move_mapping(part.range, part.range.bytes().0, both, to).is_none() && !copy(part, to) {
            guest::tell("no memory to move a block of the program");
            std::process::abort();
        }
    }
    unmap(range);
    merger.insert(AddressRange { start, end: start + wanted }, heap, state);
    Some(start)
}

/// Map so many bytes more at an address, if nothing is there; whether that could be done.
fn grow(at: u64, bytes: u64, access: c_int) -> bool {
    // SAFETY: nothing is replaced.
    match unsafe { map(at, bytes, access, libc::MAP_FIXED_NOREPLACE) } {
        Some(start) if start == at => true,
        // Before 4.17 the flag is not known, and an address is a hint.
        Some(start) => {
            unmap(AddressRange { start, end: start + bytes });
            false
        }
        None => false,
    }
}

/// Copy what cannot be moved for want of mappings.
fn copy(part: maps::Part, to: u64) -> bool {
    let bytes = part.range.bytes().0;
    let readable = part.access & libc::PROT_READ != 0;
    // The kernel may have unmapped the place before it failed.
    if !readable || !zeros_at(AddressRange { start: to, end: to + bytes }, BOTH) {
        return false;
    }
    // SAFETY: both are mapped, of the same length, and the new place is nobody else's yet.
    unsafe {
        ptr::copy_nonoverlapping(pointer(part.range.start).cast::<u8>(), pointer(to).cast::<u8>(), bytes as usize)
    };
    let protect = next_mprotect();
    // SAFETY: it is mapped, and gets the access that the program has given it.
    part.access == BOTH || protect.is_some_and(|next| unsafe { next(pointer(to), bytes as usize, part.access) } == 0)
}

/// madvise(2).
///
/// # Safety
/// As its manual says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(start: *mut c_void, bytes: usize, advice: c_int) -> c_int {
    let range = whole(start, bytes);
    let Some(next) = next!(c"madvise", OfRangeAnd) else { return refused(libc::ENOSYS) };
    // SAFETY: the caller's promise.
    let call = || unsafe { next(start, bytes, advice) };
    if range.start != start as u64 {
        return call();
    }
    match advice {
        libc::MADV_DONTNEED | libc::MADV_FREE | libc::MADV_DONTNEED_LOCKED | MADV_GUARD_INSTALL => {
            if advice == MADV_GUARD_INSTALL {
                merge::leave(range);
            }
            between_merges(range, |merger| {
                let answer = if zero(range) { call() } else { refused(libc::ENOMEM) };
                if let Some(merger) = merger {
                    keeping_errno(|| merger.forget(range));
                }
                answer
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
            merge::leave(range);
            call()
        }
        _ => call(),
    }
}

/// mprotect(2).
///
/// # Safety
/// As its manual says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mprotect(start: *mut c_void, bytes: usize, access: c_int) -> c_int {
    let Some(next) = next_mprotect() else { return refused(libc::ENOSYS) };
    let range = whole(start, bytes);
    // Freed, it would be spare as it is.
    if let Some(mut blocks) = BLOCKS.lock() {
        for block in blocks.touching(range).into_iter().filter(|block| block.heap && block.state == State::New) {
            blocks.set(block, State::Left);
        }
    }
    // SAFETY: the caller's promise.
    between_merges(range, |_| unsafe { next(start, bytes, access) })
}

/// pkey_mprotect(2).
///
/// # Safety
/// As its manual says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkey_mprotect(start: *mut c_void, bytes: usize, access: c_int, key: c_int) -> c_int {
    merge::leave(whole(start, bytes));
    match next!(c"pkey_mprotect", unsafe extern "C" fn(*mut c_void, usize, c_int, c_int) -> c_int) {
        // SAFETY: the caller's promise.
        Some(next) => unsafe { next(start, bytes, access, key) },
        None => refused(libc::ENOSYS),
    }
}

/// mlock(2).
///
/// # Safety
/// As its manual says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock(start: *mut c_void, bytes: usize) -> c_int {
    merge::leave(whole(start, bytes));
    match next!(c"mlock", OfRange) {
        // SAFETY: the caller's promise.
        Some(next) => unsafe { next(start, bytes) },
        None => refused(libc::ENOSYS),
    }
}

/// mlock2(2).
///
/// # Safety
/// As its manual says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock2(start: *mut c_void, bytes: usize, flags: c_uint) -> c_int {
    merge::leave(whole(start, bytes));
    match next!(c"mlock2", unsafe extern "C" fn(*mut c_void, usize, c_uint) -> c_int) {
        // SAFETY: the caller's promise.
        Some(next) => unsafe { next(start, bytes, flags) },
        None => refused(libc::ENOSYS),
    }
}

/// mlockall(2).
#[unsafe(no_mangle)]
pub extern "C" fn mlockall(flags: c_int) -> c_int {
    if settings::settings().is_some() {
        merge::give_up("it locks all of its memory (mlockall)");
    }
    match next!(c"mlockall", unsafe extern "C" fn(c_int) -> c_int) {
        // SAFETY: any flags may be given.
        Some(next) => unsafe { next(flags) },
        None => refused(libc::ENOSYS),
    }
}

/// pthread_attr_setstack(3). A stack that the program brings is not for merging: the kernel writes to it.
///
/// # Safety
/// As its manual says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_attr_setstack(attributes: *mut c_void, start: *mut c_void, bytes: usize) -> c_int {
    merge::leave(whole(start, bytes));
    match next!(c"pthread_attr_setstack", unsafe extern "C" fn(*mut c_void, *mut c_void, usize) -> c_int) {
        // SAFETY: the caller's promise.
        Some(next) => unsafe { next(attributes, start, bytes) },
        None => libc::EINVAL,
    }
}

/// close_range(2), which waits for the merge in hand: it uses descriptors of its own.
#[unsafe(no_mangle)]
pub extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let next = next!(c"close_range", unsafe extern "C" fn(c_uint, c_uint, c_int) -> c_int);
    let _held = MERGER.lock();
    match next {
        // SAFETY: any numbers may be given.
        Some(next) => unsafe { next(first, last, flags) },
        None => refused(libc::ENOSYS),
    }
}

/// closefrom(3), as for [`close_range`].
#[unsafe(no_mangle)]
pub extern "C" fn closefrom(first: c_int) {
    let next = next!(c"closefrom", unsafe extern "C" fn(c_int));
    let _held = MERGER.lock();
    if let Some(next) = next {
        // SAFETY: any number may be given.
        unsafe { next(first) };
    }
}
