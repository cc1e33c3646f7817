//! Numbers of frames, as `/proc/PID/pagemap` shows them, without a table of pages.
//!
//! Each region gets a range of numbers when it is mapped, one for each page, for frames that no other page maps. Pages that
//! move to another node get others there. Frames
//! with several mappings and merged frames have the model's number behind [`NUMBERED_FRAMES`]. Each node has one memory
//! block, the upper bits of the number.
//!
//! Limit: numbers are spread wider than the host has memory, and none is used again: 512 PiB of a node can be mapped in
//! all.

use super::memory::{FrameId, PAGES_IN_HUGE_PAGE, SimulatedProcessId};
use pagefold_base::Pfn;
use std::collections::BTreeMap;
use std::ops::Range;

/// The frames of a memory block, and so of a node.
const BLOCK_FRAMES: u64 = 1 << 48;
/// The bytes of a memory block.
pub(crate) const BLOCK_BYTES: u64 = BLOCK_FRAMES * super::host_state::PAGE_BYTES;
/// Where frames with a number of the model begin within a node.
const NUMBERED_FRAMES: u64 = 1 << 47;
/// The kernel's zero page.
pub(crate) const ZERO_PAGE_FRAME: Pfn = Pfn(1);

/// What a frame holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameOrigin {
    /// The kernel's zero page.
    ZeroPage,
    /// A frame with a number of the model.
    Numbered(FrameId),
    /// A page of a process.
    Page(SimulatedProcessId, u64),
}

/// Neighboring frames for neighboring pages.
#[derive(Clone, Copy, Debug)]
struct FrameRange {
    first_frame: u64,
    process: SimulatedProcessId,
    page: u64,
    pages: u64,
}

/// The numbers of all frames of a host.
#[derive(Debug)]
pub(crate) struct FrameNumbers {
    /// The next unused number of each node.
    next: Vec<u64>,
    /// By the first frame.
    by_frame: BTreeMap<u64, FrameRange>,
    /// By process and first page.
    by_page: BTreeMap<(SimulatedProcessId, u64), FrameRange>,
}

impl FrameNumbers {
    pub(crate) fn new(nodes: u8) -> Self {
        let next = (0..u64::from(nodes)).map(|node| node * BLOCK_FRAMES + PAGES_IN_HUGE_PAGE).collect();
        Self { next, by_frame: BTreeMap::new(), by_page: BTreeMap::new() }
    }

    /// Number the frames of a region. A huge page has aligned frames.
    pub(crate) fn add_region(&mut self, process: SimulatedProcessId, page: u64, pages: u64, node: u8) {
        let next = &mut self.next[usize::from(node)];
        let first_frame = next.next_multiple_of(PAGES_IN_HUGE_PAGE) + page % PAGES_IN_HUGE_PAGE;
        *next = first_frame + pages;
        assert!(*next % BLOCK_FRAMES < NUMBERED_FRAMES, "fewer than 2^47 frames of a node were mapped");
        self.insert(FrameRange { first_frame, process, page, pages });
    }

    fn insert(&mut self, range: FrameRange) {
        self.by_frame.insert(range.first_frame, range);
        self.by_page.insert((range.process, range.page), range);
    }

    /// Number the frames of a range of regions anew, because its pages have moved to a node.
    pub(crate) fn move_range(&mut self, process: SimulatedProcessId, pages: Range<u64>, node: u8) {
        let former: Vec<FrameRange> = self
            .by_page
            .range((process, 0)..(process, pages.end))
            .map(|(_, range)| *range)
            .filter(|range| range.page + range.pages > pages.start)
            .collect();
        for range in former {
            let (start, end) = (range.page, range.page + range.pages);
            self.by_frame.remove(&range.first_frame);
            self.by_page.remove(&(process, start));
            for rest in
                [start..end.min(pages.start), start.max(pages.end)..end].into_iter().filter(|rest| !rest.is_empty())
            {
                let first_frame = range.first_frame + rest.start - start;
                self.insert(FrameRange { first_frame, process, page: rest.start, pages: rest.end - rest.start });
            }
            let (first, last) = (start.max(pages.start), end.min(pages.end));
            self.add_region(process, first, last - first, node);
        }
    }

    /// Number the frames of a process's child.
    pub(crate) fn add_child(&mut self, parent: SimulatedProcessId, child: SimulatedProcessId) {
        let ranges: Vec<FrameRange> = self.ranges_of(parent).copied().collect();
        for range in ranges {
            self.add_region(child, range.page, range.pages, (range.first_frame / BLOCK_FRAMES) as u8);
        }
    }

