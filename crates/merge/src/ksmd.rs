//! ksmd and its counters, as seen from outside.

use crate::decide::pace::KsmdPace;
use crate::decide::plan::MergePlan;
use crate::verify;
use pagefold_base::ksm::{Setting, Settings};
use pagefold_base::tuner::Tuner;
use pagefold_base::{Absent, Pages, Reading};
use pagefold_host::knob::Knob;
use pagefold_host::transaction::session;
use pagefold_host::transaction::session::Session;
use pagefold_host::{Host, ProcessHandle, elapsed_since, observe, parse};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Tests whether KSM's settings can be written. It writes a setting that other programs rarely change with its present
/// value.
///
/// # Errors
/// The errors of reading and writing the setting.
pub fn check_writable(session: &Session<'_>) -> Result<(), session::Error> {
    session.check_writable(Setting::SleepMillisecs.into())
}

/// `full_scans`: complete scans of all enrolled memory on the host.
pub fn read_full_scans(host: &dyn Host) -> Reading<u64> {
    parse::number(&host.read("sys/kernel/mm/ksm/full_scans")?)
}

/// `pages_scanned`: page visits since the host booted; each visit of the same page counts.
pub fn read_pages_scanned(host: &dyn Host) -> Reading<Pages> {
    Ok(Pages(parse::number(&host.read("sys/kernel/mm/ksm/pages_scanned")?)?))
}

/// `pages_skipped`: skipped visits of pages that had found no partner before; `NotOnThisKernel` before 6.7, which skips
/// none.
pub fn read_pages_skipped(host: &dyn Host) -> Reading<Pages> {
    Ok(Pages(observe::ksm(host)?.pages_skipped?))
}

/// Handles of the targets of a plan, for repeated counting.
///
/// The host's own counters are not suitable: they include pages of all processes, and those of ended processes until
/// ksmd visits them (mm/ksm.c, `__ksm_exit`).
pub struct MergedPageCounter<'a> {
    handles: Vec<Box<dyn ProcessHandle + 'a>>,
    initial_pages: Pages,
}

impl<'a> MergedPageCounter<'a> {
    /// Open the targets and count their merged pages.
    pub fn new(host: &'a dyn Host, plan: &MergePlan) -> Self {
        let handles =
            plan.targets.iter().filter_map(|target| pagefold_host::hold(host, target.process.id).ok()).collect();
        let mut counter = Self { handles, initial_pages: Pages::ZERO };
        counter.initial_pages = counter.count_all();
        counter
    }

    /// Pages of the targets merged since: mapped to a KSM frame, the kept copy included, or to the zero page. As of
    /// ksmd's last visit of each. Always zero on kernels before 5.19, which have no such counter.
    pub fn count_new(&self) -> Pages {
        self.count_all().saturating_sub(self.initial_pages)
    }

    /// Whether any target has enrolled memory; an unreadable target counts as enrolled.
    fn has_enrolled(&self) -> bool {
        let is_enrolled = |handle: &dyn ProcessHandle| {
            verify::has_enrolled_memory(handle).unwrap_or_else(|why| why != Absent::Vanished)
        };
        self.handles.iter().any(|handle| is_enrolled(&**handle))
    }

    fn count_all(&self) -> Pages {
        let pages = |handle: &dyn ProcessHandle| {
            let ksm = parse::process_ksm(handle.read("ksm_stat"), handle.read("ksm_merging_pages"));
            ksm.merging_pages.unwrap_or(0) + ksm.zero_pages.unwrap_or(0).max(0) as u64
        };
        Pages(self.handles.iter().map(|handle| pages(&**handle)).sum())
    }
}

/// How long ksmd must scan no page before the targets' enrollment is checked.
const STALL_TIME: Duration = Duration::from_secs(1);

/// The pause between two such checks, as a multiple of a check's duration.
const STALL_CHECK_PAUSE_FACTOR: u32 = 50;

/// Detects that ksmd has nothing of the targets to scan. Without enrolled memory ksmd sleeps (mm/ksm.c,
/// `ksmd_should_run`), and no scan ever ends.
pub struct StallDetector {
    pages_scanned: Reading<Pages>,
    unchanged_since: Instant,
    stall_time: Duration,
}

impl StallDetector {
    /// A detector that starts now.
    pub fn new(host: &dyn Host) -> Self {
        Self { pages_scanned: read_pages_scanned(host), unchanged_since: host.now(), stall_time: STALL_TIME }
    }

