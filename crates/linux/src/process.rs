//! A live process, accessed through its directory below `/proc`.
//!
//! The open directory always refers to the same process. After that has ended, all files below it return `ESRCH` or
//! `ENOENT`, even if its PID was reused. `pagemap` and `mem` refer to its address space in the same way, and reads
//! return nothing after exit or exec.

use crate::{LiveHost, absence_reason, apply, page_reader, read_whole_file};
use pagefold_base::{Absent, AddressRange, IdSet, Pid, ProcessId, Reading};
use pagefold_host::action::ActionError;
use pagefold_host::guest_agent::{AgentAccess, GuestQuestion};
use pagefold_host::parse::{self, Stat};
use pagefold_host::qemu_monitor::{MonitorAccess, MonitorQuestion};
use pagefold_host::{PageRun, PageView, PagemapEntry, ProcessHandle, ReadMethod};
use pagefold_sys::pagemap::{self, MappedRange};
use rustix::fs::{Dir, Mode, OFlags, openat, readlinkat};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Pagemap entries in one read.
const PAGEMAP_ENTRIES_PER_READ: usize = 1 << 16;
/// Total time to wait for migrating pages while the handle is open, and the first and the longest pause between two
/// checks. The kernel migrates up to 512 pages at once, in one or two milliseconds if it has a CPU. Poisoned pages and
/// device memory look the same and stay; for these the wait times out.
const MAX_MIGRATION_WAIT: Duration = Duration::from_millis(500);
const FIRST_RETRY_DELAY: Duration = Duration::from_micros(50);
const MAX_RETRY_DELAY: Duration = Duration::from_millis(10);
/// How many times threads are listed to find a live one.
const MAX_THREAD_LISTINGS: usize = 8;
/// Files that describe the address space. Those of a main thread that has ended are empty or contain zeros.
const ADDRESS_SPACE_FILES: [&str; 12] = [
    "cmdline",
    "environ",
    "ksm_merging_pages",
    "ksm_stat",
    "maps",
    "mem",
    "numa_maps",
    "pagemap",
    "smaps",
    "smaps_rollup",
    "statm",
    "status",
];

/// An open process.
pub struct LiveProcess<'a> {
    pub(crate) host: &'a LiveHost,
    id: ProcessId,
    directory: OwnedFd,
    /// Whether the main thread had ended when the process was opened. Then the other threads provide its memory.
    main_thread_ended: bool,
    pagemap: OnceLock<Reading<File>>,
    memory: OnceLock<Reading<File>>,
    /// Microseconds spent waiting for migrating pages.
    waited_us: AtomicU64,
}

impl<'a> LiveProcess<'a> {
    /// Open the process that has this PID now.
    pub fn open(host: &'a LiveHost, pid: Pid) -> Reading<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(format!("/proc/{pid}"), flags, Mode::empty())
            .map_err(|errno| not_found_to_vanished(&absence_reason(&errno.into())))?;
        let mut process = Self {
            host,
            id: ProcessId { pid, start_time: 0 },
            directory,
            main_thread_ended: false,
            pagemap: OnceLock::new(),
            memory: OnceLock::new(),
            waited_us: AtomicU64::new(0),
        };
        let stat = parse::stat(&process.read("stat")?)?;
        process.id.start_time = stat.start_time;
        process.main_thread_ended = matches!(stat.state, 'Z' | 'X');
        Ok(process)
    }

    fn open_file(&self, file: &str) -> Reading<File> {
        let open = |path: &str| openat(&self.directory, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        if self.main_thread_ended && ADDRESS_SPACE_FILES.contains(&file) {
            let opened = self.find_live_thread().and_then(|thread| open(&format!("{thread}/{file}")).ok());
            if let Some(opened) = opened {
                return Ok(opened.into());
            }
        }
        let opened = match open(file) {
            // The main thread has ended and shows no memory any more. Other threads still do.
            Err(Errno::SRCH) => {
                self.thread_directories().find_map(|thread| open(&format!("{thread}/{file}")).ok()).ok_or(Errno::SRCH)
            }
            opened => opened,
        };
        opened.map(File::from).map_err(|errno| self.absence_reason(&errno.into()))
    }

    /// The directories of its threads below its own. They may disappear at once.
    fn thread_directories(&self) -> impl Iterator<Item = String> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let listing = openat(&self.directory, "task", flags, Mode::empty()).and_then(Dir::new);
        let names = listing.into_iter().flatten().flatten().map(|entry| entry.file_name().to_owned());
        names.filter_map(|name| Some(format!("task/{}", name.to_str().ok()?))).filter(|name| !name.ends_with('.'))
    }

