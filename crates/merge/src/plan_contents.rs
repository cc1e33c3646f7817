//! Counts the pages of a plan from the index of its census: how many of each range ksmd would scan, and which of them
//! are equal.

use crate::decide::plan::{EqualPages, MergePlan, OUTSIDE_PLAN, PlanContents, PlannedRange, ZeroPages};
use pagefold_base::{AddressRange, PageClass, PageSize, Pages};
use pagefold_census::content_groups::{self, GroupPage};
use pagefold_census::index::{PageIndex, PageMark};
use pagefold_census::range_selection::each_page;
use pagefold_census::results::{Census, GuidedRange};
use rayon::prelude::*;
use std::collections::{BTreeMap, HashMap};

/// Count the pages of each range of a plan, and return what they contain. Call it when no range of the plan is cut any
/// more.
pub fn count_plan_contents(
    plan: &mut MergePlan,
    census: &Census,
    index: &PageIndex,
    page_size: PageSize,
    huge_page_size: PageSize,
) -> PlanContents {
    let counter = ContentCounter::new(plan, census, index, huge_page_size);
    let walks: Vec<SubjectWalk> =
        (0..census.subjects.len()).into_par_iter().map(|subject| counter.walk_subject(subject)).collect();
    let (equal_pages, zero_pages) = (counter.equal_pages(), counter.zero_pages(&walks));
    let subject_of_target = |id| census.subjects.iter().position(|subject| subject.process.id == id);
    for target in &mut plan.targets {
        let Some(walk) = subject_of_target(target.process.id).map(|subject| &walks[subject]) else { continue };
        for (range, counts) in target.ranges.iter_mut().zip(&walk.ranges) {
            (range.pages, range.zero) = (counts.pages, counts.zero);
            range.split_huge_pages = counts.split_huge_pages;
        }
    }
    let ranges =
        plan.targets.iter().flat_map(|target| target.ranges.iter().map(|range| (target.process.id, range.range)));
    let mut shared_huge_pages: BTreeMap<Vec<u32>, u64> = BTreeMap::new();
    for (_, ranges) in walks.into_iter().flat_map(|walk| walk.shared_huge_pages) {
        *shared_huge_pages.entry(ranges).or_default() += 1;
    }
    PlanContents {
        sharing: census.sharing,
        page_size,
        ranges: ranges.collect(),
        equal_pages,
        zero_pages,
        shared_huge_pages,
    }
}

/// Pages that KSM keeps apart from all others: the number of their trust domain and NUMA node, 0 where it does not
/// matter.
type MergeClass = (u32, u8);

/// A plan beside the census that it was made from.
struct ContentCounter<'a> {
    census: &'a Census,
    index: &'a PageIndex,
    huge_page_size: PageSize,
    is_whole: bool,
    /// The number of each subject's trust domain.
    domains: Vec<u32>,
    /// The planned ranges of each subject, and the position of its first one among all ranges of the plan.
    planned: Vec<(u32, Vec<PlannedRange>)>,
}

/// What one walk over the pages of a process counts.
#[derive(Default)]
struct SubjectWalk {
    ranges: Vec<RangePages>,
    /// Zero pages, by the position of their range.
    zero_pages: BTreeMap<(MergeClass, u32), u64>,
    /// Huge pages that several ranges split, and the positions of these ranges.
    shared_huge_pages: Vec<(u64, Vec<u32>)>,
}

/// The pages of a range.
#[derive(Clone, Copy, Default)]
struct RangePages {
    pages: Pages,
    zero: Pages,
    split_huge_pages: Pages,
}

impl SubjectWalk {
    /// Add a huge page that a range splits, after the last one that any range splits.
    fn add_split(&mut self, huge_page: u64, range: u32, last: Option<(u64, u32)>) {
        let Some((_, before)) = last.filter(|(last, _)| *last == huge_page) else { return };
        match self.shared_huge_pages.last_mut() {
            Some((last_shared, ranges)) if *last_shared == huge_page => ranges.push(range),
            _ => self.shared_huge_pages.push((huge_page, vec![before, range])),
        }
    }
}

