//! How fast equal memory is merged: the user engine against ksmd flat out, by length of run.
//!
//! Two, four or eight processes hold the same, in runs of so many pages with a page between them that is not there; or
//! zeros. Nothing of it is merged at first and all of it at last. One after another, on one and on two threads, the
//! user engine takes a merge for each process and one more for that, all of which count: one to see what the first
//! process has, one to store and map it in the second, one to map it in each of the others, the first at last. All at
//! once, on one thread each, is how the ranks of a parallel program merge, which come to a safe point together; whoever
//! has seen nothing of what came later merges once more, and what counts is the time from when all are told until all
//! have answered, of each such round. ksmd takes two scans and more; what counts is its CPU time until the last page is
//! merged. In each round all take their turn, in an order drawn anew.
//!
//! The processes are the engine's `examples/member`, which fill their memory as they are told; the time of a merge that
//! is alone is what it says of itself.

use super::compare::shuffled;
use super::holder::held;
use super::readings::{Counters, ksmd};
use super::trial::{forget, pause_for};
use crate::report::{Bar, Findings, Spread, Table};
use anyhow::{Context, Result, ensure};
use pagefold_labs::ksm::Ksm;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// Pages of a run.
const LENGTHS: [u64; 6] = [1, 4, 16, 64, 256, 1024];

/// How many processes hold the same.
const PROCESSES: [u64; 3] = [2, 4, 8];

/// From this length on the engine is to be so many times as fast as ksmd, which is one thread: members that merge all at
/// once, and on two threads one after another.
const LONG: u64 = 64;
const TIMES: f64 = 5.0;

/// So many times all merge at most: at the second everybody knows what everybody has.
const TIMES_TOGETHER: usize = 4;

/// ksmd has what it can get once nothing is merged for so long.
const QUIET: Duration = Duration::from_secs(3);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Members that merge one after another.
    Engine {
        threads: usize,
    },
    /// Members that merge all at once, on one thread each.
    Together,
    Ksmd,
}

impl Way {
    const ALL: [Self; 4] = [Self::Engine { threads: 1 }, Self::Engine { threads: 2 }, Self::Together, Self::Ksmd];

    fn name(self) -> String {
        match self {
            Self::Together => "engine, all at once".to_owned(),
            Self::Engine { threads } => format!("engine, {threads} thread{}", if threads == 1 { "" } else { "s" }),
            Self::Ksmd => "ksmd".to_owned(),
        }
    }
}

/// What processes hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Held {
    processes: u64,
    run: u64,
    zeros: bool,
    /// In each process, without the gaps.
    pages: u64,
}

impl Held {
    /// In all processes.
    fn all(self) -> u64 {
        self.processes * self.pages
    }

    /// What is measured: zeros of two processes only, which have nothing to do with each other.
    fn each(pages: u64) -> Vec<Self> {
        let lengths = |processes, zeros| LENGTHS.map(|run| Self { processes, run, zeros, pages });
        PROCESSES.iter().flat_map(|&processes| lengths(processes, false)).chain(lengths(2, true)).collect()
    }
}

#[derive(Debug)]
struct Trial {
    held: Held,
    way: Way,
    round: usize,
    /// Of all processes.
    merged: u64,
    seconds: f64,
}

impl Trial {
    /// Bytes in a second; nothing if not nearly everything was merged.
    fn rate(&self) -> Option<f64> {
        let bytes = self.merged as f64 * pagefold_sys::mapping::page_size() as f64;
        (self.merged as f64 >= 0.99 * self.held.all() as f64).then(|| bytes / self.seconds)
    }
}

/// Measure.
pub fn measure(rounds: usize, quick: bool) -> Result<Findings> {
    let pages = if quick { 2048 } else { 16_384 };
    let mut trials = Vec::new();
    for round in 1..=rounds {
        for held in Held::each(pages) {
            for way in shuffled(Way::ALL.to_vec()) {
                let trial = trial(held, way, round)?;
                eprintln!(
                    "round {round}: {} processes, {} pages{}, {}: {:.2} GB/s",
                    held.processes,
                    held.run,
                    if held.zeros { " of zeros" } else { "" },
                    way.name(),
                    trial.rate().unwrap_or(0.0) / 1e9
                );
                trials.push(trial);
            }
        }
    }
    Ok(findings(&trials, pages))
}

