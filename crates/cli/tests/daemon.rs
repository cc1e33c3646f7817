//! The daemon on the live kernel: who comes is merged, whoever has a say is heeded, and the host comes back.
//!
//! It is told to manage programs of one name alone, which only the test's have.

use pagefold_labs::client;
use pagefold_labs::ksm::Ksm;
use pagefold_labs::look::{enrolled, until};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::Duration;
use tempfile::TempDir;

/// A directory with a configuration, the daemon's state, and the lab under a name that nobody else has.
struct Place {
    directory: TempDir,
    name: String,
}

impl Place {
    fn new(number: u32) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let name = format!("pfd{}-{number}", std::process::id());
        // The kernel calls a program what it was started as.
        std::os::unix::fs::symlink(client::binary().expect("the lab"), directory.path().join(&name)).unwrap();
        Self { directory, name }
    }

    fn config(&self) -> PathBuf {
        self.directory.path().join("pagefold.toml")
    }

    fn write(&self, section: &str) {
        // Whatever else runs on the machine, the tests' programs are not to be waited for.
        let text = format!("[daemon]\nslowdown = \"100%\"\n{section}\n[daemon.only]\nnames = [\"{}\"]\n", self.name);
        fs::write(self.config(), text).unwrap();
    }

    fn state(&self) -> PathBuf {
        self.directory.path().join("state")
    }

    /// What the daemon says on standard error.
    fn errors(&self) -> PathBuf {
        self.directory.path().join("errors")
    }

    fn pagefold(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        command.arg("--state").arg(self.state()).arg("--config").arg(self.config()).args(arguments);
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.pagefold(arguments).output().expect("the binary runs")
    }

    /// Start the daemon, and wait until it answers.
    fn daemon(&self, arguments: &[&str]) -> Daemon<'_> {
        let mut command = self.pagefold(&["daemon"]);
        let errors = fs::File::create(self.errors()).unwrap();
        let child = command.args(arguments).stdin(Stdio::null()).stderr(errors).spawn().unwrap();
        let daemon = Daemon { place: self, child };
        until("an answer", || self.run(&["status", "--json"]).status.success());
        daemon
    }

    /// A program that holds the same in part as every other one of these.
    fn program(&self) -> Program {
        self.lab(&["mixture", "--mib", "32", "--duplicate", "50%"])
    }

    /// The lab with these arguments, once it is ready.
    fn lab(&self, arguments: &[&str]) -> Program {
        let mut child = Command::new(self.directory.path().join(&self.name))
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the lab runs");
        let ready = BufReader::new(child.stdout.take().unwrap())
            .lines()
            .find(|line| line.as_ref().is_ok_and(|line| line.starts_with("READY")));
        assert!(ready.is_some(), "the lab is ready");
        Program(child)
    }
}

struct Daemon<'a> {
    place: &'a Place,
    child: Child,
}

impl Daemon<'_> {
    fn status(&self) -> Value {
        let output = self.place.run(&["status", "--json"]);
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    fn tell(&self, arguments: &[&str]) {
        let output = self.place.run(arguments);
        assert!(output.status.success(), "{output:?}");
    }

    fn signal(&self, signal: nix::sys::signal::Signal) {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }

    /// Its exit code once it has ended, and what it said.
    fn ended(mut self) -> (Option<i32>, String) {
        let code = self.child.wait().unwrap().code();
        (code, fs::read_to_string(self.place.errors()).unwrap())
    }

    fn stop(self) -> (Option<i32>, String) {
        self.signal(nix::sys::signal::Signal::SIGTERM);
        self.ended()
    }

    fn said(&self, what: &str, reason: &str) -> bool {
        let status = self.status();
        let decisions = status["decisions"].as_array().unwrap();
        decisions.iter().any(|decision| decision["what"] == what && decision["reason"] == reason)
    }
}

impl Drop for Daemon<'_> {
    fn drop(&mut self) {
        // Where a test has failed: it puts the settings back.
        if self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            self.signal(nix::sys::signal::Signal::SIGTERM);
            let _ = self.child.wait();
        }
    }
}

