//! The doctor's findings in JSON.

use crate::decide::{Finding, HostFacts, ProcessFacts, Scope, Verdict, examine_host, examine_process};
use pagefold_output::wire::{ProcessInfo, UnscannedProcessReport};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::cmp::Reverse;

/// The result of `pagefold doctor`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct DoctorReport {
    /// `pagefold.doctor/1`.
    pub schema: &'static str,
    /// The examined host: `this host` or a recording.
    pub host: String,
    /// The worst verdict of all findings.
    pub verdict: VerdictName,
    /// Number of findings with each verdict.
    pub counts: VerdictCounts,
    /// The requested processes. If empty, the findings are about the host.
    pub processes: Vec<ProcessInfo>,
    /// The findings, worst first.
    pub findings: Vec<FindingReport>,
    /// Processes whose memory could not be read; pid 0 stands for processes that are not listed. Findings that need
    /// them are `unknown`.
    pub unscanned_processes: Vec<UnscannedProcessReport>,
}

/// Verdict of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum VerdictName {
    /// There is nothing that the rule could judge.
    NotApplicable,
    /// No problem found.
    Ok,
    /// A required reading is missing.
    Unknown,
    /// The operator should decide: it has a cost or a risk, or does not work as probably intended.
    Warn,
    /// It prevents merging, or harms the host now.
    Fail,
}

impl From<Verdict> for VerdictName {
    fn from(verdict: Verdict) -> Self {
        match verdict {
            Verdict::NotApplicable => Self::NotApplicable,
            Verdict::Ok => Self::Ok,
            Verdict::Unknown => Self::Unknown,
            Verdict::Warn => Self::Warn,
            Verdict::Fail => Self::Fail,
        }
    }
}

/// Number of findings with each verdict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct VerdictCounts {
    /// `fail`.
    pub fail: usize,
    /// `warn`.
    pub warn: usize,
    /// `unknown`.
    pub unknown: usize,
    /// `ok`.
    pub ok: usize,
    /// `not_applicable`.
    pub not_applicable: usize,
}

/// Result of a rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FindingReport {
    /// The rule's id, stable over versions.
    pub rule: Cow<'static, str>,
    /// The verdict.
    pub verdict: VerdictName,
    /// The process it is about; absent for the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// When that process started, in clock ticks since boot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_time: Option<u64>,
    /// Summary in one phrase.
    pub title: String,
    /// The file that was read.
    pub source: String,
    /// The value that was read.
    pub value: String,
    /// Why it matters.
    pub why: Cow<'static, str>,
    /// Shell commands to run as root, one per line; lines that start with `#` are instructions that no command can
    /// replace. Empty if there is nothing to do.
    pub remedy: Vec<String>,
    /// A shell command that succeeds once the remedy has worked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verify: Option<String>,
}

impl From<Finding> for FindingReport {
    fn from(finding: Finding) -> Self {
        let process = match finding.scope {
            Scope::Host => None,
            Scope::Process(id) | Scope::Guest(id) => Some(id),
        };
        Self {
            rule: finding.rule.into(),
            verdict: finding.verdict.into(),
            pid: process.map(|id| id.pid.0),
            start_time: process.map(|id| id.start_time),
            title: finding.title,
            source: finding.source,
            value: finding.value,
            why: finding.why.into(),
            remedy: finding.remedy,
            verify: finding.verify,
        }
    }
}

impl DoctorReport {
    /// Examine the host.
    pub fn from_host(host: String, facts: &HostFacts) -> Self {
        Self::new(host, Vec::new(), examine_host(facts), unscanned_processes(facts.processes.iter()))
    }

    /// Examine some of its processes.
    pub fn from_processes(host: String, facts: &HostFacts, processes: &[&ProcessFacts]) -> Self {
        let infos = processes
            .iter()
            .map(|process| ProcessInfo::from_process(&process.process, Some(&process.domain)))
            .collect();
        let findings = processes.iter().flat_map(|process| examine_process(facts, process)).collect();
        Self::new(host, infos, findings, unscanned_processes(processes.iter().copied()))
    }

    /// Replace `sudo` remedies by `remedy` where more privilege does not help.
    #[must_use]
    pub fn replace_privilege_remedies(mut self, remedy: &str) -> Self {
        for finding in &mut self.findings {
            if finding.verdict == VerdictName::Unknown && finding.remedy.iter().all(|line| line.starts_with("sudo ")) {
                finding.remedy = finding.remedy.iter().map(|_| remedy.to_owned()).collect();
            }
        }
        self
    }

    fn new(
        host: String,
        processes: Vec<ProcessInfo>,
        findings: Vec<Finding>,
        unscanned_processes: Vec<UnscannedProcessReport>,
    ) -> Self {
        let mut findings: Vec<FindingReport> = findings.into_iter().map(Into::into).collect();
        findings.sort_by_key(|finding| Reverse(finding.verdict));
        let mut counts = VerdictCounts::default();
        for finding in &findings {
            *match finding.verdict {
                VerdictName::Fail => &mut counts.fail,
                VerdictName::Warn => &mut counts.warn,
                VerdictName::Unknown => &mut counts.unknown,
                VerdictName::Ok => &mut counts.ok,
                VerdictName::NotApplicable => &mut counts.not_applicable,
            } += 1;
        }
        let verdict = findings.first().map_or(VerdictName::NotApplicable, |finding| finding.verdict);
        Self { schema: "pagefold.doctor/1", host, verdict, counts, processes, findings, unscanned_processes }
    }
}

fn unscanned_processes<'a>(processes: impl Iterator<Item = &'a ProcessFacts>) -> Vec<UnscannedProcessReport> {
    processes
        .filter_map(|facts| {
            let why = facts.regions.as_ref().err()?;
            let comm = Some(&facts.process.comm).filter(|_| facts.process.uid.is_ok());
            Some(UnscannedProcessReport::new(facts.process.id.pid.0, comm.cloned(), why))
        })
        .collect()
}
