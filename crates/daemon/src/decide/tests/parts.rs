//! Processes too large for one census, and the time within which every process is scanned.

use super::*;
use crate::decide::part_progress::PartSketches;
use proptest::prelude::*;

const GIB: u64 = 1 << 30;

/// The predicted CPU time before any measurement, so that predictions are exact.
const SECONDS_PER_MIB: f64 = INITIAL_CENSUS_SECONDS_PER_MIB;

fn sized_arrival(pid: u32, bytes: u64) -> Event {
    let Event::ProcessArrived(arrival) = arrival(pid) else { unreachable!() };
    Event::ProcessArrived(ProcessArrival { resident: Bytes(bytes), ..arrival })
}

fn host_with_sizes(rules: DaemonRules, gibibytes: &[u64]) -> SimulatedHost {
    let mut host = SimulatedHost::new(rules);
    (host.net_per_process, host.census_seconds_per_mib) = (0, Some(SECONDS_PER_MIB));
    (1..).zip(gibibytes).for_each(|(number, gib)| host.deliver(sized_arrival(2 * number, gib * GIB)));
    host
}

fn rules_with_burst(seconds: u64) -> DaemonRules {
    DaemonRules { burst: Duration::from_secs(seconds), ..rules(DaemonMode::Advise) }
}

/// The addresses that each census of a trace scans.
fn scanned_by_census(host: &SimulatedHost) -> Vec<BTreeMap<ProcessId, Vec<AddressRange>>> {
    let censuses = host.trace.iter().filter_map(|(_, effect)| match effect {
        Effect::Census(parts) => Some(host.scan_parts(parts)),
        _ => None,
    });
    censuses.collect()
}

/// The numbers of blocks of a quarter GiB of which some memory was scanned.
fn scanned_blocks(ranges: &[AddressRange], bytes: u64) -> BTreeSet<u64> {
    let block = GIB / 4;
    let blocks = |range: &AddressRange| range.start / block..range.end.min(bytes).div_ceil(block);
    ranges.iter().flat_map(blocks).collect()
}

#[test]
fn process_over_the_burst_is_scanned_in_parts() {
    // 64 GiB take 32 s.
    let mut host = host_with_sizes(rules_with_burst(10), &[64]);
    host.run(2000);
    let censuses = scanned_by_census(&host);
    let mut end = 0;
    let first_round: Vec<AddressRange> = censuses
        .iter()
        .map(|census| census[&id(2)][0])
        .take_while(|range| {
            let is_next = range.start == end;
            end = range.end;
            is_next
        })
        .collect();
    assert_eq!(first_round.last().map(|range| range.end), Some(u64::MAX), "{first_round:?}");
    assert!(first_round.len() > 7, "{first_round:?}");
    assert_eq!(host.count_decisions(DecisionKind::Refuse, DecisionReason::Budget), 0);
    assert_eq!(host.count_effects(|effect| *effect == Effect::Halt), 0, "no part exceeds the burst");
}

#[test]
fn process_within_the_burst_is_scanned_whole() {
    let mut host = host_with_sizes(rules_with_burst(10), &[1, 1]);
    host.run(60);
    let is_whole = |ranges: &Vec<AddressRange>| *ranges == [ScanPart::WHOLE.range];
    let censuses = scanned_by_census(&host);
    assert!(!censuses.is_empty() && censuses.iter().flat_map(BTreeMap::values).all(is_whole), "{censuses:?}");
}

