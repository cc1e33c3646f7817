//! The port: all that Pagefold asks of a host and does to it, and the adapters that need no privilege.
//!
//! [`Host`] and [`ProcessHandle`] are the only way in which the rest of Pagefold sees a machine. There are three adapters:
//! the live one (`pagefold-linux`), a recording read back from a folder, and a [`faulty_host`] one that wraps another
//! and fails where a test tells it to; [`counting_host`] wraps one, too, for whoever wants to see it answer. Files are asked
//! for by their path below the root, and parsed by [`parse`], whose functions take bytes and never touch a system;
//! [`observe`] puts both together. Page contents cross the port as bytes (live) or as the fingerprint somebody took
//! earlier (recording): see [`PageContent`].

#![forbid(unsafe_code)]

pub mod action;
pub mod counting_host;
#[cfg(any(test, feature = "fake"))]
pub mod fake_host;
pub mod faulty_host;
pub mod memory_headroom;
pub mod observe;
pub mod parse;
pub mod transaction;

use action::{Action, ActionError, ActionOutcome};
use pagefold_base::content::ContentKind;
use pagefold_base::{Absent, AddressRange, Fingerprint, PageSize, Pfn, Pid, ProcessId, Reading};
use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

/// A host: live, recorded or faulty.
pub trait Host: Sync {
    /// What it is, in a few words for people: `this host`, `recording DIR`.
    fn describe(&self) -> String;

    /// The size of its base pages.
    fn page_size(&self) -> PageSize;

    /// The bytes of a file, by its path below the root without a leading slash: `sys/kernel/mm/ksm/run`.
    fn read(&self, path: &str) -> Reading<Vec<u8>>;

    /// The names in a directory, by its path below the root, sorted.
    fn list(&self, path: &str) -> Reading<Vec<String>>;

    /// The numbers of the processes it shows, ascending.
    fn pids(&self) -> Reading<Vec<Pid>>;

    /// Take hold of a process. What the handle reads is of that process or `Vanished`, also after its number has been
    /// given to another.
    fn open(&self, pid: Pid) -> Reading<Box<dyn ProcessHandle + '_>>;

    /// The flags of frames (`/proc/kpageflags`), in the order of `frames`, which is ascending. Needs root.
    fn frame_flags(&self, frames: &[Pfn]) -> Reading<Vec<FrameFlags>>;

    /// How many times each frame is mapped (`/proc/kpagecount`), in the order of `frames`, which is ascending. Needs
    /// root.
    fn frame_mappings(&self, frames: &[Pfn]) -> Reading<Vec<u64>>;

    /// Follow from now on which programs begin. Absent where the host does not tell, or not everybody.
    fn follow_programs(&self) -> Reading<Box<dyn ExecEvents>> {
        Err(Absent::NotOnThisKernel)
    }

    /// Take the lock that all Pagefolds on this host share, whatever their state directories. By default there is none.
    ///
    /// # Errors
    /// The Pagefold that has it.
    fn acquire_lock(&self) -> Result<HostLock, LockHolder> {
        Ok(HostLock::Unavailable)
    }

    /// Carry out an action. The only way in which anything is changed.
    fn apply(&self, action: &Action) -> Result<ActionOutcome, ActionError>;

    /// Carry out an action, and end the wait for a process that does not answer once `stop` is set. By default an
    /// action waits for no process.
    ///
    /// # Errors
    /// As [`Self::apply`]. An action that was stopped may have been carried out or may still be.
    fn apply_until_stopped(&self, action: &Action, _stop: &AtomicBool) -> Result<ActionOutcome, ActionError> {
        self.apply(action)
    }
}

/// Hold exactly this process: its number may have been given to another one.
///
/// # Errors
/// `Vanished` where the process has ended.
pub fn hold(host: &dyn Host, process: ProcessId) -> Reading<Box<dyn ProcessHandle + '_>> {
    let handle = host.open(process.pid)?;
    if handle.id() == process { Ok(handle) } else { Err(Absent::Vanished) }
}

/// The lock that all Pagefolds on a host share.
#[derive(Debug)]
pub enum HostLock {
    /// It is held until this is dropped.
    Acquired(OwnedFd),
    /// There is none, or it takes more privilege than this process has, which then cannot change KSM's settings either.
    Unavailable,
    /// A program that is no Pagefold keeps it from being taken.
    Obstructed,
}

/// Which Pagefold changes a host, as far as that can be seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LockHolder {
    /// Its process.
    pub pid: Option<u32>,
    /// Its state directory, by the path that it has there.
    pub state_directory: Option<PathBuf>,
}

/// Programs as they begin.
pub trait ExecEvents {
    /// Those that have begun since the last call, without waiting for any. An error where nothing more comes.
    fn take_started(&mut self) -> Reading<StartedPrograms>;
}

/// Programs that have begun.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StartedPrograms {
    /// The processes that they begin in.
    pub pids: BTreeSet<Pid>,
    /// Whether there were more than could be told.
    pub overflowed: bool,
}

/// A process that is held. Dropping it lets go.
pub trait ProcessHandle: Send + Sync {
    /// Which one.
    fn id(&self) -> ProcessId;

    /// The bytes of a file below `/proc/PID`: `smaps`.
    fn read(&self, file: &str) -> Reading<Vec<u8>>;

    /// Where the links in a directory below `/proc/PID` point: `fd`.
    fn links(&self, directory: &str) -> Reading<Vec<String>>;

    /// The resident anonymous pages of disjoint ascending ranges in address order, as runs that end where their range
    /// ends. The kernel's shared zero page, file pages and swapped-out pages are not among them. Costs nothing for what
    /// is not mapped.
    fn resident(&self, ranges: &[AddressRange]) -> Reading<Vec<PageRun>>;

