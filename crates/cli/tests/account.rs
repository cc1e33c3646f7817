//! Checks `pagefold account` against memory whose content is known page by page, merged by the real ksmd, and against
//! the kernel's own counters.
//!
//! The tests that drive ksmd need root, KSM and a memory controller. Without them they print `skipped: why`.

use pagefold_account::decide::reconcile::{Balance, reconcile};
use pagefold_account::decide::{Account, Footprint, Frames};
use pagefold_account::footprint::FrameLedger;
use pagefold_base::{Bytes, Pages, Pid, region};
use pagefold_host::{Host, observe};
use pagefold_labs::client;
use pagefold_labs::ksm::KsmTestGuard;
use pagefold_labs::output_lines::{READY_PREFIX, RegionLine};
use pagefold_linux::LiveHost;
use serde_json::Value;
use std::error::Error;
use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

type AccountTestResult = Result<(), Box<dyn Error>>;

const KSM_ZERO_PAGES_FILE: &str = "/sys/kernel/mm/ksm/ksm_zero_pages";

/// Timeout for work that the kernel does asynchronously.
const KERNEL_TIMEOUT: Duration = Duration::from_secs(30);

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The kernel's counters of merged pages: shared, sharing, zero.
fn merged_counters(ksm: &KsmTestGuard) -> [i64; 3] {
    ["pages_shared", "pages_sharing", "ksm_zero_pages"].map(|name| ksm.read_counter(name))
}

/// Wait until a condition is true; returns whether it became true in time.
fn wait_until(mut holds: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while !holds() {
        if start.elapsed() > KERNEL_TIMEOUT {
            return false;
        }
        sleep(Duration::from_millis(20));
    }
    true
}

/// Run ksmd until it has dropped the processes that exited. If no other process is enrolled, ksmd makes no more full
/// scans.
fn wait_until_ksmd_forgets(ksm: &KsmTestGuard) {
    let end = ksm.read_counter("full_scans") + 2;
    ksm.write_setting("run", 1);
    let forgotten = wait_until(|| merged_counters(ksm) == [0; 3] || ksm.read_counter("full_scans") >= end);
    ksm.write_setting("run", 0);
    assert!(forgotten, "KSM still counts pages of processes that exited: {:?}", merged_counters(ksm));
}

/// A memory cgroup for one test. Drop it after the processes in it.
struct AccountCgroup {
    directory: PathBuf,
    /// The field of `memory.stat` that counts the anonymous memory of the cgroup's own processes.
    stat_field: &'static str,
}

impl AccountCgroup {
    /// Uses the v1 hierarchy of the memory controller if there is one, else the unified hierarchy.
    fn new() -> Option<Self> {
        let name = format!("pagefold-account-{}", std::process::id());
        [("/sys/fs/cgroup/memory", "rss"), ("/sys/fs/cgroup", "anon")].into_iter().find_map(|(top, field)| {
            let directory = Path::new(top).join(&name);
            fs::create_dir(&directory).ok()?;
            let cgroup = Self { directory, stat_field: field };
            cgroup.anonymous_bytes().map(|_| cgroup)
        })
    }

    fn anonymous_bytes(&self) -> Option<u64> {
        let stat = fs::read_to_string(self.directory.join("memory.stat")).ok()?;
        stat.lines().find_map(|line| line.strip_prefix(self.stat_field)?.strip_prefix(' ')?.parse().ok())
    }
}

impl Drop for AccountCgroup {
    fn drop(&mut self) {
        if !wait_until(|| fs::remove_dir(&self.directory).is_ok()) {
            eprintln!("cannot remove the cgroup {}", self.directory.display());
        }
    }
}

/// A process with a known layout.
struct LayoutProcess {
    child: Child,
    regions: Vec<RegionLine>,
}

