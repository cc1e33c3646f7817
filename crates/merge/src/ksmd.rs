//! ksmd and its counters, as seen from outside.

use crate::decide::pace::KsmdPace;
use crate::decide::plan::MergePlan;
use crate::verify;
use pagefold_base::ksm::{Setting, Settings};
use pagefold_base::process::USER_HZ;
use pagefold_base::tuner::Tuner;
use pagefold_base::{Absent, Pages, Reading};
use pagefold_host::transaction::session;
use pagefold_host::transaction::session::Session;
use pagefold_host::{Host, ProcessHandle, action, observe, parse};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The kernel's merging thread, held.
pub struct KsmdThread<'a> {
    thread: Box<dyn ProcessHandle + 'a>,
}

impl<'a> KsmdThread<'a> {
    /// Find it among the processes. `NotOnThisKernel` if it is not there, as in a container of its own pid namespace.
    pub fn find(host: &'a dyn Host) -> Reading<Self> {
        for pid in host.pids()? {
            // Kernel threads have no command line, and most processes are told apart by that much alone.
            let Ok(thread) = host.open(pid) else { continue };
            let Ok(stat) = thread.read("stat").and_then(|bytes| parse::stat(&bytes)) else { continue };
            if stat.comm == "ksmd" && stat.flags & parse::PF_KTHREAD != 0 {
                return Ok(Self { thread });
            }
        }
        Err(Absent::NotOnThisKernel)
    }

    /// The CPU time that it has used: to the nanosecond where the kernel keeps `schedstat`, else in ticks.
    pub fn cpu_time(&self) -> Reading<Duration> {
        let exact = self.thread.read("schedstat").and_then(|bytes| parse::schedstat(&bytes));
        exact.map(|stat| Duration::from_nanos(stat.run_ns)).or_else(|_| {
            let stat = parse::stat(&self.thread.read("stat")?)?;
            Ok(Duration::from_secs_f64(stat.utime.saturating_add(stat.stime) as f64 / USER_HZ))
        })
    }
}

/// `full_scans`: complete passes over all that is enrolled on the host.
pub fn read_full_scans(host: &dyn Host) -> Reading<u64> {
    parse::number(&host.read("sys/kernel/mm/ksm/full_scans")?)
}

/// `pages_scanned`: looks at pages since the host booted, a page that is looked at again counted again.
pub fn read_pages_scanned(host: &dyn Host) -> Reading<Pages> {
    Ok(Pages(parse::number(&host.read("sys/kernel/mm/ksm/pages_scanned")?)?))
}

/// `pages_skipped`: looks that were saved at pages that had found no partner before; `NotOnThisKernel` before 6.7, where
/// none is.
pub fn read_pages_skipped(host: &dyn Host) -> Reading<Pages> {
    Ok(Pages(observe::ksm(host)?.pages_skipped?))
}

/// The targets of a plan, held to be counted again and again.
///
/// The host's own counters would not do: they hold everybody's pages, and those of processes that ended until ksmd
/// comes by (mm/ksm.c, `__ksm_exit`).
pub struct MergedPageCounter<'a> {
    handles: Vec<Box<dyn ProcessHandle + 'a>>,
    initial_pages: Pages,
}

impl<'a> MergedPageCounter<'a> {
    /// Take hold of the targets and count what is merged of them already.
    pub fn new(host: &'a dyn Host, plan: &MergePlan) -> Self {
        let handles =
            plan.targets.iter().filter_map(|target| pagefold_host::hold(host, target.process.id).ok()).collect();
        let mut gauge = Self { handles, initial_pages: Pages::ZERO };
        gauge.initial_pages = gauge.count_all();
        gauge
    }

    /// Pages of the targets that were merged since: mapped to a KSM frame, the kept copy included, or to the page of
    /// zeros. As of ksmd's last look at each. Kernels before 5.19 do not tell, and it stays at nothing.
    pub fn count_new(&self) -> Pages {
        self.count_all().saturating_sub(self.initial_pages)
    }

    /// Whether any of them has enrolled memory; of who cannot be looked at it is taken to be so.
    fn has_enrolled(&self) -> bool {
        let is = |handle: &dyn ProcessHandle| {
            verify::has_enrolled_memory(handle).unwrap_or_else(|why| why != Absent::Vanished)
        };
        self.handles.iter().any(|handle| is(&**handle))
    }

