//! Chart of a program: savings over time under each policy, of ksmd and of the model.

use super::{CurvePoint, POLICIES, PredictionTrial};
use crate::chart::{self, GRAY, text_style};
use anyhow::{Result, anyhow};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::path::Path;

const CHART_PIXELS: (u32, u32) = (960, 480);
/// The first second of the logarithmic axis.
const FIRST_SECOND: f64 = 0.5;

fn policy_color(policy: &str) -> RGBColor {
    match policy {
        "default" => chart::OCHRE,
        "advisor:20" => chart::BLUE,
        "whole:2000/20" => chart::PINK,
        _ => chart::VERMILION,
    }
}

/// Draw the first round.
pub fn draw_chart(title: &str, trials: &[PredictionTrial], path: &Path) -> Result<()> {
    let trials: Vec<&PredictionTrial> = trials.iter().filter(|trial| trial.round == 1).collect();
    paint_chart(title, &trials, path).map_err(|error| anyhow!("cannot draw: {error}"))
}

fn paint_chart(title: &str, trials: &[&PredictionTrial], path: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let mib = pagefold_sys::mapping::page_size() as f64 / f64::from(1 << 20);
    let points = || trials.iter().flat_map(|trial| trial.measured.iter().chain(&trial.modeled));
    let latest = points().map(|point| point.seconds).fold(10.0, f64::max);
    let highest = points().map(|point| point.saved_pages * mib).fold(1.0, f64::max) * 1.08;
    let area = SVGBackend::new(path, CHART_PIXELS).into_drawing_area();
    let mut chart = ChartBuilder::on(&area)
        .caption(title, text_style(17, GRAY))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d((FIRST_SECOND..latest).log_scale(), 0.0..highest)?;
    chart::configure_axes(&mut chart)
        .x_desc("seconds (logarithmic; lines: ksmd; dashed: forecast)")
        .y_desc("saved, MiB")
        .x_label_formatter(&|x| format!("{x}"))
        .draw()?;
    let within = |curve: &[CurvePoint]| {
        let drawn = curve.iter().filter(|point| point.seconds >= FIRST_SECOND);
        drawn.map(|point| (point.seconds, point.saved_pages.max(0.0) * mib)).collect::<Vec<_>>()
    };
    for trial in trials {
        let color = policy_color(trial.policy);
        chart.draw_series(LineSeries::new(within(&trial.measured), color.stroke_width(3)))?;
        chart.draw_series(DashedLineSeries::new(within(&trial.modeled), 7, 6, GRAY.stroke_width(2)))?;
    }
    // Labels stand left of their curves, each at a height of its own.
    for (number, (policy, _)) in (0_u32..).zip(POLICIES) {
        let Some(trial) = trials.iter().find(|trial| trial.policy == policy) else { continue };
        let height = highest * (0.25 + 0.14 * f64::from(number));
        let crossed = trial.measured.iter().find(|point| point.saved_pages * mib >= height);
        let seconds = crossed.map_or(latest, |point| point.seconds).max(FIRST_SECOND);
        let style = text_style(15, policy_color(policy)).pos(Pos::new(HPos::Right, VPos::Center));
        chart.draw_series([Text::new(policy, (seconds / 1.06, height), style)])?;
    }
    area.present()?;
    Ok(())
}
