//! Samepage merging in user space. Identical pages of programs that trust each other become private mappings of one
//! shared memory; pages of zeros are freed. The kernel's copy-on-write does the rest.
//!
//! ```no_run
//! use pagefold_engine::{Engine, EngineOptions};
//!
//! let engine = Engine::join("job42", &EngineOptions::default())?;
//! let region = engine.allocate(1 << 30)?;
//! // ... fill and compute ...
//! // SAFETY: at this point no thread of the program writes to the region.
//! let merged = unsafe { engine.merge() }?;
//! println!("{} pages merged in {:?}", merged.pages_merged.0, merged.program_time);
//! # drop(region);
//! # Ok::<(), pagefold_engine::Error>(())
//! ```
//!
//! A **domain** is a named group of processes of one user that trust each other. They share a store (a memfd) and an
//! index of its contents (files in a directory under `/dev/shm` that only that user can enter). A **member** is a
//! process that has joined a domain. It **adopts** private anonymous memory and **merges** it at points at which no
//! thread writes to it. The process does all the work itself, without privilege and without KSM. Merged memory counts
//! as shared memory, so PSS and cgroups show the savings.
//!
//! One merge shares pages whose content was also seen in another member, or in another page of this member. A content
//! goes to the store once it was seen in two places, so content that only one member has is never touched. Members that
//! merge one after another find each other's contents one merge later. With a bound on the slowdown
//! ([`EngineOptions::max_slowdown`]) a content counts as seen only after two merges found the same sample. Members then
//! merge at the same safe points.
//!
//! [`Engine::region_statuses`], [`Engine::status`] and [`Engine::domain_status`] report the state of regions, the
//! member and the domain. Processes that are not members use [`observe`].
//!
//! # Guarantees
//! - Memory reads the same before and after a merge. Contents are compared byte by byte before one mapping replaces
//!   another in a single step (`memory`).
//! - No content is freed while a process may map it, whether through merging or through fork (`slot_references`,
//!   `domain`). Members free unmapped contents during later merges. A few that a member could still refer to may stay.
//! - A member may die at any point. No other member waits for it, and the others can reuse its memory.
//! - A merge takes at most half of the memory that its cgroup, the parent cgroups and the host have left. The members
//!   of a domain share that half (`headroom`). A merge works in windows that fit, or does nothing.
//! - A member may be stopped at any point. A merge waits at most a second for the lock of a domain. Then it leaves the
//!   steps that need the lock to a later merge and counts that ([`MergeCounters::blocked_merges`]).
//! - With [`EngineOptions::max_slowdown`] the engine takes about that share of its program's time, once
//!   [`EngineOptions::min_runtime`] is over. Only scanning, and copying written pages back into ordinary memory, stop
//!   when no time is left; pages found so far are still stored and mapped. Later merges count COW breaks of merged
//!   pages and reads of freed zero pages, at the cost of such a fault alone ([`MemberStatus::time_use`]). Time spent
//!   beyond the share is made up for before any other work.
//! # What a program may do to its regions
//! - **write**: the kernel copies the page. At the next merge it becomes ordinary memory again. If it does not last,
//!   the engine skips it with exponential backoff ([`crate::decide::page_note`]).
//! - **fork**: the child has the same memory. It may use the engine as a member of its own, unless another thread was
//!   using the engine at the fork ([`Error::Forked`]), or the child is in another PID namespace than existing members.
//! - **munmap**: its contents leave the store. The engine treats any private anonymous memory mapped there later as
//!   adopted, and that may belong to other code: call [`Engine::disown`] before you unmap adopted memory.
//! - **mmap over adopted memory**: memory that is no longer private anonymous is skipped. Private anonymous memory
//!   counts as written.
//! - **mremap**: moved memory keeps its contents and is no longer merged. Do not move it again during a merge, unless
//!   it was disowned before: then it may move while [`Engine::merge_while_running`] runs. New pages of grown memory
//!   have undefined content until they are written.
//! - **mprotect**: memory that is not both readable and writable is skipped. Its merged pages stay merged.
//! - **`madvise(MADV_DONTNEED)`**: a merged page then reads as its merged content, and not as zeros, because it is a
//!   mapping of a file. Use [`Engine::clear`]. The same happens once a guard region (`MADV_GUARD_INSTALL`) is removed;
//!   a guard region itself is skipped.
//! - **huge pages**: without a bound on the slowdown they are split where the savings exceed the cost. With a bound,
//!   see [`EngineOptions::split_huge_pages`]. Before Linux 6.7 the engine cannot tell huge pages from base pages.
//! - **core dumps**: merged memory is file memory, which `/proc/PID/coredump_filter` leaves out by default. Joining a
//!   domain includes it (bit 2, core(5)).
//! - **devices and direct I/O**: memory that is pinned for a device must not be merged, since the device would go on
//!   writing to the old frames. While `VmPin` of the process is above zero a merge is refused
//!   ([`Error::MemoryPinned`]), unless the caller sets [`EngineOptions::merge_while_pinned`]. Do not register or pin
//!   memory while a merge runs: the kernel accounts a pin only after making it, so the merge cannot see it. The engine
//!   reads `VmPin` when a merge begins; [`Engine::merge_while_running`] reads it also before each replacement. `VmPin`
//!   counts RDMA and registered buffers of io_uring, charged to the process that made the ring. It does not count pins
//!   of other drivers (VFIO, AF_XDP, some GPUs), nor short-lived pins: `O_DIRECT`, io_uring or process_vm_writev into
//!   adopted memory must not be in progress during a merge.
//! - **advice and locks on memory**: new mappings made by a merge have none. Merged pages lose `MADV_WIPEONFORK`,
//!   `MADV_DONTFORK`, `MADV_DONTDUMP`, mlock, mbind and protection keys. Do not adopt memory that has them, nor stacks.
//! - **closing unknown descriptors** (`closefrom`): allowed between merges, the engine then joins again. Not allowed
//!   during a merge.
//!
//! # Unsafe
//! `unsafe` code maps, compares and lends memory (`memory`, `shared_words`, `merge_pass`, `page_scan`,
//! `content_storing`, `run_selection`, `survey`, `store`, `freeing`), runs the thread of `background`, and handles
//! pointers from C (`capi`). Each block states why it is sound. The caller's one promise is that no thread writes to
//! adopted memory during a merge.

