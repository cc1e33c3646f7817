use super::*;
use pagefold_base::content::Fingerprint;
use pagefold_base::domain::TrustDomain;
use pagefold_base::units::{AddressRange, NetBytes, Pages, Pid};
use pagefold_census::ScanPart;
use pagefold_census::decide::sketch::{ContentSketches, Sketch};
use std::collections::BTreeSet;

mod adoption;
mod merge_estimate;
mod parts;
mod pressure;
mod properties;
mod restart;
mod schedule;
mod unenroll;

const MIB: u64 = 1 << 20;
const TICK: Duration = Duration::from_millis(250);

/// Sketches of these contents, of which the first `merged` are merged.
fn make_sketches(contents: impl Iterator<Item = u64>, merged: usize) -> ContentSketches {
    let contents: Vec<Fingerprint> = contents.map(Fingerprint).collect();
    let sketch = |from: usize| Sketch::from_contents(Pages(contents.len() as u64), contents[from..].iter().copied());
    ContentSketches { all: sketch(0), unmerged: sketch(merged) }
}

fn id(pid: u32) -> ProcessId {
    ProcessId { pid: Pid(pid), start_time: u64::from(pid) }
}

fn arrival(pid: u32) -> Event {
    let domain = TrustDomain::User(pid % 2);
    Event::ProcessArrived(ProcessArrival {
        process: id(pid),
        domain,
        similarity_key: "a".into(),
        exclusion_reason: None,
        resident: Bytes(64 * MIB),
    })
}

fn rules(mode: DaemonMode) -> DaemonRules {
    DaemonRules { mode, ..DaemonRules::default() }
}

/// A simulated host that executes effects: each task takes some ticks and CPU time.
struct SimulatedHost {
    state: DaemonState,
    now: Duration,
    cpu_spent: Duration,
    available: Bytes,
    /// Total memory, on a host without pressure information.
    total: Option<Bytes>,
    pressure: f64,
    second: u32,
    /// The pending answer of the running task, and its time.
    pending_answer: Option<(Duration, Event)>,
    /// CPU seconds per second of the running task, and whether it can be halted.
    task_cpu_rate: f64,
    can_halt: bool,
    enrolled: BTreeSet<ProcessId>,
    acquired: bool,
    /// Net savings of merging each process.
    net_per_process: i64,
    /// CPU seconds per second of work.
    cpu_per_second: f64,
    /// Seconds per census.
    census_seconds: f64,
    /// Seconds per MiB scanned, where a census takes as long as its parts are large.
    census_seconds_per_mib: Option<f64>,
    /// Seconds per merge, and the CPU time that it reports.
    merge_seconds: f64,
    merge_cpu_time: Duration,
    /// Predicted CPU time of ksmd per process.
    ksmd_time: Duration,
    /// Share of their time that programs wait while the daemon works.
    wait_share: f64,
    /// Milliseconds per check of merged pages.
    check_millis: u64,
    /// Ranges that cannot be unenrolled.
    failed_unenrolls: Vec<(ProcessId, String)>,
    /// A process that refuses to be enrolled.
    refuses_enroll: Option<ProcessId>,
    /// Processes that cannot be unenrolled for lack of memory.
    cannot_unenroll: BTreeSet<ProcessId>,
    /// Whether unenrolling fails as a whole.
    unenroll_fails: bool,
    /// Processes that could not be unenrolled and must be in no plan.
    unenroll_failed: BTreeSet<ProcessId>,
    /// Processes with a net loss when merged, and the planned net savings of single processes.
    losing: BTreeSet<ProcessId>,
    planned_net: BTreeMap<ProcessId, NetBytes>,
    /// Content sketches that a census reports.
    sketches: BTreeMap<ProcessId, ContentSketches>,
    /// Why the host cannot be acquired.
    host_busy_reason: Option<String>,
    /// Predicted savings of a merge, where that matters.
    predicted: Bytes,
    /// Whether ksmd visits all exited processes.
    sweep_completes: bool,
    /// Whether restoring the settings succeeds.
    restore_completes: bool,
    /// What the previous daemon enrolled.
    recorded: Vec<(ProcessId, BTreeSet<SharingScope>)>,
    /// A process whose presence multiplies the time of a census.
    costly_process: Option<(ProcessId, f64)>,
    trace: Vec<(Duration, Effect)>,
    /// Time, total CPU seconds, and the part of these that cannot be halted.
    readings: Vec<(f64, f64, f64)>,
}

