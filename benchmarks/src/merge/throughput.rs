//! Merge speed for equal memory: the user engine against ksmd flat out, by run length.
//!
//! Two, four or eight processes hold equal contents in runs of a given number of pages, with an absent page between
//! runs; or they hold zeros. At first no page is merged, at last all pages are. The user engine merges in two ways:
//!
//! - One after another, on one and on two threads: one merge for each process plus one for the first, all of which
//!   count. The first merge reads the first process, the second stores and maps its content in the second process, each
//!   further one maps it in another process, and the last maps it in the first.
//! - All at once, on one thread each, as the ranks of a parallel program merge at a common safe point. A process that
//!   has not seen the content of a later one merges once more. The time of a round is from the command to all processes
//!   until the last answer; all rounds count.
//!
//! ksmd takes two scans and more; its CPU time until the last page is merged counts. In each round all methods take
//! their turn, in a random order.
//!
//! The processes run the engine's `examples/member`, which fills memory on command. The time of a merge that runs alone
//! is the time that the member reports.

use super::readings::{KsmCounters, ksmd_pid};
use super::running_program::command_through_hold;
use super::trial::{sleep_unless_signaled, wait_until_ksmd_forgets};
use crate::findings::{Findings, MarkdownTable, PairedRatio, SampleSpread, ThresholdCheck};
use crate::rounds::draw_orders;
use anyhow::{Context, Result, ensure};
use pagefold_labs::ksm::KsmTestGuard;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// Pages of a run.
const RUN_LENGTHS_PAGES: [u64; 6] = [1, 4, 16, 64, 256, 1024];

/// The numbers of processes with equal contents.
const PROCESS_COUNTS: [u64; 3] = [2, 4, 8];

/// From this run length on the speed is judged against ksmd, which has one thread: for members that merge all at once,
/// and for members that merge one after another on two threads.
const MIN_JUDGED_RUN_PAGES: u64 = 64;
const MIN_ENGINE_TO_KSMD_RATIO: f64 = 5.0;

/// Maximum rounds in which all members merge: by the second round every member has published its content.
const MAX_CONCURRENT_MERGES: usize = 4;

/// ksmd has merged everything possible once no page was merged for this long.
const KSMD_SETTLE_TIME: Duration = Duration::from_secs(3);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ThroughputMethod {
    /// Members merge one after another.
    Engine {
        threads: usize,
    },
    /// Members merge all at once, on one thread each.
    ConcurrentEngine,
    Ksmd,
}

impl ThroughputMethod {
    const EVERY_METHOD: [Self; 4] =
        [Self::Engine { threads: 1 }, Self::Engine { threads: 2 }, Self::ConcurrentEngine, Self::Ksmd];

    fn name(self) -> String {
        match self {
            Self::ConcurrentEngine => "engine, all at once".to_owned(),
            Self::Engine { threads } => format!("engine, {threads} thread{}", if threads == 1 { "" } else { "s" }),
            Self::Ksmd => "ksmd".to_owned(),
        }
    }
}

/// The memory of the processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ThroughputMemory {
    processes: u64,
    run_pages: u64,
    zeros: bool,
    /// Pages of each process, without the gaps.
    pages_per_process: u64,
}

impl ThroughputMemory {
    /// Pages of all processes.
    fn total_pages(self) -> u64 {
        self.processes * self.pages_per_process
    }

    /// The measured shapes. Zeros are measured with two processes only, because their merges do not involve other
    /// processes.
    fn all_shapes(pages: u64) -> Vec<Self> {
        let lengths = |processes, zeros| {
            RUN_LENGTHS_PAGES.map(|run| Self { processes, run_pages: run, zeros, pages_per_process: pages })
        };
        PROCESS_COUNTS.iter().flat_map(|&processes| lengths(processes, false)).chain(lengths(2, true)).collect()
    }
}

#[derive(Debug)]
struct ThroughputTrial {
    memory: ThroughputMemory,
    method: ThroughputMethod,
    round: usize,
    /// Merged pages of all processes.
    merged_pages: u64,
    seconds: f64,
}

impl ThroughputTrial {
    fn to_csv(&self) -> String {
        let ThroughputMemory { processes, run_pages, zeros, .. } = self.memory;
        format!(
            "{},{processes},{run_pages},{zeros},{},{},{},{:.6}",
            self.round,
            self.method.name().replace(',', ""),
            self.memory.total_pages(),
            self.merged_pages,
            self.seconds
        )
    }

