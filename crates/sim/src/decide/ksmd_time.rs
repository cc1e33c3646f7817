//! ksmd in time: when it works, for how long, and when it sleeps.
//!
//! Mirrors `ksm_scan_thread` (mm/ksm.c, 6.18): a batch, then a pause of `sleep_millisecs`, which a change of that
//! setting ends; without work ksmd sleeps until `run` is 1 and a process is on its list.
//!
//! A batch is carried out in parts. Each part changes memory when it begins, and takes the CPU time that the
//! [`CostModel`] says; so other programs see the work of a long batch as it progresses.
//!
//! Pauses end with a tick of the kernel's timer wheel, as `schedule_timeout` does ([`timer_expiry`]): 20 ms last 24 ms at
//! 250 ticks a second, less the time of the batch in its last tick.
//!
//! Limit: ksmd gets a CPU whenever it wants one.

use super::cost::{CostModel, OperationCounts};
use super::ksmd::KsmModel;
use super::scenario::HostSpec;

/// A part of a batch has at least so many visits, unless fewer are left.
const MIN_PART_VISITS: u64 = 512;

/// A part has at most so many visits. At a few microseconds each it takes less than a second, however wrong the
/// estimate of its time is.
const MAX_PART_VISITS: u64 = 50_000;

/// The time of the first part is estimated with this cost of a visit, in nanoseconds; later ones by the last part.
const ASSUMED_VISIT_NS: f64 = 1000.0;

/// A batch takes at least so long, so that time passes when it has nothing to visit.
const MIN_BATCH_NS: u64 = 1000;

const NS_PER_MS: u64 = 1_000_000;
const NS_PER_SECOND: u64 = 1_000_000_000;

/// Ticks of the first level of the timer wheel, and bits by which each further level is coarser (`LVL_SIZE` and
/// `LVL_CLK_SHIFT`, kernel/time/timer.c, 6.18). There are nine levels above 100 ticks a second. Else the ninth is missing, which
/// is for timeouts of two weeks and more.
const WHEEL_LEVEL_TICKS: u64 = 64;
const WHEEL_LEVEL_SHIFT: u32 = 3;
const WHEEL_LEVELS: u32 = 9;

/// The tick at which a timer ends that is started in tick `now`, after a timeout in ticks (`calc_index`). The wheel rounds
/// up to its next slot, so that no timer ends early.
fn timer_expiry(now: u64, timeout: u64) -> u64 {
    // A level takes timeouts up to 63 of its slots (`LVL_START`).
    let is_within = |level: &u32| timeout < (WHEEL_LEVEL_TICKS - 1) << (WHEEL_LEVEL_SHIFT * level);
    let level = (0..WHEEL_LEVELS).find(is_within).unwrap_or(WHEEL_LEVELS - 1);
    let shift = WHEEL_LEVEL_SHIFT * level;
    (((now + timeout) >> shift) + 1) << shift
}

/// What ksmd does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It waits for work.
    Idle,
    /// It works until this time on what it has visited, and then visits so many pages.
    Working { until_ns: u64, remaining: u64 },
    /// It sleeps until this time, with this `sleep_millisecs`.
    Paused { until_ns: u64, sleep_millisecs: u64 },
}

/// ksmd in time. All times are since the start of the host.
#[derive(Clone, Debug)]
pub struct KsmdTime {
    costs: CostModel,
    /// Ticks of the kernel a second.
    hz: u64,
    /// CPU time before the host's start, which the advisor counts.
    earlier_cpu_ns: u64,
    state: State,
    now_ns: u64,
    /// When the batch began.
    batch_began_ns: u64,
    /// CPU time so far.
    cpu_ns: u64,
    /// Operations whose CPU time is counted.
    counted: OperationCounts,
    /// The mean cost of the last visits.
    visit_ns: f64,
    sleeps: u64,
}

impl KsmdTime {
    /// The ksmd of a host, which waits for work.
    #[must_use]
    pub fn new(costs: CostModel, host: &HostSpec) -> Self {
        Self {
            costs,
            hz: u64::from(host.hz),
            earlier_cpu_ns: host.ksmd_cpu_ms * NS_PER_MS,
            state: State::Idle,
            now_ns: 0,
            batch_began_ns: 0,
            cpu_ns: 0,
            counted: OperationCounts::default(),
            visit_ns: ASSUMED_VISIT_NS,
            sleeps: 0,
        }
    }

    /// Its CPU time so far, in nanoseconds.
    #[must_use]
    pub fn cpu_ns(&self) -> u64 {
        match self.state {
            // The part in progress counts as far as it is done.
            State::Working { until_ns, .. } => self.cpu_ns - until_ns.saturating_sub(self.now_ns),
            State::Idle | State::Paused { .. } => self.cpu_ns,
        }
    }

