//! `pagefold unmerge`: give processes their own pages again, if there is enough memory.

use crate::command::guest::{GuestControl, GuestSocketQueries, check_single_guest, find_control};
use crate::command::recover::{self, check_ksm_present};
use crate::command_line::{GlobalOptions, ProcessOptions, parse_duration};
use crate::{CommandOutcome, host_selection, output, stop_signal};
use anyhow::bail;
use clap::Args;
use pagefold_base::guard::{MemoryCheck, MemoryVerdict};
use pagefold_base::process::Process;
use pagefold_base::{Bytes, Pages, Reading};
use pagefold_host::{Host, ProcessHandle as Handle};
use pagefold_merge::text::unmerge as text;
use pagefold_merge::unmerge;
use pagefold_merge::unmerge::{
    HostCounters, StillMerged, UnenrollLimits, UnenrollMethod, UnenrollOutcome, UnenrollPlan, UnenrollResult,
    UnenrollTarget,
};
use pagefold_merge::wire::unmerge::{
    BatchesReport, GuardReport, GuardVerdict, HugePagesReport, TakenReport, UnenrollMethodKind, UnenrollState,
    UnmergeOutcomeKind, UnmergeReport, UnmergedProcessReport,
};
use pagefold_output::wire;
use pagefold_output::wire::{ProcessInfo, UnscannedProcessReport};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const EXAMPLES: &str = "\
Examples:
  pagefold unmerge --vm web1 --dry-run     show the memory needed, and whether it fits
  pagefold unmerge --vm web1               by its control socket if known, else by injection
  pagefold unmerge --cgroup /machine.slice --staged --max-wait 5m
  pagefold unmerge --pid 4711 --collapse   and restore its huge pages

The command first counts the frames needed: one for each merged page, less the frames whose last mapping goes, \
and one for each zero page that KSM placed. They must fit into MemAvailable less min_free_kbytes and a hundredth \
of all memory. They must also fit into memory.max and memory.high (v1: memory.limit_in_bytes, \
memory.memsw.limit_in_bytes) of each process's cgroup and its ancestors. Swap does not count. If they do not fit, \
the command refuses and prints the figures. It works in batches of at most 32 MiB and checks memory before each: if \
the rest no longer fits, it stops.

It never writes 2 to /sys/kernel/mm/ksm/run, not even with --all: that unmerges without checking memory, continues \
while the kernel kills processes for lack of memory, and leaves everything enrolled. KSM's settings do not change.

Exit status: 0 nothing is merged any more, 1 it does not fit and nothing was changed, 2 usage error or failure, \
3 something is still merged or could not be read, or a process ended meanwhile.";

/// Arguments of `unmerge`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct UnmergeArguments {
    /// Begin even if not everything fits: smallest processes first, batch by batch, until the next batch does not fit
    ///
    /// A virtual machine that is reached by its control socket is one batch. With --inject it is unenrolled by
    /// injection, range by range.
    #[arg(long)]
    staged: bool,
    /// Maximum time to wait for memory, such as 30s or 5m
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "0")]
    max_wait: Duration,
    /// Continue although it does not fit: processes may be swapped out, throttled or killed; not with --staged or
    /// --max-wait
    #[arg(long, conflicts_with_all = ["staged", "max_wait"])]
    force: bool,
    /// Collapse pages into huge pages again afterwards, where huge pages are allowed
    #[arg(long)]
    collapse: bool,
    /// Show the plan, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// The control socket (QMP) of the one selected virtual machine [default: from its command line]
    #[arg(long, value_name = "PATH", conflicts_with = "inject")]
    qmp: Option<PathBuf>,
    /// Use no control sockets: unenroll virtual machines by injection, like other processes
    #[arg(long)]
    inject: bool,
    /// Rows of the table
    #[arg(long, value_name = "N", default_value_t = 12)]
    top: usize,
    /// Print JSON (see `pagefold schema unmerge`)
    #[arg(long)]
    json: bool,
    // Last, because its help heading applies to all options after it.
    #[command(flatten)]
    targets: ProcessOptions,
}

