//! Real campaigns of `pagefold ab` on this machine, in which nothing differs: how often they see a difference in A/A, how
//! often they find the slow-downs that they inject, and how often their intervals contain the true ratios.
//!
//! The workload counts in a shell, so that its time depends on the CPU alone. Each campaign gives two A/A comparisons,
//! because its arms differ only in an unused environment variable.

use crate::BenchmarkEffort;
use crate::findings::{Findings, MarkdownTable, ThresholdCheck};
use anyhow::{Context, Result, ensure};
use pagefold_ab::decide::statistics::power::{PowerGoal, blocks_needed};
use pagefold_ab::decide::statistics::standard_deviation;
use serde_json::Value;
use std::process::Command;

const CAMPAIGNS: u64 = 40;
const QUICK_CAMPAIGNS: u64 = 2;
const BLOCKS: u64 = 10;
const QUICK_BLOCKS: u64 = 3;
/// About 0.1 s of counting.
const WORKLOAD: &str = "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done";
/// The permitted rate of differences in A/A.
const MAX_FALSE_FINDINGS: f64 = 0.05;
/// The slow-downs in percent that each campaign injects.
const INJECTED_PERCENTS: [u64; 3] = [1, 2, 5];
/// The permitted coverage of 95 % intervals.
const COVERAGE: std::ops::RangeInclusive<f64> = 0.93..=0.97;
/// What a number of blocks finds.
const GOAL: PowerGoal = PowerGoal { alpha: 0.05, power: 0.8 };
/// z of a 95 % Wilson interval.
const Z: f64 = 1.96;

/// How many of a number of estimates have a property.
#[derive(Clone, Copy, Default)]
struct Count {
    with: u64,
    of: u64,
}

impl Count {
    fn add(&mut self, has: bool) {
        self.of += 1;
        self.with += u64::from(has);
    }

    fn plus(self, other: Self) -> Self {
        Self { with: self.with + other.with, of: self.of + other.of }
    }

    fn rate(&self) -> f64 {
        self.with as f64 / self.of.max(1) as f64
    }

    /// The 95 % interval of the rate (E. B. Wilson, "Probable inference, the law of succession, and statistical
    /// inference", Journal of the American Statistical Association 22(158), 1927).
    fn interval(&self) -> (f64, f64) {
        let (n, p) = (self.of.max(1) as f64, self.rate());
        let center = (p + Z * Z / (2.0 * n)) / (1.0 + Z * Z / n);
        let half = Z / (1.0 + Z * Z / n) * (p * (1.0 - p) / n + Z * Z / (4.0 * n * n)).sqrt();
        (center - half, center + half)
    }

    fn cells(&self) -> [String; 2] {
        let (low, high) = self.interval();
        let percent = |share: f64| format!("{:.1} %", share * 100.0);
        let rate = format!("{} of {}, {}", self.with, self.of, percent(self.rate()));
        [rate, format!("{} to {}", percent(low), percent(high))]
    }

    fn describe(&self) -> String {
        let [rate, interval] = self.cells();
        format!("{rate} (95 % interval {interval})")
    }
}

/// The estimates of one kind of control over all campaigns.
#[derive(Default)]
struct ControlCounts {
    found: Count,
    covered: Count,
    /// The sum of the variances of the blocks' log ratios.
    variance: f64,
}

impl ControlCounts {
    fn add(&mut self, estimate: &Value, true_ratio: f64, is_found: bool) -> Result<()> {
        let number = |value: &Value| value.as_f64().context("the report has an interval without limits");
        let (low, high) = (number(&estimate["interval"][0])?, number(&estimate["interval"][1])?);
        self.found.add(is_found);
        self.covered.add((low..=high).contains(&true_ratio));
        let ratios = estimate["block_ratios"].as_array().context("the report has no ratios of blocks")?;
        let logarithms: Vec<f64> = ratios.iter().map(|ratio| number(ratio).map(f64::ln)).collect::<Result<_>>()?;
        self.variance += standard_deviation(&logarithms).powi(2);
        Ok(())
    }

    /// The blocks that find an effect with the power of the goal, by the noise of all campaigns.
    fn blocks_for(&self, percent: u64) -> String {
        let deviation = (self.variance / self.found.of.max(1) as f64).sqrt();
        let blocks = blocks_needed((percent as f64 / 100.0).ln_1p(), deviation, GOAL);
        blocks.map_or("more than can be counted".to_owned(), |blocks| blocks.to_string())
    }

    fn row(&self, name: String, blocks: String) -> Vec<String> {
        [name].into_iter().chain(self.found.cells()).chain(self.covered.cells()).chain([blocks]).collect()
    }
}

/// What all campaigns have counted.
#[derive(Default)]
struct CampaignCounts {
    same_arm: ControlCounts,
    injected: [ControlCounts; INJECTED_PERCENTS.len()],
    cpu_pressures: Vec<f64>,
    neighbor_cpus: Vec<f64>,
}

