//! How short memory is in the cgroups of managed programs: pressure, and what is left of every limit that counts there.
//!
//! Pressure is an average of ten seconds, and limits move slowly, so that it is read as often. A cgroup takes from three
//! files to some twelve, of which `memory.stat` has the kernel add up all of its counters; where there are very many,
//! each is read in its turn.

use pagefold_base::ProcessId;
use pagefold_base::memory::Shortage;
use pagefold_base::process::Process;
use pagefold_host::{Host, memory_headroom};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Between two readings.
const READ_INTERVAL: Duration = Duration::from_secs(10);

/// Cgroups that are read at once.
const MAX_CGROUPS_PER_READ: usize = 32;

/// Whose turn it is.
#[derive(Default)]
pub(super) struct CgroupShortageReader {
    last_read_at: Option<Duration>,
    /// The last one that was read, in the order of their paths.
    last_path: String,
}

impl CgroupShortageReader {
    /// How short memory is for those of these processes whose turn it is, if it is time to read it.
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
        let mut of: BTreeMap<String, Vec<ProcessId>> = BTreeMap::new();
        let mut told = Vec::new();
        for member in tracked {
            match member.cgroup.as_ref().ok().filter(|path| *path != "/") {
                Some(cgroup) => of.entry(cgroup.clone()).or_default().push(member.id),
                // Of the root the host tells; who was in another one is not short by what was read there.
                None => told.push((member.id, Shortage::default())),
            }
        }
        let (before, after): (Vec<&String>, Vec<&String>) = of.keys().partition(|path| **path <= self.last_path);
        let turn: Vec<&String> = after.into_iter().chain(before).take(MAX_CGROUPS_PER_READ).collect();
        self.last_path = turn.last().map(|path| (*path).clone()).unwrap_or_default();
        if turn.is_empty() {
            return told;
        }
        let turn: BTreeSet<String> = turn.into_iter().cloned().collect();
        let found = memory_headroom::cgroup_shortages(host, &turn);
        told.extend(found.iter().flat_map(|(path, shortage)| of[path].iter().map(|process| (*process, *shortage))));
        told
    }
}
