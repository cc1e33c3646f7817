//! `pagefold engine status` and `pagefold account` of user-space engine members whose memory is known page by page.

#![forbid(unsafe_code)]

use pagefold_labs::process_checks::during_compaction;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use tempfile::TempDir;

const PAGE_BYTES: u64 = 4096;
const NOBODY_UID: u32 = 65534;

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A directory for domains, in tmpfs as by default.
fn domains_root() -> TempDir {
    let root = tempfile::tempdir_in("/dev/shm").expect("cannot create a directory in /dev/shm");
    fs::set_permissions(root.path(), fs::Permissions::from_mode(0o700)).expect("cannot set the mode");
    root
}

/// A running `examples/member` of the engine.
struct EngineExampleMember {
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
}

/// The example program, in the same build profile as this test.
fn example_path() -> Option<PathBuf> {
    let tests = std::env::current_exe().expect("cannot find the path of the test program");
    let member = tests.parent().and_then(Path::parent).expect("not in target/PROFILE/deps").join("examples/member");
    if member.exists() {
        return Some(member);
    }
    println!("skipped: `cargo build -p pagefold-engine --examples` was not run");
    None
}

impl EngineExampleMember {
    fn start(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("cannot start the member");
        let stdin = child.stdin.take().expect("the member has no pipe");
        let stdout = BufReader::new(child.stdout.take().expect("the member has no pipe"));
        let mut member = Self { child, commands: stdin, answers: stdout };
        assert_eq!(member.read_answer(), "ready");
        member
    }

    fn start_member(member: &Path, root: &Path, pages: u64, options: &[&str]) -> Self {
        let mut command = Command::new(member);
        command.args(["known", &pages.to_string()]).args(options).env("PAGEFOLD_RUNTIME", root);
        Self::start(command)
    }

    fn read_answer(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).expect("cannot read the member's answer");
        line.trim_end().to_owned()
    }

    fn run_command(&mut self, line: &str) -> String {
        writeln!(self.commands, "{line}").expect("the member has exited");
        self.read_answer()
    }

    fn pid(&self) -> u64 {
        u64::from(self.child.id())
    }
}

