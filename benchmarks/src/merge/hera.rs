//! The stand-in for HERA (`labs/hera`) in all its modes: memory over time, savings, and run time.
//!
//! The cases are those of the evaluation that it stands for: six materials on 4 and on 8 ranks, a bigger case, and a
//! code that is slowed as by a build with `-finstrument-functions`. One more case is Pagefold's own: the code writes
//! only values that differ (`--writes changed`). The indirection writes no zeros where it stores none; in this case no
//! mode rewrites the present content. In each round the modes run in a random order, and each is compared with the
//! plain run of its round. Their results must be equal to the last bit. Run times of the same code vary by more than
//! the cost of the user engine; therefore some extra rounds run only these two.
//!
//! Memory is that of the job's control group, read in the same way for all modes: anonymous and shared memory. This
//! includes the ranks' messages, and the user engine's store, its index and the directory of its domain. Added to this
//! is the metadata of ksmd for each page it has scanned (`struct ksm_rmap_item`, 64 bytes; mm/ksm.c, 6.18), which no
//! control group includes.

use super::policies::PagefoldProgram;
use super::readings::{KsmCounters, ksmd_pid};
use super::running_program::command_through_hold;
use super::simulations::{BenchmarkCgroup, CompanionMeter};
use super::trial::{sleep_unless_signaled, wait_until_ksmd_forgets};
use super::writable_ksm_settings;
use crate::chart::{self, text_style};
use crate::findings::{Findings, MarkdownTable, PairedRatio, SampleSpread, ThresholdCheck};
use crate::rounds::draw_orders;
use anyhow::{Context, Result, anyhow, ensure};
use pagefold_base::ksm::{DEFAULT_PAGES_TO_SCAN, DEFAULT_SLEEP_MILLISECS};
use pagefold_labs::ksm::KsmTestGuard;
use plotters::prelude::*;
use rustix::process::{Pid, Signal};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const BYTES_PER_MIB: f64 = (1 << 20) as f64;
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Target: the share by which the user engine may save less than the indirection.
const MAX_GAIN_DEFICIT: f64 = 0.02;

/// Target: the share by which the user engine may slow the code down.
const MAX_ENGINE_SLOWDOWN: f64 = 0.03;

/// The minimum run time of the code in seconds, as configured in the user engine.
const ENGINE_MIN_RUNTIME_SECONDS: f64 = 10.0;

/// Metadata bytes of ksmd for each page.
const RMAP_ITEM_BYTES: f64 = 64.0;

/// A case of the benchmark.
#[derive(Clone, Copy, Debug)]
pub struct HeraCase {
    /// The name of the case.
    pub name: &'static str,
    title: &'static str,
    arguments: &'static str,
}

/// The cases, with six materials each.
const HERA_CASES: &[HeraCase] = &[
    HeraCase { name: "ranks4", title: "6 materials on 4 ranks", arguments: "--ranks 4 --steps 100" },
    HeraCase {
        name: "changed",
        title: "The same, without rewrites of equal contents",
        arguments: "--ranks 4 --steps 100 --writes changed",
    },
    HeraCase { name: "ranks8", title: "6 materials on 8 ranks", arguments: "--ranks 8 --steps 100" },
    HeraCase {
        name: "bigger",
        title: "A bigger case on 8 ranks",
        arguments: "--ranks 8 --roots 3 --levels 3 --steps 60",
    },
    HeraCase { name: "slow", title: "The slowed code on 4 ranks", arguments: "--ranks 4 --slow --steps 40" },
];

/// Additional arguments of a quick run: later options override earlier ones.
const QUICK_ARGUMENTS: &str = " --roots 2 --levels 2 --steps 4";

/// The named cases, or all.
pub fn select_cases(names: &[String]) -> Result<Vec<HeraCase>> {
    let unknown = names.iter().find(|name| HERA_CASES.iter().all(|case| case.name != **name));
    let all = || HERA_CASES.iter().map(|case| case.name).collect::<Vec<_>>().join(", ");
    ensure!(unknown.is_none(), "unknown case {unknown:?}; the cases are {}", all());
    Ok(HERA_CASES
        .iter()
        .copied()
        .filter(|case| names.is_empty() || names.iter().any(|name| name == case.name))
        .collect())
}

/// The mechanism that saves memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HeraMode {
    Plain,
    /// The code itself: an indirection in the index operator of its arrays.
    BlockIndirection,
    /// ksmd, over all memory, with this `pages_to_scan` and `sleep_millisecs` 20.
    WholeProcessKsm(u32),
    /// ksmd, as `pagefold run --policy guided` drives it.
    GuidedMerge,
    /// The user engine, at the end of time steps.
    UserEngine,
}

