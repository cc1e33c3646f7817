//! `libpagefold_adopt.so`: merges identical pages of an unmodified program in user space (`LD_PRELOAD`, set by
//! `pagefold run --engine user`).
//!
//! It replaces malloc(3), mmap(2) and related functions. A large allocation becomes a mapping of its own (`heap`); a
//! large mapping of ordinary memory is used as it is (`mappings`). Both are **blocks**. The engine adopts blocks at the
//! next merge, not before, so that short-lived ones cost nothing. Glibc's own heap is not merged, because it relies on
//! zeros after `MADV_DONTNEED`. All operations of the program on a block have the same effect as on ordinary memory. An
//! operation that could conflict with a running merge waits for it. free(3), munmap(2) and mmap(2) over a block wait
//! only for the pages that the merge works on, 4 MiB at most.
//!
//! # When merging is safe
//! - **At safe points** (`mpi`): when the main thread returns from a barrier or an allreduce, if the process has no
//!   other threads than after MPI_Init. Then no thread writes to blocks. Only allocations of the main thread, made
//!   outside of the MPI functions that `mpi` names, are blocks, because MPI's own threads may write to their memory. If
//!   a tool intercepts the functions of MPI before this library (PMPI), nothing is merged.
//! - **Beside the program**, in a thread of this library (`merge_thread`), if the kernel can block writers. This needs
//!   userfaultfd with kernel faults, so that system calls wait, too, and none of them fails. MPI programs with other
//!   threads are merged this way, too.
//! - Otherwise nothing is merged, and one line on standard error for each process gives the reason.
//!
//! # Checks
//! Before each merge (`process_hooks`): devices that may have pinned memory (RDMA, GPUs), files that are open for
//! direct I/O, io_uring, AF_XDP sockets. Nothing is merged while any of these is open.
//!
//! At the call: pending MPI receives and MPI windows, locked memory, stacks that the program supplies, and advice that
//! merging would lose (`MADV_DONTFORK`, `MADV_WIPEONFORK` and others). Such blocks are not merged from then on; their
//! merged pages stay merged until they are written. Mutexes with priority inheritance, and robust ones, which the
//! kernel writes without waiting: they end merging beside the program, and beside other threads at a safe point.
//!
//! # Limits
//! - Not seen: system calls on blocks that bypass the C library (a bare `syscall`); mbind(2); process_vm_writev(2) or
//!   ptrace(2) by other processes during a merge, except for MPI's receives.
//! - Not seen while a merge runs: opening a device or a descriptor for direct I/O; use of the program's own futex with
//!   priority inheritance; closing this library's descriptors one by one.
//! - In MPI programs: a signal handler that writes to blocks from one of MPI's threads; the buffers that `mpi` lists.
//! - Children that a bare clone creates, not fork(3), while another thread merges: they may wait forever when they
//!   allocate much. A child of vfork(2) that changes its parent's blocks.
//! - An allocator of the program, before or behind this library's, that a fork leaves locked while a thread is created
//!   for the child. In such programs the thread is created at the start.
//! - Processes that are all killed at once: their domain's directory (some KiB under `/dev/shm`) stays until a process
//!   with this library that outlived them ends, as mpirun(1) does under `pagefold run`, or joins a domain.
//! - A program that uses libpagefold itself: it would find this library's copy of it.
//! - The program's own allocators that supply pages without malloc(3) and mmap(2), and stacks of coroutines in blocks
//!   that other threads run on while the kernel writes to them: these are not merged, or wait like other writers.
//! - `MADV_WIPEONFORK` and `MREMAP_DONTUNMAP` return EINVAL on a block that was merged. A block is moved mapping by
//!   mapping: another thread that uses it meanwhile finds parts at either address, where it otherwise finds a hole.
//!
//! For glibc only. The engine keeps some bytes for each page of a block (see its documentation). Each process that has
//! blocks and is not merged at MPI's safe points has one more thread (`merge_thread`).

mod blocks;
mod heap;
mod lock;
mod mappings;
mod merge_thread;
mod merger;
mod mpi;
mod next;
mod process_hooks;
mod program_mappings;
mod settings;
