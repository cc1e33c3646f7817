//! The C interface, `include/pagefold.h`. Each function checks its pointers, calls the engine, and stores the error
//! text for `pagefold_error`. No panic crosses into C.
//!
//! A structure from a caller may belong to an older or a newer version than this library, and so be smaller or larger:
//! the caller passes its size ([`fill_structure`]). Such structures grow only at their end, and contain only words and
//! no other structure.

use crate::{
    BackgroundMerger, Engine, EngineOptions, JOB_ID_VARIABLES, MemberStatus, MergeCounters, PageAdvice, RegionStatus,
    job_domain_name,
};
use pagefold_base::AddressRange;
use pagefold_base::engine::EngineDomain;
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
    min_runtime: c_double,
    merge_while_pinned: c_int,
    split_huge_pages: c_int,
}

/// `pagefold_merge_counters`.
#[repr(C)]
pub struct pagefold_merge_counters {
    pages_scanned: u64,
    zeros_freed: u64,
    pages_merged: u64,
    unlikely_to_last: u64,
    contents_stored: u64,
    runs_mapped: u64,
    unprofitable: u64,
    cow_breaks: u64,
    early_cow_breaks: u64,
    zeros_read: u64,
    backed_off: u64,
    pages_failed: u64,
    incomplete_merges: u64,
    blocked_merges: u64,
    program_time_ns: u64,
}

/// `pagefold_member_status`.
#[repr(C)]
pub struct pagefold_member_status {
    pages: u64,
    merged: u64,
    zeros: u64,
    rewritten_pages: u64,
    store_bytes: u64,
    pinned_bytes: u64,
    mapping_count: u64,
    note_bytes: u64,
    merge_count: u64,
    elapsed_ns: u64,
    overhead_ns: u64,
}

/// `pagefold_region_status`.
#[repr(C)]
pub struct pagefold_region_status {
    memory: *mut c_void,
    bytes: usize,
    merged: u64,
    zeros: u64,
    rewritten_pages: u64,
    saved_bytes: i64,
}

/// `pagefold_domain_status`.
#[repr(C)]
pub struct pagefold_domain_status {
    members: u64,
    pages: u64,
    merged: u64,
    zeros: u64,
    rewritten_pages: u64,
    stored_contents: u64,
    saved_bytes: i64,
    index_bytes: u64,
    overhead_bytes: u64,
}

impl From<MergeCounters> for pagefold_merge_counters {
    fn from(counters: MergeCounters) -> Self {
        Self {
            pages_scanned: counters.pages_scanned.0,
            zeros_freed: counters.zeros_freed.0,
            pages_merged: counters.pages_merged.0,
            unlikely_to_last: counters.unlikely_to_last.0,
            contents_stored: counters.contents_stored.0,
            runs_mapped: counters.runs_mapped,
            unprofitable: counters.unprofitable.0,
            cow_breaks: counters.cow_breaks.0,
            early_cow_breaks: counters.early_cow_breaks.0,
            zeros_read: counters.zeros_read.0,
            backed_off: counters.backed_off.0,
            pages_failed: counters.pages_failed.0,
            incomplete_merges: counters.incomplete_merges,
            blocked_merges: counters.blocked_merges,
            program_time_ns: counters.program_time.as_nanos() as u64,
        }
    }
}

impl From<MemberStatus> for pagefold_member_status {
    fn from(status: MemberStatus) -> Self {
        Self {
            pages: status.pages.0,
            merged: status.merged.0,
            zeros: status.zeros.0,
            rewritten_pages: status.rewritten_pages.0,
            store_bytes: status.store_bytes.0,
            pinned_bytes: status.pinned_bytes.0,
            mapping_count: status.mapping_count,
            note_bytes: status.note_bytes.0,
            merge_count: status.merge_count,
            elapsed_ns: status.time_use.elapsed.as_nanos() as u64,
            overhead_ns: status.time_use.spent.as_nanos() as u64,
        }
    }
}

