//! Members in different PID namespaces: their process numbers are meaningless to each other.

mod member;

use member::{MemberProcess, domains_root, member_program};
use std::process::{Command, Stdio};

#[test]
fn join_without_proc_fails_at_once() {
    let root = domains_root();
    let without_proc = |program: &std::ffi::OsStr| {
        let mut command = Command::new("unshare");
        let script = "mount -t tmpfs none /proc && exec \"$@\"";
        command.args(["--mount", "sh", "-c", script, "sh"]).arg(program).args(["test", "16"]);
        command.env("PAGEFOLD_RUNTIME", root.path()).stdin(Stdio::null()).output()
    };
    if !without_proc("true".as_ref()).is_ok_and(|output| output.status.success()) {
        println!("skipped: unshare makes no mount namespace here");
        return;
    }
    let output = without_proc(member_program().as_os_str()).expect("it exists");
    let message = [output.stdout, output.stderr].concat();
    let message = String::from_utf8_lossy(&message);
    assert!(message.contains("cannot read /proc/thread-self/ns/pid"), "{message}");
}

#[test]
fn join_from_other_pid_namespace_fails_with_reason() {
    let root = domains_root();
    let mut first = MemberProcess::start(&root, 16, &[]);
    first.run_command("fill 0 16 3");
    let beside = || {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--mount-proc"]).arg(member_program()).args(["test", "16"]);
        command.env("PAGEFOLD_RUNTIME", root.path()).stdin(Stdio::null()).output()
    };
    let may = Command::new("unshare").args(["--pid", "--fork", "--mount-proc", "true"]).output();
    if !may.is_ok_and(|output| output.status.success()) {
        println!("skipped: unshare makes no PID namespace here");
        return;
    }
    let output = beside().expect("it exists");
    let message = String::from_utf8_lossy(&output.stdout);
    assert!(
        message.contains("its members are in another PID namespace: share that, or set PAGEFOLD_RUNTIME"),
        "{message}"
    );
    // They have damaged nothing, and may use the domain once no other member is in it.
    assert_eq!(first.run_merge().number("pages_failed"), 0);
    drop(first);
    let output = beside().expect("it exists");
    assert!(!String::from_utf8_lossy(&output.stdout).contains("namespace"), "{output:?}");
}
