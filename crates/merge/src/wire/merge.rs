//! The plan and the outcome of a merge, on the wire.

use crate::decide::outcome::{EnrollChange, MergeEnd, MergeOutcome};
use crate::decide::plan::{EnrollMethod, MergePlan, PlanTarget};
use crate::decide::prediction_error::{FigureDifference, PlanFigure};
use pagefold_base::savings::MergeEffect;
use pagefold_base::{PageSize, Pages};
use pagefold_census::results::{Census, UnscannedProcess};
use pagefold_output::wire::{ProcessInfo, UnscannedProcessReport};
use schemars::JsonSchema;
use serde::Serialize;
use std::time::Duration;

/// Maximum points of the timeline.
const MAX_TIMELINE_POINTS: usize = 400;

/// The result of `pagefold merge`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct MergeReport {
    /// `pagefold.merge/1`.
    pub schema: &'static str,
    /// The host: `this host`.
    pub host: String,
    /// Bytes of a page.
    pub page_size: u64,
    /// Bytes of a huge page.
    pub huge_page_size: u64,
    /// The processes that the census scanned.
    pub processes: u64,
    /// Processes of other trust domains that are enrolled already. They were scanned too; pages with the same contents
    /// are in no plan.
    pub foreign_processes: u64,
    /// Whether enrolled processes may exist that are not visible from here: those outside of a container, those of
    /// other users without root, and before Linux 6.14 those that ksmd has not visited.
    pub enrolled_may_be_hidden: bool,
    /// The plan.
    pub plan: PlanReport,
    /// The outcome; absent for a dry run, and if there is nothing to merge.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outcome: Option<OutcomeReport>,
    /// Chosen processes that could not be scanned.
    pub unscanned_processes: Vec<UnscannedProcessReport>,
}

/// The ranges to enroll, and the prediction.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct PlanReport {
    /// Whether processes are enrolled whole.
    pub whole_processes: bool,
    /// The processes.
    pub targets: Vec<TargetReport>,
    /// Processes, targets or not, of which ranges are unenrolled while ksmd works: unprofitable ranges that they
    /// enrolled themselves.
    pub temporary_unenrolls: Vec<TemporaryUnenrollReport>,
    /// Processes that are not enrolled on purpose.
    pub skipped: Vec<SkippedProcessReport>,
    /// Predicted savings.
    pub savings: MergeSavings,
    /// Pages that should merge, kept copies included.
    pub merging_pages: u64,
    /// Number of ranges.
    pub ranges: u64,
    /// Maximum number of memory regions that the ranges add to the processes.
    pub regions_added: u64,
    /// Predicted CPU seconds of ksmd.
    pub ksmd_seconds: f64,
    /// Predicted seconds from enrolling until merged.
    pub wall_seconds: f64,
}

/// A process of the plan.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct TargetReport {
    /// The process.
    #[serde(flatten)]
    pub process: ProcessInfo,
    /// How it is enrolled: `ranges` or `whole` from within, by injection; `qmp` by QEMU's control socket; `none` where
    /// that was found but is unusable.
    pub method: &'static str,
    /// Why it is not enrolled, for `none`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Pages that ksmd has to scan.
    pub pages: u64,
    /// Pages that should merge, zero pages included.
    pub merging_pages: u64,
    /// Zero pages.
    pub zero_pages: u64,
    /// The enrolled ranges.
    pub ranges: Vec<RangeReport>,
}

/// A range of the plan.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct RangeReport {
    /// Its first address.
    pub start: u64,
    /// The first address after it.
    pub end: u64,
    /// Pages that ksmd has to scan.
    pub pages: u64,
    /// Pages that should merge.
    pub merging_pages: u64,
    /// Whether the program has enrolled it already.
    pub enrolled: bool,
}

/// A process that enrolled unprofitable ranges itself.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct TemporaryUnenrollReport {
    /// Its PID.
    pub pid: u32,
    /// Its name.
    pub comm: String,
    /// Bytes that it enrolled itself and that are unenrolled while ksmd works.
    pub bytes: u64,
}

/// A process that is not enrolled on purpose.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct SkippedProcessReport {
    /// Its PID.
    pub pid: u32,
    /// Its name.
    pub comm: String,
    /// The reason.
    pub why: String,
}

/// Bytes saved, measured or predicted.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct MergeSavings {
    /// Freed frames.
    pub gross: u64,
    /// ksmd's metadata: 64 bytes per scanned page.
    pub metadata: u64,
    /// `gross - metadata`.
    pub net: i64,
    /// Huge pages split.
    pub huge_pages_split: u64,
}

/// A change that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FailedChangeKind {
    /// Enrolling a range or a process.
    Enroll,
    /// Unenrolling it.
    Unenroll,
}

