//! What was withdrawn from KSM, or why it was not, on the wire.

use pagefold_base::guard::{LimitKind, MemoryCheck, MemoryVerdict};
use pagefold_output::wire::{ProcessInfo, UnscannedProcessReport};
use schemars::JsonSchema;
use serde::Serialize;

/// The result of `pagefold unmerge`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct UnmergeReport {
    /// `pagefold.unmerge/1`.
    pub schema: &'static str,
    /// What was changed: `this host`, or a recording of which it was only asked.
    pub host: String,
    /// Bytes of a base page.
    pub page_size: u64,
    /// Wall time in seconds.
    pub seconds: f64,
    /// `nothing`: no chosen process is enrolled. `planned`: a dry run. `refused`: it does not fit, and nothing was
    /// changed. `done`: nothing is merged any more. `partial`: something is, or a process ended meanwhile.
    pub outcome: &'static str,
    /// What the guard said of all of it, before anything was changed.
    pub guard: GuardReport,
    /// Of how many parts, and how many of them fit one after the other, before anything was changed.
    pub parts: BatchesReport,
    /// The guard's word on the step that did not fit, if one did not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stopped: Option<GuardReport>,
    /// Whether it went on in spite of the guard.
    pub forced: bool,
    /// Whether it was asked to stop.
    pub interrupted: bool,
    /// What was predicted and what the kernel says was taken, once something was done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub taken: Option<TakenReport>,
    /// The processes that were enrolled, in the order in which they are withdrawn: who needs least first.
    pub processes: Vec<UnmergedProcessReport>,
    /// How many of the chosen processes are not enrolled.
    pub not_enrolled: u64,
    /// Processes that were asked for and not seen.
    pub not_seen: Vec<UnscannedProcessReport>,
}

/// How many parts.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct BatchesReport {
    /// All.
    pub all: u64,
    /// Those that fit one after the other.
    pub fit: u64,
}

/// A verdict with all limits.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct GuardReport {
    /// `fits`, `swaps` (only if as much is swapped out), `short`, or `unknown` (a limit could not be read).
    pub verdict: &'static str,
    /// Each limit, those that bind first.
    pub limits: Vec<LimitReport>,
    /// Limits that could not be read.
    pub unknown: Vec<UnreadableLimitReport>,
}

/// A limit in bytes.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct LimitReport {
    /// `this host`, or the path of a cgroup.
    pub place: String,
    /// `MemAvailable`, `memory.max` (v1: `memory.limit_in_bytes`), `memory.high`, or `memory.memsw` of v1.
    pub rule: &'static str,
    /// The limit itself.
    pub limit: u64,
    /// What is left of it: of the host less a reserve, of a cgroup with inactive clean file pages counted as free.
    pub room: u64,
    /// What swapping out could add.
    pub swap: u64,
    /// What would count to it.
    pub needed: u64,
    /// Whether that fits without swapping.
    pub fits: bool,
}

/// A limit that could not be read.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct UnreadableLimitReport {
    /// Of the host or of which cgroup.
    pub place: String,
    /// Why.
    pub reason: String,
}

/// What was taken, in bytes, from before the first step until after the last; without huge pages put together.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct TakenReport {
    /// Frames taken, less those that came free, by the plan.
    pub predicted: u64,
    /// The part of it that is of the parts that were withdrawn.
    pub withdrawn: u64,
    /// By how much `AnonPages` grew, everybody's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub anon_pages: Option<i64>,
    /// By how much `MemAvailable` fell, everybody's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mem_available: Option<i64>,
    /// `MemAvailable` before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mem_available_before: Option<u64>,
    /// `MemAvailable` after.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mem_available_after: Option<u64>,
    /// Copies of KSM pages that the kernel made, everybody's, in pages (`cow_ksm` of `/proc/vmstat`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub copies: Option<u64>,
    /// Copies that were predicted, in pages; zero pages are not among them.
    pub copies_predicted: u64,
}

/// A process that was enrolled.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct UnmergedProcessReport {
    /// Who it is.
    #[serde(flatten)]
    pub process: ProcessInfo,
    /// How it is withdrawn: `whole`, `regions`, `qmp`, or `none` where that is not known.
    pub way: &'static str,
    /// Pages on KSM frames, before.
    pub merged_pages: u64,
    /// Pages of zeros that KSM placed, before.
    pub zero_pages: u64,
    /// Frames that come free once those before it are withdrawn.
    pub returned_pages: u64,
    /// Why frames could not be looked at, where the pages are an upper bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub estimated: Option<String>,
    /// Parts in all.
    pub parts: u64,
    /// Parts that were withdrawn.
    pub parts_withdrawn: u64,
    /// `planned`, `untouched`, `withdrawn`, `partial`, `failed` or `ended`.
    pub state: &'static str,
    /// Pages on KSM frames, after.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub merged_pages_after: Option<u64>,
    /// Pages of zeros that KSM placed, after.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zero_pages_after: Option<u64>,
    /// Of a guest: pages of firmware and video memory that stay merged, because no backend rules them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub beside_pages: Option<u64>,
    /// For how long a thread of it was stopped at a time, at most, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub longest_stop_ms: Option<f64>,
    /// Its memory in huge pages: before unmerging, after, and after putting them together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub huge: Option<HugePagesReport>,
    /// What went wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// `AnonHugePages` in bytes.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct HugePagesReport {
    /// Before anything was changed.
    pub before: u64,
    /// After it was unmerged.
    pub unmerged: u64,
    /// After huge pages were put together.
    pub collapsed: u64,
}

impl GuardReport {
    /// From a judgement.
    pub fn from_judgement(check: &MemoryCheck) -> Self {
        let limits = check.limits_and_needs.iter().map(|(limit, needed)| LimitReport {
            place: limit.scope.to_string(),
            rule: limit.kind.kernel_name(),
            limit: limit.limit.0,
            room: limit.headroom.0,
            swap: limit.swap_headroom.0,
            needed: needed.0,
            fits: *needed <= limit.headroom || needed.0 == 0,
        });
        let unknown = check.unreadable.iter();
        Self {
            verdict: match check.verdict {
                MemoryVerdict::Fits => "fits",
                MemoryVerdict::FitsWithSwap => "swaps",
                MemoryVerdict::OverLimit => "short",
                MemoryVerdict::Unknown => "unknown",
            },
            limits: limits.collect(),
            unknown: unknown
                .map(|(place, why)| UnreadableLimitReport { place: place.to_string(), reason: why.to_string() })
                .collect(),
        }
    }

    /// What passing a limit would do, for people.
    pub(crate) fn limit_consequence(kind: &str) -> &'static str {
        match kind {
            _ if kind == LimitKind::Available.kernel_name() => "the host's OOM killer may end processes",
            _ if kind == LimitKind::High.kernel_name() => "its processes are throttled",
            _ => "its OOM killer may end processes",
        }
    }
}
