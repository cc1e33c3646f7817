//! Holding an account against the kernel's counters, and explaining each difference.
//!
//! First the balance, which needs no counter: the fair shares of the processes seen, plus the shares of mappers that
//! were not seen, are the frames in use. It holds exactly, as integers, unless numbers of mappings changed while they
//! were read; what that moved is a figure of its own. Then line by line what the kernel counts of the same memory
//! (`/proc/meminfo`, `/sys/kernel/mm/ksm/*`, `/proc/PID/ksm_stat`, `smaps_rollup`), with the reasons why the two may
//! differ. The reasons were found by experiment on 6.18 and in mm/ksm.c:
//!
//! - `pages_shared`, `pages_sharing` and `ksm_merging_pages` change when ksmd visits a page, not when a merged page is
//!   written, unmapped or its process ends. With ksmd stopped they stay as they are.
//! - A fork maps KSM frames once more without metadata: the child's `ksm_merging_pages` begins at 0 (`ksm_fork`,
//!   include/linux/ksm.h), and such mappings count in `pages_sharing` only after ksmd has visited the child. They may
//!   also exceed `max_page_sharing`, which limits merging and not forking.
//! - `ksm_zero_pages` changes at once when such a page is written or unmapped (`ksm_might_unmap_zero_page`), in the
//!   host's counter and in the process's.
//! - A KSM frame counts in `AnonPages` once, a zero page not at all.

use super::{Account, Basis, Footprint, Frames, MappingShares, signed};
use pagefold_base::ksm::{DEFAULT_MAX_PAGE_SHARING, Ksm, RMAP_ITEM_BYTES};
use pagefold_base::memory::MemInfo;
use pagefold_base::reading::{Absent, Reading};
use pagefold_base::units::{Bytes, NetBytes, PageSize, Pages};

/// The sum of all shares against the frames in use.
///
/// `fair + unseen + lost - excess + moved = frames`, up to a byte of rounding in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Balance {
    /// Frames mapped by the processes seen, each once; the kernel's zero pages are not among them.
    pub frames: Bytes,
    /// The fair shares of the processes seen.
    pub fair: Bytes,
    /// The shares of mappers that were not seen.
    pub unseen: Bytes,
    /// The shares of processes that could not be read to the end.
    pub partially_read: Bytes,
    /// The shares of mappings beyond the kernel's count: frames given on between two reads, address spaces that are
    /// shared by processes.
    pub excess: Bytes,
    /// What is left: numbers of mappings that changed while they were read. Zero if `exact`.
    pub changed_mappings: NetBytes,
    /// Whether the shares add up to the frames without any remainder, in integers.
    pub exact: bool,
}

/// What a line counts in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CounterUnit {
    /// Base pages.
    Pages,
    /// Bytes.
    Bytes,
}

/// The kernel's counters that an account is held against.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum KernelCounter {
    /// `Pss:` of `smaps_rollup`, summed over the processes.
    Pss,
    /// `AnonPages` of `/proc/meminfo`.
    AnonPages,
    /// `pages_shared`.
    PagesShared,
    /// `pages_sharing`.
    PagesSharing,
    /// `ksm_merging_pages`, summed over the processes.
    MergingPages,
    /// `ksm_zero_pages`.
    ZeroPages,
    /// `stable_node_dups` less `stable_node_chains`.
    FramesAtSharingLimit,
    /// `Hugetlb` of `/proc/meminfo`.
    Hugetlb,
    /// The kernel counts no mappings of its huge zero page.
    HugeZeroPage,
    /// `general_profit`.
    GeneralProfit,
    /// `ksm_process_profit`, summed over the processes.
    ProcessProfit,
}

