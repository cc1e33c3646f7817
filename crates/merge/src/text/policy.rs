//! KSM's settings as text.

use crate::wire::policy::{PolicyReport, SettingReport, SettingSource};
use comfy_table::Color;
use pagefold_output::text::{TextStyle, cut_end, escape_unprintable};

/// The columns of policies, in this order.
const POLICY_COLUMNS: [&str; 5] = ["default", "ksmtuned", "advisor", "flat-out", "guided"];

/// The report as text.
pub fn render(report: &PolicyReport, style: TextStyle) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: &str| text.push_str(&style.format_paragraph(&format!("{name:<8}{value}"), 8));
    match &report.policy {
        Some(policy) => line("Policy", &format!("{} (`pagefold policy restore` ends it)", escape_unprintable(policy))),
        None => line("Policy", "none set by pagefold"),
    }
    match report.tuners.as_slice() {
        [] => line("Tuners", "no known tuner runs"),
        tuners => line("Tuners", &tuners.join(", ")),
    }
    match report.ksmd_cpu_seconds {
        Some(seconds) => line("ksmd", &format!("{seconds:.1} s of CPU since boot")),
        None => line("ksmd", "not found: no KSM, or another PID namespace"),
    }
    text.push('\n');

    let mut table = style.new_table(&[
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
        let policy_value =
            |name: &&str| setting.policies.get(*name).map_or("·".to_owned(), |value| cut_end(value, 12));
        let mut cells = vec![
            comfy_table::Cell::new(setting.name),
            comfy_table::Cell::new(current_value_text(setting)),
            source_cell(setting),
        ];
        cells.push(comfy_table::Cell::new(
            setting.value_before_policy.as_deref().map_or("·".to_owned(), |value| cut_end(value, 12)),
        ));
        cells.extend(POLICY_COLUMNS.iter().map(|name| comfy_table::Cell::new(policy_value(name))));
        table.add_row(cells);
    }
    text.push_str(&style.render_table(&table));
    for (policy, why) in &report.unknown_policies {
        text.push_str(&style.format_paragraph(&format!("The settings of {policy} are unknown: {why}."), 0));
    }
    text.push_str("\nColumns right of `before`: the value that each policy would write now; a dot means no change.\n");
    text
}

fn current_value_text(setting: &SettingReport) -> String {
    match (&setting.value, &setting.absent) {
        (Some(value), _) => cut_end(value, 12),
        (None, Some(why)) => cut_end(why, 20),
        (None, None) => "?".to_owned(),
    }
}

fn source_cell(setting: &SettingReport) -> comfy_table::Cell {
    match setting.source {
        SettingSource::Unknown => comfy_table::Cell::new("·"),
        SettingSource::Policy => comfy_table::Cell::new("policy"),
        SettingSource::Advisor => comfy_table::Cell::new("advisor"),
        SettingSource::OtherProgram => pagefold_output::text::colored_cell("other program", Color::Yellow),
    }
}
