//! Layouts: steps that lay out memory, change it and let ksmd scan, generated from a seed.
//!
//! A test plays a layout on the model and on the real kernel, and compares the counters after each batch. The steps use
//! only what a stand-in process can do from outside or by command. A child of a fork only has its pages written, and
//! ends before its parent.

use super::ksmd::{Advice, KsmSettings, RunState};
use super::memory::{Content, PAGES_IN_HUGE_PAGE, ZERO_CONTENT};

/// A number of a process, in the order of [`LayoutStep::Spawn`] and [`LayoutStep::Fork`], from 0.
pub type ProcessNumber = usize;

/// A number of a region, in the order of [`LayoutStep::Map`], from 0.
pub type RegionNumber = usize;

/// One step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayoutStep {
    /// Start a process.
    Spawn,
    /// Map a region of untouched memory, on a NUMA node.
    Map {
        /// The process.
        process: ProcessNumber,
        /// Its size in pages.
        pages: u64,
        /// Fill it with huge pages of zeros.
        huge: bool,
        /// The NUMA node of its pages.
        node: u8,
    },
    /// Give advice about pages of a region, in the process that mapped it.
    Advise {
        /// The region.
        region: RegionNumber,
        /// The first page.
        first: u64,
        /// The number of pages.
        pages: u64,
        /// The advice.
        advice: Advice,
    },
    /// Write pages of a region.
    Write {
        /// The process: the one that mapped it, or a child.
        process: ProcessNumber,
        /// The region.
        region: RegionNumber,
        /// Pages and their new contents.
        pages: Vec<(u64, Content)>,
    },
    /// Read a page of a region, in the process that mapped it.
    Read {
        /// The region.
        region: RegionNumber,
        /// The page.
        page: u64,
    },
    /// Unmap a region, in the process that mapped it.
    Unmap {
        /// The region.
        region: RegionNumber,
    },
    /// Fork a process.
    Fork {
        /// The parent.
        process: ProcessNumber,
    },
    /// End a process.
    Exit {
        /// The process.
        process: ProcessNumber,
    },
    /// Change settings of ksmd.
    Set(KsmSettings),
    /// Write `run`; ksmd scans only in [`LayoutStep::Batches`] and [`LayoutStep::Scans`].
    Run(RunState),
    /// Let ksmd do this many batches.
    Batches(u32),
    /// Let ksmd finish this many scans.
    Scans(u32),
}

/// A named list of steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Its family and seed, such as `forks-2`.
    pub name: String,
    /// The steps.
    pub steps: Vec<LayoutStep>,
    /// NUMA nodes that the host must have.
    pub nodes: u8,
}

/// A family of layouts.
struct Family {
    name: &'static str,
    seeds: u64,
    nodes: u8,
    generate: fn(&mut Builder),
}

const FAMILIES: &[Family] = &[
    Family { name: "duplicates", seeds: 2, nodes: 1, generate: duplicates },
    Family { name: "unique", seeds: 1, nodes: 1, generate: unique },
    Family { name: "smart-scan", seeds: 2, nodes: 1, generate: smart_scan },
    Family { name: "writers", seeds: 3, nodes: 1, generate: writers },
    Family { name: "forks", seeds: 3, nodes: 1, generate: forks },
    Family { name: "merged-forks", seeds: 2, nodes: 1, generate: merged_forks },
    Family { name: "huge-pages", seeds: 3, nodes: 1, generate: huge_pages },
    Family { name: "chains", seeds: 4, nodes: 1, generate: chains },
    Family { name: "unpruned-chains", seeds: 2, nodes: 1, generate: unpruned_chains },
    Family { name: "zero-pages", seeds: 2, nodes: 1, generate: zero_pages },
    Family { name: "zero-forks", seeds: 1, nodes: 1, generate: zero_forks },
    Family { name: "arrivals", seeds: 3, nodes: 1, generate: arrivals },
    Family { name: "partial-ranges", seeds: 3, nodes: 1, generate: partial_ranges },
    Family { name: "small-batches", seeds: 4, nodes: 1, generate: small_batches },
    Family { name: "run-states", seeds: 2, nodes: 1, generate: run_states },
    Family { name: "mixed", seeds: 8, nodes: 1, generate: mixed },
    Family { name: "runs", seeds: 6, nodes: 1, generate: runs },
    Family { name: "runs-in-batches", seeds: 6, nodes: 1, generate: runs_in_batches },
    Family { name: "huge-runs", seeds: 3, nodes: 1, generate: huge_runs },
    Family { name: "two-nodes", seeds: 2, nodes: 2, generate: two_nodes },
];

