//! Which ranges a guided enrolment covers, region by region, and which enrolled ones are idle.
//!
//! What a page gains and costs is decided here; [`pagefold_base::range_optimizer`] makes the choice.
//!
//! - A duplicate or a page of zeros gains what it stands for in its group, a merged page nothing, at no cost: its
//!   metadata is paid for. All others are scanned for nothing, volatile ones above all, and so are those of which
//!   nothing is known because they could not be read.
//! - A page of a content that another trust domain merges must not be covered, nor one of which it is only remembered
//!   what it held, or that it changes.
//! - A hole within a region may be bridged, at the price of metadata for its pages, which ksmd pays only if they fill:
//!   cheaper than a second range if the hole is small, dearer if it is large. Ranges end at resident pages and never
//!   leave their region.
//! - A process must keep room for regions of its own under `vm.max_map_count`: what is enrolled takes at most half of
//!   what is left, each range two regions.
//!
//! What a page gains assumes that the other pages of its group are covered too. What the chosen ranges reach together
//! is counted afterwards, from the groups.

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

/// By what ranges are chosen.
#[derive(Clone, Copy, Debug)]
pub struct SelectionCriteria {
    /// KSM's settings.
    pub sharing: SharingSettings,
    /// What everything costs.
    pub costs: EnrollCostBytes,
    /// The size of a page.
    pub page_size: PageSize,
    /// The size of a huge page.
    pub huge_page_size: PageSize,
    /// Whether pages of different trust domains may be merged.
    pub across_domains: bool,
    /// Regions that a process may have (`vm.max_map_count`).
    pub max_map_count: u64,
}

/// The chosen ranges, in the order of subjects and addresses.
#[derive(Debug, Default)]
pub struct SelectedRanges {
    /// Those that pay.
    pub ranges: Vec<GuidedRange>,
    /// Those that are enrolled and do not.
    pub idle_ranges: Vec<IdleRange>,
}

/// Choose the ranges of all processes, and mark the pages that they cover.
pub fn select_ranges(scope: &ScanScope, index: &PageIndex, criteria: &SelectionCriteria) -> SelectedRanges {
    let regions: Vec<RegionPages> = index.regions().collect();
    let chosen: Vec<SelectedRanges> = regions
        .par_chunk_by(|a, b| a.subject == b.subject)
        .map(|regions| select_process_ranges(scope, index, criteria, regions))
        .collect();
    let mut all = SelectedRanges::default();
    for chosen in chosen {
        all.ranges.extend(chosen.ranges);
        all.idle_ranges.extend(chosen.idle_ranges);
    }
    all
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
    let has = scope.subjects[subject].regions.len() as u64;
    let room = (criteria.max_map_count.saturating_sub(has) / 4) as usize;
    let prices =
        RangeCosts { per_range: criteria.costs.per_range, per_split_huge_page: criteria.costs.per_split_huge_page };
    let is_enrolled = |pages: &RegionPages| {
        let (region, _) = &scope.subjects[subject].regions[pages.region];
        region.flags.has(VmFlags::MERGEABLE)
    };

    let mut chosen = SelectedRanges::default();
    // The numbers of huge pages that the chosen ranges split, ascending.
    let mut split: Vec<u64> = Vec::new();
    let best = best_ranges_within(
        regions.len(),
        |i| {
            let merges = |mark: PageMark| mark.class().is_some_and(PageClass::is_mergeable);
            page_segments(index, criteria, &regions[i].ordinals, move |mark| (criteria.net_gain(mark), merges(mark)))
        },
        prices,
        room,
    );
    for (pages, ranges) in regions.iter().zip(best) {
        for ordinals in ranges.into_iter().map(|range| offset_ordinals(&pages.ordinals, &range)) {
            let Some(range) = address_range(index, &ordinals) else { continue };
            let empty = GuidedRange {
                subject,
                range,
                pages: Pages::ZERO,
                merging: Pages::ZERO,
                zero: Pages::ZERO,
                freed_bytes: Bytes::ZERO,
                split_huge_pages: Pages::ZERO,
                enrolled: is_enrolled(pages),
            };
            chosen.ranges.push(mark_covered(index, criteria, empty, ordinals, &mut split));
        }
    }

    let enrolled: Vec<&RegionPages> = regions.iter().filter(|pages| is_enrolled(pages)).collect();
    let is_whole = |huge: &u64| split.binary_search(huge).is_err();
    // A hole may be a page of zeros that KSM merged, and withdrawing would unmerge it. What is split has no price any
    // more.
    let unbridged = |stretch: PageSegment| PageSegment {
        hole_cost: if stretch.hole_cost > 0 { i64::MAX } else { 0 },
        huge_page: stretch.huge_page.filter(is_whole),
        ..stretch
    };
    let best = best_ranges_within(
        enrolled.len(),
        |i| {
            page_segments(index, criteria, &enrolled[i].ordinals, |mark| (criteria.unenroll_gain(mark), false))
                .map(unbridged)
        },
        prices,
        room - chosen.ranges.len().min(room),
    );
    for (pages, ranges) in enrolled.iter().zip(best) {
        let ranges =
            ranges.into_iter().filter_map(|range| address_range(index, &offset_ordinals(&pages.ordinals, &range)));
        chosen.idle_ranges.extend(ranges.map(|range| IdleRange { subject, range }));
    }
    chosen
}

