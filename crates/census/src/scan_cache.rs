//! The state kept between censuses under one key of fingerprints.

use crate::decide::sketch::ContentSketches;
use crate::fingerprint_cache::FingerprintCache;
use crate::foreign_processes::{ForeignContents, ForeignProcesses};
use crate::index::PageIndex;
use crate::scan_scope::ScanScope;
use crate::sketches;
use pagefold_base::{Pages, ProcessId};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

/// The state kept between censuses under one key.
pub struct ScanCache {
    pub(crate) foreign: ForeignProcesses,
    pub(crate) fingerprints: FingerprintCache,
    sketches: BTreeMap<ProcessId, ContentSketches>,
}

impl ScanCache {
    /// An empty cache.
    pub fn new(now: Instant) -> Self {
        Self {
            foreign: ForeignProcesses::new(now),
            fingerprints: FingerprintCache::new(now),
            sketches: BTreeMap::new(),
        }
    }

    /// Starts a census at the time `now` beside these enrolled processes.
    pub(crate) fn begin_census(&mut self, now: Instant, enrolled_processes: &[ProcessId]) {
        self.foreign.begin_census(now, enrolled_processes);
        self.fingerprints.begin_census(now);
    }

    /// The contents of foreign processes that were not read in this census.
    pub(crate) fn inactive_foreign_contents(&self, scope: &ScanScope) -> ForeignContents {
        ForeignContents::from_inactive(scope, &self.foreign)
    }

    /// Records a census of which `unread` subjects were not read in full. The index must be classified; its entries of
    /// single pages are dropped. Of a census that `is_partial` only the sketches are kept, and fingerprints only if
    /// they are `reusable`.
    pub(crate) fn record_census(
        &mut self,
        scope: &ScanScope,
        index: &mut PageIndex,
        unread: &BTreeSet<usize>,
        (is_partial, reusable): (bool, bool),
    ) {
        self.sketches = sketches::sketch_processes(scope, index);
        if !is_partial {
            self.foreign.record_census(scope, index, unread);
            // The fingerprint cache comes last: it drops entries that the other two read.
            if reusable {
                self.fingerprints.record_census(scope, index, unread);
            }
        }
        index.drop_unique_entries();
    }

    /// How many pages of a process the last census did not read because their contents were cached.
    pub fn reused_pages(&self, process: ProcessId) -> Pages {
        self.fingerprints.reused_pages(process)
    }

    /// Takes the sketches of the processes in the last census. Foreign processes and processes whose pages could not be
    /// listed have none.
    pub fn take_sketches(&mut self) -> BTreeMap<ProcessId, ContentSketches> {
        std::mem::take(&mut self.sketches)
    }

    /// Drops the processes for which `keep` is false. Foreign processes that are no longer enrolled are dropped when a
    /// census begins.
    pub fn retain_processes(&mut self, keep: impl Fn(ProcessId) -> bool) {
        self.fingerprints.retain_processes(keep);
    }
}
