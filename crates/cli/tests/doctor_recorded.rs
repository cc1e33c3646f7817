//! `pagefold doctor` over recorded hosts: exit codes and output of the binary. Some hosts have files that are missing,
//! unreadable, truncated or filled with other data.

#![forbid(unsafe_code)]

use pagefold_base::{Absent, Pid};
use pagefold_doctor::decide::audit::{Topic, topic_of_rule};
use pagefold_doctor::decide::{Finding, Verdict, examine_host, examine_process};
use pagefold_doctor::doctor_facts;
use pagefold_host::faulty_host::{FaultyHost, InjectedFault};
use pagefold_recording::Recording;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Mutex;
use tempfile::TempDir;

const KSM_FILES: [(&str, &str); 20] = [
    ("run", "1"),
    ("pages_to_scan", "5000"),
    ("sleep_millisecs", "20"),
    ("pages_shared", "2000"),
    ("pages_sharing", "24000"),
    ("pages_unshared", "20000"),
    ("pages_volatile", "3000"),
    ("pages_scanned", "5000000"),
    ("pages_skipped", "100000"),
    ("full_scans", "12"),
    ("max_page_sharing", "256"),
    ("merge_across_nodes", "1"),
    ("use_zero_pages", "1"),
    ("ksm_zero_pages", "100"),
    ("general_profit", "95000000"),
    ("stable_node_chains", "0"),
    ("stable_node_dups", "0"),
    ("smart_scan", "1"),
    ("advisor_mode", "[none] scan-time"),
    ("advisor_target_scan_time", "200"),
];

const MEMINFO_TEXT: &str = "\
MemTotal:       67108864 kB
MemFree:        20971520 kB
MemAvailable:   31457280 kB
SwapTotal:       8388608 kB
SwapFree:        8388608 kB
AnonPages:       1048576 kB
AnonHugePages:         0 kB
Hugetlb:               0 kB
";

/// Builds a recording of a host.
struct RecordedHostBuilder {
    files: BTreeMap<String, Vec<u8>>,
    absent_lines: String,
}

