//! `pagefold unmerge` on real guests with the real ksmd, within a real memory limit, and with invalid input.
//!
//! Tests that need root, KSM, QEMU or a memory cgroup print `skipped: why` without them.

use pagefold_labs::assets::GuestAssets;
use pagefold_labs::client::{self, RunningLab};
use pagefold_labs::ksm::KsmTestGuard;
use pagefold_labs::output_lines::{GuestLine, RegionLine};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::error::Error;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hasher};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

type UnmergeTestResult = Result<(), Box<dyn Error>>;

const BYTES_PER_MIB: u64 = 1 << 20;

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Print why a test, or the rest of it, is skipped.
fn skip_test(why: &str) -> UnmergeTestResult {
    println!("skipped: {why}");
    Ok(())
}

/// Run `pagefold unmerge` with a new state directory; returns exit status, standard output and standard error.
fn run_unmerge(arguments: &[&str]) -> Result<(Option<i32>, String, String), Box<dyn Error>> {
    let state = tempfile::tempdir()?;
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    let output = command.arg("unmerge").arg("--state").arg(state.path().join("state")).args(arguments).output()?;
    Ok((output.status.code(), String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?))
}

fn unmerge_json(arguments: &[&str]) -> Result<(Option<i32>, Value), Box<dyn Error>> {
    let (status, json, error) = run_unmerge(&[arguments, &["--json"]].concat())?;
    Ok((status, serde_json::from_str(&json).map_err(|why| format!("{why}: {json}{error}"))?))
}

/// A memory cgroup for one test. Drop it after the processes in it.
struct UnmergeCgroup {
    directory: PathBuf,
    is_v1: bool,
}

impl UnmergeCgroup {
    fn new(name: &str) -> Option<Self> {
        let name = format!("pagefold-unmerge-{name}-{}", std::process::id());
        [("/sys/fs/cgroup/memory", true), ("/sys/fs/cgroup", false)].into_iter().find_map(|(top, v1)| {
            let directory = Path::new(top).join(&name);
            fs::create_dir(&directory).ok()?;
            let cgroup = Self { directory, is_v1: v1 };
            cgroup.used_bytes().map(|_| cgroup)
        })
    }

    fn read_limit_file(&self, v1: &str, v2: &str) -> Option<String> {
        fs::read_to_string(self.directory.join(if self.is_v1 { v1 } else { v2 })).ok()
    }

    fn used_bytes(&self) -> Option<u64> {
        self.read_limit_file("memory.usage_in_bytes", "memory.current")?.trim().parse().ok()
    }

    fn set_limit(&self, bytes: u64) -> UnmergeTestResult {
        let file = if self.is_v1 { "memory.limit_in_bytes" } else { "memory.max" };
        Ok(fs::write(self.directory.join(file), bytes.to_string())?)
    }

    fn oom_kills(&self) -> Option<u64> {
        let text = self.read_limit_file("memory.oom_control", "memory.events")?;
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok())
    }
}

impl Drop for UnmergeCgroup {
    fn drop(&mut self) {
        let started = Instant::now();
        while fs::remove_dir(&self.directory).is_err() {
            if started.elapsed() > Duration::from_secs(20) {
                return eprintln!("cannot remove the cgroup {}", self.directory.display());
            }
            sleep(Duration::from_millis(50));
        }
    }
}

/// Start the lab in a cgroup.
fn start_in<Line: DeserializeOwned>(
    cgroup: &UnmergeCgroup,
    subcommand: &str,
    arguments: &[&str],
) -> io::Result<RunningLab<Line>> {
    let mut shell = Command::new("sh");
    shell.args(["-c", "echo $$ > \"$0/cgroup.procs\" && exec \"$@\""]).arg(&cgroup.directory);
    RunningLab::start_with(shell.arg(client::lab_binary()?).arg(subcommand).args(arguments))
}

/// Start and end of a region, and whether it is marked mergeable.
type RegionMark = (u64, u64, bool);

