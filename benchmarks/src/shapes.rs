//! Address spaces and process lists of unusual shape, each against the same resident pages in one plain region of one
//! process: 20 TiB of empty mapping, 100,000 regions, 2,000 processes.
//!
//! Regions and processes cost something each: the kernel tells of every one in text. "Without slowing" means that this
//! cost is the same for each of many as for each of a tenth as many.

use crate::Effort;
use crate::measure::Order;
use crate::report::{Bar, Findings, Spread, Table};
use crate::target::{Layout, Targets};
use anyhow::{Context, Result};
use pagefold_sys::mapping::page_size;
use std::fs;

/// By how much an empty mapping may lengthen a census.
const EMPTY_BAR: f64 = 1.1;

/// By how much the cost of each of many may exceed that of each of a tenth as many.
const GROWTH_BAR: f64 = 1.5;

const MAX_MAP_COUNT: &str = "/proc/sys/vm/max_map_count";

/// Regions that a program has besides those that are laid out, generously.
const OTHER_REGIONS: usize = 1000;

/// Censuses of two sets of processes in turns, the plain one and the shaped one.
struct Race<'a> {
    findings: &'a mut Findings,
    rounds: usize,
}

impl Race<'_> {
    fn run(&mut self, shape: &str, count: usize, sets: [Vec<u32>; 2]) -> Result<Vec<[f64; 2]>> {
        let mut pairs = Vec::new();
        for round in 1..=self.rounds {
            let mut pair = [0.0; 2];
            for which in if round % 2 == 1 { [0, 1] } else { [1, 0] } {
                let outcome = Order { pids: sets[which].clone(), threads: 1, phases: true }.run()?;
                let steps: Vec<String> = outcome.phases.iter().map(|(_, s)| format!("{s:.4}")).collect();
                self.findings.samples.push(format!(
                    "{shape},{count},{},{round},{},{:.4},{}",
                    ["plain", "shaped"][which],
                    outcome.pages,
                    outcome.seconds,
                    steps.join(",")
                ));
                pair[which] = outcome.seconds;
            }
            pairs.push(pair);
        }
        Ok(pairs)
    }
}

/// Medians over pairs of seconds, plain and shaped.
struct Comparison {
    plain: f64,
    shaped: f64,
    /// Of the differences, in seconds.
    more: f64,
    /// Of the quotients.
    ratio: Spread,
}

impl Comparison {
    fn of(pairs: &[[f64; 2]]) -> Self {
        let spread = |value: &dyn Fn(&[f64; 2]) -> f64| Spread::of(pairs.iter().map(value));
        Self {
            plain: spread(&|pair| pair[0]).median,
            shaped: spread(&|pair| pair[1]).median,
            more: spread(&|pair| pair[1] - pair[0]).median,
            ratio: spread(&|pair| pair[1] / pair[0]),
        }
    }

    fn row(&self, shape: String, bytes: usize, count: Option<usize>) -> Vec<String> {
        vec![
            shape,
            format!("{}", bytes >> 20),
            format!("{:.3}", self.plain),
            format!("{:.3}", self.shaped),
            format!("{:.1}", self.more * 1e3),
            count.map_or("-".to_owned(), |count| format!("{:.2} us", self.more / count as f64 * 1e6)),
        ]
    }
}

