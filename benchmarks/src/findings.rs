//! The findings of a section: tables, targets that are met or missed, and every sample.

use pagefold_ab::decide::analysis::{AnalysisOptions, estimate_effect};
use std::fmt::{self, Write as _};

/// The findings of a section.
#[derive(Debug, Default)]
pub struct Findings {
    /// Tables for readers.
    pub tables: Vec<MarkdownTable>,
    /// The claims, and whether they hold.
    pub checks: Vec<ThresholdCheck>,
    /// Measured claims that are reported but not judged.
    pub unjudged: Vec<String>,
    /// The header and the lines of the samples file.
    pub samples: Vec<String>,
}

/// A table in Markdown.
#[derive(Debug)]
pub struct MarkdownTable {
    /// The title above the table.
    pub title: String,
    /// Names of the columns.
    pub column_names: Vec<String>,
    /// How many of the first columns are text and left-aligned; the others are figures.
    pub text_columns: usize,
    /// The rows, with one cell for each column.
    pub rows: Vec<Vec<String>>,
    /// Notes below the table.
    pub notes: Vec<String>,
}

/// A claim with its target.
#[derive(Debug)]
pub struct ThresholdCheck {
    /// The claim.
    pub claim: String,
    /// The measured value, as text.
    pub measured: String,
    /// Whether the claim holds.
    pub met: bool,
}

impl MarkdownTable {
    /// An empty table.
    pub fn new(title: impl Into<String>, head: &[&str]) -> Self {
        let head = head.iter().map(|&name| name.to_owned()).collect();
        Self { title: title.into(), column_names: head, text_columns: 1, rows: Vec::new(), notes: Vec::new() }
    }
}

impl fmt::Display for MarkdownTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}:\n", self.title)?;
        let lines = || std::iter::once(&self.column_names).chain(&self.rows);
        let widths: Vec<usize> = (0..self.column_names.len())
            .map(|column| lines().map(|line| line[column].chars().count()).max().unwrap_or(0).max(3))
            .collect();
        for (i, line) in lines().enumerate() {
            for (column, (cell, &width)) in line.iter().zip(&widths).enumerate() {
                if column < self.text_columns {
                    write!(f, "| {cell:<width$} ")?
                } else {
                    write!(f, "| {cell:>width$} ")?
                }
            }
            f.write_str("|\n")?;
            if i == 0 {
                for (column, width) in widths.iter().enumerate() {
                    let rule = "-".repeat(width + 1);
                    if column < self.text_columns { write!(f, "|{rule}-")? } else { write!(f, "|{rule}:")? }
                }
                f.write_str("|\n")?;
            }
        }
        self.notes.iter().try_for_each(|note| write!(f, "\n{note}\n"))
    }
}

impl Findings {
    /// Empty findings, whose samples have these columns.
    pub fn new(columns: &str) -> Self {
        Self { samples: vec![columns.to_owned()], ..Self::default() }
    }

    /// The findings as Markdown under a heading. Without `is_judged`, as in a quick run, targets get no verdict.
    pub fn to_markdown(&self, name: &str, is_judged: bool) -> String {
        let mut text = format!("## {name}\n");
        for table in &self.tables {
            write!(text, "\n{table}").expect("writing to a string does not fail");
        }
        if !self.checks.is_empty() || !self.unjudged.is_empty() {
            text.push('\n');
        }
        for ThresholdCheck { claim, measured, met } in &self.checks {
            let verdict = match (is_judged, met) {
                (false, _) => "not judged",
                (true, true) => "met",
                (true, false) => "MISSED",
            };
            writeln!(text, "- {verdict}: {claim}: {measured}").expect("writing to a string does not fail");
        }
        for line in &self.unjudged {
            writeln!(text, "- {line}").expect("writing to a string does not fail");
        }
        text
    }
}

