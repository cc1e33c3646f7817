//! Lays out memory with known content in this process.
//!
//! Each region is a mapping of its own between guards, is kept from becoming huge pages unless asked for, and holds
//! exactly what [`pagefold_labs::spec::Item::truth`] says. What the process has besides (program, libraries, heap,
//! stacks, vdso) is not part of the layout: compare region by region.

use std::fs;
use std::hint::black_box;
use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pagefold_labs::content::{self, Origin};
use pagefold_labs::lines::Region;
use pagefold_labs::mixture::Mixture;
use pagefold_labs::spec::{Item, Kind};
use pagefold_sys::forked::ForkedCopy;
use pagefold_sys::mapping::{self, Access, Advice, Mapping};
use rustix::process::DumpableBehavior;
use rustix::thread::{Gid, Uid};

const HUGE_PAGE_SIZE: &str = "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size";

/// How regions are cut into VMAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Not at all.
    Whole,
    /// Into this many each, at most one for each page.
    Regions(u64),
    /// One for each page.
    Pages,
}

/// What holds for the layout as a whole.
#[derive(Debug)]
pub struct Options {
    /// Processes of different salts have no unique content in common.
    pub salt: String,
    /// Advise the kernel that all regions are mergeable.
    pub mergeable: bool,
    /// Make the whole process mergeable.
    pub merge_any: bool,
    /// Become this user once everything is set up.
    pub uid: Option<u32>,
    /// How regions are cut. Huge and volatile ones stay whole.
    pub cut: Cut,
    /// The time between two rewritings of volatile pages.
    pub interval: Duration,
    /// Where the files of file mappings are made.
    pub directory: PathBuf,
}

/// Memory that was laid out. It stays as it is until this is dropped.
#[derive(Debug)]
pub struct Layout {
    /// The regions, in the order of the SPEC.
    pub regions: Vec<Region>,
    _still: Vec<Mapping>,
    _volatile: Option<Rewriter>,
    _child: Option<ForkedCopy>,
}

/// Lay out memory. To be called on the main thread while it is the only one: changing the user and forking concern the
/// calling thread.
pub fn lay_out(items: &[Item], options: &Options) -> Result<Layout> {
    if options.merge_any {
        mapping::merge_any(true).context("prctl(PR_SET_MEMORY_MERGE): it needs Linux 6.4 with KSM")?;
    }
    let forks = items.iter().any(|item| item.kind == Kind::ForkShared);
    let mut still = Vec::new();
    let mut volatile = Vec::new();
    let mut regions = Vec::new();
    for (place, item) in items.iter().enumerate() {
        let region = format!("{}={}", item.kind.name(), item.pages);
        let origin = origin(item, place, &options.salt);
        let mut mapping = map(item, origin, options).with_context(|| format!("mapping {region}"))?;
        let whole = 0..mapping.len();
        let advice = if item.kind.is_huge() { Advice::HugePage } else { Advice::NoHugePage };
        advise_if_known(&mut mapping, advice)?;
        if options.mergeable {
            mapping.advise(whole.clone(), Advice::Mergeable).context("MADV_MERGEABLE: it needs a kernel with KSM")?;
        }
        if forks && item.kind != Kind::ForkShared {
            mapping.advise(whole, Advice::DontFork).context("MADV_DONTFORK")?;
        }
        fill(item, origin, &mut mapping);
        if item.kind.is_huge() {
            advise_if_known(&mut mapping, Advice::Collapse)?;
        }
        let vmas = cut(item, &mut mapping, options.cut).with_context(|| {
            format!("cutting {region} into VMAs: vm.max_map_count limits how many a process may have")
        })?;
        let truth = item.truth();
        regions.push(Region {
            kind: item.kind.name().to_owned(),
            name: if let Kind::SharedContent { name } = &item.kind { Some(name.clone()) } else { None },
            start: mapping.address(),
            pages: item.pages,
            page_size: mapping::page_size() as u64,
            vmas,
            resident: truth.resident,
            zero: truth.zero,
            distinct: truth.distinct,
            child: None,
        });
        if item.kind.is_rewritten() {
            volatile.push((item.kind.clone(), origin, mapping));
        } else {
            still.push(mapping);
        }
    }
    if let Some(uid) = options.uid {
        become_user(uid).with_context(|| format!("becoming user {uid}: that needs root"))?;
    }
    // Last of all, so that the child has the user too, and before there are other threads.
    let child = if forks { Some(ForkedCopy::new().context("forking the child that shares pages")?) } else { None };
    for region in regions.iter_mut().filter(|region| region.kind == Kind::ForkShared.name()) {
        region.child = child.as_ref().map(ForkedCopy::pid);
    }
    let volatile = (!volatile.is_empty()).then(|| Rewriter::start(volatile, options.interval));
    Ok(Layout { regions, _still: still, _volatile: volatile, _child: child })
}

