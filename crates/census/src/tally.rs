//! Counts pages by region, process, extent and content, and computes what each way of enrolling saves.

use crate::content_groups::{self, ContentGroup, GroupSummary};
use crate::index::{PageIndex, PageMark, RegionPages};
use crate::range_selection::{self, SelectedRanges, SelectionCriteria, each_page};
use crate::results::{
    Census, Extent, GuidedRange, MAX_EXTENT_GAP_PAGES, Matrix, RegionCensus, Savings, SubjectCensus, TopContent,
    UnscannedProcess,
};
use crate::scan_scope::{ScanScope, Subject};
use pagefold_base::content::ContentKind;
use pagefold_base::process::Process;
use pagefold_base::region::{Ineligible, Region};
use pagefold_base::savings::{MergeEffect, SharingSettings};
use pagefold_base::{Absent, AddressRange, Bytes, Fingerprint, PageClass, PageCounts, Pages};
use pagefold_host::{Host, PageContent, PageRun};
use pagefold_sys::fingerprint::Hasher;
use std::collections::BTreeMap;

/// What the rows of a sharing matrix are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MatrixRowKind {
    /// Virtual machines by name, and each other process.
    #[default]
    Process,
    /// Virtual machines only.
    Vm,
    /// Cgroups.
    Cgroup,
    /// Users.
    User,
}

/// Options of the tally.
#[derive(Clone, Copy, Debug)]
pub struct TallyOptions {
    /// How guided enrollment selects ranges.
    pub criteria: SelectionCriteria,
    /// Maximum number of rows of the sharing matrix.
    pub max_matrix_rows: usize,
    /// What the rows of the sharing matrix are.
    pub matrix_row_kind: MatrixRowKind,
}

/// Counts all pages of the census. Marks the pages that a guided enrollment would cover.
pub fn tally_census(scope: ScanScope, index: &PageIndex, groups: &GroupSummary, options: &TallyOptions) -> Census {
    let sharing = options.criteria.sharing;
    let SelectedRanges { ranges, idle_ranges } = range_selection::select_ranges(&scope, index, &options.criteria);
    let mut counter = PageCounter::new(&scope.subjects, index, options);
    for pages in index.regions() {
        counter.count_region(&pages);
    }
    let savings = counter.sum_savings(&scope, groups, &ranges);
    let matrix = sharing_matrix(&scope, index, &counter.counts, options);
    let (ineligible, swapped) = count_unmergeable(&scope);
    let pinned = scope.subjects.iter().filter_map(|subject| subject.process.pinned.clone().ok()).sum();
    Census {
        counts: counter.total(),
        gone: counter.not_resident,
        unread: counter.unread,
        not_sampled: counter.not_sampled,
        pinned,
        nodes_unknown: false,
        unknown_shared_frames: Pages(index.unknown_shared_frames),
        swapped,
        subjects: collect_subjects(scope.subjects, index, counter.counts, counter.regions),
        unscanned: scope.unscanned,
        ineligible,
        savings,
        extents: counter.extents,
        ranges,
        idle_ranges,
        across_domains: options.criteria.across_domains,
        reread: Pages::ZERO,
        contents: Vec::new(),
        matrix,
        distinct_contents: groups.distinct_contents,
        contents_by_page_count: groups.contents_by_page_count.clone(),
        sharing,
        pass_interval: None,
        partial: false,
        sample_probability: None,
        wall_seconds: 0.0,
        bytes_read: 0,
        index_bytes: index.memory_bytes(),
        fingerprint_implementation: "",
    }
}

/// The bytes that KSM cannot merge, by reason, and the swapped bytes.
fn count_unmergeable(scope: &ScanScope) -> (BTreeMap<Ineligible, Bytes>, Bytes) {
    let mut ineligible: BTreeMap<Ineligible, Bytes> = BTreeMap::new();
    let mut swapped = Bytes::ZERO;
    for (region, reason) in scope.subjects.iter().flat_map(|subject| &subject.regions) {
        swapped += region.swap;
        let (bytes, reason) = match reason {
            Some(reason) => (region.rss + region.hugetlb, *reason),
            None => (region.rss.saturating_sub(region.anonymous), Ineligible::File),
        };
        if bytes.0 > 0 {
            *ineligible.entry(reason).or_default() += bytes;
        }
    }
    (ineligible, swapped)
}

