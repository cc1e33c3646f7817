//! A member of a domain that runs the commands on its standard input and knows the expected content of its memory. Any
//! sequence of commands is valid: a command skips pages that it cannot handle, such as unmapped or protected ones.
//!
//! ```text
//! member DOMAIN PAGES [--threads N] [--max-slowdown PERCENT] [--min-runtime SECONDS] [--per-node] [--split-huge-pages]
//!
//! fill START COUNT SEED   pages from START on; SEED 0 is zeros; equal seeds and page numbers give equal contents
//! copy START COUNT FROM   copies the pages from FROM on to the pages from START on
//! clear START COUNT       by the engine's function
//! advise START COUNT HOW  0 mergeable, 1 unmergeable, 2 rewritten
//! disown START COUNT      disowns the pages; `adopt` disowns them all, and adopts those that are mapped
//! merge                   prints the counters of the merge
//! running                 merges by `merge_while_running`, or prints the reason of a failure
//! background              starts a thread that merges until a command that must not run beside it, or prints an error
//! foreground              ends that thread after its next merge; prints the number of merges
//! race ROUNDS             merges this often while a thread writes to pages without pause
//! shuffle ROUNDS          merges this often while a thread moves disowned memory without pause
//! check                   compares every page with its expected content
//! status                  prints the status of the engine
//!
//! unmap START COUNT       disowns and unmaps; `map` maps unmapped pages, and adopts them
//! munmap START COUNT      unmaps without notice to the engine
//! replace START COUNT     maps new memory over the pages, likewise without notice
//! mapfile START COUNT     maps a file over the pages, private and writable, likewise without notice
//! files                   prints whether the mapped files still have their contents
//! move START COUNT        by mremap; the old range becomes inaccessible memory; `back` moves it back
//! grow START              grows one page to two, by mremap, likewise
//! dontneed START COUNT    by MADV_DONTNEED; prints how many pages read as zeros, and how many as merged content;
//!                         skips pages that `grow` added: their content would be unknown
//! guard START COUNT       by MADV_GUARD_INSTALL, likewise
//! protect START COUNT HOW 0 no access, 1 read-only; `expose` makes pages writable, guarded ones too
//! huge                    asks for huge pages; `small` for none
//! mappings LEFT           creates mappings until LEFT remain of those that a merge may create
//!
//! base                    prints the address of the memory
//! core DIRECTORY          dies by a signal, and dumps core in DIRECTORY
//! exec                    executes the same program again
//! close                   closes all descriptors but the first three, and reuses their numbers for other files
//! leave                   drops its memory and its engine, and ends
//! fork                    forks a child that waits; `child` makes it check, write and merge its memory, and end
//! forks ROUNDS            forks such children one after another, while a thread merges without pause
//! ```

mod page;

use page::{
    ExpectedContent, ExpectedPage, PAGE_BYTES, PageAccess, file_content, fill_page, filled_page, is_file_unchanged,
    move_mapping, reserve_address_space,
};
use pagefold_base::AddressRange;
use pagefold_engine::{AllocatedRegion, BackgroundMerger, Engine, EngineOptions, Error, PageAdvice};
use std::ffi::{CString, c_int, c_void};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write, stdin};
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// `MADV_GUARD_INSTALL` and `MADV_GUARD_REMOVE` (include/uapi/asm-generic/mman-common.h, 6.13).
const GUARD_INSTALL: c_int = 102;
const GUARD_REMOVE: c_int = 103;

/// Commands that may run while a thread merges.
const COMMANDS_DURING_MERGE: [&str; 12] = [
    "fill",
    "copy",
    "clear",
    "advise",
    "disown",
    "adopt",
    "merge",
    "running",
    "background",
    "foreground",
    "check",
    "status",
];

/// Create mappings until `mappings_left`, or one more, remain below the limit up to which a merge creates them.
fn exhaust_mappings(mappings_left: usize) -> usize {
    let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").expect("a limit");
    let max_mappings = limit.trim().parse::<usize>().expect("a number") / 8 * 6;
    let mapping_count =
        BufReader::new(File::open("/proc/self/maps").expect("a readable list of mappings")).lines().count();
    let needed = max_mappings.saturating_sub(mapping_count + mappings_left);
    let start = reserve_address_space(needed + 1, 0);
    // Each readable page is a mapping, and so is the range behind it.
    for page in (1..needed.saturating_sub(1)).step_by(2) {
        ExpectedPage::new(start + page * PAGE_BYTES).protect(PageAccess::Read);
    }
    needed
}

