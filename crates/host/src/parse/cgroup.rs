//! The memory limits of cgroups: `memory.max` and similar files (mm/memcontrol.c), `memory.limit_in_bytes` and similar
//! files of v1 (mm/memcontrol-v1.c).

use super::text::{field, malformed, number};
use pagefold_base::{Absent, Bytes, Reading};

/// From this value on, a v1 limit means no limit: v1 prints the largest multiple of the page size that fits into a long
/// (`PAGE_COUNTER_MAX`, include/linux/page_counter.h).
const MIN_V1_UNLIMITED_BYTES: u64 = 1 << 62;

/// A limit in bytes; `None` for `max` and for the corresponding number of v1.
pub fn parse_limit(bytes: &[u8]) -> Reading<Option<Bytes>> {
    if bytes.trim_ascii() == b"max" {
        return Ok(None);
    }
    Ok(Some(number(bytes)?).filter(|&limit| limit < MIN_V1_UNLIMITED_BYTES).map(Bytes))
}

/// A limit on the CPU time of a cgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuMax {
    /// CPU time in each period, in microseconds.
    pub quota: u64,
    /// The period in microseconds.
    pub period: u64,
}

/// Parses `cpu.max`: `max 100000` or `200000 100000` (kernel/sched/core.c, `cpu_max_show`). `None` without a limit.
pub fn cpu_max(bytes: &[u8]) -> Reading<Option<CpuMax>> {
    let bad = || malformed("not a limit of CPU time", bytes);
    let text = std::str::from_utf8(bytes).map_err(|_| bad())?;
    let mut words = text.split_ascii_whitespace();
    let quota = words.next().ok_or_else(bad)?;
    let period = words.next().ok_or_else(bad)?.parse().map_err(|_| bad())?;
    match quota {
        "max" => Ok(None),
        quota => Ok(Some(CpuMax { quota: quota.parse().map_err(|_| bad())?, period })),
    }
}

/// The periods in which a cgroup had something to run, and those in which it used up its quota: `nr_periods` and
/// `nr_throttled` of `cpu.stat` (kernel/sched/core.c, `cpu_cfs_stat_show`).
pub fn throttled_periods(cpu_stat: &[u8]) -> Reading<(u64, u64)> {
    Ok((number(field(cpu_stat, "nr_periods")?)?, number(field(cpu_stat, "nr_throttled")?)?))
}

/// The part of a cgroup's usage that is reclaimed first and at once, from its `memory.stat`: inactive file pages that
/// are neither dirty nor under writeback. With `v1` the `total_` lines are used, which include the descendants as v2
/// always does.
pub fn reclaimable_bytes(bytes: &[u8], v1: bool) -> Reading<Bytes> {
    let line =
        |v2_name: &str, v1_name: &str| -> Reading<u64> { number(field(bytes, if v1 { v1_name } else { v2_name })?) };
    let inactive = line("inactive_file", "total_inactive_file")?;
    // Older kernels do not print these two fields.
    let or_none = |reading| match reading {
        Err(Absent::NotOnThisKernel) => Ok(0),
        reading => reading,
    };
    let dirty = or_none(line("file_dirty", "total_dirty"))?;
    let writeback = or_none(line("file_writeback", "total_writeback"))?;
    Ok(Bytes(inactive.saturating_sub(dirty).saturating_sub(writeback)))
}

/// The directory of a file system that is mounted at a mount point, from `/proc/PID/mountinfo` (proc_pid_mountinfo(5)).
/// The last mount at that point counts, because it covers earlier ones.
pub fn mount_root<'a>(mountinfo: &'a str, mount_point: &str) -> Option<&'a str> {
    mountinfo.lines().rev().find_map(|line| {
        let mut fields = line.split(' ').skip(3);
        let root = fields.next()?;
        (fields.next()? == mount_point).then_some(root)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn unlimited_is_parsed_in_v1_and_v2_spelling() {
        assert_eq!(parse_limit(b"max\n"), Ok(None));
        assert_eq!(parse_limit(b"9223372036854771712\n"), Ok(None));
        assert_eq!(parse_limit(b"1048576\n"), Ok(Some(Bytes(1 << 20))));
        assert_eq!(parse_limit(b"0\n"), Ok(Some(Bytes::ZERO)));
        for text in ["", "maximum", "-1", "1 2"] {
            assert!(matches!(parse_limit(text.as_bytes()), Err(Absent::Malformed(_))), "{text:?}");
        }
    }

    #[test]
    fn dirty_and_writeback_pages_are_not_reclaimable() {
        let v2 = b"anon 5\ninactive_file 100\nactive_file 7\nfile_dirty 30\nfile_writeback 20\n";
        assert_eq!(reclaimable_bytes(v2, false), Ok(Bytes(50)));
        assert_eq!(reclaimable_bytes(v2, true), Err(Absent::NotOnThisKernel));
        let v1 = b"inactive_file 1\ntotal_inactive_file 100\ntotal_dirty 300\n";
        assert_eq!(reclaimable_bytes(v1, true), Ok(Bytes::ZERO));
        assert_eq!(reclaimable_bytes(b"inactive_file 9\n", false), Ok(Bytes(9)));
        assert!(matches!(reclaimable_bytes(b"inactive_file 9\nfile_dirty x\n", false), Err(Absent::Malformed(_))));
    }

    #[test]
    fn limit_on_cpu_time_is_parsed() {
        assert_eq!(cpu_max(b"max 100000\n"), Ok(None));
        assert_eq!(cpu_max(b"250000 100000\n"), Ok(Some(CpuMax { quota: 250_000, period: 100_000 })));
        assert!(cpu_max(b"250000\n").is_err() && cpu_max(b"x 1\n").is_err() && cpu_max(b"").is_err());
        let stat = b"usage_usec 5\nnr_periods 10\nnr_throttled 4\nthrottled_usec 9\n";
        assert_eq!(throttled_periods(stat), Ok((10, 4)));
        assert_eq!(throttled_periods(b"usage_usec 5\n"), Err(Absent::NotOnThisKernel));
    }

    proptest! {
        #[test]
        fn arbitrary_input_does_not_panic(bytes: Vec<u8>, v1: bool) {
            let _ = (parse_limit(&bytes), reclaimable_bytes(&bytes, v1), cpu_max(&bytes), throttled_periods(&bytes));
        }
    }
}
