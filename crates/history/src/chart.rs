//! The pictures of a report as data: what is drawn, in which colours, on which axes.
//!
//! They are the plots that operators make of KSM by hand: memory in use over time with and without merging, savings
//! over time of several hosts side by side, the CPU time that it cost, and how long it took. Nothing is drawn across
//! the time between two lives of the daemon. CPU time is known between samples, not at them: it is drawn as steps, each
//! as wide as the time that it is the mean of.

use super::report::{HistoryReport, SideReport};
use super::series::SeriesPoint;

/// A picture.
#[derive(Clone, Debug, PartialEq)]
pub struct Chart {
    /// A word for names of files and anchors.
    pub id: &'static str,
    /// What it shows.
    pub title: String,
    /// What goes up.
    pub scale: ChartScale,
    /// How the times are meant.
    pub clock: ChartClock,
    /// The first and the last time.
    pub span: (f64, f64),
    /// What is drawn, the lower ones first.
    pub series: Vec<ChartSeries>,
}

/// What goes up in a picture, from 0 unless logarithmic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChartScale {
    /// Bytes.
    Bytes,
    /// Percent of one CPU.
    Percent,
    /// Seconds, logarithmic.
    Seconds,
}

/// How the times of a picture are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChartClock {
    /// Unix times, shown in UTC.
    Utc,
    /// Seconds since the beginning of each side.
    SinceBeginning,
}

/// One thing that is drawn.
#[derive(Clone, Debug, PartialEq)]
pub struct ChartSeries {
    /// Its name.
    pub name: String,
    /// Its colour.
    pub color: SeriesColor,
    /// How it is drawn.
    pub mark: SeriesStyle,
    /// Its parts: nothing is drawn between two.
    pub segments: Vec<Vec<ChartPoint>>,
}

/// A place in a picture: a time, and what it is from and to there. Lines and dots are at `high`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChartPoint {
    /// When.
    pub time: f64,
    /// The lower edge of a band.
    pub low: f64,
    /// The height.
    pub high: f64,
}

/// How a series is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeriesStyle {
    /// A curve.
    Line,
    /// A dashed curve, for what is to be kept to.
    Limit,
    /// The space between two heights.
    Band,
    /// A pale one.
    PaleBand,
    /// Dots.
    Dots,
}

/// A colour by its meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeriesColor {
    /// What merging saves.
    Saved,
    /// Memory in use.
    InUse,
    /// ksmd.
    Ksmd,
    /// The daemon.
    Pagefold,
    /// Goals and bounds.
    Bound,
    /// One of several sides, by its number from 0.
    Side(usize),
}

type PointValue = fn(&SeriesPoint) -> Option<f64>;

/// How values become parts of a picture.
type SegmentBuilder = fn(&[SeriesPoint], &dyn Fn(&SeriesPoint) -> Option<ChartPoint>) -> Vec<Vec<ChartPoint>>;

/// All pictures of a report.
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
            let each = |of: PointValue, shape: SegmentBuilder| {
                sides.iter().enumerate().map(|(i, side)| build_side_line(i, side, clock, of, shape)).collect()
            };
            (
                each(in_use, build_segments),
                each(net_saved, build_segments),
                each(total_cpu_percent, build_step_segments),
            )
        }
    };
    vec![
        chart("memory", "Memory in use", ChartScale::Bytes, memory),
        chart("saved", "Memory saved, net of metadata", ChartScale::Bytes, saved),
        chart("cpu", "CPU that it cost, in percent of one", ChartScale::Percent, cpu),
        chart(
            "converge",
            "Time until 90 % of what a merge saved was saved",
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

/// In use, and above it what would be without merging.
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
        build_series("all there is", SeriesColor::Bound, SeriesStyle::Line, side, None, |point| {
            Some(point.total? as f64)
        }),
        build_series("goal, at most", SeriesColor::Bound, SeriesStyle::Limit, side, None, goal),
    ])
}

fn saved_series(side: &SideReport) -> Vec<ChartSeries> {
    drop_empty_series(vec![
        build_series("", SeriesColor::Saved, SeriesStyle::PaleBand, side, Some(|_| Some(0.0)), net_saved),
        build_series("saved, net", SeriesColor::Saved, SeriesStyle::Line, side, None, net_saved),
    ])
}

fn cpu_series(side: &SideReport) -> Vec<ChartSeries> {
    drop_empty_series(vec![
        build_rate_band("ksmd", SeriesColor::Ksmd, side, |_| Some(0.0), |point| point.ksmd_percent),
        build_rate_band("pagefold", SeriesColor::Pagefold, side, |point| point.ksmd_percent, total_cpu_percent),
        build_series("bound, on average", SeriesColor::Bound, SeriesStyle::Limit, side, None, |point| {
            Some(point.bound_percent)
        }),
    ])
}

/// Those of which anything is known.
fn drop_empty_series(series: Vec<ChartSeries>) -> Vec<ChartSeries> {
    series.into_iter().filter(|series| !series.segments.is_empty()).collect()
}

fn build_series(
    name: &str,
    colour: SeriesColor,
    mark: SeriesStyle,
    side: &SideReport,
    low: Option<PointValue>,
    high: PointValue,
) -> ChartSeries {
    let spot = |point: &SeriesPoint| {
        let low = low.map_or(Some(0.0), |low| low(point))?;
        Some(ChartPoint { time: point.time, low, high: high(point)? })
    };
    ChartSeries { name: name.to_owned(), color: colour, mark, segments: build_segments(&side.points, &spot) }
}

