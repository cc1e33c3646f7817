//! Plans and their results as text.

use crate::wire::{
    ChangeReport, KeptStateName, MethodName, StepReasonReport, StepReport, TuneApplyReport, TunePlanReport,
    TuneVerifyReport, VcpuCheckReport,
};
use pagefold_base::count_text;
use pagefold_doctor::wire::{FindingReport, VerdictName};
use pagefold_output::text::{TextStyle, escape_unprintable, format_number};
use std::fmt::Write;

/// Columns before the lines of a step.
const INDENT: usize = 3;

/// Renders a plan.
pub fn render_plan(report: &TunePlanReport, style: TextStyle) -> String {
    let mut text = style.format_paragraph(&render_title(report), 0);
    for (number, step) in report.steps.iter().enumerate() {
        text.push('\n');
        text.push_str(&render_step(number + 1, step, style));
    }
    text.push_str(&render_rest(report, style));
    text
}

fn render_title(report: &TunePlanReport) -> String {
    let profile = report.profile.map(|profile| format!(", profile {profile}")).unwrap_or_default();
    let steps = match report.steps.len() {
        0 => "nothing is to be changed".to_owned(),
        count => count_text(count, "step"),
    };
    let refused = match report.refused.len() {
        0 => String::new(),
        count => format!(", {count} refused"),
    };
    let left = match report.left_to_operator.len() {
        0 => String::new(),
        count => format!(", {} left to the operator", count_text(count, "finding")),
    };
    format!("Plan for {}{profile}: {steps}{refused}{left}.", report.host)
}

fn method_name(method: MethodName) -> &'static str {
    match method {
        MethodName::Live => "at once",
        MethodName::ModuleReload => "by loading the module again",
        MethodName::VmRestart => "when the machine starts again",
        MethodName::Reboot => "when the host boots again",
        MethodName::Manual => "by hand",
    }
}

fn render_step(number: usize, step: &StepReport, style: TextStyle) -> String {
    let title = format!("{number}. {} [{}], {}", step.title, step.rule, method_name(step.method));
    let mut text = style.format_paragraph(&escape_unprintable(&title), INDENT);
    let indent = " ".repeat(INDENT);
    match &step.change {
        ChangeReport::Write { path, from, to } => {
            let _ = writeln!(text, "{indent}{}", escape_unprintable(&format!("{path}: {from} -> {to}")));
        }
        ChangeReport::Module { module, from, to, reload, file } => {
            for (name, value) in to {
                let before = from.get(name).map_or("not loaded", |value| value);
                let _ = writeln!(text, "{indent}{module}.{name}: {before} -> {value}");
            }
            let reload = if *reload { ", and a reload now" } else { "; the module is not loaded now" };
            let _ = writeln!(text, "{indent}{file}{reload}");
        }
        ChangeReport::Boot { commands, undo_commands, check, .. } => {
            let parts =
                [("", &commands[..]), ("undo:", undo_commands), ("after the boot:", std::slice::from_ref(check))];
            for (heading, commands) in parts {
                if !heading.is_empty() {
                    let _ = writeln!(text, "{indent}{heading}");
                }
                for command in commands {
                    let _ = writeln!(text, "{indent}# {}", escape_unprintable(command));
                }
            }
        }
        ChangeReport::Machine { diff, .. } => {
            for line in diff.lines() {
                let _ = writeln!(text, "{indent}{}", escape_unprintable(line));
            }
        }
    }
    let is_joined = step.reasons.len() > 1;
    for reason in &step.reasons {
        text.push_str(&render_reason(reason, is_joined, style));
    }
    text.push_str(&render_note("Undo", &step.undo, INDENT, style));
    text
}

/// What a rule tells of a step. Where several rules ask for the step, each has a heading.
fn render_reason(reason: &StepReasonReport, has_heading: bool, style: TextStyle) -> String {
    let mut text = String::new();
    let mut depth = INDENT;
    if has_heading {
        text.push_str(&render_note(&reason.rule, &reason.title, depth, style));
        depth += 2;
    }
    let notes = [
        ("Why", Some(reason.why.as_str()).filter(|why| !why.is_empty())),
        ("Benefit", reason.benefit),
        ("Risk", reason.risk),
        ("Proof", reason.counter),
    ];
    for (label, note) in notes {
        text.extend(note.map(|note| render_note(label, note, depth, style)));
    }
    text
}

fn render_note(label: &str, note: &str, depth: usize, style: TextStyle) -> String {
    let line = format!("{}{label}: {note}", " ".repeat(depth));
    style.format_paragraph(&escape_unprintable(&line), depth + 2)
}

