//! A trial: one policy on one workload, from fresh processes to the exact result.

use super::command_reports::MergeCommandReport;
use super::mergeable_pages::MergeablePages;
use super::policies::{MergePolicy, PagefoldProgram, PolicySchedule, pause_millis};
use super::readings::{ExactMemory, KsmCounters, KsmSample, cpu_seconds, ksmd_pid, resident_anonymous};
use super::slowdown_probe::SlowdownProbe;
use super::workloads::{MergeWorkload, RunningWorkload, SavingsGauge};
use anyhow::{Context, Result, anyhow, ensure};
use pagefold_labs::ksm::KsmTestGuard;
use pagefold_merge::decide::policy::HostObservation;
use rustix::process::{Pid, WaitId, WaitIdOptions};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::{Read, Seek};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The interval between two samples.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(25);

/// The interval where a sample walks page tables: the walk takes 12 ms of a CPU for 8 guests, so a twentieth of one
/// CPU.
const PAGE_TABLE_SAMPLE_INTERVAL: Duration = Duration::from_millis(250);

/// The time limit of every trial.
const TRIAL_TIMEOUT: Duration = Duration::from_secs(180);

/// The batch size of ksmd under a CPU bound: short, so that ksmd keeps the bound within a tenth of a second.
const BOUNDED_BATCH_PAGES: u64 = 2000;

/// The conditions of trials.
#[derive(Debug)]
pub struct TrialConditions {
    /// The pagefold binary.
    pub pagefold: PagefoldProgram,
    /// Whether the run is a quick one.
    pub quick: bool,
    /// The bound on CPU, in percent of one, for pagefold and for whole-process merging.
    pub cpu_percent: u32,
    /// The host facts that policies depend on.
    pub host: HostObservation,
}

/// The result of a trial.
#[derive(Clone, Debug)]
pub struct PolicyTrial {
    /// The policy.
    pub policy: MergePolicy,
    /// The round, counted from 1.
    pub round: usize,
    /// All samples during the trial.
    pub samples: Vec<KsmSample>,
    /// The maximum window, if the policy is slow.
    pub max_window: Duration,
    /// Whether merging ended by itself; otherwise the window of a slow policy ended before.
    pub is_complete: bool,
    /// The report of pagefold, for guided merging.
    pub report: Option<MergeCommandReport>,
    /// Bytes saved, by the page tables.
    pub exact_saved_bytes: i64,
    /// Bytes saved, by the counters at the same moment.
    pub counted_saved_bytes: i64,
    /// The possible savings.
    pub mergeable: MergeablePages,
    /// Exact figures before the policy began.
    pub memory_before: ExactMemory,
    /// Exact figures after it.
    pub memory_after: ExactMemory,
    /// The slow-down of the probe, if it ran.
    pub probe_slowdown: Option<f64>,
}

impl PolicyTrial {
    /// Bytes saved minus ksmd's metadata.
    pub fn net_bytes(&self) -> f64 {
        (self.exact_saved_bytes - (self.memory_after.rmap_items - self.memory_before.rmap_items) * 64) as f64
    }

    /// The reachable net savings: all possible savings minus the least metadata.
    pub fn reachable_net_bytes(&self) -> f64 {
        let page = pagefold_sys::mapping::page_size() as f64;
        self.mergeable.redundant_pages as f64 * page - self.mergeable.mapped_to_shared as f64 * 64.0
    }

    /// The last sample.
    pub fn last_sample(&self) -> KsmSample {
        self.samples.last().copied().expect("a trial has samples")
    }

    /// The first sample at which this many bytes were saved.
    pub fn first_sample_at(&self, bytes: f64) -> Option<KsmSample> {
        let page = pagefold_sys::mapping::page_size() as f64;
        self.samples.iter().find(|sample| sample.saved_pages as f64 * page >= bytes).copied()
    }