/// Unmerge, and print the report.
pub fn run(options: &UnmergeArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    if !options.targets.all && !options.targets.selects_some() {
        bail!("no processes are selected: give for example --vm NAME or --pid N, or --all for all enrolled processes");
    }
    if host_selection::is_recording(global) && !options.dry_run {
        bail!("a recording cannot be changed: add --dry-run to see the plan");
    }
    let host = host_selection::open_host(global)?;
    check_ksm_present(&*host)?;
    let started = Instant::now();
    let stop = stop_signal::stop_on_signal()?;
    let mut report = UnmergeJob { options, global, host: &*host }.run_and_report(&stop)?;
    report.seconds = started.elapsed().as_secs_f64();
    if options.json {
        output::print_stdout(&wire::to_json(&report))?;
    } else {
        output::print_stdout(&text::render(
            &report,
            options.top,
            host_selection::permission_remedy(global),
            output::stdout_style(global),
        ))?;
    }
    Ok(match report.outcome {
        UnmergeOutcomeKind::Refused => CommandOutcome::NegativeVerdict,
        UnmergeOutcomeKind::Planned if report.guard.verdict != GuardVerdict::Fits && !options.force => {
            CommandOutcome::NegativeVerdict
        }
        UnmergeOutcomeKind::Partial => CommandOutcome::Partial,
        _ if !report.unscanned_processes.is_empty() => CommandOutcome::Partial,
        _ => CommandOutcome::Done,
    })
}

struct UnmergeJob<'a> {
    options: &'a UnmergeArguments,
    global: &'a GlobalOptions,
    host: &'a dyn Host,
}

impl UnmergeJob<'_> {
    fn run_and_report(&self, stop: &AtomicBool) -> anyhow::Result<UnmergeReport> {
        let options = self.options;
        // Take the session lock before counting, so that no other pagefold merges in between.
        let mut session = if options.dry_run { None } else { Some(recover::begin_session(self.host, self.global)?) };
        let plan = self.make_plan(stop)?;
        let need = plan.frame_need();
        let mut check = plan.check_memory(self.host, &need);
        let batch_counts = plan.count_batches_that_fit(self.host);
        let deadline = Instant::now() + options.max_wait;
        let must_wait = |check: &MemoryCheck| !options.staged && check.verdict != MemoryVerdict::Fits;
        while session.is_some() && must_wait(&check) && Instant::now() < deadline && !is_stop_requested(stop) {
            std::thread::sleep(Duration::from_millis(200));
            check = plan.check_memory(self.host, &need);
        }
        let mut report = self.planned_report(&plan, &check, batch_counts);
        let fits = check.verdict == MemoryVerdict::Fits;
        let Some(session) = session.as_mut().filter(|_| !plan.targets.is_empty()) else { return Ok(report) };
        if !fits && !options.force && !options.staged {
            report.outcome = UnmergeOutcomeKind::Refused;
            report.interrupted = is_stop_requested(stop);
            return Ok(report);
        }
        let limits = UnenrollLimits {
            staged: options.staged,
            force: options.force,
            max_wait: options.max_wait,
            collapse_huge_pages: options.collapse,
            max_pressure_percent: None,
        };
        let outcome = unmerge::execute_plan(session, &plan, limits, stop).map_err(|error| session.abort(error))?;
        add_outcome(&mut report, &plan, &outcome);
        Ok(report)
    }

    fn make_plan(&self, stop: &AtomicBool) -> anyhow::Result<UnenrollPlan> {
        let selection = host_selection::process_selection(&self.options.targets, self.global)?;
        let queries = GuestSocketQueries::new(stop);
        let errors: Mutex<Vec<anyhow::Error>> = Mutex::new(Vec::new());
        let plan = unmerge::make_plan(self.host, &selection, &|handle, process| match self
            .unenroll_method(handle, process, &queries)
        {
            Ok(method) => method,
            Err(error) => {
                errors.lock().expect("no thread panicked").push(error);
                None
            }
        })?;
        check_single_guest(self.options.qmp.as_deref(), plan.targets.iter().map(|target| &target.process))?;
        if let Some(error) = errors.into_inner().expect("no thread panicked").into_iter().next() {
            return Err(error);
        }
        host_selection::check_any_seen(
            self.host,
            !plan.targets.is_empty() || plan.not_enrolled > 0,
            &selection,
            &plan.unscanned,
            self.global,
        )?;
        Ok(plan)
    }

    /// The method to unenroll a virtual machine.
    fn unenroll_method(
        &self,
        handle: &dyn Handle,
        process: &Process,
        queries: &GuestSocketQueries<'_>,
    ) -> anyhow::Result<Option<UnenrollMethod>> {
        let UnmergeArguments { qmp, inject, .. } = self.options;
        Ok(match find_control(handle, process, qmp.as_deref(), *inject, self.global, queries)? {
            GuestControl::Unused => None,
            GuestControl::Unreachable(why) => Some(UnenrollMethod::UnreachableGuest(why)),
            GuestControl::Reachable(socket, backends) => {
                let marked = backends.into_iter().filter(|backend| backend.is_mergeable && !backend.is_shared);
                let backends: Vec<_> = marked.map(|backend| (backend.path, backend.size)).collect();
                (!backends.is_empty()).then_some(UnenrollMethod::Guest { socket, backends })
            }
        })
    }

    fn planned_report(
        &self,
        plan: &UnenrollPlan,
        check: &MemoryCheck,
        (fitting, total): (usize, usize),
    ) -> UnmergeReport {
        UnmergeReport {
            schema: "pagefold.unmerge/1",
            host: self.host.describe(),
            page_size: self.host.page_size().bytes(),
            seconds: 0.0,
            outcome: if plan.targets.is_empty() { UnmergeOutcomeKind::Nothing } else { UnmergeOutcomeKind::Planned },
            guard: GuardReport::from_judgement(check),
            batches: BatchesReport { total: total as u64, fitting: fitting as u64 },
            stopped_by_guard: None,
            forced: self.options.force,
            interrupted: false,
            taken: None,
            processes: plan.targets.iter().map(process_report).collect(),
            not_enrolled: plan.not_enrolled as u64,
            unscanned_processes: plan
                .unscanned
                .iter()
                .map(|process| UnscannedProcessReport::new(process.pid.0, process.comm.clone(), &process.why))
                .collect(),
        }
    }
}

