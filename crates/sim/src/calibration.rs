//! Measures the CPU time of the real ksmd on stand-in processes, beside the model, and fits the costs of its operations.
//!
//! Each scenario starts processes with known memory, and lets ksmd scan it a few times, one scan at a time. The model
//! scans the same memory and counts the operations. The costs are fitted to all scans but those of the last scenario, which
//! shows how well they predict.
//!
//! Nothing else may be enrolled meanwhile: ksmd would scan it too. Settings are changed through a session, which restores
//! them.

use crate::decide::cost::{CostModel, MeasuredScan, OperationCounts};
use crate::decide::ksmd::{Advice, KsmModel, KsmSettings, RunState};
use crate::decide::memory::{Content, PAGES_IN_HUGE_PAGE};
use crate::decide::rules::{KernelVersion, KsmRules};
use pagefold_base::Absent;
use pagefold_base::ksm::Setting;
use pagefold_host::ksmd_thread::KsmdThread;
use pagefold_host::transaction::session::{Error as SessionError, Session};
use pagefold_host::{Host, observe};
use pagefold_merge::ksmd::read_full_scans;
use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use thiserror::Error;

/// What the pages of a stand-in hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StandInContents {
    /// Contents that no other page has.
    Unique,
    /// The same contents in the same order as each other such stand-in; no two of its pages are equal.
    Common,
    /// Zeros.
    Zeros,
}

/// A process with known memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StandIn {
    /// What its pages hold.
    pub contents: StandInContents,
    /// Its pages.
    pub pages: u64,
    /// Whether they are in huge pages. Then `pages` is a multiple of 512.
    pub is_huge: bool,
}

/// A running stand-in. It ends when this is dropped.
pub trait RunningStandIn {
    /// The address of its first page, in bytes.
    fn address(&self) -> u64;
}

/// Starts stand-ins.
pub trait StandInLauncher {
    /// Starts a process whose pages hold `first`, `first + 1` and so on as a big-endian number in their first bytes, or
    /// zeros, and enrolls all of it.
    ///
    /// # Errors
    /// If it cannot be started.
    fn launch(&mut self, stand_in: &StandIn, first: Content) -> io::Result<Box<dyn RunningStandIn>>;
}

/// Processes that are scanned together, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CalibrationScenario {
    /// Its name in reports.
    pub name: &'static str,
    /// The processes.
    pub stand_ins: Vec<StandIn>,
    /// `smart_scan`.
    pub smart_scan: bool,
    /// `use_zero_pages`.
    pub use_zero_pages: bool,
    /// Pages of a batch. If a scan has more, a pause of [`PAUSE_MS`] follows each batch.
    pub batch_pages: u64,
    /// Scans to measure.
    pub scans: u32,
}

/// The scenarios, with `pages` pages in most processes: each separates one cost from the others. A scan is one batch,
/// but for two scenarios. The last one mixes all kinds of pages, and is left out of the fit. Zero pages are scanned
/// twice only: once they are mapped to the zero page, ksmd passes their page table entries without a visit, which no
/// operation counts.
pub fn scenarios(pages: u64) -> Vec<CalibrationScenario> {
    let process = |contents, pages| StandIn { contents, pages, is_huge: false };
    let (unique, common) = (process(StandInContents::Unique, pages), process(StandInContents::Common, pages));
    let huge = StandIn { is_huge: true, pages: pages.next_multiple_of(PAGES_IN_HUGE_PAGE), ..common };
    let scenario = |name, stand_ins: &[StandIn], scans| CalibrationScenario {
        name,
        stand_ins: stand_ins.to_vec(),
        smart_scan: false,
        use_zero_pages: false,
        batch_pages: WHOLE_SCAN_PAGES,
        scans,
    };
    let [half_unique, half_common] =
        [unique, common].map(|stand_in| StandIn { pages: (pages / 2).min(MAX_PAGES_IN_SMALL_BATCHES), ..stand_in });
    vec![
        scenario("unique", &[unique], 4),
        scenario("unique, small", &[process(StandInContents::Unique, pages / 16)], 4),
        scenario("pairs", &[common, common], 5),
        scenario("unique beside merged", &[common, common, unique], 5),
        CalibrationScenario { smart_scan: true, ..scenario("skipped", &[unique], 10) },
        CalibrationScenario { use_zero_pages: true, ..scenario("zeros", &[process(StandInContents::Zeros, pages)], 2) },
        scenario("huge pages", &[huge, huge], 4),
        CalibrationScenario {
            batch_pages: SMALL_BATCH_PAGES,
            ..scenario("small batches", &[half_common, half_common, half_unique], 2)
        },
        CalibrationScenario {
            batch_pages: LARGE_BATCH_PAGES,
            ..scenario("large batches", &[common, common, unique], 2)
        },
        CalibrationScenario {
            smart_scan: true,
            use_zero_pages: true,
            ..scenario("mixed", &[common, unique, process(StandInContents::Zeros, pages / 4), common], 8)
        },
    ]
}