mod adopted_region;
mod background;
mod capi;
mod claims;
mod content_index;
mod content_storing;
pub mod decide;
mod domain;
mod domain_directory;
mod domain_lock;
mod file_limits;
mod freeing;
mod headroom;
mod huge_page_split;
mod incarnation;
mod member_exit;
mod memory;
mod merge_pass;
pub mod observe;
mod options;
mod own_mappings;
mod page_scan;
mod parallel;
#[cfg(test)]
mod protocol_model;
mod run_selection;
mod safe_points;
mod shared_words;
mod slot_references;
mod statistics;
mod status_file;
mod store;
mod survey;
mod windows;
mod write_exclusion;

pub use background::BackgroundMerger;
pub use domain_directory::{JOB_ID_VARIABLES, RUNTIME_DIRECTORY_VARIABLE, is_valid_domain_name, job_domain_name};
pub use member_exit::remove_dead_domains;
pub use memory::pinned_bytes;
pub use options::{EngineOptions, PageAdvice};
pub use statistics::{MemberStatus, MergeCounters, RegionStatus};

use crate::adopted_region::AdoptedRegion as Adopted;
use crate::claims::RangeClaims;
use crate::decide::time_budget::{RoundBackoff, TimeBudget};
use crate::domain::JoinedDomain;
use crate::headroom::CgroupHeadroom;
use crate::slot_references::SlotSet;
use crate::write_exclusion::WriteExclusion;
use pagefold_base::engine;
use pagefold_base::engine::{EngineMember, EngineTimeUse, PageTally, RegionTally};
use pagefold_base::{AddressRange, Bytes, Pages};
use pagefold_sys::fingerprint::Hasher;
use pagefold_sys::numa;
use pagefold_sys::signals::BlockedSignals;
use pagefold_sys::userfault::UserfaultFd;
use rustix::rand::{GetRandomFlags, getrandom};
use rustix::time::{ClockId, clock_gettime};
use std::io;
use std::mem::ManuallyDrop;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Why a call to the engine failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The directory of the domain cannot be created or used.
    #[error(transparent)]
    Directory(#[from] domain_directory::DirectoryError),
    /// The domain cannot be joined or used.
    #[error("the domain {name:?} cannot be used")]
    DomainUnusable {
        /// Name of the domain.
        name: String,
        /// Cause.
        source: io::Error,
    },
    /// This process was forked while another thread used the engine.
    #[error("forked while another thread was using the engine: join again, and fork between calls")]
    Forked,
    /// The range cannot be adopted.
    #[error("{start:#x}-{end:#x} {reason}")]
    InvalidRange {
        /// First address.
        start: u64,
        /// First address after the range.
        end: u64,
        /// What is wrong with the range.
        reason: &'static str,
    },
    /// Concurrent writers cannot be blocked.
    #[error(
        "merging while the program runs needs Linux 6.4 and userfaultfd: CAP_SYS_PTRACE, \
         vm.unprivileged_userfaultfd=1, or access to /dev/userfaultfd; merging at safe points needs neither"
    )]
    WriteProtectUnavailable(#[source] io::Error),
    /// A merge would lose data that a device or io_uring writes to pinned memory.
    #[error(
        "cannot merge: {0} of this process is pinned, and data that a device or io_uring writes there would be lost; \
         unpin it, or set merge_while_pinned if none of it is adopted"
    )]
    MemoryPinned(Bytes),
    /// The engine cannot determine whether memory is pinned.
    #[error("cannot merge: VmPin cannot be read from /proc/thread-self/status; mount /proc, or set merge_while_pinned")]
    PinnedUnreadable(#[source] io::Error),
    /// Memory cannot be mapped or unmapped.
    #[error("no memory for a region of {0}")]
    OutOfMemory(Bytes, #[source] io::Error),
    /// The state of the domain cannot be read.
    #[error(transparent)]
    DomainUnreadable(#[from] observe::ObserveError),
}

/// A member of a domain. Leaves the domain when dropped; merged pages stay merged.
#[derive(Debug)]
pub struct Engine {
    name: String,
    directory: PathBuf,
    options: EngineOptions,
    state: ManuallyDrop<Mutex<EngineState>>,
    /// Ranges that a merge is working on, and ranges that were freed during the merge.
    claims: RangeClaims,
    /// PID of the last user. If `state` is locked and this is another PID, the locking thread does not exist in this
    /// process.
    last_user_pid: AtomicU32,
}

/// State of a member.
#[derive(Debug)]
struct EngineState {
    /// The process that joined. A forked child is not yet a member.
    owner_pid: u32,
    /// The NUMA node for the domain's memory, if one was requested.
    wanted_node: Option<u32>,
    domain: JoinedDomain,
    hasher: Hasher,
    /// Random number of this member, for [`content_index::SightingTag`].
    tag_number: u64,
    regions: Vec<Adopted>,
    time_budget: TimeBudget,
    split_ledger: huge_page_split::HugePageSplitLedger,
    round_backoff: RoundBackoff,
    /// Memory that was adopted since the last merge and is still adopted.
    newly_adopted: Bytes,
    /// Pages that the last merge found but did not reach, or that need another scan soon.
    promising_pages: Pages,
    fault_costs: memory::FaultCosts,
    started: Instant,
    totals: MergeCounters,
    /// Number of merges, and when the last one ended, as time since boot.
    merge_count: u64,
    last_merge: Option<Duration>,
    /// Address at which the next merge resumes if the last one was incomplete.
    resume_address: u64,
    /// Time of the last safe point of the program, and the last common merge time at which this member merged.
    last_safe_point: Option<Duration>,
    last_merge_time: Duration,
    /// Duration of the survey of the last merge.
    survey_time: Duration,
    /// Whether the next merge already has its turn and need not check.
    is_turn_granted: bool,
    headroom: CgroupHeadroom,
    /// Store slots that disowned memory maps. That memory may be at any address, and may move while the slots are
    /// searched.
    disowned_slots: SlotSet,
}

/// Memory of a member. Unmapped when dropped.
#[derive(Debug)]
pub struct AllocatedRegion<'e> {
    engine: &'e Engine,
    range: AddressRange,
}

impl Engine {
    /// Join the domain with this name, or create it. For a rank of an MPI job, use [`job_domain_name`].
    ///
    /// # Errors
    /// No usable directory, members in another PID namespace, a file size limit (RLIMIT_FSIZE) below the host's memory
    /// size, or files that cannot be created or opened.
    pub fn join(name: &str, options: &EngineOptions) -> Result<Self, Error> {
        let root = options.root.clone().unwrap_or_else(domain_directory::default_root);
        let failed = |source| Error::DomainUnusable { name: name.to_owned(), source };
        let node = options.per_node.then(numa::current_node).transpose().map_err(failed)?;
        let name = &node.map_or_else(|| name.to_owned(), |node| format!("{name}.node{node}"));
        domain::remove_dead_domains(&root);
        let deadline = Instant::now() + options.max_join_wait;
        let (directory, state) = loop {
            let directory = domain_directory::prepare_domain_directory(&root, name)?;
            match EngineState::join(&directory, options, node) {
                // The last member removed the directory, or its files were removed meanwhile.
                Err(error) if incarnation::wait_to_retry(&error, deadline) => {}
                result => break (directory, result.map_err(failed)?),
            }
        };
        memory::include_merged_in_core_dumps();
        Ok(Self {
            name: name.to_owned(),
            directory,
            options: options.clone(),
            state: ManuallyDrop::new(Mutex::new(state)),
            claims: RangeClaims::default(),
            last_user_pid: AtomicU32::new(std::process::id()),
        })
    }

    /// Allocate memory that may be merged. The size is rounded up to whole pages.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn allocate(&self, bytes: usize) -> Result<AllocatedRegion<'_>, Error> {
        let rounded = (bytes as u64).checked_next_multiple_of(rustix::param::page_size() as u64);
        // The kernel refuses this size, too.
        let bytes = rounded.unwrap_or(u64::MAX);
        // Before locking: the regions first forget memory that another thread freed at this address.
        let range = memory::map_ordinary(bytes).map_err(|source| Error::OutOfMemory(Bytes(bytes), source))?;
        let adopted = self.with_state(|state| {
            state.adopt_range(range);
            state.publish_status(&self.options);
        });
        if adopted.is_err() {
            // SAFETY: it was mapped above, and no other code knows its address.
            let _ = unsafe { memory::unmap_range(range) };
        }
        adopted.map(|()| AllocatedRegion { engine: self, range })
    }

    /// Adopt memory of the program, until [`Engine::disown`].
    ///
    /// # Errors
    /// [`Error::InvalidRange`] if the range is not page-aligned, or overlaps adopted memory.
    ///
    /// # Safety
    /// The range is private anonymous memory. No device has it pinned. Once [`Engine::merge`] may run, the program
    /// unmaps or replaces parts of it only between merges.
    pub unsafe fn adopt(&self, range: AddressRange) -> Result<(), Error> {
        self.with_state(|state| {
            let page = state.domain.page_bytes();
            check_page_aligned(range, page)?;
            if state.regions.iter().any(|region| region.range().overlap(range).is_some()) {
                let reason = "overlaps memory that is already adopted";
                return Err(Error::InvalidRange { start: range.start, end: range.end, reason });
            }
            state.adopt_range(range);
            state.publish_status(&self.options);
            Ok(())
        })?
    }

    /// Stop merging adopted memory in a page-aligned range. Merged pages stay merged until they are written, and the
    /// program may use the memory freely. Its contents stay in the store while only [`Engine::merge_while_running`] is
    /// used; [`Engine::merge`] checks which of them are still mapped.
    ///
    /// # Errors
    /// [`Error::InvalidRange`] if the range is not page-aligned; [`Error::DomainUnusable`]. After an error nothing has
    /// changed.
    pub fn disown(&self, range: AddressRange) -> Result<(), Error> {
        self.with_state(|state| {
            check_page_aligned(range, state.domain.page_bytes())?;
            if state.regions.iter().any(|region| region.range().overlap(range).is_some()) {
                let slots = survey::mapped_slots(&state.domain, range);
                state
                    .disowned_slots
                    .extend(slots.map_err(|source| Error::DomainUnusable { name: self.name.clone(), source })?);
            }
            state.disown_range(range);
            state.publish_status(&self.options);
            Ok(())
        })?
    }

    /// Discard the notes on pages whose content the program has dropped, such as by `madvise(MADV_DONTNEED)` on
    /// ordinary memory. They no longer count as merged.
    ///
    /// # Errors
    /// [`Error::Forked`], [`Error::DomainUnusable`].
    pub fn forget_pages(&self, range: AddressRange) -> Result<(), Error> {
        self.with_state(|state| {
            if check_page_aligned(range, state.domain.page_bytes()).is_ok() {
                state.regions.iter_mut().for_each(|region| region.forget_pages(range));
            }
        })
    }

    /// Announce that the process is about to end. If all other members of the domain are about to end, too, this
    /// removes the domain's directory now; otherwise the next process that joins a domain removes it. Merged pages stay
    /// merged. Does nothing in a child that has not joined.
    pub fn prepare_exit(&self) {
        let pid = std::process::id();
        if let Ok(mut state) = self.lock_state(pid)
            && state.owner_pid == pid
        {
            state.domain.prepare_exit();
        }
    }

    /// Set the advice for a range of regions.
    ///
    /// # Errors
    /// [`Error::InvalidRange`] if the range is not page-aligned, [`Error::Forked`].
    pub fn advise(&self, range: AddressRange, advice: PageAdvice) -> Result<(), Error> {
        let now = merge_clock();
        self.with_state(|state| {
            check_page_aligned(range, state.domain.page_bytes())?;
            state.regions.iter_mut().for_each(|region| region.advise(range, advice, now));
            Ok(())
        })?
    }

    /// Merge identical pages now.
    ///
    /// Does nothing if the bound on the slowdown leaves no time, or if the last merges were not profitable
    /// ([`EngineOptions::max_slowdown`]).
    ///
    /// # Errors
    /// [`Error::MemoryPinned`]; [`Error::DomainUnusable`]: pages that were merged before stay merged.
    ///
    /// # Safety
    /// Until it returns, no thread and no signal handler writes to, unmaps or replaces adopted memory, or moves memory
    /// that was adopted before. No mutable borrow of it is used. No adopted memory is registered or pinned meanwhile,
    /// as for io_uring or RDMA.
    pub unsafe fn merge(&self) -> Result<MergeCounters, Error> {
        self.merge_with(|| Ok(WriteExclusion::promised(&self.claims)))
    }

    /// Merge identical pages while the program runs: a writer waits while the engine works on its page. A thread works
    /// on at most 512 pages at a time (2 MiB with pages of 4 KiB), as long as it takes to compare, copy or map them.
    /// The calling thread takes no signals meanwhile: a handler that wrote to such a page would wait for the thread
    /// that it interrupted. Handlers in other threads may write, and wait as any writer.
    ///
    /// # Errors
    /// [`Error::MemoryPinned`], [`Error::WriteProtectUnavailable`] if writers cannot be blocked,
    /// [`Error::DomainUnusable`].
    ///
    /// # Safety
    /// Until it returns, the program unmaps, moves or replaces adopted memory only by the engine's own functions, and
    /// closes no descriptors that it did not open. Adopted memory contains no thread stack, and no mutex that is robust
    /// or has priority inheritance: the kernel does not wait to write to those. No direct or asynchronous I/O into it
    /// is in progress, and none of it is registered or pinned meanwhile, as for io_uring or RDMA.
    pub unsafe fn merge_while_running(&self) -> Result<MergeCounters, Error> {
        let _blocked =
            BlockedSignals::new().map_err(|source| Error::DomainUnusable { name: self.name.clone(), source })?;
        self.merge_with(|| {
            let userfault = UserfaultFd::new().map_err(Error::WriteProtectUnavailable)?;
            Ok(WriteExclusion::enforced(&self.claims, userfault, !self.options.merge_while_pinned))
        })
    }

    fn merge_with<'e>(
        &'e self,
        exclusion: impl FnOnce() -> Result<WriteExclusion<'e>, Error>,
    ) -> Result<MergeCounters, Error> {
        self.with_state(|state| {
            // Under the lock: this check sees memory that was pinned during another merge.
            self.check_not_pinned()?;
            let merged = state.merge_now(&self.options, &self.directory, &exclusion()?);
            merged.map_err(|source| Error::DomainUnusable { name: self.name.clone(), source })
        })?
    }

    /// Fail if memory is pinned: a merge would lose later writes to it.
    fn check_not_pinned(&self) -> Result<(), Error> {
        match pinned_bytes() {
            _ if self.options.merge_while_pinned => Ok(()),
            Ok(Bytes::ZERO) => Ok(()),
            Ok(pinned) => Err(Error::MemoryPinned(pinned)),
            Err(source) => Err(Error::PinnedUnreadable(source)),
        }
    }

    /// Make page-aligned adopted memory read as zeros and free its frames, as `madvise(MADV_DONTNEED)` does to ordinary
    /// memory.
    ///
    /// # Errors
    /// [`Error::InvalidRange`] if the range is not page-aligned or not adopted; [`Error::OutOfMemory`].
    ///
    /// # Safety
    /// No borrow of it is used afterwards.
    pub unsafe fn clear(&self, range: AddressRange) -> Result<(), Error> {
        self.with_state(|state| {
            check_page_aligned(range, state.domain.page_bytes())?;
            let adopted = AddressRange::union(state.regions.iter().map(|region| region.range()).collect());
            if !range.subtract(&adopted).is_empty() {
                let reason = "is not adopted";
                return Err(Error::InvalidRange { start: range.start, end: range.end, reason });
            }
            // SAFETY: it is adopted, and the caller promises that its content is no longer used.
            unsafe { memory::clear_range(range) }.map_err(|source| Error::OutOfMemory(range.bytes(), source))?;
            state.regions.iter_mut().for_each(|region| region.forget_pages(range));
            Ok(())
        })?
    }

    /// State of this member, and the size of the domain's store.
    ///
    /// # Errors
    /// [`Error::DomainUnusable`].
    pub fn status(&self) -> Result<MemberStatus, Error> {
        self.with_state(|state| {
            let status = state.status(&self.options);
            status.map_err(|source| Error::DomainUnusable { name: self.name.clone(), source })
        })?
    }

    /// State of each region of this member, by address, with its savings by the mean of the domain
    /// ([`pagefold_base::engine`]).
    ///
    /// # Errors
    /// [`Error::DomainUnusable`], [`Error::DomainUnreadable`].
    pub fn region_statuses(&self) -> Result<Vec<RegionStatus>, Error> {
        // Publishes this member's state, so that the domain's mean is of the same time.
        self.status()?;
        let domain = self.domain_status()?;
        let status = |region: &Adopted| {
            let RegionTally { range, tally } = region.region_tally();
            RegionStatus { range, tally, saved: domain.saved(&tally) }
        };
        let mut regions: Vec<RegionStatus> = self.with_state(|state| state.regions.iter().map(status).collect())?;
        regions.sort_by_key(|region| region.range);
        Ok(regions)
    }

    /// State of the domain: all members, each as of its last report. A member reports when it merges, when its regions
    /// change, and when its status is queried.
    ///
    /// # Errors
    /// [`Error::DomainUnreadable`].
    pub fn domain_status(&self) -> Result<engine::EngineDomain, Error> {
        let root = self.directory.parent().unwrap_or(&self.directory).to_owned();
        Ok(observe::read_domain(
            &observe::DomainsRoot { directory: root, owner_uid: rustix::process::geteuid().as_raw() },
            &self.name,
        )?)
    }

    /// Run `work` on the state, as a member: a forked child joins first.
    fn with_state<T>(&self, work: impl FnOnce(&mut EngineState) -> T) -> Result<T, Error> {
        let pid = std::process::id();
        let mut state = self.lock_state(pid)?;
        self.last_user_pid.store(pid, Ordering::Relaxed);
        let deadline = Instant::now() + self.options.max_join_wait;
        let join_result = if state.owner_pid == pid {
            Ok(())
        } else {
            state.rejoin_domain(&self.directory, deadline).map(|()| state.publish_status(&self.options))
        };
        join_result.map_err(|source| Error::DomainUnusable { name: self.name.clone(), source })?;
        // Otherwise a merge would still include memory that was given up and may be in other use now.
        if !self.remove_revoked_regions(&mut state) {
            return Err(Error::Forked);
        }
        let result = work(&mut state);
        self.remove_revoked_regions(&mut state);
        Ok(result)
    }

    fn lock_state(&self, pid: u32) -> Result<MutexGuard<'_, EngineState>, Error> {
        match self.state.try_lock() {
            Ok(state) => return Ok(state),
            Err(std::sync::TryLockError::Poisoned(poisoned)) => return Ok(poisoned.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => {}
        }
        // A thread of this process that has just locked it sets this at once.
        let has_recorded_pid = || self.last_user_pid.load(Ordering::Relaxed) == pid;
        if !(0..MAX_STATE_POLLS).any(|_| {
            has_recorded_pid() || {
                std::thread::sleep(STATE_POLL_INTERVAL);
                false
            }
        }) {
            return Err(Error::Forked);
        }
        Ok(self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }
}

