//! Charts as SVG: inside the page, which has the style, or as a file with its own style. The reader's system selects
//! light or dark colors.

use super::chart::{Chart, ChartClock, ChartPoint, ChartScale, ChartSeries, SeriesColor, SeriesStyle};
use super::figures::FigureUnit;
use pagefold_output::text::escape_unprintable;
use std::fmt::Write;

/// The style of charts, for a page or a file.
pub const CHART_CSS: &str = include_str!("chart.css");

const CHART_WIDTH: f64 = 960.0;
const CHART_HEIGHT: f64 = 250.0;
const LEFT_MARGIN: f64 = 74.0;
const RIGHT_MARGIN: f64 = 12.0;
const BOTTOM_MARGIN: f64 = 26.0;
const LEGEND_ROW_HEIGHT: f64 = 20.0;

/// The approximate width of a character in the legend.
const CHARACTER_WIDTH: f64 = 6.6;

/// The maximum number of ticks of the time axis.
const MAX_TIME_TICKS: f64 = 7.0;

/// Escape text for markup.
pub fn escape_markup(text: &str) -> String {
    let mut escaped = String::new();
    for c in escape_unprintable(text).chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            c => escaped.push(c),
        }
    }
    escaped
}

/// A chart for a page.
pub fn render_inline(chart: &Chart) -> String {
    let (body, height) = render_chart_body(chart);
    format!(
        "<svg class=\"chart\" viewBox=\"0 0 {CHART_WIDTH} {height}\" role=\"img\" aria-label=\"{}\">\n{body}</svg>\n",
        escape_markup(&describe_chart(chart))
    )
}

/// A text description of a chart.
pub fn describe_chart(chart: &Chart) -> String {
    let highest = |series: &ChartSeries| all_points(series).map(|point| point.high).reduce(f64::max);
    let describe =
        |series: &ChartSeries| Some(format!("{}: maximum {}", series.name, tick_label(chart.scale, highest(series)?)));
    let named = chart.series.iter().filter(|series| !series.name.is_empty());
    let parts: Vec<String> = named.filter_map(describe).collect();
    let (from, to) = chart.span;
    let summary = if parts.is_empty() { "no data".to_owned() } else { parts.join("; ") };
    format!("{}, {} to {}: {summary}", chart.title, format_time(chart.clock, from), format_time(chart.clock, to))
}

/// A time as text.
pub fn format_time(clock: ChartClock, time: f64) -> String {
    match clock {
        ChartClock::Utc => format_utc(time),
        ChartClock::SinceBeginning => format_elapsed(time),
    }
}

/// A Unix time as `2026-11-22 10:15:20`, UTC.
pub fn format_utc(time: f64) -> String {
    // humantime supports years up to 9999.
    let time = std::time::Duration::from_secs_f64(time.clamp(0.0, 2.5e11).floor());
    let text = humantime::format_rfc3339_seconds(std::time::UNIX_EPOCH + time).to_string();
    text.trim_end_matches('Z').replace('T', " ")
}

fn format_elapsed(seconds: f64) -> String {
    match seconds.round() {
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{} min", format_rounded(s / 60.0)),
        s if s < 172_800.0 => format!("{} h", format_rounded(s / 3600.0)),
        s => format!("{} d", format_rounded(s / 86_400.0)),
    }
}

fn format_rounded(value: f64) -> String {
    format!("{}", (value * 10.0).round() / 10.0)
}

fn all_points(series: &ChartSeries) -> impl Iterator<Item = &ChartPoint> {
    series.segments.iter().flatten()
}

/// Maps values to coordinates.
struct PlotArea {
    span: (f64, f64),
    /// The lowest and highest value of the vertical axis.
    value_range: (f64, f64),
    logarithmic: bool,
    top: f64,
}

impl PlotArea {
    fn x(&self, time: f64) -> f64 {
        let length = (self.span.1 - self.span.0).max(1e-9);
        LEFT_MARGIN + (time - self.span.0) / length * (CHART_WIDTH - LEFT_MARGIN - RIGHT_MARGIN)
    }

    fn y(&self, value: f64) -> f64 {
        let measure = |value: f64| if self.logarithmic { value.max(1e-9).log10() } else { value };
        let (low, high) = (measure(self.value_range.0), measure(self.value_range.1));
        let share = ((measure(value) - low) / (high - low).max(1e-9)).clamp(0.0, 1.0);
        self.top + (1.0 - share) * (CHART_HEIGHT - BOTTOM_MARGIN - LEGEND_ROW_HEIGHT)
    }
}