impl LayoutProcess {
    /// Start the process in the cgroup, so that all its memory is charged there.
    fn start(lab: &Path, cgroup: &AccountCgroup, arguments: &[&str]) -> Result<Self, Box<dyn Error>> {
        let child = Command::new("sh")
            .args(["-c", "echo $$ > \"$0/cgroup.procs\" && exec \"$@\""])
            .args([cgroup.directory.as_os_str(), lab.as_os_str()])
            .arg("layout")
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut process = Self { child, regions: Vec::new() };
        let output = process.child.stdout.take().ok_or("pagefold-lab has no standard output pipe")?;
        for line in BufReader::new(output).lines() {
            let line = line?;
            if line.starts_with(READY_PREFIX) {
                return Ok(process);
            }
            process.regions.push(serde_json::from_str(&line)?);
        }
        Err(format!("pagefold-lab ended before it was ready: {}", process.child.wait()?).into())
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether an address lies in a region of the layout.
    fn contains(&self, address: u64) -> bool {
        self.regions.iter().any(|region| (region.start..region.end_address()).contains(&address))
    }

    /// Write a byte into each of the given pages of a region from outside the process, through `/proc/PID/mem`.
    fn write_pages(&self, kind: &str, pages: impl IntoIterator<Item = u64>) {
        let region = self.regions.iter().find(|region| region.kind == kind).expect("no region of this kind");
        let memory = OpenOptions::new().write(true).open(format!("/proc/{}/mem", self.pid())).unwrap();
        for page in pages {
            memory.write_all_at(&[0xa5], region.start + page * region.page_size).unwrap();
        }
    }
}

impl Drop for LayoutProcess {
    fn drop(&mut self) {
        // The process exits when its standard input closes.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// Run `pagefold account --json`; returns its exit status and its report.
fn run_account(arguments: &[&str]) -> (i32, Value) {
    let output =
        Command::new(env!("CARGO_BIN_EXE_pagefold")).args(["account", "--json"]).args(arguments).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    let status = output.status.code().expect("pagefold account was killed by a signal");
    let report = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("status {status}: {error}"));
    (status, report)
}

fn find_account(report: &Value, pid: u32) -> &Value {
    let processes = report["processes"].as_array().unwrap();
    processes.iter().find(|process| process["pid"] == pid).unwrap_or_else(|| panic!("{pid} is not in {report}"))
}

fn find_comparison<'a>(report: &'a Value, source: &str) -> &'a Value {
    let lines = report["reconciliation"]["comparisons"].as_array().unwrap();
    lines.iter().find(|line| line["source"] == source).unwrap_or_else(|| panic!("no counter {source}"))
}

/// Account for the selected regions of some processes and reconcile their shares with the frames. The shares include
/// the mappings of every other process that maps the same frames.
fn account_parts(
    helpers: &[LayoutProcess],
    part: impl Fn(&LayoutProcess, &region::Region) -> bool,
) -> (Balance, Frames) {
    let host = LiveHost::new();
    let page = host.page_size();
    let mut ledger = FrameLedger::new(&host);
    let accounts: Vec<Account> = helpers
        .iter()
        .map(|helper| {
            let handle = host.open(Pid(helper.pid())).unwrap();
            let process = observe::process(&host, &*handle).unwrap();
            let mut regions = observe::regions(&*handle).unwrap();
            regions.retain(|region| part(helper, region));
            let mapped = ledger.add_process(&*handle, &regions).unwrap();
            let footprint = Footprint::exact(page, mapped, Ok(Bytes::ZERO), Ok(Bytes::ZERO), &process.ksm);
            Account { process, footprint }
        })
        .collect();
    let frames = ledger.finish();
    let (ksm, memory) = (observe::ksm(&host).unwrap(), observe::memory(&host).unwrap());
    (reconcile(page, &accounts, &frames, &ksm, &memory).balance, frames)
}

const SHARED_PAGES: u64 = 200;
const WITHIN_PAGES: u64 = 60;
const ZERO_PAGES_LAID_OUT: u64 = 64;
const UNIQUE_PAGES: u64 = 50;
/// KSM pages of each process: the pages that all three share, and 20 contents of its own with three copies each.
const KSM_PAGES_PER_PROCESS: u64 = SHARED_PAGES + WITHIN_PAGES;
/// KSM frames of all three processes; each frame has three mappings.
const KSM_FRAMES: u64 = SHARED_PAGES + 3 * (WITHIN_PAGES / 3);

