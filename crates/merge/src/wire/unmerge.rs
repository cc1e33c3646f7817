//! The result of unenrolling processes from KSM, on the wire.

use pagefold_base::guard::{LimitKind, MemoryCheck, MemoryVerdict};
use pagefold_output::wire::{ProcessInfo, UnscannedProcessReport};
use schemars::JsonSchema;
use serde::Serialize;
use std::fmt;

/// The result of `pagefold unmerge`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct UnmergeReport {
    /// `pagefold.unmerge/1`.
    pub schema: &'static str,
    /// The host: `this host`, or a recording for a dry run.
    pub host: String,
    /// Bytes of a base page.
    pub page_size: u64,
    /// Wall time in seconds.
    pub seconds: f64,
    /// The outcome for all chosen processes.
    pub outcome: UnmergeOutcomeKind,
    /// The guard's verdict on the whole plan, before any change.
    pub guard: GuardReport,
    /// The number of batches, and how many of them fit one after the other, before any change.
    pub batches: BatchesReport,
    /// The guard's verdict on the step that did not fit and stopped the run, if there was one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stopped_by_guard: Option<GuardReport>,
    /// Whether it continued in spite of the guard.
    pub forced: bool,
    /// Whether it was interrupted.
    pub interrupted: bool,
    /// Predicted and measured memory taken, if anything was changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub taken: Option<TakenReport>,
    /// The enrolled processes, in the order of unenrolling: the one that needs the fewest frames first.
    pub processes: Vec<UnmergedProcessReport>,
    /// Number of chosen processes that are not enrolled.
    pub not_enrolled: u64,
    /// Chosen processes that could not be scanned.
    pub unscanned_processes: Vec<UnscannedProcessReport>,
}

/// The outcome of unmerging.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum UnmergeOutcomeKind {
    /// No chosen process is enrolled.
    Nothing,
    /// A dry run.
    Planned,
    /// It does not fit, and nothing was changed.
    Refused,
    /// No page is merged any more.
    Done,
    /// Some pages are still merged, or a process ended meanwhile.
    Partial,
}

/// Whether memory suffices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum GuardVerdict {
    /// It suffices.
    Fits,
    /// Only if as much is swapped out.
    Swaps,
    /// It does not suffice.
    Short,
    /// A limit could not be read.
    Unknown,
}

/// How a process is unenrolled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum UnenrollMethodKind {
    /// As a whole.
    Whole,
    /// By its enrolled regions or some ranges of them.
    Regions,
    /// By the control socket of its guest.
    Qmp,
    /// It is not known how.
    None,
}

impl fmt::Display for UnenrollMethodKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Whole => "whole",
            Self::Regions => "regions",
            Self::Qmp => "qmp",
            Self::None => "none",
        })
    }
}

/// What was done with a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum UnenrollState {
    /// Nothing yet: a plan.
    Planned,
    /// Nothing was changed.
    Untouched,
    /// All of it was unenrolled.
    Unenrolled,
    /// A part of it was unenrolled.
    Partial,
    /// An error came first.
    Failed,
    /// It ended meanwhile.
    Ended,
}

impl fmt::Display for UnenrollState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Planned => "planned",
            Self::Untouched => "untouched",
            Self::Unenrolled => "unenrolled",
            Self::Partial => "partial",
            Self::Failed => "failed",
            Self::Ended => "ended",
        })
    }
}

/// Numbers of batches.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct BatchesReport {
    /// All batches.
    pub total: u64,
    /// Batches that fit one after the other.
    pub fitting: u64,
}

/// A verdict with all limits.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct GuardReport {
    /// Whether the memory suffices.
    pub verdict: GuardVerdict,
    /// Each limit, the ones that do not fit first.
    pub limits: Vec<LimitReport>,
    /// Limits that could not be read.
    pub unreadable: Vec<UnreadableLimitReport>,
}

/// A limit in bytes.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct LimitReport {
    /// `this host`, or the path of a cgroup.
    pub scope: String,
    /// `MemAvailable`, `memory.max` (v1: `memory.limit_in_bytes`), `memory.high`, or `memory.memsw` of v1.
    pub kind: &'static str,
    /// The limit itself.
    pub limit: u64,
    /// Bytes left below the limit: of the host less a reserve, of a cgroup with inactive clean file pages counted as
    /// free.
    pub headroom: u64,
    /// Bytes that swapping out could add.
    pub swap_headroom: u64,
    /// Bytes that would count against it.
    pub needed: u64,
    /// Whether that fits without swapping.
    pub fits: bool,
}

