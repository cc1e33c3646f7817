//! Samepage merging in user space: identical pages of programs that trust each other become private mappings of one
//! shared memory, and pages of zeros are given back. The kernel's copy-on-write does the rest.
//!
//! ```no_run
//! use pagefold_engine::{Engine, Options};
//!
//! let engine = Engine::join("job42", &Options::default())?;
//! let region = engine.allocate(1 << 30)?;
//! // ... fill and compute ...
//! // SAFETY: at this point of the program nobody writes to the region.
//! let merged = unsafe { engine.merge() }?;
//! println!("{} pages merged in {:?}", merged.merged.0, merged.time);
//! # drop(region);
//! # Ok::<(), crate::Error>(())
//! ```
//!
//! A **domain** is processes of one user that trust each other, by a name. They share a store (a memfd) and an index of
//! what lies in it (a directory only that user can enter, under `/dev/shm`). A member **adopts** private anonymous
//! memory and **merges** at points at which nobody writes to it. Everything is done by the process itself, without
//! privilege and without KSM; what is merged counts as shared memory, so that PSS and cgroups show the saving.
//!
//! What is merged in one call: pages that hold what another member, or another page of this one, was seen to hold. A
//! content goes to the store once it was seen in two places, so what only one member has is never touched, and members
//! that merge one after another find each other's contents one merge later. With a bound on the slow-down a content
//! counts as seen once it was the same at two merges, by a sample, and members merge at the same safe points: see
//! [`EngineOptions::max_slowdown`].
//!
//! How regions, members and the domain stand is told by [`Engine::region_statuses`], [`Engine::status`] and
//! [`Engine::domain_status`]; to others, who are no members, by [`observe`].
//!
//! # What is promised
//! - Memory reads the same before and after, whatever happens: contents are compared byte by byte before one mapping
//!   takes the place of another in a single step (`memory`).
//! - No content goes away under a process that may map it, however that came to map it: by merging, or by being forked
//!   (`references`, `domain`). One that nobody maps any more leaves the store, as members find that out when they
//!   merge; a few that a member could still refer to may stay.
//! - A member may die at any point. Nobody waits for it, and what it had is free for others.
//! - A merge takes no more memory than half of what its cgroup, those above it and the host have left, shared by the
//!   members of its domain (`headroom`): it works in windows that fit, or does nothing.
//! - A member may be stopped at any point. A merge waits at most a second for the lock of a domain, then leaves what
//!   needs it for a later one, and says so ([`MergeCounters::blocked_merges`]).
//! - With [`EngineOptions::max_slowdown`] the time that the engine takes from its program stays about that share, once what it
//!   was told of [`EngineOptions::min_runtime`] is over. Only looking, and copying written pages back into ordinary memory, stop
//!   when there is no time left: what was found is still stored and mapped. A COW break of a merged page, and a read of
//!   zeros that were given back, is counted when a later merge finds it, at what such a fault costs by itself
//!   ([`MemberStatus::time_use`]). What was spent beyond the share is made up for before anything else is done.
//!
//! # What a program does to its regions
//! - **write**: the kernel copies the page. At the next merge it becomes ordinary memory again, and is left alone for
//!   longer and longer if it does not last ([`crate::decide::page_note`]).
//! - **fork**: the child has the same memory. It may use the engine, too, and is a member of its own then; unless
//!   another thread was using the engine while it was forked, which is told ([`Error::Forked`]), or it is in another PID
//!   namespace than members that there are.
//! - **exec**: the program has left its domain, and what it had is free for others.
//! - **munmap**: what it mapped leaves the store. Whatever private anonymous memory is there next is taken for adopted,
//!   and that may be anybody's: [`Engine::disown`] what is unmapped first.
//! - **mmap in the place**: what is no longer private anonymous memory is left alone, and what is, is taken for memory
//!   that was written.
//! - **mremap**: memory that was moved keeps its contents and is no longer merged. It is not to be moved again during a
//!   merge, unless it was forsaken before: then it may be, while [`Engine::merge_while_running`] runs. Memory that has
//!   grown reads in its new pages as nothing in particular, until they are written.
//! - **mprotect**: memory that may not be read and written is left alone. What of it is merged stays so.
//! - **`madvise(MADV_DONTNEED)`**: a merged page reads as what it was merged with afterwards, and not as zeros, because
//!   it is a mapping of a file. Use [`Engine::clear`]. So it does once a guard region (`MADV_GUARD_INSTALL`) is
//!   removed; while there is one, it is left alone.
//! - **huge pages**: without a bound on the slow-down they are split where as much is merged as pays for that; with one,
//!   see [`EngineOptions::split_huge_pages`]. Before Linux 6.7 they cannot be told from others.
//! - **core dumps**: merged memory is file memory, which `/proc/PID/coredump_filter` leaves out by default; joining a
//!   domain puts it in (bit 2, core(5)).
//! - **devices and direct I/O**: memory that is pinned for a device must not be merged, since the device would go on
//!   writing to the old frames. While `VmPin` of the process is above zero a merge is refused ([`Error::MemoryPinned`]), unless
//!   [`EngineOptions::merge_while_pinned`] vouches for it. Memory must not be registered or pinned while a merge runs: the
//!   kernel accounts a pin only after it is made, so that a merge does not see one in the making. `VmPin` is read when a
//!   merge begins, and before each replacement by [`Engine::merge_while_running`]. `VmPin` counts RDMA and registered buffers of io_uring, charged to
//!   the process that made the ring. It does not count what other drivers pin (VFIO, AF_XDP, some GPUs), nor pins of a
//!   moment: `O_DIRECT`, io_uring or process_vm_writev into adopted memory must not be under way during a merge.
//! - **advice and locks on memory**: what merging maps has none: `MADV_WIPEONFORK`, `MADV_DONTFORK`, `MADV_DONTDUMP`,
//!   mlock, mbind and protection keys are lost on merged pages. Memory that has them is not for adoption, nor are
//!   stacks.
//! - **closing descriptors that are not its own** (`closefrom`): between merges the engine finds out and joins anew;
//!   during a merge it must not be done.
//!
//! # Unsafe
//! `unsafe` is in `memory`, in `words`, where `pass`, `choose`, `survey` and `store` map and compare, where regions are
//! lent and released, in `background`, and in `capi`, for what C gives and takes; each block says why it holds. The one
//! promise that is the caller's is that nobody writes to adopted memory during a merge.

