//! What merging came to.

use crate::decide::allowance::Round;
use pagefold_base::engine::{Spending, Tally};
use pagefold_base::{AddressRange, Bytes, NetBytes, Pages};
use std::ops::AddAssign;
use std::time::Duration;

/// What one merge did, or all of them together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Merged {
    /// Resident pages whose contents were looked at.
    pub looked_at: Pages,
    /// Pages of zeros that were given back.
    pub zeros: Pages,
    /// Pages that map the store now.
    pub merged: Pages,
    /// Of these and of the zeros, the ones that are not expected to last: they were merged before and written too soon.
    pub retried: Pages,
    /// Pages whose contents went to the store.
    pub stored: Pages,
    /// Runs of pages, of 2,048 at most, that were mapped as one.
    pub runs: u64,
    /// Pages of zeros or with a partner that were not merged, because their run is too short to pay, would split a huge
    /// page that is worth more or that the bound on the slow-down keeps, or would need more mappings than there may be.
    pub not_worth: Pages,
    /// Pages that were written since they were merged or given back.
    pub broken: Pages,
    /// Of those, the ones that were expected to last, and had not for long enough to pay.
    pub short_lived: Pages,
    /// Pages of zeros that were given back and were found read since, each once, and huge ones as one: that costs a
    /// fault, too.
    pub read: Pages,
    /// Pages that were left alone because they were written too soon before, or looked at in vain too often.
    pub left_alone: Pages,
    /// Pages that could not be merged: the store was full, the kernel refused, or a content had gone.
    pub failed: Pages,
    /// The time of the program that it took.
    pub time: Duration,
    /// Merges that did not look at everything: there was no time or memory for it, they were not expected to pay, or all
    /// members are to merge at a later moment.
    pub cut_short: u64,
    /// Merges that left something for a later one, because another member had the domain's lock for too long (it may
    /// be stopped), or because files of the domain were removed meanwhile.
    pub held_up: u64,
}

impl Merged {
    /// What it took and won, with pages of so many bytes: what was stored takes frames, too. Pages that
    /// are not expected to last are not won, nor lost when they are written: neither they nor their part of what was
    /// stored count.
    pub fn round(&self, page: u64) -> Round {
        let bytes = |pages: Pages| (pages.0 * page).cast_signed();
        let all = self.zeros + self.merged;
        let stored = self.stored - Pages(self.stored.0 * self.retried.0 / all.0.max(1));
        Round {
            cost: self.time,
            won: NetBytes(bytes(all - self.retried) - bytes(stored + self.short_lived)),
            whole: self.cut_short == 0 && self.held_up == 0,
        }
    }
}

impl AddAssign for Merged {
    fn add_assign(&mut self, other: Self) {
        self.looked_at += other.looked_at;
        self.zeros += other.zeros;
        self.merged += other.merged;
        self.retried += other.retried;
        self.stored += other.stored;
        self.runs += other.runs;
        self.not_worth += other.not_worth;
        self.broken += other.broken;
        self.short_lived += other.short_lived;
        self.read += other.read;
        self.left_alone += other.left_alone;
        self.failed += other.failed;
        self.time += other.time;
        self.cut_short += other.cut_short;
        self.held_up += other.held_up;
    }
}

/// How a member stands, and what its domain's store takes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Standing {
    /// Pages of this process's regions, resident or not.
    pub pages: Pages,
    /// Of them, those that map the store and were not written since.
    pub merged: Pages,
    /// Pages of zeros that were given back and not written since: they take no memory.
    pub zeros: Pages,
    /// Pages that are left alone now, because they were written too soon after they were merged.
    pub hot: Pages,
    /// Memory that the domain's store takes, of all members together.
    pub store: Bytes,
    /// Memory of this process that is pinned for long, as for a device: that must not be adopted.
    pub pinned: Bytes,
    /// The mappings that this process has.
    pub mappings: u64,
    /// The memory in which this process remembers the pages of its regions.
    pub notes: Bytes,
    /// Merges of this process so far, those that did nothing among them.
    pub merges: u64,
    /// The time that the engine takes from this program, against what it may.
    pub spending: Spending,
    /// All merges of this process so far.
    pub so_far: Merged,
}

/// How a region stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionStanding {
    /// Where it is.
    pub range: AddressRange,
    /// Its pages.
    pub tally: Tally,
    /// What merging saves in it, gross, by the mean of the domain.
    pub saved: NetBytes,
}
