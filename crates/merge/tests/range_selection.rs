//! Which ranges a census chooses to enroll, on synthetic hosts: never a forbidden page, always exactly the counted
//! pages.

use pagefold_base::ksm::RMAP_ITEM_BYTES;
use pagefold_base::savings::EnrollCostBytes;
use pagefold_base::{
    Absent, AddressRange, Bytes, Fingerprint, PageCounts, PageSize, Pages, Pfn, Pid, ProcessId, Reading,
};
use pagefold_census::decide::sketch::rank;
use pagefold_census::results::{Census, IdleRange};
use pagefold_census::{
    CensusOptions, PageIndex, ProcessSelection, ScanProgress, SecondPass, take_census, take_census_with_hasher,
    take_incremental_census,
};
use pagefold_host::Hasher;
use pagefold_host::action::{Action, ActionError, ActionOutcome};
use pagefold_host::{FrameFlags, Host, PageContent, PageRun, PageView, PagemapEntry, ProcessHandle, ReadMethod};
use pagefold_merge::StableAges;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[path = "range_selection/fingerprint_cache.rs"]
mod fingerprint_cache;
#[path = "range_selection/foreign_processes.rs"]
mod foreign_processes;
#[path = "range_selection/parts.rs"]
mod parts;
#[path = "range_selection/plans.rs"]
mod plans;

const BASE_ADDRESS: u64 = 1 << 40;
const PAGE_BYTES: u64 = 4096;
const FIRST_FORKED_FRAME: u64 = 1 << 30;

/// A page of a synthetic process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SyntheticPage {
    Hole,
    /// A content, 0 for a zero page.
    Stable(u64),
    Merged(u64),
    /// A content in a frame that processes share since a fork, and the number of that frame.
    Forked(u64, u64),
    /// Was mapped to the frame of a content while it was read, but has another content and is no longer mapped to it.
    UnmergedDuringRead(u64),
    /// Different at every read.
    Volatile,
    /// One byte repeated, returned as bytes and not as a fingerprint.
    FilledWith(u8),
}

#[derive(Clone, Debug)]
struct SyntheticProcess {
    uid: u32,
    enrolled: bool,
    /// Whether all of it is in huge pages of four pages.
    huge: bool,
    pages: Vec<SyntheticPage>,
}

struct SyntheticHost {
    processes: Vec<SyntheticProcess>,
    /// Number of pages read, and of reads of `smaps`.
    pages_read: AtomicU64,
    smaps_reads: AtomicU64,
    /// Whether frame numbers are hidden.
    hides_frames: bool,
    /// Whether reads of contents are refused.
    refuses_reads: AtomicBool,
    /// Run time and page faults of each process, where known.
    activity: BTreeMap<u32, (u64, u64)>,
    /// `numa_maps` of each process, on a host with two nodes, where given.
    numa_maps: BTreeMap<u32, &'static str>,
    /// The command line of each process, where known.
    command_lines: BTreeMap<u32, &'static str>,
}

impl SyntheticHost {
    fn new(processes: &[SyntheticProcess]) -> Self {
        let (pages_read, smaps_reads, refuses_reads) = Default::default();
        let (numa_maps, command_lines, activity) = Default::default();
        let processes = processes.to_vec();
        Self {
            processes,
            pages_read,
            smaps_reads,
            hides_frames: false,
            refuses_reads,
            activity,
            numa_maps,
            command_lines,
        }
    }
}

struct SyntheticHandle<'a> {
    host: &'a SyntheticHost,
    pid: u32,
}

