//! The memory guard: checks whether an action that takes memory fits the limits, and how much of it fits.
//!
//! Unmerging gives each merged page its own frame, without a check for free memory. The kernel breaks the sharing by
//! faults (mm/ksm.c, `break_ksm`); each fault charges a page and may trigger the OOM killer. So the guard counts the
//! needed frames first ([`FrameNeed`]) and compares them with each limit that they are charged to ([`MemoryHeadroom`]).
//! Only actions that stay within all limits are done ([`check_memory`]).
//!
//! # Frames needed
//! A write copies a page on a KSM frame even if it is the last mapping of the frame (mm/memory.c,
//! `wp_can_reuse_anon_folio` refuses KSM folios). The frame is freed with its last mapping. So unenrolling k of a
//! frame's n mappings takes k frames, or n - 1 if k = n. During the operation at most one more frame is in use than at
//! its end: a copy takes one frame and frees at most one. The reserve covers that frame. Zero pages that KSM placed
//! (`ksm_zero_pages`) take a frame each from 6.6 on; older kernels keep them. Page tables exist already, because each
//! of these pages is mapped.
//!
//! A cgroup is charged for all copies of its processes, and gets no credit. The freed frame was charged to the process
//! that had it at the time of the merge, which may be in another cgroup.
//!
//! # Memory available
//! For the host: `MemAvailable` less a reserve, see [`reserve`]. It already leaves out the watermarks (mm/show_mem.c,
//! `si_mem_available`), and is an estimate. For a cgroup and each of its ancestors: the limit less the usage. Clean
//! inactive file pages count as free, because the kernel reclaims them first (mm/vmscan.c). Swap does not count as free
//! memory. An action that fits only if other memory is swapped out is [`MemoryVerdict::FitsWithSwap`], and is not done
//! unless forced.

use crate::reading::Absent;
use crate::units::{AddressRange, Bytes, PageSize, Pages};
use std::collections::BTreeMap;
use std::fmt;

/// The scope of a memory limit.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LimitScope {
    /// The whole host.
    Host,
    /// A cgroup and its subtree, by its path in the hierarchy of the memory controller.
    Cgroup(String),
}

impl LimitScope {
    /// Whether a charge to a cgroup counts here.
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

/// The kind of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitKind {
    /// `MemAvailable` less the reserve. Beyond it the host's OOM killer acts.
    Available,
    /// `memory.max`, or `memory.limit_in_bytes` of v1. Beyond it the cgroup's OOM killer acts.
    Max,
    /// `memory.high`. Beyond it the kernel throttles the processes.
    High,
    /// `memory.memsw.limit_in_bytes` of v1: memory and swap together.
    MemoryAndSwap,
}

impl LimitKind {
    /// The kernel's name of the limit.
    pub fn kernel_name(self) -> &'static str {
        match self {
            Self::Available => "MemAvailable",
            Self::Max => "memory.max",
            Self::High => "memory.high",
            Self::MemoryAndSwap => "memory.memsw",
        }
    }
}

/// A limit and its headroom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryLimit {
    /// Its scope.
    pub scope: LimitScope,
    /// Its kind.
    pub kind: LimitKind,
    /// The limit itself; for the host `MemAvailable` before the reserve.
    pub limit: Bytes,
    /// Memory that can still be taken.
    pub headroom: Bytes,
    /// Memory that can be taken beyond it by swapping out.
    pub swap_headroom: Bytes,
}

/// All limits that apply to an action.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryHeadroom {
    /// Limits that could be read.
    pub limits: Vec<MemoryLimit>,
    /// Limits that could not be read, and why.
    pub unreadable: Vec<(LimitScope, Absent)>,
}

/// The memory reserve, in addition to the kernel's watermarks: `min_free_kbytes` once more, for concurrent allocations,
/// and 1 % of all memory, because `MemAvailable` counts half of the page cache as free.
pub fn reserve(total: Bytes, min_free: Bytes) -> Bytes {
    min_free + Bytes(total.0 / 100)
}

