//! What to unenroll, and how many frames that takes.

use super::joined;
use pagefold_base::guard;
use pagefold_base::guard::{FrameNeed, MemoryCheck};
use pagefold_base::process::Process;
use pagefold_base::region::{Region, VmFlags};
use pagefold_base::{Absent, AddressRange, Bytes, Pages, Pfn, Reading};
use pagefold_census::results::UnscannedProcess;
use pagefold_census::{ProcessSelection, scan_scope};
use pagefold_host::page_state::{FrameLookup, PageState, walk_page_states};
use pagefold_host::{Host, ProcessHandle as Handle, memory_headroom, observe};
use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;

/// Maximum merged pages of one batch: 32 MiB of 4 KiB pages, some tens of milliseconds of copying.
pub const MAX_PAGES_PER_BATCH: usize = 8192;

/// How a process is unenrolled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnenrollMethod {
    /// Enrolled whole: `PR_SET_MEMORY_MERGE`.
    WholeProcess,
    /// Its regions are marked: `MADV_UNMERGEABLE`. Also a process that may be enrolled whole, where the kernel does not
    /// show it.
    MarkedRegions,
    /// Unenroll only these ranges, as far as they are marked; ascending.
    Ranges(Vec<AddressRange>),
    /// A guest whose control socket is known.
    Guest {
        /// The socket.
        socket: PathBuf,
        /// The marked backends, with their sizes.
        backends: Vec<(String, Bytes)>,
    },
    /// A guest whose control socket is known but unusable, for this reason.
    UnreachableGuest(String),
}

/// Ranges of a process that are unenrolled together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnenrollBatch {
    /// The ranges, ascending.
    pub ranges: Vec<AddressRange>,
    /// Pages on KSM frames.
    pub merged_pages: Pages,
    /// Zero pages that KSM may have placed.
    pub zero_pages: Pages,
    /// Frames that unenrolling this batch frees after all batches before it.
    pub freed_frames: Pages,
}

/// An enrolled process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnenrollTarget {
    /// The process.
    pub process: Process,
    /// How it is unenrolled.
    pub method: UnenrollMethod,
    /// The batches, in the order of unenrolling.
    pub batches: Vec<UnenrollBatch>,
    /// Maximum number of zero pages in them that KSM placed.
    pub max_zero_pages: Pages,
    /// Anonymous memory in huge pages.
    pub anon_huge: Bytes,
    /// Whether frame numbers could be read. Otherwise the page counts are upper bounds, and no frame counts as freed.
    pub frames_readable: Reading<()>,
}

impl UnenrollMethod {
    /// Whether this method reaches a region. The reached regions of a guest are at least as large as a backend; other
    /// regions that QEMU marks, its firmware and video memory, are smaller.
    pub(super) fn covers(&self, region: &Region) -> bool {
        match self {
            Self::Guest { backends, .. } => backends.iter().any(|&(_, size)| region.range.bytes() >= size),
            _ => !self.covered_ranges(region).is_empty(),
        }
    }

    /// The ranges of a region that this method unenrolls.
    pub(super) fn covered_ranges(&self, region: &Region) -> Vec<AddressRange> {
        match self {
            Self::Ranges(ranges) => {
                let first = ranges.partition_point(|range| range.end <= region.range.start);
                ranges[first..].iter().map_while(|range| region.range.overlap(*range)).collect()
            }
            _ => vec![region.range],
        }
    }
}

impl UnenrollTarget {
    /// Pages on KSM frames.
    pub fn merged_pages(&self) -> Pages {
        self.batches.iter().map(|batch| batch.merged_pages).sum()
    }

    /// Pages that get their own frame.
    pub fn copied_pages(&self) -> Pages {
        self.merged_pages() + self.max_zero_pages
    }

    /// Frames that are freed.
    pub fn freed_frames(&self) -> Pages {
        self.batches.iter().map(|batch| batch.freed_frames).sum()
    }

    /// The frames that unenrolling it takes, after all targets before it.
    pub fn frame_need(&self) -> FrameNeed {
        FrameNeed::for_cgroup(self.cgroup(), self.copied_pages(), self.freed_frames())
    }