/// The memory that all processes of the largest scenario use, in pages.
pub fn needed_pages(scenarios: &[CalibrationScenario]) -> u64 {
    let needed = |scenario: &CalibrationScenario| scenario.stand_ins.iter().map(|stand_in| stand_in.pages).sum();
    scenarios.iter().map(needed).max().unwrap_or(0)
}

/// A scan of a scenario.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CalibrationScan {
    /// The scenario.
    pub scenario: &'static str,
    /// The repetition, from 1.
    pub round: u32,
    /// The scan, from 1.
    pub scan: u32,
    /// Operations and CPU time.
    pub measured: MeasuredScan,
    /// Pages that the kernel and the model had merged after it, also with the zero page.
    pub merged_pages: (u64, u64),
}

/// The result of a calibration.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    /// The costs.
    pub costs: CostModel,
    /// All scans in the order of their measurement.
    pub scans: Vec<CalibrationScan>,
    /// The scenario that is not part of the fit.
    pub held_out: &'static str,
}

/// Why a calibration ended.
#[derive(Debug, Error)]
pub enum CalibrationError {
    /// A stop was requested.
    #[error("interrupted")]
    Stopped,
    /// Something cannot be read.
    #[error("cannot read {what}: {why}")]
    Unreadable {
        /// What.
        what: &'static str,
        /// Why not.
        why: Absent,
    },
    /// The kernel's release has no version.
    #[error("the kernel's release {0:?} has no version")]
    UnknownVersion(String),
    /// ksmd did not go to sleep.
    #[error("ksmd has run one scan for more than {} s: nothing was measured; use fewer --pages", SCAN_TIMEOUT.as_secs())]
    ScanTooLong,
    /// A stand-in cannot run.
    #[error("cannot start a process with known memory: {0}")]
    StandIn(io::Error),
    /// A setting cannot be changed.
    #[error(transparent)]
    Session(#[from] SessionError),
}

/// The longest scan.
const SCAN_TIMEOUT: Duration = Duration::from_secs(120);
/// Pause between two looks at ksmd.
const POLL_INTERVAL: Duration = Duration::from_micros(200);
/// `sleep_millisecs` for a pause that no scan outlasts. It has two values, because a change of it wakes ksmd
/// (`sleep_millisecs_store`, mm/ksm.c).
const LONG_PAUSES_MS: [u64; 2] = [3_600_000, 3_600_001];
/// `pages_to_scan` for a whole scan in one batch: a batch ends with its scan (`ksm_do_scan`, mm/ksm.c).
const WHOLE_SCAN_PAGES: u64 = 4_000_000_000;
/// `pages_to_scan` for a scan in small batches, between which ksmd's data leave the CPU's caches: the kernel's default.
const SMALL_BATCH_PAGES: u64 = 100;
/// `pages_to_scan` for a scan in batches that reach much of each tree.
const LARGE_BATCH_PAGES: u64 = 2000;
/// Pages of a process that is scanned in small batches: at 250 ticks a second, three of them take 24 s.
const MAX_PAGES_IN_SMALL_BATCHES: u64 = 32_768;
/// `sleep_millisecs` between small batches: the kernel's default, too.
const PAUSE_MS: u64 = 20;
/// `advisor_mode` without an advisor.
const NO_ADVISOR: &str = "none";
/// The time in which ksmd wakes if it pauses between batches.
const WAKE_TIME: Duration = Duration::from_millis(3);

/// The first content of unique pages, above all that common pages hold.
const FIRST_UNIQUE_CONTENT: Content = 1 << 28;

/// ksmd, one scan at a time.
struct SteppedKsmd<'s, 'h> {
    session: &'s mut Session<'h>,
    thread: KsmdThread<'h>,
    pause: usize,
}

impl<'s, 'h> SteppedKsmd<'s, 'h> {
    /// Stops ksmd, and takes it to where `run` 1 starts a batch.
    fn new(session: &'s mut Session<'h>) -> Result<Self, CalibrationError> {
        let thread = KsmdThread::find(session.host()).map_err(unreadable("ksmd"))?;
        let mut ksmd = Self { session, thread, pause: 0 };
        ksmd.write(Setting::Run, 0)?;
        // The advisor chooses `pages_to_scan` itself, and the kernel takes no other value.
        let mode = observe::ksm(ksmd.session.host()).and_then(|ksm| ksm.advisor_mode);
        if mode.is_ok_and(|mode| mode != NO_ADVISOR) {
            ksmd.session.write_settings(&BTreeMap::from([(Setting::AdvisorMode, NO_ADVISOR.to_owned())]))?;
        }
        ksmd.park()?;
        Ok(ksmd)
    }

