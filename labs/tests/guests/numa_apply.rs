//! `pagefold numa apply`, `verify` and `undo` in a guest with six NUMA nodes, of which one has no memory and one no CPUs.
//! The kernel's own account of each process (numa_maps, smaps_rollup, status) is compared with what Pagefold did and
//! reported.

use pagefold_labs::assets::QEMU_PROGRAM;
use pagefold_labs::fault_points::{JOURNAL_POINTS, PLACEMENT_POINTS, VISIT_POINTS};
use pagefold_labs::scenes::{SceneMachine, Scenes};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

mod nodes_and_traps;

/// MiB of the memory of nodes 0 to 3 and 5: multiples of 128, the size of a memory block, because the map counts a block
/// that two nodes share for one of them.
const NODE_MIB: [(u32, u32); 5] = [(0, 1792), (1, 512), (2, 128), (3, 128), (5, 128)];

/// The CPUs of nodes 0 to 4.
const NODE_CPUS: [&str; 5] = ["cpus=0-1,", "cpus=2-3,", "cpus=4,", "cpus=5,", "cpus=6,"];

/// Distances between different nodes, the same in both directions.
const DISTANCES: [(u32, u32, u32); 15] = [
    (0, 1, 21),
    (0, 2, 31),
    (0, 3, 31),
    (0, 4, 17),
    (0, 5, 21),
    (1, 2, 21),
    (1, 3, 31),
    (1, 4, 31),
    (1, 5, 28),
    (2, 3, 21),
    (2, 4, 31),
    (2, 5, 28),
    (3, 4, 28),
    (3, 5, 28),
    (4, 5, 28),
];

/// Own pages of a process that change at most between two looks at it, beside those that Pagefold moves: pages of a stack
/// or heap that it touches, and pages that it has shared with the shell of the guest since fork(2).
const MAX_TOUCHED_PAGES: u64 = 8;

/// What the kernel says of a process.
#[derive(Clone, Debug, PartialEq)]
struct State {
    /// Resident pages of all nodes but 1, and of node 1.
    node_pages: [u64; 2],
    /// The part of them that is of files only.
    file_pages: [u64; 2],
    huge_kib: u64,
    merged_kib: u64,
    /// The memory policies of its mappings.
    policies: String,
    cpus: String,
}

impl State {
    /// Its own pages of a node, without those of files.
    fn own_pages(&self, node: usize) -> u64 {
        self.node_pages[node] - self.file_pages[node]
    }

    /// Whether memory, policies and CPUs are as before, except for a few pages that were touched meanwhile. More pages of
    /// its program and libraries may be mapped: the kernel maps those that are in memory, 16 for each fault, when they are
    /// read for a call within the process.
    fn is_as(&self, before: &Self) -> bool {
        let is_set_as = self.cpus == before.cpus && self.policies == before.policies;
        let has_files = self.file_pages.iter().zip(before.file_pages).all(|(now, before)| *now >= before);
        let are_close = |node: usize| self.own_pages(node).abs_diff(before.own_pages(node)) <= MAX_TOUCHED_PAGES;
        is_set_as && has_files && (0..2).all(are_close)
    }
}

/// The state of a process in a scene.
fn state(scenes: &Scenes, name: &str) -> State {
    let line = scenes.line("STATE", name);
    let (numbers, cpus) = line.split_once(" cpus=").unwrap();
    let value = |position: usize| numbers.split(' ').nth(position).unwrap().split_once('=').unwrap().1;
    let number = |position: usize| -> u64 { value(position).parse().unwrap() };
    State {
        node_pages: [number(0), number(1)],
        file_pages: [number(2), number(3)],
        huge_kib: number(4),
        merged_kib: number(5),
        policies: value(6).to_owned(),
        cpus: cpus.to_owned(),
    }
}

