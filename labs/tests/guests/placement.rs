//! Placement of processes on CPUs and NUMA nodes: on this machine, and in a guest with two nodes. In the guest, the
//! user-space engine merges memory, too.

use pagefold_base::{Absent, AddressRange, IdSet, Pid};
use pagefold_host::Host;
use pagefold_host::action::{Action, ActionError, Exchange, ThreadId, undo_actions};
use pagefold_labs::assets::GuestAssets;
use pagefold_labs::client::lab_binary;
use pagefold_labs::machine::{self, EmulatedMachine};
use pagefold_linux::LiveHost;
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

fn ids(text: &str) -> IdSet {
    text.parse().unwrap()
}

/// A process that sleeps, and is killed with the value.
struct Sleeper(Child);

impl Sleeper {
    fn start() -> Self {
        Self(Command::new("sleep").arg("600").spawn().unwrap())
    }

    fn thread(&self, host: &LiveHost) -> ThreadId {
        let process = host.open(Pid(self.0.id())).unwrap().id();
        ThreadId { process, tid: process.pid, start_time: process.start_time }
    }

    fn allowed_cpus(&self, host: &LiveHost) -> IdSet {
        let pid = Pid(self.0.id());
        host.open(pid).unwrap().thread_cpus(pid).unwrap()
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn affinity_is_exchanged_and_undone() {
    let (host, sleeper) = (LiveHost::new(), Sleeper::start());
    let (thread, all) = (sleeper.thread(&host), sleeper.allowed_cpus(&host));
    let one: IdSet = all.iter().take(1).collect();
    let set = Action::SetAffinity { thread, cpus: Exchange { from: all.clone(), to: one.clone() }, pin: None };
    let undo = undo_actions(&host, &set).unwrap();
    host.apply(&set).unwrap();
    assert_eq!(sleeper.allowed_cpus(&host), one);
    assert!(host.apply(&set).unwrap().unchanged);
    let [undo] = &undo[..] else { panic!("{undo:?}") };
    host.apply(undo).unwrap();
    assert_eq!(sleeper.allowed_cpus(&host), all);

    let offline = Action::SetAffinity { thread, cpus: Exchange { from: all.clone(), to: ids("1000") }, pin: None };
    assert!(matches!(host.apply(&offline), Err(ActionError::Failed(_))));
    assert_eq!(sleeper.allowed_cpus(&host), all, "a refused affinity must change nothing");
    let another = ThreadId { start_time: thread.start_time + 1, ..thread };
    let gone =
        Action::SetAffinity { thread: another, cpus: Exchange { from: all.clone(), to: one.clone() }, pin: None };
    assert_eq!(host.apply(&gone), Err(ActionError::Vanished));
    if all != one {
        let changed = Action::SetAffinity { thread, cpus: Exchange { from: one.clone(), to: ids("1000") }, pin: None };
        assert!(matches!(host.apply(&changed), Err(ActionError::ChangedByOthers(_))));
    }
}

#[test]
fn pages_that_are_in_place_are_not_moved() {
    let host = LiveHost::new();
    let process = host.open(Pid(std::process::id())).unwrap();
    let page = host.page_size().bytes();
    let block = vec![1_u8; 9 * page as usize];
    let start = (block.as_ptr().addr() as u64).next_multiple_of(page);
    let range = AddressRange { start, end: start + 8 * page };
    let nodes = match process.page_nodes(range) {
        Err(Absent::NotOnThisKernel) => return println!("skipped: this kernel has no move_pages(2)"),
        nodes => nodes.expect("the nodes of own pages"),
    };
    let node = nodes[0].expect("the page is in memory");
    assert!(nodes.iter().all(Option::is_some), "{nodes:?}");
    let movement = Action::MovePages { process: process.id(), ranges: vec![range], node };
    if nodes.iter().all(|now| *now == Some(node)) {
        assert_eq!(undo_actions(&host, &movement), Ok(Vec::new()));
    }
    let outcome = host.apply(&movement).unwrap();
    assert!(outcome.missed_ranges.is_empty() && outcome.unchanged, "{outcome:?}");
    let missing = Action::MovePages { process: process.id(), ranges: vec![range], node: 900 };
    assert!(matches!(host.apply(&missing), Err(ActionError::Unsupported(_))), "there is no node 900");
    assert!(block.iter().all(|&byte| byte == 1));
}

#[test]
fn placement_on_two_nodes_is_undone_and_recovered() {
    let assets = match GuestAssets::find(&GuestAssets::default_directory()) {
        Ok(assets) => assets,
        Err(why) => return println!("skipped: {why}"),
    };
    if let Err(why) = machine::find_busybox() {
        return println!("skipped: {why}");
    }
    let lab = lab_binary().unwrap();
    let pagefold = lab.with_file_name("pagefold");
    assert!(pagefold.exists(), "{}: cargo build -p pagefold", pagefold.display());
    let member = std::env::current_exe().unwrap().parent().unwrap().with_file_name("examples").join("member");
    assert!(member.exists(), "{}: cargo build -p pagefold-engine --examples", member.display());
    let guest = Path::new(env!("CARGO_MANIFEST_DIR")).join("guest");
    let folder = tempfile::tempdir().unwrap();
    let machine = EmulatedMachine {
        kernel: &assets.kernel,
        init: &guest.join("init-placement"),
        programs: &[
            (&lab, "pagefold-lab"),
            (&pagefold, "pagefold"),
            (&member, "member"),
            (&guest.join("engine-nodes"), "engine-nodes"),
        ],
        files: &[],
        options: &[
            // A system call within a process needs XSAVE, which the default CPU does not have.
            &["-smp", "2", "-m", "1G", "-cpu", "max"][..],
            &["-object", "memory-backend-ram,id=m0,size=512M", "-object", "memory-backend-ram,id=m1,size=512M"],
            &["-numa", "node,nodeid=0,cpus=0,memdev=m0", "-numa", "node,nodeid=1,cpus=1,memdev=m1"],
            &["-numa", "dist,src=0,dst=1,val=21", "-numa", "dist,src=1,dst=0,val=21"],
        ]
        .concat(),
        kernel_arguments: "",
    };
    let output = machine.run(folder.path(), Duration::from_secs(300), &mut || Ok(())).expect("a machine");
    assert!(output.lines().any(|line| line == "ENDED"), "{output}");
    let step = |name: &str| -> (u64, u64, String) {
        let prefix = format!("STEP {name} ");
        let words: Vec<&str> =
            output.lines().find_map(|line| line.strip_prefix(&*prefix)).unwrap().split(' ').collect();
        let value = |number: usize| words[number].split_once('=').unwrap().1;
        (value(0).parse().unwrap(), value(1).parse().unwrap(), value(2).to_owned())
    };
    // The map counts pages by their frames; the steps count them from numa_maps.
    let map = |name: &str| -> serde_json::Value {
        let prefix = format!("MAP {name} ");
        let json: String = output.lines().filter_map(|line| line.strip_prefix(&*prefix)).collect();
        serde_json::from_str(&json).unwrap_or_else(|error| panic!("{error}: {output}"))
    };
    let before = step("before");
    assert!(before.0 >= 2000 && before.1 == 0 && before.2 == "0", "{output}");
    for (name, node) in [("before", 0), ("placed", 1), ("recovered", 0)] {
        let map = map(name);
        assert_eq!(map["nodes"][0]["cpus"], "0", "{map}");
        assert_eq!(map["nodes"][1]["distances"], serde_json::json!([21, 10]), "{map}");
        let process = &map["processes"][0];
        let private_pages = |node: u64| -> u64 {
            let on_node = process["memory"].as_array().unwrap().iter().filter(|pages| pages["node"] == node);
            on_node.map(|pages| pages["small_pages"].as_u64().unwrap() + pages["huge_pages"].as_u64().unwrap()).sum()
        };
        // Small regions such as stacks and heaps, which the steps leave out, stay where they were.
        let small_regions = private_pages(0) + private_pages(1) - before.0;
        assert!(private_pages(node) >= before.0 && small_regions < 1000, "{name}: {map}");
        assert_eq!(process["threads"][0]["node"], node, "{name}: {map}");
    }
    for name in ["placed", "killed"] {
        assert_eq!(step(name), (0, before.0, "1".to_owned()), "{name}: {output}");
    }
    for name in ["undone", "recovered"] {
        assert_eq!(step(name), before, "{name}: {output}");
    }
    assert_eq!(step("compared"), (before.0, 0, "0-1".to_owned()), "{output}");
    check_experiment(&output, before.0);
    check_engine_members(&output);
}

/// An experiment whose arm B places the process on node 1: it has no page there under A, and all of its pages under B.
fn check_experiment(output: &str, pages: u64) {
    assert!(output.lines().any(|line| line == "AB-STATUS 0"), "{output}");
    let json: String = output.lines().filter_map(|line| line.strip_prefix("AB ")).collect();
    let report: serde_json::Value = serde_json::from_str(&json).unwrap_or_else(|error| panic!("{error}: {output}"));
    assert_eq!(report["failed_undos"], serde_json::json!([]), "{report}");
    let metric = &report["result"]["metrics"][0];
    assert_eq!((&metric["verdict"], &metric["comparison"]["blocks"]), (&"better".into(), &6.into()), "{metric}");
    let samples = report["result"]["samples"].as_array().unwrap();
    let compared: Vec<_> = samples.iter().filter(|run| run["kind"] == "comparison").collect();
    assert_eq!(compared.len(), 6 * 4, "{samples:?}");
    for run in compared {
        let counted = run["samples"][0][0].as_f64().unwrap();
        match run["label"] == "A" {
            true => assert_eq!(counted, 1.0, "{run}"),
            false => assert!(counted > pages as f64, "{run}"),
        }
    }
}

/// The user-space engine on two nodes: merged memory stays on the node of the processes that share it.
fn check_engine_members(output: &str) {
    let stores = output.lines().find_map(|line| line.strip_prefix("STORES ")).expect("stores");
    let mut stores: Vec<&str> = stores.split_whitespace().collect();
    stores.sort_unstable();
    assert_eq!(stores, ["nodes.node0", "nodes.node1"], "{output}");

    let members: Vec<Vec<&str>> = output
        .lines()
        .filter_map(|line| line.strip_prefix("MEMBER "))
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(members.len(), 6, "{output}");
    for words in members {
        let node = words[0];
        assert_eq!(words[1], "same", "{output}");
        let is = |name: &str| words.iter().any(|word| word.starts_with(name));
        let (here, there) = (format!("N{node}="), if node == "0" { "N1=" } else { "N0=" });
        assert!(is(&here) && !is(there), "a member on node {node}: {words:?}");
        assert!(words.iter().any(|word| *word == format!("prefer:{node}")), "{words:?}");
    }
}
