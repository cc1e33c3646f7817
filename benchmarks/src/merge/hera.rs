//! The stand-in for HERA (`labs/hera`) in all its modes: memory over time, gain, and run time.
//!
//! The cases are those of the evaluation that it stands for: six materials on 4 and on 8 ranks, a bigger case, and a
//! code that is slowed as a build with `-finstrument-functions` is. Another is ours: the indirection writes no zeros
//! where there are none stored, so that there is a case in which nobody writes what is there already. In each round the
//! modes come in an order drawn anew, and each is compared with the plain run of its round; what they compute must be
//! the same to the last bit. Run times of the same code scatter by more than the user engine costs: some more rounds are
//! of these two alone.
//!
//! Memory is that of the job's control group, read in the same way for all: anonymous and shared memory, so that the
//! messages of ranks, the store of the user engine, its index and the directory of its domain count. To that comes what
//! ksmd keeps for each page it has seen (`struct ksm_rmap_item`, 64 bytes; mm/ksm.c, 6.18), which is no group's.

use super::compare::shuffled;
use super::holder::held;
use super::hot::{Beside, Group, geometric_mean};
use super::ksm_settings;
use super::policies::Pagefold;
use super::readings::{Counters, ksmd};
use super::trial::{forget, pause_for};
use crate::chart::{self, letters};
use crate::report::{Bar, Findings, Spread, Table};
use anyhow::{Context, Result, anyhow, ensure};
use pagefold_base::ksm::{DEFAULT_PAGES_TO_SCAN, DEFAULT_SLEEP_MILLISECS};
use pagefold_labs::ksm::Ksm;
use plotters::prelude::*;
use rustix::process::{Pid, Signal};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const MIB: f64 = (1 << 20) as f64;
const TICK: Duration = Duration::from_millis(100);

/// By so many points the user engine may gain less than the indirection does.
const BEHIND: f64 = 0.02;

/// By so much the user engine may slow the code down.
const SLOW_DOWN: f64 = 0.03;

/// For how many seconds the user engine is told that the code runs at least.
const LIFETIME: f64 = 10.0;

/// Bytes that ksmd keeps for a page.
const RMAP_ITEM: f64 = 64.0;

/// A case.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// What it is called.
    pub name: &'static str,
    title: &'static str,
    arguments: &'static str,
}

/// Six materials each.
const CASES: &[Case] = &[
    Case { name: "ranks4", title: "6 materials on 4 ranks", arguments: "--ranks 4 --steps 100" },
    Case {
        name: "changed",
        title: "The same, with nothing written over what is the same",
        arguments: "--ranks 4 --steps 100 --writes changed",
    },
    Case { name: "ranks8", title: "6 materials on 8 ranks", arguments: "--ranks 8 --steps 100" },
    Case { name: "bigger", title: "A bigger case on 8 ranks", arguments: "--ranks 8 --roots 3 --levels 3 --steps 60" },
    Case { name: "slow", title: "The slowed code on 4 ranks", arguments: "--ranks 4 --slow --steps 40" },
];

/// What a quick run has besides: later options count.
const QUICK: &str = " --roots 2 --levels 2 --steps 4";

/// Those that are named, or all.
pub fn chosen(names: &[String]) -> Result<Vec<Case>> {
    let unknown = names.iter().find(|name| CASES.iter().all(|case| case.name != **name));
    let all = || CASES.iter().map(|case| case.name).collect::<Vec<_>>().join(", ");
    ensure!(unknown.is_none(), "there is no case {unknown:?}; there are {}", all());
    Ok(CASES.iter().copied().filter(|case| names.is_empty() || names.iter().any(|name| name == case.name)).collect())
}

/// Who saves memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Plain,
    /// The code itself, by an indirection in the index operator of its arrays.
    Blocks,
    /// ksmd, of all memory, with this `pages_to_scan` and `sleep_millisecs` 20.
    Whole(u32),
    /// ksmd, as `pagefold run --policy guided` drives it.
    Guided,
    /// The user engine, at the end of steps.
    Engine,
}

impl Mode {
    const ALL: [Self; 6] =
        [Self::Plain, Self::Blocks, Self::Whole(2000), Self::Whole(20_000), Self::Guided, Self::Engine];

    fn name(self) -> String {
        match self {
            Self::Plain => "plain".to_owned(),
            Self::Blocks => "blocks".to_owned(),
            Self::Whole(pages) => format!("ksm whole {pages}/20"),
            Self::Guided => "ksm guided".to_owned(),
            Self::Engine => "engine".to_owned(),
        }
    }

