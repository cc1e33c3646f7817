//! A host with a part of the memory of another one, and the same machines.
//!
//! A simulation takes time in proportion to memory, above all where the daemon reads it. Machines keep their number,
//! arrivals and lifetimes, so a part of the memory with a part of the rates takes as long in virtual time.

use super::scenario::Scenario;
use std::num::NonZeroU32;

/// Divides the memory of the host and of each machine, and the rates at which machines write and fill their page cache.
/// Each keeps a page at least. Policies stay as they are: a fixed pace is so many times as fast for the smaller host.
pub fn divide_memory(scenario: &mut Scenario, divisor: NonZeroU32) {
    let divided = |pages: u64| (pages / u64::from(divisor.get())).max(1);
    let rate = |rate: f64| rate / f64::from(divisor.get());
    scenario.host.memory_pages = divided(scenario.host.memory_pages);
    scenario.host.used_pages = divided(scenario.host.used_pages);
    for template in &mut scenario.templates {
        template.pages = divided(template.pages);
        let (least, most) = template.run_pages;
        template.run_pages = (least.min(template.pages), most.min(template.pages));
        if let Some(growth) = &mut template.growth {
            growth.pages_per_minute = rate(growth.pages_per_minute);
        }
        template.writes.iter_mut().for_each(|class| class.pages_per_second = rate(class.pages_per_second));
    }
    for set in &mut scenario.shared {
        set.pages = divided(set.pages);
    }
    for class in &mut scenario.classes {
        class.layouts.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comparison::{SimulationPlan, compare};
    use crate::decide::host_state::Exactness;
    use crate::decide::measures::RunMeasures;
    use crate::decide::policies::ComparedPolicy;
    use crate::scenario::parse_scenario;
    use std::sync::atomic::AtomicU64;

    const HOST: &str = "description = 't'\nduration = '40min'\nsample = '10s'\n[host]\nmemory = '8 GiB'\n\
        used = '1 GiB'\ncpus = 4\nkernel = '6.12'\n[[template]]\nname = 't'\nsize = '64 MiB'\nzero = 0.1\n\
        common = 0.4\nunique = 0.3\nrun_pages = [1, 32]\ngrowth = { per_minute = '64 KiB', common = 0.1 }\n\
        writes = [{ content = 'unique', share = 0.1, pages_per_second = 40.0 }]\n\
        [[machines]]\nname = 'm'\ntemplate = 't'\ncount = 12\nwave = 4\nevery = '5min'\n";

    /// The share of the memory saved over time, and when most of it was saved.
    fn figures(scenario: &Scenario, policy: &str) -> (f64, f64) {
        let plan = SimulationPlan { seeds: vec![1], exactness: Exactness::Exact, threads: 1, run_daemon: None };
        let policies = [ComparedPolicy::parse(policy).unwrap()];
        let runs = compare(scenario, &policies, &plan, &AtomicU64::new(0)).unwrap();
        let measures = RunMeasures::new(&runs[0].runs[0]);
        (measures.saved_byte_seconds / scenario.host.memory_pages as f64, measures.seconds_to_share[1].unwrap())
    }

    #[test]
    fn smaller_host_behaves_as_the_whole_one_at_a_slower_pace() {
        let whole = parse_scenario(HOST).unwrap();
        let mut small = whole.clone();
        divide_memory(&mut small, NonZeroU32::new(8).unwrap());
        assert_eq!((small.host.memory_pages, small.templates[0].pages), (1 << 18, 1 << 11));
        let template = &small.templates[0];
        assert_eq!((template.writes[0].pages_per_second, template.growth.unwrap().pages_per_minute), (5.0, 2.0));
        let (saved, seconds) = figures(&whole, "whole:160/20");
        let (saved_by_small, seconds_of_small) = figures(&small, "whole:20/20");
        assert!((saved_by_small / saved - 1.0).abs() < 0.03, "{saved} {saved_by_small}");
        assert!((seconds_of_small / seconds - 1.0).abs() < 0.05, "{seconds} {seconds_of_small}");
    }

    #[test]
    fn nothing_becomes_empty() {
        let mut scenario = parse_scenario(HOST).unwrap();
        divide_memory(&mut scenario, NonZeroU32::MAX);
        let template = &scenario.templates[0];
        assert_eq!((scenario.host.memory_pages, template.pages, template.run_pages), (1, 1, (1, 1)));
    }
}
