//! Policies: rules by which KSM's settings are chosen, as pure functions.
//!
//! The published ones are here as they are, quirks included, because they are the baselines that every claim is
//! measured against: the kernel's default pace, the shell daemon [`ksmtuned`], the kernel's own [`advisor`]. Beside
//! them stand flat out, the pace between guided merges, and settings that somebody wrote down.
//!
//! A policy is asked once to [`start`](Policy::start) and then to [`step`](Policy::step) after each
//! [`interval`](Policy::interval). Both answer with the settings to write and a [`PolicyState`] to hand in the next time;
//! what they need to know of the host is an [`HostObservation`].
//!
//! Limits: the advisor runs in the kernel, at the end of each full scan, and is only switched on by
//! [`Policy::Advisor`]; what it then does can be computed with [`advisor::AdvisorContext::tick_step`].

pub mod advisor;
pub mod ksmtuned;

pub use advisor::Advisor;
pub use ksmtuned::Ksmtuned;

use pagefold_base::ksm::{DEFAULT_PAGES_TO_SCAN, DEFAULT_SLEEP_MILLISECS, Ksm, Setting, Settings};
use pagefold_base::reading::Reading;
use pagefold_base::units::Bytes;
use std::fmt;
use std::time::Duration;

/// A rule for KSM's settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Policy {
    /// What the kernel starts with when KSM is switched on: 100 pages every 20 ms.
    Default,
    /// The daemon of Red Hat, Debian and Proxmox.
    Ksmtuned(Ksmtuned),
    /// The kernel's scan-time advisor (6.8).
    Advisor(Advisor),
    /// As fast as ksmd goes.
    FlatOut,
    /// The pace between guided merges, while ranges stay enrolled.
    Guided,
    /// Settings as somebody wrote them down.
    Fixed(Settings),
}

/// What policies know of a host at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostObservation {
    /// `MemTotal`.
    pub total: Reading<Bytes>,
    /// `MemFree + Buffers + Cached`: what ksmtuned takes for free.
    pub free: Reading<Bytes>,
    /// Resident memory of all QEMU processes: what ksmtuned takes for committed.
    pub committed: Reading<Bytes>,
    /// KSM's settings and counters.
    pub ksm: Reading<Ksm>,
    /// CPU time of ksmd since boot.
    pub ksmd_cpu: Reading<Duration>,
}

/// What a policy remembers from step to step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicyState {
    /// Nothing: the settings stay as they are.
    Stateless,
    /// What the shell daemon keeps in variables.
    Ksmtuned(ksmtuned::KsmtunedState),
}

/// `pages_to_scan` when flat out. ksmd does not sleep then, so the batch decides only how often it comes to look at
/// its settings and whether it is to stop: 20,000 pages are 80 ms at 4 us each, and the time between batches no longer
/// counts. A batch of 5,000 at 10 ms merges a small fleet half as fast.
pub const FLAT_OUT_PAGES_TO_SCAN: u64 = 20_000;

/// `sleep_millisecs` between guided merges. What is enrolled then is known to be merged already; ksmd is left only to
/// take up what was written and became alike again. 100 pages a second are 0.04 % of a CPU at 4 us each.
pub const GUIDED_SLEEP_MILLISECS: u64 = 1000;

/// The names of the policies that need no file.
pub const POLICY_NAMES: [&str; 5] = ["default", "ksmtuned", "advisor", "flat-out", "guided"];

/// How often somebody looks whether fixed settings are still there.
const FIXED_SETTINGS_CHECK_INTERVAL: Duration = Duration::from_secs(1);