    /// What each page of a range is mapped to, in address order (`/proc/PID/pagemap`).
    fn mappings(&self, range: AddressRange) -> Reading<Vec<PagemapEntry>>;

    /// Look at pages in the order of `runs`, each at most once: `sink` gets the position of each page in that order
    /// and what was seen. Pages that are no longer resident are [`PageContent::NotResident`], never faulted in. On an error
    /// the pages that `sink` was not called for were not seen.
    fn contents(&self, way: ReadMethod, runs: &[PageRun], sink: &mut dyn FnMut(usize, PageView<'_>)) -> Reading<()>;

    /// Have the process itself say whether it is enrolled whole (`PR_GET_MEMORY_MERGE`). A thread of it is stopped for
    /// that, so it is for those who are about to change it: see [`action::query_merge_any`].
    fn ask_merge_any(&self) -> Result<bool, ActionError> {
        Err(ActionError::Unsupported("only a process of the live host can be asked what it is".to_owned()))
    }
}

/// A run of resident pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRun {
    /// Address of the first page.
    pub address: u64,
    /// How many pages.
    pub pages: u32,
    /// Whether the run is mapped by huge pages (of the PMD level).
    pub huge: bool,
}

/// How to read the pages of a region. See `docs/decisions/0031-read-pages-without-side-effects.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadMethod {
    /// `process_vm_readv`: fastest, and only for pages that nobody else maps, because it pins the page and pinning
    /// breaks any sharing of it (mm/gup.c, `gup_must_unshare`). Pages that turn out to be shared are read as by
    /// `Memory`.
    ProcessVmReadv,
    /// `/proc/PID/mem`: takes a reference without pinning and leaves sharing as it is.
    ProcMem {
        /// Whether to find out which pages are KSM pages.
        detect_merged: bool,
    },
}

/// What was seen of a page.
#[derive(Clone, Copy, Debug)]
pub struct PageView<'a> {
    /// Its content.
    pub content: PageContent<'a>,
    /// Whether it is a KSM page.
    pub merged: bool,
    /// Whether nobody else maps it.
    pub exclusive: bool,
    /// Its frame, where the privilege allows to know it.
    pub frame: Option<Pfn>,
}

/// The content of a page.
#[derive(Clone, Copy, Debug)]
pub enum PageContent<'a> {
    /// Its bytes, a page long.
    Bytes(&'a [u8]),
    /// Its fingerprint, from a recording, with the kind of its content where that was noted.
    Fingerprint(Fingerprint, Option<ContentKind>),
    /// It changed while it was being recorded.
    Volatile,
    /// It is no longer resident.
    NotResident,
}

/// An entry of `/proc/PID/pagemap` (Documentation/admin-guide/mm/pagemap.rst).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PagemapEntry {
    /// Bit 63: the page is in memory.
    pub present: bool,
    /// Bit 62: the page is swapped out.
    pub swapped: bool,
    /// Bit 61: the page is of a file or of shared memory.
    pub file: bool,
    /// Bit 56: nobody else maps the page.
    pub exclusive: bool,
    /// Bits 0-54: the frame; 0, here `None`, without CAP_SYS_ADMIN.
    pub frame: Option<Pfn>,
}

impl PagemapEntry {
    /// From the raw entry.
    pub fn from_raw(entry: u64) -> Self {
        let present = entry >> 63 & 1 == 1;
        let frame = entry & ((1 << 55) - 1);
        Self {
            present,
            swapped: entry >> 62 & 1 == 1,
            file: entry >> 61 & 1 == 1,
            exclusive: entry >> 56 & 1 == 1,
            frame: (present && frame != 0).then_some(Pfn(frame)),
        }
    }

    /// Whether the raw entry is of a page that the kernel is just moving to another frame, as it does to get free
    /// memory in one piece. It is neither present nor swapped out then, but will be back within milliseconds.
    ///
    /// The entry says it is swapped out, and in bits 0-4 to a kind of place that is none (`pte_to_pagemap_entry` in
    /// fs/proc/task_mmu.c, `SWP_MIGRATION_READ` in include/linux/swap.h): one of 23 to 30 in nearly all configurations
    /// since 5.19, of which some may be poisoned pages or memory of devices instead. Without CAP_SYS_ADMIN these bits
    /// are 0, and only pages of files and of shared memory are known to be moved: they are never swapped out so.
    pub fn is_migrating(entry: u64) -> bool {
        let seems = Self::from_raw(entry);
        seems.swapped && (seems.file || (23..=30).contains(&(entry & 31)))
    }
}

/// Flags of a frame from `/proc/kpageflags` (include/uapi/linux/kernel-page-flags.h).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrameFlags(pub u64);

impl FrameFlags {
    /// KPF_KSM: a KSM page.
    pub fn is_ksm(self) -> bool {
        self.0 >> 21 & 1 == 1
    }

    /// KPF_ANON: anonymous.
    pub fn is_anonymous(self) -> bool {
        self.0 >> 12 & 1 == 1
    }

    /// KPF_ZERO_PAGE: the kernel's shared page of zeros, small or huge.
    pub fn is_zero_page(self) -> bool {
        self.0 >> 24 & 1 == 1
    }

    /// KPF_THP: part of a transparent huge page.
    pub fn is_thp(self) -> bool {
        self.0 >> 22 & 1 == 1
    }

    /// KPF_HUGE: part of a hugetlb page.
    pub fn is_hugetlb(self) -> bool {
        self.0 >> 17 & 1 == 1
    }
}