/// Refusals, conflicts and ignored lines.
fn render_rest(report: &TunePlanReport, style: TextStyle) -> String {
    let mut text = String::new();
    let mut section = |heading: &str, lines: Vec<String>| {
        if !lines.is_empty() {
            text.push_str(&style.format_heading(heading));
            for line in lines {
                text.push_str(&style.format_paragraph(&escape_unprintable(&line), 2));
            }
        }
    };
    let refused =
        report.refused.iter().map(|refusal| format!("{} [{}]: {}", refusal.change, refusal.rule, refusal.why));
    section("Refused", refused.collect());
    let left = report.left_to_operator.iter().flat_map(|finding| {
        let times = if finding.count > 1 { format!(", {} times", finding.count) } else { String::new() };
        let remedy = finding.remedy.iter().map(|line| format!("    {line}"));
        [format!("{} [{}]{times}", finding.title, finding.rule)].into_iter().chain(remedy)
    });
    section("Left to the operator", left.collect());
    let conflicts = report
        .conflicts
        .iter()
        .map(|conflict| format!("{} writes {}: {}", conflict.program, conflict.writes, conflict.remedy));
    section("Other programs", conflicts.collect());
    let ignored =
        report.ignored_lines.iter().map(|line| format!("line {}: {}: {}", line.number, line.text.trim(), line.why));
    section("Not carried out", ignored.collect());
    text
}

/// Renders the result of an applied plan.
pub fn render_applied(report: &TuneApplyReport, style: TextStyle) -> String {
    let mut text = String::new();
    if report.plan.steps.is_empty() {
        text.push_str(&render_plan(&report.plan, style));
        return text;
    }
    for &position in &report.done {
        let Some(step) = report.plan.steps.get(position) else { continue };
        text.push_str(&style.format_paragraph(&format!("Done: {}", describe_change(&step.change)), 2));
    }
    for failed in &report.failed {
        let Some(step) = report.plan.steps.get(failed.step) else { continue };
        let line = format!("Failed, nothing changed: {}: {}", describe_change(&step.change), failed.why);
        text.push_str(&style.format_paragraph(&escape_unprintable(&line), 2));
    }
    for undo in &report.failed_undos {
        text.push_str(&style.format_paragraph(&escape_unprintable(&format!("Not undone: {undo}")), 2));
    }
    if !report.manual.is_empty() {
        text.push_str(&style.format_heading("Left to you"));
        for (number, &position) in report.manual.iter().enumerate() {
            let Some(step) = report.plan.steps.get(position) else { continue };
            text.push_str(&render_step(number + 1, step, style));
        }
    }
    text.push_str(&render_rest(&report.plan, style));
    if !report.done.is_empty() {
        text.push_str("\nThe changes stay until `pagefold tune undo`; `pagefold tune verify` checks them.\n");
    }
    text
}

fn describe_change(change: &ChangeReport) -> String {
    escape_unprintable(&match change {
        ChangeReport::Write { path, from, to } => format!("{path} is {to}, was {from}"),
        ChangeReport::Module { module, to, reload, file, .. } => {
            let values: Vec<String> = to.iter().map(|(name, value)| format!("{name}={value}")).collect();
            let loaded = if *reload { "is loaded with" } else { "will be loaded with" };
            format!("module {module} {loaded} {}, stored in {file}", values.join(" "))
        }
        ChangeReport::Boot { commands, .. } => commands.join("; "),
        ChangeReport::Machine { name, .. } => format!("the definition of {name}"),
    })
    .into_owned()
}

/// Renders the check of what is in force.
pub fn render_verified(report: &TuneVerifyReport, style: TextStyle) -> String {
    let mut text = String::new();
    if report.changes.is_empty() {
        text.push_str("No changes of `pagefold tune` are in force.\n");
    }
    for change in &report.changes {
        let line = match change.state {
            KeptStateName::InForce => format!("in force: {} is {}", change.name, one_line(&change.written)),
            KeptStateName::ChangedBack => {
                format!("drift: {} is {} again: another program changed it back", change.name, one_line(&change.before))
            }
            KeptStateName::ChangedByOthers => format!(
                "drift: {} is {}, not {}: another program wrote it, and it stays so",
                change.name,
                one_line(&change.current),
                one_line(&change.written)
            ),
            KeptStateName::Unknown => format!("unknown: {}: {}", change.name, change.current),
        };
        text.push_str(&style.format_paragraph(&escape_unprintable(&line), 2));
    }
    text.push_str(&render_counters(report, style));
    text.push_str(&render_machines(&report.machines, style));
    text.push_str(&render_guests(&report.guests, style));
    text
}

