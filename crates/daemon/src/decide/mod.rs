//! The daemon's decisions: from what happens on a host to what is done about it.
//!
//! [`step`] takes the state, a time and an event, and gives the state after it with the actions to carry out. There is
//! no clock and no host in it, so a recorded day is gone through in no time, and the same seed and events give the same
//! actions.
//!
//! At most one piece of work is under way: every action but [`Action::Say`], [`Action::Halt`] and [`Action::End`] is
//! answered by one event before the next one is asked for.
//!
//! # Who is looked at when
//! Who has come is looked at after a short debounce, which only takes note of what there is; again once that is old
//! enough to be merged, and whenever it has grown. Everybody else waits longer and longer as long as nothing is found,
//! and who has hardly run since the longest ([`member`]). With those whose turn it is a few of their domain are looked
//! at that are known already: a guest that equals its siblings is found out by two of them, since what all have merged
//! lies in each.
//!
//! # What it may cost
//! CPU time of ksmd and pagefold comes out of one [`budget`]. Nothing is begun that does not fit, and what takes longer
//! than expected is halted. Each member has a `price`: who would be merged for more CPU time than [`Rules::price`]
//! allows is left out, the others are merged, and who took more of ksmd in the end waits for twice as long.
//!
//! # What is taken back
//! Whoever loses by its first merge, was in one that failed, must not be merged any more, came into another trust
//! domain or is withdrawn by an operator is withdrawn once there is memory for it. Who had something merged before
//! keeps it: what of that does not last is seen by the looks. Where it is refused it is tried again, later each time,
//! and until then it is in no plan.
//!
//! # When nothing is done
//! While programs wait longer for a CPU than they do without it (`slowdown`), unless memory is short. Above the goal,
//! in quiet hours, while paused, while somebody else writes KSM's settings. Nothing is withdrawn while memory is short:
//! unmerging takes memory.
//!
//! Memory may be short on the host or in somebody's cgroup ([`pagefold_base::memory::Shortage`]). Then it comes first, nothing
//! of it is withdrawn, and neither the goal, the slow-down nor the price counts for it; all else goes on. Quiet hours
//! are an operator's word, and hold all the same.

pub mod budget;
mod choose;
mod event;
pub mod member;
mod price;
mod rules;
mod slowdown;
mod strikes;
mod take;
#[cfg(test)]
mod tests;

pub use budget::Budget;
pub use event::{
    Action, Censused, Decision, Event, Extent, Looked, Merged, Planned, Readings, Reason, What, Withdrawn,
};
pub use member::{Arrival, Cause, Leaving, Member};
pub use rules::{Hours, Mode, Rules, TimeOfDay};
pub use slowdown::{Slowdown, Waits};
pub use strikes::Strikes;

use pagefold_base::memory::Shortage;
use pagefold_base::mix::mix;
use pagefold_base::units::{Bytes, ProcessId};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// CPU seconds for a MiB of a census, before any was measured: two looks at 4 GiB a second.
pub const CENSUS_SECONDS: f64 = 0.5 / 1024.0;

/// Pauses between looks in vain, in times of what looking at everybody costs.
const CALM: f64 = 2000.0;

/// What the daemon does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Nobody was looked at yet.
    Starting,
    /// A census or a merge is under way.
    Working,
    /// Nothing is to be done, or not now.
    Resting,
    /// An operator paused it.
    Paused,
    /// Somebody else drives KSM.
    Yielding,
}

#[derive(Clone, Debug, PartialEq)]
enum Work {
    Hold,
    /// Whose turn it was, and everybody who is looked at.
    Census(Vec<ProcessId>, Vec<ProcessId>),
    Merge(Vec<ProcessId>),
    Look,
    Sweep,
    Withdraw(BTreeMap<ProcessId, Extent>),
    Restore,
}

impl Work {
    /// Whether it may have somebody share pages with others.
    fn is_about(&self, process: ProcessId) -> bool {
        match self {
            Self::Census(_, processes) | Self::Merge(processes) => processes.contains(&process),
            Self::Hold | Self::Look | Self::Sweep | Self::Withdraw(_) | Self::Restore => false,
        }
    }
}

/// How far it has come to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stopping {
    /// What is merged stays merged.
    Kept,
    /// What is enrolled is withdrawn first.
    Unmerging,
    /// That was tried.
    Unmerged,
}

