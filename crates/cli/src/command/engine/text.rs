//! Domains of the user-space engine, as text.

use crate::command::engine::wire::{
    EngineDomainReport, EngineMemberReport, EngineRegionReport, EngineReport, EngineUsageReport,
};
use pagefold_base::Bytes;
use pagefold_output::text::{TextStyle, cut_end, escape_unprintable, format_bytes, format_net, format_number};
use std::cmp::Reverse;

/// All domains, one line each.
pub fn render_list(report: &EngineReport, style: TextStyle) -> String {
    let mut text = String::new();
    if report.domains.is_empty() {
        text.push_str("There is no domain: the first program that joins one creates it.\n");
    } else {
        let mut headings = vec!["domain", ">uid", ">members"];
        headings.extend(USAGE_HEADINGS);
        headings.extend([">store", ">overhead", ">net"]);
        let mut table = style.new_table(&headings);
        for domain in &report.domains {
            let mut cells = vec![cut_end(&domain.name, 64), domain.uid.to_string(), domain.members.len().to_string()];
            cells.extend(usage_cells(&domain.usage));
            cells.extend([format_bytes(domain.stored), format_bytes(domain.overhead), format_known_net(domain.net)]);
            table.add_row(cells);
        }
        text.push_str(&style.render_table(&table));
        report.domains.iter().for_each(|domain| text.push_str(&render_uncounted_members(domain, style)));
    }
    text + &render_unreadable(report, style)
}

/// Each domain with its members and their regions, at most `max_rows` of each.
pub fn render_details(report: &EngineReport, max_rows: usize, style: TextStyle) -> String {
    let domains: Vec<String> = report.domains.iter().map(|domain| render_domain(domain, max_rows, style)).collect();
    domains.join("\n") + &render_unreadable(report, style)
}

fn render_domain(domain: &EngineDomainReport, max_rows: usize, style: TextStyle) -> String {
    let members = domain.members.len() as u64;
    let mut text = style.format_paragraph(
        &format!(
            "Domain {} of user {}: {} member{}, {} adopted; saves {}, net {} after {} of overhead ({} index).",
            escape_unprintable(&domain.name),
            domain.uid,
            format_number(members),
            if members == 1 { "" } else { "s" },
            Bytes(domain.usage.adopted),
            format_net(domain.usage.saved),
            format_net(domain.net),
            Bytes(domain.overhead),
            Bytes(domain.index),
        ),
        0,
    );
    let sharing = domain.sharing.map_or(String::new(), |sharing| format!(": {sharing:.2} pages share one"));
    text.push_str(&style.format_paragraph(
        &format!(
            "Store: {} pages, {}; mapped by {} pages of members{sharing}.",
            format_number(domain.stored_pages),
            Bytes(domain.stored),
            format_number(domain.references_pages),
        ),
        0,
    ));
    if !domain.members.is_empty() {
        text.push_str(&style.format_heading("Members"));
        text.push_str(&render_members(&domain.members, max_rows, style));
        text.push_str(&style.format_heading("Regions"));
        text.push_str(&render_regions(&domain.members, max_rows, style));
    }
    text + &render_uncounted_members(domain, style)
}

/// The members whose figures are in no sum.
fn render_uncounted_members(domain: &EngineDomainReport, style: TextStyle) -> String {
    let mut text = String::new();
    let mut add_note = |count: u64, one: &str, many: &str| {
        if count > 0 {
            let note = format!(
                "Not counted in {}: {} {}",
                escape_unprintable(&domain.name),
                format_number(count),
                if count == 1 { one } else { many }
            );
            text.push_str(&style.format_paragraph(&note, 2));
        }
    };
    add_note(
        domain.ended_members,
        "member that has ended; the next merge removes its record.",
        "members that have ended; the next merge removes their records.",
    );
    add_note(
        domain.unreadable_members,
        "record of a member that could not be read or is invalid.",
        "records of members that could not be read or are invalid.",
    );
    text
}

const USAGE_HEADINGS: [&str; 5] = [">adopted", ">merged", ">zeros", ">rewritten", ">saved"];

fn usage_cells(usage: &EngineUsageReport) -> [String; 5] {
    [
        format_bytes(usage.adopted),
        format_bytes(usage.merged),
        format_bytes(usage.zeros),
        format_bytes(usage.rewritten),
        format_known_net(usage.saved),
    ]
}

fn format_known_net(value: i64) -> String {
    if value == 0 { "·".to_owned() } else { format_net(value) }
}

fn render_members(members: &[EngineMemberReport], max_rows: usize, style: TextStyle) -> String {
    let mut headings = vec![">pid", "name"];
    headings.extend(USAGE_HEADINGS);
    headings.extend([">merges", ">time", ">last", ">slowdown", ">bound"]);
    let mut table = style.new_table(&headings);
    let mut largest: Vec<&EngineMemberReport> = members.iter().collect();
    largest.sort_by_key(|member| (Reverse(member.usage.adopted), member.pid));
    for member in largest.iter().take(max_rows) {
        let mut cells = vec![member.pid.to_string(), cut_end(&member.comm, 16)];
        cells.extend(usage_cells(&member.usage));
        cells.extend([
            format_number(member.merges),
            format_seconds(member.merge_seconds),
            member.last_merge_seconds_ago.map_or("never".to_owned(), |ago| format!("{} ago", format_seconds(ago))),
            format_share(member.slowdown),
            member.max_slowdown.map_or("none".to_owned(), format_share),
        ]);
        table.add_row(cells);
    }
    style.render_table(&table) + &render_omitted(members.len(), max_rows)
}

fn render_regions(members: &[EngineMemberReport], max_rows: usize, style: TextStyle) -> String {
    let mut headings = vec![">pid", "addresses"];
    headings.extend(USAGE_HEADINGS);
    let mut table = style.new_table(&headings);
    let mut largest: Vec<(u32, &EngineRegionReport)> =
        members.iter().flat_map(|member| member.regions.iter().map(move |region| (member.pid, region))).collect();
    largest.sort_by_key(|(pid, region)| (Reverse(region.usage.adopted), *pid));
    for (pid, region) in largest.iter().take(max_rows) {
        let mut cells = vec![pid.to_string(), format!("{}-{}", region.start, region.end)];
        cells.extend(usage_cells(&region.usage));
        table.add_row(cells);
    }
    style.render_table(&table) + &render_omitted(largest.len(), max_rows)
}

fn render_omitted(rows: usize, max_rows: usize) -> String {
    if rows <= max_rows {
        String::new()
    } else {
        format!("… and {} more (--top {rows} shows all)\n", rows - max_rows)
    }
}

/// Format seconds with about three digits in a suitable unit.
fn format_seconds(seconds: f64) -> String {
    match seconds {
        seconds if seconds >= 100.0 => format!("{seconds:.0} s"),
        seconds if seconds >= 1.0 => format!("{seconds:.1} s"),
        seconds => format!("{:.1} ms", seconds * 1e3),
    }
}

fn format_share(share: f64) -> String {
    format!("{:.2} %", share * 100.0)
}

fn render_unreadable(report: &EngineReport, style: TextStyle) -> String {
    let line = |directory: &super::wire::UnreadableDirectory| {
        style.format_paragraph(&escape_unprintable(&directory.reason), 2)
    };
    let lines: String = report.unreadable_directories.iter().map(line).collect();
    if lines.is_empty() { lines } else { format!("\nNot seen:\n{lines}") }
}