impl From<RegionStatus> for pagefold_region_status {
    fn from(region: RegionStatus) -> Self {
        Self {
            memory: ptr::with_exposed_provenance_mut(region.range.start as usize),
            bytes: region.range.bytes().0 as usize,
            merged: region.tally.merged.0,
            zeros: region.tally.zeros.0,
            rewritten_pages: region.tally.rewritten_pages.0,
            saved_bytes: region.saved.0,
        }
    }
}

impl From<EngineDomain> for pagefold_domain_status {
    fn from(domain: EngineDomain) -> Self {
        let tally = domain.tally();
        Self {
            members: domain.members.len() as u64,
            pages: tally.pages.0,
            merged: tally.merged.0,
            zeros: tally.zeros.0,
            rewritten_pages: tally.rewritten_pages.0,
            stored_contents: domain.stored.0,
            saved_bytes: domain.saved_by_all().0,
            index_bytes: domain.index.0,
            overhead_bytes: domain.overhead().0,
        }
    }
}

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// Store the reason of a failure.
fn set_last_error(message: &str) {
    let text = CString::new(message.replace('\0', "?")).unwrap_or_default();
    LAST_ERROR.with(|error| error.replace(text));
}

/// Run `work` and store its error or panic.
fn keep_error<T>(work: impl FnOnce() -> Result<T, String>) -> Option<T> {
    let result =
        catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err("pagefold panicked: this is a bug".into()));
    result.inspect_err(|message| set_last_error(message)).ok()
}

/// The text of an error with all its causes.
fn error_chain(error: crate::Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

fn status_code(value: Option<()>) -> c_int {
    if value.is_some() { 0 } else { -1 }
}

/// Call an engine that may be null.
///
/// # Safety
/// `engine` is null or comes from `pagefold_join`, and was not passed to `pagefold_leave`.
unsafe fn call_engine<T>(engine: *const Engine, work: impl FnOnce(&Engine) -> Result<T, crate::Error>) -> Option<T> {
    // SAFETY: the caller's promise.
    let engine = unsafe { engine.as_ref() };
    keep_error(|| work(engine.ok_or("engine is NULL")?).map_err(error_chain))
}

fn address_range(memory: *mut c_void, bytes: usize) -> AddressRange {
    let start = memory.expose_provenance() as u64;
    AddressRange { start, end: start.saturating_add(bytes as u64) }
}

/// See `pagefold.h`.
///
/// # Safety
/// `domain` is null or a string; `options` is null or as large as its size field says, and its root is null or a
/// string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_join(domain: *const c_char, options: *const pagefold_options) -> *mut Engine {
    let engine = keep_error(|| {
        let name = if domain.is_null() {
            let no_job_error =
                || format!("domain is NULL, and this is not an MPI rank (no {})", JOB_ID_VARIABLES.join(", "));
            job_domain_name().ok_or_else(no_job_error)?
        } else {
            // SAFETY: not null, so a string by the caller's promise.
            let name = unsafe { CStr::from_ptr(domain) }.to_str();
            name.map_err(|_| "domain is not valid UTF-8".to_owned())?.to_owned()
        };
        let caller_options = options;
        let mut options = EngineOptions::default();
        if !caller_options.is_null() {
            // SAFETY: not null, so it starts with its size, by the caller's promise.
            if unsafe { caller_options.cast::<usize>().read() } != size_of::<pagefold_options>() {
                return Err(
                    "options have the size of another version: initialize them with PAGEFOLD_OPTIONS_INIT".to_owned()
                );
            }
            // SAFETY: it has the size of the type, so all of it may be read.
            let caller_options = unsafe { &*caller_options };
            options.max_slowdown = (caller_options.max_slowdown >= 0.0).then_some(caller_options.max_slowdown);
            options.min_runtime = Duration::try_from_secs_f64(caller_options.min_runtime)
                .map_err(|error| format!("min_runtime of {} s is invalid: {error}", caller_options.min_runtime))?;
            options.threads = caller_options.threads as usize;
            options.per_node = caller_options.per_node != 0;
            options.merge_while_pinned = caller_options.merge_while_pinned != 0;
            options.split_huge_pages = caller_options.split_huge_pages != 0;
            if !caller_options.root.is_null() {
                // SAFETY: not null, so a string by the caller's promise.
                let root = unsafe { CStr::from_ptr(caller_options.root) };
                options.root = Some(OsStr::from_bytes(root.to_bytes()).into());
            }
        }
        Engine::join(&name, &options).map_err(error_chain)
    });
    engine.map_or(ptr::null_mut(), |engine| Arc::into_raw(Arc::new(engine)).cast_mut())
}

