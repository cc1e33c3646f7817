//! Domains of the user-space engine, on the wire.

use pagefold_base::engine::{Domain, Member, RegionTally, Tally};
use pagefold_base::{PageSize, Pages};
use schemars::JsonSchema;
use serde::Serialize;
use std::time::Duration;

/// The result of `pagefold engine status`. Sizes are in bytes, unless the name says pages.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct EngineReport {
    /// `pagefold.engine/1`.
    pub schema: &'static str,
    /// Bytes of a base page.
    pub page_size: u64,
    /// The domains, by user and name.
    pub domains: Vec<DomainReport>,
    /// Directories that could not be looked at.
    pub not_seen: Vec<Unlooked>,
}

/// A directory that could not be looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Unlooked {
    /// Which one.
    pub path: String,
    /// Why.
    pub detail: String,
}

/// A domain. Sums are over members that live, each as of when it has told of itself.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct DomainReport {
    /// Its name.
    pub name: String,
    /// The user whose processes its members are.
    pub uid: u32,
    /// The members, by process.
    pub members: Vec<MemberReport>,
    /// Processes that have ended, and whose figures lie there still: they are in no sum.
    pub ended: u64,
    /// Records of members that could not be read, or make no sense: they are in no sum.
    pub unread: u64,
    /// The sums over the members.
    #[serde(flatten)]
    pub holds: Holding,
    /// Pages of members that map the store.
    pub references_pages: u64,
    /// Contents in the store, a page each.
    pub stored_pages: u64,
    /// The memory that those take.
    pub stored: u64,
    /// How many pages of members share one of the store, in the mean; absent of an empty store.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sharing: Option<f64>,
    /// Memory of the index of contents.
    pub index: u64,
    /// All that the engine keeps beside the store: the index among it, references, and what members remember of their
    /// pages.
    pub overhead: u64,
    /// `saved - overhead`. Negative where the engine costs more than it gives.
    pub net: i64,
}

/// What memory holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Holding {
    /// Memory that may be merged, resident or not.
    pub adopted: u64,
    /// The part of it that maps the store and was not written since.
    pub merged: u64,
    /// Zeros that were given back and not written since.
    pub zeros: u64,
    /// What is left alone, because it was written too soon after it was merged.
    pub hot: u64,
    /// `merged + zeros` less the part of the store, gross. What the store takes is laid on all merged pages evenly.
    pub saved: i64,
}

/// A member.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct MemberReport {
    /// Its number.
    pub pid: u32,
    /// When it started, in clock ticks since boot: with `pid` it names the process for good.
    pub start_time: u64,
    /// The kernel's name of its program.
    pub comm: String,
    /// What it holds.
    #[serde(flatten)]
    pub holds: Holding,
    /// What it remembers of its pages.
    pub notes: u64,
    /// Merges so far.
    pub merges: u64,
    /// The time that they took.
    pub merge_seconds: f64,
    /// How long ago the last one ended; absent if there was none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_merge_seconds_ago: Option<f64>,
    /// How long ago it told this.
    pub told_seconds_ago: f64,
    /// How long it was a member then.
    pub elapsed_seconds: f64,
    /// What the engine took of that from the program: its own work, and the faults of writes to what it had merged.
    pub spent_seconds: f64,
    /// By how much the program was slowed down: a share of the time that it would have taken by itself.
    pub slowdown: f64,
    /// By how much it may be slowed down; absent if there is no bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_slowdown: Option<f64>,
    /// How many regions it has.
    pub region_count: u64,
    /// The regions: the first 1,600 or so.
    pub regions: Vec<RegionReport>,
}

/// A region of a member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct RegionReport {
    /// The first address, hexadecimal.
    pub start: String,
    /// The first address after it, hexadecimal.
    pub end: String,
    /// What it holds.
    #[serde(flatten)]
    pub holds: Holding,
}

impl EngineReport {
    /// Of domains with the names of their members' programs, in the order of the members, at a time since boot.
    pub fn of(page: PageSize, domains: &[(Domain, Vec<String>)], not_seen: Vec<Unlooked>, now: Duration) -> Self {
        Self {
            schema: "pagefold.engine/1",
            page_size: page.bytes(),
            domains: domains.iter().map(|(domain, comms)| DomainReport::of(domain, comms, now)).collect(),
            not_seen,
        }
    }

    /// Whether something was not seen.
    pub fn is_incomplete(&self) -> bool {
        !self.not_seen.is_empty() || self.domains.iter().any(|domain| domain.unread > 0)
    }
}

impl DomainReport {
    fn of(domain: &Domain, comms: &[String], now: Duration) -> Self {
        let sum = domain.tally();
        Self {
            name: domain.name.clone(),
            uid: domain.owner,
            members: domain
                .members
                .iter()
                .zip(comms)
                .map(|(member, comm)| MemberReport::of(domain, member, comm, now))
                .collect(),
            ended: domain.ended,
            unread: domain.unread,
            holds: Holding { saved: domain.saved_by_all().0, ..Holding::of(domain, &sum) },
            references_pages: sum.merged.0,
            stored_pages: domain.stored.0,
            stored: domain.page.of(domain.stored).0,
            sharing: domain.sharing(),
            index: domain.index.0,
            overhead: domain.overhead().0,
            net: domain.net().0,
        }
    }
}

impl Holding {
    fn of(domain: &Domain, tally: &Tally) -> Self {
        let bytes = |pages: Pages| domain.page.of(pages).0;
        Self {
            adopted: bytes(tally.pages),
            merged: bytes(tally.merged),
            zeros: bytes(tally.zeros),
            hot: bytes(tally.hot),
            saved: domain.saved(tally).0,
        }
    }
}

impl MemberReport {
    fn of(domain: &Domain, member: &Member, comm: &str, now: Duration) -> Self {
        let ago = |then: Duration| now.saturating_sub(then).as_secs_f64();
        let region = |region: &RegionTally| RegionReport {
            start: format!("{:x}", region.range.start),
            end: format!("{:x}", region.range.end),
            holds: Holding::of(domain, &region.tally),
        };
        Self {
            pid: member.process.pid.0,
            start_time: member.process.start_time,
            comm: comm.to_owned(),
            holds: Holding::of(domain, &member.tally),
            notes: member.notes.0,
            merges: member.merges,
            merge_seconds: member.time.as_secs_f64(),
            last_merge_seconds_ago: member.last_merge.map(ago),
            told_seconds_ago: ago(member.told),
            elapsed_seconds: member.spending.elapsed.as_secs_f64(),
            spent_seconds: member.spending.spent.as_secs_f64(),
            slowdown: member.spending.slowdown(),
            max_slowdown: member.spending.bound,
            region_count: member.region_count,
            regions: member.regions.iter().map(region).collect(),
        }
    }
}

#[cfg(test)]
mod tests;
