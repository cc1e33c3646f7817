//! The frame: the host at a glance, a table, the row that is selected in words, and the keys.

use super::app::{App, View};
use super::sheet::{Mark, Sheet, duration, told};
use pagefold_base::Bytes;
use pagefold_daemon::wire::{Mode, State, Status};
use pagefold_output::text::{ZEROS_BY_SPLITTING, net, number, printable};
use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Block, Cell, Clear, Paragraph, Row, Sparkline, Table, Wrap};

/// Blues of the 256 colours for a heat map, pale to strong; white text can be read on all of them.
const HEAT: [u8; 5] = [17, 18, 19, 20, 26];

const KEYS: &[(&str, &str)] = &[
    ("Tab, 1-6", "another table"),
    ("up, down, PgUp, PgDn, g, G", "another row; its words are below the table"),
    ("s, r", "sort the members by the next column, or the other way round"),
    ("/", "keep the rows with a text; Enter ends typing, Esc takes all rows again"),
    ("q", "quit; nothing of the daemon changes"),
];

const FIGURES: [&str; 4] = [
    " Footprint: the fair share, each page divided by those who map it, with what",
    " has changed since that was read. Before that, marked ~, an estimate: resident",
    " memory less what merging saves. Saved, an estimate: by the host's mean for",
    " each merged page.",
];

impl App {
    /// Draw all of it, whatever room there is.
    pub fn draw(&mut self, frame: &mut Frame) {
        let room = frame.area();
        let glance = if room.height >= 16 { 5 } else { 2 };
        let detail = match room.height {
            0..20 => 0,
            30.. if self.view == View::Findings => 9,
            _ => 3,
        };
        let [top, tabs, table, words, keys] = Layout::vertical([
            Constraint::Length(glance),
            Constraint::Length(1),
            Constraint::Min(0),
            Constraint::Length(detail),
            Constraint::Length(1),
        ])
        .areas(room);
        frame.render_widget(Paragraph::new(self.tabs()), tabs);
        frame.render_widget(Paragraph::new(self.keys()), keys);
        if let Some(status) = self.status.take() {
            self.glance(frame, top, &status);
            let sheet = self.sheet(&status, table.width);
            self.table(frame, table, &sheet);
            let row = self.selected.selected().and_then(|row| sheet.rows.get(row));
            if let Some(row) = row {
                let text: Vec<Line> = row.detail.lines().map(|line| Line::raw(printable(line))).collect();
                let text = Paragraph::new(text).style(self.style(Mark::Dim)).wrap(Wrap { trim: true });
                frame.render_widget(text, words);
            }
            self.status = Some(status);
        } else {
            let why = self.trouble.as_deref().unwrap_or("waiting for the daemon");
            frame
                .render_widget(Paragraph::new(printable(why).into_owned()).wrap(Wrap { trim: true }), top.union(table));
        }
        if self.help {
            self.help(frame, room);
        }
    }

