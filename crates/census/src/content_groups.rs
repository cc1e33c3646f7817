//! Groups of equal pages: sort the fingerprints, and one walk over them classifies every page.

use crate::duplicate_filter::{self, DuplicateFilter};
use crate::foreign_processes::ForeignContents;
use crate::index::{IndexEntry, PageIndex, PageMark};
use crate::scan_scope::ScanScope;
use pagefold_base::domain::TrustDomain;
use pagefold_base::savings::SharingSettings;
use pagefold_base::{Fingerprint, PageClass, Pages};
use rayon::prelude::*;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

/// A content that several pages have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ContentGroup {
    /// Pages that have it, those merged already included.
    pub pages: u64,
    /// The part of them that is merged already.
    pub merged: u64,
    /// Processes that have it.
    pub processes: u32,
    /// Trust domains that have it.
    pub domains: u32,
    /// Its fingerprint in this census.
    pub fingerprint: Fingerprint,
    /// Where the group begins among the sorted entries.
    pub(crate) first_entry: usize,
}

/// What the groups say together.
#[derive(Clone, Debug, Default)]
pub struct GroupSummary {
    /// Different contents other than zero, of pages that hold still.
    pub distinct_contents: u64,
    /// How many contents were seen on how many pages that are not merged.
    pub contents_by_page_count: BTreeMap<u64, u64>,
    /// Frames that come back if all pages are merged, pages of zeros apart.
    pub freed_frames: Pages,
    /// The same if pages are merged within their trust domains only.
    pub freed_frames_within_domains: Pages,
    /// Pages of zeros that KSM merged with one another, by the number of their trust domain.
    pub merged_zero_pages: BTreeMap<u32, u64>,
    /// The most frequent contents, most frequent first.
    pub top_contents: Vec<ContentGroup>,
}

/// A page of a group.
#[derive(Clone, Copy)]
pub struct GroupPage {
    /// Which page.
    pub ordinal: u32,
    /// Position of its subject in the survey.
    pub subject: usize,
    /// The first page that has its frame: itself, unless processes share it since a fork.
    pub first_page_of_frame: u32,
    /// Number of its trust domain.
    pub domain: u32,
    /// Whether KSM merged it.
    pub merged: bool,
}

/// What pages of equal content may do.
#[derive(Clone, Copy, Debug)]
pub struct MergeRule {
    /// KSM's settings.
    pub sharing: SharingSettings,
    /// Whether pages of different trust domains may be merged by a guided enrolment.
    pub across_domains: bool,
}

/// Numbers for the trust domains of the subjects: equal ones are side by side in a survey.
pub fn domain_numbers<'a>(domains: impl Iterator<Item = &'a TrustDomain>) -> Vec<u32> {
    let mut number = 0;
    let mut last: Option<&TrustDomain> = None;
    domains
        .map(|domain| {
            number += u32::from(last.is_some_and(|last| last != domain));
            last = Some(domain);
            number
        })
        .collect()
}

/// Walk over the groups in parallel, with the number of each subject's trust domain. `visit` gets the sorted members of
/// each group of two or more and where it begins.
pub fn fold_groups<T, F>(index: &PageIndex, domains: &[u32], visit: F) -> Vec<T>
where
    T: Default + Send,
    F: Fn(&mut T, usize, &[GroupPage]) + Sync,
{
    let base = index.entries.as_ptr().addr();
    let first = |group: &[IndexEntry]| (group.as_ptr().addr() - base) / size_of::<IndexEntry>();
    index.entries[..index.candidate_count]
        .par_chunk_by(|a, b| a.fingerprint() == b.fingerprint())
        .fold(
            || (T::default(), Vec::new()),
            |(mut sum, mut members), group| {
                if group.len() > 1 {
                    members.clear();
                    members.extend(group.iter().map(|entry| {
                        let subject = index.subject_of_page(entry.ordinal);
                        GroupPage {
                            ordinal: entry.ordinal,
                            subject,
                            first_page_of_frame: index.first_page_of_frame(entry.ordinal),
                            domain: domains[subject],
                            merged: index.mark(entry.ordinal).class() == Some(PageClass::Merged),
                        }
                    }));
                    visit(&mut sum, first(group), &members);
                }
                (sum, members)
            },
        )
        .map(|(sum, _)| sum)
        .collect()
}

