//! A machine over four nodes, and memory, CPUs and nodes with which a placement must not end half done.

use super::{MAX_TOUCHED_PAGES, State, page_nodes, state};
use pagefold_labs::fault_points::VISIT_POINTS;
use pagefold_labs::scenes::Scenes;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::UNIX_EPOCH;

/// Pages of each virtual node of the machine over four nodes.
const VIRTUAL_NODE_PAGES: u64 = 1024;

/// Processes of which `numa undo` restores memory, policies and CPUs.
const RESTORED_PROCESSES: usize = 16;

/// The first steps of `numa undo` at which it is killed.
const FIRST_UNDO_STEPS: [&str; 3] =
    ["before writing a journal", "between writing a journal and renaming it", "after renaming a journal"];

/// The steps after its visits to processes. The last ones come when all memory is back, so that nothing is left to visit.
const LAST_UNDO_STEPS: [&str; 8] = [
    "before moving pages",
    "after moving pages",
    "before appending to a journal",
    "after appending to a journal",
    "before removing a journal",
    "after removing a journal",
    "before setting an affinity",
    "after setting an affinity",
];

/// The days after which each step of a visit was chosen. Other changes visit processes in the same way, so the undo is killed
/// at a part of the steps each day, and at all with `PAGEFOLD_SOAK=1`.
const DAYS_FOR_ALL_VISIT_POINTS: u64 = 4;

const SECONDS_PER_DAY: u64 = 86_400;

/// The steps of `numa undo` at which it is killed today, in their order. `PAGEFOLD_DAY`, in days since 1970, chooses those
/// of another day.
pub fn undo_steps() -> Vec<&'static str> {
    let is_complete = std::env::var_os("PAGEFOLD_SOAK").is_some();
    let today = || UNIX_EPOCH.elapsed().unwrap().as_secs() / SECONDS_PER_DAY;
    let day = std::env::var("PAGEFOLD_DAY").map_or_else(|_| today(), |day| day.parse().expect("a number of days"));
    let is_chosen = |number: usize| is_complete || (number as u64 + day).is_multiple_of(DAYS_FOR_ALL_VISIT_POINTS);
    let visits = VISIT_POINTS.iter().enumerate().filter(|(number, _)| is_chosen(*number)).map(|(_, step)| *step);
    FIRST_UNDO_STEPS.into_iter().chain(visits).chain(LAST_UNDO_STEPS).collect()
}

/// The pages by node of each mapping in a scene, as the kernel says (numa_maps), in the order of the addresses.
fn layouts(scenes: &Scenes, name: &str) -> Vec<BTreeMap<u64, u64>> {
    let prefix = format!("LAYOUT {name} ");
    let count = |word: &str| {
        let (node, pages) = word.split_once('=').unwrap();
        (node.parse().unwrap(), pages.parse().unwrap())
    };
    let lines = scenes.output.lines().filter_map(|line| line.strip_prefix(&*prefix));
    lines.map(|line| line.split(' ').map(count).collect()).collect()
}

/// The pages by node of each virtual node, as the map says.
fn mapped(scenes: &Scenes, name: &str) -> Vec<BTreeMap<u64, u64>> {
    let map = scenes.json(name);
    let machine = map["processes"][0]["virtual_nodes"].as_array().unwrap_or_else(|| panic!("{map}"));
    let pages = |kinds: &Value| (kinds["node"].as_u64().unwrap(), kinds["pages"].as_u64().unwrap());
    machine.iter().map(|node| node["memory"].as_array().unwrap().iter().map(pages).collect()).collect()
}

/// The layouts of the machine's virtual nodes. QEMU maps each backend below the earlier ones.
fn machine_layouts(scenes: &Scenes, name: &str) -> Vec<BTreeMap<u64, u64>> {
    let mut found = layouts(scenes, name);
    assert_eq!(found.len(), 4, "{name}: {found:?}");
    found.reverse();
    found
}

