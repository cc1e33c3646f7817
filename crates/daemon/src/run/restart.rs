//! The saved forms of what a daemon passes on to the next one: the schedule ([`SavedSchedule`]) and what it has observed
//! of merged pages ([`SavedWatch`]).

use crate::decide::{BackoffRecord, DecisionReason, PassedProcess, PassedState};
use pagefold_base::merge_lifetime::LifetimeStats;
use pagefold_base::{AddressRange, Bytes, NetBytes, Pages, Pid, ProcessId};
use pagefold_merge::merge_monitor::MonitorRecord;
use pagefold_merge::recheck::RangeLifetime;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

/// Name of the file with the schedule.
pub(super) const SCHEDULE_FILE: &str = "daemon.schedule.json";

/// Name of the file with observations of merged pages.
pub(super) const WATCH_FILE: &str = "daemon.watch.json";

/// Removes the schedule that the last daemon saved in the state directory, after its memory was unenrolled: the next one
/// scans all processes anew.
///
/// # Errors
/// If there is a file that cannot be removed.
pub fn forget_schedule(directory: &Path) -> io::Result<()> {
    match std::fs::remove_file(directory.join(SCHEDULE_FILE)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// The reasons of a request to unenroll that are passed on.
const PASSED_REASONS: [DecisionReason; 2] = [DecisionReason::NetLoss, DecisionReason::Failed];

/// The schedule, as saved.
#[derive(Serialize, Deserialize)]
pub(super) struct SavedSchedule {
    census_seconds_per_mib: f64,
    available_cpu_seconds: f64,
    processes: Vec<SavedProcess>,
}

#[derive(Serialize, Deserialize)]
struct SavedProcess {
    pid: u32,
    start_time: u64,
    scan_age: f64,
    resident_at_scan: u64,
    cpu_time_at_scan: Option<f64>,
    next_scan_in: f64,
    scan_interval: f64,
    found_nothing: bool,
    merge_unprofitable: bool,
    refused_for: Option<f64>,
    net_savings: Option<i64>,
    pending_unenroll: Option<String>,
}

/// A saved time, at most a century.
fn seconds(number: f64) -> Duration {
    Duration::try_from_secs_f64(number).unwrap_or_default().min(Duration::from_secs(100 * 365 * 86_400))
}

impl SavedSchedule {
    pub fn new(state: &PassedState) -> Self {
        let saved = |(process, passed): (&ProcessId, &PassedProcess)| SavedProcess {
            pid: process.pid.0,
            start_time: process.start_time,
            scan_age: passed.scan_age.as_secs_f64(),
            resident_at_scan: passed.resident_at_scan.0,
            cpu_time_at_scan: passed.cpu_time_at_scan.map(|cpu_time| cpu_time.as_secs_f64()),
            next_scan_in: passed.next_scan_in.as_secs_f64(),
            scan_interval: passed.scan_interval.as_secs_f64(),
            found_nothing: passed.found_nothing,
            merge_unprofitable: passed.merge_unprofitable,
            refused_for: passed.refused_for.map(|pause| pause.as_secs_f64()),
            net_savings: passed.net_savings.map(|net| net.0),
            pending_unenroll: passed.pending_unenroll.map(|reason| reason.word().to_owned()),
        };
        Self {
            census_seconds_per_mib: state.census_seconds_per_mib,
            available_cpu_seconds: state.available_cpu_seconds,
            processes: state.processes.iter().map(saved).collect(),
        }
    }

    /// The schedule of the processes that `is_alive` accepts.
    pub fn into_state(self, is_alive: impl Fn(ProcessId) -> bool) -> PassedState {
        let passed = |saved: SavedProcess| {
            let process = ProcessId { pid: Pid(saved.pid), start_time: saved.start_time };
            let reason = |word: String| PASSED_REASONS.into_iter().find(|reason| reason.word() == word);
            let passed = PassedProcess {
                scan_age: seconds(saved.scan_age),
                resident_at_scan: Bytes(saved.resident_at_scan),
                cpu_time_at_scan: saved.cpu_time_at_scan.map(seconds),
                next_scan_in: seconds(saved.next_scan_in),
                scan_interval: seconds(saved.scan_interval),
                found_nothing: saved.found_nothing,
                merge_unprofitable: saved.merge_unprofitable,
                refused_for: saved.refused_for.map(seconds),
                net_savings: saved.net_savings.map(NetBytes),
                pending_unenroll: saved.pending_unenroll.and_then(reason),
            };
            is_alive(process).then_some((process, passed))
        };
        PassedState {
            census_seconds_per_mib: self.census_seconds_per_mib.max(f64::MIN_POSITIVE),
            available_cpu_seconds: self.available_cpu_seconds,
            processes: self.processes.into_iter().filter_map(passed).collect(),
        }
    }
}

/// Observations of merged pages, as saved.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct SavedWatch {
    processes: Vec<SavedWatchedProcess>,
}

#[derive(Default, Serialize, Deserialize)]
struct SavedWatchedProcess {
    pid: u32,
    start_time: u64,
    watched: Vec<SavedLifetime>,
    unenrolled: Vec<SavedUnenrolled>,
    backoff: Vec<SavedBackoff>,
}

#[derive(Serialize, Deserialize)]
struct SavedLifetime {
    range: (u64, u64),
    page_seconds: f64,
    cow_breaks: u64,
    repeated_cow_breaks: u64,
    max_merged_pages: u64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    page_breaks: Vec<u8>,
}

#[derive(Serialize, Deserialize)]
struct SavedUnenrolled {
    range: (u64, u64),
    enrolled_by_program: bool,
    thrashing: bool,
}

#[derive(Serialize, Deserialize)]
struct SavedBackoff {
    block: u64,
    breaks: usize,
    retry_in: Option<f64>,
    paused: Vec<(u64, u64)>,
}

fn saved_range(range: AddressRange) -> (u64, u64) {
    (range.start, range.end)
}

fn loaded_range((start, end): (u64, u64)) -> AddressRange {
    AddressRange { start, end }
}

/// The entry of a process, which is made if there is none.
fn entry(processes: &mut BTreeMap<ProcessId, SavedWatchedProcess>, process: ProcessId) -> &mut SavedWatchedProcess {
    let (pid, start_time) = (process.pid.0, process.start_time);
    processes.entry(process).or_insert_with(|| SavedWatchedProcess { pid, start_time, ..Default::default() })
}

impl SavedWatch {
    pub fn new(monitor: &MonitorRecord, backoff: Vec<BackoffRecord>) -> Self {
        let mut processes: BTreeMap<ProcessId, SavedWatchedProcess> = BTreeMap::new();
        for (&(process, range), RangeLifetime { stats, page_breaks }) in &monitor.lifetimes {
            entry(&mut processes, process).watched.push(SavedLifetime {
                range: saved_range(range),
                page_seconds: stats.page_seconds,
                cow_breaks: stats.cow_breaks.0,
                repeated_cow_breaks: stats.repeated_cow_breaks.0,
                max_merged_pages: stats.max_merged_pages.0,
                page_breaks: page_breaks.clone(),
            });
        }
        for (&process, unenrolled) in &monitor.unenrolled {
            for (ranges, enrolled_by_program) in
                [(&unenrolled.enrolled_by_pagefold, false), (&unenrolled.enrolled_by_program, true)]
            {
                entry(&mut processes, process).unenrolled.extend(ranges.iter().map(|&range| SavedUnenrolled {
                    range: saved_range(range),
                    enrolled_by_program,
                    thrashing: monitor.thrashing.contains(&(process, range)),
                }));
            }
        }
        for record in backoff {
            entry(&mut processes, record.process).backoff.push(SavedBackoff {
                block: record.block,
                breaks: record.breaks,
                retry_in: record.retry_in.map(|pause| pause.as_secs_f64()),
                paused: record.paused_ranges.into_iter().map(saved_range).collect(),
            });
        }
        Self { processes: processes.into_values().collect() }
    }

    /// The observations of the processes that `is_alive` accepts, after some time without a daemon.
    pub fn into_records(
        self,
        elapsed: Duration,
        is_alive: impl Fn(ProcessId) -> bool,
    ) -> (MonitorRecord, Vec<BackoffRecord>) {
        let (mut monitor, mut backoff) = (MonitorRecord::default(), Vec::new());
        for saved in self.processes {
            let process = ProcessId { pid: Pid(saved.pid), start_time: saved.start_time };
            if !is_alive(process) {
                continue;
            }
            let lifetimes = saved.watched.into_iter().map(|saved| {
                let stats = LifetimeStats {
                    page_seconds: saved.page_seconds,
                    cow_breaks: Pages(saved.cow_breaks),
                    repeated_cow_breaks: Pages(saved.repeated_cow_breaks),
                    max_merged_pages: Pages(saved.max_merged_pages),
                };
                ((process, loaded_range(saved.range)), RangeLifetime { stats, page_breaks: saved.page_breaks })
            });
            monitor.lifetimes.extend(lifetimes);
            for SavedUnenrolled { range, enrolled_by_program, thrashing } in saved.unenrolled {
                let (range, unenrolled) = (loaded_range(range), monitor.unenrolled.entry(process).or_default());
                let ranges = match enrolled_by_program {
                    true => &mut unenrolled.enrolled_by_program,
                    false => &mut unenrolled.enrolled_by_pagefold,
                };
                ranges.push(range);
                if thrashing {
                    monitor.thrashing.insert((process, range));
                }
            }
            backoff.extend(saved.backoff.into_iter().map(|saved| BackoffRecord {
                process,
                block: saved.block,
                breaks: saved.breaks,
                retry_in: saved.retry_in.map(|pause| seconds(pause).saturating_sub(elapsed)),
                paused_ranges: saved.paused.into_iter().map(loaded_range).collect(),
            }));
        }
        (monitor, backoff)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_merge::merge_monitor::UnenrolledRanges;

    const PROCESS: ProcessId = ProcessId { pid: Pid(7), start_time: 8 };

    /// The same value after it was written and read as JSON.
    fn reread<T: Serialize + serde::de::DeserializeOwned>(saved: &T) -> T {
        serde_json::from_slice(&serde_json::to_vec(saved).unwrap()).unwrap()
    }

    #[test]
    fn schedule_is_read_as_it_was_saved() {
        let passed = |pending_unenroll| PassedProcess {
            scan_age: Duration::from_secs(70),
            resident_at_scan: Bytes(1 << 30),
            cpu_time_at_scan: Some(Duration::from_millis(250)),
            next_scan_in: Duration::from_millis(1500),
            scan_interval: Duration::from_secs(40),
            found_nothing: true,
            merge_unprofitable: false,
            refused_for: Some(Duration::from_secs(9)),
            net_savings: Some(NetBytes(-5)),
            pending_unenroll,
        };
        let ended = ProcessId { pid: Pid(9), start_time: 8 };
        let other = ProcessId { pid: Pid(10), start_time: 8 };
        let mut state = PassedState {
            census_seconds_per_mib: 0.25,
            available_cpu_seconds: -0.5,
            processes: BTreeMap::from([
                (PROCESS, passed(Some(DecisionReason::NetLoss))),
                (ended, passed(None)),
                (other, passed(Some(DecisionReason::Failed))),
            ]),
        };
        let read = reread(&SavedSchedule::new(&state)).into_state(|process| process != ended);
        state.processes.remove(&ended);
        assert_eq!(read, state);
    }

    #[test]
    fn observations_are_read_as_they_were_saved() {
        let range = |page: u64| AddressRange { start: page * 4096, end: (page + 1) * 4096 };
        let stats = LifetimeStats {
            page_seconds: 3.5,
            cow_breaks: Pages(3),
            repeated_cow_breaks: Pages(1),
            max_merged_pages: Pages(4),
        };
        let unenrolled =
            UnenrolledRanges { enrolled_by_pagefold: vec![range(5), range(6)], enrolled_by_program: vec![range(9)] };
        let monitor = MonitorRecord {
            lifetimes: BTreeMap::from([
                ((PROCESS, range(1)), RangeLifetime { stats, page_breaks: vec![0, 2] }),
                ((PROCESS, range(2)), RangeLifetime::default()),
            ]),
            unenrolled: BTreeMap::from([(PROCESS, unenrolled)]),
            thrashing: [(PROCESS, range(6))].into(),
        };
        let backoff = |retry_in| {
            [(1, retry_in), (2, None)].map(|(block, retry_in)| BackoffRecord {
                process: PROCESS,
                block,
                breaks: 2,
                retry_in,
                paused_ranges: vec![range(5)],
            })
        };
        let saved = || reread(&SavedWatch::new(&monitor, backoff(Some(Duration::from_secs(30))).to_vec()));
        let elapsed = Duration::from_secs(10);
        let read = saved().into_records(elapsed, |_| true);
        assert_eq!(read, (monitor.clone(), backoff(Some(Duration::from_secs(20))).to_vec()));
        assert_eq!(saved().into_records(elapsed, |_| false), (MonitorRecord::default(), Vec::new()));
    }
}