impl RecordedHostBuilder {
    /// A host without problems: one process of user 1000 is enrolled.
    fn healthy() -> Self {
        let mut host = Self { files: BTreeMap::new(), absent_lines: String::new() };
        for (name, value) in KSM_FILES {
            host.put_file(&format!("sys/kernel/mm/ksm/{name}"), &format!("{value}\n"));
        }
        host.put_file("proc/sys/kernel/osrelease", "6.18.44\n");
        host.put_file("proc/meminfo", MEMINFO_TEXT);
        let line = "avg10=0.00 avg60=0.00 avg300=0.00 total=0";
        host.put_file("proc/pressure/memory", &format!("some {line}\nfull {line}\n"));
        host.put_file("proc/vmstat", "cow_ksm 50\nksm_swpin_copy 0\nthp_split_page 3\n");
        host.put_file("proc/uptime", "3600.00 7000.00\n");
        host.put_file("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
        host.put_file("sys/devices/system/node/has_memory", "0\n");
        host.put_process(1, "init", 0, 0, "");
        host.put_process(2, "kthreadd", 0, 0x0020_0000, "");
        host.put_process(37, "ksmd", 2, 0x0020_0000, "");
        host.put_process(100, "simulation", 1, 0, "mg");
        host
    }

    fn put_file(&mut self, path: &str, text: &str) {
        self.files.insert(path.to_owned(), text.as_bytes().to_vec());
    }

    /// A process with 128 MiB of private anonymous memory, unless it is a kernel thread.
    fn put_process(&mut self, pid: u32, comm: &str, parent: u32, flags: u32, vm_flags: &str) {
        let mut file = |name: &str, text: &str| self.put_file(&format!("proc/{pid}/{name}"), text);
        let stat = format!("{pid} ({comm}) S {parent} 1 1 0 -1 {flags} 9 9 9 9 5 5 0 0 20 0 1 0 {pid} 0 0\n");
        file("stat", &stat);
        file("cgroup", "0::/user.slice\n");
        file("status", "Uid:\t1000\t1000\t1000\t1000\nVmPin:\t       0 kB\nSeccomp:\t0\nThreads:\t1\n");
        if flags != 0 {
            file("cmdline", "");
            return;
        }
        file("cmdline", &format!("/usr/bin/{comm}\0"));
        let (items, merged, yes) = if vm_flags == "mg" { (32768, 16384, "yes") } else { (0, 0, "no") };
        let profit = merged * 4096 - items * 64;
        file(
            "ksm_stat",
            &format!(
                "ksm_rmap_items {items}\nksm_zero_pages 0\nksm_merging_pages {merged}\nksm_process_profit {profit}\n\
                 ksm_merge_any: no\nksm_mergeable: {yes}\n"
            ),
        );
        file("ksm_merging_pages", &format!("{merged}\n"));
        file("smaps", &smaps_entry("7f0000000000-7f0008000000 rw-p", "", 128 << 10, 128 << 10, vm_flags));
    }

    /// Mark a file as unreadable at the time of the recording.
    fn put_absent(&mut self, path: &str, reason: &str) {
        self.files.remove(path);
        self.absent_lines.push_str(&format!("{path}\t{reason}\n"));
    }

    fn write_recording(&self) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let mut names = BTreeSet::new();
        for (path, bytes) in &self.files {
            let file = root.join("files").join(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, bytes).unwrap();
            names.extend(path.strip_prefix("proc/").and_then(|rest| Some(rest.split_once('/')?.0.to_owned())));
        }
        let names: Vec<_> = names.into_iter().collect();
        if !self.absent_lines.contains("proc\t") {
            fs::write(root.join("files/proc/.names"), names.join("\n")).unwrap();
        }
        fs::write(root.join("recording.toml"), "schema = \"pagefold.recording/1\"\npage_size = 4096\n").unwrap();
        fs::write(root.join("absent.txt"), &self.absent_lines).unwrap();
        folder
    }
}

/// An entry of smaps; sizes in kB.
fn smaps_entry(head: &str, name: &str, rss: u64, anonymous: u64, flags: &str) -> String {
    format!(
        "{head} 00000000 00:00 0 {name}\nSize: {rss} kB\nKernelPageSize: 4 kB\nMMUPageSize: 4 kB\nRss: {rss} kB\n\
         Pss: {rss} kB\nShared_Clean: 0 kB\nShared_Dirty: 0 kB\nPrivate_Clean: 0 kB\nPrivate_Dirty: {rss} kB\n\
         Referenced: {rss} kB\nAnonymous: {anonymous} kB\nKSM: 0 kB\nLazyFree: 0 kB\nAnonHugePages: 0 kB\n\
         ShmemPmdMapped: 0 kB\nFilePmdMapped: 0 kB\nShared_Hugetlb: 0 kB\nPrivate_Hugetlb: 0 kB\nSwap: 0 kB\n\
         SwapPss: 0 kB\nLocked: 0 kB\nTHPeligible: 0\nVmFlags: rd wr mr mw me ac {flags}\n"
    )
}

fn run_doctor(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pagefold"))
        .args(["--host", &format!("recording:{}", folder.display()), "doctor"])
        .args(arguments)
        .output()
        .unwrap()
}

fn doctor_json(folder: &Path, arguments: &[&str]) -> Value {
    let arguments: Vec<_> = arguments.iter().copied().chain(["--json"]).collect();
    serde_json::from_slice(&run_doctor(folder, &arguments).stdout).expect("the output is not one JSON document")
}