    /// Whether ksmd stands still and no target has enrolled memory: the targets have ended or executed another program.
    pub fn has_nothing_to_scan(&mut self, host: &dyn Host, targets: &MergedPageCounter<'_>) -> bool {
        let pages_scanned = read_pages_scanned(host);
        // Before 6.6 the counter is missing, and the enrollment is checked each time.
        if pages_scanned != self.pages_scanned {
            *self = Self { pages_scanned, unchanged_since: host.now(), ..*self };
        }
        if elapsed_since(host, self.unchanged_since) < self.stall_time {
            return false;
        }
        let check_start = host.now();
        let none_enrolled = !targets.has_enrolled();
        (self.unchanged_since, self.stall_time) =
            (host.now(), STALL_TIME.max(elapsed_since(host, check_start) * STALL_CHECK_PAUSE_FACTOR));
        none_enrolled
    }
}

/// Run ksmd at a pace.
pub fn run_at_pace(session: &mut Session<'_>, pace: KsmdPace) -> Result<(), session::Error> {
    let (pages, pause) = pace.settings();
    let mut settings = Settings::from([
        (Setting::AdvisorMode, "none".to_owned()),
        (Setting::PagesToScan, pages.to_string()),
        (Setting::SleepMillisecs, pause.to_string()),
        // Zero pages then map the kernel's zero page, as all processes do: no copy to keep, no chains, and no side
        // channel beyond that of every fresh page.
        (Setting::UseZeroPages, "1".to_owned()),
        (Setting::Run, "1".to_owned()),
    ]);
    // Before 6.8 there is no advisor to switch off.
    if Knob::from(Setting::AdvisorMode).read(session.host()).is_err() {
        settings.remove(&Setting::AdvisorMode);
    }
    session.write_settings(&settings)
}

/// Stop ksmd and keep merged pages.
pub fn pause(session: &mut Session<'_>) -> Result<(), session::Error> {
    session.write_settings(&Settings::from([(Setting::Run, "0".to_owned())]))
}

/// Let ksmd skip pages that have found no partner for long, or visit all of them.
pub fn set_smart_scan(session: &mut Session<'_>, skip: bool) -> Result<(), session::Error> {
    session.write_settings(&Settings::from([(Setting::SmartScan, u8::from(skip).to_string())]))
}

/// ksmd's share of one CPU during a sweep.
const SWEEP_CPU_SHARE: f64 = 0.5;

/// Interval between two checks of its progress.
const SWEEP_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Checks without any change after which the sweep counts as finished.
const UNCHANGED_POLLS_TO_FINISH: u32 = 5;

/// Maximum duration of a sweep.
const MAX_SWEEP_TIME: Duration = Duration::from_secs(2);

/// Let ksmd visit the processes that have ended. Until then it keeps the metadata of their pages, and its counters
/// include them. Their address spaces come next after the current one (mm/ksm.c, `__ksm_exit`), and each is freed at
/// once. Returns whether the sweep finished; the next sweep continues from its position.
pub fn sweep_ended_processes(session: &mut Session<'_>, cancel: &AtomicBool) -> Result<bool, session::Error> {
    let host = session.host();
    let before = (read_full_scans(host), count_pages_with_metadata(host));
    run_at_pace(session, KsmdPace::new(SWEEP_CPU_SHARE))?;
    let swept = before.0.and_then(|scans| wait_until_swept(host, scans, before.1?, cancel));
    // Stop ksmd also if a counter could not be read.
    pause(session)?;
    swept.map_err(session::Error::HostStateUnreadable)
}

/// Wait until ksmd has visited all ended processes, and return whether it has. `scans` and `last_pages` are the numbers
/// of full scans and of pages with metadata at the start.
fn wait_until_swept(host: &dyn Host, scans: u64, mut last_pages: u64, cancel: &AtomicBool) -> Reading<bool> {
    let (start, mut has_fallen, mut unchanged_polls) = (host.now(), false, 0);
    loop {
        host.sleep(SWEEP_POLL_INTERVAL);
        let pages = count_pages_with_metadata(host)?;
        has_fallen |= pages < last_pages;
        unchanged_polls = if pages == last_pages { unchanged_polls + 1 } else { 0 };
        last_pages = pages;
        // ksmd has completed a scan, or has freed some metadata and finds no more.
        if read_full_scans(host)? > scans || has_fallen && unchanged_polls >= UNCHANGED_POLLS_TO_FINISH {
            return Ok(true);
        }
        if elapsed_since(host, start) >= MAX_SWEEP_TIME || cancel.load(Ordering::Relaxed) {
            return Ok(false);
        }
    }
}