mod adopted_region;
mod background;
mod capi;
mod claims;
mod content_index;
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
mod own_mappings;
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

/// Why something could not be done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no place for the domain.
    #[error(transparent)]
    Directory(#[from] domain_directory::DirectoryError),
    /// The domain cannot be joined or used.
    #[error("the domain {name:?} cannot be used")]
    DomainUnusable {
        /// Its name.
        name: String,
        /// Why.
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
        /// First address after it.
        end: u64,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// Writers cannot be made to wait.
    #[error(
        "merging while the program runs needs Linux 6.4 and userfaultfd: CAP_SYS_PTRACE, \
         vm.unprivileged_userfaultfd=1, or access to /dev/userfaultfd; merging at safe points does not"
    )]
    WriteProtectUnavailable(#[source] io::Error),
    /// Merging would lose what a device or io_uring writes to pinned memory.
    #[error(
        "cannot merge: {0} of this process is pinned, and what a device or io_uring writes there would be lost; unpin \
         it, or set merge_while_pinned if none of it is adopted"
    )]
    MemoryPinned(Bytes),
    /// Whether memory is pinned is not known.
    #[error("cannot merge: VmPin cannot be read from /proc/thread-self/status; mount /proc, or set merge_while_pinned")]
    PinnedUnreadable(#[source] io::Error),
    /// There is no memory.
    #[error("no memory for a region of {0}")]
    OutOfMemory(Bytes, #[source] io::Error),
    /// The domain cannot be looked at.
    #[error(transparent)]
    DomainUnreadable(#[from] observe::ObserveError),
}

/// How a member behaves.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineOptions {
    /// Where domains are kept; by default `$PAGEFOLD_RUNTIME`, else `/dev/shm/pagefold-UID`.
    pub root: Option<PathBuf>,
    /// By how much the program may be slowed down, as a share of the time that it would take by itself; `None` for no
    /// bound. What a merge has no time for waits for a later one. Members with safe points within a second of each
    /// other wait for a moment at which all of a domain merge ([`crate::decide::merge_turn`]), since others may wait for
    /// whoever merges alone. While merges do not win what their time is worth they come less and less often, a minute
    /// apart at most where there is room for them, until there is new memory that could pay for one
    /// ([`crate::decide::time_budget::RoundBackoff`]); [`Engine::merge_while_running`] leaves that to its caller.
    pub max_slowdown: Option<f64>,
    /// For how long the program is known to run at least, from when it joins: merges that are expected to pay may take
    /// what the bound allows of that time from the beginning on, which is when most is to be merged, and all of it at
    /// one safe point. Until then, and for a program that ends sooner, the slow-down may be more. Of no meaning without
    /// a bound.
    pub min_runtime: Duration,
    /// Threads that look and map at the same time. Storing is done by one, since the kernel has one at a time write to
    /// a file.
    pub threads: usize,
    /// Have a domain, and so a store, for each NUMA node, and join that of the node on which this process runs then:
    /// what is merged stays local, and nothing is merged across nodes. For processes that stay on a node, as ranks do
    /// that are bound to it. The domain of node 1 is called `NAME.node1`.
    pub per_node: bool,
    /// How long to wait at most for the lock of a domain that is to be joined, in which others may be at work one after
    /// another.
    pub max_join_wait: Duration,
    /// Merge although memory of this process is pinned, for a device (RDMA) or io_uring. The caller vouches that
    /// none of the pinned memory is adopted: what is written to pinned pages after they were merged is lost. Without
    /// it a merge fails with [`Error::MemoryPinned`] while `VmPin` of `/proc/self/status` is above zero.
    pub merge_while_pinned: bool,
    /// Split huge pages wherever that saves memory, for a program that was measured not to lose by it. Without it, and
    /// with a bound on the slow-down, a huge page is split only if all of its pages are zeros, or all of them have a
    /// partner and the TLB misses that this is expected to cost fit into the bound ([`crate::decide::huge_page_loss`]).
    pub split_huge_pages: bool,
}

impl Default for EngineOptions {
    /// 2 % of the program's own time, on one thread, and ten seconds to join.
    fn default() -> Self {
        Self {
            root: None,
            max_slowdown: Some(0.02),
            min_runtime: Duration::ZERO,
            threads: 1,
            per_node: false,
            max_join_wait: Duration::from_secs(10),
            merge_while_pinned: false,
            split_huge_pages: false,
        }
    }
}

/// What a range is to be taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageAdvice {
    /// It may be merged, whatever is known of how often it was written. The default.
    Mergeable,
    /// It stays as it is: what is merged stays merged until it is written, and nothing more is.
    Unmergeable,
    /// It is written again and again, and is left alone as if that had been found out: for 68 minutes, pages that are
    /// merged once they are written. [`Engine::clear`] ends that, and so does forsaking and adopting it again.
    Volatile,
}

