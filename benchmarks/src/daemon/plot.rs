//! Machines that come and go, as a picture: what is saved over time, and below it what that has cost.

use super::churn::{Run, Sample};
use super::driver::Way;
use crate::chart::{self, letters};
use crate::merge::policies::Policy;
use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::path::Path;

const SIZE: (u32, u32) = (960, 640);

fn colour(way: Way) -> RGBColor {
    match way {
        Way::Policy(Policy::Ksmtuned) => chart::PINK,
        Way::Policy(Policy::Whole) => chart::VERMILION,
        Way::Policy(_) => chart::OCHRE,
        Way::Daemon => chart::GREEN,
    }
}

/// Draw it.
pub fn draw(title: &str, runs: &[Run], path: &Path) -> Result<()> {
    let mib = pagefold_sys::mapping::page_size() as f64 / f64::from(1 << 20);
    let paint = || -> Result<(), Box<dyn std::error::Error>> {
        let area = SVGBackend::new(path, SIZE).into_drawing_area();
        let (upper, lower) = area.split_vertically(SIZE.1 * 3 / 5);
        panel(&upper, title, "saved, MiB", runs, |sample| sample.saved as f64 * mib)?;
        panel(&lower, "", "CPU seconds so far", runs, |sample| sample.cpu.all())?;
        area.present()?;
        Ok(())
    };
    paint().map_err(|error| anyhow!("cannot draw: {error}"))
}

fn panel(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    title: &str,
    y: &str,
    runs: &[Run],
    value: impl Fn(&Sample) -> f64,
) -> Result<(), Box<dyn std::error::Error>> {
    let samples = || runs.iter().flat_map(|run| &run.samples);
    let latest = samples().map(|sample| sample.seconds).fold(10.0, f64::max);
    let highest = samples().map(&value).fold(1.0, f64::max) * 1.1;
    let mut builder = ChartBuilder::on(area);
    if !title.is_empty() {
        builder.caption(title, letters(17, chart::GREY));
    }
    let mut chart = builder
        .margin(12)
        .margin_right(170)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..latest, 0.0..highest)?;
    chart::axes(&mut chart).x_desc("seconds").y_desc(y).draw()?;
    // Names stand where their curves end, each at a height of its own.
    let mut ends: Vec<(f64, &Run)> = runs.iter().filter_map(|run| Some((value(run.samples.last()?), run))).collect();
    ends.sort_by(|one, other| one.0.total_cmp(&other.0));
    let mut lowest = 0.0;
    for (end, run) in ends {
        let colour = colour(run.way);
        let points = run.samples.iter().map(|sample| (sample.seconds, value(sample)));
        chart.draw_series(LineSeries::new(points, colour.stroke_width(2)))?;
        let height = f64::max(end, lowest);
        lowest = height + highest / 14.0;
        let style = letters(14, colour).pos(Pos::new(HPos::Left, VPos::Center));
        let at = chart.backend_coord(&(latest, height));
        let origin = area.get_base_pixel();
        area.draw_text(run.way.name(), &style, (at.0 - origin.0 + 6, at.1 - origin.1))?;
    }
    Ok(())
}
