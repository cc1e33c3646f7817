//! Scan order of new processes, and with scarce CPU time.

use super::*;
use pagefold_base::memory::Shortage;

#[test]
fn unchanged_process_is_scanned_less_and_less_often() {
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    host.deliver(arrival(1));
    host.run(600);
    let first = host.count_effects(is_census);
    host.run(600);
    assert!(first <= 9 && host.count_effects(is_census) <= first + 2, "{first}, {}", host.count_effects(is_census));
    let grown = TickReadings {
        resident: vec![(id(1), Bytes(200 * MIB))],
        cpu_spent: host.cpu_spent,
        ..TickReadings::default()
    };
    let before = host.count_effects(is_census);
    host.deliver(Event::Tick(grown));
    assert_eq!(host.count_effects(is_census), before, "it may still fill its memory");
    host.run(1);
    assert_eq!(host.count_effects(is_census), before + 1, "it has filled");
    assert_eq!(host.count_decisions(DecisionKind::Census, DecisionReason::Grown), 1);
}

/// A guest whose memory is resident before it boots: only its CPU time shows when it is ready.
#[test]
fn new_process_is_scanned_once_it_is_not_busy() {
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    host.deliver(arrival(1));
    let mut ran = Duration::ZERO;
    let mut work = |host: &mut SimulatedHost, seconds: f64, busy: bool| {
        for _ in 0..(seconds * 4.0) as u32 {
            ran += Duration::from_millis(if busy { 240 } else { 5 });
            host.tick();
            let (spent, available) = (host.cpu_spent, Some(host.available));
            host.deliver(Event::Tick(TickReadings {
                cpu_times: vec![(id(1), ran)],
                cpu_spent: spent,
                available,
                ..TickReadings::default()
            }));
        }
    };
    work(&mut host, 4.0, true);
    assert_eq!(host.count_effects(is_census), 0, "it is still busy");
    work(&mut host, 1.0, false);
    assert_eq!(host.count_effects(is_census), 1, "it is ready");
    work(&mut host, 4.0, true);
    let before = host.count_effects(is_census);
    work(&mut host, 1.0, false);
    assert_eq!(host.count_effects(is_census), before + 1, "it was busy again");
    assert_eq!(host.count_decisions(DecisionKind::Census, DecisionReason::Grown), 1);
}

#[test]
fn always_busy_process_is_scanned_anyway() {
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    host.deliver(arrival(1));
    for tick in 1..=40 {
        host.tick();
        let ran = vec![(id(1), Duration::from_millis(250 * tick))];
        host.deliver(Event::Tick(TickReadings {
            cpu_times: ran,
            cpu_spent: host.cpu_spent,
            ..TickReadings::default()
        }));
    }
    assert!((1..=2).contains(&host.count_effects(is_census)), "{:?}", host.trace);
}

/// A process that hardly runs has hardly written its memory.
#[test]
fn idle_process_is_scanned_after_work_or_max_interval() {
    let censuses = |share: f64, seconds: u64| {
        let mut host = SimulatedHost::new(rules(DaemonMode::Act));
        host.deliver(arrival(1));
        for tick in 1..=seconds * 4 {
            host.tick();
            let ran = vec![(id(1), Duration::from_secs_f64(tick as f64 / 4.0 * share))];
            host.deliver(Event::Tick(TickReadings {
                cpu_times: ran,
                cpu_spent: host.cpu_spent,
                ..TickReadings::default()
            }));
        }
        host.count_effects(is_census)
    };
    let rarest = DaemonRules::default().max_scan_interval.as_secs();
    let settled = censuses(0.005, 60);
    assert_eq!(censuses(0.005, rarest - 60), settled);
    assert_eq!(censuses(0.005, rarest + 120), settled + 1, "other processes may write its memory");
    assert!(censuses(0.05, rarest - 60) >= settled + 5, "{settled}");
}