/// The nodes of the pages of mappings in a scene, page by page, by the status of move_pages(2), in the order of addresses.
pub fn page_nodes(scenes: &Scenes, name: &str) -> Vec<Vec<u64>> {
    let prefix = format!("PAGES {name} ");
    let number = |text: &str| -> u64 { text.parse().unwrap_or_else(|_| panic!("{name}: {text}")) };
    let run = |word: &str| {
        let (node, pages) = word.split_once('*').unwrap_or_else(|| panic!("{name}: {word}"));
        vec![number(node); number(pages) as usize]
    };
    let lines = scenes.output.lines().filter_map(|line| line.strip_prefix(&*prefix));
    lines.map(|line| line.split(' ').flat_map(run).collect()).collect()
}

/// The merged pages of a process in a scene that are on a node.
fn merged_pages_on(scenes: &Scenes, name: &str, node: u64) -> u64 {
    let [pages] = &page_nodes(scenes, name)[..] else { panic!("{name}: {}", scenes.output) };
    pages.iter().filter(|on| **on == node).count() as u64
}

fn check_daemon(scenes: &Scenes) {
    let before = state(scenes, "arrived-before");
    assert!(before.node_pages[0] >= 12_288, "{before:?}");
    let placed = state(scenes, "arrived");
    assert!(placed.node_pages[1] >= 12_288 && placed.cpus == before.cpus, "{placed:?} {}", scenes.output);
    let verified = scenes.json("arrived-verify");
    let machine = verified["machines"].as_array().unwrap().iter().find(|machine| machine["name"] == "arrived");
    assert_eq!(machine.unwrap()["state"], "as_planned", "{verified}");
    assert_eq!((scenes.exit("arrived-verify"), scenes.exit("daemon")), (0, 0), "{}", scenes.output);
    assert!(state(scenes, "arrived-after").node_pages[1] >= 12_288, "the placement outlives the daemon");
    assert_eq!(scenes.exit("arrived-undo"), 0);
    let undone = state(scenes, "arrived-undone");
    // Nothing stays on node 1. On node 0 the kernel may have added pages: khugepaged fills up new huge pages.
    assert!(undone.cpus == before.cpus && undone.own_pages(1).abs_diff(before.own_pages(1)) <= 64, "{undone:?}");
    assert!(undone.own_pages(0) + 64 >= before.own_pages(0), "{before:?} {undone:?}");
}

/// Options of QEMU for the nodes.
fn node_options() -> Vec<String> {
    let mut options = Vec::new();
    for node in 0..6_u32 {
        let mib = NODE_MIB.iter().find(|(id, _)| *id == node).map(|(_, mib)| mib);
        let memory = mib.map_or_else(String::new, |mib| {
            options.extend(["-object".to_owned(), format!("memory-backend-ram,id=m{node},size={mib}M")]);
            format!("memdev=m{node},")
        });
        let cpus = NODE_CPUS.get(node as usize).copied().unwrap_or_default();
        options.extend(["-numa".to_owned(), format!("node,{memory}{cpus}nodeid={node}")]);
    }
    let distance = |(from, to, distance)| ["-numa".to_owned(), format!("dist,src={from},dst={to},val={distance}")];
    options.extend(DISTANCES.into_iter().flat_map(distance));
    options
}

/// Compile the program with hugetlb, pinned and bound memory.
fn compile_memory_program(folder: &Path) -> Result<PathBuf, String> {
    let program = folder.join("numa-memory");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("guest/numa-memory.c");
    let mut compiler = Command::new("gcc");
    compiler.args(["-O1", "-static", "-o"]).arg(&program).arg(&source);
    let output = compiler.output().map_err(|error| format!("gcc: {error}: run labs/setup.sh"))?;
    assert!(output.status.success(), "{output:?}");
    Ok(program)
}