    /// Bytes per second; none if a significant share was not merged.
    fn bytes_per_second(&self) -> Option<f64> {
        let bytes = self.merged_pages as f64 * pagefold_sys::mapping::page_size() as f64;
        (self.merged_pages as f64 >= 0.99 * self.memory.total_pages() as f64).then(|| bytes / self.seconds)
    }
}

/// Run the measurement.
pub fn measure(rounds: usize, quick: bool) -> Result<Findings> {
    let pages = if quick { 2048 } else { 16_384 };
    let mut trials = Vec::new();
    for (round, order) in (1..).zip(draw_orders(&ThroughputMethod::EVERY_METHOD, rounds)) {
        for memory in ThroughputMemory::all_shapes(pages) {
            for &method in &order {
                let trial = run_trial(memory, method, round)?;
                eprintln!(
                    "round {round}: {} processes, {} pages{}, {}: {:.2} GB/s",
                    memory.processes,
                    memory.run_pages,
                    if memory.zeros { " of zeros" } else { "" },
                    method.name(),
                    trial.bytes_per_second().unwrap_or(0.0) / 1e9
                );
                trials.push(trial);
            }
        }
    }
    Ok(build_findings(&trials, pages))
}

fn build_findings(trials: &[ThroughputTrial], pages: u64) -> Findings {
    let mut findings = Findings::new("round,processes,run_pages,zeros,way,held_pages,merged_pages,seconds");
    findings.samples.extend(trials.iter().map(ThroughputTrial::to_csv));
    let trials = ThroughputTrials(trials);
    let shapes = ThroughputMemory::all_shapes(pages);
    for shapes in shapes.chunk_by(|one, next| (one.processes, one.zeros) == (next.processes, next.zeros)) {
        findings.tables.push(trials.build_table(shapes));
        let judged = shapes.iter().filter(|shape| shape.run_pages >= MIN_JUDGED_RUN_PAGES && !shape.zeros);
        findings.checks.extend(judged.flat_map(|&shape| trials.build_checks(shape)));
    }
    if let Some(last) = findings.tables.last_mut() {
        last.notes.push(
            "Bytes of all processes divided by the time until all are merged: the time of all merges by the engine, \
             one after another or all at once; the CPU time of ksmd. \"not all\": runs too short for the engine \
             to map."
                .to_owned(),
        );
    }
    findings
}

/// All trials of a measurement.
struct ThroughputTrials<'t>(&'t [ThroughputTrial]);

impl ThroughputTrials<'_> {
    fn select(&self, memory: ThroughputMemory, method: ThroughputMethod) -> impl Iterator<Item = &ThroughputTrial> {
        self.0.iter().filter(move |trial| trial.memory == memory && trial.method == method)
    }

    /// How many times as fast one method is as another, within rounds. None if no round has both.
    fn speedup(
        &self,
        memory: ThroughputMemory,
        method: ThroughputMethod,
        baseline: ThroughputMethod,
    ) -> Option<PairedRatio> {
        let ratio = |trial: &ThroughputTrial| {
            let other = self.select(memory, baseline).find(|other| other.round == trial.round)?;
            Some(trial.bytes_per_second()? / other.bytes_per_second()?)
        };
        PairedRatio::from_rounds(self.select(memory, method).filter_map(ratio))
    }

    /// The table of memory shapes that differ only in the length of runs.
    fn build_table(&self, shapes: &[ThroughputMemory]) -> MarkdownTable {
        let ThroughputMemory { processes, zeros, pages_per_process, .. } = shapes[0];
        let mut table = MarkdownTable::new(
            format!(
                "{} in {processes} processes of {:.0} MiB",
                if zeros { "Zeros" } else { "Equal memory" },
                (pages_per_process * pagefold_sys::mapping::page_size() as u64) as f64 / f64::from(1 << 20)
            ),
            &[
                "pages in a run",
                "1 thread GB/s",
                "2 threads GB/s",
                "all at once GB/s",
                "ksmd GB/s",
                "1 thread over ksmd",
                "2 threads over 1",
                "all at once over ksmd",
            ],
        );
        let [one, two, together, ksmd] = ThroughputMethod::EVERY_METHOD;
        for &shape in shapes {
            let rate = |method| {
                let rates: Vec<f64> =
                    self.select(shape, method).filter_map(ThroughputTrial::bytes_per_second).collect();
                match rates.is_empty() {
                    true => "not all".to_owned(),
                    false => format!("{:.2}", SampleSpread::from_samples(rates).median / 1e9),
                }
            };
            let factor = |method, baseline| {
                self.speedup(shape, method, baseline).map_or("-".to_owned(), PairedRatio::format_factor)
            };
            table.rows.push(vec![
                shape.run_pages.to_string(),
                rate(one),
                rate(two),
                rate(together),
                rate(ksmd),
                factor(one, ksmd),
                factor(two, one),
                factor(together, ksmd),
            ]);
        }
        table
    }

    fn build_checks(&self, memory: ThroughputMemory) -> [ThresholdCheck; 2] {
        let [_, two, together, ksmd] = ThroughputMethod::EVERY_METHOD;
        let ThroughputMemory { processes, run_pages, .. } = memory;
        [(together, "all at once"), (two, "one after another on two threads")].map(|(method, order)| {
            let speedup = self.speedup(memory, method, ksmd);
            ThresholdCheck {
                claim: format!(
                    "{processes} processes, runs of {run_pages} pages, {order}: at least \
                     {MIN_ENGINE_TO_KSMD_RATIO} times ksmd flat out"
                ),
                measured: speedup.map_or("not all pages were merged".to_owned(), PairedRatio::format_factor),
                met: speedup.is_some_and(|speedup| speedup.ratio >= MIN_ENGINE_TO_KSMD_RATIO),
            }
        })
    }
}

