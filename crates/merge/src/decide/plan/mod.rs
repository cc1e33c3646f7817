//! A plan: ranges to enroll, predicted savings, predicted cost. Pure data, made from a census.
//!
//! [`make_plan`] chooses the ranges. Filters then drop some of them ([`MergePlan::exclude_ranges`] and others), and
//! [`MergePlan::predict`] predicts what is left. [`pagefold_base::merge_lifetime`] judges afterwards which of it stays
//! merged.

mod assemble;
mod contents;
mod predict;
mod search;
#[cfg(test)]
mod tests;

pub use assemble::{PlanConstraints, make_plan};
pub use contents::PlanContents;
pub(crate) use contents::{EqualPages, OUTSIDE_PLAN, ZeroPages};
pub use predict::{KsmdModel, KsmdPageTimes, Prediction};
pub use search::ComparisonCost;

use pagefold_base::domain::TrustDomain;
use pagefold_base::process::Process;
use pagefold_base::units::{AddressRange, Bytes, NetBytes, Pages, Pid, ProcessId};
use pagefold_census::results::SubjectCensus;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// Ranges to enroll in KSM.
#[derive(Clone, Debug, Default)]
pub struct MergePlan {
    /// Whether processes are enrolled whole instead of range by range.
    pub whole_processes: bool,
    /// By process, in the order of the census, without processes that have no profitable range.
    pub targets: Vec<PlanTarget>,
    /// Unprofitable ranges that programs enrolled themselves, also of processes without targets: ksmd would scan them.
    /// Each process appears once; empty if there are no targets.
    pub temporary_unenrolls: Vec<TemporaryUnenroll>,
    /// The prediction.
    pub predicted: Prediction,
    /// Processes of the census that are skipped on purpose.
    pub skipped: Vec<SkippedProcess>,
}

impl MergePlan {
    /// The number of ranges, including those that the programs have enrolled already.
    pub fn range_count(&self) -> usize {
        self.targets.iter().map(|target| target.ranges.len()).sum()
    }

    /// Remove the `excluded` ranges, in any order, from the plan's ranges. A range of which a part remains keeps its
    /// counts until the pages of the plan are counted again.
    pub fn exclude_ranges(&mut self, process: ProcessId, excluded: Vec<AddressRange>) {
        let excluded = AddressRange::union(excluded);
        for target in self.targets.iter_mut().filter(|target| target.process.id == process) {
            target.ranges = target.ranges.iter().flat_map(|range| range.subtract(&excluded)).collect();
        }
        self.drop_empty_targets();
    }

    /// Keep only some processes.
    pub fn retain_processes(&mut self, is_kept: impl Fn(ProcessId) -> bool) {
        self.targets.retain(|target| is_kept(target.process.id));
        self.temporary_unenrolls.retain(|unenroll| is_kept(unenroll.process));
        self.drop_empty_targets();
    }

    /// Drop the ranges that split huge pages.
    pub fn drop_huge_page_splits(&mut self) {
        for target in &mut self.targets {
            target.ranges.retain(|range| range.split_huge_pages == Pages::ZERO);
        }
        self.drop_empty_targets();
    }

    /// Unenroll more of a process while ksmd works.
    pub fn add_temporary_unenroll(&mut self, subject: &SubjectCensus, ranges: &[AddressRange]) {
        let process = &subject.process;
        let position = self.temporary_unenrolls.iter().position(|unenroll| unenroll.process == process.id);
        let before = position.map(|position| self.temporary_unenrolls.remove(position).ranges).unwrap_or_default();
        let ranges = AddressRange::union([&before[..], ranges].concat());
        if !ranges.is_empty() {
            let inner_boundaries = |range: &AddressRange| {
                let region = assemble::containing_region(subject, *range);
                let inner = [range.start, range.end]
                    .into_iter()
                    .filter(|address| ![region.start, region.end].contains(address));
                inner.collect::<Vec<u64>>()
            };
            let boundaries = ranges.iter().flat_map(inner_boundaries).collect();
            self.temporary_unenrolls.push(TemporaryUnenroll {
                process: process.id,
                comm: process.comm.clone(),
                ranges,
                boundaries,
            });
        }
    }

    /// Drop targets without ranges. If none remains, ksmd is not started, so no range is temporarily unenrolled either.
    fn drop_empty_targets(&mut self) {
        self.targets.retain(|target| !target.ranges.is_empty());
        if self.targets.is_empty() {
            self.temporary_unenrolls.clear();
        }
    }

    /// The ranges that KSM can merge by the targets' methods of enrollment.
    fn reachable_ranges(&self) -> impl Iterator<Item = &PlannedRange> {
        self.targets.iter().flat_map(|target| target.reachable_ranges(self.whole_processes))
    }

    /// Maximum number of regions that the boundaries add to all processes.
    fn added_regions(&self) -> u64 {
        let ranges = self.reachable_ranges();
        let unenrolls = self.temporary_unenrolls.iter().map(|unenroll| unenroll.boundaries.len() as u64);
        ranges.map(PlannedRange::added_regions).sum::<u64>() + unenrolls.sum::<u64>()
    }