/// Run the doctor on a recording, with and without `--json`; both must exit with the expected code.
fn check_doctor(change: impl FnOnce(&mut RecordedHostBuilder), arguments: &[&str], code: i32) -> (Value, String) {
    let mut host = RecordedHostBuilder::healthy();
    change(&mut host);
    let folder = host.write_recording();
    let output = run_doctor(folder.path(), arguments);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(code), "{text}{}", String::from_utf8_lossy(&output.stderr));
    (doctor_json(folder.path(), arguments), text)
}

fn verdict_of_rule<'a>(report: &'a Value, rule: &str) -> &'a str {
    let findings = report["findings"].as_array().unwrap();
    let finding = findings.iter().find(|finding| finding["rule"] == rule);
    finding.unwrap_or_else(|| panic!("no finding of {rule} in {report:#}"))["verdict"].as_str().unwrap()
}

#[test]
fn healthy_host_exits_0() {
    let (report, text) = check_doctor(|_| (), &[], 0);
    assert_eq!((&report["schema"], &report["verdict"]), (&"pagefold.doctor/1".into(), &"ok".into()));
    assert!(
        text.lines().all(|line| line.is_empty() || line.starts_with(['o', 'n', ' ']) || line.contains(" ok, ")),
        "{text}"
    );
    let (report, _) = check_doctor(|_| (), &["--pid", "100"], 0);
    assert_eq!(report["processes"][0]["comm"], "simulation");
}

#[test]
fn warning_exits_0() {
    let (report, text) = check_doctor(|host| host.put_file("sys/kernel/mm/ksm/smart_scan", "0\n"), &[], 0);
    assert_eq!(verdict_of_rule(&report, "ksm-smart-scan"), "warn");
    assert!(text.starts_with("warn "), "{text}");
    assert!(text.contains("remedy: echo 1 > /sys/kernel/mm/ksm/smart_scan\n"), "{text}");
}

#[test]
fn failed_check_exits_1() {
    let stopped = |host: &mut RecordedHostBuilder| host.put_file("sys/kernel/mm/ksm/run", "0\n");
    let (report, text) = check_doctor(stopped, &["--pid", "100"], 1);
    assert_eq!(verdict_of_rule(&report, "process-run"), "fail");
    assert_eq!(report["findings"][0]["rule"], "process-run", "the report must list the worst finding first");
    let (_, findings) = text.split_once("\n\n").unwrap();
    assert!(findings.starts_with("FAIL "), "{text}");
    let (report, text) = check_doctor(stopped, &[], 0);
    assert_eq!(verdict_of_rule(&report, "ksm-run"), "warn");
    assert_eq!(report["findings"][0]["rule"], "ksm-run", "the report must list the worst finding first");
    assert!(text.starts_with("warn     ksmd is stopped while memory is enrolled"), "{text}");
}

#[test]
fn absent_process_exits_2() {
    let folder = RecordedHostBuilder::healthy().write_recording();
    for pid in ["99", "0"] {
        let output = run_doctor(folder.path(), &["--pid", "100", "--pid", pid]);
        assert_eq!(output.status.code(), Some(2));
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(error.lines().count(), 1, "{error}");
        assert!(error.contains(&format!("--pid {pid}: ")) && output.stdout.is_empty(), "{error}");
    }
}

#[test]
fn domains_and_exclusions_follow_the_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let add_daemon = |host: &mut RecordedHostBuilder| {
        host.put_process(101, "daemon", 1, 0, "mg");
        host.put_file("proc/101/status", "Uid:\t7\t7\t7\t7\nVmPin:\t       0 kB\nSeccomp:\t0\nThreads:\t1\n");
    };
    let verdicts = |text: &str| {
        let file = folder.path().join("pagefold.toml");
        fs::write(&file, text).unwrap();
        let (report, _) = check_doctor(add_daemon, &["--config", file.to_str().unwrap()], 0);
        ["ksm-domains", "ksm-keys"].map(|rule| verdict_of_rule(&report, rule).to_owned())
    };
    assert_eq!(verdicts(""), ["warn", "ok"]);
    assert_eq!(verdicts("domains = \"host\""), ["ok", "ok"]);
    assert_eq!(verdicts("[[domain]]\nname = \"us\"\nusers = [7, 1000]"), ["ok", "ok"]);
    assert_eq!(verdicts("[exclude]\nextend = [\"daemon\"]"), ["warn", "warn"]);
}

