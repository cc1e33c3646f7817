//! When blocks are merged, and by what right: at the safe points of an MPI program, or beside a program that runs.

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

/// The engine of this process. Whoever has it keeps merges away.
pub static MERGER: ForkSafeLock<ProcessMerger> = ForkSafeLock::new(ProcessMerger::new());

/// The same engine, for threads that free blocks without waiting for the merge in hand. Taken after the lock of the
/// merger, never while a thread that merges works on pages, and held over a fork. A thread that frees has it only to copy
/// the handle.
pub static ENGINE_FOR_FREEING: ForkSafeLock<Option<Arc<Engine>>> = ForkSafeLock::new(None);

/// Before this moment of [`merge_clock`], in nanoseconds, a safe point has nothing to do.
static NEXT_CHECK_NS: AtomicU64 = AtomicU64::new(0);
/// When the last safe point was, by the same clock; 0 before the first.
static LAST_SAFE_POINT_NS: AtomicU64 = AtomicU64::new(0);
/// How many safe points were more than a look at the clock.
static CHECKED_SAFE_POINTS: AtomicU64 = AtomicU64::new(0);
/// Nothing is merged any more.
static IS_MERGING_OVER: AtomicBool = AtomicBool::new(false);
/// Writers cannot all be made to wait.
static HAS_UNBLOCKABLE_WRITERS: AtomicBool = AtomicBool::new(false);

/// How long to wait at most to join a domain: the main thread may be the one that waits. Another merge tries again.
const MAX_JOIN_WAIT: Duration = Duration::from_millis(200);

/// What is said where writers cannot all be made to wait.
const UNBLOCKABLE_WRITERS_REASON: &str =
    "it has mutexes to which the kernel does not wait to write (priority inheritance, robust)";

/// What merging came to, and with what.
pub struct ProcessMerger {
    engine: Option<Arc<Engine>>,
    /// The threads that there were when MPI had begun, which are the main one and MPI's; none if there were others
    /// before.
    mpi_threads: Vec<u32>,
    unprofitable_rounds: u32,
    round_count: u64,
    merge_time: Duration,
    max_adopted: Bytes,
    max_merged: Bytes,
    freed_zeros: Bytes,
}

