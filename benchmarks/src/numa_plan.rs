//! Plans for generated hosts at default prices: how long the search takes, how far it is from the optimum, and what simple
//! placements read remotely.

use crate::BenchmarkEffort;
use crate::findings::{Findings, MarkdownTable, SampleSpread, ThresholdCheck};
use anyhow::Result;
use pagefold_numa::decide::plan::baselines::{self, Baseline};
use pagefold_numa::decide::plan::generated::{PUBLISHED_SIZES, at_default_prices, generated_hosts, published_host};
use pagefold_numa::decide::plan::{self, PlacementProblem};
use std::time::{Duration, Instant};

const MAX_SECONDS: f64 = 5.0;
const MAX_GAP: f64 = 0.02;

/// The least number of machines of a generated host.
const MIN_MACHINES: usize = 5;

const BYTES_PER_PAGE: f64 = 4096.0;
const BYTES_PER_GIB: f64 = (1 << 30) as f64;

/// Target: what is remote by the plan, relative to what is remote by numad.
const MAX_REMOTE_RATIO: f64 = 0.7;

/// What is remote by the plan and by numad, over hosts.
#[derive(Clone, Copy, Debug, Default)]
pub struct RemoteComparison {
    /// By the plan, on all hosts.
    pub by_plan: f64,
    /// By numad, on all hosts.
    pub by_numad: f64,
    hosts: usize,
    /// Hosts on which the plan has no more.
    not_more: usize,
    /// Hosts on which numad leaves something remote.
    comparable: usize,
    /// Those of them on which the plan reaches the target.
    within_ratio: usize,
}

impl RemoteComparison {
    /// Adds a host.
    pub fn add(&mut self, by_plan: f64, by_numad: f64) {
        // Sums of shares are not exact.
        let is_at_most = |limit: f64| by_plan <= limit + MAX_ROUNDING_PAGES;
        self.by_plan += by_plan;
        self.by_numad += by_numad;
        self.hosts += 1;
        self.not_more += usize::from(is_at_most(by_numad));
        if by_numad > MAX_ROUNDING_PAGES {
            self.comparable += 1;
            self.within_ratio += usize::from(is_at_most(MAX_REMOTE_RATIO * by_numad));
        }
    }

    /// The targets. `what` is remote, and `numad` is the heuristic or the real program.
    pub fn checks(&self, what: &str, numad: &str) -> [ThresholdCheck; 3] {
        let Self { by_plan, by_numad, hosts, not_more, comparable, within_ratio } = *self;
        let check = |claim: String, measured: String, met: bool| ThresholdCheck { claim, measured, met };
        [
            check(
                format!("in all, at most {MAX_REMOTE_RATIO} of the {what} by {numad}"),
                format!("{:.4}", by_plan / by_numad),
                by_plan <= MAX_REMOTE_RATIO * by_numad,
            ),
            check(
                format!("the same on each host on which {numad} leaves {what}"),
                format!("{within_ratio} of {comparable} hosts"),
                within_ratio == comparable,
            ),
            check(
                format!("no host has more {what} than by {numad}"),
                format!("{not_more} of {hosts} hosts"),
                not_more == hosts,
            ),
        ]
    }
}

/// Differences of sums of pages that count as rounding.
const MAX_ROUNDING_PAGES: f64 = 0.5;