#[test]
fn unreadable_process_exits_3_and_is_named() {
    let (report, text) = check_doctor(|host| host.put_absent("proc/1/smaps", "denied"), &[], 3);
    assert_eq!(report["unscanned_processes"][0]["comm"], "init");
    assert_eq!(verdict_of_rule(&report, "ksm-ineligible"), "unknown");
    assert!(text.contains("Memory that was not seen: init (1, permission denied).\n"), "{text}");
    // A failed check takes precedence over an unknown one in the exit code.
    let change = |host: &mut RecordedHostBuilder| {
        host.put_absent("proc/1/smaps", "denied");
        host.put_file("sys/kernel/mm/ksm/general_profit", "-95000000\n");
    };
    let (report, _) = check_doctor(change, &[], 1);
    assert_eq!(verdict_of_rule(&report, "ksm-profit"), "fail");
}

#[test]
fn hidden_processes_are_not_counted_as_zero() {
    // With hidepid, or in another PID namespace, no kernel thread is visible.
    let (report, _) = check_doctor(|host| host.files.retain(|path, _| !path.starts_with("proc/37/")), &[], 3);
    assert_eq!(report["unscanned_processes"][0]["pid"], 0);
    for rule in ["ksm-tuners", "ksm-domains", "ksm-keys", "ksmd-cpu", "ksm-ineligible"] {
        assert_eq!(verdict_of_rule(&report, rule), "unknown", "{rule}");
    }
    let (report, _) = check_doctor(|host| host.put_absent("proc", "denied"), &[], 3);
    assert_eq!(report["unscanned_processes"][0]["pid"], 0);
}

#[test]
fn kernel_without_ksm_is_the_only_failure() {
    let change = |host: &mut RecordedHostBuilder| host.files.retain(|path, _| !path.starts_with("sys/kernel/mm/ksm/"));
    let (report, _) = check_doctor(change, &[], 1);
    assert_eq!(report["counts"]["fail"], 1);
    assert_eq!(verdict_of_rule(&report, "ksm-kernel"), "fail");
    for finding in report["findings"].as_array().unwrap() {
        let rule = finding["rule"].as_str().unwrap();
        assert!(
            !rule.starts_with("ksm") || rule == "ksm-kernel" || finding["verdict"] == "not_applicable",
            "{finding}"
        );
    }
    let (report, _) = check_doctor(change, &["--pid", "100"], 0);
    assert_eq!(report["verdict"], "not_applicable");
}

#[test]
fn tuner_is_found_by_its_command_line() {
    let change = |host: &mut RecordedHostBuilder| {
        host.put_process(200, "ksmtuned", 1, 0, "");
        host.put_file("proc/200/cmdline", "/bin/bash\0/usr/sbin/ksmtuned\0");
    };
    let (report, _) = check_doctor(change, &[], 0);
    assert_eq!(verdict_of_rule(&report, "ksm-tuners"), "ok", "any user can give a program this name");
    let tuner_of_root = |host: &mut RecordedHostBuilder| {
        change(host);
        host.put_file("proc/200/status", "Uid:\t0\t0\t0\t0\nVmPin:\t       0 kB\nSeccomp:\t0\nThreads:\t1\n");
    };
    let (report, _) = check_doctor(tuner_of_root, &[], 0);
    assert_eq!(verdict_of_rule(&report, "ksm-tuners"), "warn");
}

