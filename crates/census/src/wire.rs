//! The census in JSON.

use crate::decide::estimate;
use crate::decide::estimate::{Interval, PageSample};
use crate::results::{Census, Extent, SubjectCensus};
use pagefold_base::content::{ContentKind, collision_probability};
use pagefold_base::ksm::RMAP_ITEM_BYTES;
use pagefold_base::savings::MergeEffect;
use pagefold_base::{PageCounts, PageSize};
use pagefold_output::wire::{PageClasses, ProcessInfo, UnscannedProcessReport};
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;

/// The result of `pagefold census`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct CensusReport {
    /// `pagefold.census/1`.
    pub schema: &'static str,
    /// What was scanned: `this host` or a recording.
    pub host: String,
    /// Bytes of a base page.
    pub page_size: u64,
    /// Resident private anonymous pages by class.
    pub pages: PageClasses,
    /// The same in bytes.
    pub bytes: PageClasses,
    /// What merging all duplicates would free.
    pub bytes_reclaimable: ReclaimableReport,
    /// What the ways of enrolling would save; with `--sample`, among the pages of the sample.
    pub savings: SavingsReport,
    /// Wall time in seconds.
    pub seconds: f64,
    /// Bytes of page contents read, both passes together.
    pub bytes_read: u64,
    /// Seconds between the two passes; absent for a single pass, which finds no volatile pages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pass_interval_seconds: Option<f64>,
    /// Whether the census was stopped early. All figures then count only the pages read so far.
    pub partial: bool,
    /// The share of the pages that was scanned, if not all. `pages` and `processes` then count only the sample, and
    /// `estimate` is for all pages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sample: Option<f64>,
    /// With `--sample`: all pages, with 95 % confidence intervals.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub estimate: Option<EstimateReport>,
    /// How reliably equal fingerprints mean equal pages.
    pub exactness: Exactness,
    /// Memory that is not among `pages`.
    pub not_counted: UncountedReport,
    /// The processes.
    pub processes: Vec<ProcessReport>,
    /// The same by virtual machine.
    pub vms: Vec<GroupReport>,
    /// The same by cgroup.
    pub cgroups: Vec<GroupReport>,
    /// The same by job.
    pub jobs: Vec<GroupReport>,
    /// The same by trust domain.
    pub domains: Vec<GroupReport>,
    /// The largest extents of mergeable pages.
    pub extents: Vec<ExtentReport>,
    /// The total number of extents.
    pub extents_total: u64,
    /// The most frequent contents.
    pub contents: Vec<ContentReport>,
    /// The pages that each two processes or groups share.
    pub matrix: MatrixReport,
    /// The cost of the census.
    pub cost: CensusCostReport,
}

/// Bytes that merging all duplicates would free. With `--sample`, the likely values for all pages, from `estimate`;
/// `net` then subtracts only metadata.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct ReclaimableReport {
    /// All redundant pages and zero pages. A frame that processes share since a fork counts once.
    pub gross: u64,
    /// `gross` minus what KSM keeps with every process enrolled whole: 64 bytes of metadata for each page scanned, and
    /// further copies because of `max_page_sharing` and NUMA nodes. Negative if merging would cost more than it frees.
    pub net: i64,
}

/// What the ways of enrolling would save.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct SavingsReport {
    /// An upper bound: one copy of each content is kept, zero pages are freed, and nothing costs anything.
    pub upper_bound: MergeEffectReport,
    /// KSM with every process enrolled whole.
    pub whole_processes: MergeEffectReport,
    /// KSM with every process enrolled whole, if only pages within a trust domain merged.
    pub within_domains: MergeEffectReport,
    /// KSM with only profitable ranges enrolled.
    pub guided: MergeEffectReport,
    /// Number of ranges of the guided enrollment.
    pub guided_ranges: u64,
}

/// What one way of enrolling would save.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct MergeEffectReport {
    /// Bytes of frames that would be freed.
    pub gross: u64,
    /// `gross` minus metadata, in bytes.
    pub net: i64,
    /// Bytes of metadata.
    pub metadata: u64,
    /// Pages that ksmd would scan.
    pub pages_scanned: u64,
    /// Huge pages that would be split.
    pub huge_pages_split: u64,
}

