//! A comparison as SVG: memory saved over time, and the CPU time for it.
//!
//! A line is the mean over the seeds, and a band their range. Colors are those of Okabe and Ito (Color Universal Design,
//! 2008), which people with the usual kinds of color blindness tell apart; dashes tell them apart without colors.

use crate::comparison::PolicyRuns;
use crate::decide::measures::Spread;
use crate::decide::samples::{Sample, SimulatedRun};
use crate::text::comparison::format_seconds;
use std::fmt::Write;

const WIDTH: f64 = 900.0;
const LEFT_MARGIN: f64 = 70.0;
const RIGHT_MARGIN: f64 = 16.0;
const PANEL_HEIGHT: f64 = 230.0;
const PANEL_GAP: f64 = 52.0;
const TITLE_HEIGHT: f64 = 30.0;
const LEGEND_ROW: f64 = 20.0;
/// Width of a character of the legend at most.
const CHARACTER: f64 = 7.2;
/// CPU time is shown over this many equal times.
const CPU_INTERVALS: usize = 60;

const COLORS: [&str; 7] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"];
const DASHES: [&str; 3] = ["none", "7 4", "2 3"];

/// Space below the lowest negative value, as a part of the range of values.
const BELOW_LOWEST: f64 = 0.02;

const GIB: f64 = (1_u64 << 30) as f64;

/// A policy's values over time: seconds, and the spread over its runs.
type Curve = Vec<(f64, Spread)>;

/// The picture of a comparison of a scenario that lasts some seconds.
#[must_use]
pub fn draw(title: &str, seconds: f64, policies: &[PolicyRuns]) -> String {
    let (legend, legend_height) = legend(policies);
    let top = TITLE_HEIGHT + legend_height;
    let height = top + 2.0 * (PANEL_HEIGHT + PANEL_GAP);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" \
         font-size=\"12\" fill=\"#222\">\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>\n\
         <text x=\"{LEFT_MARGIN}\" y=\"20\" font-size=\"15\">{}</text>\n{legend}",
        escape(title)
    );
    let saved: Vec<Curve> = policies.iter().map(|policy| saved_curve(&policy.runs)).collect();
    let cpus: Vec<Curve> = policies.iter().map(|policy| cpu_curve(&policy.runs, seconds)).collect();
    svg += &Panel::new("memory saved, less metadata, GiB", top, seconds, &saved).draw(&saved);
    svg += &Panel::new(cpu_title(policies), top + PANEL_HEIGHT + PANEL_GAP, seconds, &cpus).draw(&cpus);
    svg + "</svg>\n"
}

/// The title of the CPU panel: which threads its time includes.
fn cpu_title(policies: &[PolicyRuns]) -> &'static str {
    let has_daemon = policies.iter().any(|policy| policy.policy.is_guided());
    if has_daemon { "ksmd and pagefold, CPUs" } else { "ksmd, CPUs" }
}

/// Names of the policies with their lines, and the height that they take.
fn legend(policies: &[PolicyRuns]) -> (String, f64) {
    let (mut text, mut x, mut y) = (String::new(), LEFT_MARGIN, TITLE_HEIGHT + 12.0);
    for (number, policy) in policies.iter().enumerate() {
        let name = policy.policy.to_string();
        let width = 46.0 + name.chars().count() as f64 * CHARACTER;
        if x > LEFT_MARGIN && x + width > WIDTH - RIGHT_MARGIN {
            (x, y) = (LEFT_MARGIN, y + LEGEND_ROW);
        }
        let _ = writeln!(
            text,
            "<path d=\"M{x:.1} {:.1}h26\" {}/><text x=\"{:.1}\" y=\"{y:.1}\">{}</text>",
            y - 4.0,
            stroke(number),
            x + 32.0,
            escape(&name)
        );
        x += width;
    }
    (text, y + LEGEND_ROW + 8.0 - TITLE_HEIGHT)
}

fn stroke(number: usize) -> String {
    format!(
        "fill=\"none\" stroke=\"{}\" stroke-width=\"2\" stroke-dasharray=\"{}\"",
        COLORS[number % COLORS.len()],
        DASHES[number % DASHES.len()]
    )
}

fn saved_curve(runs: &[SimulatedRun]) -> Curve {
    let samples = runs.first().map_or(&[][..], |run| run.samples.as_slice());
    let spread_at = |(number, sample): (usize, &Sample)| {
        let values: Vec<f64> = runs
            .iter()
            .filter_map(|run| run.samples.get(number))
            .map(|sample| sample.net_saved_bytes() as f64 / GIB)
            .collect();
        Some((sample.time_ms as f64 / 1e3, Spread::over(&values)?))
    };
    samples.iter().enumerate().filter_map(spread_at).collect()
}