/// The memory of a member, with its expected contents.
struct MemberMemory<'e> {
    engine: &'e Engine,
    region: AllocatedRegion<'e>,
    pages: Vec<ExpectedPage>,
    /// Pages that were moved away, with the index of the first one.
    moved_away: Vec<(usize, Vec<ExpectedPage>)>,
}

impl MemberMemory<'_> {
    fn page_range_mut(&mut self, start: u64, count: u64) -> &mut [ExpectedPage] {
        &mut self.pages[start as usize..(start + count) as usize]
    }

    fn page_address_range(&self, start: u64, count: u64) -> AddressRange {
        let start = self.region.range().start + start * PAGE_BYTES as u64;
        AddressRange { start, end: start + count * PAGE_BYTES as u64 }
    }

    fn check_contents(&self) -> Result<(), usize> {
        let all = self.pages.iter().chain(self.moved_away.iter().flat_map(|(_, pages)| pages));
        all.enumerate().find(|(_, page)| !page.has_expected_content()).map_or(Ok(()), |(index, _)| Err(index))
    }

    /// Pages may be merged with their present contents.
    fn record_contents(&mut self) {
        for page in self.pages.iter_mut().chain(self.moved_away.iter_mut().flat_map(|(_, pages)| pages)) {
            if !page.merged_contents.contains(&page.content) {
                page.merged_contents.push(page.content);
            }
        }
    }

    fn run_merge(&mut self, while_running: bool) -> String {
        let merge = if while_running { Engine::merge_while_running } else { Engine::merge };
        // SAFETY: no other thread of this program writes, and no borrow of the memory lives.
        let merged = unsafe { merge(self.engine) };
        self.record_contents();
        merged.map_or_else(|error| error.to_string(), |merged| format!("{merged:?}"))
    }

    fn move_away(&mut self, start: u64, count: u64) {
        let destination = reserve_address_space(count as usize, 0);
        let mut moved = Vec::new();
        for page in self.page_range_mut(start, count).iter_mut().filter(|page| page.access != PageAccess::Unmapped) {
            let moved_page = ExpectedPage { address: destination + moved.len() * PAGE_BYTES, ..page.clone() };
            move_mapping(page.address, PAGE_BYTES, moved_page.address, 0);
            page.reserve_old_address();
            moved.push(moved_page);
        }
        self.moved_away.push((start as usize, moved));
    }

    fn move_back(&mut self) {
        let Some((start, moved)) = self.moved_away.pop() else { return };
        let pages = self.pages[start..].iter_mut().filter(|page| page.access != PageAccess::Unmapped);
        for (page, moved_page) in pages.zip(moved) {
            move_mapping(moved_page.address, PAGE_BYTES, page.address, 0);
            *page = ExpectedPage { address: page.address, ..moved_page };
        }
    }

    /// The content of the added page is undefined until it is written.
    fn grow_mapping(&mut self, start: u64) {
        let page = &mut self.pages[start as usize];
        if page.access == PageAccess::Unmapped {
            return;
        }
        let moved_page = ExpectedPage { address: reserve_address_space(2, 0), ..page.clone() };
        move_mapping(page.address, PAGE_BYTES, moved_page.address, PAGE_BYTES);
        page.reserve_old_address();
        let mut added_page = ExpectedPage {
            address: moved_page.address + PAGE_BYTES,
            access: moved_page.access,
            is_growth_remainder: true,
            ..ExpectedPage::new(0)
        };
        added_page.protect(PageAccess::Write);
        added_page.write_content((9, start));
        self.moved_away.push((start as usize, vec![moved_page, added_page]));
    }
}

