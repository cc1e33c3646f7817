//! One policy on one workload, from fresh processes to the truth about what came of it.

use super::policies::{Pagefold, Policy, Steps, pause};
use super::probe::Probe;
use super::readings::{Counters, Exact, Sample, cpu_seconds, ksmd, resident};
use super::reports::Report;
use super::truth::Truth;
use super::workloads::{Gauge, Workload};
use anyhow::{Context, Result, anyhow, ensure};
use pagefold_labs::ksm::Ksm;
use pagefold_merge::decide::policy::Observation;
use rustix::process::{Pid, WaitId, WaitIdOptions};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::{Read, Seek};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Between two samples, while nobody wants the benchmark to end.
const TICK: Duration = Duration::from_millis(25);

/// The same where a look walks through page tables: 12 ms of a CPU for a fleet of 8 guests, so a twentieth of one.
const SLOW_TICK: Duration = Duration::from_millis(250);

/// Nothing is given longer.
const LIMIT: Duration = Duration::from_secs(180);

/// Batches of a bounded ksmd: short, so that it keeps to the bound within a tenth of a second.
const BOUNDED_BATCH: u64 = 2000;

/// How trials are made.
#[derive(Debug)]
pub struct Conditions {
    /// How pagefold is called.
    pub pagefold: Pagefold,
    /// Whether it is to be over soon.
    pub quick: bool,
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
    /// What it was given at most, if its policy is slow.
    pub window: Duration,
    /// Whether it came to its end; otherwise the window of a slow policy was over before.
    pub complete: bool,
    /// What pagefold said, of guided merging.
    pub report: Option<Report>,
    /// Bytes saved, by the page tables.
    pub exact: i64,
    /// Bytes saved, by the counters at the same moment.
    pub counted: i64,
    /// What is known.
    pub truth: Truth,
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