impl SimulatedHost {
    fn new(rules: DaemonRules) -> Self {
        Self {
            state: DaemonState::new(rules, 7, Duration::ZERO, Duration::ZERO),
            now: Duration::ZERO,
            cpu_spent: Duration::ZERO,
            available: Bytes(1 << 34),
            total: None,
            pressure: 0.0,
            second: 0,
            pending_answer: None,
            task_cpu_rate: 0.0,
            can_halt: false,
            enrolled: BTreeSet::new(),
            acquired: false,
            net_per_process: 16 * MIB as i64,
            cpu_per_second: 1.0,
            census_seconds: 0.2,
            census_seconds_per_mib: None,
            merge_seconds: 0.5,
            merge_cpu_time: Duration::from_millis(100),
            ksmd_time: Duration::from_millis(50),
            wait_share: 0.0,
            check_millis: 0,
            failed_unenrolls: Vec::new(),
            refuses_enroll: None,
            cannot_unenroll: BTreeSet::new(),
            unenroll_fails: false,
            unenroll_failed: BTreeSet::new(),
            losing: BTreeSet::new(),
            planned_net: BTreeMap::new(),
            sketches: BTreeMap::new(),
            host_busy_reason: None,
            predicted: Bytes::ZERO,
            sweep_completes: true,
            restore_completes: true,
            recorded: Vec::new(),
            costly_process: None,
            trace: Vec::new(),
            readings: vec![(0.0, 0.0, 0.0)],
        }
    }

    /// The end of a process's memory, which begins at address 0 and has no holes.
    fn memory_end(&self, process: ProcessId) -> u64 {
        self.state.tracked().get(&process).map_or(0, |tracked| tracked.resident.0)
    }

    /// The addresses that a census of these parts scans.
    fn scan_parts(&self, parts: &BTreeMap<ProcessId, Vec<ScanPart>>) -> BTreeMap<ProcessId, Vec<AddressRange>> {
        let scan = |(process, parts): (&ProcessId, &Vec<ScanPart>)| {
            let mut ranges: Vec<AddressRange> = Vec::new();
            for part in parts {
                let start = part.range.start.max(ranges.last().map_or(0, |last| last.end));
                let end = start.saturating_add(part.max_bytes.0);
                let end = if end >= self.memory_end(*process) { u64::MAX } else { end };
                ranges.push(AddressRange { start, end: end.min(part.range.end) });
            }
            (*process, ranges)
        };
        parts.iter().map(scan).collect()
    }

    fn deliver(&mut self, event: Event) {
        let (state, effects) = step(self.state.clone(), self.now, event);
        self.state = state;
        for effect in effects {
            self.trace.push((self.now, effect.clone()));
            self.carry_out(effect);
        }
    }

    fn schedule_answer(&mut self, seconds: f64, event: Event) {
        assert!(self.pending_answer.is_none(), "one task at a time");
        self.can_halt = matches!(event, Event::CensusDone(_) | Event::MergeDone(_));
        self.pending_answer = Some((self.now + Duration::from_secs_f64(seconds), event));
    }

