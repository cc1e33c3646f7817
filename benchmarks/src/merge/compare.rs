//! All policies on one workload, in rounds, and what follows from it: table, samples, bars, plot.
//!
//! In each round the policies come in an order drawn anew, on fresh processes, and guided is compared with whole within
//! the round. The slow policies are measured once, in the first round, for a window of time; what they do not come to
//! within is extrapolated: a policy has saved what flat-out merging had saved after as many scanned pages, for all of
//! them walk the same pages in the same order. What each does to a probe beside it is measured in rounds of their own:
//! of the slow ones in the first of these.

use super::bars::{self, Measure};
use super::policies::{Beyond, Policy};
use super::readings::Sample;
use super::reports::Report;
use super::trial::{Conditions, Trial, run};
use super::workloads::{Gauge, Workload};
use crate::report::{Findings, Spread, Table};
use anyhow::Result;
use pagefold_labs::content::Origin;
use pagefold_merge::decide::policy::Observation;
use std::collections::BTreeMap;
use std::time::SystemTime;

const MIB: f64 = (1 << 20) as f64;
const GIB: f64 = (1 << 30) as f64;

/// Rounds with the probe beside. Guided merging takes a second, in which a single figure says little.
const PROBE_ROUNDS: usize = 3;

/// All trials of a workload.
#[derive(Debug)]
pub struct Comparison {
    /// The workload.
    pub workload: Workload,
    /// In the order in which they were made.
    pub trials: Vec<Trial>,
    /// What policies went by.
    host: Observation,
}

/// When a share of the savings was reached, and at what cost.
#[derive(Clone, Copy, Debug)]
pub struct Reached {
    /// Seconds since the policy began.
    pub seconds: f64,
    /// CPU seconds, ksmd's and pagefold's.
    pub cpu: f64,
    /// Whether it was measured; otherwise extrapolated.
    pub measured: bool,
}

impl Comparison {
    /// Measure.
    pub fn make(workload: Workload, rounds: usize, conditions: &Conditions) -> Result<Self> {
        let mut trials = Vec::new();
        // The last rounds are the probe's, which would slow the others.
        let probes = match (workload.all_policies, conditions.quick) {
            (false, _) => 0,
            (true, true) => 1,
            (true, false) => PROBE_ROUNDS,
        };
        for round in 1..=rounds + probes {
            let all = workload.all_policies && (round == 1 || round == rounds + 1);
            let policies: Vec<Policy> = Policy::ALL.into_iter().filter(|policy| all || !policy.is_slow()).collect();
            for policy in shuffled(policies) {
                eprint!("{} round {round}: {} ... ", workload.name, policy.name());
                let trial = run(&workload, policy, round, round > rounds, conditions)?;
                let last = trial.last();
                eprintln!(
                    "{:.0} MiB in {:.1} s, {:.2} CPU s",
                    trial.exact as f64 / MIB,
                    last.seconds,
                    last.ksmd + last.pagefold
                );
                for missed in trial.report.iter().flat_map(Report::missed) {
                    eprintln!("  missed: {missed}");
                }
                trials.push(trial);
            }
        }
        Ok(Self { workload, trials, host: conditions.host.clone() })
    }

    /// Trials without the probe.
    pub fn of(&self, policy: Policy) -> impl Iterator<Item = &Trial> {
        self.trials.iter().filter(move |trial| trial.policy == policy && trial.slow_down.is_none())
    }

    /// Bytes that can be saved, in the middle of all trials: programs are not quite the same each time.
    pub fn reachable(&self) -> f64 {
        let page = pagefold_sys::mapping::page_size() as f64;
        Spread::of(self.trials.iter().map(|trial| trial.truth.redundant as f64 * page)).median
    }