impl CampaignCounts {
    fn add(&mut self, seed: u64, report: &Value, findings: &mut Findings) -> Result<()> {
        let metric = &report["result"]["metrics"][0];
        // A difference that A/A reaches is no verdict, but it was seen.
        let is_difference = matches!(metric["verdict"].as_str(), Some("better" | "worse"))
            || metric["is_difference_reached_by_same_arm"] == true;
        let mut note = |name: &str, estimate: &Value, is_found: bool| {
            let interval = &estimate["interval"];
            let sample = format!("{seed},{name},{},{},{},{is_found}", estimate["ratio"], interval[0], interval[1]);
            findings.samples.push(sample);
        };
        note("comparison", &metric["comparison"], is_difference);
        self.same_arm.add(&metric["comparison"], 1.0, is_difference)?;
        let control = &metric["same_arm"];
        note("same-arm", &control["estimate"], control["is_found"] == true);
        self.same_arm.add(&control["estimate"], 1.0, control["is_found"] == true)?;
        for control in metric["injected"].as_array().context("the report has no injected slow-downs")? {
            let is_found = control["is_found"] == true;
            let percent = control["slowdown_percent"].as_u64().context("a slow-down without its percentage")?;
            let position = INJECTED_PERCENTS.iter().position(|&injected| injected == percent);
            let counts = &mut self.injected[position.with_context(|| format!("a slow-down of {percent} percent"))?];
            note(&format!("injected-{percent}"), &control["estimate"], is_found);
            counts.add(&control["estimate"], 1.0 + percent as f64 / 100.0, is_found)?;
        }
        for block in report["environment"].as_array().into_iter().flatten() {
            self.cpu_pressures.extend(block["readings"]["cpu_pressure"].as_f64());
            self.neighbor_cpus.extend(block["readings"]["neighbor_cpus"].as_f64());
        }
        Ok(())
    }

    /// The load of the machine while the blocks ran.
    fn describe_load(&mut self) -> String {
        let quartiles = |values: &mut Vec<f64>| {
            values.sort_by(f64::total_cmp);
            let at = |share: f64| values.get((share * values.len().saturating_sub(1) as f64).round() as usize).copied();
            [0.25, 0.5, 0.75]
                .map(|share| at(share).map_or("not known".to_owned(), |value| format!("{value:.2}")))
                .join(", ")
        };
        format!(
            "Quartiles over the blocks: CPU pressure {}; CPUs in use by other processes {}.",
            quartiles(&mut self.cpu_pressures),
            quartiles(&mut self.neighbor_cpus)
        )
    }
}

/// The file of `pagefold ab run`.
fn experiment(seed: u64, blocks: u64) -> String {
    format!(
        "blocks = {blocks}\nseed = {seed}\ninjected_percents = {INJECTED_PERCENTS:?}\n\
         workload = [[\"sh\", \"-c\", '{WORKLOAD}']]\n[b.environment]\nPAGEFOLD_UNUSED = \"1\"\n"
    )
}

pub fn measure(effort: BenchmarkEffort) -> Result<Findings> {
    let (campaigns, blocks) = if effort.quick { (QUICK_CAMPAIGNS, QUICK_BLOCKS) } else { (CAMPAIGNS, BLOCKS) };
    let program = std::env::current_exe()?.with_file_name("pagefold");
    let directory = tempfile::tempdir()?;
    let mut findings = Findings::new("seed,control,ratio,low,high,found");
    let mut counts = CampaignCounts::default();
    for seed in 0..campaigns {
        let file = directory.path().join(format!("experiment-{seed}.toml"));
        std::fs::write(&file, experiment(seed, blocks))?;
        let output = Command::new(&program)
            .arg("--state")
            .arg(directory.path().join("state"))
            .args(["ab", "run", "--json", "--dir"])
            .arg(directory.path().join(format!("campaign-{seed}")))
            .arg(&file)
            .output()
            .with_context(|| format!("cannot start {}: build it with `cargo build --release`", program.display()))?;
        ensure!(matches!(output.status.code(), Some(0 | 1)), "campaign {seed}: {output:?}");
        counts.add(seed, &serde_json::from_slice(&output.stdout)?, &mut findings)?;
        eprintln!("campaign {} of {campaigns}", seed + 1);
    }
    report_counts(&mut counts, campaigns, blocks, &mut findings);
    Ok(findings)
}

fn report_counts(counts: &mut CampaignCounts, campaigns: u64, blocks: u64, findings: &mut Findings) {
    let same = &counts.same_arm;
    let mut rows = vec![same.row("A against A".to_owned(), String::new())];
    for (percent, control) in INJECTED_PERCENTS.iter().zip(&counts.injected) {
        rows.push(control.row(format!("slowed by {percent} %"), control.blocks_for(*percent)));
    }
    let names = [
        "control",
        "found",
        "95 % interval",
        "true ratio in the interval",
        "95 % interval",
        "blocks that find it in 80 %",
    ];
    let injected = counts.injected.iter().fold(Count::default(), |sum, control| sum.plus(control.covered));
    let same_check = ThresholdCheck {
        claim: format!("The rate of false findings is not above {:.0} %", MAX_FALSE_FINDINGS * 100.0),
        measured: same.found.describe(),
        met: same.found.rate() <= MAX_FALSE_FINDINGS,
    };
    let coverage_check = |name: &str, covered: &Count| ThresholdCheck {
        claim: format!(
            "The 95 % intervals of {name} contain the true ratio in {:.0} to {:.0} %",
            COVERAGE.start() * 100.0,
            COVERAGE.end() * 100.0
        ),
        measured: covered.describe(),
        met: COVERAGE.contains(&covered.rate()),
    };
    findings.checks.extend([
        same_check,
        coverage_check("A against A", &same.covered),
        coverage_check("injected slow-downs", &injected),
    ]);
    findings.tables.push(MarkdownTable {
        title: format!("{campaigns} campaigns of {blocks} blocks each"),
        column_names: names.map(str::to_owned).to_vec(),
        text_columns: 1,
        rows,
        notes: vec!["The rate of A against A is that of false findings.".to_owned(), counts.describe_load()],
    });
}