/// How long to wait for the thread that locked the state to record its PID, and how often.
const STATE_POLL_INTERVAL: Duration = Duration::from_millis(1);
const MAX_STATE_POLLS: usize = 50;

impl Drop for Engine {
    fn drop(&mut self) {
        let forked = matches!(self.lock_state(std::process::id()), Err(Error::Forked));
        if !forked {
            // SAFETY: it is dropped only here, and no code uses it afterwards.
            unsafe { ManuallyDrop::drop(&mut self.state) };
        }
        // State that a thread of the parent was changing may be inconsistent, and stays until the process ends.
    }
}

fn check_page_aligned(range: AddressRange, page_bytes: u64) -> Result<(), Error> {
    if range.start < range.end && range.start.is_multiple_of(page_bytes) && range.end.is_multiple_of(page_bytes) {
        return Ok(());
    }
    Err(Error::InvalidRange { start: range.start, end: range.end, reason: "is not page-aligned, or is empty" })
}

impl EngineState {
    fn join(directory: &std::path::Path, options: &EngineOptions, node: Option<u32>) -> io::Result<Self> {
        let page_bytes = rustix::param::page_size() as u64;
        let (domain, hasher) = JoinedDomain::join(directory, page_bytes, node, Instant::now() + options.max_join_wait)?;
        let state = Self {
            owner_pid: std::process::id(),
            wanted_node: node,
            domain,
            hasher,
            tag_number: random_u64()?,
            regions: Vec::new(),
            time_budget: TimeBudget::new(options.max_slowdown, options.min_runtime),
            split_ledger: huge_page_split::HugePageSplitLedger::default(),
            round_backoff: RoundBackoff::default(),
            newly_adopted: Bytes::ZERO,
            promising_pages: Pages::ZERO,
            fault_costs: memory::measure_fault_costs()?,
            started: Instant::now(),
            totals: MergeCounters::default(),
            merge_count: 0,
            last_merge: None,
            resume_address: 0,
            last_safe_point: None,
            last_merge_time: Duration::ZERO,
            survey_time: Duration::ZERO,
            is_turn_granted: false,
            headroom: CgroupHeadroom::default(),
            disowned_slots: SlotSet::default(),
        };
        state.publish_status(options);
        Ok(state)
    }

