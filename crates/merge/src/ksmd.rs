//! ksmd and its counters, as seen from outside.

use crate::decide::pace::Pace;
use crate::decide::plan::Plan;
use crate::verify;
use pagefold_base::ksm::{Setting, Settings};
use pagefold_base::process::USER_HZ;
use pagefold_base::tuner::Tuner;
use pagefold_base::{Absent, Pages, Reading};
use pagefold_host::transaction::session;
use pagefold_host::transaction::session::Session;
use pagefold_host::{Host, Process, act, observe, parse};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The kernel's merging thread, held.
pub struct Ksmd<'a> {
    thread: Box<dyn Process + 'a>,
}

impl<'a> Ksmd<'a> {
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
    pub fn cpu(&self) -> Reading<Duration> {
        let exact = self.thread.read("schedstat").and_then(|bytes| parse::schedstat(&bytes));
        exact.map(|stat| Duration::from_nanos(stat.ran)).or_else(|_| {
            let stat = parse::stat(&self.thread.read("stat")?)?;
            Ok(Duration::from_secs_f64(stat.utime.saturating_add(stat.stime) as f64 / USER_HZ))
        })
    }
}

/// `full_scans`: complete passes over all that is enrolled on the host.
pub fn full_scans(host: &dyn Host) -> Reading<u64> {
    parse::number(&host.read("sys/kernel/mm/ksm/full_scans")?)
}

/// `pages_scanned`: looks at pages since the host booted, a page that is looked at again counted again.
pub fn looks(host: &dyn Host) -> Reading<Pages> {
    Ok(Pages(parse::number(&host.read("sys/kernel/mm/ksm/pages_scanned")?)?))
}

/// `pages_skipped`: looks that were saved at pages that had found no partner before; `NotOnThisKernel` before 6.7, where
/// none is.
pub fn skipped(host: &dyn Host) -> Reading<Pages> {
    Ok(Pages(observe::ksm(host)?.pages_skipped?))
}

/// The targets of a plan, held to be counted again and again.
///
/// The host's own counters would not do: they hold everybody's pages, and those of processes that ended until ksmd
/// comes by (mm/ksm.c, `__ksm_exit`).
pub struct Gauge<'a> {
    handles: Vec<Box<dyn Process + 'a>>,
    before: Pages,
}

impl<'a> Gauge<'a> {
    /// Take hold of the targets and count what is merged of them already.
    pub fn new(host: &'a dyn Host, plan: &Plan) -> Self {
        let handles =
            plan.targets.iter().filter_map(|target| pagefold_host::hold(host, target.process.id).ok()).collect();
        let mut gauge = Self { handles, before: Pages::ZERO };
        gauge.before = gauge.all();
        gauge
    }

    /// Pages of the targets that were merged since: mapped to a KSM frame, the kept copy included, or to the page of
    /// zeros. As of ksmd's last look at each. Kernels before 5.19 do not tell, and it stays at nothing.
    pub fn merged(&self) -> Pages {
        self.all().saturating_sub(self.before)
    }

    /// Whether any of them has enrolled memory; of who cannot be looked at it is taken to be so.
    fn any_enrolled(&self) -> bool {
        let is = |handle: &dyn Process| verify::has_enrolled(handle).unwrap_or_else(|why| why != Absent::Vanished);
        self.handles.iter().any(|handle| is(&**handle))
    }

    fn all(&self) -> Pages {
        let pages = |handle: &dyn Process| {
            let ksm = parse::process_ksm(handle.read("ksm_stat"), handle.read("ksm_merging_pages"));
            ksm.merging_pages.unwrap_or(0) + ksm.zero_pages.unwrap_or(0).max(0) as u64
        };
        Pages(self.handles.iter().map(|handle| pages(&**handle)).sum())
    }
}

/// For how long it looks at no page before it is asked whether there is anything of the targets to look at.
const STILL: Duration = Duration::from_secs(1);

/// Between two such questions, in times of what one takes.
const ASKING: u32 = 50;

/// Its way over the pages of targets. Where nobody is enrolled any more it sleeps (mm/ksm.c, `ksmd_should_run`), and no
/// scan ever ends.
pub struct Walk {
    looks: Reading<Pages>,
    since: Instant,
    patience: Duration,
}

impl Walk {
    /// From now on.
    pub fn new(host: &dyn Host) -> Self {
        Self { looks: looks(host), since: Instant::now(), patience: STILL }
    }

    /// Whether it stands still, and nothing of the targets is enrolled: they have ended, or become other programs.
    pub fn is_over(&mut self, host: &dyn Host, targets: &Gauge<'_>) -> bool {
        let looks = looks(host);
        // Before 6.6 it is not told, and asked each time.
        if looks != self.looks {
            *self = Self { looks, since: Instant::now(), ..*self };
        }
        if self.since.elapsed() < self.patience {
            return false;
        }
        let asked = Instant::now();
        let over = !targets.any_enrolled();
        (self.since, self.patience) = (Instant::now(), STILL.max(asked.elapsed() * ASKING));
        over
    }
}

/// Run it at a pace.
pub fn run(session: &mut Session<'_>, pace: Pace) -> Result<(), session::Error> {
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
    if act::setting_now(session.host(), Setting::AdvisorMode).is_err() {
        settings.remove(&Setting::AdvisorMode);
    }
    session.set(&settings)
}

/// Stop it, with what is merged kept.
pub fn rest(session: &mut Session<'_>) -> Result<(), session::Error> {
    session.set(&Settings::from([(Setting::Run, "0".to_owned())]))
}

