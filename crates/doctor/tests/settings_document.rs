//! The table of rules in docs/settings.md is that of the program. `UPDATE_GOLDEN=1` rewrites it.

use pagefold_doctor::decide::audit::{Topic, rule_summaries};
use pagefold_doctor::wire::method_name;
use std::fs;
use std::path::Path;

const HEADING: &str = "## Rules\n";

fn render_rules() -> String {
    let mut text = String::new();
    for topic in Topic::ALL {
        let rules: Vec<_> = rule_summaries().into_iter().filter(|rule| rule.topic == topic).collect();
        if rules.is_empty() {
            continue;
        }
        let name = topic.name();
        text +=
            &format!("\n### {name}\n\n| rule | reads | recommended | takes effect | proof |\n|---|---|---|---|---|\n");
        for rule in rules {
            let details = rule.details;
            let method = method_name(details.method).replace('_', " ");
            let source = rule.source.replace(", ", "`, `");
            text += &format!("| `{}` | `{source}` | {} | {method} | {} |\n", rule.id, rule.expected, details.counter);
        }
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
