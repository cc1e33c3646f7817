//! A thread that merges while the program runs, within a share of one CPU. It takes no signals: a handler that writes to
//! memory in hand would wait for the very thread that it has interrupted.

use crate::decide::allowance::pause;
use crate::{Engine, Error};
use pagefold_sys::signals::BlockedSignals;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// It ends when this is dropped, once the merge in hand is done. A child that is forked has none.
#[derive(Debug)]
pub struct Background {
    /// The process that has the thread.
    process: u32,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    status: Mutex<Status>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Status {
    end: bool,
    rounds: u64,
    failed: Option<Error>,
}

impl Engine {
    /// Merge again and again, in a thread that takes at most a share of one CPU, from 0 to 1, and rests longer and
    /// longer while merges do not win what their time is worth ([`crate::decide::allowance::Round`]).
    ///
    /// # Errors
    /// [`Error::NotPermitted`] where writers cannot be made to wait; [`Error::Domain`] where there can be no thread.
    ///
    /// # Safety
    /// Until what this gives is dropped, nobody unmaps or replaces adopted memory but by the engine's own functions.
    /// None of it is registered or pinned, as for io_uring or RDMA.
    pub unsafe fn merge_in_background(self: &Arc<Self>, share: f64) -> Result<Background, Error> {
        // Whether it may is told now, and not in the thread.
        drop(pagefold_sys::userfault::UserFault::new().map_err(Error::NotPermitted)?);
        let shared = Arc::new(Shared::default());
        let (engine, told) = (Arc::clone(self), Arc::clone(&shared));
        let failed = |source: io::Error| Error::Domain { name: self.name.clone(), source };
        let thread = thread::Builder::new().name("pagefold".to_owned());
        // The thread inherits the mask, so that no handler runs in it before its first instruction either.
        let blocked = BlockedSignals::new().map_err(failed)?;
        let thread = thread.spawn(move || rounds(&engine, share, &told)).map_err(failed)?;
        drop(blocked);
        Ok(Background { process: std::process::id(), shared, thread: Some(thread) })
    }
}

fn rounds(engine: &Engine, share: f64, shared: &Shared) {
    let (mut idle, page) = (0, rustix::param::page_size() as u64);
    loop {
        let began = Instant::now();
        // SAFETY: whoever started this has promised it.
        let done = unsafe { engine.merge_while_running() };
        // As if all its threads had worked all the time.
        let took = began.elapsed() * engine.options.threads.max(1) as u32;
        let mut status = shared.status.lock().unwrap_or_else(PoisonError::into_inner);
        status.rounds += 1;
        match done {
            Ok(merged) => {
                idle = if merged.round(page).pays() { 0 } else { idle + 1 };
                status.failed = None;
            }
            Err(error) => {
                // Pins may end: it tries again, later each time.
                status.end |= !matches!(error, Error::Pinned(_));
                status.failed = Some(error);
                idle += 1;
            }
        }
        shared.changed.notify_all();
        let rest = pause(took, share, idle);
        let waited = shared.changed.wait_timeout_while(status, rest, |status| !status.end);
        let (status, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if status.end {
            return;
        }
    }
}

impl Background {
    /// Wait until so many merges were done since the beginning, or it has failed, or a time is over. How many were
    /// done.
    ///
    /// # Errors
    /// What ended it; [`Error::Pinned`] if that is why the last merge was refused; [`Error::Forked`] in a child, which
    /// has no such thread.
    pub fn wait(&self, merges: u64, at_most: Duration) -> Result<u64, Error> {
        if self.process != std::process::id() {
            return Err(Error::Forked);
        }
        let status = self.shared.status.lock().unwrap_or_else(PoisonError::into_inner);
        let waits = |status: &mut Status| status.rounds < merges && !status.end;
        let waited = self.shared.changed.wait_timeout_while(status, at_most, waits);
        let (mut status, _) = waited.unwrap_or_else(PoisonError::into_inner);
        status.failed.take().map_or(Ok(status.rounds), Err)
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // In a child there is no thread that would end, or that would give up what it had locked.
            std::mem::forget(self.thread.take());
            return;
        }
        self.shared.status.lock().unwrap_or_else(PoisonError::into_inner).end = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic in it was told on standard error.
            let _ = thread.join();
        }
    }
}
