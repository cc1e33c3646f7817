//! Large guests that stay: the time from the driver's start until nine tenths of what they can share are merged, beside
//! the time that ksmd alone would need for these pages at the same CPU bound.
//!
//! Each guest holds the files of a common image in its page cache, and data of its own. The driver starts when all
//! guests are ready, so that it finds them all at once.

use super::driver::{DriverCpuSeconds, KsmDriver, KsmDriverKind};
use super::guest::{self, ChurnGuest, GuestShape, ReadyGuest};
use crate::findings::{Findings, MarkdownTable, ThresholdCheck};
use crate::merge::trial::sleep_unless_signaled;
use anyhow::Result;
use pagefold_labs::ksm::KsmTestGuard;
use pagefold_linux::LiveHost;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The daemon's CPU bound: the default of a host with up to ten CPUs. Rate in shares of one CPU, burst in seconds.
const CPU_RATE: f64 = 0.1;
const CPU_BURST_SECONDS: f64 = 30.0;

/// Overspending of the bound between two readings of CPU time, in seconds.
const CPU_BOUND_TOLERANCE_SECONDS: f64 = 2.0;

/// Target: the time to nine tenths of the savings, as a multiple of the time that ksmd needs for them.
const MAX_TIME_FACTOR: f64 = 1.3;

/// The merged share that counts.
const MERGED_SHARE: f64 = 0.9;

/// The period of samples.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(2);

/// The large guests.
#[derive(Clone, Debug)]
pub struct LargeGuestsBenchmark {
    /// Number of guests.
    pub guests: usize,
    /// Their memory and data.
    pub shape: GuestShape,
    /// Time limit of a driver.
    pub timeout: Duration,
    /// The pagefold binary.
    pub pagefold: PathBuf,
}

/// A sample over all guests.
#[derive(Clone, Copy, Debug)]
struct LargeGuestsSample {
    seconds: f64,
    shared_pages: u64,
    saved_pages: u64,
    cpu: DriverCpuSeconds,
}

/// The result of a driver.
pub struct LargeGuestsRun {
    driver_kind: KsmDriverKind,
    shareable_pages: u64,
    samples: Vec<LargeGuestsSample>,
}

impl LargeGuestsRun {
    /// The first sample with nine tenths of the shareable pages shared.
    fn merged(&self) -> Option<LargeGuestsSample> {
        let is_merged =
            |sample: &&LargeGuestsSample| sample.shared_pages as f64 >= MERGED_SHARE * self.shareable_pages as f64;
        self.samples.iter().find(is_merged).copied()
    }

    /// Seconds that ksmd alone needs for what it did until then, at the CPU bound.
    fn ksmd_seconds_at_bound(&self) -> Option<f64> {
        let ksmd_seconds = self.merged()?.cpu.ksmd;
        Some(ksmd_seconds.max((ksmd_seconds - CPU_BURST_SECONDS) / CPU_RATE))
    }

    /// The most CPU seconds beyond the bound in any window of samples.
    fn max_excess_seconds(&self) -> f64 {
        // The largest difference to an earlier sample of the CPU time less what the rate pays for.
        let (mut lowest, mut most) = (0.0_f64, 0.0_f64);
        for sample in &self.samples {
            let unpaid = sample.cpu.total() - CPU_RATE * sample.seconds;
            lowest = lowest.min(unpaid);
            most = most.max(unpaid - lowest);
        }
        (most - CPU_BURST_SECONDS).max(0.0)
    }
}

/// The configuration of the daemon: only these guests, in one trust domain.
fn daemon_config() -> String {
    let vms = format!("vms = [\"{}-*\"]", guest::GUEST_NAME_PREFIX);
    format!(
        "[[domain]]\nname = \"large\"\nusers = [0]\n{vms}\n[daemon]\ncpu_rate = \"{}%\"\ncpu_burst = \"{}s\"\n\
         [daemon.tracked]\n{vms}\n",
        CPU_RATE * 100.0,
        CPU_BURST_SECONDS
    )
}

