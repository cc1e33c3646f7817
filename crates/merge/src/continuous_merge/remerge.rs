//! Merges rewritten pages again, between rounds.
//!
//! A page that a program rewrites with the same bytes keeps its checksum in ksmd's metadata, so one scan merges it
//! (mm/ksm.c, `cmp_and_merge_page`, 6.18). ksmd runs for the rest of the current scan and one whole scan, without
//! skipping pages (`should_skip_rmap_item` skips pages that broke a few times). Then it is idle again, so that the next
//! check sees each COW break.

use crate::decide::pace::KsmdPace;
use crate::ksmd::{self, read_full_scans};
use crate::merge_monitor::MergeMonitor;
use crate::recheck::CheckScope;
use pagefold_base::ksm::Setting;
use pagefold_base::{Pages, Reading};
use pagefold_host::knob::Knob;
use pagefold_host::ksmd_thread::KsmdThread;
use pagefold_host::transaction::session;
use pagefold_host::transaction::session::Session;
use pagefold_host::{Host, elapsed_since};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Minimum pause between two checks. Pages that are overwritten at once seem to stay merged for half of this pause. It
/// must therefore be less than twice the minimum lifetime of merged pages under any criterion (2.6 s).
pub const MIN_CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// Broken pages that justify a scan: 1 MiB of 4 KiB pages, at about 10 ms of CPU time.
const MIN_BROKEN_PAGES: Pages = Pages(256);

/// Scans: the rest of the current one, and a whole one.
const SCANS_PER_REMERGE: u64 = 2;

/// Maximum run time of ksmd, for hosts on which other programs enrolled much memory.
const MAX_REMERGE_TIME: Duration = Duration::from_secs(2);

/// Intervals between two checks of ksmd's progress, and between two updates of its pace.
const SCAN_POLL_INTERVAL: Duration = Duration::from_millis(20);
const PACE_UPDATE_INTERVAL: Duration = Duration::from_millis(100);

/// Whether enough pages broke to merge them again.
pub fn is_due(monitor: &MergeMonitor<'_>) -> bool {
    monitor.cow_breaks() >= MIN_BROKEN_PAGES
}

/// The state that is kept between two runs.
pub struct Remerge<'h> {
    ksmd: Reading<KsmdThread<'h>>,
    ksmd_cpu_share: f64,
    pace: KsmdPace,
}

impl<'h> Remerge<'h> {
    /// With a share of one CPU for ksmd.
    pub fn new(host: &'h dyn Host, ksmd_cpu_share: f64) -> Self {
        Self { ksmd: KsmdThread::find(host), ksmd_cpu_share, pace: KsmdPace::new(ksmd_cpu_share) }
    }

    /// The pause that keeps ksmd within its share after it used so much CPU time.
    pub fn pause_after(&self, ksmd_cpu_time: Duration) -> Duration {
        ksmd_cpu_time.div_f64(self.ksmd_cpu_share.max(0.001))
    }

    /// Merge broken pages again. Returns ksmd's CPU time.
    pub fn run(
        &mut self,
        session: &mut Session<'_>,
        monitor: &mut MergeMonitor<'_>,
        stop: &AtomicBool,
    ) -> Result<Duration, session::Error> {
        let unreadable = session::Error::HostStateUnreadable;
        let host = session.host();
        monitor.take_cow_breaks();
        let (start, cpu_before) = (host.now(), self.ksmd_cpu_time());
        let final_scan = read_full_scans(host).map_err(unreadable)? + SCANS_PER_REMERGE;
        if Knob::from(Setting::SmartScan).read(host).is_ok_and(|on| on == "1") {
            ksmd::set_smart_scan(session, false)?;
        }
        ksmd::run_at_pace(session, self.pace)?;
        let mut last_update = (start, cpu_before);
        while elapsed_since(host, start) < MAX_REMERGE_TIME && !stop.load(Ordering::Relaxed) {
            host.sleep(SCAN_POLL_INTERVAL);
            if read_full_scans(host).map_err(unreadable)? >= final_scan {
                break;
            }
            if elapsed_since(host, last_update.0) >= PACE_UPDATE_INTERVAL {
                session.check_not_overwritten()?;
                let cpu = self.ksmd_cpu_time();
                self.pace.adapt(cpu.saturating_sub(last_update.1), elapsed_since(host, last_update.0));
                ksmd::run_at_pace(session, self.pace)?;
                last_update = (host.now(), cpu);
            }
        }
        ksmd::pause(session)?;
        // Breaks of the pages that are merged now are visible from here on.
        monitor.check_pages(CheckScope::All);
        Ok(self.ksmd_cpu_time().saturating_sub(cpu_before))
    }

    /// ksmd's CPU time so far; zero where it cannot be read.
    fn ksmd_cpu_time(&self) -> Duration {
        self.ksmd.as_ref().ok().and_then(|ksmd| ksmd.cpu_time().ok()).unwrap_or_default()
    }
}
