//! The pictures of a report as data: what is drawn, in which colours, on which axes.
//!
//! They are the plots that operators make of KSM by hand: memory in use over time with and without merging, savings
//! over time of several hosts side by side, the CPU time that it cost, and how long it took. Nothing is drawn across
//! the time between two lives of the daemon. CPU time is known between samples, not at them: it is drawn as steps, each
//! as wide as the time that it is the mean of.

use super::report::{HistoryReport, Side};
use super::series::Point;

/// A picture.
#[derive(Clone, Debug, PartialEq)]
pub struct Chart {
    /// A word for names of files and anchors.
    pub id: &'static str,
    /// What it shows.
    pub title: String,
    /// What goes up.
    pub scale: Scale,
    /// How the times are meant.
    pub clock: Clock,
    /// The first and the last time.
    pub span: (f64, f64),
    /// What is drawn, the lower ones first.
    pub series: Vec<Series>,
}

/// What goes up in a picture, from 0 unless logarithmic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Bytes.
    Bytes,
    /// Percent of one CPU.
    Percent,
    /// Seconds, logarithmic.
    Seconds,
}

/// How the times of a picture are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// Unix times, shown in UTC.
    Utc,
    /// Seconds since the beginning of each side.
    SinceBeginning,
}

/// One thing that is drawn.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// Its name.
    pub name: String,
    /// Its colour.
    pub colour: Colour,
    /// How it is drawn.
    pub mark: Mark,
    /// Its parts: nothing is drawn between two.
    pub parts: Vec<Vec<Spot>>,
}

/// A place in a picture: a time, and what it is from and to there. Lines and dots are at `high`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spot {
    /// When.
    pub time: f64,
    /// The lower edge of a band.
    pub low: f64,
    /// The height.
    pub high: f64,
}

/// How a series is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// A curve.
    Line,
    /// A dashed curve, for what is to be kept to.
    Limit,
    /// The space between two heights.
    Band,
    /// A pale one.
    Pale,
    /// Dots.
    Dots,
}

/// A colour by its meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colour {
    /// What merging saves.
    Saved,
    /// Memory in use.
    Used,
    /// ksmd.
    Ksmd,
    /// The daemon.
    Pagefold,
    /// Goals and bounds.
    Bound,
    /// One of several sides, by its number from 0.
    Side(usize),
}

type Of = fn(&Point) -> Option<f64>;

/// How values become parts of a picture.
type Shape = fn(&[Point], &dyn Fn(&Point) -> Option<Spot>) -> Vec<Vec<Spot>>;

/// All pictures of a report.
pub fn all(report: &HistoryReport) -> Vec<Chart> {
    let clock = if report.differences.is_some() { Clock::SinceBeginning } else { Clock::Utc };
    let sides = &report.sides;
    let span = |side: &Side| match clock {
        Clock::Utc => (side.from, side.to),
        Clock::SinceBeginning => (0.0, side.to - side.from),
    };
    let spans = sides.iter().filter(|side| side.samples > 0).map(span);
    let span = spans.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1))).unwrap_or((0.0, 1.0));
    let chart = |id, title: &str, scale, series| Chart { id, title: title.to_owned(), scale, clock, span, series };
    let (memory, saved, cpu) = match &sides[..] {
        [side] => (memory_of(side), saved_of(side), cpu_of(side)),
        _ => {
            let each = |of: Of, shape: Shape| {
                sides.iter().enumerate().map(|(i, side)| side_line(i, side, clock, of, shape)).collect()
            };
            (each(in_use, parts), each(saved, parts), each(cpu, steps))
        }
    };
    vec![
        chart("memory", "Memory in use", Scale::Bytes, memory),
        chart("saved", "Memory saved, net of metadata", Scale::Bytes, saved),
        chart("cpu", "CPU that it cost, in percent of one", Scale::Percent, cpu),
        chart("converge", "Time until 90 % of what a merge saved was saved", Scale::Seconds, converge(sides, clock)),
    ]
}

fn in_use(point: &Point) -> Option<f64> {
    Some(point.total?.saturating_sub(point.available?) as f64)
}

fn unmerged(point: &Point) -> Option<f64> {
    Some(in_use(point)? + point.saved_gross? as f64)
}

fn saved(point: &Point) -> Option<f64> {
    Some(point.saved_net? as f64)
}

fn cpu(point: &Point) -> Option<f64> {
    Some(point.ksmd_percent? + point.pagefold_percent?)
}

/// In use, and above it what would be without merging.
fn memory_of(side: &Side) -> Vec<Series> {
    let goal: Of = |point| Some(point.total?.saturating_sub(point.keep_available?) as f64);
    drawn(vec![
        series("without merging", Colour::Saved, Mark::Pale, side, Some(in_use), unmerged),
        series("in use", Colour::Used, Mark::Line, side, None, in_use),
        series("all there is", Colour::Bound, Mark::Line, side, None, |point| Some(point.total? as f64)),
        series("goal, at most", Colour::Bound, Mark::Limit, side, None, goal),
    ])
}

fn saved_of(side: &Side) -> Vec<Series> {
    drawn(vec![
        series("", Colour::Saved, Mark::Pale, side, Some(|_| Some(0.0)), saved),
        series("saved, net", Colour::Saved, Mark::Line, side, None, saved),
    ])
}

fn cpu_of(side: &Side) -> Vec<Series> {
    drawn(vec![
        rates("ksmd", Colour::Ksmd, side, |_| Some(0.0), |point| point.ksmd_percent),
        rates("pagefold", Colour::Pagefold, side, |point| point.ksmd_percent, cpu),
        series("bound, on average", Colour::Bound, Mark::Limit, side, None, |point| Some(point.bound_percent)),
    ])
}