/// A limit that could not be read.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct UnreadableLimitReport {
    /// `this host`, or the path of a cgroup.
    pub scope: String,
    /// The reason.
    pub reason: String,
}

/// Memory taken, in bytes, from before the first step until after the last, without the collapse of huge pages.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct TakenReport {
    /// Predicted frames taken, less the freed ones.
    pub predicted: u64,
    /// The part of it for unenrolled batches.
    pub unenrolled: u64,
    /// Growth of `AnonPages`, of all processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub anon_pages: Option<i64>,
    /// Decrease of `MemAvailable`, by all processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mem_available: Option<i64>,
    /// `MemAvailable` before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mem_available_before: Option<u64>,
    /// `MemAvailable` after.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mem_available_after: Option<u64>,
    /// Copies of KSM pages that the kernel made, of all processes, in pages (`cow_ksm` of `/proc/vmstat`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub copies: Option<u64>,
    /// Predicted copies, in pages, without zero pages.
    pub copies_predicted: u64,
}

/// An enrolled process.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct UnmergedProcessReport {
    /// The process.
    #[serde(flatten)]
    pub process: ProcessInfo,
    /// How it is unenrolled.
    pub method: UnenrollMethodKind,
    /// Pages on KSM frames, before.
    pub merged_pages: u64,
    /// Zero pages that KSM placed, before.
    pub zero_pages: u64,
    /// Frames that are freed after all processes before it are unenrolled.
    pub freed_frames: u64,
    /// Why frames could not be read, where the page counts are upper bounds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub estimate_reason: Option<String>,
    /// Number of batches.
    pub batches: u64,
    /// Unenrolled batches.
    pub batches_unenrolled: u64,
    /// What was done with it.
    pub state: UnenrollState,
    /// Pages on KSM frames, after.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub merged_pages_after: Option<u64>,
    /// Zero pages that KSM placed, after.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zero_pages_after: Option<u64>,
    /// Of a guest: pages of firmware and video memory that stay merged, because they belong to no backend.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uncovered_pages: Option<u64>,
    /// The longest stop of a thread of it, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub longest_stop_ms: Option<f64>,
    /// Its memory in huge pages: before unmerging, after, and after the collapse.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub huge: Option<HugePagesReport>,
    /// The error that ended the work on it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// `AnonHugePages` in bytes.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct HugePagesReport {
    /// Before any change.
    pub before: u64,
    /// After unmerging.
    pub unmerged: u64,
    /// After the collapse of huge pages.
    pub collapsed: u64,
}

impl GuardReport {
    /// From a memory check.
    pub fn from_judgement(check: &MemoryCheck) -> Self {
        let limits = check.limits_and_needs.iter().map(|(limit, needed)| LimitReport {
            scope: limit.scope.to_string(),
            kind: limit.kind.kernel_name(),
            limit: limit.limit.0,
            headroom: limit.headroom.0,
            swap_headroom: limit.swap_headroom.0,
            needed: needed.0,
            fits: *needed <= limit.headroom || needed.0 == 0,
        });
        let unreadable = check.unreadable.iter();
        Self {
            verdict: match check.verdict {
                MemoryVerdict::Fits => GuardVerdict::Fits,
                MemoryVerdict::FitsWithSwap => GuardVerdict::Swaps,
                MemoryVerdict::OverLimit => GuardVerdict::Short,
                MemoryVerdict::Unknown => GuardVerdict::Unknown,
            },
            limits: limits.collect(),
            unreadable: unreadable
                .map(|(scope, why)| UnreadableLimitReport { scope: scope.to_string(), reason: why.to_string() })
                .collect(),
        }
    }

    /// The consequence of passing a limit, as text.
    pub(crate) fn limit_consequence(kind: &str) -> &'static str {
        match kind {
            _ if kind == LimitKind::Available.kernel_name() => "the host's OOM killer may end processes",
            _ if kind == LimitKind::High.kernel_name() => "its processes are throttled",
            _ => "its OOM killer may end processes",
        }
    }
}
