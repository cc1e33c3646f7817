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
use pagefold_host::{Host, Mapping, PageContent, PageView, Process, Run, Way};
use std::io::IoSliceMut;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// Bytes read at once: fits the second-level cache, so that a page is hashed where it was copied to. Smaller batches
/// pay more for system calls, larger ones fall out of the cache (measured: 256 KiB to 512 KiB is the plateau).
pub const BATCH_BYTES: usize = 256 << 10;

/// Pieces of memory that one `process_vm_readv` takes at most (`UIO_MAXIOV`).
const PIECES: usize = 1024;

/// A page of a batch.
#[derive(Clone, Copy)]
struct Page {
    address: u64,
    mapping: Mapping,
    outcome: Outcome,
}

/// How a page of a batch is read, and then whether it was.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Remote,
    Memory,
    Read,
    Gone,
}

/// See [`Process::contents`].
pub fn read(
    process: &LiveProcess<'_>,
    way: Way,
    runs: &[Run],
    sink: &mut dyn FnMut(usize, PageView<'_>),
) -> Reading<()> {
    let page_len = process.host.page_size().as_len();
    let mut batch = Batch::new(process, way, page_len);
    let mut position = 0;
    for run in runs {
        let mut rest = *run;
        while rest.pages > 0 {
            let pages = rest.pages.min(batch.room());
            batch.parts.push(Run { pages, ..rest });
            rest.address += u64::from(pages) * page_len as u64;
            rest.pages -= pages;
            if batch.room() == 0 {
                position += batch.flush(position, sink)?;
            }
        }
    }
    batch.flush(position, sink)?;
    Ok(())
}

struct Batch<'a> {
    process: &'a LiveProcess<'a>,
    way: Way,
    page_len: usize,
    /// Where its pages are.
    parts: Vec<Run>,
    pages: Vec<Page>,
    mappings: Vec<Mapping>,
    /// Room for the pages, `offset` bytes into which a page boundary lies, so that lines are not split when hashed.
    buffer: Vec<u8>,
    offset: usize,
}

impl<'a> Batch<'a> {
    fn new(process: &'a LiveProcess<'a>, way: Way, page_len: usize) -> Self {
        let buffer = vec![0; BATCH_BYTES.max(page_len) + page_len];
        let offset = buffer.as_ptr().align_offset(page_len).min(page_len);
        Self { process, way, page_len, parts: Vec::new(), pages: Vec::new(), mappings: Vec::new(), buffer, offset }
    }

    /// How many pages it still takes.
    fn room(&self) -> u32 {
        let taken: u32 = self.parts.iter().map(|part| part.pages).sum();
        (BATCH_BYTES / self.page_len).max(1) as u32 - taken
    }

    /// The pages of all parts as pagemap shows them now, and none of them being moved, if that can be had.
    fn look(&mut self) -> Reading<()> {
        let process = self.process;
        process.once_moved(|| {
            self.pages.clear();
            let mut moving = false;
            for part in &self.parts {
                self.mappings.clear();
                moving |= process.read_mappings(part.address, part.pages as usize, &mut self.mappings)?;
                for (i, &mapping) in self.mappings.iter().enumerate() {
                    let outcome = match self.way {
                        _ if !mapping.present || mapping.file => Outcome::Gone,
                        Way::Remote if mapping.exclusive => Outcome::Remote,
                        Way::Remote | Way::Memory { .. } => Outcome::Memory,
                    };
                    self.pages.push(Page { address: part.address + (i * self.page_len) as u64, mapping, outcome });
                }
            }
            Ok(((), moving))
        })
    }

    /// Read what was taken up and hand it out. Returns how many pages that were.
    fn flush(&mut self, position: usize, sink: &mut dyn FnMut(usize, PageView<'_>)) -> Reading<usize> {
        if self.parts.is_empty() {
            return Ok(0);
        }
        self.look()?;
        if self.pages.iter().any(|page| page.outcome == Outcome::Remote) {
            self.read_remote()?;
        }
        if self.pages.iter().any(|page| page.outcome == Outcome::Memory) {
            self.read_memory()?;
        }
        let merged = self.merged();
        for (i, page) in self.pages.iter().enumerate() {
            let content = match page.outcome {
                Outcome::Read => PageContent::Bytes(&self.buffer[self.slot(i)]),
                _ => PageContent::Gone,
            };
            let Mapping { exclusive, frame, .. } = page.mapping;
            sink(position + i, PageView { content, merged: merged[i], exclusive, frame });
        }
        self.parts.clear();
        Ok(self.pages.len())
    }

    fn slot(&self, i: usize) -> Range<usize> {
        let start = self.offset + i * self.page_len;
        start..start + self.page_len
    }

    /// Stretches of pages with one outcome that lie behind one another in memory.
    fn stretches(&self, outcome: Outcome) -> Vec<Range<usize>> {
        let mut stretches: Vec<Range<usize>> = Vec::new();
        for (i, page) in self.pages.iter().enumerate() {
            if page.outcome != outcome {
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
        if self.process.main_ended() {
            // Its number leads to no memory, and those of its threads may be given to others.
            let remote = self.pages.iter_mut().filter(|page| page.outcome == Outcome::Remote);
            remote.for_each(|page| page.outcome = Outcome::Memory);
            return Ok(());
        }
        let pid = NixPid::from_raw(self.process.id().pid.0 as i32);
        for stretches in self.stretches(Outcome::Remote).chunks(PIECES) {
            let remote: Vec<RemoteIoVec> = stretches
                .iter()
                .map(|part| RemoteIoVec {
                    base: self.pages[part.start].address as usize,
                    len: part.len() * self.page_len,
                })
                .collect();
            // Slots of other pages lie between the stretches, so each has a local piece of its own.
            let mut local = Vec::with_capacity(stretches.len());
            let mut rest = &mut self.buffer[self.offset..];
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
                Err(errno) => return Err(crate::absent(&errno.into())),
            };
            let mut whole = bytes / self.page_len;
            for i in stretches.iter().cloned().flatten() {
                let read = whole > 0;
                whole = whole.saturating_sub(1);
                self.pages[i].outcome = if read { Outcome::Read } else { Outcome::Memory };
            }
        }
        let address = self.pages[0].address;
        self.mappings.clear();
        self.process.read_mappings(address, 1, &mut self.mappings).map(drop)
    }

    /// Read the rest through `/proc/PID/mem`. Pages it does not get are gone.
    fn read_memory(&mut self) -> Reading<()> {
        let memory = self.process.memory()?;
        for stretch in self.stretches(Outcome::Memory) {
            let mut i = stretch.start;
            while i < stretch.end {
                let slots = self.slot(i).start..self.slot(stretch.end - 1).end;
                let read = match memory.read_at(&mut self.buffer[slots], self.pages[i].address) {
                    // The address space is gone; so is all that was read of it.
                    Ok(0) => return Err(Absent::Vanished),
                    Ok(bytes) => bytes / self.page_len,
                    Err(_) => 0,
                };
                for page in &mut self.pages[i..i + read] {
                    page.outcome = Outcome::Read;
                }
                i += read;
                if i < stretch.end {
                    self.pages[i].outcome = Outcome::Gone;
                    i += 1;
                }
            }
        }
        Ok(())
    }

    /// Which pages are KSM pages: by their frames' flags, or, where those may not be read, by being mapped elsewhere
    /// too, which in a region that holds KSM pages they seldom are for another reason.
    fn merged(&self) -> Vec<bool> {
        if self.way != (Way::Memory { merged: true }) {
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
