//! The memory of a host's processes as the known layouts of a scenario's machines.
//!
//! Where ksmd meets which page decides how fast it saves. On a real host it may also decide whether a scan merges much at
//! all: if a page of the unstable tree is gone, because a split of its huge page has mapped it to the zero page, each walk
//! to it ends without a result (Linux 6.12 and later), so the order of contents by their bytes counts, too. Templates have
//! neither order, so a forecast for the processes that run uses these layouts.
//!
//! Pages that were left out leave no gap, and regions follow each other without one. Neighboring huge pages are huge pages
//! again, from the next multiple of their size on, and what is left of the last one are base pages.
//!
//! Limit: where a page of a huge page was left out, the huge pages behind it begin a page later.

use super::estimate::{Families, PageKind, WritePattern};
use super::memory::{CONTENT_LIMIT, PAGES_IN_HUGE_PAGE};
use super::observed_host::{ObservedContent, ObservedHost, ObservedMachine, ObservedRun};
use super::scenario::{ContentKind, LayoutRun, MachineLayout, Scenario, Template};
use crate::scenario::MAX_RUN_PAGES;

/// Layouts have at most so many pages: half of the model's contents.
pub const MAX_KNOWN_PAGES: u64 = CONTENT_LIMIT as u64 / 2;

/// Gives the machines of an estimated scenario the layouts of the processes. Returns whether the model has enough contents
/// for that: one for each page, and a block for each run that is written. Otherwise the scenario stays as it is.
#[must_use]
pub fn add_known_layouts(scenario: &mut Scenario, host: &ObservedHost, pattern: WritePattern) -> bool {
    let pages: u64 = host.machines.iter().map(ObservedMachine::pages).sum();
    if pages > MAX_KNOWN_PAGES {
        return false;
    }
    let families = Families::new(host);
    let knows_order = host.machines.iter().any(|machine| !machine.ranks.is_empty());
    let mut numbers = ContentNumbers { of_observed: vec![0; host.numbered_contents as usize], next: 1 };
    let mut layouts: Vec<Vec<MachineLayout>> = Vec::new();
    for (class, members) in scenario.classes.iter().zip(families.classes(host)) {
        let template = &scenario.templates[class.template];
        let mut layout = |machine: &usize| {
            let writer = |content| writer_of(content, families.kind(content), template, pattern);
            lay_out(&host.machines[*machine], &mut numbers, writer)
        };
        layouts.push(members.machines.iter().map(&mut layout).collect());
    }
    scenario.classes.iter_mut().zip(layouts).for_each(|(class, layouts)| class.layouts = layouts);
    let has_enough = needed_contents(scenario, block_pages(scenario)) <= u64::from(CONTENT_LIMIT);
    if !has_enough {
        scenario.classes.iter_mut().for_each(|class| class.layouts.clear());
    }
    scenario.knows_content_order = has_enough && knows_order;
    has_enough
}

/// The least pages of a block of contents for known layouts. With it, [`MAX_RANKED_PAGES`] pages need half of the model's
/// contents for their writes.
const MIN_KNOWN_BLOCK_PAGES: u64 = 16;

/// The most pages whose contents are put in order: 128 GiB.
pub const MAX_RANKED_PAGES: usize = 1 << 25;

