//! What ksmd does differently from kernel to kernel, as a value.
//!
//! Each rule names the function of mm/ksm.c that it mirrors and the first version that has it.

/// The version of a kernel: major and minor number, and the number of the stable release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KernelVersion {
    /// 6 in 6.18.44.
    pub major: u32,
    /// 18 in 6.18.44.
    pub minor: u32,
    /// 44 in 6.18.44.
    pub stable: u32,
}

impl KernelVersion {
    /// The version in a text such as `6.18.44-amd64`; a missing third number counts as 0.
    #[must_use]
    pub fn parse(release: &str) -> Option<Self> {
        let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|digits| digits.parse().ok());
        let (major, minor) = (numbers.next()??, numbers.next()??);
        let stable = if release.split('.').count() > 2 { numbers.next().flatten().unwrap_or(0) } else { 0 };
        Some(Self { major, minor, stable })
    }

    fn is_at_least(self, major: u32, minor: u32) -> bool {
        (self.major, self.minor) >= (major, minor)
    }

    fn is_stable_release_from(self, major: u32, minor: u32, stable: u32) -> bool {
        (self.major, self.minor) == (major, minor) && self.stable >= stable
    }
}

/// The rules of one kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KsmRules {
    /// A page is first compared with its checksum of the last scan, and only an unchanged page is searched in the
    /// stable tree (`cmp_and_merge_page`, since 6.11). Before, each visit searched the stable tree, so that a page
    /// could merge on its first visit.
    pub checksum_before_stable_tree: bool,
    /// A search continues with any duplicate of a chain, and drops a chain of one duplicate in every search
    /// (`stable_node_dup`, since 6.11). Before, a search took only duplicates with room, and dropped the chain only in
    /// searches that prune.
    pub search_takes_any_duplicate: bool,
    /// Pages that failed to merge in earlier scans are skipped (`should_skip_rmap_item`, since 6.7).
    pub has_smart_scan: bool,
    /// Zero pages that ksmd mapped are marked and counted (`replace_page`, since 6.6), and are copied back when memory
    /// is no longer mergeable (`break_ksm`, since 6.6).
    pub tracks_zero_pages: bool,
    /// `fork` sets the child's counters of merged pages and of metadata to 0 and counts its zero pages (`ksm_fork` in
    /// include/linux/ksm.h, since 6.18, 6.12.54 and 6.6.113). Before, the child inherited the parent's figures.
    pub fork_resets_counters: bool,
    /// Splitting a huge page maps its zero-filled pages to the zero page (`try_to_map_unused_to_zeropage` in
    /// mm/migrate.c, since 6.12).
    pub split_maps_zero_pages: bool,
    /// The checksum and the age of a page lie where its index is while it is in the stable tree (`struct ksm_rmap_item`,
    /// since 7.3). So a page that leaves the stable tree has neither, and one that was written and is still linked there
    /// is not skipped (`should_skip_rmap_item`). Before, both outlast the merge.
    pub stable_tree_forgets_history: bool,
    /// The scan-time advisor exists (`scan_time_advisor`, since 6.8).
    pub has_advisor: bool,
}

impl KsmRules {
    /// The rules of a version. Versions before 6.1 follow the rules of 6.1.
    #[must_use]
    pub fn for_version(version: KernelVersion) -> Self {
        Self {
            checksum_before_stable_tree: version.is_at_least(6, 11),
            search_takes_any_duplicate: version.is_at_least(6, 11),
            has_smart_scan: version.is_at_least(6, 7),
            tracks_zero_pages: version.is_at_least(6, 6),
            fork_resets_counters: version.is_at_least(6, 18)
                || version.is_stable_release_from(6, 12, 54)
                || version.is_stable_release_from(6, 6, 113),
            split_maps_zero_pages: version.is_at_least(6, 12),
            stable_tree_forgets_history: version.is_at_least(7, 3),
            has_advisor: version.is_at_least(6, 8),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_releases() {
        let version = |major, minor, stable| Some(KernelVersion { major, minor, stable });
        assert_eq!(KernelVersion::parse("6.18.44-fc-v595"), version(6, 18, 44));
        assert_eq!(KernelVersion::parse("6.1.0-40-amd64"), version(6, 1, 0));
        assert_eq!(KernelVersion::parse("7.3-rc1"), version(7, 3, 0));
        assert_eq!(KernelVersion::parse("linux"), None);
    }

    #[test]
    fn old_kernels_search_the_stable_tree_first() {
        let rules = |text| KsmRules::for_version(KernelVersion::parse(text).unwrap());
        assert!(!rules("6.1.0").checksum_before_stable_tree);
        assert!(!rules("6.10.9").checksum_before_stable_tree);
        assert!(rules("6.11.0").checksum_before_stable_tree);
        assert!(!rules("6.12.53").fork_resets_counters && rules("6.12.54").fork_resets_counters);
        assert!(!rules("6.6.112").fork_resets_counters && rules("6.6.113").fork_resets_counters);
        assert!(!rules("6.1.192").fork_resets_counters);
        assert!(rules("7.3.0").fork_resets_counters);
    }
}