/// The subjects with their page counts. Regions without memory are left out.
fn collect_subjects(
    subjects: Vec<Subject>,
    index: &PageIndex,
    counts: Vec<PageCounts>,
    region_counts: Vec<Vec<PageCounts>>,
) -> Vec<SubjectCensus> {
    let has_memory = |region: &Region| region.rss.0 + region.hugetlb.0 + region.swap.0 > 0;
    let collect =
        |(((position, subject), counts), region_counts): (((usize, Subject), PageCounts), Vec<PageCounts>)| {
            let regions = subject.regions.into_iter().zip(region_counts).filter(|((region, _), _)| has_memory(region));
            SubjectCensus {
                process: subject.process,
                domain: subject.domain,
                is_foreign: subject.is_foreign,
                scanned_ranges: index.scanned_ranges(position).to_vec(),
                counts,
                regions: regions
                    .map(|((region, ineligible), counts)| RegionCensus { region, ineligible, counts })
                    .collect(),
            }
        };
    subjects.into_iter().enumerate().zip(counts).zip(region_counts).map(collect).collect()
}

/// Zero pages by NUMA node (all on node 0 if nodes are not kept apart).
#[derive(Clone, Default)]
struct ZeroPagesByNode(BTreeMap<u8, u64>);

impl ZeroPagesByNode {
    fn freed_frames(&self, sharing: SharingSettings, merged: u64) -> Pages {
        // The number of merged zero pages is known as a total only. It decides where in a chain the new ones begin.
        self.0.values().map(|&copies| sharing.freed_zero(copies, merged)).sum()
    }
}

#[derive(Default)]
struct ZeroPageSums {
    all: ZeroPagesByNode,
    covered: ZeroPagesByNode,
    domains: Vec<ZeroPagesByNode>,
}

struct PageCounter<'a> {
    index: &'a PageIndex,
    options: &'a TallyOptions,
    domains: Vec<usize>,
    counts: Vec<PageCounts>,
    regions: Vec<Vec<PageCounts>>,
    zeros: ZeroPageSums,
    extents: Vec<Extent>,
    savings: Savings,
    not_resident: Pages,
    unread: Pages,
    not_sampled: Pages,
}

impl<'a> PageCounter<'a> {
    fn new(subjects: &[Subject], index: &'a PageIndex, options: &'a TallyOptions) -> Self {
        let mut domains = Vec::with_capacity(subjects.len());
        for (i, subject) in subjects.iter().enumerate() {
            let new = i > 0 && subjects[i - 1].domain != subject.domain;
            domains.push(domains.last().copied().unwrap_or(0) + usize::from(new));
        }
        let zeros = ZeroPageSums {
            domains: vec![ZeroPagesByNode::default(); domains.last().map_or(0, |last| last + 1)],
            ..Default::default()
        };
        Self {
            index,
            options,
            domains,
            counts: vec![PageCounts::default(); subjects.len()],
            regions: subjects.iter().map(|subject| vec![PageCounts::default(); subject.regions.len()]).collect(),
            zeros,
            extents: Vec::new(),
            savings: Savings::default(),
            not_resident: Pages::ZERO,
            unread: Pages::ZERO,
            not_sampled: Pages::ZERO,
        }
    }

    /// The pages of all subjects.
    fn total(&self) -> PageCounts {
        let mut total = PageCounts::default();
        self.counts.iter().for_each(|counts| total += *counts);
        total
    }