    fn carry_out(&mut self, effect: Effect) {
        if !matches!(effect, Effect::Report(_) | Effect::Halt) {
            self.task_cpu_rate = if let Effect::Merge { cpu_share, .. } = effect {
                self.cpu_per_second * cpu_share
            } else {
                self.cpu_per_second
            };
        }
        match effect {
            Effect::Report(_) | Effect::End { .. } => {}
            Effect::Halt => {
                if let Some((at, event)) = &mut self.pending_answer {
                    *at = self.now;
                    if let Event::CensusDone(summary) = event {
                        summary.partial = true;
                    }
                }
            }
            Effect::AcquireHost => {
                assert!(!self.acquired);
                self.acquired = self.host_busy_reason.is_none();
                self.schedule_answer(0.0, Event::HostAcquired(self.host_busy_reason.clone().map_or(Ok(()), Err)));
            }
            Effect::RestoreSettings => {
                assert!(self.acquired);
                self.acquired = false;
                self.schedule_answer(0.0, Event::SettingsRestored { complete: self.restore_completes });
            }
            Effect::Census(parts) => {
                let processes = scanned_processes(&parts);
                assert!(
                    processes.iter().all(|process| !self.unenroll_failed.contains(process)),
                    "it is to be unenrolled"
                );
                let plan = |&process: &ProcessId| MergeCandidate {
                    process,
                    net_savings: self
                        .planned_net
                        .get(&process)
                        .copied()
                        .unwrap_or(NetBytes(self.net_per_process.abs())),
                    ksmd_time: self.ksmd_time,
                };
                let not_enrolled: Vec<_> =
                    processes.iter().filter(|process| !self.enrolled.contains(process)).collect();
                let candidates = not_enrolled.into_iter().map(plan).collect();
                let extra_seconds = self
                    .costly_process
                    .filter(|(costly, _)| processes.contains(costly))
                    .map_or(0.0, |(_, extra_seconds)| extra_seconds);
                let scanned_ranges = self.scan_parts(&parts);
                let bytes = |ranges: &[AddressRange], process: &ProcessId| -> u64 {
                    ranges
                        .iter()
                        .map(|range| range.end.min(self.memory_end(*process)).saturating_sub(range.start))
                        .sum()
                };
                let scanned_bytes: u64 = scanned_ranges.iter().map(|(process, ranges)| bytes(ranges, process)).sum();
                let seconds = match self.census_seconds_per_mib {
                    Some(seconds) => scanned_bytes as f64 / MIB as f64 * seconds,
                    None => self.census_seconds + extra_seconds,
                };
                let cpu_time = Duration::from_secs_f64(seconds * self.cpu_per_second);
                let bytes_scanned = match self.census_seconds_per_mib {
                    Some(_) => Bytes(scanned_bytes),
                    None => Bytes(64 * MIB * processes.len() as u64),
                };
                let cost_factor = |process| {
                    self.costly_process
                        .filter(|(costly, _)| *costly == process)
                        .map_or(1.0, |_| seconds / self.census_seconds)
                };
                let pages = |process| self.state.tracked().get(&process).map_or(0, |tracked| tracked.resident.0 >> 12);
                let costs = processes
                    .iter()
                    .map(|&process| (process, (pages(process) as f64 * cost_factor(process)) as u64))
                    .collect();
                let mut summary = CensusSummary {
                    cpu_time,
                    bytes_scanned,
                    cost_in_pages: costs,
                    candidates,
                    scanned_ranges,
                    ..CensusSummary::default()
                };
                summary.sketches.extend(
                    processes.iter().filter_map(|process| Some((*process, self.sketches.get(process)?.clone()))),
                );
                self.schedule_answer(seconds, Event::CensusDone(summary));
            }
            Effect::Merge { processes, cpu_share } => {
                assert!(self.acquired && cpu_share > 0.0 && cpu_share <= 1.0);
                assert!(
                    processes.iter().all(|process| !self.unenroll_failed.contains(process)),
                    "it is to be unenrolled"
                );
                let (refused, enrolled): (Vec<_>, Vec<_>) =
                    processes.into_iter().partition(|process| self.refuses_enroll == Some(*process));
                self.enrolled.extend(enrolled.iter().copied());
                let net = |process| if self.losing.contains(process) { -(MIB as i64) } else { self.net_per_process };
                let nets: BTreeMap<_, _> = enrolled.iter().map(|process| (*process, NetBytes(net(process)))).collect();
                let summary = MergeSummary {
                    predicted: self.predicted,
                    net: NetBytes(nets.values().map(|net| net.0).sum()),
                    nets,
                    enrolled,
                    refused: refused.into_iter().map(|process| (process, "no".to_owned())).collect(),
                    cpu_time: self.merge_cpu_time,
                    ..MergeSummary::default()
                };
                self.schedule_answer(self.merge_seconds, Event::MergeDone(summary));
            }
            Effect::CheckMerged { .. } => {
                assert!(self.acquired);
                self.schedule_answer(
                    0.0,
                    Event::MergedCheckDone(MergedCheckSummary {
                        cpu_time: Duration::from_millis(self.check_millis),
                        failed_unenrolls: Some(self.failed_unenrolls.clone()),
                        ..MergedCheckSummary::default()
                    }),
                );
            }
            Effect::Sweep => {
                assert!(self.acquired && self.state.cpu_budget().available_seconds() > 0.0);
                self.schedule_answer(0.1, Event::SweepDone { complete: self.sweep_completes });
            }
            Effect::Unenroll(scopes) => {
                assert!(self.acquired && (!self.state.is_host_memory_short() || self.state.shutdown_stage.is_some()));
                let processes: Vec<ProcessId> = scopes.into_keys().collect();
                let is_cgroup_short = |process| {
                    self.state
                        .tracked()
                        .get(process)
                        .is_some_and(|tracked| tracked.is_cgroup_memory_short(self.state.rules()))
                };
                let is_short = self.state.is_host_memory_short() || processes.iter().any(is_cgroup_short);
                assert!(!is_short || self.state.shutdown_stage.is_some(), "unmerging takes memory");
                if self.unenroll_fails {
                    self.unenroll_failed.extend(processes);
                    return self.schedule_answer(0.1, Event::TaskFailed("the journal cannot be written".to_owned()));
                }
                let (failed, unenrolled): (Vec<_>, Vec<_>) =
                    processes.into_iter().partition(|process| self.cannot_unenroll.contains(process));
                self.enrolled.retain(|process| !unenrolled.contains(process));
                self.unenroll_failed.retain(|process| !unenrolled.contains(process));
                self.unenroll_failed.extend(&failed);
                let failures = failed.into_iter().map(|process| (process, "there is no memory".to_owned())).collect();
                self.schedule_answer(
                    0.1,
                    Event::UnenrollDone(UnenrollSummary {
                        unenrolled,
                        failed_unenrolls: failures,
                        ..UnenrollSummary::default()
                    }),
                );
            }
        }
    }

