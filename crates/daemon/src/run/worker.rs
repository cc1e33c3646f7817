//! Carrying out what was decided, one piece of work after the other, on a thread of its own.
//!
//! The worker has what changes the host: the session while it is held, what is watched and what was withdrawn, the ages
//! of contents, the plan of the last census. It answers each order with one event; what a piece of work cost is what
//! the process and ksmd used meanwhile.

use super::{Message, Settings, Told};
use crate::decide::{Action, Censused, Event, Extent, Looked, Merged, Planned as Worth, Strikes, Withdrawn};
use pagefold_base::ksm::RMAP_ITEM_BYTES;
use pagefold_base::process::Process;
use pagefold_base::{Absent, AddressRange, Bytes, NetBytes, Pages, ProcessId};
use pagefold_census::Selection;
use pagefold_census::results::{Census, SubjectCensus};
use pagefold_host::act::NOT_MAPPED;
use pagefold_host::transaction::session;
use pagefold_host::transaction::session::Session;
use pagefold_host::{Host, observe};
use pagefold_merge::Ages;
use pagefold_merge::decide::outcome::{Change, End, Outcome};
use pagefold_merge::decide::plan::{Plan, Target};
use pagefold_merge::execute as merge;
use pagefold_merge::execute::{After, Planned, carry_out, own_cpu};
use pagefold_merge::ksmd;
use pagefold_merge::prepare::{Prepared, Request, prepare};
use pagefold_merge::recheck::{Moment, Whom};
use pagefold_merge::trial::Trial;
use pagefold_merge::unmerge;
use pagefold_sys::allocator::give_back_free_blocks;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

/// How often it is looked whether somebody else writes KSM's settings.
const GUARD: Duration = Duration::from_secs(5);

/// Rows of the sharing matrix.
const PARTIES: usize = 20;

/// What a region takes of a census, in pages that are read: 10 us beside 1.3 us, measured on a program of 60,000 pages
/// in one region and in as many, on a 2-core virtual machine.
const REGION: u64 = 8;

/// So many pages that are remembered take the time of one that is read, to be listed and looked up (`make bench
/// ARGS=again`).
const SPARED: u64 = 5;

/// A piece of work, with what is in force.
pub(super) struct Order {
    pub action: Action,
    pub settings: Arc<Settings>,
    /// Ends it soon.
    pub halt: Arc<AtomicBool>,
}

pub(super) struct Worker<'h> {
    host: &'h dyn Host,
    directory: PathBuf,
    /// Ends what is under way soon.
    halt: Arc<AtomicBool>,
    tell: Sender<Message>,
    session: Option<Session<'h>>,
    contested: bool,
    /// Whether ksmd may not have passed by those yet who ended before the host was held.
    inherits: bool,
    trial: Trial<'h>,
    ages: Ages,
    strikes: Strikes,
    /// What it has enrolled of whom, whether that was taken or not.
    enrolled: BTreeMap<ProcessId, Vec<AddressRange>>,
    began: Instant,
    prepared: Option<Prepared>,
}

/// Why a piece of work could not be done.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Session(#[from] session::Error),
    #[error(transparent)]
    Census(#[from] pagefold_census::Error),
    #[error("the host is not held")]
    NotHeld,
}

impl<'h> Worker<'h> {
    pub fn new(host: &'h dyn Host, directory: PathBuf, tell: Sender<Message>) -> Result<Self, pagefold_census::Error> {
        let ages = Ages::new(host.page_size())?;
        let trial = Trial::new(host);
        Ok(Self {
            host,
            directory,
            halt: Arc::default(),
            tell,
            session: None,
            contested: false,
            inherits: true,
            trial,
            ages,
            strikes: Strikes::default(),
            enrolled: BTreeMap::new(),
            began: Instant::now(),
            prepared: None,
        })
    }

