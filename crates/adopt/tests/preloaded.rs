//! The library in programs that know nothing of it, by `LD_PRELOAD` alone: what a program can see of it, and what it
//! leaves behind. `crates/cli/tests/run` has whole programs, by `pagefold run`.

use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// A directory for programs and domains, in memory as by default.
fn place() -> TempDir {
    use std::os::unix::fs::PermissionsExt;
    let place = tempfile::tempdir_in("/dev/shm").unwrap();
    std::fs::set_permissions(place.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    place
}

/// The library, where cargo has left it.
fn library() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let library = tests.with_file_name("libpagefold_adopt.so");
    assert!(library.exists(), "{} is built with this test", library.display());
    library
}

/// Whether there is a C compiler; says that the test is skipped otherwise.
fn has_compiler() -> bool {
    let found = Command::new("gcc").arg("--version").output().is_ok();
    if !found {
        println!("skipped: needs gcc (`sudo make setup`)");
    }
    found
}

/// Compile a program, or a library. `source` is the name of one in `labs/run`, or a path.
fn compile(place: &TempDir, source: &str, flags: &[&str]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../labs/run").join(source);
    let program = place.path().join(source.file_stem().unwrap());
    let mut command = Command::new("gcc");
    command.args(["-O1", "-Wall", "-Werror", "-pthread", "-o"]).arg(&program).arg(source).args(flags);
    assert!(command.status().unwrap().success());
    program
}

/// A program with the library ahead, in the domain `x`, as fast as may be; ended after minutes if it hangs.
fn preloaded(place: &TempDir, program: &Path) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--signal=KILL", "300"]).arg(program);
    command.env("LD_PRELOAD", library()).env("PAGEFOLD_RUNTIME", place.path().join("domains"));
    command.env("PAGEFOLD_DOMAIN", "x").env("PAGEFOLD_MAX_SLOWDOWN", "100").env("PAGEFOLD_THRESHOLD", "65536");
    command.env("PAGEFOLD_REPORT", "1");
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What the library reports of itself: the number before some words.
fn reported(said: &str, words: &str) -> u64 {
    let before = said.split_once(words).unwrap_or_else(|| panic!("{words} in {said}")).0;
    before.trim_end().rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn a_barrier_costs_a_look_at_the_clock_where_nothing_is_due() {
    if !has_compiler() {
        return;
    }
    let place = place();
    let mpi = compile(&place, "lonely_mpi.c", &["-shared", "-fPIC"]);
    let program = compile(&place, "barriers.c", &[mpi.to_str().unwrap()]);
    let barriers = 1_000_000;
    let output = preloaded(&place, &program).args([&barriers.to_string(), "1000"]).output().unwrap();
    let said = text(&output.stderr);
    assert!(output.status.success() && !said.contains("had 0 B merged"), "{output:?}");
    // All others took no lock and made no system call. One asks each 5 ms at most, and a few for each merge.
    let milliseconds: u64 = text(&output.stdout).trim().parse().unwrap();
    let (asked, merges) = (reported(&said, " safe points asked"), reported(&said, " merges took"));
    assert!(asked <= milliseconds / 5 + 4 * merges + 10 && asked < barriers / 2, "{milliseconds} ms: {said}");
}