/// The regions of a process with at least `min_bytes`.
fn regions_of(pid: u32, min_bytes: u64) -> Result<Vec<RegionMark>, Box<dyn Error>> {
    let mut regions: Vec<RegionMark> = Vec::new();
    for line in fs::read_to_string(format!("/proc/{pid}/smaps"))?.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            regions.last_mut().ok_or("flags before a region")?.2 = flags.split(' ').any(|flag| flag == "mg");
        } else if line.starts_with(|c: char| c.is_ascii_hexdigit() && !c.is_ascii_uppercase()) {
            let (start, rest) = line.split_once('-').ok_or("a line of smaps has no address range")?;
            let end = rest.split(' ').next().ok_or("an address range of smaps has no end")?;
            regions.push((u64::from_str_radix(start, 16)?, u64::from_str_radix(end, 16)?, false));
        }
    }
    regions.retain(|(start, end, _)| end - start >= min_bytes);
    Ok(regions)
}

/// A checksum of a memory range of a process.
fn range_checksum(pid: u32, start: u64, end: u64) -> Result<u64, Box<dyn Error>> {
    let memory = File::open(format!("/proc/{pid}/mem"))?;
    let mut hasher = DefaultHasher::new();
    let mut buffer = vec![0; BYTES_PER_MIB as usize];
    for address in (start..end).step_by(buffer.len()) {
        let length = buffer.len().min((end - address) as usize);
        memory.read_exact_at(&mut buffer[..length], address)?;
        hasher.write(&buffer[..length]);
    }
    Ok(hasher.finish())
}

/// Run one command on a guest's QMP monitor.
fn run_qmp_command(guest: &GuestLine, command: &str) -> Result<Value, Box<dyn Error>> {
    let mut stream = UnixStream::connect(&guest.qmp)?;
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    lines.next().ok_or("QMP sent no greeting")??;
    for command in ["qmp_capabilities", command] {
        writeln!(stream, "{}", json!({"execute": command, "id": command}))?;
        loop {
            let answer: Value = serde_json::from_str(&lines.next().ok_or("QMP sent no answer")??)?;
            match answer["id"].as_str() {
                Some("qmp_capabilities") => break,
                Some(_) => return Ok(answer),
                None => {}
            }
        }
    }
    Err("QMP sent no answer".into())
}

/// The reason to skip a test that needs guests, if there is one.
fn skip_reason() -> Option<String> {
    match GuestAssets::find(&GuestAssets::default_directory()) {
        Err(why) => Some(why.to_string()),
        Ok(_) if !is_root() => Some("needs root".to_owned()),
        Ok(_) => None,
    }
}

const FLEET_ARGUMENTS: [&str; 8] = ["--guests", "2", "--memory", "112", "--shared-mib", "16", "--unique-mib", "8"];

