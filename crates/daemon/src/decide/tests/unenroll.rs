//! Unenrolling: failed attempts, and during shutdown.

use super::*;

fn unenroll_times(host: &SimulatedHost, process: ProcessId) -> Vec<Duration> {
    let tries = host.trace.iter().filter_map(|(at, effect)| match effect {
        Effect::Unenroll(processes) if processes.contains_key(&process) => Some(*at),
        _ => None,
    });
    tries.collect()
}

/// The scopes in which a process was unenrolled.
fn unenroll_scopes(host: &SimulatedHost, process: ProcessId) -> Vec<UnenrollScope> {
    let scope = |effect: &Effect| match effect {
        Effect::Unenroll(scopes) => scopes.get(&process).copied(),
        _ => None,
    };
    host.trace.iter().filter_map(|(_, effect)| scope(effect)).collect()
}

fn count_censuses_with(host: &SimulatedHost, process: ProcessId) -> usize {
    host.count_effects(|effect| matches!(effect, Effect::Census(parts) if parts.contains_key(&process)))
}

/// A host on which these processes are merged.
fn host_with_merged(pids: &[u32]) -> SimulatedHost {
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    pids.iter().for_each(|&pid| host.deliver(arrival(pid)));
    host.run(12);
    assert_eq!(host.enrolled, pids.iter().map(|&pid| id(pid)).collect());
    host
}

#[test]
fn failed_unenroll_is_retried_with_backoff_and_reported_once() {
    for fails in [false, true] {
        let mut host = host_with_merged(&[1, 3]);
        host.cannot_unenroll.insert(id(1));
        host.unenroll_fails = fails;
        host.deliver(Event::Unenroll(id(1)));
        host.run(3600);
        let tries = unenroll_times(&host, id(1));
        let pauses: Vec<u64> = tries.windows(2).map(|pair| (pair[1] - pair[0]).as_secs()).collect();
        assert_eq!(pauses[..7], [10, 20, 40, 80, 160, 300, 300], "{tries:?}");
        assert!(tries.len() < 20, "{}", tries.len());
        assert_eq!(
            (
                host.count_decisions(DecisionKind::Unenroll, DecisionReason::Operator),
                host.count_decisions(DecisionKind::Refuse, DecisionReason::Refused)
            ),
            (1, 1)
        );
        let pending = host.state.tracked()[&id(1)].pending_unenroll.as_ref().unwrap();
        assert!(pending.last_failure.is_some() && pending.next_try > host.now, "the request is pending: {pending:?}");

        (host.unenroll_fails, host.cannot_unenroll) = (false, BTreeSet::new());
        host.run(301);
        assert_eq!(host.enrolled, BTreeSet::from([id(3)]));
        assert_eq!(
            host.count_decisions(DecisionKind::Unenroll, DecisionReason::Operator),
            2,
            "success after a failure is reported"
        );
        let tries = unenroll_times(&host, id(1)).len();
        host.run(1000);
        assert_eq!(unenroll_times(&host, id(1)).len(), tries, "no further attempts");
    }
}

#[test]
fn process_pending_unenroll_is_in_no_census_or_merge() {
    // The simulated host fails if a process with a pending request is scanned or merged.
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    host.losing.insert(id(1));
    host.cannot_unenroll.insert(id(1));
    host.deliver(arrival(1));
    host.run(12);
    assert_eq!(
        (
            host.count_decisions(DecisionKind::Unenroll, DecisionReason::NetLoss),
            host.count_decisions(DecisionKind::Refuse, DecisionReason::Refused)
        ),
        (1, 1)
    );
    let before = count_censuses_with(&host, id(1));
    for pid in [3, 5, 7] {
        host.deliver(arrival(pid));
        host.run(15);
        assert!(host.enrolled.contains(&id(pid)));
    }
    host.run(4000);
    assert_eq!(count_censuses_with(&host, id(1)), before, "it is not scanned on its own either");
    assert!(host.enrolled.contains(&id(1)));
    host.losing.clear();
    host.enrolled.remove(&id(1));
    host.deliver_and_forget_failure(id(1), Event::Enroll(id(1)));
    host.run(12);
    assert!(
        count_censuses_with(&host, id(1)) > before && host.enrolled.contains(&id(1)),
        "an operator enrolled it again"
    );
    let tries = unenroll_times(&host, id(1)).len();
    host.run(600);
    assert_eq!(unenroll_times(&host, id(1)).len(), tries, "and it is not unenrolled");
}