fn run_trial(memory: ThroughputMemory, method: ThroughputMethod, round: usize) -> Result<ThroughputTrial> {
    let ksm = KsmTestGuard::acquire().map_err(anyhow::Error::msg)?;
    let ksmd = ksmd_pid()?;
    wait_until_ksmd_forgets(&ksm, ksmd)?;
    let domains = tempfile::tempdir_in("/dev/shm").context("a folder for domains")?;
    let start = || ThroughputMember::start(memory, method, domains.path());
    let mut members = (0..memory.processes).map(|_| start()).collect::<Result<Vec<_>>>()?;
    let (mut merged, mut seconds) = (0, 0.0);
    match method {
        ThroughputMethod::Engine { .. } => {
            for member in (0..members.len()).chain([0]) {
                let answer = members[member].run_command("merge")?;
                merged += parse_field(&answer, "pages_merged: Pages(")? + parse_field(&answer, "zeros_freed: Pages(")?;
                seconds += parse_merge_seconds(&answer)?;
            }
        }
        ThroughputMethod::ConcurrentEngine => {
            for _ in 0..MAX_CONCURRENT_MERGES {
                let began = Instant::now();
                members.iter_mut().try_for_each(|member| member.send_command("merge"))?;
                let answers = members.iter_mut().map(ThroughputMember::read_answer).collect::<Result<Vec<_>>>()?;
                seconds += began.elapsed().as_secs_f64();
                for answer in &answers {
                    merged +=
                        parse_field(answer, "pages_merged: Pages(")? + parse_field(answer, "zeros_freed: Pages(")?;
                }
                if merged >= memory.total_pages() {
                    break;
                }
            }
        }
        ThroughputMethod::Ksmd => {
            let (before, start_time) = (KsmCounters::read(ksmd)?, Instant::now());
            ksm.write_setting("use_zero_pages", 1);
            ksm.write_setting("pages_to_scan", 20_000);
            ksm.write_setting("sleep_millisecs", 0);
            ksm.write_setting("run", 1);
            // One page of each set of equal pages is kept.
            let saved = |counters: KsmCounters| (counters.saved_pages - before.saved_pages).unsigned_abs();
            let (mut best, mut last_progress) = (0, start_time);
            let max_saved =
                if memory.zeros { memory.total_pages() } else { memory.total_pages() - memory.pages_per_process };
            while last_progress.elapsed() < KSMD_SETTLE_TIME && best < max_saved {
                sleep_unless_signaled(Duration::from_millis(2))?;
                let counters = KsmCounters::read(ksmd)?;
                if saved(counters) > best {
                    (best, last_progress, seconds) =
                        (saved(counters), Instant::now(), counters.ksmd_seconds - before.ksmd_seconds);
                }
            }
            ksm.write_setting("run", 0);
            merged = if memory.zeros { best } else { best * memory.processes / (memory.processes - 1) };
        }
    }
    for member in &mut members {
        let check_answer = member.run_command("check")?;
        ensure!(check_answer == "same", "after merging, {check_answer}");
    }
    // ksmd also merges other memory of the processes.
    Ok(ThroughputTrial { memory, method, round, merged_pages: merged.min(memory.total_pages()), seconds })
}