    fn is_kernel(self) -> bool {
        matches!(self, Self::Whole(_) | Self::Guided)
    }

    /// A middle brightness of the colours of M. Okabe and K. Ito, "Color Universal Design" (2008).
    fn colour(self) -> RGBColor {
        match self {
            Self::Plain => chart::LIGHT_GREY,
            Self::Blocks => chart::OCHRE,
            Self::Whole(2000) => chart::BLUE,
            Self::Whole(_) => chart::VERMILION,
            Self::Guided => chart::PINK,
            Self::Engine => chart::GREEN,
        }
    }
}

/// How runs are made.
#[derive(Debug)]
pub struct Conditions {
    /// The code.
    pub program: PathBuf,
    /// How pagefold is called.
    pub pagefold: Pagefold,
    /// Bound on CPU of guided merging, in percent of one.
    pub cpu: u32,
    /// Bound on the slow-down that the user engine is given.
    pub max_slowdown: f64,
    /// Rounds of the plain code and the user engine alone, after the others.
    pub pairs: usize,
    /// Tiny runs.
    pub quick: bool,
}

impl Conditions {
    fn lifetime(&self) -> f64 {
        if self.quick { 0.0 } else { LIFETIME }
    }
}

/// A look at a run.
#[derive(Clone, Copy, Debug, Default)]
struct Look {
    seconds: f64,
    /// Of the control group, in bytes.
    memory: f64,
    /// Of ksmd, in bytes.
    metadata: f64,
    faults: u64,
    ksmd: f64,
    pagefold: f64,
}

/// One run.
#[derive(Debug)]
pub struct Run {
    mode: Mode,
    round: usize,
    seconds: f64,
    looks: Vec<Look>,
    /// CPU seconds of ksmd, to the end.
    ksmd: f64,
    /// The time that the user engine took of the slowest rank, in seconds, as it says.
    engine: f64,
    result: String,
}

impl Run {
    /// Mean over the run, with metadata, in bytes.
    fn memory(&self) -> f64 {
        mean(self.looks.iter().map(|look| look.memory + look.metadata))
    }

    /// Mean over its second half.
    fn later(&self) -> f64 {
        mean(self.looks[self.looks.len() / 2..].iter().map(|look| look.memory + look.metadata))
    }

    fn last(&self) -> Look {
        self.looks.last().copied().unwrap_or_default()
    }
}

fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len().max(1) as f64;
    values.sum::<f64>() / count
}

/// Run a case in all modes, round by round.
pub fn measure(case: Case, rounds: usize, conditions: &Conditions) -> Result<Vec<Run>> {
    let mut runs: Vec<Run> = Vec::new();
    for round in 1..=rounds + conditions.pairs {
        let modes = if round <= rounds { Mode::ALL.to_vec() } else { vec![Mode::Plain, Mode::Engine] };
        for mode in shuffled(modes) {
            eprint!("{} round {round}: {} ... ", case.name, mode.name());
            let run = run(case, mode, round, conditions)?;
            eprintln!("{:.1} s, {:.0} MiB", run.seconds, run.memory() / MIB);
            let first = runs.first().map_or(&run.result, |first| &first.result);
            ensure!(*first == run.result, "{} computed {first:?} and then {:?}", case.name, run.result);
            runs.push(run);
        }
    }
    Ok(runs)
}