#[test]
fn fruitless_scans_cost_at_most_a_2000th_of_a_cpu() {
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    host.census_seconds = 5.0;
    (0..4).for_each(|pid| host.deliver(arrival(2 * pid)));
    host.run(10_000);
    let before = host.cpu_spent;
    host.run(50_000);
    let share = (host.cpu_spent - before).as_secs_f64() / 50_000.0;
    assert!(share > 0.0001 && share < 0.0006, "{share}");
}

/// Tick until the effect occurs again. Returns the number of ticks.
fn tick_until(
    host: &mut SimulatedHost,
    is_effect: fn(&Effect) -> bool,
    before_tick: impl Fn(&mut SimulatedHost),
) -> usize {
    let before = host.count_effects(is_effect);
    let mut ticks = 0;
    while host.count_effects(is_effect) == before {
        assert!(ticks < 10_000, "the effect never occurs");
        before_tick(host);
        host.tick();
        ticks += 1;
    }
    ticks
}

/// A merge of two processes, each with a second of ksmd, was halted because it took more than the burst.
fn host_with_halted_merge() -> SimulatedHost {
    let mut host = SimulatedHost::new(DaemonRules { burst: Duration::from_secs(10), ..rules(DaemonMode::Act) });
    (host.ksmd_time, host.merge_seconds) = (Duration::from_secs(1), 20.0);
    (host.merge_cpu_time, host.net_per_process) = (Duration::from_secs(1), 1024 * MIB as i64);
    host.deliver(arrival(1));
    host.deliver(arrival(3));
    tick_until(&mut host, |effect| *effect == Effect::Halt, |_| ());
    host.enrolled.clear();
    assert!(host.state.cpu_budget().available_seconds() <= 0.0);
    host
}

/// Otherwise each scan would use up the budget, and nothing would be left to merge what it finds.
#[test]
fn halted_merge_restarts_once_its_cpu_time_is_available() {
    let mut host = host_with_halted_merge();
    tick_until(&mut host, is_census, |_| ());
    let available = host.state.cpu_budget().available_seconds();
    assert!((4.0..5.0).contains(&available), "twice the prediction for each: {available}");
    host.merge_seconds = 2.0;
    host.run(10);
    assert!(
        host.state.tracked().values().all(|tracked| tracked.reserved_merge_seconds == 0.0),
        "the merge is complete"
    );
}

#[test]
fn halted_merge_is_not_awaited_under_pressure_or_forever() {
    let mut host = host_with_halted_merge();
    host.pressure = 90.0;
    tick_until(&mut host, is_census, |_| ());
    let available = host.state.cpu_budget().available_seconds();
    assert!(available < 4.0, "{available}");
    // Other processes use up all but half a second.
    let mut host = host_with_halted_merge();
    let ticks = tick_until(&mut host, is_census, |host| {
        host.cpu_spent += Duration::from_secs_f64((host.state.cpu_budget().available_seconds() - 0.5).max(0.0));
    });
    assert!((800..820).contains(&ticks), "twice the time to refill ten seconds: {ticks}");
}

/// Two processes within the budget are scanned together, even if a merge of one of them needs more CPU time.
#[test]
fn process_awaiting_merge_can_be_scanned_with_a_big_one() {
    let mut host = SimulatedHost::new(DaemonRules { burst: Duration::from_secs(10), ..rules(DaemonMode::Act) });
    (host.ksmd_time, host.merge_seconds, host.net_per_process) = (Duration::from_secs(2), 20.0, 8192 * MIB as i64);
    // The predicted cost before any measurement.
    host.census_seconds = 0.0625;
    let big = |pid, mib| match arrival(pid) {
        Event::ProcessArrived(arrival) => {
            Event::ProcessArrived(ProcessArrival { resident: Bytes(mib * MIB), ..arrival })
        }
        other => other,
    };
    host.deliver(big(1, 12 << 10));
    host.deliver(big(3, 6 << 10));
    for _ in 0..2 {
        let before = host.count_effects(|effect| *effect == Effect::Halt);
        host.enrolled.clear();
        host.run(600);
        assert!(host.count_effects(|effect| *effect == Effect::Halt) > before, "merged, and halted, again");
    }
}

