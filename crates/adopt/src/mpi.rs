//! MPI: the points at which no rank computes, and the memory to which other processes or threads may write at any time.
//!
//! An MPI program is merged when its main thread returns from a barrier or an allreduce. Handles are passed on
//! unchanged, for any implementation: all arguments of these functions are words, and the called function uses as many
//! as it has. Fortran's names are those of gfortran and compatible compilers (`mpi_barrier_`, `mpi_barrier_f08_`).
//!
//! Some operations continue after the call has returned: a nonblocking receive, a window. Another process may write to
//! their memory at any time, even bypassing page tables. Blocks that such a call names are not merged from then on. The
//! same holds for memory that MPI allocates within the functions below, because its threads may write to that.
//!
//! Not seen:
//! - a buffer that a datatype with absolute addresses (`MPI_BOTTOM`) names, or that starts outside of blocks and
//!   reaches into one;
//! - descriptors of `mpi_f08` in MPICH (`MPI_Irecv_f08ts`), and Fortran's names for large counts (`MPI_Irecv_c_f08`);
//! - calls by a tool that intercepts MPI before this library, which is reported ([`function_of_tool`]);
//! - large memory that MPI allocates in other functions, such as the pool for a first message, if an MPI thread writes
//!   to it.

use crate::blocks::BLOCKS;
use crate::{merger, process_hooks, settings};
use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

/// As many words as the function with the most arguments takes (`MPI_Rget_accumulate` in Fortran).
type MpiArguments = [usize; 14];
type MpiFunction = unsafe extern "C" fn(
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
) -> c_int;

/// The buffer address is among this many first words, for all these functions (`MPI_Isendrecv`). If a function has
/// fewer arguments, the other words are arbitrary, and a block may be excluded without need.
const MAX_BUFFER_ARGUMENTS: usize = 6;

/// The return value if there is no MPI: no implementation uses it for success.
const NO_MPI: c_int = 16;

/// How many nested functions of MPI the main thread is in. Memory that is allocated there may belong to MPI's threads.
/// Only the main thread changes it.
static MPI_CALL_DEPTH: AtomicUsize = AtomicUsize::new(0);

/// Whether the program was linked with MPI.
pub fn is_linked() -> bool {
    static MPI_INITIALIZED: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    !crate::next::find(&MPI_INITIALIZED, c"MPI_Init").is_null()
}

/// A function of MPI that the program calls from another library, and that library: a tool that is linked with the
/// program, or preloaded before this library, and calls MPI by the profiling names (`PMPI_Barrier`).
pub fn function_of_tool() -> Option<String> {
    let lists = [BEGINNINGS, SAFE_POINTS, SAFE_POINTS_IN_C, HANDOVERS, HANDOVERS_IN_C, ALLOCATIONS, ALLOCATIONS_IN_C];
    let name = lists.concat().into_iter().find(|name| !crate::next::resolves_to_this_library(name))?;
    Some(format!("{} of {}", name.to_string_lossy(), crate::next::library_providing(name)))
}

/// Whether memory that this thread allocates now may become a block. In an MPI program only the main thread's may:
/// MPI's own threads write at any time.
pub fn may_adopt() -> bool {
    !process_hooks::is_merged_at_safe_points()
        || (process_hooks::is_main_thread() && MPI_CALL_DEPTH.load(Ordering::Relaxed) == 0)
}

/// Look up a function of MPI in the next library, or by its profiling name in any library that was loaded later with
/// local scope, as interpreters do.
fn find(cached_address: &AtomicPtr<c_void>, name: &'static CStr, profiling_name: &'static CStr) -> Option<MpiFunction> {
    let mut address = crate::next::find(cached_address, name);
    if address.is_null() {
        let mut search = SymbolSearch { name: profiling_name, address: ptr::null_mut() };
        // SAFETY: `find_in_library` takes the pointer that is passed here, whose target outlives the call.
        unsafe { libc::dl_iterate_phdr(Some(find_in_library), (&raw mut search).cast()) };
        crate::next::clear_dlerror();
        address = search.address;
        cached_address.store(address, Ordering::Relaxed);
    }
    // SAFETY: MPI has functions of words under these names; null is `None`.
    unsafe { std::mem::transmute::<*mut c_void, Option<MpiFunction>>(address) }
}

