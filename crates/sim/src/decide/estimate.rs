//! From the memory of a host to a scenario with the same number of mergeable pages.
//!
//! Processes of one family become machines of one template if none has less than half the pages of another. A machine of
//! the scenario has the mean of its template. A content that each machine of a template has once, and no other machine,
//! is common. All other contents with several pages are in shared sets, one or two for each set of templates: contents
//! with the mean number of copies, rounded down and up, so that contents and pages have the same sums as on the host.
//! Zeros that the mean leaves over are in a shared set, too. Unique pages are rounded.
//!
//! The pages of a template change their kind as often as those of the processes. If runs have the mean length `L` and
//! stand in random order, of `N = pages / L` runs the share `1 - sum(f^2)` is followed by one of another kind, where `f`
//! are the shares of the kinds. Only the mean of the lengths follows from that.
//!
//! Two passes tell how many pages were written in between. They do not tell whether the next ones are the same pages:
//! [`WritePattern`].

use super::memory::CONTENT_LIMIT;
use super::observed_host::{ObservedContent, ObservedHost, ObservedMachine};
use super::scenario::{
    Arrival, ContentKind, DEFAULT_VCPUS, MachineClass, Scenario, SharedSet, Template, WriteClass, default_costs,
};
use crate::scenario::{DEFAULT_RUN_PAGES, MAX_RUN_PAGES};
use std::collections::BTreeMap;
use std::num::NonZeroU32;

/// Sets of templates with shared contents of their own. The contents of further ones count to the template that has most
/// of their pages.
const MAX_TEMPLATE_SETS: usize = 24;
/// With less of its runs followed by another kind, the length of a template's runs is not estimated.
const LEAST_CHANGING_SHARE: f64 = 0.02;
/// Samples of a scenario.
const SAMPLES: u64 = 288;
/// Rounds of writes at most: each page that is written often is written in each.
const TICKS: u64 = 8640;
/// Virtual time between two rounds of writes at least, in milliseconds.
const LEAST_TICK_MS: u64 = 1000;

/// Which pages are written from one pass to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WritePattern {
    /// Always those that changed between the two passes, each once in that time, but at most once in a tick of the scenario:
    /// no other page is ever written.
    SamePages,
    /// Any page of the templates with the same probability: in the long run, all are written. Pages of shared sets are not.
    AnyPages,
}

/// What the scenario has in common with the host.
#[derive(Clone, Debug, PartialEq)]
pub struct ScenarioEstimate {
    /// The scenario.
    pub scenario: Scenario,
    /// What is known of each template.
    pub templates: Vec<TemplateFacts>,
    /// Pages of zeros and pages whose contents other pages have.
    pub mergeable_pages: u64,
    /// Pages that merging would free, if one page of zeros and one of each content stays.
    pub redundant_pages: u64,
}

/// What is known of a template.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TemplateFacts {
    /// Processes.
    pub machines: u64,
    /// Pages of the smallest and of the largest one.
    pub machine_pages: (u64, u64),
    /// Pages that changed between the passes, of all of them.
    pub volatile_pages: u64,
    /// The mean length of runs, if it could be estimated.
    pub mean_run_pages: Option<f64>,
}

