//! When somebody's memory is looked at next.

use super::event::{Extent, Reason};
use super::rules::Rules;
use pagefold_base::domain::Domain;
use pagefold_base::memory::Shortage;
use pagefold_base::units::{Bytes, NetBytes, ProcessId};
use pagefold_census::decide::sketch::Held;
use std::sync::Arc;
use std::time::Duration;

/// Growth from which memory counts as filled anew: an eighth, and no less than this.
const GROWTH: (u64, Bytes) = (8, Bytes(16 << 20));

/// The same for who has come within so long: a machine that boots and is then filled, all within seconds.
const YOUNG: (Duration, u64, Bytes) = (Duration::from_secs(60), 32, Bytes(2 << 20));

/// Growth between two readings by which memory still fills: looking at it now would be in vain.
const FILLS: Bytes = Bytes(1 << 20);

/// The share of one CPU from which on somebody is busy.
const BUSY: f64 = 0.2;

/// The share of one CPU up to which somebody is idle: memory that was looked at in vain has hardly changed since.
const IDLE: f64 = 0.01;

/// Looks one after the other that may find only what is not old enough before the next one waits longer: memory that is
/// written all the time is never old.
const UNRIPE: u32 = 2;

/// Looks at most that come sooner because those before were without somebody who holds much of the same.
const MISSES: u32 = 4;

/// For how long who has come into another trust domain stays there: an hour.
const SETTLED: Duration = Duration::from_secs(3600);

/// Doublings of what a look is taken to cost, at most.
const OVERRUNS: u32 = 10;

/// The first pause before what could not be withdrawn is tried again; each further one is twice as long, up to the
/// longest.
const TRIES: [Duration; 2] = [Duration::from_secs(10), Duration::from_secs(300)];

/// That pause in times of what the last try took, at least: trying stays below a two-hundredth of one CPU.
const TRYING: u32 = 200;

/// How long it has not grown, or been busy, when it is taken to be filled.
const FILLED: Duration = Duration::from_millis(750);

/// Why somebody is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// It has come, or an operator asks for it.
    Arrived,
    /// It has grown since it was looked at, or has just come and was busy.
    Filled,
    /// The pause is over.
    Due,
}

/// What the daemon knows of a process when it comes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Which.
    pub process: ProcessId,
    /// Its trust domain.
    pub domain: Domain,
    /// What is alike among processes: the program, for virtual machines with the size of their memory.
    pub likeness: String,
    /// Why it must not be merged, if it must not.
    pub excluded: Option<String>,
    /// Resident memory.
    pub resident: Bytes,
}

/// What becomes of somebody who is to be withdrawn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaving {
    /// Why it is.
    pub reason: Reason,
    /// Why it could not be, the last time that it was tried.
    pub refused: Option<String>,
    /// From when on it is tried.
    pub next: Duration,
    /// The pause before that.
    pause: Duration,
}

impl Leaving {
    /// What of it is withdrawn.
    pub fn extent(&self) -> Extent {
        self.reason.extent()
    }
}

