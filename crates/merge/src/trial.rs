//! The trial that a merge is: what does not stay merged for long enough to pay is withdrawn.
//!
//! It outlives a round of merging. What one round merged is watched in the next, which has nothing more to plan there;
//! and what was withdrawn once is not enrolled again. What is refused is tried again at the next look, and only what
//! the last try did not bring about is told.

use crate::decide::outcome::{Change, Missed};
use crate::decide::plan::Plan;
use crate::recheck::{Moment, Piece, Watch, Whom};
use crate::unmerge::{self, Way};
use pagefold_base::guard;
use pagefold_base::guard::{Need, Verdict};
use pagefold_base::lasting;
use pagefold_base::lasting::{Price, Seen};
use pagefold_base::process::Process;
use pagefold_base::{Absent, AddressRange, Pages, ProcessId};
use pagefold_census::Selection;
use pagefold_host::act::{Action, Advice, NOT_MAPPED, Refusal};
use pagefold_host::room::{is_short, room};
use pagefold_host::transaction::session;
use pagefold_host::transaction::session::{Session, Stays};
use pagefold_host::{Host, Process as Handle};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicBool;

/// What is watched, and what was withdrawn.
pub struct Trial<'h> {
    host: &'h dyn Host,
    watch: Watch<'h>,
    /// What was seen of what is no longer watched.
    lost: Seen,
    withdrawn: BTreeMap<ProcessId, Withdrawn>,
    /// What of that was merged and written twice.
    thrashed: BTreeSet<(ProcessId, AddressRange)>,
    /// What was withdrawn the last time because nothing of it was merged.
    idle: BTreeMap<ProcessId, Vec<AddressRange>>,
    /// What could not be withdrawn the last time that it was tried.
    refused: BTreeMap<ProcessId, Vec<Missed>>,
    /// Whether frames cannot be seen, so that nothing can be watched.
    blind: bool,
    /// By which price merged pages are judged.
    price: Price,
    /// COW breaks a second that are allowed, where ksmd was granted a share of one CPU.
    breaks_allowed: Option<f64>,
    /// Pages that were found written since they were last merged again, about.
    broken: Pages,
    /// Percent of ten seconds in which some task waited for memory, from which on it is short and nothing is withdrawn.
    pressure: Option<f64>,
}

/// What was withdrawn of a process because it did not stay merged for long enough.
#[derive(Clone, Debug, Default)]
pub struct Withdrawn {
    /// For good, because Pagefold had enrolled it.
    pub ours: Vec<AddressRange>,
    /// While ksmd works, because the program had.
    pub own: Vec<AddressRange>,
}

impl Withdrawn {
    /// All of it.
    pub fn ranges(&self) -> Vec<AddressRange> {
        [&self.ours[..], &self.own[..]].concat()
    }
}

impl<'h> Trial<'h> {
    /// Nothing enrolled yet.
    pub fn new(host: &'h dyn Host) -> Self {
        Self {
            host,
            watch: Watch::new(host),
            lost: Seen::default(),
            withdrawn: BTreeMap::new(),
            thrashed: BTreeSet::new(),
            idle: BTreeMap::new(),
            refused: BTreeMap::new(),
            blind: false,
            price: Price::default(),
            breaks_allowed: None,
            broken: Pages::ZERO,
            pressure: None,
        }
    }

    /// Judge by the CPU time that was granted: ksmd has this share of one CPU for the processes that are watched.
    pub fn grant(&mut self, share: f64) {
        self.breaks_allowed = Some(lasting::breaks_allowed(share));
    }

    /// Withdraw nothing while memory is short, where some task that waits for it for this percentage of ten seconds is.
    pub fn heed_pressure(&mut self, percent: f64) {
        self.pressure = Some(percent);
    }

    /// Watch what a plan has enrolled, too. Not before it is: what is injected runs on the target's own time.
    pub fn add(&mut self, plan: &Plan) {
        let withdrawn = |process| self.withdrawn.get(&process).map(Withdrawn::ranges).unwrap_or_default();
        self.watch.add(plan, withdrawn);
    }

    /// Whether there is nothing to watch.
    pub fn is_empty(&self) -> bool {
        self.blind || self.watch.is_empty()
    }

