//! A host on which little or nothing changes any more: what the daemon costs there, in CPU time and in memory. Sleeping
//! processes and idle guests run on it. On request a busy process runs beside them, which the daemon scans again
//! because it works a little.

use super::driver::{DaemonProcess, KsmDriver};
use super::guest::{ChurnGuest, GUEST_NAME_PREFIX, GuestShape};
use super::hostile_mix::{ProgramFolder, count_merged_pages};
use crate::findings::{Findings, MarkdownTable, ThresholdCheck};
use crate::merge::running_program::RunningProgram;
use crate::merge::trial::sleep_unless_signaled;
use anyhow::{Context, Result, ensure};
use pagefold_labs::ksm::KsmTestGuard;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Target: the CPU share of one core.
const MAX_CPU_SHARE: f64 = 0.002;

/// Target for resident memory: this base, plus a share of the managed memory.
const MAX_RESIDENT_BYTES: f64 = 32.0 * BYTES_PER_MIB;
const MAX_RESIDENT_SHARE_OF_MANAGED: f64 = 0.004;

/// Two resident memory readings may differ by this much without growth: the granularity of the heap.
const RESIDENT_NOISE_BYTES: f64 = BYTES_PER_MIB;

const BYTES_PER_MIB: f64 = 1048576.0;

/// The percentage of the memory of each process that is duplicate.
const DUPLICATE_PERCENT: u64 = 33;

/// The busy process, too busy to count as idle: 256 MiB, of which it rewrites a sixteenth four times a second.
const BUSY_LAYOUT_ARGUMENTS: [&str; 4] = ["layout", "unique=61440,volatile=4096", "--interval", "250"];

/// Time limit until all processes are merged and the savings stop growing.
const MERGE_TIMEOUT: Duration = Duration::from_secs(1200);

/// The minimum merged share of the duplicates of a process for it to count as merged.
const MIN_MERGED_SHARE: f64 = 0.5;

/// The quiet host.
#[derive(Clone, Debug)]
pub struct QuietHostBenchmark {
    /// Duration of the measurement, once nothing more is merged.
    pub duration: Duration,
    /// How long nothing must have been merged before the measurement.
    pub settle_time: Duration,
    /// Number of processes.
    pub processes: u32,
    /// Size of each process, in MiB.
    pub process_mib: u64,
    /// Number of guests.
    pub guests: usize,
    /// Memory of each guest, in MiB.
    pub guest_mib: u32,
    /// Whether the busy process runs.
    pub with_busy_process: bool,
    /// The pagefold binary.
    pub pagefold: PathBuf,
}

struct QuietSample {
    seconds: f64,
    ksmd_seconds: f64,
    daemon_seconds: f64,
    resident_bytes: f64,
}

impl QuietHostBenchmark {
    /// Run the measurement. It reserves KSM meanwhile.
    pub fn measure(&self, log: &Path) -> Result<Findings> {
        let ksm = KsmTestGuard::acquire().map_err(anyhow::Error::msg)?;
        let folder = ProgramFolder::new("pfquiet")?;
        let mib = self.process_mib.to_string();
        let processes: Vec<RunningProgram> = (0..self.processes)
            .map(|_| {
                folder
                    .start_lab('q', &["mixture", "--duplicate-share", &format!("{DUPLICATE_PERCENT}%"), "--mib", &mib])
            })
            .collect::<Result<_>>()?;
        let worker = if self.with_busy_process { Some(folder.start_lab('w', &BUSY_LAYOUT_ARGUMENTS)?) } else { None };
        let guests = self.start_guests()?;
        let domain = format!("[[domain]]\nname = \"quiet\"\nusers = [0]\nvms = [\"{GUEST_NAME_PREFIX}-*\"]\n");
        let config = folder.daemon_config("", &["qemu-system-*"]) + &domain;
        let driver = KsmDriver::start_daemon(&self.pagefold, &config, log, &ksm)?;
        let daemon = driver.as_daemon().context("a daemon")?;
        let pids = |min_pages: u64| {
            let processes = processes.iter().map(move |process| (process.pid(), min_pages));
            processes
                .chain(guests.iter().map(|(_, pid)| (*pid, 1)))
                .chain(worker.iter().map(|worker| (worker.pid(), 0)))
        };
        let min_pages = (self.process_mib * 256 * DUPLICATE_PERCENT / 100) as f64 * MIN_MERGED_SHARE;
        let merged_bytes = self.wait_until_merged(daemon, &pids(min_pages as u64).collect::<Vec<_>>())?;
        let peak = status_bytes(daemon.pid(), "VmHWM:")?;
        let managed: f64 = pids(0).map(|(pid, _)| resident_bytes(pid)).sum::<Result<f64>>()?;
        let passes = read_pass_count(daemon)?;
        let (start, before) = (Instant::now(), driver.read_cpu_seconds()?);
        let mut samples = Vec::new();
        while start.elapsed() < self.duration {
            sleep_unless_signaled((self.duration / 60).clamp(Duration::from_millis(500), Duration::from_secs(30)))?;
            let cpu = driver.read_cpu_seconds()?;
            samples.push(QuietSample {
                seconds: start.elapsed().as_secs_f64(),
                ksmd_seconds: cpu.ksmd - before.ksmd,
                daemon_seconds: cpu.driver - before.driver,
                resident_bytes: resident_bytes(daemon.pid())?,
            });
        }
        let passes = read_pass_count(daemon)? - passes;
        driver.stop()?;
        Ok(self.build_findings(&samples, managed, (merged_bytes, peak, passes)))
    }