fn is_stop_requested(stop: &AtomicBool) -> bool {
    stop.load(Ordering::Relaxed)
}

fn process_report(target: &UnenrollTarget) -> UnmergedProcessReport {
    UnmergedProcessReport {
        process: ProcessInfo::from_process(&target.process, None),
        method: match target.method {
            UnenrollMethod::WholeProcess => UnenrollMethodKind::Whole,
            UnenrollMethod::MarkedRegions | UnenrollMethod::Ranges(_) => UnenrollMethodKind::Regions,
            UnenrollMethod::Guest { .. } => UnenrollMethodKind::Qmp,
            UnenrollMethod::UnreachableGuest(_) => UnenrollMethodKind::None,
        },
        merged_pages: target.merged_pages().0,
        zero_pages: target.max_zero_pages.0,
        freed_frames: target.freed_frames().0,
        estimate_reason: target.frames_readable.as_ref().err().map(ToString::to_string),
        batches: target.batches.len() as u64,
        batches_unenrolled: 0,
        state: UnenrollState::Planned,
        merged_pages_after: None,
        zero_pages_after: None,
        uncovered_pages: None,
        longest_stop_ms: None,
        huge: None,
        error: None,
    }
}

/// Add the outcome to the report.
fn add_outcome(report: &mut UnmergeReport, plan: &UnenrollPlan, outcome: &UnenrollOutcome) {
    let oom_kills = (outcome.before.oom_kills.clone(), outcome.after.oom_kills.clone());
    for ((target, result), process) in plan.targets.iter().zip(&outcome.targets).zip(&mut report.processes) {
        process.batches_unenrolled = result.batches_done as u64;
        process.state = unenroll_state(result);
        if let Some(Ok(StillMerged { merged_pages, zero_pages, uncovered_pages })) = result.still_merged {
            (process.merged_pages_after, process.zero_pages_after) = (Some(merged_pages.0), Some(zero_pages.0));
            process.uncovered_pages =
                Some(uncovered_pages.0).filter(|_| matches!(target.method, UnenrollMethod::Guest { .. }));
        }
        process.longest_stop_ms = result.stop_durations.iter().max().map(|stop| stop.as_secs_f64() * 1e3);
        process.huge = result.huge_before_and_after_collapse.map(|(unmerged, collapsed)| HugePagesReport {
            before: target.anon_huge.0,
            unmerged: unmerged.0,
            collapsed: collapsed.0,
        });
        let missed_note = result.missed_ranges.first().map(|(range, why)| {
            format!("{} ranges were not unenrolled, the first is {range}: {why}", result.missed_ranges.len())
        });
        process.error = if result.ended {
            Some(exit_note(&oom_kills.0, &oom_kills.1))
        } else {
            result.error.clone().or(missed_note)
        };
    }
    let is_success = |result: &UnenrollResult| result.is_complete() && !result.ended;
    report.outcome =
        if outcome.targets.iter().all(is_success) { UnmergeOutcomeKind::Done } else { UnmergeOutcomeKind::Partial };
    report.stopped_by_guard = outcome.stopped_by_guard.as_ref().map(GuardReport::from_judgement);
    report.interrupted = outcome.interrupted;
    let size = report.page_size;
    let HostCounters { available, anon, cow_ksm, .. } = &outcome.before;
    let after = &outcome.after;
    let growth = |before: &Reading<Bytes>, after: &Reading<Bytes>| {
        let (before, after) = before.as_ref().ok().zip(after.as_ref().ok())?;
        Some(after.0.cast_signed() - before.0.cast_signed())
    };
    let merged_pages: Pages = plan.targets.iter().map(UnenrollTarget::merged_pages).sum();
    let predicted = plan.frame_need().host;
    report.taken = Some(TakenReport {
        predicted: predicted.0 * size,
        unenrolled: outcome.planned_frames(plan).0 * size,
        anon_pages: growth(anon, &after.anon),
        mem_available: growth(&after.available, available),
        mem_available_before: available.as_ref().ok().map(|bytes| bytes.0),
        mem_available_after: after.available.as_ref().ok().map(|bytes| bytes.0),
        copies: cow_ksm.as_ref().ok().zip(after.cow_ksm.as_ref().ok()).map(|(before, after)| after - before),
        copies_predicted: merged_pages.0,
    });
}

