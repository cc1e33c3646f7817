//! What is compared: the policies of [`pagefold_model::policy`], and pagefold as a command.
//!
//! What a policy writes is computed by the functions that the product itself drives KSM with. Here is only which of them
//! take part, and how they go on beyond the window that they are given.

use super::readings::Sample;
use pagefold_labs::ksm::Ksm;
use pagefold_model::ksm::{Setting, Settings};
use pagefold_model::policy::{Advisor, Observation, Policy as Rule};
use pagefold_model::{Bytes, Reading};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// A way to merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Policy {
    /// `pages_to_scan` 100, `sleep_millisecs` 20.
    Default,
    /// ksmtuned, as if memory were short: otherwise it starts nothing at all.
    Ksmtuned,
    /// The kernel's advisor, with its default target of 200 s.
    Advisor200,
    /// The kernel's advisor, to finish a pass in 20 s.
    Advisor20,
    /// Everything enrolled, ksmd without a pause, or with pauses that keep it to a bound.
    Whole,
    /// `pagefold merge`.
    Guided,
}

impl Policy {
    /// All, the slow ones first.
    pub const ALL: [Self; 6] =
        [Self::Default, Self::Ksmtuned, Self::Advisor200, Self::Advisor20, Self::Whole, Self::Guided];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "default 100/20",
            Self::Ksmtuned => "ksmtuned",
            Self::Advisor200 => "advisor 200 s",
            Self::Advisor20 => "advisor 20 s",
            Self::Whole => "whole, flat out",
            Self::Guided => "guided",
        }
    }

    /// Whether it is given a window only, and the rest is extrapolated.
    pub fn is_slow(self) -> bool {
        !matches!(self, Self::Whole | Self::Guided)
    }

    /// Whether the workload is to enrol itself.
    pub fn enrols(self) -> bool {
        self != Self::Guided
    }

    /// The rule that it sets KSM by. Guided merging begins with the kernel's default and sets its own pace.
    fn rule(self) -> Rule {
        let name = match self {
            Self::Default | Self::Guided => "default",
            Self::Ksmtuned => "ksmtuned",
            Self::Advisor200 => "advisor",
            Self::Advisor20 => "advisor:20",
            Self::Whole => "flat-out",
        };
        Rule::named(name).and_then(Result::ok).expect("a name of the model's")
    }

    /// Write its settings, `run` not among them. The advisor is off.
    pub fn prepare(self, ksm: &Ksm, host: &Observation) -> Reading<()> {
        let settings = self.rule().once(&short_of_memory(host))?;
        for (setting, value) in settings.iter().filter(|(setting, _)| **setting != Setting::Run) {
            ksm.set(setting.file(), value);
        }
        Ok(())
    }
}

/// The same host without free memory: ksmtuned merges nothing before.
fn short_of_memory(host: &Observation) -> Observation {
    Observation { free: Ok(Bytes::ZERO), ..host.clone() }
}

/// A policy beyond the window in which it was watched.
#[derive(Clone, Copy, Debug)]
pub struct Beyond<'a> {
    /// The policy.
    pub policy: Policy,
    /// The host that it is used on.
    pub host: &'a Observation,
    /// The looks in the window, from its beginning.
    pub watched: &'a [Sample],
    /// After how many scanned pages full scans end.
    pub scans: &'a [f64],
}