#[test]
fn guest_is_unenrolled_by_socket_with_predicted_copies() -> UnmergeTestResult {
    if let Some(why) = skip_reason() {
        return skip_test(&why);
    }
    // Acquired before the guests boot: ksmd does not settle while enrolled guests boot.
    let ksm = match KsmTestGuard::acquire() {
        Ok(ksm) => ksm,
        Err(why) => return skip_test(&why),
    };
    let fleet: RunningLab<GuestLine> =
        RunningLab::start_fleet(&[&FLEET_ARGUMENTS[..], &["--name-prefix", "apart"]].concat())?;
    let [first, second] = fleet.lines() else { return Err("the fleet must have two guests".into()) };
    // So that their memory does not change.
    for guest in [first, second] {
        run_qmp_command(guest, "stop")?;
    }
    ksm.scan_until_settled();
    let ram =
        regions_of(first.pid, 112 * BYTES_PER_MIB)?.into_iter().find(|region| region.2).ok_or("unmarked guest RAM")?;
    let before = range_checksum(first.pid, ram.0, ram.1)?;

    let (status, dry) = unmerge_json(&["--vm", "apart-0", "--vm", "apart-1", "--dry-run"])?;
    assert_eq!((status, &dry["outcome"]), (Some(0), &"planned".into()), "{dry}");
    assert!(regions_of(first.pid, 112 * BYTES_PER_MIB)?.contains(&ram), "a dry run changed the regions");

    let (status, report) = unmerge_json(&["--vm", "apart-0"])?;
    assert_eq!((status, &report["outcome"]), (Some(0), &"done".into()), "{report}");
    let guest = &report["processes"][0];
    assert_eq!(
        (&guest["pid"], &guest["method"], &guest["state"]),
        (&first.pid.into(), &"qmp".into(), &"unenrolled".into())
    );
    assert_eq!((&guest["merged_pages_after"], &guest["zero_pages_after"]), (&0.into(), &0.into()), "{guest}");
    assert!(guest["longest_stop_ms"].is_null(), "unmerge by control socket must stop no thread");
    let merged = guest["merged_pages"].as_u64().ok_or("the report has no merged_pages")?;
    assert!(merged * 4096 >= 16 * BYTES_PER_MIB, "{guest}");
    // All counted pages were copied. Meanwhile other processes may have written to KSM pages.
    let copies = report["taken"]["copies"].as_u64().ok_or("the report has no copies")?;
    assert!((merged..merged + merged / 20).contains(&copies), "{merged} merged pages, {copies} copies");

    let after = regions_of(first.pid, 112 * BYTES_PER_MIB)?;
    assert!(after.iter().any(|&(start, end, marked)| (start, end, marked) == (ram.0, ram.1, false)), "{after:?}");
    assert_eq!(range_checksum(first.pid, ram.0, ram.1)?, before);
    assert!(
        regions_of(second.pid, 112 * BYTES_PER_MIB)?.iter().any(|region| region.2),
        "the other guest must stay enrolled"
    );

    // Firmware and video memory belong to no backend. The first run reports them; the second unenrolls them by
    // injection.
    assert!(guest["uncovered_pages"].as_u64() > Some(0), "{guest}");
    let (status, repeated) = unmerge_json(&["--vm", "apart-0"])?;
    assert_eq!(
        (status, &repeated["outcome"], &repeated["processes"][0]["method"]),
        (Some(0), &"done".into(), &"regions".into()),
        "{repeated}"
    );
    assert!(regions_of(first.pid, 0)?.iter().all(|region| !region.2));
    assert_eq!(run_qmp_command(first, "query-status")?["return"]["status"], "paused");
    Ok(())
}

#[cfg(feature = "fault-points")]
#[test]
fn unmerge_killed_at_guest_socket_is_finished_by_the_next() -> UnmergeTestResult {
    if let Some(why) = skip_reason() {
        return skip_test(&why);
    }
    let _ksm = match KsmTestGuard::acquire() {
        Ok(ksm) => ksm,
        Err(why) => return skip_test(&why),
    };
    let arguments =
        ["--guests", "1", "--memory", "112", "--shared-mib", "8", "--unique-mib", "8", "--name-prefix", "killed"];
    let fleet: RunningLab<GuestLine> = RunningLab::start_fleet(&arguments)?;
    let [guest] = fleet.lines() else { return Err("the fleet must have one guest".into()) };
    let is_marked =
        || -> Result<bool, Box<dyn Error>> { Ok(regions_of(guest.pid, 112 * BYTES_PER_MIB)?.iter().any(|r| r.2)) };
    for (point, name, marked) in
        [("1", "before setting a QEMU property", true), ("2", "after setting a QEMU property", false)]
    {
        let state = tempfile::tempdir()?;
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        command.args(["unmerge", "--vm", "killed-0", "--state"]).arg(state.path()).env("PAGEFOLD_FAULT_POINT", point);
        let output = command.output()?;
        let error = String::from_utf8(output.stderr)?;
        assert_eq!(output.status.code(), None, "{error}");
        assert_eq!(error.trim(), format!("fault point {point}: {name}"));
        assert_eq!(run_qmp_command(guest, "query-status")?["return"]["status"], "running");
        assert_eq!(is_marked()?, marked, "{name}");
    }
    let (status, report) = unmerge_json(&["--vm", "killed-0"])?;
    assert_eq!((status, &report["processes"][0]["state"]), (Some(0), &"unenrolled".into()), "{report}");
    assert!(regions_of(guest.pid, 0)?.iter().all(|region| !region.2));
    Ok(())
}

