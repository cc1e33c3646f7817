//! Memory shortage in the cgroups of tracked processes: pressure, and the headroom below every limit that applies.
//!
//! Pressure is an average over ten seconds and limits change slowly, so readings are ten seconds apart. Reading one
//! cgroup takes three to about twelve files. For one of them, `memory.stat`, the kernel sums all counters. With very
//! many cgroups, each reading covers the next few of them.

use pagefold_base::ProcessId;
use pagefold_base::memory::Shortage;
use pagefold_base::process::Process;
use pagefold_host::{Host, memory_headroom};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Interval between readings.
const READ_INTERVAL: Duration = Duration::from_secs(10);

/// Cgroups per reading, at most.
const MAX_CGROUPS_PER_READ: usize = 32;

/// The rotation over the cgroups.
#[derive(Default)]
pub(super) struct CgroupShortageReader {
    last_read_at: Option<Duration>,
    /// Path of the last cgroup read; cgroups are read in the order of their paths.
    last_path: String,
}

impl CgroupShortageReader {
    /// Memory shortage of the processes whose cgroups are read now, if a reading is due.
    pub fn read_shortages<'p>(
        &mut self,
        host: &dyn Host,
        now: Duration,
        tracked: impl Iterator<Item = &'p Process>,
    ) -> Vec<(ProcessId, Shortage)> {
        if self.last_read_at.is_some_and(|at| now < at + READ_INTERVAL) {
            return Vec::new();
        }
        self.last_read_at = Some(now);
        let mut processes_by_cgroup: BTreeMap<String, Vec<ProcessId>> = BTreeMap::new();
        let mut shortages = Vec::new();
        for process in tracked {
            match process.cgroup.as_ref().ok().filter(|path| *path != "/") {
                Some(cgroup) => processes_by_cgroup.entry(cgroup.clone()).or_default().push(process.id),
                // The root cgroup is covered by the host's readings. A process that moved there loses the shortage of
                // its old cgroup.
                None => shortages.push((process.id, Shortage::default())),
            }
        }
        let (before, after): (Vec<&String>, Vec<&String>) =
            processes_by_cgroup.keys().partition(|path| **path <= self.last_path);
        let due: Vec<&String> = after.into_iter().chain(before).take(MAX_CGROUPS_PER_READ).collect();
        self.last_path = due.last().map(|path| (*path).clone()).unwrap_or_default();
        if due.is_empty() {
            return shortages;
        }
        let due: BTreeSet<String> = due.into_iter().cloned().collect();
        let readings = memory_headroom::cgroup_shortages(host, &due);
        shortages.extend(
            readings
                .iter()
                .flat_map(|(path, shortage)| processes_by_cgroup[path].iter().map(|process| (*process, *shortage))),
        );
        shortages
    }
}