    /// The directory of a thread that is not exiting.
    fn find_live_thread(&self) -> Option<String> {
        let is_live = |thread: &String| {
            let stat = self.open_file(&format!("{thread}/stat")).ok().and_then(|file| read_whole_file(file).ok());
            stat.and_then(|stat| parse::stat(&stat).ok()).is_some_and(|stat| is_live_thread(&stat))
        };
        self.thread_directories().find(is_live)
    }

    /// Whether the main thread had ended when the process was opened.
    pub(crate) fn main_thread_ended(&self) -> bool {
        self.main_thread_ended
    }

    /// Why a file of the process could not be read. A missing file does not exist on this kernel, unless the whole
    /// process is missing.
    fn absence_reason(&self, error: &io::Error) -> Absent {
        match absence_reason(error) {
            Absent::NotOnThisKernel if !self.exists() => Absent::Vanished,
            why => why,
        }
    }

    /// Its open directory below `/proc`.
    pub(crate) fn directory(&self) -> &OwnedFd {
        &self.directory
    }

    /// Whether it exists, possibly as a zombie.
    pub(crate) fn exists(&self) -> bool {
        rustix::fs::statat(&self.directory, "stat", rustix::fs::AtFlags::empty()).is_ok()
    }

    /// Whether it has a thread that is not exiting, possibly in another program than before.
    pub(crate) fn has_live_thread(&self) -> bool {
        // A thread that starts during the listing is missed, and its creator may have ended since.
        (0..MAX_THREAD_LISTINGS).any(|_| self.find_live_thread().is_some())
    }

    pub(crate) fn pagemap(&self) -> Reading<&File> {
        self.pagemap.get_or_init(|| self.open_file("pagemap")).as_ref().map_err(Absent::clone)
    }

    pub(crate) fn memory(&self) -> Reading<&File> {
        self.memory.get_or_init(|| self.open_file("mem")).as_ref().map_err(Absent::clone)
    }

    /// Read the pagemap entries of a number of pages from an address into `mappings`. Returns whether the kernel was
    /// migrating any of them. `Vanished` after the address space is gone.
    pub(crate) fn read_pagemap_entries(
        &self,
        address: u64,
        pages: usize,
        mappings: &mut Vec<PagemapEntry>,
    ) -> Reading<bool> {
        let pagemap = self.pagemap()?;
        let mut bytes = vec![0; pages.min(PAGEMAP_ENTRIES_PER_READ) * 8];
        let mut page = address / self.host.page_size.bytes();
        let (mut remaining, mut is_migrating) = (pages, false);
        while remaining > 0 {
            let length = remaining.min(PAGEMAP_ENTRIES_PER_READ) * 8;
            let count = pagemap.read_at(&mut bytes[..length], page * 8).map_err(|error| self.absence_reason(&error))?;
            if count < 8 {
                return Err(Absent::Vanished);
            }
            let entries = bytes[..count].as_chunks::<8>().0;
            for entry in entries.iter().copied().map(u64::from_ne_bytes) {
                is_migrating |= PagemapEntry::is_migrating(entry);
                mappings.push(PagemapEntry::from_raw(entry));
            }
            page += entries.len() as u64;
            remaining -= entries.len();
        }
        Ok(is_migrating)
    }

    /// Repeat a reading until it sees no migrating page or the wait times out. Each attempt is a new reading, so the
    /// result is of one moment. An attempt also returns whether it saw a migrating page.
    pub(crate) fn retry_while_migrating<T>(&self, mut read: impl FnMut() -> Reading<(T, bool)>) -> Reading<T> {
        let mut wait = FIRST_RETRY_DELAY;
        loop {
            let start = Instant::now();
            let (reading, is_migrating) = read()?;
            if !is_migrating || !self.spend_migration_wait(wait + start.elapsed()) {
                return Ok(reading);
            }
            std::thread::sleep(wait);
            wait = MAX_RETRY_DELAY.min(2 * wait);
        }
    }

