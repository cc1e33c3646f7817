//! Reading pages of a live process without a trace.
//!
//! Three things must not happen to the process that is read: a page must not be faulted in, a page that KSM or fork
//! shares must not be copied, and another process that got the same number must not be read in its place.
//!
//! - Every batch is checked against pagemap right before it is read: only pages that are present are touched, so
//!   nothing is swapped in or filled. What leaves memory within those microseconds is faulted in by the read; the
//!   window is one batch.
//! - `process_vm_readv` pins the pages it reads, and pinning unshares: it gives the process a private copy of each KSM
//!   page and of each page shared by fork (mm/gup.c, `gup_must_unshare`; measured: PSS rises, `cow_ksm` rises). It is
//!   used only for pages that pagemap says nobody else maps, in regions KSM has not been told of. All others are read
//!   through `/proc/PID/mem`, which takes a reference and leaves the sharing alone.
//! - `process_vm_readv` takes a number. pagemap, opened before, belongs to the address space itself and reads empty
//!   once it is gone: it is read again after each batch, and if it is empty the batch is thrown away.

use crate::process::LiveProcess;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid as NixPid;
use pagefold_base::{Absent, Pfn, Reading};
use pagefold_host::{Host, PageContent, PageRun, PageView, PagemapEntry, ProcessHandle, ReadMethod};
use std::io::IoSliceMut;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// Bytes read at once: fits the second-level cache, so that a page is hashed where it was copied to. Smaller batches
/// pay more for system calls, larger ones fall out of the cache (measured: 256 KiB to 512 KiB is the plateau).
pub const BATCH_BYTES: usize = 256 << 10;

/// Pieces of memory that one `process_vm_readv` takes at most (`UIO_MAXIOV`).
const MAX_IOVECS: usize = 1024;

/// A page of a batch.
#[derive(Clone, Copy)]
struct BatchPage {
    address: u64,
    mapping: PagemapEntry,
    read_state: ReadState,
}

/// How a page of a batch is read, and then whether it was.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ReadState {
    ByProcessVmReadv,
    ByProcMem,
    Read,
    NotResident,
}