/// Estimates the scenario of a host.
#[must_use]
pub fn estimate(host: &ObservedHost, pattern: WritePattern, duration_ms: u64) -> ScenarioEstimate {
    let Families { families, template_of, contents } = Families::new(host);
    let totals = sum_templates(host, &template_of, &families, &contents.kinds);
    let longest = longest_run(&totals, &contents);
    let mut templates = Vec::new();
    let mut shared = Vec::new();
    for (number, (family, totals)) in families.iter().zip(&totals).enumerate() {
        let run_pages = totals.run_pages(longest);
        templates.push(make_template(host, family, totals, run_pages, pattern));
        let machines = family.machines.len() as u64;
        if !totals.zero.is_multiple_of(machines) {
            let pages = totals.zero % machines;
            shared.push(SharedSet { templates: vec![number], pages, copies: 1, is_zero: true, run_pages: (1, 1) });
        }
    }
    for (set, sums) in &contents.sets {
        let run_pages = set.iter().map(|&template| totals[template].run_pages(longest)).max().unwrap_or((1, 1));
        shared.extend(SharedSet::with_pages(sums.contents, sums.pages, set, run_pages));
    }
    let zeros: u64 = totals.iter().map(|totals| totals.zero).sum();
    ScenarioEstimate {
        templates: families.iter().zip(&totals).map(|(family, totals)| totals.facts(host, family)).collect(),
        mergeable_pages: zeros + contents.pages,
        redundant_pages: zeros.saturating_sub(1) + contents.pages - contents.contents,
        scenario: Scenario {
            description: String::new(),
            duration_ms,
            seed: 1,
            tick_ms: (duration_ms / TICKS).max(LEAST_TICK_MS),
            sample_ms: (duration_ms / SAMPLES).max(100),
            host: host.spec.clone(),
            costs: default_costs(),
            classes: make_classes(host, &families),
            templates,
            shared,
            divisor: NonZeroU32::MIN,
            knows_content_order: false,
        },
    }
}

/// The processes of a host by their template, and their contents.
pub(super) struct Families {
    families: Vec<Family>,
    /// The template of each process.
    template_of: Vec<usize>,
    contents: ContentClasses,
}

impl Families {
    pub(super) fn new(host: &ObservedHost) -> Self {
        let families = form_templates(&host.machines);
        let mut template_of = vec![0; host.machines.len()];
        for (template, family) in families.iter().enumerate() {
            family.machines.iter().for_each(|&machine| template_of[machine] = template);
        }
        let contents = classify_contents(host, &template_of, &families);
        Self { families, template_of, contents }
    }

    /// The kind of a page.
    pub(super) fn kind(&self, content: ObservedContent) -> PageKind {
        page_kind(content, &self.contents.kinds)
    }

    /// The processes of each class of machines, in the order of the classes.
    pub(super) fn classes(&self, host: &ObservedHost) -> Vec<ClassMembers> {
        class_members(host, &self.families)
    }
}

/// Processes of one template.
struct Family {
    name: String,
    machines: Vec<usize>,
}

/// Sorts processes into templates: by their family, then by their size. Those without pages are left out.
fn form_templates(machines: &[ObservedMachine]) -> Vec<Family> {
    let mut by_name: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (number, machine) in machines.iter().enumerate().filter(|(_, machine)| machine.pages() > 0) {
        by_name.entry(&machine.family).or_default().push(number);
    }
    let mut families: Vec<Family> = Vec::new();
    for (name, mut members) in by_name {
        members.sort_by_key(|&machine| (std::cmp::Reverse(machines[machine].pages()), machine));
        let mut of_one_size: Vec<Vec<usize>> = Vec::new();
        for machine in members {
            match of_one_size.last_mut() {
                Some(group) if machines[machine].pages() * 2 >= machines[group[0]].pages() => group.push(machine),
                _ => of_one_size.push(vec![machine]),
            }
        }
        for mut machines in of_one_size {
            machines.sort_unstable();
            let names = std::iter::once(name.to_owned()).chain((2..).map(|number| format!("{name}-{number}")));
            let is_new = |name: &String| !families.iter().any(|known| known.name == *name);
            let name = names.into_iter().find(is_new).unwrap_or_default();
            families.push(Family { name, machines });
        }
    }
    families
}

/// The kind of a page in the scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PageKind {
    Zero,
    Common,
    Shared,
    Unique,
}

fn page_kind(content: ObservedContent, kinds: &[PageKind]) -> PageKind {
    match content {
        ObservedContent::Zero => PageKind::Zero,
        ObservedContent::Unique | ObservedContent::Volatile => PageKind::Unique,
        ObservedContent::Numbered(content) => kinds[content as usize],
    }
}

