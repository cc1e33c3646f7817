//! Machines, their memory and their writes, drawn from a scenario and a seed.
//!
//! The same scenario and seed give the same machines at the same times with the same layout, whatever ksmd does
//! meanwhile. Each machine has random numbers of its own.
//!
//! A machine's memory is touched from its first page on, in runs of neighboring pages with ascending contents, or with
//! zeros. All machines of a template have its common runs, each in an order of its own. A write gives a whole run
//! contents that no page has; so a class with longer runs is written less often, with more pages at once, and each of its
//! pages as often.
//!
//! Huge pages are spread evenly. A machine begins with base pages unless all of it is in huge pages, so that it seldom
//! meets a rare case of ksmd: if the first page of the unstable tree is one of zeros in a huge page that is split, the
//! page is gone (Linux 6.12 and later map it to the zero page), and all walks of the scan end there.
//!
//! Pages of shared sets come on top of the memory of a template. The copies of each file are on the machines of its
//! templates in turn, so that each machine has as many as the others, but for one.
//!
//! A machine whose layout is known has that one instead. Its contents stand in blocks, whose order is drawn if that of the
//! contents is not known.
//!
//! Limits: writes hit whole runs, never parts. A write makes common contents and zeros unique for good. Page cache is
//! never evicted. A page of a huge page that the machine did not touch is zero.

use super::content_pool::{ContentPool, ContentsUsedUp};
use super::known_layouts::block_pages;
use super::memory::{Content, PAGES_IN_HUGE_PAGE, ZERO_CONTENT};
use super::scenario::{Arrival, ContentKind, LayoutRun, MachineClass, MachineLayout, Scenario, SharedSet, Template};
use pagefold_base::splitmix::splitmix64;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// Random numbers: deterministic by seed (splitmix64 by Vigna, <https://prng.di.unimi.it/splitmix64.c>).
#[derive(Clone, Debug)]
pub(crate) struct RandomNumbers(u64);

impl RandomNumbers {
    /// Numbers of a part of a scenario.
    fn new(seed: u64, part: u64) -> Self {
        Self(splitmix64(seed ^ splitmix64(part)))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        splitmix64(self.0)
    }

    /// A number below `limit`, which is not zero.
    fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(limit)) >> 64) as u64
    }

    /// A number from 0 on, below 1.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn between(&mut self, (least, most): (u64, u64)) -> u64 {
        least + self.below(most - least + 1)
    }

    fn shuffle<T>(&mut self, values: &mut [T]) {
        for at in (1..values.len()).rev() {
            values.swap(at, self.below(at as u64 + 1) as usize);
        }
    }
}

/// A machine that arrives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineArrival {
    /// The number of its class.
    pub class: usize,
    /// Its number in the class, from 0.
    pub number: u32,
    /// When it arrives, in milliseconds.
    pub arrives_ms: u64,
    /// When it exits, in milliseconds; without it, it stays.
    pub exits_ms: Option<u64>,
    /// Its NUMA node.
    pub node: u8,
}

/// Neighboring pages of one origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContentRun {
    /// The first page.
    pub page: u64,
    /// The number of pages.
    pub pages: u64,
    /// The content of the first page.
    pub content: Content,
    /// The kind that the contents had first; page cache is common or unique.
    pub kind: ContentKind,
    /// Whether the machine alone has these contents.
    is_own: bool,
}

impl ContentRun {
    /// Its pages.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.page..self.page + self.pages
    }

    /// Whether contents ascend from page to page; else all are zero.
    #[must_use]
    pub fn ascends(&self) -> bool {
        self.content != ZERO_CONTENT
    }
}

/// A change of a machine's memory: huge pages appear first, then runs are written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryChange {
    /// First pages of new huge pages of zeros.
    pub huge_pages: Vec<u64>,
    /// Pages written.
    pub writes: Vec<ContentRun>,
}

/// A file: its first content, and its pages. Without a content, each machine has an own one.
type File = (Option<Content>, u64);

