//! One policy on one workload, from fresh processes to the truth about what came of it.

use super::policies::{Pagefold, Policy, pause};
use super::probe::Probe;
use super::readings::{Counters, Exact, Sample, cpu_seconds, ksmd};
use super::workloads::{Truth, Workload};
use anyhow::{Context, Result, anyhow, ensure};
use pagefold_labs::ksm::Ksm;
use pagefold_model::policy::Observation;
use rustix::process::{Pid, WaitId, WaitIdOptions};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::process::Child;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Between two samples, while nobody wants the benchmark to end.
const TICK: Duration = Duration::from_millis(25);

/// Nothing is given longer.
const LIMIT: Duration = Duration::from_secs(180);

/// Batches of a bounded ksmd: short, so that it keeps to the bound within a tenth of a second.
const BOUNDED_BATCH: u64 = 2000;

/// How trials are made.
#[derive(Debug)]
pub struct Conditions {
    /// How pagefold is called.
    pub pagefold: Pagefold,
    /// What a slow policy is given.
    pub window: Duration,
    /// The bound on CPU, in percent of one, for pagefold and for whole-process merging.
    pub cpu: u32,
    /// What policies go by.
    pub host: Observation,
}

/// What came of it.
#[derive(Clone, Debug)]
pub struct Trial {
    /// The policy.
    pub policy: Policy,
    /// From 1.
    pub round: usize,
    /// Every look while it went on.
    pub samples: Vec<Sample>,
    /// Bytes saved, by the page tables.
    pub exact: i64,
    /// Bytes saved, by the counters at the same moment.
    pub counted: i64,
    /// What is known.
    pub truth: Option<Truth>,
    /// Before.
    pub before: Exact,
    /// After.
    pub after: Exact,
    /// The probe's, if it ran beside.
    pub slow_down: Option<f64>,
}

impl Trial {
    /// Bytes saved less ksmd's metadata.
    pub fn net(&self) -> f64 {
        (self.exact - (self.after.rmap_items - self.before.rmap_items) * 64) as f64
    }

    /// The last look.
    pub fn last(&self) -> Sample {
        self.samples.last().copied().expect("a trial has samples")
    }

    /// The first look at which so many bytes were saved.
    pub fn reached(&self, bytes: f64) -> Option<Sample> {
        let page = pagefold_sys::mapping::page_size() as f64;
        self.samples.iter().find(|sample| sample.saved as f64 * page >= bytes).copied()
    }

    /// The share of huge pages that are left; nothing where there were none.
    pub fn huge_kept(&self) -> Option<f64> {
        (self.before.huge > 0).then(|| self.after.huge as f64 / self.before.huge as f64)
    }
}

/// Make one. KSM is held throughout and put back.
pub fn run(workload: &Workload, policy: Policy, round: usize, probed: bool, conditions: &Conditions) -> Result<Trial> {
    let ksm = Ksm::take().map_err(anyhow::Error::msg)?;
    let ksmd = ksmd()?;
    forget(&ksm, ksmd)?;
    let mut running = workload.start(policy.enrols())?;
    let checks = running.checks()?;
    let probe = probed.then(|| Probe::start(Duration::from_secs(2))).transpose()?;
    let before = Exact::read(&running.pids)?;
    policy.prepare(&ksm, &conditions.host).map_err(|why| anyhow!("settings of {}: {why}", policy.name()))?;
    let watch = Watch { ksm: &ksm, ksmd, before: Counters::read(ksmd)?, begin: Instant::now() };
    let samples = match policy {
        Policy::Guided => {
            let command = &mut conditions.pagefold.merge(&running.pids, conditions.cpu);
            watch.pagefold(command.spawn().with_context(|| format!("cannot start {command:?}"))?)?
        }
        Policy::Whole => watch.whole(running.truth, f64::from(conditions.cpu) / 100.0)?,
        _ => watch.window(conditions.window)?,
    };
    let end = Instant::now();
    let slow_down = probe.as_ref().map(|probe| probe.slow_down(watch.begin, end)).transpose()?;
    drop(probe);
    // Frozen: what is read now holds.
    ksm.set("run", 0);
    let counted = Counters::read(ksmd)?.saved - watch.before.saved;
    let after = Exact::read(&running.pids)?;
    ensure!(
        running.checks()? == checks,
        "{} under {}: its own check fails after merging",
        workload.name,
        policy.name()
    );
    let page = pagefold_sys::mapping::page_size() as i64;
    Ok(Trial {
        policy,
        round,
        samples,
        exact: before.resident - after.resident,
        counted: counted * page,
        truth: running.truth,
        before,
        after,
        slow_down,
    })
}

/// Wait a moment. Fails when a signal has asked the benchmark to end, so that everything is put back on the way out.
///
/// # Errors
/// When interrupted.
pub fn pause_for(moment: Duration) -> Result<()> {
    sleep(moment);
    let signal = SIGNAL.load(Ordering::Relaxed);
    ensure!(signal == 0, "interrupted by signal {signal}");
    Ok(())
}

/// The signal that asked the benchmark to end, or 0.
static SIGNAL: AtomicUsize = AtomicUsize::new(0);

