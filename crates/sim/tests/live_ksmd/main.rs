//! Plays each layout on the model and on the real kernel, and compares all counters after each batch of ksmd: on this
//! host, and in emulated machines with other kernels.
//!
//! Needs root, and no mergeable process on the host. This program is also the stand-in process: with the argument
//! `stand-in` it maps and writes memory as its standard input says. With other arguments it plays on this kernel only:
//! `here` plays all layouts, `further=N` adds N layouts with other seeds, and parts of names choose layouts.
//!
//! ksmd scans only within [`Driver::run_batch`]: `run` 1 starts a batch at once, and the long `sleep_millisecs` ends
//! it. A change of `sleep_millisecs` while `run` is 0 then takes ksmd back to where `run` 1 wakes it
//! (`ksm_scan_thread`, mm/ksm.c, 6.1 and 6.12).

#![forbid(unsafe_code)]

mod guest_kernels;

use std::collections::BTreeMap;
use std::env;
use std::fs::{self, OpenOptions};
use std::hint::black_box;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use pagefold_labs::ksm::KsmTestGuard;
use pagefold_sim::decide::counters::{KsmdCounters, ProcessCounters};
use pagefold_sim::decide::ksmd::{Advice, KsmModel, KsmSettings, RunState};
use pagefold_sim::decide::layouts::{LayoutStep, all_layouts, further_layout};
use pagefold_sim::decide::memory::{Content, PAGES_IN_HUGE_PAGE, SimulatedProcessId};
use pagefold_sim::decide::rules::{KernelVersion, KsmRules};
use pagefold_sys::forked_copy::ForkedCopy;
use pagefold_sys::mapping::{MadviseAdvice, Mapping};
use pagefold_sys::numa;

const PAGE: u64 = 4096;

/// The argument to play on this kernel only.
const ON_THIS_KERNEL: &str = "here";

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    if arguments.first().is_some_and(|first| first == "stand-in") {
        obey();
        return ExitCode::SUCCESS;
    }
    let mut outcome = play_on_this_kernel(&arguments).unwrap_or_else(|why| {
        println!("skipped: {why}");
        Outcome::default()
    });
    if arguments.is_empty() {
        outcome.add(guest_kernels::play_on_guest_kernels());
    }
    let Outcome { equal, differing } = outcome;
    if !differing.is_empty() {
        println!("counters differ in {} layouts: {}", differing.len(), differing.join(", "));
    }
    // The line that the summary of `make test` keeps.
    let verdict = if differing.is_empty() { "ok" } else { "FAILED" };
    println!("test result: {verdict}. {equal} passed; {} failed", differing.len());
    if differing.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Played layouts.
#[derive(Default)]
struct Outcome {
    /// How many had equal counters throughout.
    equal: usize,
    /// The names of the others.
    differing: Vec<String>,
}

impl Outcome {
    fn add(&mut self, other: Self) {
        self.equal += other.equal;
        self.differing.extend(other.differing);
    }
}