/// Draws machines from a scenario.
#[derive(Clone, Debug)]
pub struct Workload<'s> {
    scenario: &'s Scenario,
    seed: u64,
    contents: ContentPool,
    /// The first content of each block of numbered contents of known layouts, once a machine has one.
    known_blocks: Vec<Content>,
    /// Files of a template, and of the machines of a tenant.
    files: BTreeMap<(usize, Option<&'s str>), Vec<File>>,
    /// The shared sets, once a machine needs them.
    shared: Vec<Option<DistributedSet>>,
    /// Page cache of each template, in the order in which its machines read it.
    cache: Vec<(RandomNumbers, Vec<File>)>,
}

/// A shared set whose files are distributed to machines.
#[derive(Clone, Debug)]
struct DistributedSet {
    files: Vec<File>,
    /// The files of each machine, by their number; a file is there once for each copy.
    files_by_machine: Vec<Vec<u32>>,
}

/// Parts of the random numbers of a scenario.
const ARRIVAL_PART: u64 = 1 << 62;
const FILE_PART: u64 = 2 << 62;
const CACHE_PART: u64 = 3 << 62;
const SHARED_PART: u64 = CACHE_PART | 1 << 61;
const KNOWN_PART: u64 = CACHE_PART | 1 << 60;

impl<'s> Workload<'s> {
    /// The workload of a scenario with a seed.
    #[must_use]
    pub fn new(scenario: &'s Scenario, seed: u64) -> Self {
        let cache = |template: usize| (RandomNumbers::new(seed, CACHE_PART | template as u64), Vec::new());
        Self {
            scenario,
            seed,
            contents: ContentPool::new(block_pages(scenario)),
            known_blocks: Vec::new(),
            files: BTreeMap::new(),
            shared: vec![None; scenario.shared.len()],
            cache: (0..scenario.templates.len()).map(cache).collect(),
        }
    }

    /// All machines that arrive before the end, in the order of their arrival.
    #[must_use]
    pub fn arrivals(&self) -> Vec<MachineArrival> {
        let mut arrivals = Vec::new();
        for (number, class) in self.scenario.classes.iter().enumerate() {
            let random = RandomNumbers::new(self.seed, ARRIVAL_PART | number as u64);
            arrivals.extend(arrival_times(class, random).zip(0..class.count).map(|(arrives_ms, machine)| {
                MachineArrival {
                    class: number,
                    number: machine,
                    arrives_ms,
                    exits_ms: class.lifetime_ms.map(|lifetime| arrives_ms + lifetime),
                    node: class.node.unwrap_or(0),
                }
            }));
        }
        arrivals.retain(|arrival| arrival.arrives_ms < self.scenario.duration_ms);
        arrivals.sort_by_key(|arrival| (arrival.arrives_ms, arrival.class, arrival.number));
        for (turn, arrival) in arrivals.iter_mut().enumerate() {
            if self.scenario.classes[arrival.class].node.is_none() {
                arrival.node = (turn % usize::from(self.scenario.host.nodes)) as u8;
            }
        }
        arrivals
    }

    /// A machine, and its memory at its arrival.
    ///
    /// # Errors
    /// If contents are used up.
    pub fn start(&mut self, arrival: &MachineArrival) -> Result<(Machine, MemoryChange), ContentsUsedUp> {
        let scenario = self.scenario;
        let class = &scenario.classes[arrival.class];
        let template = &scenario.templates[class.template];
        let part = (arrival.class as u64) << 32 | u64::from(arrival.number);
        let mut random = RandomNumbers::new(self.seed, part);
        if let Some(layout) = class.layouts.get(arrival.number as usize) {
            return self.start_known(class.template, layout, random);
        }
        let mut pieces = Vec::new();
        for kind in ContentKind::ALL {
            let pages = pages_of_share(template, template.share(kind));
            let files = match kind {
                ContentKind::Zero => cut_files(pages, template.run_pages, &mut random, || Ok(Some(ZERO_CONTENT)))?,
                ContentKind::Unique => cut_files(pages, template.run_pages, &mut random, || Ok(None))?,
                ContentKind::Common => self.shared_files(class.template, None, pages)?,
                ContentKind::Tenant => self.shared_files(class.template, Some(&class.tenant), pages)?,
            };
            pieces.extend(select_writers(template, kind, files));
        }
        let distributed = self.shared_pieces(arrival)?;
        let pages = template.pages + distributed.iter().map(|piece| piece.pages).sum::<u64>();
        pieces.extend(distributed);
        random.shuffle(&mut pieces);
        let mut machine = Machine::new(template, class.template, pages, random);
        let mut change = MemoryChange::default();
        for piece in pieces {
            let run = machine.touch(piece, &mut self.contents, &mut change)?;
            if let Some(writer) = piece.writer.filter(|_| run.pages > 0) {
                machine.writers[writer].add(run);
            }
        }
        Ok((machine, change))
    }

