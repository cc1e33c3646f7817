//! The charts of a report as data: series, colors and axes.
//!
//! They are the charts that operators make of KSM by hand: memory in use over time with and without merging, savings
//! over time of several hosts side by side, the CPU time used, and the duration of merges. There is a gap between two
//! runs of the daemon. CPU use is known between samples, not at them. It is drawn as steps, each as wide as the time
//! over which it is the mean.

use super::report::{HistoryReport, SideReport};
use super::series::SeriesPoint;

/// A chart.
#[derive(Clone, Debug, PartialEq)]
pub struct Chart {
    /// An identifier for names of files and anchors.
    pub id: &'static str,
    /// The title.
    pub title: String,
    /// The vertical axis.
    pub scale: ChartScale,
    /// The meaning of the times.
    pub clock: ChartClock,
    /// The first and the last time.
    pub span: (f64, f64),
    /// The series, the lowest layer first.
    pub series: Vec<ChartSeries>,
}

/// The vertical axis of a chart. It starts at 0 unless logarithmic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChartScale {
    /// Bytes.
    Bytes,
    /// Percent of one CPU.
    Percent,
    /// Seconds, logarithmic.
    Seconds,
}

/// The meaning of the times of a chart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChartClock {
    /// Unix times, shown in UTC.
    Utc,
    /// Seconds since the start of each side.
    SinceBeginning,
}

/// One series of a chart.
#[derive(Clone, Debug, PartialEq)]
pub struct ChartSeries {
    /// Its name.
    pub name: String,
    /// Its color.
    pub color: SeriesColor,
    /// Its style.
    pub mark: SeriesStyle,
    /// Its segments, with a gap between two.
    pub segments: Vec<Vec<ChartPoint>>,
}

/// A point of a chart: a time, and the values from low to high. Lines and dots are at `high`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChartPoint {
    /// The time.
    pub time: f64,
    /// The lower edge of a band.
    pub low: f64,
    /// The height.
    pub high: f64,
}

/// The style of a series.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeriesStyle {
    /// A curve.
    Line,
    /// A dashed curve, for limits.
    Limit,
    /// The area between two values.
    Band,
    /// A pale area between two values.
    PaleBand,
    /// Dots.
    Dots,
}

/// A color by its meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeriesColor {
    /// Savings by merging.
    Saved,
    /// Memory in use.
    InUse,
    /// ksmd.
    Ksmd,
    /// The daemon.
    Pagefold,
    /// Goals and limits.
    Bound,
    /// One of several sides, numbered from 0.
    Side(usize),
}

type PointValue = fn(&SeriesPoint) -> Option<f64>;

/// Converts points to segments of a chart.
type SegmentBuilder = fn(&[SeriesPoint], &dyn Fn(&SeriesPoint) -> Option<ChartPoint>) -> Vec<Vec<ChartPoint>>;

/// All charts of a report.
pub fn build_charts(report: &HistoryReport) -> Vec<Chart> {
    let clock = if report.differences.is_some() { ChartClock::SinceBeginning } else { ChartClock::Utc };
    let sides = &report.sides;
    let span = |side: &SideReport| match clock {
        ChartClock::Utc => (side.from, side.to),
        ChartClock::SinceBeginning => (0.0, side.to - side.from),
    };
    let spans = sides.iter().filter(|side| side.samples > 0).map(span);
    let span = spans.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1))).unwrap_or((0.0, 1.0));
    let chart = |id, title: &str, scale, series| Chart { id, title: title.to_owned(), scale, clock, span, series };
    let (memory, saved, cpu) = match &sides[..] {
        [side] => (memory_series(side), saved_series(side), cpu_series(side)),
        _ => {
            let side_lines = |value: PointValue, build: SegmentBuilder| {
                sides.iter().enumerate().map(|(i, side)| build_side_line(i, side, clock, value, build)).collect()
            };
            (
                side_lines(in_use, build_segments),
                side_lines(net_saved, build_segments),
                side_lines(total_cpu_percent, build_step_segments),
            )
        }
    };
    vec![
        chart("memory", "Memory in use", ChartScale::Bytes, memory),
        chart("saved", "Memory saved, net of metadata", ChartScale::Bytes, saved),
        chart("cpu", "CPU time used, percent of one CPU", ChartScale::Percent, cpu),
        chart(
            "converge",
            "Time from start or arrival to 90 % of a merge's savings",
            ChartScale::Seconds,
            convergence_series(sides, clock),
        ),
    ]
}

fn in_use(point: &SeriesPoint) -> Option<f64> {
    Some(point.total?.saturating_sub(point.available?) as f64)
}

fn in_use_without_merging(point: &SeriesPoint) -> Option<f64> {
    Some(in_use(point)? + point.saved_gross? as f64)
}