#[test]
fn operator_unenroll_is_tried_at_once_and_enroll_cancels_it() {
    let mut host = host_with_merged(&[1]);
    host.cannot_unenroll.insert(id(1));
    host.deliver(Event::Unenroll(id(1)));
    host.run(700);
    let tries = unenroll_times(&host, id(1)).len();
    host.deliver(Event::Unenroll(id(1)));
    assert_eq!(unenroll_times(&host, id(1)).len(), tries + 1);
    host.deliver_and_forget_failure(id(1), Event::Enroll(id(1)));
    host.run(700);
    assert_eq!(unenroll_times(&host, id(1)).len(), tries + 1, "the failed attempt came after that");
    assert!(host.state.tracked()[&id(1)].may_be_scanned());
}

/// A restarted daemon gets the operator commands of the killed one before it knows any process.
#[test]
fn process_unenrolled_before_arrival_is_never_scanned() {
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    [1, 2].into_iter().for_each(|pid| host.deliver(Event::Unenroll(id(pid))));
    host.deliver(Event::Enroll(id(2)));
    [1, 2].into_iter().for_each(|pid| host.deliver(arrival(pid)));
    host.run(60);
    assert!(host.state.tracked()[&id(1)].unenrolled_by_operator && count_censuses_with(&host, id(1)) == 0);
    assert!(count_censuses_with(&host, id(2)) > 0, "the command was revoked");
    host.deliver(Event::Enroll(id(1)));
    host.run(60);
    assert!(count_censuses_with(&host, id(1)) > 0);
}

#[test]
fn unenroll_retries_stay_within_the_cpu_budget() {
    let mut host = host_with_merged(&[1]);
    host.cannot_unenroll.insert(id(1));
    host.deliver(Event::Unenroll(id(1)));
    host.cpu_spent += Duration::from_secs(60);
    host.run(200);
    assert_eq!(unenroll_times(&host, id(1)).len(), 1);
    host.deliver(Event::Unenroll(id(1)));
    assert_eq!(unenroll_times(&host, id(1)).len(), 2, "an operator's request is tried at once");
    host.run(400);
    assert!(unenroll_times(&host, id(1)).len() > 2);
}

#[test]
fn lifted_exclusion_cancels_pending_unenroll() {
    let mut host = host_with_merged(&[1]);
    host.cannot_unenroll.insert(id(1));
    let Event::ProcessArrived(arrived) = arrival(1) else { unreachable!() };
    let excluded = ProcessArrival { exclusion_reason: Some("it holds keys".into()), ..arrived.clone() };
    host.deliver(Event::ProcessArrived(excluded));
    host.run(2);
    host.deliver(Event::Enroll(id(1)));
    assert!(host.state.tracked()[&id(1)].pending_unenroll.is_some(), "an operator cannot merge an excluded process");
    host.deliver_and_forget_failure(id(1), Event::ProcessArrived(arrived));
    let tries = unenroll_times(&host, id(1)).len();
    host.run(600);
    assert_eq!(unenroll_times(&host, id(1)).len(), tries);
    assert!(host.enrolled.contains(&id(1)) && host.state.tracked()[&id(1)].may_be_scanned());
}

#[test]
fn net_loss_unenrolls_only_what_the_daemon_enrolled() {
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    host.losing.insert(id(1));
    host.cannot_unenroll.insert(id(1));
    host.deliver(arrival(1));
    host.run(12);
    assert_eq!(unenroll_scopes(&host, id(1)), [UnenrollScope::DaemonEnrolled], "enrolling these caused the loss");
    let Event::ProcessArrived(arrived) = arrival(1) else { unreachable!() };
    host.deliver(Event::ProcessArrived(ProcessArrival { exclusion_reason: Some("it holds keys".into()), ..arrived }));
    host.run(2);
    assert_eq!(
        unenroll_scopes(&host, id(1)),
        [UnenrollScope::DaemonEnrolled, UnenrollScope::AllMerged],
        "a wider request does not wait for the next attempt"
    );

    let mut host = host_with_merged(&[3]);
    host.deliver(Event::Stop { unmerge: true });
    host.run(2);
    assert_eq!(unenroll_scopes(&host, id(3)), [UnenrollScope::DaemonEnrolled]);
    let mut host = host_with_merged(&[3]);
    host.deliver(Event::Unenroll(id(3)));
    assert_eq!(unenroll_scopes(&host, id(3)), [UnenrollScope::AllMerged]);
}