    /// A machine with a known layout. Each of its classes of writes writes a page as often as on other machines of the
    /// template.
    fn start_known(
        &mut self,
        template_number: usize,
        layout: &MachineLayout,
        random: RandomNumbers,
    ) -> Result<(Machine, MemoryChange), ContentsUsedUp> {
        let template = &self.scenario.templates[template_number];
        let mut machine = Machine::new(template, template_number, layout.pages, random);
        machine.touched = layout.pages;
        let mut change = MemoryChange { huge_pages: layout.huge_pages.clone(), writes: Vec::new() };
        for &(mut rest) in &layout.runs {
            while rest.pages > 0 {
                let run = self.place_known(&mut rest)?;
                change.writes.push(run);
                if let Some(writer) = rest.writer {
                    machine.writers[usize::from(writer)].add(run);
                }
            }
        }
        for (writer, class) in machine.writers.iter_mut().zip(&template.writes) {
            writer.pages_per_second *= writer.pages as f64 / (template.pages as f64 * class.share).max(1.0);
        }
        Ok((machine, change))
    }

    /// The blocks of numbered contents of known layouts. Other contents, which the pool places anywhere, are in between.
    fn draw_known_blocks(&mut self) -> Result<Vec<Content>, ContentsUsedUp> {
        let runs = self.scenario.classes.iter().flat_map(|class| &class.layouts).flat_map(|layout| &layout.runs);
        let numbered = runs.filter(|run| run.content > 0);
        let largest = numbered.map(|run| u64::from(run.content) + run.pages - 1).max().unwrap_or(0);
        let mut blocks: Vec<Content> =
            (0..largest.div_ceil(self.contents.block_pages)).map(|_| self.contents.take()).collect::<Result<_, _>>()?;
        match self.scenario.knows_content_order {
            true => blocks.sort_unstable(),
            false => RandomNumbers::new(self.seed, KNOWN_PART).shuffle(&mut blocks),
        }
        Ok(blocks)
    }

    /// Take the first pages of a known run whose contents are in one block. A write takes one block for them, too.
    fn place_known(&mut self, rest: &mut LayoutRun) -> Result<ContentRun, ContentsUsedUp> {
        let page = rest.page;
        let block_pages = self.contents.block_pages;
        let (content, pages, kind) = match u64::from(rest.content) {
            0 => (ZERO_CONTENT, rest.pages.min(block_pages), ContentKind::Zero),
            number => {
                let (block, place) = ((number - 1) / block_pages, (number - 1) % block_pages);
                if self.known_blocks.is_empty() {
                    self.known_blocks = self.draw_known_blocks()?;
                }
                let first = self.known_blocks[block as usize] + place as Content;
                let pages = rest.pages.min(block_pages - place);
                rest.content += pages as u32;
                (first, pages, ContentKind::Unique)
            }
        };
        rest.page += pages;
        rest.pages -= pages;
        Ok(ContentRun { page, pages, content, kind, is_own: false })
    }

    /// Files that machines have in common.
    fn shared_files(
        &mut self,
        template: usize,
        tenant: Option<&'s str>,
        pages: u64,
    ) -> Result<Vec<File>, ContentsUsedUp> {
        if let Some(files) = self.files.get(&(template, tenant)) {
            return Ok(files.clone());
        }
        let name = tenant.unwrap_or_default().bytes();
        let owner = name.fold(splitmix64(template as u64), |hash, byte| splitmix64(hash ^ u64::from(byte)));
        let mut random = RandomNumbers::new(self.seed, FILE_PART | owner >> 2);
        let contents = &mut self.contents;
        let run_pages = self.scenario.templates[template].run_pages;
        let files = cut_files(pages, run_pages, &mut random, || contents.take().map(Some))?;
        self.files.insert((template, tenant), files.clone());
        Ok(files)
    }