/// All layouts.
#[must_use]
pub fn all_layouts() -> Vec<Layout> {
    let layouts = FAMILIES.iter().flat_map(|family| (1..=family.seeds).map(move |seed| family_layout(family, seed)));
    layouts.collect()
}

/// A layout beyond [`all_layouts`]: the families for one NUMA node in turn, each time with another seed.
#[must_use]
pub fn further_layout(number: u64) -> Layout {
    let families: Vec<&Family> = FAMILIES.iter().filter(|family| family.nodes == 1).collect();
    let turn = families.len() as u64;
    family_layout(families[(number % turn) as usize], 1000 + number / turn)
}

fn family_layout(family: &Family, seed: u64) -> Layout {
    let mut builder = Builder::new(family.name, seed);
    (family.generate)(&mut builder);
    Layout { name: format!("{}-{seed}", family.name), steps: builder.steps, nodes: family.nodes }
}

/// More pages than any layout has: a batch ends with the scan.
const WHOLE_SCAN: u64 = 1_000_000;

/// Longer than any test: searches never prune a chain.
const NEVER_PRUNE_MS: u64 = 1_000_000_000;

fn settings() -> KsmSettings {
    KsmSettings { pages_to_scan: WHOLE_SCAN, stable_node_chains_prune_millisecs: 0, ..KsmSettings::default() }
}

/// A process while a layout is generated.
#[derive(Clone, Debug)]
struct DraftProcess {
    parent: Option<ProcessNumber>,
    is_alive: bool,
    regions: Vec<RegionNumber>,
}

/// Generates steps, and knows what the processes have.
struct Builder {
    random: u64,
    steps: Vec<LayoutStep>,
    processes: Vec<DraftProcess>,
    region_pages: Vec<u64>,
    fresh_content: Content,
}

/// Contents below are shared by choice; those from here on are unique.
const FIRST_UNIQUE_CONTENT: Content = 1 << 20;

/// The first content of the first common image. Images are apart by [`IMAGE_DISTANCE`].
const FIRST_IMAGE_CONTENT: Content = 1 << 27;
const IMAGE_DISTANCE: Content = 1 << 12;

/// Contents of unique runs lie between those of images, and behind them.
const UNIQUE_RUN_OFFSET: Content = 1 << 11;

impl Builder {
    fn new(family: &str, seed: u64) -> Self {
        let random = family.bytes().fold(seed, |hash, byte| hash.wrapping_mul(0x0100_0000_01b3) ^ u64::from(byte));
        Self {
            random,
            steps: Vec::new(),
            processes: Vec::new(),
            region_pages: Vec::new(),
            fresh_content: FIRST_UNIQUE_CONTENT,
        }
    }

    /// A number below `limit` (splitmix64 by Vigna, <https://prng.di.unimi.it/splitmix64.c>).
    fn below(&mut self, limit: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }

    fn choose<T: Copy>(&mut self, choices: &[T]) -> Option<T> {
        if choices.is_empty() { None } else { Some(choices[self.below(choices.len() as u64) as usize]) }
    }

    fn push(&mut self, step: LayoutStep) {
        self.steps.push(step);
    }

    fn scans(&mut self, scans: u32) {
        self.push(LayoutStep::Scans(scans));
    }

    fn spawn(&mut self) -> ProcessNumber {
        self.push(LayoutStep::Spawn);
        self.processes.push(DraftProcess { parent: None, is_alive: true, regions: Vec::new() });
        self.processes.len() - 1
    }

