//! The result of a comparison of policies as text.

use crate::decide::tuning::SHARE_OF_90_PERCENT;
use crate::wire::comparison::{ComparedPolicyReport, SimCompareReport, SpreadReport, TimeToShareReport};
use pagefold_output::text::{TextStyle, format_bytes, format_net, format_number};

/// Columns of savings over time.
const SHOWN_TIMES: usize = 6;

/// The columns of what policies save, before the last one.
pub(super) const SAVINGS_HEADINGS: [&str; 7] =
    ["policy", ">saved at the end", ">saved, GiB*h", ">CPUs", ">50 % after", ">90 % after", ">99 % after"];

/// The columns of the range of figures.
pub(super) const RANGE_HEADINGS: [&str; 6] =
    ["policy", ">saved at the end", ">saved, GiB*h", ">CPUs", ">90 % after", ">COW breaks"];

/// What each policy saved and cost.
#[must_use]
pub fn render_comparison(report: &SimCompareReport, style: TextStyle) -> String {
    let mut text = style.format_paragraph(
        &format!(
            "{}: {}. A model of Linux {} with {} and {} CPUs, for {}; {}.",
            report.scenario,
            report.description,
            report.kernel,
            format_bytes(report.memory_bytes),
            report.cpus,
            format_seconds(report.seconds),
            match report.seeds.len() {
                1 => format!("seed {}", report.seeds[0]),
                seeds => format!("means of {seeds} seeds"),
            }
        ),
        0,
    );
    text.push('\n');
    text += &savings_table(report, style);
    text += &style.format_heading("Side effects");
    text += &effects_table(report, style);
    if report.seeds.len() > 1 {
        text += &style.format_heading("Range over the seeds");
        text += &range_table(report, style);
    }
    text += &style.format_heading("Saved over time, with the first seed");
    text += &time_table(report, style);
    text.push('\n');
    text + &style.format_paragraph(&notes(report), 0)
}

fn savings_table(report: &SimCompareReport, style: TextStyle) -> String {
    let mut table = style.new_table(&[&SAVINGS_HEADINGS[..], &[">scans"]].concat());
    for policy in &report.policies {
        let mut row = vec![
            policy.policy.clone(),
            format_signed_bytes(policy.saved_bytes.mean),
            format_gib_hours(policy.saved_gib_hours.mean),
            format!("{:.3}", policy.cores.mean),
        ];
        row.extend(policy.times.iter().map(|time| show_time(time, report.seeds.len())));
        row.push(format_count(policy.full_scans.mean));
        table.add_row(row);
    }
    style.render_table(&table)
}

fn effects_table(report: &SimCompareReport, style: TextStyle) -> String {
    let mut table = style.new_table(&[
        "policy",
        ">COW breaks",
        ">huge pages split",
        ">duplicates not merged",
        ">memory missing at worst",
    ]);
    for policy in &report.policies {
        table.add_row([
            policy.policy.clone(),
            format_count(policy.cow_breaks.mean),
            format_count(policy.huge_pages_split.mean),
            format_count(policy.unmerged_duplicate_pages.mean),
            format_signed_bytes(policy.missing_bytes.mean),
        ]);
    }
    style.render_table(&table)
}

fn time_table(report: &SimCompareReport, style: TextStyle) -> String {
    let times: Vec<f64> = (1..=SHOWN_TIMES).map(|step| report.seconds * step as f64 / SHOWN_TIMES as f64).collect();
    let headings: Vec<String> = times.iter().map(|time| format!(">{}", format_seconds(*time))).collect();
    let headings: Vec<&str> = std::iter::once("policy").chain(headings.iter().map(String::as_str)).collect();
    let mut table = style.new_table(&headings);
    for policy in &report.policies {
        let saved = times.iter().map(|time| format_net(saved_at(policy, *time)));
        table.add_row(std::iter::once(policy.policy.clone()).chain(saved));
    }
    style.render_table(&table)
}

/// Savings of the sample at or before a time.
fn saved_at(policy: &ComparedPolicyReport, seconds: f64) -> i64 {
    let before = policy.samples.iter().take_while(|sample| sample.seconds <= seconds + 1e-6);
    before.last().map_or(0, |sample| sample.saved_bytes)
}