/// Every two parts meet in one census, whether of two processes or of one.
#[test]
fn large_processes_are_compared_in_all_parts() {
    let sizes = [12, 20];
    let mut host = host_with_sizes(DaemonRules { cpu_rate: 1.0, ..rules_with_burst(5) }, &sizes);
    host.run(1500);
    let all_blocks = |gib: u64| 0..gib * 4;
    for (one, other) in [(0, 1), (0, 0), (1, 1)] {
        let mut compared = BTreeSet::new();
        for census in scanned_by_census(&host) {
            let blocks = |number: usize| {
                let ranges = census.get(&id(2 * number as u32 + 2)).map_or(&[][..], Vec::as_slice);
                scanned_blocks(ranges, sizes[number] * GIB)
            };
            let (ones, others) = (blocks(one), blocks(other));
            compared.extend(ones.iter().flat_map(|a| others.iter().map(move |b| (*a, *b))));
        }
        let missed = all_blocks(sizes[one]).flat_map(|a| all_blocks(sizes[other]).map(move |b| (a, b)));
        let missed: Vec<_> = missed.filter(|pair| !compared.contains(pair)).collect();
        assert!(missed.is_empty(), "{one} and {other}: {missed:?}");
    }
}

/// The parts of one process: where their sketches tell savings that pay for it, and only there.
#[test]
fn parts_are_compared_where_that_may_pay() {
    // The parts share 20 MiB by their sketches, or nothing that is not merged, and a comparison takes some 4 s.
    for (max_cpu_seconds_per_mib, merged, compares) in [(0.02, 0, false), (1.0, 0, true), (1.0, 5000, false)] {
        let rules = DaemonRules { cpu_rate: 1.0, max_cpu_seconds_per_mib, ..rules_with_burst(5) };
        let mut host = host_with_sizes(rules, &[20]);
        host.sketches.insert(id(2), make_sketches(0..5000, merged));
        host.run(300);
        let is_comparison = |census: &BTreeMap<ProcessId, Vec<AddressRange>>| census[&id(2)].len() > 1;
        assert!(host.state.tracked()[&id(2)].part_sketches.len() > 4, "{:?}", host.state.tracked());
        assert_eq!(scanned_by_census(&host).iter().any(is_comparison), compares, "{max_cpu_seconds_per_mib}");
    }
}

/// Pages that are not merged may be behind a part whose equal pages are.
#[test]
fn unmerged_pages_are_compared_with_merged_ones_before_them() {
    let rules = DaemonRules { cpu_rate: 1.0, max_cpu_seconds_per_mib: 1.0, ..rules_with_burst(5) };
    let mut host = host_with_sizes(rules, &[20]);
    host.run(300);
    let part = |start: u64, end: u64, merged| PartSketches {
        range: AddressRange { start: start * GIB, end: end * GIB },
        sketches: make_sketches(0..5000, merged),
    };
    let compared = |state: &DaemonState, own_merged, from: u64| {
        let own = make_sketches(0..5000, own_merged);
        state.next_part_to_compare((id(2), Some(&own)), id(2), from * GIB)
    };
    host.state.tracked.get_mut(&id(2)).unwrap().part_sketches =
        [part(0, 4, 0), part(4, 8, 5000), part(8, 20, 0)].into();
    assert_eq!(compared(&host.state, 5000, 4), Some(8 * GIB), "the part from 8 GiB on is not merged");
    assert_eq!(compared(&host.state, 0, 4), Some(4 * GIB));
    assert_eq!(compared(&host.state, 0, 20), Some(20 * GIB), "nothing is known of new memory");
}

