//! The host's memory state: totals, pressure, huge pages, nodes.

use crate::reading::Reading;
use crate::units::Bytes;
use std::fmt;
use std::str::FromStr;

/// The share of memory, or of a limit, below which it counts as short even without pressure. Without swap no task waits
/// for anonymous memory until none is left and the OOM killer acts. Unmerging is refused in the last 1 % anyway
/// ([`crate::guard::reserve`]); this limit leaves enough time to merge before that.
const LOW_MEMORY_SHARE: f64 = 0.05;

/// The lines of `/proc/meminfo` that Pagefold uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemInfo {
    /// `MemTotal`.
    pub total: Reading<Bytes>,
    /// `MemFree`.
    pub free: Reading<Bytes>,
    /// `MemAvailable`.
    pub available: Reading<Bytes>,
    /// `AnonPages`: anonymous frames that are mapped.
    pub anon: Reading<Bytes>,
    /// `AnonHugePages`: the part of these mapped as huge pages.
    pub anon_huge: Reading<Bytes>,
    /// `SwapTotal`.
    pub swap_total: Reading<Bytes>,
    /// `SwapFree`.
    pub swap_free: Reading<Bytes>,
    /// `Hugetlb`: memory reserved for hugetlb pages.
    pub hugetlb: Reading<Bytes>,
}

/// One line of `/proc/pressure/*`: stalled shares of the last 10, 60 and 300 seconds in percent, and the total.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PressureLine {
    /// Percent of the last 10 seconds.
    pub avg10: f64,
    /// Percent of the last 60 seconds.
    pub avg60: f64,
    /// Percent of the last 300 seconds.
    pub avg300: f64,
    /// Microseconds stalled since boot.
    pub total: u64,
}

/// `/proc/pressure/memory`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pressure {
    /// Some task was stalled.
    pub some: PressureLine,
    /// All tasks were stalled.
    pub full: PressureLine,
}

/// The default limit: the percentage of time in which some task waits for memory, above which memory counts as short.
pub const DEFAULT_PRESSURE_PERCENT: f64 = 10.0;

/// The memory shortage of a host or a cgroup.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Shortage {
    /// Percent of the last ten seconds in which some task waited for memory.
    pub pressure_percent: Option<f64>,
    /// The share of memory that is left, if it is to be considered.
    pub left_share: Option<f64>,
}

impl Shortage {
    /// For a host. `MemAvailable`, which is an estimate, is considered only if the pressure is unknown (`psi=0`).
    pub fn for_host(pressure_percent: Option<f64>, available: Option<Bytes>, total: Option<Bytes>) -> Self {
        let known_memory = available.zip(total).filter(|_| pressure_percent.is_none());
        Self { pressure_percent, left_share: known_memory.map(|(available, total)| share_left(available, total)) }
    }

    /// For a cgroup, with what is left of each limit that applies to it.
    pub fn for_cgroup(pressure_percent: Option<f64>, limits: impl IntoIterator<Item = (Bytes, Bytes)>) -> Self {
        let shares = limits.into_iter().map(|(headroom, limit)| share_left(headroom, limit));
        Self { pressure_percent, left_share: shares.min_by(f64::total_cmp) }
    }

    /// Whether memory is short, if this percentage of waiting is the limit.
    pub fn is_short(self, percent: f64) -> bool {
        self.pressure_percent.is_some_and(|pressure| pressure >= percent)
            || self.left_share.is_some_and(|share| share < LOW_MEMORY_SHARE)
    }
}

/// The share of a whole that is left. For a whole of 0, the share is 0.
fn share_left(left: Bytes, total: Bytes) -> f64 {
    left.0 as f64 / total.0.max(1) as f64
}

/// A machine with at most this share of its memory or accesses on other nodes counts as placed. What remains is memory
/// of the monitor and pages that cannot be moved.
pub const MAX_REMOTE_SHARE_OF_PLACED_MACHINE: f64 = 0.02;

/// From which node the kernel takes memory of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MemoryPolicy {
    /// The policy of the thread that touches the memory first: its own node, unless the thread has another one.
    Default,
    /// This node, and near ones if it has no free memory (`MPOL_PREFERRED`).
    Prefer(u32),
}

/// As in `/proc/PID/numa_maps` (mm/mempolicy.c, `mpol_to_str`).
impl fmt::Display for MemoryPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => write!(f, "default"),
            Self::Prefer(node) => write!(f, "prefer:{node}"),
        }
    }
}

/// Any other policy is none that Pagefold sets.
impl FromStr for MemoryPolicy {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text.strip_prefix("prefer:") {
            Some(node) => node.parse().map(Self::Prefer).map_err(drop),
            None if text == "default" => Ok(Self::Default),
            None => Err(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_short_under_pressure_or_when_little_is_left() {
        let mib = |mib: u64| Some(Bytes(mib << 20));
        let host = |waited, available| Shortage::for_host(waited, mib(available), mib(1000)).is_short(10.0);
        assert!(host(Some(10.0), 900) && !host(Some(9.9), 900));
        assert!(!host(Some(0.0), 1), "only pressure counts if it is known");
        assert!(host(None, 49) && !host(None, 51), "otherwise the share that is left counts");
        assert!(!Shortage::for_host(None, None, mib(1000)).is_short(10.0), "unknown memory is not short");

        let cgroup = |waited, limits: &[(u64, u64)]| {
            let limits = limits.iter().map(|&(left, limit)| (Bytes(left), Bytes(limit)));
            Shortage::for_cgroup(waited, limits).is_short(10.0)
        };
        assert!(cgroup(Some(10.0), &[]) && !cgroup(Some(0.0), &[]) && !cgroup(None, &[]));
        assert!(cgroup(Some(0.0), &[(90, 100), (4, 100)]), "any limit is enough");
        assert!(!cgroup(Some(0.0), &[(90, 100), (6, 100)]));
        assert!(cgroup(None, &[(0, 0)]), "a limit of zero");
    }
}
