//! What others have enrolled in other trust domains, remembered from census to census of those who rest.
//!
//! Those contents must not be merged with, so whoever has enrolled any is read with each census of another domain: on a
//! host with much that is merged that costs more than what is looked for. Of who has neither run nor had a page fault
//! since it was read for that, contents are what they were. Others than its own threads may write its memory, too (a
//! debugger, a device, a process that shares it since a clone(2), whoever fills it by userfaultfd(2)): so nobody is
//! remembered for longer than [`MAX_CACHE_AGE`]. Nor is who was not read whole, since pages left memory or changed meanwhile.
//!
//! What is swapped out then is not remembered, and comes back unseen where swap is turned off. Who is not read is
//! nobody's partner: a page that only a resting witness of its own domain holds, too, is not enrolled for that.
//!
//! Takes 4 bytes for each content that somebody has enrolled: half of its fingerprint. A content whose half is another's
//! by chance, one in four billion for each that is remembered, is left alone in vain. While pages are grouped 8 more
//! and a little are taken for each content of those who rest.

use crate::index::PageIndex;
use crate::scan_scope::{ScanScope, Subject};
use pagefold_base::domain::TrustDomain;
use pagefold_base::{Absent, Fingerprint, PageClass, ProcessId, Reading};
use pagefold_host::{Host, ProcessHandle, observe, parse};
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// For how long what somebody has enrolled is remembered.
pub(crate) const MAX_CACHE_AGE: Duration = Duration::from_secs(3600);

/// Contents of a bucket.
const CONTENTS_PER_BUCKET: usize = 4;

/// The number of no domain: for what several of them hold.
const SEVERAL_DOMAINS: u32 = u32::MAX;

/// How much a process has run and how many page faults it has had. While neither moves none of its threads has written
/// anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActivityCounters {
    /// Nanoseconds of all threads.
    cpu_ns: u64,
    page_faults: u64,
}

impl ActivityCounters {
    /// Of a process now. Who has never run is of a kernel that does not count.
    pub fn read(host: &dyn Host, handle: &dyn ProcessHandle) -> Reading<Self> {
        match observe::cpu_time_ns(host, handle)? {
            0 => Err(Absent::NotOnThisKernel),
            ran => Ok(Self { cpu_ns: ran, page_faults: parse::stat(&handle.read("stat")?)?.page_faults }),
        }
    }
}

/// What is remembered, under one key of fingerprints.
pub struct ForeignProcesses {
    census_time: Instant,
    processes: BTreeMap<ProcessId, ForeignProcess>,
}

struct ForeignProcess {
    /// Before it was read.
    activity: ActivityCounters,
    read_at: Instant,
    /// Ascending, each once.
    half_fingerprints: Vec<u32>,
}

impl ForeignProcesses {
    /// Nothing remembered yet.
    pub fn new(now: Instant) -> Self {
        Self { census_time: now, processes: BTreeMap::new() }
    }

    /// A census begins at a time, in which these are enrolled. All others are forgotten.
    pub(crate) fn begin_census(&mut self, now: Instant, enrolled_processes: &[ProcessId]) {
        let enrolled: BTreeSet<&ProcessId> = enrolled_processes.iter().collect();
        self.census_time = now;
        self.processes.retain(|process, known| {
            enrolled.contains(process) && now.saturating_duration_since(known.read_at) < MAX_CACHE_AGE
        });
    }

    /// Whether it is remembered what a process has enrolled, and holds still.
    pub(crate) fn is_inactive(&self, process: ProcessId, activity: ActivityCounters) -> bool {
        self.processes.get(&process).is_some_and(|known| known.activity == activity)
    }

    /// Take note of the witnesses of a census that were read whole, once the index is classified.
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
        // Those that may have partners are in order, so nearly all contents of many pages are added once.
        for entry in &index.entries {
            if let Some(known) = &mut noted[index.subject_of_page(entry.ordinal)] {
                let content = entry.fingerprint().to_half();
                if known.half_fingerprints.last() != Some(&content) {
                    known.half_fingerprints.push(content);
                }
            }
        }
        let is_whole = |ordinal| index.mark(ordinal).class().is_some_and(|class| class != PageClass::Volatile);
        // Pages of zeros are no entries, unless they are merged.
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

/// What those have enrolled who were not read in a census because they rest, each content with its trust domain: in
/// buckets by its upper bits, so that asking touches few places of memory.
#[derive(Debug, Default)]
pub struct ForeignContents {
    bucket_shift: u32,
    /// Where each bucket begins, and the last one ends.
    bucket_starts: Vec<u32>,
    contents: Vec<(u32, u32)>,
}

impl ForeignContents {
    /// Of those whom a survey has passed by. Domains have their numbers in the census, and those that are not in it
    /// numbers of their own.
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

    /// Whether there is nothing.
    pub(crate) fn is_empty(&self) -> bool {
        self.contents.is_empty()
    }

    /// The number of the domain that holds a content: of none in the census where several do.
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
