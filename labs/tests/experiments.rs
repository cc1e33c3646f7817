//! The experiments of `labs/experiments` can be planned, and what they start exists.

use pagefold_ab::decide::design::{BlockKind, Schedule};
use pagefold_ab::experiment::Experiment;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

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

#[test]
fn each_experiment_has_a_row_in_the_documentation_and_scripts_that_a_shell_can_read() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("docs").join("experiments.md");
    let page = fs::read_to_string(page).unwrap();
    let experiments = experiments();
    let names: Vec<_> = experiments.iter().map(|(folder, _)| folder.file_name().unwrap().to_str().unwrap()).collect();
    for name in ["clocksource", "iothread", "ksm-compute", "ksm-database", "npt", "vnuma"] {
        assert!(names.contains(&name), "{name} is missing among {names:?}");
    }
    for (folder, _) in &experiments {
        let name = folder.file_name().unwrap().to_str().unwrap();
        assert!(page.contains(&format!("`sudo make lab ARGS={name}`")), "docs/experiments.md does not name {name}");
        for script in ["setup", "boot", "init", "cleanup"].map(|name| folder.join(name)) {
            let Ok(metadata) = fs::metadata(&script) else { continue };
            assert_ne!(metadata.permissions().mode() & 0o111, 0, "{} is not executable", script.display());
            let shell = if fs::read_to_string(&script).unwrap().starts_with("#!/bin/bash") { "bash" } else { "sh" };
            let output = Command::new(shell).arg("-n").arg(&script).output().unwrap();
            assert!(output.status.success(), "{}: {output:?}", script.display());
        }
    }
}

/// The arms of an experiment with guests differ in a variable, which the script that boots them must read.
#[test]
fn guests_read_the_variable_in_which_the_arms_differ() {
    let mut guests = 0;
    for (folder, experiment) in experiments() {
        let Ok(boot) = fs::read_to_string(folder.join("boot")) else { continue };
        guests += 1;
        assert_ne!(experiment.a.environment, experiment.b.environment, "{}", folder.display());
        for variable in experiment.a.environment.keys().chain(experiment.b.environment.keys()) {
            assert!(boot.contains(&format!("${variable}")), "{} does not read {variable}", folder.display());
        }
    }
    assert!(guests >= 4, "{guests} experiments boot a guest");
}
