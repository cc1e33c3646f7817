//! The C interface, `include/pagefold.h`: each function checks its pointers, calls the engine, and keeps the reason of
//! a failure for `pagefold_error`. No panic crosses into C.
//!
//! A structure that a caller has filled in may be of an older or a newer version than this library, and smaller or
//! larger: the caller says its size ([`fill`]). Such structures only grow at their end, hold words alone, and no other
//! structure.

use crate::{Advice, Background, Engine, JOBS, Merged, Options, RegionStanding, Standing, of_job};
use pagefold_base::AddressRange;
use pagefold_base::engine::Domain;
use std::cell::RefCell;
use std::ffi::{CStr, CString, OsStr, c_char, c_double, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

/// `pagefold_options`.
#[repr(C)]
pub struct pagefold_options {
    size: usize,
    root: *const c_char,
    max_slowdown: c_double,
    threads: c_uint,
    per_node: c_int,
    lifetime: c_double,
    merge_while_pinned: c_int,
    split_huge_pages: c_int,
}

/// `pagefold_merged`.
#[repr(C)]
pub struct pagefold_merged {
    looked_at: u64,
    zeros: u64,
    merged: u64,
    retried: u64,
    stored: u64,
    runs: u64,
    not_worth: u64,
    broken: u64,
    short_lived: u64,
    read: u64,
    left_alone: u64,
    failed: u64,
    cut_short: u64,
    held_up: u64,
    nanoseconds: u64,
}

/// `pagefold_standing`.
#[repr(C)]
pub struct pagefold_standing {
    pages: u64,
    merged: u64,
    zeros: u64,
    hot: u64,
    store: u64,
    pinned: u64,
    mappings: u64,
    notes: u64,
    merges: u64,
    elapsed: u64,
    spent: u64,
}

/// `pagefold_region`.
#[repr(C)]
pub struct pagefold_region {
    memory: *mut c_void,
    bytes: usize,
    merged: u64,
    zeros: u64,
    hot: u64,
    saved: i64,
}

/// `pagefold_domain`.
#[repr(C)]
pub struct pagefold_domain {
    members: u64,
    pages: u64,
    merged: u64,
    zeros: u64,
    hot: u64,
    stored: u64,
    saved: i64,
    index: u64,
    overhead: u64,
}

impl From<Merged> for pagefold_merged {
    fn from(merged: Merged) -> Self {
        Self {
            looked_at: merged.looked_at.0,
            zeros: merged.zeros.0,
            merged: merged.merged.0,
            retried: merged.retried.0,
            stored: merged.stored.0,
            runs: merged.runs,
            not_worth: merged.not_worth.0,
            broken: merged.broken.0,
            short_lived: merged.short_lived.0,
            read: merged.read.0,
            left_alone: merged.left_alone.0,
            failed: merged.failed.0,
            cut_short: merged.cut_short,
            held_up: merged.held_up,
            nanoseconds: merged.time.as_nanos() as u64,
        }
    }
}

impl From<Standing> for pagefold_standing {
    fn from(standing: Standing) -> Self {
        Self {
            pages: standing.pages.0,
            merged: standing.merged.0,
            zeros: standing.zeros.0,
            hot: standing.hot.0,
            store: standing.store.0,
            pinned: standing.pinned.0,
            mappings: standing.mappings,
            notes: standing.notes.0,
            merges: standing.merges,
            elapsed: standing.spending.elapsed.as_nanos() as u64,
            spent: standing.spending.spent.as_nanos() as u64,
        }
    }
}

impl From<RegionStanding> for pagefold_region {
    fn from(region: RegionStanding) -> Self {
        Self {
            memory: ptr::with_exposed_provenance_mut(region.range.start as usize),
            bytes: region.range.bytes().0 as usize,
            merged: region.tally.merged.0,
            zeros: region.tally.zeros.0,
            hot: region.tally.hot.0,
            saved: region.saved.0,
        }
    }
}

impl From<Domain> for pagefold_domain {
    fn from(domain: Domain) -> Self {
        let sum = domain.tally();
        Self {
            members: domain.members.len() as u64,
            pages: sum.pages.0,
            merged: sum.merged.0,
            zeros: sum.zeros.0,
            hot: sum.hot.0,
            stored: domain.stored.0,
            saved: domain.saved_by_all().0,
            index: domain.index.0,
            overhead: domain.overhead().0,
        }
    }
}

thread_local! {
    static WHY: RefCell<CString> = RefCell::default();
}

/// Keep why something failed.
fn keep(why: &str) {
    let why = CString::new(why.replace('\0', "?")).unwrap_or_default();
    WHY.with(|kept| kept.replace(why));
}

/// Do something whose failure is told.
fn told<T>(work: impl FnOnce() -> Result<T, String>) -> Option<T> {
    let done = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err("a defect in pagefold: it panicked".into()));
    done.inspect_err(|why| keep(why)).ok()
}

