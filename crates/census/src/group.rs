//! Groups of equal pages: sort the fingerprints, and one walk over them classifies every page.

use crate::index::{Entry, Index, Mark};
use crate::survey::Survey;
use pagefold_model::domain::Domain;
use pagefold_model::savings::Sharing;
use pagefold_model::{Fingerprint, PageClass, Pages};
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
    /// Pages of zeros that KSM merged with one another.
    pub merged_zero: u64,
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

/// Numbers for the trust domains: equal ones are side by side in a survey.
fn domain_numbers(survey: &Survey) -> Vec<u32> {
    let mut number = 0;
    let mut last: Option<&Domain> = None;
    survey
        .subjects
        .iter()
        .map(|subject| {
            number += u32::from(last.is_some_and(|last| *last != subject.domain));
            last = Some(&subject.domain);
            number
        })
        .collect()
}

/// Walk over the groups in parallel. `visit` gets the sorted members of each group of two or more and where it begins.
pub fn walk<T, F>(index: &Index, survey: &Survey, visit: F) -> Vec<T>
where
    T: Default + Send,
    F: Fn(&mut T, usize, &[Member]) + Sync,
{
    let domains = domain_numbers(survey);
    let base = index.entries.as_ptr().addr();
    let first = |group: &[Entry]| (group.as_ptr().addr() - base) / size_of::<Entry>();
    index
        .entries
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

/// Sort the index by content and classify every page that was read.
pub fn classify(index: &mut Index, survey: &Survey, sharing: Sharing, top: usize) -> Groups {
    let mut entries = std::mem::take(&mut index.entries);
    entries.retain(|entry| {
        *entry != Entry::EMPTY
            && matches!(index.mark(entry.ordinal).class(), Some(PageClass::Unique | PageClass::Merged))
    });
    entries.par_sort_unstable();
    index.entries = entries;
    let index = &*index;

    let partials: Vec<Partial> = walk(index, survey, |partial: &mut Partial, start, members| {
        partial.visit(index, sharing, top, start, members);
    });
    let mut groups = Groups::default();
    let mut best = Vec::new();
    let (mut paired, mut unique) = (0, 0);
    for partial in partials {
        groups.freed += partial.groups.freed;
        groups.freed_within_domains += partial.groups.freed_within_domains;
        groups.merged_zero += partial.groups.merged_zero;
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
    groups
}

/// Pages that are unique after all groups were classified.
fn unique_pages(index: &Index) -> u64 {
    index.entries.par_iter().filter(|entry| index.mark(entry.ordinal).class() == Some(PageClass::Unique)).count() as u64
}

impl Partial {
    fn visit(&mut self, index: &Index, sharing: Sharing, top: usize, start: usize, members: &[Member]) {
        self.paired += members.len() as u64;
        let fingerprint = index.entries[start].fingerprint();
        let merged = members.iter().filter(|member| member.merged).count();
        if fingerprint == Fingerprint::ZERO_PAGE {
            self.groups.merged_zero += merged as u64;
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
        let copies = (frames(members.iter().filter(|member| !member.merged)) as usize) + merged;
        let kept = if merged > 0 { None } else { members.first().map(|member| member.frame) };
        let shared = members.iter().any(|member| member.frame != member.ordinal);
        let mut counted = BTreeSet::new();
        let mut processes = 0;
        let mut domains = 0;
        for domain in members.chunk_by(|a, b| a.domain == b.domain) {
            domains += 1;
            self.groups.freed_within_domains += freed(index, sharing, domain, |_| true);
            for process in domain.chunk_by(|a, b| a.subject == b.subject) {
                processes += 1;
                let class = match (frames(process.iter()), frames(domain.iter())) {
                    (2.., _) => PageClass::DuplicateWithin,
                    (_, 2..) => PageClass::DuplicateAcross,
                    _ => PageClass::DuplicateForeign,
                };
                for member in process.iter().filter(|member| !member.merged) {
                    // Of a frame with several mappings, the first stands for it.
                    let counts = Some(member.frame) != kept && (!shared || counted.insert(member.frame));
                    index.set_mark(member.ordinal, Mark::duplicate(class, copies, counts));
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