/// A member of a domain. Leaves it when dropped; what is merged stays merged.
#[derive(Debug)]
pub struct Engine {
    name: String,
    directory: PathBuf,
    options: EngineOptions,
    state: ManuallyDrop<Mutex<EngineState>>,
    /// What a merge works on, and what was freed beside it.
    claims: RangeClaims,
    /// The process that used it last: if `state` is locked in another, by a thread that there is not.
    last_user_pid: AtomicU32,
}

/// What a member knows of itself.
#[derive(Debug)]
struct EngineState {
    /// The process that joined: a child is not yet a member.
    owner_pid: u32,
    /// Where the domain's memory is to be, if that was asked for.
    wanted_node: Option<u32>,
    domain: JoinedDomain,
    hasher: Hasher,
    /// This member's own number, for [`content_index::SightingTag`].
    tag_number: u64,
    regions: Vec<Adopted>,
    time_budget: TimeBudget,
    split_ledger: huge_page_split::HugePageSplitLedger,
    round_backoff: RoundBackoff,
    /// Memory that was adopted since the last merge and not given up.
    newly_adopted: Bytes,
    /// Pages that the last merge found and did not come to, or is to look at again at once.
    promising_pages: Pages,
    fault_costs: memory::FaultCosts,
    started: Instant,
    totals: MergeCounters,
    /// How many merges there were, and when the last one ended, since the host was booted.
    merge_count: u64,
    last_merge: Option<Duration>,
    /// Where the last merge that was cut short had come to.
    resume_address: u64,
    /// When the program was at a safe point last, and the moment at which this member merged with the others.
    last_safe_point: Option<Duration>,
    last_merge_time: Duration,
    /// How long the last merge took to find out what there is.
    survey_time: Duration,
    /// Whether the next merge need not ask whether it has its turn: it has.
    is_turn_granted: bool,
    headroom: CgroupHeadroom,
    /// Slots that memory maps which was forsaken: it may be anywhere, and be moved while others are looked for.
    disowned_slots: SlotSet,
}

