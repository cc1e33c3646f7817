use super::*;
use pagefold_base::domain::Domain;
use pagefold_base::units::{NetBytes, Pid};
use pagefold_census::decide::sketch::{Held, Sketch};
use std::collections::BTreeSet;

mod leaving;
mod pressure;
mod price;
mod properties;
mod turns;

const MIB: u64 = 1 << 20;
const TICK: Duration = Duration::from_millis(250);

fn id(pid: u32) -> ProcessId {
    ProcessId { pid: Pid(pid), start_time: u64::from(pid) }
}

fn arrival(pid: u32) -> Event {
    let domain = Domain::User(pid % 2);
    Event::Came(Arrival { process: id(pid), domain, likeness: "a".into(), excluded: None, resident: Bytes(64 * MIB) })
}

fn rules(mode: Mode) -> Rules {
    Rules { mode, ..Rules::default() }
}

/// A host that does what it is told: each piece of work takes some ticks, and CPU time.
struct Host {
    state: State,
    now: Duration,
    spent: Duration,
    available: Bytes,
    /// All memory, on a host that does not tell of pressure.
    total: Option<Bytes>,
    pressure: f64,
    second: u32,
    /// What the work under way will answer, and when.
    answer: Option<(Duration, Event)>,
    /// CPU seconds for each second of it, and whether it can be halted.
    rate: f64,
    halts: bool,
    enrolled: BTreeSet<ProcessId>,
    holds: bool,
    /// What merging gives back to each, net.
    gain: i64,
    /// CPU seconds for each second of work.
    cores: f64,
    /// Seconds that a census takes.
    long: f64,
    /// Seconds that a merge takes, and the CPU time that is told of it.
    merging: f64,
    took: Duration,
    /// The CPU time that ksmd should take for each.
    ksmd: Duration,
    /// The part of their time that programs wait for while it works.
    slow: f64,
    /// Milliseconds that a look takes.
    look: u64,
    /// What cannot be withdrawn.
    stuck: Vec<(ProcessId, String)>,
    /// Who refuses to be enrolled.
    refuses: Option<ProcessId>,
    /// For whom there is no memory to be withdrawn.
    clings: BTreeSet<ProcessId>,
    /// Whether withdrawing fails altogether.
    fails: bool,
    /// Who was refused to be withdrawn, and is to be in no plan.
    out: BTreeSet<ProcessId>,
    /// Whom merging gives something else, and what a census plans for whom.
    loses: BTreeSet<ProcessId>,
    plans: BTreeMap<ProcessId, NetBytes>,
    /// What a census tells that they hold.
    holds_what: BTreeMap<ProcessId, Held>,
    /// Why the host is not to be had.
    taken: Option<String>,
    /// What a merge should give back, as far as it matters.
    predicted: Bytes,
    /// Whether ksmd gets to all who have ended.
    sweeps: bool,
    /// Whether settings come back.
    whole: bool,
    /// With whom in it a census takes so much longer.
    costly: Option<(ProcessId, f64)>,
    trace: Vec<(Duration, Action)>,
    /// When, the CPU seconds until then, and those of them that cannot be halted.
    readings: Vec<(f64, f64, f64)>,
}

impl Host {
    fn new(rules: Rules) -> Self {
        Self {
            state: State::new(rules, 7, Duration::ZERO, Duration::ZERO),
            now: Duration::ZERO,
            spent: Duration::ZERO,
            available: Bytes(1 << 34),
            total: None,
            pressure: 0.0,
            second: 0,
            answer: None,
            rate: 0.0,
            halts: false,
            enrolled: BTreeSet::new(),
            holds: false,
            gain: 16 * MIB as i64,
            cores: 1.0,
            long: 0.2,
            merging: 0.5,
            took: Duration::from_millis(100),
            ksmd: Duration::from_millis(50),
            slow: 0.0,
            look: 0,
            stuck: Vec::new(),
            refuses: None,
            clings: BTreeSet::new(),
            fails: false,
            out: BTreeSet::new(),
            loses: BTreeSet::new(),
            plans: BTreeMap::new(),
            holds_what: BTreeMap::new(),
            taken: None,
            predicted: Bytes::ZERO,
            sweeps: true,
            whole: true,
            costly: None,
            trace: Vec::new(),
            readings: vec![(0.0, 0.0, 0.0)],
        }
    }

