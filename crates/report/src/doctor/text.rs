//! The findings of the doctor for people: what needs a decision in full, the rest in a line each.

use super::{DoctorReport, FindingReport, VerdictCounts, VerdictName};
use crate::text::{Style, cut};
use crate::wire::Who;
use std::borrow::Cow;

/// Columns of the verdict, and of the indent below it.
const VERDICT: usize = 9;
/// Prose is hard to read in longer lines.
const LONGEST_LINE: usize = 110;

/// The whole report; with `verbose` what is as it should be is shown in full, too.
pub fn render(report: &DoctorReport, verbose: bool, style: Style) -> String {
    let mut page = Page { style, text: String::new() };
    if report.processes.is_empty() {
        page.findings(report.findings.iter(), verbose);
    }
    for (i, who) in report.processes.iter().enumerate() {
        page.text.push_str(if i > 0 { "\n" } else { "" });
        page.line(&page.bold(&heading(who)));
        let own = |finding: &&FindingReport| (finding.pid, finding.start_time) == (Some(who.pid), Some(who.start_time));
        page.findings(report.findings.iter().filter(own), verbose);
    }
    page.text.push('\n');
    page.line(&summary(&report.counts));
    page.text
}

fn heading(who: &Who) -> String {
    let vm = who.vm.as_ref().and_then(|vm| vm.name.as_ref()).map(|name| format!(", machine {name}"));
    let domain = who.domain.as_ref().map(|domain| format!(", {domain}"));
    let cgroup = who.cgroup.as_ref().map(|path| format!(", cgroup {path}"));
    let parts = [vm, domain, cgroup].map(Option::unwrap_or_default).concat();
    printable(&format!("Process {} ({}){parts}", who.pid, who.comm)).into_owned()
}

fn summary(counts: &VerdictCounts) -> String {
    let counts = [
        (counts.fail, "fail"),
        (counts.warn, "warn"),
        (counts.unknown, "unknown"),
        (counts.ok, "ok"),
        (counts.not_applicable, "n/a"),
    ];
    let parts: Vec<_> =
        counts.iter().filter(|(count, _)| *count > 0).map(|(count, name)| format!("{count} {name}")).collect();
    parts.join(", ")
}

/// Text without anything that could steer a terminal or reorder a line: control characters, and the invisible ones that
/// Unicode has for direction and joining.
fn printable(text: &str) -> Cow<'_, str> {
    let steers = |c: char| {
        c.is_control()
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
    };
    if !text.contains(steers) {
        return text.into();
    }
    text.chars()
        .fold(String::new(), |mut safe, c| {
            if steers(c) {
                safe.extend(c.escape_default())
            } else {
                safe.push(c)
            }
            safe
        })
        .into()
}

/// What is written so far.
struct Page {
    style: Style,
    text: String,
}

impl Page {
    fn findings<'a>(&mut self, findings: impl Iterator<Item = &'a FindingReport>, verbose: bool) {
        let (full, brief): (Vec<_>, Vec<_>) =
            findings.partition(|finding| verbose || finding.verdict >= VerdictName::Unknown);
        for finding in full {
            self.text.push_str(if self.text.is_empty() { "" } else { "\n" });
            self.full(finding);
        }
        if !brief.is_empty() && !self.text.is_empty() {
            self.text.push('\n');
        }
        for finding in brief {
            self.brief(finding);
        }
    }

    fn full(&mut self, finding: &FindingReport) {
        let title = format!("{} [{}]", printable(&finding.title), finding.rule);
        for (i, line) in wrap(&title, self.columns(VERDICT)).into_iter().enumerate() {
            let start = if i == 0 { self.verdict(finding.verdict) } else { " ".repeat(VERDICT) };
            let line = self.bold(&line);
            self.line(&format!("{start}{line}"));
        }
        let value = format!("{}: {}", finding.source, finding.value);
        self.paragraph(&printable(&value), VERDICT, "");
        self.paragraph(finding.why, VERDICT, "");
        self.commands("remedy", &finding.remedy);
        self.commands("verify", finding.verify.as_slice());
    }

    /// Commands are never wrapped, so that they can be copied; what is said about them is.
    fn commands(&mut self, name: &str, commands: &[String]) {
        for (i, command) in commands.iter().enumerate() {
            let label = if i == 0 { format!("{name}:") } else { String::new() };
            let command = printable(command);
            let start = format!("{:VERDICT$}{label:<8}", "");
            match command.strip_prefix("# ").filter(|_| start.len() + command.len() > self.columns(0)) {
                Some(comment) => {
                    let indent = start.len();
                    let lines = wrap(comment, self.columns(indent + 2));
                    for (i, line) in lines.iter().enumerate() {
                        let start = if i == 0 { start.clone() } else { " ".repeat(indent) };
                        self.line(&format!("{start}# {line}"));
                    }
                }
                None => self.line(&format!("{start}{command}")),
            }
        }
    }

    fn brief(&mut self, finding: &FindingReport) {
        let text = format!("{} ({})", printable(&finding.title), printable(&finding.value));
        let text = cut(&text, self.columns(VERDICT));
        let start = self.verdict(finding.verdict);
        self.line(&format!("{start}{text}"));
    }

    fn paragraph(&mut self, text: &str, indent: usize, mark: &str) {
        for line in wrap(text, self.columns(indent + mark.len())) {
            self.line(&format!("{:indent$}{mark}{line}", ""));
        }
    }

    fn line(&mut self, line: &str) {
        self.text.push_str(line.trim_end());
        self.text.push('\n');
    }

    /// Columns that are left beside an indent.
    fn columns(&self, indent: usize) -> usize {
        usize::from(self.style.width).min(LONGEST_LINE).saturating_sub(indent)
    }

    fn verdict(&self, verdict: VerdictName) -> String {
        let (word, colour) = match verdict {
            VerdictName::Fail => ("FAIL", "1;31"),
            VerdictName::Warn => ("warn", "1;33"),
            VerdictName::Unknown => ("unknown", "1;35"),
            VerdictName::Ok => ("ok", "32"),
            VerdictName::NotApplicable => ("n/a", "2"),
        };
        let padded = format!("{word:<VERDICT$}");
        if self.style.colour { format!("\x1b[{colour}m{padded}\x1b[0m") } else { padded }
    }

    fn bold(&self, text: &str) -> String {
        if self.style.colour { format!("\x1b[1m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// Text in lines of at most so many columns, broken at blanks. A longer word has a line of its own.
fn wrap(text: &str, columns: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let mut used = 0;
    for word in text.split(' ').filter(|word| !word.is_empty()) {
        let length = word.chars().count();
        match lines.last_mut() {
            Some(line) if used + 1 + length <= columns => {
                line.push(' ');
                line.push_str(word);
                used += 1 + length;
            }
            _ => {
                lines.push(word.to_owned());
                used = length;
            }
        }
    }
    lines
}