/// Lay out a mixture.
pub fn mix(mixture: &Mixture, huge: bool, seed: &str, salt: &str) -> Result<Mapping> {
    let page = mapping::page_size();
    let bytes = usize::try_from(mixture.pages)? * page;
    let mut memory =
        if huge { Mapping::anonymous_aligned(bytes, huge_page_size()?)? } else { Mapping::anonymous(bytes)? };
    advise_if_known(&mut memory, if huge { Advice::HugePage } else { Advice::NoHugePage })?;
    mixture.fill(memory.as_mut_slice(), page, seed, salt);
    if huge {
        advise_if_known(&mut memory, Advice::Collapse)?;
    }
    Ok(memory)
}

/// The size of a transparent huge page, in bytes.
fn huge_page_size() -> Result<usize> {
    let huge = fs::read_to_string(HUGE_PAGE_SIZE).with_context(|| format!("reading {HUGE_PAGE_SIZE}"))?;
    huge.trim().parse().with_context(|| format!("{HUGE_PAGE_SIZE} says {huge:?}"))
}

/// Where a region's content comes from. Content that is equal between processes knows neither the salt nor the place
/// of the region in the SPEC.
fn origin(item: &Item, place: usize, salt: &str) -> Origin {
    match &item.kind {
        Kind::SharedContent { name } => Origin::of(&["shared-content", name]),
        kind => Origin::of(&[salt, kind.name(), &place.to_string()]),
    }
}

fn map(item: &Item, origin: Origin, options: &Options) -> Result<Mapping> {
    let page = mapping::page_size();
    let bytes = usize::try_from(item.pages)?.checked_mul(page).context("more than can be addressed")?;
    Ok(match item.kind {
        Kind::SharedMemory => Mapping::shared(bytes)?,
        Kind::File | Kind::FileWritten => {
            let mut contents = vec![0; bytes];
            // What is written privately, from number 0 on, differs from what the file holds.
            write_all(origin, item.pages, &mut contents);
            let directory = &options.directory;
            Mapping::file(directory, &contents)
                .with_context(|| format!("a file without a name (O_TMPFILE) in {}", directory.display()))?
        }
        Kind::Huge | Kind::HugeZero => {
            let huge = huge_page_size()?;
            ensure!(bytes.is_multiple_of(huge), "huge pages must be filled: ask for a multiple of {}", huge / page);
            Mapping::anonymous_aligned(bytes, huge)?
        }
        _ => Mapping::anonymous(bytes)?,
    })
}

/// Give advice that a kernel without transparent huge pages answers with `EINVAL`, which is all right: there it means
/// nothing.
fn advise_if_known(mapping: &mut Mapping, advice: Advice) -> Result<()> {
    match mapping.advise(0..mapping.len(), advice) {
        Err(error) if error.kind() != io::ErrorKind::InvalidInput => Err(error).with_context(|| format!("{advice:?}")),
        _ => Ok(()),
    }
}

