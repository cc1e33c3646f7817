//! Accounts: the real memory cost of a process, virtual machine, cgroup or job.
//!
//! RSS ignores sharing: a page that ten processes map counts ten times. The fair share divides each frame by its
//! mappings. The shares of all mappers then add up to the frame, and the shares of all processes to the memory in use.
//! [`reconcile`] compares that sum with the kernel's counters.
//!
//! # Arithmetic
//! A share is stored as a histogram, [`MappingShares`]: the number of pages whose frame has N mappings, for each N.
//! Histograms are added as integers, in any order and without loss. When all N mappers of each frame were read, the
//! pages at N are a multiple of N, and the quotient is the number of frames. A fixed-point sum cannot do that: three
//! times 1/3 is not 1, and a common denominator of all N up to 65,535 does not fit any machine integer. Histograms are
//! small (a process has tens of different N). They are rounded to bytes once, when a figure is shown.
//!
//! # How savings are divided
//! A KSM frame with N mappings holds N pages in one frame. Each mapper therefore saves 1 - 1/N of a page, and the
//! savings of all mappers add up to the savings of the host. `ksm_process_profit` charges the kept copy to no process,
//! so its sum over the processes exceeds `general_profit` by `pages_shared` pages (mm/ksm.c, `ksm_process_profit`,
//! `general_profit_show`, 6.18).
//!
//! # Limits
//! Unmapped page cache, kernel memory and page tables belong to no process and are not in the account.

pub mod reconcile;

use pagefold_base::ksm::{Ksm, ProcessKsm, RMAP_ITEM_BYTES};
use pagefold_base::process::{Process, SmapsRollup};
use pagefold_base::reading::{Absent, Reading};
use pagefold_base::units::{Bytes, NetBytes, PageSize, Pages, ProcessId};
use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU64;
use std::ops::{Add, AddAssign};

/// Mapped pages by the number of mappings of their frame. This is an exact sum of fractions of pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MappingShares(BTreeMap<NonZeroU64, u64>);

impl MappingShares {
    /// Adds pages whose frames have this many mappings.
    pub fn add(&mut self, mappings: NonZeroU64, pages: u64) {
        if pages > 0 {
            *self.0.entry(mappings).or_default() += pages;
        }
    }

    /// The mapped pages, each counted in full.
    pub fn pages(&self) -> Pages {
        Pages(self.0.values().sum())
    }

    /// The pages whose frame has no other mapping.
    pub fn private(&self) -> Pages {
        Pages(self.0.get(&NonZeroU64::MIN).copied().unwrap_or(0))
    }

    /// The numbers of mappings, ascending, with their pages.
    pub fn iter(&self) -> impl Iterator<Item = (NonZeroU64, Pages)> {
        self.0.iter().map(|(&mappings, &pages)| (mappings, Pages(pages)))
    }

    /// The sum, to the nearest byte.
    pub fn bytes(&self, page: PageSize) -> Bytes {
        // 64 fractional bits: each term is short by less than 2^-64 of a byte, which rounding to nearest absorbs.
        const HALF_BYTE: u128 = 1 << 63;
        let fixed_point: u128 = self
            .iter()
            .map(|(mappings, pages)| {
                let (bytes, mappings) = (u128::from(pages.0) * u128::from(page.bytes()), u128::from(mappings.get()));
                ((bytes / mappings) << 64) + ((bytes % mappings) << 64) / mappings
            })
            .sum();
        Bytes(((fixed_point + HALF_BYTE) >> 64) as u64)
    }

    /// The difference to `other`, if `other` is contained in these shares.
    pub fn without(&self, other: &Self) -> Option<Self> {
        let mut rest = self.clone();
        for (mappings, pages) in &other.0 {
            let remaining_pages = rest.0.remove(mappings)?.checked_sub(*pages)?;
            rest.add(*mappings, remaining_pages);
        }
        Some(rest)
    }

    /// The sum in whole frames, if the pages at each number of mappings make up whole frames. This holds whenever every
    /// mapping of every frame is in the sum.
    pub fn frames(&self) -> Option<Pages> {
        self.0
            .iter()
            .map(|(mappings, pages)| pages.is_multiple_of(mappings.get()).then(|| Pages(*pages / *mappings)))
            .sum()
    }
}

