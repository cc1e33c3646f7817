//! What a simulated host looks like at one moment, and what a whole run has shown.

use super::counters::{PAGE_BYTES, RMAP_ITEM_BYTES};
use super::entry_runs::EntryRun;
use super::host_state::{HostState, NS_PER_MS};
use super::memory::{Content, Memory, PageEntry, ZERO_CONTENT};

/// The host at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Virtual time, in milliseconds.
    pub time_ms: u64,
    /// Machines that run.
    pub machines: u64,
    /// What their memory would take without merging, in pages.
    pub resident_pages: u64,
    /// Pages saved: mappings of merged frames beyond the first of each, and zero pages that ksmd mapped, also by splits.
    pub saved_pages: u64,
    /// Pages with metadata.
    pub rmap_items: u64,
    /// Free memory of the host; negative if memory is missing.
    pub available_bytes: i64,
    /// Completed scans.
    pub full_scans: u64,
    /// ksmd's visits.
    pub pages_scanned: u64,
    /// Visits that smart scan left out.
    pub pages_skipped: u64,
    /// ksmd's CPU time, in nanoseconds.
    pub ksmd_cpu_ns: u64,
    /// CPU time of Pagefold's daemon, in nanoseconds; 0 if it does not run.
    pub pagefold_cpu_ns: u64,
    /// Merged pages that machines wrote.
    pub cow_breaks: u64,
    /// Huge pages that ksmd split.
    pub huge_pages_split: u64,
    /// `pages_to_scan`; 0 while ksmd is stopped.
    pub pages_to_scan: u64,
}

impl Sample {
    /// What a host shows now.
    pub(crate) fn observe(host: &HostState<'_>) -> Self {
        let (counters, work) = (host.model.counters(), host.model.work());
        let (mut resident_pages, mut zero_pages, mut own_pages) = (0, 0, 0);
        for process in host.processes.values() {
            let totals = host.memory_of(process).totals;
            resident_pages += totals.mapped();
            zero_pages += totals.zero + totals.ksm_zero;
            own_pages += totals.private + totals.huge;
        }
        let rmap_items =
            counters.pages_shared + counters.pages_sharing + counters.pages_unshared + counters.pages_volatile;
        let used_pages = host.spec.used_pages + own_pages + host.model.memory().used_numbered_frames();
        let free_pages = host.spec.memory_pages.cast_signed() - used_pages.cast_signed();
        Self {
            time_ms: host.now_ns / NS_PER_MS,
            machines: host.processes.len() as u64,
            resident_pages,
            saved_pages: counters.pages_sharing + zero_pages,
            rmap_items,
            available_bytes: free_pages * PAGE_BYTES - rmap_items.cast_signed() * RMAP_ITEM_BYTES,
            full_scans: counters.full_scans,
            pages_scanned: counters.pages_scanned,
            pages_skipped: counters.pages_skipped,
            ksmd_cpu_ns: host.ksmd.cpu_ns(),
            pagefold_cpu_ns: host.pagefold_cpu_ns,
            cow_breaks: host.cow_breaks,
            huge_pages_split: work.splits,
            pages_to_scan: u64::from(host.model.ksmd_should_run()) * host.model.settings().pages_to_scan,
        }
    }

    /// CPU time of ksmd and of Pagefold's daemon, in seconds.
    #[must_use]
    pub fn cpu_seconds(&self) -> f64 {
        (self.ksmd_cpu_ns + self.pagefold_cpu_ns) as f64 / 1e9
    }

    /// Savings less ksmd's metadata.
    #[must_use]
    pub fn net_saved_bytes(&self) -> i64 {
        self.saved_pages.cast_signed() * PAGE_BYTES - self.rmap_items.cast_signed() * RMAP_ITEM_BYTES
    }
}

/// A simulated run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimulatedRun {
    /// Samples from the start to the end.
    pub samples: Vec<Sample>,
    /// Pages at the end whose contents occur before in the host's memory: what merging could save.
    pub duplicates: u64,
    /// Huge pages that the machines had.
    pub huge_pages: u64,
    /// How long processes waited for scans of Pagefold's daemon, if it ran.
    pub scan_wait: Option<ScanWait>,
}

/// How long processes were due for a scan of Pagefold's daemon, at the worst moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScanWait {
    /// The longest time at that moment, in milliseconds.
    pub longest_ms: u64,
    /// The time after which a process precedes all others then, in milliseconds.
    pub priority_ms: u64,
}

impl ScanWait {
    /// The one that is longer, measured by the time that gives priority.
    #[must_use]
    pub fn worse(self, other: Self) -> Self {
        let exceeds = |one: Self, other: Self| {
            u128::from(one.longest_ms) * u128::from(other.priority_ms)
                > u128::from(other.longest_ms) * u128::from(one.priority_ms)
        };
        if exceeds(other, self) || self.priority_ms == 0 { other } else { self }
    }
}

/// Pages whose contents occur before.
pub(super) fn count_duplicates(memory: &Memory) -> u64 {
    let (mut zeros, mut pages) = (0_u64, 0_u64);
    let mut ranges: Vec<(Content, u64)> = Vec::new();
    for process in memory.process_ids() {
        for vma in memory.process(process).vmas.values() {
            for (_, run) in vma.entries.runs() {
                add_contents(memory, run, &mut zeros, &mut ranges);
            }
        }
    }
    ranges.sort_unstable();
    let (mut distinct, mut end) = (0, 0_u64);
    for (first, length) in ranges {
        let (first, last) = (u64::from(first), u64::from(first) + length);
        pages += length;
        distinct += last.saturating_sub(end.max(first));
        end = end.max(last);
    }
    pages - distinct + zeros.saturating_sub(1)
}

fn add_contents(memory: &Memory, run: EntryRun, zeros: &mut u64, ranges: &mut Vec<(Content, u64)>) {
    match run.entry() {
        PageEntry::Absent => {}
        PageEntry::Frame(first) => {
            for page in 0..run.pages {
                let content = memory.frame(if run.ascends { first + page as u32 } else { first }).content;
                match ranges.last_mut() {
                    _ if content == ZERO_CONTENT => *zeros += 1,
                    Some((start, length)) if u64::from(*start) + *length == u64::from(content) => *length += 1,
                    _ => ranges.push((content, 1)),
                }
            }
        }
        entry => match memory.content(entry).unwrap_or(ZERO_CONTENT) {
            ZERO_CONTENT if !run.ascends => *zeros += run.pages,
            content if run.ascends => ranges.push((content, run.pages)),
            content => ranges.extend((0..run.pages).map(|_| (content, 1))),
        },
    }
}