impl HeraMode {
    const EVERY_MODE: [Self; 6] = [
        Self::Plain,
        Self::BlockIndirection,
        Self::WholeProcessKsm(2000),
        Self::WholeProcessKsm(20_000),
        Self::GuidedMerge,
        Self::UserEngine,
    ];

    fn name(self) -> String {
        match self {
            Self::Plain => "plain".to_owned(),
            Self::BlockIndirection => "blocks".to_owned(),
            Self::WholeProcessKsm(pages) => format!("ksm whole {pages}/20"),
            Self::GuidedMerge => "ksm guided".to_owned(),
            Self::UserEngine => "engine".to_owned(),
        }
    }

    /// How many pages ksmd scans at once, if it scans all memory.
    fn pages_to_scan(self) -> Option<u64> {
        if let Self::WholeProcessKsm(pages) = self { Some(u64::from(pages)) } else { None }
    }

    fn uses_ksmd(self) -> bool {
        matches!(self, Self::WholeProcessKsm(_) | Self::GuidedMerge)
    }

    /// Medium brightness of the colors of M. Okabe and K. Ito, "Color Universal Design" (2008).
    fn color(self) -> RGBColor {
        match self {
            Self::Plain => chart::LIGHT_GRAY,
            Self::BlockIndirection => chart::OCHRE,
            Self::WholeProcessKsm(2000) => chart::BLUE,
            Self::WholeProcessKsm(_) => chart::VERMILION,
            Self::GuidedMerge => chart::PINK,
            Self::UserEngine => chart::GREEN,
        }
    }
}

/// The conditions of the runs.
#[derive(Debug)]
pub struct HeraConditions {
    /// The program of the stand-in.
    pub program: PathBuf,
    /// The pagefold binary.
    pub pagefold: PagefoldProgram,
    /// CPU bound of guided merging, in percent of one CPU.
    pub cpu_percent: u32,
    /// Slow-down bound of the user engine.
    pub max_slowdown: f64,
    /// Extra rounds of only the plain code and the user engine, after the others.
    pub extra_rounds: usize,
    /// Very short runs.
    pub quick: bool,
}

impl HeraConditions {
    fn min_runtime_seconds(&self) -> f64 {
        if self.quick { 0.0 } else { ENGINE_MIN_RUNTIME_SECONDS }
    }
}

/// A sample of a run.
#[derive(Clone, Copy, Debug, Default)]
struct HeraSample {
    seconds: f64,
    /// Memory of the control group, in bytes.
    memory_bytes: f64,
    /// Metadata of ksmd, in bytes.
    metadata_bytes: f64,
    faults: u64,
    ksmd_seconds: f64,
    pagefold_seconds: f64,
}

/// A run.
#[derive(Debug)]
pub struct HeraRun {
    mode: HeraMode,
    round: usize,
    seconds: f64,
    samples: Vec<HeraSample>,
    /// CPU seconds of ksmd until the end of the run.
    ksmd_seconds: f64,
    /// Seconds that the user engine took on the slowest rank, as it reports.
    engine_seconds: f64,
    result: String,
}

impl HeraRun {
    /// Mean memory over the run, with metadata, in bytes.
    fn mean_memory(&self) -> f64 {
        mean(self.samples.iter().map(|look| look.memory_bytes + look.metadata_bytes))
    }

    /// Mean memory over the second half of the run.
    fn mean_later_memory(&self) -> f64 {
        mean(self.samples[self.samples.len() / 2..].iter().map(|look| look.memory_bytes + look.metadata_bytes))
    }

    fn last_sample(&self) -> HeraSample {
        self.samples.last().copied().unwrap_or_default()
    }
}

fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len().max(1) as f64;
    values.sum::<f64>() / count
}

/// Run a case in all modes, round by round.
pub fn measure_case(case: HeraCase, rounds: usize, conditions: &HeraConditions) -> Result<Vec<HeraRun>> {
    let mut runs: Vec<HeraRun> = Vec::new();
    for (round, order) in (1..).zip(draw_orders(&HeraMode::EVERY_MODE, rounds + conditions.extra_rounds)) {
        let is_measured = |mode: &HeraMode| round <= rounds || [HeraMode::Plain, HeraMode::UserEngine].contains(mode);
        for mode in order.into_iter().filter(is_measured) {
            eprint!("{} round {round}: {} ... ", case.name, mode.name());
            let run = run_mode(case, mode, round, conditions)?;
            eprintln!("{:.1} s, {:.0} MiB", run.seconds, run.mean_memory() / BYTES_PER_MIB);
            let first = runs.first().map_or(&run.result, |first| &first.result);
            ensure!(*first == run.result, "{} computed {first:?} and then {:?}", case.name, run.result);
            runs.push(run);
        }
    }
    Ok(runs)
}