/// A plan must not count on copies in a process that refuses to be enrolled.
#[test]
fn process_that_refuses_enrollment_is_in_no_plan() {
    let mut host = SimulatedHost::new(rules(DaemonMode::Act));
    host.refuses_enroll = Some(id(1));
    host.deliver(arrival(1));
    host.deliver(arrival(3));
    host.run(60);
    assert!(host.enrolled.contains(&id(3)) && !host.enrolled.contains(&id(1)), "{:?}", host.enrolled);
    let merges = |host: &SimulatedHost| {
        host.count_effects(|effect| matches!(effect, Effect::Merge { processes, .. } if processes.contains(&id(1))))
    };
    assert_eq!(merges(&host), 2, "one more try after a while");
    host.refuses_enroll = None;
    host.deliver(Event::Enroll(id(1)));
    host.run(20);
    assert!(host.enrolled.contains(&id(1)), "an operator's request is tried at once");
}

/// Unstable contents are scanned again early, but not forever.
#[test]
fn unstable_content_is_rescanned_early_twice() {
    let rules = rules(DaemonMode::Act);
    let Event::ProcessArrived(arrival) = arrival(1) else { unreachable!() };
    let mut tracked = TrackedProcess::new(arrival, Duration::ZERO, &rules);
    let mut pauses = Vec::new();
    for _ in 0..4 {
        let now = tracked.next_scan;
        tracked.begin_scan(now);
        tracked.finish_scan(now, (false, true), 0.5, &rules, rules.max_scan_interval);
        pauses.push(tracked.next_scan.saturating_sub(now) > rules.min_scan_interval);
    }
    assert_eq!(pauses, [false, false, true, true]);
}

/// With scarce CPU time, scanned processes come before new ones: otherwise no process would be merged.
#[test]
fn scanned_processes_come_before_unscanned_ones() {
    let rules = rules(DaemonMode::Act);
    let Event::ProcessArrived(arrival) = arrival(1) else { unreachable!() };
    let new = TrackedProcess::new(arrival, Duration::ZERO, &rules);
    let mut scanned = new.clone();
    scanned.finish_scan(Duration::from_secs(1), (false, true), 0.0, &rules, rules.max_scan_interval);
    let mut merged = scanned.clone();
    merged.enrolled = true;
    let urgency = |tracked: &TrackedProcess| tracked.scan_order(&rules);
    assert!(urgency(&scanned) < urgency(&new) && urgency(&new) < urgency(&merged));
}

/// Scanning a process with very many regions can cost far more than its size suggests. Other processes are merged
/// nevertheless.
#[test]
fn expensive_process_does_not_delay_others() {
    let rules = DaemonRules { burst: Duration::from_secs(3), ..rules(DaemonMode::Act) };
    let mut host = SimulatedHost::new(rules);
    (host.costly_process, host.census_seconds) = (Some((id(2), 8.0)), 0.1);
    for pid in [2, 4, 6] {
        host.deliver(arrival(pid));
    }
    host.run(300);
    assert!(host.enrolled.contains(&id(4)) && host.enrolled.contains(&id(6)), "{:?}", host.enrolled);
    let halted = host.count_effects(|effect| matches!(effect, Effect::Halt));
    assert!((1..=12).contains(&halted), "{halted} fruitless scans");
}