/// The pages of a block of contents, of which each run that is drawn or written takes one: the longest of these runs. Where
/// the layouts of all machines are known, no run is drawn, and a longer written run is cut in pieces if the model would
/// not have enough contents otherwise.
pub(super) fn block_pages(scenario: &Scenario) -> u64 {
    if scenario.classes.iter().any(|class| class.layouts.len() < class.count as usize) {
        let of_templates = scenario.templates.iter().map(|template| template.run_pages.1);
        let longest = of_templates.chain(scenario.shared.iter().map(|set| set.run_pages.1)).max();
        return longest.unwrap_or(1).next_power_of_two();
    }
    let written = layout_runs(scenario).filter(|run| run.writer.is_some() && run.content > 0);
    let longest = written.map(|run| run.pages).max().unwrap_or(1).next_power_of_two();
    let halves = |&pages: &u64| (pages > MIN_KNOWN_BLOCK_PAGES).then_some(pages / 2);
    std::iter::successors(Some(longest.clamp(MIN_KNOWN_BLOCK_PAGES, MAX_RUN_PAGES)), halves)
        .find(|&pages| needed_contents(scenario, pages) <= u64::from(CONTENT_LIMIT))
        .unwrap_or(MIN_KNOWN_BLOCK_PAGES)
}

/// The contents that known layouts need in blocks of so many: their own ones, and a block for each piece that is written.
/// The first and the last block of the model's contents are not used.
fn needed_contents(scenario: &Scenario, block_pages: u64) -> u64 {
    let last = layout_runs(scenario).filter(|run| run.content > 0).map(|run| u64::from(run.content) + run.pages - 1);
    let blocks_of = |run: &LayoutRun| match u64::from(run.content) {
        0 => run.pages.div_ceil(block_pages),
        first => (first + run.pages - 2) / block_pages - (first - 1) / block_pages + 1,
    };
    let written = layout_runs(scenario).filter(|run| run.writer.is_some()).map(blocks_of).sum::<u64>();
    (last.max().unwrap_or(0).div_ceil(block_pages) + written + 2) * block_pages
}

fn layout_runs(scenario: &Scenario) -> impl Iterator<Item = &LayoutRun> {
    scenario.classes.iter().flat_map(|class| &class.layouts).flat_map(|layout| &layout.runs)
}

/// The class of writes that writes a page.
fn writer_of(content: ObservedContent, kind: PageKind, template: &Template, pattern: WritePattern) -> Option<u8> {
    let kind = match (pattern, kind) {
        (WritePattern::SamePages, _) if content != ObservedContent::Volatile => return None,
        (_, PageKind::Shared) => return None,
        (_, PageKind::Zero) => ContentKind::Zero,
        (_, PageKind::Common) => ContentKind::Common,
        (_, PageKind::Unique) => ContentKind::Unique,
    };
    template.writes.iter().position(|class| class.content == kind).and_then(|position| u8::try_from(position).ok())
}

/// Numbers of contents whose order by bytes is not known, in the order in which pages with them first appear, so that
/// files are ascending runs.
struct ContentNumbers {
    /// Of each content of the observation; 0 for none yet.
    of_observed: Vec<u32>,
    next: u32,
}

impl ContentNumbers {
    fn take(&mut self, pages: u64) -> u32 {
        let first = self.next;
        self.next += pages as u32;
        first
    }

    fn number(&mut self, observed: u32) -> u32 {
        let position = observed as usize;
        if self.of_observed[position] == 0 {
            self.of_observed[position] = self.take(1);
        }
        self.of_observed[position]
    }
}

fn lay_out(
    machine: &ObservedMachine,
    numbers: &mut ContentNumbers,
    writer: impl Fn(ObservedContent) -> Option<u8>,
) -> MachineLayout {
    let mut layout = MachineLayout::default();
    let mut ranks = machine.ranks.iter();
    for stretch in machine.runs.chunk_by(|a, b| a.is_huge == b.is_huge) {
        if stretch[0].is_huge {
            let pages: u64 = stretch.iter().map(|run| run.pages).sum();
            let start = layout.pages.next_multiple_of(PAGES_IN_HUGE_PAGE);
            layout.huge_pages.extend((0..pages / PAGES_IN_HUGE_PAGE).map(|unit| start + unit * PAGES_IN_HUGE_PAGE));
            layout.pages = start;
        }
        for &ObservedRun { content, pages, .. } in stretch {
            let writer = writer(content);
            match content {
                ObservedContent::Zero => push(&mut layout, pages, 0, writer),
                _ if !machine.ranks.is_empty() => {
                    ranks.by_ref().take(pages as usize).for_each(|&rank| push(&mut layout, 1, rank, writer));
                }
                ObservedContent::Unique | ObservedContent::Volatile => {
                    push(&mut layout, pages, numbers.take(pages), writer);
                }
                ObservedContent::Numbered(observed) => {
                    let number = numbers.number(observed);
                    (0..pages).for_each(|_| push(&mut layout, 1, number, writer));
                }
            }
        }
    }
    layout
}

