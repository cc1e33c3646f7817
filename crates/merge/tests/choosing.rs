//! What a census chooses to enrol, on made-up hosts: never what must not be covered, always what it counts.

use pagefold_base::ksm::RMAP_ITEM_BYTES;
use pagefold_base::savings::Costs;
use pagefold_base::{Absent, AddressRange, Bytes, Counts, Fingerprint, PageSize, Pages, Pfn, Pid, ProcessId, Reading};
use pagefold_census::decide::sketch::rank;
use pagefold_census::results::{Census, IdleRange};
use pagefold_census::{Index, Options, Progress, Second, Selection, take, take_again, take_under};
use pagefold_host::act::{Action, Effect, Refusal};
use pagefold_host::{FrameFlags, Host, Mapping, PageContent, PageView, Process, Run, Way};
use pagefold_merge::decide::outcome::Fate;
use pagefold_merge::decide::plan::{Constraints, Plan, Speed};
use pagefold_merge::{Ages, Probes};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[path = "choosing/recall.rs"]
mod recall;
#[path = "choosing/witnesses.rs"]
mod witnesses;

const BASE: u64 = 1 << 40;
const PAGE: u64 = 4096;

/// A page of a made-up process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Page {
    Hole,
    /// A content, 0 for zeros.
    Still(u64),
    Merged(u64),
    /// Was mapped to the frame of a content while it was read, but holds something else and is mapped to it no longer.
    Parted(u64),
    /// Never the same twice.
    Changing,
    /// A byte all over, handed out as bytes and not as a fingerprint.
    Filled(u8),
}

#[derive(Clone, Debug)]
struct Made {
    uid: u32,
    enrolled: bool,
    /// Whether all of it is in huge pages of four pages.
    huge: bool,
    pages: Vec<Page>,
}

struct MadeHost {
    processes: Vec<Made>,
    /// Pages that were read, and how often regions were.
    read: AtomicU64,
    listed: AtomicU64,
    /// Whether nobody may know frames.
    hidden: bool,
    /// Whether nothing may be read.
    refuses: AtomicBool,
    /// How much each process has run, and how many page faults it has had, where that is known.
    ran: BTreeMap<u32, (u64, u64)>,
    /// What the kernel tells of each process's memory policies, on a host with two nodes, where that is given.
    numa_maps: BTreeMap<u32, &'static str>,
    /// The command line of each process, where that is known.
    command_lines: BTreeMap<u32, &'static str>,
}

impl MadeHost {
    fn new(processes: &[Made]) -> Self {
        let (read, listed, refuses) = Default::default();
        let (numa_maps, command_lines, ran) = Default::default();
        let processes = processes.to_vec();
        Self { processes, read, listed, hidden: false, refuses, ran, numa_maps, command_lines }
    }
}

struct MadeProcess<'a> {
    host: &'a MadeHost,
    pid: u32,
}

impl Host for MadeHost {
    fn describe(&self) -> String {
        "a made-up host".to_owned()
    }
    fn page_size(&self) -> PageSize {
        PageSize::new(PAGE).unwrap()
    }
    fn read(&self, path: &str) -> Reading<Vec<u8>> {
        match path {
            "sys/kernel/mm/transparent_hugepage/hpage_pmd_size" => Ok((4 * PAGE).to_string().into_bytes()),
            "sys/devices/system/node/has_memory" if !self.numa_maps.is_empty() => Ok(b"0-1\n".to_vec()),
            "sys/kernel/mm/ksm/merge_across_nodes" if !self.numa_maps.is_empty() => Ok(b"1\n".to_vec()),
            _ => Err(Absent::NotOnThisKernel),
        }
    }
    /// One thread each.
    fn list(&self, directory: &str) -> Reading<Vec<String>> {
        let pid = directory.strip_prefix("proc/").and_then(|rest| rest.strip_suffix("/task"));
        let pid = pid.filter(|pid| pid.parse().is_ok_and(|pid| self.ran.contains_key(&pid)));
        pid.map(|pid| vec![pid.to_owned()]).ok_or(Absent::NotOnThisKernel)
    }
    fn pids(&self) -> Reading<Vec<Pid>> {
        Ok((1..=self.processes.len() as u32).map(Pid).collect())
    }
    fn open(&self, pid: Pid) -> Reading<Box<dyn Process + '_>> {
        Ok(Box::new(MadeProcess { host: self, pid: pid.0 }))
    }
    /// The frame of a content has its number; those of KSM are told by being asked for: others are nobody else's.
    fn frame_flags(&self, frames: &[Pfn]) -> Reading<Vec<FrameFlags>> {
        Ok(frames.iter().map(|_| FrameFlags(1 << 21)).collect())
    }
    fn frame_mappings(&self, _: &[Pfn]) -> Reading<Vec<u64>> {
        Err(Absent::Denied)
    }
    fn apply(&self, _: &Action) -> Result<Effect, Refusal> {
        unreachable!("a census changes nothing")
    }
}

impl MadeProcess<'_> {
    fn made(&self) -> &Made {
        &self.host.processes[self.pid as usize - 1]
    }
}

