//! Measures all policies on one workload, in rounds, and derives table, samples, checks and chart.
//!
//! In each round the policies run on fresh processes, in an order that is drawn. Guided merging is compared with
//! whole-process merging of the same round. The slow policies are measured once, in the first round, for a limited window. Beyond the
//! window their savings are extrapolated: a policy has saved as much as flat-out merging had saved after the same
//! number of scanned pages, because all of them scan the same pages in the same order. The slow-down of a probe beside
//! each policy is measured in rounds of its own, for slow policies only in the first of these.

use super::command_reports::MergeCommandReport;
use super::policies::{MergePolicy, PolicyExtrapolation};
use super::readings::KsmSample;
use super::thresholds::{self, MergeMeasure};
use super::trial::{PolicyTrial, TrialConditions, run_trial};
use super::workloads::{MergeWorkload, SavingsGauge};
use crate::findings::{Findings, MarkdownTable, PairedRatio, SampleSpread};
use crate::rounds::draw_orders;
use anyhow::Result;
use pagefold_merge::decide::policy::HostObservation;
use std::collections::BTreeMap;

const BYTES_PER_MIB: f64 = (1 << 20) as f64;
const BYTES_PER_GIB: f64 = (1 << 30) as f64;

/// Rounds with the probe. Guided merging takes only a second, so that a single measurement is imprecise.
const PROBE_ROUNDS: usize = 3;

/// All trials of a workload.
#[derive(Debug)]
pub struct PolicyComparison {
    /// The workload.
    pub workload: MergeWorkload,
    /// The trials, in the order in which they were made.
    pub trials: Vec<PolicyTrial>,
    /// The host facts that policies depend on.
    host: HostObservation,
}

/// When a share of the savings was reached, and at what cost.
#[derive(Clone, Copy, Debug)]
pub struct SavingsMilestone {
    /// Seconds since the policy began.
    pub seconds: f64,
    /// CPU seconds of ksmd and pagefold.
    pub cpu_seconds: f64,
    /// Whether it was measured; otherwise extrapolated.
    pub is_measured: bool,
}

impl PolicyComparison {
    /// Run all trials.
    pub fn measure_all(workload: MergeWorkload, rounds: usize, conditions: &TrialConditions) -> Result<Self> {
        let mut trials = Vec::new();
        // The rounds with the probe come last, because the probe would slow the others.
        let probes = match (workload.all_policies, conditions.quick) {
            (false, _) => 0,
            (true, true) => 1,
            (true, false) => PROBE_ROUNDS,
        };
        for (round, order) in (1..).zip(draw_orders(&MergePolicy::SLOW_FIRST, rounds + probes)) {
            let with_slow_policies = workload.all_policies && (round == 1 || round == rounds + 1);
            for policy in order.into_iter().filter(|policy| with_slow_policies || !policy.is_slow()) {
                eprint!("{} round {round}: {} ... ", workload.name, policy.name());
                let trial = run_trial(&workload, policy, round, round > rounds, conditions)?;
                let last = trial.last_sample();
                eprintln!(
                    "{:.0} MiB in {:.1} s, {:.2} CPU s",
                    trial.exact_saved_bytes as f64 / BYTES_PER_MIB,
                    last.seconds,
                    last.ksmd_seconds + last.pagefold_seconds
                );
                for reason in trial.report.iter().flat_map(MergeCommandReport::missed_reasons) {
                    eprintln!("  missed: {reason}");
                }
                trials.push(trial);
            }
        }
        Ok(Self { workload, trials, host: conditions.host.clone() })
    }

    /// Trials of a policy without the probe.
    pub fn trials_of(&self, policy: MergePolicy) -> impl Iterator<Item = &PolicyTrial> {
        self.trials.iter().filter(move |trial| trial.policy == policy && trial.probe_slowdown.is_none())
    }