/// Memory of a member. Unmapped when dropped.
#[derive(Debug)]
pub struct AllocatedRegion<'e> {
    engine: &'e Engine,
    range: AddressRange,
}

impl Engine {
    /// Become a member of the domain of a name, or found it. In a rank of an MPI job [`job_domain_name`] is a good name.
    ///
    /// # Errors
    /// If there is no directory for it, if its members are in another PID namespace, if this process may have no file as
    /// large as the host's memory (RLIMIT_FSIZE), or if files cannot be had.
    pub fn join(name: &str, options: &EngineOptions) -> Result<Self, Error> {
        let root = options.root.clone().unwrap_or_else(domain_directory::default_root);
        let failed = |source| Error::DomainUnusable { name: name.to_owned(), source };
        let node = options.per_node.then(numa::current_node).transpose().map_err(failed)?;
        let name = &node.map_or_else(|| name.to_owned(), |node| format!("{name}.node{node}"));
        domain::remove_dead_domains(&root);
        let until = Instant::now() + options.max_join_wait;
        let (directory, state) = loop {
            let directory = domain_directory::prepare_domain_directory(&root, name)?;
            match EngineState::join(&directory, options, node) {
                // The last member took it away, or files were removed meanwhile.
                Err(error) if incarnation::wait_to_retry(&error, until) => {}
                joined => break (directory, joined.map_err(failed)?),
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

    /// New memory of so many bytes, rounded up to whole pages, that may be merged.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn allocate(&self, bytes: usize) -> Result<AllocatedRegion<'_>, Error> {
        let whole = (bytes as u64).checked_next_multiple_of(rustix::param::page_size() as u64);
        // More than there are addresses is refused by the kernel, too.
        let bytes = whole.unwrap_or(u64::MAX);
        // Before the lock is taken: where another thread has freed memory in this place, that is forgotten first.
        let range = memory::map_ordinary(bytes).map_err(|source| Error::OutOfMemory(Bytes(bytes), source))?;
        let taken = self.with_state(|state| {
            state.adopt_range(range);
            state.publish_status(&self.options);
        });
        if taken.is_err() {
            // SAFETY: it was made above, and nothing else knows of it.
            let _ = unsafe { memory::unmap_range(range) };
        }
        taken.map(|()| AllocatedRegion { engine: self, range })
    }

    /// Take memory of the program into the engine's hands, until [`Engine::disown`].
    ///
    /// # Errors
    /// [`Error::InvalidRange`] if it is not of whole pages, or overlaps what is adopted already.
    ///
    /// # Safety
    /// The range is private anonymous memory. No device has it pinned. Once [`Engine::merge`] may run, whoever unmaps
    /// or replaces part of it does so between merges.
    pub unsafe fn adopt(&self, range: AddressRange) -> Result<(), Error> {
        self.with_state(|state| {
            let page = state.domain.page_bytes();
            check_page_aligned(range, page)?;
            if state.regions.iter().any(|region| region.range().overlap(range).is_some()) {
                let why = "overlaps what is adopted already";
                return Err(Error::InvalidRange { start: range.start, end: range.end, reason: why });
            }
            state.adopt_range(range);
            state.publish_status(&self.options);
            Ok(())
        })?
    }

    /// Leave adopted memory within a range of whole pages alone from now on. What of it is merged stays so until it is
    /// written, and the program may do to it whatever it likes. What it maps of the store stays there while only
    /// [`Engine::merge_while_running`] is used; [`Engine::merge`] looks for what is mapped still.
    ///
    /// # Errors
    /// [`Error::InvalidRange`] if it is not of whole pages; [`Error::DomainUnusable`]. Then nothing has changed.
    pub fn disown(&self, range: AddressRange) -> Result<(), Error> {
        self.with_state(|state| {
            check_page_aligned(range, state.domain.page_bytes())?;
            if state.regions.iter().any(|region| region.range().overlap(range).is_some()) {
                let strays = survey::mapped_slots(&state.domain, range);
                state
                    .disowned_slots
                    .extend(strays.map_err(|source| Error::DomainUnusable { name: self.name.clone(), source })?);
            }
            state.disown_range(range);
            state.publish_status(&self.options);
            Ok(())
        })?
    }

    /// Forget what is known of pages: the program has given up what was in them, by `madvise(MADV_DONTNEED)` on
    /// ordinary memory, say, and they are not taken for merged any more.
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

    /// The process is about to end: if all other members of the domain are, too, the domain's directory goes now, and not
    /// with the next who joins one. What is merged stays as it is. In a child that has not joined nothing is done.
    pub fn prepare_exit(&self) {
        let process = std::process::id();
        if let Ok(mut state) = self.lock_state(process)
            && state.owner_pid == process
        {
            state.domain.prepare_exit();
        }
    }

    /// Say what a range of regions is to be taken for.
    ///
    /// # Errors
    /// [`Error::InvalidRange`] if it is not of whole pages, [`Error::Forked`].
    pub fn advise(&self, range: AddressRange, advice: PageAdvice) -> Result<(), Error> {
        let now = merge_clock();
        self.with_state(|state| {
            check_page_aligned(range, state.domain.page_bytes())?;
            state.regions.iter_mut().for_each(|region| region.advise(range, advice, now));
            Ok(())
        })?
    }

    /// Merge what is identical now.
    ///
    /// Where there is a bound on the slow-down and nothing is left of it, or the last merges did not pay
    /// ([`EngineOptions::max_slowdown`]), nothing is done.
    ///
    /// # Errors
    /// [`Error::MemoryPinned`]; [`Error::DomainUnusable`]: what was merged before stays merged.
    ///
    /// # Safety
    /// Until it returns nobody, no signal handler either, writes to, unmaps or replaces adopted memory, or moves what
    /// was adopted before; and no mutable borrow of it is used. No adopted memory is registered or pinned meanwhile, as
    /// for io_uring or RDMA.
    pub unsafe fn merge(&self) -> Result<MergeCounters, Error> {
        self.merge_with(|| Ok(WriteExclusion::promised(&self.claims)))
    }

    /// Merge what is identical, while the program runs: writers wait for as long as the pages that they write to are in
    /// hand. A thread has 512 of them in hand at most, 2 MiB with pages of 4 KiB, for as long as it takes to compare,
    /// copy or map those. The calling thread takes no signals meanwhile: a handler in it that writes to a page in hand
    /// would wait for the thread that it has interrupted. Handlers in other threads may write, and wait as any writer.
    ///
    /// # Errors
    /// [`Error::MemoryPinned`], [`Error::WriteProtectUnavailable`] where writers cannot be made to wait, [`Error::DomainUnusable`].
    ///
    /// # Safety
    /// Until it returns nobody unmaps, moves or replaces adopted memory but by the engine's own functions, or closes
    /// descriptors that are not its own. Adopted memory holds no thread's stack, and no mutex with priority inheritance
    /// or that is robust: the kernel does not wait to write to those. No direct or asynchronous I/O into it is under
    /// way, and none of it is registered or pinned meanwhile, as for io_uring or RDMA.
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
            // With the lock: what was pinned while another merge had it is seen.
            self.check_not_pinned()?;
            let merged = state.merge_now(&self.options, &self.directory, &exclusion()?);
            merged.map_err(|source| Error::DomainUnusable { name: self.name.clone(), source })
        })?
    }

    /// Merging would lose what is written to pinned memory afterwards, so it is refused.
    fn check_not_pinned(&self) -> Result<(), Error> {
        match pinned_bytes() {
            _ if self.options.merge_while_pinned => Ok(()),
            Ok(Bytes::ZERO) => Ok(()),
            Ok(pinned) => Err(Error::MemoryPinned(pinned)),
            Err(source) => Err(Error::PinnedUnreadable(source)),
        }
    }

    /// Make whole pages of adopted memory read as zeros, and take no memory. What `madvise(MADV_DONTNEED)` does to
    /// ordinary memory.
    ///
    /// # Errors
    /// [`Error::InvalidRange`] if it is not of whole pages that are adopted; [`Error::OutOfMemory`].
    ///
    /// # Safety
    /// No borrow of it is used afterwards.
    pub unsafe fn clear(&self, range: AddressRange) -> Result<(), Error> {
        self.with_state(|state| {
            check_page_aligned(range, state.domain.page_bytes())?;
            let adopted = AddressRange::union(state.regions.iter().map(|region| region.range()).collect());
            if !range.subtract(&adopted).is_empty() {
                let why = "is not adopted";
                return Err(Error::InvalidRange { start: range.start, end: range.end, reason: why });
            }
            // SAFETY: it is adopted, and its owner says that nobody uses what is in it.
            unsafe { memory::clear_range(range) }.map_err(|source| Error::OutOfMemory(range.bytes(), source))?;
            state.regions.iter_mut().for_each(|region| region.forget_pages(range));
            Ok(())
        })?
    }

    /// How this member stands, and what the domain's store takes.
    ///
    /// # Errors
    /// [`Error::DomainUnusable`].
    pub fn status(&self) -> Result<MemberStatus, Error> {
        self.with_state(|state| {
            let standing = state.status(&self.options);
            standing.map_err(|source| Error::DomainUnusable { name: self.name.clone(), source })
        })?
    }

    /// How each region of this member stands, by address, and what it saves by the mean of the domain
    /// ([`pagefold_base::engine`]).
    ///
    /// # Errors
    /// [`Error::DomainUnusable`], [`Error::DomainUnreadable`].
    pub fn region_statuses(&self) -> Result<Vec<RegionStatus>, Error> {
        // Told anew by this, so that the domain's mean is of the same moment.
        self.status()?;
        let domain = self.domain_status()?;
        let standing = |region: &Adopted| {
            let RegionTally { range, tally } = region.region_tally();
            RegionStatus { range, tally, saved: domain.saved(&tally) }
        };
        let mut regions: Vec<RegionStatus> = self.with_state(|state| state.regions.iter().map(standing).collect())?;
        regions.sort_by_key(|region| region.range);
        Ok(regions)
    }

    /// How the domain stands: all members, as each of them has told last, which it does when it merges, when its
    /// regions change, and when it is asked how it stands.
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

    /// Do something with the state, as a member: a child that was forked joins first.
    fn with_state<T>(&self, work: impl FnOnce(&mut EngineState) -> T) -> Result<T, Error> {
        let process = std::process::id();
        let mut state = self.lock_state(process)?;
        self.last_user_pid.store(process, Ordering::Relaxed);
        let until = Instant::now() + self.options.max_join_wait;
        let joined = if state.owner_pid == process {
            Ok(())
        } else {
            state.rejoin_domain(&self.directory, until).map(|()| state.publish_status(&self.options))
        };
        joined.map_err(|source| Error::DomainUnusable { name: self.name.clone(), source })?;
        // Without it, memory that was given up would still be merged, which may be in other use now.
        if !self.remove_revoked_regions(&mut state) {
            return Err(Error::Forked);
        }
        let done = work(&mut state);
        self.remove_revoked_regions(&mut state);
        Ok(done)
    }

    fn lock_state(&self, process: u32) -> Result<MutexGuard<'_, EngineState>, Error> {
        match self.state.try_lock() {
            Ok(state) => return Ok(state),
            Err(std::sync::TryLockError::Poisoned(poisoned)) => return Ok(poisoned.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => {}
        }
        // Whoever has just locked it here says so at once.
        let said = || self.last_user_pid.load(Ordering::Relaxed) == process;
        if !(0..MAX_STATE_POLLS).any(|_| {
            said() || {
                std::thread::sleep(STATE_POLL_INTERVAL);
                false
            }
        }) {
            return Err(Error::Forked);
        }
        Ok(self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }
}

