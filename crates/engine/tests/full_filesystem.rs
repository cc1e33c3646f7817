//! Domains with little space: a limit on the size of files, and a full tmpfs.

mod member;

use member::{MemberProcess, domains_root, member_program};
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

#[test]
fn file_size_limit_refuses_join_without_sigxfsz() {
    let root = domains_root();
    let under_a_limit = || {
        let script = "ulimit -f 2048; exec \"$0\" test 16";
        let mut command = Command::new("sh");
        command.args(["-c", script]).arg(member_program()).env("PAGEFOLD_RUNTIME", root.path());
        command.stdin(Stdio::null()).output().expect("a shell")
    };
    let refused = |output: std::process::Output| {
        let message = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && message.contains("the limit on file sizes is"), "{output:?}");
    };
    refused(under_a_limit());
    let mut member = MemberProcess::start(&root, 16, &[]);
    member.run_command("fill 0 8 3");
    refused(under_a_limit());
    // The refused member has left the domain as it was.
    member.run_command("copy 8 8 0");
    assert_eq!(member.run_merge().number("pages_merged"), 16);
    member.check_memory();
}

#[test]
fn later_file_size_limit_kills_no_process() {
    let root = domains_root();
    let mut member = MemberProcess::start(&root, 1000, &[]);
    member.run_command("fill 0 300 3");
    member.run_command("copy 300 300 0");
    let process = rustix::process::Pid::from_child(&member.child);
    let limit = rustix::process::Rlimit { current: Some(4096), maximum: None };
    rustix::process::prlimit(Some(process), rustix::process::Resource::Fsize, limit).expect("our child");
    let merged = member.run_merge();
    assert_eq!(
        (merged.number("zeros_freed"), merged.number("contents_stored"), merged.number("pages_failed")),
        (0, 0, 600),
        "{merged:?}"
    );
    member.run_command("fill 600 400 9");
    member.run_command("fill 600 400 0");
    assert_eq!(member.run_merge().number("zeros_freed"), 400, "freeing zeros needs no file space");
    member.check_memory();
}

/// A member whose domains are on a small tmpfs that only the member sees, and the path of that tmpfs for this process.
fn start_member_on_small_tmpfs(pages: u64) -> Option<(MemberProcess, PathBuf)> {
    let may = Command::new("unshare").args(["--mount", "true"]).output();
    if !may.is_ok_and(|output| output.status.success()) {
        println!("skipped: unshare makes no mount namespace here");
        return None;
    }
    // Not below an existing tmpfs: it is mounted in the member's own namespace, and disappears with the member.
    let script = "mount -t tmpfs -o size=1m,mode=700 tmpfs /mnt && PAGEFOLD_RUNTIME=/mnt exec \"$0\" test \"$1\"";
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--propagation", "private", "sh", "-c", script])
        .arg(member_program())
        .arg(pages.to_string());
    let member = MemberProcess::spawn(&mut command, Stdio::inherit()).wait_until_ready(false);
    let path = PathBuf::from(format!("/proc/{}/root/mnt", member.child.id()));
    Some((member, path))
}

fn fill_filesystem(tmpfs: &std::path::Path) -> PathBuf {
    let path = tmpfs.join("filler");
    let mut file = File::create(&path).expect("permission");
    while file.write_all(&[1; 4096]).is_ok() {}
    path
}

#[test]
fn full_tmpfs_merges_what_fits() {
    let Some((mut member, tmpfs)) = start_member_on_small_tmpfs(6000) else { return };
    member.run_command("fill 0 100 3");
    member.run_command("copy 100 100 0");
    assert_eq!(member.run_merge().number("pages_merged"), 200);
    let filler = fill_filesystem(&tmpfs);
    // More contents than fit into the index, some of them duplicates, and zeros.
    member.run_command("fill 200 4000 5");
    member.run_command("copy 4200 800 200");
    member.run_command("fill 5000 1000 9");
    member.run_command("fill 5000 1000 0");
    let merged = member.run_merge();
    assert_eq!(merged.number("zeros_freed"), 1000, "{merged:?}");
    assert!((1..=1600).contains(&merged.number("pages_merged")) && merged.number("pages_failed") > 0, "{merged:?}");
    member.check_memory();
    std::fs::remove_file(filler).expect("it exists");
    for _ in 0..3 {
        member.run_merge();
        member.check_memory();
    }
    assert_eq!(member.read_status().number("merged"), 200 + 1600);
}

#[test]
fn join_on_full_tmpfs_fails_with_reason() {
    let Some((member, tmpfs)) = start_member_on_small_tmpfs(16) else { return };
    let (process, mut left) = (member.child.id(), 0);
    let filler = fill_filesystem(&tmpfs);
    // With one more free page each time, until the domain can be created.
    loop {
        let mut command = Command::new("nsenter");
        command.args(["--mount", "--target", &process.to_string(), "env", "PAGEFOLD_RUNTIME=/mnt"]);
        let output =
            command.arg(member_program()).args(["other", "16"]).stdin(Stdio::null()).output().expect("nsenter");
        let message = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "with {left} pages left: {output:?}");
        if message.starts_with("ready") {
            break;
        }
        assert!(message.contains("No space left on device"), "with {left} pages left: {message}");
        left += 1;
        assert!(left < 100, "a domain needs fewer pages");
        let file = File::options().write(true).open(&filler).expect("it exists");
        let length = file.metadata().expect("it exists").len();
        file.set_len(length - 4096).expect("permission");
    }
    assert!(left > 5, "the domain fitted into {left} pages");
}
