//! A host with one Nth of the memory of another one, and the same machines.
//!
//! A simulation takes time in proportion to memory, above all where the daemon reads it. Machines keep their number,
//! arrivals and lifetimes. Rates and policies slow down as memory shrinks, so that everything takes as long in virtual time
//! as on the whole host.

use super::scenario::Scenario;
use std::num::NonZeroU32;

/// Divides the memory of the host and of each machine, the rates at which machines write and fill their page cache, and the
/// pace of policies. Each machine keeps a page at least.
pub fn divide_memory(scenario: &mut Scenario, divisor: NonZeroU32) {
    scenario.divisor = scenario.divisor.saturating_mul(divisor);
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

    const HOST: &str = "description = 't'\nduration = '40min'\nsample = '10s'\n[host]\nmemory = '640 MiB'\n\
        used = '64 MiB'\ncpus = 4\nkernel = '6.12'\n[[template]]\nname = 't'\nsize = '64 MiB'\nzero = 0.1\n\
        common = 0.4\nunique = 0.3\nrun_pages = [1, 32]\ngrowth = { per_minute = '64 KiB', common = 0.1 }\n\
        writes = [{ content = 'unique', share = 0.1, pages_per_second = 40.0 }]\n\
        [[machines]]\nname = 'm'\ntemplate = 't'\ncount = 12\nwave = 4\nevery = '5min'\n";

    /// The share of the memory saved over time, when most of it was saved, and CPU time for the whole host.
    fn figures(scenario: &Scenario, policy: &str) -> [f64; 3] {
        let plan = SimulationPlan { seeds: vec![1], exactness: Exactness::Exact, threads: 1, run_daemon: None };
        let policies = [ComparedPolicy::parse(policy).unwrap()];
        let runs = compare(scenario, &policies, &plan, &AtomicU64::new(0)).unwrap();
        let measures = RunMeasures::new(&runs[0].runs[0]);
        let saved = measures.saved_byte_seconds / scenario.host.memory_pages as f64;
        [saved, measures.seconds_to_share[1].unwrap(), measures.cores() * f64::from(scenario.divisor.get())]
    }

    #[test]
    fn part_of_a_host_behaves_as_the_whole() {
        let whole = parse_scenario(HOST).unwrap();
        let mut small = whole.clone();
        divide_memory(&mut small, NonZeroU32::new(8).unwrap());
        assert_eq!((small.host.memory_pages, small.templates[0].pages), (20_480, 1 << 11));
        let template = &small.templates[0];
        assert_eq!((template.writes[0].pages_per_second, template.growth.unwrap().pages_per_minute), (5.0, 2.0));
        for (policy, bounds) in [("whole:800/20", [0.03, 0.05, 0.05]), ("ksmtuned", [0.03, 0.05, 0.15])] {
            let (whole, small) = (figures(&whole, policy), figures(&small, policy));
            let errors = [0, 1, 2].map(|figure| small[figure] / whole[figure] - 1.0);
            assert!(errors.iter().zip(bounds).all(|(error, bound)| error.abs() < bound), "{policy}: {errors:?}");
        }
    }

    #[test]
    fn nothing_becomes_empty() {
        let mut scenario = parse_scenario(HOST).unwrap();
        divide_memory(&mut scenario, NonZeroU32::MAX);
        let template = &scenario.templates[0];
        assert_eq!((scenario.host.memory_pages, template.pages, template.run_pages), (1, 1, (1, 1)));
    }
}