impl AddAssign<&Self> for MappingShares {
    fn add_assign(&mut self, other: &Self) {
        for (mappings, pages) in other.iter() {
            self.add(mappings, pages.0);
        }
    }
}

/// A fair share: an exact part and an estimated part.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FairShare {
    /// Counted from the frames.
    pub exact: MappingShares,
    /// Derived from totals of the kernel.
    pub estimated: Bytes,
}

impl FairShare {
    /// Both parts, to the nearest byte.
    pub fn bytes(&self, page: PageSize) -> Bytes {
        self.exact.bytes(page) + self.estimated
    }
}

impl AddAssign<&Self> for FairShare {
    fn add_assign(&mut self, other: &Self) {
        self.exact += &other.exact;
        self.estimated += other.estimated;
    }
}

/// The pages that the page tables of one process map.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MappedPages {
    /// All pages except those mapped to the kernel's zero pages. Each base page of a huge page counts by itself.
    pub shares: MappingShares,
    /// The part of `shares` that is mapped to KSM frames.
    pub ksm: MappingShares,
    /// The part of `shares` that maps a store of the user-space engine ([`pagefold_base::engine`]).
    pub engine: MappingShares,
    /// The part of `shares` that is hugetlb memory, which RSS leaves out.
    pub hugetlb: Pages,
    /// Pages mapped to the kernel's zero page by a read fault or by KSM. They use no memory.
    pub zero: Pages,
    /// Pages mapped to the kernel's huge zero page. They use no memory.
    pub huge_zero: Pages,
    /// Pages whose frame had no mapping left when it was counted and that were not found in another frame. They are in
    /// no other field.
    pub gone: Pages,
}

/// All frames that the processes read map, each counted once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Frames {
    /// Distinct frames, without the kernel's zero pages.
    pub distinct: Pages,
    /// The anonymous frames among them, with KSM frames, without hugetlb.
    pub anonymous: Pages,
    /// The hugetlb frames among them.
    pub hugetlb: Pages,
    /// The KSM frames among them.
    pub ksm: Pages,
    /// All mappings of these KSM frames by the kernel's count, including mappings of processes that were not read.
    pub ksm_mappings: Pages,
    /// Pages mapped to the kernel's zero page, summed over the processes. They use no memory.
    pub zero: Pages,
    /// Pages mapped to the kernel's huge zero page, summed over the processes. They use no memory.
    pub huge_zero: Pages,
    /// Mappings of the frames by processes that were not read.
    pub unseen: MappingShares,
    /// Mappings found beyond the kernel's count: the frame was reused between two reads, or two processes run in one
    /// address space.
    pub excess: MappingShares,
    /// Pages of processes that could not be read to the end. Their frames are in `distinct`.
    pub partially_read: MappingShares,
    /// Mappings whose frame had another number of mappings when it was read through another process.
    pub changed_mappings: Pages,
    /// The processes that could not be read in full, with the reason.
    pub unread: Vec<(ProcessId, Absent)>,
}

/// Whether the figures of an account are exact.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Basis {
    /// Every frame was read.
    #[default]
    Exact,
    /// Frames could not be read, for this reason; the figures use the kernel's totals instead.
    Estimated(Absent),
}

impl fmt::Display for Basis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact => f.write_str("exact"),
            Self::Estimated(why) => write!(f, "estimated (frames: {why})"),
        }
    }
}

/// The footprint of a process, or the sum over several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Resident bytes regardless of merging and sharing; without hugetlb memory and the kernel's zero page, like
    /// `Rss:`.
    pub rss: Bytes,
    /// Resident hugetlb memory; unknown if estimated.
    pub hugetlb: Reading<Bytes>,
    /// `Pss:` of `smaps_rollup`: the kernel's own fair share, without hugetlb.
    pub pss: Reading<Bytes>,
    /// Bytes that are mapped once. A page that two members of a group share counts for neither.
    pub private: Bytes,
    /// Pages mapped to KSM frames.
    pub ksm: Pages,
    /// Pages that KSM mapped to the kernel's zero page; they are in neither RSS nor PSS.
    pub ksm_zero: Reading<Pages>,
    /// Zero pages that the kernel freed when it split huge pages for ksmd, as recorded by merges and still mapped in
    /// page tables. KSM's counters, RSS and PSS do not contain them.
    pub zeros_by_splitting: Reading<Pages>,
    /// Each page divided by the mappings of its frame.
    pub fair: FairShare,
    /// The KSM pages' part of `fair`.
    pub ksm_fair: FairShare,
    /// Pages that map a store of the user-space engine, by the store's name.
    pub engine: Reading<Pages>,
    /// The part of `fair` of these pages; unknown if estimated.
    pub engine_fair: Reading<MappingShares>,
    /// `ksm_rmap_items`: pages for which ksmd keeps metadata.
    pub rmap_items: Reading<u64>,
    /// `ksm_merging_pages`: the value of `ksm` at ksmd's last visit.
    pub merging_pages: Reading<u64>,
    /// `ksm_process_profit`, which charges the kept copy to no process.
    pub kernel_profit: Reading<NetBytes>,
    /// Swapped-out bytes.
    pub swap: Reading<Bytes>,
    /// Exact or estimated.
    pub basis: Basis,
}