/// The frames that an action takes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FrameNeed {
    /// For the host: pages that get a frame, less frames that are freed.
    pub host: Pages,
    /// For the cgroups of the processes: pages that get a frame.
    pub cgroups: BTreeMap<String, Pages>,
}

impl FrameNeed {
    /// For copies in a process of this cgroup, of which `returned` free a frame.
    pub fn for_cgroup(cgroup: Option<&str>, copies: Pages, returned: Pages) -> Self {
        let cgroups = cgroup.map(|path| (path.to_owned(), copies)).into_iter().collect();
        Self { host: copies.saturating_sub(returned), cgroups }
    }

    /// The pages charged to a scope.
    pub fn in_scope(&self, scope: &LimitScope) -> Pages {
        match scope {
            LimitScope::Host => self.host,
            LimitScope::Cgroup(_) => {
                self.cgroups.iter().filter(|(cgroup, _)| scope.contains_cgroup(cgroup)).map(|(_, pages)| *pages).sum()
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

/// Whether an action fits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryVerdict {
    /// It stays within all limits.
    Fits,
    /// It fits only if other memory is swapped out.
    FitsWithSwap,
    /// It would exceed a limit.
    OverLimit,
    /// A limit could not be read.
    Unknown,
}

/// A verdict with the figures behind it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryCheck {
    /// The result.
    pub verdict: MemoryVerdict,
    /// Each limit with the bytes that would be charged to it, the smallest remaining headroom first.
    pub limits_and_needs: Vec<(MemoryLimit, Bytes)>,
    /// Limits that could not be read, and why.
    pub unreadable: Vec<(LimitScope, Absent)>,
}

/// Compare a need with each limit. A need of zero always fits.
pub fn check_memory(need: &FrameNeed, headroom: &MemoryHeadroom, page_size: PageSize) -> MemoryCheck {
    let mut limits: Vec<(MemoryLimit, Bytes)> =
        headroom.limits.iter().map(|limit| (limit.clone(), page_size.bytes_of(need.in_scope(&limit.scope)))).collect();
    limits.sort_by_key(|(limit, needed)| i128::from(limit.headroom.0) - i128::from(needed.0));
    let exceeds_limit = |swap: bool| {
        limits.iter().any(|(limit, needed)| {
            *needed > Bytes(limit.headroom.0.saturating_add(if swap { limit.swap_headroom.0 } else { 0 }))
                && *needed > Bytes::ZERO
        })
    };
    let needs_nothing = need.host == Pages::ZERO && need.cgroups.values().all(|pages| *pages == Pages::ZERO);
    let verdict = match (exceeds_limit(true), exceeds_limit(false)) {
        (true, _) => MemoryVerdict::OverLimit,
        _ if !headroom.unreadable.is_empty() && !needs_nothing => MemoryVerdict::Unknown,
        (_, true) => MemoryVerdict::FitsWithSwap,
        _ => MemoryVerdict::Fits,
    };
    MemoryCheck { verdict, limits_and_needs: limits, unreadable: headroom.unreadable.clone() }
}

/// How many of these needs fit together, in order, before the first one that does not.
pub fn count_needs_that_fit<'a>(
    needs: impl IntoIterator<Item = &'a FrameNeed>,
    headroom: &MemoryHeadroom,
    page_size: PageSize,
) -> usize {
    let mut sum = FrameNeed::default();
    needs
        .into_iter()
        .take_while(|need| {
            sum += need;
            check_memory(&sum, headroom, page_size).verdict == MemoryVerdict::Fits
        })
        .count()
}

/// Split a range into parts with at most `max_pages` of its pages in each. Cuts are before a page, and the parts cover
/// the whole range. `pages` are the addresses of pages within it, ascending. Returns each part with the number of its
/// pages.
pub fn split_by_page_count(range: AddressRange, pages: &[u64], max_pages: usize) -> Vec<(AddressRange, usize)> {
    let mut parts = Vec::new();
    let mut start = range.start;
    let mut chunks = pages.chunks(max_pages.max(1)).peekable();
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