/// Each scanned page takes some bytes of an index, and the daemon's memory is bounded.
#[test]
fn big_host_is_scanned_in_portions() {
    const GIB: u64 = 1 << 30;
    let censuses = |sizes: &[u64]| {
        let mut host = SimulatedHost::new(DaemonRules { burst: Duration::from_secs(3600), ..rules(DaemonMode::Act) });
        for (pid, gib) in (1..).zip(sizes) {
            let Event::ProcessArrived(arrival) = arrival(2 * pid) else { unreachable!() };
            host.deliver(Event::ProcessArrived(ProcessArrival { resident: Bytes(gib * GIB), ..arrival }));
        }
        host.run(2000);
        let processes = host.trace.iter().filter_map(|(_, effect)| match effect {
            Effect::Census(parts) => Some(scanned_processes(parts)),
            _ => None,
        });
        let scanned: BTreeSet<ProcessId> = processes.clone().flatten().collect();
        assert_eq!(scanned.len(), sizes.len(), "every process is scanned");
        processes.map(|processes| processes.len()).max()
    };
    // 2 GiB plus a tenth of 64: two parts fit together, or eight processes of 1 GiB.
    assert_eq!(censuses(&[8; 8]), Some(2));
    assert_eq!(censuses(&[1; 64]), Some(8));
    // However big they are, no process is scanned alone.
    assert_eq!(censuses(&[100, 100]), Some(2));
}

/// The censuses of a host over some seconds. Each member has a size in GiB and a similarity key.
fn run_censuses(rules: DaemonRules, processes: &[(u64, &str)], seconds: u64) -> Vec<Vec<ProcessId>> {
    let mut host = SimulatedHost::new(rules);
    for (pid, (gib, kind)) in (1..).zip(processes) {
        let Event::ProcessArrived(arrival) = arrival(2 * pid) else { unreachable!() };
        let similarity_key = (*kind).to_owned();
        host.deliver(Event::ProcessArrived(ProcessArrival { resident: Bytes(gib << 30), similarity_key, ..arrival }));
    }
    host.run(seconds);
    let censuses = host.trace.into_iter().filter_map(|(_, effect)| match effect {
        Effect::Census(parts) => Some(scanned_processes(&parts)),
        _ => None,
    });
    censuses.collect()
}

#[test]
fn portion_contains_similar_processes() {
    let processes: Vec<(u64, &str)> = (0..8).map(|number| (1, ["a", "b"][number % 2])).collect();
    let long_burst = DaemonRules { burst: Duration::from_secs(3600), ..rules(DaemonMode::Act) };
    for census in run_censuses(long_burst, &processes, 2000) {
        let kinds: BTreeSet<u32> = census.iter().map(|process| process.pid.0 / 2 % 2).collect();
        assert_eq!((census.len(), kinds.len()), (2, 1), "{census:?}");
    }
}

/// Processes with equal similarity keys may have no contents in common.
#[test]
fn new_process_is_scanned_with_varying_partners() {
    // CPU time for three processes at a time.
    let mut host = SimulatedHost::new(DaemonRules { burst: Duration::from_millis(700), ..rules(DaemonMode::Advise) });
    host.net_per_process = 0;
    (1..=10).for_each(|pid| host.deliver(arrival(2 * pid)));
    host.run(5000);
    let before = host.trace.len();
    host.deliver(arrival(40));
    host.run(3000);
    let partners: BTreeSet<ProcessId> = host.trace[before..]
        .iter()
        .filter_map(|(_, effect)| match effect {
            Effect::Census(parts) if parts.contains_key(&id(40)) => Some(scanned_processes(parts)),
            _ => None,
        })
        .flatten()
        .collect();
    assert!(partners.len() > 5, "{partners:?}");
}

/// The censuses with a process, from an index of the trace on. Each number is the last but one decimal digit of a pid.
fn censuses_with(host: &SimulatedHost, from: usize, process: ProcessId) -> Vec<Vec<u32>> {
    let censuses = host.trace[from..].iter().filter_map(|(_, effect)| match effect {
        Effect::Census(parts) => parts.contains_key(&process).then(|| scanned_processes(parts)),
        _ => None,
    });
    censuses.map(|processes| processes.iter().map(|process| process.pid.0 / 10 % 10).collect()).collect()
}

