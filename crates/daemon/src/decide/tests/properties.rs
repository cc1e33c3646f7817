//! What holds whatever happens to a host.

use super::*;
use proptest::prelude::*;

#[derive(Clone, Debug)]
pub(super) enum Stroke {
    Come(u32),
    Go(u32),
    Withdraw(u32),
    Enrol(u32),
    Cling(u32),
    LetGo(u32),
    Fail(bool),
    Pause,
    Resume,
    Contest,
    Press(bool),
    Gain(i64),
    Mode(Mode),
    Run(u64),
}

pub(super) fn stroke() -> impl Strategy<Value = Stroke> {
    prop_oneof![
        4 => (0u32..8).prop_map(Stroke::Come),
        1 => (0u32..8).prop_map(Stroke::Go),
        1 => (0u32..8).prop_map(Stroke::Withdraw),
        1 => (0u32..8).prop_map(Stroke::Enrol),
        1 => (0u32..8).prop_map(Stroke::Cling),
        1 => (0u32..8).prop_map(Stroke::LetGo),
        1 => prop::sample::select(vec![true, false, false]).prop_map(Stroke::Fail),
        1 => Just(Stroke::Pause),
        2 => Just(Stroke::Resume),
        1 => Just(Stroke::Contest),
        1 => any::<bool>().prop_map(Stroke::Press),
        1 => (-4i64..20).prop_map(|mib| Stroke::Gain(mib * MIB as i64)),
        1 => prop::sample::select(vec![Mode::Observe, Mode::Advise, Mode::Act, Mode::Act]).prop_map(Stroke::Mode),
        6 => (1u64..60).prop_map(Stroke::Run),
    ]
}

fn played(strokes: &[Stroke], base: &Rules, cores: f64, long: f64) -> Host {
    let mut host = Host::new(base.clone());
    (host.cores, host.long) = (cores, long);
    host.play(strokes, base);
    host
}

impl Host {
    /// Nobody is in its way any more.
    fn settle(&mut self) {
        (self.pressure, self.fails) = (0.0, false);
        self.happen(Event::Configured(rules(Mode::Act)));
        self.happen(Event::Tuner(None));
        self.happen(Event::Resume);
    }

    pub(super) fn play(&mut self, strokes: &[Stroke], base: &Rules) {
        let host = self;
        for stroke in strokes {
            match stroke {
                Stroke::Come(pid) => host.happen(arrival(*pid)),
                Stroke::Go(pid) => {
                    host.enrolled.remove(&id(*pid));
                    host.clings.remove(&id(*pid));
                    host.forgive(id(*pid), Event::Went(id(*pid)));
                }
                Stroke::Withdraw(pid) => host.happen(Event::Withdraw(id(*pid))),
                Stroke::Enrol(pid) => host.forgive(id(*pid), Event::Enrol(id(*pid))),
                Stroke::Cling(pid) => _ = host.clings.insert(id(*pid)),
                Stroke::LetGo(pid) => _ = host.clings.remove(&id(*pid)),
                Stroke::Fail(fails) => host.fails = *fails,
                Stroke::Pause => host.happen(Event::Pause),
                Stroke::Resume => host.happen(Event::Resume),
                Stroke::Contest => host.happen(Event::Contested("somebody".into())),
                Stroke::Press(high) => host.pressure = if *high { 90.0 } else { 0.0 },
                Stroke::Gain(gain) => host.gain = *gain,
                Stroke::Mode(mode) => host.happen(Event::Configured(Rules { mode: *mode, ..base.clone() })),
                Stroke::Run(seconds) => host.run(*seconds),
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64.min(ProptestConfig::default().cases)))]

    /// Over any time, the CPU time is within the bound, but for one tick in which nobody could have told it to stop,
    /// and what must not be halted: to withdraw, and to give the host back.
    #[test]
    fn the_budget_is_kept_to(
        strokes in prop::collection::vec(stroke(), 1..40),
        cpu in 0.01f64..0.5,
        burst in 1u64..10,
        cores in 0.1f64..2.0,
        long in 0.1f64..20.0,
    ) {
        let base = Rules { cpu, burst: Duration::from_secs(burst), price: 100.0, ..rules(Mode::Act) };
        let host = played(&strokes, &base, cores, long);
        let slack = TICK.as_secs_f64() * cores + 1e-6;
        for (i, (from, before, out)) in host.readings.iter().enumerate() {
            for (to, after, unbounded) in &host.readings[i..] {
                let (spent, bound) = (after - before, cpu * (to - from) + burst as f64 + unbounded - out + slack);
                prop_assert!(spent <= bound, "{spent} > {bound} from {from} to {to}");
            }
        }
    }