/// All that is remembered from event to event.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    rules: Rules,
    seed: u64,
    now: Duration,
    budget: Budget,
    available: Option<Bytes>,
    shortage: Shortage,
    slowdown: Slowdown,
    /// What clocks show, once they were read.
    time: Option<TimeOfDay>,
    members: BTreeMap<ProcessId, Member>,
    /// Who is to be left alone once it is known.
    withdrawn: BTreeSet<ProcessId>,
    work: Option<Work>,
    halted: bool,
    /// The CPU time that had been read when it began.
    began: Duration,
    /// Whether trust domains have changed since it began, so that it heeds others than there are.
    outdated: bool,
    held: bool,
    hold_after: Duration,
    busy: Option<String>,
    paused: bool,
    contested: Option<String>,
    tuner: Option<String>,
    stopping: Option<Stopping>,
    ended: bool,
    /// Whether KSM's settings came back the last time that they were to.
    restored: bool,
    /// What could not be withdrawn the last time that it was tried, and why.
    stuck: BTreeMap<ProcessId, String>,
    /// When what is merged is looked at next, and the pause before that.
    watch: (Duration, Duration),
    /// When ksmd is to pass by those who were merged and have ended.
    sweep: Option<Duration>,
    census_seconds: f64,
    looks: u64,
    told: Option<Reason>,
}

/// The state after an event, and what is to be done.
pub fn step(mut state: State, at: Duration, event: Event) -> (State, Vec<Action>) {
    let mut actions = Vec::new();
    if !state.ended {
        state.now = state.now.max(at);
        state.take(event, &mut actions);
        state.halt(&mut actions);
        state.begin(&mut actions);
    }
    (state, actions)
}

impl State {
    /// At the beginning, with the CPU time that ksmd and pagefold have used so far.
    pub fn new(rules: Rules, seed: u64, at: Duration, spent: Duration) -> Self {
        Self {
            budget: Budget::new(rules.cpu, rules.burst, at, spent),
            watch: (Duration::MAX, rules.ripens),
            sweep: None,
            rules,
            seed,
            now: at,
            available: None,
            shortage: Shortage::default(),
            slowdown: Slowdown::default(),
            time: None,
            members: BTreeMap::new(),
            withdrawn: BTreeSet::new(),
            work: None,
            halted: false,
            began: spent,
            outdated: false,
            held: false,
            hold_after: Duration::ZERO,
            busy: None,
            paused: false,
            contested: None,
            tuner: None,
            stopping: None,
            ended: false,
            restored: true,
            stuck: BTreeMap::new(),
            census_seconds: CENSUS_SECONDS,
            looks: 0,
            told: None,
        }
    }

    /// What it keeps to.
    pub fn rules(&self) -> &Rules {
        &self.rules
    }

    /// Who is known.
    pub fn members(&self) -> &BTreeMap<ProcessId, Member> {
        &self.members
    }

    /// The CPU time that may be spent.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Whether a piece of work is under way, so that an answer is waited for.
    pub fn awaits(&self) -> bool {
        self.work.is_some()
    }

    /// What it does, and why.
    pub fn standing(&self) -> (Standing, String) {
        let of = |processes: usize| match processes {
            1 => "one process".to_owned(),
            many => format!("{many} processes"),
        };
        if let Some(why) = self.yields() {
            return (Standing::Yielding, why);
        }
        match &self.work {
            _ if self.paused => (Standing::Paused, "an operator paused it".to_owned()),
            Some(Work::Census(_, processes)) => (Standing::Working, format!("a census of {}", of(processes.len()))),
            Some(Work::Merge(processes)) => (Standing::Working, format!("merging {}", of(processes.len()))),
            Some(Work::Withdraw(extents)) => (Standing::Working, format!("withdrawing {}", of(extents.len()))),
            _ if self.rules.mode == Mode::Observe => (Standing::Resting, "it only observes".to_owned()),
            _ if self.looks == 0 => (Standing::Starting, "nobody was looked at yet".to_owned()),
            _ => (Standing::Resting, self.rests().unwrap_or("nobody's turn has come").to_owned()),
        }
    }