/// Frames that come back when the members that `joins` picks are merged; members of different nodes stay apart where
/// the sharing says so.
pub fn freed_frames(
    index: &PageIndex,
    sharing: SharingSettings,
    pages: &[GroupPage],
    is_included: impl Fn(&GroupPage) -> bool,
) -> Pages {
    let count = |on_node: &dyn Fn(&GroupPage) -> bool| {
        let copies = || pages.iter().filter(|member| !member.merged && is_included(member) && on_node(member));
        let merged = pages.iter().filter(|member| member.merged && on_node(member)).count();
        sharing.freed_frames(count_frames(copies()), copies().count() as u64, merged as u64)
    };
    if sharing.across_nodes {
        return count(&|_| true);
    }
    let mut nodes: Vec<u8> = pages.iter().map(|member| index.node(member.ordinal)).collect();
    nodes.sort_unstable();
    nodes.dedup();
    nodes.into_iter().map(|node| count(&|member| index.node(member.ordinal) == node)).sum()
}

/// How many frames the pages are.
fn count_frames<'a>(pages: impl Iterator<Item = &'a GroupPage> + Clone) -> u64 {
    if pages.clone().all(|member| member.first_page_of_frame == member.ordinal) {
        return pages.count() as u64;
    }
    let mut frames: Vec<u32> = pages.map(|member| member.first_page_of_frame).collect();
    frames.sort_unstable();
    frames.dedup();
    frames.len() as u64
}

#[derive(Default)]
struct PartialSummary {
    summary: GroupSummary,
    /// Pages in groups that were visited, and those of them that stay unique.
    grouped_pages: u64,
    unique_pages: u64,
    top_contents: BinaryHeap<Reverse<ContentGroup>>,
}

/// Group the index by content and classify every page that was read. `pairs` is of the first pass. What is `elsewhere`
/// is not counted, but forbids.
pub fn classify_pages(
    index: &mut PageIndex,
    scope: &ScanScope,
    duplicates: &DuplicateFilter,
    rule: MergeRule,
    foreign_contents: &ForeignContents,
    max_top_contents: usize,
) -> GroupSummary {
    let mut entries = std::mem::take(&mut index.entries);
    entries.retain(|entry| duplicate_filter::can_be_grouped(index, entry));
    // Only what may have a partner is sorted. Asked in parallel, because each answer is a cache miss.
    let may_pair: Vec<bool> =
        entries.par_iter().map(|entry| duplicates.may_have_duplicate(entry.fingerprint())).collect();
    let paired = move_wanted_first(&mut entries, &may_pair);
    drop(may_pair);
    entries[..paired].par_sort_unstable();
    index.entries = entries;
    index.candidate_count = paired;
    let index = &*index;
    let (domains, witnesses) = (scope.domain_numbers(), scope.foreign_flags());

    let taken = ForeignHoldings { is_foreign: &witnesses, contents: foreign_contents };
    let partials: Vec<PartialSummary> = fold_groups(index, &domains, |partial: &mut PartialSummary, start, members| {
        partial.add_group(index, rule, taken, max_top_contents, start, members);
    });
    let mut groups = GroupSummary { merged_zero_pages: count_merged_zeros(index, &domains), ..GroupSummary::default() };
    let mut best = Vec::new();
    let (mut paired, mut unique) = (0, 0);
    for partial in partials {
        groups.freed_frames += partial.summary.freed_frames;
        groups.freed_frames_within_domains += partial.summary.freed_frames_within_domains;
        groups.distinct_contents += partial.summary.distinct_contents;
        for (times, contents) in partial.summary.contents_by_page_count {
            *groups.contents_by_page_count.entry(times).or_default() += contents;
        }
        paired += partial.grouped_pages;
        unique += partial.unique_pages;
        best.extend(partial.top_contents.into_iter().map(|Reverse(content)| content));
    }
    best.sort_unstable_by_key(|&content| Reverse(content));
    best.truncate(max_top_contents);
    groups.top_contents = best;
    // Contents of one page: merged ones with all their other mappings elsewhere, and unique ones.
    let alone = index.entries.len() as u64 - paired;
    groups.distinct_contents += alone;
    let merged_alone = alone.saturating_sub(count_unique_pages(index) - unique);
    *groups.contents_by_page_count.entry(1).or_default() += alone - merged_alone;
    groups.contents_by_page_count.retain(|_, contents| *contents > 0);
    // With `use_zero_pages` zeros are mapped to the kernel's zero page, which everybody maps anyway.
    if !rule.across_domains && !rule.sharing.use_zero_pages {
        let merged = groups
            .merged_zero_pages
            .keys()
            .copied()
            .chain(foreign_contents.find_domain(Fingerprint::ZERO_PAGE))
            .collect();
        forbid_zeros(index, &domains, &witnesses, merged);
    }
    if !rule.across_domains && !foreign_contents.is_empty() {
        forbid_ungrouped(index, &domains, foreign_contents);
    }
    groups
}