fn run_guest() -> Option<Scenes> {
    let folder = tempfile::tempdir().unwrap();
    let memory_program = match compile_memory_program(folder.path()) {
        Ok(program) => program,
        Err(why) => {
            println!("skipped: {why}");
            return None;
        }
    };
    let qemu = find_program(QEMU_PROGRAM);
    let more_scenes = Path::new(env!("CARGO_MANIFEST_DIR")).join("guest/numa-scenes");
    let undo_points = folder.path().join("undo-points");
    std::fs::write(&undo_points, nodes_and_traps::undo_steps().join("\n") + "\n").unwrap();
    let file = |path: &'static str| (Path::new(path), path);
    let nodes = node_options();
    let mut options = vec!["-smp", "7", "-m", "2688M", "-cpu", "max"];
    options.extend(nodes.iter().map(String::as_str));
    let machine = SceneMachine {
        init: "init-numa",
        programs: &[
            (&memory_program, "numa-memory"),
            (&more_scenes, "numa-scenes"),
            (&undo_points, "undo-points"),
            (&qemu, "usr/bin/qemu-system-x86_64"),
            file("/usr/share/seabios/bios-256k.bin"),
            file("/usr/share/qemu/kvmvapic.bin"),
            file("/usr/lib/x86_64-linux-gnu/qemu/accel-tcg-x86_64.so"),
        ],
        options: &options,
        kernel_arguments: "numa_balancing=disable",
        timeout: Duration::from_secs(900),
    };
    machine.run()
}

pub fn find_program(name: &str) -> PathBuf {
    let folders = std::env::var_os("PATH").unwrap();
    std::env::split_paths(&folders).map(|folder| folder.join(name)).find(|path| path.exists()).unwrap()
}

#[test]
fn machines_are_placed_verified_and_restored() {
    let Some(scenes) = run_guest() else { return };
    check_apply_and_undo(&scenes);
    check_kills(&scenes);
    check_restricted_process(&scenes);
    check_merged_pages(&scenes);
    check_virtual_nodes(&scenes);
    check_daemon(&scenes);
    check_full_node(&scenes);
    check_undo_of_one_process(&scenes);
    nodes_and_traps::check_four_nodes(&scenes);
    nodes_and_traps::check_hugetlb(&scenes);
    nodes_and_traps::check_pinned_memory(&scenes);
    nodes_and_traps::check_full_bound_node(&scenes);
    nodes_and_traps::check_forbidden_node(&scenes);
    nodes_and_traps::check_offline_cpus(&scenes);
    nodes_and_traps::check_ended_process(&scenes);
    nodes_and_traps::check_incomplete_nodes(&scenes);
    nodes_and_traps::check_balancing(&scenes);
    nodes_and_traps::check_killed_undo(&scenes);
}