impl Process for MadeProcess<'_> {
    fn id(&self) -> ProcessId {
        ProcessId { pid: Pid(self.pid), start_time: 1 }
    }
    fn read(&self, file: &str) -> Reading<Vec<u8>> {
        let Made { uid, enrolled, pages, .. } = self.made();
        let kib = pages.len() * 4;
        let end = BASE + pages.len() as u64 * PAGE;
        let (ran, faults) = self.host.ran.get(&self.pid).copied().unwrap_or_default();
        self.host.listed.fetch_add(u64::from(file == "smaps"), Ordering::Relaxed);
        Ok(match file {
            "stat" => format!("{} (made) S 0 0 0 0 0 0 {faults} 0 0 0 0 0 0 0 0 0 0 0 1 0\n", self.pid),
            file if file.ends_with("/schedstat") => format!("{ran} 0 0\n"),
            "status" => format!("Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n"),
            "numa_maps" => (*self.host.numa_maps.get(&self.pid).ok_or(Absent::NotOnThisKernel)?).to_owned(),
            "cmdline" => (*self.host.command_lines.get(&self.pid).ok_or(Absent::NotOnThisKernel)?).to_owned(),
            "smaps" => {
                let is_merged = |page: &Page| matches!(page, Page::Merged(_) | Page::Parted(_));
                let ksm = if pages.iter().any(is_merged) { kib } else { 0 };
                let flag = if *enrolled { " mg" } else { "" };
                format!(
                    "{BASE:x}-{end:x} rw-p 00000000 00:00 0 \nRss: {kib} kB\nAnonymous: {kib} kB\nKSM: {ksm} kB\n\
                     AnonHugePages: 0 kB\nSwap: 0 kB\nVmFlags: rd wr mr mw me ac{flag}\n"
                )
            }
            _ => return Err(Absent::NotOnThisKernel),
        }
        .into_bytes())
    }
    fn links(&self, _: &str) -> Reading<Vec<String>> {
        Err(Absent::Denied)
    }
    fn resident(&self, _: &[AddressRange]) -> Reading<Vec<Run>> {
        let mut runs: Vec<Run> = Vec::new();
        for (i, _) in self.made().pages.iter().enumerate().filter(|(_, page)| **page != Page::Hole) {
            let address = BASE + i as u64 * PAGE;
            match runs.last_mut() {
                Some(run) if run.address + u64::from(run.pages) * PAGE == address => run.pages += 1,
                _ => runs.push(Run { address, pages: 1, huge: self.made().huge }),
            }
        }
        Ok(runs)
    }
    fn mappings(&self, range: AddressRange) -> Reading<Vec<Mapping>> {
        let hides = |mapping: Mapping| Mapping { frame: mapping.frame.filter(|_| !self.host.hidden), ..mapping };
        let of = |address: u64| match self.made().pages.get(((address - BASE) / PAGE) as usize).unwrap_or(&Page::Hole) {
            Page::Hole => Mapping::default(),
            &Page::Merged(content) => Mapping { present: true, frame: Some(Pfn(content)), ..Mapping::default() },
            _ => Mapping { present: true, exclusive: true, frame: Some(Pfn(1)), ..Mapping::default() },
        };
        Ok((range.start..range.end).step_by(PAGE as usize).map(of).map(hides).collect())
    }
    fn contents(&self, _: Way, runs: &[Run], sink: &mut dyn FnMut(usize, PageView<'_>)) -> Reading<()> {
        if self.host.refuses.load(Ordering::Relaxed) {
            return Err(Absent::Denied);
        }
        let pages = runs.iter().flat_map(|run| (0..run.pages).map(move |i| (run.address - BASE) / PAGE + u64::from(i)));
        for (position, page) in pages.enumerate() {
            let times = self.host.read.fetch_add(1, Ordering::Relaxed);
            let (fingerprint, merged) = match self.made().pages[page as usize] {
                Page::Still(content) => (content, false),
                Page::Merged(content) => (content, true),
                Page::Parted(content) => {
                    let (frame, content) = (Some(Pfn(content)), Fingerprint(1 << 40 | content));
                    let content = PageContent::Fingerprint(content, None);
                    sink(position, PageView { content, merged: true, exclusive: false, frame });
                    continue;
                }
                Page::Changing => (1 << 32 | times, false),
                Page::Filled(byte) => {
                    let content = PageContent::Bytes(&[byte; PAGE as usize]);
                    sink(position, PageView { content, merged: false, exclusive: true, frame: None });
                    continue;
                }
                Page::Hole => return Err(Absent::Malformed("a hole was read".to_owned())),
            };
            let content = PageContent::Fingerprint(Fingerprint(fingerprint), None);
            let frame = (merged && !self.host.hidden).then_some(Pfn(fingerprint));
            sink(position, PageView { content, merged, exclusive: !merged, frame });
        }
        Ok(())
    }
}

fn made(uid: u32, pages: &[Page]) -> Made {
    let enrolled = pages.iter().any(|page| matches!(page, Page::Merged(_) | Page::Parted(_)));
    Made { uid, enrolled, huge: false, pages: pages.to_vec() }
}

/// Ranges are free and pages cost little, so that what is covered is what gains.
const CHEAP: Costs = Costs { scan: 10, range: 0, hole: 64, huge_page: 0 };

fn options(across_domains: bool, costs: Costs) -> Options {
    Options { costs: Some(costs), across_domains, settle: Duration::from_millis(1), ..Options::default() }
}

fn census(processes: &[Made], options: &Options) -> (Census, Index, u64) {
    census_of(MadeHost::new(processes), options)
}

fn census_of(host: MadeHost, options: &Options) -> (Census, Index, u64) {
    let (census, index) = take(&host, options, &Progress::default(), &AtomicBool::new(false)).unwrap();
    assert!(census.unseen.is_empty(), "{:?}", census.unseen);
    (census, index, host.read.into_inner())
}