/// Somebody whose memory is looked at.
#[derive(Clone, Debug, PartialEq)]
pub struct Member {
    /// Its trust domain.
    pub domain: Domain,
    /// What is alike among members.
    pub likeness: String,
    /// Why it must not be merged.
    pub excluded: Option<String>,
    /// Whether an operator withdrew it.
    pub withdrawn: bool,
    /// Until when it is left alone because it has refused to be enrolled, or lost by it.
    pub refused: Option<Duration>,
    /// Whether what is merged of it is to be withdrawn, and has not been.
    pub leaving: Option<Leaving>,
    /// Resident memory.
    pub resident: Bytes,
    /// A sample of what it held when it was looked at last.
    pub held: Option<Arc<Held>>,
    /// How short memory is in its cgroup, as far as it is known.
    pub shortage: Shortage,
    /// Whether the daemon has enrolled any of it.
    pub enrolled: bool,
    /// Whether any of it may be merged, whoever enrolled it: it was in a merge.
    pub merged: bool,
    /// Whether a merge of it has come to its end, so that it is known whether it loses by it.
    pub judged: bool,
    /// What came of its merges until then, those that were halted among them.
    pub net: NetBytes,
    /// Whether it may share pages with another trust domain, since its own has changed.
    pub mixed: bool,
    /// CPU seconds that its merge wants beside a look, where the last one was halted for want of them.
    pub unmerged: f64,
    /// When that was.
    pub halted: Duration,
    /// When it came into another trust domain last.
    moved_at: Option<Duration>,
    /// When it was looked at last.
    pub looked: Option<Duration>,
    /// The pause after the next look.
    pub pause: Duration,
    /// When it is looked at next.
    pub next: Duration,
    /// Why.
    pub cause: Cause,
    /// When it has come.
    came: Duration,
    /// Since when it fills, if that has not been looked at.
    filling: Option<Duration>,
    /// Its CPU time, and when that was read.
    ran: Option<(Duration, Duration)>,
    /// When it was busy last, if that has not been looked at.
    busy: Option<Duration>,
    /// How often a look at it has used up the budget, less those that have not.
    pub overran: u32,
    /// Looks one after the other that found only what was not old enough.
    unripe: u32,
    /// Looks without somebody who is known to hold much of the same, since what it holds has changed.
    missed: u32,
    /// Whether the last look found nothing, not even what is too young.
    in_vain: bool,
    /// Whether its last merge gave back less than half of what it promised, or cost more than it was worth.
    pub merged_in_vain: bool,
    /// Its CPU time when that look began, and when it was read.
    ran_then: Option<(Duration, Duration)>,
    /// When the last look at it began.
    begun: Duration,
    /// Resident memory then.
    seen: Bytes,
}

impl Member {
    /// Somebody who has come at a time.
    pub fn new(arrival: Arrival, now: Duration, rules: &Rules) -> Self {
        let Arrival { domain, likeness, excluded, resident, .. } = arrival;
        Self {
            domain,
            likeness,
            excluded,
            withdrawn: false,
            refused: None,
            leaving: None,
            resident,
            held: None,
            shortage: Shortage::default(),
            enrolled: false,
            merged: false,
            judged: false,
            net: NetBytes(0),
            mixed: false,
            unmerged: 0.0,
            halted: Duration::ZERO,
            moved_at: None,
            looked: None,
            pause: rules.ripens,
            next: now + rules.debounce,
            cause: Cause::Arrived,
            came: now,
            filling: None,
            ran: None,
            busy: None,
            overran: 0,
            unripe: 0,
            missed: 0,
            in_vain: false,
            merged_in_vain: false,
            ran_then: None,
            begun: now,
            seen: Bytes::ZERO,
        }
    }

    /// Whether its memory may be looked at.
    pub fn is_open(&self) -> bool {
        self.excluded.is_none() && !self.withdrawn && self.refused.is_none() && self.leaving.is_none()
    }

    /// Whether memory is short in its cgroup.
    pub fn is_squeezed(&self, rules: &Rules) -> bool {
        self.shortage.is_short(rules.pressure)
    }

    /// Whether it has not been looked at yet.
    pub fn is_new(&self) -> bool {
        self.looked.is_none()
    }

    /// Who comes first where CPU time is short, the least first: who was noted and may be merged, who is to be noted,
    /// who was looked at before.
    pub fn urgency(&self, rules: &Rules) -> u8 {
        match self.looked {
            Some(_) if !self.enrolled && self.pause <= rules.ripens => 0,
            None => 1,
            Some(_) => 2,
        }
    }

    /// Whether it waits longer and longer.
    pub fn is_backed_off(&self, rules: &Rules) -> bool {
        self.pause > rules.ripens * 8
    }

    /// Take note of its memory. What fills is looked at once it has stopped to, or has filled for long.
    pub fn grew_to(&mut self, resident: Bytes, now: Duration, rules: &Rules) {
        let fills = resident.saturating_sub(self.resident) >= FILLS;
        self.resident = resident;
        let more = resident.saturating_sub(self.seen);
        let (part, least) = if now < self.came + YOUNG.0 { (YOUNG.1, YOUNG.2) } else { GROWTH };
        if more < least || more.0 < self.seen.0 / part {
            return;
        }
        let soon = if fills {
            let since = *self.filling.get_or_insert(now);
            (now + FILLED).min(since + rules.ripens)
        } else {
            now.max(self.begun + rules.ripens / 2)
        };
        if self.is_new() {
            self.next = self.next.max(soon);
        } else if soon < self.next || fills && self.cause == Cause::Filled {
            (self.next, self.cause) = (soon, Cause::Filled);
            self.pause = rules.ripens;
        }
    }

