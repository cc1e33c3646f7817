//! Guests that come and go: how soon a new guest is merged, what that saves over time, and at what cost.
//!
//! All drivers have the same memory to merge: for the policies, QEMU's whole process is enrolled from its start. Pages
//! merged before READY count from READY on; [`guest`] describes how they are told apart from pages that were never
//! written.

use super::driver::{DriverCpuSeconds, KsmDriver, KsmDriverKind};
use super::guest::{self, ChurnGuest, GUEST_NAME_PREFIX, GuestShape, ReadyGuest};
use crate::findings::{Findings, MarkdownTable, ThresholdCheck};
use crate::merge::trial::sleep_unless_signaled;
use anyhow::Result;
use pagefold_labs::ksm::KsmTestGuard;
use pagefold_linux::LiveHost;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Target: 90 % of the shareable pages of a new guest are merged within this time after READY, for 90 % of the guests.
/// Seconds.
const MAX_MERGE_SECONDS: f64 = 10.0;

/// Target: the average CPU share of one core, ksmd and driver included.
const MAX_CPU_SHARE: f64 = 0.1;

/// The period of the loop.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The period of scans of guests that are not merged yet, and of scans of all guests.
const UNMERGED_SCAN_INTERVAL: Duration = Duration::from_millis(400);
const FULL_SCAN_INTERVAL: Duration = Duration::from_secs(2);

/// The guests that come and go.
#[derive(Clone, Debug)]
pub struct ChurnBenchmark {
    /// Duration of the run.
    pub duration: Duration,
    /// A guest starts at this interval,
    pub arrival_interval: Duration,
    /// and runs for this time.
    pub guest_lifetime: Duration,
    /// Memory of each guest, in MiB.
    pub mib: u32,
    /// The pagefold binary.
    pub pagefold: PathBuf,
}

/// A sample over all guests.
#[derive(Clone, Copy, Debug)]
pub struct ChurnSample {
    /// Seconds since the start of the run.
    pub seconds: f64,
    /// Guests that are ready.
    pub guests: usize,
    /// Pages saved in these guests.
    pub saved_pages: u64,
    /// CPU time used so far.
    pub cpu: DriverCpuSeconds,
}

/// The record of a guest.
#[derive(Clone, Debug)]
pub struct GuestRecord {
    /// When the guest was started, in seconds since the start of the run.
    pub arrived_seconds: f64,
    /// Seconds until the guest was ready.
    pub boot_seconds: f64,
    /// Pages that it could share when it was ready.
    pub shareable_pages: u64,
    /// Pages that it shared at the end.
    pub shared_pages: u64,
    /// Seconds for which it was sampled after it was ready.
    pub watched_seconds: f64,
    /// Seconds until nine tenths of its shareable pages were merged.
    pub merged_seconds: Option<f64>,
}

/// The result of a driver.
#[derive(Clone, Debug)]
pub struct ChurnRun {
    /// The driver.
    pub driver_kind: KsmDriverKind,
    /// Pages that a guest never wrote when it is ready, measured on a reference guest.
    pub unwritten_pages: u64,
    /// Samples over all guests.
    pub samples: Vec<ChurnSample>,
    /// The guests, in the order in which they started.
    pub guests: Vec<GuestRecord>,
}

impl ChurnRun {
    /// Seconds until nine tenths were merged, ascending, of guests that were sampled for long enough. Infinite for
    /// guests that were never merged.
    fn merge_times(&self) -> Vec<f64> {
        let is_known =
            |guest: &&GuestRecord| guest.merged_seconds.is_some() || guest.watched_seconds >= MAX_MERGE_SECONDS;
        let mut seconds: Vec<f64> =
            self.guests.iter().filter(is_known).map(|guest| guest.merged_seconds.unwrap_or(f64::INFINITY)).collect();
        seconds.sort_by(f64::total_cmp);
        seconds
    }

    /// Seconds within which this share of the guests was merged: the nearest rank.
    pub fn merge_time_quantile(&self, share: f64) -> Option<f64> {
        let seconds = self.merge_times();
        seconds.get(((share * seconds.len() as f64).ceil() as usize).max(1) - 1).copied()
    }

    /// The average share of one core.
    pub fn mean_cpu_share(&self) -> f64 {
        self.samples.last().map_or(0.0, |last| last.cpu.total() / last.seconds)
    }