/// See `pagefold.h`.
///
/// # Safety
/// `engine` is null or comes from `pagefold_join`, was not passed to `pagefold_leave`, and no other thread uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_leave(engine: *mut Engine) {
    if !engine.is_null() {
        // SAFETY: it was made by `Arc::into_raw`, and no thread uses it any more except one with its own reference.
        let engine = unsafe { Arc::from_raw(engine) };
        keep_error(|| {
            drop(engine);
            Ok(())
        });
    }
}

/// See `pagefold.h`.
///
/// # Safety
/// `engine` is null or comes from `pagefold_join`, and was not passed to `pagefold_leave`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_allocate(engine: *mut Engine, bytes: usize) -> *mut c_void {
    // SAFETY: the caller's promise.
    let start = unsafe {
        call_engine(engine, |engine| {
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
/// As for `pagefold_allocate`; the memory comes from that function, and is no longer used.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_free(engine: *mut Engine, memory: *mut c_void, bytes: usize) -> c_int {
    let bytes = bytes.checked_next_multiple_of(rustix::param::page_size()).unwrap_or(bytes);
    // SAFETY: the caller's promise.
    let free = |engine: &Engine| unsafe { engine.disown_and_unmap(address_range(memory, bytes)) };
    // SAFETY: the caller's promise.
    status_code(unsafe { call_engine(engine, free) })
}

/// See `pagefold.h`.
///
/// # Safety
/// As for `pagefold_allocate`, and as `Engine::adopt` requires.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_adopt(engine: *mut Engine, memory: *mut c_void, bytes: usize) -> c_int {
    // SAFETY: the caller's promise.
    let adopt = |engine: &Engine| unsafe { engine.adopt(address_range(memory, bytes)) };
    // SAFETY: the caller's promise.
    status_code(unsafe { call_engine(engine, adopt) })
}

/// See `pagefold.h`.
///
/// # Safety
/// As for `pagefold_allocate`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_disown(engine: *mut Engine, memory: *mut c_void, bytes: usize) -> c_int {
    // SAFETY: the caller's promise.
    status_code(unsafe { call_engine(engine, |engine| engine.disown(address_range(memory, bytes))) })
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
        0 => PageAdvice::Mergeable,
        1 => PageAdvice::Unmergeable,
        2 => PageAdvice::Rewritten,
        _ => {
            set_last_error(&format!("advice {advice} is unknown to this version"));
            return -1;
        }
    };
    // SAFETY: the caller's promise.
    status_code(unsafe { call_engine(engine, |engine| engine.advise(address_range(memory, bytes), advice)) })
}

/// See `pagefold.h`.
///
/// # Safety
/// As for `pagefold_allocate`, and the content of the memory is no longer needed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_clear(engine: *mut Engine, memory: *mut c_void, bytes: usize) -> c_int {
    // SAFETY: the caller's promise.
    let clear = |engine: &Engine| unsafe { engine.clear(address_range(memory, bytes)) };
    // SAFETY: the caller's promise.
    status_code(unsafe { call_engine(engine, clear) })
}

