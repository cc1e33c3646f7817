//! The rules behind `pagefold doctor`: why is nothing merging, and what is wrong with how this host merges?
//!
//! [`examine_host`] judges the host, [`examine_process`] judges one process. A rule is a function from facts to a
//! [`Finding`]. It asks for each reading it needs. An absent reading makes the finding [`Verdict::Unknown`] with the
//! reason, so that no rule reports as healthy what it has not read. If the absence itself is the answer (a feature that
//! this kernel lacks), the verdict is [`Verdict::NotApplicable`].
//!
//! The rules mirror mm/ksm.c and Documentation/admin-guide/mm/ksm.rst as of 6.18; differences in older kernels are
//! stated at each rule. They are grouped by subject: KSM's settings, enrolled processes, programs that write the
//! settings, the cost in memory and CPU time, and security.
//!
//! Names that processes give themselves are put into a command only if no shell can misinterpret them. In titles and
//! values they are escaped.
//!
//! Limits: facts are from one point in time. Rates since boot are averages, and the counters of merged pages are those
//! of ksmd's last scan.

pub mod audit;
pub mod change;
mod cost;
mod enrollment;
mod host_processes;
mod pace;
mod process;
mod security;
mod settings;
#[cfg(test)]
mod tests;
mod writers;

pub use pace::{SCAN_MICROSECONDS_PER_PAGE, pages_to_scan_for, pass_seconds};

use audit::Topic;
use audit::facts::SettingFacts;
use change::{SettingChange, SettingDetails};
use host_processes::HostProcesses;
use pagefold_base::domain::TrustDomain;
use pagefold_base::ksm::Ksm;
use pagefold_base::memory::{MemInfo, Pressure};
use pagefold_base::process::Process;
use pagefold_base::reading::{Absent, Reading};
use pagefold_base::region::Region;
use pagefold_base::tuner::Tuner;
use pagefold_base::units::{PageSize, ProcessId};
use std::collections::BTreeMap;
use std::fmt;

/// Facts that the rules read of a host.
#[derive(Clone, Debug, PartialEq)]
pub struct HostFacts {
    /// The size of a base page.
    pub page_size: PageSize,
    /// `/proc/sys/kernel/osrelease`, such as `6.18.44`.
    pub kernel: Reading<String>,
    /// `/sys/kernel/mm/ksm`; `NotOnThisKernel` where the directory does not exist.
    pub ksm: Reading<Ksm>,
    /// `/proc/meminfo`.
    pub memory: MemInfo,
    /// `/proc/pressure/memory`.
    pub pressure: Reading<Pressure>,
    /// `/proc/vmstat` by name; events are counted since boot.
    pub vmstat: Reading<BTreeMap<String, u64>>,
    /// The bracketed word of `/sys/kernel/mm/transparent_hugepage/enabled`.
    pub thp_enabled: Reading<String>,
    /// NUMA nodes with memory (`/sys/devices/system/node/has_memory`).
    pub nodes: Reading<u32>,
    /// CPU time of ksmd since boot.
    pub ksmd: Reading<KsmdCpuTime>,
    /// Programs that write KSM's settings, found among the processes by
    /// [`identify_tuner`](pagefold_host::observe::identify_tuner).
    pub tuners: Reading<Vec<Tuner>>,
    /// Settings of KSM that changed while the facts were gathered, each with its values: `run: 1, then 0`. While the
    /// advisor is on, the settings that it changes are not included.
    pub rewritten_settings: Vec<String>,
    /// Settings of the host and of its virtual machines.
    pub settings: SettingFacts,
    /// All processes, in any order.
    pub processes: Vec<ProcessFacts>,
}

/// The CPU time of ksmd, from `/proc/PID/stat` of the kernel thread and `/proc/uptime`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KsmdCpuTime {
    /// Seconds of CPU time since boot.
    pub cpu_seconds: f64,
    /// Seconds since boot.
    pub uptime_seconds: f64,
}

/// Facts that the rules read of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessFacts {
    /// The process.
    pub process: Process,
    /// `/proc/PID/smaps`.
    pub regions: Reading<Vec<Region>>,
    /// The trust domain it belongs to.
    pub domain: TrustDomain,
    /// Why it is excluded from merging, if it is: see [`pagefold_base::exclusion`].
    pub exclusion_reason: Option<String>,
    /// `ksm_merge_any` of its parent (`/proc/PPID/ksm_stat`): the flag that it should have inherited.
    pub parent_merge_any: Reading<bool>,
}

/// Verdict of a rule, from the least to the most severe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    /// There is nothing that the rule could judge.
    NotApplicable,
    /// No problem found.
    Ok,
    /// A required reading is missing.
    Unknown,
    /// The operator should decide: it has a cost or a risk, or does not work as probably intended.
    Warn,
    /// It defeats merging that is asked for, or harms the host now.
    Fail,
}