/// A number in the output of a member.
fn parse_field(output: &str, name: &str) -> Result<u64> {
    let number = output.split_once(name).and_then(|(_, rest)| rest.split_once(')')?.0.parse().ok());
    number.with_context(|| format!("no {name:?} in {output:?}"))
}

/// Seconds of a merge, from the format in which Rust prints a duration.
fn parse_merge_seconds(output: &str) -> Result<f64> {
    let words = output.split_once("program_time: ").and_then(|(_, rest)| rest.split_once(','));
    let word = words.with_context(|| format!("no duration in {output:?}"))?.0;
    let units = [("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)];
    let seconds = units.iter().find_map(|(unit, factor)| Some(word.strip_suffix(unit)?.parse::<f64>().ok()? * factor));
    seconds.with_context(|| format!("{word:?} is not a duration"))
}

/// A process that holds memory.
struct ThroughputMember {
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl ThroughputMember {
    fn start(memory: ThroughputMemory, method: ThroughputMethod, domains: &Path) -> Result<Self> {
        let program = std::env::current_exe()?.with_file_name("examples").join("member");
        let runs = memory.pages_per_process / memory.run_pages;
        let mut command = command_through_hold(&program, method == ThroughputMethod::Ksmd)?;
        command.arg("throughput").arg((runs * (memory.run_pages + 1)).to_string());
        if let ThroughputMethod::Engine { threads } = method {
            command.args(["--threads", &threads.to_string()]);
        }
        let mut child = Command::new(command.get_program())
            .args(command.get_args())
            .env("PAGEFOLD_RUNTIME", domains)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let commands = child.stdin.take().context("no input")?;
        let answers = BufReader::new(child.stdout.take().context("no output")?);
        let mut member = Self { child, commands, answers };
        ensure!(member.read_answer()? == "ready", "a member is not ready");
        let seed = u64::from(!memory.zeros);
        for run in 0..runs {
            member.run_command(&format!("fill {} {} {seed}", run * (memory.run_pages + 1), memory.run_pages))?;
        }
        Ok(member)
    }

    fn read_answer(&mut self) -> Result<String> {
        let mut line = String::new();
        let read = self.answers.read_line(&mut line)?;
        ensure!(read > 0, "a member has ended: {}", self.child.wait()?);
        Ok(line.trim_end().to_owned())
    }

    fn send_command(&mut self, line: &str) -> Result<()> {
        writeln!(self.commands, "{line}").context("a member has closed its standard input")
    }

    fn run_command(&mut self, line: &str) -> Result<String> {
        self.send_command(line)?;
        self.read_answer()
    }
}

impl Drop for ThroughputMember {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn member_output_is_parsed() {
        let answer = "MergeCounters { pages_scanned: Pages(10), zeros_freed: Pages(3), pages_merged: Pages(7), program_time: 1.5ms, incomplete_merges: 0 }";
        assert_eq!(parse_field(answer, "pages_merged: Pages(").unwrap(), 7);
        assert!((parse_merge_seconds(answer).unwrap() - 0.0015).abs() < 1e-12);
        assert!((parse_merge_seconds("program_time: 20µs, x").unwrap() - 2e-5).abs() < 1e-12);
        assert!((parse_merge_seconds("program_time: 2s, x").unwrap() - 2.0).abs() < 1e-12);
        assert!(parse_merge_seconds("the store is full").is_err());
    }

    #[test]
    fn thresholds_are_judged_within_rounds() {
        let held = ThroughputMemory { processes: 2, run_pages: 64, zeros: false, pages_per_process: 100 };
        let trial = |way, seconds, merged| ThroughputTrial {
            memory: held,
            method: way,
            round: 1,
            merged_pages: merged,
            seconds,
        };
        let met = |way, seconds: f64, merged: u64| {
            let trials = [
                trial(ThroughputMethod::EVERY_METHOD[0], 5.0, 200),
                trial(way, seconds, merged),
                trial(ThroughputMethod::Ksmd, 5.0, 200),
            ];
            let bars = build_findings(&trials, 100).checks;
            [bars[0].met, bars[1].met]
        };
        let [_, two, together, _] = ThroughputMethod::EVERY_METHOD;
        assert_eq!(met(together, 0.9, 200), [true, false]);
        assert_eq!(met(two, 0.9, 200), [false, true]);
        assert_eq!([met(together, 1.1, 200), met(together, 0.9, 100)], [[false; 2]; 2]);
    }
}