    fn happen(&mut self, event: Event) {
        let (state, actions) = step(self.state.clone(), self.now, event);
        self.state = state;
        for action in actions {
            self.trace.push((self.now, action.clone()));
            self.carry_out(action);
        }
    }

    fn answer(&mut self, seconds: f64, event: Event) {
        assert!(self.answer.is_none(), "one piece of work at a time");
        self.halts = matches!(event, Event::Censused(_) | Event::Merged(_));
        self.answer = Some((self.now + Duration::from_secs_f64(seconds), event));
    }

    fn carry_out(&mut self, action: Action) {
        if !matches!(action, Action::Say(_) | Action::Halt) {
            self.rate = if let Action::Merge { share, .. } = action { self.cores * share } else { self.cores };
        }
        match action {
            Action::Say(_) | Action::End { .. } => {}
            Action::Halt => {
                if let Some((at, event)) = &mut self.answer {
                    *at = self.now;
                    if let Event::Censused(found) = event {
                        found.partial = true;
                    }
                }
            }
            Action::Hold => {
                assert!(!self.holds);
                self.holds = self.taken.is_none();
                self.answer(0.0, Event::Held(self.taken.clone().map_or(Ok(()), Err)));
            }
            Action::Restore => {
                assert!(self.holds);
                self.holds = false;
                self.answer(0.0, Event::Restored { whole: self.whole });
            }
            Action::Census(processes) => {
                assert!(processes.iter().all(|process| !self.out.contains(process)), "it is to be withdrawn");
                let plan = |&process: &ProcessId| Planned {
                    process,
                    net: self.plans.get(&process).copied().unwrap_or(NetBytes(self.gain.abs())),
                    ksmd: self.ksmd,
                };
                let fresh: Vec<_> = processes.iter().filter(|process| !self.enrolled.contains(process)).collect();
                let planned = fresh.into_iter().map(plan).collect();
                let more = self.costly.filter(|(costly, _)| processes.contains(costly)).map_or(0.0, |(_, more)| more);
                let long = self.long + more;
                let cost = Duration::from_secs_f64(long * self.cores);
                let looked = Bytes(64 * MIB * processes.len() as u64);
                let more =
                    |process| self.costly.filter(|(costly, _)| *costly == process).map_or(1.0, |_| long / self.long);
                let pages = |process| self.state.members().get(&process).map_or(0, |member| member.resident.0 >> 12);
                let efforts = processes.iter().map(|&who| (who, (pages(who) as f64 * more(who)) as u64)).collect();
                let mut found = Censused { cost, looked, efforts, planned, ..Censused::default() };
                found.held.extend(processes.iter().filter_map(|who| Some((*who, self.holds_what.get(who)?.clone()))));
                self.answer(long, Event::Censused(found));
            }
            Action::Merge { processes, share } => {
                assert!(self.holds && share > 0.0 && share <= 1.0);
                assert!(processes.iter().all(|process| !self.out.contains(process)), "it is to be withdrawn");
                let (refused, enrolled): (Vec<_>, Vec<_>) =
                    processes.into_iter().partition(|process| self.refuses == Some(*process));
                self.enrolled.extend(enrolled.iter().copied());
                let net = |process| if self.loses.contains(process) { -(MIB as i64) } else { self.gain };
                let nets: BTreeMap<_, _> = enrolled.iter().map(|who| (*who, NetBytes(net(who)))).collect();
                let merged = Merged {
                    predicted: self.predicted,
                    net: NetBytes(nets.values().map(|net| net.0).sum()),
                    nets,
                    enrolled,
                    refused: refused.into_iter().map(|process| (process, "no".to_owned())).collect(),
                    cost: self.took,
                    ..Merged::default()
                };
                self.answer(self.merging, Event::Merged(merged));
            }
            Action::Look { .. } => {
                assert!(self.holds);
                self.answer(
                    0.0,
                    Event::Looked(Looked {
                        cost: Duration::from_millis(self.look),
                        stuck: Some(self.stuck.clone()),
                        ..Looked::default()
                    }),
                );
            }
            Action::Sweep => {
                assert!(self.holds && self.state.budget().left() > 0.0);
                self.answer(0.1, Event::Swept { whole: self.sweeps });
            }
            Action::Withdraw(extents) => {
                assert!(self.holds && (!self.state.is_pressed() || self.state.stopping.is_some()));
                let processes: Vec<ProcessId> = extents.into_keys().collect();
                let squeezed = |process| {
                    self.state.members().get(process).is_some_and(|member| member.is_squeezed(self.state.rules()))
                };
                let short = self.state.is_pressed() || processes.iter().any(squeezed);
                assert!(!short || self.state.stopping.is_some(), "unmerging takes memory");
                if self.fails {
                    self.out.extend(processes);
                    return self.answer(0.1, Event::Failed("the journal cannot be written".to_owned()));
                }
                let (stay, gone): (Vec<_>, Vec<_>) = processes.into_iter().partition(|who| self.clings.contains(who));
                self.enrolled.retain(|process| !gone.contains(process));
                self.out.retain(|process| !gone.contains(process));
                self.out.extend(&stay);
                let refused = stay.into_iter().map(|process| (process, "there is no memory".to_owned())).collect();
                self.answer(0.1, Event::Withdrawn(Withdrawn { gone, refused, ..Withdrawn::default() }));
            }
        }
    }