/// See `pagefold.h`.
///
/// # Safety
/// As for `pagefold_allocate`, and as `Engine::merge` requires; `counters` is null or writable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_merge_sized(
    engine: *mut Engine,
    counters: *mut pagefold_merge_counters,
    size: usize,
) -> c_int {
    if !is_plausible_size(counters, size) {
        return -1;
    }
    // SAFETY: the caller's promise.
    let merge = |engine: &Engine| unsafe { engine.merge() };
    // SAFETY: the caller's promise.
    let merged = unsafe { call_engine(engine, merge) };
    // SAFETY: the caller's promise.
    unsafe { fill_structure(merged, counters, size) }
}

/// See `pagefold.h`.
///
/// # Safety
/// As for `pagefold_allocate`, and as `Engine::merge_while_running` requires; `counters` is null or writable for `size`
/// bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_merge_while_running_sized(
    engine: *mut Engine,
    counters: *mut pagefold_merge_counters,
    size: usize,
) -> c_int {
    if !is_plausible_size(counters, size) {
        return -1;
    }
    // SAFETY: the caller's promise.
    let merge = |engine: &Engine| unsafe { engine.merge_while_running() };
    // SAFETY: the caller's promise.
    let merged = unsafe { call_engine(engine, merge) };
    // SAFETY: the caller's promise.
    unsafe { fill_structure(merged, counters, size) }
}

/// Maximum plausible size of a caller's structure.
const MAX_STRUCTURE_BYTES: usize = 4096;

/// Whether a caller's structure is null or has a plausible size; otherwise the reason is stored.
fn is_plausible_size<T>(structure: *mut T, size: usize) -> bool {
    let plausible_sizes = size_of::<u64>()..=MAX_STRUCTURE_BYTES;
    let is_plausible =
        structure.is_null() || (plausible_sizes.contains(&size) && size.is_multiple_of(size_of::<u64>()));
    if !is_plausible {
        set_last_error(&format!("{size} is not a valid size of the structure: pass its sizeof"));
    }
    is_plausible
}

/// Fill in a caller's structure, unless it is null or there is no value. Copies the fields that both versions have, and
/// sets the caller's further fields to zero.
///
/// # Safety
/// `structure` is null or writable for `size` bytes.
unsafe fn fill_structure<V: Into<T>, T>(value: Option<V>, structure: *mut T, size: usize) -> c_int {
    let code = status_code(value.as_ref().map(|_| ()));
    if let Some(value) = value
        && !structure.is_null()
    {
        let (value, bytes): (T, _) = (value.into(), structure.cast::<u8>());
        let common_bytes = size.min(size_of::<T>());
        // SAFETY: both have so many bytes, and this function owns the value.
        unsafe { ptr::copy_nonoverlapping((&raw const value).cast::<u8>(), bytes, common_bytes) };
        // SAFETY: the caller's promise.
        let rest = unsafe { bytes.add(common_bytes) };
        // SAFETY: as above.
        unsafe { rest.write_bytes(0, size - common_bytes) };
    }
    code
}

/// See `pagefold.h`.
///
/// # Safety
/// As for `pagefold_allocate`, and as `Engine::merge_in_background` requires.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_merge_in_background(
    engine: *mut Engine,
    cpu_share: c_double,
) -> *mut BackgroundMerger {
    let start_merger = |engine_ref: &Engine| {
        let engine = ptr::from_ref(engine_ref);
        // SAFETY: it was made by `Arc::into_raw`, and exists until `pagefold_leave`.
        unsafe { Arc::increment_strong_count(engine) };
        // SAFETY: as above; this is the reference that was just counted.
        let engine = unsafe { Arc::from_raw(engine) };
        // SAFETY: the caller's promise.
        unsafe { engine.merge_in_background(cpu_share) }
    };
    // SAFETY: the caller's promise.
    let background = unsafe { call_engine(engine, start_merger) };
    background.map_or(ptr::null_mut(), |background| Box::into_raw(Box::new(background)))
}

