//! Merging again and again, while programs run that keep making memory.
//!
//! Each round is a whole merge: census, plan, apply, verify, everything put back. What has not been there for long
//! enough to be expected to stay waits for a later round ([`StableAges`]), so that the first round merges nothing of a
//! program that has just begun; what did not stay merged in one round is left out of the next ones. The second round
//! comes once what the first one noted can be ripe. The pause after any other is a multiple of the CPU time that the
//! round took, so that watching memory that does not change costs next to nothing, and no shorter than it takes to ripen.
//!
//! Between rounds merged pages are checked every two seconds. Programs write many of them now and then with the bytes
//! that were there. Those are merged again right away, by one scan of the enrolled ranges ([`remerge`]): a round needs a
//! census and comes too late for them. For the rest of the time ksmd is as it was, so that each COW break is seen. What
//! is written too often is unenrolled. The price for that is the CPU time that ksmd was granted
//! ([`pagefold_base::merge_lifetime::criterion_for_break_limit`]).

use self::remerge::Remerge;
use crate::StableAges;
use crate::decide::outcome::{FailedChange, MergeOutcome};
use crate::execute as merge;
use crate::execute::{PreparedMerge, execute_plan};
use crate::merge_monitor::MergeMonitor;
use crate::prepare::{PlanRequest, PreparedPlan, prepare_plan};
use crate::recheck::{CheckScope, UnenrollPhase};
use pagefold_base::Pid;
use pagefold_base::merge_lifetime::stable_age;
use pagefold_base::process::Process;
use pagefold_census::ProcessSelection;
use pagefold_host::Host;
use pagefold_host::transaction::session;
use pagefold_host::transaction::session::{FailedUndo, Session};
use pagefold_sys::allocator::trim_free_memory;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The pause after a round, in times of the CPU time it took: but for the first rounds, pagefold's own share stays
/// below a fortieth of one CPU.
const PAUSE_TO_CPU_TIME_RATIO: u32 = 40;