/// An error with all its causes.
fn chain(error: crate::Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

fn status(done: Option<()>) -> c_int {
    if done.is_some() { 0 } else { -1 }
}

/// Call an engine that may be null.
///
/// # Safety
/// `engine` is null or of `pagefold_join`, and was not left.
unsafe fn call<T>(engine: *const Engine, work: impl FnOnce(&Engine) -> Result<T, crate::Error>) -> Option<T> {
    // SAFETY: the caller's promise.
    let engine = unsafe { engine.as_ref() };
    told(|| work(engine.ok_or("engine is NULL")?).map_err(chain))
}

fn range(memory: *mut c_void, bytes: usize) -> AddressRange {
    let start = memory.expose_provenance() as u64;
    AddressRange { start, end: start.saturating_add(bytes as u64) }
}

/// See `pagefold.h`.
///
/// # Safety
/// `domain` is null or a string; `options` is null or of the size it says, and its root null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_join(domain: *const c_char, options: *const pagefold_options) -> *mut Engine {
    let joined = told(|| {
        let name = if domain.is_null() {
            let nameless = || format!("domain is NULL, and this is no rank of an MPI job ({})", JOBS.join(", "));
            of_job().ok_or_else(nameless)?
        } else {
            // SAFETY: not null, so a string by the caller's promise.
            let name = unsafe { CStr::from_ptr(domain) }.to_str();
            name.map_err(|_| "domain is no UTF-8".to_owned())?.to_owned()
        };
        let given = options;
        let mut options = Options::default();
        if !given.is_null() {
            // SAFETY: not null, so of the size it says, by the caller's promise, which is in its first word.
            if unsafe { given.cast::<usize>().read() } != size_of::<pagefold_options>() {
                return Err("options are of another version: begin with PAGEFOLD_OPTIONS_INIT".to_owned());
            }
            // SAFETY: it is of the size of the type, so all of it may be read.
            let given = unsafe { &*given };
            options.max_slowdown = (given.max_slowdown >= 0.0).then_some(given.max_slowdown);
            options.lifetime = Duration::try_from_secs_f64(given.lifetime)
                .map_err(|error| format!("a lifetime of {} s: {error}", given.lifetime))?;
            options.threads = given.threads as usize;
            options.per_node = given.per_node != 0;
            options.merge_while_pinned = given.merge_while_pinned != 0;
            options.split_huge_pages = given.split_huge_pages != 0;
            if !given.root.is_null() {
                // SAFETY: not null, so a string by the caller's promise.
                let root = unsafe { CStr::from_ptr(given.root) };
                options.root = Some(OsStr::from_bytes(root.to_bytes()).into());
            }
        }
        Engine::join(&name, &options).map_err(chain)
    });
    joined.map_or(ptr::null_mut(), |engine| Arc::into_raw(Arc::new(engine)).cast_mut())
}

/// See `pagefold.h`.
///
/// # Safety
/// `engine` is null or of `pagefold_join`, was not left, and no other thread uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_leave(engine: *mut Engine) {
    if !engine.is_null() {
        // SAFETY: it was made by `Arc::into_raw`, and nobody uses it any more but a thread that has its own.
        let engine = unsafe { Arc::from_raw(engine) };
        told(|| {
            drop(engine);
            Ok(())
        });
    }
}

/// See `pagefold.h`.
///
/// # Safety
/// `engine` is null or of `pagefold_join`, and was not left.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_allocate(engine: *mut Engine, bytes: usize) -> *mut c_void {
    // SAFETY: the caller's promise.
    let start = unsafe {
        call(engine, |engine| {
            let region = engine.allocate(bytes)?;
            let start = region.range().start;
            std::mem::forget(region);
            Ok(start)
        })
    };
    start.map_or(ptr::null_mut(), |start| ptr::with_exposed_provenance_mut(start as usize))
}

/// See `pagefold.h`.
///
/// # Safety
/// As for `pagefold_allocate`; the memory is of that, and no longer used.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_free(engine: *mut Engine, memory: *mut c_void, bytes: usize) -> c_int {
    let bytes = bytes.checked_next_multiple_of(rustix::param::page_size()).unwrap_or(bytes);
    // SAFETY: the caller's promise.
    let free = |engine: &Engine| unsafe { engine.release(range(memory, bytes)) };
    // SAFETY: the caller's promise.
    status(unsafe { call(engine, free) })
}