    /// How often it went to sleep.
    #[must_use]
    pub fn sleeps(&self) -> u64 {
        self.sleeps
    }

    /// Whether it sleeps.
    #[must_use]
    pub fn is_asleep(&self) -> bool {
        !matches!(self.state, State::Working { .. })
    }

    /// Let ksmd work until a time. Call this before each change of memory or of a setting, and after it.
    pub fn advance(&mut self, model: &mut KsmModel, now_ns: u64) {
        loop {
            match self.state {
                State::Idle if model.ksmd_should_run() => self.begin_batch(model, self.now_ns, true),
                State::Idle => break,
                State::Working { until_ns, .. } if until_ns > now_ns => break,
                State::Working { until_ns, remaining } => self.continue_batch(model, until_ns, remaining, now_ns),
                State::Paused { sleep_millisecs, .. } if sleep_millisecs != model.settings().sleep_millisecs => {
                    self.begin_batch(model, self.now_ns, true);
                }
                State::Paused { until_ns, .. } if until_ns > now_ns => break,
                State::Paused { until_ns, sleep_millisecs } => self.begin_batch(model, until_ns, sleep_millisecs > 0),
            }
        }
        self.now_ns = self.now_ns.max(now_ns);
    }

    /// Carry out the rest of a batch in progress at once. Returns when it will be done. The kernel lets a program that
    /// writes `run`, `max_page_sharing` or `merge_across_nodes` wait until then (`ksm_thread_mutex`).
    pub fn finish_batch(&mut self, model: &mut KsmModel) -> u64 {
        while let State::Working { until_ns, remaining } = self.state {
            if remaining == 0 || !model.ksmd_should_run() {
                return until_ns;
            }
            self.continue_batch(model, until_ns, remaining, u64::MAX);
        }
        self.now_ns
    }

    fn begin_batch(&mut self, model: &mut KsmModel, at_ns: u64, has_slept: bool) {
        if has_slept {
            model.begin_batch();
        }
        self.batch_began_ns = at_ns;
        let remaining = if model.ksmd_should_run() { model.settings().pages_to_scan } else { 0 };
        self.state = State::Working { until_ns: at_ns, remaining };
    }

    /// Visit pages at a time, so many that it takes until `target_ns` as far as that is known; or end the batch.
    fn continue_batch(&mut self, model: &mut KsmModel, at_ns: u64, remaining: u64, target_ns: u64) {
        if remaining == 0 || !model.ksmd_should_run() {
            return self.end_batch(model, at_ns);
        }
        let visits_in_time = ((target_ns - at_ns) as f64 / self.visit_ns.max(1.0)) as u64;
        let limit = visits_in_time.clamp(MIN_PART_VISITS, MAX_PART_VISITS).min(remaining);
        model.set_time(at_ns / NS_PER_MS, self.earlier_cpu_ns + self.cpu_ns);
        let visits = model.run_visits(limit);
        let operations = OperationCounts::new(&model.counters(), model.work());
        let cpu_ns = self.costs.cpu_ns(&operations.since(&self.counted)).round() as u64;
        self.counted = operations;
        self.cpu_ns += cpu_ns;
        if visits > 0 {
            self.visit_ns = cpu_ns as f64 / visits as f64;
        }
        let remaining = if visits < limit { 0 } else { remaining - visits };
        self.state = State::Working { until_ns: at_ns + cpu_ns, remaining };
    }

    fn end_batch(&mut self, model: &KsmModel, at_ns: u64) {
        let earliest_ns = self.batch_began_ns + MIN_BATCH_NS;
        if at_ns < earliest_ns {
            self.cpu_ns += earliest_ns - at_ns;
            self.state = State::Working { until_ns: earliest_ns, remaining: 0 };
            return;
        }
        self.sleeps += 1;
        let sleep_millisecs = model.settings().sleep_millisecs;
        self.state = if model.ksmd_should_run() {
            State::Paused { until_ns: self.end_of_pause(at_ns, sleep_millisecs), sleep_millisecs }
        } else {
            State::Idle
        };
    }

    /// When a pause ends that begins now. Without a pause, ksmd does not sleep at all.
    fn end_of_pause(&self, now_ns: u64, sleep_millisecs: u64) -> u64 {
        if sleep_millisecs == 0 {
            return now_ns;
        }
        let tick_ns = NS_PER_SECOND / self.hz;
        let timeout = (sleep_millisecs * self.hz).div_ceil(1000);
        timer_expiry(now_ns / tick_ns, timeout) * tick_ns
    }
}

#[cfg(test)]
mod tests {
    use super::super::cost::Operation;
    use super::super::ksmd::{Advice, KsmSettings, RunState};
    use super::super::rules::{KernelVersion, KsmRules};
    use super::*;

    const MS: u64 = NS_PER_MS;