/// Estimates for all pages from a sample, in pages.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct EstimateReport {
    /// All resident pages, known exactly.
    pub resident: u64,
    /// The confidence of the intervals.
    pub confidence: f64,
    /// Pages of zeros.
    pub zero: IntervalReport,
    /// Pages that are merged already.
    pub merged: IntervalReport,
    /// Volatile pages.
    pub volatile: IntervalReport,
    /// Pages of a content that two or more pages have.
    pub duplicate: IntervalReport,
    /// Duplicates other than one copy of each content.
    pub redundant: IntervalReport,
    /// Pages whose content no other page has.
    pub unique: IntervalReport,
}

/// An estimate with its confidence interval.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct IntervalReport {
    /// Lower end.
    pub low: f64,
    /// Likely value.
    pub estimate: f64,
    /// Upper end.
    pub high: f64,
}

/// How reliably equal fingerprints mean equal pages.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct Exactness {
    /// Bits of a fingerprint.
    pub fingerprint_bits: u32,
    /// Distinct contents, without the zero page.
    pub distinct_contents: u64,
    /// Pages that other processes map too, as after a fork, and whose frames only root can read. Each counts as a copy
    /// of its own, although a frame that is mapped twice is only one. 0 for root.
    pub unknown_shared_pages: u64,
    /// Whether `merge_across_nodes` is 0 and the pages' NUMA nodes are unknown, because only root can read them. The
    /// savings then assume a single node and are too high.
    pub nodes_unknown: bool,
    /// Upper bound of the probability that any two of these contents share a fingerprint. Zero pages are compared byte
    /// by byte.
    pub collision_probability: f64,
}

/// Memory that is not among the classified pages.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct UncountedReport {
    /// Resident bytes that KSM cannot take, by reason.
    pub ineligible: Vec<IneligibleReport>,
    /// Bytes that drivers have pinned (RDMA, VFIO, io_uring), among `pages`. KSM skips them while they are pinned.
    pub pinned_bytes: u64,
    /// Swapped-out bytes; they are not read.
    pub swapped_bytes: u64,
    /// Pages that left memory while the census was taken.
    pub pages_no_longer_resident: u64,
    /// Pages that could not be read, or were not read before the census was stopped.
    pub pages_unread: u64,
    /// Pages left out of the sample.
    pub pages_not_sampled: u64,
    /// Processes that were selected and could not be scanned.
    pub unscanned_processes: Vec<UnscannedProcessReport>,
}

/// Resident memory that KSM cannot take.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct IneligibleReport {
    /// The reason.
    pub reason: &'static str,
    /// Bytes.
    pub bytes: u64,
}

/// A process in the census.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ProcessReport {
    /// The process.
    #[serde(flatten)]
    pub process: ProcessInfo,
    /// Its pages by class. `redundant` counts its duplicates other than the copy that each content keeps. That copy is
    /// the first one in the order of trust domains and processes.
    pub pages: PageClasses,
    /// The same in bytes.
    pub bytes: PageClasses,
    /// Its regions with resident or swapped-out pages.
    pub regions: Vec<CensusRegionReport>,
}

/// A region in the census.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct CensusRegionReport {
    /// First address, hexadecimal.
    pub start: String,
    /// First address after it, hexadecimal.
    pub end: String,
    /// Its name or file; empty for unnamed anonymous memory.
    pub name: String,
    /// Resident bytes of any kind.
    pub rss: u64,
    /// Why KSM cannot take its pages; absent if it can take the anonymous ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ineligible: Option<&'static str>,
    /// Whether the region is enrolled.
    pub mergeable: bool,
    /// Its pages by class.
    pub pages: PageClasses,
    /// The same in bytes.
    pub bytes: PageClasses,
}

/// A group of processes.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct GroupReport {
    /// Its name.
    pub name: String,
    /// Number of processes.
    pub processes: u64,
    /// Their pages by class.
    pub pages: PageClasses,
    /// The same in bytes.
    pub bytes: PageClasses,
}

