//! The compared policies: those of [`pagefold_merge::decide::policy`], and pagefold as a command.
//!
//! The settings of a policy come from the functions that the product itself uses. This module only selects the
//! policies, and extrapolates them beyond their window.

use super::readings::KsmSample;
use pagefold_base::ksm::{Setting, Settings};
use pagefold_base::{Bytes, Reading};
use pagefold_labs::ksm::KsmTestGuard;
use pagefold_merge::decide::policy::{Advisor, HostObservation, Policy as Rule, PolicyState};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// A merge policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MergePolicy {
    /// `pages_to_scan` 100, `sleep_millisecs` 20.
    Default,
    /// ksmtuned, as if memory were short: otherwise it starts no merging.
    Ksmtuned,
    /// The kernel's advisor, with its default target of 200 s.
    Advisor200,
    /// The kernel's advisor, to finish a pass in 20 s.
    Advisor20,
    /// All memory enrolled; ksmd without pauses, or with pauses that keep it within a CPU bound.
    Whole,
    /// `pagefold merge`.
    Guided,
}

impl MergePolicy {
    /// All policies, the slow ones first.
    pub const SLOW_FIRST: [Self; 6] =
        [Self::Default, Self::Ksmtuned, Self::Advisor200, Self::Advisor20, Self::Whole, Self::Guided];

    /// The name in tables and CSV lines.
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "default 100/20",
            Self::Ksmtuned => "ksmtuned",
            Self::Advisor200 => "advisor 200 s",
            Self::Advisor20 => "advisor 20 s",
            Self::Whole => "whole process flat out",
            Self::Guided => "guided",
        }
    }

    /// Whether the policy is watched only for a window and extrapolated beyond it.
    pub fn is_slow(self) -> bool {
        !matches!(self, Self::Whole | Self::Guided)
    }

    /// The maximum window of a slow policy: enough for all but the kernel's default, which takes many minutes. With the
    /// probe, and in a quick run, the window is short.
    pub fn max_window(self, probed: bool, quick: bool) -> Duration {
        Duration::from_secs(match self {
            _ if quick => 2,
            Self::Default => 10,
            _ if probed => 10,
            _ => 120,
        })
    }

    /// Whether the workload must enroll itself.
    pub fn enrolls_whole_process(self) -> bool {
        self != Self::Guided
    }

    /// The rule that sets KSM. Guided merging starts with the kernel's default and sets its own pace.
    fn policy_rule(self) -> Rule {
        let name = match self {
            Self::Default | Self::Guided => "default",
            Self::Ksmtuned => "ksmtuned",
            Self::Advisor200 => "advisor",
            Self::Advisor20 => "advisor:20",
            Self::Whole => "flat-out",
        };
        Rule::from_name(name).and_then(Result::ok).expect("every compared policy has a rule of this name")
    }

    /// The schedule of its steps, from the start.
    pub fn schedule(self, host: &HostObservation) -> Reading<PolicySchedule> {
        PolicySchedule::start(self.policy_rule(), without_free_memory(host))
    }
}

/// A rule whose steps are taken when they come due, by the clock or in an extrapolation.
#[derive(Clone, Debug)]
pub struct PolicySchedule {
    rule: Rule,
    host: HostObservation,
    state: PolicyState,
    /// The initial settings, until they are requested.
    settings: Settings,
    /// When the next step is due, in seconds since the start. The first is due at once.
    next_step_at: f64,
}

impl PolicySchedule {
    /// The schedule of a rule on a host.
    pub fn start(rule: Rule, host: HostObservation) -> Reading<Self> {
        let (state, settings) = rule.start(&host)?;
        Ok(Self { rule, host, state, settings, next_step_at: 0.0 })
    }

    /// The changed settings of all steps that are due after this many seconds and were not taken yet.
    pub fn settings_due(&mut self, seconds: f64) -> Reading<Settings> {
        let mut changed = std::mem::take(&mut self.settings);
        while self.next_step_at <= seconds {
            let (state, settings) = self.rule.step(self.state.clone(), &self.host)?;
            self.state = state;
            changed.extend(settings);
            self.next_step_at += self.rule.interval().as_secs_f64();
        }
        Ok(changed)
    }

    /// Write the settings that are due after this many seconds, except `run`. The advisor is off while they are
    /// written.
    pub fn write_due_settings(&mut self, ksm: &KsmTestGuard, seconds: f64) -> Reading<()> {
        for (setting, value) in self.settings_due(seconds)?.iter().filter(|(setting, _)| **setting != Setting::Run) {
            ksm.write_setting(setting.file_name(), value);
        }
        Ok(())
    }
}