    fn tick(&mut self) {
        let began = self.now;
        self.now += TICK;
        let (.., mut unbounded) = self.readings[self.readings.len() - 1];
        if let Some((ends, _)) = &self.answer {
            let worked = ends.min(&self.now).saturating_sub(began).mul_f64(self.rate);
            self.spent += worked;
            unbounded += if self.halts { 0.0 } else { worked.as_secs_f64() };
        }
        self.readings.push((self.now.as_secs_f64(), self.spent.as_secs_f64(), unbounded));
        let readings = Readings {
            spent: self.spent,
            available: Some(self.available),
            total: self.total,
            pressure: self.total.is_none().then_some(self.pressure),
            waits: Some(self.waits()),
            time: TimeOfDay { local: self.second, utc: 12 * 3600 },
            resident: Vec::new(),
            ..Readings::default()
        };
        self.happen(Event::Tick(readings));
        while let Some((_, event)) = self.answer.take_if(|(at, _)| *at <= self.now) {
            self.happen(event);
        }
    }

    /// Programs that want half a CPU, and wait for a fiftieth of their time anyway.
    fn waits(&self) -> Waits {
        let part = if self.answer.is_some() { self.slow.max(0.02) } else { 0.02 };
        let [queued, ran] = [part, 1.0 - part].map(|part| Duration::from_secs_f64(part * 0.125));
        Waits { elapsed: TICK, queued: Some((queued, ran)), ..Waits::default() }
    }

    fn shares(&self) -> Vec<f64> {
        let shares = self.trace.iter().filter_map(|(_, action)| match action {
            Action::Merge { share, .. } => Some(*share),
            _ => None,
        });
        shares.collect()
    }

    fn run(&mut self, seconds: u64) {
        (0..seconds * 4).for_each(|_| self.tick());
    }

    fn did(&self, wanted: impl Fn(&Action) -> bool) -> usize {
        self.trace.iter().filter(|(_, action)| wanted(action)).count()
    }

    /// An operator has a process enrolled, or it ends: nothing of the past counts.
    fn forgive(&mut self, process: ProcessId, event: Event) {
        self.out.remove(&process);
        self.happen(event);
    }

    /// How it ended, if it has.
    fn ended(&self) -> Option<bool> {
        match self.trace.last() {
            Some((_, Action::End { whole })) => Some(*whole),
            _ => None,
        }
    }

    fn said(&self, what: What, reason: Reason) -> usize {
        self.did(|action| matches!(action, Action::Say(said) if (said.what, said.reason) == (what, reason)))
    }
}

fn is_census(action: &Action) -> bool {
    matches!(action, Action::Census(_))
}

#[test]
fn who_comes_is_merged_within_seconds() {
    let mut host = Host::new(rules(Mode::Act));
    host.run(2);
    host.happen(arrival(1));
    host.run(3);
    assert!(host.did(is_census) == 1 && host.enrolled.is_empty(), "it is only taken note of");
    host.run(6);
    assert!(host.enrolled.contains(&id(1)), "{:?}", host.trace);
    host.happen(arrival(3));
    host.run(9);
    assert!(host.enrolled.contains(&id(3)));
    let last = host.trace.iter().rev().find_map(|(_, action)| match action {
        Action::Census(processes) => Some(processes.clone()),
        _ => None,
    });
    assert_eq!(last, Some(vec![id(1), id(3)]), "with a known member of its domain");
}