/// One test, because each step depends on the merged memory of the step before.
#[test]
fn shares_of_merged_memory_sum_to_frames_in_use() -> AccountTestResult {
    let lab = match client::lab_binary() {
        _ if !is_root() => return skip_test("needs root to read frames and drive ksmd"),
        _ if !Path::new(KSM_ZERO_PAGES_FILE).exists() => return skip_test("needs KSM with ksm_zero_pages (Linux 6.6)"),
        Err(missing) => return skip_test(&missing.to_string()),
        Ok(lab) => lab,
    };
    let ksm = match KsmTestGuard::acquire() {
        Ok(ksm) => ksm,
        Err(why) => return skip_test(&why),
    };
    ksm.write_setting("use_zero_pages", 1);
    let Some(cgroup) = AccountCgroup::new() else { return skip_test("cannot create a memory cgroup") };
    let spec = format!(
        "shared-content=account-{}:{SHARED_PAGES},within={WITHIN_PAGES},copies=3,zero={ZERO_PAGES_LAID_OUT},\
         unique={UNIQUE_PAGES}",
        std::process::id()
    );
    let helpers = ["a", "b", "c"]
        .map(|salt| LayoutProcess::start(&lab, &cgroup, &["--mergeable", "--salt", salt, &spec]))
        .into_iter()
        .collect::<Result<Vec<_>, _>>()?;
    let pids: Vec<u32> = helpers.iter().map(LayoutProcess::pid).collect();
    ksm.scan_until_settled();

    let pid_options: Vec<String> = pids.iter().flat_map(|pid| ["--pid".to_owned(), pid.to_string()]).collect();
    let mut explain_options: Vec<&str> = pid_options.iter().map(String::as_str).collect();
    explain_options.push("--explain");
    let (_, report) = run_account(&explain_options);
    let page = report["page_size"].as_u64().unwrap();
    for &pid in &pids {
        let process = find_account(&report, pid);
        assert_eq!(process["ksm_pages"], KSM_PAGES_PER_PROCESS, "{process}");
        assert_eq!(process["ksm_zero_pages"], ZERO_PAGES_LAID_OUT, "{process}");
        let fair = (KSM_PAGES_PER_PROCESS * page + 1) / 3;
        assert_eq!(process["ksm_fair_share"], fair, "{process}");
        assert_eq!(process["saved"], KSM_PAGES_PER_PROCESS * page - fair + ZERO_PAGES_LAID_OUT * page, "{process}");
        assert_eq!(process["ksm_merging_pages"], KSM_PAGES_PER_PROCESS, "{process}");
        assert!(process.get("estimate_reason").is_none(), "{process}");
        let (fair, saved, unmerged) =
            (&process["fair_share"], &process["saved"], process["fair_share_unmerged"].as_u64().unwrap());
        assert_eq!(fair.as_u64().unwrap() + saved.as_u64().unwrap(), unmerged, "{process}");
    }
    let saved = 3 * KSM_PAGES_PER_PROCESS - KSM_FRAMES;
    // Other processes on this machine may be enrolled and may write to their merged pages during the test.
    let no_other_enrolled = other_enrolled_processes(&pids)?.is_empty();
    if no_other_enrolled {
        assert_agreement(&report, saved);
    }
    let (layout_balance, frames) = account_parts(&helpers, |helper, region| helper.contains(region.range.start));
    assert!(
        layout_balance.exact && layout_balance.changed_mappings.0 == 0 && layout_balance.unseen == Bytes::ZERO,
        "{layout_balance:?}"
    );
    assert_eq!((frames.distinct, frames.ksm), (Pages(KSM_FRAMES + 3 * UNIQUE_PAGES), Pages(KSM_FRAMES)));
    assert_eq!(frames.ksm_mappings, Pages(3 * KSM_PAGES_PER_PROCESS));
    assert_eq!(layout_balance.fair, Bytes((KSM_FRAMES + 3 * UNIQUE_PAGES) * page));
    // The number of mappings of library pages changes while other programs start and exit.
    let account_all = || account_parts(&helpers, |_, _| true);
    assert!(
        wait_until(|| account_all().0.exact),
        "the shares of three idle processes never add up: {:?}",
        account_all().0
    );
    let anonymous = || (Some(account_all().1.anonymous.0 * page), cgroup.anonymous_bytes());
    let agrees = wait_until(|| anonymous().0 == anonymous().1);
    assert!(agrees, "anonymous frames differ from the cgroup's charge: {:?}", anonymous());

    // Write ten shared pages and five zero pages of one process, and all three copies of a content of another.
    helpers[0].write_pages("shared-content", 0..10);
    helpers[0].write_pages("zero", 0..5);
    helpers[1].write_pages("within", [0, WITHIN_PAGES / 3, 2 * WITHIN_PAGES / 3]);
    let (_, report) = run_account(&explain_options);
    assert_eq!(find_account(&report, pids[0])["ksm_pages"], KSM_PAGES_PER_PROCESS - 10);
    assert_eq!(find_account(&report, pids[0])["ksm_merging_pages"], KSM_PAGES_PER_PROCESS, "ksmd has run");
    assert_eq!(find_account(&report, pids[0])["ksm_zero_pages"], ZERO_PAGES_LAID_OUT - 5);
    assert_eq!(find_account(&report, pids[1])["ksm_pages"], KSM_PAGES_PER_PROCESS - 3);
    if no_other_enrolled {
        assert_explanation(&report);
    } else {
        println!("skipped in part: other processes are enrolled: {:?}", other_enrolled_processes(&pids)?);
    }

    drop(helpers);
    wait_until_ksmd_forgets(&ksm);
    Ok(())
}

