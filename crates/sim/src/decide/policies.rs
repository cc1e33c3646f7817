//! The policies that a simulation compares. The published ones are those of `merge::decide::policy`.

use super::ksmd::KsmSettings;
use super::rules::{KernelVersion, KsmRules};
use pagefold_base::ksm::{DEFAULT_PAGES_TO_SCAN, DEFAULT_SLEEP_MILLISECS, Settings};
use pagefold_base::units::Bytes;
use pagefold_merge::decide::policy::ksmtuned::KsmtunedState;
use pagefold_merge::decide::policy::{Advisor, FLAT_OUT_PAGES_TO_SCAN, Ksmtuned, Policy};
use std::fmt;

/// What sets ksmd's pace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ComparedPolicy {
    /// The kernel's defaults: 100 pages every 20 ms.
    Default,
    /// The shell daemon ksmtuned.
    Ksmtuned(Ksmtuned),
    /// The kernel's scan-time advisor.
    Advisor(Advisor),
    /// Batches without a pause.
    FlatOut,
    /// Fixed batches and pauses.
    Whole {
        /// `pages_to_scan`.
        pages: u64,
        /// `sleep_millisecs`.
        sleep_millisecs: u64,
    },
    /// Pagefold's daemon, which decides which memory ksmd scans, and when.
    Guided {
        /// Whether it merges pages across trust domains, as all other policies do. Otherwise its configuration decides.
        across_domains: bool,
        /// Its bound on CPU time in thousandths of one CPU. Without it, its configuration decides.
        cpu_permille: Option<u32>,
    },
}

/// Names of policies, for messages.
const NAMES: &str = "default, ksmtuned, advisor, advisor:SECONDS, flat-out, guided, guided:across-domains, \
     guided:5%, guided:across-domains:5% or whole:PAGES/SLEEPMS";

/// The first word of the daemon's names.
const GUIDED: &str = "guided";
/// The word of its name if it merges pages across trust domains.
const ACROSS_DOMAINS: &str = "across-domains";
/// The largest bound on CPU time in the name of a policy, in percent of one CPU.
const MAX_CPU_PERCENT: f64 = 100_000.0;

impl ComparedPolicy {
    /// The published policies that a kernel has.
    #[must_use]
    pub fn published(kernel: KernelVersion) -> Vec<Self> {
        [Self::Default, Self::Ksmtuned(Ksmtuned::default()), Self::Advisor(Advisor::default()), Self::FlatOut]
            .into_iter()
            .filter(|policy| policy.is_present(kernel))
            .collect()
    }

    /// Whether a kernel has what the policy needs.
    #[must_use]
    pub fn is_present(&self, kernel: KernelVersion) -> bool {
        !matches!(self, Self::Advisor(_)) || KsmRules::for_version(kernel).has_advisor
    }

    /// The policy of a name.
    ///
    /// # Errors
    /// What to write instead.
    pub fn parse(name: &str) -> Result<Self, String> {
        if let Some(pace) = name.strip_prefix("whole:") {
            let numbers = pace.split_once('/').and_then(|(pages, sleep)| {
                let pages: u32 = pages.parse().ok().filter(|&pages| pages > 0)?;
                Some(Self::Whole { pages: pages.into(), sleep_millisecs: sleep.parse::<u32>().ok()?.into() })
            });
            return numbers.ok_or_else(|| format!("{name}: give whole:PAGES/SLEEPMS, such as whole:2000/20"));
        }
        if name.starts_with(GUIDED) {
            return parse_guided(name).ok_or_else(|| {
                format!(
                    "{name}: give guided or guided:across-domains, or add a bound in tenths of a percent of one CPU: \
                     guided:2.5%"
                )
            });
        }
        match Policy::from_name(name) {
            Some(Ok(Policy::Default)) => Ok(Self::Default),
            Some(Ok(Policy::Ksmtuned(rule))) => Ok(Self::Ksmtuned(rule)),
            Some(Ok(Policy::Advisor(rule))) => Ok(Self::Advisor(rule)),
            Some(Ok(Policy::FlatOut)) => Ok(Self::FlatOut),
            Some(Err(error)) => Err(error),
            Some(Ok(Policy::Guided | Policy::Fixed(_))) | None => {
                Err(format!("{name}: no such policy; compare {NAMES}"))
            }
        }
    }

    /// Whether Pagefold's daemon sets the pace.
    #[must_use]
    pub fn is_guided(&self) -> bool {
        matches!(self, Self::Guided { .. })
    }

    /// The daemon with this bound on CPU time, in thousandths of one CPU. Other policies stay as they are.
    #[must_use]
    pub fn with_cpu_bound(&self, permille: u32) -> Self {
        match *self {
            Self::Guided { across_domains, .. } => Self::Guided { across_domains, cpu_permille: Some(permille) },
            _ => self.clone(),
        }
    }

    /// `pages_to_scan` and `sleep_millisecs` of a policy that does not change them.
    #[must_use]
    pub fn fixed_pace(&self) -> Option<(u64, u64)> {
        match *self {
            Self::Default => Some((DEFAULT_PAGES_TO_SCAN, DEFAULT_SLEEP_MILLISECS)),
            Self::FlatOut => Some((FLAT_OUT_PAGES_TO_SCAN, 0)),
            Self::Whole { pages, sleep_millisecs } => Some((pages, sleep_millisecs)),
            Self::Ksmtuned(_) | Self::Advisor(_) | Self::Guided { .. } => None,
        }
    }

