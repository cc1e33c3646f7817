//! Chart of guests that come and go: savings over time, and below them the CPU time used.

use super::churn::{ChurnRun, ChurnSample};
use super::driver::KsmDriverKind;
use crate::chart::{self, text_style};
use crate::merge::policies::MergePolicy;
use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::path::Path;

const CHART_PIXELS: (u32, u32) = (960, 640);

fn driver_color(way: KsmDriverKind) -> RGBColor {
    match way {
        KsmDriverKind::Policy(MergePolicy::Ksmtuned) => chart::PINK,
        KsmDriverKind::Policy(MergePolicy::Whole) => chart::VERMILION,
        KsmDriverKind::Policy(_) => chart::OCHRE,
        KsmDriverKind::Daemon => chart::GREEN,
    }
}

/// Draw the chart.
pub fn draw_chart(title: &str, runs: &[ChurnRun], path: &Path) -> Result<()> {
    let mib = pagefold_sys::mapping::page_size() as f64 / f64::from(1 << 20);
    let paint = || -> Result<(), Box<dyn std::error::Error>> {
        let area = SVGBackend::new(path, CHART_PIXELS).into_drawing_area();
        let (upper, lower) = area.split_vertically(CHART_PIXELS.1 * 3 / 5);
        draw_panel(&upper, title, "saved, MiB", runs, |sample| sample.saved_pages as f64 * mib)?;
        draw_panel(&lower, "", "CPU seconds so far", runs, |sample| sample.cpu.total())?;
        area.present()?;
        Ok(())
    };
    paint().map_err(|error| anyhow!("cannot draw: {error}"))
}

fn draw_panel(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    title: &str,
    y_label: &str,
    runs: &[ChurnRun],
    value: impl Fn(&ChurnSample) -> f64,
) -> Result<(), Box<dyn std::error::Error>> {
    let samples = || runs.iter().flat_map(|run| &run.samples);
    let latest = samples().map(|sample| sample.seconds).fold(10.0, f64::max);
    let highest = samples().map(&value).fold(1.0, f64::max) * 1.1;
    let mut builder = ChartBuilder::on(area);
    if !title.is_empty() {
        builder.caption(title, text_style(17, chart::GRAY));
    }
    let mut chart = builder
        .margin(12)
        .margin_right(170)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..latest, 0.0..highest)?;
    chart::configure_axes(&mut chart).x_desc("seconds").y_desc(y_label).draw()?;
    // Labels stand at the ends of their curves, each at a height of its own.
    let mut ends: Vec<(f64, &ChurnRun)> =
        runs.iter().filter_map(|run| Some((value(run.samples.last()?), run))).collect();
    ends.sort_by(|one, other| one.0.total_cmp(&other.0));
    let mut lowest = 0.0;
    for (end, run) in ends {
        let color = driver_color(run.driver_kind);
        let points = run.samples.iter().map(|sample| (sample.seconds, value(sample)));
        chart.draw_series(LineSeries::new(points, color.stroke_width(2)))?;
        let height = f64::max(end, lowest);
        lowest = height + highest / 14.0;
        let style = text_style(14, color).pos(Pos::new(HPos::Left, VPos::Center));
        let at = chart.backend_coord(&(latest, height));
        let origin = area.get_base_pixel();
        area.draw_text(run.driver_kind.name(), &style, (at.0 - origin.0 + 6, at.1 - origin.1))?;
    }
    Ok(())
}
