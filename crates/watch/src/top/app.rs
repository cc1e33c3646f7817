//! What is shown, and what keys do to it.

use super::sheet::{self, Order, Sheet};
use pagefold_daemon::wire::Status;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::widgets::TableState;

/// Savings that are remembered for the line of bars.
const PAST: usize = 240;

/// The tables to choose from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum View {
    Members,
    Workloads,
    Decisions,
    Findings,
    Sharing,
    Kernel,
}

impl View {
    pub const ALL: [(Self, &str); 6] = [
        (Self::Members, "Members"),
        (Self::Workloads, "VMs, jobs"),
        (Self::Decisions, "Decisions"),
        (Self::Findings, "Findings"),
        (Self::Sharing, "Sharing"),
        (Self::Kernel, "KSM"),
    ];

    pub fn place(self) -> usize {
        Self::ALL.iter().position(|(view, _)| *view == self).unwrap_or_default()
    }
}

/// The state of `pagefold top`.
#[derive(Debug)]
pub struct App {
    pub(super) colour: bool,
    pub(super) status: Option<Status>,
    /// Why the last reading failed.
    pub(super) trouble: Option<String>,
    /// What was saved, net, at each reading.
    pub(super) past: Vec<u64>,
    pub(super) view: View,
    pub(super) selected: TableState,
    pub(super) order: Order,
    pub(super) filter: String,
    /// Whether keys go into the filter.
    pub(super) typing: bool,
    pub(super) help: bool,
}

impl App {
    /// Nothing read yet.
    pub fn new(colour: bool) -> Self {
        Self {
            colour,
            status: None,
            trouble: None,
            past: Vec::new(),
            view: View::Members,
            selected: TableState::new().with_selected(0),
            order: Order::default(),
            filter: String::new(),
            typing: false,
            help: false,
        }
    }

    /// Take what was read. A status stays when a later reading fails, and is marked as old.
    pub fn take(&mut self, read: Result<Status, String>) {
        match read {
            Ok(status) => {
                self.past.push(status.saved.net.map_or(0, |net| net.max(0).cast_unsigned()));
                if self.past.len() > PAST {
                    self.past.remove(0);
                }
                self.trouble = None;
                self.status = Some(status);
            }
            Err(why) => self.trouble = Some(why),
        }
    }

    /// Do what a key asks for; true to quit.
    pub fn press(&mut self, key: KeyEvent) -> bool {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return key.code == KeyCode::Char('c');
        }
        if self.help {
            self.help = false;
        } else if self.typing {
            self.type_filter(key.code);
        } else {
            return self.choose(key.code);
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
                self.typing = false;
            }
            KeyCode::Enter => self.typing = false,
            _ => {}
        }
        self.selected.select_first();
    }

    fn choose(&mut self, key: KeyCode) -> bool {
        let views = View::ALL.len();
        let place = self.view.place();
        match key {
            KeyCode::Char('q') => return true,
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.help = true,
            KeyCode::Char('/') => self.typing = true,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Tab | KeyCode::Right => self.turn_to((place + 1) % views),
            KeyCode::BackTab | KeyCode::Left => self.turn_to((place + views - 1) % views),
            KeyCode::Char(digit @ '1'..='9') => self.turn_to(digit as usize - '1' as usize),
            KeyCode::Char('s') => self.order.next(),
            KeyCode::Char('r') => self.order.down = !self.order.down,
            KeyCode::Down | KeyCode::Char('j') => self.selected.select_next(),
            KeyCode::Up | KeyCode::Char('k') => self.selected.select_previous(),
            KeyCode::PageDown => self.selected.scroll_down_by(10),
            KeyCode::PageUp => self.selected.scroll_up_by(10),
            KeyCode::Home | KeyCode::Char('g') => self.selected.select_first(),
            KeyCode::End | KeyCode::Char('G') => self.selected.select_last(),
            _ => {}
        }
        false
    }

    fn turn_to(&mut self, place: usize) {
        if let Some((view, _)) = View::ALL.get(place) {
            self.view = *view;
            self.selected = TableState::new().with_selected(0);
        }
    }

    /// The table that is shown, in so many columns of the terminal.
    pub(super) fn sheet(&self, status: &Status, width: u16) -> Sheet {
        let mut sheet = match self.view {
            View::Members => sheet::members(status, self.order),
            View::Workloads => sheet::workloads(status),
            View::Decisions => sheet::decisions(status),
            View::Findings => sheet::findings(status),
            View::Sharing => sheet::sharing(status),
            View::Kernel => sheet::kernel(status),
        };
        sheet.keep(&self.filter);
        sheet.fit(width);
        sheet
    }
}