/// The same host without free memory: ksmtuned merges only when memory is short.
fn without_free_memory(host: &HostObservation) -> HostObservation {
    HostObservation { free: Ok(Bytes::ZERO), ..host.clone() }
}

/// A policy beyond the window in which it was watched.
#[derive(Clone, Copy, Debug)]
pub struct PolicyExtrapolation<'a> {
    /// The policy.
    pub policy: MergePolicy,
    /// The host facts.
    pub host: &'a HostObservation,
    /// The samples in the window, from its start.
    pub window_samples: &'a [KsmSample],
    /// The numbers of scanned pages at which full scans end.
    pub full_scan_page_counts: &'a [f64],
}

impl PolicyExtrapolation<'_> {
    /// The seconds after which the policy has scanned this many pages.
    ///
    /// Its rule takes the steps that are due. The CPU time for a page and the gap between two batches are those of the
    /// window.
    pub fn seconds_to_scan(&self, pages: f64) -> Option<f64> {
        let pace = ScanPace::from_samples(self.window_samples)?;
        match self.policy.policy_rule() {
            Rule::Advisor(rule) => self.seconds_with_advisor(&rule, pace, pages),
            rule => self.seconds_with_interval_steps(rule, pace, pages),
        }
    }

    /// For a rule with steps at fixed intervals.
    fn seconds_with_interval_steps(&self, rule: Rule, pace: ScanPace, pages: f64) -> Option<f64> {
        let last = self.window_samples.last()?;
        let mut steps = PolicySchedule::start(rule, without_free_memory(self.host)).ok()?;
        let mut batch = last.pages_to_scan as f64;
        let (mut time, mut remaining_pages) = (last.seconds, (pages - last.scanned_pages as f64).max(0.0));
        loop {
            // The steps of the window are replayed, to bring the rule to its state at the end of the window.
            let settings = steps.settings_due(time).ok()?;
            if let Some(pages) = settings.get(&Setting::PagesToScan).and_then(|pages| pages.parse().ok()) {
                batch = pages;
            }
            let rate = pace.pages_per_second(batch);
            if remaining_pages <= rate * (steps.next_step_at - time) {
                return Some(time + remaining_pages / rate);
            }
            remaining_pages -= rate * (steps.next_step_at - time);
            time = steps.next_step_at;
        }
    }

    /// For the advisor, whose steps are due at the end of each full scan. The model assumes that ksmd used no CPU
    /// before the window, as on a freshly booted host. In the window itself, the kernel's advisor counted all CPU since
    /// boot.
    fn seconds_with_advisor(&self, rule: &Advisor, pace: ScanPace, pages: f64) -> Option<f64> {
        let (first, last) = (self.window_samples.first()?, self.window_samples.last()?);
        let seconds = |seconds: f64| Duration::from_secs_f64(seconds.max(0.0));
        let (mut context, mut began) = (rule.start(), first.seconds);
        for pair in self.window_samples.windows(2).filter(|pair| pair[1].full_scans > pair[0].full_scans) {
            context = context.step(rule, seconds(pair[1].seconds - began), seconds(pair[1].ksmd_seconds));
            began = pair[1].seconds;
        }
        context.pages_to_scan = last.pages_to_scan;
        let (mut at, mut scanned) = (last.seconds, last.scanned_pages as f64);
        let ended = usize::try_from(last.full_scans).unwrap_or(0);
        for &end in self.full_scan_page_counts.iter().skip(ended).take_while(|&&end| end < pages) {
            at += (end - scanned).max(0.0) / pace.pages_per_second(context.pages_to_scan as f64);
            scanned = scanned.max(end);
            context = context.step(rule, seconds(at - began), seconds(pace.cpu_seconds_per_page * scanned));
            began = at;
        }
        Some(at + (pages - scanned).max(0.0) / pace.pages_per_second(context.pages_to_scan as f64))
    }
}

/// The scan pace of ksmd.
#[derive(Clone, Copy, Debug)]
struct ScanPace {
    /// Seconds between two batches, in which ksmd sleeps and waits for a CPU.
    batch_gap_seconds: f64,
    /// CPU seconds per page.
    cpu_seconds_per_page: f64,
}

impl ScanPace {
    /// The pace in a window; none if ksmd scanned no pages.
    fn from_samples(watched: &[KsmSample]) -> Option<Self> {
        let (first, last) = (watched.first()?, watched.last()?);
        let scanned = |from: &KsmSample, to: &KsmSample| (to.scanned_pages - from.scanned_pages) as f64;
        let batches: f64 =
            watched.windows(2).map(|pair| scanned(&pair[0], &pair[1]) / pair[1].pages_to_scan as f64).sum();
        let used = last.ksmd_seconds - first.ksmd_seconds;
        (batches > 0.0).then(|| Self {
            batch_gap_seconds: ((last.seconds - first.seconds - used) / batches).max(0.0),
            cpu_seconds_per_page: used / scanned(first, last),
        })
    }