/// # Errors
/// The reason if nothing can be played.
fn play_on_this_kernel(arguments: &[String]) -> Result<Outcome, String> {
    let guard = KsmTestGuard::acquire()?;
    if let Some(pid) = foreign_mergeable_process(&[]) {
        return Err(format!("process {pid} is enrolled in KSM, and ksmd would scan it too"));
    }
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").expect("the kernel has a release");
    let version = KernelVersion::parse(release.trim()).expect("the release has a version");
    let nodes = (0..u8::MAX).take_while(|node| Path::new(&format!("/sys/devices/system/node/node{node}")).exists());
    let nodes = u8::try_from(nodes.count()).expect("at most 255 nodes").max(1);
    let further = arguments.iter().find_map(|argument| argument.strip_prefix("further=")?.parse().ok()).unwrap_or(0);
    let parts: Vec<&String> =
        arguments.iter().filter(|argument| !argument.contains('=') && *argument != ON_THIS_KERNEL).collect();
    let is_chosen = |name: &str| parts.is_empty() || parts.iter().any(|part| name.contains(part.as_str()));
    let layouts = all_layouts().into_iter().chain((0..further).map(further_layout));
    let mut outcome = Outcome::default();
    let (mut scans, mut comparisons) = (0, 0);
    for layout in layouts.filter(|layout| is_chosen(&layout.name)) {
        if layout.nodes > nodes {
            println!("skipped: this kernel has {nodes} NUMA node: layout {} needs {}", layout.name, layout.nodes);
            continue;
        }
        let mut driver = Driver::start(&guard, version);
        let mut steps = layout.steps.iter().enumerate();
        match steps
            .try_for_each(|(number, step)| driver.play(step).map_err(|why| format!("step {number}, {step:?}: {why}")))
        {
            Ok(()) => {
                println!("equal: {}, {} scans, {} comparisons", layout.name, driver.scans, driver.comparisons);
                outcome.equal += 1;
            }
            Err(why) => {
                println!("different: {}: {why}", layout.name);
                outcome.differing.push(layout.name.clone());
            }
        }
        (scans, comparisons) = (scans + driver.scans, comparisons + driver.comparisons);
    }
    let played = outcome.equal + outcome.differing.len();
    println!("{played} layouts, {scans} scans, {comparisons} comparisons of all counters");
    Ok(outcome)
}

/// A process that ksmd would scan and that is not one of `own`, if there is one.
fn foreign_mergeable_process(own: &[u32]) -> Option<u32> {
    let pids = fs::read_dir("/proc")
        .expect("/proc is readable")
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    pids.into_iter().filter(|pid| !own.contains(pid)).find(|pid| {
        let counters = fs::read_to_string(format!("/proc/{pid}/ksm_stat")).unwrap_or_default();
        let is_enrolled = counters.lines().any(|line| line == "ksm_mergeable: yes" || line == "ksm_merge_any: yes");
        is_enrolled || stat_value(&counters, "ksm_rmap_items").is_some_and(|items| items > 0)
    })
}

fn stat_value(text: &str, name: &str) -> Option<i64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.trim_start_matches(':').trim().parse().ok())
}

/// A process of a layout on the kernel.
enum RealProcess {
    Parent { child: Child, stdin: ChildStdin, stdout: BufReader<ChildStdout> },
    Forked { pid: u32, parent: usize },
    Ended,
}

/// A region of a layout.
#[derive(Clone, Copy)]
struct RealRegion {
    process: usize,
    /// Its number in the stand-in.
    number: usize,
    address: u64,
    pages: u64,
}

/// Plays steps on both sides.
struct Driver<'a> {
    guard: &'a KsmTestGuard,
    rules: KsmRules,
    model: KsmModel,
    ksmd: PathBuf,
    processes: Vec<(RealProcess, SimulatedProcessId)>,
    regions: Vec<RealRegion>,
    before: BTreeMap<&'static str, i64>,
    scans: u64,
    comparisons: u64,
}

impl<'a> Driver<'a> {
    /// Begin with nothing merged and no scan counted.
    fn start(guard: &'a KsmTestGuard, version: KernelVersion) -> Self {
        let rules = KsmRules::for_version(version);
        let settings = KsmSettings::default();
        let mut driver = Self {
            guard,
            rules,
            model: KsmModel::new(rules, settings),
            ksmd: ksmd_directory(),
            processes: Vec::new(),
            regions: Vec::new(),
            before: BTreeMap::new(),
            scans: 0,
            comparisons: 0,
        };
        driver.unmerge_all();
        driver.guard.write_setting("run", 0);
        driver.park_ksmd();
        driver.write_settings(&settings);
        for name in ["pages_skipped", "pages_scanned"] {
            if guard.read_setting(name).is_some() {
                driver.before.insert(name, guard.read_counter(name));
            }
        }
        driver
    }

    /// Write `run` 2, which unmerges all processes of the host.
    ///
    /// # Panics
    /// If another process has become mergeable since the start.
    fn unmerge_all(&self) {
        let own: Vec<u32> = self.processes.iter().filter_map(|(process, _)| pid_of(process)).collect();
        let foreign = foreign_mergeable_process(&own);
        assert_eq!(foreign, None, "a process that is not of this test became mergeable");
        self.guard.write_setting("run", 0);
        self.guard.write_setting("run", 2);
    }

