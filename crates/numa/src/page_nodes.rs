//! Counts the pages of a process on each NUMA node.
//!
//! Frames come from `/proc/PID/pagemap`, kinds from `/proc/kpageflags`, and the node of a frame from the memory blocks
//! of each node ([`NumaNodes`]). This needs CAP_SYS_ADMIN, and works on recordings.
//!
//! Swapped-out memory is that of smaps, because page tables do not show swapped-out shared memory. Zero pages are counted
//! where page tables are read: not in regions without resident memory.

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
    /// Private base pages of transparent huge pages, also of those smaller than a PMD.
    pub huge: Pages,
    /// Base pages of hugetlb pages.
    pub hugetlb: Pages,
    /// KSM pages.
    pub merged: Pages,
    /// Base pages of shared memory, such as a memfd, whether in huge pages or not.
    pub shared: Pages,
    /// Base pages of files, such as those of programs and libraries.
    pub file: Pages,
}

impl PageKinds {
    /// The pages of all kinds.
    pub fn total(self) -> Pages {
        self.small + self.huge + self.hugetlb + self.merged + self.shared + self.file
    }

    /// The pages of both, without those of `other`.
    pub fn saturating_sub(self, other: Self) -> Self {
        self.combine(other, Pages::saturating_sub)
    }

    /// A share of each kind.
    pub fn scaled(self, share: f64) -> Self {
        self.combine(Self::default(), |pages, _| Pages((pages.0 as f64 * share).round() as u64))
    }

    fn combine(self, other: Self, pages: impl Fn(Pages, Pages) -> Pages) -> Self {
        Self {
            small: pages(self.small, other.small),
            huge: pages(self.huge, other.huge),
            hugetlb: pages(self.hugetlb, other.hugetlb),
            merged: pages(self.merged, other.merged),
            shared: pages(self.shared, other.shared),
            file: pages(self.file, other.file),
        }
    }

    /// The pages that are moved to other nodes. Pages of files and pages that KSM merged may belong to several processes.
    pub fn movable(self) -> Pages {
        self.total().saturating_sub(self.kept())
    }

    /// The pages that stay where they are.
    pub fn kept(self) -> Pages {
        self.merged + self.file
    }
}

impl AddAssign for PageKinds {
    fn add_assign(&mut self, other: Self) {
        *self = self.combine(other, |left, right| left + right);
    }
}

/// The pages of some memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageNodes {
    /// Pages in memory, by node.
    pub by_node: BTreeMap<u32, PageKinds>,
    /// Pages that are swapped out.
    pub swapped: Pages,
    /// Pages of the kernel's zero page in the page tables that were read. Its node says nothing of the process.
    pub zero: Pages,
}

impl PageNodes {
    /// The pages in memory, without the kernel's zero page.
    pub fn resident(&self) -> Pages {
        self.by_node.values().map(|kinds| kinds.total()).sum()
    }

    /// Base pages in transparent huge pages.
    pub fn huge(&self) -> Pages {
        self.by_node.values().map(|kinds| kinds.huge).sum()
    }

    /// The share of movable pages in transparent huge pages.
    pub fn huge_share(&self) -> f64 {
        let movable: Pages = self.by_node.values().map(|kinds| kinds.movable()).sum();
        self.huge().0 as f64 / (movable.0 as f64).max(1.0)
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
    /// The size of a transparent huge page.
    huge_bytes: u64,
}

/// The pages of a range, and the frames of its KSM pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegionPages {
    /// The pages by node.
    pub pages: PageNodes,
    /// The frame of each KSM page.
    pub merged_frames: Vec<Pfn>,
}

impl<'h> PageNodeReader<'h> {
    /// A reader for a host with these nodes.
    pub fn new(host: &'h dyn Host, nodes: &'h NumaNodes) -> Self {
        let huge_bytes = observe::huge_page_bytes(host).unwrap_or(host.page_size().bytes());
        Self { host, nodes, huge_bytes }
    }

    /// Count the pages of a region of a process.
    ///
    /// # Errors
    /// `Denied` if the kernel hides the frames, `Vanished` if the process has ended.
    pub fn read_region(&self, handle: &dyn ProcessHandle, region: &Region) -> Reading<RegionPages> {
        let mut found = RegionPages::default();
        found.pages.swapped = self.host.page_size().pages_in(region.swap);
        if region.rss == Bytes::ZERO && region.hugetlb == Bytes::ZERO
            || region.flags.has(VmFlags::PFN_MAP.with(VmFlags::IO))
        {
            return Ok(found);
        }
        if region.anon_huge > Bytes::ZERO && region.rss == region.anonymous && region.hugetlb == Bytes::ZERO {
            for run in handle.resident(&[region.range])? {
                let end = run.address + self.host.page_size().bytes_of(Pages(run.pages.into())).0;
                let range = AddressRange { start: run.address, end };
                if run.huge {
                    self.read_huge_pages(handle, range, &mut found)?;
                } else {
                    self.read_long_range(handle, range, region.is_memory(), &mut found)?;
                }
            }
            return Ok(found);
        }
        for range in self.populated_ranges(handle, region)? {
            self.read_long_range(handle, range, region.is_memory(), &mut found)?;
        }
        Ok(found)
    }