    /// Start the guests, and wait until each is ready.
    fn start_guests(&self) -> Result<Vec<(ChurnGuest, u32)>> {
        let start_guest = |number| {
            let mut guest = ChurnGuest::start(number, GuestShape::small(self.guest_mib), false)?;
            let pid = guest.wait_until_ready()?;
            Ok((guest, pid))
        };
        (0..self.guests).map(start_guest).collect()
    }

    /// Wait until this many pages of each process are merged and no more have come for a while. Returns the merged
    /// bytes.
    fn wait_until_merged(&self, daemon: &DaemonProcess, wanted_pages: &[(u32, u64)]) -> Result<f64> {
        let (start, mut last_counts, mut last_change) = (Instant::now(), (0, 0), Instant::now());
        loop {
            let status = daemon.read_status()?;
            let read_count = |name: &str| status["passes"][name].as_i64().unwrap_or(0);
            let counts = (read_count("merges"), read_count("measured"));
            if counts != last_counts {
                (last_counts, last_change) = (counts, Instant::now());
            }
            let pages: Vec<u64> =
                wanted_pages.iter().map(|(pid, _)| count_merged_pages(*pid)).collect::<Result<_>>()?;
            let all_merged = pages.iter().zip(wanted_pages).all(|(pages, (_, min_pages))| pages >= min_pages);
            if all_merged && last_change.elapsed() >= self.settle_time {
                return Ok(last_counts.1 as f64);
            }
            ensure!(
                start.elapsed() < MERGE_TIMEOUT,
                "merging did not settle within {MERGE_TIMEOUT:?}: {last_counts:?}, pages of each process {pages:?}"
            );
            sleep_unless_signaled(Duration::from_secs(1))?;
        }
    }

