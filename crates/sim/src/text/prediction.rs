//! The result of a prediction as text.

use super::comparison::{
    RANGE_HEADINGS, SAVINGS_HEADINGS, describe_cpus, format_gib_hours, format_seconds, format_signed_bytes,
};
use crate::decide::tuning::SHARE_OF_90_PERCENT;
use crate::estimate_notes::count_processes;
use crate::wire::prediction::{PredictedTimeReport, PredictionReport, REPORTED_TIMES, SimPredictReport};
use pagefold_output::text::{TextStyle, format_bytes, format_number};

/// Every so many reported times one is shown.
const SHOWN_STEP: usize = REPORTED_TIMES as usize / 6;

/// What each policy saves and costs.
#[must_use]
pub fn render_prediction(report: &SimPredictReport, style: TextStyle) -> String {
    let what_if = report.what_if.as_ref().map_or_else(String::new, |changes| format!(", changed by \"{changes}\""));
    let mut text = style.format_paragraph(
        &format!(
            "{}{what_if}: {} and {} CPU{}, Linux {}. When it was scanned, merging could free {} of {}. The next {} by a model \
             of ksmd, {}.",
            report.host,
            format_bytes(report.memory_bytes),
            report.cpus,
            if report.cpus == 1 { "" } else { "s" },
            report.kernel,
            format_bytes(report.redundant_bytes),
            count_processes(report.processes),
            format_seconds(report.seconds),
            match report.seeds.len() {
                1 => "one seed".to_owned(),
                seeds => format!("means of {seeds} seeds"),
            },
        ),
        0,
    );
    text.push('\n');
    text += &expected_table(report, style);
    text += &style.format_heading("Expected savings over time");
    text += &time_table(report, style);
    text += &style.format_heading("Range over the seeds, and if any page may be written");
    text += &range_table(report, style);
    text.push('\n');
    let cpus = report.policies.iter().map(|policy| (&*policy.policy, policy.pagefold_cores.expected));
    text += &style.format_paragraph(&describe_cpus(cpus), 0);
    text += &style.format_heading("Not known, or assumed");
    for assumption in &report.assumptions {
        text += &style.format_paragraph(&format!("- {assumption}"), 2);
    }
    text
}

fn expected_table(report: &SimPredictReport, style: TextStyle) -> String {
    let mut table = style.new_table(&[&SAVINGS_HEADINGS[..], &[">memory missing"]].concat());
    for policy in &report.policies {
        let mut row = vec![
            policy.policy.clone(),
            policy.saved.last().map_or_else(String::new, |saved| format_signed_bytes(saved.saved_bytes.expected)),
            format_gib_hours(policy.saved_gib_hours.expected),
            format!("{:.3}", policy.cores.expected),
        ];
        row.extend(
            policy
                .times
                .iter()
                .map(|time| time.seconds.map_or_else(|| "-".to_owned(), |seconds| format_seconds(seconds.expected))),
        );
        row.push(format_signed_bytes(policy.missing_bytes.expected));
        table.add_row(row);
    }
    style.render_table(&table)
}

fn time_table(report: &SimPredictReport, style: TextStyle) -> String {
    let shown = |policy: usize| report.policies[policy].saved.iter().skip(SHOWN_STEP - 1).step_by(SHOWN_STEP);
    let mut headings = vec!["policy".to_owned()];
    if !report.policies.is_empty() {
        headings.extend(shown(0).map(|saved| format!(">{}", format_seconds(saved.seconds))));
    }
    let mut table = style.new_table(&headings.iter().map(String::as_str).collect::<Vec<_>>());
    for (number, policy) in report.policies.iter().enumerate() {
        let saved = shown(number).map(|saved| format_signed_bytes(saved.saved_bytes.expected));
        table.add_row(std::iter::once(policy.policy.clone()).chain(saved));
    }
    style.render_table(&table)
}

fn range_table(report: &SimPredictReport, style: TextStyle) -> String {
    let mut table = style.new_table(&RANGE_HEADINGS);
    for policy in &report.policies {
        table.add_row([
            policy.policy.clone(),
            policy.saved.last().map_or_else(String::new, |saved| show_range(&saved.saved_bytes, format_signed_bytes)),
            show_range(&policy.saved_gib_hours, format_gib_hours),
            show_range(&policy.cores, |cores| format!("{cores:.3}")),
            policy.times.get(SHARE_OF_90_PERCENT).map_or_else(String::new, show_times),
            show_range(&policy.cow_breaks, |breaks| format_number(breaks.round().max(0.0) as u64)),
        ]);
    }
    style.render_table(&table)
}

/// The range of a time, and in how many runs it is reached unless in all.
fn show_times(time: &PredictedTimeReport) -> String {
    let Some(seconds) = &time.seconds else { return "-".to_owned() };
    let range = show_range(seconds, format_seconds);
    if time.reached_runs < time.runs { format!("{range}, {} of {} runs", time.reached_runs, time.runs) } else { range }
}

/// The least and the largest value, or the one that both are.
fn show_range(range: &PredictionReport, format: impl Fn(f64) -> String) -> String {
    let [least, most] = [range.least, range.most].map(&format);
    if least == most { least } else { format!("{least} to {most}") }
}
