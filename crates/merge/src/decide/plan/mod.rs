//! A plan: what is to be enrolled, what that should save, and what it should cost. Pure data, made from a census.
//!
//! [`plan`](fn@plan) makes one; [`pagefold_base::lasting`] judges afterwards what of it stays merged.

mod assemble;
mod search;
#[cfg(test)]
mod tests;

pub use assemble::{Constraints, Speed, plan};
pub use search::bytes_per_search;

use pagefold_base::domain::Domain;
use pagefold_base::process::Process;
use pagefold_base::savings::Reach;
use pagefold_base::units::{AddressRange, Bytes, Pages, Pid, ProcessId};
use pagefold_census::results::SubjectCensus;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

/// What is to be enrolled in KSM.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// Whether processes are enrolled whole instead of range by range.
    pub whole: bool,
    /// By process, in the order of the census. Processes of which nothing pays are not among them.
    pub targets: Vec<Target>,
    /// What programs enrolled themselves and does not pay, those of which nothing else is enrolled among them: ksmd would
    /// walk it. Each process once; nothing where there are no targets.
    pub narrowed: Vec<Narrowed>,
    /// What it should come to.
    pub predicted: Predicted,
    /// Processes of the census of which nothing is enrolled, on purpose.
    pub left_alone: Vec<LeftAlone>,
}

impl Plan {
    /// How many ranges there are, those that the programs have enrolled already included.
    pub fn ranges(&self) -> usize {
        self.targets.iter().map(|target| target.ranges.len()).sum()
    }

    /// Leave out what of the ranges lies in `without`, in any order. Counts shrink in proportion; what should merge of
    /// the parts that stay is at most what should have of the whole range, and is taken for that. The prediction becomes
    /// that of what stays.
    pub fn leave_out(&mut self, process: ProcessId, without: Vec<AddressRange>) {
        let before = self.sums();
        let without = AddressRange::union(without);
        for target in self.targets.iter_mut().filter(|target| target.process.id == process) {
            target.ranges = target.ranges.iter().flat_map(|range| range.without(&without)).collect();
        }
        self.keep_what_is_enrolled();
        self.predict_anew(before);
    }

    /// Keep to some processes. The prediction becomes that of the ranges that stay.
    pub fn keep_to(&mut self, fits: impl Fn(ProcessId) -> bool) {
        let before = self.sums();
        self.targets.retain(|target| fits(target.process.id));
        self.narrowed.retain(|narrowed| fits(narrowed.process));
        self.keep_what_is_enrolled();
        self.predict_anew(before);
    }

    /// Split no huge page. The prediction becomes that of the ranges that stay.
    pub fn keep_huge_pages(&mut self) {
        let before = self.sums();
        for target in &mut self.targets {
            target.ranges.retain(|range| range.huge_split == Pages::ZERO);
        }
        self.keep_what_is_enrolled();
        self.predict_anew(before);
    }

    /// Withdraw more of a process while ksmd works.
    pub fn narrow(&mut self, subject: &SubjectCensus, ranges: &[AddressRange]) {
        let process = &subject.process;
        let before = self.narrowed.iter().position(|narrowed| narrowed.process == process.id);
        let before = before.map(|position| self.narrowed.remove(position).ranges).unwrap_or_default();
        let ranges = AddressRange::union([&before[..], ranges].concat());
        if !ranges.is_empty() {
            let cut = |range: &AddressRange| {
                let region = assemble::region_of(subject, *range);
                let inside = [range.start, range.end].into_iter().filter(|at| ![region.start, region.end].contains(at));
                inside.collect::<Vec<u64>>()
            };
            let boundaries = ranges.iter().flat_map(cut).collect();
            self.narrowed.push(Narrowed { process: process.id, comm: process.comm.clone(), ranges, boundaries });
        }
    }

    /// Leave those out of whom nothing is enrolled. Where that is everybody, ksmd is not set going, and nothing withdrawn
    /// for it.
    fn keep_what_is_enrolled(&mut self) {
        self.targets.retain(|target| !target.ranges.is_empty());
        if self.targets.is_empty() {
            self.narrowed.clear();
        }
    }