fn run_mode(case: HeraCase, mode: HeraMode, round: usize, conditions: &HeraConditions) -> Result<HeraRun> {
    let ksm = KsmTestGuard::acquire().map_err(anyhow::Error::msg)?;
    let ksmd = ksmd_pid()?;
    wait_until_ksmd_forgets(&ksm, ksmd)?;
    let group = BenchmarkCgroup::create()?;
    let folder = tempfile::tempdir().context("a folder for the run")?;
    // On a tmpfs, as domains require, and used by this run only.
    let domains = tempfile::tempdir_in("/dev/shm").context("a folder for domains")?;
    let state = tempfile::tempdir().context("a folder for pagefold's state")?;
    let pages_to_scan = mode.pages_to_scan();
    ksm.write_setting("pages_to_scan", pages_to_scan.unwrap_or(DEFAULT_PAGES_TO_SCAN));
    ksm.write_setting("sleep_millisecs", DEFAULT_SLEEP_MILLISECS);
    ksm.write_setting("run", u8::from(pages_to_scan.is_some()));
    let settings = writable_ksm_settings();
    let command = build_command(case, mode, conditions, state.path())?;
    let (output, complaints) = (folder.path().join("output"), folder.path().join("complaints"));
    let before = KsmCounters::read(ksmd)?;
    let start = Instant::now();
    let mut program = group
        .command_in_group(&command)
        .env("PAGEFOLD_RUNTIME", domains.path())
        .stdin(Stdio::null())
        .stdout(File::create(&output)?)
        .stderr(File::create(&complaints)?)
        .spawn()
        .context("cannot start a run")?;
    let mut companion = (mode == HeraMode::GuidedMerge).then(|| CompanionMeter::new(program.id(), state.path()));
    let mut samples = Vec::new();
    let watch_result = watch_run(&mut program, &mut samples, &group, companion.as_mut(), || {
        let metadata = if mode.uses_ksmd() { count_rmap_items(&ksm) as f64 * RMAP_ITEM_BYTES } else { 0.0 };
        Ok((start.elapsed().as_secs_f64(), metadata, KsmCounters::read(ksmd)?.ksmd_seconds - before.ksmd_seconds))
    });
    let seconds = start.elapsed().as_secs_f64();
    let has_min_runtime = seconds >= conditions.min_runtime_seconds();
    ensure!(
        has_min_runtime || watch_result.is_err(),
        "{} took {seconds:.1} s, less than the minimum run time configured in the engine",
        case.name
    );
    if watch_result.is_err() {
        let _ = rustix::process::kill_process(Pid::from_child(&program), Signal::KILL);
        let _ = program.wait();
    }
    let companion_result = companion.as_mut().map_or(Ok(()), CompanionMeter::wait_for_exit);
    watch_result.with_context(|| fs::read_to_string(&complaints).unwrap_or_default())?;
    companion_result?;
    if mode == HeraMode::GuidedMerge {
        let after = writable_ksm_settings();
        ensure!(after == settings, "pagefold left KSM with {after:?} instead of {settings:?}");
    }
    let printed = fs::read_to_string(&output)?;
    let result = printed.lines().find(|line| line.starts_with("result ")).context("the code printed no result")?;
    let engine = printed.split_whitespace().filter_map(|word| word.strip_prefix("engine_s=")?.parse::<f64>().ok());
    Ok(HeraRun {
        mode,
        round,
        seconds,
        samples,
        ksmd_seconds: KsmCounters::read(ksmd)?.ksmd_seconds - before.ksmd_seconds,
        engine_seconds: engine.fold(0.0, f64::max),
        result: result.to_owned(),
    })
}