/// Why nobody writes to blocks during a merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WriteExclusionReason {
    /// There is one thread that could, and it merges.
    OnlyThread,
    /// Writers are made to wait.
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

    /// When to ask again if it is for others, or a later safe point, to merge: ranks do it at the same safe points.
    /// `None` if it is for this one.
    fn next_merge_check(&self, previous_safe_point: Option<Duration>) -> Option<Duration> {
        let engine = self.engine.as_ref()?;
        let to_come = BLOCKS.lock().map_or(Bytes::ZERO, |blocks| blocks.bytes_in_state(BlockState::Unknown));
        engine.next_merge_check(previous_safe_point, to_come).unwrap_or(None)
    }

    /// Merge once, if nothing speaks against it. How long to rest then; `None` if there is no more merging.
    fn run_round(&mut self, exclusion: WriteExclusionReason) -> Option<Duration> {
        let settings = settings()?;
        let blocks = BLOCKS.lock().map_or_else(Vec::new, |blocks| blocks.blocks_in_state(BlockState::Unknown));
        let nothing = self.engine.is_none() && blocks.is_empty();
        if nothing || IS_MERGING_OVER.load(Ordering::Relaxed) {
            self.unprofitable_rounds = self.unprofitable_rounds.saturating_add(1);
            return Some(pause_after_round(Duration::ZERO, settings.max_slowdown, self.unprofitable_rounds));
        }
        let unwaiting =
            exclusion == WriteExclusionReason::WriteProtected && HAS_UNBLOCKABLE_WRITERS.load(Ordering::Relaxed);
        let why =
            if unwaiting { Some(UNBLOCKABLE_WRITERS_REASON.to_owned()) } else { process_hooks::find_external_writer() };
        if let Some(why) = why {
            print_reason_once(&why);
            self.unprofitable_rounds = self.unprofitable_rounds.saturating_add(1);
            return Some(pause_after_round(Duration::ZERO, settings.max_slowdown, self.unprofitable_rounds));
        }
        let began = Instant::now();
        match self.merge_blocks(exclusion) {
            Ok(paid) => self.unprofitable_rounds = if paid { 0 } else { self.unprofitable_rounds.saturating_add(1) },
            Err(error) if is_temporary(&error) => self.unprofitable_rounds = self.unprofitable_rounds.saturating_add(1),
            Err(error) => {
                stop_merging(&error_chain(&error));
                return None;
            }
        }
        self.round_count += 1;
        self.merge_time += began.elapsed();
        Some(match exclusion {
            // The engine keeps to the bound, and knows when the others merge.
            WriteExclusionReason::OnlyThread => Duration::ZERO,
            WriteExclusionReason::WriteProtected => {
                pause_after_round(began.elapsed(), settings.max_slowdown, self.unprofitable_rounds)
            }
        })
    }

    /// Whether it paid.
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
            if let Some(mut freeing) = ENGINE_FOR_FREEING.lock() {
                *freeing = Some(Arc::clone(&engine));
            }
            self.engine = Some(engine);
        }
        if let Some(mut blocks) = BLOCKS.lock() {
            for block in blocks.blocks_in_state(BlockState::Unknown) {
                let adopted = self.adopt_range(block.range);
                blocks.set_state(block, if adopted { BlockState::Adopted } else { BlockState::Excluded });
            }
        }
        let Some(engine) = &self.engine else { return Ok(false) };
        let merged = match exclusion {
            // SAFETY: the caller has found that no other thread could write; what else could is held against
            // `guest::reason_against`, and whatever unmaps or replaces blocks takes the lock that this one has, or has
            // the engine give them up before.
            WriteExclusionReason::OnlyThread => unsafe { engine.merge() }?,
            // SAFETY: whatever moves blocks takes the lock that this thread has, as closing descriptors by ranges does;
            // what unmaps or replaces them does, too, or has the engine give them up before; stacks and mutexes that
            // the kernel writes to are kept out.
            WriteExclusionReason::WriteProtected => unsafe { engine.merge_while_running() }?,
        };
        if settings.prints_report {
            let standing = engine.status()?;
            let page = mappings::page_bytes();
            self.max_adopted = self.max_adopted.max(Bytes(standing.pages.0 * page));
            self.max_merged = self.max_merged.max(Bytes(standing.merged.0 * page));
            self.freed_zeros = Bytes(self.freed_zeros.0 + merged.zeros_freed.0 * page);
        }
        Ok(merged.to_work_round(mappings::page_bytes()).is_profitable())
    }

    fn adopt_range(&self, range: AddressRange) -> bool {
        // SAFETY: blocks are private anonymous memory, and `round` has looked for devices that could have it pinned;
        // whoever unmaps or replaces part of it takes the lock first, or has the engine give it up.
        self.engine.as_ref().is_some_and(|engine| unsafe { engine.adopt(range) }.is_ok())
    }

    fn disown_range(&mut self, range: AddressRange) {
        // SAFETY: what was a block is moved by whoever has the lock that this one has, and so not during a merge.
        let forsaken = self.engine.as_ref().map(|engine| unsafe { engine.disown_in_place(range) });
        if let Some(Err(error)) = forsaken {
            self.drop_engine(&error);
        }
    }

    /// A child that cannot join merges nothing any more, and does not try again each time that it frees memory.
    fn drop_engine(&mut self, error: &Error) {
        stop_merging(&error_chain(error));
        // It is its parent's, and leaving a domain takes time.
        std::mem::forget(self.engine.take());
        if let Some(mut freeing) = ENGINE_FOR_FREEING.lock() {
            std::mem::forget(freeing.take());
        }
    }

    /// Take a range out of blocks: what is left of them stays adopted. The parts that were taken out.
    pub fn remove_blocks(&mut self, range: AddressRange) -> Vec<AdoptableBlock> {
        let Some(mut blocks) = BLOCKS.lock() else { return Vec::new() };
        for block in blocks.blocks_in(range).into_iter().filter(|block| block.state == BlockState::Adopted) {
            if let Some(part) = block.range.overlap(range) {
                self.disown_range(part);
            }
        }
        blocks.remove_range(range)
    }

    /// What was merged in a range is no more.
    pub fn forget_pages(&mut self, range: AddressRange) {
        if let Some(Err(error)) = self.engine.as_ref().map(|engine| engine.forget_pages(range)) {
            self.drop_engine(&error);
        }
    }

    /// There is a block that was elsewhere before, where it stood in a way.
    pub fn insert_moved(&mut self, range: AddressRange, is_heap: bool, state: BlockState) {
        let lost = state == BlockState::Adopted && !self.adopt_range(range);
        let state = if lost { BlockState::Excluded } else { state };
        if let Some(mut blocks) = BLOCKS.lock() {
            blocks.insert(AdoptableBlock { range, state, is_heap });
        }
    }

    /// Leave blocks alone that have part in a range.
    pub fn exclude_blocks(&mut self, range: AddressRange) {
        let Some(mut blocks) = BLOCKS.lock() else { return };
        for block in blocks.blocks_in(range) {
            if block.state == BlockState::Adopted {
                self.disown_range(block.range);
            }
            blocks.set_state(block, BlockState::Excluded);
        }
    }

    /// In a child: what its parent did is not its own.
    pub fn reset_after_fork(&mut self) {
        *self = Self { engine: self.engine.take(), ..Self::new() };
    }

    /// Say what was done.
    fn print_report(&self) {
        let Self {
            round_count: rounds,
            merge_time: time,
            max_adopted: most_adopted,
            max_merged: most_merged,
            freed_zeros: zeros,
            ..
        } = self;
        let at_safe_points = match CHECKED_SAFE_POINTS.load(Ordering::Relaxed) {
            0 => String::new(),
            slow => format!("; {slow} safe points asked for one"),
        };
        process_hooks::write_to_stderr(&format!(
            "adopted {most_adopted} and had {most_merged} merged at most; gave {zeros} of zeros back; {rounds} merges \
             took {:.2} s{at_safe_points}",
            time.as_secs_f64()
        ));
    }
}

