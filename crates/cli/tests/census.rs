//! The census of memory whose content is known, on the live kernel.
//!
//! `pagefold-lab` lays out regions. The census must find exactly those pages in exactly those classes, and must not
//! change the memory. Tests that need root or KSM print `skipped: why` without them.

use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use pagefold_labs::client::{RunningLab, install_executable};
use pagefold_labs::ksm::KsmTestGuard;
use pagefold_labs::output_lines::RegionLine;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::IoSliceMut;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::process::{Command, Output};

fn run_pagefold(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pagefold")).args(arguments).output().expect("the binary runs")
}

/// Run a census of some processes and return its JSON report. The test fails if the census is not complete.
fn census_json(pids: &[u32], options: &[&str]) -> Value {
    let pids: Vec<String> = pids.iter().map(|pid| format!("--pid={pid}")).collect();
    let mut arguments = vec!["census", "--json"];
    arguments.extend(pids.iter().map(String::as_str));
    arguments.extend(options);
    let output = run_pagefold(&arguments);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// The classes of a lab's region: the non-zero figures of `pages`, summed over the VMAs it consists of.
fn classes_of_region(report: &Value, lab: &RunningLab<RegionLine>, region: &RegionLine) -> BTreeMap<String, u64> {
    let process =
        as_array(&report["processes"]).iter().find(|process| process["pid"] == lab.pid()).expect("no such process");
    let mut sums: BTreeMap<String, u64> = BTreeMap::new();
    for part in as_array(&process["regions"]) {
        let start = u64::from_str_radix(part["start"].as_str().unwrap(), 16).unwrap();
        if (region.start..region.end_address()).contains(&start) {
            for (class, pages) in part["pages"].as_object().unwrap() {
                *sums.entry(class.clone()).or_default() += pages.as_u64().unwrap();
            }
        }
    }
    sums.retain(|_, pages| *pages > 0);
    sums
}

fn as_array(value: &Value) -> &Vec<Value> {
    value.as_array().expect("the value is not an array")
}

fn expect_classes(report: &Value, lab: &RunningLab<RegionLine>, region: &RegionLine, expected: &[(&str, u64)]) {
    let mut expected: BTreeMap<String, u64> =
        expected.iter().map(|&(class, pages)| (class.to_owned(), pages)).collect();
    expected.retain(|_, pages| *pages > 0);
    assert_eq!(classes_of_region(report, lab, region), expected, "{region:?}");
}

/// Whether a live test must be skipped because it does not run as root; prints the reason.
fn skip_reason_without_root() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        println!("skipped: needs root to read processes of several users");
    }
    !root
}

#[test]
fn every_page_class_is_counted_exactly() {
    if skip_reason_without_root() {
        return;
    }
    let specs = |rest: &'static [&str]| {
        let mut specs = vec![
            "zero=100",
            "unique=300",
            "within=60,copies=3",
            "volatile=40",
            "shared-memory=30",
            "file=20",
            "file-written=25",
            "untouched=5000",
            "read-zero=50",
        ];
        specs.extend(rest);
        specs
    };
    let first = RunningLab::start_layout(&specs(&["shared-content=domain:80", "shared-content=foreign:50"])).unwrap();
    let second = RunningLab::start_layout(&specs(&["shared-content=domain:80"])).unwrap();
    let third =
        RunningLab::start_layout(&[&["--uid", "65534"], &specs(&["shared-content=foreign:50"])[..]].concat()).unwrap();
    let labs = [&first, &second, &third];
    let pids: Vec<u32> = labs.iter().map(|lab| lab.pid()).collect();
    let report = census_json(&pids, &[]);

    for lab in labs {
        let region = |kind| lab.first_region(kind);
        expect_classes(&report, lab, region("zero"), &[("resident", 100), ("zero", 100)]);
        expect_classes(&report, lab, region("unique"), &[("resident", 300), ("unique", 300)]);
        expect_classes(&report, lab, region("volatile"), &[("resident", 40), ("volatile", 40)]);
        for kind in ["shared-memory", "file", "untouched", "read-zero"] {
            expect_classes(&report, lab, region(kind), &[]);
        }
        expect_classes(&report, lab, region("file-written"), &[("resident", 25), ("unique", 25)]);
        // The contents of `within` depend on the salt, so each process has different ones.
        let redundant = [("redundant", 40), ("duplicate_within_process", 60), ("duplicate", 60), ("resident", 60)];
        expect_classes(&report, lab, region("within"), &redundant);
    }
    let named = |lab: &'_ RunningLab<RegionLine>, name: &str| {
        lab.lines().iter().find(|region| region.name.as_deref() == Some(name)).expect("no such region").clone()
    };
    for (name, class, pages, holders) in [
        ("domain", "duplicate_within_domain", 80, [&first, &second]),
        ("foreign", "duplicate_across_domains", 50, [&first, &third]),
    ] {
        let found: Vec<_> = holders.iter().map(|lab| classes_of_region(&report, lab, &named(lab, name))).collect();
        for classes in &found {
            assert_eq!((classes.get(class), classes.get("duplicate")), (Some(&pages), Some(&pages)), "{name}");
        }
        let redundant: u64 = found.iter().filter_map(|classes| classes.get("redundant")).sum();
        assert_eq!(redundant, pages, "exactly one of the two copies of {name} must count as redundant");
    }
    let reason = |kind: &str| {
        let process = as_array(&report["processes"]).iter().find(|process| process["pid"] == first.pid()).unwrap();
        let start = format!("{:x}", first.first_region(kind).start);
        let region = as_array(&process["regions"]).iter().find(|region| region["start"] == start.as_str());
        region.map(|region| region["ineligible"].clone())
    };
    assert_eq!(reason("shared-memory"), Some(Value::from("shared memory")));
    assert_eq!(reason("unique"), Some(Value::Null));
    assert_sums(&report);
}