    fn build_findings(
        &self,
        samples: &[QuietSample],
        managed: f64,
        (merged_bytes, peak, passes): (f64, f64, u64),
    ) -> Findings {
        let mut findings = Findings::new("seconds,ksmd_seconds,daemon_seconds,resident_bytes");
        for QuietSample { seconds, ksmd_seconds: ksmd, daemon_seconds: driver, resident_bytes: resident } in samples {
            findings.samples.push(format!("{seconds:.1},{ksmd:.4},{driver:.4},{resident:.0}"));
        }
        let Some(last) = samples.last() else { return findings };
        let share = (last.ksmd_seconds + last.daemon_seconds) / last.seconds;
        let max_bytes = samples.iter().map(|sample| sample.resident_bytes).fold(0.0, f64::max);
        // A census allocates memory while it runs and frees it afterwards.
        let median = |samples: &[QuietSample]| {
            let mut resident: Vec<f64> = samples.iter().map(|sample| sample.resident_bytes).collect();
            resident.sort_by(f64::total_cmp);
            resident.get(resident.len() / 2).copied().unwrap_or(max_bytes)
        };
        let (early, late) = samples.split_at(samples.len() / 2);
        let (early, late) = (median(early), median(late));
        let bound = MAX_RESIDENT_BYTES + MAX_RESIDENT_SHARE_OF_MANAGED * managed;
        let title = format!(
            "{} of {} MiB and {}, merged{}, for {:.0} s",
            format_count(u64::from(self.processes), "idle process", "idle processes"),
            self.process_mib,
            format_count(self.guests as u64, "idle virtual machine", "idle virtual machines"),
            if self.with_busy_process { ", beside a busy process" } else { "" },
            last.seconds
        );
        let mut table = MarkdownTable::new(title, &["of", "value"]);
        for (label, value) in [
            ("merged before, MiB", format!("{:.0}", merged_bytes / BYTES_PER_MIB)),
            ("censuses meanwhile", passes.to_string()),
            ("ksmd, CPU s", format!("{:.3}", last.ksmd_seconds)),
            ("daemon, CPU s", format!("{:.2}", last.daemon_seconds)),
            ("both, % of one core", format!("{:.3}", share * 100.0)),
            ("daemon's memory, median of the first half, MiB", format!("{:.1}", early / BYTES_PER_MIB)),
            ("daemon's memory, median of the second half, MiB", format!("{:.1}", late / BYTES_PER_MIB)),
            ("daemon's memory at most, MiB", format!("{:.1}", max_bytes / BYTES_PER_MIB)),
            ("its peak before, under load, MiB", format!("{:.1}", peak / BYTES_PER_MIB)),
            ("managed memory, MiB", format!("{:.0}", managed / BYTES_PER_MIB)),
        ] {
            table.rows.push(vec![label.to_owned(), value]);
        }
        findings.tables.push(table);
        findings.checks.push(ThresholdCheck {
            claim: format!("a quiet host costs under {:.1} % of one core", MAX_CPU_SHARE * 100.0),
            measured: format!("{:.3} %", share * 100.0),
            met: share < MAX_CPU_SHARE,
        });
        findings.checks.push(ThresholdCheck {
            claim: format!("memory does not grow over {:.0} s", last.seconds),
            measured: format!("{:+.1} MiB from the first half to the second", (late - early) / BYTES_PER_MIB),
            met: late <= early + RESIDENT_NOISE_BYTES,
        });
        findings.checks.push(ThresholdCheck {
            claim: "resident memory at most 32 MiB plus 0.4 % of the managed memory, also under load".to_owned(),
            measured: format!(
                "{:.1} of {:.1} MiB, {:.1} under load",
                max_bytes / BYTES_PER_MIB,
                bound / BYTES_PER_MIB,
                peak / BYTES_PER_MIB
            ),
            met: max_bytes.max(peak) <= bound,
        });
        if self.with_busy_process {
            findings.checks.push(ThresholdCheck {
                claim: "the daemon scans meanwhile, as the busy process requires".to_owned(),
                measured: format_count(passes, "census", "censuses"),
                met: passes > 0,
            });
        }
        findings
    }
}

/// A count with its noun.
fn format_count(number: u64, one: &str, more: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { more })
}

/// Passes of the daemon so far.
fn read_pass_count(daemon: &DaemonProcess) -> Result<u64> {
    daemon.read_status()?["passes"]["passes"].as_u64().context("passes")
}

/// Resident memory of a process in bytes.
fn resident_bytes(pid: u32) -> Result<f64> {
    status_bytes(pid, "VmRSS:")
}

/// A size of a process in bytes, by its name in proc_pid_status(5).
fn status_bytes(pid: u32, name: &str) -> Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(name)).with_context(|| format!("no {name}"))?;
    let kib: f64 = line.trim().trim_end_matches("kB").trim().parse().with_context(|| name.to_owned())?;
    Ok(kib * 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings_for(guests: usize, with_busy_process: bool, passes: u64) -> Findings {
        let (length, calm, pagefold) = (Duration::from_secs(60), Duration::from_secs(5), PathBuf::new());
        let quiet = QuietHostBenchmark {
            duration: length,
            settle_time: calm,
            processes: 4,
            process_mib: 32,
            guests,
            guest_mib: 128,
            with_busy_process,
            pagefold,
        };
        let sample = |seconds: f64| QuietSample {
            seconds,
            ksmd_seconds: 0.0,
            daemon_seconds: 0.01,
            resident_bytes: BYTES_PER_MIB,
        };
        quiet.build_findings(
            &[sample(30.0), sample(60.0)],
            1024.0 * BYTES_PER_MIB,
            (BYTES_PER_MIB, BYTES_PER_MIB, passes),
        )
    }

    #[test]
    fn busy_process_must_be_scanned() {
        let met = |with_busy_process, passes| {
            findings_for(1, with_busy_process, passes).checks.iter().map(|bar| bar.met).collect::<Vec<_>>()
        };
        assert_eq!(met(true, 0), [true, true, true, false]);
        assert_eq!(met(true, 1), [true; 4]);
        assert_eq!(met(false, 0), [true; 3]);
    }

    #[test]
    fn single_guest_is_not_plural() {
        let title = |guests, with_busy_process| findings_for(guests, with_busy_process, 1).tables[0].title.clone();
        assert_eq!(title(1, false), "4 idle processes of 32 MiB and 1 idle virtual machine, merged, for 60 s");
        assert_eq!(
            title(4, true),
            "4 idle processes of 32 MiB and 4 idle virtual machines, merged, beside a busy process, for 60 s"
        );
    }
}