/// See `pagefold.h`.
///
/// # Safety
/// `background` is null or comes from `pagefold_merge_in_background`, and was not ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_end_background(background: *mut BackgroundMerger) -> c_int {
    if background.is_null() {
        return 0;
    }
    // SAFETY: it was made by `Box::into_raw`, and no thread uses it any more.
    let background = unsafe { Box::from_raw(background) };
    status_code(keep_error(|| background.wait_for_merges(0, Duration::ZERO).map(|_| ()).map_err(error_chain)))
}

/// See `pagefold.h`.
///
/// # Safety
/// As for `pagefold_allocate`; `status` is writable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_get_member_status_sized(
    engine: *mut Engine,
    status: *mut pagefold_member_status,
    size: usize,
) -> c_int {
    if status.is_null() {
        set_last_error("status is NULL");
        return -1;
    }
    if !is_plausible_size(status, size) {
        return -1;
    }
    // SAFETY: the caller's promise.
    let member_status = unsafe { call_engine(engine, Engine::status) };
    // SAFETY: the caller's promise.
    unsafe { fill_structure(member_status, status, size) }
}

/// See `pagefold.h`.
///
/// # Safety
/// As for `pagefold_allocate`; `counters` is writable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_get_merge_totals_sized(
    engine: *mut Engine,
    counters: *mut pagefold_merge_counters,
    size: usize,
) -> c_int {
    if counters.is_null() {
        set_last_error("counters is NULL");
        return -1;
    }
    if !is_plausible_size(counters, size) {
        return -1;
    }
    // SAFETY: the caller's promise.
    let totals = unsafe { call_engine(engine, |engine| Ok(engine.status()?.totals)) };
    // SAFETY: the caller's promise.
    unsafe { fill_structure(totals, counters, size) }
}

/// See `pagefold.h`.
///
/// # Safety
/// As for `pagefold_allocate`; `count` is readable and writable, and `regions` is null or writable for `*count`
/// structures of `size` bytes each.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_get_region_statuses_sized(
    engine: *mut Engine,
    regions: *mut pagefold_region_status,
    count: *mut usize,
    size: usize,
) -> c_int {
    if count.is_null() {
        set_last_error("count is NULL");
        return -1;
    }
    if !is_plausible_size(regions, size) {
        return -1;
    }
    // SAFETY: the caller's promise.
    let statuses = unsafe { call_engine(engine, Engine::region_statuses) };
    let Some(statuses) = statuses else { return -1 };
    let region_count = statuses.len();
    // SAFETY: not null, so readable, by the caller's promise.
    let capacity = if regions.is_null() { 0 } else { unsafe { count.read() } };
    for (index, region) in statuses.into_iter().take(capacity).enumerate() {
        // SAFETY: by the caller's promise, the array holds more than `index` structures of that size.
        let structure = unsafe { regions.cast::<u8>().add(index * size) };
        // SAFETY: it is writable, by the caller's promise.
        unsafe { fill_structure(Some(region), structure.cast::<pagefold_region_status>(), size) };
    }
    // SAFETY: not null, so writable, by the caller's promise.
    unsafe { count.write(region_count) };
    0
}

/// See `pagefold.h`.
///
/// # Safety
/// As for `pagefold_allocate`; `status` is writable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagefold_get_domain_status_sized(
    engine: *mut Engine,
    status: *mut pagefold_domain_status,
    size: usize,
) -> c_int {
    if status.is_null() {
        set_last_error("status is NULL");
        return -1;
    }
    if !is_plausible_size(status, size) {
        return -1;
    }
    // SAFETY: the caller's promise.
    let domain_status = unsafe { call_engine(engine, Engine::domain_status) };
    // SAFETY: the caller's promise.
    unsafe { fill_structure(domain_status, status, size) }
}

/// See `pagefold.h`.
#[unsafe(no_mangle)]
pub extern "C" fn pagefold_error() -> *const c_char {
    LAST_ERROR.with(|error| error.borrow().as_ptr())
}
