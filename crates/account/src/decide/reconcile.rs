//! Compares an account with the kernel's counters and explains each difference.
//!
//! The balance comes first and needs no counter: the fair shares of the processes read, plus the shares of other
//! mappers, equal the frames in use. It holds exactly, in integers, unless numbers of mappings changed while they were
//! read; such changes are a separate figure. Then each line compares a figure with the kernel's counter
//! (`/proc/meminfo`, `/sys/kernel/mm/ksm/*`, `/proc/PID/ksm_stat`, `smaps_rollup`) and gives the reasons why they may
//! differ. The reasons were found by experiment on 6.18 and in mm/ksm.c:
//!
//! - `pages_shared`, `pages_sharing` and `ksm_merging_pages` change when ksmd visits a page. They do not change when a
//!   merged page is written or unmapped or its process exits, and with ksmd stopped they do not change at all.
//! - A fork maps KSM frames once more without metadata: the child's `ksm_merging_pages` begins at 0 (`ksm_fork`,
//!   include/linux/ksm.h), and such mappings count in `pages_sharing` only after ksmd has visited the child. They may
//!   also exceed `max_page_sharing`, which limits merging and not forking.
//! - `ksm_zero_pages` changes at once when such a page is written or unmapped (`ksm_might_unmap_zero_page`), in the
//!   counters of the host and of the process.
//! - A KSM frame counts in `AnonPages` once, a zero page not at all.

use super::{Account, Basis, Footprint, Frames, MappingShares, signed};
use pagefold_base::ksm::{DEFAULT_MAX_PAGE_SHARING, Ksm, RMAP_ITEM_BYTES};
use pagefold_base::memory::MemInfo;
use pagefold_base::reading::{Absent, Reading};
use pagefold_base::units::{Bytes, NetBytes, PageSize, Pages};

/// The sum of all shares compared with the frames in use.
///
/// `fair + unseen + partially_read - excess + changed_mappings = frames`, within a rounding error of one byte in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Balance {
    /// Frames mapped by the processes read, each counted once, without the kernel's zero pages.
    pub frames: Bytes,
    /// The fair shares of the processes read.
    pub fair: Bytes,
    /// The shares of mappers that were not read.
    pub unseen: Bytes,
    /// The shares of processes that could not be read to the end.
    pub partially_read: Bytes,
    /// The shares of mappings beyond the kernel's count: frames reused between two reads, and address spaces shared by
    /// processes.
    pub excess: Bytes,
    /// The remainder, caused by numbers of mappings that changed while they were read. Zero if `exact`.
    pub changed_mappings: NetBytes,
    /// Whether the shares add up to the frames exactly, in integers.
    pub exact: bool,
}

/// The unit of a compared figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CounterUnit {
    /// Base pages.
    Pages,
    /// Bytes.
    Bytes,
}

/// The kernel's counters that an account is compared with.
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
    /// `stable_node_dups` minus `stable_node_chains`.
    FramesAtSharingLimit,
    /// `Hugetlb` of `/proc/meminfo`.
    Hugetlb,
    /// The mappings of the huge zero page, for which the kernel has no counter.
    HugeZeroPage,
    /// `general_profit`.
    GeneralProfit,
    /// `ksm_process_profit`, summed over the processes.
    ProcessProfit,
}

impl KernelCounter {
    /// The label of the account's figure.
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

    /// The source of the kernel's figure.
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

    /// The unit of both figures.
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

    /// Why the account may show less than the counter, and why it may show more.
    fn difference_reasons(self) -> (&'static str, &'static str) {
        match self {
            Self::Pss => (
                "Pss was read at another time than the frames",
                "Pss is rounded down for each page and to whole kB, and was read at another time than the frames",
            ),
            Self::AnonPages => (
                "anonymous memory of processes that were not read or grew since, including this program; the \
                 counter is summed from parts per CPU and may lag by 125 pages for each of them",
                "memory was freed since the frames were read; the counter is summed from parts per CPU and may lag by \
                 125 pages for each of them",
            ),
            Self::PagesShared => (
                "the counter is stale: frames whose pages were written or unmapped leave it when ksmd visits them; or \
                 they are mapped by processes that were not read",
                "merging went on since the counter was read, or forked children keep frames that ksmd gave up",
            ),
            Self::PagesSharing => (
                "the counter is stale: pages that were written or unmapped, also by the end of their process, leave it \
                 when ksmd visits them; or they belong to processes that were not read",
                "forked children map KSM frames that ksmd has not visited in them yet, or merging went on since",
            ),
            Self::MergingPages => (
                "the counters are stale: pages that were written or unmapped leave them when ksmd visits them",
                "forked children map KSM frames with a counter that begins at 0, or merging went on since",
            ),
            Self::ZeroPages => (
                "zero pages of processes or of sparse regions that were not read",
                "the rest is memory that was read and never written, or zeros that were freed when huge pages were \
                 split; KSM counts neither",
            ),
            Self::FramesAtSharingLimit => (
                "further copies are not full: some mappings ended, and ksmd does not move mappings between frames",
                "frames that forks filled, or that are the only copy of their content",
            ),
            Self::Hugetlb => (
                "the rest of the pool: free, reserved, or mapped by processes that were not read",
                "the pool was changed since the frames were read",
            ),
            Self::HugeZeroPage => ("", ""),
            Self::GeneralProfit | Self::ProcessProfit => (
                "the kernel counts the pages merged at ksmd's last visit, the account those merged now",
                "forked children save memory with KSM frames that ksmd has not visited in them yet",
            ),
        }
    }
}