/// Take a range that is to be unmapped or replaced, where it is, out of blocks: what is left of them stays adopted. It
/// waits for the pages that a merge beside has in hand, and not for its end. The parts of blocks that were taken out;
/// `None` if that could not be done: then [`ProcessMerger::remove_blocks`] does it.
pub fn remove_without_waiting(range: AddressRange) -> Option<Vec<AdoptableBlock>> {
    // What the merge itself frees comes after what it claims, and must not wait for that.
    if MERGER.is_held_by_this_thread() {
        return None;
    }
    // No lock is kept while this thread waits for a claim, so that other threads can free memory meanwhile.
    let engine = Arc::clone(ENGINE_FOR_FREEING.lock()?.as_ref()?);
    // SAFETY: this waits for the merge, and the caller unmaps or replaces the range next, where it is.
    let taken = blocks::cut_and_refuse(&BLOCKS, range, || unsafe { engine.refuse(range) }.is_ok())?;
    // A fork while this thread looks would leave the claims locked in the child.
    engine.wait_for_claims(range, || BLOCKS.lock());
    Some(taken)
}

/// Leave blocks alone that have part in a range, whatever they are to the engine.
pub fn exclude_blocks_in(range: AddressRange) {
    let touches = BLOCKS.lock().and_then(|blocks| blocks.has_known_block(range));
    if touches.is_some()
        && let Some(mut merger) = MERGER.lock()
    {
        merger.exclude_blocks(range);
    }
}