/// Pages with metadata, by the counters that the kernel updates at once.
fn count_pages_with_metadata(host: &dyn Host) -> Reading<u64> {
    let ksm = observe::ksm(host)?;
    Ok(ksm.pages_shared? + ksm.pages_sharing? + ksm.pages_unshared?)
}

/// A running program of root that writes KSM's settings repeatedly, if any.
pub fn find_other_tuner(host: &dyn Host) -> Reading<Option<Tuner>> {
    let processes = observe::processes(host)?;
    Ok(processes
        .into_iter()
        .find_map(|(_, process)| observe::identify_tuner(host, &process.ok()?).filter(|tuner| tuner.writes_rate())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::Pid;
    use pagefold_host::fake_host::FakeHost;
    use pagefold_host::faulty_host::{FaultyHost, InjectedFault};
    use pagefold_host::resource::ResourceClass;
    use std::sync::atomic::AtomicU64;

    /// The result of a sweep with these counter values, one for each read and the last one from then on, and the final
    /// value of `run`.
    fn run_sweep(sharing: &[u64], scans: &[u64]) -> (Option<bool>, String) {
        let (fake, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
        fake.enable_virtual_time();
        for name in ["pages_shared", "pages_sharing", "pages_unshared", "full_scans"] {
            fake.put_setting(name, "0");
        }
        let reads = [AtomicU64::new(0), AtomicU64::new(0)];
        let fault = |path: &str| {
            let (counter, values) = match path {
                "sys/kernel/mm/ksm/pages_sharing" => (0, sharing),
                "sys/kernel/mm/ksm/full_scans" => (1, scans),
                _ => return None,
            };
            let read = reads[counter].fetch_add(1, Ordering::Relaxed) as usize;
            let value = values.get(read).or(values.last());
            Some(value.map_or(InjectedFault::Absent(Absent::Denied), |value| {
                InjectedFault::Replaced(value.to_string().into_bytes())
            }))
        };
        let host = FaultyHost::new(&fake, fault);
        let (mut session, ..) = Session::begin(&host, directory.path(), ResourceClass::Ksm).unwrap();
        let finished = sweep_ended_processes(&mut session, &AtomicBool::new(false)).ok();
        (finished, fake.setting_value("run"))
    }

    #[test]
    fn sweep_ends_when_counters_settle() {
        let expected = |finished| (finished, "0".to_owned());
        assert_eq!(run_sweep(&[900, 900, 500, 300], &[7]), expected(Some(true)), "the counters fell, then stayed");
        assert_eq!(run_sweep(&[900], &[7, 7, 7, 8]), expected(Some(true)), "no process had ended");
        assert_eq!(run_sweep(&[900], &[7]), expected(Some(false)), "the sweep timed out");
    }

    #[test]
    fn stall_without_enrolled_targets_is_found() {
        let fake = FakeHost::booted();
        fake.enable_virtual_time();
        let set_pages_scanned = |number: &str| fake.put_setting("pages_scanned", number);
        set_pages_scanned("5");
        fake.map_pages(7, (0, 8192), "its own", true);
        let targets = MergedPageCounter { handles: vec![fake.open(Pid(7)).unwrap()], initial_pages: Pages::ZERO };
        let mut detector = StallDetector::new(&fake);
        let mut is_stalled_after = |pause: Duration| {
            fake.sleep(pause);
            detector.has_nothing_to_scan(&fake, &targets)
        };
        fake.map_pages(7, (0, 8192), "another program's", false);
        let half = STALL_TIME / 2;
        assert!(!is_stalled_after(half), "ksmd may still continue");
        assert!(is_stalled_after(half));
        set_pages_scanned("6");
        assert!(!is_stalled_after(STALL_TIME), "ksmd continues");
        assert!(!is_stalled_after(half), "the stall time starts again");
        assert!(is_stalled_after(half));
        fake.map_pages(7, (0, 8192), "its own", true);
        assert!(!is_stalled_after(STALL_TIME), "a target is enrolled");
        fake.unmap_pages(7, (0, 8192));
        assert!(is_stalled_after(STALL_TIME), "the target unmapped its memory");
    }

    #[test]
    fn ksmd_is_paused_after_a_failed_sweep() {
        let expected = (None, "0".to_owned());
        assert_eq!(run_sweep(&[], &[7]), expected);
        assert_eq!(run_sweep(&[900], &[]), expected);
    }
}
