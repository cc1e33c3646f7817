//! When blocks are merged, and by what right: at the safe points of an MPI program, or beside a program that runs.

use crate::blocks::{self, BLOCKS, Block, State};
use crate::lock::Locked;
use crate::settings::{self, settings};
use crate::{guest, mappings};
use pagefold_base::{AddressRange, Bytes};
use pagefold_engine::decide::allowance::pause;
use pagefold_engine::{Engine, Error, Options, clock};
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The engine of this process. Whoever has it keeps merges away.
pub static MERGER: Locked<Merger> = Locked::new(Merger::new());

/// The same engine, for threads that free blocks without waiting for the merge in hand. Taken after the lock of the
/// merger, never while a thread that merges works on pages, and held over a fork. A thread that frees has it only to copy
/// the handle.
pub static FREEING: Locked<Option<Arc<Engine>>> = Locked::new(None);

/// Before this moment of [`clock`], in nanoseconds, a safe point has nothing to do.
static DUE: AtomicU64 = AtomicU64::new(0);
/// When the last safe point was, by the same clock; 0 before the first.
static LAST_SAFE_POINT: AtomicU64 = AtomicU64::new(0);
/// How many safe points were more than a look at the clock.
static SLOW_SAFE_POINTS: AtomicU64 = AtomicU64::new(0);
/// Nothing is merged any more.
static OVER: AtomicBool = AtomicBool::new(false);
/// Writers cannot all be made to wait.
static UNWAITING: AtomicBool = AtomicBool::new(false);

/// How long to wait at most to join a domain: the main thread may be the one that waits. Another merge tries again.
const PATIENCE: Duration = Duration::from_millis(200);

/// What is said where writers cannot all be made to wait.
const WHY_UNWAITING: &str = "it has mutexes to which the kernel does not wait to write (priority inheritance, robust)";

/// What merging came to, and with what.
pub struct Merger {
    engine: Option<Arc<Engine>>,
    /// The threads that there were when MPI had begun, which are the main one and MPI's; none if there were others
    /// before.
    threads_of_mpi: Vec<u32>,
    idle: u32,
    rounds: u64,
    time: Duration,
    most_adopted: Bytes,
    most_merged: Bytes,
    zeros: Bytes,
}

/// Why nobody writes to blocks during a merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stillness {
    /// There is one thread that could, and it merges.
    Alone,
    /// Writers are made to wait.
    Held,
}

impl Merger {
    const fn new() -> Self {
        Self {
            engine: None,
            threads_of_mpi: Vec::new(),
            idle: 0,
            rounds: 0,
            time: Duration::ZERO,
            most_adopted: Bytes(0),
            most_merged: Bytes(0),
            zeros: Bytes(0),
        }
    }

    /// When to ask again if it is for others, or a later safe point, to merge: ranks do it at the same safe points.
    /// `None` if it is for this one.
    fn next_turn(&self, before: Option<Duration>) -> Option<Duration> {
        let engine = self.engine.as_ref()?;
        let to_come = BLOCKS.lock().map_or(Bytes::ZERO, |blocks| blocks.bytes(State::New));
        engine.next_turn(before, to_come).unwrap_or(None)
    }

    /// Merge once, if nothing speaks against it. How long to rest then; `None` if there is no more merging.
    fn round(&mut self, stillness: Stillness) -> Option<Duration> {
        let settings = settings()?;
        let blocks = BLOCKS.lock().map_or_else(Vec::new, |blocks| blocks.all(State::New));
        let nothing = self.engine.is_none() && blocks.is_empty();
        if nothing || OVER.load(Ordering::Relaxed) {
            self.idle = self.idle.saturating_add(1);
            return Some(pause(Duration::ZERO, settings.max_slowdown, self.idle));
        }
        let unwaiting = stillness == Stillness::Held && UNWAITING.load(Ordering::Relaxed);
        let why = if unwaiting { Some(WHY_UNWAITING.to_owned()) } else { guest::reason_against() };
        if let Some(why) = why {
            say(&why);
            self.idle = self.idle.saturating_add(1);
            return Some(pause(Duration::ZERO, settings.max_slowdown, self.idle));
        }
        let began = Instant::now();
        match self.merge(stillness) {
            Ok(paid) => self.idle = if paid { 0 } else { self.idle.saturating_add(1) },
            Err(error) if passes(&error) => self.idle = self.idle.saturating_add(1),
            Err(error) => {
                give_up(&chain(&error));
                return None;
            }
        }
        self.rounds += 1;
        self.time += began.elapsed();
        Some(match stillness {
            // The engine keeps to the bound, and knows when the others merge.
            Stillness::Alone => Duration::ZERO,
            Stillness::Held => pause(began.elapsed(), settings.max_slowdown, self.idle),
        })
    }

