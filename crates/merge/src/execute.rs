//! Carrying out a plan: enrol, let ksmd work within its bound, watch what does not stay merged, verify.
//!
//! 1. What the programs enrolled themselves and does not pay is withdrawn for the time being, so that ksmd does not
//!    walk it; of those who have nothing else to gain, too.
//! 2. The ranges of the plan are enrolled, and ksmd goes as fast as its bound allows until nothing more comes. On
//!    kernels before 6.11, third and further copies are enrolled once the first two of each have merged. Where that
//!    falls short and ksmd has skipped pages, it goes on without skipping any ([`Settle::were_skipped`]). Where all
//!    that was enrolled has ended, nothing is waited for ([`Walk`]).
//! 3. Meanwhile merged pages of targets that run are watched, and what does not stay merged for long enough to pay is
//!    withdrawn: see [`trial`].
//! 4. ksmd is stopped, page tables are read, and its settings come back. Merged pages stay merged: their ranges stay
//!    enrolled, because withdrawing them would unmerge. Where that is cut short, pieces of which nothing is merged yet
//!    are withdrawn, unless ksmd is to go on with them.
//!
//! KSM has one tree and one ksmd: it also looks at what others have enrolled. The timeline is made of the targets' own
//! counters, and the verdict of their page tables.

use crate::Probes;
use crate::decide::outcome::{Change, End, Fate, Missed, Outcome, Regions, Resident, Sample, Watched};
use crate::decide::pace::{Pace, Settle};
use crate::decide::plan::{Narrowed, Plan, Target, Way};
use crate::decide::policy::GUIDED_SLEEP_MILLISECS;
use crate::ksmd::{self, Gauge, Ksmd, Walk, full_scans, looks};
use crate::recheck::{Moment, Whom};
use crate::trial::{self, Trial, Withdrawn};
use crate::{splitting, verify};
use pagefold_base::ksm::DEFAULT_PAGES_TO_SCAN;
use pagefold_base::ksm::{Setting, Settings};
use pagefold_base::{Absent, AddressRange, Bytes, Pages, ProcessId, Reading};
use pagefold_host::act::{self, Action, Advice};
use pagefold_host::observe;
use pagefold_host::transaction::session;
use pagefold_host::transaction::session::{Session, Stays};
use rustix::time::{ClockId, clock_gettime};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How often the counters are read when what is waited for is near and nothing bounds ksmd: until it is seen, ksmd
/// walks in vain. With a bound as much longer as ksmd is slower.
const LOOK: Duration = Duration::from_millis(5);

/// How often before.
const GLANCE: Duration = Duration::from_millis(20);

/// The pause between looks in times of what a look takes: looking stays below a twentieth of one CPU.
const LOOKING: u32 = 20;

/// How often the speed is adapted and other writers are looked for.
const ADAPT: Duration = Duration::from_millis(50);

/// How often merged pages are looked at again.
const AGAIN: Duration = Duration::from_millis(200);

/// The pause between such looks in times of what one takes.
const WATCHING: u32 = 50;

/// How a plan is carried out.
#[derive(Clone, Debug)]
pub struct Options {
    /// ksmd's share of one CPU at most; 1 is no bound.
    pub share: f64,
    /// When to end, settled or not, from the start of the command.
    pub deadline: Option<Duration>,
    /// For how long merged pages of running targets are watched at least; zero for not at all.
    pub watch: Duration,
    /// What becomes of what was changed for the time being.
    pub after: After,
}

/// What becomes of what was changed for the time being, once a plan is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// It is put back.
    PutBack,
    /// It is put back, but for ksmd, which is left running slowly.
    Slowly,
    /// It stays until the session ends: ksmd rests, and what does not pay stays withdrawn.
    Resting,
}

impl After {
    /// The same, by how it ended: who stops it does not want ksmd to go on, and who yields leaves nothing behind.
    fn ended_by(self, end: &End) -> Self {
        match (end, self) {
            (End::Yielded(_), _) | (End::Stopped, Self::Slowly) => Self::PutBack,
            _ => self,
        }
    }
}

