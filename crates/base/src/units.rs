//! Units as types: pages, bytes, addresses, process and frame numbers.
//!
//! The page size is never a constant: it is a [`PageSize`] read from the host, 4 KiB on x86-64 and 4, 16 or 64 KiB on
//! aarch64.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Sub};

macro_rules! quantity {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u64);

        impl $name {
            /// Zero.
            pub const ZERO: Self = Self(0);

            /// The difference, or zero if `other` is larger.
            pub fn saturating_sub(self, other: Self) -> Self {
                Self(self.0.saturating_sub(other.0))
            }
        }

        impl Add for $name {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self(self.0 + other.0)
            }
        }

        impl Sub for $name {
            type Output = Self;
            fn sub(self, other: Self) -> Self {
                Self(self.0 - other.0)
            }
        }

        impl AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                self.0 += other.0;
            }
        }

        impl Sum for $name {
            fn sum<I: Iterator<Item = Self>>(values: I) -> Self {
                Self(values.map(|value| value.0).sum())
            }
        }
    };
}

quantity! {
    /// A number of base pages of the host's [`PageSize`].
    Pages
}
quantity! {
    /// A number of bytes.
    Bytes
}

impl Bytes {
    /// From the kibibytes that `/proc` prints with the unit `kB`.
    pub fn from_kib(kib: u64) -> Self {
        Self(kib.saturating_mul(1024))
    }
}

impl fmt::Display for Bytes {
    /// IEC units with three significant digits: `512 B`, `1.50 KiB`, `23.5 GiB`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (value, unit) = scale(self.0 as f64);
        let text = match (unit, value) {
            ("B", _) => format!("{value:.0} B"),
            (_, v) if v < 10.0 => format!("{v:.2} {unit}"),
            (_, v) if v < 100.0 => format!("{v:.1} {unit}"),
            (_, v) => format!("{v:.0} {unit}"),
        };
        f.pad(&text)
    }
}

fn scale(mut value: f64) -> (f64, &'static str) {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    for unit in units {
        // 999.5 would print as 1000 with three digits.
        if value < 999.5 || unit == "PiB" {
            return (value, unit);
        }
        value /= 1024.0;
    }
    unreachable!("the loop returns at its last unit")
}

/// A signed number of bytes, for net figures that may be negative.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct NetBytes(pub i64);

impl fmt::Display for NetBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let magnitude = Bytes(self.0.unsigned_abs());
        f.pad(&if self.0 < 0 { format!("-{magnitude}") } else { magnitude.to_string() })
    }
}

/// The size of a base page in bytes, a power of two of at least 1 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageSize(u32);

impl PageSize {
    /// A page size, or `None` if it is no power of two between 1 KiB and 1 GiB.
    pub fn new(bytes: u64) -> Option<Self> {
        (bytes.is_power_of_two() && (1 << 10..=1 << 30).contains(&bytes)).then_some(Self(bytes as u32))
    }

    /// The size in bytes.
    pub fn bytes(self) -> u64 {
        u64::from(self.0)
    }

    /// The size in bytes, as an index type.
    pub fn as_len(self) -> usize {
        self.0 as usize
    }

    /// The bytes of this many pages.
    pub fn bytes_of(self, pages: Pages) -> Bytes {
        Bytes(pages.0 * self.bytes())
    }

    /// The number of whole pages in this many bytes.
    pub fn pages_in(self, bytes: Bytes) -> Pages {
        Pages(bytes.0 / self.bytes())
    }
}

/// A half-open range of virtual addresses, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AddressRange {
    /// The first address.
    pub start: u64,
    /// The first address after the range.
    pub end: u64,
}

impl AddressRange {
    /// The length in bytes; zero for an inverted range.
    pub fn bytes(self) -> Bytes {
        Bytes(self.end.saturating_sub(self.start))
    }

    /// Whether the address lies in the range.
    pub fn contains(self, address: u64) -> bool {
        (self.start..self.end).contains(&address)
    }