    /// Whether any process has run since a plan was added.
    pub fn ran(&mut self) -> bool {
        !self.is_empty() && self.watch.ran()
    }

    /// What was seen so far.
    pub fn seen(&self) -> Seen {
        self.watch.seen() + self.lost
    }

    /// What was withdrawn so far, but for what only found no partner.
    pub fn withdrawn(&self) -> &BTreeMap<ProcessId, Withdrawn> {
        &self.withdrawn
    }

    /// How often a range that was withdrawn had been written too soon.
    pub fn times(&self, process: ProcessId, range: AddressRange) -> usize {
        if self.thrashed.contains(&(process, range)) { 2 } else { 1 }
    }

    /// What was withdrawn the last time, when a round had ended, because nothing of it was merged. It may be enrolled
    /// again.
    pub fn idle(&self, process: ProcessId) -> &[AddressRange] {
        self.idle.get(&process).map(Vec::as_slice).unwrap_or_default()
    }

    /// What could not be withdrawn the last time that it was tried, of processes that live.
    pub fn refused(&self) -> impl Iterator<Item = &Missed> {
        let lives = |process| pagefold_host::hold(self.host, process).is_ok();
        self.refused.iter().filter(move |(process, _)| lives(**process)).flat_map(|(_, missed)| missed)
    }

    /// The processes among these, each with the first reason.
    pub fn stuck(&self) -> Vec<(ProcessId, String)> {
        let lives = |process| pagefold_host::hold(self.host, process).is_ok();
        let stuck = self.refused.iter().filter(|(process, _)| lives(**process));
        stuck.filter_map(|(process, missed)| Some((*process, missed.first()?.why.clone()))).collect()
    }

    /// Let a range that was withdrawn be enrolled again.
    pub fn pardon(&mut self, process: ProcessId, range: AddressRange) {
        self.thrashed.remove(&(process, range));
        if let Some(withdrawn) = self.withdrawn.get_mut(&process) {
            withdrawn.ours.retain(|other| *other != range);
            withdrawn.own.retain(|other| *other != range);
        }
    }

    /// Forget what was withdrawn of processes that do not fit.
    pub fn retain(&mut self, fits: impl Fn(ProcessId) -> bool) {
        self.withdrawn.retain(|&process, _| fits(process));
        self.thrashed.retain(|&(process, _)| fits(process));
    }

    /// Forget what is watched of a process of which nothing is merged any more.
    pub fn forget(&mut self, process: ProcessId) {
        self.watch.forget(process);
        self.refused.remove(&process);
    }

    /// Look at what is merged. Tells whether any of it does not pay that programs had not enrolled themselves: what can
    /// be withdrawn between rounds.
    pub fn look(&mut self, whom: Whom) -> bool {
        self.blind = self.blind || !self.watch.is_empty() && self.watch.look(whom).is_err();
        if self.is_empty() {
            return false;
        }
        self.broken += self.watch.broken();
        let page_bytes = self.host.page_size().bytes();
        if let Some(allowed) = self.breaks_allowed {
            self.price = lasting::price_within(&self.watch.churn(), allowed, page_bytes);
        }
        self.watch.has_losses(|seen| self.price.pays(seen, page_bytes))
    }

    /// About how many merged pages were found written since this was asked for last.
    pub fn take_broken(&mut self) -> Pages {
        std::mem::take(&mut self.broken)
    }

    /// The same, to be asked for again.
    pub fn broken(&self) -> Pages {
        self.broken
    }