    /// Join again: in a forked child, or when the program has closed the store, or when no member is left to open the
    /// store from. The existing references stay with the mapping that a parent and its children share. Waits for the
    /// domain's lock until the deadline.
    fn rejoin_domain(&mut self, directory: &std::path::Path, deadline: Instant) -> io::Result<()> {
        let (domain, hasher) = incarnation::retry_while_removed(deadline, || {
            // The directory may have been removed.
            if let Some((root, name)) = directory.parent().zip(directory.file_name().and_then(|name| name.to_str())) {
                domain_directory::prepare_domain_directory(root, name).map_err(io::Error::other)?;
            }
            let (domain, hasher) = JoinedDomain::join(directory, self.domain.page_bytes(), self.wanted_node, deadline)?;
            // Refers to all slots that this process maps before it drops the former references.
            domain.references.add(survey::mapped_slots(&domain, survey::ALL_ADDRESSES)?)?;
            if domain.store.identity() == self.domain.store.identity() {
                domain.references.add(self.disowned_slots.iter())?;
            }
            Ok((domain, hasher))
        })?;
        if domain.store.identity() != self.domain.store.identity() {
            // This process may still map the former store: no member frees any of it, and all members join again.
            self.domain.abandon_incarnation();
            self.disowned_slots = SlotSet::default();
        }
        self.domain = domain;
        (self.hasher, self.owner_pid, self.tag_number) = (hasher, std::process::id(), random_u64()?);
        Ok(())
    }

