//! Reads pages of a live process without side effects on it.
//!
//! The reader must not fault in a page, must not copy a page that KSM or fork shares, and must not read another process
//! with the same PID.
//!
//! - Each batch is checked in pagemap right before it is read. Only present pages are read, so nothing is swapped in or
//!   filled. A page that leaves memory within these microseconds is faulted in by the read; the window is one batch.
//! - `process_vm_readv` pins the pages it reads, and pinning unshares them. The process gets a private copy of each KSM
//!   page and of each page shared by fork (mm/gup.c, `gup_must_unshare`; measured: PSS rises, `cow_ksm` rises). So it
//!   is used only for pages that no other process maps according to pagemap, in regions that are not enrolled. All
//!   other pages are read through `/proc/PID/mem`, which takes a reference and keeps the sharing.
//! - `process_vm_readv` takes a PID. pagemap, opened before, refers to the address space itself and reads empty after
//!   it is gone. It is read again after each batch; if it is empty, the batch is discarded.

use crate::process::LiveProcess;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid as NixPid;
use pagefold_base::{Absent, Reading};
use pagefold_host::page_state::{PageState, PageStates};
use pagefold_host::{Host, PageContent, PageRun, PageView, PagemapEntry, ProcessHandle, ReadMethod};
use std::io::IoSliceMut;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// Bytes in one batch. It fits the second-level cache, so that a page is hashed where it was copied to. Smaller batches
/// cost more system calls, larger ones exceed the cache (measured: plateau from 256 KiB to 512 KiB).
pub const BATCH_BYTES: usize = 256 << 10;

/// The maximum number of iovecs of one `process_vm_readv` (`UIO_MAXIOV`).
const MAX_IOVECS: usize = 1024;

/// A page of a batch.
#[derive(Clone, Copy)]
struct BatchPage {
    address: u64,
    mapping: PagemapEntry,
    read_state: ReadState,
}

/// How a page of a batch will be read, and then the result.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ReadState {
    ByProcessVmReadv,
    ByProcMem,
    Read,
    NotResident,
}

/// See [`ProcessHandle::contents`].
pub fn read_pages(
    process: &LiveProcess<'_>,
    method: ReadMethod,
    runs: &[PageRun],
    sink: &mut dyn FnMut(usize, PageView<'_>),
) -> Reading<()> {
    let page_len = process.host.page_size().as_len();
    let mut batch = ReadBatch::new(process, method, page_len);
    let mut position = 0;
    for run in runs {
        let mut remaining = *run;
        while remaining.pages > 0 {
            let pages = remaining.pages.min(batch.remaining_pages());
            batch.runs.push(PageRun { pages, ..remaining });
            remaining.address += u64::from(pages) * page_len as u64;
            remaining.pages -= pages;
            if batch.remaining_pages() == 0 {
                position += batch.read_and_report(position, sink)?;
            }
        }
    }
    batch.read_and_report(position, sink)?;
    Ok(())
}

struct ReadBatch<'a> {
    process: &'a LiveProcess<'a>,
    method: ReadMethod,
    page_len: usize,
    /// The runs of pages to read.
    runs: Vec<PageRun>,
    pages: Vec<BatchPage>,
    mappings: Vec<PagemapEntry>,
    /// Space for the pages. A page boundary lies `aligned_offset` bytes into it, so that hashing does not cross cache
    /// lines.
    buffer: Vec<u8>,
    aligned_offset: usize,
}

impl<'a> ReadBatch<'a> {
    fn new(process: &'a LiveProcess<'a>, method: ReadMethod, page_len: usize) -> Self {
        let buffer = vec![0; BATCH_BYTES.max(page_len) + page_len];
        let offset = buffer.as_ptr().align_offset(page_len).min(page_len);
        Self {
            process,
            method,
            page_len,
            runs: Vec::new(),
            pages: Vec::new(),
            mappings: Vec::new(),
            buffer,
            aligned_offset: offset,
        }
    }

    /// How many more pages fit in the batch.
    fn remaining_pages(&self) -> u32 {
        let collected: u32 = self.runs.iter().map(|run| run.pages).sum();
        (BATCH_BYTES / self.page_len).max(1) as u32 - collected
    }

    /// Read the mappings of all parts from pagemap now, if possible at a time when no page is migrating.
    fn refresh_mappings(&mut self) -> Reading<()> {
        let process = self.process;
        process.retry_while_migrating(|| {
            self.pages.clear();
            let mut is_migrating = false;
            for run in &self.runs {
                self.mappings.clear();
                is_migrating |= process.read_pagemap_entries(run.address, run.pages as usize, &mut self.mappings)?;
                for (i, &mapping) in self.mappings.iter().enumerate() {
                    let read_state = match self.method {
                        _ if !mapping.present || mapping.file => ReadState::NotResident,
                        ReadMethod::ProcessVmReadv if mapping.exclusive => ReadState::ByProcessVmReadv,
                        ReadMethod::ProcessVmReadv | ReadMethod::ProcMem { .. } => ReadState::ByProcMem,
                    };
                    self.pages.push(BatchPage {
                        address: run.address + (i * self.page_len) as u64,
                        mapping,
                        read_state,
                    });
                }
            }
            Ok(((), is_migrating))
        })
    }

