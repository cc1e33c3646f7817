//! From a census to a plan: which processes are skipped, and which ranges of the others are enrolled.

use super::{EnrollMethod, MergePlan, PlanTarget, PlannedRange, SkippedProcess};
use pagefold_base::process::Process;
use pagefold_base::region::VmFlags;
use pagefold_base::savings::{EnrollCostBytes, MergeEffect};
use pagefold_base::units::{AddressRange, Bytes, NetBytes, PageSize, Pages, ProcessId};
use pagefold_census::results::{Census, GuidedRange, RegionCensus, SubjectCensus};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Constraints of a plan.
#[derive(Clone, Debug)]
pub struct PlanConstraints {
    /// The size of a page.
    pub page_size: PageSize,
    /// Whether processes are enrolled whole.
    pub whole_processes: bool,
    /// Processes whose net savings are lower are skipped.
    pub min_profit: Bytes,
    /// Regions that a process may have (`vm.max_map_count`).
    pub max_map_count: u64,
    /// The current number of regions of each process. A missing process has the regions that the census saw.
    pub region_counts: BTreeMap<ProcessId, u64>,
}

/// Make a plan from a census. `excluded` returns why a process must not be enrolled, or nothing.
///
/// The savings of a process that are compared with `min_profit` assume that the partners of its pages are enrolled too:
/// see [`MergePlan::skip_unprofitable_targets`]. The plan has no prediction yet: see [`MergePlan::predict`].
///
/// Do not plan from a sample: the ranges contain pages that the sample left out.
pub fn make_plan(
    census: &Census,
    constraints: &PlanConstraints,
    excluded: &dyn Fn(&Process) -> Option<String>,
) -> MergePlan {
    let mut plan = MergePlan { whole_processes: constraints.whole_processes, ..MergePlan::default() };
    for (position, subject) in census.subjects.iter().enumerate().filter(|(_, subject)| !subject.is_foreign) {
        let process = &subject.process;
        let (ranges, freed_bytes) = if constraints.whole_processes {
            plan_whole_process(census, constraints, subject)
        } else {
            plan_guided_ranges(census, constraints, position, subject)
        };
        let has_ranges = !ranges.is_empty();
        if let Some(why) = excluded(process) {
            plan.skipped.push(SkippedProcess { pid: process.id.pid, comm: process.comm.clone(), why });
            continue;
        }
        if !constraints.whole_processes {
            plan.add_temporary_unenroll(subject, &idle_ranges(census, position));
        }
        if !has_ranges {
            continue;
        }
        let scanned: Pages = ranges.iter().map(|range| range.pages).sum();
        let net = MergeEffect { scanned_pages: scanned, ..MergeEffect::default() }.net(constraints.page_size).0
            + freed_bytes.0 as i64;
        if net < constraints.min_profit.0 as i64 {
            plan.skipped.push(SkippedProcess::unprofitable(process, NetBytes(net)));
            continue;
        }
        plan.targets.push(PlanTarget {
            process: process.clone(),
            domain: subject.domain.clone(),
            enroll_method: EnrollMethod::InProcess,
            huge_page_bytes: subject.regions.iter().map(|region| region.region.anon_huge).sum(),
            ranges,
        });
    }
    plan.drop_empty_targets();
    plan
}

