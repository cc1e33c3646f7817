//! Which pages are left alone: those that are written too soon after they were merged, and those that were looked at in
//! vain.
//!
//! A page that is merged and written again costs its program a fault and a copy, and whoever merges it the work once
//! more. So each page has a note of eight bytes: when it was merged last, or until when it is left alone, and how often
//! in a row it did not last. A page without a partner costs only that it is read; but most pages of a program have
//! none, and those that it computes with have another content each time. So they are looked at less and less often,
//! too, and all of them that wait equally long at the same moments: partners that are looked at by turns never meet.
//!
//! Times are whole seconds of a clock that all members share, of which the lowest 16 bits are kept: a note that is
//! older than nine hours may be taken for a young one, and its page is then left alone for once too often.

use std::time::Duration;

/// The longest that a page is left alone is 2 to this power of seconds, 68 minutes.
const MOST: u8 = 12;

/// So often a page is looked at in vain before it is left alone; one whose content has changed is so at once.
const FREE: u8 = 4;

/// The longest that a page without a partner is left alone is 2 to this power of seconds, a minute.
const MOST_ALONE: u8 = 6;

/// What is remembered of a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Note {
    /// In seconds: when it was merged if it is, else until when it is left alone.
    stamp: u16,
    /// How often in a row it did not last, which doubles how long it is left alone.
    level: u8,
    state: State,
    /// How often in a row it was looked at in vain.
    looks: u8,
    /// Whether it held something else at the last look than at the one before.
    changes: bool,
    /// Some bits of what it held then: of its fingerprint, or of a sample of it.
    content: u16,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// Nothing is known of it.
    #[default]
    New,
    /// It was looked at, and had no partner.
    Alone,
    /// It is merged, or given back as a page of zeros, as far as was seen.
    Merged,
    /// It was given back as a page of zeros, and read since.
    Read,
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
        matches!(self.state, State::Merged | State::Read)
    }

    /// Whether it is not expected to last when it is merged: more often than not it did not.
    pub fn is_doubtful(self) -> bool {
        self.level > 0
    }

    /// Whether nothing is known of it: of all pages these are looked at first.
    pub fn is_new(self) -> bool {
        self.state == State::New
    }

    /// Whether it is left alone at a time because it did not last.
    pub fn is_hot(self, now: Duration) -> bool {
        self.state == State::Broken && !self.may_merge(now)
    }

    /// Whether it may be merged at a time.
    pub fn may_merge(self, now: Duration) -> bool {
        match self.state {
            State::New | State::Merged | State::Read => true,
            State::Alone if self.is_promising() => true,
            State::Alone | State::Broken => stamp(now).wrapping_sub(self.stamp) <= u16::MAX / 2,
        }
    }

    /// Whether it held the same when it was looked at last, by some bits: what was written since is likely to be
    /// written again, as ksmd takes it, too (`calc_checksum` in mm/ksm.c, 6.18).
    pub fn is_settled(self, content: u16) -> bool {
        self.state == State::Alone && self.content == content
    }

    /// Whether it is to be looked at again at once: it was not often enough to tell, and does not change.
    pub fn is_promising(self) -> bool {
        self.state == State::Alone && self.looks < FREE
    }

    /// It was merged.
    pub fn merged(&mut self, now: Duration) {
        self.stamp = stamp(now);
        self.state = State::Merged;
        (self.looks, self.changes) = (0, false);
    }

    /// Its program says that it is written again and again, and is taken at its word as if that had been found: if it is
    /// not merged it is left alone for as long as any page is, and else once it is found written.
    pub fn advised_hot(&mut self, now: Duration) {
        self.level = MOST;
        if !self.is_merged() {
            self.stamp = stamp(now).wrapping_add(1 << MOST);
            self.state = State::Broken;
        }
    }

    /// Its program says that it may be merged: whatever it did is forgotten, but not whether it is merged.
    pub fn forgiven(&mut self) {
        if self.is_merged() {
            self.level = 0;
        } else {
            *self = Self::default();
        }
    }

    /// It was looked at, and nobody was known to hold what it does, of which these are some bits. After some looks it
    /// is left alone until the next moment that is a multiple of 1, 2, 4 and so on seconds. If it has changed it is so at
    /// once, and that goes two steps further each time: what the program computes with is likely to change again. If it
    /// no longer does, the next look comes at once.
    pub fn looked(&mut self, now: Duration, content: u16) {
        let changed = self.state == State::Alone && !self.is_settled(content);
        let looks = match (changed, self.changes) {
            (true, _) => self.looks.max(FREE - 1) + 2,
            (false, true) => FREE - 1,
            (false, false) => self.looks + 1,
        };
        (self.looks, self.changes) = (looks.min(FREE + MOST_ALONE), changed);
        self.content = content;
        let step = 1_u64 << self.looks.saturating_sub(FREE);
        self.stamp = (now.as_secs() / step * step + step) as u16;
        self.state = State::Alone;
    }

    /// It was found to be read, as a page of zeros is that was given back. Whether that was not known.
    pub fn read(&mut self) -> bool {
        let new = self.state == State::Merged;
        if new {
            self.state = State::Read;
        }
        new
    }

    /// It was found written, and was not when somebody looked before. It lasted if it was merged for `must_last` at
    /// least; if it did not it is left alone for twice as long as the last time. Whether it did not, as far as is
    /// known: who looks seldom cannot tell.
    pub fn broken(&mut self, now: Duration, before: Duration, must_last: Duration) -> bool {
        let (now, must_last) = (stamp(now), must_last.as_secs().max(1));
        let for_seconds = |until| u64::from(since(self.stamp, until));
        let (lasted, short_lived) = (for_seconds(stamp(before)) >= must_last, for_seconds(now) < must_last);
        if lasted {
            self.level = self.level.saturating_sub(1);
        } else if short_lived {
            self.level = (self.level + 1).min(MOST);
        }
        self.stamp = now.wrapping_add(1 << self.level);
        self.state = State::Broken;
        short_lived
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
            note.broken(at(now), at(now), MUST_LAST);
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
        assert!(note.broken(at(1), at(0), MUST_LAST) && note.broken(at(1), at(0), MUST_LAST));
        assert!(!note.may_merge(at(4)) && note.may_merge(at(5)));
        note.merged(at(5));
        assert!(note.is_merged());
        let mut seldom = note;
        assert!(!note.broken(at(30), at(29), MUST_LAST));
        assert!(!note.may_merge(at(31)) && note.may_merge(at(32)), "two seconds, not eight");
        assert!(!seldom.broken(at(30), at(5), MUST_LAST));
        assert!(!seldom.may_merge(at(33)) && seldom.may_merge(at(34)), "nobody has looked meanwhile");
    }

    #[test]
    fn a_page_that_was_given_back_is_read_once() {
        let mut note = Note::default();
        assert!(!note.read() && note.is_new(), "it was not given back");
        for now in [0, 20] {
            note.merged(at(now));
            assert!(note.read() && !note.read() && note.is_merged() && note.may_merge(at(now)));
            assert!(!note.broken(at(now + 15), at(now + 14), MUST_LAST) && !note.read());
        }
    }

    #[test]
    fn a_page_without_a_partner_is_looked_at_less_and_less_often() {
        let looks = |content: fn(u64) -> u16| {
            let (mut note, mut looked) = (Note::default(), Vec::new());
            for now in 0..400 {
                if note.may_merge(at(now)) {
                    note.looked(at(now), content(now));
                    looked.push(now);
                }
            }
            looked
        };
        assert_eq!(looks(|_| 7), [0, 1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 192, 256, 320, 384]);
        assert_eq!(looks(|now| now as u16), [0, 1, 2, 8, 32, 64, 128, 192, 256, 320, 384], "it changes");
        assert_eq!(
            looks(|now| now.min(3) as u16),
            [0, 1, 2, 8, 32, 33, 34, 36, 40, 48, 64, 96, 128, 192, 256, 320, 384],
            "it did"
        );
        let mut note = Note::default();
        assert!(note.is_new() && !note.is_settled(7) && !note.is_promising());
        note.looked(at(0), 7);
        assert!(note.is_promising());
        assert!(note.is_settled(7) && !note.is_settled(8));
        (0..9).for_each(|now| note.looked(at(now), 7));
        assert!(!note.is_promising() && !note.is_new() && !note.may_merge(at(31)));
        note.merged(at(32));
        note.looked(at(33), 7);
        assert!(note.may_merge(at(33)), "as if for the first time");
    }

    #[test]
    fn a_program_that_knows_better_is_believed() {
        let (mut lone, mut merged) = (Note::default(), Note::default());
        merged.merged(at(0));
        for note in [&mut lone, &mut merged] {
            note.advised_hot(at(5));
        }
        assert!(lone.is_hot(at(5)) && !lone.may_merge(at(4100)) && lone.may_merge(at(4101)));
        assert!(merged.is_merged());
        merged.broken(at(10), at(9), MUST_LAST);
        assert!(!merged.may_merge(at(4105)) && merged.may_merge(at(4106)));
        merged.forgiven();
        assert!(merged.is_new() && merged.may_merge(at(11)));
        merged.merged(at(11));
        merged.advised_hot(at(11));
        merged.forgiven();
        assert!(merged.is_merged() && !merged.is_doubtful());
    }

    #[test]
    fn time_goes_on_over_the_end_of_the_stamp() {
        let mut note = Note::default();
        note.merged(at(65_530));
        note.broken(at(65_535), at(65_534), MUST_LAST);
        assert!(!note.may_merge(at(65_536)) && note.may_merge(at(65_537)));
        note.merged(at(65_537));
        note.broken(at(65_600), at(65_599), MUST_LAST);
        assert!(note.may_merge(at(65_601)), "it lasted over the end");
    }
}