#[test]
fn process_that_changes_domain_is_unenrolled() {
    let Event::ProcessArrived(arrived) = arrival(1) else { unreachable!() };
    let moved =
        || Event::ProcessArrived(ProcessArrival { domain: TrustDomain::Group("apart".into()), ..arrived.clone() });
    let mut host = host_with_merged(&[1, 3]);
    host.deliver(Event::ProcessArrived(arrived.clone()));
    host.run(2);
    assert!(unenroll_scopes(&host, id(1)).is_empty(), "nothing has changed");
    host.deliver(moved());
    host.run(1);
    assert_eq!(
        (unenroll_scopes(&host, id(1)), unenroll_scopes(&host, id(3))),
        (vec![UnenrollScope::AllMerged], vec![])
    );
    assert_eq!(host.count_decisions(DecisionKind::Unenroll, DecisionReason::DomainChanged), 1);
    host.deliver(Event::Enroll(id(1)));
    host.run(60);
    assert!(host.enrolled.contains(&id(1)), "it is merged again, in its own domain");

    // A process that was alone in its domain shares no pages with its old domain, so its merged pages stay.
    let Event::ProcessArrived(other) = arrival(5) else { unreachable!() };
    host.deliver(Event::ProcessArrived(ProcessArrival {
        domain: TrustDomain::Vm(Some("web".into()), 5),
        ..other.clone()
    }));
    host.run(60);
    host.deliver(Event::ProcessArrived(ProcessArrival { domain: TrustDomain::Group("web".into()), ..other }));
    host.run(2);
    assert!(unenroll_scopes(&host, id(5)).is_empty() && host.enrolled.contains(&id(5)));

    // While all domains may be merged, changes of domain do not matter; once they may not, they do.
    let across = |across_domains| Event::RulesChanged(DaemonRules { across_domains, ..rules(DaemonMode::Act) });
    let mut host = host_with_merged(&[1, 3]);
    host.deliver(across(true));
    host.deliver(moved());
    host.run(2);
    assert!(unenroll_scopes(&host, id(1)).is_empty());
    host.deliver(across(false));
    host.run(2);
    assert_eq!(
        (unenroll_scopes(&host, id(1)), unenroll_scopes(&host, id(3))),
        (vec![UnenrollScope::AllMerged], vec![UnenrollScope::AllMerged])
    );
}

#[test]
fn domain_change_does_not_halt_tasks_on_other_processes() {
    for in_merge in [false, true] {
        let mut host = host_with_merged(&[2]);
        [1, 3].into_iter().for_each(|pid| host.deliver(arrival(pid)));
        let is_running = |host: &SimulatedHost| match &host.state.task {
            Some(DaemonTask::Census(CensusTask { processes, .. })) => !in_merge && processes.len() == 2,
            Some(DaemonTask::Merge(processes)) => in_merge && processes.len() == 2,
            _ => false,
        };
        while !is_running(&host) {
            host.tick();
        }
        let Event::ProcessArrived(other) = arrival(2) else { unreachable!() };
        host.deliver(Event::ProcessArrived(ProcessArrival { domain: TrustDomain::Group("apart".into()), ..other }));
        host.run(30);
        assert_eq!(host.count_effects(|effect| *effect == Effect::Halt), 0);
        assert_eq!(
            (unenroll_scopes(&host, id(1)), unenroll_scopes(&host, id(3))),
            (vec![], vec![]),
            "the task does not involve it"
        );
        assert_eq!(unenroll_scopes(&host, id(2)), [UnenrollScope::AllMerged]);
    }
}

