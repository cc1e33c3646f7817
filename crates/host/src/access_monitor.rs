//! Counts which memory of processes is accessed, by DAMON, the kernel's Data Access MONitor (mm/damon).
//!
//! Each [`MonitoredMemory`] gets a kdamond of its own with fixed address ranges (`fvaddr`, 5.19). Its files are below
//! [`KDAMONDS_DIRECTORY`] (Documentation/admin-guide/mm/damon/usage.rst). Every sampling interval DAMON divides the
//! ranges into regions and tests one random page of each: has it been accessed within the interval? Each sampling
//! interval is an aggregation interval of its own, so a region counts as accessed or not in each of them. Two schemes
//! with the action `stat` add up the bytes of all regions, and of those that were accessed. The quotient is an unbiased
//! estimate of the share of the memory that is accessed within an interval, however DAMON divides it: adjacent regions
//! are merged only if their counts are equal, because a tenth of a maximum of 1 rounds down to 0 (`kdamond_merge_regions`
//! and its threshold in `kdamond_fn`, mm/damon/core.c). Its standard error is at most `sqrt(p (1 - p) / n)` for a share
//! p and n tested pages, of which there are at least [`MIN_REGIONS`] in each interval after the first few.
//!
//! Pagefold uses DAMON's files only while there is no kdamond (`nr_kdamonds` is 0), and recognizes its own by the
//! processes that they monitor. A kdamond that is on has a target process, unless it monitors physical addresses
//! (`paddr`), as Pagefold's never do. So one without a target is Pagefold's only if it is off and not for `paddr`. Limit:
//! another program's kdamond in this state, or with the same target, looks the same.

use crate::{Host, parse};
use pagefold_base::{Absent, AddressRange, Pid, ProcessId, Reading};
use std::time::Duration;

/// The directory of DAMON's kernel threads (`damon_sysfs_init`, mm/damon/sysfs.c), below the root.
pub const KDAMONDS_DIRECTORY: &str = "sys/kernel/mm/damon/admin/kdamonds";

/// DAMON's operations for fixed ranges of virtual addresses.
pub const OPERATIONS: &str = "fvaddr";

/// The time within which an access counts: the default time for which DAMON aggregates its samples
/// (`damon_sysfs_attrs_add_dirs`, mm/damon/sysfs.c).
pub const SAMPLING_INTERVAL: Duration = Duration::from_millis(100);

/// The least number of regions into which DAMON divides the ranges of a kdamond: its default.
pub const MIN_REGIONS: u32 = 10;

/// The greatest number of them: a tenth of the default, because there is a kdamond for each machine. It bounds the page
/// table walks to two for each region and sampling interval.
const MAX_REGIONS: u32 = 100;

/// Memory whose accesses are counted together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MonitoredMemory {
    /// The process.
    pub process: ProcessId,
    /// The ranges: ascending, disjoint, whole pages.
    pub ranges: Vec<AddressRange>,
}

/// What is done with the kdamonds of some memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MonitorStep {
    /// Start a kdamond for each memory.
    Start(Vec<MonitoredMemory>),
    /// Let the kdamonds of these processes update their counts, for [`read_access_counts`].
    UpdateCounts(Vec<Pid>),
    /// Turn the kdamonds of these processes off and remove them. It changes nothing if they do not exist any more.
    Stop(Vec<Pid>),
}

impl MonitorStep {
    /// The process of each kdamond.
    pub fn pids(&self) -> Vec<Pid> {
        match self {
            Self::Start(memory) => memory.iter().map(|memory| memory.process.pid).collect(),
            Self::UpdateCounts(pids) | Self::Stop(pids) => pids.clone(),
        }
    }

    /// The step that undoes it.
    pub fn inverse(&self) -> Option<Self> {
        match self {
            Self::Start(_) => Some(Self::Stop(self.pids())),
            Self::UpdateCounts(_) | Self::Stop(_) => None,
        }
    }
}

/// Sums over all sampling intervals so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccessCounts {
    /// The bytes of all ranges.
    pub monitored: u64,
    /// The bytes of regions that were accessed.
    pub accessed: u64,
}

impl AccessCounts {
    /// The share of the memory that is accessed within a sampling interval; `None` before the first one.
    pub fn accessed_share(self) -> Option<f64> {
        (self.monitored > 0).then(|| self.accessed as f64 / self.monitored as f64)
    }
}

/// The directory of a kdamond.
pub fn kdamond_directory(position: usize) -> String {
    format!("{KDAMONDS_DIRECTORY}/{position}")
}

/// The file that has the state of a kdamond, `on` or `off`, and takes commands.
pub fn state_file(position: usize) -> String {
    format!("{}/state", kdamond_directory(position))
}