    /// The share of huge pages that remain; none if there were none.
    pub fn huge_pages_kept(&self) -> Option<f64> {
        (self.memory_before.huge_bytes > 0)
            .then(|| self.memory_after.huge_bytes as f64 / self.memory_before.huge_bytes as f64)
    }
}

/// Run a trial. It reserves KSM throughout and restores its settings.
pub fn run_trial(
    workload: &MergeWorkload,
    policy: MergePolicy,
    round: usize,
    probed: bool,
    conditions: &TrialConditions,
) -> Result<PolicyTrial> {
    let ksm = KsmTestGuard::acquire().map_err(anyhow::Error::msg)?;
    let ksmd = ksmd_pid()?;
    wait_until_ksmd_forgets(&ksm, ksmd)?;
    let mut running = workload.start(policy.enrolls_whole_process())?;
    let checks = running.read_checksums()?;
    let probe = probed.then(|| SlowdownProbe::start(Duration::from_secs(2))).transpose()?;
    let before = ExactMemory::read(&running.pids)?;
    let mut steps = policy.schedule(&conditions.host).map_err(|why| anyhow!("settings of {}: {why}", policy.name()))?;
    write_due_settings(&mut steps, &ksm, 0.0)?;
    let meter = TrialMeter::start(&ksm, ksmd, &running, workload.gauge())?;
    let progress = SavingsProgress::new(running.mergeable);
    let max_window = policy.max_window(probed, conditions.quick);
    let (mut is_complete, mut report) = (true, None);
    let samples = match policy {
        MergePolicy::Guided => {
            let (samples, merge_report) =
                meter.watch_pagefold(&mut conditions.pagefold.merge_command(&running.pids, conditions.cpu_percent))?;
            report = Some(merge_report);
            samples
        }
        MergePolicy::Whole => meter.watch_whole_process(progress, f64::from(conditions.cpu_percent) / 100.0)?,
        _ => {
            let samples;
            (samples, is_complete) = meter.watch_slow_policy(max_window, progress, &mut steps)?;
            samples
        }
    };
    let end = Instant::now();
    let slowdown = probe.as_ref().map(|probe| probe.slowdown(meter.started_at, end)).transpose()?;
    drop(probe);
    // ksmd is stopped, so that the figures read now are exact.
    ksm.write_setting("run", 0);
    let counted_pages = KsmCounters::read(ksmd)?.saved_pages - meter.counters_before.saved_pages;
    let after = ExactMemory::read(&running.pids)?;
    ensure!(
        running.read_checksums()? == checks,
        "{} under {}: its own check fails after merging",
        workload.name,
        policy.name()
    );
    let page = pagefold_sys::mapping::page_size() as i64;
    Ok(PolicyTrial {
        policy,
        round,
        samples,
        max_window,
        is_complete,
        report,
        exact_saved_bytes: before.resident_bytes - after.resident_bytes,
        counted_saved_bytes: counted_pages * page,
        mergeable: running.mergeable,
        memory_before: before,
        memory_after: after,
        probe_slowdown: slowdown,
    })
}

/// Sleep for a moment. Fails if a signal has asked the benchmark to end, so that all guards restore their state.
///
/// # Errors
/// When interrupted.
pub fn sleep_unless_signaled(moment: Duration) -> Result<()> {
    sleep(moment);
    let signal = RECEIVED_SIGNAL.load(Ordering::Relaxed);
    ensure!(signal == 0, "interrupted by signal {signal}");
    Ok(())
}

/// The signal that asked the benchmark to end, or 0.
static RECEIVED_SIGNAL: AtomicUsize = AtomicUsize::new(0);

/// Record the signals that would otherwise end the benchmark at once, for [`sleep_unless_signaled`].
pub fn install_signal_handlers() -> Result<()> {
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM]).context("cannot install signal handlers")?;
    std::thread::spawn(move || {
        for signal in signals.forever() {
            RECEIVED_SIGNAL.store(signal.unsigned_abs() as usize, Ordering::Relaxed);
        }
    });
    Ok(())
}

