//! A competitor for the CPUs: a busy loop for each CPU, now and then.
//!
//! The loops start and end at random times, so that they are in some blocks of a campaign and not in others. They end by
//! themselves within a minute if this program is killed.

use anyhow::{Context, Result, anyhow};
use pagefold_base::splitmix::splitmix64;
use std::process::{Child, Command};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime};

/// Longer than a campaign reads its host before the first block.
const FIRST_PAUSE: Duration = Duration::from_secs(5);
/// Bounds of the lengths of busy times and pauses, in milliseconds.
const LENGTHS_MS: std::ops::Range<u64> = 500..4_000;
/// Counts for longer than the longest busy time, and not for ever.
const BUSY_LOOP: &str = "i=0; while [ $i -lt 20000000 ]; do i=$((i+1)); done";

/// From when to when the loops ran, in seconds since 1970.
pub type BusyTime = (f64, f64);

/// Ends the thread that starts and ends the loops, which returns when they ran.
type CompetitorThread = (Sender<()>, JoinHandle<Result<Vec<BusyTime>>>);

/// A running competitor. Dropping it ends it.
pub struct Competitor {
    /// `None` after the end.
    running: Option<CompetitorThread>,
}

/// Busy loops that end with this value.
struct BusyLoops(Vec<Child>);

impl BusyLoops {
    fn start(count: usize) -> Result<Self> {
        let mut loops = Self(Vec::new());
        for _ in 0..count {
            loops.0.push(Command::new("sh").args(["-c", BUSY_LOOP]).spawn().context("cannot start sh")?);
        }
        Ok(loops)
    }
}

impl Drop for BusyLoops {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // It may have ended.
            let _ = child.kill().and_then(|()| child.wait());
        }
    }
}

fn unix_seconds() -> f64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0.0, |time| time.as_secs_f64())
}

impl Competitor {
    /// Starts a competitor with a loop for each CPU. The seed determines when it is busy.
    pub fn start(seed: u64) -> Result<Self> {
        let loops = thread::available_parallelism()?.get();
        let (stop, stopped) = mpsc::channel::<()>();
        let mut draws = 0;
        let mut draw_length = move || {
            draws += 1;
            let lengths = LENGTHS_MS.end - LENGTHS_MS.start;
            Duration::from_millis(LENGTHS_MS.start + splitmix64(seed.wrapping_mul(1_000_003) + draws) % lengths)
        };
        let thread = thread::spawn(move || {
            let mut busy_times = Vec::new();
            let mut pause = FIRST_PAUSE;
            while stopped.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                let running = BusyLoops::start(loops)?;
                let from = unix_seconds();
                let wait = stopped.recv_timeout(draw_length());
                drop(running);
                busy_times.push((from, unix_seconds()));
                if wait != Err(RecvTimeoutError::Timeout) {
                    break;
                }
                pause = draw_length();
            }
            Ok(busy_times)
        });
        Ok(Self { running: Some((stop, thread)) })
    }

    /// Ends the competitor. Returns when it was busy.
    pub fn stop(mut self) -> Result<Vec<BusyTime>> {
        self.end()
    }

    fn end(&mut self) -> Result<Vec<BusyTime>> {
        let Some((stop, thread)) = self.running.take() else { return Ok(Vec::new()) };
        // The thread may have ended with an error, which it returns.
        let _ = stop.send(());
        thread.join().map_err(|_| anyhow!("the competitor's thread panicked"))?
    }
}

impl Drop for Competitor {
    fn drop(&mut self) {
        // Only what stopped a campaign matters.
        let _ = self.end();
    }
}

/// The share of `spans` in which the competitor was busy.
pub fn busy_share(spans: &[BusyTime], busy_times: &[BusyTime]) -> f64 {
    let overlap = |&(from, to): &BusyTime| -> f64 {
        busy_times.iter().map(|&(busy_from, busy_to)| (to.min(busy_to) - from.max(busy_from)).max(0.0)).sum()
    };
    let total: f64 = spans.iter().map(|(from, to)| to - from).sum();
    if total > 0.0 { spans.iter().map(overlap).sum::<f64>() / total } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_share_is_the_overlap_of_runs_and_busy_times() {
        let runs = [(10.0, 12.0), (13.0, 15.0)];
        assert_eq!(busy_share(&runs, &[(11.0, 14.0)]), 0.5);
        assert_eq!(busy_share(&runs, &[(0.0, 10.5), (11.5, 12.5), (14.0, 20.0)]), 0.5);
        assert_eq!(busy_share(&runs, &[(12.0, 13.0)]), 0.0);
        assert_eq!(busy_share(&[], &[(0.0, 9.0)]), 0.0);
    }
}