impl Policy {
    /// The policy of a name: one of [`POLICY_NAMES`], or `advisor:SECONDS` for another target. `None` for a name that is
    /// none; an error for a target that is none.
    pub fn from_name(name: &str) -> Option<Result<Self, String>> {
        Some(Ok(match name {
            "default" => Self::Default,
            "ksmtuned" => Self::Ksmtuned(Ksmtuned::default()),
            "advisor" => Self::Advisor(Advisor::default()),
            "flat-out" => Self::FlatOut,
            "guided" => Self::Guided,
            _ => {
                let target = name.strip_prefix("advisor:")?;
                let wrong = || format!("advisor:{target}: a target of whole seconds is needed, 1 or more: advisor:20");
                return Some(
                    target
                        .parse()
                        .ok()
                        .filter(|&target| target > 0)
                        .ok_or_else(wrong)
                        .map(|target| Self::Advisor(Advisor { target_scan_time: target, ..Advisor::default() })),
                );
            }
        }))
    }

    /// How long to wait before the next step.
    pub fn interval(&self) -> Duration {
        match self {
            Self::Ksmtuned(rule) => rule.interval,
            _ => FIXED_SETTINGS_CHECK_INTERVAL,
        }
    }

    /// Whether its settings move with the host, so that somebody has to take its steps.
    pub fn adapts(&self) -> bool {
        matches!(self, Self::Ksmtuned(_))
    }

    /// What is written when it begins. ksmtuned writes nothing before its first interval is over.
    pub fn start(&self, host: &HostObservation) -> Reading<(PolicyState, Settings)> {
        Ok(match self {
            Self::Default => {
                (PolicyState::Stateless, fixed_pace_settings(host, DEFAULT_PAGES_TO_SCAN, DEFAULT_SLEEP_MILLISECS)?)
            }
            Self::FlatOut => (PolicyState::Stateless, fixed_pace_settings(host, FLAT_OUT_PAGES_TO_SCAN, 0)?),
            Self::Guided => {
                (PolicyState::Stateless, fixed_pace_settings(host, DEFAULT_PAGES_TO_SCAN, GUIDED_SLEEP_MILLISECS)?)
            }
            Self::Advisor(rule) => (PolicyState::Stateless, rule.settings()),
            Self::Fixed(settings) => (PolicyState::Stateless, settings.clone()),
            Self::Ksmtuned(rule) => (PolicyState::Ksmtuned(rule.start(host.total.clone()?)), Settings::new()),
        })
    }

    /// What is written after another interval.
    pub fn step(&self, state: PolicyState, host: &HostObservation) -> Reading<(PolicyState, Settings)> {
        match (self, state) {
            (Self::Ksmtuned(rule), PolicyState::Ksmtuned(state)) => {
                let (state, settings) = rule.step(state, host.free.clone()?, host.committed.clone()?);
                Ok((PolicyState::Ksmtuned(state), settings))
            }
            (_, state) => Ok((state, Settings::new())),
        }
    }

    /// What is written at once by somebody who does not come back: the start, and for a policy that adapts one step.
    pub fn one_shot_settings(&self, host: &HostObservation) -> Reading<Settings> {
        let (state, mut settings) = self.start(host)?;
        if self.adapts() {
            settings.extend(self.step(state, host)?.1);
        }
        Ok(settings)
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Ksmtuned(_) => f.write_str("ksmtuned"),
            Self::Advisor(rule) if *rule == Advisor::default() => f.write_str("advisor"),
            Self::Advisor(rule) => write!(f, "advisor:{}", rule.target_scan_time),
            Self::FlatOut => f.write_str("flat-out"),
            Self::Guided => f.write_str("guided"),
            Self::Fixed(_) => f.write_str("file"),
        }
    }
}

/// A pace of ksmd that nobody changes: without the advisor, where the kernel has one.
fn fixed_pace_settings(host: &HostObservation, pages_to_scan: u64, sleep_millisecs: u64) -> Reading<Settings> {
    let ksm = host.ksm.as_ref().map_err(Clone::clone)?;
    let mut settings = Settings::from([
        (Setting::PagesToScan, pages_to_scan.to_string()),
        (Setting::SleepMillisecs, sleep_millisecs.to_string()),
        (Setting::Run, "1".to_owned()),
    ]);
    if ksm.advisor_mode.is_ok() {
        settings.insert(Setting::AdvisorMode, "none".to_owned());
    }
    Ok(settings)
}

#[cfg(test)]
mod tests;