    /// A machine's part of the shared sets.
    fn shared_pieces(&mut self, arrival: &MachineArrival) -> Result<Vec<Piece>, ContentsUsedUp> {
        let scenario = self.scenario;
        let template = scenario.classes[arrival.class].template;
        let mut pieces = Vec::new();
        for (number, set) in scenario.shared.iter().enumerate().filter(|(_, set)| set.templates.contains(&template)) {
            let distributed = match &mut self.shared[number] {
                Some(distributed) => distributed,
                missing => {
                    let random = RandomNumbers::new(self.seed, SHARED_PART | number as u64);
                    missing.insert(distribute(set, &scenario.classes, random, &mut self.contents)?)
                }
            };
            let earlier = &scenario.classes[..arrival.class];
            let earlier = earlier.iter().filter(|class| set.templates.contains(&class.template));
            let turn = earlier.map(|class| class.count as usize).sum::<usize>() + arrival.number as usize;
            let kind = if set.is_zero { ContentKind::Zero } else { ContentKind::Common };
            let files = distributed.files_by_machine[turn].iter().map(|&file| distributed.files[file as usize]);
            pieces.extend(files.map(|(content, pages)| Piece { content, pages, kind, writer: None }));
        }
        Ok(pieces)
    }

    /// What a machine does in some time: its page cache grows, and it writes.
    ///
    /// # Errors
    /// If contents are used up.
    pub fn advance(&mut self, machine: &mut Machine, elapsed_ms: u64) -> Result<MemoryChange, ContentsUsedUp> {
        let template = &self.scenario.templates[machine.template];
        let mut change = MemoryChange::default();
        if let Some(growth) = template.growth {
            machine.growth_credit += growth.pages_per_minute * elapsed_ms as f64 / 60_000.0;
            while machine.touched < machine.pages {
                let file = self.cached_file(machine.template, machine.cached_files, growth.common)?;
                if machine.growth_credit < file.1 as f64 {
                    break;
                }
                machine.growth_credit -= file.1 as f64;
                machine.cached_files += 1;
                let kind = if file.0.is_some() { ContentKind::Common } else { ContentKind::Unique };
                let piece = Piece { content: file.0, pages: file.1, kind, writer: None };
                machine.touch(piece, &mut self.contents, &mut change)?;
            }
        }
        for writer in &mut machine.writers {
            writer.write(elapsed_ms, &mut machine.random, &mut self.contents, &mut change.writes)?;
        }
        Ok(change)
    }

    /// A file of a template's page cache.
    fn cached_file(&mut self, template: usize, number: usize, common: f64) -> Result<File, ContentsUsedUp> {
        let (random, files) = &mut self.cache[template];
        while files.len() <= number {
            let pages = random.between(self.scenario.templates[template].run_pages);
            let content = if random.unit() < common { Some(self.contents.take()?) } else { None };
            files.push((content, pages));
        }
        Ok(files[number])
    }

    /// A machine exits: its own contents may be used again.
    pub fn finish(&mut self, machine: Machine) {
        let written = machine.writers.iter().flat_map(|writer| &writer.runs).filter(|run| run.is_own);
        written.map(|run| run.content).chain(machine.own_contents).for_each(|content| self.contents.give_back(content));
    }
}

/// When the machines of a class arrive, in milliseconds.
fn arrival_times(class: &MachineClass, mut random: RandomNumbers) -> impl Iterator<Item = u64> {
    let (start, arrival) = (class.start_ms, class.arrival);
    let mut waited_ms = 0.0;
    (0_u64..).map(move |number| {
        start
            + match arrival {
                Arrival::AtOnce => 0,
                Arrival::Waves { machines, interval_ms } => number / u64::from(machines) * interval_ms,
                Arrival::Poisson { machines_per_hour } => {
                    waited_ms -= (1.0 - random.unit()).ln() * 3_600_000.0 / machines_per_hour;
                    waited_ms as u64
                }
            }
    })
}

fn pages_of_share(template: &Template, share: f64) -> u64 {
    (template.pages as f64 * share).round() as u64
}