    /// Whether it paid.
    fn merge(&mut self, stillness: Stillness) -> Result<bool, Error> {
        let Some(settings) = settings() else { return Ok(false) };
        if self.engine.is_none() {
            let options = Options {
                max_slowdown: Some(settings.max_slowdown),
                lifetime: settings.lifetime,
                per_node: settings.per_node,
                patience: PATIENCE,
                ..Options::default()
            };
            let engine = Arc::new(Engine::join(&settings.domain, &options)?);
            if let Some(mut freeing) = FREEING.lock() {
                *freeing = Some(Arc::clone(&engine));
            }
            self.engine = Some(engine);
        }
        if let Some(mut blocks) = BLOCKS.lock() {
            for block in blocks.all(State::New) {
                let adopted = self.adopt(block.range);
                blocks.set(block, if adopted { State::Adopted } else { State::Left });
            }
        }
        let Some(engine) = &self.engine else { return Ok(false) };
        let merged = match stillness {
            // SAFETY: the caller has found that no other thread could write; what else could is held against
            // `guest::reason_against`, and whatever unmaps or replaces blocks takes the lock that this one has, or has
            // the engine give them up before.
            Stillness::Alone => unsafe { engine.merge() }?,
            // SAFETY: whatever moves blocks takes the lock that this thread has, as closing descriptors by ranges does;
            // what unmaps or replaces them does, too, or has the engine give them up before; stacks and mutexes that
            // the kernel writes to are kept out.
            Stillness::Held => unsafe { engine.merge_while_running() }?,
        };
        if settings.report {
            let standing = engine.standing()?;
            let page = mappings::page();
            self.most_adopted = self.most_adopted.max(Bytes(standing.pages.0 * page));
            self.most_merged = self.most_merged.max(Bytes(standing.merged.0 * page));
            self.zeros = Bytes(self.zeros.0 + merged.zeros.0 * page);
        }
        Ok(merged.round(mappings::page()).pays())
    }

    fn adopt(&self, range: AddressRange) -> bool {
        // SAFETY: blocks are private anonymous memory, and `round` has looked for devices that could have it pinned;
        // whoever unmaps or replaces part of it takes the lock first, or has the engine give it up.
        self.engine.as_ref().is_some_and(|engine| unsafe { engine.adopt(range) }.is_ok())
    }

    fn forsake(&mut self, range: AddressRange) {
        // SAFETY: what was a block is moved by whoever has the lock that this one has, and so not during a merge.
        let forsaken = self.engine.as_ref().map(|engine| unsafe { engine.forsake_in_place(range) });
        if let Some(Err(error)) = forsaken {
            self.forget_engine(&error);
        }
    }

    /// A child that cannot join merges nothing any more, and does not try again each time that it frees memory.
    fn forget_engine(&mut self, error: &Error) {
        give_up(&chain(error));
        // It is its parent's, and leaving a domain takes time.
        std::mem::forget(self.engine.take());
        if let Some(mut freeing) = FREEING.lock() {
            std::mem::forget(freeing.take());
        }
    }

    /// Take a range out of blocks: what is left of them stays adopted. The parts that were taken out.
    pub fn cut(&mut self, range: AddressRange) -> Vec<Block> {
        let Some(mut blocks) = BLOCKS.lock() else { return Vec::new() };
        for block in blocks.touching(range).into_iter().filter(|block| block.state == State::Adopted) {
            if let Some(part) = block.range.overlap(range) {
                self.forsake(part);
            }
        }
        blocks.cut(range)
    }

    /// What was merged in a range is no more.
    pub fn forget(&mut self, range: AddressRange) {
        if let Some(Err(error)) = self.engine.as_ref().map(|engine| engine.forget(range)) {
            self.forget_engine(&error);
        }
    }

    /// There is a block that was elsewhere before, where it stood in a way.
    pub fn insert(&mut self, range: AddressRange, heap: bool, state: State) {
        let lost = state == State::Adopted && !self.adopt(range);
        let state = if lost { State::Left } else { state };
        if let Some(mut blocks) = BLOCKS.lock() {
            blocks.insert(Block { range, state, heap });
        }
    }

    /// Leave blocks alone that have part in a range.
    pub fn leave(&mut self, range: AddressRange) {
        let Some(mut blocks) = BLOCKS.lock() else { return };
        for block in blocks.touching(range) {
            if block.state == State::Adopted {
                self.forsake(block.range);
            }
            blocks.set(block, State::Left);
        }
    }

    /// In a child: what its parent did is not its own.
    pub fn begin_anew(&mut self) {
        *self = Self { engine: self.engine.take(), ..Self::new() };
    }

    /// Say what was done.
    fn report(&self) {
        let Self { rounds, time, most_adopted, most_merged, zeros, .. } = self;
        let at_safe_points = match SLOW_SAFE_POINTS.load(Ordering::Relaxed) {
            0 => String::new(),
            slow => format!("; {slow} safe points asked for one"),
        };
        guest::tell(&format!(
            "adopted {most_adopted} and had {most_merged} merged at most; gave {zeros} of zeros back; {rounds} merges \
             took {:.2} s{at_safe_points}",
            time.as_secs_f64()
        ));
    }
}

