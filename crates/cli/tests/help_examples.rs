//! The examples in `--help` name rules and profiles that exist.

#![forbid(unsafe_code)]

use pagefold_doctor::decide::audit::rule_summaries;
use pagefold_tune::decide::profile::Profile;
use std::collections::BTreeSet;
use std::process::Command;

fn help(path: &[String]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_pagefold")).args(path).arg("--help").output().unwrap();
    assert!(output.status.success(), "{path:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// The names in the section `Commands:` of a help text.
fn subcommands(help: &str) -> Vec<String> {
    let section = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    // A continued description is indented more.
    let names = section.filter_map(|line| line.strip_prefix("  ")).filter(|line| !line.starts_with(' '));
    let names = names.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help");
    names.map(str::to_owned).collect()
}

/// The help texts of all commands and their subcommands.
fn all_helps() -> Vec<(Vec<String>, String)> {
    let mut found = Vec::new();
    let mut pending = vec![Vec::new()];
    while let Some(path) = pending.pop() {
        let text = help(&path);
        pending.extend(subcommands(&text).into_iter().map(|name| [&path[..], &[name]].concat()));
        found.push((path, text));
    }
    found
}

/// The values of an option in lines that call pagefold.
fn values<'a>(text: &'a str, option: &str) -> Vec<&'a str> {
    let lines = text.lines().filter(|line| line.contains("pagefold "));
    let of_line = |line: &'a str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let pairs = words.windows(2).filter(|pair| pair[0] == option).map(|pair| pair[1]);
        pairs.map(|value| value.trim_end_matches(['`', ',', '.', ')'])).collect::<Vec<_>>()
    };
    lines.flat_map(of_line).collect()
}

#[test]
fn rules_and_profiles_in_examples_exist() {
    let rules: BTreeSet<&str> = rule_summaries().iter().map(|rule| rule.id).collect();
    let profiles: BTreeSet<&str> = Profile::ALL.iter().map(|profile| profile.name()).collect();
    let helps = all_helps();
    assert!(helps.iter().any(|(path, _)| path[..] == ["tune", "plan"]), "{} commands", helps.len());
    let (mut rule_count, mut profile_count) = (0, 0);
    for (path, text) in &helps {
        for rule in values(text, "--rule") {
            assert!(rules.contains(rule), "--help of {path:?}: there is no rule {rule}");
            rule_count += 1;
        }
        for profile in values(text, "--profile") {
            assert!(profiles.contains(profile), "--help of {path:?}: there is no profile {profile}");
            profile_count += 1;
        }
    }
    assert!(rule_count >= 2 && profile_count >= 3, "{rule_count} rules and {profile_count} profiles");
}
