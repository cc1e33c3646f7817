//! A recording of the scheduler, as text for the terminal.

use crate::wire::record::VcpuRecordReport;
use pagefold_base::Bytes;
use pagefold_output::text::{TextStyle, escape_unprintable, format_number};

/// Renders the report.
pub fn render(report: &VcpuRecordReport, style: TextStyle) -> String {
    let cpus = if report.cpus.len() == 1 { "1 CPU".to_owned() } else { format!("{} CPUs", report.cpus.len()) };
    let mut text = format!(
        "Recorded {} events of {cpus} in {:.3} s into {} ({}).",
        format_number(report.events),
        report.seconds,
        escape_unprintable(&report.file),
        Bytes(report.bytes)
    );
    if report.lost_events > 0 {
        text.push_str(&format!(
            " {} more events were lost, because they did not fit into the buffers: record again with a larger --buffer.",
            format_number(report.lost_events)
        ));
    }
    style.format_paragraph(&text, 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recorder::ScheduleRecordingSummary;

    #[test]
    fn lost_events_are_told_with_a_remedy() {
        let summary = ScheduleRecordingSummary {
            cpus: vec![0],
            events: 12_345,
            lost_events: 67,
            ..ScheduleRecordingSummary::default()
        };
        let report = VcpuRecordReport::new("a\u{1b}.data".to_owned(), 2048, summary);
        let text = render(&report, TextStyle::default()).split_whitespace().collect::<Vec<_>>().join(" ");
        for expected in
            ["12,345 events of 1 CPU", "a\\u{1b}.data (2.00 KiB)", "67 more events were lost", "larger --buffer"]
        {
            assert!(text.contains(expected), "{expected}: {text}");
        }
    }
}