    /// Bytes that can be saved: the median of all trials, because programs differ slightly each time.
    pub fn reachable_bytes(&self) -> f64 {
        let page = pagefold_sys::mapping::page_size() as f64;
        SampleSpread::from_samples(self.trials.iter().map(|trial| trial.mergeable.redundant_pages as f64 * page)).median
    }

    /// When a trial reached a share of the savings that are possible.
    pub fn milestone(&self, trial: &PolicyTrial, share: f64) -> Option<SavingsMilestone> {
        let bytes = share * self.reachable_bytes();
        let cpu = |sample: KsmSample| sample.ksmd_seconds + sample.pagefold_seconds;
        if let Some(sample) = trial.first_sample_at(bytes) {
            return Some(SavingsMilestone { seconds: sample.seconds, cpu_seconds: cpu(sample), is_measured: true });
        }
        let (last, whole) = (trial.last_sample(), self.trials_of(MergePolicy::Whole).next()?);
        if trial.is_complete || last.scanned_pages == 0 {
            return None;
        }
        // If it scanned as many pages and saved less, flat-out merging does not predict it.
        let sample_at_goal =
            whole.first_sample_at(bytes).filter(|sample_at_goal| sample_at_goal.scanned_pages > last.scanned_pages)?;
        let same_scans_sample = whole.samples.iter().find(|sample| sample.scanned_pages >= last.scanned_pages)?;
        let scans = full_scan_page_counts(&whole.samples);
        let extrapolation = PolicyExtrapolation {
            policy: trial.policy,
            host: &self.host,
            window_samples: &trial.samples,
            full_scan_page_counts: &scans,
        };
        Some(SavingsMilestone {
            seconds: extrapolation.seconds_to_scan(sample_at_goal.scanned_pages as f64)?,
            cpu_seconds: cpu(sample_at_goal) * (last.ksmd_seconds / same_scans_sample.ksmd_seconds).max(1.0),
            is_measured: false,
        })
    }

    /// The value of a measure in each round that has both policies.
    pub fn measure_by_round(&self, measure: MergeMeasure) -> Vec<f64> {
        let pairs = self.trials_of(MergePolicy::Whole).filter_map(|whole| {
            let guided = self.trials_of(MergePolicy::Guided).find(|guided| guided.round == whole.round)?;
            Some((whole, guided))
        });
        let milestone = |trial| self.milestone(trial, 0.9);
        // A share that is never reached takes infinite time.
        let ratio = |whole: Option<f64>, guided: Option<f64>| Some(whole? / guided.unwrap_or(f64::INFINITY));
        pairs
            .filter_map(|(whole, guided)| match measure {
                MergeMeasure::CpuRatio => ratio(
                    milestone(whole).map(|milestone| milestone.cpu_seconds),
                    milestone(guided).map(|milestone| milestone.cpu_seconds),
                ),
                MergeMeasure::LessCpuInAll => {
                    let bytes = 0.99 * whole.exact_saved_bytes.min(guided.exact_saved_bytes) as f64;
                    let cpu = |sample: KsmSample| sample.ksmd_seconds + sample.pagefold_seconds;
                    Some(cpu(whole.first_sample_at(bytes)?) / cpu(guided.last_sample()))
                }
                MergeMeasure::TimeRatio => ratio(
                    milestone(whole).map(|milestone| milestone.seconds),
                    milestone(guided).map(|milestone| milestone.seconds),
                ),
                MergeMeasure::NetSavingsShare => Some(guided.net_bytes() / guided.reachable_net_bytes()),
                MergeMeasure::HugePagesKept => guided.huge_pages_kept(),
                MergeMeasure::HugePagesKeptByWhole => whole.huge_pages_kept(),
            })
            .collect()
    }

