//! Domains of the user-space engine, for people.

use crate::command::engine::wire::{DomainReport, EngineReport, Holding, MemberReport, RegionReport};
use pagefold_base::Bytes;
use pagefold_output::text::{Style, bytes, cut, net, number, printable};
use std::cmp::Reverse;

/// All domains, a line each.
pub fn list(report: &EngineReport, style: Style) -> String {
    let mut text = String::new();
    if report.domains.is_empty() {
        text.push_str("There is no domain: the first program that joins one makes it.\n");
    } else {
        let mut headings = vec!["domain", ">uid", ">members"];
        headings.extend(HOLDING);
        headings.extend([">store", ">overhead", ">net"]);
        let mut table = style.table(&headings);
        for domain in &report.domains {
            let mut cells = vec![cut(&domain.name, 64), domain.uid.to_string(), domain.members.len().to_string()];
            cells.extend(holding(&domain.holds));
            cells.extend([bytes(domain.stored), bytes(domain.overhead), known_net(domain.net)]);
            table.add_row(cells);
        }
        text.push_str(&style.render(&table));
        report.domains.iter().for_each(|domain| text.push_str(&uncounted(domain, style)));
    }
    text + &not_seen(report, style)
}

/// Each domain with its members and their regions, of which `top` are shown.
pub fn details(report: &EngineReport, top: usize, style: Style) -> String {
    let domains: Vec<String> = report.domains.iter().map(|domain| detail(domain, top, style)).collect();
    domains.join("\n") + &not_seen(report, style)
}

fn detail(domain: &DomainReport, top: usize, style: Style) -> String {
    let members = domain.members.len() as u64;
    let mut text = style.paragraph(
        &format!(
            "Domain {} of user {}: {} member{}, {} adopted; saves {}, net {} after {} of overhead ({} index).",
            printable(&domain.name),
            domain.uid,
            number(members),
            if members == 1 { "" } else { "s" },
            Bytes(domain.holds.adopted),
            net(domain.holds.saved),
            net(domain.net),
            Bytes(domain.overhead),
            Bytes(domain.index),
        ),
        0,
    );
    let sharing = domain.sharing.map_or(String::new(), |sharing| format!(": {sharing:.2} pages share one"));
    text.push_str(&style.paragraph(
        &format!(
            "Store: {} pages, {}; mapped by {} pages of members{sharing}.",
            number(domain.stored_pages),
            Bytes(domain.stored),
            number(domain.references_pages),
        ),
        0,
    ));
    if !domain.members.is_empty() {
        text.push_str(&style.heading("Members"));
        text.push_str(&member_table(&domain.members, top, style));
        text.push_str(&style.heading("Regions"));
        text.push_str(&region_table(&domain.members, top, style));
    }
    text + &uncounted(domain, style)
}

/// Whose figures are in no sum.
fn uncounted(domain: &DomainReport, style: Style) -> String {
    let mut text = String::new();
    let mut say = |count: u64, one: &str, many: &str| {
        if count > 0 {
            let what = format!(
                "Not counted in {}: {} {}",
                printable(&domain.name),
                number(count),
                if count == 1 { one } else { many }
            );
            text.push_str(&style.paragraph(&what, 2));
        }
    };
    say(
        domain.ended,
        "member that has ended; what it told goes as others merge.",
        "members that have ended; what they told goes as others merge.",
    );
    say(
        domain.unread,
        "record of a member that could not be read, or makes no sense.",
        "records of members that could not be read, or make no sense.",
    );
    text
}

const HOLDING: [&str; 5] = [">adopted", ">merged", ">zeros", ">hot", ">saved"];

fn holding(holds: &Holding) -> [String; 5] {
    [bytes(holds.adopted), bytes(holds.merged), bytes(holds.zeros), bytes(holds.hot), known_net(holds.saved)]
}

fn known_net(value: i64) -> String {
    if value == 0 { "·".to_owned() } else { net(value) }
}

fn member_table(members: &[MemberReport], top: usize, style: Style) -> String {
    let mut headings = vec![">pid", "name"];
    headings.extend(HOLDING);
    headings.extend([">merges", ">time", ">last", ">slow-down", ">bound"]);
    let mut table = style.table(&headings);
    let mut largest: Vec<&MemberReport> = members.iter().collect();
    largest.sort_by_key(|member| (Reverse(member.holds.adopted), member.pid));
    for member in largest.iter().take(top) {
        let mut cells = vec![member.pid.to_string(), cut(&member.comm, 16)];
        cells.extend(holding(&member.holds));
        cells.extend([
            number(member.merges),
            seconds(member.merge_seconds),
            member.last_merge_seconds_ago.map_or("never".to_owned(), |ago| format!("{} ago", seconds(ago))),
            percent(member.slowdown),
            member.max_slowdown.map_or("none".to_owned(), percent),
        ]);
        table.add_row(cells);
    }
    style.render(&table) + &more(members.len(), top)
}

fn region_table(members: &[MemberReport], top: usize, style: Style) -> String {
    let mut headings = vec![">pid", "addresses"];
    headings.extend(HOLDING);
    let mut table = style.table(&headings);
    let of = |member: &'_ MemberReport| member.pid;
    let mut largest: Vec<(u32, &RegionReport)> =
        members.iter().flat_map(|member| member.regions.iter().map(move |region| (of(member), region))).collect();
    largest.sort_by_key(|(pid, region)| (Reverse(region.holds.adopted), *pid));
    for (pid, region) in largest.iter().take(top) {
        let mut cells = vec![pid.to_string(), format!("{}-{}", region.start, region.end)];
        cells.extend(holding(&region.holds));
        table.add_row(cells);
    }
    style.render(&table) + &more(largest.len(), top)
}

fn more(rows: usize, top: usize) -> String {
    if rows <= top { String::new() } else { format!("… and {} more (--top {rows} shows all)\n", rows - top) }
}

/// With three digits, in the unit that suits.
fn seconds(seconds: f64) -> String {
    match seconds {
        seconds if seconds >= 100.0 => format!("{seconds:.0} s"),
        seconds if seconds >= 1.0 => format!("{seconds:.1} s"),
        seconds => format!("{:.1} ms", seconds * 1e3),
    }
}

fn percent(share: f64) -> String {
    format!("{:.2} %", share * 100.0)
}

fn not_seen(report: &EngineReport, style: Style) -> String {
    let line = |unlooked: &super::wire::Unlooked| style.paragraph(&printable(&unlooked.detail), 2);
    let lines: String = report.not_seen.iter().map(line).collect();
    if lines.is_empty() { lines } else { format!("\nNot seen:\n{lines}") }
}
