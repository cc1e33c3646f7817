//! The functions that this library replaces, as the next library in the lookup order defines them, usually the C
//! library.
//!
//! Each is looked up at its first call, because programs allocate before any initializer has run. Functions that are
//! called while a lock is held are looked up in the initializer at the latest. Memory that the loader allocates during
//! a lookup comes from a small arena, and is never freed.

use std::alloc::{GlobalAlloc, Layout};
use std::cell::{Cell, UnsafeCell};
use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

/// The function of the next library with a name, of a type; `None` if there is none.
macro_rules! next {
    ($name:literal, $type:ty) => {{
        static FOUND: std::sync::atomic::AtomicPtr<std::ffi::c_void> =
            std::sync::atomic::AtomicPtr::new(std::ptr::null_mut());
        // SAFETY: any library that defines a function of this name gives it this type, according to its documentation;
        // null is `None`.
        unsafe { std::mem::transmute::<*mut std::ffi::c_void, Option<$type>>($crate::next::find(&FOUND, $name)) }
    }};
}
pub(crate) use next;

thread_local! {
    /// How many nested lookups this thread is in. A library that is loaded with the program has this variable without
    /// allocating it.
    static LOOKUP_DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// A number that distinguishes the calling thread from other live threads.
pub fn this_thread() -> usize {
    // SAFETY: the call only reads a register.
    unsafe { libc::pthread_self() as usize }
}

/// Look up a function, once.
pub fn find(cache: &AtomicPtr<c_void>, name: &'static CStr) -> *mut c_void {
    let cached_address = cache.load(Ordering::Relaxed);
    if !cached_address.is_null() {
        return cached_address;
    }
    LOOKUP_DEPTH.set(LOOKUP_DEPTH.get() + 1);
    // SAFETY: the name ends in NUL; the call only looks up a symbol.
    let address = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    if address.is_null() {
        clear_dlerror();
    }
    LOOKUP_DEPTH.set(LOOKUP_DEPTH.get() - 1);
    cache.store(address, Ordering::Relaxed);
    address
}

/// Clear the loader's error, so that the program does not see an error of this library.
pub fn clear_dlerror() {
    // SAFETY: the returned text is not used.
    unsafe { libc::dlerror() };
}

/// Whether malloc(3) is this library's, and the next one is the C library's.
pub fn has_libc_malloc_next() -> bool {
    // SAFETY: the name ends in NUL; the call only looks up a symbol.
    let next = unsafe { libc::dlsym(libc::RTLD_NEXT, c"malloc".as_ptr()) };
    resolves_to_this_library(c"malloc") && ptr::eq(next, __libc_malloc as *const c_void)
}

/// Whether the program finds this library's function by a name. If a program at a fixed address compares the address of
/// the function, that address is the program's own jump to it (the System V ABI has an undefined symbol with a value
/// for that). The jump leads to the first library in the lookup order.
pub fn resolves_to_this_library(name: &CStr) -> bool {
    let (info, is_jump) = library_at_address(function_called_by(name));
    is_jump || info.dli_fbase == library_at_address(LOADER_ARENA.0.get().cast()).0.dli_fbase
}

/// The path of the library, or of the program, whose function the program finds by a name.
pub fn library_providing(name: &CStr) -> String {
    let path = library_at_address(function_called_by(name)).0.dli_fname;
    if path.is_null() {
        return "another library".to_owned();
    }
    // SAFETY: the path ends in NUL, and is there while the library is loaded.
    unsafe { CStr::from_ptr(path) }.to_string_lossy().into_owned()
}

/// The function that the program calls by a name.
fn function_called_by(name: &CStr) -> *const c_void {
    // SAFETY: the name ends in NUL; the call only looks up a symbol.
    unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }
}

/// The library that contains an address, and whether that address is a symbol that the library does not define.
fn library_at_address(address: *const c_void) -> (libc::Dl_info, bool) {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    let mut symbol: *const libc::Elf64_Sym = ptr::null();
    let symbol_output = (&raw mut symbol).cast::<*mut c_void>();
    // SAFETY: both are valid for writes, the second as the flag says; any address is allowed.
    unsafe { dladdr1(address, info.as_mut_ptr(), symbol_output, RTLD_DL_SYMENT) };
    // SAFETY: the pointer is null, or points into the symbol table of a loaded library.
    let is_undefined = unsafe { symbol.as_ref() }.is_some_and(|symbol| symbol.st_shndx == SHN_UNDEF);
    // SAFETY: all zeros is a valid value, too.
    (unsafe { info.assume_init() }, is_undefined)
}

/// From dlfcn.h and elf.h of glibc.
const RTLD_DL_SYMENT: c_int = 1;
const SHN_UNDEF: u16 = 0;

unsafe extern "C" {
    fn dladdr1(address: *const c_void, info: *mut libc::Dl_info, extra: *mut *mut c_void, flags: c_int) -> c_int;
}

/// Whether the calling thread is looking up a function.
pub fn is_in_lookup() -> bool {
    LOOKUP_DEPTH.get() > 0
}

const ARENA_BYTES: usize = 1 << 16;

/// Memory for the loader.
#[repr(align(64))]
struct LoaderArena(UnsafeCell<[u8; ARENA_BYTES]>);

// SAFETY: each byte is given to one caller, as [`LOADER_ARENA_USED`] counts.
unsafe impl Sync for LoaderArena {}

static LOADER_ARENA: LoaderArena = LoaderArena(UnsafeCell::new([0; ARENA_BYTES]));
static LOADER_ARENA_USED: AtomicUsize = AtomicUsize::new(0);