#[test]
fn process_that_alternates_domains_is_merged_less_often() {
    let Event::ProcessArrived(arrived) = arrival(1) else { unreachable!() };
    let mut host = host_with_merged(&[1, 3]);
    let minutes = 240;
    for minute in 0..minutes {
        let domain = if minute % 2 == 0 { TrustDomain::Group("apart".into()) } else { arrived.domain.clone() };
        host.deliver(Event::ProcessArrived(ProcessArrival { domain, ..arrived.clone() }));
        host.run(60);
    }
    let unenroll_count = unenroll_scopes(&host, id(1)).len();
    assert!((1..minutes / 20).contains(&unenroll_count), "{unenroll_count} times in {minutes} minutes");
    assert!(unenroll_scopes(&host, id(3)).is_empty(), "the process that keeps its domain keeps its merges");
}

#[test]
fn operator_enroll_does_not_cancel_domain_unenroll() {
    let mut host = host_with_merged(&[1, 3]);
    host.cannot_unenroll.insert(id(1));
    let Event::ProcessArrived(arrived) = arrival(1) else { unreachable!() };
    host.deliver(Event::ProcessArrived(ProcessArrival { domain: TrustDomain::Group("apart".into()), ..arrived }));
    host.run(2);
    for event in [Event::Enroll(id(1)), Event::Unenroll(id(1)), Event::Enroll(id(1))] {
        host.deliver(event);
        assert!(host.state.tracked()[&id(1)].pending_unenroll.is_some());
    }
}

#[test]
fn domain_change_halts_the_running_task() {
    let Event::ProcessArrived(arrived) = arrival(1) else { unreachable!() };
    let moved = Event::ProcessArrived(ProcessArrival { domain: TrustDomain::Group("apart".into()), ..arrived });
    let stricter = Event::RulesChanged(rules(DaemonMode::Act));
    for (event, unenrolled) in [(moved, vec![id(1)]), (stricter, vec![id(1), id(3)])] {
        for in_merge in [false, true] {
            let across_domains = matches!(event, Event::RulesChanged(_));
            let mut host = SimulatedHost::new(DaemonRules { across_domains, ..rules(DaemonMode::Act) });
            [1, 3].into_iter().for_each(|pid| host.deliver(arrival(pid)));
            // Wait until a task is running that plans or merges both processes.
            let is_running = |host: &SimulatedHost| match &host.state.task {
                Some(DaemonTask::Census(CensusTask { due, .. })) => !in_merge && due.len() == 2,
                Some(DaemonTask::Merge(processes)) => in_merge && processes.len() == 2,
                _ => false,
            };
            while !is_running(&host) {
                host.tick();
            }
            let before = host.merge_cpu_shares().len();
            host.deliver(event.clone());
            assert_eq!(host.count_effects(|effect| *effect == Effect::Halt), 1);
            host.tick();
            if in_merge {
                host.run(1);
                unenrolled
                    .iter()
                    .for_each(|process| assert_eq!(unenroll_scopes(&host, *process), [UnenrollScope::AllMerged]));
            } else {
                assert_eq!(host.merge_cpu_shares().len(), before, "the outdated plan is dropped");
            }
            host.run(60);
            assert_eq!(host.enrolled, BTreeSet::from([id(1), id(3)]), "each in its own domain");
        }
    }
}

#[test]
fn wider_request_during_unenroll_is_carried_out() {
    for clings in [false, true] {
        let mut host = SimulatedHost::new(rules(DaemonMode::Act));
        host.losing.insert(id(1));
        if clings {
            host.cannot_unenroll.insert(id(1));
        }
        host.deliver(arrival(1));
        while unenroll_scopes(&host, id(1)).is_empty() {
            host.tick();
        }
        host.deliver(Event::Unenroll(id(1)));
        host.run(1);
        assert_eq!(unenroll_scopes(&host, id(1)), [UnenrollScope::DaemonEnrolled, UnenrollScope::AllMerged]);
    }
}

