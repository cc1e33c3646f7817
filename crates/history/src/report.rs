//! The document of `pagefold report`: hosts, or spans of time, side by side.
//!
//! Its size is limited: samples are thinned to points, only the latest passes and the largest tracked processes are
//! listed, and omitted rows are counted. `--parquet` writes all samples.

use super::figures::{FigureUnit, HistoryFigures};
use super::record::{FootprintSample, HistoryPass, HistorySpan};
use super::series::{self, SeriesPoint};
use pagefold_daemon::wire::{DecisionReport, WorkloadKind};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The schema name of this document.
pub const HISTORY_REPORT_SCHEMA: &str = "pagefold.history-report/1";

/// The approximate maximum number of points for each host.
pub const MAX_POINTS: usize = 1000;

/// The maximum number of listed passes for each host.
pub const MAX_PASSES: usize = 500;

/// The maximum number of listed tracked processes for each host.
pub const MAX_PROCESSES: usize = 20;

/// The maximum number of listed decisions for each host.
pub const MAX_DECISIONS: usize = 50;

/// The recorded history of hosts: `pagefold report --json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HistoryReport {
    /// `pagefold.history-report/1`.
    pub schema: String,
    /// The hosts, or the compared spans of time.
    pub sides: Vec<SideReport>,
    /// Differences of the second side from the first, if two are compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub differences: Option<Vec<SideDifference>>,
}

/// A host, or a span of its time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SideReport {
    /// Its name in this report.
    pub name: String,
    /// The host.
    pub host: String,
    /// The time of the first sample, in seconds since 1970.
    pub from: f64,
    /// The time of the last.
    pub to: f64,
    /// The number of its samples.
    pub samples: u64,
    /// Its summary figures.
    pub figures: HistoryFigures,
    /// Its state over time, in ascending order.
    pub points: Vec<SeriesPoint>,
    /// The latest passes, the latest first.
    pub passes: Vec<PassRow>,
    /// The number of omitted passes.
    pub passes_omitted: u64,
    /// The number of decisions by reason.
    pub decisions_by_reason: BTreeMap<String, u64>,
    /// The latest decisions, the latest first.
    pub decisions: Vec<DecisionReport>,
    /// The largest tracked processes by mean footprint. Only processes that were among the largest when recorded are
    /// included.
    pub processes: Vec<ProcessRow>,
    /// The number of omitted tracked processes.
    pub processes_omitted: u64,
}

/// A pass: a census, and a merge if it is profitable. Bytes and seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PassRow {
    /// When it ended, in seconds since 1970.
    pub ended_at: f64,
    /// Its duration.
    pub seconds: f64,
    /// CPU time of ksmd and pagefold together.
    pub cpu_seconds: f64,
    /// The number of scanned processes.
    pub processes: u64,
    /// The predicted savings of its plan.
    pub predicted: u64,
    /// The measured savings; absent if nothing was merged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured: Option<i64>,
    /// The time from the first arrival of a process since the previous merge, at most two minutes before the pass, to
    /// the start of the pass.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arrival_wait_seconds: Option<f64>,
    /// From its start to 90 % of its final savings.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds_to_90: Option<f64>,
    /// From its start to 99 %.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds_to_99: Option<f64>,
}

impl PassRow {
    fn from_pass(pass: &HistoryPass) -> Self {
        Self {
            ended_at: pass.ended_at,
            seconds: pass.seconds,
            cpu_seconds: pass.cpu_seconds,
            processes: pass.processes,
            predicted: pass.predicted,
            measured: pass.measured,
            arrival_wait_seconds: pass.arrival_wait_seconds,
            seconds_to_90: pass.seconds_to_90,
            seconds_to_99: pass.seconds_to_99,
        }
    }
}

/// A tracked process over time. Bytes; means are over the times at which it was recorded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ProcessRow {
    /// The virtual machine's name, or the program's. Processes with the same name and trust domain are one row.
    pub label: String,
    /// Its kind.
    pub kind: WorkloadKind,
    /// Its trust domain.
    pub domain: String,
    /// The number of processes with that name.
    pub processes: u64,
    /// When it was recorded last, in seconds since 1970.
    pub last_time: f64,
    /// Its footprint, mean: its fair share, or an estimate if that is not read yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub footprint_mean: Option<f64>,
    /// The same, maximum.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub footprint_max: Option<u64>,
    /// Resident memory, mean.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resident_mean: Option<f64>,
    /// Estimated savings by merging from its share, mean.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saved_mean: Option<f64>,
}

