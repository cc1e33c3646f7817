//! From page contents to fingerprints, to groups of equal pages, to what merging them would save.
//!
//! A census has five steps:
//!
//! 1. [`survey`] opens the chosen processes, reads their regions and decides region by region whether KSM could take
//!    its pages and how they may be read.
//! 2. [`index`] lists the resident pages and gives each an ordinal: processes in the order of their trust domains,
//!    pages in the order of their addresses.
//! 3. [`scan`] reads the pages in parallel and puts a fingerprint for each into the index, but for those of which it is
//!    remembered what they hold; a second pass marks what changed.
//! 4. [`group`] sorts the fingerprints, after [`pairs`] has told most of those that have no partner. Equal ones lie
//!    side by side, ordered by domain and process, so one walk over them classifies every page.
//! 5. [`tally`] walks the pages in address order and counts: by region, process, extent and content. Before that,
//!    [`choose`] finds the ranges that are worth enrolling.
//!
//! Memory is 13 bytes for each page (12 for the fingerprint and ordinal, one for the class) and 8 for each run of pages
//! that lie behind one another, so at most 21. A page whose frame an earlier one has, since a fork, takes 8 more, and
//! where NUMA nodes are kept apart each takes one more. While pages are listed, the runs of the processes in hand take
//! 16 each beside it; while they are grouped, each page takes at most 12 more. Nothing is written anywhere.
//!
//! # Trust domains
//!
//! Without [`Options::across_domains`] a content that lies in several domains is covered in one of them at most: in
//! none of the chosen ones if somebody who is not chosen has it enrolled ([`Options::enrolled`]). That keeps apart what
//! is equal when the census is taken, and promises nothing for later: two covered pages of different domains whose
//! contents become equal afterwards are merged while ksmd runs, and so are pages that programs enrolled themselves,
//! whatever is chosen here. Who takes censuses again and again need not read everybody for that each time
//! ([`witnesses`]), nor of who is chosen all that has not changed: [`take_again`].

#![forbid(unsafe_code)]

pub mod choose;
pub mod decide;
pub mod group;
pub mod index;
pub mod pairs;
#[cfg(feature = "parquet")]
pub mod parquet;
mod recall;
pub mod results;
pub mod scan;
mod sketches;
pub mod survey;
pub mod tally;
pub mod text;
pub mod wire;
pub mod witnesses;

pub use index::Index;
/// The key of fingerprints: equal only under one.
pub use pagefold_sys::fingerprint::Hasher;
pub use scan::Progress;
pub use survey::{Selection, Survey};
pub use witnesses::Witnesses;

use crate::decide::sketch::Held;
use crate::results::Census;
use pagefold_base::domain::Domains;
use pagefold_base::savings::{Costs, Sharing};
use pagefold_base::{Absent, PageSize, Pages, ProcessId, Reading};
use pagefold_host::{Host, observe};
use recall::Recall;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use witnesses::Elsewhere;

/// How a census is taken.
#[derive(Clone, Debug)]
pub struct Options {
    /// Which processes.
    pub selection: Selection,
    /// How they are sorted into trust domains.
    pub domains: Domains,
    /// Pause between the two passes; zero for one pass, which finds no volatile pages.
    pub settle: Duration,
    /// Threads that read.
    pub threads: usize,
    /// The probability with which each page is looked at; `None` for all.
    pub sample: Option<f64>,
    /// Seed of the sample.
    pub seed: u64,
    /// How many of the most frequent contents to tell.
    pub top: usize,
    /// Rows of the sharing matrix at most.
    pub rows: usize,
    /// Who they are.
    pub matrix: tally::Party,
    /// Which pages the second pass reads.
    pub second: Second,
    /// The costs by which guided enrolment chooses; `None` for those of the page size ([`Costs::of`]).
    pub costs: Option<Costs>,
    /// Whether guided enrolment may merge pages of different trust domains.
    pub across_domains: bool,
    /// Processes that are enrolled, chosen or not: what they hold in other trust domains is not to be merged with.
    /// Nothing of them is counted beside it.
    pub enrolled: Vec<ProcessId>,
    /// Regions that a process may have (`vm.max_map_count`).
    pub max_map_count: u64,
    /// Whether pages of zeros will be mapped to the kernel's page of zeros, whatever `use_zero_pages` says now.
    pub use_zero_pages: bool,
}

/// Which pages are read in the second pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Second {
    /// All: every volatile page is found.
    #[default]
    All,
    /// Those that have anything to gain, duplicates and zeros, and of the others those few that [`pairs`] cannot tell
    /// from them. Other pages are unique, whether they change or not. Of a process none of whose threads ran since
    /// before the first pass nothing is read again: what devices and kernel threads write for it is left to ksmd, which
    /// merges only what it has found unchanged itself.
    Candidates,
}

