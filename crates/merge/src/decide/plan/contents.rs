//! What the pages of a plan contain, as far as they can merge. Any part of the plan is predicted from it exactly.
//!
//! Many contents have their copies in the same ranges: they are counted together. Clones of a virtual machine therefore
//! take little memory.

use super::MergePlan;
use pagefold_base::ksm::RMAP_ITEM_BYTES;
use pagefold_base::savings::SharingSettings;
use pagefold_base::units::{AddressRange, Bytes, PageSize, Pages, ProcessId};
use std::collections::BTreeMap;

/// The contents of a plan's ranges. Later filters may drop whole ranges from the plan; they must not cut them.
#[derive(Clone, Debug)]
pub struct PlanContents {
    /// KSM's settings.
    pub(crate) sharing: SharingSettings,
    /// The size of a page.
    pub(crate) page_size: PageSize,
    /// The ranges, in the order of the plan.
    pub(crate) ranges: Vec<(ProcessId, AddressRange)>,
    /// Contents other than zero: which ranges hold their pages, and the number of such contents. Each once.
    pub(crate) equal_pages: Vec<(EqualPages, u64)>,
    /// Zero pages that KSM may merge with one another.
    pub(crate) zero_pages: Vec<ZeroPages>,
    /// The ranges that split a huge page together, and the number of such huge pages.
    pub(crate) shared_huge_pages: BTreeMap<Vec<u32>, u64>,
}

/// The position of pages outside of the plan. It is above all positions of ranges.
pub(crate) const OUTSIDE_PLAN: u32 = u32::MAX >> 1;

/// The ranges of the equal pages of one content. Only pages that KSM may merge with one another are together: pages of
/// one trust domain where whole processes are enrolled, and of one NUMA node where KSM keeps nodes apart.
///
/// The first number is the number of pages that are merged already. Each following number is a page that is not merged:
/// twice the position of its range, plus one if it has the same frame as the page before it, since a fork. A frame that
/// pages outside of the plan share has one more page, at [`OUTSIDE_PLAN`].
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct EqualPages(pub Box<[u32]>);

impl std::borrow::Borrow<[u32]> for EqualPages {
    fn borrow(&self) -> &[u32] {
        &self.0
    }
}

/// Zero pages that KSM may merge with one another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ZeroPages {
    /// Zero pages with a frame of their own, by the position of their range.
    pub own_frames: BTreeMap<u32, u64>,
    /// The positions of the pages of a shared frame, and the number of such frames. Pages outside of the plan count as
    /// one page at [`OUTSIDE_PLAN`].
    pub shared_frames: BTreeMap<Vec<u32>, u64>,
}

impl ZeroPages {
    /// Frames that only pages of kept ranges map: a page elsewhere keeps its frame.
    fn frames(&self, is_kept: &impl Fn(u32) -> bool) -> u64 {
        let own_frames = self.own_frames.iter().filter(|(range, _)| is_kept(**range)).map(|(_, frames)| frames);
        let shared_frames = self.shared_frames.iter().filter(|(ranges, _)| ranges.iter().all(|&range| is_kept(range)));
        own_frames.sum::<u64>() + shared_frames.map(|(_, frames)| frames).sum::<u64>()
    }

    /// Adds the bytes that each kept range frees: a shared frame is divided among its pages, if all are kept.
    fn add_freed_bytes(&self, page_size: PageSize, is_kept: &impl Fn(u32) -> bool, counts: &mut [RangeContentCounts]) {
        for (&range, &frames) in self.own_frames.iter().filter(|(range, _)| is_kept(**range)) {
            counts[range as usize].freed_bytes.0 += frames * page_size.bytes();
        }
        for (ranges, &frames) in
            self.shared_frames.iter().filter(|(ranges, _)| ranges.iter().all(|&range| is_kept(range)))
        {
            let share = page_size.bytes() / (ranges.len() as u64).max(1);
            ranges.iter().for_each(|&range| counts[range as usize].freed_bytes.0 += frames * share);
        }
    }
}

/// The pages of one content in the kept ranges.
#[derive(Default)]
struct KeptPages {
    /// The range of each page, and whether all pages of its frame are kept.
    pages: Vec<(u32, bool)>,
    /// Frames of these pages.
    frames: u64,
    /// Frames of these of which all pages are kept.
    whole_frames: u64,
}

