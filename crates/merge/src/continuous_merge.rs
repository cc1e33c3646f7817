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
//! bytes. One scan of the enrolled ranges merges those again at once (`remerge`): a round needs a census and comes
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
        report_event: impl FnMut(ContinuousMergeEvent<'_>),
        stop: &AtomicBool,
    ) -> Result<(), Error> {
        let mut monitor = MergeMonitor::new(self.host);
        monitor.set_ksmd_share(self.merge_options.ksmd_cpu_share);
        self.run_with_monitor(&mut monitor, list_pids, report_event, stop)
    }

    /// [`Self::run`] with a monitor that may already watch pages of an earlier merge.
    fn run_with_monitor(
        &self,
        monitor: &mut MergeMonitor<'h>,
        mut list_pids: impl FnMut() -> Vec<Pid>,
        mut report_event: impl FnMut(ContinuousMergeEvent<'_>),
        stop: &AtomicBool,
    ) -> Result<(), Error> {
        let mut ages = StableAges::new(pagefold_census::page_hasher(self.host)?, self.host.now());
        let mut remerge = Remerge::new(self.host, self.merge_options.ksmd_cpu_share);
        let min_age = stable_age(self.host.page_size().bytes());
        // A program that starts fills its memory first.
        let (mut pause, mut has_recorded) = (min_age, false);
        loop {
            let pause_start = self.host.now();
            let (mut last_check, mut check_interval) = (pause_start, remerge::MIN_CHECK_INTERVAL);
            let mut pids = list_pids();
            while elapsed_since(self.host, pause_start) < pause && !pids.is_empty() && !stop.load(Ordering::Relaxed) {
                self.host.sleep(STOP_POLL_INTERVAL);
                pids = list_pids();
                if elapsed_since(self.host, last_check) >= check_interval {
                    let cpu_before = self.host.own_cpu_time();
                    let ksmd_cpu = self.check_merged_pages(monitor, &mut remerge, &mut report_event, stop)?;
                    let own_pause = self.host.own_cpu_time().saturating_sub(cpu_before) * PAUSE_TO_CPU_TIME_RATIO;
                    (last_check, check_interval) = (
                        self.host.now(),
                        remerge::MIN_CHECK_INTERVAL.max(own_pause).max(remerge.pause_after(ksmd_cpu)),
                    );
                }
            }
            if pids.is_empty() || stop.load(Ordering::Relaxed) {
                monitor.failed_changes().for_each(|failed| report_event(ContinuousMergeEvent::UnenrollFailed(failed)));
                return Ok(());
            }
            let cpu_before = self.host.own_cpu_time();
            self.run_round(pids, monitor, &mut ages, &mut remerge, &mut report_event, stop)?;
            // The census's memory is in the job's cgroup and would reduce the savings.
            trim_free_memory();
            // The first round only records contents, and counts together with the second.
            let cpu_pause = if has_recorded {
                self.host.own_cpu_time().saturating_sub(cpu_before) * PAUSE_TO_CPU_TIME_RATIO
            } else {
                min_age
            };
            pause = cpu_pause.max(min_age);
            has_recorded = true;
        }
    }

    /// One merge, if it is profitable and no other program drives the host.
    fn run_round(
        &self,
        pids: Vec<Pid>,
        monitor: &mut MergeMonitor<'h>,
        ages: &mut StableAges,
        remerge: &mut Remerge<'h>,
        report_event: &mut dyn FnMut(ContinuousMergeEvent<'_>),
        stop: &AtomicBool,
    ) -> Result<(), Error> {
        let started = self.host.now();
        ages.retain_processes(|process| pids.contains(&process.pid));
        let selection = ProcessSelection { pids, ..ProcessSelection::default() };
        let excluded_ranges =
            monitor.unenrolled().iter().map(|(&process, unenrolled)| (process, unenrolled.all_ranges())).collect();
        let request = PlanRequest { selection, excluded_ranges, ..self.plan_request.clone() };
        let progress = pagefold_census::ScanProgress::default();
        let PreparedPlan { plan, probes, .. } =
            prepare_plan(self.host, &request, self.exclusion_reason, Some((ages, self.host.now())), &progress, stop)?;
        if plan.targets.is_empty() {
            return self.check_merged_pages(monitor, remerge, report_event, stop).map(drop);
        }
        let Some(mut session) = self.begin_session(report_event)? else { return Ok(()) };
        let progress = merge::MergeProgress::default();
        let planned = PreparedMerge { plan, probes, started_at: started };
        let outcome = execute_plan(&mut session, planned, &self.merge_options, monitor, &progress, stop)
            .map_err(|error| session.abort(error))?;
        report_event(ContinuousMergeEvent::RoundEnded(&outcome));
        Ok(())
    }

    /// Check merged pages: unenroll unstable ranges, and merge rewritten pages again. While another program drives this
    /// host this does nothing. Returns the CPU time that ksmd used for it.
    fn check_merged_pages(
        &self,
        monitor: &mut MergeMonitor<'h>,
        remerge: &mut Remerge<'h>,
        report_event: &mut dyn FnMut(ContinuousMergeEvent<'_>),
        stop: &AtomicBool,
    ) -> Result<Duration, Error> {
        let has_unstable = monitor.check_pages(CheckScope::RanSinceCheck);
        let remerge_is_due = remerge::is_due(monitor);
        if !has_unstable && !remerge_is_due {
            return Ok(Duration::ZERO);
        }
        let Some(mut session) = self.begin_session(report_event)? else { return Ok(Duration::ZERO) };
        let mut ksmd_cpu = Duration::ZERO;
        if has_unstable {
            monitor
                .unenroll_unprofitable(&mut session, UnenrollPhase::BetweenRounds)
                .map_err(|error| session.abort(error))?;
        }
        if remerge_is_due {
            match remerge.run(&mut session, monitor, stop) {
                Ok(cpu_time) => ksmd_cpu = cpu_time,
                // Another program sets ksmd: its values stay.
                Err(session::Error::SettingOverwritten { .. }) => {}
                Err(error) => return Err(session.abort(error).into()),
            }
        }
        session.undo_all()?.iter().for_each(|failed_undo| report_event(ContinuousMergeEvent::UndoFailed(failed_undo)));
        Ok(ksmd_cpu)
    }

    /// Begin a session on the host. Changes of a killed run that cannot be undone are reported. Returns `None` while
    /// another program drives the host.
    fn begin_session(
        &self,
        report_event: &mut dyn FnMut(ContinuousMergeEvent<'_>),
    ) -> Result<Option<Session<'h>>, Error> {
        match Session::begin(self.host, self.directory, ResourceClass::Ksm) {
            Ok((session, _, failed_undos)) => {
                failed_undos.iter().for_each(|failed_undo| report_event(ContinuousMergeEvent::UndoFailed(failed_undo)));
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
