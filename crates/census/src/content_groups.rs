//! Groups of equal pages. The fingerprints are sorted, and one walk over them classifies every page.

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
    /// Pages with this content, including merged ones.
    pub pages: u64,
    /// Pages with this content that are merged already.
    pub merged: u64,
    /// Processes with this content.
    pub processes: u32,
    /// Trust domains with this content.
    pub domains: u32,
    /// Its fingerprint in this census.
    pub fingerprint: Fingerprint,
    /// Position of the group's first entry among the sorted entries.
    pub(crate) first_entry: usize,
}

/// Totals over all groups.
#[derive(Clone, Debug, Default)]
pub struct GroupSummary {
    /// Distinct contents, without the zero page and volatile pages.
    pub distinct_contents: u64,
    /// Number of contents (value) by their number of pages that are not merged (key).
    pub contents_by_page_count: BTreeMap<u64, u64>,
    /// Frames freed if all pages are merged, without zero pages.
    pub freed_frames: Pages,
    /// Frames freed if pages are merged only within their trust domains, without zero pages.
    pub freed_frames_within_domains: Pages,
    /// Zero pages that KSM has merged with one another, by the number of their trust domain.
    pub merged_zero_pages: BTreeMap<u32, u64>,
    /// The most frequent contents, most frequent first.
    pub top_contents: Vec<ContentGroup>,
}

/// A page of a group.
#[derive(Clone, Copy)]
pub struct GroupPage {
    /// Ordinal of the page.
    pub ordinal: u32,
    /// Position of its subject in the scan scope.
    pub subject: usize,
    /// The first page with the same frame: the page itself, unless processes share the frame since a fork.
    pub first_page_of_frame: u32,
    /// Number of its trust domain.
    pub domain: u32,
    /// Whether KSM merged it.
    pub merged: bool,
}

/// Which pages of equal content may be merged.
#[derive(Clone, Copy, Debug)]
pub struct MergeRule {
    /// KSM's settings.
    pub sharing: SharingSettings,
    /// Whether a guided enrollment may merge pages of different trust domains.
    pub across_domains: bool,
}

/// Numbers the trust domains of the subjects. Subjects of one domain must be adjacent, as in a scan scope.
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

/// Walks over the groups in parallel. `domains` holds the number of each subject's trust domain. `visit` gets the
/// position of the group's first entry and its sorted members. Only groups of two or more pages are visited.
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

/// Frames freed when the members that `is_included` selects are merged. Members on different NUMA nodes are not merged
/// if `sharing` keeps nodes apart.
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

/// The number of distinct frames of the pages.
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
    /// Pages in visited groups (`grouped_pages`), and those of them that stay unique (`unique_pages`).
    grouped_pages: u64,
    unique_pages: u64,
    top_contents: BinaryHeap<Reverse<ContentGroup>>,
}

/// Groups the index by content and classifies every page that was read. `duplicates` comes from the first pass.
/// `foreign_contents` is not counted, but pages with these contents in other domains become forbidden.
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
    // Only entries that may have a duplicate are sorted. The filter is queried in parallel because each query is a
    // cache miss.
    let is_candidate: Vec<bool> =
        entries.par_iter().map(|entry| duplicates.may_have_duplicate(entry.fingerprint())).collect();
    let candidate_count = move_wanted_first(&mut entries, &is_candidate);
    drop(is_candidate);
    entries[..candidate_count].par_sort_unstable();
    index.entries = entries;
    index.candidate_count = candidate_count;
    let index = &*index;
    let (domains, is_foreign) = (scope.domain_numbers(), scope.foreign_flags());

    let foreign = ForeignHoldings { is_foreign: &is_foreign, contents: foreign_contents };
    let partials: Vec<PartialSummary> = fold_groups(index, &domains, |partial: &mut PartialSummary, start, members| {
        partial.add_group(index, rule, foreign, max_top_contents, start, members);
    });
    let mut groups = GroupSummary { merged_zero_pages: count_merged_zeros(index, &domains), ..GroupSummary::default() };
    let mut top_contents = Vec::new();
    let (mut grouped, mut unique) = (0, 0);
    for partial in partials {
        groups.freed_frames += partial.summary.freed_frames;
        groups.freed_frames_within_domains += partial.summary.freed_frames_within_domains;
        groups.distinct_contents += partial.summary.distinct_contents;
        for (page_count, contents) in partial.summary.contents_by_page_count {
            *groups.contents_by_page_count.entry(page_count).or_default() += contents;
        }
        grouped += partial.grouped_pages;
        unique += partial.unique_pages;
        top_contents.extend(partial.top_contents.into_iter().map(|Reverse(content)| content));
    }
    top_contents.sort_unstable_by_key(|&content| Reverse(content));
    top_contents.truncate(max_top_contents);
    groups.top_contents = top_contents;
    // Contents of a single page: unique ones, and merged ones whose other mappings are outside the scope.
    let single_pages = index.entries.len() as u64 - grouped;
    groups.distinct_contents += single_pages;
    let merged_single_pages = single_pages.saturating_sub(count_unique_pages(index) - unique);
    *groups.contents_by_page_count.entry(1).or_default() += single_pages - merged_single_pages;
    groups.contents_by_page_count.retain(|_, contents| *contents > 0);
    // With `use_zero_pages` zero pages are mapped to the kernel's zero page, which all processes map anyway.
    if !rule.across_domains && !rule.sharing.use_zero_pages {
        let merged = groups
            .merged_zero_pages
            .keys()
            .copied()
            .chain(foreign_contents.find_domain(Fingerprint::ZERO_PAGE))
            .collect();
        forbid_zeros(index, &domains, &is_foreign, merged);
    }
    if !rule.across_domains && !foreign_contents.is_empty() {
        forbid_ungrouped(index, &domains, foreign_contents);
    }
    groups
}

