//! The contents that foreign processes have enrolled, cached between censuses while these processes are inactive.
//!
//! Pages of other trust domains must not merge with these contents. A census therefore reads every foreign process that
//! has enrolled memory, which on a host with many merged pages costs more than the rest of the census. The contents of
//! a process that has neither run nor had a page fault since it was read are unchanged. However, other writers may
//! change its memory: a debugger, a device, a process that shares it since a clone(2), or a userfaultfd(2) handler.
//! Contents are therefore cached for at most `MAX_CACHE_AGE`. A process is not cached if it was not read in full
//! because pages left memory or changed meanwhile.
//!
//! Swapped-out pages are not cached, and swapoff(8) brings them back unnoticed. A cached process does not count as a
//! duplicate: if the only copy of a page is in an inactive foreign process of its own domain, the page is not enrolled.
//!
//! The cache takes 4 bytes for each enrolled content: half of its fingerprint. A content whose half collides with a
//! cached one, with a probability of one in four billion for each, is needlessly not merged. While pages are grouped,
//! each content of inactive processes takes slightly more than 8 additional bytes.

use crate::index::PageIndex;
use crate::scan_scope::{ScanScope, Subject};
use pagefold_base::domain::TrustDomain;
use pagefold_base::{Fingerprint, PageClass, ProcessId};
use pagefold_host::activity::ActivityCounters;
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// How long enrolled contents are cached.
pub(crate) const MAX_CACHE_AGE: Duration = Duration::from_secs(3600);

/// Mean number of contents in a bucket.
const CONTENTS_PER_BUCKET: usize = 4;

/// A domain number without a domain, for contents that several domains hold.
const SEVERAL_DOMAINS: u32 = u32::MAX;

/// The cached foreign processes, under one key of fingerprints.
pub struct ForeignProcesses {
    census_time: Instant,
    processes: BTreeMap<ProcessId, ForeignProcess>,
}

struct ForeignProcess {
    /// Before the process was read.
    activity: ActivityCounters,
    read_at: Instant,
    /// In ascending order, without repetition.
    half_fingerprints: Vec<u32>,
}

impl ForeignProcesses {
    /// An empty cache.
    pub fn new(now: Instant) -> Self {
        Self { census_time: now, processes: BTreeMap::new() }
    }

    /// Starts a census at the time `now` and drops all processes that are not enrolled.
    pub(crate) fn begin_census(&mut self, now: Instant, enrolled_processes: &[ProcessId]) {
        let enrolled: BTreeSet<&ProcessId> = enrolled_processes.iter().collect();
        self.census_time = now;
        self.processes.retain(|process, cached| {
            enrolled.contains(process) && now.saturating_duration_since(cached.read_at) < MAX_CACHE_AGE
        });
    }

    /// Whether the contents that a process has enrolled are cached and unchanged.
    pub(crate) fn is_inactive(&self, process: ProcessId, activity: ActivityCounters) -> bool {
        self.processes.get(&process).is_some_and(|cached| cached.activity == activity)
    }

    /// Caches the foreign processes of a census that were read in full. The index must be classified.
    pub(crate) fn record_census(&mut self, scope: &ScanScope, index: &PageIndex, unread: &BTreeSet<usize>) {
        let read_at = self.census_time;
        let to_cached = |(position, subject): (usize, &Subject)| {
            let is_cacheable = subject.is_foreign && !unread.contains(&position);
            let activity = scope.activity.get(&subject.process.id).filter(|_| is_cacheable)?;
            Some(ForeignProcess { activity: *activity, read_at, half_fingerprints: Vec::new() })
        };
        let mut processes: Vec<Option<ForeignProcess>> = scope.subjects.iter().enumerate().map(to_cached).collect();
        if processes.iter().all(Option::is_none) {
            return;
        }
        // The entries that may have duplicates are sorted, so nearly every repeated content is added only once.
        for entry in &index.entries {
            if let Some(cached) = &mut processes[index.subject_of_page(entry.ordinal)] {
                let content = entry.fingerprint().to_half();
                if cached.half_fingerprints.last() != Some(&content) {
                    cached.half_fingerprints.push(content);
                }
            }
        }
        let is_stable = |ordinal| index.mark(ordinal).class().is_some_and(|class| class != PageClass::Volatile);
        // Zero pages have no entries unless they are merged.
        let is_zero = |ordinal| index.mark(ordinal).class() == Some(PageClass::Zero);
        for (position, (cached, subject)) in processes.into_iter().zip(&scope.subjects).enumerate() {
            let pages = || index.subject_ordinals(position).into_par_iter();
            let Some(mut cached) = cached.filter(|_| pages().all(is_stable)) else { continue };
            if pages().any(is_zero) {
                cached.half_fingerprints.push(Fingerprint::ZERO_PAGE.to_half());
            }
            cached.half_fingerprints.par_sort_unstable();
            cached.half_fingerprints.dedup();
            cached.half_fingerprints.shrink_to_fit();
            self.processes.insert(subject.process.id, cached);
        }
    }
}

