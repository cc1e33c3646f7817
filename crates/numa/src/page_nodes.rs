//! Counts the pages of a process on each NUMA node.
//!
//! Frames come from `/proc/PID/pagemap`, kinds from `/proc/kpageflags`, and the node of a frame from the memory blocks
//! of each node ([`NumaNodes`]). This needs CAP_SYS_ADMIN, and works on recordings.
//!
//! All pages of an aligned run of frames as long as a huge page are one huge page if its first and its last frame have
//! the flags of one. So a range of huge pages costs two lookups of flags for 512 pages.

use pagefold_base::region::{Region, VmFlags};
use pagefold_base::{Absent, AddressRange, Bytes, Pages, Pfn, Reading};
use pagefold_host::observe::{self, NumaNodes};
use pagefold_host::page_state::PageState;
use pagefold_host::{FrameFlags, Host, ProcessHandle};
use std::collections::BTreeMap;
use std::ops::AddAssign;

/// Page table entries that are read together: 128 MiB of 4 KiB pages.
const ENTRIES_PER_READ: u64 = 1 << 15;

/// A region is sparse if less than one page in this many is resident.
const SPARSE_RATIO: u64 = 8;

/// Pages of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageKinds {
    /// Private base pages.
    pub small: Pages,
    /// Base pages of transparent huge pages, also of shared memory.
    pub huge: Pages,
    /// Base pages of hugetlb pages.
    pub hugetlb: Pages,
    /// KSM pages.
    pub merged: Pages,
    /// Base pages of files and of shared memory.
    pub file: Pages,
}

impl PageKinds {
    /// The pages of all kinds.
    pub fn total(self) -> Pages {
        self.small + self.huge + self.hugetlb + self.merged + self.file
    }

    /// The pages that can be moved without moving memory of other processes.
    pub fn movable(self) -> Pages {
        self.total().saturating_sub(self.merged)
    }
}

impl AddAssign for PageKinds {
    fn add_assign(&mut self, other: Self) {
        self.small += other.small;
        self.huge += other.huge;
        self.hugetlb += other.hugetlb;
        self.merged += other.merged;
        self.file += other.file;
    }
}

/// The pages of some memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageNodes {
    /// Pages in memory, by node.
    pub by_node: BTreeMap<u32, PageKinds>,
    /// Pages that are swapped out.
    pub swapped: Pages,
    /// Pages of the kernel's zero page, which is on no node of the process's choice.
    pub zero: Pages,
}

impl PageNodes {
    /// The pages in memory, without the kernel's zero page.
    pub fn resident(&self) -> Pages {
        self.by_node.values().map(|kinds| kinds.total()).sum()
    }

    /// Add the pages of other memory.
    pub fn add(&mut self, other: &Self) {
        for (&node, &kinds) in &other.by_node {
            *self.by_node.entry(node).or_default() += kinds;
        }
        self.swapped += other.swapped;
        self.zero += other.zero;
    }
}

/// Reads the pages of processes.
pub struct PageNodeReader<'h> {
    host: &'h dyn Host,
    nodes: &'h NumaNodes,
    huge_page_frames: u64,
}

/// The pages of a range, and the frames of its KSM pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegionPages {
    /// The pages by node.
    pub pages: PageNodes,
    /// The frame of each KSM page.
    pub merged_frames: Vec<Pfn>,
}

/// Consecutive frames within one huge page of frames, mapped by pages with one value of the `file` bit.
#[derive(Clone, Copy, Debug)]
struct FrameRun {
    first: Pfn,
    frames: u64,
    is_file: bool,
}

impl<'h> PageNodeReader<'h> {
    /// A reader for a host with these nodes.
    pub fn new(host: &'h dyn Host, nodes: &'h NumaNodes) -> Self {
        let huge_page_bytes = observe::huge_page_bytes(host).unwrap_or(2 << 20);
        Self { host, nodes, huge_page_frames: (huge_page_bytes / host.page_size().bytes()).max(1) }
    }

    /// Count the pages of a region of a process.
    ///
    /// # Errors
    /// `Denied` if the kernel hides the frames, `Vanished` if the process has ended.
    pub fn read_region(&self, handle: &dyn ProcessHandle, region: &Region) -> Reading<RegionPages> {
        let mut found = RegionPages::default();
        let is_empty = [region.rss, region.hugetlb, region.swap].iter().all(|bytes| *bytes == Bytes::ZERO);
        if is_empty || region.flags.has(VmFlags::PFN_MAP.with(VmFlags::IO)) {
            return Ok(found);
        }
        for range in self.populated_ranges(handle, region)? {
            let mut start = range.start;
            while start < range.end {
                let end = range.end.min(start.saturating_add(self.bytes_per_read()));
                self.read_range(handle, AddressRange { start, end }, &mut found)?;
                start = end;
            }
        }
        Ok(found)
    }