/// Put those that are `wanted` before the others, which stay in order. Tells how many.
fn move_wanted_first<T>(all: &mut [T], wanted: &[bool]) -> usize {
    let mut first = all.len();
    for at in (0..all.len()).rev().filter(|&at| !wanted[at]) {
        first -= 1;
        all.swap(at, first);
    }
    first
}

/// Forbid the pages that are in no group, but hold what another trust domain has: they may lie in a range that is
/// enrolled for others.
fn forbid_ungrouped(index: &PageIndex, domains: &[u32], foreign_contents: &ForeignContents) {
    // What is only remembered is in no range.
    let is_single = |entry: &&IndexEntry| index.mark(entry.ordinal) == PageMark::from_class(PageClass::Unique);
    index.entries.par_iter().filter(is_single).for_each(|entry| {
        let holder = foreign_contents.find_domain(entry.fingerprint());
        if holder.is_some_and(|holder| holder != domains[index.subject_of_page(entry.ordinal)]) {
            let counts = index.first_page_of_frame(entry.ordinal) == entry.ordinal;
            index.set_mark(entry.ordinal, PageMark::duplicate(PageClass::DuplicateForeign, 1, counts).with_forbidden());
        }
    });
}

/// Pages of zeros that KSM merged with one another, by trust domain.
fn count_merged_zeros(index: &PageIndex, domains: &[u32]) -> BTreeMap<u32, u64> {
    // Unmerged ones are not among the entries, and no fingerprint is less.
    let paired =
        index.entries[..index.candidate_count].iter().take_while(|entry| entry.fingerprint() == Fingerprint::ZERO_PAGE);
    let alone =
        index.entries[index.candidate_count..].iter().filter(|entry| entry.fingerprint() == Fingerprint::ZERO_PAGE);
    let mut pages = BTreeMap::new();
    for entry in paired.chain(alone) {
        *pages.entry(domains[index.subject_of_page(entry.ordinal)]).or_default() += 1;
    }
    pages
}

/// Forbid the pages of zeros of all trust domains but one: the one that has merged some already, or of which a witness
/// has any enrolled, or else has the most. Of all, if several have them so.
fn forbid_zeros(index: &PageIndex, domains: &[u32], is_foreign: &[bool], mut merging_domains: BTreeSet<u32>) {
    let zeros = |subject: usize| {
        index
            .subject_ordinals(subject)
            .into_par_iter()
            .filter(|&page| index.mark(page).class() == Some(PageClass::Zero))
    };
    let mut pages: BTreeMap<u32, u64> = BTreeMap::new();
    for (subject, &domain) in domains.iter().enumerate() {
        let count = zeros(subject).count() as u64;
        *pages.entry(domain).or_default() += count;
        if is_foreign[subject] && count > 0 {
            merging_domains.insert(domain);
        }
    }
    let most = || pages.iter().max_by_key(|&(domain, pages)| (pages, Reverse(domain))).map(|(&domain, _)| domain);
    let chosen = match merging_domains.len() {
        0 => most(),
        1 => merging_domains.first().copied(),
        _ => None,
    };
    for (subject, _) in domains.iter().enumerate().filter(|&(_, &domain)| Some(domain) != chosen) {
        zeros(subject).for_each(|page| index.set_mark(page, index.mark(page).with_forbidden()));
    }
}

/// By whom contents are taken that nothing is merged of.
#[derive(Clone, Copy)]
struct ForeignHoldings<'a> {
    /// Whether each subject is a witness.
    is_foreign: &'a [bool],
    /// Those that were not read.
    contents: &'a ForeignContents,
}

/// The one trust domain in which a content may be merged: the one that has it merged already, or enrolled by a witness,
/// or else the one in which that frees most. None if several have it so.
fn choose_merge_domain(
    index: &PageIndex,
    sharing: SharingSettings,
    foreign: ForeignHoldings<'_>,
    content: Fingerprint,
    pages: &[GroupPage],
) -> Option<u32> {
    let mut best: Option<(Pages, u32)> = None;
    let mut takers: BTreeSet<u32> = foreign.contents.find_domain(content).into_iter().collect();
    for domain in pages.chunk_by(|a, b| a.domain == b.domain) {
        let number = domain[0].domain;
        if domain.iter().any(|member| member.merged || foreign.is_foreign[member.subject]) {
            takers.insert(number);
        }
        let freed = freed_frames(index, sharing, domain, |_| true);
        if best.is_none_or(|(most, _)| freed > most) {
            best = Some((freed, number));
        }
    }
    match takers.len() {
        0 => best.map(|(_, number)| number),
        1 => takers.first().copied(),
        _ => None,
    }
}