/// A figure of the account and the kernel's figure for the same memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CounterComparison {
    /// The counter, which also determines the unit of both figures.
    pub counter: KernelCounter,
    /// The figure of the account, from the frames.
    pub account_value: i64,
    /// The kernel's figure.
    pub kernel_value: Reading<i64>,
    /// The reasons for the difference, if there is one.
    pub explanation: String,
}

impl CounterComparison {
    /// The account's figure minus the kernel's.
    pub fn difference(&self) -> Reading<i64> {
        Ok(self.account_value.saturating_sub(self.kernel_value.clone()?))
    }
}

/// The difference between the pages saved by KSM frames and `pages_sharing`, divided into its causes, in pages.
///
/// The kernel counts `pages_shared + pages_sharing` as the sum of `ksm_merging_pages` over all processes, including
/// those that exited since ksmd's last visit (mm/ksm.c, `stable_tree_append`, `remove_rmap_item_from_tree`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharingDrift {
    /// Pages mapped to KSM frames by the processes read, but not in their `ksm_merging_pages`: forked or merged since.
    pub unvisited: i64,
    /// Pages in the `ksm_merging_pages` of the processes read that are no longer merged: written or unmapped since.
    pub stale: i64,
    /// Pages that the kernel counts for processes that exited or were not read.
    pub counted_elsewhere: i64,
    /// Pages mapped to the counted KSM frames by processes that were not read.
    pub unseen: i64,
    /// `pages_shared` minus the KSM frames counted. Each of these frames is a page more that counts as saved.
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

    /// The saved pages minus `pages_sharing`.
    pub fn total(self) -> i64 {
        self.unvisited - self.stale - self.counted_elsewhere + self.unseen + self.excess_frames
    }

    /// The causes that are not zero, as text.
    fn describe(self) -> String {
        [
            (self.unvisited, "forked or newly merged pages that ksmd has not visited"),
            (-self.stale, "pages written or unmapped since ksmd's last visit"),
            (
                -self.counted_elsewhere,
                "pages still counted for processes that ended, or of processes that were not read",
            ),
            (self.unseen, "pages on the same frames in processes that were not read"),
            (self.excess_frames, "frames counted as shared that are not mapped any more, or not by the processes read"),
        ]
        .into_iter()
        .filter(|(pages, _)| *pages != 0)
        .map(|(pages, what)| format!("{pages:+} {what}"))
        .collect::<Vec<_>>()
        .join("; ")
    }
}

/// The comparison of an account with the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reconciliation {
    /// The comparison of the shares with the frames.
    pub balance: Balance,
    /// The comparisons with the kernel's counters.
    pub comparisons: Vec<CounterComparison>,
    /// The causes of the difference to `pages_sharing`.
    pub drift: Reading<SharingDrift>,
    /// Processes in the account with estimated figures. They are in no comparison and not in the balance.
    pub estimated_processes: u64,
}

