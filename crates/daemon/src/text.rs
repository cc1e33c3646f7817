//! How the daemon stands, for people.

use crate::wire::{Arrivals, Member, MemberState, Status};
use pagefold_base::Bytes;
use pagefold_output::text::{Style, by_splitting, bytes, cut, net, printable};

/// All of it, with so many members and decisions at most.
pub fn render(status: &Status, top: usize, style: Style) -> String {
    let mut text = style.paragraph(
        &format!(
            "Daemon {} ({}), {}: {}.",
            status.pid,
            word(&status.mode),
            word(&status.state),
            printable(&status.why)
        ),
        2,
    );
    let known = |value: Option<u64>| value.map_or_else(|| "unknown".to_owned(), |value| Bytes(value).to_string());
    let saved = &status.saved;
    text.push_str(&style.paragraph(
        &format!(
            "Saved on this host: {} gross, {} of metadata, {} net{}. Available: {} of {}.",
            known(saved.gross),
            known(saved.metadata),
            saved.net.map_or_else(|| "unknown".to_owned(), net),
            by_splitting(saved.split_zero.unwrap_or(0)),
            known(status.memory.available),
            known(status.memory.total)
        ),
        2,
    ));
    let used = |who: &str, used: Option<crate::wire::CpuUse>| match used {
        Some(used) => format!("{who} {:.1} s, {:.1} % of the last minute", used.seconds, used.percent),
        None => format!("{who} unknown"),
    };
    text.push_str(&style.paragraph(
        &format!(
            "CPU: {}; {}; bound {:.0} % on average, {:.1} of {:.0} s left for a burst.",
            used("ksmd", status.cpu.ksmd),
            used("pagefold", status.cpu.pagefold),
            status.bounds.cpu_percent,
            status.bounds.burst_left_seconds,
            status.bounds.burst_seconds
        ),
        2,
    ));
    let passes = &status.passes;
    text.push_str(&style.paragraph(
        &format!(
            "Passes: {}, of which {} merged: {} net predicted, {} net reached. New programs are {}.",
            passes.passes,
            passes.merges,
            Bytes(passes.predicted),
            net(passes.reached),
            match status.arrivals {
                Arrivals::ProcConnector => "told by the kernel",
                Arrivals::Polling => "found by polling",
            }
        ),
        2,
    ));
    if !status.members.is_empty() {
        text.push_str(&style.heading("Members"));
        let mut table =
            style.table(&[">pid", "name", "trust domain", ">resident", ">merged", ">footprint", "state", "why"]);
        for member in status.members.iter().take(top) {
            table.add_row(row(member));
        }
        text.push_str(&style.render(&table));
        let left = status.members.len().saturating_sub(top) as u64 + status.members_left_out;
        if left > 0 {
            text.push_str(&format!("and {left} more\n"));
        }
        text.push_str(&style.paragraph(FOOTPRINTS, 2));
    }
    if !status.decisions.is_empty() {
        text.push_str(&style.heading("Latest decisions"));
        let mut table = style.table(&[">ago", "what", "whom", "why"]);
        for decision in status.decisions.iter().take(top) {
            let ago = (status.time - decision.time_ms as f64 / 1e3).max(0.0);
            let acted = if decision.acted { "" } else { "not carried out: " };
            let what = decision.what.clone();
            let plain = matches!(what.as_str(), "leave" | "refuse" | "rest" | "yield");
            let why = format!("{}{}", if plain { "" } else { acted }, printable(&decision.why));
            table.add_row([format!("{ago:.0} s"), what, cut(&decision.whom, 40), why]);
        }
        text.push_str(&style.render(&table));
    }
    text
}

/// What is to be known of footprints.
const FOOTPRINTS: &str = "Footprints are fair shares: each page divided by those who map it. ~ marks those that were \
                          not read yet and are estimates: resident memory less what merging saves, by the host's mean \
                          for each merged page.";

fn row(member: &Member) -> [String; 8] {
    let known = |value: Option<u64>| value.map_or_else(|| "?".to_owned(), bytes);
    [
        member.pid.to_string(),
        cut(&member.label, 30),
        cut(&member.domain, 24),
        known(member.resident),
        known(member.merged),
        member.footprint.map_or_else(|| "?".to_owned(), |value| footprint(value, member.footprint_age_seconds)),
        state(member.state).to_owned(),
        printable(&member.why).into_owned(),
    ]
}

/// What something takes, marked where it is an estimate.
pub fn footprint(value: u64, age_seconds: Option<u64>) -> String {
    let mark = if age_seconds.is_none() { "~" } else { "" };
    format!("{mark}{}", bytes(value))
}

/// The word on the wire.
fn word<T: serde::Serialize>(value: &T) -> String {
    serde_json::to_value(value).ok().and_then(|value| Some(value.as_str()?.to_owned())).unwrap_or_default()
}

fn state(state: MemberState) -> &'static str {
    match state {
        MemberState::Arriving => "arriving",
        MemberState::Followed => "followed",
        MemberState::Merged => "merged",
        MemberState::BackedOff => "backed off",
        MemberState::Excluded => "excluded",
        MemberState::Withdrawn => "withdrawn",
    }
}
