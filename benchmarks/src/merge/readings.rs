//! The outside measurements, made in the same way for every policy.
//!
//! During merging only counters are read: `pages_sharing`, `ksm_zero_pages` and CPU times. They cost nothing and are
//! nearly exact then. They omit the memory that a split huge page frees: the kernel frees its zero pages without a
//! counter. Where that matters, the memory of the processes is read instead; this walks their page tables and is
//! therefore done less often. At the end, with ksmd stopped, exact figures are read: proportional shares from the page
//! tables (`Pss_Anon` of smaps_rollup), metadata, huge pages and regions.
//!
//! Formats: Documentation/admin-guide/mm/ksm.rst, Documentation/filesystems/proc.rst and
//! Documentation/scheduler/sched-stats.rst (schedstat) of Linux 6.18.

use anyhow::{Context, Result};
use std::fs;

const KSM_DIRECTORY: &str = "/sys/kernel/mm/ksm";

/// A sample during merging.
#[derive(Clone, Copy, Debug)]
pub struct KsmSample {
    /// Seconds since the policy began.
    pub seconds: f64,
    /// Pages saved: the increase of `pages_sharing` plus `ksm_zero_pages`, or the decrease of [`resident_anonymous`].
    pub saved_pages: i64,
    /// CPU seconds of ksmd so far.
    pub ksmd_seconds: f64,
    /// CPU seconds of pagefold so far.
    pub pagefold_seconds: f64,
    /// The increase of `pages_scanned`.
    pub scanned_pages: i64,
    /// The increase of `full_scans`.
    pub full_scans: i64,
    /// `pages_to_scan`, as the policy sets it.
    pub pages_to_scan: u64,
}

/// The present counters, in pages and seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KsmCounters {
    /// `pages_sharing` plus `ksm_zero_pages`.
    pub saved_pages: i64,
    /// `pages_scanned`.
    pub scanned_pages: i64,
    /// `full_scans`.
    pub full_scans: i64,
    /// `pages_to_scan`.
    pub pages_to_scan: u64,
    /// CPU seconds of ksmd.
    pub ksmd_seconds: f64,
}

impl KsmCounters {
    /// Read the counters.
    pub fn read(ksmd: u32) -> Result<Self> {
        let counter = |name: &str| -> Result<i64> {
            let path = format!("{KSM_DIRECTORY}/{name}");
            let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
            text.trim().parse().with_context(|| format!("{path} contains {text:?}, which is not a number"))
        };
        let schedstat = fs::read_to_string(format!("/proc/{ksmd}/schedstat")).context("ksmd's CPU time")?;
        let on_cpu: f64 = schedstat.split(' ').next().unwrap_or_default().parse().context("ksmd's CPU time")?;
        Ok(Self {
            saved_pages: counter("pages_sharing")? + counter("ksm_zero_pages")?,
            scanned_pages: counter("pages_scanned")?,
            full_scans: counter("full_scans")?,
            pages_to_scan: counter("pages_to_scan")?.unsigned_abs(),
            ksmd_seconds: on_cpu / 1e9,
        })
    }
}

/// The process ID of ksmd.
pub fn ksmd_pid() -> Result<u32> {
    let pids = fs::read_dir("/proc")?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let named = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == "ksmd");
    pids.into_iter().find(named).context("ksmd does not run: the kernel has no KSM")
}

/// CPU seconds of a process, including all its threads and the children it waited for, user and system. It also works
/// for a process that has ended and was not waited for. The resolution is 10 ms, the unit of `/proc/PID/stat`.
pub fn cpu_seconds(pid: u32) -> Result<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name is in parentheses and may contain any character.
    let (_, fields) = stat.rsplit_once(") ").context("a stat without a name")?;
    // Fields 14 to 17 of proc_pid_stat(5); the first after the name is the third.
    let ticks: Vec<f64> = fields.split(' ').skip(11).take(4).filter_map(|field| field.parse().ok()).collect();
    Ok(ticks.iter().sum::<f64>() / rustix::param::clock_ticks_per_second() as f64)
}

/// The content of a file of a process in `/proc`.
fn read_proc_file(pid: u32, name: &str) -> Result<String> {
    let path = format!("/proc/{pid}/{name}");
    fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))
}

/// Bytes of a line of `smaps_rollup`.
fn smaps_rollup_bytes(rollup: &str, name: &str) -> Result<i64> {
    let line = rollup.lines().find_map(|line| line.strip_prefix(name));
    let amount = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<i64>().ok());
    Ok(amount.with_context(|| format!("no {name} in smaps_rollup"))? << 10)
}

/// Anonymous memory of processes in bytes, each page divided by its mappings: [`ExactMemory::resident_bytes`] alone,
/// readable while they run.
pub fn resident_anonymous(pids: &[u32]) -> Result<i64> {
    pids.iter().map(|&pid| smaps_rollup_bytes(&read_proc_file(pid, "smaps_rollup")?, "Pss_Anon:")).sum()
}

/// Exact figures of processes, read with ksmd stopped. Sums over the processes.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExactMemory {
    /// Anonymous memory in bytes, each page divided by its mappings.
    pub resident_bytes: i64,
    /// Bytes in huge pages.
    pub huge_bytes: i64,
    /// Pages for which ksmd keeps metadata.
    pub rmap_items: i64,
    /// Regions (VMAs).
    pub region_count: i64,
}

impl ExactMemory {
    /// Read the figures.
    pub fn read(pids: &[u32]) -> Result<Self> {
        let mut sum = Self::default();
        for &pid in pids {
            let rollup = read_proc_file(pid, "smaps_rollup")?;
            sum.resident_bytes += smaps_rollup_bytes(&rollup, "Pss_Anon:")?;
            sum.huge_bytes += smaps_rollup_bytes(&rollup, "AnonHugePages:")?;
            let stat = read_proc_file(pid, "ksm_stat")?;
            let items = stat.lines().find_map(|line| line.strip_prefix("ksm_rmap_items "));
            sum.rmap_items += items.and_then(|items| items.trim().parse::<i64>().ok()).context("no ksm_rmap_items")?;
            sum.region_count += read_proc_file(pid, "maps")?.lines().count() as i64;
        }
        Ok(sum)
    }
}

/// Whether all memory of a process is enrolled by prctl(2).
pub fn is_enrolled(pid: u32) -> Result<bool> {
    let stat = fs::read_to_string(format!("/proc/{pid}/ksm_stat"))?;
    Ok(stat.lines().any(|line| line.trim_end() == "ksm_merge_any: yes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rollup_line_is_found_by_whole_name() {
        let rollup = "55d0-7ffd ---p 00000000 00:00 0 [rollup]\nPss:  900 kB\nPss_Anon:     612 kB\nPss_File: 288 kB\n";
        assert_eq!(smaps_rollup_bytes(rollup, "Pss_Anon:").unwrap(), 612 << 10);
        assert_eq!(smaps_rollup_bytes(rollup, "Pss:").unwrap(), 900 << 10);
        assert!(smaps_rollup_bytes(rollup, "AnonHugePages:").unwrap_err().to_string().contains("AnonHugePages"));
    }

    #[test]
    fn written_memory_is_resident() {
        let (own, size) = ([std::process::id()], 32 << 20);
        let before = resident_anonymous(&own).unwrap();
        let written = vec![1_u8; size];
        let grown = resident_anonymous(&own).unwrap() - before;
        // Other tests allocate and free memory meanwhile.
        assert!(grown >= size as i64 / 2, "{grown} for {}", written.len());
    }
}