impl Host for SyntheticHost {
    fn describe(&self) -> String {
        "a synthetic host".to_owned()
    }
    fn page_size(&self) -> PageSize {
        PageSize::new(PAGE_BYTES).unwrap()
    }
    fn read(&self, path: &str) -> Reading<Vec<u8>> {
        match path {
            "sys/kernel/mm/transparent_hugepage/hpage_pmd_size" => Ok((4 * PAGE_BYTES).to_string().into_bytes()),
            "sys/devices/system/node/has_memory" if !self.numa_maps.is_empty() => Ok(b"0-1\n".to_vec()),
            "sys/kernel/mm/ksm/merge_across_nodes" if !self.numa_maps.is_empty() => Ok(b"1\n".to_vec()),
            _ => Err(Absent::NotOnThisKernel),
        }
    }
    /// One thread each.
    fn list(&self, directory: &str) -> Reading<Vec<String>> {
        let pid = directory.strip_prefix("proc/").and_then(|rest| rest.strip_suffix("/task"));
        let pid = pid.filter(|pid| pid.parse().is_ok_and(|pid| self.activity.contains_key(&pid)));
        pid.map(|pid| vec![pid.to_owned()]).ok_or(Absent::NotOnThisKernel)
    }
    fn pids(&self) -> Reading<Vec<Pid>> {
        Ok((1..=self.processes.len() as u32).map(Pid).collect())
    }
    fn open(&self, pid: Pid) -> Reading<Box<dyn ProcessHandle + '_>> {
        Ok(Box::new(SyntheticHandle { host: self, pid: pid.0 }))
    }
    /// The frame number of a content is the content. Only shared frames are queried: KSM frames and those of forks.
    fn frame_flags(&self, frames: &[Pfn]) -> Reading<Vec<FrameFlags>> {
        let flag = |frame: &Pfn| FrameFlags(if frame.0 >= FIRST_FORKED_FRAME { 1 << 12 } else { 1 << 21 });
        Ok(frames.iter().map(flag).collect())
    }
    fn frame_mappings(&self, _: &[Pfn]) -> Reading<Vec<u64>> {
        Err(Absent::Denied)
    }
    fn apply(&self, _: &Action) -> Result<ActionOutcome, ActionError> {
        unreachable!("a census changes nothing")
    }
}

impl SyntheticHandle<'_> {
    fn process(&self) -> &SyntheticProcess {
        &self.host.processes[self.pid as usize - 1]
    }
}

