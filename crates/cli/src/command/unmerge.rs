//! `pagefold unmerge`: gives processes pages of their own again, if the memory for it is there.

use crate::arguments::{Global, Targets, duration};
use crate::command::guest::{Asked, Control, control, is_of_one};
use crate::command::recover::{self, needs_ksm};
use crate::{Outcome, output, progress, source};
use anyhow::bail;
use clap::Args;
use pagefold_base::guard::{Judgement, Verdict};
use pagefold_base::process::Process;
use pagefold_base::{Bytes, Pages, Reading};
use pagefold_host::{Host, Process as Handle};
use pagefold_merge::text::unmerge as text;
use pagefold_merge::unmerge;
use pagefold_merge::unmerge::{Done, Figures, Limits, Plan, Remains, Target, Way, Withdrawn};
use pagefold_merge::wire::unmerge::{
    GuardReport, HugeReport, PartsReport, TakenReport, UnmergeReport, UnmergedProcess,
};
use pagefold_output::wire;
use pagefold_output::wire::{NotSeen, Who};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const EXAMPLES: &str = "\
Examples:
  pagefold unmerge --vm web1 --dry-run     what it takes, and whether it fits
  pagefold unmerge --vm web1               by its control socket if that is known, else from within
  pagefold unmerge --cgroup /machine.slice --staged --wait 5m
  pagefold unmerge --pid 4711 --collapse   and its huge pages back

It first counts the frames that are needed: a frame for each merged page, less the frames whose last mapping goes, \
and one for each page of zeros that KSM placed. These must fit into MemAvailable less min_free_kbytes and a hundredth \
of all memory, and into memory.max, memory.high (v1: memory.limit_in_bytes, memory.memsw.limit_in_bytes) of each \
process's cgroup and of all above it. Swap is no room. What does not fit is refused with the figures. It goes part by \
part, 32 MiB at most, and asks again before each: where the rest no longer fits, it stops.

Nothing is ever unmerged by writing 2 to /sys/kernel/mm/ksm/run, also not by --all: that asks nobody whether there is \
memory, goes on while processes are killed for it, and leaves everything enrolled. ksmd's settings stay as they are.

Exit status: 0 nothing is merged any more, 1 it does not fit and nothing was changed, 2 usage or failure, \
3 something is still merged or could not be seen, or a process ended meanwhile.";

/// Arguments of `unmerge`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Options {
    /// Begin though not all of it fits: least first, as long as the next part fits; stop where one does not
    ///
    /// A virtual machine that is reached by its control socket goes all at once: it is one part. With --inject it is
    /// withdrawn from within, and range by range.
    #[arg(long)]
    staged: bool,
    /// Wait so long for memory, such as 30s or 5m
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "0")]
    wait: Duration,
    /// Go on though it does not fit: processes may be swapped out, throttled or killed
    #[arg(long, conflicts_with_all = ["staged", "wait"])]
    force: bool,
    /// Put huge pages together again afterwards, where they are allowed
    #[arg(long)]
    collapse: bool,
    /// Say what would be done, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// The control socket of the one virtual machine that is chosen
    #[arg(long, value_name = "PATH", conflicts_with = "inject")]
    qmp: Option<PathBuf>,
    /// Leave control sockets alone: withdraw virtual machines from within as all others
    #[arg(long)]
    inject: bool,
    /// Rows of the table
    #[arg(long, value_name = "N", default_value_t = 12)]
    top: usize,
    /// Print JSON (see `pagefold schema unmerge`)
    #[arg(long)]
    json: bool,
    // Last, because its heading in the help holds for all that follows.
    #[command(flatten)]
    targets: Targets,
}

/// Unmerge and say what came of it.
pub fn run(options: &Options, global: &Global) -> anyhow::Result<Outcome> {
    if !is_chosen(&options.targets) {
        bail!("say which processes, for example --vm NAME or --pid N; --all means every one that is enrolled");
    }
    if global.host != "live" && !options.dry_run {
        bail!("a recording cannot be changed: add --dry-run to see what it would have taken");
    }
    let host = source::open(global)?;
    needs_ksm(&*host)?;
    let started = Instant::now();
    let stop = progress::stop_on_signal()?;
    let mut report = Work { options, global, host: &*host }.report(&stop)?;
    report.seconds = started.elapsed().as_secs_f64();
    if options.json {
        output::print(&wire::json(&report))?;
    } else {
        output::print(&text::render(&report, options.top, source::remedy(global), output::style(global)))?;
    }
    Ok(match report.outcome {
        "refused" => Outcome::VerdictNo,
        "planned" if report.guard.verdict != "fits" && !options.force => Outcome::VerdictNo,
        "partial" => Outcome::Partial,
        _ if !report.not_seen.is_empty() => Outcome::Partial,
        _ => Outcome::Done,
    })
}