    fn write_settings(&self, settings: &KsmSettings) {
        self.guard.write_setting("pages_to_scan", settings.pages_to_scan);
        let prune = settings.stable_node_chains_prune_millisecs;
        self.guard.write_setting("stable_node_chains_prune_millisecs", prune);
        self.guard.write_setting("use_zero_pages", u8::from(settings.use_zero_pages));
        if self.rules.has_smart_scan {
            self.guard.write_setting("smart_scan", u8::from(settings.smart_scan));
        }
        self.guard.write_setting("max_page_sharing", settings.max_page_sharing);
        self.guard.write_setting("merge_across_nodes", u8::from(settings.merge_across_nodes));
    }

    /// How often ksmd has gone to sleep, once it sleeps between two batches.
    fn sleeping_ksmd(&self, after: u64) -> u64 {
        let started = Instant::now();
        loop {
            let status = fs::read_to_string(self.ksmd.join("status")).expect("ksmd has a status");
            let sleeps = stat_value(&status, "voluntary_ctxt_switches").expect("the status has it").cast_unsigned();
            let place = fs::read_to_string(self.ksmd.join("wchan")).expect("ksmd has a wchan");
            if sleeps > after && place == "ksm_scan_thread" {
                return sleeps;
            }
            assert!(started.elapsed() < Duration::from_secs(60), "ksmd does not sleep: {place}");
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// With `run` 0, take ksmd from the pause between batches to where `run` 1 wakes it.
    fn park_ksmd(&self) {
        let sleeps = self.sleeping_ksmd(0);
        let pause = self.guard.read_counter("sleep_millisecs");
        self.guard.write_setting("sleep_millisecs", if pause == 3_600_000 { 3_600_001 } else { 3_600_000 });
        // ksmd wakes only if it was in the pause.
        let started = Instant::now();
        while started.elapsed() < Duration::from_millis(3) && self.sleeping_ksmd(0) == sleeps {}
        self.sleeping_ksmd(0);
    }

    fn run_batch(&mut self) -> Result<(), String> {
        // Pages that wait in a CPU's list of new pages cannot merge. This call empties the lists.
        if let Some(pid) = self.processes.iter().find_map(|(process, _)| pid_of(process)) {
            numa::move_pages(pid, &[], 0).map_err(|error| format!("move_pages: {error}"))?;
        }
        let sleeps = self.sleeping_ksmd(0);
        self.guard.write_setting("run", 1);
        self.sleeping_ksmd(sleeps);
        self.guard.write_setting("run", 0);
        self.park_ksmd();
        self.model.write_run(RunState::Merging);
        self.model.run_batch();
        self.model.write_run(RunState::Stopped);
        self.compare()
    }

    fn compare(&mut self) -> Result<(), String> {
        self.comparisons += 1;
        if let Some(broken) = self.model.broken_invariant() {
            return Err(broken);
        }
        let simulated = self.model.counters();
        let real = self.real_counters(&simulated);
        if real != simulated {
            return Err(format!("scan {}: kernel {real:?}, model {simulated:?}", self.scans));
        }
        for (number, (process, id)) in self.processes.iter().enumerate() {
            let Some(pid) = pid_of(process) else { continue };
            let simulated = self.model.process_counters(*id);
            let real = real_process_counters(pid, &simulated);
            if real != simulated {
                return Err(format!("scan {}, process {number}: kernel {real:?}, model {simulated:?}", self.scans));
            }
        }
        Ok(())
    }

    /// The kernel's counters. Those that the kernel does not have are the model's.
    fn real_counters(&self, simulated: &KsmdCounters) -> KsmdCounters {
        let read = |name: &str| {
            let since = self.before.get(name).copied().unwrap_or(0);
            self.guard.read_setting(name).map(|_| self.guard.read_counter(name) - since)
        };
        let count = |name: &str, otherwise: u64| read(name).map_or(otherwise, i64::cast_unsigned);
        KsmdCounters {
            full_scans: count("full_scans", 0),
            pages_shared: count("pages_shared", 0),
            pages_sharing: count("pages_sharing", 0),
            pages_unshared: count("pages_unshared", 0),
            pages_volatile: count("pages_volatile", 0),
            pages_skipped: count("pages_skipped", simulated.pages_skipped),
            pages_scanned: count("pages_scanned", simulated.pages_scanned),
            ksm_zero_pages: read("ksm_zero_pages").unwrap_or(simulated.ksm_zero_pages),
            stable_node_chains: count("stable_node_chains", 0),
            stable_node_dups: count("stable_node_dups", 0),
            general_profit: read("general_profit").unwrap_or(simulated.general_profit),
        }
    }

    fn play(&mut self, step: &LayoutStep) -> Result<(), String> {
        match step {
            LayoutStep::Spawn => {
                let id = self.model.spawn();
                self.processes.push((start_stand_in(), id));
            }
            &LayoutStep::Map { process, pages, huge, node } => self.map(process, pages, huge, node),
            &LayoutStep::Advise { region, first, pages, advice } => self.advise(region, first, pages, advice),
            LayoutStep::Write { process, region, pages } => self.write(*process, *region, pages),
            &LayoutStep::Read { region, page } => {
                let RealRegion { process, number, address, .. } = self.regions[region];
                self.ask(process, &format!("read {number} {page}"));
                self.model.read(self.processes[process].1, address / PAGE + page);
            }
            &LayoutStep::Unmap { region } => {
                let RealRegion { process, number, address, pages } = self.regions[region];
                self.ask(process, &format!("unmap {number}"));
                self.model.unmap(self.processes[process].1, address / PAGE, pages);
            }
            &LayoutStep::Fork { process } => {
                let pid = self.ask(process, "fork").parse().expect("a stand-in prints the child's PID");
                let child = self.model.fork(self.processes[process].1);
                self.processes.push((RealProcess::Forked { pid, parent: process }, child));
            }
            &LayoutStep::Exit { process } => self.exit(process),
            LayoutStep::Set(settings) => {
                self.write_settings(settings);
                assert!(self.model.write_settings(*settings), "the model refuses {settings:?}");
            }
            &LayoutStep::Run(run) => {
                match run {
                    RunState::Unmerged => self.unmerge_all(),
                    RunState::Stopped | RunState::Merging => self.guard.write_setting("run", 0),
                }
                self.model.write_run(run);
                return self.compare();
            }
            &LayoutStep::Batches(batches) => return (0..batches).try_for_each(|_| self.run_batch()),
            &LayoutStep::Scans(scans) => return (0..scans).try_for_each(|_| self.run_scan()),
        }
        Ok(())
    }

    /// Batches until a scan ends. Without processes on ksmd's list there is nothing to end.
    fn run_scan(&mut self) -> Result<(), String> {
        let before = self.model.counters();
        loop {
            let scanned = self.model.counters().pages_scanned;
            self.run_batch()?;
            let now = self.model.counters();
            if now.full_scans > before.full_scans || now.pages_scanned == scanned {
                self.scans += 1;
                return Ok(());
            }
        }
    }

    fn ask(&mut self, process: usize, command: &str) -> String {
        let RealProcess::Parent { stdin, stdout, .. } = &mut self.processes[process].0 else {
            panic!("process {process} takes no commands: {command}");
        };
        writeln!(stdin, "{command}").expect("the stand-in reads its standard input");
        let mut answer = String::new();
        stdout.read_line(&mut answer).expect("the stand-in answers");
        assert!(answer.ends_with('\n'), "the stand-in ended at {command:.80}");
        answer.trim_end().to_owned()
    }

    fn map(&mut self, process: usize, pages: u64, huge: bool, node: u8) {
        let number = self.regions.iter().filter(|region| region.process == process).count();
        let address = self.ask(process, &format!("map {pages} {} {node}", u8::from(huge)));
        let address: u64 = address.parse().expect("a stand-in prints the address");
        let id = self.processes[process].1;
        let start = address / PAGE;
        self.model.map(id, start, pages, node);
        if huge {
            for page in (start..start + pages).step_by(PAGES_IN_HUGE_PAGE as usize) {
                self.model.fault_huge_page(id, page);
            }
        }
        self.regions.push(RealRegion { process, number, address, pages });
    }

    fn advise(&mut self, region: usize, first: u64, pages: u64, advice: Advice) {
        let RealRegion { process, number, address, .. } = self.regions[region];
        let word = match advice {
            Advice::Mergeable => "mergeable",
            Advice::Unmergeable => "unmergeable",
            Advice::DontNeed => "dontneed",
        };
        self.ask(process, &format!("advise {number} {first} {pages} {word}"));
        self.model.advise(self.processes[process].1, address / PAGE + first, pages, advice);
    }

    fn write(&mut self, process: usize, region: usize, pages: &[(u64, Content)]) {
        let RealRegion { number, address, .. } = self.regions[region];
        let (real, id) = (&self.processes[process].0, self.processes[process].1);
        if let RealProcess::Forked { pid, .. } = real {
            let memory = OpenOptions::new().write(true).open(format!("/proc/{pid}/mem")).expect("root may open it");
            for &(page, content) in pages {
                memory.write_all_at(&content.to_be_bytes(), address + page * PAGE).expect("the child has the page");
            }
        } else {
            let list: Vec<String> = pages.iter().map(|(page, content)| format!("{page} {content}")).collect();
            self.ask(process, &format!("write {number} {}", list.join(" ")));
        }
        for &(page, content) in pages {
            self.model.write(id, address / PAGE + page, content);
        }
    }

    fn exit(&mut self, process: usize) {
        match std::mem::replace(&mut self.processes[process].0, RealProcess::Ended) {
            RealProcess::Parent { mut child, .. } => {
                child.kill().expect("a stand-in can be killed");
                child.wait().expect("a stand-in can be reaped");
            }
            RealProcess::Forked { pid, parent } => {
                self.ask(parent, &format!("end {pid}"));
            }
            RealProcess::Ended => panic!("process {process} ended before"),
        }
        self.model.exit(self.processes[process].1);
    }
}

impl Drop for Driver<'_> {
    fn drop(&mut self) {
        for (process, _) in &mut self.processes {
            if let RealProcess::Parent { child, .. } = process {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
        // Children end with their parents, but a little later.
        let children = self.processes.iter().filter_map(|(process, _)| match process {
            RealProcess::Forked { pid, .. } => Some(*pid),
            _ => None,
        });
        for pid in children {
            let started = Instant::now();
            while has_memory(pid) && started.elapsed() < Duration::from_secs(10) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        if foreign_mergeable_process(&[]).is_none() {
            self.guard.write_setting("run", 2);
        }
        self.guard.write_setting("run", 0);
    }
}

fn pid_of(process: &RealProcess) -> Option<u32> {
    match process {
        RealProcess::Parent { child, .. } => Some(child.id()),
        RealProcess::Forked { pid, .. } => Some(*pid),
        RealProcess::Ended => None,
    }
}

/// Whether a process has not given up its memory.
fn has_memory(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/ksm_stat")).is_ok_and(|text| !text.is_empty())
}

/// The kernel's counters of a process. Those that the kernel does not have are the model's.
fn real_process_counters(pid: u32, simulated: &ProcessCounters) -> ProcessCounters {
    let text = fs::read_to_string(format!("/proc/{pid}/ksm_stat")).expect("the process is alive");
    let merging = fs::read_to_string(format!("/proc/{pid}/ksm_merging_pages")).expect("the process is alive");
    ProcessCounters {
        ksm_rmap_items: stat_value(&text, "ksm_rmap_items").expect("each kernel has it"),
        ksm_merging_pages: merging.trim().parse().expect("a number"),
        ksm_zero_pages: stat_value(&text, "ksm_zero_pages").unwrap_or(simulated.ksm_zero_pages),
        ksm_process_profit: stat_value(&text, "ksm_process_profit").unwrap_or(simulated.ksm_process_profit),
    }
}

fn ksmd_directory() -> PathBuf {
    let directories = fs::read_dir("/proc").expect("/proc is readable").filter_map(|entry| Some(entry.ok()?.path()));
    let is_ksmd = |path: &PathBuf| fs::read_to_string(path.join("comm")).is_ok_and(|name| name == "ksmd\n");
    directories.into_iter().find(is_ksmd).expect("a kernel with KSM has ksmd")
}

fn start_stand_in() -> RealProcess {
    let mut child = Command::new(env::current_exe().expect("this program has a path"))
        .arg("stand-in")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a stand-in starts");
    let stdin = child.stdin.take().expect("it is piped");
    let stdout = BufReader::new(child.stdout.take().expect("it is piped"));
    RealProcess::Parent { child, stdin, stdout }
}

/// The stand-in: obeys one command a line, and answers each with a line.
fn obey() {
    let mut mappings: Vec<Option<Mapping>> = Vec::new();
    let mut children: Vec<ForkedCopy> = Vec::new();
    for line in std::io::stdin().lines() {
        let line = line.expect("commands are text");
        let words: Vec<&str> = line.split(' ').collect();
        let number = |position: usize| words[position].parse::<usize>().expect("a number");
        let page = PAGE as usize;
        let mut answer = String::from("done");
        match words[0] {
            "map" => {
                let mapping = map_region(number(1) * page, number(2) == 1, number(3));
                answer = mapping.address().to_string();
                mappings.push(Some(mapping));
            }
            "advise" => {
                let advice = match words[4] {
                    "mergeable" => MadviseAdvice::Mergeable,
                    "unmergeable" => MadviseAdvice::Unmergeable,
                    _ => MadviseAdvice::DontNeed,
                };
                let start = number(2) * page;
                mapped(&mut mappings, number(1))
                    .advise(start..start + number(3) * page, advice)
                    .expect("the kernel takes the advice");
            }
            "write" => {
                let bytes = mapped(&mut mappings, number(1)).as_mut_slice();
                for pair in words[2..].chunks(2) {
                    let start = pair[0].parse::<usize>().expect("a page") * page;
                    let content: Content = pair[1].parse().expect("a content");
                    bytes[start..start + 4].copy_from_slice(&content.to_be_bytes());
                }
            }
            "read" => {
                black_box(mapped(&mut mappings, number(1)).as_slice()[number(2) * page]);
            }
            "unmap" => mappings[number(1)] = None,
            "fork" => {
                let child = ForkedCopy::new().expect("a stand-in can fork");
                answer = child.pid().to_string();
                children.push(child);
            }
            "end" => children.retain(|child| child.pid() as usize != number(1)),
            other => panic!("unknown command {other}"),
        }
        println!("{answer}");
    }
}

fn mapped(mappings: &mut [Option<Mapping>], number: usize) -> &mut Mapping {
    mappings[number].as_mut().expect("the region is mapped")
}

/// Untouched memory without huge pages, or memory filled with huge pages of zeros.
fn map_region(bytes: usize, huge: bool, node: usize) -> Mapping {
    let huge_bytes = PAGES_IN_HUGE_PAGE as usize * PAGE as usize;
    let alignment = if huge { huge_bytes } else { PAGE as usize };
    let mut mapping = Mapping::anonymous_aligned(bytes, alignment).expect("memory can be mapped");
    if Path::new("/sys/devices/system/node/node1").exists() {
        let start = usize::try_from(mapping.address()).expect("an address");
        numa::prefer_node(start, bytes, u32::try_from(node).expect("a node")).expect("the node exists");
    }
    if huge {
        mapping.advise(0..bytes, MadviseAdvice::HugePage).expect("the kernel has huge pages");
        for start in (0..bytes).step_by(huge_bytes) {
            mapping.as_mut_slice()[start] = 0;
        }
        mapping.advise(0..bytes, MadviseAdvice::Collapse).expect("there is memory for huge pages");
    }
    // Also keeps khugepaged from rebuilding what ksmd splits.
    mapping.advise(0..bytes, MadviseAdvice::NoHugePage).expect("the kernel has huge pages");
    mapping
}
