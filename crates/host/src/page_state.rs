//! What a page of a process is mapped to: nothing, a KSM page, the kernel's zero page, or another page.
//!
//! `/proc/PID/pagemap` shows whether a page is present and its frame (fs/proc/task_mmu.c, `pte_to_pagemap_entry`).
//! `/proc/kpageflags` shows whether the frame is a KSM page or the zero page (fs/proc/page.c, `stable_page_flags`).
//! KSM pages and the zero page are never pages of a file.
//!
//! Flags of many frames are read together, sorted, as each read of adjacent frames is one system call: [`PageStates`]
//! collects pages, and [`walk_page_states`] visits a range.

use crate::{FrameFlags, Host, PagemapEntry, ProcessHandle};
use pagefold_base::{AddressRange, Pages, Pfn, Reading};

/// Page table entries that are read together.
const PAGEMAP_ENTRIES_PER_READ: u64 = 1 << 16;

/// What a page is mapped to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageState {
    /// It is not in memory.
    Absent,
    /// It is swapped out.
    Swapped,
    /// A page of a file or of shared memory.
    File,
    /// A private page that is neither of KSM nor the zero page.
    Anonymous,
    /// A KSM page with this frame.
    Ksm(Pfn),
    /// The kernel's zero page.
    ZeroPage {
        /// Whether it is the huge one.
        huge: bool,
    },
    /// It is private and in memory, but the kernel hides its frame without CAP_SYS_ADMIN.
    Hidden,
}

impl PageState {
    /// The state of an anonymous page by its frame.
    pub fn of_frame(frame: Pfn, flags: FrameFlags) -> Self {
        if flags.is_ksm() {
            Self::Ksm(frame)
        } else if flags.is_zero_page() {
            Self::ZeroPage { huge: flags.is_thp() }
        } else {
            Self::Anonymous
        }
    }

    /// Whether the page is merged: a KSM page or the zero page.
    pub fn is_merged(self) -> bool {
        matches!(self, Self::Ksm(_) | Self::ZeroPage { .. })
    }
}

/// Which frames are looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameLookup {
    /// Frames that other pages are mapped to as well. A KSM page with a single mapping saves nothing and counts as
    /// anonymous.
    Shared,
    /// All frames of private pages.
    All,
}

/// What a page table entry alone shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryState {
    /// The state of the page.
    Known(PageState),
    /// The flags of this frame show the state.
    InFrame(Pfn),
}

impl EntryState {
    /// The state that an entry shows.
    pub fn from_entry(entry: &PagemapEntry, lookup: FrameLookup) -> Self {
        Self::Known(match *entry {
            PagemapEntry { swapped: true, .. } => PageState::Swapped,
            PagemapEntry { present: false, .. } => PageState::Absent,
            PagemapEntry { file: true, .. } => PageState::File,
            PagemapEntry { exclusive: true, .. } if lookup == FrameLookup::Shared => PageState::Anonymous,
            PagemapEntry { frame: Some(frame), .. } => return Self::InFrame(frame),
            PagemapEntry { frame: None, .. } => PageState::Hidden,
        })
    }

    /// The frame to look up.
    pub fn frame(self) -> Option<Pfn> {
        match self {
            Self::InFrame(frame) => Some(frame),
            Self::Known(_) => None,
        }
    }
}

/// Pages whose frames are still to be looked up, each with a key of the caller.
#[derive(Debug)]
pub struct PageStates<K> {
    pending: Vec<(Pfn, K)>,
}

impl<K> Default for PageStates<K> {
    fn default() -> Self {
        Self { pending: Vec::new() }
    }
}

impl<K: Ord + Copy> PageStates<K> {
    /// Add a page by its frame.
    pub fn push(&mut self, frame: Pfn, key: K) {
        self.pending.push((frame, key));
    }

    /// The number of pages to look up.
    pub fn len(&self) -> usize {
        self.pending.len()
    }

    /// Whether there are no pages to look up.
    pub fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Look up the frames and visit all pages, in the order of their frames. Leaves no pages, also on an error.
    pub fn resolve(&mut self, host: &dyn Host, mut visit: impl FnMut(K, PageState)) -> Reading<()> {
        self.pending.sort_unstable();
        let mut frames: Vec<Pfn> = self.pending.iter().map(|&(frame, _)| frame).collect();
        frames.dedup();
        let flags = if frames.is_empty() { Ok(Vec::new()) } else { host.frame_flags(&frames) };
        let mut pending = self.pending.drain(..).peekable();
        for (&frame, flags) in frames.iter().zip(flags?) {
            while let Some((_, key)) = pending.next_if(|&(pending_frame, _)| pending_frame == frame) {
                visit(key, PageState::of_frame(frame, flags));
            }
        }
        Ok(())
    }
}

/// Visit each page of a range with its address and state, in no particular order.
pub fn walk_page_states(
    host: &dyn Host,
    handle: &dyn ProcessHandle,
    range: AddressRange,
    lookup: FrameLookup,
    mut visit: impl FnMut(u64, PageState),
) -> Reading<()> {
    let page_size = host.page_size();
    let batch_bytes = page_size.bytes_of(Pages(PAGEMAP_ENTRIES_PER_READ)).0;
    let mut states = PageStates::default();
    let mut start = range.start;
    while start < range.end {
        let end = range.end.min(start.saturating_add(batch_bytes));
        let addresses = (start..end).step_by(page_size.bytes() as usize);
        for (address, entry) in addresses.zip(handle.mappings(AddressRange { start, end })?) {
            match EntryState::from_entry(&entry, lookup) {
                EntryState::Known(state) => visit(address, state),
                EntryState::InFrame(frame) => states.push(frame, address),
            }
        }
        states.resolve(host, &mut visit)?;
        start = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_shows_state_or_frame() {
        let page = PagemapEntry { present: true, frame: Some(Pfn(7)), ..PagemapEntry::default() };
        let check = |entry: PagemapEntry, [shared, all]: [EntryState; 2]| {
            assert_eq!(EntryState::from_entry(&entry, FrameLookup::Shared), shared, "{entry:?}");
            assert_eq!(EntryState::from_entry(&entry, FrameLookup::All), all, "{entry:?}");
        };
        let known = |state| [EntryState::Known(state); 2];
        let in_frame = EntryState::InFrame(Pfn(7));
        check(PagemapEntry::default(), known(PageState::Absent));
        check(PagemapEntry { swapped: true, ..PagemapEntry::default() }, known(PageState::Swapped));
        check(PagemapEntry { file: true, ..page }, known(PageState::File));
        check(page, [in_frame; 2]);
        check(PagemapEntry { exclusive: true, ..page }, [EntryState::Known(PageState::Anonymous), in_frame]);
        check(PagemapEntry { frame: None, ..page }, known(PageState::Hidden));
    }

    #[test]
    fn flags_show_ksm_pages_and_zero_pages() {
        let state = |bits: &[u32]| PageState::of_frame(Pfn(7), FrameFlags(bits.iter().map(|bit| 1 << bit).sum()));
        assert_eq!(state(&[12]), PageState::Anonymous);
        assert_eq!(state(&[12, 21]), PageState::Ksm(Pfn(7)));
        assert_eq!(state(&[24]), PageState::ZeroPage { huge: false });
        assert_eq!(state(&[22, 24]), PageState::ZeroPage { huge: true });
        assert!(state(&[21]).is_merged() && state(&[24]).is_merged() && !state(&[12, 22]).is_merged());
    }
}
