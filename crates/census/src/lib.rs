//! From page contents to fingerprints, to groups of equal pages, to what merging them would save.
//!
//! A census has five steps:
//!
//! 1. [`scan_scope`] opens the chosen processes, reads their regions and decides region by region whether KSM could take
//!    its pages and how they may be read.
//! 2. [`index`] lists the resident pages and gives each an ordinal: processes in the order of their trust domains,
//!    pages in the order of their addresses.
//! 3. [`scan`] reads the pages in parallel and puts a fingerprint for each into the index, but for those of which it is
//!    remembered what they hold; a second pass marks what changed.
//! 4. [`content_groups`] sorts the fingerprints, after [`duplicate_filter`] has told most of those that have no partner. Equal ones lie
//!    side by side, ordered by domain and process, so one walk over them classifies every page.
//! 5. [`tally`] walks the pages in address order and counts: by region, process, extent and content. Before that,
//!    [`range_selection`] finds the ranges that are worth enrolling.
//!
//! Memory is 13 bytes for each page (12 for the fingerprint and ordinal, one for the class) and 8 for each run of pages
//! that lie behind one another, so at most 21. A page whose frame an earlier one has, since a fork, takes 8 more, and
//! where NUMA nodes are kept apart each takes one more. While pages are listed, the runs of the processes in hand take
//! 16 each beside it; while they are grouped, each page takes at most 12 more. Nothing is written anywhere.
//!
//! # Trust domains
//!
//! Without [`CensusOptions::across_domains`] a content that lies in several domains is covered in one of them at most: in
//! none of the chosen ones if somebody who is not chosen has it enrolled ([`CensusOptions::enrolled_processes`]). That keeps apart what
//! is equal when the census is taken, and promises nothing for later: two covered pages of different domains whose
//! contents become equal afterwards are merged while ksmd runs, and so are pages that programs enrolled themselves,
//! whatever is chosen here. Who takes censuses again and again need not read everybody for that each time
//! ([`foreign_processes`]), nor of who is chosen all that has not changed: [`take_incremental_census`].

#![forbid(unsafe_code)]

pub mod content_groups;
pub mod decide;
pub mod duplicate_filter;
mod fingerprint_cache;
pub mod foreign_processes;
pub mod index;
#[cfg(feature = "parquet")]
pub mod parquet;
pub mod range_selection;
pub mod results;
pub mod scan;
pub mod scan_scope;
mod sketches;
pub mod tally;
pub mod text;
pub mod wire;

pub use foreign_processes::ForeignProcesses;
pub use index::PageIndex;
/// The key of fingerprints: equal only under one.
pub use pagefold_sys::fingerprint::Hasher;
pub use scan::ScanProgress;
pub use scan_scope::{ProcessSelection, ScanScope};

use crate::decide::sketch::ContentSketches;
use crate::results::Census;
use fingerprint_cache::FingerprintCache;
use foreign_processes::ForeignContents;
use pagefold_base::domain::DomainConfig;
use pagefold_base::savings::{EnrollCostBytes, SharingSettings};
use pagefold_base::{Absent, PageSize, Pages, ProcessId, Reading};
use pagefold_host::{Host, observe};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How a census is taken.
#[derive(Clone, Debug)]
pub struct CensusOptions {
    /// Which processes.
    pub selection: ProcessSelection,
    /// How they are sorted into trust domains.
    pub domains: DomainConfig,
    /// Pause between the two passes; zero for one pass, which finds no volatile pages.
    pub pass_interval: Duration,
    /// Threads that read.
    pub threads: usize,
    /// The probability with which each page is looked at; `None` for all.
    pub sample_probability: Option<f64>,
    /// Seed of the sample.
    pub sample_seed: u64,
    /// How many of the most frequent contents to tell.
    pub max_top_contents: usize,
    /// Rows of the sharing matrix at most.
    pub max_matrix_rows: usize,
    /// Who they are.
    pub matrix_row_kind: tally::MatrixRowKind,
    /// Which pages the second pass reads.
    pub second_pass: SecondPass,
    /// The costs by which guided enrolment chooses; `None` for those of the page size ([`EnrollCostBytes::unscanned`]).
    pub costs: Option<EnrollCostBytes>,
    /// Whether guided enrolment may merge pages of different trust domains.
    pub across_domains: bool,
    /// Processes that are enrolled, chosen or not: what they hold in other trust domains is not to be merged with.
    /// Nothing of them is counted beside it.
    pub enrolled_processes: Vec<ProcessId>,
    /// Regions that a process may have (`vm.max_map_count`).
    pub max_map_count: u64,
    /// Whether pages of zeros will be mapped to the kernel's page of zeros, whatever `use_zero_pages` says now.
    pub use_zero_pages: bool,
}