/// Compares an account with the kernel's counters, which should be read right after the frames.
pub fn reconcile(page: PageSize, accounts: &[Account], frames: &Frames, ksm: &Ksm, memory: &MemInfo) -> Reconciliation {
    let exact_footprints =
        || accounts.iter().map(|account| &account.footprint).filter(|footprint| footprint.basis == Basis::Exact);
    // Sums before rounding to bytes.
    let mut total = Footprint::empty();
    exact_footprints().for_each(|footprint| total += footprint);
    let balance = compute_balance(page, &total.fair.exact, frames);
    let drift = SharingDrift::from_footprints(exact_footprints(), frames, ksm);
    let saved_pages = signed(frames.ksm_mappings.saturating_sub(frames.ksm).0);
    let bytes = |pages: Pages| signed(page.bytes_of(pages).0);

    let figures = [
        (
            KernelCounter::Pss,
            signed(balance.fair.0) - bytes(frames.hugetlb),
            total.pss.clone().map(|pss| signed(pss.0)),
        ),
        (KernelCounter::AnonPages, bytes(frames.anonymous), memory.anon.clone().map(|anon| signed(anon.0))),
        (KernelCounter::PagesShared, signed(frames.ksm.0), ksm.pages_shared.clone().map(signed)),
        (KernelCounter::PagesSharing, saved_pages, ksm.pages_sharing.clone().map(signed)),
        (KernelCounter::MergingPages, signed(total.ksm.0), total.merging_pages.clone().map(signed)),
        (KernelCounter::ZeroPages, signed(frames.zero.0), ksm.ksm_zero_pages.clone()),
        (KernelCounter::FramesAtSharingLimit, frames_at_limit(&total.ksm_fair.exact, ksm), copies_in_chains(ksm)),
        (KernelCounter::Hugetlb, bytes(frames.hugetlb), memory.hugetlb.clone().map(|hugetlb| signed(hugetlb.0))),
        (KernelCounter::HugeZeroPage, signed(frames.huge_zero.0), Err(Absent::NotOnThisKernel)),
    ];
    let profits = total.profit_counted_by_ksm(page).into_iter().flat_map(|NetBytes(profit)| {
        [
            (KernelCounter::GeneralProfit, profit, ksm.general_profit.clone()),
            (KernelCounter::ProcessProfit, profit, total.kernel_profit.clone().map(|profit| profit.0)),
        ]
    });
    let comparisons = figures
        .into_iter()
        .chain(profits)
        .map(|(counter, account_value, kernel_value)| {
            let difference = kernel_value.as_ref().ok().map(|kernel_value| account_value.saturating_sub(*kernel_value));
            let explanation = match &drift {
                Ok(drift) if counter == KernelCounter::PagesSharing && difference != Some(0) => drift.describe(),
                _ => explain_difference(counter, difference, page, frames),
            };
            CounterComparison { counter, account_value, kernel_value, explanation }
        })
        .collect();
    Reconciliation {
        balance,
        comparisons,
        drift,
        estimated_processes: (accounts.len() - exact_footprints().count()) as u64,
    }
}

fn compute_balance(page: PageSize, fair: &MappingShares, frames: &Frames) -> Balance {
    let mut total = fair.clone();
    total += &frames.unseen;
    total += &frames.partially_read;
    let exact = total.without(&frames.excess).and_then(|shares| shares.frames()) == Some(frames.distinct);
    let in_use = page.bytes_of(frames.distinct);
    let excess = frames.excess.bytes(page);
    let remainder = signed(in_use.0 + excess.0) - signed(total.bytes(page).0);
    Balance {
        frames: in_use,
        fair: fair.bytes(page),
        unseen: frames.unseen.bytes(page),
        partially_read: frames.partially_read.bytes(page),
        excess,
        changed_mappings: NetBytes(if exact { 0 } else { remainder }),
        exact,
    }
}

/// KSM frames whose number of mappings reaches `max_page_sharing` or, after forks, exceeds it.
fn frames_at_limit(merged: &MappingShares, ksm: &Ksm) -> i64 {
    let limit = ksm.max_page_sharing.clone().unwrap_or(DEFAULT_MAX_PAGE_SHARING);
    signed(merged.iter().filter(|(n, _)| n.get() >= limit).map(|(n, pages)| pages.0.div_ceil(n.get())).sum())
}

/// Additional copies of contents that have more mappings than one frame may take (`max_page_sharing`).
fn copies_in_chains(ksm: &Ksm) -> Reading<i64> {
    Ok(signed(ksm.stable_node_dups.clone()?).saturating_sub(signed(ksm.stable_node_chains.clone()?)))
}

/// Why the figures differ, by the direction of the difference, and the meaning of the counter.
fn explain_difference(counter: KernelCounter, difference: Option<i64>, page: PageSize, frames: &Frames) -> String {
    let (reason_if_less, reason_if_more) = counter.difference_reasons();
    // The expected difference: `ksm_process_profit` does not charge the kept copies.
    let uncharged_bytes = if counter == KernelCounter::ProcessProfit { signed(page.bytes_of(frames.ksm).0) } else { 0 };
    let reason = match difference.map(|difference| difference.saturating_add(uncharged_bytes)) {
        _ if counter == KernelCounter::HugeZeroPage => {
            "mapped where memory for huge pages was read and never written; it belongs to no process and is in neither \
             RSS nor PSS"
        }
        None => "this kernel has no such counter",
        Some(0) if uncharged_bytes > 0 => "nothing else differs",
        Some(0) => "agrees",
        Some(..0) => reason_if_less,
        Some(_) => reason_if_more,
    };
    let meaning = match counter {
        KernelCounter::MergingPages => format!(
            "; as a saving it overstates by pages_shared, {} pages, because it counts the kept copy",
            frames.ksm.0
        ),
        KernelCounter::ProcessProfit => format!(
            "; it overstates by pages_shared, {}, because it charges the kept copy to no process",
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
