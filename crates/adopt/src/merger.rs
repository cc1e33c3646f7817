//! When blocks are merged, and why that is safe: at the safe points of an MPI program, or beside a running program.

use crate::blocks::{self, AdoptableBlock, BLOCKS, BlockState};
use crate::lock::ForkSafeLock;
use crate::settings::{self, settings};
use crate::{mappings, process_hooks};
use pagefold_base::{AddressRange, Bytes};
use pagefold_engine::decide::time_budget::pause_after_round;
use pagefold_engine::{Engine, EngineOptions, Error, merge_clock};
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The engine of this process. While it is locked, no merge runs in other threads.
pub static MERGER: ForkSafeLock<ProcessMerger> = ForkSafeLock::new(ProcessMerger::new());

/// The same engine, for threads that free blocks without waiting for a running merge. Lock it after [`MERGER`], never
/// while a merging thread works on pages, and during a fork. A thread that frees memory locks it only to copy the
/// handle.
pub static ENGINE_FOR_FREEING: ForkSafeLock<Option<Arc<Engine>>> = ForkSafeLock::new(None);

/// Until this time of [`merge_clock`], in nanoseconds, a safe point has nothing to do.
static NEXT_CHECK_NS: AtomicU64 = AtomicU64::new(0);
/// The time of the last safe point, by the same clock; 0 before the first.
static LAST_SAFE_POINT_NS: AtomicU64 = AtomicU64::new(0);
/// How many safe points did more than read the clock.
static CHECKED_SAFE_POINTS: AtomicU64 = AtomicU64::new(0);
/// Whether merging has ended for this process.
static IS_MERGING_OVER: AtomicBool = AtomicBool::new(false);
/// Whether there are writers that cannot be blocked.
static HAS_UNBLOCKABLE_WRITERS: AtomicBool = AtomicBool::new(false);

/// How long to wait at most to join a domain: the waiting thread may be the main thread. Another merge tries again.
const MAX_JOIN_WAIT: Duration = Duration::from_millis(200);

/// The reason that is printed if there are writers that cannot be blocked.
const UNBLOCKABLE_WRITERS_REASON: &str =
    "it has mutexes that the kernel writes without waiting (priority inheritance, robust)";

/// The engine of this process, and the results of its merges.
pub struct ProcessMerger {
    engine: Option<Arc<Engine>>,
    /// The threads right after MPI's start: the main thread and MPI's own. Empty if there were others before.
    mpi_threads: Vec<u32>,
    unprofitable_rounds: u32,
    round_count: u64,
    merge_time: Duration,
    max_adopted: Bytes,
    max_merged: Bytes,
    freed_zeros: Bytes,
}

/// Why no thread writes to blocks during a merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WriteExclusionReason {
    /// The merging thread is the only one that could write.
    OnlyThread,
    /// Writers are blocked.
    WriteProtected,
}

impl ProcessMerger {
    const fn new() -> Self {
        Self {
            engine: None,
            mpi_threads: Vec::new(),
            unprofitable_rounds: 0,
            round_count: 0,
            merge_time: Duration::ZERO,
            max_adopted: Bytes(0),
            max_merged: Bytes(0),
            freed_zeros: Bytes(0),
        }
    }

    /// When to check again, if other members, or a later safe point, are to merge: ranks merge at the same safe points.
    /// `None` if this safe point is to merge.
    fn next_merge_check(&self, previous_safe_point: Option<Duration>) -> Option<Duration> {
        let engine = self.engine.as_ref()?;
        let to_be_adopted = BLOCKS.lock().map_or(Bytes::ZERO, |blocks| blocks.bytes_in_state(BlockState::Unknown));
        engine.next_merge_check(previous_safe_point, to_be_adopted).unwrap_or(None)
    }