    /// Resident pages in these ranges, and the parts in which pages are swapped out or migrating.
    fn scan_resident(&self, ranges: &[AddressRange]) -> Reading<(Vec<PageRun>, Vec<AddressRange>)> {
        let (Some(first), Some(last)) = (ranges.first(), ranges.last()) else {
            return Ok(Default::default());
        };
        let mut clip =
            RunClipper { ranges, page_len: self.host.page_size.bytes(), runs: Vec::new(), swapped_ranges: Vec::new() };
        match pagemap::scan_anonymous(self.pagemap()?, first.start..last.end, |part| clip.add_part(part)) {
            Ok(()) => Ok((clip.runs, clip.swapped_ranges)),
            Err(error) if lacks_pagemap_scan(&error) => {
                let runs = ranges.iter().map(|&range| self.resident_by_pagemap(range));
                Ok((runs.collect::<Reading<Vec<_>>>()?.concat(), Vec::new()))
            }
            Err(error) => Err(self.absence_reason(&error)),
        }
    }

    /// Whether the kernel is migrating any page of a range that was swapped out or migrating, or has migrated it since.
    fn is_migrating(&self, range: AddressRange) -> Reading<bool> {
        let mut mappings = Vec::new();
        let chunk_bytes = PAGEMAP_ENTRIES_PER_READ as u64 * self.host.page_size.bytes();
        for start in (range.start..range.end).step_by(chunk_bytes as usize) {
            let part = AddressRange { start, end: range.end.min(start + chunk_bytes) };
            mappings.clear();
            let is_migrating =
                self.read_pagemap_entries(start, self.host.page_size.pages_in(part.bytes()).0 as usize, &mut mappings)?;
            if is_migrating || mappings.iter().any(|mapping| mapping.present) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Subtracts a wait from the time for migrations. Returns whether the wait was within that time.
    fn spend_migration_wait(&self, waited: Duration) -> bool {
        let micros = waited.as_micros() as u64;
        self.waited_us.fetch_add(micros, Ordering::Relaxed) + micros <= MAX_MIGRATION_WAIT.as_micros() as u64
    }

    /// Resident pages on kernels before 6.7, from pagemap. kpageflags distinguish the kernel's zero page and huge
    /// pages. Without privilege a page that other processes also map cannot be distinguished from the zero page and
    /// counts as resident.
    fn resident_by_pagemap(&self, range: AddressRange) -> Reading<Vec<PageRun>> {
        let page_len = self.host.page_size.bytes();
        let mut runs: Vec<PageRun> = Vec::new();
        let mut address = range.start;
        while address < range.end {
            let pages = ((range.end - address) / page_len).min(PAGEMAP_ENTRIES_PER_READ as u64) as usize;
            let mappings = self.mappings(AddressRange { start: address, end: address + pages as u64 * page_len })?;
            let mut frames: Vec<_> = mappings.iter().filter_map(|mapping| mapping.frame).collect();
            frames.sort_unstable();
            frames.dedup();
            let flags = self.host.frames.flags(&frames).unwrap_or_default();
            for (i, mapping) in mappings.iter().enumerate() {
                let flags = mapping
                    .frame
                    .and_then(|frame| frames.binary_search(&frame).ok())
                    .and_then(|position| flags.get(position))
                    .map(|&flags| pagefold_host::FrameFlags(flags));
                let zero_page = flags.is_some_and(pagefold_host::FrameFlags::is_zero_page);
                if !mapping.present || mapping.file || zero_page {
                    continue;
                }
                let huge = flags.is_some_and(pagefold_host::FrameFlags::is_thp);
                let page = address + i as u64 * page_len;
                match runs.last_mut() {
                    Some(run) if run.huge == huge && run.address + u64::from(run.pages) * page_len == page => {
                        run.pages += 1;
                    }
                    _ => runs.push(PageRun { address: page, pages: 1, huge }),
                }
            }
            address += pages as u64 * page_len;
        }
        Ok(runs)
    }
}

impl ProcessHandle for LiveProcess<'_> {
    fn id(&self) -> ProcessId {
        self.id
    }

    fn read(&self, file: &str) -> Reading<Vec<u8>> {
        let bytes = read_whole_file(self.open_file(file)?).map_err(|error| self.absence_reason(&error))?;
        if file == "stat"
            && self.main_thread_ended
            && let Some(thread) = self.find_live_thread()
            && let Ok(stat) = self.open_file(&format!("{thread}/stat"))
            && let Ok(thread_stat) = read_whole_file(stat)
        {
            return Ok(with_thread_state(&bytes, &thread_stat));
        }
        Ok(bytes)
    }

    fn links(&self, directory: &str) -> Reading<Vec<String>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let handle = openat(&self.directory, directory, flags, Mode::empty())
            .map_err(|errno| self.absence_reason(&errno.into()))?;
        let mut targets = Vec::new();
        for entry in Dir::read_from(&handle).map_err(|errno| self.absence_reason(&errno.into()))? {
            let entry = entry.map_err(|errno| self.absence_reason(&errno.into()))?;
            // An entry that is no link, or was closed meanwhile, has no target.
            if let Ok(target) = readlinkat(&handle, entry.file_name(), Vec::new()) {
                targets.push(target.to_string_lossy().into_owned());
            }
        }
        targets.sort();
        Ok(targets)
    }

