//! The document of `pagefold report`: hosts, or spans of time, side by side.
//!
//! It is bounded: few points stand for many, the latest passes and the largest members are named, and what is left out
//! is counted. `--csv` and `--parquet` have every sample.

use super::figures::{Figures, Unit};
use super::record::{Footprint, Kept, Pass};
use super::series::{self, Point};
use pagefold_daemon::wire::{Decision, Kind};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The name of this document's form.
pub const SCHEMA: &str = "pagefold.history-report/1";

/// Points of a host at most, about.
pub const POINTS: usize = 1000;

/// Passes of a host that are named at most.
pub const PASSES: usize = 500;

/// Members of a host that are named at most.
pub const MEMBERS: usize = 20;

/// Decisions of a host that are named at most.
pub const DECISIONS: usize = 50;

/// What the daemon kept of hosts over time: `pagefold report --json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HistoryReport {
    /// `pagefold.history-report/1`.
    pub schema: String,
    /// The hosts, or the spans of time that are compared.
    pub sides: Vec<Side>,
    /// What is different in the second side from the first, where two are compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub differences: Option<Vec<Difference>>,
}

/// A host, or a span of its time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Side {
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
    pub figures: Figures,
    /// How it stood, the oldest first.
    pub points: Vec<Point>,
    /// The latest passes, the latest first.
    pub passes: Vec<PassLine>,
    /// Passes that are not named.
    pub passes_left_out: u64,
    /// Decisions by the word of their reason.
    pub decisions_by_reason: BTreeMap<String, u64>,
    /// The latest decisions, the latest first.
    pub decisions: Vec<Decision>,
    /// The largest members by their mean footprint, of those that were among the largest when they were kept.
    pub members: Vec<MemberLine>,
    /// Members that are not named.
    pub members_left_out: u64,
}

/// A pass: a census, and the merge where anything paid. Bytes and seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PassLine {
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

impl PassLine {
    fn of(pass: &Pass) -> Self {
        Self {
            ended: pass.ended,
            seconds: pass.seconds,
            cpu_seconds: pass.cpu_seconds,
            processes: pass.processes,
            predicted: pass.predicted,
            reached: pass.reached,
            waited_seconds: pass.waited,
            to_90_seconds: pass.to_90,
            to_99_seconds: pass.to_99,
        }
    }
}

/// A member over time. Bytes; means are over the moments at which it was kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MemberLine {
    /// The virtual machine's name, or the program's. Processes of one name and trust domain are one line.
    pub label: String,
    /// What it is.
    pub kind: Kind,
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
pub struct Difference {
    /// What it is.
    pub figure: String,
    /// What it is counted in.
    pub unit: Unit,
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
    pub fn of(sides: &[(String, Kept)], compared: bool) -> Self {
        let sides: Vec<Side> = sides.iter().map(|(name, kept)| Side::of(name, kept)).collect();
        let differences = match &sides[..] {
            [first, second] if compared => Some(differences(&first.figures, &second.figures)),
            _ => None,
        };
        Self { schema: SCHEMA.to_owned(), sides, differences }
    }
}

impl Side {
    fn of(name: &str, kept: &Kept) -> Self {
        let mut decisions_by_reason = BTreeMap::new();
        for decision in &kept.decisions {
            *decisions_by_reason.entry(decision.reason.clone()).or_default() += 1;
        }
        let mut members = members(&kept.footprints);
        let members_left_out = members.len().saturating_sub(MEMBERS) as u64;
        members.truncate(MEMBERS);
        Self {
            name: name.to_owned(),
            host: kept.host.clone(),
            from: kept.samples.first().map_or(0.0, |sample| sample.time),
            to: kept.samples.last().map_or(0.0, |sample| sample.time),
            samples: kept.samples.len() as u64,
            figures: Figures::of(kept),
            points: series::points(&series::thinned(&kept.samples, POINTS)),
            passes: kept.passes.iter().rev().take(PASSES).map(PassLine::of).collect(),
            passes_left_out: kept.passes.len().saturating_sub(PASSES) as u64,
            decisions_by_reason,
            decisions: kept.decisions.iter().rev().take(DECISIONS).cloned().collect(),
            members,
            members_left_out,
        }
    }
}

fn differences(first: &Figures, second: &Figures) -> Vec<Difference> {
    let pairs = first.rows().into_iter().zip(second.rows());
    pairs
        .map(|((figure, unit, first), (_, _, second))| {
            let by = first.zip(second).map(|(first, second)| second - first);
            let by_percent = by.zip(first).filter(|(_, first)| *first > 0.0).map(|(by, first)| 100.0 * by / first);
            Difference { figure: figure.to_owned(), unit, first, second, by, by_percent }
        })
        .collect()
}

/// Footprints by name and trust domain, the largest mean first.
fn members(footprints: &[Footprint]) -> Vec<MemberLine> {
    let mut groups: BTreeMap<(&str, &str), Vec<&Footprint>> = BTreeMap::new();
    for footprint in footprints {
        groups.entry((&footprint.label, &footprint.domain)).or_default().push(footprint);
    }
    let mut members: Vec<MemberLine> = groups.into_values().map(|group| member(&group)).collect();
    members.sort_by(|a, b| {
        let mean = |member: &MemberLine| member.footprint_mean.or(member.resident_mean).unwrap_or(0.0);
        mean(b).total_cmp(&mean(a)).then_with(|| a.label.cmp(&b.label))
    });
    members
}

fn member(group: &[&Footprint]) -> MemberLine {
    let last = group[group.len() - 1];
    let mean = |of: fn(&Footprint) -> Option<u64>| {
        let values: Vec<f64> = group.iter().filter_map(|footprint| Some(of(footprint)? as f64)).collect();
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    };
    let mut pids: Vec<u32> = group.iter().map(|footprint| footprint.pid).collect();
    pids.sort_unstable();
    pids.dedup();
    MemberLine {
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