/// Merge while another thread writes to the writable pages, and checks that its writes are still there.
fn write_while_merging(engine: &Engine, pages: &mut [ExpectedPage], rounds: u64) -> String {
    let words: Vec<&AtomicU64> = pages
        .iter_mut()
        .filter(|page| page.access == PageAccess::Write)
        // SAFETY: each is the first word of a page, aligned and writable; only atomic operations use it until the end.
        .map(|page| unsafe { AtomicU64::from_ptr(page.pointer().cast()) })
        .collect();
    if words.is_empty() {
        return " lost: 0 .".to_owned();
    }
    // Different numbers each time. Equal writes of two members could be merged, and no page may have held them before.
    let seed = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_nanos() as u64;
    let stop = AtomicBool::new(false);
    let (last_result, lost) = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let initial: Vec<u64> = words.iter().map(|word| word.load(Ordering::Relaxed)).collect();
            let (mut last_written, mut lost, mut state) = (initial.clone(), 0, seed);
            while !stop.load(Ordering::Relaxed) {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let index = (state >> 33) as usize % words.len();
                lost += u64::from(words[index].load(Ordering::Relaxed) != last_written[index]);
                // Often the previous value, so that pages become equal again.
                last_written[index] = if state >> 20 & 3 == 0 { state } else { initial[index] };
                words[index].store(last_written[index], Ordering::Relaxed);
            }
            words.iter().zip(initial).for_each(|(word, initial)| word.store(initial, Ordering::Relaxed));
            lost
        });
        let mut last_result = String::new();
        for _ in 0..rounds {
            // SAFETY: no thread unmaps memory.
            match unsafe { engine.merge_while_running() } {
                Ok(merged) => last_result = format!("{merged:?}"),
                Err(error) => last_result = error.to_string(),
            }
        }
        stop.store(true, Ordering::Relaxed);
        (last_result, writer.join().expect("it does not panic"))
    });
    format!("{last_result} lost: {lost} .")
}

/// Merge while another thread moves disowned merged memory to and fro, past the merge's scan of the mappings.
fn move_while_merging(engine: &Engine, rounds: u64) -> String {
    const MOVED_PAGES: usize = 100;
    const PAGES_BETWEEN: usize = 6000;
    let content = |index: usize| (77, (index % MOVED_PAGES) as u64);
    // One is far below the other; the engine's mappings are between them.
    let addresses = [reserve_address_space(MOVED_PAGES, 1 << 32), reserve_address_space(MOVED_PAGES, 0)];
    let between = reserve_address_space(PAGES_BETWEEN, 0);
    for page in (0..PAGES_BETWEEN).step_by(2) {
        ExpectedPage::new(between + page * PAGE_BYTES).protect(PageAccess::Read);
    }
    let mut memory = ExpectedPage::new(addresses[0]);
    let pointer = |address: usize| ptr::with_exposed_provenance_mut::<c_void>(address);
    // SAFETY: the range is empty address space that this function reserved.
    unsafe { libc::mprotect(pointer(addresses[0]), MOVED_PAGES * PAGE_BYTES, libc::PROT_READ | libc::PROT_WRITE) };
    let range = AddressRange { start: addresses[0] as u64, end: (addresses[0] + MOVED_PAGES * PAGE_BYTES) as u64 };
    // SAFETY: it is private anonymous memory.
    unsafe { engine.adopt(range) }.expect("whole pages");
    let fill_at = |page: &mut ExpectedPage, address: usize, content: ExpectedContent| {
        page.address = address;
        page.write_content(content);
    };
    (0..MOVED_PAGES).for_each(|index| fill_at(&mut memory, addresses[0] + index * PAGE_BYTES, content(index)));
    let mut twin = engine.allocate(MOVED_PAGES * PAGE_BYTES).expect("memory");
    twin.as_mut_slice()
        .chunks_exact_mut(PAGE_BYTES)
        .enumerate()
        .for_each(|(index, page)| fill_page(page, content(index)));
    // SAFETY: there is only one thread so far.
    let merged = unsafe { engine.merge() }.expect("a usable domain");
    assert_eq!(merged.pages_merged.0, 2 * MOVED_PAGES as u64, "{merged:?}");
    drop(twin);
    engine.disown(range).expect("a usable domain");
    let stop = AtomicBool::new(false);
    let (last_result, address) = std::thread::scope(|scope| {
        let mover = scope.spawn(|| {
            let mut address = addresses[0];
            for wanted_address in addresses.iter().rev().cycle() {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                // The old range is free for any mapping.
                let destination = reserve_address_space(MOVED_PAGES, *wanted_address);
                move_mapping(address, MOVED_PAGES * PAGE_BYTES, destination, 0);
                address = destination;
            }
            address
        });
        let mut last_result = String::new();
        for round in 0..rounds {
            // New memory each time, so that its references are soon unused.
            let mut other = engine.allocate(2 * MOVED_PAGES * PAGE_BYTES).expect("memory");
            for (index, page) in other.as_mut_slice().chunks_exact_mut(PAGE_BYTES).enumerate() {
                fill_page(page, (1000 + round, (index % MOVED_PAGES) as u64));
            }
            // SAFETY: no thread unmaps, moves or readdresses adopted memory.
            match unsafe { engine.merge_while_running() } {
                Ok(merged) => last_result = format!("{merged:?}"),
                Err(error) => last_result = error.to_string(),
            }
        }
        stop.store(true, Ordering::Relaxed);
        (last_result, mover.join().expect("it does not panic"))
    });
    let wrong = (0..MOVED_PAGES).filter(|&page| {
        memory.address = address + page * PAGE_BYTES;
        memory.bytes() != filled_page(content(page))
    });
    format!("{last_result} wrong: {} .", wrong.count())
}