/// The covered pages by process number.
fn covered(census: &Census) -> BTreeSet<(u32, usize)> {
    let pages = |range: AddressRange| (range.start - BASE) / PAGE..(range.end - BASE) / PAGE;
    census
        .ranges
        .iter()
        .flat_map(|range| {
            let pid = census.subjects[range.subject].process.id.pid.0;
            pages(range.range).map(move |page| (pid, page as usize))
        })
        .collect()
}

use Page::{Changing, Filled, Hole, Merged, Parted, Still};

#[test]
fn a_content_of_several_domains_is_covered_in_the_one_where_it_frees_most() {
    let processes = [made(1, &[Still(7); 3]), made(2, &[Still(7); 5]), made(3, &[Still(7)])];
    let of = |across| covered(&census(&processes, &options(across, CHEAP)).0);
    assert_eq!(of(false), (0..5).map(|page| (2, page)).collect());
    assert_eq!(of(true).len(), 9);
    let zeros = [made(1, &[Still(0); 3]), made(2, &[Still(0); 5])];
    assert_eq!(covered(&census(&zeros, &options(false, CHEAP)).0), (0..5).map(|page| (2, page)).collect());
}

#[test]
fn processes_that_are_bound_to_different_nodes_are_kept_apart() {
    let processes = [made(1, &[Still(7); 3]), made(1, &[Still(7); 5]), made(1, &[Still(7); 2])];
    let policies = |first, second, third| MadeHost {
        numa_maps: [(1, first), (2, second), (3, third)].into(),
        ..MadeHost::new(&processes)
    };
    let of = |host| covered(&census_of(host, &options(false, CHEAP)).0);
    let (default, zero, one) = ("7f00 default N0=3\n", "7f00 bind:0 N0=3\n", "7f00 bind:1 N1=3\n");
    assert_eq!(of(policies(default, default, default)).len(), 10);
    assert_eq!(of(policies(zero, zero, zero)).len(), 10, "of one node");
    // The page stays in the one in which it frees most.
    let alone: BTreeSet<_> = (0..5).map(|page| (2, page)).collect();
    assert_eq!(of(policies(zero, one, default)), alone);
    let with_third: BTreeSet<_> = alone.iter().copied().chain([(3, 0), (3, 1)]).collect();
    assert_eq!(of(policies(zero, one, one)), with_third);
    assert_eq!(of(MadeHost::new(&processes)).len(), 10, "a host with one node");
}

#[test]
fn virtual_machines_are_chosen_by_patterns_of_their_names() {
    let processes = [made(1, &[Still(7)]), made(1, &[Still(7)]), made(1, &[Still(7)]), made(1, &[Still(7)])];
    let chosen = |patterns: &[&str]| -> Result<Vec<u32>, String> {
        let lines = [
            (1, "qemu-system-x86_64\0-name\0guest=web-0\0"),
            (2, "/usr/bin/qemu-system-x86_64\0-name\0web-1,debug-threads=on\0"),
            (3, "qemu-system-x86_64\0-name\0db[1]\0"),
            (4, "web-2\0-name\0web-2\0"),
        ];
        let host = MadeHost { command_lines: lines.into(), ..MadeHost::new(&processes) };
        let vms = patterns.iter().map(|&pattern| pattern.to_owned()).collect();
        let selection = Selection { vms, ..Selection::default() };
        let options = Options { selection, ..options(false, CHEAP) };
        let taken = take(&host, &options, &Progress::default(), &AtomicBool::new(false));
        let (census, _) = taken.map_err(|error| error.to_string())?;
        let mut pids: Vec<u32> = census.subjects.iter().map(|subject| subject.process.id.pid.0).collect();
        pids.sort_unstable();
        Ok(pids)
    };
    assert_eq!(chosen(&["web-*"]), Ok(vec![1, 2]));
    assert_eq!(chosen(&["web-?"]), Ok(vec![1, 2]));
    assert_eq!(chosen(&["web-1"]), Ok(vec![2]));
    assert_eq!(chosen(&["web-1", "db*"]), Ok(vec![2, 3]));
    assert_eq!(chosen(&["db[1]"]), Ok(vec![3]), "a name may look like a pattern");
    assert_eq!(chosen(&["web"]), Ok(vec![]));
    assert!(chosen(&["["]).is_err());
}

#[test]
fn what_is_merged_is_read_once_for_all_that_are_mapped_to_it() {
    let merged = |contents: std::ops::Range<u64>| contents.map(Merged).collect::<Vec<_>>();
    let first = made(1, &[&merged(100..120)[..], &[Still(3)]].concat());
    let second = made(1, &[&[Still(3)][..], &merged(110..120), &[Merged(99)]].concat());
    // So few are read with what lies beside them.
    let third = made(2, &[&merged(100..107)[..], &[Still(119)]].concat());
    let once = Options { settle: Duration::ZERO, ..options(false, CHEAP) };
    let (taken, index, read) = census(&[first.clone(), second.clone(), third.clone()], &once);
    assert_eq!(read, 21 + 2 + 8);
    // Nor is it read in the second pass.
    let (.., read) = census(&[first.clone(), second.clone(), third.clone()], &options(false, CHEAP));
    assert_eq!(read, 21 + 2 + 8 + 1 + 1 + 8);
    assert_eq!(taken.counts.merged, Pages(20 + 11 + 7));
    assert!((0..index.pages() as u32).all(|page| index.mark(page).was_read()));
    assert!(!covered(&taken).contains(&(3, 7)), "user 1 has it merged");
    // Not of pages that were written while they were read.
    let parted: Vec<Page> = (100..120).map(Parted).collect();
    let (.., read) = census(&[made(1, &parted), first], &once);
    assert_eq!(read, 20 + 21);
}

