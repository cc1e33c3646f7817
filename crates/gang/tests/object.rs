//! The compiled program in the source tree is that of the present source.

#![forbid(unsafe_code)]

use sha2::{Digest, Sha256};
use std::path::Path;

/// `gang.bpf.sha256` has a line for each source file and for the object, written by `make gang-object`.
#[test]
fn compiled_program_is_current() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("bpf");
    let recorded = std::fs::read_to_string(folder.join("gang.bpf.sha256")).unwrap();
    let mut names = Vec::new();
    for line in recorded.lines() {
        let (hash, name) = line.split_once("  ").unwrap();
        let content = std::fs::read(folder.join(name)).unwrap();
        let found: String = Sha256::digest(&content).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(found, hash, "{name} is not as when the program was compiled: run `make gang-object`");
        names.push(name.to_owned());
    }
    assert_eq!(names, ["gang.bpf.c", "kernel.h", "gang.bpf.o"]);
}
