//! How much memory this process may still use before its cgroup, or a parent cgroup, kills it, and what part of that a
//! merge may use.
//!
//! A merge uses memory before it frees any: notes on scanned pages, copies of written pages, the index, and the
//! contents of a batch, which are both in the store and in the program until they are mapped. So it first determines
//! the headroom and works in windows that fit. It checks again before each copy and each batch, and does nothing if
//! nothing fits.
//!
//! Mirrors the memory controllers of Linux 6.18: `memory.max`, `memory.high` and `memory.current` (cgroup v2,
//! mm/memcontrol.c), `memory.limit_in_bytes` and `memory.usage_in_bytes` (v1, mm/memcontrol-v1.c). Clean inactive file
//! pages count as free. The host's `MemAvailable` counts like a limit.
//!
//! Limits: swap is not counted. Cgroups above the root of a cgroup namespace are invisible. Members of other domains in
//! the same cgroup are unknown; half of the headroom is left to everything else.

use pagefold_base::Bytes;
use std::path::{Path, PathBuf};

/// Maximum bytes that a merge keeps per page of its regions: 8 bytes of notes, and ranges if every second page differs
/// in kind. These are, for each two pages, 24 bytes in the survey and 24 bytes from the page tables.
const SURVEY_BYTES_PER_PAGE: u64 = 32;

/// Bytes that a merge keeps per scanned page: fingerprint, sample, entry, slot and cost; measured as 135 to 168.
const WINDOW_BYTES_PER_PAGE: u64 = 192;

/// Minimum memory for windows and batches; with less a merge does nothing.
const MIN_MERGE_BYTES: u64 = 256 << 10;

/// All members of the domain together may use this fraction of the headroom at a time.
const HEADROOM_DIVISOR: u64 = 2;

/// Memory that a merge may use at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergeMemoryBudget {
    /// Pages that are scanned before they are merged.
    pub window_pages: u64,
    /// Pages that are stored before they are mapped.
    pub batch_pages: u64,
    /// Size of a larger index, which exists beside the present one.
    pub index_bytes: u64,
}

impl MergeMemoryBudget {
    /// Budget that fits into a headroom shared by `members` members, for regions of `region_pages` pages; `None` if
    /// none fits.
    pub fn new(headroom: Bytes, members: u64, region_pages: u64, page_bytes: u64) -> Option<Self> {
        let share = headroom.0 / HEADROOM_DIVISOR / members.max(1);
        let remaining_bytes = share.saturating_sub(region_pages.saturating_mul(SURVEY_BYTES_PER_PAGE));
        (remaining_bytes >= MIN_MERGE_BYTES).then(|| Self {
            window_pages: remaining_bytes / 4 / WINDOW_BYTES_PER_PAGE,
            batch_pages: remaining_bytes / 2 / page_bytes,
            index_bytes: remaining_bytes / 2,
        })
    }

    /// Number of leading chunks, given by their sizes in pages, that fit into a window: at least one.
    pub fn count_chunks_that_fit(self, chunk_pages: impl IntoIterator<Item = u64>) -> usize {
        let mut remaining_pages = self.window_pages;
        let fitting = chunk_pages.into_iter().take_while(|&pages| {
            let fits = pages <= remaining_pages;
            remaining_pages = remaining_pages.saturating_sub(pages);
            fits
        });
        fitting.count().max(1)
    }

    /// Headroom from which on more headroom makes no difference to merging `region_pages` pages.
    pub fn ample_headroom(members: u64, region_pages: u64, batch_bytes: u64) -> Bytes {
        let bytes_per_page = SURVEY_BYTES_PER_PAGE + 4 * WINDOW_BYTES_PER_PAGE;
        let member_bytes =
            region_pages.saturating_mul(bytes_per_page).saturating_add(2 * batch_bytes + MIN_MERGE_BYTES);
        Bytes(member_bytes.saturating_mul(HEADROOM_DIVISOR).saturating_mul(members.max(1)))
    }
}

impl Default for MergeMemoryBudget {
    /// Unlimited budget.
    fn default() -> Self {
        Self { window_pages: u64::MAX, batch_pages: u64::MAX, index_bytes: u64::MAX }
    }
}