    /// What each way of enrolling saves. All regions are counted.
    fn sum_savings(&self, scope: &ScanScope, groups: &GroupSummary, ranges: &[GuidedRange]) -> Savings {
        let (sharing, index, total) = (self.options.criteria.sharing, self.index, self.total());
        let zero = |zeros: &ZeroPagesByNode, merged| zeros.freed_frames(sharing, merged);
        let merged_zero = groups.merged_zero_pages.values().sum();
        let mut savings = self.savings;
        savings.upper_bound.freed_frames = Pages(self.zeros.all.0.values().sum()) + total.redundant;
        savings.whole_processes.freed_frames = groups.freed_frames + zero(&self.zeros.all, merged_zero);
        savings.whole_processes.scanned_pages = total.resident().saturating_sub(total.merged);
        savings.within_domains = MergeEffect {
            freed_frames: groups.freed_frames_within_domains
                + self.zeros.domains.iter().map(|zeros| zero(zeros, 0)).sum(),
            ..savings.whole_processes
        };
        let covered = content_groups::fold_groups(index, &scope.domain_numbers(), |sum: &mut Pages, _, members| {
            let is_covered = |member: &content_groups::GroupPage| index.mark(member.ordinal).is_covered();
            *sum += content_groups::freed_frames(index, sharing, members, is_covered);
        });
        savings.guided.freed_frames = covered.into_iter().sum::<Pages>() + zero(&self.zeros.covered, merged_zero);
        savings.guided.scanned_pages = ranges.iter().map(|range| range.pages).sum();
        savings.guided_ranges = ranges.len() as u64;
        savings
    }

    /// Counts the pages of one region.
    fn count_region(&mut self, pages: &RegionPages) {
        let &RegionPages { subject, region, ref ordinals } = pages;
        let mut counts = PageCounts::default();
        let mut extent: Option<Extent> = None;
        // The last huge page that would be split, when processes are enrolled whole and when enrollment is guided.
        let (mut split, mut split_guided) = (None, None);
        for (run, ordinal, address) in each_page(self.index, ordinals) {
            let mark = self.index.mark(ordinal);
            let Some(class) = mark.class() else {
                match mark {
                    PageMark::NOT_RESIDENT => self.not_resident.0 += 1,
                    PageMark::NOT_SAMPLED => self.not_sampled.0 += 1,
                    _ => self.unread.0 += 1,
                }
                continue;
            };
            counts.count(class, mark.is_redundant());
            if !class.is_mergeable() {
                continue;
            }
            // A frame of zeros that processes share since a fork counts once.
            if class == PageClass::Zero && self.index.first_page_of_frame(ordinal) == ordinal {
                let node = self.index.node(ordinal);
                *self.zeros.all.0.entry(node).or_default() += 1;
                *self.zeros.domains[self.domains[subject]].0.entry(node).or_default() += 1;
                if mark.is_covered() {
                    *self.zeros.covered.0.entry(node).or_default() += 1;
                }
            }
            if run.huge {
                let huge_page = Some(address / self.options.criteria.huge_page_size.bytes());
                if split != huge_page {
                    split = huge_page;
                    self.savings.whole_processes.split_huge_pages.0 += 1;
                }
                if mark.is_covered() && !mark.is_forbidden() && split_guided != huge_page {
                    split_guided = huge_page;
                    self.savings.guided.split_huge_pages.0 += 1;
                }
            }
            self.add_to_extent(&mut extent, subject, address, class, mark.is_redundant());
        }
        self.extents.extend(extent);
        self.savings.upper_bound.split_huge_pages = self.savings.whole_processes.split_huge_pages;
        self.regions[subject][region] = counts;
        self.counts[subject] += counts;
    }