/// The counters of the changes, and why some changes have none.
fn render_counters(report: &TuneVerifyReport, style: TextStyle) -> String {
    let mut text = String::new();
    if !report.counters.is_empty() {
        text.push_str(&style.format_heading("Counters"));
        let headings = ["counter", ">before", ">now", ">growth", ">/s before", ">/s since", "source"];
        let mut table = style.new_table(&headings);
        for counter in &report.counters {
            table.add_row([
                counter.name.clone(),
                counter.value_before.map(format_number).unwrap_or_default(),
                format_number(counter.value),
                counter.growth.map(|growth| format!("{growth:+}")).unwrap_or_default(),
                counter.per_second_before.map(format_rate).unwrap_or_default(),
                counter.per_second_since.map(format_rate).unwrap_or_default(),
                counter.source.clone(),
            ]);
        }
        text.push_str(&style.render_table(&table));
    }
    for change in &report.changes {
        let Some(why) = change.no_counter else { continue };
        text.push_str(&style.format_paragraph(&escape_unprintable(&format!("no counter: {}: {why}", change.name)), 2));
    }
    text
}

/// A number in a second, with decimals where it is small.
fn format_rate(rate: f64) -> String {
    if rate < 100.0 { format!("{rate:.2}") } else { format_number(rate as u64) }
}

/// The vCPUs of machines, with the reasons for other verdicts than ok.
fn render_machines(machines: &[VcpuCheckReport], style: TextStyle) -> String {
    if machines.is_empty() {
        return String::new();
    }
    let mut text = style.format_heading("vCPUs");
    let mut table = style.new_table(&["machine", ">pid", ">declared", ">threads", ">ran", "verdict"]);
    for machine in machines {
        table.add_row([
            escape_unprintable(&machine.name).into_owned(),
            machine.pid.to_string(),
            machine.declared.map(|count| count.to_string()).unwrap_or_default(),
            machine.threads.map(|count| count.to_string()).unwrap_or_default(),
            machine.ran.to_string(),
            verdict_word(machine.verdict).to_owned(),
        ]);
    }
    text.push_str(&style.render_table(&table));
    for machine in machines {
        let Some(why) = &machine.why else { continue };
        let line = format!("{}: {}: {why}", verdict_word(machine.verdict), machine.name);
        text.push_str(&style.format_paragraph(&escape_unprintable(&line), 2));
    }
    text
}

fn verdict_word(verdict: VerdictName) -> &'static str {
    match verdict {
        VerdictName::Fail => "FAIL",
        VerdictName::Warn => "warn",
        VerdictName::Unknown => "unknown",
        VerdictName::Ok => "ok",
        VerdictName::NotApplicable => "n/a",
    }
}

/// What guests tell: each rule that applies, with a remedy where it has one.
fn render_guests(findings: &[FindingReport], style: TextStyle) -> String {
    if findings.is_empty() {
        return String::new();
    }
    let mut text = style.format_heading("Guests, by their agents");
    let applicable = findings.iter().filter(|finding| finding.verdict != VerdictName::NotApplicable);
    for finding in applicable.clone() {
        let machine = finding.machine.as_deref().unwrap_or_default();
        let verdict = verdict_word(finding.verdict);
        let line = format!("{verdict}: {machine}: {} ({}) [{}]", finding.title, finding.value, finding.rule);
        text.push_str(&style.format_paragraph(&escape_unprintable(&line), 2));
        for remedy in &finding.remedy {
            text.push_str(&format!("  {}\n", escape_unprintable(remedy)));
        }
    }
    if applicable.count() == 0 {
        text.push_str("No rule applies: the machines have no guest agent.\n");
    }
    text
}