/// See `pagefold.h`.
///
/// # Safety
/// As for `pagefold_allocate`, and what `Engine::adopt` asks for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_adopt(engine: *mut Engine, memory: *mut c_void, bytes: usize) -> c_int {
    // SAFETY: the caller's promise.
    let adopt = |engine: &Engine| unsafe { engine.adopt(range(memory, bytes)) };
    // SAFETY: the caller's promise.
    status(unsafe { call(engine, adopt) })
}

/// See `pagefold.h`.
///
/// # Safety
/// As for `pagefold_allocate`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_forsake(engine: *mut Engine, memory: *mut c_void, bytes: usize) -> c_int {
    // SAFETY: the caller's promise.
    status(unsafe { call(engine, |engine| engine.forsake(range(memory, bytes))) })
}

/// See `pagefold.h`.
///
/// # Safety
/// As for `pagefold_allocate`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_advise(
    engine: *mut Engine,
    memory: *mut c_void,
    bytes: usize,
    advice: c_int,
) -> c_int {
    let advice = match advice {
        0 => Advice::Mergeable,
        1 => Advice::Unmergeable,
        2 => Advice::Hot,
        _ => {
            keep("this version knows no such advice");
            return -1;
        }
    };
    // SAFETY: the caller's promise.
    status(unsafe { call(engine, |engine| engine.advise(range(memory, bytes), advice)) })
}

/// See `pagefold.h`.
///
/// # Safety
/// As for `pagefold_allocate`, and nobody needs what is in the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_clear(engine: *mut Engine, memory: *mut c_void, bytes: usize) -> c_int {
    // SAFETY: the caller's promise.
    let clear = |engine: &Engine| unsafe { engine.clear(range(memory, bytes)) };
    // SAFETY: the caller's promise.
    status(unsafe { call(engine, clear) })
}

/// See `pagefold.h`.
///
/// # Safety
/// As for `pagefold_allocate`, and what `Engine::merge` asks for; `merged` is null or so many
/// bytes to be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_merge_sized(engine: *mut Engine, merged: *mut pagefold_merged, size: usize) -> c_int {
    if !is_size_of(merged, size) {
        return -1;
    }
    // SAFETY: the caller's promise.
    let merge = |engine: &Engine| unsafe { engine.merge() };
    // SAFETY: the caller's promise.
    let done = unsafe { call(engine, merge) };
    // SAFETY: the caller's promise.
    unsafe { fill(done, merged, size) }
}

/// See `pagefold.h`.
///
/// # Safety
/// As for `pagefold_allocate`, and what `Engine::merge_while_running` asks for; `merged` is null or so many
/// bytes to be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_merge_while_running_sized(
    engine: *mut Engine,
    merged: *mut pagefold_merged,
    size: usize,
) -> c_int {
    if !is_size_of(merged, size) {
        return -1;
    }
    // SAFETY: the caller's promise.
    let merge = |engine: &Engine| unsafe { engine.merge_while_running() };
    // SAFETY: the caller's promise.
    let done = unsafe { call(engine, merge) };
    // SAFETY: the caller's promise.
    unsafe { fill(done, merged, size) }
}

/// The largest structure of a caller that is believed.
const LARGEST_STRUCTURE: usize = 4096;

/// Whether a caller's structure is null or has a size that a version of it may have; otherwise the reason is kept.
fn is_size_of<T>(structure: *mut T, size: usize) -> bool {
    let sizes = size_of::<u64>()..=LARGEST_STRUCTURE;
    let sound = structure.is_null() || (sizes.contains(&size) && size.is_multiple_of(size_of::<u64>()));
    if !sound {
        keep(&format!("{size} is no size of the structure to fill in: pass sizeof of it"));
    }
    sound
}

/// Fill a caller's structure in, unless it is null or there is nothing to tell: as much as its version has of this one,
/// and zeros in what this one does not have.
///
/// # Safety
/// `structure` is null or so many bytes to be written.
unsafe fn fill<V: Into<T>, T>(value: Option<V>, structure: *mut T, size: usize) -> c_int {
    let told = status(value.as_ref().map(|_| ()));
    if let Some(value) = value
        && !structure.is_null()
    {
        let (value, bytes): (T, _) = (value.into(), structure.cast::<u8>());
        let known = size.min(size_of::<T>());
        // SAFETY: both have so many bytes, and the value is nobody else's.
        unsafe { ptr::copy_nonoverlapping((&raw const value).cast::<u8>(), bytes, known) };
        // SAFETY: the caller's promise.
        let rest = unsafe { bytes.add(known) };
        // SAFETY: as above.
        unsafe { rest.write_bytes(0, size - known) };
    }
    told
}