/// Moves the `wanted` items to the front. The others keep their order. Returns the number of wanted items.
fn move_wanted_first<T>(items: &mut [T], wanted: &[bool]) -> usize {
    let mut first = items.len();
    for i in (0..items.len()).rev().filter(|&i| !wanted[i]) {
        first -= 1;
        items.swap(i, first);
    }
    first
}

/// Forbids pages that are in no group but whose content another trust domain holds: they may lie in a range that is
/// enrolled for other pages.
fn forbid_ungrouped(index: &PageIndex, domains: &[u32], foreign_contents: &ForeignContents) {
    // Pages whose content is only cached are never covered.
    let is_single = |entry: &&IndexEntry| index.mark(entry.ordinal) == PageMark::from_class(PageClass::Unique);
    index.entries.par_iter().filter(is_single).for_each(|entry| {
        let domain = foreign_contents.find_domain(entry.fingerprint());
        if domain.is_some_and(|domain| domain != domains[index.subject_of_page(entry.ordinal)]) {
            let is_redundant = index.first_page_of_frame(entry.ordinal) == entry.ordinal;
            index.set_mark(
                entry.ordinal,
                PageMark::duplicate(PageClass::DuplicateAcrossDomains, 1, is_redundant).with_forbidden(),
            );
        }
    });
}

/// Counts the zero pages that KSM has merged with one another, by trust domain.
fn count_merged_zeros(index: &PageIndex, domains: &[u32]) -> BTreeMap<u32, u64> {
    // Unmerged zero pages are not among the entries, and the zero page has the lowest fingerprint.
    let candidates =
        index.entries[..index.candidate_count].iter().take_while(|entry| entry.fingerprint() == Fingerprint::ZERO_PAGE);
    let singles =
        index.entries[index.candidate_count..].iter().filter(|entry| entry.fingerprint() == Fingerprint::ZERO_PAGE);
    let mut pages = BTreeMap::new();
    for entry in candidates.chain(singles) {
        *pages.entry(domains[index.subject_of_page(entry.ordinal)]).or_default() += 1;
    }
    pages
}

/// Forbids the zero pages of all trust domains but one: the domain that has merged zero pages or whose foreign
/// processes have enrolled any, otherwise the domain with the most. If several domains have merged or enrolled zero
/// pages, the zero pages of all domains are forbidden.
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
    let largest_domain =
        || pages.iter().max_by_key(|&(domain, pages)| (pages, Reverse(domain))).map(|(&domain, _)| domain);
    let chosen = match merging_domains.len() {
        0 => largest_domain(),
        1 => merging_domains.first().copied(),
        _ => None,
    };
    for (subject, _) in domains.iter().enumerate().filter(|&(_, &domain)| Some(domain) != chosen) {
        zeros(subject).for_each(|page| index.set_mark(page, index.mark(page).with_forbidden()));
    }
}

/// The contents that foreign processes hold.
#[derive(Clone, Copy)]
struct ForeignHoldings<'a> {
    /// Whether each subject is a foreign process.
    is_foreign: &'a [bool],
    /// The contents of foreign processes that were not read in this census.
    contents: &'a ForeignContents,
}