#[test]
fn unknown_settings_writer_is_detected() {
    let folder = RecordedHostBuilder::healthy().write_recording();
    let recording = Recording::open(folder.path()).unwrap();
    let reads = Mutex::new(0);
    let faulty = FaultyHost::new(&recording, |path| {
        let mut reads = reads.lock().unwrap();
        *reads += u32::from(path == "sys/kernel/mm/ksm/pages_to_scan");
        (path == "sys/kernel/mm/ksm/pages_to_scan" && *reads > 1).then(|| InjectedFault::Replaced(b"64\n".to_vec()))
    });
    let facts = doctor_facts::gather_host_facts(&faulty, &[], &Default::default());
    assert_eq!(facts.rewritten_settings, ["pages_to_scan: 5000, then 64"]);
    let tuners = examine_host(&facts).into_iter().find(|finding| finding.rule == "ksm-tuners").unwrap();
    assert_eq!(tuners.verdict, Verdict::Warn, "{tuners:#?}");
}

#[test]
fn merge_flag_lost_at_exec_is_found_by_the_parent() {
    let change = |host: &mut RecordedHostBuilder| {
        let path = "proc/1/ksm_stat";
        let text = String::from_utf8(host.files[path].clone()).unwrap().replace("merge_any: no", "merge_any: yes");
        host.put_file(path, &text);
        host.put_process(200, "worker", 1, 0, "");
        host.put_process(300, "orphan", 0, 0, "");
    };
    let (report, _) = check_doctor(change, &["--pid", "200"], 1);
    assert_eq!(verdict_of_rule(&report, "process-prctl-exec"), "fail");
    let (report, _) = check_doctor(change, &["--pid", "300"], 1);
    assert_eq!(verdict_of_rule(&report, "process-prctl-exec"), "ok");
}

#[test]
fn several_processes_get_one_section_each() {
    let change = |host: &mut RecordedHostBuilder| host.put_process(200, "worker", 1, 0, "");
    let (report, text) = check_doctor(change, &["--pid", "200", "--pid", "100", "--pid", "200"], 1);
    assert_eq!(report["processes"].as_array().unwrap().len(), 2);
    let sections: Vec<_> = text.lines().filter(|line| line.starts_with("Process ")).collect();
    assert_eq!(
        sections,
        [
            "Process 100 (simulation), user 1000, cgroup /user.slice",
            "Process 200 (worker), user 1000, cgroup /user.slice"
        ]
    );
}

/// The best verdict of each rule, over all findings about the host and one process.
fn verdicts_by_rule(host: &dyn pagefold_host::Host, pid: u32) -> BTreeMap<&'static str, Verdict> {
    let facts = doctor_facts::gather_host_facts(host, &[Pid(pid)], &Default::default());
    let process = facts.processes.iter().find(|facts| facts.process.id.pid == Pid(pid));
    let findings = process.into_iter().flat_map(|process| examine_process(&facts, process)).chain(examine_host(&facts));
    let mut best = BTreeMap::new();
    for Finding { rule, verdict, .. } in findings {
        best.entry(rule).and_modify(|best: &mut Verdict| *best = verdict.min(*best)).or_insert(verdict);
    }
    best
}