#[test]
fn self_enrolled_pages_are_unenrolled_when_excluded() {
    // It was in a merge in which none of its ranges had to be enrolled.
    let mut host = host_with_merged(&[1, 3]);
    let tracked = host.state.tracked.get_mut(&id(1)).unwrap();
    assert!(std::mem::take(&mut tracked.enrolled) && tracked.maybe_merged);
    let Event::ProcessArrived(arrived) = arrival(1) else { unreachable!() };
    host.deliver(Event::ProcessArrived(ProcessArrival { exclusion_reason: Some("it holds keys".into()), ..arrived }));
    host.run(1);
    assert_eq!(unenroll_scopes(&host, id(1)), [UnenrollScope::AllMerged]);
}

#[test]
fn stop_halts_a_running_unenroll() {
    let mut host = host_with_merged(&[1]);
    host.deliver(Event::Unenroll(id(1)));
    host.deliver(Event::Stop { unmerge: false });
    assert_eq!(host.count_effects(|effect| *effect == Effect::Halt), 1);
    let mut host = host_with_merged(&[1]);
    host.deliver(Event::Stop { unmerge: true });
    assert_eq!(host.count_effects(|effect| *effect == Effect::Halt), 0, "the running task is the awaited one");
}

#[test]
fn leaving_act_mode_restores_settings() {
    let mut host = host_with_merged(&[1]);
    host.deliver(Event::RulesChanged(rules(DaemonMode::Advise)));
    assert_eq!(host.count_decisions(DecisionKind::Restore, DecisionReason::Operator), 1);
    let mut host = host_with_merged(&[1]);
    host.deliver(Event::SettingsOverwritten("another program writes".into()));
    assert_eq!(host.count_decisions(DecisionKind::Restore, DecisionReason::OtherWriter), 1);
}

#[test]
fn unenroll_retry_interval_grows_with_its_cost() {
    let Event::ProcessArrived(arrival) = arrival(1) else { unreachable!() };
    let mut tracked = TrackedProcess::new(arrival, Duration::ZERO, &rules(DaemonMode::Act));
    tracked.request_unenroll(DecisionReason::Operator, Duration::ZERO);
    let long = Duration::from_secs(10);
    assert!(tracked.record_unenroll_failure("no".into(), long, Duration::ZERO));
    assert!(tracked.pending_unenroll.unwrap().next_try >= long * 200);
}

#[test]
fn only_processes_with_net_loss_are_unenrolled() {
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    host.losing.insert(id(3));
    [1, 3, 5].into_iter().for_each(|pid| host.deliver(arrival(pid)));
    host.run(12);
    let together = |effect: &Effect| matches!(effect, Effect::Merge { processes, .. } if processes.len() == 3);
    assert_eq!(host.count_effects(together), 1);
    assert_eq!(host.enrolled, BTreeSet::from([id(1), id(5)]));
    assert_eq!(
        host.count_decisions(DecisionKind::Unenroll, DecisionReason::NetLoss),
        1,
        "it is not merged again as a partner either"
    );
    let pause = |pid| host.state.tracked()[&id(pid)].scan_interval;
    assert!(pause(3) >= pause(1) * 4, "{:?}, {:?}", pause(3), pause(1));
}

/// After a halt there is metadata of pages that ksmd scanned once, and nothing is merged.
#[test]
fn halted_merge_is_judged_by_the_next_one() {
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    host.losing.extend([id(1), id(3)]);
    (host.merge_seconds, host.wait_share) = (5.0, 0.4);
    host.run(5);
    [1, 3].into_iter().for_each(|pid| host.deliver(arrival(pid)));
    host.run(11);
    assert_eq!((host.merge_cpu_shares().len(), host.count_effects(|effect| *effect == Effect::Halt)), (1, 1));
    assert_eq!(host.enrolled, BTreeSet::from([id(1), id(3)]));
    // More ranges of one of them are to be enrolled.
    host.wait_share = 0.0;
    host.enrolled.remove(&id(1));
    host.run(30);
    assert_eq!((host.merge_cpu_shares().len(), host.enrolled.len()), (2, 1));
    assert_eq!(host.count_decisions(DecisionKind::Unenroll, DecisionReason::NetLoss), 1);
    // The other one has no new ranges: it still has the loss of the halted merge.
    let nets = BTreeMap::from([(id(3), NetBytes(MIB as i64 / 2))]);
    host.deliver(Event::MergeDone(MergeSummary { nets, ..MergeSummary::default() }));
    host.run(2);
    assert!(!host.enrolled.contains(&id(3)));
    assert_eq!(host.count_decisions(DecisionKind::Unenroll, DecisionReason::NetLoss), 2);
}

