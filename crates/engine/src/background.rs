//! A thread that merges while the program runs, within a share of one CPU. It takes no signals: a handler that wrote to
//! a page that the merge is working on would wait for the thread that it interrupted.

use crate::decide::time_budget::pause_after_round;
use crate::{Engine, Error};
use pagefold_sys::signals::BlockedSignals;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The thread ends when this is dropped, after its current merge. A forked child has no such thread.
#[derive(Debug)]
pub struct BackgroundMerger {
    /// The process that has the thread.
    owner_pid: u32,
    shared: Arc<SharedProgress>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct SharedProgress {
    progress: Mutex<MergeLoopProgress>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct MergeLoopProgress {
    stop_requested: bool,
    merge_count: u64,
    error: Option<Error>,
}

impl Engine {
    /// Merge repeatedly in a thread that uses at most a share of one CPU, from 0 to 1. It pauses with exponential
    /// backoff while merges save less than their time costs ([`crate::decide::time_budget::WorkRound`]).
    ///
    /// # Errors
    /// [`Error::WriteProtectUnavailable`] if writers cannot be blocked; [`Error::DomainUnusable`] if the thread cannot
    /// be created.
    ///
    /// # Safety
    /// Until the result is dropped, the program unmaps or replaces adopted memory only by the engine's own functions.
    /// None of it is registered or pinned, as for io_uring or RDMA.
    pub unsafe fn merge_in_background(self: &Arc<Self>, cpu_share: f64) -> Result<BackgroundMerger, Error> {
        // Report a missing permission now, and not in the thread.
        drop(pagefold_sys::userfault::UserfaultFd::new().map_err(Error::WriteProtectUnavailable)?);
        let shared = Arc::new(SharedProgress::default());
        let (engine, thread_shared) = (Arc::clone(self), Arc::clone(&shared));
        let failed = |source: io::Error| Error::DomainUnusable { name: self.name.clone(), source };
        let thread = thread::Builder::new().name("pagefold".to_owned());
        // The thread inherits the signal mask, so that no handler runs in it even before its first instruction.
        let blocked = BlockedSignals::new().map_err(failed)?;
        let thread = thread.spawn(move || run_merge_loop(&engine, cpu_share, &thread_shared)).map_err(failed)?;
        drop(blocked);
        Ok(BackgroundMerger { owner_pid: std::process::id(), shared, thread: Some(thread) })
    }
}

fn run_merge_loop(engine: &Engine, cpu_share: f64, shared: &SharedProgress) {
    let (mut idle_rounds, page_bytes) = (0, rustix::param::page_size() as u64);
    loop {
        let began = Instant::now();
        // SAFETY: the caller of `merge_in_background` has promised it.
        let result = unsafe { engine.merge_while_running() };
        // As if all threads of the merge had worked all the time.
        let cpu_time = began.elapsed() * engine.options.threads.max(1) as u32;
        let mut progress = shared.progress.lock().unwrap_or_else(PoisonError::into_inner);
        progress.merge_count += 1;
        match result {
            Ok(counters) => {
                idle_rounds = if counters.to_work_round(page_bytes).is_profitable() { 0 } else { idle_rounds + 1 };
                progress.error = None;
            }
            Err(error) => {
                // Pins may end: retry, with growing pauses.
                progress.stop_requested |= !matches!(error, Error::MemoryPinned(_));
                progress.error = Some(error);
                idle_rounds += 1;
            }
        }
        shared.changed.notify_all();
        let pause = pause_after_round(cpu_time, cpu_share, idle_rounds);
        let wait_result = shared.changed.wait_timeout_while(progress, pause, |progress| !progress.stop_requested);
        let (progress, _) = wait_result.unwrap_or_else(PoisonError::into_inner);
        if progress.stop_requested {
            return;
        }
    }
}

impl BackgroundMerger {
    /// Wait until `min_merges` merges were done since the start, the thread has failed, or the timeout is over. Returns
    /// the number of merges done.
    ///
    /// # Errors
    /// The error that ended the thread; [`Error::MemoryPinned`] if the last merge was refused for that;
    /// [`Error::Forked`] in a child, which has no such thread.
    pub fn wait_for_merges(&self, min_merges: u64, timeout: Duration) -> Result<u64, Error> {
        if self.owner_pid != std::process::id() {
            return Err(Error::Forked);
        }
        let progress = self.shared.progress.lock().unwrap_or_else(PoisonError::into_inner);
        let must_wait =
            |progress: &mut MergeLoopProgress| progress.merge_count < min_merges && !progress.stop_requested;
        let wait_result = self.shared.changed.wait_timeout_while(progress, timeout, must_wait);
        let (mut progress, _) = wait_result.unwrap_or_else(PoisonError::into_inner);
        progress.error.take().map_or(Ok(progress.merge_count), Err)
    }
}

impl Drop for BackgroundMerger {
    fn drop(&mut self) {
        if self.owner_pid != std::process::id() {
            // A forked child has no thread that would end, or that would release its locks.
            std::mem::forget(self.thread.take());
            return;
        }
        self.shared.progress.lock().unwrap_or_else(PoisonError::into_inner).stop_requested = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic in it was printed to standard error.
            let _ = thread.join();
        }
    }
}