    pub(super) fn batch_frame_need(&self, batch: &UnenrollBatch) -> FrameNeed {
        FrameNeed::for_cgroup(
            self.cgroup(),
            batch.merged_pages + batch.zero_pages.min(self.max_zero_pages),
            batch.freed_frames,
        )
    }

    /// All marked ranges, ascending.
    pub(super) fn marked_ranges(&self) -> Vec<AddressRange> {
        joined(self.batches.iter().flat_map(|batch| batch.ranges.clone()).collect())
    }

    pub(super) fn cgroup(&self) -> Option<&str> {
        self.process.cgroup.as_deref().ok()
    }
}

/// The processes to unenroll.
#[derive(Clone, Debug, Default)]
pub struct UnenrollPlan {
    /// The enrolled processes, the one that needs the fewest frames first.
    pub targets: Vec<UnenrollTarget>,
    /// Number of selected processes that are not enrolled.
    pub not_enrolled: usize,
    /// Selected processes that were not scanned.
    pub unscanned: Vec<UnscannedProcess>,
}

impl UnenrollTarget {
    /// The frames that its first `count` batches take.
    pub(super) fn frames_for_batches(&self, count: usize) -> Pages {
        if count == self.batches.len() {
            return self.frame_need().host;
        }
        self.batches.iter().take(count).map(|batch| self.batch_frame_need(batch).host).sum()
    }
}

impl UnenrollPlan {
    /// The frames that the whole plan takes.
    pub fn frame_need(&self) -> FrameNeed {
        let mut sum = FrameNeed::default();
        self.targets.iter().for_each(|target| sum += &target.frame_need());
        sum
    }

    /// The cgroups of the processes.
    pub(super) fn cgroups(&self) -> BTreeSet<String> {
        self.targets.iter().filter_map(|target| target.cgroup().map(str::to_owned)).collect()
    }

    /// The available memory, and whether a need fits.
    pub fn check_memory(&self, host: &dyn Host, need: &FrameNeed) -> MemoryCheck {
        guard::check_memory(need, &self.measure_headroom(host), host.page_size())
    }

    /// How many batches fit now, one after the other, and how many there are.
    pub fn count_batches_that_fit(&self, host: &dyn Host) -> (usize, usize) {
        let needs: Vec<FrameNeed> = self
            .targets
            .iter()
            .flat_map(|target| target.batches.iter().map(move |batch| target.batch_frame_need(batch)))
            .collect();
        (guard::count_needs_that_fit(&needs, &self.measure_headroom(host), host.page_size()), needs.len())
    }

    pub(super) fn measure_headroom(&self, host: &dyn Host) -> guard::MemoryHeadroom {
        let mut headroom = memory_headroom::measure_headroom(host, &self.cgroups());
        for UnenrollTarget { process, .. } in &self.targets {
            if let Err(why) = &process.cgroup
                && *why != Absent::NotOnThisKernel
            {
                let scope = guard::LimitScope::Cgroup(format!("of process {}", process.id.pid));
                headroom.unreadable.push((scope, why.clone()));
            }
        }
        headroom
    }
}

/// Find out which ranges of the selected processes are enrolled, and how many frames unenrolling them takes.
/// `method_for` returns the method for guests; where it returns nothing, the kind of enrollment decides.
pub fn make_plan(
    host: &dyn Host,
    selection: &ProcessSelection,
    method_for: &(dyn Fn(&dyn Handle, &Process) -> Option<UnenrollMethod> + Sync),
) -> Result<UnenrollPlan, pagefold_census::Error> {
    let (inspected, unscanned) = scan_scope::inspect_selected(host, selection, |handle, process| {
        let regions: Vec<Region> = observe::regions(handle)?;
        let whole = process.ksm.merge_any == Ok(true);
        let merged: u64 = regions.iter().filter_map(|region| region.ksm.as_ref().ok()).map(|ksm| ksm.0).sum();
        if !whole && merged == 0 && !regions.iter().any(is_mergeable) {
            return Ok(None);
        }
        let method = method_for(handle, &process).unwrap_or(if whole {
            UnenrollMethod::WholeProcess
        } else {
            UnenrollMethod::MarkedRegions
        });
        plan_process(host, handle, process, &regions, method).map(Some)
    })?;
    let not_enrolled = inspected.iter().filter(|target| target.is_none()).count();
    let mut targets: Vec<(UnenrollTarget, Vec<Vec<KsmPageMappings>>)> = inspected.into_iter().flatten().collect();
    targets.sort_by_key(|(target, _)| (target.copied_pages(), target.process.id));
    let mut remaining_mappings: HashMap<Pfn, u64> = HashMap::new();
    for (target, frames) in &mut targets {
        for (batch, frames) in target.batches.iter_mut().zip(frames) {
            batch.freed_frames = remove_mappings(&mut remaining_mappings, frames);
        }
    }
    Ok(UnenrollPlan { targets: targets.into_iter().map(|(target, _)| target).collect(), not_enrolled, unscanned })
}

