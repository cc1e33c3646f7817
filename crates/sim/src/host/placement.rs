//! Placements of threads on CPUs and of memory on NUMA nodes, with the answers of the kernel.
//!
//! As on a live host, frames that are merged or have several mappings stay (`MPOL_MF_MOVE`, mm/migrate.c), and a huge page
//! moves as a whole. All other pages move if their new node has free memory.
//!
//! Limits: a merged frame with one mapping stays, too. No page is pinned. A move takes no time. If `merge_across_nodes` is 0,
//! a page that moves after ksmd's visit counts for the rest of the scan as on its former node.

use super::actions::STOP_TIME;
use crate::decide::host_state::{HostState, MappedRun, PAGE_BYTES};
use crate::decide::memory::{PAGES_IN_HUGE_PAGE, PageEntry, SimulatedProcessId};
use pagefold_base::memory::MemoryPolicy;
use pagefold_base::{AddressRange, IdSet, Pages, ProcessId};
use pagefold_host::action::{ActionError, ActionOutcome, Exchange, MissedReason, ThreadId};
use std::ops::Range;

/// Neighboring pages on another node than the wanted one.
#[derive(Debug, PartialEq, Eq)]
struct PagesElsewhere {
    pages: Range<u64>,
    kind: PageKind,
}

/// How the kernel moves pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PageKind {
    /// One by one.
    Base,
    /// As whole huge pages.
    Huge,
    /// Not at all: they are merged, or mapped several times.
    Shared,
}

/// Pages as an address range.
fn address_range(pages: &Range<u64>) -> AddressRange {
    AddressRange { start: pages.start * PAGE_BYTES, end: pages.end * PAGE_BYTES }
}

/// Add a missed range; neighbors with one reason are one range.
fn push_missed(outcome: &mut ActionOutcome, pages: &Range<u64>, why: MissedReason) {
    let range = address_range(pages);
    match outcome.missed_ranges.last_mut() {
        Some((last, reason)) if last.end == range.start && *reason == why => last.end = range.end,
        _ => outcome.missed_ranges.push((range, why)),
    }
}

