//! The page tables of a process, the flags of its frames and the bytes of its pages.

use super::contents::PageBytes;
use super::{PAGE_READ_NS, PAGE_WALK_NS, SimulatedHost, process_text};
use crate::decide::frame_numbers::FrameOrigin;
use crate::decide::host_state::{HostState, MappedRun, PAGE_BYTES};
use crate::decide::memory::{Content, PageEntry};
use pagefold_base::{Absent, AddressRange, Pfn, ProcessId, Reading};
use pagefold_host::action::ActionError;
use pagefold_host::{FrameFlags, PageContent, PageRun, PageView, PagemapEntry, ProcessHandle, ReadMethod};

/// Bits of `/proc/kpageflags` (include/uapi/linux/kernel-page-flags.h).
const ANONYMOUS_FLAG: u64 = 1 << 12;
const MERGED_FLAG: u64 = 1 << 21;
const HUGE_FLAG: u64 = 1 << 22;
const ZERO_PAGE_FLAG: u64 = 1 << 24;

/// Pages of a run of resident pages at most, so that they are counted in 32 bits.
const MAX_RUN_PAGES: u64 = 1 << 30;

/// The flags of a frame; `None` if it was never used.
pub(super) fn flags_of_frame(host: &HostState<'_>, frame: Pfn) -> Option<FrameFlags> {
    let memory = host.model.memory();
    Some(FrameFlags(match host.frames.origin(frame)? {
        FrameOrigin::ZeroPage => ZERO_PAGE_FLAG,
        FrameOrigin::Numbered(frame) if memory.frame(frame).is_merged => ANONYMOUS_FLAG | MERGED_FLAG,
        FrameOrigin::Numbered(_) => ANONYMOUS_FLAG,
        FrameOrigin::Page(process, page) => match memory.entry(process, page) {
            PageEntry::HugePart(_) => ANONYMOUS_FLAG | HUGE_FLAG,
            _ => ANONYMOUS_FLAG,
        },
    }))
}

/// A page that is to be shown.
struct ReadPage {
    position: usize,
    content: Option<Content>,
    is_merged: bool,
    is_exclusive: bool,
    frame: Option<Pfn>,
}

/// A process of a simulated host.
pub(super) struct OpenProcess<'h, 's> {
    pub(super) host: &'h SimulatedHost<'s>,
    pub(super) id: ProcessId,
}

impl OpenProcess<'_, '_> {
    /// The runs of a range.
    fn runs(&self, state: &HostState<'_>, range: AddressRange) -> Reading<Vec<MappedRun>> {
        let process = state.processes.get(&self.id.pid).filter(|process| process.start_ticks == self.id.start_time);
        Ok(state.mapped_runs(process.ok_or(Absent::Vanished)?, range))
    }

    /// The entry of a mapped page.
    fn pagemap_entry(&self, state: &HostState<'_>, run: &MappedRun, offset: u64) -> PagemapEntry {
        let entry = run.entry_at(offset);
        let frame = state
            .processes
            .get(&self.id.pid)
            .and_then(|process| state.frame_of(process.model_id, run.page + offset, entry));
        PagemapEntry { present: true, exclusive: state.mappings_of(entry) == 1, frame, ..PagemapEntry::default() }
    }

    fn is_anonymous(run: &MappedRun) -> bool {
        matches!(run.entry, PageEntry::Private(_) | PageEntry::HugePart(_) | PageEntry::Frame(_))
    }

    /// The pages of a run to read. Positions count from `first`.
    fn pages_of(
        &self,
        state: &HostState<'_>,
        run: &PageRun,
        first: usize,
        detects_merged: bool,
    ) -> Reading<Vec<ReadPage>> {
        let range = AddressRange { start: run.address, end: run.address + u64::from(run.pages) * PAGE_BYTES };
        let absent = |position| ReadPage { position, content: None, is_merged: false, is_exclusive: true, frame: None };
        let mut pages: Vec<ReadPage> = (first..).take(run.pages as usize).map(absent).collect();
        for mapped in self.runs(state, range)?.iter().filter(|mapped| Self::is_anonymous(mapped)) {
            let start = (mapped.page - run.address / PAGE_BYTES) as usize;
            for (offset, page) in (0..mapped.pages).zip(&mut pages[start..]) {
                let entry = mapped.entry_at(offset);
                let PagemapEntry { exclusive, frame, .. } = self.pagemap_entry(state, mapped, offset);
                page.content = state.model.memory().content(entry);
                page.is_merged = detects_merged && state.model.memory().merged_frame(entry).is_some();
                (page.is_exclusive, page.frame) = (exclusive, frame);
            }
        }
        Ok(pages)
    }
}