impl KernelCounter {
    /// What the account counts.
    pub fn account_label(self) -> &'static str {
        match self {
            Self::Pss => "fair shares without hugetlb",
            Self::AnonPages => "anonymous frames",
            Self::PagesShared => "KSM frames",
            Self::PagesSharing => "pages saved by KSM frames",
            Self::MergingPages => "pages mapped to KSM frames",
            Self::ZeroPages => "pages mapped to the zero page",
            Self::FramesAtSharingLimit => "KSM frames at max_page_sharing",
            Self::Hugetlb => "hugetlb frames",
            Self::HugeZeroPage => "pages mapped to the huge zero page",
            Self::GeneralProfit | Self::ProcessProfit => "profit of KSM",
        }
    }

    /// Where the kernel's figure is from.
    pub fn kernel_label(self) -> &'static str {
        match self {
            Self::Pss => "sum of Pss, smaps_rollup",
            Self::AnonPages => "AnonPages, meminfo",
            Self::PagesShared => "pages_shared",
            Self::PagesSharing => "pages_sharing",
            Self::MergingPages => "sum of ksm_merging_pages",
            Self::ZeroPages => "ksm_zero_pages",
            Self::FramesAtSharingLimit => "stable_node_dups - stable_node_chains",
            Self::Hugetlb => "Hugetlb, meminfo",
            Self::HugeZeroPage => "no counter",
            Self::GeneralProfit => "general_profit",
            Self::ProcessProfit => "sum of ksm_process_profit",
        }
    }

    /// What both figures count in.
    pub fn unit(self) -> CounterUnit {
        match self {
            Self::Pss | Self::AnonPages | Self::Hugetlb | Self::GeneralProfit | Self::ProcessProfit => {
                CounterUnit::Bytes
            }
            Self::PagesShared
            | Self::PagesSharing
            | Self::MergingPages
            | Self::ZeroPages
            | Self::FramesAtSharingLimit
            | Self::HugeZeroPage => CounterUnit::Pages,
        }
    }

    /// Why the account may show less, and why it may show more, than the counter.
    fn difference_reasons(self) -> (&'static str, &'static str) {
        match self {
            Self::Pss => (
                "Pss was read at another moment than the frames",
                "Pss is rounded down for each page and to whole kB, and was read at another moment than the frames",
            ),
            Self::AnonPages => (
                "anonymous memory of processes that were not seen or that grew since, this program among them; the \
                 counter is summed from parts per CPU and may lag by 125 pages for each of them",
                "memory was freed since the frames were read; the counter is summed from parts per CPU and may lag by \
                 125 pages for each of them",
            ),
            Self::PagesShared => (
                "the counter is stale: frames whose pages were written or unmapped leave it when ksmd visits them; or \
                 they are mapped by processes that were not seen",
                "merging went on since the counter was read, or forked children keep frames that ksmd gave up",
            ),
            Self::PagesSharing => (
                "the counter is stale: pages that were written or unmapped, also by the end of their process, leave it \
                 when ksmd visits them; or they belong to processes that were not seen",
                "forked children map KSM frames that ksmd has not visited in them yet, or merging went on since",
            ),
            Self::MergingPages => (
                "the counters are stale: pages that were written or unmapped leave them when ksmd visits them",
                "forked children map KSM frames with a counter that begins at 0, or merging went on since",
            ),
            Self::ZeroPages => (
                "zero pages of processes or of sparse regions that were not seen",
                "the rest is memory that was read and never written, or zeros that were freed when huge pages were split; \
                 KSM counts neither",
            ),
            Self::FramesAtSharingLimit => (
                "further copies are not full: mappings left them, and ksmd moves none from one frame to another",
                "frames that forks filled, or that are the only copy of their content",
            ),
            Self::Hugetlb => (
                "the rest of the pool: free, reserved, or mapped by processes that were not seen",
                "the pool was changed since the frames were read",
            ),
            Self::HugeZeroPage => ("", ""),
            Self::GeneralProfit | Self::ProcessProfit => (
                "the kernel counts what was merged when ksmd last visited, the account what is",
                "forked children save memory with KSM frames that ksmd has not visited in them yet",
            ),
        }
    }
}

/// One figure of the account beside the kernel's figure for the same thing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CounterComparison {
    /// What is compared, and the unit of both figures.
    pub counter: KernelCounter,
    /// From the frames.
    pub account_value: i64,
    /// The kernel's.
    pub kernel_value: Reading<i64>,
    /// Why they differ, as far as they do.
    pub explanation: String,
}

impl CounterComparison {
    /// Ours less the kernel's.
    pub fn difference(&self) -> Reading<i64> {
        Ok(self.account_value.saturating_sub(self.kernel_value.clone()?))
    }
}

/// The difference between the pages that KSM frames save and `pages_sharing`, in the parts that make it up: pages.
///
/// The kernel counts `pages_shared + pages_sharing` as the sum of `ksm_merging_pages` over all processes, those that
/// ended since ksmd's last visit included (mm/ksm.c, `stable_tree_append`, `remove_rmap_item_from_tree`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharingDrift {
    /// Mapped to KSM frames by processes seen and not in their `ksm_merging_pages`: forked, or merged since.
    pub unvisited: i64,
    /// In the `ksm_merging_pages` of processes seen and no longer merged: written or unmapped since.
    pub stale: i64,
    /// Counted by the kernel for processes that ended or were not seen.
    pub counted_elsewhere: i64,
    /// Mapped to the KSM frames seen by processes that were not seen.
    pub unseen: i64,
    /// `pages_shared` less the KSM frames seen: each is one page more that is counted as saved.
    pub excess_frames: i64,
}