fn fill(item: &Item, origin: Origin, mapping: &mut Mapping) {
    let page = mapping::page_size();
    match item.kind {
        Kind::Untouched => {}
        Kind::ReadZero | Kind::File => {
            for page in mapping.as_slice().chunks(page) {
                black_box(page[0]);
            }
        }
        Kind::Zero | Kind::HotZero | Kind::HugeZero => mapping.as_mut_slice().fill(0),
        Kind::Text | Kind::HotText => mapping.as_mut_slice().chunks_mut(page).for_each(content::text),
        Kind::Pattern => mapping.as_mut_slice().chunks_mut(page).for_each(content::pattern),
        Kind::Elf => mapping.as_mut_slice().chunks_mut(page).for_each(content::elf),
        Kind::Within { copies } => {
            // The copies of a content are spread over the region.
            let groups = item.pages / copies;
            for (number, page) in (0..).zip(mapping.as_mut_slice().chunks_mut(page)) {
                origin.write(page, number % groups);
            }
        }
        Kind::Unique
        | Kind::SharedContent { .. }
        | Kind::Volatile
        | Kind::Huge
        | Kind::SharedMemory
        | Kind::FileWritten
        | Kind::ForkShared => write_all(origin, 0, mapping.as_mut_slice()),
    }
}

fn write_all(origin: Origin, first: u64, bytes: &mut [u8]) {
    for (number, page) in (first..).zip(bytes.chunks_mut(mapping::page_size())) {
        origin.write(page, number);
    }
}

/// Cut a region into VMAs by making every other piece read-only, and tell how many there are.
fn cut(item: &Item, mapping: &mut Mapping, cut: Cut) -> io::Result<u64> {
    let pieces = match cut {
        Cut::Whole => 1,
        Cut::Regions(regions) => regions.clamp(1, item.pages),
        Cut::Pages => item.pages,
    };
    if item.kind.is_huge() || item.kind.is_rewritten() {
        return Ok(1);
    }
    let page = mapping::page_size();
    // The first page of a piece, as an offset in bytes; the pieces differ by at most one page.
    let start = |piece: u64| (u128::from(item.pages) * u128::from(piece) / u128::from(pieces)) as usize * page;
    for piece in (1..pieces).step_by(2) {
        mapping.protect(start(piece)..start(piece + 1), Access::Read)?;
    }
    Ok(pieces)
}

/// Become a user as a daemon does: its only group has the same number. The process stays readable to that user.
fn become_user(uid: u32) -> io::Result<()> {
    let (user, group) = (Uid::from_raw(uid), Gid::from_raw(uid));
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_thread_res_gid(group, group, group)?;
    rustix::thread::set_thread_res_uid(user, user, user)?;
    // Changing the user made /proc/PID root's (prctl(2), PR_SET_DUMPABLE).
    Ok(rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable)?)
}

/// A thread that rewrites pages, each time with content that was never there before, or with what is there.
#[derive(Debug)]
struct Rewriter {
    /// The thread ends once there is none.
    goes_on: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Rewriter {
    fn start(mut mappings: Vec<(Kind, Origin, Mapping)>, interval: Duration) -> Self {
        let (goes_on, ended) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let page = mapping::page_size();
            // Each mapping counts on from its first filling.
            let mut written: Vec<u64> = mappings.iter().map(|(.., mapping)| (mapping.len() / page) as u64).collect();
            while ended.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                for ((kind, origin, mapping), written) in mappings.iter_mut().zip(&mut written) {
                    for page in mapping.as_mut_slice().chunks_mut(page) {
                        match kind {
                            Kind::HotZero => black_box(&mut *page).fill(0),
                            Kind::HotText => content::text(black_box(page)),
                            _ => origin.write(page, *written),
                        }
                        *written += 1;
                    }
                }
            }
        });
        Self { goes_on: Some(goes_on), thread: Some(thread) }
    }
}

impl Drop for Rewriter {
    fn drop(&mut self) {
        drop(self.goes_on.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