/// The command of a run. The OOM killer takes its program first.
fn build_command(case: HeraCase, mode: HeraMode, conditions: &HeraConditions, state: &Path) -> Result<Command> {
    let mut command = match mode {
        HeraMode::GuidedMerge => {
            let guided = conditions.pagefold.run_guided_command(state, conditions.cpu_percent);
            let mut command = command_through_hold(guided.get_program(), false)?;
            command.args(guided.get_args()).arg(&conditions.program);
            command
        }
        _ => command_through_hold(&conditions.program, mode.pages_to_scan().is_some())?,
    };
    let quick = if conditions.quick { QUICK_ARGUMENTS } else { "" };
    // After its first sample the code takes none, because samples cost time.
    let memory = match mode {
        HeraMode::BlockIndirection => "blocks",
        HeraMode::UserEngine => "engine",
        HeraMode::Plain | HeraMode::WholeProcessKsm(_) | HeraMode::GuidedMerge => "plain",
    };
    command.args(case.arguments.split(' ')).args(quick.split_ascii_whitespace());
    command.args(["--sample", "1000000", "--memory", memory, "--max-slowdown", &conditions.max_slowdown.to_string()]);
    command.args(["--min-runtime", &conditions.min_runtime_seconds().to_string()]);
    Ok(command)
}

/// Sample a run until it has ended, and check that it succeeded. `read` adds the seconds since the start, ksmd's
/// metadata and its CPU time.
fn watch_run(
    program: &mut Child,
    samples: &mut Vec<HeraSample>,
    group: &BenchmarkCgroup,
    mut companion: Option<&mut CompanionMeter>,
    read: impl Fn() -> Result<(f64, f64, f64)>,
) -> Result<()> {
    loop {
        if let Some(status) = program.try_wait()? {
            ensure!(status.success(), "the code failed: {status}");
            return Ok(());
        }
        let usage = group.read_usage()?;
        let (seconds, metadata, ksmd) = read()?;
        if let Some(companion) = &mut companion {
            companion.read_cpu()?;
        }
        let memory = (usage.anonymous_bytes + usage.shared_bytes) as f64;
        let pagefold = companion.as_ref().map_or(0.0, |companion| companion.cpu_seconds);
        samples.push(HeraSample {
            seconds,
            memory_bytes: memory,
            metadata_bytes: metadata,
            faults: usage.page_faults,
            ksmd_seconds: ksmd,
            pagefold_seconds: pagefold,
        });
        sleep_unless_signaled(POLL_INTERVAL)?;
    }
}

/// Pages for which ksmd keeps metadata: each of them is in one of these four counters (mm/ksm.c, 6.18).
fn count_rmap_items(ksm: &KsmTestGuard) -> i64 {
    ["pages_shared", "pages_sharing", "pages_unshared", "pages_volatile"]
        .iter()
        .map(|name| ksm.read_counter(name))
        .sum()
}

/// Each run with the plain run of its round.
fn pairs_with_plain(runs: &[HeraRun], mode: HeraMode) -> Vec<(&HeraRun, &HeraRun)> {
    let plain = |round| runs.iter().find(move |run| run.mode == HeraMode::Plain && run.round == round);
    runs.iter().filter(|run| run.mode == mode).filter_map(|run| Some((run, plain(run.round)?))).collect()
}

/// A figure of a mode relative to plain. `None` without rounds that have both.
fn ratio_to_plain(runs: &[HeraRun], mode: HeraMode, figure: impl Fn(&HeraRun) -> f64) -> Option<PairedRatio> {
    PairedRatio::from_rounds(pairs_with_plain(runs, mode).iter().map(|(run, plain)| figure(run) / figure(plain)))
}

/// The share of memory that a mode saves against plain.
fn memory_gain(runs: &[HeraRun], mode: HeraMode) -> f64 {
    ratio_to_plain(runs, mode, HeraRun::mean_memory).map_or(f64::NAN, PairedRatio::decrease)
}

/// The share by which a mode is slower than plain.
fn slowdown(runs: &[HeraRun], mode: HeraMode) -> f64 {
    ratio_to_plain(runs, mode, |run| run.seconds).map_or(f64::NAN, PairedRatio::increase)
}

