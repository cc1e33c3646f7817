//! When somebody's memory is looked at next.

use super::rules::Rules;
use crate::domain::Domain;
use crate::units::{Bytes, ProcessId};
use std::time::Duration;

/// Growth from which memory counts as filled anew: an eighth, and no less than this.
const GROWTH: Bytes = Bytes(16 << 20);

/// Why somebody is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// It has come, or an operator asks for it.
    Arrived,
    /// It has grown since it was looked at.
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
    /// Resident memory.
    pub resident: Bytes,
    /// Whether the daemon has enrolled any of it.
    pub enrolled: bool,
    /// When it was looked at last.
    pub looked: Option<Duration>,
    /// The pause after the next look.
    pub pause: Duration,
    /// When it is looked at next.
    pub next: Duration,
    /// Why.
    pub cause: Cause,
    /// Resident memory when it was looked at last.
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
            resident,
            enrolled: false,
            looked: None,
            pause: rules.ripens,
            next: now + rules.debounce,
            cause: Cause::Arrived,
            seen: Bytes::ZERO,
        }
    }

    /// Whether its memory may be looked at.
    pub fn is_open(&self) -> bool {
        self.excluded.is_none() && !self.withdrawn
    }

    /// Whether it has not been looked at yet.
    pub fn is_new(&self) -> bool {
        self.looked.is_none()
    }

    /// Whether it waits longer and longer.
    pub fn is_backed_off(&self, rules: &Rules) -> bool {
        self.pause > rules.ripens * 8
    }

    /// Take note of its memory. One that fills is looked at soon.
    pub fn grew_to(&mut self, resident: Bytes, now: Duration, rules: &Rules) {
        self.resident = resident;
        let more = resident.saturating_sub(self.seen);
        if self.looked.is_some() && more >= GROWTH && more.0 >= self.seen.0 / 8 {
            let soon = now.max(self.looked.unwrap_or_default() + rules.ripens / 2);
            if soon < self.next {
                (self.next, self.cause) = (soon, Cause::Filled);
            }
            self.pause = rules.ripens;
            // What it grew is noted once; the look that follows sees all of it.
            self.seen = resident;
        }
    }

    /// It was looked at. What had something to merge is looked at again sooner, what had nothing later; `spread` between 0
    /// and 1 keeps those apart that came together, so that none meets a program's own rhythm each time.
    pub fn looked(&mut self, now: Duration, found: bool, spread: f64, rules: &Rules) {
        let first = self.looked.is_none();
        self.looked = Some(now);
        self.seen = self.resident;
        if found {
            self.pause = (self.pause / 2).max(rules.ripens);
        } else if !first {
            self.pause = (self.pause * 2).clamp(rules.ripens, rules.rarest);
        }
        self.next = now + self.pause.mul_f64(1.0 + spread / 8.0);
        self.cause = Cause::Due;
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

    /// It is to be looked at now.
    pub fn call(&mut self, now: Duration, rules: &Rules) {
        (self.pause, self.next, self.cause) = (rules.ripens, now, Cause::Arrived);
    }
}
