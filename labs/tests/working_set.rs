//! `pagefold numa plan --working-set` in a guest whose kernel has DAMON for virtual addresses.

#![forbid(unsafe_code)]

use pagefold_labs::assets::GuestAssets;
use pagefold_labs::client::lab_binary;
use pagefold_labs::machine::{self, EmulatedMachine};
use serde_json::Value;
use std::path::Path;
use std::time::Duration;

/// Four standard errors of a share: `4 sqrt(p (1 - p) / n)` is at most 0.08 for the shares of 1/4 and 1/16 here, for n =
/// 500 tested pages. In ten seconds there are 100 sampling intervals with at least ten pages each; half of them suffice,
/// because an emulated CPU delays DAMON's thread.
const MAX_SHARE_ERROR: f64 = 0.08;

/// The output of the guest.
struct Scenes(String);

impl Scenes {
    fn line(&self, kind: &str, name: &str) -> &str {
        let prefix = format!("{kind} {name} ");
        let found = self.0.lines().find_map(|line| line.strip_prefix(&*prefix));
        found.unwrap_or_else(|| panic!("no {prefix}in {}", self.0))
    }

    fn exit(&self, name: &str) -> i32 {
        self.line("EXIT", name).parse().unwrap()
    }

    /// The number of kdamonds, and of their threads.
    fn kdamonds(&self, name: &str) -> (u64, u64) {
        let (count, threads) = self.line("KDAMONDS", name).split_once(' ').unwrap();
        (count.parse().unwrap(), threads.parse().unwrap())
    }

    fn json(&self, name: &str) -> Value {
        let prefix = format!("JSON {name} ");
        let json: String = self.0.lines().filter_map(|line| line.strip_prefix(&*prefix)).collect();
        serde_json::from_str(&json).unwrap_or_else(|error| panic!("{name}: {error}: {}", self.0))
    }
}

fn run_guest() -> Option<Scenes> {
    let directory = GuestAssets::default_directory();
    let kernel = match GuestAssets::find(&directory).and_then(|_| GuestAssets::find_recent_kernel(&directory)) {
        Ok(kernel) => kernel,
        Err(why) => {
            println!("skipped: {why}");
            return None;
        }
    };
    if let Err(why) = machine::find_busybox() {
        println!("skipped: {why}");
        return None;
    }
    let lab = lab_binary().unwrap();
    let pagefold = lab.with_file_name("pagefold");
    assert!(pagefold.exists(), "{}: cargo build -p pagefold --all-features", pagefold.display());
    let folder = tempfile::tempdir().unwrap();
    let machine = EmulatedMachine {
        kernel: &kernel,
        init: &Path::new(env!("CARGO_MANIFEST_DIR")).join("guest/init-working-set"),
        programs: &[(&lab, "pagefold-lab"), (&pagefold, "pagefold")],
        files: &[],
        options: &["-smp", "2", "-m", "1G", "-cpu", "max"],
        kernel_arguments: "numa_balancing=disable transparent_hugepage=never",
    };
    let output = machine.run(folder.path(), Duration::from_secs(900), &mut || Ok(())).expect("a machine");
    assert!(output.lines().any(|line| line == "ENDED"), "{output}");
    Some(Scenes(output))
}

#[test]
fn working_sets_are_measured_and_damon_is_off_afterwards() {
    let Some(scenes) = run_guest() else { return };
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
    assert_eq!((scenes.exit("measured"), scenes.kdamonds("measured")), (0, (0, 0)), "{measured}");
    assert_eq!(measured["hotness_source"], serde_json::json!({"figures": "working_set"}), "{measured}");
    let pids = scenes.0.lines().find_map(|line| line.strip_prefix("PIDS ")).unwrap();
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
    let text: Vec<&str> = scenes.0.lines().filter_map(|line| line.strip_prefix("TEXT ")).collect();
    assert!(text.iter().any(|line| line.contains("working set")), "{}", scenes.0);
    let applied = scenes.json("apply");
    assert_eq!((scenes.exit("apply"), &applied["hotness_source"]["figures"]), (0, &"working_set".into()));
    assert_eq!(scenes.kdamonds("apply"), (0, 0));
}

fn check_kills(scenes: &Scenes) {
    let numbers = 1..=7;
    for number in numbers.clone() {
        let (killed, recovered) = (format!("killed-{number}"), format!("recovered-{number}"));
        assert_eq!((scenes.exit(&killed), scenes.exit(&recovered)), (137, 0), "{number}: {}", scenes.0);
        assert_eq!(scenes.kdamonds(&recovered), (0, 0), "{number}: {}", scenes.0);
    }
    assert_eq!(scenes.kdamonds("killed-2"), (2, 0), "it was killed after its first setting");
    // A setting that DAMON refuses for a moment is written again, so the points may differ by a few settings.
    for running in [(2, 1), (2, 2)] {
        let is_running = |number| scenes.kdamonds(&format!("killed-{number}")) == running;
        assert!(numbers.clone().any(is_running), "{running:?}: {}", scenes.0);
    }
}

fn check_interruptions(scenes: &Scenes) {
    assert_eq!(scenes.kdamonds("running"), (1, 1));
    assert_eq!((scenes.exit("interrupted"), scenes.kdamonds("interrupted")), (2, (0, 0)), "{}", scenes.0);
    let ended = scenes.json("ended");
    assert_eq!((scenes.exit("ended"), scenes.kdamonds("ended")), (3, (0, 0)), "{ended}");
    assert_eq!(ended["hotness_source"]["figures"], "run_time", "{ended}");
    assert!(ended["hotness_source"]["not_measured"].as_str().unwrap().contains("has ended"), "{ended}");
}

fn check_other_users(scenes: &Scenes) {
    for (name, kdamonds) in [("configured", (1, 0)), ("monitored", (1, 1))] {
        let report = scenes.json(name);
        assert_eq!((scenes.exit(name), scenes.kdamonds(name)), (3, kdamonds), "{report}");
        let why = report["hotness_source"]["not_measured"].as_str().unwrap();
        assert!(why.contains("another program uses DAMON: it has 1 kdamond"), "{why}");
    }
    assert!(scenes.0.lines().any(|line| line.starts_with("STATE on ")), "{}", scenes.0);
    if scenes.0.lines().any(|line| line == "EXCLUSIVE Y") {
        let report = scenes.json("exclusive");
        let why = report["hotness_source"]["not_measured"].as_str().unwrap();
        assert!(why.contains("DAMON_STAT") && scenes.exit("exclusive") == 3, "{why}");
    }
}
