//! Choosing what is done next.

use super::{Action, Cause, Member, Mode, Reason, State, What, Work};
use crate::units::{Bytes, ProcessId};
use std::collections::BTreeSet;
use std::time::Duration;

/// Members that are looked at beside those of their domain whose turn it is, at most: alike ones, and the biggest others.
const PARTNERS: usize = 2;

/// The part of its pause by which somebody is looked at earlier, where others are looked at now.
const TOGETHER: f64 = 0.25;

impl State {
    /// Begin the next piece of work, if none is under way and there is one.
    pub(super) fn begin(&mut self, actions: &mut Vec<Action>) {
        if self.work.is_some() {
            return;
        }
        if let Some(unmerge) = self.stopping {
            return self.end(unmerge, actions);
        }
        match (self.may_act(), self.held) {
            (false, true) => {
                let reason = if self.paused { Reason::Operator } else { Reason::OtherWriter };
                actions.push(self.say(What::Restore, &[], reason, "KSM's settings come back, and merges stay"));
                return self.start(Work::Restore, Action::Restore, actions);
            }
            (true, false) if self.now >= self.hold_after => return self.start(Work::Hold, Action::Hold, actions),
            (true, false) => return,
            _ => {}
        }
        if self.paused || self.rules.mode == Mode::Observe || self.yields().is_some() {
            return;
        }
        if self.held && !self.is_pressed() && !self.leaving.is_empty() {
            return self.withdraw(actions);
        }
        if self.held && self.now >= self.watch.0 && self.members.values().any(|member| member.enrolled) {
            return self.start(Work::Look, Action::Look { withdraw: !self.is_pressed() }, actions);
        }
        if self.rules.quiet.iter().any(|hours| hours.contain(self.time)) {
            return self.rest(Reason::QuietHours, "these are quiet hours", actions);
        }
        let enough = |keep: Bytes| self.available.is_some_and(|available| available >= keep);
        if self.rules.keep_available.is_some_and(enough) && !self.is_pressed() {
            return self.rest(Reason::Goal, "there is as much memory as it is to keep", actions);
        }
        self.census(actions);
    }

    fn end(&mut self, unmerge: bool, actions: &mut Vec<Action>) {
        let enrolled: Vec<ProcessId> = self.enrolled();
        if unmerge && self.held && !enrolled.is_empty() {
            self.stopping = Some(false);
            actions.push(self.say(What::Withdraw, &enrolled, Reason::Stopped, "the daemon ends"));
            self.start(Work::Withdraw(enrolled.clone()), Action::Withdraw(enrolled), actions);
        } else if self.held {
            self.start(Work::Restore, Action::Restore, actions);
        } else {
            self.ended = true;
            actions.push(Action::End);
        }
    }

    /// In whom anything is enrolled.
    fn enrolled(&self) -> Vec<ProcessId> {
        let enrolled = self.members.iter().filter(|(_, member)| member.enrolled);
        enrolled.map(|(process, _)| *process).collect()
    }

    fn withdraw(&mut self, actions: &mut Vec<Action>) {
        let leaving = std::mem::take(&mut self.leaving);
        for (&process, &reason) in &leaving {
            let why = match reason {
                Reason::Operator => "an operator withdraws it",
                Reason::Excluded => "it must not be merged any more",
                _ => "what was enrolled costs more than it gives back",
            };
            actions.push(self.say(What::Withdraw, &[process], reason, why));
        }
        let processes: Vec<ProcessId> = leaving.into_keys().collect();
        self.start(Work::Withdraw(processes.clone()), Action::Withdraw(processes), actions);
    }

    /// Say once why nothing is done.
    fn rest(&mut self, reason: Reason, why: &str, actions: &mut Vec<Action>) {
        if self.told != Some(reason) {
            self.told = Some(reason);
            actions.push(self.say(What::Rest, &[], reason, why));
        }
    }

    fn cost(&self, member: &Member) -> f64 {
        member.resident.0 as f64 / 1048576.0 * self.census_seconds
    }

