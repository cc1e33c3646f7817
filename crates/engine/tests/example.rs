//! The example in Rust; `c.rs` tests the example in C.

mod member;

use member::{domains_root, member_program};
use std::process::Command;

#[test]
fn copies_example_merges_at_safe_point_and_while_running() {
    let root = domains_root();
    let program = member_program().with_file_name("copies");
    let output = Command::new(program).env("PAGEFOLD_RUNTIME", root.path()).output().expect("examples are built");
    let text = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<&str> = text.lines().collect();
    let [first, second, last] = lines[..] else { panic!("{output:?}") };
    let begins = |line: &str, how: &str, merged: u32| line.starts_with(&format!("{how}: {merged} pages merged in "));
    // 16 MiB are 4096 pages.
    assert!(begins(first, "at a safe point", 16_384) && first.ends_with(" store takes 16.0 MiB"), "{first}");
    let permitted = begins(second, "while running", 4096) && second.ends_with(" store takes 16.0 MiB");
    assert!(
        permitted || second.starts_with("merging while the program runs needs Linux 6.4 and userfaultfd"),
        "{second}"
    );
    assert_eq!(last, "all memory as it was written");
}