/// The directory of the only context of a kdamond.
pub fn context_directory(position: usize) -> String {
    format!("{}/contexts/0", kdamond_directory(position))
}

/// The files that configure the context of a kdamond with their values, in the order in which they must be written. The
/// file `nr_contexts` comes before them.
pub fn context_files(position: usize, memory: &MonitoredMemory) -> Vec<(String, String)> {
    let directory = context_directory(position);
    let mut files: Vec<(String, String)> = Vec::new();
    let mut push = |file: &str, value: String| files.push((format!("{directory}/{file}"), value));
    let interval = SAMPLING_INTERVAL.as_micros().to_string();
    push("operations", OPERATIONS.to_owned());
    push("monitoring_attrs/intervals/sample_us", interval.clone());
    push("monitoring_attrs/intervals/aggr_us", interval);
    push("monitoring_attrs/nr_regions/min", MIN_REGIONS.to_string());
    push("monitoring_attrs/nr_regions/max", MAX_REGIONS.to_string());
    push("targets/nr_targets", "1".to_owned());
    push("targets/0/pid_target", memory.process.pid.to_string());
    push("targets/0/regions/nr_regions", memory.ranges.len().to_string());
    for (number, range) in memory.ranges.iter().enumerate() {
        push(&format!("targets/0/regions/{number}/start"), range.start.to_string());
        push(&format!("targets/0/regions/{number}/end"), range.end.to_string());
    }
    push("schemes/nr_schemes", "2".to_owned());
    // The first scheme has all regions, the second one those with an access.
    for min_accesses in 0..2 {
        let scheme = format!("schemes/{min_accesses}");
        push(&format!("{scheme}/action"), "stat".to_owned());
        push(&format!("{scheme}/access_pattern/sz/max"), u64::MAX.to_string());
        push(&format!("{scheme}/access_pattern/nr_accesses/min"), min_accesses.to_string());
        push(&format!("{scheme}/access_pattern/nr_accesses/max"), u32::MAX.to_string());
        push(&format!("{scheme}/access_pattern/age/max"), u32::MAX.to_string());
    }
    files
}

/// The file with the bytes that a scheme of a kdamond has counted.
pub fn scheme_count_file(position: usize, scheme: usize) -> String {
    format!("{}/schemes/{scheme}/stats/sz_tried", context_directory(position))
}

/// The number of kdamonds that exist, of whatever program.
///
/// # Errors
/// `NotOnThisKernel` without CONFIG_DAMON_SYSFS (5.18), `Denied` without root.
pub fn read_kdamond_count(host: &dyn Host) -> Reading<u64> {
    parse::number(&host.read(&format!("{KDAMONDS_DIRECTORY}/nr_kdamonds"))?)
}