#[test]
fn nothing_is_done_by_who_observes_and_nothing_changed_by_who_advises() {
    for (mode, censuses) in [(Mode::Observe, false), (Mode::Advise, true)] {
        let mut host = Host::new(rules(mode));
        host.happen(arrival(1));
        host.run(100);
        host.happen(Event::Stop { unmerge: true });
        assert_eq!(host.did(is_census) > 0, censuses);
        let changes = |action: &Action| {
            !matches!(action, Action::Census(_) | Action::Say(_) | Action::Halt | Action::End { .. })
                || matches!(action, Action::Say(said) if said.what == What::Merge && said.acted)
        };
        assert_eq!(host.did(changes), 0, "{:?}", host.trace);
        assert_eq!(host.said(What::Merge, Reason::Profitable) > 0, censuses);
        assert_eq!(host.ended(), Some(true), "nothing is merged");
    }
}

#[test]
fn whoever_pauses_it_gets_the_host_back() {
    let mut host = Host::new(rules(Mode::Act));
    host.happen(arrival(1));
    host.run(1);
    host.happen(Event::Pause);
    host.run(1);
    assert!(!host.holds && host.state.standing().0 == Standing::Paused);
    let before = host.did(is_census);
    host.run(100);
    assert_eq!(host.did(is_census), before);
    host.happen(Event::Resume);
    host.run(10);
    assert!(host.holds && host.enrolled.contains(&id(1)));
}

#[test]
fn it_yields_to_other_writers() {
    let mut host = Host::new(rules(Mode::Act));
    host.happen(arrival(1));
    host.run(1);
    host.happen(Event::Contested("run was 1, it is 0".into()));
    host.run(100);
    assert!(!host.holds && host.state.standing().0 == Standing::Yielding);
    assert_eq!(host.said(What::Yield, Reason::OtherWriter), 1);
    host.happen(Event::Resume);
    host.run(1);
    assert!(host.holds);
    host.happen(Event::Tuner(Some("ksmtuned".into())));
    host.run(1);
    assert!(!host.holds);
    host.happen(Event::Tuner(None));
    host.run(1);
    assert!(host.holds);
    host.happen(Event::Configured(Rules { force: true, ..rules(Mode::Act) }));
    host.happen(Event::Tuner(Some("ksmtuned".into())));
    host.run(1);
    assert!(host.holds, "it was told to");
}

#[test]
fn an_enrolment_that_loses_is_taken_back_once_memory_is_there() {
    let mut host = Host::new(rules(Mode::Act));
    host.gain = -16 * (MIB as i64);
    host.pressure = 50.0;
    host.happen(arrival(1));
    host.run(10);
    assert!(host.enrolled.contains(&id(1)), "nothing is withdrawn while memory is short");
    host.pressure = 0.0;
    host.run(1);
    assert!(host.enrolled.is_empty());
    assert_eq!(host.said(What::Withdraw, Reason::Loses), 1);
}

#[test]
fn it_backs_off_where_it_slows_programs_down_and_comes_back() {
    let mut host = Host::new(rules(Mode::Act));
    (host.merging, host.slow) = (5.0, 0.4);
    host.run(5);
    host.happen(arrival(1));
    host.run(11);
    assert_eq!((host.shares(), host.said(What::Rest, Reason::SlowDown)), (vec![1.0], 1));
    assert_eq!(host.did(|action| *action == Action::Halt), 1, "it is not merged at the pace that slows them down");
    assert_eq!(host.state.standing(), (Standing::Resting, "programs waited longer while it worked".into()));
    let censuses = host.did(is_census);
    host.happen(arrival(3));
    host.run(5);
    assert_eq!(host.did(is_census), censuses, "who comes waits, too");
    host.slow = 0.0;
    host.run(20);
    assert_eq!(host.shares(), [1.0, 0.5]);
    host.happen(arrival(5));
    host.run(20);
    assert_eq!(host.shares(), [1.0, 0.5, 1.0], "nobody waited longer meanwhile");
    host.slow = 0.4;
    host.pressure = 50.0;
    host.happen(arrival(7));
    host.run(20);
    assert!(host.said(What::Rest, Reason::SlowDown) > 1);
    host.happen(arrival(2));
    host.run(3);
    assert!(host.state.members()[&id(2)].looked.is_some(), "memory that is short comes first");
}

