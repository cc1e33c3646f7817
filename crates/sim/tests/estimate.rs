//! Scenarios estimated from hosts whose memory is known: that of machines that are drawn from a scenario, and that of
//! random pages.

#![forbid(unsafe_code)]

use pagefold_sim::decide::estimate::{ScenarioEstimate, WritePattern, estimate};
use pagefold_sim::decide::memory::{Content, PAGES_IN_HUGE_PAGE};
use pagefold_sim::decide::observed_host::{ObservedContent, ObservedHost, ObservedMachine};
use pagefold_sim::decide::scenario::{ContentKind, Scenario};
use pagefold_sim::decide::workload::Workload;
use pagefold_sim::scenario::parse_scenario;
use pagefold_sim::scenario_text::write_scenario;
use proptest::prelude::*;
use std::collections::{BTreeMap, HashMap, HashSet};

/// Contents and huge pages of a machine, page by page; `None` is not touched.
type MachinePages = Vec<Option<(Content, bool)>>;

/// The memory of all machines of a scenario at the start, with the template of each.
fn draw(scenario: &Scenario, seed: u64) -> Vec<(usize, MachinePages)> {
    let mut workload = Workload::new(scenario, seed);
    let arrivals = workload.arrivals();
    let draw = |arrival| {
        let (machine, change) = workload.start(arrival).unwrap();
        let mut pages: MachinePages = vec![None; machine.pages() as usize];
        for first in change.huge_pages {
            pages[first as usize..][..PAGES_IN_HUGE_PAGE as usize].fill(Some((0, true)));
        }
        for run in &change.writes {
            for page in run.range() {
                let content = if run.ascends() { run.content + (page - run.page) as Content } else { 0 };
                let is_huge = pages[page as usize].is_some_and(|(_, is_huge)| is_huge);
                pages[page as usize] = Some((content, is_huge));
            }
        }
        (scenario.classes[arrival.class].template, pages)
    };
    arrivals.iter().map(draw).collect()
}

/// Pages of zeros and pages whose contents other pages have; and those that merging would free.
fn count_mergeable(machines: &[(usize, MachinePages)]) -> (u64, u64) {
    let mut copies: HashMap<Content, u64> = HashMap::new();
    let pages = machines.iter().flat_map(|(_, pages)| pages).flatten();
    pages.for_each(|&(content, _)| *copies.entry(content).or_default() += 1);
    let counted = copies.iter().filter(|&(&content, &copies)| content == 0 || copies > 1);
    counted.fold((0, 0), |(pages, redundant), (_, copies)| (pages + copies, redundant + copies - 1))
}

/// The host as a census would see it.
fn observe(scenario: &Scenario, machines: &[(usize, MachinePages)]) -> ObservedHost {
    let mut copies: HashMap<Content, u32> = HashMap::new();
    let pages = machines.iter().flat_map(|(_, pages)| pages).flatten();
    pages.for_each(|&(content, _)| *copies.entry(content).or_default() += 1);
    let mut numbers: HashMap<Content, u32> = HashMap::new();
    let mut observed = Vec::new();
    for (template, pages) in machines {
        let family = scenario.templates[*template].name.clone();
        let mut machine = ObservedMachine { family, ..ObservedMachine::default() };
        for &(content, is_huge) in pages.iter().flatten() {
            let next = numbers.len() as u32;
            let seen = match content {
                0 => ObservedContent::Zero,
                _ if copies[&content] == 1 => ObservedContent::Unique,
                _ => ObservedContent::Numbered(*numbers.entry(content).or_insert(next)),
            };
            machine.push(seen, is_huge);
        }
        observed.push(machine);
    }
    ObservedHost {
        spec: scenario.host.clone(),
        machines: observed,
        numbered_contents: numbers.len() as u32,
        pass_seconds: None,
    }
}

fn estimate_checked(host: &ObservedHost, pattern: WritePattern) -> ScenarioEstimate {
    let estimate = estimate(host, pattern, 3_600_000);
    let text = write_scenario(&estimate.scenario, &[]);
    assert_eq!(parse_scenario(&text).unwrap_or_else(|error| panic!("{error}\n{text}")), estimate.scenario, "{text}");
    estimate
}

/// Checks that the estimated scenario has the mergeable pages of the host, whatever the seed.
fn check_mergeable(estimate: &ScenarioEstimate, expected: (u64, u64)) {
    assert_eq!((estimate.mergeable_pages, estimate.redundant_pages), expected, "by the estimate");
    for seed in [1, 2] {
        let drawn = count_mergeable(&draw(&estimate.scenario, seed));
        assert_eq!(drawn, expected, "as drawn: {:?}", estimate.scenario);
    }
}

