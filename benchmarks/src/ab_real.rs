//! Real campaigns of `pagefold ab` on this machine, in which nothing differs: how often they see a difference in A/A, how
//! often they find the slow-downs that they inject, and how often their intervals contain the true ratios.
//!
//! The workload counts in a shell, so that its time depends on the CPU alone. Each campaign gives two A/A comparisons,
//! because its arms differ only in an unused environment variable. The campaigns run alone, and again beside a
//! [`competitor`](crate::competitor) for the CPUs, which they must flag.

use crate::BenchmarkEffort;
use crate::competitor::{BusyTime, Competitor, busy_share};
use crate::findings::{Findings, MarkdownTable, ThresholdCheck};
use anyhow::{Context, Result, ensure};
use pagefold_ab::decide::statistics::power::{PowerGoal, blocks_needed};
use pagefold_ab::decide::statistics::standard_deviation;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
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
/// The share of a block's running time in which the competitor must be busy for the block to count as disturbed.
const MIN_BUSY_SHARE: f64 = 0.1;
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
        ((center - half).max(0.0), (center + half).min(1.0))
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

/// What runs beside the campaigns.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Neighbor {
    Nothing,
    Competitor,
}

impl Neighbor {
    const ALL: [Self; 2] = [Self::Nothing, Self::Competitor];

    /// The name in samples and claims.
    fn name(self) -> &'static str {
        match self {
            Self::Nothing => "alone",
            Self::Competitor => "beside a competitor",
        }
    }
}

/// What all campaigns beside one neighbor have counted.
#[derive(Default)]
struct CampaignCounts {
    /// Blocks in which the competitor was busy, and those of them that were flagged.
    flagged_disturbed: Count,
    /// Blocks in which it was not, and those of them that were flagged.
    flagged_undisturbed: Count,
    same_arm: ControlCounts,
    injected: [ControlCounts; INJECTED_PERCENTS.len()],
    cpu_pressures: Vec<f64>,
    neighbor_cpus: Vec<f64>,
}