fn is_chosen(targets: &Targets) -> bool {
    let Targets { pid, name, cgroup, user, vm, all } = targets;
    *all || !(pid.is_empty() && name.is_empty() && cgroup.is_empty() && user.is_empty() && vm.is_empty())
}

struct Work<'a> {
    options: &'a Options,
    global: &'a Global,
    host: &'a dyn Host,
}

impl Work<'_> {
    fn report(&self, stop: &AtomicBool) -> anyhow::Result<UnmergeReport> {
        let options = self.options;
        // Taken before anything is counted, so that nobody merges in between.
        let mut session = if options.dry_run { None } else { Some(recover::begin(self.host, self.global)?) };
        let plan = self.plan(stop)?;
        let need = plan.need();
        let mut judgement = plan.judge(self.host, &need);
        let parts = plan.affordable(self.host);
        let deadline = Instant::now() + options.wait;
        let patient = |judgement: &Judgement| !options.staged && judgement.verdict != Verdict::Fits;
        while session.is_some() && patient(&judgement) && Instant::now() < deadline && !is_set(stop) {
            std::thread::sleep(Duration::from_millis(200));
            judgement = plan.judge(self.host, &need);
        }
        let mut report = self.planned(&plan, &judgement, parts);
        let fits = judgement.verdict == Verdict::Fits;
        let Some(session) = session.as_mut().filter(|_| !plan.targets.is_empty()) else { return Ok(report) };
        if !fits && !options.force && !options.staged {
            report.outcome = "refused";
            report.interrupted = is_set(stop);
            return Ok(report);
        }
        let limits = Limits {
            staged: options.staged,
            force: options.force,
            wait: options.wait,
            collapse: options.collapse,
            pressure: None,
        };
        let done = unmerge::carry_out(session, &plan, limits, stop).map_err(|error| session.give_up(error))?;
        carried_out(&mut report, &plan, &done);
        Ok(report)
    }

    fn plan(&self, stop: &AtomicBool) -> anyhow::Result<Plan> {
        let selection = source::selection(&self.options.targets, self.global)?;
        let asked = Asked::new(stop);
        let failed: Mutex<Vec<anyhow::Error>> = Mutex::new(Vec::new());
        let plan = unmerge::plan(self.host, &selection, &|handle, process| match self.way(handle, process, &asked) {
            Ok(way) => way,
            Err(error) => {
                failed.lock().expect("no thread panicked").push(error);
                None
            }
        })?;
        is_of_one(self.options.qmp.as_deref(), plan.targets.iter().map(|target| &target.process))?;
        if let Some(error) = failed.into_inner().expect("no thread panicked").into_iter().next() {
            return Err(error);
        }
        source::seen(!plan.targets.is_empty() || plan.idle > 0, &selection, &plan.unseen, self.global)?;
        Ok(plan)
    }

    /// How a guest is reached.
    fn way(&self, handle: &dyn Handle, process: &Process, asked: &Asked<'_>) -> anyhow::Result<Option<Way>> {
        let Options { qmp, inject, .. } = self.options;
        Ok(match control(handle, process, qmp.as_deref(), *inject, self.global, asked)? {
            Control::None => None,
            Control::Unreachable(why) => Some(Way::Unreachable(why)),
            Control::Answers(socket, backends) => {
                let marked = backends.into_iter().filter(|backend| backend.merge && !backend.share);
                let backends: Vec<_> = marked.map(|backend| (backend.path, backend.size)).collect();
                (!backends.is_empty()).then_some(Way::Guest { socket, backends })
            }
        })
    }

    fn planned(&self, plan: &Plan, judgement: &Judgement, (fit, all): (usize, usize)) -> UnmergeReport {
        UnmergeReport {
            schema: "pagefold.unmerge/1",
            host: self.host.describe(),
            page_size: self.host.page_size().bytes(),
            seconds: 0.0,
            outcome: if plan.targets.is_empty() { "nothing" } else { "planned" },
            guard: GuardReport::of(judgement),
            parts: PartsReport { all: all as u64, fit: fit as u64 },
            stopped: None,
            forced: self.options.force,
            interrupted: false,
            taken: None,
            processes: plan.targets.iter().map(process).collect(),
            not_enrolled: plan.idle as u64,
            not_seen: plan
                .unseen
                .iter()
                .map(|unseen| NotSeen::of(unseen.pid.0, unseen.comm.clone(), &unseen.why))
                .collect(),
        }
    }
}

fn is_set(stop: &AtomicBool) -> bool {
    stop.load(Ordering::Relaxed)
}

