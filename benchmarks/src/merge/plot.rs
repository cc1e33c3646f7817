//! Chart of savings over time: a labeled curve for each policy.

use super::compare::PolicyComparison;
use super::policies::MergePolicy;
use crate::chart::{self, GRAY, text_style};
use anyhow::{Result, anyhow};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::path::Path;

const CHART_PIXELS: (u32, u32) = (960, 480);
const BYTES_PER_MIB: f64 = (1 << 20) as f64;

fn policy_color(policy: MergePolicy) -> RGBColor {
    match policy {
        MergePolicy::Default => chart::LIGHT_GRAY,
        MergePolicy::Ksmtuned => chart::PINK,
        MergePolicy::Advisor200 => chart::OCHRE,
        MergePolicy::Advisor20 => chart::BLUE,
        MergePolicy::Whole => chart::VERMILION,
        MergePolicy::Guided => chart::GREEN,
    }
}

struct SavingsCurve {
    policy: MergePolicy,
    measured: Vec<(f64, f64)>,
    extrapolated: Vec<(f64, f64)>,
}

impl SavingsCurve {
    fn from_comparison(comparison: &PolicyComparison, policy: MergePolicy) -> Option<Self> {
        let trial = comparison.trials_of(policy).next()?;
        let page = pagefold_sys::mapping::page_size() as f64;
        let measured: Vec<(f64, f64)> = trial
            .samples
            .iter()
            .map(|sample| (sample.seconds, sample.saved_pages as f64 * page / BYTES_PER_MIB))
            .collect();
        let last = *measured.last()?;
        let shares = (1..100).map(|percent| f64::from(percent) / 100.0);
        let later = shares.filter_map(|share| {
            let at = comparison.milestone(trial, share)?;
            (!at.is_measured && at.seconds > last.0)
                .then(|| (at.seconds, share * comparison.reachable_bytes() / BYTES_PER_MIB))
        });
        let mut extrapolated: Vec<(f64, f64)> = std::iter::once(last).chain(later).collect();
        if extrapolated.len() == 1 {
            extrapolated.clear();
        }
        Some(Self { policy, measured, extrapolated })
    }

    fn points(&self) -> impl Iterator<Item = (f64, f64)> {
        self.measured.iter().chain(&self.extrapolated).copied()
    }

    /// When the curve reaches a height.
    fn crossing_time(&self, height: f64) -> Option<f64> {
        self.points().find(|&(_, y)| y >= height).map(|(x, _)| x)
    }
}

/// Draw the chart.
pub fn draw_chart(comparison: &PolicyComparison, path: &Path) -> Result<()> {
    let curves: Vec<SavingsCurve> = MergePolicy::SLOW_FIRST
        .into_iter()
        .filter_map(|policy| SavingsCurve::from_comparison(comparison, policy))
        .collect();
    let latest = curves.iter().flat_map(SavingsCurve::points).map(|(x, _)| x).fold(10.0, f64::max);
    let highest = curves
        .iter()
        .flat_map(SavingsCurve::points)
        .map(|(_, y)| y)
        .fold(comparison.reachable_bytes() / BYTES_PER_MIB, f64::max);
    paint_chart(comparison, &curves, latest * 1.3, highest * 1.06, path)
        .map_err(|error| anyhow!("cannot draw: {error}"))
}

fn paint_chart(
    comparison: &PolicyComparison,
    curves: &[SavingsCurve],
    max_seconds: f64,
    max_bytes: f64,
    path: &Path,
) -> Result<(), Box<dyn std::error::Error>> {
    let area = SVGBackend::new(path, CHART_PIXELS).into_drawing_area();
    let first: f64 = 0.1;
    let mut chart = ChartBuilder::on(&area)
        .caption(&comparison.workload.title, text_style(17, GRAY))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d((first..max_seconds).log_scale(), 0.0..max_bytes)?;
    chart::configure_axes(&mut chart)
        .x_desc("seconds (logarithmic; dashed: extrapolated)")
        .y_desc("saved, MiB")
        .x_label_formatter(&|x| format!("{x}"))
        .y_label_formatter(&|y| format!("{}", (y * 10.0).round() / 10.0))
        .draw()?;
    let level = comparison.reachable_bytes() / BYTES_PER_MIB;
    chart.draw_series(DashedLineSeries::new([(first, level), (max_seconds, level)], 2, 4, GRAY.stroke_width(1)))?;
    let note =
        Text::new("can be saved", (first * 1.05, level), text_style(13, GRAY).pos(Pos::new(HPos::Left, VPos::Top)));
    chart.draw_series([note])?;
    let mut order: Vec<(f64, &SavingsCurve)> =
        curves.iter().map(|curve| (curve.crossing_time(level / 2.0).unwrap_or(f64::INFINITY), curve)).collect();
    order.sort_by(|left, right| left.0.total_cmp(&right.0));
    for (i, (_, curve)) in (0_u32..).zip(order) {
        let color = policy_color(curve.policy);
        let within = |points: &[(f64, f64)]| points.iter().map(|&(x, y)| (x.max(first), y)).collect::<Vec<_>>();
        chart.draw_series(LineSeries::new(within(&curve.measured), color.stroke_width(3)))?;
        chart.draw_series(DashedLineSeries::new(within(&curve.extrapolated), 6, 5, color.stroke_width(2)))?;
        // Each label has a height of its own, left of its curve, where the curve has not been yet.
        let height = level * (0.85 - 0.13 * f64::from(i));
        let crossing_seconds = curve.crossing_time(height).unwrap_or(max_seconds);
        let (x, side) = if crossing_seconds < 0.6 {
            (crossing_seconds.max(first) * 1.08, HPos::Left)
        } else {
            (crossing_seconds / 1.08, HPos::Right)
        };
        let style = text_style(15, color).pos(Pos::new(side, VPos::Center));
        chart.draw_series([Text::new(curve.policy.name(), (x, height), style)])?;
    }
    area.present()?;
    Ok(())
}