    /// Merge once, unless there is a reason not to. Returns the next pause; `None` if merging has ended.
    fn run_round(&mut self, exclusion: WriteExclusionReason) -> Option<Duration> {
        let settings = settings()?;
        let blocks = BLOCKS.lock().map_or_else(Vec::new, |blocks| blocks.blocks_in_state(BlockState::Unknown));
        let has_no_memory = self.engine.is_none() && blocks.is_empty();
        if has_no_memory || IS_MERGING_OVER.load(Ordering::Relaxed) {
            self.unprofitable_rounds = self.unprofitable_rounds.saturating_add(1);
            return Some(pause_after_round(Duration::ZERO, settings.max_slowdown, self.unprofitable_rounds));
        }
        let has_unblockable_writers =
            exclusion == WriteExclusionReason::WriteProtected && HAS_UNBLOCKABLE_WRITERS.load(Ordering::Relaxed);
        let reason = if has_unblockable_writers {
            Some(UNBLOCKABLE_WRITERS_REASON.to_owned())
        } else {
            process_hooks::find_external_writer()
        };
        if let Some(reason) = reason {
            print_reason_once(&reason);
            self.unprofitable_rounds = self.unprofitable_rounds.saturating_add(1);
            return Some(pause_after_round(Duration::ZERO, settings.max_slowdown, self.unprofitable_rounds));
        }
        let began = Instant::now();
        match self.merge_blocks(exclusion) {
            Ok(is_profitable) => {
                self.unprofitable_rounds = if is_profitable { 0 } else { self.unprofitable_rounds.saturating_add(1) }
            }
            Err(error) if is_temporary(&error) => self.unprofitable_rounds = self.unprofitable_rounds.saturating_add(1),
            Err(error) => {
                stop_merging(&error_chain(&error));
                return None;
            }
        }
        self.round_count += 1;
        self.merge_time += began.elapsed();
        Some(match exclusion {
            // The engine keeps to the bound, and knows when the other members merge.
            WriteExclusionReason::OnlyThread => Duration::ZERO,
            WriteExclusionReason::WriteProtected => {
                pause_after_round(began.elapsed(), settings.max_slowdown, self.unprofitable_rounds)
            }
        })
    }

    /// Returns whether the merge was profitable.
    fn merge_blocks(&mut self, exclusion: WriteExclusionReason) -> Result<bool, Error> {
        let Some(settings) = settings() else { return Ok(false) };
        if self.engine.is_none() {
            let options = EngineOptions {
                max_slowdown: Some(settings.max_slowdown),
                min_runtime: settings.min_runtime,
                per_node: settings.per_node,
                max_join_wait: MAX_JOIN_WAIT,
                ..EngineOptions::default()
            };
            let engine = Arc::new(Engine::join(&settings.domain, &options)?);
            if let Some(mut engine_for_freeing) = ENGINE_FOR_FREEING.lock() {
                *engine_for_freeing = Some(Arc::clone(&engine));
            }
            self.engine = Some(engine);
        }
        if let Some(mut blocks) = BLOCKS.lock() {
            for block in blocks.blocks_in_state(BlockState::Unknown) {
                let is_adopted = self.adopt_range(block.range);
                blocks.set_state(block, if is_adopted { BlockState::Adopted } else { BlockState::Excluded });
            }
        }
        let Some(engine) = &self.engine else { return Ok(false) };
        let counters = match exclusion {
            // SAFETY: the caller has checked that no other thread could write. [`process_hooks::find_external_writer`]
            // has excluded other writers. Code that unmaps or replaces blocks takes the lock that this thread holds, or
            // makes the engine disown them before.
            WriteExclusionReason::OnlyThread => unsafe { engine.merge() }?,
            // SAFETY: code that moves blocks, and code that closes ranges of descriptors, takes the lock that this
            // thread holds. Code that unmaps or replaces blocks does so, too, or makes the engine disown them before.
            // Stacks and mutexes that the kernel writes to are excluded.
            WriteExclusionReason::WriteProtected => unsafe { engine.merge_while_running() }?,
        };
        if settings.prints_report {
            let status = engine.status()?;
            let page_bytes = mappings::page_bytes();
            self.max_adopted = self.max_adopted.max(Bytes(status.pages.0 * page_bytes));
            self.max_merged = self.max_merged.max(Bytes(status.merged.0 * page_bytes));
            self.freed_zeros = Bytes(self.freed_zeros.0 + counters.zeros_freed.0 * page_bytes);
        }
        Ok(counters.to_work_round(mappings::page_bytes()).is_profitable())
    }

    fn adopt_range(&self, range: AddressRange) -> bool {
        // SAFETY: blocks are private anonymous memory, and `run_round` has checked for devices that could have pinned
        // it. Code that unmaps or replaces a part takes the lock first, or makes the engine disown it.
        self.engine.as_ref().is_some_and(|engine| unsafe { engine.adopt(range) }.is_ok())
    }

    fn disown_range(&mut self, range: AddressRange) {
        // SAFETY: code that moves former blocks holds the lock that this thread holds, and so does not run during a
        // merge.
        let disowned = self.engine.as_ref().map(|engine| unsafe { engine.disown_in_place(range) });
        if let Some(Err(error)) = disowned {
            self.drop_engine(&error);
        }
    }