/// Measure.
pub fn measure(effort: Effort) -> Result<Findings> {
    let mut findings = Findings::new("shape,count,kind,round,pages,seconds,survey,list,read,group,tally");
    let mut table = Table::new(
        "Census on one thread by shape, medians",
        &["shape", "resident MiB", "plain s", "shaped s", "more ms", "more for each"],
    );
    let rounds = if effort.quick { 2 } else { 5 };
    let mut race = Race { findings: &mut findings, rounds };
    let (bytes, empty) = if effort.quick { (64 << 20, 20 << 40) } else { (512 << 20, 20 << 40) };
    let plain = |bytes: usize| Targets::start([Layout { bytes, ..Layout::default() }]);
    // Frames that happen to lie well or badly are chance: new ones each time.
    let mut pairs = Vec::new();
    for trial in 0..4 {
        let shapes = [0, empty].map(|empty| Layout { bytes, empty, ..Layout::default() });
        let first = Targets::start([shapes[trial % 2]])?;
        let second = Targets::start([shapes[1 - trial % 2]])?;
        let (plain, shaped) = if trial % 2 == 0 { (&first, &second) } else { (&second, &first) };
        pairs.extend(race.run("empty", 1, [plain.pids(), shaped.pids()])?);
    }
    let comparison = Comparison::of(&pairs);
    table.rows.push(comparison.row("20 TiB of empty mapping".to_owned(), bytes, None));
    let mut bars = vec![Bar {
        claim: format!("20 TiB of empty mapping lengthen a census to at most {:.0} %", EMPTY_BAR * 100.0),
        measured: comparison.ratio.percent(),
        met: comparison.ratio.median <= EMPTY_BAR,
    }];

    let regions = if effort.quick { 10_000 } else { 100_000 };
    let mut costs = Vec::new();
    for count in [regions / 10, regions] {
        let bytes = count * page_size();
        let raised = MapCount::at_least(count + OTHER_REGIONS);
        let shaped = match &raised {
            Ok(_) => Targets::start([Layout { bytes, split: true, ..Layout::default() }])?,
            Err(why) => {
                table.notes.push(format!("skipped: {count} regions need {MAX_MAP_COUNT} raised: {why:#}"));
                continue;
            }
        };
        // The limit holds for new regions only.
        drop(raised);
        let plain = plain(bytes)?;
        let comparison = Comparison::of(&race.run("regions", count, [plain.pids(), shaped.pids()])?);
        costs.push(comparison.more / count as f64);
        table.rows.push(comparison.row(format!("{count} regions"), bytes, Some(count)));
    }
    bars.extend(growth("region", regions, &costs));

    let processes = if effort.quick { 50 } else { 2_000 };
    let mut costs = Vec::new();
    // One page of its own each; the rest is the program's.
    let layout = |seed: u64| Layout { bytes: page_size(), seed, ..Layout::default() };
    let shaped = Targets::start((0..processes as u64).map(layout))?;
    for count in [processes / 10, processes] {
        let some = shaped.pids()[..count].to_vec();
        let pages = Order { pids: some.clone(), threads: 1, phases: false }.run()?.pages;
        let bytes = usize::try_from(pages)? * page_size();
        let plain = plain(bytes)?;
        let comparison = Comparison::of(&race.run("processes", count, [plain.pids(), some])?);
        costs.push(comparison.more / count as f64);
        table.rows.push(comparison.row(format!("{count} processes"), bytes, Some(count)));
    }
    bars.extend(growth("process", processes, &costs));
    findings.bars = bars;
    findings.tables.push(table);
    Ok(findings)
}

fn growth(what: &str, count: usize, costs: &[f64]) -> Option<Bar> {
    let &[few, many] = costs else { return None };
    Some(Bar {
        claim: format!("each of {count} costs at most {GROWTH_BAR} times what each of {} does ({what})", count / 10),
        measured: format!("{:.2}", many / few),
        met: many <= few * GROWTH_BAR,
    })
}

/// `vm.max_map_count`, raised; put back when dropped.
struct MapCount {
    before: Option<String>,
}

impl MapCount {
    fn at_least(count: usize) -> Result<Self> {
        let before = fs::read_to_string(MAX_MAP_COUNT).context("cannot read it")?;
        if before.trim().parse::<usize>().context("malformed")? >= count {
            return Ok(Self { before: None });
        }
        fs::write(MAX_MAP_COUNT, count.to_string()).context("cannot write it")?;
        Ok(Self { before: Some(before) })
    }
}

impl Drop for MapCount {
    fn drop(&mut self) {
        if let Some(before) = &self.before
            && let Err(error) = fs::write(MAX_MAP_COUNT, before)
        {
            eprintln!("cannot put {MAX_MAP_COUNT} back to {}: {error}", before.trim());
        }
    }
}
