//! Lays out memory with known content in this process.
//!
//! Each region is a mapping of its own between guards, has no huge pages unless requested, and holds exactly the pages
//! of [`pagefold_labs::layout_spec::SpecItem::expected_pages`]. Other memory of the process (program, libraries, heap,
//! stacks, vdso) is not part of the layout: compare region by region.

use std::fs;
use std::hint::black_box;
use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pagefold_labs::content::{self, ContentOrigin};
use pagefold_labs::layout_spec::{RegionKind, SpecItem};
use pagefold_labs::mixture::Mixture;
use pagefold_labs::output_lines::RegionLine;
use pagefold_sys::forked_copy::ForkedCopy;
use pagefold_sys::mapping::{self, Access, MadviseAdvice, Mapping};
use rustix::process::DumpableBehavior;
use rustix::thread::{Gid, Uid};

const HUGE_PAGE_SIZE_FILE: &str = "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size";

/// How regions are split into VMAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmaSplit {
    /// Not split.
    Unsplit,
    /// Into this many VMAs each, at most one for each page.
    Count(u64),
    /// One VMA for each page.
    PerPage,
}

/// Options of the whole layout.
#[derive(Debug)]
pub struct LayoutOptions {
    /// Processes with different salts have no unique content in common.
    pub salt: String,
    /// Advise the kernel that all regions are mergeable.
    pub mergeable: bool,
    /// Make the whole process mergeable.
    pub merge_any: bool,
    /// Become this user once everything is set up.
    pub uid: Option<u32>,
    /// How regions are split. Huge and volatile ones are not split.
    pub vma_split: VmaSplit,
    /// The time between two rewrites of volatile pages.
    pub rewrite_interval: Duration,
    /// Whether a rewrite waits until pages of this process are merged.
    pub awaits_merge: bool,
    /// The directory for the files of file mappings.
    pub file_directory: PathBuf,
}

/// Laid-out memory. It stays unchanged until this is dropped.
#[derive(Debug)]
pub struct MemoryLayout {
    /// The regions, in the order of the SPEC.
    pub regions: Vec<RegionLine>,
    _static_mappings: Vec<Mapping>,
    _rewriter: Option<Rewriter>,
    _child: Option<ForkedCopy>,
}

/// Lay out memory. Call it on the main thread while that is the only thread: changing the user and forking affect the
/// calling thread only.
pub fn create_layout(items: &[SpecItem], options: &LayoutOptions) -> Result<MemoryLayout> {
    if options.merge_any {
        mapping::set_merge_any(true).context("prctl(PR_SET_MEMORY_MERGE): it needs Linux 6.4 with KSM")?;
    }
    let forks = items.iter().any(|item| item.kind == RegionKind::ForkShared);
    let mut static_mappings = Vec::new();
    let mut rewritten = Vec::new();
    let mut regions = Vec::new();
    for (position, item) in items.iter().enumerate() {
        let region = format!("{}={}", item.kind.name(), item.pages);
        let origin = content_origin(item, position, &options.salt);
        let mut mapping = map_item(item, origin, options).with_context(|| format!("mapping {region}"))?;
        let range = 0..mapping.len();
        let advice = if item.kind.is_huge() { MadviseAdvice::HugePage } else { MadviseAdvice::NoHugePage };
        advise_if_supported(&mut mapping, advice)?;
        if options.mergeable {
            mapping
                .advise(range.clone(), MadviseAdvice::Mergeable)
                .context("MADV_MERGEABLE: it needs a kernel with KSM")?;
        }
        if forks && item.kind != RegionKind::ForkShared {
            mapping.advise(range, MadviseAdvice::DontFork).context("MADV_DONTFORK")?;
        }
        fill_item(item, origin, &mut mapping);
        if item.kind.is_huge() {
            collapse(&mut mapping)?;
        }
        let vmas = split_vmas(item, &mut mapping, options.vma_split).with_context(|| {
            format!("cutting {region} into VMAs: vm.max_map_count limits how many a process may have")
        })?;
        let expected = item.expected_pages();
        regions.push(RegionLine {
            kind: item.kind.name().to_owned(),
            name: if let RegionKind::SharedContent { name } = &item.kind { Some(name.clone()) } else { None },
            start: mapping.address(),
            pages: item.pages,
            page_size: mapping::page_size() as u64,
            vmas,
            resident: expected.resident,
            zero: expected.zero,
            distinct: expected.distinct,
            child: None,
        });
        if item.kind.is_rewritten() {
            rewritten.push((item.kind.clone(), origin, mapping));
        } else {
            static_mappings.push(mapping);
        }
    }
    if let Some(uid) = options.uid {
        become_user(uid).with_context(|| format!("becoming user {uid}: that needs root"))?;
    }
    // After all other steps, so that the child has the new user, too, and before other threads start.
    let child = if forks { Some(ForkedCopy::new().context("forking the child that shares pages")?) } else { None };
    for region in regions.iter_mut().filter(|region| region.kind == RegionKind::ForkShared.name()) {
        region.child = child.as_ref().map(ForkedCopy::pid);
    }
    let rewriter = (!rewritten.is_empty()).then(|| Rewriter::start(rewritten, options));
    Ok(MemoryLayout { regions, _static_mappings: static_mappings, _rewriter: rewriter, _child: child })
}