impl<'a> ContentCounter<'a> {
    fn new(plan: &MergePlan, census: &'a Census, index: &'a PageIndex, huge_page_size: PageSize) -> Self {
        let mut first = 0;
        let mut by_process = BTreeMap::new();
        for target in &plan.targets {
            by_process.insert(target.process.id, (first, target.ranges.clone()));
            first += target.ranges.len() as u32;
        }
        let planned = census.subjects.iter().map(|subject| by_process.remove(&subject.process.id).unwrap_or_default());
        Self {
            census,
            index,
            huge_page_size,
            is_whole: plan.whole_processes,
            domains: content_groups::domain_numbers(census.subjects.iter().map(|subject| &subject.domain)),
            planned: planned.collect(),
        }
    }

    /// The class of the pages of a domain on a node.
    fn merge_class(&self, domain: u32, ordinal: u32) -> MergeClass {
        let keeps_domains_apart = self.is_whole && !self.census.across_domains;
        let node = if self.census.sharing.across_nodes { 0 } else { self.index.node(ordinal) };
        (if keeps_domains_apart { domain } else { 0 }, node)
    }

    /// Whether the plan enrolls a page with this mark to merge it.
    fn is_selected(&self, mark: PageMark) -> bool {
        self.is_whole || mark.is_covered()
    }

    /// Whether a page with this mark should merge beside all other pages of the census.
    fn has_partner(&self, mark: PageMark) -> bool {
        let merges = |class| match class {
            PageClass::DuplicateAcrossDomains => self.census.across_domains,
            class => class.is_mergeable(),
        };
        self.is_selected(mark) && (self.is_whole || !mark.is_forbidden()) && mark.class().is_some_and(merges)
    }

    /// The position of the planned range that contains a page.
    fn range_position(&self, subject: usize, address: u64) -> Option<u32> {
        let (first, ranges) = &self.planned[subject];
        let position = ranges.partition_point(|range| range.range.end <= address);
        ranges.get(position).is_some_and(|range| range.range.start <= address).then_some(first + position as u32)
    }

    /// Count the pages of a subject's ranges. Ranges that are still those of the census keep its counts, unless several
    /// may split one huge page, which the census counts once; the pages are then visited only for zero pages.
    fn walk_subject(&self, subject: usize) -> SubjectWalk {
        let (first, planned) = &self.planned[subject];
        let counts = |range: &PlannedRange| RangePages {
            pages: range.pages,
            zero: range.zero,
            split_huge_pages: range.split_huge_pages,
        };
        let mut walk = SubjectWalk { ranges: planned.iter().map(counts).collect(), ..SubjectWalk::default() };
        let is_counted = self.is_whole
            || self.may_share_huge_pages(planned)
            || !planned.iter().all(|range| self.is_of_census(subject, range.range));
        if !is_counted && planned.iter().all(|range| range.zero == Pages::ZERO) {
            return walk;
        }
        if is_counted {
            walk.ranges.fill(RangePages::default());
        }
        let mut last_split = None;
        for (run, ordinal, address) in each_page(self.index, &self.index.subject_ordinals(subject)) {
            let Some(position) = self.range_position(subject, address) else { continue };
            let range = &planned[(position - first) as usize];
            let counts = &mut walk.ranges[(position - first) as usize];
            let mark = self.index.mark(ordinal);
            let merges = self.has_partner(mark);
            let is_zero = merges && mark.class() == Some(PageClass::Zero);
            if is_counted {
                counts.pages.0 += u64::from(mark.class() != Some(PageClass::Merged) && mark != PageMark::NOT_RESIDENT);
                counts.zero.0 += u64::from(is_zero);
                let huge_page = address / self.huge_page_size.bytes();
                let is_split = run.huge && (merges || self.is_boundary(range, address));
                if is_split && last_split != Some((huge_page, position)) {
                    counts.split_huge_pages.0 += 1;
                    walk.add_split(huge_page, position, last_split);
                    last_split = Some((huge_page, position));
                }
            }
            if is_zero {
                let class = self.merge_class(self.domains[subject], ordinal);
                *walk.zero_pages.entry((class, position)).or_default() += 1;
            }
        }
        walk
    }