/// Cut pages into files.
fn cut_files(
    pages: u64,
    run_pages: (u64, u64),
    random: &mut RandomNumbers,
    mut content: impl FnMut() -> Result<Option<Content>, ContentsUsedUp>,
) -> Result<Vec<File>, ContentsUsedUp> {
    let mut files = Vec::new();
    let mut left = pages;
    while left > 0 {
        let length = random.between(run_pages).min(left);
        files.push((content()?, length));
        left -= length;
    }
    Ok(files)
}

/// Distribute the files of a shared set to the machines of its templates, in turn.
fn distribute(
    set: &SharedSet,
    classes: &[MachineClass],
    mut random: RandomNumbers,
    contents: &mut ContentPool,
) -> Result<DistributedSet, ContentsUsedUp> {
    let content = || if set.is_zero { Ok(Some(ZERO_CONTENT)) } else { contents.take().map(Some) };
    let files = cut_files(set.pages, set.run_pages, &mut random, content)?;
    let of_templates = classes.iter().filter(|class| set.templates.contains(&class.template));
    let machines: usize = of_templates.map(|class| class.count as usize).sum();
    let mut files_by_machine = vec![Vec::new(); machines];
    let copies = (0..files.len() as u32).flat_map(|file| (0..set.copies).map(move |_| file));
    copies.enumerate().for_each(|(turn, file)| files_by_machine[turn % machines].push(file));
    Ok(DistributedSet { files, files_by_machine })
}

/// A run before it has a place.
#[derive(Clone, Copy, Debug)]
struct Piece {
    content: Option<Content>,
    pages: u64,
    kind: ContentKind,
    writer: Option<usize>,
}

/// Give files of one kind to the classes of writes, in turn, each up to its share. A file is cut where a class ends.
fn select_writers(template: &Template, kind: ContentKind, files: Vec<File>) -> Vec<Piece> {
    let classes = template.writes.iter().enumerate().filter(|(_, class)| class.content == kind);
    let mut quotas: VecDeque<(usize, u64)> =
        classes.map(|(number, class)| (number, pages_of_share(template, class.share))).collect();
    let mut pieces = Vec::new();
    for (mut content, mut pages) in files {
        while pages > 0 {
            while quotas.front().is_some_and(|quota| quota.1 == 0) {
                quotas.pop_front();
            }
            let taken = quotas.front().map_or(pages, |quota| quota.1.min(pages));
            let writer = quotas.front_mut().map(|quota| {
                quota.1 -= taken;
                quota.0
            });
            pieces.push(Piece { content, pages: taken, kind, writer });
            pages -= taken;
            content = content.map(|first| if first == ZERO_CONTENT { first } else { first + taken as Content });
        }
    }
    pieces
}

/// A class of writes of one machine.
#[derive(Clone, Debug)]
struct Writer {
    runs: Vec<ContentRun>,
    /// Pages of all runs.
    pages: u64,
    pages_per_second: f64,
    /// Pages that are due.
    credit: f64,
    /// The run that is written next.
    next: Option<usize>,
}

impl Writer {
    fn add(&mut self, run: ContentRun) {
        self.runs.push(run);
        self.pages += run.pages;
    }

    fn write(
        &mut self,
        elapsed_ms: u64,
        random: &mut RandomNumbers,
        contents: &mut ContentPool,
        writes: &mut Vec<ContentRun>,
    ) -> Result<(), ContentsUsedUp> {
        if self.runs.is_empty() {
            return Ok(());
        }
        // ksmd sees at most one change of a page between two visits: more writes than pages show no more.
        self.credit = (self.credit + self.pages_per_second * elapsed_ms as f64 / 1000.0).min(self.pages as f64);
        loop {
            let chosen = *self.next.get_or_insert_with(|| random.below(self.runs.len() as u64) as usize);
            let run = &mut self.runs[chosen];
            if self.credit < run.pages as f64 {
                return Ok(());
            }
            self.credit -= run.pages as f64;
            self.next = None;
            let fresh = contents.take()?;
            if run.is_own {
                contents.give_back(run.content);
            }
            *run = ContentRun { content: fresh, is_own: true, ..*run };
            writes.push(*run);
        }
    }
}

/// A machine that runs.
#[derive(Clone, Debug)]
pub struct Machine {
    template: usize,
    /// Its memory, in pages.
    pages: u64,
    /// Pages touched, from the first on.
    touched: u64,
    huge_share: f64,
    random: RandomNumbers,
    writers: Vec<Writer>,
    /// Blocks of contents that no other machine has, without those of written runs.
    own_contents: Vec<Content>,
    growth_credit: f64,
    cached_files: usize,
}