impl SharingDrift {
    fn from_footprints<'a>(
        footprints: impl Iterator<Item = &'a Footprint>,
        frames: &Frames,
        ksm: &Ksm,
    ) -> Reading<Self> {
        let shared = signed(ksm.pages_shared.clone()?);
        let mut drift = Self {
            unvisited: 0,
            stale: 0,
            counted_elsewhere: shared.saturating_add(signed(ksm.pages_sharing.clone()?)),
            unseen: signed(frames.ksm_mappings.0),
            excess_frames: shared - signed(frames.ksm.0),
        };
        for footprint in footprints {
            let (mapped, counted) = (signed(footprint.ksm.0), signed(footprint.merging_pages.clone()?));
            drift.unvisited += (mapped - counted).max(0);
            drift.stale += (counted - mapped).max(0);
            drift.counted_elsewhere -= counted;
            drift.unseen -= mapped;
        }
        Ok(drift)
    }

    /// The saved pages less `pages_sharing`.
    pub fn total(self) -> i64 {
        self.unvisited - self.stale - self.counted_elsewhere + self.unseen + self.excess_frames
    }

    /// The parts that are not zero, for people.
    fn describe(self) -> String {
        [
            (self.unvisited, "forked or newly merged pages that ksmd has not visited"),
            (-self.stale, "pages written or unmapped since ksmd's last visit"),
            (
                -self.counted_elsewhere,
                "pages still counted for processes that ended, or of processes that were not seen",
            ),
            (self.unseen, "pages on the same frames in processes that were not seen"),
            (self.excess_frames, "frames counted as shared that are not mapped any more, or not by the processes seen"),
        ]
        .into_iter()
        .filter(|(pages, _)| *pages != 0)
        .map(|(pages, what)| format!("{pages:+} {what}"))
        .collect::<Vec<_>>()
        .join("; ")
    }
}

/// The account against the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reconciliation {
    /// The shares against the frames.
    pub balance: Balance,
    /// The kernel's counters.
    pub comparisons: Vec<CounterComparison>,
    /// What `pages_sharing` differs by, in parts.
    pub drift: Reading<SharingDrift>,
    /// Processes in the account whose figures are estimates; they are in no line and not in the balance.
    pub estimated_processes: u64,
}

/// Hold an account against the kernel's counters, which should be read right after the frames.
pub fn reconcile(page: PageSize, accounts: &[Account], frames: &Frames, ksm: &Ksm, memory: &MemInfo) -> Reconciliation {
    let exact = || accounts.iter().map(|account| &account.footprint).filter(|f| f.basis == Basis::Exact);
    // Summed before anything is rounded to bytes.
    let mut all = Footprint::empty();
    exact().for_each(|footprint| all += footprint);
    let balance = compute_balance(page, &all.fair.exact, frames);
    let drift = SharingDrift::from_footprints(exact(), frames, ksm);
    let saved = signed(frames.ksm_mappings.saturating_sub(frames.ksm).0);
    let bytes = |pages: Pages| signed(page.bytes_of(pages).0);

    let figures = [
        (KernelCounter::Pss, signed(balance.fair.0) - bytes(frames.hugetlb), all.pss.clone().map(|pss| signed(pss.0))),
        (KernelCounter::AnonPages, bytes(frames.anonymous), memory.anon.clone().map(|anon| signed(anon.0))),
        (KernelCounter::PagesShared, signed(frames.ksm.0), ksm.pages_shared.clone().map(signed)),
        (KernelCounter::PagesSharing, saved, ksm.pages_sharing.clone().map(signed)),
        (KernelCounter::MergingPages, signed(all.ksm.0), all.merging_pages.clone().map(signed)),
        (KernelCounter::ZeroPages, signed(frames.zero.0), ksm.ksm_zero_pages.clone()),
        (KernelCounter::FramesAtSharingLimit, frames_at_limit(&all.ksm_fair.exact, ksm), copies_in_chains(ksm)),
        (KernelCounter::Hugetlb, bytes(frames.hugetlb), memory.hugetlb.clone().map(|hugetlb| signed(hugetlb.0))),
        (KernelCounter::HugeZeroPage, signed(frames.huge_zero.0), Err(Absent::NotOnThisKernel)),
    ];
    let profits = all.profit_counted_by_ksm(page).into_iter().flat_map(|NetBytes(profit)| {
        [
            (KernelCounter::GeneralProfit, profit, ksm.general_profit.clone()),
            (KernelCounter::ProcessProfit, profit, all.kernel_profit.clone().map(|profit| profit.0)),
        ]
    });
    let lines = figures
        .into_iter()
        .chain(profits)
        .map(|(counter, ours, kernel)| {
            let difference = kernel.as_ref().ok().map(|kernel| ours.saturating_sub(*kernel));
            let explanation = match &drift {
                Ok(drift) if counter == KernelCounter::PagesSharing && difference != Some(0) => drift.describe(),
                _ => explain_difference(counter, difference, page, frames),
            };
            CounterComparison { counter, account_value: ours, kernel_value: kernel, explanation }
        })
        .collect();
    Reconciliation {
        balance,
        comparisons: lines,
        drift,
        estimated_processes: (accounts.len() - exact().count()) as u64,
    }
}