/// `vm.max_map_count` when nothing else is known (include/linux/mm.h, `DEFAULT_MAX_MAP_COUNT`).
pub const DEFAULT_MAX_MAP_COUNT: u64 = 65530;

impl Default for Options {
    /// All processes by user, read once, on one thread.
    fn default() -> Self {
        Self {
            selection: Selection::default(),
            domains: Domains::default(),
            settle: Duration::ZERO,
            threads: 1,
            sample: None,
            seed: 0,
            top: 0,
            rows: 0,
            matrix: tally::Party::default(),
            second: Second::default(),
            costs: None,
            across_domains: false,
            max_map_count: DEFAULT_MAX_MAP_COUNT,
            use_zero_pages: false,
            enrolled: Vec::new(),
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
    Key(#[source] std::io::Error),
    /// The threads could not be started.
    #[error("cannot start the reading threads")]
    Threads(#[from] rayon::ThreadPoolBuildError),
}

/// Take a census. `stop` ends it early: what was seen so far is counted and the result is marked partial.
pub fn take(
    host: &dyn Host,
    options: &Options,
    progress: &Progress,
    stop: &AtomicBool,
) -> Result<(Census, Index), Error> {
    let hasher = Hasher::random(host.page_size().as_len()).map_err(Error::Key)?;
    take_under(&hasher, host, options, progress, stop)
}

/// Take a census whose fingerprints can be compared with those of others under the same key.
pub fn take_under(
    hasher: &Hasher,
    host: &dyn Host,
    options: &Options,
    progress: &Progress,
    stop: &AtomicBool,
) -> Result<(Census, Index), Error> {
    census(None, hasher, host, options, progress, stop)
}

/// What is remembered from census to census under one key.
pub struct Remembered {
    witnesses: Witnesses,
    recall: Recall,
    held: BTreeMap<ProcessId, Held>,
}

impl Remembered {
    /// Nothing yet.
    pub fn new(now: Instant) -> Self {
        Self { witnesses: Witnesses::new(now), recall: Recall::new(now), held: BTreeMap::new() }
    }

    /// How many pages of a process the last census has not read, since it was remembered what they held.
    pub fn spared(&self, process: ProcessId) -> Pages {
        self.recall.spared(process)
    }

    /// Take the sample of what everybody held in the last census whose pages could be listed, witnesses apart.
    pub fn take_held(&mut self) -> BTreeMap<ProcessId, Held> {
        std::mem::take(&mut self.held)
    }

    /// Forget the processes that do not fit. Of witnesses those are forgotten that are not enrolled when a census begins.
    pub fn retain(&mut self, fits: impl Fn(ProcessId) -> bool) {
        self.recall.retain(fits);
    }
}

/// Take a census, at a time that is given, in which nothing is read that need not be by what is remembered from those
/// before, which were under the same key: nobody for what it has enrolled alone, and of those who are chosen little of
/// what has not changed. What changes each time is counted as volatile unread. The index is without the contents that no
/// two pages have, as after [`Index::forget_unpaired`].
pub fn take_again(
    (remembered, now): (&mut Remembered, Instant),
    hasher: &Hasher,
    host: &dyn Host,
    options: &Options,
    progress: &Progress,
    stop: &AtomicBool,
) -> Result<(Census, Index), Error> {
    remembered.witnesses.begin(now, &options.enrolled);
    remembered.recall.begin(now);
    census(Some(remembered), hasher, host, options, progress, stop)
}

fn census(
    mut remembered: Option<&mut Remembered>,
    hasher: &Hasher,
    host: &dyn Host,
    options: &Options,
    progress: &Progress,
    stop: &AtomicBool,
) -> Result<(Census, Index), Error> {
    let started = Instant::now();
    let threads = rayon::ThreadPoolBuilder::new().num_threads(options.threads).build()?;
    let known = remembered.as_ref().map(|known| &known.witnesses);
    let mut survey =
        threads.install(|| survey::survey(host, &options.selection, &options.domains, &options.enrolled, known))?;
    let mut sharing = observe::ksm(host).map(|ksm| Sharing::of(&ksm)).unwrap_or_default();
    sharing.use_zero_pages |= options.use_zero_pages;
    let nodes = if sharing.across_nodes { None } else { observe::Nodes::observe(host).ok() };
    let nodes = nodes.filter(|nodes| nodes.count() > 1);
    let nodes_unknown = nodes.is_some() && host.frame_flags(&[]).is_err();

    let mut index = threads.install(|| Index::list(host, &survey, nodes.is_some()))?;
    progress.expect(index.pages() as u64 * if options.settle.is_zero() { 1 } else { 2 });
    let sample = options.sample.map(|probability| scan::SampleRule::new(probability, options.seed));
    let recalls = nodes.is_none() && sample.is_none();
    let earlier = remembered.as_deref().filter(|_| recalls);
    let scan = scan::Scan { host, survey: &survey, hasher, nodes, progress, stop, sample, remembered: earlier };
    let first = Instant::now();
    let ran_before = if options.second == Second::Candidates { cpu_times(host, &survey) } else { Vec::new() };
    let mut failures = index.unlisted().to_vec();
    failures.extend(threads.install(|| scan.first_pass(&mut index)));
    let (pairs, more) = threads.install(|| scan.pairs(&mut index));
    failures.extend(more);
    let (mut settled, mut reread) = (false, Pages::ZERO);
    if !options.settle.is_zero() {
        wait(options.settle.saturating_sub(first.elapsed()), stop);
        if !stop.load(Ordering::Relaxed) {
            let candidates = (options.second == Second::Candidates).then_some(&pairs);
            let ran_since = if candidates.is_some() { cpu_times(host, &survey) } else { Vec::new() };
            let rested = |subject: usize| matches!((ran_before.get(subject), ran_since.get(subject)), (Some(Ok(a)), Some(Ok(b))) if a == b);
            let again = threads.install(|| scan.second_pass(&index, candidates, &rested));
            failures.extend(again.failures);
            reread = again.pages;
            settled = !stop.load(Ordering::Relaxed);
        }
    }
    let partial = stop.load(Ordering::Relaxed);

    let unread: BTreeSet<usize> = failures.iter().map(|(subject, _)| *subject).collect();
    tally::note_unread(&mut survey, failures);
    let rule = group::Rule { sharing, across_domains: options.across_domains };
    let elsewhere = remembered.as_ref().map(|known| threads.install(|| Elsewhere::of(&survey, &known.witnesses)));
    let elsewhere = elsewhere.unwrap_or_default();
    let groups = threads.install(|| group::classify(&mut index, &survey, &pairs, rule, &elsewhere, options.top));
    drop((pairs, elsewhere));
    let index_bytes = index.bytes();
    if let Some(remembered) = &mut remembered {
        remembered.held = threads.install(|| sketches::sketches(&survey, &index));
        let is_noted = !partial && sample.is_none();
        if is_noted {
            threads.install(|| remembered.witnesses.note(&survey, &index, &unread));
        }
        // Last, since it lets go of what the others ask for.
        if is_noted && recalls {
            remembered.recall.note(&survey, &mut index, &unread);
        }
        index.forget_unpaired();
    }
    let page_size = host.page_size();
    let terms = choose::Terms {
        sharing,
        costs: options.costs.unwrap_or_else(|| Costs::of(page_size)),
        page_size,
        huge_pages: huge_page_len(host),
        across_domains: options.across_domains,
        max_map_count: options.max_map_count,
    };
    let plan = tally::Plan { terms, rows: options.rows, matrix: options.matrix };
    let mut census = threads.install(|| tally::tally(survey, &index, &groups, &plan));
    census.contents = tally::contents(host, &index, hasher, &groups, &census);
    census.seconds = started.elapsed().as_secs_f64();
    census.bytes_read = progress.bytes_read();
    // Of all of it, part of which may be let go of by now.
    census.index_bytes = index_bytes;
    census.settle = settled.then_some(options.settle);
    census.reread = reread;
    census.nodes_unknown = nodes_unknown;
    census.partial = partial;
    census.sample = options.sample;
    census.implementation = hasher.implementation();
    Ok((census, index))
}

/// The CPU time that each process has used.
fn cpu_times(host: &dyn Host, survey: &Survey) -> Vec<Reading<u64>> {
    let time = |id: ProcessId| {
        let handle = host.open(id.pid)?;
        if handle.id() == id { observe::cpu_time(host, &*handle) } else { Err(Absent::Vanished) }
    };
    survey.subjects.iter().map(|subject| time(subject.process.id)).collect()
}

/// The bytes of a huge page of the PMD level; 512 base pages where the host does not tell, as on x86-64.
fn huge_page_len(host: &dyn Host) -> PageSize {
    observe::huge_page_bytes(host)
        .ok()
        .and_then(PageSize::new)
        .or_else(|| PageSize::new(host.page_size().bytes() * 512))
        .unwrap_or(host.page_size())
}

/// Sleep, and wake up soon after `stop` is set.
fn wait(time: Duration, stop: &AtomicBool) {
    let end = Instant::now() + time;
    while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        std::thread::sleep(left.min(Duration::from_millis(20)));
    }
}
