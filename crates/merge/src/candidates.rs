//! A plan whose savings are counted from the content groups, whichever processes are skipped.

use crate::decide::plan::{MergePlan, PlanConstraints};
use pagefold_base::process::Process;
use pagefold_base::{PageClass, Pages};
use pagefold_census::content_groups;
use pagefold_census::index::{PageIndex, PageMark};
use pagefold_census::results::Census;
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU32, Ordering};

/// Make a plan from a census and its index. See [`crate::decide::plan::make_plan`]. Here the predicted frames are
/// counted for the pages of its targets only, as if ksmd found no other pages.
///
/// If some processes of the census are skipped, zero pages that KSM merged with one another earlier are ignored, so the
/// count for zero pages may be one frame too low.
pub fn make_plan(
    census: &Census,
    index: &PageIndex,
    constraints: &PlanConstraints,
    excluded: &dyn Fn(&Process) -> Option<String>,
) -> MergePlan {
    let mut plan = crate::decide::plan::make_plan(census, constraints, excluded);
    let targets: BTreeSet<_> = plan.targets.iter().map(|target| target.process.id).collect();
    let kept: Vec<bool> = census.subjects.iter().map(|subject| targets.contains(&subject.process.id)).collect();
    plan.predicted.effect.freed_frames =
        if !constraints.whole_processes && census.ranges.iter().all(|range| kept[range.subject]) {
            census.savings.guided.freed_frames
        } else {
            count_freed_frames(census, index, constraints.whole_processes, &kept)
        };
    if constraints.merges_at_first_scan && !constraints.whole_processes {
        let domains = content_groups::domain_numbers(census.subjects.iter().map(|subject| &subject.domain));
        mark_late_ranges(&mut plan, census, index, &domains);
    }
    plan
}

/// Frames freed when the `is_kept` subjects are merged, whole or by their ranges.
fn count_freed_frames(census: &Census, index: &PageIndex, whole: bool, is_kept: &[bool]) -> Pages {
    let sharing = census.sharing;
    let within_domains = !census.across_domains && whole;
    let domains = content_groups::domain_numbers(census.subjects.iter().map(|subject| &subject.domain));
    let takes = |subject: usize, mark: PageMark| is_kept[subject] && (whole || mark.is_covered());

    let freed: Vec<Pages> = content_groups::fold_groups(index, &domains, |sum: &mut Pages, _, members| {
        let freed = |members: &[content_groups::GroupPage]| {
            let joins = |member: &content_groups::GroupPage| takes(member.subject, index.mark(member.ordinal));
            content_groups::freed_frames(index, sharing, members, joins)
        };
        *sum += if within_domains {
            members.chunk_by(|a, b| a.domain == b.domain).map(freed).sum()
        } else {
            freed(members)
        };
    });
    let mut zeros: BTreeMap<(u32, u8), u64> = BTreeMap::new();
    for (subject, &domain) in domains.iter().enumerate().filter(|&(subject, _)| is_kept[subject]) {
        let nodes: Vec<u8> = index
            .subject_ordinals(subject)
            .into_par_iter()
            .filter(|&page| {
                index.mark(page).class() == Some(PageClass::Zero) && index.first_page_of_frame(page) == page
            })
            .filter(|&page| takes(subject, index.mark(page)))
            .map(|page| index.node(page))
            .collect();
        for node in nodes {
            *zeros.entry((if within_domains { domain } else { 0 }, node)).or_default() += 1;
        }
    }
    let zeros: Pages = zeros.values().map(|&copies| sharing.freed_zero(copies, 0)).sum();
    freed.into_iter().sum::<Pages>() + zeros
}

/// Mark the ranges in which most merging pages are third and further copies.
fn mark_late_ranges(plan: &mut MergePlan, census: &Census, index: &PageIndex, domains: &[u32]) {
    let position = |id| plan.targets.iter().position(|target| target.process.id == id);
    let target_of: Vec<Option<usize>> = census.subjects.iter().map(|subject| position(subject.process.id)).collect();
    let further: Vec<Vec<AtomicU32>> =
        plan.targets.iter().map(|target| target.ranges.iter().map(|_| AtomicU32::new(0)).collect()).collect();
    content_groups::fold_groups(index, domains, |(): &mut (), _, members| {
        let covered = |member: &&content_groups::GroupPage| !member.merged && index.mark(member.ordinal).is_covered();
        for member in members.iter().filter(covered).skip(2) {
            let Some(target) = target_of[member.subject] else { continue };
            let Some((.., address)) = index.locate(member.ordinal) else { continue };
            let ranges = &plan.targets[target].ranges;
            let range = ranges.partition_point(|range| range.range.end <= address);
            if let Some(count) = further[target].get(range) {
                count.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    for (target, further) in plan.targets.iter_mut().zip(further) {
        for (range, further) in target.ranges.iter_mut().zip(further) {
            range.late = !range.enrolled && u64::from(further.into_inner()) * 2 > range.merging.0;
        }
    }
}