impl Verdict {
    /// All verdicts.
    pub const ALL: &[Self] = &[Self::NotApplicable, Self::Ok, Self::Unknown, Self::Warn, Self::Fail];
    /// The verdicts of a rule about something that may be better.
    const ALL_BUT_FAIL: &[Self] = &[Self::NotApplicable, Self::Ok, Self::Unknown, Self::Warn];
    /// The verdicts of a rule about something that does harm.
    const ALL_BUT_WARN: &[Self] = &[Self::NotApplicable, Self::Ok, Self::Unknown, Self::Fail];
    /// The verdicts of a rule that always applies.
    const ALL_BUT_NOT_APPLICABLE: &[Self] = &[Self::Ok, Self::Unknown, Self::Warn, Self::Fail];
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::NotApplicable => "n/a",
            Self::Ok => "ok",
            Self::Unknown => "unknown",
            Self::Warn => "warn",
            Self::Fail => "fail",
        })
    }
}

/// Subject of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// The host.
    Host,
    /// One process.
    Process(ProcessId),
    /// The guest in a virtual machine, by the process of the machine.
    Guest(ProcessId),
    /// A domain of libvirt that does not run, by its position in [`SettingFacts::idle_domains`].
    IdleDomain(usize),
}

/// Result of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The rule's id, stable over versions.
    pub rule: &'static str,
    /// The host or process that it is about.
    pub scope: Scope,
    /// The verdict.
    pub verdict: Verdict,
    /// Summary in one phrase.
    pub title: String,
    /// The file that was read.
    pub source: String,
    /// The value that was read.
    pub value: String,
    /// The recommended value.
    pub expected: &'static str,
    /// Why it matters.
    pub why: &'static str,
    /// Shell commands to run as root, one per line; lines that start with `#` are instructions that no command can
    /// replace. Empty if there is nothing to do.
    pub remedy: Vec<String>,
    /// A shell command that succeeds once the remedy has worked.
    pub verify: Option<String>,
    /// Benefit, risk, undo, proof and sources.
    pub details: &'static SettingDetails,
    /// Changes that resolve the finding, for `pagefold tune`; empty if nothing is to be changed or only an operator can.
    pub changes: Vec<SettingChange>,
    /// Whether `pagefold tune` makes the changes only if an operator names the rule.
    pub on_request: bool,
}

/// The worst verdict of a list; [`Verdict::NotApplicable`] for an empty one.
pub fn worst(findings: &[Finding]) -> Verdict {
    findings.iter().map(|finding| finding.verdict).max().unwrap_or(Verdict::NotApplicable)
}

/// Judge the host by every host rule, worst first. The order of the processes does not matter.
pub fn examine_host(facts: &HostFacts) -> Vec<Finding> {
    let host_processes = HostProcesses::new(facts);
    let findings = HOST_RULES.into_iter().flatten().map(|HostRule { rule, judge }| match &facts.ksm {
        Err(Absent::NotOnThisKernel) if rule.needs_ksm => rule.not_applicable("this kernel has no KSM", "absent"),
        _ => judge(rule, facts, &host_processes).unwrap_or_else(|missing| rule.unknown(&missing, "pagefold doctor")),
    });
    worst_first(findings.chain(audit::examine(facts)).collect())
}

/// Judge one process of the host: why its memory is not merging. Worst findings first.
pub fn examine_process(host: &HostFacts, facts: &ProcessFacts) -> Vec<Finding> {
    worst_first(process::examine(host, facts))
}

/// Why ksmd must not be started by a program: it would merge pages across trust domains, or it is not known whether it
/// would. `None` if at most one trust domain is enrolled.
pub fn find_ksm_start_refusal(facts: &HostFacts) -> Option<String> {
    find_objection_to_enrollment(facts, None)
}

/// Why only an operator can decide to enroll a process of this domain, or to start ksmd without one.
fn find_objection_to_enrollment(facts: &HostFacts, domain: Option<&TrustDomain>) -> Option<String> {
    settings::find_objection_to_merging(&HostProcesses::new(facts), domain)
}

/// What to know before ksmd is started.
pub fn ksm_start_details() -> &'static SettingDetails {
    &settings::RUN.details
}

fn worst_first(mut findings: Vec<Finding>) -> Vec<Finding> {
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.verdict));
    findings
}

/// What a rule says of itself: the fields that all of its findings have in common. No field may be empty.
struct RuleInfo {
    id: &'static str,
    /// The file that the rule reads, with `PID` in place of the pid.
    source: &'static str,
    why: &'static str,
    /// Whether the rule does not apply to a kernel without KSM.
    needs_ksm: bool,
    /// The verdicts that it can give. A test has a case for each of them.
    verdicts: &'static [Verdict],
    /// The recommended value.
    expected: &'static str,
    details: SettingDetails,
}

