//! The result of a search for a policy as text.

use super::comparison::{format_gib_hours, format_seconds, format_signed_bytes};
use crate::decide::policies::ComparedPolicy;
use crate::decide::tuning::TuningGoal;
use crate::wire::tuning::{SimTuneReport, TriedPolicyReport};
use pagefold_output::text::{TextStyle, format_number};

/// The Pareto front, the policy to choose, and how to set it.
#[must_use]
pub fn render_tuning(report: &SimTuneReport, goal: TuningGoal, style: TextStyle) -> String {
    let bound = report.max_cores.map_or_else(String::new, |most| format!(", with at most {most} CPUs"));
    let mut text = style.format_paragraph(
        &format!(
            "{}: {}. A model of Linux {}, for {}; {} policies with {}. Goal {}: {}{bound}.",
            report.scenario,
            report.description,
            report.kernel,
            format_seconds(report.seconds),
            report.tried.len(),
            match report.seeds.len() {
                1 => "one seed".to_owned(),
                seeds => format!("{seeds} seeds each"),
            },
            goal.name(),
            goal.description(),
        ),
        0,
    );
    text.push('\n');
    text += &front_table(report, style);
    text.push('\n');
    text += &style.format_paragraph(&others(report), 0);
    text.push('\n');
    text + &choice(report, style)
}

fn front_table(report: &SimTuneReport, style: TextStyle) -> String {
    let mut table = style.new_table(&[
        "policy",
        ">CPUs",
        ">saved, GiB*h",
        ">saved at the end",
        ">90 % after",
        ">COW breaks",
        ">huge pages split",
        "choice",
    ]);
    for policy in report.tried.iter().filter(|policy| policy.on_pareto_front) {
        table.add_row([
            policy.policy.clone(),
            format!("{:.3}", policy.cores),
            format_gib_hours(policy.saved_gib_hours),
            format_signed_bytes(policy.saved_bytes),
            policy.seconds_to_90_percent.map_or_else(|| "-".to_owned(), format_seconds),
            format_number(policy.cow_breaks.round() as u64),
            format_number(policy.huge_pages_split.round() as u64),
            if is_choice(report, policy) { format!("for {}", report.goal) } else { String::new() },
        ]);
    }
    style.render_table(&table)
}

fn is_choice(report: &SimTuneReport, policy: &TriedPolicyReport) -> bool {
    report.choice.as_ref() == Some(&policy.policy)
}

fn others(report: &SimTuneReport) -> String {
    let others: Vec<&str> =
        report.tried.iter().filter(|policy| !policy.on_pareto_front).map(|policy| policy.policy.as_str()).collect();
    let front = "The table is the Pareto front of savings over time, CPU time and time to 90 % of the duplicates that \
                 the host has at the end. CPUs are those of ksmd and of the daemon.";
    if others.is_empty() {
        return front.to_owned();
    }
    format!("{front} Not better in any of them than a policy of the table: {}.", others.join(", "))
}

fn choice(report: &SimTuneReport, style: TextStyle) -> String {
    let Some(chosen) = report.tried.iter().find(|policy| is_choice(report, policy)) else {
        let reason = if report.goal == TuningGoal::Time.name() {
            "No policy reaches 90 % of the duplicates"
        } else {
            "No policy saves memory"
        };
        return style.format_paragraph(&format!("{reason} within the bound: there is nothing to choose."), 0);
    };
    let how = match (chosen.pages_to_scan, chosen.sleep_millisecs) {
        (Some(pages), Some(sleep)) if chosen.policy.starts_with("whole:") => format!(
            "a file with the lines `[ksm]`, `pages_to_scan = {pages}` and `sleep_millisecs = {sleep}`, and \
             `pagefold policy set FILE`"
        ),
        _ => match ComparedPolicy::parse(&chosen.policy) {
            Ok(ComparedPolicy::Guided { across_domains, cpu_permille: Some(permille) }) => format!(
                "`cpu_rate = \"{}%\"`{} in the section `[daemon]` of the daemon's configuration, and `pagefold daemon \
                 --mode act`",
                f64::from(permille) / 10.0,
                if across_domains { " and `across_domains = true`" } else { "" }
            ),
            _ => format!("`pagefold policy set {}`", chosen.policy),
        },
    };
    style.format_paragraph(&format!("To set {} on a host: {how}.", chosen.policy), 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bound_of_the_daemon_is_set_in_its_configuration() {
        let chosen = |policy: &str| {
            let tried = TriedPolicyReport {
                policy: policy.to_owned(),
                pages_to_scan: None,
                sleep_millisecs: None,
                advisor_target_scan_time: None,
                saved_bytes: 1.0,
                saved_gib_hours: 1.0,
                cores: 0.1,
                seconds_to_90_percent: None,
                cow_breaks: 0.0,
                huge_pages_split: 0.0,
                on_pareto_front: true,
            };
            let report = SimTuneReport {
                schema: "",
                scenario: String::new(),
                description: String::new(),
                kernel: String::new(),
                seconds: 1.0,
                exact: false,
                seeds: vec![1],
                goal: TuningGoal::Cpu.name(),
                max_cores: None,
                choice: Some(policy.to_owned()),
                tried: vec![tried],
            };
            choice(&report, TextStyle::default()).split_whitespace().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(
            chosen("guided:across-domains:2.5%"),
            "To set guided:across-domains:2.5% on a host: `cpu_rate = \"2.5%\"` and `across_domains = true` in the \
             section `[daemon]` of the daemon's configuration, and `pagefold daemon --mode act`."
        );
        assert!(chosen("guided:5%").contains("`cpu_rate = \"5%\"` in the section"));
        assert!(chosen("advisor:60").ends_with("`pagefold policy set advisor:60`."));
    }
}