/// The content of a chart, and its height.
fn render_chart_body(chart: &Chart) -> (String, f64) {
    let (legend, rows) = render_legend(&chart.series);
    let top = rows * LEGEND_ROW_HEIGHT + 6.0;
    let ticks = value_ticks(chart);
    let range = (ticks.first().copied().unwrap_or(0.0), ticks.last().copied().unwrap_or(1.0));
    let plot = PlotArea { span: chart.span, value_range: range, logarithmic: chart.scale == ChartScale::Seconds, top };
    let mut body = legend;
    for tick in ticks {
        let (y, text) = (plot.y(tick), tick_label(chart.scale, tick));
        let _ = writeln!(
            body,
            "<line class=\"grid\" x1=\"{LEFT_MARGIN}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>",
            CHART_WIDTH - RIGHT_MARGIN
        );
        let _ = writeln!(body, "<text class=\"end\" x=\"{:.1}\" y=\"{:.1}\">{text}</text>", LEFT_MARGIN - 8.0, y + 4.0);
    }
    let height = top + CHART_HEIGHT - LEGEND_ROW_HEIGHT;
    for (time, text) in time_ticks(chart) {
        let x = plot.x(time);
        // At the right edge half of the label would lie outside.
        let anchor = if x + 4.0 * CHARACTER_WIDTH > CHART_WIDTH { "end" } else { "middle" };
        let _ = writeln!(body, "<text class=\"{anchor}\" x=\"{x:.1}\" y=\"{:.1}\">{text}</text>", height - 8.0);
    }
    for series in &chart.series {
        body.push_str(&render_marks(series, &plot, chart));
    }
    if chart.series.is_empty() {
        let _ = writeln!(
            body,
            "<text class=\"middle\" x=\"{:.1}\" y=\"{:.1}\">no data</text>",
            CHART_WIDTH / 2.0,
            top + 90.0
        );
    }
    (body, height)
}

fn render_marks(series: &ChartSeries, plot: &PlotArea, chart: &Chart) -> String {
    let class = css_class(series.color);
    let mut marks = String::new();
    for segment in &series.segments {
        let path = path_data(segment.iter().map(|point| (plot.x(point.time), plot.y(point.high))));
        let _ = match series.mark {
            SeriesStyle::Dots => segment.iter().try_for_each(|point| {
                let (x, y) = (plot.x(point.time), plot.y(point.high));
                let title = format!(
                    "{}: {}",
                    format_time(chart.clock, point.time),
                    FigureUnit::Seconds.format_value(Some(point.high))
                );
                writeln!(
                    marks,
                    "<circle class=\"{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.2\"><title>{title}</title></circle>"
                )
            }),
            // A single point has no length, so it is drawn as a dot.
            SeriesStyle::Line | SeriesStyle::Limit if segment.len() == 1 => {
                let (x, y) = (plot.x(segment[0].time), plot.y(segment[0].high));
                writeln!(marks, "<circle class=\"{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"1.4\"/>")
            }
            SeriesStyle::Line => writeln!(marks, "<path class=\"{class} curve\" d=\"{path}\"/>"),
            SeriesStyle::Limit => writeln!(marks, "<path class=\"{class} curve limit\" d=\"{path}\"/>"),
            SeriesStyle::Band | SeriesStyle::PaleBand => {
                let lower_edge = segment.iter().rev().map(|point| (plot.x(point.time), plot.y(point.low)));
                let lower_edge = self::path_data(lower_edge).replacen('M', "L", 1);
                let pale = if series.mark == SeriesStyle::PaleBand { " pale" } else { "" };
                writeln!(marks, "<path class=\"{class} band{pale}\" d=\"{path}{lower_edge}Z\"/>")
            }
        };
    }
    marks
}

fn path_data(points: impl Iterator<Item = (f64, f64)>) -> String {
    let mut path = String::new();
    for (i, (x, y)) in points.enumerate() {
        let _ = write!(path, "{}{x:.1} {y:.1}", if i == 0 { 'M' } else { 'L' });
    }
    path
}