/// A merged page: its frame, with all mappings of it.
pub(super) type KsmPageMappings = (Pfn, u64);

/// Remove mappings from frames; returns how many frames have no mapping left.
pub(super) fn remove_mappings(remaining: &mut HashMap<Pfn, u64>, pages: &[KsmPageMappings]) -> Pages {
    let mut freed = 0;
    for &(frame, mappings) in pages {
        let mappings_left = remaining.entry(frame).or_insert(mappings);
        *mappings_left = mappings_left.saturating_sub(1);
        freed += u64::from(*mappings_left == 0);
    }
    Pages(freed)
}

pub(super) fn is_mergeable(region: &Region) -> bool {
    region.flags.has(VmFlags::MERGEABLE)
}

/// A process with its batches, and the merged pages of each batch.
fn plan_process(
    host: &dyn Host,
    handle: &dyn Handle,
    process: Process,
    regions: &[Region],
    method: UnenrollMethod,
) -> Reading<(UnenrollTarget, Vec<Vec<KsmPageMappings>>)> {
    // Before 6.6 the kernel has no such counter and unmerging does not copy zero pages.
    let max_zeros = match &process.ksm.zero_pages {
        Ok(count) => Pages(u64::try_from(*count).unwrap_or(0)),
        Err(_) => Pages::ZERO,
    };
    let marked: Vec<&Region> = regions.iter().filter(|region| is_mergeable(region) && method.covers(region)).collect();
    let anon_huge = regions.iter().map(|region| region.anon_huge).sum();
    let max_pages = if matches!(method, UnenrollMethod::Guest { .. }) { usize::MAX } else { MAX_PAGES_PER_BATCH };
    let mut builder = BatchBuilder { max_pages, batches: Vec::new(), frames: Vec::new() };
    let frames_readable = marked.iter().try_for_each(|region| {
        method.covered_ranges(region).into_iter().try_for_each(|range| {
            let range_pages = if may_have_ksm_pages(region, max_zeros) {
                read_ksm_pages(host, handle, range)?
            } else {
                RangePages::default()
            };
            builder.add_range(range, &range_pages);
            Ok(())
        })
    });
    if frames_readable == Err(Absent::Vanished) {
        return Err(Absent::Vanished);
    }
    if frames_readable.is_err() {
        builder = BatchBuilder {
            max_pages,
            batches: vec![estimate_batch(host, &process, &method, &marked, max_zeros)?],
            frames: vec![Vec::new()],
        };
    }
    let max_zeros = max_zeros.min(builder.batches.iter().map(|batch| batch.zero_pages).sum());
    Ok((
        UnenrollTarget {
            process,
            method,
            batches: builder.batches,
            max_zero_pages: max_zeros,
            anon_huge,
            frames_readable,
        },
        builder.frames,
    ))
}

/// A whole process as one batch, by the kernel's sums.
pub(super) fn estimate_batch(
    host: &dyn Host,
    process: &Process,
    method: &UnenrollMethod,
    marked: &[&Region],
    zeros: Pages,
) -> Reading<UnenrollBatch> {
    let smaps_bytes: Reading<Bytes> = marked.iter().map(|region| region.ksm.clone()).sum();
    let merged = match smaps_bytes {
        Ok(bytes) => host.page_size().pages_in(bytes),
        Err(_) => Pages(process.ksm.merging_pages.clone()?),
    };
    let ranges = marked.iter().flat_map(|region| method.covered_ranges(region)).collect();
    Ok(UnenrollBatch { ranges, merged_pages: merged, zero_pages: zeros, freed_frames: Pages::ZERO })
}