    /// Forget the frames of a process.
    pub(crate) fn remove_process(&mut self, process: SimulatedProcessId) {
        let ranges: Vec<FrameRange> = self.ranges_of(process).copied().collect();
        for range in ranges {
            self.by_frame.remove(&range.first_frame);
            self.by_page.remove(&(process, range.page));
        }
    }

    fn ranges_of(&self, process: SimulatedProcessId) -> impl Iterator<Item = &FrameRange> {
        self.by_page.range((process, 0)..=(process, u64::MAX)).map(|(_, range)| range)
    }

    /// The frame of a page that no other page shares. Frames of neighboring pages of a region have ascending numbers.
    pub(crate) fn own_frame(&self, process: SimulatedProcessId, page: u64) -> Pfn {
        let (_, range) =
            self.by_page.range((process, 0)..=(process, page)).next_back().expect("the page is in a region");
        Pfn(range.first_frame + page - range.page)
    }

    /// The frame with a number of the model.
    pub(crate) fn numbered_frame(frame: FrameId, node: u8) -> Pfn {
        Pfn(u64::from(node) * BLOCK_FRAMES + NUMBERED_FRAMES + u64::from(frame))
    }

    /// What a frame holds; `None` if it has no number of the model and no page of a process.
    pub(crate) fn origin(&self, frame: Pfn) -> Option<FrameOrigin> {
        if frame == ZERO_PAGE_FRAME {
            return Some(FrameOrigin::ZeroPage);
        }
        if let Some(number) = (frame.0 % BLOCK_FRAMES).checked_sub(NUMBERED_FRAMES) {
            return FrameId::try_from(number).ok().map(FrameOrigin::Numbered);
        }
        let (_, range) = self.by_frame.range(..=frame.0).next_back()?;
        let offset = frame.0 - range.first_frame;
        (offset < range.pages).then_some(FrameOrigin::Page(range.process, range.page + offset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROCESS: SimulatedProcessId = SimulatedProcessId(3);

    #[test]
    fn pages_that_move_have_frames_of_their_new_node() {
        let mut frames = FrameNumbers::new(2);
        frames.add_region(PROCESS, 512, 1024, 0);
        frames.add_region(PROCESS, 2048, 512, 0);
        let before: Vec<Pfn> = [512, 1023, 1535, 2100].map(|page| frames.own_frame(PROCESS, page)).to_vec();
        frames.move_range(PROCESS, 1024..1100, 1);
        frames.move_range(PROCESS, 1050..2050, 1);
        for (page, node) in [(512, 0), (1023, 0), (1024, 1), (1099, 1), (1100, 1), (1535, 1), (2049, 1), (2050, 0)] {
            let frame = frames.own_frame(PROCESS, page);
            assert_eq!((frame.0 / BLOCK_FRAMES, frame.0 % 512), (node, page % 512), "{page}");
            assert_eq!(frames.origin(frame), Some(FrameOrigin::Page(PROCESS, page)));
        }
        let after: Vec<Pfn> = [512, 1023, 2100].map(|page| frames.own_frame(PROCESS, page)).to_vec();
        assert_eq!(after, [before[0], before[1], before[3]], "pages that stay keep their frames");
        assert_eq!(frames.origin(before[2]), None);
    }

    #[test]
    fn frames_lead_back_to_their_pages() {
        let mut frames = FrameNumbers::new(2);
        frames.add_region(PROCESS, 5 * 512, 1024, 0);
        frames.add_region(PROCESS, 8 * 512 + 7, 3, 1);
        frames.add_child(PROCESS, SimulatedProcessId(4));
        for process in [PROCESS, SimulatedProcessId(4)] {
            for (page, node) in [(5 * 512, 0), (7 * 512 - 1, 0), (8 * 512 + 7, 1), (8 * 512 + 9, 1)] {
                let frame = frames.own_frame(process, page);
                assert_eq!(frame.0 / BLOCK_FRAMES, node);
                assert_eq!(frame.0 % 512, page % 512, "huge pages are aligned");
                assert_eq!(frames.origin(frame), Some(FrameOrigin::Page(process, page)));
            }
        }
        let merged = FrameNumbers::numbered_frame(77, 1);
        assert_eq!((frames.origin(merged), merged.0 / BLOCK_FRAMES), (Some(FrameOrigin::Numbered(77)), 1));
        assert_eq!(frames.origin(ZERO_PAGE_FRAME), Some(FrameOrigin::ZeroPage));
        let frame = frames.own_frame(PROCESS, 5 * 512);
        frames.remove_process(PROCESS);
        assert_eq!(frames.origin(frame), None);
    }
}