/// The note for a process that ended, with the OOM killer's counter before and after.
fn exit_note(oom_kills_before: &Reading<u64>, oom_kills_after: &Reading<u64>) -> String {
    let kills = oom_kills_before
        .as_ref()
        .ok()
        .zip(oom_kills_after.as_ref().ok())
        .map_or(0, |(before, after)| after.saturating_sub(*before));
    let ended = "it ended before it was unmerged";
    if kills == 0 {
        return ended.to_owned();
    }
    format!("{ended}; the OOM killer killed processes meanwhile (oom_kill grew by {kills}): see the kernel log")
}

fn unenroll_state(result: &UnenrollResult) -> UnenrollState {
    match result {
        result if result.ended => UnenrollState::Ended,
        result if result.is_complete() => UnenrollState::Unenrolled,
        result if result.batches_done > 0 || result.all_unenrolled => UnenrollState::Partial,
        UnenrollResult { error: Some(_), .. } => UnenrollState::Failed,
        _ => UnenrollState::Untouched,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_that_ended_names_the_oom_killer_only_if_it_acted() {
        let note = |before, after| exit_note(&before, &after);
        assert!(note(Ok(3), Ok(5)).contains("oom_kill grew by 2"));
        for (before, after) in [(Ok(3), Ok(3)), (Ok(3), Err(pagefold_base::Absent::NotOnThisKernel))] {
            assert!(!note(before, after).contains("OOM"));
        }
    }
}
