//! Moving memory to another NUMA node: `pagefold numa apply`, while it moves memory, against bare loops over
//! move_pages(2), in turns, in an emulated machine with two nodes. Time is virtual: an instruction takes a nanosecond.
//! The ratio is the finding, not the speed. Reading the map and planning are not part of the time.
//!
//! One loop passes 512 addresses in a call, as many as the kernel copies together, and the other one 4096, as many as
//! `numa apply` passes: each call waits for all CPUs once, so larger ones are faster.

use crate::BenchmarkEffort;
use crate::findings::{Findings, MarkdownTable, PairedRatio, SampleSpread, ThresholdCheck};
use anyhow::{Context, Result, ensure};
use pagefold_labs::assets::GuestAssets;
use pagefold_labs::machine::EmulatedMachine;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Target: the time of `numa apply`, relative to each bare loop.
const MAX_TIME_RATIO: f64 = 1.2;

/// Addresses in a call of the bare loops, in the order of the samples.
const LOOP_BATCHES: [usize; 2] = [512, 4096];

/// Run the measurement.
pub fn measure(effort: BenchmarkEffort) -> Result<Findings> {
    let (rounds, pages) = if effort.quick { (1, 4096) } else { (15, 32_768) };
    let output = run_guest(rounds, pages)?;
    let mut findings = Findings::new("kind,round,loop_512_seconds,loop_4096_seconds,apply_seconds,moved_pages");
    let mut table = MarkdownTable::new(
        format!("Moving {} MiB between two nodes of an emulated machine, {rounds} rounds", pages >> 8),
        &[
            "pages",
            "addresses in a call of the loop",
            "loop, pages/s",
            "numa apply while it moves, pages/s",
            "time / loop, 95 % interval",
        ],
    );
    for (kind, name) in [("unique", "4 KiB"), ("huge", "huge")] {
        let samples: Vec<[f64; 4]> = output
            .lines()
            .filter_map(|line| line.strip_prefix("SAMPLE ")?.strip_prefix(kind)?.strip_prefix(' '))
            .map(|line| {
                findings.samples.push(format!("{kind},{}", line.replace(' ', ",")));
                let words: Vec<f64> = line.split(' ').skip(1).map(|word| word.parse().unwrap_or(f64::NAN)).collect();
                words.try_into().map_err(|words| anyhow::anyhow!("not a sample: {words:?}"))
            })
            .collect::<Result<_>>()?;
        ensure!(samples.len() == rounds, "{} samples of {kind}: {output}", samples.len());
        let speed = |column: usize| SampleSpread::from_samples(samples.iter().map(|sample| sample[3] / sample[column]));
        for (column, batch) in LOOP_BATCHES.into_iter().enumerate() {
            let ratios = samples.iter().map(|sample| sample[2] / sample[column]);
            let ratio = PairedRatio::from_rounds(ratios).context("no rounds")?;
            table.rows.push(vec![
                name.to_owned(),
                batch.to_string(),
                format!("{:.0}", speed(column).median),
                format!("{:.0}", speed(2).median),
                ratio.format_factor(),
            ]);
            findings.checks.push(ThresholdCheck {
                claim: format!(
                    "numa apply moves {name} pages in at most {MAX_TIME_RATIO} of the time of a bare loop with {batch} \
                     addresses in a call"
                ),
                measured: ratio.format_factor(),
                met: ratio.ratio <= MAX_TIME_RATIO,
            });
        }
    }
    table.notes.push(
        "The loops pass one address for each page, and check nothing. numa apply passes 4096 in a call. It also journals \
         the undo, and checks the room on the node, and where pages are before and after the move. Reading the map and \
         planning are not part of its time. Time is the number of instructions that the emulated machine executes."
            .to_owned(),
    );
    findings.tables.push(table);
    Ok(findings)
}

fn run_guest(rounds: usize, pages: u64) -> Result<String> {
    let directory = GuestAssets::default_directory();
    GuestAssets::find(&directory)?;
    let kernel = GuestAssets::find_recent_kernel(&directory)?;
    let program = |name: &str| -> Result<PathBuf> {
        let path = std::env::current_exe()?.with_file_name(name);
        ensure!(path.exists(), "{} is missing: cargo build --release -p pagefold -p pagefold-labs", path.display());
        Ok(path)
    };
    let (lab, pagefold) = (program("pagefold-lab")?, program("pagefold")?);
    let folder = tempfile::tempdir()?;
    let machine = EmulatedMachine {
        kernel: &kernel,
        init: &Path::new(env!("CARGO_MANIFEST_DIR")).join("../labs/guest/init-move"),
        programs: &[(&lab, "pagefold-lab"), (&pagefold, "pagefold")],
        files: &[],
        options: &[
            &["-smp", "2", "-m", "2G", "-cpu", "max"][..],
            // Virtual time, an instruction in a nanosecond: the host's load does not matter.
            &["-icount", "shift=0,sleep=off", "-rtc", "base=2026-01-01,clock=vm"],
            &["-object", "memory-backend-ram,id=m0,size=1G", "-object", "memory-backend-ram,id=m1,size=1G"],
            &["-numa", "node,nodeid=0,cpus=0,memdev=m0", "-numa", "node,nodeid=1,cpus=1,memdev=m1"],
        ]
        .concat(),
        kernel_arguments: &format!("numa_balancing=disable rounds={rounds} pages={pages}"),
    };
    let output = machine.run(folder.path(), Duration::from_secs(1800), &mut || Ok(()))?;
    output.lines().any(|line| line == "ENDED").then_some(()).with_context(|| output.clone())?;
    Ok(output)
}