#[test]
fn a_content_that_a_domain_has_merged_stays_there() {
    let merged = [Merged(7), Merged(7), Still(7)];
    let processes = [made(1, &merged), made(2, &[Still(7); 5])];
    let (census_of_one, ..) = census(&processes, &options(false, CHEAP));
    assert!(covered(&census_of_one).contains(&(1, 2)));
    assert!(covered(&census_of_one).iter().all(|&(pid, _)| pid == 1));
    assert_eq!(census_of_one.savings.guided.freed, Pages(1));
    let both = [made(1, &merged), made(2, &merged), made(3, &[Still(7); 5])];
    let (census_of_both, ..) = census(&both, &options(false, CHEAP));
    assert_eq!(census_of_both.savings.guided.freed, Pages(0), "nobody joins what is shared across domains");
}

#[test]
fn only_what_gains_is_read_again() {
    let mut pages: Vec<Page> = (1000..3000).map(Still).collect();
    pages.extend([Still(0); 20]);
    pages.extend((0..40).map(|i| Still(5 + i / 2)));
    pages.push(Changing);
    let processes = [made(1, &pages)];
    let all = options(false, Costs::of(PageSize::new(PAGE).unwrap()));
    let candidates = Options { second: Second::Candidates, ..all.clone() };
    let (full, _, read_in_full) = census(&processes, &all);
    let (quick, _, read_quickly) = census(&processes, &candidates);
    assert_eq!(read_in_full, 2 * 2061);
    assert_eq!(full.reread, Pages(2061));
    assert_eq!(read_quickly, 2061 + quick.reread.0);
    assert!((60..60 + 2001 / 16).contains(&quick.reread.0), "{:?} were read again", quick.reread);
    assert_eq!((full.counts.volatile, full.counts.unique), (Pages(1), Pages(2000)));
    assert_eq!((quick.counts.zero, quick.counts.within), (Pages(20), Pages(40)));
    assert_eq!(quick.ranges, full.ranges);
}

#[test]
fn ranges_leave_stray_duplicates_to_their_huge_pages_and_bridge_small_holes() {
    let unique = |i: u64| Still(1000 + i);
    let stray = [Still(5), unique(1), unique(2), unique(3), Still(5), unique(4), unique(5), unique(6)];
    let costs = Costs { huge_page: 8192, ..CHEAP };
    let huge = |pages: &[Page]| [Made { huge: true, ..made(1, pages) }];
    assert_eq!(covered(&census(&huge(&stray), &options(false, costs)).0), BTreeSet::new());
    let rich = [[Still(5); 4], [Still(6); 4]].concat();
    assert_eq!(covered(&census(&huge(&rich), &options(false, costs)).0).len(), 8);

    let with_hole = |length: usize| [vec![Still(5); 4], vec![Hole; length], vec![Still(5); 4]].concat();
    let ranges =
        |length| census(&[made(1, &with_hole(length))], &options(false, Costs { range: 1024, ..CHEAP })).0.ranges;
    assert_eq!(ranges(16).len(), 1);
    assert_eq!(ranges(17).len(), 2);
    assert_eq!(ranges(17)[0].pages, Pages(4));
}

fn constraints() -> Constraints {
    Constraints {
        page_size: PageSize::new(PAGE).unwrap(),
        whole: false,
        min_profit: Bytes(0),
        max_map_count: 65530,
        regions: BTreeMap::new(),
        cpu: 0.5,
        speed: Speed::default(),
        first_look: false,
    }
}

#[test]
fn a_plan_leaves_alone_who_is_excluded_and_counts_what_is_left() {
    let processes =
        [made(1, &[Still(7); 4]), made(1, &[Still(7), Still(8), Still(8)]), made(1, &[Merged(9), Changing])];
    let (census, index, _) = census(&processes, &options(false, CHEAP));
    let mut constraints = constraints();
    let plan = |constraints: &Constraints, excluded: &dyn Fn(u32) -> bool| -> Plan {
        pagefold_merge::plan(&census, &index, constraints, &|process| {
            excluded(process.id.pid.0).then(|| "it holds keys".to_owned())
        })
    };
    let all = plan(&constraints, &|_| false);
    assert_eq!(all.targets.len(), 2, "nothing of the third gains");
    assert_eq!(all.predicted.reach, census.savings.guided);
    assert_eq!((all.predicted.reach.freed, all.predicted.merging), (Pages(5), Pages(7)));
    assert_eq!(all.predicted.wall, all.predicted.ksmd * 2);
    assert_eq!(all.narrowed.len(), 1, "the third has enrolled what changes all the time");
    assert_eq!(all.predicted.regions_added, 1, "the ranges are whole regions, but for the third's");

    let without = plan(&constraints, &|pid| pid == 1);
    assert_eq!(without.left_alone.len(), 1);
    assert_eq!(without.left_alone[0].why, "it holds keys");
    assert_eq!(without.predicted.reach.freed, Pages(1), "a copy in a process left alone is none");

    constraints.min_profit = Bytes(3 * PAGE);
    assert_eq!(plan(&constraints, &|_| false).left_alone[0].pid, Pid(1), "three of four pages, less metadata");
    constraints.min_profit = Bytes(2 * PAGE);
    assert_eq!(plan(&constraints, &|_| false).targets[0].process.id.pid, Pid(1));
    constraints.whole = true;
    constraints.min_profit = Bytes(0);
    let whole = plan(&constraints, &|_| false);
    assert_eq!(whole.predicted.reach.freed, Pages(5));
    assert_eq!(whole.targets[0].ranges[0].range, AddressRange { start: BASE, end: BASE + 4 * PAGE });
}