    /// When a trial had reached a share of what can be saved.
    pub fn reached(&self, trial: &Trial, share: f64) -> Option<Reached> {
        let bytes = share * self.reachable();
        let cpu = |sample: Sample| sample.ksmd + sample.pagefold;
        if let Some(sample) = trial.reached(bytes) {
            return Some(Reached { seconds: sample.seconds, cpu: cpu(sample), measured: true });
        }
        let (last, whole) = (trial.last(), self.of(Policy::Whole).next()?);
        if trial.complete || last.scanned == 0 {
            return None;
        }
        // Where it has scanned as many pages and has not saved as much, it is not like flat-out merging.
        let then = whole.reached(bytes).filter(|then| then.scanned > last.scanned)?;
        let alike = whole.samples.iter().find(|sample| sample.scanned >= last.scanned)?;
        let scans = full_scans(&whole.samples);
        let beyond = Beyond { policy: trial.policy, host: &self.host, watched: &trial.samples, scans: &scans };
        Some(Reached {
            seconds: beyond.seconds_to_scan(then.scanned as f64)?,
            cpu: cpu(then) * (last.ksmd / alike.ksmd).max(1.0),
            measured: false,
        })
    }

    /// A measure in each round that has both policies.
    pub fn measured(&self, measure: Measure) -> Vec<f64> {
        let pairs = self.of(Policy::Whole).filter_map(|whole| {
            let guided = self.of(Policy::Guided).find(|guided| guided.round == whole.round)?;
            Some((whole, guided))
        });
        let at = |trial| self.reached(trial, 0.9);
        // What is never reached takes for ever.
        let ratio = |whole: Option<f64>, guided: Option<f64>| Some(whole? / guided.unwrap_or(f64::INFINITY));
        pairs
            .filter_map(|(whole, guided)| match measure {
                Measure::LessCpu => ratio(at(whole).map(|at| at.cpu), at(guided).map(|at| at.cpu)),
                Measure::LessCpuInAll => {
                    let bytes = 0.99 * whole.exact.min(guided.exact) as f64;
                    let cpu = |sample: Sample| sample.ksmd + sample.pagefold;
                    Some(cpu(whole.reached(bytes)?) / cpu(guided.last()))
                }
                Measure::Sooner => ratio(at(whole).map(|at| at.seconds), at(guided).map(|at| at.seconds)),
                Measure::Net => Some(guided.net() / guided.reachable_net()),
                Measure::HugeKept => guided.huge_kept(),
                Measure::HugeKeptByWhole => whole.huge_kept(),
            })
            .collect()
    }