/// A figure of two sides.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SideDifference {
    /// Its label.
    pub figure: String,
    /// Its unit.
    pub unit: FigureUnit,
    /// On the first side.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first: Option<f64>,
    /// On the second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub second: Option<f64>,
    /// The second less the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub change: Option<f64>,
    /// The same in percent of the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub change_percent: Option<f64>,
}

impl HistoryReport {
    /// The report of these spans, each with a name. `compared` adds the differences of two sides.
    pub fn from_spans(sides: &[(String, HistorySpan)], compared: bool) -> Self {
        let sides: Vec<SideReport> = sides.iter().map(|(name, span)| SideReport::from_span(name, span)).collect();
        let differences = match &sides[..] {
            [first, second] if compared => Some(compare_figures(&first.figures, &second.figures)),
            _ => None,
        };
        Self { schema: HISTORY_REPORT_SCHEMA.to_owned(), sides, differences }
    }
}

impl SideReport {
    fn from_span(name: &str, span: &HistorySpan) -> Self {
        let mut decisions_by_reason = BTreeMap::new();
        for decision in &span.decisions {
            *decisions_by_reason.entry(decision.reason.clone()).or_default() += 1;
        }
        let mut processes = summarize_processes(&span.footprints);
        let processes_omitted = processes.len().saturating_sub(MAX_PROCESSES) as u64;
        processes.truncate(MAX_PROCESSES);
        Self {
            name: name.to_owned(),
            host: span.host.clone(),
            from: span.samples.first().map_or(0.0, |sample| sample.time),
            to: span.samples.last().map_or(0.0, |sample| sample.time),
            samples: span.samples.len() as u64,
            figures: HistoryFigures::from_span(span),
            points: series::points_from_samples(&series::thin_samples(&span.samples, MAX_POINTS)),
            passes: span.passes.iter().rev().take(MAX_PASSES).map(PassRow::from_pass).collect(),
            passes_omitted: span.passes.len().saturating_sub(MAX_PASSES) as u64,
            decisions_by_reason,
            decisions: span.decisions.iter().rev().take(MAX_DECISIONS).cloned().collect(),
            processes,
            processes_omitted,
        }
    }
}

fn compare_figures(first: &HistoryFigures, second: &HistoryFigures) -> Vec<SideDifference> {
    let pairs = first.named_values().into_iter().zip(second.named_values());
    pairs
        .map(|((figure, unit, first), (_, _, second))| {
            let change = first.zip(second).map(|(first, second)| second - first);
            let change_percent =
                change.zip(first).filter(|(_, first)| *first > 0.0).map(|(change, first)| 100.0 * change / first);
            SideDifference { figure: figure.to_owned(), unit, first, second, change, change_percent }
        })
        .collect()
}

/// Footprints by name and trust domain, the largest mean first.
fn summarize_processes(footprints: &[FootprintSample]) -> Vec<ProcessRow> {
    let mut groups: BTreeMap<(&str, &str), Vec<&FootprintSample>> = BTreeMap::new();
    for footprint in footprints {
        groups.entry((&footprint.label, &footprint.domain)).or_default().push(footprint);
    }
    let mut rows: Vec<ProcessRow> = groups.into_values().map(|group| summarize_process(&group)).collect();
    rows.sort_by(|a, b| {
        let mean = |row: &ProcessRow| row.footprint_mean.or(row.resident_mean).unwrap_or(0.0);
        mean(b).total_cmp(&mean(a)).then_with(|| a.label.cmp(&b.label))
    });
    rows
}

fn summarize_process(group: &[&FootprintSample]) -> ProcessRow {
    let last = group[group.len() - 1];
    let mean = |field: fn(&FootprintSample) -> Option<u64>| {
        let values: Vec<f64> = group.iter().filter_map(|footprint| Some(field(footprint)? as f64)).collect();
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
        last_time: last.time,
        footprint_mean: mean(|footprint| footprint.footprint),
        footprint_max: group.iter().filter_map(|footprint| footprint.footprint).max(),
        resident_mean: mean(|footprint| footprint.resident),
        saved_mean: mean(|footprint| footprint.saved),
    }
}
