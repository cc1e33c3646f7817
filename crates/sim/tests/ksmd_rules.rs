//! One small case for each rule, computed by hand from mm/ksm.c.

#![forbid(unsafe_code)]

use pagefold_sim::decide::counters::KsmdCounters;
use pagefold_sim::decide::ksmd::{Advice, KsmModel, KsmSettings, RunState};
use pagefold_sim::decide::memory::{Content, PAGES_IN_HUGE_PAGE, PageEntry, SimulatedProcessId};
use pagefold_sim::decide::rules::{KernelVersion, KsmRules};

const START: u64 = 1024;

fn model_of(release: &str, settings: KsmSettings) -> KsmModel {
    let mut model = KsmModel::new(KsmRules::for_version(KernelVersion::parse(release).unwrap()), settings);
    model.write_run(RunState::Merging);
    model
}

fn settings() -> KsmSettings {
    KsmSettings { pages_to_scan: 10_000, stable_node_chains_prune_millisecs: 0, ..KsmSettings::default() }
}

fn model() -> KsmModel {
    model_of("6.18.0", settings())
}

/// A process with one mergeable region of these contents.
fn process_with(model: &mut KsmModel, contents: &[Content]) -> SimulatedProcessId {
    let process = model.spawn();
    let pages = contents.len() as u64;
    model.map(process, START, pages, 0);
    model.advise(process, START, pages, Advice::Mergeable);
    for (page, &content) in (START..).zip(contents) {
        model.write(process, page, content);
    }
    process
}

/// Shared, sharing, unshared, volatile.
fn pages(model: &KsmModel) -> [u64; 4] {
    let KsmdCounters { pages_shared, pages_sharing, pages_unshared, pages_volatile, .. } = model.counters();
    [pages_shared, pages_sharing, pages_unshared, pages_volatile]
}

fn scan(model: &mut KsmModel, scans: u32) {
    for _ in 0..scans {
        model.run_batch();
    }
}

#[test]
fn pages_merge_on_the_second_scan() {
    let mut model = model();
    process_with(&mut model, &[7, 7, 9]);
    scan(&mut model, 1);
    assert_eq!(pages(&model), [0, 0, 0, 3]);
    scan(&mut model, 1);
    assert_eq!(pages(&model), [1, 1, 1, 0]);
    assert_eq!(model.counters().pages_scanned, 6);
}

#[test]
fn a_page_equal_to_a_merged_one_merges_on_its_second_visit_since_6_11_and_on_its_first_before() {
    for (release, expected) in [("6.11.0", [1, 1, 0, 1]), ("6.10.0", [1, 2, 0, 0])] {
        let mut model = model_of(release, settings());
        process_with(&mut model, &[7, 7]);
        scan(&mut model, 2);
        process_with(&mut model, &[7]);
        scan(&mut model, 1);
        assert_eq!(pages(&model), expected, "{release}");
    }
}

#[test]
fn a_written_page_is_counted_until_its_next_visit() {
    let mut model = model();
    let process = process_with(&mut model, &[7, 7, 7]);
    scan(&mut model, 2);
    model.write(process, START, 8);
    assert_eq!(pages(&model), [1, 2, 0, 0]);
    scan(&mut model, 1);
    assert_eq!(pages(&model), [1, 1, 0, 1]);
    assert_eq!(model.process_counters(process).ksm_merging_pages, 2);
}

#[test]
fn a_page_written_back_to_its_content_before_the_merge_merges_at_once_before_7_3() {
    for (release, expected) in [("7.2.0", [1, 2, 0, 0]), ("7.3.0", [1, 1, 0, 1])] {
        let mut model = model_of(release, settings());
        let process = process_with(&mut model, &[7, 7, 7]);
        scan(&mut model, 2);
        model.write(process, START, 7);
        scan(&mut model, 1);
        assert_eq!(pages(&model), expected, "{release}");
    }
}