    fn fork(&mut self, parent: ProcessNumber) -> ProcessNumber {
        self.push(LayoutStep::Fork { process: parent });
        let regions = self.processes[parent].regions.clone();
        self.processes.push(DraftProcess { parent: Some(parent), is_alive: true, regions });
        self.processes.len() - 1
    }

    /// End a process, its children first.
    fn exit(&mut self, process: ProcessNumber) {
        let children: Vec<_> = (0..self.processes.len())
            .filter(|&other| self.processes[other].is_alive && self.processes[other].parent == Some(process))
            .collect();
        for ended in children.into_iter().chain([process]) {
            self.processes[ended].is_alive = false;
            self.push(LayoutStep::Exit { process: ended });
        }
    }

    fn map_on(&mut self, process: ProcessNumber, pages: u64, huge: bool, node: u8) -> RegionNumber {
        self.push(LayoutStep::Map { process, pages, huge, node });
        self.region_pages.push(pages);
        let region = self.region_pages.len() - 1;
        self.processes[process].regions.push(region);
        region
    }

    /// Map a region, and make all of it mergeable.
    fn map(&mut self, process: ProcessNumber, pages: u64) -> RegionNumber {
        let region = self.map_on(process, pages, false, 0);
        self.advise(region, 0, pages, Advice::Mergeable);
        region
    }

    fn advise(&mut self, region: RegionNumber, first: u64, pages: u64, advice: Advice) {
        self.push(LayoutStep::Advise { region, first, pages, advice });
    }

    /// One of `shared` contents, or a unique one, each with the given chance in percent; else zeros.
    fn content(&mut self, shared: u32, shared_percent: u64, unique_percent: u64) -> Content {
        let chance = self.below(100);
        if chance < shared_percent {
            1 + u32::try_from(self.below(u64::from(shared))).expect("below a 32-bit number")
        } else if chance < shared_percent + unique_percent {
            // Not in ascending order, so that the trees get shapes of their own.
            self.fresh_content += 1;
            let spread = (self.fresh_content - FIRST_UNIQUE_CONTENT).wrapping_mul(0x9e37) % (1 << 16);
            FIRST_UNIQUE_CONTENT + (spread << 10) + (self.fresh_content & 0x3ff)
        } else {
            ZERO_CONTENT
        }
    }

    /// Write each page of a region once.
    fn fill(&mut self, region: RegionNumber, mix: (u32, u64, u64)) {
        let process = self.owner(region);
        let pages = (0..self.region_pages[region]).map(|page| (page, self.content(mix.0, mix.1, mix.2))).collect();
        self.push(LayoutStep::Write { process, region, pages });
    }

    /// Write neighboring pages of a region, up to its end at most: parts of a common image, unique contents, one
    /// content, or zeros.
    fn write_run(&mut self, process: ProcessNumber, region: RegionNumber, first: u64, pages: u64) {
        let end = self.region_pages[region].min(first + pages);
        let image = self.below(2) as Content;
        let kind = self.below(10);
        let start = match kind {
            0..=3 => FIRST_IMAGE_CONTENT + image * IMAGE_DISTANCE + first as Content,
            4..=6 => {
                let place = self.below(6) as Content;
                self.fresh_content += (end - first) as Content;
                let fresh = self.fresh_content - FIRST_UNIQUE_CONTENT;
                FIRST_IMAGE_CONTENT + place * (1 << 22) + UNIQUE_RUN_OFFSET + fresh
            }
            7 => 1 + image,
            _ => ZERO_CONTENT,
        };
        let content = |page: u64| if kind < 7 { start + (page - first) as Content } else { start };
        let pages = (first..end).map(|page| (page, content(page))).collect();
        self.push(LayoutStep::Write { process, region, pages });
    }

    fn fill_with_runs(&mut self, region: RegionNumber) {
        let process = self.owner(region);
        let mut page = 0;
        while page < self.region_pages[region] {
            let pages = 1 + self.below(90);
            self.write_run(process, region, page, pages);
            page += pages;
        }
    }