/// Assert that every page is in one class, and that processes, domains and cgroups add up to the host.
fn assert_sums(report: &Value) {
    let count = |pages: &Value, class: &str| pages[class].as_u64().unwrap();
    let classes = ["zero", "duplicate", "unique", "merged", "volatile"];
    let check = |pages: &Value| {
        let sum: u64 = classes.iter().map(|class| count(pages, class)).sum();
        assert_eq!(sum, count(pages, "resident"));
    };
    check(&report["pages"]);
    for part in ["processes", "domains", "cgroups"] {
        for class in classes.iter().chain(&["resident", "redundant"]) {
            let sum: u64 = as_array(&report[part]).iter().map(|part| count(&part["pages"], class)).sum();
            assert_eq!(sum, count(&report["pages"], class), "{part}: {class}");
        }
    }
    let gross = count(&report["pages"], "zero") + count(&report["pages"], "redundant");
    assert_eq!(report["bytes_reclaimable"]["gross"], gross * report["page_size"].as_u64().unwrap());
    let schema = run_pagefold(&["schema", "census"]);
    let schema: Value = serde_json::from_slice(&schema.stdout).unwrap();
    let errors: Vec<_> =
        jsonschema::validator_for(&schema).unwrap().iter_errors(report).map(|e| e.to_string()).collect();
    assert!(errors.is_empty(), "the report does not match its schema: {errors:?}");
}

#[test]
fn huge_pages_are_counted_where_merging_would_split_them() {
    if skip_reason_without_root() {
        return;
    }
    let lab = RunningLab::start_layout(&["huge=1024", "huge-zero=512"]).unwrap();
    let huge_bytes = || anonymous_rollup(lab.pid())["AnonHugePages"];
    if huge_bytes() < 3 << 20 {
        println!("skipped: the kernel gave no huge pages");
        return;
    }
    let before = huge_bytes();
    let report = census_json(&[lab.pid()], &[]);
    expect_classes(&report, &lab, lab.first_region("huge"), &[("resident", 1024), ("unique", 1024)]);
    expect_classes(&report, &lab, lab.first_region("huge-zero"), &[("resident", 512), ("zero", 512)]);
    assert_eq!(report["savings"]["whole_processes"]["huge_pages_split"], 1);
    assert_eq!(huge_bytes(), before, "the census split huge pages");
}

/// The fields of smaps_rollup about anonymous memory of a process, in bytes.
fn anonymous_rollup(pid: u32) -> BTreeMap<String, u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let fields = ["Rss", "Pss_Anon", "Anonymous", "KSM", "AnonHugePages", "Swap"];
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .filter(|(name, _)| fields.contains(name))
        .map(|(name, value)| {
            let kib: u64 = value.trim().trim_end_matches(" kB").parse().unwrap();
            (name.to_owned(), kib * 1024)
        })
        .collect()
}

fn read_cow_ksm() -> u64 {
    let text = fs::read_to_string("/proc/vmstat").unwrap();
    text.lines().find_map(|line| line.strip_prefix("cow_ksm ")?.parse().ok()).expect("/proc/vmstat has no cow_ksm")
}