struct SymbolSearch {
    name: &'static CStr,
    address: *mut c_void,
}

/// Look up a symbol in one loaded library.
unsafe extern "C" fn find_in_library(library: *mut libc::dl_phdr_info, _: usize, search: *mut c_void) -> c_int {
    // SAFETY: the loader passes a valid pointer.
    let library = unsafe { &*library };
    // SAFETY: `find` passes a value that no other code uses during the call.
    let search = unsafe { &mut *search.cast::<SymbolSearch>() };
    // SAFETY: the library is loaded and the name is the loader's; this call loads nothing.
    let handle = unsafe { libc::dlopen(library.dlpi_name, libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return 0;
    }
    // SAFETY: the handle is of a library, and the name ends in NUL.
    search.address = unsafe { libc::dlsym(handle, search.name.as_ptr()) };
    // SAFETY: it was opened above; the code that loaded the library keeps it loaded.
    unsafe { libc::dlclose(handle) };
    c_int::from(!search.address.is_null())
}

/// Memory that is allocated within the call is MPI's.
fn on_memory_request(call: impl FnOnce() -> c_int, _: &MpiArguments) -> c_int {
    if !process_hooks::is_main_thread() {
        return call();
    }
    let depth = MPI_CALL_DEPTH.load(Ordering::Relaxed);
    MPI_CALL_DEPTH.store(depth + 1, Ordering::Relaxed);
    let result = call();
    MPI_CALL_DEPTH.store(depth, Ordering::Relaxed);
    result
}

/// MPI starts: from now on the process is merged at safe points.
fn on_init(call: impl FnOnce() -> c_int, arguments: &MpiArguments) -> c_int {
    // The Fortran function calls the C function.
    if settings::settings().is_none() || MPI_CALL_DEPTH.load(Ordering::Relaxed) > 0 {
        return call();
    }
    process_hooks::merge_at_safe_points_only();
    let was_single_threaded = process_hooks::thread_ids().len() == 1;
    let result = on_memory_request(call, arguments);
    merger::record_mpi_threads(was_single_threaded);
    result
}

/// When this returns, no rank computes.
fn on_synchronization(call: impl FnOnce() -> c_int, arguments: &MpiArguments) -> c_int {
    let result = on_memory_request(call, arguments);
    // The Fortran function calls the C function, and MPI calls its own functions.
    let is_outermost = MPI_CALL_DEPTH.load(Ordering::Relaxed) == 0;
    if is_outermost
        && settings::settings().is_some()
        && process_hooks::is_merged_at_safe_points()
        && process_hooks::is_main_thread()
    {
        merger::on_safe_point();
    }
    result
}

/// The buffer may be written after this call has returned.
fn on_buffer_handover(call: impl FnOnce() -> c_int, arguments: &MpiArguments) -> c_int {
    if settings::settings().is_some() {
        for &word in &arguments[..MAX_BUFFER_ARGUMENTS] {
            let buffer = BLOCKS.lock().map(|blocks| blocks.buffer_range(word as u64));
            buffer.into_iter().for_each(merger::exclude_blocks_in);
        }
    }
    on_memory_request(call, arguments)
}

/// Functions of MPI, with the code to run around them: by their names in C, in Fortran, and in Fortran 2008; or in C
/// alone, where a large count is another type.
macro_rules! around {
    ($around:ident, $names:ident: $($c:ident $fortran:ident $fortran_2008:ident),* $(,)?) => {
        const $names: &[&CStr] = &[$(around!(@name $c), around!(@name $fortran), around!(@name $fortran_2008)),*];
        $(
            around!(@one $around $c "P");
            around!(@one $around $fortran "p");
            around!(@one $around $fortran_2008 "p");
        )*
    };
    ($around:ident in C, $names:ident: $($c:ident),* $(,)?) => {
        const $names: &[&CStr] = &[$(around!(@name $c)),*];
        $(around!(@one $around $c "P");)*
    };
    (@name $name:ident) => {
        name(concat!(stringify!($name), "\0"))
    };
    (@one $around:ident $name:ident $tools:literal) => {
        /// The same as in its manual page.
        ///
        /// # Safety
        /// The same as in its manual page. Words beyond its arguments are ignored.
        #[allow(non_snake_case, reason = "the name is defined by MPI")]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            a: usize,
            b: usize,
            c: usize,
            d: usize,
            e: usize,
            f: usize,
            g: usize,
            h: usize,
            i: usize,
            j: usize,
            k: usize,
            l: usize,
            m: usize,
            n: usize,
        ) -> c_int {
            static CACHED_ADDRESS: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
            const NAME: &CStr = around!(@name $name);
            const PROFILING_NAME: &CStr = name(concat!($tools, stringify!($name), "\0"));
            let Some(next) = find(&CACHED_ADDRESS, NAME, PROFILING_NAME) else { return NO_MPI };
            // SAFETY: the caller's promise.
            let call = || unsafe { next(a, b, c, d, e, f, g, h, i, j, k, l, m, n) };
            $around(call, &[a, b, c, d, e, f, g, h, i, j, k, l, m, n])
        }
    };
}