#[test]
fn stop_with_unmerge_reacquires_a_paused_host() {
    // A paused daemon has released the host. A stop with unmerging still unmerges its pages.
    let mut host = host_with_merged(&[1]);
    host.deliver(Event::Pause);
    host.run(2);
    assert!(!host.acquired);
    host.deliver(Event::Stop { unmerge: true });
    host.run(2);
    assert_eq!((host.enrolled.len(), host.acquired, host.ended()), (0, false, Some(true)));
}

/// Why a process stays merged, and how that comes about.
type StayMergedCase<'a> = (&'a str, &'a dyn Fn(&mut SimulatedHost));

#[test]
fn stop_reports_processes_that_stay_merged() {
    let refusals = |host: &SimulatedHost| {
        let decisions = host.trace.iter().filter_map(|(_, effect)| match effect {
            Effect::Report(decision)
                if (decision.kind, decision.reason) == (DecisionKind::Refuse, DecisionReason::Stopped) =>
            {
                Some(decision)
            }
            _ => None,
        });
        decisions.map(|decision| (decision.processes.clone(), decision.explanation.clone())).collect::<Vec<_>>()
    };
    let cases: [StayMergedCase<'_>; 5] = [
        ("there is no memory", &|host| _ = host.cannot_unenroll.insert(id(1))),
        ("the journal cannot be written", &|host| host.unenroll_fails = true),
        ("it only advises", &|host| host.deliver(Event::RulesChanged(rules(DaemonMode::Advise)))),
        ("another program writes", &|host| host.deliver(Event::SettingsOverwritten("another program writes".into()))),
        ("another pagefold", &|host| {
            host.deliver(Event::Pause);
            host.host_busy_reason = Some("another pagefold".into());
        }),
    ];
    for (why, make_host_fail) in cases {
        let mut host = host_with_merged(&[1]);
        make_host_fail(&mut host);
        host.run(20);
        host.deliver(Event::Stop { unmerge: true });
        host.run(2);
        assert_eq!((host.ended(), host.acquired), (Some(false), false), "{why}: {:?}", host.trace);
        assert_eq!(refusals(&host), [(vec![id(1)], format!("it stays merged: {why}"))]);
        assert!(host.enrolled.contains(&id(1)));

        // A stop without unmerging reports nothing.
        let mut host = host_with_merged(&[1]);
        make_host_fail(&mut host);
        host.run(20);
        host.deliver(Event::Stop { unmerge: false });
        host.run(2);
        assert_eq!((host.ended(), refusals(&host)), (Some(true), Vec::new()), "{why}");
    }
}

#[test]
fn unrestored_settings_are_reported_at_exit() {
    let mut host = host_with_merged(&[1]);
    host.restore_completes = false;
    host.deliver(Event::Stop { unmerge: false });
    host.run(2);
    assert_eq!(host.ended(), Some(false));
}

#[test]
fn inaction_reason_is_available() {
    let mut host = host_with_merged(&[1]);
    assert_eq!(host.state.inaction_reason(), None);
    host.deliver(Event::SettingsOverwritten("another program writes".into()));
    assert_eq!(host.state.inaction_reason().as_deref(), Some("another program writes"));
    assert_eq!(host.state.scan_block_reason().as_deref(), Some("another program writes"));
    host.deliver(Event::Pause);
    assert_eq!(host.state.inaction_reason().as_deref(), Some("an operator paused it"));
    assert_eq!(host.state.scan_block_reason().as_deref(), Some("an operator paused it"));
    for (mode, why) in [(DaemonMode::Observe, "it only observes"), (DaemonMode::Advise, "it only advises")] {
        host.deliver(Event::RulesChanged(rules(mode)));
        assert_eq!(host.state.inaction_reason().as_deref(), Some(why));
    }
}