/// All processes look alike, and each has its contents in common with one other process. The new process has contents
/// of three pairs, is merged with the first pair, and meets one process of each other pair.
#[test]
fn new_process_is_scanned_with_processes_of_same_content() {
    let mut host = SimulatedHost::new(DaemonRules { burst: Duration::from_millis(700), ..rules(DaemonMode::Advise) });
    host.net_per_process = 0;
    let template = |number: u64| number * 10_000..number * 10_000 + 5000;
    for pid in (10..=200_u32).step_by(10) {
        let number = u64::from(pid) / 10 % 10;
        host.sketches.insert(id(pid), make_sketches(template(number).chain(template(20 + number)), 0));
        host.deliver(arrival(pid));
    }
    host.run(5000);
    let before = host.trace.len();
    let all = template(9).chain(template(3).take(2000)).chain(template(7).take(800));
    host.sketches.insert(id(1000), make_sketches(all, 5000));
    host.deliver(arrival(1000));
    host.run(60);
    let censuses = censuses_with(&host, before, id(1000));
    // Nothing is known of it at first.
    let times = |censuses: &[u32], digit: u32| censuses.iter().filter(|partner| **partner == digit).count();
    let is_found = |censuses: &Vec<u32>| [3, 7, 9].map(|digit| times(censuses, digit)) == [1, 1, 0];
    assert!(
        censuses[1..3].iter().any(is_found) && censuses[1..3].iter().all(|censuses| censuses.contains(&3)),
        "{censuses:?}"
    );
}

/// Due processes that are scanned together each meet a process with the same contents.
#[test]
fn processes_arriving_together_each_meet_a_match() {
    let mut host = SimulatedHost::new(DaemonRules { burst: Duration::from_millis(900), ..rules(DaemonMode::Advise) });
    host.net_per_process = 0;
    let template = |number: u32| (0..5000).map(move |content| u64::from(number) * 10_000 + content);
    for pid in (10..=90).step_by(10) {
        host.sketches.insert(id(pid), make_sketches(template(pid / 10), 0));
        host.deliver(arrival(pid));
    }
    host.run(5000);
    let before = host.trace.len();
    for (pid, number) in [(1000, 4), (1002, 8)] {
        host.sketches.insert(id(pid), make_sketches(template(number), 0));
        host.deliver(arrival(pid));
    }
    host.run(60);
    let censuses = censuses_with(&host, before, id(1000));
    let is_found = |censuses: &Vec<u32>| [0, 4, 8].iter().all(|digit| censuses.contains(digit));
    assert!(censuses[1..3].iter().any(is_found), "{censuses:?}");
}

/// However many arrive together, each meets an old process with the same contents.
#[test]
fn many_arrivals_all_meet_their_match() {
    let missed = arrivals_without_their_match(0, false);
    assert!(missed.is_empty(), "{missed:?}");
}

/// The old processes are of another trust domain.
#[test]
fn arrivals_meet_their_match_in_another_domain_only_if_domains_may_share() {
    let missed = arrivals_without_their_match(1, true);
    assert!(missed.is_empty(), "{missed:?}");
    assert!(arrivals_without_their_match(1, false).len() > 12, "they would share nothing");
}

/// New processes that are in no census with the old process of the same contents, whose number is `old_offset` higher. Odd
/// numbers are of another domain than even ones.
fn arrivals_without_their_match(old_offset: u32, across_domains: bool) -> Vec<u32> {
    let rules = DaemonRules { burst: Duration::from_secs(3600), across_domains, ..rules(DaemonMode::Advise) };
    let mut host = SimulatedHost::new(rules);
    host.net_per_process = 0;
    let deliver_arrival = |host: &mut SimulatedHost, pid: u32| {
        let number = u64::from(pid % 1000 / 2);
        host.sketches.insert(id(pid), make_sketches((0..5000).map(|content| number * 10_000 + content), 0));
        let Event::ProcessArrived(arrival) = arrival(pid) else { unreachable!() };
        // Room for fifteen processes.
        host.deliver(Event::ProcessArrived(ProcessArrival { resident: Bytes(200 * MIB), ..arrival }));
    };
    let pids = || (0..24).map(|number| 2 * number);
    let old = |pid: u32| 1000 + pid + old_offset;
    pids().for_each(|pid| deliver_arrival(&mut host, old(pid)));
    host.run(5000);
    let before = host.trace.len();
    pids().for_each(|pid| deliver_arrival(&mut host, 2000 + pid));
    host.run(60);
    let met = |pid: u32| {
        host.trace[before..].iter().any(|(_, effect)| match effect {
            Effect::Census(parts) => parts.contains_key(&id(old(pid))) && parts.contains_key(&id(2000 + pid)),
            _ => false,
        })
    };
    pids().filter(|pid| !met(*pid)).collect()
}

