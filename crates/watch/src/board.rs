//! The status board: the daemon publishes its status here, and all clients read it here.
//!
//! A status is written as JSON once, for any number of clients. The number of history points is limited. At the limit
//! every second point is removed, and from then on only every second new point is kept. So the history covers the whole
//! run of the daemon, and optionally the history before it; younger daemons have finer points. A point without known
//! values, between two daemons, is kept: it separates their points.

use pagefold_daemon::wire::StatusReport;
use pagefold_history::points::{HistoryPoint, HistoryResponse};
use pagefold_output::wire;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The maximum number of history points.
pub const MAX_HISTORY_POINTS: usize = 1440;

/// The latest status, and history points.
#[derive(Debug, Default)]
pub struct StatusBoard {
    state: Mutex<BoardState>,
    status_changed: Condvar,
}

#[derive(Debug, Default)]
struct BoardState {
    latest: Option<PublishedStatus>,
    history: PointHistory,
    /// How many clients wait for the next status.
    waiter_count: usize,
    closed: bool,
}

/// A published status.
#[derive(Clone, Debug)]
pub struct PublishedStatus {
    /// Its number, from 1.
    pub number: u64,
    /// The status.
    pub status: Arc<StatusReport>,
    /// The status as JSON in one line.
    pub json: Arc<str>,
    /// When it was published.
    pub published_at: Instant,
}

impl StatusBoard {
    /// A board that begins with these earlier history points: the last of them, at most half of the maximum.
    pub fn with_history(mut points: Vec<HistoryPoint>) -> Self {
        let board = Self::default();
        board.state().history.points = points.split_off(points.len().saturating_sub(MAX_HISTORY_POINTS / 2));
        board
    }

    /// Publish a status, and wake the waiting clients.
    pub fn publish(&self, status: StatusReport) {
        let json = wire::to_json_line(&status).into();
        let point = HistoryPoint::from_status(&status);
        let mut state = self.state();
        let number = state.latest.as_ref().map_or(0, |latest| latest.number) + 1;
        state.latest = Some(PublishedStatus { number, status: Arc::new(status), json, published_at: Instant::now() });
        state.history.add_point(point);
        drop(state);
        self.status_changed.notify_all();
    }

    /// The latest status, if there is one.
    pub fn latest(&self) -> Option<PublishedStatus> {
        self.state().latest.clone()
    }

    /// The latest status, once its number is higher than this one. `None` after the timeout or if the board is closed.
    pub fn wait_for_newer(&self, seen_number: u64, timeout: Duration) -> Option<PublishedStatus> {
        let mut state = self.state();
        state.waiter_count += 1;
        if state.waiter_count == 1 {
            // The publisher shortens its interval now.
            self.status_changed.notify_all();
        }
        let has_no_newer = |state: &mut BoardState| {
            !state.closed && state.latest.as_ref().is_none_or(|latest| latest.number <= seen_number)
        };
        let result = self.status_changed.wait_timeout_while(state, timeout, has_no_newer);
        let (mut state, _) = result.unwrap_or_else(PoisonError::into_inner);
        state.waiter_count -= 1;
        state.latest.clone().filter(|latest| latest.number > seen_number && !state.closed)
    }

    /// Wait until the next status is due: the first interval while clients wait for it, otherwise the second. Returns
    /// at once if the board is closed.
    pub fn wait_until_due(&self, interval_with_waiters: Duration, idle_interval: Duration) {
        let start = Instant::now();
        let mut state = self.state();
        loop {
            let interval = if state.waiter_count > 0 { interval_with_waiters } else { idle_interval };
            let remaining = interval.saturating_sub(start.elapsed());
            if remaining.is_zero() || state.closed {
                return;
            }
            (state, _) = self.status_changed.wait_timeout(state, remaining).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The history points after a time (seconds since 1970).
    pub fn history(&self, since: f64) -> HistoryResponse {
        HistoryResponse::new(self.state().history.points.iter().filter(|point| point.time > since).cloned().collect())
    }

    /// Close the board and wake the waiting clients.
    pub fn close(&self) {
        self.state().closed = true;
        self.status_changed.notify_all();
    }

    /// Whether the board is closed.
    pub fn is_closed(&self) -> bool {
        self.state().closed
    }

    fn state(&self) -> MutexGuard<'_, BoardState> {
        // No code here can panic halfway through a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Points at equal intervals, at most [`MAX_HISTORY_POINTS`] of them.
#[derive(Debug)]
struct PointHistory {
    points: Vec<HistoryPoint>,
    /// How many points were added, kept or not.
    points_seen: u64,
    /// One in this many points is kept.
    points_per_kept_point: u64,
}

impl Default for PointHistory {
    fn default() -> Self {
        Self { points: Vec::new(), points_seen: 0, points_per_kept_point: 1 }
    }
}

impl PointHistory {
    fn add_point(&mut self, point: HistoryPoint) {
        if self.points_seen.is_multiple_of(self.points_per_kept_point) {
            self.points.push(point);
        }
        self.points_seen += 1;
        if self.points.len() >= MAX_HISTORY_POINTS {
            let gaps = self.points.iter().filter(|point| point.is_unknown()).count();
            let mut index = 0_usize;
            self.points.retain(|point| {
                index += 1;
                // Gaps are kept only if there are few unknown points.
                index % 2 == 1 || point.is_unknown() && gaps < MAX_HISTORY_POINTS / 4
            });
            self.points_per_kept_point *= 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(time: f64) -> HistoryPoint {
        HistoryPoint::unknown(time, 10.0)
    }

    /// Longer than any test may take.
    const LONG_WAIT: Duration = Duration::from_secs(3600);

    #[test]
    fn waiting_reader_gets_status_sooner() {
        let board = StatusBoard::default();
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(board.wait_for_newer(0, LONG_WAIT).is_none()));
            board.wait_until_due(Duration::from_millis(1), LONG_WAIT);
            board.close();
            board.wait_until_due(LONG_WAIT, LONG_WAIT);
        });
    }

    #[test]
    fn gap_before_restart_is_kept() {
        let known = |time: f64| HistoryPoint { available: Some(1), ..point(time) };
        let before: Vec<HistoryPoint> =
            (0..2000).map(|second| known(f64::from(second))).chain([point(2000.0)]).collect();
        let board = StatusBoard::with_history(before);
        let mut past = std::mem::take(&mut board.state().history);
        assert!(
            past.points.len() == MAX_HISTORY_POINTS / 2 && past.points[MAX_HISTORY_POINTS / 2 - 1].is_unknown(),
            "the last points of the history"
        );
        for second in 3000..30_000_u32 {
            past.add_point(known(f64::from(second)));
            assert!(past.points.len() < MAX_HISTORY_POINTS);
            assert_eq!(past.points.iter().filter(|point| point.is_unknown()).count(), 1);
        }
    }

    #[test]
    fn history_is_bounded_and_even() {
        let mut past = PointHistory::default();
        for second in 0..20_000_u32 {
            past.add_point(point(f64::from(second)));
            assert!(past.points.len() < MAX_HISTORY_POINTS);
        }
        // It spans from the first point to the last interval.
        assert!(past.points.len() >= MAX_HISTORY_POINTS / 2);
        let times: Vec<f64> = past.points.iter().map(|point| point.time).collect();
        assert_eq!(times[0].to_bits(), 0_f64.to_bits());
        let stride = past.points_per_kept_point as f64;
        assert!(times.windows(2).all(|pair| (pair[1] - pair[0] - stride).abs() < 1e-9), "{stride}");
        assert!(20_000.0 - times[times.len() - 1] <= stride);
    }
}