/// Pages that are unique after all groups were classified.
fn count_unique_pages(index: &PageIndex) -> u64 {
    index.entries.par_iter().filter(|entry| index.mark(entry.ordinal).class() == Some(PageClass::Unique)).count() as u64
}

impl PartialSummary {
    fn add_group(
        &mut self,
        index: &PageIndex,
        rule: MergeRule,
        foreign: ForeignHoldings<'_>,
        max_top_contents: usize,
        first_entry: usize,
        pages: &[GroupPage],
    ) {
        let MergeRule { sharing, across_domains } = rule;
        self.grouped_pages += pages.len() as u64;
        let fingerprint = index.entries[first_entry].fingerprint();
        let merged = pages.iter().filter(|member| member.merged).count();
        if fingerprint == Fingerprint::ZERO_PAGE {
            return;
        }
        self.summary.distinct_contents += 1;
        if merged == 0 && count_frames(pages.iter()) == 1 {
            // One page that processes share since a fork. In a sample each of its mappings stands for itself.
            self.unique_pages += pages.len() as u64;
            *self.summary.contents_by_page_count.entry(1).or_default() += pages.len() as u64;
            return;
        }
        let copies = pages.len() - merged;
        if copies > 0 {
            *self.summary.contents_by_page_count.entry(copies as u64).or_default() += 1;
        }
        self.summary.freed_frames += freed_frames(index, sharing, pages, |_| true);
        // Those that may be merged with one another.
        let joining = |members: &[GroupPage]| {
            let merged = members.iter().filter(|member| member.merged).count();
            count_frames(members.iter().filter(|member| !member.merged)) as usize + merged
        };
        let several = pages.first().map(|first| first.domain) != pages.last().map(|last| last.domain)
            || foreign.contents.find_domain(fingerprint).is_some();
        let chosen = if across_domains || !several {
            None
        } else {
            Some(choose_merge_domain(index, sharing, foreign, fingerprint, pages))
        };
        let kept = if merged > 0 { None } else { pages.first().map(|member| member.first_page_of_frame) };
        let shared = pages.iter().any(|member| member.first_page_of_frame != member.ordinal);
        let mut counted = BTreeSet::new();
        let mut processes = 0;
        let mut domains = 0;
        for domain in pages.chunk_by(|a, b| a.domain == b.domain) {
            domains += 1;
            let copies = joining(if across_domains { pages } else { domain });
            let elsewhere = chosen.is_some_and(|chosen| chosen != Some(domain[0].domain));
            self.summary.freed_frames_within_domains += freed_frames(index, sharing, domain, |_| true);
            for process in domain.chunk_by(|a, b| a.subject == b.subject) {
                processes += 1;
                let class = match (count_frames(process.iter()), count_frames(domain.iter())) {
                    (2.., _) => PageClass::DuplicateWithin,
                    (_, 2..) => PageClass::DuplicateAcross,
                    _ => PageClass::DuplicateForeign,
                };
                let forbidden = elsewhere || foreign.is_foreign[process[0].subject];
                for member in process.iter().filter(|member| !member.merged) {
                    // Of a frame with several mappings, the first stands for it.
                    let counts = Some(member.first_page_of_frame) != kept
                        && (!shared || counted.insert(member.first_page_of_frame));
                    let mark = PageMark::duplicate(class, copies, counts);
                    index.set_mark(member.ordinal, if forbidden { mark.with_forbidden() } else { mark });
                }
            }
        }
        let (pages, merged) = (pages.len() as u64, merged as u64);
        self.top_contents.push(Reverse(ContentGroup { pages, merged, processes, domains, fingerprint, first_entry }));
        if self.top_contents.len() > max_top_contents {
            self.top_contents.pop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn unwanted_items_keep_their_order(wanted in prop::collection::vec(any::<bool>(), 0..200)) {
            let mut all: Vec<usize> = (0..wanted.len()).collect();
            let count = move_wanted_first(&mut all, &wanted);
            let of = |is: bool| (0..wanted.len()).filter(|&at| wanted[at] == is).collect::<Vec<_>>();
            all[..count].sort_unstable();
            prop_assert_eq!(&all[..count], of(true));
            prop_assert_eq!(&all[count..], of(false));
        }
    }
}
