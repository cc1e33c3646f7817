//! Merging again what was written, between rounds.
//!
//! A page that a program writes with the bytes that were there keeps its checksum in ksmd's metadata, so that one scan
//! merges it (mm/ksm.c, `cmp_and_merge_page`, 6.18). ksmd runs for one scan after the one that was under way, without
//! skipping pages (`should_skip_rmap_item` passes over pages that broke a few times), and then rests again, so that the
//! next check sees each COW break.

use crate::decide::pace::Pace;
use crate::ksmd::{self, Ksmd, full_scans};
use crate::recheck::Whom;
use crate::trial::Trial;
use pagefold_base::ksm::Setting;
use pagefold_base::{Pages, Reading};
use pagefold_host::transaction::session;
use pagefold_host::transaction::session::Session;
use pagefold_host::{Host, act};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The pause between two checks at least. Pages that are overwritten at once seem to last for half of it, so that it has
/// to be less than twice what merged pages have to last at any price (2.6 s).
pub const PAUSE: Duration = Duration::from_secs(2);

/// Written pages that are worth a scan: 1 MiB of 4 KiB pages, at about 10 ms of CPU time.
const DUE: Pages = Pages(256);

/// Scans: the rest of the one that was under way, and a whole one.
const SCANS: u64 = 2;

/// For how long ksmd runs at most, where others have much enrolled.
const LONGEST: Duration = Duration::from_secs(2);

/// Between two readings of how far it has come, and between two settings of its pace.
const POLL: Duration = Duration::from_millis(20);
const ADAPT: Duration = Duration::from_millis(100);

/// Whether enough was written to merge it again.
pub fn is_due(trial: &Trial<'_>) -> bool {
    trial.broken() >= DUE
}

/// What is kept from one time to the next.
pub struct Remerge<'h> {
    ksmd: Reading<Ksmd<'h>>,
    share: f64,
    pace: Pace,
}

impl<'h> Remerge<'h> {
    /// With a share of one CPU for ksmd.
    pub fn new(host: &'h dyn Host, share: f64) -> Self {
        Self { ksmd: Ksmd::find(host), share, pace: Pace::new(share) }
    }

    /// The pause after which ksmd's share is kept, where it took so much CPU time.
    pub fn pause_after(&self, ksmd: Duration) -> Duration {
        ksmd.div_f64(self.share.max(0.001))
    }

    /// Merge again what was written. Tells the CPU time that ksmd took.
    pub fn run(
        &mut self,
        session: &mut Session<'_>,
        trial: &mut Trial<'_>,
        stop: &AtomicBool,
    ) -> Result<Duration, session::Error> {
        let unknown = session::Error::Unknown;
        let host = session.host();
        trial.take_broken();
        let (began, before) = (Instant::now(), self.cpu());
        let last = full_scans(host).map_err(unknown)? + SCANS;
        if act::setting_now(host, Setting::SmartScan).is_ok_and(|on| on == "1") {
            ksmd::skip(session, false)?;
        }
        ksmd::run(session, self.pace)?;
        let mut adapted = (began, before);
        while began.elapsed() < LONGEST && !stop.load(Ordering::Relaxed) {
            std::thread::sleep(POLL);
            if full_scans(host).map_err(unknown)? >= last {
                break;
            }
            if adapted.0.elapsed() >= ADAPT {
                session.uncontested()?;
                let cpu = self.cpu();
                self.pace.adapt(cpu.saturating_sub(adapted.1), adapted.0.elapsed());
                ksmd::run(session, self.pace)?;
                adapted = (Instant::now(), cpu);
            }
        }
        ksmd::rest(session)?;
        // What is merged now is seen to break from here on.
        trial.look(Whom::All);
        Ok(self.cpu().saturating_sub(before))
    }

    /// The CPU time that ksmd has used; nothing where it cannot be read.
    fn cpu(&self) -> Duration {
        self.ksmd.as_ref().ok().and_then(|ksmd| ksmd.cpu().ok()).unwrap_or_default()
    }
}