/// Memory limits that apply to this process.
#[derive(Debug, Default)]
pub struct CgroupHeadroom {
    /// Budget of the current merge.
    pub budget: MergeMemoryBudget,
    /// Content of `/proc/thread-self/cgroup` when `limit_directories` was determined.
    cgroup_file: String,
    /// Directories of the cgroup and its parents.
    limit_directories: Vec<PathBuf>,
    version: CgroupVersion,
}

/// Version of the memory controller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum CgroupVersion {
    V1,
    #[default]
    V2,
}

impl CgroupHeadroom {
    /// Headroom under the tightest limit. If it exceeds `ample`, the result may be any value of at least `ample`. A
    /// limit that cannot be read counts as none.
    pub fn available(&mut self, ample: Bytes) -> Bytes {
        let cgroups = std::fs::read_to_string("/proc/thread-self/cgroup").unwrap_or_default();
        if cgroups != self.cgroup_file {
            let mounts = std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap_or_default();
            (self.version, self.limit_directories) = find_limit_directories(&cgroups, &mounts).unwrap_or_default();
            self.cgroup_file = cgroups;
        }
        // Reading only the free memory has a tenth of the cost.
        let host = rustix::system::sysinfo();
        let (free, total) = (host.freeram as u64, host.totalram as u64);
        let unit = u64::from(host.mem_unit);
        let is_ample = free.saturating_sub(total / 100).saturating_mul(unit) >= ample.0;
        let meminfo = (!is_ample).then(|| std::fs::read_to_string("/proc/meminfo").ok()).flatten();
        let host_headroom = meminfo.and_then(|text| host_available(&text));
        let cgroup_headrooms =
            self.limit_directories.iter().filter_map(|cgroup| available_in_cgroup(cgroup, self.version, ample));
        host_headroom.into_iter().chain(cgroup_headrooms).min().unwrap_or(ample)
    }
}

impl CgroupHeadroom {
    /// Whether each of `members` members may use `bytes` more now.
    pub fn can_members_take(&mut self, bytes: Bytes, members: u64) -> bool {
        let needed = Bytes(bytes.0.saturating_mul(HEADROOM_DIVISOR).saturating_mul(members.max(1)));
        self.available(needed) >= needed
    }

    /// Whether each of `members` members may use `taken_bytes` permanently, and merges of `region_pages` pages still
    /// have memory for batches of `batch_pages` pages.
    pub fn leaves_memory_for_batches(
        &mut self,
        taken_bytes: Bytes,
        members: u64,
        region_pages: u64,
        (page_bytes, batch_pages): (u64, u64),
    ) -> bool {
        let taken_bytes = taken_bytes.0.saturating_mul(members.max(1));
        let ample = MergeMemoryBudget::ample_headroom(members, region_pages, batch_pages.saturating_mul(page_bytes));
        let remaining = self.available(Bytes(ample.0.saturating_add(taken_bytes))).0.saturating_sub(taken_bytes);
        MergeMemoryBudget::new(Bytes(remaining), members, region_pages, page_bytes)
            .is_some_and(|budget| budget.batch_pages >= batch_pages)
    }
}

/// `MemAvailable`, minus one percent of all memory.
fn host_available(meminfo: &str) -> Option<Bytes> {
    let kibibytes = |name: &str| parse_number_after(meminfo, name).map(|kibibytes| kibibytes << 10);
    Some(Bytes(kibibytes("MemAvailable:")?.saturating_sub(kibibytes("MemTotal:")? / 100)))
}

/// The number after a name, in lines of name and number.
fn parse_number_after(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(|c: char| c.is_whitespace()))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