fn run(case: Case, mode: Mode, round: usize, conditions: &Conditions) -> Result<Run> {
    let ksm = Ksm::take().map_err(anyhow::Error::msg)?;
    let ksmd = ksmd()?;
    forget(&ksm, ksmd)?;
    let group = Group::create()?;
    let folder = tempfile::tempdir().context("a folder for the run")?;
    // On a tmpfs, as domains want it, and of this run alone.
    let domains = tempfile::tempdir_in("/dev/shm").context("a folder for domains")?;
    let state = tempfile::tempdir().context("a folder for pagefold's state")?;
    let whole = if let Mode::Whole(pages) = mode { Some(u64::from(pages)) } else { None };
    ksm.set("pages_to_scan", whole.unwrap_or(DEFAULT_PAGES_TO_SCAN));
    ksm.set("sleep_millisecs", DEFAULT_SLEEP_MILLISECS);
    ksm.set("run", u8::from(whole.is_some()));
    let settings = ksm_settings();

    let mut command = match mode {
        Mode::Guided => {
            let guided = conditions.pagefold.run_guided(state.path(), conditions.cpu);
            let mut command = held(guided.get_program(), false)?;
            command.args(guided.get_args()).arg(&conditions.program);
            command
        }
        _ => held(&conditions.program, whole.is_some())?,
    };
    let quick = if conditions.quick { QUICK } else { "" };
    // It takes no samples of its own, which cost time, after the first.
    let memory = match mode {
        Mode::Blocks => "blocks",
        Mode::Engine => "engine",
        Mode::Plain | Mode::Whole(_) | Mode::Guided => "plain",
    };
    command.args(case.arguments.split(' ')).args(quick.split_ascii_whitespace());
    command.args(["--sample", "1000000", "--memory", memory, "--max-slowdown", &conditions.max_slowdown.to_string()]);
    command.args(["--lifetime", &conditions.lifetime().to_string()]);
    let (output, complaints) = (folder.path().join("output"), folder.path().join("complaints"));
    let before = Counters::read(ksmd)?;
    let begin = Instant::now();
    let mut program = group
        .command(&command)
        .env("PAGEFOLD_RUNTIME", domains.path())
        .stdin(Stdio::null())
        .stdout(File::create(&output)?)
        .stderr(File::create(&complaints)?)
        .spawn()
        .context("cannot start a run")?;
    let mut beside = (mode == Mode::Guided).then(|| Beside::new(program.id(), state.path()));
    let mut looks = Vec::new();
    let watched = watch(&mut program, &mut looks, &group, beside.as_mut(), || {
        let metadata = if mode.is_kernel() { rmap_items(&ksm) as f64 * RMAP_ITEM } else { 0.0 };
        Ok((begin.elapsed().as_secs_f64(), metadata, Counters::read(ksmd)?.ksmd - before.ksmd))
    });
    let seconds = begin.elapsed().as_secs_f64();
    let lasted = seconds >= conditions.lifetime();
    ensure!(lasted || watched.is_err(), "{} took {seconds:.1} s: less than the engine was told", case.name);
    if watched.is_err() {
        let _ = rustix::process::kill_process(Pid::from_child(&program), Signal::KILL);
        let _ = program.wait();
    }
    let put_back = beside.as_mut().map_or(Ok(()), Beside::end);
    watched.with_context(|| fs::read_to_string(&complaints).unwrap_or_default())?;
    put_back?;
    if mode == Mode::Guided {
        let after = ksm_settings();
        ensure!(after == settings, "pagefold left KSM with {after:?} instead of {settings:?}");
    }
    let said = fs::read_to_string(&output)?;
    let result = said.lines().find(|line| line.starts_with("result ")).context("the code printed no result")?;
    let engine = said.split_whitespace().filter_map(|word| word.strip_prefix("engine_s=")?.parse::<f64>().ok());
    Ok(Run {
        mode,
        round,
        seconds,
        looks,
        ksmd: Counters::read(ksmd)?.ksmd - before.ksmd,
        engine: engine.fold(0.0, f64::max),
        result: result.to_owned(),
    })
}

/// Look at a run until it has ended, and see that it went well. What is read besides: seconds since the beginning,
/// ksmd's metadata and its CPU time.
fn watch(
    program: &mut Child,
    looks: &mut Vec<Look>,
    group: &Group,
    mut beside: Option<&mut Beside>,
    read: impl Fn() -> Result<(f64, f64, f64)>,
) -> Result<()> {
    loop {
        if let Some(status) = program.try_wait()? {
            ensure!(status.success(), "the code failed: {status}");
            return Ok(());
        }
        let usage = group.read()?;
        let (seconds, metadata, ksmd) = read()?;
        if let Some(beside) = &mut beside {
            beside.look()?;
        }
        let memory = (usage.anonymous + usage.shared) as f64;
        let pagefold = beside.as_ref().map_or(0.0, |beside| beside.cpu);
        looks.push(Look { seconds, memory, metadata, faults: usage.faults, ksmd, pagefold });
        pause_for(TICK)?;
    }
}

/// Pages that ksmd keeps something for: the four counters are of these, each in one of them (mm/ksm.c, 6.18).
fn rmap_items(ksm: &Ksm) -> i64 {
    ["pages_shared", "pages_sharing", "pages_unshared", "pages_volatile"].iter().map(|name| ksm.counter(name)).sum()
}

/// Each run with the plain one of its round.
fn pairs(runs: &[Run], mode: Mode) -> Vec<(&Run, &Run)> {
    let plain = |round| runs.iter().find(move |run| run.mode == Mode::Plain && run.round == round);
    runs.iter().filter(|run| run.mode == mode).filter_map(|run| Some((run, plain(run.round)?))).collect()
}