#[test]
fn third_and_further_copies_come_late_where_that_saves_a_look() {
    let processes = [(); 4].map(|()| made(1, &[Still(7), Still(8), Still(9)]));
    let (census, index, _) = census(&processes, &options(false, CHEAP));
    for first_look in [true, false] {
        let constraints = Constraints { first_look, ..constraints() };
        let plan = pagefold_merge::plan(&census, &index, &constraints, &|_| None);
        let late: Vec<bool> = plan.targets.iter().flat_map(|target| &target.ranges).map(|range| range.late).collect();
        assert_eq!(late, [false, false, first_look, first_look]);
        assert_eq!(plan.merging_early(), first_look.then_some(Pages(6)));
    }
}

#[test]
fn what_is_young_waits_for_a_later_census() {
    let mut ages = Ages::new(PageSize::new(PAGE).unwrap()).unwrap();
    let began = Instant::now();
    let mut sift = |pages: &[Page], seconds: u64| {
        let (census, index, _) = census(&[made(1, pages), made(1, pages)], &options(false, CHEAP));
        let mut plan = pagefold_merge::plan(&census, &index, &constraints(), &|_| None);
        ages.sift(&mut plan, &census, &index, began + Duration::from_secs(seconds));
        let ranges = plan.targets.iter().flat_map(|target| &target.ranges);
        let pages = |address: u64| (address - BASE) / PAGE;
        let kept = ranges.map(|range| (pages(range.range.start), pages(range.range.end))).collect::<Vec<_>>();
        (kept, plan.predicted.merging)
    };
    // Two pieces of 1024 pages; the first holds zeros.
    let contents = |second: u64| [vec![Still(0); 1024], (0..1024).map(|i| Still(second + i)).collect()].concat();
    let none = (Vec::new(), Pages(0));
    assert_eq!(sift(&contents(5000), 0), none, "seen for the first time");
    assert_eq!(sift(&contents(5000), 4), none);
    assert_eq!(sift(&contents(9000), 8), (vec![(0, 1024); 2], Pages(2048)), "what changed is young again");
    assert_eq!(sift(&contents(9000), 12).1, Pages(2048));
    assert_eq!(sift(&contents(9000), 14), (vec![(0, 2048); 2], Pages(4096)));
    assert_eq!(sift(&[vec![Hole; 1024], contents(9000)].concat(), 15), none, "elsewhere it is another page");
}

/// Who was seen with one partner before has nothing to merge with while another is too young.
#[test]
fn nobody_is_enrolled_for_who_is_too_young() {
    let mut ages = Ages::new(PageSize::new(PAGE).unwrap()).unwrap();
    let began = Instant::now();
    let contents: Vec<Page> = (0..40).map(|i| Still(5000 + i)).chain([Still(0); 10]).collect();
    let mut sift = |processes: &[Made], seconds: u64| {
        let (census, index, _) = census(processes, &options(false, CHEAP));
        let mut plan = pagefold_merge::plan(&census, &index, &constraints(), &|_| None);
        let left_out = ages.sift(&mut plan, &census, &index, began + Duration::from_secs(seconds));
        (plan.predicted.merging, left_out.into_values().map(|bytes| bytes.0 / PAGE).collect::<Vec<_>>())
    };
    let full = || made(1, &contents);
    let other = || made(1, &[Still(1); 3]);
    assert_eq!(sift(&[full(), full(), other()], 0), (Pages(0), vec![50, 50, 3]));
    assert_eq!(sift(&[full(), other(), full()], 6), (Pages(0), vec![50, 3, 50]), "the third has come to hold it");
    assert_eq!(
        sift(&[full(), full(), full()], 12),
        (Pages(100), vec![0, 50, 0]),
        "the second is its partner no longer"
    );
    // What is merged already is there to merge with.
    let merged = made(1, &(0..40).map(|i| Merged(5000 + i)).collect::<Vec<_>>());
    assert_eq!(sift(&[full(), other(), merged], 13).0, Pages(50));
    // What lost its partner before does not count for it.
    let half = |own: u64| made(1, &(0..40).map(|i| Still(if i < 20 { 7000 + i } else { own + i })).collect::<Vec<_>>());
    assert_eq!(sift(&[half(8000), other(), half(8000)], 20), (Pages(3), vec![40, 0, 40]));
    assert_eq!(
        sift(&[half(8000), half(9000), other()], 26).0,
        Pages(0),
        "half of it is alone, the rest has one too young"
    );
}