/// Lay out a mixture.
pub fn create_mixture(mixture: &Mixture, huge_pages: bool, seed: &str, salt: &str) -> Result<Mapping> {
    let page = mapping::page_size();
    let bytes = usize::try_from(mixture.pages)? * page;
    let mut memory =
        if huge_pages { Mapping::anonymous_aligned(bytes, huge_page_bytes()?)? } else { Mapping::anonymous(bytes)? };
    advise_if_supported(&mut memory, if huge_pages { MadviseAdvice::HugePage } else { MadviseAdvice::NoHugePage })?;
    mixture.fill(memory.as_mut_slice(), page, seed, salt);
    if huge_pages {
        collapse(&mut memory)?;
    }
    Ok(memory)
}

/// The size of a transparent huge page, in bytes.
fn huge_page_bytes() -> Result<usize> {
    let huge = fs::read_to_string(HUGE_PAGE_SIZE_FILE).with_context(|| format!("reading {HUGE_PAGE_SIZE_FILE}"))?;
    huge.trim().parse().with_context(|| format!("{HUGE_PAGE_SIZE_FILE} says {huge:?}"))
}

/// The origin of a region's content. Content that is equal between processes depends neither on the salt nor on the
/// region's position in the SPEC.
fn content_origin(item: &SpecItem, position: usize, salt: &str) -> ContentOrigin {
    match &item.kind {
        RegionKind::SharedContent { name } => ContentOrigin::from_names(&["shared-content", name]),
        kind => ContentOrigin::from_names(&[salt, kind.name(), &position.to_string()]),
    }
}

fn map_item(item: &SpecItem, origin: ContentOrigin, options: &LayoutOptions) -> Result<Mapping> {
    let page = mapping::page_size();
    let bytes = usize::try_from(item.pages)?.checked_mul(page).context("more than can be addressed")?;
    Ok(match item.kind {
        RegionKind::SharedMemory => Mapping::shared(bytes)?,
        RegionKind::File | RegionKind::FileWritten => {
            let mut contents = vec![0; bytes];
            // Privately written pages, numbered from 0, differ from the file's content.
            fill_pages(origin, item.pages, &mut contents);
            let directory = &options.file_directory;
            Mapping::private_file(directory, &contents)
                .with_context(|| format!("a file without a name (O_TMPFILE) in {}", directory.display()))?
        }
        RegionKind::Huge | RegionKind::HugeZero => {
            let huge = huge_page_bytes()?;
            ensure!(bytes.is_multiple_of(huge), "huge pages must be filled: ask for a multiple of {}", huge / page);
            Mapping::anonymous_aligned(bytes, huge)?
        }
        _ => Mapping::anonymous(bytes)?,
    })
}

/// Give advice that a kernel without transparent huge pages refuses with `EINVAL`, which is ignored: the advice has no
/// meaning there.
fn advise_if_supported(mapping: &mut Mapping, advice: MadviseAdvice) -> Result<()> {
    match mapping.advise(0..mapping.len(), advice) {
        Err(error) if error.kind() != io::ErrorKind::InvalidInput => Err(error).with_context(|| format!("{advice:?}")),
        _ => Ok(()),
    }
}

/// Collapse a mapping into huge pages. Free memory may be fragmented for a moment, or its pages in use: the kernel then
/// asks for another attempt (madvise(2)).
fn collapse(mapping: &mut Mapping) -> Result<()> {
    const MAX_ATTEMPTS: u32 = 200;
    const ATTEMPT_INTERVAL: Duration = Duration::from_millis(100);
    for _ in 1..MAX_ATTEMPTS {
        match mapping.advise(0..mapping.len(), MadviseAdvice::Collapse) {
            Err(error) if is_temporary(&error) => std::thread::sleep(ATTEMPT_INTERVAL),
            _ => break,
        }
    }
    advise_if_supported(mapping, MadviseAdvice::Collapse)
}

fn is_temporary(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::OutOfMemory | io::ErrorKind::WouldBlock | io::ErrorKind::ResourceBusy)
}