/// The contents of one process have become those of another. The next scan finds that, and the two meet in the one after it.
#[test]
fn processes_with_new_common_content_meet_at_the_next_scan() {
    let mut host = SimulatedHost::new(DaemonRules { burst: Duration::from_secs(3600), ..rules(DaemonMode::Advise) });
    host.net_per_process = 0;
    let template = |number: u64| (0..5000).map(move |content| number * 10_000 + content);
    for pid in (10..=90).step_by(10) {
        host.sketches.insert(id(pid), make_sketches(template(u64::from(pid)), 0));
        let Event::ProcessArrived(arrival) = arrival(pid) else { unreachable!() };
        host.deliver(Event::ProcessArrived(ProcessArrival { resident: Bytes(1 << 30), ..arrival }));
    }
    host.run(8000);
    let before = host.trace.len();
    host.sketches.insert(id(50), make_sketches(template(60), 0));
    while censuses_with(&host, before, id(50)).len() < 2 {
        host.run(60);
        assert!(host.now < Duration::from_secs(20_000), "it is not scanned");
    }
    let censuses = censuses_with(&host, before, id(50));
    assert!(!censuses[0].contains(&6) && censuses[1..].iter().any(|censuses| censuses.contains(&6)), "{censuses:?}");
}

/// The matching process may have been in a scan that exceeded the budget, alone or with the seeking process. Other
/// processes cost less but hold none of the contents.
#[test]
fn matching_processes_meet_after_a_halted_scan() {
    let mut host = SimulatedHost::new(DaemonRules { burst: Duration::from_millis(700), ..rules(DaemonMode::Advise) });
    (host.net_per_process, host.census_seconds) = (0, 0.05);
    for pid in (10..=100).step_by(10).chain([1050]) {
        let number = u64::from(pid % 1000);
        host.sketches.insert(id(pid), make_sketches((0..5000).map(|content| number * 10_000 + content), 0));
        host.deliver(arrival(pid));
        host.run(100);
    }
    for overran in [[0, 1], [1, 1]] {
        for (pid, times) in [1050, 50].into_iter().zip(overran) {
            host.state.tracked.get_mut(&id(pid)).expect("the process is tracked").overruns = times;
        }
        let chosen = host.state.choose_affordable(&[id(1050)]).expect("there is CPU time");
        assert!(chosen.contains(&id(50)), "{overran:?}: {chosen:?}");
    }
}

/// The answer arrives between two readings, and other processes are due as well.
#[test]
fn scan_cost_is_charged_before_the_next_scan() {
    let mut host = SimulatedHost::new(DaemonRules { burst: Duration::from_millis(200), ..rules(DaemonMode::Advise) });
    host.net_per_process = 0;
    (1..=16).for_each(|pid| host.deliver(arrival(2 * pid)));
    tick_until(&mut host, is_census, |_| ());
    // The census takes the whole burst.
    let (_, event) = host.pending_answer.take().expect("a census runs");
    host.deliver(event);
    assert!(host.state.cpu_budget().available_seconds() < 0.01, "{}", host.state.cpu_budget().available_seconds());
    assert_eq!(host.count_effects(is_census), 1, "{:?}", host.trace);
}