/// Median, minimum and maximum of samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleSpread {
    /// The median; of an even number the mean of the middle two.
    pub median: f64,
    /// The smallest sample.
    pub min: f64,
    /// The largest sample.
    pub max: f64,
}

impl SampleSpread {
    /// The spread of at least one sample.
    ///
    /// # Panics
    /// Without samples.
    pub fn from_samples(samples: impl IntoIterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = samples.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let (low, high) = (sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]);
        Self { median: f64::midpoint(low, high), min: sorted[0], max: sorted[sorted.len() - 1] }
    }

    /// As percentages: `91.3 % (90.8 to 92.0)`.
    pub fn format_percent(self) -> String {
        format!("{:.1} % ({:.1} to {:.1})", self.median * 100.0, self.min * 100.0, self.max * 100.0)
    }
}

/// The ratio of two variants that ran in turns, by the analysis of `pagefold ab` with a round as a block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PairedRatio {
    /// The geometric mean of the ratios of the rounds.
    pub ratio: f64,
    /// Its 95 % interval; `None` for one round, or if a ratio is 0 or infinite.
    pub interval: Option<(f64, f64)>,
}

impl PairedRatio {
    /// The ratio from that of each round. `None` without rounds. A ratio of 0 makes the mean 0.
    pub fn from_rounds(ratios: impl IntoIterator<Item = f64>) -> Option<Self> {
        let log_ratios: Vec<f64> = ratios.into_iter().map(f64::ln).collect();
        let rounds = log_ratios.len();
        if log_ratios.iter().any(|log_ratio| log_ratio.is_infinite()) {
            return Some(Self { ratio: log_ratios.iter().sum::<f64>().exp(), interval: None });
        }
        let options = AnalysisOptions::new(Vec::new(), 0);
        let estimate = (rounds > 0).then(|| estimate_effect(log_ratios, &options, options.control_goal()))?;
        let interval = (rounds > 1).then_some((estimate.interval.low, estimate.interval.high));
        Some(Self { ratio: estimate.ratio, interval })
    }

    /// As percentages: `91.3 % (90.8 to 92.0)`.
    pub fn format_percent(self) -> String {
        Self::format_share(self.ratio, self.interval)
    }

    /// By how much the ratio exceeds 1.
    pub fn increase(self) -> f64 {
        self.ratio - 1.0
    }

    /// By how much the ratio exceeds 1, as percentages: `2.8 % (1.1 to 3.9)`.
    pub fn format_increase(self) -> String {
        Self::format_share(self.increase(), self.interval.map(|(low, high)| (low - 1.0, high - 1.0)))
    }

    /// By how much the ratio is below 1.
    pub fn decrease(self) -> f64 {
        1.0 - self.ratio
    }

    /// By how much the ratio is below 1, as percentages: `9.4 % (8.9 to 9.9)`.
    pub fn format_decrease(self) -> String {
        Self::format_share(self.decrease(), self.interval.map(|(low, high)| (1.0 - high, 1.0 - low)))
    }

    fn format_share(share: f64, interval: Option<(f64, f64)>) -> String {
        let interval = interval.map(|(low, high)| format!(" ({:.1} to {:.1})", low * 100.0, high * 100.0));
        format!("{:.1} %{}", share * 100.0, interval.unwrap_or_default())
    }

    /// As a factor: `1.93 (1.90 to 1.95)`.
    pub fn format_factor(self) -> String {
        self.format_factor_to(2)
    }

    /// As a factor with this number of digits after the point.
    pub fn format_factor_to(self, digits: usize) -> String {
        let interval = self.interval.map(|(low, high)| format!(" ({low:.digits$} to {high:.digits$})"));
        format!("{:.digits$}{}", self.ratio, interval.unwrap_or_default())
    }
}

/// A straight line fitted by least squares.
#[derive(Clone, Copy, Debug)]
pub struct LinearFit {
    /// Rise per unit of x.
    pub slope: f64,
    /// Value at 0.
    pub intercept: f64,
    /// Coefficient of determination; 1 for a perfect line.
    pub r_squared: f64,
}

