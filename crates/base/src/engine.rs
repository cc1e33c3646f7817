//! Memory counts of the user-space engine and its savings: for a region, a member and a domain.
//!
//! A page that maps the store uses a part of a frame. A freed zero page uses no memory. The number of mappings of each
//! frame is not stored, so the cost of the store is distributed evenly over its pages. With `s` pages in the store and
//! `m` member pages that map it, each of the latter saves `1 - s/m` of a page. The savings of all regions then add up
//! to the savings of the domain. Contents that no page maps and that are not collected yet reduce the savings, even
//! below zero.
//!
//! Each member's figures are from its last report. Two kinds of processes map the store without reporting, and are in
//! no sum: forked children that have not used the engine since, and members that left with merged memory.

use crate::units::{AddressRange, Bytes, NetBytes, PageSize, Pages, ProcessId};
use std::ops::AddAssign;
use std::time::Duration;

/// The name of a store's memfd. Any program may use this name.
pub const STORE_MEMFD_NAME: &str = "pagefold-store";

/// Whether a region maps a store, by its name in `/proc/PID/maps`.
pub fn is_store_mapping(name: &str) -> bool {
    // A memfd has no path; `maps` shows it as a removed file (mm/memfd.c).
    name.strip_prefix("/memfd:").and_then(|name| name.strip_suffix(" (deleted)")) == Some(STORE_MEMFD_NAME)
}

/// Page counts of one or several regions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageTally {
    /// All pages, resident or not.
    pub pages: Pages,
    /// Pages that map the store and were not written since.
    pub merged: Pages,
    /// Freed zero pages that were not written since: they use no memory.
    pub zeros: Pages,
    /// Pages excluded from merging because they were written too soon after a merge.
    pub rewritten_pages: Pages,
}

impl AddAssign for PageTally {
    fn add_assign(&mut self, other: Self) {
        self.pages += other.pages;
        self.merged += other.merged;
        self.zeros += other.zeros;
        self.rewritten_pages += other.rewritten_pages;
    }
}

/// A region of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionTally {
    /// Its address range.
    pub range: AddressRange,
    /// Its page counts.
    pub tally: PageTally,
}

/// The CPU time that an engine uses in its program, and its limit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineTimeUse {
    /// Since the member joined.
    pub elapsed: Duration,
    /// The part of it used by the engine's own work, and by faults of writes to merged pages.
    pub spent: Duration,
    /// The share of the program's own time that the engine may use; `None` for no limit.
    pub max_slowdown: Option<f64>,
}

impl EngineTimeUse {
    /// The slowdown of the program, as a share of its run time without the engine.
    pub fn slowdown(&self) -> f64 {
        let program_seconds = self.elapsed.saturating_sub(self.spent).as_secs_f64();
        if program_seconds > 0.0 { self.spent.as_secs_f64() / program_seconds } else { 0.0 }
    }
}

/// The report of a member about itself.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineMember {
    /// The process.
    pub process: ProcessId,
    /// The time of the report since host boot (CLOCK_BOOTTIME).
    pub reported_at: Duration,
    /// The time of the last merge since host boot.
    pub last_merge: Option<Duration>,
    /// The number of merges so far.
    pub merges: u64,
    /// Their total duration.
    pub merge_time: Duration,
    /// The time that the engine uses in the program.
    pub time_use: EngineTimeUse,
    /// Memory of the engine's page records.
    pub notes: Bytes,
    /// Over all regions.
    pub tally: PageTally,
    /// The number of its regions.
    pub region_count: u64,
    /// The regions, or as many as fit into the report.
    pub regions: Vec<RegionTally>,
}

/// A domain, from its directory.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineDomain {
    /// Its name.
    pub name: String,
    /// The user ID of its members' processes.
    pub owner: u32,
    /// The size of its pages.
    pub page_size: PageSize,
    /// Live members with a report, by process.
    pub members: Vec<EngineMember>,
    /// The number of processes that have ended without cleanup. Their figures cannot be counted.
    pub ended_members: u64,
    /// The number of members whose figures could not be read or are inconsistent.
    pub unreadable_members: u64,
    /// Pages in the store, one for each distinct content.
    pub stored: Pages,
    /// Memory of the index.
    pub index: Bytes,
    /// Memory of all files in its directory, including the index: what members share besides the store.
    pub files: Bytes,
}

impl EngineDomain {
    /// The sum over the members.
    pub fn tally(&self) -> PageTally {
        let mut sum = PageTally::default();
        self.members.iter().for_each(|member| sum += member.tally);
        sum
    }

    /// The mean number of member pages that share one page of the store; `None` for an empty store.
    pub fn sharing(&self) -> Option<f64> {
        (self.stored.0 > 0).then(|| self.tally().merged.0 as f64 / self.stored.0 as f64)
    }

