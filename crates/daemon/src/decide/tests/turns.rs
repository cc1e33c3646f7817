//! Whose turn it is: who has just come, and where CPU time is short.

use super::*;
use pagefold_base::content::Fingerprint;
use pagefold_base::memory::Shortage;
use pagefold_base::units::Pages;

#[test]
fn what_does_not_change_is_looked_at_less_and_less() {
    let mut host = Host::new(rules(Mode::Act));
    host.happen(arrival(1));
    host.run(600);
    let first = host.did(is_census);
    host.run(600);
    assert!(first <= 9 && host.did(is_census) <= first + 2, "{first}, {}", host.did(is_census));
    let grown = Readings { resident: vec![(id(1), Bytes(200 * MIB))], spent: host.spent, ..Readings::default() };
    let before = host.did(is_census);
    host.happen(Event::Tick(grown));
    assert_eq!(host.did(is_census), before, "it may fill still");
    host.run(1);
    assert_eq!(host.did(is_census), before + 1, "it has filled");
    assert_eq!(host.said(What::Census, Reason::Filled), 1);
}

/// A guest whose memory is there already while it boots and is filled: only its CPU time tells when it is ready.
#[test]
fn who_comes_is_looked_at_when_it_is_no_longer_busy() {
    let mut host = Host::new(rules(Mode::Act));
    host.happen(arrival(1));
    let mut ran = Duration::ZERO;
    let mut work = |host: &mut Host, seconds: f64, busy: bool| {
        for _ in 0..(seconds * 4.0) as u32 {
            ran += Duration::from_millis(if busy { 240 } else { 5 });
            host.tick();
            let (spent, available) = (host.spent, Some(host.available));
            host.happen(Event::Tick(Readings { ran: vec![(id(1), ran)], spent, available, ..Readings::default() }));
        }
    };
    work(&mut host, 4.0, true);
    assert_eq!(host.did(is_census), 0, "it is busy still");
    work(&mut host, 1.0, false);
    assert_eq!(host.did(is_census), 1, "it is ready");
    work(&mut host, 4.0, true);
    let before = host.did(is_census);
    work(&mut host, 1.0, false);
    assert_eq!(host.did(is_census), before + 1, "it was busy again");
    assert_eq!(host.said(What::Census, Reason::Filled), 1);
}

#[test]
fn who_is_busy_all_the_time_is_looked_at_all_the_same() {
    let mut host = Host::new(rules(Mode::Act));
    host.happen(arrival(1));
    for tick in 1..=40 {
        host.tick();
        let ran = vec![(id(1), Duration::from_millis(250 * tick))];
        host.happen(Event::Tick(Readings { ran, spent: host.spent, ..Readings::default() }));
    }
    assert!((1..=2).contains(&host.did(is_census)), "{:?}", host.trace);
}

/// Whoever hardly runs has hardly written its memory.
#[test]
fn who_is_idle_is_looked_at_when_it_has_worked_and_at_the_longest_pause() {
    let censuses = |share: f64, seconds: u64| {
        let mut host = Host::new(rules(Mode::Act));
        host.happen(arrival(1));
        for tick in 1..=seconds * 4 {
            host.tick();
            let ran = vec![(id(1), Duration::from_secs_f64(tick as f64 / 4.0 * share))];
            host.happen(Event::Tick(Readings { ran, spent: host.spent, ..Readings::default() }));
        }
        host.did(is_census)
    };
    let rarest = Rules::default().rarest.as_secs();
    let settled = censuses(0.005, 60);
    assert_eq!(censuses(0.005, rarest - 60), settled);
    assert_eq!(censuses(0.005, rarest + 120), settled + 1, "others may write its memory");
    assert!(censuses(0.05, rarest - 60) >= settled + 5, "{settled}");
}

#[test]
fn looking_in_vain_costs_a_two_thousandth_of_a_cpu_however_much_there_is() {
    let mut host = Host::new(rules(Mode::Act));
    host.long = 5.0;
    (0..4).for_each(|pid| host.happen(arrival(2 * pid)));
    host.run(10_000);
    let before = host.spent;
    host.run(50_000);
    let share = (host.spent - before).as_secs_f64() / 50_000.0;
    assert!(share > 0.0001 && share < 0.0006, "{share}");
}