    /// Adopt a page-aligned range.
    fn adopt_range(&mut self, range: AddressRange) {
        self.regions.push(Adopted::new(range, self.domain.page_bytes()));
        self.newly_adopted += range.bytes();
    }

    /// Remove the adopted regions within a range.
    fn disown_range(&mut self, range: AddressRange) {
        let unsurveyed: Bytes = self.regions.iter().map(|region| region.unsurveyed_bytes(range)).sum();
        self.newly_adopted = Bytes(self.newly_adopted.0.saturating_sub(unsurveyed.0));
        let affected: Vec<Adopted> =
            self.regions.extract_if(.., |region| region.range().overlap(range).is_some()).collect();
        self.regions.extend(affected.iter().flat_map(|region| region.subtract(range)));
    }

    fn status(&mut self, options: &EngineOptions) -> io::Result<MemberStatus> {
        let mapping_count = adopted_region::tally_regions(&self.domain, &mut self.regions, merge_clock())?;
        self.publish_status(options);
        let PageTally { pages, merged, zeros, rewritten_pages } = self.total_tally();
        Ok(MemberStatus {
            pages,
            merged,
            zeros,
            rewritten_pages,
            store_bytes: Bytes(self.domain.store.allocated_bytes()?),
            pinned_bytes: pinned_bytes()?,
            mapping_count,
            note_bytes: self.note_bytes(),
            merge_count: self.merge_count,
            time_use: self.time_use(options),
            totals: self.totals,
        })
    }