#[test]
fn a_page_written_after_its_merge_is_as_young_as_a_new_one_since_7_3() {
    // The visits until the merge have the ages 0 to 3, and the last one allows a skip. Before 7.3 the next scan skips the
    // page. Since 7.3 it visits the page without an age; visits with the ages 0 to 3 follow, and then a skip.
    for (release, visits_until_skip) in [("7.2.0", 0), ("7.3.0", 5)] {
        let mut model = model_of(release, settings());
        let process = process_with(&mut model, &[7]);
        scan(&mut model, 2);
        process_with(&mut model, &[7]);
        scan(&mut model, 2);
        assert_eq!(pages(&model), [1, 1, 0, 0], "{release}");
        model.write(process, START, 8);
        let visits = (0..20).take_while(|_| {
            scan(&mut model, 1);
            model.counters().pages_skipped == 0
        });
        assert_eq!(visits.count(), visits_until_skip, "{release}");
    }
}

#[test]
fn a_freed_frame_is_removed_by_the_first_visit_of_any_of_its_pages() {
    let mut model = model_of("6.18.0", KsmSettings { pages_to_scan: 1, ..settings() });
    let process = process_with(&mut model, &[7, 7]);
    scan(&mut model, 6);
    assert_eq!(pages(&model), [1, 1, 0, 0]);
    model.write(process, START, 8);
    model.write(process, START + 1, 9);
    scan(&mut model, 1);
    assert_eq!(pages(&model), [0, 0, 0, 2]);
}

#[test]
fn full_frames_get_duplicates_in_a_chain() {
    // Two mappings a frame: six equal pages make three frames, in one chain.
    let mut model = model_of("6.18.0", KsmSettings { max_page_sharing: 2, ..settings() });
    let process = process_with(&mut model, &[7; 6]);
    scan(&mut model, 2);
    assert_eq!(pages(&model), [3, 3, 0, 0]);
    let chain = |model: &KsmModel| (model.counters().stable_node_chains, model.counters().stable_node_dups);
    assert_eq!(chain(&model), (1, 3));
    // When two frames are freed, the next search for this content drops the chain.
    (START..START + 4).for_each(|page| model.write(process, page, 8 + page as Content));
    process_with(&mut model, &[7]);
    scan(&mut model, 1);
    assert_eq!(chain(&model), (1, 1));
    scan(&mut model, 1);
    assert_eq!(chain(&model), (0, 0));
}

#[test]
fn an_old_page_without_partner_is_skipped_for_growing_times() {
    // Ages 0, 1 and 2 are visited. Then a visit allows 1, 2, 4 or 8 skips by its age (`skip_age`).
    let mut model = model();
    process_with(&mut model, &[7]);
    let mut visited = Vec::new();
    for number in 1..=40 {
        let before = model.counters().pages_scanned;
        scan(&mut model, 1);
        if model.counters().pages_scanned > before {
            visited.push(number);
        }
    }
    // Visit 4 has age 3: one skip. Visit 6 has age 5: two. Visit 9 has age 8: four. Visit 14 has age 13: eight.
    assert_eq!(visited, [1, 2, 3, 4, 6, 9, 14, 23, 32]);
    assert_eq!(model.counters().pages_skipped, 31);
}

#[test]
fn smart_scan_never_skips_merged_pages() {
    let mut model = model();
    process_with(&mut model, &[7, 7]);
    scan(&mut model, 20);
    assert_eq!((model.counters().pages_skipped, model.counters().pages_scanned), (0, 40));
}

#[test]
fn zero_pages_map_the_zero_page_and_lose_their_metadata() {
    let mut model = model_of("6.18.0", KsmSettings { use_zero_pages: true, ..settings() });
    let process = process_with(&mut model, &[0, 0, 0]);
    scan(&mut model, 2);
    assert_eq!((model.counters().ksm_zero_pages, pages(&model)), (3, [0, 0, 0, 3]));
    scan(&mut model, 1);
    assert_eq!(pages(&model), [0; 4]);
    model.write(process, START, 5);
    assert_eq!(model.process_counters(process).ksm_zero_pages, 2);
    model.advise(process, START, 3, Advice::Unmergeable);
    assert_eq!(model.counters().ksm_zero_pages, 0);
    assert_eq!(model.memory().entry(process, START + 1), PageEntry::Private(0));
}