impl CampaignCounts {
    fn add(&mut self, key: &str, report: &Value, findings: &mut Findings) -> Result<()> {
        let metric = &report["result"]["metrics"][0];
        // A difference that A/A reaches is no verdict, but it was seen.
        let is_difference = matches!(metric["verdict"].as_str(), Some("better" | "worse"))
            || metric["is_difference_reached_by_same_arm"] == true;
        let mut note = |name: &str, estimate: &Value, is_found: bool| {
            let interval = &estimate["interval"];
            let sample = format!("{key},{name},{},{},{},{is_found}", estimate["ratio"], interval[0], interval[1]);
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

    /// Counts the flags of the blocks of a campaign, whose raw samples are given.
    fn add_flags(&mut self, key: &str, samples: &str, busy_times: &[BusyTime], findings: &mut Findings) -> Result<()> {
        for (block, (runs, is_flagged)) in read_blocks(samples)? {
            let share = busy_share(&runs, busy_times);
            if share >= MIN_BUSY_SHARE {
                self.flagged_disturbed.add(is_flagged);
            } else if share == 0.0 {
                self.flagged_undisturbed.add(is_flagged);
            }
            findings.samples.push(format!("{key},block-{block},{share:.3},,,{is_flagged}"));
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

/// For each block, from when to when its runs ran in seconds since 1970, and whether it was flagged.
fn read_blocks(samples: &str) -> Result<BTreeMap<usize, (Vec<BusyTime>, bool)>> {
    let mut lines = samples.lines();
    let names: Vec<&str> = lines.next().context("no samples")?.split(',').collect();
    let column =
        |name: &str| names.iter().position(|&found| found == name).with_context(|| format!("no column {name}"));
    let [block, noisy, value, end] = ["block", "noisy", "value", "unix_seconds"].map(column);
    let (block, noisy, value, end) = (block?, noisy?, value?, end?);
    let mut blocks: BTreeMap<usize, (Vec<BusyTime>, bool)> = BTreeMap::new();
    for line in lines {
        let cells: Vec<&str> = line.split(',').collect();
        let cell = |column: usize| cells.get(column).copied().with_context(|| format!("a short line: {line}"));
        let (end, seconds): (f64, f64) = (cell(end)?.parse()?, cell(value)?.parse()?);
        let (runs, is_flagged) = blocks.entry(cell(block)?.parse()?).or_default();
        runs.push((end - seconds, end));
        *is_flagged = cell(noisy)? == "true";
    }
    Ok(blocks)
}

pub fn measure(effort: BenchmarkEffort) -> Result<Findings> {
    let (campaigns, blocks) = if effort.quick { (QUICK_CAMPAIGNS, QUICK_BLOCKS) } else { (CAMPAIGNS, BLOCKS) };
    let directory = tempfile::tempdir()?;
    let mut findings = Findings::new("neighbor,seed,control,ratio,low,high,found");
    for neighbor in Neighbor::ALL {
        let mut counts = CampaignCounts::default();
        for seed in 0..campaigns {
            run_campaign(directory.path(), neighbor, seed, blocks, &mut counts, &mut findings)?;
            eprintln!("campaign {} of {campaigns}, {}", seed + 1, neighbor.name());
        }
        report_counts(&mut counts, neighbor, campaigns, blocks, &mut findings);
    }
    Ok(findings)
}

/// Runs a campaign in a new folder of `directory`, and counts what it says.
fn run_campaign(
    directory: &Path,
    neighbor: Neighbor,
    seed: u64,
    blocks: u64,
    counts: &mut CampaignCounts,
    findings: &mut Findings,
) -> Result<()> {
    let program = std::env::current_exe()?.with_file_name("pagefold");
    let key = format!("{},{seed}", neighbor.name());
    let file = directory.join(format!("{key}.toml"));
    let record = directory.join(&key);
    std::fs::write(&file, experiment(seed, blocks))?;
    let competitor = (neighbor == Neighbor::Competitor).then(|| Competitor::start(seed)).transpose()?;
    let output = Command::new(&program)
        .arg("--state")
        .arg(directory.join("state"))
        .args(["ab", "run", "--json", "--dir"])
        .arg(&record)
        .arg(&file)
        .output()
        .with_context(|| format!("cannot start {}: build it with `cargo build --release`", program.display()))?;
    let busy_times = competitor.map(Competitor::stop).transpose()?;
    ensure!(matches!(output.status.code(), Some(0 | 1)), "campaign {key}: {output:?}");
    counts.add(&key, &serde_json::from_slice(&output.stdout)?, findings)?;
    if let Some(busy_times) = busy_times {
        let samples = std::fs::read_to_string(record.join("samples.csv"))?;
        counts.add_flags(&key, &samples, &busy_times, findings)?;
    }
    Ok(())
}

fn report_counts(
    counts: &mut CampaignCounts,
    neighbor: Neighbor,
    campaigns: u64,
    blocks: u64,
    findings: &mut Findings,
) {
    let name = neighbor.name();
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
        claim: format!("{name}: the rate of false findings is not above {:.0} %", MAX_FALSE_FINDINGS * 100.0),
        measured: same.found.describe(),
        met: same.found.rate() <= MAX_FALSE_FINDINGS,
    };
    let coverage_check = |of: &str, covered: &Count| ThresholdCheck {
        claim: format!(
            "{name}: the 95 % intervals of {of} contain the true ratio in {:.0} to {:.0} %",
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
    let mut notes = vec!["The rate of A against A is that of false findings.".to_owned(), counts.describe_load()];
    if neighbor == Neighbor::Competitor {
        let (disturbed, undisturbed) = (&counts.flagged_disturbed, &counts.flagged_undisturbed);
        findings.checks.push(ThresholdCheck {
            claim: format!(
                "{name}: each block is flagged in which the competitor was busy for {:.0} % of the time or longer",
                MIN_BUSY_SHARE * 100.0
            ),
            measured: disturbed.describe(),
            met: disturbed.of > 0 && disturbed.with == disturbed.of,
        });
        notes.push(format!("Flagged blocks without the competitor: {}.", undisturbed.describe()));
        notes.push(
            "Samples `block-N`: how long the competitor was busy, as a share, and whether it was flagged.".to_owned(),
        );
    }
    findings.tables.push(MarkdownTable {
        title: format!("{campaigns} campaigns of {blocks} blocks each, {name}"),
        column_names: names.map(str::to_owned).to_vec(),
        text_columns: 1,
        rows,
        notes,
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_read_from_raw_samples() {
        let samples = "block,noisy,value,unix_seconds\n0,true,0.5,100.5\n0,true,0.25,101\n3,false,1,200\n";
        let blocks = read_blocks(samples).unwrap();
        assert_eq!(blocks[&0], (vec![(100.0, 100.5), (100.75, 101.0)], true));
        assert_eq!(blocks[&3], (vec![(199.0, 200.0)], false));
        assert!(read_blocks("block,noisy\n").is_err());
    }

    #[test]
    fn disturbed_and_other_blocks_are_counted_apart() {
        let samples = "block,noisy,value,unix_seconds\n0,true,1,101\n1,false,1,111\n2,true,1,121\n3,true,100,300\n";
        let (mut counts, mut findings) = (CampaignCounts::default(), Findings::new(""));
        // The competitor is busy in half of block 0, in none of the blocks 1 and 2, and in 1 % of block 3.
        counts.add_flags("beside,7", samples, &[(100.5, 101.5), (298.0, 299.0)], &mut findings).unwrap();
        assert_eq!((counts.flagged_disturbed.with, counts.flagged_disturbed.of), (1, 1));
        assert_eq!((counts.flagged_undisturbed.with, counts.flagged_undisturbed.of), (1, 2));
        assert_eq!(findings.samples[1..3], ["beside,7,block-0,0.500,,,true", "beside,7,block-1,0.000,,,false"]);
    }
}