/// Have it skip pages that have found no partner for long, or look at all of them.
pub fn skip(session: &mut Session<'_>, skip: bool) -> Result<(), session::Error> {
    session.set(&Settings::from([(Setting::SmartScan, u8::from(skip).to_string())]))
}

/// The share of one CPU that it is given for a sweep.
const SWEEPING: f64 = 0.5;

/// Between two looks at how far it has come.
const GLANCE: Duration = Duration::from_millis(20);

/// Looks without any change after which it has passed by.
const UNCHANGED: u32 = 5;

/// For how long it sweeps at most.
const SWEPT: Duration = Duration::from_secs(2);

/// Have it pass by the processes that have ended. Until it does, it keeps the metadata of their pages, and its counters
/// hold them. Their address spaces come next after the one in which it stands (mm/ksm.c, `__ksm_exit`), and each goes at
/// once. Tells whether it got there; what was begun goes on from there the next time.
pub fn sweep(session: &mut Session<'_>, halt: &AtomicBool) -> Result<bool, session::Error> {
    let host = session.host();
    let before = (full_scans(host), counted(host));
    run(session, Pace::new(SWEEPING))?;
    let swept = before.0.and_then(|scans| passes_by(host, scans, before.1?, halt));
    // Whatever could not be read.
    rest(session)?;
    swept.map_err(session::Error::Unknown)
}

/// Whether it passes by all who have ended, after so many scans and with so many pages in its counters.
fn passes_by(host: &dyn Host, scans: u64, mut last: u64, halt: &AtomicBool) -> Reading<bool> {
    let (began, mut falls, mut unchanged) = (Instant::now(), false, 0);
    loop {
        std::thread::sleep(GLANCE);
        let now = counted(host)?;
        falls |= now < last;
        unchanged = if now == last { unchanged + 1 } else { 0 };
        last = now;
        // It has gone around once, or has passed by some and finds no more.
        if full_scans(host)? > scans || falls && unchanged >= UNCHANGED {
            return Ok(true);
        }
        if began.elapsed() >= SWEPT || halt.load(Ordering::Relaxed) {
            return Ok(false);
        }
    }
}

/// Pages that have metadata by the counters that tell at once.
fn counted(host: &dyn Host) -> Reading<u64> {
    let ksm = observe::ksm(host)?;
    Ok(ksm.pages_shared? + ksm.pages_sharing? + ksm.pages_unshared?)
}

/// A program of root that writes KSM's settings again and again, if one runs.
pub fn other_tuner(host: &dyn Host) -> Reading<Option<Tuner>> {
    let processes = observe::processes(host)?;
    Ok(processes
        .into_iter()
        .find_map(|(_, process)| observe::tuner(host, &process.ok()?).filter(|tuner| tuner.writes_rate())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::Pid;
    use pagefold_host::fake::Fake;
    use pagefold_host::faulty::{Fault, Faulty};
    use std::sync::atomic::AtomicU64;

    /// What a sweep comes to where the counters are these, one for each look and the last from then on, and whether ksmd
    /// rests afterwards.
    fn swept(sharing: &[u64], scans: &[u64]) -> (Option<bool>, String) {
        let (fake, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
        for name in ["pages_shared", "pages_sharing", "pages_unshared", "full_scans"] {
            fake.put(name, "0");
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
            Some(value.map_or(Fault::Absent(Absent::Denied), |value| Fault::Replaced(value.to_string().into_bytes())))
        };
        let host = Faulty::new(&fake, fault);
        let (mut session, ..) = Session::begin(&host, directory.path()).unwrap();
        let whole = sweep(&mut session, &AtomicBool::new(false)).ok();
        (whole, fake.value("run"))
    }

    #[test]
    fn it_has_passed_by_when_counters_fall_and_stay_or_it_has_gone_around() {
        let rests = |whole| (whole, "0".to_owned());
        assert_eq!(swept(&[900, 900, 500, 300], &[7]), rests(Some(true)), "they have fallen, and stay");
        assert_eq!(swept(&[900], &[7, 7, 7, 8]), rests(Some(true)), "there was nobody");
        assert_eq!(swept(&[900], &[7]), rests(Some(false)), "it did not get there in time");
    }

    #[test]
    fn its_way_is_over_once_it_stands_still_and_nothing_of_the_targets_is_enrolled() {
        let fake = Fake::booted();
        let looks = |number: &str| fake.put("pages_scanned", number);
        looks("5");
        fake.map(7, (0, 8192), "its own", true);
        let targets = Gauge { handles: vec![fake.open(Pid(7)).unwrap()], before: Pages::ZERO };
        let still = || Walk { patience: Duration::ZERO, ..Walk::new(&fake) };
        assert!(!Walk::new(&fake).is_over(&fake, &targets), "it may come on yet");
        assert!(!still().is_over(&fake, &targets), "it has whom to look at");
        fake.map(7, (0, 8192), "another program's", false);
        assert!(still().is_over(&fake, &targets));
        let mut walk = Walk { patience: Duration::from_secs(3600), ..still() };
        looks("6");
        assert!(!walk.is_over(&fake, &targets), "it comes on");
        assert_eq!(walk.looks, Ok(Pages(6)));
        fake.unmap(7, (0, 8192));
        assert!(still().is_over(&fake, &targets), "it has left its memory");
    }

    #[test]
    fn it_rests_whatever_cannot_be_read() {
        let rests = (None, "0".to_owned());
        assert_eq!(swept(&[], &[7]), rests);
        assert_eq!(swept(&[900], &[]), rests);
    }
}
