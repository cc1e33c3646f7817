//! The doctor's findings as text. Findings that need a decision are shown in full. Each `ok` finding, and each reading
//! that was refused, takes one line; the remedies of refusals are at the end, each once. Equal findings about several
//! virtual machines are one: they differ in the machine only. Rules about settings that do not apply share one line.
//! What a rule says of itself (reasons, benefit, risk, sources) is shown with the first of its findings only.

use crate::decide::audit::Topic;
use crate::wire::{DoctorReport, FindingReport, VerdictCounts, VerdictName};
use pagefold_output::text::{TextStyle, cut_end, escape_unprintable, wrap};
use pagefold_output::wire::{ProcessInfo, UnscannedProcessReport};
use std::collections::{BTreeMap, BTreeSet};

/// Columns of the verdict, and of the indent below it.
const VERDICT_COLUMNS: usize = 9;
/// Longer lines of prose are hard to read.
const MAX_LINE_COLUMNS: usize = 110;
/// Maximum number of unreadable processes that are named; the others are counted.
const MAX_NAMED_PROCESSES: usize = 5;
/// Maximum number of machines of equal findings that are named; the others are counted.
const MAX_NAMED_MACHINES: usize = 2;

/// The whole report; with `verbose`, `ok` findings are shown in full, too.
pub fn render(report: &DoctorReport, verbose: bool, style: TextStyle) -> String {
    let mut page = DoctorPage { style, text: String::new(), explained: BTreeMap::new() };
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
    let mut remedies: Vec<String> = Vec::new();
    for finding in report.findings.iter().filter(|finding| is_refusal(finding) && !verbose) {
        remedies.extend(finding.remedy.iter().filter(|line| !remedies.contains(line)).cloned().collect::<Vec<_>>());
    }
    page.add_commands("To see it", &remedies, 0);
    page.add_line(&render_summary(&report.counts));
    page.text
}

/// Whether a finding only says that the kernel refused a reading: then there is nothing to explain.
fn is_refusal(finding: &FindingReport) -> bool {
    finding.verdict == VerdictName::Unknown && finding.verify.is_none() && finding.remedy.len() == 1
}

/// Whether a finding is about a setting of the host, of a machine or of a guest, and not about KSM.
fn is_about_setting(finding: &FindingReport) -> bool {
    finding.topic != Topic::Ksm.name()
}

/// Whether an operator must decide, and needs to know benefit, risk and sources.
fn needs_details(finding: &FindingReport) -> bool {
    finding.verdict >= VerdictName::Warn
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

/// Equal findings, which differ only in the virtual machine.
struct FindingGroup<'a> {
    /// The first of them.
    finding: &'a FindingReport,
    /// Its machines, in the order of the findings; empty for findings about anything else.
    machines: Vec<&'a str>,
}

/// Groups equal findings, in the order of the first of each group. The values of brief findings are not shown, so they
/// do not matter.
fn group_findings<'a>(findings: Vec<&'a FindingReport>, brief: bool) -> Vec<FindingGroup<'a>> {
    let mut groups: Vec<FindingGroup<'a>> = Vec::new();
    let mut positions = BTreeMap::new();
    for finding in findings {
        let Some(machine) = finding.machine.as_deref().filter(|_| is_about_setting(finding)) else {
            groups.push(FindingGroup { finding, machines: Vec::new() });
            continue;
        };
        let text = (!brief).then_some((&finding.title, &finding.value));
        let position = *positions.entry((&finding.rule, finding.verdict, text)).or_insert(groups.len());
        match groups.get_mut(position) {
            Some(group) => group.machines.push(machine),
            None => groups.push(FindingGroup { finding, machines: vec![machine] }),
        }
    }
    groups
}

/// `187 machines: web-1, web-2 and 185 more`.
fn render_machines(machines: &[&str]) -> String {
    match machines {
        [machine] => format!("machine {machine}"),
        [first, second] => format!("2 machines: {first}, {second}"),
        _ => {
            let named = machines[..MAX_NAMED_MACHINES].join(", ");
            format!("{} machines: {named} and {} more", machines.len(), machines.len() - MAX_NAMED_MACHINES)
        }
    }
}

/// The machines at the end of a line.
fn render_machines_suffix(machines: &[&str]) -> String {
    if machines.is_empty() { String::new() } else { format!(" ({})", render_machines(machines)) }
}

/// The report text under construction.
struct DoctorPage {
    style: TextStyle,
    text: String,
    /// The rules that were explained, each with whether its details were shown.
    explained: BTreeMap<String, bool>,
}

