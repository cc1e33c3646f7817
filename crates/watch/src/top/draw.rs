//! Draws the frame: a summary of the host, a table, the details of the selected row, and the keys.

use super::app::{App, TableView};
use super::table::{DataTable, RowMark, format_duration, format_optional};
use pagefold_base::Bytes;
use pagefold_daemon::text::{format_placement_totals, json_word};
use pagefold_daemon::wire::{DaemonModeName, DaemonStateName, PlacementReport, StatusReport};
use pagefold_output::text::{ZEROS_IN_SPLIT_HUGE_PAGES, escape_unprintable, format_net, format_number};
use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Block, Cell, Clear, Paragraph, Row, Sparkline, Table, Wrap};

/// Blues of the 256 colors for a heat map, pale to strong; white text is readable on all of them.
const HEAT_MAP_COLORS: [u8; 5] = [17, 18, 19, 20, 26];

const KEY_HELP: &[(&str, &str)] = &[
    ("Tab, 1-6", "select another table"),
    ("up, down, PgUp, PgDn, g, G", "select another row; its details are below the table"),
    ("s, r", "sort the processes by the next column; reverse the order"),
    ("/", "show only rows with a text; Enter ends typing, Esc shows all rows"),
    ("q", "quit; the daemon is not affected"),
];

const FIGURE_HELP: [&str; 4] = [
    " Footprint: fair share, each page divided by the number of its mappings, plus",
    " changes since it was read. Marked ~ if it is not read yet: an estimate,",
    " resident memory less savings. Saved: an estimate from the host's mean savings",
    " for each merged page.",
];

/// From this mean ready time of a machine on, its guest stalls noticeably: the usual limit of operators is 5 to 10 %.
const HIGH_READY_PERCENT: f64 = 10.0;

impl App {
    /// Draw the frame at any terminal size.
    pub fn draw(&mut self, frame: &mut Frame) {
        let area = frame.area();
        let placement = self.status.as_ref().and_then(|status| status.placement.as_ref());
        let summary_height = match (area.height, placement) {
            (0..16, _) => 2,
            (_, None) => 5,
            (_, Some(_)) => 7,
        };
        let has_vms = self.status.as_ref().is_some_and(|status| !status.vm_cpus.is_empty());
        let summary_height = if summary_height > 2 && has_vms { summary_height + 1 } else { summary_height };
        let detail_height = match area.height {
            0..20 => 0,
            30.. if self.view == TableView::Findings => 9,
            _ => 3,
        };
        let [summary_area, tabs_area, table_area, detail_area, keys_area] = Layout::vertical([
            Constraint::Length(summary_height),
            Constraint::Length(1),
            Constraint::Min(0),
            Constraint::Length(detail_height),
            Constraint::Length(1),
        ])
        .areas(area);
        frame.render_widget(Paragraph::new(self.tab_line()), tabs_area);
        frame.render_widget(Paragraph::new(self.key_line()), keys_area);
        if let Some(status) = self.status.take() {
            self.draw_summary(frame, summary_area, &status);
            let table = self.visible_table(&status, table_area.width);
            self.draw_table(frame, table_area, &table);
            let row = self.selection.selected().and_then(|row| table.rows.get(row));
            if let Some(row) = row {
                let text: Vec<Line> = row.detail.lines().map(|line| Line::raw(escape_unprintable(line))).collect();
                let text = Paragraph::new(text).style(self.mark_style(RowMark::Dim)).wrap(Wrap { trim: true });
                frame.render_widget(text, detail_area);
            }
            self.status = Some(status);
        } else {
            let why = self.last_error.as_deref().unwrap_or("waiting for the daemon");
            frame.render_widget(
                Paragraph::new(escape_unprintable(why).into_owned()).wrap(Wrap { trim: true }),
                summary_area.union(table_area),
            );
        }
        if self.is_help_shown {
            self.draw_help(frame, area);
        }
    }

