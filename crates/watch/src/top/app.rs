//! The state of `pagefold top`, and the effect of keys on it.

use super::table::{self, DataTable, SortOrder};
use pagefold_daemon::wire::StatusReport;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::widgets::TableState;

/// The number of past savings values kept for the sparkline.
const MAX_KEPT_SAVINGS: usize = 240;

/// The tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TableView {
    Processes,
    Workloads,
    Decisions,
    Findings,
    Sharing,
    Kernel,
}

impl TableView {
    pub const ALL_WITH_TITLES: [(Self, &str); 6] = [
        (Self::Processes, "Processes"),
        (Self::Workloads, "VMs, jobs"),
        (Self::Decisions, "Decisions"),
        (Self::Findings, "Findings"),
        (Self::Sharing, "Sharing"),
        (Self::Kernel, "KSM"),
    ];

    pub fn position(self) -> usize {
        Self::ALL_WITH_TITLES.iter().position(|(view, _)| *view == self).unwrap_or_default()
    }
}

/// The state of `pagefold top`.
#[derive(Debug)]
pub struct App {
    pub(super) color: bool,
    pub(super) status: Option<StatusReport>,
    /// Why the last reading failed.
    pub(super) last_error: Option<String>,
    /// Net savings at each reading.
    pub(super) saved_history: Vec<u64>,
    pub(super) view: TableView,
    pub(super) selection: TableState,
    pub(super) sort_order: SortOrder,
    pub(super) filter: String,
    /// Whether keys edit the filter.
    pub(super) is_editing_filter: bool,
    pub(super) is_help_shown: bool,
}

impl App {
    /// The state before the first reading.
    pub fn new(color: bool) -> Self {
        Self {
            color,
            status: None,
            last_error: None,
            saved_history: Vec::new(),
            view: TableView::Processes,
            selection: TableState::new().with_selected(0),
            sort_order: SortOrder::default(),
            filter: String::new(),
            is_editing_filter: false,
            is_help_shown: false,
        }
    }

    /// Use a new reading. If it failed, the last status stays and is marked as old.
    pub fn update(&mut self, result: Result<StatusReport, String>) {
        match result {
            Ok(status) => {
                self.saved_history.push(status.saved.net.map_or(0, |net| net.max(0).cast_unsigned()));
                if self.saved_history.len() > MAX_KEPT_SAVINGS {
                    self.saved_history.remove(0);
                }
                self.last_error = None;
                self.status = Some(status);
            }
            Err(why) => self.last_error = Some(why),
        }
    }

    /// Handle a key; true to quit.
    pub fn handle_key(&mut self, key: KeyEvent) -> bool {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return key.code == KeyCode::Char('c');
        }
        if self.is_help_shown {
            self.is_help_shown = false;
        } else if self.is_editing_filter {
            self.type_filter(key.code);
        } else {
            return self.handle_command_key(key.code);
        }
        false
    }

    fn type_filter(&mut self, key: KeyCode) {
        match key {
            KeyCode::Char(c) => self.filter.push(c),
            KeyCode::Backspace => {
                self.filter.pop();
            }
            KeyCode::Esc => {
                self.filter.clear();
                self.is_editing_filter = false;
            }
            KeyCode::Enter => self.is_editing_filter = false,
            _ => {}
        }
        self.selection.select_first();
    }

    fn handle_command_key(&mut self, key: KeyCode) -> bool {
        let views = TableView::ALL_WITH_TITLES.len();
        let index = self.view.position();
        match key {
            KeyCode::Char('q') => return true,
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.is_help_shown = true,
            KeyCode::Char('/') => self.is_editing_filter = true,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Tab | KeyCode::Right => self.select_view((index + 1) % views),
            KeyCode::BackTab | KeyCode::Left => self.select_view((index + views - 1) % views),
            KeyCode::Char(digit @ '1'..='9') => self.select_view(digit as usize - '1' as usize),
            KeyCode::Char('s') => self.sort_order.select_next_column(),
            KeyCode::Char('r') => self.sort_order.descending = !self.sort_order.descending,
            KeyCode::Down | KeyCode::Char('j') => self.selection.select_next(),
            KeyCode::Up | KeyCode::Char('k') => self.selection.select_previous(),
            KeyCode::PageDown => self.selection.scroll_down_by(10),
            KeyCode::PageUp => self.selection.scroll_up_by(10),
            KeyCode::Home | KeyCode::Char('g') => self.selection.select_first(),
            KeyCode::End | KeyCode::Char('G') => self.selection.select_last(),
            _ => {}
        }
        false
    }

    fn select_view(&mut self, index: usize) {
        if let Some((view, _)) = TableView::ALL_WITH_TITLES.get(index) {
            self.view = *view;
            self.selection = TableState::new().with_selected(0);
        }
    }

    /// The current table, fitted to a width in columns of the terminal.
    pub(super) fn visible_table(&self, status: &StatusReport, width: u16) -> DataTable {
        let mut table = match self.view {
            TableView::Processes => table::process_table(status, self.sort_order),
            TableView::Workloads => table::workload_table(status),
            TableView::Decisions => table::decision_table(status),
            TableView::Findings => table::finding_table(status),
            TableView::Sharing => table::sharing_table(status),
            TableView::Kernel => table::ksm_table(status),
        };
        table.filter_rows(&self.filter);
        table.fit_columns(width);
        table
    }
}