    /// Take a census of those whose turn it is, as far as there is CPU time for it.
    fn census(&mut self, actions: &mut Vec<Action>) {
        let pressed = self.is_pressed();
        // Who waits for long may be what is needed when memory is short.
        let sooner = if pressed { 0.75 } else { 0.0 };
        let turn = |member: &Member, sooner: f64| {
            member.is_open() && member.next.saturating_sub(member.pause.mul_f64(sooner)) <= self.now
        };
        let all = |sooner: f64| -> Vec<(Cause, Duration, ProcessId)> {
            let due = self.members.iter().filter(|(_, member)| turn(member, sooner));
            due.map(|(process, member)| (member.cause, member.next, *process)).collect()
        };
        let mut due = all(sooner);
        if !due.is_empty() {
            // One census of several is less work than several.
            due = all(TOGETHER.max(sooner));
        }
        if due.is_empty() {
            if self.told == Some(Reason::Budget) || self.told == Some(Reason::Goal) {
                self.told = None;
            }
            return;
        }
        // Those who are new are only taken note of, which others need not wait for.
        let new = |&(_, _, process): &(Cause, Duration, ProcessId)| self.members[&process].is_new();
        if due.iter().any(new) {
            due.retain(new);
        }
        due.sort_unstable();
        let left = self.budget.left();
        let (mut chosen, mut cost) = (BTreeSet::new(), 0.0);
        let mut impossible = Vec::new();
        for &(_, _, process) in &due {
            let member = self.cost(&self.members[&process]);
            if self.budget.until(member).is_none() {
                impossible.push(process);
            } else if cost + member <= left {
                chosen.insert(process);
                cost += member;
            }
        }
        if !impossible.is_empty() {
            let why = "a census of it takes more CPU time than may be saved up: give it a larger burst";
            actions.push(self.say(What::Refuse, &impossible, Reason::Budget, why));
            self.back_off(&impossible);
        }
        if chosen.is_empty() {
            if impossible.len() < due.len() {
                self.rest(Reason::Budget, "the CPU time that it may use is used up for now", actions);
            }
            return;
        }
        let (cause, ..) = due.iter().find(|(_, _, process)| chosen.contains(process)).copied().unwrap_or(due[0]);
        for partner in self.partners(&chosen) {
            let member = self.cost(&self.members[&partner]);
            if cost + member <= left {
                chosen.insert(partner);
                cost += member;
            }
        }
        self.told = None;
        let processes: Vec<ProcessId> = chosen.into_iter().collect();
        let turns: Vec<ProcessId> =
            due.iter().map(|&(.., process)| process).filter(|process| processes.contains(process)).collect();
        let why = match cause {
            Cause::Arrived => "new here",
            Cause::Filled => "it has grown since it was looked at",
            Cause::Due => "not looked at for long",
        };
        actions.push(self.say(What::Census, &turns, cause.into(), why));
        self.start(Work::Census(turns, processes.clone()), Action::Census(processes), actions);
    }

    /// Known members of the same domains: those most alike, then the biggest.
    fn partners(&self, chosen: &BTreeSet<ProcessId>) -> Vec<ProcessId> {
        let mut partners = Vec::new();
        let domains: BTreeSet<_> = chosen.iter().map(|process| &self.members[process].domain).collect();
        for domain in domains {
            let of_domain = |process: &ProcessId| &self.members[process].domain == domain;
            let alike: BTreeSet<_> =
                chosen.iter().filter(|process| of_domain(process)).map(|p| &self.members[p].likeness).collect();
            let mut known: Vec<(bool, bool, Bytes, ProcessId)> = self
                .members
                .iter()
                .filter(|(process, member)| of_domain(process) && !chosen.contains(process) && member.is_open())
                .map(|(process, member)| (alike.contains(&member.likeness), member.enrolled, member.resident, *process))
                .collect();
            known.sort_unstable_by(|a, b| b.cmp(a));
            let (like, other): (Vec<_>, Vec<_>) = known.into_iter().partition(|known| known.0);
            partners.extend(like.into_iter().take(PARTNERS).chain(other.into_iter().take(PARTNERS)).map(|k| k.3));
        }
        partners
    }
}