fn findings(trials: &[Trial], pages: u64) -> Findings {
    let mut findings = Findings::new("round,processes,run_pages,zeros,way,held_pages,merged_pages,seconds");
    findings.samples.extend(trials.iter().map(|trial| {
        let Held { processes, run, zeros, .. } = trial.held;
        format!(
            "{},{processes},{run},{zeros},{},{},{},{:.6}",
            trial.round,
            trial.way.name().replace(',', ""),
            trial.held.all(),
            trial.merged,
            trial.seconds
        )
    }));
    let of = |held: Held, way: Way| trials.iter().filter(move |trial| trial.held == held && trial.way == way);
    // Within rounds.
    let ratios = |held: Held, over: Way, under: Way| {
        let pair = |one: &Trial| {
            let other = of(held, under).find(|other| other.round == one.round)?;
            Some(one.rate()? / other.rate()?)
        };
        of(held, over).filter_map(pair).collect::<Vec<f64>>()
    };
    let spread = |values: Vec<f64>| (!values.is_empty()).then(|| Spread::of(values));
    let [one, two, together, ksmd] = Way::ALL;
    let kinds = Held::each(pages);
    for kinds in kinds.chunk_by(|one, next| (one.processes, one.zeros) == (next.processes, next.zeros)) {
        let Held { processes, zeros, .. } = kinds[0];
        let mut table = Table::new(
            format!(
                "{} in {processes} processes of {:.0} MiB",
                if zeros { "Zeros" } else { "Equal memory" },
                (pages * pagefold_sys::mapping::page_size() as u64) as f64 / f64::from(1 << 20)
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
        for &held in kinds {
            let run = held.run;
            let rate = |way| {
                let rates: Vec<f64> = of(held, way).filter_map(Trial::rate).collect();
                spread(rates).map_or("not all".to_owned(), |rates| format!("{:.2}", rates.median / 1e9))
            };
            let factor = |over, under| spread(ratios(held, over, under)).map_or("-".to_owned(), Spread::factor);
            table.rows.push(vec![
                run.to_string(),
                rate(one),
                rate(two),
                rate(together),
                rate(ksmd),
                factor(one, ksmd),
                factor(two, one),
                factor(together, ksmd),
            ]);
            if run >= LONG && !zeros {
                let claims = [(together, "all at once"), (two, "one after another on two threads")];
                findings.bars.extend(claims.map(|(way, how)| {
                    let ratio = spread(ratios(held, way, ksmd));
                    Bar {
                        claim: format!(
                            "{processes} processes, runs of {run} pages, {how}: at least {TIMES} times ksmd flat out"
                        ),
                        measured: ratio.map_or("not all was merged".to_owned(), Spread::factor),
                        met: ratio.is_some_and(|ratio| ratio.median >= TIMES),
                    }
                }));
            }
        }
        findings.tables.push(table);
    }
    if let Some(last) = findings.tables.last_mut() {
        last.notes.push(
            "Bytes of all processes by the time from when nothing is merged until all is: of all merges that takes, \
             by the engine, one after another or, all at once, beside one another; of ksmd's CPU time. \"not all\": what the engine does not find worth a mapping of its own."
                .to_owned(),
        );
    }
    findings
}

fn trial(held: Held, way: Way, round: usize) -> Result<Trial> {
    let ksm = Ksm::take().map_err(anyhow::Error::msg)?;
    let ksmd = ksmd()?;
    forget(&ksm, ksmd)?;
    let domains = tempfile::tempdir_in("/dev/shm").context("a folder for domains")?;
    let start = || Member::start(held, way, domains.path());
    let mut members = (0..held.processes).map(|_| start()).collect::<Result<Vec<_>>>()?;
    let (mut merged, mut seconds) = (0, 0.0);
    match way {
        Way::Engine { .. } => {
            for member in (0..members.len()).chain([0]) {
                let told = members[member].tell("merge")?;
                merged += field(&told, "merged: Pages(")? + field(&told, "zeros: Pages(")?;
                seconds += duration(&told)?;
            }
        }
        Way::Together => {
            for _ in 0..TIMES_TOGETHER {
                let began = Instant::now();
                members.iter_mut().try_for_each(|member| member.say("merge"))?;
                let told = members.iter_mut().map(Member::answer).collect::<Result<Vec<_>>>()?;
                seconds += began.elapsed().as_secs_f64();
                for told in &told {
                    merged += field(told, "merged: Pages(")? + field(told, "zeros: Pages(")?;
                }
                if merged >= held.all() {
                    break;
                }
            }
        }
        Way::Ksmd => {
            let (before, quiet) = (Counters::read(ksmd)?, Instant::now());
            ksm.set("use_zero_pages", 1);
            ksm.set("pages_to_scan", 20_000);
            ksm.set("sleep_millisecs", 0);
            ksm.set("run", 1);
            // Of equal pages one is kept.
            let saved = |now: Counters| (now.saved - before.saved).unsigned_abs();
            let (mut best, mut since) = (0, quiet);
            let most = if held.zeros { held.all() } else { held.all() - held.pages };
            while since.elapsed() < QUIET && best < most {
                pause_for(Duration::from_millis(2))?;
                let now = Counters::read(ksmd)?;
                if saved(now) > best {
                    (best, since, seconds) = (saved(now), Instant::now(), now.ksmd - before.ksmd);
                }
            }
            ksm.set("run", 0);
            merged = if held.zeros { best } else { best * held.processes / (held.processes - 1) };
        }
    }
    for member in &mut members {
        let checked = member.tell("check")?;
        ensure!(checked == "same", "after merging, {checked}");
    }
    // Other memory of the processes is merged by ksmd, too.
    Ok(Trial { held, way, round, merged: merged.min(held.all()), seconds })
}

/// A number in what a member says.
fn field(told: &str, name: &str) -> Result<u64> {
    let number = told.split_once(name).and_then(|(_, rest)| rest.split_once(')')?.0.parse().ok());
    number.with_context(|| format!("no {name:?} in {told:?}"))
}

/// Seconds of a merge, from how Rust prints a duration.
fn duration(told: &str) -> Result<f64> {
    let words = told.split_once("time: ").and_then(|(_, rest)| rest.split_once(','));
    let word = words.with_context(|| format!("no time in {told:?}"))?.0;
    let units = [("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)];
    let seconds = units.iter().find_map(|(unit, factor)| Some(word.strip_suffix(unit)?.parse::<f64>().ok()? * factor));
    seconds.with_context(|| format!("{word:?} is no time"))
}

/// A process that holds memory.
struct Member {
    child: Child,
    says: ChildStdin,
    tells: BufReader<ChildStdout>,
}

impl Member {
    fn start(memory: Held, way: Way, domains: &Path) -> Result<Self> {
        let program = std::env::current_exe()?.with_file_name("examples").join("member");
        let runs = memory.pages / memory.run;
        let mut command = held(&program, way == Way::Ksmd)?;
        command.arg("throughput").arg((runs * (memory.run + 1)).to_string());
        if let Way::Engine { threads } = way {
            command.args(["--threads", &threads.to_string()]);
        }
        let mut child = Command::new(command.get_program())
            .args(command.get_args())
            .env("PAGEFOLD_RUNTIME", domains)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let says = child.stdin.take().context("no input")?;
        let tells = BufReader::new(child.stdout.take().context("no output")?);
        let mut member = Self { child, says, tells };
        ensure!(member.answer()? == "ready", "a member is not ready");
        let seed = u64::from(!memory.zeros);
        for run in 0..runs {
            member.tell(&format!("fill {} {} {seed}", run * (memory.run + 1), memory.run))?;
        }
        Ok(member)
    }

    fn answer(&mut self) -> Result<String> {
        let mut line = String::new();
        let read = self.tells.read_line(&mut line)?;
        ensure!(read > 0, "a member has ended: {}", self.child.wait()?);
        Ok(line.trim_end().to_owned())
    }

    fn say(&mut self, line: &str) -> Result<()> {
        writeln!(self.says, "{line}").context("a member does not listen")
    }

    fn tell(&mut self, line: &str) -> Result<String> {
        self.say(line)?;
        self.answer()
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_member_says_is_understood() {
        let told = "Merged { looked_at: Pages(10), zeros: Pages(3), merged: Pages(7), time: 1.5ms, cut_short: 0 }";
        assert_eq!(field(told, "merged: Pages(").unwrap(), 7);
        assert!((duration(told).unwrap() - 0.0015).abs() < 1e-12);
        assert!((duration("time: 20µs, x").unwrap() - 2e-5).abs() < 1e-12);
        assert!((duration("time: 2s, x").unwrap() - 2.0).abs() < 1e-12);
        assert!(duration("the store is full").is_err());
    }

    #[test]
    fn bars_are_judged_within_rounds() {
        let held = Held { processes: 2, run: 64, zeros: false, pages: 100 };
        let trial = |way, seconds, merged| Trial { held, way, round: 1, merged, seconds };
        let met = |way, seconds: f64, merged: u64| {
            let trials = [trial(Way::ALL[0], 5.0, 200), trial(way, seconds, merged), trial(Way::Ksmd, 5.0, 200)];
            let bars = findings(&trials, 100).bars;
            [bars[0].met, bars[1].met]
        };
        let [_, two, together, _] = Way::ALL;
        assert_eq!(met(together, 0.9, 200), [true, false]);
        assert_eq!(met(two, 0.9, 200), [false, true]);
        assert_eq!([met(together, 1.1, 200), met(together, 0.9, 100)], [[false; 2]; 2]);
    }
}
