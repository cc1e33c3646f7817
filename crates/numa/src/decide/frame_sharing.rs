//! What merged frames mean for a placement: which processes share them, which neighbors they tie to a machine, and what
//! a copy per node costs.

use super::FrameReader;
use pagefold_base::splitmix::splitmix64;
use pagefold_base::{Pages, Pfn};
use std::collections::{BTreeMap, BTreeSet};

/// Pages that map a frame, by the position of their process.
type FramePages = (Pfn, usize);

fn sorted_pages(readers: &[FrameReader]) -> Vec<FramePages> {
    let pages = readers.iter().enumerate();
    let mut pages: Vec<FramePages> =
        pages.flat_map(|(position, reader)| reader.frames.iter().map(move |&frame| (frame, position))).collect();
    pages.sort_unstable();
    pages
}

/// Frames that a process shares with others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SharedFrames {
    /// The frames.
    pub frames: Pages,
    /// Pages of other processes that map these frames, by the position of the process. If the frames are moved with all
    /// that map them (`MPOL_MF_MOVE_ALL`, or a write of `cpuset.mems`), these pages move, too.
    pub dragged_pages: BTreeMap<usize, Pages>,
}

/// The frames that the process at `position` shares with other readers.
pub fn shared_frames(readers: &[FrameReader], position: usize) -> SharedFrames {
    let mut shared = SharedFrames::default();
    for pages in sorted_pages(readers).chunk_by(|left, right| left.0 == right.0) {
        let is_own = |page: &&FramePages| page.1 == position;
        if !pages.iter().any(|page| is_own(&page)) || pages.iter().all(|page| is_own(&page)) {
            continue;
        }
        shared.frames += Pages(1);
        for (_, reader) in pages.iter().filter(|page| !is_own(page)) {
            *shared.dragged_pages.entry(*reader).or_default() += Pages(1);
        }
    }
    shared
}

/// The merged frames that a process reads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnedFrames {
    /// The frames by the node where they are.
    pub frames_by_node: BTreeMap<u32, Pages>,
    /// The part of them that other processes read, too.
    pub shared_frames: Pages,
    /// The frames that it shares with each other process, by the position of that process. From the sample, if there is
    /// one.
    pub shared_with: BTreeMap<usize, Pages>,
}

/// The owners of merged frames.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FrameOwners {
    /// For each reader, in their order.
    pub owners: Vec<OwnedFrames>,
    /// Frames that several processes read.
    pub shared_frames: Pages,
    /// The frames of them by which `shared_with` is estimated: all, or a sample.
    pub sampled_frames: Pages,
}

/// Which processes share merged frames. A frame of many readers belongs to many pairs: if there are more than
/// `max_pairs` of them, [`OwnedFrames::shared_with`] is estimated from frames that are chosen by a hash of their number,
/// each with the same probability. All other figures are exact.
pub fn frame_owners(readers: &[FrameReader], node_of_frame: impl Fn(Pfn) -> u32, max_pairs: u64) -> FrameOwners {
    let pages = sorted_pages(readers);
    let mut result = FrameOwners { owners: vec![OwnedFrames::default(); readers.len()], ..FrameOwners::default() };
    let mut pairs: u64 = 0;
    for pages in pages.chunk_by(|left, right| left.0 == right.0) {
        let node = node_of_frame(pages[0].0);
        let is_shared = pages[0].1 != pages[pages.len() - 1].1;
        let mut count: u64 = 0;
        for process in pages.chunk_by(|left, right| left.1 == right.1) {
            let owner = &mut result.owners[process[0].1];
            *owner.frames_by_node.entry(node).or_default() += Pages(1);
            owner.shared_frames += Pages(u64::from(is_shared));
            count += 1;
        }
        result.shared_frames += Pages(u64::from(is_shared));
        pairs += count * (count - 1);
    }
    let share = if pairs > max_pairs { max_pairs as f64 / pairs as f64 } else { 1.0 };
    let is_sampled = |frame: Pfn| share >= 1.0 || (splitmix64(frame.0) as f64) < share * u64::MAX as f64;
    for pages in pages.chunk_by(|left, right| left.0 == right.0) {
        if pages[0].1 == pages[pages.len() - 1].1 || !is_sampled(pages[0].0) {
            continue;
        }
        result.sampled_frames += Pages(1);
        let processes: Vec<usize> = pages.chunk_by(|left, right| left.1 == right.1).map(|own| own[0].1).collect();
        for &process in &processes {
            for &other in processes.iter().filter(|other| **other != process) {
                *result.owners[process].shared_with.entry(other).or_default() += Pages(1);
            }
        }
    }
    let scale = result.shared_frames.0 as f64 / (result.sampled_frames.0 as f64).max(1.0);
    for pages in result.owners.iter_mut().flat_map(|owner| owner.shared_with.values_mut()) {
        *pages = Pages((pages.0 as f64 * scale).round() as u64);
    }
    result
}