/// The node of each page of the machine's virtual nodes. All of their memory is in use.
fn machine_page_nodes(scenes: &Scenes, name: &str) -> Vec<Vec<u64>> {
    let mut found = page_nodes(scenes, name);
    let sizes: Vec<u64> = found.iter().map(|pages| pages.len() as u64).collect();
    assert_eq!(sizes, [VIRTUAL_NODE_PAGES; 4], "{name}");
    found.reverse();
    found
}

/// Asserts that each page of each virtual node is on the node of its layout, which has one node for each of them.
fn assert_pages_are_on(scenes: &Scenes, name: &str, layouts: &[BTreeMap<u64, u64>]) {
    for (pages, layout) in machine_page_nodes(scenes, name).iter().zip(layouts) {
        let [node] = &layout.keys().collect::<Vec<_>>()[..] else { panic!("{layout:?}") };
        let elsewhere = pages.iter().filter(|on| on != node).count();
        assert_eq!(elsewhere, 0, "{name}: pages that are not on node {node}");
    }
}

fn outcome(scenes: &Scenes, name: &str) -> (i32, Value) {
    (scenes.exit(name), scenes.json(name)["outcome"].clone())
}

pub fn check_four_nodes(scenes: &Scenes) {
    let map = scenes.json("quad-map-before");
    let nodes = map["nodes"].as_array().unwrap();
    let cpus: Vec<&Value> = nodes.iter().map(|node| &node["cpus"]).collect();
    assert_eq!(cpus, ["0-1", "2-3", "4", "5", "6", ""], "{map}");
    let has_memory: Vec<bool> = nodes.iter().map(|node| node["total_bytes"] != 0).collect();
    assert_eq!(has_memory, [true, true, true, true, false, true], "{map}");
    assert_eq!(nodes[0]["distances"], json!([10, 21, 31, 31, 17, 21]), "{map}");
    assert_eq!(nodes[3]["distances"], json!([31, 31, 21, 10, 28, 28]), "{map}");

    let before = machine_layouts(scenes, "quad-before");
    let interleaved: BTreeMap<u64, u64> = (0..4).map(|node| (node, VIRTUAL_NODE_PAGES / 4)).collect();
    assert_eq!(before, vec![interleaved; 4]);
    assert_eq!(mapped(scenes, "quad-map-before"), before);
    // The kernel interleaves by the page's position in its mapping.
    let pages_before = machine_page_nodes(scenes, "quad-before");
    for pages in &pages_before {
        assert!(pages.iter().zip(&pages[1..]).all(|(node, next)| *next == (node + 1) % 4), "{pages:?}");
    }

    let report = scenes.json("quad");
    assert_eq!(outcome(scenes, "quad"), (0, "done".into()), "{report}");
    let planned = report["machines"][0]["parts"].as_array().unwrap().iter().map(|part| {
        let [node] = &part["nodes"].as_array().unwrap()[..] else { panic!("{report}") };
        BTreeMap::from([(node.as_u64().unwrap(), VIRTUAL_NODE_PAGES)])
    });
    let planned: Vec<BTreeMap<u64, u64>> = planned.collect();
    assert_eq!(machine_layouts(scenes, "quad"), planned, "{report}");
    assert_eq!(mapped(scenes, "quad-map"), planned, "{report}");
    assert_pages_are_on(scenes, "quad", &planned);

    let requested: Vec<BTreeMap<u64, u64>> =
        [1, 2, 3, 0].map(|node| BTreeMap::from([(node, VIRTUAL_NODE_PAGES)])).to_vec();
    assert_eq!(outcome(scenes, "rotated"), (0, "done".into()), "{}", scenes.json("rotated"));
    assert_eq!(machine_layouts(scenes, "rotated"), requested);
    assert_pages_are_on(scenes, "rotated", &requested);
    assert_eq!(scenes.exit("quad-undo"), 0);
    assert_eq!(machine_layouts(scenes, "quad-undone"), before);
    assert_eq!(machine_page_nodes(scenes, "quad-undone"), pages_before, "each page is on its former node");
}