/// See [`ProcessHandle::read_pages`].
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
        let mut rest = *run;
        while rest.pages > 0 {
            let pages = rest.pages.min(batch.remaining_pages());
            batch.runs.push(PageRun { pages, ..rest });
            rest.address += u64::from(pages) * page_len as u64;
            rest.pages -= pages;
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
    /// Where its pages are.
    runs: Vec<PageRun>,
    pages: Vec<BatchPage>,
    mappings: Vec<PagemapEntry>,
    /// Room for the pages, `offset` bytes into which a page boundary lies, so that lines are not split when hashed.
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

    /// How many pages it still takes.
    fn remaining_pages(&self) -> u32 {
        let taken: u32 = self.runs.iter().map(|part| part.pages).sum();
        (BATCH_BYTES / self.page_len).max(1) as u32 - taken
    }

    /// The pages of all parts as pagemap shows them now, and none of them being moved, if that can be had.
    fn refresh_mappings(&mut self) -> Reading<()> {
        let process = self.process;
        process.retry_while_migrating(|| {
            self.pages.clear();
            let mut moving = false;
            for part in &self.runs {
                self.mappings.clear();
                moving |= process.read_pagemap_entries(part.address, part.pages as usize, &mut self.mappings)?;
                for (i, &mapping) in self.mappings.iter().enumerate() {
                    let outcome = match self.method {
                        _ if !mapping.present || mapping.file => ReadState::NotResident,
                        ReadMethod::ProcessVmReadv if mapping.exclusive => ReadState::ByProcessVmReadv,
                        ReadMethod::ProcessVmReadv | ReadMethod::ProcMem { .. } => ReadState::ByProcMem,
                    };
                    self.pages.push(BatchPage {
                        address: part.address + (i * self.page_len) as u64,
                        mapping,
                        read_state: outcome,
                    });
                }
            }
            Ok(((), moving))
        })
    }

    /// Read what was taken up and hand it out. Returns how many pages that were.
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

    /// Stretches of pages with one outcome that lie behind one another in memory.
    fn contiguous_pages(&self, read_state: ReadState) -> Vec<Range<usize>> {
        let mut stretches: Vec<Range<usize>> = Vec::new();
        for (i, page) in self.pages.iter().enumerate() {
            if page.read_state != read_state {
                continue;
            }
            match stretches.last_mut() {
                Some(last) if last.end == i && self.pages[i - 1].address + self.page_len as u64 == page.address => {
                    last.end += 1;
                }
                _ => stretches.push(i..i + 1),
            }
        }
        stretches
    }

    /// Read by `process_vm_readv` what may be read so. Pages it did not get are left for `/proc/PID/mem`.
    fn read_remote(&mut self) -> Reading<()> {
        if self.process.main_thread_ended() {
            // Its number leads to no memory, and those of its threads may be given to others.
            let remote = self.pages.iter_mut().filter(|page| page.read_state == ReadState::ByProcessVmReadv);
            remote.for_each(|page| page.read_state = ReadState::ByProcMem);
            return Ok(());
        }
        let pid = NixPid::from_raw(self.process.id().pid.0 as i32);
        for stretches in self.contiguous_pages(ReadState::ByProcessVmReadv).chunks(MAX_IOVECS) {
            let remote: Vec<RemoteIoVec> = stretches
                .iter()
                .map(|part| RemoteIoVec {
                    base: self.pages[part.start].address as usize,
                    len: part.len() * self.page_len,
                })
                .collect();
            // Slots of other pages lie between the stretches, so each has a local piece of its own.
            let mut local = Vec::with_capacity(stretches.len());
            let mut rest = &mut self.buffer[self.aligned_offset..];
            let mut at = 0;
            for part in stretches {
                let (_, after) = rest.split_at_mut((part.start - at) * self.page_len);
                let (piece, after) = after.split_at_mut(part.len() * self.page_len);
                local.push(IoSliceMut::new(piece));
                rest = after;
                at = part.end;
            }
            let bytes = match process_vm_readv(pid, &mut local, &remote) {
                Ok(bytes) => bytes,
                Err(nix::errno::Errno::EFAULT) => 0,
                Err(errno) => return Err(crate::absence_reason(&errno.into())),
            };
            let mut whole = bytes / self.page_len;
            for i in stretches.iter().cloned().flatten() {
                let read = whole > 0;
                whole = whole.saturating_sub(1);
                self.pages[i].read_state = if read { ReadState::Read } else { ReadState::ByProcMem };
            }
        }
        let address = self.pages[0].address;
        self.mappings.clear();
        self.process.read_pagemap_entries(address, 1, &mut self.mappings).map(drop)
    }

    /// Read the rest through `/proc/PID/mem`. Pages it does not get are gone.
    fn read_memory(&mut self) -> Reading<()> {
        let memory = self.process.memory()?;
        for stretch in self.contiguous_pages(ReadState::ByProcMem) {
            let mut i = stretch.start;
            while i < stretch.end {
                let slots = self.buffer_range(i).start..self.buffer_range(stretch.end - 1).end;
                let read = match memory.read_at(&mut self.buffer[slots], self.pages[i].address) {
                    // The address space is gone; so is all that was read of it.
                    Ok(0) => return Err(Absent::Vanished),
                    Ok(bytes) => bytes / self.page_len,
                    Err(_) => 0,
                };
                for page in &mut self.pages[i..i + read] {
                    page.read_state = ReadState::Read;
                }
                i += read;
                if i < stretch.end {
                    self.pages[i].read_state = ReadState::NotResident;
                    i += 1;
                }
            }
        }
        Ok(())
    }

    /// Which pages are KSM pages: by their frames' flags, or, where those may not be read, by being mapped elsewhere
    /// too, which in a region that holds KSM pages they seldom are for another reason.
    fn merged_flags(&self) -> Vec<bool> {
        if self.method != (ReadMethod::ProcMem { detect_merged: true }) {
            return vec![false; self.pages.len()];
        }
        let mut frames: Vec<Pfn> = self.pages.iter().filter_map(|page| page.mapping.frame).collect();
        frames.sort_unstable();
        frames.dedup();
        let flags = if frames.is_empty() { Err(Absent::Denied) } else { self.process.host.frame_flags(&frames) };
        self.pages
            .iter()
            .map(|page| match (&flags, page.mapping.frame) {
                (Ok(flags), Some(frame)) => frames.binary_search(&frame).is_ok_and(|position| flags[position].is_ksm()),
                _ => page.mapping.present && !page.mapping.exclusive,
            })
            .collect()
    }
}
