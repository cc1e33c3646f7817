//! Notes on pages: which pages to skip because they were written too soon after they were merged, or were scanned
//! without finding a partner.
//!
//! A page that is merged and then written costs its program a fault and a copy, and the engine repeated work. So each
//! page has a note of eight bytes: when it was last merged, or until when it is skipped, and how often in a row it did
//! not last. A page without a partner costs only a read. But most pages of a program have none, and pages used in
//! computations have another content each time. So these are scanned with exponential backoff, too. All pages with the
//! same backoff interval are scanned at the same times, because partners that are scanned at different times never
//! match.
//!
//! Times are whole seconds of a clock that all members share, of which the lowest 16 bits are kept. A note older than
//! nine hours may appear recent, and its page is then skipped once too often.

use std::time::Duration;

/// A page is skipped for at most 2 to this power of seconds, 68 minutes.
const MAX_BACKOFF_LOG2_SECONDS: u8 = 12;

/// Number of scans without a partner before a page is skipped; a page whose content has changed is skipped at once.
const SCANS_BEFORE_BACKOFF: u8 = 4;

/// A page without a partner is skipped for at most 2 to this power of seconds, a minute.
const MAX_UNPAIRED_BACKOFF_LOG2_SECONDS: u8 = 6;

/// Note on one page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageNote {
    /// In seconds: when it was merged if it is merged, else until when it is skipped.
    stamp_seconds: u16,
    /// How often in a row it did not last. Each step doubles the time for which it is skipped.
    backoff_level: u8,
    state: PageState,
    /// Number of scans in a row without a partner.
    unpaired_scans: u8,
    /// Whether its content differed between the last two scans.
    changed_at_last_scan: bool,
    /// Some bits of its content at the last scan: of its fingerprint, or of a sample.
    content_bits: u16,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum PageState {
    /// It has not been scanned.
    #[default]
    Unscanned,
    /// It was scanned, and had no partner.
    Unpaired,
    /// It is merged, or was freed as a page of zeros, as far as known.
    Merged,
    /// It was freed as a page of zeros, and read since.
    MergedAndRead,
    /// It was merged, then written.
    CowBroken,
}

/// Whole seconds, truncated to 16 bits.
fn stamp(now: Duration) -> u16 {
    now.as_secs() as u16
}

/// Seconds from a stamp to `now`; 0 for later stamps.
fn since(stamp: u16, now: u16) -> u16 {
    let elapsed = now.wrapping_sub(stamp);
    if elapsed > u16::MAX / 2 { 0 } else { elapsed }
}

impl PageNote {
    /// Whether it is merged, as far as known.
    pub fn is_merged(self) -> bool {
        matches!(self.state, PageState::Merged | PageState::MergedAndRead)
    }

    /// Whether a merge of it is not expected to last: it did not last more often than it did.
    pub fn is_unlikely_to_last(self) -> bool {
        self.backoff_level > 0
    }

    /// Whether it has no scan result. Such pages are scanned first.
    pub fn is_unscanned(self) -> bool {
        self.state == PageState::Unscanned
    }

    /// Whether it is skipped now because it did not last.
    pub fn is_rewritten(self, now: Duration) -> bool {
        self.state == PageState::CowBroken && !self.may_merge(now)
    }

    /// Whether it may be merged now.
    pub fn may_merge(self, now: Duration) -> bool {
        match self.state {
            PageState::Unscanned | PageState::Merged | PageState::MergedAndRead => true,
            PageState::Unpaired if self.needs_rescan() => true,
            PageState::Unpaired | PageState::CowBroken => stamp(now).wrapping_sub(self.stamp_seconds) <= u16::MAX / 2,
        }
    }

    /// Whether these bits of its content are the same as at the last scan. A page that was written since is likely to
    /// be written again, as ksmd assumes, too (`calc_checksum` in mm/ksm.c, 6.18).
    pub fn is_unchanged(self, content: u16) -> bool {
        self.state == PageState::Unpaired && self.content_bits == content
    }

    /// Whether to scan it again soon: it was scanned too few times to decide, and does not change.
    pub fn needs_rescan(self) -> bool {
        self.state == PageState::Unpaired && self.unpaired_scans < SCANS_BEFORE_BACKOFF
    }

    /// Record that it was merged.
    pub fn record_merge(&mut self, now: Duration) {
        self.stamp_seconds = stamp(now);
        self.state = PageState::Merged;
        (self.unpaired_scans, self.changed_at_last_scan) = (0, false);
    }

    /// The program declares that it rewrites the page often, and the note treats that as if it had been observed. If
    /// the page is not merged, it is skipped for the maximum time; otherwise once it is found written.
    pub fn advise_rewritten(&mut self, now: Duration) {
        self.backoff_level = MAX_BACKOFF_LOG2_SECONDS;
        if !self.is_merged() {
            self.stamp_seconds = stamp(now).wrapping_add(1 << MAX_BACKOFF_LOG2_SECONDS);
            self.state = PageState::CowBroken;
        }
    }

    /// The program declares it mergeable: the write history is discarded, but not whether it is merged.
    pub fn advise_mergeable(&mut self) {
        if self.is_merged() {
            self.backoff_level = 0;
        } else {
            *self = Self::default();
        }
    }