impl ProcessHandle for OpenProcess<'_, '_> {
    fn id(&self) -> ProcessId {
        self.id
    }

    fn read(&self, file: &str) -> Reading<Vec<u8>> {
        let (text, walked_pages) = process_text::read(&self.host.lock(), self.id.pid, file)?;
        self.host.spend_cpu_time(walked_pages * PAGE_WALK_NS);
        Ok(text)
    }

    fn links(&self, _: &str) -> Reading<Vec<String>> {
        Err(Absent::NotOnThisKernel)
    }

    fn resident(&self, ranges: &[AddressRange]) -> Reading<Vec<PageRun>> {
        let state = self.host.lock();
        let mut resident: Vec<PageRun> = Vec::new();
        let mut walked_pages = 0;
        for &range in ranges {
            let first = resident.len();
            for run in self.runs(&state, range)?.iter().filter(|run| Self::is_anonymous(run)) {
                walked_pages += run.pages;
                let (address, huge) = (run.page * PAGE_BYTES, matches!(run.entry, PageEntry::HugePart(_)));
                match resident[first..].last_mut() {
                    Some(last)
                        if last.huge == huge
                            && last.address + u64::from(last.pages) * PAGE_BYTES == address
                            && u64::from(last.pages) + run.pages <= MAX_RUN_PAGES =>
                    {
                        last.pages += run.pages as u32;
                    }
                    _ => resident.push(PageRun { address, pages: run.pages as u32, huge }),
                }
            }
        }
        self.host.spend_cpu_time(walked_pages * PAGE_WALK_NS);
        Ok(resident)
    }

    fn mappings(&self, range: AddressRange) -> Reading<Vec<PagemapEntry>> {
        let state = self.host.lock();
        let first_page = range.start / PAGE_BYTES;
        let mut entries = vec![PagemapEntry::default(); (range.bytes().0 / PAGE_BYTES) as usize];
        for run in self.runs(&state, range)? {
            let start = (run.page - first_page) as usize;
            for (offset, entry) in (0..run.pages).zip(&mut entries[start..]) {
                *entry = self.pagemap_entry(&state, &run, offset);
            }
        }
        self.host.spend_cpu_time(entries.len() as u64 * PAGE_WALK_NS);
        Ok(entries)
    }

    fn page_nodes(&self, range: AddressRange) -> Reading<Vec<Option<u32>>> {
        let entries = self.mappings(range)?;
        let state = self.host.lock();
        let node = |entry: &PagemapEntry| match state.frames.origin(entry.frame?)? {
            FrameOrigin::ZeroPage => None,
            FrameOrigin::Numbered(frame) => Some(state.model.memory().frame(frame).node.into()),
            FrameOrigin::Page(process, page) => Some(state.model.memory().node_of(process, page).into()),
        };
        Ok(entries.iter().map(node).collect())
    }

    fn contents(&self, method: ReadMethod, runs: &[PageRun], sink: &mut dyn FnMut(usize, PageView<'_>)) -> Reading<()> {
        let detects_merged = method == ReadMethod::ProcMem { detect_merged: true };
        let mut bytes = PageBytes::new();
        let mut position = 0;
        for run in runs {
            let pages = self.pages_of(&self.host.lock(), run, position, detects_merged)?;
            position += run.pages as usize;
            self.host.spend_cpu_time(u64::from(run.pages) * PAGE_READ_NS);
            for page in pages {
                let content =
                    page.content.map_or(PageContent::NotResident, |content| PageContent::Bytes(bytes.show(content)));
                let (merged, exclusive, frame) = (page.is_merged, page.is_exclusive, page.frame);
                sink(page.position, PageView { content, merged, exclusive, frame });
            }
        }
        Ok(())
    }

    fn ask_merge_any(&self) -> Result<bool, ActionError> {
        let state = self.host.lock();
        state.processes.get(&self.id.pid).map(|process| process.merges_any).ok_or(ActionError::Vanished)
    }
}