struct Program(Child);

impl Program {
    fn pid(&self) -> String {
        self.0.id().to_string()
    }

    /// A sum over its page tables now, in KiB.
    fn kib(&self, name: &str) -> Option<u64> {
        let rollup = fs::read_to_string(format!("/proc/{}/smaps_rollup", self.0.id())).unwrap();
        rollup.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix(" kB")?.parse().ok())
    }

    /// Pages that are merged of it now, by its page tables.
    fn merged(&self) -> u64 {
        self.kib("KSM:").unwrap_or(0) / 4
    }

    fn regions(&self) -> usize {
        fs::read_to_string(format!("/proc/{}/maps", self.0.id())).unwrap().lines().count()
    }

    fn is_enrolled(&self) -> bool {
        !enrolled(self.0.id()).is_empty()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// Nine tenths of what two programs have in common, in pages of one of them.
const MOST: u64 = 4096 * 9 / 10;

/// Zeros that the kernel frees as it splits a huge page are in no counter of KSM.
#[test]
fn what_splitting_huge_pages_freed_is_part_of_what_is_saved() {
    let Some(_ksm) = Ksm::take_as_others_set_it() else { return };
    let place = Place::new(11);
    place.write("mode = \"act\"");
    let daemon = place.daemon(&[]);
    let programs = [(); 2].map(|()| place.lab(&["layout", "huge-zero=8192"]));
    if programs.iter().any(|program| program.kib("AnonHugePages:") < Some(24 << 10)) {
        return println!("skipped: the kernel gave no huge pages");
    }
    until("the merge", || daemon.status()["passes"]["merges"].as_u64() >= Some(1));
    let status = daemon.status();
    let saved = |name: &str| status["saved"][name].as_u64().unwrap_or(0);
    if saved("split_zero") == 0 && programs.iter().all(|program| program.kib("AnonHugePages:") < Some(8 << 10)) {
        return println!("skipped: this kernel frees no zeros as it splits huge pages (before 6.12)");
    }
    assert!(saved("split_zero") >= 16 << 20, "{}", status["saved"]);
    assert_eq!(saved("gross"), saved("duplicate") + saved("zero") + saved("split_zero"));
    let net = status["saved"]["net"].as_i64().unwrap();
    assert_eq!(net, saved("gross").cast_signed() - saved("metadata").cast_signed());
    // What the merge reached is in it, whatever else is merged on this host.
    let reached = status["passes"]["reached"].as_i64().unwrap();
    assert!(net >= reached - (1 << 20), "{reached} reached, {net} saved");
    let text = String::from_utf8(place.run(&["status"]).stdout).unwrap();
    assert!(text.contains("zeros in split huge pages, which KSM does not count"), "{text}");
    let pids = programs.iter().flat_map(|program| ["--pid".to_owned(), program.pid()]).collect::<Vec<_>>();
    let account = place.pagefold(&["account", "--json"]).args(&pids).output().unwrap();
    let account: Value = serde_json::from_slice(&account.stdout).unwrap();
    assert_eq!(account["total"]["split_zero_pages"].as_u64().map(|pages| pages * 4096), Some(saved("split_zero")));
}

#[test]
fn a_full_disk_under_the_history_is_told_and_the_daemon_runs() {
    let Some(_ksm) = Ksm::take_as_others_set_it() else { return };
    let place = Place::new(12);
    place.write("mode = \"advise\"");
    let disk = place.directory.path().join("disk");
    fs::create_dir(&disk).unwrap();
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=4k", "pagefold-test"]).arg(&disk).status();
    if !mounted.is_ok_and(|status| status.success()) {
        return println!("skipped: no file system can be mounted here");
    }
    let history = disk.join("history.db");
    let daemon = place.daemon(&["--history", history.to_str().unwrap()]);
    let answered = daemon.status()["state"].is_string();
    let (code, said) = daemon.stop();
    let unmounted = Command::new("umount").arg("--lazy").arg(&disk).status();
    assert!(answered && code == Some(0), "{code:?}: {said}");
    assert!(said.contains("going on without a history") && said.contains("history.db"), "{said}");
    assert!(unmounted.is_ok_and(|status| status.success()));
}

#[test]
fn who_comes_is_merged_and_whoever_has_a_say_is_heeded() {
    let Some(ksm) = Ksm::take_as_others_set_it() else { return };
    let place = Place::new(1);
    place.write("mode = \"act\"");
    let daemon = place.daemon(&[]);
    let programs = [place.program(), place.program()];
    until("the merge", || programs.iter().all(|program| program.merged() >= MOST));
    until("the end of it", || daemon.status()["passes"]["merges"].as_u64() >= Some(1));

    let status = daemon.status();
    let schema = fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/schema/status.json")).unwrap();
    let validator = jsonschema::validator_for(&serde_json::from_slice(&schema).unwrap()).unwrap();
    let wrong: Vec<String> = validator.iter_errors(&status).map(|error| error.to_string()).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    let members = status["members"].as_array().unwrap();
    assert_eq!(members.len(), 2, "nobody else is managed: {members:#?}");
    assert!(members.iter().all(|member| member["state"] == "merged" && member["ranges"].as_u64() > Some(0)));
    assert!(status["passes"]["reached"].as_i64() > Some(8 << 20), "{}", status["passes"]);
    // What is merged is divided by those who map it, and so are files: half of what both have of the first.
    let fair = |status: &Value| {
        let members = status["members"].as_array().unwrap().iter();
        members.filter(|member| member["footprint_age_seconds"].is_u64()).count() == 2
    };
    until("fair shares", || fair(&daemon.status()));
    for program in &programs {
        let status = daemon.status();
        let mut members = status["members"].as_array().unwrap().iter();
        let member = members.find(|member| member["pid"].as_u64() == Some(program.0.id().into())).unwrap();
        let (told, pss) = (member["footprint"].as_u64().unwrap() >> 10, program.kib("Pss:").unwrap());
        assert!(told.abs_diff(pss) < 512 && pss < 28 << 10, "{told} KiB told, Pss {pss} KiB: {member}");
    }
    let text = place.run(&["status"]);
    assert!(String::from_utf8_lossy(&text.stdout).contains("Latest decisions"), "{text:?}");

    // Who ends is not counted as merged for long, although ksmd rests.
    let saved = || daemon.status()["saved"]["duplicate"].as_u64().unwrap();
    let before = saved();
    let more = [place.program(), place.program()];
    until("the merge of two more", || more.iter().all(|program| program.merged() >= MOST));
    until("the count of it", || saved() >= before + MOST * 4096);
    drop(more);
    until("ksmd to pass by", || saved() < before + MOST * 4096 / 2);
    until("its rest", || ksm.counter("run") == 0 && daemon.status()["members"].as_array().unwrap().len() == 2);

    // While it has the host, nobody else changes it.
    let second = place.run(&["daemon"]);
    let why = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(second.status.code() == Some(2) && why.contains("runs already"), "{why}");
    let other = place.run(&["merge", "--pid", &programs[0].pid()]);
    let why = String::from_utf8_lossy(&other.stderr).into_owned();
    assert!(other.status.code() == Some(2) && why.contains("`pagefold pause`"), "{why}");

    daemon.tell(&["pause"]);
    until("the host", || ksm.changed().is_empty() && daemon.status()["state"] == "paused");
    assert!(place.run(&["recover"]).status.success(), "it lets others change the host");
    assert!(programs[0].merged() >= MOST, "merges stay");
    daemon.tell(&["resume"]);

    daemon.tell(&["withdraw", &programs[0].pid()]);
    until("the withdrawal", || programs[0].merged() == 0 && !programs[0].is_enrolled());
    assert!(daemon.said("withdraw", "operator"));
    daemon.tell(&["enrol", &programs[0].pid()]);
    let is_managed = |member: &Value| member["state"] != "withdrawn";
    until("its turn", || daemon.status()["members"].as_array().unwrap().iter().all(is_managed));
    let refused = place.run(&["enrol", "1"]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");

    let (code, said) = daemon.stop();
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(ksm.changed(), []);
    assert!(!place.state().join("control").exists() && !place.state().join("journal.json").exists());
}

#[test]
fn what_merging_takes_of_metadata_regions_and_huge_pages_is_bounded() {
    let Some(ksm) = Ksm::take_as_others_set_it() else { return };
    // What KSM's profit falls short of what is saved by, in bytes; none of those who have ended.
    let metadata = || {
        let saved = (ksm.counter("pages_sharing") + ksm.counter("ksm_zero_pages")) * 4096;
        saved - ksm.counter("general_profit")
    };
    ksm.set("run", 2);
    ksm.set("run", 0);
    assert_eq!(metadata(), 0, "nobody else is enrolled");

    let place = Place::new(8);
    let write = |bounds: &str| place.write(&format!("mode = \"act\"\nprice = 1000.0\n{bounds}"));
    write("max_metadata = \"256KiB\"\nmax_regions = 120\nsplit_huge_pages = false");
    let lab = |more: &[&str]| place.lab(&[&["mixture", "--mib", "32", "--duplicate", "50%"], more].concat());
    // Some hundred runs of what pays among others of what does not, and the same in huge pages.
    let scattered = ["a", "b"].map(|salt| lab(&["--run", "16", "--salt", salt]));
    let huge = ["c", "d"].map(|salt| lab(&["--run", "512", "--huge", "--seed", "huge", "--salt", salt]));
    let all = || scattered.iter().chain(&huge);
    let in_huge_pages = || huge.iter().map(|program| program.kib("AnonHugePages:").unwrap()).sum::<u64>();
    let regions = || scattered.iter().map(Program::regions).max().unwrap();
    let whole = in_huge_pages();
    assert!(whole >= 60 << 10 && regions() < 100, "{whole} KiB in huge pages, {} regions", regions());

    let daemon = place.daemon(&[]);
    let passes = |of: &str| daemon.status()["passes"][of].as_u64().unwrap();
    let mut most = 0;
    let mut until_with_all_bounds_kept = |what: &str, there: &dyn Fn() -> bool| {
        until(what, || {
            let (metadata, regions) = (metadata(), regions());
            most = most.max(metadata);
            assert!(metadata <= 256 << 10 && regions <= 120, "{metadata} bytes, {regions} regions");
            assert!(in_huge_pages() >= whole, "huge pages are split");
            there()
        });
    };
    until_with_all_bounds_kept("a merge", &|| passes("merges") >= 1);
    let seen = passes("passes");
    until_with_all_bounds_kept("looks and what follows", &|| {
        all().for_each(|program| daemon.tell(&["enrol", &program.pid()]));
        passes("passes") >= seen + 4
    });
    assert!(most > 64 << 10, "ksmd has looked at little: {most} bytes");

    write("");
    daemon.signal(nix::sys::signal::Signal::SIGHUP);
    all().for_each(|program| daemon.tell(&["enrol", &program.pid()]));
    // What lies between what was merged before may not pay any more.
    until("most of it", || all().all(|program| program.merged() >= MOST * 4 / 5));
    let (metadata, regions) = (metadata(), regions());
    assert!(metadata > 256 << 10 && regions > 120, "{metadata} bytes, {regions} regions");
    assert!(in_huge_pages() < whole, "they are not split");
    let (code, said) = daemon.stop();
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(ksm.changed(), []);
}

#[test]
fn who_observes_or_advises_changes_nothing() {
    let Some(ksm) = Ksm::take_as_others_set_it() else { return };
    let place = Place::new(2);
    place.write("mode = \"observe\"");
    let programs = [place.program(), place.program()];
    let daemon = place.daemon(&[]);
    until("both", || daemon.status()["members"].as_array().map(Vec::len) == Some(2));
    assert_eq!(daemon.status()["passes"]["passes"], 0);
    // A file that says something wrong changes nothing; one that does not is in force.
    fs::write(place.config(), "[daemon]\nmod = \"act\"\n").unwrap();
    daemon.signal(nix::sys::signal::Signal::SIGHUP);
    let refused = "the configuration stays as it was";
    until("a refusal", || fs::read_to_string(place.errors()).unwrap().contains(refused));
    assert_eq!(daemon.status()["mode"], "observe");
    place.write("mode = \"advise\"");
    daemon.signal(nix::sys::signal::Signal::SIGHUP);
    until("advice", || daemon.said("merge", "profitable"));
    let status = daemon.status();
    let merge = |decision: &&Value| decision["what"] == "merge";
    let advice = status["decisions"].as_array().unwrap().iter().find(merge).unwrap();
    assert!(advice["acted"] == false && advice["predicted"].as_u64() > Some(8 << 20), "{advice}");
    assert_eq!(ksm.changed(), []);
    assert!(programs.iter().all(|program| !program.is_enrolled()));
    let (code, said) = daemon.stop();
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("did you mean mode?"), "{said}");
    assert_eq!(ksm.changed(), []);
}

#[test]
fn killed_or_contested_it_leaves_the_host_as_it_was() {
    let Some(ksm) = Ksm::take_as_others_set_it() else { return };
    let place = Place::new(3);
    place.write("mode = \"act\"");
    ksm.set("run", 1);
    let daemon = place.daemon(&[]);
    until("the host", || ksm.counter("run") == 0);
    daemon.signal(nix::sys::signal::Signal::SIGKILL);
    daemon.ended();
    assert_eq!(ksm.counter("run"), 0);
    let recovered = place.run(&["recover"]);
    assert!(recovered.status.success(), "{recovered:?}");
    assert_eq!(ksm.counter("run"), 1);

    // Killed again, the next start finds it, and takes the socket that is left, and what an operator has said.
    let daemon = place.daemon(&[]);
    until("the host", || ksm.counter("run") == 0);
    let program = place.program();
    let is_withdrawn = |status: Value| status["members"][0]["state"] == "withdrawn";
    until("the program", || !daemon.status()["members"].as_array().unwrap().is_empty());
    daemon.tell(&["withdraw", &program.pid()]);
    daemon.tell(&["pause"]);
    until("a pause", || daemon.status()["state"] == "paused" && is_withdrawn(daemon.status()));
    daemon.signal(nix::sys::signal::Signal::SIGKILL);
    daemon.ended();
    let daemon = place.daemon(&[]);
    until("the program again", || daemon.status()["state"] == "paused" && is_withdrawn(daemon.status()));
    assert_eq!(ksm.counter("run"), 1, "nothing is done in a pause");
    daemon.tell(&["resume"]);
    until("the host", || ksm.counter("run") == 0);
    daemon.signal(nix::sys::signal::Signal::SIGKILL);
    daemon.ended();
    let daemon = place.daemon(&[]);
    until("the host again", || ksm.counter("run") == 0 && daemon.status()["state"] != "yielding");
    ksm.set("run", 1);
    until("a yield", || daemon.said("yield", "other_writer"));
    until("it let go", || daemon.said("restore", "other_writer"));
    assert_eq!(ksm.counter("run"), 1, "what somebody wrote stays");
    daemon.tell(&["resume"]);
    until("the host once more", || ksm.counter("run") == 0);
    assert!(is_withdrawn(daemon.status()) && place.state().join("operator.json").exists());
    let (code, said) = daemon.stop();
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(ksm.counter("run"), 1);
    assert!(said.contains("put back: /sys/kernel/mm/ksm/run was 1"), "{said}");
    assert!(!place.state().join("operator.json").exists(), "what was said to it ends with it");
}

/// Programs that want all CPUs wait while a census or ksmd has one of them. The least that shows is told of.
#[test]
fn it_gets_out_of_the_way_of_programs_that_want_the_cpu() {
    let Some(ksm) = Ksm::take_as_others_set_it() else { return };
    let place = Place::new(6);
    fs::write(place.config(), format!("[daemon]\nslowdown = \"0.5%\"\n[daemon.only]\nnames = [\"{}\"]\n", place.name))
        .unwrap();
    let busy = || place.lab(&["busy", "--threads", "4", "--memory", "64"]);
    let programs = [busy(), busy()];
    let daemon = place.daemon(&["--mode", "act"]);
    until("it to back off", || {
        // What they have is looked at again and again, with some rest in between to compare with.
        sleep(Duration::from_secs(4));
        for program in &programs {
            place.run(&["enrol", &program.pid()]);
        }
        daemon.said("rest", "slow_down")
    });
    let (code, said) = daemon.stop();
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("of their time while it worked"), "{said}");
    assert_eq!(ksm.changed(), []);
}