/// Add pages behind the last one.
fn push(layout: &mut MachineLayout, pages: u64, content: u32, writer: Option<u8>) {
    let page = layout.pages;
    layout.pages += pages;
    if let Some(last) = layout.runs.last_mut() {
        let is_next = match last.content {
            0 => content == 0,
            first => u64::from(first) + last.pages == u64::from(content),
        };
        if is_next && last.page + last.pages == page && last.writer == writer {
            last.pages += pages;
            return;
        }
    }
    layout.runs.push(LayoutRun { page, pages, content, writer });
}

#[cfg(test)]
mod tests {
    use super::super::estimate::estimate;
    use super::super::observed_host::ObservedContent::{Numbered, Unique, Volatile, Zero};
    use super::super::workload::{MemoryChange, Workload};
    use super::*;
    use crate::scenario::parse_scenario;
    use std::collections::BTreeMap;

    fn machine(pages: &[(ObservedContent, u64, bool)]) -> ObservedMachine {
        let mut machine = ObservedMachine { family: "vm".to_owned(), ..ObservedMachine::default() };
        for &(content, count, is_huge) in pages {
            (0..count).for_each(|_| machine.push(content, is_huge));
        }
        machine
    }

    fn host(machines: Vec<ObservedMachine>, numbered_contents: u32) -> ObservedHost {
        let text = "description = 't'\nduration = '1h'\n[host]\nmemory = '1 GiB'\ncpus = 1\nkernel = '6.18'\n\
            [[template]]\nname = 't'\nsize = '4 KiB'\n[[machines]]\nname = 'm'\ntemplate = 't'";
        ObservedHost { spec: parse_scenario(text).unwrap().host, machines, numbered_contents, pass_seconds: Some(2.0) }
    }

    fn scenario(host: &ObservedHost, pattern: WritePattern) -> Scenario {
        let mut scenario = estimate(host, pattern, 3_600_000).scenario;
        assert!(add_known_layouts(&mut scenario, host, pattern));
        scenario
    }

    /// The contents of a machine by page, and its huge pages.
    fn memory(change: &MemoryChange) -> (BTreeMap<u64, u32>, Vec<u64>) {
        let pages = change.writes.iter().flat_map(|run| {
            run.range().map(|page| {
                let place = if run.ascends() { (page - run.page) as u32 } else { 0 };
                (page, run.content + place)
            })
        });
        (pages.collect(), change.huge_pages.clone())
    }

    #[test]
    fn order_of_pages_and_alignment_of_huge_pages_are_kept() {
        let machine = machine(&[
            (Zero, 2, false),
            (Numbered(7), 1, false),
            (Numbered(3), 1, false),
            (Numbered(3), 1, true),
            (Unique, 600, true),
            (Volatile, 1, true),
            (Zero, 500, true),
            (Unique, 1, false),
        ]);
        let mut numbers = ContentNumbers { of_observed: vec![0; 8], next: 1 };
        let layout = lay_out(&machine, &mut numbers, |content| (content == Volatile).then_some(4));
        // 1102 pages in huge pages are two of them, and 78 base pages.
        assert_eq!((layout.pages, &layout.huge_pages[..]), (512 + 1102 + 1, &[512, 1024][..]));
        let run = |page, pages, content, writer| LayoutRun { page, pages, content, writer };
        let expected = [
            run(0, 2, 0, None),
            run(2, 2, 1, None),
            run(512, 601, 2, None),
            run(1113, 1, 603, Some(4)),
            run(1114, 500, 0, None),
            run(1614, 1, 604, None),
        ];
        assert_eq!(layout.runs, expected);
        assert_eq!(numbers.of_observed, [0, 0, 0, 2, 0, 0, 0, 1]);
    }