/// How long to wait until a thread that has the state says so, and how often.
const STATE_POLL_INTERVAL: Duration = Duration::from_millis(1);
const MAX_STATE_POLLS: usize = 50;

impl Drop for Engine {
    fn drop(&mut self) {
        let forked = matches!(self.lock_state(std::process::id()), Err(Error::Forked));
        if !forked {
            // SAFETY: it is dropped here only, and nothing uses it afterwards.
            unsafe { ManuallyDrop::drop(&mut self.state) };
        }
        // What a thread that there is not was at may be half done, and stays until the process ends.
    }
}

fn check_page_aligned(range: AddressRange, page: u64) -> Result<(), Error> {
    if range.start < range.end && range.start.is_multiple_of(page) && range.end.is_multiple_of(page) {
        return Ok(());
    }
    Err(Error::InvalidRange { start: range.start, end: range.end, reason: "is not of whole pages" })
}

impl EngineState {
    fn join(directory: &std::path::Path, options: &EngineOptions, node: Option<u32>) -> io::Result<Self> {
        let page = rustix::param::page_size() as u64;
        let (domain, hasher) = JoinedDomain::join(directory, page, node, Instant::now() + options.max_join_wait)?;
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

    /// Become a member once more: in a child that was forked, or when the program has closed the store, or all members
    /// that could hand it on. The references that there were stay with the mapping that a parent and its children
    /// share. Waits for the domain's lock until some time.
    fn rejoin_domain(&mut self, directory: &std::path::Path, deadline: Instant) -> io::Result<()> {
        let (domain, hasher) = incarnation::retry_while_removed(deadline, || {
            // The directory may have been removed.
            if let Some((root, name)) = directory.parent().zip(directory.file_name().and_then(|name| name.to_str())) {
                domain_directory::prepare_domain_directory(root, name).map_err(io::Error::other)?;
            }
            let (domain, hasher) = JoinedDomain::join(directory, self.domain.page_bytes(), self.wanted_node, deadline)?;
            // What this process maps already is referred to anew before the former references go.
            domain.references.add(survey::mapped_slots(&domain, survey::ALL_ADDRESSES)?)?;
            if domain.store.identity() == self.domain.store.identity() {
                domain.references.add(self.disowned_slots.iter())?;
            }
            Ok((domain, hasher))
        })?;
        if domain.store.identity() != self.domain.store.identity() {
            // This process may still map the former store: no member frees any of it, and all join anew.
            self.domain.abandon_incarnation();
            self.disowned_slots = SlotSet::default();
        }
        self.domain = domain;
        (self.hasher, self.owner_pid, self.tag_number) = (hasher, std::process::id(), random_u64()?);
        Ok(())
    }

    /// Have a range of whole pages adopted.
    fn adopt_range(&mut self, range: AddressRange) {
        self.regions.push(Adopted::new(range, self.domain.page_bytes()));
        self.newly_adopted += range.bytes();
    }

    /// Be done with what is adopted in a range.
    fn disown_range(&mut self, range: AddressRange) {
        let unsurveyed: Bytes = self.regions.iter().map(|region| region.unsurveyed_bytes(range)).sum();
        self.newly_adopted = Bytes(self.newly_adopted.0.saturating_sub(unsurveyed.0));
        let cut: Vec<Adopted> = self.regions.extract_if(.., |region| region.range().overlap(range).is_some()).collect();
        self.regions.extend(cut.iter().flat_map(|region| region.subtract(range)));
    }

    fn status(&mut self, options: &EngineOptions) -> io::Result<MemberStatus> {
        let mappings = adopted_region::tally_regions(&self.domain, &mut self.regions, merge_clock())?;
        self.publish_status(options);
        let PageTally { pages, merged, zeros, volatile_pages: hot } = self.total_tally();
        Ok(MemberStatus {
            pages,
            merged,
            zeros,
            volatile_pages: hot,
            store_bytes: Bytes(self.domain.store.allocated_bytes()?),
            pinned_bytes: pinned_bytes()?,
            mapping_count: mappings,
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

    /// Tell others how this member stands.
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
        // What is merged stays mapped, and so has to stay referred to. In a child that never joined, by its parent's.
        let strays = self.disowned_slots.iter().next().is_some();
        let mapped = survey::mapped_slots(&self.domain, survey::ALL_ADDRESSES);
        if strays || mapped.map_or(true, |mut slots| slots.next().is_some()) {
            self.domain.references.keep_until_exit();
        } else {
            self.domain.leave();
        }
    }
}

/// A clock that all members share: the time since the host was booted, without the time that it slept.
pub fn merge_clock() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    Duration::new(time.tv_sec.cast_unsigned(), time.tv_nsec as u32)
}

fn random_u64() -> io::Result<u64> {
    let mut bytes = [0; 8];
    getrandom(&mut bytes, GetRandomFlags::empty())?;
    Ok(u64::from_ne_bytes(bytes))
}