const fn name(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(name) => name,
        Err(_) => c"",
    }
}

around! { on_init, BEGINNINGS:
    MPI_Init mpi_init_ mpi_init_f08_,
    MPI_Init_thread mpi_init_thread_ mpi_init_thread_f08_,
}

around! { on_synchronization, SAFE_POINTS:
    MPI_Barrier mpi_barrier_ mpi_barrier_f08_,
    MPI_Allreduce mpi_allreduce_ mpi_allreduce_f08_,
}

around! { on_buffer_handover, HANDOVERS:
    MPI_Irecv mpi_irecv_ mpi_irecv_f08_,
    MPI_Imrecv mpi_imrecv_ mpi_imrecv_f08_,
    MPI_Recv_init mpi_recv_init_ mpi_recv_init_f08_,
    MPI_Precv_init mpi_precv_init_ mpi_precv_init_f08_,
    MPI_Isendrecv mpi_isendrecv_ mpi_isendrecv_f08_,
    MPI_Isendrecv_replace mpi_isendrecv_replace_ mpi_isendrecv_replace_f08_,
    MPI_Ibcast mpi_ibcast_ mpi_ibcast_f08_,
    MPI_Igather mpi_igather_ mpi_igather_f08_,
    MPI_Igatherv mpi_igatherv_ mpi_igatherv_f08_,
    MPI_Iscatter mpi_iscatter_ mpi_iscatter_f08_,
    MPI_Iscatterv mpi_iscatterv_ mpi_iscatterv_f08_,
    MPI_Iallgather mpi_iallgather_ mpi_iallgather_f08_,
    MPI_Iallgatherv mpi_iallgatherv_ mpi_iallgatherv_f08_,
    MPI_Ialltoall mpi_ialltoall_ mpi_ialltoall_f08_,
    MPI_Ialltoallv mpi_ialltoallv_ mpi_ialltoallv_f08_,
    MPI_Ialltoallw mpi_ialltoallw_ mpi_ialltoallw_f08_,
    MPI_Ireduce mpi_ireduce_ mpi_ireduce_f08_,
    MPI_Iallreduce mpi_iallreduce_ mpi_iallreduce_f08_,
    MPI_Ireduce_scatter mpi_ireduce_scatter_ mpi_ireduce_scatter_f08_,
    MPI_Ireduce_scatter_block mpi_ireduce_scatter_block_ mpi_ireduce_scatter_block_f08_,
    MPI_Iscan mpi_iscan_ mpi_iscan_f08_,
    MPI_Iexscan mpi_iexscan_ mpi_iexscan_f08_,
    MPI_Ineighbor_allgather mpi_ineighbor_allgather_ mpi_ineighbor_allgather_f08_,
    MPI_Ineighbor_allgatherv mpi_ineighbor_allgatherv_ mpi_ineighbor_allgatherv_f08_,
    MPI_Ineighbor_alltoall mpi_ineighbor_alltoall_ mpi_ineighbor_alltoall_f08_,
    MPI_Ineighbor_alltoallv mpi_ineighbor_alltoallv_ mpi_ineighbor_alltoallv_f08_,
    MPI_Ineighbor_alltoallw mpi_ineighbor_alltoallw_ mpi_ineighbor_alltoallw_f08_,
    MPI_Bcast_init mpi_bcast_init_ mpi_bcast_init_f08_,
    MPI_Gather_init mpi_gather_init_ mpi_gather_init_f08_,
    MPI_Gatherv_init mpi_gatherv_init_ mpi_gatherv_init_f08_,
    MPI_Scatter_init mpi_scatter_init_ mpi_scatter_init_f08_,
    MPI_Scatterv_init mpi_scatterv_init_ mpi_scatterv_init_f08_,
    MPI_Allgather_init mpi_allgather_init_ mpi_allgather_init_f08_,
    MPI_Allgatherv_init mpi_allgatherv_init_ mpi_allgatherv_init_f08_,
    MPI_Alltoall_init mpi_alltoall_init_ mpi_alltoall_init_f08_,
    MPI_Alltoallv_init mpi_alltoallv_init_ mpi_alltoallv_init_f08_,
    MPI_Alltoallw_init mpi_alltoallw_init_ mpi_alltoallw_init_f08_,
    MPI_Reduce_init mpi_reduce_init_ mpi_reduce_init_f08_,
    MPI_Allreduce_init mpi_allreduce_init_ mpi_allreduce_init_f08_,
    MPI_Reduce_scatter_init mpi_reduce_scatter_init_ mpi_reduce_scatter_init_f08_,
    MPI_Reduce_scatter_block_init mpi_reduce_scatter_block_init_ mpi_reduce_scatter_block_init_f08_,
    MPI_Scan_init mpi_scan_init_ mpi_scan_init_f08_,
    MPI_Exscan_init mpi_exscan_init_ mpi_exscan_init_f08_,
    MPI_Neighbor_allgather_init mpi_neighbor_allgather_init_ mpi_neighbor_allgather_init_f08_,
    MPI_Neighbor_allgatherv_init mpi_neighbor_allgatherv_init_ mpi_neighbor_allgatherv_init_f08_,
    MPI_Neighbor_alltoall_init mpi_neighbor_alltoall_init_ mpi_neighbor_alltoall_init_f08_,
    MPI_Neighbor_alltoallv_init mpi_neighbor_alltoallv_init_ mpi_neighbor_alltoallv_init_f08_,
    MPI_Neighbor_alltoallw_init mpi_neighbor_alltoallw_init_ mpi_neighbor_alltoallw_init_f08_,
    MPI_Win_create mpi_win_create_ mpi_win_create_f08_,
    MPI_Win_attach mpi_win_attach_ mpi_win_attach_f08_,
    MPI_Get mpi_get_ mpi_get_f08_,
    MPI_Rget mpi_rget_ mpi_rget_f08_,
    MPI_Get_accumulate mpi_get_accumulate_ mpi_get_accumulate_f08_,
    MPI_Rget_accumulate mpi_rget_accumulate_ mpi_rget_accumulate_f08_,
    MPI_Fetch_and_op mpi_fetch_and_op_ mpi_fetch_and_op_f08_,
    MPI_Compare_and_swap mpi_compare_and_swap_ mpi_compare_and_swap_f08_,
    MPI_File_iread mpi_file_iread_ mpi_file_iread_f08_,
    MPI_File_iread_at mpi_file_iread_at_ mpi_file_iread_at_f08_,
    MPI_File_iread_all mpi_file_iread_all_ mpi_file_iread_all_f08_,
    MPI_File_iread_at_all mpi_file_iread_at_all_ mpi_file_iread_at_all_f08_,
    MPI_File_iread_shared mpi_file_iread_shared_ mpi_file_iread_shared_f08_,
    MPI_File_read_all_begin mpi_file_read_all_begin_ mpi_file_read_all_begin_f08_,
    MPI_File_read_at_all_begin mpi_file_read_at_all_begin_ mpi_file_read_at_all_begin_f08_,
    MPI_File_read_ordered_begin mpi_file_read_ordered_begin_ mpi_file_read_ordered_begin_f08_,
}

