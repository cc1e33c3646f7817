//! Text for the terminal: tables with aligned numbers and units, bars for shares, and color if the terminal supports
//! it.

use comfy_table::presets::NOTHING;
use comfy_table::{Attribute, Cell, CellAlignment, Color, ContentArrangement, Table};
use pagefold_base::Bytes;
use std::borrow::Cow;

/// Width and color of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextStyle {
    /// Columns of the terminal.
    pub width: u16,
    /// Whether to use color.
    pub color: bool,
}

impl Default for TextStyle {
    /// The style for files and pipes.
    fn default() -> Self {
        Self { width: 120, color: false }
    }
}

impl TextStyle {
    /// An empty table with these column headings. A heading that begins with `>` is right-aligned; the `>` is not
    /// shown.
    pub fn new_table(self, headings: &[&str]) -> Table {
        let mut table = Table::new();
        table.load_style(NOTHING).set_width(self.width).set_content_arrangement(ContentArrangement::Dynamic);
        if self.color {
            table.enforce_styling();
        } else {
            table.force_no_tty();
        }
        table.set_header(
            headings.iter().map(|heading| Cell::new(heading.trim_start_matches('>')).add_attribute(Attribute::Dim)),
        );
        for (i, heading) in headings.iter().enumerate() {
            if let Some(column) = table.column_mut(i)
                && heading.starts_with('>')
            {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        table
    }

    /// A heading above a table.
    pub fn format_heading(self, text: &str) -> String {
        if self.color { format!("\n\x1b[1m{text}\x1b[0m\n") } else { format!("\n{text}\n") }
    }

    /// Wraps a paragraph to the width. All lines but the first are indented.
    pub fn format_paragraph(self, text: &str, indent: usize) -> String {
        let indent = " ".repeat(indent);
        textwrap::fill(text, wrap_options(usize::from(self.width)).subsequent_indent(&indent)) + "\n"
    }

    /// Renders a table without trailing blanks.
    pub fn render_table(self, table: &Table) -> String {
        let mut text = String::new();
        for line in table.lines() {
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

/// Wraps text to lines of at most `columns` columns, at blanks only. A longer word gets a line of its own.
pub fn wrap(text: &str, columns: usize) -> Vec<String> {
    textwrap::wrap(text, wrap_options(columns)).into_iter().map(Cow::into_owned).collect()
}

fn wrap_options<'a>(columns: usize) -> textwrap::Options<'a> {
    textwrap::Options::new(columns.max(1))
        .break_words(false)
        .word_separator(textwrap::WordSeparator::AsciiSpace)
        .word_splitter(textwrap::WordSplitter::NoHyphenation)
        .wrap_algorithm(textwrap::WrapAlgorithm::FirstFit)
}

/// A share of at most 1 as a bar of up to `width` columns, in steps of an eighth of a column.
pub fn format_bar(share: f64, width: usize) -> String {
    let eighths = (share.clamp(0.0, 1.0) * width as f64 * 8.0).round() as usize;
    let mut bar = "█".repeat(eighths / 8);
    if !eighths.is_multiple_of(8) {
        bar.push(['▏', '▎', '▍', '▌', '▋', '▊', '▉'][eighths % 8 - 1]);
    }
    // A small share still shows a bar.
    if bar.is_empty() && share > 0.0 { "▏".to_owned() } else { bar }
}

/// A share in percent; `-` if the whole is zero.
pub fn format_percent(part: u64, whole: u64) -> String {
    if whole == 0 { "-".to_owned() } else { format!("{:.1} %", part as f64 * 100.0 / whole as f64) }
}

/// A number with a comma between groups of three digits.
pub fn format_number(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Bytes with a unit, or a dot for zero, which keeps tables readable.
pub fn format_bytes(value: u64) -> String {
    if value == 0 { "·".to_owned() } else { Bytes(value).to_string() }
}

/// Bytes with a sign.
pub fn format_net(value: i64) -> String {
    pagefold_base::units::NetBytes(value).to_string()
}

/// Escapes characters that could control a terminal or reorder a line: control characters, and Unicode's invisible
/// characters for direction and joining.
pub fn escape_unprintable(text: &str) -> Cow<'_, str> {
    let controls_terminal = |c: char| {
        c.is_control()
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
    };
    if !text.contains(controls_terminal) {
        return text.into();
    }
    let mut escaped = String::new();
    for c in text.chars() {
        if controls_terminal(c) {
            escaped.extend(c.escape_default());
        } else {
            escaped.push(c);
        }
    }
    escaped.into()
}

/// The name in all reports for the savings that KSM's counters contain.
pub const COUNTED_BY_KSM: &str = "counted by KSM";
/// The name of zero pages that the kernel freed when it split huge pages for ksmd. KSM's counters do not contain them.
pub const ZEROS_IN_SPLIT_HUGE_PAGES: &str = "zeros in split huge pages";

/// The part of a saving that KSM does not count, to append to a sentence; empty if there is none.
pub fn format_split_zeros(bytes: u64) -> String {
    match bytes {
        0 => String::new(),
        bytes => format!(" ({} of it {ZEROS_IN_SPLIT_HUGE_PAGES}, which KSM does not count)", Bytes(bytes)),
    }
}

/// Cuts text to this many characters, with an ellipsis for the rest. The result is printable.
pub fn cut_end(text: &str, width: usize) -> String {
    let text = escape_unprintable(text);
    if text.chars().count() <= width {
        return text.into_owned();
    }
    text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

/// Cuts text to its last characters, because the end of a path is the most specific. The result is printable.
pub fn cut_start(text: &str, width: usize) -> String {
    let text = escape_unprintable(text);
    let length = text.chars().count();
    if length <= width {
        return text.into_owned();
    }
    ['…'].into_iter().chain(text.chars().skip(length - width.saturating_sub(1))).collect()
}

/// A colored table cell.
pub fn colored_cell(text: impl ToString, color: Color) -> Cell {
    Cell::new(text).fg(color)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bar_length_matches_share() {
        let check = |share, text: &str| assert_eq!(format_bar(share, 4), text);
        check(0.0, "");
        check(0.001, "▏");
        check(0.5, "██");
        check(0.53125, "██▏");
        check(1.0, "████");
        check(7.0, "████");
    }

    #[test]
    fn numbers_are_grouped() {
        assert_eq!(format_number(0), "0");
        assert_eq!(format_number(999), "999");
        assert_eq!(format_number(1_234_567), "1,234,567");
    }

    #[test]
    fn long_names_are_cut() {
        assert_eq!(cut_end("short", 5), "short");
        assert_eq!(cut_end("longer", 5), "long…");
        assert_eq!(cut_start("/a/longer", 5), "…nger");
    }

    #[test]
    fn terminal_escapes_are_escaped() {
        assert_eq!(cut_end("a\x1b[2Jb", 40), "a\\u{1b}[2Jb");
        assert_eq!(cut_start("a\u{202e}b", 40), "a\\u{202e}b");
    }
}
