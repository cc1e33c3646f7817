//! The daemon on the live kernel: it merges new processes, follows operator commands and restores the host's settings.
//!
//! The configuration limits the daemon to programs with one name, which only the test's programs have.

use pagefold_labs::client;
use pagefold_labs::ksm::KsmTestGuard;
use pagefold_labs::process_checks::{enrolled_page_addresses, wait_until};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A directory with a configuration, the daemon's state, and a link to the lab under a unique name.
struct DaemonTestDirectory {
    directory: TempDir,
    program_name: String,
}

impl DaemonTestDirectory {
    fn new(number: u32) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let name = format!("pfd{}-{number}", std::process::id());
        // The kernel names a process after the file that was executed.
        std::os::unix::fs::symlink(client::lab_binary().expect("no lab"), directory.path().join(&name)).unwrap();
        Self { directory, program_name: name }
    }

    fn config_path(&self) -> PathBuf {
        self.directory.path().join("pagefold.toml")
    }

    fn write_config(&self, section: &str) {
        // The daemon must not back off because of other load on the machine.
        let text = format!(
            "[daemon]\nmax_slowdown = \"100%\"\n{section}\n[daemon.tracked]\nnames = [\"{}\"]\n",
            self.program_name
        );
        fs::write(self.config_path(), text).unwrap();
    }

    fn state_path(&self) -> PathBuf {
        self.directory.path().join("state")
    }

    /// The file with the daemon's standard error.
    fn stderr_path(&self) -> PathBuf {
        self.directory.path().join("errors")
    }

    fn pagefold_command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        command.arg("--state").arg(self.state_path()).arg("--config").arg(self.config_path()).args(arguments);
        command
    }

    fn run_pagefold(&self, arguments: &[&str]) -> Output {
        self.pagefold_command(arguments).output().expect("the binary runs")
    }

    /// Start the daemon, and wait until it answers a status request.
    fn start_daemon(&self, arguments: &[&str]) -> DaemonUnderTest<'_> {
        let mut command = self.pagefold_command(&["daemon"]);
        let errors = fs::File::create(self.stderr_path()).unwrap();
        let child = command.args(arguments).stdin(Stdio::null()).stderr(errors).spawn().unwrap();
        let daemon = DaemonUnderTest { directory: self, child };
        wait_until("the daemon's answer", || self.run_pagefold(&["status", "--json"]).status.success());
        daemon
    }

    /// Start a program that shares half of its content with every other program started by this function.
    fn start_program(&self) -> LabProgram {
        self.start_lab(&["mixture", "--mib", "32", "--duplicate-share", "50%"])
    }

    /// Start the lab with these arguments, and wait until it is ready.
    fn start_lab(&self, arguments: &[&str]) -> LabProgram {
        let mut child = Command::new(self.directory.path().join(&self.program_name))
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("cannot start pagefold-lab");
        let ready = BufReader::new(child.stdout.take().unwrap())
            .lines()
            .find(|line| line.as_ref().is_ok_and(|line| line.starts_with("READY")));
        assert!(ready.is_some(), "pagefold-lab exited before it was ready");
        LabProgram(child)
    }
}

struct DaemonUnderTest<'a> {
    directory: &'a DaemonTestDirectory,
    child: Child,
}

impl DaemonUnderTest<'_> {
    fn read_status(&self) -> Value {
        let output = self.directory.run_pagefold(&["status", "--json"]);
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    fn run_control_command(&self, arguments: &[&str]) {
        let output = self.directory.run_pagefold(arguments);
        assert!(output.status.success(), "{output:?}");
    }

    fn send_signal(&self, signal: nix::sys::signal::Signal) {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }

    /// The exit code and the standard error, once the daemon has exited.
    fn wait_for_exit(mut self) -> (Option<i32>, String) {
        let code = self.child.wait().unwrap().code();
        (code, fs::read_to_string(self.directory.stderr_path()).unwrap())
    }

    fn stop(self) -> (Option<i32>, String) {
        self.send_signal(nix::sys::signal::Signal::SIGTERM);
        self.wait_for_exit()
    }

    fn has_logged(&self, kind: &str, reason: &str) -> bool {
        let status = self.read_status();
        let decisions = status["decisions"].as_array().unwrap();
        decisions.iter().any(|decision| decision["kind"] == kind && decision["reason"] == reason)
    }
}

impl Drop for DaemonUnderTest<'_> {
    fn drop(&mut self) {
        // Reached with a running daemon only if a test has failed: SIGTERM makes the daemon restore the settings.
        if self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            self.send_signal(nix::sys::signal::Signal::SIGTERM);
            let _ = self.child.wait();
        }
    }
}

struct LabProgram(Child);

impl LabProgram {
    fn pid(&self) -> String {
        self.0.id().to_string()
    }

