//! What the user-space engine holds, and what that saves: for a region, a member and a domain.
//!
//! A page that maps the store takes a part of a frame, and a page of zeros that was given back takes none. How many
//! map each frame is not kept, so what the store costs is laid on its pages evenly: with `s` pages in the store and `m`
//! pages of all members that map it, each of those saves `1 - s/m` of a page. The savings of all regions then add up to
//! what the domain saves. Contents that nobody maps any more and were not collected yet make that less, even negative.
//!
//! Figures of members are as of when each has told them. Forked children that have not used the engine since, and
//! members that left with merged memory, map the store and tell nothing: they are in no sum.

use crate::units::{AddressRange, Bytes, NetBytes, PageSize, Pages, ProcessId};
use std::ops::AddAssign;
use std::time::Duration;

/// What the memfd of a store is called. Anybody may call his so.
pub const STORE_MEMFD_NAME: &str = "pagefold-store";

/// Whether a region, by its name in `/proc/PID/maps`, maps a store.
pub fn is_store_mapping(name: &str) -> bool {
    // A memfd has no path, and reads as one that was removed (mm/memfd.c).
    name.strip_prefix("/memfd:").and_then(|name| name.strip_suffix(" (deleted)")) == Some(STORE_MEMFD_NAME)
}

/// Pages of a region or of several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageTally {
    /// All, resident or not.
    pub pages: Pages,
    /// Those that map the store and were not written since.
    pub merged: Pages,
    /// Pages of zeros that were given back and not written since: they take no memory.
    pub zeros: Pages,
    /// Those that are left alone, because they were written too soon after they were merged.
    pub volatile_pages: Pages,
}

impl AddAssign for PageTally {
    fn add_assign(&mut self, other: Self) {
        self.pages += other.pages;
        self.merged += other.merged;
        self.zeros += other.zeros;
        self.volatile_pages += other.volatile_pages;
    }
}

/// A region of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionTally {
    /// Where it is.
    pub range: AddressRange,
    /// What it holds.
    pub tally: PageTally,
}

/// The time that an engine takes from its program, against what it may.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineTimeUse {
    /// Since the member joined.
    pub elapsed: Duration,
    /// Of it: the engine's own work, and the faults of writes to what it had merged.
    pub spent: Duration,
    /// The share of the program's own time that it may take; `None` for no bound.
    pub max_slowdown: Option<f64>,
}

impl EngineTimeUse {
    /// By how much the program was slowed down, as a share of the time that it would have taken by itself.
    pub fn slowdown(&self) -> f64 {
        let own = self.elapsed.saturating_sub(self.spent).as_secs_f64();
        if own > 0.0 { self.spent.as_secs_f64() / own } else { 0.0 }
    }
}

/// What a member tells of itself.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineMember {
    /// Who.
    pub process: ProcessId,
    /// When it told this, since the host was booted (CLOCK_BOOTTIME).
    pub reported_at: Duration,
    /// When it has merged last, since the host was booted.
    pub last_merge: Option<Duration>,
    /// Merges so far.
    pub merges: u64,
    /// The time that they took.
    pub merge_time: Duration,
    /// The time that it takes from its program.
    pub time_use: EngineTimeUse,
    /// The memory in which it remembers its pages.
    pub notes: Bytes,
    /// Over all regions.
    pub tally: PageTally,
    /// How many regions it has.
    pub region_count: u64,
    /// The regions, or as many of them as there was room for.
    pub regions: Vec<RegionTally>,
}

/// A domain, as its directory shows it.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineDomain {
    /// Its name.
    pub name: String,
    /// Whose processes its members are.
    pub owner: u32,
    /// The size of its pages.
    pub page_size: PageSize,
    /// Those that live and tell of themselves, by process.
    pub members: Vec<EngineMember>,
    /// Of how many processes there are figures that cannot be counted: they have ended, and nobody has cleaned up yet.
    pub ended_members: u64,
    /// Of how many the figures could not be read, or make no sense.
    pub unreadable_members: u64,
    /// Contents in the store, a page each.
    pub stored: Pages,
    /// Memory of the index.
    pub index: Bytes,
    /// Memory of all files in its directory, the index among them: what members share beside the store.
    pub files: Bytes,
}

impl EngineDomain {
    /// The sum over the members.
    pub fn tally(&self) -> PageTally {
        let mut sum = PageTally::default();
        self.members.iter().for_each(|member| sum += member.tally);
        sum
    }

    /// How many pages of members share one of the store, in the mean; `None` of an empty store.
    pub fn sharing(&self) -> Option<f64> {
        (self.stored.0 > 0).then(|| self.tally().merged.0 as f64 / self.stored.0 as f64)
    }

    /// What pages of members save, gross: of the store those frames that are not there more than once, and zeros.
    pub fn saved(&self, tally: &PageTally) -> NetBytes {
        let (merged, all) = (i128::from(tally.merged.0), i128::from(self.tally().merged.0));
        let page = i128::from(self.page_size.bytes());
        let shared = match all {
            0 => 0,
            all => page * merged * (all - i128::from(self.stored.0)) / all,
        };
        NetBytes((shared + page * i128::from(tally.zeros.0)) as i64)
    }

    /// What all members save, gross. What lies in the store and nobody maps is paid for in it.
    pub fn saved_by_all(&self) -> NetBytes {
        let PageTally { merged, zeros, .. } = self.tally();
        NetBytes(
            (self.page_size.bytes_of(merged + zeros).0).cast_signed()
                - self.page_size.bytes_of(self.stored).0.cast_signed(),
        )
    }

    /// What the engine keeps for that: the files of the domain, and each member's notes.
    pub fn overhead(&self) -> Bytes {
        self.members.iter().map(|member| member.notes).sum::<Bytes>() + self.files
    }

    /// What all members save, net.
    pub fn net(&self) -> NetBytes {
        NetBytes(self.saved_by_all().0 - self.overhead().0.cast_signed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Pid;

    fn tally(pages: u64, merged: u64, zeros: u64) -> PageTally {
        PageTally { pages: Pages(pages), merged: Pages(merged), zeros: Pages(zeros), volatile_pages: Pages(1) }
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
        assert_eq!(domain.tally(), PageTally { volatile_pages: Pages(2), ..tally(1500, 400, 50) });
        assert_eq!(domain.sharing(), Some(4.0));
        let saved: Vec<i64> = domain.members.iter().map(|member| domain.saved(&member.tally).0 / 4096).collect();
        assert_eq!(saved, [225 + 50, 75]);
        assert_eq!(domain.saved_by_all(), NetBytes(350 * 4096));
        assert_eq!(domain.overhead(), Bytes(100 + 4 * 1500));
        assert_eq!(domain.net(), NetBytes(350 * 4096 - 6100));
    }

    #[test]
    fn unmapped_store_pages_cost_memory() {
        let nobody = domain(vec![member(1, tally(10, 0, 0))], 7);
        assert_eq!((nobody.sharing(), nobody.saved_by_all()), (Some(0.0), NetBytes(-7 * 4096)));
        assert_eq!(nobody.saved(&nobody.members[0].tally), NetBytes(0), "nobody's");
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