/// The share of memory that a mode gains against plain, and by how much it is slower, over all rounds.
fn gain(runs: &[Run], mode: Mode) -> Spread {
    Spread::of(pairs(runs, mode).iter().map(|(run, plain)| 1.0 - run.memory() / plain.memory()))
}

fn slow_down(runs: &[Run], mode: Mode) -> (f64, Option<(f64, f64)>) {
    let ratios: Vec<f64> = pairs(runs, mode).iter().map(|(run, plain)| run.seconds / plain.seconds).collect();
    let (mean, interval) = geometric_mean(&ratios);
    (mean - 1.0, interval.map(|(low, high)| (low - 1.0, high - 1.0)))
}

/// The table, the bars and the samples of a case.
pub fn findings(case: Case, runs: &[Run], conditions: &Conditions) -> Findings {
    let mut findings = Findings::new(
        "case,round,mode,seconds,memory_bytes,metadata_bytes,faults,ksmd_cpu_seconds,pagefold_cpu_seconds",
    );
    let percent = |share: f64| format!("{:+.1} %", share * 100.0);
    let mut table = Table::new(
        case.title,
        &[
            "mode",
            "memory MiB",
            "gain",
            "in the second half",
            "run s",
            "slower",
            "95 % interval",
            "faults",
            "ksmd CPU s",
            "pagefold CPU s",
            "engine s",
        ],
    );
    for mode in Mode::ALL {
        let median =
            |value: &dyn Fn(&Run) -> f64| Spread::of(pairs(runs, mode).iter().map(|(run, _)| value(run))).median;
        let later = Spread::of(pairs(runs, mode).iter().map(|(run, plain)| 1.0 - run.later() / plain.later()));
        let (slower, interval) = slow_down(runs, mode);
        let told = |words: String| if mode == Mode::Plain { "-".to_owned() } else { words };
        table.rows.push(vec![
            mode.name(),
            format!("{:.0}", median(&Run::memory) / MIB),
            told(gain(runs, mode).percent()),
            told(later.percent()),
            format!("{:.1}", median(&|run| run.seconds)),
            told(percent(slower)),
            told(interval.map_or("-".to_owned(), |(low, high)| format!("{} to {}", percent(low), percent(high)))),
            format!("{:.0}", median(&|run| run.last().faults as f64)),
            format!("{:.2}", median(&|run| run.ksmd)),
            format!("{:.2}", median(&|run| run.last().pagefold)),
            format!("{:.2}", median(&|run| run.engine)),
        ]);
    }
    table.notes.push(format!(
        "`hera {}`. Memory is the mean over the run, of the whole job, with the engine's store and index and ksmd's \
         metadata; gain and slow-down are against the plain run of the same round. The engine was given a bound of \
         {:.1} %, of which that of {} s was there from the beginning, guided merging one of {} % of a CPU. \
         \"engine s\" is the time it took of the slowest rank. {} of {} rounds were of plain and engine alone. All \
         modes computed the same to the last bit.",
        case.arguments,
        conditions.max_slowdown * 100.0,
        conditions.lifetime(),
        conditions.cpu,
        conditions.pairs,
        pairs(runs, Mode::Plain).len()
    ));
    findings.tables.push(table);
    findings.bars = bars(case, runs);
    for run in runs {
        findings.samples.extend(run.looks.iter().map(|look| {
            format!(
                "{},{},{},{:.2},{:.0},{:.0},{},{:.3},{:.2}",
                case.name,
                run.round,
                run.mode.name(),
                look.seconds,
                look.memory,
                look.metadata,
                look.faults,
                look.ksmd,
                look.pagefold
            )
        }));
    }
    findings
}

fn bars(case: Case, runs: &[Run]) -> Vec<Bar> {
    let percent = |share: f64| format!("{:.1} %", share * 100.0);
    let name = case.name;
    let (engine, blocks) = (gain(runs, Mode::Engine).median, gain(runs, Mode::Blocks).median);
    let slower = slow_down(runs, Mode::Engine).0;
    let mut bars = vec![
        Bar {
            claim: format!("{name}: the engine gains what the indirection does, within {:.0} points", BEHIND * 100.0),
            measured: format!("{} against {}", percent(engine), percent(blocks)),
            met: engine >= blocks - BEHIND,
        },
        Bar {
            claim: format!("{name}: the engine slows the code down by at most {:.0} %", SLOW_DOWN * 100.0),
            measured: format!("{}; the indirection by {}", percent(slower), percent(slow_down(runs, Mode::Blocks).0)),
            met: slower <= SLOW_DOWN,
        },
    ];
    for mode in Mode::ALL.into_iter().filter(|mode| mode.is_kernel()) {
        let (theirs, their_slower) = (gain(runs, mode).median, slow_down(runs, mode).0);
        bars.push(Bar {
            claim: format!("{name}: the engine gains more than {} and slows down less", mode.name()),
            measured: format!(
                "{} against {}, slower by {} against {}",
                percent(engine),
                percent(theirs),
                percent(slower),
                percent(their_slower)
            ),
            met: engine > theirs && slower < their_slower,
        });
    }
    bars
}

