//! Selects the ranges that a guided enrollment covers, region by region, and finds enrolled ranges without profit.
//!
//! This module decides what a page gains and costs; [`pagefold_base::range_optimizer`] selects the ranges.
//!
//! - A duplicate or zero page gains its share of what its group frees. A merged page gains nothing and costs nothing,
//!   because its metadata exists already. All other pages cost a scan without a gain: volatile pages above all, and
//!   pages that could not be read.
//! - Some pages must not be covered: pages of a content that another trust domain merges, and pages whose content is
//!   only cached or that are assumed to be volatile.
//! - A range may bridge a hole within a region at the cost of metadata for its pages, which ksmd allocates only if they
//!   fill. For a small hole this is cheaper than a second range, for a large one dearer. Ranges begin and end at
//!   resident pages and never leave their region.
//! - A process must keep regions for its own use under `vm.max_map_count`. Enrollment takes at most half of the regions
//!   that are left; each range takes two.
//!
//! The gain of a page assumes that the other pages of its group are covered too. The census counts afterwards, from the
//! groups, what the selected ranges free together.

use crate::index::{PageIndex, PageMark, RegionPages};
use crate::results::{GuidedRange, IdleRange};
use crate::scan_scope::ScanScope;
use pagefold_base::range_optimizer::{PageSegment, RangeCosts, best_ranges_within};
use pagefold_base::region::VmFlags;
use pagefold_base::savings::{EnrollCostBytes, SharingSettings};
use pagefold_base::{AddressRange, Bytes, PageClass, PageSize, Pages};
use pagefold_host::PageRun;
use rayon::prelude::*;
use std::ops::Range;

/// How ranges are selected.
#[derive(Clone, Copy, Debug)]
pub struct SelectionCriteria {
    /// KSM's settings.
    pub sharing: SharingSettings,
    /// The costs of scanning, splitting and bridging.
    pub costs: EnrollCostBytes,
    /// The size of a page.
    pub page_size: PageSize,
    /// The size of a huge page.
    pub huge_page_size: PageSize,
    /// Whether pages of different trust domains may be merged.
    pub across_domains: bool,
    /// Maximum number of regions of a process (`vm.max_map_count`).
    pub max_map_count: u64,
}

/// The selected ranges, in the order of subjects and addresses.
#[derive(Debug, Default)]
pub struct SelectedRanges {
    /// Profitable ranges.
    pub ranges: Vec<GuidedRange>,
    /// Enrolled ranges without profit.
    pub idle_ranges: Vec<IdleRange>,
}

/// Selects the ranges of all processes and marks the pages that they cover.
pub fn select_ranges(scope: &ScanScope, index: &PageIndex, criteria: &SelectionCriteria) -> SelectedRanges {
    let regions: Vec<RegionPages> = index.regions().collect();
    let processes: Vec<SelectedRanges> = regions
        .par_chunk_by(|a, b| a.subject == b.subject)
        .map(|regions| select_process_ranges(scope, index, criteria, regions))
        .collect();
    let mut selected = SelectedRanges::default();
    for process in processes {
        selected.ranges.extend(process.ranges);
        selected.idle_ranges.extend(process.idle_ranges);
    }
    selected
}

