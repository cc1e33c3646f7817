//! Runs one census in a process of its own, so that its peak memory is not mixed with earlier allocations.
//!
//! Started as `measure ORDER`; prints a [`CensusMeasurement`] in JSON. It calls [`pagefold_census::take_census`]; with
//! [`CensusJob::phases`] it calls the steps one by one instead, to time each step.

use anyhow::{Context, Result, ensure};
use pagefold_base::domain::DomainRule;
use pagefold_base::savings::{EnrollCostBytes, SharingSettings};
use pagefold_base::{PageSize, Pid};
use pagefold_census::foreign_processes::ForeignContents;
use pagefold_census::scan::{Scan, ScanProgress};
use pagefold_census::{
    CensusOptions, DEFAULT_MAX_MAP_COUNT, PageIndex, ProcessSelection, content_groups, range_selection, scan_scope,
    tally,
};
use pagefold_host::Host;
use pagefold_linux::LiveHost;
use pagefold_sys::fingerprint::Hasher;
use serde::{Deserialize, Serialize};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// A census to measure.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CensusJob {
    /// The processes to scan.
    pub pids: Vec<u32>,
    /// The number of threads.
    pub threads: usize,
    /// Whether to time the steps.
    pub phases: bool,
}

/// The measurements of a census.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CensusMeasurement {
    /// Wall time in seconds.
    pub seconds: f64,
    /// CPU time of all threads, user and system, in seconds.
    pub cpu_seconds: f64,
    /// Pages in the index.
    pub pages: u64,
    /// Bytes the index takes.
    pub index_bytes: u64,
    /// Peak resident memory (`VmHWM`) minus resident memory at the start, in bytes.
    pub peak_bytes: u64,
    /// Seconds of each step, in order; empty if the steps were not timed.
    pub phases: Vec<(String, f64)>,
}

/// Pages, bytes of the index, and seconds of the steps.
type IndexCountsAndPhases = (usize, usize, Vec<(String, f64)>);

impl CensusJob {
    /// Run the census in a child process and wait for it.
    pub fn run_in_child(&self) -> Result<CensusMeasurement> {
        let output = Command::new(std::env::current_exe()?)
            .args(["measure", &serde_json::to_string(self)?])
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .context("cannot start a census")?;
        ensure!(output.status.success(), "a census failed: {}", output.status);
        serde_json::from_slice(&output.stdout).context("a census printed no result")
    }

    /// Run the census in this process.
    pub fn run_here(&self) -> Result<CensusMeasurement> {
        let host = LiveHost::new();
        let before = status_bytes("VmRSS:")?;
        let cpu = cpu_seconds();
        let started = Instant::now();
        let (pages, index_bytes, phases) =
            if self.phases { self.take_census_by_steps(&host)? } else { self.take_whole_census(&host)? };
        let seconds = started.elapsed().as_secs_f64();
        Ok(CensusMeasurement {
            seconds,
            cpu_seconds: cpu_seconds() - cpu,
            pages: pages as u64,
            index_bytes: index_bytes as u64,
            peak_bytes: status_bytes("VmHWM:")?.saturating_sub(before),
            phases,
        })
    }

    fn process_selection(&self) -> ProcessSelection {
        ProcessSelection { pids: self.pids.iter().map(|&pid| Pid(pid)).collect(), ..ProcessSelection::default() }
    }

    fn take_whole_census(&self, host: &LiveHost) -> Result<IndexCountsAndPhases> {
        let options = CensusOptions {
            selection: self.process_selection(),
            domains: DomainRule::User.into(),
            pass_interval: Duration::ZERO,
            threads: self.threads,
            sample_probability: None,
            sample_seed: 0,
            max_top_contents: 10,
            max_matrix_rows: 10,
            matrix_row_kind: tally::MatrixRowKind::Process,
            ..CensusOptions::default()
        };
        let (census, index) =
            pagefold_census::take_census(host, &options, &ScanProgress::default(), &AtomicBool::new(false))?;
        ensure!(census.unscanned.is_empty(), "the census could not scan {} processes", census.unscanned.len());
        Ok((index.page_count(), census.index_bytes, Vec::new()))
    }

    /// The steps of [`pagefold_census::take_census`] on a host that merges across nodes.
    fn take_census_by_steps(&self, host: &LiveHost) -> Result<IndexCountsAndPhases> {
        let mut phases = Vec::new();
        let mut last = Instant::now();
        let mut lap = |name: &str| {
            let now = Instant::now();
            phases.push((name.to_owned(), (now - last).as_secs_f64()));
            last = now;
        };
        let threads = rayon::ThreadPoolBuilder::new().num_threads(self.threads).build()?;
        let survey = threads.install(|| {
            scan_scope::determine_scope(host, &self.process_selection(), &DomainRule::User.into(), &[], None)
        })?;
        lap("survey");
        let mut index = threads.install(|| PageIndex::build(host, &survey, false))?;
        lap("list");
        let hasher = Hasher::with_random_key(host.page_size().as_len())?;
        let (progress, stop) = (ScanProgress::default(), AtomicBool::new(false));
        let scan = Scan {
            host,
            scope: &survey,
            hasher: &hasher,
            nodes: None,
            progress: &progress,
            stop: &stop,
            sample: None,
            cache: None,
        };
        let failures = threads.install(|| scan.first_pass(&mut index));
        ensure!(failures.is_empty(), "the census could not read all pages: {failures:?}");
        lap("read");
        let sharing = SharingSettings::default();
        let rule = content_groups::MergeRule { sharing, across_domains: false };
        let groups = threads.install(|| {
            let (pairs, _) = scan.build_duplicate_filter(&mut index);
            content_groups::classify_pages(&mut index, &survey, &pairs, rule, &ForeignContents::default(), 10)
        });
        lap("group");
        let huge_pages = PageSize::new(host.page_size().bytes() * 512).context("the huge page size is invalid")?;
        let terms = range_selection::SelectionCriteria {
            sharing,
            costs: EnrollCostBytes::for_page_size(host.page_size()),
            page_size: host.page_size(),
            huge_page_size: huge_pages,
            across_domains: false,
            max_map_count: DEFAULT_MAX_MAP_COUNT,
        };
        let plan = tally::TallyOptions {
            criteria: terms,
            max_matrix_rows: 10,
            matrix_row_kind: tally::MatrixRowKind::Process,
        };
        let census = threads.install(|| tally::tally_census(survey, &index, &groups, &plan));
        lap("tally");
        Ok((index.page_count(), census.index_bytes, phases))
    }
}

/// CPU time of this process so far.
pub fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Bytes of a line in `/proc/self/status` that is in kB.
fn status_bytes(name: &str) -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let amount: Option<u64> =
        status.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix("kB")?.trim().parse().ok());
    Ok(amount.with_context(|| format!("no {name} in /proc/self/status"))? << 10)
}