fn check_apply_and_undo(scenes: &Scenes) {
    let before = state(scenes, "free-before");
    assert!(before.node_pages[0] > 18000 && before.cpus == "0-3", "{before:?}");
    assert!(before.huge_kib >= 4096 * 4, "the lab has no huge pages: {before:?}");

    let planned = scenes.json("dry-run");
    assert_eq!((scenes.exit("dry-run"), &planned["outcome"]), (0, &"planned".into()));
    assert!(state(scenes, "free-dry").is_as(&before));

    let report = scenes.json("apply");
    let machine = &report["machines"][0];
    assert_eq!((scenes.exit("apply"), &report["outcome"]), (0, &"done".into()), "{report}");
    let after = state(scenes, "free-applied");
    assert_eq!(after.cpus, "2-3", "{report}");
    let kept: u64 = machine["kept_pages"].as_object().unwrap().values().map(|pages| pages.as_u64().unwrap()).sum();
    // A page that fork(2) has shared with the shell of the guest.
    assert!(after.own_pages(0) <= MAX_TOUCHED_PAGES && kept <= 4, "{after:?} {report}");
    assert_eq!(after.huge_kib, before.huge_kib, "huge pages stay huge");
    assert_eq!(machine["split_pages"], 0, "{report}");
    // Small mappings keep their policy.
    assert_eq!((&*before.policies, &*after.policies), ("default", "default,prefer:1"), "{report}");
    assert!(machine["preferring_bytes"].as_u64().unwrap() >= 32 << 20, "{report}");
    let moved = machine["moved_pages"].as_u64().unwrap();
    assert!(
        moved.abs_diff(after.own_pages(1) - before.own_pages(1)) <= MAX_TOUCHED_PAGES,
        "{moved} {before:?} {after:?}"
    );
    let planned_pages = planned["machines"][0]["planned_pages"].as_u64().unwrap();
    assert!(planned_pages.abs_diff(moved) <= 64, "{planned_pages} planned, {moved} moved");
    let share = |name: &str| machine[name].as_f64().unwrap();
    // Its thread ran on node 0; pages of files that other processes had read before may be on either node.
    assert!(share("remote_share_before") < 0.3, "{report}");
    assert!((share("predicted_remote_share") - share("measured_remote_share")).abs() <= 0.02, "{report}");
    let files = after.node_pages[0] as f64 / (after.node_pages[0] + after.node_pages[1]) as f64;
    assert!((share("measured_remote_share") - files).abs() <= 0.01, "{report} {after:?}");

    // Of its own memory, each page is where the report says.
    for (name, node) in [("free-before", 0), ("free-applied", 1), ("free-undone", 0)] {
        let mut found = page_nodes(scenes, name);
        found.sort_by_key(Vec::len);
        assert_eq!(found, [vec![node; 4096], vec![node; 14_000]], "{name}");
    }

    let verified = scenes.json("verify");
    assert_eq!((scenes.exit("verify"), &verified["machines"][0]["state"]), (0, &"as_planned".into()), "{verified}");
    assert!(scenes.json("again")["moved_pages"].as_u64().unwrap() <= 64);
    assert_eq!(scenes.json("plan-after")["machines"][0]["moved"], false);
    let changed = scenes.json("verify-changed");
    assert_eq!(scenes.exit("verify-changed"), 1, "{changed}");
    assert_eq!(changed["machines"][0]["changed_threads"].as_array().unwrap().len(), 1, "{changed}");

    assert_eq!(scenes.exit("undo"), 0);
    assert!(state(scenes, "free-undone").is_as(&before), "{:?}", state(scenes, "free-undone"));
    assert_eq!(scenes.exit("undo-again"), 0);
}

/// A placement that was killed at a point.
struct Kill<'s> {
    number: &'s str,
    status: &'s str,
    /// Whether changes were kept by then, which `numa undo` undoes and `recover` leaves.
    is_keeping: bool,
    point: &'s str,
}

fn kills(scenes: &Scenes) -> Vec<Kill<'_>> {
    let kill = |line| {
        let mut words = str::splitn(line, 5, ' ');
        let mut word = || words.next().unwrap_or_else(|| panic!("{line}"));
        let (number, status, kept, _time, point) = (word(), word(), word(), word(), word());
        Kill { number, status, is_keeping: kept == "keeping", point }
    };
    scenes.output.lines().filter_map(|line| line.strip_prefix("KILL ")).map(kill).collect()
}

fn check_kills(scenes: &Scenes) {
    let before = state(scenes, "kills-before");
    assert_eq!(scenes.exit("unkilled"), 0);
    let placed = state(scenes, "unkilled");
    assert!(placed.cpus == "2-3" && placed.own_pages(1) >= 2000 && placed.policies == "default,prefer:1", "{placed:?}");
    assert!(state(scenes, "unkilled-undone").is_as(&before), "{:?}", state(scenes, "unkilled-undone"));

    let kills = kills(scenes);
    let points: BTreeSet<&str> = kills.iter().map(|kill| kill.point).collect();
    let listed: BTreeSet<&str> = [JOURNAL_POINTS, PLACEMENT_POINTS, VISIT_POINTS].concat().into_iter().collect();
    assert_eq!(points, listed, "the steps of a placement");
    // Each call within the process may touch a new page of a stack, so the state before each kill counts.
    let (mut before, mut changed) = (before, 0);
    for Kill { number, status, is_keeping, point } in &kills {
        assert_eq!(*status, "137", "{point} was not reached");
        changed += usize::from(!state(scenes, &format!("killed-{number}")).is_as(&before));
        assert_eq!(scenes.exit(&format!("recovered-{number}")), 0, "{point}");
        let name = if *is_keeping { "undone" } else { "recovered" };
        let restored = state(scenes, &format!("{name}-{number}"));
        assert_eq!(scenes.exit(&format!("{name}-{number}")), 0, "{point}");
        assert!(restored.is_as(&before), "{point}, {name}: {before:?} {restored:?}");
        before = restored;
    }
    let keeping = kills.iter().filter(|kill| kill.is_keeping).count();
    assert!(keeping >= 2 && changed > keeping && changed < kills.len(), "{changed} {keeping} of {}", kills.len());
    assert_eq!(scenes.exit("interrupted"), 3);
    assert!(state(scenes, "interrupted").is_as(&before), "{:?}", state(scenes, "interrupted"));
}