fn may_have_ksm_pages(region: &Region, zeros: Pages) -> bool {
    zeros > Pages::ZERO || region.ksm.as_ref().is_ok_and(|ksm| *ksm > Bytes::ZERO) || region.ksm.is_err()
}

/// Collects ranges into batches.
pub(super) struct BatchBuilder {
    pub max_pages: usize,
    pub batches: Vec<UnenrollBatch>,
    pub frames: Vec<Vec<KsmPageMappings>>,
}

impl BatchBuilder {
    pub(super) fn add_range(&mut self, range: AddressRange, range_pages: &RangePages) {
        let addresses: Vec<u64> = range_pages.pages.iter().map(|page| page.0).collect();
        let mut pages = range_pages.pages.iter();
        for (range, count) in guard::split_by_page_count(range, &addresses, self.max_pages) {
            let is_full = self
                .batches
                .last()
                .is_none_or(|batch| batch.merged_pages.0 + batch.zero_pages.0 + count as u64 > self.max_pages as u64);
            if is_full {
                self.batches.push(UnenrollBatch::default());
                self.frames.push(Vec::new());
            }
            let (Some(batch), Some(frames)) = (self.batches.last_mut(), self.frames.last_mut()) else { return };
            batch.ranges.push(range);
            for &(_, mappings) in pages.by_ref().take(count) {
                match mappings {
                    Some(mappings) => {
                        batch.merged_pages += Pages(1);
                        frames.push(mappings);
                    }
                    None => batch.zero_pages += Pages(1),
                }
            }
        }
    }
}

/// The pages of a range by address, each on a KSM frame or on the kernel's zero page.
#[derive(Default)]
pub(super) struct RangePages {
    pub pages: Vec<(u64, Option<KsmPageMappings>)>,
}

/// Pages of a range whose states are in memory at the same time.
const PAGES_PER_READ: u64 = 1 << 16;

/// Read the frames of a range.
pub(super) fn read_ksm_pages(host: &dyn Host, handle: &dyn Handle, range: AddressRange) -> Reading<RangePages> {
    let bytes_per_read = host.page_size().bytes_of(Pages(PAGES_PER_READ)).0;
    let mut range_pages = RangePages::default();
    let mut start = range.start;
    while start < range.end {
        let end = range.end.min(start.saturating_add(bytes_per_read));
        add_ksm_pages(host, handle, AddressRange { start, end }, &mut range_pages)?;
        start = end;
    }
    Ok(range_pages)
}

/// Read the frames of a short range and add them.
fn add_ksm_pages(
    host: &dyn Host,
    handle: &dyn Handle,
    range: AddressRange,
    range_pages: &mut RangePages,
) -> Reading<()> {
    let mut pages: Vec<(u64, PageState)> = Vec::new();
    let mut is_hidden = false;
    walk_page_states(host, handle, range, FrameLookup::All, |address, state| match state {
        PageState::Ksm(_) | PageState::ZeroPage { huge: false } => pages.push((address, state)),
        PageState::Hidden => is_hidden = true,
        _ => {}
    })?;
    if is_hidden {
        return Err(Absent::Denied);
    }
    pages.sort_unstable_by_key(|&(address, _)| address);
    let frame = |&(_, state): &(u64, PageState)| match state {
        PageState::Ksm(frame) => Some(frame),
        _ => None,
    };
    let mut frames: Vec<Pfn> = pages.iter().filter_map(frame).collect();
    frames.sort_unstable();
    frames.dedup();
    let mappings = if frames.is_empty() { Vec::new() } else { host.frame_mappings(&frames)? };
    let with_mappings = |page: &(u64, PageState)| match frame(page) {
        Some(frame) => Some((page.0, Some((frame, *mappings.get(frames.binary_search(&frame).ok()?)?)))),
        None => Some((page.0, None)),
    };
    range_pages.pages.extend(pages.iter().filter_map(with_mappings));
    Ok(())
}