#[test]
fn busy_or_foreign_socket_is_not_used() -> UnmergeTestResult {
    if let Some(why) = skip_reason() {
        return skip_test(&why);
    }
    // Acquired before the guests boot: ksmd does not settle while enrolled guests boot.
    let _ksm = match KsmTestGuard::acquire() {
        Ok(ksm) => ksm,
        Err(why) => return skip_test(&why),
    };
    let fleet: RunningLab<GuestLine> =
        RunningLab::start_fleet(&[&FLEET_ARGUMENTS[..], &["--name-prefix", "held"]].concat())?;
    let [first, second] = fleet.lines() else { return Err("the fleet must have two guests".into()) };
    let (status, _, error) = run_unmerge(&["--vm", "held-0", "--qmp", &second.qmp])?;
    assert_eq!(status, Some(2));
    assert!(error.contains(&format!("process {} listens there, not process {}", second.pid, first.pid)), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");

    let (status, _, error) = run_unmerge(&["--vm", "held-0", "--vm", "held-1", "--qmp", &first.qmp])?;
    assert_eq!(status, Some(2));
    assert!(error.contains("--qmp applies to one virtual machine, but 2 are selected"), "{error}");

    let connection = UnixStream::connect(&first.qmp)?;
    BufReader::new(&connection).read_line(&mut String::new())?;
    let (status, _, error) = run_unmerge(&["--vm", "held-0", "--qmp", &first.qmp])?;
    assert_eq!(status, Some(2));
    assert!(error.contains("virsh qemu-monitor-command"), "{error}");
    // A busy socket that was not named on the command line fails that guest only, and the report shows it.
    let (status, report) = unmerge_json(&["--vm", "held-0"])?;
    assert_eq!((status, &report["processes"][0]["state"]), (Some(3), &"failed".into()), "{report}");
    for guest in [first, second] {
        assert!(regions_of(guest.pid, 112 * BYTES_PER_MIB)?.iter().any(|region| region.2), "the guest was changed");
    }
    Ok(())
}

#[test]
fn unmerge_refuses_when_cgroup_limit_is_too_low() -> UnmergeTestResult {
    if let Some(why) = skip_reason() {
        return skip_test(&why);
    }
    // Acquired before the guests boot: ksmd does not settle while enrolled guests boot.
    let ksm = match KsmTestGuard::acquire() {
        Ok(ksm) => ksm,
        Err(why) => return skip_test(&why),
    };
    let Some(cgroup) = UnmergeCgroup::new("limit") else { return skip_test("cannot create a memory cgroup") };
    let fleet: RunningLab<GuestLine> =
        start_in(&cgroup, "fleet", &[&FLEET_ARGUMENTS[..], &["--name-prefix", "tight"]].concat())?;
    for guest in fleet.lines() {
        run_qmp_command(guest, "stop")?;
    }
    ksm.scan_until_settled();
    let sums = || -> Result<Vec<u64>, Box<dyn Error>> {
        let mut sums = Vec::new();
        for guest in fleet.lines() {
            for (start, end, _) in
                regions_of(guest.pid, 112 * BYTES_PER_MIB)?.into_iter().filter(|r| r.1 - r.0 == 112 * BYTES_PER_MIB)
            {
                sums.push(range_checksum(guest.pid, start, end)?);
            }
        }
        Ok(sums)
    };
    let before = sums()?;
    assert!(before.len() >= 2);
    let targets = ["--vm", "tight-0", "--vm", "tight-1"];
    let (_, dry) = unmerge_json(&[&targets[..], &["--dry-run"]].concat())?;
    let pages = |process: usize| dry["processes"][process]["merged_pages"].as_u64().unwrap_or(0);
    let (first_bytes, second_bytes) = (pages(0) * 4096, pages(1) * 4096);
    assert!(first_bytes >= 16 * BYTES_PER_MIB && second_bytes >= first_bytes, "{dry}");
    // One guest fits, with some memory to spare for page tables and sockets; both do not.
    cgroup.set_limit((cgroup.used_bytes().ok_or("no memory usage")? + first_bytes + first_bytes / 4) & !4095)?;

    let (status, text, error) = run_unmerge(&targets)?;
    assert_eq!((status, error.as_str()), (Some(1), ""), "{text}");
    assert!(text.starts_with("Refused on this host: ") && text.contains("does not fit"), "{text}");
    assert!(text.contains("`--staged` would unenroll 1 of 2 parts now"), "{text}");
    let all_at_once = "is reached by its control socket and is unmerged all at once: `--staged --inject` unenrolls";
    let join_lines = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(join_lines(&text).contains(all_at_once), "{text}");
    let (status, refused) = unmerge_json(&targets)?;
    assert_eq!(
        (status, &refused["outcome"], &refused["guard"]["verdict"]),
        (Some(1), &"refused".into(), &"short".into())
    );
    let binding_limit = &refused["guard"]["limits"][0];
    let name = cgroup.directory.file_name().and_then(|name| name.to_str()).ok_or("the cgroup has no name")?;
    assert!(binding_limit["scope"].as_str().is_some_and(|scope| scope.ends_with(name)), "{binding_limit}");
    // Compare with the figures of the same plan: between two plans pages merge and COW breaks happen.
    let copies = |process: usize| {
        let pages = |name: &str| refused["processes"][process][name].as_u64().unwrap_or(0);
        4096 * (pages("merged_pages") + pages("zero_pages"))
    };
    let needed = binding_limit["needed"].as_u64();
    assert_eq!(needed, Some(copies(0) + copies(1)), "the guard must not count freed frames as available: {refused}");
    for guest in fleet.lines() {
        assert!(regions_of(guest.pid, 112 * BYTES_PER_MIB)?.iter().any(|region| region.2), "the guest was changed");
    }

    let (status, staged) = unmerge_json(&[&targets[..], &["--staged"]].concat())?;
    assert_eq!((status, &staged["outcome"]), (Some(3), &"partial".into()), "{staged}");
    let states: Vec<&str> = (0..2).filter_map(|n| staged["processes"][n]["state"].as_str()).collect();
    assert_eq!(states, ["unenrolled", "untouched"], "{staged}");
    assert_eq!(staged["stopped_by_guard"]["verdict"], "short");
    let (_, text, _) = run_unmerge(&[&targets[..], &["--staged"]].concat())?;
    assert!(join_lines(&text).contains(all_at_once), "{text}");
    assert_eq!(cgroup.oom_kills().unwrap_or(0), 0);
    assert_eq!(sums()?, before);
    Ok(())
}

#[test]
fn unmerge_requires_existing_targets() -> UnmergeTestResult {
    // Only one pagefold may change this host at a time; without root the guard cannot exclude others.
    let _ksm = KsmTestGuard::acquire().ok();
    let check = |arguments: &[&str], message: &str| -> UnmergeTestResult {
        let (status, text, error) = run_unmerge(arguments)?;
        assert_eq!((status, text.as_str()), (Some(2), ""), "{arguments:?}");
        assert!(error.contains(message), "{arguments:?}: {error}");
        Ok(())
    };
    check(&[], "no processes are selected")?;
    check(&["--all", "--pid", "1"], "cannot be used with")?;
    check(&["--all", "--force", "--staged"], "cannot be used with")?;
    check(&["--pid", "1", "--max-wait", "soon"], "write for example")?;
    check(&["--host", "recording:/nonexistent", "--pid", "1"], "a recording cannot be changed")?;
    if Path::new("/sys/kernel/mm/ksm/run").exists() {
        check(&["--pid", "4194304"], "there is no process 4194304")?;
        check(&["--vm", "no-such-guest"], "--vm no-such-guest: no virtual machine")?;
    } else {
        println!("skipped in part: this kernel has no KSM");
    }
    Ok(())
}

#[test]
fn kernel_without_ksm_has_nothing_to_unmerge() -> UnmergeTestResult {
    let folder = tempfile::tempdir()?;
    fs::write(folder.path().join("recording.toml"), "schema = \"pagefold.recording/1\"\npage_size = 4096\n")?;
    let host = format!("recording:{}", folder.path().display());
    let (status, text, error) = run_unmerge(&["--host", &host, "--all", "--dry-run"])?;
    assert_eq!((status, text.as_str()), (Some(2), ""));
    assert!(error.contains("this kernel has no KSM"), "{error}");
    Ok(())
}

/// Kills the child and reaps it when dropped.
struct KilledOnDropChild(Child);

impl Drop for KilledOnDropChild {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn unenrolled_process_has_nothing_to_unmerge() -> UnmergeTestResult {
    if !Path::new("/sys/kernel/mm/ksm/run").exists() {
        return skip_test("this kernel has no KSM");
    }
    let _ksm = KsmTestGuard::acquire().ok();
    let sleeper = KilledOnDropChild(Command::new("sleep").arg("600").spawn()?);
    let pid = sleeper.0.id().to_string();
    let (status, text, error) = run_unmerge(&["--pid", &pid])?;
    assert_eq!((status, error.as_str()), (Some(0), ""));
    assert!(text.starts_with("Nothing to unmerge on this host: none of 1 chosen processes is enrolled"), "{text}");
    let (status, report) = unmerge_json(&["--pid", &pid])?;
    assert_eq!((status, &report["outcome"], &report["not_enrolled"]), (Some(0), &"nothing".into(), &1.into()));
    Ok(())
}

#[test]
fn process_of_another_user_is_not_permitted() -> UnmergeTestResult {
    if !is_root() || !Path::new("/sys/kernel/mm/ksm/run").exists() {
        return skip_test("needs KSM, and root to become another user");
    }
    let directory = tempfile::tempdir()?;
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777))?;
    let copied = Command::new("cp").args([env!("CARGO_BIN_EXE_pagefold").as_ref(), directory.path()]).status()?;
    assert!(copied.success());
    let state = directory.path().join("state");
    let mut command = Command::new(directory.path().join("pagefold"));
    command.uid(65534).gid(65534).args(["unmerge", "--pid", "1", "--state"]).arg(&state);
    let output = command.output()?;
    let error = String::from_utf8(output.stderr)?;
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{error}");
    assert!(error.contains("permission denied") && error.lines().count() == 1, "{error}");
    Ok(())
}