/// Contents and pages with them.
#[derive(Clone, Copy, Debug, Default)]
struct SetSums {
    contents: u64,
    pages: u64,
}

/// Contents that several pages have.
struct ContentClasses {
    /// The kind of each numbered content.
    kinds: Vec<PageKind>,
    /// Contents of shared sets, by the templates that have them.
    sets: BTreeMap<Vec<usize>, SetSums>,
    /// Contents that several pages have.
    contents: u64,
    /// Pages with them.
    pages: u64,
}

fn classify_contents(host: &ObservedHost, template_of: &[usize], families: &[Family]) -> ContentClasses {
    let mut pages: Vec<(u32, u32, u64)> = Vec::new();
    for (machine, observed) in (0_u32..).zip(&host.machines) {
        pages.extend(observed.runs.iter().filter_map(|run| match run.content {
            ObservedContent::Numbered(content) => Some((content, machine, run.pages)),
            _ => None,
        }));
    }
    pages.sort_unstable();
    let mut kinds = vec![PageKind::Unique; host.numbered_contents as usize];
    let mut sets: BTreeMap<Vec<usize>, SetSums> = BTreeMap::new();
    let mut largest: BTreeMap<Vec<usize>, BTreeMap<usize, SetSums>> = BTreeMap::new();
    let (mut contents, mut all_pages) = (0, 0);
    for same in pages.chunk_by(|a, b| a.0 == b.0) {
        let copies: u64 = same.iter().map(|&(.., pages)| pages).sum();
        if copies == 1 {
            continue;
        }
        contents += 1;
        all_pages += copies;
        let mut by_template: BTreeMap<usize, u64> = BTreeMap::new();
        same.iter().for_each(|&(_, machine, pages)| {
            *by_template.entry(template_of[machine as usize]).or_default() += pages;
        });
        let is_once_in_each = same.windows(2).all(|pair| pair[0].1 != pair[1].1) && same.iter().all(|page| page.2 == 1);
        let first = by_template.first_key_value().map_or(0, |(&template, _)| template);
        let is_common = by_template.len() == 1 && is_once_in_each && same.len() == families[first].machines.len();
        kinds[same[0].0 as usize] = if is_common { PageKind::Common } else { PageKind::Shared };
        if is_common {
            continue;
        }
        let most = by_template.iter().max_by_key(|&(&template, &pages)| (pages, std::cmp::Reverse(template)));
        let most = most.map_or(first, |(&template, _)| template);
        let set: Vec<usize> = by_template.into_keys().collect();
        for sums in [sets.entry(set.clone()).or_default(), largest.entry(set).or_default().entry(most).or_default()] {
            sums.contents += 1;
            sums.pages += copies;
        }
    }
    ContentClasses { kinds, sets: keep_large_sets(sets, &largest), contents, pages: all_pages }
}

/// Keeps the sets of several templates with most pages. The contents of the others go to the template with most of their
/// pages.
fn keep_large_sets(
    mut sets: BTreeMap<Vec<usize>, SetSums>,
    largest: &BTreeMap<Vec<usize>, BTreeMap<usize, SetSums>>,
) -> BTreeMap<Vec<usize>, SetSums> {
    let mut several: Vec<(u64, Vec<usize>)> =
        sets.iter().filter(|(set, _)| set.len() > 1).map(|(set, sums)| (sums.pages, set.clone())).collect();
    several.sort_by(|a, b| b.cmp(a));
    for (_, set) in several.into_iter().skip(MAX_TEMPLATE_SETS) {
        sets.remove(&set);
        for (&template, sums) in &largest[&set] {
            let own = sets.entry(vec![template]).or_default();
            own.contents += sums.contents;
            own.pages += sums.pages;
        }
    }
    sets
}

