//! Schedules as SVG, one or several side by side.

use super::{ShownTask, color::color, column_spans};
use crate::schedule::CpuSchedule;
use pagefold_output::text::cut_end;
use std::collections::BTreeMap;
use std::fmt::Write;

/// Columns of a picture with one panel; one pixel each.
const COLUMNS_OF_SINGLE_PANEL: u64 = 1000;
/// Columns of each panel of a picture with several.
const COLUMNS_OF_SEVERAL_PANELS: u64 = 400;
/// Height of all rows of a panel, in pixels; a row is at least [`MIN_ROW_HEIGHT`] high.
const ROWS_HEIGHT: u64 = 240;
/// Least height of a row, in pixels.
const MIN_ROW_HEIGHT: u64 = 1;
/// Greatest height of a row, in pixels.
const MAX_ROW_HEIGHT: u64 = 40;
/// Space around panels, in pixels.
const MARGIN: u64 = 24;
/// Space for the names of CPUs left of the first panel, in pixels.
const CPU_NAMES_WIDTH: u64 = 48;
/// Height of a line of text, in pixels.
const LINE_HEIGHT: u64 = 18;
/// Least distance of two marks of the time axis, in pixels.
const MIN_MARK_DISTANCE: u64 = 80;
/// Machines of the legend; the names of the others are in the titles of their areas only.
const MAX_LEGEND_MACHINES: usize = 24;
/// Shades of a machine in the legend.
const MAX_LEGEND_SHADES: usize = 8;
/// Width of an entry of the legend, in pixels.
const LEGEND_ENTRY_WIDTH: u64 = 320;
/// Characters of a name in the legend.
const MAX_NAME_CHARACTERS: usize = 28;

/// One panel of a picture.
#[derive(Debug, Clone, Copy)]
pub struct SchedulePanel<'a> {
    /// Its title.
    pub title: &'a str,
    /// What ran.
    pub schedule: &'a CpuSchedule,
    /// Start and end of the time that is shown, in nanoseconds of the schedule's clock.
    pub span: (u64, u64),
}

/// An SVG with all panels from left to right. Machines are those of the panel with most of them; machines at the same
/// place have the same color in all panels. The size is bounded by the number of CPUs, machines and panels.
pub fn draw(panels: &[SchedulePanel<'_>], caption: &str) -> String {
    let columns = if panels.len() > 1 { COLUMNS_OF_SEVERAL_PANELS } else { COLUMNS_OF_SINGLE_PANEL };
    let most_rows = panels.iter().map(|panel| panel.schedule.cpus.len()).max().unwrap_or(0).max(1) as u64;
    let row_height = (ROWS_HEIGHT / most_rows).clamp(MIN_ROW_HEIGHT, MAX_ROW_HEIGHT);
    let left = MARGIN + CPU_NAMES_WIDTH;
    let width = left + panels.len() as u64 * (columns + MARGIN);
    let top = 2 * MARGIN;
    let axis = top + most_rows * row_height;
    let legend_top = axis + 2 * LINE_HEIGHT + MARGIN / 2;
    let mut body = String::new();
    for (index, panel) in panels.iter().enumerate() {
        let layout = PanelLayout { x: left + index as u64 * (columns + MARGIN), y: top, columns, row_height };
        draw_panel(&mut body, panel, layout, index == 0);
    }
    let legend_panel = panels.iter().max_by_key(|panel| panel.schedule.vms.len());
    let legend_end = match legend_panel {
        Some(panel) => draw_legend(&mut body, panel.schedule, (MARGIN, legend_top), width - MARGIN),
        None => legend_top,
    };
    let height = legend_end + LINE_HEIGHT + MARGIN;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#fff\"/>\n{body}\
         <text x=\"{MARGIN}\" y=\"{}\" fill=\"#333\">{}</text>\n</svg>\n",
        legend_end + LINE_HEIGHT,
        escape(caption)
    )
}

/// Where a panel is, in pixels.
#[derive(Clone, Copy)]
struct PanelLayout {
    x: u64,
    y: u64,
    columns: u64,
    row_height: u64,
}