/// A small process is scanned with big ones only if they hold contents that similar processes do not.
#[test]
fn big_processes_are_not_scanned_for_unrelated_small_ones() {
    let gibibytes = |shared: bool| {
        let mut host = SimulatedHost::new(rules(DaemonMode::Advise));
        (host.net_per_process, host.census_seconds) = (0, 0.01);
        for pid in 1..=4_u32 {
            let Event::ProcessArrived(arrival) = arrival(2 * pid) else { unreachable!() };
            let (resident, likeness) = if pid < 3 { (16 << 20, "small") } else { (1 << 30, "big") };
            let contents = match pid {
                1 => 0..10_000,
                2 => 0..5000,
                _ if shared => 5000..10_000,
                _ => 10_000..20_000,
            };
            host.sketches.insert(id(2 * pid), make_sketches(contents, 0));
            host.deliver(Event::ProcessArrived(ProcessArrival {
                resident: Bytes(resident),
                similarity_key: likeness.to_owned(),
                ..arrival
            }));
        }
        host.run(60);
        let mut read = 0;
        for _ in 0..8 {
            host.state.census_count += 1;
            let chosen = host.state.choose_affordable(&[id(2)]).expect("there is CPU time");
            read += chosen.iter().map(|process| host.state.tracked()[process].resident.0).sum::<u64>() >> 30;
        }
        read
    };
    assert_eq!((gibibytes(true), gibibytes(false)), (16, 0));
}

#[test]
fn portion_contains_matches_unless_others_are_urgent() {
    for is_short in [false, true] {
        let mut host = SimulatedHost::new(DaemonRules { burst: Duration::from_secs(3600), ..rules(DaemonMode::Act) });
        for pid in 1..=8_u32 {
            let Event::ProcessArrived(arrival) = arrival(2 * pid) else { unreachable!() };
            let contents = (0..500).map(|number| u64::from(pid % 2) * 1000 + number);
            host.sketches.insert(id(2 * pid), make_sketches(contents, 0));
            host.deliver(Event::ProcessArrived(ProcessArrival { resident: Bytes(600 * MIB), ..arrival }));
        }
        host.run(100);
        let mut due: Vec<ProcessId> = host.state.tracked().keys().copied().collect();
        if is_short {
            let shortage = Shortage { pressure_percent: Some(50.0), left_share: None };
            let readings = TickReadings {
                cgroup_shortages: vec![(id(6), shortage), (id(8), shortage)],
                ..TickReadings::default()
            };
            host.deliver(Event::Tick(readings));
            due.sort_by_key(|process| ![6, 8].contains(&process.pid.0));
        }
        let chosen = host.state.choose_affordable(&due).expect("there is CPU time");
        let pids: Vec<u32> = chosen.iter().map(|process| process.pid.0).collect();
        // Room for four: the first process with its match, and the next one with its match.
        assert_eq!(pids, if is_short { [6, 8, 14, 16] } else { [2, 6, 10, 14] });
    }
}

/// Nine processes of three templates, each scanned several times. Processes 2, 8 and 14 have one template.
fn host_with_templates() -> SimulatedHost {
    let mut host = SimulatedHost::new(DaemonRules { burst: Duration::from_secs(10), ..rules(DaemonMode::Act) });
    for pid in 1..=9 {
        let contents = (0..5000).map(|number| u64::from(pid % 3) * 10_000 + number);
        host.sketches.insert(id(2 * pid), make_sketches(contents, 0));
        host.deliver(arrival(2 * pid));
    }
    host.run(200);
    host
}

/// Merges of these processes were halted, and need so much CPU time.
fn reserve_merge_seconds(host: &mut SimulatedHost, pids: &[u32], seconds: f64) {
    for pid in pids {
        let tracked = host.state.tracked.get_mut(&id(*pid)).unwrap();
        (tracked.reserved_merge_seconds, tracked.merge_halted_at) = (seconds, host.state.now);
    }
}

fn chosen_pids(host: &SimulatedHost, due: &[u32]) -> Option<Vec<u32>> {
    let due: Vec<ProcessId> = due.iter().map(|pid| id(*pid)).collect();
    let chosen = host.state.choose_affordable(&due)?;
    Some(chosen.into_iter().map(|process| process.pid.0).collect())
}