/// What can be shown while it runs.
#[derive(Debug, Default)]
pub struct Progress {
    stage: AtomicU64,
    merged: AtomicU64,
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
    /// ksmd works.
    Merging,
    /// Page tables are being read.
    Verifying,
}

impl Progress {
    /// What is being done.
    pub fn stage(&self) -> Stage {
        const STAGES: [Stage; 4] = [Stage::Waiting, Stage::Enrolling, Stage::Merging, Stage::Verifying];
        STAGES[self.stage.load(Ordering::Relaxed) as usize % STAGES.len()]
    }

    /// Pages merged so far, kept copies included, and pages expected.
    pub fn merged(&self) -> (Pages, Pages) {
        (Pages(self.merged.load(Ordering::Relaxed)), Pages(self.expected.load(Ordering::Relaxed)))
    }

    fn enter(&self, stage: Stage) {
        self.stage.store(stage as u64, Ordering::Relaxed);
    }
}

/// What is to be carried out.
pub struct Planned {
    /// The plan.
    pub plan: Plan,
    /// By what one can tell afterwards why it came out differently.
    pub probes: Probes,
    /// When the command began.
    pub started: Instant,
}

/// Carry out a plan, and put back what was changed for it alone. What does not stay merged is withdrawn by the `trial`,
/// which is a new one unless something was merged before and is to be watched too.
///
/// Targets that end meanwhile, or refuse, are told in the outcome and do not stop the others.
pub fn carry_out<'h>(
    session: &mut Session<'h>,
    planned: Planned,
    options: &Options,
    trial: &mut Trial<'h>,
    progress: &Progress,
    stop: &AtomicBool,
) -> Result<Outcome, session::Error> {
    let Planned { plan, probes, started } = planned;
    let host = session.host();
    let unknown = session::Error::Unknown;
    let available = observe::memory(host).and_then(|memory| memory.available);
    let resident = verify::resident(host, &plan);
    let huge: Bytes = plan.targets.iter().map(|target| target.huge).sum();
    // Whoever cannot see frames could not tell in the end what was reached.
    host.frame_flags(&[]).map_err(unknown)?;
    let before = verify::found(host, &plan).map_err(unknown)?;
    let (regions, looked) = (verify::regions(host, &plan), looks(host));
    let mut work = Work {
        plan: &plan,
        trial,
        withdrawn: Pages::ZERO,
        withdrawn_from: BTreeSet::new(),
        found_fleeting: started,
        enrolled: false,
        unskipping: false,
        ksmd: Ksmd::find(host),
        gauge: Gauge::new(host, &plan),
        ksmd_before: Err(Absent::NotOnThisKernel),
        pace: Pace::new(options.share),
        session,
        options,
        started,
        progress,
        stop,
        timeline: Vec::new(),
        missed: Vec::new(),
    };
    work.ksmd_before = work.ksmd_cpu();
    let census = started.elapsed();
    progress.expected.store(plan.predicted.merging.0, Ordering::Relaxed);

    let mut end = match work.merge() {
        Ok(end) => end,
        Err(error @ session::Error::Contested { .. }) => End::Yielded(error.to_string()),
        Err(error) => return Err(error),
    };
    progress.enter(Stage::Verifying);
    if !matches!(end, End::Yielded(_)) {
        match work.rest() {
            Err(error @ session::Error::Contested { .. }) => end = End::Yielded(error.to_string()),
            rested => rested?,
        }
    }
    let after = verify::found(host, &plan).map_err(unknown)?;
    let nets = verify::nets(host, &plan, &before, &after);
    let zeros_by_splitting = verify::zeros_by_splitting(&plan, host.page_size(), &before, &after);
    // What somebody had who has ended is no loss.
    let lives = |position: &usize| after[*position].is_some();
    let ended: Vec<usize> = (0..plan.targets.len()).filter(|position| !lives(position)).collect();
    let before = verify::sum((0..before.len()).filter(lives).filter_map(|position| before[position].as_ref()));
    let after = verify::sum(after.iter().flatten());
    let bystanders = verify::bystanders(host, &plan);
    let ksmd = work.ksmd_since();
    let looks = looked.and_then(|before| Ok(looks(host)?.saturating_sub(before)));
    let now = verify::regions(host, &plan);
    let Work { timeline, mut missed, withdrawn, withdrawn_from: from, trial, .. } = work;
    for refused in trial.refused() {
        trial::note_once(&mut missed, refused.clone());
    }
    let (watched, withdrawn) = (Watched { seen: trial.seen(), withdrawn, from }, withdrawn_of(&plan, trial));
    let parts = |process| {
        let lost = trial.withdrawn().get(&process).map(Withdrawn::ranges).unwrap_or_default();
        [&lost[..], trial.idle(process)].concat()
    };
    let regions = Regions::compare(&plan, &regions, &now, parts);
    let given_up = |process: ProcessId| -> Vec<(AddressRange, Fate)> {
        let target = plan.targets.iter().filter(|target| target.process.id == process);
        let beside = target.flat_map(|target| target.beside_its_guest(plan.whole)).map(|range| range.range);
        let missed = missed.iter().filter(|missed| missed.pid == process.pid && missed.change == Change::Enrol);
        let everything = AddressRange { start: 0, end: u64::MAX };
        let missed = missed.map(|missed| missed.range.unwrap_or(everything));
        let withdrawn = trial.withdrawn().get(&process).map(Withdrawn::ranges).unwrap_or_default();
        let named = |fate| move |range| (range, fate);
        let given_up = beside.map(named(Fate::Beside)).chain(missed.map(named(Fate::Missed)));
        let given_up = given_up.chain(withdrawn.into_iter().map(named(Fate::Withdrawn)));
        given_up.chain(trial.idle(process).iter().copied().map(named(Fate::Idle))).collect()
    };
    let fates = probes.look(host, given_up).map_err(unknown)?;
    session.done()?;
    // Without the note later commands lack this part, and say so.
    let unnoted = splitting::note(host, session.directory(), &zeros_by_splitting).err();
    let unnoted = unnoted.map(|error| format!("what huge pages freed is not noted in {}: {error}", splitting::FILE));
    if options.after.ended_by(&end) == After::Slowly {
        let slowly = session.set(&Settings::from([
            (Setting::PagesToScan, DEFAULT_PAGES_TO_SCAN.to_string()),
            (Setting::SleepMillisecs, GUIDED_SLEEP_MILLISECS.to_string()),
            (Setting::Run, "1".to_owned()),
        ]));
        match slowly {
            Err(error @ session::Error::Contested { .. }) => end = End::Yielded(error.to_string()),
            set => set?,
        }
    }
    let remains = match options.after.ended_by(&end) {
        After::PutBack => session.finish()?,
        After::Slowly => session.keep("guided")?,
        After::Resting => Vec::new(),
    };
    let outcome = Outcome {
        end,
        before,
        after,
        nets,
        zeros_by_splitting,
        timeline,
        census,
        ksmd,
        looks,
        regions,
        fates,
        own: own_cpu(),
        available: (available, observe::memory(host).and_then(|memory| memory.available)),
        resident: resident.and_then(|before| {
            let after = verify::resident(host, &plan)?;
            Ok(Resident { targets: (before.0, after.0), own: (before.1, after.1) })
        }),
        huge: (huge, if huge.0 > 0 { verify::huge(host, &plan) } else { Ok(huge) }),
        stops: session.stops().to_vec(),
        watched,
        withdrawn,
        ended,
        bystanders,
        missed,
        remains: remains.into_iter().map(|remains| remains.to_string()).chain(unnoted).collect(),
        plan,
    };
    Ok(outcome)
}