    /// Whether the ranges of a process split huge pages, and two of them have pages of one huge page.
    fn may_share_huge_pages(&self, planned: &[PlannedRange]) -> bool {
        let huge_page = |address: u64| address / self.huge_page_size.bytes();
        let is_shared = |pair: &[PlannedRange]| huge_page(pair[0].range.end - 1) == huge_page(pair[1].range.start);
        planned.iter().any(|range| range.split_huge_pages > Pages::ZERO) && planned.windows(2).any(is_shared)
    }

    /// Whether the census selected exactly this range.
    fn is_of_census(&self, subject: usize, range: AddressRange) -> bool {
        let key = |range: &GuidedRange| (range.subject, range.range);
        self.census.ranges.binary_search_by_key(&(subject, range), key).is_ok()
    }

    /// Whether a range begins or ends at a page, inside a huge page.
    fn is_boundary(&self, planned: &PlannedRange, address: u64) -> bool {
        let (range, end) = (planned.range, address + self.index.page_bytes());
        let is_inside = |at: u64| !planned.enrolled && !at.is_multiple_of(self.huge_page_size.bytes());
        address == range.start && is_inside(address) || end == range.end && is_inside(end)
    }

    /// The equal pages of the plan, without those that can merge with no other page.
    fn equal_pages(&self) -> Vec<(EqualPages, u64)> {
        let counters =
            content_groups::fold_groups(self.index, &self.domains, |counter: &mut EqualPagesCounter, _, members| {
                let class = |member: &GroupPage| self.merge_class(member.domain, member.ordinal);
                if members.iter().all(|member| class(member) == class(&members[0])) {
                    return counter.add(self, members.iter(), members);
                }
                let mut by_class: BTreeMap<MergeClass, Vec<&GroupPage>> = BTreeMap::new();
                members.iter().for_each(|member| by_class.entry(class(member)).or_default().push(member));
                by_class.into_values().for_each(|class_members| counter.add(self, class_members.into_iter(), members));
            });
        let mut contents_by_pages: HashMap<EqualPages, u64> = HashMap::new();
        for (equal, contents) in counters.into_iter().flat_map(|counter| counter.contents) {
            *contents_by_pages.entry(equal).or_default() += contents;
        }
        let mut all: Vec<(EqualPages, u64)> = contents_by_pages.into_iter().collect();
        all.sort_unstable();
        all
    }

    /// The zero pages of the plan, which are in no group of the index.
    fn zero_pages(&self, walks: &[SubjectWalk]) -> Vec<ZeroPages> {
        let mut by_class: BTreeMap<MergeClass, ZeroPages> = BTreeMap::new();
        for (&(class, range), pages) in walks.iter().flat_map(|walk| &walk.zero_pages) {
            *by_class.entry(class).or_default().own_frames.entry(range).or_default() += pages;
        }
        if by_class.is_empty() {
            return Vec::new();
        }
        let is_zero = |ordinal: u32| self.index.mark(ordinal).class() == Some(PageClass::Zero);
        let repeated = self.index.repeated_frames().par_iter();
        let mut shared: Vec<(u32, u32)> = repeated
            .filter(|&&(page, first)| is_zero(page) || is_zero(first))
            .map(|&(page, first)| (first, page))
            .collect();
        shared.par_sort_unstable();
        for frame in shared.chunk_by(|a, b| a.0 == b.0) {
            let pages = || [frame[0].0].into_iter().chain(frame.iter().map(|&(_, page)| page));
            let mut planned: BTreeMap<MergeClass, Vec<u32>> = BTreeMap::new();
            for (class, range) in pages().filter_map(|page| self.planned_zero_page(page)) {
                planned.entry(class).or_default().push(range);
            }
            for (class, mut ranges) in planned {
                let zeros = by_class.entry(class).or_default();
                for range in &ranges {
                    zeros.own_frames.entry(*range).and_modify(|frames| *frames -= 1);
                }
                ranges.sort_unstable();
                if ranges.len() < pages().count() {
                    ranges.push(OUTSIDE_PLAN);
                }
                *zeros.shared_frames.entry(ranges).or_default() += 1;
            }
        }
        by_class.into_values().collect()
    }

