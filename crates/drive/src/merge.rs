//! Carrying out a plan: enrol, let ksmd work within its bound, watch what does not stay merged, verify.
//!
//! 1. What the programs enrolled themselves and does not pay is withdrawn for the time being, so that ksmd does not
//!    walk it.
//! 2. Where targets are running, a sample of the plan is merged first and watched (*trial*): a page that holds the same
//!    bytes at every look may be written all the time, zero over zero, and each write breaks the sharing. Ranges whose
//!    sample does not stay merged for long enough to pay are dropped.
//! 3. The rest is enrolled. ksmd goes as fast as its bound allows until nothing more comes.
//! 4. ksmd is stopped, page tables are read, and its settings come back. Merged pages stay merged: their ranges stay
//!    enrolled, because withdrawing them would unmerge.
//!
//! KSM has one tree and one ksmd: it also looks at what others have enrolled. Their merges show in the timeline, which
//! is made of counters, and not in the verdict, which is made of page tables.

use crate::ksmd::{Counters, Ksmd};
use crate::session::{self, Session, Stays};
use crate::verify;
use pagefold_host::act::{Action, Advice, Refusal};
use pagefold_host::observe;
use pagefold_model::ksm::{Setting, Settings};
use pagefold_model::outcome::{End, Found, Missed, Outcome, Sample, Trial};
use pagefold_model::pace::{Pace, Settle};
use pagefold_model::plan::{Plan, Target};
use pagefold_model::{Absent, AddressRange, Pages, Reading};
use rustix::time::{ClockId, clock_gettime};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How often the counters are read.
const LOOK: Duration = Duration::from_millis(5);

/// How often the speed is adapted and other writers are looked for.
const ADAPT: Duration = Duration::from_millis(50);

/// How a plan is carried out.
#[derive(Clone, Debug)]
pub struct Options {
    /// ksmd's share of one CPU at most; 1 is no bound.
    pub share: f64,
    /// When to end, settled or not, from the start of the command.
    pub deadline: Option<Duration>,
    /// For how long a trial is watched; zero for no trial.
    pub trial: Duration,
    /// Whether narrowed enrolments stay narrowed.
    pub keep: bool,
}

/// What can be shown while it runs.
#[derive(Debug, Default)]
pub struct Progress {
    stage: AtomicU64,
    saved: AtomicU64,
    expected: AtomicU64,
}

/// What is being done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Stage {
    /// Nothing yet.
    Waiting,
    /// Ranges are being enrolled.
    Enrolling,
    /// A sample is merged and watched.
    Trying,
    /// ksmd works.
    Merging,
    /// Page tables are being read.
    Verifying,
}

impl Progress {
    /// What is being done.
    pub fn stage(&self) -> Stage {
        const STAGES: [Stage; 5] = [Stage::Waiting, Stage::Enrolling, Stage::Trying, Stage::Merging, Stage::Verifying];
        STAGES[self.stage.load(Ordering::Relaxed) as usize % STAGES.len()]
    }

    /// Pages saved so far, and pages expected.
    pub fn saved(&self) -> (Pages, Pages) {
        (Pages(self.saved.load(Ordering::Relaxed)), Pages(self.expected.load(Ordering::Relaxed)))
    }

    fn enter(&self, stage: Stage) {
        self.stage.store(stage as u64, Ordering::Relaxed);
    }
}

/// Carry out a plan, and put back what was changed for it alone. `started` is when the command began.
///
/// Targets that end meanwhile, or refuse, are told in the outcome and do not stop the others.
pub fn carry_out(
    session: &mut Session<'_>,
    plan: Plan,
    options: &Options,
    started: Instant,
    progress: &Progress,
    stop: &AtomicBool,
) -> Result<Outcome, session::Error> {
    let host = session.host();
    let unknown = session::Error::Unknown;
    let available = observe::memory(host).and_then(|memory| memory.available);
    let huge = verify::huge(host, &plan);
    let before = if verify::may_hold(&plan) { verify::found(host, &plan).map_err(unknown)? } else { Found::default() };
    let mut work = Work {
        ksmd: Ksmd::find(host),
        counters: Counters::read(host).map_err(unknown)?,
        ksmd_before: Err(Absent::NotOnThisKernel),
        pace: Pace::new(options.share),
        session,
        options,
        started,
        progress,
        stop,
        timeline: Vec::new(),
        stops: Vec::new(),
        missed: Vec::new(),
    };
    work.ksmd_before = work.ksmd_cpu();
    let census = started.elapsed();
    progress.expected.store(plan.predicted.reach.freed.0, Ordering::Relaxed);

    let (end, trial) = match work.merge(&plan) {
        Ok(done) => done,
        Err(error @ session::Error::Contested { .. }) => (End::Yielded(error.to_string()), None),
        Err(error) => return Err(error),
    };
    progress.enter(Stage::Verifying);
    let yielded = matches!(end, End::Yielded(_));
    if !yielded {
        work.session.set(&Settings::from([(Setting::Run, "0".to_owned())]))?;
    }
    let after = verify::found(host, &plan).map_err(unknown)?;
    let ksmd = work.ksmd_since();
    let Work { timeline, stops, missed, .. } = work;
    let remains = session.finish()?;
    let outcome = Outcome {
        end,
        before,
        after,
        timeline,
        census,
        ksmd,
        own: own_cpu(),
        available: (available, observe::memory(host).and_then(|memory| memory.available)),
        huge: (huge, verify::huge(host, &plan)),
        stops,
        trial,
        missed,
        remains: remains.into_iter().map(|remains| remains.to_string()).collect(),
        plan,
    };
    Ok(outcome)
}

