//! `pagefold numa plan --working-set` in a guest whose kernel has DAMON for virtual addresses.

use pagefold_labs::scenes::{SceneMachine, Scenes};
use std::time::Duration;

/// Four standard errors of a share: `4 sqrt(p (1 - p) / n)` is at most 0.08 for the shares of 1/4 and 1/16 here, for n =
/// 500 tested pages. In ten seconds there are 100 sampling intervals with at least ten pages each; half of them suffice,
/// because an emulated CPU delays DAMON's thread.
const MAX_SHARE_ERROR: f64 = 0.08;

/// The number of kdamonds in a scene, and of their threads.
fn kdamonds(scenes: &Scenes, name: &str) -> (u64, u64) {
    let (count, threads) = scenes.line("KDAMONDS", name).split_once(' ').unwrap();
    (count.parse().unwrap(), threads.parse().unwrap())
}

#[test]
fn working_sets_are_measured_and_damon_is_off_afterwards() {
    let machine = SceneMachine {
        init: "init-working-set",
        programs: &[],
        options: &["-smp", "2", "-m", "1G", "-cpu", "max"],
        kernel_arguments: "numa_balancing=disable transparent_hugepage=never",
        timeout: Duration::from_secs(900),
    };
    let Some(scenes) = machine.run() else { return };
    check_measurement(&scenes);
    check_kills(&scenes);
    check_interruptions(&scenes);
    check_other_users(&scenes);
}

fn check_measurement(scenes: &Scenes) {
    let plain = scenes.json("unmeasured");
    assert_eq!(plain["hotness_source"], serde_json::json!({"figures": "run_time"}), "{plain}");
    assert!(plain["machines"][0]["parts"][0]["accessed_share"].is_null(), "{plain}");

    let measured = scenes.json("measured");
    assert_eq!((scenes.exit("measured"), kdamonds(scenes, "measured")), (0, (0, 0)), "{measured}");
    assert_eq!(measured["hotness_source"], serde_json::json!({"figures": "working_set"}), "{measured}");
    let pids = scenes.output.lines().find_map(|line| line.strip_prefix("PIDS ")).unwrap();
    let pids: Vec<u32> = pids.split(' ').map(|pid| pid.parse().unwrap()).collect();
    let part = |number: usize| -> (f64, f64) {
        let machines = measured["machines"].as_array().unwrap();
        let machine = machines.iter().find(|machine| machine["pid"] == pids[number]).unwrap();
        let part = &machine["parts"][0];
        (part["accessed_share"].as_f64().unwrap(), part["working_set_bytes"].as_f64().unwrap() / f64::from(1 << 20))
    };
    for (number, share, mib) in [(0, 4.0 / 16.0, 16.0), (1, 1.0 / 16.0, 16.0), (2, 0.0, 64.0)] {
        let (measured_share, measured_mib) = part(number);
        println!("process {number}: {share} of its memory is accessed, {measured_share} measured");
        let tolerance = if share == 0.0 { 0.01 } else { MAX_SHARE_ERROR };
        assert!((measured_share - share).abs() <= tolerance, "{number}: {measured_share}, not {share}: {measured}");
        // The process has a few more pages than its layout.
        assert!((measured_mib - mib * measured_share).abs() < 1.0, "{number}: {measured_mib} MiB: {measured}");
    }
    let text: Vec<&str> = scenes.output.lines().filter_map(|line| line.strip_prefix("TEXT ")).collect();
    assert!(text.iter().any(|line| line.contains("working set")), "{}", scenes.output);
    let applied = scenes.json("apply");
    assert_eq!((scenes.exit("apply"), &applied["hotness_source"]["figures"]), (0, &"working_set".into()));
    assert_eq!(kdamonds(scenes, "apply"), (0, 0));
}

fn check_kills(scenes: &Scenes) {
    let numbers = 1..=7;
    for number in numbers.clone() {
        let (killed, recovered) = (format!("killed-{number}"), format!("recovered-{number}"));
        assert_eq!((scenes.exit(&killed), scenes.exit(&recovered)), (137, 0), "{number}: {}", scenes.output);
        assert_eq!(kdamonds(scenes, &recovered), (0, 0), "{number}: {}", scenes.output);
    }
    assert_eq!(kdamonds(scenes, "killed-2"), (2, 0), "it was killed after its first setting");
    // A setting that DAMON refuses for a moment is written again, so the points may differ by a few settings.
    for running in [(2, 1), (2, 2)] {
        let is_running = |number| kdamonds(scenes, &format!("killed-{number}")) == running;
        assert!(numbers.clone().any(is_running), "{running:?}: {}", scenes.output);
    }
}

fn check_interruptions(scenes: &Scenes) {
    assert_eq!(kdamonds(scenes, "running"), (1, 1));
    assert_eq!((scenes.exit("interrupted"), kdamonds(scenes, "interrupted")), (2, (0, 0)), "{}", scenes.output);
    let ended = scenes.json("ended");
    assert_eq!((scenes.exit("ended"), kdamonds(scenes, "ended")), (3, (0, 0)), "{ended}");
    assert_eq!(ended["hotness_source"]["figures"], "run_time", "{ended}");
    assert!(ended["hotness_source"]["not_measured"].as_str().unwrap().contains("has ended"), "{ended}");
}

fn check_other_users(scenes: &Scenes) {
    for (name, expected) in [("configured", (1, 0)), ("monitored", (1, 1))] {
        let report = scenes.json(name);
        assert_eq!((scenes.exit(name), kdamonds(scenes, name)), (3, expected), "{report}");
        let why = report["hotness_source"]["not_measured"].as_str().unwrap();
        assert!(why.contains("another program uses DAMON: it has 1 kdamond"), "{why}");
    }
    assert!(scenes.output.lines().any(|line| line.starts_with("STATE on ")), "{}", scenes.output);
    if scenes.output.lines().any(|line| line == "EXCLUSIVE Y") {
        let report = scenes.json("exclusive");
        let why = report["hotness_source"]["not_measured"].as_str().unwrap();
        assert!(why.contains("DAMON_STAT") && scenes.exit("exclusive") == 3, "{why}");
    }
}
