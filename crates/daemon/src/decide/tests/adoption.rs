//! A daemon that follows another one.

use super::properties::any_step;
use super::*;
use proptest::prelude::*;

fn scope_of(process: ProcessId) -> SharingScope {
    SharingScope::of_merge(&TrustDomain::User(process.pid.0 % 2), false)
}

impl SimulatedHost {
    /// The daemon ends or is killed, and another one starts. An unfinished merge is undone.
    pub(super) fn restart(&mut self, rules: DaemonRules) {
        if let Some((_, Event::MergeDone(summary))) = self.pending_answer.take() {
            self.enrolled.retain(|process| !summary.enrolled.contains(process));
        }
        self.recorded = self.enrolled.iter().map(|process| (*process, [scope_of(*process)].into())).collect();
        self.state = DaemonState::new(rules, 7, self.now, self.cpu_spent);
        (self.acquired, self.unenroll_failed) = (false, BTreeSet::new());
        self.trace.clear();
    }

    fn unenrolled(&self) -> BTreeMap<ProcessId, UnenrollScope> {
        let scopes = self.trace.iter().filter_map(|(_, effect)| match effect {
            Effect::Unenroll(scopes) => Some(scopes.clone()),
            _ => None,
        });
        scopes.flatten().collect()
    }
}

/// A host on which these processes were merged before the daemon was restarted.
fn restarted_host(pids: &[u32], rules: DaemonRules) -> SimulatedHost {
    let mut host = SimulatedHost::new(super::rules(DaemonMode::Act));
    pids.iter().for_each(|&pid| host.deliver(arrival(pid)));
    host.run(12);
    assert_eq!(host.enrolled, pids.iter().map(|&pid| id(pid)).collect());
    host.restart(rules);
    host
}

fn arrival_with(pid: u32, change: impl Fn(ProcessArrival) -> ProcessArrival) -> Event {
    let Event::ProcessArrived(arrived) = arrival(pid) else { unreachable!() };
    Event::ProcessArrived(change(arrived))
}

#[test]
fn merged_processes_are_watched_and_unenrolled_after_a_restart() {
    for arrives_first in [true, false] {
        let mut host = restarted_host(&[1, 3], rules(DaemonMode::Act));
        if arrives_first {
            [1, 3].into_iter().for_each(|pid| host.deliver(arrival(pid)));
            host.run(1);
        } else {
            host.run(1);
            [1, 3].into_iter().for_each(|pid| host.deliver(arrival(pid)));
        }
        assert_eq!(host.count_decisions(DecisionKind::Adopt, DecisionReason::Restarted), 1);
        let is_adopted = |tracked: &TrackedProcess| tracked.enrolled && tracked.maybe_merged && tracked.net_known;
        assert!(host.state.tracked().len() == 2 && host.state.tracked().values().all(is_adopted));
        host.run(20);
        assert!(host.count_effects(|effect| matches!(effect, Effect::CheckMerged { unenroll: true })) > 1);
        assert!(host.unenrolled().is_empty());
        host.deliver(Event::Stop { unmerge: true });
        host.run(2);
        let scope = UnenrollScope::DaemonEnrolled;
        assert_eq!(host.unenrolled(), BTreeMap::from([(id(1), scope), (id(3), scope)]));
        assert_eq!((host.enrolled.len(), host.ended()), (0, Some(true)));
    }
}

#[test]
fn merge_that_was_under_way_is_not_taken_over() {
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    host.merge_seconds = 5.0;
    host.deliver(arrival(1));
    while !host.trace.iter().any(|(_, effect)| matches!(effect, Effect::Merge { .. })) {
        host.run(1);
    }
    host.restart(rules(DaemonMode::Act));
    host.deliver(arrival(1));
    host.run(1);
    assert_eq!(host.count_decisions(DecisionKind::Adopt, DecisionReason::Restarted), 0);
    assert!(!host.state.tracked()[&id(1)].enrolled);
    host.run(20);
    assert!(host.enrolled.contains(&id(1)), "it is merged again");
}

#[test]
fn changed_configuration_unenrolls_what_it_forbids() {
    let excluded = |arrival| ProcessArrival { exclusion_reason: Some("it holds keys".into()), ..arrival };
    let moved = |arrival| ProcessArrival { domain: TrustDomain::Group("apart".into()), ..arrival };
    type Change = fn(ProcessArrival) -> ProcessArrival;
    let cases: [(Change, Option<DecisionReason>); 3] = [
        (|arrival| arrival, None),
        (excluded, Some(DecisionReason::Excluded)),
        (moved, Some(DecisionReason::DomainChanged)),
    ];
    for (change, reason) in cases {
        for arrives_first in [true, false] {
            let mut host = restarted_host(&[1, 3], rules(DaemonMode::Act));
            let arrive = |host: &mut SimulatedHost| {
                host.deliver(arrival_with(1, change));
                host.deliver(arrival(3));
            };
            if arrives_first {
                arrive(&mut host);
                host.run(2);
            } else {
                host.run(1);
                arrive(&mut host);
                host.run(1);
            }
            let expected = reason.map(|_| (id(1), UnenrollScope::AllMerged));
            assert_eq!(host.unenrolled(), expected.into_iter().collect(), "{reason:?}");
            if let Some(reason) = reason {
                assert_eq!(host.count_decisions(DecisionKind::Unenroll, reason), 1);
            }
        }
    }
}

#[test]
fn merges_across_domains_end_when_they_are_forbidden() {
    for (across_domains, unenrolled) in [(true, 0), (false, 1)] {
        let mut host = restarted_host(&[1, 3], DaemonRules { across_domains, ..rules(DaemonMode::Act) });
        host.recorded[0].1 = [SharingScope::AllDomains].into();
        [1, 3].into_iter().for_each(|pid| host.deliver(arrival(pid)));
        host.run(2);
        assert_eq!(host.unenrolled().len(), unenrolled);
    }
}