/// Wait until ksmd drops the processes that have ended: until its next scan its counters include them.
pub fn wait_until_ksmd_forgets(ksm: &KsmTestGuard, ksmd: u32) -> Result<()> {
    ksm.write_setting("advisor_mode", "none");
    ksm.write_setting("pages_to_scan", 20_000);
    ksm.write_setting("sleep_millisecs", 0);
    ksm.write_setting("run", 1);
    let (start, mut last, mut last_change) = (Instant::now(), KsmCounters::default(), Instant::now());
    // With nothing left to scan ksmd sleeps and counts no scan; therefore this waits until the counters no longer
    // change.
    while last_change.elapsed() < Duration::from_millis(300) && start.elapsed() < Duration::from_secs(20) {
        sleep_unless_signaled(SAMPLE_INTERVAL)?;
        let counters = KsmCounters::read(ksmd)?;
        if counters.saved_pages != last.saved_pages {
            (last, last_change) = (counters, Instant::now());
        }
    }
    ksm.write_setting("run", 0);
    Ok(())
}

pub(super) fn write_due_settings(steps: &mut PolicySchedule, ksm: &KsmTestGuard, seconds: f64) -> Result<()> {
    steps.write_due_settings(ksm, seconds).map_err(|why| anyhow!("a step of a policy: {why}"))
}

/// Full scans without progress after which none is expected: with `smart_scan` ksmd may skip a page in up to eight
/// consecutive scans (mm/ksm.c, `skip_age`, 6.18), and then needs two visits to merge it.
const MAX_SCANS_WITHOUT_PROGRESS: i64 = 10;

/// Detects when merging has come to its end.
struct SavingsProgress {
    mergeable: MergeablePages,
    /// Pages saved at the last progress.
    max_saved_pages: i64,
    /// Full scans at the last progress.
    scans_at_progress: i64,
}

impl SavingsProgress {
    fn new(mergeable: MergeablePages) -> Self {
        Self { mergeable, max_saved_pages: 0, scans_at_progress: 0 }
    }

    /// Whether all possible savings are reached, or [`MAX_SCANS_WITHOUT_PROGRESS`] full scans brought none.
    fn has_converged(&mut self, sample: &KsmSample) -> bool {
        if sample.saved_pages as f64 >= 0.998 * self.mergeable.redundant_pages as f64 {
            return true;
        }
        // Less than 1 % more is not progress: a running guest always has small changes.
        if sample.saved_pages as f64 > self.max_saved_pages as f64 * 1.01 {
            (self.max_saved_pages, self.scans_at_progress) = (sample.saved_pages, sample.full_scans);
        }
        sample.full_scans >= self.scans_at_progress + MAX_SCANS_WITHOUT_PROGRESS
    }
}

/// Takes the samples of a trial.
pub(super) struct TrialMeter<'a> {
    ksm: &'a KsmTestGuard,
    ksmd: u32,
    /// The processes and their memory before, where savings are read from their memory.
    memory_baseline: Option<(&'a [u32], i64)>,
    counters_before: KsmCounters,
    started_at: Instant,
}

impl<'a> TrialMeter<'a> {
    /// A meter of a trial that begins now, with ksmd stopped.
    pub(super) fn start(
        ksm: &'a KsmTestGuard,
        ksmd: u32,
        running: &'a RunningWorkload,
        gauge: SavingsGauge,
    ) -> Result<Self> {
        let memory_baseline = match gauge {
            SavingsGauge::Counters => None,
            SavingsGauge::Memory => Some((&*running.pids, resident_anonymous(&running.pids)?)),
        };
        let counters_before = KsmCounters::read(ksmd)?;
        Ok(Self { ksm, ksmd, memory_baseline, counters_before, started_at: Instant::now() })
    }

