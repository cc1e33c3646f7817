//! Groups of equal pages: sort the fingerprints, and one walk over them classifies every page.

use crate::index::{Entry, Index, Mark};
use crate::pairs::{self, Pairs};
use crate::survey::Survey;
use crate::witnesses::Elsewhere;
use pagefold_base::domain::Domain;
use pagefold_base::savings::Sharing;
use pagefold_base::{Fingerprint, PageClass, Pages};
use rayon::prelude::*;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

/// A content that several pages have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Content {
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
    pub(crate) start: usize,
}

/// What the groups say together.
#[derive(Clone, Debug, Default)]
pub struct Groups {
    /// Different contents other than zero, of pages that hold still.
    pub distinct: u64,
    /// How many contents were seen on how many pages that are not merged.
    pub seen: BTreeMap<u64, u64>,
    /// Frames that come back if all pages are merged, pages of zeros apart.
    pub freed: Pages,
    /// The same if pages are merged within their trust domains only.
    pub freed_within_domains: Pages,
    /// Pages of zeros that KSM merged with one another, by the number of their trust domain.
    pub merged_zero: BTreeMap<u32, u64>,
    /// The most frequent contents, most frequent first.
    pub top: Vec<Content>,
}

/// A page of a group.
#[derive(Clone, Copy)]
pub struct Member {
    /// Which page.
    pub ordinal: u32,
    /// Position of its subject in the survey.
    pub subject: usize,
    /// The first page that has its frame: itself, unless processes share it since a fork.
    pub frame: u32,
    /// Number of its trust domain.
    pub domain: u32,
    /// Whether KSM merged it.
    pub merged: bool,
}

/// What pages of equal content may do.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// KSM's settings.
    pub sharing: Sharing,
    /// Whether pages of different trust domains may be merged by a guided enrolment.
    pub across_domains: bool,
}

