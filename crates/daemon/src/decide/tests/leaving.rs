//! Withdrawals: those that are refused, and those at the end.

use super::*;

fn withdrawals(host: &Host, process: ProcessId) -> Vec<Duration> {
    let tries = host.trace.iter().filter_map(|(at, action)| match action {
        Action::Withdraw(processes) if processes.contains_key(&process) => Some(*at),
        _ => None,
    });
    tries.collect()
}

/// What was withdrawn of a process, each time.
fn extents(host: &Host, process: ProcessId) -> Vec<Extent> {
    let of = |action: &Action| match action {
        Action::Withdraw(extents) => extents.get(&process).copied(),
        _ => None,
    };
    host.trace.iter().filter_map(|(_, action)| of(action)).collect()
}

fn censuses_of(host: &Host, process: ProcessId) -> usize {
    host.did(|action| matches!(action, Action::Census(processes) if processes.contains(&process)))
}

/// A host on which these are merged.
fn merged(pids: &[u32]) -> Host {
    let mut host = Host::new(rules(Mode::Act));
    pids.iter().for_each(|&pid| host.happen(arrival(pid)));
    host.run(12);
    assert_eq!(host.enrolled, pids.iter().map(|&pid| id(pid)).collect());
    host
}

#[test]
fn who_cannot_be_withdrawn_is_tried_again_later_each_time_and_told_of_once() {
    for fails in [false, true] {
        let mut host = merged(&[1, 3]);
        host.clings.insert(id(1));
        host.fails = fails;
        host.happen(Event::Withdraw(id(1)));
        host.run(3600);
        let tries = withdrawals(&host, id(1));
        let pauses: Vec<u64> = tries.windows(2).map(|two| (two[1] - two[0]).as_secs()).collect();
        assert_eq!(pauses[..7], [10, 20, 40, 80, 160, 300, 300], "{tries:?}");
        assert!(tries.len() < 20, "{}", tries.len());
        assert_eq!((host.said(What::Withdraw, Reason::Operator), host.said(What::Refuse, Reason::Refused)), (1, 1));
        let leaving = host.state.members()[&id(1)].leaving.as_ref().unwrap();
        assert!(leaving.refused.is_some() && leaving.next > host.now, "it is known meanwhile: {leaving:?}");

        (host.fails, host.clings) = (false, BTreeSet::new());
        host.run(301);
        assert_eq!(host.enrolled, BTreeSet::from([id(3)]));
        assert_eq!(host.said(What::Withdraw, Reason::Operator), 2, "what was refused is told when it is done");
        let tries = withdrawals(&host, id(1)).len();
        host.run(1000);
        assert_eq!(withdrawals(&host, id(1)).len(), tries, "it is over");
    }
}

#[test]
fn who_is_to_be_withdrawn_is_nobodys_partner() {
    // The host fails where somebody is looked at or merged that it was told to withdraw.
    let mut host = Host::new(rules(Mode::Act));
    host.loses.insert(id(1));
    host.clings.insert(id(1));
    host.happen(arrival(1));
    host.run(12);
    assert_eq!((host.said(What::Withdraw, Reason::Loses), host.said(What::Refuse, Reason::Refused)), (1, 1));
    let before = censuses_of(&host, id(1));
    for pid in [3, 5, 7] {
        host.happen(arrival(pid));
        host.run(15);
        assert!(host.enrolled.contains(&id(pid)));
    }
    host.run(4000);
    assert_eq!(censuses_of(&host, id(1)), before, "its own turn does not come either");
    assert!(host.enrolled.contains(&id(1)));
    host.loses.clear();
    host.enrolled.remove(&id(1));
    host.forgive(id(1), Event::Enrol(id(1)));
    host.run(12);
    assert!(censuses_of(&host, id(1)) > before && host.enrolled.contains(&id(1)), "an operator has it enrolled again");
    let tries = withdrawals(&host, id(1)).len();
    host.run(600);
    assert_eq!(withdrawals(&host, id(1)).len(), tries, "and nobody withdraws it");
}