/// How often it is looked whether to go on.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Why a round could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no census.
    #[error(transparent)]
    Census(#[from] pagefold_census::Error),
    /// The host cannot be changed.
    #[error(transparent)]
    Session(#[from] session::Error),
}

/// What there is to tell meanwhile.
#[derive(Clone, Copy, Debug)]
pub enum ContinuousMergeEvent<'t> {
    /// What a round came to that merged anything.
    RoundEnded(&'t MergeOutcome),
    /// What was changed for the time being and could not be put back, by a killed run or between rounds.
    UndoFailed(&'t FailedUndo),
    /// What could not be withdrawn until the end, however often it was tried.
    UnenrollFailed(&'t FailedChange),
}

/// What is merged again and again, and how.
pub struct ContinuousMerge<'h, 'a> {
    /// Where.
    pub host: &'h dyn Host,
    /// Where lock and journal are kept.
    pub directory: &'a Path,
    /// What is planned in each round; whom is told by the members.
    pub plan_request: PlanRequest,
    /// How a plan is carried out.
    pub merge_options: merge::MergeOptions,
    /// Why a process must not be enrolled, if it must not.
    pub exclusion_reason: &'a dyn Fn(&Process) -> Option<String>,
}

impl<'h> ContinuousMerge<'h, '_> {
    /// Merge what `members` names, until it names nobody or `stop` is set. While somebody else drives this host a round
    /// is skipped.
    pub fn run(
        &self,
        list_pids: impl FnMut() -> Vec<Pid>,
        report: impl FnMut(ContinuousMergeEvent<'_>),
        stop: &AtomicBool,
    ) -> Result<(), Error> {
        let mut trial = MergeMonitor::new(self.host);
        trial.set_ksmd_share(self.merge_options.ksmd_cpu_share);
        self.run_with_monitor(&mut trial, list_pids, report, stop)
    }

    /// The same, with what an earlier merge has under trial.
    fn run_with_monitor(
        &self,
        trial: &mut MergeMonitor<'h>,
        mut members: impl FnMut() -> Vec<Pid>,
        mut tell: impl FnMut(ContinuousMergeEvent<'_>),
        stop: &AtomicBool,
    ) -> Result<(), Error> {
        let mut ages = StableAges::new(self.host.page_size())?;
        let mut remerge = Remerge::new(self.host, self.merge_options.ksmd_cpu_share);
        let ripens = stable_age(self.host.page_size().bytes());
        // A program that starts fills its memory first.
        let (mut pause, mut noted) = (ripens, false);
        loop {
            let rested = Instant::now();
            let (mut looked, mut again) = (rested, remerge::MIN_CHECK_INTERVAL);
            let mut pids = members();
            while rested.elapsed() < pause && !pids.is_empty() && !stop.load(Ordering::Relaxed) {
                std::thread::sleep(STOP_POLL_INTERVAL);
                pids = members();
                if looked.elapsed() >= again {
                    let before = merge::own_cpu_time();
                    let ksmd = self.check_merged_pages(trial, &mut remerge, &mut tell, stop)?;
                    let own = merge::own_cpu_time().saturating_sub(before) * PAUSE_TO_CPU_TIME_RATIO;
                    (looked, again) =
                        (Instant::now(), remerge::MIN_CHECK_INTERVAL.max(own).max(remerge.pause_after(ksmd)));
                }
            }
            if pids.is_empty() || stop.load(Ordering::Relaxed) {
                trial.failed_changes().for_each(|refused| tell(ContinuousMergeEvent::UnenrollFailed(refused)));
                return Ok(());
            }
            let before = merge::own_cpu_time();
            self.run_round(pids, trial, &mut ages, &mut remerge, &mut tell, stop)?;
            // What the census took is in the job's cgroup, and counts against what was saved.
            trim_free_memory();
            // The first round only takes note of what there is, and is half of one with the second.
            let rest =
                if noted { merge::own_cpu_time().saturating_sub(before) * PAUSE_TO_CPU_TIME_RATIO } else { ripens };
            pause = rest.max(ripens);
            noted = true;
        }
    }

    /// One merge, if anything pays and nobody else drives.
    fn run_round(
        &self,
        pids: Vec<Pid>,
        trial: &mut MergeMonitor<'h>,
        ages: &mut StableAges,
        remerge: &mut Remerge<'h>,
        tell: &mut dyn FnMut(ContinuousMergeEvent<'_>),
        stop: &AtomicBool,
    ) -> Result<(), Error> {
        let started = Instant::now();
        ages.retain_processes(|process| pids.contains(&process.pid));
        let selection = ProcessSelection { pids, ..ProcessSelection::default() };
        let request = PlanRequest { selection, ..self.plan_request.clone() };
        let progress = pagefold_census::ScanProgress::default();
        let PreparedPlan { mut plan, probes, .. } =
            prepare_plan(self.host, &request, self.exclusion_reason, Some((ages, Instant::now())), &progress, stop)?;
        for (&process, withdrawn) in trial.unenrolled() {
            plan.exclude_ranges(process, withdrawn.all_ranges());
        }
        if plan.targets.is_empty() {
            return self.check_merged_pages(trial, remerge, tell, stop).map(drop);
        }
        let Some(mut session) = self.begin_session(tell)? else { return Ok(()) };
        let progress = merge::MergeProgress::default();
        let planned = PreparedMerge { plan, probes, started_at: started };
        let outcome = execute_plan(&mut session, planned, &self.merge_options, trial, &progress, stop)
            .map_err(|error| session.abort(error))?;
        tell(ContinuousMergeEvent::RoundEnded(&outcome));
        Ok(())
    }

    /// Check what is merged: unenroll what does not last, and merge again what was written. While another program drives
    /// this host it waits. Tells the CPU time that ksmd took for it.
    fn check_merged_pages(
        &self,
        trial: &mut MergeMonitor<'h>,
        remerge: &mut Remerge<'h>,
        tell: &mut dyn FnMut(ContinuousMergeEvent<'_>),
        stop: &AtomicBool,
    ) -> Result<Duration, Error> {
        let losses = trial.check_pages(CheckScope::RanSinceCheck);
        let due = remerge::is_due(trial);
        if !losses && !due {
            return Ok(Duration::ZERO);
        }
        let Some(mut session) = self.begin_session(tell)? else { return Ok(Duration::ZERO) };
        let mut ksmd = Duration::ZERO;
        if losses {
            trial
                .unenroll_unprofitable(&mut session, UnenrollPhase::BetweenRounds)
                .map_err(|error| session.abort(error))?;
        }
        if due {
            match remerge.run(&mut session, trial, stop) {
                Ok(took) => ksmd = took,
                // Another program sets ksmd: its values stay.
                Err(session::Error::SettingOverwritten { .. }) => {}
                Err(error) => return Err(session.abort(error).into()),
            }
        }
        session.undo_all()?.iter().for_each(|remains| tell(ContinuousMergeEvent::UndoFailed(remains)));
        Ok(ksmd)
    }

    /// Begin to change the host. What of a killed run cannot be put back is told. Nothing while somebody else drives.
    fn begin_session(&self, tell: &mut dyn FnMut(ContinuousMergeEvent<'_>)) -> Result<Option<Session<'h>>, Error> {
        match Session::begin(self.host, self.directory) {
            Ok((session, _, left)) => {
                left.iter().for_each(|remains| tell(ContinuousMergeEvent::UndoFailed(remains)));
                Ok(Some(session))
            }
            Err(session::Error::Busy(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

mod remerge;
#[cfg(test)]
mod tests;