    /// The integral of the saved bytes over time, in byte-seconds.
    pub fn saved_byte_seconds(&self) -> f64 {
        let page = pagefold_sys::mapping::page_size() as f64;
        let between = |pair: &[ChurnSample]| {
            (pair[1].seconds - pair[0].seconds) * (pair[0].saved_pages + pair[1].saved_pages) as f64 / 2.0 * page
        };
        self.samples.windows(2).map(between).sum()
    }
}

/// The configuration of the daemon: only the guests of this benchmark, in one trust domain, at the default CPU bounds.
fn daemon_config() -> String {
    format!(
        "[[domain]]\nname = \"churn\"\nusers = [0]\nvms = [\"{GUEST_NAME_PREFIX}-*\"]\n[daemon.tracked]\n\
         vms = [\"{GUEST_NAME_PREFIX}-*\"]\n"
    )
}

impl ChurnBenchmark {
    /// Run the guests under a driver. It reserves KSM meanwhile.
    pub fn run(&self, driver_kind: KsmDriverKind, log: &Path) -> Result<ChurnRun> {
        let ksm = KsmTestGuard::acquire().map_err(anyhow::Error::msg)?;
        // The reference guest has ended before a driver starts or the clock runs.
        ksm.write_setting("run", 0);
        let unwritten = guest::measure_unwritten_pages(GuestShape::small(self.mib), driver_kind.enrolls_whole_qemu())?;
        let mut driver = match driver_kind {
            KsmDriverKind::Policy(policy) => KsmDriver::start_policy(policy, &ksm)?,
            KsmDriverKind::Daemon => KsmDriver::start_daemon(&self.pagefold, &daemon_config(), log, &ksm)?,
        };
        let mut run = ChurnRun { driver_kind, unwritten_pages: unwritten, samples: Vec::new(), guests: Vec::new() };
        let (guests, ending_guests) = (Vec::new(), Vec::new());
        let mut population = GuestPopulation {
            host: LiveHost::new(),
            started_at: Instant::now(),
            unwritten_pages: unwritten,
            guests,
            ending_guests,
        };
        let (mut last_scan, mut last_full_scan, mut started_guests) = (Duration::ZERO, Duration::ZERO, 0);
        loop {
            let elapsed = population.started_at.elapsed();
            if elapsed >= self.duration {
                break;
            }
            if elapsed >= self.arrival_interval * started_guests {
                population.guests.push(ChurnGuest::start(
                    started_guests as usize,
                    GuestShape::small(self.mib),
                    driver_kind.enrolls_whole_qemu(),
                )?);
                started_guests += 1;
            }
            population.end_due_guests(&mut run, |guest| guest.started_at.elapsed() >= self.guest_lifetime);
            population.count_ready_guests()?;
            driver.poll(elapsed.as_secs_f64())?;
            if elapsed >= last_full_scan + FULL_SCAN_INTERVAL {
                let (guests, saved) = population.scan_all()?;
                let seconds = population.started_at.elapsed().as_secs_f64();
                run.samples.push(ChurnSample { seconds, guests, saved_pages: saved, cpu: driver.read_cpu_seconds()? });
                (last_full_scan, last_scan) = (elapsed, elapsed);
            } else if elapsed >= last_scan + UNMERGED_SCAN_INTERVAL {
                population.scan_unmerged()?;
                last_scan = elapsed;
            }
            sleep_unless_signaled(POLL_INTERVAL)?;
        }
        population.end_due_guests(&mut run, |_| true);
        driver.stop()?;
        population.ending_guests.into_iter().for_each(|thread| drop(thread.join()));
        run.guests.sort_by(|left, right| left.arrived_seconds.total_cmp(&right.arrived_seconds));
        Ok(run)
    }
}

/// The guests that are running.
struct GuestPopulation {
    host: LiveHost,
    started_at: Instant,
    unwritten_pages: u64,
    guests: Vec<ChurnGuest>,
    ending_guests: Vec<JoinHandle<()>>,
}

impl GuestPopulation {
    /// Count what guests can share that have become ready.
    fn count_ready_guests(&mut self) -> Result<()> {
        for position in 0..self.guests.len() {
            let Some(ready) = self.guests[position].poll_ready()? else { continue };
            let (guests_before, rest) = self.guests.split_at_mut(position);
            let Some((guest, guests_after)) = rest.split_first_mut() else { continue };
            let others: Vec<&ReadyGuest> =
                guests_before.iter().chain(guests_after.iter()).filter_map(|guest| guest.ready.as_ref()).collect();
            guest.count_shareable_with(ready, &others, self.unwritten_pages)?;
        }
        Ok(())
    }

