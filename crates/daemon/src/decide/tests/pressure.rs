//! Memory that is short, on the host or in somebody's cgroup.

use super::properties::stroke;
use super::*;
use pagefold_base::memory::Shortage;
use proptest::prelude::*;

/// Memory is waited for in somebody's cgroup, or no longer.
fn squeeze(host: &mut Host, pid: u32, short: bool) {
    let waited = Some(if short { 50.0 } else { 0.0 });
    host.happen(Event::Tick(Readings {
        spent: host.spent,
        available: Some(host.available),
        pressure: Some(host.pressure),
        cgroups: vec![(id(pid), Shortage { waited, left: None })],
        ..Readings::default()
    }));
}

#[test]
fn where_nothing_tells_of_pressure_it_is_short_when_little_is_left() {
    let mut host = Host::new(rules(Mode::Act));
    host.gain = -16 * (MIB as i64);
    host.total = Some(Bytes(1 << 34));
    host.available = Bytes(1 << 29);
    host.happen(arrival(1));
    host.run(10);
    assert!(host.enrolled.contains(&id(1)), "nothing is withdrawn while memory is short");
    host.available = Bytes(1 << 30);
    host.run(1);
    assert!(host.enrolled.is_empty());
}

#[test]
fn who_is_squeezed_keeps_what_is_merged_and_others_do_not() {
    let mut host = Host::new(rules(Mode::Act));
    host.gain = -16 * (MIB as i64);
    [1, 2].into_iter().for_each(|pid| host.happen(arrival(pid)));
    squeeze(&mut host, 1, true);
    host.run(12);
    assert_eq!(host.said(What::Merge, Reason::Profitable), 2);
    assert_eq!(host.enrolled, BTreeSet::from([id(1)]));
    squeeze(&mut host, 1, false);
    host.run(1);
    assert!(host.enrolled.is_empty(), "it was only put off");
}

#[test]
fn who_is_squeezed_is_merged_above_the_goal_and_where_others_are_slowed_down() {
    let goal = Rules { keep_available: Some(Bytes(1 << 30)), ..rules(Mode::Act) };
    for (rules, slow) in [(goal, 0.0), (rules(Mode::Act), 0.4)] {
        let mut host = Host::new(rules);
        (host.merging, host.slow) = (5.0, slow);
        // That it slows programs down is found out by this one.
        host.run(5);
        host.happen(arrival(2));
        host.run(8);
        let (before, resting) = (host.did(is_census), host.state.standing());
        host.happen(arrival(4));
        host.happen(arrival(1));
        host.run(2);
        assert_eq!(host.did(is_census), before, "{resting:?}");
        squeeze(&mut host, 1, true);
        host.run(2);
        let looked = host.trace.iter().rev().find(|(_, action)| is_census(action));
        assert!(host.did(is_census) > before, "{resting:?}");
        assert_eq!(looked.map(|(_, action)| action), Some(&Action::Census(vec![id(1)])), "and nobody else");
        host.run(1);
        if slow > 0.0 {
            assert_eq!(host.state.standing(), resting, "all others rest on");
        }
    }
}

#[test]
fn who_is_squeezed_comes_first() {
    let first = |squeezed: bool| {
        // Two processes have room in it.
        let mut host = Host::new(Rules { burst: Duration::from_millis(70), cpu: 0.001, ..rules(Mode::Advise) });
        [1, 3, 5, 7].into_iter().for_each(|pid| host.happen(arrival(pid)));
        squeeze(&mut host, 7, squeezed);
        host.run(2);
        let census = host.trace.into_iter().find(|(_, action)| is_census(action)).map(|(_, action)| action);
        matches!(census, Some(Action::Census(who)) if who.len() == 2 && who.contains(&id(7)))
    };
    assert_eq!([false, true].map(first), [false, true]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64.min(ProptestConfig::default().cases)))]

    /// Whatever else happens: the host of these tests asserts it at each withdrawal.
    #[test]
    fn nobody_is_withdrawn_while_squeezed(
        strokes in prop::collection::vec((stroke(), 0u32..8, any::<bool>()), 1..40),
    ) {
        let base = rules(Mode::Act);
        let mut host = Host::new(base.clone());
        for (stroke, pid, short) in strokes {
            squeeze(&mut host, pid, short);
            host.play(&[stroke], &base);
        }
    }
}

/// Who is new is only taken note of, and nobody is merged after such a look.
#[test]
fn who_is_squeezed_does_not_wait_for_those_who_come() {
    let mut host = Host::new(rules(Mode::Act));
    host.happen(arrival(1));
    host.run(3);
    assert!(host.state.members()[&id(1)].looked.is_some() && host.enrolled.is_empty());
    squeeze(&mut host, 1, true);
    for pid in 1..40 {
        host.happen(arrival(2 * pid + 1));
        host.run(1);
    }
    assert!(host.enrolled.contains(&id(1)), "{:?}", host.trace);
}

#[test]
fn what_is_dear_is_merged_where_memory_is_short() {
    for short in [false, true] {
        let mut host = Host::new(rules(Mode::Act));
        // 2 s for 8 MiB.
        (host.gain, host.long) = (8 * MIB as i64, 2.0);
        host.happen(arrival(1));
        squeeze(&mut host, 1, short);
        host.run(30);
        assert_eq!(host.enrolled.contains(&id(1)), short);
    }
}