    /// Withdraw what does not pay by the last look, as far as there is memory for it. What is refused is looked at
    /// again. Tells how many pages of whom were withdrawn.
    pub fn withdraw(
        &mut self,
        session: &mut Session<'_>,
        moment: Moment,
    ) -> Result<BTreeMap<ProcessId, Pages>, session::Error> {
        self.refused.clear();
        self.idle.clear();
        if self.is_empty() {
            return Ok(BTreeMap::new());
        }
        let page_size = self.host.page_size();
        let mut by_process: BTreeMap<ProcessId, Vec<Piece>> = BTreeMap::new();
        let price = self.price;
        let pays = |seen: &Seen| price.pays(seen, page_size.bytes());
        for piece in self.watch.withdraw(pays, moment) {
            by_process.entry(piece.process).or_default().push(piece);
        }
        let mut gone: BTreeMap<ProcessId, Pages> = BTreeMap::new();
        for (process, pieces) in by_process {
            let (own, ours): (Vec<Piece>, Vec<Piece>) = pieces.into_iter().partition(|piece| piece.own);
            for (pieces, stays) in [(ours, Stays::ForGood), (own, Stays::ForNow)] {
                // What a program enrolled itself would be put back at once.
                let pointless = matches!(moment, Moment::Between | Moment::Early) && stays == Stays::ForNow;
                if pointless || pieces.is_empty() {
                    self.watch.keep(pieces);
                    continue;
                }
                let ranges = pieces.iter().map(|piece| piece.range).collect();
                // What does pay is here because nothing of it is merged.
                let merged = pieces.iter().filter(|piece| !pays(&piece.seen));
                let copies = merged.map(|piece| page_size.pages_in(piece.range.bytes())).sum();
                let pressed = (copies > Pages::ZERO && self.is_pressed(process)).then_some(SHORT);
                let missed = match pressed.or_else(|| refused_by(self.fits(process, copies))) {
                    Some(why) => vec![self.refusal(process, why)],
                    None => self.advise(session, process, ranges, stays)?,
                };
                let is_missed = |piece: &Piece| {
                    missed.iter().any(|missed| missed.range.is_none_or(|range| range.overlap(piece.range).is_some()))
                };
                let (kept, pieces): (Vec<Piece>, Vec<Piece>) = pieces.into_iter().partition(is_missed);
                self.watch.keep(kept);
                for missed in missed {
                    note_once(self.refused.entry(process).or_default(), missed);
                }
                self.lost = pieces.iter().fold(self.lost, |sum, piece| sum + piece.seen);
                if !pieces.is_empty() {
                    let pages: Pages = pieces.iter().map(|piece| page_size.pages_in(piece.range.bytes())).sum();
                    *gone.entry(process).or_default() += pages;
                }
                // What only found no partner may find one later.
                let (idle, lost): (Vec<Piece>, Vec<Piece>) = pieces.into_iter().partition(|piece| pays(&piece.seen));
                self.idle.entry(process).or_default().extend(idle.iter().map(|piece| piece.range));
                let thrashed = lost.iter().filter(|piece| piece.seen.thrashes(page_size.bytes()));
                self.thrashed.extend(thrashed.map(|piece| (process, piece.range)));
                let withdrawn = self.withdrawn.entry(process).or_default();
                let withdrawn = if stays == Stays::ForNow { &mut withdrawn.own } else { &mut withdrawn.ours };
                withdrawn.extend(lost.iter().map(|piece| piece.range));
            }
        }
        Ok(gone)
    }

    /// Withdraw again, for now, what earlier sessions withdrew for now, as far as there is memory for what was merged of
    /// it since. Tells what was missed.
    pub fn withdraw_own(&self, session: &mut Session<'_>) -> Result<Vec<Missed>, session::Error> {
        let mut missed = Vec::new();
        for (&process, withdrawn) in self.withdrawn.iter().filter(|(_, withdrawn)| !withdrawn.own.is_empty()) {
            let pressed = self.is_pressed(process).then_some(SHORT);
            match pressed.or_else(|| self.why_not(process, withdrawn)) {
                Some(why) => missed.push(self.refusal(process, why)),
                None => missed.extend(self.advise(session, process, withdrawn.own.clone(), Stays::ForNow)?),
            }
        }
        Ok(missed)
    }