#[test]
fn unreadable_host_is_not_healthy() {
    let folder = RecordedHostBuilder::healthy().write_recording();
    let recording = Recording::open(folder.path()).unwrap();
    let garbage: Vec<u8> = (0..4096_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let faults = [
        InjectedFault::Absent(Absent::Denied),
        InjectedFault::Absent(Absent::Vanished),
        InjectedFault::Absent(Absent::Malformed("input/output error".into())),
        InjectedFault::Truncated(0),
        InjectedFault::Replaced(garbage),
        InjectedFault::Replaced(b"-1\n".to_vec()),
        InjectedFault::Replaced(b"18446744073709551616\n".to_vec()),
        InjectedFault::Replaced(vec![b'\n'; 100]),
    ];
    for (i, fault) in faults.iter().enumerate() {
        let faulty = FaultyHost::new(&recording, |_| Some(fault.clone()));
        for (rule, verdict) in verdicts_by_rule(&faulty, 100) {
            // This rule only needs the KSM directory to exist.
            let is_ksm_kernel = rule == "ksm-kernel" && verdict == Verdict::Ok;
            // The recording holds no settings and no virtual machine.
            let is_setting = topic_of_rule(rule) != Topic::Ksm && verdict == Verdict::NotApplicable;
            let is_expected = verdict == Verdict::Unknown || is_ksm_kernel || is_setting;
            assert!(is_expected, "fault {i}: {rule} is {verdict}");
        }
    }
}

/// A host with many problems.
fn unhealthy_host() -> RecordedHostBuilder {
    let mut host = RecordedHostBuilder::healthy();
    for (name, value) in [
        ("run", "0"),
        ("pages_to_scan", "1"),
        ("smart_scan", "0"),
        ("general_profit", "-95000000"),
        ("stable_node_chains", "1"),
        ("stable_node_dups", "20000"),
        ("advisor_mode", "none [scan-time]"),
    ] {
        host.put_file(&format!("sys/kernel/mm/ksm/{name}"), &format!("{value}\n"));
    }
    host.put_file("proc/vmstat", "cow_ksm 50000000\nksm_swpin_copy 0\nthp_split_page 30000\n");
    host.put_file("proc/meminfo", &MEMINFO_TEXT.replace("SwapFree:        8", "SwapFree:        1"));
    let line = "avg10=20.00 avg60=20.00 avg300=20.00 total=9";
    host.put_file("proc/pressure/memory", &format!("some {line}\nfull {line}\n"));
    host.put_process(200, "sshd", 1, 0, "mg");
    host.put_file("proc/200/status", "Uid:\t7\t7\t7\t7\nVmPin:\t   80000 kB\nSeccomp:\t2\nThreads:\t1\n");
    let shared = smaps_entry("7f1000000000-7f1008000000 rw-s", "/dev/zero (deleted)", 128 << 10, 0, "sh ms");
    let smaps = String::from_utf8(host.files["proc/200/smaps"].clone()).unwrap() + &shared;
    host.put_file("proc/200/smaps", &smaps);
    host
}

#[test]
fn no_single_fault_improves_a_verdict() {
    let folder = unhealthy_host().write_recording();
    let recording = Recording::open(folder.path()).unwrap();
    let requested_paths = Mutex::new(BTreeSet::new());
    let truth = verdicts_by_rule(
        &FaultyHost::new(&recording, |path| {
            requested_paths.lock().unwrap().insert(path.to_owned());
            None
        }),
        200,
    );
    let problem_count = truth.values().filter(|verdict| **verdict >= Verdict::Warn).count();
    assert!(problem_count >= 15, "{truth:#?}");
    let requested_paths = requested_paths.into_inner().unwrap();
    assert!(requested_paths.len() > 40, "{requested_paths:?}");
    for path in &requested_paths {
        // A truncated number is still a valid number, so short files are emptied. The kernel does not truncate them.
        let bytes = fs::read(folder.path().join("files").join(path)).unwrap_or_default();
        let truncated_length = if bytes.len() < 20 { 0 } else { bytes.len() / 2 };
        let faults = [
            InjectedFault::Absent(Absent::Denied),
            InjectedFault::Absent(Absent::Malformed("input/output error".into())),
            InjectedFault::Truncated(truncated_length),
            InjectedFault::Replaced(b"\xff\xfe\0".to_vec()),
        ];
        // Any bytes of any length are a valid command line.
        let faults = if path.ends_with("cmdline") { &faults[..2] } else { &faults };
        for fault in faults {
            let faulty = FaultyHost::new(&recording, |requested| (requested == path).then(|| fault.clone()));
            for (rule, verdict) in verdicts_by_rule(&faulty, 200) {
                let healthy = truth[rule] <= Verdict::Ok;
                assert!(healthy || verdict >= Verdict::Unknown, "{path} {fault:?}: {rule} is {verdict}");
            }
        }
    }
}
