//! Counting: by region, process, extent and content, and what each way of enrolling would reach.

use crate::choose::{self, Chosen, Terms, each_page};
use crate::group::{self, Content, Groups};
use crate::index::{Index, Mark, RegionPages};
use crate::results::{Census, EXTENT_GAP, Extent, Matrix, RegionCensus, Savings, SubjectCensus, TopContent, Unseen};
use crate::survey::{Subject, Survey};
use pagefold_base::content::ContentKind;
use pagefold_base::process::Process;
use pagefold_base::region::Ineligible;
use pagefold_base::savings::{Reach, Sharing};
use pagefold_base::{Absent, AddressRange, Bytes, Counts, Fingerprint, PageClass, Pages};
use pagefold_host::{Host, PageContent, Run};
use pagefold_sys::fingerprint::Hasher;
use std::collections::BTreeMap;

/// Who the rows of a sharing matrix are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Party {
    /// Each virtual machine by its name, and each other process.
    #[default]
    Process,
    /// Virtual machines; other processes are left out.
    Vm,
    /// Cgroups.
    Cgroup,
    /// Users.
    User,
}

/// How the counting is done.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// By what guided enrolment chooses.
    pub terms: Terms,
    /// Rows of the sharing matrix at most.
    pub rows: usize,
    /// Who they are.
    pub matrix: Party,
}

/// Count everything. Marks the pages that a guided enrolment would cover.
pub fn tally(survey: Survey, index: &Index, groups: &Groups, plan: &Plan) -> Census {
    let sharing = plan.terms.sharing;
    let Chosen { ranges, idle } = choose::choose(&survey, index, &plan.terms);
    let mut counter = Counter::new(&survey.subjects, index, plan);
    for pages in index.regions() {
        counter.region(&pages);
    }
    let Counter { counts, regions, zeros, extents, mut savings, gone, unread, skipped, .. } = counter;

    let total: Counts = counts.iter().copied().fold(Counts::default(), |mut sum, counts| {
        sum += counts;
        sum
    });
    let zero = |zeros: &Zeros, merged| zeros.freed(sharing, merged);
    let merged_zero = groups.merged_zero.values().sum();
    savings.upper_bound.freed = Pages(zeros.all.0.values().sum()) + total.redundant;
    savings.whole.freed = groups.freed + zero(&zeros.all, merged_zero);
    savings.whole.scanned = total.resident().saturating_sub(total.merged);
    savings.within_domains = Reach {
        freed: groups.freed_within_domains + zeros.domains.iter().map(|zeros| zero(zeros, 0)).sum(),
        ..savings.whole
    };
    let covered = group::walk(index, &survey.domains(), |sum: &mut Pages, _, members| {
        *sum += group::freed(index, sharing, members, |member| index.mark(member.ordinal).is_covered());
    });
    savings.guided.freed = covered.into_iter().sum::<Pages>() + zero(&zeros.covered, merged_zero);

    savings.guided.scanned = ranges.iter().map(|range| range.pages).sum();
    savings.guided_ranges = ranges.len() as u64;

    let matrix = matrix(&survey, index, &counts, plan);
    let mut ineligible: BTreeMap<Ineligible, Bytes> = BTreeMap::new();
    let mut swapped = Bytes::ZERO;
    let pinned = survey.subjects.iter().filter_map(|subject| subject.process.pinned.clone().ok()).sum();
    for (region, reason) in survey.subjects.iter().flat_map(|subject| &subject.regions) {
        swapped += region.swap;
        let (bytes, reason) = match reason {
            Some(reason) => (region.rss + region.hugetlb, *reason),
            None => (region.rss.saturating_sub(region.anonymous), Ineligible::File),
        };
        if bytes.0 > 0 {
            *ineligible.entry(reason).or_default() += bytes;
        }
    }
    let subjects = survey
        .subjects
        .into_iter()
        .zip(counts)
        .zip(regions)
        .map(|((subject, counts), pages)| SubjectCensus {
            process: subject.process,
            domain: subject.domain,
            witness: subject.witness,
            counts,
            regions: subject
                .regions
                .into_iter()
                .zip(pages)
                .filter(|((region, _), _)| region.rss.0 + region.hugetlb.0 + region.swap.0 > 0)
                .map(|((region, ineligible), counts)| RegionCensus { region, ineligible, counts })
                .collect(),
        })
        .collect();
    Census {
        counts: total,
        gone,
        unread,
        skipped,
        pinned,
        nodes_unknown: false,
        indistinct: Pages(index.indistinct),
        swapped,
        subjects,
        unseen: survey.unseen,
        ineligible,
        savings,
        extents,
        ranges,
        idle,
        across_domains: plan.terms.across_domains,
        reread: Pages::ZERO,
        contents: Vec::new(),
        matrix,
        distinct: groups.distinct,
        seen: groups.seen.clone(),
        sharing,
        settle: None,
        partial: false,
        sample: None,
        seconds: 0.0,
        bytes_read: 0,
        index_bytes: index.bytes(),
        implementation: "",
    }
}