#[test]
fn census_leaves_merged_memory_unchanged() {
    let ksm = match KsmTestGuard::acquire() {
        Ok(ksm) => ksm,
        Err(why) => return println!("skipped: {why}"),
    };
    let labs: Vec<_> = (0..2)
        .map(|_| RunningLab::start_layout(&["--mergeable", "shared-content=merged:400", "unique=200"]).unwrap())
        .collect();
    ksm.scan_until_settled();
    let merged = labs[0].first_region("shared-content");
    let state = || (labs.iter().map(|lab| anonymous_rollup(lab.pid())).collect::<Vec<_>>(), read_cow_ksm());
    let before = state();
    assert_eq!(before.0[0]["KSM"], 400 * merged.page_size, "ksmd did not merge the shared content");

    let report = census_json(&[labs[0].pid(), labs[1].pid()], &[]);
    assert_eq!(state(), before, "the census changed merged memory");
    for lab in &labs {
        expect_classes(&report, lab, lab.first_region("shared-content"), &[("resident", 400), ("merged", 400)]);
        expect_classes(&report, lab, lab.first_region("unique"), &[("resident", 200), ("unique", 200)]);
    }

    // This shows that the state is sensitive: `process_vm_readv` breaks the sharing of the pages it reads.
    let mut page = vec![0; merged.page_size as usize];
    let remote = [RemoteIoVec { base: merged.start as usize, len: page.len() }];
    let pid = nix::unistd::Pid::from_raw(labs[0].pid() as i32);
    process_vm_readv(pid, &mut [IoSliceMut::new(&mut page)], &remote).unwrap();
    assert_eq!(read_cow_ksm(), before.1 + 1);
    assert_eq!(anonymous_rollup(labs[0].pid())["KSM"], 399 * merged.page_size);
}

#[test]
fn unmerged_copy_of_merged_pages_counts_as_duplicate() {
    let ksm = match KsmTestGuard::acquire() {
        Ok(ksm) => ksm,
        Err(why) => return println!("skipped: {why}"),
    };
    let merged: Vec<_> =
        (0..2).map(|_| RunningLab::start_layout(&["--mergeable", "shared-content=later:150"]).unwrap()).collect();
    ksm.scan_until_settled();
    let late = RunningLab::start_layout(&["shared-content=later:150"]).unwrap();
    let report = census_json(&[merged[0].pid(), merged[1].pid(), late.pid()], &[]);
    let expected = [("resident", 150), ("duplicate", 150), ("duplicate_within_domain", 150), ("redundant", 150)];
    expect_classes(&report, &late, late.first_region("shared-content"), &expected);
}

/// Bytes of a region that are dirty and mapped more than once.
fn shared_dirty_bytes(pid: u32, region: &RegionLine) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let entry = text.split_once(&format!("{:x}-{:x} ", region.start, region.end_address())).expect("no such region").1;
    let value = entry.lines().find_map(|line| line.strip_prefix("Shared_Dirty:")).unwrap();
    value.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

#[test]
fn pages_shared_by_fork_stay_shared() {
    if skip_reason_without_root() {
        return;
    }
    let lab = RunningLab::start_layout(&["fork-shared=512"]).unwrap();
    let region = lab.first_region("fork-shared");
    let child = region.child.expect("no child process");
    let shared = || [lab.pid(), child].map(|pid| shared_dirty_bytes(pid, region));
    let region_bytes = 512 * region.page_size;
    assert_eq!(shared(), [region_bytes, region_bytes], "the lab's fork does not share the region");
    let report = census_json(&[lab.pid()], &[]);
    expect_classes(&report, &lab, region, &[("resident", 512), ("unique", 512)]);
    assert_eq!(shared(), [region_bytes, region_bytes], "the census broke the sharing after fork");
    // Both processes together use each frame once, so merging would save nothing.
    let both_processes = census_json(&[lab.pid(), child], &[]);
    expect_classes(&both_processes, &lab, region, &[("resident", 512), ("unique", 512)]);
    let gross = |report: &Value| report["bytes_reclaimable"]["gross"].as_u64().unwrap();
    assert!(
        gross(&both_processes) < gross(&report) + region_bytes / 2,
        "{} and {}",
        gross(&both_processes),
        gross(&report)
    );
}

