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
const MAX_BACKOFF_LOG2_SECONDS: u8 = 12;

/// So often a page is looked at in vain before it is left alone; one whose content has changed is so at once.
const SCANS_BEFORE_BACKOFF: u8 = 4;

/// The longest that a page without a partner is left alone is 2 to this power of seconds, a minute.
const MAX_UNPAIRED_BACKOFF_LOG2_SECONDS: u8 = 6;

/// What is remembered of a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageNote {
    /// In seconds: when it was merged if it is, else until when it is left alone.
    stamp_seconds: u16,
    /// How often in a row it did not last, which doubles how long it is left alone.
    backoff_level: u8,
    state: PageState,
    /// How often in a row it was looked at in vain.
    unpaired_scans: u8,
    /// Whether it held something else at the last look than at the one before.
    changed_at_last_scan: bool,
    /// Some bits of what it held then: of its fingerprint, or of a sample of it.
    content_bits: u16,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum PageState {
    /// Nothing is known of it.
    #[default]
    Unscanned,
    /// It was looked at, and had no partner.
    Unpaired,
    /// It is merged, or given back as a page of zeros, as far as was seen.
    Merged,
    /// It was given back as a page of zeros, and read since.
    MergedAndRead,
    /// It was merged and written.
    CowBroken,
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

impl PageNote {
    /// Whether it is merged, as far as was seen.
    pub fn is_merged(self) -> bool {
        matches!(self.state, PageState::Merged | PageState::MergedAndRead)
    }

    /// Whether it is not expected to last when it is merged: more often than not it did not.
    pub fn is_unlikely_to_last(self) -> bool {
        self.backoff_level > 0
    }

    /// Whether nothing is known of it: of all pages these are looked at first.
    pub fn is_unscanned(self) -> bool {
        self.state == PageState::Unscanned
    }

    /// Whether it is left alone at a time because it did not last.
    pub fn is_volatile(self, now: Duration) -> bool {
        self.state == PageState::CowBroken && !self.may_merge(now)
    }

    /// Whether it may be merged at a time.
    pub fn may_merge(self, now: Duration) -> bool {
        match self.state {
            PageState::Unscanned | PageState::Merged | PageState::MergedAndRead => true,
            PageState::Unpaired if self.needs_rescan() => true,
            PageState::Unpaired | PageState::CowBroken => stamp(now).wrapping_sub(self.stamp_seconds) <= u16::MAX / 2,
        }
    }

    /// Whether it held the same when it was looked at last, by some bits: what was written since is likely to be
    /// written again, as ksmd takes it, too (`calc_checksum` in mm/ksm.c, 6.18).
    pub fn is_unchanged(self, content: u16) -> bool {
        self.state == PageState::Unpaired && self.content_bits == content
    }

    /// Whether it is to be looked at again at once: it was not often enough to tell, and does not change.
    pub fn needs_rescan(self) -> bool {
        self.state == PageState::Unpaired && self.unpaired_scans < SCANS_BEFORE_BACKOFF
    }

    /// It was merged.
    pub fn record_merge(&mut self, now: Duration) {
        self.stamp_seconds = stamp(now);
        self.state = PageState::Merged;
        (self.unpaired_scans, self.changed_at_last_scan) = (0, false);
    }

    /// Its program says that it is written again and again, and is taken at its word as if that had been found: if it is
    /// not merged it is left alone for as long as any page is, and else once it is found written.
    pub fn advise_volatile(&mut self, now: Duration) {
        self.backoff_level = MAX_BACKOFF_LOG2_SECONDS;
        if !self.is_merged() {
            self.stamp_seconds = stamp(now).wrapping_add(1 << MAX_BACKOFF_LOG2_SECONDS);
            self.state = PageState::CowBroken;
        }
    }

    /// Its program says that it may be merged: whatever it did is forgotten, but not whether it is merged.
    pub fn advise_mergeable(&mut self) {
        if self.is_merged() {
            self.backoff_level = 0;
        } else {
            *self = Self::default();
        }
    }

    /// It was looked at, and nobody was known to hold what it does, of which these are some bits. After some looks it
    /// is left alone until the next moment that is a multiple of 1, 2, 4 and so on seconds. If it has changed it is so at
    /// once, and that goes two steps further each time: what the program computes with is likely to change again. If it
    /// no longer does, the next look comes at once.
    pub fn record_unpaired_scan(&mut self, now: Duration, content: u16) {
        let changed = self.state == PageState::Unpaired && !self.is_unchanged(content);
        let looks = match (changed, self.changed_at_last_scan) {
            (true, _) => self.unpaired_scans.max(SCANS_BEFORE_BACKOFF - 1) + 2,
            (false, true) => SCANS_BEFORE_BACKOFF - 1,
            (false, false) => self.unpaired_scans + 1,
        };
        (self.unpaired_scans, self.changed_at_last_scan) =
            (looks.min(SCANS_BEFORE_BACKOFF + MAX_UNPAIRED_BACKOFF_LOG2_SECONDS), changed);
        self.content_bits = content;
        let step = 1_u64 << self.unpaired_scans.saturating_sub(SCANS_BEFORE_BACKOFF);
        self.stamp_seconds = (now.as_secs() / step * step + step) as u16;
        self.state = PageState::Unpaired;
    }

    /// It was found to be read, as a page of zeros is that was given back. Whether that was not known.
    pub fn read(&mut self) -> bool {
        let new = self.state == PageState::Merged;
        if new {
            self.state = PageState::MergedAndRead;
        }
        new
    }

    /// It was found written, and was not when somebody looked before. It lasted if it was merged for `must_last` at
    /// least; if it did not it is left alone for twice as long as the last time. Whether it did not, as far as is
    /// known: who looks seldom cannot tell.
    pub fn record_cow_break(&mut self, now: Duration, previous_scan: Duration, min_lifetime: Duration) -> bool {
        let (now, must_last) = (stamp(now), min_lifetime.as_secs().max(1));
        let for_seconds = |until| u64::from(since(self.stamp_seconds, until));
        let (lasted, short_lived) = (for_seconds(stamp(previous_scan)) >= must_last, for_seconds(now) < must_last);
        if lasted {
            self.backoff_level = self.backoff_level.saturating_sub(1);
        } else if short_lived {
            self.backoff_level = (self.backoff_level + 1).min(MAX_BACKOFF_LOG2_SECONDS);
        }
        self.stamp_seconds = now.wrapping_add(1 << self.backoff_level);
        self.state = PageState::CowBroken;
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
    fn backoff_seconds(rounds: usize) -> Vec<u64> {
        let (mut note, mut now) = (PageNote::default(), 0);
        let mut waits = Vec::new();
        for _ in 0..rounds {
            note.record_merge(at(now));
            now += 1;
            note.record_cow_break(at(now), at(now), MUST_LAST);
            let wait = (0..).find(|more| note.may_merge(at(now + more))).unwrap();
            waits.push(wait);
            now += wait;
        }
        waits
    }

    #[test]
    fn page_written_at_once_backs_off_exponentially() {
        assert_eq!(backoff_seconds(14), [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 4096, 4096]);
    }

    #[test]
    fn page_that_lasted_backs_off_less() {
        let mut note = PageNote::default();
        assert!(note.may_merge(at(0)) && !note.is_merged());
        note.record_merge(at(0));
        assert!(note.record_cow_break(at(1), at(0), MUST_LAST) && note.record_cow_break(at(1), at(0), MUST_LAST));
        assert!(!note.may_merge(at(4)) && note.may_merge(at(5)));
        note.record_merge(at(5));
        assert!(note.is_merged());
        let mut seldom = note;
        assert!(!note.record_cow_break(at(30), at(29), MUST_LAST));
        assert!(!note.may_merge(at(31)) && note.may_merge(at(32)), "two seconds, not eight");
        assert!(!seldom.record_cow_break(at(30), at(5), MUST_LAST));
        assert!(!seldom.may_merge(at(33)) && seldom.may_merge(at(34)), "nobody has looked meanwhile");
    }

    #[test]
    fn freed_zero_page_counts_as_read_once() {
        let mut note = PageNote::default();
        assert!(!note.read() && note.is_unscanned(), "it was not given back");
        for now in [0, 20] {
            note.record_merge(at(now));
            assert!(note.read() && !note.read() && note.is_merged() && note.may_merge(at(now)));
            assert!(!note.record_cow_break(at(now + 15), at(now + 14), MUST_LAST) && !note.read());
        }
    }

    #[test]
    fn unpaired_page_is_scanned_less_and_less_often() {
        let looks = |content: fn(u64) -> u16| {
            let (mut note, mut looked) = (PageNote::default(), Vec::new());
            for now in 0..400 {
                if note.may_merge(at(now)) {
                    note.record_unpaired_scan(at(now), content(now));
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
        let mut note = PageNote::default();
        assert!(note.is_unscanned() && !note.is_unchanged(7) && !note.needs_rescan());
        note.record_unpaired_scan(at(0), 7);
        assert!(note.needs_rescan());
        assert!(note.is_unchanged(7) && !note.is_unchanged(8));
        (0..9).for_each(|now| note.record_unpaired_scan(at(now), 7));
        assert!(!note.needs_rescan() && !note.is_unscanned() && !note.may_merge(at(31)));
        note.record_merge(at(32));
        note.record_unpaired_scan(at(33), 7);
        assert!(note.may_merge(at(33)), "as if for the first time");
    }

    #[test]
    fn program_advice_overrides_observation() {
        let (mut lone, mut merged) = (PageNote::default(), PageNote::default());
        merged.record_merge(at(0));
        for note in [&mut lone, &mut merged] {
            note.advise_volatile(at(5));
        }
        assert!(lone.is_volatile(at(5)) && !lone.may_merge(at(4100)) && lone.may_merge(at(4101)));
        assert!(merged.is_merged());
        merged.record_cow_break(at(10), at(9), MUST_LAST);
        assert!(!merged.may_merge(at(4105)) && merged.may_merge(at(4106)));
        merged.advise_mergeable();
        assert!(merged.is_unscanned() && merged.may_merge(at(11)));
        merged.record_merge(at(11));
        merged.advise_volatile(at(11));
        merged.advise_mergeable();
        assert!(merged.is_merged() && !merged.is_unlikely_to_last());
    }

    #[test]
    fn stamp_wraps_around() {
        let mut note = PageNote::default();
        note.record_merge(at(65_530));
        note.record_cow_break(at(65_535), at(65_534), MUST_LAST);
        assert!(!note.may_merge(at(65_536)) && note.may_merge(at(65_537)));
        note.record_merge(at(65_537));
        note.record_cow_break(at(65_600), at(65_599), MUST_LAST);
        assert!(note.may_merge(at(65_601)), "it lasted over the end");
    }
}