    /// In the end nobody is enrolled whom an end with unmerging would not withdraw or name, and nothing is held.
    #[test]
    fn every_enrolment_has_an_inverse(strokes in prop::collection::vec(stroke(), 1..40), paused in any::<bool>()) {
        let mut host = played(&strokes, &rules(Mode::Act), 0.5, 0.3);
        host.settle();
        if paused {
            host.happen(Event::Pause);
        }
        host.run(2);
        prop_assert_eq!(host.holds, !paused);
        let from = host.trace.len();
        host.happen(Event::Stop { unmerge: true });
        host.run(3);
        prop_assert!(!host.holds);
        let named = |process: &ProcessId| {
            let stays = (What::Refuse, Reason::Stopped);
            let names = |said: &Decision| (said.what, said.reason) == stays && said.whom == [*process];
            host.trace[from..].iter().any(|(_, action)| matches!(action, Action::Say(said) if names(said)))
        };
        prop_assert!(host.enrolled.iter().all(|who| host.clings.contains(who) && named(who)), "{:?}", host.enrolled);
        prop_assert_eq!(host.ended(), Some(host.enrolled.is_empty() && host.out.is_empty()));
    }

    /// Who could not be withdrawn is, once there is memory for it, however often it was refused before.
    #[test]
    fn who_is_to_be_withdrawn_is_in_the_end(strokes in prop::collection::vec(stroke(), 1..40)) {
        let mut host = played(&strokes, &rules(Mode::Act), 0.5, 0.3);
        host.settle();
        host.clings.clear();
        (host.gain, host.out) = (16 * MIB as i64, BTreeSet::new());
        host.run(301);
        let leaving = host.state.members().values().filter(|member| member.leaving.is_some());
        prop_assert_eq!(leaving.count(), 0);
        let withdrawn = host.state.members().iter().filter(|(_, member)| member.withdrawn);
        prop_assert!(withdrawn.clone().all(|(process, _)| !host.enrolled.contains(process)));
    }

    /// While it may not act nothing is changed, while memory is short nothing is withdrawn, and whom an operator
    /// withdrew nobody looks at.
    #[test]
    fn what_must_not_be_done_is_not(strokes in prop::collection::vec(stroke(), 1..40)) {
        let mut mode = Mode::Act;
        let mut host = Host::new(rules(Mode::Act));
        let mut withdrawn = BTreeSet::new();
        for stroke in &strokes {
            let from = host.trace.len();
            let playing = std::slice::from_ref(stroke);
            match stroke {
                Stroke::Mode(new) => mode = *new,
                Stroke::Withdraw(pid) if host.state.members().contains_key(&id(*pid)) => {
                    withdrawn.insert(id(*pid));
                }
                Stroke::Enrol(pid) | Stroke::Go(pid) => {
                    withdrawn.remove(&id(*pid));
                }
                _ => {}
            }
            let base = Rules { mode, ..rules(Mode::Act) };
            host.play(playing, &base);
            for (_, action) in &host.trace[from..] {
                match action {
                    Action::Hold | Action::Sweep | Action::Merge { .. } => prop_assert_eq!(mode, Mode::Act),
                    Action::Census(processes) => {
                        prop_assert!(mode != Mode::Observe);
                        prop_assert!(processes.iter().all(|process| !withdrawn.contains(process)));
                    }
                    Action::Look { withdraw } => prop_assert!(!withdraw || host.pressure < 10.0),
                    _ => {}
                }
            }
        }
    }

    /// The same seed and events give the same trace.
    #[test]
    fn it_can_be_replayed(strokes in prop::collection::vec(stroke(), 1..30)) {
        let [first, again] = [0, 1].map(|_| played(&strokes, &rules(Mode::Act), 0.5, 0.3).trace);
        prop_assert_eq!(first, again);
    }
}
