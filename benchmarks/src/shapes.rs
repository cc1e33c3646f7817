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
    fn run(&mut self, shape: &str, count: usize, sets: [Vec<u32>; 2]) -> Result<[f64; 2]> {
        let mut seconds = [Vec::new(), Vec::new()];
        for round in 1..=self.rounds {
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
                seconds[which].push(outcome.seconds);
            }
        }
        Ok(seconds.map(|samples| Spread::of(samples).median))
    }
}

/// Measure.
pub fn measure(effort: Effort) -> Result<Findings> {
    let mut findings = Findings::new("shape,count,kind,round,pages,seconds,survey,list,read,group,tally");
    let mut table = Table::new(
        "Census on one thread by shape, medians",
        &["shape", "resident MiB", "plain s", "shaped s", "more ms", "more for each"],
    );
    let rounds = if effort.quick { 3 } else { 5 };
    let mut race = Race { findings: &mut findings, rounds };
    let (bytes, empty) = if effort.quick { (64 << 20, 20 << 40) } else { (512 << 20, 20 << 40) };
    let plain = |bytes: usize| Targets::start([Layout { bytes, ..Layout::default() }]);
    let row = |shape: String, bytes: usize, [plain, shaped]: [f64; 2], each: String| {
        let more = (shaped - plain) * 1e3;
        vec![
            shape,
            format!("{}", bytes >> 20),
            format!("{plain:.3}"),
            format!("{shaped:.3}"),
            format!("{more:.1}"),
            each,
        ]
    };

    let seconds = {
        let shaped = Targets::start([Layout { bytes, empty, ..Layout::default() }])?;
        let plain = plain(bytes)?;
        race.run("empty", 1, [plain.pids(), shaped.pids()])?
    };
    table.rows.push(row("20 TiB of empty mapping".to_owned(), bytes, seconds, "-".to_owned()));
    let mut bars = vec![Bar {
        claim: format!("20 TiB of empty mapping lengthen a census to at most {:.0} %", EMPTY_BAR * 100.0),
        measured: format!("{:.1} %", seconds[1] / seconds[0] * 100.0),
        met: seconds[1] / seconds[0] <= EMPTY_BAR,
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
        let seconds = race.run("regions", count, [plain.pids(), shaped.pids()])?;
        costs.push((seconds[1] - seconds[0]) / count as f64);
        table.rows.push(row(format!("{count} regions"), bytes, seconds, micro(costs.last())));
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
        let seconds = race.run("processes", count, [plain.pids(), some])?;
        costs.push((seconds[1] - seconds[0]) / count as f64);
        table.rows.push(row(format!("{count} processes"), bytes, seconds, micro(costs.last())));
    }
    bars.extend(growth("process", processes, &costs));
    findings.bars = bars;
    findings.tables.push(table);
    Ok(findings)
}

fn micro(seconds: Option<&f64>) -> String {
    seconds.map_or("-".to_owned(), |seconds| format!("{:.2} us", seconds * 1e6))
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
