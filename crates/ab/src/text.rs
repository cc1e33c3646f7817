//! What a person sees of a campaign on the terminal.

pub mod study;

use crate::wire::unrestored::{UnrestoredChange, UnrestoredChanges};
use crate::wire::{AbReport, ControlReport, EffectEstimateReport, EffectVerdictName, InjectionReport, MetricReport};
use pagefold_output::text::{TextStyle, escape_unprintable};
use std::fmt::Write;

/// The width of a picture in characters.
const PICTURE_WIDTH: usize = 61;

/// A smallest detectable effect in percent that comes from rounding only: all blocks have the same ratio.
const NO_NOISE_PERCENT: f64 = 1e-9;

/// Renders the report.
#[must_use]
pub fn render(report: &AbReport, style: TextStyle) -> String {
    let result = &report.result;
    let mut text = String::new();
    let name = if result.experiment.name.is_empty() { "Experiment" } else { &result.experiment.name };
    let _ = writeln!(text, "{}", style.format_heading(&escape_unprintable(name)));
    for (path, [a, b]) in &result.settings {
        let _ = writeln!(text, "  /{path}: {a} under A, {b} under B");
    }
    let looks: Vec<String> = result.looks.iter().map(|look| look.blocks.to_string()).collect();
    let _ = writeln!(
        text,
        "  {} of {} comparison blocks{}; {} of all blocks flagged as noisy",
        result.comparison_blocks,
        looks.last().map_or("0", String::as_str),
        if looks.len() > 1 { format!(", looks at {}", looks.join(", ")) } else { String::new() },
        report.environment.iter().filter(|block| !block.flags.is_empty()).count()
    );
    if !report.busy_at_start.is_empty() {
        let _ = writeln!(text, "  {}", describe_busy_start(&report.busy_at_start));
    }
    if !result.complete {
        let _ = writeln!(text, "  The campaign is not complete: `pagefold ab resume` continues it.");
    }
    if let Some(why) = &result.why_not_analyzed {
        let _ = writeln!(text, "\nNot analyzed: {why}");
    }
    if let Some(counter) = &result.counter {
        let moved = if counter.has_moved { "moved" } else { "did not move: the setting was not applied" };
        let _ = writeln!(
            text,
            "  {} {moved}: {:.1} in a run under A, {:.1} under B",
            counter.counter, counter.change_in_a, counter.change_in_b
        );
    }
    for line in describe_injections(report) {
        let _ = writeln!(text, "  {line}");
    }
    for metric in &result.metrics {
        let _ = write!(text, "\n{}", render_metric(metric, report, style));
    }
    text.push_str(&render_unrestored(&report.unrestored));
    text
}

/// What is not undone, with the reasons and the remedies; empty if everything is.
#[must_use]
pub fn render_unrestored(unrestored: &UnrestoredChanges) -> String {
    let mut text = String::new();
    for (heading, changes) in list_unrestored(unrestored) {
        let _ = writeln!(text, "\n{heading}:");
        for change in changes {
            let _ = writeln!(text, "  {}", escape_unprintable(&describe_unrestored(change)));
        }
    }
    text
}

/// The kinds of changes that are not undone, with a heading each; kinds without changes are left out.
pub fn list_unrestored(unrestored: &UnrestoredChanges) -> impl Iterator<Item = (&'static str, &Vec<UnrestoredChange>)> {
    let kinds = [
        ("Not restored", &unrestored.failed_undos),
        ("Left as another program has written it", &unrestored.overwritten_changes),
    ];
    kinds.into_iter().filter(|(_, changes)| !changes.is_empty())
}

/// A change that is not undone, in words.
#[must_use]
pub fn describe_unrestored(change: &UnrestoredChange) -> String {
    format!("{}: {}; {}", change.previous_state, change.why, change.remedy)
}

fn render_metric(metric: &MetricReport, report: &AbReport, style: TextStyle) -> String {
    let mut text = String::new();
    let _ =
        writeln!(text, "{}", style.format_heading(&format!("{}: {}", metric.name, describe_verdict(metric, report))));
    let mut table =
        style.new_table(&["blocks", "number", "B to A", "interval", "p", "smallest effect detected", "found"]);
    let row = |name: String, estimate: &EffectEstimateReport, found: String| {
        vec![
            name,
            estimate.blocks.to_string(),
            format_percent(estimate.ratio),
            format_interval(estimate),
            format!("{:.4}", estimate.p_value),
            describe_smallest_effect(estimate),
            found,
        ]
    };
    table.add_row(row("A against B".to_owned(), &metric.comparison, String::new()));
    if let Some(other) = report.other_choice_of_noisy_blocks.get(&metric.name) {
        let name =
            if report.result.experiment.exclude_noisy_blocks { "with noisy blocks" } else { "without noisy blocks" };
        table.add_row(row(name.to_owned(), other, String::new()));
    }
    for control in metric.same_arm.iter().chain(&metric.injected) {
        table.add_row(row(describe_control(control), &control.estimate, describe_found(control).to_owned()));
    }
    text.push_str(&style.render_table(&table));
    text.push('\n');
    if let Some(failure) = describe_failed_injection(metric) {
        let _ = writeln!(text, "  {failure}\n");
    }
    text.push_str(&picture(metric));
    text
}

/// What the injection of slow-downs achieved.
#[must_use]
pub fn describe_injections(report: &AbReport) -> Vec<String> {
    if report.result.experiment.workload.is_empty() {
        return vec!["no slow-down was injected: the host is observed, and there is no workload to stop".to_owned()];
    }
    let describe = |injection: &InjectionReport| {
        format!(
            "slowed by {} %: the commands were stopped for {:.2} % of their running time",
            injection.slowdown_percent, injection.stopped_percent
        )
    };
    report.injections.iter().map(describe).collect()
}

