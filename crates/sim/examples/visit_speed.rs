//! How many pages the model visits in a second of CPU time, and how much memory it takes, on hosts of real size. Run it
//! with `--release` and the name of a scenario. Further arguments: `machines=N` (400), and `run=N` for the longest run
//! of neighboring pages with one origin (512).
//!
//! A host of 400 machines has 1.5 TiB: 1,006,633 pages each. The machines come from eight templates. Two fifths of a
//! machine's memory are the files of its template, each machine with its own order of files; two fifths are contents
//! that no other page has; one fifth is zero.

#![forbid(unsafe_code)]

use std::fs;

use pagefold_sim::decide::ksmd::{Advice, KsmModel, KsmSettings, RunState};
use pagefold_sim::decide::memory::{Content, PAGES_IN_HUGE_PAGE, SimulatedProcessId};
use pagefold_sim::decide::rules::{KernelVersion, KsmRules};

const MACHINE_PAGES: u64 = 1_006_633;
const TEMPLATES: u64 = 8;
const SCANS: u32 = 10;

struct Scenario {
    name: &'static str,
    smart_scan: bool,
    use_zero_pages: bool,
    /// One page of this many is written between two scans.
    written: Option<u64>,
    huge: bool,
    batch: u64,
}

const WHOLE_SCAN: u64 = u64::MAX;

const SCENARIOS: &[Scenario] = &[
    Scenario { name: "host", smart_scan: false, use_zero_pages: false, written: None, huge: false, batch: WHOLE_SCAN },
    Scenario {
        name: "smart-scan",
        smart_scan: true,
        use_zero_pages: false,
        written: None,
        huge: false,
        batch: WHOLE_SCAN,
    },
    Scenario {
        name: "zero-pages",
        smart_scan: false,
        use_zero_pages: true,
        written: None,
        huge: false,
        batch: WHOLE_SCAN,
    },
    Scenario { name: "batches", smart_scan: false, use_zero_pages: false, written: None, huge: false, batch: 5000 },
    Scenario {
        name: "huge-pages",
        smart_scan: false,
        use_zero_pages: false,
        written: None,
        huge: true,
        batch: WHOLE_SCAN,
    },
    Scenario {
        name: "written",
        smart_scan: false,
        use_zero_pages: false,
        written: Some(100),
        huge: false,
        batch: WHOLE_SCAN,
    },
    Scenario {
        name: "written-smart",
        smart_scan: true,
        use_zero_pages: false,
        written: Some(100),
        huge: false,
        batch: WHOLE_SCAN,
    },
];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |name: &str, otherwise: u64| {
        let text = arguments.iter().find_map(|argument| argument.strip_prefix(name)?.strip_prefix('='));
        text.map_or(otherwise, |text| text.parse().expect("a number"))
    };
    let (machines, longest_run) = (number("machines", 400), number("run", 512));
    let name = arguments.first().map_or("", String::as_str);
    match SCENARIOS.iter().find(|scenario| scenario.name == name) {
        Some(scenario) => measure_host(scenario, machines, longest_run),
        None if name == "fragmented" => measure_fragmented(KsmModel::new),
        None if name == "page-by-page" => {
            measure_fragmented(|rules, settings| KsmModel::new(rules, settings).page_by_page());
        }
        None => {
            let names: Vec<_> = SCENARIOS.iter().map(|scenario| scenario.name).collect();
            println!("name a scenario: {} fragmented page-by-page", names.join(" "));
        }
    }
}

fn settings(scenario: &Scenario) -> KsmSettings {
    KsmSettings {
        pages_to_scan: scenario.batch,
        smart_scan: scenario.smart_scan,
        use_zero_pages: scenario.use_zero_pages,
        ..KsmSettings::default()
    }
}

fn rules() -> KsmRules {
    KsmRules::for_version(KernelVersion { major: 6, minor: 18, stable: 0 })
}

/// Numbers by chance (splitmix64 by Vigna, <https://prng.di.unimi.it/splitmix64.c>), and contents.
struct Source {
    random: u64,
    /// Contents come in blocks of this size, in an order by chance.
    block: u64,
    next_block: u64,
}

impl Source {
    fn below(&mut self, limit: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }

    /// The first of a block of contents that no page has.
    fn fresh_contents(&mut self) -> Content {
        let blocks = (1 << 30) / self.block;
        loop {
            self.next_block += 1;
            assert!(self.next_block < blocks, "contents are used up");
            let place = self.next_block.wrapping_mul(0x9e37_79b1) % blocks;
            if place != 0 && place != blocks - 1 {
                return Content::try_from(place * self.block).expect("below 2^30");
            }
        }
    }

    fn run_pages(&mut self) -> u64 {
        1 + self.below(self.block)
    }
}

/// A file of a template: its first content and its pages.
type File = (Content, u64);