    /// The table, the checks and the samples.
    pub fn build_findings(&self) -> Findings {
        let mut findings = Findings::new(
            "workload,round,policy,probe,seconds,saved_pages,ksmd_cpu_seconds,pagefold_cpu_seconds,\
             pages_scanned,full_scans,pages_to_scan",
        );
        for trial in &self.trials {
            for sample in &trial.samples {
                findings.samples.push(format!(
                    "{},{},{},{},{:.4},{},{:.6},{:.2},{},{},{}",
                    self.workload.name,
                    trial.round,
                    trial.policy.name(),
                    u8::from(trial.probe_slowdown.is_some()),
                    sample.seconds,
                    sample.saved_pages,
                    sample.ksmd_seconds,
                    sample.pagefold_seconds,
                    sample.scanned_pages,
                    sample.full_scans,
                    sample.pages_to_scan
                ));
            }
        }
        findings.tables.push(self.build_table());
        findings.checks = thresholds::evaluate(self.workload.name, |measure| self.measure_by_round(measure));
        findings
    }

    fn build_table(&self) -> MarkdownTable {
        let mut table = MarkdownTable::new(
            self.workload.title.clone(),
            &[
                "policy",
                "n",
                "saved MiB",
                "net MiB",
                "50 % s",
                "90 % s",
                "99 % s",
                "CPU s to 90 %",
                "CPU s / GiB",
                "thereof pagefold",
                "metadata MiB",
                "regions added",
                "huge pages left",
                "probe slower",
            ],
        );
        table.rows.extend(MergePolicy::SLOW_FIRST.into_iter().filter_map(|policy| self.build_row(policy)));
        table.notes.push(self.explain_columns());
        table.notes.extend(self.missed_notes());
        table
    }

    /// The row of a policy; none if it has no trial.
    fn build_row(&self, policy: MergePolicy) -> Option<Vec<String>> {
        let none = || "-".to_owned();
        let trials: Vec<&PolicyTrial> = self.trials_of(policy).collect();
        if trials.is_empty() {
            return None;
        }
        // The median over all trials; none if a trial has no value.
        let median = |value: &dyn Fn(&PolicyTrial) -> Option<f64>| {
            let values: Option<Vec<f64>> = trials.iter().map(|trial| value(trial)).collect();
            values.map(|values| SampleSpread::from_samples(values).median)
        };
        let cell = |value: Option<f64>, digits: usize| match value {
            None => none(),
            Some(value) if value.is_infinite() => "never".to_owned(),
            Some(value) => format!("{value:.digits$}"),
        };
        let level = |share: f64, value: &dyn Fn(SavingsMilestone) -> f64| {
            let measured = trials.iter().all(|trial| self.milestone(trial, share).is_none_or(|at| at.is_measured));
            let never = |trial: &PolicyTrial| trial.is_complete.then_some(f64::INFINITY);
            let text = cell(median(&|trial| self.milestone(trial, share).map(value).or(never(trial))), 2);
            if measured { text } else { format!("~{text}") }
        };
        // Flat-out merging ends with a phase in which this program waits for further savings; that phase is not
        // charged.
        let cpu = |trial: &PolicyTrial| match policy {
            MergePolicy::Guided => Some(trial.last_sample().ksmd_seconds + trial.last_sample().pagefold_seconds),
            _ => self.milestone(trial, 0.99).map(|at| at.cpu_seconds),
        };
        let saved = |trial: &PolicyTrial| {
            if trial.is_complete { trial.exact_saved_bytes as f64 } else { self.reachable_bytes() }
        };
        // The end of a policy that was still running is unknown.
        let complete = trials.iter().all(|trial| trial.is_complete);
        let finished = |value: Option<f64>| if complete { cell(value, 0) } else { none() };
        let per_gib = median(&|trial| Some(cpu(trial)? / (saved(trial) / BYTES_PER_GIB)));
        let tilde = if per_gib.is_some() && !complete { "~" } else { "" };
        Some(vec![
            policy.name().to_owned(),
            trials.len().to_string(),
            finished(median(&|trial| Some(trial.exact_saved_bytes as f64 / BYTES_PER_MIB))),
            finished(median(&|trial| Some(trial.net_bytes() / BYTES_PER_MIB))),
            level(0.5, &|at| at.seconds),
            level(0.9, &|at| at.seconds),
            level(0.99, &|at| at.seconds),
            level(0.9, &|at| at.cpu_seconds),
            format!("{tilde}{}", cell(per_gib, 2)),
            cell(median(&|trial| Some(trial.last_sample().pagefold_seconds)), 2),
            finished(median(&|trial| {
                Some((trial.memory_after.rmap_items - trial.memory_before.rmap_items) as f64 * 64.0 / BYTES_PER_MIB)
            })),
            finished(median(&|trial| {
                Some((trial.memory_after.region_count - trial.memory_before.region_count) as f64)
            })),
            median(&PolicyTrial::huge_pages_kept)
                .filter(|_| complete)
                .map_or_else(none, |kept| format!("{:.1} %", kept * 100.0)),
            self.format_slowdown(policy),
        ])
    }