/// A scan in parts that takes long is repeated after a pause that is as long.
#[test]
fn fruitless_scan_in_parts_is_followed_by_a_pause() {
    let mut host = host_with_sizes(rules_with_burst(10), &[64]);
    host.sketches.insert(id(2), make_sketches(0..5000, 0));
    let interval_after_scan = |host: &mut SimulatedHost| {
        let before = host.state.tracked()[&id(2)].last_scan;
        while host.state.tracked()[&id(2)].last_scan == before {
            host.tick();
            assert!(host.now < Duration::from_secs(10_000), "it is never scanned");
        }
        let tracked = &host.state.tracked()[&id(2)];
        (host.now - tracked.scan_started_at, tracked.next_scan - host.now)
    };
    interval_after_scan(&mut host);
    let (duration, pause) = interval_after_scan(&mut host);
    assert!(duration > Duration::from_secs(60) && pause >= duration, "{duration:?} {pause:?}");
    // Merges that save too little are no reason to hurry.
    let (now, rules) = (host.now, rules_with_burst(10));
    let tracked = host.state.tracked.get_mut(&id(2)).unwrap();
    for longest in [duration * 100, Duration::from_secs(1)] {
        (tracked.scan_interval, tracked.last_merge_unprofitable) = (rules.min_scan_interval, true);
        tracked.scan_started_at = now - duration;
        tracked.finish_scan(now, (true, false), 0.0, &rules, longest);
        assert_eq!(tracked.next_scan, now + duration);
    }
}

#[test]
fn unstable_part_is_compared_again_before_the_next_one() {
    let result = |is_unstable| PartResult { end: Some(GIB), is_unstable, ..PartResult::default() };
    let mut progress = PartProgress::default();
    let all = |_: Option<&ContentSketches>, _, from| Some(from);
    let first_step = progress.record(id(1), &result(false), true, &all);
    assert_eq!(first_step, NextStep::Continue, "a first scan compares nothing");
    let mut progress = PartProgress::default();
    let steps = [true; 3].map(|is_unstable| progress.record(id(1), &result(is_unstable), false, &all));
    assert_eq!(steps, [NextStep::Repeat, NextStep::Repeat, NextStep::Continue]);
    assert_eq!(progress.partner(), Some((id(1), GIB)), "its other parts come last");
    assert!(progress.found_unstable);
}

/// A part whose contents became stable while it was repeated is no reason to scan all parts again.
#[test]
fn repeated_part_is_judged_by_its_last_census() {
    let result = |is_unstable| PartResult { end: Some(GIB), is_unstable, ..PartResult::default() };
    let all = |_: Option<&ContentSketches>, _, from| Some(from);
    let mut progress = PartProgress::default();
    let steps = [true, false].map(|is_unstable| progress.record(id(1), &result(is_unstable), false, &all));
    assert_eq!(steps, [NextStep::Repeat, NextStep::Continue]);
    assert!(!progress.found_unstable);
}

#[test]
fn part_that_cannot_be_repeated_stays_unstable() {
    let unstable = PartResult { end: Some(GIB), is_unstable: true, ..PartResult::default() };
    let all = |_: Option<&ContentSketches>, _, from| Some(from);
    let mut progress = PartProgress::default();
    assert_eq!(progress.record(id(1), &unstable, false, &all), NextStep::Repeat);
    progress.drop_partner(id(1), &all);
    assert!(progress.found_unstable);
}

/// The processes that are chosen while the budget holds a multiple of the predicted CPU time of some scans.
fn chosen_with(state: &mut DaemonState, factor: f64, predicted: &[ProcessId], due: &[ProcessId]) -> usize {
    let seconds: f64 = predicted.iter().map(|process| state.scan_cpu_seconds(&state.tracked()[process])).sum();
    let (rate, burst) = (state.rules.cpu_rate, state.rules.burst);
    state.cpu_budget = CpuTokenBucket::new(rate, burst, state.now, Duration::ZERO);
    state.cpu_budget.update(state.now, Duration::from_secs_f64(burst.as_secs_f64() - seconds * factor));
    state.choose_affordable(due).map_or(0, |chosen| chosen.len())
}