    /// The class and the position of the range of a zero page that the plan merges.
    fn planned_zero_page(&self, ordinal: u32) -> Option<(MergeClass, u32)> {
        let mark = self.index.mark(ordinal);
        let (subject, _, address) = self.index.locate(ordinal)?;
        let merges = self.has_partner(mark) && mark.class() == Some(PageClass::Zero);
        let position = self.range_position(subject, address).filter(|_| merges)?;
        Some((self.merge_class(self.domains[subject], ordinal), position))
    }

    /// The position of the planned range that contains a page, if the plan merges it.
    fn planned_position(&self, member: &GroupPage) -> Option<u32> {
        let is_selected = !member.merged && self.is_selected(self.index.mark(member.ordinal));
        let (.., address) = self.index.locate(member.ordinal).filter(|_| is_selected)?;
        self.range_position(member.subject, address)
    }
}

/// Counts contents by the ranges of their pages.
#[derive(Default)]
struct EqualPagesCounter {
    contents: HashMap<EqualPages, u64>,
    /// The first page of the frame and the range of each page of a group.
    pages: Vec<(u32, u32)>,
    key: Vec<u32>,
}

impl EqualPagesCounter {
    /// Add the equal pages that KSM may merge with one another: some or all pages of a group.
    fn add<'m>(
        &mut self,
        counter: &ContentCounter<'_>,
        members: impl Iterator<Item = &'m GroupPage>,
        group: &[GroupPage],
    ) {
        self.pages.clear();
        let mut merged = 0;
        for member in members {
            merged += u32::from(member.merged);
            if let Some(position) = counter.planned_position(member) {
                self.pages.push((member.first_page_of_frame, position));
            }
        }
        let Some(&(frame, _)) = self.pages.first() else { return };
        if merged == 0 && self.pages.iter().all(|&(other, _)| other == frame) {
            return;
        }
        self.add_pages_elsewhere(group);
        self.set_key(merged);
        match self.contents.get_mut(&self.key[..]) {
            Some(contents) => *contents += 1,
            None => {
                self.contents.insert(EqualPages(self.key.as_slice().into()), 1);
            }
        }
    }

    /// Add a page outside of the plan for each frame that has one: the group has more pages of the frame than were
    /// collected.
    fn add_pages_elsewhere(&mut self, group: &[GroupPage]) {
        if group.iter().all(|member| member.first_page_of_frame == member.ordinal) {
            return;
        }
        self.pages.sort_unstable();
        let mut frames: Vec<u32> = group.iter().map(|member| member.first_page_of_frame).collect();
        frames.sort_unstable();
        let has_page_elsewhere = |frame_pages: &&[(u32, u32)]| {
            let start = frames.partition_point(|&frame| frame < frame_pages[0].0);
            let end = frames.partition_point(|&frame| frame <= frame_pages[0].0);
            frame_pages.len() < end - start
        };
        let shared = self.pages.chunk_by(|a, b| a.0 == b.0).filter(has_page_elsewhere);
        let elsewhere: Vec<(u32, u32)> = shared.map(|frame_pages| (frame_pages[0].0, OUTSIDE_PLAN)).collect();
        self.pages.extend(elsewhere);
    }

    /// Describe the collected pages: frames in the order of their ranges.
    fn set_key(&mut self, merged: u32) {
        self.pages.sort_unstable();
        self.key.clear();
        self.key.push(merged);
        let mut frames: Vec<&[(u32, u32)]> = self.pages.chunk_by(|a, b| a.0 == b.0).collect();
        frames.sort_by(|a, b| a.iter().map(|page| page.1).cmp(b.iter().map(|page| page.1)));
        for frame in frames {
            self.key.extend(frame.iter().enumerate().map(|(at, &(_, range))| range << 1 | u32::from(at > 0)));
        }
    }
}