/// Note signals that would end the benchmark at once, for [`pause_for`].
pub fn note_signals() -> Result<()> {
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM]).context("cannot note signals")?;
    std::thread::spawn(move || {
        for signal in signals.forever() {
            SIGNAL.store(signal.unsigned_abs() as usize, Ordering::Relaxed);
        }
    });
    Ok(())
}

/// Let ksmd forget the processes that have ended: until it comes by they still count.
pub fn forget(ksm: &Ksm, ksmd: u32) -> Result<()> {
    ksm.set("advisor_mode", "none");
    ksm.set("pages_to_scan", 20_000);
    ksm.set("sleep_millisecs", 0);
    ksm.set("run", 1);
    let (begin, mut last, mut since) = (Instant::now(), Counters::default(), Instant::now());
    // With nothing left to scan it sleeps and no scan is counted; so what is waited for is that counters stand still.
    while since.elapsed() < Duration::from_millis(300) && begin.elapsed() < Duration::from_secs(20) {
        pause_for(TICK)?;
        let now = Counters::read(ksmd)?;
        if now.saved != last.saved {
            (last, since) = (now, Instant::now());
        }
    }
    ksm.set("run", 0);
    Ok(())
}

struct Watch<'a> {
    ksm: &'a Ksm,
    ksmd: u32,
    before: Counters,
    begin: Instant,
}

impl Watch<'_> {
    fn look(&self, pagefold: f64) -> Result<(Sample, Counters)> {
        let now = Counters::read(self.ksmd)?;
        let sample = Sample {
            seconds: self.begin.elapsed().as_secs_f64(),
            saved: now.saved - self.before.saved,
            ksmd: now.ksmd - self.before.ksmd,
            pagefold,
            scanned: now.scanned - self.before.scanned,
            full_scans: now.full_scans - self.before.full_scans,
            pages_to_scan: now.pages_to_scan,
        };
        Ok((sample, now))
    }

    /// A slow policy for as long as it is given.
    fn window(&self, window: Duration) -> Result<Vec<Sample>> {
        self.ksm.set("run", 1);
        let mut samples = Vec::new();
        while self.begin.elapsed() < window {
            samples.push(self.look(0.0)?.0);
            pause_for(TICK)?;
        }
        samples.push(self.look(0.0)?.0);
        Ok(samples)
    }

    /// Everything enrolled, until what can be saved is, or nothing has come in three full scans.
    fn whole(&self, truth: Option<Truth>, share: f64) -> Result<Vec<Sample>> {
        if share < 1.0 {
            self.ksm.set("pages_to_scan", BOUNDED_BATCH);
        }
        self.ksm.set("run", 1);
        let mut samples = Vec::new();
        let (mut most, mut scans) = (0, self.before.full_scans);
        let mut paced = self.before;
        loop {
            pause_for(TICK)?;
            let (sample, now) = self.look(0.0)?;
            samples.push(sample);
            if truth.is_some_and(|truth| sample.saved as f64 >= 0.998 * truth.redundant as f64) {
                return Ok(samples);
            }
            // Less than a hundredth more is not progress: a guest that runs always has something.
            if sample.saved as f64 > most as f64 * 1.01 {
                (most, scans) = (sample.saved, now.full_scans);
            }
            ensure!(self.begin.elapsed() < LIMIT, "ksmd did not come to an end within {LIMIT:?}");
            if now.full_scans >= scans + 3 && now.full_scans >= self.before.full_scans + 4 {
                return Ok(samples);
            }
            if share < 1.0 && now.scanned - paced.scanned >= 5 * BOUNDED_BATCH as i64 {
                let batches = (now.scanned - paced.scanned) as f64 / BOUNDED_BATCH as f64;
                self.ksm.set("sleep_millisecs", pause((now.ksmd - paced.ksmd) / batches, share));
                paced = now;
            }
        }
    }

    /// pagefold, until it has ended.
    fn pagefold(&self, mut child: Child) -> Result<Vec<Sample>> {
        let mut samples = Vec::new();
        let pid = child.id();
        while !has_ended(pid)? {
            samples.push(self.look(cpu_seconds(pid)?)?.0);
            let in_time = if self.begin.elapsed() > LIMIT {
                Err(anyhow!("pagefold merge did not end within {LIMIT:?}"))
            } else {
                pause_for(TICK)
            };
            if in_time.is_err() {
                // It puts back what it changed when it is asked to end.
                let _ = rustix::process::kill_process(Pid::from_child(&child), rustix::process::Signal::TERM);
                let _ = child.wait();
                in_time?;
            }
        }
        // Not waited for yet: its times can still be read.
        samples.push(self.look(cpu_seconds(pid)?)?.0);
        let status = child.wait()?;
        // 1: the result is not what it predicted; 3: something was not seen. Both are results, and are measured.
        ensure!(matches!(status.code(), Some(0 | 1 | 3)), "pagefold merge failed: {status}");
        Ok(samples)
    }
}

/// Whether a child has ended, without waiting for it.
pub fn has_ended(pid: u32) -> Result<bool> {
    let pid = Pid::from_raw(pid.cast_signed()).context("no process")?;
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    Ok(rustix::process::waitid(WaitId::Pid(pid), options)?.is_some())
}