/// Draw memory over time, of the first round.
pub fn draw(case: Case, runs: &[Run], path: &Path) -> Result<()> {
    paint(case, runs, path).map_err(|error| anyhow!("cannot draw: {error}"))
}

fn paint(case: Case, runs: &[Run], path: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let first = || runs.iter().filter(|run| run.round == 1);
    let points = |run: &Run| {
        run.looks.iter().map(|look| (look.seconds, (look.memory + look.metadata) / MIB)).collect::<Vec<_>>()
    };
    let all: Vec<(f64, f64)> = first().flat_map(points).collect();
    let latest = all.iter().map(|point| point.0).fold(1.0, f64::max);
    let highest = all.iter().map(|point| point.1).fold(1.0, f64::max) * 1.25;
    let area = SVGBackend::new(path, (960, 480)).into_drawing_area();
    let mut chart = ChartBuilder::on(&area)
        .caption(case.title, letters(17, chart::GREY))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..latest, 0.0..highest)?;
    chart::axes(&mut chart).x_desc("seconds").y_desc("memory of the job, MiB").draw()?;
    for (place, mode) in Mode::ALL.into_iter().enumerate() {
        let Some(run) = first().find(|run| run.mode == mode) else { continue };
        chart.draw_series(LineSeries::new(points(run), mode.colour().stroke_width(2)))?;
        // Above the highest curve, side by side.
        let at = (latest * (0.02 + 0.16 * place as f64), highest * 0.97);
        let style = letters(15, mode.colour());
        chart.draw_series([Text::new(mode.name(), at, style)])?;
    }
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(mode: Mode, round: usize, seconds: f64, memory: f64) -> Run {
        let look = |at: f64, memory: f64| Look { seconds: at, memory, metadata: 64.0, ..Look::default() };
        let looks = vec![look(0.0, 1000.0 - 64.0), look(seconds, 2.0 * memory - 1000.0 - 64.0)];
        Run { mode, round, seconds, looks, ksmd: 0.0, engine: 0.0, result: String::new() }
    }

    fn met(engine: (f64, f64), blocks: f64, kernel: (f64, f64)) -> Vec<bool> {
        let mut runs = vec![run(Mode::Plain, 1, 100.0, 1000.0)];
        runs.push(run(Mode::Engine, 1, engine.0, engine.1));
        runs.push(run(Mode::Blocks, 1, 110.0, blocks));
        let kernels = Mode::ALL.into_iter().filter(|mode| mode.is_kernel());
        runs.extend(kernels.map(|mode| run(mode, 1, kernel.0, kernel.1)));
        bars(CASES[0], &runs).iter().map(|bar| bar.met).collect()
    }

    #[test]
    fn bars_are_met_and_missed() {
        assert_eq!(met((102.0, 760.0), 750.0, (105.0, 800.0)), [true; 5]);
        assert_eq!(met((104.0, 780.0), 750.0, (105.0, 800.0)), [false, false, true, true, true]);
        assert_eq!(met((102.0, 760.0), 750.0, (101.0, 800.0))[2..], [false; 3], "it is slower");
        assert_eq!(met((102.0, 760.0), 750.0, (105.0, 700.0))[2..], [false; 3], "it gains less");
    }

    #[test]
    fn a_gain_is_against_the_plain_run_of_the_round() {
        let mut runs = vec![run(Mode::Plain, 1, 100.0, 1000.0), run(Mode::Plain, 2, 200.0, 2000.0)];
        runs.extend([run(Mode::Engine, 1, 101.0, 750.0), run(Mode::Engine, 2, 202.0, 1500.0)]);
        let gain = gain(&runs, Mode::Engine);
        assert!((gain.min - 0.25).abs() < 1e-9 && (gain.max - 0.25).abs() < 1e-9, "{gain:?}");
        assert!((slow_down(&runs, Mode::Engine).0 - 0.01).abs() < 1e-9);
    }
}