    /// Scan the guests that are not merged yet.
    fn scan_unmerged(&mut self) -> Result<()> {
        let ready_guests = self.guests.iter_mut().filter_map(|guest| guest.ready.as_mut());
        ready_guests
            .filter(|ready| ready.nine_tenths_merged_at.is_none())
            .try_for_each(|ready| ready.scan(&self.host, &mut HashSet::new()))
    }

    /// Scan all guests: the number of ready guests, and the pages that they save.
    fn scan_all(&mut self) -> Result<(usize, u64)> {
        let (mut count, mut shared, mut frames) = (0, 0, HashSet::new());
        for ready in self.guests.iter_mut().filter_map(|guest| guest.ready.as_mut()) {
            ready.scan(&self.host, &mut frames)?;
            count += 1;
            shared += ready.shared_pages;
        }
        Ok((count, shared.saturating_sub(frames.len() as u64)))
    }

    /// End the guests that are due.
    fn end_due_guests(&mut self, run: &mut ChurnRun, is_due: impl Fn(&ChurnGuest) -> bool) {
        for guest in self.guests.extract_if(.., |guest| is_due(guest)) {
            if let Some(ready) = &guest.ready {
                run.guests.push(GuestRecord {
                    arrived_seconds: (guest.started_at - self.started_at).as_secs_f64(),
                    boot_seconds: (ready.ready_at - guest.started_at).as_secs_f64(),
                    shareable_pages: ready.shareable_pages,
                    shared_pages: ready.shared_pages,
                    watched_seconds: ready.ready_at.elapsed().as_secs_f64(),
                    merged_seconds: ready.merge_seconds(),
                });
            }
            // Freeing the guest's memory takes a while.
            self.ending_guests.push(std::thread::spawn(move || drop(guest)));
        }
    }
}

fn format_seconds(seconds: Option<f64>) -> String {
    match seconds {
        Some(seconds) if seconds.is_finite() => format!("{seconds:.1}"),
        Some(_) => "never".to_owned(),
        None => "-".to_owned(),
    }
}

/// The results of all drivers, side by side.
pub fn build_findings(churn: &ChurnBenchmark, runs: &[ChurnRun]) -> Findings {
    let mut findings = Findings::new("way,seconds,guests,saved_pages,ksmd_seconds,driver_seconds");
    let (interval, lifetime) = (churn.arrival_interval.as_secs(), churn.guest_lifetime.as_secs());
    let title = format!(
        "A guest of {} MiB comes every {interval} s and lives for {lifetime} s, for {} s",
        churn.mib,
        churn.duration.as_secs()
    );
    let head =
        ["driver", "guests", "90 % after s", "p90", "saved GiB s", "MiB on average", "CPU %", "ksmd s", "driver s"];
    let mut table = MarkdownTable::new(title, &head);
    for run in runs {
        let last = run.samples.last().copied();
        let (length, cpu) = last.map_or((1.0, DriverCpuSeconds::default()), |last| (last.seconds, last.cpu));
        table.rows.push(vec![
            run.driver_kind.name().to_owned(),
            run.guests.len().to_string(),
            format_seconds(run.merge_time_quantile(0.5)),
            format_seconds(run.merge_time_quantile(0.9)),
            format!("{:.1}", run.saved_byte_seconds() / f64::from(1 << 30)),
            format!("{:.0}", run.saved_byte_seconds() / length / f64::from(1 << 20)),
            format!("{:.1}", run.mean_cpu_share() * 100.0),
            format!("{:.2}", cpu.ksmd),
            format!("{:.2}", cpu.driver),
        ]);
        for sample in &run.samples {
            findings.samples.push(format!(
                "{},{:.3},{},{},{:.4},{:.4}",
                run.driver_kind.name(),
                sample.seconds,
                sample.guests,
                sample.saved_pages,
                sample.cpu.ksmd,
                sample.cpu.driver
            ));
        }
    }
    table.notes.push(
        "90 % after: seconds from READY until nine tenths of what the guest could share then were merged, by page \
         tables; the median and the 90th percentile. A cryptographic hash of every page counts the shareable pages. \
         CPU: ksmd and its driver, of one core on average. Policies run at no CPU cost, on guests of which \
         QEMU's whole process is enrolled, and ksmtuned as if memory were short."
            .to_owned(),
    );
    let unwritten: Vec<String> =
        runs.iter().map(|run| format!("{} ({})", run.unwritten_pages, run.driver_kind.name())).collect();
    table.notes.push(format!(
        "Pages never written when READY, measured on a reference guest that boots with KSM off before each driver; \
         they count as neither shareable nor shared in any guest of that driver: {}.",
        unwritten.join(", ")
    ));
    findings.tables.push(table);
    if let Some(run) = runs.iter().find(|run| run.driver_kind == KsmDriverKind::Daemon) {
        let p90 = run.merge_time_quantile(0.9);
        findings.checks.push(ThresholdCheck {
            claim: format!(
                "90 % of a new guest's shareable pages are merged within {MAX_MERGE_SECONDS} s of READY, at p90"
            ),
            measured: format!("{} s", format_seconds(p90)),
            met: p90.is_some_and(|p90| p90 <= MAX_MERGE_SECONDS),
        });
        findings.checks.push(ThresholdCheck {
            claim: format!("at most {:.0} % of one core on average, ksmd and driver included", MAX_CPU_SHARE * 100.0),
            measured: format!("{:.1} %", run.mean_cpu_share() * 100.0),
            met: run.mean_cpu_share() <= MAX_CPU_SHARE,
        });
    }
    findings
}