/// Where CPU time is short a census has few processes, and may have nobody with whom a page is shared.
#[test]
fn what_is_without_a_partner_for_once_is_no_younger_for_it() {
    let mut ages = Ages::new(PageSize::new(PAGE).unwrap()).unwrap();
    let began = Instant::now();
    let contents: Vec<Page> = (0..40).map(|i| Still(5000 + i)).collect();
    let mut sift = |processes: &[Made], seconds: u64| {
        let (census, index, _) = census(processes, &options(false, CHEAP));
        let mut plan = pagefold_merge::plan(&census, &index, &constraints(), &|_| None);
        ages.sift(&mut plan, &census, &index, began + Duration::from_secs(seconds));
        plan.predicted.merging
    };
    let both = [made(1, &contents), made(1, &contents)];
    assert_eq!(sift(&both, 0), Pages(0));
    assert_eq!(sift(&both[..1], 6), Pages(0), "there is nobody else");
    assert_eq!(sift(&both, 7), Pages(80));
    let changing = [Page::Changing; 40];
    assert_eq!(sift(&[made(1, &changing), made(1, &changing)], 8), Pages(0));
    assert_eq!(sift(&both, 9), Pages(0), "what was written meanwhile is");
}

#[test]
fn what_any_two_hold_is_told_by_their_sketches() {
    let still = |range: std::ops::Range<u64>| range.map(Still);
    let other = [Still(0), Changing, Hole, Merged(7), Merged(8)];
    let first = made(1, &still(100..140).chain(other).collect::<Vec<_>>());
    let second = made(1, &still(115..200).chain(other).chain(still(115..120)).collect::<Vec<_>>());
    // In another domain, where nothing is merged with them: what it holds is the same all the same.
    let third = made(2, &[Still(130), Still(0), Still(8)]);
    // One that holds nothing, and one of which every sixteenth content is in the sample.
    let (empty, big) = (made(1, &[Hole; 4]), made(1, &still(120..4000).collect::<Vec<_>>()));
    let host = MadeHost::new(&[first, empty, second, third, big]);
    let began = Instant::now();
    let mut ages = Ages::since(PageSize::new(PAGE).unwrap(), began).unwrap();
    let (remembered, hasher) = ages.remembered();
    let (progress, stop) = (Progress::default(), AtomicBool::new(false));
    take_again((&mut *remembered, began), hasher, &host, &options(false, CHEAP), &progress, &stop).unwrap();
    let held = remembered.take_held();
    let all = |pid: u32| &held.iter().find(|(process, _)| process.pid == Pid(pid)).unwrap().1.all;
    let shared = |a: u32, b: u32| all(a).shared(all(b)).0;
    assert_eq!((shared(1, 3), shared(3, 1), shared(1, 1)), (27, 27, 42), "no zeros, nothing twice");
    assert_eq!((shared(1, 4), shared(3, 4), shared(4, 4), shared(2, 1)), (2, 2, 2, 0));
    let rank_of = |content: u64| rank(Fingerprint::of_half(Fingerprint(content).half()));
    let rare = |range: std::ops::Range<u64>| range.filter(|&content| rank_of(content) >= 4).count() as u64;
    assert_eq!((shared(1, 5), shared(3, 5)), (16 * rare(120..140), (16 * rare(120..200)).min(87)), "estimated");
    assert_eq!(shared(5, 5), 16 * rare(120..4000));
    let unmerged = |pid: u32| &held.iter().find(|(process, _)| process.pid == Pid(pid)).unwrap().1.unmerged;
    assert_eq!((unmerged(1).shared(all(3)), unmerged(1).shared(all(1))), (Pages(25), Pages(40)), "7 and 8 are merged");
}

/// Runs of what both hold among what is each one's own, in another order in the second.
#[test]
fn what_metadata_allows_is_kept_with_what_it_merges_with() {
    let run = |number: u64| (number * 40..(number + 1) * 40).map(|content| Still(1 + content));
    let own = |number: u64| (0..100).map(move |content| Still(1_000_000 + number * 100 + content));
    let runs = |order: &[u64], from: u64| -> Vec<Page> {
        order.iter().zip(from..).flat_map(|(&number, at)| run(number).chain(own(at))).collect()
    };
    let processes = [made(1, &runs(&[0, 1, 2, 3, 4, 5], 0)), made(1, &runs(&[3, 5, 1, 0, 4, 2], 100))];
    let (census, index, _) = census(&processes, &options(false, CHEAP));
    let whole = pagefold_merge::plan(&census, &index, &constraints(), &|_| None);
    assert_eq!((whole.ranges(), whole.predicted.reach.scanned), (12, Pages(480)));
    for (most, ranges) in [(1000, 12), (480, 12), (479, 10), (250, 6), (160, 4), (159, 2), (80, 2), (79, 0), (0, 0)] {
        let mut plan = whole.clone();
        pagefold_merge::keep_within(&mut plan, &census, &index, Bytes(most * RMAP_ITEM_BYTES));
        assert_eq!((plan.ranges(), plan.predicted.merging), (ranges, Pages(ranges as u64 * 40)), "{most}");
        let mut held: Vec<BTreeSet<u64>> = Vec::new();
        for target in &plan.targets {
            let pages = &processes[target.process.id.pid.0 as usize - 1].pages;
            let page = |range: AddressRange| pages[((range.start - BASE) / PAGE) as usize];
            held.push(
                target
                    .ranges
                    .iter()
                    .map(|range| match page(range.range) {
                        Still(content) => content,
                        other => panic!("{other:?}"),
                    })
                    .collect(),
            );
        }
        assert!(held.windows(2).all(|two| two[0] == two[1]), "each with its copy: {held:?}");
    }
}

