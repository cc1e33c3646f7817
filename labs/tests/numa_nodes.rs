//! The user-space engine on a machine with two NUMA nodes, which QEMU emulates: merged memory stays on the node of the
//! processes that share it.

use std::path::Path;
use std::time::Duration;

use pagefold_labs::assets::GuestAssets;
use pagefold_labs::machine::{self, EmulatedMachine};

#[test]
fn merged_memory_stays_on_its_numa_node() {
    let assets = match GuestAssets::find(&GuestAssets::default_directory()) {
        Ok(assets) => assets,
        Err(why) => return println!("skipped: {why}"),
    };
    if let Err(why) = machine::find_busybox() {
        return println!("skipped: {why}");
    }
    let member = std::env::current_exe().unwrap().parent().unwrap().with_file_name("examples").join("member");
    assert!(member.exists(), "{}: cargo build -p pagefold-engine --examples", member.display());

    let folder = tempfile::tempdir().unwrap();
    let machine = EmulatedMachine {
        kernel: &assets.kernel,
        init: &Path::new(env!("CARGO_MANIFEST_DIR")).join("guest/init-nodes"),
        programs: &[(&member, "member")],
        files: &[],
        options: &[
            ["-smp", "2", "-m", "512M"],
            ["-object", "memory-backend-ram,id=m0,size=256M", "-object", "memory-backend-ram,id=m1,size=256M"],
            ["-numa", "node,nodeid=0,cpus=0,memdev=m0", "-numa", "node,nodeid=1,cpus=1,memdev=m1"],
        ]
        .concat(),
        kernel_arguments: "",
    };
    let output = machine.run(folder.path(), Duration::from_secs(120), &mut || Ok(())).expect("a machine");
    assert!(output.lines().any(|line| line == "ENDED"), "{output}");
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
