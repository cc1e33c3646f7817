//! A running `examples/member`, and its answers.

#![allow(dead_code, reason = "each test program uses only some of these items")]

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use tempfile::TempDir;

/// Bytes in a page.
pub const PAGE_BYTES: u64 = 4096;

/// A directory for domains, in memory as by default.
pub fn domains_root() -> TempDir {
    use std::os::unix::fs::PermissionsExt;
    let root = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    std::fs::set_permissions(root.path(), std::fs::Permissions::from_mode(0o700)).expect("permission");
    root
}

/// A running `examples/member`.
pub struct MemberProcess {
    pub child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
}

pub fn member_program() -> PathBuf {
    let tests = std::env::current_exe().expect("a test is a program");
    // Somewhere below target/PROFILE; the depth depends on cargo.
    let mut programs = tests.ancestors().map(|folder| folder.join("examples/member"));
    programs.find(|program| program.exists()).unwrap_or_else(|| PathBuf::from("examples/member"))
}

impl MemberProcess {
    pub fn start(root: &TempDir, pages: u64, options: &[&str]) -> Self {
        Self::start_with(root, pages, options, None)
    }

    pub fn start_with(root: &TempDir, pages: u64, options: &[&str], fault: Option<&str>) -> Self {
        let mut command = Command::new(member_program());
        command.args(["test", &pages.to_string()]).args(options).env("PAGEFOLD_RUNTIME", root.path());
        command.envs(fault.map(|fault| ("PAGEFOLD_FAULT_POINT", fault)));
        // The error messages of a member that dies at a fault point do not matter.
        Self::spawn(&mut command, if fault.is_some() { Stdio::null() } else { Stdio::inherit() })
            .wait_until_ready(fault.is_some())
    }

    /// A member that runs all commands of a script, with a fault point.
    pub fn start_with_script(root: &TempDir, pages: u64, script: &[&str], fault: &str) -> Self {
        let mut command = Command::new(member_program());
        command.args(["test", &pages.to_string()]).env("PAGEFOLD_RUNTIME", root.path());
        let mut member = Self::spawn(command.env("PAGEFOLD_FAULT_POINT", fault), Stdio::null());
        script.iter().for_each(|line| writeln!(member.commands, "{line}").expect("a reader"));
        member
    }

    /// Wait until the member has ended or was stopped. Returns whether it has ended.
    pub fn has_ended_or_stopped(&mut self) -> bool {
        for _ in 0..60_000 {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).expect("our child");
            match stat.rsplit_once(") ").map(|(_, after)| after.as_bytes()[0]) {
                Some(b'T') => return false,
                Some(b'Z') => return true,
                _ => std::thread::sleep(std::time::Duration::from_millis(5)),
            }
        }
        panic!("the member neither ended nor stopped within five minutes")
    }

    /// Continue the member if it was stopped.
    pub fn continue_process(&self) {
        let process = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(process, rustix::process::Signal::CONT).expect("our child");
    }

    /// Start a member by a command, without waiting for its first answer.
    pub fn spawn(command: &mut Command, errors: Stdio) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors)
            .spawn()
            .expect("`cargo build --examples` was run, as `cargo test` does without `--test`");
        let says = child.stdin.take().expect("a pipe");
        let tells = BufReader::new(child.stdout.take().expect("a pipe"));
        Self { child, commands: says, answers: tells }
    }

    pub fn wait_until_ready(mut self, may_die: bool) -> Self {
        let answer = self.read_answer();
        assert!(may_die || answer.as_deref() == Some("ready"), "{answer:?}");
        self
    }

    /// The next answer of the member; `None` if the member has died.
    pub fn read_answer(&mut self) -> Option<String> {
        let mut line = String::new();
        let read = self.answers.read_line(&mut line).expect("text");
        (read > 0).then(|| line.trim_end().to_owned())
    }

    /// Send a command, without waiting for the answer.
    pub fn send_command(&mut self, line: &str) {
        writeln!(self.commands, "{line}").expect("a reader");
    }

    /// The answer to a command; `None` if the member has died.
    pub fn try_command(&mut self, line: &str) -> Option<String> {
        writeln!(self.commands, "{line}").ok()?;
        self.read_answer()
    }

    pub fn run_command(&mut self, line: &str) -> String {
        self.try_command(line).unwrap_or_else(|| panic!("{line}: the member has died"))
    }

    pub fn run_merge(&mut self) -> MemberAnswer {
        MemberAnswer(self.run_command("merge"))
    }

    pub fn read_status(&mut self) -> MemberAnswer {
        MemberAnswer(self.run_command("status"))
    }

    pub fn check_memory(&mut self) {
        assert_eq!(self.run_command("check"), "same");
    }

    /// A line of `smaps_rollup`, in KiB.
    pub fn smaps_rollup_kib(&self, name: &str) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", self.child.id())).expect("it is alive");
        let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name} in {text}"));
        line.split_ascii_whitespace().nth(1).and_then(|number| number.parse().ok()).expect("a number")
    }

    pub fn kill(mut self) {
        self.child.kill().expect("our child");
        self.child.wait().expect("our child");
    }
}

impl Drop for MemberProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An answer of a member.
#[derive(Debug)]
pub struct MemberAnswer(pub String);

impl MemberAnswer {
    pub fn number(&self, name: &str) -> u64 {
        let at = self.0.find(&format!(" {name}: ")).unwrap_or_else(|| panic!("{name} in {}", self.0));
        let digits = self.0[at + name.len() + 3..].trim_start_matches(|c: char| !c.is_ascii_digit());
        let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
        digits[..end].parse().expect("a number")
    }
}

/// Members merge until no page changes state any more, and all memory is unchanged.
pub fn merge_until_settled(members: &mut [&mut MemberProcess]) {
    for _ in 0..3 {
        for member in members.iter_mut() {
            member.run_merge();
            member.check_memory();
        }
    }
}