    /// The processes of the plan, each once.
    pub fn processes(&self) -> BTreeSet<ProcessId> {
        let targets = self.targets.iter().map(|target| target.process.id);
        targets.chain(self.temporary_unenrolls.iter().map(|unenroll| unenroll.process)).collect()
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
pub struct PlanTarget {
    /// The process.
    pub process: Process,
    /// Its trust domain.
    pub domain: TrustDomain,
    /// The ranges to enroll: ascending, disjoint, each within one region of the census.
    pub ranges: Vec<PlannedRange>,
    /// Bytes of it in huge pages.
    pub huge_page_bytes: Bytes,
    /// How it is enrolled.
    pub enroll_method: EnrollMethod,
}

/// Unprofitable ranges that a program enrolled itself: unenrolled while ksmd works, and enrolled again afterwards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemporaryUnenroll {
    /// The process.
    pub process: ProcessId,
    /// Its name.
    pub comm: String,
    /// Ascending and disjoint; no page in them is merged.
    pub ranges: Vec<AddressRange>,
    /// The addresses inside regions of the census at which the ranges begin or end.
    pub boundaries: Vec<u64>,
}

/// How a process is enrolled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EnrollMethod {
    /// From within the process: its ranges, or all of it.
    InProcess,
    /// The memory of its guest as a whole, without changing the monitor process.
    GuestControl(GuestMemoryControl),
    /// Not at all: its guest's control socket was found but is unusable, for this reason.
    Unreachable(String),
}

/// A virtual machine whose control socket sets which memory KSM may merge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestMemoryControl {
    /// The path of the socket.
    pub socket: PathBuf,
    /// The memory backends that are not enrolled yet: `/objects/pc.ram`.
    pub backends: Vec<String>,
    /// The memory of its backends: the regions of their sizes. Other memory of the monitor stays as it is.
    pub memory: Vec<AddressRange>,
}

/// A range in a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedRange {
    /// The range.
    pub range: AddressRange,
    /// The region that contains it, as the census saw it.
    pub region: AddressRange,
    /// Resident pages in it that are not merged yet and that ksmd has to scan.
    pub pages: Pages,
    /// Pages of these that have a copy or are zero and should merge.
    pub merging: Pages,
    /// Zero pages among these.
    pub zero: Pages,
    /// The predicted freed bytes: its share of what the contents of its pages free.
    pub freed_bytes: Bytes,
    /// Huge pages that are split because a part of them merges or because the range begins or ends in them. Once the
    /// contents of the plan are counted, also those that another range splits too.
    pub split_huge_pages: Pages,
    /// Whether the program has enrolled it already.
    pub enrolled: bool,
    /// Whether it is enrolled only after the other ranges have merged. This applies if most of its merging pages are
    /// third and further copies. Those merge at ksmd's first visit, instead of its second, once the first two copies
    /// are in the stable tree. Not since 6.11 ([`merges_at_first_scan`](pagefold_base::ksm::merges_at_first_scan)).
    pub late: bool,
}

impl PlanTarget {
    /// The ranges still to enroll, early or late: ascending, adjacent ones joined.
    pub fn ranges_to_enroll(&self, late: bool) -> Vec<AddressRange> {
        let mut ranges: Vec<AddressRange> = Vec::new();
        for planned in self.ranges.iter().filter(|planned| !planned.enrolled && planned.late == late) {
            match ranges.last_mut() {
                Some(last) if last.end == planned.range.start => last.end = planned.range.end,
                _ => ranges.push(planned.range),
            }
        }
        ranges
    }

    /// Whether KSM can merge one of its ranges, with the process enrolled whole or by ranges: its method of enrollment
    /// reaches the range, or the program has enrolled it already. The control socket of a guest that is enrolled whole
    /// reaches the guest's memory only.
    fn can_merge(&self, range: &PlannedRange, is_whole: bool) -> bool {
        let is_reached = match &self.enroll_method {
            EnrollMethod::Unreachable(_) => false,
            EnrollMethod::GuestControl(guest) if is_whole => guest.memory.contains(&range.region),
            EnrollMethod::GuestControl(_) | EnrollMethod::InProcess => true,
        };
        is_reached || range.enrolled
    }

    /// Its ranges that KSM can merge, with the process enrolled whole or by ranges.
    pub fn reachable_ranges(&self, is_whole: bool) -> impl Iterator<Item = &PlannedRange> {
        self.ranges.iter().filter(move |range| self.can_merge(range, is_whole))
    }
}

impl PlannedRange {
    /// Maximum number of regions that its boundaries add to the process.
    pub fn added_regions(&self) -> u64 {
        self.boundaries().count() as u64
    }

    /// Its boundaries inside its region, unless the program has enrolled it already.
    pub fn boundaries(&self) -> impl Iterator<Item = u64> {
        let (range, region) = (self.range, self.region);
        let start = (!self.enrolled && range.start > region.start).then_some(range.start);
        let end = (!self.enrolled && range.end < region.end).then_some(range.end);
        start.into_iter().chain(end)
    }

    /// The parts of it outside of some ascending and disjoint ranges.
    fn subtract(&self, ranges: &[AddressRange]) -> Vec<Self> {
        self.range.subtract(ranges).into_iter().map(|range| Self { range, ..*self }).collect()
    }
}

/// A process that the plan skips, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SkippedProcess {
    /// The PID.
    pub pid: Pid,
    /// Its name.
    pub comm: String,
    /// The reason, in one phrase.
    pub why: String,
}

impl SkippedProcess {
    /// A process that would save too little.
    fn unprofitable(process: &Process, net: NetBytes) -> Self {
        Self { pid: process.id.pid, comm: process.comm.clone(), why: format!("would save only {net} net") }
    }
}