    /// Read the collected pages and pass them on. Returns the number of pages.
    fn read_and_report(&mut self, position: usize, sink: &mut dyn FnMut(usize, PageView<'_>)) -> Reading<usize> {
        if self.runs.is_empty() {
            return Ok(0);
        }
        self.refresh_mappings()?;
        if self.pages.iter().any(|page| page.read_state == ReadState::ByProcessVmReadv) {
            self.read_remote()?;
        }
        if self.pages.iter().any(|page| page.read_state == ReadState::ByProcMem) {
            self.read_memory()?;
        }
        let merged = self.merged_flags();
        for (i, page) in self.pages.iter().enumerate() {
            let content = match page.read_state {
                ReadState::Read => PageContent::Bytes(&self.buffer[self.buffer_range(i)]),
                _ => PageContent::NotResident,
            };
            let PagemapEntry { exclusive, frame, .. } = page.mapping;
            sink(position + i, PageView { content, merged: merged[i], exclusive, frame });
        }
        self.runs.clear();
        Ok(self.pages.len())
    }

    fn buffer_range(&self, i: usize) -> Range<usize> {
        let start = self.aligned_offset + i * self.page_len;
        start..start + self.page_len
    }

    /// Ranges of adjacent pages with the same state.
    fn contiguous_pages(&self, read_state: ReadState) -> Vec<Range<usize>> {
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for (i, page) in self.pages.iter().enumerate() {
            if page.read_state != read_state {
                continue;
            }
            match ranges.last_mut() {
                Some(last) if last.end == i && self.pages[i - 1].address + self.page_len as u64 == page.address => {
                    last.end += 1;
                }
                _ => ranges.push(i..i + 1),
            }
        }
        ranges
    }

    /// Read the pages that allow it with `process_vm_readv`. The others are left to `/proc/PID/mem`.
    fn read_remote(&mut self) -> Reading<()> {
        if self.process.main_thread_ended() {
            // After the main thread's exit its PID leads to no memory, and the TIDs of its threads may be reused.
            let pages = self.pages.iter_mut().filter(|page| page.read_state == ReadState::ByProcessVmReadv);
            pages.for_each(|page| page.read_state = ReadState::ByProcMem);
            return Ok(());
        }
        let pid = NixPid::from_raw(self.process.id().pid.0 as i32);
        for ranges in self.contiguous_pages(ReadState::ByProcessVmReadv).chunks(MAX_IOVECS) {
            let remote: Vec<RemoteIoVec> = ranges
                .iter()
                .map(|range| RemoteIoVec {
                    base: self.pages[range.start].address as usize,
                    len: range.len() * self.page_len,
                })
                .collect();
            // Slots of other pages lie between the ranges, so each range has its own local iovec.
            let mut local = Vec::with_capacity(ranges.len());
            let mut remaining = &mut self.buffer[self.aligned_offset..];
            let mut next = 0;
            for range in ranges {
                let (_, after) = remaining.split_at_mut((range.start - next) * self.page_len);
                let (slots, after) = after.split_at_mut(range.len() * self.page_len);
                local.push(IoSliceMut::new(slots));
                remaining = after;
                next = range.end;
            }
            let bytes = match process_vm_readv(pid, &mut local, &remote) {
                Ok(bytes) => bytes,
                Err(nix::errno::Errno::EFAULT) => 0,
                Err(errno) => return Err(crate::absence_reason(&errno.into())),
            };
            let mut pages_read = bytes / self.page_len;
            for i in ranges.iter().cloned().flatten() {
                let read = pages_read > 0;
                pages_read = pages_read.saturating_sub(1);
                self.pages[i].read_state = if read { ReadState::Read } else { ReadState::ByProcMem };
            }
        }
        let address = self.pages[0].address;
        self.mappings.clear();
        self.process.read_pagemap_entries(address, 1, &mut self.mappings).map(drop)
    }

    /// Read the remaining pages through `/proc/PID/mem`. Pages that cannot be read are no longer resident.
    fn read_memory(&mut self) -> Reading<()> {
        let memory = self.process.memory()?;
        for range in self.contiguous_pages(ReadState::ByProcMem) {
            let mut i = range.start;
            while i < range.end {
                let slots = self.buffer_range(i).start..self.buffer_range(range.end - 1).end;
                let read = match memory.read_at(&mut self.buffer[slots], self.pages[i].address) {
                    // The address space is gone, so all data read from it is discarded.
                    Ok(0) => return Err(Absent::Vanished),
                    Ok(bytes) => bytes / self.page_len,
                    Err(_) => 0,
                };
                for page in &mut self.pages[i..i + read] {
                    page.read_state = ReadState::Read;
                }
                i += read;
                if i < range.end {
                    self.pages[i].read_state = ReadState::NotResident;
                    i += 1;
                }
            }
        }
        Ok(())
    }

    /// Which pages are KSM pages, by the flags of their frames. If flags cannot be read: the pages with several
    /// mappings. In a region with KSM pages there is rarely another reason for several mappings.
    fn merged_flags(&self) -> Vec<bool> {
        if self.method != (ReadMethod::ProcMem { detect_merged: true }) {
            return vec![false; self.pages.len()];
        }
        let mut merged: Vec<bool> =
            self.pages.iter().map(|page| page.mapping.present && !page.mapping.exclusive).collect();
        let mut states = PageStates::default();
        for (i, page) in self.pages.iter().enumerate() {
            if let Some(frame) = page.mapping.frame {
                states.push(frame, i);
            }
        }
        // If no flags can be read, no page is visited.
        let _ = states.resolve(self.process.host, |i, state| merged[i] = matches!(state, PageState::Ksm(_)));
        merged
    }
}