    fn glance(&self, frame: &mut Frame, room: Rect, status: &Status) {
        let mode = match status.mode {
            Mode::Observe => "observe",
            Mode::Advise => "advise",
            Mode::Act => "act",
        };
        let state = match status.state {
            State::Starting => "starting",
            State::Working => "working",
            State::Resting => "resting",
            State::Paused => "paused",
            State::Yielding => "yielding",
        };
        let strong = Style::new().add_modifier(Modifier::BOLD);
        let mut title = vec![Span::styled(format!("pagefold {}  ", status.version), strong)];
        match &self.trouble {
            Some(trouble) => title.push(Span::styled(format!("OLD: {}", printable(trouble)), self.style(Mark::Bad))),
            None => {
                title.push(Span::styled(format!("{mode}, {state}: "), strong));
                title.push(Span::raw(printable(&status.why).into_owned()));
            }
        }
        title.push(Span::raw(format!("  {}, up {}", printable(&status.host), duration(status.uptime_seconds))));
        let memory = &status.memory;
        let short = memory.available.zip(status.goal.keep_available).is_some_and(|(available, goal)| available < goal);
        let goal = status
            .goal
            .keep_available
            .map_or_else(|| "goal: all that pays".to_owned(), |goal| format!("goal {}", amount(goal)));
        let cpu = &status.cpu;
        let used: Vec<f64> = [cpu.ksmd, cpu.pagefold].iter().flatten().map(|cpu| cpu.percent).collect();
        let sum = (!used.is_empty()).then(|| used.iter().sum::<f64>());
        let percent = |value: f64| format!("{value:.1} %");
        let over = sum.is_some_and(|sum| sum > 1.5 * status.bounds.cpu_percent);
        let loss = status.saved.net.is_some_and(|net| net < 0);
        let figure = |name: &'static str, big: String, bad: bool, small: String| {
            let mark = if bad { self.style(Mark::Bad) } else { strong };
            Line::from(vec![
                Span::styled(format!("{name:<10}"), self.style(Mark::Dim)),
                Span::styled(format!("{big:>9}"), mark),
                Span::raw(format!("  {small}")),
            ])
        };
        let split = status.saved.split_zero.filter(|bytes| *bytes > 0);
        let split = split.map(|bytes| format!(" ({} {ZEROS_BY_SPLITTING})", amount(bytes))).unwrap_or_default();
        let saved = figure(
            "Saved",
            told(status.saved.net, net),
            loss,
            format!(
                "net; {} gross{split}, {} metadata",
                told(status.saved.gross, amount),
                told(status.saved.metadata, amount)
            ),
        );
        let lines = vec![
            Line::from(title),
            saved,
            figure(
                "CPU",
                told(sum, percent),
                over,
                format!(
                    "bound {}; ksmd {}, pagefold {}",
                    percent(status.bounds.cpu_percent),
                    told(cpu.ksmd.map(|cpu| cpu.percent), percent),
                    told(cpu.pagefold.map(|cpu| cpu.percent), percent)
                ),
            ),
            figure(
                "Available",
                told(memory.available, amount),
                short,
                format!(
                    "of {}; {goal}; pressure {}",
                    told(memory.total, amount),
                    told(memory.pressure_percent, percent)
                ),
            ),
            figure(
                "Reached",
                net(status.passes.reached),
                false,
                format!(
                    "of {} predicted in {} merges; {} pages written since, {} huge pages split",
                    amount(status.passes.predicted),
                    number(status.passes.merges),
                    told(status.cow_breaks, number),
                    told(status.huge_pages_split, number)
                ),
            ),
        ];
        let [words, line] = Layout::horizontal([Constraint::Min(70), Constraint::Max(60)]).areas(room);
        // The title may take the whole width.
        frame.render_widget(Paragraph::new(Text::from(lines)), room);
        if room.height >= 5 && line.width >= 20 && words.width >= 70 {
            let chart = Rect { y: room.y + 1, height: 3, ..line };
            frame.render_widget(Clear, chart);
            let skip = self.past.len().saturating_sub(usize::from(chart.width));
            frame.render_widget(Sparkline::default().data(&self.past[skip..]).style(self.style(Mark::Good)), chart);
        }
    }

    fn tabs(&self) -> Line<'static> {
        let mut spans = Vec::new();
        for (place, (view, name)) in View::ALL.iter().enumerate() {
            let style = if *view == self.view { Style::new().add_modifier(Modifier::REVERSED) } else { Style::new() };
            spans.push(Span::styled(format!(" {} {name} ", place + 1), style));
        }
        if self.view == View::Members {
            let way = if self.order.down { "down" } else { "up" };
            spans.push(Span::styled(format!("  sorted by {}, {way}", self.order.name()), self.style(Mark::Dim)));
        }
        Line::from(spans)
    }

    fn keys(&self) -> Line<'static> {
        let filter = printable(&self.filter).into_owned();
        if self.typing {
            return Line::from(vec![
                Span::styled("filter: ", Style::new().add_modifier(Modifier::BOLD)),
                Span::raw(format!("{filter}_")),
            ]);
        }
        let shown = if filter.is_empty() { String::new() } else { format!("   filter: {filter} (Esc)") };
        Line::styled(format!("q quit  ? help  / filter  s sort  r reverse  Tab table{shown}"), self.style(Mark::Dim))
    }

    fn table(&mut self, frame: &mut Frame, room: Rect, sheet: &Sheet) {
        if sheet.rows.is_empty() {
            let word = if self.filter.is_empty() { sheet.empty } else { "nothing fits the filter" };
            frame.render_widget(Paragraph::new(word), room);
            return;
        }
        let side = |right| if right { Alignment::Right } else { Alignment::Left };
        let header =
            sheet.columns.iter().map(|column| Cell::new(Text::raw(column.title.clone()).alignment(side(column.right))));
        let rows = sheet.rows.iter().map(|row| {
            let cells = row.cells.iter().zip(&sheet.columns).map(|(cell, column)| {
                let text = Text::raw(cell.text.clone()).alignment(side(column.right));
                Cell::new(text).style(self.heat(cell.heat))
            });
            Row::new(cells.collect::<Vec<_>>()).style(self.style(row.mark))
        });
        // Whatever room is left goes to the last column.
        let mut widths: Vec<Constraint> = sheet.columns.iter().map(|column| Constraint::Length(column.width)).collect();
        if let (Some(last), Some(column)) = (widths.last_mut(), sheet.columns.last())
            && !column.right
        {
            *last = Constraint::Min(column.width);
        }
        let table = Table::new(rows.collect::<Vec<_>>(), widths)
            .header(Row::new(header).style(self.style(Mark::Dim)))
            .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
        frame.render_stateful_widget(table, room, &mut self.selected);
    }

    fn help(&self, frame: &mut Frame, room: Rect) {
        let mut lines = vec![Line::raw("")];
        for (keys, what) in KEYS {
            lines.push(Line::styled(format!(" {keys}"), Style::new().add_modifier(Modifier::BOLD)));
            lines.push(Line::raw(format!("     {what}")));
        }
        lines.push(Line::raw(""));
        lines.extend(FIGURES.map(Line::raw));
        let height = lines.len() as u16 + 2;
        let area = room.centered(Constraint::Max(80), Constraint::Max(height));
        frame.render_widget(Clear, area);
        let block = Block::bordered().title(" pagefold top: any key closes this ");
        frame.render_widget(Paragraph::new(lines).block(block), area);
    }

    fn style(&self, mark: Mark) -> Style {
        if self.colour {
            match mark {
                Mark::Plain => Style::new(),
                Mark::Dim => Style::new().add_modifier(Modifier::DIM),
                Mark::Good => Style::new().fg(Color::Green),
                Mark::Warn => Style::new().fg(Color::Yellow),
                Mark::Bad => Style::new().fg(Color::Red).add_modifier(Modifier::BOLD),
            }
        } else {
            match mark {
                Mark::Bad | Mark::Warn => Style::new().add_modifier(Modifier::BOLD),
                Mark::Plain | Mark::Dim | Mark::Good => Style::new(),
            }
        }
    }

    fn heat(&self, share: f64) -> Style {
        if !self.colour || share < 0.1 {
            return Style::new();
        }
        let place = ((share * HEAT.len() as f64) as usize).min(HEAT.len() - 1);
        Style::new().bg(Color::Indexed(HEAT[place])).fg(Color::White)
    }
}

fn amount(bytes: u64) -> String {
    Bytes(bytes).to_string()
}
