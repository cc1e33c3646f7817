//! Domains of the user-space engine, as JSON.

use pagefold_base::engine::{EngineDomain, EngineMember, PageTally, RegionTally};
use pagefold_base::{PageSize, Pages};
use schemars::JsonSchema;
use serde::Serialize;
use std::time::Duration;

/// The result of `pagefold engine status`. Sizes are in bytes, unless the field name says pages.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct EngineReport {
    /// `pagefold.engine/1`.
    pub schema: &'static str,
    /// The base page size in bytes.
    pub page_size: u64,
    /// The domains, sorted by user and name.
    pub domains: Vec<EngineDomainReport>,
    /// Directories that could not be read.
    pub unreadable_directories: Vec<UnreadableDirectory>,
}

/// A directory that could not be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct UnreadableDirectory {
    /// The path of the directory.
    pub path: String,
    /// Why it could not be read.
    pub reason: String,
}

/// A domain. Sums are over running members, each as of its last record.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct EngineDomainReport {
    /// Its name.
    pub name: String,
    /// The UID of its members' processes.
    pub uid: u32,
    /// The members, sorted by process.
    pub members: Vec<EngineMemberReport>,
    /// Members that have ended but still have a record: they are in no sum.
    pub ended_members: u64,
    /// Records of members that could not be read or are invalid: they are in no sum.
    pub unreadable_members: u64,
    /// The sums over the members.
    #[serde(flatten)]
    pub usage: EngineUsageReport,
    /// Pages of members that map the store.
    pub references_pages: u64,
    /// Contents in the store, one page each.
    pub stored_pages: u64,
    /// The memory of the store's pages.
    pub stored: u64,
    /// Mean number of member pages for each page of the store; absent if the store is empty.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sharing: Option<f64>,
    /// Memory of the index of contents.
    pub index: u64,
    /// All memory that the engine uses besides the store: the index, references, and the members' data about their
    /// pages.
    pub overhead: u64,
    /// `saved - overhead`. Negative if the engine costs more than it saves.
    pub net: i64,
}

/// The use of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct EngineUsageReport {
    /// Memory that may be merged, resident or not.
    pub adopted: u64,
    /// Memory of it that maps the store and was not written since.
    pub merged: u64,
    /// Zero pages that were freed and not written since.
    pub zeros: u64,
    /// Memory that is not merged because it was written too soon after an earlier merge.
    pub rewritten: u64,
    /// `merged + zeros` less its share of the store, gross. The store's memory is divided evenly among all merged
    /// pages.
    pub saved: i64,
}

/// A member.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct EngineMemberReport {
    /// Its PID.
    pub pid: u32,
    /// Its start time in clock ticks since boot: with `pid` it identifies the process uniquely.
    pub start_time: u64,
    /// The kernel's name of its program.
    pub comm: String,
    /// The use of its memory.
    #[serde(flatten)]
    pub usage: EngineUsageReport,
    /// Memory of its data about its pages.
    pub page_notes: u64,
    /// Number of merges so far.
    pub merges: u64,
    /// Total time of the merges.
    pub merge_seconds: f64,
    /// Time since the last merge ended; absent if there was none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_merge_seconds_ago: Option<f64>,
    /// Time since the member wrote its record.
    pub reported_seconds_ago: f64,
    /// Time from joining the domain to the record.
    pub elapsed_seconds: f64,
    /// Time of that which the engine took from the program: its own work, and page faults of writes to merged pages.
    pub overhead_seconds: f64,
    /// Slowdown of the program, as a share of its run time without the engine.
    pub slowdown: f64,
    /// Maximum slowdown of the program; absent if there is no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_slowdown: Option<f64>,
    /// The number of its regions.
    pub region_count: u64,
    /// The regions: at most about the first 1,600.
    pub regions: Vec<EngineRegionReport>,
}

/// A region of a member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct EngineRegionReport {
    /// The first address, hexadecimal.
    pub start: String,
    /// The first address after it, hexadecimal.
    pub end: String,
    /// The use of its memory.
    #[serde(flatten)]
    pub usage: EngineUsageReport,
}

impl EngineReport {
    /// A report of domains, each with its members' program names in the order of the members, at a time since boot.
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
            unreadable_directories: unreadable,
        }
    }

    /// Whether something could not be read.
    pub fn is_incomplete(&self) -> bool {
        !self.unreadable_directories.is_empty() || self.domains.iter().any(|domain| domain.unreadable_members > 0)
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
            ended_members: domain.ended_members,
            unreadable_members: domain.unreadable_members,
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
            rewritten: bytes(tally.rewritten_pages),
            saved: domain.saved(tally).0,
        }
    }
}

impl EngineMemberReport {
    fn from_member(domain: &EngineDomain, member: &EngineMember, comm: &str, now: Duration) -> Self {
        let ago = |time: Duration| now.saturating_sub(time).as_secs_f64();
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
            page_notes: member.notes.0,
            merges: member.merges,
            merge_seconds: member.merge_time.as_secs_f64(),
            last_merge_seconds_ago: member.last_merge.map(ago),
            reported_seconds_ago: ago(member.reported_at),
            elapsed_seconds: member.time_use.elapsed.as_secs_f64(),
            overhead_seconds: member.time_use.spent.as_secs_f64(),
            slowdown: member.time_use.slowdown(),
            max_slowdown: member.time_use.max_slowdown,
            region_count: member.region_count,
            regions: member.regions.iter().map(region).collect(),
        }
    }
}

#[cfg(test)]
mod tests;