/// Run the measurement.
pub fn measure(effort: BenchmarkEffort) -> Result<Findings> {
    let generated = generated_hosts().filter(|problem| problem.vms.len() >= MIN_MACHINES);
    let published = PUBLISHED_SIZES.iter().map(|&(count, vcpus)| published_host(count, vcpus));
    let hosts: Vec<PlacementProblem> = published.chain(generated).map(at_default_prices).collect();
    let hosts = &hosts[..if effort.quick { 4 } else { hosts.len() }];
    let placements = ["plan"].into_iter().chain(Baseline::ALL.map(Baseline::name));
    let columns: String = ["reads", "pages"]
        .into_iter()
        .flat_map(|what| placements.clone().map(move |name| format!(",{}_remote_{what}", name.replace(' ', "_"))))
        .collect();
    let mut findings =
        Findings::new(&format!("host,nodes,machines,seconds,gap,excess_vcpus,numad_excess_vcpus{columns}"));
    let (mut seconds, mut gaps, mut remote) = (Vec::new(), Vec::new(), [(0.0, 0.0); 1 + Baseline::ALL.len()]);
    let (mut compared_reads, mut compared_pages) = (RemoteComparison::default(), RemoteComparison::default());
    for (number, problem) in hosts.iter().enumerate() {
        let started = Instant::now();
        let plan = plan::plan(problem, &mut || started.elapsed() >= Duration::from_secs_f64(MAX_SECONDS));
        let taken = started.elapsed().as_secs_f64();
        let results = Baseline::ALL.map(|baseline| baselines::place(problem, baseline));
        let numad =
            results[Baseline::ALL.iter().position(|baseline| *baseline == Baseline::Numad).expect("a baseline")];
        let of_plan = (plan.remote_reads.1, plan.remote_pages);
        let amounts: Vec<(f64, f64)> =
            [of_plan].into_iter().chain(results.map(|result| (result.remote_reads, result.remote_pages))).collect();
        for (sum, (reads, pages)) in remote.iter_mut().zip(&amounts) {
            *sum = (sum.0 + reads, sum.1 + pages);
        }
        let (reads, pages) = (amounts.iter().map(|amounts| amounts.0), amounts.iter().map(|amounts| amounts.1));
        let listed: String = reads.chain(pages).map(|amount| format!(",{amount:.0}")).collect();
        let (nodes, machines) = (problem.nodes.len(), problem.vms.len());
        findings.samples.push(format!(
            "{number},{nodes},{machines},{taken:.4},{:.5},{:.1},{:.1}{listed}",
            plan.gap, plan.overload.vcpus, numad.overload.vcpus
        ));
        seconds.push(taken);
        gaps.push(plan.gap);
        compared_reads.add(of_plan.0, numad.remote_reads);
        compared_pages.add(of_plan.1, numad.remote_pages);
    }
    let mut table = MarkdownTable::new(
        format!("Remote memory and reads of all machines on {} generated hosts", hosts.len()),
        &["placement", "remote memory, GiB", "remote reads, GiB of the hottest machine"],
    );
    let gibibytes = |pages: f64| format!("{:.1}", pages * BYTES_PER_PAGE / BYTES_PER_GIB);
    for (name, (reads, pages)) in placements.zip(remote) {
        table.rows.push(vec![name.to_owned(), gibibytes(pages), gibibytes(reads)]);
    }
    findings.tables.push(table);
    findings.tables.push(search_table(&seconds, &gaps));
    let close = gaps.iter().filter(|gap| **gap <= MAX_GAP).count();
    findings.checks.push(ThresholdCheck {
        claim: format!("within {MAX_SECONDS} s the gap to the optimum is at most {MAX_GAP}"),
        measured: format!("{close} of {} hosts", hosts.len()),
        met: close == hosts.len(),
    });
    findings.checks.extend(compared_pages.checks("remote pages", "numad's heuristic"));
    findings.checks.extend(compared_reads.checks("remote reads", "numad's heuristic"));
    Ok(findings)
}

fn search_table(seconds: &[f64], gaps: &[f64]) -> MarkdownTable {
    let spread = SampleSpread::from_samples(seconds.iter().copied());
    let proven = gaps.iter().filter(|gap| **gap == 0.0).count();
    let mut table = MarkdownTable::new("Time of the search", &["median s", "longest s", "hosts with a proven optimum"]);
    let cells = [format!("{:.3}", spread.median), format!("{:.2}", spread.max), format!("{proven} of {}", gaps.len())];
    table.rows.push(cells.to_vec());
    table
}