/// A run of mergeable pages, including small gaps.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct ExtentReport {
    /// The process number.
    pub pid: u32,
    /// The start time of the process.
    pub start_time: u64,
    /// First address, hexadecimal.
    pub start: String,
    /// First address after it, hexadecimal.
    pub end: String,
    /// Pages from start to end.
    pub pages: u64,
    /// Duplicates in it.
    pub duplicate: u64,
    /// Duplicates other than the copy that their content keeps.
    pub redundant: u64,
    /// Pages of zeros in it.
    pub zero: u64,
    /// The mergeable share of its pages.
    pub density: f64,
}

/// A content that many pages have.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ContentReport {
    /// `zero`, `pattern`, `elf`, `text`, `other` or `changed` (no page that was tried still had it).
    pub kind: &'static str,
    /// The repeated 64-bit word, hexadecimal, where the kind is `pattern`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pattern: Option<String>,
    /// Pages with this content.
    pub pages: u64,
    /// Pages with this content that are merged already.
    pub merged: u64,
    /// Processes with this content; absent for the zero page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub processes: Option<u32>,
    /// Trust domains with this content; absent for the zero page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domains: Option<u32>,
}

/// The pages that each two processes or groups share, without zero pages.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct MatrixReport {
    /// Rows and columns; the last may be `others`.
    pub parties: Vec<String>,
    /// `pages[a][b]`: pages of `a` whose content `b` also has; on the diagonal, pages with another copy in `a` itself.
    pub pages: Vec<Vec<u64>>,
}

/// The cost of the census.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct CensusCostReport {
    /// Bytes of memory that the index took.
    pub index_bytes: u64,
    /// Bytes of page contents read for each second of wall time, including the pause and the tally.
    pub bytes_per_second: f64,
    /// The CPU instructions that computed the fingerprints.
    pub fingerprint: &'static str,
}

/// What a report needs in addition to the census.
#[derive(Clone, Debug)]
pub struct CensusContext {
    /// The name of the host: `this host` or a recording.
    pub host: String,
    /// The size of the host's pages.
    pub page_size: PageSize,
    /// Maximum number of extents to report.
    pub max_extents: usize,
}

/// The confidence of the intervals that a sample gives.
const CONFIDENCE_LEVEL: f64 = 0.95;