    /// A field of the process's smaps_rollup now, in KiB.
    fn rollup_kib(&self, name: &str) -> Option<u64> {
        let rollup = fs::read_to_string(format!("/proc/{}/smaps_rollup", self.0.id())).unwrap();
        rollup.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix(" kB")?.parse().ok())
    }

    /// Merged pages of the process now, from its page tables.
    fn merged_pages(&self) -> u64 {
        self.rollup_kib("KSM:").unwrap_or(0) / 4
    }

    fn region_count(&self) -> usize {
        fs::read_to_string(format!("/proc/{}/maps", self.0.id())).unwrap().lines().count()
    }

    fn is_enrolled(&self) -> bool {
        !enrolled_page_addresses(self.0.id()).is_empty()
    }
}

impl Drop for LabProgram {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// Nine tenths of the content that two programs share, in pages of one program.
const MIN_MERGED_PAGES: u64 = 4096 * 9 / 10;

/// No KSM counter covers zeros that the kernel frees when it splits a huge page.
#[test]
fn zeros_freed_by_splitting_count_as_saved() {
    let Some(_ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    let test_directory = DaemonTestDirectory::new(11);
    test_directory.write_config("mode = \"act\"");
    let daemon = test_directory.start_daemon(&[]);
    let programs = [(); 2].map(|()| test_directory.start_lab(&["layout", "huge-zero=8192"]));
    if programs.iter().any(|program| program.rollup_kib("AnonHugePages:") < Some(24 << 10)) {
        return println!("skipped: the kernel gave no huge pages");
    }
    wait_until("the merge", || daemon.read_status()["passes"]["merges"].as_u64() >= Some(1));
    let status = daemon.read_status();
    let saved = |name: &str| status["saved"][name].as_u64().unwrap_or(0);
    if saved("split_zero") == 0 && programs.iter().all(|program| program.rollup_kib("AnonHugePages:") < Some(8 << 10)) {
        return println!("skipped: this kernel does not free zeros when it splits huge pages (before 6.12)");
    }
    assert!(saved("split_zero") >= 16 << 20, "{}", status["saved"]);
    assert_eq!(saved("gross"), saved("duplicate") + saved("zero") + saved("split_zero"));
    let net = status["saved"]["net"].as_i64().unwrap();
    assert_eq!(net, saved("gross").cast_signed() - saved("metadata").cast_signed());
    // The total includes the savings of the merge, whatever else is merged on this host.
    let measured = status["passes"]["measured"].as_i64().unwrap();
    assert!(net >= measured - (1 << 20), "the merge measured {measured} bytes, the host's net savings are {net} bytes");
    let text = String::from_utf8(test_directory.run_pagefold(&["status"]).stdout).unwrap();
    assert!(text.contains("zeros in split huge pages, which KSM does not count"), "{text}");
    let pids = programs.iter().flat_map(|program| ["--pid".to_owned(), program.pid()]).collect::<Vec<_>>();
    let account = test_directory.pagefold_command(&["account", "--json"]).args(&pids).output().unwrap();
    let account: Value = serde_json::from_slice(&account.stdout).unwrap();
    assert_eq!(account["total"]["split_zero_pages"].as_u64().map(|pages| pages * 4096), Some(saved("split_zero")));
}

#[test]
fn full_history_disk_is_logged_and_daemon_continues() {
    let Some(_ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    let test_directory = DaemonTestDirectory::new(12);
    test_directory.write_config("mode = \"advise\"");
    let disk = test_directory.directory.path().join("disk");
    fs::create_dir(&disk).unwrap();
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=4k", "pagefold-test"]).arg(&disk).status();
    if !mounted.is_ok_and(|status| status.success()) {
        return println!("skipped: cannot mount a file system here");
    }
    let history = disk.join("history.db");
    let daemon = test_directory.start_daemon(&["--history", history.to_str().unwrap()]);
    let answered = daemon.read_status()["state"].is_string();
    let (code, stderr) = daemon.stop();
    let unmounted = Command::new("umount").arg("--lazy").arg(&disk).status();
    assert!(answered && code == Some(0), "{code:?}: {stderr}");
    assert!(stderr.contains("continuing without a history") && stderr.contains("history.db"), "{stderr}");
    assert!(unmounted.is_ok_and(|status| status.success()));
}

#[test]
fn arrivals_are_merged_and_operator_commands_followed() {
    let Some(ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    let test_directory = DaemonTestDirectory::new(1);
    test_directory.write_config("mode = \"act\"");
    let daemon = test_directory.start_daemon(&[]);
    let programs = [test_directory.start_program(), test_directory.start_program()];
    wait_until("the merge", || programs.iter().all(|program| program.merged_pages() >= MIN_MERGED_PAGES));
    wait_until("the end of the merge", || daemon.read_status()["passes"]["merges"].as_u64() >= Some(1));

    let status = daemon.read_status();
    let schema = fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/schema/status.json")).unwrap();
    let validator = jsonschema::validator_for(&serde_json::from_slice(&schema).unwrap()).unwrap();
    let schema_errors: Vec<String> = validator.iter_errors(&status).map(|error| error.to_string()).collect();
    assert!(schema_errors.is_empty(), "{schema_errors:#?}");
    let tracked = status["tracked_processes"].as_array().unwrap();
    assert_eq!(tracked.len(), 2, "the daemon must manage the two programs only: {tracked:#?}");
    assert!(
        tracked.iter().all(|process| process["state"] == "merged" && process["enrolled_ranges"].as_u64() > Some(0))
    );
    assert!(status["passes"]["measured"].as_i64() > Some(8 << 20), "{}", status["passes"]);
    // The fair share divides merged pages and file pages by their mappings. So the footprint of the first program
    // includes half of what both share.
    let are_fair_shares_read = |status: &Value| {
        let tracked = status["tracked_processes"].as_array().unwrap().iter();
        tracked.filter(|process| process["footprint_age_seconds"].is_u64()).count() == 2
    };
    wait_until("the fair share of both programs", || are_fair_shares_read(&daemon.read_status()));
    for program in &programs {
        let status = daemon.read_status();
        let mut tracked = status["tracked_processes"].as_array().unwrap().iter();
        let process = tracked.find(|process| process["pid"].as_u64() == Some(program.0.id().into())).unwrap();
        let (footprint_kib, pss) = (process["footprint"].as_u64().unwrap() >> 10, program.rollup_kib("Pss:").unwrap());
        assert!(
            footprint_kib.abs_diff(pss) < 512 && pss < 28 << 10,
            "footprint {footprint_kib} KiB, Pss {pss} KiB: {process}"
        );
    }
    let text = test_directory.run_pagefold(&["status"]);
    assert!(String::from_utf8_lossy(&text.stdout).contains("Latest decisions"), "{text:?}");

    // The savings of a process that exited disappear soon, even though ksmd is idle.
    let saved = || daemon.read_status()["saved"]["duplicate"].as_u64().unwrap();
    let before = saved();
    let more = [test_directory.start_program(), test_directory.start_program()];
    wait_until("the second merge", || more.iter().all(|program| program.merged_pages() >= MIN_MERGED_PAGES));
    wait_until("the increased savings", || saved() >= before + MIN_MERGED_PAGES * 4096);
    drop(more);
    wait_until("the decreased savings", || saved() < before + MIN_MERGED_PAGES * 4096 / 2);
    wait_until("the idle state", || {
        ksm.read_counter("run") == 0 && daemon.read_status()["tracked_processes"].as_array().unwrap().len() == 2
    });

    // While the daemon manages the host, no other Pagefold process changes it.
    let second = test_directory.run_pagefold(&["daemon"]);
    let why = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(second.status.code() == Some(2) && why.contains("runs already"), "{why}");
    let other = test_directory.run_pagefold(&["merge", "--pid", &programs[0].pid()]);
    let why = String::from_utf8_lossy(&other.stderr).into_owned();
    assert!(other.status.code() == Some(2) && why.contains("`pagefold pause`"), "{why}");

    daemon.run_control_command(&["pause"]);
    wait_until("the pause", || ksm.changed_settings().is_empty() && daemon.read_status()["state"] == "paused");
    assert!(
        test_directory.run_pagefold(&["recover"]).status.success(),
        "a paused daemon must let `recover` change the host"
    );
    assert!(programs[0].merged_pages() >= MIN_MERGED_PAGES, "a pause must not unmerge pages");
    daemon.run_control_command(&["resume"]);

    daemon.run_control_command(&["unenroll", &programs[0].pid()]);
    wait_until("the unenrollment", || programs[0].merged_pages() == 0 && !programs[0].is_enrolled());
    assert!(daemon.has_logged("unenroll", "operator"));
    daemon.run_control_command(&["enroll", &programs[0].pid()]);
    let is_managed = |process: &Value| process["state"] != "unenrolled";
    wait_until("the enrollment", || {
        daemon.read_status()["tracked_processes"].as_array().unwrap().iter().all(is_managed)
    });
    let refused = test_directory.run_pagefold(&["enroll", "1"]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");

    let (code, stderr) = daemon.stop();
    assert_eq!(code, Some(0), "{stderr}");
    assert_eq!(ksm.changed_settings(), []);
    assert!(
        !test_directory.state_path().join("control").exists()
            && !test_directory.state_path().join("ksm.journal.json").exists()
    );
}

#[test]
fn metadata_regions_and_huge_page_splits_stay_bounded() {
    let Some(ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    // The KSM metadata in bytes: gross savings less KSM's profit. It excludes metadata of processes that exited.
    let metadata = || {
        let saved = (ksm.read_counter("pages_sharing") + ksm.read_counter("ksm_zero_pages")) * 4096;
        saved - ksm.read_counter("general_profit")
    };
    ksm.write_setting("run", 2);
    ksm.write_setting("run", 0);
    assert_eq!(metadata(), 0, "a process outside the test is enrolled");

    let test_directory = DaemonTestDirectory::new(8);
    let write = |bounds: &str| {
        test_directory.write_config(&format!("mode = \"act\"\nmax_cpu_seconds_per_mib = 1000.0\n{bounds}"))
    };
    write("max_metadata = \"256KiB\"\nmax_regions = 120\nsplit_huge_pages = false");
    let lab = |more: &[&str]| {
        test_directory.start_lab(&[&["mixture", "--mib", "32", "--duplicate-share", "50%"], more].concat())
    };
    // Some hundred runs of duplicates among unique pages, in small pages and in huge pages.
    let scattered = ["a", "b"].map(|salt| lab(&["--run-pages", "16", "--salt", salt]));
    let huge = ["c", "d"].map(|salt| lab(&["--run-pages", "512", "--huge", "--seed", "huge", "--salt", salt]));
    let all = || scattered.iter().chain(&huge);
    let huge_kib = || huge.iter().map(|program| program.rollup_kib("AnonHugePages:").unwrap()).sum::<u64>();
    let regions = || scattered.iter().map(LabProgram::region_count).max().unwrap();
    let initial_huge_kib = huge_kib();
    assert!(
        initial_huge_kib >= 60 << 10 && regions() < 100,
        "{initial_huge_kib} KiB in huge pages, {} regions",
        regions()
    );

    let daemon = test_directory.start_daemon(&[]);
    let passes = |name: &str| daemon.read_status()["passes"][name].as_u64().unwrap();
    let mut max_metadata_seen = 0;
    let mut wait_within_bounds = |what: &str, condition: &dyn Fn() -> bool| {
        wait_until(what, || {
            let (metadata, regions) = (metadata(), regions());
            max_metadata_seen = max_metadata_seen.max(metadata);
            assert!(metadata <= 256 << 10 && regions <= 120, "{metadata} bytes of metadata, {regions} regions");
            assert!(huge_kib() >= initial_huge_kib, "the daemon split huge pages");
            condition()
        });
    };
    wait_within_bounds("a merge", &|| passes("merges") >= 1);
    let earlier_passes = passes("passes");
    wait_within_bounds("four more passes", &|| {
        all().for_each(|program| daemon.run_control_command(&["enroll", &program.pid()]));
        passes("passes") >= earlier_passes + 4
    });
    assert!(max_metadata_seen > 64 << 10, "ksmd has scanned too little: {max_metadata_seen} bytes of metadata at most");

    write("");
    daemon.send_signal(nix::sys::signal::Signal::SIGHUP);
    all().for_each(|program| daemon.run_control_command(&["enroll", &program.pid()]));
    // Pages between the ranges merged before may no longer be profitable.
    wait_until("the larger merge", || all().all(|program| program.merged_pages() >= MIN_MERGED_PAGES * 4 / 5));
    let (metadata, regions) = (metadata(), regions());
    assert!(metadata > 256 << 10 && regions > 120, "{metadata} bytes of metadata, {regions} regions");
    assert!(huge_kib() < initial_huge_kib, "the daemon split no huge pages");
    let (code, stderr) = daemon.stop();
    assert_eq!(code, Some(0), "{stderr}");
    assert_eq!(ksm.changed_settings(), []);
}

#[test]
fn observe_and_advise_modes_change_nothing() {
    let Some(ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    let test_directory = DaemonTestDirectory::new(2);
    test_directory.write_config("mode = \"observe\"");
    let programs = [test_directory.start_program(), test_directory.start_program()];
    let daemon = test_directory.start_daemon(&[]);
    wait_until("the two tracked programs", || {
        daemon.read_status()["tracked_processes"].as_array().map(Vec::len) == Some(2)
    });
    assert_eq!(daemon.read_status()["passes"]["passes"], 0);
    // An invalid configuration file changes nothing; a valid one takes effect.
    fs::write(test_directory.config_path(), "[daemon]\nmod = \"act\"\n").unwrap();
    daemon.send_signal(nix::sys::signal::Signal::SIGHUP);
    let refused = "the configuration stays as it was";
    wait_until("the config error", || fs::read_to_string(test_directory.stderr_path()).unwrap().contains(refused));
    assert_eq!(daemon.read_status()["mode"], "observe");
    test_directory.write_config("mode = \"advise\"");
    daemon.send_signal(nix::sys::signal::Signal::SIGHUP);
    wait_until("advice to merge", || daemon.has_logged("merge", "profitable"));
    let status = daemon.read_status();
    let merge = |decision: &&Value| decision["kind"] == "merge";
    let advice = status["decisions"].as_array().unwrap().iter().find(merge).unwrap();
    assert!(advice["carried_out"] == false && advice["predicted"].as_u64() > Some(8 << 20), "{advice}");
    assert_eq!(ksm.changed_settings(), []);
    assert!(programs.iter().all(|program| !program.is_enrolled()));
    let (code, stderr) = daemon.stop();
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stderr.contains("did you mean mode?"), "{stderr}");
    assert_eq!(ksm.changed_settings(), []);
}

#[test]
fn killed_or_overruled_daemon_restores_the_host() {
    let Some(ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    let test_directory = DaemonTestDirectory::new(3);
    test_directory.write_config("mode = \"act\"");
    ksm.write_setting("run", 1);
    let daemon = test_directory.start_daemon(&[]);
    wait_until("the stop of ksmd", || ksm.read_counter("run") == 0);
    daemon.send_signal(nix::sys::signal::Signal::SIGKILL);
    daemon.wait_for_exit();
    assert_eq!(ksm.read_counter("run"), 0);
    let recovered = test_directory.run_pagefold(&["recover"]);
    assert!(recovered.status.success(), "{recovered:?}");
    assert_eq!(ksm.read_counter("run"), 1);

    // After another SIGKILL the next start finds the journal, reuses the leftover socket and keeps the operator's
    // commands.
    let daemon = test_directory.start_daemon(&[]);
    wait_until("the stop of ksmd", || ksm.read_counter("run") == 0);
    let program = test_directory.start_program();
    let is_unenrolled = |status: Value| status["tracked_processes"][0]["state"] == "unenrolled";
    wait_until("the tracked program", || !daemon.read_status()["tracked_processes"].as_array().unwrap().is_empty());
    daemon.run_control_command(&["unenroll", &program.pid()]);
    daemon.run_control_command(&["pause"]);
    wait_until("the pause", || daemon.read_status()["state"] == "paused" && is_unenrolled(daemon.read_status()));
    daemon.send_signal(nix::sys::signal::Signal::SIGKILL);
    daemon.wait_for_exit();
    let daemon = test_directory.start_daemon(&[]);
    wait_until("the pause again", || daemon.read_status()["state"] == "paused" && is_unenrolled(daemon.read_status()));
    assert_eq!(ksm.read_counter("run"), 1, "a paused daemon must not write KSM settings");
    daemon.run_control_command(&["resume"]);
    wait_until("the stop of ksmd", || ksm.read_counter("run") == 0);
    daemon.send_signal(nix::sys::signal::Signal::SIGKILL);
    daemon.wait_for_exit();
    let daemon = test_directory.start_daemon(&[]);
    wait_until("the idle ksmd", || ksm.read_counter("run") == 0 && daemon.read_status()["state"] != "yielding");
    ksm.write_setting("run", 1);
    wait_until("the yield to the other writer", || daemon.has_logged("yield", "other_writer"));
    wait_until("the restored settings", || daemon.has_logged("restore", "other_writer"));
    assert_eq!(ksm.read_counter("run"), 1, "the daemon must keep a setting that another process wrote");
    daemon.run_control_command(&["resume"]);
    wait_until("the stop of ksmd", || ksm.read_counter("run") == 0);
    assert!(is_unenrolled(daemon.read_status()) && test_directory.state_path().join("operator.json").exists());
    let (code, stderr) = daemon.stop();
    assert_eq!(code, Some(0), "{stderr}");
    assert_eq!(ksm.read_counter("run"), 1);
    assert!(stderr.contains("restored what an earlier pagefold had changed: /sys/kernel/mm/ksm/run was 1"), "{stderr}");
    assert!(
        !test_directory.state_path().join("operator.json").exists(),
        "the operator's commands must end with the daemon"
    );
}

/// Programs that use all CPUs slow down while a census or ksmd uses one of them. They have just as many threads as
/// there are CPUs, so that they hardly wait without the daemon, and enough memory for readings within a census.
#[test]
fn daemon_backs_off_for_busy_programs() {
    let Some(ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    let test_directory = DaemonTestDirectory::new(6);
    fs::write(
        test_directory.config_path(),
        format!("[daemon]\nmax_slowdown = \"0.5%\"\n[daemon.tracked]\nnames = [\"{}\"]\n", test_directory.program_name),
    )
    .unwrap();
    let threads = std::thread::available_parallelism().unwrap().get().div_ceil(2).to_string();
    let busy = || test_directory.start_lab(&["busy", "--threads", &threads, "--memory", "256"]);
    let programs = [busy(), busy()];
    let daemon = test_directory.start_daemon(&["--mode", "act"]);
    wait_until("the daemon's backoff", || {
        // Scan the programs repeatedly, with idle time in between for comparison.
        sleep(Duration::from_secs(4));
        for program in &programs {
            test_directory.run_pagefold(&["enroll", &program.pid()]);
        }
        daemon.has_logged("idle", "slowdown")
    });
    let (code, stderr) = daemon.stop();
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stderr.contains("of their time while it worked"), "{stderr}");
    assert_eq!(ksm.changed_settings(), []);
}

#[test]
fn unmerge_on_exit_unenrolls_everything() {
    let Some(ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    let test_directory = DaemonTestDirectory::new(4);
    test_directory.write_config("mode = \"act\"");
    let programs = [test_directory.start_program(), test_directory.start_program()];
    let daemon = test_directory.start_daemon(&["--unmerge-on-exit"]);
    wait_until("the merge", || programs.iter().all(|program| program.merged_pages() >= MIN_MERGED_PAGES));
    wait_until("the end of the merge", || daemon.read_status()["passes"]["merges"].as_u64() >= Some(1));
    let (code, stderr) = daemon.stop();
    assert_eq!(code, Some(0), "{stderr}");
    assert_eq!(ksm.changed_settings(), []);
    assert!(programs.iter().all(|program| program.merged_pages() == 0 && !program.is_enrolled()), "{stderr}");
}

/// Pages that each two large programs share: a twentieth of their memory, at opposite ends.
const SHARED_PAGES_OF_LARGE_PROGRAMS: u64 = 6400;

/// A burst that pays for scanning a third of a large program.
const SMALL_BURST: &str = "mode = \"act\"\ncpu_burst = \"200ms\"\nmax_cpu_seconds_per_mib = 1000.0\n";

impl DaemonTestDirectory {
    /// Start a program of 570 MiB that shares a few pages with each other one. They come first or last in its memory.
    fn start_large_program(&self, shared_first: bool) -> LabProgram {
        let mut regions =
            [format!("shared-content=large:{SHARED_PAGES_OF_LARGE_PROGRAMS}"), "unique=140000".to_owned()];
        if !shared_first {
            regions.reverse();
        }
        self.start_lab(&["layout", &regions.join(",")])
    }
}

impl DaemonUnderTest<'_> {
    /// The status, after a pause: an answer takes CPU time from the small burst, and a daemon that is asked all the time
    /// has none left to scan with.
    fn read_status_with_pause(&self) -> Value {
        sleep(Duration::from_millis(100));
        self.read_status()
    }

    /// The number of decisions with this explanation, as far as the daemon still keeps them.
    fn count_explanations(&self, explanation: &str) -> usize {
        let status = self.read_status_with_pause();
        let decisions = status["decisions"].as_array().unwrap();
        decisions.iter().filter(|decision| decision["explanation"] == explanation).count()
    }
}

/// Nine tenths of what large programs share.
fn is_merged(program: &LabProgram) -> bool {
    program.merged_pages() >= SHARED_PAGES_OF_LARGE_PROGRAMS * 9 / 10
}

#[test]
fn programs_over_the_burst_are_merged_in_parts() {
    let Some(ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    let test_directory = DaemonTestDirectory::new(14);
    test_directory.write_config(&format!("{SMALL_BURST}cpu_rate = \"50%\""));
    let programs = [true, false].map(|shared_first| test_directory.start_large_program(shared_first));
    let daemon = test_directory.start_daemon(&[]);
    wait_until("the next part", || daemon.count_explanations("the next part of its memory") > 0);
    assert!(programs.iter().all(|program| program.merged_pages() == 0), "the first scan only records pages");
    wait_until("the comparison of parts", || {
        daemon.count_explanations("a part of it is compared with another part") > 0
    });
    wait_until("the merge", || programs.iter().all(is_merged));
    wait_until("the end of the merge", || daemon.read_status_with_pause()["passes"]["merges"].as_u64() >= Some(1));
    assert!(ksm.read_counter("pages_sharing") >= (SHARED_PAGES_OF_LARGE_PROGRAMS * 9 / 10).cast_signed());
    wait_until("page counts of whole processes", || {
        daemon.read_status_with_pause()["census"]["classes"]["resident"].as_u64() >= Some(2 * 140_000 * 4096)
    });
    let (code, stderr) = daemon.stop();
    assert_eq!(code, Some(0), "{stderr}");
    assert!(!stderr.contains("refuse "), "{stderr}");
    assert_eq!(ksm.changed_settings(), []);
}

/// The program that a large one is compared with exits, and another one takes its place.
#[test]
fn scan_in_parts_survives_the_exit_of_a_partner() {
    let Some(ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    let test_directory = DaemonTestDirectory::new(15);
    test_directory.write_config(&format!("{SMALL_BURST}cpu_rate = \"30%\""));
    let (first, partner) = (test_directory.start_large_program(true), test_directory.start_large_program(false));
    let daemon = test_directory.start_daemon(&[]);
    wait_until("the next part", || daemon.count_explanations("the next part of its memory") > 0);
    drop(partner);
    let tracked_count = || daemon.read_status_with_pause()["tracked_processes"].as_array().unwrap().len();
    wait_until("the exit", || tracked_count() == 1);
    let next_partner = test_directory.start_large_program(false);
    wait_until("the merge", || is_merged(&first) && is_merged(&next_partner));
    let (code, stderr) = daemon.stop();
    assert_eq!(code, Some(0), "{stderr}");
    assert!(!stderr.contains("refuse "), "{stderr}");
    assert_eq!(ksm.changed_settings(), []);
}

/// Scans that found nothing are not repeated after a restart, whether the daemon hands over or is killed.
#[test]
fn restarted_daemon_continues_the_schedule() {
    let Some(ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    let test_directory = DaemonTestDirectory::new(16);
    test_directory.write_config("mode = \"act\"");
    let programs = [test_directory.start_program(), test_directory.start_program()];
    let daemon = test_directory.start_daemon(&[]);
    wait_until("the merge", || programs.iter().all(|program| program.merged_pages() >= MIN_MERGED_PAGES));
    let passes = |daemon: &DaemonUnderTest<'_>| daemon.read_status()["passes"]["passes"].as_u64().unwrap();
    // The intervals double from five seconds on. Idle programs then wait for longer.
    let mut last_pass = (passes(&daemon), Instant::now());
    wait_until("a long pause", || {
        let count = passes(&daemon);
        if count != last_pass.0 {
            last_pass = (count, Instant::now());
        }
        last_pass.1.elapsed() >= Duration::from_secs(40)
    });
    let mut daemon = daemon;
    for signal in [nix::sys::signal::Signal::SIGUSR1, nix::sys::signal::Signal::SIGKILL] {
        daemon.send_signal(signal);
        daemon.wait_for_exit();
        daemon = test_directory.start_daemon(&[]);
        wait_until("the adoption", || daemon.has_logged("adopt", "restarted"));
        wait_until("the idle ksmd", || ksm.read_counter("run") == 0);
        sleep(Duration::from_secs(4));
        let status = daemon.read_status();
        assert_eq!(status["passes"]["passes"], 0, "nothing has changed: {}", status["decisions"]);
        assert!(programs.iter().all(|program| program.merged_pages() >= MIN_MERGED_PAGES));
    }
    // A new program is still scanned at once, and merged with them.
    let third = test_directory.start_program();
    wait_until("the merge of a new program", || third.merged_pages() >= MIN_MERGED_PAGES);
    let (code, stderr) = daemon.stop();
    assert_eq!(code, Some(0), "{stderr}");
    assert_eq!(ksm.changed_settings(), []);
}

/// A daemon that hands over or is killed leaves its merged pages to the next one, which unmerges them as if it had
/// merged them itself.
#[test]
fn restarted_daemon_takes_over_merged_pages() {
    let Some(ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    let test_directory = DaemonTestDirectory::new(13);
    test_directory.write_config("mode = \"act\"");
    let programs = [test_directory.start_program(), test_directory.start_program()];
    let are_merged = || programs.iter().all(|program| program.merged_pages() >= MIN_MERGED_PAGES);
    let is_unmerged = |program: &LabProgram| program.merged_pages() == 0 && !program.is_enrolled();
    let record = test_directory.state_path().join("ksm.enrolled.json");
    let wait_for_merge = |daemon: &DaemonUnderTest<'_>| {
        wait_until("the merge", are_merged);
        wait_until("the end of the merge", || daemon.read_status()["passes"]["merges"].as_u64() >= Some(1));
    };
    let wait_for_adoption = |daemon: &DaemonUnderTest<'_>| {
        wait_until("the adoption", || {
            let status = daemon.read_status();
            let tracked = status["tracked_processes"].as_array().unwrap();
            let is_adopted =
                |process: &Value| process["state"] == "merged" && process["enrolled_ranges"].as_u64() > Some(0);
            tracked.len() == 2 && tracked.iter().all(is_adopted)
        });
        assert!(daemon.has_logged("adopt", "restarted") && are_merged());
        assert_eq!(daemon.read_status()["passes"]["merges"], 0, "the pages of the earlier daemon stayed merged");
    };
    let daemon = test_directory.start_daemon(&["--unmerge-on-exit"]);
    wait_for_merge(&daemon);
    daemon.send_signal(nix::sys::signal::Signal::SIGUSR1);
    let (code, stderr) = daemon.wait_for_exit();
    assert_eq!(code, Some(0), "{stderr}");
    assert!(are_merged() && record.exists() && ksm.changed_settings().is_empty(), "{stderr}");
    assert!(test_directory.run_pagefold(&["recover"]).status.success() && are_merged());

    let daemon = test_directory.start_daemon(&["--unmerge-on-exit"]);
    wait_for_adoption(&daemon);
    daemon.send_signal(nix::sys::signal::Signal::SIGKILL);
    daemon.wait_for_exit();
    let daemon = test_directory.start_daemon(&["--unmerge-on-exit"]);
    wait_for_adoption(&daemon);
    daemon.run_control_command(&["unenroll", &programs[0].pid()]);
    wait_until("the unenrollment", || is_unmerged(&programs[0]));
    let (code, stderr) = daemon.stop();
    assert_eq!(code, Some(0), "{stderr}");
    assert!(programs.iter().all(is_unmerged) && !record.exists(), "{stderr}");

    let daemon = test_directory.start_daemon(&[]);
    wait_for_merge(&daemon);
    daemon.send_signal(nix::sys::signal::Signal::SIGKILL);
    daemon.wait_for_exit();
    let recovered = test_directory.run_pagefold(&["recover", "--unenroll"]);
    assert!(recovered.status.success(), "{recovered:?}");
    assert!(programs.iter().all(is_unmerged) && !record.exists(), "{recovered:?}");
    assert_eq!(ksm.changed_settings(), []);
}

#[test]
fn unmerge_on_exit_works_from_a_pause_and_names_kept_processes() {
    let Some(ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    let test_directory = DaemonTestDirectory::new(7);
    test_directory.write_config("mode = \"act\"");
    let programs = [test_directory.start_program(), test_directory.start_program()];
    let wait_for_merge = |daemon: &DaemonUnderTest<'_>| {
        wait_until("the merge", || programs.iter().all(|program| program.merged_pages() >= MIN_MERGED_PAGES));
        wait_until("the end of the merge", || daemon.read_status()["passes"]["merges"].as_u64() >= Some(1));
    };
    let daemon = test_directory.start_daemon(&["--unmerge-on-exit"]);
    wait_for_merge(&daemon);
    daemon.run_control_command(&["pause"]);
    wait_until("the restored settings", || ksm.changed_settings().is_empty());
    let (code, stderr) = daemon.stop();
    assert_eq!(code, Some(0), "{stderr}");
    assert_eq!(ksm.changed_settings(), []);
    assert!(programs.iter().all(|program| program.merged_pages() == 0 && !program.is_enrolled()), "{stderr}");

    let daemon = test_directory.start_daemon(&["--unmerge-on-exit"]);
    wait_for_merge(&daemon);
    test_directory.write_config("mode = \"advise\"");
    daemon.send_signal(nix::sys::signal::Signal::SIGHUP);
    wait_until("advise mode", || ksm.changed_settings().is_empty() && daemon.read_status()["mode"] == "advise");
    let output = test_directory.run_pagefold(&["unenroll", &programs[0].pid()]);
    let answer = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && answer.contains("it only advises"), "{output:?}");
    let (code, stderr) = daemon.stop();
    assert_eq!(code, Some(3), "{stderr}");
    assert_eq!(stderr.matches("it stays merged: it only advises").count(), 2, "{stderr}");
    assert!(programs.iter().all(|program| program.merged_pages() >= MIN_MERGED_PAGES), "{stderr}");
    assert_eq!(ksm.changed_settings(), []);
}

#[test]
fn daemon_advises_on_a_recorded_host() {
    let test_directory = DaemonTestDirectory::new(5);
    let text =
        "[daemon]\nmode = \"advise\"\nmin_memory = \"4KiB\"\nmin_profit = \"4KiB\"\nmax_cpu_seconds_per_mib = 1000.0\n";
    fs::write(test_directory.config_path(), text).unwrap();
    let recording = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/recordings/linux-6.18");
    let host = format!("recording:{}", recording.display());
    let refused = test_directory.run_pagefold(&["--host", &host, "daemon", "--mode", "act"]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    let daemon = test_directory.start_daemon(&["--host", &host]);
    wait_until("a census", || daemon.read_status()["passes"]["passes"].as_u64() >= Some(1));
    let status = daemon.read_status();
    assert!(status["tracked_processes"].as_array().unwrap().len() >= 4, "{}", status["tracked_processes"]);
    assert!(status["census"]["classes"]["resident"].as_u64() > Some(0));
    let (code, stderr) = daemon.stop();
    assert_eq!(code, Some(0), "{stderr}");
}