/// The contents of inactive foreign processes, which were not read in a census, each with its trust domain. They lie in
/// buckets by their upper bits, so that a lookup touches little memory.
#[derive(Debug, Default)]
pub struct ForeignContents {
    bucket_shift: u32,
    /// Start of each bucket, and the end of the last one.
    bucket_starts: Vec<u32>,
    contents: Vec<(u32, u32)>,
}

impl ForeignContents {
    /// The contents of the inactive processes of a scope. Domains have their numbers in the census; domains outside of
    /// it get further numbers.
    pub(crate) fn from_inactive(scope: &ScanScope, foreign: &ForeignProcesses) -> Self {
        let numbers = scope.domain_numbers();
        let mut further_numbers = numbers.last().map_or(0, |last| last + 1)..;
        let mut unscanned_domains: BTreeMap<&TrustDomain, u32> = BTreeMap::new();
        let mut contents = Vec::new();
        for (domain, process) in &scope.inactive_foreign {
            let position = scope.subjects.iter().position(|subject| subject.domain == *domain);
            let number = match position {
                Some(position) => numbers[position],
                None => *unscanned_domains
                    .entry(domain)
                    .or_insert_with(|| further_numbers.next().unwrap_or(SEVERAL_DOMAINS)),
            };
            let halves = foreign.processes.get(process).map_or(&[][..], |process| &process.half_fingerprints);
            contents.extend(halves.iter().map(|&content| (content, number)));
        }
        Self::from_contents(contents)
    }

    fn from_contents(mut contents: Vec<(u32, u32)>) -> Self {
        contents.par_sort_unstable();
        contents.dedup_by(|next, kept| {
            let is_repeated = next.0 == kept.0;
            if is_repeated && next.1 != kept.1 {
                kept.1 = SEVERAL_DOMAINS;
            }
            is_repeated
        });
        let bits = (contents.len() / CONTENTS_PER_BUCKET).next_power_of_two().trailing_zeros().clamp(1, 31);
        let shift = u32::BITS - bits;
        let mut starts = vec![0; (1 << bits) + 1];
        for (content, _) in &contents {
            starts[(content >> shift) as usize + 1] += 1;
        }
        for bucket in 1..starts.len() {
            starts[bucket] += starts[bucket - 1];
        }
        Self { bucket_shift: shift, bucket_starts: starts, contents }
    }

    /// Whether there are no contents.
    pub(crate) fn is_empty(&self) -> bool {
        self.contents.is_empty()
    }

    /// The number of the domain that holds a content. If several domains hold it, a number that no domain has.
    pub(crate) fn find_domain(&self, content: Fingerprint) -> Option<u32> {
        if self.is_empty() {
            return None;
        }
        let half = content.to_half();
        let bucket = (half >> self.bucket_shift) as usize;
        let bucket = &self.contents[self.bucket_starts[bucket] as usize..self.bucket_starts[bucket + 1] as usize];
        bucket.iter().find(|&&(content, _)| content == half).map(|&(_, domain)| domain)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn domain_lookup_finds_one_domain_or_several(
            contents in prop::collection::vec((0u64..300, 0u32..3), 0..500),
            further_contents in prop::collection::vec(any::<u64>(), 0..100),
        ) {
            let to_half = |&(content, domain): &(u64, u32)| (Fingerprint(content).to_half(), domain);
            let foreign = ForeignContents::from_contents(contents.iter().map(to_half).collect());
            for content in (0..300).chain(further_contents).map(Fingerprint) {
                let domains: BTreeSet<u32> =
                    contents.iter().map(to_half).filter(|(half, _)| *half == content.to_half())
                        .map(|(_, domain)| domain).collect();
                let expected = match domains.len() {
                    0 | 1 => domains.first().copied(),
                    _ => Some(SEVERAL_DOMAINS),
                };
                prop_assert_eq!(foreign.find_domain(content), expected);
            }
        }
    }
}