struct ForkedChild {
    process: libc::pid_t,
    /// Closing it lets the child continue.
    gate: OwnedFd,
}

/// The work of a forked child. It takes no lock that another thread of the parent may have held.
fn run_child(memory: &mut MemberMemory<'_>) -> ! {
    let has_wrong_content = |memory: &MemberMemory<'_>| memory.check_contents().is_err();
    let mut failed = has_wrong_content(memory);
    for (index, page) in memory.pages.iter_mut().enumerate().step_by(3) {
        page.write_content((5, index as u64));
    }
    let mut forked = false;
    for _ in 0..2 {
        // SAFETY: the child has one thread, and no borrow of the memory lives.
        let merged = unsafe { memory.engine.merge() };
        forked |= matches!(merged, Err(Error::Forked));
        if let Err(error) = &merged
            && !forked
        {
            eprintln!("a child cannot merge: {error:?}");
        }
        failed |= has_wrong_content(memory) || (merged.is_err() && !forked);
    }
    // SAFETY: the process ends here.
    unsafe { libc::_exit(if failed { 1 } else { c_int::from(forked) * 2 }) }
}

fn fork_process() -> libc::pid_t {
    // SAFETY: the child calls only what is allowed after a fork of a multithreaded program.
    let process = unsafe { libc::fork() };
    assert!(process >= 0, "a child");
    process
}

fn wait_exit_code(process: libc::pid_t) -> c_int {
    let mut status = 0;
    // SAFETY: `status` is valid for writes.
    unsafe { libc::waitpid(process, &raw mut status, 0) };
    if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 1 }
}

/// Fork while another thread merges.
fn fork_while_merging(memory: &mut MemberMemory<'_>, rounds: u64) -> String {
    let (stop, engine) = (AtomicBool::new(false), memory.engine);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                // SAFETY: the other thread only forks, and children write to their own memory.
                unsafe { engine.merge() }.expect("a usable domain");
            }
        });
        let code = |_| match fork_process() {
            0 => run_child(memory),
            process => wait_exit_code(process),
        };
        let codes: Vec<c_int> = (0..rounds).map(code).collect();
        stop.store(true, Ordering::Relaxed);
        let count = |code| codes.iter().filter(|&&found| found == code).count();
        format!(" merged: {} wrong: {} forked: {} .", count(0), count(1), count(2))
    })
}

/// Adopt pages that are not adopted yet.
fn adopt_pages(memory: &MemberMemory<'_>, start: u64, count: u64) {
    // SAFETY: it is private anonymous memory, or maps the store privately.
    match unsafe { memory.engine.adopt(memory.page_address_range(start, count)) } {
        Ok(()) | Err(Error::InvalidRange { .. }) => {}
        Err(error) => panic!("{error}"),
    }
}

fn dump_core(directory: &str) -> ! {
    std::env::set_current_dir(directory).expect("a directory");
    let limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: `limit` is valid, and a refused higher limit leaves the present one.
    unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const limit) };
    std::process::abort()
}

fn exec_self() -> ! {
    let program = CString::new("/proc/self/exe").expect("no zeros");
    let arguments: Vec<CString> = std::env::args().map(|text| CString::new(text).expect("no zeros")).collect();
    let pointers: Vec<_> = arguments.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect();
    // SAFETY: the strings end with NUL, and the list of pointers ends with null.
    unsafe { libc::execv(program.as_ptr(), pointers.as_ptr()) };
    panic!("exec: {}", std::io::Error::last_os_error())
}