fn check_restricted_process(scenes: &Scenes) {
    assert_eq!(scenes.json("tied-plan")["machines"][0]["moved"], true);
    assert_eq!(scenes.exit("tied"), 0, "{}", scenes.json("tied"));
    let tied = state(scenes, "tied");
    assert!(tied.cpus == "2-3" && tied.node_pages[1] >= 6000 && tied.own_pages(0) <= MAX_TOUCHED_PAGES, "{tied:?}");
    assert_eq!(scenes.exit("tied-refused"), 2);
    assert!(scenes.line("ERROR", "tied-refused").contains("may not use node 0"));
}

fn check_merged_pages(scenes: &Scenes) {
    let (before, neighbor) = (state(scenes, "left-before"), state(scenes, "right-before"));
    assert!(before.merged_kib >= 1900 * 4, "{before:?}");
    let report = scenes.json("shared");
    let kept = report["machines"][0]["kept_pages"]["it is mapped several times"].as_u64().unwrap();
    let left = state(scenes, "left");
    assert!((kept * 4).abs_diff(before.merged_kib) <= 64 && left.node_pages[1] >= 1000, "{report} {left:?}");
    assert_eq!(left.merged_kib, before.merged_kib, "moving unmerges nothing");
    assert!(state(scenes, "right").is_as(&neighbor), "the neighbor's memory stays");

    let predicted = &scenes.json("predict")["machines"][0];
    let number = |name: &str| predicted[name].as_u64().unwrap();
    let moved = report["machines"][0]["moved_pages"].as_u64().unwrap();
    assert!((number("moved_bytes") / 4096).abs_diff(moved) <= 64, "{moved} moved: {predicted}");
    assert!(number("kept_merged_pages").abs_diff(kept) <= 64, "{kept} kept: {predicted}");
    let neighbors = predicted["dragged_neighbors"].as_array().unwrap();
    assert_eq!(neighbors.len(), 1, "{predicted}");
    let predicted_pages = neighbors[0]["pages"].as_u64().unwrap();
    for name in ["left", "right"] {
        let [before, dragged] = ["before", "dragged"].map(|scene| format!("{name}-merged-{scene}"));
        let (before, dragged) = ([0, 1].map(|node| merged_pages_on(scenes, &before, node)), dragged);
        assert!(before[0] >= 1900 && before[1] == 0, "{name}: {before:?}");
        assert_eq!(merged_pages_on(scenes, &dragged, 0), 0, "{name}: all merged frames follow the cgroup");
        let dragged = merged_pages_on(scenes, &dragged, 1);
        assert!(dragged.abs_diff(predicted_pages) <= MAX_TOUCHED_PAGES, "{name}: {dragged} dragged: {predicted}");
    }
    assert_eq!(page_nodes(scenes, "right-dragged"), [vec![0; 1000]], "the neighbor's own pages stay");
    assert_eq!(number("copies_before_bytes"), 0, "both run on node 0");
    assert_eq!(number("copies_after_bytes"), number("shared_frames") * 4096, "each node would need a copy");
    assert_eq!(scenes.exit("cpuset-refused"), 2);
    assert!(scenes.line("ERROR", "cpuset-refused").contains("may not use node 1"), "{}", scenes.output);
}