fn scenario(templates: &str) -> Scenario {
    let head = "description = 't'\nduration = '1h'\n[host]\nmemory = '64 GiB'\ncpus = 4\nkernel = '6.18'\n";
    parse_scenario(&format!("{head}{templates}")).unwrap()
}

prop_compose! {
    fn template(number: usize)(
        pages in 600_u64..4000,
        shares in prop::array::uniform4(0.0..1.0_f64),
        least in 1_u64..9,
        more in 0_u64..24,
        huge in 0.0..1.0_f64,
        counts in prop::collection::vec(1_u32..5, 1..3),
    ) -> String {
        let sum: f64 = shares.iter().sum::<f64>().max(1e-3) * 1.001;
        let [zero, common, tenant, unique] = shares.map(|share| share / sum);
        let mut text = format!(
            "[[template]]\nname = 't{number}'\nsize = '{} KiB'\nzero = {zero:.6}\ncommon = {common:.6}\n\
             tenant = {tenant:.6}\nunique = {unique:.6}\nrun_pages = [{least}, {}]\nhuge_pages = {huge:.3}\n",
            pages * 4,
            least + more
        );
        for (tenant, count) in counts.iter().enumerate() {
            text += &format!(
                "[[machines]]\nname = 'm{number}-{tenant}'\ntemplate = 't{number}'\ntenant = '{tenant}'\n\
                 count = {count}\n"
            );
        }
        text
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn scenario_of_drawn_machines_has_their_mergeable_pages(texts in (template(0), template(1)), seed in 0_u64..100) {
        let source = scenario(&(texts.0 + &texts.1));
        let machines = draw(&source, seed);
        let estimate = estimate_checked(&observe(&source, &machines), WritePattern::SamePages);
        check_mergeable(&estimate, count_mergeable(&machines));
        let count = |scenario: &Scenario| scenario.classes.iter().map(|class| class.count).sum::<u32>();
        prop_assert_eq!(count(&estimate.scenario), count(&source));
        // Unique pages of each template are rounded.
        let pages = |machines: &[(usize, MachinePages)]| {
            machines.iter().flat_map(|(_, pages)| pages).flatten().count() as u64
        };
        let drawn = pages(&draw(&estimate.scenario, 1));
        prop_assert!(drawn.abs_diff(pages(&machines)) <= u64::from(count(&source)), "{drawn}");
    }

    #[test]
    fn scenario_of_any_pages_has_their_mergeable_pages(
        machines in prop::collection::vec((0_u8..9, prop::collection::vec((0_u32..40, any::<bool>()), 0..200)), 1..12),
        volatile in prop::collection::vec(any::<bool>(), 200),
        any_pages: bool,
    ) {
        let mut copies: BTreeMap<u32, u64> = BTreeMap::new();
        let mut observed = Vec::new();
        for (family, pages) in &machines {
            let mut machine = ObservedMachine { family: format!("f{family}"), ..ObservedMachine::default() };
            for (&(content, is_huge), is_volatile) in pages.iter().zip(&volatile) {
                let seen = match content {
                    _ if *is_volatile && content % 3 == 0 => ObservedContent::Volatile,
                    0 => ObservedContent::Zero,
                    _ => ObservedContent::Numbered(content),
                };
                if seen != ObservedContent::Volatile {
                    *copies.entry(content).or_default() += 1;
                }
                machine.push(seen, is_huge);
            }
            observed.push(machine);
        }
        let counted = copies.iter().filter(|&(&content, &copies)| content == 0 || copies > 1);
        let expected = counted.fold((0, 0), |(pages, freed), (_, copies)| (pages + copies, freed + copies - 1));
        let pattern = if any_pages { WritePattern::AnyPages } else { WritePattern::SamePages };
        let spec = scenario("[[template]]\nname = 't'\nsize = '4 KiB'\n[[machines]]\nname = 'm'\ntemplate = 't'").host;
        let host = ObservedHost { spec, machines: observed, numbered_contents: 40, pass_seconds: Some(0.5) };
        if host.machines.iter().any(|machine| machine.pages() > 0) {
            check_mergeable(&estimate_checked(&host, pattern), expected);
        }
    }
}

const WEB: &str = "[[template]]\nname = 'web'\nsize = '64 MiB'\nzero = 0.1\ncommon = 0.4\nunique = 0.5\n\
                   run_pages = [1, 32]\nhuge_pages = 0.5\n[[machines]]\nname = 'web'\ntemplate = 'web'\ncount = 6\n";

#[test]
fn template_is_found_again() {
    let source = scenario(WEB);
    let estimate = estimate_checked(&observe(&source, &draw(&source, 1)), WritePattern::SamePages);
    let [template] = &estimate.scenario.templates[..] else { panic!("{:?}", estimate.scenario.templates) };
    assert_eq!((&*template.name, estimate.scenario.classes[0].count), ("web", 6));
    let pages = |kind| (template.pages as f64 * template.share(kind)).round() as u64;
    assert_eq!([ContentKind::Zero, ContentKind::Common, ContentKind::Unique].map(pages), [1638, 6554, 8192]);
    assert!(estimate.scenario.shared.is_empty() && template.writes.is_empty(), "{:?}", estimate.scenario);
    assert!((template.huge_pages - 0.5).abs() < 0.2, "{}", template.huge_pages);
}

#[test]
fn runs_have_the_mean_length_of_those_of_the_host_within_ten_percent() {
    for (least, most) in [(1, 1), (1, 32), (16, 48), (1, 256), (64, 64)] {
        let source = scenario(&WEB.replace("[1, 32]", &format!("[{least}, {most}]")).replace("'64 MiB'", "'256 MiB'"));
        let estimate = estimate_checked(&observe(&source, &draw(&source, 1)), WritePattern::SamePages);
        let (mean, expected) = (estimate.templates[0].mean_run_pages.unwrap(), (least + most) as f64 / 2.0);
        assert!((mean / expected - 1.0).abs() < 0.1, "{mean} and not {expected}");
        let written = estimate.scenario.templates[0].run_pages;
        assert!(((1 + written.1) as f64 / 2.0 - mean).abs() <= 0.25, "{written:?}");
    }
}

#[test]
fn run_length_is_unknown_where_all_pages_are_of_one_kind() {
    let source = scenario(&WEB.replace("zero = 0.1\ncommon = 0.4\n", ""));
    let estimate = estimate_checked(&observe(&source, &draw(&source, 1)), WritePattern::SamePages);
    assert_eq!(estimate.templates[0].mean_run_pages, None);
    assert_eq!(estimate.scenario.templates[0].run_pages, (1, 512));
}

#[test]
fn processes_of_very_different_sizes_are_of_different_templates() {
    let small = WEB.replace("'web'", "'small'").replace("64 MiB", "16 MiB");
    let source = scenario(&(WEB.to_owned() + &small));
    let mut host = observe(&source, &draw(&source, 1));
    host.machines.iter_mut().for_each(|machine| "web".clone_into(&mut machine.family));
    let estimate = estimate_checked(&host, WritePattern::SamePages);
    let names: Vec<&str> = estimate.scenario.templates.iter().map(|template| &*template.name).collect();
    assert_eq!(names, ["web", "web-2"]);
    assert!(estimate.templates[0].machine_pages.0 > 3 * estimate.templates[1].machine_pages.1);
}

#[test]
fn machines_stay_on_the_nodes_to_which_they_are_bound() {
    let source = scenario(WEB);
    let mut host = observe(&source, &draw(&source, 1));
    host.spec.nodes = 2;
    host.machines[0].node = Some(1);
    host.machines[1].node = Some(1);
    let estimate = estimate_checked(&host, WritePattern::SamePages);
    let classes: Vec<_> =
        estimate.scenario.classes.iter().map(|class| (&*class.name, class.node, class.count)).collect();
    assert_eq!(classes, [("web", None, 4), ("web, node 1", Some(1), 2)]);
}

/// A machine of which one page of eight changed between two passes of half a second.
fn host_with_writes() -> ObservedHost {
    let source = scenario(WEB);
    let mut host = observe(&source, &draw(&source, 1));
    for machine in &mut host.machines {
        for _ in 0..2341 {
            machine.push(ObservedContent::Volatile, false);
        }
    }
    host.pass_seconds = Some(0.5);
    host
}

#[test]
fn pages_that_changed_are_written_again_once_in_the_time_between_the_passes() {
    let estimate = estimate_checked(&host_with_writes(), WritePattern::SamePages);
    let template = &estimate.scenario.templates[0];
    let [writes] = &template.writes[..] else { panic!("{template:?}") };
    assert_eq!((writes.content, writes.pages_per_second), (ContentKind::Unique, 4682.0));
    assert_eq!((writes.share * template.pages as f64).round(), 2341.0);
}

#[test]
fn pages_are_written_alike_so_that_as_many_change_between_the_passes() {
    let estimate = estimate_checked(&host_with_writes(), WritePattern::AnyPages);
    let scenario = &estimate.scenario;
    let mut workload = Workload::new(scenario, 1);
    let (mut machine, _) = workload.start(&workload.arrivals()[0]).unwrap();
    let change = workload.advance(&mut machine, 500).unwrap();
    let written: HashSet<u64> = change.writes.iter().flat_map(|run| run.range()).collect();
    assert!(written.len().abs_diff(2341) < 240, "{} pages", written.len());
}
