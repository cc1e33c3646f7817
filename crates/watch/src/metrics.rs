//! A status as metrics, for Prometheus and compatible tools.
//!
//! The two formats differ slightly. OpenMetrics 1.0 has units and ends with `# EOF`, and its metadata names a counter
//! without `_total`. Tools without content negotiation, such as `promtool check metrics`, read the older text format of
//! Prometheus (0.0.4). Names consist of `pagefold_`, the counted object, and the base unit.
//!
//! The number of series is limited for any host: the [`MAX_NAMED_SERIES`] largest of each kind are named and the rest
//! is summed up as `others`. Tracked processes of the same kind, name and domain are one series. A value that is absent
//! from the status has no sample, so 0 always means 0.

mod families;

use pagefold_daemon::wire::StatusReport;
use pagefold_output::text::escape_unprintable;
use std::fmt::{self, Write as _};

/// The maximum number of named series for tracked processes, workloads, cgroups, trust domains and reasons, each.
pub const MAX_NAMED_SERIES: usize = 50;

/// The format of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricsFormat {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// The text format 0.0.4 of Prometheus.
    Prometheus,
}

impl MetricsFormat {
    /// Its name in a Content-Type field.
    pub fn media_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// All figures of a status, as metrics.
pub fn render_metrics(status: &StatusReport, format: MetricsFormat) -> String {
    let mut exposition = Exposition { format, text: String::new() };
    families::write_status(status, &mut exposition);
    if format == MetricsFormat::OpenMetrics {
        exposition.text.push_str("# EOF\n");
    }
    exposition.text
}

/// The kind of a metric family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MetricKind {
    /// A value that can rise and fall.
    Gauge,
    /// A value that only rises.
    Counter,
}

/// A metric family: samples that differ in labels.
struct MetricFamily<'a> {
    kind: MetricKind,
    /// The name without `_total`.
    name: &'static str,
    help: &'static str,
    samples: Vec<MetricSample<'a>>,
}

/// Names and values.
type Labels<'a> = Vec<(&'static str, &'a str)>;

/// A value with its labels.
type MetricSample<'a> = (Labels<'a>, f64);

/// The base units; names end with one of them.
const BASE_UNITS: [&str; 4] = ["bytes", "seconds", "ratio", "pages"];

/// The text output.
struct Exposition {
    format: MetricsFormat,
    text: String,
}

impl Exposition {
    /// Add a gauge without labels, if it has a value.
    fn add_gauge(&mut self, name: &'static str, help: &'static str, value: Option<impl MetricValue>) {
        self.add_scalar(MetricKind::Gauge, name, help, value);
    }

    /// Add a counter without labels, if it has a value.
    fn add_counter(&mut self, name: &'static str, help: &'static str, value: Option<impl MetricValue>) {
        self.add_scalar(MetricKind::Counter, name, help, value);
    }

    fn add_scalar(
        &mut self,
        kind: MetricKind,
        name: &'static str,
        help: &'static str,
        value: Option<impl MetricValue>,
    ) {
        let samples = value.map(|value| (Vec::new(), value.to_f64())).into_iter().collect();
        self.add_family(&MetricFamily { kind, name, help, samples });
    }

    /// Add a family; nothing if it has no sample.
    fn add_family(&mut self, family: &MetricFamily) {
        self.write_family(family).expect("writing to a string never fails");
    }

    fn write_family(&mut self, family: &MetricFamily) -> fmt::Result {
        let MetricFamily { kind, name, help, samples } = family;
        if samples.is_empty() {
            return Ok(());
        }
        let (kind, suffix) = match kind {
            MetricKind::Gauge => ("gauge", ""),
            MetricKind::Counter => ("counter", "_total"),
        };
        let title = match self.format {
            MetricsFormat::OpenMetrics => "",
            MetricsFormat::Prometheus => suffix,
        };
        let text = &mut self.text;
        writeln!(text, "# HELP {name}{title} {help}")?;
        writeln!(text, "# TYPE {name}{title} {kind}")?;
        let unit = BASE_UNITS.iter().find(|unit| name.ends_with(**unit));
        if let (Some(unit), MetricsFormat::OpenMetrics) = (unit, self.format) {
            writeln!(text, "# UNIT {name} {unit}")?;
        }
        for (labels, value) in samples {
            write!(text, "{name}{suffix}")?;
            for (i, (label, value)) in labels.iter().enumerate() {
                let separator = if i == 0 { '{' } else { ',' };
                write!(text, "{separator}{label}=\"{}\"", EscapedLabel(value))?;
            }
            writeln!(text, "{} {value}", if labels.is_empty() { "" } else { "}" })?;
        }
        Ok(())
    }
}

/// A figure of a status that can be a metric value.
trait MetricValue {
    /// The value, exact below 2^53.
    fn to_f64(self) -> f64;
}

impl MetricValue for u64 {
    fn to_f64(self) -> f64 {
        self as f64
    }
}

impl MetricValue for i64 {
    fn to_f64(self) -> f64 {
        self as f64
    }
}

impl MetricValue for f64 {
    fn to_f64(self) -> f64 {
        self
    }
}

/// A label value. Processes choose their names, and a terminal may show the output of `curl`. So terminal control
/// characters are written as escapes.
struct EscapedLabel<'a>(&'a str);

impl fmt::Display for EscapedLabel<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            match c {
                '\\' => f.write_str("\\\\")?,
                '"' => f.write_str("\\\"")?,
                '\n' => f.write_str("\\n")?,
                ' '..='~' => f.write_char(c)?,
                other => f.write_str(&escape_unprintable(other.encode_utf8(&mut [0; 4])).replace('\\', "\\\\"))?,
            }
        }
        Ok(())
    }
}