#[test]
fn old_kernels_do_not_count_zero_pages() {
    let mut model = model_of("6.1.0", KsmSettings { use_zero_pages: true, ..settings() });
    let process = process_with(&mut model, &[0, 0]);
    scan(&mut model, 2);
    assert_eq!(model.memory().entry(process, START), PageEntry::KsmZeroPage);
    assert_eq!(model.counters().ksm_zero_pages, 0);
    model.advise(process, START, 2, Advice::Unmergeable);
    assert_eq!(model.memory().entry(process, START), PageEntry::KsmZeroPage);
}

#[test]
fn a_forked_page_is_no_partner_of_itself() {
    let mut model = model();
    let parent = process_with(&mut model, &[7]);
    let child = model.fork(parent);
    scan(&mut model, 2);
    // The child's copy of the page meets the same frame in the unstable tree, and stays out of it.
    assert_eq!(pages(&model), [0, 0, 1, 1]);
    model.write(child, START, 7);
    scan(&mut model, 1);
    assert_eq!(pages(&model), [1, 1, 0, 0]);
}

#[test]
fn a_forked_merged_page_is_counted_at_its_first_visit_beyond_the_limit() {
    let mut model = model_of("6.18.0", KsmSettings { max_page_sharing: 2, ..settings() });
    let parent = process_with(&mut model, &[7, 7]);
    scan(&mut model, 2);
    let child = model.fork(parent);
    assert_eq!(pages(&model), [1, 1, 0, 0]);
    assert_eq!(model.process_counters(child).ksm_merging_pages, 0);
    scan(&mut model, 1);
    assert_eq!(pages(&model), [1, 3, 0, 0]);
}

#[test]
fn children_inherit_counters_before_the_fix() {
    for (release, expected) in [("6.12.53", 2), ("6.12.54", 0)] {
        let mut model = model_of(release, settings());
        let parent = process_with(&mut model, &[7, 7]);
        scan(&mut model, 2);
        let child = model.fork(parent);
        assert_eq!(model.process_counters(child).ksm_merging_pages, expected, "{release}");
    }
}

#[test]
fn a_new_process_waits_for_the_next_scan_and_an_ended_one_leaves_in_the_current_one() {
    let mut model = model_of("6.18.0", KsmSettings { pages_to_scan: 1, ..settings() });
    let first = process_with(&mut model, &[1]);
    let second = process_with(&mut model, &[2]);
    // One visit of the first; then the cursor is on it.
    scan(&mut model, 1);
    let third = process_with(&mut model, &[3]);
    model.exit(first);
    scan(&mut model, 1);
    assert_eq!(model.process_counters(second).ksm_rmap_items, 1);
    assert_eq!(model.process_counters(third).ksm_rmap_items, 0);
    assert_eq!(pages(&model), [0, 0, 0, 1]);
    scan(&mut model, 1);
    assert_eq!(model.counters().full_scans, 1);
    // The third was put before the cursor: it comes first.
    scan(&mut model, 1);
    assert_eq!(model.process_counters(third).ksm_rmap_items, 1);
}

#[test]
fn memory_that_is_no_longer_mergeable_loses_its_metadata_in_the_next_scan() {
    let mut model = model();
    let process = process_with(&mut model, &[7, 7, 8, 9]);
    scan(&mut model, 2);
    model.advise(process, START + 1, 2, Advice::Unmergeable);
    assert_eq!(model.memory().entry(process, START + 1), PageEntry::Private(7));
    assert_eq!(pages(&model), [1, 1, 2, 0]);
    scan(&mut model, 1);
    assert_eq!(pages(&model), [1, 0, 1, 0]);
    assert_eq!(model.process_counters(process).ksm_rmap_items, 2);
    // Without mergeable memory the process leaves ksmd's list, and ksmd has nothing to do.
    model.advise(process, START, 4, Advice::Unmergeable);
    scan(&mut model, 1);
    assert_eq!((pages(&model), model.run_batch()), ([0; 4], 0));
    assert!(!model.memory().process(process).is_registered);
}