#[test]
fn contents_are_known_again_under_the_key_of_their_ages() {
    let page_size = PageSize::new(PAGE).unwrap();
    let processes = [made(1, &[Filled(7); 40]), made(1, &[Filled(7); 40])];
    let host = MadeHost::new(&processes);
    let mut ages = Ages::new(page_size).unwrap();
    let began = Instant::now();
    let mut sift = |seconds: u64, own_key: bool| {
        let options = options(false, CHEAP);
        let (progress, stop) = (Progress::default(), AtomicBool::new(false));
        let (census, index) = if own_key {
            take(&host, &options, &progress, &stop).unwrap()
        } else {
            take_under(ages.hasher(), &host, &options, &progress, &stop).unwrap()
        };
        let mut plan = pagefold_merge::plan(&census, &index, &constraints(), &|_| None);
        ages.sift(&mut plan, &census, &index, began + Duration::from_secs(seconds));
        plan.predicted.merging
    };
    assert_eq!(sift(0, false), Pages(0));
    assert_eq!(sift(6, false), Pages(80));
    assert_eq!(sift(7, true), Pages(0), "under another key nothing is known again");
}

#[test]
fn afterwards_it_is_known_what_was_written_and_what_lost_its_partner() {
    let page_size = PageSize::new(PAGE).unwrap();
    let contents: Vec<Page> = (10..30).map(Still).collect();
    let before = MadeHost::new(&[made(1, &contents), made(1, &contents)]);
    let ages = Ages::new(page_size).unwrap();
    let (progress, stop) = (Progress::default(), AtomicBool::new(false));
    let (census, index) = take_under(ages.hasher(), &before, &options(false, CHEAP), &progress, &stop).unwrap();
    let plan = pagefold_merge::plan(&census, &index, &constraints(), &|_| None);
    let probes = Probes::of(&plan, &census, &index, ages.hasher());
    let look = |first: &[Page], second: &[Page], given_up: &[(AddressRange, Fate)]| {
        let host = MadeHost::new(&[made(1, first), made(1, second)]);
        let fates = probes.look(&host, |_| given_up.to_vec()).unwrap();
        assert_eq!(fates.frees, 20.0, "all of so small a plan is followed");
        fates.lost.into_iter().collect::<Vec<_>>()
    };
    let merged: Vec<Page> = (10..30).map(Merged).collect();
    assert!(look(&merged, &merged, &[]).is_empty());
    // Three are written and one went away, so that their partners stay alone; of two nobody did anything.
    let first = [&[Still(99), Still(98), Still(97), Hole], &contents[4..6], &merged[6..]].concat();
    let second = [&contents[..6], &merged[6..]].concat();
    assert_eq!(look(&first, &second, &[]), [(Fate::Written, 4.0), (Fate::Alone, 2.0)]);
    let four = AddressRange { start: BASE, end: BASE + 4 * PAGE };
    assert_eq!(look(&first, &second, &[(four, Fate::Missed)]), [(Fate::Missed, 4.0), (Fate::Alone, 2.0)]);
    // Where nothing was merged in the end, that tells no more of what was written.
    let six = AddressRange { start: BASE, end: BASE + 6 * PAGE };
    assert_eq!(look(&first, &second, &[(six, Fate::Idle)]), [(Fate::Written, 4.0), (Fate::Idle, 2.0)]);
    assert_eq!(look(&contents, &merged, &[]), [(Fate::Alone, 20.0)]);
    let other = [&[Merged(99)], &merged[1..]].concat();
    assert_eq!(look(&other, &merged, &[]), [(Fate::Written, 1.0)], "it merged with something else");
    assert_eq!(look(&merged, &[], &[]), [(Fate::Written, 20.0)], "what is not mapped any more was given back");
}

#[test]
fn withdrawing_cuts_no_huge_page_for_little() {
    let page_size = PageSize::new(PAGE).unwrap();
    // Huge pages of four pages: the second of them holds a page of which nothing is known.
    let idle = |huge: bool, known: bool| {
        let mut pages: Vec<Page> = (1000..1012).map(Still).collect();
        pages[5] = if known { pages[5] } else { Merged(1) };
        let (census, ..) =
            census(&[Made { enrolled: true, huge, ..made(1, &pages) }], &options(false, Costs::of(page_size)));
        let pages = |idle: &IdleRange| ((idle.range.start - BASE) / PAGE, (idle.range.end - BASE) / PAGE);
        census.idle.iter().map(pages).collect::<Vec<_>>()
    };
    assert_eq!(idle(true, true), [(0, 12)]);
    assert_eq!(idle(false, false), [(0, 5), (6, 12)]);
    assert_eq!(idle(true, false), [(0, 4), (8, 12)]);
}

#[test]
fn what_is_enrolled_and_idle_is_withdrawn_but_for_what_is_merged() {
    let mut pages = vec![Merged(9), Merged(9)];
    pages.extend((1000..1050).map(Still));
    pages.push(Hole);
    pages.extend((2000..2050).map(Still));
    pages.extend([Still(7); 20]);
    let (census, ..) = census(&[made(1, &pages)], &options(false, Costs::of(PageSize::new(PAGE).unwrap())));
    let at = |page: u64| BASE + page * PAGE;
    let idle: Vec<AddressRange> = census.idle.iter().map(|idle| idle.range).collect();
    assert_eq!(
        idle,
        [AddressRange { start: at(2), end: at(52) }, AddressRange { start: at(53), end: at(103) }],
        "what is not resident may be a page of zeros that was merged"
    );
    assert!(census.ranges.iter().all(|range| range.enrolled && range.range.start == at(103)));
}

