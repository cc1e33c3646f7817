//! The kernel's KSM data: the host's settings and counters, and those of a process.
//!
//! Names are the kernel's: `/sys/kernel/mm/ksm/*` (mm/ksm.c) and `/proc/PID/ksm_stat` (fs/proc/base.c). Fields came
//! with different versions, so each is a separate [`Reading`].

use crate::reading::Reading;

/// `/sys/kernel/mm/ksm/*`. Counters are pages unless noted otherwise. Counters of merged pages are stale until ksmd
/// scans again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ksm {
    /// 0 stopped with merges kept, 1 running, 2 stopped and all pages unmerged.
    pub run: Reading<u64>,
    /// Pages per batch.
    pub pages_to_scan: Reading<u64>,
    /// Pause between batches, in milliseconds.
    pub sleep_millisecs: Reading<u64>,
    /// Shared frames.
    pub pages_shared: Reading<u64>,
    /// Additional mappings of those frames: the pages saved.
    pub pages_sharing: Reading<u64>,
    /// Pages in the unstable tree: stable content, no copy found.
    pub pages_unshared: Reading<u64>,
    /// Pages that changed between scans.
    pub pages_volatile: Reading<u64>,
    /// Pages scanned in total (6.6).
    pub pages_scanned: Reading<u64>,
    /// Pages skipped by smart scan (6.7).
    pub pages_skipped: Reading<u64>,
    /// Complete passes over all mergeable areas.
    pub full_scans: Reading<u64>,
    /// The maximum number of mappings of one frame; more mappings of a content need another frame.
    pub max_page_sharing: Reading<u64>,
    /// Whether pages of different NUMA nodes are merged.
    pub merge_across_nodes: Reading<u64>,
    /// Whether zero pages are mapped to the kernel's zero page.
    pub use_zero_pages: Reading<u64>,
    /// Pages mapped to the zero page by KSM (6.6; 6.5 had an earlier form).
    pub ksm_zero_pages: Reading<i64>,
    /// Bytes saved net of metadata, computed by the kernel (6.4).
    pub general_profit: Reading<i64>,
    /// Contents with more than one frame because of `max_page_sharing`.
    pub stable_node_chains: Reading<u64>,
    /// Frames in those chains.
    pub stable_node_dups: Reading<u64>,
    /// Whether pages that never merged are scanned less often (6.7).
    pub smart_scan: Reading<u64>,
    /// The bracketed word of `advisor_mode`: `none` or `scan-time` (6.8).
    pub advisor_mode: Reading<String>,
    /// The advisor's target time for a pass, in seconds (6.8).
    pub advisor_target_scan_time: Reading<u64>,
}

/// `/proc/PID/ksm_stat`, and the older `ksm_merging_pages`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessKsm {
    /// Pages for which ksmd keeps metadata.
    pub rmap_items: Reading<u64>,
    /// Pages of the process that are mapped to a KSM frame, including the kept copy (5.19).
    pub merging_pages: Reading<u64>,
    /// Pages mapped to the zero page by KSM (6.6).
    pub zero_pages: Reading<i64>,
    /// Bytes saved net of metadata, computed by the kernel (6.4).
    pub profit: Reading<i64>,
    /// Whether the whole process is enrolled by prctl (6.14).
    pub merge_any: Reading<bool>,
    /// Whether any area of the process is enrolled (6.14).
    pub mergeable: Reading<bool>,
}

impl ProcessKsm {
    /// All fields absent, for one reason.
    pub fn absent(why: &crate::Absent) -> Self {
        Self {
            rmap_items: Err(why.clone()),
            merging_pages: Err(why.clone()),
            zero_pages: Err(why.clone()),
            profit: Err(why.clone()),
            merge_any: Err(why.clone()),
            mergeable: Err(why.clone()),
        }
    }
}

/// Bytes of metadata that ksmd keeps for each page it scans: `sizeof(struct ksm_rmap_item)` on 64-bit kernels, which
/// `general_profit` subtracts (mm/ksm.c, `general_profit_show`).
pub const RMAP_ITEM_BYTES: u64 = 64;

/// `max_page_sharing` if it is unknown (mm/ksm.c).
pub const DEFAULT_MAX_PAGE_SHARING: u64 = 256;

/// `pages_to_scan` of a freshly booted kernel (mm/ksm.c, `DEFAULT_PAGES_TO_SCAN`).
pub const DEFAULT_PAGES_TO_SCAN: u64 = 100;