    /// The table, the bars and the samples.
    pub fn findings(&self) -> Findings {
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
                    u8::from(trial.slow_down.is_some()),
                    sample.seconds,
                    sample.saved,
                    sample.ksmd,
                    sample.pagefold,
                    sample.scanned,
                    sample.full_scans,
                    sample.pages_to_scan
                ));
            }
        }
        findings.tables.push(self.table());
        findings.bars = bars::of(self.workload.name, |measure| self.measured(measure));
        findings
    }

    fn table(&self) -> Table {
        let mut table = Table::new(
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
                "of it pagefold",
                "metadata MiB",
                "regions added",
                "huge pages left",
                "probe slower",
            ],
        );
        let none = || "-".to_owned();
        for policy in Policy::ALL {
            let trials: Vec<&Trial> = self.of(policy).collect();
            if trials.is_empty() {
                continue;
            }
            // Of all trials, or of none.
            let median = |value: &dyn Fn(&Trial) -> Option<f64>| {
                let values: Option<Vec<f64>> = trials.iter().map(|trial| value(trial)).collect();
                values.map(|values| Spread::of(values).median)
            };
            let cell = |value: Option<f64>, digits: usize| match value {
                None => none(),
                Some(value) if value.is_infinite() => "never".to_owned(),
                Some(value) => format!("{value:.digits$}"),
            };
            let level = |share: f64, value: &dyn Fn(Reached) -> f64| {
                let measured = trials.iter().all(|trial| self.reached(trial, share).is_none_or(|at| at.measured));
                let never = |trial: &Trial| trial.complete.then_some(f64::INFINITY);
                let text = cell(median(&|trial| self.reached(trial, share).map(value).or(never(trial))), 2);
                if measured { text } else { format!("~{text}") }
            };
            // The tail of flat-out merging is this program's way to see that nothing more comes; it is not charged.
            let cpu = |trial: &Trial| match policy {
                Policy::Guided => Some(trial.last().ksmd + trial.last().pagefold),
                _ => self.reached(trial, 0.99).map(|at| at.cpu),
            };
            let saved = |trial: &Trial| if trial.complete { trial.exact as f64 } else { self.reachable() };
            // Of a policy that was still at it, the end is not known.
            let complete = trials.iter().all(|trial| trial.complete);
            let finished = |value: Option<f64>| if complete { cell(value, 0) } else { none() };
            let per_gib = median(&|trial| Some(cpu(trial)? / (saved(trial) / GIB)));
            let tilde = if per_gib.is_some() && !complete { "~" } else { "" };
            table.rows.push(vec![
                policy.name().to_owned(),
                trials.len().to_string(),
                finished(median(&|trial| Some(trial.exact as f64 / MIB))),
                finished(median(&|trial| Some(trial.net() / MIB))),
                level(0.5, &|at| at.seconds),
                level(0.9, &|at| at.seconds),
                level(0.99, &|at| at.seconds),
                level(0.9, &|at| at.cpu),
                format!("{tilde}{}", cell(per_gib, 2)),
                cell(median(&|trial| Some(trial.last().pagefold)), 2),
                finished(median(&|trial| Some((trial.after.rmap_items - trial.before.rmap_items) as f64 * 64.0 / MIB))),
                finished(median(&|trial| Some((trial.after.regions - trial.before.regions) as f64))),
                median(&Trial::huge_kept)
                    .filter(|_| complete)
                    .map_or_else(none, |kept| format!("{:.1} %", kept * 100.0)),
                self.slower(policy),
            ]);
        }
        table.notes.push(self.explanation());
        table.notes.extend(self.missed());
        table
    }

    /// How much slower the probe was, with the range where that was measured more than once.
    fn slower(&self, policy: Policy) -> String {
        let all: Vec<f64> =
            self.trials.iter().filter(|trial| trial.policy == policy).filter_map(|trial| trial.slow_down).collect();
        match all[..] {
            [] => "-".to_owned(),
            [once] => format!("{:.1} %", once * 100.0),
            _ => Spread::of(all).percent(),
        }
    }

    /// A note for each trial in which pagefold missed something.
    fn missed(&self) -> impl Iterator<Item = String> {
        self.trials.iter().filter_map(|trial| {
            let report = trial.report.as_ref()?;
            let missed = report.missed();
            (!missed.is_empty()).then(|| {
                let (name, round, exit) = (trial.policy.name(), trial.round, report.exit);
                format!("Missed by {name} in round {round} (exit status {exit}): {}.", missed.join("; "))
            })
        })
    }

    /// What pagefold said in each trial, as lines of JSON.
    pub fn reports(&self) -> impl Iterator<Item = String> {
        self.trials.iter().filter_map(|trial| {
            let probed = trial.slow_down.is_some();
            Some(trial.report.as_ref()?.line(self.workload.name, trial.round, probed))
        })
    }

    fn explanation(&self) -> String {
        let of_all = self.reachable() / MIB;
        let origin =
            if self.workload.is_known() { "known" } else { "counted by a hash of every page before each trial" };
        let quotients: Vec<f64> = self
            .trials
            .iter()
            .filter(|trial| trial.complete && trial.exact > 0)
            .map(|trial| trial.counted as f64 / trial.exact as f64)
            .collect();
        let calibration = if quotients.is_empty() { "-".to_owned() } else { Spread::of(quotients).percent() };
        let gauge = match self.workload.gauge() {
            Gauge::Counters => format!(
                "Times are read from KSM's counters; at the end, ksmd frozen, they were {calibration} of what the page \
                 tables say, and \"saved\" is the latter;"
            ),
            Gauge::Memory => format!(
                "Times are those at which the processes' memory (Pss_Anon) had fallen so far, looked at every 250 ms; \
                 KSM's counters, which do not see zeros that a split huge page gives back, were {calibration} of that \
                 at the end;"
            ),
        };
        let mut text = format!(
            "Reachable: {of_all:.0} MiB ({origin}), net {:.0} MiB. n: trials, of which the \
             median is told; what was measured once is that one trial. {gauge} \
             \"never\" is what was not reached before the end. Net: \
             less 64 bytes for each page that ksmd keeps track of. CPU: ksmd and pagefold, its census and checks included; \
             \"CPU s / GiB\" is all that `pagefold merge` took to its end, for the others what they took to 99 %. \
             The bound on CPU is the same for \"{}\" and \"{}\": pagefold takes its census on one thread (`--threads 1`) \
             before ksmd begins.",
            Spread::of(self.trials.iter().map(Trial::reachable_net)).median / MIB,
            Policy::Whole.name(),
            Policy::Guided.name(),
        );
        if self.workload.all_policies {
            text.push_str(&format!(
                " The slow policies are measured until what can be saved is, or nothing more comes in ten full scans, \
                 but for {} at most. ksmtuned, as if memory were short from its first step on, takes a step every 60 s; \
                 the advisor's first step, at the end of a full scan, counts all CPU that ksmd used since boot, which \
                 slows it. ~: not reached by then and extrapolated: each is taken to have saved what flat-out merging \
                 had saved after as many scanned pages, with a page taking ksmd as long as it did in that time and \
                 batches lying as far apart; the advisor goes on from what the kernel made of it, as if ksmd had used no \
                 CPU before. CPU of these is that of flat-out merging after as many pages, and more by what they took \
                 more in that time. \"Probe slower\": a program of one thread beside it, in rounds of their own, over the \
                 time that merging took: the median and its range, or once and over 10 s at most for the slow policies.",
                self.windows()
            ));
        }
        text
    }

    /// For how long slow policies are watched: `10 s (default 100/20), 120 s (ksmtuned, advisor 20 s)`.
    fn windows(&self) -> String {
        let mut given: BTreeMap<u64, Vec<&str>> = BTreeMap::new();
        let slow = Policy::ALL.into_iter().filter(|policy| policy.is_slow());
        for trial in slow.filter_map(|policy| self.of(policy).next()) {
            given.entry(trial.window.as_secs()).or_default().push(trial.policy.name());
        }
        given
            .iter()
            .map(|(seconds, names)| format!("{seconds} s ({})", names.join(", ")))
            .collect::<Vec<_>>()
            .join(", ")
    }

    /// A line for each trial.
    pub fn trials_csv(&self) -> Vec<String> {
        let line = |trial: &Trial| {
            format!(
                "{},{},{},{},{},{},{},{},{},{},{},{}",
                self.workload.name,
                trial.round,
                trial.policy.name(),
                trial.exact,
                trial.counted,
                trial.net(),
                trial.after.rmap_items,
                trial.before.huge,
                trial.after.huge,
                trial.before.regions,
                trial.after.regions,
                trial.slow_down.map(|slow| format!("{slow:.4}")).unwrap_or_default()
            )
        };
        self.trials.iter().map(line).collect()
    }
}