    /// Adds a mergeable page to the current extent, or starts a new one.
    fn add_to_extent(
        &mut self,
        extent: &mut Option<Extent>,
        subject: usize,
        address: u64,
        class: PageClass,
        redundant: bool,
    ) {
        let page_len = self.index.page_bytes();
        if extent.as_ref().is_none_or(|extent| address > extent.range.end + MAX_EXTENT_GAP_PAGES * page_len) {
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

/// The sharing matrix; empty if no rows are requested.
fn sharing_matrix(scope: &ScanScope, index: &PageIndex, counts: &[PageCounts], options: &TallyOptions) -> Matrix {
    if options.max_matrix_rows == 0 {
        return Matrix::default();
    }
    let names: Vec<Option<String>> =
        scope.subjects.iter().map(|subject| options.matrix_row_kind.row_name(&subject.process)).collect();
    let mut shares: BTreeMap<&str, Pages> = BTreeMap::new();
    for (name, counts) in names.iter().zip(counts) {
        if let Some(name) = name {
            *shares.entry(name).or_default() += counts.duplicate() + counts.merged;
        }
    }
    shares.retain(|_, pages| pages.0 > 0);
    let mut order: Vec<(&str, Pages)> = shares.into_iter().collect();
    order.sort_by_key(|&(name, pages)| (std::cmp::Reverse(pages), name));
    let is_truncated = order.len() > options.max_matrix_rows;
    let mut parties: Vec<String> =
        order.iter().take(options.max_matrix_rows).map(|&(name, _)| name.to_owned()).collect();
    let rows: BTreeMap<&str, usize> =
        order.iter().enumerate().map(|(i, &(name, _))| (name, i.min(parties.len()))).collect();
    let row: Vec<Option<usize>> =
        names.iter().map(|name| name.as_deref().and_then(|name| rows.get(name).copied())).collect();
    if is_truncated {
        parties.push("others".to_owned());
    }
    let size = parties.len();
    let sums = content_groups::fold_groups(
        index,
        &scope.domain_numbers(),
        |sum: &mut (Vec<u64>, Vec<u64>), start, members| {
            let is_unique =
                |member: &content_groups::GroupPage| index.mark(member.ordinal).class() == Some(PageClass::Unique);
            if index.entries[start].fingerprint() == Fingerprint::ZERO_PAGE || members.iter().all(is_unique) {
                return;
            }
            let (shared, pages_by_party) = sum;
            shared.resize(size * size, 0);
            pages_by_party.clear();
            pages_by_party.resize(size, 0);
            members.iter().filter_map(|member| row[member.subject]).for_each(|party| pages_by_party[party] += 1);
            for a in (0..size).filter(|&a| pages_by_party[a] > 0) {
                for b in (0..size).filter(|&b| pages_by_party[b] > u64::from(a == b)) {
                    shared[a * size + b] += pages_by_party[a];
                }
            }
        },
    );
    let mut shared = vec![vec![Pages::ZERO; size]; size];
    for (sum, _) in sums {
        for (position, pages) in sum.into_iter().enumerate() {
            shared[position / size][position % size].0 += pages;
        }
    }
    Matrix { parties, shared }
}

impl MatrixRowKind {
    /// The row of a process; `None` if the process is left out.
    pub fn row_name(self, process: &Process) -> Option<String> {
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

/// Identifies the most frequent contents by reading one page of each again. If a page has changed meanwhile, a few
/// other pages of its group are tried.
pub fn identify_top_contents(
    host: &dyn Host,
    index: &PageIndex,
    hasher: &Hasher,
    groups: &GroupSummary,
    census: &Census,
) -> Vec<TopContent> {
    const MAX_PAGES_TRIED: usize = 8;
    let kind = |content: &ContentGroup| {
        index.entries[content.first_entry..].iter().take((content.pages as usize).min(MAX_PAGES_TRIED)).find_map(
            |entry| {
                let (subject, _, address) = index.locate(entry.ordinal)?;
                let SubjectCensus { process, regions, .. } = &census.subjects[subject];
                let region = regions.iter().find(|region| region.region.range.contains(address))?;
                let handle = pagefold_host::hold(host, process.id).ok()?;
                let mut kind = None;
                let run = PageRun { address, pages: 1, huge: false };
                let outcome =
                    handle.contents(crate::scan_scope::read_method(&region.region), &[run], &mut |_, page| {
                        kind = match page.content {
                            PageContent::Bytes(bytes) => {
                                let is_unchanged = Fingerprint(hasher.fingerprint(bytes)) == content.fingerprint;
                                is_unchanged.then(|| ContentKind::classify(bytes))
                            }
                            PageContent::Fingerprint(_, kind) => kind,
                            PageContent::Volatile | PageContent::NotResident => None,
                        };
                    });
                outcome.ok().and(kind)
            },
        )
    };
    groups
        .top_contents
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

/// Adds subjects that could not be read to the unscanned processes, except those that exited.
pub fn record_unread(scope: &mut ScanScope, failures: Vec<(usize, Absent)>) {
    for (subject, why) in failures {
        let process = &scope.subjects[subject].process;
        let process = UnscannedProcess { pid: process.id.pid, comm: Some(process.comm.clone()), why };
        if process.why != Absent::Vanished && !scope.unscanned.contains(&process) {
            scope.unscanned.push(process);
        }
    }
    scope.unscanned.sort_by_key(|process| process.pid);
}
