//! What a person sees of a variance study on the terminal.

use crate::text::render_unrestored;
use crate::wire::study::{MetricStudyReport, PlannedEffectReport, RepetitionPlanReport, StudyReport};
use pagefold_output::text::{TextStyle, escape_unprintable};
use std::fmt::Write;
use std::time::Duration;

/// Renders the report. `directory` is the study's, for the command that continues it.
#[must_use]
pub fn render(report: &StudyReport, directory: &str, style: TextStyle) -> String {
    let name = if report.experiment.name.is_empty() { "Variance study" } else { &report.experiment.name };
    let mut text = format!("{}\n", style.format_heading(&escape_unprintable(name)));
    let _ = writeln!(
        text,
        "  {} of {} blocks, {} runs of {}{}; {} blocks flagged as noisy",
        report.blocks,
        report.experiment.blocks,
        report.runs,
        format_seconds(report.run_seconds),
        report.restart_seconds.map_or(String::new(), |seconds| format!(", restarts of {}", format_seconds(seconds))),
        report.noisy_blocks,
    );
    if !report.complete {
        let _ = writeln!(
            text,
            "  The study is not complete: `pagefold ab resume {}` continues it.",
            escape_unprintable(directory)
        );
    }
    if report.blocks < 2 {
        let _ = writeln!(text, "\nNot analyzed: a study needs at least two completed blocks.");
    }
    for metric in &report.metrics {
        let _ = write!(text, "\n{}", render_metric(metric, report, style));
    }
    text.push_str(&render_unrestored(&report.unrestored));
    text
}

fn render_metric(metric: &MetricStudyReport, report: &StudyReport, style: TextStyle) -> String {
    let (has_restarts, metric_count) = (report.restart_seconds.is_some(), report.experiment.metric.len());
    let heading = format!("{}: {} on average", metric.name, format_mean(metric.mean));
    let mut text = format!("{}\n", style.format_heading(&escape_unprintable(&heading)));
    let mut table = style.new_table(&["level", "standard deviation that it adds"]);
    let blocks = if has_restarts { "restarts" } else { "blocks" };
    table.add_row(vec![blocks.to_owned(), format!("{:.2} %", metric.between_blocks_percent)]);
    table.add_row(vec!["runs".to_owned(), format!("{:.2} %", metric.between_runs_percent)]);
    if metric.between_samples_percent > 0.0 {
        table.add_row(vec!["samples".to_owned(), format!("{:.2} %", metric.between_samples_percent)]);
    }
    let _ = writeln!(text, "{table}\n");
    let effect_seen = metric.plans.first().map_or(0, |plan| plan.reference_blocks);
    let effect_seen = format!("effect seen in {effect_seen} blocks");
    let mut table = style.new_table(&[
        "a change that",
        "pairs in a block",
        "ratio of a block varies by",
        &effect_seen,
        "5 %",
        "2 %",
        "1 %",
    ]);
    for plan in &metric.plans {
        let mut row = vec![
            if plan.restarts_each_run { "needs a restart" } else { "needs no restart" }.to_owned(),
            plan.pairs_per_block.to_string(),
            format!("{:.2} %", plan.block_ratio_percent),
            format!("{:.2} %", plan.smallest_effect_percent),
        ];
        row.extend(plan.effects.iter().map(describe_effect));
        table.add_row(row);
    }
    let _ = writeln!(text, "{table}");
    let warm_up = match (metric.warm_up_runs, metric.warm_up_samples) {
        (0, 0) => "no warm-up was found".to_owned(),
        (runs, samples) => format!("warm-up: {runs} runs of a block, {samples} samples of a run"),
    };
    let advice = metric.plans.first().map_or(String::new(), |plan| advise(plan, metric));
    let several = match metric_count {
        1 => String::new(),
        count => format!(", at the level corrected for {count} metrics"),
    };
    let paragraph = format!(
        "An effect is seen if a campaign detects it with 80 % probability{several}. The last columns are the blocks that detect a \
         slow-down of 5, 2 and 1 %, and the time of a campaign with as many blocks of each control; {warm_up}. {advice}"
    );
    let _ = writeln!(text, "\n{}", style.format_paragraph(&paragraph, 0));
    text
}

/// The options of a campaign that detects a slow-down of 2 %.
fn advise(plan: &RepetitionPlanReport, metric: &MetricStudyReport) -> String {
    let blocks = plan.effects.iter().find(|effect| effect.effect_percent == 2.0).and_then(|effect| effect.blocks);
    let Some(blocks) = blocks else { return "It varies too much for a comparison.".to_owned() };
    let samples = match metric.warm_up_samples {
        0 => String::new(),
        samples => format!(" --warm-up-samples {samples}"),
    };
    format!(
        "For 2 % without restarts: --blocks {blocks} --pairs {} --warm-up {}{samples}",
        plan.pairs_per_block, metric.warm_up_runs
    )
}

fn describe_effect(effect: &PlannedEffectReport) -> String {
    match (effect.blocks, effect.campaign_seconds) {
        (Some(blocks), Some(seconds)) => format!("{blocks} in {}", format_seconds(seconds)),
        _ => "never".to_owned(),
    }
}

fn format_mean(mean: f64) -> String {
    if (0.01..1e6).contains(&mean) { format!("{mean:.4}") } else { format!("{mean:.3e}") }
}

/// A time with a precision of about three digits.
fn format_seconds(seconds: f64) -> String {
    let unit = match seconds {
        seconds if seconds < 1.0 => 1e-3,
        seconds if seconds < 10.0 => 0.01,
        _ => 1.0,
    };
    let rounded = (seconds.clamp(0.0, 1e12) / unit).round() * unit;
    humantime::format_duration(Duration::from_micros((rounded * 1e6).round() as u64)).to_string()
}