impl Footprint {
    /// The footprint of no process, the start value of sums.
    pub fn empty() -> Self {
        Self {
            rss: Bytes::ZERO,
            hugetlb: Ok(Bytes::ZERO),
            pss: Ok(Bytes::ZERO),
            private: Bytes::ZERO,
            ksm: Pages::ZERO,
            ksm_zero: Ok(Pages::ZERO),
            zeros_by_splitting: Ok(Pages::ZERO),
            fair: FairShare::default(),
            ksm_fair: FairShare::default(),
            engine: Ok(Pages::ZERO),
            engine_fair: Ok(MappingShares::default()),
            rmap_items: Ok(0),
            merging_pages: Ok(0),
            kernel_profit: Ok(NetBytes(0)),
            swap: Ok(Bytes::ZERO),
            basis: Basis::Exact,
        }
    }

    /// The exact footprint, from the frames and with the kernel's `Pss:` and swapped-out bytes.
    pub fn exact(
        page: PageSize,
        mapped: MappedPages,
        pss: Reading<Bytes>,
        swap: Reading<Bytes>,
        ksm: &ProcessKsm,
    ) -> Self {
        Self {
            rss: page.bytes_of(mapped.shares.pages().saturating_sub(mapped.hugetlb)),
            hugetlb: Ok(page.bytes_of(mapped.hugetlb)),
            pss,
            private: page.bytes_of(mapped.shares.private()),
            ksm: mapped.ksm.pages(),
            fair: FairShare { exact: mapped.shares, estimated: Bytes::ZERO },
            ksm_fair: FairShare { exact: mapped.ksm, estimated: Bytes::ZERO },
            engine: Ok(mapped.engine.pages()),
            engine_fair: Ok(mapped.engine),
            swap,
            basis: Basis::Exact,
            ..Self::counters(ksm)
        }
    }

    /// An estimated footprint, from totals that the kernel shows to the owner of a process. `why` is the reason why the
    /// frames could not be read.
    ///
    /// The fair share is `Pss:`. The number of mappings of the KSM pages is unknown, so each counts as the host's mean,
    /// `pages_shared / (pages_shared + pages_sharing)` of a page. Without `KSM:` (before 6.6) the KSM pages are
    /// `ksm_merging_pages`, which may be stale. The error is that of the first missing total.
    pub fn estimated(
        page: PageSize,
        rollup: &SmapsRollup,
        process: &ProcessKsm,
        host: &Ksm,
        why: Absent,
    ) -> Reading<Self> {
        let counters = Self::counters(process);
        // `KSM:` does not include zero pages merged by KSM (fs/proc/task_mmu.c, `smaps_account`; observed on 6.18).
        let ksm = match &rollup.ksm {
            Ok(bytes) => page.pages_in(*bytes),
            Err(_) => Pages(counters.merging_pages.clone()?),
        };
        let ksm_fair = if ksm == Pages::ZERO {
            Bytes::ZERO
        } else {
            let (shared, sharing) = (u128::from(host.pages_shared.clone()?), u128::from(host.pages_sharing.clone()?));
            // The process has merged pages that ksmd has not counted yet. At least two pages share a frame.
            let (part, whole) = if shared + sharing == 0 { (1, 2) } else { (shared, shared + sharing) };
            Bytes((u128::from(page.bytes_of(ksm).0) * part / whole) as u64)
        };
        let fair = rollup.pss.clone()?;
        Ok(Self {
            rss: rollup.rss.clone()?,
            hugetlb: Err(why.clone()),
            pss: Ok(fair),
            private: rollup.private_clean.clone()? + rollup.private_dirty.clone()?,
            ksm,
            fair: FairShare { exact: MappingShares::default(), estimated: fair },
            ksm_fair: FairShare { exact: MappingShares::default(), estimated: ksm_fair },
            swap: rollup.swap.clone(),
            engine: Err(why.clone()),
            engine_fair: Err(why.clone()),
            basis: Basis::Estimated(why),
            ..counters
        })
    }