fn page() -> impl Strategy<Value = Page> {
    prop_oneof![
        1 => Just(Hole),
        6 => (0u64..12).prop_map(Still),
        3 => (100u64..100_000).prop_map(Still),
        1 => (0u64..12).prop_map(Merged),
        1 => Just(Changing),
    ]
}

/// A page, or some that are merged.
fn stretch() -> impl Strategy<Value = Vec<Page>> {
    let merged = (0u64..20, 1u64..20).prop_map(|(first, pages)| (first..first + pages).map(Merged).collect::<Vec<_>>());
    prop_oneof![page().prop_map(|page| vec![page]), merged]
}

fn processes() -> impl Strategy<Value = Vec<Made>> {
    let made = (0u32..3, any::<bool>(), prop::collection::vec(page(), 1..60))
        .prop_map(|(uid, huge, pages)| Made { huge, ..made(uid, &pages) });
    prop::collection::vec(made, 1..5)
}

proptest! {
    #[test]
    fn ranges_say_what_they_cover(processes in processes(), across in any::<bool>(), range in 0i64..4000, huge_page in 0i64..9000) {
        let costs = Costs { scan: 500, range, hole: 64, huge_page };
        let (census, ..) = census(&processes, &options(across, costs));
        let covered = covered(&census);
        let page = |&(pid, page): &(u32, usize)| processes[pid as usize - 1].pages[page];
        let seen = covered.iter().filter(|at| !matches!(page(at), Hole | Merged(_))).count();
        prop_assert_eq!(census.savings.guided.scanned, Pages(seen as u64));
        let said: Pages = census.ranges.iter().map(|range| range.pages).sum();
        prop_assert_eq!(said, Pages(seen as u64));
        let ascending = census
            .ranges
            .windows(2)
            .all(|pair| pair[0].subject < pair[1].subject || pair[0].range.end <= pair[1].range.start);
        prop_assert!(ascending);
        for range in &census.ranges {
            let pid = census.subjects[range.subject].process.id.pid.0;
            let place = |address: u64| ((address - BASE) / PAGE) as usize;
            for at in [place(range.range.start), place(range.range.end) - 1] {
                prop_assert!(page(&(pid, at)) != Hole, "a range ends in a hole");
            }
        }

        // What is covered frees all of a content but one, or all where some are merged already.
        let mut groups: BTreeMap<u64, (u64, bool, BTreeSet<u32>)> = BTreeMap::new();
        for at in &covered {
            if let Still(content) = page(at) {
                let group = groups.entry(content).or_default();
                group.0 += 1;
                group.2.insert(processes[at.0 as usize - 1].uid);
            }
        }
        let mut merged: BTreeMap<u64, BTreeSet<u32>> = BTreeMap::new();
        for made in &processes {
            for page in &made.pages {
                if let Merged(content) = page {
                    merged.entry(*content).or_default().insert(made.uid);
                }
            }
        }
        let freed: u64 = groups
            .iter()
            .map(|(content, (pages, ..))| if merged.contains_key(content) { *pages } else { pages - 1 })
            .sum();
        prop_assert_eq!(census.savings.guided.freed, Pages(freed));
        if !across {
            for (content, (_, _, domains)) in &groups {
                let mut domains = domains.clone();
                domains.extend(merged.get(content).into_iter().flatten());
                prop_assert_eq!(domains.len(), 1, "{} is covered in {:?}", content, domains);
            }
        }
        for idle in &census.idle {
            let made = &processes[census.subjects[idle.subject].process.id.pid.0 as usize - 1];
            prop_assert!(made.enrolled);
            for at in (idle.range.start - BASE) / PAGE..(idle.range.end - BASE) / PAGE {
                prop_assert!(!matches!(made.pages[at as usize], Hole | Merged(_)));
                prop_assert!(!covered.contains(&(census.subjects[idle.subject].process.id.pid.0, at as usize)));
            }
        }
        let net = census.savings.guided.freed.0 * PAGE;
        prop_assert!(census.savings.guided.metadata() == Bytes(RMAP_ITEM_BYTES * seen as u64));
        prop_assert!(Bytes(net) == census.savings.guided.gross(PageSize::new(PAGE).unwrap()));
    }

    #[test]
    fn what_is_not_read_again_is_found_as_if_it_were(
        processes in prop::collection::vec((0u32..3, prop::collection::vec(stretch(), 1..8)), 1..5)
    ) {
        let processes: Vec<Made> = processes.into_iter().map(|(uid, pages)| made(uid, &pages.concat())).collect();
        let options = options(false, CHEAP);
        let (shown, _, read) = census(&processes, &options);
        let (hidden, _, all) = census_of(MadeHost { hidden: true, ..MadeHost::new(&processes) }, &options);
        prop_assert!(read <= all);
        prop_assert_eq!(shown.counts, hidden.counts);
        prop_assert_eq!(shown.ranges, hidden.ranges);
        prop_assert_eq!(shown.seen, hidden.seen);
    }

    #[test]
    fn a_quick_second_pass_finds_the_same_candidates(processes in processes()) {
        let costs = Costs { scan: 500, range: 1024, hole: 64, huge_page: 0 };
        let (full, ..) = census(&processes, &options(false, costs));
        let quick = Options { second: Second::Candidates, ..options(false, costs) };
        let (quick, _, _) = census(&processes, &quick);
        let still = |counts: Counts| (counts.zero, counts.duplicate(), counts.merged, counts.redundant);
        prop_assert_eq!(still(quick.counts), still(full.counts));
        prop_assert_eq!(quick.ranges, full.ranges);
    }
}