/// Without COW breaks, the account and the kernel's counters agree exactly.
fn assert_agreement(report: &Value, saved: u64) {
    for (source, figure) in [
        ("pages_shared", KSM_FRAMES),
        ("pages_sharing", saved),
        ("sum of ksm_merging_pages", 3 * KSM_PAGES_PER_PROCESS),
    ] {
        let line = find_comparison(report, source);
        assert_eq!((&line["account"], &line["kernel"]), (&figure.into(), &figure.into()), "{line}");
    }
    assert_eq!(find_comparison(report, "ksm_zero_pages")["kernel"], 3 * ZERO_PAGES_LAID_OUT);
    assert_eq!(
        find_comparison(report, "general_profit")["difference"],
        0,
        "{}",
        find_comparison(report, "general_profit")
    );
    let drift = report["reconciliation"]["drift"].as_object().unwrap();
    assert!(drift.values().all(|part| part == 0), "{drift:?}");
}

/// While ksmd was stopped, 13 pages on KSM frames and five zero pages were written. One KSM frame lost all its
/// mappings.
fn assert_explanation(report: &Value) {
    let shared = find_comparison(report, "pages_shared");
    assert_eq!((&shared["account"], &shared["kernel"]), (&(KSM_FRAMES - 1).into(), &KSM_FRAMES.into()), "{shared}");
    assert!(shared["explanation"].as_str().unwrap().contains("stale"), "{shared}");
    let sharing = find_comparison(report, "pages_sharing");
    assert_eq!(sharing["difference"], -12, "{sharing}");
    let explanation = sharing["explanation"].as_str().unwrap();
    assert!(explanation.contains("-13 pages written or unmapped"), "{explanation}");
    assert!(explanation.contains("+1 frames"), "{explanation}");
    let drift = &report["reconciliation"]["drift"];
    assert_eq!((&drift["stale"], &drift["excess_frames"], &drift["unvisited"]), (&13.into(), &1.into(), &0.into()));
    assert_eq!(find_comparison(report, "ksm_zero_pages")["kernel"], 3 * ZERO_PAGES_LAID_OUT - 5);
}

/// The names of other processes for which ksmd keeps rmap items.
fn other_enrolled_processes(pids: &[u32]) -> Result<Vec<String>, Box<dyn Error>> {
    let mut names = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let path = entry?.path();
        let pid = path.file_name().and_then(|name| name.to_str()?.parse::<u32>().ok());
        let stat = fs::read_to_string(path.join("ksm_stat")).unwrap_or_default();
        let enrolled = stat.lines().any(|line| line.starts_with("ksm_rmap_items ") && line != "ksm_rmap_items 0");
        if enrolled && pid.is_some_and(|pid| !pids.contains(&pid)) {
            names.push(fs::read_to_string(path.join("comm")).unwrap_or_default().trim().to_owned());
        }
    }
    Ok(names)
}