/// Tick until something is done again. Tells the ticks.
fn until(host: &mut Host, wanted: fn(&Action) -> bool, beside: impl Fn(&mut Host)) -> usize {
    let before = host.did(wanted);
    let mut ticks = 0;
    while host.did(wanted) == before {
        assert!(ticks < 10_000, "it never is");
        beside(host);
        host.tick();
        ticks += 1;
    }
    ticks
}

/// A merge of two, of a second of ksmd each, was halted, because it took more than could be saved up.
fn halted() -> Host {
    let mut host = Host::new(Rules { burst: Duration::from_secs(10), ..rules(Mode::Act) });
    (host.ksmd, host.merging) = (Duration::from_secs(1), 20.0);
    (host.took, host.gain) = (Duration::from_secs(1), 1024 * MIB as i64);
    host.happen(arrival(1));
    host.happen(arrival(3));
    until(&mut host, |action| *action == Action::Halt, |_| ());
    host.enrolled.clear();
    assert!(host.state.budget().left() <= 0.0);
    host
}

/// Else a look would use up all that was saved up each time, and nothing be left to merge what it finds.
#[test]
fn a_merge_that_was_halted_is_begun_again_once_there_is_time_for_all_of_it() {
    let mut host = halted();
    until(&mut host, is_census, |_| ());
    let left = host.state.budget().left();
    assert!((4.0..5.0).contains(&left), "twice what was reckoned for each: {left}");
    host.merging = 2.0;
    host.run(10);
    assert!(host.state.members().values().all(|member| member.unmerged == 0.0), "it has come to its end");
}

#[test]
fn a_merge_that_was_halted_is_not_waited_for_where_memory_is_short_nor_for_ever() {
    let mut host = halted();
    host.pressure = 90.0;
    until(&mut host, is_census, |_| ());
    let left = host.state.budget().left();
    assert!(left < 4.0, "{left}");
    // Others use up all but half a second.
    let mut host = halted();
    let ticks = until(&mut host, is_census, |host| {
        host.spent += Duration::from_secs_f64((host.state.budget().left() - 0.5).max(0.0));
    });
    assert!((800..820).contains(&ticks), "twice what it takes to save up ten seconds: {ticks}");
}

/// Two that can be looked at together are, however much a merge of one of them wants besides.
#[test]
fn who_waits_for_a_merge_can_be_looked_at_with_somebody_big() {
    let mut host = Host::new(Rules { burst: Duration::from_secs(10), ..rules(Mode::Act) });
    (host.ksmd, host.merging, host.gain) = (Duration::from_secs(2), 20.0, 8192 * MIB as i64);
    // As much as is reckoned before any was measured.
    host.long = 0.0625;
    let big = |pid, mib| match arrival(pid) {
        Event::Came(arrival) => Event::Came(Arrival { resident: Bytes(mib * MIB), ..arrival }),
        other => other,
    };
    host.happen(big(1, 12 << 10));
    host.happen(big(3, 6 << 10));
    for _ in 0..2 {
        let before = host.did(|action| *action == Action::Halt);
        host.enrolled.clear();
        host.run(600);
        assert!(host.did(|action| *action == Action::Halt) > before, "merged, and halted, again");
    }
}

/// A plan that counts on the copies of somebody who refuses comes to nothing.
#[test]
fn who_refuses_is_in_no_plan_of_others() {
    let mut host = Host::new(rules(Mode::Act));
    host.refuses = Some(id(1));
    host.happen(arrival(1));
    host.happen(arrival(3));
    host.run(60);
    assert!(host.enrolled.contains(&id(3)) && !host.enrolled.contains(&id(1)), "{:?}", host.enrolled);
    let merges = |host: &Host| {
        host.did(|action| matches!(action, Action::Merge { processes, .. } if processes.contains(&id(1))))
    };
    assert_eq!(merges(&host), 2, "again once after a while");
    host.refuses = None;
    host.happen(Event::Enrol(id(1)));
    host.run(20);
    assert!(host.enrolled.contains(&id(1)), "an operator has it tried at once");
}

