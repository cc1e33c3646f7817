//! The schedule and the outcome of merges, passed on to the next daemon.

use super::*;
use proptest::prelude::*;

impl SimulatedHost {
    /// The daemon is restarted and passes its state on. No daemon runs for some time.
    fn restart_after(&mut self, pause: Duration) -> PassedState {
        let passed = self.state.passed_state();
        self.restart(rules(DaemonMode::Act));
        self.now += pause;
        self.deliver(Event::StateReceived(passed.clone(), pause));
        passed
    }

    /// Seconds until the first census that scans a process for its own sake.
    fn run_until_census(&mut self, process: ProcessId, max_seconds: u64) -> Option<u64> {
        (0..max_seconds).find(|_| {
            self.run(1);
            self.trace.iter().any(|(_, effect)| {
                matches!(effect, Effect::Report(Decision { kind: DecisionKind::Census, processes, .. })
                    if processes.contains(&process))
            })
        })
    }
}

/// Two processes with nothing to merge, whose scan interval has grown.
fn converged_host() -> SimulatedHost {
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    host.net_per_process = 0;
    host.ksmd_time = Duration::from_secs(1000);
    [1, 3].into_iter().for_each(|pid| host.deliver(arrival(pid)));
    host.run(600);
    let tracked = &host.state.tracked()[&id(1)];
    assert!(tracked.next_scan > host.now + Duration::from_secs(60), "{tracked:?}");
    host
}

#[test]
fn next_daemon_scans_a_process_when_the_previous_one_would_have() {
    let pause = Duration::from_secs(10);
    for passes_on in [true, false] {
        let mut host = converged_host();
        let mut previous = host.state.tracked()[&id(1)].next_scan;
        if passes_on {
            host.restart_after(pause);
        } else {
            host.restart(rules(DaemonMode::Act));
            previous = host.now;
        }
        [1, 3].into_iter().for_each(|pid| host.deliver(arrival(pid)));
        assert_eq!(host.state.tracked()[&id(1)].is_unscanned(), !passes_on);
        let due_in = previous.saturating_sub(host.now).as_secs();
        let scanned_in = host.run_until_census(id(1), due_in + 10).expect("it is scanned");
        // A scan may come a quarter of its interval early, beside another one.
        assert!(scanned_in >= due_in / 2 && (passes_on || scanned_in < 5), "{scanned_in} s of {due_in} s");
    }
}

/// A scan that came due while no daemon ran is put off if the process has hardly run since the last one.
#[test]
fn idle_process_is_not_scanned_for_a_restart() {
    let seconds = Duration::from_secs;
    for (cpu_seconds, is_idle) in [(0, true), (20, false)] {
        let mut host = converged_host();
        let readings = |host: &SimulatedHost, cpu_time| {
            let cpu_spent = host.cpu_spent;
            Event::Tick(TickReadings { cpu_times: vec![(id(1), cpu_time)], cpu_spent, ..TickReadings::default() })
        };
        host.deliver(readings(&host, seconds(5)));
        host.deliver(Event::Enroll(id(1)));
        assert!(host.run_until_census(id(1), 20).is_some());
        host.run(2);
        host.restart_after(seconds(900));
        host.deliver(arrival(1));
        for _ in 0..60 {
            host.deliver(readings(&host, seconds(5 + cpu_seconds)));
            host.run(1);
        }
        assert_eq!(host.count_effects(is_census) == 0, is_idle);
    }
}

#[test]
fn process_that_grew_between_two_daemons_is_scanned_soon() {
    let mut host = converged_host();
    host.restart_after(Duration::from_secs(10));
    let Event::ProcessArrived(arrival) = arrival(1) else { unreachable!() };
    let resident = Bytes(arrival.resident.0 * 2);
    host.deliver(Event::ProcessArrived(ProcessArrival { resident, ..arrival }));
    host.deliver(Event::Tick(TickReadings { resident: vec![(id(1), resident)], ..TickReadings::default() }));
    assert!(host.run_until_census(id(1), 5).is_some());
}

/// The request to unenroll a process after a net loss outlives the daemon.
#[test]
fn net_loss_is_unenrolled_by_the_next_daemon() {
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    (host.losing, host.cannot_unenroll) = ([id(1)].into(), [id(1)].into());
    [1, 3].into_iter().for_each(|pid| host.deliver(arrival(pid)));
    host.run(15);
    assert!(host.state.tracked()[&id(1)].pending_unenroll.is_some() && host.enrolled.contains(&id(1)));
    host.restart_after(Duration::from_secs(1));
    host.cannot_unenroll.clear();
    [1, 3].into_iter().for_each(|pid| host.deliver(arrival(pid)));
    host.run(5);
    assert!(host.count_decisions(DecisionKind::Unenroll, DecisionReason::NetLoss) > 0);
    assert_eq!(host.enrolled, [id(3)].into(), "the merge of the other one was profitable");
    assert!(host.state.tracked()[&id(1)].refused_until.is_some(), "it is not merged again at once");
}