fn select_process_ranges(
    scope: &ScanScope,
    index: &PageIndex,
    criteria: &SelectionCriteria,
    regions: &[RegionPages],
) -> SelectedRanges {
    let Some(first) = regions.first() else { return SelectedRanges::default() };
    let subject = first.subject;
    if scope.subjects[subject].is_foreign {
        return SelectedRanges::default();
    }
    let region_count = scope.subjects[subject].regions.len() as u64;
    let max_ranges = (criteria.max_map_count.saturating_sub(region_count) / 4) as usize;
    let costs =
        RangeCosts { per_range: criteria.costs.per_range, per_split_huge_page: criteria.costs.per_split_huge_page };
    let is_enrolled = |pages: &RegionPages| {
        let (region, _) = &scope.subjects[subject].regions[pages.region];
        region.flags.has(VmFlags::MERGEABLE)
    };

    let mut selected = SelectedRanges::default();
    // The numbers of the huge pages that the selected ranges split, ascending.
    let mut split_huge_pages: Vec<u64> = Vec::new();
    let best = best_ranges_within(
        regions.len(),
        |i| {
            let merges = |mark: PageMark| mark.class().is_some_and(PageClass::is_mergeable);
            page_segments(index, criteria, &regions[i].ordinals, move |mark| (criteria.net_gain(mark), merges(mark)))
        },
        costs,
        max_ranges,
    );
    for (pages, ranges) in regions.iter().zip(best) {
        for ordinals in ranges.into_iter().map(|range| offset_ordinals(&pages.ordinals, &range)) {
            let Some(range) = address_range(index, &ordinals) else { continue };
            let uncounted = GuidedRange {
                subject,
                range,
                pages: Pages::ZERO,
                merging: Pages::ZERO,
                zero: Pages::ZERO,
                freed_bytes: Bytes::ZERO,
                split_huge_pages: Pages::ZERO,
                enrolled: is_enrolled(pages),
            };
            selected.ranges.push(mark_covered(index, criteria, uncounted, ordinals, &mut split_huge_pages));
        }
    }

    let enrolled: Vec<&RegionPages> = regions.iter().filter(|pages| is_enrolled(pages)).collect();
    let is_unsplit = |huge: &u64| split_huge_pages.binary_search(huge).is_err();
    // A hole may hold a zero page that KSM merged, which unenrolling would unmerge. Huge pages that are split already
    // cost nothing more.
    let without_bridging = |segment: PageSegment| PageSegment {
        hole_cost: if segment.hole_cost > 0 { i64::MAX } else { 0 },
        huge_page: segment.huge_page.filter(is_unsplit),
        ..segment
    };
    let best = best_ranges_within(
        enrolled.len(),
        |i| {
            page_segments(index, criteria, &enrolled[i].ordinals, |mark| (criteria.unenroll_gain(mark), false))
                .map(without_bridging)
        },
        costs,
        max_ranges - selected.ranges.len().min(max_ranges),
    );
    for (pages, ranges) in enrolled.iter().zip(best) {
        let ranges =
            ranges.into_iter().filter_map(|range| address_range(index, &offset_ordinals(&pages.ordinals, &range)));
        selected.idle_ranges.extend(ranges.map(|range| IdleRange { subject, range }));
    }
    selected
}

impl SelectionCriteria {
    /// The gain of covering a page minus its cost, in bytes; `None` if the page must not be covered.
    fn net_gain(&self, mark: PageMark) -> Option<i64> {
        match mark.class() {
            _ if mark.is_forbidden() => None,
            // Another trust domain may merge its current content.
            _ if mark.is_uncertain() => None,
            None if mark == PageMark::NOT_RESIDENT => Some(-self.costs.per_hole_page),
            // Pages outside the sample are neutral: a range is judged by its sampled pages.
            None if mark == PageMark::NOT_SAMPLED => Some(0),
            Some(PageClass::Merged) => Some(0),
            _ => Some(self.gross_gain(mark) - self.costs.per_scanned_page),
        }
    }

    /// The bytes that a page frees when its whole group is merged.
    fn gross_gain(&self, mark: PageMark) -> i64 {
        let cannot_merge = mark.class() == Some(PageClass::DuplicateAcrossDomains) && !self.across_domains;
        if cannot_merge || mark.is_forbidden() { 0 } else { mark.freed_64ths() * self.page_size.bytes() as i64 / 64 }
    }

    /// The gain of unenrolling a page; `None` if it must stay enrolled because it is covered, merged or was not read.
    fn unenroll_gain(&self, mark: PageMark) -> Option<i64> {
        let idle = !mark.is_covered() && mark.class().is_some_and(|class| class != PageClass::Merged);
        idle.then_some(self.costs.per_scanned_page)
    }
}