#[test]
fn forbidden_merges_stay_while_memory_is_short() {
    let mut host = restarted_host(&[1], rules(DaemonMode::Act));
    host.pressure = 90.0;
    let excluded = |arrival| ProcessArrival { exclusion_reason: Some("it holds keys".into()), ..arrival };
    host.deliver(arrival_with(1, excluded));
    host.run(20);
    assert!(host.unenrolled().is_empty() && host.enrolled.contains(&id(1)));
    assert!(
        host.count_effects(|effect| matches!(effect, Effect::CheckMerged { unenroll: false })) > 0,
        "merged pages are still checked"
    );
    host.pressure = 0.0;
    host.run(1);
    assert!(host.enrolled.is_empty());
}

#[test]
fn operator_unenrolls_a_process_of_the_previous_daemon() {
    let mut host = restarted_host(&[1, 3], rules(DaemonMode::Act));
    // The saved command of an operator, which the previous daemon did not carry out.
    host.deliver(Event::Unenroll(id(1)));
    host.run(1);
    [1, 3].into_iter().for_each(|pid| host.deliver(arrival(pid)));
    host.run(1);
    assert_eq!(host.unenrolled(), BTreeMap::from([(id(1), UnenrollScope::AllMerged)]));
}

#[test]
fn earlier_merges_survive_a_later_loss() {
    let mut host = restarted_host(&[1, 3], rules(DaemonMode::Act));
    host.run(1);
    [1, 3].into_iter().for_each(|pid| host.deliver(arrival(pid)));
    host.run(1);
    // Another merge of it, of memory that it has now.
    host.enrolled.remove(&id(1));
    host.losing.insert(id(1));
    host.run(60);
    assert!(host.enrolled.contains(&id(1)) && host.unenrolled().is_empty(), "{:?}", host.unenrolled());
}

#[test]
fn stop_unenrolls_processes_that_have_not_arrived_yet() {
    for fails in [false, true] {
        let mut host = restarted_host(&[1, 3], rules(DaemonMode::Act));
        host.run(1);
        host.deliver(Event::ProcessExited(id(3)));
        host.cannot_unenroll.extend(fails.then_some(id(1)));
        host.deliver(Event::Stop { unmerge: true });
        host.run(2);
        assert_eq!(host.unenrolled(), BTreeMap::from([(id(1), UnenrollScope::DaemonEnrolled)]));
        assert_eq!(host.ended(), Some(!fails), "{:?}", host.trace);
        assert_eq!(host.count_decisions(DecisionKind::Refuse, DecisionReason::Stopped), usize::from(fails));
    }
}

#[test]
fn stop_unenrolls_before_the_host_was_ever_acquired() {
    let mut host = restarted_host(&[1], rules(DaemonMode::Act));
    host.deliver(Event::Pause);
    host.deliver(arrival(1));
    host.run(5);
    assert!(!host.acquired);
    host.deliver(Event::Stop { unmerge: true });
    host.run(2);
    assert_eq!((host.enrolled.len(), host.acquired, host.ended()), (0, false, Some(true)));
    // Nothing was merged before.
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    host.deliver(Event::Pause);
    host.run(1);
    host.deliver(Event::Stop { unmerge: true });
    host.run(2);
    assert_eq!((host.acquired, host.ended()), (false, Some(true)));
}

#[test]
fn hand_over_keeps_merges_and_operator_commands() {
    let mut host = restarted_host(&[1], rules(DaemonMode::Act));
    host.deliver(arrival(1));
    host.run(2);
    assert!(!host.state.hands_over());
    host.deliver(Event::HandOver);
    host.deliver(Event::Stop { unmerge: true });
    host.run(2);
    assert!(host.state.hands_over() && host.unenrolled().is_empty() && !host.acquired);
    assert_eq!(host.ended(), Some(true));
    let mut host = restarted_host(&[1], rules(DaemonMode::Act));
    host.deliver(Event::Stop { unmerge: false });
    host.deliver(Event::HandOver);
    assert!(!host.state.hands_over(), "the first request counts");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64.min(ProptestConfig::default().cases)))]

    /// Whatever happened before and after a restart, a stop with unmerging unenrolls each process or reports it.
    #[test]
    fn stop_after_a_restart_unenrolls_or_reports_each_process(
        before in prop::collection::vec(any_step(), 1..30),
        after in prop::collection::vec(any_step(), 0..20),
        arrived in any::<bool>(),
    ) {
        let base = rules(DaemonMode::Act);
        let mut host = SimulatedHost::new(base.clone());
        host.apply_steps(&before, &base);
        let running: Vec<ProcessId> = host.state.tracked().keys().copied().collect();
        host.restart(base.clone());
        if arrived {
            running.iter().for_each(|process| host.deliver(arrival(process.pid.0)));
        }
        host.apply_steps(&after, &base);
        host.remove_obstacles();
        host.run(2);
        let from = host.trace.len();
        host.deliver(Event::Stop { unmerge: true });
        host.run(3);
        let is_reported = |process: &ProcessId| {
            host.trace[from..].iter().any(|(_, effect)| matches!(effect, Effect::Report(decision)
                if decision.kind == DecisionKind::Refuse && decision.processes == [*process]))
        };
        let is_excused = |process: &ProcessId| host.cannot_unenroll.contains(process) && is_reported(process);
        prop_assert!(host.enrolled.iter().all(is_excused), "{:?}", host.enrolled);
        prop_assert_eq!(host.ended(), Some(host.enrolled.is_empty() && host.unenroll_failed.is_empty()));
    }
}