    /// The figures of `/proc/PID/ksm_stat` alone.
    fn counters(ksm: &ProcessKsm) -> Self {
        Self {
            // The kernel's counter is signed and updated without a lock; a negative value means zero.
            ksm_zero: ksm.zero_pages.clone().map(|pages| Pages(u64::try_from(pages).unwrap_or(0))),
            rmap_items: ksm.rmap_items.clone(),
            merging_pages: ksm.merging_pages.clone(),
            kernel_profit: ksm.profit.clone().map(NetBytes),
            ..Self::empty()
        }
    }

    /// The gross savings of this process by merging: those that KSM counts, and the zeros in split huge pages if known.
    pub fn saved(&self, page: PageSize) -> Reading<Bytes> {
        let freed_by_splitting = self.zeros_by_splitting.as_ref().map_or(Bytes::ZERO, |pages| page.bytes_of(*pages));
        Ok(self.counted_by_ksm(page)? + freed_by_splitting)
    }

    /// The savings that KSM counts: all pages that it merged, minus the share that the process still pays for them.
    pub fn counted_by_ksm(&self, page: PageSize) -> Reading<Bytes> {
        let merged = page.bytes_of(self.ksm).saturating_sub(self.ksm_fair.bytes(page));
        Ok(merged + page.bytes_of(self.ksm_zero.clone()?))
    }

    /// The gross savings of this process by the user-space engine: all pages that map its store, minus the share that
    /// the process still pays for them. Zeros that the engine freed are not included.
    pub fn engine_saved(&self, page: PageSize) -> Reading<Bytes> {
        Ok(page.bytes_of(self.engine.clone()?).saturating_sub(self.engine_fair.clone()?.bytes(page)))
    }

    /// The cost of the process if all its merged pages were unmerged. This is its fair share with every KSM page and
    /// every zero page from KSM or from the splitting of a huge page in full. Pages shared for other reasons (page
    /// cache, fork) stay shared.
    pub fn unmerged(&self, page: PageSize) -> Reading<Bytes> {
        Ok(self.fair.bytes(page) + self.saved(page)?)
    }

    /// The savings of this process by merging, minus the metadata that ksmd keeps for it.
    pub fn profit(&self, page: PageSize) -> Reading<NetBytes> {
        self.subtract_metadata(self.saved(page)?)
    }

    /// The net savings that KSM counts, to compare with the kernel's profit figures.
    pub fn profit_counted_by_ksm(&self, page: PageSize) -> Reading<NetBytes> {
        self.subtract_metadata(self.counted_by_ksm(page)?)
    }

    fn subtract_metadata(&self, saved: Bytes) -> Reading<NetBytes> {
        let metadata = self.rmap_items.clone()?.saturating_mul(RMAP_ITEM_BYTES);
        Ok(NetBytes(signed(saved.0) - signed(metadata)))
    }
}

/// Saturates; no host reaches the limit.
fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// The sum of two readings; absent if either is absent, because a partial sum would be misleading.
fn sum<T: Clone + Add<Output = T>>(a: &Reading<T>, b: &Reading<T>) -> Reading<T> {
    Ok(a.clone()? + b.clone()?)
}