/// What a trial has withdrawn of the targets of a plan, by their positions.
fn withdrawn_of(plan: &Plan, trial: &Trial<'_>) -> BTreeMap<usize, Vec<AddressRange>> {
    let of = |target: &Target| Some(trial.withdrawn().get(&target.process.id)?.ranges());
    plan.targets.iter().enumerate().filter_map(|(position, target)| Some((position, of(target)?))).collect()
}

/// The CPU time of this process, all threads, and of the processes that traced targets for it.
pub fn own_cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.max(0) as u64, time.tv_nsec as u32) + pagefold_sys::inject::cpu_time()
}

struct Work<'w, 'h> {
    plan: &'w Plan,
    trial: &'w mut Trial<'h>,
    withdrawn: Pages,
    withdrawn_from: BTreeSet<ProcessId>,
    found_fleeting: Instant,
    /// Whether anybody took anything that was to be enrolled.
    enrolled: bool,
    /// Whether ksmd was told to skip nothing.
    unskipping: bool,
    session: &'w mut Session<'h>,
    options: &'w Options,
    started: Instant,
    progress: &'w Progress,
    stop: &'w AtomicBool,
    ksmd: Reading<Ksmd<'h>>,
    ksmd_before: Reading<Duration>,
    gauge: Gauge<'h>,
    pace: Pace,
    timeline: Vec<Sample>,
    missed: Vec<Missed>,
}

