//! The counters of ksmd.
//!
//! Mirrors the files of `/sys/kernel/mm/ksm` and `/proc/PID/ksm_stat` (mm/ksm.c and fs/proc/base.c).

/// Bytes of a page.
pub const PAGE_BYTES: i64 = 4096;

/// Bytes of metadata for each scanned page: `sizeof(struct ksm_rmap_item)` on 64-bit kernels with NUMA.
pub const RMAP_ITEM_BYTES: i64 = 64;

/// The counters of `/sys/kernel/mm/ksm`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KsmdCounters {
    /// Completed scans.
    pub full_scans: u64,
    /// Merged frames that their metadata still counts.
    pub pages_shared: u64,
    /// Mappings of merged frames beyond the first of each.
    pub pages_sharing: u64,
    /// Pages in the unstable tree.
    pub pages_unshared: u64,
    /// Pages with metadata that are in no tree.
    pub pages_volatile: u64,
    /// Visits that smart scan left out.
    pub pages_skipped: u64,
    /// Visits.
    pub pages_scanned: u64,
    /// Zero pages that ksmd mapped.
    pub ksm_zero_pages: i64,
    /// Chains in the stable tree.
    pub stable_node_chains: u64,
    /// Duplicates in chains.
    pub stable_node_dups: u64,
    /// Net savings in bytes.
    pub general_profit: i64,
}

/// The counters of `/proc/PID/ksm_stat`; `/proc/PID/ksm_merging_pages` shows the second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessCounters {
    /// Pages with metadata.
    pub ksm_rmap_items: i64,
    /// Mappings of merged frames, the first one too.
    pub ksm_merging_pages: i64,
    /// Zero pages that ksmd mapped.
    pub ksm_zero_pages: i64,
    /// Net savings in bytes.
    pub ksm_process_profit: i64,
}

/// What the stages of the scan count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) full_scans: u64,
    pub(crate) pages_shared: u64,
    pub(crate) pages_sharing: u64,
    pub(crate) pages_unshared: u64,
    pub(crate) pages_skipped: u64,
    pub(crate) pages_scanned: u64,
    pub(crate) zero_pages: i64,
    pub(crate) chains: u64,
    pub(crate) dups: u64,
    pub(crate) rmap_items: u64,
}

impl Tally {
    /// The files of `/sys/kernel/mm/ksm` (`pages_volatile_show`, `general_profit_show`).
    pub(crate) fn counters(&self) -> KsmdCounters {
        let in_trees = self.pages_shared + self.pages_sharing + self.pages_unshared;
        let saved = self.pages_sharing.cast_signed() + self.zero_pages;
        KsmdCounters {
            full_scans: self.full_scans,
            pages_shared: self.pages_shared,
            pages_sharing: self.pages_sharing,
            pages_unshared: self.pages_unshared,
            pages_volatile: self.rmap_items.saturating_sub(in_trees),
            pages_skipped: self.pages_skipped,
            pages_scanned: self.pages_scanned,
            ksm_zero_pages: self.zero_pages,
            stable_node_chains: self.chains,
            stable_node_dups: self.dups,
            general_profit: saved * PAGE_BYTES - self.rmap_items.cast_signed() * RMAP_ITEM_BYTES,
        }
    }
}

/// Which part of a balanced tree walks have reached since the last pause. The i-th walk reaches a new node on each level
/// but the first `log2(i)`, which earlier walks have covered. The trees of all NUMA nodes count as one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReachedNodes {
    walks: u64,
}

impl ReachedNodes {
    /// The nodes that further walks reach first, each of which passes `depth` nodes.
    pub fn add_walks(&mut self, walks: u64, depth: u64) -> u64 {
        let (mut next, end) = (self.walks + 1, self.walks + walks);
        self.walks = end;
        let mut reached = 0;
        while next <= end {
            let covered_levels = u64::from(next.ilog2());
            if covered_levels >= depth {
                break;
            }
            let last = end.min((2 << covered_levels) - 1);
            reached += (last - next + 1) * (depth - covered_levels);
            next = last + 1;
        }
        reached
    }
}

/// How much work ksmd did, for a model of its CPU time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkCounts {
    /// Checksums computed.
    pub checksums: u64,
    /// Pages compared on walks through the stable tree; estimated where a walk is known to find and change nothing, and
    /// where runs merge with ascending frames.
    pub stable_comparisons: u64,
    /// Pages compared on walks through the unstable tree; estimated in scans during which no page changes.
    pub unstable_comparisons: u64,
    /// Those of both kinds that are the first with a page since the last pause, as [`ReachedNodes`] estimates.
    pub first_comparisons: u64,
    /// Page table entries that ksmd changed to a merged frame or to the zero page.
    pub merges: u64,
    /// Pages that ksmd copied back.
    pub breaks: u64,
    /// Merged pages that were copied, by ksmd or because a process wrote them (`cow_ksm` of `/proc/vmstat`).
    pub cow_breaks: u64,
    /// Huge pages that ksmd split.
    pub splits: u64,
    /// Pages that these splits mapped to the zero page.
    pub zero_pages_of_splits: u64,
    /// Metadata items allocated.
    pub allocated_items: u64,
    /// Batches begun after a pause.
    pub batches: u64,
}

#[cfg(test)]
mod tests {
    use super::ReachedNodes;

    #[test]
    fn few_walks_reach_new_nodes_and_many_do_not() {
        for depth in 0..12 {
            let mut reached = ReachedNodes::default();
            let mut number = 0_u64;
            for walks in [1, 2, 1, 30, 0, 100, 5000] {
                let levels = number + 1..=number + walks;
                let expected: u64 = levels.map(|number| u64::saturating_sub(depth, number.ilog2().into())).sum();
                assert_eq!(reached.add_walks(walks, depth), expected, "{depth}");
                number += walks;
            }
            assert_eq!(reached.add_walks(1 << 40, depth), 0, "{depth}");
        }
        // The first walk passes 20 nodes, the second and the third have one of them in common with it.
        assert_eq!(ReachedNodes::default().add_walks(3, 20), 20 + 19 + 19);
    }
}
