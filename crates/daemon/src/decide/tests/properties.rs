//! Properties that hold for any sequence of host events.

use super::*;
use proptest::prelude::*;

#[derive(Clone, Debug)]
pub(super) enum HostStep {
    ProcessArrives(u32),
    ProcessExits(u32),
    Unenroll(u32),
    Enroll(u32),
    BlockUnenroll(u32),
    UnblockUnenroll(u32),
    SetUnenrollFails(bool),
    Pause,
    Resume,
    OverwriteSettings,
    SetPressure(bool),
    SetNetPerProcess(i64),
    SetMode(DaemonMode),
    RunSeconds(u64),
}

pub(super) fn any_step() -> impl Strategy<Value = HostStep> {
    prop_oneof![
        4 => (0u32..8).prop_map(HostStep::ProcessArrives),
        1 => (0u32..8).prop_map(HostStep::ProcessExits),
        1 => (0u32..8).prop_map(HostStep::Unenroll),
        1 => (0u32..8).prop_map(HostStep::Enroll),
        1 => (0u32..8).prop_map(HostStep::BlockUnenroll),
        1 => (0u32..8).prop_map(HostStep::UnblockUnenroll),
        1 => prop::sample::select(vec![true, false, false]).prop_map(HostStep::SetUnenrollFails),
        1 => Just(HostStep::Pause),
        2 => Just(HostStep::Resume),
        1 => Just(HostStep::OverwriteSettings),
        1 => any::<bool>().prop_map(HostStep::SetPressure),
        1 => (-4i64..20).prop_map(|mib| HostStep::SetNetPerProcess(mib * MIB as i64)),
        1 => prop::sample::select(vec![DaemonMode::Observe, DaemonMode::Advise, DaemonMode::Act, DaemonMode::Act]).prop_map(HostStep::SetMode),
        6 => (1u64..60).prop_map(HostStep::RunSeconds),
    ]
}

fn host_after_steps(steps: &[HostStep], base: &DaemonRules, cores: f64, census_seconds: f64) -> SimulatedHost {
    let mut host = SimulatedHost::new(base.clone());
    (host.cpu_per_second, host.census_seconds) = (cores, census_seconds);
    host.apply_steps(steps, base);
    host
}

impl SimulatedHost {
    /// Remove memory pressure and all failures.
    pub(super) fn remove_obstacles(&mut self) {
        (self.pressure, self.unenroll_fails) = (0.0, false);
        self.deliver(Event::RulesChanged(rules(DaemonMode::Act)));
        self.deliver(Event::TunerChanged(None));
        self.deliver(Event::Resume);
    }

    pub(super) fn apply_steps(&mut self, steps: &[HostStep], base: &DaemonRules) {
        let host = self;
        for step in steps {
            match step {
                HostStep::ProcessArrives(pid) => host.deliver(arrival(*pid)),
                HostStep::ProcessExits(pid) => {
                    host.enrolled.remove(&id(*pid));
                    host.cannot_unenroll.remove(&id(*pid));
                    host.deliver_and_forget_failure(id(*pid), Event::ProcessExited(id(*pid)));
                }
                HostStep::Unenroll(pid) => host.deliver(Event::Unenroll(id(*pid))),
                HostStep::Enroll(pid) => host.deliver_and_forget_failure(id(*pid), Event::Enroll(id(*pid))),
                HostStep::BlockUnenroll(pid) => _ = host.cannot_unenroll.insert(id(*pid)),
                HostStep::UnblockUnenroll(pid) => _ = host.cannot_unenroll.remove(&id(*pid)),
                HostStep::SetUnenrollFails(fails) => host.unenroll_fails = *fails,
                HostStep::Pause => host.deliver(Event::Pause),
                HostStep::Resume => host.deliver(Event::Resume),
                HostStep::OverwriteSettings => host.deliver(Event::SettingsOverwritten("another program".into())),
                HostStep::SetPressure(high) => host.pressure = if *high { 90.0 } else { 0.0 },
                HostStep::SetNetPerProcess(net) => host.net_per_process = *net,
                HostStep::SetMode(mode) => {
                    host.deliver(Event::RulesChanged(DaemonRules { mode: *mode, ..base.clone() }))
                }
                HostStep::RunSeconds(seconds) => host.run(*seconds),
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64.min(ProptestConfig::default().cases)))]

    /// Within any time, CPU time stays within the bound. Exceptions are one tick before the daemon can halt its work,
    /// and tasks that must not be halted: unenrolling and restoring settings.
    #[test]
    fn cpu_time_stays_within_rate_and_burst(
        steps in prop::collection::vec(any_step(), 1..40),
        cpu in 0.01f64..0.5,
        burst in 1u64..10,
        cores in 0.1f64..2.0,
        census_seconds in 0.1f64..20.0,
    ) {
        let base = DaemonRules { cpu_rate: cpu, burst: Duration::from_secs(burst), max_cpu_seconds_per_mib: 100.0, ..rules(DaemonMode::Act) };
        let host = host_after_steps(&steps, &base, cores, census_seconds);
        let slack = TICK.as_secs_f64() * cores + 1e-6;
        for (i, (from, before, out)) in host.readings.iter().enumerate() {
            for (to, after, unbounded) in &host.readings[i..] {
                let (spent, bound) = (after - before, cpu * (to - from) + burst as f64 + unbounded - out + slack);
                prop_assert!(spent <= bound, "{spent} > {bound} from {from} to {to}");
            }
        }
    }