/// The smallest effect that is detected with 80 % probability.
#[must_use]
pub fn describe_smallest_effect(estimate: &EffectEstimateReport) -> String {
    match estimate.smallest_detectable_percent {
        Some(percent) if percent > NO_NOISE_PERCENT => format!("{percent:.2} %"),
        Some(_) => "unknown".to_owned(),
        None => "none can be found".to_owned(),
    }
}

/// The name of a control.
#[must_use]
pub fn describe_control(control: &ControlReport) -> String {
    match control.slowdown_percent {
        0 => "A against A".to_owned(),
        percent => format!("A slowed by {percent} %"),
    }
}

/// Whether a control was found, in words.
#[must_use]
pub fn describe_found(control: &ControlReport) -> &'static str {
    let is_too_few = control.estimate.smallest_detectable_percent.is_none();
    match (control.slowdown_percent, control.is_found) {
        (0, true) => "a false difference",
        (0, false) if !control.is_ratio_in_interval => "the host differs from itself",
        (0, false) if !is_too_few => "no difference, as it must be",
        (1.., _) if !control.acted_as_intended => "not as intended",
        (_, true) => "yes",
        (_, false) if is_too_few => "too few blocks to tell",
        (_, false) => "no",
    }
}

/// Which injected slow-downs did not act as intended on a metric, and what follows.
#[must_use]
pub fn describe_failed_injection(metric: &MetricReport) -> Option<String> {
    let describe = |control: &ControlReport| {
        format!(
            "{} % ({} instead of {})",
            control.slowdown_percent,
            format_interval(&control.estimate),
            format_percent(control.true_ratio)
        )
    };
    let failed: Vec<String> =
        metric.injected.iter().filter(|control| !control.acted_as_intended).map(describe).collect();
    (!failed.is_empty()).then(|| {
        format!(
            "The injected slow-down of {} did not act as intended on this metric and host, so the campaign does not say \
             which effects it can find.",
            failed.join(" and of ")
        )
    })
}

/// What made the host busy when the campaign began.
#[must_use]
pub fn describe_busy_start(readings: &[String]) -> String {
    format!(
        "The host was busy when the campaign began: {}. Blocks are compared with that, so a load that stays is not flagged \
         as noise.",
        readings.join("; ")
    )
}

/// The verdict on a metric as a sentence.
#[must_use]
pub fn describe_verdict(metric: &MetricReport, report: &AbReport) -> String {
    let change = format_percent(metric.comparison.ratio);
    match metric.verdict {
        EffectVerdictName::Better => format!("B is better ({change}, {})", format_interval(&metric.comparison)),
        EffectVerdictName::Worse => format!("B is worse ({change}, {})", format_interval(&metric.comparison)),
        EffectVerdictName::Equivalent => {
            format!("no effect larger than {} %", report.result.experiment.equivalence_percent)
        }
        EffectVerdictName::Inconclusive if metric.is_difference_reached_by_same_arm => format!(
            "inconclusive; B to A is {change} ({}), and A against A {}",
            format_interval(&metric.comparison),
            metric.same_arm.as_ref().map_or(String::new(), |control| format!(
                "differs by as much ({}, {})",
                format_percent(control.estimate.ratio),
                format_interval(&control.estimate)
            ))
        ),
        EffectVerdictName::Inconclusive => match metric.comparison.smallest_detectable_percent {
            Some(percent) if percent > NO_NOISE_PERCENT => {
                format!("inconclusive; an effect of {percent:.2} % would have been detected with 80 % probability")
            }
            Some(_) => "inconclusive; all blocks have the same ratio, so the noise is not known".to_owned(),
            None => {
                format!("inconclusive; {} blocks are too few to show an effect of any size", metric.comparison.blocks)
            }
        },
        EffectVerdictName::NotApplied => "not applied: the proof counter did not move".to_owned(),
    }
}

fn format_percent(ratio: f64) -> String {
    format!("{:+.2} %", (ratio - 1.0) * 100.0)
}

fn format_interval(estimate: &EffectEstimateReport) -> String {
    match estimate.interval {
        [Some(low), Some(high)] => format!("{} to {}", format_percent(low), format_percent(high)),
        _ => "unknown".to_owned(),
    }
}

/// The ratio of each comparison block as a mark, with the interval below.
fn picture(metric: &MetricReport) -> String {
    let estimate = &metric.comparison;
    let [Some(low), Some(high)] = estimate.interval else { return String::new() };
    let values = || estimate.block_ratios.iter().copied().chain([low, high, 1.0]);
    let (min, max) = (values().fold(f64::INFINITY, f64::min), values().fold(0.0, f64::max));
    let column = |ratio: f64| ((ratio - min) / (max - min).max(1e-9) * (PICTURE_WIDTH - 1) as f64).round() as usize;
    let mut text = String::new();
    for (number, &ratio) in estimate.block_ratios.iter().enumerate() {
        let mut line = vec![' '; PICTURE_WIDTH];
        line[column(1.0)] = '|';
        line[column(ratio)] = 'o';
        let _ =
            writeln!(text, "  {:>8}  {}", format!("block {}", number + 1), line.iter().collect::<String>().trim_end());
    }
    let mut line = vec![' '; PICTURE_WIDTH];
    line[column(1.0)] = '|';
    line[column(low)..=column(high)].fill('=');
    line[column(estimate.ratio)] = 'O';
    let _ = writeln!(text, "  interval  {}", line.iter().collect::<String>().trim_end());
    let _ = writeln!(text, "            from {} to {}; | is no difference", format_percent(min), format_percent(max));
    text
}