    /// A process with one mergeable region of runs.
    fn populated_with_runs(&mut self, pages: u64) -> ProcessNumber {
        let process = self.spawn();
        let region = self.map(process, pages);
        self.fill_with_runs(region);
        process
    }

    /// Write a run into a random region of a process.
    fn overwrite_run(&mut self, process: ProcessNumber) {
        let regions = self.processes[process].regions.clone();
        let Some(region) = self.choose(&regions) else { return };
        let first = self.below(self.region_pages[region]);
        let pages = 1 + self.below(60);
        self.write_run(process, region, first, pages);
    }

    fn owner(&self, region: RegionNumber) -> ProcessNumber {
        self.processes.iter().position(|process| process.regions.contains(&region)).expect("a process mapped it")
    }

    /// Write some pages of random regions of a process.
    fn write_some(&mut self, process: ProcessNumber, pages: u64, mix: (u32, u64, u64)) {
        for _ in 0..pages {
            let regions = self.processes[process].regions.clone();
            let Some(region) = self.choose(&regions) else { return };
            let page = self.below(self.region_pages[region]);
            let content = self.content(mix.0, mix.1, mix.2);
            self.push(LayoutStep::Write { process, region, pages: vec![(page, content)] });
        }
    }

    fn alive(&self) -> Vec<ProcessNumber> {
        (0..self.processes.len()).filter(|&process| self.processes[process].is_alive).collect()
    }

    /// Processes that can map, advise and fork.
    fn alive_parents(&self) -> Vec<ProcessNumber> {
        self.alive().into_iter().filter(|&process| self.processes[process].parent.is_none()).collect()
    }

    fn unmap(&mut self, region: RegionNumber) {
        let owner = self.owner(region);
        self.push(LayoutStep::Unmap { region });
        self.processes[owner].regions.retain(|&mapped| mapped != region);
    }

    /// Regions of processes that mapped them and are alive, and that no child has.
    fn own_regions(&self) -> Vec<RegionNumber> {
        let parents = self.alive_parents();
        parents.iter().flat_map(|&process| self.processes[process].regions.iter().copied()).collect()
    }

    /// A process with one mergeable region.
    fn populated(&mut self, pages: u64, mix: (u32, u64, u64)) -> ProcessNumber {
        let process = self.spawn();
        let region = self.map(process, pages);
        self.fill(region, mix);
        process
    }
}

fn duplicates(builder: &mut Builder) {
    builder.push(LayoutStep::Set(settings()));
    for _ in 0..3 {
        builder.populated(120, (40, 70, 20));
    }
    builder.scans(6);
}

fn unique(builder: &mut Builder) {
    builder.push(LayoutStep::Set(settings()));
    builder.populated(300, (1, 0, 100));
    builder.scans(5);
}

fn smart_scan(builder: &mut Builder) {
    builder.push(LayoutStep::Set(settings()));
    let first = builder.populated(60, (20, 30, 70));
    builder.scans(14);
    builder.populated(60, (20, 60, 40));
    builder.scans(10);
    builder.write_some(first, 20, (20, 50, 50));
    builder.scans(14);
    builder.push(LayoutStep::Set(KsmSettings { smart_scan: false, ..settings() }));
    builder.scans(3);
}

fn writers(builder: &mut Builder) {
    let smart_scan = builder.below(2) == 0;
    builder.push(LayoutStep::Set(KsmSettings { smart_scan, ..settings() }));
    let processes = [builder.populated(80, (15, 80, 10)), builder.populated(80, (15, 80, 10))];
    for _ in 0..12 {
        builder.scans(1);
        for process in processes {
            builder.write_some(process, 12, (15, 70, 20));
        }
    }
    builder.scans(3);
}

fn forks(builder: &mut Builder) {
    builder.push(LayoutStep::Set(settings()));
    let parent = builder.populated(60, (12, 60, 30));
    let children = [builder.fork(parent), builder.fork(parent)];
    builder.populated(60, (12, 60, 30));
    builder.scans(2);
    for process in [parent, children[0], children[1]] {
        builder.write_some(process, 15, (12, 60, 30));
    }
    builder.scans(3);
    builder.exit(children[0]);
    builder.scans(2);
    builder.fork(parent);
    builder.write_some(parent, 10, (12, 60, 30));
    builder.scans(3);
    builder.exit(parent);
    builder.scans(2);
}