impl CensusReport {
    /// Makes the report of a census.
    pub fn from_census(census: &Census, context: &CensusContext) -> Self {
        let page_size = context.page_size;
        let effect = |effect: &MergeEffect| MergeEffectReport::from_effect(effect, page_size);
        let upper = census.savings.upper_bound;
        let estimate = census.sample_probability.map(|_| EstimateReport::from_census(census));
        Self {
            schema: "pagefold.census/1",
            host: context.host.clone(),
            page_size: page_size.bytes(),
            pages: PageClasses::from_counts_in_pages(&census.counts),
            bytes: PageClasses::from_counts_in_bytes(&census.counts, page_size),
            bytes_reclaimable: estimate.map_or_else(
                || ReclaimableReport {
                    gross: upper.gross(page_size).0,
                    net: census.savings.whole_processes.net(page_size).0,
                },
                |estimate| estimate.reclaimable(page_size),
            ),
            savings: SavingsReport {
                upper_bound: MergeEffectReport { metadata: 0, ..effect(&upper) },
                whole_processes: effect(&census.savings.whole_processes),
                within_domains: effect(&census.savings.within_domains),
                guided: effect(&census.savings.guided),
                guided_ranges: census.savings.guided_ranges,
            },
            seconds: census.wall_seconds,
            bytes_read: census.bytes_read,
            pass_interval_seconds: census.pass_interval.map(|settle| settle.as_secs_f64()),
            partial: census.partial,
            sample: census.sample_probability,
            estimate,
            exactness: Exactness {
                fingerprint_bits: 64,
                nodes_unknown: census.nodes_unknown,
                distinct_contents: census.distinct_contents,
                unknown_shared_pages: census.unknown_shared_frames.0,
                collision_probability: collision_probability(census.distinct_contents),
            },
            not_counted: UncountedReport {
                ineligible: census
                    .ineligible
                    .iter()
                    .map(|(reason, bytes)| IneligibleReport { reason: reason.phrase(), bytes: bytes.0 })
                    .collect(),
                pinned_bytes: census.pinned.0,
                swapped_bytes: census.swapped.0,
                pages_no_longer_resident: census.gone.0,
                pages_unread: census.unread.0,
                pages_not_sampled: census.not_sampled.0,
                unscanned_processes: census
                    .unscanned
                    .iter()
                    .map(|process| UnscannedProcessReport::new(process.pid.0, process.comm.clone(), &process.why))
                    .collect(),
            },
            processes: census.subjects.iter().map(|subject| ProcessReport::from_subject(subject, page_size)).collect(),
            vms: sum_by_name(census, page_size, |subject| {
                let vm = subject.process.identity.vm.as_ref()?;
                Some(vm.name.clone().unwrap_or_else(|| format!("pid {}", subject.process.id.pid)))
            }),
            cgroups: sum_by_name(census, page_size, |subject| subject.process.cgroup.clone().ok()),
            jobs: sum_by_name(census, page_size, |subject| {
                subject.process.identity.job.as_ref().map(|job| job.name.clone())
            }),
            domains: sum_by_name(census, page_size, |subject| Some(subject.domain.to_string())),
            extents: largest_extents(census, page_size, context.max_extents),
            extents_total: census.extents.len() as u64,
            contents: content_reports(census),
            matrix: MatrixReport {
                parties: census.matrix.parties.clone(),
                pages: census.matrix.shared.iter().map(|row| row.iter().map(|pages| pages.0).collect()).collect(),
            },
            cost: CensusCostReport {
                index_bytes: census.index_bytes as u64,
                bytes_per_second: census.bytes_read as f64 / census.wall_seconds.max(f64::MIN_POSITIVE),
                fingerprint: census.fingerprint_implementation,
            },
        }
    }

    /// Whether the census was stopped early, or did not scan a selected process or read all pages.
    pub fn is_incomplete(&self) -> bool {
        self.partial || self.not_counted.pages_unread > 0 || !self.not_counted.unscanned_processes.is_empty()
    }
}

impl EstimateReport {
    fn from_census(census: &Census) -> Self {
        let PageCounts { zero, merged, volatile, .. } = census.counts;
        let resident = (census.counts.resident() + census.not_sampled).0;
        let sample = PageSample {
            population: resident,
            zero: zero.0,
            merged: merged.0,
            volatile: volatile.0,
            contents_by_sightings: census.contents_by_page_count.clone(),
        };
        let estimate = estimate::estimate(&sample, CONFIDENCE_LEVEL);
        let interval =
            |interval: Interval| IntervalReport { low: interval.low, estimate: interval.estimate, high: interval.high };
        Self {
            resident,
            confidence: CONFIDENCE_LEVEL,
            zero: interval(estimate.zero),
            merged: interval(estimate.merged),
            volatile: interval(estimate.volatile),
            duplicate: interval(estimate.duplicate),
            redundant: interval(estimate.redundant),
            unique: interval(estimate.unique),
        }
    }

    /// What merging all pages would likely free. Further copies cannot be estimated from a sample.
    fn reclaimable(&self, page_size: PageSize) -> ReclaimableReport {
        let bytes = |pages: f64, each: u64| (pages.max(0.0) * each as f64) as u64;
        let gross = bytes(self.zero.estimate + self.redundant.estimate, page_size.bytes());
        let scanned = self.resident as f64 - self.merged.estimate;
        ReclaimableReport { gross, net: gross as i64 - bytes(scanned, RMAP_ITEM_BYTES) as i64 }
    }
}

impl MergeEffectReport {
    fn from_effect(effect: &MergeEffect, page_size: PageSize) -> Self {
        Self {
            gross: effect.gross(page_size).0,
            net: effect.net(page_size).0,
            metadata: effect.metadata().0,
            pages_scanned: effect.scanned_pages.0,
            huge_pages_split: effect.split_huge_pages.0,
        }
    }
}