/// What is not old enough when it is looked at is looked at again when it is, but not for ever.
#[test]
fn what_ripens_is_waited_for_twice() {
    let rules = rules(Mode::Act);
    let Event::Came(arrival) = arrival(1) else { unreachable!() };
    let mut member = Member::new(arrival, Duration::ZERO, &rules);
    let mut pauses = Vec::new();
    for _ in 0..4 {
        let now = member.next;
        member.begin(now);
        member.looked(now, (false, true), 0.5, &rules, rules.rarest);
        pauses.push(member.next.saturating_sub(now) > rules.ripens);
    }
    assert_eq!(pauses, [false, false, true, true]);
}

/// Where CPU time is short, who was noted comes before those who are to be noted: else nobody would be merged.
#[test]
fn newcomers_do_not_keep_others_from_being_merged() {
    let rules = rules(Mode::Act);
    let Event::Came(arrival) = arrival(1) else { unreachable!() };
    let new = Member::new(arrival, Duration::ZERO, &rules);
    let mut noted = new.clone();
    noted.looked(Duration::from_secs(1), (false, true), 0.0, &rules, rules.rarest);
    let mut merged = noted.clone();
    merged.enrolled = true;
    let urgency = |member: &Member| member.urgency(&rules);
    assert!(urgency(&noted) < urgency(&new) && urgency(&new) < urgency(&merged));
}

/// What a look at somebody costs can be far beyond its size: one with very many regions. Others are merged all the
/// same.
#[test]
fn one_that_costs_too_much_does_not_take_the_turns_of_others() {
    let rules = Rules { burst: Duration::from_secs(3), ..rules(Mode::Act) };
    let mut host = Host::new(rules);
    (host.costly, host.long) = (Some((id(2), 8.0)), 0.1);
    for pid in [2, 4, 6] {
        host.happen(arrival(pid));
    }
    host.run(300);
    assert!(host.enrolled.contains(&id(4)) && host.enrolled.contains(&id(6)), "{:?}", host.enrolled);
    let halted = host.did(|action| matches!(action, Action::Halt));
    assert!((1..=12).contains(&halted), "{halted} looks in vain");
}

/// A page that is looked at takes some bytes of an index, and the daemon's memory is bounded.
#[test]
fn a_big_host_is_looked_at_in_portions() {
    const GIB: u64 = 1 << 30;
    let censuses = |sizes: &[u64]| {
        let mut host = Host::new(Rules { burst: Duration::from_secs(3600), ..rules(Mode::Act) });
        for (pid, gib) in (1..).zip(sizes) {
            let Event::Came(arrival) = arrival(2 * pid) else { unreachable!() };
            host.happen(Event::Came(Arrival { resident: Bytes(gib * GIB), ..arrival }));
        }
        host.run(2000);
        let who = host.trace.iter().filter_map(|(_, action)| match action {
            Action::Census(processes) => Some(processes),
            _ => None,
        });
        let seen: BTreeSet<&ProcessId> = who.clone().flatten().collect();
        assert_eq!(seen.len(), sizes.len(), "everybody has its turn");
        who.map(Vec::len).max()
    };
    // 2 GiB and nearly a fifth of 64: two beside each other, and no third.
    assert_eq!(censuses(&[8; 8]), Some(2));
    assert_eq!(censuses(&[1; 64]), Some(14));
    // However big they are, one is never alone.
    assert_eq!(censuses(&[100, 100]), Some(2));
}

/// The censuses of a host with members of so many GiB, each of this kind, over so many seconds.
fn censuses(rules: Rules, members: &[(u64, &str)], seconds: u64) -> Vec<Vec<ProcessId>> {
    let mut host = Host::new(rules);
    for (pid, (gib, kind)) in (1..).zip(members) {
        let Event::Came(arrival) = arrival(2 * pid) else { unreachable!() };
        let likeness = (*kind).to_owned();
        host.happen(Event::Came(Arrival { resident: Bytes(gib << 30), likeness, ..arrival }));
    }
    host.run(seconds);
    let who = host.trace.into_iter().filter_map(|(_, action)| match action {
        Action::Census(processes) => Some(processes),
        _ => None,
    });
    who.collect()
}