impl ProcessHandle for SyntheticHandle<'_> {
    fn id(&self) -> ProcessId {
        ProcessId { pid: Pid(self.pid), start_time: 1 }
    }
    fn read(&self, file: &str) -> Reading<Vec<u8>> {
        let SyntheticProcess { uid, enrolled, pages, .. } = self.process();
        let kib = pages.len() * 4;
        let end = BASE_ADDRESS + pages.len() as u64 * PAGE_BYTES;
        let (run_ns, faults) = self.host.activity.get(&self.pid).copied().unwrap_or_default();
        self.host.smaps_reads.fetch_add(u64::from(file == "smaps"), Ordering::Relaxed);
        Ok(match file {
            "stat" => format!("{} (made) S 0 0 0 0 0 0 {faults} 0 0 0 0 0 0 0 0 0 0 0 1 0\n", self.pid),
            file if file.ends_with("/schedstat") => format!("{run_ns} 0 0\n"),
            "status" => format!("Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n"),
            "numa_maps" => (*self.host.numa_maps.get(&self.pid).ok_or(Absent::NotOnThisKernel)?).to_owned(),
            "cmdline" => (*self.host.command_lines.get(&self.pid).ok_or(Absent::NotOnThisKernel)?).to_owned(),
            "smaps" => {
                let is_merged = |page: &SyntheticPage| matches!(page, SyntheticPage::Merged(_) | SyntheticPage::UnmergedDuringRead(_));
                let ksm = if pages.iter().any(is_merged) { kib } else { 0 };
                let flag = if *enrolled { " mg" } else { "" };
                format!(
                    "{BASE_ADDRESS:x}-{end:x} rw-p 00000000 00:00 0 \nRss: {kib} kB\nAnonymous: {kib} kB\nKSM: {ksm} kB\n\
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
    fn resident(&self, ranges: &[AddressRange]) -> Reading<Vec<PageRun>> {
        let mut runs: Vec<PageRun> = Vec::new();
        for (i, _) in self.process().pages.iter().enumerate().filter(|(_, page)| **page != SyntheticPage::Hole) {
            let address = BASE_ADDRESS + i as u64 * PAGE_BYTES;
            if !ranges.iter().any(|range| range.contains(address)) {
                continue;
            }
            match runs.last_mut() {
                Some(run) if run.address + u64::from(run.pages) * PAGE_BYTES == address => run.pages += 1,
                _ => runs.push(PageRun { address, pages: 1, huge: self.process().huge }),
            }
        }
        Ok(runs)
    }
    fn mappings(&self, range: AddressRange) -> Reading<Vec<PagemapEntry>> {
        let hide_frame = |mapping: PagemapEntry| PagemapEntry {
            frame: mapping.frame.filter(|_| !self.host.hides_frames),
            ..mapping
        };
        let mapping_at = |address: u64| match self
            .process()
            .pages
            .get(((address - BASE_ADDRESS) / PAGE_BYTES) as usize)
            .unwrap_or(&SyntheticPage::Hole)
        {
            SyntheticPage::Hole => PagemapEntry::default(),
            &SyntheticPage::Merged(content) => {
                PagemapEntry { present: true, frame: Some(Pfn(content)), ..PagemapEntry::default() }
            }
            &SyntheticPage::Forked(_, frame) => {
                let frame = Some(Pfn(FIRST_FORKED_FRAME + frame));
                PagemapEntry { present: true, frame, ..PagemapEntry::default() }
            }
            _ => PagemapEntry { present: true, exclusive: true, frame: Some(Pfn(1)), ..PagemapEntry::default() },
        };
        Ok((range.start..range.end).step_by(PAGE_BYTES as usize).map(mapping_at).map(hide_frame).collect())
    }
    fn contents(&self, _: ReadMethod, runs: &[PageRun], sink: &mut dyn FnMut(usize, PageView<'_>)) -> Reading<()> {
        if self.host.refuses_reads.load(Ordering::Relaxed) {
            return Err(Absent::Denied);
        }
        let pages = runs
            .iter()
            .flat_map(|run| (0..run.pages).map(move |i| (run.address - BASE_ADDRESS) / PAGE_BYTES + u64::from(i)));
        for (position, page) in pages.enumerate() {
            let reads_before = self.host.pages_read.fetch_add(1, Ordering::Relaxed);
            let (fingerprint, merged) = match self.process().pages[page as usize] {
                SyntheticPage::Stable(content) => (content, false),
                SyntheticPage::Merged(content) => (content, true),
                SyntheticPage::UnmergedDuringRead(content) => {
                    let (frame, content) = (Some(Pfn(content)), Fingerprint(1 << 40 | content));
                    let content = PageContent::Fingerprint(content, None);
                    sink(position, PageView { content, merged: true, exclusive: false, frame });
                    continue;
                }
                SyntheticPage::Forked(content, frame) => {
                    let content = PageContent::Fingerprint(Fingerprint(content), None);
                    let frame = Some(Pfn(FIRST_FORKED_FRAME + frame));
                    sink(position, PageView { content, merged: false, exclusive: false, frame });
                    continue;
                }
                SyntheticPage::Volatile => (1 << 32 | reads_before, false),
                SyntheticPage::FilledWith(byte) => {
                    let content = PageContent::Bytes(&[byte; PAGE_BYTES as usize]);
                    sink(position, PageView { content, merged: false, exclusive: true, frame: None });
                    continue;
                }
                SyntheticPage::Hole => return Err(Absent::Malformed("a hole was read".to_owned())),
            };
            let content = PageContent::Fingerprint(Fingerprint(fingerprint), None);
            let frame = (merged && !self.host.hides_frames).then_some(Pfn(fingerprint));
            sink(position, PageView { content, merged, exclusive: !merged, frame });
        }
        Ok(())
    }
}

fn process_with_pages(uid: u32, pages: &[SyntheticPage]) -> SyntheticProcess {
    let enrolled =
        pages.iter().any(|page| matches!(page, SyntheticPage::Merged(_) | SyntheticPage::UnmergedDuringRead(_)));
    SyntheticProcess { uid, enrolled, huge: false, pages: pages.to_vec() }
}

/// Ranges are free and pages cost little, so that exactly the profitable pages are covered.
const CHEAP_COSTS: EnrollCostBytes =
    EnrollCostBytes { per_scanned_page: 10, per_range: 0, per_hole_page: 64, per_split_huge_page: 0 };

fn census_options(across_domains: bool, costs: EnrollCostBytes) -> CensusOptions {
    CensusOptions {
        costs: Some(costs),
        across_domains,
        pass_interval: Duration::from_millis(1),
        ..CensusOptions::default()
    }
}

fn take_synthetic_census(processes: &[SyntheticProcess], options: &CensusOptions) -> (Census, PageIndex, u64) {
    take_census_on(SyntheticHost::new(processes), options)
}

fn take_census_on(host: SyntheticHost, options: &CensusOptions) -> (Census, PageIndex, u64) {
    let (census, index) = take_census(&host, options, &ScanProgress::default(), &AtomicBool::new(false)).unwrap();
    assert!(census.unscanned.is_empty(), "{:?}", census.unscanned);
    (census, index, host.pages_read.into_inner())
}

/// The covered pages by PID.
fn covered_pages(census: &Census) -> BTreeSet<(u32, usize)> {
    let pages =
        |range: AddressRange| (range.start - BASE_ADDRESS) / PAGE_BYTES..(range.end - BASE_ADDRESS) / PAGE_BYTES;
    census
        .ranges
        .iter()
        .flat_map(|range| {
            let pid = census.subjects[range.subject].process.id.pid.0;
            pages(range.range).map(move |page| (pid, page as usize))
        })
        .collect()
}

use SyntheticPage::{FilledWith, Forked, Hole, Merged, Stable, UnmergedDuringRead, Volatile};

#[test]
fn shared_content_goes_to_domain_that_frees_most() {
    let processes = [
        process_with_pages(1, &[Stable(7); 3]),
        process_with_pages(2, &[Stable(7); 5]),
        process_with_pages(3, &[Stable(7)]),
    ];
    let covered = |across_domains| {
        covered_pages(&take_synthetic_census(&processes, &census_options(across_domains, CHEAP_COSTS)).0)
    };
    assert_eq!(covered(false), (0..5).map(|page| (2, page)).collect());
    assert_eq!(covered(true).len(), 9);
    let zeros = [process_with_pages(1, &[Stable(0); 3]), process_with_pages(2, &[Stable(0); 5])];
    assert_eq!(
        covered_pages(&take_synthetic_census(&zeros, &census_options(false, CHEAP_COSTS)).0),
        (0..5).map(|page| (2, page)).collect()
    );
}

#[test]
fn processes_bound_to_different_nodes_do_not_merge() {
    let processes = [
        process_with_pages(1, &[Stable(7); 3]),
        process_with_pages(1, &[Stable(7); 5]),
        process_with_pages(1, &[Stable(7); 2]),
    ];
    let policies = |first, second, third| SyntheticHost {
        numa_maps: [(1, first), (2, second), (3, third)].into(),
        ..SyntheticHost::new(&processes)
    };
    let covered = |host| covered_pages(&take_census_on(host, &census_options(false, CHEAP_COSTS)).0);
    let (default, zero, one) = ("7f00 default N0=3\n", "7f00 bind:0 N0=3\n", "7f00 bind:1 N1=3\n");
    assert_eq!(covered(policies(default, default, default)).len(), 10);
    assert_eq!(covered(policies(zero, zero, zero)).len(), 10, "of one node");
    // The content stays in the node in which it frees most.
    let alone: BTreeSet<_> = (0..5).map(|page| (2, page)).collect();
    assert_eq!(covered(policies(zero, one, default)), alone);
    let with_third: BTreeSet<_> = alone.iter().copied().chain([(3, 0), (3, 1)]).collect();
    assert_eq!(covered(policies(zero, one, one)), with_third);
    assert_eq!(covered(SyntheticHost::new(&processes)).len(), 10, "a host with one node");
}

#[test]
fn vms_are_selected_by_name_patterns_and_uuids() {
    let processes = [
        process_with_pages(1, &[Stable(7)]),
        process_with_pages(1, &[Stable(7)]),
        process_with_pages(1, &[Stable(7)]),
        process_with_pages(1, &[Stable(7)]),
    ];
    let chosen = |patterns: &[&str]| -> Result<Vec<u32>, String> {
        let lines = [
            (1, "qemu-system-x86_64\0-name\0guest=web-0\0"),
            (
                2,
                "/usr/bin/qemu-system-x86_64\0-name\0web-1,debug-threads=on\0-uuid\0C7A5FDBD-cdaf-9455-926a-d65c16db1809\0",
            ),
            (3, "qemu-system-x86_64\0-name\0db[1]\0"),
            (4, "web-2\0-name\0web-2\0"),
        ];
        let host = SyntheticHost { command_lines: lines.into(), ..SyntheticHost::new(&processes) };
        let vms = patterns.iter().map(|&pattern| pattern.to_owned()).collect();
        let selection = ProcessSelection { vm_patterns: vms, ..ProcessSelection::default() };
        let options = CensusOptions { selection, ..census_options(false, CHEAP_COSTS) };
        let result = take_census(&host, &options, &ScanProgress::default(), &AtomicBool::new(false));
        let (census, _) = result.map_err(|error| error.to_string())?;
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
    assert_eq!(chosen(&["c7a5fdbd-CDAF-9455-926a-d65c16db1809", "db*"]), Ok(vec![2, 3]));
    assert_eq!(chosen(&["c7a5fdbd*"]), Ok(vec![]), "a UUID is whole");
    assert!(chosen(&["["]).is_err());
}

#[test]
fn merged_frames_are_read_once() {
    let merged = |contents: std::ops::Range<u64>| contents.map(Merged).collect::<Vec<_>>();
    let first = process_with_pages(1, &[&merged(100..120)[..], &[Stable(3)]].concat());
    let second = process_with_pages(1, &[&[Stable(3)][..], &merged(110..120), &[Merged(99)]].concat());
    // Merged pages in a short run are read together with their neighbors.
    let third = process_with_pages(2, &[&merged(100..107)[..], &[Stable(119)]].concat());
    let one_pass = CensusOptions { pass_interval: Duration::ZERO, ..census_options(false, CHEAP_COSTS) };
    let (census, index, pages_read) = take_synthetic_census(&[first.clone(), second.clone(), third.clone()], &one_pass);
    assert_eq!(pages_read, 21 + 2 + 8);
    // Merged pages are not read in the second pass either.
    let (.., pages_read) =
        take_synthetic_census(&[first.clone(), second.clone(), third.clone()], &census_options(false, CHEAP_COSTS));
    assert_eq!(pages_read, 21 + 2 + 8 + 1 + 1 + 8);
    assert_eq!(census.counts.merged, Pages(20 + 11 + 7));
    assert!((0..index.page_count() as u32).all(|page| index.mark(page).was_read()));
    assert!(!covered_pages(&census).contains(&(3, 7)), "a process of user 1 has merged this content");
    // But pages that were written during the read are read.
    let unmerged: Vec<SyntheticPage> = (100..120).map(UnmergedDuringRead).collect();
    let (.., pages_read) = take_synthetic_census(&[process_with_pages(1, &unmerged), first], &one_pass);
    assert_eq!(pages_read, 20 + 21);
}

#[test]
fn merged_content_stays_in_its_domain() {
    let merged = [Merged(7), Merged(7), Stable(7)];
    let processes = [process_with_pages(1, &merged), process_with_pages(2, &[Stable(7); 5])];
    let (census_of_one, ..) = take_synthetic_census(&processes, &census_options(false, CHEAP_COSTS));
    assert!(covered_pages(&census_of_one).contains(&(1, 2)));
    assert!(covered_pages(&census_of_one).iter().all(|&(pid, _)| pid == 1));
    assert_eq!(census_of_one.savings.guided.freed_frames, Pages(1));
    let both = [process_with_pages(1, &merged), process_with_pages(2, &merged), process_with_pages(3, &[Stable(7); 5])];
    let (census_of_both, ..) = take_synthetic_census(&both, &census_options(false, CHEAP_COSTS));
    assert_eq!(census_of_both.savings.guided.freed_frames, Pages(0), "two domains share this content");
}

#[test]
fn second_pass_reads_only_candidates() {
    let mut pages: Vec<SyntheticPage> = (1000..3000).map(Stable).collect();
    pages.extend([Stable(0); 20]);
    pages.extend((0..40).map(|i| Stable(5 + i / 2)));
    pages.push(Volatile);
    let processes = [process_with_pages(1, &pages)];
    let all = census_options(false, EnrollCostBytes::for_page_size(PageSize::new(PAGE_BYTES).unwrap()));
    let candidates = CensusOptions { second_pass: SecondPass::Candidates, ..all.clone() };
    let (full, _, read_in_full) = take_synthetic_census(&processes, &all);
    let (quick, _, read_quickly) = take_synthetic_census(&processes, &candidates);
    assert_eq!(read_in_full, 2 * 2061);
    assert_eq!(full.reread, Pages(2061));
    assert_eq!(read_quickly, 2061 + quick.reread.0);
    assert!((60..60 + 2001 / 16).contains(&quick.reread.0), "{:?} were read again", quick.reread);
    assert_eq!((full.counts.volatile, full.counts.unique), (Pages(1), Pages(2000)));
    assert_eq!((quick.counts.zero, quick.counts.within_process), (Pages(20), Pages(40)));
    assert_eq!(quick.ranges, full.ranges);
}

#[test]
fn ranges_keep_huge_pages_and_bridge_small_holes() {
    let unique = |i: u64| Stable(1000 + i);
    let few_equal = [Stable(5), unique(1), unique(2), unique(3), Stable(5), unique(4), unique(5), unique(6)];
    let costs = EnrollCostBytes { per_split_huge_page: 8192, ..CHEAP_COSTS };
    let huge_process = |pages: &[SyntheticPage]| [SyntheticProcess { huge: true, ..process_with_pages(1, pages) }];
    assert_eq!(
        covered_pages(&take_synthetic_census(&huge_process(&few_equal), &census_options(false, costs)).0),
        BTreeSet::new()
    );
    let all_equal = [[Stable(5); 4], [Stable(6); 4]].concat();
    assert_eq!(
        covered_pages(&take_synthetic_census(&huge_process(&all_equal), &census_options(false, costs)).0).len(),
        8
    );

    let with_hole = |length: usize| [vec![Stable(5); 4], vec![Hole; length], vec![Stable(5); 4]].concat();
    let ranges = |length| {
        take_synthetic_census(
            &[process_with_pages(1, &with_hole(length))],
            &census_options(false, EnrollCostBytes { per_range: 1024, ..CHEAP_COSTS }),
        )
        .0
        .ranges
    };
    assert_eq!(ranges(16).len(), 1);
    assert_eq!(ranges(17).len(), 2);
    assert_eq!(ranges(17)[0].pages, Pages(4));
}

#[test]
fn sketches_estimate_shared_pages() {
    let stable = |range: std::ops::Range<u64>| range.map(Stable);
    let others = [Stable(0), Volatile, Hole, Merged(7), Merged(8)];
    let first = process_with_pages(1, &stable(100..140).chain(others).collect::<Vec<_>>());
    let second = process_with_pages(1, &stable(115..200).chain(others).chain(stable(115..120)).collect::<Vec<_>>());
    // A process of another domain merges with neither: its contents are compared all the same.
    let third = process_with_pages(2, &[Stable(130), Stable(0), Stable(8)]);
    // A process without pages, and a process of which the sketch has every sixteenth content.
    let (empty, big) =
        (process_with_pages(1, &[Hole; 4]), process_with_pages(1, &stable(120..4000).collect::<Vec<_>>()));
    let host = SyntheticHost::new(&[first, empty, second, third, big]);
    let start = Instant::now();
    let mut ages = StableAges::new(Hasher::with_random_key(PAGE_BYTES as usize).unwrap(), start);
    let (cache, hasher) = ages.cache_and_hasher();
    let (progress, stop) = (ScanProgress::default(), AtomicBool::new(false));
    take_incremental_census((&mut *cache, start), hasher, &host, &census_options(false, CHEAP_COSTS), &progress, &stop)
        .unwrap();
    let sketches = cache.take_sketches();
    let all = |pid: u32| &sketches.iter().find(|(process, _)| process.pid == Pid(pid)).unwrap().1.all;
    let shared = |a: u32, b: u32| all(a).shared(all(b)).0;
    assert_eq!((shared(1, 3), shared(3, 1), shared(1, 1)), (27, 27, 42), "no zeros, nothing twice");
    assert_eq!((shared(1, 4), shared(3, 4), shared(4, 4), shared(2, 1)), (2, 2, 2, 0));
    let rank_of = |content: u64| rank(Fingerprint::from_half(Fingerprint(content).to_half()));
    let rare = |range: std::ops::Range<u64>| range.filter(|&content| rank_of(content) >= 4).count() as u64;
    assert_eq!((shared(1, 5), shared(3, 5)), (16 * rare(120..140), (16 * rare(120..200)).min(87)), "estimated");
    assert_eq!(shared(5, 5), 16 * rare(120..4000));
    let unmerged = |pid: u32| &sketches.iter().find(|(process, _)| process.pid == Pid(pid)).unwrap().1.unmerged;
    assert_eq!((unmerged(1).shared(all(3)), unmerged(1).shared(all(1))), (Pages(25), Pages(40)), "7 and 8 are merged");
}

#[test]
fn unenroll_does_not_split_huge_pages() {
    let page_size = PageSize::new(PAGE_BYTES).unwrap();
    // Huge pages of four pages: the second one contains a merged page if `is_unmerged` is false.
    let idle = |huge: bool, is_unmerged: bool| {
        let mut pages: Vec<SyntheticPage> = (1000..1012).map(Stable).collect();
        pages[5] = if is_unmerged { pages[5] } else { Merged(1) };
        let (census, ..) = take_synthetic_census(
            &[SyntheticProcess { enrolled: true, huge, ..process_with_pages(1, &pages) }],
            &census_options(false, EnrollCostBytes::for_page_size(page_size)),
        );
        let pages = |idle: &IdleRange| {
            ((idle.range.start - BASE_ADDRESS) / PAGE_BYTES, (idle.range.end - BASE_ADDRESS) / PAGE_BYTES)
        };
        census.idle_ranges.iter().map(pages).collect::<Vec<_>>()
    };
    assert_eq!(idle(true, true), [(0, 12)]);
    assert_eq!(idle(false, false), [(0, 5), (6, 12)]);
    assert_eq!(idle(true, false), [(0, 4), (8, 12)]);
}

#[test]
fn idle_ranges_are_unenrolled_except_merged_pages() {
    let mut pages = vec![Merged(9), Merged(9)];
    pages.extend((1000..1050).map(Stable));
    pages.push(Hole);
    pages.extend((2000..2050).map(Stable));
    pages.extend([Stable(7); 20]);
    let (census, ..) = take_synthetic_census(
        &[process_with_pages(1, &pages)],
        &census_options(false, EnrollCostBytes::for_page_size(PageSize::new(PAGE_BYTES).unwrap())),
    );
    let address = |page: u64| BASE_ADDRESS + page * PAGE_BYTES;
    let idle: Vec<AddressRange> = census.idle_ranges.iter().map(|idle| idle.range).collect();
    assert_eq!(
        idle,
        [AddressRange { start: address(2), end: address(52) }, AddressRange { start: address(53), end: address(103) }],
        "a page that is not resident may be a merged zero page"
    );
    assert!(census.ranges.iter().all(|range| range.enrolled && range.range.start == address(103)));
}

fn any_page() -> impl Strategy<Value = SyntheticPage> {
    prop_oneof![
        1 => Just(Hole),
        6 => (0u64..12).prop_map(Stable),
        3 => (100u64..100_000).prop_map(Stable),
        1 => (0u64..12).prop_map(Merged),
        1 => Just(Volatile),
    ]
}

/// A page, or a run of merged pages.
fn any_page_run() -> impl Strategy<Value = Vec<SyntheticPage>> {
    let merged = (0u64..20, 1u64..20).prop_map(|(first, pages)| (first..first + pages).map(Merged).collect::<Vec<_>>());
    prop_oneof![any_page().prop_map(|page| vec![page]), merged]
}

fn any_processes() -> impl Strategy<Value = Vec<SyntheticProcess>> {
    let process = (0u32..3, any::<bool>(), prop::collection::vec(any_page(), 1..60))
        .prop_map(|(uid, huge, pages)| SyntheticProcess { huge, ..process_with_pages(uid, &pages) });
    prop::collection::vec(process, 1..5)
}

proptest! {
    #[test]
    fn ranges_report_the_pages_they_cover(
        processes in any_processes(),
        across_domains in any::<bool>(),
        per_range in 0i64..4000,
        per_split_huge_page in 0i64..9000,
    ) {
        let costs = EnrollCostBytes { per_scanned_page: 500, per_range, per_hole_page: 64, per_split_huge_page };
        let (census, ..) = take_synthetic_census(&processes, &census_options(across_domains, costs));
        let covered = covered_pages(&census);
        let page = |&(pid, page): &(u32, usize)| processes[pid as usize - 1].pages[page];
        let scanned = covered.iter().filter(|position| !matches!(page(position), Hole | Merged(_))).count();
        prop_assert_eq!(census.savings.guided.scanned_pages, Pages(scanned as u64));
        let reported: Pages = census.ranges.iter().map(|range| range.pages).sum();
        prop_assert_eq!(reported, Pages(scanned as u64));
        let ascending = census
            .ranges
            .windows(2)
            .all(|pair| pair[0].subject < pair[1].subject || pair[0].range.end <= pair[1].range.start);
        prop_assert!(ascending);
        for range in &census.ranges {
            let pid = census.subjects[range.subject].process.id.pid.0;
            let page_number = |address: u64| ((address - BASE_ADDRESS) / PAGE_BYTES) as usize;
            for number in [page_number(range.range.start), page_number(range.range.end) - 1] {
                prop_assert!(page(&(pid, number)) != Hole, "a range ends in a hole");
            }
        }

        // The covered pages of a content free all frames but one, or all if the content is merged already.
        let mut groups: BTreeMap<u64, (u64, bool, BTreeSet<u32>)> = BTreeMap::new();
        for position in &covered {
            if let Stable(content) = page(position) {
                let group = groups.entry(content).or_default();
                group.0 += 1;
                group.2.insert(processes[position.0 as usize - 1].uid);
            }
        }
        let mut merged: BTreeMap<u64, BTreeSet<u32>> = BTreeMap::new();
        for process in &processes {
            for page in &process.pages {
                if let Merged(content) = page {
                    merged.entry(*content).or_default().insert(process.uid);
                }
            }
        }
        let freed: u64 = groups
            .iter()
            .map(|(content, (pages, ..))| if merged.contains_key(content) { *pages } else { pages - 1 })
            .sum();
        prop_assert_eq!(census.savings.guided.freed_frames, Pages(freed));
        if !across_domains {
            for (content, (_, _, domains)) in &groups {
                let mut domains = domains.clone();
                domains.extend(merged.get(content).into_iter().flatten());
                prop_assert_eq!(domains.len(), 1, "{} is covered in {:?}", content, domains);
            }
        }
        for idle in &census.idle_ranges {
            let process = &processes[census.subjects[idle.subject].process.id.pid.0 as usize - 1];
            prop_assert!(process.enrolled);
            for number in (idle.range.start - BASE_ADDRESS) / PAGE_BYTES..(idle.range.end - BASE_ADDRESS) / PAGE_BYTES {
                prop_assert!(!matches!(process.pages[number as usize], Hole | Merged(_)));
                prop_assert!(!covered.contains(&(census.subjects[idle.subject].process.id.pid.0, number as usize)));
            }
        }
        let freed_bytes = census.savings.guided.freed_frames.0 * PAGE_BYTES;
        prop_assert!(census.savings.guided.metadata() == Bytes(RMAP_ITEM_BYTES * scanned as u64));
        prop_assert!(Bytes(freed_bytes) == census.savings.guided.gross(PageSize::new(PAGE_BYTES).unwrap()));
    }

    #[test]
    fn skipped_merged_pages_do_not_change_the_census(
        processes in prop::collection::vec((0u32..3, prop::collection::vec(any_page_run(), 1..8)), 1..5)
    ) {
        let processes: Vec<SyntheticProcess> = processes.into_iter().map(|(uid, pages)| process_with_pages(uid, &pages.concat())).collect();
        let options = census_options(false, CHEAP_COSTS);
        let (shown, _, pages_read) = take_synthetic_census(&processes, &options);
        let hiding_host = SyntheticHost { hides_frames: true, ..SyntheticHost::new(&processes) };
        let (hidden, _, all_pages_read) = take_census_on(hiding_host, &options);
        prop_assert!(pages_read <= all_pages_read);
        prop_assert_eq!(shown.counts, hidden.counts);
        prop_assert_eq!(shown.ranges, hidden.ranges);
        prop_assert_eq!(shown.contents_by_page_count, hidden.contents_by_page_count);
    }

    #[test]
    fn candidate_only_second_pass_finds_same_candidates(processes in any_processes()) {
        let costs = EnrollCostBytes { per_scanned_page: 500, per_range: 1024, per_hole_page: 64, per_split_huge_page: 0 };
        let (full, ..) = take_synthetic_census(&processes, &census_options(false, costs));
        let quick = CensusOptions { second_pass: SecondPass::Candidates, ..census_options(false, costs) };
        let (quick, _, _) = take_synthetic_census(&processes, &quick);
        let mergeable = |counts: PageCounts| (counts.zero, counts.duplicate(), counts.merged, counts.redundant);
        prop_assert_eq!(mergeable(quick.counts), mergeable(full.counts));
        prop_assert_eq!(quick.ranges, full.ranges);
    }
}