#[test]
fn predicted_memory_need_is_exact() -> UnmergeTestResult {
    let ksm = match KsmTestGuard::acquire() {
        Ok(ksm) => ksm,
        Err(why) => return skip_test(&why),
    };
    ksm.write_setting("use_zero_pages", 1);
    let lab: RunningLab<RegionLine> =
        RunningLab::start_layout(&["--mergeable", "within=400,copies=4,zero=100,unique=50"])?;
    ksm.scan_until_settled();
    let pid = lab.pid().to_string();
    let (status, dry) = unmerge_json(&["--pid", &pid, "--dry-run"])?;
    assert_eq!(status, Some(0), "{dry}");
    let process = &dry["processes"][0];
    // 400 pages on 100 frames, each of which is freed with its last mapping. Each zero page needs a new frame.
    let figures = ["merged_pages", "zero_pages", "freed_frames"].map(|name| process[name].as_u64());
    assert_eq!(figures, [Some(400), Some(100), Some(100)], "{process}");
    assert!(process["estimate_reason"].is_null());
    let host =
        dry["guard"]["limits"].as_array().and_then(|limits| limits.iter().find(|limit| limit["scope"] == "this host"));
    assert_eq!(host.ok_or("the guard has no limit of this host")?["needed"].as_u64(), Some(400 * 4096));
    Ok(())
}