impl SelectionCriteria {
    /// What covering a page gains, less what it costs; `None` if it must not be covered.
    fn net_gain(&self, mark: PageMark) -> Option<i64> {
        match mark.class() {
            _ if mark.is_forbidden() => None,
            // Another trust domain may merge what it holds now.
            _ if mark.is_uncertain() => None,
            None if mark == PageMark::NOT_RESIDENT => Some(-self.costs.per_hole_page),
            // Those left out of a sample say nothing: what the sample holds then stands for itself.
            None if mark == PageMark::NOT_SAMPLED => Some(0),
            Some(PageClass::Merged) => Some(0),
            _ => Some(self.gross_gain(mark) - self.costs.per_scanned_page),
        }
    }

    /// What comes back of a page when its whole group is merged, in bytes.
    fn gross_gain(&self, mark: PageMark) -> i64 {
        let alone = mark.class() == Some(PageClass::DuplicateForeign) && !self.across_domains;
        if alone || mark.is_forbidden() { 0 } else { mark.freed_64ths() * self.page_size.bytes() as i64 / 64 }
    }

    /// What withdrawing a page gains; `None` if it must stay enrolled, because it pays, is merged, or is not known.
    fn unenroll_gain(&self, mark: PageMark) -> Option<i64> {
        let idle = !mark.is_covered() && mark.class().is_some_and(|class| class != PageClass::Merged);
        idle.then_some(self.costs.per_scanned_page)
    }
}

/// The pages of a region as stretches, of what each is worth and whether it merges.
fn page_segments<'a>(
    index: &'a PageIndex,
    criteria: &'a SelectionCriteria,
    ordinals: &Range<u32>,
    evaluate: impl Fn(PageMark) -> (Option<i64>, bool) + 'a,
) -> impl Iterator<Item = PageSegment> + 'a {
    let page_len = index.page_bytes();
    // By mark: the walk is over every page of a host.
    let known: Vec<(Option<i64>, bool)> = PageMark::all_values().map(evaluate).collect();
    let mut next_address = None;
    let mut pages = each_page(index, ordinals).map(move |(run, ordinal, address)| {
        let hole = next_address.map_or(0, |next| ((address - next) / page_len) as i64 * criteria.costs.per_hole_page);
        next_address = Some(address + page_len);
        let (worth, merges) = known[index.mark(ordinal).bits()];
        let huge = run.huge.then(|| address / criteria.huge_page_size.bytes());
        PageSegment { pages: 1, net_gain: worth, merges, huge_page: huge, hole_cost: hole }
    });
    let mut held = pages.next();
    std::iter::from_fn(move || {
        let mut stretch = held.take()?;
        for page in pages.by_ref() {
            let alike = (page.net_gain, page.merges, page.huge_page, 0)
                == (stretch.net_gain, stretch.merges, stretch.huge_page, page.hole_cost);
            if !alike {
                held = Some(page);
                break;
            }
            stretch.pages += 1;
        }
        Some(stretch)
    })
}

/// Mark the pages of a range as covered, and count them. Huge pages that it splits first are added to `split`.
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
        let is_boundary = |at: u64| !range.enrolled && !at.is_multiple_of(criteria.huge_page_size.bytes());
        let cut = address == range.range.start && is_boundary(address) || end == range.range.end && is_boundary(end);
        if run.huge && (gain > 0 || cut) && split_huge_pages.last() != Some(&huge) {
            split_huge_pages.push(huge);
            range.split_huge_pages.0 += 1;
        }
        range.zero.0 += u64::from(gain > 0 && class == Some(PageClass::Zero));
    }
    range
}

/// Some pages of a region by their ordinals.
fn offset_ordinals(region: &Range<u32>, pages: &Range<u32>) -> Range<u32> {
    region.start + pages.start..region.start + pages.end
}

/// From the first to the last of some pages of one region.
fn address_range(index: &PageIndex, ordinals: &Range<u32>) -> Option<AddressRange> {
    let (_, _, start) = index.locate(ordinals.start)?;
    let (_, _, last) = index.locate(ordinals.end.checked_sub(1)?)?;
    Some(AddressRange { start, end: last + index.page_bytes() })
}

/// Each of some consecutive pages: its run, its ordinal, its address.
pub fn each_page<'a>(
    index: &'a PageIndex,
    ordinals: &Range<u32>,
) -> impl Iterator<Item = (PageRun, u32, u64)> + use<'a> {
    let page_len = index.page_bytes();
    index.runs(ordinals.clone()).flat_map(move |(run, first)| {
        (0..run.pages).map(move |i| (run, first + i, run.address + u64::from(i) * page_len))
    })
}