/// How a merge ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MergeEndKind {
    /// No more pages were expected to merge.
    Settled,
    /// The deadline was reached first.
    Deadline,
    /// The operator stopped it.
    Stopped,
    /// Another program drives KSM.
    Yielded,
}

/// The outcome of a merge.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct OutcomeReport {
    /// How it ended.
    pub end: MergeEndKind,
    /// What another program did to KSM's settings, for `yielded`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub yielded_to: Option<String>,
    /// Bytes saved, read from page tables, with ksmd stopped unless another program drives it.
    pub saved: u64,
    /// The part of `saved` that no counter of KSM has: zero pages that the kernel freed when it split huge pages for
    /// ksmd.
    pub saved_by_splitting: u64,
    /// `saved` less ksmd's metadata for the targets.
    pub net: i64,
    /// Pages mapped to frames that KSM shares.
    pub merged_pages: u64,
    /// The number of these frames.
    pub ksm_frames: u64,
    /// Zero pages mapped to the kernel's zero page.
    pub zero_pages: u64,
    /// Why figures differ from the prediction: the parts of one figure add up to the difference, opposite ones side by
    /// side. Those of `saved` are exact if up to 131,072 pages should merge, and otherwise from a sample of contents. A
    /// part without a measurement begins with `not explained`.
    pub differences: Vec<DifferenceReport>,
    /// Regions added to the targets that still run, while the ranges are enrolled; the programs may map more meanwhile.
    pub regions_added: i64,
    /// Seconds of the census and the plan.
    pub census_seconds: f64,
    /// Seconds from the start of the command to 50, 90 and 99 % of the savings.
    pub seconds_to_50: Option<f64>,
    /// See `seconds_to_50`.
    pub seconds_to_90: Option<f64>,
    /// See `seconds_to_50`.
    pub seconds_to_99: Option<f64>,
    /// CPU seconds of ksmd; absent if they cannot be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ksmd_seconds: Option<f64>,
    /// CPU seconds of pagefold, the census included.
    pub pagefold_seconds: f64,
    /// `MemAvailable` before; other processes use and free memory too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub available_before: Option<u64>,
    /// `MemAvailable` after.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub available_after: Option<u64>,
    /// Bytes in huge pages of the targets before.
    pub huge_before: u64,
    /// Bytes in huge pages of the targets after.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub huge_after: Option<u64>,
    /// Number of stops of a target's thread.
    pub stops: u64,
    /// Microseconds of the median stop; absent if there was none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_median_us: Option<f64>,
    /// Microseconds of the longest stop.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_max_us: Option<f64>,
    /// Watched merged pages; absent if no target ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub merged_watch: Option<MergedWatchReport>,
    /// Ranges that could not be enrolled or unenrolled.
    pub failed_changes: Vec<FailedChangeReport>,
    /// Processes outside the plan that were enrolled too: KSM has one tree and may have merged their pages with the
    /// targets'. Absent where the kernel does not show it (before 6.14).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub other_enrolled_processes: Option<u64>,
    /// Temporary changes that could not be undone.
    pub failed_undos: Vec<String>,
    /// Savings over time, by the kernel's counters of the targets' merged pages.
    pub timeline: Vec<TimelinePointReport>,
}

/// A figure whose difference from the prediction is explained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DifferenceFigure {
    /// Bytes saved, gross.
    Saved,
    /// Bytes of metadata.
    Metadata,
    /// CPU seconds of ksmd: page visits times the time of one. Visits of other processes' pages are included.
    KsmdSeconds,
    /// Bytes of `MemAvailable`, which the net savings should increase; absent if it could not be read.
    Available,
}

/// A part of the difference between the measured and the predicted figure.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct DifferenceReport {
    /// The figure.
    pub figure: DifferenceFigure,
    /// How much more than predicted, negative if less.
    pub amount: f64,
    /// The reason.
    pub reason: &'static str,
}

/// A sample of the merged pages of running processes.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct MergedWatchReport {
    /// Pages of the sample that merged.
    pub merged_pages: u64,
    /// COW breaks of these pages.
    pub cow_breaks: u64,
    /// Seconds for which they were merged, summed over the pages.
    pub page_seconds: f64,
    /// Pages of the plan that were unenrolled because they did not stay merged for long enough.
    pub unenrolled_pages: u64,
}

/// A range that could not be enrolled or unenrolled.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct FailedChangeReport {
    /// The change that failed.
    pub change: FailedChangeKind,
    /// The PID of the process.
    pub pid: u32,
    /// Its name.
    pub comm: String,
    /// The first address; absent for the whole process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<u64>,
    /// The first address after it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end: Option<u64>,
    /// The reason.
    pub why: String,
}

