//! A status as metrics, for Prometheus and what reads its format.
//!
//! Two formats that differ in a few words: OpenMetrics 1.0 tells units and ends with `# EOF`, and its metadata names a
//! counter without `_total`; the older text format of Prometheus (0.0.4) is what tools without content negotiation,
//! such as `promtool check metrics`, understand. Names are `pagefold_`, what is counted, and the base unit.
//!
//! How many series there can be is bounded whatever the host holds: [`MAX_NAMED_SERIES`] of each kind, the biggest, are named and
//! the rest is summed up as `others`. Members of the same kind, name and domain are one series. A figure that is absent
//! from the status has no sample, so that 0 always means 0.

mod families;

use pagefold_daemon::wire::StatusReport;
use pagefold_output::text::escape_unprintable;
use std::fmt::{self, Write as _};

/// Members, workloads, cgroups, trust domains and reasons that have series of their own, of each at most.
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
    /// What a Content-Type field calls it.
    pub fn media_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// All that a status tells, as metrics.
pub fn render_metrics(status: &StatusReport, format: MetricsFormat) -> String {
    let mut exposition = Exposition { format, text: String::new() };
    families::write_status(status, &mut exposition);
    if format == MetricsFormat::OpenMetrics {
        exposition.text.push_str("# EOF\n");
    }
    exposition.text
}

/// What a family of metrics counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MetricKind {
    /// What goes up and down.
    Gauge,
    /// What only goes up.
    Counter,
}

/// A family of metrics: samples that differ in labels.
struct MetricFamily<'a> {
    kind: MetricKind,
    /// Without `_total`.
    name: &'static str,
    help: &'static str,
    samples: Vec<MetricSample<'a>>,
}

/// Names and values.
type Labels<'a> = Vec<(&'static str, &'a str)>;

/// A value with its labels.
type MetricSample<'a> = (Labels<'a>, f64);

/// The base units, by which names end.
const BASE_UNITS: [&str; 4] = ["bytes", "seconds", "ratio", "pages"];

/// A text in the making.
struct Exposition {
    format: MetricsFormat,
    text: String,
}

impl Exposition {
    /// A value without labels, if there is one.
    fn add_gauge(&mut self, name: &'static str, help: &'static str, value: Option<impl MetricValue>) {
        self.add_scalar(MetricKind::Gauge, name, help, value);
    }

    /// The same of a counter.
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

    /// A family; nothing if it has no sample.
    fn add_family(&mut self, family: &MetricFamily) {
        self.write_family(family).expect("a string takes all that is written");
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
                let before = if i == 0 { '{' } else { ',' };
                write!(text, "{before}{label}=\"{}\"", EscapedLabel(value))?;
            }
            writeln!(text, "{} {value}", if labels.is_empty() { "" } else { "}" })?;
        }
        Ok(())
    }
}

/// A figure of a status as a value.
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

/// The value of a label. Names are chosen by processes, and a terminal shows what `curl` gets: characters that steer it
/// are written as escapes.
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