fn notes(report: &SimCompareReport) -> String {
    let huge_pages = match report.huge_pages.mean.round() {
        0.0 => String::new(),
        huge_pages => format!(" The machines had {} huge pages.", format_count(huge_pages)),
    };
    format!(
        "Saved is less ksmd's metadata. {} Shares are of the {} of duplicates that the host has at the end, and a time \
         without a value was not reached.{huge_pages}",
        describe_cpus(report.policies.iter().map(|policy| (&*policy.policy, policy.pagefold_cores.mean))),
        format_signed_bytes(report.duplicate_bytes.mean)
    )
}

/// Which threads the column of CPUs includes. Policies come with the CPUs that Pagefold's daemon used.
pub(super) fn describe_cpus<'p>(policies: impl Iterator<Item = (&'p str, f64)>) -> String {
    let with_daemon = policies.filter(|&(_, cores)| cores > 0.0);
    let daemons: Vec<String> = with_daemon.map(|(policy, cores)| format!("{cores:.3} with {policy}")).collect();
    if daemons.is_empty() {
        return "CPUs are those of ksmd.".to_owned();
    }
    format!("CPUs are those of ksmd, and of pagefold: {}.", daemons.join(", "))
}

fn range_table(report: &SimCompareReport, style: TextStyle) -> String {
    let mut table = style.new_table(&RANGE_HEADINGS);
    for policy in &report.policies {
        let time = policy.times.get(SHARE_OF_90_PERCENT).and_then(|time| time.seconds);
        table.add_row([
            policy.policy.clone(),
            show_range(&policy.saved_bytes, format_signed_bytes),
            show_range(&policy.saved_gib_hours, format_gib_hours),
            show_range(&policy.cores, |value| format!("{value:.3}")),
            time.map_or_else(|| "-".to_owned(), |seconds| show_range(&seconds, format_seconds)),
            show_range(&policy.cow_breaks, format_count),
        ]);
    }
    style.render_table(&table)
}

/// The least and the largest value, or the one that both are.
fn show_range(spread: &SpreadReport, format: impl Fn(f64) -> String) -> String {
    let [least, most] = [spread.least, spread.most].map(&format);
    if least == most { least } else { format!("{least} to {most}") }
}

fn show_time(time: &TimeToShareReport, seeds: usize) -> String {
    let Some(seconds) = &time.seconds else { return "-".to_owned() };
    let shown = format_seconds(seconds.mean);
    if time.runs < seeds { format!("{shown}, {} of {seeds}", time.runs) } else { shown }
}

fn format_count(value: f64) -> String {
    format_number(value.round().max(0.0) as u64)
}

/// GiB times hours: small figures with more digits.
pub(super) fn format_gib_hours(value: f64) -> String {
    if value.abs() < 10.0 { format!("{value:.3}") } else { format!("{value:.1}") }
}

pub(super) fn format_signed_bytes(value: f64) -> String {
    if value < 0.0 { format_net(value.round() as i64) } else { format_bytes(value.round() as u64) }
}

/// A time such as `1 h 30 min`, `12 min` or `45 s`.
#[must_use]
pub fn format_seconds(seconds: f64) -> String {
    if seconds < 100.0 {
        return format!("{seconds:.0} s");
    }
    let minutes = (seconds / 60.0).round() as u64;
    match (minutes / 60, minutes % 60) {
        (0, minutes) => format!("{minutes} min"),
        (hours, 0) => format!("{hours} h"),
        (hours, minutes) => format!("{hours} h {minutes} min"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_short() {
        let check = |seconds, expected| assert_eq!(format_seconds(seconds), expected);
        check(0.0, "0 s");
        check(99.4, "99 s");
        check(130.0, "2 min");
        check(5400.0, "1 h 30 min");
        check(21_600.0, "6 h");
    }

    #[test]
    fn a_range_is_shown_where_values_differ() {
        let spread = |least, most| SpreadReport { mean: 2.0, least, most };
        assert_eq!(show_range(&spread(1.0, 3.0), format_count), "1 to 3");
        assert_eq!(show_range(&spread(2.0, 2.0), format_count), "2");
    }
}