    fn resident(&self, ranges: &[AddressRange]) -> Reading<Vec<PageRun>> {
        let (mut runs, swapped_ranges) = self.scan_resident(ranges)?;
        let still_migrating = |swapped_ranges: Vec<AddressRange>| -> Reading<Vec<AddressRange>> {
            let migrating = swapped_ranges.into_iter().map(|part| Ok(self.is_migrating(part)?.then_some(part)));
            migrating.filter_map(Reading::transpose).collect()
        };
        let migrating_ranges = still_migrating(swapped_ranges)?;
        if !migrating_ranges.is_empty() {
            let mut migrated_runs = self.retry_while_migrating(|| {
                let (mut migrated_runs, mut swapped_ranges) = (Vec::new(), Vec::new());
                // One by one: a single scan would also walk the page tables between them.
                for part in &migrating_ranges {
                    let (runs, swapped_parts) = self.scan_resident(std::slice::from_ref(part))?;
                    migrated_runs.extend(runs);
                    swapped_ranges.extend(swapped_parts);
                }
                Ok((migrated_runs, !still_migrating(swapped_ranges)?.is_empty()))
            })?;
            runs.append(&mut migrated_runs);
            runs.sort_unstable_by_key(|run| run.address);
        }
        Ok(runs)
    }

    fn mappings(&self, range: AddressRange) -> Reading<Vec<PagemapEntry>> {
        let pages = self.host.page_size.pages_in(range.bytes()).0 as usize;
        self.retry_while_migrating(|| {
            let mut mappings = Vec::new();
            let is_migrating = self.read_pagemap_entries(range.start, pages, &mut mappings)?;
            Ok((mappings, is_migrating))
        })
    }

    fn thread_cpus(&self, tid: Pid) -> Reading<IdSet> {
        // The thread is one of this process.
        self.read(&format!("task/{tid}/stat"))?;
        apply::read_affinity(tid).map_err(|_| Absent::Vanished)
    }

    fn page_nodes(&self, range: AddressRange) -> Reading<Vec<Option<u32>>> {
        crate::page_nodes::page_nodes(self, range)
    }

    fn ask_guest_agent(&self, questions: &[GuestQuestion], access: AgentAccess) -> Reading<Vec<Reading<Vec<u8>>>> {
        crate::guest_agent::ask(self.host, self, questions, access)
    }

    fn ask_monitor(&self, questions: &[MonitorQuestion], access: MonitorAccess) -> Reading<Vec<Reading<Vec<u8>>>> {
        crate::qmp::ask(self.host, self, questions, access)
    }

