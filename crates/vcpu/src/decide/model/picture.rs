//! Pictures of simulated schedules side by side: a row for each CPU, a color for each VM, a brightness for each vCPU.
//!
//! Time is divided into columns; a column shows the vCPU that ran longest in it, so that the size of the picture does
//! not depend on the number of switches.

use super::{Scenario, SimulatedRun};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Columns of a picture.
const COLUMNS: u64 = 400;
/// Width of a column, in pixels.
const COLUMN_WIDTH: u64 = 1;
/// Height of all rows of a picture, in pixels; a row is at least one pixel high.
const ROWS_HEIGHT: u64 = 240;
/// Space around pictures, in pixels.
const MARGIN: u64 = 24;

/// One picture.
#[derive(Debug, Clone, Copy)]
pub struct SchedulePanel<'a> {
    /// Its title.
    pub title: &'a str,
    /// What ran, with times from zero on.
    pub schedule: &'a [SimulatedRun],
}

/// An SVG with all panels from left to right. Each shows `duration_ns` nanoseconds.
pub fn draw(scenario: &Scenario, panels: &[SchedulePanel<'_>], duration_ns: u64) -> String {
    let row_height = (ROWS_HEIGHT / u64::from(scenario.cpus)).max(1);
    let panel_width = COLUMNS * COLUMN_WIDTH + MARGIN;
    let height = row_height * u64::from(scenario.cpus) + 3 * MARGIN;
    let width = panel_width * panels.len() as u64 + MARGIN;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\" font-family=\"sans-serif\" font-size=\"12\" shape-rendering=\"crispEdges\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#fff\"/>\n"
    );
    for (index, panel) in panels.iter().enumerate() {
        let x = MARGIN + index as u64 * panel_width;
        draw_panel(&mut svg, scenario, panel, duration_ns, (x, 2 * MARGIN), row_height);
    }
    let caption = format!(
        "{} CPUs from top to bottom, {:.0} ms from left to right; a color for each VM, a brightness for each vCPU; a model",
        scenario.cpus,
        duration_ns as f64 / 1e6
    );
    let _ = writeln!(svg, "<text x=\"{MARGIN}\" y=\"{}\" fill=\"#333\">{caption}</text>\n</svg>", height - MARGIN / 3);
    svg
}

fn draw_panel(
    svg: &mut String,
    scenario: &Scenario,
    panel: &SchedulePanel<'_>,
    duration_ns: u64,
    (x, y): (u64, u64),
    row_height: u64,
) {
    let title = panel.title.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(svg, "<text x=\"{x}\" y=\"{}\" fill=\"#000\" font-size=\"14\">{title}</text>", y - MARGIN / 3);
    let (width, height) = (COLUMNS * COLUMN_WIDTH, row_height * u64::from(scenario.cpus));
    let _ = writeln!(svg, "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"#eee\"/>");
    // One path for each color keeps the file small.
    let mut paths: BTreeMap<(u32, u32), String> = BTreeMap::new();
    for ((cpu, start, end), key) in column_runs(panel.schedule, duration_ns) {
        let path = paths.entry(key).or_default();
        let (left, top) = (x + start * COLUMN_WIDTH, y + u64::from(cpu) * row_height);
        let width = (end - start) * COLUMN_WIDTH;
        let _ = write!(path, "M{left} {top}h{width}v{row_height}h-{width}z");
    }
    for ((vm, vcpu), path) in paths {
        let _ = writeln!(svg, "<path fill=\"{}\" d=\"{path}\"/>", color(scenario, vm, vcpu));
    }
}

/// Adjacent columns of a CPU that show the same: CPU, first column and column after the last; VM and vCPU.
type ColumnRun = ((u32, u64, u64), (u32, u32));

/// The columns that each CPU shows.
fn column_runs(schedule: &[SimulatedRun], duration_ns: u64) -> Vec<ColumnRun> {
    let column_ns = (duration_ns / COLUMNS).max(1);
    let mut times: BTreeMap<(u32, u64), BTreeMap<(u32, u32), u64>> = BTreeMap::new();
    for run in schedule {
        let mut start = run.start_ns;
        while start < run.end_ns {
            let column = start / column_ns;
            let end = run.end_ns.min((column + 1) * column_ns);
            if column < COLUMNS {
                *times.entry((run.cpu, column)).or_default().entry((run.vm, run.vcpu)).or_default() += end - start;
            }
            start = end;
        }
    }
    let mut runs: Vec<ColumnRun> = Vec::new();
    for ((cpu, column), shown) in times {
        let Some((&key, _)) = shown.iter().max_by_key(|(_, time)| **time) else { continue };
        match runs.last_mut() {
            Some(((last_cpu, _, end), last)) if (*last_cpu, *end, *last) == (cpu, column, key) => *end = column + 1,
            _ => runs.push(((cpu, column, column + 1), key)),
        }
    }
    runs
}

fn color(scenario: &Scenario, vm: u32, vcpu: u32) -> String {
    let hue = 360 * vm / scenario.vms.len().max(1) as u32;
    let vcpus = scenario.vms.get(vm as usize).map_or(1, |vm| vm.vcpus).max(1);
    let lightness = 30 + 45 * vcpu / vcpus;
    format!("hsl({hue},75%,{lightness}%)")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::model::{HostCosts, VmSpec, Workload};

    #[test]
    fn column_shows_the_vcpu_that_ran_longest() {
        let run = |vm, start_ns, end_ns| SimulatedRun { cpu: 0, vm, vcpu: 0, start_ns, end_ns };
        // Columns of 10 ns: 0 to 2 are the first VM's; the second runs 6 ns of column 3 and all of column 4.
        let schedule = [run(0, 0, 34), run(1, 34, 50)];
        assert_eq!(column_runs(&schedule, 4_000), [((0, 0, 3), (0, 0)), ((0, 3, 5), (1, 0))]);
        let vms = vec![VmSpec::new("a", 1, Workload::compute()), VmSpec::new("b", 1, Workload::compute())];
        let scenario = Scenario { cpus: 1, vms, costs: HostCosts::default() };
        let svg = draw(&scenario, &[SchedulePanel { title: "a<b", schedule: &schedule }], 4_000);
        assert!(
            svg.contains("a&lt;b") && svg.contains("M24 48h3v240h-3z") && svg.contains("M27 48h2v240h-2z"),
            "{svg}"
        );
    }
}
