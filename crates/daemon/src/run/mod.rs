//! The daemon: the loop with a clock.
//!
//! One thread takes in what happens, hands it to [`crate::decide::step`] and gives out what that decides;
//! another carries it out, since a merge takes seconds in which somebody may ask or stop. Who runs is told by the host
//! or found out by polling ([`roster`]). While it may act, the daemon has the host's one [`Session`](pagefold_host::transaction::Session)
//! all the time and ksmd rests between merges; paused, or where somebody else drives KSM, it has not, and the settings
//! are what they were. What programs wait for is read at each tick while it works and now and then while it rests
//! ([`probe`]); what they take by fair share is found out by a third thread, seldom ([`fair`]).

mod cgroups;
mod clock;
mod fair;
mod operator;
mod probe;
pub mod replay;
mod roster;
mod settings;
mod snapshot;
mod worker;

pub use clock::utc_offset;
pub use fair::Fair;
pub use pagefold_sys::allocator::give_back_big_blocks;
pub use settings::Settings;
pub use snapshot::{Pass, Said, Shared, Snapshot, Told, Used};

use crate::decide::{Action, Decision, Event, Member, Readings, Standing, State, step};
use cgroups::Cgroups;
use fair::Walk;
use jiff::tz::TimeZone;
use operator::Operator;
use pagefold_base::process::Process;
use pagefold_base::{Absent, Bytes, NetBytes, ProcessId};
use pagefold_census::tally::Party;
use pagefold_host::counted::Counted;
use pagefold_host::transaction::session;
use pagefold_host::{Host, observe};
use pagefold_merge::execute::own_cpu;
use pagefold_merge::ksmd::Ksmd;
use pagefold_merge::splitting::Notes;
use probe::Probe;
use roster::Roster;
use snapshot::Meter;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant, SystemTime};
use worker::{Order, Worker};

/// Between two polls while somebody has just come or work is under way.
const QUICK: Duration = Duration::from_millis(250);

/// Between two polls otherwise, where the host tells of programs as they begin, and where it does not.
const CALM: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(1)];

/// How long work may be under way without any answer of the host before it counts as hung. No honest answer takes as
/// long: the longest is to advice over much memory at once, of which each page is copied, some seconds for a GiB where
/// it is swapped out meanwhile.
const HUNG: Duration = Duration::from_secs(600);

/// Decisions that are kept.
const DECISIONS: usize = 100;

/// Processes that a decision names at most.
const NAMES: usize = 4;

/// What is said to the daemon.
pub enum Message {
    /// Something happened: to be taken in as it is.
    Event(Event),
    /// Other settings are in force.
    Settings(Box<Settings>),
    /// Somebody asks how it stands.
    Ask(Sender<Box<Snapshot>>),
    /// What the worker tells.
    #[doc(hidden)]
    Told(Told),
}