/// A point of the timeline.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct TimelinePointReport {
    /// Seconds since the start of the command.
    pub seconds: f64,
    /// Bytes saved.
    pub saved: u64,
    /// CPU seconds of ksmd so far.
    pub ksmd_seconds: f64,
}

impl MergeReport {
    /// The report of a plan that is not, or not yet, executed.
    pub fn from_plan(
        host: String,
        page_size: PageSize,
        huge_page_size: u64,
        census: &Census,
        plan: &MergePlan,
    ) -> Self {
        Self {
            schema: "pagefold.merge/1",
            host,
            page_size: page_size.bytes(),
            huge_page_size,
            processes: census.subjects.iter().filter(|subject| !subject.is_foreign).count() as u64,
            foreign_processes: census.subjects.iter().filter(|subject| subject.is_foreign).count() as u64,
            enrolled_may_be_hidden: false,
            plan: PlanReport::from_plan(plan, page_size),
            outcome: None,
            unscanned_processes: census
                .unscanned
                .iter()
                .map(|UnscannedProcess { pid, comm, why }| UnscannedProcessReport::new(pid.0, comm.clone(), why))
                .collect(),
        }
    }

    /// Adds the outcome.
    #[must_use]
    pub fn with_outcome(self, outcome: &MergeOutcome, page_size: PageSize) -> Self {
        Self { outcome: Some(OutcomeReport::from_outcome(outcome, page_size)), ..self }
    }

    /// Whether a chosen process was not scanned or a planned change was not made.
    pub fn is_incomplete(&self) -> bool {
        let unfinished = |outcome: &OutcomeReport| {
            let cut_short = matches!(outcome.end, MergeEndKind::Stopped | MergeEndKind::Yielded);
            cut_short || !outcome.failed_changes.is_empty() || !outcome.failed_undos.is_empty()
        };
        let unreachable = self.plan.targets.iter().any(|target| target.error.is_some());
        !self.unscanned_processes.is_empty() || unreachable || self.outcome.as_ref().is_some_and(unfinished)
    }
}

impl PlanReport {
    fn from_plan(plan: &MergePlan, page_size: PageSize) -> Self {
        let skipped = plan.skipped.iter().map(|process| SkippedProcessReport {
            pid: process.pid.0,
            comm: process.comm.clone(),
            why: process.why.clone(),
        });
        let temporary_unenrolls = plan.temporary_unenrolls.iter().map(|unenroll| TemporaryUnenrollReport {
            pid: unenroll.process.pid.0,
            comm: unenroll.comm.clone(),
            bytes: unenroll.ranges.iter().map(|range| range.bytes().0).sum(),
        });
        Self {
            whole_processes: plan.whole_processes,
            targets: plan
                .targets
                .iter()
                .map(|target| TargetReport::from_target(target, plan.whole_processes))
                .collect(),
            temporary_unenrolls: temporary_unenrolls.collect(),
            skipped: skipped.collect(),
            savings: MergeSavings::from_effect(&plan.predicted.effect, page_size),
            merging_pages: plan.predicted.merging.0,
            ranges: plan.range_count() as u64,
            regions_added: plan.predicted.regions_added,
            ksmd_seconds: plan.predicted.ksmd_time.as_secs_f64(),
            wall_seconds: plan.predicted.wall_time.as_secs_f64(),
        }
    }
}

impl TargetReport {
    fn from_target(target: &PlanTarget, is_whole: bool) -> Self {
        let sum = |pages: fn(&RangeReport) -> u64, ranges: &[RangeReport]| ranges.iter().map(pages).sum();
        let ranges: Vec<RangeReport> = target
            .ranges
            .iter()
            .map(|range| RangeReport {
                start: range.range.start,
                end: range.range.end,
                pages: range.pages.0,
                merging_pages: range.merging.0,
                enrolled: range.enrolled,
            })
            .collect();
        Self {
            process: ProcessInfo::from_process(&target.process, Some(&target.domain)),
            method: match &target.enroll_method {
                EnrollMethod::Unreachable(_) => "none",
                EnrollMethod::GuestControl(_) if is_whole => "qmp",
                _ if is_whole => "whole",
                _ => "ranges",
            },
            error: match &target.enroll_method {
                EnrollMethod::Unreachable(why) => Some(why.clone()),
                _ => None,
            },
            pages: sum(|range| range.pages, &ranges),
            merging_pages: sum(|range| range.merging_pages, &ranges),
            zero_pages: target.ranges.iter().map(|range| range.zero.0).sum(),
            ranges,
        }
    }
}

impl MergeSavings {
    fn from_effect(effect: &MergeEffect, page_size: PageSize) -> Self {
        Self {
            gross: effect.gross(page_size).0,
            metadata: effect.metadata().0,
            net: effect.net(page_size).0,
            huge_pages_split: effect.split_huge_pages.0,
        }
    }
}