/// Whether a later merge may do what this one could not: somebody has the lock, or there are too few descriptors or too
/// little memory just now.
fn is_temporary(error: &Error) -> bool {
    // Memory was pinned since `guest::reason_against` looked, which says so the next time.
    if matches!(error, Error::MemoryPinned(_)) {
        return true;
    }
    let Error::DomainUnusable { source, .. } = error else { return false };
    let scarce = matches!(source.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOSPC));
    scarce || matches!(source.kind(), ErrorKind::TimedOut | ErrorKind::Interrupted)
}

/// Merge nothing from now on, and say why.
pub fn stop_merging(reason: &str) {
    if !IS_MERGING_OVER.swap(true, Ordering::Relaxed) {
        print_reason_once(reason);
    }
    settings::disable_adoption();
}

/// Writers cannot all be made to wait: merging beside them is over.
pub fn note_unblockable_writers() {
    HAS_UNBLOCKABLE_WRITERS.store(true, Ordering::Relaxed);
}

/// Whether nothing is merged any more.
pub fn is_merging_over() -> bool {
    IS_MERGING_OVER.load(Ordering::Relaxed)
}

/// Why it is not merged, once.
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

/// A merge beside the program, which runs. How long to rest; `None` if there is no more merging.
pub fn merge_beside_program() -> Option<Duration> {
    if HAS_UNBLOCKABLE_WRITERS.load(Ordering::Relaxed) {
        stop_merging(UNBLOCKABLE_WRITERS_REASON);
        return None;
    }
    MERGER.lock()?.run_round(WriteExclusionReason::WriteProtected)
}

/// MPI has begun; `alone` says whether there was one thread before.
pub fn record_mpi_threads(was_single_threaded: bool) {
    if let Some(mut merger) = MERGER.lock() {
        merger.mpi_threads = if was_single_threaded { process_hooks::thread_ids() } else { Vec::new() };
    }
}

/// The main thread is at a point at which no rank computes. Programs come to one many thousand times a second, so where
/// nothing is due this takes one look at the clock, whatever the number of blocks, and no lock and no system call.
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
    let before = LAST_SAFE_POINT_NS.swap(now, Ordering::Relaxed);
    if IS_MERGING_OVER.load(Ordering::Relaxed) {
        NEXT_CHECK_NS.store(u64::MAX, Ordering::Relaxed);
        return;
    }
    let Some(mut merger) = MERGER.lock() else { return };
    let before = (before > 0).then_some(Duration::from_nanos(before));
    if let Some(check) = merger.next_merge_check(before) {
        NEXT_CHECK_NS.store(check.as_nanos() as u64, Ordering::Relaxed);
        return;
    }
    // A coroutine's stack may be in a block, and must not change under the merge that runs on it.
    let here = 0_u8;
    let here = (&raw const here).addr() as u64;
    if BLOCKS.lock().is_some_and(|blocks| blocks.has_known_block(AddressRange { start: here, end: here + 1 }).is_some())
    {
        merger.exclude_blocks(AddressRange { start: here, end: here + 1 });
    }
    let threads = process_hooks::thread_ids();
    let alone = !threads.is_empty() && threads.iter().all(|thread| merger.mpi_threads.contains(thread));
    let stillness = if alone { WriteExclusionReason::OnlyThread } else { WriteExclusionReason::WriteProtected };
    // A handler would write beside the merge, or wait for the thread that it has interrupted.
    if let Some(rest) = process_hooks::without_signals(|| merger.run_round(stillness)).flatten() {
        NEXT_CHECK_NS.store((merge_clock() + rest).as_nanos() as u64, Ordering::Relaxed);
    }
}

/// The process ends.
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
    // What this process has outlived, as the launcher of ranks that were killed.
    pagefold_engine::remove_dead_domains();
}