impl KeptPages {
    /// Collect the kept pages of a content, encoded as in [`EqualPages`].
    fn collect(&mut self, pages: &[u32], is_kept: &impl Fn(u32) -> bool) {
        self.pages.clear();
        (self.frames, self.whole_frames) = (0, 0);
        for frame in pages.chunk_by(|_, next| next & 1 == 1) {
            let first = self.pages.len();
            self.pages.extend(frame.iter().map(|page| (page >> 1, false)).filter(|&(range, _)| is_kept(range)));
            let is_whole = self.pages.len() - first == frame.len();
            self.pages[first..].iter_mut().for_each(|page| page.1 = is_whole);
            self.frames += u64::from(self.pages.len() > first);
            self.whole_frames += u64::from(is_whole);
        }
    }
}

/// What a part of a plan merges.
#[derive(Clone, Debug)]
pub(crate) struct ContentCounts {
    /// Frames that are freed.
    pub freed_frames: Pages,
    /// Splits of huge pages by several ranges, beyond the first one.
    pub repeated_splits: Pages,
    /// The counts of each range of the whole plan; none for ranges outside of the part.
    pub ranges: Vec<RangeContentCounts>,
}

/// The pages of a range that merge beside the other ranges of a part of a plan. Zero pages count in `freed_bytes` only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RangeContentCounts {
    /// Pages that have a partner.
    pub merging: Pages,
    /// Pages of these that are third and further copies of their content.
    pub further_copies: Pages,
    /// Freed bytes: the pages of a content whose frames have no page elsewhere have equal shares of what it frees,
    /// rounded down.
    pub freed_bytes: Bytes,
}

impl PlanContents {
    /// Count what the ranges merge whose positions `is_kept` selects, as if ksmd found no other pages.
    ///
    /// Merging replaces one mapping at a time, and a frame is freed with its last mapping. A frame that a page of no
    /// kept range maps, since a fork, is therefore not freed. KSM keeps one of the frames of a content. It may keep one
    /// that is not freed anyway, depending on the order in which ksmd visits the pages; each such content then frees
    /// one frame more than is counted.
    ///
    /// Zero pages that KSM merged with one another earlier are ignored. Where KSM does not map zero pages to the
    /// kernel's zero page, the count may therefore be one frame too low.
    pub(crate) fn count(&self, is_kept: impl Fn(u32) -> bool) -> ContentCounts {
        let is_kept = |range: u32| range != OUTSIDE_PLAN && is_kept(range);
        let page_bytes = self.page_size.bytes();
        let mut counts = vec![RangeContentCounts::default(); self.ranges.len()];
        let mut freed_frames = Pages::ZERO;
        let mut kept = KeptPages::default();
        for (EqualPages(equal), contents) in &self.equal_pages {
            let Some((&merged, pages)) = equal.split_first() else { continue };
            kept.collect(pages, &is_kept);
            if kept.frames == 0 || kept.frames == 1 && merged == 0 {
                continue;
            }
            let freed = self.sharing.freed_frames(kept.whole_frames, kept.pages.len() as u64, merged.into());
            freed_frames.0 += freed.0 * contents;
            let pages_of_whole_frames = kept.pages.iter().filter(|(_, is_whole)| *is_whole).count() as u64;
            let share = freed.0 * page_bytes / pages_of_whole_frames.max(1);
            for (copy_number, &(range, is_whole)) in kept.pages.iter().enumerate() {
                let counts = &mut counts[range as usize];
                counts.merging.0 += contents;
                counts.further_copies.0 += if copy_number < 2 { 0 } else { *contents };
                counts.freed_bytes.0 += if is_whole { share * contents } else { 0 };
            }
        }
        for zeros in &self.zero_pages {
            freed_frames += self.sharing.freed_zero(zeros.frames(&is_kept), 0);
            zeros.add_freed_bytes(self.page_size, &is_kept, &mut counts);
        }
        let count_repeated = |(ranges, huge_pages): (&Vec<u32>, &u64)| {
            let splits = ranges.iter().filter(|range| is_kept(**range)).count() as u64;
            Pages(splits.saturating_sub(1) * huge_pages)
        };
        let repeated_splits = self.shared_huge_pages.iter().map(count_repeated).sum();
        ContentCounts { freed_frames, repeated_splits, ranges: counts }
    }