    fn take_sample(&self, pagefold: f64) -> Result<(KsmSample, KsmCounters)> {
        // This reading may wait for ksmd. Its savings were reached at the sample's time or before.
        let freed_pages = match self.memory_baseline {
            None => None,
            Some((pids, before)) => {
                Some((before - resident_anonymous(pids)?) / pagefold_sys::mapping::page_size() as i64)
            }
        };
        let counters = KsmCounters::read(self.ksmd)?;
        let sample = KsmSample {
            seconds: self.started_at.elapsed().as_secs_f64(),
            saved_pages: freed_pages.unwrap_or(counters.saved_pages - self.counters_before.saved_pages),
            ksmd_seconds: counters.ksmd_seconds - self.counters_before.ksmd_seconds,
            pagefold_seconds: pagefold,
            scanned_pages: counters.scanned_pages - self.counters_before.scanned_pages,
            full_scans: counters.full_scans - self.counters_before.full_scans,
            pages_to_scan: counters.pages_to_scan,
        };
        Ok((sample, counters))
    }

    fn sample_interval(&self) -> Duration {
        if self.memory_baseline.is_some() { PAGE_TABLE_SAMPLE_INTERVAL } else { SAMPLE_INTERVAL }
    }

    /// Let ksmd run for a time, with the steps of a policy.
    pub(super) fn watch_for(&self, time: Duration, steps: &mut PolicySchedule) -> Result<Vec<KsmSample>> {
        self.ksm.write_setting("run", 1);
        let mut samples = Vec::new();
        while self.started_at.elapsed() < time {
            write_due_settings(steps, self.ksm, self.started_at.elapsed().as_secs_f64())?;
            samples.push(self.take_sample(0.0)?.0);
            sleep_unless_signaled(self.sample_interval())?;
        }
        self.ksm.write_setting("run", 0);
        Ok(samples)
    }

    /// Watch a slow policy until its end or the end of its window. Returns whether it came to its end.
    fn watch_slow_policy(
        &self,
        window: Duration,
        mut progress: SavingsProgress,
        steps: &mut PolicySchedule,
    ) -> Result<(Vec<KsmSample>, bool)> {
        self.ksm.write_setting("run", 1);
        let mut samples = Vec::new();
        loop {
            write_due_settings(steps, self.ksm, self.started_at.elapsed().as_secs_f64())?;
            let (sample, _) = self.take_sample(0.0)?;
            samples.push(sample);
            let is_over = progress.has_converged(&sample);
            if is_over || self.started_at.elapsed() >= window {
                return Ok((samples, is_over));
            }
            sleep_unless_signaled(self.sample_interval())?;
        }
    }

    /// Merge whole processes, until no further savings come.
    fn watch_whole_process(&self, mut progress: SavingsProgress, cpu_share: f64) -> Result<Vec<KsmSample>> {
        if cpu_share < 1.0 {
            self.ksm.write_setting("pages_to_scan", BOUNDED_BATCH_PAGES);
        }
        self.ksm.write_setting("run", 1);
        let mut samples = Vec::new();
        let mut last_paced = self.counters_before;
        loop {
            sleep_unless_signaled(self.sample_interval())?;
            let (sample, counters) = self.take_sample(0.0)?;
            samples.push(sample);
            if progress.has_converged(&sample) {
                return Ok(samples);
            }
            ensure!(self.started_at.elapsed() < TRIAL_TIMEOUT, "ksmd did not come to an end within {TRIAL_TIMEOUT:?}");
            if cpu_share < 1.0 && counters.scanned_pages - last_paced.scanned_pages >= 5 * BOUNDED_BATCH_PAGES as i64 {
                let batches = (counters.scanned_pages - last_paced.scanned_pages) as f64 / BOUNDED_BATCH_PAGES as f64;
                self.ksm.write_setting(
                    "sleep_millisecs",
                    pause_millis((counters.ksmd_seconds - last_paced.ksmd_seconds) / batches, cpu_share),
                );
                last_paced = counters;
            }
        }
    }

