//! What merged frames mean for a placement: which neighbors they tie to a machine, and what a copy per node costs.

use super::FrameReader;
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
        }
    }
}
