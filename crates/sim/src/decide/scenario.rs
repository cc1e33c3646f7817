//! A scenario: a host, templates of machines, and the machines that arrive, as plain data.
//!
//! [`crate::scenario`] reads it from TOML; [`super::workload`] draws machines and their memory from it.

use super::cost::{CostModel, Operation};
use super::ksmd::KsmSettings;
use super::rules::KernelVersion;
use std::num::NonZeroU32;

/// A host and what happens on it.
#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    /// What it is, in a sentence.
    pub description: String,
    /// Virtual time from the start to the end, in milliseconds.
    pub duration_ms: u64,
    /// The seed of all random choices.
    pub seed: u64,
    /// Time between two rounds of writes and page-cache growth, in milliseconds.
    pub tick_ms: u64,
    /// Time between two samples, in milliseconds.
    pub sample_ms: u64,
    /// The host.
    pub host: HostSpec,
    /// CPU time of ksmd's operations.
    pub costs: CostModel,
    /// Kinds of machines.
    pub templates: Vec<Template>,
    /// Contents that some machines have, of one template or of several.
    pub shared: Vec<SharedSet>,
    /// Machines, by class.
    pub classes: Vec<MachineClass>,
    /// The host and its machines have one Nth of their memory: policies have one Nth of their pace.
    pub divisor: NonZeroU32,
    /// Whether the contents of known layouts have numbers in the order of their bytes. Otherwise the seed draws their
    /// order.
    pub knows_content_order: bool,
}

/// The host of a scenario.
#[derive(Clone, Debug, PartialEq)]
pub struct HostSpec {
    /// Its memory, in pages.
    pub memory_pages: u64,
    /// Memory that the host itself uses, in pages.
    pub used_pages: u64,
    /// Its CPUs.
    pub cpus: u32,
    /// Its NUMA nodes.
    pub nodes: u8,
    /// The distance of each node, by row, to each node; [`default_distance`] where there is none.
    pub distances: Vec<Vec<u8>>,
    /// Its kernel.
    pub kernel: KernelVersion,
    /// Ticks of its kernel a second (`CONFIG_HZ`).
    pub hz: u32,
    /// CPU time of ksmd before the start, in milliseconds.
    pub ksmd_cpu_ms: u64,
    /// KSM's settings at the start.
    pub ksm: KsmSettings,
}

impl HostSpec {
    /// The distance of the CPUs of a node to the memory of a node.
    #[must_use]
    pub fn distance(&self, from: u8, to: u8) -> u8 {
        let row = self.distances.get(usize::from(from));
        row.and_then(|row| row.get(usize::from(to))).copied().unwrap_or_else(|| default_distance(from, to))
    }
}

/// The distance of a node to itself (`LOCAL_DISTANCE` in include/linux/topology.h).
pub const LOCAL_DISTANCE: u8 = 10;

/// The largest distance. 255 means that a node cannot be reached (ACPI 6.5, section 5.2.17).
pub const MAX_DISTANCE: u8 = 254;

/// The distance of nodes where a scenario gives none: that of most hosts with two sockets.
#[must_use]
pub fn default_distance(from: u8, to: u8) -> u8 {
    if from == to { LOCAL_DISTANCE } else { 21 }
}

/// The first pair of nodes whose distance no host has: that of a node to itself is [`LOCAL_DISTANCE`], and others are at
/// least as large.
#[must_use]
pub fn invalid_distance(distances: &[Vec<u8>]) -> Option<(usize, usize)> {
    let pairs = distances.iter().enumerate();
    let mut pairs =
        pairs.flat_map(|(from, row)| row.iter().enumerate().map(move |(to, &distance)| (from, to, distance)));
    let is_invalid = |from: usize, to: usize, distance: u8| match from == to {
        true => distance != LOCAL_DISTANCE,
        false => !(LOCAL_DISTANCE..=MAX_DISTANCE).contains(&distance),
    };
    pairs.find(|&(from, to, distance)| is_invalid(from, to, distance)).map(|(from, to, _)| (from, to))
}

/// A kind of machine. The shares are of its memory; what they leave is not touched at the start.
#[derive(Clone, Debug, PartialEq)]
pub struct Template {
    /// Its name.
    pub name: String,
    /// Its memory, in pages.
    pub pages: u64,
    /// Its vCPUs, each with a thread.
    pub vcpus: u32,
    /// CPU time that it uses beside that of its writes, as a share of one CPU.
    pub cpu_use: f64,
    /// Share of zeros.
    pub zero: f64,
    /// Share of contents that each machine of the template has once.
    pub common: f64,
    /// Share of contents that each machine of the template and of one tenant has once.
    pub tenant: f64,
    /// Share of contents that no other page has.
    pub unique: f64,
    /// Neighboring pages of one kind: at least and at most, in pages.
    pub run_pages: (u64, u64),
    /// Share of its memory in huge pages.
    pub huge_pages: f64,
    /// Page cache that fills its untouched memory.
    pub growth: Option<PageCacheGrowth>,
    /// Writes, by class.
    pub writes: Vec<WriteClass>,
}