#[test]
fn in_a_portion_are_those_that_are_alike() {
    let members: Vec<(u64, &str)> = (0..8).map(|number| (8, ["a", "b"][number % 2])).collect();
    let long = Rules { burst: Duration::from_secs(3600), ..rules(Mode::Act) };
    for census in censuses(long, &members, 2000) {
        let kinds: BTreeSet<u32> = census.iter().map(|process| process.pid.0 / 2 % 2).collect();
        assert_eq!((census.len(), kinds.len()), (2, 1), "{census:?}");
    }
}

/// Of those that look alike from outside some may hold nothing in common.
#[test]
fn who_comes_meets_more_than_the_same_two() {
    // There is CPU time for three at a time.
    let mut host = Host::new(Rules { burst: Duration::from_millis(700), ..rules(Mode::Advise) });
    host.gain = 0;
    (1..=10).for_each(|pid| host.happen(arrival(2 * pid)));
    host.run(5000);
    let before = host.trace.len();
    host.happen(arrival(40));
    host.run(3000);
    let met: BTreeSet<ProcessId> = host.trace[before..]
        .iter()
        .filter_map(|(_, action)| match action {
            Action::Census(processes) if processes.contains(&id(40)) => Some(processes.clone()),
            _ => None,
        })
        .flatten()
        .collect();
    assert!(met.len() > 5, "{met:?}");
}

/// Who holds that, and has so much of it merged.
fn holding(contents: impl Iterator<Item = u64>, merged: usize) -> Held {
    let contents: Vec<Fingerprint> = contents.map(Fingerprint).collect();
    let of = |from: usize| Sketch::of(Pages(contents.len() as u64), contents[from..].iter().copied());
    Held { all: of(0), unmerged: of(merged) }
}

/// The censuses with somebody in them from some place of the trace on: the last but one decimal of each number.
fn met(host: &Host, from: usize, whom: ProcessId) -> Vec<Vec<u32>> {
    let censuses = host.trace[from..].iter().filter_map(|(_, action)| match action {
        Action::Census(processes) => processes.contains(&whom).then_some(processes),
        _ => None,
    });
    censuses.map(|processes| processes.iter().map(|process| process.pid.0 / 10 % 10).collect()).collect()
}

/// All look the same from outside, and each holds the same as one other, and much more. Who comes holds what three
/// pairs do, has merged with the first, and meets one of each other.
#[test]
fn who_comes_is_looked_at_with_whoever_holds_the_same() {
    let mut host = Host::new(Rules { burst: Duration::from_millis(700), ..rules(Mode::Advise) });
    host.gain = 0;
    let template = |number: u64| number * 10_000..number * 10_000 + 5000;
    for pid in (10..=200_u32).step_by(10) {
        let number = u64::from(pid) / 10 % 10;
        host.holds_what.insert(id(pid), holding(template(number).chain(template(20 + number)), 0));
        host.happen(arrival(pid));
    }
    host.run(5000);
    let before = host.trace.len();
    let all = template(9).chain(template(3).take(2000)).chain(template(7).take(800));
    host.holds_what.insert(id(1000), holding(all, 5000));
    host.happen(arrival(1000));
    host.run(60);
    let met = met(&host, before, id(1000));
    // Nothing is known of it at first, and one place may be left to chance once.
    let times = |met: &[u32], one: u32| met.iter().filter(|of| **of == one).count();
    let is_found = |met: &Vec<u32>| [3, 7, 9].map(|one| times(met, one)) == [1, 1, 0];
    assert!(met[1..3].iter().any(is_found) && met[1..3].iter().all(|met| met.contains(&3)), "{met:?}");
}