    #[test]
    fn machines_have_the_contents_of_their_processes() {
        // The second machine has the file of the first one behind a page of its own, and one page of it twice.
        let file: Vec<_> = (0..100).map(|content| (Numbered(content), 1, false)).collect();
        let first = machine(&[&file[..], &[(Zero, 5, false), (Unique, 30, false)]].concat());
        let second = machine(&[&[(Unique, 1, false)], &file[..], &[(Numbered(50), 2, false)]].concat());
        let host = host(vec![first, second], 100);
        let scenario = scenario(&host, WritePattern::SamePages);
        let mut workload = Workload::new(&scenario, 1);
        let arrivals = workload.arrivals();
        let [first, second] = [0, 1].map(|number| memory(&workload.start(&arrivals[number]).unwrap().1).0);
        assert_eq!((first.len(), second.len()), (135, 103));
        assert!((0..100).all(|page| first[&page] == second[&(page + 1)]));
        assert_eq!((second[&101], second[&102]), (first[&50], first[&50]));
        assert!((100..105).all(|page| first[&page] == 0));
        let mut all: Vec<u32> = first.values().chain(second.values()).copied().collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 100 + 1 + 30 + 1, "the file, zeros, and pages of each alone");
    }

    #[test]
    fn written_zeros_get_contents_of_their_own() {
        // Blocks have at most 65,536 pages.
        let machine = machine(&[(Zero, 150_000, false), (Unique, 1000, false), (Volatile, 1000, false)]);
        let host = host(vec![machine], 0);
        let scenario = scenario(&host, WritePattern::AnyPages);
        let mut workload = Workload::new(&scenario, 1);
        let arrivals = workload.arrivals();
        let (mut machine, start) = workload.start(&arrivals[0]).unwrap();
        let mut pages = memory(&start).0;
        for _ in 0..2000 {
            pages.extend(memory(&workload.advance(&mut machine, 10_000).unwrap()).0);
        }
        let mut contents: Vec<u32> = pages.values().copied().collect();
        contents.sort_unstable();
        contents.dedup();
        assert_eq!((pages.len(), contents.len()), (152_000, 152_000), "all pages were written");
    }

    #[test]
    fn order_of_contents_depends_on_the_seed() {
        let host = host(vec![machine(&[(Unique, 100_000, false)])], 0);
        let scenario = scenario(&host, WritePattern::SamePages);
        let contents = |seed| {
            let mut workload = Workload::new(&scenario, seed);
            let arrivals = workload.arrivals();
            memory(&workload.start(&arrivals[0]).unwrap().1).0
        };
        assert_eq!(contents(1), contents(1));
        assert_ne!(contents(1), contents(2));
    }

    #[test]
    fn known_order_of_contents_is_kept_for_every_seed() {
        // More contents than a block has.
        let mut first = machine(&[(Zero, 3, false), (Unique, 70_000, false), (Numbered(0), 2, false)]);
        first.ranks = (1..=70_000).rev().map(|rank| 3 * rank).chain([150_001; 2]).collect();
        let mut second = machine(&[(Numbered(0), 1, false), (Zero, 1, false), (Unique, 20, false)]);
        second.ranks = std::iter::once(150_001).chain((1..=20).map(|rank| 3 * rank + 1)).collect();
        let host = host(vec![first, second], 1);
        let scenario = scenario(&host, WritePattern::SamePages);
        for seed in 1..4 {
            let mut workload = Workload::new(&scenario, seed);
            let arrivals = workload.arrivals();
            let pages = arrivals.iter().zip(&host.machines).flat_map(|(arrival, machine)| {
                let contents: Vec<u32> = memory(&workload.start(arrival).unwrap().1).0.into_values().collect();
                let contents = contents.into_iter().filter(|&content| content != 0);
                contents.zip(machine.ranks.clone()).collect::<Vec<_>>()
            });
            let mut pages: Vec<(u32, u32)> = pages.collect();
            assert_eq!(pages.len(), 70_000 + 2 + 1 + 20);
            pages.sort_unstable();
            pages.dedup();
            assert_eq!(pages.len(), 70_000 + 1 + 20, "a rank has one content");
            assert!(pages.is_sorted_by_key(|(_, rank)| rank));
        }
    }

    #[test]
    fn contents_suffice_for_writes_of_pages_in_a_known_order() {
        // Runs of one page each, and templates with long runs: each page takes a block of few contents when it is written.
        let mut machine = machine(&[(Zero, 20_000, false), (Unique, 1_200_000, false), (Volatile, 20_000, false)]);
        let scattered = |page: u32| page.wrapping_mul(0x9e37_79b1) % 1_220_000;
        let mut order: Vec<u32> = (0..1_220_000).collect();
        order.sort_by_key(|&page| (scattered(page), page));
        machine.ranks = vec![0; order.len()];
        order.iter().zip(1..).for_each(|(&page, rank)| machine.ranks[page as usize] = rank);
        let host = host(vec![machine], 0);
        for pattern in [WritePattern::SamePages, WritePattern::AnyPages] {
            let scenario = scenario(&host, pattern);
            assert_eq!(block_pages(&scenario), MIN_KNOWN_BLOCK_PAGES);
            let mut workload = Workload::new(&scenario, 1);
            let arrivals = workload.arrivals();
            let (mut machine, _) = workload.start(&arrivals[0]).unwrap();
            for _ in 0..200 {
                workload.advance(&mut machine, 10_000).unwrap();
            }
        }
    }

    #[test]
    fn long_runs_are_cut_where_contents_do_not_suffice() {
        // Many single pages that are written, and a long run: a block of the longest run for each would be too much.
        let mut pages = vec![(Volatile, 60_000, false)];
        (0..20_000).for_each(|_| pages.extend([(Unique, 1, false), (Volatile, 1, false)]));
        let host = host(vec![machine(&pages)], 0);
        let scenario = scenario(&host, WritePattern::SamePages);
        let block = block_pages(&scenario);
        assert!((MIN_KNOWN_BLOCK_PAGES..65_536).contains(&block), "{block}");
        assert!(needed_contents(&scenario, block) <= u64::from(CONTENT_LIMIT));
        assert!(needed_contents(&scenario, 2 * block) > u64::from(CONTENT_LIMIT), "no shorter than needed");
    }

    #[test]
    fn pages_that_changed_are_written_at_their_rate() {
        let quiet = machine(&[(Zero, 100, false), (Unique, 300, false)]);
        let busy = machine(&[(Zero, 100, false), (Unique, 200, false), (Volatile, 100, false)]);
        let host = host(vec![quiet, busy], 0);
        for (pattern, expected) in [(WritePattern::SamePages, [0, 100]), (WritePattern::AnyPages, [400, 400])] {
            let scenario = scenario(&host, pattern);
            let mut workload = Workload::new(&scenario, 1);
            let arrivals = workload.arrivals();
            let written = [0, 1].map(|number| {
                let (mut machine, _) = workload.start(&arrivals[number]).unwrap();
                let mut pages = std::collections::BTreeSet::new();
                for _ in 0..2000 {
                    let change = workload.advance(&mut machine, 2000).unwrap();
                    pages.extend(change.writes.iter().flat_map(|run| run.range()));
                }
                pages.len()
            });
            assert_eq!(written, expected, "{pattern:?}");
        }
    }
}