    /// Take note of its CPU time. Who has just come and is no longer busy is as it will be: memory that was there
    /// before, as in huge pages, fills without growing.
    pub fn ran_for(&mut self, ran: Duration, now: Duration, rules: &Rules) {
        let (before, at) = self.ran.replace((ran, now)).unwrap_or((ran, now));
        if now >= self.came + YOUNG.0 {
            self.busy = None;
        } else if ran.saturating_sub(before) > (now.saturating_sub(at)).mul_f64(BUSY) {
            self.busy = Some(now);
            if self.is_new() {
                self.next = self.next.max((now + FILLED).min(self.came + rules.ripens));
            }
        } else if self.busy.is_some_and(|busy| now >= busy + FILLED) && !self.is_new() {
            self.busy = None;
            if self.next > now {
                (self.next, self.cause, self.pause) = (now, Cause::Filled, rules.ripens);
            }
        }
    }

    /// Its turn has come. Who was looked at in vain and has hardly run since is put off, until `rarest` is over since
    /// that look: others may write its memory, too.
    pub fn put_off(&mut self, now: Duration, rarest: Duration) {
        self.refused = self.refused.filter(|until| now < *until);
        let idle = |(before, then): (Duration, Duration), (ran, at): (Duration, Duration)| {
            at > then && ran.saturating_sub(before) <= at.saturating_sub(then).mul_f64(IDLE)
        };
        let last = self.begun + rarest;
        let due = self.cause == Cause::Due && self.next <= now && now < last;
        if due && self.in_vain && self.ran_then.zip(self.ran).is_some_and(|(then, ran)| idle(then, ran)) {
            self.pause = (self.pause * 2).min(rarest);
            self.next = (now + self.pause).min(last);
        }
    }

    /// A look at it begins.
    pub fn begin(&mut self, now: Duration) {
        (self.begun, self.seen, self.filling) = (now, self.resident, None);
        self.ran_then = self.ran;
        // What is busy still may fill still.
        self.busy = self.busy.filter(|busy| now < *busy + FILLED);
    }

    /// It was looked at. What had something to merge, or will have when that `ripens`, is looked at again sooner, what
    /// had nothing later, up to the pause `rarest`; `spread` between 0 and 1 keeps those apart that came together, so
    /// that none meets a program's own rhythm each time. Contents were read in the order of the look before, so that it
    /// counts when that began.
    pub fn looked(
        &mut self,
        now: Duration,
        (found, ripens): (bool, bool),
        spread: f64,
        rules: &Rules,
        rarest: Duration,
    ) {
        let first = self.looked.is_none();
        self.looked = Some(now);
        self.unripe = if ripens && !found { self.unripe + 1 } else { 0 };
        if ripens && self.unripe <= UNRIPE {
            self.pause = rules.ripens;
        } else if found && !self.merged_in_vain {
            self.pause = (self.pause / 2).max(rules.ripens);
        } else if !found && !first {
            self.pause = (self.pause * 2).clamp(rules.ripens, rarest);
        }
        self.in_vain = !found && !ripens && !first;
        let spread = if self.pause > rules.ripens { spread / 8.0 } else { 0.0 };
        self.next = self.begun + self.pause.mul_f64(1.0 + spread);
        self.cause = Cause::Due;
    }

    /// Take note of what it holds.
    pub fn hold(&mut self, held: Held) {
        let before = self.held.take().unwrap_or_default();
        if before.unmerged.shared(&held.unmerged).0 * 2 < held.unmerged.contents().0 {
            self.missed = 0;
        }
        self.held = Some(Arc::new(held));
    }