impl Beyond<'_> {
    /// After how many seconds it has scanned so many pages.
    ///
    /// Its rule takes the steps that are due; a page takes ksmd as long as in the window, and so does what lies between
    /// two batches.
    pub fn seconds_to_scan(&self, pages: f64) -> Option<f64> {
        let pace = Pace::of(self.watched)?;
        match self.policy.rule() {
            Rule::Advisor(rule) => self.advised(&rule, pace, pages),
            rule => self.stepped(&rule, pace, pages),
        }
    }

    /// Steps are due after intervals.
    fn stepped(&self, rule: &Rule, pace: Pace, pages: f64) -> Option<f64> {
        let last = self.watched.last()?;
        let host = short_of_memory(self.host);
        let (mut state, settings) = rule.start(&host).ok()?;
        let mut batch = last.pages_to_scan as f64;
        let take = |settings: &Settings, batch: &mut f64| {
            if let Some(pages) = settings.get(&Setting::PagesToScan).and_then(|pages| pages.parse().ok()) {
                *batch = pages;
            }
        };
        take(&settings, &mut batch);
        let (mut next, mut at, mut left) = (0.0, last.seconds, (pages - last.scanned as f64).max(0.0));
        loop {
            // The first step was taken when the window began.
            while next <= at {
                let settings;
                (state, settings) = rule.step(state, &host).ok()?;
                take(&settings, &mut batch);
                next += rule.interval().as_secs_f64();
            }
            let rate = pace.rate(batch);
            if left <= rate * (next - at) {
                return Some(at + left / rate);
            }
            left -= rate * (next - at);
            at = next;
        }
    }

    /// A step is due at the end of each full scan. ksmd is taken to have used no CPU before the window, as on a host that
    /// was just booted; what the kernel did in the window itself, it did with what ksmd had used since boot.
    fn advised(&self, rule: &Advisor, pace: Pace, pages: f64) -> Option<f64> {
        let (first, last) = (self.watched.first()?, self.watched.last()?);
        let seconds = |seconds: f64| Duration::from_secs_f64(seconds.max(0.0));
        let (mut context, mut began) = (rule.start(), first.seconds);
        for pair in self.watched.windows(2).filter(|pair| pair[1].full_scans > pair[0].full_scans) {
            context = context.step(rule, seconds(pair[1].seconds - began), seconds(pair[1].ksmd));
            began = pair[1].seconds;
        }
        context.pages_to_scan = last.pages_to_scan;
        let (mut at, mut scanned) = (last.seconds, last.scanned as f64);
        let ended = usize::try_from(last.full_scans).unwrap_or(0);
        for &end in self.scans.iter().skip(ended).take_while(|&&end| end < pages) {
            at += (end - scanned).max(0.0) / pace.rate(context.pages_to_scan as f64);
            scanned = scanned.max(end);
            context = context.step(rule, seconds(at - began), seconds(pace.cost * scanned));
            began = at;
        }
        Some(at + (pages - scanned).max(0.0) / pace.rate(context.pages_to_scan as f64))
    }
}

/// How ksmd gets on.
#[derive(Clone, Copy, Debug)]
struct Pace {
    /// Seconds between two batches: it sleeps, and waits for a CPU.
    gap: f64,
    /// CPU seconds for a page.
    cost: f64,
}

impl Pace {
    /// In a window; nothing where it scanned nothing.
    fn of(watched: &[Sample]) -> Option<Self> {
        let (first, last) = (watched.first()?, watched.last()?);
        let scanned = |from: &Sample, to: &Sample| (to.scanned - from.scanned) as f64;
        let batches: f64 =
            watched.windows(2).map(|pair| scanned(&pair[0], &pair[1]) / pair[1].pages_to_scan as f64).sum();
        let used = last.ksmd - first.ksmd;
        (batches > 0.0).then(|| Self {
            gap: ((last.seconds - first.seconds - used) / batches).max(0.0),
            cost: used / scanned(first, last),
        })
    }

    /// Pages a second, in batches of so many.
    fn rate(self, batch: f64) -> f64 {
        batch / (self.gap + batch * self.cost)
    }
}

/// The pause after a batch that took so long, for ksmd to take this share of a CPU, in milliseconds.
pub fn pause(batch_seconds: f64, share: f64) -> u64 {
    if share >= 1.0 { 0 } else { (batch_seconds * 1000.0 * (1.0 - share) / share).round() as u64 }
}