    fn tick(&mut self) {
        let start = self.now;
        self.now += TICK;
        let (.., mut unbounded) = self.readings[self.readings.len() - 1];
        if let Some((end, _)) = &self.pending_answer {
            let worked = end.min(&self.now).saturating_sub(start).mul_f64(self.task_cpu_rate);
            self.cpu_spent += worked;
            unbounded += if self.can_halt { 0.0 } else { worked.as_secs_f64() };
        }
        self.readings.push((self.now.as_secs_f64(), self.cpu_spent.as_secs_f64(), unbounded));
        let readings = TickReadings {
            cpu_spent: self.cpu_spent,
            available: Some(self.available),
            total: self.total,
            pressure_percent: self.total.is_none().then_some(self.pressure),
            wait_times: Some(self.wait_times()),
            time_of_day: TimeOfDay { local: self.second, utc: 12 * 3600 },
            resident: Vec::new(),
            ..TickReadings::default()
        };
        self.deliver(Event::Tick(readings));
        while let Some((_, event)) = self.pending_answer.take_if(|(at, _)| *at <= self.now) {
            if event == Event::HostAcquired(Ok(())) && !self.recorded.is_empty() {
                let recorded = std::mem::take(&mut self.recorded);
                self.deliver(Event::EnrollmentsAdopted(recorded));
            }
            self.deliver(event);
        }
    }