/// The columns of [`Comparison::trials_csv`].
pub const TRIALS: &str = "workload,round,policy,saved_bytes,counted_bytes,net_bytes,rmap_items,huge_bytes_before,\
                          huge_bytes_after,regions_before,regions_after,probe_slow_down";

/// After how many scanned pages each full scan had ended.
fn full_scans(samples: &[Sample]) -> Vec<f64> {
    let mut ends = Vec::new();
    for sample in samples {
        while (ends.len() as i64) < sample.full_scans {
            ends.push(sample.scanned as f64);
        }
    }
    ends
}

/// In an order drawn anew each time.
pub fn shuffled<T>(items: Vec<T>) -> Vec<T> {
    let now = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_nanos());
    let order = Origin::of(&[&now.to_string()]);
    let mut drawn: Vec<(u64, T)> = (0..).map(|place| order.number(place)).zip(items).collect();
    drawn.sort_by_key(|(number, _)| *number);
    drawn.into_iter().map(|(_, item)| item).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::merge::readings::Exact;
    use crate::merge::trial::Trial;
    use crate::merge::truth::Truth;

    /// A trial in which `pages` are saved evenly over `seconds`, after `idle` of them without any; looked at for
    /// `seen`.
    fn trial(policy: Policy, idle: f64, seconds: f64, seen: f64, pages: f64) -> Trial {
        let saved = |at: f64| ((at - idle) / seconds).clamp(0.0, 1.0) * pages;
        let sample = |at: f64| Sample {
            seconds: at,
            saved: saved(at) as i64,
            ksmd: at,
            pagefold: 0.0,
            scanned: (at / (idle + seconds) * 10_000.0) as i64,
            full_scans: 0,
            pages_to_scan: 100,
        };
        let complete = !policy.is_slow();
        let samples: Vec<Sample> = (0..=100).map(|step| sample(seen * f64::from(step) / 100.0)).collect();
        let page = pagefold_sys::mapping::page_size() as f64;
        let exact = (saved(seen) * page) as i64;
        let (before, after) = (Exact::default(), Exact { rmap_items: 2000, ..Exact::default() });
        let truth = Truth { redundant: 1000, merged: 2000 };
        Trial {
            policy,
            round: 1,
            samples,
            window: policy.window(false, false),
            complete,
            report: None,
            exact,
            counted: exact,
            truth,
            before,
            after,
            slow_down: None,
        }
    }

    fn comparison() -> Comparison {
        let trials = vec![
            trial(Policy::Whole, 5.0, 5.0, 10.0, 1000.0),
            trial(Policy::Guided, 0.5, 0.5, 1.0, 1000.0),
            trial(Policy::Default, 500.0, 500.0, 20.0, 1000.0),
        ];
        let workload = Workload::synthetic(true).swap_remove(0);
        let host = pagefold_merge::policy::observe(&pagefold_linux::LiveHost::new());
        Comparison { workload, trials, host }
    }

    fn row(comparison: &Comparison, policy: Policy) -> Vec<String> {
        let table = comparison.table();
        table.rows.into_iter().find(|row| row[0] == policy.name()).unwrap()
    }

    #[test]
    fn guided_is_compared_with_whole_and_the_slow_are_extrapolated() {
        let comparison = comparison();
        for (measure, expected) in [(Measure::Sooner, 10.0), (Measure::LessCpu, 10.0), (Measure::Net, 1.0)] {
            let measured = comparison.measured(measure);
            assert!(measured.len() == 1 && (measured[0] / expected - 1.0).abs() < 0.02, "{measure:?}: {measured:?}");
        }
        let slow = comparison.reached(&comparison.trials[2], 0.9).unwrap();
        assert!(!slow.measured && (slow.seconds / 950.0 - 1.0).abs() < 0.02, "{slow:?}");
        // Its CPU time is flat-out merging's, and more by what it took more for the pages of the window.
        assert!(slow.cpu > 9.0, "{slow:?}");
        let text = comparison.findings().markdown("tenth", true);
        assert!(text.contains("~95") && text.contains("- met: a tenth is duplicate: 5 times less CPU"), "{text}");
    }

    #[test]
    fn a_slow_policy_that_came_to_its_end_is_measured() {
        let mut comparison = comparison();
        let cells = |row: &[String]| [2, 3, 5, 8, 10].map(|column| row[column].clone());
        let unfinished = row(&comparison, Policy::Default);
        assert_eq!([2, 3, 10].map(|column| unfinished[column].as_str()), ["-", "-", "-"]);
        assert!(unfinished[5].starts_with('~') && unfinished[8].starts_with('~'), "{unfinished:?}");
        comparison.trials[2] = Trial { complete: true, ..trial(Policy::Default, 10.0, 90.0, 99.5, 1000.0) };
        let measured = cells(&row(&comparison, Policy::Default));
        assert!(measured.iter().all(|cell| cell.parse::<f64>().is_ok()), "{measured:?}");
        // One that ends with less is not extrapolated either.
        comparison.trials[2] = Trial { complete: true, ..trial(Policy::Default, 10.0, 90.0, 60.0, 1000.0) };
        assert_eq!(row(&comparison, Policy::Default)[5], "never");
    }

    #[test]
    fn what_scanned_as_many_pages_and_saved_less_is_not_extrapolated() {
        let mut comparison = comparison();
        let idle = trial(Policy::Default, 500.0, 500.0, 20.0, 1000.0);
        let samples = idle.samples.iter().map(|sample| Sample { scanned: sample.scanned * 100, ..*sample }).collect();
        comparison.trials[2] = Trial { samples, ..idle };
        assert!(comparison.reached(&comparison.trials[2], 0.9).is_none());
        assert_eq!(row(&comparison, Policy::Default)[5], "-");
    }

    #[test]
    fn windows_are_told_with_who_was_given_them() {
        let mut comparison = comparison();
        comparison.trials.push(trial(Policy::Ksmtuned, 500.0, 500.0, 20.0, 1000.0));
        comparison.trials.push(trial(Policy::Advisor20, 500.0, 500.0, 20.0, 1000.0));
        assert_eq!(comparison.windows(), "10 s (default 100/20), 120 s (ksmtuned, advisor 20 s)");
    }

    #[test]
    fn the_probe_is_told_with_its_range() {
        let mut comparison = comparison();
        for slow_down in [0.1, 0.3, 0.2] {
            let probed = trial(Policy::Guided, 0.5, 0.5, 1.0, 1000.0);
            comparison.trials.push(Trial { slow_down: Some(slow_down), ..probed });
        }
        let guided = row(&comparison, Policy::Guided);
        assert_eq!((guided[1].as_str(), guided[13].as_str()), ("1", "20.0 % (10.0 to 30.0)"));
        assert_eq!(row(&comparison, Policy::Whole)[13], "-");
    }

    #[test]
    fn a_trial_that_missed_something_has_a_note() {
        let mut comparison = comparison();
        let text = r#"{"plan":{"targets":[],"left_alone":[]},"not_seen":[],"outcome":{"end":"settled","missed":[
            {"pid":7,"comm":"sqlite3","why":"it is stopped"}]}}"#;
        comparison.trials[1].report = Some(Report::parse(3, text).unwrap());
        let note = "Missed by guided in round 1 (exit status 3): not enrolled: 7 (sqlite3): it is stopped.";
        assert_eq!(comparison.table().notes[1..], [note]);
        assert_eq!(comparison.reports().count(), 1);
    }

    #[test]
    fn what_is_never_reached_is_no_success() {
        let mut comparison = comparison();
        comparison.trials[1] = trial(Policy::Guided, 0.5, 0.5, 0.6, 1000.0);
        assert_eq!(comparison.measured(Measure::Sooner), [0.0]);
        assert!(comparison.measured(Measure::Net)[0] < 0.2);
        assert!(comparison.findings().markdown("tenth", true).contains("never"));
    }

    #[test]
    fn the_picture_names_every_policy_at_its_curve() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plot.svg");
        crate::merge::plot::draw(&comparison(), &path).unwrap();
        let picture = std::fs::read_to_string(&path).unwrap();
        for words in ["guided", "whole process flat out", "default 100/20", "saved, MiB", "can be saved"] {
            assert!(picture.contains(words), "{words} is not in {picture}");
        }
        assert!(!picture.contains("advisor"), "what was not measured has no curve");
    }
}
