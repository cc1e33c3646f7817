//! Each verdict that a rule declares comes out of reading a host: of a recording as it is, or of a variant of one.
//!
//! A variant is a file in `fixtures/variants`: a recording or another variant, with some files changed, removed or denied,
//! and the verdicts that it must give. It is made in a temporary folder and read as any recording. `UPDATE_GOLDEN=1`
//! rewrites `fixtures/expected/rule-verdicts.txt`.

use pagefold_base::Absent;
use pagefold_doctor::decide::audit::rule_summaries;
use pagefold_doctor::decide::{ksm_rule_summaries, process_rule_summaries};
use pagefold_doctor::doctor_facts::{TrustPolicy, gather_host_facts};
use pagefold_doctor::guest_facts::gather_guest_facts;
use pagefold_doctor::monitor_facts::gather_monitor_facts;
use pagefold_doctor::wire::{DoctorReport, FindingReport, ScopeName, VerdictName};
use pagefold_host::Host;
use pagefold_host::faulty_host::{FaultyHost, InjectedFault};
use pagefold_host::guest_agent::AgentAccess;
use pagefold_host::qemu_monitor::MonitorAccess;
use pagefold_recording::Recording;
use rayon::prelude::*;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// A recording with changes, and the verdicts that it must give.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Variant {
    /// What it is.
    about: String,
    /// The recording or the variant that it is made from.
    from: String,
    /// Files and folders that the host does not have. In all paths, `{own,plain}` stands for the PID of each of these
    /// processes, and `{0-3}` for each of these numbers.
    #[serde(default)]
    remove: Vec<String>,
    /// Files and folders that cannot be read: permission denied.
    #[serde(default)]
    deny: Vec<String>,
    /// Files and folders that cannot be read for another reason, as in `absent.txt`.
    #[serde(default)]
    absent: BTreeMap<String, String>,
    /// Whole files by path.
    #[serde(default)]
    files: BTreeMap<String, String>,
    /// Replacements in files.
    #[serde(default)]
    edits: Vec<Edit>,
    /// The verdicts of rules about the host.
    #[serde(default)]
    host: BTreeMap<String, VerdictName>,
    /// The verdicts of rules about a virtual machine, by its name.
    #[serde(default)]
    machines: BTreeMap<String, BTreeMap<String, VerdictName>>,
    /// The verdicts of rules about a process (`--pid`), by its name in paths.
    #[serde(default)]
    processes: BTreeMap<String, BTreeMap<String, VerdictName>>,
}

/// Replaces a text in a file wherever it occurs.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Edit {
    path: String,
    old: String,
    new: String,
}

/// What a verdict is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Subject {
    Host,
    Machine(String),
    Process(String),
}

/// The verdicts of each rule about each subject. Only `process-region` has several findings about one.
type Verdicts = BTreeMap<(Subject, String), BTreeSet<VerdictName>>;

fn fixtures_path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

/// The names of the files in a folder of the fixtures, without `.toml`.
fn fixture_names(folder: &str) -> Vec<String> {
    let entries = fs::read_dir(fixtures_path().join(folder)).expect("cannot list fixtures");
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap().replace(".toml", "")).collect();
    names.sort();
    assert!(!names.is_empty(), "{folder} is empty");
    names
}

fn read_variant(name: &str) -> Option<Variant> {
    let text = fs::read_to_string(fixtures_path().join(format!("variants/{name}.toml"))).ok()?;
    let variant: Variant = toml::from_str(&text).unwrap_or_else(|error| panic!("variant {name}: {error}"));
    assert!(!variant.about.is_empty(), "variant {name} does not say what it is");
    Some(variant)
}

/// The processes of a recording by name: a virtual machine by its own, another process by the kernel's name of its program,
/// with `.2` for the second one of a name by PID.
type Pids = BTreeMap<String, String>;

