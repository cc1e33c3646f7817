//! Policies: rules that choose KSM's settings, as pure functions.
//!
//! The published policies are copied exactly, quirks included, because they are the baselines of every claim: the
//! kernel's default pace, the shell daemon [`ksmtuned`], the kernel's own [`advisor`]. The others are flat out, the
//! pace between guided merges, and fixed settings from a file.
//!
//! Call [`start`](Policy::start) once and then [`step`](Policy::step) after each [`interval`](Policy::interval). Both
//! return the settings to write and a [`PolicyState`] to pass to the next step. Their input is a [`HostObservation`].
//!
//! Limits: the advisor runs in the kernel, at the end of each full scan; [`Policy::Advisor`] only switches it on.
//! [`advisor::AdvisorContext::step`] computes its steps.

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
    /// The kernel's defaults when KSM is switched on: 100 pages every 20 ms.
    Default,
    /// The daemon of Red Hat, Debian and Proxmox.
    Ksmtuned(Ksmtuned),
    /// The kernel's scan-time advisor (6.8).
    Advisor(Advisor),
    /// As fast as ksmd goes.
    FlatOut,
    /// The pace between guided merges, while ranges stay enrolled.
    Guided,
    /// Fixed settings that an operator wrote.
    Fixed(Settings),
}

/// The state of a host at one moment, as input of policies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostObservation {
    /// `MemTotal`.
    pub total: Reading<Bytes>,
    /// `MemFree + Buffers + Cached`: ksmtuned's free memory.
    pub free: Reading<Bytes>,
    /// Resident memory of all QEMU processes: ksmtuned's committed memory.
    pub committed: Reading<Bytes>,
    /// KSM's settings and counters.
    pub ksm: Reading<Ksm>,
    /// CPU time of ksmd since boot.
    pub ksmd_cpu: Reading<Duration>,
}

/// The state of a policy from step to step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicyState {
    /// None: the settings stay as they are.
    Stateless,
    /// The variables of the shell daemon.
    Ksmtuned(ksmtuned::KsmtunedState),
}

/// `pages_to_scan` when flat out. ksmd does not sleep then, so the batch only decides how often ksmd reads its settings
/// and checks whether to stop. 20,000 pages are 80 ms at 4 us each, so the time between batches no longer matters. A
/// batch of 5,000 at 10 ms merges a small fleet half as fast.
pub const FLAT_OUT_PAGES_TO_SCAN: u64 = 20_000;

/// `sleep_millisecs` between guided merges. Enrolled pages are then known to be merged already; ksmd only has to merge
/// pages that were written and became equal again. 100 pages a second are 0.04 % of a CPU at 4 us each.
pub const GUIDED_SLEEP_MILLISECS: u64 = 1000;

/// The names of the policies that need no file.
pub const POLICY_NAMES: [&str; 5] = ["default", "ksmtuned", "advisor", "flat-out", "guided"];

/// How often to check whether fixed settings are still in place.
const FIXED_SETTINGS_CHECK_INTERVAL: Duration = Duration::from_secs(1);

impl Policy {
    /// The policy of a name: one of [`POLICY_NAMES`], or `advisor:SECONDS` for another target. `None` for an unknown
    /// name; an error for an invalid target.
    pub fn from_name(name: &str) -> Option<Result<Self, String>> {
        Some(Ok(match name {
            "default" => Self::Default,
            "ksmtuned" => Self::Ksmtuned(Ksmtuned::default()),
            "advisor" => Self::Advisor(Advisor::default()),
            "flat-out" => Self::FlatOut,
            "guided" => Self::Guided,
            _ => {
                let target = name.strip_prefix("advisor:")?;
                let invalid_target =
                    || format!("advisor:{target}: the target must be whole seconds, 1 or more: advisor:20");
                return Some(
                    target
                        .parse()
                        .ok()
                        .filter(|&target| target > 0)
                        .ok_or_else(invalid_target)
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

    /// Whether its settings depend on the host, so that its steps must run.
    pub fn adapts(&self) -> bool {
        matches!(self, Self::Ksmtuned(_))
    }

    /// The settings at the start. ksmtuned writes nothing before its first interval is over.
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

    /// The settings after another interval.
    pub fn step(&self, state: PolicyState, host: &HostObservation) -> Reading<(PolicyState, Settings)> {
        match (self, state) {
            (Self::Ksmtuned(rule), PolicyState::Ksmtuned(state)) => {
                let (state, settings) = rule.step(state, host.free.clone()?, host.committed.clone()?);
                Ok((PolicyState::Ksmtuned(state), settings))
            }
            (_, state) => Ok((state, Settings::new())),
        }
    }

    /// The settings for a single write without later steps: the start, and for a policy that adapts one step.
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

/// A fixed pace of ksmd: without the advisor, where the kernel has one.
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