impl DifferenceFigure {
    fn from_figure(figure: PlanFigure) -> Self {
        match figure {
            PlanFigure::Saved => Self::Saved,
            PlanFigure::Metadata => Self::Metadata,
            PlanFigure::KsmdCpu => Self::KsmdSeconds,
            PlanFigure::Available => Self::Available,
        }
    }
}

impl OutcomeReport {
    fn from_outcome(outcome: &MergeOutcome, page_size: PageSize) -> Self {
        let seconds = |share| outcome.time_to(share).map(|time: Duration| time.as_secs_f64());
        let mut stops: Vec<f64> = outcome.stops.iter().map(|stop| stop.as_secs_f64() * 1e6).collect();
        stops.sort_by(f64::total_cmp);
        let step = outcome.timeline.len().div_ceil(MAX_TIMELINE_POINTS).max(1);
        let last = outcome.timeline.len().saturating_sub(1);
        let points = outcome.timeline.iter().enumerate().filter(|(i, _)| i % step == 0 || *i == last);
        let increase = |before: Pages, after: Pages| after.saturating_sub(before).0;
        Self {
            end: match outcome.end {
                MergeEnd::Settled => MergeEndKind::Settled,
                MergeEnd::Deadline => MergeEndKind::Deadline,
                MergeEnd::Stopped => MergeEndKind::Stopped,
                MergeEnd::SettingsOverwritten(_) => MergeEndKind::Yielded,
            },
            yielded_to: match &outcome.end {
                MergeEnd::SettingsOverwritten(text) => Some(text.clone()),
                _ => None,
            },
            saved: page_size.bytes_of(outcome.saved()).0,
            saved_by_splitting: page_size.bytes_of(outcome.saved_by_splitting()).0,
            net: outcome.net(page_size).0,
            merged_pages: outcome.after.merged.0,
            ksm_frames: outcome.after.frames.0,
            zero_pages: increase(outcome.before.zero, outcome.after.zero),
            differences: outcome
                .differences(page_size)
                .into_iter()
                .map(|FigureDifference { figure, amount, reason }| DifferenceReport {
                    figure: DifferenceFigure::from_figure(figure),
                    amount,
                    reason,
                })
                .collect(),
            regions_added: outcome.regions_added,
            census_seconds: outcome.census_time.as_secs_f64(),
            seconds_to_50: seconds(0.5),
            seconds_to_90: seconds(0.9),
            seconds_to_99: seconds(0.99),
            ksmd_seconds: outcome.ksmd_time.as_ref().ok().map(Duration::as_secs_f64),
            pagefold_seconds: outcome.own_cpu_time.as_secs_f64(),
            available_before: outcome.available.0.as_ref().ok().map(|bytes| bytes.0),
            available_after: outcome.available.1.as_ref().ok().map(|bytes| bytes.0),
            huge_before: outcome.huge_page_bytes.0.0,
            huge_after: outcome.huge_page_bytes.1.as_ref().ok().map(|bytes| bytes.0),
            stops: stops.len() as u64,
            stop_median_us: stops.get(stops.len().saturating_sub(1) / 2).copied(),
            stop_max_us: stops.last().copied(),
            merged_watch: (outcome.merged_watch.lifetime_stats.page_seconds > 0.0
                || outcome.merged_watch.unenrolled_pages > Pages::ZERO)
                .then_some(MergedWatchReport {
                    merged_pages: outcome.merged_watch.lifetime_stats.max_merged_pages.0,
                    cow_breaks: outcome.merged_watch.lifetime_stats.cow_breaks.0,
                    page_seconds: outcome.merged_watch.lifetime_stats.page_seconds,
                    unenrolled_pages: outcome.merged_watch.unenrolled_pages.0,
                }),
            failed_changes: outcome
                .failed_changes
                .iter()
                .map(|failed| FailedChangeReport {
                    change: match failed.change {
                        EnrollChange::Enroll => FailedChangeKind::Enroll,
                        EnrollChange::Unenroll => FailedChangeKind::Unenroll,
                    },
                    pid: failed.pid.0,
                    comm: failed.comm.clone(),
                    start: failed.range.map(|range| range.start),
                    end: failed.range.map(|range| range.end),
                    why: failed.why.clone(),
                })
                .collect(),
            other_enrolled_processes: outcome.bystanders.clone().ok(),
            failed_undos: outcome.not_restored.clone(),
            timeline: points
                .map(|(_, sample)| TimelinePointReport {
                    seconds: sample.at.as_secs_f64(),
                    saved: page_size.bytes_of(outcome.saved_at(sample)).0,
                    ksmd_seconds: sample.ksmd_time.as_secs_f64(),
                })
                .collect(),
        }
    }
}