impl Machine {
    fn new(template: &Template, number: usize, pages: u64, random: RandomNumbers) -> Self {
        let writer =
            |pages_per_second| Writer { runs: Vec::new(), pages: 0, pages_per_second, credit: 0.0, next: None };
        Self {
            template: number,
            pages,
            touched: 0,
            huge_share: template.huge_pages,
            random,
            writers: template.writes.iter().map(|class| writer(class.pages_per_second)).collect(),
            own_contents: Vec::new(),
            growth_credit: 0.0,
            cached_files: 0,
        }
    }

    /// The number of its template.
    pub(super) fn template(&self) -> usize {
        self.template
    }

    /// Its memory, in pages. Pages are numbered from 0.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Pages that are present before ksmd changes anything.
    #[must_use]
    pub fn resident_pages(&self) -> u64 {
        let unit = self.touched / PAGES_IN_HUGE_PAGE;
        let ends_within = !self.touched.is_multiple_of(PAGES_IN_HUGE_PAGE);
        if ends_within && self.is_huge(unit) { (unit + 1) * PAGES_IN_HUGE_PAGE } else { self.touched }
    }

    /// Whether an aligned range of 512 pages is a huge page.
    fn is_huge(&self, unit: u64) -> bool {
        let huge_pages_before = |unit: u64| (unit as f64 * self.huge_share) as u64;
        let fits = (unit + 1) * PAGES_IN_HUGE_PAGE <= self.pages;
        fits && huge_pages_before(unit + 1) > huge_pages_before(unit)
    }