    /// Run pagefold until it exits, and return its report.
    fn watch_pagefold(&self, command: &mut Command) -> Result<(Vec<KsmSample>, MergeCommandReport)> {
        // A file never blocks the writer; an unread pipe would.
        let mut output = tempfile::tempfile().context("cannot create a file for pagefold's report")?;
        command.stdout(output.try_clone()?);
        let mut child: Child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
        let mut samples = Vec::new();
        let pid = child.id();
        while !has_ended(pid)? {
            samples.push(self.take_sample(cpu_seconds(pid)?)?.0);
            let watch_result = if self.started_at.elapsed() > TRIAL_TIMEOUT {
                Err(anyhow!("pagefold merge did not end within {TRIAL_TIMEOUT:?}"))
            } else {
                sleep_unless_signaled(self.sample_interval())
            };
            if watch_result.is_err() {
                // On SIGTERM pagefold undoes its changes.
                let _ = rustix::process::kill_process(Pid::from_child(&child), rustix::process::Signal::TERM);
                let _ = child.wait();
                watch_result?;
            }
        }
        // Not waited for yet: its CPU times are still readable.
        samples.push(self.take_sample(cpu_seconds(pid)?)?.0);
        let status = child.wait()?;
        // 1: the result differs from the prediction; 3: some processes were not seen. Both are results, and are
        // measured.
        let exit = status.code().filter(|code| matches!(code, 0 | 1 | 3));
        let exit = exit.with_context(|| format!("pagefold merge failed: {status}"))?;
        let mut text = String::new();
        output.rewind()?;
        output.read_to_string(&mut text)?;
        Ok((samples, MergeCommandReport::parse(exit, &text)?))
    }
}

/// Whether a child has ended, without waiting for it.
pub fn has_ended(pid: u32) -> Result<bool> {
    let pid = Pid::from_raw(pid.cast_signed()).context("no process")?;
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    Ok(rustix::process::waitid(WaitId::Pid(pid), options)?.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn has_converged_after(progress: &mut SavingsProgress, looks: &[(i64, i64)]) -> Vec<bool> {
        let sample = |&(full_scans, saved): &(i64, i64)| KsmSample {
            seconds: 0.0,
            saved_pages: saved,
            ksmd_seconds: 0.0,
            pagefold_seconds: 0.0,
            scanned_pages: 0,
            full_scans,
            pages_to_scan: 100,
        };
        looks.iter().map(|look| progress.has_converged(&sample(look))).collect()
    }

    #[test]
    fn converges_when_nearly_all_known_pages_are_saved() {
        let mut progress = SavingsProgress::new(MergeablePages { redundant_pages: 1000, mapped_to_shared: 1500 });
        assert_eq!(has_converged_after(&mut progress, &[(0, 500), (2, 997), (2, 998)]), [false, false, true]);
    }

    #[test]
    fn converges_after_full_scans_without_progress() {
        let mut progress =
            SavingsProgress::new(MergeablePages { redundant_pages: 1_000_000, mapped_to_shared: 2_000_000 });
        assert_eq!(
            has_converged_after(
                &mut progress,
                &[(1, 0), (MAX_SCANS_WITHOUT_PROGRESS - 1, 0), (MAX_SCANS_WITHOUT_PROGRESS, 0)]
            ),
            [false, false, true]
        );
        let mut progress =
            SavingsProgress::new(MergeablePages { redundant_pages: 1_000_000, mapped_to_shared: 2_000_000 });
        // The second sample is 1 % more, which is no progress.
        let looks =
            [(5, 1000), (6, 1010), (MAX_SCANS_WITHOUT_PROGRESS + 4, 1010), (MAX_SCANS_WITHOUT_PROGRESS + 5, 1010)];
        assert_eq!(has_converged_after(&mut progress, &looks), [false, false, false, true]);
    }
}