    /// Programs that want half a CPU, and wait for a fiftieth of their time anyway.
    fn wait_times(&self) -> WaitTimes {
        let part = if self.pending_answer.is_some() { self.wait_share.max(0.02) } else { 0.02 };
        let [queued, ran] = [part, 1.0 - part].map(|part| Duration::from_secs_f64(part * 0.125));
        WaitTimes { elapsed: TICK, queue_and_run_time: Some((queued, ran)), ..WaitTimes::default() }
    }

    fn merge_cpu_shares(&self) -> Vec<f64> {
        let shares = self.trace.iter().filter_map(|(_, effect)| match effect {
            Effect::Merge { cpu_share, .. } => Some(*cpu_share),
            _ => None,
        });
        shares.collect()
    }

    fn run(&mut self, seconds: u64) {
        (0..seconds * 4).for_each(|_| self.tick());
    }

    fn count_effects(&self, is_counted: impl Fn(&Effect) -> bool) -> usize {
        self.trace.iter().filter(|(_, effect)| is_counted(effect)).count()
    }

    /// An operator enrolls the process, or it exits: earlier failures no longer count.
    fn deliver_and_forget_failure(&mut self, process: ProcessId, event: Event) {
        self.unenroll_failed.remove(&process);
        self.deliver(event);
    }

    /// Whether the shutdown was complete, once the daemon has ended.
    fn ended(&self) -> Option<bool> {
        match self.trace.last() {
            Some((_, Effect::End { complete })) => Some(*complete),
            _ => None,
        }
    }

    fn count_decisions(&self, kind: DecisionKind, reason: DecisionReason) -> usize {
        self.count_effects(
            |effect| matches!(effect, Effect::Report(decision) if (decision.kind, decision.reason) == (kind, reason)),
        )
    }
}

/// The processes of a census.
fn scanned_processes(parts: &BTreeMap<ProcessId, Vec<ScanPart>>) -> Vec<ProcessId> {
    parts.keys().copied().collect()
}

fn is_census(effect: &Effect) -> bool {
    matches!(effect, Effect::Census(_))
}

#[test]
fn new_process_is_merged_within_seconds() {
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    host.run(2);
    host.deliver(arrival(1));
    host.run(3);
    assert!(host.count_effects(is_census) == 1 && host.enrolled.is_empty(), "the first scan only records its pages");
    host.run(6);
    assert!(host.enrolled.contains(&id(1)), "{:?}", host.trace);
    host.deliver(arrival(3));
    host.run(9);
    assert!(host.enrolled.contains(&id(3)));
    let last = host.trace.iter().rev().find_map(|(_, effect)| match effect {
        Effect::Census(parts) => Some(scanned_processes(parts)),
        _ => None,
    });
    assert_eq!(last, Some(vec![id(1), id(3)]), "with a known process of its domain");
}

#[test]
fn observe_mode_does_nothing_and_advise_mode_changes_nothing() {
    for (mode, censuses) in [(DaemonMode::Observe, false), (DaemonMode::Advise, true)] {
        let mut host = SimulatedHost::new(rules(mode));
        host.deliver(arrival(1));
        host.run(100);
        host.deliver(Event::Stop { unmerge: true });
        assert_eq!(host.count_effects(is_census) > 0, censuses);
        let changes_host = |effect: &Effect| match effect {
            Effect::Report(decision) => decision.kind == DecisionKind::Merge && decision.carried_out,
            effect => !matches!(effect, Effect::Census(_) | Effect::Halt | Effect::End { .. }),
        };
        assert_eq!(host.count_effects(changes_host), 0, "{:?}", host.trace);
        assert_eq!(host.count_decisions(DecisionKind::Merge, DecisionReason::Profitable) > 0, censuses);
        assert_eq!(host.ended(), Some(true), "nothing is merged");
    }
}

#[test]
fn pause_releases_the_host() {
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    host.deliver(arrival(1));
    host.run(1);
    host.deliver(Event::Pause);
    host.run(1);
    assert!(!host.acquired && host.state.status().0 == DaemonStatus::Paused);
    let before = host.count_effects(is_census);
    host.run(100);
    assert_eq!(host.count_effects(is_census), before);
    host.deliver(Event::Resume);
    host.run(10);
    assert!(host.acquired && host.enrolled.contains(&id(1)));
}

