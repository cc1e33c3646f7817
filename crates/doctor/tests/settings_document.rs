//! The tables of rules in docs/settings.md are those of the program. `UPDATE_GOLDEN=1` rewrites it.

use pagefold_doctor::decide::audit::{Topic, rule_summaries};
use pagefold_doctor::decide::{RuleSummary, ksm_rule_summaries, process_rule_summaries};
use pagefold_doctor::wire::method_name;
use std::fs;
use std::path::Path;

const HEADING: &str = "## Rules\n";

/// The files of a rule. Commas in parentheses separate the fields of one file.
fn split_sources(source: &str) -> Vec<String> {
    let mut sources: Vec<String> = Vec::new();
    for part in source.split(", ") {
        match sources.last_mut().filter(|last| last.contains('(') && !last.contains(')')) {
            Some(last) => *last += &format!(", {part}"),
            None => sources.push(part.to_owned()),
        }
    }
    sources
}

fn render_table(heading: &str, rules: &[RuleSummary]) -> String {
    let mut text =
        format!("\n### {heading}\n\n| rule | reads | recommended | takes effect | proof |\n|---|---|---|---|---|\n");
    for RuleSummary { id, source, expected, details, .. } in rules {
        let method = method_name(details.method).replace('_', " ");
        let sources = split_sources(source).join("`, `");
        text += &format!("| `{id}` | `{sources}` | {expected} | {method} | {} |\n", details.counter);
    }
    text
}

fn render_rules() -> String {
    let mut text = render_table("ksm", &ksm_rule_summaries());
    text += &render_table("ksm: one process (`--pid`)", &process_rule_summaries());
    for topic in Topic::ALL.into_iter().filter(|topic| *topic != Topic::Ksm) {
        let rules: Vec<_> = rule_summaries().into_iter().filter(|rule| rule.topic == topic).collect();
        assert!(!rules.is_empty(), "{topic:?} has no rule");
        text += &render_table(topic.name(), &rules);
    }
    text
}

#[test]
fn document_lists_the_rules_of_the_program() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/settings.md");
    let document = fs::read_to_string(&path).unwrap();
    let (start, rest) = document.split_once(HEADING).expect("a section Rules");
    let end = rest.find("\n## ").map_or("", |position| &rest[position..]);
    let expected = format!("{start}{HEADING}{}{end}", render_rules());
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&path, expected).unwrap();
        return;
    }
    assert!(document == expected, "docs/settings.md is out of date: run this test with UPDATE_GOLDEN=1");
}