    /// Count pages that huge pages map: all pages of a huge page are on the node of the first one.
    fn read_huge_pages(&self, handle: &dyn ProcessHandle, range: AddressRange, found: &mut RegionPages) -> Reading<()> {
        let page = self.host.page_size();
        let mut start = range.start;
        while start < range.end {
            let end = range.end.min((start + 1).next_multiple_of(self.huge_bytes));
            let entries = handle.mappings(AddressRange { start, end: start + page.bytes() })?;
            // A page that was split or unmapped meanwhile is missing, as if it had been unmapped before.
            if let Some(entry) = entries.first().filter(|entry| entry.present) {
                let frame = entry.frame.ok_or(Absent::Denied)?;
                let node = found.pages.by_node.entry(self.nodes.node_of_frame(frame)).or_default();
                node.huge += page.pages_in(Bytes(end - start));
            }
            start = end;
        }
        Ok(())
    }

    fn read_long_range(
        &self,
        handle: &dyn ProcessHandle,
        range: AddressRange,
        is_memory: bool,
        found: &mut RegionPages,
    ) -> Reading<()> {
        let mut start = range.start;
        while start < range.end {
            let end = range.end.min(start.saturating_add(self.bytes_per_read()));
            self.read_range(handle, AddressRange { start, end }, is_memory, found)?;
            start = end;
        }
        Ok(())
    }

    fn bytes_per_read(&self) -> u64 {
        self.host.page_size().bytes_of(Pages(ENTRIES_PER_READ)).0
    }

    /// The parts of a region to read. Pages of files and hugetlb pages are only found by reading everything.
    fn populated_ranges(&self, handle: &dyn ProcessHandle, region: &Region) -> Reading<Vec<AddressRange>> {
        let is_sparse = region.rss.0.saturating_mul(SPARSE_RATIO) < region.range.bytes().0
            && region.rss == region.anonymous
            && region.hugetlb == Bytes::ZERO
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

    fn read_range(
        &self,
        handle: &dyn ProcessHandle,
        range: AddressRange,
        is_memory: bool,
        found: &mut RegionPages,
    ) -> Reading<()> {
        let entries = handle.mappings(range)?;
        let mut frames: Vec<(Pfn, bool)> = Vec::new();
        for entry in entries.iter().filter(|entry| entry.present) {
            frames.push((entry.frame.ok_or(Absent::Denied)?, entry.file));
        }
        frames.sort_unstable();
        let mut distinct: Vec<Pfn> = frames.iter().map(|&(frame, _)| frame).collect();
        distinct.dedup();
        let flags = if distinct.is_empty() { Vec::new() } else { self.host.frame_flags(&distinct)? };
        let mut frames = frames.into_iter().peekable();
        for (frame, flags) in distinct.into_iter().zip(flags) {
            while let Some((_, is_file)) = frames.next_if(|&(other, _)| other == frame) {
                self.count_page(frame, is_file.then_some(is_memory), flags, found);
            }
        }
        Ok(())
    }

    /// `is_shared_memory` is absent for anonymous pages, and otherwise tells shared memory from files.
    fn count_page(&self, frame: Pfn, is_shared_memory: Option<bool>, flags: FrameFlags, found: &mut RegionPages) {
        let kind: fn(&mut PageKinds) -> &mut Pages = match PageState::of_frame(frame, flags) {
            PageState::ZeroPage { .. } => {
                found.pages.zero += Pages(1);
                return;
            }
            PageState::Ksm(frame) => {
                found.merged_frames.push(frame);
                |kinds| &mut kinds.merged
            }
            _ if flags.is_hugetlb() => |kinds| &mut kinds.hugetlb,
            _ if is_shared_memory == Some(true) => |kinds| &mut kinds.shared,
            _ if is_shared_memory == Some(false) => |kinds| &mut kinds.file,
            _ if flags.is_thp() => |kinds| &mut kinds.huge,
            _ => |kinds| &mut kinds.small,
        };
        *kind(found.pages.by_node.entry(self.nodes.node_of_frame(frame)).or_default()) += Pages(1);
    }
}