    /// The intersection of both, if not empty.
    pub fn overlap(self, other: Self) -> Option<Self> {
        let overlap = Self { start: self.start.max(other.start), end: self.end.min(other.end) };
        (overlap.start < overlap.end).then_some(overlap)
    }

    /// The parts outside of the other ranges, which are ascending and disjoint.
    pub fn subtract(self, excluded: &[Self]) -> Vec<Self> {
        let mut remaining = Vec::new();
        let mut start = self.start;
        for range in &excluded[excluded.partition_point(|range| range.end <= self.start)..] {
            if range.start >= self.end {
                break;
            }
            if start < range.start {
                remaining.push(Self { start, end: range.start });
            }
            start = range.end;
        }
        if start < self.end {
            remaining.push(Self { start, end: self.end });
        }
        remaining
    }

    /// Its parts, cut at the multiples of this many bytes.
    pub fn cut_at_multiples(self, bytes: u64) -> impl Iterator<Item = Self> {
        let first = self.start / bytes * bytes;
        let part =
            move |start: u64| Self { start: start.max(self.start), end: self.end.min(start.saturating_add(bytes)) };
        (first..self.end).step_by(bytes as usize).map(part).filter(|part| part.start < part.end)
    }

    /// The union of some ranges: ascending and disjoint.
    pub fn union(mut ranges: Vec<Self>) -> Vec<Self> {
        ranges.sort_unstable();
        ranges.dedup_by(|next, last| {
            let joins = next.start <= last.end;
            if joins {
                last.end = last.end.max(next.end);
            }
            joins
        });
        ranges
    }
}

impl fmt::Display for AddressRange {
    /// In the format of `/proc/PID/maps`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}-{:08x}", self.start, self.end)
    }
}

/// A PID, which the kernel reuses. It is never used alone to act on a process: see [`ProcessId`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pid(pub u32);

impl fmt::Display for Pid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// A process: its PID and start time. No later process with the same PID has the same start time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessId {
    /// The PID, which the kernel reuses.
    pub pid: Pid,
    /// Field 22 of `/proc/PID/stat`: clock ticks since boot.
    pub start_time: u64,
}

/// A physical page frame number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pfn(pub u64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_end_at_multiples() {
        let cut = |start, end| -> Vec<(u64, u64)> {
            AddressRange { start, end }.cut_at_multiples(10).map(|part| (part.start, part.end)).collect()
        };
        assert_eq!(cut(3, 25), [(3, 10), (10, 20), (20, 25)]);
        assert_eq!(cut(10, 20), [(10, 20)]);
        assert_eq!(cut(12, 14), [(12, 14)]);
        assert_eq!(cut(5, 5), []);
    }

    #[test]
    fn ranges_are_united_and_subtracted() {
        let range = |start, end| AddressRange { start, end };
        let known = AddressRange::union(vec![range(14, 15), range(18, 30), range(0, 10), range(12, 14), range(20, 25)]);
        assert_eq!(known, [range(0, 10), range(12, 15), range(18, 30)]);
        assert_eq!(range(5, 20).subtract(&known), [range(10, 12), range(15, 18)]);
        assert_eq!(range(12, 14).subtract(&known), []);
        assert_eq!(range(30, 40).subtract(&known), [range(30, 40)]);
        assert_eq!(range(5, 20).subtract(&[]), [range(5, 20)]);
    }

    #[test]
    fn bytes_print_three_digits() {
        let check = |bytes, text: &str| assert_eq!(Bytes(bytes).to_string(), text);
        check(0, "0 B");
        check(999, "999 B");
        check(1000, "0.98 KiB");
        check(1024, "1.00 KiB");
        check(10 << 10, "10.0 KiB");
        check(100 << 20, "100 MiB");
        check(1023 << 20, "1.00 GiB");
        check(u64::MAX, "16384 PiB");
    }

    #[test]
    fn page_sizes_are_powers_of_two() {
        assert!(PageSize::new(4096).is_some());
        assert!(PageSize::new(65536).is_some());
        assert!(PageSize::new(0).is_none());
        assert!(PageSize::new(4095).is_none());
    }
}
