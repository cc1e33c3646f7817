//! The page of a campaign: one HTML file without references to others, with its pictures as SVG.

use crate::text::{
    describe_busy_start, describe_control, describe_failed_injection, describe_found, describe_injections,
    describe_smallest_effect, describe_unrestored, describe_verdict, list_unrestored,
};
use crate::wire::{AbReport, EffectEstimateReport, MetricReport};
use pagefold_output::text::escape_unprintable;
use std::fmt::Write;

const WIDTH: f64 = 900.0;
const MARGIN: f64 = 110.0;
const ROW_HEIGHT: f64 = 16.0;
const SERIES_HEIGHT: f64 = 220.0;

const STYLE: &str = "\
:root{color-scheme:light dark}body{font:15px/1.45 system-ui,sans-serif;max-width:960px;margin:2em auto;padding:0 1em}
table{border-collapse:collapse;display:block;margin:1em 0;overflow-x:auto}td,th{padding:.25em .8em;text-align:left;border-bottom:1px solid #8884}
svg{width:100%;height:auto}svg text{font:12px system-ui,sans-serif;fill:currentColor}.axis{stroke:currentColor;opacity:.4}
.a{fill:#3572b0;stroke:#3572b0}.b{fill:#d9702b;stroke:#d9702b}.band{fill:#3572b0;opacity:.18}.mde{stroke:#888;stroke-dasharray:4 3}
code{overflow-wrap:anywhere}";

/// The Content Security Policy of the page: a browser runs no script, loads nothing, and applies only this style. The hash
/// is SHA-256 of [`STYLE`].
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; style-src 'sha256-+3pMwfgWZIINXJOzdj9FlVbF1ZepGEMmDtach7dcYcY='; base-uri 'none'; form-action 'none'";

fn escape(text: &str) -> String {
    escape_unprintable(text).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Renders the page.
#[must_use]
pub fn render(report: &AbReport) -> String {
    let result = &report.result;
    let name = if result.experiment.name.is_empty() { "Experiment" } else { &result.experiment.name };
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{CONTENT_SECURITY_POLICY}\">\n\
         <title>{0}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{0}</h1>\n",
        escape(name)
    );
    for words in &result.experiment.workload {
        let _ = writeln!(page, "<p>Workload: <code>{}</code></p>", escape(&words.join(" ")));
    }
    if !result.settings.is_empty() {
        page.push_str("<table><tr><th>setting<th>A<th>B</tr>\n");
        for (path, [a, b]) in &result.settings {
            let _ = writeln!(page, "<tr><td>/{}<td>{}<td>{}</tr>", escape(path), escape(a), escape(b));
        }
        page.push_str("</table>\n");
    }
    if !report.busy_at_start.is_empty() {
        let _ = writeln!(page, "<p>{}</p>", escape(&describe_busy_start(&report.busy_at_start)));
    }
    if let Some(why) = &result.why_not_analyzed {
        let _ = writeln!(page, "<p>Not analyzed: {}</p>", escape(why));
    }
    if let Some(counter) = &result.counter {
        let moved = if counter.has_moved { "moved" } else { "did not move" };
        let _ = writeln!(
            page,
            "<p>Proof counter {} {moved}: {:.1} in a run under A, {:.1} under B.</p>",
            escape(&counter.counter),
            counter.change_in_a,
            counter.change_in_b
        );
    }
    for (heading, changes) in list_unrestored(&report.unrestored) {
        let _ = writeln!(page, "<p>{heading}:</p>\n<ul>");
        for change in changes {
            let _ = writeln!(page, "<li>{}", escape(&describe_unrestored(change)));
        }
        page.push_str("</ul>\n");
    }
    for line in describe_injections(report) {
        let _ = writeln!(page, "<p>Controls: {line}.</p>");
    }
    for (index, metric) in result.metrics.iter().enumerate() {
        let _ = writeln!(page, "<h2>{}: {}</h2>", escape(&metric.name), escape(&describe_verdict(metric, report)));
        page.push_str(&control_table(metric));
        if let Some(failure) = describe_failed_injection(metric) {
            let _ = writeln!(page, "<p>{}</p>", escape(&failure));
        }
        page.push_str("<h3>Ratio of B to A in each block</h3>\n");
        page.push_str(&difference_picture(&metric.comparison));
        page.push_str("<h3>Interval against the smallest effect that is detected with 80 % probability</h3>\n");
        page.push_str(&interval_picture(metric));
        page.push_str("<h3>Samples of the comparison over time</h3>\n");
        page.push_str(&series_picture(report, index));
    }
    page.push_str(&host_table(report));
    let flagged = report.environment.iter().filter(|block| !block.flags.is_empty());
    let flagged: Vec<String> =
        flagged.map(|block| format!("<li>block {}: {}", block.block, escape(&block.flags.join("; ")))).collect();
    if !flagged.is_empty() {
        let _ = writeln!(page, "<h2>Blocks flagged as noisy</h2>\n<ul>\n{}\n</ul>", flagged.join("\n"));
    }
    page.push_str("</body>\n</html>\n");
    page
}

fn percent(ratio: f64) -> String {
    format!("{:+.2} %", (ratio - 1.0) * 100.0)
}

/// The host at the last start or resumption.
fn host_table(report: &AbReport) -> String {
    let mut table = "<h2>Host</h2>\n<table>\n".to_owned();
    if let Some(host) = report.hosts.last() {
        let fields = [
            ("kernel", host.kernel.clone()),
            ("CPU", host.cpu_model.clone().map(|model| format!("{} x {model}", host.cpus))),
            ("microcode", host.microcode.clone()),
            ("governors", (!host.governors.is_empty()).then(|| host.governors.join(", "))),
            ("program (SHA-256)", host.program_sha256.clone()),
            ("git commit", host.git_commit.clone()),
        ];
        for (name, value) in fields {
            let _ = writeln!(table, "<tr><th>{name}<td>{}</tr>", escape(value.as_deref().unwrap_or("not known")));
        }
    }
    table.push_str("</table>\n");
    table
}

fn control_table(metric: &MetricReport) -> String {
    let mut table =
        "<table><tr><th>blocks<th>number<th>B to A<th>interval<th>p<th>smallest effect detected with 80 % probability<th>found</tr>\n".to_owned();
    let mut row = |name: &str, estimate: &EffectEstimateReport, found: &str| {
        let interval = match estimate.interval {
            [Some(low), Some(high)] => format!("{} to {}", percent(low), percent(high)),
            _ => "unknown".to_owned(),
        };
        let smallest = describe_smallest_effect(estimate);
        let _ = writeln!(
            table,
            "<tr><td>{name}<td>{}<td>{}<td>{interval}<td>{:.4}<td>{smallest}<td>{found}</tr>",
            estimate.blocks,
            percent(estimate.ratio),
            estimate.p_value
        );
    };
    row("A against B", &metric.comparison, "");
    for control in metric.same_arm.iter().chain(&metric.injected) {
        row(&describe_control(control), &control.estimate, describe_found(control));
    }
    table.push_str("</table>\n");
    table
}

/// Maps ratios to the horizontal axis.
fn scale(values: impl Iterator<Item = f64> + Clone) -> impl Fn(f64) -> f64 {
    let (min, max) = (values.clone().fold(1.0, f64::min), values.fold(1.0, f64::max));
    move |value| MARGIN + (value - min) / (max - min).max(1e-9) * (WIDTH - MARGIN - 20.0)
}

fn difference_picture(estimate: &EffectEstimateReport) -> String {
    let [low, high] = estimate.interval.map(|limit| limit.unwrap_or(estimate.ratio));
    let x = scale(estimate.block_ratios.iter().copied().chain([low, high]));
    let height = (estimate.block_ratios.len() as f64 + 2.0) * ROW_HEIGHT;
    let mut svg = format!("<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"ratio of each block\">\n");
    let _ = writeln!(
        svg,
        "<rect class=\"band\" x=\"{:.1}\" width=\"{:.1}\" y=\"0\" height=\"{height}\"/>",
        x(low),
        (x(high) - x(low)).max(1.0)
    );
    let _ = writeln!(svg, "<line class=\"axis\" x1=\"{0:.1}\" x2=\"{0:.1}\" y1=\"0\" y2=\"{height}\"/>", x(1.0));
    for (number, &ratio) in estimate.block_ratios.iter().enumerate() {
        let y = (number as f64 + 1.0) * ROW_HEIGHT;
        let _ = writeln!(svg, "<text x=\"4\" y=\"{:.1}\">block {}</text>", y + 4.0, number + 1);
        let _ = writeln!(
            svg,
            "<circle class=\"b\" cx=\"{:.1}\" cy=\"{y:.1}\" r=\"4\"><title>{}</title></circle>",
            x(ratio),
            percent(ratio)
        );
    }
    svg.push_str("</svg>\n");
    svg
}

fn interval_picture(metric: &MetricReport) -> String {
    let rows: Vec<(String, &EffectEstimateReport)> = std::iter::once(("A against B".to_owned(), &metric.comparison))
        .chain(metric.same_arm.iter().chain(&metric.injected).map(|c| (describe_control(c), &c.estimate)))
        .collect();
    let limits = |estimate: &EffectEstimateReport| {
        let [low, high] = estimate.interval.map(|limit| limit.unwrap_or(estimate.ratio));
        let smallest = estimate.smallest_detectable_percent.unwrap_or(0.0) / 100.0;
        // An effect of this size in either direction has the same logarithm.
        [low, high, (1.0 + smallest).recip(), 1.0 + smallest]
    };
    let all: Vec<f64> = rows.iter().flat_map(|(_, estimate)| limits(estimate)).collect();
    let x = scale(all.iter().copied());
    let height = (rows.len() as f64 + 1.0) * ROW_HEIGHT * 1.6;
    let mut svg = format!("<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"intervals\">\n");
    let _ = writeln!(svg, "<line class=\"axis\" x1=\"{0:.1}\" x2=\"{0:.1}\" y1=\"0\" y2=\"{height}\"/>", x(1.0));
    for (number, (name, estimate)) in rows.iter().enumerate() {
        let y = (number as f64 + 1.0) * ROW_HEIGHT * 1.6;
        let [low, high, below, above] = limits(estimate);
        let _ = writeln!(svg, "<text x=\"4\" y=\"{:.1}\">{name}</text>", y + 4.0);
        let _ = writeln!(
            svg,
            "<line class=\"mde\" x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>",
            x(below),
            x(above)
        );
        let _ = writeln!(
            svg,
            "<line class=\"a\" stroke-width=\"4\" x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>",
            x(low),
            x(high)
        );
        let _ = writeln!(svg, "<circle class=\"b\" cx=\"{:.1}\" cy=\"{y:.1}\" r=\"4\"/>", x(estimate.ratio));
    }
    svg.push_str(
        "</svg>\n<p>Bar: interval. Dashed: the smallest effect that is detected with 80 % probability. Line: no difference.</p>\n",
    );
    svg
}

fn series_picture(report: &AbReport, metric: usize) -> String {
    use crate::record::PlannedKind;
    let runs = report.result.samples.iter().filter(|run| run.kind == PlannedKind::Comparison);
    let points: Vec<(f64, f64, char)> = runs
        .filter_map(|run| {
            let samples = run.samples.get(metric)?;
            let time = report.run_times.iter().find(|time| (time.block, time.position) == (run.block, run.position))?;
            Some((time.unix_seconds, samples.iter().sum::<f64>() / samples.len().max(1) as f64, run.label))
        })
        .collect();
    let range = |value: fn(&(f64, f64, char)) -> f64| {
        let values = points.iter().map(value);
        (values.clone().fold(f64::INFINITY, f64::min), values.fold(f64::NEG_INFINITY, f64::max))
    };
    let ((from, to), (low, high)) = (range(|point| point.0), range(|point| point.1));
    let mut svg =
        format!("<svg viewBox=\"0 0 {WIDTH} {}\" role=\"img\" aria-label=\"samples\">\n", SERIES_HEIGHT + 20.0);
    if !points.is_empty() {
        let y = |value: f64| 10.0 + (high - value) / (high - low).max(1e-12) * (SERIES_HEIGHT - 20.0);
        for value in [low, high] {
            let _ = writeln!(svg, "<text x=\"4\" y=\"{:.1}\">{value:.5}</text>", y(value) + 4.0);
        }
        for (time, value, label) in &points {
            let x = MARGIN + (time - from) / (to - from).max(1e-9) * (WIDTH - MARGIN - 20.0);
            let class = if *label == 'A' { "a" } else { "b" };
            let _ = writeln!(svg, "<circle class=\"{class}\" cx=\"{x:.1}\" cy=\"{:.1}\" r=\"3.5\"/>", y(*value));
        }
    }
    svg.push_str("</svg>\n<p>Blue: A. Orange: B.</p>\n");
    svg
}

#[cfg(test)]
mod tests;
