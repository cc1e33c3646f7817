//! A few of the pages that a plan counts on, by which one can tell afterwards why some did not merge: they were written,
//! or they are as they were and it is their partners that are gone.

use crate::choose::each_page;
use crate::index::Index;
use pagefold_host::{Host, PageContent, Process, Run, Way};
use pagefold_model::census::Census;
use pagefold_model::outcome::Fates;
use pagefold_model::plan::Plan;
use pagefold_model::{Absent, AddressRange, Fingerprint, PageClass, Pages, Pfn, ProcessId, Reading};
use pagefold_sys::fingerprint::Hasher;
use rayon::prelude::*;
use std::collections::BTreeMap;

/// How many, at most: what one in a hundred of them does is then known to half of it.
const PROBES: u64 = 4096;

/// Pages of a plan, evenly spread, with the fingerprints that they had.
#[derive(Debug)]
pub struct Probes {
    hasher: Hasher,
    /// Ascending by address.
    pages: BTreeMap<ProcessId, Vec<(u64, Fingerprint)>>,
}

impl Probes {
    /// Choose some of the pages that should merge by a plan of this census, which was taken under the hasher's key.
    pub fn of(plan: &Plan, census: &Census, index: &Index, hasher: &Hasher) -> Self {
        let step = plan.predicted.merging.0.div_ceil(PROBES).max(1);
        let mut chosen: Vec<(u32, ProcessId, u64)> = Vec::new();
        let mut count = 0;
        for target in &plan.targets {
            let id = target.process.id;
            let Some(subject) = census.subjects.iter().position(|subject| subject.process.id == id) else { continue };
            let mut ranges = target.ranges.iter().map(|planned| planned.range).peekable();
            for (_, ordinal, address) in each_page(index, &index.pages_of(subject)) {
                while ranges.next_if(|range| range.end <= address).is_some() {}
                let inside = ranges.peek().is_some_and(|range| range.start <= address);
                let mark = index.mark(ordinal);
                let merges = |class: PageClass| match class {
                    PageClass::DuplicateForeign => census.across_domains,
                    class => class == PageClass::Zero || class.is_duplicate(),
                };
                let counts = (plan.whole || mark.is_covered()) && !mark.is_forbidden();
                if inside && counts && mark.class().is_some_and(merges) {
                    if count % step == 0 {
                        chosen.push((ordinal, id, address));
                    }
                    count += 1;
                }
            }
        }
        chosen.sort_unstable();
        let known = index.entries.par_iter().filter_map(|entry| {
            let at = chosen.binary_search_by_key(&entry.ordinal, |&(ordinal, ..)| ordinal).ok()?;
            Some((chosen[at], entry.fingerprint()))
        });
        let known: Vec<_> = known.collect();
        let mut pages: BTreeMap<ProcessId, Vec<(u64, Fingerprint)>> = BTreeMap::new();
        for ((_, id, address), fingerprint) in known {
            pages.entry(id).or_default().push((address, fingerprint));
        }
        pages.values_mut().for_each(|pages| pages.sort_unstable_by_key(|&(address, _)| address));
        Self { hasher: hasher.clone(), pages }
    }

    /// What became of them, but for those that lie in `without` or are swapped out. Processes that end are left out.
    pub fn look(&self, host: &dyn Host, without: impl Fn(ProcessId) -> Vec<AddressRange>) -> Reading<Fates> {
        let mut fates = Fates::default();
        for (&id, pages) in &self.pages {
            let Ok(handle) = host.open(id.pid) else { continue };
            if handle.id() != id {
                continue;
            }
            let without = without(id);
            let rest: Vec<(u64, Fingerprint)> = pages
                .iter()
                .copied()
                .filter(|&(address, _)| !without.iter().any(|range| range.contains(address)))
                .collect();
            match self.look_at(host, &*handle, &rest) {
                Ok(of_process) => fates += of_process,
                Err(Absent::Vanished) => {}
                Err(why) => return Err(why),
            }
        }
        Ok(fates)
    }

    fn look_at(&self, host: &dyn Host, handle: &dyn Process, pages: &[(u64, Fingerprint)]) -> Reading<Fates> {
        let mut fates = Fates::default();
        let page_len = host.page_size().bytes();
        let mut shared = Vec::new();
        let (mut runs, mut were) = (Vec::new(), Vec::new());
        for &(start, fingerprint) in pages {
            let mappings = handle.mappings(AddressRange { start, end: start + page_len })?;
            let mapping = mappings.first().copied().unwrap_or_default();
            if !mapping.present || mapping.file {
                fates.written.0 += u64::from(!mapping.swapped);
                continue;
            }
            shared.extend(mapping.frame.filter(|_| !mapping.exclusive).map(|frame| (frame, runs.len())));
            runs.push(Run { address: start, pages: 1, huge: false });
            were.push(fingerprint);
        }
        shared.sort_unstable();
        let frames: Vec<Pfn> = shared.iter().map(|&(frame, _)| frame).collect();
        let mut merged = vec![false; runs.len()];
        for (&(_, at), flags) in shared.iter().zip(host.frame_flags(&frames)?) {
            merged[at] = flags.is_ksm() || flags.is_zero_page();
        }
        let unmerged: Vec<usize> = (0..runs.len()).filter(|&at| !merged[at]).collect();
        fates.merged.0 += (runs.len() - unmerged.len()) as u64;
        let runs: Vec<Run> = unmerged.iter().map(|&at| runs[at]).collect();
        let mut alone = Pages::ZERO;
        handle.contents(Way::Memory { merged: false }, &runs, &mut |position, page| {
            let same = match page.content {
                PageContent::Bytes(bytes) => Fingerprint(self.hasher.fingerprint(bytes)) == were[unmerged[position]],
                PageContent::Fingerprint(fingerprint, _) => fingerprint == were[unmerged[position]],
                PageContent::Volatile | PageContent::Gone => false,
            };
            alone.0 += u64::from(same);
        })?;
        fates.alone += alone;
        fates.written.0 += runs.len() as u64 - alone.0;
        Ok(fates)
    }
}
