//! The results of `pagefold sim` as text.

pub mod comparison;
pub mod tuning;

use crate::wire::{CalibrationScanReport, ErrorReport, SimCalibrationReport};
use pagefold_output::text::{TextStyle, format_number};

/// The costs, each scan beside the model, and how far the model is off.
pub fn render_calibration(report: &SimCalibrationReport, style: TextStyle) -> String {
    let mut text = style.format_paragraph(
        &format!(
            "Costs of ksmd on this machine, Linux {}: {} scans of processes with {} pages.",
            report.kernel,
            report.scans.len(),
            format_number(report.pages)
        ),
        0,
    );
    text.push('\n');
    let mut table = style.new_table(&["operation", ">CPU time, ns"]);
    for cost in &report.costs {
        table.add_row([cost.operation.to_owned(), format!("{:.0}", cost.nanoseconds)]);
    }
    text += &style.render_table(&table);
    text += &style.format_heading("Scans, the median of the rounds");
    let mut table =
        style.new_table(&["scenario", ">scan", ">ksmd, ms", ">model, ms", ">error", ">merged pages", ">by the model"]);
    let first_round = report.scans.iter().filter(|scan| scan.round == 1);
    for first in first_round {
        let of_rounds: Vec<&CalibrationScanReport> =
            report.scans.iter().filter(|scan| (scan.scenario, scan.scan) == (first.scenario, first.scan)).collect();
        let name = if first.scan > 1 { "" } else { first.scenario };
        table.add_row([
            if first.held_out && first.scan == 1 { format!("{name} (not fitted)") } else { name.to_owned() },
            first.scan.to_string(),
            format!("{:.2}", median(of_rounds.iter().map(|scan| scan.cpu_ms))),
            format!("{:.2}", median(of_rounds.iter().map(|scan| scan.modeled_cpu_ms))),
            format!("{:+.0} %", 100.0 * median(of_rounds.iter().map(|scan| scan.relative_error))),
            format_number(first.merged_pages),
            format_number(first.modeled_merged_pages),
        ]);
    }
    text += &style.render_table(&table);
    let describe = |errors: &ErrorReport| {
        format!(
            "{:.0} % off at the median and {:.0} % at worst of {} scans",
            100.0 * errors.median_error,
            100.0 * errors.worst_error,
            errors.scans
        )
    };
    text.push('\n');
    text + &style.format_paragraph(
        &format!(
            "The model is {} to which it was fitted, and {} to which it was not.",
            describe(&report.fitted),
            describe(&report.held_out)
        ),
        0,
    )
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
