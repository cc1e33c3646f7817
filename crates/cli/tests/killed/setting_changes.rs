//! Persistent settings. Wherever the command is killed, either the settings before it or its own are in force.
//! `policy restore` then brings back the settings before the first policy.

use crate::{
    KsmSettingValues, kill_at_selected_points, parse_json, reached_points, read_settings, regions_checksum,
    run_pagefold, was_killed, write_settings_before,
};
use pagefold_labs::client::RunningLab;
use pagefold_labs::ksm::KsmTestGuard;
use pagefold_labs::output_lines::RegionLine;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Output;

/// Values that differ from the settings before, for all settings compared, as in a policy file.
const OTHER_SETTINGS: [(&str, &str); 6] = [
    ("advisor_mode", "\"none\""),
    ("run", "1"),
    ("pages_to_scan", "4000"),
    ("sleep_millisecs", "11"),
    ("use_zero_pages", "true"),
    ("smart_scan", "false"),
];

/// A change of settings that outlives the command.
struct SettingChange {
    /// Its name in [`CHANGE_KINDS`](crate::CHANGE_KINDS).
    kind_name: &'static str,
    /// Whether the kernel's advisor is on before the change, if the kernel has one.
    advisor_on_before: bool,
    /// Whether a policy with [`OTHER_SETTINGS`] is set before the change.
    policy_set_before: bool,
    /// The command that is killed.
    command: &'static str,
    /// Arguments of the `pagefold-lab` that the command works on.
    lab: Option<&'static str>,
}

impl SettingChange {
    /// The original settings, a state directory, and the labs that the command works on.
    fn prepare(&self, ksm: &KsmTestGuard) -> (KsmSettingValues, tempfile::TempDir, Vec<RunningLab<RegionLine>>) {
        write_settings_before(ksm);
        if self.advisor_on_before && ksm.read_setting("advisor_mode").is_some() {
            ksm.write_setting("advisor_mode", "scan-time");
        }
        let first = read_settings(ksm);
        let state = tempfile::tempdir().unwrap();
        if self.policy_set_before {
            let policy = state.path().join("others.toml");
            let available = OTHER_SETTINGS.iter().filter(|(name, _)| ksm.read_setting(name).is_some());
            let lines: String = available.map(|(name, value)| format!("{name} = {value}\n")).collect();
            fs::write(&policy, format!("[ksm]\n{lines}")).unwrap();
            assert_completes(state.path(), &format!("policy set {}", policy.display()));
            let mut changed = first.iter().zip(read_settings(ksm)).filter(|(_, now)| now.0 != "advisor_mode");
            assert!(changed.all(|(first, now)| *first != now), "{first:?}");
        }
        let words: Vec<&str> = self.lab.into_iter().flat_map(|words| words.split(' ')).collect();
        let lab = words.split_first().map(|(name, arguments)| RunningLab::start(name, arguments).unwrap());
        (first, state, lab.into_iter().collect())
    }

    fn run_command(&self, state: &Path, labs: &[RunningLab<RegionLine>], fault: &str) -> Output {
        let pids: Vec<u32> = labs.iter().map(RunningLab::pid).collect();
        run_pagefold(state, self.command, &pids, Some(fault))
    }

    /// How often the command reaches each point without a kill, and the settings that it leaves.
    fn fault_points(&self, ksm: &KsmTestGuard) -> (BTreeMap<String, u64>, KsmSettingValues) {
        let (_, state, labs) = self.prepare(ksm);
        let before = read_settings(ksm);
        let output = self.run_command(state.path(), &labs, "count");
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        let after = read_settings(ksm);
        assert_ne!(after, before);
        (reached_points(&output), after)
    }

    /// Kill the command at a point; returns whether it reached the point.
    fn kill_at(&self, ksm: &KsmTestGuard, expected: &KsmSettingValues, point: &str) -> bool {
        let (first, state, labs) = self.prepare(ksm);
        let before = read_settings(ksm);
        let checksums_before: Vec<u64> = labs.iter().map(|lab| regions_checksum(lab.pid(), lab.lines())).collect();
        let output = self.run_command(state.path(), &labs, point);
        let (killed, context) = was_killed(&output, point);
        assert!(labs.iter().all(|lab| !crate::is_traced_or_stopped(lab.pid())), "{context}");
        assert_completes(state.path(), "recover");
        assert!([&before, expected].contains(&&read_settings(ksm)), "{context}: {:?}", read_settings(ksm));
        assert_completes(state.path(), "policy restore");
        assert_eq!(read_settings(ksm), first, "{context}");
        assert!(
            labs.iter().zip(checksums_before).all(|(lab, before)| regions_checksum(lab.pid(), lab.lines()) == before),
            "{context}"
        );
        killed
    }

    fn assert_survives_kill_at_any_step(&self) {
        let ksm = match KsmTestGuard::acquire() {
            Ok(ksm) => ksm,
            Err(why) => return println!("skipped: {why}"),
        };
        let (reached, settings_after) = self.fault_points(&ksm);
        kill_at_selected_points(self.kind_name, &reached, |point| self.kill_at(&ksm, &settings_after, point));
    }
}

/// Run a command without a kill, and check that nothing remains to restore.
fn assert_completes(state: &Path, command: &str) {
    let output = run_pagefold(state, command, &[], None);
    assert_eq!(output.status.code(), Some(0), "{command}: {output:?}");
    assert!(parse_json(&output)["failed_undos"].as_array().is_none_or(Vec::is_empty), "{command}: {output:?}");
}

#[test]
fn merge_that_keeps_ksmd_running_survives_kill() {
    let command = "merge --keep-ksmd-running --pass-interval 0 --cpu 100 --min-profit 0 --watch-time 0";
    let lab = Some("layout within=600,copies=3");
    SettingChange { kind_name: "keep", advisor_on_before: false, policy_set_before: false, command, lab }
        .assert_survives_kill_at_any_step();
}

#[test]
fn policy_replacement_survives_kill() {
    let command = "policy set flat-out";
    SettingChange { kind_name: "policy", advisor_on_before: false, policy_set_before: true, command, lab: None }
        .assert_survives_kill_at_any_step();
}

#[test]
fn policy_restore_to_advisor_survives_kill() {
    let command = "policy restore";
    SettingChange { kind_name: "restore", advisor_on_before: true, policy_set_before: true, command, lab: None }
        .assert_survives_kill_at_any_step();
}