fn compute_balance(page: PageSize, fair: &MappingShares, frames: &Frames) -> Balance {
    let mut all = fair.clone();
    all += &frames.unseen;
    all += &frames.partially_read;
    let exact = all.without(&frames.excess).and_then(|shares| shares.frames()) == Some(frames.distinct);
    let in_use = page.bytes_of(frames.distinct);
    let excess = frames.excess.bytes(page);
    let moved = signed(in_use.0 + excess.0) - signed(all.bytes(page).0);
    Balance {
        frames: in_use,
        fair: fair.bytes(page),
        unseen: frames.unseen.bytes(page),
        partially_read: frames.partially_read.bytes(page),
        excess,
        changed_mappings: NetBytes(if exact { 0 } else { moved }),
        exact,
    }
}

/// KSM frames with as many mappings as `max_page_sharing` allows or, after forks, more.
fn frames_at_limit(merged: &MappingShares, ksm: &Ksm) -> i64 {
    let limit = ksm.max_page_sharing.clone().unwrap_or(DEFAULT_MAX_PAGE_SHARING);
    signed(merged.iter().filter(|(n, _)| n.get() >= limit).map(|(n, pages)| pages.0.div_ceil(n.get())).sum())
}

/// Copies that contents keep beyond the first because one frame takes `max_page_sharing` mappings.
fn copies_in_chains(ksm: &Ksm) -> Reading<i64> {
    Ok(signed(ksm.stable_node_dups.clone()?).saturating_sub(signed(ksm.stable_node_chains.clone()?)))
}

/// Why the figures of a line differ, by the direction of the difference, and what the counter means besides.
fn explain_difference(counter: KernelCounter, difference: Option<i64>, page: PageSize, frames: &Frames) -> String {
    let (less, more) = counter.difference_reasons();
    // What is not stale nor forked but always so.
    let kept = if counter == KernelCounter::ProcessProfit { signed(page.bytes_of(frames.ksm).0) } else { 0 };
    let reason = match difference.map(|difference| difference.saturating_add(kept)) {
        _ if counter == KernelCounter::HugeZeroPage => {
            "mapped wherever memory for huge pages was read and never written; no process's memory, in neither RSS nor \
             PSS"
        }
        None => "the kernel gives no such figure here",
        Some(0) if kept > 0 => "nothing else differs",
        Some(0) => "agrees",
        Some(..0) => less,
        Some(_) => more,
    };
    let meaning = match counter {
        KernelCounter::MergingPages => format!(
            "; as a saving it overstates by pages_shared, {} pages, because it counts the copy that is kept",
            frames.ksm.0
        ),
        KernelCounter::ProcessProfit => format!(
            "; it overstates by pages_shared, {}, because it charges the copy that is kept to nobody",
            page.bytes_of(frames.ksm)
        ),
        KernelCounter::GeneralProfit => {
            format!("; both pay {RMAP_ITEM_BYTES} bytes of metadata for each page that ksmd keeps")
        }
        KernelCounter::FramesAtSharingLimit => {
            "; a content keeps a further copy for each max_page_sharing mappings".to_owned()
        }
        _ => String::new(),
    };
    format!("{reason}{meaning}")
}

#[cfg(test)]
mod tests;