/// `sleep_millisecs` of a freshly booted kernel (mm/ksm.c, `ksm_thread_sleep_millisecs`).
pub const DEFAULT_SLEEP_MILLISECS: u64 = 20;

/// A writable file of `/sys/kernel/mm/ksm`.
///
/// The order of the variants is the order in which the kernel accepts writes: `pages_to_scan` only while no advisor is
/// active, `max_page_sharing` and `merge_across_nodes` only while no page is merged, `run` last (mm/ksm.c, `*_store`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Setting {
    /// `advisor_mode`: `none` or `scan-time` (6.8).
    AdvisorMode,
    /// `advisor_target_scan_time`, in seconds (6.8).
    AdvisorTargetScanTime,
    /// `advisor_max_cpu`, in percent of one CPU (6.8).
    AdvisorMaxCpu,
    /// `advisor_min_pages_to_scan` (6.8).
    AdvisorMinPagesToScan,
    /// `advisor_max_pages_to_scan` (6.8).
    AdvisorMaxPagesToScan,
    /// `pages_to_scan`: pages per batch.
    PagesToScan,
    /// `sleep_millisecs`: the pause between batches.
    SleepMillisecs,
    /// `use_zero_pages`.
    UseZeroPages,
    /// `smart_scan` (6.7).
    SmartScan,
    /// `max_page_sharing`.
    MaxPageSharing,
    /// `merge_across_nodes`.
    MergeAcrossNodes,
    /// `run`: 0 stopped with merges kept, 1 running, 2 stopped and all pages unmerged.
    Run,
}

impl Setting {
    /// All settings, in write order.
    pub const ALL: [Self; 12] = [
        Self::AdvisorMode,
        Self::AdvisorTargetScanTime,
        Self::AdvisorMaxCpu,
        Self::AdvisorMinPagesToScan,
        Self::AdvisorMaxPagesToScan,
        Self::PagesToScan,
        Self::SleepMillisecs,
        Self::UseZeroPages,
        Self::SmartScan,
        Self::MaxPageSharing,
        Self::MergeAcrossNodes,
        Self::Run,
    ];

    /// Its file name.
    pub fn file_name(self) -> &'static str {
        match self {
            Self::AdvisorMode => "advisor_mode",
            Self::AdvisorTargetScanTime => "advisor_target_scan_time",
            Self::AdvisorMaxCpu => "advisor_max_cpu",
            Self::AdvisorMinPagesToScan => "advisor_min_pages_to_scan",
            Self::AdvisorMaxPagesToScan => "advisor_max_pages_to_scan",
            Self::PagesToScan => "pages_to_scan",
            Self::SleepMillisecs => "sleep_millisecs",
            Self::UseZeroPages => "use_zero_pages",
            Self::SmartScan => "smart_scan",
            Self::MaxPageSharing => "max_page_sharing",
            Self::MergeAcrossNodes => "merge_across_nodes",
            Self::Run => "run",
        }
    }

    /// The setting with this file name.
    pub fn from_file_name(file: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|setting| setting.file_name() == file)
    }
}

/// Whether ksmd merges a page at its first scan if the content is in the stable tree, by the kernel's release
/// (`6.8.0-45-generic`). An unreadable release counts as a new kernel.
///
/// Until 6.10 ksmd searched the stable tree first. Since 6.11 a page's checksum must be unchanged since an earlier scan
/// (mm/ksm.c, `cmp_and_merge_page`; "mm/ksm: don't waste time searching stable tree for fast changing page").
pub fn merges_at_first_scan(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|part| part.parse::<u32>().ok());
    matches!((numbers.next(), numbers.next()), (Some(major), Some(minor)) if (major, minor) < (6, 11))
}

/// Values of settings, as written: numbers, or the word of `advisor_mode`. Iterates in the order in which the kernel
/// accepts them.
pub type Settings = std::collections::BTreeMap<Setting, String>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_before_6_11_merge_at_first_scan() {
        for release in ["2.6.32-754.el6.x86_64", "5.14.0-427.el9", "6.1.0-26-amd64", "6.8.0-45-generic", "6.10.11"] {
            assert!(merges_at_first_scan(release), "{release}");
        }
        for release in ["6.11.0", "6.12-rc1", "6.18.44", "7.0.0-rc2+", "", "unknown", "6"] {
            assert!(!merges_at_first_scan(release), "{release}");
        }
    }
}