fn find_pids(files: &Path) -> io::Result<Pids> {
    let mut pids: Vec<u32> =
        fs::read_dir(files.join("proc"))?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    let mut names = Pids::new();
    for pid in pids {
        let read = |file: &str| fs::read_to_string(files.join(format!("proc/{pid}/{file}"))).unwrap_or_default();
        let (stat, arguments) = (read("stat"), read("cmdline"));
        let machine = arguments.split('\0').skip_while(|argument| *argument != "-name").nth(1).map(|name| {
            let name = name.trim_start_matches("guest=");
            name.split_once(',').map_or(name, |(name, _)| name)
        });
        let program = stat.split_once('(').and_then(|(_, rest)| rest.rsplit_once(')')).map_or("", |(name, _)| name);
        let name = machine.unwrap_or(program).to_owned();
        let numbered = (2..).map(|number| format!("{name}.{number}"));
        let free = std::iter::once(name.clone()).chain(numbered).find(|name| !names.contains_key(name));
        names.insert(free.expect("a number is free"), pid.to_string());
    }
    Ok(names)
}

/// A path for each of the processes and numbers in braces (`{own,plain}`, `{0-3}`), of which a path has at most one pair.
fn expand_path(path: &str, pids: &Pids) -> Vec<String> {
    let Some((start, (parts, end))) =
        path.split_once('{').and_then(|(start, rest)| Some((start, rest.split_once('}')?)))
    else {
        return vec![path.to_owned()];
    };
    let expand = |part: &str| -> Vec<String> {
        let range = || {
            let (first, last) = part.split_once('-')?;
            Some(first.parse::<u32>().ok()?..=last.parse::<u32>().ok()?)
        };
        match (pids.get(part), range()) {
            (Some(pid), _) => vec![pid.clone()],
            (None, Some(numbers)) => numbers.map(|number| number.to_string()).collect(),
            (None, None) => panic!("{path}: {part} is neither a range nor one of the processes {:?}", pids.keys()),
        }
    };
    parts.split(',').flat_map(expand).map(|part| format!("{start}{part}{end}")).collect()
}

/// Copies what the doctor reads of a recording.
fn copy_recording(from: &Path, to: &Path) -> io::Result<()> {
    fn copy_folder(from: &Path, to: &Path) -> io::Result<()> {
        fs::create_dir_all(to)?;
        for entry in fs::read_dir(from)? {
            let entry = entry?;
            let target = to.join(entry.file_name());
            if entry.file_type()?.is_dir() {
                copy_folder(&entry.path(), &target)?;
            } else {
                fs::copy(entry.path(), target)?;
            }
        }
        Ok(())
    }
    copy_folder(&from.join("files"), &to.join("files"))?;
    for name in ["absent.txt", "recording.toml"] {
        fs::copy(from.join(name), to.join(name))?;
    }
    Ok(())
}

/// Makes a variant, or copies a recording, in an empty folder. Returns the processes of the recording.
fn make_host(name: &str, folder: &Path) -> io::Result<Pids> {
    let files = folder.join("files");
    let Some(variant) = read_variant(name) else {
        copy_recording(&fixtures_path().join("recordings").join(name), folder)?;
        return find_pids(&files);
    };
    let pids = make_host(&variant.from, folder)?;
    for path in variant.remove.iter().flat_map(|path| expand_path(path, &pids)) {
        remove_path(&files, &path)?;
        set_listed(&files, &path, false)?;
    }
    for (path, text) in &variant.files {
        for path in expand_path(path, &pids) {
            write_file(&files, &path, text)?;
        }
    }
    for Edit { path, old, new } in &variant.edits {
        for path in expand_path(path, &pids) {
            let text = fs::read_to_string(files.join(&path))?;
            assert!(text.contains(old.as_str()), "variant {name}: {path} does not contain {old:?}");
            fs::write(files.join(&path), text.replace(old.as_str(), new))?;
        }
    }
    write_absences(&variant, folder, &pids)?;
    Ok(pids)
}