fn skip_test(why: &str) -> AccountTestResult {
    println!("skipped: {why}");
    Ok(())
}

/// A process of an ordinary user: the test's own user, or [`Self::NOBODY_UID`] if the test runs as root.
struct UnprivilegedProcess {
    directory: tempfile::TempDir,
    child: Child,
}

impl UnprivilegedProcess {
    /// The user `nobody`, used if the test runs as root.
    const NOBODY_UID: u32 = 65534;

    fn new() -> Result<Self, Box<dyn Error>> {
        let directory = tempfile::tempdir()?;
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755))?;
        // Other users may have no access to the build directory. `cp` runs as a separate process: a file that this
        // process wrote could still be open for writing in a child of another test, and exec would fail with `ETXTBSY`.
        let copied = Command::new("cp").args([env!("CARGO_BIN_EXE_pagefold").as_ref(), directory.path()]).status()?;
        assert!(copied.success());
        let child = Self::command(Path::new("sleep")).arg("600").spawn()?;
        Ok(Self { directory, child })
    }

    fn command(program: &Path) -> Command {
        let mut command = Command::new(program);
        if is_root() {
            command.uid(Self::NOBODY_UID).gid(Self::NOBODY_UID);
        }
        command
    }

    fn run_account(&self, arguments: &[&str]) -> Result<(Option<i32>, String), Box<dyn Error>> {
        let output = Self::command(&self.directory.path().join("pagefold")).arg("account").args(arguments).output()?;
        Ok((output.status.code(), String::from_utf8(output.stdout)?))
    }
}

impl Drop for UnprivilegedProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// After the main thread exits, its files in `/proc` are empty or contain zeros, but the process still has memory.
#[test]
fn process_with_ended_main_thread_is_accounted() -> AccountTestResult {
    if Command::new("gcc").arg("--version").stdout(Stdio::null()).status().is_err() {
        return skip_test("gcc is not installed");
    }
    let folder = tempfile::tempdir()?;
    let (source, program) = (folder.path().join("leave.c"), folder.path().join("leave"));
    let code = "#include <pthread.h>\n#include <stdlib.h>\n#include <string.h>\n#include <unistd.h>\n\
                static void *stay(void *nothing) { read(0, nothing, 1); exit(0); }\n\
                int main(void) { pthread_t thread; memset(malloc(64 << 20), 7, 64 << 20);\n\
                pthread_create(&thread, 0, stay, malloc(1)); pthread_exit(0); }\n";
    fs::write(&source, code)?;
    assert!(Command::new("gcc").args(["-pthread", "-o"]).args([&program, &source]).status()?.success());
    // The program exits when its standard input closes.
    let mut child = Command::new(&program).arg("an argument").stdin(Stdio::piped()).spawn()?;
    let pid = child.id().to_string();
    let ended = || fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") Z "));
    assert!(wait_until(ended), "the main thread did not exit");
    let run = |command: &str| -> Result<Value, Box<dyn Error>> {
        let output = Command::new(env!("CARGO_BIN_EXE_pagefold")).args([command, "--json", "--pid", &pid]).output()?;
        Ok(serde_json::from_slice(&output.stdout).map_err(|_| String::from_utf8_lossy(&output.stderr).into_owned())?)
    };
    let (account, census) = (run("account")?, run("census")?);
    drop(child.stdin.take());
    child.wait()?;
    assert!(account["processes"][0]["rss"].as_u64() >= Some(64 << 20), "{account}");
    assert!(census.to_string().contains(&format!("\"pid\":{pid}")), "{census}");
    assert!(census["bytes"]["resident"].as_u64() >= Some(64 << 20), "{census}");
    Ok(())
}