#[test]
fn an_operator_has_it_tried_at_once_and_who_enrols_during_it_has_the_last_word() {
    let mut host = merged(&[1]);
    host.clings.insert(id(1));
    host.happen(Event::Withdraw(id(1)));
    host.run(700);
    let tries = withdrawals(&host, id(1)).len();
    host.happen(Event::Withdraw(id(1)));
    assert_eq!(withdrawals(&host, id(1)).len(), tries + 1);
    host.forgive(id(1), Event::Enrol(id(1)));
    host.run(700);
    assert_eq!(withdrawals(&host, id(1)).len(), tries + 1, "the refusal came after that");
    assert!(host.state.members()[&id(1)].is_open());
}

/// What was said to a daemon that was killed is said to the next before it knows anybody.
#[test]
fn who_is_withdrawn_before_it_has_come_is_left_alone_from_the_start() {
    let mut host = Host::new(rules(Mode::Act));
    [1, 2].into_iter().for_each(|pid| host.happen(Event::Withdraw(id(pid))));
    host.happen(Event::Enrol(id(2)));
    [1, 2].into_iter().for_each(|pid| host.happen(arrival(pid)));
    host.run(60);
    assert!(host.state.members()[&id(1)].withdrawn && censuses_of(&host, id(1)) == 0);
    assert!(censuses_of(&host, id(2)) > 0, "that was taken back");
    host.happen(Event::Enrol(id(1)));
    host.run(60);
    assert!(censuses_of(&host, id(1)) > 0);
}

#[test]
fn trying_again_keeps_to_the_budget() {
    let mut host = merged(&[1]);
    host.clings.insert(id(1));
    host.happen(Event::Withdraw(id(1)));
    host.spent += Duration::from_secs(60);
    host.run(200);
    assert_eq!(withdrawals(&host, id(1)).len(), 1);
    host.happen(Event::Withdraw(id(1)));
    assert_eq!(withdrawals(&host, id(1)).len(), 2, "an operator is not kept waiting");
    host.run(400);
    assert!(withdrawals(&host, id(1)).len() > 2);
}

#[test]
fn what_may_be_merged_again_is_not_withdrawn_any_more() {
    let mut host = merged(&[1]);
    host.clings.insert(id(1));
    let Event::Came(known) = arrival(1) else { unreachable!() };
    let excluded = Arrival { excluded: Some("it holds keys".into()), ..known.clone() };
    host.happen(Event::Came(excluded));
    host.run(2);
    host.happen(Event::Enrol(id(1)));
    assert!(host.state.members()[&id(1)].leaving.is_some(), "no operator has it merged that must not be");
    host.forgive(id(1), Event::Came(known));
    let tries = withdrawals(&host, id(1)).len();
    host.run(600);
    assert_eq!(withdrawals(&host, id(1)).len(), tries);
    assert!(host.enrolled.contains(&id(1)) && host.state.members()[&id(1)].is_open());
}

#[test]
fn what_was_merged_before_the_daemon_stays_unless_it_must_not() {
    let mut host = Host::new(rules(Mode::Act));
    host.loses.insert(id(1));
    host.clings.insert(id(1));
    host.happen(arrival(1));
    host.run(12);
    assert_eq!(extents(&host, id(1)), [Extent::Ours], "it loses by what was enrolled now");
    let Event::Came(known) = arrival(1) else { unreachable!() };
    host.happen(Event::Came(Arrival { excluded: Some("it holds keys".into()), ..known }));
    host.run(2);
    assert_eq!(extents(&host, id(1)), [Extent::Ours, Extent::All], "that is not put off until the next try");

    let mut host = merged(&[3]);
    host.happen(Event::Stop { unmerge: true });
    host.run(2);
    assert_eq!(extents(&host, id(3)), [Extent::Ours]);
    let mut host = merged(&[3]);
    host.happen(Event::Withdraw(id(3)));
    assert_eq!(extents(&host, id(3)), [Extent::All]);
}

