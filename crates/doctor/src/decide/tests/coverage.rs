//! Each rule of the catalog has a case for each verdict that it declares. A rule that gives another verdict fails an
//! assertion of [`RuleInfo::finding`].

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

#[test]
fn rules_about_ksm_are_not_applicable_without_it() {
    for rule in HOST_RULES.into_iter().flatten().map(|rule| &rule.rule).filter(|rule| rule.needs_ksm) {
        check(rule.id, NotApplicable, |facts| facts.ksm = Err(Absent::NotOnThisKernel));
    }
}

#[test]
fn each_rule_has_a_case_for_each_verdict_it_can_give() {
    TABLES.iter().for_each(|check_table| check_table());
    let host = HOST_RULES.into_iter().flatten().map(|rule| &rule.rule);
    let rules: Vec<&RuleInfo> = host.chain(process::rules()).chain(audit::rules()).collect();
    let declared: BTreeSet<(String, Verdict)> =
        rules.iter().flat_map(|rule| rule.verdicts.iter().map(|verdict| (rule.id.to_owned(), *verdict))).collect();
    let tested = take_tested();
    let missing: Vec<_> = declared.difference(&tested).collect();
    assert!(missing.is_empty(), "verdicts without a case: {missing:#?}");
    let unknown: Vec<_> = tested.difference(&declared).collect();
    assert!(unknown.is_empty(), "cases of verdicts that are not declared: {unknown:#?}");
}