    /// Why there may not be the memory to withdraw again what a program had enrolled.
    fn why_not(&self, process: ProcessId, withdrawn: &Withdrawn) -> Option<&'static str> {
        let selection = Selection { pids: [process.pid].into(), ..Selection::default() };
        let own = |_: &dyn Handle, _: &Process| Some(Way::Ranges(unmerge::joined(withdrawn.own.clone())));
        let Ok(plan) = unmerge::plan(self.host, &selection, &own) else { return Some(UNKNOWN) };
        if plan.unseen.iter().any(|unseen| unseen.why != Absent::Vanished) {
            return Some(UNKNOWN);
        }
        refused_by(plan.judge(self.host, &plan.need()).verdict)
    }

    /// Withdraw ranges. Tells what was missed.
    fn advise(
        &self,
        session: &mut Session<'_>,
        process: ProcessId,
        ranges: Vec<AddressRange>,
        stays: Stays,
    ) -> Result<Vec<Missed>, session::Error> {
        let action = Action::Advise { process, advice: Advice::Unmergeable, ranges };
        Ok(act(session, process, &self.comm(process), &action, stays, &AtomicBool::new(false))?.missed)
    }

    /// Whether memory is short for a process, on the host or in its cgroup.
    fn is_pressed(&self, process: ProcessId) -> bool {
        self.pressure.is_some_and(|most| is_short(self.host, self.cgroup(process), most))
    }

    fn cgroup(&self, process: ProcessId) -> Option<&str> {
        self.watch.process(process).and_then(|facts| facts.cgroup.as_deref().ok())
    }

    fn comm(&self, process: ProcessId) -> String {
        self.watch.process(process).map(|facts| facts.comm.clone()).unwrap_or_default()
    }

    fn refusal(&self, process: ProcessId, why: &str) -> Missed {
        let (pid, comm) = (process.pid, self.comm(process));
        Missed { change: Change::Withdraw, pid, comm, range: None, why: why.to_owned() }
    }

    /// Whether there is memory for so many pages of their own.
    fn fits(&self, process: ProcessId, copies: Pages) -> Verdict {
        let cgroup = self.cgroup(process);
        let room = room(self.host, &cgroup.map(str::to_owned).into_iter().collect());
        guard::judge(&Need::of(cgroup, copies, Pages::ZERO), &room, self.host.page_size()).verdict
    }
}

/// Why nothing is withdrawn while memory is waited for.
const SHORT: &str = "memory is short";

/// Why nothing is withdrawn where nobody knows whether it fits.
const UNKNOWN: &str = "it is not known how much memory there is for copies";

/// Why something is not withdrawn, by the guard's word.
fn refused_by(verdict: Verdict) -> Option<&'static str> {
    match verdict {
        Verdict::Fits => None,
        Verdict::Unknown => Some(UNKNOWN),
        Verdict::Short | Verdict::Swaps => Some("there is no memory for copies"),
    }
}

/// How often a process that is busy is tried once more: a thread that gets no processor for a moment does not stop. The
/// answer of a guest's control socket was waited for already.
const MORE: usize = 2;

/// What came of an action on a process.
pub struct Acted {
    /// What the process did not take: parts of it, or all by one without a range.
    pub missed: Vec<Missed>,
    /// Whether it was busy to the end.
    pub is_busy: bool,
}

/// Act on a process. Memory that it has unmapped needs no withdrawing.
pub fn act(
    session: &mut Session<'_>,
    process: ProcessId,
    comm: &str,
    action: &Action,
    stays: Stays,
    stop: &AtomicBool,
) -> Result<Acted, session::Error> {
    let withdraws = matches!(action, Action::Advise { advice: Advice::Unmergeable, .. });
    let change = if withdraws { Change::Withdraw } else { Change::Enrol };
    let note = |range, why| Missed { change, pid: process.pid, comm: comm.to_owned(), range, why };
    let more = if matches!(action, Action::GuestMerge { .. }) { 0 } else { MORE };
    let is_busy = |outcome: &_| matches!(outcome, Err(session::Error::Refused(Refusal::Busy(_))));
    let mut outcome = session.apply_until_stopped(action, stays, stop);
    for _ in 0..more {
        if !is_busy(&outcome) {
            break;
        }
        outcome = session.apply_until_stopped(action, stays, stop);
    }
    let is_busy = is_busy(&outcome);
    let missed = match outcome {
        Ok(effect) => {
            let told = effect.missed.into_iter().filter(|(_, why)| !withdraws || !why.starts_with(NOT_MAPPED));
            told.map(|(range, why)| note(Some(range), why)).collect()
        }
        Err(session::Error::Refused(why)) => vec![note(None, why.to_string())],
        Err(session::Error::Unknown(why)) => vec![note(None, Refusal::from(why).to_string())],
        Err(error) => return Err(error),
    };
    Ok(Acted { missed, is_busy })
}

/// A process that refuses twice is told once.
pub fn note_once(missed: &mut Vec<Missed>, note: Missed) {
    if note.range.is_some() || !missed.contains(&note) {
        missed.push(note);
    }
}