    /// After a stop with unmerging, every process is unenrolled or reported, and the host is released.
    #[test]
    fn stop_with_unmerge_unenrolls_or_reports_each_process(
        steps in prop::collection::vec(any_step(), 1..40),
        paused in any::<bool>(),
    ) {
        let mut host = host_after_steps(&steps, &rules(DaemonMode::Act), 0.5, 0.3);
        host.remove_obstacles();
        if paused {
            host.deliver(Event::Pause);
        }
        host.run(2);
        prop_assert_eq!(host.acquired, !paused);
        let from = host.trace.len();
        host.deliver(Event::Stop { unmerge: true });
        host.run(3);
        prop_assert!(!host.acquired);
        let is_reported = |process: &ProcessId| {
            let refused_at_stop = (DecisionKind::Refuse, DecisionReason::Stopped);
            let is_refusal = |decision: &Decision| {
                (decision.kind, decision.reason) == refused_at_stop && decision.processes == [*process]
            };
            let mut effects = host.trace[from..].iter();
            effects.any(|(_, effect)| matches!(effect, Effect::Report(decision) if is_refusal(decision)))
        };
        let is_excused = |process: &ProcessId| host.cannot_unenroll.contains(process) && is_reported(process);
        prop_assert!(host.enrolled.iter().all(is_excused), "{:?}", host.enrolled);
        prop_assert_eq!(host.ended(), Some(host.enrolled.is_empty() && host.unenroll_failed.is_empty()));
    }

    /// A process that could not be unenrolled is unenrolled once there is memory, however often it failed before.
    #[test]
    fn pending_unenroll_succeeds_once_memory_is_available(steps in prop::collection::vec(any_step(), 1..40)) {
        let mut host = host_after_steps(&steps, &rules(DaemonMode::Act), 0.5, 0.3);
        host.remove_obstacles();
        host.cannot_unenroll.clear();
        (host.net_per_process, host.unenroll_failed) = (16 * MIB as i64, BTreeSet::new());
        host.run(301);
        let pending = host.state.tracked().values().filter(|tracked| tracked.pending_unenroll.is_some());
        prop_assert_eq!(pending.count(), 0);
        let unenrolled = host.state.tracked().iter().filter(|(_, tracked)| tracked.unenrolled_by_operator);
        prop_assert!(unenrolled.clone().all(|(process, _)| !host.enrolled.contains(process)));
    }

    /// Nothing changes while the daemon may not act, nothing is unenrolled while memory is short, and processes that an
    /// operator unenrolled are not scanned.
    #[test]
    fn forbidden_actions_never_happen(steps in prop::collection::vec(any_step(), 1..40)) {
        let mut mode = DaemonMode::Act;
        let mut host = SimulatedHost::new(rules(DaemonMode::Act));
        let mut unenrolled = BTreeSet::new();
        for step in &steps {
            let from = host.trace.len();
            let one_step = std::slice::from_ref(step);
            match step {
                HostStep::SetMode(new) => mode = *new,
                HostStep::Unenroll(pid) if host.state.tracked().contains_key(&id(*pid)) => {
                    unenrolled.insert(id(*pid));
                }
                HostStep::Enroll(pid) | HostStep::ProcessExits(pid) => {
                    unenrolled.remove(&id(*pid));
                }
                _ => {}
            }
            let base = DaemonRules { mode, ..rules(DaemonMode::Act) };
            host.apply_steps(one_step, &base);
            for (_, effect) in &host.trace[from..] {
                match effect {
                    Effect::AcquireHost | Effect::Sweep | Effect::Merge { .. } => prop_assert_eq!(mode, DaemonMode::Act),
                    Effect::Census(parts) => {
                        prop_assert!(mode != DaemonMode::Observe);
                        prop_assert!(parts.keys().all(|process| !unenrolled.contains(process)));
                    }
                    Effect::CheckMerged { unenroll } => prop_assert!(!unenroll || host.pressure < 10.0),
                    _ => {}
                }
            }
        }
    }

    /// The same seed and events give the same trace.
    #[test]
    fn same_seed_and_events_give_the_same_trace(steps in prop::collection::vec(any_step(), 1..30)) {
        let [first, second] = [0, 1].map(|_| host_after_steps(&steps, &rules(DaemonMode::Act), 0.5, 0.3).trace);
        prop_assert_eq!(first, second);
    }
}