pub fn check_hugetlb(scenes: &Scenes) {
    // Four pages of 2 MiB.
    for name in ["hugetlb", "poolless"] {
        assert_eq!(outcome(scenes, name), (0, "done".into()), "{}", scenes.json(name));
        assert_eq!(layouts(scenes, name), [BTreeMap::from([(1, 4)])], "{name}");
        assert_eq!(scenes.exit(&format!("{name}-undo")), 0);
        assert_eq!(layouts(scenes, &format!("{name}-undone")), [BTreeMap::from([(0, 4)])], "{name}");
    }
    let map = scenes.json("hugetlb-map");
    let on_node = |node: &Value| (node["node"].as_u64().unwrap(), node["hugetlb_pages"].as_u64().unwrap());
    let pages: BTreeMap<u64, u64> = map["processes"][0]["memory"].as_array().unwrap().iter().map(on_node).collect();
    assert_eq!(pages[&1], 2048, "{map}");
    // Without free pages in the pool, the prediction says so; the kernel takes surplus pages, and gives them back.
    let predicted = scenes.json("poolless-predict");
    assert_eq!(scenes.exit("poolless-predict"), 1, "{predicted}");
    let node = &predicted["machines"][0]["nodes"][0];
    assert_eq!((&node["free_hugetlb_bytes"], &node["fits"]), (&0.into(), &false.into()), "{predicted}");
    assert_eq!(scenes.line("POOLS", "before"), scenes.line("POOLS", "after"));
}

/// Asserts that the undo of a scene has restored the process.
fn assert_undone(scenes: &Scenes, name: &str) {
    assert_eq!(scenes.exit(&format!("{name}-undo")), 0, "{name}");
    assert_as_before(scenes, &format!("{name}-undone"), &format!("{name}-before"));
}

fn assert_as_before(scenes: &Scenes, name: &str, before: &str) {
    let (now, before) = (state(scenes, name), state(scenes, before));
    assert!(now.is_as(&before), "{name}: {now:?} {before:?}");
}

pub fn check_pinned_memory(scenes: &Scenes) {
    let pinned = "it is pinned";
    let kept = |name: &str| scenes.json(name)["machines"][0]["kept_pages"][pinned].clone();
    assert_eq!(outcome(scenes, "pinned"), (3, "partial".into()));
    assert_eq!(kept("pinned"), 40);
    let moved = state(scenes, "pinned");
    assert!(moved.cpus == "2-3" && moved.own_pages(0).abs_diff(40) <= MAX_TOUCHED_PAGES, "{moved:?}");
    assert_undone(scenes, "pinned");

    // Most of the memory stays, so the threads do.
    assert_eq!(outcome(scenes, "held"), (3, "partial".into()));
    assert_eq!(kept("held"), 600);
    let held = state(scenes, "held");
    assert!(held.cpus == "0-5" && held.own_pages(0).abs_diff(600) <= MAX_TOUCHED_PAGES, "{held:?}");
    let why = scenes.json("held")["machines"][0]["kept_threads"].to_string();
    assert!(why.contains("most of the machine's memory stays"), "{why}");
    assert_undone(scenes, "held");

    assert_eq!(scenes.exit("counted"), 2);
    assert!(scenes.line("ERROR", "counted").contains("the memory of numa-memory is pinned"), "{}", scenes.output);
    let plan = scenes.json("counted-plan");
    assert_eq!(plan["machines"][0]["moved"], false, "{plan}");
    assert_as_before(scenes, "counted", "counted-before");
}