fn net_saved(point: &SeriesPoint) -> Option<f64> {
    Some(point.saved_net? as f64)
}

fn total_cpu_percent(point: &SeriesPoint) -> Option<f64> {
    Some(point.ksmd_percent? + point.pagefold_percent?)
}

/// Memory in use, and the predicted memory in use without merging above it.
fn memory_series(side: &SideReport) -> Vec<ChartSeries> {
    let goal: PointValue = |point| Some(point.total?.saturating_sub(point.keep_available?) as f64);
    drop_empty_series(vec![
        build_series(
            "without merging",
            SeriesColor::Saved,
            SeriesStyle::PaleBand,
            side,
            Some(in_use),
            in_use_without_merging,
        ),
        build_series("in use", SeriesColor::InUse, SeriesStyle::Line, side, None, in_use),
        build_series("total memory", SeriesColor::Bound, SeriesStyle::Line, side, None, |point| {
            Some(point.total? as f64)
        }),
        build_series("goal, maximum", SeriesColor::Bound, SeriesStyle::Limit, side, None, goal),
    ])
}

fn saved_series(side: &SideReport) -> Vec<ChartSeries> {
    drop_empty_series(vec![
        build_series("", SeriesColor::Saved, SeriesStyle::PaleBand, side, Some(|_| Some(0.0)), net_saved),
        build_series("net savings", SeriesColor::Saved, SeriesStyle::Line, side, None, net_saved),
    ])
}

fn cpu_series(side: &SideReport) -> Vec<ChartSeries> {
    drop_empty_series(vec![
        build_rate_band("ksmd", SeriesColor::Ksmd, side, |_| Some(0.0), |point| point.ksmd_percent),
        build_rate_band("pagefold", SeriesColor::Pagefold, side, |point| point.ksmd_percent, total_cpu_percent),
        build_series("CPU budget, mean", SeriesColor::Bound, SeriesStyle::Limit, side, None, |point| {
            Some(point.bound_percent)
        }),
    ])
}

/// Remove series without data.
fn drop_empty_series(series: Vec<ChartSeries>) -> Vec<ChartSeries> {
    series.into_iter().filter(|series| !series.segments.is_empty()).collect()
}

fn build_series(
    name: &str,
    color: SeriesColor,
    mark: SeriesStyle,
    side: &SideReport,
    low: Option<PointValue>,
    high: PointValue,
) -> ChartSeries {
    let to_point = |point: &SeriesPoint| {
        let low = low.map_or(Some(0.0), |low| low(point))?;
        Some(ChartPoint { time: point.time, low, high: high(point)? })
    };
    ChartSeries { name: name.to_owned(), color, mark, segments: build_segments(&side.points, &to_point) }
}

/// A band of values that are means since the previous point.
fn build_rate_band(
    name: &str,
    color: SeriesColor,
    side: &SideReport,
    low: PointValue,
    high: PointValue,
) -> ChartSeries {
    let to_point = |point: &SeriesPoint| Some(ChartPoint { time: point.time, low: low(point)?, high: high(point)? });
    ChartSeries {
        name: name.to_owned(),
        color,
        mark: SeriesStyle::Band,
        segments: build_step_segments(&side.points, &to_point),
    }
}

fn build_side_line(
    number: usize,
    side: &SideReport,
    clock: ChartClock,
    value: PointValue,
    build: SegmentBuilder,
) -> ChartSeries {
    let offset = time_offset(side, clock);
    let to_point = |point: &SeriesPoint| Some(ChartPoint { time: point.time, low: 0.0, high: value(point)? });
    let mut segments = build(&side.points, &to_point);
    segments.iter_mut().flatten().for_each(|point| point.time -= offset);
    ChartSeries { name: side.name.clone(), color: SeriesColor::Side(number), mark: SeriesStyle::Line, segments }
}

fn time_offset(side: &SideReport, clock: ChartClock) -> f64 {
    if clock == ChartClock::SinceBeginning { side.from } else { 0.0 }
}

/// Points in segments, cut where a value is unknown and where a run of the daemon ended.
fn build_segments(
    points: &[SeriesPoint],
    to_point: &dyn Fn(&SeriesPoint) -> Option<ChartPoint>,
) -> Vec<Vec<ChartPoint>> {
    let mut segments: Vec<Vec<ChartPoint>> = Vec::new();
    let mut previous_run: Option<i64> = None;
    for point in points {
        match to_point(point) {
            Some(chart_point) => match segments.last_mut() {
                Some(segment) if previous_run == Some(point.run_id) => segment.push(chart_point),
                _ => segments.push(vec![chart_point]),
            },
            None => {
                previous_run = None;
                continue;
            }
        }
        previous_run = Some(point.run_id);
    }
    segments
}