/// It has nothing to unenroll until it is merged.
#[test]
fn process_excluded_during_merge_is_unenrolled_after_it() {
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    host.merge_seconds = 5.0;
    host.deliver(arrival(1));
    let begun = |host: &SimulatedHost| host.count_effects(|effect| matches!(effect, Effect::Merge { .. })) > 0;
    while !begun(&host) {
        host.run(1);
    }
    let Event::ProcessArrived(arrived) = arrival(1) else { unreachable!() };
    host.deliver(Event::ProcessArrived(ProcessArrival { exclusion_reason: Some("it holds keys".into()), ..arrived }));
    assert!(host.enrolled.contains(&id(1)) && unenroll_times(&host, id(1)).is_empty());
    host.run(10);
    assert!(host.enrolled.is_empty());
    assert_eq!(host.count_decisions(DecisionKind::Unenroll, DecisionReason::Excluded), 1);
}

#[test]
fn earlier_merged_pages_survive_a_later_loss() {
    let mut host = host_with_merged(&[1, 3]);
    let loss = NetBytes(-(MIB as i64));
    let nets = BTreeMap::from([(id(1), loss)]);
    host.deliver(Event::MergeDone(MergeSummary { enrolled: vec![id(1)], net: loss, nets, ..MergeSummary::default() }));
    host.run(10);
    assert_eq!(host.enrolled, BTreeSet::from([id(1), id(3)]));
    assert!(!host.state.tracked()[&id(1)].may_be_scanned(), "and no further ranges are merged for a while");
}

#[test]
fn failed_merge_is_unenrolled() {
    let mut host = host_with_merged(&[1]);
    host.merge_seconds = 5.0;
    host.deliver(arrival(3));
    let merges = |host: &SimulatedHost| host.count_effects(|effect| matches!(effect, Effect::Merge { .. }));
    while merges(&host) < 2 {
        host.run(1);
    }
    assert_eq!(host.enrolled, BTreeSet::from([id(1), id(3)]), "partially enrolled");
    host.pending_answer = None;
    host.deliver(Event::TaskFailed("the journal cannot be written".into()));
    host.run(3);
    assert_eq!(host.enrolled, BTreeSet::from([id(1)]));
    assert_eq!(host.count_decisions(DecisionKind::Unenroll, DecisionReason::Failed), 1);
}

#[test]
fn stop_that_keeps_merges_reports_pending_unenrolls() {
    for (cannot_unenroll, complete) in [(true, false), (false, true)] {
        let mut host = host_with_merged(&[1, 3]);
        if cannot_unenroll {
            host.cannot_unenroll.insert(id(1));
        }
        host.deliver(Event::Unenroll(id(1)));
        host.run(2);
        host.deliver(Event::Stop { unmerge: false });
        host.run(2);
        assert_eq!(host.ended(), Some(complete));
        assert_eq!(host.count_decisions(DecisionKind::Refuse, DecisionReason::Stopped), usize::from(!complete));
        assert!(host.enrolled.contains(&id(3)));
    }
}

/// A merge may end before ksmd has visited all processes.
#[test]
fn merge_does_not_replace_a_sweep() {
    let is =
        |what: fn(&Effect) -> bool| move |host: &SimulatedHost| host.trace.iter().position(|(_, effect)| what(effect));
    let mut host = host_with_merged(&[1, 3]);
    host.trace.clear();
    host.deliver(arrival(5));
    host.run(4);
    host.deliver(Event::ProcessExited(id(1)));
    host.run(30);
    let merge = is(|effect| matches!(effect, Effect::Merge { .. }))(&host);
    let sweep = is(|effect| matches!(effect, Effect::Sweep))(&host);
    assert!(merge.is_some() && merge < sweep, "{:?}", host.trace);
}

/// A process that exits during its first merge is swept, too.
#[test]
fn process_that_ends_during_first_merge_is_swept() {
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    host.merge_seconds = 5.0;
    [1, 3].into_iter().for_each(|pid| host.deliver(arrival(pid)));
    let merges = |host: &SimulatedHost| host.count_effects(|effect| matches!(effect, Effect::Merge { .. }));
    while merges(&host) == 0 {
        host.run(1);
    }
    [1, 3].into_iter().for_each(|pid| host.deliver(Event::ProcessExited(id(pid))));
    host.run(30);
    assert_eq!((merges(&host), host.count_effects(|effect| matches!(effect, Effect::Sweep))), (1, 1));
}