    /// Why nobody's turn comes for now.
    fn rests(&self) -> Option<&'static str> {
        match self.told? {
            Reason::Budget => Some("its CPU time is used up for now"),
            Reason::Goal => Some("there is as much memory as it is to keep"),
            Reason::SlowDown => Some("programs waited longer while it worked"),
            Reason::QuietHours => Some("these are quiet hours"),
            _ => None,
        }
    }

    /// Why nobody is looked at now, whoever asks for it; `None` where that is done. Who only observes never does.
    pub fn waits(&self) -> Option<String> {
        let paused = self.paused.then(|| "an operator paused it".to_owned());
        paused.or_else(|| self.yields()).or_else(|| self.rests().map(str::to_owned))
    }

    /// Why nothing is merged or withdrawn now, whoever asks for it; `None` where that is done.
    pub fn holds_back(&self) -> Option<String> {
        match self.rules.mode {
            Mode::Observe => Some("it only observes".to_owned()),
            Mode::Advise => Some("it only advises".to_owned()),
            Mode::Act if self.paused => Some("an operator paused it".to_owned()),
            Mode::Act => self.yields(),
        }
    }

    /// Why others are left to drive KSM.
    fn yields(&self) -> Option<String> {
        let tuner = self.tuner.as_ref().filter(|_| !self.rules.force);
        let tuner = tuner.map(|name| format!("{name} tunes KSM, and each would undo the other"));
        let acts = |_: &String| self.rules.mode == Mode::Act;
        self.contested.clone().or(tuner).or_else(|| self.busy.clone()).filter(acts)
    }

    /// The longest pause between two looks at somebody: looking at everybody in vain takes a two-thousandth of one CPU
    /// at most, however much memory there is.
    fn rarest(&self) -> Duration {
        let open = self.members.values().filter(|member| member.is_open());
        let mib = open.map(|member| member.resident.0).sum::<u64>() as f64 / 1048576.0;
        self.rules.rarest.max(Duration::from_secs_f64(mib * self.census_seconds * CALM))
    }

    /// Whether memory is short on the host.
    fn is_pressed(&self) -> bool {
        self.shortage.is_short(self.rules.pressure)
    }

    /// Whether memory is short on the host, or in the cgroup of any of these.
    fn is_needed(&self, processes: &[ProcessId]) -> bool {
        let squeezed =
            |process| self.members.get(process).is_some_and(|member: &Member| member.is_squeezed(&self.rules));
        self.is_pressed() || processes.iter().any(squeezed)
    }

    fn may_act(&self) -> bool {
        self.may_hold() && !self.paused
    }

    fn may_hold(&self) -> bool {
        let yields = self.contested.is_some() || self.tuner.is_some() && !self.rules.force;
        self.rules.mode == Mode::Act && !yields
    }

    /// Between 0 and 1, by [`State::dice`].
    fn spread(&self, process: ProcessId) -> f64 {
        self.dice(process) as f64 / u64::MAX as f64
    }

    /// Any number, by the seed, a process and how much was done so far.
    fn dice(&self, process: ProcessId) -> u64 {
        mix(self.seed ^ u64::from(process.pid.0) << 32 ^ process.start_time ^ self.looks << 48)
    }

    fn say(&mut self, what: What, whom: &[ProcessId], reason: Reason, why: impl Into<String>) -> Action {
        let acted = !matches!(what, What::Leave | What::Refuse | What::Rest | What::Yield);
        Action::Say(Decision { what, whom: whom.to_vec(), reason, why: why.into(), predicted: None, acted })
    }

    fn back_off(&mut self, processes: &[ProcessId]) {
        for process in processes {
            if let Some(member) = self.members.get_mut(process) {
                member.back_off(self.now, &self.rules);
            }
        }
    }

    /// What is merged of these is to be withdrawn.
    fn leave(&mut self, processes: &[ProcessId], reason: Reason) {
        for process in processes {
            if let Some(member) = self.members.get_mut(process) {
                member.leave(reason, self.now);
            }
        }
    }

    /// End what is under way where it costs too much, or is no longer wanted.
    fn halt(&mut self, actions: &mut Vec<Action>) {
        let wanted = match &self.work {
            Some(Work::Census(..) | Work::Merge(_)) if self.outdated => false,
            Some(Work::Census(..)) => self.rules.mode != Mode::Observe && !self.paused && self.stopping.is_none(),
            Some(Work::Merge(_)) => self.may_act() && self.stopping.is_none(),
            // What must be withdrawn is, whatever it costs, but does not keep the daemon from its end.
            Some(Work::Withdraw(_)) if self.stopping == Some(Stopping::Kept) => false,
            _ => return,
        };
        if (!wanted || self.budget.left() <= 0.0) && !self.halted {
            self.halted = true;
            actions.push(Action::Halt);
        }
    }

    fn start(&mut self, work: Work, action: Action, actions: &mut Vec<Action>) {
        (self.work, self.halted, self.outdated) = (Some(work), false, false);
        self.began = self.budget.spent();
        actions.push(action);
    }
}