fn from_arena(bytes: usize) -> *mut c_void {
    let bytes = bytes.next_multiple_of(16);
    let offset = LOADER_ARENA_USED.fetch_add(bytes, Ordering::Relaxed);
    if offset.saturating_add(bytes) > ARENA_BYTES {
        ptr::null_mut()
    } else {
        LOADER_ARENA.0.get().cast::<u8>().wrapping_add(offset).cast()
    }
}

fn is_in_arena(pointer: *mut c_void) -> bool {
    (pointer as usize).wrapping_sub(LOADER_ARENA.0.get() as usize) < ARENA_BYTES
}

type MallocFn = unsafe extern "C" fn(usize) -> *mut c_void;
type CallocFn = unsafe extern "C" fn(usize, usize) -> *mut c_void;
type ReallocFn = unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void;
type FreeFn = unsafe extern "C" fn(*mut c_void);
type MemalignFn = unsafe extern "C" fn(usize, usize) -> *mut c_void;
type PosixMemalignFn = unsafe extern "C" fn(*mut *mut c_void, usize, usize) -> c_int;
type UsableSizeFn = unsafe extern "C" fn(*mut c_void) -> usize;

/// malloc(3) of the next library.
pub fn malloc(bytes: usize) -> *mut c_void {
    if is_in_lookup() {
        return from_arena(bytes);
    }
    match next!(c"malloc", MallocFn) {
        // SAFETY: any size is allowed.
        Some(malloc) => unsafe { malloc(bytes) },
        None => ptr::null_mut(),
    }
}

/// calloc(3) of the next library.
pub fn calloc(count: usize, bytes: usize) -> *mut c_void {
    if is_in_lookup() {
        // The arena is zeros, and no byte of it is given out twice.
        return count.checked_mul(bytes).map_or(ptr::null_mut(), from_arena);
    }
    match next!(c"calloc", CallocFn) {
        // SAFETY: any size is allowed.
        Some(calloc) => unsafe { calloc(count, bytes) },
        None => ptr::null_mut(),
    }
}

/// realloc(3) of the next library.
///
/// # Safety
/// The pointer is null or from one of these functions, and is not used afterwards.
pub unsafe fn realloc(pointer: *mut c_void, bytes: usize) -> *mut c_void {
    if is_in_arena(pointer) {
        let new = malloc(bytes);
        if !new.is_null() {
            let max_bytes = LOADER_ARENA.0.get() as usize + ARENA_BYTES - pointer as usize;
            // SAFETY: within the arena, and within the new memory; the old length is not known.
            unsafe { ptr::copy_nonoverlapping(pointer.cast::<u8>(), new.cast::<u8>(), bytes.min(max_bytes)) };
        }
        return new;
    }
    match next!(c"realloc", ReallocFn) {
        // SAFETY: the caller's promise.
        Some(realloc) => unsafe { realloc(pointer, bytes) },
        None => ptr::null_mut(),
    }
}

/// free(3) of the next library.
///
/// # Safety
/// As for [`realloc`].
pub unsafe fn free(pointer: *mut c_void) {
    // Memory that the loader frees during a lookup, such as an error's text, is not freed.
    if is_in_arena(pointer) || is_in_lookup() {
        return;
    }
    if let Some(free) = next!(c"free", FreeFn) {
        // SAFETY: the caller's promise.
        unsafe { free(pointer) };
    }
}

/// memalign(3) of the next library.
pub fn memalign(alignment: usize, bytes: usize) -> *mut c_void {
    match next!(c"memalign", MemalignFn) {
        // SAFETY: the function refuses an invalid alignment.
        Some(memalign) => unsafe { memalign(alignment, bytes) },
        None => ptr::null_mut(),
    }
}

/// posix_memalign(3) of the next library.
///
/// # Safety
/// `into` is valid for writes.
pub unsafe fn posix_memalign(into: *mut *mut c_void, alignment: usize, bytes: usize) -> c_int {
    match next!(c"posix_memalign", PosixMemalignFn) {
        // SAFETY: the caller's promise; the function refuses an invalid alignment.
        Some(posix_memalign) => unsafe { posix_memalign(into, alignment, bytes) },
        None => libc::ENOMEM,
    }
}

/// malloc_usable_size(3) of the next library.
///
/// # Safety
/// The pointer is null or from one of these functions.
pub unsafe fn usable_size(pointer: *mut c_void) -> usize {
    match next!(c"malloc_usable_size", UsableSizeFn) {
        // SAFETY: the caller's promise.
        Some(usable) if !is_in_arena(pointer) => unsafe { usable(pointer) },
        _ => 0,
    }
}

/// The allocator for this library's own memory: the C library's heap, for any allocator of the program. The program's
/// own allocator may take its memory from mmap(2), and so from blocks, to which no merge may write.
struct OwnAllocator;

unsafe extern "C" {
    fn __libc_malloc(bytes: usize) -> *mut c_void;
    fn __libc_memalign(alignment: usize, bytes: usize) -> *mut c_void;
    fn __libc_free(pointer: *mut c_void);
}

/// The minimum alignment of malloc(3).
const MALLOC_ALIGNMENT: usize = 16;

// SAFETY: these functions of glibc form an allocator.
unsafe impl GlobalAlloc for OwnAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.align() <= MALLOC_ALIGNMENT {
            // SAFETY: any size is allowed.
            unsafe { __libc_malloc(layout.size()) }.cast()
        } else {
            // SAFETY: the alignment is a power of two.
            unsafe { __libc_memalign(layout.align(), layout.size()) }.cast()
        }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, _: Layout) {
        // SAFETY: the pointer is from one of the two functions above.
        unsafe { __libc_free(pointer.cast()) };
    }
}

#[global_allocator]
static ALLOCATOR: OwnAllocator = OwnAllocator;