/// The share of a CPU as steps.
fn cpu_curve(runs: &[SimulatedRun], seconds: f64) -> Curve {
    let mut curve = Vec::new();
    let intervals = CPU_INTERVALS.min(runs.first().map_or(1, |run| run.samples.len().saturating_sub(1)).max(1));
    let length = seconds / intervals as f64;
    for interval in 0..intervals {
        let (from, to) = (interval as f64 * length, (interval + 1) as f64 * length);
        let share = |run: &SimulatedRun| (cpu_seconds_at(run, to) - cpu_seconds_at(run, from)) / length;
        let values: Vec<f64> = runs.iter().map(share).collect();
        if let Some(spread) = Spread::over(&values) {
            curve.extend([(from, spread), (to, spread)]);
        }
    }
    curve
}

/// CPU time at a moment; between two samples, as if it grew evenly.
fn cpu_seconds_at(run: &SimulatedRun, seconds: f64) -> f64 {
    let time = |sample: &Sample| sample.time_ms as f64 / 1e3;
    let cpu = Sample::cpu_seconds;
    let behind = run.samples.partition_point(|sample| time(sample) < seconds);
    let (Some(next), Some(before)) = (run.samples.get(behind), behind.checked_sub(1).map(|at| &run.samples[at])) else {
        return if behind == 0 { 0.0 } else { run.samples.last().map_or(0.0, cpu) };
    };
    let part = (seconds - time(before)) / (time(next) - time(before)).max(1e-9);
    cpu(before) + part * (cpu(next) - cpu(before))
}

/// Axes of a panel.
struct Panel<'a> {
    title: &'a str,
    top: f64,
    seconds: f64,
    /// Lowest and highest value, and the distance of grid lines.
    range: (f64, f64),
    step: f64,
}

impl<'a> Panel<'a> {
    fn new(title: &'a str, top: f64, seconds: f64, curves: &[Curve]) -> Self {
        let spreads = || curves.iter().flatten().map(|(_, spread)| spread);
        let most = spreads().map(|spread| spread.most).fold(0.0, f64::max);
        let least = spreads().map(|spread| spread.least).fold(0.0, f64::min);
        let step = round_step((most - least) / 5.0);
        // Losses are small beside savings: they get no whole step of the grid.
        let bottom = if least < 0.0 { least - BELOW_LOWEST * (most - least) } else { 0.0 };
        let range = (bottom, ((most / step - 1e-9).ceil() * step).max(step));
        Self { title, top: top + 20.0, seconds: seconds.max(1e-3), range, step }
    }

    fn x(&self, seconds: f64) -> f64 {
        LEFT_MARGIN + seconds / self.seconds * (WIDTH - LEFT_MARGIN - RIGHT_MARGIN)
    }

    fn y(&self, value: f64) -> f64 {
        self.top + (self.range.1 - value) / (self.range.1 - self.range.0) * PANEL_HEIGHT
    }

    fn draw(&self, curves: &[Curve]) -> String {
        let mut svg = format!(
            "<text x=\"{LEFT_MARGIN}\" y=\"{:.1}\" font-weight=\"bold\">{}</text>\n",
            self.top - 8.0,
            self.title
        );
        self.draw_axes(&mut svg);
        for (number, curve) in curves.iter().enumerate() {
            let color = COLORS[number % COLORS.len()];
            if curve.iter().any(|(_, spread)| spread.most > spread.least) {
                let upper = self.points(curve.iter().map(|(time, spread)| (*time, spread.most)));
                let lower = self.points(curve.iter().rev().map(|(time, spread)| (*time, spread.least)));
                let _ = writeln!(svg, "<path d=\"M{upper}L{lower}Z\" fill=\"{color}\" fill-opacity=\"0.18\"/>");
            }
            let line = self.points(curve.iter().map(|(time, spread)| (*time, spread.mean)));
            if !line.is_empty() {
                let _ = writeln!(svg, "<path d=\"M{line}\" stroke-linejoin=\"round\" {}/>", stroke(number));
            }
        }
        svg
    }

    fn draw_axes(&self, svg: &mut String) {
        let decimals = if self.step < 1.0 { (-self.step.log10()).ceil().clamp(0.0, 6.0) as usize } else { 0 };
        let line_at = |value: f64| (value / self.step) as i32;
        for line in line_at(self.range.0)..=line_at(self.range.1 + self.step / 2.0) {
            let value = f64::from(line) * self.step;
            let y = self.y(value);
            let color = if value.abs() < self.step / 2.0 { "#666" } else { "#ddd" };
            let _ = writeln!(
                svg,
                "<path d=\"M{LEFT_MARGIN} {y:.1}H{:.1}\" stroke=\"{color}\"/><text x=\"{:.1}\" y=\"{:.1}\" \
                 text-anchor=\"end\">{value:.decimals$}</text>",
                WIDTH - RIGHT_MARGIN,
                LEFT_MARGIN - 8.0,
                y + 4.0
            );
        }
        let step = time_step(self.seconds);
        for tick in 0..=(self.seconds / step + 1e-9) as u32 {
            let time = f64::from(tick) * step;
            let (x, bottom) = (self.x(time), self.top + PANEL_HEIGHT);
            let anchor = if x > WIDTH - RIGHT_MARGIN - 20.0 { "end" } else { "middle" };
            let _ = writeln!(
                svg,
                "<path d=\"M{x:.1} {bottom:.1}v5\" stroke=\"#666\"/><text x=\"{x:.1}\" y=\"{:.1}\" \
                 text-anchor=\"{anchor}\">{}</text>",
                bottom + 18.0,
                if tick == 0 { "0".to_owned() } else { format_seconds(time) }
            );
        }
    }

