//! The result of a census: which memory of the selected processes is duplicated, and what merging would save.

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

/// Maximum number of consecutive pages without a copy that an extent includes.
pub const MAX_EXTENT_GAP_PAGES: u64 = 16;

/// The result of a census.
#[derive(Clone, Debug, Default)]
pub struct Census {
    /// All pages that were read.
    pub counts: PageCounts,
    /// Pages that left memory while the census was taken.
    pub gone: Pages,
    /// Pages that were not read because the census was stopped or reading failed.
    pub unread: Pages,
    /// Pages left out of the sample.
    pub not_sampled: Pages,
    /// Bytes that drivers have pinned (`VmPin`), among the classified pages. KSM skips them while they are pinned.
    pub pinned: Bytes,
    /// Pages that other processes map too, as after a fork, and whose frames cannot be read: each counts as a copy.
    pub unknown_shared_frames: Pages,
    /// Whether pages of different NUMA nodes stay apart (`merge_across_nodes` is 0) and their nodes are unknown. The
    /// savings then assume that all pages are on one node.
    pub nodes_unknown: bool,
    /// Swapped-out bytes of the processes; they are not read.
    pub swapped: Bytes,
    /// The census of each process.
    pub subjects: Vec<SubjectCensus>,
    /// Processes that were selected and could not be scanned.
    pub unscanned: Vec<UnscannedProcess>,
    /// Resident bytes that KSM cannot take, by reason.
    pub ineligible: BTreeMap<Ineligible, Bytes>,
    /// What merging would save.
    pub savings: Savings,
    /// Runs of mergeable pages with small gaps, in the order of subjects and addresses.
    pub extents: Vec<Extent>,
    /// The ranges of the guided enrollment, in the order of subjects and addresses. [`Savings::guided`] is what they
    /// save.
    pub ranges: Vec<GuidedRange>,
    /// Ranges of enrolled regions without merged pages and without profit, in the same order.
    pub idle_ranges: Vec<IdleRange>,
    /// Whether guided enrollment may merge pages of different trust domains.
    pub across_domains: bool,
    /// Pages that the second pass read: all, or only those that can be merged.
    pub reread: Pages,
    /// The most frequent contents.
    pub contents: Vec<TopContent>,
    /// The pages that each two processes or groups share.
    pub matrix: Matrix,
    /// Distinct contents, without the zero page.
    pub distinct_contents: u64,
    /// Number of contents (value) by their number of pages (key).
    pub contents_by_page_count: BTreeMap<u64, u64>,
    /// The KSM settings that the savings assume.
    pub sharing: SharingSettings,
    /// The pause between the passes, if there were two.
    pub pass_interval: Option<Duration>,
    /// Whether the census was stopped early.
    pub partial: bool,
    /// The probability with which pages were sampled; `None` if all were scanned.
    pub sample_probability: Option<f64>,
    /// Wall time.
    pub wall_seconds: f64,
    /// Bytes of page contents read.
    pub bytes_read: u64,
    /// Bytes of memory the index took.
    pub index_bytes: usize,
    /// The CPU instructions that computed the fingerprints.
    pub fingerprint_implementation: &'static str,
}

/// What merging would save, in four ways.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Savings {
    /// An upper bound: one copy of each content is kept, zero pages are freed, and nothing costs anything.
    pub upper_bound: MergeEffect,
    /// Every process enrolled whole.
    pub whole_processes: MergeEffect,
    /// Every process enrolled whole, if only pages within a trust domain were merged.
    pub within_domains: MergeEffect,
    /// Only profitable ranges are enrolled, within trust domains unless [`Census::across_domains`] is set.
    pub guided: MergeEffect,
    /// Number of ranges of the guided enrollment.
    pub guided_ranges: u64,
}

/// A process in a census.
#[derive(Clone, Debug)]
pub struct SubjectCensus {
    /// The process.
    pub process: Process,
    /// Its trust domain.
    pub domain: TrustDomain,
    /// Whether it is a foreign process: not selected, and scanned only for what it has enrolled.
    pub is_foreign: bool,
    /// The addresses that were scanned, ascending and disjoint.
    pub scanned_ranges: Vec<AddressRange>,
    /// Its pages.
    pub counts: PageCounts,
    /// Its regions with resident pages, in address order.
    pub regions: Vec<RegionCensus>,
}

/// A region in a census.
#[derive(Clone, Debug)]
pub struct RegionCensus {
    /// The region.
    pub region: Region,
    /// Why KSM cannot take its pages.
    pub ineligible: Option<Ineligible>,
    /// Its pages.
    pub counts: PageCounts,
}

/// A run of mergeable pages, including gaps of at most [`MAX_EXTENT_GAP_PAGES`] pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Position of the process in [`Census::subjects`].
    pub subject: usize,
    /// Its addresses.
    pub range: AddressRange,
    /// Duplicates in it.
    pub duplicate: Pages,
    /// Pages of zeros in it.
    pub zero: Pages,
    /// Duplicates other than the copy that their group keeps.
    pub redundant: Pages,
}

impl Extent {
    /// The share of its pages that is mergeable.
    pub fn density(&self, page_size: PageSize) -> f64 {
        (self.duplicate + self.zero).0 as f64 / page_size.pages_in(self.range.bytes()).0.max(1) as f64
    }
}

/// A range that is profitable to enroll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuidedRange {
    /// Position of the process in [`Census::subjects`].
    pub subject: usize,
    /// Its addresses: whole pages within one region.
    pub range: AddressRange,
    /// Resident pages in it that are not merged yet and that ksmd has to scan.
    pub pages: Pages,
    /// Pages among them that have a copy or are zero pages.
    pub merging: Pages,
    /// Zero pages among them.
    pub zero: Pages,
    /// The bytes they are likely to free: each of `n` equal pages frees `1 - 1/n` of a page, as if all were covered.
    pub freed_bytes: Bytes,
    /// Huge pages that are split because a part of them merges or because the range begins or ends inside them. A huge
    /// page in several ranges counts in the first one.
    pub split_huge_pages: Pages,
    /// Whether its region is enrolled already.
    pub enrolled: bool,
}

/// A range that is enrolled without profit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdleRange {
    /// Position of the process in [`Census::subjects`].
    pub subject: usize,
    /// Its addresses. Every page of it is resident, and none is merged.
    pub range: AddressRange,
}

/// A content that many pages have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopContent {
    /// Its fingerprint in this census.
    pub fingerprint: Fingerprint,
    /// Its kind, determined by reading one of its pages again; absent if no page that was tried still had it.
    pub kind: Option<ContentKind>,
    /// Pages with this content, including merged ones.
    pub pages: Pages,
    /// Pages with this content that are merged already.
    pub merged: Pages,
    /// Processes with this content.
    pub processes: u32,
    /// Trust domains with this content.
    pub domains: u32,
}

/// The pages that each two processes or groups share, without zero pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Matrix {
    /// Names of rows and columns, those with the most duplicates first. The last row may be the sum of all others.
    pub parties: Vec<String>,
    /// `shared[a][b]`: pages of `a` whose content `b` has too; for `a == b`, pages with another copy in `a`.
    pub shared: Vec<Vec<Pages>>,
}

/// A process that was selected and could not be scanned in full.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnscannedProcess {
    /// Its process number.
    pub pid: Pid,
    /// Its name, if it could be read.
    pub comm: Option<String>,
    /// Why it could not be scanned.
    pub why: Absent,
}