/// Pages of all machines of a template.
#[derive(Clone, Copy, Debug, Default)]
struct TemplateTotals {
    machines: u64,
    zero: u64,
    common: u64,
    shared: u64,
    /// Volatile ones included.
    unique: u64,
    volatile: u64,
    huge: u64,
    /// How often a page is followed by one of another kind.
    changes: u64,
}

fn sum_templates(
    host: &ObservedHost,
    template_of: &[usize],
    families: &[Family],
    kinds: &[PageKind],
) -> Vec<TemplateTotals> {
    let mut all = vec![TemplateTotals::default(); families.len()];
    for (machine, &template) in host.machines.iter().zip(template_of).filter(|(machine, _)| !machine.runs.is_empty()) {
        let totals = &mut all[template];
        totals.machines += 1;
        let mut last = None;
        for run in &machine.runs {
            let kind = page_kind(run.content, kinds);
            let pages = match kind {
                PageKind::Zero => &mut totals.zero,
                PageKind::Common => &mut totals.common,
                PageKind::Shared => &mut totals.shared,
                PageKind::Unique => &mut totals.unique,
            };
            *pages += run.pages;
            totals.volatile += u64::from(run.content == ObservedContent::Volatile) * run.pages;
            totals.huge += u64::from(run.is_huge) * run.pages;
            totals.changes += u64::from(last.is_some_and(|last| last != kind));
            last = Some(kind);
        }
    }
    all
}

impl TemplateTotals {
    fn pages(&self) -> u64 {
        self.zero + self.common + self.shared + self.unique
    }

    /// The mean length of runs, if the pages change their kind often enough to tell.
    fn mean_run_pages(&self) -> Option<f64> {
        let pages = self.pages() as f64;
        let squares: f64 =
            [self.zero, self.common, self.shared, self.unique].map(|kind| (kind as f64 / pages).powi(2)).iter().sum();
        let is_known = self.changes > 0 && 1.0 - squares >= LEAST_CHANGING_SHARE;
        is_known.then(|| (pages / (self.machines as f64 + self.changes as f64 / (1.0 - squares))).max(1.0))
    }

    /// Least and most pages of a run.
    fn run_pages(&self, longest: u64) -> (u64, u64) {
        let most = self.mean_run_pages().map_or(DEFAULT_RUN_PAGES.1, |mean| (2.0 * mean - 1.0).round() as u64);
        (1, most.clamp(1, longest))
    }

    fn facts(&self, host: &ObservedHost, family: &Family) -> TemplateFacts {
        let sizes = || family.machines.iter().map(|&machine| host.machines[machine].pages());
        TemplateFacts {
            machines: self.machines,
            machine_pages: (sizes().min().unwrap_or(0), sizes().max().unwrap_or(0)),
            volatile_pages: self.volatile,
            mean_run_pages: self.mean_run_pages(),
        }
    }
}

/// The longest run for which the model has enough contents: each run takes as many as the longest one has pages. Half of
/// the model's contents are left for writes.
fn longest_run(totals: &[TemplateTotals], contents: &ContentClasses) -> u64 {
    let mut longest = MAX_RUN_PAGES;
    loop {
        let mean = |totals: &TemplateTotals| (1 + totals.run_pages(longest).1) as f64 / 2.0;
        let runs =
            |totals: &TemplateTotals| (totals.unique + totals.common / totals.machines.max(1)) as f64 / mean(totals);
        let shared: f64 = contents
            .sets
            .iter()
            .map(|(set, sums)| sums.contents as f64 / set.iter().map(|&t| mean(&totals[t])).fold(1.0, f64::max))
            .sum();
        let needed = (totals.iter().map(runs).sum::<f64>() + shared) * longest as f64;
        if needed <= f64::from(CONTENT_LIMIT) / 2.0 || longest == 1 {
            return longest;
        }
        longest /= 2;
    }
}