/// Of those whose turn it is together, each meets who holds the same.
#[test]
fn those_who_come_together_each_meet_whoever_holds_the_same() {
    let mut host = Host::new(Rules { burst: Duration::from_millis(900), ..rules(Mode::Advise) });
    host.gain = 0;
    let template = |number: u32| (0..5000).map(move |content| u64::from(number) * 10_000 + content);
    for pid in (10..=90).step_by(10) {
        host.holds_what.insert(id(pid), holding(template(pid / 10), 0));
        host.happen(arrival(pid));
    }
    host.run(5000);
    let before = host.trace.len();
    for (pid, number) in [(1000, 4), (1002, 8)] {
        host.holds_what.insert(id(pid), holding(template(number), 0));
        host.happen(arrival(pid));
    }
    host.run(60);
    let met = met(&host, before, id(1000));
    let is_found = |met: &Vec<u32>| [0, 4, 8].iter().all(|one| met.contains(one));
    assert!(met[1..3].iter().any(is_found), "{met:?}");
}

/// However many come together, and whoever is first of them: each holds the same as one who has long been there.
#[test]
fn many_who_come_together_all_meet_whoever_holds_the_same() {
    let mut host = Host::new(Rules { burst: Duration::from_secs(3600), ..rules(Mode::Advise) });
    host.gain = 0;
    let come = |host: &mut Host, pid: u32| {
        let number = u64::from(pid % 1000);
        host.holds_what.insert(id(pid), holding((0..5000).map(|content| number * 10_000 + content), 0));
        let Event::Came(arrival) = arrival(pid) else { unreachable!() };
        // There is room for twenty.
        host.happen(Event::Came(Arrival { resident: Bytes(200 * MIB), ..arrival }));
    };
    let pids = || (0..24).map(|number| 2 * number);
    pids().for_each(|pid| come(&mut host, 1000 + pid));
    host.run(5000);
    let before = host.trace.len();
    pids().for_each(|pid| come(&mut host, 2000 + pid));
    host.run(60);
    let met = |pid: u32| {
        host.trace[before..].iter().any(|(_, action)| match action {
            Action::Census(who) => who.contains(&id(1000 + pid)) && who.contains(&id(2000 + pid)),
            _ => false,
        })
    };
    let missed: Vec<u32> = pids().filter(|pid| !met(*pid)).collect();
    assert!(missed.is_empty(), "{missed:?}");
}

/// Somebody's contents have become those of another: that is known once it was looked at, and the two meet soon after.
#[test]
fn those_who_come_to_hold_the_same_meet_soon_after_it_is_known() {
    let mut host = Host::new(Rules { burst: Duration::from_secs(3600), ..rules(Mode::Advise) });
    host.gain = 0;
    let template = |number: u64| (0..5000).map(move |content| number * 10_000 + content);
    for pid in (10..=90).step_by(10) {
        host.holds_what.insert(id(pid), holding(template(u64::from(pid)), 0));
        let Event::Came(arrival) = arrival(pid) else { unreachable!() };
        host.happen(Event::Came(Arrival { resident: Bytes(1 << 30), ..arrival }));
    }
    host.run(8000);
    let before = host.trace.len();
    host.holds_what.insert(id(50), holding(template(60), 0));
    while met(&host, before, id(50)).is_empty() {
        host.run(1);
    }
    host.run(15);
    let met = met(&host, before, id(50));
    assert!(!met[0].contains(&6) && met[1..].iter().any(|met| met.contains(&6)), "{met:?}");
}

/// Who holds the same may have been in a look that used up the budget, by itself or beside the one that seeks it:
/// others cost less, and hold nothing of it.
#[test]
fn those_who_hold_the_same_meet_although_a_look_was_halted() {
    let mut host = Host::new(Rules { burst: Duration::from_millis(700), ..rules(Mode::Advise) });
    (host.gain, host.long) = (0, 0.05);
    for pid in (10..=100).step_by(10).chain([1050]) {
        let number = u64::from(pid % 1000);
        host.holds_what.insert(id(pid), holding((0..5000).map(|content| number * 10_000 + content), 0));
        host.happen(arrival(pid));
        host.run(100);
    }
    for overran in [[0, 1], [1, 1]] {
        for (pid, times) in [1050, 50].into_iter().zip(overran) {
            host.state.members.get_mut(&id(pid)).expect("it has come").overran = times;
        }
        let chosen = host.state.affordable(&[id(1050)]).expect("there is CPU time");
        assert!(chosen.contains(&id(50)), "{overran:?}: {chosen:?}");
    }
}