    /// The slowdown of the probe, with its interval if it was measured more than once.
    fn format_slowdown(&self, policy: MergePolicy) -> String {
        let trials = self.trials.iter().filter(|trial| trial.policy == policy);
        let relative_times = trials.filter_map(|trial| Some(1.0 + trial.probe_slowdown?));
        PairedRatio::from_rounds(relative_times).map_or("-".to_owned(), PairedRatio::format_increase)
    }

    /// A note for each trial in which pagefold missed something.
    fn missed_notes(&self) -> impl Iterator<Item = String> {
        self.trials.iter().filter_map(|trial| {
            let report = trial.report.as_ref()?;
            let reasons = report.missed_reasons();
            (!reasons.is_empty()).then(|| {
                let (name, round, exit) = (trial.policy.name(), trial.round, report.exit_status);
                format!("Missed by {name} in round {round} (exit status {exit}): {}.", reasons.join("; "))
            })
        })
    }

    /// The JSON reports of pagefold, one line for each trial.
    pub fn report_lines(&self) -> impl Iterator<Item = String> {
        self.trials.iter().filter_map(|trial| {
            let probed = trial.probe_slowdown.is_some();
            Some(trial.report.as_ref()?.to_json_line(self.workload.name, trial.round, probed))
        })
    }

    fn explain_columns(&self) -> String {
        let of_all = self.reachable_bytes() / BYTES_PER_MIB;
        let origin = if self.workload.is_mergeable_known() {
            "known"
        } else {
            "counted by a hash of every page before each trial"
        };
        let quotients: Vec<f64> = self
            .trials
            .iter()
            .filter(|trial| trial.is_complete && trial.exact_saved_bytes > 0)
            .map(|trial| trial.counted_saved_bytes as f64 / trial.exact_saved_bytes as f64)
            .collect();
        let calibration =
            if quotients.is_empty() { "-".to_owned() } else { SampleSpread::from_samples(quotients).format_percent() };
        let gauge = match self.workload.gauge() {
            SavingsGauge::Counters => format!(
                "Times are read from KSM's counters; at the end, ksmd frozen, they were {calibration} of what the page \
                 tables show, and \"saved\" is the latter;"
            ),
            SavingsGauge::Memory => format!(
                "Times are those at which the processes' memory (Pss_Anon) had fallen so far, read every 250 ms; \
                 KSM's counters, which omit zeros freed by the split of a huge page, were {calibration} of that \
                 at the end;"
            ),
        };
        let mut text = format!(
            "Reachable: {of_all:.0} MiB ({origin}), net {:.0} MiB. n: trials; figures are their \
             median, or the single trial. {gauge} \
             \"never\": not reached before the end. Net: \
             minus 64 bytes for each page that ksmd tracks. CPU: ksmd and pagefold, its census and checks included; \
             \"CPU s / GiB\" is all CPU of `pagefold merge`, and for the other policies the CPU to 99 %. \
             The CPU bound is the same for \"{}\" and \"{}\": pagefold takes its census on one thread (`--threads 1`) \
             before ksmd begins.",
            SampleSpread::from_samples(self.trials.iter().map(PolicyTrial::reachable_net_bytes)).median / BYTES_PER_MIB,
            MergePolicy::Whole.name(),
            MergePolicy::Guided.name(),
        );
        if self.workload.all_policies {
            text.push_str(&format!(
                " The slow policies are measured until all savings are reached or ten full scans save nothing more, \
                 for {} at most. ksmtuned, as if memory were short from its first step on, takes a step every 60 s; \
                 the advisor's first step, at the end of a full scan, counts all CPU of ksmd since boot, which \
                 slows it. ~: not reached by then and extrapolated: each policy is assumed to have saved what \
                 flat-out merging had saved after as many scanned pages, with the time for a page and between \
                 batches as measured; the advisor continues from its state in the kernel, as if ksmd had used no \
                 CPU before. Their CPU is that of flat-out merging after as many pages, plus the excess \
                 measured in that time. \"Probe slower\": a program of one thread beside it, in separate rounds, over \
                 the time of merging: the geometric mean and its 95 % interval; for the slow policies one value, \
                 over 10 s at most.",
                self.describe_windows()
            ));
        }
        text
    }