/// Which pages are read in the second pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SecondPass {
    /// All: every volatile page is found.
    #[default]
    All,
    /// Those that have anything to gain, duplicates and zeros, and of the others those few that [`duplicate_filter`] cannot tell
    /// from them. Other pages are unique, whether they change or not. Of a process none of whose threads ran since
    /// before the first pass nothing is read again: what devices and kernel threads write for it is left to ksmd, which
    /// merges only what it has found unchanged itself.
    Candidates,
}

/// `vm.max_map_count` when nothing else is known (include/linux/mm.h, `DEFAULT_MAX_MAP_COUNT`).
pub const DEFAULT_MAX_MAP_COUNT: u64 = 65530;

impl Default for CensusOptions {
    /// All processes by user, read once, on one thread.
    fn default() -> Self {
        Self {
            selection: ProcessSelection::default(),
            domains: DomainConfig::default(),
            pass_interval: Duration::ZERO,
            threads: 1,
            sample_probability: None,
            sample_seed: 0,
            max_top_contents: 0,
            max_matrix_rows: 0,
            matrix_row_kind: tally::MatrixRowKind::default(),
            second_pass: SecondPass::default(),
            costs: None,
            across_domains: false,
            max_map_count: DEFAULT_MAX_MAP_COUNT,
            use_zero_pages: false,
            enrolled_processes: Vec::new(),
        }
    }
}