/// Why the daemon cannot run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no key for fingerprints.
    #[error(transparent)]
    Census(#[from] pagefold_census::Error),
    /// The processes cannot be listed.
    #[error("cannot list the processes")]
    Processes(#[source] Absent),
}

/// What a process is called in decisions and in the matrix.
pub fn label(process: &Process) -> String {
    Party::Process.name(process).unwrap_or_default()
}

/// The loop, until it is told to stop and has put everything back.
pub struct Daemon<'h, 'a> {
    host: &'h dyn Host,
    began: Instant,
    /// The time since then at which what happens is taken in.
    now: Duration,
    state: Option<State>,
    settings: Arc<Settings>,
    roster: Roster,
    probe: Probe,
    cgroups: Cgroups,
    tuner: Option<String>,
    /// What an operator has said, where it can be kept.
    operator: Option<Operator>,
    orders: Sender<Order>,
    /// Whose page tables are to be walked.
    walks: Sender<Walk>,
    turns: fair::Turns,
    /// Ends the work under way soon.
    halt: Arc<AtomicBool>,
    pulse: Pulse,
    ksmd_thread: Option<Ksmd<'h>>,
    ksmd: Meter,
    own: Meter,
    snapshot: Snapshot,
    /// What merges noted, those of other commands as well.
    notes: Option<Notes>,
    /// Whether everything is back, once it has ended.
    ended: Option<bool>,
    /// Gets each decision as it falls, and what could not be done.
    log: &'a mut dyn FnMut(&str),
}

/// What goes to the other threads, and what is seen of them.
struct Threads {
    orders: Sender<Order>,
    walks: Sender<Walk>,
    /// What the host has answered to whoever does the work.
    answers: Arc<AtomicU64>,
}

/// Whether the work under way gets on.
struct Pulse {
    /// What the host has answered to whoever does the work.
    answers: Arc<AtomicU64>,
    /// How much that was when it was seen to have changed, and when that was.
    last: (u64, Duration),
    hung: bool,
}

impl Pulse {
    /// Whether work that is under way, or none, has got on lately.
    fn beats(&mut self, now: Duration, works: bool) -> bool {
        let answers = self.answers.load(Ordering::Relaxed);
        if !works || answers != self.last.0 {
            self.last = (answers, now);
        }
        now.saturating_sub(self.last.1) < HUNG
    }
}

/// Run the daemon over a host. `messages` is what is said to it; `sender` is the other end of it. `alive` is called
/// about once a second while all is well and the work under way gets on, `log` for what an operator should know. Tells
/// whether everything was put back and withdrawn in the end that was to be; what was not, `log` is told.
pub fn run(
    host: &dyn Host,
    directory: &Path,
    settings: Settings,
    seed: u64,
    (sender, messages): (Sender<Message>, Receiver<Message>),
    alive: &mut dyn FnMut(&State),
    log: &mut dyn FnMut(&str),
) -> Result<bool, Error> {
    let answers = Arc::default();
    let counted = Counted::new(host, Arc::clone(&answers));
    let worker = Worker::new(&counted, directory.to_owned(), sender.clone())?;
    std::thread::scope(|scope| {
        let (orders, work) = mpsc::channel();
        let working = scope.spawn(move || worker.run(&work));
        let (walks, walked) = mpsc::channel();
        scope.spawn(move || fair::walk(host, &walked, &sender));
        let mut daemon = Daemon::new(host, settings, seed, Threads { orders, walks, answers }, log);
        daemon.take_up(directory);
        let done = daemon.run(&messages, alive, || working.is_finished());
        drop(daemon);
        done
    })
}

impl<'h, 'a> Daemon<'h, 'a> {
    fn new(
        host: &'h dyn Host,
        settings: Settings,
        seed: u64,
        Threads { orders, walks, answers }: Threads,
        log: &'a mut dyn FnMut(&str),
    ) -> Self {
        let began = Instant::now();
        let ksmd = Ksmd::find(host).ok();
        let spent = own_cpu() + ksmd.as_ref().and_then(|ksmd| ksmd.cpu().ok()).unwrap_or_default();
        let state = State::new(settings.rules.clone(), seed, Duration::ZERO, spent);
        let settings = Arc::new(settings);
        let vmstat = observe::vmstat(host).unwrap_or_default();
        let snapshot = Snapshot {
            state: state.clone(),
            settings: Arc::clone(&settings),
            started: SystemTime::now(),
            decisions: VecDeque::new(),
            reasons: BTreeMap::new(),
            who: Vec::new(),
            counts: BTreeMap::new(),
            census: None,
            shared: Shared::default(),
            by_splitting: BTreeMap::new(),
            fair: BTreeMap::new(),
            ranges: BTreeMap::new(),
            passes: (0, 0),
            took: Default::default(),
            reached: (Bytes::ZERO, NetBytes(0)),
            last: None,
            programs: Ok(()),
            ksmd: None,
            own: Used::default(),
            before: (vmstat.get("thp_split_page").copied(), vmstat.get("cow_ksm").copied()),
            remains: Vec::new(),
            hung: false,
        };
        Self {
            host,
            began,
            now: Duration::ZERO,
            state: Some(state),
            settings,
            roster: Roster::new(host),
            probe: Probe::default(),
            cgroups: Cgroups::default(),
            tuner: None,
            operator: None,
            orders,
            walks,
            turns: fair::Turns::default(),
            halt: Arc::default(),
            pulse: Pulse { answers, last: (0, Duration::ZERO), hung: false },
            ksmd_thread: ksmd,
            ksmd: Meter::default(),
            own: Meter::default(),
            snapshot,
            notes: None,
            ended: None,
            log,
        }
    }

    fn run(
        &mut self,
        messages: &Receiver<Message>,
        alive: &mut dyn FnMut(&State),
        dead: impl Fn() -> bool,
    ) -> Result<bool, Error> {
        if let Err(why) = self.roster.follows() {
            (self.log)(&format!("new programs are found by polling; the process connector: {why}"));
        }
        let mut polled: Option<Instant> = None;
        loop {
            if let Some(whole) = self.ended {
                return Ok(whole);
            }
            let pause = match self.roster.follows() {
                _ if self.is_quick() => QUICK,
                Ok(()) => CALM[0],
                Err(_) => CALM[1],
            };
            let left = polled.map_or(Duration::ZERO, |at| pause.saturating_sub(at.elapsed()));
            match messages.recv_timeout(left) {
                Ok(message) => {
                    self.now = self.began.elapsed();
                    self.take(message);
                }
                Err(RecvTimeoutError::Timeout) => {
                    self.now = self.began.elapsed();
                    self.tick()?;
                    polled = Some(Instant::now());
                    if self.is_well() {
                        alive(self.state());
                    }
                    if dead() {
                        (self.log)("the thread that does the work has ended");
                        return Ok(false);
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(false),
            }
        }
    }

    /// Go on with what an operator said to a daemon that was killed, and with what merges noted.
    fn take_up(&mut self, directory: &Path) {
        self.notes = Some(Notes::new(directory));
        self.read_notes();
        let taken = session::boot(self.host).map_err(std::io::Error::other);
        let lives = |process| worker::lives(self.host, process);
        match taken.and_then(|boot| Operator::take_up(directory, boot, lives)) {
            Ok((operator, events, why)) => {
                if let Some(why) = why {
                    (self.log)(&format!(
                        "what an operator said before cannot be read: it is paused until told to resume: {why}"
                    ));
                } else if !events.is_empty() {
                    (self.log)("a daemon was killed before: what an operator said to it holds");
                }
                events.into_iter().for_each(|event| self.step(event));
                self.operator = Some(operator);
            }
            Err(why) => {
                let path = directory.join(operator::FILE);
                (self.log)(&format!("what an operator says is not kept in {}: {why}", path.display()));
            }
        }
    }

    /// Take in what merges have noted since.
    fn read_notes(&mut self) {
        let Some(notes) = &mut self.notes else { return };
        match notes.update(self.host, &mut self.snapshot.by_splitting) {
            Ok(grown) => grown.into_iter().for_each(|process| self.turns.changed(process)),
            Err(why) => (self.log)(&format!("what merges freed by splitting huge pages is not known: {why}")),
        }
    }

    /// Keep what an event says of an operator's, if anything.
    fn keep(&mut self, event: &Event) {
        let kept = self.operator.as_mut().map_or(Ok(()), |operator| operator.heed(event));
        if let Err(why) = kept {
            (self.log)(&format!("what an operator says does not outlive this daemon: {why}"));
        }
    }

    fn state(&self) -> &State {
        self.state.as_ref().expect("it is put back after every step")
    }

    /// Whether the work under way gets on. Tells once where it does not.
    fn is_well(&mut self) -> bool {
        let well = self.pulse.beats(self.now, self.state().awaits());
        if !well && !self.pulse.hung {
            let minutes = HUNG.as_secs() / 60;
            (self.log)(&format!("the work under way has had no answer from the host for {minutes} minutes"));
        }
        self.pulse.hung = !well;
        well
    }

    fn is_quick(&self) -> bool {
        self.roster.is_young()
            || self.roster.grows()
            || self.state().standing().0 == Standing::Working
            || self.is_soon()
    }

    /// Whether somebody's turn comes before the next calm poll.
    fn is_soon(&self) -> bool {
        let now = self.began.elapsed();
        // Not those whose turn has come long ago, and who wait for something else.
        let soon = now.saturating_sub(CALM[1])..=now + CALM[1];
        self.state().members().values().any(|member| member.is_open() && soon.contains(&member.next))
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Event(event) => self.step(event),
            Message::Settings(settings) => {
                let rules = settings.rules.clone();
                self.settings = Arc::from(settings);
                self.roster.forget();
                self.step(Event::Configured(rules));
            }
            Message::Ask(answer) => {
                // Who asked may have gone.
                let _ = answer.send(Box::new(self.snapshot()));
            }
            Message::Told(told) => self.told(told),
        }
    }

    fn tick(&mut self) -> Result<(), Error> {
        let now = self.now;
        let polled = self.roster.poll(self.host, now, &self.settings).map_err(Error::Processes)?;
        // Before anything is done for those who have come.
        let tuner = self.roster.tuner().map(|tuner| tuner.name().to_owned());
        if tuner != self.tuner {
            self.tuner.clone_from(&tuner);
            self.step(Event::Tuner(tuner));
        }
        for event in polled.events {
            match &event {
                Event::Went(process) => {
                    self.snapshot.counts.remove(process);
                    self.snapshot.ranges.remove(process);
                    self.snapshot.fair.remove(process);
                }
                // It may be another program.
                Event::Came(arrival) if self.snapshot.fair.remove(&arrival.process).is_some() => {
                    self.turns.changed(arrival.process);
                }
                _ => {}
            }
            self.step(event);
        }
        let own = own_cpu();
        let ksmd = self.ksmd_thread.as_ref().and_then(|ksmd| ksmd.cpu().ok());
        self.own.read(now, own);
        if let Some(ksmd) = ksmd {
            self.ksmd.read(now, ksmd);
        }
        let works = self.state().standing().0 == Standing::Working;
        let members = self.roster.members().map(|member| member.id);
        let waits = self.probe.read(self.host, now, works, members);
        let memory = observe::memory(self.host).ok();
        let cgroups = self.cgroups.read(self.host, now, self.roster.members());
        self.step(Event::Tick(Readings {
            spent: own + ksmd.unwrap_or_default(),
            available: memory.as_ref().and_then(|memory| memory.available.clone().ok()),
            total: memory.and_then(|memory| memory.total.ok()),
            cgroups,
            pressure: observe::pressure(self.host).ok().map(|pressure| pressure.some.avg10),
            waits,
            time: clock::time_of_day(SystemTime::now(), &TimeZone::system()),
            resident: polled.resident,
            ran: polled.ran,
        }));
        self.read_notes();
        self.send_walk();
        Ok(())
    }

    /// Have the process walked whose turn it is, if any.
    fn send_walk(&mut self) {
        let noted = &self.snapshot.by_splitting;
        let members = || self.state.as_ref().into_iter().flat_map(|state| state.members());
        let walk = |(process, member): (&ProcessId, &Member)| Walk {
            process: *process,
            counts_share: member.resident <= fair::LARGEST,
            counts_zeros: noted.contains_key(process),
        };
        let walks = members().map(walk).filter(|walk| walk.counts_share || walk.counts_zeros);
        let Some(next) = self.turns.next(self.now, walks.map(|walk| walk.process)) else { return };
        if let Some(walk) = members().map(walk).find(|walk| walk.process == next) {
            let _ = self.walks.send(walk);
        }
    }

    fn step(&mut self, event: Event) {
        if let Event::Withdrawn(withdrawn) = &event {
            self.snapshot.ranges.retain(|process, _| !withdrawn.gone.contains(process));
            withdrawn.gone.iter().for_each(|process| self.turns.changed(*process));
        }
        if let Event::Looked(looked) = &event {
            looked.from.iter().for_each(|process| self.turns.changed(*process));
        }
        self.keep(&event);
        let state = self.state.take().expect("it is put back after every step");
        let (state, actions) = step(state, self.now, event);
        self.state = Some(state);
        for action in actions {
            match action {
                Action::Say(decision) => self.say(decision),
                Action::Halt => self.halt.store(true, Ordering::Relaxed),
                Action::End { whole } => {
                    self.ended = Some(whole);
                    if let Some(Err(why)) = self.operator.take().map(|operator| operator.forget()) {
                        (self.log)(&format!("what an operator said is left behind: {why}"));
                    }
                }
                action => {
                    self.halt = Arc::default();
                    let (settings, halt) = (Arc::clone(&self.settings), Arc::clone(&self.halt));
                    let order = Order { action, settings, halt };
                    // Where the worker has ended, the loop ends at its next tick.
                    let _ = self.orders.send(order);
                }
            }
        }
    }

    fn say(&mut self, decision: Decision) {
        let mut names: Vec<String> = decision.whom.iter().take(NAMES).map(|process| self.label(*process)).collect();
        if decision.whom.len() > NAMES {
            names.push(format!("{} more", decision.whom.len() - NAMES));
        }
        let whom = if names.is_empty() { "this host".to_owned() } else { names.join(", ") };
        (self.log)(&format!("{} {whom}: {}", decision.what.word(), decision.why));
        *self.snapshot.reasons.entry(decision.reason).or_default() += 1;
        self.snapshot.decisions.push_front(Said { at: SystemTime::now(), whom, decision });
        self.snapshot.decisions.truncate(DECISIONS);
    }

    fn label(&self, process: ProcessId) -> String {
        let who = self.roster.members().find(|who| who.id == process);
        who.map_or_else(|| format!("process {}", process.pid), label)
    }

    fn told(&mut self, told: Told) {
        let snapshot = &mut self.snapshot;
        match told {
            Told::Census { counts, unseen, matrix, seconds, cost } => {
                snapshot.passes.0 += 1;
                snapshot.took.0 += Duration::from_secs_f64(seconds);
                snapshot.took.1 += cost;
                snapshot.census = Some((SystemTime::now(), unseen));
                let processes = counts.len() as u64;
                let (predicted, net) = (Bytes::ZERO, None);
                snapshot.last = Some(Pass { at: SystemTime::now(), seconds, cost, processes, predicted, net });
                snapshot.counts.extend(counts);
                snapshot.shared.add(&matrix);
            }
            Told::Merge { ranges, predicted, net, seconds, cost } => {
                snapshot.passes.1 += 1;
                snapshot.took.0 += seconds;
                snapshot.took.1 += cost;
                snapshot.reached.0 += predicted;
                snapshot.reached.1.0 += net.0;
                ranges.keys().for_each(|process| self.turns.changed(*process));
                snapshot.ranges.extend(ranges);
                if let Some(last) = &mut snapshot.last {
                    last.at = SystemTime::now();
                    last.seconds += seconds.as_secs_f64();
                    last.cost += cost;
                    (last.predicted, last.net) = (predicted, Some(net));
                }
            }
            Told::Walked { process, fair, uncounted_zeros, cost } => {
                let mut news = false;
                if let (Some(noted), Some(there)) = (snapshot.by_splitting.get_mut(&process), uncounted_zeros) {
                    news = there < *noted;
                    *noted = (*noted).min(there);
                }
                if let Some(fair) = fair {
                    let before = snapshot.fair.insert(process, fair);
                    news |= !before.is_some_and(|before| before.is_like(&fair));
                }
                self.turns.walked(self.now, process, cost, news);
            }
            Told::PutBack(was) => (self.log)(&format!("a pagefold was killed before; put back: {was}")),
            Told::Remains(what) => {
                (self.log)(&format!("not done: {what}"));
                snapshot.remains.push(what);
                let length = snapshot.remains.len();
                snapshot.remains.drain(..length.saturating_sub(DECISIONS));
            }
        }
    }

    fn snapshot(&mut self) -> Snapshot {
        self.read_notes();
        let who: Vec<Process> = self.roster.members().cloned().collect();
        let labels: BTreeSet<String> = who.iter().map(label).collect();
        self.snapshot.shared.retain(|label| labels.contains(label));
        // Who has ended meanwhile may have been in the last census or merge.
        let lives: BTreeSet<ProcessId> = who.iter().map(|who| who.id).collect();
        self.snapshot.counts.retain(|process, _| lives.contains(process));
        self.snapshot.ranges.retain(|process, _| lives.contains(process));
        self.snapshot.fair.retain(|process, _| lives.contains(process));
        // Others are kept: a process of which a merge noted something may become a member later.
        let mut by_splitting = self.snapshot.by_splitting.clone();
        by_splitting.retain(|process, _| lives.contains(process));
        Snapshot {
            by_splitting,
            state: self.state().clone(),
            settings: Arc::clone(&self.settings),
            who,
            programs: self.roster.follows(),
            hung: self.pulse.hung,
            ksmd: self.ksmd.used(),
            own: self.own.used().unwrap_or_default(),
            ..self.snapshot.clone()
        }
    }
}

#[cfg(test)]
mod tests;