    /// How long slow policies are watched: `10 s (default 100/20), 120 s (ksmtuned, advisor 20 s)`.
    fn describe_windows(&self) -> String {
        let mut given: BTreeMap<u64, Vec<&str>> = BTreeMap::new();
        let slow = MergePolicy::SLOW_FIRST.into_iter().filter(|policy| policy.is_slow());
        for trial in slow.filter_map(|policy| self.trials_of(policy).next()) {
            given.entry(trial.max_window.as_secs()).or_default().push(trial.policy.name());
        }
        given
            .iter()
            .map(|(seconds, names)| format!("{seconds} s ({})", names.join(", ")))
            .collect::<Vec<_>>()
            .join(", ")
    }

    /// A line for each trial.
    pub fn trials_csv(&self) -> Vec<String> {
        let line = |trial: &PolicyTrial| {
            format!(
                "{},{},{},{},{},{},{},{},{},{},{},{}",
                self.workload.name,
                trial.round,
                trial.policy.name(),
                trial.exact_saved_bytes,
                trial.counted_saved_bytes,
                trial.net_bytes(),
                trial.memory_after.rmap_items,
                trial.memory_before.huge_bytes,
                trial.memory_after.huge_bytes,
                trial.memory_before.region_count,
                trial.memory_after.region_count,
                trial.probe_slowdown.map(|slow| format!("{slow:.4}")).unwrap_or_default()
            )
        };
        self.trials.iter().map(line).collect()
    }
}

/// The columns of [`PolicyComparison::trials_csv`].
pub const TRIALS_CSV_HEADER: &str = "workload,round,policy,saved_bytes,counted_bytes,net_bytes,rmap_items,\
                          huge_bytes_before,huge_bytes_after,regions_before,regions_after,probe_slow_down";