/// A band of what is the mean since the point before.
fn build_rate_band(
    name: &str,
    colour: SeriesColor,
    side: &SideReport,
    low: PointValue,
    high: PointValue,
) -> ChartSeries {
    let spot = |point: &SeriesPoint| Some(ChartPoint { time: point.time, low: low(point)?, high: high(point)? });
    ChartSeries {
        name: name.to_owned(),
        color: colour,
        mark: SeriesStyle::Band,
        segments: build_step_segments(&side.points, &spot),
    }
}

fn build_side_line(
    number: usize,
    side: &SideReport,
    clock: ChartClock,
    of: PointValue,
    shape: SegmentBuilder,
) -> ChartSeries {
    let offset = time_offset(side, clock);
    let spot = |point: &SeriesPoint| Some(ChartPoint { time: point.time, low: 0.0, high: of(point)? });
    let mut parts = shape(&side.points, &spot);
    parts.iter_mut().flatten().for_each(|spot| spot.time -= offset);
    ChartSeries { name: side.name.clone(), color: SeriesColor::Side(number), mark: SeriesStyle::Line, segments: parts }
}

fn time_offset(side: &SideReport, clock: ChartClock) -> f64 {
    if clock == ChartClock::SinceBeginning { side.from } else { 0.0 }
}

/// Points in parts, cut where one is not known and where one daemon ended.
fn build_segments(points: &[SeriesPoint], spot: &dyn Fn(&SeriesPoint) -> Option<ChartPoint>) -> Vec<Vec<ChartPoint>> {
    let mut parts: Vec<Vec<ChartPoint>> = Vec::new();
    let mut before: Option<i64> = None;
    for point in points {
        match spot(point) {
            Some(spot) => match parts.last_mut() {
                Some(part) if before == Some(point.run) => part.push(spot),
                _ => parts.push(vec![spot]),
            },
            None => {
                before = None;
                continue;
            }
        }
        before = Some(point.run);
    }
    parts
}

/// Points whose values are means since the point before, each as a step over that time; in parts, cut where one is not
/// known and where one daemon ended.
fn build_step_segments(
    points: &[SeriesPoint],
    spot: &dyn Fn(&SeriesPoint) -> Option<ChartPoint>,
) -> Vec<Vec<ChartPoint>> {
    let mut parts: Vec<Vec<ChartPoint>> = Vec::new();
    for pair in points.windows(2) {
        let (before, point) = (&pair[0], &pair[1]);
        let Some(spot) = spot(point).filter(|_| before.run == point.run && before.time < point.time) else { continue };
        let step = [ChartPoint { time: before.time, ..spot }, spot];
        match parts.last_mut() {
            Some(part) if part.last().is_some_and(|last| last.time == before.time) => part.extend(step),
            _ => parts.push(step.into()),
        }
    }
    parts
}

/// A dot for each merge whose course is known: from arrival where somebody had come, otherwise from the start of the
/// pass.
fn convergence_series(sides: &[SideReport], clock: ChartClock) -> Vec<ChartSeries> {
    let colour = |i| if sides.len() == 1 { SeriesColor::Saved } else { SeriesColor::Side(i) };
    let of = |(i, side): (usize, &SideReport)| {
        let spot = |pass: &super::report::PassRow| {
            let high = pass.to_90_seconds? + pass.waited_seconds.unwrap_or(0.0);
            Some(ChartPoint { time: pass.ended - time_offset(side, clock), low: 0.0, high })
        };
        let dots: Vec<ChartPoint> = side.passes.iter().filter_map(spot).collect();
        let name = if sides.len() == 1 { "a merge".to_owned() } else { side.name.clone() };
        ChartSeries { name, color: colour(i), mark: SeriesStyle::Dots, segments: vec![dots] }
    };
    let all = sides.iter().enumerate().map(of);
    all.filter(|series| series.segments.iter().any(|part| !part.is_empty())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_points_split_the_series() {
        let point = |time: f64, run, net| SeriesPoint { time, run, saved_net: net, ..SeriesPoint::default() };
        let points = [
            point(0.0, 1, Some(1)),
            point(1.0, 1, Some(2)),
            point(2.0, 1, None),
            point(3.0, 1, Some(3)),
            point(4.0, 2, Some(4)),
        ];
        let spot = |point: &SeriesPoint| Some(ChartPoint { time: point.time, low: 0.0, high: net_saved(point)? });
        let times: Vec<Vec<f64>> =
            build_segments(&points, &spot).iter().map(|part| part.iter().map(|spot| spot.time).collect()).collect();
        assert_eq!(times, [vec![0.0, 1.0], vec![3.0], vec![4.0]]);
    }

    /// A burst between two samples is as wide as the time between them, and no slope leads to it or away from it.
    #[test]
    fn cpu_time_is_drawn_in_steps() {
        let point =
            |time: f64, run, percent| SeriesPoint { time, run, ksmd_percent: percent, ..SeriesPoint::default() };
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
            parts.iter().map(|part| part.iter().map(|spot| (spot.time, spot.high)).collect()).collect()
        };
        let burst = vec![(0.0, 0.0), (10.0, 0.0), (10.0, 35.0), (11.0, 35.0), (11.0, 0.0), (20.0, 0.0)];
        let others = [vec![(21.0, 5.0), (22.0, 5.0)], vec![(30.0, 7.0), (31.0, 7.0)]];
        assert_eq!((drawn.name.as_str(), shape(&drawn.segments)), ("ksmd", [vec![burst], others.to_vec()].concat()));
    }

    /// A side without anything in it.
    const EMPTY_SIDE_JSON: &str = r#"{
        "name": "", "host": "", "from": 0, "to": 31, "samples": 8, "points": [], "passes": [], "passes_left_out": 0,
        "figures": {"covered_seconds": 0, "passes": 0, "merges": 0, "predicted": 0, "reached": 0},
        "decisions_by_reason": {}, "decisions": [], "members": [], "members_left_out": 0
    }"#;
}
