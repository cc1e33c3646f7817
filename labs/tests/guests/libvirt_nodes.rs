//! `pagefold numa` and a real libvirtd with cgroups, in a guest with two NUMA nodes: libvirt's pins, its cpusets, the CPUs of
//! all threads and the memory of a domain are where a placement says, and as before after its undo.

use crate::numa_apply::{find_program, page_nodes};
use pagefold_labs::assets::QEMU_PROGRAM;
use pagefold_labs::scenes::{SceneMachine, Scenes};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

const LIBVIRTD: &str = "/usr/sbin/libvirtd";

/// What libvirt describes CPU models with.
const CPU_MAP: &str = "/usr/share/libvirt/cpu_map";

/// Files that libvirt and QEMU need, beside their programs.
const FILES: [&str; 6] = [
    LIBVIRTD,
    "/usr/bin/virsh",
    "/usr/lib/x86_64-linux-gnu/libvirt/connection-driver/libvirt_driver_qemu.so",
    "/usr/share/seabios/bios-256k.bin",
    "/usr/share/qemu/kvmvapic.bin",
    "/usr/lib/x86_64-linux-gnu/qemu/accel-tcg-x86_64.so",
];

/// Pages of the memory of a domain, and of the first virtual node of one with two.
const DOMAIN_PAGES: usize = 12_288;

/// Pages of the second virtual node.
const SECOND_NODE_PAGES: usize = 8192;

const MACHINE_OPTIONS: &[&str] = &[
    "-smp",
    "4",
    "-m",
    "1G",
    "-cpu",
    "max",
    "-object",
    "memory-backend-ram,id=m0,size=640M",
    "-object",
    "memory-backend-ram,id=m1,size=384M",
    "-numa",
    "node,memdev=m0,cpus=0-1",
    "-numa",
    "node,memdev=m1,cpus=2-3",
    "-numa",
    "dist,src=0,dst=1,val=21",
];

fn run_guest() -> Option<Scenes> {
    if !Path::new(LIBVIRTD).exists() {
        println!("skipped: libvirtd is not installed: run labs/setup.sh");
        return None;
    }
    let qemu = find_program(QEMU_PROGRAM);
    let cpu_models = fs::read_dir(CPU_MAP).expect(CPU_MAP).map(|file| file.unwrap().path());
    let files: Vec<PathBuf> = FILES.iter().map(PathBuf::from).chain(cpu_models).collect();
    let mut programs: Vec<(&Path, &str)> = files.iter().map(|path| (path.as_path(), path.to_str().unwrap())).collect();
    programs.push((&qemu, "usr/bin/qemu-system-x86_64"));
    let machine = SceneMachine {
        init: "init-libvirt",
        programs: &programs,
        options: MACHINE_OPTIONS,
        kernel_arguments: "numa_balancing=disable",
        timeout: Duration::from_secs(600),
    };
    machine.run()
}

/// Asserts where a domain is: the pins of virtual CPU, emulator and iothread by libvirt, the CPUs of all its threads, the
/// cpuset of its virtual CPU, and each page of its memory.
fn assert_placement(scenes: &Scenes, name: &str, cpus: &str, node: u64) {
    assert_eq!(
        scenes.line("PINS", name),
        format!("libvirt: {cpus} {cpus} {cpus} threads: {cpus} cpuset: {cpus}"),
        "{name}"
    );
    assert_eq!(page_nodes(scenes, name), [vec![node; DOMAIN_PAGES]], "{name}");
}

fn assert_done(scenes: &Scenes, name: &str) {
    assert_eq!(scenes.exit(name), 0, "{name}: {}", scenes.output);
}

