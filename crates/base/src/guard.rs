//! The memory guard: whether what is about to take memory fits, and how far it can go where it does not.
//!
//! Unmerging gives each merged page a frame of its own, and nobody is asked whether there is one: the kernel breaks the
//! sharing by faults (mm/ksm.c, `break_ksm`), each of which charges a page and may wake the OOM killer. So the frames
//! are counted first ([`FrameNeed`]), held against every limit that they would count to ([`MemoryHeadroom`]), and only what passes
//! none of them is done ([`check_memory`]).
//!
//! # What is needed
//! A page on a KSM frame is copied also when it is the last one there (mm/memory.c, `wp_can_reuse_anon_folio` refuses
//! KSM folios), and the frame comes back with its last mapping. So withdrawing k of a frame's n mappings takes k
//! frames, or n - 1 if k = n, and on the way there never more than one frame above what it comes to: a copy takes one,
//! and at most gives one back; the reserve has that one. Pages of zeros that KSM placed (`ksm_zero_pages`) take a frame
//! each from 6.6 on; before, they stay what they are. Page tables are there already, since every page in question is
//! mapped.
//!
//! A cgroup is charged for all copies of its processes, and given no credit: the frame that comes back was charged to
//! whoever held it when it was merged, who may be somebody else.
//!
//! # What there is
//! Of the host `MemAvailable`, less a reserve: see [`reserve`]. It leaves out the watermarks already (mm/show_mem.c,
//! `si_mem_available`), and is an estimate. Of a cgroup, and each one above it, the limit less the usage, where
//! inactive file pages that are clean count as free: they are the first to be reclaimed (mm/vmscan.c). Swap makes no
//! room: what fits only because something else is swapped out is [`MemoryVerdict::FitsWithSwap`], and not done unless forced.

use crate::reading::Absent;
use crate::units::{AddressRange, Bytes, PageSize, Pages};
use std::collections::BTreeMap;
use std::fmt;

/// Where memory counts to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LimitScope {
    /// The whole host.
    Host,
    /// A cgroup with all below it, by its path in the hierarchy of the memory controller.
    Cgroup(String),
}

impl LimitScope {
    /// Whether what is charged to a cgroup counts here.
    pub fn contains_cgroup(&self, cgroup: &str) -> bool {
        match self {
            Self::Host => true,
            Self::Cgroup(top) => {
                let rest = cgroup.strip_prefix(top.trim_end_matches('/'));
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            }
        }
    }
}

impl fmt::Display for LimitScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Host => "this host",
            Self::Cgroup(path) => path,
        })
    }
}

/// What kind of limit it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitKind {
    /// `MemAvailable` less the reserve. Beyond it the OOM killer of the host.
    Available,
    /// `memory.max`, or `memory.limit_in_bytes` of v1. Beyond it the OOM killer of the cgroup.
    Max,
    /// `memory.high`. Beyond it the processes are throttled.
    High,
    /// `memory.memsw.limit_in_bytes` of v1: memory and swap together.
    MemoryAndSwap,
}

impl LimitKind {
    /// The kernel's name of it.
    pub fn kernel_name(self) -> &'static str {
        match self {
            Self::Available => "MemAvailable",
            Self::Max => "memory.max",
            Self::High => "memory.high",
            Self::MemoryAndSwap => "memory.memsw",
        }
    }
}

/// A limit, and how much of it is left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryLimit {
    /// Whose.
    pub scope: LimitScope,
    /// Which.
    pub kind: LimitKind,
    /// The limit itself; of the host `MemAvailable` before the reserve.
    pub limit: Bytes,
    /// What may still be taken.
    pub headroom: Bytes,
    /// What may be taken beyond it by swapping out.
    pub swap_headroom: Bytes,
}

/// All limits that count for what is to be done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryHeadroom {
    /// Those that could be read.
    pub limits: Vec<MemoryLimit>,
    /// Those that could not, and why.
    pub unreadable: Vec<(LimitScope, Absent)>,
}

/// The memory that is left alone beside what the kernel leaves alone: `min_free_kbytes` once more, for what takes
/// memory meanwhile, and a hundredth of all, because `MemAvailable` takes half of the page cache for free.
pub fn reserve(total: Bytes, min_free: Bytes) -> Bytes {
    min_free + Bytes(total.0 / 100)
}