/// Contents that some machines have. Their pages come on top of the memory of the templates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedSet {
    /// Numbers of the templates whose machines have them.
    pub templates: Vec<usize>,
    /// Different contents, or pages of zeros.
    pub pages: u64,
    /// Pages with each content. They are on the machines of the templates in turn.
    pub copies: u32,
    /// Whether all contents are zeros.
    pub is_zero: bool,
    /// Neighboring pages: at least and at most.
    pub run_pages: (u64, u64),
}

impl SharedSet {
    /// One or two sets that together have so many contents and pages: some contents have one copy more than the others.
    /// Without contents, none.
    #[must_use]
    pub fn with_pages(contents: u64, pages: u64, templates: &[usize], run_pages: (u64, u64)) -> Vec<Self> {
        let (copies, with_more) = (pages / contents.max(1), pages % contents.max(1));
        let counts = [(contents - with_more, copies), (with_more, copies + 1)];
        let set = |(pages, copies): (u64, u64)| Self {
            templates: templates.to_vec(),
            pages,
            copies: u32::try_from(copies).unwrap_or(u32::MAX),
            is_zero: false,
            run_pages,
        };
        counts.into_iter().filter(|&(pages, _)| pages > 0).map(set).collect()
    }
}

impl Template {
    /// The share of a kind of contents.
    #[must_use]
    pub fn share(&self, kind: ContentKind) -> f64 {
        match kind {
            ContentKind::Zero => self.zero,
            ContentKind::Common => self.common,
            ContentKind::Tenant => self.tenant,
            ContentKind::Unique => self.unique,
        }
    }
}

/// Kinds of contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentKind {
    /// Zeros.
    Zero,
    /// Each machine of the template has it once.
    Common,
    /// Each machine of the template and of one tenant has it once.
    Tenant,
    /// No other page has it.
    Unique,
}

impl ContentKind {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::Zero, Self::Common, Self::Tenant, Self::Unique];
}

/// Growth of a machine's page cache, until all of its memory is touched.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PageCacheGrowth {
    /// Pages a minute.
    pub pages_per_minute: f64,
    /// Share of contents that all machines of the template read in the same order; the rest is unique.
    pub common: f64,
}

/// Pages that a machine writes again and again. Each write gives them contents that no other page has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WriteClass {
    /// The kind of their contents at the start.
    pub content: ContentKind,
    /// Their share of the machine's memory.
    pub share: f64,
    /// Pages that one machine writes a second.
    pub pages_per_second: f64,
}

/// Machines of one template and tenant that arrive by one rule.
#[derive(Clone, Debug, PartialEq)]
pub struct MachineClass {
    /// Its name.
    pub name: String,
    /// The number of its template.
    pub template: usize,
    /// Machines that arrive.
    pub count: u32,
    /// Their owner.
    pub tenant: String,
    /// The NUMA node of their memory; without it, the nodes take turns.
    pub node: Option<u8>,
    /// The NUMA node on whose CPUs their vCPUs run; without it, that of their memory.
    pub vcpu_node: Option<u8>,
    /// Before this time none arrives, in milliseconds.
    pub start_ms: u64,
    /// How they arrive.
    pub arrival: Arrival,
    /// Time from the arrival to the exit, in milliseconds; without it, they stay.
    pub lifetime_ms: Option<u64>,
    /// The memory of its first machines, where it is known; that of the others is drawn from the template.
    pub layouts: Vec<MachineLayout>,
}

/// The known memory of a machine. Pages are numbered from 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineLayout {
    /// The end of its memory.
    pub pages: u64,
    /// First pages of huge pages.
    pub huge_pages: Vec<u64>,
    /// Its touched pages, ascending.
    pub runs: Vec<LayoutRun>,
}

/// Neighboring pages of a known layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayoutRun {
    /// The first page.
    pub page: u64,
    /// The number of pages.
    pub pages: u64,
    /// 0 for zeros. Otherwise the number of the first page's content; those of the next pages ascend. Pages of all
    /// machines with one number have one content.
    pub content: u32,
    /// The position of the template's class of writes that writes it.
    pub writer: Option<u8>,
}

/// How machines arrive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrival {
    /// All at the start.
    AtOnce,
    /// Some at the start, and as many after each interval.
    Waves {
        /// Machines in a wave.
        machines: u32,
        /// Time between two waves, in milliseconds.
        interval_ms: u64,
    },
    /// One by one, with exponential intervals.
    Poisson {
        /// The mean rate.
        machines_per_hour: f64,
    },
}

/// The vCPUs of a machine whose template does not say.
pub const DEFAULT_VCPUS: u32 = 1;

/// Ticks a second of Debian's kernel, and by default of Linux.
pub const DEFAULT_HZ: u32 = 250;

/// CPU time of ksmd's operations where the scenario has no costs: measured on Linux 6.18.44 by `pagefold sim
/// calibrate` (docs/simulator.md), in nanoseconds.
#[must_use]
pub fn default_costs() -> CostModel {
    CostModel::new([
        (Operation::Visit, 335.0),
        (Operation::Skip, 264.0),
        (Operation::Checksum, 797.0),
        (Operation::StableComparison, 24.0),
        (Operation::UnstableComparison, 351.0),
        (Operation::Merge, 1268.0),
        (Operation::Split, 0.0),
        (Operation::Allocation, 0.0),
        (Operation::Batch, 128_000.0),
        (Operation::FirstComparison, 40.0),
    ])
}