/// A scan that takes a little longer than predicted would be halted, and would have found nothing.
#[test]
fn budget_holds_a_margin_before_a_scan() {
    let (mut state, _) = half_scanned_process();
    let chosen = [1.05, 1.15].map(|factor| chosen_with(&mut state, factor, &[id(2)], &[id(2)]));
    assert_eq!(chosen, [0, 1], "the next part of a first scan");
    let mut host = host_with_sizes(rules_with_burst(5), &[12, 20]);
    let is_compared = |host: &SimulatedHost| {
        let partner = host.state.tracked()[&id(2)].progress.partner();
        partner.is_some_and(|(partner, _)| partner == id(4)) && host.state.task.is_none()
    };
    for _ in 0..10_000 {
        if is_compared(&host) {
            break;
        }
        host.tick();
    }
    assert!(is_compared(&host));
    let chosen = [1.05, 1.15].map(|factor| chosen_with(&mut host.state, factor, &[id(2), id(4)], &[id(2)]));
    assert_eq!(chosen, [0, 2], "a part and a part of its partner");
    // While memory is short, the daemon does not wait to scan all of the due.
    let mut host = host_with_sizes(rules_with_burst(10), &[1, 1]);
    host.state.shortage = Shortage { pressure_percent: Some(90.0), left_share: None };
    let chosen = [1.05, 1.15].map(|factor| chosen_with(&mut host.state, factor, &[id(2), id(4)], &[id(2), id(4)]));
    assert_eq!(chosen, [0, 2], "one of two processes would find little");
}

/// Each part is scanned with its margin, and so is its predicted cost.
#[test]
fn predicted_cost_of_a_part_is_that_of_all_that_is_scanned() {
    let (state, _) = half_scanned_process();
    let tracked = &state.tracked()[&id(2)];
    let parts = state.parts_to_scan(&[id(2)], &[id(2)].into());
    let mib = parts[&id(2)][0].max_bytes.0 as f64 / MIB as f64;
    let seconds = mib * state.census_seconds_per_mib * tracked.scan_cost_factor();
    assert!((state.scan_cpu_seconds(tracked) - seconds).abs() < 1e-6, "{seconds}");
    assert!(mib as u64 * state.part_count(tracked) > tracked.resident.0 / MIB * 21 / 20, "a part may grow");
}

/// The rest of a process follows soon after a part that used up the budget.
#[test]
fn halted_part_does_not_wait_for_the_next_scan_of_its_process() {
    let (mut state, rules) = half_scanned_process();
    let (now, max_interval) = (state.now, rules.max_scan_interval);
    let tracked = state.tracked.get_mut(&id(2)).unwrap();
    tracked.scan_interval = max_interval;
    tracked.record_overrun();
    tracked.postpone_after_overrun(now, &rules);
    assert_eq!(tracked.next_scan, now + rules.min_scan_interval * 2);
    tracked.progress = PartProgress::default();
    tracked.postpone_after_overrun(now, &rules);
    assert_eq!(tracked.next_scan, now + max_interval);
}

#[test]
fn scan_goes_on_without_a_partner_that_exits() {
    let mut host = host_with_sizes(DaemonRules { cpu_rate: 1.0, ..rules_with_burst(5) }, &[12, 20]);
    let is_compared = |host: &SimulatedHost| {
        host.state.tracked()[&id(2)].progress.partner().is_some_and(|(partner, _)| partner == id(4))
    };
    let mut ticks = 0;
    while !is_compared(&host) {
        host.tick();
        ticks += 1;
        assert!(ticks < 10_000, "they are never compared");
    }
    host.deliver(Event::ProcessExited(id(4)));
    let before = host.state.tracked()[&id(2)].last_scan;
    host.run(300);
    assert!(host.state.tracked()[&id(2)].last_scan > before, "{:?}", host.state.tracked()[&id(2)].progress);
}

