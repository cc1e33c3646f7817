//! Whether a process has run since an earlier time.

use crate::{Host, ProcessHandle, observe, parse};
use pagefold_base::{Absent, Reading};

/// The CPU time and page faults of a process so far. While neither moves, none of its threads has written anything.
///
/// Compare only counters that were read in the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActivityCounters {
    /// CPU time of all threads, in nanoseconds or clock ticks.
    cpu_time: u64,
    page_faults: u64,
}

impl ActivityCounters {
    /// The counters now, with the CPU time in nanoseconds. Reads one file of each thread. Fails if the process has no
    /// CPU time: the kernel does not count it then.
    pub fn read_exact(host: &dyn Host, handle: &dyn ProcessHandle) -> Reading<Self> {
        match observe::cpu_time_ns(host, handle)? {
            0 => Err(Absent::NotOnThisKernel),
            cpu_time => Ok(Self { cpu_time, page_faults: parse::stat(&handle.read("stat")?)?.page_faults }),
        }
    }

    /// The counters now, with the CPU time in clock ticks. Reads one file, and misses runs within one tick without a
    /// page fault.
    pub fn read_in_ticks(handle: &dyn ProcessHandle) -> Reading<Self> {
        let stat = parse::stat(&handle.read("stat")?)?;
        Ok(Self { cpu_time: stat.utime.saturating_add(stat.stime), page_faults: stat.page_faults })
    }

    /// Whether both have the same number of page faults. Each write to a merged page is one.
    pub fn has_same_faults(self, other: Self) -> bool {
        self.page_faults == other.page_faults
    }
}
