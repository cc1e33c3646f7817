//! The substitute for HERA in `labs/hera`: its results are the same in all its memory modes.

mod library;

use library::library_and_domains_root;
use std::path::Path;
use std::process::Command;

#[test]
fn simulation_results_are_bit_identical() {
    if Command::new("g++").arg("--version").output().is_err() {
        println!("skipped: no C++ compiler");
        return;
    }
    let library = library_and_domains_root();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../labs/hera/check.sh");
    let output = Command::new(script).arg(library.path()).output().expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().filter(|line| line.starts_with("skipped: ")).for_each(|line| println!("{line}"));
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
}