    /// A child that cannot join merges nothing from then on, and does not retry each time that it frees memory.
    fn drop_engine(&mut self, error: &Error) {
        stop_merging(&error_chain(error));
        // The engine is the parent's, and leaving a domain takes time.
        std::mem::forget(self.engine.take());
        if let Some(mut engine_for_freeing) = ENGINE_FOR_FREEING.lock() {
            std::mem::forget(engine_for_freeing.take());
        }
    }

    /// Remove a range from the blocks; the rest of them stays adopted. Returns the removed parts.
    pub fn remove_blocks(&mut self, range: AddressRange) -> Vec<AdoptableBlock> {
        let Some(mut blocks) = BLOCKS.lock() else { return Vec::new() };
        for block in blocks.blocks_in(range).into_iter().filter(|block| block.state == BlockState::Adopted) {
            if let Some(part) = block.range.overlap(range) {
                self.disown_range(part);
            }
        }
        blocks.remove_range(range)
    }

    /// Forget the merged pages of a range.
    pub fn forget_pages(&mut self, range: AddressRange) {
        if let Some(Err(error)) = self.engine.as_ref().map(|engine| engine.forget_pages(range)) {
            self.drop_engine(&error);
        }
    }

    /// Add a block that was moved from another address, with its state there.
    pub fn insert_moved(&mut self, range: AddressRange, is_heap: bool, state: BlockState) {
        let is_adoption_failed = state == BlockState::Adopted && !self.adopt_range(range);
        let state = if is_adoption_failed { BlockState::Excluded } else { state };
        if let Some(mut blocks) = BLOCKS.lock() {
            blocks.insert(AdoptableBlock { range, state, is_heap });
        }
    }

    /// Stop merging all blocks that overlap a range.
    pub fn exclude_blocks(&mut self, range: AddressRange) {
        let Some(mut blocks) = BLOCKS.lock() else { return };
        for block in blocks.blocks_in(range) {
            if block.state == BlockState::Adopted {
                self.disown_range(block.range);
            }
            blocks.set_state(block, BlockState::Excluded);
        }
    }

    /// In a child: drop the results of its parent.
    pub fn reset_after_fork(&mut self) {
        *self = Self { engine: self.engine.take(), ..Self::new() };
    }

    /// Print the results.
    fn print_report(&self) {
        let Self { round_count: rounds, merge_time: time, max_adopted, max_merged, freed_zeros, .. } = self;
        let safe_point_report = match CHECKED_SAFE_POINTS.load(Ordering::Relaxed) {
            0 => String::new(),
            checked => format!("; {checked} safe points checked whether to merge"),
        };
        process_hooks::write_to_stderr(&format!(
            "{max_adopted} adopted, {max_merged} merged at most, {freed_zeros} of zeros freed; {rounds} merges took \
             {:.2} s{safe_point_report}",
            time.as_secs_f64()
        ));
    }
}

/// Remove a range that is about to be unmapped or replaced in place from the blocks; the rest of them stays adopted. It
/// waits for the pages that a merge in another thread works on, not for its end. Returns the removed parts; `None` if
/// that is not possible: then [`ProcessMerger::remove_blocks`] does it.
pub fn remove_without_waiting(range: AddressRange) -> Option<Vec<AdoptableBlock>> {
    // The merge itself frees memory outside of its claims, and must not wait for them.
    if MERGER.is_held_by_this_thread() {
        return None;
    }
    // This thread holds no lock while it waits for a claim, so that other threads can free memory in the meantime.
    let engine = Arc::clone(ENGINE_FOR_FREEING.lock()?.as_ref()?);
    // SAFETY: this waits for the merge, and the caller unmaps or replaces the range next, in place.
    let removed = blocks::cut_and_refuse(&BLOCKS, range, || unsafe { engine.refuse(range) }.is_ok())?;
    // A fork while this thread checks the claims would leave them locked in the child.
    engine.wait_for_claims(range, || BLOCKS.lock());
    Some(removed)
}

/// Stop merging all blocks that overlap a range, in any state.
pub fn exclude_blocks_in(range: AddressRange) {
    let has_known_block = BLOCKS.lock().and_then(|blocks| blocks.has_known_block(range));
    if has_known_block.is_some()
        && let Some(mut merger) = MERGER.lock()
    {
        merger.exclude_blocks(range);
    }
}

/// Whether a later merge may succeed after this error: another member holds the lock, or descriptors or memory are
/// short at present.
fn is_temporary(error: &Error) -> bool {
    // Memory was pinned after [`process_hooks::find_external_writer`] checked; its next check reports that.
    if matches!(error, Error::MemoryPinned(_)) {
        return true;
    }
    let Error::DomainUnusable { source, .. } = error else { return false };
    let is_scarce = matches!(source.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOSPC));
    is_scarce || matches!(source.kind(), ErrorKind::TimedOut | ErrorKind::Interrupted)
}