    fn write(&mut self, setting: Setting, value: u64) -> Result<(), CalibrationError> {
        Ok(self.session.write_settings(&BTreeMap::from([(setting, value.to_string())]))?)
    }

    /// How often it has slept, once it sleeps, has slept more than `after` times, and has completed `full_scans` scans.
    fn wait_until_asleep(&self, after: u64, full_scans: u64) -> Result<u64, CalibrationError> {
        let host = self.session.host();
        let end = host.now() + SCAN_TIMEOUT;
        loop {
            let slept = self.thread.sleep_count().map_err(unreadable("the state of ksmd"))?;
            if let Some(count) = slept.filter(|count| *count > after)
                && self.full_scans()? >= full_scans
            {
                return Ok(count);
            }
            if host.now() > end {
                return Err(CalibrationError::ScanTooLong);
            }
            host.sleep(POLL_INTERVAL);
        }
    }

    fn full_scans(&self) -> Result<u64, CalibrationError> {
        read_full_scans(self.session.host()).map_err(unreadable("full_scans"))
    }

    /// With `run` 0, takes ksmd from the pause between batches to where `run` 1 wakes it.
    fn park(&mut self) -> Result<(), CalibrationError> {
        let slept = self.wait_until_asleep(0, 0)?;
        self.pause = 1 - self.pause;
        self.write(Setting::SleepMillisecs, LONG_PAUSES_MS[self.pause])?;
        // It wakes only if it paused between batches.
        let host = self.session.host();
        let end = host.now() + WAKE_TIME;
        while host.now() < end && self.wait_until_asleep(0, 0)? == slept {
            host.sleep(POLL_INTERVAL);
        }
        self.wait_until_asleep(0, 0).map(|_| ())
    }

    /// Ends a scan in progress: a process that comes meanwhile would not be part of it, and each measured scan would be the
    /// one before. A small process makes ksmd scan at all, and ends afterwards.
    fn finish_scan(&mut self, launcher: &mut dyn StandInLauncher) -> Result<(), CalibrationError> {
        let small = StandIn { contents: StandInContents::Unique, pages: 1, is_huge: false };
        let _running = launcher.launch(&small, FIRST_UNIQUE_CONTENT).map_err(CalibrationError::StandIn)?;
        // The first scan may be the one in progress, before the process.
        for _ in 0..2 {
            self.scan(WHOLE_SCAN_PAGES)?;
        }
        Ok(())
    }

