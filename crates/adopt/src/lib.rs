//! `libpagefold_adopt.so`: has an unmodified program merge its identical pages in user space (`LD_PRELOAD`, set by
//! `pagefold run --engine user`).
//!
//! It stands in for malloc(3), mmap(2) and their like. A large allocation becomes a mapping of its own (`heap`), and a
//! large mapping of ordinary memory is taken as it is (`mappings`): both are **blocks**, which the engine adopts at
//! the next merge and not before, so that what ends soon costs nothing. Glibc's own heap is left alone, since it takes
//! zeros for granted after `MADV_DONTNEED`. Whatever the program does to a block does what it would do to ordinary
//! memory, and waits for the merge in hand where that could get in its way; free(3), munmap(2) and mmap(2) over a block
//! wait for the pages that it works on, 4 MiB at most.
//!
//! # By what right
//! - **At safe points** (`mpi`), when the main thread comes back from a barrier or an allreduce, if there are no other
//!   threads than MPI_Init has left: then nobody writes. Only what the main thread has allocated, outside of MPI's
//!   functions that `mpi` names, is a block, for MPI's own threads may write to theirs. Where a tool has the functions of
//!   MPI before this library (PMPI), nothing is merged.
//! - **Beside the program**, in a thread of this library (`beside`), if writers can be made to wait (userfaultfd with kernel
//!   faults, so that system calls wait, too, and none of them fails). So it is in MPI programs with other threads, too.
//! - Otherwise nothing is merged, and a line on standard error says why, once for each process.
//!
//! # What is found out
//! Before each merge (`guest`): devices that could have memory pinned (RDMA, GPUs), files open for direct I/O,
//! io_uring, AF_XDP sockets. While any is open nothing is merged. When it is asked for: receives that are not waited
//! for and windows of MPI, locked memory, stacks that the program brings, advice that merging would lose
//! (`MADV_DONTFORK`, `MADV_WIPEONFORK` and others): such blocks are left alone from then on, though what was merged of
//! them stays so until it is written. Mutexes with priority inheritance, and robust ones, which the kernel writes
//! without waiting: merging beside the program, or beside other threads at a safe point, ends.
//!
//! # What is not
//! - System calls on blocks past the C library (a bare `syscall`), mbind(2), and process_vm_writev(2) or ptrace(2) by
//!   others during a merge, but for MPI's receives.
//! - A descriptor for direct I/O or a device that is opened, or a futex with priority inheritance of a program's own
//!   that is used, while a merge is in hand; a closing of descriptors that are this library's, one by one.
//! - In MPI programs: a signal handler that writes to blocks from one of MPI's threads; what `mpi` says of buffers.
//! - Children that are made past fork(3) by a bare clone while another thread merges: they may wait for ever when they
//!   allocate much. A child of vfork(2) that changes its parent's blocks.
//! - An allocator of the program's own, in front of or behind ours, that a fork leaves locked while a thread is made
//!   for the child. The thread is made at the beginning there.
//! - The end of processes that are killed, all at once: their domain's directory (some KiB under `/dev/shm`) stays until
//!   a process with this library ends that outlived them, as mpirun(1) does under `pagefold run`, or joins a domain.
//! - A program that uses libpagefold itself: it would find this library's copy of it.
//! - Allocators of the program's own that hand out pages past malloc(3) and mmap(2), and stacks of coroutines in blocks
//!   that other threads run on while the kernel writes to them: none of that is merged, or all of it waits as others
//!   do.
//! - `MADV_WIPEONFORK` and `MREMAP_DONTUNMAP` answer EINVAL on a block that was merged. A moved block is moved mapping
//!   by mapping, so another thread that uses it meanwhile finds parts in either place, as it would have found a hole.
//!
//! For glibc alone. Of each page that is in a block the engine keeps some bytes (see its documentation). A thread is in
//! each process that has blocks and is not MPI's (`beside`).

mod blocks;
mod heap;
mod lock;
mod mapping_pieces;
mod mappings;
mod merge_thread;
mod merger;
mod mpi;
mod next;
mod process_hooks;
mod settings;