fn process(target: &Target) -> UnmergedProcess {
    UnmergedProcess {
        who: Who::of(&target.process, None),
        way: match target.way {
            Way::Whole => "whole",
            Way::Regions | Way::Ranges(_) => "regions",
            Way::Guest { .. } => "qmp",
            Way::Unreachable(_) => "none",
        },
        merged_pages: target.merged().0,
        zero_pages: target.zeros.0,
        returned_pages: target.returned().0,
        estimated: target.exact.as_ref().err().map(ToString::to_string),
        parts: target.parts.len() as u64,
        parts_withdrawn: 0,
        state: "planned",
        merged_pages_after: None,
        zero_pages_after: None,
        beside_pages: None,
        longest_stop_ms: None,
        huge: None,
        error: None,
    }
}

/// Enter what was done.
fn carried_out(report: &mut UnmergeReport, plan: &Plan, done: &Done) {
    let figures = (done.before.oom_kills.clone(), done.after.oom_kills.clone());
    for ((target, done), process) in plan.targets.iter().zip(&done.targets).zip(&mut report.processes) {
        process.parts_withdrawn = done.parts as u64;
        process.state = state(done);
        if let Some(Ok(Remains { merged, zeros, beside })) = done.remains {
            (process.merged_pages_after, process.zero_pages_after) = (Some(merged.0), Some(zeros.0));
            process.beside_pages = Some(beside.0).filter(|_| matches!(target.way, Way::Guest { .. }));
        }
        process.longest_stop_ms = done.stops.iter().max().map(|stop| stop.as_secs_f64() * 1e3);
        process.huge = done.huge.map(|(unmerged, collapsed)| HugeReport {
            before: target.anon_huge.0,
            unmerged: unmerged.0,
            collapsed: collapsed.0,
        });
        let missed = done
            .missed
            .first()
            .map(|(range, why)| format!("{} ranges were not taken, the first {range}: {why}", done.missed.len()));
        process.error = if done.ended { Some(ended(&figures.0, &figures.1)) } else { done.error.clone().or(missed) };
    }
    let succeeded = |done: &Withdrawn| done.is_whole() && !done.ended;
    report.outcome = if done.targets.iter().all(succeeded) { "done" } else { "partial" };
    report.stopped = done.stopped.as_ref().map(GuardReport::of);
    report.interrupted = done.interrupted;
    let size = report.page_size;
    let Figures { available, anon, cow_ksm, .. } = &done.before;
    let after = &done.after;
    let grown = |before: &Reading<Bytes>, after: &Reading<Bytes>| {
        let (before, after) = before.as_ref().ok().zip(after.as_ref().ok())?;
        Some(after.0.cast_signed() - before.0.cast_signed())
    };
    let merged: Pages = plan.targets.iter().map(Target::merged).sum();
    let predicted = plan.need().host;
    report.taken = Some(TakenReport {
        predicted: predicted.0 * size,
        withdrawn: done.planned(plan).0 * size,
        anon_pages: grown(anon, &after.anon),
        mem_available: grown(&after.available, available),
        mem_available_before: available.as_ref().ok().map(|bytes| bytes.0),
        mem_available_after: after.available.as_ref().ok().map(|bytes| bytes.0),
        copies: cow_ksm.as_ref().ok().zip(after.cow_ksm.as_ref().ok()).map(|(before, after)| after - before),
        copies_predicted: merged.0,
    });
}

/// What to say of a process that ended, by the OOM killer's counter before and after.
fn ended(before: &Reading<u64>, after: &Reading<u64>) -> String {
    let kills =
        before.as_ref().ok().zip(after.as_ref().ok()).map_or(0, |(before, after)| after.saturating_sub(*before));
    let ended = "it ended before it was unmerged";
    if kills == 0 {
        return ended.to_owned();
    }
    format!("{ended}; the OOM killer acted on this host meanwhile (oom_kill grew by {kills}): see the kernel log")
}

fn state(done: &Withdrawn) -> &'static str {
    match done {
        done if done.ended => "ended",
        done if done.is_whole() => "withdrawn",
        done if done.parts > 0 || done.withdrawn => "partial",
        Withdrawn { error: Some(_), .. } => "failed",
        _ => "untouched",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_that_ended_names_the_oom_killer_only_if_it_acted() {
        let said = |before, after| ended(&before, &after);
        assert!(said(Ok(3), Ok(5)).contains("oom_kill grew by 2"));
        for (before, after) in [(Ok(3), Ok(3)), (Ok(3), Err(pagefold_base::Absent::NotOnThisKernel))] {
            assert!(!said(before, after).contains("OOM"));
        }
    }
}
