//! The result of a census: what the memory of some processes holds twice, and what merging would give back.

use pagefold_base::PageCounts;
use pagefold_base::content::{ContentKind, Fingerprint};
use pagefold_base::domain::TrustDomain;
use pagefold_base::process::Process;
use pagefold_base::reading::Absent;
use pagefold_base::region::{Ineligible, Region};
use pagefold_base::savings::{MergeEffect, SharingSettings};
use pagefold_base::units::{AddressRange, Bytes, PageSize, Pages, Pid};
use std::collections::BTreeMap;
use std::time::Duration;

/// Pages without a copy that an extent bridges.
pub const MAX_EXTENT_GAP_PAGES: u64 = 16;

/// The result of a census.
#[derive(Clone, Debug, Default)]
pub struct Census {
    /// All pages that were read.
    pub counts: PageCounts,
    /// Pages that left memory while the census was taken.
    pub gone: Pages,
    /// Pages that were not read, because the census was stopped or the reading failed.
    pub unread: Pages,
    /// Pages left out of the sample.
    pub not_sampled: Pages,
    /// Bytes that drivers hold pinned (`VmPin`), among the classified pages: KSM passes over them until they are let
    /// go.
    pub pinned: Bytes,
    /// Pages that others map too, as after a fork, and whose frames may not be known: each is taken for a copy.
    pub unknown_shared_frames: Pages,
    /// Whether pages of different NUMA nodes stay apart (`merge_across_nodes` is 0) and it is not known which node each
    /// is on: the savings then take all for one node's.
    pub nodes_unknown: bool,
    /// Swapped-out bytes of the processes, never touched.
    pub swapped: Bytes,
    /// By process.
    pub subjects: Vec<SubjectCensus>,
    /// Processes that were chosen and not seen.
    pub unscanned: Vec<UnscannedProcess>,
    /// Resident bytes that KSM cannot take, by reason.
    pub ineligible: BTreeMap<Ineligible, Bytes>,
    /// What merging would reach.
    pub savings: Savings,
    /// Runs of mergeable pages with small gaps, in the order of subjects and addresses.
    pub extents: Vec<Extent>,
    /// The ranges of the guided enrolment, in the order of subjects and addresses: [`Savings::guided`] is what they
    /// reach.
    pub ranges: Vec<GuidedRange>,
    /// Ranges of regions that are enrolled already in which nothing is merged and nothing pays, in the same order.
    pub idle_ranges: Vec<IdleRange>,
    /// Whether guided enrolment may merge pages of different trust domains.
    pub across_domains: bool,
    /// Pages that the second pass looked at: all, or only those with anything to gain.
    pub reread: Pages,
    /// The most frequent contents.
    pub contents: Vec<TopContent>,
    /// Who shares with whom.
    pub matrix: Matrix,
    /// Different contents other than zero.
    pub distinct_contents: u64,
    /// How many contents were seen on how many pages.
    pub contents_by_page_count: BTreeMap<u64, u64>,
    /// KSM's settings that the savings assume.
    pub sharing: SharingSettings,
    /// The pause between the passes, if there were two.
    pub pass_interval: Option<Duration>,
    /// Whether it was stopped early.
    pub partial: bool,
    /// The probability with which pages were looked at, if not all were.
    pub sample_probability: Option<f64>,
    /// Wall time.
    pub wall_seconds: f64,
    /// Bytes of page contents read.
    pub bytes_read: u64,
    /// Bytes of memory the index took.
    pub index_bytes: usize,
    /// Instructions the fingerprint was computed with.
    pub fingerprint_implementation: &'static str,
}

/// What merging would reach, in four ways.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Savings {
    /// Every copy but one of each content, every page of zeros, and no cost.
    pub upper_bound: MergeEffect,
    /// Every process enrolled whole.
    pub whole_processes: MergeEffect,
    /// Every process enrolled whole, if only pages within a trust domain were merged.
    pub within_domains: MergeEffect,
    /// Only ranges that pay, within trust domains unless asked for across them ([`Census::across_domains`]).
    pub guided: MergeEffect,
    /// How many ranges those are.
    pub guided_ranges: u64,
}

/// A process in a census.
#[derive(Clone, Debug)]
pub struct SubjectCensus {
    /// Who it is.
    pub process: Process,
    /// Its trust domain.
    pub domain: TrustDomain,
    /// Whether it was not chosen, and looked at only for what it has enrolled, which others must not be merged with.
    pub is_foreign: bool,
    /// Its pages.
    pub counts: PageCounts,
    /// Its regions with anything resident, in address order.
    pub regions: Vec<RegionCensus>,
}

/// A region in a census.
#[derive(Clone, Debug)]
pub struct RegionCensus {
    /// What it is.
    pub region: Region,
    /// Why KSM cannot take its pages.
    pub ineligible: Option<Ineligible>,
    /// Its pages.
    pub counts: PageCounts,
}

/// A run of mergeable pages, gaps of at most [`MAX_EXTENT_GAP_PAGES`] pages included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Position of the process in [`Census::subjects`].
    pub subject: usize,
    /// Where.
    pub range: AddressRange,
    /// Duplicates in it.
    pub duplicate: Pages,
    /// Pages of zeros in it.
    pub zero: Pages,
    /// Duplicates beyond the copy their group keeps.
    pub redundant: Pages,
}

impl Extent {
    /// The part of its pages that is mergeable.
    pub fn density(&self, page_size: PageSize) -> f64 {
        (self.duplicate + self.zero).0 as f64 / page_size.pages_in(self.range.bytes()).0.max(1) as f64
    }
}

/// A range that is worth enrolling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuidedRange {
    /// Position of the process in [`Census::subjects`].
    pub subject: usize,
    /// Where: whole pages, within one region.
    pub range: AddressRange,
    /// Resident pages in it that are not merged yet: what ksmd has to scan.
    pub pages: Pages,
    /// Those of them that have a copy or hold zeros.
    pub merging: Pages,
    /// Those of them that hold zeros.
    pub zero: Pages,
    /// What they are likely to give back: of `n` equal pages each stands for `1 - 1/n`, as if all were covered.
    pub freed_bytes: Bytes,
    /// Huge pages that are split because a part of them merges or it begins or ends in them; one that lies in several
    /// ranges counts in the first.
    pub split_huge_pages: Pages,
    /// Whether its region is enrolled already.
    pub enrolled: bool,
}

/// A range that is enrolled and does not pay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdleRange {
    /// Position of the process in [`Census::subjects`].
    pub subject: usize,
    /// Where. Every page of it is resident, and none is merged.
    pub range: AddressRange,
}

/// A content that many pages have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopContent {
    /// Its fingerprint in this census.
    pub fingerprint: Fingerprint,
    /// What it is, read again from one of its pages; absent if none of those tried had it any more.
    pub kind: Option<ContentKind>,
    /// Pages that have it, merged ones included.
    pub pages: Pages,
    /// Those that are merged already.
    pub merged: Pages,
    /// Processes that have it.
    pub processes: u32,
    /// Trust domains that have it.
    pub domains: u32,
}

/// Who shares how much with whom; pages of zeros apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Matrix {
    /// Those with the most duplicates first; the last row is everybody else, if there is anybody.
    pub parties: Vec<String>,
    /// `shared[a][b]`: pages of `a` whose content `b` has too; for `a == b`, pages with another copy in `a`.
    pub shared: Vec<Vec<Pages>>,
}

/// A process that was chosen and could not be looked at, or not wholly.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnscannedProcess {
    /// Its number.
    pub pid: Pid,
    /// Its name, where that much could be read.
    pub comm: Option<String>,
    /// Why.
    pub why: Absent,
}