/// The frames that something takes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FrameNeed {
    /// Of the host: the pages that get a frame, less the frames that come free.
    pub host: Pages,
    /// Of the cgroups of the processes: the pages that get a frame.
    pub cgroups: BTreeMap<String, Pages>,
}

impl FrameNeed {
    /// Of copies in a process of this cgroup, of which so many give a frame back.
    pub fn for_cgroup(cgroup: Option<&str>, copies: Pages, returned: Pages) -> Self {
        let cgroups = cgroup.map(|path| (path.to_owned(), copies)).into_iter().collect();
        Self { host: copies.saturating_sub(returned), cgroups }
    }

    /// What counts to a place.
    pub fn in_scope(&self, place: &LimitScope) -> Pages {
        match place {
            LimitScope::Host => self.host,
            LimitScope::Cgroup(_) => {
                self.cgroups.iter().filter(|(cgroup, _)| place.contains_cgroup(cgroup)).map(|(_, pages)| *pages).sum()
            }
        }
    }
}

impl std::ops::AddAssign<&Self> for FrameNeed {
    fn add_assign(&mut self, other: &Self) {
        self.host += other.host;
        for (cgroup, pages) in &other.cgroups {
            *self.cgroups.entry(cgroup.clone()).or_default() += *pages;
        }
    }
}

/// Whether something may be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryVerdict {
    /// No limit would be passed.
    Fits,
    /// It fits only if as much is swapped out.
    FitsWithSwap,
    /// A limit would be passed.
    OverLimit,
    /// A limit could not be read.
    Unknown,
}

/// A verdict with what it rests on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryCheck {
    /// What it comes to.
    pub verdict: MemoryVerdict,
    /// Each limit with the bytes that would count to it, those with the least left over first.
    pub limits_and_needs: Vec<(MemoryLimit, Bytes)>,
    /// Limits that could not be read, and why.
    pub unreadable: Vec<(LimitScope, Absent)>,
}

/// Hold a need against every limit. Nothing needed fits everywhere.
pub fn check_memory(need: &FrameNeed, headroom: &MemoryHeadroom, page: PageSize) -> MemoryCheck {
    let mut limits: Vec<(MemoryLimit, Bytes)> =
        headroom.limits.iter().map(|limit| (limit.clone(), page.bytes_of(need.in_scope(&limit.scope)))).collect();
    limits.sort_by_key(|(limit, needed)| i128::from(limit.headroom.0) - i128::from(needed.0));
    let passed = |swap: bool| {
        limits.iter().any(|(limit, needed)| {
            *needed > Bytes(limit.headroom.0.saturating_add(if swap { limit.swap_headroom.0 } else { 0 }))
                && *needed > Bytes::ZERO
        })
    };
    let nothing = need.host == Pages::ZERO && need.cgroups.values().all(|pages| *pages == Pages::ZERO);
    let verdict = match (passed(true), passed(false)) {
        (true, _) => MemoryVerdict::OverLimit,
        _ if !headroom.unreadable.is_empty() && !nothing => MemoryVerdict::Unknown,
        (_, true) => MemoryVerdict::FitsWithSwap,
        _ => MemoryVerdict::Fits,
    };
    MemoryCheck { verdict, limits_and_needs: limits, unreadable: headroom.unreadable.clone() }
}

/// How many of these needs, one after the other, fit together before the first that does not.
pub fn count_needs_that_fit<'a>(
    needs: impl IntoIterator<Item = &'a FrameNeed>,
    headroom: &MemoryHeadroom,
    page: PageSize,
) -> usize {
    let mut sum = FrameNeed::default();
    needs
        .into_iter()
        .take_while(|need| {
            sum += need;
            check_memory(&sum, headroom, page).verdict == MemoryVerdict::Fits
        })
        .count()
}

/// A range in parts with at most so many of its pages in each, cut before a page; the parts are all of the range.
/// `pages` are the addresses of pages within it, ascending. Returns each part with the number of its pages.
pub fn split_by_page_count(range: AddressRange, pages: &[u64], at_most: usize) -> Vec<(AddressRange, usize)> {
    let mut parts = Vec::new();
    let mut start = range.start;
    let mut chunks = pages.chunks(at_most.max(1)).peekable();
    while let Some(chunk) = chunks.next() {
        let end = chunks.peek().map_or(range.end, |next| next[0]);
        parts.push((AddressRange { start, end }, chunk.len()));
        start = end;
    }
    if pages.is_empty() && range.start < range.end {
        parts.push((range, 0));
    }
    parts
}

#[cfg(test)]
mod tests;
