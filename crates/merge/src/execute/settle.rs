//! Waits until ksmd has merged what should merge, and watches that it stays merged.

use super::{AfterMerge, MergeRun};
use crate::decide::outcome::{MergeEnd, TimelinePoint};
use crate::decide::pace::SettleDetector;
use crate::ksmd::{self, StallDetector, read_full_scans};
use crate::recheck::{CheckScope, UnenrollPhase};
use pagefold_base::ksm::Setting;
use pagefold_base::{Pages, Reading};
use pagefold_host::elapsed_since;
use pagefold_host::knob::Knob;
use pagefold_host::transaction::session;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How often the counters are read when settling is near and ksmd has no limit: until the reads show that it has
/// settled, ksmd scans for nothing. With a limit the interval is longer, as ksmd is slower.
const NEAR_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// How often the counters are read before that.
pub(super) const FAR_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The pause between reads, as a multiple of a read's duration: reading stays below a twentieth of one CPU.
const POLL_PAUSE_FACTOR: u32 = 20;

/// How often the pace is adapted and other writers are detected.
const PACE_UPDATE_INTERVAL: Duration = Duration::from_millis(50);

/// How often merged pages are checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// The pause between such checks once ksmd has settled, as a multiple of a check's duration. Pages are then watched for less
/// than a second.
const SETTLED_CHECK_PAUSE_FACTOR: u32 = 50;

/// The state between two polls of ksmd's counters.
struct SettleWait {
    /// Pages that should merge once all ranges are enrolled.
    expected: Pages,
    /// Whether late ranges are still to be enrolled.
    has_late_ranges: bool,
    settle: SettleDetector,
    stall: StallDetector,
    /// Pages that ksmd had skipped before.
    skipped_before: Reading<Pages>,
    began_at: Instant,
    /// When the pace was last adapted, and ksmd's CPU time then.
    last_pace_update: (Instant, Reading<Duration>),
    /// When merged pages were last checked, and the pause until the next check.
    last_check: (Instant, Duration),
    /// When no more pages were expected to merge; ksmd is stopped since.
    settled_at: Option<Instant>,
}

/// ksmd's counters.
struct Poll {
    full_scans: u64,
    merged: Pages,
    /// How long reading them took.
    duration: Duration,
}

impl MergeRun<'_, '_> {
    /// Let ksmd work until no more pages merge: if some ranges are late, first until the `early` pages are merged, then
    /// until all expected pages are.
    pub(super) fn wait_until_settled(
        &mut self,
        early: Option<Pages>,
        expected: Pages,
    ) -> Result<MergeEnd, session::Error> {
        let host = self.session.host();
        self.run_ksmd()?;
        let mut wait = self.begin_wait(early, expected)?;
        let mut pause = NEAR_POLL_INTERVAL;
        loop {
            host.sleep(pause);
            let poll = self.poll_counters()?;
            if wait.settled_at.is_none() && self.has_settled(&mut wait, &poll) && self.extend_merge(&mut wait, &poll)? {
                continue;
            }
            pause = self.poll_pause(&wait, &poll);
            if self.is_watch_over(&wait) {
                return self.finish(MergeEnd::Settled);
            }
            if let Some(end) = self.early_end() {
                return self.finish(end);
            }
            self.check_merged_pages(&mut wait)?;
            self.update_pace(&mut wait)?;
        }
    }

    fn begin_wait(&self, early: Option<Pages>, expected: Pages) -> Result<SettleWait, session::Error> {
        let host = self.session.host();
        // Late pages merge at the first visit if the first two copies of each are in the stable tree by then.
        let early = early.map(|pages| Pages(pages.0 - pages.0 / 32));
        Ok(SettleWait {
            expected,
            has_late_ranges: early.is_some(),
            settle: SettleDetector::new(self.full_scans()?, Some(early.unwrap_or(expected))),
            stall: StallDetector::new(host),
            skipped_before: ksmd::read_pages_skipped(host),
            began_at: host.now(),
            last_pace_update: (host.now(), self.ksmd_cpu()),
            last_check: (host.now(), CHECK_INTERVAL),
            settled_at: None,
        })
    }

    fn full_scans(&self) -> Result<u64, session::Error> {
        read_full_scans(self.session.host()).map_err(session::Error::HostStateUnreadable)
    }

    /// Read the counters, and add them to the timeline and the progress.
    fn poll_counters(&mut self) -> Result<Poll, session::Error> {
        let host = self.session.host();
        let began = host.now();
        let (full_scans, merged) = (self.full_scans()?, self.page_counter.count_new());
        let ksmd_time = self.ksmd_cpu_used().unwrap_or_default();
        self.timeline.push(TimelinePoint { at: self.time_since_start(), merged, ksmd_time });
        self.progress.merged.store(merged.0, Ordering::Relaxed);
        Ok(Poll { full_scans, merged, duration: elapsed_since(host, began) })
    }

    /// Whether no more pages merge, of the ranges that are enrolled so far.
    fn has_settled(&self, wait: &mut SettleWait, poll: &Poll) -> bool {
        wait.settle.update(poll.full_scans, poll.merged)
            || wait.stall.has_nothing_to_scan(self.session.host(), &self.page_counter)
    }