fn css_class(color: SeriesColor) -> String {
    match color {
        SeriesColor::Saved => "saved".to_owned(),
        SeriesColor::InUse => "used".to_owned(),
        SeriesColor::Ksmd => "ksmd".to_owned(),
        SeriesColor::Pagefold => "pagefold".to_owned(),
        SeriesColor::Bound => "bound".to_owned(),
        // Eight colors, and dashes for readers with a color vision deficiency.
        SeriesColor::Side(number) => format!("side{} dash{}", number % 8, number % 4),
    }
}

/// The legend, and its number of rows.
fn render_legend(series: &[ChartSeries]) -> (String, f64) {
    let (mut text, mut x, mut row) = (String::new(), LEFT_MARGIN, 0.0);
    for series in series.iter().filter(|series| !series.name.is_empty()) {
        let width = 34.0 + series.name.chars().count() as f64 * CHARACTER_WIDTH;
        if x > LEFT_MARGIN && x + width > CHART_WIDTH - RIGHT_MARGIN {
            (x, row) = (LEFT_MARGIN, row + 1.0);
        }
        let (class, y) = (css_class(series.color), row * LEGEND_ROW_HEIGHT + 12.0);
        let _ = match series.mark {
            SeriesStyle::Line => writeln!(text, "<path class=\"{class} curve\" d=\"M{x:.1} {:.1}h18\"/>", y - 4.0),
            SeriesStyle::Limit => {
                writeln!(text, "<path class=\"{class} curve limit\" d=\"M{x:.1} {:.1}h18\"/>", y - 4.0)
            }
            SeriesStyle::Dots => {
                writeln!(text, "<circle class=\"{class}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"3.2\"/>", x + 9.0, y - 4.0)
            }
            SeriesStyle::Band | SeriesStyle::PaleBand => {
                let pale = if series.mark == SeriesStyle::PaleBand { " pale" } else { "" };
                writeln!(text, "<path class=\"{class} band{pale}\" d=\"M{x:.1} {:.1}h18v11h-18z\"/>", y - 10.0)
            }
        };
        let _ = writeln!(text, "<text x=\"{:.1}\" y=\"{y:.1}\">{}</text>", x + 23.0, escape_markup(&series.name));
        x += width;
    }
    (text, row + 1.0)
}

/// The positions of the grid lines: round numbers from the lowest to above the highest value.
fn value_ticks(chart: &Chart) -> Vec<f64> {
    let values = || chart.series.iter().flat_map(all_points).map(|point| point.high);
    let max = values().fold(0.0, f64::max);
    if chart.scale == ChartScale::Seconds {
        let min = values().fold(max, f64::min);
        let (low, high) = (min.max(0.01).log10().floor() as i32, max.max(0.1).log10().ceil() as i32);
        return (low..=high.max(low + 1)).map(|power| 10_f64.powi(power)).collect();
    }
    let step = tick_step(max, chart.scale == ChartScale::Bytes);
    let steps_above = (max / step - 1e-9).ceil().max(1.0) as u32;
    let lowest = values().fold(0.0, f64::min);
    let steps_below = (-lowest / step - 1e-9).ceil().max(0.0) as i32;
    (-steps_below..=steps_above as i32).map(|n| f64::from(n) * step).collect()
}

/// The distance of grid lines for a range: a power of two for bytes, otherwise 1, 2 or 5 times a power of ten.
fn tick_step(max: f64, binary: bool) -> f64 {
    if max <= 0.0 {
        return 1.0;
    }
    if binary {
        return (max / 4.0).log2().ceil().exp2().max(1.0);
    }
    let rough = max / 3.0;
    let power = 10_f64.powf(rough.log10().floor());
    power * [1.0, 2.0, 5.0].into_iter().find(|n| n * power >= rough).unwrap_or(10.0)
}

fn tick_label(scale: ChartScale, value: f64) -> String {
    match scale {
        ChartScale::Bytes => FigureUnit::Bytes.format_value(Some(value)),
        ChartScale::Percent => format!("{} %", (value * 100.0).round() / 100.0),
        ChartScale::Seconds => format!("{} s", (value * 100.0).round() / 100.0),
    }
}

