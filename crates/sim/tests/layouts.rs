//! Layouts on the model alone: invariants hold, results repeat, and each rule of a kernel matters to some layout.

#![forbid(unsafe_code)]

use std::collections::BTreeSet;

use pagefold_sim::decide::counters::{KsmdCounters, ProcessCounters, WorkCounts};
use pagefold_sim::decide::ksmd::{KsmModel, KsmSettings};
use pagefold_sim::decide::layout_player::{play, play_on};
use pagefold_sim::decide::layouts::{Layout, LayoutStep, all_layouts, further_layout};
use pagefold_sim::decide::rules::{KernelVersion, KsmRules};
use proptest::prelude::*;

fn rules_of(release: &str) -> KsmRules {
    KsmRules::for_version(KernelVersion::parse(release).unwrap())
}

fn counters_of(layout: &Layout, rules: KsmRules) -> Vec<KsmdCounters> {
    let mut counters = Vec::new();
    play(layout, rules, |model| counters.push(model.counters()));
    counters
}

#[test]
fn layouts_have_distinct_names_and_merge_something() {
    let layouts = all_layouts();
    assert!(layouts.len() >= 30, "{} layouts", layouts.len());
    assert_eq!(layouts.iter().map(|layout| &layout.name).collect::<BTreeSet<_>>().len(), layouts.len());
    for layout in layouts.iter().filter(|layout| !layout.name.starts_with("unique")) {
        let counters = counters_of(layout, rules_of("6.18.0"));
        assert!(counters.iter().any(|counters| counters.pages_sharing > 0), "{} merges nothing", layout.name);
    }
}

#[test]
fn layouts_reach_chains_duplicates_zero_pages_and_skips() {
    let all: Vec<_> = all_layouts().iter().flat_map(|layout| counters_of(layout, rules_of("6.18.0"))).collect();
    assert!(all.iter().any(|counters| counters.stable_node_chains > 5));
    assert!(all.iter().any(|counters| counters.stable_node_dups > 20));
    assert!(all.iter().any(|counters| counters.ksm_zero_pages > 20));
    assert!(all.iter().any(|counters| counters.pages_skipped > 1000));
}

#[test]
fn each_rule_changes_the_counters_of_some_layout() {
    let rules = rules_of("6.18.0");
    let altered = [
        ("checksum first", KsmRules { checksum_before_stable_tree: false, ..rules }),
        ("any duplicate", KsmRules { search_takes_any_duplicate: false, ..rules }),
        ("smart scan", KsmRules { has_smart_scan: false, ..rules }),
        ("zero pages", KsmRules { tracks_zero_pages: false, ..rules }),
        ("fork", KsmRules { fork_resets_counters: false, ..rules }),
        ("split", KsmRules { split_maps_zero_pages: false, ..rules }),
        ("history", KsmRules { stable_tree_forgets_history: true, ..rules }),
    ];
    for (name, other) in altered {
        let differs = |layout: &Layout| counters_of(layout, rules) != counters_of(layout, other);
        assert!(all_layouts().iter().any(differs), "no layout shows the rule {name}");
    }
}

/// All counters after each batch, and the work without the numbers of comparisons, which are partly estimates.
type Observed = Vec<(KsmdCounters, Vec<ProcessCounters>, WorkCounts)>;

fn observed(model: KsmModel, layout: &Layout) -> Observed {
    let mut observed = Vec::new();
    play_on(model, layout, |model| {
        let processes = model.memory().process_ids().map(|process| model.process_counters(process)).collect();
        let work = WorkCounts { stable_comparisons: 0, unstable_comparisons: 0, first_comparisons: 0, ..*model.work() };
        observed.push((model.counters(), processes, work));
    });
    observed
}

/// The first batch after which visits of runs and visits of single pages differ.
fn first_difference(layout: &Layout, rules: KsmRules) -> Option<String> {
    let model = KsmModel::new(rules, KsmSettings::default());
    let single = observed(model.clone().page_by_page(), layout);
    let runs = observed(model, layout);
    assert_eq!(single.len(), runs.len());
    let differing = single.iter().zip(&runs).position(|(single, runs)| single != runs)?;
    Some(format!("{}: observation {differing}: {:?}, {:?}", layout.name, single[differing], runs[differing]))
}

#[test]
fn runs_have_the_counters_of_single_pages_on_all_layouts() {
    for release in ["6.1.0", "6.8.0", "6.18.0", "7.3.0"] {
        for layout in all_layouts() {
            assert_eq!(first_difference(&layout, rules_of(release)), None, "{release}");
        }
    }
}

/// The layout with chains that a search prunes only after some batches.
fn pruned_late(mut layout: Layout) -> Layout {
    for step in &mut layout.steps {
        if let LayoutStep::Set(settings) = step {
            settings.stable_node_chains_prune_millisecs = 50;
        }
    }
    layout
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn runs_have_the_counters_of_single_pages(number in 0_u64..100_000, release in prop::sample::select(vec![
        "6.1.0", "6.8.0", "6.18.0", "7.3.0",
    ])) {
        prop_assert_eq!(first_difference(&further_layout(number), rules_of(release)), None);
        prop_assert_eq!(first_difference(&pruned_late(further_layout(number)), rules_of(release)), None);
    }

    #[test]
    fn invariants_hold_on_any_layout(number in 0_u64..100_000, release in prop::sample::select(vec![
        "6.1.0", "6.6.0", "6.8.0", "6.11.0", "6.12.60", "6.18.0", "7.3.0",
    ])) {
        let mut broken = None;
        play(&further_layout(number), rules_of(release), |model| {
            broken = broken.take().or_else(|| model.broken_invariant());
        });
        prop_assert_eq!(broken, None);
    }

    #[test]
    fn invariants_hold_with_changes_seen_at_once(number in 0_u64..100_000, release in prop::sample::select(vec![
        "6.1.0", "6.8.0", "6.18.0",
    ])) {
        let mut broken = None;
        let model = KsmModel::new(rules_of(release), KsmSettings::default()).seeing_changes_at_once();
        play_on(model, &further_layout(number), |model| {
            broken = broken.take().or_else(|| model.broken_invariant());
        });
        prop_assert_eq!(broken, None);
    }

    #[test]
    fn a_layout_repeats_exactly(number in 0_u64..100_000) {
        prop_assert_eq!(further_layout(number), further_layout(number));
        let rules = rules_of("6.18.0");
        prop_assert_eq!(counters_of(&further_layout(number), rules), counters_of(&further_layout(number), rules));
    }
}
