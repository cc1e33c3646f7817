//! The user-space engine on a machine with two NUMA nodes, which QEMU is asked for: that merged memory stays on the node
//! of the processes that share it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use pagefold_labs::assets::{Assets, QEMU};

/// The machine's own initramfs: its init, busybox, and the test program of the engine with the libraries that it needs.
fn initramfs(folder: &Path, member: &Path, busybox: &Path) -> PathBuf {
    let root = folder.join("root");
    let put = |from: &Path, to: &str| {
        let to = root.join(to.trim_start_matches('/'));
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(from, to).unwrap();
    };
    for directory in ["dev", "proc", "sys"] {
        fs::create_dir_all(root.join(directory)).unwrap();
    }
    put(&Path::new(env!("CARGO_MANIFEST_DIR")).join("guest/init-nodes"), "init");
    put(busybox, "bin/busybox");
    put(member, "member");
    let needs = Command::new("ldd").arg(member).output().expect("ldd");
    let needs = String::from_utf8_lossy(&needs.stdout).into_owned();
    for path in needs.split_whitespace().filter(|word| word.starts_with('/')) {
        put(Path::new(path), path);
    }
    let archive = folder.join("initramfs.cpio");
    let packed = Command::new("sh")
        .args(["-c", "find . | cpio --quiet -o -H newc -R 0:0"])
        .current_dir(&root)
        .stdout(fs::File::create(&archive).unwrap())
        .status()
        .expect("a shell");
    assert!(packed.success(), "cpio: {packed}");
    archive
}

/// What a machine says on its serial line until it is off.
fn console(kernel: &Path, initramfs: &Path, log: &Path) -> String {
    let mut machine = Command::new(QEMU)
        .args(["-accel", "tcg", "-M", "pc", "-smp", "2", "-m", "512M", "-nodefaults", "-no-user-config"])
        .args(["-display", "none", "-no-reboot", "-nic", "none"])
        .args(["-object", "memory-backend-ram,id=m0,size=256M", "-object", "memory-backend-ram,id=m1,size=256M"])
        .args(["-numa", "node,nodeid=0,cpus=0,memdev=m0", "-numa", "node,nodeid=1,cpus=1,memdev=m1"])
        .arg("-kernel")
        .arg(kernel)
        .arg("-initrd")
        .arg(initramfs)
        .args(["-append", "console=ttyS0 mitigations=off no_timer_check panic=-1 quiet cryptomgr.notests"])
        .arg("-serial")
        .arg(format!("file:{}", log.display()))
        .stdin(Stdio::null())
        .spawn()
        .expect("QEMU");
    let deadline = Instant::now() + Duration::from_secs(120);
    while machine.try_wait().unwrap().is_none() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(100));
    }
    let _ = machine.kill();
    let _ = machine.wait();
    String::from_utf8_lossy(&fs::read(log).unwrap_or_default()).replace('\r', "")
}

#[test]
fn merged_memory_stays_on_its_node() {
    let assets = match Assets::find(&Assets::directory()) {
        Ok(assets) => assets,
        Err(why) => return println!("skipped: {why}"),
    };
    let busybox = ["/bin/busybox", "/usr/bin/busybox"].map(Path::new).into_iter().find(|path| path.exists());
    let Some(busybox) = busybox else { return println!("skipped: busybox is not there: run labs/setup.sh") };
    let member = std::env::current_exe().unwrap().parent().unwrap().with_file_name("examples").join("member");
    assert!(member.exists(), "{}: cargo build -p pagefold-engine --examples", member.display());

    let folder = tempfile::tempdir().unwrap();
    let initramfs = initramfs(folder.path(), &member, busybox);
    let said = console(&assets.kernel, &initramfs, &folder.path().join("log"));
    assert!(said.lines().any(|line| line == "ENDED"), "{said}");
    let stores = said.lines().find_map(|line| line.strip_prefix("STORES ")).expect("stores");
    let mut stores: Vec<&str> = stores.split_whitespace().collect();
    stores.sort_unstable();
    assert_eq!(stores, ["nodes.node0", "nodes.node1"], "{said}");

    let members: Vec<Vec<&str>> = said
        .lines()
        .filter_map(|line| line.strip_prefix("MEMBER "))
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(members.len(), 6, "{said}");
    for words in members {
        let node = words[0];
        assert_eq!(words[1], "same", "{said}");
        let is = |name: &str| words.iter().any(|word| word.starts_with(name));
        let (here, there) = (format!("N{node}="), if node == "0" { "N1=" } else { "N0=" });
        assert!(is(&here) && !is(there), "a member on node {node}: {words:?}");
        assert!(words.iter().any(|word| *word == format!("prefer:{node}")), "{words:?}");
    }
}