    /// Write untouched pages behind the touched ones.
    fn touch(
        &mut self,
        piece: Piece,
        contents: &mut ContentPool,
        change: &mut MemoryChange,
    ) -> Result<ContentRun, ContentsUsedUp> {
        let pages = piece.pages.min(self.pages - self.touched);
        let end = self.touched + pages;
        let units = self.touched.div_ceil(PAGES_IN_HUGE_PAGE)..end.div_ceil(PAGES_IN_HUGE_PAGE);
        change.huge_pages.extend(units.filter(|&unit| self.is_huge(unit)).map(|unit| unit * PAGES_IN_HUGE_PAGE));
        let is_own = piece.content.is_none();
        let content = match piece.content {
            Some(content) => content,
            None => contents.take()?,
        };
        if is_own && piece.writer.is_none() {
            self.own_contents.push(content);
        }
        let run = ContentRun { page: self.touched, pages, content, kind: piece.kind, is_own };
        self.touched = end;
        if pages > 0 {
            change.writes.push(run);
        }
        Ok(run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::parse_scenario;
    use std::collections::{HashMap, HashSet};

    fn scenario(template: &str, machines: &str) -> Scenario {
        let text = format!(
            "description = 'test'\nduration = '10h'\n[host]\nmemory = '64 GiB'\ncpus = 4\nkernel = '6.18'\nnodes = 2\n\
             [[template]]\nname = 't'\nsize = '64 MiB'\n{template}\n[[machines]]\nname = 'm'\ntemplate = 't'\n{machines}"
        );
        parse_scenario(&text).unwrap()
    }

    const MIXED: &str = "zero = 0.125\ncommon = 0.25\ntenant = 0.125\nunique = 0.25\nrun_pages = [1, 64]";

    /// Contents by page.
    fn apply(pages: &mut HashMap<u64, Content>, change: &MemoryChange) {
        for run in &change.writes {
            for page in 0..run.pages {
                let content = if run.ascends() { run.content + page as Content } else { run.content };
                pages.insert(run.page + page, content);
            }
        }
    }

    #[test]
    fn memory_has_the_shares_of_its_template() {
        let scenario = scenario(MIXED, "count = 2");
        let mut workload = Workload::new(&scenario, 1);
        let arrivals = workload.arrivals();
        assert_eq!(arrivals.iter().map(|arrival| arrival.node).collect::<Vec<_>>(), [0, 1]);
        let [first, second] = [0, 1].map(|machine: usize| {
            let mut pages = HashMap::new();
            apply(&mut pages, &workload.start(&arrivals[machine]).unwrap().1);
            pages
        });
        assert_eq!((first.len(), second.len()), (12_288, 12_288));
        assert_eq!(first.values().filter(|&&content| content == 0).count(), 2048);
        let contents =
            |pages: &HashMap<u64, Content>| pages.values().copied().filter(|&c| c != 0).collect::<HashSet<_>>();
        // No content occurs twice in a machine; common and tenant contents, and no other, occur in both.
        assert_eq!((contents(&first).len(), contents(&second).len()), (10_240, 10_240));
        assert_eq!(contents(&first).intersection(&contents(&second)).count(), 6144);
        let places = first.iter().filter(|(page, content)| **content != 0 && second.get(page) == Some(content)).count();
        assert!(places < 600, "each machine has an order of its own: {places}");
    }

    #[test]
    fn tenants_share_common_contents_only() {
        let text = "count = 1\ntenant = 'a'\n[[machines]]\nname = 'n'\ntemplate = 't'\ntenant = 'b'";
        let scenario = scenario(MIXED, text);
        let mut workload = Workload::new(&scenario, 1);
        let [first, second] = [0, 1].map(|machine: usize| {
            let mut pages = HashMap::new();
            apply(&mut pages, &workload.start(&workload.arrivals()[machine]).unwrap().1);
            pages.values().copied().filter(|&content| content != 0).collect::<HashSet<_>>()
        });
        assert_eq!(first.intersection(&second).count(), 4096);
    }

    #[test]
    fn copies_of_shared_contents_are_on_machines_in_turn() {
        let text = "count = 3\n[[machines]]\nname = 'n'\ntemplate = 't'\ncount = 2\n\
                    [[shared]]\ntemplates = ['t']\nsize = '4 MiB'\ncopies = 7\nrun_pages = [1, 16]\n\
                    [[shared]]\ntemplates = ['t']\nsize = '12 KiB'\nzero = true\nrun_pages = [1, 1]";
        let scenario = scenario("unique = 0.5", text);
        let mut workload = Workload::new(&scenario, 1);
        let mut copies: HashMap<Content, HashMap<u32, u32>> = HashMap::new();
        for (machine, arrival) in (0..).zip(workload.arrivals()) {
            let (started, change) = workload.start(&arrival).unwrap();
            let mut pages = HashMap::new();
            apply(&mut pages, &change);
            let shared = 1024 * 7 / 5 + 1;
            assert!(pages.len().abs_diff(8192 + shared) < 150, "{} pages", pages.len());
            assert_eq!(started.pages(), 16_384 + pages.len() as u64 - 8192, "its memory has room for them");
            pages
                .into_values()
                .for_each(|content| *copies.entry(content).or_default().entry(machine).or_default() += 1);
        }
        assert_eq!(copies.remove(&ZERO_CONTENT).unwrap().values().sum::<u32>(), 3);
        copies.retain(|_, machines| machines.values().sum::<u32>() > 1);
        assert_eq!(copies.len(), 1024);
        for machines in copies.values() {
            assert_eq!(machines.values().sum::<u32>(), 7);
            assert!(machines.len() == 5 && machines.values().all(|&copies| copies <= 2), "{machines:?}");
        }
    }

    #[test]
    fn writes_have_their_rate_and_hit_their_class() {
        let template = format!("{MIXED}\nwrites = [{{ content = 'common', share = 0.125, pages_per_second = 100.0 }}]");
        let scenario = scenario(&template, "count = 1");
        let mut workload = Workload::new(&scenario, 1);
        let (mut machine, start) = workload.start(&workload.arrivals()[0]).unwrap();
        let common: HashSet<u64> =
            start.writes.iter().filter(|run| run.kind == ContentKind::Common).flat_map(ContentRun::range).collect();
        let (mut written, mut pages) = (HashSet::new(), 0);
        for _ in 0..100 {
            let change = workload.advance(&mut machine, 1000).unwrap();
            pages += change.writes.iter().map(|run| run.pages).sum::<u64>();
            written.extend(change.writes.iter().flat_map(ContentRun::range));
        }
        assert!((9936..=10_000).contains(&pages), "{pages} pages and not 10,000 less a part of a run");
        assert!(written.is_subset(&common));
        // 2,048 pages are chosen 4.9 times each: e^-4.9 of them never.
        assert!((1950..=2048).contains(&written.len()), "{}", written.len());
    }

    #[test]
    fn page_cache_grows_alike_until_memory_is_full() {
        let template = format!("{MIXED}\ngrowth = {{ per_minute = '4 MiB', common = 1.0 }}");
        let scenario = scenario(&template, "count = 2");
        let mut workload = Workload::new(&scenario, 1);
        let arrivals = workload.arrivals();
        let grown = [0, 1].map(|machine: usize| {
            let (mut machine, _) = workload.start(&arrivals[machine]).unwrap();
            let mut contents = HashSet::new();
            for minute in 1..=5 {
                let mut pages = HashMap::new();
                apply(&mut pages, &workload.advance(&mut machine, 60_000).unwrap());
                contents.extend(pages.values().copied());
                let expected = (12_288 + 1024 * minute).min(16_384);
                assert!((expected - 64..=expected).contains(&machine.resident_pages()), "minute {minute}");
            }
            assert_eq!(machine.resident_pages(), 16_384);
            contents
        });
        assert_eq!(grown[0], grown[1]);
        assert_eq!(grown[0].len(), 4096);
    }

    #[test]
    fn huge_pages_are_spread_from_base_pages_on() {
        let huge_pages = |share: f64| {
            let scenario = scenario(&format!("{MIXED}\nhuge_pages = {share:?}"), "count = 1");
            let mut workload = Workload::new(&scenario, 1);
            let (_, change) = workload.start(&workload.arrivals()[0]).unwrap();
            change.huge_pages.iter().map(|page| page / PAGES_IN_HUGE_PAGE).collect::<Vec<_>>()
        };
        // 24 of the machine's 32 ranges are touched.
        assert_eq!(huge_pages(0.25), [3, 7, 11, 15, 19, 23]);
        assert_eq!(huge_pages(0.9).first(), Some(&1));
        assert_eq!(huge_pages(0.9).len(), 21);
    }

    #[test]
    fn huge_pages_appear_before_their_first_write() {
        let scenario = scenario(&format!("{MIXED}\nhuge_pages = 1.0"), "count = 1");
        let mut workload = Workload::new(&scenario, 1);
        let (machine, change) = workload.start(&workload.arrivals()[0]).unwrap();
        assert_eq!(change.huge_pages, (0..24).map(|unit| unit * PAGES_IN_HUGE_PAGE).collect::<Vec<_>>());
        assert_eq!(machine.resident_pages(), 12_288);
    }

    #[test]
    fn arrivals_follow_their_rule() {
        let times = |rule: &str, seed| -> Vec<u64> {
            let scenario = scenario(MIXED, rule);
            Workload::new(&scenario, seed).arrivals().iter().map(|arrival| arrival.arrives_ms).collect()
        };
        assert_eq!(
            times("count = 5\nwave = 2\nevery = '1min'\nstart = '1s'", 1),
            [1000, 1000, 61_000, 61_000, 121_000]
        );
        assert_eq!(times("count = 3\nwave = 1\nevery = '6h'", 1), [0, 21_600_000], "none after the end");
        let random = times("count = 100000\nper_hour = 1000", 1);
        assert!((9700..10_300).contains(&random.len()), "{} in 10 hours", random.len());
        assert_eq!(random, times("count = 100000\nper_hour = 1000", 1));
        assert_ne!(random, times("count = 100000\nper_hour = 1000", 2));
    }

    #[test]
    fn contents_of_machines_that_exited_are_used_again() {
        // Each machine takes one block of 65,536 contents; 2^30 contents are enough for 16,382 machines.
        let scenario = scenario("unique = 0.5\nrun_pages = [65536, 65536]", "count = 1");
        let mut workload = Workload::new(&scenario, 1);
        let arrival = workload.arrivals()[0].clone();
        for _ in 0..20_000 {
            let (machine, _) = workload.start(&arrival).unwrap();
            workload.finish(machine);
        }
        let mut kept = 0;
        while workload.start(&arrival).is_ok() {
            kept += 1;
            assert!(kept < 20_000, "contents are never used up");
        }
    }
}
