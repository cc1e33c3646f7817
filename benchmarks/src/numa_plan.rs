//! Plans for generated hosts at default prices: how long the search takes, how far it is from the optimum, and what simple
//! placements read remotely.

use crate::BenchmarkEffort;
use crate::findings::{Findings, MarkdownTable, SampleSpread, ThresholdCheck};
use anyhow::Result;
use pagefold_numa::decide::plan::baselines::{self, Baseline};
use pagefold_numa::decide::plan::generated::{PUBLISHED_SIZES, at_default_prices, generated_hosts, published_host};
use pagefold_numa::decide::plan::{self, Load, PlacementProblem};
use std::time::{Duration, Instant};

const MAX_SECONDS: f64 = 5.0;
const MAX_GAP: f64 = 0.02;

/// Target: the plan's remote reads, relative to those by numad's heuristic.
const MAX_REMOTE_RATIO: f64 = 0.7;

/// The least number of machines of a generated host.
const MIN_MACHINES: usize = 5;

const BYTES_PER_PAGE: f64 = 4096.0;
const BYTES_PER_GIB: f64 = (1 << 30) as f64;

/// Run the measurement.
pub fn measure(effort: BenchmarkEffort) -> Result<Findings> {
    let generated = generated_hosts().filter(|problem| problem.vms.len() >= MIN_MACHINES);
    let published = PUBLISHED_SIZES.iter().map(|&(count, vcpus)| published_host(count, vcpus));
    let hosts: Vec<PlacementProblem> = published.chain(generated).map(at_default_prices).collect();
    let hosts = &hosts[..if effort.quick { 4 } else { hosts.len() }];
    let placements = ["plan"].into_iter().chain(Baseline::ALL.map(Baseline::name));
    let columns: String = placements.clone().map(|name| format!(",{}_remote_pages", name.replace(' ', "_"))).collect();
    let mut findings =
        Findings::new(&format!("host,nodes,machines,seconds,gap,excess_vcpus,numad_excess_vcpus{columns}"));
    let (mut seconds, mut gaps, mut remote) = (Vec::new(), Vec::new(), [0.0; 1 + Baseline::ALL.len()]);
    let (mut lower, mut within_ratio, mut comparable) = (0, 0, 0);
    for (number, problem) in hosts.iter().enumerate() {
        let started = Instant::now();
        let plan = plan::plan(problem, &mut || started.elapsed() >= Duration::from_secs_f64(MAX_SECONDS));
        let taken = started.elapsed().as_secs_f64();
        let results = Baseline::ALL.map(|baseline| baselines::place(problem, baseline));
        let numad =
            results[Baseline::ALL.iter().position(|baseline| *baseline == Baseline::Numad).expect("a baseline")];
        let reads: Vec<f64> =
            [plan.remote_reads.1].into_iter().chain(results.map(|result| result.remote_reads)).collect();
        for (sum, pages) in remote.iter_mut().zip(&reads) {
            *sum += pages;
        }
        let listed: String = reads.iter().map(|pages| format!(",{pages:.0}")).collect();
        let (nodes, machines) = (problem.nodes.len(), problem.vms.len());
        findings.samples.push(format!(
            "{number},{nodes},{machines},{taken:.4},{:.5},{:.1},{:.1}{listed}",
            plan.gap, plan.overload.vcpus, numad.overload.vcpus
        ));
        seconds.push(taken);
        gaps.push(plan.gap);
        lower += usize::from(plan.remote_reads.1 <= numad.remote_reads);
        if numad.overload == Load::default() && numad.remote_reads > 0.0 {
            comparable += 1;
            within_ratio += usize::from(plan.remote_reads.1 <= MAX_REMOTE_RATIO * numad.remote_reads);
        }
    }
    let mut table = MarkdownTable::new(
        format!("Remote reads of all machines on {} generated hosts", hosts.len()),
        &["placement", "remote reads, GiB of the hottest machine"],
    );
    for (name, pages) in placements.zip(remote) {
        table.rows.push(vec![name.to_owned(), format!("{:.1}", pages * BYTES_PER_PAGE / BYTES_PER_GIB)]);
    }
    findings.tables.push(table);
    findings.tables.push(search_table(&seconds, &gaps));
    let mut check = |claim: String, measured: String, met: bool| {
        findings.checks.push(ThresholdCheck { claim, measured, met });
    };
    let close = gaps.iter().filter(|gap| **gap <= MAX_GAP).count();
    check(
        format!("within {MAX_SECONDS} s the gap to the optimum is at most {MAX_GAP}"),
        format!("{close} of {} hosts", hosts.len()),
        close == hosts.len(),
    );
    let ratio = remote[0] / remote[remote.len() - 1];
    check(
        format!("in all, at most {MAX_REMOTE_RATIO} of the remote reads by numad's heuristic"),
        format!("{ratio:.3}"),
        ratio <= MAX_REMOTE_RATIO,
    );
    check(
        "the same on each host on which numad overloads no node".to_owned(),
        format!("{within_ratio} of {comparable} hosts"),
        within_ratio == comparable,
    );
    check(
        "no host has more remote reads than by numad's heuristic".to_owned(),
        format!("{lower} of {} hosts", hosts.len()),
        lower == hosts.len(),
    );
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