fn make_template(
    host: &ObservedHost,
    family: &Family,
    totals: &TemplateTotals,
    run_pages: (u64, u64),
    pattern: WritePattern,
) -> Template {
    let machines = totals.machines.max(1);
    let (zero, common) = (totals.zero / machines, totals.common / machines);
    let unique = rounded_share(totals.unique, machines);
    let pages = (zero + common + unique).max(1);
    let share = |part: u64| part as f64 / pages as f64;
    let vcpus = family.machines.iter().map(|&machine| host.machines[machine].vcpus).max();
    let mut template = Template {
        name: family.name.clone(),
        pages,
        vcpus: vcpus.unwrap_or(0).max(DEFAULT_VCPUS),
        cpu_use: 0.0,
        zero: share(zero),
        common: share(common),
        tenant: 0.0,
        unique: share(unique),
        run_pages,
        huge_pages: totals.huge as f64 / totals.pages().max(1) as f64,
        growth: None,
        writes: Vec::new(),
    };
    if let Some(seconds) = host.pass_seconds.filter(|&seconds| seconds > 0.0 && totals.volatile > 0) {
        template.writes = make_writes(&template, totals, seconds, pattern);
    }
    template
}

/// Pages of one machine, rounded.
fn rounded_share(pages: u64, machines: u64) -> u64 {
    (pages + machines / 2) / machines
}

fn make_writes(template: &Template, totals: &TemplateTotals, seconds: f64, pattern: WritePattern) -> Vec<WriteClass> {
    let machines = totals.machines as f64;
    match pattern {
        WritePattern::SamePages => {
            let pages = rounded_share(totals.volatile, totals.machines);
            let share = (pages as f64 / template.pages as f64).min(template.unique);
            let pages_per_second = totals.volatile as f64 / machines / seconds;
            Vec::from_iter((share > 0.0).then_some(WriteClass {
                content: ContentKind::Unique,
                share,
                pages_per_second,
            }))
        }
        WritePattern::AnyPages => {
            // Each page is written at this rate, so that this share of all pages changes between the passes.
            let changed = (totals.volatile as f64 / totals.pages() as f64).min(0.999);
            let per_page = -(1.0 - changed).ln() / seconds;
            let classes = ContentKind::ALL.map(|content| {
                let share = template.share(content);
                WriteClass { content, share, pages_per_second: per_page * share * template.pages as f64 }
            });
            classes.into_iter().filter(|class| class.share > 0.0).collect()
        }
    }
}

/// Processes of one template on one NUMA node, or on any.
pub(super) struct ClassMembers {
    template: usize,
    node: Option<u8>,
    /// Their positions.
    pub(super) machines: Vec<usize>,
}

/// The processes of each template, by their NUMA nodes.
fn class_members(host: &ObservedHost, families: &[Family]) -> Vec<ClassMembers> {
    let mut classes = Vec::new();
    for (template, family) in families.iter().enumerate() {
        let mut by_node: BTreeMap<Option<u8>, Vec<usize>> = BTreeMap::new();
        family
            .machines
            .iter()
            .for_each(|&machine| by_node.entry(host.machines[machine].node).or_default().push(machine));
        classes.extend(by_node.into_iter().map(|(node, machines)| ClassMembers { template, node, machines }));
    }
    classes
}

/// The machines of each template, by their NUMA nodes.
fn make_classes(host: &ObservedHost, families: &[Family]) -> Vec<MachineClass> {
    let class = |members: ClassMembers| {
        let family = &families[members.template].name;
        MachineClass {
            name: members.node.map_or_else(|| family.clone(), |node| format!("{family}, node {node}")),
            template: members.template,
            count: members.machines.len() as u32,
            tenant: String::new(),
            node: members.node,
            vcpu_node: None,
            start_ms: 0,
            arrival: Arrival::AtOnce,
            lifetime_ms: None,
            layouts: Vec::new(),
        }
    };
    class_members(host, families).into_iter().map(class).collect()
}