#[test]
fn run_2_copies_everything_back_and_restarts_the_count_of_scans() {
    let mut model = model();
    let process = process_with(&mut model, &[7, 7, 8]);
    scan(&mut model, 2);
    model.write_run(RunState::Unmerged);
    assert_eq!((pages(&model), model.counters().full_scans), ([0; 4], 0));
    assert_eq!(model.memory().entry(process, START), PageEntry::Private(7));
    assert_eq!(model.run_batch(), 0);
    model.write_run(RunState::Merging);
    scan(&mut model, 2);
    assert_eq!(pages(&model), [1, 1, 1, 0]);
}

#[test]
fn settings_of_the_stable_tree_are_refused_while_pages_are_merged() {
    let mut model = model();
    process_with(&mut model, &[7, 7]);
    scan(&mut model, 2);
    assert!(!model.write_settings(KsmSettings { max_page_sharing: 3, ..settings() }));
    assert_eq!(*model.settings(), settings());
    model.write_run(RunState::Unmerged);
    assert!(model.write_settings(KsmSettings { max_page_sharing: 3, ..settings() }));
}

fn huge_process(model: &mut KsmModel, contents: &[(u64, Content)]) -> SimulatedProcessId {
    let process = model.spawn();
    model.map(process, START, PAGES_IN_HUGE_PAGE, 0);
    model.fault_huge_page(process, START);
    model.advise(process, START, PAGES_IN_HUGE_PAGE, Advice::Mergeable);
    for page in 0..PAGES_IN_HUGE_PAGE {
        model.write(process, START + page, 1000 + page as Content);
    }
    contents.iter().for_each(|&(page, content)| model.write(process, START + page, content));
    process
}

#[test]
fn a_merge_splits_a_huge_page_and_zero_parts_vanish_since_6_12() {
    for (release, expected) in [("6.12.0", PageEntry::ZeroPage), ("6.11.0", PageEntry::Private(0))] {
        let mut model = model_of(release, settings());
        let process = huge_process(&mut model, &[(3, 7), (5, 0)]);
        process_with(&mut model, &[7]);
        scan(&mut model, 1);
        assert_eq!(model.memory().entry(process, START + 5), PageEntry::HugePart(0));
        scan(&mut model, 1);
        assert_eq!(model.memory().entry(process, START + 5), expected, "{release}");
        assert_eq!(model.counters().pages_sharing, 1, "{release}");
        assert_eq!(model.work().splits, 1, "{release}");
    }
}

#[test]
fn two_parts_of_a_huge_page_merge_a_scan_later() {
    let mut model = model();
    huge_process(&mut model, &[(3, 7), (5, 7)]);
    scan(&mut model, 2);
    assert_eq!((model.counters().pages_shared, model.work().splits), (0, 1));
    scan(&mut model, 1);
    assert_eq!((model.counters().pages_shared, model.counters().pages_sharing), (1, 1));
}

#[test]
fn nodes_have_trees_of_their_own_unless_merging_across_nodes() {
    for (merge_across_nodes, expected) in [(true, [1, 1, 0, 0]), (false, [0, 0, 2, 0])] {
        let mut model = model_of("6.18.0", KsmSettings { merge_across_nodes, ..settings() });
        for node in 0..2 {
            let process = model.spawn();
            model.map(process, START, 1, node);
            model.advise(process, START, 1, Advice::Mergeable);
            model.write(process, START, 7);
        }
        scan(&mut model, 2);
        assert_eq!(pages(&model), expected);
    }
}

#[test]
fn general_profit_counts_64_bytes_of_metadata_a_page() {
    let mut model = model();
    let process = process_with(&mut model, &[7, 7, 8]);
    scan(&mut model, 2);
    assert_eq!(model.counters().general_profit, 4096 - 3 * 64);
    assert_eq!(model.process_counters(process).ksm_process_profit, 2 * 4096 - 3 * 64);
}
