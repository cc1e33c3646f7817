//! How `make test` summarizes the output of the test runner.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// Two test programs: in the first both tests pass and print why they skip something, in the second one test fails.
const RUNNER_OUTPUT: &str = "
running 2 tests
test one ... ok
test two ... ok

successes:

---- one stdout ----
noise
skipped: this kernel has no KSM

---- two stdout ----
skipped: this kernel has no KSM


successes:
    one
    two

test result: ok. 2 passed; 0 failed


running 1 test
test three ... FAILED

successes:

successes:

failures:

---- three stdout ----
why it failed

failures:
    three

test result: FAILED. 0 passed; 1 failed

";

fn summarize(printed: &str) -> Output {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.ci/skipped");
    let mut script = Command::new(script).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it runs");
    script.stdin.take().expect("a pipe").write_all(printed.as_bytes()).expect("a reader");
    script.wait_with_output().expect("it ends")
}

#[test]
fn skip_reasons_are_printed_before_the_last_result() {
    let output = summarize(RUNNER_OUTPUT);
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{stdout}");
    let end = "skipped: this kernel has no KSM (2x)\n2 skipped\n\ntest result: FAILED. 0 passed; 1 failed\n";
    assert!(stdout.ends_with(end), "{stdout}");
    // The output of failed tests is shown, that of passed tests is not.
    assert!(stdout.contains("why it failed") && !stdout.contains("noise"), "{stdout}");
    assert!(stdout.contains("test result: ok. 2 passed; 0 failed\n\nrunning 1 test\n"), "{stdout}");
}

#[test]
fn summary_ends_while_the_pipe_is_still_open() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.ci/skipped");
    let mut script = Command::new(script).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it runs");
    let mut pipe = script.stdin.take().expect("a pipe");
    pipe.write_all([RUNNER_OUTPUT, "tests: all done\n"].concat().as_bytes()).expect("a reader");
    let output = script.wait_with_output().expect("it ends while the pipe is open");
    drop(pipe);
    assert!(String::from_utf8(output.stdout).unwrap().ends_with("test result: FAILED. 0 passed; 1 failed\n"));
}

#[test]
fn root_may_skip_only_for_missing_kernel_features() {
    let output = summarize(&RUNNER_OUTPUT.replace("this kernel has no KSM", "needs a C compiler"));
    let stdout = String::from_utf8(output.stdout).unwrap();
    let root = nix::unistd::geteuid().is_root();
    assert_eq!(output.status.code(), Some(root.into()), "{stdout}");
    assert_eq!(stdout.contains("error: skipped: needs a C compiler (2x), which root can have"), root, "{stdout}");
}
