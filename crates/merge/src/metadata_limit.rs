//! Fits a plan into a limit on KSM's metadata: it keeps the ranges that save most per byte of metadata, together with
//! their partners.
//!
//! Ranges with the lowest profit are dropped, some at a time. The profit of the rest is then computed again, so that
//! ranges that lost their partners are next. The remaining ranges save more than the metadata that they take.

use crate::decide::plan::MergePlan;
use pagefold_base::ksm::RMAP_ITEM_BYTES;
use pagefold_base::{AddressRange, Bytes, PageClass, Pages, ProcessId};
use pagefold_census::content_groups;
use pagefold_census::index::PageIndex;
use pagefold_census::range_selection::each_page;
use pagefold_census::results::Census;
use std::collections::BTreeMap;

/// Each round drops one part in so many of the excess, then computes the profits again.
const EXCESS_DIVISOR_PER_ROUND: u64 = 4;

/// Shares of one freed page, which a group divides among its pages.
const SHARES_PER_PAGE: u64 = 64;

/// Limit a plan to ranges whose new pages fit into ksmd's metadata limit; ranges that are enrolled already do not
/// count. The prediction is rescaled to the remaining ranges.
pub fn limit_to_metadata(plan: &mut MergePlan, census: &Census, index: &PageIndex, max_metadata: Bytes) {
    let most = Pages(max_metadata.0 / RMAP_ITEM_BYTES);
    let mut parts = RangeCandidates::from_plan(plan, census, index);
    if parts.kept_rmap_items() <= most {
        return;
    }
    let groups = MergeGroups::from_index(&parts, census, index);
    loop {
        let worth = groups.profits(&parts);
        let least_first = parts.sorted_by_profit(&worth);
        let too_many = parts.kept_rmap_items().saturating_sub(most);
        let wanted = Pages(too_many.0.div_ceil(EXCESS_DIVISOR_PER_ROUND));
        let loses = |part: &&usize| {
            worth[**part] * index.page_bytes() / SHARES_PER_PAGE
                <= parts.ranges[**part].new_rmap_items.0 * RMAP_ITEM_BYTES
        };
        let mut gone = Pages::ZERO;
        let out: Vec<usize> = least_first
            .iter()
            .take_while(|part| {
                let goes = gone < wanted || wanted == Pages::ZERO && loses(part);
                gone += parts.ranges[**part].new_rmap_items;
                goes
            })
            .copied()
            .collect();
        if out.is_empty() {
            break;
        }
        out.into_iter().for_each(|part| parts.ranges[part].kept = false);
    }
    let mut left_out: BTreeMap<ProcessId, Vec<AddressRange>> = BTreeMap::new();
    for part in parts.ranges.iter().filter(|part| !part.kept) {
        left_out.entry(census.subjects[part.subject].process.id).or_default().push(part.range);
    }
    for (process, ranges) in left_out {
        plan.exclude_ranges(process, ranges);
    }
}

/// A range of a plan. Ranges are never cut: that would add regions and split huge pages.
struct RangeCandidate {
    subject: usize,
    range: AddressRange,
    /// Whether it is enrolled already.
    enrolled: bool,
    /// Pages in it that would get new ksmd metadata.
    new_rmap_items: Pages,
    /// Zero pages among these that should merge.
    merging_zero_pages: Pages,
    kept: bool,
}

/// All ranges of a plan, in the order of subjects and addresses.
struct RangeCandidates {
    ranges: Vec<RangeCandidate>,
    /// The position of the first range of each subject, and the end of the last one's.
    first_by_subject: Vec<usize>,
}

impl RangeCandidates {
    fn from_plan(plan: &MergePlan, census: &Census, index: &PageIndex) -> Self {
        let mut parts = Self { ranges: Vec::new(), first_by_subject: Vec::new() };
        for (subject, seen) in census.subjects.iter().enumerate() {
            let mut at = parts.ranges.len();
            parts.first_by_subject.push(at);
            let target = plan.targets.iter().find(|target| target.process.id == seen.process.id);
            let ranges = target.map_or(&[][..], |target| &target.ranges);
            parts.ranges.extend(ranges.iter().map(|planned| RangeCandidate {
                subject,
                range: planned.range,
                enrolled: planned.enrolled,
                new_rmap_items: Pages::ZERO,
                merging_zero_pages: Pages::ZERO,
                kept: true,
            }));
            for (_, ordinal, address) in each_page(index, &index.subject_ordinals(subject)) {
                while parts.ranges.get(at).is_some_and(|part| part.range.end <= address) {
                    at += 1;
                }
                let Some(part) = parts.ranges.get_mut(at).filter(|part| part.range.start <= address) else { continue };
                let mark = index.mark(ordinal);
                let Some(class) = mark.class().filter(|class| *class != PageClass::Merged) else { continue };
                part.new_rmap_items.0 += u64::from(!part.enrolled);
                part.merging_zero_pages.0 += u64::from(class == PageClass::Zero && mark.is_covered());
            }
        }
        parts.first_by_subject.push(parts.ranges.len());
        parts
    }

