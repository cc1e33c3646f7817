//! KSM's settings for the terminal.

use crate::wire::policy::{PolicyReport, SettingReport, Writer};
use comfy_table::Color;
use pagefold_output::text::{Style, cut, printable};

/// The columns of policies, in this order.
const COLUMNS: [&str; 5] = ["default", "ksmtuned", "advisor", "flat-out", "guided"];

/// The report as text.
pub fn render(report: &PolicyReport, style: Style) -> String {
    let mut text = String::new();
    let mut line = |name: &str, what: &str| text.push_str(&style.paragraph(&format!("{name:<8}{what}"), 8));
    match &report.policy {
        Some(policy) => line("Policy", &format!("{} (`pagefold policy restore` ends it)", printable(policy))),
        None => line("Policy", "none set by pagefold"),
    }
    match report.tuners.as_slice() {
        [] => line("Tuners", "none that is known runs"),
        tuners => line("Tuners", &tuners.join(", ")),
    }
    match report.ksmd_cpu_seconds {
        Some(seconds) => line("ksmd", &format!("{seconds:.1} s of CPU since boot")),
        None => line("ksmd", "not seen: no KSM, or another PID namespace"),
    }
    text.push('\n');

    let mut table = style.table(&[
        "",
        ">now",
        "written by",
        ">before",
        ">default",
        ">ksmtuned",
        ">advisor",
        ">flat-out",
        ">guided",
    ]);
    for setting in &report.settings {
        let of = |name: &&str| setting.policies.get(*name).map_or("·".to_owned(), |value| cut(value, 12));
        let mut cells =
            vec![comfy_table::Cell::new(setting.name), comfy_table::Cell::new(now(setting)), writer(setting)];
        cells.push(comfy_table::Cell::new(setting.before.as_deref().map_or("·".to_owned(), |value| cut(value, 12))));
        cells.extend(COLUMNS.iter().map(|name| comfy_table::Cell::new(of(name))));
        table.add_row(cells);
    }
    text.push_str(&style.render(&table));
    for (policy, why) in &report.unknown_policies {
        text.push_str(&style.paragraph(&format!("What {policy} would write cannot be told: {why}."), 0));
    }
    text.push_str("\nRight of `before` is what each policy would write now; a dot is what it leaves as it is.\n");
    text
}

fn now(setting: &SettingReport) -> String {
    match (&setting.value, &setting.absent) {
        (Some(value), _) => cut(value, 12),
        (None, Some(why)) => cut(why, 20),
        (None, None) => "?".to_owned(),
    }
}

fn writer(setting: &SettingReport) -> comfy_table::Cell {
    match setting.writer {
        Writer::Unknown => comfy_table::Cell::new("·"),
        Writer::Policy => comfy_table::Cell::new("policy"),
        Writer::Advisor => comfy_table::Cell::new("advisor"),
        Writer::SomebodyElse => pagefold_output::text::coloured("somebody else", Color::Yellow),
    }
}