fn merged_forks(builder: &mut Builder) {
    builder.push(LayoutStep::Set(KsmSettings { max_page_sharing: 4, ..settings() }));
    let parent = builder.populated(80, (10, 90, 5));
    builder.scans(3);
    let child = builder.fork(parent);
    builder.write_some(parent, 20, (10, 50, 40));
    builder.scans(1);
    builder.write_some(child, 30, (10, 50, 40));
    builder.scans(3);
    builder.exit(child);
    builder.scans(3);
}

fn huge_pages(builder: &mut Builder) {
    builder.push(LayoutStep::Set(settings()));
    for _ in 0..2 {
        let process = builder.spawn();
        let region = builder.map_on(process, 2 * PAGES_IN_HUGE_PAGE, true, 0);
        builder.advise(region, 0, 2 * PAGES_IN_HUGE_PAGE, Advice::Mergeable);
        // The first huge page has few duplicates, the second none: only a merge splits one.
        let mut pages = Vec::new();
        for page in 0..2 * PAGES_IN_HUGE_PAGE {
            let content =
                if page < PAGES_IN_HUGE_PAGE { builder.content(100, 10, 85) } else { builder.content(1, 0, 100) };
            pages.push((page, content));
        }
        builder.push(LayoutStep::Write { process, region, pages });
    }
    builder.populated(40, (100, 50, 40));
    builder.scans(5);
    for process in builder.alive() {
        builder.write_some(process, 20, (100, 60, 20));
    }
    builder.scans(4);
}

fn chains(builder: &mut Builder) {
    let max_page_sharing = 2 + builder.below(4) as usize;
    builder.push(LayoutStep::Set(KsmSettings { max_page_sharing, ..settings() }));
    chain_churn(builder);
}

fn unpruned_chains(builder: &mut Builder) {
    let stable_node_chains_prune_millisecs = NEVER_PRUNE_MS;
    builder.push(LayoutStep::Set(KsmSettings {
        max_page_sharing: 3,
        stable_node_chains_prune_millisecs,
        ..settings()
    }));
    chain_churn(builder);
}

fn chain_churn(builder: &mut Builder) {
    let processes: Vec<_> = (0..3).map(|_| builder.populated(70, (8, 80, 10))).collect();
    builder.scans(5);
    for _ in 0..6 {
        for &process in &processes {
            builder.write_some(process, 25, (8, 50, 45));
        }
        builder.scans(2);
    }
    builder.exit(processes[0]);
    builder.scans(2);
    builder.write_some(processes[1], 120, (8, 5, 95));
    builder.scans(3);
}

fn zero_pages(builder: &mut Builder) {
    builder.push(LayoutStep::Set(KsmSettings { use_zero_pages: true, ..settings() }));
    let process = builder.populated(80, (10, 30, 20));
    let region = builder.map(process, 20);
    for page in 0..20 {
        builder.push(LayoutStep::Read { region, page });
    }
    builder.scans(3);
    builder.write_some(process, 30, (10, 30, 20));
    builder.scans(3);
    builder.advise(0, 10, 30, Advice::Unmergeable);
    builder.scans(2);
    builder.push(LayoutStep::Set(settings()));
    builder.write_some(process, 30, (10, 10, 10));
    builder.scans(3);
}

fn zero_forks(builder: &mut Builder) {
    builder.push(LayoutStep::Set(KsmSettings { use_zero_pages: true, ..settings() }));
    let parent = builder.populated(60, (10, 30, 10));
    builder.scans(3);
    let child = builder.fork(parent);
    builder.scans(1);
    builder.write_some(child, 20, (10, 40, 40));
    builder.write_some(parent, 20, (10, 40, 40));
    builder.scans(3);
    builder.exit(child);
    builder.scans(2);
}