#[test]
fn parts_are_scanned_beside_their_own_domain_only() {
    let mut host = host_with_sizes(DaemonRules { cpu_rate: 1.0, ..rules_with_burst(5) }, &[12, 20]);
    // Small processes of both domains.
    (31..39).for_each(|pid| host.deliver(sized_arrival(pid, GIB / 8)));
    host.run(1500);
    let is_partial = |ranges: &Vec<AddressRange>| *ranges != [ScanPart::WHOLE.range];
    let mixed = scanned_by_census(&host).into_iter().find(|census| {
        let domains: BTreeSet<_> = census.keys().map(|process| process.pid.0 % 2).collect();
        census.values().any(is_partial) && domains.len() > 1
    });
    assert_eq!(mixed, None);
    let is_scanned = |pid: u32| host.state.tracked()[&id(pid)].last_scan.is_some();
    assert!((31..39).chain([2, 4]).all(is_scanned));
}

#[test]
fn process_that_a_census_left_out_is_not_scanned() {
    let mut host = host_with_sizes(rules_with_burst(10), &[1]);
    while host.state.task.is_none() {
        host.tick();
    }
    let left_out = CensusSummary { left_out: [id(2)].into(), ..CensusSummary::default() };
    host.deliver(Event::CensusDone(left_out));
    let tracked = &host.state.tracked()[&id(2)];
    assert!(tracked.is_unscanned() && tracked.next_scan > host.now, "{tracked:?}");
}

/// A large process of which some parts were scanned.
fn half_scanned_process() -> (DaemonState, DaemonRules) {
    let rules = rules_with_burst(10);
    let mut host = host_with_sizes(rules.clone(), &[64]);
    for _ in 0..10_000 {
        if !host.state.tracked()[&id(2)].progress.is_at_start() && host.state.task.is_none() {
            break;
        }
        host.tick();
    }
    assert!(!host.state.tracked()[&id(2)].progress.is_at_start());
    (host.state, rules)
}

#[test]
fn growth_and_a_poor_merge_of_a_part_do_not_delay_the_next_part() {
    let (mut state, rules) = half_scanned_process();
    let now = state.now;
    let tracked = state.tracked.get_mut(&id(2)).unwrap();
    let before = (tracked.next_scan, tracked.scan_cause, tracked.scan_interval);
    tracked.double_scan_interval(&rules);
    tracked.last_scan = Some(now);
    for seconds in [0, 5, 60] {
        tracked.update_resident(Bytes(100 * GIB), now + Duration::from_secs(seconds), &rules);
    }
    assert_eq!((tracked.next_scan, tracked.scan_cause, tracked.scan_interval), before);
    assert_eq!(tracked.resident, Bytes(100 * GIB));
}

#[test]
fn process_that_was_unenrolled_at_the_end_is_new_to_the_next_daemon() {
    for (reason, is_passed_on) in [(DecisionReason::Stopped, false), (DecisionReason::Excluded, true)] {
        let mut host = host_with_sizes(rules_with_burst(10), &[1]);
        host.run(200);
        let now = host.now;
        assert_eq!(host.state.passed_state().processes.len(), 1);
        let tracked = host.state.tracked.get_mut(&id(2)).unwrap();
        tracked.request_unenroll(reason, now);
        tracked.record_unenrolled(UnenrollScope::AllMerged);
        assert_eq!(!host.state.passed_state().processes.is_empty(), is_passed_on);
    }
}

/// Scans of new processes that arrive all the time would use up all CPU time.
#[test]
fn old_process_is_scanned_despite_endless_arrivals() {
    let mut host = host_with_sizes(rules_with_burst(5), &[1, 1]);
    host.run(200);
    let before = host.state.tracked()[&id(2)].last_scan.expect("it was scanned");
    let due = host.state.tracked()[&id(2)].next_scan;
    for pid in 100..700 {
        host.deliver(sized_arrival(2 * pid, GIB));
        host.run(2);
        host.deliver(Event::ProcessExited(id(2 * (pid - 10))));
    }
    let after = host.state.tracked()[&id(2)].last_scan.expect("it was scanned");
    assert!(host.now > due + Duration::from_secs(600) && after > before, "due at {due:?}, scanned at {after:?}");
}