#[test]
fn who_comes_into_another_domain_shares_nothing_with_the_one_before() {
    let Event::Came(known) = arrival(1) else { unreachable!() };
    let moved = || Event::Came(Arrival { domain: Domain::Group("apart".into()), ..known.clone() });
    let mut host = merged(&[1, 3]);
    host.happen(Event::Came(known.clone()));
    host.run(2);
    assert!(extents(&host, id(1)).is_empty(), "nothing has changed");
    host.happen(moved());
    host.run(1);
    assert_eq!((extents(&host, id(1)), extents(&host, id(3))), (vec![Extent::All], vec![]));
    assert_eq!(host.said(What::Withdraw, Reason::Domain), 1);
    host.happen(Event::Enrol(id(1)));
    host.run(60);
    assert!(host.enrolled.contains(&id(1)), "it is merged again, in its own");

    // Who was alone leaves nobody behind, and takes with it what is its own.
    let Event::Came(other) = arrival(5) else { unreachable!() };
    host.happen(Event::Came(Arrival { domain: Domain::Vm(Some("web".into()), 5), ..other.clone() }));
    host.run(60);
    host.happen(Event::Came(Arrival { domain: Domain::Group("web".into()), ..other }));
    host.run(2);
    assert!(extents(&host, id(5)).is_empty() && host.enrolled.contains(&id(5)));

    // Where all may be merged with all no domain counts, until they do.
    let across = |across_domains| Event::Configured(Rules { across_domains, ..rules(Mode::Act) });
    let mut host = merged(&[1, 3]);
    host.happen(across(true));
    host.happen(moved());
    host.run(2);
    assert!(extents(&host, id(1)).is_empty());
    host.happen(across(false));
    host.run(2);
    assert_eq!((extents(&host, id(1)), extents(&host, id(3))), (vec![Extent::All], vec![Extent::All]));
}

#[test]
fn work_on_others_goes_on_while_somebody_moves() {
    for merges in [false, true] {
        let mut host = merged(&[2]);
        [1, 3].into_iter().for_each(|pid| host.happen(arrival(pid)));
        let works = |host: &Host| match &host.state.work {
            Some(Work::Census(_, processes)) => !merges && processes.len() == 2,
            Some(Work::Merge(processes)) => merges && processes.len() == 2,
            _ => false,
        };
        while !works(&host) {
            host.tick();
        }
        let Event::Came(other) = arrival(2) else { unreachable!() };
        host.happen(Event::Came(Arrival { domain: Domain::Group("apart".into()), ..other }));
        host.run(30);
        assert_eq!(host.did(|action| *action == Action::Halt), 0);
        assert_eq!((extents(&host, id(1)), extents(&host, id(3))), (vec![], vec![]), "they are not parted");
        assert_eq!(extents(&host, id(2)), [Extent::All]);
    }
}

#[test]
fn who_moves_to_and_fro_is_merged_less_and_less_often() {
    let Event::Came(known) = arrival(1) else { unreachable!() };
    let mut host = merged(&[1, 3]);
    let minutes = 240;
    for minute in 0..minutes {
        let domain = if minute % 2 == 0 { Domain::Group("apart".into()) } else { known.domain.clone() };
        host.happen(Event::Came(Arrival { domain, ..known.clone() }));
        host.run(60);
    }
    let withdrawn = extents(&host, id(1)).len();
    assert!((1..minutes / 20).contains(&withdrawn), "{withdrawn} times in {minutes} minutes");
    assert!(extents(&host, id(3)).is_empty(), "who stays where it is loses nothing by it");
}

#[test]
fn no_operator_keeps_what_two_domains_share() {
    let mut host = merged(&[1, 3]);
    host.clings.insert(id(1));
    let Event::Came(known) = arrival(1) else { unreachable!() };
    host.happen(Event::Came(Arrival { domain: Domain::Group("apart".into()), ..known }));
    host.run(2);
    for event in [Event::Enrol(id(1)), Event::Withdraw(id(1)), Event::Enrol(id(1))] {
        host.happen(event);
        assert!(host.state.members()[&id(1)].leaving.is_some());
    }
}

#[test]
fn domains_that_change_during_work_are_heeded_by_it() {
    let Event::Came(known) = arrival(1) else { unreachable!() };
    let moved = Event::Came(Arrival { domain: Domain::Group("apart".into()), ..known });
    let fewer = Event::Configured(rules(Mode::Act));
    for (event, whom) in [(moved, vec![id(1)]), (fewer, vec![id(1), id(3)])] {
        for merges in [false, true] {
            let across_domains = matches!(event, Event::Configured(_));
            let mut host = Host::new(Rules { across_domains, ..rules(Mode::Act) });
            [1, 3].into_iter().for_each(|pid| host.happen(arrival(pid)));
            // Until one is under way whose plan is for both, or carries it out.
            let works = |host: &Host| match &host.state.work {
                Some(Work::Census(turns, _)) => !merges && turns.len() == 2,
                Some(Work::Merge(processes)) => merges && processes.len() == 2,
                _ => false,
            };
            while !works(&host) {
                host.tick();
            }
            let before = host.shares().len();
            host.happen(event.clone());
            assert_eq!(host.did(|action| *action == Action::Halt), 1);
            host.tick();
            if merges {
                host.run(1);
                whom.iter().for_each(|process| assert_eq!(extents(&host, *process), [Extent::All]));
            } else {
                assert_eq!(host.shares().len(), before, "that plan is none any more");
            }
            host.run(60);
            assert_eq!(host.enrolled, BTreeSet::from([id(1), id(3)]), "each in its own");
        }
    }
}

