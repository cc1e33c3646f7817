//! What a look costs at a process that was looked at before, in CPU time of a census that remembers, by what the process
//! does meanwhile: against a census that reads everything, in turns.

use crate::Effort;
use crate::measure::cpu_seconds;
use crate::report::{Bar, Findings, Spread, Table};
use crate::target::{Layout, Targets, Then};
use anyhow::{Result, ensure};
use pagefold_base::Pid;
use pagefold_census::{Options, Progress, Second, Selection, take_again, take_under};
use pagefold_host::Host;
use pagefold_linux::LiveHost;
use pagefold_merge::Ages;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// Looks before what is remembered is trusted as far as it ever is.
const EARLY: usize = 6;

/// What looking again at who runs and writes nothing must take at most, of a look that reads everything.
const BAR: f64 = 0.5;

/// Measure.
pub fn measure(effort: Effort) -> Result<Findings> {
    let (bytes, looks) = if effort.quick { (32 << 20, EARLY + 2) } else { (2 << 30, EARLY + 16) };
    let bytes = effort.affordable(bytes, 1)?;
    let mut findings = Findings::new("does,look,whole_cpu_seconds,again_cpu_seconds,whole_bytes_read,again_bytes_read");
    let mut table = Table::new(
        format!(
            "A look at a process of {} MiB, all of it unique, medians of the looks {} to {looks}",
            bytes >> 20,
            EARLY + 1
        ),
        &[
            "meanwhile it",
            "whole CPU s",
            "again CPU s",
            "of the CPU time",
            "of the pages read",
            "CPU of the second look",
        ],
    );
    let cases = [
        ("rests", Then::Sleep),
        ("runs, and writes nothing", Then::Run),
        ("writes the same tenth, in one stretch", Then::WriteTenth),
        ("writes a tenth, each second another", Then::WriteTenths),
        ("writes the same page of each 64", Then::WriteEvery(64)),
        ("writes the same page of each 1024", Then::WriteEvery(1024)),
        ("writes all", Then::WriteEvery(1)),
    ];
    for (does, then) in cases {
        let targets = Targets::start([Layout { bytes, then, ..Layout::default() }])?;
        let taken = look_again(&targets, looks, &mut |look, sample| {
            let [whole, again] = sample;
            findings.samples.push(format!("{does},{look},{:.4},{:.4},{},{}", whole.0, again.0, whole.1, again.1));
        })?;
        let late = || taken[EARLY..].iter();
        let [whole, again] = [0, 1].map(|which: usize| Spread::of(late().map(|sample| sample[which].0)));
        let cpu = Spread::of(late().map(|[whole, again]| again.0 / whole.0));
        let read = Spread::of(late().map(|[whole, again]| again.1 as f64 / whole.1 as f64));
        table.rows.push(vec![
            does.to_owned(),
            format!("{:.3}", whole.median),
            format!("{:.3}", again.median),
            cpu.percent(),
            read.percent(),
            format!("{:.0} %", taken[1][1].0 / taken[1][0].0 * 100.0),
        ]);
        if then == Then::Run {
            findings.bars.push(Bar {
                claim: format!("a look at who runs and writes nothing takes at most {BAR} of a whole one"),
                measured: cpu.percent(),
                met: cpu.median <= BAR,
            });
        }
    }
    findings.tables.push(table);
    Ok(findings)
}

/// CPU seconds and bytes read.
type Sample = (f64, u64);

/// Look at processes so often, in each turn by reading everything and by what is remembered.
fn look_again(targets: &Targets, looks: usize, each: &mut dyn FnMut(usize, [Sample; 2])) -> Result<Vec<[Sample; 2]>> {
    let host = LiveHost::new();
    let mut ages = Ages::new(host.page_size())?;
    let pids = targets.pids().into_iter().map(Pid).collect();
    let options = Options {
        selection: Selection { pids, ..Selection::default() },
        second: Second::Candidates,
        settle: Duration::from_millis(1),
        ..Options::default()
    };
    let stop = AtomicBool::new(false);
    let mut samples = Vec::new();
    for look in 1..=looks {
        let mut sample = [(0.0, 0); 2];
        for turn in 0..2 {
            let again = (look + turn) % 2 == 1;
            let (progress, cpu) = (Progress::default(), cpu_seconds());
            let (remembered, hasher) = ages.remembered();
            let (census, _) = if again {
                take_again((remembered, Instant::now()), hasher, &host, &options, &progress, &stop)?
            } else {
                take_under(hasher, &host, &options, &progress, &stop)?
            };
            ensure!(census.unseen.is_empty(), "the census did not see {} processes", census.unseen.len());
            sample[usize::from(again)] = (cpu_seconds() - cpu, progress.bytes_read());
        }
        each(look, sample);
        samples.push(sample);
        // As long as what is looked at has to do something.
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(samples)
}