/// Directories of the memory cgroup of a process and of all its parents, from its `cgroup` and `mountinfo` files
/// (cgroups(7), proc_pid_mountinfo(5)).
fn find_limit_directories(cgroups: &str, mounts: &str) -> Option<(CgroupVersion, Vec<PathBuf>)> {
    let find_path = |is_wanted: &dyn Fn(&str) -> bool| {
        cgroups.lines().find_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            is_wanted(controllers).then_some(path)
        })
    };
    let v1_path = find_path(&|controllers| controllers.split(',').any(|name| name == "memory"));
    let (version, path) = match v1_path {
        Some(path) => (CgroupVersion::V1, path),
        None => (CgroupVersion::V2, find_path(&str::is_empty)?),
    };
    let (mount_root, mount_point) = mounts.lines().find_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        let mut kind = kind.split(' ');
        let (name, options) = (kind.next()?, kind.nth(1)?);
        let is_memory_mount = match version {
            CgroupVersion::V1 => name == "cgroup" && options.split(',').any(|option| option == "memory"),
            CgroupVersion::V2 => name == "cgroup2",
        };
        let mut words = mount.split(' ').skip(3);
        is_memory_mount.then_some((words.next()?, words.next()?))
    })?;
    let mount_point = Path::new(mount_point);
    // Outside of the mounted subtree only the limits of the mount's own root are visible.
    let relative = Path::new(path).strip_prefix(mount_root).unwrap_or(Path::new(""));
    let relative = if path.contains("..") { Path::new("") } else { relative };
    let limits = relative.ancestors().map(|relative| mount_point.join(relative)).collect();
    Some((version, limits))
}

