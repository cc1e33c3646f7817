//! The document of `pagefold report`: hosts, or spans of time, side by side.
//!
//! It is bounded: few points stand for many, the latest passes and the largest members are named, and what is left out
//! is counted. `--csv` and `--parquet` have every sample.

use super::figures::{FigureUnit, HistoryFigures};
use super::record::{FootprintSample, HistoryPass, HistorySpan};
use super::series::{self, SeriesPoint};
use pagefold_daemon::wire::{DecisionReport, WorkloadKind};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The name of this document's form.
pub const HISTORY_REPORT_SCHEMA: &str = "pagefold.history-report/1";

/// Points of a host at most, about.
pub const MAX_POINTS: usize = 1000;

/// Passes of a host that are named at most.
pub const MAX_PASSES: usize = 500;

/// Members of a host that are named at most.
pub const MAX_PROCESSES: usize = 20;

/// Decisions of a host that are named at most.
pub const MAX_DECISIONS: usize = 50;

/// What the daemon kept of hosts over time: `pagefold report --json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HistoryReport {
    /// `pagefold.history-report/1`.
    pub schema: String,
    /// The hosts, or the spans of time that are compared.
    pub sides: Vec<SideReport>,
    /// What is different in the second side from the first, where two are compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub differences: Option<Vec<SideDifference>>,
}

/// A host, or a span of its time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SideReport {
    /// What it is called here.
    pub name: String,
    /// The host.
    pub host: String,
    /// The time of the first sample, in seconds since 1970.
    pub from: f64,
    /// The time of the last.
    pub to: f64,
    /// Samples that it is made of.
    pub samples: u64,
    /// What it came to.
    pub figures: HistoryFigures,
    /// How it stood, the oldest first.
    pub points: Vec<SeriesPoint>,
    /// The latest passes, the latest first.
    pub passes: Vec<PassRow>,
    /// Passes that are not named.
    pub passes_left_out: u64,
    /// Decisions by the word of their reason.
    pub decisions_by_reason: BTreeMap<String, u64>,
    /// The latest decisions, the latest first.
    pub decisions: Vec<DecisionReport>,
    /// The largest members by their mean footprint, of those that were among the largest when they were kept.
    pub members: Vec<ProcessRow>,
    /// Members that are not named.
    pub members_left_out: u64,
}

/// A pass: a census, and the merge where anything paid. Bytes and seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PassRow {
    /// When it ended, in seconds since 1970.
    pub ended: f64,
    /// How long it took.
    pub seconds: f64,
    /// CPU time of ksmd and pagefold together.
    pub cpu_seconds: f64,
    /// Processes that were looked at.
    pub processes: u64,
    /// What its plan should save.
    pub predicted: u64,
    /// What it saved; absent where nothing was merged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reached: Option<i64>,
    /// How long the first of those had waited who came since the merge before, in the two minutes before it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waited_seconds: Option<f64>,
    /// From its start to 90 % of what was saved in the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to_90_seconds: Option<f64>,
    /// From its start to 99 %.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to_99_seconds: Option<f64>,
}

impl PassRow {
    fn from_pass(pass: &HistoryPass) -> Self {
        Self {
            ended: pass.ended_at,
            seconds: pass.seconds,
            cpu_seconds: pass.cpu_seconds,
            processes: pass.processes,
            predicted: pass.predicted,
            reached: pass.measured,
            waited_seconds: pass.arrival_wait_seconds,
            to_90_seconds: pass.seconds_to_90,
            to_99_seconds: pass.seconds_to_99,
        }
    }
}

/// A member over time. Bytes; means are over the moments at which it was kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ProcessRow {
    /// The virtual machine's name, or the program's. Processes of one name and trust domain are one line.
    pub label: String,
    /// What it is.
    pub kind: WorkloadKind,
    /// Its trust domain.
    pub domain: String,
    /// Processes of that name.
    pub processes: u64,
    /// When it was kept last, in seconds since 1970.
    pub last: f64,
    /// What it took, on average: its fair share, or an estimate while that was not read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub footprint_mean: Option<f64>,
    /// The most of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub footprint_highest: Option<u64>,
    /// Resident memory, on average.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resident_mean: Option<f64>,
    /// An estimate of what merging saved for it by its share, on average.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saved_mean: Option<f64>,
}