/// The ticks of the time axis with their labels.
fn time_ticks(chart: &Chart) -> Vec<(f64, String)> {
    const TIME_STEP_SECONDS: [f64; 15] = [
        1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 1800.0, 3600.0, 7200.0, 14_400.0, 21_600.0, 43_200.0, 86_400.0, 172_800.0,
        604_800.0,
    ];
    let (from, to) = chart.span;
    let length = (to - from).max(1.0);
    let step = TIME_STEP_SECONDS
        .into_iter()
        .find(|step| length / step <= MAX_TIME_TICKS)
        .unwrap_or((length / MAX_TIME_TICKS / 604_800.0).ceil() * 604_800.0);
    let first = (from / step).ceil() as i64;
    let last = (to / step).floor() as i64;
    let label = |time: f64| match chart.clock {
        ChartClock::SinceBeginning => format_elapsed(time),
        ChartClock::Utc => {
            let text = format_utc(time);
            let range = match step {
                step if step >= 86_400.0 => 5..10,
                _ if length > 86_400.0 => 5..16,
                step if step < 60.0 => 11..19,
                _ => 11..16,
            };
            text[range].to_owned()
        }
    };
    (first..=last).map(|n| n as f64 * step).map(|time| (time, label(time))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(scale: ChartScale, span: (f64, f64), heights: &[f64]) -> Chart {
        let length = heights.len().max(2) - 1;
        let time = |i: usize| span.0 + (span.1 - span.0) * i as f64 / length as f64;
        let part = heights.iter().enumerate().map(|(i, &high)| ChartPoint { time: time(i), low: 0.0, high }).collect();
        let series = ChartSeries {
            name: "a<b".to_owned(),
            color: SeriesColor::Saved,
            mark: SeriesStyle::Line,
            segments: vec![part],
        };
        Chart { id: "x", title: "A & B".to_owned(), scale, clock: ChartClock::Utc, span, series: vec![series] }
    }

    #[test]
    fn ticks_are_round_and_cover_the_values() {
        let check = |scale, heights: &[f64], expect: &[&str]| {
            let labels: Vec<String> =
                value_ticks(&chart(scale, (0.0, 1.0), heights)).iter().map(|tick| tick_label(scale, *tick)).collect();
            assert_eq!(labels, expect, "{heights:?}");
        };
        let gib = (1_u64 << 30) as f64;
        check(ChartScale::Bytes, &[3.0 * gib], &["0 B", "1.00 GiB", "2.00 GiB", "3.00 GiB"]);
        check(ChartScale::Bytes, &[0.0], &["0 B", "1 B"]);
        check(ChartScale::Bytes, &[1.5 * gib, -0.2 * gib], &["-512 MiB", "0 B", "512 MiB", "1.00 GiB", "1.50 GiB"]);
        check(ChartScale::Percent, &[10.0], &["0 %", "5 %", "10 %"]);
        check(ChartScale::Seconds, &[0.5, 20.0], &["0.1 s", "1 s", "10 s", "100 s"]);
    }

    #[test]
    fn time_axis_has_few_ticks_for_any_span() {
        for length in [0.5, 10.0, 100.0, 3e3, 2e4, 9e4, 1e6, 3e7, 1e9] {
            for start in [0.0, 1.795e9] {
                let marks = time_ticks(&chart(ChartScale::Percent, (start, start + length), &[1.0]));
                assert!(marks.len() <= 8, "{length}: {marks:?}");
                assert!(marks.windows(2).all(|pair| pair[0].1 != pair[1].1), "{length}: {marks:?}");
            }
        }
    }

    #[test]
    fn chart_stays_in_frame_and_escapes_names() {
        let text = render_inline(&chart(ChartScale::Bytes, (0.0, 100.0), &[0.0, 5e9, -1e9, 2e9]));
        assert!(text.contains("a&lt;b") && text.contains("A &amp; B") && !text.contains("a<b"), "{text}");
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
        let curve = text.lines().find(|line| line.contains("curve\" d=\"M") && line.contains('L')).expect("a curve");
        let numbers =
            curve.split(|c: char| !c.is_ascii_digit() && c != '.' && c != '-').filter_map(|n| n.parse::<f64>().ok());
        for number in numbers {
            assert!((0.0..=CHART_WIDTH).contains(&number), "{curve}");
        }
        // A series without height or length.
        for heights in [&[][..], &[0.0], &[f64::MIN_POSITIVE]] {
            let text = render_inline(&chart(ChartScale::Seconds, (5.0, 5.0), heights));
            assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
        }
    }
}