fn arrivals(builder: &mut Builder) {
    builder.push(LayoutStep::Set(settings()));
    for _ in 0..8 {
        builder.populated(50, (25, 60, 30));
        builder.scans(2);
        let alive = builder.alive();
        if alive.len() > 3 {
            let ended = builder.choose(&alive).expect("some are alive");
            builder.exit(ended);
            builder.scans(1);
        }
    }
    for process in builder.alive() {
        builder.exit(process);
    }
    builder.scans(1);
    builder.populated(20, (25, 60, 30));
    builder.scans(3);
}

fn partial_ranges(builder: &mut Builder) {
    builder.push(LayoutStep::Set(settings()));
    for _ in 0..2 {
        let process = builder.spawn();
        let region = builder.map_on(process, 100, false, 0);
        builder.fill(region, (15, 70, 20));
        builder.advise(region, 20, 30, Advice::Mergeable);
        builder.advise(region, 60, 20, Advice::Mergeable);
    }
    builder.scans(3);
    for _ in 0..6 {
        let regions = builder.own_regions();
        let region = builder.choose(&regions).expect("regions are mapped");
        let first = builder.below(80);
        let pages = 1 + builder.below(20);
        let advice = builder.choose(&[Advice::Mergeable, Advice::Unmergeable, Advice::DontNeed]);
        builder.advise(region, first, pages, advice.expect("a choice"));
        builder.scans(2);
    }
    builder.unmap(0);
    builder.scans(2);
}

fn small_batches(builder: &mut Builder) {
    let pages_to_scan = 7 + builder.below(30);
    builder.push(LayoutStep::Set(KsmSettings { pages_to_scan, ..settings() }));
    for _ in 0..3 {
        builder.populated(40, (12, 60, 30));
    }
    builder.scans(2);
    for _ in 0..16 {
        builder.push(LayoutStep::Batches(1));
        disturb(builder, 3);
    }
    builder.scans(4);
}

/// Some random changes that a scan in progress must cope with.
fn disturb(builder: &mut Builder, changes: u64) {
    for _ in 0..changes {
        match builder.below(8) {
            0 => {
                builder.populated(20, (12, 60, 30));
            }
            1 => {
                let parents = builder.alive_parents();
                if let Some(parent) = builder.choose(&parents).filter(|_| parents.len() > 1) {
                    builder.exit(parent);
                }
            }
            2 => {
                let parents = builder.alive_parents();
                if let Some(parent) = builder.choose(&parents).filter(|_| builder.alive().len() < 8) {
                    builder.fork(parent);
                }
            }
            3 => {
                let regions = builder.own_regions();
                if let Some(region) = builder.choose(&regions) {
                    let pages = builder.region_pages[region];
                    let first = builder.below(pages);
                    let advice = builder.choose(&[Advice::Mergeable, Advice::Unmergeable, Advice::DontNeed]);
                    builder.advise(region, first, pages - first, advice.expect("a choice"));
                }
            }
            4 => {
                let regions = builder.own_regions();
                if let Some(region) = builder.choose(&regions).filter(|_| regions.len() > 2) {
                    builder.unmap(region);
                }
            }
            _ => {
                let alive = builder.alive();
                if let Some(process) = builder.choose(&alive) {
                    builder.write_some(process, 4, (12, 60, 30));
                }
            }
        }
    }
}

fn run_states(builder: &mut Builder) {
    builder.push(LayoutStep::Set(KsmSettings { use_zero_pages: true, ..settings() }));
    let parent = builder.populated(60, (10, 60, 20));
    builder.populated(60, (10, 60, 20));
    builder.scans(3);
    builder.push(LayoutStep::Run(RunState::Unmerged));
    builder.fork(parent);
    builder.populated(30, (10, 60, 20));
    builder.scans(3);
    builder.push(LayoutStep::Run(RunState::Stopped));
    builder.write_some(parent, 20, (10, 60, 20));
    builder.push(LayoutStep::Run(RunState::Unmerged));
    builder.exit(parent);
    builder.push(LayoutStep::Set(KsmSettings { max_page_sharing: 2, ..settings() }));
    builder.scans(4);
}

