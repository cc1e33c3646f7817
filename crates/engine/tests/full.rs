//! Domains where there is little room: a limit on the size of files, and a full tmpfs.

mod member;

use member::{Member, program, root};
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

#[test]
fn a_limit_on_file_sizes_refuses_a_domain_and_ends_no_process() {
    let root = root();
    let under_a_limit = || {
        let script = "ulimit -f 2048; exec \"$0\" test 16";
        let mut command = Command::new("sh");
        command.args(["-c", script]).arg(program()).env("PAGEFOLD_RUNTIME", root.path());
        command.stdin(Stdio::null()).output().expect("a shell")
    };
    let refused = |output: std::process::Output| {
        let told = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && told.contains("the limit on file sizes is"), "{output:?}");
    };
    refused(under_a_limit());
    let mut member = Member::start(&root, 16, &[]);
    member.tell("fill 0 8 3");
    refused(under_a_limit());
    // A refused one has left the domain as it was.
    member.tell("copy 8 8 0");
    assert_eq!(member.merge().of("merged"), 16);
    member.check();
}

#[test]
fn a_limit_on_file_sizes_that_comes_later_ends_no_process() {
    let root = root();
    let mut member = Member::start(&root, 1000, &[]);
    member.tell("fill 0 300 3");
    member.tell("copy 300 300 0");
    let process = rustix::process::Pid::from_child(&member.child);
    let limit = rustix::process::Rlimit { current: Some(4096), maximum: None };
    rustix::process::prlimit(Some(process), rustix::process::Resource::Fsize, limit).expect("it is ours");
    let merged = member.merge();
    assert_eq!((merged.of("zeros"), merged.of("stored"), merged.of("failed")), (0, 0, 600), "{merged:?}");
    member.tell("fill 600 400 9");
    member.tell("fill 600 400 0");
    assert_eq!(member.merge().of("zeros"), 400, "what needs no file is done");
    member.check();
}

/// A member whose domains are on a small tmpfs that only it sees; where that is to this process.
fn member_on_a_small_tmpfs(pages: u64) -> Option<(Member, PathBuf)> {
    let may = Command::new("unshare").args(["--mount", "true"]).output();
    if !may.is_ok_and(|output| output.status.success()) {
        println!("skipped: unshare makes no mount namespace here");
        return None;
    }
    // Not below the one of others: it is mounted where the member sees it, and gone with it.
    let script = "mount -t tmpfs -o size=1m,mode=700 tmpfs /mnt && PAGEFOLD_RUNTIME=/mnt exec \"$0\" test \"$1\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", script]).arg(program()).arg(pages.to_string());
    let member = Member::of(&mut command, Stdio::inherit()).readied(false);
    let path = PathBuf::from(format!("/proc/{}/root/mnt", member.child.id()));
    Some((member, path))
}

fn fill_up(tmpfs: &std::path::Path) -> PathBuf {
    let path = tmpfs.join("filler");
    let mut file = File::create(&path).expect("its owner may");
    while file.write_all(&[1; 4096]).is_ok() {}
    path
}

#[test]
fn on_a_full_tmpfs_what_fits_is_merged() {
    let Some((mut member, tmpfs)) = member_on_a_small_tmpfs(6000) else { return };
    member.tell("fill 0 100 3");
    member.tell("copy 100 100 0");
    assert_eq!(member.merge().of("merged"), 200);
    let filler = fill_up(&tmpfs);
    // More contents than the index has room for, of which some are there twice, and zeros.
    member.tell("fill 200 4000 5");
    member.tell("copy 4200 800 200");
    member.tell("fill 5000 1000 9");
    member.tell("fill 5000 1000 0");
    let merged = member.merge();
    assert_eq!(merged.of("zeros"), 1000, "{merged:?}");
    assert!((1..=1600).contains(&merged.of("merged")) && merged.of("failed") > 0, "{merged:?}");
    member.check();
    std::fs::remove_file(filler).expect("it is there");
    for _ in 0..3 {
        member.merge();
        member.check();
    }
    assert_eq!(member.standing().of("merged"), 200 + 1600);
}

#[test]
fn a_domain_on_a_full_tmpfs_is_refused_with_the_reason() {
    let Some((member, tmpfs)) = member_on_a_small_tmpfs(16) else { return };
    let (process, mut left) = (member.child.id(), 0);
    let filler = fill_up(&tmpfs);
    // With one more page free each time, until it can be founded.
    loop {
        let mut command = Command::new("nsenter");
        command.args(["--mount", "--target", &process.to_string(), "env", "PAGEFOLD_RUNTIME=/mnt"]);
        let output = command.arg(program()).args(["other", "16"]).stdin(Stdio::null()).output().expect("nsenter");
        let told = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "with {left} pages left: {output:?}");
        if told.starts_with("ready") {
            break;
        }
        assert!(told.contains("No space left on device"), "with {left} pages left: {told}");
        left += 1;
        assert!(left < 100, "it does not need that many");
        let file = File::options().write(true).open(&filler).expect("it is there");
        let length = file.metadata().expect("it is there").len();
        file.set_len(length - 4096).expect("its owner may");
    }
    assert!(left > 5, "there was room for all of it in {left} pages");
}
