//! The doctor's findings as text. Findings that need a decision are shown in full. Each `ok` finding, and each reading
//! that the kernel refused, takes one line; one remedy at the end covers all refusals.

use crate::wire::{DoctorReport, FindingReport, VerdictCounts, VerdictName};
use pagefold_output::text::{TextStyle, cut_end, escape_unprintable, wrap};
use pagefold_output::wire::{ProcessInfo, UnscannedProcessReport};

/// Columns of the verdict, and of the indent below it.
const VERDICT_COLUMNS: usize = 9;
/// Longer lines of prose are hard to read.
const MAX_LINE_COLUMNS: usize = 110;
/// Maximum number of unreadable processes that are named; the others are counted.
const MAX_NAMED_PROCESSES: usize = 5;

/// The whole report; with `verbose`, `ok` findings are shown in full, too.
pub fn render(report: &DoctorReport, verbose: bool, style: TextStyle) -> String {
    let mut page = DoctorPage { style, text: String::new() };
    if report.processes.is_empty() {
        page.add_findings(report.findings.iter(), verbose);
    }
    for (i, process) in report.processes.iter().enumerate() {
        page.text.push_str(if i > 0 { "\n" } else { "" });
        page.add_line(&page.format_bold(&render_heading(process)));
        let is_own = |finding: &&FindingReport| {
            (finding.pid, finding.start_time) == (Some(process.pid), Some(process.start_time))
        };
        page.add_findings(report.findings.iter().filter(is_own), verbose);
    }
    page.text.push('\n');
    if !report.unscanned_processes.is_empty() {
        page.add_paragraph(&escape_unprintable(&render_unscanned(&report.unscanned_processes)), 0);
    }
    if let Some(finding) = report.findings.iter().find(|finding| is_refusal(finding)).filter(|_| !verbose) {
        page.add_commands("To see it", &finding.remedy, 0);
    }
    page.add_line(&render_summary(&report.counts));
    page.text
}

/// Whether a finding only says that the kernel refused a reading: then there is nothing to explain.
fn is_refusal(finding: &FindingReport) -> bool {
    finding.verdict == VerdictName::Unknown && finding.verify.is_none() && finding.remedy.len() == 1
}

/// The processes whose memory was not read: the first few by name.
fn render_unscanned(unscanned: &[UnscannedProcessReport]) -> String {
    let name = |process: &UnscannedProcessReport| match (process.pid, &process.comm) {
        (0, _) => format!("hidden processes ({})", process.detail),
        (pid, Some(comm)) => format!("{comm} ({pid}, {})", process.detail),
        (pid, None) => format!("{pid} ({})", process.detail),
    };
    let names: Vec<_> = unscanned.iter().take(MAX_NAMED_PROCESSES).map(name).collect();
    let more = if unscanned.len() > MAX_NAMED_PROCESSES {
        format!(" and {} more", unscanned.len() - MAX_NAMED_PROCESSES)
    } else {
        String::new()
    };
    format!("Memory that was not seen: {}{more}.", names.join(", "))
}

fn render_heading(process: &ProcessInfo) -> String {
    let vm = process.vm.as_ref().and_then(|vm| vm.name.as_ref()).map(|name| format!(", machine {name}"));
    let domain = process.domain.as_ref().map(|domain| format!(", {domain}"));
    let cgroup = process.cgroup.as_ref().map(|path| format!(", cgroup {path}"));
    let parts = [vm, domain, cgroup].map(Option::unwrap_or_default).concat();
    escape_unprintable(&format!("Process {} ({}){parts}", process.pid, process.comm)).into_owned()
}