/// Start and end address of a lab's region.
fn region_range(region: &RegionLine) -> (u64, u64) {
    (region.start, region.start + region.pages * 4096)
}

#[test]
fn injected_unmerge_restores_private_pages() -> UnmergeTestResult {
    if !is_root() {
        return skip_test("needs root");
    }
    for enrolled in ["--mergeable", "--merge-any"] {
        let spec = "within=4000,copies=4,zero=1000,unique=500";
        // Acquired first, so that ksmd has not merged the memory under another test's settings.
        let ksm = match KsmTestGuard::acquire() {
            Ok(ksm) => ksm,
            Err(why) => return skip_test(&why),
        };
        ksm.write_setting("use_zero_pages", 1);
        let lab: RunningLab<RegionLine> = RunningLab::start_layout(&[enrolled, spec])?;
        ksm.scan_until_settled();
        let pid = lab.pid();
        let sums = || -> Result<Vec<u64>, Box<dyn Error>> {
            lab.lines().iter().map(region_range).map(|(start, end)| range_checksum(pid, start, end)).collect()
        };
        let before = sums()?;
        let (status, report) = unmerge_json(&["--pid", &pid.to_string()])?;
        assert_eq!((status, &report["outcome"]), (Some(0), &"done".into()), "{report}");
        let process = &report["processes"][0];
        assert_eq!(process["method"], if enrolled == "--mergeable" { "regions" } else { "whole" });
        let pages = |name: &str| process[name].as_u64();
        assert!(pages("merged_pages") >= Some(4000) && pages("zero_pages") >= Some(1000), "{process}");
        // Zero pages placed by KSM are restored, too.
        assert_eq!((&process["merged_pages_after"], &process["zero_pages_after"]), (&0.into(), &0.into()), "{process}");
        let merged = process["merged_pages"].as_u64().ok_or("the report has no merged_pages")?;
        let copies = report["taken"]["copies"].as_u64().ok_or("the report has no copies")?;
        assert!((merged..merged + merged / 20).contains(&copies), "{merged} merged pages, {copies} copies");
        assert_eq!(sums()?, before);
        assert!(regions_of(pid, 0)?.iter().all(|region| !region.2), "a region is still marked mergeable");
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        assert!(status.contains("State:\tS") && status.contains("TracerPid:\t0"), "{status}");
    }
    Ok(())
}