/// See `pagefold.h`.
///
/// # Safety
/// As for `pagefold_allocate`, and what `Engine::merge_in_background` asks for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_merge_in_background(engine: *mut Engine, share: c_double) -> *mut Background {
    let begin = |known: &Engine| {
        let engine = ptr::from_ref(known);
        // SAFETY: it was made by `Arc::into_raw`, and is there while it was not left.
        unsafe { Arc::increment_strong_count(engine) };
        // SAFETY: as above; this is the reference that was just counted.
        let engine = unsafe { Arc::from_raw(engine) };
        // SAFETY: the caller's promise.
        unsafe { engine.merge_in_background(share) }
    };
    // SAFETY: the caller's promise.
    let background = unsafe { call(engine, begin) };
    background.map_or(ptr::null_mut(), |background| Box::into_raw(Box::new(background)))
}

/// See `pagefold.h`.
///
/// # Safety
/// `background` is null or of `pagefold_merge_in_background`, and was not ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_end_background(background: *mut Background) -> c_int {
    if background.is_null() {
        return 0;
    }
    // SAFETY: it was made by `Box::into_raw`, and nobody uses it any more.
    let background = unsafe { Box::from_raw(background) };
    status(told(|| background.wait(0, Duration::ZERO).map(|_| ()).map_err(chain)))
}

/// See `pagefold.h`.
///
/// # Safety
/// As for `pagefold_allocate`; `standing` is to be written, so many bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_standing_of_sized(
    engine: *mut Engine,
    standing: *mut pagefold_standing,
    size: usize,
) -> c_int {
    if standing.is_null() {
        keep("standing is NULL");
        return -1;
    }
    if !is_size_of(standing, size) {
        return -1;
    }
    // SAFETY: the caller's promise.
    let found = unsafe { call(engine, Engine::standing) };
    // SAFETY: the caller's promise.
    unsafe { fill(found, standing, size) }
}

/// See `pagefold.h`.
///
/// # Safety
/// As for `pagefold_allocate`; `merged` is to be written, so many bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_so_far_of_sized(
    engine: *mut Engine,
    merged: *mut pagefold_merged,
    size: usize,
) -> c_int {
    if merged.is_null() {
        keep("merged is NULL");
        return -1;
    }
    if !is_size_of(merged, size) {
        return -1;
    }
    // SAFETY: the caller's promise.
    let found = unsafe { call(engine, |engine| Ok(engine.standing()?.so_far)) };
    // SAFETY: the caller's promise.
    unsafe { fill(found, merged, size) }
}

/// See `pagefold.h`.
///
/// # Safety
/// As for `pagefold_allocate`; `count` is to be read and written, and so many `regions`, of so many bytes each, to be
/// written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_regions_of_sized(
    engine: *mut Engine,
    regions: *mut pagefold_region,
    count: *mut usize,
    size: usize,
) -> c_int {
    if count.is_null() {
        keep("count is NULL");
        return -1;
    }
    if !is_size_of(regions, size) {
        return -1;
    }
    // SAFETY: the caller's promise.
    let found = unsafe { call(engine, Engine::regions) };
    let Some(found) = found else { return -1 };
    let all = found.len();
    // SAFETY: not null, so to be read, by the caller's promise.
    let room = if regions.is_null() { 0 } else { unsafe { count.read() } };
    for (at, region) in found.into_iter().take(room).enumerate() {
        // SAFETY: there is room for more than `at` of them, of that size, by the caller's promise.
        let place = unsafe { regions.cast::<u8>().add(at * size) };
        // SAFETY: it is to be written, by the caller's promise.
        unsafe { fill(Some(region), place.cast::<pagefold_region>(), size) };
    }
    // SAFETY: not null, so to be written, by the caller's promise.
    unsafe { count.write(all) };
    0
}

/// See `pagefold.h`.
///
/// # Safety
/// As for `pagefold_allocate`; `domain` is to be written, so many bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_domain_of_sized(
    engine: *mut Engine,
    domain: *mut pagefold_domain,
    size: usize,
) -> c_int {
    if domain.is_null() {
        keep("domain is NULL");
        return -1;
    }
    if !is_size_of(domain, size) {
        return -1;
    }
    // SAFETY: the caller's promise.
    let found = unsafe { call(engine, Engine::domain) };
    // SAFETY: the caller's promise.
    unsafe { fill(found, domain, size) }
}

/// See `pagefold.h`.
#[unsafe(no_mangle)]
pub extern "C" fn pagefold_error() -> *const c_char {
    WHY.with(|kept| kept.borrow().as_ptr())
}