/// Numbers for the trust domains of the subjects: equal ones are side by side in a survey.
pub fn domain_numbers<'a>(domains: impl Iterator<Item = &'a Domain>) -> Vec<u32> {
    let mut number = 0;
    let mut last: Option<&Domain> = None;
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
pub fn walk<T, F>(index: &Index, domains: &[u32], visit: F) -> Vec<T>
where
    T: Default + Send,
    F: Fn(&mut T, usize, &[Member]) + Sync,
{
    let base = index.entries.as_ptr().addr();
    let first = |group: &[Entry]| (group.as_ptr().addr() - base) / size_of::<Entry>();
    index.entries[..index.paired]
        .par_chunk_by(|a, b| a.fingerprint() == b.fingerprint())
        .fold(
            || (T::default(), Vec::new()),
            |(mut sum, mut members), group| {
                if group.len() > 1 {
                    members.clear();
                    members.extend(group.iter().map(|entry| {
                        let subject = index.subject(entry.ordinal);
                        Member {
                            ordinal: entry.ordinal,
                            subject,
                            frame: index.frame(entry.ordinal),
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
pub fn freed(index: &Index, sharing: Sharing, members: &[Member], joins: impl Fn(&Member) -> bool) -> Pages {
    let count = |on_node: &dyn Fn(&Member) -> bool| {
        let copies = || members.iter().filter(|member| !member.merged && joins(member) && on_node(member));
        let merged = members.iter().filter(|member| member.merged && on_node(member)).count();
        sharing.freed_frames(frames(copies()), copies().count() as u64, merged as u64)
    };
    if sharing.across_nodes {
        return count(&|_| true);
    }
    let mut nodes: Vec<u8> = members.iter().map(|member| index.node(member.ordinal)).collect();
    nodes.sort_unstable();
    nodes.dedup();
    nodes.into_iter().map(|node| count(&|member| index.node(member.ordinal) == node)).sum()
}

/// How many frames the pages are.
fn frames<'a>(members: impl Iterator<Item = &'a Member> + Clone) -> u64 {
    if members.clone().all(|member| member.frame == member.ordinal) {
        return members.count() as u64;
    }
    let mut frames: Vec<u32> = members.map(|member| member.frame).collect();
    frames.sort_unstable();
    frames.dedup();
    frames.len() as u64
}

#[derive(Default)]
struct Partial {
    groups: Groups,
    /// Pages in groups that were visited, and those of them that stay unique.
    paired: u64,
    unique: u64,
    top: BinaryHeap<Reverse<Content>>,
}

/// Group the index by content and classify every page that was read. `pairs` is of the first pass. What is `elsewhere`
/// is not counted, but forbids.
pub fn classify(
    index: &mut Index,
    survey: &Survey,
    pairs: &Pairs,
    rule: Rule,
    elsewhere: &Elsewhere,
    top: usize,
) -> Groups {
    let mut entries = std::mem::take(&mut index.entries);
    entries.retain(|entry| pairs::belongs(index, entry));
    // Only what may have a partner is sorted. Asked in parallel, because each answer is a cache miss.
    let may_pair: Vec<bool> = entries.par_iter().map(|entry| pairs.may_pair(entry.fingerprint())).collect();
    let paired = put_first(&mut entries, &may_pair);
    drop(may_pair);
    entries[..paired].par_sort_unstable();
    index.entries = entries;
    index.paired = paired;
    let index = &*index;
    let (domains, witnesses) = (survey.domains(), survey.witnesses());

    let taken = Taken { witnesses: &witnesses, elsewhere };
    let partials: Vec<Partial> = walk(index, &domains, |partial: &mut Partial, start, members| {
        partial.visit(index, rule, taken, top, start, members);
    });
    let mut groups = Groups { merged_zero: merged_zeros(index, &domains), ..Groups::default() };
    let mut best = Vec::new();
    let (mut paired, mut unique) = (0, 0);
    for partial in partials {
        groups.freed += partial.groups.freed;
        groups.freed_within_domains += partial.groups.freed_within_domains;
        groups.distinct += partial.groups.distinct;
        for (times, contents) in partial.groups.seen {
            *groups.seen.entry(times).or_default() += contents;
        }
        paired += partial.paired;
        unique += partial.unique;
        best.extend(partial.top.into_iter().map(|Reverse(content)| content));
    }
    best.sort_unstable_by_key(|&content| Reverse(content));
    best.truncate(top);
    groups.top = best;
    // Contents of one page: merged ones with all their other mappings elsewhere, and unique ones.
    let alone = index.entries.len() as u64 - paired;
    groups.distinct += alone;
    let merged_alone = alone.saturating_sub(unique_pages(index) - unique);
    *groups.seen.entry(1).or_default() += alone - merged_alone;
    groups.seen.retain(|_, contents| *contents > 0);
    // With `use_zero_pages` zeros are mapped to the kernel's zero page, which everybody maps anyway.
    if !rule.across_domains && !rule.sharing.use_zero_pages {
        let merged = groups.merged_zero.keys().copied().chain(elsewhere.holder(Fingerprint::ZERO_PAGE)).collect();
        forbid_zeros(index, &domains, &witnesses, merged);
    }
    if !rule.across_domains && !elsewhere.is_empty() {
        forbid_single(index, &domains, elsewhere);
    }
    groups
}

/// Put those that are `wanted` before the others, which stay in order. Tells how many.
fn put_first<T>(all: &mut [T], wanted: &[bool]) -> usize {
    let mut first = all.len();
    for at in (0..all.len()).rev().filter(|&at| !wanted[at]) {
        first -= 1;
        all.swap(at, first);
    }
    first
}

/// Forbid the pages that are in no group, but hold what another trust domain has: they may lie in a range that is
/// enrolled for others.
fn forbid_single(index: &Index, domains: &[u32], elsewhere: &Elsewhere) {
    // What is only remembered is in no range.
    let is_single = |entry: &&Entry| index.mark(entry.ordinal) == Mark::of(PageClass::Unique);
    index.entries.par_iter().filter(is_single).for_each(|entry| {
        let holder = elsewhere.holder(entry.fingerprint());
        if holder.is_some_and(|holder| holder != domains[index.subject(entry.ordinal)]) {
            let counts = index.frame(entry.ordinal) == entry.ordinal;
            index.set_mark(entry.ordinal, Mark::duplicate(PageClass::DuplicateForeign, 1, counts).forbidden());
        }
    });
}

/// Pages of zeros that KSM merged with one another, by trust domain.
fn merged_zeros(index: &Index, domains: &[u32]) -> BTreeMap<u32, u64> {
    // Unmerged ones are not among the entries, and no fingerprint is less.
    let paired = index.entries[..index.paired].iter().take_while(|entry| entry.fingerprint() == Fingerprint::ZERO_PAGE);
    let alone = index.entries[index.paired..].iter().filter(|entry| entry.fingerprint() == Fingerprint::ZERO_PAGE);
    let mut pages = BTreeMap::new();
    for entry in paired.chain(alone) {
        *pages.entry(domains[index.subject(entry.ordinal)]).or_default() += 1;
    }
    pages
}

/// Forbid the pages of zeros of all trust domains but one: the one that has merged some already, or of which a witness
/// has any enrolled, or else has the most. Of all, if several have them so.
fn forbid_zeros(index: &Index, domains: &[u32], witnesses: &[bool], mut takers: BTreeSet<u32>) {
    let zeros = |subject: usize| {
        index.pages_of(subject).into_par_iter().filter(|&page| index.mark(page).class() == Some(PageClass::Zero))
    };
    let mut pages: BTreeMap<u32, u64> = BTreeMap::new();
    for (subject, &domain) in domains.iter().enumerate() {
        let count = zeros(subject).count() as u64;
        *pages.entry(domain).or_default() += count;
        if witnesses[subject] && count > 0 {
            takers.insert(domain);
        }
    }
    let most = || pages.iter().max_by_key(|&(domain, pages)| (pages, Reverse(domain))).map(|(&domain, _)| domain);
    let chosen = match takers.len() {
        0 => most(),
        1 => takers.first().copied(),
        _ => None,
    };
    for (subject, _) in domains.iter().enumerate().filter(|&(_, &domain)| Some(domain) != chosen) {
        zeros(subject).for_each(|page| index.set_mark(page, index.mark(page).forbidden()));
    }
}

/// By whom contents are taken that nothing is merged of.
#[derive(Clone, Copy)]
struct Taken<'a> {
    /// Whether each subject is a witness.
    witnesses: &'a [bool],
    /// Those that were not read.
    elsewhere: &'a Elsewhere,
}

/// The one trust domain in which a content may be merged: the one that has it merged already, or enrolled by a witness,
/// or else the one in which that frees most. None if several have it so.
fn domain_of(
    index: &Index,
    sharing: Sharing,
    taken: Taken<'_>,
    content: Fingerprint,
    members: &[Member],
) -> Option<u32> {
    let mut best: Option<(Pages, u32)> = None;
    let mut takers: BTreeSet<u32> = taken.elsewhere.holder(content).into_iter().collect();
    for domain in members.chunk_by(|a, b| a.domain == b.domain) {
        let number = domain[0].domain;
        if domain.iter().any(|member| member.merged || taken.witnesses[member.subject]) {
            takers.insert(number);
        }
        let freed = freed(index, sharing, domain, |_| true);
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
fn unique_pages(index: &Index) -> u64 {
    index.entries.par_iter().filter(|entry| index.mark(entry.ordinal).class() == Some(PageClass::Unique)).count() as u64
}

impl Partial {
    fn visit(&mut self, index: &Index, rule: Rule, taken: Taken<'_>, top: usize, start: usize, members: &[Member]) {
        let Rule { sharing, across_domains } = rule;
        self.paired += members.len() as u64;
        let fingerprint = index.entries[start].fingerprint();
        let merged = members.iter().filter(|member| member.merged).count();
        if fingerprint == Fingerprint::ZERO_PAGE {
            return;
        }
        self.groups.distinct += 1;
        if merged == 0 && frames(members.iter()) == 1 {
            // One page that processes share since a fork. In a sample each of its mappings stands for itself.
            self.unique += members.len() as u64;
            *self.groups.seen.entry(1).or_default() += members.len() as u64;
            return;
        }
        let copies = members.len() - merged;
        if copies > 0 {
            *self.groups.seen.entry(copies as u64).or_default() += 1;
        }
        self.groups.freed += freed(index, sharing, members, |_| true);
        // Those that may be merged with one another.
        let joining = |members: &[Member]| {
            let merged = members.iter().filter(|member| member.merged).count();
            frames(members.iter().filter(|member| !member.merged)) as usize + merged
        };
        let several = members.first().map(|first| first.domain) != members.last().map(|last| last.domain)
            || taken.elsewhere.holder(fingerprint).is_some();
        let chosen = if across_domains || !several {
            None
        } else {
            Some(domain_of(index, sharing, taken, fingerprint, members))
        };
        let kept = if merged > 0 { None } else { members.first().map(|member| member.frame) };
        let shared = members.iter().any(|member| member.frame != member.ordinal);
        let mut counted = BTreeSet::new();
        let mut processes = 0;
        let mut domains = 0;
        for domain in members.chunk_by(|a, b| a.domain == b.domain) {
            domains += 1;
            let copies = joining(if across_domains { members } else { domain });
            let elsewhere = chosen.is_some_and(|chosen| chosen != Some(domain[0].domain));
            self.groups.freed_within_domains += freed(index, sharing, domain, |_| true);
            for process in domain.chunk_by(|a, b| a.subject == b.subject) {
                processes += 1;
                let class = match (frames(process.iter()), frames(domain.iter())) {
                    (2.., _) => PageClass::DuplicateWithin,
                    (_, 2..) => PageClass::DuplicateAcross,
                    _ => PageClass::DuplicateForeign,
                };
                let forbidden = elsewhere || taken.witnesses[process[0].subject];
                for member in process.iter().filter(|member| !member.merged) {
                    // Of a frame with several mappings, the first stands for it.
                    let counts = Some(member.frame) != kept && (!shared || counted.insert(member.frame));
                    let mark = Mark::duplicate(class, copies, counts);
                    index.set_mark(member.ordinal, if forbidden { mark.forbidden() } else { mark });
                }
            }
        }
        let (pages, merged) = (members.len() as u64, merged as u64);
        self.top.push(Reverse(Content { pages, merged, processes, domains, fingerprint, start }));
        if self.top.len() > top {
            self.top.pop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn others_stay_in_order_behind_those_that_are_wanted(wanted in prop::collection::vec(any::<bool>(), 0..200)) {
            let mut all: Vec<usize> = (0..wanted.len()).collect();
            let count = put_first(&mut all, &wanted);
            let of = |is: bool| (0..wanted.len()).filter(|&at| wanted[at] == is).collect::<Vec<_>>();
            all[..count].sort_unstable();
            prop_assert_eq!(&all[..count], of(true));
            prop_assert_eq!(&all[count..], of(false));
        }
    }
}
