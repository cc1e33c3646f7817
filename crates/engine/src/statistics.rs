//! Counters of merges, and status of members and regions.

use crate::decide::time_budget::WorkRound;
use pagefold_base::engine::{EngineTimeUse, PageTally};
use pagefold_base::{AddressRange, Bytes, NetBytes, Pages};
use std::ops::AddAssign;
use std::time::Duration;

/// Counters of one merge, or of all merges together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MergeCounters {
    /// Resident pages whose contents were scanned.
    pub pages_scanned: Pages,
    /// Pages of zeros that were freed.
    pub zeros_freed: Pages,
    /// Pages that map the store now.
    pub pages_merged: Pages,
    /// Merged and freed pages that are not expected to last: they were merged before and written too soon.
    pub unlikely_to_last: Pages,
    /// Pages whose contents were written to the store.
    pub contents_stored: Pages,
    /// Runs of at most 2,048 pages that were mapped as one.
    pub runs_mapped: u64,
    /// Pages of zeros or with a partner that were not merged because their run was unprofitable. It is too short, would
    /// split a huge page that saves more or that the slowdown bound keeps, or would exceed the maximum number of
    /// mappings.
    pub unprofitable: Pages,
    /// Pages that were written since they were merged or freed.
    pub cow_breaks: Pages,
    /// COW breaks of pages that were expected to last but were written before their merge was profitable.
    pub early_cow_breaks: Pages,
    /// Freed pages of zeros that were read since, each counted once, and huge pages as one: such a read costs a fault,
    /// too.
    pub zeros_read: Pages,
    /// Pages that were skipped because they were written too soon before, or scanned without a partner too often.
    pub backed_off: Pages,
    /// Pages that could not be merged: the store was full, the kernel refused, or a content was no longer stored.
    pub pages_failed: Pages,
    /// Time of the program that merging took.
    pub program_time: Duration,
    /// Merges that did not scan everything: time or memory was short, the merge was not expected to be profitable, or
    /// all members are to merge at a later time.
    pub incomplete_merges: u64,
    /// Merges that left work to a later one. Either another member held the domain's lock for too long (it may be
    /// stopped), or files of the domain were removed meanwhile.
    pub blocked_merges: u64,
}

impl MergeCounters {
    /// Cost and net savings of the round. Stored contents count as used frames. Pages that are not expected to last
    /// count neither as gained nor, when written, as lost; their part of the stored contents does not count either.
    pub fn to_work_round(&self, page_bytes: u64) -> WorkRound {
        let bytes = |pages: Pages| (pages.0 * page_bytes).cast_signed();
        let all = self.zeros_freed + self.pages_merged;
        let stored = self.contents_stored - Pages(self.contents_stored.0 * self.unlikely_to_last.0 / all.0.max(1));
        WorkRound {
            time_spent: self.program_time,
            net_gained: NetBytes(bytes(all - self.unlikely_to_last) - bytes(stored + self.early_cow_breaks)),
            is_complete: self.incomplete_merges == 0 && self.blocked_merges == 0,
        }
    }
}

impl AddAssign for MergeCounters {
    fn add_assign(&mut self, other: Self) {
        self.pages_scanned += other.pages_scanned;
        self.zeros_freed += other.zeros_freed;
        self.pages_merged += other.pages_merged;
        self.unlikely_to_last += other.unlikely_to_last;
        self.contents_stored += other.contents_stored;
        self.runs_mapped += other.runs_mapped;
        self.unprofitable += other.unprofitable;
        self.cow_breaks += other.cow_breaks;
        self.early_cow_breaks += other.early_cow_breaks;
        self.zeros_read += other.zeros_read;
        self.backed_off += other.backed_off;
        self.pages_failed += other.pages_failed;
        self.program_time += other.program_time;
        self.incomplete_merges += other.incomplete_merges;
        self.blocked_merges += other.blocked_merges;
    }
}

/// Status of a member, and size of its domain's store.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MemberStatus {
    /// Pages of this process's regions, resident or not.
    pub pages: Pages,
    /// Pages of these that map the store and were not written since.
    pub merged: Pages,
    /// Pages of zeros that were freed and not written since: they use no memory.
    pub zeros: Pages,
    /// Pages that are skipped now because they were written too soon after they were merged.
    pub rewritten_pages: Pages,
    /// Memory that the domain's store uses, for all members together.
    pub store_bytes: Bytes,
    /// Memory of this process that is pinned long-term, as for a device: it must not be adopted.
    pub pinned_bytes: Bytes,
    /// Number of mappings of this process.
    pub mapping_count: u64,
    /// Memory that this process uses for notes on the pages of its regions.
    pub note_bytes: Bytes,
    /// Merges of this process so far, including those that did nothing.
    pub merge_count: u64,
    /// Time that the engine has taken from this program, and its bound.
    pub time_use: EngineTimeUse,
    /// Counters of all merges of this process so far.
    pub totals: MergeCounters,
}

/// Status of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionStatus {
    /// Its address range.
    pub range: AddressRange,
    /// Its pages.
    pub tally: PageTally,
    /// Gross savings by merging in it, by the mean of the domain.
    pub saved: NetBytes,
}