around! { on_synchronization in C, SAFE_POINTS_IN_C: MPI_Allreduce_c }

around! { on_buffer_handover in C, HANDOVERS_IN_C:
    MPI_Irecv_c, MPI_Imrecv_c, MPI_Recv_init_c, MPI_Isendrecv_c, MPI_Isendrecv_replace_c, MPI_Ibcast_c, MPI_Igather_c,
    MPI_Igatherv_c, MPI_Iscatter_c, MPI_Iscatterv_c, MPI_Iallgather_c, MPI_Iallgatherv_c, MPI_Ialltoall_c,
    MPI_Ialltoallv_c, MPI_Ialltoallw_c, MPI_Ireduce_c, MPI_Iallreduce_c, MPI_Ireduce_scatter_c,
    MPI_Ireduce_scatter_block_c, MPI_Iscan_c, MPI_Iexscan_c, MPI_Ineighbor_allgather_c, MPI_Ineighbor_allgatherv_c,
    MPI_Ineighbor_alltoall_c, MPI_Ineighbor_alltoallv_c, MPI_Ineighbor_alltoallw_c, MPI_Bcast_init_c, MPI_Gather_init_c,
    MPI_Gatherv_init_c, MPI_Scatter_init_c, MPI_Scatterv_init_c, MPI_Allgather_init_c, MPI_Allgatherv_init_c,
    MPI_Alltoall_init_c, MPI_Alltoallv_init_c, MPI_Alltoallw_init_c, MPI_Reduce_init_c, MPI_Allreduce_init_c,
    MPI_Reduce_scatter_init_c, MPI_Reduce_scatter_block_init_c, MPI_Scan_init_c, MPI_Exscan_init_c,
    MPI_Neighbor_allgather_init_c, MPI_Neighbor_allgatherv_init_c, MPI_Neighbor_alltoall_init_c,
    MPI_Neighbor_alltoallv_init_c, MPI_Neighbor_alltoallw_init_c, MPI_Win_create_c, MPI_Get_c, MPI_Rget_c,
    MPI_Get_accumulate_c, MPI_Rget_accumulate_c, MPI_File_iread_c, MPI_File_iread_at_c, MPI_File_iread_all_c,
    MPI_File_iread_at_all_c, MPI_File_iread_shared_c, MPI_File_read_all_begin_c, MPI_File_read_at_all_begin_c,
    MPI_File_read_ordered_begin_c,
}