impl Drop for EngineExampleMember {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn run_pagefold(root: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    command.env("PAGEFOLD_RUNTIME", root).args(arguments).output().expect("the binary runs")
}

/// Run pagefold; returns its report, checked against the published schema.
fn report_json(root: &Path, schema: &str, arguments: &[&str]) -> Value {
    let output = run_pagefold(root, arguments);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../docs/schema/{schema}.json"));
    let schema = serde_json::from_slice(&fs::read(path).expect("no schema")).expect("not JSON");
    let validator = jsonschema::validator_for(&schema).expect("the schema is not valid");
    let schema_errors: Vec<String> = validator.iter_errors(&report).map(|error| error.to_string()).collect();
    assert!(schema_errors.is_empty(), "{schema_errors:#?}");
    report
}

fn pages_of(value: &Value, name: &str) -> u64 {
    let bytes = value[name].as_u64().unwrap_or_else(|| panic!("no {name} in {value:#}"));
    assert_eq!(bytes % PAGE_BYTES, 0, "{name}");
    bytes / PAGE_BYTES
}

/// Two members of 2000 pages: both hold the same 1500 pages, the first also holds 300 zero pages, and each holds 100
/// unique pages.
fn start_two_members(member: &Path, root: &Path) -> [EngineExampleMember; 2] {
    let mut members = [
        EngineExampleMember::start_member(member, root, 2000, &[]),
        EngineExampleMember::start_member(member, root, 2000, &[]),
    ];
    for (number, member) in members.iter_mut().enumerate() {
        member.run_command("fill 0 1500 7");
        member.run_command(&format!("fill 1500 100 {}", 20 + number));
    }
    members[0].run_command("fill 1600 300 0");
    for i in [0, 1, 0] {
        members[i].run_command("merge");
    }
    members
}

#[test]
fn domain_status_matches_its_memory() {
    let Some(member) = example_path() else { return };
    let root = domains_root();
    let [mut first, second] = start_two_members(&member, root.path());
    let idle = EngineExampleMember::start_member(&member, root.path(), 10, &["--max-slowdown", "50"]);
    let report = report_json(root.path(), "engine", &["engine", "status", "known", "--json"]);
    let domain = &report["domains"][0];
    let pages = |name: &str| pages_of(domain, name);
    assert_eq!((pages("adopted"), pages("merged"), pages("zeros"), pages("rewritten")), (4010, 3000, 300, 0));
    assert_eq!((domain["references_pages"].as_u64(), domain["stored_pages"].as_u64()), (Some(3000), Some(1500)));
    assert_eq!((pages("stored"), pages("saved"), domain["sharing"].as_f64()), (1500, 1800, Some(2.0)));
    let (saved, overhead) = (domain["saved"].as_i64().unwrap(), domain["overhead"].as_i64().unwrap());
    assert_eq!(domain["net"].as_i64(), Some(saved - overhead));
    assert!(overhead >= domain["index"].as_i64().unwrap() + 4 * 4010, "{domain:#}");
    assert_eq!(domain["uid"].as_u64(), Some(u64::from(rustix::process::geteuid().as_raw())));
    for (process, merges, zeros) in [(&first, 2, 300), (&second, 1, 0)] {
        let members = domain["members"].as_array().unwrap();
        let reported =
            members.iter().find(|member| member["pid"] == process.pid()).expect("the domain has no such member");
        assert_eq!((reported["comm"].as_str(), reported["merges"].as_u64()), (Some("member"), Some(merges)));
        assert_eq!(
            (pages_of(reported, "merged"), pages_of(reported, "zeros"), pages_of(reported, "saved")),
            (1500, zeros, 750 + zeros)
        );
        assert_eq!((reported.get("max_slowdown"), reported["region_count"].as_u64()), (None, Some(1)));
        assert!(reported["slowdown"].as_f64().unwrap() > 0.0 && reported["merge_seconds"].as_f64().unwrap() > 0.0);
        assert!(
            reported["last_merge_seconds_ago"].as_f64().unwrap() >= reported["reported_seconds_ago"].as_f64().unwrap()
        );
        assert_eq!(pages_of(&reported["regions"][0], "saved"), 750 + zeros);
    }
    let reported = domain["members"].as_array().unwrap().iter().find(|member| member["pid"] == idle.pid());
    let reported = reported.expect("the domain lacks the member that has not merged");
    assert_eq!(
        (reported["merges"].as_u64(), reported["max_slowdown"].as_f64(), pages_of(reported, "adopted")),
        (Some(0), Some(0.5), 10)
    );
    assert_eq!(reported.get("last_merge_seconds_ago"), None);

    let list = run_pagefold(root.path(), &["engine", "status"]);
    let text = String::from_utf8(list.stdout).expect("not UTF-8");
    let line = text.lines().find(|line| line.trim_start().starts_with("known ")).unwrap_or_else(|| panic!("{text}"));
    for figure in ["15.7 MiB", "11.7 MiB", "1.17 MiB", "5.86 MiB", "7.03 MiB"] {
        assert!(line.contains(figure), "{figure} is not in {line}");
    }
    // As root, the status also lists other users' domains and reports what it could not read.
    let is_incomplete = text.contains("Not seen") || text.contains("could not be read");
    assert_eq!(list.status.code(), Some(if is_incomplete { 3 } else { 0 }), "{text}");
    let details = run_pagefold(root.path(), &["engine", "status", "known"]);
    let text = String::from_utf8(details.stdout).expect("not UTF-8");
    assert!(text.contains("1,500 pages, 5.86 MiB; mapped by 3,000 pages of members: 2.00 pages share one"), "{text}");

    // `engine status` changed nothing.
    assert_eq!(first.run_command("check"), "same");
    let pid = second.pid();
    drop(second);
    let report = report_json(root.path(), "engine", &["engine", "status", "known", "--json"]);
    let domain = &report["domains"][0];
    assert_eq!((domain["ended_members"].as_u64(), pages_of(domain, "merged")), (Some(1), 1500), "a killed member");
    assert!(domain["members"].as_array().unwrap().iter().all(|member| member["pid"] != pid));
    for _ in 0..3 {
        first.run_command("merge");
    }
    let report = report_json(root.path(), "engine", &["engine", "status", "known", "--json"]);
    assert_eq!(report["domains"][0]["ended_members"].as_u64(), Some(0), "merges must remove the record");
}

#[test]
fn domain_name_selects_its_node_domains() {
    let Some(member) = example_path() else { return };
    let root = domains_root();
    let _apart = EngineExampleMember::start_member(&member, root.path(), 10, &["--per-node"]);
    let report = report_json(root.path(), "engine", &["engine", "status", "known", "--json"]);
    let name = report["domains"][0]["name"].as_str().unwrap_or_else(|| panic!("{report:#}"));
    assert!(name.strip_prefix("known.node").is_some_and(|node| node.parse::<u32>().is_ok()), "{name}");
    assert_eq!(run_pagefold(root.path(), &["engine", "status", "know"]).status.code(), Some(2));
}

#[test]
fn absent_domain_is_reported() {
    let root = domains_root();
    for name in ["nobody", "../x", "a\x1b[2Jb"] {
        let output = run_pagefold(root.path(), &["engine", "status", name]);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains("there is no domain") && error.contains("engine status") && !error.contains('\x1b'));
    }
    let output = run_pagefold(root.path(), &["--host", "recording:/x", "engine", "status"]);
    assert_eq!(output.status.code(), Some(2));
}