/// Headroom of a cgroup, if it has limits and they can be read. Clean file pages count only if less than `ample` is
/// left without them: reading their number is expensive for the kernel.
fn available_in_cgroup(cgroup: &Path, version: CgroupVersion, ample: Bytes) -> Option<Bytes> {
    let read_text = |file: &str| std::fs::read_to_string(cgroup.join(file)).ok();
    let read_number = |file: &str| read_text(file)?.trim().parse::<u64>().ok();
    let (limits, used, prefix): (&[&str], _, _) = match version {
        CgroupVersion::V1 => (&["memory.limit_in_bytes"], "memory.usage_in_bytes", "total_"),
        CgroupVersion::V2 => (&["memory.max", "memory.high"], "memory.current", ""),
    };
    // No limit reads as "max", which is not a number.
    let limit = limits.iter().filter_map(|file| read_number(file)).min()?;
    let used = read_number(used)?;
    let unused_bytes = limit.saturating_sub(used);
    if unused_bytes >= ample.0 {
        return Some(Bytes(unused_bytes));
    }
    let stat = read_text("memory.stat").unwrap_or_default();
    let bytes = |name: &str| parse_number_after(&stat, &format!("{prefix}{name}")).unwrap_or(0);
    let (dirty, writeback) = match version {
        CgroupVersion::V1 => ("dirty", "writeback"),
        CgroupVersion::V2 => ("file_dirty", "file_writeback"),
    };
    let clean = bytes("inactive_file").saturating_sub(bytes(dirty) + bytes(writeback));
    Some(Bytes(limit.saturating_sub(used.saturating_sub(clean))))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES_PER_MIB: u64 = 1 << 20;

    #[test]
    fn memory_cgroup_is_found_with_its_ancestors() {
        let check = |cgroups: &str, mounts: &str, expected: Option<(CgroupVersion, &[&str])>| {
            let expected =
                expected.map(|(version, paths)| (version, paths.iter().map(PathBuf::from).collect::<Vec<_>>()));
            assert_eq!(find_limit_directories(cgroups, mounts), expected, "{cgroups} {mounts}");
        };
        let v2_mount = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        let all = ["/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a", "/sys/fs/cgroup/"];
        check("0::/a/b\n", v2_mount, Some((CgroupVersion::V2, &all)));
        check("0::/\n", v2_mount, Some((CgroupVersion::V2, &["/sys/fs/cgroup/"])));
        check("0::/../x\n", v2_mount, Some((CgroupVersion::V2, &["/sys/fs/cgroup/"])));
        let v1_mount = "31 23 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
        let mounts = format!("{v2_mount}29 23 0:20 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n{v1_mount}");
        let cgroups = "5:cpu,cpuacct:/\n4:memory:/job\n0::/other\n";
        let found = ["/sys/fs/cgroup/memory/job", "/sys/fs/cgroup/memory/"];
        check(cgroups, &mounts, Some((CgroupVersion::V1, &found)));
        // In a container without a cgroup namespace.
        let bound = "31 23 0:27 /docker/7f /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        check("4:memory:/docker/7f\n", bound, Some((CgroupVersion::V1, &["/sys/fs/cgroup/memory/"])));
        check("4:memory:/docker/7f/x\n", bound, Some((CgroupVersion::V1, &find_limits_below("x"))));
        check("", v2_mount, None);
        check("0::/a\n", "", None);
        check("nonsense\n", "nonsense - \n", None);
    }

    fn find_limits_below(name: &str) -> [&str; 2] {
        assert_eq!(name, "x");
        ["/sys/fs/cgroup/memory/x", "/sys/fs/cgroup/memory/"]
    }

    fn fake_cgroup(files: &[(&str, &str)]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(directory.path().join(name), text).unwrap();
        }
        directory
    }

    #[test]
    fn available_memory_counts_clean_file_pages() {
        let check = |version, files: &[(&str, &str)], expected: Option<u64>| {
            let directory = fake_cgroup(files);
            assert_eq!(
                available_in_cgroup(directory.path(), version, Bytes(BYTES_PER_MIB)).map(|headroom| headroom.0),
                expected,
                "{files:?}"
            );
        };
        let stat = ("memory.stat", "inactive_file 5000\nactive_file 90000\nfile_dirty 300\nfile_writeback 200\n");
        check(CgroupVersion::V2, &[("memory.max", "100000\n"), ("memory.current", "90000\n"), stat], Some(14_500));
        let high = [("memory.max", "max\n"), ("memory.high", "95000\n"), ("memory.current", "90000\n"), stat];
        check(CgroupVersion::V2, &high, Some(9_500));
        check(CgroupVersion::V2, &[("memory.max", "max\n"), ("memory.high", "max\n"), ("memory.current", "1\n")], None);
        check(CgroupVersion::V2, &[("memory.max", "8000000\n"), ("memory.current", "0\n"), stat], Some(8_000_000));
        check(CgroupVersion::V2, &[("memory.max", "10\n"), ("memory.current", "90\n")], Some(0));
        check(CgroupVersion::V2, &[], None);
        let stat = ("memory.stat", "inactive_file 1\ntotal_inactive_file 5000\ntotal_dirty 300\ntotal_writeback 200\n");
        let v1_files = [("memory.limit_in_bytes", "100000\n"), ("memory.usage_in_bytes", "90000\n"), stat];
        check(CgroupVersion::V1, &v1_files, Some(14_500));
    }

    #[test]
    fn window_holds_fitting_chunks_and_at_least_one() {
        let window = |window_pages: u64| {
            MergeMemoryBudget { window_pages, ..MergeMemoryBudget::default() }.count_chunks_that_fit([2, 3, 1])
        };
        assert_eq!([0, 1, 2, 4, 5, 6, u64::MAX].map(window), [1, 1, 1, 1, 2, 3, 3]);
    }

    #[test]
    fn host_available_memory_counts_as_a_limit() {
        let meminfo = "MemTotal:         100000 kB\nMemFree: 5 kB\nMemAvailable:  30000 kB\n";
        assert_eq!(host_available(meminfo), Some(Bytes(29_000 << 10)));
        assert_eq!(host_available("MemTotal: 5 kB\n"), None);
    }

    #[test]
    fn members_stay_within_shared_headroom() {
        for (headroom, members, pages) in [(16, 2, 50_000), (4, 1, 1000), (64, 4, 100_000), (1024, 2, 50_000)] {
            let budget =
                MergeMemoryBudget::new(Bytes(headroom * BYTES_PER_MIB), members, pages, 4096).expect("it fits");
            let member_bytes = pages * SURVEY_BYTES_PER_PAGE
                + budget.window_pages * WINDOW_BYTES_PER_PAGE
                // Before a batch the headroom is checked again, with the index in place.
                + (budget.batch_pages * 4096).max(budget.index_bytes);
            assert!(members * member_bytes <= headroom * BYTES_PER_MIB / HEADROOM_DIVISOR, "{budget:?}");
        }
        assert_eq!(MergeMemoryBudget::new(Bytes(BYTES_PER_MIB), 2, 1000, 4096), None);
        assert_eq!(
            MergeMemoryBudget::new(Bytes(16 * BYTES_PER_MIB), 2, 1 << 20, 4096),
            None,
            "the survey alone needs more memory"
        );
        let ample = MergeMemoryBudget::ample_headroom(3, 50_000, 8 * BYTES_PER_MIB);
        let budget = MergeMemoryBudget::new(ample, 3, 50_000, 4096).expect("it fits");
        assert!(budget.window_pages >= 50_000 && budget.batch_pages * 4096 >= 8 * BYTES_PER_MIB, "{budget:?}");
    }
}
