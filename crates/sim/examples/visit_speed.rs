//! How many pages a second the model visits, for memory without duplicates. Run it with `--release`; the argument is
//! the number of pages.

#![forbid(unsafe_code)]

use std::time::Instant;

use pagefold_sim::decide::ksmd::{Advice, KsmModel, KsmSettings, RunState};
use pagefold_sim::decide::memory::Content;
use pagefold_sim::decide::rules::{KernelVersion, KsmRules};

fn main() {
    let pages: u64 = std::env::args().nth(1).map_or(1 << 20, |text| text.parse().expect("a number of pages"));
    for smart_scan in [false, true] {
        let settings = KsmSettings { pages_to_scan: u64::MAX, smart_scan, ..KsmSettings::default() };
        let rules = KsmRules::for_version(KernelVersion { major: 6, minor: 18, stable: 0 });
        let mut model = KsmModel::new(rules, settings);
        let process = model.spawn();
        model.map(process, 0, pages, 0);
        model.advise(process, 0, pages, Advice::Mergeable);
        for page in 0..pages {
            // Odd multiples permute the contents, so that they do not come in order.
            let content = (page * 0x9e37_79b1) % pages.next_power_of_two();
            model.write(process, page, Content::try_from(content).expect("a 32-bit content"));
        }
        model.write_run(RunState::Merging);
        for scan in 1..=6 {
            let before = model.counters();
            let started = Instant::now();
            model.run_batch();
            let now = model.counters();
            let passed = now.pages_scanned + now.pages_skipped - before.pages_scanned - before.pages_skipped;
            let million_a_second = passed as f64 / started.elapsed().as_secs_f64() / 1e6;
            println!("smart_scan {}, scan {scan}: {million_a_second:.1} million pages a second", u8::from(smart_scan));
        }
    }
}