/// Why there is no census.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The processes cannot be listed.
    #[error("cannot list the processes of {host}")]
    Processes {
        /// Which host.
        host: String,
        /// Why.
        source: Absent,
    },
    /// A pattern for names is malformed.
    #[error("malformed pattern for names of processes or virtual machines")]
    Pattern(#[from] globset::Error),
    /// More pages than the index numbers.
    #[error("{0} resident pages are more than the {max} that one census can hold", max = u32::MAX)]
    TooManyPages(u64),
    /// There is no memory for the index.
    #[error("no memory for an index of {0} pages, 13 bytes each: choose fewer processes")]
    NoMemory(usize),
    /// The kernel gave no random key.
    #[error("cannot draw a random key for the fingerprints")]
    RandomKey(#[source] std::io::Error),
    /// The threads could not be started.
    #[error("cannot start the reading threads")]
    Threads(#[from] rayon::ThreadPoolBuildError),
}

/// Take a census. `stop` ends it early: what was seen so far is counted and the result is marked partial.
pub fn take_census(
    host: &dyn Host,
    options: &CensusOptions,
    progress: &ScanProgress,
    stop: &AtomicBool,
) -> Result<(Census, PageIndex), Error> {
    let hasher = Hasher::with_random_key(host.page_size().as_len()).map_err(Error::RandomKey)?;
    take_census_with_hasher(&hasher, host, options, progress, stop)
}

/// Take a census whose fingerprints can be compared with those of others under the same key.
pub fn take_census_with_hasher(
    hasher: &Hasher,
    host: &dyn Host,
    options: &CensusOptions,
    progress: &ScanProgress,
    stop: &AtomicBool,
) -> Result<(Census, PageIndex), Error> {
    run_census(None, hasher, host, options, progress, stop)
}

/// What is remembered from census to census under one key.
pub struct ScanCache {
    foreign: ForeignProcesses,
    fingerprints: FingerprintCache,
    sketches: BTreeMap<ProcessId, ContentSketches>,
}

impl ScanCache {
    /// Nothing yet.
    pub fn new(now: Instant) -> Self {
        Self {
            foreign: ForeignProcesses::new(now),
            fingerprints: FingerprintCache::new(now),
            sketches: BTreeMap::new(),
        }
    }

    /// How many pages of a process the last census has not read, since it was remembered what they held.
    pub fn reused_pages(&self, process: ProcessId) -> Pages {
        self.fingerprints.reused_pages(process)
    }

    /// Take the sample of what everybody held in the last census whose pages could be listed, witnesses apart.
    pub fn take_sketches(&mut self) -> BTreeMap<ProcessId, ContentSketches> {
        std::mem::take(&mut self.sketches)
    }

    /// Forget the processes that do not fit. Of witnesses those are forgotten that are not enrolled when a census begins.
    pub fn retain_processes(&mut self, keep: impl Fn(ProcessId) -> bool) {
        self.fingerprints.retain_processes(keep);
    }
}

/// Take a census, at a time that is given, in which nothing is read that need not be by what is remembered from those
/// before, which were under the same key: nobody for what it has enrolled alone, and of those who are chosen little of
/// what has not changed. What changes each time is counted as volatile unread. The index is without the contents that no
/// two pages have, as after [`PageIndex::drop_unique_entries`].
pub fn take_incremental_census(
    (cache, now): (&mut ScanCache, Instant),
    hasher: &Hasher,
    host: &dyn Host,
    options: &CensusOptions,
    progress: &ScanProgress,
    stop: &AtomicBool,
) -> Result<(Census, PageIndex), Error> {
    cache.foreign.begin_census(now, &options.enrolled_processes);
    cache.fingerprints.begin_census(now);
    run_census(Some(cache), hasher, host, options, progress, stop)
}

fn run_census(
    mut cache: Option<&mut ScanCache>,
    hasher: &Hasher,
    host: &dyn Host,
    options: &CensusOptions,
    progress: &ScanProgress,
    stop: &AtomicBool,
) -> Result<(Census, PageIndex), Error> {
    let started = Instant::now();
    let threads = rayon::ThreadPoolBuilder::new().num_threads(options.threads).build()?;
    let known = cache.as_ref().map(|known| &known.foreign);
    let mut survey = threads.install(|| {
        scan_scope::determine_scope(host, &options.selection, &options.domains, &options.enrolled_processes, known)
    })?;
    let mut sharing = observe::ksm(host).map(|ksm| SharingSettings::from_ksm(&ksm)).unwrap_or_default();
    sharing.use_zero_pages |= options.use_zero_pages;
    let nodes = if sharing.across_nodes { None } else { observe::NumaNodes::read(host).ok() };
    let nodes = nodes.filter(|nodes| nodes.node_count() > 1);
    let nodes_unknown = nodes.is_some() && host.frame_flags(&[]).is_err();

    let mut index = threads.install(|| PageIndex::build(host, &survey, nodes.is_some()))?;
    progress.set_expected_pages(index.page_count() as u64 * if options.pass_interval.is_zero() { 1 } else { 2 });
    let sample = options.sample_probability.map(|probability| scan::SampleRule::new(probability, options.sample_seed));
    let recalls = nodes.is_none() && sample.is_none();
    let earlier = cache.as_deref().filter(|_| recalls);
    let scan = scan::Scan { host, scope: &survey, hasher, nodes, progress, stop, sample, cache: earlier };
    let first = Instant::now();
    let ran_before = if options.second_pass == SecondPass::Candidates { cpu_times(host, &survey) } else { Vec::new() };
    let mut failures = index.unlisted_subjects().to_vec();
    failures.extend(threads.install(|| scan.first_pass(&mut index)));
    let (pairs, more) = threads.install(|| scan.build_duplicate_filter(&mut index));
    failures.extend(more);
    let (mut settled, mut reread) = (false, Pages::ZERO);
    if !options.pass_interval.is_zero() {
        sleep_unless_stopped(options.pass_interval.saturating_sub(first.elapsed()), stop);
        if !stop.load(Ordering::Relaxed) {
            let candidates = (options.second_pass == SecondPass::Candidates).then_some(&pairs);
            let ran_since = if candidates.is_some() { cpu_times(host, &survey) } else { Vec::new() };
            let rested = |subject: usize| matches!((ran_before.get(subject), ran_since.get(subject)), (Some(Ok(a)), Some(Ok(b))) if a == b);
            let again = threads.install(|| scan.second_pass(&index, candidates, &rested));
            failures.extend(again.failures);
            reread = again.pages_read;
            settled = !stop.load(Ordering::Relaxed);
        }
    }
    let partial = stop.load(Ordering::Relaxed);

    let unread: BTreeSet<usize> = failures.iter().map(|(subject, _)| *subject).collect();
    tally::record_unread(&mut survey, failures);
    let rule = content_groups::MergeRule { sharing, across_domains: options.across_domains };
    let elsewhere =
        cache.as_ref().map(|known| threads.install(|| ForeignContents::from_inactive(&survey, &known.foreign)));
    let elsewhere = elsewhere.unwrap_or_default();
    let groups = threads.install(|| {
        content_groups::classify_pages(&mut index, &survey, &pairs, rule, &elsewhere, options.max_top_contents)
    });
    drop((pairs, elsewhere));
    let index_bytes = index.memory_bytes();
    if let Some(remembered) = &mut cache {
        remembered.sketches = threads.install(|| sketches::sketch_processes(&survey, &index));
        let is_noted = !partial && sample.is_none();
        if is_noted {
            threads.install(|| remembered.foreign.record_census(&survey, &index, &unread));
        }
        // Last, since it lets go of what the others ask for.
        if is_noted && recalls {
            remembered.fingerprints.record_census(&survey, &mut index, &unread);
        }
        index.drop_unique_entries();
    }
    let page_size = host.page_size();
    let terms = range_selection::SelectionCriteria {
        sharing,
        costs: options.costs.unwrap_or_else(|| EnrollCostBytes::for_page_size(page_size)),
        page_size,
        huge_page_size: huge_page_size(host),
        across_domains: options.across_domains,
        max_map_count: options.max_map_count,
    };
    let plan = tally::TallyOptions {
        criteria: terms,
        max_matrix_rows: options.max_matrix_rows,
        matrix_row_kind: options.matrix_row_kind,
    };
    let mut census = threads.install(|| tally::tally_census(survey, &index, &groups, &plan));
    census.contents = tally::identify_top_contents(host, &index, hasher, &groups, &census);
    census.wall_seconds = started.elapsed().as_secs_f64();
    census.bytes_read = progress.bytes_read();
    // Of all of it, part of which may be let go of by now.
    census.index_bytes = index_bytes;
    census.pass_interval = settled.then_some(options.pass_interval);
    census.reread = reread;
    census.nodes_unknown = nodes_unknown;
    census.partial = partial;
    census.sample_probability = options.sample_probability;
    census.fingerprint_implementation = hasher.implementation();
    Ok((census, index))
}

/// The CPU time that each process has used.
fn cpu_times(host: &dyn Host, scope: &ScanScope) -> Vec<Reading<u64>> {
    let time = |id: ProcessId| {
        let handle = host.open(id.pid)?;
        if handle.id() == id { observe::cpu_time_ns(host, &*handle) } else { Err(Absent::Vanished) }
    };
    scope.subjects.iter().map(|subject| time(subject.process.id)).collect()
}

/// The bytes of a huge page of the PMD level; 512 base pages where the host does not tell, as on x86-64.
fn huge_page_size(host: &dyn Host) -> PageSize {
    observe::huge_page_bytes(host)
        .ok()
        .and_then(PageSize::new)
        .or_else(|| PageSize::new(host.page_size().bytes() * 512))
        .unwrap_or(host.page_size())
}

/// Sleep, and wake up soon after `stop` is set.
fn sleep_unless_stopped(time: Duration, stop: &AtomicBool) {
    let end = Instant::now() + time;
    while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        std::thread::sleep(left.min(Duration::from_millis(20)));
    }
}