impl Work<'_, '_> {
    fn merge(&mut self) -> Result<End, session::Error> {
        self.progress.enter(Stage::Enrolling);
        // What broke while ksmd rested would be merged again.
        self.look_again(Moment::Meanwhile)?;
        self.missed.extend(self.trial.withdraw_own(self.session)?);
        self.narrow()?;
        self.enrol(false)?;
        let mut early = self.plan.merging_early();
        let refused = |missed: &Missed| missed.change == Change::Enrol && missed.range.is_none();
        if early.is_some() && self.missed.iter().any(refused) {
            // Nobody can wait for copies that are not enrolled.
            self.enrol(true)?;
            early = None;
        }
        // Without anybody to look at ksmd sleeps, and what is waited for would never come.
        let before = self.plan.targets.iter().flat_map(|target| &target.ranges).any(|range| range.enrolled);
        if !self.enrolled && (self.plan.whole || !before) {
            return Ok(self.over().unwrap_or(End::Settled));
        }
        // Who enrols a process whole wants all of it.
        if !self.options.watch.is_zero() && !self.plan.whole {
            self.trial.add(self.plan);
        }
        self.progress.enter(Stage::Merging);
        self.settle(early, self.plan.predicted.merging)
    }

    /// Withdraw for now what programs enrolled themselves and does not pay.
    fn narrow(&mut self) -> Result<(), session::Error> {
        if self.plan.narrowed.is_empty() {
            return Ok(());
        }
        // What merged since the census would be unmerged: ksmd rests, and such ranges are left as they are.
        let host = self.session.host();
        let ran = act::setting_now(host, Setting::Run).is_ok_and(|run| run == "1");
        self.rest()?;
        for Narrowed { process, comm, ranges, .. } in &self.plan.narrowed {
            let merged = |range: &AddressRange| verify::look_at(host, *process, *range).map(|found| found.merged);
            let untouched = |range: &AddressRange| !ran || merged(range) == Ok(Pages::ZERO);
            let ranges: Vec<AddressRange> = ranges.iter().copied().filter(untouched).collect();
            if ranges.is_empty() || self.over().is_some() {
                continue;
            }
            let action = Action::Advise { process: *process, advice: Advice::Unmergeable, ranges };
            self.act(*process, comm, &action, Stays::ForNow)?;
        }
        Ok(())
    }