/// Merge nothing from now on, and print the reason.
pub fn stop_merging(reason: &str) {
    if !IS_MERGING_OVER.swap(true, Ordering::Relaxed) {
        print_reason_once(reason);
    }
    settings::disable_adoption();
}

/// There are writers that cannot be blocked: end merging beside them.
pub fn note_unblockable_writers() {
    HAS_UNBLOCKABLE_WRITERS.store(true, Ordering::Relaxed);
}

/// Whether merging has ended.
pub fn is_merging_over() -> bool {
    IS_MERGING_OVER.load(Ordering::Relaxed)
}

/// Print once why the program is not merged.
pub fn print_reason_once(reason: &str) {
    static WAS_PRINTED: AtomicBool = AtomicBool::new(false);
    if !WAS_PRINTED.swap(true, Ordering::Relaxed) {
        process_hooks::write_to_stderr(&format!("not merged: {reason}"));
    }
}

fn error_chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// Merge beside the running program. Returns the next pause; `None` if merging has ended.
pub fn merge_beside_program() -> Option<Duration> {
    if HAS_UNBLOCKABLE_WRITERS.load(Ordering::Relaxed) {
        stop_merging(UNBLOCKABLE_WRITERS_REASON);
        return None;
    }
    MERGER.lock()?.run_round(WriteExclusionReason::WriteProtected)
}

/// MPI has started. `was_single_threaded`: whether there was one thread before.
pub fn record_mpi_threads(was_single_threaded: bool) {
    if let Some(mut merger) = MERGER.lock() {
        merger.mpi_threads = if was_single_threaded { process_hooks::thread_ids() } else { Vec::new() };
    }
}

/// The main thread is at a point where no rank computes. Programs reach such points many thousand times a second. If no
/// merge is due, this reads the clock once, for any number of blocks, and takes no lock and no system call.
pub fn on_safe_point() {
    let now = merge_clock().as_nanos() as u64;
    if now < NEXT_CHECK_NS.load(Ordering::Relaxed) {
        LAST_SAFE_POINT_NS.store(now, Ordering::Relaxed);
    } else {
        check_safe_point(now);
    }
}

#[cold]
fn check_safe_point(now: u64) {
    CHECKED_SAFE_POINTS.fetch_add(1, Ordering::Relaxed);
    let previous_safe_point = LAST_SAFE_POINT_NS.swap(now, Ordering::Relaxed);
    if IS_MERGING_OVER.load(Ordering::Relaxed) {
        NEXT_CHECK_NS.store(u64::MAX, Ordering::Relaxed);
        return;
    }
    let Some(mut merger) = MERGER.lock() else { return };
    let previous_safe_point = (previous_safe_point > 0).then_some(Duration::from_nanos(previous_safe_point));
    if let Some(check) = merger.next_merge_check(previous_safe_point) {
        NEXT_CHECK_NS.store(check.as_nanos() as u64, Ordering::Relaxed);
        return;
    }
    // A coroutine's stack may be in a block, and must not change during a merge that runs on it.
    let stack_variable = 0_u8;
    let stack_address = (&raw const stack_variable).addr() as u64;
    if BLOCKS.lock().is_some_and(|blocks| {
        blocks.has_known_block(AddressRange { start: stack_address, end: stack_address + 1 }).is_some()
    }) {
        merger.exclude_blocks(AddressRange { start: stack_address, end: stack_address + 1 });
    }
    let threads = process_hooks::thread_ids();
    let is_only_thread = !threads.is_empty() && threads.iter().all(|thread| merger.mpi_threads.contains(thread));
    let exclusion =
        if is_only_thread { WriteExclusionReason::OnlyThread } else { WriteExclusionReason::WriteProtected };
    // A signal handler would write during the merge, or wait for the thread that it has interrupted.
    if let Some(pause) = process_hooks::without_signals(|| merger.run_round(exclusion)).flatten() {
        NEXT_CHECK_NS.store((merge_clock() + pause).as_nanos() as u64, Ordering::Relaxed);
    }
}

/// The process exits.
pub fn on_exit() {
    let Some(settings) = settings() else { return };
    IS_MERGING_OVER.store(true, Ordering::Relaxed);
    let Some(merger) = MERGER.lock() else { return };
    if settings.prints_report && merger.round_count > 0 {
        merger.print_report();
    }
    if let Some(engine) = &merger.engine {
        engine.prepare_exit();
    }
    // Members that this process has outlived, as the launcher of killed ranks does.
    pagefold_engine::remove_dead_domains();
}