/// A member, and what its commands have created.
struct Member<'e> {
    /// Dropped first: it merges the memory.
    background: Option<BackgroundMerger>,
    memory: MemberMemory<'e>,
    engine: &'e Arc<Engine>,
    children: Vec<ForkedChild>,
    /// The program's own files, which the engine must not touch.
    own_files: Vec<File>,
    /// The mapped files, with the number of pages of each.
    mapped_files: Vec<(File, u64)>,
}

impl<'e> Member<'e> {
    fn new(engine: &'e Arc<Engine>, pages: usize) -> Self {
        let region = engine.allocate(pages * PAGE_BYTES).expect("memory");
        let start = region.range().start as usize;
        let pages = (0..pages).map(|page| ExpectedPage::new(start + page * PAGE_BYTES)).collect();
        Self {
            background: None,
            memory: MemberMemory { engine, region, pages, moved_away: Vec::new() },
            engine,
            children: Vec::new(),
            own_files: Vec::new(),
            mapped_files: Vec::new(),
        }
    }

    /// Run a command line. Returns the answer.
    fn run_command(&mut self, line: &str) -> String {
        let mut words = line.split_ascii_whitespace();
        let command = words.next().unwrap_or_default();
        let text = words.clone().next().unwrap_or_default();
        let numbers: Vec<u64> = words.map_while(|word| word.parse().ok()).collect();
        if !COMMANDS_DURING_MERGE.contains(&command) {
            self.background = None;
        }
        let answer = self
            .run_content_command(command, &numbers)
            .or_else(|| self.run_merge_command(command, &numbers))
            .or_else(|| self.run_mapping_command(command, &numbers))
            .or_else(|| self.run_program_command(command, &numbers, text));
        if self.background.is_some() {
            self.memory.record_contents();
        }
        answer.unwrap_or_else(|| format!("unknown: {line}"))
    }

    /// Commands that write, drop, protect or check pages.
    fn run_content_command(&mut self, command: &str, numbers: &[u64]) -> Option<String> {
        let answer = match (command, numbers) {
            ("fill", &[start, count, seed]) => {
                for (page, number) in self.memory.page_range_mut(start, count).iter_mut().zip(start..) {
                    page.write_content((seed, number));
                }
                "filled".to_owned()
            }
            ("copy", &[start, count, from]) => {
                for number in 0..count as usize {
                    let source = &self.memory.pages[from as usize + number];
                    if source.is_readable() {
                        let content = source.content;
                        self.memory.pages[start as usize + number].write_content(content);
                    }
                }
                "copied".to_owned()
            }
            ("clear", &[start, count]) => {
                // SAFETY: no borrow of the region lives.
                match unsafe { self.engine.clear(self.memory.page_address_range(start, count)) } {
                    Ok(()) => {
                        let cleared = self.memory.page_range_mut(start, count).iter_mut();
                        cleared.for_each(|page| *page = ExpectedPage::new(page.address));
                        "cleared".to_owned()
                    }
                    Err(error) => format!("{error}"),
                }
            }
            ("check", []) => match self.memory.check_contents() {
                Ok(()) => "same".to_owned(),
                Err(page) => format!("page {page} differs"),
            },
            ("dontneed", &[start, count]) => {
                let mut merged_pages = 0;
                for page in self.memory.page_range_mut(start, count).iter_mut().filter(|page| page.may_be_dropped()) {
                    assert!(page.advise(libc::MADV_DONTNEED), "{}", std::io::Error::last_os_error());
                    merged_pages += u64::from(page.read_dropped_content());
                }
                format!(" zeros: {} kept: {merged_pages} .", count - merged_pages)
            }
            ("guard", &[start, count]) => {
                let mut guarded = 0;
                let droppable = |page: &&mut ExpectedPage| page.access == PageAccess::Write && page.may_be_dropped();
                for page in self.memory.page_range_mut(start, count).iter_mut().filter(droppable) {
                    if page.advise(GUARD_INSTALL) {
                        page.access = PageAccess::Guarded;
                        guarded += 1;
                    }
                }
                format!(" guarded: {guarded} .")
            }
            ("protect", &[start, count, mode]) => {
                let mapped =
                    |page: &&mut ExpectedPage| !matches!(page.access, PageAccess::Unmapped | PageAccess::Guarded);
                let access = if mode == 0 { PageAccess::NoAccess } else { PageAccess::Read };
                self.memory
                    .page_range_mut(start, count)
                    .iter_mut()
                    .filter(mapped)
                    .for_each(|page| page.protect(access));
                "protected".to_owned()
            }
            ("expose", &[start, count]) => {
                for page in self.memory.page_range_mut(start, count) {
                    match page.access {
                        PageAccess::Unmapped => {}
                        PageAccess::Guarded => {
                            assert!(page.advise(GUARD_REMOVE), "{}", std::io::Error::last_os_error());
                            page.access = PageAccess::Write;
                            page.read_dropped_content();
                        }
                        _ => page.protect(PageAccess::Write),
                    }
                }
                "exposed".to_owned()
            }
            _ => return None,
        };
        Some(answer)
    }