#[test]
fn unprivileged_user_gets_estimates_and_unseen_processes() -> AccountTestResult {
    let user_process = UnprivilegedProcess::new()?;
    let own_pid = user_process.child.id().to_string();
    // The child is named `sleep` only after exec.
    let comm = format!("/proc/{own_pid}/comm");
    assert!(wait_until(|| fs::read_to_string(&comm).is_ok_and(|comm| comm == "sleep\n")));

    let (status, json) = user_process.run_account(&["--json", "--pid", &own_pid])?;
    let report: Value = serde_json::from_str(&json)?;
    let process = &report["processes"][0];
    assert_eq!(status, Some(0), "{report}");
    assert_eq!(process["estimate_reason"], "permission denied");
    assert_eq!(process["fair_share"], process["pss"]);
    assert!(process["rss"].as_u64() > Some(0));
    assert!(process.get("hugetlb").is_none(), "an unknown value must not be reported as 0");

    let (status, text) = user_process.run_account(&["--pid", &own_pid])?;
    assert_eq!(status, Some(0));
    assert!(text.contains("All figures are estimates.") && text.contains("~ marks estimates"), "{text}");

    // Process 1 belongs to root, or at least not to this user.
    let (status, json) = user_process.run_account(&["--json", "--pid", &own_pid, "--pid", "1"])?;
    let report: Value = serde_json::from_str(&json)?;
    assert_eq!(status, Some(3));
    assert_eq!(
        (&report["unscanned_processes"][0]["pid"], &report["unscanned_processes"][0]["reason"]),
        (&1.into(), &"denied".into())
    );
    assert_eq!(report["processes"].as_array().map(Vec::len), Some(1));

    // Without frames there is nothing to compare with the counters.
    let (status, text) = user_process.run_account(&["--pid", &own_pid, "--explain"])?;
    assert_eq!(status, Some(3));
    assert!(text.contains("There is nothing to compare"), "{text}");
    Ok(())
}

/// Write a synthetic recording: two virtual machines that share KSM frames, and a process whose pages were not
/// recorded.
fn write_recording(root: &Path) -> std::io::Result<()> {
    let write = |path: &str, text: &str| {
        let path = root.join(path);
        fs::create_dir_all(path.parent().expect("the path has no parent directory"))?;
        fs::write(path, text)
    };
    write("recording.toml", "schema = \"pagefold.recording/1\"\npage_size = 4096\n")?;
    write("files/proc/.names", "2\n7\n8\n9\n")?;
    write("files/proc/meminfo", "AnonPages: 4800 kB\nHugetlb: 0 kB\n")?;
    for (name, value) in [
        ("run", "0"),
        ("pages_shared", "100"),
        ("pages_sharing", "100"),
        ("ksm_zero_pages", "20"),
        ("max_page_sharing", "256"),
        ("stable_node_chains", "0"),
        ("stable_node_dups", "0"),
        ("general_profit", "465920"),
    ] {
        write(&format!("files/sys/kernel/mm/ksm/{name}"), value)?;
    }
    let stat_fields = "1 1 1 0 -1 FLAGS 0 0 0 0 0 0 0 0 20 0 1 0 4711 0 0".to_owned() + &" 0".repeat(28);
    let (user, kernel) = (stat_fields.replace("FLAGS", "4194304"), stat_fields.replace("FLAGS", "2097216"));
    write("files/proc/2/stat", &format!("2 (kthreadd) S {kernel}\n"))?;
    for (pid, comm, arguments, rss, pss, merged, zero) in [
        (7, "qemu-system-x86", "qemu-system-x86_64\0-name\0web1\0", 2000, 1800, 100, 10),
        (8, "qemu-system-x86", "qemu-system-x86_64\0-name\0web2\0", 2000, 1800, 100, 10),
        (9, "sshd", "sshd\0", 400, 300, 0, 0),
    ] {
        let file = |name: &str, text: &str| write(&format!("files/proc/{pid}/{name}"), text);
        file("stat", &format!("{pid} ({comm}) S {user}\n"))?;
        file("status", "Uid:\t1000\t1000\t1000\t1000\n")?;
        file("cmdline", arguments)?;
        file("environ", "")?;
        file("cgroup", "0::/machine.slice\n")?;
        file("ksm_merging_pages", &format!("{merged}\n"))?;
        let profit = (merged + zero) * 4096 - 2 * merged * 64;
        file(
            "ksm_stat",
            &format!("ksm_rmap_items {}\nksm_zero_pages {zero}\nksm_process_profit {profit}\n", 2 * merged),
        )?;
        let sums = format!(
            "Rss: {rss} kB\nPss: {pss} kB\nPrivate_Clean: 0 kB\nPrivate_Dirty: {pss} kB\nAnonymous: {rss} kB\n\
             KSM: {} kB\nSwap: 0 kB\n",
            merged * 4
        );
        file("smaps_rollup", &format!("00010000-00400000 ---p 00000000 00:00 0 [rollup]\n{sums}"))?;
        file("smaps", &format!("00010000-00400000 rw-p 00000000 00:00 0 \n{sums}VmFlags: rd wr mr mw me ac mg \n"))?;
    }
    // 400 pages of its own, 100 pages merged with the other machine's, and 10 zero pages placed by KSM.
    for (pid, first) in [(7, 1), (8, 401)] {
        let pages =
            format!("10000 400 {first} x -\n1a0000 100 801 m -\n204000 10 901 z -\n").replace(" 10 901", " 1 901");
        let zeros: String = (1..10).map(|page| format!("{:x} 1 901 z -\n", 0x20_4000 + page * 4096)).collect();
        write(&format!("pages/{pid}.txt"), &(pages + &zeros))?;
    }
    // Page flags: KPF_ANON; KPF_KSM and KPF_ANON; KPF_ZERO_PAGE.
    write("frames.txt", "1 800 1000 1\n801 100 201000 2\n901 1 1000000 0\n")
}

