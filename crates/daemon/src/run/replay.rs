//! The daemon over a recording of many moments: the same roster and the same decisions by the recorded clock.
//!
//! Each moment is a tick. A census is answered within it, at the price that the model takes it for, because what it
//! took depends on the machine that replays. Nothing can be changed, so the daemon only advises, and the host goes on
//! as it was recorded. The same recording, settings and seed give the same decisions.

use super::cgroups::Cgroups;
use super::roster::Roster;
use super::worker::{efforts, read, request, worth, young};
use super::{Error, Settings, label};
use crate::decide::{Action, CENSUS_SECONDS, Censused, Decision, Event, Readings, State, TimeOfDay, step};
use pagefold_base::process::Process;
use pagefold_base::{PageSize, ProcessId};
use pagefold_host::{Host, observe};
use pagefold_merge::Ages;
use pagefold_merge::ksmd::Ksmd;
use pagefold_merge::prepare::prepare;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// A host at a moment.
pub struct Moment<'h> {
    /// The host.
    pub host: &'h dyn Host,
    /// Since the first moment.
    pub at: Duration,
    /// What clocks showed.
    pub time: TimeOfDay,
}

/// A daemon that is taken through a recording.
pub struct Replay {
    settings: Settings,
    seed: u64,
    roster: Option<Roster>,
    cgroups: Cgroups,
    tuner: Option<String>,
    state: Option<State>,
    ages: Ages,
    began: Instant,
    /// CPU time of the censuses, as the model takes it.
    spent: Duration,
    labels: BTreeMap<ProcessId, String>,
}

impl Replay {
    /// Before the first moment.
    pub fn new(settings: Settings, seed: u64, page_size: PageSize) -> Result<Self, Error> {
        let began = Instant::now();
        Ok(Self {
            settings,
            seed,
            roster: None,
            cgroups: Cgroups::default(),
            tuner: None,
            state: None,
            ages: Ages::since(page_size, began)?,
            began,
            spent: Duration::ZERO,
            labels: BTreeMap::new(),
        })
    }

    /// Take it through the next moment. `say` gets each decision with the names of those whom it is about.
    pub fn moment(&mut self, moment: &Moment<'_>, say: &mut dyn FnMut(&[String], &Decision)) -> Result<(), Error> {
        let Moment { host, at, time } = *moment;
        let roster = self.roster.get_or_insert_with(|| Roster::new(host));
        let polled = roster.poll(host, at, &self.settings).map_err(Error::Processes)?;
        self.labels = roster.members().map(|who: &Process| (who.id, label(who))).collect();
        let mut events = VecDeque::from(polled.events);
        let tuner = roster.tuner().map(|tuner| tuner.name().to_owned());
        if tuner != self.tuner {
            self.tuner.clone_from(&tuner);
            events.push_front(Event::Tuner(tuner));
        }
        let ksmd = Ksmd::find(host).and_then(|ksmd| ksmd.cpu()).unwrap_or_default();
        let memory = observe::memory(host).ok();
        events.push_back(Event::Tick(Readings {
            spent: self.spent + ksmd,
            available: memory.as_ref().and_then(|memory| memory.available.clone().ok()),
            total: memory.and_then(|memory| memory.total.ok()),
            cgroups: self.cgroups.read(host, at, roster.members()),
            pressure: observe::pressure(host).ok().map(|pressure| pressure.some.avg10),
            // What programs waited for is not recorded.
            waits: None,
            time,
            resident: polled.resident,
            ran: polled.ran,
        }));
        let mut state =
            self.state.take().unwrap_or_else(|| State::new(self.settings.rules.clone(), self.seed, at, ksmd));
        while let Some(event) = events.pop_front() {
            let actions;
            (state, actions) = step(state, at, event);
            for action in actions {
                match action {
                    Action::Say(decision) => say(&self.names(&decision), &decision),
                    Action::Census(processes) => events.push_back(self.census(host, at, &processes)),
                    Action::Halt | Action::End { .. } => {}
                    _ => events.push_back(Event::Failed("a recording cannot be changed".to_owned())),
                }
            }
        }
        self.state = Some(state);
        Ok(())
    }

    fn names(&self, decision: &Decision) -> Vec<String> {
        let name = |process: &ProcessId| {
            self.labels.get(process).cloned().unwrap_or_else(|| format!("process {}", process.pid))
        };
        decision.whom.iter().map(name).collect()
    }

    fn census(&mut self, host: &dyn Host, at: Duration, processes: &[ProcessId]) -> Event {
        self.ages.retain(|process| self.labels.contains_key(&process));
        let settings = Settings { settle: Duration::ZERO, threads: 1, ..self.settings.clone() };
        let excluded = |process: &Process| settings.exclusions.reason(process);
        let progress = pagefold_census::Progress::default();
        let ages = Some((&mut self.ages, self.began + at));
        let never = AtomicBool::new(false);
        let prepared = prepare(host, &request(processes, &settings), &excluded, ages, &progress, &never);
        let mut prepared = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return Event::Failed(error.to_string()),
        };
        let chosen: BTreeSet<ProcessId> = processes.iter().copied().collect();
        prepared.plan.keep_to(|process| chosen.contains(&process));
        let looked =
            host.page_size().of(prepared.census.subjects.iter().map(|subject| read(subject, &self.ages)).sum());
        let cost = Duration::from_secs_f64(looked.0 as f64 / 1048576.0 * CENSUS_SECONDS);
        self.spent += cost;
        Event::Censused(Censused {
            cost,
            looked,
            efforts: efforts(&prepared.census, &self.ages),
            planned: worth(&prepared.plan),
            young: young(&prepared, &settings),
            held: prepared.held,
            partial: false,
        })
    }
}
