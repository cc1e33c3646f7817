//! A census: fingerprint the pages of processes, group equal pages and compute what merging them would save.
//!
//! A census has five steps:
//!
//! 1. [`scan_scope`] opens the selected processes and reads their regions. For each region it decides whether KSM can
//!    take its pages and how to read them.
//! 2. [`index`] lists the resident pages and gives each an ordinal: processes in the order of their trust domains,
//!    pages in the order of their addresses.
//! 3. [`scan`] reads the pages in parallel and puts a fingerprint for each into the index. Pages with a cached
//!    fingerprint are not read. A second pass marks the pages that changed.
//! 4. [`duplicate_filter`] finds most pages that have no duplicate. [`content_groups`] sorts the fingerprints of the
//!    others. Equal fingerprints are adjacent, ordered by domain and process, so one walk over them classifies every
//!    page.
//! 5. [`range_selection`] finds the ranges that are profitable to enroll. [`tally`] walks the pages in address order
//!    and counts them by region, process, extent and content.
//!
//! The index takes 13 bytes for each page (12 for the fingerprint and ordinal, 1 for the class) and 8 for each run of
//! consecutive pages, so at most 21. A page that shares the frame of an earlier page since a fork takes 8 more. Where
//! NUMA nodes are kept apart, each page takes 1 more. While pages are listed, each run of the processes being listed
//! takes 16 more. While pages are grouped, each page takes at most 12 more. Nothing is written to disk.
//!
//! # Trust domains
//!
//! Without [`CensusOptions::across_domains`] a content that is in several domains is covered in at most one of them. If
//! a process that was not selected has enrolled the content ([`CensusOptions::enrolled_processes`]), no selected domain
//! may cover it. This rule applies to pages that are equal when the census is taken. It does not cover two cases:
//! enrolled pages of different domains whose contents become equal later, and pages that programs enroll themselves.
//! ksmd merges both.
//!
//! Repeated censuses need not read every process in full. [`foreign_processes`] caches what foreign processes have
//! enrolled, and [`take_incremental_census`] reads little of what has not changed.

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
mod scan_cache;
pub mod scan_scope;
mod sketches;
pub mod tally;
pub mod text;
pub mod wire;

pub use foreign_processes::ForeignProcesses;
pub use index::PageIndex;
/// Computes fingerprints under a key. Only fingerprints of one key can be compared.
pub use pagefold_sys::fingerprint::Hasher;
pub use scan::ScanProgress;
pub use scan_cache::ScanCache;
pub use scan_scope::{ProcessSelection, ScanPart, ScanScope};

use crate::duplicate_filter::DuplicateFilter;
use crate::results::Census;
use pagefold_base::domain::DomainConfig;
use pagefold_base::savings::{EnrollCostBytes, SharingSettings};
use pagefold_base::{Absent, PageSize, Pages, ProcessId, Reading};
use pagefold_host::activity::ActivityCounters;
use pagefold_host::{Host, elapsed_since, hold, observe};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Options of a census.
#[derive(Clone, Debug)]
pub struct CensusOptions {
    /// The processes to scan.
    pub selection: ProcessSelection,
    /// How processes are sorted into trust domains.
    pub domains: DomainConfig,
    /// Pause between the two passes; zero for a single pass, which finds no volatile pages.
    pub pass_interval: Duration,
    /// Number of threads that read pages.
    pub threads: usize,
    /// The probability with which each page is sampled; `None` to scan all pages.
    pub sample_probability: Option<f64>,
    /// Seed of the sample.
    pub sample_seed: u64,
    /// How many of the most frequent contents to report.
    pub max_top_contents: usize,
    /// Maximum number of rows of the sharing matrix.
    pub max_matrix_rows: usize,
    /// What the rows of the sharing matrix are.
    pub matrix_row_kind: tally::MatrixRowKind,
    /// Which pages the second pass reads.
    pub second_pass: SecondPass,
    /// The costs by which guided enrollment selects ranges; `None` for the defaults of the page size
    /// ([`EnrollCostBytes::for_page_size`]).
    pub costs: Option<EnrollCostBytes>,
    /// Whether guided enrollment may merge pages of different trust domains.
    pub across_domains: bool,
    /// Enrolled processes, selected or not. Pages of other trust domains must not merge with what they hold. Processes
    /// that are not selected are not counted.
    pub enrolled_processes: Vec<ProcessId>,
    /// Maximum number of regions of a process (`vm.max_map_count`).
    pub max_map_count: u64,
    /// Whether zero pages will be mapped to the kernel's zero page, even if `use_zero_pages` is off now.
    pub use_zero_pages: bool,
    /// The index keeps the [`OrderKey`](pagefold_base::OrderKey) of each page, in 8 bytes, if it has at most so many pages.
    pub max_order_keys: usize,
}

/// Which pages the second pass reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SecondPass {
    /// All pages: the census finds every volatile page.
    #[default]
    All,
    /// Zero pages, duplicates and the few other pages that [`duplicate_filter`] cannot tell from duplicates. Other
    /// pages count as unique, whether they change or not. If no thread of a process ran since before the first pass,
    /// none of its pages is read again. Devices and kernel threads may still have written to them; ksmd merges only
    /// pages that it has found unchanged itself.
    Candidates,
}