    /// Commands that call the engine.
    fn run_merge_command(&mut self, command: &str, numbers: &[u64]) -> Option<String> {
        let answer = match (command, numbers) {
            ("advise", &[start, count, advice_code]) => {
                let advice =
                    [PageAdvice::Mergeable, PageAdvice::Unmergeable, PageAdvice::Rewritten][advice_code as usize];
                self.engine.advise(self.memory.page_address_range(start, count), advice).expect("a usable domain");
                "advised".to_owned()
            }
            ("disown", &[start, count]) => {
                self.engine.disown(self.memory.page_address_range(start, count)).expect("a usable domain");
                "disowned".to_owned()
            }
            ("adopt", &[start, count]) => {
                self.engine.disown(self.memory.page_address_range(start, count)).expect("a usable domain");
                let is_mapped = |number: u64| self.memory.pages[number as usize].access != PageAccess::Unmapped;
                let numbers: Vec<u64> = (start..start + count).collect();
                for chunk in numbers.chunk_by(|&a, &b| is_mapped(a) == is_mapped(b)) {
                    if is_mapped(chunk[0]) {
                        adopt_pages(&self.memory, chunk[0], chunk.len() as u64);
                    }
                }
                "adopted".to_owned()
            }
            ("merge", []) => self.memory.run_merge(false),
            ("running", []) => self.memory.run_merge(true),
            ("background", []) => {
                // Any content that it merges before the next command existed at the time of this one.
                self.memory.record_contents();
                // SAFETY: it is dropped before any command that is not in [`COMMANDS_DURING_MERGE`]. Those commands
                // leave adopted memory mapped in its place, except for the engine's own changes.
                match unsafe { self.engine.merge_in_background(0.5) } {
                    Ok(background) => {
                        self.background = Some(background);
                        "begun".to_owned()
                    }
                    Err(error) => format!("{error}"),
                }
            }
            ("foreground", []) => {
                let minute = Duration::from_secs(60);
                let merges = self.background.take().map_or(Ok(0), |background| background.wait_for_merges(1, minute));
                merges.map_or_else(|error| error.to_string(), |merges| format!(" merges: {merges} ."))
            }
            ("race", &[rounds]) => {
                self.memory.record_contents();
                write_while_merging(self.engine, &mut self.memory.pages, rounds)
            }
            ("shuffle", &[rounds]) => move_while_merging(self.engine, rounds),
            ("status", []) => format!("{:?}", self.engine.status().expect("a usable domain")),
            _ => return None,
        };
        Some(answer)
    }