#[test]
fn more_that_is_to_be_withdrawn_meanwhile_is() {
    for clings in [false, true] {
        let mut host = Host::new(rules(Mode::Act));
        host.loses.insert(id(1));
        if clings {
            host.clings.insert(id(1));
        }
        host.happen(arrival(1));
        while extents(&host, id(1)).is_empty() {
            host.tick();
        }
        host.happen(Event::Withdraw(id(1)));
        host.run(1);
        assert_eq!(extents(&host, id(1)), [Extent::Ours, Extent::All]);
    }
}

#[test]
fn what_a_program_had_marked_itself_is_withdrawn_where_it_must_be() {
    // It is in a merge in which nothing of it had to be enrolled.
    let mut host = merged(&[1, 3]);
    let member = host.state.members.get_mut(&id(1)).unwrap();
    assert!(std::mem::take(&mut member.enrolled) && member.merged);
    let Event::Came(known) = arrival(1) else { unreachable!() };
    host.happen(Event::Came(Arrival { excluded: Some("it holds keys".into()), ..known }));
    host.run(1);
    assert_eq!(extents(&host, id(1)), [Extent::All]);
}

#[test]
fn the_end_does_not_wait_for_a_long_withdrawal() {
    let mut host = merged(&[1]);
    host.happen(Event::Withdraw(id(1)));
    host.happen(Event::Stop { unmerge: false });
    assert_eq!(host.did(|action| *action == Action::Halt), 1);
    let mut host = merged(&[1]);
    host.happen(Event::Stop { unmerge: true });
    assert_eq!(host.did(|action| *action == Action::Halt), 0, "that one is what is waited for");
}

#[test]
fn whoever_has_it_no_longer_act_gives_the_host_back() {
    let mut host = merged(&[1]);
    host.happen(Event::Configured(rules(Mode::Advise)));
    assert_eq!(host.said(What::Restore, Reason::Operator), 1);
    let mut host = merged(&[1]);
    host.happen(Event::Contested("somebody writes".into()));
    assert_eq!(host.said(What::Restore, Reason::OtherWriter), 1);
}

#[test]
fn trying_costs_little_however_long_it_takes() {
    let Event::Came(arrival) = arrival(1) else { unreachable!() };
    let mut member = Member::new(arrival, Duration::ZERO, &rules(Mode::Act));
    member.leave(Reason::Operator, Duration::ZERO);
    let long = Duration::from_secs(10);
    assert!(member.stay("no".into(), long, Duration::ZERO));
    assert!(member.leaving.unwrap().next >= long * 200);
}

#[test]
fn who_loses_is_withdrawn_and_others_of_the_same_merge_are_not() {
    let mut host = Host::new(rules(Mode::Act));
    host.loses.insert(id(3));
    [1, 3, 5].into_iter().for_each(|pid| host.happen(arrival(pid)));
    host.run(12);
    let together = |action: &Action| matches!(action, Action::Merge { processes, .. } if processes.len() == 3);
    assert_eq!(host.did(together), 1);
    assert_eq!(host.enrolled, BTreeSet::from([id(1), id(5)]));
    assert_eq!(host.said(What::Withdraw, Reason::Loses), 1, "nor is it merged again as their partner");
    let pause = |pid| host.state.members()[&id(pid)].pause;
    assert!(pause(3) >= pause(1) * 4, "{:?}, {:?}", pause(3), pause(1));
}