    fn count_all(&self) -> Pages {
        let pages = |handle: &dyn ProcessHandle| {
            let ksm = parse::process_ksm(handle.read("ksm_stat"), handle.read("ksm_merging_pages"));
            ksm.merging_pages.unwrap_or(0) + ksm.zero_pages.unwrap_or(0).max(0) as u64
        };
        Pages(self.handles.iter().map(|handle| pages(&**handle)).sum())
    }
}

/// For how long it looks at no page before it is asked whether there is anything of the targets to look at.
const STALL_TIME: Duration = Duration::from_secs(1);

/// Between two such questions, in times of what one takes.
const STALL_CHECK_PAUSE_FACTOR: u32 = 50;

/// Its way over the pages of targets. Where nobody is enrolled any more it sleeps (mm/ksm.c, `ksmd_should_run`), and no
/// scan ever ends.
pub struct StallDetector {
    pages_scanned: Reading<Pages>,
    unchanged_since: Instant,
    stall_time: Duration,
}

impl StallDetector {
    /// From now on.
    pub fn new(host: &dyn Host) -> Self {
        Self { pages_scanned: read_pages_scanned(host), unchanged_since: Instant::now(), stall_time: STALL_TIME }
    }

    /// Whether it stands still, and nothing of the targets is enrolled: they have ended, or become other programs.
    pub fn has_nothing_to_scan(&mut self, host: &dyn Host, targets: &MergedPageCounter<'_>) -> bool {
        let pages_scanned = read_pages_scanned(host);
        // Before 6.6 it is not told, and asked each time.
        if pages_scanned != self.pages_scanned {
            *self = Self { pages_scanned, unchanged_since: Instant::now(), ..*self };
        }
        if self.unchanged_since.elapsed() < self.stall_time {
            return false;
        }
        let asked = Instant::now();
        let over = !targets.has_enrolled();
        (self.unchanged_since, self.stall_time) =
            (Instant::now(), STALL_TIME.max(asked.elapsed() * STALL_CHECK_PAUSE_FACTOR));
        over
    }
}

/// Run it at a pace.
pub fn run_at_pace(session: &mut Session<'_>, pace: KsmdPace) -> Result<(), session::Error> {
    let (pages, pause) = pace.settings();
    let mut settings = Settings::from([
        (Setting::AdvisorMode, "none".to_owned()),
        (Setting::PagesToScan, pages.to_string()),
        (Setting::SleepMillisecs, pause.to_string()),
        // Pages of zeros then map the page of zeros that everybody maps: no copy to keep, no chains, no side
        // channel beyond the one that every fresh page has.
        (Setting::UseZeroPages, "1".to_owned()),
        (Setting::Run, "1".to_owned()),
    ]);
    // Before 6.8 there is no advisor that would have to be off.
    if action::current_setting(session.host(), Setting::AdvisorMode).is_err() {
        settings.remove(&Setting::AdvisorMode);
    }
    session.write_settings(&settings)
}

/// Stop it, with what is merged kept.
pub fn pause(session: &mut Session<'_>) -> Result<(), session::Error> {
    session.write_settings(&Settings::from([(Setting::Run, "0".to_owned())]))
}

/// Have it skip pages that have found no partner for long, or look at all of them.
pub fn set_smart_scan(session: &mut Session<'_>, skip: bool) -> Result<(), session::Error> {
    session.write_settings(&Settings::from([(Setting::SmartScan, u8::from(skip).to_string())]))
}

/// The share of one CPU that it is given for a sweep.
const SWEEP_CPU_SHARE: f64 = 0.5;

/// Between two looks at how far it has come.
const SWEEP_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Looks without any change after which it has passed by.
const UNCHANGED_POLLS_TO_FINISH: u32 = 5;

/// For how long it sweeps at most.
const MAX_SWEEP_TIME: Duration = Duration::from_secs(2);

/// Have it pass by the processes that have ended. Until it does, it keeps the metadata of their pages, and its counters
/// hold them. Their address spaces come next after the one in which it stands (mm/ksm.c, `__ksm_exit`), and each goes at
/// once. Tells whether it got there; what was begun goes on from there the next time.
pub fn sweep_ended_processes(session: &mut Session<'_>, cancel: &AtomicBool) -> Result<bool, session::Error> {
    let host = session.host();
    let before = (read_full_scans(host), count_pages_with_metadata(host));
    run_at_pace(session, KsmdPace::new(SWEEP_CPU_SHARE))?;
    let swept = before.0.and_then(|scans| wait_until_swept(host, scans, before.1?, cancel));
    // Whatever could not be read.
    pause(session)?;
    swept.map_err(session::Error::HostStateUnreadable)
}