/// `vm.max_map_count` if the host's value is not known (include/linux/mm.h, `DEFAULT_MAX_MAP_COUNT`).
pub const DEFAULT_MAX_MAP_COUNT: u64 = 65530;

impl Default for CensusOptions {
    /// All processes, trust domains by user, one pass on one thread.
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
            max_order_keys: 0,
        }
    }
}

/// Why a census failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The processes cannot be listed.
    #[error("cannot list the processes of {host}")]
    Processes {
        /// The host.
        host: String,
        /// The reason.
        source: Absent,
    },
    /// A pattern for names is malformed.
    #[error("malformed name pattern for processes or virtual machines")]
    Pattern(#[from] globset::Error),
    /// The index has ordinals for 2^32 - 1 pages only.
    #[error("{0} resident pages exceed the limit of {max} for one census: select fewer processes", max = u32::MAX)]
    TooManyPages(u64),
    /// The index does not fit into memory.
    #[error("not enough memory for an index of {0} pages: select fewer processes")]
    NoMemory(usize),
    /// The kernel returned no random key.
    #[error("cannot get a random key for the fingerprints from the kernel")]
    RandomKey(#[source] std::io::Error),
    /// The threads could not be started.
    #[error("cannot start the scan threads")]
    Threads(#[from] rayon::ThreadPoolBuildError),
}

/// A hasher for censuses of a host, under a new key.
///
/// # Errors
/// If the key is not available.
pub fn page_hasher(host: &dyn Host) -> Result<Hasher, Error> {
    host.page_hasher().map_err(Error::RandomKey)
}

/// Takes a census. Setting `stop` ends it early: the census then counts the pages read so far and is marked partial.
pub fn take_census(
    host: &dyn Host,
    options: &CensusOptions,
    progress: &ScanProgress,
    stop: &AtomicBool,
) -> Result<(Census, PageIndex), Error> {
    let hasher = page_hasher(host)?;
    take_census_with_hasher(&hasher, host, options, progress, stop)
}

/// Takes a census with the given key, so that its fingerprints can be compared with those of other censuses.
pub fn take_census_with_hasher(
    hasher: &Hasher,
    host: &dyn Host,
    options: &CensusOptions,
    progress: &ScanProgress,
    stop: &AtomicBool,
) -> Result<(Census, PageIndex), Error> {
    run_census(None, hasher, host, options, progress, stop)
}

/// Takes a census at the time `now` that reads only what the cache cannot supply. The cache holds results of earlier
/// censuses under the same key. Foreign processes that were inactive are not read, and of the selected processes little
/// of what has not changed. Pages that changed in each recent census count as volatile without being read. The index
/// lacks the contents that only one page has, as after [`PageIndex::drop_unique_entries`].
pub fn take_incremental_census(
    (cache, now): (&mut ScanCache, Instant),
    hasher: &Hasher,
    host: &dyn Host,
    options: &CensusOptions,
    progress: &ScanProgress,
    stop: &AtomicBool,
) -> Result<(Census, PageIndex), Error> {
    cache.begin_census(now, &options.enrolled_processes);
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
    let started = host.now();
    let threads = rayon::ThreadPoolBuilder::new().num_threads(options.threads).build()?;
    let foreign = cache.as_ref().map(|cache| &cache.foreign);
    let mut scope = threads.install(|| {
        scan_scope::determine_scope(host, &options.selection, &options.domains, &options.enrolled_processes, foreign)
    })?;
    let mut sharing = observe::ksm(host).map(|ksm| SharingSettings::from_ksm(&ksm)).unwrap_or_default();
    sharing.use_zero_pages |= options.use_zero_pages;
    let nodes = if sharing.across_nodes { None } else { observe::NumaNodes::read(host).ok() };
    let nodes = nodes.filter(|nodes| nodes.node_count() > 1);
    let nodes_unknown = nodes.is_some() && pagefold_host::check_frame_access(host).is_err();

    let mut index = threads.install(|| PageIndex::build(host, &scope, nodes.is_some()))?;
    if index.page_count() <= options.max_order_keys {
        threads.install(|| index.keep_order_keys())?;
    }
    progress.set_expected_pages(index.page_count() as u64 * if options.pass_interval.is_zero() { 1 } else { 2 });
    let sample = options.sample_probability.map(|probability| scan::SampleRule::new(probability, options.sample_seed));
    let reuses_fingerprints = nodes.is_none() && sample.is_none();
    let reusable_cache = cache.as_deref().filter(|_| reuses_fingerprints);
    let scan = scan::Scan { host, scope: &scope, hasher, nodes, progress, stop, sample, cache: reusable_cache };
    let PassResults { duplicates, failures, was_read_twice, reread } = run_passes(&threads, &scan, &mut index, options);
    let partial = stop.load(Ordering::Relaxed);

    let unread: BTreeSet<usize> = failures.iter().map(|(subject, _)| *subject).collect();
    tally::record_unread(&mut scope, failures);
    let rule = content_groups::MergeRule { sharing, across_domains: options.across_domains };
    let groups = threads.install(|| {
        let foreign = cache.as_ref().map(|cache| cache.inactive_foreign_contents(&scope)).unwrap_or_default();
        content_groups::classify_pages(&mut index, &scope, &duplicates, rule, &foreign, options.max_top_contents)
    });
    drop(duplicates);
    let index_bytes = index.memory_bytes();
    if let Some(cache) = &mut cache {
        let is_partial = partial || options.sample_probability.is_some();
        threads.install(|| cache.record_census(&scope, &mut index, &unread, (is_partial, reuses_fingerprints)));
    }
    let page_size = host.page_size();
    let criteria = range_selection::SelectionCriteria {
        sharing,
        costs: options.costs.unwrap_or_else(|| EnrollCostBytes::for_page_size(page_size)),
        page_size,
        huge_page_size: huge_page_size(host),
        across_domains: options.across_domains,
        max_map_count: options.max_map_count,
    };
    let tally_options = tally::TallyOptions {
        criteria,
        max_matrix_rows: options.max_matrix_rows,
        matrix_row_kind: options.matrix_row_kind,
    };
    let mut census = threads.install(|| tally::tally_census(scope, &index, &groups, &tally_options));
    census.contents = tally::identify_top_contents(host, &index, hasher, &groups, &census);
    census.wall_seconds = elapsed_since(host, started).as_secs_f64();
    census.bytes_read = progress.bytes_read();
    // The size of the full index, of which entries may have been dropped since.
    census.index_bytes = index_bytes;
    census.pass_interval = was_read_twice.then_some(options.pass_interval);
    census.reread = reread;
    census.nodes_unknown = nodes_unknown;
    census.partial = partial;
    census.sample_probability = options.sample_probability;
    census.fingerprint_implementation = hasher.implementation();
    Ok((census, index))
}

/// The result of reading all pages.
struct PassResults {
    /// The contents that several pages may have.
    duplicates: DuplicateFilter,
    /// The subjects that could not be read, with the reason.
    failures: Vec<(usize, Absent)>,
    /// Whether pages were read twice, without a stop.
    was_read_twice: bool,
    /// Pages that the second pass read.
    reread: Pages,
}

/// Reads the pages of the index, and again after the interval, if there is one. The calling thread sleeps in between, so
/// that time passes on a simulated host.
fn run_passes(
    threads: &rayon::ThreadPool,
    scan: &scan::Scan<'_>,
    index: &mut PageIndex,
    options: &CensusOptions,
) -> PassResults {
    let (host, stop) = (scan.host, scan.stop);
    let started = host.now();
    let only_candidates = options.second_pass == SecondPass::Candidates;
    let activity_before = if only_candidates { read_activity(host, scan.scope) } else { Vec::new() };
    let mut failures = index.unlisted_subjects().to_vec();
    failures.extend(threads.install(|| scan.first_pass(index)));
    let (duplicates, further_failures) = threads.install(|| scan.build_duplicate_filter(index));
    failures.extend(further_failures);
    let mut results = PassResults { duplicates, failures, was_read_twice: false, reread: Pages::ZERO };
    if options.pass_interval.is_zero() {
        return results;
    }
    sleep_unless_stopped(host, options.pass_interval.saturating_sub(elapsed_since(host, started)), stop);
    if stop.load(Ordering::Relaxed) {
        return results;
    }
    let activity_now = if only_candidates { read_activity(host, scan.scope) } else { Vec::new() };
    let is_inactive = |subject: usize| {
        let activity = (activity_before.get(subject), activity_now.get(subject));
        matches!(activity, (Some(Ok(before)), Some(Ok(now))) if before == now)
    };
    let candidates = only_candidates.then_some(&results.duplicates);
    let second_pass = threads.install(|| scan.second_pass(index, candidates, &is_inactive));
    results.failures.extend(second_pass.failures);
    results.reread = second_pass.pages_read;
    results.was_read_twice = !stop.load(Ordering::Relaxed);
    results
}

/// The activity of each process so far.
fn read_activity(host: &dyn Host, scope: &ScanScope) -> Vec<Reading<ActivityCounters>> {
    let read = |id: ProcessId| ActivityCounters::read_exact(host, &*hold(host, id)?);
    scope.subjects.iter().map(|subject| read(subject.process.id)).collect()
}

/// The bytes of a huge page of the PMD level. If the host does not report it, 512 base pages, as on x86-64.
pub fn huge_page_size(host: &dyn Host) -> PageSize {
    observe::huge_page_bytes(host)
        .ok()
        .and_then(PageSize::new)
        .or_else(|| PageSize::new(host.page_size().bytes() * 512))
        .unwrap_or(host.page_size())
}

/// Sleeps, and wakes up soon after `stop` is set.
fn sleep_unless_stopped(host: &dyn Host, time: Duration, stop: &AtomicBool) {
    let end = host.now() + time;
    while let Some(remaining) = end.checked_duration_since(host.now()).filter(|remaining| !remaining.is_zero()) {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        host.sleep(remaining.min(Duration::from_millis(20)));
    }
}