/// A value of several lines as their number.
fn one_line(value: &str) -> String {
    match value.trim_end().lines().count() {
        0 | 1 => value.trim_end().to_owned(),
        count => format!("a file of {count} lines"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::counters::CounterEffect;
    use crate::decide::vcpus::{VcpuReadings, judge_vcpus};
    use crate::vcpus::VcpuCheck;
    use crate::wire::KeptChangeReport;
    use pagefold_base::{Pid, ProcessId};
    use pagefold_doctor::decide::audit::rule_summaries;
    use pagefold_doctor::decide::{Finding, Scope, Verdict};

    fn finding(rule: &'static str, verdict: Verdict, remedy: &[&str]) -> FindingReport {
        let finding = Finding {
            rule,
            scope: Scope::Guest(ProcessId { pid: Pid(7), start_time: 1 }),
            verdict,
            title: "the guest uses fewer CPUs than the machine has".to_owned(),
            source: String::new(),
            value: "1 online and 1 offline in the guest, 2 of the machine".to_owned(),
            expected: "each virtual CPU of the machine is online in the guest",
            why: "",
            remedy: remedy.iter().map(|&line| line.to_owned()).collect(),
            verify: None,
            details: rule_summaries()[0].details,
            changes: Vec::new(),
            on_request: false,
        };
        FindingReport { machine: Some("db\u{1b}".to_owned()), ..finding.into() }
    }

    #[test]
    fn verified_machines_have_verdicts_with_reasons() {
        let machine = |name: &str, guest_ticks: &[u64]| {
            let readings =
                VcpuReadings { declared: Some(2), guest_ticks: Ok(guest_ticks.to_vec()), age_seconds: Ok(99) };
            let (process, verdict) = (ProcessId { pid: Pid(7), start_time: 1 }, judge_vcpus(&readings));
            VcpuCheck { process, name: name.to_owned(), readings, verdict }
        };
        let machines = [machine("web", &[3, 4]), machine("db", &[3, 0])];
        let report = TuneVerifyReport::new("this host".to_owned(), &[], &[], &machines, Vec::new());
        let text = render_verified(&report, TextStyle { width: 200, color: false });
        assert!(text.contains("web        7         2        2    2  ok\n"), "{text}");
        assert!(text.contains("db         7         2        2    1  FAIL\n"), "{text}");
        assert!(text.contains("\nFAIL: db: 1 of 2 virtual CPUs have run guest code 99 s after its start"), "{text}");
    }

    #[test]
    fn verified_counters_are_shown_before_and_since_the_changes() {
        let counter = CounterEffect {
            name: "pswpout",
            source: "/proc/vmstat:pswpout".to_owned(),
            value: 2000,
            growth: Some(7),
            value_before: Some(1500),
            rate_before: Some(123.4),
            rate_since: Some(0.5),
        };
        let level = CounterEffect { name: "ShmemHugePages", rate_before: None, rate_since: None, ..counter.clone() };
        let mut report = TuneVerifyReport::new("this host".to_owned(), &[], &[counter, level], &[], Vec::new());
        report.changes.push(KeptChangeReport {
            name: "/proc/sys/kernel/io_uring_disabled".to_owned(),
            state: KeptStateName::InForce,
            before: "2".to_owned(),
            written: "0".to_owned(),
            current: "0".to_owned(),
            no_counter: Some("the kernel counts nothing"),
        });
        let text = render_verified(&report, TextStyle { width: 200, color: false });
        let words = |start: &str| {
            let line = text
                .lines()
                .map(str::trim_start)
                .find(|line| line.starts_with(start))
                .unwrap_or_else(|| panic!("{text}"));
            line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        let counted = ["pswpout", "1,500", "2,000", "+7", "123", "0.50", "/proc/vmstat:pswpout"];
        assert_eq!(words("pswpout"), counted);
        assert_eq!(words("ShmemHugePages")[1..], ["1,500", "2,000", "+7", "/proc/vmstat:pswpout"]);
        let without = "\nno counter: /proc/sys/kernel/io_uring_disabled: the kernel counts nothing\n";
        assert!(text.contains(without), "{text}");
    }

    #[test]
    fn verified_guests_have_verdicts_and_remedies() {
        let render = |findings| {
            let report = TuneVerifyReport::new("this host".to_owned(), &[], &[], &[], findings);
            render_verified(&report, TextStyle { width: 200, color: false })
        };
        assert!(!render(Vec::new()).contains("Guests"));
        let text = render(vec![
            finding("guest-cpus-online", Verdict::Fail, &["# in the guest: see dmesg"]),
            finding("guest-steal", Verdict::NotApplicable, &[]),
        ]);
        let line =
            "FAIL: db\\u{1b}: the guest uses fewer CPUs than the machine has (1 online and 1 offline in the guest, 2";
        assert!(text.contains("Guests, by their agents") && text.contains(line), "{text}");
        assert!(text.contains("\n  # in the guest: see dmesg\n") && !text.contains("guest-steal"), "{text}");
        let text = render(vec![finding("guest-steal", Verdict::NotApplicable, &[])]);
        assert!(text.contains("No rule applies"), "{text}");
    }
}