#[test]
fn collapse_restores_huge_pages() -> UnmergeTestResult {
    if !is_root() {
        return skip_test("needs root");
    }
    let mode = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    if !mode.contains("[always]") && !mode.contains("[madvise]") {
        return skip_test("huge pages are not allowed on this host");
    }
    // The same content in both, so that ksmd splits huge pages to merge them.
    let start_lab = || RunningLab::start_layout(&["--mergeable", "--salt", "twin", "huge=2048"]);
    let (lab, _other) = (start_lab()?, start_lab()?);
    let ksm = match KsmTestGuard::acquire() {
        Ok(ksm) => ksm,
        Err(why) => return skip_test(&why),
    };
    ksm.write_setting("use_zero_pages", 0);
    ksm.scan_until_settled();
    let (status, report) = unmerge_json(&["--pid", &lab.pid().to_string(), "--collapse"])?;
    assert_eq!(status, Some(0), "{report}");
    let huge = &report["processes"][0]["huge"];
    let [unmerged, collapsed] = ["unmerged", "collapsed"].map(|name| huge[name].as_u64().unwrap_or(0));
    assert!(collapsed >= 8 * BYTES_PER_MIB && unmerged < collapsed, "{report}");
    Ok(())
}

#[test]
fn staged_unmerge_stops_when_the_cgroup_is_full() -> UnmergeTestResult {
    if !is_root() {
        return skip_test("needs root");
    }
    let Some(cgroup) = UnmergeCgroup::new("parts") else { return skip_test("cannot create a memory cgroup") };
    let lab: RunningLab<RegionLine> = start_in(&cgroup, "layout", &["--mergeable", "within=32768,copies=64"])?;
    let ksm = match KsmTestGuard::acquire() {
        Ok(ksm) => ksm,
        Err(why) => return skip_test(&why),
    };
    ksm.scan_until_settled();
    let pid = lab.pid();
    let (start, end) = region_range(lab.lines().first().ok_or("the lab has no region")?);
    let before = range_checksum(pid, start, end)?;
    // Room for two of four parts of 32 MiB, and a little more.
    cgroup.set_limit((cgroup.used_bytes().ok_or("no memory usage")? + 80 * BYTES_PER_MIB) & !4095)?;
    let target = pid.to_string();
    let (status, refused) = unmerge_json(&["--pid", &target])?;
    assert_eq!((status, &refused["outcome"]), (Some(1), &"refused".into()), "{refused}");
    let (status, staged) = unmerge_json(&["--pid", &target, "--staged"])?;
    assert_eq!((status, &staged["outcome"]), (Some(3), &"partial".into()), "{staged}");
    let process = &staged["processes"][0];
    assert_eq!((&process["batches_unenrolled"], &process["state"]), (&2.into(), &"partial".into()), "{process}");
    assert_eq!(process["merged_pages_after"].as_u64(), Some(32768 - 2 * 8192));
    assert_eq!(cgroup.oom_kills().unwrap_or(0), 0);
    assert_eq!(range_checksum(pid, start, end)?, before);
    // Without the limit the rest follows.
    cgroup.set_limit(1 << 40)?;
    let (status, completed) = unmerge_json(&["--pid", &target, "--staged"])?;
    assert_eq!((status, &completed["outcome"]), (Some(0), &"done".into()), "{completed}");
    assert_eq!(range_checksum(pid, start, end)?, before);
    Ok(())
}