#[test]
fn looks_at_what_stays_merged_cost_little() {
    let looks = |host: &Host| host.did(|action| matches!(action, Action::Look { .. }));
    let mut host = Host::new(rules(Mode::Act));
    host.look = 500;
    host.happen(arrival(1));
    host.run(60);
    let before = looks(&host);
    host.run(5000);
    assert!((9..=11).contains(&(looks(&host) - before)), "one in 500 s, a thousand times what it takes");
}

#[test]
fn a_merge_that_gives_back_much_less_than_predicted_is_told_and_made_less_often() {
    let told = |predicted: u64| {
        let mut host = Host::new(rules(Mode::Act));
        host.predicted = Bytes(predicted * MIB);
        host.happen(arrival(1));
        host.run(20);
        let paused = host.state.members()[&id(1)].pause;
        (host.said(What::Leave, Reason::Unprofitable), paused)
    };
    // 16 MiB come back.
    let ((kept, calm), (short, longer)) = (told(32), told(33));
    assert_eq!((kept, short), (0, 1));
    assert_eq!(longer, calm * 2);
}

#[test]
fn merges_in_vain_come_later_each_time() {
    let mut host = Host::new(rules(Mode::Act));
    host.predicted = Bytes(33 * MIB);
    host.happen(arrival(1));
    let mut merges = Vec::new();
    for _ in 0..2000 {
        host.run(1);
        // Whatever it does, as much is predicted again.
        if host.enrolled.remove(&id(1)) {
            merges.push(host.now.as_secs());
        }
    }
    let pauses: Vec<u64> = merges.windows(2).map(|two| two[1] - two[0]).collect();
    assert!(pauses.len() > 3 && pauses.windows(2).all(|two| two[1] * 2 >= two[0] * 3), "{pauses:?}");
}

/// Until ksmd comes by, the kernel counts what has ended as merged.
#[test]
fn ksmd_passes_by_who_has_ended_soon_and_once_for_several() {
    let swept = |host: &Host| host.did(|action| matches!(action, Action::Sweep));
    let mut host = Host::new(rules(Mode::Act));
    [1, 2, 3, 4].into_iter().for_each(|pid| host.happen(arrival(pid)));
    host.run(60);
    host.happen(Event::Went(id(9)));
    host.run(60);
    assert_eq!(swept(&host), 0, "nobody who was merged has ended");
    [1, 2].into_iter().for_each(|pid| host.happen(Event::Went(id(pid))));
    host.run(4);
    assert_eq!(swept(&host), 0, "others may end as well");
    host.run(3);
    assert_eq!(swept(&host), 1);
    host.run(600);
    assert_eq!(swept(&host), 1);
    host.sweeps = false;
    host.happen(Event::Went(id(3)));
    host.run(60);
    assert_eq!(swept(&host), 2);
    host.run(65);
    assert_eq!(swept(&host), 3, "it is tried again where ksmd did not get there");
    host.sweeps = true;
    host.run(600);
    assert_eq!(swept(&host), 4);
    host.happen(Event::Pause);
    host.happen(Event::Went(id(4)));
    host.run(60);
    assert_eq!(swept(&host), 4, "others drive ksmd");
    // Nor in quiet hours.
    let mut host = Host::new(Rules { quiet: vec![Hours { from: 100, to: 1000, utc: false }], ..rules(Mode::Act) });
    [1, 2].into_iter().for_each(|pid| host.happen(arrival(pid)));
    host.run(60);
    assert!(host.enrolled.contains(&id(1)));
    host.second = 100;
    host.happen(Event::Went(id(1)));
    host.run(60);
    assert_eq!(swept(&host), 0);
    host.second = 1000;
    host.run(1);
    assert_eq!(swept(&host), 1);
}