/// There is metadata of what ksmd has looked at once when it is halted, and nothing merged.
#[test]
fn a_merge_that_was_halted_tells_nothing_and_the_next_one_tells() {
    let mut host = Host::new(rules(Mode::Act));
    host.loses.extend([id(1), id(3)]);
    (host.merging, host.slow) = (5.0, 0.4);
    host.run(5);
    [1, 3].into_iter().for_each(|pid| host.happen(arrival(pid)));
    host.run(11);
    assert_eq!((host.shares().len(), host.did(|action| *action == Action::Halt)), (1, 1));
    assert_eq!(host.enrolled, BTreeSet::from([id(1), id(3)]));
    // More of one of them is to be enrolled.
    host.slow = 0.0;
    host.enrolled.remove(&id(1));
    host.run(30);
    assert_eq!((host.shares().len(), host.enrolled.len()), (2, 1));
    assert_eq!(host.said(What::Withdraw, Reason::Loses), 1);
    // Of the other nothing is new: it still lacks what the halted merge took.
    let nets = BTreeMap::from([(id(3), NetBytes(MIB as i64 / 2))]);
    host.happen(Event::Merged(Merged { nets, ..Merged::default() }));
    host.run(2);
    assert!(!host.enrolled.contains(&id(3)));
    assert_eq!(host.said(What::Withdraw, Reason::Loses), 2);
}

#[test]
fn at_the_end_the_host_is_taken_once_more_where_that_may_be() {
    // Whoever paused it has the host; whoever ends it so wants it unmerged.
    let mut host = merged(&[1]);
    host.happen(Event::Pause);
    host.run(2);
    assert!(!host.holds);
    host.happen(Event::Stop { unmerge: true });
    host.run(2);
    assert_eq!((host.enrolled.len(), host.holds, host.ended()), (0, false, Some(true)));
}

/// Why somebody stays merged, and how that comes about.
type Way<'a> = (&'a str, &'a dyn Fn(&mut Host));

#[test]
fn at_the_end_it_says_who_stays_merged() {
    let told = |host: &Host| {
        let told = host.trace.iter().filter_map(|(_, action)| match action {
            Action::Say(said) if (said.what, said.reason) == (What::Refuse, Reason::Stopped) => Some(said),
            _ => None,
        });
        told.map(|said| (said.whom.clone(), said.why.clone())).collect::<Vec<_>>()
    };
    let ways: [Way<'_>; 5] = [
        ("there is no memory", &|host| _ = host.clings.insert(id(1))),
        ("the journal cannot be written", &|host| host.fails = true),
        ("it only advises", &|host| host.happen(Event::Configured(rules(Mode::Advise)))),
        ("somebody writes", &|host| host.happen(Event::Contested("somebody writes".into()))),
        ("another pagefold", &|host| {
            host.happen(Event::Pause);
            host.taken = Some("another pagefold".into());
        }),
    ];
    for (why, way) in ways {
        let mut host = merged(&[1]);
        way(&mut host);
        host.run(20);
        host.happen(Event::Stop { unmerge: true });
        host.run(2);
        assert_eq!((host.ended(), host.holds), (Some(false), false), "{why}: {:?}", host.trace);
        assert_eq!(told(&host), [(vec![id(1)], format!("it stays merged: {why}"))]);
        assert!(host.enrolled.contains(&id(1)));

        // Who does not ask for it is told nothing.
        let mut host = merged(&[1]);
        way(&mut host);
        host.run(20);
        host.happen(Event::Stop { unmerge: false });
        host.run(2);
        assert_eq!((host.ended(), told(&host)), (Some(true), Vec::new()), "{why}");
    }
}

#[test]
fn settings_that_do_not_come_back_are_told_at_the_end() {
    let mut host = merged(&[1]);
    host.whole = false;
    host.happen(Event::Stop { unmerge: false });
    host.run(2);
    assert_eq!(host.ended(), Some(false));
}

#[test]
fn why_nothing_is_done_is_known() {
    let mut host = merged(&[1]);
    assert_eq!(host.state.holds_back(), None);
    host.happen(Event::Contested("somebody writes".into()));
    assert_eq!(host.state.holds_back().as_deref(), Some("somebody writes"));
    assert_eq!(host.state.waits().as_deref(), Some("somebody writes"));
    host.happen(Event::Pause);
    assert_eq!(host.state.holds_back().as_deref(), Some("an operator paused it"));
    assert_eq!(host.state.waits().as_deref(), Some("an operator paused it"));
    for (mode, why) in [(Mode::Observe, "it only observes"), (Mode::Advise, "it only advises")] {
        host.happen(Event::Configured(rules(mode)));
        assert_eq!(host.state.holds_back().as_deref(), Some(why));
    }
}