impl LargeGuestsBenchmark {
    /// Boot the guests, and then run a driver. It reserves KSM meanwhile.
    pub fn run(&self, driver_kind: KsmDriverKind, log: &Path) -> Result<LargeGuestsRun> {
        let ksm = KsmTestGuard::acquire().map_err(anyhow::Error::msg)?;
        ksm.write_setting("run", 0);
        let enrolled = driver_kind.enrolls_whole_qemu();
        let unwritten = guest::measure_unwritten_pages(self.shape, enrolled)?;
        let mut guests = (0..self.guests)
            .map(|number| ChurnGuest::start(number, self.shape, enrolled))
            .collect::<Result<Vec<_>>>()?;
        for position in 0..guests.len() {
            let pid = guests[position].wait_until_ready()?;
            let (before, rest) = guests.split_at_mut(position);
            let others: Vec<&ReadyGuest> = before.iter().filter_map(|guest| guest.ready.as_ref()).collect();
            rest[0].count_shareable_with((pid, Instant::now()), &others, unwritten)?;
        }
        // The first guest was counted before any other had the same pages.
        let (first, rest) = guests.split_at_mut(1);
        let others: Vec<&ReadyGuest> = rest.iter().filter_map(|guest| guest.ready.as_ref()).collect();
        if let Some((pid, ready_at)) = first[0].ready.as_ref().map(|ready| (ready.pid, ready.ready_at)) {
            first[0].count_shareable_with((pid, ready_at), &others, unwritten)?;
        }
        let mut driver = match driver_kind {
            KsmDriverKind::Policy(policy) => KsmDriver::start_policy(policy, &ksm)?,
            KsmDriverKind::Daemon => KsmDriver::start_daemon(&self.pagefold, &daemon_config(), log, &ksm)?,
        };
        let (host, start) = (LiveHost::new(), Instant::now());
        let ready = guests.iter().filter_map(|guest| guest.ready.as_ref());
        let shareable_pages = ready.map(|ready| ready.shareable_pages).sum();
        let mut run = LargeGuestsRun { driver_kind, shareable_pages, samples: Vec::new() };
        while start.elapsed() < self.timeout && run.merged().is_none() {
            sleep_unless_signaled(SAMPLE_INTERVAL)?;
            driver.poll(start.elapsed().as_secs_f64())?;
            let (mut shared_pages, mut frames) = (0, HashSet::new());
            for ready in guests.iter_mut().filter_map(|guest| guest.ready.as_mut()) {
                ready.scan(&host, &mut frames)?;
                shared_pages += ready.shared_pages;
            }
            run.samples.push(LargeGuestsSample {
                seconds: start.elapsed().as_secs_f64(),
                shared_pages,
                saved_pages: shared_pages.saturating_sub(frames.len() as u64),
                cpu: driver.read_cpu_seconds()?,
            });
        }
        driver.stop()?;
        Ok(run)
    }
}

fn format_seconds(seconds: Option<f64>) -> String {
    seconds.map_or_else(|| "never".to_owned(), |seconds| format!("{seconds:.1}"))
}