/// A figure on two sides.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SideDifference {
    /// What it is.
    pub figure: String,
    /// What it is counted in.
    pub unit: FigureUnit,
    /// On the first side.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first: Option<f64>,
    /// On the second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub second: Option<f64>,
    /// The second less the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by: Option<f64>,
    /// The same in percent of the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by_percent: Option<f64>,
}

impl HistoryReport {
    /// Of what was kept, each under a name. Two sides that are compared have their differences told.
    pub fn from_spans(sides: &[(String, HistorySpan)], compared: bool) -> Self {
        let sides: Vec<SideReport> = sides.iter().map(|(name, kept)| SideReport::from_span(name, kept)).collect();
        let differences = match &sides[..] {
            [first, second] if compared => Some(compare_figures(&first.figures, &second.figures)),
            _ => None,
        };
        Self { schema: HISTORY_REPORT_SCHEMA.to_owned(), sides, differences }
    }
}

impl SideReport {
    fn from_span(name: &str, kept: &HistorySpan) -> Self {
        let mut decisions_by_reason = BTreeMap::new();
        for decision in &kept.decisions {
            *decisions_by_reason.entry(decision.reason.clone()).or_default() += 1;
        }
        let mut members = summarize_processes(&kept.footprints);
        let members_left_out = members.len().saturating_sub(MAX_PROCESSES) as u64;
        members.truncate(MAX_PROCESSES);
        Self {
            name: name.to_owned(),
            host: kept.host.clone(),
            from: kept.samples.first().map_or(0.0, |sample| sample.time),
            to: kept.samples.last().map_or(0.0, |sample| sample.time),
            samples: kept.samples.len() as u64,
            figures: HistoryFigures::from_span(kept),
            points: series::points_from_samples(&series::thin_samples(&kept.samples, MAX_POINTS)),
            passes: kept.passes.iter().rev().take(MAX_PASSES).map(PassRow::from_pass).collect(),
            passes_left_out: kept.passes.len().saturating_sub(MAX_PASSES) as u64,
            decisions_by_reason,
            decisions: kept.decisions.iter().rev().take(MAX_DECISIONS).cloned().collect(),
            members,
            members_left_out,
        }
    }
}

fn compare_figures(first: &HistoryFigures, second: &HistoryFigures) -> Vec<SideDifference> {
    let pairs = first.named_values().into_iter().zip(second.named_values());
    pairs
        .map(|((figure, unit, first), (_, _, second))| {
            let by = first.zip(second).map(|(first, second)| second - first);
            let by_percent = by.zip(first).filter(|(_, first)| *first > 0.0).map(|(by, first)| 100.0 * by / first);
            SideDifference { figure: figure.to_owned(), unit, first, second, by, by_percent }
        })
        .collect()
}

/// Footprints by name and trust domain, the largest mean first.
fn summarize_processes(footprints: &[FootprintSample]) -> Vec<ProcessRow> {
    let mut groups: BTreeMap<(&str, &str), Vec<&FootprintSample>> = BTreeMap::new();
    for footprint in footprints {
        groups.entry((&footprint.label, &footprint.domain)).or_default().push(footprint);
    }
    let mut members: Vec<ProcessRow> = groups.into_values().map(|group| summarize_process(&group)).collect();
    members.sort_by(|a, b| {
        let mean = |member: &ProcessRow| member.footprint_mean.or(member.resident_mean).unwrap_or(0.0);
        mean(b).total_cmp(&mean(a)).then_with(|| a.label.cmp(&b.label))
    });
    members
}

fn summarize_process(group: &[&FootprintSample]) -> ProcessRow {
    let last = group[group.len() - 1];
    let mean = |of: fn(&FootprintSample) -> Option<u64>| {
        let values: Vec<f64> = group.iter().filter_map(|footprint| Some(of(footprint)? as f64)).collect();
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    };
    let mut pids: Vec<u32> = group.iter().map(|footprint| footprint.pid).collect();
    pids.sort_unstable();
    pids.dedup();
    ProcessRow {
        label: last.label.clone(),
        kind: last.kind,
        domain: last.domain.clone(),
        processes: pids.len() as u64,
        last: last.time,
        footprint_mean: mean(|footprint| footprint.footprint),
        footprint_highest: group.iter().filter_map(|footprint| footprint.footprint).max(),
        resident_mean: mean(|footprint| footprint.resident),
        saved_mean: mean(|footprint| footprint.saved),
    }
}