#[test]
fn recording_gives_the_account_of_its_host() -> AccountTestResult {
    let folder = tempfile::tempdir()?;
    write_recording(folder.path())?;
    let host = format!("recording:{}", folder.path().display());
    let run = |arguments: &[&str]| -> Result<(Option<i32>, String), Box<dyn Error>> {
        let output = Command::new(env!("CARGO_BIN_EXE_pagefold")).args(["--host", &host]).args(arguments).output()?;
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok((
            output.status.code(),
            String::from_utf8(output.stdout)?.replace(&folder.path().display().to_string(), "DIR"),
        ))
    };
    let (status, text) = run(&["account", "--by", "vm", "--vm", "web1", "--vm", "web2"])?;
    assert_eq!(status, Some(0));
    let expected = [
        "Account of recording DIR: 2 processes cost 3.52 MiB, by RSS 3.91 MiB; merging saves them 455 KiB net. All \
         frames were read.",
        "",
        " name   processes       RSS       PSS   private      KSM  KSM zero  fair share  unmerged  saved, net  share",
        " web1           1  1.95 MiB  1.76 MiB  1.56 MiB  400 KiB  40.0 KiB    1.76 MiB  1.99 MiB     228 KiB  ██████",
        " web2           1  1.95 MiB  1.76 MiB  1.56 MiB  400 KiB  40.0 KiB    1.76 MiB  1.99 MiB     228 KiB  ██████",
        " total          2  3.91 MiB  3.52 MiB  3.12 MiB  800 KiB  80.0 KiB    3.52 MiB  3.98 MiB     455 KiB",
        "",
        "The figures lack zeros in split huge pages, which KSM does not count: the records of the merges cannot be read. They \
         are available on a live host, to root, with",
        "the --state directory of the merge.",
    ];
    assert_eq!(text.lines().collect::<Vec<_>>(), expected);
    let (status, text) = run(&["account", "--explain"])?;
    assert_eq!(status, Some(3), "one process must be accounted by estimate only");
    for part in [
        " 3 processes cost 3.81 MiB, by RSS 4.30 MiB; merging saves them 455 KiB net. 1 of them estimated.\n",
        "   9  sshd         400 KiB   300 KiB   300 KiB        ·         ·    ~300 KiB   ~300 KiB           ·  ▉\n",
        " fair shares of 2 processes  3,686,400  3.52 MiB\n = frames in use, each once  3,686,400  3.52 MiB\n",
        "They add up exactly, in integers.\n",
        " pages saved by KSM frames                100       100           ·  pages_sharing\n",
        " profit of KSM                        455 KiB   455 KiB           ·  general_profit\n",
        " profit of KSM                        455 KiB   855 KiB    -400 KiB  sum of ksm_process_profit\n",
        "sum of ksm_process_profit: nothing else differs; it overstates by pages_shared, 400 KiB, ",
        "Not in the balance and not in the comparison: 1 process with estimated figures.\n",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    Ok(())
}