/// Those of which anything is known.
fn drawn(series: Vec<Series>) -> Vec<Series> {
    series.into_iter().filter(|series| !series.parts.is_empty()).collect()
}

fn series(name: &str, colour: Colour, mark: Mark, side: &Side, low: Option<Of>, high: Of) -> Series {
    let spot = |point: &Point| {
        let low = low.map_or(Some(0.0), |low| low(point))?;
        Some(Spot { time: point.time, low, high: high(point)? })
    };
    Series { name: name.to_owned(), colour, mark, parts: parts(&side.points, &spot) }
}

/// A band of what is the mean since the point before.
fn rates(name: &str, colour: Colour, side: &Side, low: Of, high: Of) -> Series {
    let spot = |point: &Point| Some(Spot { time: point.time, low: low(point)?, high: high(point)? });
    Series { name: name.to_owned(), colour, mark: Mark::Band, parts: steps(&side.points, &spot) }
}

fn side_line(number: usize, side: &Side, clock: Clock, of: Of, shape: Shape) -> Series {
    let offset = offset(side, clock);
    let spot = |point: &Point| Some(Spot { time: point.time, low: 0.0, high: of(point)? });
    let mut parts = shape(&side.points, &spot);
    parts.iter_mut().flatten().for_each(|spot| spot.time -= offset);
    Series { name: side.name.clone(), colour: Colour::Side(number), mark: Mark::Line, parts }
}

fn offset(side: &Side, clock: Clock) -> f64 {
    if clock == Clock::SinceBeginning { side.from } else { 0.0 }
}

/// Points in parts, cut where one is not known and where one daemon ended.
fn parts(points: &[Point], spot: &dyn Fn(&Point) -> Option<Spot>) -> Vec<Vec<Spot>> {
    let mut parts: Vec<Vec<Spot>> = Vec::new();
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
fn steps(points: &[Point], spot: &dyn Fn(&Point) -> Option<Spot>) -> Vec<Vec<Spot>> {
    let mut parts: Vec<Vec<Spot>> = Vec::new();
    for pair in points.windows(2) {
        let (before, point) = (&pair[0], &pair[1]);
        let Some(spot) = spot(point).filter(|_| before.run == point.run && before.time < point.time) else { continue };
        let step = [Spot { time: before.time, ..spot }, spot];
        match parts.last_mut() {
            Some(part) if part.last().is_some_and(|last| last.time == before.time) => part.extend(step),
            _ => parts.push(step.into()),
        }
    }
    parts
}

/// A dot for each merge whose course is known: from arrival where somebody had come, otherwise from the start of the
/// pass.
fn converge(sides: &[Side], clock: Clock) -> Vec<Series> {
    let colour = |i| if sides.len() == 1 { Colour::Saved } else { Colour::Side(i) };
    let of = |(i, side): (usize, &Side)| {
        let spot = |pass: &super::report::PassLine| {
            let high = pass.to_90_seconds? + pass.waited_seconds.unwrap_or(0.0);
            Some(Spot { time: pass.ended - offset(side, clock), low: 0.0, high })
        };
        let dots: Vec<Spot> = side.passes.iter().filter_map(spot).collect();
        let name = if sides.len() == 1 { "a merge".to_owned() } else { side.name.clone() };
        Series { name, colour: colour(i), mark: Mark::Dots, parts: vec![dots] }
    };
    let all = sides.iter().enumerate().map(of);
    all.filter(|series| series.parts.iter().any(|part| !part.is_empty())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_drawn_where_nothing_is_known() {
        let point = |time: f64, run, net| Point { time, run, saved_net: net, ..Point::default() };
        let points = [
            point(0.0, 1, Some(1)),
            point(1.0, 1, Some(2)),
            point(2.0, 1, None),
            point(3.0, 1, Some(3)),
            point(4.0, 2, Some(4)),
        ];
        let spot = |point: &Point| Some(Spot { time: point.time, low: 0.0, high: saved(point)? });
        let times: Vec<Vec<f64>> =
            parts(&points, &spot).iter().map(|part| part.iter().map(|spot| spot.time).collect()).collect();
        assert_eq!(times, [vec![0.0, 1.0], vec![3.0], vec![4.0]]);
    }

    /// A burst between two samples is as wide as the time between them, and no slope leads to it or away from it.
    #[test]
    fn cpu_time_is_drawn_as_steps_over_the_time_that_it_was_measured_for() {
        let point = |time: f64, run, percent| Point { time, run, ksmd_percent: percent, ..Point::default() };
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
        let side = Side { points: points.to_vec(), ..serde_json::from_str(SIDE).unwrap() };
        let drawn = cpu_of(&side).remove(0);
        let shape = |parts: &[Vec<Spot>]| -> Vec<Vec<(f64, f64)>> {
            parts.iter().map(|part| part.iter().map(|spot| (spot.time, spot.high)).collect()).collect()
        };
        let burst = vec![(0.0, 0.0), (10.0, 0.0), (10.0, 35.0), (11.0, 35.0), (11.0, 0.0), (20.0, 0.0)];
        let others = [vec![(21.0, 5.0), (22.0, 5.0)], vec![(30.0, 7.0), (31.0, 7.0)]];
        assert_eq!((drawn.name.as_str(), shape(&drawn.parts)), ("ksmd", [vec![burst], others.to_vec()].concat()));
    }

    /// A side without anything in it.
    const SIDE: &str = r#"{
        "name": "", "host": "", "from": 0, "to": 31, "samples": 8, "points": [], "passes": [], "passes_left_out": 0,
        "figures": {"covered_seconds": 0, "passes": 0, "merges": 0, "predicted": 0, "reached": 0},
        "decisions_by_reason": {}, "decisions": [], "members": [], "members_left_out": 0
    }"#;
}