/// Take a range that is to be unmapped or replaced, where it is, out of blocks: what is left of them stays adopted. It
/// waits for the pages that a merge beside has in hand, and not for its end. The parts of blocks that were taken out;
/// `None` if that could not be done: then [`Merger::cut`] does it.
pub fn cut_beside(range: AddressRange) -> Option<Vec<Block>> {
    // What the merge itself frees comes after what it claims, and must not wait for that.
    if MERGER.is_own() {
        return None;
    }
    // No lock is kept while this thread waits for a claim, so that other threads can free memory meanwhile.
    let engine = Arc::clone(FREEING.lock()?.as_ref()?);
    // SAFETY: this waits for the merge, and the caller unmaps or replaces the range next, where it is.
    let taken = blocks::cut_and_refuse(&BLOCKS, range, || unsafe { engine.refuse(range) }.is_ok())?;
    // A fork while this thread looks would leave the claims locked in the child.
    engine.wait_for_claims(range, || BLOCKS.lock());
    Some(taken)
}

/// Leave blocks alone that have part in a range, whatever they are to the engine.
pub fn leave(range: AddressRange) {
    let touches = BLOCKS.lock().and_then(|blocks| blocks.touches(range));
    if touches.is_some()
        && let Some(mut merger) = MERGER.lock()
    {
        merger.leave(range);
    }
}

/// Whether a later merge may do what this one could not: somebody has the lock, or there are too few descriptors or too
/// little memory just now.
fn passes(error: &Error) -> bool {
    // Memory was pinned since `guest::reason_against` looked, which says so the next time.
    if matches!(error, Error::Pinned(_)) {
        return true;
    }
    let Error::Domain { source, .. } = error else { return false };
    let scarce = matches!(source.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOSPC));
    scarce || matches!(source.kind(), ErrorKind::TimedOut | ErrorKind::Interrupted)
}

/// Merge nothing from now on, and say why.
pub fn give_up(why: &str) {
    if !OVER.swap(true, Ordering::Relaxed) {
        say(why);
    }
    settings::adopt_nothing();
}

/// Writers cannot all be made to wait: merging beside them is over.
pub fn is_unwaiting() {
    UNWAITING.store(true, Ordering::Relaxed);
}

/// Whether nothing is merged any more.
pub fn is_over() -> bool {
    OVER.load(Ordering::Relaxed)
}

/// Why it is not merged, once.
pub fn say(why: &str) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        guest::tell(&format!("not merged: {why}"));
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// A merge beside the program, which runs. How long to rest; `None` if there is no more merging.
pub fn beside() -> Option<Duration> {
    if UNWAITING.load(Ordering::Relaxed) {
        give_up(WHY_UNWAITING);
        return None;
    }
    MERGER.lock()?.round(Stillness::Held)
}

/// MPI has begun; `alone` says whether there was one thread before.
pub fn mpi_began(alone: bool) {
    if let Some(mut merger) = MERGER.lock() {
        merger.threads_of_mpi = if alone { guest::threads() } else { Vec::new() };
    }
}

/// The main thread is at a point at which no rank computes. Programs come to one many thousand times a second, so where
/// nothing is due this takes one look at the clock, whatever the number of blocks, and no lock and no system call.
pub fn safe_point() {
    let now = clock().as_nanos() as u64;
    if now < DUE.load(Ordering::Relaxed) {
        LAST_SAFE_POINT.store(now, Ordering::Relaxed);
    } else {
        due_safe_point(now);
    }
}

#[cold]
fn due_safe_point(now: u64) {
    SLOW_SAFE_POINTS.fetch_add(1, Ordering::Relaxed);
    let before = LAST_SAFE_POINT.swap(now, Ordering::Relaxed);
    if OVER.load(Ordering::Relaxed) {
        DUE.store(u64::MAX, Ordering::Relaxed);
        return;
    }
    let Some(mut merger) = MERGER.lock() else { return };
    let before = (before > 0).then_some(Duration::from_nanos(before));
    if let Some(check) = merger.next_turn(before) {
        DUE.store(check.as_nanos() as u64, Ordering::Relaxed);
        return;
    }
    // A coroutine's stack may be in a block, and must not change under the merge that runs on it.
    let here = 0_u8;
    let here = (&raw const here).addr() as u64;
    if BLOCKS.lock().is_some_and(|blocks| blocks.touches(AddressRange { start: here, end: here + 1 }).is_some()) {
        merger.leave(AddressRange { start: here, end: here + 1 });
    }
    let threads = guest::threads();
    let alone = !threads.is_empty() && threads.iter().all(|thread| merger.threads_of_mpi.contains(thread));
    let stillness = if alone { Stillness::Alone } else { Stillness::Held };
    // A handler would write beside the merge, or wait for the thread that it has interrupted.
    if let Some(rest) = guest::without_signals(|| merger.round(stillness)).flatten() {
        DUE.store((clock() + rest).as_nanos() as u64, Ordering::Relaxed);
    }
}

/// The process ends.
pub fn ends() {
    let Some(settings) = settings() else { return };
    OVER.store(true, Ordering::Relaxed);
    let Some(merger) = MERGER.lock() else { return };
    if settings.report && merger.rounds > 0 {
        merger.report();
    }
    if let Some(engine) = &merger.engine {
        engine.end();
    }
    // What this process has outlived, as the launcher of ranks that were killed.
    pagefold_engine::sweep_domains();
}
