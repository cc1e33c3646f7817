//! Memory shortage on the host, or in a process's cgroup.

use super::properties::any_step;
use super::*;
use pagefold_base::memory::Shortage;
use proptest::prelude::*;

/// Set or clear memory pressure in a process's cgroup.
fn set_cgroup_pressure(host: &mut SimulatedHost, pid: u32, short: bool) {
    let pressure_percent = Some(if short { 50.0 } else { 0.0 });
    host.deliver(Event::Tick(TickReadings {
        cpu_spent: host.cpu_spent,
        available: Some(host.available),
        pressure_percent: Some(host.pressure),
        cgroup_shortages: vec![(id(pid), Shortage { pressure_percent, left_share: None })],
        ..TickReadings::default()
    }));
}

#[test]
fn low_available_memory_counts_as_short_without_psi() {
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    host.net_per_process = -16 * (MIB as i64);
    host.total = Some(Bytes(1 << 34));
    host.available = Bytes(1 << 29);
    host.deliver(arrival(1));
    host.run(10);
    assert!(host.enrolled.contains(&id(1)), "nothing is unenrolled while memory is short");
    host.available = Bytes(1 << 30);
    host.run(1);
    assert!(host.enrolled.is_empty());
}

#[test]
fn process_in_short_cgroup_stays_enrolled() {
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    host.net_per_process = -16 * (MIB as i64);
    [1, 2].into_iter().for_each(|pid| host.deliver(arrival(pid)));
    set_cgroup_pressure(&mut host, 1, true);
    host.run(12);
    assert_eq!(host.count_decisions(DecisionKind::Merge, DecisionReason::Profitable), 2);
    assert_eq!(host.enrolled, BTreeSet::from([id(1)]));
    set_cgroup_pressure(&mut host, 1, false);
    host.run(1);
    assert!(host.enrolled.is_empty(), "unenrolling was only deferred");
}

#[test]
fn process_in_short_cgroup_is_merged_during_a_pause() {
    let goal = DaemonRules { keep_available: Some(Bytes(1 << 30)), ..rules(DaemonMode::Act) };
    for (rules, wait_share) in [(goal, 0.0), (rules(DaemonMode::Act), 0.4)] {
        let mut host = SimulatedHost::new(rules);
        (host.merge_seconds, host.wait_share) = (5.0, wait_share);
        // This process shows that the daemon slows programs down.
        host.run(5);
        host.deliver(arrival(2));
        host.run(8);
        let (before, paused_status) = (host.count_effects(is_census), host.state.status());
        host.deliver(arrival(4));
        host.deliver(arrival(1));
        host.run(2);
        assert_eq!(host.count_effects(is_census), before, "{paused_status:?}");
        set_cgroup_pressure(&mut host, 1, true);
        host.run(2);
        let last_census = host.trace.iter().rev().find(|(_, effect)| is_census(effect));
        assert!(host.count_effects(is_census) > before, "{paused_status:?}");
        assert_eq!(
            last_census.map(|(_, effect)| effect),
            Some(&Effect::Census([(id(1), vec![ScanPart::WHOLE])].into())),
            "and no other process"
        );
        host.run(1);
        if wait_share > 0.0 {
            assert_eq!(host.state.status(), paused_status, "all other processes stay paused");
        }
    }
}

#[test]
fn process_in_short_cgroup_is_scanned_first() {
    let first = |is_short: bool| {
        // The portion has room for two processes.
        let mut host = SimulatedHost::new(DaemonRules {
            burst: Duration::from_millis(70),
            cpu_rate: 0.001,
            ..rules(DaemonMode::Advise)
        });
        [1, 3, 5, 7].into_iter().for_each(|pid| host.deliver(arrival(pid)));
        set_cgroup_pressure(&mut host, 7, is_short);
        host.run(2);
        let census = host.trace.into_iter().find(|(_, effect)| is_census(effect)).map(|(_, effect)| effect);
        matches!(census, Some(Effect::Census(parts)) if parts.len() == 2 && parts.contains_key(&id(7)))
    };
    assert_eq!([false, true].map(first), [false, true]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64.min(ProptestConfig::default().cases)))]

    /// This holds for any sequence of steps: the simulated host asserts it at each unenroll effect.
    #[test]
    fn no_unenroll_while_cgroup_memory_is_short(
        steps in prop::collection::vec((any_step(), 0u32..8, any::<bool>()), 1..40),
    ) {
        let base = rules(DaemonMode::Act);
        let mut host = SimulatedHost::new(base.clone());
        for (step, pid, short) in steps {
            set_cgroup_pressure(&mut host, pid, short);
            host.apply_steps(&[step], &base);
        }
    }
}

/// First scans of new processes only record their pages, and no merge follows them.
#[test]
fn process_in_short_cgroup_does_not_wait_for_arrivals() {
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    host.deliver(arrival(1));
    host.run(3);
    assert!(host.state.tracked()[&id(1)].last_scan.is_some() && host.enrolled.is_empty());
    set_cgroup_pressure(&mut host, 1, true);
    for pid in 1..40 {
        host.deliver(arrival(2 * pid + 1));
        host.run(1);
    }
    assert!(host.enrolled.contains(&id(1)), "{:?}", host.trace);
}

#[test]
fn cost_limit_is_ignored_while_memory_is_short() {
    for short in [false, true] {
        let mut host = SimulatedHost::new(rules(DaemonMode::Act));
        // 2 s for 8 MiB.
        (host.net_per_process, host.census_seconds) = (8 * MIB as i64, 2.0);
        host.deliver(arrival(1));
        set_cgroup_pressure(&mut host, 1, short);
        host.run(30);
        assert_eq!(host.enrolled.contains(&id(1)), short);
    }
}