    /// Two processes with the same 1,000 contents; a visit takes 1 us.
    fn host(pages_to_scan: u64) -> (KsmModel, KsmdTime) {
        let rules = KsmRules::for_version(KernelVersion { major: 6, minor: 18, stable: 0 });
        let settings = KsmSettings { pages_to_scan, smart_scan: false, ..KsmSettings::default() };
        let mut model = KsmModel::new(rules, settings);
        for _ in 0..2 {
            let process = model.spawn();
            model.map(process, 0, 1000, 0);
            model.write_pages(process, 0..1000, 7, true);
            model.advise(process, 0, 1000, Advice::Mergeable);
        }
        let host = HostSpec {
            memory_pages: 1 << 18,
            used_pages: 0,
            cpus: 1,
            nodes: 1,
            distances: Vec::new(),
            kernel: KernelVersion { major: 6, minor: 18, stable: 0 },
            hz: 1000,
            ksmd_cpu_ms: 0,
            ksm: settings,
        };
        (model, KsmdTime::new(CostModel::new([(Operation::Visit, 1000.0)]), &host))
    }

    #[test]
    fn timers_end_with_the_next_slot_of_the_wheel() {
        let timeouts = [(0, 1), (10, 5), (10, 62), (10, 63), (16, 120), (0, 504), (7, 1 << 30)];
        let ends = timeouts.map(|(now, timeout)| timer_expiry(now, timeout));
        // From 63 ticks on, slots have 8 ticks, and from 504 on 64.
        assert_eq!(ends[..6], [2, 16, 73, 80, 144, 512]);
        assert!(ends[6] > 7 + (1 << 30));
    }

    #[test]
    fn batches_and_pauses_take_turns() {
        let (mut model, mut ksmd) = host(100);
        ksmd.advance(&mut model, 50 * MS);
        assert_eq!((model.counters().pages_scanned, ksmd.cpu_ns()), (0, 0), "run is 0");
        model.write_run(RunState::Merging);
        // Batches of 0.1 ms begin 0, 21, 42 and 63 ms after the write.
        ksmd.advance(&mut model, 112 * MS);
        assert_eq!((model.counters().pages_scanned, ksmd.sleeps()), (300, 3));
        assert!(ksmd.is_asleep());
        assert_eq!(model.work().batches, 3);
        ksmd.advance(&mut model, 113 * MS + 50_000);
        assert!(!ksmd.is_asleep(), "the fourth batch began 0.05 ms ago");
        assert_eq!((model.counters().pages_scanned, ksmd.cpu_ns()), (400, 350_000));
        // The 21st batch finds the end of the scan of 2,000 pages, and nothing else.
        ksmd.advance(&mut model, 50 * MS + 25 * 21 * MS + MS);
        assert_eq!((model.counters().full_scans, model.counters().pages_scanned), (1, 2500));
    }

    #[test]
    fn change_of_the_pause_ends_it() {
        let (mut model, mut ksmd) = host(100);
        model.write_settings(KsmSettings { sleep_millisecs: 3_600_000, ..*model.settings() });
        model.write_run(RunState::Merging);
        ksmd.advance(&mut model, 1000 * MS);
        assert_eq!(model.counters().pages_scanned, 100);
        model.write_run(RunState::Stopped);
        model.write_run(RunState::Merging);
        ksmd.advance(&mut model, 2000 * MS);
        assert_eq!(model.counters().pages_scanned, 100, "run alone does not wake it");
        model.write_settings(KsmSettings { sleep_millisecs: 1000, ..*model.settings() });
        ksmd.advance(&mut model, 2001 * MS);
        assert_eq!(model.counters().pages_scanned, 200);
    }

    #[test]
    fn long_batch_is_seen_as_it_progresses() {
        let (mut model, mut ksmd) = host(1_000_000);
        model.write_run(RunState::Merging);
        ksmd.advance(&mut model, MS);
        let scanned = model.counters().pages_scanned;
        assert!((1000..=1600).contains(&scanned), "{scanned}");
        assert_eq!(ksmd.cpu_ns(), MS);
        assert_eq!(ksmd.finish_batch(&mut model), 2 * MS, "a scan ends the batch");
        assert_eq!((model.counters().pages_scanned, model.counters().full_scans), (2000, 1));
    }

    #[test]
    fn time_passes_without_pages_to_visit() {
        let (mut model, mut ksmd) = host(100);
        model.write_settings(KsmSettings { sleep_millisecs: 0, ..*model.settings() });
        for process in model.memory().process_ids().collect::<Vec<_>>() {
            model.advise(process, 0, 1000, Advice::DontNeed);
        }
        model.write_run(RunState::Merging);
        ksmd.advance(&mut model, MS);
        assert_eq!(model.counters().pages_scanned, 0);
        assert_eq!(ksmd.sleeps(), 1000, "scans without visits");
    }
}