/// The pages of a region as segments of equal gain that merge or do not.
fn page_segments<'a>(
    index: &'a PageIndex,
    criteria: &'a SelectionCriteria,
    ordinals: &Range<u32>,
    evaluate: impl Fn(PageMark) -> (Option<i64>, bool) + 'a,
) -> impl Iterator<Item = PageSegment> + 'a {
    let page_len = index.page_bytes();
    // By mark, because the walk visits every page of a host.
    let values: Vec<(Option<i64>, bool)> = PageMark::all_values().map(evaluate).collect();
    // Pages between two parts were not examined, so no range may bridge them.
    let scanned = index.scanned_ranges(index.subject_of_page(ordinals.start));
    let is_within_part = |start: u64, end: u64| !scanned.iter().any(|part| start <= part.start && part.start <= end);
    let mut next_address = None;
    let mut pages = each_page(index, ordinals).map(move |(run, ordinal, address)| {
        let hole_cost = next_address.map_or(0, |next| match address - next {
            0 => 0,
            bytes if is_within_part(next, address) => (bytes / page_len) as i64 * criteria.costs.per_hole_page,
            _ => i64::MAX,
        });
        next_address = Some(address + page_len);
        let (net_gain, merges) = values[index.mark(ordinal).bits()];
        let huge_page = run.huge.then(|| address / criteria.huge_page_size.bytes());
        PageSegment { pages: 1, net_gain, merges, huge_page, hole_cost }
    });
    let mut next_page = pages.next();
    std::iter::from_fn(move || {
        let mut segment = next_page.take()?;
        for page in pages.by_ref() {
            let is_alike = (page.net_gain, page.merges, page.huge_page, 0)
                == (segment.net_gain, segment.merges, segment.huge_page, page.hole_cost);
            if !is_alike {
                next_page = Some(page);
                break;
            }
            segment.pages += 1;
        }
        Some(segment)
    })
}

/// Marks the pages of a range as covered and counts them. Adds the huge pages that it is the first to split to
/// `split_huge_pages`.
fn mark_covered(
    index: &PageIndex,
    criteria: &SelectionCriteria,
    range: GuidedRange,
    ordinals: Range<u32>,
    split_huge_pages: &mut Vec<u64>,
) -> GuidedRange {
    let mut range = range;
    for (run, ordinal, address) in each_page(index, &ordinals) {
        let mark = index.mark(ordinal);
        if mark.was_read() {
            index.set_mark(ordinal, mark.with_covered());
        }
        let class = mark.class();
        range.pages.0 += u64::from(class != Some(PageClass::Merged) && mark != PageMark::NOT_RESIDENT);
        let gain = criteria.gross_gain(mark);
        range.freed_bytes.0 += gain as u64;
        range.merging.0 += u64::from(gain > 0);
        let (huge, end) = (address / criteria.huge_page_size.bytes(), address + index.page_bytes());
        let is_boundary = |address: u64| !range.enrolled && !address.is_multiple_of(criteria.huge_page_size.bytes());
        let splits_huge_page =
            address == range.range.start && is_boundary(address) || end == range.range.end && is_boundary(end);
        if run.huge && (gain > 0 || splits_huge_page) && split_huge_pages.last() != Some(&huge) {
            split_huge_pages.push(huge);
            range.split_huge_pages.0 += 1;
        }
        range.zero.0 += u64::from(gain > 0 && class == Some(PageClass::Zero));
    }
    range
}

/// Positions within a region as ordinals.
fn offset_ordinals(region: &Range<u32>, pages: &Range<u32>) -> Range<u32> {
    region.start + pages.start..region.start + pages.end
}

/// The addresses from the first to the last of the given pages of one region.
fn address_range(index: &PageIndex, ordinals: &Range<u32>) -> Option<AddressRange> {
    let (_, _, start) = index.locate(ordinals.start)?;
    let (_, _, last) = index.locate(ordinals.end.checked_sub(1)?)?;
    Some(AddressRange { start, end: last + index.page_bytes() })
}

/// Each of the given consecutive pages: its run, its ordinal and its address.
pub fn each_page<'a>(
    index: &'a PageIndex,
    ordinals: &Range<u32>,
) -> impl Iterator<Item = (PageRun, u32, u64)> + use<'a> {
    let page_len = index.page_bytes();
    index.runs(ordinals.clone()).flat_map(move |(run, first)| {
        (0..run.pages).map(move |i| (run, first + i, run.address + u64::from(i) * page_len))
    })
}