/// The table, the checks and the samples of a case.
pub fn build_findings(case: HeraCase, runs: &[HeraRun], conditions: &HeraConditions) -> Findings {
    let mut findings = Findings::new(
        "case,round,mode,seconds,memory_bytes,metadata_bytes,faults,ksmd_cpu_seconds,pagefold_cpu_seconds",
    );
    let mut table = MarkdownTable::new(
        case.title,
        &[
            "mode",
            "memory MiB",
            "gain",
            "in the second half",
            "run s",
            "slower",
            "faults",
            "ksmd CPU s",
            "pagefold CPU s",
            "engine s",
        ],
    );
    for mode in HeraMode::EVERY_MODE {
        let median = |value: &dyn Fn(&HeraRun) -> f64| {
            SampleSpread::from_samples(pairs_with_plain(runs, mode).iter().map(|(run, _)| value(run))).median
        };
        let relative = |figure: &dyn Fn(&HeraRun) -> f64, format: fn(PairedRatio) -> String| {
            let ratio = ratio_to_plain(runs, mode, figure).filter(|_| mode != HeraMode::Plain);
            ratio.map_or("-".to_owned(), format)
        };
        table.rows.push(vec![
            mode.name(),
            format!("{:.0}", median(&HeraRun::mean_memory) / BYTES_PER_MIB),
            relative(&HeraRun::mean_memory, PairedRatio::format_decrease),
            relative(&HeraRun::mean_later_memory, PairedRatio::format_decrease),
            format!("{:.1}", median(&|run| run.seconds)),
            relative(&|run| run.seconds, PairedRatio::format_increase),
            format!("{:.0}", median(&|run| run.last_sample().faults as f64)),
            format!("{:.2}", median(&|run| run.ksmd_seconds)),
            format!("{:.2}", median(&|run| run.last_sample().pagefold_seconds)),
            format!("{:.2}", median(&|run| run.engine_seconds)),
        ]);
    }
    table.notes.push(format!(
        "`hera {}`. Memory is the mean over the run, of the whole job, with the engine's store and index and ksmd's \
         metadata; savings and slow-down are against the plain run of the same round, with 95 % intervals. The engine \
         had a bound of {:.1} %, with the allowance of {} s available at the start; guided merging had one of {} % of \
         a CPU. \
         \"engine s\" is its time on the slowest rank. {} of {} rounds had plain and engine only. All \
         modes computed the same to the last bit.",
        case.arguments,
        conditions.max_slowdown * 100.0,
        conditions.min_runtime_seconds(),
        conditions.cpu_percent,
        conditions.extra_rounds,
        pairs_with_plain(runs, HeraMode::Plain).len()
    ));
    findings.tables.push(table);
    findings.checks = evaluate_thresholds(case, runs);
    for run in runs {
        findings.samples.extend(run.samples.iter().map(|sample| {
            format!(
                "{},{},{},{:.2},{:.0},{:.0},{},{:.3},{:.2}",
                case.name,
                run.round,
                run.mode.name(),
                sample.seconds,
                sample.memory_bytes,
                sample.metadata_bytes,
                sample.faults,
                sample.ksmd_seconds,
                sample.pagefold_seconds
            )
        }));
    }
    findings
}

fn evaluate_thresholds(case: HeraCase, runs: &[HeraRun]) -> Vec<ThresholdCheck> {
    let percent = |share: f64| format!("{:.1} %", share * 100.0);
    let name = case.name;
    let (engine, blocks) = (memory_gain(runs, HeraMode::UserEngine), memory_gain(runs, HeraMode::BlockIndirection));
    let slower = slowdown(runs, HeraMode::UserEngine);
    let mut bars = vec![
        ThresholdCheck {
            claim: format!(
                "{name}: the engine saves as much as the indirection, within {:.0} points",
                MAX_GAIN_DEFICIT * 100.0
            ),
            measured: format!("{} against {}", percent(engine), percent(blocks)),
            met: engine >= blocks - MAX_GAIN_DEFICIT,
        },
        ThresholdCheck {
            claim: format!("{name}: the engine slows the code down by at most {:.0} %", MAX_ENGINE_SLOWDOWN * 100.0),
            measured: format!(
                "{}; the indirection by {}",
                percent(slower),
                percent(slowdown(runs, HeraMode::BlockIndirection))
            ),
            met: slower <= MAX_ENGINE_SLOWDOWN,
        },
    ];
    for mode in HeraMode::EVERY_MODE.into_iter().filter(|mode| mode.uses_ksmd()) {
        let (mode_gain, mode_slowdown) = (memory_gain(runs, mode), slowdown(runs, mode));
        bars.push(ThresholdCheck {
            claim: format!("{name}: the engine saves more than {} and slows down less", mode.name()),
            measured: format!(
                "{} against {}, slower by {} against {}",
                percent(engine),
                percent(mode_gain),
                percent(slower),
                percent(mode_slowdown)
            ),
            met: engine > mode_gain && slower < mode_slowdown,
        });
    }
    bars
}

/// Draw memory over time, from the first round.
pub fn draw_chart(case: HeraCase, runs: &[HeraRun], path: &Path) -> Result<()> {
    paint_chart(case, runs, path).map_err(|error| anyhow!("cannot draw: {error}"))
}

