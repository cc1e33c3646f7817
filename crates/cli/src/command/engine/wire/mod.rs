//! Domains of the user-space engine, on the wire.

use pagefold_base::engine::{EngineDomain, EngineMember, PageTally, RegionTally};
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
    pub domains: Vec<EngineDomainReport>,
    /// Directories that could not be looked at.
    pub not_seen: Vec<UnreadableDirectory>,
}

/// A directory that could not be looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct UnreadableDirectory {
    /// Which one.
    pub path: String,
    /// Why.
    pub detail: String,
}

/// A domain. Sums are over members that live, each as of when it has told of itself.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct EngineDomainReport {
    /// Its name.
    pub name: String,
    /// The user whose processes its members are.
    pub uid: u32,
    /// The members, by process.
    pub members: Vec<EngineMemberReport>,
    /// Processes that have ended, and whose figures lie there still: they are in no sum.
    pub ended: u64,
    /// Records of members that could not be read, or make no sense: they are in no sum.
    pub unread: u64,
    /// The sums over the members.
    #[serde(flatten)]
    pub usage: EngineUsageReport,
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
pub struct EngineUsageReport {
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
pub struct EngineMemberReport {
    /// Its number.
    pub pid: u32,
    /// When it started, in clock ticks since boot: with `pid` it names the process for good.
    pub start_time: u64,
    /// The kernel's name of its program.
    pub comm: String,
    /// What it holds.
    #[serde(flatten)]
    pub usage: EngineUsageReport,
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
    pub regions: Vec<EngineRegionReport>,
}

/// A region of a member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct EngineRegionReport {
    /// The first address, hexadecimal.
    pub start: String,
    /// The first address after it, hexadecimal.
    pub end: String,
    /// What it holds.
    #[serde(flatten)]
    pub usage: EngineUsageReport,
}

impl EngineReport {
    /// Of domains with the names of their members' programs, in the order of the members, at a time since boot.
    pub fn from_domains(
        page: PageSize,
        domains: &[(EngineDomain, Vec<String>)],
        unreadable: Vec<UnreadableDirectory>,
        now: Duration,
    ) -> Self {
        Self {
            schema: "pagefold.engine/1",
            page_size: page.bytes(),
            domains: domains
                .iter()
                .map(|(domain, comms)| EngineDomainReport::from_domain(domain, comms, now))
                .collect(),
            not_seen: unreadable,
        }
    }

    /// Whether something was not seen.
    pub fn is_incomplete(&self) -> bool {
        !self.not_seen.is_empty() || self.domains.iter().any(|domain| domain.unread > 0)
    }
}

impl EngineDomainReport {
    fn from_domain(domain: &EngineDomain, comms: &[String], now: Duration) -> Self {
        let sum = domain.tally();
        Self {
            name: domain.name.clone(),
            uid: domain.owner,
            members: domain
                .members
                .iter()
                .zip(comms)
                .map(|(member, comm)| EngineMemberReport::from_member(domain, member, comm, now))
                .collect(),
            ended: domain.ended_members,
            unread: domain.unreadable_members,
            usage: EngineUsageReport { saved: domain.saved_by_all().0, ..EngineUsageReport::from_tally(domain, &sum) },
            references_pages: sum.merged.0,
            stored_pages: domain.stored.0,
            stored: domain.page_size.bytes_of(domain.stored).0,
            sharing: domain.sharing(),
            index: domain.index.0,
            overhead: domain.overhead().0,
            net: domain.net().0,
        }
    }
}

impl EngineUsageReport {
    fn from_tally(domain: &EngineDomain, tally: &PageTally) -> Self {
        let bytes = |pages: Pages| domain.page_size.bytes_of(pages).0;
        Self {
            adopted: bytes(tally.pages),
            merged: bytes(tally.merged),
            zeros: bytes(tally.zeros),
            hot: bytes(tally.volatile_pages),
            saved: domain.saved(tally).0,
        }
    }
}

impl EngineMemberReport {
    fn from_member(domain: &EngineDomain, member: &EngineMember, comm: &str, now: Duration) -> Self {
        let ago = |then: Duration| now.saturating_sub(then).as_secs_f64();
        let region = |region: &RegionTally| EngineRegionReport {
            start: format!("{:x}", region.range.start),
            end: format!("{:x}", region.range.end),
            usage: EngineUsageReport::from_tally(domain, &region.tally),
        };
        Self {
            pid: member.process.pid.0,
            start_time: member.process.start_time,
            comm: comm.to_owned(),
            usage: EngineUsageReport::from_tally(domain, &member.tally),
            notes: member.notes.0,
            merges: member.merges,
            merge_seconds: member.merge_time.as_secs_f64(),
            last_merge_seconds_ago: member.last_merge.map(ago),
            told_seconds_ago: ago(member.reported_at),
            elapsed_seconds: member.time_use.elapsed.as_secs_f64(),
            spent_seconds: member.time_use.spent.as_secs_f64(),
            slowdown: member.time_use.slowdown(),
            max_slowdown: member.time_use.max_slowdown,
            region_count: member.region_count,
            regions: member.regions.iter().map(region).collect(),
        }
    }
}

#[cfg(test)]
mod tests;
