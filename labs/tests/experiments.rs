//! The experiments of `labs/experiments` can be planned, and what they start exists.

use pagefold_ab::decide::design::{BlockKind, Schedule};
use pagefold_ab::experiment::Experiment;
use std::fs;
use std::path::{Path, PathBuf};

fn experiments() -> Vec<(PathBuf, Experiment)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("experiments");
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let found = entries.filter_map(|folder| {
        let text = fs::read_to_string(folder.join("EXPERIMENT.toml")).ok()?;
        let experiment = toml::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        Some((folder, experiment))
    });
    found.collect()
}

#[test]
fn each_experiment_can_be_planned_and_can_find_a_difference() {
    let experiments = experiments();
    assert!(!experiments.is_empty());
    for (folder, mut experiment) in experiments {
        let name = folder.display();
        experiment.check().unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(experiment.warn_of_few_blocks(), None, "{name}");
        let schedule = Schedule::generate(&experiment.design());
        let comparisons = schedule.blocks.iter().filter(|block| block.kind == BlockKind::Comparison);
        assert_eq!(comparisons.count(), experiment.blocks, "{name}");
    }
}

#[test]
fn programs_of_each_experiment_are_in_the_source_tree() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("");
    for (folder, experiment) in experiments() {
        let own: Vec<&String> = experiment.workload.iter().flatten().filter(|word| word.starts_with("labs/")).collect();
        assert!(!own.is_empty(), "{} starts nothing of its own", folder.display());
        for word in own {
            assert!(root.join(word).is_file(), "{}: {word} is missing", folder.display());
        }
    }
}