impl DoctorPage {
    fn add_findings<'a>(&mut self, findings: impl Iterator<Item = &'a FindingReport>, verbose: bool) {
        let (full, brief): (Vec<_>, Vec<_>) =
            findings.partition(|finding| verbose || (finding.verdict >= VerdictName::Unknown && !is_refusal(finding)));
        for group in group_findings(full, false) {
            self.text.push_str(if self.text.is_empty() { "" } else { "\n" });
            self.add_full_finding(&group);
        }
        if !brief.is_empty() && !self.text.is_empty() {
            self.text.push('\n');
        }
        let is_inapplicable =
            |finding: &&FindingReport| finding.verdict == VerdictName::NotApplicable && is_about_setting(finding);
        let (inapplicable, brief): (Vec<_>, Vec<_>) = brief.into_iter().partition(is_inapplicable);
        for group in group_findings(brief, true) {
            self.add_brief_finding(&group);
        }
        if !inapplicable.is_empty() {
            let rules: BTreeSet<&str> = inapplicable.iter().map(|finding| &*finding.rule).collect();
            let rules = rules.into_iter().collect::<Vec<_>>().join(", ");
            let text = format!("settings that this host or some machines do not have: {rules}");
            self.add_marked_paragraph(VerdictName::NotApplicable, &text);
        }
    }

    fn add_marked_paragraph(&mut self, verdict: VerdictName, text: &str) {
        for (i, line) in wrap(text, self.columns_beside_indent(VERDICT_COLUMNS)).iter().enumerate() {
            let start = if i == 0 { self.format_verdict(verdict) } else { " ".repeat(VERDICT_COLUMNS) };
            self.add_line(&format!("{start}{line}"));
        }
    }

    fn add_full_finding(&mut self, group: &FindingGroup<'_>) {
        let finding = group.finding;
        let is_explained = self.is_explained(finding);
        let reference = if is_explained { ", see above" } else { "" };
        let title = format!("{} [{}{reference}]", escape_unprintable(&finding.title), finding.rule);
        for (i, line) in wrap(&title, self.columns_beside_indent(VERDICT_COLUMNS)).into_iter().enumerate() {
            let start = if i == 0 { self.format_verdict(finding.verdict) } else { " ".repeat(VERDICT_COLUMNS) };
            let line = self.format_bold(&line);
            self.add_line(&format!("{start}{line}"));
        }
        let value = match finding.pid.filter(|_| group.machines.len() > 1) {
            Some(pid) => format!("{}: {}", finding.source.replace(&format!("/{pid}/"), "/PID/"), finding.value),
            None => format!("{}: {}", finding.source, finding.value),
        };
        self.add_paragraph(&escape_unprintable(&value), VERDICT_COLUMNS);
        if !group.machines.is_empty() {
            self.add_paragraph(&escape_unprintable(&render_machines(&group.machines)), VERDICT_COLUMNS);
        }
        if !is_explained {
            self.add_explanation(finding);
        }
        self.add_commands("remedy", &finding.remedy, VERDICT_COLUMNS);
        self.add_commands("verify", finding.verify.as_slice(), VERDICT_COLUMNS);
    }

    /// Whether the page has what the rule says of itself, as far as the finding needs it.
    fn is_explained(&self, finding: &FindingReport) -> bool {
        self.explained.get(&*finding.rule).copied() >= Some(needs_details(finding))
    }

    /// What the rule says of itself, with details if a decision is needed.
    fn add_explanation(&mut self, finding: &FindingReport) {
        let has_details = needs_details(finding);
        self.explained.insert(finding.rule.to_string(), has_details);
        self.add_paragraph(&format!("expected: {}", finding.expected), VERDICT_COLUMNS);
        self.add_paragraph(&finding.why, VERDICT_COLUMNS);
        if !has_details {
            return;
        }
        let details = &finding.details;
        let method = details.method.replace('_', " ");
        for line in [
            format!("benefit: {}", details.benefit),
            format!("risk: {}", details.risk),
            format!("effect: {method}; undo: {}", details.undo),
            format!("counter: {}", details.counter),
            format!("versions: {}; see {}", details.versions, details.citation),
        ] {
            self.add_paragraph(&line, VERDICT_COLUMNS);
        }
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

    fn add_brief_finding(&mut self, group: &FindingGroup<'_>) {
        let columns = self.columns_beside_indent(VERDICT_COLUMNS);
        let finding = group.finding;
        if is_refusal(finding) {
            let machines = render_machines_suffix(&group.machines);
            let text = format!("{}: {}{machines}", finding.rule, finding.value);
            return self.add_marked_paragraph(finding.verdict, &escape_unprintable(&text));
        }
        let text = match &group.machines[..] {
            [] => format!("{} ({})", finding.title, finding.value),
            machines => format!("{}: {}", finding.rule, render_machines(machines)),
        };
        let start = self.format_verdict(finding.verdict);
        let line = cut_end(&escape_unprintable(&text), columns);
        self.add_line(&format!("{start}{line}"));
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
    use crate::wire::{ScopeName, SettingDetailsReport};

    fn finding(verdict: VerdictName, title: &str) -> FindingReport {
        FindingReport {
            rule: "ksm-run".into(),
            verdict,
            scope: ScopeName::Host,
            pid: None,
            start_time: None,
            machine: None,
            topic: "ksm".into(),
            title: title.to_owned(),
            source: "/sys/kernel/mm/ksm/run".to_owned(),
            value: "run = 0".to_owned(),
            expected: "1".into(),
            why: "ksmd merges only while run is 1, and the kernel's default is 0.".into(),
            remedy: vec![],
            verify: None,
            details: details(),
            changes: vec![],
            on_request: false,
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
                 expected: 1
                 ksmd merges only while run is 1, and the kernel's
                 default is 0.
                 benefit: more speed
                 risk: more power
                 effect: vm restart; undo: the old value
                 counter: exits
                 versions: all kernels; see kernel.c
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
    fn each_remedy_of_refusals_is_shown_once() {
        let refused = |remedy: &str| FindingReport {
            remedy: vec![remedy.to_owned()],
            ..finding(VerdictName::Unknown, "cannot tell: x")
        };
        let remedies = ["sudo pagefold doctor", "# start the agent", "sudo pagefold doctor", "# start the agent"];
        let text = render(&report(remedies.map(refused).into()), false, TextStyle::default());
        assert!(text.contains("\nTo see it: sudo pagefold doctor\n           # start the agent\n1 fail"), "{text}");
    }

    fn details() -> SettingDetailsReport {
        let text = |text: &'static str| text.into();
        SettingDetailsReport {
            benefit: text("more speed"),
            risk: text("more power"),
            method: text("vm_restart"),
            undo: text("the old value"),
            counter: text("exits"),
            versions: text("all kernels"),
            citation: text("kernel.c"),
        }
    }

    fn of_machine(verdict: VerdictName, number: u32, value: &str) -> FindingReport {
        FindingReport {
            rule: "vm-cpu-model".into(),
            scope: ScopeName::VirtualMachine,
            pid: Some(number),
            machine: Some(format!("web-{number}")),
            topic: "vm".into(),
            value: value.to_owned(),
            expected: "host".into(),
            ..finding(verdict, "the guest sees an old CPU")
        }
    }

    #[test]
    fn equal_findings_of_machines_are_one() {
        let mut findings: Vec<_> = (1..=187).map(|number| of_machine(VerdictName::Warn, number, "kvm64")).collect();
        findings.push(of_machine(VerdictName::Warn, 200, "qemu64"));
        findings.extend((300..302).map(|number| of_machine(VerdictName::Ok, number, "host")));
        findings.extend((300..330).map(|number| of_machine(VerdictName::NotApplicable, number, "none")));
        insta::assert_snapshot!(render(&report(findings), false, TextStyle { width: 90, color: false }), @r"
        warn     the guest sees an old CPU [vm-cpu-model]
                 /sys/kernel/mm/ksm/run: kvm64
                 187 machines: web-1, web-2 and 185 more
                 expected: host
                 ksmd merges only while run is 1, and the kernel's default is 0.
                 benefit: more speed
                 risk: more power
                 effect: vm restart; undo: the old value
                 counter: exits
                 versions: all kernels; see kernel.c

        warn     the guest sees an old CPU [vm-cpu-model, see above]
                 /sys/kernel/mm/ksm/run: qemu64
                 machine web-200

        ok       vm-cpu-model: 2 machines: web-300, web-301
        n/a      settings that this host or some machines do not have: vm-cpu-model

        1 fail, 2 unknown, 1 ok
        ");
    }

    #[test]
    fn a_rule_is_explained_once_and_with_details_if_a_decision_is_needed() {
        let of_region = |verdict, value: &str| FindingReport {
            scope: ScopeName::Process,
            value: value.to_owned(),
            ..finding(verdict, "a region cannot be merged")
        };
        let render = |verdicts: &[VerdictName]| {
            let findings = verdicts.iter().map(|verdict| of_region(*verdict, "heap")).collect();
            render(&report(findings), true, TextStyle::default())
        };
        let counts =
            |text: &str| ["ksmd merges only", "expected: 1", "risk: more power"].map(|line| text.matches(line).count());
        let text = render(&[VerdictName::Warn; 3]);
        assert_eq!((counts(&text), text.matches("a region cannot be merged").count()), ([1, 1, 1], 3), "{text}");
        assert_eq!(counts(&render(&[VerdictName::Warn, VerdictName::Ok])), [1, 1, 1]);
        assert_eq!(counts(&render(&[VerdictName::Ok, VerdictName::Ok])), [1, 1, 0]);
        let text = render(&[VerdictName::Unknown, VerdictName::Warn]);
        assert_eq!(counts(&text), [2, 2, 1], "the details come with the first finding that needs them: {text}");
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