/// The rules about KSM on the host.
const HOST_RULES: [&[HostRule]; 5] = [settings::RULES, enrollment::RULES, writers::RULES, cost::RULES, security::RULES];

/// A rule about the host.
struct HostRule {
    rule: RuleInfo,
    judge: fn(&'static RuleInfo, &HostFacts, &HostProcesses) -> RuleResult,
}

/// A rule, for documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RuleSummary {
    /// Its id.
    pub id: &'static str,
    /// Its topic.
    pub topic: Topic,
    /// The files that it reads.
    pub source: &'static str,
    /// The verdicts that it can give.
    pub verdicts: &'static [Verdict],
    /// The recommended value.
    pub expected: &'static str,
    /// Benefit, risk, undo, proof and sources.
    pub details: &'static SettingDetails,
}

/// All rules about KSM on the host.
pub fn ksm_rule_summaries() -> Vec<RuleSummary> {
    HOST_RULES.into_iter().flatten().map(|rule| rule.rule.summary(Topic::Ksm)).collect()
}

/// All rules about one process.
pub fn process_rule_summaries() -> Vec<RuleSummary> {
    process::rules().map(|rule| rule.summary(Topic::Ksm)).collect()
}

/// A finding, or the missing reading that prevents one.
type RuleResult = Result<Finding, MissingReading>;

/// A reading that a rule needs and that is absent.
struct MissingReading {
    reading_name: String,
    absent: Absent,
}

/// The value of a reading, or the error that it is missing.
fn require<'a, T>(reading_name: &str, reading: &'a Reading<T>) -> Result<&'a T, MissingReading> {
    reading.as_ref().map_err(|absent| MissingReading { reading_name: reading_name.to_owned(), absent: absent.clone() })
}

impl RuleInfo {
    fn summary(&'static self, topic: Topic) -> RuleSummary {
        let Self { id, source, verdicts, expected, details, .. } = self;
        RuleSummary { id, topic, source, verdicts, expected, details }
    }

    fn finding(&'static self, verdict: Verdict, title: impl Into<String>, value: impl Into<String>) -> Finding {
        debug_assert!(
            self.verdicts.contains(&verdict),
            "{} gives a verdict that it does not declare: {verdict}",
            self.id
        );
        Finding {
            rule: self.id,
            scope: Scope::Host,
            verdict,
            title: title.into(),
            source: self.source.to_owned(),
            value: value.into(),
            expected: self.expected,
            why: self.why,
            remedy: Vec::new(),
            verify: None,
            details: &self.details,
            changes: Vec::new(),
            on_request: false,
        }
    }

    fn ok(&'static self, title: impl Into<String>, value: impl Into<String>) -> Finding {
        self.finding(Verdict::Ok, title, value)
    }

    fn warn(&'static self, title: impl Into<String>, value: impl Into<String>) -> Finding {
        self.finding(Verdict::Warn, title, value)
    }

    fn fail(&'static self, title: impl Into<String>, value: impl Into<String>) -> Finding {
        self.finding(Verdict::Fail, title, value)
    }

    fn not_applicable(&'static self, title: impl Into<String>, value: impl Into<String>) -> Finding {
        self.finding(Verdict::NotApplicable, title, value)
    }

    /// The finding for a missing reading; `retry_command` is the command to repeat with more privilege.
    fn unknown(&'static self, missing: &MissingReading, retry_command: &str) -> Finding {
        let MissingReading { reading_name, absent } = missing;
        let finding =
            self.finding(Verdict::Unknown, format!("cannot tell: {reading_name}"), format!("{reading_name}: {absent}"));
        if *absent == Absent::Denied { finding.remedy([format!("sudo {retry_command}")]) } else { finding }
    }
}

impl Finding {
    fn remedy<S: Into<String>>(mut self, lines: impl IntoIterator<Item = S>) -> Self {
        self.remedy = lines.into_iter().map(Into::into).collect();
        self
    }

    fn verify(mut self, command: impl Into<String>) -> Self {
        self.verify = Some(command.into());
        self
    }

    fn change(mut self, change: SettingChange) -> Self {
        self.changes.push(change);
        self
    }

    /// Leaves the changes to the operator: `pagefold tune` makes them only if its `--rule` names the rule.
    fn on_request(mut self) -> Self {
        self.on_request = true;
        self
    }
}

/// The command that writes a KSM setting.
fn set_command(file: &str, value: impl fmt::Display) -> String {
    format!("echo {value} > /sys/kernel/mm/ksm/{file}")
}

/// The command that succeeds if a KSM setting has this value.
fn is_set_command(file: &str, value: impl fmt::Display) -> String {
    format!("grep -x {value} /sys/kernel/mm/ksm/{file}")
}
