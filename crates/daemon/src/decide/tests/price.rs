//! Each member is judged by what it costs itself.

use super::*;
use proptest::prelude::*;

fn merges(host: &Host) -> Vec<Vec<ProcessId>> {
    let merges = host.trace.iter().filter_map(|(_, action)| match action {
        Action::Merge { processes, .. } => Some(processes.clone()),
        _ => None,
    });
    merges.collect()
}

fn why(host: &Host, what: What) -> Option<&str> {
    host.trace.iter().find_map(|(_, action)| match action {
        Action::Say(said) if said.what == what => Some(said.why.as_str()),
        _ => None,
    })
}

#[test]
fn who_does_not_pay_is_left_out_and_the_others_are_merged() {
    // For each 50 ms of ksmd and half of a census of 200 ms: 0.009 s for each of 16 MiB, 0.15 s for 1 MiB.
    let mut host = Host::new(rules(Mode::Act));
    host.plans.insert(id(3), NetBytes(MIB as i64));
    [1, 3].into_iter().for_each(|pid| host.happen(arrival(pid)));
    host.run(9);
    assert_eq!(merges(&host), [[id(1)]]);
    assert_eq!(why(&host, What::Merge), Some("it should give back 16.0 MiB at 0.009 CPU s per MiB"));
    let dear = "it would give back 1.00 MiB at 0.150 CPU s per MiB (at most 0.02 is worth it)";
    assert_eq!(why(&host, What::Leave), Some(dear));
    let pauses = [1, 3].map(|pid| host.state.members()[&id(pid)].pause);
    assert!(pauses[1] > pauses[0], "it is looked at less and less: {pauses:?}");
    // As the partner of others it is judged again, and told of only when it is its turn.
    host.happen(arrival(5));
    host.run(60);
    let turn = |action: &Action| matches!(action, Action::Say(said) if said.what == What::Census && said.whom.contains(&id(3)));
    let looks = host.did(|action| matches!(action, Action::Census(processes) if processes.contains(&id(3))));
    let (turns, told) = (host.did(turn), host.said(What::Leave, Reason::Unprofitable));
    assert!(told < turns && turns < looks, "{told}, {turns}, {looks}: the first is only taken note of");
}

/// Somebody big is looked at in vain; what is found in somebody small beside it is not charged for that.
#[test]
fn the_census_is_charged_by_memory() {
    let resident = |pid: u32, mib: u64| {
        let Event::Came(arrival) = arrival(pid) else { unreachable!() };
        Event::Came(Arrival { resident: Bytes(mib * MIB), ..arrival })
    };
    let merged = |sizes: [u64; 2]| {
        let mut host = Host::new(rules(Mode::Act));
        host.plans = [1, 3].into_iter().map(|pid| (id(pid), NetBytes(8 * MIB as i64))).collect();
        // 2 s for both, and 0.16 s may be spent on 8 MiB.
        host.long = 2.0;
        host.happen(resident(1, sizes[0]));
        host.happen(resident(3, sizes[1]));
        host.run(30);
        host.enrolled
    };
    assert_eq!(merged([2048, 64]), BTreeSet::from([id(3)]));
    assert_eq!(merged([64, 2048]), BTreeSet::from([id(1)]));
    assert_eq!(merged([64, 64]), BTreeSet::new());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64.min(ProptestConfig::default().cases)))]

    /// Nobody is merged who costs more than may be spent, and nobody is left out who does not, whoever else is looked at
    /// beside it: up to 2 GiB are one portion.
    #[test]
    fn everybody_is_judged_by_itself(
        gains in prop::collection::vec((0i64..40, 16u64..400), 1..6),
        price in 0.001f64..0.1,
        seconds in 1u32..8,
    ) {
        let mut host = Host::new(Rules { price, burst: Duration::from_secs(1000), ..rules(Mode::Act) });
        host.long = f64::from(seconds) / 4.0;
        let all: u64 = gains.iter().map(|(_, resident)| resident).sum();
        let mut pays = BTreeSet::new();
        for (&(gain, resident), pid) in gains.iter().zip((0..).step_by(2)) {
            let Event::Came(known) = arrival(pid) else { unreachable!() };
            host.plans.insert(id(pid), NetBytes(gain * MIB as i64));
            host.happen(Event::Came(Arrival { resident: Bytes(resident * MIB), ..known }));
            let cost = 0.05 + host.long * resident as f64 / all as f64;
            // What lies at the bound itself is a matter of rounding.
            prop_assume!((cost - price * gain as f64).abs() > 1e-6);
            if gain > 0 && cost <= price * gain as f64 {
                pays.insert(id(pid));
            }
        }
        host.run(10);
        let first = merges(&host).first().cloned().unwrap_or_default();
        prop_assert_eq!(first.into_iter().collect::<BTreeSet<_>>(), pays);
    }
}