/// All eligible regions of a process, and roughly how many bytes merging them frees.
fn plan_whole_process(
    census: &Census,
    constraints: &PlanConstraints,
    subject: &SubjectCensus,
) -> (Vec<PlannedRange>, Bytes) {
    let mut freed_pages = Pages::ZERO;
    let mut ranges = Vec::new();
    let is_eligible = |region: &&RegionCensus| region.ineligible.is_none() && region.counts.resident().0 > 0;
    for RegionCensus { region, counts, .. } in subject.regions.iter().filter(is_eligible) {
        let foreign = if census.across_domains { counts.across_domains } else { Pages::ZERO };
        let duplicate = counts.within_process + counts.within_domain + foreign;
        // Which of two copies is redundant depends on their order. Each therefore counts for at least half a frame;
        // otherwise the first of two equal processes would seem to save nothing.
        let freed = counts.zero + counts.redundant.min(duplicate).max(Pages(duplicate.0 / 2));
        freed_pages += freed;
        ranges.push(PlannedRange {
            range: region.range,
            region: region.range,
            pages: counts.resident().saturating_sub(counts.merged),
            merging: counts.zero + duplicate,
            zero: counts.zero,
            freed_bytes: constraints.page_size.bytes_of(freed),
            split_huge_pages: Pages::ZERO,
            enrolled: region.flags.has(VmFlags::MERGEABLE),
            late: false,
        });
    }
    if ranges.iter().all(|range| range.merging == Pages::ZERO) {
        ranges.clear();
    }
    (ranges, constraints.page_size.bytes_of(freed_pages))
}

/// The profitable ranges of a process, and the bytes that they free. They may add regions only up to half of the
/// process's remaining regions, which the census checked against the count at its time. Beyond that, the ranges with
/// the lowest net savings, by the census's costs, are dropped. The remaining ranges are the best choice of that number,
/// unless two of them split the same huge page. Longer ranges across the gaps are not tried again.
fn plan_guided_ranges(
    census: &Census,
    constraints: &PlanConstraints,
    position: usize,
    subject: &SubjectCensus,
) -> (Vec<PlannedRange>, Bytes) {
    let mut ranges: Vec<&GuidedRange> = subject_items(&census.ranges, position, |range| range.subject).iter().collect();
    let region_count =
        constraints.region_counts.get(&subject.process.id).copied().unwrap_or(subject.regions.len() as u64);
    let max_new_ranges = (constraints.max_map_count.saturating_sub(region_count) / 4) as usize;
    let new_ranges = ranges.iter().filter(|range| !range.enrolled).count();
    if new_ranges > max_new_ranges {
        let costs = EnrollCostBytes::for_page_size(constraints.page_size);
        let net_savings = |range: &GuidedRange| {
            let cost = costs.per_scanned_page * range.pages.0 as i64
                + costs.per_split_huge_page * range.split_huge_pages.0 as i64;
            range.freed_bytes.0 as i64 - cost
        };
        ranges.sort_by_key(|range| (!range.enrolled, Reverse(net_savings(range))));
        ranges.truncate(ranges.len() - (new_ranges - max_new_ranges));
        ranges.sort_by_key(|range| range.range.start);
    }
    let freed_bytes = ranges.iter().map(|range| range.freed_bytes).sum();
    let planned = ranges.into_iter().map(|range| PlannedRange {
        range: range.range,
        region: containing_region(subject, range.range),
        pages: range.pages,
        merging: range.merging,
        zero: range.zero,
        freed_bytes: range.freed_bytes,
        split_huge_pages: range.split_huge_pages,
        enrolled: range.enrolled,
        late: false,
    });
    (planned.collect(), freed_bytes)
}

/// The items of one subject in a list that is sorted by subject.
fn subject_items<T>(items: &[T], subject: usize, subject_of: impl Fn(&T) -> usize) -> &[T] {
    let start = items.partition_point(|item| subject_of(item) < subject);
    let end = items.partition_point(|item| subject_of(item) <= subject);
    &items[start..end]
}

/// The region that contains a range.
pub(super) fn containing_region(subject: &SubjectCensus, range: AddressRange) -> AddressRange {
    let end = subject.regions.partition_point(|region| region.region.range.start <= range.start);
    end.checked_sub(1).map_or(range, |position| subject.regions[position].region.range)
}

fn idle_ranges(census: &Census, position: usize) -> Vec<AddressRange> {
    subject_items(&census.idle_ranges, position, |idle| idle.subject).iter().map(|idle| idle.range).collect()
}