#[test]
fn daemon_yields_to_other_writers() {
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    host.deliver(arrival(1));
    host.run(1);
    host.deliver(Event::SettingsOverwritten("run was 1, it is 0".into()));
    host.run(100);
    assert!(!host.acquired && host.state.status().0 == DaemonStatus::Yielding);
    assert_eq!(host.count_decisions(DecisionKind::Yield, DecisionReason::OtherWriter), 1);
    host.deliver(Event::Resume);
    host.run(1);
    assert!(host.acquired);
    host.deliver(Event::TunerChanged(Some("ksmtuned".into())));
    host.run(1);
    assert!(!host.acquired);
    host.deliver(Event::TunerChanged(None));
    host.run(1);
    assert!(host.acquired);
    host.deliver(Event::RulesChanged(DaemonRules { ignore_tuners: true, ..rules(DaemonMode::Act) }));
    host.deliver(Event::TunerChanged(Some("ksmtuned".into())));
    host.run(1);
    assert!(host.acquired, "an operator resumed it");
}

#[test]
fn losing_enrollment_is_undone_once_memory_is_available() {
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    host.net_per_process = -16 * (MIB as i64);
    host.pressure = 50.0;
    host.deliver(arrival(1));
    host.run(10);
    assert!(host.enrolled.contains(&id(1)), "nothing is unenrolled while memory is short");
    host.pressure = 0.0;
    host.run(1);
    assert!(host.enrolled.is_empty());
    assert_eq!(host.count_decisions(DecisionKind::Unenroll, DecisionReason::NetLoss), 1);
}

#[test]
fn daemon_backs_off_while_programs_are_slowed_down() {
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    (host.merge_seconds, host.wait_share) = (5.0, 0.4);
    host.run(5);
    host.deliver(arrival(1));
    host.run(11);
    assert_eq!(
        (host.merge_cpu_shares(), host.count_decisions(DecisionKind::Idle, DecisionReason::Slowdown)),
        (vec![1.0], 1)
    );
    assert_eq!(
        host.count_effects(|effect| *effect == Effect::Halt),
        1,
        "it is not merged at the pace that slows them down"
    );
    assert_eq!(host.state.status(), (DaemonStatus::Idle, "programs waited longer while it worked".into()));
    let censuses = host.count_effects(is_census);
    host.deliver(arrival(3));
    host.run(5);
    assert_eq!(host.count_effects(is_census), censuses, "new processes wait, too");
    host.wait_share = 0.0;
    host.run(20);
    assert_eq!(host.merge_cpu_shares(), [1.0, 0.5]);
    host.deliver(arrival(5));
    host.run(20);
    assert_eq!(host.merge_cpu_shares(), [1.0, 0.5, 1.0], "no program waited longer meanwhile");
    host.wait_share = 0.4;
    host.pressure = 50.0;
    host.deliver(arrival(7));
    host.run(20);
    assert!(host.count_decisions(DecisionKind::Idle, DecisionReason::Slowdown) > 1);
    host.deliver(arrival(2));
    host.run(3);
    assert!(host.state.tracked()[&id(2)].last_scan.is_some(), "memory shortage has priority");
}

#[test]
fn checks_of_merged_pages_cost_little_cpu() {
    let check_count = |host: &SimulatedHost| host.count_effects(|effect| matches!(effect, Effect::CheckMerged { .. }));
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    host.check_millis = 500;
    host.deliver(arrival(1));
    host.run(60);
    let before = check_count(&host);
    host.run(5000);
    assert!((9..=11).contains(&(check_count(&host) - before)), "one in 500 s, a thousand times its CPU time");
}