fn measure_host(scenario: &Scenario, machines: u64, longest_run: u64) {
    let resident_before = resident_bytes();
    let mut source = Source { random: 1, block: longest_run.next_power_of_two(), next_block: 0 };
    let templates: Vec<Vec<File>> = (0..TEMPLATES).map(|_| template(&mut source)).collect();
    let mut model = KsmModel::new(rules(), settings(scenario));
    let mut processes = Vec::new();
    for machine in 0..machines {
        let files = &templates[(machine % TEMPLATES) as usize];
        processes.push(add_machine(&mut model, &mut source, files, scenario.huge));
    }
    let pages = machines * MACHINE_PAGES;
    model.write_run(RunState::Merging);
    for scan in 1..=SCANS {
        measure_scan(scan, &mut model, pages, resident_before);
        if let Some(one_of) = scenario.written {
            let mut content = (0, 0);
            for _ in 0..pages / one_of {
                if content.1 == 0 {
                    content = (source.fresh_contents(), source.block);
                }
                let process = processes[source.below(machines) as usize];
                model.write(process, source.below(MACHINE_PAGES), content.0);
                content = (content.0 + 1, content.1 - 1);
            }
        }
    }
}

/// The files of a template, two fifths of a machine.
fn template(source: &mut Source) -> Vec<File> {
    let mut files = Vec::new();
    let mut left = MACHINE_PAGES * 2 / 5;
    while left > 0 {
        let pages = source.run_pages().min(left);
        files.push((source.fresh_contents(), pages));
        left -= pages;
    }
    files
}

/// A machine of all files of its template in an order of its own, unique runs and zeros between them.
fn add_machine(model: &mut KsmModel, source: &mut Source, files: &[File], huge: bool) -> SimulatedProcessId {
    let process = model.spawn();
    let mapped = MACHINE_PAGES.next_multiple_of(PAGES_IN_HUGE_PAGE);
    model.map(process, 0, mapped, 0);
    model.advise(process, 0, mapped, Advice::Mergeable);
    if huge {
        (0..mapped).step_by(PAGES_IN_HUGE_PAGE as usize).for_each(|page| model.fault_huge_page(process, page));
    }
    let mut files = files.to_vec();
    let mut page = 0;
    while page < MACHINE_PAGES {
        let left = MACHINE_PAGES - page;
        let kind = source.below(5);
        let (content, pages, ascends) = match kind {
            0 | 1 if !files.is_empty() => {
                let chosen = source.below(files.len() as u64) as usize;
                let (content, pages) = files.swap_remove(chosen);
                (content, pages, true)
            }
            4 => (0, source.run_pages(), false),
            _ => (source.fresh_contents(), source.run_pages(), true),
        };
        let pages = pages.min(left);
        model.write_pages(process, page..page + pages, content, ascends);
        page += pages;
    }
    process
}

/// Contents in no order, so that each page has a history of its own.
fn measure_fragmented(new_model: impl Fn(KsmRules, KsmSettings) -> KsmModel) {
    let pages: u64 = 1 << 22;
    let resident_before = resident_bytes();
    let mut model = new_model(rules(), KsmSettings { pages_to_scan: WHOLE_SCAN, ..KsmSettings::default() });
    let process = model.spawn();
    model.map(process, 0, pages, 0);
    model.advise(process, 0, pages, Advice::Mergeable);
    for page in 0..pages {
        // Odd multiples permute the contents.
        let content = 1 + page * 0x9e37_79b1 % pages;
        model.write(process, page, Content::try_from(content).expect("a 32-bit content"));
    }
    model.write_run(RunState::Merging);
    for scan in 1..=SCANS {
        measure_scan(scan, &mut model, pages, resident_before);
    }
}

fn measure_scan(scan: u32, model: &mut KsmModel, pages: u64, resident_before: u64) {
    let before = model.counters();
    let started = cpu_seconds();
    while model.counters().full_scans == before.full_scans {
        model.run_batch();
    }
    let seconds = cpu_seconds() - started;
    let now = model.counters();
    let passed = now.pages_scanned + now.pages_skipped - before.pages_scanned - before.pages_skipped;
    let million_a_second = passed as f64 / seconds / 1e6;
    let bytes = resident_bytes().saturating_sub(resident_before) as f64 / pages as f64;
    println!("scan {scan}: {million_a_second:.0} million pages a second, {seconds:.2} s, {bytes:.2} bytes a page");
}

/// CPU time of this program.
fn cpu_seconds() -> f64 {
    let schedstat = fs::read_to_string("/proc/self/schedstat").expect("the kernel has schedstat");
    let nanoseconds: u64 = schedstat.split(' ').next().and_then(|field| field.parse().ok()).expect("a number");
    nanoseconds as f64 / 1e9
}

/// Resident memory of this program.
fn resident_bytes() -> u64 {
    let statm = fs::read_to_string("/proc/self/statm").expect("/proc is mounted");
    let pages: u64 = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("a number");
    pages * 4096
}
