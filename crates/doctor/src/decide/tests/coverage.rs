//! Each rule of the catalog has a case for each verdict that it declares, and says of itself what an operator needs. A
//! rule that gives another verdict fails an assertion of [`RuleInfo::finding`].

use super::*;
use crate::decide::audit;
use crate::test_support::take_tested;
use std::collections::BTreeSet;

const TABLES: &[fn()] = &[
    settings_rules_give_expected_verdicts,
    counters_of_ended_processes_are_not_applicable,
    enrollment_rules_give_expected_verdicts,
    writer_rules_give_expected_verdicts,
    cost_rules_give_expected_verdicts,
    security_rules_give_expected_verdicts,
    process_rules_give_expected_verdicts,
    ineligible_regions_are_listed_with_reason,
    rules_about_ksm_are_not_applicable_without_it,
    audit::tests::check_all_tables,
];

fn all_rules() -> Vec<&'static RuleInfo> {
    let host = HOST_RULES.into_iter().flatten().map(|rule| &rule.rule);
    host.chain(process::rules()).chain(audit::rules()).collect()
}

/// Whether a citation names a file (`mm/ksm.c`), a page of a manual (`madvise(2)`) or a paper with its year.
fn names_a_source(citation: &str) -> bool {
    let is_file = |word: &str| word.split('/').filter(|part| !part.is_empty()).count() >= 2;
    let is_manual = |word: &str| {
        let section = word.strip_suffix(')').and_then(|word| word.split_once('('));
        section.is_some_and(|(name, section)| !name.is_empty() && section.len() == 1 && section < "9")
    };
    let is_year = |word: &str| word.parse().is_ok_and(|year: u32| (1990..2100).contains(&year));
    let mut words = citation.split_whitespace().map(|word| word.trim_matches([',', ';', '.', ':']));
    words.any(|word| is_file(word) || is_manual(word) || is_year(word))
}

#[test]
fn each_rule_says_what_an_operator_needs() {
    let mut ids = BTreeSet::new();
    for RuleInfo { id, source, why, expected, details, verdicts, .. } in all_rules() {
        let SettingDetails { benefit, risk, undo, counter, versions, citation, method: _ } = details;
        assert!(ids.insert(id), "two rules are called {id}");
        assert!(!verdicts.is_empty(), "{id}");
        for text in [id, source, why, expected, benefit, risk, undo, counter, versions, citation] {
            assert!(!text.is_empty() && text.trim() == *text && !text.contains('\n'), "{id}: {text:?}");
        }
        assert!(names_a_source(citation), "{id}: {citation}");
    }
    for vague in ["", "the kernel", "common knowledge (see above)", "Linux 6.18"] {
        assert!(!names_a_source(vague), "{vague}");
    }
}

#[test]
fn rules_about_ksm_are_not_applicable_without_it() {
    for rule in HOST_RULES.into_iter().flatten().map(|rule| &rule.rule).filter(|rule| rule.needs_ksm) {
        check(rule.id, NotApplicable, |facts| facts.ksm = Err(Absent::NotOnThisKernel));
    }
}

#[test]
fn each_rule_has_a_case_for_each_verdict_it_can_give() {
    TABLES.iter().for_each(|check_table| check_table());
    let declared: BTreeSet<(String, Verdict)> = all_rules()
        .iter()
        .flat_map(|rule| rule.verdicts.iter().map(|verdict| (rule.id.to_owned(), *verdict)))
        .collect();
    let tested = take_tested();
    let missing: Vec<_> = declared.difference(&tested).collect();
    assert!(missing.is_empty(), "verdicts without a case: {missing:#?}");
    let unknown: Vec<_> = tested.difference(&declared).collect();
    assert!(unknown.is_empty(), "cases of verdicts that are not declared: {unknown:#?}");
}
