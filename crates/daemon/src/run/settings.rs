//! The daemon's settings: rules, trust domains, and the processes to track.

use crate::decide::DaemonRules;
use pagefold_base::Bytes;
use pagefold_base::domain::{DomainConfig, TrustGroup};
use pagefold_base::exclusion::Exclusions;
use std::time::Duration;

/// The settings in force.
#[derive(Clone, Debug)]
pub struct DaemonSettings {
    /// Mode, goals and limits.
    pub rules: DaemonRules,
    /// Trust domains.
    pub domains: DomainConfig,
    /// Excluded processes.
    pub exclusions: Exclusions,
    /// The group of processes to track; `None` for all processes.
    pub tracked_group: Option<TrustGroup>,
    /// Processes with less resident memory are not tracked.
    pub min_resident: Bytes,
    /// Processes with less predicted net savings are left alone.
    pub min_profit: Bytes,
    /// Limit of ksmd's metadata.
    pub max_metadata: Option<Bytes>,
    /// Limit of a process's number of regions when enrolling splits regions.
    pub max_regions: Option<u64>,
    /// Whether huge pages may be split.
    pub split_huge_pages: bool,
    /// Pause between the two reads of a census; zero if each scan of a process is compared with its previous scan
    /// instead.
    pub pass_interval: Duration,
    /// Minimum time for which merged pages are watched at the end of a merge.
    pub watch_time: Duration,
    /// Threads of a census at most. In virtual time, the result may depend on which of several threads reads first.
    pub max_census_threads: usize,
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
            max_census_threads: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }
}