/// Runs its arguments like the container of `deploy/kubernetes/daemonset.yaml`: with the host's PIDs, KSM and cgroups,
/// in its own cgroup, mount and network namespaces, with four capabilities.
const CONTAINER_SHELL_COMMAND: &str = "echo $$ > \"$0/cgroup.procs\" && exec unshare --cgroup --mount --net \
     setpriv --no-new-privs --inh-caps=-all \
     --bounding-set=-all,+sys_ptrace,+sys_admin,+dac_override,+sys_nice -- \"$@\"";

#[test]
fn unmerge_in_a_container_finds_the_limits_of_other_cgroups() -> UnmergeTestResult {
    if !is_root() {
        return skip_test("needs root");
    }
    let (Some(pod_cgroup), Some(container_cgroup)) = (UnmergeCgroup::new("pod"), UnmergeCgroup::new("container"))
    else {
        return skip_test("cannot create a memory cgroup");
    };
    let run_in_container = |arguments: &[&str]| {
        Command::new("sh")
            .args(["-c", CONTAINER_SHELL_COMMAND])
            .arg(&container_cgroup.directory)
            .args(arguments)
            .output()
    };
    if !run_in_container(&["true"])?.status.success() {
        return skip_test("needs cgroup, mount and network namespaces");
    }
    let lab: RunningLab<RegionLine> = start_in(&pod_cgroup, "layout", &["--mergeable", "within=4096,copies=64"])?;
    let ksm = match KsmTestGuard::acquire() {
        Ok(ksm) => ksm,
        Err(why) => return skip_test(&why),
    };
    ksm.scan_until_settled();
    let (pid, state) = (lab.pid().to_string(), tempfile::tempdir()?);
    let unmerge = |arguments: &[&str]| -> Result<(Option<i32>, Value), Box<dyn Error>> {
        let state = state.path().to_str().ok_or("the state directory is not UTF-8")?;
        let command = [env!("CARGO_BIN_EXE_pagefold"), "unmerge", "--state", state, "--pid", &pid, "--json"];
        let output = run_in_container(&[&command, arguments].concat())?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        let report = serde_json::from_slice(&output.stdout).map_err(|why| format!("{why}: {stderr}"))?;
        Ok((output.status.code(), report))
    };
    pod_cgroup.set_limit((pod_cgroup.used_bytes().ok_or("no memory usage")? + BYTES_PER_MIB) & !4095)?;
    let (status, refused) = unmerge(&[])?;
    assert_eq!((status, &refused["outcome"]), (Some(1), &"refused".into()), "{refused}");
    assert_eq!(refused["guard"]["unreadable"], json!([]), "{refused}");
    let name = pod_cgroup.directory.file_name().and_then(|name| name.to_str()).ok_or("the cgroup has no name")?;
    let binding_limit = &refused["guard"]["limits"][0];
    assert!(binding_limit["scope"].as_str().is_some_and(|scope| scope.ends_with(name)), "{refused}");
    pod_cgroup.set_limit((pod_cgroup.used_bytes().ok_or("no memory usage")? + 64 * BYTES_PER_MIB) & !4095)?;
    let (status, report) = unmerge(&[])?;
    assert_eq!((status, &report["outcome"]), (Some(0), &"done".into()), "{report}");
    assert_eq!(report["processes"][0]["merged_pages_after"], 0, "{report}");
    Ok(())
}