/// Whether it passes by all who have ended, after so many scans and with so many pages in its counters.
fn wait_until_swept(host: &dyn Host, scans: u64, mut last: u64, halt: &AtomicBool) -> Reading<bool> {
    let (began, mut falls, mut unchanged) = (Instant::now(), false, 0);
    loop {
        std::thread::sleep(SWEEP_POLL_INTERVAL);
        let now = count_pages_with_metadata(host)?;
        falls |= now < last;
        unchanged = if now == last { unchanged + 1 } else { 0 };
        last = now;
        // It has gone around once, or has passed by some and finds no more.
        if read_full_scans(host)? > scans || falls && unchanged >= UNCHANGED_POLLS_TO_FINISH {
            return Ok(true);
        }
        if began.elapsed() >= MAX_SWEEP_TIME || halt.load(Ordering::Relaxed) {
            return Ok(false);
        }
    }
}

/// Pages that have metadata by the counters that tell at once.
fn count_pages_with_metadata(host: &dyn Host) -> Reading<u64> {
    let ksm = observe::ksm(host)?;
    Ok(ksm.pages_shared? + ksm.pages_sharing? + ksm.pages_unshared?)
}

/// A program of root that writes KSM's settings again and again, if one runs.
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
    use std::sync::atomic::AtomicU64;

    /// What a sweep comes to where the counters are these, one for each look and the last from then on, and whether ksmd
    /// rests afterwards.
    fn run_sweep(sharing: &[u64], scans: &[u64]) -> (Option<bool>, String) {
        let (fake, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
        for name in ["pages_shared", "pages_sharing", "pages_unshared", "full_scans"] {
            fake.put_setting(name, "0");
        }
        let looks = [AtomicU64::new(0), AtomicU64::new(0)];
        let fault = |path: &str| {
            let (of, values) = match path {
                "sys/kernel/mm/ksm/pages_sharing" => (0, sharing),
                "sys/kernel/mm/ksm/full_scans" => (1, scans),
                _ => return None,
            };
            let look = looks[of].fetch_add(1, Ordering::Relaxed) as usize;
            let value = values.get(look).or(values.last());
            Some(value.map_or(InjectedFault::Absent(Absent::Denied), |value| {
                InjectedFault::Replaced(value.to_string().into_bytes())
            }))
        };
        let host = FaultyHost::new(&fake, fault);
        let (mut session, ..) = Session::begin(&host, directory.path()).unwrap();
        let whole = sweep_ended_processes(&mut session, &AtomicBool::new(false)).ok();
        (whole, fake.setting_value("run"))
    }

    #[test]
    fn sweep_ends_when_counters_settle() {
        let rests = |whole| (whole, "0".to_owned());
        assert_eq!(run_sweep(&[900, 900, 500, 300], &[7]), rests(Some(true)), "they have fallen, and stay");
        assert_eq!(run_sweep(&[900], &[7, 7, 7, 8]), rests(Some(true)), "there was nobody");
        assert_eq!(run_sweep(&[900], &[7]), rests(Some(false)), "it did not get there in time");
    }

    #[test]
    fn stall_without_enrolled_targets_is_found() {
        let fake = FakeHost::booted();
        let set_pages_scanned = |number: &str| fake.put_setting("pages_scanned", number);
        set_pages_scanned("5");
        fake.map_pages(7, (0, 8192), "its own", true);
        let targets = MergedPageCounter { handles: vec![fake.open(Pid(7)).unwrap()], initial_pages: Pages::ZERO };
        let still = || StallDetector { stall_time: Duration::ZERO, ..StallDetector::new(&fake) };
        assert!(!StallDetector::new(&fake).has_nothing_to_scan(&fake, &targets), "it may come on yet");
        assert!(!still().has_nothing_to_scan(&fake, &targets), "it has whom to look at");
        fake.map_pages(7, (0, 8192), "another program's", false);
        assert!(still().has_nothing_to_scan(&fake, &targets));
        let mut walk = StallDetector { stall_time: Duration::from_secs(3600), ..still() };
        set_pages_scanned("6");
        assert!(!walk.has_nothing_to_scan(&fake, &targets), "it comes on");
        assert_eq!(walk.pages_scanned, Ok(Pages(6)));
        fake.unmap_pages(7, (0, 8192));
        assert!(still().has_nothing_to_scan(&fake, &targets), "it has left its memory");
    }

    #[test]
    fn ksmd_is_paused_after_a_failed_sweep() {
        let rests = (None, "0".to_owned());
        assert_eq!(run_sweep(&[], &[7]), rests);
        assert_eq!(run_sweep(&[900], &[]), rests);
    }
}
