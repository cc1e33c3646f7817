//! Which pages of a machine equal those of other machines, and on which nodes these are, by sketches of their contents.
//!
//! KSM will merge such pages. Across nodes, the merged page is where the equal one is. Within nodes
//! (`merge_across_nodes=0`), pages merge only if the machine comes to the node of their equal ones.
//!
//! A smaller machine is drawn to larger ones, and never the other way round, so that two machines do not change places
//! for each other. Machines of different trust domains do not draw each other. Limits: sketches estimate; a larger machine
//! may be moved by the same plan; content on several nodes counts for the largest machine if KSM merges across nodes.

use pagefold_base::domain::TrustDomain;
use pagefold_census::decide::sketch::ContentSketches;
use std::collections::BTreeMap;

/// The contents of a machine, and where it is.
#[derive(Clone, Debug)]
pub struct LocatedContents<'c> {
    /// Its trust domain.
    pub domain: &'c TrustDomain,
    /// Its contents.
    pub sketches: &'c ContentSketches,
    /// Its pages by node.
    pub pages: BTreeMap<u32, f64>,
}

impl LocatedContents<'_> {
    fn total_pages(&self) -> f64 {
        self.pages.values().sum()
    }

    /// The share of its pages on each node that has any.
    fn node_shares(&self) -> impl Iterator<Item = (u32, f64)> + '_ {
        let total = self.total_pages();
        self.pages.iter().filter(|(_, pages)| **pages > 0.0).map(move |(&node, pages)| (node, pages / total))
    }
}

/// For each machine the pages that are not merged yet and equal pages of larger machines, by the node of these. A machine
/// without known contents has none. Across nodes, each page counts for one node; within nodes, for each that has an equal
/// one.
pub fn equal_pages(machines: &[Option<LocatedContents<'_>>], is_within_nodes: bool) -> Vec<BTreeMap<u32, f64>> {
    let mut by_size: Vec<(usize, &LocatedContents<'_>)> =
        machines.iter().enumerate().filter_map(|(position, machine)| Some((position, machine.as_ref()?))).collect();
    by_size.sort_by(|left, right| right.1.total_pages().total_cmp(&left.1.total_pages()).then(left.0.cmp(&right.0)));
    let mut equal = vec![BTreeMap::new(); machines.len()];
    for (rank, (position, machine)) in by_size.iter().enumerate() {
        let larger = || by_size[..rank].iter().map(|(_, other)| *other).filter(|other| other.domain == machine.domain);
        let equal: &mut BTreeMap<u32, f64> = &mut equal[*position];
        if is_within_nodes {
            let mut remaining = BTreeMap::new();
            for other in larger() {
                for (node, share) in other.node_shares() {
                    let sought = remaining.remove(&node).unwrap_or_else(|| machine.sketches.unmerged.clone());
                    *equal.entry(node).or_default() += share * sought.shared(&other.sketches.all).0 as f64;
                    remaining.insert(node, sought.without(&other.sketches.all));
                }
            }
        } else {
            let mut sought = machine.sketches.unmerged.clone();
            for other in larger() {
                let shared = sought.shared(&other.sketches.all).0 as f64;
                other.node_shares().for_each(|(node, share)| *equal.entry(node).or_default() += share * shared);
                sought = sought.without(&other.sketches.all);
            }
        }
        equal.retain(|_, pages| *pages > 0.0);
    }
    equal
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::{Fingerprint, Pages};
    use pagefold_census::decide::sketch::Sketch;
    use proptest::prelude::*;
    use std::ops::Range;

    fn sketches(contents: Range<u64>, merged: u64) -> ContentSketches {
        let pages = Pages(contents.end - contents.start);
        let of = |range: Range<u64>| Sketch::from_contents(pages, range.map(Fingerprint));
        ContentSketches { all: of(contents.clone()), unmerged: of(contents.start + merged..contents.end) }
    }

    fn domain(uid: u32) -> TrustDomain {
        TrustDomain::User(uid)
    }

    #[test]
    fn smaller_machine_is_drawn_to_the_nodes_of_larger_ones() {
        let (own, foreign) = (domain(1), domain(2));
        let contents = [sketches(0..200, 0), sketches(100..150, 10), sketches(100..160, 0), sketches(140..300, 0)];
        let located =
            |sketches, domain, node, pages| Some(LocatedContents { domain, sketches, pages: [(node, pages)].into() });
        let machines = [
            located(&contents[0], &own, 0, 200.0),
            located(&contents[1], &own, 1, 50.0),
            located(&contents[2], &foreign, 1, 60.0),
            located(&contents[3], &own, 1, 160.0),
            None,
        ];
        let across = equal_pages(&machines, false);
        // Contents 110 to 149; 140 to 149 are in both larger machines, and count for the largest.
        assert_eq!(across[1], [(0, 40.0)].into());
        assert_eq!((&across[0], &across[2], &across[4]), (&BTreeMap::new(), &BTreeMap::new(), &BTreeMap::new()));
        assert_eq!(across[3], [(0, 60.0)].into());
        let within = equal_pages(&machines, true);
        assert_eq!(within[1], [(0, 40.0), (1, 10.0)].into());
    }

    proptest! {
        #[test]
        fn machines_never_draw_each_other(
            machines in prop::collection::vec((0u64..100, 1u64..100, 0u32..3), 2..5), is_within_nodes: bool,
        ) {
            let own = domain(1);
            let contents: Vec<ContentSketches> =
                machines.iter().map(|&(start, count, _)| sketches(start..start + count, 0)).collect();
            let pair = |first: usize, second: usize| {
                let located = |position: usize, node: u32| Some(LocatedContents {
                    domain: &own,
                    sketches: &contents[position],
                    pages: [(node, machines[position].1 as f64)].into(),
                });
                equal_pages(&[located(first, 0), located(second, 1)], is_within_nodes)
            };
            let equal = pair(0, 1);
            prop_assert!(equal[0].is_empty() || equal[1].is_empty());
            let all: f64 = equal.iter().flat_map(|pages| pages.values()).sum();
            prop_assert!(all <= machines[0].1.min(machines[1].1) as f64);
        }
    }
}