fn fill_item(item: &SpecItem, origin: ContentOrigin, mapping: &mut Mapping) {
    let page = mapping::page_size();
    match item.kind {
        RegionKind::Untouched => {}
        RegionKind::ReadZero | RegionKind::File => {
            for page in mapping.as_slice().chunks(page) {
                black_box(page[0]);
            }
        }
        RegionKind::Zero | RegionKind::RewrittenZero | RegionKind::HugeZero => mapping.as_mut_slice().fill(0),
        RegionKind::Text | RegionKind::RewrittenText => {
            mapping.as_mut_slice().chunks_mut(page).for_each(content::fill_text)
        }
        RegionKind::Pattern => mapping.as_mut_slice().chunks_mut(page).for_each(content::fill_pattern),
        RegionKind::Elf => mapping.as_mut_slice().chunks_mut(page).for_each(content::fill_elf_header),
        RegionKind::Within { copies } => {
            // The copies of a content are spread over the region.
            let groups = item.pages / copies;
            for (number, page) in (0..).zip(mapping.as_mut_slice().chunks_mut(page)) {
                origin.fill_page(page, number % groups);
            }
        }
        RegionKind::Unique
        | RegionKind::SharedContent { .. }
        | RegionKind::Volatile
        | RegionKind::Huge
        | RegionKind::SharedMemory
        | RegionKind::FileWritten
        | RegionKind::ForkShared => fill_pages(origin, 0, mapping.as_mut_slice()),
    }
}

fn fill_pages(origin: ContentOrigin, first_number: u64, bytes: &mut [u8]) {
    for (number, page) in (first_number..).zip(bytes.chunks_mut(mapping::page_size())) {
        origin.fill_page(page, number);
    }
}

/// Split a region into VMAs by making every other part read-only. Returns the number of VMAs.
fn split_vmas(item: &SpecItem, mapping: &mut Mapping, split: VmaSplit) -> io::Result<u64> {
    let parts = match split {
        VmaSplit::Unsplit => 1,
        VmaSplit::Count(regions) => regions.clamp(1, item.pages),
        VmaSplit::PerPage => item.pages,
    };
    if item.kind.is_huge() || item.kind.is_rewritten() {
        return Ok(1);
    }
    let page = mapping::page_size();
    // The first page of a part, as an offset in bytes; the sizes of parts differ by at most one page.
    let start = |part: u64| (u128::from(item.pages) * u128::from(part) / u128::from(parts)) as usize * page;
    for part in (1..parts).step_by(2) {
        mapping.protect(start(part)..start(part + 1), Access::Read)?;
    }
    Ok(parts)
}

/// Become a user as a daemon does: the only group has the same number. The process stays readable for that user.
fn become_user(uid: u32) -> io::Result<()> {
    let (user, group) = (Uid::from_raw(uid), Gid::from_raw(uid));
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_thread_res_gid(group, group, group)?;
    rustix::thread::set_thread_res_uid(user, user, user)?;
    // Changing the user gave /proc/PID to root (prctl(2), PR_SET_DUMPABLE).
    Ok(rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable)?)
}

/// Whether KSM has merged pages of this process, as far as the kernel shows it.
fn is_any_page_merged() -> bool {
    fs::read_to_string("/proc/self/ksm_merging_pages").is_ok_and(|pages| pages.trim() != "0")
}

/// A thread that rewrites pages, each time with new content that was never there before, or with the same content.
#[derive(Debug)]
struct Rewriter {
    /// The thread ends when this is dropped.
    stop_on_drop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Rewriter {
    fn start(mut mappings: Vec<(RegionKind, ContentOrigin, Mapping)>, options: &LayoutOptions) -> Self {
        let (interval, awaits_merge) = (options.rewrite_interval, options.awaits_merge);
        let (sender, receiver) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let page = mapping::page_size();
            // Each mapping continues the numbers of its first contents.
            let mut written: Vec<u64> = mappings.iter().map(|(.., mapping)| (mapping.len() / page) as u64).collect();
            while receiver.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                if awaits_merge && !is_any_page_merged() {
                    continue;
                }
                for ((kind, origin, mapping), written) in mappings.iter_mut().zip(&mut written) {
                    for page in mapping.as_mut_slice().chunks_mut(page) {
                        match kind {
                            RegionKind::RewrittenZero => black_box(&mut *page).fill(0),
                            RegionKind::RewrittenText => content::fill_text(black_box(page)),
                            _ => origin.fill_page(page, *written),
                        }
                        *written += 1;
                    }
                }
            }
        });
        Self { stop_on_drop: Some(sender), thread: Some(thread) }
    }
}

impl Drop for Rewriter {
    fn drop(&mut self) {
        drop(self.stop_on_drop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