    /// Commands that change mappings.
    fn run_mapping_command(&mut self, command: &str, numbers: &[u64]) -> Option<String> {
        let answer = match (command, numbers) {
            ("unmap" | "munmap", &[start, count]) => {
                if command == "unmap" {
                    self.engine.disown(self.memory.page_address_range(start, count)).expect("a usable domain");
                }
                self.memory.page_range_mut(start, count).iter_mut().for_each(ExpectedPage::unmap);
                "unmapped".to_owned()
            }
            ("replace", &[start, count]) => {
                let mapped = self
                    .memory
                    .page_range_mut(start, count)
                    .iter_mut()
                    .filter(|page| page.access != PageAccess::Unmapped);
                mapped.for_each(|page| page.map_replacement(None));
                "replaced".to_owned()
            }
            ("mapfile", &[start, count]) => {
                let mut file = tempfile::tempfile().expect("a file");
                // One more than the number of pages, in case the last page grows.
                file.write_all(&file_content(count + 1)).expect("a file");
                for (page, number) in self.memory.page_range_mut(start, count).iter_mut().zip(0..) {
                    if page.access != PageAccess::Unmapped {
                        page.map_replacement(Some((&file, number)));
                    }
                }
                self.mapped_files.push((file, count + 1));
                "mapped".to_owned()
            }
            ("files", []) => {
                let are_untouched = self.mapped_files.iter().all(|(file, pages)| is_file_unchanged(file, *pages));
                if are_untouched { "untouched".to_owned() } else { "touched".to_owned() }
            }
            ("map", &[start, count]) => {
                for number in start..start + count {
                    let page = &mut self.memory.pages[number as usize];
                    if page.access == PageAccess::Unmapped && page.map() {
                        adopt_pages(&self.memory, number, 1);
                    }
                }
                "mapped".to_owned()
            }
            ("move", &[start, count]) => {
                self.memory.move_away(start, count);
                "moved".to_owned()
            }
            ("back", []) => {
                self.memory.move_back();
                "moved back".to_owned()
            }
            ("grow", &[start]) => {
                self.memory.grow_mapping(start);
                "grown".to_owned()
            }
            ("huge" | "small", []) => {
                let range = self.memory.region.range();
                let (start, bytes) = (range.start as usize, range.bytes().0 as usize);
                let advice = if command == "huge" { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
                // SAFETY: the advice changes no content.
                let result = unsafe { libc::madvise(ptr::with_exposed_provenance_mut(start), bytes, advice) };
                format!("advised: {result}")
            }
            ("mappings", &[mappings_left]) => format!(" taken: {} .", exhaust_mappings(mappings_left as usize)),
            ("base", []) => format!(" base: {} .", self.memory.region.range().start),
            _ => return None,
        };
        Some(answer)
    }

    /// Commands that concern the whole process.
    fn run_program_command(&mut self, command: &str, numbers: &[u64], text: &str) -> Option<String> {
        let answer = match (command, numbers) {
            ("core", _) => dump_core(text),
            ("exec", []) => exec_self(),
            ("close", []) => {
                // SAFETY: the test checks that the owners of these descriptors notice that they are closed.
                unsafe { libc::close_range(3, libc::c_uint::MAX, 0) };
                for _ in 0..64 {
                    self.own_files.push(tempfile::tempfile().expect("a file"));
                }
                "closed".to_owned()
            }
            ("others", []) => {
                let are_untouched = self.own_files.iter().all(|file| file.metadata().is_ok_and(|file| file.len() == 0));
                if are_untouched { "untouched".to_owned() } else { "touched".to_owned() }
            }
            ("fork", []) => {
                let (wait, gate) = std::io::pipe().expect("a pipe");
                let process = fork_process();
                if process == 0 {
                    drop(gate);
                    drop(std::mem::take(&mut self.children));
                    let _ = (&wait).read(&mut [0]);
                    run_child(&mut self.memory);
                }
                self.children.push(ForkedChild { process, gate: gate.into() });
                "forked".to_owned()
            }
            ("child", []) => {
                let child = self.children.pop().expect("a child");
                drop(child.gate);
                if wait_exit_code(child.process) == 0 { "same".to_owned() } else { "different".to_owned() }
            }
            ("forks", &[rounds]) => fork_while_merging(&mut self.memory, rounds),
            _ => return None,
        };
        Some(answer)
    }
}

fn parse_options(arguments: &[String]) -> EngineOptions {
    let option = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name)?;
        Some(arguments.get(at + 1).expect("an option has a value").parse::<f64>().expect("a number"))
    };
    EngineOptions {
        max_slowdown: option("--max-slowdown").map(|percent| percent / 100.0),
        min_runtime: option("--min-runtime").map_or(Duration::ZERO, Duration::from_secs_f64),
        threads: option("--threads").map_or(1, |threads| threads as usize),
        per_node: arguments.iter().any(|argument| argument == "--per-node"),
        split_huge_pages: arguments.iter().any(|argument| argument == "--split-huge-pages"),
        ..EngineOptions::default()
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let pages = arguments[2].parse().expect("a number of pages");
    let engine = match Engine::join(&arguments[1], &parse_options(&arguments)) {
        Ok(engine) => Arc::new(engine),
        Err(error) => {
            let cause = std::error::Error::source(&error).map_or_else(String::new, |source| format!(": {source}"));
            println!("{error}{cause}");
            return;
        }
    };
    let mut member = Member::new(&engine, pages);
    println!("ready");
    for line in stdin().lock().lines().map_while(Result::ok) {
        if line == "leave" {
            drop(member);
            drop(engine);
            println!("left");
            return;
        }
        println!("{}", member.run_command(&line));
        std::io::stdout().flush().expect("the test reads");
    }
}