    fn draw_summary(&self, frame: &mut Frame, area: Rect, status: &StatusReport) {
        let mut lines = vec![
            self.title_line(status),
            self.savings_line(status),
            self.cpu_line(status),
            self.available_memory_line(status),
            self.measured_savings_line(status),
        ];
        lines.extend(status.placement.iter().flat_map(|placement| self.placement_lines(placement, status.time)));
        lines.extend(self.cpu_ready_line(status));
        let [text_area, chart_area] = Layout::horizontal([Constraint::Min(70), Constraint::Max(60)]).areas(area);
        // The title may use the whole width.
        frame.render_widget(Paragraph::new(Text::from(lines)), area);
        if area.height >= 5 && chart_area.width >= 20 && text_area.width >= 70 {
            let chart = Rect { y: area.y + 1, height: 3, ..chart_area };
            frame.render_widget(Clear, chart);
            let skip = self.saved_history.len().saturating_sub(usize::from(chart.width));
            frame.render_widget(
                Sparkline::default().data(&self.saved_history[skip..]).style(self.mark_style(RowMark::Good)),
                chart,
            );
        }
    }

    /// The version, the state and its reason, or the error of the last request; the host.
    fn title_line(&self, status: &StatusReport) -> Line<'static> {
        let mode = match status.mode {
            DaemonModeName::Observe => "observe",
            DaemonModeName::Advise => "advise",
            DaemonModeName::Act => "act",
        };
        let state = match status.state {
            DaemonStateName::Starting => "starting",
            DaemonStateName::Working => "working",
            DaemonStateName::Idle => "idle",
            DaemonStateName::Paused => "paused",
            DaemonStateName::Yielding => "yielding",
        };
        let strong = Style::new().add_modifier(Modifier::BOLD);
        let mut title = vec![Span::styled(format!("pagefold {}  ", status.version), strong)];
        match &self.last_error {
            Some(error) => {
                title.push(Span::styled(format!("OLD: {}", escape_unprintable(error)), self.mark_style(RowMark::Bad)))
            }
            None => {
                title.push(Span::styled(format!("{mode}, {state}: "), strong));
                title.push(Span::raw(escape_unprintable(&status.why).into_owned()));
            }
        }
        title.push(Span::raw(format!(
            "  {}, up {}",
            escape_unprintable(&status.host),
            format_duration(status.uptime_seconds)
        )));
        Line::from(title)
    }

    fn savings_line(&self, status: &StatusReport) -> Line<'static> {
        let is_loss = status.saved.net.is_some_and(|net| net < 0);
        let split = status.saved.split_zero.filter(|bytes| *bytes > 0);
        let split =
            split.map(|bytes| format!(" ({} {ZEROS_IN_SPLIT_HUGE_PAGES})", format_amount(bytes))).unwrap_or_default();
        self.figure_line(
            "Saved",
            &format_optional(status.saved.net, format_net),
            is_loss,
            &format!(
                "net; {} gross{split}, {} metadata",
                format_optional(status.saved.gross, format_amount),
                format_optional(status.saved.metadata, format_amount)
            ),
        )
    }

    fn cpu_line(&self, status: &StatusReport) -> Line<'static> {
        let cpu = &status.cpu;
        let used: Vec<f64> = [cpu.ksmd, cpu.pagefold].iter().flatten().map(|cpu| cpu.percent).collect();
        let sum = (!used.is_empty()).then(|| used.iter().sum::<f64>());
        let is_over_limit = sum.is_some_and(|sum| sum > 1.5 * status.bounds.cpu_percent);
        self.figure_line(
            "CPU",
            &format_optional(sum, format_percent),
            is_over_limit,
            &format!(
                "bound {}; ksmd {}, pagefold {}",
                format_percent(status.bounds.cpu_percent),
                format_optional(cpu.ksmd.map(|cpu| cpu.percent), format_percent),
                format_optional(cpu.pagefold.map(|cpu| cpu.percent), format_percent)
            ),
        )
    }

    fn available_memory_line(&self, status: &StatusReport) -> Line<'static> {
        let memory = &status.memory;
        let is_below_goal =
            memory.available.zip(status.goal.keep_available).is_some_and(|(available, goal)| available < goal);
        let goal = status
            .goal
            .keep_available
            .map_or_else(|| "goal: all profitable merges".to_owned(), |goal| format!("goal {}", format_amount(goal)));
        self.figure_line(
            "Available",
            &format_optional(memory.available, format_amount),
            is_below_goal,
            &format!(
                "of {}; {goal}; pressure {}",
                format_optional(memory.total, format_amount),
                format_optional(memory.pressure_percent, format_percent)
            ),
        )
    }

    fn measured_savings_line(&self, status: &StatusReport) -> Line<'static> {
        self.figure_line(
            "Measured",
            &format_net(status.passes.measured),
            false,
            &format!(
                "of {} predicted in {} merges; {} COW breaks, {} huge pages split",
                format_amount(status.passes.predicted),
                format_number(status.passes.merges),
                format_optional(status.cow_breaks, format_number),
                format_optional(status.huge_pages_split, format_number)
            ),
        )
    }

    /// The machine that waits most for CPUs.
    fn cpu_ready_line(&self, status: &StatusReport) -> Option<Line<'static>> {
        let most = status.vm_cpus.first()?;
        let ready = most.ready_percent.map_or_else(|| "-".to_owned(), |percent| format!("{percent:.1} %"));
        let is_high = most.ready_percent.is_some_and(|percent| percent >= HIGH_READY_PERCENT);
        let vcpus: u64 = status.vm_cpus.iter().map(|vm| vm.vcpus).sum();
        let details = format!(
            "of the time vCPUs of {} wait for a CPU, most of {} virtual machines with {} vCPUs",
            escape_unprintable(&most.name),
            format_number(status.vm_cpus.len() as u64 + status.vm_cpus_omitted),
            format_number(vcpus),
        );
        Some(self.figure_line("CPU ready", &ready, is_high, &details))
    }

    /// The placement on NUMA nodes, and its last plan.
    fn placement_lines(&self, placement: &PlacementReport, now: f64) -> [Line<'static>; 2] {
        let has_failures = placement.failed_machines + placement.failed_undos > 0;
        let (age, result) = match &placement.last_plan {
            Some(plan) => {
                (format_duration((now - plan.time).max(0.0)), format!("ago: {}", escape_unprintable(&plan.result)))
            }
            None => ("-".to_owned(), "none since the start".to_owned()),
        };
        [
            self.figure_line(
                "Placement",
                &json_word(&placement.state),
                has_failures,
                &format!(
                    "{}; in all {}; mode {}",
                    escape_unprintable(&placement.why),
                    format_placement_totals(placement),
                    json_word(&placement.mode)
                ),
            ),
            self.figure_line("Last plan", &age, false, &result),
        ]
    }

    /// A line of the summary: the name of a figure, its value, and details. `is_bad` highlights the value.
    fn figure_line(&self, name: &'static str, value: &str, is_bad: bool, details: &str) -> Line<'static> {
        let value_style =
            if is_bad { self.mark_style(RowMark::Bad) } else { Style::new().add_modifier(Modifier::BOLD) };
        Line::from(vec![
            Span::styled(format!("{name:<10}"), self.mark_style(RowMark::Dim)),
            Span::styled(format!("{value:>9}"), value_style),
            Span::raw(format!("  {details}")),
        ])
    }

    fn tab_line(&self) -> Line<'static> {
        let mut spans = Vec::new();
        for (index, (view, name)) in TableView::ALL_WITH_TITLES.iter().enumerate() {
            let style = if *view == self.view { Style::new().add_modifier(Modifier::REVERSED) } else { Style::new() };
            spans.push(Span::styled(format!(" {} {name} ", index + 1), style));
        }
        if self.view == TableView::Processes {
            let direction = if self.sort_order.descending { "down" } else { "up" };
            spans.push(Span::styled(
                format!("  sorted by {}, {direction}", self.sort_order.column_name()),
                self.mark_style(RowMark::Dim),
            ));
        }
        Line::from(spans)
    }

    fn key_line(&self) -> Line<'static> {
        let filter = escape_unprintable(&self.filter).into_owned();
        if self.is_editing_filter {
            return Line::from(vec![
                Span::styled("filter: ", Style::new().add_modifier(Modifier::BOLD)),
                Span::raw(format!("{filter}_")),
            ]);
        }
        let filter_note = if filter.is_empty() { String::new() } else { format!("   filter: {filter} (Esc)") };
        Line::styled(
            format!("q quit  ? help  / filter  s sort  r reverse  Tab table{filter_note}"),
            self.mark_style(RowMark::Dim),
        )
    }

    fn draw_table(&mut self, frame: &mut Frame, area: Rect, data: &DataTable) {
        if data.rows.is_empty() {
            let message = if self.filter.is_empty() { data.empty_text } else { "no row matches the filter" };
            frame.render_widget(Paragraph::new(message), area);
            return;
        }
        let alignment = |right| if right { Alignment::Right } else { Alignment::Left };
        let header = data
            .columns
            .iter()
            .map(|column| Cell::new(Text::raw(column.title.clone()).alignment(alignment(column.right_aligned))));
        let rows = data.rows.iter().map(|row| {
            let cells = row.cells.iter().zip(&data.columns).map(|(cell, column)| {
                let text = Text::raw(cell.text.clone()).alignment(alignment(column.right_aligned));
                Cell::new(text).style(self.heat_style(cell.heat_level))
            });
            Row::new(cells.collect::<Vec<_>>()).style(self.mark_style(row.mark))
        });
        // The last column gets the remaining width.
        let mut widths: Vec<Constraint> = data.columns.iter().map(|column| Constraint::Length(column.width)).collect();
        if let (Some(last), Some(column)) = (widths.last_mut(), data.columns.last())
            && !column.right_aligned
        {
            *last = Constraint::Min(column.width);
        }
        let table = Table::new(rows.collect::<Vec<_>>(), widths)
            .header(Row::new(header).style(self.mark_style(RowMark::Dim)))
            .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
        frame.render_stateful_widget(table, area, &mut self.selection);
    }

    fn draw_help(&self, frame: &mut Frame, frame_area: Rect) {
        let mut lines = vec![Line::raw("")];
        for (keys, description) in KEY_HELP {
            lines.push(Line::styled(format!(" {keys}"), Style::new().add_modifier(Modifier::BOLD)));
            lines.push(Line::raw(format!("     {description}")));
        }
        lines.push(Line::raw(""));
        lines.extend(FIGURE_HELP.map(Line::raw));
        let height = lines.len() as u16 + 2;
        let area = frame_area.centered(Constraint::Max(80), Constraint::Max(height));
        frame.render_widget(Clear, area);
        let block = Block::bordered().title(" pagefold top: any key closes this ");
        frame.render_widget(Paragraph::new(lines).block(block), area);
    }

    fn mark_style(&self, mark: RowMark) -> Style {
        if self.color {
            match mark {
                RowMark::Plain => Style::new(),
                RowMark::Dim => Style::new().add_modifier(Modifier::DIM),
                RowMark::Good => Style::new().fg(Color::Green),
                RowMark::Warn => Style::new().fg(Color::Yellow),
                RowMark::Bad => Style::new().fg(Color::Red).add_modifier(Modifier::BOLD),
            }
        } else {
            match mark {
                RowMark::Bad | RowMark::Warn => Style::new().add_modifier(Modifier::BOLD),
                RowMark::Plain | RowMark::Dim | RowMark::Good => Style::new(),
            }
        }
    }

    fn heat_style(&self, share: f64) -> Style {
        if !self.color || share < 0.1 {
            return Style::new();
        }
        let index = ((share * HEAT_MAP_COLORS.len() as f64) as usize).min(HEAT_MAP_COLORS.len() - 1);
        Style::new().bg(Color::Indexed(HEAT_MAP_COLORS[index])).fg(Color::White)
    }
}

fn format_amount(bytes: u64) -> String {
    Bytes(bytes).to_string()
}

fn format_percent(value: f64) -> String {
    format!("{value:.1} %")
}