fn draw_panel(svg: &mut String, panel: &SchedulePanel<'_>, layout: PanelLayout, has_cpu_names: bool) {
    let PanelLayout { x, y, columns, row_height } = layout;
    let schedule = panel.schedule;
    let height = row_height * schedule.cpus.len() as u64;
    let _ =
        writeln!(svg, "<text x=\"{x}\" y=\"{}\" fill=\"#000\" font-size=\"14\">{}</text>", y - 8, escape(panel.title));
    let _ = writeln!(svg, "<rect x=\"{x}\" y=\"{y}\" width=\"{columns}\" height=\"{height}\" fill=\"#f2f2f2\"/>");
    // One path for each color keeps the file small.
    let mut paths: BTreeMap<ShownTask, String> = BTreeMap::new();
    for span in column_spans(schedule, panel.span, columns) {
        let (left, top, width) = (x + span.from, y + span.row as u64 * row_height, span.to - span.from);
        let path = paths.entry(span.shown).or_default();
        let _ = write!(path, "M{left} {top}h{width}v{row_height}h-{width}z");
    }
    svg.push_str("<g shape-rendering=\"crispEdges\">\n");
    for (shown, path) in paths {
        let _ = writeln!(
            svg,
            "<path fill=\"{}\" d=\"{path}\"><title>{}</title></path>",
            color(shown, vcpus_of(schedule, shown)),
            escape(&describe(schedule, shown))
        );
    }
    svg.push_str("</g>\n");
    if has_cpu_names {
        draw_cpu_names(svg, schedule, layout);
    }
    draw_axis(svg, panel.span, (x, y + height), columns);
}

/// The names of CPUs, as many as there is space for.
fn draw_cpu_names(svg: &mut String, schedule: &CpuSchedule, layout: PanelLayout) {
    let rows_of_a_line = (LINE_HEIGHT - 4).div_ceil(layout.row_height) as usize;
    for (row, cpu) in schedule.cpus.iter().enumerate().step_by(rows_of_a_line) {
        let middle = layout.y + row as u64 * layout.row_height + layout.row_height / 2 + 4;
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{middle}\" fill=\"#333\" text-anchor=\"end\">CPU {cpu}</text>",
            layout.x - 6
        );
    }
}

/// Marks at round times since the start of the panel.
fn draw_axis(svg: &mut String, (from, to): (u64, u64), (x, y): (u64, u64), columns: u64) {
    let duration = to.saturating_sub(from);
    let step = mark_step(duration, columns);
    for time in (0..=duration).step_by(usize::try_from(step).unwrap_or(usize::MAX)) {
        let column = u128::from(time) * u128::from(columns) / u128::from(duration.max(1));
        let at = u128::from(x) + column;
        // Labels stay within the panel, beside the labels of the next one.
        let anchor = match time {
            0 => "start",
            time if time == duration => "end",
            _ => "middle",
        };
        let _ = writeln!(
            svg,
            "<path stroke=\"#666\" d=\"M{at} {y}v5\"/><text x=\"{at}\" y=\"{}\" fill=\"#333\" \
             text-anchor=\"{anchor}\">{}</text>",
            y + LINE_HEIGHT,
            format_mark(time, step)
        );
    }
}

/// The least of 1, 2, 5, 10, 20, ... ns with which marks are far enough apart.
fn mark_step(duration_ns: u64, columns: u64) -> u64 {
    let least = (u128::from(duration_ns) * u128::from(MIN_MARK_DISTANCE)).div_ceil(u128::from(columns.max(1)));
    let mut decade: u128 = 1;
    loop {
        if let Some(step) = [1, 2, 5].map(|factor| factor * decade).into_iter().find(|&step| step >= least) {
            return u64::try_from(step).unwrap_or(u64::MAX);
        }
        decade *= 10;
    }
}