around! { on_memory_request, ALLOCATIONS:
    MPI_Alloc_mem mpi_alloc_mem_ mpi_alloc_mem_f08_,
    MPI_Win_allocate mpi_win_allocate_ mpi_win_allocate_f08_,
    MPI_Win_allocate_shared mpi_win_allocate_shared_ mpi_win_allocate_shared_f08_,
    MPI_Win_create_dynamic mpi_win_create_dynamic_ mpi_win_create_dynamic_f08_,
    MPI_Comm_dup mpi_comm_dup_ mpi_comm_dup_f08_,
    MPI_Comm_split mpi_comm_split_ mpi_comm_split_f08_,
    MPI_Comm_create mpi_comm_create_ mpi_comm_create_f08_,
    MPI_Send mpi_send_ mpi_send_f08_,
    MPI_Isend mpi_isend_ mpi_isend_f08_,
    MPI_Recv mpi_recv_ mpi_recv_f08_,
    MPI_Sendrecv mpi_sendrecv_ mpi_sendrecv_f08_,
    MPI_Wait mpi_wait_ mpi_wait_f08_,
    MPI_Waitall mpi_waitall_ mpi_waitall_f08_,
    MPI_Bcast mpi_bcast_ mpi_bcast_f08_,
    MPI_Reduce mpi_reduce_ mpi_reduce_f08_,
    MPI_Allgather mpi_allgather_ mpi_allgather_f08_,
    MPI_Alltoall mpi_alltoall_ mpi_alltoall_f08_,
}

around! { on_memory_request in C, ALLOCATIONS_IN_C: MPI_Win_allocate_c, MPI_Win_allocate_shared_c }
