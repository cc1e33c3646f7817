//! Savings by merging, gross and net.
//!
//! Gross savings count freed frames. Net savings subtract their cost. ksmd keeps 64 bytes for each page that it scans,
//! merged or not ([`RMAP_ITEM_BYTES`]). A content keeps one more frame for every `max_page_sharing` mappings (mm/ksm.c,
//! `is_page_sharing_candidate`). With `merge_across_nodes=0` each NUMA node keeps its own frames.

use crate::ksm::{DEFAULT_MAX_PAGE_SHARING, Ksm, RMAP_ITEM_BYTES};
use crate::units::{Bytes, NetBytes, PageSize, Pages};
use std::ops::AddAssign;

/// The KSM settings that determine the result of merging.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharingSettings {
    /// The maximum number of mappings of one frame.
    pub max_page_sharing: u64,
    /// Whether zero pages are mapped to the kernel's zero page, which has no limit and needs no kept copy.
    pub use_zero_pages: bool,
    /// Whether equal pages of different NUMA nodes are merged.
    pub across_nodes: bool,
}

impl SharingSettings {
    /// From the host's settings; an unreadable setting takes the kernel's default.
    pub fn from_ksm(ksm: &Ksm) -> Self {
        Self {
            max_page_sharing: ksm.max_page_sharing.clone().unwrap_or(DEFAULT_MAX_PAGE_SHARING).max(2),
            use_zero_pages: ksm.use_zero_pages == Ok(1),
            across_nodes: ksm.merge_across_nodes != Ok(0),
        }
    }

    /// Frames freed when `copies` equal pages are merged with `merged` pages that share KSM frames already.
    pub fn freed(self, copies: u64, merged: u64) -> Pages {
        self.freed_frames(copies, copies, merged)
    }

    /// Frames freed when all `mappings` of `frames` equal pages are merged with `merged` pages that share KSM frames
    /// already. There are more mappings than frames where processes share pages since a fork.
    pub fn freed_frames(self, frames: u64, mappings: u64, merged: u64) -> Pages {
        let needed_frames = |mappings: u64| mappings.div_ceil(self.max_page_sharing);
        Pages(frames.saturating_sub(needed_frames(merged + mappings) - needed_frames(merged)))
    }

    /// Frames freed by `copies` zero pages.
    pub fn freed_zero(self, copies: u64, merged: u64) -> Pages {
        if self.use_zero_pages { Pages(copies) } else { self.freed(copies, merged) }
    }
}

impl Default for SharingSettings {
    /// The kernel's defaults.
    fn default() -> Self {
        Self { max_page_sharing: DEFAULT_MAX_PAGE_SHARING, use_zero_pages: false, across_nodes: true }
    }
}

/// The predicted result of one way of enrolling.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MergeEffect {
    /// Frames that are freed.
    pub freed_frames: Pages,
    /// Pages that ksmd would have to scan and for which it keeps metadata.
    pub scanned_pages: Pages,
    /// Huge pages that would be split because a part of them merges.
    pub split_huge_pages: Pages,
}

impl MergeEffect {
    /// Bytes that are freed.
    pub fn gross(&self, page_size: PageSize) -> Bytes {
        page_size.bytes_of(self.freed_frames)
    }

    /// Bytes of metadata.
    pub fn metadata(&self) -> Bytes {
        Bytes(self.scanned_pages.0 * RMAP_ITEM_BYTES)
    }

    /// Freed bytes less the metadata.
    pub fn net(&self, page_size: PageSize) -> NetBytes {
        NetBytes(self.gross(page_size).0 as i64 - self.metadata().0 as i64)
    }
}

impl AddAssign for MergeEffect {
    fn add_assign(&mut self, other: Self) {
        self.freed_frames += other.freed_frames;
        self.scanned_pages += other.scanned_pages;
        self.split_huge_pages += other.split_huge_pages;
    }
}

/// The costs with which guided enrollment chooses its ranges, in bytes.
///
/// CPU time is converted to the memory that it could save elsewhere: one second equals 100 MiB
/// ([`BYTES_PER_CPU_SECOND`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EnrollCostBytes {
    /// A scanned page: its metadata, and ksmd's time for it.
    pub per_scanned_page: i64,
    /// A range. Splitting a region adds up to two `vm_area_struct`s (184 bytes in slabs of 192 to 256 on 64-bit
    /// kernels, /proc/slabinfo) with an `anon_vma_chain` (64 bytes) each, and their maple tree slots.
    pub per_range: i64,
    /// A page within a range that is not resident: its metadata if it becomes resident while ksmd runs. It needs no
    /// scan now.
    pub per_hole_page: i64,
    /// A huge page that is split.
    pub per_split_huge_page: i64,
}

/// The memory value of one second of CPU time, in bytes. A merge takes ksmd about 6 us, so merging saves about 600 MiB
/// per second. At a sixth of that price merging stays profitable, but not if ksmd scans about ten unique pages for each
/// merge.
pub const BYTES_PER_CPU_SECOND: i64 = 100 << 20;

impl EnrollCostBytes {
    /// The default costs for choosing ranges, for a page size.
    ///
    /// A unique page takes ksmd about 5 us until it has been in the unstable tree once; at the price of CPU time that
    /// is half a KiB. A huge page has the value of 16 base pages. A huge page with less than 1/32 of its pages to free
    /// stays whole, so that stray duplicates split none. A huge page with many duplicates saves much more than that,
    /// and is split.
    pub fn for_page_size(page_size: PageSize) -> Self {
        Self {
            per_scanned_page: RMAP_ITEM_BYTES as i64 + 5 * BYTES_PER_CPU_SECOND / 1_000_000,
            per_range: 1024,
            per_hole_page: RMAP_ITEM_BYTES as i64,
            per_split_huge_page: 16 * page_size.bytes() as i64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn one_copy_stays_for_each_chain_link() {
        let sharing = SharingSettings { max_page_sharing: 4, ..SharingSettings::default() };
        let check = |copies, merged, freed| assert_eq!(sharing.freed(copies, merged), Pages(freed));
        check(1, 0, 0);
        check(2, 0, 1);
        check(4, 0, 3);
        check(5, 0, 3);
        check(8, 0, 6);
        check(1, 2, 1);
        check(3, 2, 2);
        assert_eq!(sharing.freed_zero(5, 0), Pages(3));
        assert_eq!(sharing.freed_frames(2, 4, 0), Pages(1));
        assert_eq!(sharing.freed_frames(1, 3, 0), Pages(0));
        assert_eq!(sharing.freed_frames(1, 6, 0), Pages(0), "never negative");
        assert_eq!(SharingSettings { use_zero_pages: true, ..sharing }.freed_zero(5, 0), Pages(5));
    }

    #[test]
    fn metadata_can_cost_more_than_merging_saves() {
        let page_size = PageSize::new(4096).unwrap();
        let reach = MergeEffect { freed_frames: Pages(1), scanned_pages: Pages(100), split_huge_pages: Pages(0) };
        assert_eq!(reach.net(page_size), NetBytes(4096 - 6400));
    }

    proptest! {
        #[test]
        fn the_order_of_joining_does_not_matter(first in 0u64..2000, second in 0u64..2000, max in 2u64..300) {
            let sharing = SharingSettings { max_page_sharing: max, ..SharingSettings::default() };
            prop_assert_eq!(sharing.freed(first, 0) + sharing.freed(second, first), sharing.freed(first + second, 0));
        }
    }
}
