//! The board: where the daemon publishes its status, and where everybody who watches finds it.
//!
//! A status is written as JSON once, however many look at it. Points of the past are kept to a fixed number: whenever
//! that is reached, every second point goes, and from then on only every second of those that would have been kept is.
//! So the whole life of a daemon fits, the finer the younger it is, and before it what it is given of a past. A moment of
//! which nothing is known, between two daemons, stays: it parts what was before from what came after.

use pagefold_daemon::wire::Status;
use pagefold_history::points::{History, Point};
use pagefold_output::wire;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The most points of the past that are kept.
pub const POINTS: usize = 1440;

/// The latest status, and the past in points.
#[derive(Debug, Default)]
pub struct Board {
    state: Mutex<State>,
    news: Condvar,
}

#[derive(Debug, Default)]
struct State {
    latest: Option<Sheet>,
    past: Past,
    /// How many wait for the next status.
    waiting: usize,
    closed: bool,
}

/// A published status.
#[derive(Clone, Debug)]
pub struct Sheet {
    /// Its number, from 1.
    pub number: u64,
    /// The status.
    pub status: Arc<Status>,
    /// The same as JSON in one line.
    pub json: Arc<str>,
    /// When it was published.
    pub at: Instant,
}

impl Board {
    /// A board that begins with these points of a past before it: the last of them, half as many as it keeps.
    pub fn with_past(mut points: Vec<Point>) -> Self {
        let board = Self::default();
        board.state().past.points = points.split_off(points.len().saturating_sub(POINTS / 2));
        board
    }

    /// Publish a status, and wake those who wait for it.
    pub fn publish(&self, status: Status) {
        let json = wire::line(&status).into();
        let point = Point::of(&status);
        let mut state = self.state();
        let number = state.latest.as_ref().map_or(0, |sheet| sheet.number) + 1;
        state.latest = Some(Sheet { number, status: Arc::new(status), json, at: Instant::now() });
        state.past.add(point);
        drop(state);
        self.news.notify_all();
    }

    /// The latest status, if there is one yet.
    pub fn latest(&self) -> Option<Sheet> {
        self.state().latest.clone()
    }

    /// The latest status, once it is younger than the one with this number: `None` if that takes longer than this, or
    /// the board is closed.
    pub fn newer(&self, than: u64, patience: Duration) -> Option<Sheet> {
        let mut state = self.state();
        state.waiting += 1;
        if state.waiting == 1 {
            // Whoever publishes does so more often now.
            self.news.notify_all();
        }
        let old = |state: &mut State| !state.closed && state.latest.as_ref().is_none_or(|sheet| sheet.number <= than);
        let waited = self.news.wait_timeout_while(state, patience, old);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.waiting -= 1;
        state.latest.clone().filter(|sheet| sheet.number > than && !state.closed)
    }

    /// Wait until it is time for the next status: so long while somebody waits for it, otherwise longer, and no more
    /// once the board is closed.
    pub fn pause(&self, watched: Duration, otherwise: Duration) {
        let since = Instant::now();
        let mut state = self.state();
        loop {
            let whole = if state.waiting > 0 { watched } else { otherwise };
            let left = whole.saturating_sub(since.elapsed());
            if left.is_zero() || state.closed {
                return;
            }
            (state, _) = self.news.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The points of the past after a moment (seconds since 1970).
    pub fn history(&self, since: f64) -> History {
        History::new(self.state().past.points.iter().filter(|point| point.time > since).cloned().collect())
    }

    /// Tell those who wait that nothing comes any more.
    pub fn close(&self) {
        self.state().closed = true;
        self.news.notify_all();
    }

    /// Whether it was closed.
    pub fn is_closed(&self) -> bool {
        self.state().closed
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing here can panic halfway through a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Points at even distances, at most [`POINTS`] of them.
#[derive(Debug)]
struct Past {
    points: Vec<Point>,
    /// How many were seen, kept or not.
    seen: u64,
    /// Every so-manieth is kept.
    stride: u64,
}

impl Default for Past {
    fn default() -> Self {
        Self { points: Vec::new(), seen: 0, stride: 1 }
    }
}

impl Past {
    fn add(&mut self, point: Point) {
        if self.seen.is_multiple_of(self.stride) {
            self.points.push(point);
        }
        self.seen += 1;
        if self.points.len() >= POINTS {
            let gaps = self.points.iter().filter(|point| point.is_unknown()).count();
            let mut at = 0_usize;
            self.points.retain(|point| {
                at += 1;
                // Where little is ever known there are no gaps.
                at % 2 == 1 || point.is_unknown() && gaps < POINTS / 4
            });
            self.stride *= 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(time: f64) -> Point {
        Point::unknown(time, 10.0)
    }

    /// Longer than any test may take.
    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn it_is_published_sooner_for_those_who_wait() {
        let board = Board::default();
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(board.newer(0, LONG).is_none()));
            board.pause(Duration::from_millis(1), LONG);
            board.close();
            board.pause(LONG, LONG);
        });
    }

    #[test]
    fn what_was_before_stays_apart_however_long_it_lasts() {
        let known = |time: f64| Point { available: Some(1), ..point(time) };
        let before: Vec<Point> = (0..2000).map(|second| known(f64::from(second))).chain([point(2000.0)]).collect();
        let board = Board::with_past(before);
        let mut past = std::mem::take(&mut board.state().past);
        assert!(past.points.len() == POINTS / 2 && past.points[POINTS / 2 - 1].is_unknown(), "the last of it");
        for second in 3000..30_000_u32 {
            past.add(known(f64::from(second)));
            assert!(past.points.len() < POINTS);
            assert_eq!(past.points.iter().filter(|point| point.is_unknown()).count(), 1);
        }
    }

    #[test]
    fn the_past_is_bounded_and_even() {
        let mut past = Past::default();
        for second in 0..20_000_u32 {
            past.add(point(f64::from(second)));
            assert!(past.points.len() < POINTS);
        }
        // It reaches from the first point to the last stride.
        assert!(past.points.len() >= POINTS / 2);
        let times: Vec<f64> = past.points.iter().map(|point| point.time).collect();
        assert_eq!(times[0].to_bits(), 0_f64.to_bits());
        let stride = past.stride as f64;
        assert!(times.windows(2).all(|pair| (pair[1] - pair[0] - stride).abs() < 1e-9), "{stride}");
        assert!(20_000.0 - times[times.len() - 1] <= stride);
    }
}