/// Points whose values are means since the previous point, each as a step over that time. Segments are cut where a
/// value is unknown and where a run of the daemon ended.
fn build_step_segments(
    points: &[SeriesPoint],
    to_point: &dyn Fn(&SeriesPoint) -> Option<ChartPoint>,
) -> Vec<Vec<ChartPoint>> {
    let mut segments: Vec<Vec<ChartPoint>> = Vec::new();
    for pair in points.windows(2) {
        let (previous, point) = (&pair[0], &pair[1]);
        let Some(chart_point) =
            to_point(point).filter(|_| previous.run_id == point.run_id && previous.time < point.time)
        else {
            continue;
        };
        let step = [ChartPoint { time: previous.time, ..chart_point }, chart_point];
        match segments.last_mut() {
            Some(segment) if segment.last().is_some_and(|last| last.time == previous.time) => segment.extend(step),
            _ => segments.push(step.into()),
        }
    }
    segments
}

/// A dot for each merge whose duration is known: from the arrival of a process if there was one, otherwise from the
/// start of the pass.
fn convergence_series(sides: &[SideReport], clock: ChartClock) -> Vec<ChartSeries> {
    let color = |i| if sides.len() == 1 { SeriesColor::Saved } else { SeriesColor::Side(i) };
    let side_series = |(i, side): (usize, &SideReport)| {
        let to_point = |pass: &super::report::PassRow| {
            let high = pass.seconds_to_90? + pass.arrival_wait_seconds.unwrap_or(0.0);
            Some(ChartPoint { time: pass.ended_at - time_offset(side, clock), low: 0.0, high })
        };
        let dots: Vec<ChartPoint> = side.passes.iter().filter_map(to_point).collect();
        let name = if sides.len() == 1 { "one merge".to_owned() } else { side.name.clone() };
        ChartSeries { name, color: color(i), mark: SeriesStyle::Dots, segments: vec![dots] }
    };
    let series = sides.iter().enumerate().map(side_series);
    series.filter(|series| series.segments.iter().any(|segment| !segment.is_empty())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_points_split_the_series() {
        let point = |time: f64, run, net| SeriesPoint { time, run_id: run, saved_net: net, ..SeriesPoint::default() };
        let points = [
            point(0.0, 1, Some(1)),
            point(1.0, 1, Some(2)),
            point(2.0, 1, None),
            point(3.0, 1, Some(3)),
            point(4.0, 2, Some(4)),
        ];
        let to_point = |point: &SeriesPoint| Some(ChartPoint { time: point.time, low: 0.0, high: net_saved(point)? });
        let times: Vec<Vec<f64>> = build_segments(&points, &to_point)
            .iter()
            .map(|segment| segment.iter().map(|point| point.time).collect())
            .collect();
        assert_eq!(times, [vec![0.0, 1.0], vec![3.0], vec![4.0]]);
    }

    /// A burst between two samples is as wide as the time between them, without slopes beside it.
    #[test]
    fn cpu_time_is_drawn_in_steps() {
        let point = |time: f64, run, percent| SeriesPoint {
            time,
            run_id: run,
            ksmd_percent: percent,
            ..SeriesPoint::default()
        };
        let points = [
            point(0.0, 1, None),
            point(10.0, 1, Some(0.0)),
            point(11.0, 1, Some(35.0)),
            point(20.0, 1, Some(0.0)),
            point(21.0, 1, None),
            point(22.0, 1, Some(5.0)),
            point(30.0, 2, None),
            point(31.0, 2, Some(7.0)),
        ];
        let side = SideReport { points: points.to_vec(), ..serde_json::from_str(EMPTY_SIDE_JSON).unwrap() };
        let drawn = cpu_series(&side).remove(0);
        let shape = |parts: &[Vec<ChartPoint>]| -> Vec<Vec<(f64, f64)>> {
            parts.iter().map(|segment| segment.iter().map(|point| (point.time, point.high)).collect()).collect()
        };
        let burst = vec![(0.0, 0.0), (10.0, 0.0), (10.0, 35.0), (11.0, 35.0), (11.0, 0.0), (20.0, 0.0)];
        let others = [vec![(21.0, 5.0), (22.0, 5.0)], vec![(30.0, 7.0), (31.0, 7.0)]];
        assert_eq!((drawn.name.as_str(), shape(&drawn.segments)), ("ksmd", [vec![burst], others.to_vec()].concat()));
    }

    /// A side without data.
    const EMPTY_SIDE_JSON: &str = r#"{
        "name": "", "host": "", "from": 0, "to": 31, "samples": 8, "points": [], "passes": [], "passes_omitted": 0,
        "figures": {"covered_seconds": 0, "passes": 0, "merges": 0, "predicted": 0, "measured": 0},
        "decisions_by_reason": {}, "decisions": [], "processes": [], "processes_omitted": 0
    }"#;
}