    fn bytes_per_read(&self) -> u64 {
        self.host.page_size().bytes_of(Pages(ENTRIES_PER_READ)).0
    }

    /// The parts of a region to read. Swapped-out pages and pages of files are only found by reading everything.
    fn populated_ranges(&self, handle: &dyn ProcessHandle, region: &Region) -> Reading<Vec<AddressRange>> {
        let is_sparse = region.rss.0.saturating_mul(SPARSE_RATIO) < region.range.bytes().0
            && region.rss == region.anonymous
            && region.swap == Bytes::ZERO
            && region.range.bytes().0 > self.bytes_per_read();
        if !is_sparse {
            return Ok(vec![region.range]);
        }
        let page = self.host.page_size();
        let runs = handle.resident(&[region.range])?;
        let ranges = runs.iter().map(|run| AddressRange {
            start: run.address,
            end: run.address + page.bytes_of(Pages(run.pages.into())).0,
        });
        Ok(AddressRange::union(ranges.collect()))
    }

    fn read_range(&self, handle: &dyn ProcessHandle, range: AddressRange, found: &mut RegionPages) -> Reading<()> {
        let entries = handle.mappings(range)?;
        let mut runs: Vec<FrameRun> = Vec::new();
        for entry in &entries {
            if entry.swapped {
                found.pages.swapped += Pages(1);
            }
            if !entry.present {
                continue;
            }
            let frame = entry.frame.ok_or(Absent::Denied)?;
            let continues = |run: &&mut FrameRun| {
                frame.0 == run.first.0 + run.frames && frame.0 % self.huge_page_frames != 0 && run.is_file == entry.file
            };
            match runs.last_mut().filter(continues) {
                Some(run) => run.frames += 1,
                None => runs.push(FrameRun { first: frame, frames: 1, is_file: entry.file }),
            }
        }
        self.count_runs(&runs, found)
    }

    fn count_runs(&self, runs: &[FrameRun], found: &mut RegionPages) -> Reading<()> {
        // Of a whole huge page the two ends suffice, unless they are not of one.
        let is_whole = |run: &FrameRun| run.frames == self.huge_page_frames && run.frames > 2;
        let ends = |run: &FrameRun| [run.first, Pfn(run.first.0 + run.frames - 1)];
        let mut flags = FlagTable::default();
        flags.read(self.host, runs.iter().filter(|run| is_whole(run)).flat_map(ends))?;
        let is_huge = |run: &FrameRun, flags: &FlagTable| {
            is_whole(run)
                && ends(run).iter().all(|frame| flags.get(*frame).is_thp() || flags.get(*frame).is_hugetlb())
                && !flags.get(run.first).is_zero_page()
        };
        let each_frame = |run: &FrameRun| (run.first.0..run.first.0 + run.frames).map(Pfn);
        let mut single = FlagTable::default();
        single.read(self.host, runs.iter().filter(|run| !is_huge(run, &flags)).flat_map(each_frame))?;
        for run in runs {
            if is_huge(run, &flags) {
                self.count_frames(run.first, Pages(run.frames), run.is_file, flags.get(run.first), found);
            } else {
                for frame in each_frame(run) {
                    self.count_frames(frame, Pages(1), run.is_file, single.get(frame), found);
                }
            }
        }
        Ok(())
    }

    /// Count pages that begin at a frame and have the same flags and node.
    fn count_frames(&self, first: Pfn, pages: Pages, is_file: bool, flags: FrameFlags, found: &mut RegionPages) {
        let kind: fn(&mut PageKinds) -> &mut Pages = match PageState::of_frame(first, flags) {
            PageState::ZeroPage { .. } => {
                found.pages.zero += pages;
                return;
            }
            PageState::Ksm(frame) => {
                found.merged_frames.push(frame);
                |kinds| &mut kinds.merged
            }
            _ if flags.is_hugetlb() => |kinds| &mut kinds.hugetlb,
            _ if flags.is_thp() => |kinds| &mut kinds.huge,
            _ if is_file => |kinds| &mut kinds.file,
            _ => |kinds| &mut kinds.small,
        };
        *kind(found.pages.by_node.entry(self.nodes.node_of_frame(first)).or_default()) += pages;
    }
}

/// The flags of frames, by frame.
#[derive(Debug, Default)]
struct FlagTable {
    frames: Vec<Pfn>,
    flags: Vec<FrameFlags>,
}

impl FlagTable {
    fn read(&mut self, host: &dyn Host, frames: impl Iterator<Item = Pfn>) -> Reading<()> {
        self.frames = frames.collect();
        self.frames.sort_unstable();
        self.frames.dedup();
        self.flags = if self.frames.is_empty() { Vec::new() } else { host.frame_flags(&self.frames)? };
        Ok(())
    }

    fn get(&self, frame: Pfn) -> FrameFlags {
        self.frames
            .binary_search(&frame)
            .ok()
            .and_then(|position| self.flags.get(position).copied())
            .unwrap_or_default()
    }
}