#[test]
fn fork_shared_page_and_its_copy_are_two_pages() {
    if skip_reason_without_root() {
        return;
    }
    let labs: Vec<_> =
        (0..2).map(|_| RunningLab::start_layout(&["--salt", "same", "fork-shared=300"]).unwrap()).collect();
    let children = labs.iter().map(|lab| lab.first_region("fork-shared").child.expect("no child process"));
    let pids: Vec<u32> = labs.iter().map(|lab| lab.pid()).chain(children).collect();
    let report = census_json(&pids, &[]);
    let within = [("resident", 300), ("duplicate", 300), ("duplicate_within_domain", 300)];
    let first = classes_of_region(&report, &labs[0], labs[0].first_region("fork-shared"));
    let second = classes_of_region(&report, &labs[1], labs[1].first_region("fork-shared"));
    for classes in [&first, &second] {
        assert!(within.iter().all(|(class, pages)| classes[*class] == *pages), "{classes:?}");
    }
    let redundant = |classes: &BTreeMap<String, u64>| classes.get("redundant").copied().unwrap_or_default();
    assert_eq!(redundant(&first) + redundant(&second), 300, "four mappings of two frames have one redundant frame");
    // All other common content of the four processes is smaller than another 300 pages.
    let saved_pages =
        report["savings"]["whole_processes"]["gross"].as_u64().unwrap() / report["page_size"].as_u64().unwrap();
    assert!((300..600).contains(&saved_pages), "{saved_pages}");
}

#[test]
fn fragmented_memory_is_counted_page_by_page() {
    if skip_reason_without_root() {
        return;
    }
    let lab = RunningLab::start_layout(&["--fragment", "within=2000", "unique=999", "zero=64"]).unwrap();
    assert!(lab.first_region("unique").vmas >= 999);
    let report = census_json(&[lab.pid()], &[]);
    let half = [("resident", 2000), ("duplicate", 2000), ("duplicate_within_process", 2000), ("redundant", 1000)];
    expect_classes(&report, &lab, lab.first_region("within"), &half);
    expect_classes(&report, &lab, lab.first_region("unique"), &[("resident", 999), ("unique", 999)]);
    expect_classes(&report, &lab, lab.first_region("zero"), &[("resident", 64), ("zero", 64)]);
}

#[test]
fn most_frequent_contents_are_classified() {
    if skip_reason_without_root() {
        return;
    }
    let lab = RunningLab::start_layout(&["text=301", "pattern=302", "elf=303", "within=900,copies=300"]).unwrap();
    let report = census_json(&[lab.pid()], &["--top", "6"]);
    let found: Vec<_> = as_array(&report["contents"])
        .iter()
        .map(|content| (content["kind"].as_str().unwrap(), content["pages"].as_u64().unwrap()))
        .filter(|&(kind, pages)| kind != "zero" && pages >= 300)
        .collect();
    assert_eq!(found, [("elf", 303), ("pattern", 302), ("text", 301), ("other", 300), ("other", 300), ("other", 300)]);
}

#[test]
fn single_pass_reports_no_volatile_pages() {
    if skip_reason_without_root() {
        return;
    }
    let lab = RunningLab::start_layout(&["volatile=64"]).unwrap();
    let report = census_json(&[lab.pid()], &["--pass-interval", "0"]);
    expect_classes(&report, &lab, lab.first_region("volatile"), &[("resident", 64), ("unique", 64)]);
}

#[test]
fn sample_estimates_the_whole() {
    if skip_reason_without_root() {
        return;
    }
    let lab = RunningLab::start_layout(&["zero=8000", "within=8000,copies=8", "unique=8000"]).unwrap();
    let report = census_json(&[lab.pid()], &["--sample", "30%", "--seed", "7"]);
    let sampled = report["pages"]["resident"].as_f64().unwrap();
    let resident = report["estimate"]["resident"].as_f64().unwrap();
    assert!((0.27..0.33).contains(&(sampled / resident)), "{sampled} of {resident}");
    for (class, truth) in [("zero", 8000.0), ("redundant", 7000.0), ("duplicate", 8000.0)] {
        let end = |end: &str| report["estimate"][class][end].as_f64().unwrap();
        // The process has some pages of its own besides the layout.
        assert!(end("low") <= truth + 200.0 && truth <= end("high"), "{class}: {}", report["estimate"][class]);
    }
    let estimate = |class: &str| report["estimate"][class]["estimate"].as_f64().unwrap();
    let gross = report["bytes_reclaimable"]["gross"].as_f64().unwrap() / report["page_size"].as_f64().unwrap();
    assert!((gross - estimate("zero") - estimate("redundant")).abs() < 1.0, "not an estimate of the whole: {gross}");
}

