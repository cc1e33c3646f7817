//! The contents that foreign processes have enrolled, cached between censuses while these processes are inactive.
//!
//! Pages of other trust domains must not merge with these contents. A census therefore reads every foreign process that
//! has enrolled memory, which on a host with many merged pages costs more than the rest of the census. The contents of
//! a process that has neither run nor had a page fault since it was read are unchanged. However, other writers may
//! change its memory: a debugger, a device, a process that shares it since a clone(2), or a userfaultfd(2) handler.
//! Contents are therefore cached for at most [`MAX_CACHE_AGE`]. A process is not cached if it was not read in full
//! because pages left memory or changed meanwhile.
//!
//! Swapped-out pages are not cached, and swapoff(8) brings them back unnoticed. A cached process does not count as a
//! duplicate: a page whose only copy is in an inactive foreign process of its own domain is not enrolled for that.
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
        self.processes.retain(|process, known| {
            enrolled.contains(process) && now.saturating_duration_since(known.read_at) < MAX_CACHE_AGE
        });
    }

    /// Whether the contents that a process has enrolled are cached and unchanged.
    pub(crate) fn is_inactive(&self, process: ProcessId, activity: ActivityCounters) -> bool {
        self.processes.get(&process).is_some_and(|known| known.activity == activity)
    }

    /// Caches the foreign processes of a census that were read in full. The index must be classified.
    pub(crate) fn record_census(&mut self, scope: &ScanScope, index: &PageIndex, unread: &BTreeSet<usize>) {
        let seen = self.census_time;
        let known = |(position, subject): (usize, &Subject)| {
            let is_known = subject.is_foreign && !unread.contains(&position);
            let standing = scope.activity.get(&subject.process.id).filter(|_| is_known)?;
            Some(ForeignProcess { activity: *standing, read_at: seen, half_fingerprints: Vec::new() })
        };
        let mut noted: Vec<Option<ForeignProcess>> = scope.subjects.iter().enumerate().map(known).collect();
        if noted.iter().all(Option::is_none) {
            return;
        }
        // The entries that may have duplicates are sorted, so nearly every repeated content is added only once.
        for entry in &index.entries {
            if let Some(known) = &mut noted[index.subject_of_page(entry.ordinal)] {
                let content = entry.fingerprint().to_half();
                if known.half_fingerprints.last() != Some(&content) {
                    known.half_fingerprints.push(content);
                }
            }
        }
        let is_whole = |ordinal| index.mark(ordinal).class().is_some_and(|class| class != PageClass::Volatile);
        // Zero pages have no entries unless they are merged.
        let is_zero = |ordinal| index.mark(ordinal).class() == Some(PageClass::Zero);
        for (position, (known, subject)) in noted.into_iter().zip(&scope.subjects).enumerate() {
            let pages = || index.subject_ordinals(position).into_par_iter();
            let Some(mut known) = known.filter(|_| pages().all(is_whole)) else { continue };
            if pages().any(is_zero) {
                known.half_fingerprints.push(Fingerprint::ZERO_PAGE.to_half());
            }
            known.half_fingerprints.par_sort_unstable();
            known.half_fingerprints.dedup();
            known.half_fingerprints.shrink_to_fit();
            self.processes.insert(subject.process.id, known);
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
        let mut others = numbers.last().map_or(0, |last| last + 1)..;
        let mut unknown: BTreeMap<&TrustDomain, u32> = BTreeMap::new();
        let mut contents = Vec::new();
        for (domain, process) in &scope.inactive_foreign {
            let known = scope.subjects.iter().position(|subject| subject.domain == *domain);
            let number = match known {
                Some(position) => numbers[position],
                None => *unknown.entry(domain).or_insert_with(|| others.next().unwrap_or(SEVERAL_DOMAINS)),
            };
            let held = foreign.processes.get(process).map_or(&[][..], |known| &known.half_fingerprints);
            contents.extend(held.iter().map(|&content| (content, number)));
        }
        Self::from_contents(contents)
    }

    fn from_contents(mut contents: Vec<(u32, u32)>) -> Self {
        contents.par_sort_unstable();
        contents.dedup_by(|next, kept| {
            let same = next.0 == kept.0;
            if same && next.1 != kept.1 {
                kept.1 = SEVERAL_DOMAINS;
            }
            same
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
        bucket.iter().find(|&&(held, _)| held == half).map(|&(_, holder)| holder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn domain_lookup_finds_one_domain_or_several(
            held in prop::collection::vec((0u64..300, 0u32..3), 0..500),
            others in prop::collection::vec(any::<u64>(), 0..100),
        ) {
            let elsewhere = ForeignContents::from_contents(held.iter().map(|&(content, holder)| (Fingerprint(content).to_half(), holder)).collect());
            for asked in (0..300).chain(others).map(Fingerprint) {
                let holders: BTreeSet<u32> =
                    held.iter().filter(|(content, _)| Fingerprint(*content).to_half() == asked.to_half()).map(|(_, holder)| *holder).collect();
                let told = match holders.len() {
                    0 | 1 => holders.first().copied(),
                    _ => Some(SEVERAL_DOMAINS),
                };
                prop_assert_eq!(elsewhere.find_domain(asked), told);
            }
        }
    }
}
