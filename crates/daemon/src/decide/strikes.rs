//! What was merged and written too soon is left alone: for a while, then for longer, and after the third time for good.
//! What was merged and written twice before it was withdrawn has two of the three behind it.
//!
//! Memory that is filled when a guest boots is written, and then stays; memory that a program computes in is written
//! again and again.

use pagefold_base::units::{AddressRange, ProcessId};
use std::collections::BTreeMap;
use std::time::Duration;

/// How long it is left alone the first times.
const PAUSES: [Duration; 2] = [Duration::from_secs(30), Duration::from_secs(600)];

/// Bytes whose strikes are counted together: what is withdrawn together is no larger where huge pages are of 2 MiB.
const PIECE: u64 = 4 << 20;

/// What was written too soon, how often, and what of it is left alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Strikes {
    pieces: BTreeMap<(ProcessId, u64), Piece>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Piece {
    count: usize,
    until: Option<Duration>,
    ranges: Vec<AddressRange>,
}

impl Strikes {
    /// A range was withdrawn because it was written too soon, so many times. One that is left alone already counts once.
    pub fn broke(&mut self, process: ProcessId, range: AddressRange, times: usize, now: Duration) {
        let piece = self.pieces.entry((process, range.start / PIECE)).or_default();
        if piece.ranges.is_empty() {
            piece.count += times;
            piece.until = PAUSES.get(piece.count.saturating_sub(1)).map(|pause| now + *pause);
        }
        if !piece.ranges.contains(&range) {
            piece.ranges.push(range);
        }
    }

    /// What may be tried again now. Told once.
    pub fn over(&mut self, now: Duration) -> Vec<(ProcessId, AddressRange)> {
        let mut over = Vec::new();
        for (&(process, _), piece) in &mut self.pieces {
            if piece.until.is_some_and(|until| until <= now) {
                over.extend(piece.ranges.drain(..).map(|range| (process, range)));
            }
        }
        over
    }

    /// Forget the processes that do not fit.
    pub fn retain(&mut self, fits: impl Fn(ProcessId) -> bool) {
        self.pieces.retain(|&(process, _), _| fits(process));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::units::Pid;

    #[test]
    fn what_breaks_thrice_is_left_alone_for_good() {
        let process = ProcessId { pid: Pid(1), start_time: 1 };
        let range = AddressRange { start: PIECE, end: PIECE + 4096 };
        let (mut strikes, mut now) = (Strikes::default(), Duration::ZERO);
        for pause in PAUSES {
            strikes.broke(process, range, 1, now);
            strikes.broke(process, range, 1, now);
            assert_eq!(strikes.over(now + pause - Duration::from_secs(1)), []);
            now += pause;
            assert_eq!(strikes.over(now), [(process, range)]);
            assert_eq!(strikes.over(now), [], "told once");
        }
        strikes.broke(process, range, 1, now);
        assert_eq!(strikes.over(now + Duration::from_secs(1 << 30)), []);
        strikes.retain(|_| false);
        assert_eq!(strikes, Strikes::default());
    }

    #[test]
    fn what_broke_twice_is_left_alone_for_long_at_once() {
        let process = ProcessId { pid: Pid(1), start_time: 1 };
        let range = AddressRange { start: PIECE, end: PIECE + 4096 };
        let mut strikes = Strikes::default();
        strikes.broke(process, range, 2, Duration::ZERO);
        assert_eq!(strikes.over(PAUSES[1] - Duration::from_secs(1)), []);
        assert_eq!(strikes.over(PAUSES[1]), [(process, range)]);
        strikes.broke(process, range, 2, PAUSES[1]);
        assert_eq!(strikes.over(Duration::from_secs(1 << 30)), []);
    }
}