    /// It was just looked at without somebody who holds much of the same: it is again, soon, unless that was in vain.
    pub fn miss(&mut self, rules: &Rules) {
        self.missed += 1;
        if self.missed <= MISSES && !self.merged_in_vain {
            (self.pause, self.in_vain) = (rules.ripens, false);
            self.next = self.begun + self.pause;
        }
    }

    /// A look in which it took part has used up the budget: it is taken to cost twice as much.
    pub fn overrun(&mut self) {
        self.overran = (self.overran + 1).min(OVERRUNS);
    }

    /// A look in which it took part has come to its end.
    pub fn keep_to_budget(&mut self) {
        self.overran = self.overran.saturating_sub(1);
    }

    /// How many times as much a look at it costs as one at others of its size: one with very many regions, say.
    pub fn weight(&self) -> f64 {
        f64::from(1_u32 << self.overran)
    }

    /// Little is expected of it for twice as long.
    pub fn wait_longer(&mut self, rules: &Rules) {
        self.next += self.pause;
        self.pause = (self.pause * 2).min(rules.rarest);
    }

    /// Nothing more is expected of it for long.
    pub fn back_off(&mut self, now: Duration, rules: &Rules) {
        self.pause = (self.pause * 8).clamp(rules.ripens, rules.rarest);
        self.next = now + self.pause;
    }

    /// It has refused to be enrolled, or lost by it. A plan that counts on its copies comes to nothing: it is in none
    /// until its next turn.
    pub fn refuse(&mut self, now: Duration, rules: &Rules) {
        self.back_off(now, rules);
        self.refused = Some(self.next);
    }

    /// An operator wants it to be left alone.
    pub fn withdraw(&mut self, now: Duration) {
        self.withdrawn = true;
        self.leave(Reason::Operator, now);
    }

    /// What is merged of it is to be withdrawn. Until it is, it is in no plan: others would share with what goes away.
    pub fn leave(&mut self, reason: Reason, now: Duration) {
        // An operator has it tried at once, as has whoever wants more of it withdrawn.
        let more = self.leaving.as_ref().is_none_or(|leaving| leaving.extent() < reason.extent());
        if more || reason == Reason::Operator {
            self.leaving = Some(Leaving { reason, refused: None, next: now, pause: Duration::ZERO });
        }
    }

    /// Not all that is merged of it could be withdrawn: it is tried again, later each time. Tells whether that is news.
    pub fn stay(&mut self, why: String, cost: Duration, now: Duration) -> bool {
        let Some(leaving) = &mut self.leaving else { return false };
        leaving.pause = (leaving.pause * 2).clamp(TRIES[0], TRIES[1]).max(cost * TRYING);
        leaving.next = now + leaving.pause;
        let before = leaving.refused.replace(why);
        before != leaving.refused
    }

    /// It may share pages with others that it must not any more.
    pub fn part(&mut self, now: Duration) {
        if self.merged {
            self.mixed = true;
            self.leave(Reason::Domain, now);
        }
    }

    /// It came into another trust domain. Who does so again and again would be merged and withdrawn each time.
    pub fn moved(&mut self, now: Duration, rules: &Rules) {
        if self.moved_at.replace(now).is_some_and(|before| now < before + SETTLED) {
            self.refuse(now, rules);
        }
    }

    /// It was withdrawn. Tells why it was to be, where that was refused before.
    pub fn left(&mut self, extent: Extent) -> Option<Reason> {
        (self.enrolled, self.judged, self.net, self.unmerged) = (false, false, NetBytes(0), 0.0);
        if extent == Extent::All {
            (self.merged, self.mixed) = (false, false);
        }
        self.leaving.take().filter(|leaving| leaving.refused.is_some()).map(|leaving| leaving.reason)
    }

    /// It is not withdrawn unless it must be.
    pub fn stay_if_it_may(&mut self) {
        self.leaving = self.leaving.take().filter(|_| self.excluded.is_some() || self.mixed);
    }

    /// It is to be looked at now, and is not withdrawn unless it must be.
    pub fn call(&mut self, now: Duration, rules: &Rules) {
        (self.withdrawn, self.refused) = (false, None);
        self.stay_if_it_may();
        (self.pause, self.next, self.cause) = (rules.ripens, now, Cause::Arrived);
    }
}