fn paint_chart(case: HeraCase, runs: &[HeraRun], path: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let first = || runs.iter().filter(|run| run.round == 1);
    let points = |run: &HeraRun| {
        run.samples
            .iter()
            .map(|sample| (sample.seconds, (sample.memory_bytes + sample.metadata_bytes) / BYTES_PER_MIB))
            .collect::<Vec<_>>()
    };
    let all_points: Vec<(f64, f64)> = first().flat_map(points).collect();
    let latest = all_points.iter().map(|point| point.0).fold(1.0, f64::max);
    let highest = all_points.iter().map(|point| point.1).fold(1.0, f64::max) * 1.25;
    let area = SVGBackend::new(path, (960, 480)).into_drawing_area();
    let mut chart = ChartBuilder::on(&area)
        .caption(case.title, text_style(17, chart::GRAY))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..latest, 0.0..highest)?;
    chart::configure_axes(&mut chart).x_desc("seconds").y_desc("memory of the job, MiB").draw()?;
    for (i, mode) in HeraMode::EVERY_MODE.into_iter().enumerate() {
        let Some(run) = first().find(|run| run.mode == mode) else { continue };
        chart.draw_series(LineSeries::new(points(run), mode.color().stroke_width(2)))?;
        // The legend stands above the highest curve, side by side.
        let label_position = (latest * (0.02 + 0.16 * i as f64), highest * 0.97);
        let style = text_style(15, mode.color());
        chart.draw_series([Text::new(mode.name(), label_position, style)])?;
    }
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample_run(mode: HeraMode, round: usize, seconds: f64, memory: f64) -> HeraRun {
        let look = |at: f64, memory: f64| HeraSample {
            seconds: at,
            memory_bytes: memory,
            metadata_bytes: 64.0,
            ..HeraSample::default()
        };
        let looks = vec![look(0.0, 1000.0 - 64.0), look(seconds, 2.0 * memory - 1000.0 - 64.0)];
        HeraRun { mode, round, seconds, samples: looks, ksmd_seconds: 0.0, engine_seconds: 0.0, result: String::new() }
    }

    fn evaluate_sample(engine: (f64, f64), blocks: f64, kernel: (f64, f64)) -> Vec<bool> {
        let mut runs = vec![sample_run(HeraMode::Plain, 1, 100.0, 1000.0)];
        runs.push(sample_run(HeraMode::UserEngine, 1, engine.0, engine.1));
        runs.push(sample_run(HeraMode::BlockIndirection, 1, 110.0, blocks));
        let kernels = HeraMode::EVERY_MODE.into_iter().filter(|mode| mode.uses_ksmd());
        runs.extend(kernels.map(|mode| sample_run(mode, 1, kernel.0, kernel.1)));
        evaluate_thresholds(HERA_CASES[0], &runs).iter().map(|bar| bar.met).collect()
    }

    #[test]
    fn thresholds_are_met_and_missed() {
        assert_eq!(evaluate_sample((102.0, 760.0), 750.0, (105.0, 800.0)), [true; 5]);
        assert_eq!(evaluate_sample((104.0, 780.0), 750.0, (105.0, 800.0)), [false, false, true, true, true]);
        assert_eq!(evaluate_sample((102.0, 760.0), 750.0, (101.0, 800.0))[2..], [false; 3], "it is slower");
        assert_eq!(evaluate_sample((102.0, 760.0), 750.0, (105.0, 700.0))[2..], [false; 3], "it saves less");
    }

    #[test]
    fn gain_is_relative_to_plain_run_of_same_round() {
        let mut runs =
            vec![sample_run(HeraMode::Plain, 1, 100.0, 1000.0), sample_run(HeraMode::Plain, 2, 200.0, 2000.0)];
        runs.extend([
            sample_run(HeraMode::UserEngine, 1, 101.0, 750.0),
            sample_run(HeraMode::UserEngine, 2, 202.0, 1500.0),
        ]);
        let gain = ratio_to_plain(&runs, HeraMode::UserEngine, HeraRun::mean_memory).unwrap();
        let (low, high) = gain.interval.unwrap();
        assert!((low - 0.75).abs() < 1e-9 && (high - 0.75).abs() < 1e-9, "{gain:?}");
        assert!((memory_gain(&runs, HeraMode::UserEngine) - 0.25).abs() < 1e-9);
        assert!((slowdown(&runs, HeraMode::UserEngine) - 0.01).abs() < 1e-9);
    }
}