    /// Let ksmd merge what it could not merge so far: late ranges, then pages that it skips. If there is neither, stop
    /// it. Returns whether it continues.
    fn extend_merge(&mut self, wait: &mut SettleWait, poll: &Poll) -> Result<bool, session::Error> {
        let host = self.session.host();
        if std::mem::take(&mut wait.has_late_ranges) {
            // A new address space is enrolled behind ksmd's cursor, and waits for the next scan (mm/ksm.c,
            // `__ksm_enter`). While ksmd is stopped, all of them wait for the same scan.
            self.pause_ksmd()?;
            self.enroll_targets(true)?;
            self.run_ksmd()?;
            wait.last_pace_update = (host.now(), self.ksmd_cpu());
            wait.settle = SettleDetector::new(self.full_scans()?, Some(wait.expected));
            return Ok(true);
        }
        if self.may_skip_pages(wait, poll) {
            self.smart_scan_disabled = true;
            ksmd::set_smart_scan(self.session, false)?;
            wait.settle = SettleDetector::new(poll.full_scans, Some(wait.expected));
            return Ok(true);
        }
        // ksmd would merge pages with COW breaks again and hide the breaks, so it stays stopped while pages are
        // watched. From here on each check of a page sees its break, until ksmd works again.
        self.pause_ksmd()?;
        self.monitor.check_pages(CheckScope::AllIfDue);
        wait.last_check = (host.now(), CHECK_INTERVAL);
        wait.settled_at = Some(wait.last_check.0);
        Ok(false)
    }

    /// Whether ksmd may have skipped pages that should merge.
    fn may_skip_pages(&self, wait: &SettleWait, poll: &Poll) -> bool {
        let host = self.session.host();
        let can_skip = !self.smart_scan_disabled && Knob::from(Setting::SmartScan).read(host).is_ok_and(|on| on == "1");
        can_skip
            && wait.skipped_before.as_ref().is_ok_and(|before| {
                let skipped = ksmd::read_pages_skipped(host).unwrap_or(*before);
                wait.settle.may_be_skipped(poll.merged, skipped.saturating_sub(*before))
            })
    }

    /// The pause until the next poll.
    fn poll_pause(&self, wait: &SettleWait, poll: &Poll) -> Duration {
        let is_near = wait.settle.expected().is_none_or(|expected| poll.merged.0 >= expected.0 / 8 * 7);
        let interval = if is_near { NEAR_POLL_INTERVAL } else { FAR_POLL_INTERVAL }
            .div_f64(self.options.ksmd_cpu_share.clamp(0.05, 1.0))
            .min(PACE_UPDATE_INTERVAL);
        // Many targets take longer to count.
        interval.max(poll.duration * POLL_PAUSE_FACTOR)
    }

    /// Whether the merge has settled, and its pages were watched for long enough or no target runs.
    fn is_watch_over(&mut self, wait: &SettleWait) -> bool {
        let Some(settled_at) = wait.settled_at else { return false };
        let host = self.session.host();
        // Pages that merged last are watched, too. While checks still find unstable ranges, more may follow.
        let min_settled_time = self.options.watch_time.min(3 * CHECK_INTERVAL);
        let is_watched = elapsed_since(host, settled_at) >= min_settled_time
            && elapsed_since(host, wait.began_at) >= self.options.watch_time
            && elapsed_since(host, self.unstable_found_at) >= 3 * CHECK_INTERVAL;
        is_watched || !self.monitor.check_any_ran()
    }

    /// Check merged pages, if that is due.
    fn check_merged_pages(&mut self, wait: &mut SettleWait) -> Result<(), session::Error> {
        let host = self.session.host();
        let (checked_at, pause) = wait.last_check;
        if elapsed_since(host, checked_at) >= pause {
            let duration = self.check_and_unenroll(CheckScope::PlannedThatRan, UnenrollPhase::DuringMerge)?;
            let pause = match wait.settled_at {
                Some(_) => duration * SETTLED_CHECK_PAUSE_FACTOR,
                None => self.monitor.pause_after_check(duration),
            };
            wait.last_check = (host.now(), CHECK_INTERVAL.max(pause));
        }
        Ok(())
    }

    /// Detect other writers and, while ksmd works, adapt its pace, if that is due.
    fn update_pace(&mut self, wait: &mut SettleWait) -> Result<(), session::Error> {
        let host = self.session.host();
        let elapsed = elapsed_since(host, wait.last_pace_update.0);
        if elapsed >= PACE_UPDATE_INTERVAL {
            self.session.check_not_overwritten()?;
            let cpu = self.ksmd_cpu();
            if let (None, Ok(before), Ok(current)) = (wait.settled_at, &wait.last_pace_update.1, &cpu) {
                self.pace.adapt(current.saturating_sub(*before), elapsed);
                self.run_ksmd()?;
            }
            wait.last_pace_update = (host.now(), cpu);
        }
        Ok(())
    }

    /// Unenroll ranges without merged pages; after an interrupted round only if ksmd is not to continue with them.
    fn finish(&mut self, end: MergeEnd) -> Result<MergeEnd, session::Error> {
        if end == MergeEnd::Settled {
            self.check_and_unenroll(CheckScope::AllIfDue, UnenrollPhase::AfterSettled)?;
        } else if self.options.after_merge.for_end(&end) == AfterMerge::UndoChanges && !self.plan.whole_processes {
            self.pause_ksmd()?;
            let page_size = self.session.host().page_size();
            // The plan may not be watched yet.
            self.monitor.add_plan(self.plan);
            self.monitor.check_pages(CheckScope::AllIfDue);
            for (process, pages) in
                self.monitor.unenroll_unprofitable(self.session, UnenrollPhase::AfterInterruption)?
            {
                // Ranges that merely had not merged yet do not count as unstable.
                let unmerged_pages =
                    self.monitor.unmerged(process).iter().map(|range| page_size.pages_in(range.bytes())).sum();
                let unstable_pages = pages.saturating_sub(unmerged_pages);
                if unstable_pages > Pages::ZERO {
                    self.unenrolled_pages += unstable_pages;
                    self.unenrolled_processes.insert(process);
                }
            }
        }
        Ok(end)
    }
}