impl HostState<'_> {
    /// Restrict a thread to CPUs. All CPUs are online, and none is forbidden by a cgroup.
    pub(super) fn set_affinity(
        &mut self,
        thread: ThreadId,
        cpus: &Exchange<IdSet>,
    ) -> Result<ActionOutcome, ActionError> {
        let pid = self.living(thread.process)?;
        let online: IdSet = (0..self.spec.cpus).collect();
        let process = self.processes.get_mut(&pid).filter(|process| process.start_ticks == thread.start_time);
        let found = process.and_then(|process| process.threads.get_mut(&thread.tid)).ok_or(ActionError::Vanished)?;
        let current = found.allowed_cpus.clone().unwrap_or_else(|| online.clone());
        if !cpus.must_write(&current, format_args!("the set of CPUs of thread {}", thread.tid))? {
            return Ok(ActionOutcome { unchanged: true, ..ActionOutcome::default() });
        }
        let allowed = cpus.to.intersection(&online);
        let Some(first) = allowed.iter().next() else {
            return Err(ActionError::Failed("none of the CPUs is online".to_owned()));
        };
        if !allowed.contains(found.last_cpu) {
            let count = allowed.iter().count();
            found.last_cpu = allowed.iter().nth(thread.tid.0 as usize % count).unwrap_or(first);
        }
        found.allowed_cpus = Some(allowed).filter(|allowed| *allowed != online);
        Ok(ActionOutcome::default())
    }

    /// Move pages of a process to a node.
    pub(super) fn move_pages(
        &mut self,
        process: ProcessId,
        ranges: &[AddressRange],
        node: u32,
    ) -> Result<ActionOutcome, ActionError> {
        let pid = self.living(process)?;
        let known_node = u8::try_from(node).ok().filter(|&node| node < self.spec.nodes);
        let Some(node) = known_node else {
            return Err(ActionError::Unsupported(format!("there is no node {node} with memory")));
        };
        let model_id = self.processes[&pid].model_id;
        let mut outcome = ActionOutcome { unchanged: true, ..ActionOutcome::default() };
        for range in ranges {
            let pages = range.start / PAGE_BYTES..range.end.div_ceil(PAGE_BYTES);
            let elsewhere = self.pages_elsewhere(model_id, pages, node);
            outcome.unchanged &= elsewhere.is_empty();
            self.move_runs(model_id, &elsewhere, node, &mut outcome);
        }
        Ok(outcome)
    }

    /// Move runs of one range, as far as the node has free memory, and add the result to `outcome`.
    fn move_runs(
        &mut self,
        process: SimulatedProcessId,
        elsewhere: &[PagesElsewhere],
        node: u8,
        outcome: &mut ActionOutcome,
    ) {
        let mut room = self.free_pages_of_node(node);
        let mut moved: Option<Range<u64>> = None;
        for PagesElsewhere { pages, kind } in elsewhere {
            let count = pages.end - pages.start;
            let fitting = match kind {
                PageKind::Shared => {
                    push_missed(outcome, pages, MissedReason::MappedSeveralTimes);
                    continue;
                }
                PageKind::Base => count.min(room),
                PageKind::Huge => count.min(room - room % PAGES_IN_HUGE_PAGE),
            };
            room -= fitting;
            outcome.moved_pages += Pages(fitting);
            let end = pages.start + fitting;
            if fitting > 0 {
                // All that is between two runs is on the node, is not touched, or stays.
                moved = Some(moved.map_or(pages.start, |moved| moved.start)..end);
            }
            if fitting < count {
                // The rest stays, so that what moves is one range.
                room = 0;
                let why = "the node has no free memory".to_owned();
                push_missed(outcome, &(end..pages.end), MissedReason::Refused(why));
            }
        }
        if let Some(pages) = moved {
            self.place_pages(process, pages, node);
        }
    }

    /// The pages of a range that are on other nodes, with the rest of their huge pages.
    fn pages_elsewhere(&self, process: SimulatedProcessId, pages: Range<u64>, node: u8) -> Vec<PagesElsewhere> {
        let memory = self.model.memory();
        let mut found: Vec<PagesElsewhere> = Vec::new();
        let mut push = |pages: Range<u64>, kind: PageKind| match found.last_mut() {
            Some(last) if last.kind == kind && last.pages.end >= pages.start => {
                last.pages.end = last.pages.end.max(pages.end);
            }
            _ => found.push(PagesElsewhere { pages, kind }),
        };
        for (first, run) in memory.runs(process, pages) {
            let run = MappedRun { page: first, pages: run.pages, entry: run.entry(), ascends: run.ascends };
            let end = first + run.pages;
            let is_elsewhere = |page: u64| memory.node_of(process, page) != node;
            match run.entry {
                PageEntry::Private(_) if is_elsewhere(first) => push(first..end, PageKind::Base),
                PageEntry::HugePart(_) if is_elsewhere(first) => {
                    let start = first - first % PAGES_IN_HUGE_PAGE;
                    push(start..end.next_multiple_of(PAGES_IN_HUGE_PAGE), PageKind::Huge);
                }
                PageEntry::Frame(_) => {
                    for page in (first..end).filter(|&page| is_elsewhere(page)) {
                        let PageEntry::Frame(frame) = run.entry_at(page - first) else { continue };
                        let is_movable = memory.is_frame_movable(frame);
                        push(page..page + 1, if is_movable { PageKind::Base } else { PageKind::Shared });
                    }
                }
                _ => {}
            }
        }
        found
    }

    /// Set from which node memory that a process touches later comes. Ranges with another policy than the expected one
    /// stay.
    pub(super) fn set_memory_policy(
        &mut self,
        process: ProcessId,
        ranges: &[AddressRange],
        policy: &Exchange<MemoryPolicy>,
    ) -> Result<ActionOutcome, ActionError> {
        let pid = self.living(process)?;
        if let MemoryPolicy::Prefer(node) = policy.to
            && node >= u32::from(self.spec.nodes)
        {
            return Err(ActionError::Unsupported(format!("there is no node {node} with memory")));
        }
        let model_id = self.processes[&pid].model_id;
        let stop_durations = vec![STOP_TIME];
        let mut outcome = ActionOutcome { unchanged: true, stop_durations, ..ActionOutcome::default() };
        for &range in ranges {
            let pages = range.start / PAGE_BYTES..range.end.div_ceil(PAGE_BYTES);
            let vmas = self.model.memory().process(model_id).vmas.values();
            let parts: Vec<(Range<u64>, MemoryPolicy)> = vmas
                .map(|vma| (vma.start.max(pages.start)..vma.end().min(pages.end), vma.policy))
                .filter(|(part, _)| !part.is_empty())
                .collect();
            if parts.is_empty() {
                outcome.missed_ranges.push((range, MissedReason::NotMapped));
            }
            for (part, current) in parts {
                if current == policy.from && current != policy.to {
                    outcome.unchanged = false;
                    self.model.set_memory_policy(model_id, part, policy.to);
                } else if current != policy.to {
                    push_missed(&mut outcome, &part, MissedReason::OtherPolicy(current.to_string()));
                }
            }
        }
        Ok(outcome)
    }
}
