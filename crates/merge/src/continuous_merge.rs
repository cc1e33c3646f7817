//! Repeats merging while programs run that keep allocating memory.
//!
//! Each round is a whole merge: census, plan, apply, verify, undo of temporary changes. Pages that are not stable for
//! long enough wait for a later round ([`StableAges`]), so the first round merges nothing of a program that has just
//! started. Ranges that did not stay merged in one round are left out of the next ones. The second round starts once
//! the pages that the first one recorded can be old enough. The pause after any other round is a multiple of the CPU
//! time that the round took, and at least the stable age. Watching memory that does not change therefore costs almost
//! no CPU.
//!
//! Between rounds merged pages are checked every two seconds. Programs sometimes rewrite many of them with the same
//! bytes. One scan of the enrolled ranges merges those again at once ([`remerge`]): a round needs a census and comes
//! too late for them. Otherwise ksmd stays as the host had it, so every COW break is seen. Ranges that are written too
//! often are unenrolled. The criterion is ksmd's CPU limit
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
use pagefold_host::resource::ResourceClass;
use pagefold_host::transaction::session;
use pagefold_host::transaction::session::{FailedUndo, Session};
use pagefold_host::{Host, elapsed_since};
use pagefold_sys::allocator::trim_free_memory;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The pause after a round, as a multiple of the CPU time that it took: except in the first rounds, pagefold's own
/// share stays below a fortieth of one CPU.
const PAUSE_TO_CPU_TIME_RATIO: u32 = 40;

/// How often to check whether to continue.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Why a round failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The census failed.
    #[error(transparent)]
    Census(#[from] pagefold_census::Error),
    /// The host cannot be changed.
    #[error(transparent)]
    Session(#[from] session::Error),
}

/// Events for the caller.
#[derive(Clone, Copy, Debug)]
pub enum ContinuousMergeEvent<'t> {
    /// The outcome of a round that had something to merge.
    RoundEnded(&'t MergeOutcome),
    /// A temporary change that could not be undone, from a killed run or between rounds.
    UndoFailed(&'t FailedUndo),
    /// A range that could not be unenrolled until the end, in spite of retries.
    UnenrollFailed(&'t FailedChange),
}

/// Repeated merging of processes on a host.
pub struct ContinuousMerge<'h, 'a> {
    /// The host.
    pub host: &'h dyn Host,
    /// The directory of lock and journal.
    pub directory: &'a Path,
    /// The request for each round's plan; the processes come from `list_pids`, and the excluded ranges from the
    /// monitor.
    pub plan_request: PlanRequest,
    /// How a plan is executed.
    pub merge_options: merge::MergeOptions,
    /// Returns why a process must not be enrolled, or nothing.
    pub exclusion_reason: &'a dyn Fn(&Process) -> Option<String>,
}

impl<'h> ContinuousMerge<'h, '_> {
    /// Merge the processes that `list_pids` returns, until it returns none or `stop` is set. While another program
    /// drives this host, a round is skipped.
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

    /// The same, with a monitor that may already watch pages of an earlier merge.
    fn run_with_monitor(
        &self,
        trial: &mut MergeMonitor<'h>,
        mut members: impl FnMut() -> Vec<Pid>,
        mut tell: impl FnMut(ContinuousMergeEvent<'_>),
        stop: &AtomicBool,
    ) -> Result<(), Error> {
        let mut ages = StableAges::new(self.host.page_size(), self.host.now())?;
        let mut remerge = Remerge::new(self.host, self.merge_options.ksmd_cpu_share);
        let ripens = stable_age(self.host.page_size().bytes());
        // A program that starts fills its memory first.
        let (mut pause, mut noted) = (ripens, false);
        loop {
            let rested = self.host.now();
            let (mut looked, mut again) = (rested, remerge::MIN_CHECK_INTERVAL);
            let mut pids = members();
            while elapsed_since(self.host, rested) < pause && !pids.is_empty() && !stop.load(Ordering::Relaxed) {
                self.host.sleep(STOP_POLL_INTERVAL);
                pids = members();
                if elapsed_since(self.host, looked) >= again {
                    let before = self.host.own_cpu_time();
                    let ksmd = self.check_merged_pages(trial, &mut remerge, &mut tell, stop)?;
                    let own = self.host.own_cpu_time().saturating_sub(before) * PAUSE_TO_CPU_TIME_RATIO;
                    (looked, again) =
                        (self.host.now(), remerge::MIN_CHECK_INTERVAL.max(own).max(remerge.pause_after(ksmd)));
                }
            }
            if pids.is_empty() || stop.load(Ordering::Relaxed) {
                trial.failed_changes().for_each(|refused| tell(ContinuousMergeEvent::UnenrollFailed(refused)));
                return Ok(());
            }
            let before = self.host.own_cpu_time();
            self.run_round(pids, trial, &mut ages, &mut remerge, &mut tell, stop)?;
            // The census's memory is in the job's cgroup and would reduce the savings.
            trim_free_memory();
            // The first round only records contents, and counts together with the second.
            let rest =
                if noted { self.host.own_cpu_time().saturating_sub(before) * PAUSE_TO_CPU_TIME_RATIO } else { ripens };
            pause = rest.max(ripens);
            noted = true;
        }
    }

    /// One merge, if it is profitable and no other program drives the host.
    fn run_round(
        &self,
        pids: Vec<Pid>,
        trial: &mut MergeMonitor<'h>,
        ages: &mut StableAges,
        remerge: &mut Remerge<'h>,
        tell: &mut dyn FnMut(ContinuousMergeEvent<'_>),
        stop: &AtomicBool,
    ) -> Result<(), Error> {
        let started = self.host.now();
        ages.retain_processes(|process| pids.contains(&process.pid));
        let selection = ProcessSelection { pids, ..ProcessSelection::default() };
        let excluded_ranges =
            trial.unenrolled().iter().map(|(&process, withdrawn)| (process, withdrawn.all_ranges())).collect();
        let request = PlanRequest { selection, excluded_ranges, ..self.plan_request.clone() };
        let progress = pagefold_census::ScanProgress::default();
        let PreparedPlan { plan, probes, .. } =
            prepare_plan(self.host, &request, self.exclusion_reason, Some((ages, self.host.now())), &progress, stop)?;
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

    /// Check merged pages: unenroll unstable ranges, and merge rewritten pages again. While another program drives this
    /// host it does nothing. Returns the CPU time that ksmd used for it.
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

    /// Begin a session on the host. Changes of a killed run that cannot be undone are reported. Returns `None` while
    /// another program drives the host.
    fn begin_session(&self, tell: &mut dyn FnMut(ContinuousMergeEvent<'_>)) -> Result<Option<Session<'h>>, Error> {
        match Session::begin(self.host, self.directory, ResourceClass::Ksm) {
            Ok((session, _, left)) => {
                left.iter().for_each(|remains| tell(ContinuousMergeEvent::UndoFailed(remains)));
                Ok(Some(session))
            }
            Err(session::Error::Busy { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

mod remerge;
#[cfg(test)]
mod tests;
