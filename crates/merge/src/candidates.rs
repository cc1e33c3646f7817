//! A plan with what it reaches counted from the groups, whoever is left alone.

use crate::decide::plan::{Constraints, Plan};
use pagefold_base::process::Process;
use pagefold_base::{PageClass, Pages};
use pagefold_census::group;
use pagefold_census::index::{Index, Mark};
use pagefold_census::results::Census;
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU32, Ordering};

/// Make a plan of a census and its index. See [`crate::decide::plan::plan`]; the frames that it should free are
/// counted here for the pages of its targets alone, as if ksmd found no others.
///
/// Where some of the census are left alone, zeros that KSM merged with one another earlier are taken for none, so that
/// of zeros one frame too few may be counted.
pub fn plan(
    census: &Census,
    index: &Index,
    constraints: &Constraints,
    excluded: &dyn Fn(&Process) -> Option<String>,
) -> Plan {
    let mut plan = crate::decide::plan::plan(census, constraints, excluded);
    let targets: BTreeSet<_> = plan.targets.iter().map(|target| target.process.id).collect();
    let kept: Vec<bool> = census.subjects.iter().map(|subject| targets.contains(&subject.process.id)).collect();
    plan.predicted.reach.freed = if !constraints.whole && census.ranges.iter().all(|range| kept[range.subject]) {
        census.savings.guided.freed
    } else {
        freed(census, index, constraints.whole, &kept)
    };
    if constraints.first_look && !constraints.whole {
        let domains = group::domain_numbers(census.subjects.iter().map(|subject| &subject.domain));
        mark_late(&mut plan, census, index, &domains);
    }
    plan
}

/// Frames that come back when those subjects that are `kept` are merged, whole or by their ranges.
fn freed(census: &Census, index: &Index, whole: bool, kept: &[bool]) -> Pages {
    let sharing = census.sharing;
    let within_domains = !census.across_domains && whole;
    let domains = group::domain_numbers(census.subjects.iter().map(|subject| &subject.domain));
    let takes = |subject: usize, mark: Mark| kept[subject] && (whole || mark.is_covered());

    let freed: Vec<Pages> = group::walk(index, &domains, |sum: &mut Pages, _, members| {
        let freed = |members: &[group::Member]| {
            let joins = |member: &group::Member| takes(member.subject, index.mark(member.ordinal));
            group::freed(index, sharing, members, joins)
        };
        *sum += if within_domains {
            members.chunk_by(|a, b| a.domain == b.domain).map(freed).sum()
        } else {
            freed(members)
        };
    });
    let mut zeros: BTreeMap<(u32, u8), u64> = BTreeMap::new();
    for (subject, &domain) in domains.iter().enumerate().filter(|&(subject, _)| kept[subject]) {
        let nodes: Vec<u8> = index
            .pages_of(subject)
            .into_par_iter()
            .filter(|&page| index.mark(page).class() == Some(PageClass::Zero) && index.frame(page) == page)
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

/// Mark the ranges in which most of what merges are third and further copies.
fn mark_late(plan: &mut Plan, census: &Census, index: &Index, domains: &[u32]) {
    let position = |id| plan.targets.iter().position(|target| target.process.id == id);
    let target_of: Vec<Option<usize>> = census.subjects.iter().map(|subject| position(subject.process.id)).collect();
    let further: Vec<Vec<AtomicU32>> =
        plan.targets.iter().map(|target| target.ranges.iter().map(|_| AtomicU32::new(0)).collect()).collect();
    group::walk(index, domains, |(): &mut (), _, members| {
        let covered = |member: &&group::Member| !member.merged && index.mark(member.ordinal).is_covered();
        for member in members.iter().filter(covered).skip(2) {
            let Some(target) = target_of[member.subject] else { continue };
            let Some((.., address)) = index.place(member.ordinal) else { continue };
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
