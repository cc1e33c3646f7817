//! What a daemon is told to do and to keep to, and whom it manages.

use crate::decide::DaemonRules;
use pagefold_base::Bytes;
use pagefold_base::domain::{DomainConfig, TrustGroup};
use pagefold_base::exclusion::Exclusions;
use std::time::Duration;

/// What is in force.
#[derive(Clone, Debug)]
pub struct DaemonSettings {
    /// What to do and to keep to.
    pub rules: DaemonRules,
    /// Who trusts whom.
    pub domains: DomainConfig,
    /// Who is left alone.
    pub exclusions: Exclusions,
    /// Who is managed; `None` for everybody.
    pub tracked_group: Option<TrustGroup>,
    /// Processes with less resident memory are not managed.
    pub min_resident: Bytes,
    /// Processes that would give back less, net, are left alone.
    pub min_profit: Bytes,
    /// ksmd's metadata at most.
    pub max_metadata: Option<Bytes>,
    /// Regions that enrolling may bring a process to.
    pub max_regions: Option<u64>,
    /// Whether huge pages may be split.
    pub split_huge_pages: bool,
    /// The pause between the two looks of a census; none where each look but the first of a process is compared with
    /// the one before.
    pub pass_interval: Duration,
    /// For how long merged pages are watched at least at the end of a merge.
    pub watch_time: Duration,
    /// Threads of a census.
    pub census_threads: usize,
}

impl Default for DaemonSettings {
    fn default() -> Self {
        Self {
            rules: DaemonRules::default(),
            domains: DomainConfig::default(),
            exclusions: Exclusions::default(),
            tracked_group: None,
            min_resident: Bytes(16 << 20),
            min_profit: Bytes(1 << 20),
            max_metadata: None,
            max_regions: None,
            split_huge_pages: true,
            pass_interval: Duration::ZERO,
            watch_time: Duration::from_millis(500),
            census_threads: 1,
        }
    }
}