    /// Pages per second, in batches of this size.
    fn pages_per_second(self, batch_pages: f64) -> f64 {
        batch_pages / (self.batch_gap_seconds + batch_pages * self.cpu_seconds_per_page)
    }
}

/// The pause in milliseconds after a batch of this duration that keeps ksmd at this share of a CPU.
pub fn pause_millis(batch_seconds: f64, share: f64) -> u64 {
    if share >= 1.0 { 0 } else { (batch_seconds * 1000.0 * (1.0 - share) / share).round() as u64 }
}

/// The command lines of pagefold. No other module builds them.
#[derive(Clone, Debug)]
pub struct PagefoldProgram {
    /// The pagefold binary.
    pub program: PathBuf,
}

impl PagefoldProgram {
    /// One merge of these processes, within a CPU bound in percent of one CPU. It runs on one thread: `--cpu` bounds
    /// ksmd, and a census on several threads would take more than one CPU. Standard output is the report.
    pub fn merge_command(&self, pids: &[u32], percent: u32) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("merge");
        for pid in pids {
            command.args(["--pid", &pid.to_string()]);
        }
        // The processes belong to one user; guests would otherwise be domains of their own.
        command.args(["--across-domains", "--cpu", &percent.to_string(), "--threads", "1", "--json"]);
        command.stdin(Stdio::null());
        command
    }

    /// A calibration of the simulator. Standard output is its report.
    pub fn calibrate_command(&self, state: &Path, quick: bool) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("--state").arg(state).args(["sim", "calibrate", "--json"]);
        command.args(if quick { &["--pages", "2048", "--rounds", "1"][..] } else { &[] });
        command
    }

    /// A forecast for these processes under a policy, with the costs of a calibration. Standard output is its report.
    pub fn predict_command(&self, pids: &[u32], costs: &Path, policy: &str, duration: Duration) -> Command {
        let mut command = Command::new(&self.program);
        command.args(["sim", "predict", "--pass-interval", "2s", "--seeds", "1", "--exact", "--json"]);
        command.args(["--policy", policy, "--hours", &(duration.as_secs_f64() / 3600.0).to_string(), "--costs"]);
        command.arg(costs);
        for pid in pids {
            command.args(["--pid", &pid.to_string()]);
        }
        command
    }

    /// A program start with guided merging beside it, and a separate folder for pagefold's state. The caller appends
    /// the program and its arguments.
    pub fn run_guided_command(&self, state: &Path, percent: u32) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("--state").arg(state);
        command.args(["run", "--policy", "guided", "--cpu", &percent.to_string(), "--"]);
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::Absent;

    fn sample_host() -> HostObservation {
        let unknown = || Absent::NotOnThisKernel;
        HostObservation {
            total: Ok(Bytes::from_kib(16 << 20)),
            free: Err(unknown()),
            committed: Ok(Bytes::ZERO),
            ksm: Err(unknown()),
            ksmd_cpu: Err(unknown()),
        }
    }

    /// A window of 10 s in which ksmd scanned batches of this size at 1000 pages per second, half of the time on a CPU.
    fn sample_window(batch: u64) -> Vec<KsmSample> {
        (0..=10)
            .map(|at| KsmSample {
                seconds: f64::from(at),
                saved_pages: 0,
                ksmd_seconds: f64::from(at) / 2.0,
                pagefold_seconds: 0.0,
                scanned_pages: i64::from(at) * 1000,
                full_scans: 0,
                pages_to_scan: batch,
            })
            .collect()
    }

    fn extrapolated_seconds(policy: MergePolicy, batch: u64, scans: &[f64], pages: f64) -> f64 {
        let (host, watched) = (sample_host(), sample_window(batch));
        PolicyExtrapolation { policy, host: &host, window_samples: &watched, full_scan_page_counts: scans }
            .seconds_to_scan(pages)
            .unwrap()
    }

    fn is_near(value: f64, expected: f64) -> bool {
        (value / expected - 1.0).abs() < 1e-9
    }

    #[test]
    fn pages_scanned_in_the_window_are_not_extrapolated() {
        assert!(is_near(extrapolated_seconds(MergePolicy::Ksmtuned, 300, &[], 5000.0), 10.0));
        assert!(is_near(extrapolated_seconds(MergePolicy::Advisor20, 500, &[], 5000.0), 10.0));
    }

    #[test]
    fn ksmtuned_boosts_after_each_interval() {
        assert!(is_near(extrapolated_seconds(MergePolicy::Ksmtuned, 300, &[], 60_000.0), 60.0));
        // 300 pages took 0.15 s on a CPU and 0.15 s off it; 600 take 0.45 s.
        assert!(is_near(extrapolated_seconds(MergePolicy::Ksmtuned, 300, &[], 140_000.0), 120.0));
    }

    #[test]
    fn window_steps_are_taken_once_by_the_clock() {
        let batch = |settings: &Settings| settings.get(&Setting::PagesToScan).cloned();
        let mut steps = MergePolicy::Ksmtuned.schedule(&sample_host()).unwrap();
        assert_eq!(batch(&steps.settings_due(0.0).unwrap()).as_deref(), Some("300"));
        assert_eq!(steps.settings_due(59.9).unwrap(), Settings::new());
        assert_eq!(batch(&steps.settings_due(60.0).unwrap()).as_deref(), Some("600"));
        assert_eq!(steps.settings_due(60.0).unwrap(), Settings::new());
        let mut still = MergePolicy::Advisor20.schedule(&sample_host()).unwrap();
        assert_eq!(still.settings_due(0.0).unwrap().get(&Setting::AdvisorMode).map(String::as_str), Some("scan-time"));
        assert_eq!(still.settings_due(1000.0).unwrap(), Settings::new());
    }

    #[test]
    fn extrapolation_starts_with_settings_of_last_step() {
        let sample = |seconds: f64, scanned: i64, ksmd: f64, pages_to_scan: u64| KsmSample {
            scanned_pages: scanned,
            ksmd_seconds: ksmd,
            pages_to_scan,
            seconds,
            ..sample_window(300)[0]
        };
        // 200 batches of 300 pages until 60 s, then 100 of 600 until 105: 0.15 s off the CPU between two batches, 0.5
        // ms per page.
        let watched = [sample(0.0, 0, 0.0, 300), sample(60.0, 60_000, 30.0, 300), sample(105.0, 120_000, 60.0, 600)];
        let host = sample_host();
        let beyond = PolicyExtrapolation {
            policy: MergePolicy::Ksmtuned,
            host: &host,
            window_samples: &watched,
            full_scan_page_counts: &[],
        };
        // In steps of 600 for 15 s, then of 900 every 0.6 s.
        assert!(is_near(beyond.seconds_to_scan(140_000.0).unwrap(), 120.0));
        assert!(is_near(beyond.seconds_to_scan(155_000.0).unwrap(), 130.0));
    }

    #[test]
    fn policy_names_are_single_csv_cells() {
        assert!(MergePolicy::SLOW_FIRST.iter().all(|policy| !policy.name().contains([',', '"'])));
    }

    #[test]
    fn only_default_policy_is_extrapolated() {
        let given = |policy: MergePolicy| policy.max_window(false, false).as_secs();
        assert_eq!(
            [MergePolicy::Default, MergePolicy::Ksmtuned, MergePolicy::Advisor200, MergePolicy::Advisor20].map(given),
            [10, 120, 120, 120]
        );
        assert_eq!(
            (
                MergePolicy::Ksmtuned.max_window(true, false).as_secs(),
                MergePolicy::Ksmtuned.max_window(false, true).as_secs()
            ),
            (10, 2)
        );
    }

    #[test]
    fn merge_command_uses_one_census_thread() {
        let command = PagefoldProgram { program: PathBuf::from("pagefold") }.merge_command(&[7], 100);
        let words: Vec<_> = command.get_args().filter_map(|word| word.to_str()).collect();
        assert!(words.windows(2).any(|pair| pair == ["--threads", "1"]), "{words:?}");
    }

    #[test]
    fn advisor_steps_after_each_scan() {
        // 500 pages took 0.25 s on a CPU and 0.25 s off it.
        assert!(is_near(extrapolated_seconds(MergePolicy::Advisor20, 500, &[60_000.0], 40_000.0), 40.0));
        // The scan took 40 s instead of the target of 20: the first change counts for 30 % only. 500 pages at 50 % of a
        // CPU give 10 pages per percent, with a minimum of 100.
        let rule = Advisor { target_scan_time: 20, ..Advisor::default() };
        let next = rule.start().step(&rule, Duration::from_secs(40), Duration::from_secs(20)).pages_to_scan as f64;
        let rate = next / (0.25 + next / 2000.0);
        assert!(
            next != 500.0
                && is_near(
                    extrapolated_seconds(MergePolicy::Advisor20, 500, &[40_000.0], 50_000.0),
                    40.0 + 10_000.0 / rate
                )
        );
    }

    #[test]
    fn pause_keeps_the_cpu_share() {
        assert_eq!((pause_millis(0.1, 1.0), pause_millis(0.1, 0.5), pause_millis(0.1, 0.2)), (0, 100, 400));
    }
}