/// The answer comes between two readings, and the others' turn has come as well.
#[test]
fn a_look_is_paid_for_before_the_next_one_begins() {
    let mut host = Host::new(Rules { burst: Duration::from_millis(200), ..rules(Mode::Advise) });
    host.gain = 0;
    (1..=16).for_each(|pid| host.happen(arrival(2 * pid)));
    until(&mut host, is_census, |_| ());
    // It takes all that may be saved up.
    let (_, event) = host.answer.take().expect("a census is under way");
    host.happen(event);
    assert!(host.state.budget().left() < 0.01, "{}", host.state.budget().left());
    assert_eq!(host.did(is_census), 1, "{:?}", host.trace);
}

/// A small one is looked at with big ones that hold what its like does not, and else by chance alone.
#[test]
fn big_ones_are_not_read_for_small_ones_with_which_they_share_nothing() {
    let gibibytes = |shared: bool| {
        let mut host = Host::new(rules(Mode::Advise));
        (host.gain, host.long) = (0, 0.01);
        for pid in 1..=4_u32 {
            let Event::Came(arrival) = arrival(2 * pid) else { unreachable!() };
            let (resident, likeness) = if pid < 3 { (16 << 20, "small") } else { (1 << 30, "big") };
            let contents = match pid {
                1 => 0..10_000,
                2 => 0..5000,
                _ if shared => 5000..10_000,
                _ => 10_000..20_000,
            };
            host.holds_what.insert(id(2 * pid), holding(contents, 0));
            host.happen(Event::Came(Arrival { resident: Bytes(resident), likeness: likeness.to_owned(), ..arrival }));
        }
        host.run(60);
        let mut read = 0;
        for _ in 0..8 {
            host.state.looks += 1;
            let chosen = host.state.affordable(&[id(2)]).expect("there is CPU time");
            read += chosen.iter().map(|process| host.state.members()[process].resident.0).sum::<u64>() >> 30;
        }
        read
    };
    assert_eq!((gibibytes(true), gibibytes(false)), (14, 2));
}

#[test]
fn in_a_portion_are_those_that_hold_the_same_unless_others_need_it_more() {
    for squeezed in [false, true] {
        let mut host = Host::new(Rules { burst: Duration::from_secs(3600), ..rules(Mode::Act) });
        for pid in 1..=8_u32 {
            let Event::Came(arrival) = arrival(2 * pid) else { unreachable!() };
            let contents = (0..500).map(|number| u64::from(pid % 2) * 1000 + number);
            host.holds_what.insert(id(2 * pid), holding(contents, 0));
            host.happen(Event::Came(Arrival { resident: Bytes(1 << 30), ..arrival }));
        }
        host.run(100);
        let mut due: Vec<ProcessId> = host.state.members().keys().copied().collect();
        if squeezed {
            let short = Shortage { waited: Some(50.0), left: None };
            let short = Readings { cgroups: vec![(id(6), short), (id(8), short)], ..Readings::default() };
            host.happen(Event::Tick(short));
            due.sort_by_key(|process| ![6, 8].contains(&process.pid.0));
        }
        let chosen = host.state.affordable(&due).expect("there is CPU time");
        let pids: Vec<u32> = chosen.iter().map(|process| process.pid.0).collect();
        // There is room for three: the first, who holds the same, and the next.
        assert_eq!(pids, if squeezed { [6, 8, 14] } else { [2, 6, 14] });
    }
}

#[test]
fn two_that_cost_more_together_than_may_be_saved_up_are_told_of() {
    let refusals = |burst: u64| {
        let mut host = Host::new(Rules { burst: Duration::from_secs(burst), ..rules(Mode::Act) });
        // 32 MiB take a sixtieth of a second, and each of them 16 s.
        host.long = 0.032;
        for pid in [2, 4] {
            let Event::Came(arrival) = arrival(pid) else { unreachable!() };
            host.happen(Event::Came(Arrival { resident: Bytes(32 << 30), ..arrival }));
        }
        host.run(600);
        assert!(host.did(is_census) > 0);
        host.said(What::Refuse, Reason::Budget) > 0
    };
    assert!(refusals(20) && !refusals(60));
}