#[test]
fn first_merge_that_was_halted_is_judged_by_the_next_daemon() {
    let mut tracked = SimulatedHost::new(rules(DaemonMode::Act));
    tracked.deliver(arrival(1));
    for (net_savings, is_known) in [(None, false), (Some(NetBytes(5)), true)] {
        let passed = PassedProcess {
            scan_age: Duration::ZERO,
            resident_at_scan: Bytes(64 * MIB),
            cpu_time_at_scan: None,
            next_scan_in: Duration::from_secs(9),
            scan_interval: Duration::from_secs(20),
            found_nothing: false,
            merge_unprofitable: false,
            refused_for: None,
            net_savings,
            pending_unenroll: None,
        };
        let mut host = tracked.state.clone();
        let passed = PassedState { processes: BTreeMap::from([(id(1), passed)]), ..host.passed_state() };
        host = step(host, Duration::ZERO, Event::StateReceived(passed, Duration::ZERO)).0;
        host = step(host, Duration::ZERO, Event::EnrollmentsAdopted(vec![(id(1), BTreeSet::new())])).0;
        assert_eq!(host.tracked()[&id(1)].net_known, is_known);
    }
}

/// A daemon that is restarted again and again stays within the CPU budget.
#[test]
fn restarts_refill_no_tokens() {
    let rules = DaemonRules { burst: Duration::from_secs(10), cpu_rate: 0.1, ..rules(DaemonMode::Act) };
    let mut state = DaemonState::new(rules.clone(), 7, Duration::ZERO, Duration::ZERO);
    state = step(
        state,
        Duration::ZERO,
        Event::Tick(TickReadings { cpu_spent: Duration::from_secs(12), ..TickReadings::default() }),
    )
    .0;
    for expected in [-1.0, 0.0, 1.0] {
        let passed = state.passed_state();
        state = DaemonState::new(rules.clone(), 7, Duration::ZERO, Duration::ZERO);
        state = step(state, Duration::ZERO, Event::StateReceived(passed, Duration::from_secs(10))).0;
        assert!((state.cpu_budget().available_seconds() - expected).abs() < 1e-9);
    }
}

fn any_passed() -> impl Strategy<Value = PassedProcess> {
    let seconds = || (0u64..5000).prop_map(Duration::from_secs);
    let reason = prop_oneof![Just(DecisionReason::NetLoss), Just(DecisionReason::Failed)];
    let scan = (seconds(), 0u64..1 << 40, prop::option::of(seconds()));
    // No scan is due yet.
    let next_scan_in = seconds().prop_map(|pause| pause + Duration::from_secs(1));
    let times = (next_scan_in, seconds(), prop::option::of(seconds()));
    let outcome = (any::<bool>(), any::<bool>(), prop::option::of(any::<i64>()), prop::option::of(reason));
    (scan, times, outcome).prop_map(|(scan, (next_scan_in, scan_interval, refused_for), outcome)| {
        let (scan_age, resident_at_scan, cpu_time_at_scan) = scan;
        let (found_nothing, merge_unprofitable, net_savings, pending_unenroll) = outcome;
        PassedProcess {
            scan_age,
            resident_at_scan: Bytes(resident_at_scan),
            cpu_time_at_scan,
            next_scan_in,
            scan_interval,
            found_nothing,
            merge_unprofitable,
            refused_for,
            net_savings: net_savings.map(NetBytes),
            pending_unenroll,
        }
    })
}

proptest! {
    /// What a daemon receives, it passes on again, whether the processes have arrived or not. Time counts on meanwhile.
    #[test]
    fn state_is_passed_on_unchanged(processes in prop::collection::vec(any_passed(), 1..4), arrived in 0usize..4) {
        let passed = PassedState {
            census_seconds_per_mib: 0.5,
            available_cpu_seconds: 3.0,
            processes: (1..).map(id).zip(processes).collect(),
        };
        let state = DaemonState::new(rules(DaemonMode::Advise), 7, Duration::ZERO, Duration::ZERO);
        let mut state = step(state, Duration::ZERO, Event::StateReceived(passed.clone(), Duration::ZERO)).0;
        for pid in 1..=arrived as u32 {
            state = step(state, Duration::ZERO, arrival(pid)).0;
        }
        let received = state.passed_state();
        for (process, passed) in &passed.processes {
            prop_assert_eq!(&received.processes[process], passed);
        }
        prop_assert_eq!(received.available_cpu_seconds, 3.0);
        prop_assert_eq!(received.census_seconds_per_mib, 0.5);
    }
}