    fn position_of_address(&self, subject: usize, address: u64) -> Option<usize> {
        let (first, end) = (self.first_by_subject[subject], self.first_by_subject[subject + 1]);
        let at = first + self.ranges[first..end].partition_point(|part| part.range.end <= address);
        (at < end && self.ranges[at].range.start <= address).then_some(at)
    }

    /// Pages of the kept ranges that would get new ksmd metadata.
    fn kept_rmap_items(&self) -> Pages {
        self.ranges.iter().filter(|part| part.kept).map(|part| part.new_rmap_items).sum()
    }

    /// The kept ranges that take metadata: lowest profit per metadata first, and among equals the last one first.
    fn sorted_by_profit(&self, profits: &[u64]) -> Vec<usize> {
        let of =
            |part: usize, other: usize| u128::from(profits[part]) * u128::from(self.ranges[other].new_rmap_items.0);
        let takes = |part: &usize| self.ranges[*part].kept && self.ranges[*part].new_rmap_items > Pages::ZERO;
        let mut order: Vec<usize> = (0..self.ranges.len()).filter(takes).collect();
        order.sort_unstable_by(|&a, &b| of(a, b).cmp(&of(b, a)).then(b.cmp(&a)));
        order
    }
}

/// The groups of equal pages that should merge and can free a frame, each as the positions of the ranges of its pages.
/// Pages that share one frame since a fork count one by one, but groups with a single frame are left out.
#[derive(Default)]
struct MergeGroups {
    range_positions: Vec<u32>,
    /// The size of each group, and whether a page of it is merged already.
    sizes_and_merged: Vec<(u32, bool)>,
}

impl MergeGroups {
    fn from_index(candidates: &RangeCandidates, census: &Census, index: &PageIndex) -> Self {
        let domains = content_groups::domain_numbers(census.subjects.iter().map(|subject| &subject.domain));
        let found = content_groups::fold_groups(index, &domains, |groups: &mut Self, _, members| {
            let before = groups.range_positions.len();
            let merged = members.iter().any(|member| member.merged);
            if !merged && members.iter().all(|member| member.first_page_of_frame == members[0].first_page_of_frame) {
                return;
            }
            let merges =
                |member: &&content_groups::GroupPage| !member.merged && index.mark(member.ordinal).is_covered();
            groups.range_positions.extend(members.iter().filter(merges).filter_map(|member| {
                let (.., address) = index.locate(member.ordinal)?;
                Some(candidates.position_of_address(member.subject, address)? as u32)
            }));
            let count = groups.range_positions.len() - before;
            if count > 0 {
                groups.sizes_and_merged.push((count as u32, merged));
            }
        });
        found.into_iter().fold(Self::default(), |mut all, more| {
            all.range_positions.extend(more.range_positions);
            all.sizes_and_merged.extend(more.sizes_and_merged);
            all
        })
    }

    /// The profit of each range beside the other kept ones: of n equal pages each counts for `1 - 1/n`. If one is
    /// merged already each counts for a whole page, as does a zero page.
    fn profits(&self, candidates: &RangeCandidates) -> Vec<u64> {
        let mut worth: Vec<u64> =
            candidates.ranges.iter().map(|part| part.merging_zero_pages.0 * SHARES_PER_PAGE).collect();
        let mut rest = &self.range_positions[..];
        for &(members, merged) in &self.sizes_and_merged {
            let (own, others) = rest.split_at(members as usize);
            rest = others;
            let kept = || own.iter().map(|&part| part as usize).filter(|&part| candidates.ranges[part].kept);
            let each = match kept().count() as u64 {
                0 => continue,
                _ if merged => SHARES_PER_PAGE,
                count => (count - 1) * SHARES_PER_PAGE / count,
            };
            kept().for_each(|part| worth[part] += each);
        }
        worth
    }
}