    /// Record a scan that found no partner; `content` is some bits of the content. After some scans the page is skipped
    /// until the next time that is a multiple of 1, 2, 4 and so on seconds. If its content has changed it is skipped at
    /// once, and the interval grows two steps each time: such a page is likely to change again. Once it no longer
    /// changes, the next scan comes soon.
    pub fn record_unpaired_scan(&mut self, now: Duration, content: u16) {
        let changed = self.state == PageState::Unpaired && !self.is_unchanged(content);
        let scans = match (changed, self.changed_at_last_scan) {
            (true, _) => self.unpaired_scans.max(SCANS_BEFORE_BACKOFF - 1) + 2,
            (false, true) => SCANS_BEFORE_BACKOFF - 1,
            (false, false) => self.unpaired_scans + 1,
        };
        (self.unpaired_scans, self.changed_at_last_scan) =
            (scans.min(SCANS_BEFORE_BACKOFF + MAX_UNPAIRED_BACKOFF_LOG2_SECONDS), changed);
        self.content_bits = content;
        let step = 1_u64 << self.unpaired_scans.saturating_sub(SCANS_BEFORE_BACKOFF);
        self.stamp_seconds = (now.as_secs() / step * step + step) as u16;
        self.state = PageState::Unpaired;
    }

    /// Record that a freed page of zeros was found read. Returns whether that is new.
    pub fn read(&mut self) -> bool {
        let is_new = self.state == PageState::Merged;
        if is_new {
            self.state = PageState::MergedAndRead;
        }
        is_new
    }

    /// Record that it was found written since `previous_scan`. It lasted if it was merged for at least `min_lifetime`;
    /// if it did not last, it is skipped for twice as long as the last time. Returns whether it did not last, as far as
    /// known: rare scans cannot tell.
    pub fn record_cow_break(&mut self, now: Duration, previous_scan: Duration, min_lifetime: Duration) -> bool {
        let (now, min_seconds) = (stamp(now), min_lifetime.as_secs().max(1));
        let merged_seconds = |until| u64::from(since(self.stamp_seconds, until));
        let (lasted, short_lived) =
            (merged_seconds(stamp(previous_scan)) >= min_seconds, merged_seconds(now) < min_seconds);
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

    /// Seconds for which a page is skipped that is merged as soon as possible and written a second later.
    fn backoff_seconds(rounds: usize) -> Vec<u64> {
        let (mut note, mut now) = (PageNote::default(), 0);
        let mut pauses = Vec::new();
        for _ in 0..rounds {
            note.record_merge(at(now));
            now += 1;
            note.record_cow_break(at(now), at(now), MUST_LAST);
            let pause = (0..).find(|seconds| note.may_merge(at(now + seconds))).unwrap();
            pauses.push(pause);
            now += pause;
        }
        pauses
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
        let mut rarely_scanned = note;
        assert!(!note.record_cow_break(at(30), at(29), MUST_LAST));
        assert!(!note.may_merge(at(31)) && note.may_merge(at(32)), "two seconds, not eight");
        assert!(!rarely_scanned.record_cow_break(at(30), at(5), MUST_LAST));
        assert!(
            !rarely_scanned.may_merge(at(33)) && rarely_scanned.may_merge(at(34)),
            "no merge has scanned it meanwhile"
        );
    }

    #[test]
    fn freed_zero_page_counts_as_read_once() {
        let mut note = PageNote::default();
        assert!(!note.read() && note.is_unscanned(), "it was not freed");
        for now in [0, 20] {
            note.record_merge(at(now));
            assert!(note.read() && !note.read() && note.is_merged() && note.may_merge(at(now)));
            assert!(!note.record_cow_break(at(now + 15), at(now + 14), MUST_LAST) && !note.read());
        }
    }

    #[test]
    fn unpaired_page_is_scanned_less_and_less_often() {
        let scan_seconds = |content: fn(u64) -> u16| {
            let (mut note, mut scan_times) = (PageNote::default(), Vec::new());
            for now in 0..400 {
                if note.may_merge(at(now)) {
                    note.record_unpaired_scan(at(now), content(now));
                    scan_times.push(now);
                }
            }
            scan_times
        };
        assert_eq!(scan_seconds(|_| 7), [0, 1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 192, 256, 320, 384]);
        assert_eq!(
            scan_seconds(|now| now as u16),
            [0, 1, 2, 8, 32, 64, 128, 192, 256, 320, 384],
            "its content changes"
        );
        assert_eq!(
            scan_seconds(|now| now.min(3) as u16),
            [0, 1, 2, 8, 32, 33, 34, 36, 40, 48, 64, 96, 128, 192, 256, 320, 384],
            "its content changed at first"
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
        assert!(note.may_merge(at(33)), "as after the first scan");
    }

    #[test]
    fn program_advice_overrides_observation() {
        let (mut unmerged, mut merged) = (PageNote::default(), PageNote::default());
        merged.record_merge(at(0));
        for note in [&mut unmerged, &mut merged] {
            note.advise_rewritten(at(5));
        }
        assert!(unmerged.is_rewritten(at(5)) && !unmerged.may_merge(at(4100)) && unmerged.may_merge(at(4101)));
        assert!(merged.is_merged());
        merged.record_cow_break(at(10), at(9), MUST_LAST);
        assert!(!merged.may_merge(at(4105)) && merged.may_merge(at(4106)));
        merged.advise_mergeable();
        assert!(merged.is_unscanned() && merged.may_merge(at(11)));
        merged.record_merge(at(11));
        merged.advise_rewritten(at(11));
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
        assert!(note.may_merge(at(65_601)), "it lasted across the wraparound");
    }
}