/// The CPU time of this process, all threads.
pub fn own_cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.max(0) as u64, time.tv_nsec as u32)
}

struct Work<'w, 'h> {
    session: &'w mut Session<'h>,
    options: &'w Options,
    started: Instant,
    progress: &'w Progress,
    stop: &'w AtomicBool,
    ksmd: Reading<Ksmd<'h>>,
    ksmd_before: Reading<Duration>,
    counters: Counters,
    pace: Pace,
    timeline: Vec<Sample>,
    stops: Vec<Duration>,
    missed: Vec<Missed>,
}

impl Work<'_, '_> {
    fn merge(&mut self, plan: &Plan) -> Result<(End, Option<Trial>), session::Error> {
        self.progress.enter(Stage::Enrolling);
        self.narrow(plan)?;
        self.enrol(plan)?;
        self.progress.enter(Stage::Merging);
        let expected = plan.predicted.reach.freed;
        Ok((self.settle(Some(expected))?, None))
    }

    /// Withdraw for now what programs enrolled themselves and does not pay.
    fn narrow(&mut self, plan: &Plan) -> Result<(), session::Error> {
        let stays = if self.options.keep { Stays::ForGood } else { Stays::ForNow };
        for target in plan.targets.iter().filter(|target| !target.narrowed.is_empty()) {
            let ranges = target.narrowed.clone();
            self.act(
                target,
                Action::Advise { process: target.process.id, advice: Advice::Unmergeable, ranges },
                stays,
            )?;
        }
        Ok(())
    }

    fn enrol(&mut self, plan: &Plan) -> Result<(), session::Error> {
        for target in &plan.targets {
            let process = target.process.id;
            let ranges: Vec<AddressRange> =
                target.ranges.iter().filter(|range| !range.enrolled).map(|range| range.range).collect();
            let action = if plan.whole {
                Action::MergeAny { process, on: true }
            } else if ranges.is_empty() {
                continue;
            } else {
                Action::Advise { process, advice: Advice::Mergeable, ranges }
            };
            self.act(target, action, Stays::ForGood)?;
        }
        Ok(())
    }

    /// Act on a target. What it refuses is noted.
    fn act(&mut self, target: &Target, action: Action, stays: Stays) -> Result<(), session::Error> {
        let missed = |range, why| Missed { pid: target.process.id.pid, comm: target.process.comm.clone(), range, why };
        match self.session.apply(&action, stays) {
            Ok(effect) => {
                self.stops.extend(effect.stops);
                self.missed.extend(effect.missed.into_iter().map(|(range, why)| missed(Some(range), why)));
            }
            Err(session::Error::Refused(why)) => self.missed.push(missed(None, why.to_string())),
            Err(session::Error::Unknown(why)) => {
                self.missed.push(missed(None, Refusal::from(why).to_string()));
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Let ksmd work until nothing more comes.
    fn settle(&mut self, expected: Option<Pages>) -> Result<End, session::Error> {
        let unknown = session::Error::Unknown;
        let host = self.session.host();
        self.run()?;
        let mut settle = Settle::new(Counters::read(host).map_err(unknown)?.full_scans, expected);
        let mut adapted = (Instant::now(), self.ksmd_cpu());
        loop {
            std::thread::sleep(LOOK);
            let now = Counters::read(host).map_err(unknown)?;
            let saved = now.saved.saturating_sub(self.counters.saved);
            let ksmd = self.ksmd_since().unwrap_or_default();
            self.timeline.push(Sample { at: self.started.elapsed(), saved, ksmd });
            self.progress.saved.store(saved.0, Ordering::Relaxed);
            if settle.look(now.full_scans, saved) {
                return Ok(End::Settled);
            }
            if self.stop.load(Ordering::Relaxed) {
                return Ok(End::Stopped);
            }
            if self.options.deadline.is_some_and(|deadline| self.started.elapsed() >= deadline) {
                return Ok(End::Deadline);
            }
            let elapsed = adapted.0.elapsed();
            if elapsed >= ADAPT {
                self.session.uncontested()?;
                let cpu = self.ksmd_cpu();
                if let (Ok(then), Ok(now)) = (&adapted.1, &cpu) {
                    self.pace.adapt(now.saturating_sub(*then), elapsed);
                    self.run()?;
                }
                adapted = (Instant::now(), cpu);
            }
        }
    }

    /// Run ksmd at the present pace.
    fn run(&mut self) -> Result<(), session::Error> {
        let (pages, pause) = self.pace.settings();
        let mut settings = Settings::from([
            (Setting::AdvisorMode, "none".to_owned()),
            (Setting::PagesToScan, pages.to_string()),
            (Setting::SleepMillisecs, pause.to_string()),
            // Pages of zeros then map the page of zeros that everybody maps: no copy to keep, no chains, no side
            // channel beyond the one that every fresh page has.
            (Setting::UseZeroPages, "1".to_owned()),
            (Setting::Run, "1".to_owned()),
        ]);
        // Before 6.8 there is no advisor that would have to be off.
        if pagefold_host::act::setting_now(self.session.host(), Setting::AdvisorMode).is_err() {
            settings.remove(&Setting::AdvisorMode);
        }
        self.session.set(&settings)
    }

    fn ksmd_cpu(&self) -> Reading<Duration> {
        self.ksmd.as_ref().map_err(Absent::clone)?.cpu()
    }

    /// The CPU time that ksmd used since the start.
    fn ksmd_since(&self) -> Reading<Duration> {
        Ok(self.ksmd_cpu()?.saturating_sub(self.ksmd_before.clone()?))
    }
}