    /// Make the prediction that of the ranges that stay, of which there were so many pages, and so many bytes to be
    /// freed, before.
    fn predict_anew(&mut self, before: (Pages, Bytes)) {
        let (scanned, bytes) = self.sums();
        if scanned == before.0 {
            return;
        }
        let part = scanned.0 as f64 / before.0.0.max(1) as f64;
        let ranges = || self.targets.iter().flat_map(|target| &target.ranges);
        let freed = bytes.0 as f64 / before.1.0.max(1) as f64;
        let freed = Pages((self.predicted.reach.freed.0 as f64 * freed) as u64);
        let merging = ranges().map(|range| range.merging).sum();
        let reach = Reach { freed, scanned, huge_split: ranges().map(|range| range.huge_split).sum() };
        let regions_added = self.edges();
        let (ksmd, wall) = (self.predicted.ksmd.mul_f64(part), self.predicted.wall.mul_f64(part));
        self.predicted = Predicted { reach, merging, regions_added, ksmd, wall };
    }

    /// Regions that its boundaries add to all processes, at most.
    fn edges(&self) -> u64 {
        let ranges = self.targets.iter().flat_map(|target| &target.ranges);
        let narrowed = self.narrowed.iter().map(|narrowed| narrowed.boundaries.len() as u64);
        ranges.map(PlannedRange::edges).sum::<u64>() + narrowed.sum::<u64>()
    }

    /// The processes that it is about, each once.
    pub fn processes(&self) -> BTreeSet<ProcessId> {
        let targets = self.targets.iter().map(|target| target.process.id);
        targets.chain(self.narrowed.iter().map(|narrowed| narrowed.process)).collect()
    }

    /// Where its ranges begin or end within a region of a process: ascending, each once.
    pub fn boundaries(&self, process: ProcessId) -> Vec<u64> {
        let targets = self.targets.iter().filter(|target| target.process.id == process);
        let narrowed = self.narrowed.iter().filter(|narrowed| narrowed.process == process);
        let ranges = targets.flat_map(|target| &target.ranges).flat_map(PlannedRange::boundaries);
        let own = narrowed.flat_map(|narrowed| &narrowed.boundaries).copied();
        ranges.chain(own).collect::<BTreeSet<u64>>().into_iter().collect()
    }

    /// The pages of all ranges, and what of them should be freed.
    fn sums(&self) -> (Pages, Bytes) {
        let ranges = || self.targets.iter().flat_map(|target| &target.ranges);
        (ranges().map(|range| range.pages).sum(), ranges().map(|range| range.freed).sum())
    }

    /// Pages that should merge before the late ranges are enrolled; `None` where nothing is late.
    pub fn merging_early(&self) -> Option<Pages> {
        let ranges = || self.targets.iter().flat_map(|target| &target.ranges);
        let early = ranges().filter(|range| !range.late).map(|range| range.merging).sum();
        ranges().any(|range| range.late).then_some(early)
    }
}

/// A process in a plan.
#[derive(Clone, Debug)]
pub struct Target {
    /// Which one.
    pub process: Process,
    /// Its trust domain.
    pub domain: Domain,
    /// What is to be enrolled of it: ascending, disjoint, each within one region of the census.
    pub ranges: Vec<PlannedRange>,
    /// Bytes of it in huge pages.
    pub huge: Bytes,
    /// How it is enrolled.
    pub way: Way,
}

/// What a program enrolled itself and does not pay: withdrawn while ksmd works, and put back afterwards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Narrowed {
    /// Which process.
    pub process: ProcessId,
    /// Its name.
    pub comm: String,
    /// Ascending and disjoint; nothing is merged in them.
    pub ranges: Vec<AddressRange>,
    /// Where they begin or end within a region of the census.
    pub boundaries: Vec<u64>,
}

/// How a process is enrolled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Way {
    /// From within: its ranges, or all of it.
    Within,
    /// The memory of its guest as a whole, without touching the monitor.
    Guest(Guest),
    /// Not at all: it runs a guest whose control socket was found and is of no use, for this reason.
    Unreachable(String),
}

/// A virtual machine that is told by its control socket what KSM may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guest {
    /// The path of the socket.
    pub socket: PathBuf,
    /// The memory backends that are not enrolled yet: `/objects/pc.ram`.
    pub backends: Vec<String>,
    /// Where the memory of its backends lies: the regions of their sizes. What else the monitor has stays as it is.
    pub memory: Vec<AddressRange>,
}