/// The results of all drivers, side by side.
pub fn build_findings(benchmark: &LargeGuestsBenchmark, runs: &[LargeGuestsRun]) -> Findings {
    let mut findings = Findings::new("way,seconds,shared_pages,saved_pages,ksmd_seconds,driver_seconds");
    let GuestShape { mib, shared_mib, unique_mib } = benchmark.shape;
    let title = format!(
        "{} guests of {mib} MiB, each with {shared_mib} MiB of files of a common image in its page cache and \
         {unique_mib} MiB of its own",
        benchmark.guests
    );
    let head =
        ["driver", "shareable MiB", "90 % after s", "ksmd alone at the bound s", "saved MiB", "ksmd s", "driver s"];
    let mut table = MarkdownTable::new(title, &head);
    let mib_of = |pages: u64| format!("{}", (pages * pagefold_sys::mapping::page_size() as u64) >> 20);
    for run in runs {
        let last = run.samples.last();
        let cpu = last.map(|last| last.cpu).unwrap_or_default();
        table.rows.push(vec![
            run.driver_kind.name().to_owned(),
            mib_of(run.shareable_pages),
            format_seconds(run.merged().map(|sample| sample.seconds)),
            format_seconds(run.ksmd_seconds_at_bound()),
            mib_of(last.map_or(0, |last| last.saved_pages)),
            format!("{:.2}", cpu.ksmd),
            format!("{:.2}", cpu.driver),
        ]);
        for sample in &run.samples {
            findings.samples.push(format!(
                "{},{:.3},{},{},{:.4},{:.4}",
                run.driver_kind.name(),
                sample.seconds,
                sample.shared_pages,
                sample.saved_pages,
                sample.cpu.ksmd,
                sample.cpu.driver
            ));
        }
    }
    table.notes.push(format!(
        "After: seconds from the driver's start, when all guests were ready, until nine tenths of their shareable pages \
         were merged, by page tables; at most {} s. A cryptographic hash of every page counts the shareable pages. ksmd \
         alone: the CPU time that ksmd used until then, at {:.0} % of one CPU with a burst of {CPU_BURST_SECONDS} s. \
         Policies run without this bound, on guests of which QEMU's whole process is enrolled.",
        benchmark.timeout.as_secs(),
        CPU_RATE * 100.0
    ));
    findings.tables.push(table);
    if let Some(run) = runs.iter().find(|run| run.driver_kind == KsmDriverKind::Daemon) {
        let times = run.merged().map(|sample| sample.seconds).zip(run.ksmd_seconds_at_bound());
        findings.checks.push(ThresholdCheck {
            claim: format!(
                "90 % of the savings within {MAX_TIME_FACTOR} times the time that ksmd alone needs at the CPU bound"
            ),
            measured: times.map_or_else(|| "never".to_owned(), |(daemon, ksmd)| format!("{:.2} times", daemon / ksmd)),
            met: times.is_some_and(|(daemon, ksmd)| daemon <= MAX_TIME_FACTOR * ksmd),
        });
        findings.checks.push(ThresholdCheck {
            claim: "the CPU bound holds in every window".to_owned(),
            measured: format!("{:.2} s beyond it at most", run.max_excess_seconds()),
            met: run.max_excess_seconds() <= CPU_BOUND_TOLERANCE_SECONDS,
        });
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_of(samples: &[(f64, u64, f64, f64)]) -> LargeGuestsRun {
        let sample = |&(seconds, shared_pages, ksmd, driver)| LargeGuestsSample {
            seconds,
            shared_pages,
            saved_pages: 0,
            cpu: DriverCpuSeconds { ksmd, driver },
        };
        LargeGuestsRun {
            driver_kind: KsmDriverKind::Daemon,
            shareable_pages: 100,
            samples: samples.iter().map(sample).collect(),
        }
    }

    #[test]
    fn time_of_ksmd_alone_follows_the_bound() {
        let run = run_of(&[(10.0, 50, 5.0, 1.0), (40.0, 90, 20.0, 2.0), (50.0, 99, 25.0, 2.0)]);
        assert_eq!(run.merged().map(|sample| sample.seconds), Some(40.0));
        assert_eq!(run.ksmd_seconds_at_bound(), Some(20.0), "the burst pays for all of it, at one CPU");
        assert_eq!(run_of(&[(500.0, 90, 40.0, 0.0)]).ksmd_seconds_at_bound(), Some(100.0));
        assert_eq!(run_of(&[(500.0, 89, 40.0, 0.0)]).ksmd_seconds_at_bound(), None);
    }

    #[test]
    fn excess_is_found_in_any_window() {
        assert_eq!(run_of(&[(10.0, 0, 31.0, 0.0)]).max_excess_seconds(), 0.0);
        assert_eq!(run_of(&[(10.0, 0, 30.0, 3.0)]).max_excess_seconds(), 2.0);
        // The burst is full again after 300 s without work, and no fuller than that.
        let idle = run_of(&[(1000.0, 0, 0.0, 0.0), (1010.0, 0, 33.0, 0.0)]);
        assert_eq!(idle.max_excess_seconds(), 2.0);
    }
}