impl LinearFit {
    /// Fit a line to at least two points of different x.
    pub fn from_points(points: &[(f64, f64)]) -> Self {
        let count = points.len() as f64;
        let mean = |f: &dyn Fn(&(f64, f64)) -> f64| points.iter().map(f).sum::<f64>() / count;
        let (x, y) = (mean(&|p| p.0), mean(&|p| p.1));
        let (xx, xy, yy) =
            (mean(&|p| (p.0 - x).powi(2)), mean(&|p| (p.0 - x) * (p.1 - y)), mean(&|p| (p.1 - y).powi(2)));
        let slope = xy / xx;
        Self { slope, intercept: y - slope * x, r_squared: xy * xy / (xx * yy) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_is_the_middle_sample() {
        assert_eq!(SampleSpread::from_samples([3.0, 1.0, 2.0]), SampleSpread { median: 2.0, min: 1.0, max: 3.0 });
        assert_eq!(SampleSpread::from_samples([4.0, 1.0, 2.0, 3.0]).median, 2.5);
        assert_eq!(SampleSpread::from_samples([0.913]).format_percent(), "91.3 % (91.3 to 91.3)");
    }

    #[test]
    fn interval_of_a_ratio_uses_student_t() {
        // Logarithms 0 and 1: mean 1/2, deviation of the mean 1/2. The quantile 0.975 for one degree of freedom is
        // tan(0.475 pi).
        let paired = PairedRatio::from_rounds([1.0, std::f64::consts::E]).unwrap();
        let (low, high) = paired.interval.unwrap();
        let margin = (0.475 * std::f64::consts::PI).tan() / 2.0;
        assert!((paired.ratio.ln() - 0.5).abs() < 1e-12);
        assert!((low.ln() - (0.5 - margin)).abs() < 1e-9 && (high.ln() - (0.5 + margin)).abs() < 1e-9);
    }

    #[test]
    fn few_rounds_have_no_interval() {
        let once = PairedRatio::from_rounds([2.0]).unwrap();
        assert_eq!((once.format_factor(), once.format_percent()), ("2.00".to_owned(), "200.0 %".to_owned()));
        assert_eq!(PairedRatio::from_rounds([]), None);
        let never = PairedRatio::from_rounds([2.0, 0.0, 3.0]).unwrap();
        assert_eq!(never, PairedRatio { ratio: 0.0, interval: None });
    }

    #[test]
    fn increase_and_decrease_are_relative_to_one() {
        let paired = PairedRatio { ratio: 0.9, interval: Some((0.85, 0.95)) };
        assert_eq!(paired.format_decrease(), "10.0 % (5.0 to 15.0)");
        assert_eq!(paired.format_increase(), "-10.0 % (-15.0 to -5.0)");
        assert!((paired.increase() + 0.1).abs() < 1e-12 && (paired.decrease() - 0.1).abs() < 1e-12);
    }

    #[test]
    fn linear_fit_recovers_a_line() {
        let line = LinearFit::from_points(&[(1.0, 5.0), (2.0, 7.0), (4.0, 11.0)]);
        assert!((line.slope - 2.0).abs() < 1e-12 && (line.intercept - 3.0).abs() < 1e-12);
        assert!((line.r_squared - 1.0).abs() < 1e-12);
        assert!(LinearFit::from_points(&[(0.0, 0.0), (1.0, 5.0), (2.0, 0.0)]).r_squared < 1e-12);
    }

    #[test]
    fn markdown_table_columns_are_aligned() {
        let mut table = MarkdownTable::new("T", &["name", "n"]);
        table.rows.push(vec!["a".into(), "1000".into()]);
        table.notes.push("Said.".into());
        assert_eq!(table.to_string(), "T:\n\n| name |    n |\n|------|-----:|\n| a    | 1000 |\n\nSaid.\n");
    }
}