/// The number of scanned pages at the end of each full scan.
fn full_scan_page_counts(samples: &[KsmSample]) -> Vec<f64> {
    let mut ends = Vec::new();
    for sample in samples {
        while (ends.len() as i64) < sample.full_scans {
            ends.push(sample.scanned_pages as f64);
        }
    }
    ends
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::merge::mergeable_pages::MergeablePages;
    use crate::merge::readings::ExactMemory;
    use crate::merge::trial::PolicyTrial;

    /// A trial that saves `pages` evenly over `seconds`, after `idle` of them without savings; sampled for `seen`.
    fn sample_trial(policy: MergePolicy, idle: f64, seconds: f64, seen: f64, pages: f64) -> PolicyTrial {
        let saved = |at: f64| ((at - idle) / seconds).clamp(0.0, 1.0) * pages;
        let sample = |at: f64| KsmSample {
            seconds: at,
            saved_pages: saved(at) as i64,
            ksmd_seconds: at,
            pagefold_seconds: 0.0,
            scanned_pages: (at / (idle + seconds) * 10_000.0) as i64,
            full_scans: 0,
            pages_to_scan: 100,
        };
        let complete = !policy.is_slow();
        let samples: Vec<KsmSample> = (0..=100).map(|step| sample(seen * f64::from(step) / 100.0)).collect();
        let page = pagefold_sys::mapping::page_size() as f64;
        let exact = (saved(seen) * page) as i64;
        let (before, after) = (ExactMemory::default(), ExactMemory { rmap_items: 2000, ..ExactMemory::default() });
        let truth = MergeablePages { redundant_pages: 1000, mapped_to_shared: 2000 };
        PolicyTrial {
            policy,
            round: 1,
            samples,
            max_window: policy.max_window(false, false),
            is_complete: complete,
            report: None,
            exact_saved_bytes: exact,
            counted_saved_bytes: exact,
            mergeable: truth,
            memory_before: before,
            memory_after: after,
            probe_slowdown: None,
        }
    }

    fn sample_comparison() -> PolicyComparison {
        let trials = vec![
            sample_trial(MergePolicy::Whole, 5.0, 5.0, 10.0, 1000.0),
            sample_trial(MergePolicy::Guided, 0.5, 0.5, 1.0, 1000.0),
            sample_trial(MergePolicy::Default, 500.0, 500.0, 20.0, 1000.0),
        ];
        let workload = MergeWorkload::synthetic_workloads(true).swap_remove(0);
        let host = pagefold_merge::policy::observe_host(&pagefold_linux::LiveHost::new());
        PolicyComparison { workload, trials, host }
    }

    fn table_row(comparison: &PolicyComparison, policy: MergePolicy) -> Vec<String> {
        let table = comparison.build_table();
        table.rows.into_iter().find(|row| row[0] == policy.name()).unwrap()
    }

    #[test]
    fn guided_is_compared_and_slow_policies_are_extrapolated() {
        let comparison = sample_comparison();
        for (measure, expected) in
            [(MergeMeasure::TimeRatio, 10.0), (MergeMeasure::CpuRatio, 10.0), (MergeMeasure::NetSavingsShare, 1.0)]
        {
            let measured = comparison.measure_by_round(measure);
            assert!(measured.len() == 1 && (measured[0] / expected - 1.0).abs() < 0.02, "{measure:?}: {measured:?}");
        }
        let slow = comparison.milestone(&comparison.trials[2], 0.9).unwrap();
        assert!(!slow.is_measured && (slow.seconds / 950.0 - 1.0).abs() < 0.02, "{slow:?}");
        // Its CPU time is that of flat-out merging, plus its excess for the pages of the window.
        assert!(slow.cpu_seconds > 9.0, "{slow:?}");
        let text = comparison.build_findings().to_markdown("tenth", true);
        assert!(text.contains("~95") && text.contains("- met: a tenth is duplicate: 5 times less CPU"), "{text}");
    }

    #[test]
    fn completed_slow_policy_is_measured() {
        let mut comparison = sample_comparison();
        let cells = |row: &[String]| [2, 3, 5, 8, 10].map(|column| row[column].clone());
        let unfinished = table_row(&comparison, MergePolicy::Default);
        assert_eq!([2, 3, 10].map(|column| unfinished[column].as_str()), ["-", "-", "-"]);
        assert!(unfinished[5].starts_with('~') && unfinished[8].starts_with('~'), "{unfinished:?}");
        comparison.trials[2] =
            PolicyTrial { is_complete: true, ..sample_trial(MergePolicy::Default, 10.0, 90.0, 99.5, 1000.0) };
        let measured = cells(&table_row(&comparison, MergePolicy::Default));
        assert!(measured.iter().all(|cell| cell.parse::<f64>().is_ok()), "{measured:?}");
        // A policy that saved less than flat-out merging is not extrapolated either.
        comparison.trials[2] =
            PolicyTrial { is_complete: true, ..sample_trial(MergePolicy::Default, 10.0, 90.0, 60.0, 1000.0) };
        assert_eq!(table_row(&comparison, MergePolicy::Default)[5], "never");
    }

    #[test]
    fn policy_that_scanned_enough_is_not_extrapolated() {
        let mut comparison = sample_comparison();
        let idle = sample_trial(MergePolicy::Default, 500.0, 500.0, 20.0, 1000.0);
        let samples = idle
            .samples
            .iter()
            .map(|sample| KsmSample { scanned_pages: sample.scanned_pages * 100, ..*sample })
            .collect();
        comparison.trials[2] = PolicyTrial { samples, ..idle };
        assert!(comparison.milestone(&comparison.trials[2], 0.9).is_none());
        assert_eq!(table_row(&comparison, MergePolicy::Default)[5], "-");
    }

    #[test]
    fn windows_name_their_policies() {
        let mut comparison = sample_comparison();
        comparison.trials.push(sample_trial(MergePolicy::Ksmtuned, 500.0, 500.0, 20.0, 1000.0));
        comparison.trials.push(sample_trial(MergePolicy::Advisor20, 500.0, 500.0, 20.0, 1000.0));
        assert_eq!(comparison.describe_windows(), "10 s (default 100/20), 120 s (ksmtuned, advisor 20 s)");
    }

    #[test]
    fn probe_slowdown_is_reported_with_its_interval() {
        let mut comparison = sample_comparison();
        for slow_down in [0.0, 0.02_f64.exp_m1()] {
            let probed = sample_trial(MergePolicy::Guided, 0.5, 0.5, 1.0, 1000.0);
            comparison.trials.push(PolicyTrial { probe_slowdown: Some(slow_down), ..probed });
        }
        let guided = table_row(&comparison, MergePolicy::Guided);
        // Logarithms 0 and 0.02: the margin is 0.01 times the quantile 0.975 for one degree of freedom, 12.706.
        assert_eq!((guided[1].as_str(), guided[13].as_str()), ("1", "1.0 % (-11.0 to 14.7)"));
        assert_eq!(table_row(&comparison, MergePolicy::Whole)[13], "-");
    }

    #[test]
    fn trial_with_missed_processes_has_a_note() {
        let mut comparison = sample_comparison();
        let text = r#"{"plan":{"targets":[],"skipped":[]},"unscanned_processes":[],
            "outcome":{"end":"settled","failed_changes":[
            {"pid":7,"comm":"sqlite3","why":"it is stopped"}]}}"#;
        comparison.trials[1].report = Some(MergeCommandReport::parse(3, text).unwrap());
        let note = "Missed by guided in round 1 (exit status 3): not enrolled: 7 (sqlite3): it is stopped.";
        assert_eq!(comparison.build_table().notes[1..], [note]);
        assert_eq!(comparison.report_lines().count(), 1);
    }

    #[test]
    fn unreached_savings_fail() {
        let mut comparison = sample_comparison();
        comparison.trials[1] = sample_trial(MergePolicy::Guided, 0.5, 0.5, 0.6, 1000.0);
        assert_eq!(comparison.measure_by_round(MergeMeasure::TimeRatio), [0.0]);
        assert!(comparison.measure_by_round(MergeMeasure::NetSavingsShare)[0] < 0.2);
        assert!(comparison.build_findings().to_markdown("tenth", true).contains("never"));
    }

    #[test]
    fn chart_labels_every_policy() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plot.svg");
        crate::merge::plot::draw_chart(&sample_comparison(), &path).unwrap();
        let picture = std::fs::read_to_string(&path).unwrap();
        for words in ["guided", "whole process flat out", "default 100/20", "saved, MiB", "can be saved"] {
            assert!(picture.contains(words), "{words} is not in {picture}");
        }
        assert!(!picture.contains("advisor"), "a policy that was not measured has a curve");
    }
}