/// Otherwise it would be scanned beside cheaper processes that have nothing in common with it, again and again.
#[test]
fn process_waits_until_its_match_is_affordable() {
    let mut host = host_with_templates();
    assert!(chosen_pids(&host, &[2]).is_some_and(|chosen| chosen.contains(&14)));
    reserve_merge_seconds(&mut host, &[8, 14], 7.0);
    host.state.cpu_budget.update(host.state.now, host.cpu_spent + Duration::from_secs(5));
    assert_eq!(chosen_pids(&host, &[2, 4]), None, "a cheaper process would use up what it waits for");
    let chosen = chosen_pids(&host, &[4, 2]).expect("the first one has another match");
    assert!(chosen.contains(&4) && !chosen.contains(&2), "{chosen:?}");
}

#[test]
fn only_processes_whose_merges_are_affordable_are_scanned_together() {
    let mut host = host_with_templates();
    assert!(chosen_pids(&host, &[2, 4]).is_some_and(|chosen| chosen.len() >= 4));
    reserve_merge_seconds(&mut host, &[2], 20.0);
    let chosen = chosen_pids(&host, &[2, 4]).expect("a merge that takes more than the burst is tried with the burst");
    assert!(chosen.contains(&2) && chosen.len() == 2, "{chosen:?}");
}

const SCARCE_BURST: Duration = Duration::from_secs(10);

/// A host with more processes than the burst pays for.
fn host_with_scarce_cpu_time() -> SimulatedHost {
    let mut host = SimulatedHost::new(DaemonRules { burst: SCARCE_BURST, ..rules(DaemonMode::Act) });
    for pid in 1..=16 {
        let Event::ProcessArrived(arrival) = arrival(2 * pid) else { unreachable!() };
        host.deliver(Event::ProcessArrived(ProcessArrival { resident: Bytes(2048 * MIB), ..arrival }));
    }
    host
}

fn set_available_seconds(host: &mut SimulatedHost, available: f64) {
    let spent = Duration::from_secs_f64(SCARCE_BURST.as_secs_f64() - available);
    host.state.cpu_budget = CpuTokenBucket::new(host.state.rules.cpu_rate, SCARCE_BURST, host.now, Duration::ZERO);
    host.state.cpu_budget.update(host.now, spent);
    host.cpu_spent = spent;
}

/// A census of many processes finds more than several of a few.
#[test]
fn scarce_cpu_time_is_saved_up_for_large_portions() {
    let mut host = host_with_scarce_cpu_time();
    let all: Vec<ProcessId> = host.state.tracked().keys().copied().collect();
    let mut are_chosen = |available: f64, due: &[ProcessId], pressure: f64, due_in: Duration| {
        let next_scan = host.now + due_in;
        host.state.tracked.values_mut().for_each(|tracked| tracked.next_scan = next_scan);
        set_available_seconds(&mut host, available);
        host.state.shortage = Shortage { pressure_percent: Some(pressure), left_share: None };
        host.state.choose_affordable(due).is_some()
    };
    let now = Duration::ZERO;
    assert!(!are_chosen(7.0, &all, 0.0, now));
    assert!(are_chosen(8.0, &all, 0.0, now));
    assert!(are_chosen(2.5, &all[..2], 0.0, now), "both are affordable");
    assert!(are_chosen(2.5, &all, 90.0, now), "memory is short");
    assert!(are_chosen(2.5, &all, 0.0, Duration::from_secs(1)), "none is due yet");
}

#[test]
fn process_that_an_operator_asks_for_precedes_all_others() {
    let mut host = host_with_scarce_cpu_time();
    set_available_seconds(&mut host, 2.5);
    host.run(3);
    assert_eq!(host.count_effects(is_census), 0, "CPU time is saved up");
    let asked = id(20);
    host.deliver(Event::Enroll(asked));
    host.run(12);
    let is_scanned = |effect: &Effect| matches!(effect, Effect::Census(parts) if parts.contains_key(&asked));
    assert_eq!(
        (host.count_effects(is_scanned), host.count_effects(is_census)),
        (2, 2),
        "the second one finds what is stable"
    );
    assert_eq!(host.state.tracked()[&asked].scan_cause, ScanCause::Due);
}
