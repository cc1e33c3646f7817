//! One census in a process of its own, so that its peak memory can be told from what came before.
//!
//! Started as `measure ORDER`; answers with an [`Outcome`] in JSON. The whole is [`pagefold_census::take`]; with
//! [`Order::phases`] its steps are called one by one instead, to see where the time goes.

use anyhow::{Context, Result, ensure};
use pagefold_base::domain::DomainRule;
use pagefold_base::savings::{Costs, Sharing};
use pagefold_base::{PageSize, Pid};
use pagefold_census::scan::{Progress, Scan};
use pagefold_census::witnesses::Elsewhere;
use pagefold_census::{DEFAULT_MAX_MAP_COUNT, Index, Options, Selection, choose, group, survey, tally};
use pagefold_host::Host;
use pagefold_linux::LiveHost;
use pagefold_sys::fingerprint::Hasher;
use serde::{Deserialize, Serialize};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// What to take a census of, and how.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Order {
    /// Which processes.
    pub pids: Vec<u32>,
    /// With how many threads.
    pub threads: usize,
    /// Whether to time the steps.
    pub phases: bool,
}

/// What came of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// Wall time in seconds.
    pub seconds: f64,
    /// CPU time of all threads, user and system, in seconds.
    pub cpu_seconds: f64,
    /// Pages in the index.
    pub pages: u64,
    /// Bytes the index takes.
    pub index_bytes: u64,
    /// By how many bytes the peak of resident memory (`VmHWM`) lies above what was resident before.
    pub peak_bytes: u64,
    /// Seconds of the steps, in their order; empty if they were not timed.
    pub phases: Vec<(String, f64)>,
}

/// Pages, bytes of the index, and seconds of the steps.
type Counted = (usize, usize, Vec<(String, f64)>);

impl Order {
    /// Have it done by a child, and wait.
    pub fn run(&self) -> Result<Outcome> {
        let output = Command::new(std::env::current_exe()?)
            .args(["measure", &serde_json::to_string(self)?])
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .context("cannot start a census")?;
        ensure!(output.status.success(), "a census failed: {}", output.status);
        serde_json::from_slice(&output.stdout).context("a census gave no answer")
    }

    /// Do it here.
    pub fn carry_out(&self) -> Result<Outcome> {
        let host = LiveHost::new();
        let before = memory_line("VmRSS:")?;
        let cpu = cpu_seconds();
        let started = Instant::now();
        let (pages, index_bytes, phases) = if self.phases { self.steps(&host)? } else { self.whole(&host)? };
        let seconds = started.elapsed().as_secs_f64();
        Ok(Outcome {
            seconds,
            cpu_seconds: cpu_seconds() - cpu,
            pages: pages as u64,
            index_bytes: index_bytes as u64,
            peak_bytes: memory_line("VmHWM:")?.saturating_sub(before),
            phases,
        })
    }

    fn selection(&self) -> Selection {
        Selection { pids: self.pids.iter().map(|&pid| Pid(pid)).collect(), ..Selection::default() }
    }

    fn whole(&self, host: &LiveHost) -> Result<Counted> {
        let options = Options {
            selection: self.selection(),
            domains: DomainRule::User.into(),
            settle: Duration::ZERO,
            threads: self.threads,
            sample: None,
            seed: 0,
            top: 10,
            rows: 10,
            matrix: tally::Party::Process,
            ..Options::default()
        };
        let (census, index) = pagefold_census::take(host, &options, &Progress::default(), &AtomicBool::new(false))?;
        ensure!(census.unseen.is_empty(), "the census did not see {} processes", census.unseen.len());
        Ok((index.pages(), census.index_bytes, Vec::new()))
    }

    /// The steps of [`pagefold_census::take`] on a host that merges across nodes.
    fn steps(&self, host: &LiveHost) -> Result<Counted> {
        let mut phases = Vec::new();
        let mut last = Instant::now();
        let mut lap = |name: &str| {
            let now = Instant::now();
            phases.push((name.to_owned(), (now - last).as_secs_f64()));
            last = now;
        };
        let threads = rayon::ThreadPoolBuilder::new().num_threads(self.threads).build()?;
        let survey =
            threads.install(|| survey::survey(host, &self.selection(), &DomainRule::User.into(), &[], None))?;
        lap("survey");
        let mut index = threads.install(|| Index::list(host, &survey, false))?;
        lap("list");
        let hasher = Hasher::random(host.page_size().as_len())?;
        let (progress, stop) = (Progress::default(), AtomicBool::new(false));
        let scan = Scan {
            host,
            survey: &survey,
            hasher: &hasher,
            nodes: None,
            progress: &progress,
            stop: &stop,
            sample: None,
            remembered: None,
        };
        let failures = threads.install(|| scan.first_pass(&mut index));
        ensure!(failures.is_empty(), "not all was read: {failures:?}");
        lap("read");
        let sharing = Sharing::default();
        let rule = group::Rule { sharing, across_domains: false };
        let groups = threads.install(|| {
            let (pairs, _) = scan.pairs(&mut index);
            group::classify(&mut index, &survey, &pairs, rule, &Elsewhere::default(), 10)
        });
        lap("group");
        let huge_pages = PageSize::new(host.page_size().bytes() * 512).context("the size of a huge page")?;
        let terms = choose::Terms {
            sharing,
            costs: Costs::of(host.page_size()),
            page_size: host.page_size(),
            huge_pages,
            across_domains: false,
            max_map_count: DEFAULT_MAX_MAP_COUNT,
        };
        let plan = tally::Plan { terms, rows: 10, matrix: tally::Party::Process };
        let census = threads.install(|| tally::tally(survey, &index, &groups, &plan));
        lap("tally");
        Ok((index.pages(), census.index_bytes, phases))
    }
}

/// CPU time of this process so far.
pub fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// A line of `/proc/self/status` that is given in kB, in bytes.
fn memory_line(name: &str) -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let amount: Option<u64> =
        status.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix("kB")?.trim().parse().ok());
    Ok(amount.with_context(|| format!("no {name} in /proc/self/status"))? << 10)
}