/// Pages of zeros by NUMA node (all on node 0 where nodes do not matter).
#[derive(Clone, Default)]
struct Zeros(BTreeMap<u8, u64>);

impl Zeros {
    fn freed(&self, sharing: Sharing, merged: u64) -> Pages {
        // Merged pages of zeros are known in sum; they only decide where in a chain the new ones begin.
        self.0.values().map(|&copies| sharing.freed_zero(copies, merged)).sum()
    }
}

#[derive(Default)]
struct ZeroSums {
    all: Zeros,
    covered: Zeros,
    domains: Vec<Zeros>,
}

struct Counter<'a> {
    index: &'a Index,
    plan: &'a Plan,
    domains: Vec<usize>,
    counts: Vec<Counts>,
    regions: Vec<Vec<Counts>>,
    zeros: ZeroSums,
    extents: Vec<Extent>,
    savings: Savings,
    gone: Pages,
    unread: Pages,
    skipped: Pages,
}

impl<'a> Counter<'a> {
    fn new(subjects: &[Subject], index: &'a Index, plan: &'a Plan) -> Self {
        let mut domains = Vec::with_capacity(subjects.len());
        for (i, subject) in subjects.iter().enumerate() {
            let new = i > 0 && subjects[i - 1].domain != subject.domain;
            domains.push(domains.last().copied().unwrap_or(0) + usize::from(new));
        }
        let zeros = ZeroSums {
            domains: vec![Zeros::default(); domains.last().map_or(0, |last| last + 1)],
            ..Default::default()
        };
        Self {
            index,
            plan,
            domains,
            counts: vec![Counts::default(); subjects.len()],
            regions: subjects.iter().map(|subject| vec![Counts::default(); subject.regions.len()]).collect(),
            zeros,
            extents: Vec::new(),
            savings: Savings::default(),
            gone: Pages::ZERO,
            unread: Pages::ZERO,
            skipped: Pages::ZERO,
        }
    }

    /// Count the pages of one region.
    fn region(&mut self, pages: &RegionPages) {
        let &RegionPages { subject, region, ref ordinals } = pages;
        let mut counts = Counts::default();
        let mut extent: Option<Extent> = None;
        // The last huge page of which a part would merge, under whole and under guided enrolment.
        let (mut split, mut split_guided) = (None, None);
        for (run, ordinal, address) in each_page(self.index, ordinals) {
            let mark = self.index.mark(ordinal);
            let Some(class) = mark.class() else {
                match mark {
                    Mark::GONE => self.gone.0 += 1,
                    Mark::SKIPPED => self.skipped.0 += 1,
                    _ => self.unread.0 += 1,
                }
                continue;
            };
            counts.count(class, mark.is_redundant());
            if !class.is_mergeable() {
                continue;
            }
            // A frame of zeros that processes share since a fork counts once.
            if class == PageClass::Zero && self.index.frame(ordinal) == ordinal {
                let node = self.index.node(ordinal);
                *self.zeros.all.0.entry(node).or_default() += 1;
                *self.zeros.domains[self.domains[subject]].0.entry(node).or_default() += 1;
                if mark.is_covered() {
                    *self.zeros.covered.0.entry(node).or_default() += 1;
                }
            }
            if run.huge {
                let huge_page = Some(address / self.plan.terms.huge_pages.bytes());
                if split != huge_page {
                    split = huge_page;
                    self.savings.whole.huge_split.0 += 1;
                }
                if mark.is_covered() && !mark.is_forbidden() && split_guided != huge_page {
                    split_guided = huge_page;
                    self.savings.guided.huge_split.0 += 1;
                }
            }
            self.extend(&mut extent, subject, address, class, mark.is_redundant());
        }
        self.extents.extend(extent);
        self.savings.upper_bound.huge_split = self.savings.whole.huge_split;
        self.regions[subject][region] = counts;
        self.counts[subject] += counts;
    }

    /// Add a mergeable page to the extent it continues, or begin a new one.
    fn extend(&mut self, extent: &mut Option<Extent>, subject: usize, address: u64, class: PageClass, redundant: bool) {
        let page_len = self.index.page_len();
        if extent.as_ref().is_none_or(|extent| address > extent.range.end + EXTENT_GAP * page_len) {
            self.extents.extend(extent.take());
        }
        let extent = extent.get_or_insert(Extent {
            subject,
            range: AddressRange { start: address, end: address },
            duplicate: Pages::ZERO,
            zero: Pages::ZERO,
            redundant: Pages::ZERO,
        });
        extent.range.end = address + page_len;
        let field = if class == PageClass::Zero { &mut extent.zero } else { &mut extent.duplicate };
        field.0 += 1;
        extent.redundant.0 += u64::from(redundant);
    }
}