/// What root sees of another user's directory is that user's responsibility, and no link leads root outside it.
#[test]
fn root_sees_all_domains_and_trusts_no_directory() {
    let Some(member) = example_path() else { return };
    if !is_root() {
        return println!("skipped: needs root to become another user");
    }
    // A unique user id, so that two test runs on one machine do not collide.
    let uid = 3_000_000_000 + std::process::id();
    let (user_directory, name) = (PathBuf::from(format!("/dev/shm/pagefold-{uid}")), format!("theirs-{uid}"));
    struct RemovedOnDrop(PathBuf);
    impl Drop for RemovedOnDrop {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }
    let removed = RemovedOnDrop(user_directory.clone());
    // A copy that the user can execute, wherever this tree is.
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = folder.path().join("member");
    // `install` runs as a separate process: a child of another test would keep the copy open for writing.
    let copied = Command::new("install").args(["-m", "755"]).args([&member, &program]).status().unwrap();
    assert!(copied.success());
    let mut command = Command::new(&program);
    command.args([&name, "100"]).current_dir("/").uid(uid).gid(NOBODY_UID);
    command.env_remove("PAGEFOLD_RUNTIME");
    let mut user_member = EngineExampleMember::start(command);
    user_member.run_command("fill 0 50 3");
    user_member.run_command("copy 50 50 0");
    user_member.run_command("merge");
    let root = domains_root();
    let read_report = || report_json(root.path(), "engine", &["engine", "status", &name, "--json"]);
    let domain = read_report()["domains"][0].clone();
    assert_eq!(
        (domain["uid"].as_u64(), pages_of(&domain, "merged"), pages_of(&domain, "stored")),
        (Some(uid.into()), 100, 50)
    );

    // A forged record that names another user's process.
    let records: Vec<PathBuf> =
        user_directory.join(&name).read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    let record = records.iter().find(|path| path.to_string_lossy().contains("status-")).expect("no status record");
    let mut forged = fs::read(record).unwrap();
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    let start: u64 = stat.rsplit_once(')').unwrap().1.split_ascii_whitespace().nth(19).unwrap().parse().unwrap();
    forged[16..24].copy_from_slice(&u64::from(std::process::id()).to_ne_bytes());
    forged[24..32].copy_from_slice(&start.to_ne_bytes());
    let forgery = user_directory.join(&name).join("status-1-forged");
    fs::write(&forgery, forged).unwrap();
    chown(&forgery, Some(uid), Some(NOBODY_UID)).unwrap();
    symlink("/etc/shadow", user_directory.join(&name).join("status-1-link")).unwrap();
    symlink("/", user_directory.join("elsewhere")).unwrap();
    let output = run_pagefold(root.path(), &["engine", "status", &name]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(3), "{text}");
    assert!(text.contains("1 record of a member") && !text.contains("elsewhere"), "{text}");
    assert_eq!(read_report()["domains"][0]["members"].as_array().map(Vec::len), Some(1));

    // A directory not owned by that user is rejected as a whole.
    chown(&user_directory, Some(NOBODY_UID), Some(NOBODY_UID)).unwrap();
    let output = run_pagefold(root.path(), &["engine", "status"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(3), "{text}");
    assert!(text.contains(&format!("pagefold-{uid} is not a private directory")), "{text}");
    let output = run_pagefold(root.path(), &["engine", "status", &name]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains(&format!("pagefold-{uid} is not a private directory")));
    drop(user_member);
    drop(removed);
}

/// The account names the shares of store pages, and they add up: 1500 pages of two members, of which one has rewritten
/// 40. The account misses no page because of compaction.
#[test]
fn account_reports_engine_shares() {
    let Some(member) = example_path() else { return };
    let root = domains_root();
    let [first, mut second] = start_two_members(&member, root.path());
    second.run_command("fill 0 40 9");
    let pids: Vec<String> = [&first, &second].iter().map(|member| format!("--pid={}", member.pid())).collect();
    let arguments = ["account", "--json", &pids[0], &pids[1]];
    let account = || report_json(root.path(), "account", &arguments);
    // On a busy machine the kernel may keep a page isolated for a long time.
    let exact = || account()["total"]["engine_pages"].as_u64() == Some(1500 + 1460);
    assert!(during_compaction(|| (0..5).any(|_| exact())), "none of five accounts found all engine pages");
    let account = account();
    let figure = |name: &str| account["total"][name].as_u64();
    assert_eq!(figure("engine_pages"), Some(1500 + 1460), "{account:#}");
    let text = String::from_utf8(run_pagefold(root.path(), &["account", &pids[0], &pids[1]]).stdout).expect("UTF-8");
    assert!(text.contains("engine"), "{text}");
    if !is_root() {
        assert_eq!(figure("engine_saved"), None, "shares need frames, which only root can read");
        return println!("skipped: needs root to read frames");
    }
    // Each page of the store counts once, divided between both members.
    assert_eq!(figure("engine_fair_share"), Some(1500 * PAGE_BYTES), "{account:#}");
    assert_eq!(figure("engine_saved"), Some(1460 * PAGE_BYTES));
    assert!(text.contains("the user-space engine saves them 5.70 MiB"), "{text}");
    for (member, merged, fair) in [(&first, 1500, 1460 / 2 + 40), (&second, 1460, 1460 / 2)] {
        let process = account["processes"].as_array().unwrap().iter().find(|process| process["pid"] == member.pid());
        let process = process.expect("the account has no such process");
        assert_eq!(process["engine_pages"].as_u64(), Some(merged));
        assert_eq!(pages_of(process, "engine_fair_share"), fair);
        assert!(process["fair_share"].as_u64() >= Some(fair * PAGE_BYTES), "a share exceeds the total");
    }
}
