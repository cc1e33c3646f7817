//! All samples as rows of comma-separated values (RFC 4180, lines end with LF): bytes and percent, times in seconds
//! since 1970. Unknown values are empty.

use super::record::HistorySpan;
use super::series::{self, SeriesPoint};
use std::borrow::Cow;

/// The column names.
pub const CSV_COLUMNS: [&str; 12] = [
    "side",
    "host",
    "time",
    "saved_gross",
    "saved_net",
    "total",
    "available",
    "keep_available",
    "ksmd_percent",
    "pagefold_percent",
    "bound_percent",
    "members",
];

/// All samples of all sides.
pub fn render_csv(sides: &[(String, HistorySpan)]) -> String {
    let mut text = CSV_COLUMNS.join(",") + "\n";
    for (name, kept) in sides {
        let who = format!("{},{}", quote_field(name), quote_field(&kept.host));
        for point in series::points_from_samples(&kept.samples) {
            text.push_str(&render_row(&who, &point));
        }
    }
    text
}

fn render_row(who: &str, point: &SeriesPoint) -> String {
    let whole = |value: Option<u64>| value.map_or_else(String::new, |value| value.to_string());
    let part = |value: Option<f64>| value.map_or_else(String::new, |value| format!("{value:.4}"));
    let fields = [
        format!("{:.3}", point.time),
        whole(point.saved_gross),
        point.saved_net.map_or_else(String::new, |value| value.to_string()),
        whole(point.total),
        whole(point.available),
        whole(point.keep_available),
        part(point.ksmd_percent),
        part(point.pagefold_percent),
        format!("{}", point.bound_percent),
        point.members.to_string(),
    ];
    format!("{who},{}\n", fields.join(","))
}

fn quote_field(text: &str) -> Cow<'_, str> {
    if text.contains(['"', ',', '\n', '\r']) {
        return format!("\"{}\"", text.replace('"', "\"\"")).into();
    }
    text.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::HistorySample;

    #[test]
    fn absent_is_empty_and_commas_are_quoted() {
        let sample = HistorySample {
            time: 1.5,
            run_id: 1,
            saved_net: Some(-7),
            bound_percent: 10.0,
            tracked_processes: 3,
            ..HistorySample::default()
        };
        let kept = HistorySpan { host: "a \"b\", c".to_owned(), samples: vec![sample], ..HistorySpan::default() };
        let text = render_csv(&[("plain".to_owned(), kept)]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0].split(',').count(), CSV_COLUMNS.len());
        assert_eq!(lines[1], "plain,\"a \"\"b\"\", c\",1.500,,-7,,,,,,10,3");
    }
}