    fn total_tally(&self) -> PageTally {
        let mut sum = PageTally::default();
        self.regions.iter().for_each(|region| sum += region.region_tally().tally);
        sum
    }

    fn note_bytes(&self) -> Bytes {
        self.regions.iter().map(Adopted::note_bytes).sum()
    }

    fn time_use(&self, options: &EngineOptions) -> EngineTimeUse {
        EngineTimeUse {
            elapsed: self.started.elapsed(),
            spent: self.time_budget.spent(),
            max_slowdown: options.max_slowdown,
        }
    }

    /// Publish the state of this member.
    fn publish_status(&self, options: &EngineOptions) {
        self.domain.status_file.publish(&EngineMember {
            process: self.domain.status_file.owner(),
            reported_at: status_file::time_since_boot(),
            last_merge: self.last_merge,
            merges: self.merge_count,
            merge_time: self.totals.program_time,
            time_use: self.time_use(options),
            notes: self.note_bytes(),
            tally: self.total_tally(),
            region_count: self.regions.len() as u64,
            regions: self.regions.iter().map(Adopted::region_tally).collect(),
        });
    }
}

impl Drop for EngineState {
    fn drop(&mut self) {
        // Merged pages stay mapped, so their references must stay. In a child that never joined, the parent's
        // references do that.
        let has_disowned_slots = self.disowned_slots.iter().next().is_some();
        let mapped_slots = survey::mapped_slots(&self.domain, survey::ALL_ADDRESSES);
        if has_disowned_slots || mapped_slots.map_or(true, |mut slots| slots.next().is_some()) {
            self.domain.references.keep_until_exit();
        } else {
            self.domain.leave();
        }
    }
}

/// Clock that all members share: time since boot, without suspend.
pub fn merge_clock() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    Duration::new(time.tv_sec.cast_unsigned(), time.tv_nsec as u32)
}

fn random_u64() -> io::Result<u64> {
    let mut bytes = [0; 8];
    getrandom(&mut bytes, GetRandomFlags::empty())?;
    Ok(u64::from_ne_bytes(bytes))
}