    fn contents(&self, method: ReadMethod, runs: &[PageRun], sink: &mut dyn FnMut(usize, PageView<'_>)) -> Reading<()> {
        page_reader::read_pages(self, method, runs, sink)
    }

    fn ask_merge_any(&self) -> Result<bool, ActionError> {
        apply::ask_merge_any(self)
    }
}

/// Whether a thread is not exiting.
fn is_live_thread(stat: &Stat) -> bool {
    !matches!(stat.state, 'Z' | 'X') && stat.flags & parse::PF_EXITING == 0
}

/// The `stat` of a process with state and flags of one of its threads instead of those of its ended main thread.
fn with_thread_state(stat: &[u8], thread_stat: &[u8]) -> Vec<u8> {
    /// The positions of both among the fields after the name.
    const STATE_AND_FLAGS_FIELDS: [usize; 2] = [0, 6];
    let split = |bytes: &[u8]| -> Option<(usize, Vec<Vec<u8>>)> {
        let start = bytes.iter().rposition(|&byte| byte == b')')? + 2;
        Some((start, bytes.get(start..)?.split(|&byte| byte == b' ').map(<[u8]>::to_vec).collect()))
    };
    let (Some((start, mut fields)), Some((_, thread_fields))) = (split(stat), split(thread_stat)) else {
        return stat.to_vec();
    };
    for position in STATE_AND_FLAGS_FIELDS {
        if let (Some(field), Some(thread_field)) = (fields.get_mut(position), thread_fields.get(position)) {
            field.clone_from(thread_field);
        }
    }
    [&stat[..start], &fields.join(&b' ')].concat()
}

/// Collects the parts of mapped ranges that lie in the given ranges; both ascend.
struct RunClipper<'a> {
    /// Ranges that may contain later parts.
    ranges: &'a [AddressRange],
    page_len: u64,
    /// Resident pages.
    runs: Vec<PageRun>,
    /// Swapped-out pages.
    swapped_ranges: Vec<AddressRange>,
}

impl RunClipper<'_> {
    fn add_part(&mut self, part: MappedRange) {
        // A run counts its pages in 32 bits.
        let max_run_bytes = u64::from(u32::MAX / 2) * self.page_len;
        let ended_ranges = self.ranges.iter().take_while(|range| range.end <= part.start).count();
        self.ranges = &self.ranges[ended_ranges..];
        for range in self.ranges.iter().take_while(|range| range.start < part.end) {
            let (mut start, end) = (part.start.max(range.start), part.end.min(range.end));
            if part.swapped {
                self.swapped_ranges.push(AddressRange { start, end });
                continue;
            }
            while start < end {
                let bytes = (end - start).min(max_run_bytes);
                self.runs.push(PageRun { address: start, pages: (bytes / self.page_len) as u32, huge: part.huge });
                start += bytes;
            }
        }
    }
}

/// Whether the kernel does not support PAGEMAP_SCAN.
pub(crate) fn lacks_pagemap_scan(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::NOTTY | Errno::INVAL))
}

/// A missing process has vanished; the kernel's version is not the reason.
fn not_found_to_vanished(why: &Absent) -> Absent {
    match why {
        Absent::NotOnThisKernel => Absent::Vanished,
        why => why.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_comes_from_live_thread_if_main_ended() {
        let main = b"7 (a) Z b) Z 1 7 7 0 -1 4194316 55 0 0 0 3 4 0 0 20 0 2 0 123 0 0\n";
        let thread = b"9 (a) Z b) S 1 7 7 0 -1 4194368 1 0 0 0 0 0 0 0 20 0 2 0 456 9 9\n";
        let stat = parse::stat(&with_thread_state(main, thread)).unwrap();
        assert_eq!((stat.pid, stat.state, stat.flags, stat.start_time), (Pid(7), 'S', 4194368, 123));
        assert_eq!((stat.page_faults, stat.utime, stat.stime), (55, 3, 4));
        assert_eq!(with_thread_state(b"torn", thread), b"torn");
        assert_eq!(with_thread_state(main, b"torn"), main);
    }

    #[test]
    fn resident_runs_are_clipped_to_ranges() {
        let part = |start: u64, end: u64, huge| {
            let (file, zero, swapped) = (false, false, start == 41);
            MappedRange { start: start * 4096, end: end * 4096, file, zero_page: zero, huge, swapped }
        };
        let range = |start: u64, end: u64| AddressRange { start: start * 4096, end: end * 4096 };
        let found = [part(0, 10, false), part(10, 30, true), part(40, 41, false), part(41, 65, false)];
        let ranges = [range(2, 4), range(4, 12), range(20, 21), range(28, 50), range(60, 70)];
        let mut clip = RunClipper { ranges: &ranges, page_len: 4096, runs: Vec::new(), swapped_ranges: Vec::new() };
        found.into_iter().for_each(|part| clip.add_part(part));
        let runs: Vec<_> = clip.runs.iter().map(|run| (run.address / 4096, run.pages, run.huge)).collect();
        assert_eq!(runs, [(2, 2, false), (4, 6, false), (10, 2, true), (20, 1, true), (28, 2, true), (40, 1, false)]);
        assert_eq!(clip.swapped_ranges, [range(41, 50), range(60, 65)]);
    }
}