/// Who shares with whom. Nothing is counted where there are no rows.
fn matrix(survey: &Survey, index: &Index, counts: &[Counts], plan: &Plan) -> Matrix {
    if plan.rows == 0 {
        return Matrix::default();
    }
    let names: Vec<Option<String>> = survey.subjects.iter().map(|subject| plan.matrix.name(&subject.process)).collect();
    let mut shares: BTreeMap<&str, Pages> = BTreeMap::new();
    for (name, counts) in names.iter().zip(counts) {
        if let Some(name) = name {
            *shares.entry(name).or_default() += counts.duplicate() + counts.merged;
        }
    }
    shares.retain(|_, pages| pages.0 > 0);
    let mut order: Vec<(&str, Pages)> = shares.into_iter().collect();
    order.sort_by_key(|&(name, pages)| (std::cmp::Reverse(pages), name));
    let rest = order.len() > plan.rows;
    let mut parties: Vec<String> = order.iter().take(plan.rows).map(|&(name, _)| name.to_owned()).collect();
    let rows: BTreeMap<&str, usize> =
        order.iter().enumerate().map(|(i, &(name, _))| (name, i.min(parties.len()))).collect();
    let row: Vec<Option<usize>> =
        names.iter().map(|name| name.as_deref().and_then(|name| rows.get(name).copied())).collect();
    if rest {
        parties.push("others".to_owned());
    }
    let size = parties.len();
    let sums = group::walk(index, &survey.domains(), |sum: &mut (Vec<u64>, Vec<u64>), start, members| {
        let alone = |member: &group::Member| index.mark(member.ordinal).class() == Some(PageClass::Unique);
        if index.entries[start].fingerprint() == Fingerprint::ZERO_PAGE || members.iter().all(alone) {
            return;
        }
        let (shared, have) = sum;
        shared.resize(size * size, 0);
        have.clear();
        have.resize(size, 0);
        members.iter().filter_map(|member| row[member.subject]).for_each(|party| have[party] += 1);
        for a in (0..size).filter(|&a| have[a] > 0) {
            for b in (0..size).filter(|&b| have[b] > u64::from(a == b)) {
                shared[a * size + b] += have[a];
            }
        }
    });
    let mut shared = vec![vec![Pages::ZERO; size]; size];
    for (sum, _) in sums {
        for (position, pages) in sum.into_iter().enumerate() {
            shared[position / size][position % size].0 += pages;
        }
    }
    Matrix { parties, shared }
}

impl Party {
    /// What it calls a process; `None` where it leaves it out.
    pub fn name(self, process: &Process) -> Option<String> {
        let vm = process.identity.vm.as_ref().map(|vm| vm.name.clone());
        match self {
            Self::Process => Some(match vm {
                Some(Some(name)) => name,
                _ => format!("{}[{}]", process.comm, process.id.pid),
            }),
            Self::Vm => vm.map(|name| name.unwrap_or_else(|| format!("{}[{}]", process.comm, process.id.pid))),
            Self::Cgroup => process.cgroup.clone().ok(),
            Self::User => process.uid.as_ref().ok().map(|uid| format!("user {uid}")),
        }
    }
}

/// Find out what the most frequent contents are by reading one page of each again. A page that has changed meanwhile
/// does not count; a few others of its group are tried.
pub fn contents(host: &dyn Host, index: &Index, hasher: &Hasher, groups: &Groups, census: &Census) -> Vec<TopContent> {
    const TRIES: usize = 8;
    let kind = |content: &Content| {
        index.entries[content.start..].iter().take((content.pages as usize).min(TRIES)).find_map(|entry| {
            let (subject, _, address) = index.place(entry.ordinal)?;
            let SubjectCensus { process, regions, .. } = &census.subjects[subject];
            let region = regions.iter().find(|known| known.region.range.contains(address))?;
            let handle = host.open(process.id.pid).ok().filter(|handle| handle.id() == process.id)?;
            let mut kind = None;
            let run = Run { address, pages: 1, huge: false };
            let outcome = handle.contents(crate::survey::way(&region.region), &[run], &mut |_, page| {
                kind = match page.content {
                    PageContent::Bytes(bytes) => {
                        let same = Fingerprint(hasher.fingerprint(bytes)) == content.fingerprint;
                        same.then(|| ContentKind::of(bytes))
                    }
                    PageContent::Fingerprint(_, kind) => kind,
                    PageContent::Volatile | PageContent::Gone => None,
                };
            });
            outcome.ok().and(kind)
        })
    };
    groups
        .top
        .iter()
        .map(|content| TopContent {
            fingerprint: content.fingerprint,
            kind: kind(content),
            pages: Pages(content.pages),
            merged: Pages(content.merged),
            processes: content.processes,
            domains: content.domains,
        })
        .collect()
}

/// Note subjects that were not read as unseen. Those that merely went away are not.
pub fn note_unread(survey: &mut Survey, failures: Vec<(usize, Absent)>) {
    for (subject, why) in failures {
        let process = &survey.subjects[subject].process;
        let unseen = Unseen { pid: process.id.pid, comm: Some(process.comm.clone()), why };
        if unseen.why != Absent::Vanished && !survey.unseen.contains(&unseen) {
            survey.unseen.push(unseen);
        }
    }
    survey.unseen.sort_by_key(|unseen| unseen.pid);
}
