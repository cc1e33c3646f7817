//! Real campaigns of `pagefold ab` on this machine, in which nothing differs: how often they see a difference in A/A, and
//! how often they find the slow-downs that they inject.
//!
//! The workload counts in a shell, so that its time depends on the CPU alone. Each campaign gives two A/A comparisons,
//! because its arms differ only in an unused environment variable.

use crate::BenchmarkEffort;
use crate::findings::{Findings, MarkdownTable, ThresholdCheck};
use anyhow::{Context, Result, ensure};
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
/// z of a 95 % Wilson interval.
const Z: f64 = 1.96;

/// What was counted over campaigns.
#[derive(Default)]
struct Count {
    found: u64,
    of: u64,
}

impl Count {
    fn add(&mut self, is_found: bool) {
        self.of += 1;
        self.found += u64::from(is_found);
    }

    fn rate(&self) -> f64 {
        self.found as f64 / self.of.max(1) as f64
    }

    /// The 95 % interval of the rate (E. B. Wilson, "Probable inference, the law of succession, and statistical
    /// inference", Journal of the American Statistical Association 22(158), 1927).
    fn interval(&self) -> (f64, f64) {
        let (n, p) = (self.of.max(1) as f64, self.rate());
        let center = (p + Z * Z / (2.0 * n)) / (1.0 + Z * Z / n);
        let half = Z / (1.0 + Z * Z / n) * (p * (1.0 - p) / n + Z * Z / (4.0 * n * n)).sqrt();
        (center - half, center + half)
    }

    fn row(&self, name: &str) -> Vec<String> {
        let (low, high) = self.interval();
        let percent = |share: f64| format!("{:.1} %", share * 100.0);
        vec![
            name.to_owned(),
            format!("{} of {}", self.found, self.of),
            percent(self.rate()),
            format!("{} to {}", percent(low), percent(high)),
        ]
    }
}

pub fn measure(effort: BenchmarkEffort) -> Result<Findings> {
    let (campaigns, blocks) = if effort.quick { (QUICK_CAMPAIGNS, QUICK_BLOCKS) } else { (CAMPAIGNS, BLOCKS) };
    let program = std::env::current_exe()?.with_file_name("pagefold");
    let directory = tempfile::tempdir()?;
    let mut findings = Findings::new("seed,control,ratio,low,high,found");
    let (mut same, mut two, mut five) = (Count::default(), Count::default(), Count::default());
    for seed in 0..campaigns {
        let output = Command::new(&program)
            .arg("--state")
            .arg(directory.path().join("state"))
            .args(["ab", "--json", "--env-b", "PAGEFOLD_UNUSED=1"])
            .args(["--blocks", &blocks.to_string(), "--seed", &seed.to_string()])
            .arg("--dir")
            .arg(directory.path().join(format!("campaign-{seed}")))
            .args(["--", "sh", "-c", WORKLOAD])
            .output()
            .with_context(|| format!("cannot start {}: build it with `cargo build --release`", program.display()))?;
        ensure!(matches!(output.status.code(), Some(0 | 1)), "campaign {seed}: {output:?}");
        let report: Value = serde_json::from_slice(&output.stdout)?;
        let metric = &report["result"]["metrics"][0];
        let is_difference = matches!(metric["verdict"].as_str(), Some("better" | "worse"));
        let mut note = |name: &str, estimate: &Value, is_found: bool, count: &mut Count| {
            count.add(is_found);
            let interval = &estimate["interval"];
            let sample = format!("{seed},{name},{},{},{},{is_found}", estimate["ratio"], interval[0], interval[1]);
            findings.samples.push(sample);
        };
        note("comparison", &metric["comparison"], is_difference, &mut same);
        let control = &metric["same_arm"];
        note("same-arm", &control["estimate"], control["is_found"] == true, &mut same);
        for control in metric["injected"].as_array().context("the report has no injected slow-downs")? {
            let is_found = control["is_found"] == true;
            match control["slowdown_percent"].as_u64() {
                Some(2) => note("injected-2", &control["estimate"], is_found, &mut two),
                Some(5) => note("injected-5", &control["estimate"], is_found, &mut five),
                other => anyhow::bail!("a slow-down of {other:?} percent"),
            }
        }
        eprintln!("campaign {} of {campaigns}", seed + 1);
    }
    let mut table = MarkdownTable {
        title: format!("{campaigns} campaigns of {blocks} blocks each"),
        column_names: ["control", "found", "rate", "95 % interval"].map(str::to_owned).to_vec(),
        text_columns: 1,
        rows: vec![same.row("A against A"), two.row("slowed by 2 %"), five.row("slowed by 5 %")],
        notes: Vec::new(),
    };
    table.notes.push("The rate of A against A is that of false findings.".to_owned());
    findings.tables.push(table);
    let (low, _) = same.interval();
    findings.checks.push(ThresholdCheck {
        claim: format!("The rate of false findings is not above {:.0} %", MAX_FALSE_FINDINGS * 100.0),
        measured: format!("{} of {}", same.found, same.of),
        met: low <= MAX_FALSE_FINDINGS,
    });
    Ok(findings)
}