    fn points(&self, points: impl Iterator<Item = (f64, f64)>) -> String {
        let points: Vec<String> =
            points.map(|(time, value)| format!("{:.1} {:.1}", self.x(time), self.y(value))).collect();
        points.join("L")
    }
}

/// 1, 2 or 5 times a power of ten, not less than a value.
fn round_step(least: f64) -> f64 {
    let least = least.max(1e-6);
    let power = 10_f64.powf(least.log10().floor());
    power * [1.0, 2.0, 5.0].into_iter().find(|factor| factor * power >= least).unwrap_or(10.0)
}

/// The distance of times on the axis, in seconds.
fn time_step(seconds: f64) -> f64 {
    const STEPS: [f64; 13] =
        [1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0, 900.0, 1800.0, 3600.0, 7200.0, 14_400.0, 86_400.0];
    STEPS.into_iter().find(|step| seconds / step <= 8.0).unwrap_or((seconds / 8.0 / 86_400.0).ceil() * 86_400.0)
}

fn escape(text: &str) -> String {
    pagefold_output::text::escape_unprintable(text).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::policies::ComparedPolicy;

    fn runs(saved: &[u64]) -> Vec<SimulatedRun> {
        let sample = |(minute, &pages): (u64, &u64)| Sample {
            time_ms: minute * 60_000,
            saved_pages: pages,
            ksmd_cpu_ns: minute * 30_000_000_000,
            ..Sample::default()
        };
        let samples: Vec<Sample> = (0_u64..).zip(saved).map(sample).collect();
        vec![SimulatedRun { samples, duplicates: 0, huge_pages: 0, scan_wait: None }]
    }

    #[test]
    fn picture_escapes_its_title_and_stays_in_its_frame() {
        let policies = [
            PolicyRuns { policy: ComparedPolicy::FlatOut, runs: runs(&[0, 262_144, 524_288]) },
            PolicyRuns { policy: ComparedPolicy::Default, runs: runs(&[0, 0, 0]) },
        ];
        let svg = draw("a<b & c", 120.0, &policies);
        assert!(svg.contains("a&lt;b &amp; c") && svg.contains(">flat-out<"), "{svg}");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        let line = svg.lines().find(|line| line.contains(COLORS[0]) && line.contains('L')).unwrap();
        let path = line.split('"').nth(1).unwrap();
        for number in path.split(|c: char| !c.is_ascii_digit() && c != '.').filter_map(|text| text.parse::<f64>().ok())
        {
            assert!((0.0..=WIDTH).contains(&number), "{path}");
        }
    }

    #[test]
    fn ksmd_uses_half_a_cpu() {
        let curve = cpu_curve(&runs(&[0, 0, 0]), 120.0);
        assert_eq!(curve.len(), 4);
        assert!(curve.iter().all(|(_, spread)| (spread.mean - 0.5).abs() < 1e-9), "{curve:?}");
    }

    #[test]
    fn grid_starts_at_zero_unless_something_is_lost() {
        let panel = |values: [f64; 2]| {
            let curve = values.map(|mean| (0.0, Spread { mean, least: mean, most: mean })).to_vec();
            let svg = Panel::new("", 0.0, 60.0, std::slice::from_ref(&curve)).draw(&[curve]);
            let labels = svg.split("text-anchor=\"end\">").skip(1);
            labels.map(|label| label.split('<').next().unwrap().to_owned()).collect::<Vec<String>>()
        };
        assert_eq!(panel([0.0, 10.0]), ["0", "2", "4", "6", "8", "10", "60 s"]);
        assert_eq!(panel([-0.5, 9.5]), ["0", "2", "4", "6", "8", "10", "60 s"]);
        assert_eq!(panel([-6.0, 4.0]), ["-6", "-4", "-2", "0", "2", "4", "60 s"]);
    }

    #[test]
    fn steps_are_round() {
        assert_eq!(
            [0.03, 1.0, 1.1, 3.0, 7.0].map(round_step).map(|step| (step * 100.0).round()),
            [5.0, 100.0, 200.0, 500.0, 1000.0]
        );
        assert_eq!([100.0, 5400.0, 21_600.0, 86_400.0].map(time_step), [30.0, 900.0, 3600.0, 14_400.0]);
    }
}