    /// What is reachable of that: all that can be saved less the least metadata.
    pub fn reachable_net(&self) -> f64 {
        let page = pagefold_sys::mapping::page_size() as f64;
        self.truth.redundant as f64 * page - self.truth.merged as f64 * 64.0
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
    let mut steps = policy.steps(&conditions.host).map_err(|why| anyhow!("settings of {}: {why}", policy.name()))?;
    write_due(&mut steps, &ksm, 0.0)?;
    let memory = match workload.gauge() {
        Gauge::Counters => None,
        Gauge::Memory => Some((running.pids.as_slice(), before.resident)),
    };
    let watch = Watch { ksm: &ksm, ksmd, memory, before: Counters::read(ksmd)?, begin: Instant::now() };
    let progress = Progress::new(running.truth);
    let window = policy.window(probed, conditions.quick);
    let (mut complete, mut report) = (true, None);
    let samples = match policy {
        Policy::Guided => {
            let (samples, said) = watch.pagefold(&mut conditions.pagefold.merge(&running.pids, conditions.cpu))?;
            report = Some(said);
            samples
        }
        Policy::Whole => watch.whole(progress, f64::from(conditions.cpu) / 100.0)?,
        _ => {
            let samples;
            (samples, complete) = watch.window(window, progress, &mut steps)?;
            samples
        }
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
        window,
        complete,
        report,
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

fn write_due(steps: &mut Steps, ksm: &Ksm, seconds: f64) -> Result<()> {
    steps.write(ksm, seconds).map_err(|why| anyhow!("a step of a policy: {why}"))
}

/// Full scans without progress after which there is none to come: with `smart_scan` ksmd may leave a page out of eight
/// in a row (mm/ksm.c, `skip_age`, 6.18), and then looks at it twice before it merges it.
const QUIET: i64 = 10;

/// Whether merging that goes on by itself has come to its end.
struct Progress {
    truth: Truth,
    /// Pages saved when last there was progress.
    most: i64,
    /// Full scans then.
    scans: i64,
}

impl Progress {
    fn new(truth: Truth) -> Self {
        Self { truth, most: 0, scans: 0 }
    }

    /// What can be saved is, or nothing has come in [`QUIET`] full scans.
    fn is_over(&mut self, sample: &Sample) -> bool {
        if sample.saved as f64 >= 0.998 * self.truth.redundant as f64 {
            return true;
        }
        // Less than a hundredth more is not progress: a guest that runs always has something.
        if sample.saved as f64 > self.most as f64 * 1.01 {
            (self.most, self.scans) = (sample.saved, sample.full_scans);
        }
        sample.full_scans >= self.scans + QUIET
    }
}

struct Watch<'a> {
    ksm: &'a Ksm,
    ksmd: u32,
    /// The processes and what they took before, where their memory tells what is saved.
    memory: Option<(&'a [u32], i64)>,
    before: Counters,
    begin: Instant,
}

impl Watch<'_> {
    fn look(&self, pagefold: f64) -> Result<(Sample, Counters)> {
        // This may wait for ksmd: what it finds was saved at the moment that is noted after it, or before.
        let fallen = match self.memory {
            None => None,
            Some((pids, before)) => Some((before - resident(pids)?) / pagefold_sys::mapping::page_size() as i64),
        };
        let now = Counters::read(self.ksmd)?;
        let sample = Sample {
            seconds: self.begin.elapsed().as_secs_f64(),
            saved: fallen.unwrap_or(now.saved - self.before.saved),
            ksmd: now.ksmd - self.before.ksmd,
            pagefold,
            scanned: now.scanned - self.before.scanned,
            full_scans: now.full_scans - self.before.full_scans,
            pages_to_scan: now.pages_to_scan,
        };
        Ok((sample, now))
    }

    fn tick(&self) -> Duration {
        if self.memory.is_some() { SLOW_TICK } else { TICK }
    }

    /// A slow policy until its end, or for as long as it is given. Whether it came to its end.
    fn window(&self, window: Duration, mut progress: Progress, steps: &mut Steps) -> Result<(Vec<Sample>, bool)> {
        self.ksm.set("run", 1);
        let mut samples = Vec::new();
        loop {
            write_due(steps, self.ksm, self.begin.elapsed().as_secs_f64())?;
            let (sample, _) = self.look(0.0)?;
            samples.push(sample);
            let is_over = progress.is_over(&sample);
            if is_over || self.begin.elapsed() >= window {
                return Ok((samples, is_over));
            }
            pause_for(self.tick())?;
        }
    }

    /// Everything enrolled, until its end.
    fn whole(&self, mut progress: Progress, share: f64) -> Result<Vec<Sample>> {
        if share < 1.0 {
            self.ksm.set("pages_to_scan", BOUNDED_BATCH);
        }
        self.ksm.set("run", 1);
        let mut samples = Vec::new();
        let mut paced = self.before;
        loop {
            pause_for(self.tick())?;
            let (sample, now) = self.look(0.0)?;
            samples.push(sample);
            if progress.is_over(&sample) {
                return Ok(samples);
            }
            ensure!(self.begin.elapsed() < LIMIT, "ksmd did not come to an end within {LIMIT:?}");
            if share < 1.0 && now.scanned - paced.scanned >= 5 * BOUNDED_BATCH as i64 {
                let batches = (now.scanned - paced.scanned) as f64 / BOUNDED_BATCH as f64;
                self.ksm.set("sleep_millisecs", pause((now.ksmd - paced.ksmd) / batches, share));
                paced = now;
            }
        }
    }

    /// pagefold, until it has ended, and what it said.
    fn pagefold(&self, command: &mut Command) -> Result<(Vec<Sample>, Report)> {
        // A file takes everything; a pipe that nobody reads meanwhile does not.
        let mut said = tempfile::tempfile().context("no file for what pagefold says")?;
        command.stdout(said.try_clone()?);
        let mut child: Child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
        let mut samples = Vec::new();
        let pid = child.id();
        while !has_ended(pid)? {
            samples.push(self.look(cpu_seconds(pid)?)?.0);
            let in_time = if self.begin.elapsed() > LIMIT {
                Err(anyhow!("pagefold merge did not end within {LIMIT:?}"))
            } else {
                pause_for(self.tick())
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
        let exit = status.code().filter(|code| matches!(code, 0 | 1 | 3));
        let exit = exit.with_context(|| format!("pagefold merge failed: {status}"))?;
        let mut text = String::new();
        said.rewind()?;
        said.read_to_string(&mut text)?;
        Ok((samples, Report::parse(exit, &text)?))
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

    fn over(progress: &mut Progress, looks: &[(i64, i64)]) -> Vec<bool> {
        let sample = |&(full_scans, saved): &(i64, i64)| Sample {
            seconds: 0.0,
            saved,
            ksmd: 0.0,
            pagefold: 0.0,
            scanned: 0,
            full_scans,
            pages_to_scan: 100,
        };
        looks.iter().map(|look| progress.is_over(&sample(look))).collect()
    }

    #[test]
    fn it_is_over_when_nearly_all_that_is_known_is_saved() {
        let mut progress = Progress::new(Truth { redundant: 1000, merged: 1500 });
        assert_eq!(over(&mut progress, &[(0, 500), (2, 997), (2, 998)]), [false, false, true]);
    }

    #[test]
    fn it_is_over_so_many_full_scans_after_the_last_progress() {
        let mut progress = Progress::new(Truth { redundant: 1_000_000, merged: 2_000_000 });
        assert_eq!(over(&mut progress, &[(1, 0), (QUIET - 1, 0), (QUIET, 0)]), [false, false, true]);
        let mut progress = Progress::new(Truth { redundant: 1_000_000, merged: 2_000_000 });
        // The second of these is a hundredth more and no progress.
        let looks = [(5, 1000), (6, 1010), (QUIET + 4, 1010), (QUIET + 5, 1010)];
        assert_eq!(over(&mut progress, &looks), [false, false, false, true]);
    }
}
