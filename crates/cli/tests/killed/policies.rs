//! Settings that are to last: wherever it is killed, there are those from before it or its own, and `policy restore`
//! brings back what there was before the first.

use crate::{Settings, checksum, json, killed_at_any, pagefold, points, set_as_before, settings, was_killed};
use pagefold_labs::client::Lab;
use pagefold_labs::ksm::Ksm;
use pagefold_labs::lines::Region;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Output;

/// Other values than those before, of all settings that are looked at, as a policy's file says them.
const OTHERS: [(&str, &str); 6] = [
    ("advisor_mode", "\"none\""),
    ("run", "1"),
    ("pages_to_scan", "4000"),
    ("sleep_millisecs", "11"),
    ("use_zero_pages", "true"),
    ("smart_scan", "false"),
];

/// Settings that are to last for longer than what sets them.
struct Lasting {
    /// Its name among the kinds.
    kind: &'static str,
    /// Whether the kernel's advisor is on before, where there is one.
    advised: bool,
    /// Whether a policy of [`OTHERS`] is set before.
    set: bool,
    /// What is killed.
    command: &'static str,
    /// Arguments of the `pagefold-lab` that it is about.
    lab: Option<&'static str>,
}

impl Lasting {
    /// The settings before all, a state directory, and whom it is about.
    fn start(&self, ksm: &Ksm) -> (Settings, tempfile::TempDir, Vec<Lab<Region>>) {
        set_as_before(ksm);
        if self.advised && ksm.value("advisor_mode").is_some() {
            ksm.set("advisor_mode", "scan-time");
        }
        let first = settings(ksm);
        let state = tempfile::tempdir().unwrap();
        if self.set {
            let policy = state.path().join("others.toml");
            let others = OTHERS.iter().filter(|(name, _)| ksm.value(name).is_some());
            let lines: String = others.map(|(name, value)| format!("{name} = {value}\n")).collect();
            fs::write(&policy, format!("[ksm]\n{lines}")).unwrap();
            done(state.path(), &format!("policy set {}", policy.display()));
            let mut unlike = first.iter().zip(settings(ksm)).filter(|(_, now)| now.0 != "advisor_mode");
            assert!(unlike.all(|(first, now)| *first != now), "{first:?}");
        }
        let words: Vec<&str> = self.lab.into_iter().flat_map(|words| words.split(' ')).collect();
        let lab = words.split_first().map(|(name, arguments)| Lab::start(name, arguments).unwrap());
        (first, state, lab.into_iter().collect())
    }

    fn run(&self, state: &Path, labs: &[Lab<Region>], fault: &str) -> Output {
        let pids: Vec<u32> = labs.iter().map(Lab::pid).collect();
        pagefold(state, self.command, &pids, Some(fault))
    }

    /// How often it reaches each point when nobody kills it, and which settings it leaves.
    fn points(&self, ksm: &Ksm) -> (BTreeMap<String, u64>, Settings) {
        let (_, state, labs) = self.start(ksm);
        let before = settings(ksm);
        let output = self.run(state.path(), &labs, "count");
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        let after = settings(ksm);
        assert_ne!(after, before);
        (points(&output), after)
    }

    /// Kill it at a point. Whether it got there.
    fn kill(&self, ksm: &Ksm, leaves: &Settings, point: &str) -> bool {
        let (first, state, labs) = self.start(ksm);
        let before = settings(ksm);
        let held: Vec<u64> = labs.iter().map(|lab| checksum(lab.pid(), lab.lines())).collect();
        let output = self.run(state.path(), &labs, point);
        let (killed, place) = was_killed(&output, point);
        assert!(labs.iter().all(|lab| !crate::is_held(lab.pid())), "{place}");
        done(state.path(), "recover");
        assert!([&before, leaves].contains(&&settings(ksm)), "{place}: {:?}", settings(ksm));
        done(state.path(), "policy restore");
        assert_eq!(settings(ksm), first, "{place}");
        assert!(labs.iter().zip(held).all(|(lab, held)| checksum(lab.pid(), lab.lines()) == held), "{place}");
        killed
    }

    fn killed_at_any_step(&self) {
        let ksm = match Ksm::take() {
            Ok(ksm) => ksm,
            Err(why) => return println!("skipped: {why}"),
        };
        let (reached, leaves) = self.points(&ksm);
        killed_at_any(self.kind, &reached, |point| self.kill(&ksm, &leaves, point));
    }
}

/// Run a command that nobody kills, and see that nothing remains to be done.
fn done(state: &Path, command: &str) {
    let output = pagefold(state, command, &[], None);
    assert_eq!(output.status.code(), Some(0), "{command}: {output:?}");
    assert!(json(&output)["remains"].as_array().is_none_or(Vec::is_empty), "{command}: {output:?}");
}

#[test]
fn a_merge_that_leaves_ksmd_running() {
    let command = "merge --keep --settle 0 --cpu 100 --min-profit 0 --watch 0";
    let lab = Some("layout within=600,copies=3");
    Lasting { kind: "keep", advised: false, set: false, command, lab }.killed_at_any_step();
}

#[test]
fn a_policy_in_place_of_another() {
    let command = "policy set flat-out";
    Lasting { kind: "policy", advised: false, set: true, command, lab: None }.killed_at_any_step();
}

#[test]
fn a_policy_that_is_taken_back_for_the_advisor() {
    let command = "policy restore";
    Lasting { kind: "restore", advised: true, set: true, command, lab: None }.killed_at_any_step();
}