#[test]
fn it_ends_with_everything_withdrawn_where_that_is_asked_for() {
    let Some(ksm) = Ksm::take_as_others_set_it() else { return };
    let place = Place::new(4);
    place.write("mode = \"act\"");
    let programs = [place.program(), place.program()];
    let daemon = place.daemon(&["--unmerge-on-exit"]);
    until("the merge", || programs.iter().all(|program| program.merged() >= MOST));
    until("the end of it", || daemon.status()["passes"]["merges"].as_u64() >= Some(1));
    let (code, said) = daemon.stop();
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(ksm.changed(), []);
    assert!(programs.iter().all(|program| program.merged() == 0 && !program.is_enrolled()), "{said}");
}

#[test]
fn told_to_unmerge_it_does_so_from_a_pause_and_says_who_stays_where_it_may_not() {
    let Some(ksm) = Ksm::take_as_others_set_it() else { return };
    let place = Place::new(7);
    place.write("mode = \"act\"");
    let programs = [place.program(), place.program()];
    let merged = |daemon: &Daemon<'_>| {
        until("the merge", || programs.iter().all(|program| program.merged() >= MOST));
        until("the end of it", || daemon.status()["passes"]["merges"].as_u64() >= Some(1));
    };
    let daemon = place.daemon(&["--unmerge-on-exit"]);
    merged(&daemon);
    daemon.tell(&["pause"]);
    until("the host", || ksm.changed().is_empty());
    let (code, said) = daemon.stop();
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(ksm.changed(), []);
    assert!(programs.iter().all(|program| program.merged() == 0 && !program.is_enrolled()), "{said}");

    let daemon = place.daemon(&["--unmerge-on-exit"]);
    merged(&daemon);
    place.write("mode = \"advise\"");
    daemon.signal(nix::sys::signal::Signal::SIGHUP);
    until("the host", || ksm.changed().is_empty() && daemon.status()["mode"] == "advise");
    let told = place.run(&["withdraw", &programs[0].pid()]);
    let answer = String::from_utf8_lossy(&told.stdout).into_owned();
    assert!(told.status.success() && answer.contains("it only advises"), "{told:?}");
    let (code, said) = daemon.stop();
    assert_eq!(code, Some(3), "{said}");
    assert_eq!(said.matches("it stays merged: it only advises").count(), 2, "{said}");
    assert!(programs.iter().all(|program| program.merged() >= MOST), "{said}");
    assert_eq!(ksm.changed(), []);
}

#[test]
fn a_recorded_host_is_advised() {
    let place = Place::new(5);
    let text = "[daemon]\nmode = \"advise\"\nmin_memory = \"4KiB\"\nmin_profit = \"4KiB\"\nprice = 1000.0\n";
    fs::write(place.config(), text).unwrap();
    let recording = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/recordings/linux-6.18");
    let host = format!("recording:{}", recording.display());
    let refused = place.run(&["--host", &host, "daemon", "--mode", "act"]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    let daemon = place.daemon(&["--host", &host]);
    until("a census", || daemon.status()["passes"]["passes"].as_u64() >= Some(1));
    let status = daemon.status();
    assert!(status["members"].as_array().unwrap().len() >= 4, "{}", status["members"]);
    assert!(status["census"]["classes"]["resident"].as_u64() > Some(0));
    let (code, said) = daemon.stop();
    assert_eq!(code, Some(0), "{said}");
}