#[test]
fn merge_far_below_prediction_is_reported_and_delayed() {
    let run_with_prediction = |predicted: u64| {
        let mut host = SimulatedHost::new(rules(DaemonMode::Act));
        host.predicted = Bytes(predicted * MIB);
        host.deliver(arrival(1));
        host.run(20);
        let scan_interval = host.state.tracked()[&id(1)].scan_interval;
        (host.count_decisions(DecisionKind::Skip, DecisionReason::Unprofitable), scan_interval)
    };
    // 16 MiB are saved.
    let ((skips_at_limit, interval_at_limit), (skips_below, interval_below)) =
        (run_with_prediction(32), run_with_prediction(33));
    assert_eq!((skips_at_limit, skips_below), (0, 1));
    assert_eq!(interval_below, interval_at_limit * 2);
}

#[test]
fn unprofitable_merges_back_off() {
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    host.predicted = Bytes(33 * MIB);
    host.deliver(arrival(1));
    let mut merges = Vec::new();
    for _ in 0..2000 {
        host.run(1);
        // Whatever the daemon does, the same savings are predicted again.
        if host.enrolled.remove(&id(1)) {
            merges.push(host.now.as_secs());
        }
    }
    let pauses: Vec<u64> = merges.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(pauses.len() > 3 && pauses.windows(2).all(|pair| pair[1] * 2 >= pair[0] * 3), "{pauses:?}");
}

/// Until ksmd visits exited processes, the kernel counts their pages as merged.
#[test]
fn ksmd_sweeps_ended_processes_soon_and_together() {
    let sweep_count = |host: &SimulatedHost| host.count_effects(|effect| matches!(effect, Effect::Sweep));
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    [1, 2, 3, 4].into_iter().for_each(|pid| host.deliver(arrival(pid)));
    host.run(60);
    host.deliver(Event::ProcessExited(id(9)));
    host.run(60);
    assert_eq!(sweep_count(&host), 0, "no merged process has exited");
    [1, 2].into_iter().for_each(|pid| host.deliver(Event::ProcessExited(id(pid))));
    host.run(4);
    assert_eq!(sweep_count(&host), 0, "other processes may exit as well");
    host.run(3);
    assert_eq!(sweep_count(&host), 1);
    host.run(600);
    assert_eq!(sweep_count(&host), 1);
    host.sweep_completes = false;
    host.deliver(Event::ProcessExited(id(3)));
    host.run(60);
    assert_eq!(sweep_count(&host), 2);
    host.run(65);
    assert_eq!(sweep_count(&host), 3, "an incomplete sweep is retried");
    host.sweep_completes = true;
    host.run(600);
    assert_eq!(sweep_count(&host), 4);
    host.deliver(Event::Pause);
    host.deliver(Event::ProcessExited(id(4)));
    host.run(60);
    assert_eq!(sweep_count(&host), 4, "another program runs ksmd");
    // No sweep in quiet hours either.
    let mut host = SimulatedHost::new(DaemonRules {
        quiet_hours: vec![DailyHours { start_second: 100, end_second: 1000, in_utc: false }],
        ..rules(DaemonMode::Act)
    });
    [1, 2].into_iter().for_each(|pid| host.deliver(arrival(pid)));
    host.run(60);
    assert!(host.enrolled.contains(&id(1)));
    host.second = 100;
    host.deliver(Event::ProcessExited(id(1)));
    host.run(60);
    assert_eq!(sweep_count(&host), 0);
    host.second = 1000;
    host.run(1);
    assert_eq!(sweep_count(&host), 1);
}

#[test]
fn failed_unenroll_is_reported_once() {
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    host.deliver(arrival(1));
    host.run(10);
    host.failed_unenrolls = vec![(id(1), "there is no memory for copies".into())];
    host.run(300);
    assert_eq!(host.count_decisions(DecisionKind::Refuse, DecisionReason::Refused), 1);
    host.failed_unenrolls[0].1 = "it does not stop".into();
    host.run(300);
    assert_eq!(host.count_decisions(DecisionKind::Refuse, DecisionReason::Refused), 2, "another reason is news");
    host.failed_unenrolls.clear();
    host.run(300);
    host.failed_unenrolls = vec![(id(1), "it does not stop".into())];
    host.run(300);
    assert_eq!(host.count_decisions(DecisionKind::Refuse, DecisionReason::Refused), 3, "so is a past reason");
}