pub fn check_full_bound_node(scenes: &Scenes) {
    let report = scenes.json("guest");
    assert_eq!(outcome(scenes, "guest"), (3, "partial".into()), "{report}");
    assert_eq!(report["machines"][0]["failure"], "node 2 has no room for it", "{report}");
    assert_as_before(scenes, "guest-undone", "guest-before");
    // The rest of the bound memory fits into the headroom: the kernel killed no process.
    assert_eq!(layouts(scenes, "bound-filled"), [BTreeMap::from([(2, 2048)])], "{}", scenes.output);
    assert_eq!(scenes.line("KILLED", "0"), "by the kernel", "{}", scenes.output);

    let report = scenes.json("bound");
    assert_eq!(layouts(scenes, "bound"), [BTreeMap::from([(3, 2048)])], "{report}");
    assert_eq!(scenes.exit("bound-undo"), 0);
    assert_eq!(layouts(scenes, "bound-undone"), [BTreeMap::from([(2, 2048)])]);
}

pub fn check_forbidden_node(scenes: &Scenes) {
    assert_eq!(scenes.exit("strict"), 2);
    let error = scenes.line("ERROR", "strict");
    assert!(error.contains("big may not use node 1") && error.contains("cpuset"), "{error}");
    assert_as_before(scenes, "strict", "strict-before");
    assert_as_before(scenes, "beside-strict", "beside-strict-before");
}

pub fn check_offline_cpus(scenes: &Scenes) {
    let machine = |name: &str| scenes.json(name)["machines"][1].clone();
    assert_eq!(outcome(scenes, "one-offline"), (0, "done".into()), "{}", machine("one-offline"));
    let one = state(scenes, "one-offline");
    assert!(one.cpus == "2-3" && one.own_pages(1) >= 1000, "{one:?}");
    assert_eq!(scenes.exit("one-offline-verify"), 0, "{}", scenes.json("one-offline-verify"));

    assert_eq!(outcome(scenes, "all-offline"), (3, "partial".into()), "{}", machine("all-offline"));
    let why = machine("all-offline")["kept_threads"].to_string();
    assert!(why.contains("none of the CPUs is online"), "{why}");
    assert_eq!(state(scenes, "all-offline").cpus, "0-5");
    for name in ["one-offline", "all-offline"] {
        assert_eq!(scenes.exit(&format!("{name}-undo")), 0, "{name}");
        assert_as_before(scenes, &format!("{name}-undone"), "offline-before");
    }
}

pub fn check_ended_process(scenes: &Scenes) {
    let report = scenes.json("ending");
    assert_eq!(outcome(scenes, "ending"), (3, "partial".into()), "{report}");
    assert_eq!(report["machines"][0]["failure"], "the process has ended", "{report}");
    let surviving = state(scenes, "surviving");
    assert!(surviving.cpus == "2-3" && surviving.own_pages(0) <= MAX_TOUCHED_PAGES, "{surviving:?} {report}");
    assert_undone(scenes, "surviving");
}

pub fn check_incomplete_nodes(scenes: &Scenes) {
    let errors = [("memoryless", "node 4 has no memory"), ("cpuless", "node 5 has no online CPUs")];
    for (name, error) in errors {
        assert_eq!(scenes.exit(name), 2, "{name}");
        assert!(scenes.line("ERROR", name).contains(error), "{}", scenes.line("ERROR", name));
    }
    let before = state(scenes, "edge-before");
    assert_eq!(before.cpus, "0-5");
    assert_as_before(scenes, "edge-refused", "edge-before");
    // It may only run on node 4, which has no memory.
    let thread = &scenes.json("edge-map")["processes"][0]["threads"][0];
    assert_eq!((&thread["node"], &thread["allowed_cpus"]), (&4.into(), &"6".into()), "{thread}");
    let plan = scenes.json("edge-plan");
    assert_eq!(plan["machines"][0]["reason"], "no_permitted_node", "{plan}");
    assert_eq!(scenes.exit("edge"), 0);
    assert_eq!(scenes.json("edge")["machines"], json!([]));
    let after = state(scenes, "edge");
    assert!(State { cpus: before.cpus.clone(), ..after.clone() }.is_as(&before) && after.cpus == "6", "{after:?}");
}