    /// Enrol what is to be enrolled first, or late.
    fn enrol(&mut self, late: bool) -> Result<(), session::Error> {
        for target in &self.plan.targets {
            if self.over().is_some() {
                break;
            }
            let process = target.process.id;
            let ranges = target.to_enrol(late);
            let actions: Vec<Action> = match (&target.way, self.plan.whole) {
                (Way::Unreachable(why), _) => {
                    let (pid, comm) = (process.pid, target.process.comm.clone());
                    let missed = Missed { change: Change::Enrol, pid, comm, range: None, why: why.clone() };
                    trial::note_once(&mut self.missed, missed);
                    continue;
                }
                // It may be enrolled already.
                (Way::Guest(guest), true) if guest.backends.is_empty() => {
                    self.enrolled = true;
                    continue;
                }
                (Way::Guest(guest), true) => guest
                    .backends
                    .iter()
                    .map(|backend| Action::GuestMerge {
                        process,
                        socket: guest.socket.clone(),
                        backend: backend.clone(),
                        on: true,
                    })
                    .collect(),
                (Way::Within, true) => vec![Action::MergeAny { process, on: true }],
                (_, false) if ranges.is_empty() => continue,
                (_, false) => vec![Action::Advise { process, advice: Advice::Mergeable, ranges }],
            };
            for action in actions {
                if self.over().is_some() {
                    break;
                }
                let is_busy = self.act(process, &target.process.comm, &action, Stays::OnceDone)?;
                // Each backend of a guest that hangs would take the whole time limit of its control socket.
                if is_busy {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Act on a process. What it refuses is noted. Tells whether it was busy.
    fn act(&mut self, process: ProcessId, comm: &str, action: &Action, stays: Stays) -> Result<bool, session::Error> {
        let trial::Acted { missed, is_busy } = trial::act(self.session, process, comm, action, stays, self.stop)?;
        self.enrolled |= stays == Stays::OnceDone && missed.iter().all(|missed| missed.range.is_some());
        for missed in missed {
            trial::note_once(&mut self.missed, missed);
        }
        Ok(is_busy)
    }

    /// How it ends, if it was told to stop or its time is over.
    fn over(&self) -> Option<End> {
        let late = self.options.deadline.is_some_and(|deadline| self.started.elapsed() >= deadline);
        let stopped = self.stop.load(Ordering::Relaxed).then_some(End::Stopped);
        stopped.or(late.then_some(End::Deadline))
    }

    /// Let ksmd work until nothing more comes: first what is enrolled `early`, if anything is late, then all that is
    /// expected.
    fn settle(&mut self, early: Option<Pages>, expected: Pages) -> Result<End, session::Error> {
        let unknown = session::Error::Unknown;
        let host = self.session.host();
        self.run()?;
        // Late ones merge at the first look, if the first two of each are in the stable tree by then.
        let early = early.map(|pages| Pages(pages.0 - pages.0 / 32));
        let mut late = early.is_some();
        let mut settle = Settle::new(full_scans(host).map_err(unknown)?, Some(early.unwrap_or(expected)));
        let mut adapted = (Instant::now(), self.ksmd_cpu());
        let (began, mut looked) = (Instant::now(), Instant::now());
        let mut settled: Option<Instant> = None;
        let (mut pause, mut again) = (LOOK, AGAIN);
        let (skipped, mut walk) = (ksmd::skipped(host), Walk::new(host));
        loop {
            std::thread::sleep(pause);
            let began_to_look = Instant::now();
            let scans = full_scans(host).map_err(unknown)?;
            let merged = self.gauge.merged();
            let ksmd = self.ksmd_since().unwrap_or_default();
            self.timeline.push(Sample { at: self.started.elapsed(), merged, ksmd });
            self.progress.merged.store(merged.0, Ordering::Relaxed);
            let looking = began_to_look.elapsed();
            if settled.is_none() && (settle.look(scans, merged) || walk.is_over(host, &self.gauge)) {
                if late {
                    late = false;
                    // An address space is enrolled behind ksmd's cursor, and waits for the next scan (mm/ksm.c,
                    // `__ksm_enter`). While ksmd rests, all of them wait for the same one.
                    self.rest()?;
                    self.enrol(true)?;
                    self.run()?;
                    adapted = (Instant::now(), self.ksmd_cpu());
                    settle = Settle::new(full_scans(host).map_err(unknown)?, Some(expected));
                    continue;
                }
                let skips = !self.unskipping && act::setting_now(host, Setting::SmartScan).is_ok_and(|on| on == "1");
                let passed_over = skipped.as_ref().is_ok_and(|before| {
                    let now = ksmd::skipped(host).unwrap_or(*before);
                    settle.were_skipped(merged, now.saturating_sub(*before))
                });
                if skips && passed_over {
                    self.unskipping = true;
                    ksmd::skip(self.session, false)?;
                    settle = Settle::new(scans, Some(expected));
                    continue;
                }
                // While merged pages are only watched, ksmd would merge again what breaks, and hide it. What breaks
                // from here on is seen however few looks follow, in this round or the next.
                self.rest()?;
                self.trial.look(Whom::All);
                looked = Instant::now();
                settled = Some(looked);
            }
            let near = settle.expected().is_none_or(|expected| merged.0 >= expected.0 / 8 * 7);
            // Many targets take longer to count.
            let wanted = if near { LOOK } else { GLANCE }.div_f64(self.options.share.clamp(0.05, 1.0)).min(ADAPT);
            pause = wanted.max(looking * LOOKING);
            // What merged last is watched, too. While looks still find something that does not last, more may come.
            let rested = settled.is_some_and(|rested| rested.elapsed() >= self.options.watch.min(3 * AGAIN));
            let watched = began.elapsed() >= self.options.watch && self.found_fleeting.elapsed() >= 3 * AGAIN;
            if rested && watched || settled.is_some() && !self.trial.ran() {
                return self.close(End::Settled);
            }
            if let Some(end) = self.over() {
                return self.close(end);
            }
            if looked.elapsed() >= again {
                let began = Instant::now();
                self.look_again(Moment::Meanwhile)?;
                looked = Instant::now();
                again = AGAIN.max((looked - began) * WATCHING);
            }
            let elapsed = adapted.0.elapsed();
            if elapsed >= ADAPT {
                self.session.uncontested()?;
                let cpu = self.ksmd_cpu();
                if let (None, Ok(then), Ok(now)) = (settled, &adapted.1, &cpu) {
                    self.pace.adapt(now.saturating_sub(*then), elapsed);
                    self.run()?;
                }
                adapted = (Instant::now(), cpu);
            }
        }
    }

    /// Withdraw what holds nothing merged; of a round that was cut short only where ksmd is not to go on with it.
    fn close(&mut self, end: End) -> Result<End, session::Error> {
        if end == End::Settled {
            self.look_again(Moment::End)?;
        } else if self.options.after.ended_by(&end) == After::PutBack && !self.plan.whole {
            self.rest()?;
            let page_size = self.session.host().page_size();
            // It may be that nothing was to be watched.
            self.trial.add(self.plan);
            self.trial.look(Whom::All);
            for (process, pages) in self.trial.withdraw(self.session, Moment::Early)? {
                // What had only not merged yet was not lost.
                let idle = self.trial.idle(process).iter().map(|range| page_size.pages_in(range.bytes())).sum();
                let lost = pages.saturating_sub(idle);
                if lost > Pages::ZERO {
                    self.withdrawn += lost;
                    self.withdrawn_from.insert(process);
                }
            }
        }
        Ok(end)
    }

    /// Withdraw what does not stay merged.
    fn look_again(&mut self, moment: Moment) -> Result<(), session::Error> {
        self.trial.look(if moment == Moment::Meanwhile { Whom::Ran } else { Whom::All });
        let gone = self.trial.withdraw(self.session, moment)?;
        if !gone.is_empty() {
            self.found_fleeting = Instant::now();
        }
        self.withdrawn += gone.values().copied().sum::<Pages>();
        self.withdrawn_from.extend(gone.into_keys());
        Ok(())
    }

    /// Run ksmd at the present pace.
    fn run(&mut self) -> Result<(), session::Error> {
        ksmd::run(self.session, self.pace)
    }

    /// Stop ksmd, with what is merged kept.
    fn rest(&mut self) -> Result<(), session::Error> {
        ksmd::rest(self.session)?;
        if std::mem::take(&mut self.unskipping) { ksmd::skip(self.session, true) } else { Ok(()) }
    }

    fn ksmd_cpu(&self) -> Reading<Duration> {
        self.ksmd.as_ref().map_err(Absent::clone)?.cpu()
    }

    /// The CPU time that ksmd used since the start.
    fn ksmd_since(&self) -> Reading<Duration> {
        Ok(self.ksmd_cpu()?.saturating_sub(self.ksmd_before.clone()?))
    }
}

#[cfg(test)]
mod tests;