    /// Gross savings of member pages: their frames less their share of the store, plus freed zero pages.
    pub fn saved(&self, tally: &PageTally) -> NetBytes {
        let (merged, total) = (i128::from(tally.merged.0), i128::from(self.tally().merged.0));
        let page_bytes = i128::from(self.page_size.bytes());
        let merged_bytes = match total {
            0 => 0,
            total => page_bytes * merged * (total - i128::from(self.stored.0)) / total,
        };
        NetBytes((merged_bytes + page_bytes * i128::from(tally.zeros.0)) as i64)
    }

    /// Gross savings of all members. The cost of store pages that no member maps is subtracted.
    pub fn saved_by_all(&self) -> NetBytes {
        let PageTally { merged, zeros, .. } = self.tally();
        NetBytes(
            (self.page_size.bytes_of(merged + zeros).0).cast_signed()
                - self.page_size.bytes_of(self.stored).0.cast_signed(),
        )
    }

    /// The engine's own memory: the files of the domain and each member's page records.
    pub fn overhead(&self) -> Bytes {
        self.members.iter().map(|member| member.notes).sum::<Bytes>() + self.files
    }

    /// Net savings of all members.
    pub fn net(&self) -> NetBytes {
        NetBytes(self.saved_by_all().0 - self.overhead().0.cast_signed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Pid;

    fn tally(pages: u64, merged: u64, zeros: u64) -> PageTally {
        PageTally { pages: Pages(pages), merged: Pages(merged), zeros: Pages(zeros), rewritten_pages: Pages(1) }
    }

    fn member(pid: u32, tally: PageTally) -> EngineMember {
        let process = ProcessId { pid: Pid(pid), start_time: 1 };
        let region = RegionTally { range: AddressRange { start: 0, end: tally.pages.0 * 4096 }, tally };
        EngineMember {
            process,
            reported_at: Duration::ZERO,
            last_merge: None,
            merges: 0,
            merge_time: Duration::ZERO,
            time_use: EngineTimeUse::default(),
            notes: Bytes(4 * tally.pages.0),
            tally,
            region_count: 1,
            regions: vec![region],
        }
    }

    fn domain(members: Vec<EngineMember>, stored: u64) -> EngineDomain {
        EngineDomain {
            name: "x".to_owned(),
            owner: 0,
            page_size: PageSize::new(4096).unwrap(),
            members,
            ended_members: 0,
            unreadable_members: 0,
            stored: Pages(stored),
            index: Bytes(10),
            files: Bytes(100),
        }
    }

    #[test]
    fn region_savings_add_up_to_domain_savings() {
        let domain = domain(vec![member(1, tally(1000, 300, 50)), member(2, tally(500, 100, 0))], 100);
        assert_eq!(domain.tally(), PageTally { rewritten_pages: Pages(2), ..tally(1500, 400, 50) });
        assert_eq!(domain.sharing(), Some(4.0));
        let saved: Vec<i64> = domain.members.iter().map(|member| domain.saved(&member.tally).0 / 4096).collect();
        assert_eq!(saved, [225 + 50, 75]);
        assert_eq!(domain.saved_by_all(), NetBytes(350 * 4096));
        assert_eq!(domain.overhead(), Bytes(100 + 4 * 1500));
        assert_eq!(domain.net(), NetBytes(350 * 4096 - 6100));
    }

    #[test]
    fn unmapped_store_pages_cost_memory() {
        let unmapped = domain(vec![member(1, tally(10, 0, 0))], 7);
        assert_eq!((unmapped.sharing(), unmapped.saved_by_all()), (Some(0.0), NetBytes(-7 * 4096)));
        assert_eq!(unmapped.saved(&unmapped.members[0].tally), NetBytes(0), "the member maps no page of the store");
        assert_eq!(domain(Vec::new(), 0).sharing(), None);
    }

    #[test]
    fn stores_are_known_by_name() {
        assert!(is_store_mapping("/memfd:pagefold-store (deleted)"));
        for name in
            ["", "/memfd:pagefold-store", "/memfd:pagefold-stores (deleted)", "/tmp/memfd:pagefold-store (deleted)"]
        {
            assert!(!is_store_mapping(name), "{name}");
        }
    }

    #[test]
    fn slowdown_is_a_share_of_own_run_time() {
        let seconds = Duration::from_secs;
        let spending =
            |elapsed, spent| EngineTimeUse { elapsed: seconds(elapsed), spent: seconds(spent), max_slowdown: None };
        assert_eq!(spending(102, 2).slowdown(), 0.02);
        assert_eq!(spending(0, 0).slowdown(), 0.0);
    }
}