impl AddAssign<&Self> for Footprint {
    fn add_assign(&mut self, other: &Self) {
        self.rss += other.rss;
        self.hugetlb = sum(&self.hugetlb, &other.hugetlb);
        self.pss = sum(&self.pss, &other.pss);
        self.private += other.private;
        self.ksm += other.ksm;
        self.ksm_zero = sum(&self.ksm_zero, &other.ksm_zero);
        self.zeros_by_splitting = sum(&self.zeros_by_splitting, &other.zeros_by_splitting);
        self.fair += &other.fair;
        self.ksm_fair += &other.ksm_fair;
        self.engine = sum(&self.engine, &other.engine);
        match (&mut self.engine_fair, &other.engine_fair) {
            (Ok(sum), Ok(other)) => *sum += other,
            (Err(_), _) => {}
            (sum, Err(why)) => *sum = Err(why.clone()),
        }
        self.rmap_items = sum(&self.rmap_items, &other.rmap_items);
        self.merging_pages = sum(&self.merging_pages, &other.merging_pages);
        self.kernel_profit = match (&self.kernel_profit, &other.kernel_profit) {
            (Ok(a), Ok(b)) => Ok(NetBytes(a.0.saturating_add(b.0))),
            (Err(why), _) | (_, Err(why)) => Err(why.clone()),
        };
        self.swap = sum(&self.swap, &other.swap);
        if self.basis == Basis::Exact {
            self.basis = other.basis.clone();
        }
    }
}

/// A process and its footprint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    /// The process.
    pub process: Process,
    /// The memory it uses.
    pub footprint: Footprint,
}

/// How to group processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupBy {
    /// Each process by itself.
    Process,
    /// The virtual machine.
    Vm,
    /// The cgroup.
    Cgroup,
    /// The job: a Slurm job with all its steps, an MPI job.
    Job,
    /// The step of a Slurm job; other jobs have one.
    Step,
    /// The effective user.
    User,
}

/// The group that a sum belongs to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum GroupKey {
    /// A process and its `comm`.
    Process(ProcessId, String),
    /// A virtual machine: its monitor's process, and its name if it has one.
    Vm(ProcessId, Option<String>),
    /// A cgroup by its path.
    Cgroup(String),
    /// A job or step by its name.
    Job(String),
    /// A user by number.
    User(u32),
    /// Processes that belong to no group.
    Ungrouped,
    /// Processes whose group could not be read, with the reason.
    Unread(Absent),
}

/// A sum over processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FootprintGroup {
    /// The group.
    pub key: GroupKey,
    /// Number of processes.
    pub processes: u64,
    /// The sum of their footprints.
    pub footprint: Footprint,
}

impl GroupBy {
    /// The group of a process.
    pub fn key(self, process: &Process) -> GroupKey {
        let or_unread_group =
            |reading: Result<GroupKey, &Absent>| reading.unwrap_or_else(|why| GroupKey::Unread(why.clone()));
        let identity = &process.identity;
        match self {
            Self::Process => GroupKey::Process(process.id, process.comm.clone()),
            Self::Vm => {
                identity.vm.as_ref().map_or(GroupKey::Ungrouped, |vm| GroupKey::Vm(process.id, vm.name.clone()))
            }
            Self::Cgroup => or_unread_group(process.cgroup.as_ref().map(|path| GroupKey::Cgroup(path.clone()))),
            Self::User => or_unread_group(process.uid.as_ref().map(|&uid| GroupKey::User(uid))),
            Self::Step => identity.job.as_ref().map_or(GroupKey::Ungrouped, |job| GroupKey::Job(job.name.clone())),
            Self::Job => {
                identity.job.as_ref().map_or(GroupKey::Ungrouped, |job| GroupKey::Job(job_without_step(&job.name)))
            }
        }
    }
}

/// `slurm:1234` for the step `slurm:1234.0`; other names unchanged.
fn job_without_step(name: &str) -> String {
    let slurm = name.starts_with("slurm:").then(|| name.split_once('.')).flatten();
    slurm.map_or(name, |(job, _)| job).to_owned()
}

/// The footprints summed by group, in the order of the keys. Every account is in exactly one group, so the total is the
/// same for every grouping.
pub fn group_footprints(accounts: &[Account], by: GroupBy) -> Vec<FootprintGroup> {
    let mut groups = BTreeMap::<GroupKey, (u64, Footprint)>::new();
    for account in accounts {
        let (processes, footprint) = groups.entry(by.key(&account.process)).or_insert_with(|| (0, Footprint::empty()));
        *processes += 1;
        *footprint += &account.footprint;
    }
    groups.into_iter().map(|(key, (processes, footprint))| FootprintGroup { key, processes, footprint }).collect()
}

#[cfg(test)]
mod tests;