/// All guests, as CSV.
pub fn guests_csv(runs: &[ChurnRun]) -> String {
    let mut text =
        "way,arrived_seconds,boot_seconds,shareable_pages,shared_pages,watched_seconds,merged_after_seconds\n"
            .to_owned();
    for run in runs {
        for fate in &run.guests {
            let merged = fate.merged_seconds.map(|seconds| format!("{seconds:.2}")).unwrap_or_default();
            text.push_str(&format!(
                "{},{:.2},{:.2},{},{},{:.2},{merged}\n",
                run.driver_kind.name(),
                fate.arrived_seconds,
                fate.boot_seconds,
                fate.shareable_pages,
                fate.shared_pages,
                fate.watched_seconds
            ));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_with_merge_times(merged: &[Option<f64>]) -> ChurnRun {
        let fate = |&merged| GuestRecord {
            arrived_seconds: 0.0,
            boot_seconds: 9.0,
            shareable_pages: 10,
            shared_pages: 9,
            watched_seconds: 60.0,
            merged_seconds: merged,
        };
        let sample = |seconds: f64, saved| ChurnSample {
            seconds,
            guests: 1,
            saved_pages: saved,
            cpu: DriverCpuSeconds { ksmd: seconds / 20.0, driver: 0.0 },
        };
        let samples = vec![sample(0.0, 0), sample(10.0, 100), sample(20.0, 100)];
        ChurnRun {
            driver_kind: KsmDriverKind::Daemon,
            unwritten_pages: 0,
            samples,
            guests: merged.iter().map(fate).collect(),
        }
    }

    #[test]
    fn ninth_of_ten_decides() {
        let seconds: Vec<Option<f64>> = (1..=10).map(|seconds| Some(f64::from(seconds))).collect();
        assert_eq!(
            (
                run_with_merge_times(&seconds).merge_time_quantile(0.9),
                run_with_merge_times(&seconds).merge_time_quantile(0.5)
            ),
            (Some(9.0), Some(5.0))
        );
        assert_eq!(run_with_merge_times(&[Some(1.0), None]).merge_time_quantile(0.9), Some(f64::INFINITY));
        assert_eq!(run_with_merge_times(&[]).merge_time_quantile(0.9), None);
    }

    #[test]
    fn briefly_watched_guest_is_ignored() {
        let mut short = run_with_merge_times(&[Some(1.0), None]);
        short.guests[1].watched_seconds = MAX_MERGE_SECONDS / 2.0;
        assert_eq!(short.merge_time_quantile(0.9), Some(1.0));
    }

    #[test]
    fn byte_seconds_integrate_savings_over_time() {
        let page = pagefold_sys::mapping::page_size() as f64;
        assert_eq!(run_with_merge_times(&[]).saved_byte_seconds(), (500.0 + 1000.0) * page);
        assert!((run_with_merge_times(&[]).mean_cpu_share() - 0.05).abs() < 1e-9);
    }
}
