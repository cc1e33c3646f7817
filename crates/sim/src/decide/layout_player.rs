//! Plays a layout on the model alone. Regions get addresses from the top of the address space down, as mmap(2) chooses
//! them.

use super::ksmd::{KsmModel, KsmSettings, RunState};
use super::layouts::{Layout, LayoutStep};
use super::memory::{PAGES_IN_HUGE_PAGE, SimulatedProcessId};
use super::rules::KsmRules;

/// The page above the first region of each process.
const TOP_PAGE: u64 = 0x7_ffff_0000;

/// Virtual time of a batch.
const BATCH_MS: u64 = 20;

struct PlayedRegion {
    process: SimulatedProcessId,
    start: u64,
    pages: u64,
}

/// Play a layout on an empty host, and call `observe` after each batch and each write of `run`.
///
/// # Panics
/// If the layout asks for something impossible, such as an advice about a process that ended.
pub fn play(layout: &Layout, rules: KsmRules, observe: impl FnMut(&KsmModel)) {
    play_on(KsmModel::new(rules, KsmSettings::default()), layout, observe);
}

/// Play a layout on a model without processes, as [`play`] does. Each batch takes 20 ms of virtual time.
///
/// # Panics
/// As [`play`].
pub fn play_on(mut model: KsmModel, layout: &Layout, mut observe: impl FnMut(&KsmModel)) {
    let mut processes: Vec<SimulatedProcessId> = Vec::new();
    let mut regions: Vec<PlayedRegion> = Vec::new();
    let mut next_end = TOP_PAGE;
    let mut now_ms = 0;
    let mut observe = |model: &mut KsmModel| {
        now_ms += BATCH_MS;
        model.set_time(now_ms, 0);
        observe(model);
    };
    for step in &layout.steps {
        match step {
            LayoutStep::Spawn => processes.push(model.spawn()),
            &LayoutStep::Map { process, pages, huge, node } => {
                let process = processes[process];
                let start = (next_end - pages - 1) / PAGES_IN_HUGE_PAGE * PAGES_IN_HUGE_PAGE;
                next_end = start;
                model.map(process, start, pages, node);
                if huge {
                    let huge_pages = (start..start + pages).step_by(PAGES_IN_HUGE_PAGE as usize);
                    huge_pages.for_each(|page| model.fault_huge_page(process, page));
                }
                regions.push(PlayedRegion { process, start, pages });
            }
            &LayoutStep::Advise { region, first, pages, advice } => {
                let PlayedRegion { process, start, .. } = regions[region];
                model.advise(process, start + first, pages, advice);
            }
            LayoutStep::Write { process, region, pages } => {
                let start = regions[*region].start;
                pages.iter().for_each(|&(page, content)| model.write(processes[*process], start + page, content));
            }
            &LayoutStep::Read { region, page } => model.read(regions[region].process, regions[region].start + page),
            &LayoutStep::Unmap { region } => {
                let PlayedRegion { process, start, pages } = regions[region];
                model.unmap(process, start, pages);
            }
            &LayoutStep::Fork { process } => processes.push(model.fork(processes[process])),
            &LayoutStep::Exit { process } => model.exit(processes[process]),
            LayoutStep::Set(settings) => assert!(model.write_settings(*settings), "the model refuses {settings:?}"),
            &LayoutStep::Run(run) => {
                model.write_run(run);
                observe(&mut model);
            }
            &LayoutStep::Batches(batches) => (0..batches).for_each(|_| run_batch(&mut model, &mut observe)),
            &LayoutStep::Scans(scans) => (0..scans).for_each(|_| run_scan(&mut model, &mut observe)),
        }
    }
}

fn run_batch(model: &mut KsmModel, observe: &mut impl FnMut(&mut KsmModel)) {
    model.write_run(RunState::Merging);
    model.run_batch();
    model.write_run(RunState::Stopped);
    observe(model);
}

/// Batches until a scan ends. Without processes on ksmd's list there is nothing to end.
fn run_scan(model: &mut KsmModel, observe: &mut impl FnMut(&mut KsmModel)) {
    let first = model.counters().full_scans;
    loop {
        let scanned = model.counters().pages_scanned;
        run_batch(model, observe);
        if model.counters().full_scans > first || model.counters().pages_scanned == scanned {
            return;
        }
    }
}