#[test]
fn domains_are_placed_with_their_pins_and_cpusets() {
    let Some(scenes) = run_guest() else { return };
    let assert_as_before = |name: &str, before: &str| {
        assert_eq!(scenes.line("PINS", name), scenes.line("PINS", before), "{name}");
        assert_eq!(page_nodes(&scenes, name), page_nodes(&scenes, before), "{name}");
    };
    assert_eq!(page_nodes(&scenes, "before"), [vec![0; DOMAIN_PAGES]], "{}", scenes.output);
    // QEMU lets the thread that allocates memory at the start run on the CPUs of that memory's node only.
    assert!(scenes.line("PINS", "before").starts_with("libvirt: 0-3 0-3 0-3 threads: 0-1 0-3 "), "{}", scenes.output);
    assert_done(&scenes, "placed");
    assert_placement(&scenes, "placed", "2-3", 1);
    let placed = &scenes.json("placed")["machines"][0];
    assert!(placed["preferring_bytes"].as_u64().unwrap() >= DOMAIN_PAGES as u64 * 4096, "{placed}");
    assert_done(&scenes, "verify");
    assert_done(&scenes, "again");
    assert_placement(&scenes, "again", "0-1", 0);
    assert_done(&scenes, "again-verify");
    assert_done(&scenes, "undo");
    let undone = "libvirt: 0-3 0-3 0-3 threads: 0-1 0-3 cpuset: 0-3";
    assert_eq!(scenes.line("PINS", "undone"), undone);
    assert_eq!(page_nodes(&scenes, "undone"), [vec![0; DOMAIN_PAGES]]);

    assert_eq!(scenes.exit("killed"), 137);
    assert!(scenes.line("PINS", "killed").starts_with("libvirt: 2-3 2-3 2-3 threads: 2-3 "), "{}", scenes.output);
    let killed = &page_nodes(&scenes, "killed")[0];
    assert!(killed.contains(&1) && killed.contains(&0), "a part of the memory has moved: {killed:?}");
    assert_done(&scenes, "recovered");
    assert_as_before("recovered", "undone");

    // The owner's pin stays.
    assert_done(&scenes, "owner");
    assert_eq!(scenes.exit("owner-verify"), 1, "{}", scenes.json("owner-verify"));
    assert_eq!(scenes.exit("owner-undo"), 3, "{}", scenes.output);
    assert_eq!(scenes.line("PINS", "owner-undone"), "libvirt: 0 0-3 0-3 threads: 0 0-1 0-3 cpuset: 0");
    assert_eq!(page_nodes(&scenes, "owner-undone"), [vec![0; DOMAIN_PAGES]]);

    assert_eq!(scenes.line("MEMS", "strict"), "0");
    assert_eq!(scenes.exit("strict-refused"), 2);
    let error = scenes.line("ERROR", "strict-refused");
    assert!(error.contains("strict may not use node 1") && error.contains("permit node 0"), "{error}");
    assert_as_before("strict-refused", "strict-before");
    assert_done(&scenes, "strict");
    assert_placement(&scenes, "strict", "0-1", 0);
    assert_done(&scenes, "strict-undo");
    assert_eq!(scenes.line("PINS", "strict-undone"), undone);
    assert_eq!(page_nodes(&scenes, "strict-undone"), [vec![0; DOMAIN_PAGES]]);
    check_virtual_nodes(&scenes);
}

/// Each virtual node has its virtual CPU and its memory on a node of its own, by libvirt, by its definition of the running
/// domain, and by the kernel. The undo restores all of it.
fn check_virtual_nodes(scenes: &Scenes) {
    let memory = |name: &str| ["node0", "node1"].map(|node| page_nodes(scenes, &format!("{name}-{node}")));
    let state = |name: &str| (scenes.line("PINS", name), scenes.line("XML", name), memory(name));
    let assert_nodes = |name: &str, cpus: [&str; 2], nodes: [u64; 2]| {
        let [first, second] = cpus;
        assert_eq!(
            scenes.line("PINS", name),
            format!("libvirt: {first} {second} 0-3 0-3 threads: {first} {second} cpusets: {first} {second}"),
            "{name}: {}",
            scenes.output
        );
        let pins = format!("<vcpupin vcpu='0' cpuset='{first}'/> <vcpupin vcpu='1' cpuset='{second}'/> ");
        assert!(scenes.line("XML", name).starts_with(&pins), "{name}: {}", scenes.line("XML", name));
        let pages = [DOMAIN_PAGES, SECOND_NODE_PAGES];
        assert_eq!(memory(name), [0, 1].map(|node| vec![vec![nodes[node]; pages[node]]]), "{name}");
    };
    let before = state("wide-before");
    assert!(before.0.starts_with("libvirt: 0-3 0-3 0-3 0-3 threads: 0-3 0-3 "), "{before:?}");
    assert_eq!(before.2.each_ref().map(|nodes| nodes[0].len()), [DOMAIN_PAGES, SECOND_NODE_PAGES]);
    assert_done(scenes, "wide");
    assert_nodes("wide", ["2-3", "0-1"], [1, 0]);
    assert_done(scenes, "wide-verify");
    assert_done(scenes, "wide-again");
    assert_nodes("wide-again", ["0-1", "2-3"], [0, 1]);
    // Undone for another process only, it stays.
    assert_done(scenes, "wide-other");
    assert_eq!(state("wide-other"), state("wide-again"));
    assert_done(scenes, "wide-undo");
    assert_eq!(state("wide-undone"), before, "{}", scenes.output);
    assert_eq!(scenes.json("wide-undone-verify")["machines"], serde_json::json!([]));
}