    /// Work until there are no more orders. What is held then is put back.
    pub fn run(mut self, orders: &Receiver<Order>) {
        loop {
            match orders.recv_timeout(GUARD) {
                Ok(order) => {
                    let takes_much = matches!(order.action, Action::Census(_) | Action::Merge { .. });
                    let event = self.carry_out(order);
                    self.tell(Message::Event(event));
                    if takes_much {
                        give_back_free_blocks();
                    }
                }
                Err(RecvTimeoutError::Timeout) => self.guard(),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn tell(&self, message: Message) {
        // Nobody listens once the daemon ends.
        let _ = self.tell.send(message);
    }

    /// See whether somebody else has written a setting. Told once.
    fn guard(&mut self) {
        let Some(session) = self.session.as_ref().filter(|_| !self.contested) else { return };
        if let Err(error @ session::Error::Contested { .. }) = session.uncontested() {
            self.contested = true;
            self.tell(Message::Event(Event::Contested(error.to_string())));
        }
    }

    fn carry_out(&mut self, Order { action, settings, halt }: Order) -> Event {
        self.halt = halt;
        self.trial.heed_pressure(settings.rules.pressure);
        let done = match action {
            Action::Hold => Ok(Event::Held(self.hold().map_err(|error| error.to_string()))),
            Action::Census(processes) => self.census(&processes, &settings).map(Event::Censused),
            Action::Merge { processes, share } => self.merge(&processes, share, &settings).map(Event::Merged),
            Action::Look { withdraw } => self.look(withdraw, self.began.elapsed()).map(Event::Looked),
            Action::Sweep => self.sweep().map(|whole| Event::Swept { whole }),
            Action::Withdraw(processes) => self.withdraw(&processes, settings.rules.pressure).map(Event::Withdrawn),
            Action::Restore => self.restore().map(|whole| Event::Restored { whole }),
            Action::Halt | Action::Say(_) | Action::End { .. } => return Event::Failed("no work".to_owned()),
        };
        done.unwrap_or_else(|error| match error {
            Error::Session(error @ session::Error::Contested { .. }) => {
                self.contested = true;
                self.tell(Message::Event(Event::Contested(error.to_string())));
                Event::Failed(error.to_string())
            }
            error => Event::Failed(session::chain(&error)),
        })
    }

    /// Take the right to change the host, put back what a killed run left, and stop ksmd with all merges kept.
    fn hold(&mut self) -> Result<(), session::Error> {
        let (mut session, undone, left) = Session::begin(self.host, &self.directory)?;
        session.writable()?;
        self.host.frame_flags(&[]).map_err(session::Error::Unknown)?;
        for was in undone.iter().map(|undo| session::Was(undo).to_string()) {
            self.tell(Message::Told(Told::PutBack(was)));
        }
        self.remain(left);
        ksmd::rest(&mut session)?;
        (self.session, self.contested, self.inherits) = (Some(session), false, true);
        Ok(())
    }

    /// Put KSM's settings back. Tells whether everything is.
    fn restore(&mut self) -> Result<bool, Error> {
        let Some(mut session) = self.session.take() else { return Ok(true) };
        let remains = session.finish()?;
        let whole = remains.is_empty();
        self.remain(remains);
        Ok(whole)
    }

    fn remain(&self, remains: Vec<session::Remains>) {
        for remains in remains {
            self.tell(Message::Told(Told::Remains(remains.to_string())));
        }
    }

    fn census(&mut self, processes: &[ProcessId], settings: &Settings) -> Result<Censused, Error> {
        self.prepared = None;
        let before = own_cpu();
        let chosen: BTreeSet<ProcessId> = processes.iter().copied().collect();
        let (metadata, left_out) = (self.metadata_left(settings)?, self.left_out(self.began.elapsed()));
        let request = Request { metadata, left_out, ..request(processes, settings) };
        let excluded = |process: &Process| settings.exclusions.reason(process);
        let progress = pagefold_census::Progress::default();
        let host = self.host;
        self.ages.retain(|process| lives(host, process));
        self.trial.retain(|process| lives(host, process));
        self.strikes.retain(|process| lives(host, process));
        self.enrolled.retain(|process, _| lives(host, *process));
        let ages = Some((&mut self.ages, Instant::now()));
        let mut prepared = prepare(self.host, &request, &excluded, ages, &progress, &self.halt)?;
        prepared.plan.keep_to(|process| chosen.contains(&process));
        let census = &prepared.census;
        // What witnesses cost is in the price of those who need them.
        let chosen = || census.subjects.iter().filter(|subject| !subject.witness);
        let looked: Pages = chosen().map(|subject| read(subject, &self.ages)).sum();
        let is_telling = looked.0 * 2 >= chosen().map(|subject| subject.counts.resident().0).sum();
        let found = Censused {
            cost: own_cpu().saturating_sub(before),
            looked: if is_telling { self.host.page_size().of(looked) } else { Bytes::ZERO },
            efforts: efforts(census, &self.ages),
            planned: worth(&prepared.plan),
            young: young(&prepared, settings),
            held: std::mem::take(&mut prepared.held),
            partial: census.partial,
        };
        let mut counts = BTreeMap::new();
        for subject in census.subjects.iter().filter(|subject| !subject.witness) {
            counts.insert(subject.process.id, subject.counts);
        }
        let unseen = census.unseen.len() as u64;
        let matrix = census.matrix.clone();
        self.tell(Message::Told(Told::Census { counts, unseen, matrix, seconds: census.seconds, cost: found.cost }));
        prepared.census = Census::default();
        self.prepared = Some(prepared).filter(|_| !found.partial);
        Ok(found)
    }

    /// How much metadata KSM may still take, if that is bounded. Processes that ended before the host was held have left
    /// some, which only goes when ksmd passes by.
    fn metadata_left(&mut self, settings: &Settings) -> Result<Option<Bytes>, Error> {
        let Some(most) = settings.max_metadata else { return Ok(None) };
        if self.session.is_some() && self.inherits && metadata(self.host).0 * 2 > most.0 {
            self.inherits = false;
            self.sweep()?;
        }
        Ok(Some(most.saturating_sub(metadata(self.host))))
    }

    fn merge(&mut self, processes: &[ProcessId], share: f64, settings: &Settings) -> Result<Merged, Error> {
        let session = self.session.as_mut().ok_or(Error::NotHeld)?;
        let Some(Prepared { mut plan, probes, .. }) = self.prepared.take() else { return Ok(Merged::default()) };
        let chosen: BTreeSet<&ProcessId> = processes.iter().collect();
        plan.keep_to(|process| chosen.contains(&process));
        let page_size = self.host.page_size();
        let predicted = Bytes(plan.predicted.reach.net(page_size).0.max(0).unsigned_abs());
        let to_enrol = |target: &Target| [target.to_enrol(false), target.to_enrol(true)].concat();
        let fresh = plan.targets.iter().map(|target| (target.process.id, to_enrol(target)));
        let fresh: BTreeMap<_, _> = fresh.filter(|(_, ranges)| !ranges.is_empty()).collect();
        let enrolled: Vec<ProcessId> = fresh.keys().copied().collect();
        // Whatever becomes of it: it is withdrawn by what may have been enrolled.
        for (process, ranges) in fresh {
            let before = self.enrolled.entry(process).or_default();
            *before = unmerge::joined([std::mem::take(before), ranges].concat());
        }
        let of = |process: &ProcessId| Some((*process, self.enrolled.get(process)?.len() as u64));
        let ranges = enrolled.iter().filter_map(of).collect();
        let pids: BTreeMap<_, _> =
            plan.targets.iter().map(|target| (target.process.id.pid, target.process.id)).collect();
        let how = merge::Options { share, deadline: None, watch: settings.watch, after: After::Resting };
        let (before, started) = (own_cpu(), Instant::now());
        let planned = Planned { plan, probes, started };
        let progress = merge::Progress::default();
        let outcome = carry_out(session, planned, &how, &mut self.trial, &progress, &self.halt)?;
        if let End::Yielded(_) = outcome.end {
            self.contested = true;
        }
        session.forget_ended()?;
        self.count_strikes(self.began.elapsed());
        let cost = own_cpu().saturating_sub(before) + outcome.ksmd.clone().unwrap_or_default();
        let remains = outcome.remains.clone();
        for remains in remains {
            self.tell(Message::Told(Told::Remains(remains)));
        }
        let net = outcome.net(page_size);
        let seconds = started.elapsed();
        self.tell(Message::Told(Told::Merge { ranges, predicted, net, seconds, cost }));
        Ok(Merged {
            enrolled,
            predicted,
            net,
            nets: outcome.nets.clone(),
            cost,
            withdrawn: page_size.of(outcome.watched.withdrawn),
            from: outcome.watched.from.iter().copied().collect(),
            refused: missed(&outcome, Change::Enrol, &pids),
            stuck: [self.trial.stuck(), missed(&outcome, Change::Withdraw, &pids)].concat(),
            yielded: match outcome.end {
                End::Yielded(why) => Some(why),
                _ => None,
            },
        })
    }

    /// What no plan is to have since it was written too soon, but for what may be tried again now.
    fn left_out(&mut self, now: Duration) -> BTreeMap<ProcessId, Vec<AddressRange>> {
        for (process, range) in self.strikes.over(now) {
            self.trial.pardon(process, range);
        }
        self.trial.withdrawn().iter().map(|(&process, withdrawn)| (process, withdrawn.ranges())).collect()
    }

    /// Count what was withdrawn because it was written too soon.
    fn count_strikes(&mut self, now: Duration) {
        for (&process, withdrawn) in self.trial.withdrawn() {
            for range in withdrawn.ranges() {
                self.strikes.broke(process, range, self.trial.times(process, range), now);
            }
        }
    }

    /// Look at what is merged, and withdraw what does not last.
    fn look(&mut self, withdraw: bool, now: Duration) -> Result<Looked, Error> {
        let before = own_cpu();
        let session = self.session.as_mut().ok_or(Error::NotHeld)?;
        let mut looked = Looked::default();
        if self.trial.look(Whom::Faulted) && withdraw {
            let gone = self.trial.withdraw(session, Moment::Between)?;
            looked.withdrawn = self.host.page_size().of(gone.values().copied().sum());
            looked.from = gone.into_keys().collect();
            looked.stuck = Some(self.trial.stuck());
            self.count_strikes(now);
        }
        looked.cost = own_cpu().saturating_sub(before);
        Ok(looked)
    }

    /// Have ksmd pass by who has ended. What broke of others is taken note of first: it would merge that again.
    fn sweep(&mut self) -> Result<bool, Error> {
        let session = self.session.as_mut().ok_or(Error::NotHeld)?;
        self.trial.look(Whom::Faulted);
        Ok(ksmd::sweep(session, &self.halt)?)
    }

    /// Withdraw some processes, each to its extent, as far as there is memory for it and it is not waited for meanwhile,
    /// by more than `pressure` in per cent of time.
    fn withdraw(&mut self, processes: &BTreeMap<ProcessId, Extent>, pressure: f64) -> Result<Withdrawn, Error> {
        let before = own_cpu();
        let session = self.session.as_mut().ok_or(Error::NotHeld)?;
        let lives = |process: &ProcessId| lives(self.host, *process);
        let (there, mut gone): (Vec<ProcessId>, Vec<ProcessId>) = processes.keys().copied().partition(lives);
        let limits = unmerge::Limits { staged: true, pressure: Some(pressure), ..unmerge::Limits::default() };
        let mut refused = Vec::new();
        // Each by itself: what there is no memory for in one cgroup says nothing of another.
        for process in there {
            if self.halt.load(Ordering::Relaxed) {
                refused.push((process, NO_TIME.to_owned()));
                continue;
            }
            let selection = Selection { pids: [process.pid].into(), ..Selection::default() };
            let ours = (processes[&process] == Extent::Ours)
                .then(|| unmerge::Way::Ranges(self.enrolled.get(&process).cloned().unwrap_or_default()));
            let plan = unmerge::plan(self.host, &selection, &|_, _| ours.clone())?;
            let done = unmerge::carry_out(session, &plan, limits, &self.halt)?;
            match why_not(&plan, done) {
                Some(why) => refused.push((process, why)),
                None => gone.push(process),
            }
        }
        // It is not written that its pages are no longer merged.
        for process in &gone {
            self.trial.forget(*process);
            self.enrolled.remove(process);
        }
        Ok(Withdrawn { gone, refused, cost: own_cpu().saturating_sub(before) })
    }
}

/// Why somebody is not withdrawn whom the end did not wait for.
const NO_TIME: &str = "there was no time for it";

/// Why something of the process of a plan is merged still, if it is.
fn why_not(plan: &unmerge::Plan, done: unmerge::Done) -> Option<String> {
    if let Some(unseen) = plan.unseen.iter().find(|unseen| unseen.why != Absent::Vanished) {
        return Some(unseen.why.to_string());
    }
    let interrupted = done.interrupted;
    let mut done = done.targets.into_iter().next()?;
    // Memory that the program has unmapped needs no withdrawing.
    done.missed.retain(|(_, why)| !why.starts_with(NOT_MAPPED));
    if done.is_whole() {
        return None;
    }
    let missed = done.missed.first().map(|(_, why)| why.clone());
    let short = match done.withdrawn {
        true => "some of it is merged still",
        false if interrupted => NO_TIME,
        false => "there is not the memory for it",
    };
    Some(done.error.or(missed).unwrap_or_else(|| short.to_owned()))
}

/// What looking at each process took, in pages that are read. What witnesses took is in the price of those who need
/// them.
pub(super) fn efforts(census: &Census, ages: &Ages) -> BTreeMap<ProcessId, u64> {
    let chosen = census.subjects.iter().filter(|subject| !subject.witness);
    let effort = |subject: &SubjectCensus| read(subject, ages).0 + REGION * subject.regions.len() as u64;
    chosen.map(|subject| (subject.process.id, effort(subject))).collect()
}

/// What looking at a process took but for its regions, in pages that are read.
pub(super) fn read(subject: &SubjectCensus, ages: &Ages) -> Pages {
    let spared = ages.spared(subject.process.id).0;
    Pages(subject.counts.resident().0.saturating_sub(spared) + spared / SPARED)
}

/// What a census of some processes is to plan.
pub(super) fn request(processes: &[ProcessId], settings: &Settings) -> Request {
    let pids = processes.iter().map(|process| process.pid).collect();
    Request {
        selection: Selection { pids, ..Selection::default() },
        domains: settings.domains.clone(),
        across_domains: settings.rules.across_domains,
        settle: settings.settle,
        threads: settings.threads,
        whole: false,
        min_profit: settings.min_profit,
        share: 1.0,
        max_regions: settings.max_regions,
        metadata: settings.max_metadata,
        split_huge_pages: settings.split_huge_pages,
        left_out: BTreeMap::new(),
        parties: PARTIES,
    }
}

/// In whom enough is left out for now because it is not old enough.
pub(super) fn young(prepared: &Prepared, settings: &Settings) -> Vec<ProcessId> {
    let enough = prepared.young.iter().filter(|(_, bytes)| **bytes >= settings.min_profit);
    enough.map(|(process, _)| *process).collect()
}

/// What a plan would do for each of its targets.
pub(super) fn worth(plan: &Plan) -> Vec<Worth> {
    let pages = |target: &Target| -> Pages { target.ranges.iter().map(|range| range.pages).sum() };
    let all = plan.targets.iter().map(pages).sum::<Pages>().0.max(1) as f64;
    let of = |target: &Target| {
        let freed: u64 = target.ranges.iter().map(|range| range.freed.0).sum();
        let metadata = pages(target).0 * RMAP_ITEM_BYTES;
        Worth {
            process: target.process.id,
            net: NetBytes(freed.cast_signed() - metadata.cast_signed()),
            ksmd: plan.predicted.ksmd.mul_f64(pages(target).0 as f64 / all),
        }
    };
    plan.targets.iter().map(of).collect()
}

/// Whom a change was not made in at all, with the first reason of each.
fn missed(
    outcome: &Outcome,
    change: Change,
    pids: &BTreeMap<pagefold_base::Pid, ProcessId>,
) -> Vec<(ProcessId, String)> {
    let mut refused = BTreeMap::new();
    for missed in outcome.missed.iter().filter(|missed| missed.change == change && missed.range.is_none()) {
        if let Some(&process) = pids.get(&missed.pid) {
            refused.entry(process).or_insert_with(|| missed.why.clone());
        }
    }
    refused.into_iter().collect()
}

/// Bytes of metadata that KSM keeps: what its profit falls short of what is saved by. Nothing where it does not tell.
fn metadata(host: &dyn Host) -> Bytes {
    let Ok(ksm) = observe::ksm(host) else { return Bytes::ZERO };
    let zeros = ksm.ksm_zero_pages.unwrap_or(0).max(0).unsigned_abs();
    let saved = (ksm.pages_sharing.unwrap_or(0) + zeros) * host.page_size().bytes();
    Bytes(ksm.general_profit.map_or(0, |profit| (saved.cast_signed() - profit).max(0).unsigned_abs()))
}

pub(super) fn lives(host: &dyn Host, process: ProcessId) -> bool {
    pagefold_host::hold(host, process).is_ok()
}

#[cfg(test)]
mod tests;