#[test]
fn recording_gives_the_census_of_its_host() {
    if skip_reason_without_root() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("host");
    let (lab, other) = (
        RunningLab::start_layout(&[
            "zero=70",
            "unique=90",
            "within=40",
            "volatile=16",
            "huge=512",
            "shared-content=both:33",
        ])
        .unwrap(),
        RunningLab::start_layout(&["shared-content=both:33", "shared-memory=9", "read-zero=12"]).unwrap(),
    );
    let pids = [format!("--pid={}", lab.pid()), format!("--pid={}", other.pid())];
    let output = run_pagefold(&["record", path.to_str().unwrap(), &pids[0], &pids[1]]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let live = census_json(&[lab.pid(), other.pid()], &[]);
    let host = format!("--host=recording:{}", path.display());
    let recorded = census_json(&[lab.pid(), other.pid()], &[&host]);
    for lab in [&lab, &other] {
        for region in lab.lines() {
            assert_eq!(classes_of_region(&recorded, lab, region), classes_of_region(&live, lab, region), "{region:?}");
        }
    }
    assert!(as_array(&recorded["contents"]).iter().all(|content| content["kind"] != "changed"));
    assert_sums(&recorded);
}

#[test]
fn recording_contains_only_chosen_processes_and_is_private() {
    if skip_reason_without_root() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("host");
    // Use a copy of the program with a unique name, and a title with a secret that the recording must not contain.
    let program = folder.path().join("pagefold-titled");
    install_executable("/bin/sleep".as_ref(), &program, 0o755).unwrap();
    let mut chosen = Command::new(&program)
        .arg0("server: secret-of-the-title")
        .arg("600")
        .env("SLURM_JOB_ID", "77")
        .env("TOKEN", "secret-of-the-environment")
        .spawn()
        .unwrap();
    let output = run_pagefold(&["record", "--name", "pagefold-titled", path.to_str().unwrap()]);
    let pid = chosen.id().to_string();
    chosen.kill().unwrap();
    chosen.wait().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(matches!(output.status.code(), Some(0 | 3)), "{error}");

    let read = |file: &str| fs::read_to_string(path.join(format!("files/proc/{pid}/{file}"))).unwrap();
    assert_eq!(read("cmdline"), "server:\0");
    assert_eq!(read("environ"), "SLURM_JOB_ID=77\0");
    let own_pid = std::process::id();
    assert!(!path.join(format!("files/proc/{own_pid}")).exists(), "a process that was not selected");
    assert!(!fs::read_to_string(path.join("absent.txt")).unwrap().contains(&format!("proc/{own_pid}/")));
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);

    // `record` writes nothing into another user's directory: that user could place symbolic links there.
    let trap = folder.path().join("trap");
    fs::create_dir(&trap).unwrap();
    chown(&trap, Some(65534), None).unwrap();
    let output = run_pagefold(&["record", &format!("--pid={own_pid}"), trap.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("belongs to another user"));
    assert_eq!(fs::read_dir(&trap).unwrap().count(), 0);
}

/// Wait until a process handles SIGINT and then uses no CPU for a while.
fn wait_until_idle(pid: u32) {
    let field = |file: &str, extract: fn(&str) -> Option<String>| {
        fs::read_to_string(format!("/proc/{pid}/{file}")).ok().and_then(|text| extract(&text)).unwrap_or_default()
    };
    let handles_interrupt = || {
        let caught_mask =
            field("status", |text| text.lines().find_map(|line| Some(line.strip_prefix("SigCgt:")?.trim().to_owned())));
        u64::from_str_radix(&caught_mask, 16).is_ok_and(|caught_mask| caught_mask & 0b10 != 0)
    };
    let ticks = || {
        field("stat", |text| Some(text.rsplit_once(") ")?.1.split(' ').skip(11).take(2).collect::<Vec<_>>().join(" ")))
    };
    let mut idle_samples = 0;
    let mut last = ticks();
    while idle_samples < 10 || !handles_interrupt() {
        std::thread::sleep(std::time::Duration::from_millis(100));
        let now = ticks();
        idle_samples = if now == last { idle_samples + 1 } else { 0 };
        last = now;
    }
}

#[test]
fn interrupted_census_reports_what_it_scanned() {
    if skip_reason_without_root() {
        return;
    }
    let lab = RunningLab::start_layout(&["unique=500"]).unwrap();
    let interrupted = |options: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        // A settle time that is long enough for the interrupt to arrive during it.
        command.args(["census", "--pass-interval", "10min", &format!("--pid={}", lab.pid())]).args(options);
        let child = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
        wait_until_idle(child.id());
        let pid = rustix::process::Pid::from_raw(child.id() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(3));
        output.stdout
    };
    let text = String::from_utf8(interrupted(&[])).unwrap();
    assert!(text.contains("The second pass was not finished"), "{text}");
    let report: Value = serde_json::from_slice(&interrupted(&["--json"])).unwrap();
    assert_eq!(report["partial"], true);
    assert!(report["pages"]["unique"].as_u64().unwrap() >= 500, "{}", report["pages"]);
}
