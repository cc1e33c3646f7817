//! The pictures of a report as data: what is drawn, in which colours, on which axes.
//!
//! They are the plots that operators make of KSM by hand: memory in use over time with and without merging, savings
//! over time of several hosts side by side, the CPU time that it cost, and how long it took. Nothing is drawn across
//! the time between two lives of the daemon.

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
            let each = |of: Of| sides.iter().enumerate().map(|(i, side)| side_line(i, side, clock, of)).collect();
            (each(in_use), each(saved), each(cpu))
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
        series("ksmd", Colour::Ksmd, Mark::Band, side, Some(|_| Some(0.0)), |point| point.ksmd_percent),
        series("pagefold", Colour::Pagefold, Mark::Band, side, Some(|point| point.ksmd_percent), cpu),
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
    Series { name: name.to_owned(), colour, mark, parts: parts(&side.points, spot) }
}

fn side_line(number: usize, side: &Side, clock: Clock, of: Of) -> Series {
    let offset = offset(side, clock);
    let spot = |point: &Point| Some(Spot { time: point.time - offset, low: 0.0, high: of(point)? });
    let parts = parts(&side.points, spot);
    Series { name: side.name.clone(), colour: Colour::Side(number), mark: Mark::Line, parts }
}

fn offset(side: &Side, clock: Clock) -> f64 {
    if clock == Clock::SinceBeginning { side.from } else { 0.0 }
}

/// Points in parts, cut where one is not known and where one daemon ended.
fn parts(points: &[Point], spot: impl Fn(&Point) -> Option<Spot>) -> Vec<Vec<Spot>> {
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
            parts(&points, spot).iter().map(|part| part.iter().map(|spot| spot.time).collect()).collect();
        assert_eq!(times, [vec![0.0, 1.0], vec![3.0], vec![4.0]]);
    }
}