fn check_virtual_nodes(scenes: &Scenes) {
    let memory = |name: &str, virtual_node: usize| -> Vec<(u64, u64)> {
        let map = scenes.json(name);
        let nodes = &map["processes"][0]["virtual_nodes"][virtual_node]["memory"];
        let pages =
            |kinds: &Value| ["small_pages", "huge_pages"].map(|kind| kinds[kind].as_u64().unwrap()).iter().sum();
        let node = |kinds: &Value| (kinds["node"].as_u64().unwrap(), pages(kinds));
        nodes.as_array().unwrap_or_else(|| panic!("{map}")).iter().map(node).filter(|(_, pages)| *pages > 0).collect()
    };
    assert_eq!(memory("machine-map-before", 0), [(0, 16384)], "{}", scenes.output);
    assert_eq!(memory("machine-map-before", 1), [(0, 8192)]);
    let report = scenes.json("machine");
    assert_eq!(report["outcome"], "done", "{report}");
    assert_eq!(memory("machine-map", 0), [(1, 16384)], "{report}");
    assert_eq!(memory("machine-map", 1), [(0, 8192)], "{report}");
    // QEMU may still have been starting when its memory was counted before.
    assert!(state(scenes, "machine").huge_kib >= state(scenes, "machine-before").huge_kib, "huge pages stay huge");
    let cpus = state(scenes, "machine").cpus;
    assert!(cpus.contains("0-1") && cpus.contains("2-3"), "each vCPU is on the node of its virtual node: {cpus}");
    for name in ["machine-refused", "all-refused", "missing"] {
        assert_eq!(scenes.exit(name), 2, "{name}");
    }
    let ended = scenes.json("ended");
    let machine_state = |machine: &Value| machine["state"].as_str().unwrap().to_owned();
    let machines = ended["machines"].as_array().unwrap();
    assert!(machines.iter().any(|machine| machine["name"] == "big" && machine_state(machine) == "ended"), "{ended}");
}

fn check_full_node(scenes: &Scenes) {
    let before = state(scenes, "large-before");
    let report = scenes.json("full");
    assert_eq!((scenes.exit("full"), &report["outcome"]), (3, &"partial".into()), "{report}");
    assert_eq!(report["machines"][0]["failure"], "node 1 has no room for it", "{report}");
    let after = state(scenes, "large");
    assert!(after.node_pages[0] > 0 && after.node_pages[0] < before.node_pages[0], "{after:?}");
    let verified = scenes.json("full-verify");
    assert_eq!(
        (scenes.exit("full-verify"), &verified["machines"][0]["state"]),
        (1, &"incomplete".into()),
        "{verified}"
    );
    assert_eq!(scenes.exit("full-undo"), 0);
    assert!(state(scenes, "large-undone").is_as(&before), "{:?}", state(scenes, "large-undone"));
}

fn check_undo_of_one_process(scenes: &Scenes) {
    let before = state(scenes, "alone-before");
    assert_eq!(scenes.exit("alone"), 0, "{}", scenes.output);
    assert_eq!(scenes.exit("alone-undo"), 0);
    assert!(state(scenes, "alone-undone").is_as(&before), "{:?}", state(scenes, "alone-undone"));
    let kept = state(scenes, "alone-kept");
    assert!(kept.node_pages[1] >= 3000 && kept.cpus.contains("2-3"), "{kept:?}");
    let verified = scenes.json("alone-verify");
    assert_eq!(verified["machines"].as_array().unwrap().len(), 1, "{verified}");
    assert_eq!((scenes.exit("alone-verify"), scenes.exit("alone-again")), (0, 0), "{verified}");
    assert_eq!(scenes.json("alone-again")["undone"], serde_json::json!([]));
    assert_eq!(scenes.exit("alone-missing"), 2);
    assert!(scenes.line("ERROR", "alone-missing").contains("nosuch"), "{}", scenes.output);
    assert_eq!(scenes.exit("alone-last"), 0);
    assert!(state(scenes, "alone-last").node_pages[1] < 3000);
}