/// The longest time that a due process waits for the scan of its next part: the time after which it precedes all
/// others, and for each process before it the time that refills the burst.
fn max_wait_for_scan(state: &DaemonState) -> Duration {
    let rules = state.rules();
    let census = Duration::from_secs_f64(rules.burst.as_secs_f64() / rules.cpu_rate) + Duration::from_secs(10);
    state.max_wait() + census * state.tracked().len() as u32
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12.min(ProptestConfig::default().cases)))]

    /// Every due process is scanned within the stated time, whatever arrives, merges, grows and exits, and each census
    /// stays within the burst.
    #[test]
    fn every_process_is_scanned_within_the_stated_time(
        processes in prop::collection::vec((1u64..24, 0u32..2), 1..5),
        sizes_later in prop::collection::vec(1u64..24, 5),
        rate in 0.3f64..2.0,
        burst in 2u64..10,
        arrival_mib in 64u64..2048,
        merges in any::<bool>(),
        are_similar in any::<bool>(),
    ) {
        let mode = if merges { DaemonMode::Act } else { DaemonMode::Advise };
        let mut host = host_with_sizes(DaemonRules { cpu_rate: rate, mode, ..rules_with_burst(burst) }, &[]);
        host.net_per_process = if merges { 8 * MIB as i64 } else { 0 };
        // Processes with odd numbers are of another trust domain.
        let pids: Vec<u32> = (1..).zip(&processes).map(|(number, (_, domain))| 2 * number + domain).collect();
        let similar = pids.iter().copied().chain(1000..1375).filter(|_| are_similar);
        host.sketches = similar.map(|pid| (id(pid), make_sketches(0..2000, 0))).collect();
        for (pid, (gib, _)) in pids.iter().zip(&processes) {
            host.deliver(sized_arrival(*pid, gib * GIB));
        }
        for second in 0..1500_u32 {
            if second % 4 == 0 {
                host.deliver(sized_arrival(1000 + second / 4, arrival_mib * MIB));
                host.enrolled.remove(&id(990 + second / 4));
                host.deliver(Event::ProcessExited(id(990 + second / 4)));
            }
            if second == 500 {
                let resident = pids.iter().zip(&sizes_later).map(|(pid, gib)| (id(*pid), Bytes(gib * GIB))).collect();
                let readings = TickReadings { resident, cpu_spent: host.cpu_spent, ..TickReadings::default() };
                host.deliver(Event::Tick(readings));
            }
            host.run(1);
            let longest = max_wait_for_scan(&host.state);
            for (process, tracked) in host.state.tracked() {
                let waited = host.now.saturating_sub(tracked.next_scan);
                prop_assert!(waited <= longest, "{process:?} waits for {waited:?} of {longest:?}");
            }
        }
        prop_assert_eq!(host.count_decisions(DecisionKind::Refuse, DecisionReason::Budget), 0);
        let is_within_burst = |parts: &BTreeMap<ProcessId, Vec<ScanPart>>| {
            let limited = parts.values().flatten().filter(|part| part.max_bytes != ScanPart::WHOLE.max_bytes);
            let mib = limited.map(|part| part.max_bytes.0).sum::<u64>() as f64 / MIB as f64;
            mib * SECONDS_PER_MIB <= burst as f64
        };
        let exceeds_burst = |effect: &Effect| matches!(effect, Effect::Census(parts) if !is_within_burst(parts));
        prop_assert_eq!(host.count_effects(exceeds_burst), 0);
        let mixes_domains = |parts: &BTreeMap<ProcessId, Vec<ScanPart>>| {
            let domains: BTreeSet<u32> = parts.keys().map(|process| process.pid.0 % 2).collect();
            parts.values().flatten().any(|part| *part != ScanPart::WHOLE) && domains.len() > 1
        };
        let is_mixed = |effect: &Effect| matches!(effect, Effect::Census(parts) if mixes_domains(parts));
        prop_assert_eq!(host.count_effects(is_mixed), 0);
    }
}