/// How pagefold is called. The only place that knows.
#[derive(Clone, Debug)]
pub struct Pagefold {
    /// The binary.
    pub program: PathBuf,
}

impl Pagefold {
    /// One merge of these processes, within a bound on CPU in percent of one.
    pub fn merge(&self, pids: &[u32], percent: u32) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("merge");
        for pid in pids {
            command.args(["--pid", &pid.to_string()]);
        }
        // They belong to one user; machines would be domains of their own.
        command.args(["--across-domains", "--cpu", &percent.to_string(), "--json"]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command
    }

    /// A program started with guided merging beside it, with a folder of its own for pagefold's state. The program and
    /// its arguments are to follow.
    pub fn run_guided(&self, state: &Path, percent: u32) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("--state").arg(state);
        command.args(["run", "--policy", "guided", "--cpu", &percent.to_string(), "--"]);
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_model::Absent;

    fn host() -> Observation {
        let unknown = || Absent::NotOnThisKernel;
        Observation {
            total: Ok(Bytes::from_kib(16 << 20)),
            free: Err(unknown()),
            committed: Ok(Bytes::ZERO),
            ksm: Err(unknown()),
            ksmd_cpu: Err(unknown()),
        }
    }

    /// A window of 10 s in which ksmd scanned batches of so many pages at 1000 pages a second, half of the time on a CPU.
    fn window(batch: u64) -> Vec<Sample> {
        (0..=10)
            .map(|at| Sample {
                seconds: f64::from(at),
                saved: 0,
                ksmd: f64::from(at) / 2.0,
                pagefold: 0.0,
                scanned: i64::from(at) * 1000,
                full_scans: 0,
                pages_to_scan: batch,
            })
            .collect()
    }

    fn seconds(policy: Policy, batch: u64, scans: &[f64], pages: f64) -> f64 {
        let (host, watched) = (host(), window(batch));
        Beyond { policy, host: &host, watched: &watched, scans }.seconds_to_scan(pages).unwrap()
    }

    fn is_near(value: f64, expected: f64) -> bool {
        (value / expected - 1.0).abs() < 1e-9
    }

    #[test]
    fn what_was_scanned_in_the_window_takes_no_longer() {
        assert!(is_near(seconds(Policy::Ksmtuned, 300, &[], 5000.0), 10.0));
        assert!(is_near(seconds(Policy::Advisor20, 500, &[], 5000.0), 10.0));
    }

    #[test]
    fn ksmtuned_boosts_after_each_interval() {
        assert!(is_near(seconds(Policy::Ksmtuned, 300, &[], 60_000.0), 60.0));
        // 300 pages took 0.15 s on a CPU and 0.15 s beside it; 600 take 0.45 s.
        assert!(is_near(seconds(Policy::Ksmtuned, 300, &[], 140_000.0), 120.0));
    }

    #[test]
    fn the_advisor_takes_a_step_after_each_scan() {
        // 500 pages took 0.25 s on a CPU and 0.25 s beside it.
        assert!(is_near(seconds(Policy::Advisor20, 500, &[60_000.0], 40_000.0), 40.0));
        // 40 s for a scan that is to take 20: its first change counts by 30 % only, and of 500 pages at 50 % of a CPU
        // there are 10 for each percent, 100 at the least.
        let rule = Advisor { target_scan_time: 20, ..Advisor::default() };
        let next = rule.start().step(&rule, Duration::from_secs(40), Duration::from_secs(20)).pages_to_scan as f64;
        let rate = next / (0.25 + next / 2000.0);
        assert!(
            next != 500.0 && is_near(seconds(Policy::Advisor20, 500, &[40_000.0], 50_000.0), 40.0 + 10_000.0 / rate)
        );
    }

    #[test]
    fn a_pause_keeps_to_a_share() {
        assert_eq!((pause(0.1, 1.0), pause(0.1, 0.5), pause(0.1, 0.2)), (0, 100, 400));
    }
}
