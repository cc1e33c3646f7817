//! From page contents to fingerprints, to groups of equal pages, to what merging them would save.
//!
//! A census has five steps, each a module:
//!
//! 1. [`survey`] opens the chosen processes, reads their regions and decides region by region whether KSM could take
//!    its pages and how they may be read.
//! 2. [`index`] lists the resident pages and gives each an ordinal: processes in the order of their trust domains,
//!    pages in the order of their addresses.
//! 3. [`scan`] reads the pages in parallel and puts a fingerprint for each into the index; a second pass marks what
//!    changed.
//! 4. [`group`] sorts the fingerprints. Equal ones lie side by side, ordered by domain and process, so one walk over
//!    them classifies every page.
//! 5. [`tally`] walks the pages in address order and counts: by region, process, extent and content.
//!
//! Memory is 13 bytes for each page (12 for the fingerprint and ordinal, one for the class) and 8 for each run of pages
//! that lie behind one another, so at most 21. A page whose frame an earlier one has, since a fork, takes 8 more, and where
//! NUMA nodes are kept apart each takes one more. While pages are listed, the runs of the processes in hand take 16 each
//! beside it. Nothing is written anywhere.

#![forbid(unsafe_code)]

pub mod group;
pub mod index;
pub mod pages;
pub mod scan;
pub mod survey;
pub mod tally;

pub use index::Index;
pub use scan::Progress;
pub use survey::{Selection, Survey};

use pagefold_host::{Host, observe};
use pagefold_model::census::Census;
use pagefold_model::domain::Domains;
use pagefold_model::savings::{Costs, Sharing};
use pagefold_model::{Absent, PageSize};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

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
    #[error("malformed pattern for process names")]
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
    let started = Instant::now();
    let threads = rayon::ThreadPoolBuilder::new().num_threads(options.threads).build()?;
    let mut survey = threads.install(|| survey::survey(host, &options.selection, &options.domains))?;
    let sharing = observe::ksm(host).map(|ksm| Sharing::of(&ksm)).unwrap_or_default();
    let nodes = if sharing.across_nodes { None } else { observe::Nodes::observe(host).ok() };
    let nodes = nodes.filter(|nodes| nodes.count() > 1);
    let nodes_unknown = nodes.is_some() && host.frame_flags(&[]).is_err();
    let hasher = pagefold_sys::fingerprint::Hasher::random(host.page_size().as_len()).map_err(Error::Key)?;

    let mut index = threads.install(|| Index::list(host, &survey, nodes.is_some()))?;
    progress.expect(index.pages() as u64 * if options.settle.is_zero() { 1 } else { 2 });
    let sample = options.sample.map(|probability| scan::SampleRule::new(probability, options.seed));
    let scan = scan::Scan { host, survey: &survey, hasher: &hasher, nodes, progress, stop, sample };
    let first = Instant::now();
    let mut failures = index.unlisted().to_vec();
    failures.extend(threads.install(|| scan.first_pass(&mut index)));
    let mut settled = false;
    if !options.settle.is_zero() {
        wait(options.settle.saturating_sub(first.elapsed()), stop);
        if !stop.load(Ordering::Relaxed) {
            failures.extend(threads.install(|| scan.second_pass(&index)));
            settled = !stop.load(Ordering::Relaxed);
        }
    }
    let partial = stop.load(Ordering::Relaxed);

    tally::note_unread(&mut survey, failures);
    let groups = threads.install(|| group::classify(&mut index, &survey, sharing, options.top));
    let plan = tally::Plan {
        sharing,
        costs: Costs::default(),
        huge_pages: huge_page_len(host),
        rows: options.rows,
        matrix: options.matrix,
    };
    let mut census = threads.install(|| tally::tally(survey, &index, &groups, &plan));
    census.contents = tally::contents(host, &index, &hasher, &groups, &census);
    census.seconds = started.elapsed().as_secs_f64();
    census.bytes_read = progress.bytes_read();
    census.settle = settled.then_some(options.settle);
    census.nodes_unknown = nodes_unknown;
    census.partial = partial;
    census.sample = options.sample;
    census.implementation = hasher.implementation();
    Ok((census, index))
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
