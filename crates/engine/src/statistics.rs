//! What merging came to.

use crate::decide::time_budget::WorkRound;
use pagefold_base::engine::{EngineTimeUse, PageTally};
use pagefold_base::{AddressRange, Bytes, NetBytes, Pages};
use std::ops::AddAssign;
use std::time::Duration;

/// What one merge did, or all of them together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MergeCounters {
    /// Resident pages whose contents were looked at.
    pub pages_scanned: Pages,
    /// Pages of zeros that were given back.
    pub zeros_freed: Pages,
    /// Pages that map the store now.
    pub pages_merged: Pages,
    /// Of these and of the zeros, the ones that are not expected to last: they were merged before and written too soon.
    pub unlikely_to_last: Pages,
    /// Pages whose contents went to the store.
    pub contents_stored: Pages,
    /// Runs of pages, of 2,048 at most, that were mapped as one.
    pub runs_mapped: u64,
    /// Pages of zeros or with a partner that were not merged, because their run is too short to pay, would split a huge
    /// page that is worth more or that the bound on the slow-down keeps, or would need more mappings than there may be.
    pub unprofitable: Pages,
    /// Pages that were written since they were merged or given back.
    pub cow_breaks: Pages,
    /// Of those, the ones that were expected to last, and had not for long enough to pay.
    pub early_cow_breaks: Pages,
    /// Pages of zeros that were given back and were found read since, each once, and huge ones as one: that costs a
    /// fault, too.
    pub zeros_read: Pages,
    /// Pages that were left alone because they were written too soon before, or looked at in vain too often.
    pub backed_off: Pages,
    /// Pages that could not be merged: the store was full, the kernel refused, or a content had gone.
    pub pages_failed: Pages,
    /// The time of the program that it took.
    pub program_time: Duration,
    /// Merges that did not look at everything: there was no time or memory for it, they were not expected to pay, or all
    /// members are to merge at a later moment.
    pub incomplete_merges: u64,
    /// Merges that left something for a later one, because another member had the domain's lock for too long (it may
    /// be stopped), or because files of the domain were removed meanwhile.
    pub blocked_merges: u64,
}

impl MergeCounters {
    /// What it took and won, with pages of so many bytes: what was stored takes frames, too. Pages that
    /// are not expected to last are not won, nor lost when they are written: neither they nor their part of what was
    /// stored count.
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

/// How a member stands, and what its domain's store takes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MemberStatus {
    /// Pages of this process's regions, resident or not.
    pub pages: Pages,
    /// Of them, those that map the store and were not written since.
    pub merged: Pages,
    /// Pages of zeros that were given back and not written since: they take no memory.
    pub zeros: Pages,
    /// Pages that are left alone now, because they were written too soon after they were merged.
    pub volatile_pages: Pages,
    /// Memory that the domain's store takes, of all members together.
    pub store_bytes: Bytes,
    /// Memory of this process that is pinned for long, as for a device: that must not be adopted.
    pub pinned_bytes: Bytes,
    /// The mappings that this process has.
    pub mapping_count: u64,
    /// The memory in which this process remembers the pages of its regions.
    pub note_bytes: Bytes,
    /// Merges of this process so far, those that did nothing among them.
    pub merge_count: u64,
    /// The time that the engine takes from this program, against what it may.
    pub time_use: EngineTimeUse,
    /// All merges of this process so far.
    pub totals: MergeCounters,
}

/// How a region stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionStatus {
    /// Where it is.
    pub range: AddressRange,
    /// Its pages.
    pub tally: PageTally,
    /// What merging saves in it, gross, by the mean of the domain.
    pub saved: NetBytes,
}
