//! What the host says of its memory: totals, pressure, huge pages, nodes.

use crate::reading::Reading;
use crate::units::Bytes;

/// The lines of `/proc/meminfo` that Pagefold uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Memory {
    /// `MemTotal`.
    pub total: Reading<Bytes>,
    /// `MemFree`.
    pub free: Reading<Bytes>,
    /// `MemAvailable`.
    pub available: Reading<Bytes>,
    /// `AnonPages`: anonymous frames that are mapped.
    pub anon: Reading<Bytes>,
    /// `AnonHugePages`: the part of it in huge pages mapped as such.
    pub anon_huge: Reading<Bytes>,
    /// `SwapTotal`.
    pub swap_total: Reading<Bytes>,
    /// `SwapFree`.
    pub swap_free: Reading<Bytes>,
    /// `Hugetlb`: memory set aside for hugetlb pages.
    pub hugetlb: Reading<Bytes>,
}

/// One line of `/proc/pressure/*`: shares of the last 10, 60 and 300 seconds in percent, and the total.
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