fn mixed(builder: &mut Builder) {
    let chosen = KsmSettings {
        max_page_sharing: 2 + builder.below(6) as usize,
        use_zero_pages: builder.below(2) == 0,
        smart_scan: builder.below(3) > 0,
        ..settings()
    };
    builder.push(LayoutStep::Set(chosen));
    for _ in 0..3 {
        builder.populated(50, (10, 70, 20));
    }
    for _ in 0..14 {
        let scans = 1 + builder.below(2);
        builder.scans(u32::try_from(scans).expect("small"));
        disturb(builder, 6);
    }
    builder.scans(3);
}

/// Settings under which runs meet each way of merging.
fn settings_for_runs(builder: &mut Builder) -> KsmSettings {
    let prune_ms = builder.choose(&[0, NEVER_PRUNE_MS]).expect("a choice");
    KsmSettings {
        max_page_sharing: builder.choose(&[2, 3, 5, 20, 256]).expect("a choice"),
        use_zero_pages: builder.below(3) == 0,
        smart_scan: builder.below(2) == 0,
        stable_node_chains_prune_millisecs: prune_ms,
        ..settings()
    }
}

fn disturb_runs(builder: &mut Builder, changes: u64) {
    for _ in 0..changes {
        let alive = builder.alive();
        match builder.below(10) {
            0 => disturb(builder, 1),
            1 if alive.len() < 7 => {
                builder.populated_with_runs(150);
            }
            2..=5 => {
                if let Some(process) = builder.choose(&alive) {
                    builder.overwrite_run(process);
                }
            }
            6..=7 => {
                if let Some(process) = builder.choose(&alive) {
                    builder.write_some(process, 3, (5, 30, 50));
                }
            }
            _ => {}
        }
    }
}

fn runs(builder: &mut Builder) {
    let chosen = settings_for_runs(builder);
    builder.push(LayoutStep::Set(chosen));
    for _ in 0..4 {
        builder.populated_with_runs(200);
    }
    builder.scans(3);
    for _ in 0..8 {
        let changes = builder.below(6);
        disturb_runs(builder, changes);
        builder.scans(2);
    }
    builder.push(LayoutStep::Set(KsmSettings { smart_scan: !chosen.smart_scan, ..chosen }));
    builder.scans(6);
}

fn runs_in_batches(builder: &mut Builder) {
    let pages_to_scan = 20 + builder.below(150);
    let chosen = KsmSettings { pages_to_scan, ..settings_for_runs(builder) };
    builder.push(LayoutStep::Set(chosen));
    for _ in 0..3 {
        builder.populated_with_runs(180);
    }
    builder.scans(2);
    for _ in 0..14 {
        let changes = builder.below(3);
        disturb_runs(builder, changes);
        let batches = 1 + builder.below(4);
        builder.push(LayoutStep::Batches(u32::try_from(batches).expect("small")));
    }
    builder.scans(3);
}

fn huge_runs(builder: &mut Builder) {
    let chosen = settings_for_runs(builder);
    builder.push(LayoutStep::Set(chosen));
    for huge in [true, true, false] {
        let process = builder.spawn();
        let region = builder.map_on(process, PAGES_IN_HUGE_PAGE, huge, 0);
        builder.advise(region, 0, PAGES_IN_HUGE_PAGE, Advice::Mergeable);
        builder.fill_with_runs(region);
    }
    builder.scans(4);
    disturb_runs(builder, 5);
    builder.scans(3);
}

fn two_nodes(builder: &mut Builder) {
    let merge_across_nodes = builder.below(2) == 0;
    builder.push(LayoutStep::Set(KsmSettings { merge_across_nodes, ..settings() }));
    for _ in 0..2 {
        let process = builder.spawn();
        for node in 0..2 {
            let region = builder.map_on(process, 60, false, node);
            builder.advise(region, 0, 60, Advice::Mergeable);
            builder.fill(region, (15, 80, 10));
        }
    }
    builder.scans(4);
    for process in builder.alive() {
        builder.write_some(process, 20, (15, 80, 10));
    }
    builder.scans(4);
}