/// The one trust domain in which a content may be merged: the domain that has merged it or whose foreign processes have
/// enrolled it, otherwise the domain in which merging frees most. `None` if several domains have merged or enrolled it.
fn choose_merge_domain(
    index: &PageIndex,
    sharing: SharingSettings,
    foreign: ForeignHoldings<'_>,
    content: Fingerprint,
    pages: &[GroupPage],
) -> Option<u32> {
    let mut best: Option<(Pages, u32)> = None;
    let mut merging_domains: BTreeSet<u32> = foreign.contents.find_domain(content).into_iter().collect();
    for domain in pages.chunk_by(|a, b| a.domain == b.domain) {
        let domain_number = domain[0].domain;
        if domain.iter().any(|member| member.merged || foreign.is_foreign[member.subject]) {
            merging_domains.insert(domain_number);
        }
        let freed = freed_frames(index, sharing, domain, |_| true);
        if best.is_none_or(|(max_freed, _)| freed > max_freed) {
            best = Some((freed, domain_number));
        }
    }
    match merging_domains.len() {
        0 => best.map(|(_, domain_number)| domain_number),
        1 => merging_domains.first().copied(),
        _ => None,
    }
}

/// The number of pages that are unique after all groups were classified.
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
            // One frame that processes share since a fork. In a sample each of its mappings counts as a page.
            self.unique_pages += pages.len() as u64;
            *self.summary.contents_by_page_count.entry(1).or_default() += pages.len() as u64;
            return;
        }
        let copies = pages.len() - merged;
        if copies > 0 {
            *self.summary.contents_by_page_count.entry(copies as u64).or_default() += 1;
        }
        self.summary.freed_frames += freed_frames(index, sharing, pages, |_| true);
        // The number of pages that can merge with one another.
        let count_copies = |members: &[GroupPage]| {
            let merged = members.iter().filter(|member| member.merged).count();
            count_frames(members.iter().filter(|member| !member.merged)) as usize + merged
        };
        let in_several_domains = pages.first().map(|first| first.domain) != pages.last().map(|last| last.domain)
            || foreign.contents.find_domain(fingerprint).is_some();
        let merge_domain = if across_domains || !in_several_domains {
            None
        } else {
            Some(choose_merge_domain(index, sharing, foreign, fingerprint, pages))
        };
        let kept_frame = if merged > 0 { None } else { pages.first().map(|member| member.first_page_of_frame) };
        let has_shared_frames = pages.iter().any(|member| member.first_page_of_frame != member.ordinal);
        let mut counted_frames = BTreeSet::new();
        let mut processes = 0;
        let mut domains = 0;
        for domain in pages.chunk_by(|a, b| a.domain == b.domain) {
            domains += 1;
            let copies = count_copies(if across_domains { pages } else { domain });
            let is_excluded = merge_domain.is_some_and(|merge_domain| merge_domain != Some(domain[0].domain));
            self.summary.freed_frames_within_domains += freed_frames(index, sharing, domain, |_| true);
            for process in domain.chunk_by(|a, b| a.subject == b.subject) {
                processes += 1;
                let class = match (count_frames(process.iter()), count_frames(domain.iter())) {
                    (2.., _) => PageClass::DuplicateWithinProcess,
                    (_, 2..) => PageClass::DuplicateWithinDomain,
                    _ => PageClass::DuplicateAcrossDomains,
                };
                let is_forbidden = is_excluded || foreign.is_foreign[process[0].subject];
                for member in process.iter().filter(|member| !member.merged) {
                    // A frame with several mappings is counted once, at its first mapping.
                    let is_redundant = Some(member.first_page_of_frame) != kept_frame
                        && (!has_shared_frames || counted_frames.insert(member.first_page_of_frame));
                    let mark = PageMark::duplicate(class, copies, is_redundant);
                    index.set_mark(member.ordinal, if is_forbidden { mark.with_forbidden() } else { mark });
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
            let mut items: Vec<usize> = (0..wanted.len()).collect();
            let count = move_wanted_first(&mut items, &wanted);
            let positions = |is: bool| (0..wanted.len()).filter(|&i| wanted[i] == is).collect::<Vec<_>>();
            items[..count].sort_unstable();
            prop_assert_eq!(&items[..count], positions(true));
            prop_assert_eq!(&items[count..], positions(false));
        }
    }
}
