//! Which pages are left alone because they are written too soon after they were merged.
//!
//! A page that is merged and written again costs its program a fault and a copy, and whoever merges it the work once
//! more. So each page has a note of four bytes: when it was merged last, or until when it is left alone, and how often
//! in a row it did not last. Times are whole seconds since some beginning, of which the lowest 16 bits are kept: a note
//! that is older than nine hours may be taken for a young one, and its page is then left alone for once too often.

use std::time::Duration;

/// The longest that a page is left alone is 2 to this power of seconds, 68 minutes.
const MOST: u8 = 12;

/// What is remembered of a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Note {
    /// In seconds: when it was merged if it is, else until when it is left alone.
    stamp: u16,
    /// How often in a row it did not last, which doubles how long it is left alone.
    level: u8,
    state: State,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// It was never merged, or not since it was forgotten.
    #[default]
    New,
    /// It is merged, or given back as a page of zeros, as far as was seen.
    Merged,
    /// It was merged and written.
    Broken,
}

/// Whole seconds, of which 16 bits are kept.
fn stamp(now: Duration) -> u16 {
    now.as_secs() as u16
}

/// How many seconds `now` lies behind a stamp; of later stamps none.
fn since(stamp: u16, now: u16) -> u16 {
    let passed = now.wrapping_sub(stamp);
    if passed > u16::MAX / 2 { 0 } else { passed }
}

impl Note {
    /// Whether it is merged, as far as was seen.
    pub fn is_merged(self) -> bool {
        self.state == State::Merged
    }

    /// Whether it may be merged at a time.
    pub fn may_merge(self, now: Duration) -> bool {
        match self.state {
            State::New | State::Merged => true,
            State::Broken => stamp(now).wrapping_sub(self.stamp) <= u16::MAX / 2,
        }
    }

    /// It was merged.
    pub fn merged(&mut self, now: Duration) {
        self.stamp = stamp(now);
        self.state = State::Merged;
    }

    /// It was found written. It lasted if it was merged for `must_last` at least; else it is left alone for twice as
    /// long as the last time.
    pub fn broken(&mut self, now: Duration, must_last: Duration) {
        let now = stamp(now);
        let lasted = u64::from(since(self.stamp, now)) >= must_last.as_secs().max(1);
        self.level = if lasted { self.level.saturating_sub(1) } else { (self.level + 1).min(MOST) };
        self.stamp = now.wrapping_add(1 << self.level);
        self.state = State::Broken;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MUST_LAST: Duration = Duration::from_secs(13);

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// The seconds for which a page is left alone that is merged as soon as may be and written a second later.
    fn waits(rounds: usize) -> Vec<u64> {
        let (mut note, mut now) = (Note::default(), 0);
        let mut waits = Vec::new();
        for _ in 0..rounds {
            note.merged(at(now));
            now += 1;
            note.broken(at(now), MUST_LAST);
            let wait = (0..).find(|more| note.may_merge(at(now + more))).unwrap();
            waits.push(wait);
            now += wait;
        }
        waits
    }

    #[test]
    fn a_page_that_is_written_at_once_is_left_alone_for_longer_and_longer() {
        assert_eq!(waits(14), [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 4096, 4096]);
    }

    #[test]
    fn a_page_that_lasted_is_trusted_again() {
        let mut note = Note::default();
        assert!(note.may_merge(at(0)) && !note.is_merged());
        note.merged(at(0));
        note.broken(at(1), MUST_LAST);
        note.broken(at(1), MUST_LAST);
        assert!(!note.may_merge(at(4)) && note.may_merge(at(5)));
        note.merged(at(5));
        assert!(note.is_merged());
        note.broken(at(30), MUST_LAST);
        assert!(!note.may_merge(at(31)) && note.may_merge(at(32)), "two seconds, not eight");
    }

    #[test]
    fn time_goes_on_over_the_end_of_the_stamp() {
        let mut note = Note::default();
        note.merged(at(65_530));
        note.broken(at(65_535), MUST_LAST);
        assert!(!note.may_merge(at(65_536)) && note.may_merge(at(65_537)));
        note.merged(at(65_537));
        note.broken(at(65_600), MUST_LAST);
        assert!(note.may_merge(at(65_601)), "it lasted over the end");
    }
}