#[test]
fn process_over_the_cost_limit_is_not_merged() {
    // 50 ms of ksmd and 200 ms of a census for 16 MiB are 0.016 s per MiB.
    let mut host = SimulatedHost::new(DaemonRules { max_cpu_seconds_per_mib: 0.015, ..rules(DaemonMode::Act) });
    host.deliver(arrival(1));
    host.run(60);
    assert!(host.merge_cpu_shares().is_empty());
    assert!(host.count_decisions(DecisionKind::Skip, DecisionReason::Unprofitable) > 0);
    // 300 ms for 16 MiB are 0.019 s per MiB: profitable as predicted, unprofitable as measured.
    let mut host = SimulatedHost::new(DaemonRules { max_cpu_seconds_per_mib: 0.018, ..rules(DaemonMode::Act) });
    host.merge_cpu_time = Duration::from_millis(300);
    host.deliver(arrival(1));
    host.run(12);
    assert_eq!(host.merge_cpu_shares(), [1.0]);
    let tracked = &host.state.tracked()[&id(1)];
    assert!(tracked.scan_interval >= host.state.rules().min_scan_interval * 2, "{tracked:?}");
}

#[test]
fn operator_enroll_and_unenroll_override_the_daemon() {
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    host.deliver(arrival(1));
    host.run(10);
    host.deliver(Event::Unenroll(id(1)));
    host.run(100);
    assert!(host.enrolled.is_empty());
    host.deliver(Event::Enroll(id(1)));
    host.run(3);
    assert!(host.enrolled.contains(&id(1)));
}

#[test]
fn daemon_pauses_above_memory_goal_and_in_quiet_hours() {
    let mut host = SimulatedHost::new(DaemonRules { keep_available: Some(Bytes(1 << 30)), ..rules(DaemonMode::Act) });
    host.deliver(arrival(1));
    host.run(20);
    assert_eq!(
        (host.count_effects(is_census), host.count_decisions(DecisionKind::Idle, DecisionReason::MemoryGoal)),
        (0, 1)
    );
    host.available = Bytes(1 << 29);
    host.run(2);
    assert!(host.count_effects(is_census) > 0);
    let mut host = SimulatedHost::new(DaemonRules {
        quiet_hours: vec![DailyHours { start_second: 0, end_second: 10, in_utc: false }],
        ..rules(DaemonMode::Act)
    });
    host.deliver(arrival(1));
    host.run(20);
    assert_eq!(
        (host.count_effects(is_census), host.count_decisions(DecisionKind::Idle, DecisionReason::QuietHours)),
        (0, 1)
    );
    assert_eq!(host.state.scan_block_reason().as_deref(), Some("these are quiet hours"));
    host.second = 10;
    host.run(2);
    assert!(host.count_effects(is_census) > 0 && host.state.scan_block_reason().is_none());
}

#[test]
fn stop_restores_settings_and_keeps_or_unmerges_pages() {
    for unmerge in [false, true] {
        let mut host = SimulatedHost::new(rules(DaemonMode::Act));
        host.deliver(arrival(1));
        host.run(10);
        host.deliver(Event::Stop { unmerge });
        host.run(2);
        assert_eq!((host.acquired, host.enrolled.is_empty()), (false, unmerge));
        assert_eq!(host.ended(), Some(true));
        let length = host.trace.len();
        host.deliver(arrival(2));
        host.run(10);
        assert_eq!(host.trace.len(), length, "nothing comes after the end");
    }
}

#[test]
fn newly_excluded_process_is_unenrolled() {
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    host.deliver(arrival(1));
    host.run(10);
    let Event::ProcessArrived(arrived) = arrival(1) else { unreachable!() };
    host.deliver(Event::ProcessArrived(ProcessArrival { exclusion_reason: Some("it holds keys".into()), ..arrived }));
    host.run(2);
    assert!(host.enrolled.is_empty());
    assert_eq!(host.count_decisions(DecisionKind::Skip, DecisionReason::Excluded), 1);
}