/// A range in a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedRange {
    /// Where.
    pub range: AddressRange,
    /// The region that it lies in, as the census saw it.
    pub region: AddressRange,
    /// Resident pages in it that are not merged yet: what ksmd has to scan.
    pub pages: Pages,
    /// Those of them that have a copy or hold zeros: what should merge.
    pub merging: Pages,
    /// Those of them that hold zeros.
    pub zero: Pages,
    /// What they are likely to give back: of `n` equal pages each stands for `1 - 1/n`, as if all were enrolled.
    pub freed: Bytes,
    /// Huge pages that are split because a part of them merges or it begins or ends in them. Not told where a process
    /// is enrolled whole.
    pub huge_split: Pages,
    /// Whether the program has enrolled it already.
    pub enrolled: bool,
    /// Whether it is enrolled only once the others have merged: most of what merges in it are third and further copies,
    /// which merge at ksmd's first look when the first two of each are in the stable tree already, instead of at its
    /// second. Not since 6.11 ([`merges_at_first_look`](pagefold_base::ksm::merges_at_first_look)).
    pub late: bool,
}

impl Target {
    /// What is still to be enrolled, first or late: ascending ranges, those that touch joined.
    pub fn to_enrol(&self, late: bool) -> Vec<AddressRange> {
        let mut ranges: Vec<AddressRange> = Vec::new();
        for planned in self.ranges.iter().filter(|planned| !planned.enrolled && planned.late == late) {
            match ranges.last_mut() {
                Some(last) if last.end == planned.range.start => last.end = planned.range.end,
                _ => ranges.push(planned.range),
            }
        }
        ranges
    }

    /// Its planned ranges that lie beside its guest's memory, where a control socket by which the guest is enrolled as
    /// a `whole` does not reach.
    pub fn beside_its_guest(&self, whole: bool) -> impl Iterator<Item = &PlannedRange> {
        let memory = match &self.way {
            Way::Guest(guest) if whole => Some(&guest.memory),
            _ => None,
        };
        let outside = move |range: &&PlannedRange| memory.is_some_and(|memory| !memory.contains(&range.region));
        self.ranges.iter().filter(outside)
    }
}

impl PlannedRange {
    /// Regions that its boundaries add to the process, at most.
    pub fn edges(&self) -> u64 {
        self.boundaries().count() as u64
    }

    /// Where it begins or ends within its region, unless the program has enrolled it already.
    pub fn boundaries(&self) -> impl Iterator<Item = u64> {
        let (range, region) = (self.range, self.region);
        let start = (!self.enrolled && range.start > region.start).then_some(range.start);
        let end = (!self.enrolled && range.end < region.end).then_some(range.end);
        start.into_iter().chain(end)
    }

    /// The parts of it that lie outside of some ascending and disjoint ranges.
    fn without(&self, ranges: &[AddressRange]) -> Vec<Self> {
        let parts = self.range.outside(ranges);
        let whole = self.range.bytes().0.max(1) as u128;
        let of = |range: AddressRange| {
            let part = |pages: Pages| Pages((u128::from(pages.0) * u128::from(range.bytes().0) / whole) as u64);
            let pages = part(self.pages);
            Self {
                range,
                pages,
                merging: self.merging.min(pages),
                zero: part(self.zero),
                freed: Bytes(part(Pages(self.freed.0)).0),
                huge_split: part(self.huge_split),
                ..*self
            }
        };
        parts.into_iter().map(of).collect()
    }
}

/// What a plan should come to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Predicted {
    /// Frames freed, pages scanned, huge pages split.
    pub reach: Reach,
    /// Pages that should merge, kept copies included.
    pub merging: Pages,
    /// Regions that the ranges' boundaries add to the processes, at most.
    pub regions_added: u64,
    /// CPU time of ksmd.
    pub ksmd: Duration,
    /// Wall time from enrolling until merged, at the bound on ksmd's CPU.
    pub wall: Duration,
}

/// Why a process is left alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftAlone {
    /// Which.
    pub pid: Pid,
    /// Its name.
    pub comm: String,
    /// Why, in one phrase.
    pub why: String,
}
