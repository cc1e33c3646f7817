//! Each process is judged by its own cost.

use super::*;
use proptest::prelude::*;

fn merged_process_sets(host: &SimulatedHost) -> Vec<Vec<ProcessId>> {
    let merges = host.trace.iter().filter_map(|(_, effect)| match effect {
        Effect::Merge { processes, .. } => Some(processes.clone()),
        _ => None,
    });
    merges.collect()
}

fn first_explanation(host: &SimulatedHost, kind: DecisionKind) -> Option<&str> {
    host.trace.iter().find_map(|(_, effect)| match effect {
        Effect::Report(decision) if decision.kind == kind => Some(decision.explanation.as_str()),
        _ => None,
    })
}

#[test]
fn unprofitable_process_is_skipped_and_others_are_merged() {
    // For each process: 50 ms of ksmd and half of a census of 200 ms. That is 0.009 s per MiB for 16 MiB, and 0.15 s
    // for 1 MiB.
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    host.planned_net.insert(id(3), NetBytes(MIB as i64));
    [1, 3].into_iter().for_each(|pid| host.deliver(arrival(pid)));
    host.run(9);
    assert_eq!(merged_process_sets(&host), [[id(1)]]);
    assert_eq!(first_explanation(&host, DecisionKind::Merge), Some("it should save 16.0 MiB at 0.009 CPU s per MiB"));
    let unprofitable = "it would save 1.00 MiB at 0.150 CPU s per MiB (limit: 0.02)";
    assert_eq!(first_explanation(&host, DecisionKind::Skip), Some(unprofitable));
    let pauses = [1, 3].map(|pid| host.state.tracked()[&id(pid)].scan_interval);
    assert!(pauses[1] > pauses[0], "it is scanned less and less often: {pauses:?}");
    // As a partner of other processes it is judged again, but reported only when its own scan is due.
    host.deliver(arrival(5));
    host.run(60);
    let is_due_scan = |effect: &Effect| match effect {
        Effect::Report(decision) => decision.kind == DecisionKind::Census && decision.processes.contains(&id(3)),
        _ => false,
    };
    let scan_count = host.count_effects(|effect| matches!(effect, Effect::Census(parts) if parts.contains_key(&id(3))));
    let (due_scan_count, report_count) =
        (host.count_effects(is_due_scan), host.count_decisions(DecisionKind::Skip, DecisionReason::Unprofitable));
    assert!(
        report_count < due_scan_count && due_scan_count < scan_count,
        "{report_count}, {due_scan_count}, {scan_count}: the first scan only records its pages"
    );
}

/// A fruitless scan of a big process is not charged to a small one in the same census.
#[test]
fn census_cost_is_divided_by_scanned_memory() {
    let resident = |pid: u32, mib: u64| {
        let Event::ProcessArrived(arrival) = arrival(pid) else { unreachable!() };
        Event::ProcessArrived(ProcessArrival { resident: Bytes(mib * MIB), ..arrival })
    };
    let merged = |sizes: [u64; 2]| {
        let mut host = SimulatedHost::new(rules(DaemonMode::Act));
        host.planned_net = [1, 3].into_iter().map(|pid| (id(pid), NetBytes(8 * MIB as i64))).collect();
        // 2 s for both; the limit for 8 MiB is 0.16 s.
        host.census_seconds = 2.0;
        host.deliver(resident(1, sizes[0]));
        host.deliver(resident(3, sizes[1]));
        host.run(30);
        host.enrolled
    };
    assert_eq!(merged([2048, 64]), BTreeSet::from([id(3)]));
    assert_eq!(merged([64, 2048]), BTreeSet::from([id(1)]));
    assert_eq!(merged([64, 64]), BTreeSet::new());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64.min(ProptestConfig::default().cases)))]

    /// Exactly the processes within the cost limit are merged, whatever other processes are scanned with them. Up to 2
    /// GiB are one portion.
    #[test]
    fn each_process_is_judged_by_its_own_cost(
        savings in prop::collection::vec((0i64..40, 16u64..400), 1..6),
        max_cost in 0.001f64..0.1,
        seconds in 1u32..8,
    ) {
        let mut host = SimulatedHost::new(DaemonRules { max_cpu_seconds_per_mib: max_cost, burst: Duration::from_secs(1000), ..rules(DaemonMode::Act) });
        host.census_seconds = f64::from(seconds) / 4.0;
        let total_mib: u64 = savings.iter().map(|(_, resident)| resident).sum();
        let mut expected = BTreeSet::new();
        for (&(saved_mib, resident), pid) in savings.iter().zip((0..).step_by(2)) {
            let Event::ProcessArrived(arrived) = arrival(pid) else { unreachable!() };
            host.planned_net.insert(id(pid), NetBytes(saved_mib * MIB as i64));
            host.deliver(Event::ProcessArrived(ProcessArrival { resident: Bytes(resident * MIB), ..arrived }));
            let cost = 0.05 + host.census_seconds * resident as f64 / total_mib as f64;
            // Costs at the limit itself depend on rounding.
            prop_assume!((cost - max_cost * saved_mib as f64).abs() > 1e-6);
            if saved_mib > 0 && cost <= max_cost * saved_mib as f64 {
                expected.insert(id(pid));
            }
        }
        host.run(10);
        let first = merged_process_sets(&host).first().cloned().unwrap_or_default();
        prop_assert_eq!(first.into_iter().collect::<BTreeSet<_>>(), expected);
    }
}