/// Until it is merged there is nothing of it to be withdrawn.
#[test]
fn who_comes_to_be_excluded_during_its_first_merge_is_withdrawn_after_it() {
    let mut host = Host::new(rules(Mode::Act));
    host.merging = 5.0;
    host.happen(arrival(1));
    let begun = |host: &Host| host.did(|action| matches!(action, Action::Merge { .. })) > 0;
    while !begun(&host) {
        host.run(1);
    }
    let Event::Came(known) = arrival(1) else { unreachable!() };
    host.happen(Event::Came(Arrival { excluded: Some("it holds keys".into()), ..known }));
    assert!(host.enrolled.contains(&id(1)) && withdrawals(&host, id(1)).is_empty());
    host.run(10);
    assert!(host.enrolled.is_empty());
    assert_eq!(host.said(What::Withdraw, Reason::Excluded), 1);
}

#[test]
fn what_was_merged_before_is_not_given_up_for_what_came_to_it() {
    let mut host = merged(&[1, 3]);
    let loss = NetBytes(-(MIB as i64));
    let nets = BTreeMap::from([(id(1), loss)]);
    host.happen(Event::Merged(Merged { enrolled: vec![id(1)], net: loss, nets, ..Merged::default() }));
    host.run(10);
    assert_eq!(host.enrolled, BTreeSet::from([id(1), id(3)]));
    assert!(!host.state.members()[&id(1)].is_open(), "and nothing more of it is merged for a while");
}

#[test]
fn what_a_merge_had_enrolled_that_failed_is_withdrawn() {
    let mut host = merged(&[1]);
    host.merging = 5.0;
    host.happen(arrival(3));
    let merges = |host: &Host| host.did(|action| matches!(action, Action::Merge { .. }));
    while merges(&host) < 2 {
        host.run(1);
    }
    assert_eq!(host.enrolled, BTreeSet::from([id(1), id(3)]), "in part, say");
    host.answer = None;
    host.happen(Event::Failed("the journal cannot be written".into()));
    host.run(3);
    assert_eq!(host.enrolled, BTreeSet::from([id(1)]));
    assert_eq!(host.said(What::Withdraw, Reason::Failed), 1);
}

#[test]
fn at_an_end_that_keeps_merges_it_says_who_was_to_be_withdrawn_before() {
    for (clings, whole) in [(true, false), (false, true)] {
        let mut host = merged(&[1, 3]);
        if clings {
            host.clings.insert(id(1));
        }
        host.happen(Event::Withdraw(id(1)));
        host.run(2);
        host.happen(Event::Stop { unmerge: false });
        host.run(2);
        assert_eq!(host.ended(), Some(whole));
        assert_eq!(host.said(What::Refuse, Reason::Stopped), usize::from(!whole));
        assert!(host.enrolled.contains(&id(3)));
    }
}

/// It may end before ksmd has gone around.
#[test]
fn a_merge_in_between_does_not_stand_for_passing_by() {
    let is = |what: fn(&Action) -> bool| move |host: &Host| host.trace.iter().position(|(_, action)| what(action));
    let mut host = merged(&[1, 3]);
    host.trace.clear();
    host.happen(arrival(5));
    host.run(4);
    host.happen(Event::Went(id(1)));
    host.run(30);
    let merge = is(|action| matches!(action, Action::Merge { .. }))(&host);
    let sweep = is(|action| matches!(action, Action::Sweep))(&host);
    assert!(merge.is_some() && merge < sweep, "{:?}", host.trace);
}

/// Who ends while it is merged for the first time is passed by, too.
#[test]
fn who_ends_during_its_first_merge_is_passed_by() {
    let mut host = Host::new(rules(Mode::Act));
    host.merging = 5.0;
    [1, 3].into_iter().for_each(|pid| host.happen(arrival(pid)));
    let merges = |host: &Host| host.did(|action| matches!(action, Action::Merge { .. }));
    while merges(&host) == 0 {
        host.run(1);
    }
    [1, 3].into_iter().for_each(|pid| host.happen(Event::Went(id(pid))));
    host.run(30);
    assert_eq!((merges(&host), host.did(|action| matches!(action, Action::Sweep))), (1, 1));
}