/// The frames that KSM would need more if it merged within nodes only (`merge_across_nodes=0`): for each frame one copy
/// for each further node from which it is read. Readers without a known node count as being where the frame is.
pub fn copies_for_nodes(readers: &[FrameReader], node_of_frame: impl Fn(Pfn) -> u32) -> Pages {
    let copies = |pages: &[FramePages]| {
        let node = |&(frame, reader): &FramePages| readers[reader].node.unwrap_or_else(|| node_of_frame(frame));
        pages.iter().map(node).collect::<BTreeSet<u32>>().len() as u64 - 1
    };
    Pages(sorted_pages(readers).chunk_by(|left, right| left.0 == right.0).map(copies).sum())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn reader(node: Option<u32>, frames: &[u64]) -> FrameReader {
        FrameReader { node, frames: frames.iter().map(|&frame| Pfn(frame)).collect() }
    }

    #[test]
    fn neighbors_are_dragged_by_shared_frames() {
        let readers = [
            reader(Some(0), &[1, 1, 2, 3]),
            reader(Some(0), &[1, 2, 2, 4]),
            reader(Some(1), &[1, 5]),
            reader(None, &[5]),
        ];
        let shared = shared_frames(&readers, 0);
        assert_eq!(shared.frames, Pages(2), "frames 1 and 2; frame 3 is its own");
        assert_eq!(shared.dragged_pages, [(1, Pages(3)), (2, Pages(1))].into());
        assert_eq!(shared_frames(&readers, 3).dragged_pages, [(2, Pages(1))].into());
        assert_eq!(shared_frames(&[], 0), SharedFrames::default());
    }

    #[test]
    fn owners_of_frames_are_counted() {
        // Frames from 100 on are on node 1. The first process maps frame 1 twice.
        let readers = [
            reader(Some(0), &[1, 1, 2, 100, 101]),
            reader(Some(0), &[1, 2, 2, 100]),
            reader(Some(1), &[1, 5]),
            reader(None, &[]),
        ];
        let found = frame_owners(&readers, |frame| u32::from(frame.0 >= 100), 1000);
        assert_eq!((found.shared_frames, found.sampled_frames), (Pages(3), Pages(3)));
        let owned = |nodes: &[(u32, u64)], shared, with: &[(usize, u64)]| OwnedFrames {
            frames_by_node: nodes.iter().map(|&(node, frames)| (node, Pages(frames))).collect(),
            shared_frames: Pages(shared),
            shared_with: with.iter().map(|&(other, frames)| (other, Pages(frames))).collect(),
        };
        let expected = [
            owned(&[(0, 2), (1, 2)], 3, &[(1, 3), (2, 1)]),
            owned(&[(0, 2), (1, 1)], 3, &[(0, 3), (2, 1)]),
            owned(&[(0, 2)], 1, &[(0, 1), (1, 1)]),
            owned(&[], 0, &[]),
        ];
        assert_eq!(found.owners, expected);
        assert_eq!(frame_owners(&[], |_| 0, 1000), FrameOwners::default());
    }

    #[test]
    fn many_pairs_are_estimated_from_a_sample() {
        // Twenty processes read the same 5000 frames, and two of them share 5000 more.
        let both: Vec<u64> = (0..10_000).collect();
        let readers: Vec<FrameReader> =
            (0..20).map(|position| reader(Some(0), if position < 2 { &both } else { &both[..5000] })).collect();
        let exact = frame_owners(&readers, |_| 0, u64::MAX);
        let sampled = frame_owners(&readers, |_| 0, 100_000);
        assert_eq!((exact.sampled_frames, exact.shared_frames), (Pages(10_000), Pages(10_000)));
        assert!((300..800).contains(&sampled.sampled_frames.0), "{:?}: 5 % of the frames", sampled.sampled_frames);
        assert_eq!(sampled.shared_frames, exact.shared_frames);
        let without_pairs = |owners: &FrameOwners| -> Vec<OwnedFrames> {
            let owners = owners.owners.iter().cloned();
            owners.map(|owner| OwnedFrames { shared_with: BTreeMap::new(), ..owner }).collect()
        };
        assert_eq!(without_pairs(&sampled), without_pairs(&exact));
        // The first two share all sampled frames; the share of the others has a standard error of 220 frames.
        assert_eq!(sampled.owners[0].shared_with[&1], Pages(10_000));
        assert!((4000..6000).contains(&sampled.owners[0].shared_with[&7].0), "{:?}", sampled.owners[0].shared_with);
    }

    #[test]
    fn each_further_reading_node_needs_a_copy() {
        let readers =
            [reader(Some(0), &[1, 1, 2]), reader(Some(1), &[1, 2]), reader(Some(2), &[1]), reader(None, &[3])];
        assert_eq!(copies_for_nodes(&readers, |_| 0), Pages(3));
        let moved = [reader(Some(0), &[1, 1, 2]), reader(Some(0), &[1, 2]), reader(Some(0), &[1])];
        assert_eq!(copies_for_nodes(&moved, |_| 0), Pages::ZERO);
        assert_eq!(copies_for_nodes(&[reader(Some(0), &[9]), reader(None, &[9])], |_| 1), Pages(1));
    }

    proptest! {
        #[test]
        fn sharing_is_mutual(frames in prop::collection::vec(prop::collection::vec(0_u64..6, 0..6), 2..4)) {
            let readers: Vec<FrameReader> = frames.iter().map(|frames| reader(Some(0), frames)).collect();
            let drags = |from: usize, to: usize| shared_frames(&readers, from).dragged_pages.contains_key(&to);
            prop_assert_eq!(drags(0, 1), drags(1, 0));
            prop_assert_eq!(copies_for_nodes(&readers, |_| 0), Pages::ZERO);
            let found = frame_owners(&readers, |_| 0, u64::MAX);
            for (position, owner) in found.owners.iter().enumerate() {
                let shared = shared_frames(&readers, position);
                prop_assert_eq!(owner.shared_frames, shared.frames);
                prop_assert!(owner.shared_with.keys().eq(shared.dragged_pages.keys()));
                for (&other, frames) in &owner.shared_with {
                    prop_assert_eq!(found.owners[other].shared_with.get(&position), Some(frames));
                }
            }
        }
    }
}