#[test]
fn what_cannot_be_withdrawn_is_told_once() {
    let mut host = Host::new(rules(Mode::Act));
    host.happen(arrival(1));
    host.run(10);
    host.stuck = vec![(id(1), "there is no memory for copies".into())];
    host.run(300);
    assert_eq!(host.said(What::Refuse, Reason::Refused), 1);
    host.stuck[0].1 = "it does not stop".into();
    host.run(300);
    assert_eq!(host.said(What::Refuse, Reason::Refused), 2, "another reason is news");
    host.stuck.clear();
    host.run(300);
    host.stuck = vec![(id(1), "it does not stop".into())];
    host.run(300);
    assert_eq!(host.said(What::Refuse, Reason::Refused), 3, "and so is what was over");
}

#[test]
fn what_costs_more_than_it_gives_back_is_not_merged() {
    // 50 ms of ksmd and 200 ms of a census for 16 MiB are 0.016 s for each.
    let mut host = Host::new(Rules { price: 0.015, ..rules(Mode::Act) });
    host.happen(arrival(1));
    host.run(60);
    assert!(host.shares().is_empty());
    assert!(host.said(What::Leave, Reason::Unprofitable) > 0);
    // 300 ms for 16 MiB are 0.019 s for each: as it was foreseen it pays, and as it came out it does not.
    let mut host = Host::new(Rules { price: 0.018, ..rules(Mode::Act) });
    host.took = Duration::from_millis(300);
    host.happen(arrival(1));
    host.run(12);
    assert_eq!(host.shares(), [1.0]);
    let member = &host.state.members()[&id(1)];
    assert!(member.pause >= host.state.rules().ripens * 2, "{member:?}");
}

#[test]
fn an_operator_has_the_last_word() {
    let mut host = Host::new(rules(Mode::Act));
    host.happen(arrival(1));
    host.run(10);
    host.happen(Event::Withdraw(id(1)));
    host.run(100);
    assert!(host.enrolled.is_empty());
    host.happen(Event::Enrol(id(1)));
    host.run(3);
    assert!(host.enrolled.contains(&id(1)));
}

#[test]
fn it_rests_above_the_goal_and_in_quiet_hours() {
    let mut host = Host::new(Rules { keep_available: Some(Bytes(1 << 30)), ..rules(Mode::Act) });
    host.happen(arrival(1));
    host.run(20);
    assert_eq!((host.did(is_census), host.said(What::Rest, Reason::Goal)), (0, 1));
    host.available = Bytes(1 << 29);
    host.run(2);
    assert!(host.did(is_census) > 0);
    let mut host = Host::new(Rules { quiet: vec![Hours { from: 0, to: 10, utc: false }], ..rules(Mode::Act) });
    host.happen(arrival(1));
    host.run(20);
    assert_eq!((host.did(is_census), host.said(What::Rest, Reason::QuietHours)), (0, 1));
    assert_eq!(host.state.waits().as_deref(), Some("these are quiet hours"));
    host.second = 10;
    host.run(2);
    assert!(host.did(is_census) > 0 && host.state.waits().is_none());
}

#[test]
fn it_stops_with_settings_back_and_merges_kept_or_withdrawn() {
    for unmerge in [false, true] {
        let mut host = Host::new(rules(Mode::Act));
        host.happen(arrival(1));
        host.run(10);
        host.happen(Event::Stop { unmerge });
        host.run(2);
        assert_eq!((host.holds, host.enrolled.is_empty()), (false, unmerge));
        assert_eq!(host.ended(), Some(true));
        let length = host.trace.len();
        host.happen(arrival(2));
        host.run(10);
        assert_eq!(host.trace.len(), length, "nothing comes after the end");
    }
}

#[test]
fn a_census_that_never_fits_is_refused() {
    let mut host = Host::new(Rules { burst: Duration::from_millis(10), ..rules(Mode::Act) });
    host.happen(arrival(1));
    host.run(100);
    assert_eq!(host.did(is_census), 0);
    assert!((1..5).contains(&host.said(What::Refuse, Reason::Budget)));
}

#[test]
fn what_must_not_be_merged_any_more_is_withdrawn() {
    let mut host = Host::new(rules(Mode::Act));
    host.happen(arrival(1));
    host.run(10);
    let Event::Came(known) = arrival(1) else { unreachable!() };
    host.happen(Event::Came(Arrival { excluded: Some("it holds keys".into()), ..known }));
    host.run(2);
    assert!(host.enrolled.is_empty());
    assert_eq!(host.said(What::Leave, Reason::Excluded), 1);
}