    /// The position of each range of a plan, in its order; `None` for a range that was cut after its contents were
    /// counted.
    pub(crate) fn positions(&self, plan: &MergePlan) -> Vec<Option<usize>> {
        let position_by_range: BTreeMap<(ProcessId, AddressRange), usize> =
            self.ranges.iter().enumerate().map(|(position, range)| (*range, position)).collect();
        let ranges = plan.targets.iter().flat_map(|target| target.ranges.iter().map(move |range| (target, range)));
        ranges.map(|(target, range)| position_by_range.get(&(target.process.id, range.range)).copied()).collect()
    }
}

/// Each round drops one part in so many of the excess, then computes the profits again.
const EXCESS_DIVISOR_PER_ROUND: u64 = 4;

/// A range of a plan that is limited. Ranges are never cut: that would add regions and split huge pages.
struct LimitedRange {
    /// Pages that would get new metadata: none of a range that is enrolled already.
    new_rmap_items: Pages,
    is_kept: bool,
}

impl MergePlan {
    /// Fit the plan into a limit on KSM's metadata: keep the ranges that save most per byte of metadata, together with
    /// their partners. Ranges that are enrolled already take no new metadata.
    ///
    /// Ranges with the lowest profit are dropped, some at a time. The profit of the rest is then computed again, so
    /// that ranges that lost their partners are next. The remaining ranges save more than the metadata that they take.
    /// Ranges of unknown contents are dropped.
    pub fn limit_to_metadata(&mut self, contents: &PlanContents, max_metadata: Bytes) {
        let max_items = Pages(max_metadata.0 / RMAP_ITEM_BYTES);
        let positions = contents.positions(self);
        let mut ranges: Vec<LimitedRange> =
            contents.ranges.iter().map(|_| LimitedRange { new_rmap_items: Pages::ZERO, is_kept: false }).collect();
        for (planned, position) in self.targets.iter().flat_map(|target| &target.ranges).zip(&positions) {
            let Some(position) = *position else { continue };
            let new_rmap_items = if planned.enrolled { Pages::ZERO } else { planned.pages };
            ranges[position] = LimitedRange { new_rmap_items, is_kept: true };
        }
        let kept_items = |ranges: &[LimitedRange]| -> Pages {
            ranges.iter().filter(|range| range.is_kept).map(|range| range.new_rmap_items).sum()
        };
        if kept_items(&ranges) > max_items {
            loop {
                let excess = kept_items(&ranges).saturating_sub(max_items);
                let dropped = least_profitable(contents, &ranges, excess);
                if dropped.is_empty() {
                    break;
                }
                dropped.into_iter().for_each(|position| ranges[position].is_kept = false);
            }
        }
        let mut kept_flags =
            positions.into_iter().map(|position| position.is_some_and(|position| ranges[position].is_kept));
        for target in &mut self.targets {
            target.ranges.retain(|_| kept_flags.next().unwrap_or(false));
        }
        self.drop_empty_targets();
    }
}

/// The positions of the kept ranges to drop next: some of those that save least per metadata while there is an excess,
/// and otherwise those that save less than their metadata.
fn least_profitable(contents: &PlanContents, ranges: &[LimitedRange], excess: Pages) -> Vec<usize> {
    let freed = contents.count(|position| ranges[position as usize].is_kept).ranges;
    let freed = |position: usize| freed[position].freed_bytes.0;
    let items = |position: usize| ranges[position].new_rmap_items.0;
    let cross_product = |position: usize, other: usize| u128::from(freed(position)) * u128::from(items(other));
    let takes_metadata = |position: &usize| ranges[*position].is_kept && items(*position) > 0;
    // Of equally profitable ranges the last one is dropped first.
    let mut order: Vec<usize> = (0..ranges.len()).filter(takes_metadata).collect();
    order.sort_unstable_by(|&a, &b| cross_product(a, b).cmp(&cross_product(b, a)).then(b.cmp(&a)));
    let items_to_drop = excess.0.div_ceil(EXCESS_DIVISOR_PER_ROUND);
    let mut dropped_items = 0;
    let is_dropped = |position: &usize| {
        let drops = dropped_items < items_to_drop
            || items_to_drop == 0 && freed(*position) <= items(*position) * RMAP_ITEM_BYTES;
        dropped_items += items(*position);
        drops
    };
    order.into_iter().take_while(is_dropped).collect()
}