/// A time in the largest unit in which all marks are whole numbers.
fn format_mark(time_ns: u64, step_ns: u64) -> String {
    let units = [(1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"), (1, "ns")];
    let (unit, name) = units.into_iter().find(|(unit, _)| step_ns >= *unit).unwrap_or((1, "ns"));
    format!("{} {name}", time_ns / unit)
}

/// Draws the legend and returns where it ends.
fn draw_legend(svg: &mut String, schedule: &CpuSchedule, (x, y): (u64, u64), right: u64) -> u64 {
    let entries_of_a_line = (right.saturating_sub(x) / LEGEND_ENTRY_WIDTH).max(1);
    let mut entries: Vec<(Vec<String>, String)> = Vec::new();
    for vm in 0..schedule.vms.len().min(MAX_LEGEND_MACHINES) {
        let vcpus = schedule.vcpus(vm).len();
        let shades = vcpus.clamp(1, MAX_LEGEND_SHADES);
        let colors = (0..shades).map(|shade| {
            let position = if shades < 2 { 0 } else { shade * (vcpus - 1) / (shades - 1) };
            color(ShownTask::Vcpu { vm, position }, vcpus)
        });
        let noun = if vcpus == 1 { "vCPU" } else { "vCPUs" };
        entries.push((
            colors.collect(),
            format!("{} ({vcpus} {noun})", cut_end(&schedule.vms[vm].name, MAX_NAME_CHARACTERS)),
        ));
    }
    if schedule.vms.len() > MAX_LEGEND_MACHINES {
        entries.push((Vec::new(), format!("and {} more", schedule.vms.len() - MAX_LEGEND_MACHINES)));
    }
    if schedule.tasks.iter().any(|task| task.vm.is_some() && task.vcpu.is_none()) {
        entries.push((vec![color(ShownTask::OtherThread { vm: 0 }, 0)], "other threads of machines".to_owned()));
    }
    if schedule.tasks.iter().any(|task| task.vm.is_none()) {
        entries.push((vec![color(ShownTask::OtherTask, 0)], "other tasks".to_owned()));
    }
    entries.push((vec!["#f2f2f2".to_owned()], "idle".to_owned()));
    let lines = (entries.len() as u64).div_ceil(entries_of_a_line);
    for (index, (colors, name)) in (0u64..).zip(entries) {
        let left = x + index % entries_of_a_line * LEGEND_ENTRY_WIDTH;
        let top = y + index / entries_of_a_line * LINE_HEIGHT;
        for (place, color) in (0u64..).zip(&colors) {
            let _ = writeln!(
                svg,
                "<rect x=\"{}\" y=\"{top}\" width=\"8\" height=\"12\" fill=\"{color}\"/>",
                left + 8 * place
            );
        }
        let text_x = left + 8 * colors.len() as u64 + 6;
        let _ = writeln!(svg, "<text x=\"{text_x}\" y=\"{}\" fill=\"#333\">{}</text>", top + 10, escape(&name));
    }
    y + lines * LINE_HEIGHT
}

fn vcpus_of(schedule: &CpuSchedule, shown: ShownTask) -> usize {
    match shown {
        ShownTask::Vcpu { vm, .. } => schedule.vcpus(vm).len(),
        ShownTask::OtherThread { .. } | ShownTask::OtherTask => 0,
    }
}

fn describe(schedule: &CpuSchedule, shown: ShownTask) -> String {
    match shown {
        ShownTask::Vcpu { vm, position } => {
            let vcpu = schedule.vcpus(vm).get(position).and_then(|&task| schedule.tasks[task].vcpu).unwrap_or(0);
            format!("{}, vCPU {vcpu}", schedule.vms[vm].name)
        }
        ShownTask::OtherThread { vm } => format!("{}, other threads", schedule.vms[vm].name),
        ShownTask::OtherTask => "other tasks".to_owned(),
    }
}

/// Text for XML. Names come from traces and may contain anything.
fn escape(text: &str) -> String {
    let printable = pagefold_output::text::escape_unprintable(text);
    printable.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{IDLE, ScheduleBuilder, SchedulerEvent, SchedulerEventKind, Task};

    /// Two machines with a vCPU each on CPU 4, half of the time each.
    fn schedule(name: &str) -> CpuSchedule {
        let mut builder = ScheduleBuilder::new();
        builder.set_span(1_000_000, 3_000_000);
        for (tid, name) in [(1, name), (2, "b")] {
            let vm = Some(builder.add_vm(name));
            builder.set_task(Task { tid, process: None, name: name.to_owned(), vm, vcpu: Some(0) });
        }
        for (time, previous, next) in [(1_000_000, IDLE, 1), (2_000_000, 1, 2)] {
            let kind = SchedulerEventKind::Switch { cpu: 4, previous, previous_runnable: true, next };
            builder.add_event(SchedulerEvent { time, kind });
        }
        builder.finish()
    }

    #[test]
    fn picture_has_rows_axis_and_legend() {
        let schedule = schedule("a<b\u{1b}");
        let svg =
            draw(&[SchedulePanel { title: "a & b", schedule: &schedule, span: (1_000_000, 3_000_000) }], "caption");
        for expected in [
            "a &amp; b",
            "caption",
            "CPU 4",
            // 1000 columns for 2 ms: the first machine has 500.
            "<path fill=\"#0072b2\" d=\"M72 48h500v40h-500z\"><title>a&lt;b\\u{1b}, vCPU 0</title></path>",
            "<path fill=\"#e69f00\" d=\"M572 48h500v40h-500z\"><title>b, vCPU 0</title></path>",
            ">0 µs<",
            ">2000 µs<",
            "a&lt;b\\u{1b} (1 vCPU)",
            "idle",
        ] {
            assert!(svg.contains(expected), "{expected}: {svg}");
        }
        assert!(!svg.contains('\u{1b}') && svg.ends_with("</svg>\n"));
    }

    #[test]
    fn panels_stand_side_by_side() {
        let schedule = schedule("a");
        let panel = |title| SchedulePanel { title, schedule: &schedule, span: (1_000_000, 3_000_000) };
        let svg = draw(&[panel("first"), panel("second")], "");
        // Each panel has 400 columns; the second begins 424 pixels later.
        assert!(svg.contains("M72 48h200v40h-200z") && svg.contains("M496 48h200v40h-200z"), "{svg}");
        assert_eq!(svg.matches("CPU 4").count(), 1);
    }

    #[test]
    fn size_does_not_grow_with_the_number_of_switches() {
        let draw_with = |switches: u64| {
            let mut builder = ScheduleBuilder::new();
            builder.set_span(0, 1_000_000_000);
            for switch in 0..switches {
                let (previous, next) = if switch % 2 == 0 { (1, 2) } else { (2, 1) };
                let time = switch * (1_000_000_000 / switches);
                let kind = SchedulerEventKind::Switch { cpu: 0, previous, previous_runnable: true, next };
                builder.add_event(SchedulerEvent { time, kind });
            }
            let schedule = builder.finish();
            draw(&[SchedulePanel { title: "", schedule: &schedule, span: (0, 1_000_000_000) }], "").len()
        };
        // At most 1000 columns of at most 30 bytes, and 4 KB of frame.
        assert!(draw_with(100_000) < 34_000);
    }

    #[test]
    fn marks_are_round_times() {
        assert_eq!(mark_step(200_000_000, 1000), 20_000_000);
        assert_eq!(mark_step(100_000_000, 400), 20_000_000);
        assert_eq!(mark_step(0, 400), 1);
        let columns_apart = |duration: u64| u128::from(mark_step(duration, 400)) * 400 / u128::from(duration);
        assert!(
            [1_000, 12_345_678, 999_999_999_999, u64::MAX / 100]
                .into_iter()
                .all(|duration| columns_apart(duration) >= 80)
        );
        assert_eq!(format_mark(40_000_000, 20_000_000), "40 ms");
        assert_eq!(format_mark(3_000_000_000, 1_000_000_000), "3 s");
        assert_eq!(format_mark(0, 500), "0 ns");
    }
}