    /// Runs a scan in batches of so many pages, and returns its CPU time.
    fn scan(&mut self, batch_pages: u64) -> Result<Duration, CalibrationError> {
        self.write(Setting::PagesToScan, batch_pages)?;
        if batch_pages < WHOLE_SCAN_PAGES {
            self.write(Setting::SleepMillisecs, PAUSE_MS)?;
        }
        let cpu_time = |ksmd: &Self| ksmd.thread.cpu_time().map_err(unreadable("the CPU time of ksmd"));
        let (slept, scans) = (self.wait_until_asleep(0, 0)?, self.full_scans()?);
        let before = cpu_time(self)?;
        self.write(Setting::Run, 1)?;
        // It may also sleep within a scan, for example for memory.
        self.wait_until_asleep(slept, scans + 1)?;
        let after = cpu_time(self)?;
        self.write(Setting::Run, 0)?;
        self.park()?;
        Ok(after.saturating_sub(before))
    }
}

fn unreadable(what: &'static str) -> impl Fn(Absent) -> CalibrationError {
    move |why| CalibrationError::Unreadable { what, why }
}

/// Measures the scenarios `rounds` times, in turn, and fits the costs. `note_progress` gets the finished and all runs of a
/// scenario. On an error, the caller undoes the session.
///
/// # Errors
/// A stop request, a stand-in that cannot start, a setting that cannot be changed, ksmd without a measurable CPU time.
pub fn calibrate(
    session: &mut Session<'_>,
    scenarios: &[CalibrationScenario],
    rounds: u32,
    launcher: &mut dyn StandInLauncher,
    stop: &AtomicBool,
    note_progress: &mut dyn FnMut(u64, u64),
) -> Result<Calibration, CalibrationError> {
    let host = session.host();
    let release = host.read("proc/sys/kernel/osrelease").map_err(unreadable("the kernel's release"))?;
    let release = String::from_utf8_lossy(&release).trim().to_owned();
    let version = KernelVersion::parse(&release).ok_or(CalibrationError::UnknownVersion(release))?;
    let rules = KsmRules::for_version(version);
    let mut ksmd = SteppedKsmd::new(session)?;
    ksmd.finish_scan(launcher)?;
    let runs = u64::from(rounds) * scenarios.len() as u64;
    let mut scans = Vec::new();
    let in_turn = (1..=rounds).flat_map(|round| scenarios.iter().map(move |scenario| (round, scenario)));
    for (finished, (round, scenario)) in (0..).zip(in_turn) {
        note_progress(finished, runs);
        scans.extend(measure(&mut ksmd, rules, scenario, round, launcher, stop)?);
    }
    let held_out = scenarios.last().map_or("", |scenario| scenario.name);
    let fitted: Vec<MeasuredScan> =
        scans.iter().filter(|scan| scan.scenario != held_out).map(|scan| scan.measured).collect();
    Ok(Calibration { costs: CostModel::fit(&fitted), scans, held_out })
}

fn measure(
    ksmd: &mut SteppedKsmd<'_, '_>,
    rules: KsmRules,
    scenario: &CalibrationScenario,
    round: u32,
    launcher: &mut dyn StandInLauncher,
    stop: &AtomicBool,
) -> Result<Vec<CalibrationScan>, CalibrationError> {
    let settings = KsmSettings {
        pages_to_scan: scenario.batch_pages,
        smart_scan: scenario.smart_scan && rules.has_smart_scan,
        use_zero_pages: scenario.use_zero_pages,
        ..KsmSettings::default()
    };
    ksmd.write(Setting::UseZeroPages, u64::from(settings.use_zero_pages))?;
    if rules.has_smart_scan {
        ksmd.write(Setting::SmartScan, u64::from(settings.smart_scan))?;
    }
    let page_bytes = ksmd.session.host().page_size().bytes();
    let mut model = KsmModel::new(rules, settings);
    let mut running = Vec::new();
    let mut next_unique = FIRST_UNIQUE_CONTENT;
    for stand_in in &scenario.stand_ins {
        let first = match stand_in.contents {
            StandInContents::Unique => next_unique,
            StandInContents::Common | StandInContents::Zeros => 1,
        };
        let process = launcher.launch(stand_in, first).map_err(CalibrationError::StandIn)?;
        add_to_model(&mut model, stand_in, first, process.address() / page_bytes);
        running.push(process);
        next_unique += stand_in.pages as Content;
    }
    let mut scans = Vec::new();
    for scan in 1..=scenario.scans {
        if stop.load(Ordering::Relaxed) {
            return Err(CalibrationError::Stopped);
        }
        let before = OperationCounts::new(&model.counters(), model.work());
        let full_scans = model.counters().full_scans;
        model.write_run(RunState::Merging);
        while model.ksmd_should_run() && model.counters().full_scans == full_scans {
            model.run_batch();
        }
        model.write_run(RunState::Stopped);
        let operations = OperationCounts::new(&model.counters(), model.work()).since(&before);
        let cpu_ns = ksmd.scan(scenario.batch_pages)?.as_nanos() as f64;
        let counters = model.counters();
        scans.push(CalibrationScan {
            scenario: scenario.name,
            round,
            scan,
            measured: MeasuredScan { operations, cpu_ns },
            merged_pages: (
                count_merged(ksmd.session.host()).map_err(unreadable("the counters of ksmd"))?,
                counters.pages_shared + counters.pages_sharing + counters.ksm_zero_pages.max(0).cast_unsigned(),
            ),
        });
    }
    Ok(scans)
}

fn add_to_model(model: &mut KsmModel, stand_in: &StandIn, first: Content, start: u64) {
    let process = model.spawn();
    model.map(process, start, stand_in.pages, 0);
    if stand_in.is_huge {
        for page in (start..start + stand_in.pages).step_by(PAGES_IN_HUGE_PAGE as usize) {
            model.fault_huge_page(process, page);
        }
    }
    for page in 0..stand_in.pages {
        let content = if stand_in.contents == StandInContents::Zeros { 0 } else { first + page as Content };
        model.write(process, start + page, content);
    }
    model.advise(process, start, stand_in.pages, Advice::Mergeable);
}

/// Page table entries that ksmd has merged, also with the zero page.
fn count_merged(host: &dyn Host) -> pagefold_base::Reading<u64> {
    let ksm = observe::ksm(host)?;
    let zeros = ksm.ksm_zero_pages.unwrap_or(0).max(0).cast_unsigned();
    Ok(ksm.pages_shared? + ksm.pages_sharing? + zeros)
}