/// Removes what cannot be read, with the reasons in `absent.txt`, and the reasons there for what the variant has.
fn write_absences(variant: &Variant, folder: &Path, pids: &Pids) -> io::Result<()> {
    let text = fs::read_to_string(folder.join("absent.txt"))?;
    let mut absent: Vec<(String, String)> = text
        .lines()
        .filter_map(|line| line.split_once('\t'))
        .map(|(path, why)| (path.to_owned(), why.to_owned()))
        .collect();
    for path in variant.files.keys().flat_map(|path| expand_path(path, pids)) {
        absent.retain(|(other, _)| !is_at_or_below(&path, other));
    }
    let denied = variant.deny.iter().map(|path| (path, "denied"));
    let others = variant.absent.iter().map(|(path, why)| (path, why.as_str()));
    for (path, why) in denied.chain(others) {
        for path in expand_path(path, pids) {
            remove_path(&folder.join("files"), &path)?;
            absent.retain(|(other, _)| !is_at_or_below(other, &path));
            absent.push((path, why.to_owned()));
        }
    }
    let lines: String = absent.iter().map(|(path, why)| format!("{path}\t{why}\n")).collect();
    fs::write(folder.join("absent.txt"), lines)
}

/// Whether a path is a folder or below it.
fn is_at_or_below(path: &str, folder: &str) -> bool {
    path.strip_prefix(folder).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Removes a file with its mode, or a folder. It need not exist: what was recorded as absent can be denied.
fn remove_path(files: &Path, path: &str) -> io::Result<()> {
    let target = files.join(path);
    if target.is_dir() {
        return fs::remove_dir_all(target);
    }
    for file in [path.to_owned(), format!("{path}.mode"), format!("{path}.links")] {
        match fs::remove_file(files.join(file)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Writes a file, which the folders above it then list.
fn write_file(files: &Path, path: &str, text: &str) -> io::Result<()> {
    let target = files.join(path);
    fs::create_dir_all(target.parent().expect("a path below files"))?;
    fs::write(target, text)?;
    let mut listed = path.trim_end_matches("/.names").trim_end_matches(".mode");
    while !listed.is_empty() {
        set_listed(files, listed, true)?;
        listed = listed.rsplit_once('/').map_or("", |(folder, _)| folder);
    }
    Ok(())
}

/// Adds a name to the recorded names of its folder, or removes it.
fn set_listed(files: &Path, path: &str, is_listed: bool) -> io::Result<()> {
    let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
    let names_path = files.join(folder).join(".names");
    let names = fs::read_to_string(&names_path).unwrap_or_default();
    let mut names: Vec<&str> = names.lines().filter(|listed| *listed != name).collect();
    names.extend(is_listed.then_some(name));
    fs::create_dir_all(files.join(folder))?;
    fs::write(names_path, names.iter().flat_map(|name| [name, "\n"]).collect::<String>())
}

fn open_recording(folder: &Path) -> Recording {
    Recording::open(folder).unwrap_or_else(|error| panic!("{error}"))
}

/// What `pagefold doctor --guest-agent` tells of a host, and `--pid` of each of its processes.
fn examine(host: &dyn Host) -> Verdicts {
    let mut facts = gather_host_facts(host, &[], &TrustPolicy::default());
    gather_monitor_facts(host, facts.settings.vms.iter_mut(), MonitorAccess::Socket);
    gather_guest_facts(host, facts.settings.vms.iter_mut(), AgentAccess::Socket);
    let mut findings = DoctorReport::from_host(String::new(), &facts).findings;
    for process in facts.processes.iter().filter(|process| process.process.id.pid.0 > 0) {
        findings.extend(DoctorReport::from_processes(String::new(), &facts, &[process]).findings);
    }
    let mut verdicts = Verdicts::new();
    for finding in findings {
        verdicts.entry((subject_of(&finding), finding.rule.into_owned())).or_default().insert(finding.verdict);
    }
    verdicts
}

fn subject_of(finding: &FindingReport) -> Subject {
    match finding.scope {
        ScopeName::Host => Subject::Host,
        ScopeName::Process => Subject::Process(finding.pid.expect("a process has a pid").to_string()),
        _ => Subject::Machine(finding.machine.clone().expect("a machine has a name")),
    }
}

/// The verdicts that a variant must give.
fn expected_verdicts<'v>(variant: &'v Variant, pids: &Pids) -> Vec<(Subject, &'v str, VerdictName)> {
    fn list(subject: Subject, rules: &BTreeMap<String, VerdictName>) -> Vec<(Subject, &str, VerdictName)> {
        rules.iter().map(|(rule, verdict)| (subject.clone(), rule.as_str(), *verdict)).collect()
    }
    let machines = variant.machines.iter().flat_map(|(name, rules)| list(Subject::Machine(name.clone()), rules));
    let pid = |name: &String| pids.get(name).unwrap_or_else(|| panic!("no process {name}: {:?}", pids.keys())).clone();
    let processes = variant.processes.iter().flat_map(|(name, rules)| list(Subject::Process(pid(name)), rules));
    list(Subject::Host, &variant.host).into_iter().chain(machines).chain(processes).collect()
}

/// The name of a verdict in files.
fn verdict_word(verdict: VerdictName) -> String {
    serde_json::to_value(verdict).unwrap().as_str().unwrap().to_owned()
}

/// The verdicts of each rule over all recordings as they are.
fn recorded_verdicts() -> BTreeSet<(String, VerdictName)> {
    let recordings = fixtures_path().join("recordings");
    let examined =
        fixture_names("recordings").into_iter().flat_map(|name| examine(&open_recording(&recordings.join(name))));
    examined
        .flat_map(|((_, rule), verdicts)| verdicts.into_iter().map(move |verdict| (rule.clone(), verdict)))
        .collect()
}

/// The verdicts that variants give as they must, each with the first variant that gives it; and those that differ.
fn verdicts_of_variants() -> (BTreeMap<(String, VerdictName), String>, Vec<String>) {
    let (mut given, mut differences) = (BTreeMap::new(), Vec::new());
    for name in fixture_names("variants") {
        let folder = tempfile::tempdir().unwrap();
        let pids = make_host(&name, folder.path()).unwrap_or_else(|error| panic!("variant {name}: {error}"));
        let examined = examine(&open_recording(folder.path()));
        let variant = read_variant(&name).expect("a variant");
        for (subject, rule, expected) in expected_verdicts(&variant, &pids) {
            let found = examined.get(&(subject.clone(), rule.to_owned())).cloned().unwrap_or_default();
            if found == BTreeSet::from([expected]) {
                given.entry((rule.to_owned(), expected)).or_insert_with(|| name.clone());
            } else {
                differences.push(format!("{name}: {subject:?} {rule}: expected {expected:?}, found {found:?}"));
            }
        }
    }
    (given, differences)
}

/// The verdicts of rules on a real kernel in a guest, before and after `tune apply`, as the test of the command line that
/// boots the guest stores them.
fn guest_verdicts() -> BTreeSet<(String, VerdictName)> {
    let text = fs::read_to_string(fixtures_path().join("expected/guest-verdicts.txt")).unwrap();
    let declared = declared_verdicts();
    let of_line = |line: &str| {
        let (rule, words) = line.split_once(": ").unwrap();
        let verdict_of =
            |word: &str| declared.iter().find(|(id, verdict)| *id == rule && verdict_word(*verdict) == word);
        let verdicts: Vec<_> = words.split(", ").map(|word| verdict_of(word).expect(line).1).collect();
        verdicts.into_iter().map(|verdict| (rule.to_owned(), verdict)).collect::<Vec<_>>()
    };
    text.lines().flat_map(of_line).collect()
}

/// A line for each rule: the verdicts over the recordings as they are, then those that only the guest of `tune apply` gives,
/// then those that only variants give.
fn render_list(
    recorded: &BTreeSet<(String, VerdictName)>,
    guest: &BTreeSet<(String, VerdictName)>,
    variants: &BTreeMap<(String, VerdictName), String>,
) -> String {
    let of_rule =
        |rule: &str| recorded.iter().filter(|(id, _)| id == rule).map(|(_, verdict)| *verdict).collect::<Vec<_>>();
    let is_judgment =
        |verdict: &VerdictName| matches!(verdict, VerdictName::Ok | VerdictName::Warn | VerdictName::Fail);
    let rules: BTreeSet<&'static str> = declared_verdicts().into_iter().map(|(rule, _)| rule).collect();
    let judging = rules.iter().filter(|rule| of_rule(rule).iter().any(is_judgment)).count();
    let mut text = format!("{judging} of {} rules judge a recorded host as it is: ok, warn or fail\n", rules.len());
    for rule in rules {
        let words: Vec<String> = of_rule(rule).into_iter().map(verdict_word).collect();
        let only_guest: Vec<String> = guest
            .difference(recorded)
            .filter(|(id, _)| id == rule)
            .map(|(_, verdict)| verdict_word(*verdict))
            .collect();
        let only: Vec<String> = variants
            .iter()
            .filter(|((id, _), _)| id == rule)
            .filter(|(verdict, _)| !recorded.contains(verdict) && !guest.contains(verdict))
            .map(|((_, verdict), variant)| format!("{} ({variant})", verdict_word(*verdict)))
            .collect();
        text += &format!("{rule}: {}", if words.is_empty() { "-".to_owned() } else { words.join(", ") });
        if !only_guest.is_empty() {
            text += &format!("; guest: {}", only_guest.join(", "));
        }
        text += &if only.is_empty() { "\n".to_owned() } else { format!("; variants: {}\n", only.join(", ")) };
    }
    text
}

/// The verdicts that each rule declares.
fn declared_verdicts() -> Vec<(&'static str, VerdictName)> {
    let rules = ksm_rule_summaries().into_iter().chain(process_rule_summaries()).chain(rule_summaries());
    rules.flat_map(|rule| rule.verdicts.iter().map(move |verdict| (rule.id, VerdictName::from(*verdict)))).collect()
}

#[test]
fn each_declared_verdict_comes_from_a_recorded_host() {
    let recorded = recorded_verdicts();
    let (variants, differences) = verdicts_of_variants();
    assert!(differences.is_empty(), "verdicts of variants differ:\n{}", differences.join("\n"));
    let is_given = |(rule, verdict): &(&str, VerdictName)| {
        let key = ((*rule).to_owned(), *verdict);
        recorded.contains(&key) || variants.contains_key(&key)
    };
    let missing: Vec<_> = declared_verdicts().into_iter().filter(|verdict| !is_given(verdict)).collect();
    assert!(missing.is_empty(), "no recording and no variant gives these verdicts: {missing:#?}");
    let path = fixtures_path().join("expected/rule-verdicts.txt");
    let list = render_list(&recorded, &guest_verdicts(), &variants);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(path, list).unwrap();
        return;
    }
    let expected = fs::read_to_string(path).unwrap();
    let changed: Vec<&str> = list.lines().filter(|line| !expected.lines().any(|other| other == *line)).collect();
    assert!(list == expected, "rule-verdicts.txt differs: if this is right, run with UPDATE_GOLDEN=1: {changed:#?}");
}

/// Hosts that together have a warning or failure of most rules.
const FAULTY_HOSTS: [&str; 3] = ["flags-lost", "guests-answer", "redefined-domain"];

/// What is wrong, or not known, on a host must not become `ok` or `not_applicable` because a file cannot be read.
#[test]
fn file_that_cannot_be_read_makes_no_verdict_better() {
    for name in FAULTY_HOSTS {
        let folder = tempfile::tempdir().unwrap();
        make_host(name, folder.path()).unwrap();
        let recording = open_recording(folder.path());
        let requested = Mutex::new(BTreeSet::new());
        let readable = examine(&FaultyHost::new(&recording, |path| {
            requested.lock().unwrap().insert(path.to_owned());
            None
        }));
        let requested = requested.into_inner().unwrap();
        assert!(requested.len() > 50, "{requested:?}");
        let better: Vec<String> = requested
            .par_iter()
            .flat_map_iter(|path| {
                let deny = |asked: &str| (asked == path).then_some(InjectedFault::Absent(Absent::Denied));
                better_verdicts(&readable, &examine(&FaultyHost::new(&recording, deny)), path)
            })
            .collect();
        assert!(better.is_empty(), "{name}:\n{}", better.join("\n"));
    }
}

/// The verdicts that are better without a file. A subject that was not found has none.
fn better_verdicts(readable: &Verdicts, denied: &Verdicts, path: &str) -> Vec<String> {
    let is_bad = |verdict: &VerdictName| *verdict >= VerdictName::Unknown;
    let better = readable.iter().filter_map(|(key, before)| {
        let after = denied.get(key)?;
        let is_better = before.iter().any(is_bad) && !after.iter().any(is_bad);
        is_better.then(|| format!("without {path}: {key:?} was {before:?} and is {after:?}"))
    });
    better.collect()
}
