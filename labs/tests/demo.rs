//! The output of `make demo` for users other than root.

use std::fs;
use std::os::unix::fs::{chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

const NOBODY_UID: u32 = 65534;

fn run_checked(command: &mut Command) {
    let status = command.status().expect("it exists");
    assert!(status.success(), "{command:?}: {status}");
}

#[test]
fn demo_simulation_reports_savings_without_root() {
    let tests = std::env::current_exe().expect("a test is a program");
    let target = tests.parent().and_then(Path::parent).expect("target/PROFILE/deps");
    let library = target.join("libpagefold_engine.so");
    if !library.exists() {
        return println!("skipped: `cargo build -p pagefold-engine` was not run");
    }
    if Command::new("g++").arg("--version").output().is_err() {
        return println!("skipped: no C++ compiler");
    }
    // Files that the user can read, wherever this tree is. The library is in its place already, and nothing needs a
    // build.
    let folder = tempfile::tempdir().unwrap();
    let (programs, built) = (folder.path().join("programs"), folder.path().join("target"));
    fs::create_dir(&programs).unwrap();
    fs::create_dir_all(built.join("release")).unwrap();
    symlink("/bin/true", programs.join("cargo")).unwrap();
    fs::copy(library, built.join("release/libpagefold_engine.so")).unwrap();
    let mut copy = Command::new("cp");
    copy.args(["-r", "--parents", "labs/demo.sh", "labs/hera", "crates/engine/include"]).arg(folder.path());
    run_checked(copy.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("..")));
    run_checked(Command::new("chmod").args(["-R", "a+rX"]).arg(folder.path()));

    let mut demo = Command::new(folder.path().join("labs/demo.sh"));
    // A tiny case in which all mergeable memory is merged.
    demo.args(["simulate", "--roots", "3", "--levels", "2", "--spheres", "3", "--steps", "8"]);
    demo.args(["--sample", "0", "--max-slowdown", "-1"]).current_dir(folder.path());
    let path = std::env::var("PATH").expect("programs are found");
    demo.env("PATH", format!("{}:{path}", programs.display())).env("CARGO_TARGET_DIR", &built);
    if rustix::process::geteuid().is_root() {
        chown(&built, Some(NOBODY_UID), Some(NOBODY_UID)).unwrap();
        demo.uid(NOBODY_UID).gid(NOBODY_UID);
    }
    let output = demo.output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{stdout}\n{stderr}");
    assert!(stdout.contains("All three computed the same to the last bit: checksum="), "{stdout}");
    // Mode, MiB, gain in percent, seconds, and slowdown in percent.
    let gains: Vec<(&str, f64)> = stdout
        .lines()
        .filter_map(|line| match line.split_whitespace().collect::<Vec<_>>()[..] {
            [mode, _, gain, "%", _, _, "%"] => Some((mode, gain.parse().ok()?)),
            _ => None,
        })
        .collect();
    let modes: Vec<&str> = gains.iter().map(|&(mode, _)| mode).collect();
    assert_eq!(modes, ["plain", "blocks", "engine"], "{stdout}");
    assert!(gains[1..].iter().all(|&(_, gain)| gain > 0.0), "{stdout}");
}
