//! What is read from outside, the same way for every policy.
//!
//! While merging goes on, only counters are read: `pages_sharing` and `ksm_zero_pages`, which cost nothing and are
//! nearly right then, and CPU times. They do not see what a split huge page gives back (the kernel frees its pages of
//! zeros, which count for nobody); where that matters, the processes' memory is read instead, which is a walk through
//! their page tables and so done less often. When it is over and ksmd stands still, the truth: proportional shares from
//! the page tables (`Pss_Anon` of smaps_rollup), metadata, huge pages and regions.
//!
//! Formats: Documentation/admin-guide/mm/ksm.rst, Documentation/filesystems/proc.rst and
//! Documentation/scheduler/sched-stats.rst (schedstat) of Linux 6.18.

use anyhow::{Context, Result};
use std::fs;

const KSM_DIRECTORY: &str = "/sys/kernel/mm/ksm";

/// One look while merging goes on.
#[derive(Clone, Copy, Debug)]
pub struct KsmSample {
    /// Since the policy began.
    pub seconds: f64,
    /// Pages saved: `pages_sharing` and `ksm_zero_pages` together, against before, or what [`resident_anonymous`] fell by.
    pub saved_pages: i64,
    /// CPU seconds of ksmd so far.
    pub ksmd_seconds: f64,
    /// CPU seconds of pagefold so far.
    pub pagefold_seconds: f64,
    /// `pages_scanned`, against before.
    pub scanned_pages: i64,
    /// `full_scans`, against before.
    pub full_scans: i64,
    /// `pages_to_scan`, as policies set it.
    pub pages_to_scan: u64,
}

/// What the counters say now, in pages and seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KsmCounters {
    /// `pages_sharing` and `ksm_zero_pages` together.
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
    /// Read them.
    pub fn read(ksmd: u32) -> Result<Self> {
        let counter = |name: &str| -> Result<i64> {
            let path = format!("{KSM_DIRECTORY}/{name}");
            let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
            text.trim().parse().with_context(|| format!("{path} says {text:?}"))
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

/// The number of the kernel's thread that merges.
pub fn ksmd_pid() -> Result<u32> {
    let pids = fs::read_dir("/proc")?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let named = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == "ksmd");
    pids.into_iter().find(named).context("there is no ksmd: a kernel without KSM")
}

/// CPU seconds of a process, all its threads and the children it waited for, user and system: also of one that has
/// ended and was not waited for. In steps of 10 ms, the unit of `/proc/PID/stat`.
pub fn cpu_seconds(pid: u32) -> Result<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name is in parentheses and may hold anything.
    let (_, fields) = stat.rsplit_once(") ").context("a stat without a name")?;
    // Fields 14 to 17 of proc_pid_stat(5); the first after the name is the third.
    let ticks: Vec<f64> = fields.split(' ').skip(11).take(4).filter_map(|field| field.parse().ok()).collect();
    Ok(ticks.iter().sum::<f64>() / rustix::param::clock_ticks_per_second() as f64)
}

/// What a file of a process in `/proc` says.
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

/// Anonymous memory of processes, each page divided by its mappings: [`ExactMemory::resident_anonymous`] alone, while they run. Bytes.
pub fn resident_anonymous(pids: &[u32]) -> Result<i64> {
    pids.iter().map(|&pid| smaps_rollup_bytes(&read_proc_file(pid, "smaps_rollup")?, "Pss_Anon:")).sum()
}

/// The truth about processes, with ksmd standing still. Sums over them.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExactMemory {
    /// Anonymous memory, each page divided by its mappings: what it takes. Bytes.
    pub resident_bytes: i64,
    /// In huge pages. Bytes.
    pub huge_bytes: i64,
    /// Pages for which ksmd keeps metadata.
    pub rmap_items: i64,
    /// Regions (VMAs).
    pub region_count: i64,
}

impl ExactMemory {
    /// Read it.
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

/// Whether all memory of a process is enrolled by prctl.
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
        // Other tests come and go meanwhile.
        assert!(grown >= size as i64 / 2, "{grown} for {}", written.len());
    }
}