    /// The settings at the start, and whether ksmd runs then. ksmtuned starts ksmd after its first interval.
    pub(crate) fn start(&self, settings: &KsmSettings) -> (KsmSettings, bool) {
        let pace = |pages_to_scan, sleep_millisecs| KsmSettings { pages_to_scan, sleep_millisecs, ..*settings };
        match (self, self.fixed_pace()) {
            (_, Some((pages, sleep_millisecs))) => (pace(pages, sleep_millisecs), true),
            (&Self::Advisor(rule), _) => {
                (KsmSettings { advisor: Some(rule), ..pace(rule.min_pages_to_scan, DEFAULT_SLEEP_MILLISECS) }, true)
            }
            _ => (*settings, false),
        }
    }
}

impl fmt::Display for ComparedPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Ksmtuned(_) => f.write_str("ksmtuned"),
            Self::Advisor(rule) => Policy::Advisor(*rule).fmt(f),
            Self::FlatOut => f.write_str("flat-out"),
            Self::Whole { pages, sleep_millisecs } => write!(f, "whole:{pages}/{sleep_millisecs}"),
            Self::Guided { across_domains, cpu_permille } => {
                f.write_str(GUIDED)?;
                if *across_domains {
                    write!(f, ":{ACROSS_DOMAINS}")?;
                }
                cpu_permille.map_or(Ok(()), |permille| write!(f, ":{}%", f64::from(permille) / 10.0))
            }
        }
    }
}

/// The daemon of a name: `guided`, with the words `across-domains`, `2.5%` or both.
fn parse_guided(name: &str) -> Option<ComparedPolicy> {
    let mut words = name.split(':').peekable();
    words.next_if_eq(&GUIDED)?;
    let across_domains = words.next_if_eq(&ACROSS_DOMAINS).is_some();
    let permille = |word: &str| {
        let percent: f64 = word.strip_suffix('%')?.parse().ok()?;
        let permille = (percent * 10.0).round();
        let is_multiple = (percent * 10.0 - permille).abs() < 1e-6;
        (is_multiple && permille >= 1.0 && percent <= MAX_CPU_PERCENT).then_some(permille as u32)
    };
    let cpu_permille = match words.next() {
        Some(word) => Some(permille(word)?),
        None => None,
    };
    words.next().is_none().then_some(ComparedPolicy::Guided { across_domains, cpu_permille })
}

/// The variables of a policy that takes steps.
#[derive(Clone, Debug)]
pub(crate) struct PolicySteps {
    rule: Ksmtuned,
    state: KsmtunedState,
}

impl PolicySteps {
    /// The variables at the start, on a host with so much memory; `None` for a policy without steps.
    pub(crate) fn start(policy: &ComparedPolicy, memory: Bytes) -> Option<Self> {
        match policy {
            ComparedPolicy::Ksmtuned(rule) => Some(Self { state: rule.start(memory), rule: rule.clone() }),
            _ => None,
        }
    }

    /// Time between two steps, in nanoseconds.
    pub(crate) fn interval_ns(&self) -> u64 {
        self.rule.interval.as_nanos() as u64
    }

    /// A step, on a host with so much free memory and so much that its machines commit. Returns what it writes.
    pub(crate) fn step(&mut self, free: Bytes, committed: Bytes) -> Settings {
        let (state, settings) = self.rule.step(self.state, free, committed);
        self.state = state;
        settings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_written_alike() {
        for name in [
            "default",
            "ksmtuned",
            "advisor",
            "advisor:20",
            "flat-out",
            "guided",
            "guided:across-domains",
            "guided:5%",
            "guided:across-domains:2.5%",
            "guided:across-domains:250%",
            "whole:2000/20",
            "whole:1000000000/0",
        ] {
            assert_eq!(ComparedPolicy::parse(name).unwrap().to_string(), name);
        }
    }

    #[test]
    fn old_kernels_have_no_advisor() {
        let names = |kernel| -> Vec<String> {
            let kernel = KernelVersion::parse(kernel).unwrap();
            ComparedPolicy::published(kernel).iter().map(ToString::to_string).collect()
        };
        assert_eq!(names("6.7"), ["default", "ksmtuned", "flat-out"]);
        assert_eq!(names("6.8"), ["default", "ksmtuned", "advisor", "flat-out"]);
    }

    #[test]
    fn other_names_are_refused_with_a_remedy() {
        let error = |name| ComparedPolicy::parse(name).unwrap_err();
        assert!(error("fast").contains("no such policy"));
        for name in ["whole:", "whole:0/20", "whole:100", "whole:100/x", "whole:4294967296/0"] {
            assert!(error(name).ends_with("such as whole:2000/20"), "{name}");
        }
        assert!(error("advisor:0").contains("whole seconds"));
        for name in [
            "guided:",
            "guided:5",
            "guided:0%",
            "guided:-1%",
            "guided:5%:across-domains",
            "guided:nan%",
            "guided:0.05%",
            "guided:200000%",
            "guided:5%:",
        ] {
            assert!(error(name).ends_with("guided:2.5%"), "{name}");
        }
        assert!(error("guidedly").contains("give guided or"));
    }
}
