//! The daemon over a recording of a host over time: the same process table and decisions, driven by the recorded clock.
//!
//! Each recorded state is one tick. A census is answered within the same tick. Its CPU time is the predicted one,
//! because the measured one depends on the machine that replays. Nothing can be changed, so the daemon only advises,
//! and the host goes on as recorded. The same recording, settings and seed give the same decisions.

use super::cgroup_shortages::CgroupShortageReader;
use super::process_table::ProcessTable;
use super::worker::{
    census_plan_request, exclusion_reason, left_out, merge_candidates, pages_read, scan_costs_in_pages, scanned_ranges,
    unstable_processes,
};
use super::{DaemonSettings, Error, process_label};
use crate::decide::{
    CensusSummary, DaemonState, Decision, Effect, Event, INITIAL_CENSUS_SECONDS_PER_MIB, TickReadings, TimeOfDay, step,
};
use pagefold_base::ProcessId;
use pagefold_base::process::Process;
use pagefold_census::ScanPart;
use pagefold_host::ksmd_thread::KsmdThread;
use pagefold_host::{Host, observe};
use pagefold_merge::StableAges;
use pagefold_merge::prepare::{PlanRequest, prepare_plan};
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// A recorded host state.
pub struct ReplayStep<'h> {
    /// The host.
    pub host: &'h dyn Host,
    /// Time since the first state.
    pub elapsed: Duration,
    /// Time of day at that state.
    pub time_of_day: TimeOfDay,
}

/// A daemon that replays a recording.
pub struct DaemonReplay {
    settings: DaemonSettings,
    seed: u64,
    process_table: Option<ProcessTable>,
    cgroup_shortages: CgroupShortageReader,
    other_tuner: Option<String>,
    state: Option<DaemonState>,
    stable_ages: StableAges,
    started_at: Instant,
    /// Predicted CPU time of the censuses so far.
    census_cpu_time: Duration,
    labels: BTreeMap<ProcessId, String>,
}

impl DaemonReplay {
    /// A daemon before the first state, which is on `host`.
    pub fn new(settings: DaemonSettings, seed: u64, host: &dyn Host) -> Result<Self, Error> {
        let started_at = host.now();
        Ok(Self {
            settings,
            seed,
            process_table: None,
            cgroup_shortages: CgroupShortageReader::default(),
            other_tuner: None,
            state: None,
            stable_ages: StableAges::new(pagefold_census::page_hasher(host)?, started_at),
            started_at,
            census_cpu_time: Duration::ZERO,
            labels: BTreeMap::new(),
        })
    }

    /// Replay the next state. `on_decision` receives each decision with the names of the processes it is about.
    pub fn run_step(
        &mut self,
        recorded: &ReplayStep<'_>,
        on_decision: &mut dyn FnMut(&[String], &Decision),
    ) -> Result<(), Error> {
        let ReplayStep { host, elapsed, time_of_day } = *recorded;
        let process_table = self.process_table.get_or_insert_with(|| ProcessTable::new(host));
        let polled = process_table.poll(host, elapsed, &self.settings).map_err(Error::Processes)?;
        self.labels =
            process_table.tracked_processes().map(|process: &Process| (process.id, process_label(process))).collect();
        let mut events = VecDeque::from(polled.events);
        let tuner = process_table.tuner().map(|tuner| tuner.name().to_owned());
        if tuner != self.other_tuner {
            self.other_tuner.clone_from(&tuner);
            events.push_front(Event::TunerChanged(tuner));
        }
        let ksmd = KsmdThread::find(host).and_then(|ksmd| ksmd.cpu_time()).unwrap_or_default();
        let memory = observe::memory(host).ok();
        events.push_back(Event::Tick(TickReadings {
            cpu_spent: self.census_cpu_time + ksmd,
            available: memory.as_ref().and_then(|memory| memory.available.clone().ok()),
            total: memory.and_then(|memory| memory.total.ok()),
            cgroup_shortages: self.cgroup_shortages.read_shortages(host, elapsed, process_table.tracked_processes()),
            pressure_percent: observe::pressure(host).ok().map(|pressure| pressure.some.avg10),
            // Waiting of programs is not recorded.
            wait_times: None,
            time_of_day,
            resident: polled.resident,
            cpu_times: polled.cpu_times,
        }));
        let mut state = self
            .state
            .take()
            .unwrap_or_else(|| DaemonState::new(self.settings.rules.clone(), self.seed, elapsed, ksmd));
        while let Some(event) = events.pop_front() {
            let effects;
            (state, effects) = step(state, elapsed, event);
            for effect in effects {
                match effect {
                    Effect::Report(decision) => on_decision(&self.process_names(&decision), &decision),
                    Effect::Census(parts) => events.push_back(self.take_census(host, elapsed, &parts)),
                    Effect::Halt | Effect::End { .. } => {}
                    _ => events.push_back(Event::TaskFailed("a recording cannot be changed".to_owned())),
                }
            }
        }
        self.state = Some(state);
        Ok(())
    }

    fn process_names(&self, decision: &Decision) -> Vec<String> {
        let name = |process: &ProcessId| {
            self.labels.get(process).cloned().unwrap_or_else(|| format!("process {}", process.pid))
        };
        decision.processes.iter().map(name).collect()
    }

    fn take_census(&mut self, host: &dyn Host, elapsed: Duration, parts: &BTreeMap<ProcessId, Vec<ScanPart>>) -> Event {
        self.stable_ages.retain_processes(|process| self.labels.contains_key(&process));
        let settings = DaemonSettings { pass_interval: Duration::ZERO, ..self.settings.clone() };
        let excluded = exclusion_reason(parts, &settings);
        let progress = pagefold_census::ScanProgress::default();
        let ages = Some((&mut self.stable_ages, self.started_at + elapsed));
        let not_canceled = AtomicBool::new(false);
        let request = PlanRequest { threads: 1, ..census_plan_request(parts, &settings) };
        let prepared = prepare_plan(host, &request, &excluded, ages, &progress, &not_canceled);
        let prepared = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return Event::TaskFailed(error.to_string()),
        };
        let bytes_read = host
            .page_size()
            .bytes_of(prepared.census.subjects.iter().map(|subject| pages_read(subject, &self.stable_ages)).sum());
        let cpu_time = Duration::from_secs_f64(bytes_read.0 as f64 / 1048576.0 * INITIAL_CENSUS_SECONDS_PER_MIB);
        self.census_cpu_time += cpu_time;
        Event::CensusDone(CensusSummary {
            cpu_time,
            bytes_scanned: bytes_read,
            cost_in_pages: scan_costs_in_pages(&prepared.census, &self.stable_ages),
            candidates: merge_candidates(&prepared.plan),
            not_yet_stable: unstable_processes(&prepared, &settings),
            scanned_ranges: scanned_ranges(&prepared.census),
            left_out: left_out(parts.keys(), &prepared.census),
            sketches: prepared.sketches,
            partial: false,
        })
    }
}