impl ProcessReport {
    fn from_subject(subject: &SubjectCensus, page_size: PageSize) -> Self {
        Self {
            process: ProcessInfo::from_process(&subject.process, Some(&subject.domain)),
            pages: PageClasses::from_counts_in_pages(&subject.counts),
            bytes: PageClasses::from_counts_in_bytes(&subject.counts, page_size),
            regions: subject
                .regions
                .iter()
                .map(|region| CensusRegionReport {
                    start: format!("{:x}", region.region.range.start),
                    end: format!("{:x}", region.region.range.end),
                    name: region.region.name.clone(),
                    rss: region.region.rss.0,
                    ineligible: region.ineligible.map(|reason| reason.phrase()),
                    mergeable: region.region.flags.has(pagefold_base::region::VmFlags::MERGEABLE),
                    pages: PageClasses::from_counts_in_pages(&region.counts),
                    bytes: PageClasses::from_counts_in_bytes(&region.counts, page_size),
                })
                .collect(),
        }
    }
}

/// Sums the processes by a name and leaves out those without one. Largest first.
fn sum_by_name(
    census: &Census,
    page_size: PageSize,
    name: impl Fn(&SubjectCensus) -> Option<String>,
) -> Vec<GroupReport> {
    let mut sums: BTreeMap<String, (u64, PageCounts)> = BTreeMap::new();
    for subject in &census.subjects {
        if let Some(name) = name(subject) {
            let (processes, counts) = sums.entry(name).or_default();
            *processes += 1;
            *counts += subject.counts;
        }
    }
    let mut groups: Vec<_> = sums
        .into_iter()
        .map(|(name, (processes, counts))| GroupReport {
            name,
            processes,
            pages: PageClasses::from_counts_in_pages(&counts),
            bytes: PageClasses::from_counts_in_bytes(&counts, page_size),
        })
        .collect();
    groups.sort_by_key(|group| std::cmp::Reverse(group.pages.resident));
    groups
}

/// The extents with the most mergeable pages.
fn largest_extents(census: &Census, page_size: PageSize, top: usize) -> Vec<ExtentReport> {
    let mut extents: Vec<_> = census.extents.iter().collect();
    extents
        .sort_by_key(|extent| (std::cmp::Reverse(extent.duplicate + extent.zero), extent.subject, extent.range.start));
    extents.into_iter().take(top).map(|extent| extent_report(census, page_size, extent)).collect()
}

/// The report of an extent and its process.
pub fn extent_report(census: &Census, page_size: PageSize, extent: &Extent) -> ExtentReport {
    let id = census.subjects[extent.subject].process.id;
    ExtentReport {
        pid: id.pid.0,
        start_time: id.start_time,
        start: format!("{:x}", extent.range.start),
        end: format!("{:x}", extent.range.end),
        pages: page_size.pages_in(extent.range.bytes()).0,
        duplicate: extent.duplicate.0,
        redundant: extent.redundant.0,
        zero: extent.zero.0,
        density: extent.density(page_size),
    }
}

/// The zero pages, if there are any, and the most frequent other contents.
fn content_reports(census: &Census) -> Vec<ContentReport> {
    let zero = (census.counts.zero.0 > 0).then_some(ContentReport {
        kind: "zero",
        pattern: None,
        pages: census.counts.zero.0,
        merged: 0,
        processes: None,
        domains: None,
    });
    let contents = census.contents.iter().map(|content| {
        let (kind, pattern) = match content.kind {
            None => ("changed", None),
            Some(ContentKind::Zero) => ("zero", None),
            Some(ContentKind::Pattern(word)) => ("pattern", Some(format!("{word:016x}"))),
            Some(ContentKind::Elf) => ("elf", None),
            Some(ContentKind::Text) => ("text", None),
            Some(ContentKind::Other) => ("other", None),
        };
        ContentReport {
            kind,
            pattern,
            pages: content.pages.0,
            merged: content.merged.0,
            processes: Some(content.processes),
            domains: Some(content.domains),
        }
    });
    zero.into_iter().chain(contents).collect()
}
