//! A thread that merges while the program runs, within a share of one CPU. It takes no signals: a handler that writes to
//! memory in hand would wait for the very thread that it has interrupted.

use crate::decide::time_budget::pause_after_round;
use crate::{Engine, Error};
use pagefold_sys::signals::BlockedSignals;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// It ends when this is dropped, once the merge in hand is done. A child that is forked has none.
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
    /// Merge again and again, in a thread that takes at most a share of one CPU, from 0 to 1, and rests longer and
    /// longer while merges do not win what their time is worth ([`crate::decide::time_budget::WorkRound`]).
    ///
    /// # Errors
    /// [`Error::WriteProtectUnavailable`] where writers cannot be made to wait; [`Error::DomainUnusable`] where there can be no thread.
    ///
    /// # Safety
    /// Until what this gives is dropped, nobody unmaps or replaces adopted memory but by the engine's own functions.
    /// None of it is registered or pinned, as for io_uring or RDMA.
    pub unsafe fn merge_in_background(self: &Arc<Self>, cpu_share: f64) -> Result<BackgroundMerger, Error> {
        // Whether it may is told now, and not in the thread.
        drop(pagefold_sys::userfault::UserfaultFd::new().map_err(Error::WriteProtectUnavailable)?);
        let shared = Arc::new(SharedProgress::default());
        let (engine, told) = (Arc::clone(self), Arc::clone(&shared));
        let failed = |source: io::Error| Error::DomainUnusable { name: self.name.clone(), source };
        let thread = thread::Builder::new().name("pagefold".to_owned());
        // The thread inherits the mask, so that no handler runs in it before its first instruction either.
        let blocked = BlockedSignals::new().map_err(failed)?;
        let thread = thread.spawn(move || run_merge_loop(&engine, cpu_share, &told)).map_err(failed)?;
        drop(blocked);
        Ok(BackgroundMerger { owner_pid: std::process::id(), shared, thread: Some(thread) })
    }
}

fn run_merge_loop(engine: &Engine, cpu_share: f64, shared: &SharedProgress) {
    let (mut idle, page) = (0, rustix::param::page_size() as u64);
    loop {
        let began = Instant::now();
        // SAFETY: whoever started this has promised it.
        let done = unsafe { engine.merge_while_running() };
        // As if all its threads had worked all the time.
        let took = began.elapsed() * engine.options.threads.max(1) as u32;
        let mut status = shared.progress.lock().unwrap_or_else(PoisonError::into_inner);
        status.merge_count += 1;
        match done {
            Ok(merged) => {
                idle = if merged.to_work_round(page).is_profitable() { 0 } else { idle + 1 };
                status.error = None;
            }
            Err(error) => {
                // Pins may end: it tries again, later each time.
                status.stop_requested |= !matches!(error, Error::MemoryPinned(_));
                status.error = Some(error);
                idle += 1;
            }
        }
        shared.changed.notify_all();
        let rest = pause_after_round(took, cpu_share, idle);
        let waited = shared.changed.wait_timeout_while(status, rest, |status| !status.stop_requested);
        let (status, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if status.stop_requested {
            return;
        }
    }
}

impl BackgroundMerger {
    /// Wait until so many merges were done since the beginning, or it has failed, or a time is over. How many were
    /// done.
    ///
    /// # Errors
    /// What ended it; [`Error::MemoryPinned`] if that is why the last merge was refused; [`Error::Forked`] in a child, which
    /// has no such thread.
    pub fn wait_for_merges(&self, min_merges: u64, timeout: Duration) -> Result<u64, Error> {
        if self.owner_pid != std::process::id() {
            return Err(Error::Forked);
        }
        let status = self.shared.progress.lock().unwrap_or_else(PoisonError::into_inner);
        let waits = |status: &mut MergeLoopProgress| status.merge_count < min_merges && !status.stop_requested;
        let waited = self.shared.changed.wait_timeout_while(status, timeout, waits);
        let (mut status, _) = waited.unwrap_or_else(PoisonError::into_inner);
        status.error.take().map_or(Ok(status.merge_count), Err)
    }
}

impl Drop for BackgroundMerger {
    fn drop(&mut self) {
        if self.owner_pid != std::process::id() {
            // In a child there is no thread that would end, or that would give up what it had locked.
            std::mem::forget(self.thread.take());
            return;
        }
        self.shared.progress.lock().unwrap_or_else(PoisonError::into_inner).stop_requested = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic in it was told on standard error.
            let _ = thread.join();
        }
    }
}