/// Whether the kdamonds of the host monitor just these processes, one each, or are being prepared for that.
///
/// # Errors
/// If DAMON's files cannot be read.
pub fn has_kdamonds_for(host: &dyn Host, pids: &[Pid]) -> Reading<bool> {
    if read_kdamond_count(host)? != pids.len() as u64 {
        return Ok(false);
    }
    for (position, pid) in pids.iter().enumerate() {
        let is_for_pid = match read_target(host, position)? {
            0 => is_unconfigured(host, position)?,
            target => target == pid.0,
        };
        if !is_for_pid {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The process that a kdamond monitors: 0 if it has none yet, or monitors physical addresses.
fn read_target(host: &dyn Host, position: usize) -> Reading<u32> {
    match host.read(&format!("{}/targets/0/pid_target", context_directory(position))) {
        Ok(target) => parse::number(&target),
        Err(Absent::NotOnThisKernel) => Ok(0),
        Err(why) => Err(why),
    }
}

/// Whether a kdamond without a target process can be one that [`MonitorStep::Start`] has not configured yet: it is off,
/// and not for physical addresses.
fn is_unconfigured(host: &dyn Host, position: usize) -> Reading<bool> {
    // A file is absent if the context does not exist yet, or if another program has removed the kdamond.
    let has_value = |path: &str, value: &str| match host.read(path) {
        Ok(text) => Ok(text.trim_ascii() == value.as_bytes()),
        Err(Absent::NotOnThisKernel) => Ok(false),
        Err(why) => Err(why),
    };
    Ok(has_value(&state_file(position), "off")?
        && !has_value(&format!("{}/operations", context_directory(position)), "paddr")?)
}

/// The counts of each kdamond when they were last updated.
///
/// # Errors
/// If DAMON's files cannot be read.
pub fn read_access_counts(host: &dyn Host, kdamond_count: usize) -> Reading<Vec<AccessCounts>> {
    let read = |position: usize, scheme: usize| -> Reading<u64> {
        parse::number(&host.read(&scheme_count_file(position, scheme))?)
    };
    (0..kdamond_count)
        .map(|kdamond| Ok(AccessCounts { monitored: read(kdamond, 0)?, accessed: read(kdamond, 1)? }))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_host::FakeHost;

    #[test]
    fn context_is_configured_in_the_order_that_creates_its_directories() {
        let range = |start| AddressRange { start, end: start + 0x1000 };
        let process = ProcessId { pid: Pid(7), start_time: 1 };
        let files = context_files(3, &MonitoredMemory { process, ranges: vec![range(0x1000), range(0x8000)] });
        let position = |file: &str| {
            let path = format!("{KDAMONDS_DIRECTORY}/3/contexts/0/{file}");
            files.iter().position(|(name, _)| *name == path).unwrap_or_else(|| panic!("{file}: {files:?}"))
        };
        let value = |file: &str| files[position(file)].1.as_str();
        assert_eq!((value("targets/0/pid_target"), value("targets/0/regions/nr_regions")), ("7", "2"));
        assert_eq!((value("targets/0/regions/1/start"), value("targets/0/regions/1/end")), ("32768", "36864"));
        assert_eq!(value("monitoring_attrs/intervals/sample_us"), value("monitoring_attrs/intervals/aggr_us"));
        let least = |scheme: u32| value(&format!("schemes/{scheme}/access_pattern/nr_accesses/min")).to_owned();
        assert_eq!((least(0), least(1)), ("0".to_owned(), "1".to_owned()));
        assert!(position("targets/nr_targets") < position("targets/0/regions/nr_regions"));
        assert!(position("targets/0/regions/nr_regions") < position("targets/0/regions/0/start"));
        assert!(position("schemes/nr_schemes") < position("schemes/0/action"));
    }

    #[test]
    fn kdamonds_are_recognized_by_their_processes() {
        let host = FakeHost::booted();
        let is_own = |pids: &[u32]| has_kdamonds_for(&host, &pids.iter().copied().map(Pid).collect::<Vec<_>>());
        assert!(is_own(&[7]).is_err());
        host.put_file(&format!("{KDAMONDS_DIRECTORY}/nr_kdamonds"), "2\n");
        (0..2).for_each(|position| host.put_file(&state_file(position), "off\n"));
        assert_eq!((is_own(&[7]), is_own(&[7, 8])), (Ok(false), Ok(true)));
        host.put_file(&format!("{KDAMONDS_DIRECTORY}/0/contexts/0/targets/0/pid_target"), "7\n");
        host.put_file(&format!("{KDAMONDS_DIRECTORY}/1/contexts/0/targets/0/pid_target"), "0\n");
        assert_eq!((is_own(&[7, 8]), is_own(&[9, 8])), (Ok(true), Ok(false)));
        host.put_file(&format!("{KDAMONDS_DIRECTORY}/1/contexts/0/targets/0/pid_target"), "9\n");
        assert_eq!((is_own(&[7, 8]), is_own(&[7, 9])), (Ok(false), Ok(true)));
        (0..2).for_each(|position| host.put_file(&state_file(position), "on\n"));
        assert_eq!((is_own(&[7, 8]), is_own(&[7, 9])), (Ok(false), Ok(true)));
    }

    #[test]
    fn kdamond_without_target_is_foreign_if_it_is_on_or_for_physical_addresses() {
        let host = FakeHost::booted();
        host.put_file(&format!("{KDAMONDS_DIRECTORY}/nr_kdamonds"), "1\n");
        for target in [None, Some("0\n")] {
            if let Some(target) = target {
                host.put_file(&format!("{KDAMONDS_DIRECTORY}/0/contexts/0/targets/0/pid_target"), target);
            }
            for (state, operations, is_own) in [
                ("off", "vaddr", true),
                ("off", OPERATIONS, true),
                ("off", "paddr", false),
                ("on", OPERATIONS, false),
                ("on", "paddr", false),
            ] {
                host.put_file(&state_file(0), &format!("{state}\n"));
                host.put_file(&format!("{}/operations", context_directory(0)), &format!("{operations}\n"));
                assert_eq!(has_kdamonds_for(&host, &[Pid(7)]), Ok(is_own), "{target:?} {state} {operations}");
            }
        }
    }

    #[test]
    fn share_is_unknown_before_the_first_sample() {
        assert_eq!(AccessCounts::default().accessed_share(), None);
        assert_eq!(AccessCounts { monitored: 400, accessed: 100 }.accessed_share(), Some(0.25));
    }
}