/// A placement while NUMA balancing is on, which moves memory of another process at the same time.
pub fn check_balancing(scenes: &Scenes) {
    assert_eq!(outcome(scenes, "beside"), (0, "done".into()), "{}", scenes.json("beside"));
    let placed = state(scenes, "beside");
    assert!(placed.cpus == "2-3" && placed.own_pages(0) <= MAX_TOUCHED_PAGES, "{placed:?}");
    // The smaller mapping has no policy: the kernel samples it.
    assert_eq!(placed.policies, "default,prefer:1");
    for (name, node) in [("beside-before", 0), ("beside", 1)] {
        let mut found = page_nodes(scenes, name);
        found.sort_by_key(Vec::len);
        assert_eq!(found, [vec![node; 2000], vec![node; 9000]], "{name}");
    }
    // It is on: it has moved the memory of the process that is not placed.
    let (before, pulled) = (state(scenes, "stray-before"), state(scenes, "stray"));
    assert!(before.own_pages(0) >= 2000 && pulled.own_pages(1) >= 1000, "{before:?} {pulled:?}");
    let verified = scenes.json("beside-verify");
    assert_eq!(scenes.exit("beside-verify"), 0, "{verified}");
    let machines = verified["machines"].as_array().unwrap();
    let running: Vec<&Value> = machines.iter().filter(|machine| machine["state"] != "ended").collect();
    assert!(running.len() == 1 && running[0]["state"] == "as_planned", "{verified}");
    assert_eq!((&verified["numa_balancing"], &verified["balancing_advice"]), (&true.into(), &"keep".into()));
    let counter = |name: &str| verified["counters"][name].as_u64().unwrap_or_else(|| panic!("{name}: {verified}"));
    assert!(counter("numa_hint_faults") >= 1000 && counter("numa_pages_migrated") >= 1000, "{verified}");
    let share = verified["local_hint_fault_share"].as_f64().unwrap();
    let counted = counter("numa_hint_faults_local") as f64 / counter("numa_hint_faults") as f64;
    assert!((share - counted).abs() < 1e-9, "{verified}");
    // The kernel may have moved pages before Pagefold did, which stay.
    let report = &scenes.json("beside")["machines"][0];
    let pages = |name: &str| report[name].as_u64().unwrap();
    let moved_by_kernel = pages("planned_pages").saturating_sub(pages("moved_pages"));
    assert_eq!(scenes.exit("beside-undo"), 0);
    let (before, undone) = (state(scenes, "beside-before"), state(scenes, "beside-undone"));
    assert!(undone.cpus == before.cpus && undone.policies == before.policies, "{before:?} {undone:?}");
    let staying = before.own_pages(0).saturating_sub(undone.own_pages(0));
    assert!(staying <= moved_by_kernel + MAX_TOUCHED_PAGES, "{moved_by_kernel}: {before:?} {undone:?}");
}

pub fn check_killed_undo(scenes: &Scenes) {
    assert_eq!(outcome(scenes, "placed"), (0, "done".into()), "{}", scenes.json("placed"));
    let undos: Vec<&str> = scenes.output.lines().filter_map(|line| line.strip_prefix("UNDO ")).collect();
    assert_eq!(undos.len(), undo_steps().len(), "{undos:?}");
    for undo in undos {
        assert!(undo.starts_with("137 "), "a step was not reached: {undo}");
    }
    assert_eq!(scenes.exit("placed-undo"), 0);
    for number in 1..=RESTORED_PROCESSES {
        let before = state(scenes, &format!("placed{number}-before"));
        let placed = state(scenes, &format!("placed{number}"));
        assert!(placed.policies == "default,prefer:1" && placed.cpus == "2-3", "{number}: {placed:?}");
        assert!(placed.own_pages(1) >= 200 && before.own_pages(0) >= 200, "{number}: {before:?} {placed:?}");
        assert_as_before(scenes, &format!("placed{number}-undone"), &format!("placed{number}-before"));
        assert_eq!(scenes.line("END", &format!("placed{number}")), "INTACT");
    }
}