fn render_summary(counts: &VerdictCounts) -> String {
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

/// The report text under construction.
struct DoctorPage {
    style: TextStyle,
    text: String,
}

impl DoctorPage {
    fn add_findings<'a>(&mut self, findings: impl Iterator<Item = &'a FindingReport>, verbose: bool) {
        let (full, brief): (Vec<_>, Vec<_>) =
            findings.partition(|finding| verbose || (finding.verdict >= VerdictName::Unknown && !is_refusal(finding)));
        for finding in full {
            self.text.push_str(if self.text.is_empty() { "" } else { "\n" });
            self.add_full_finding(finding);
        }
        if !brief.is_empty() && !self.text.is_empty() {
            self.text.push('\n');
        }
        for finding in brief {
            self.add_brief_finding(finding);
        }
    }

    fn add_full_finding(&mut self, finding: &FindingReport) {
        let title = format!("{} [{}]", escape_unprintable(&finding.title), finding.rule);
        for (i, line) in wrap(&title, self.columns_beside_indent(VERDICT_COLUMNS)).into_iter().enumerate() {
            let start = if i == 0 { self.format_verdict(finding.verdict) } else { " ".repeat(VERDICT_COLUMNS) };
            let line = self.format_bold(&line);
            self.add_line(&format!("{start}{line}"));
        }
        let value = format!("{}: {}", finding.source, finding.value);
        self.add_paragraph(&escape_unprintable(&value), VERDICT_COLUMNS);
        self.add_paragraph(&finding.why, VERDICT_COLUMNS);
        self.add_commands("remedy", &finding.remedy, VERDICT_COLUMNS);
        self.add_commands("verify", finding.verify.as_slice(), VERDICT_COLUMNS);
    }

    /// Commands are never wrapped, so that they can be copied; their explanations are.
    fn add_commands(&mut self, name: &str, commands: &[String], indent: usize) {
        for (i, command) in commands.iter().enumerate() {
            let label = if i == 0 { format!("{name}:") } else { String::new() };
            let command = escape_unprintable(command);
            let start = format!("{:indent$}{label:<width$}", "", width = name.len() + 2);
            match command.strip_prefix("# ").filter(|_| start.len() + command.len() > self.columns_beside_indent(0)) {
                Some(comment) => {
                    let indent = start.len();
                    let lines = wrap(comment, self.columns_beside_indent(indent + 2));
                    for (i, line) in lines.iter().enumerate() {
                        let start = if i == 0 { start.clone() } else { " ".repeat(indent) };
                        self.add_line(&format!("{start}# {line}"));
                    }
                }
                None => self.add_line(&format!("{start}{command}")),
            }
        }
    }

    fn add_brief_finding(&mut self, finding: &FindingReport) {
        let columns = self.columns_beside_indent(VERDICT_COLUMNS);
        let lines = if is_refusal(finding) {
            wrap(&escape_unprintable(&format!("{}: {}", finding.rule, finding.value)), columns)
        } else {
            vec![cut_end(&escape_unprintable(&format!("{} ({})", finding.title, finding.value)), columns)]
        };
        for (i, line) in lines.iter().enumerate() {
            let start = if i == 0 { self.format_verdict(finding.verdict) } else { " ".repeat(VERDICT_COLUMNS) };
            self.add_line(&format!("{start}{line}"));
        }
    }

    fn add_paragraph(&mut self, text: &str, indent: usize) {
        for line in wrap(text, self.columns_beside_indent(indent)) {
            self.add_line(&format!("{:indent$}{line}", ""));
        }
    }

    fn add_line(&mut self, line: &str) {
        self.text.push_str(line.trim_end());
        self.text.push('\n');
    }

    /// Columns left beside an indent.
    fn columns_beside_indent(&self, indent: usize) -> usize {
        usize::from(self.style.width).min(MAX_LINE_COLUMNS).saturating_sub(indent)
    }

    fn format_verdict(&self, verdict: VerdictName) -> String {
        let (word, color) = match verdict {
            VerdictName::Fail => ("FAIL", "1;31"),
            VerdictName::Warn => ("warn", "1;33"),
            VerdictName::Unknown => ("unknown", "1;35"),
            VerdictName::Ok => ("ok", "32"),
            VerdictName::NotApplicable => ("n/a", "2"),
        };
        let padded = format!("{word:<VERDICT_COLUMNS$}");
        if self.style.color { format!("\x1b[{color}m{padded}\x1b[0m") } else { padded }
    }

    fn format_bold(&self, text: &str) -> String {
        if self.style.color { format!("\x1b[1m{text}\x1b[0m") } else { text.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(verdict: VerdictName, title: &str) -> FindingReport {
        FindingReport {
            rule: "ksm-run".into(),
            verdict,
            pid: None,
            start_time: None,
            title: title.to_owned(),
            source: "/sys/kernel/mm/ksm/run".to_owned(),
            value: "run = 0".to_owned(),
            why: "ksmd merges only while run is 1, and the kernel's default is 0.".into(),
            remedy: vec![],
            verify: None,
        }
    }

    fn report(findings: Vec<FindingReport>) -> DoctorReport {
        let counts = VerdictCounts { fail: 1, warn: 0, unknown: 2, ok: 1, not_applicable: 0 };
        DoctorReport {
            schema: "pagefold.doctor/1",
            host: "this host".to_owned(),
            verdict: findings[0].verdict,
            counts,
            processes: vec![],
            findings,
            unscanned_processes: vec![],
        }
    }

    fn sample() -> DoctorReport {
        let fail = FindingReport {
            remedy: vec![
                "# a remark on the command below that is longer than a line".to_owned(),
                "echo 1 > /sys/kernel/mm/ksm/run # a command is longer than a line, and stays whole".to_owned(),
            ],
            verify: Some("grep -x 1 /sys/kernel/mm/ksm/run".to_owned()),
            ..finding(VerdictName::Fail, "ksmd is stopped while memory is enrolled")
        };
        let refused = FindingReport {
            remedy: vec!["sudo pagefold doctor".to_owned()],
            value: "enrollment of 2 processes: permission denied".to_owned(),
            ..finding(VerdictName::Unknown, "cannot tell: enrollment of 2 processes")
        };
        report(vec![fail, refused, finding(VerdictName::Ok, "ksmd is on")])
    }

    #[test]
    fn important_findings_are_shown_in_full() {
        let style = TextStyle { width: 60, color: false };
        insta::assert_snapshot!(render(&sample(), false, style), @r"
        FAIL     ksmd is stopped while memory is enrolled [ksm-run]
                 /sys/kernel/mm/ksm/run: run = 0
                 ksmd merges only while run is 1, and the kernel's
                 default is 0.
                 remedy: # a remark on the command below that is
                         # longer than a line
                         echo 1 > /sys/kernel/mm/ksm/run # a command is longer than a line, and stays whole
                 verify: grep -x 1 /sys/kernel/mm/ksm/run

        unknown  ksm-run: enrollment of 2 processes: permission
                 denied
        ok       ksmd is on (run = 0)

        To see it: sudo pagefold doctor
        1 fail, 2 unknown, 1 ok
        ");
    }

    #[test]
    fn only_commands_exceed_the_terminal_width() {
        for width in [60, 80, 160] {
            for line in render(&sample(), true, TextStyle { width, color: false }).lines() {
                let command = line.trim_start().starts_with("echo 1 >");
                assert!(command || line.chars().count() <= usize::from(width).min(MAX_LINE_COLUMNS), "{width}: {line}");
            }
        }
    }

    #[test]
    fn color_adds_only_escape_codes() {
        let colorless = |text: &str| {
            let mut parts = text.split("\x1b[");
            let first = parts.next().unwrap_or_default().to_owned();
            parts.fold(first, |text, part| text + part.split_once('m').map_or("", |(_, rest)| rest))
        };
        let render = |color| render(&sample(), false, TextStyle { width: 80, color });
        assert!(render(true).contains("\x1b[1;31mFAIL"));
        assert_eq!(colorless(&render(true)), render(false));
    }

    #[test]
    fn terminal_escapes_in_names_are_removed() {
        let name = "\u{1b}[2J\u{202e}evil\r\n\u{9b}31m";
        let mut report = report(vec![finding(VerdictName::Fail, name), finding(VerdictName::Ok, name)]);
        report.findings[0].value = name.to_owned();
        report.findings[0].remedy = vec![format!("echo {name}"), format!("# {name}")];
        report.unscanned_processes =
            vec![UnscannedProcessReport { pid: 7, comm: Some(name.to_owned()), reason: "denied", detail: "no".into() }];
        for width in [60, 160] {
            let text = render(&report, false, TextStyle { width, color: false });
            assert!(text.chars().all(|c| c == '\n' || !c.is_control()) && !text.contains('\u{202e}'), "{text:?}");
        }
        report.processes = vec![ProcessInfo {
            pid: 7,
            start_time: 1,
            comm: name.to_owned(),
            uid: None,
            domain: Some(name.to_owned()),
            cgroup: Some(name.to_owned()),
            vm: None,
            container: None,
            job: None,
            rank: None,
        }];
        let text = render(&report, false, TextStyle::default());
        assert!(text.starts_with("Process 7 (\\u{1b}[2J\\u{202e}evil\\r\\n\\u{9b}31m), "), "{text:?}");
    }
}
