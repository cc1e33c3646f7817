//! Taking note of an event.

use super::price::{self, Worth};
use super::{Action, Arrival, Extent, Withdrawn};
use super::{Censused, Decision, Event, Looked, Member, Merged, Planned, Readings, Reason, State, Stopping, Waits};
use super::{What, Work};
use pagefold_base::memory::Shortage;
use pagefold_base::units::{Bytes, ProcessId};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// How much of a new measurement of what a census costs is believed at once.
const WEIGHT: f64 = 0.3;

/// The longest pause between two looks at what is merged.
const WATCH: Duration = Duration::from_secs(60);

/// The pause after a look that found nothing, in times of what it took: looking stays below a thousandth of one CPU.
const REST: u32 = 1000;

/// How long after somebody who was merged has ended ksmd passes by: others may end as well, or a merge come first.
const SWEEP: Duration = Duration::from_secs(5);

/// The pause after a time at which it did not get to all of them.
const SWEEP_AGAIN: Duration = Duration::from_secs(60);

/// The part of what was predicted of a merge that has to come back: where it does not, contents change faster than it
/// was looked.
const KEPT: f64 = 0.5;

/// CPU seconds that are saved up for a merge that was halted, in times of what ksmd should take for it: enrolling and
/// watching take some, too, and ksmd may look at pages twice.
const WHOLE: f64 = 2.0;

/// When the right to change the host is asked for again after somebody else had it.
const AGAIN: Duration = Duration::from_secs(10);

impl State {
    pub(super) fn take(&mut self, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Tick(readings) => self.read(readings, actions),
            Event::Came(arrival) => self.came(arrival, actions),
            Event::Went(process) => {
                // What is in a merge may be merged, whatever comes of that.
                let merges = matches!(&self.work, Some(Work::Merge(processes)) if processes.contains(&process));
                if self.members.remove(&process).is_some_and(|member| merges || member.merged || member.enrolled) {
                    self.sweep.get_or_insert(self.now + SWEEP);
                }
            }
            Event::Held(Ok(())) => {
                self.work = None;
                (self.held, self.busy) = (true, None);
            }
            Event::Held(Err(why)) => {
                self.work = None;
                if self.busy.as_ref() != Some(&why) {
                    actions.push(self.say(What::Yield, &[], Reason::Busy, why.clone()));
                }
                self.not_held(why);
            }
            Event::Censused(found) => self.censused(found, actions),
            Event::Merged(merged) => self.merged(merged, actions),
            Event::Looked(looked) => self.looked(looked, actions),
            Event::Swept { whole } => {
                self.work = None;
                if !whole {
                    self.sweep.get_or_insert(self.now + SWEEP_AGAIN);
                }
            }
            Event::Withdrawn(withdrawn) => self.withdrawn(withdrawn, actions),
            Event::Restored { whole } => (self.work, self.held, self.restored) = (None, false, whole),
            Event::Failed(why) => self.failed(why, actions),
            Event::Contested(why) => self.contest(why, actions),
            Event::Tuner(tuner) => {
                if let Some(name) = tuner.as_ref().filter(|_| self.tuner.is_none() && !self.rules.force) {
                    let why = format!("{name} tunes KSM");
                    actions.push(self.say(What::Yield, &[], Reason::OtherWriter, why));
                }
                self.tuner = tuner;
            }
            Event::Configured(rules) => {
                self.budget.rebound(rules.cpu, rules.burst);
                if self.rules.across_domains && !rules.across_domains {
                    self.outdated = true;
                    let now = self.now;
                    self.members.values_mut().for_each(|member| member.part(now));
                }
                (self.rules, self.contested, self.told) = (rules, None, None);
            }
            Event::Pause => self.paused = true,
            Event::Resume => (self.paused, self.contested, self.hold_after) = (false, None, self.now),
            Event::Enrol(process) => {
                self.withdrawn.remove(&process);
                if let Some(member) = self.members.get_mut(&process) {
                    member.call(self.now, &self.rules);
                }
            }
            Event::Withdraw(process) => match self.members.get_mut(&process) {
                Some(member) => member.withdraw(self.now),
                None => {
                    self.withdrawn.insert(process);
                }
            },
            Event::Stop { unmerge } => {
                let stopping = if unmerge { Stopping::Unmerging } else { Stopping::Kept };
                self.stopping.get_or_insert(stopping);
            }
        }
    }

    fn read(&mut self, readings: Readings, actions: &mut Vec<Action>) {
        self.budget.read(self.now, readings.spent);
        (self.available, self.time) = (readings.available, Some(readings.time));
        self.shortage = Shortage::of_host(readings.pressure, readings.available, readings.total);
        for (process, shortage) in readings.cgroups {
            if let Some(member) = self.members.get_mut(&process) {
                member.shortage = shortage;
            }
        }
        for (process, ran) in readings.ran {
            if let Some(member) = self.members.get_mut(&process) {
                member.ran_for(ran, self.now, &self.rules);
            }
        }
        for (process, resident) in readings.resident {
            if let Some(member) = self.members.get_mut(&process) {
                member.grew_to(resident, self.now, &self.rules);
            }
        }
        let rarest = self.rarest();
        for member in self.members.values_mut() {
            member.put_off(self.now, rarest);
        }
        if let Some(waits) = readings.waits {
            self.wait(&waits, actions);
        }
    }

    /// Back off where programs are slowed down. A census comes to its end, or there would be none on a host that is
    /// always busy; a merge is done again at a lower pace.
    fn wait(&mut self, waits: &Waits, actions: &mut Vec<Action>) {
        let works = matches!(self.work, Some(Work::Census(..) | Work::Merge(_)));
        let slowest = self.slowdown.is_slowest();
        let Some((pause, why)) = self.slowdown.read(waits, works, self.rules.slowdown, self.now) else { return };
        let halts = matches!(&self.work, Some(Work::Merge(processes)) if !slowest && !self.is_needed(processes));
        let (first, then) = match (&self.work, halts) {
            (Some(Work::Merge(_)), false) => ("when this is done ", ""),
            _ => ("", " and then merges more slowly"),
        };
        let why = format!("{why}: {first}it rests for {} s{then}", pause.as_secs());
        actions.push(self.say(What::Rest, &[], Reason::SlowDown, why));
        self.told = Some(Reason::SlowDown);
        if halts && !self.halted {
            self.halted = true;
            actions.push(Action::Halt);
        }
    }

    fn came(&mut self, arrival: Arrival, actions: &mut Vec<Action>) {
        let (process, excluded) = (arrival.process, arrival.excluded.clone());
        let before = self.members.get(&process).map(|member| member.excluded.clone());
        match self.members.get_mut(&process) {
            Some(member) => {
                if member.likeness != arrival.likeness {
                    member.held = None;
                }
                (member.likeness, member.excluded) = (arrival.likeness, arrival.excluded);
                // What it had merged before it must not any more is withdrawn.
                if member.excluded.is_some() && member.merged {
                    member.leave(Reason::Excluded, self.now);
                } else if member.leaving.as_ref().is_some_and(|leaving| leaving.reason == Reason::Excluded) {
                    member.stay_if_it_may();
                }
                let domain = std::mem::replace(&mut member.domain, arrival.domain);
                if domain != member.domain && !domain.is_alone() && !self.rules.across_domains {
                    self.outdated |= self.work.as_ref().is_some_and(|work| work.is_about(process));
                    member.part(self.now);
                }
                if domain != member.domain {
                    member.moved(self.now, &self.rules);
                }
            }
            None => {
                let mut member = Member::new(arrival, self.now, &self.rules);
                if self.withdrawn.remove(&process) {
                    member.withdraw(self.now);
                }
                self.members.insert(process, member);
            }
        }
        if let Some(why) = excluded.filter(|why| before != Some(Some(why.clone()))) {
            actions.push(self.say(What::Leave, &[process], Reason::Excluded, why));
        }
    }

    fn censused(&mut self, found: Censused, actions: &mut Vec<Action>) {
        let Some(Work::Census(turns, processes)) = self.work.take() else { return };
        let mib = found.looked.0 as f64 / 1048576.0;
        if mib >= 1.0 && !found.partial {
            let measured = found.cost.as_secs_f64() / mib;
            self.census_seconds += WEIGHT * (measured - self.census_seconds);
        }
        if !found.partial {
            // What comes next begins before the next reading, and has to fit as well.
            let read = self.budget.spent().saturating_sub(self.began);
            self.budget.read(self.now, self.budget.spent() + found.cost.saturating_sub(read));
        }
        let overran = found.partial && self.budget.left() <= 0.0;
        let beside: BTreeSet<ProcessId> = processes.iter().copied().collect();
        for process in &processes {
            match self.members.get_mut(process) {
                Some(member) if overran => member.overrun(),
                Some(member) if !found.partial => member.keep_to_budget(),
                _ => {}
            }
        }
        if found.partial || self.outdated {
            // Else it would be begun and halted again and again, and nobody else have a turn.
            for process in turns.iter().filter(|_| overran) {
                if let Some(member) = self.members.get_mut(process) {
                    member.next = self.now + member.pause;
                }
            }
            return;
        }
        self.looks += 1;
        for (process, held) in found.held {
            if let Some(member) = self.members.get_mut(&process) {
                member.hold(held);
            }
        }
        let planned: BTreeMap<ProcessId, Planned> = found.planned.iter().map(|plan| (plan.process, *plan)).collect();
        for process in &turns {
            if let Some(member) = self.members.get_mut(process) {
                member.unmerged = 0.0;
            }
        }
        let is_new = |process: &ProcessId| self.members.get(process).is_some_and(Member::is_new);
        // What has just come has not been there for long enough, whoever enrolled it.
        let young = turns.iter().any(is_new);
        let all: u64 = found.efforts.values().sum();
        let effort = |process: &ProcessId| found.efforts.get(process).copied().unwrap_or(0);
        let part = |process: &ProcessId| found.cost.mul_f64(effort(process) as f64 / all.max(1) as f64);
        let is_open = |process: &ProcessId| self.members.get(process).is_some_and(Member::is_open);
        let open = planned.into_values().filter(|plan| is_open(&plan.process));
        let worth = open.map(|plan| (plan.process, Worth::of(&plan, part(&plan.process))));
        let most = self.rules.price;
        let pays = |(process, worth): &(ProcessId, Worth)| {
            worth.pays(if self.is_needed(&[*process]) { f64::INFINITY } else { most })
        };
        let (worth, dear): (Vec<_>, Vec<_>) = worth.partition(pays);
        let processes: Vec<ProcessId> = worth.iter().map(|(process, _)| *process).collect();
        let rarest = self.rarest();
        for &process in &turns {
            let spread = self.spread(process);
            if let Some(member) = self.members.get_mut(&process) {
                let found = (processes.contains(&process), found.young.contains(&process));
                member.looked(self.now, found, spread, &self.rules, rarest);
            }
        }
        for process in self.who_missed(&turns, &beside) {
            if let Some(member) = self.members.get_mut(&process) {
                member.miss(&self.rules);
            }
        }
        if young {
            return;
        }
        // The others are told of when it is their turn.
        let (dear, sum) = price::sum(dear.into_iter().filter(|(process, _)| turns.contains(process)));
        if !dear.is_empty() {
            let why = format!("it would give back {sum} (at most {most} is worth it)");
            actions.push(self.say(What::Leave, &dear, Reason::Unprofitable, why));
        }
        let outlays: Vec<f64> = worth.iter().map(|(_, worth)| worth.ksmd.as_secs_f64() * WHOLE).collect();
        let (processes, sum) = price::sum(worth);
        if processes.is_empty() {
            return;
        }
        let (net, cost) = (Bytes(sum.net.0.max(0).unsigned_abs()), sum.ksmd.as_secs_f64());
        let acts = self.may_act() && self.held && self.stopping.is_none();
        let why = format!("it should give back {sum}");
        let decision = Decision {
            what: What::Merge,
            whom: processes.clone(),
            reason: Reason::Profitable,
            why,
            predicted: Some(net),
            acted: acts,
        };
        actions.push(Action::Say(decision));
        if acts {
            // At the pace at which the budget fills up again there is no end to it.
            let share = if cost * 1.5 <= self.budget.left() { 1.0 } else { (self.rules.cpu / 2.0).clamp(0.001, 1.0) };
            let share = (share * self.slowdown.pace()).max(0.001);
            for (process, outlay) in processes.iter().zip(outlays) {
                if let Some(member) = self.members.get_mut(process) {
                    member.unmerged = outlay;
                }
            }
            self.start(Work::Merge(processes.clone()), Action::Merge { processes, share }, actions);
        }
    }

    fn looked(&mut self, looked: Looked, actions: &mut Vec<Action>) {
        self.work = None;
        let found = looked.withdrawn > Bytes::ZERO;
        if found {
            let why = format!("{} were written too soon", looked.withdrawn);
            actions.push(self.say(What::Withdraw, &looked.from, Reason::Broken, why));
        }
        if let Some(stuck) = looked.stuck {
            self.stick(stuck, actions);
        }
        let calm = (self.watch.1 * 2).min(WATCH).max(looked.cost * REST);
        let pause = if found { self.rules.ripens } else { calm };
        self.watch = (self.now + pause, pause);
    }

    /// Say what cannot be withdrawn, where that is news.
    fn stick(&mut self, stuck: Vec<(ProcessId, String)>, actions: &mut Vec<Action>) {
        let before = std::mem::take(&mut self.stuck);
        for (process, why) in stuck {
            if before.get(&process) != Some(&why) {
                actions.push(self.say(What::Refuse, &[process], Reason::Refused, format!("not withdrawn: {why}")));
            }
            self.stuck.insert(process, why);
        }
    }

    fn merged(&mut self, merged: Merged, actions: &mut Vec<Action>) {
        let overran = self.halted && self.budget.left() <= 0.0;
        if let Some(Work::Merge(processes)) = self.work.take() {
            self.have_merged(&processes, overran);
        }
        for process in &merged.enrolled {
            if let Some(member) = self.members.get_mut(process) {
                member.enrolled = true;
            }
        }
        for (process, why) in &merged.refused {
            actions.push(self.say(What::Refuse, &[*process], Reason::Refused, why.clone()));
            if let Some(member) = self.members.get_mut(process) {
                member.refuse(self.now, &self.rules);
            }
        }
        if merged.withdrawn > Bytes::ZERO {
            let why = format!("{} were written too soon", merged.withdrawn);
            actions.push(self.say(What::Withdraw, &merged.from, Reason::Broken, why));
        }
        self.stick(merged.stuck, actions);
        self.watch = (self.now + self.rules.ripens, self.rules.ripens);
        if let Some(why) = merged.yielded {
            return self.contest(why, actions);
        }
        // When it is halted there is metadata of what ksmd has only looked at so far.
        let judged = !self.halted;
        let loses = |process: &ProcessId| judged && merged.nets.get(process).is_some_and(|net| net.0 < 0);
        let (losing, others): (Vec<ProcessId>, Vec<ProcessId>) = merged.enrolled.iter().copied().partition(loses);
        // What was merged of somebody before is not given up for what came to it; looks see what of that does not last.
        let mut lost = Vec::new();
        for (process, net) in &merged.nets {
            if let Some(member) = self.members.get_mut(process).filter(|member| !member.judged) {
                member.net.0 += net.0;
                member.judged = judged;
                if judged && member.enrolled && member.net.0 < 0 {
                    lost.push(*process);
                }
            }
        }
        self.leave(&lost, Reason::Loses);
        for process in &losing.into_iter().chain(lost).collect::<BTreeSet<ProcessId>>() {
            if let Some(member) = self.members.get_mut(process) {
                member.refuse(self.now, &self.rules);
            }
        }
        let mib = merged.net.0 as f64 / 1048576.0;
        let fell_short = !self.halted && (merged.net.0 as f64) < merged.predicted.0 as f64 * KEPT;
        if fell_short && !others.is_empty() {
            let reached = Bytes(merged.net.0.max(0).unsigned_abs());
            let why = format!("{reached} came back of {} predicted: it is looked at later", merged.predicted);
            actions.push(self.say(What::Leave, &others, Reason::Unprofitable, why));
        }
        let in_vain = fell_short || merged.cost.as_secs_f64() > self.rules.price * mib && !self.halted;
        for process in &others {
            if let Some(member) = self.members.get_mut(process) {
                member.merged_in_vain = in_vain;
                if overran || in_vain {
                    member.wait_longer(&self.rules);
                }
            }
        }
    }

    /// These were in a merge, which may have used up the CPU time. Who came to be excluded meanwhile, or into another
    /// domain, is withdrawn.
    fn have_merged(&mut self, processes: &[ProcessId], overran: bool) {
        for process in processes {
            if let Some(member) = self.members.get_mut(process) {
                member.merged = true;
                match overran {
                    true => member.halted = self.now,
                    false => member.unmerged = 0.0,
                }
                if member.excluded.is_some() {
                    member.leave(Reason::Excluded, self.now);
                }
                if self.outdated {
                    member.part(self.now);
                }
            }
        }
    }

    /// Who could not be withdrawn is tried again, and told of where that is news.
    fn withdrawn(&mut self, withdrawn: Withdrawn, actions: &mut Vec<Action>) {
        let Some(Work::Withdraw(extents)) = self.work.take() else { return };
        // Of some more is to be withdrawn by now: that is still to come.
        let extent = |process: &ProcessId| extents.get(process).copied().unwrap_or(Extent::Ours);
        let is_all = |member: &Member, extent| member.leaving.as_ref().is_none_or(|leaving| leaving.extent() <= extent);
        for process in withdrawn.gone {
            let extent = extent(&process);
            let member = self.members.get_mut(&process).filter(|member| is_all(member, extent));
            if let Some(reason) = member.and_then(|member| member.left(extent)) {
                let why = match extent {
                    Extent::All => "nothing of it is merged any more",
                    Extent::Ours => "what was enrolled of it is not any more",
                };
                actions.push(self.say(What::Withdraw, &[process], reason, why));
            }
        }
        for (process, why) in withdrawn.refused {
            let (told, extent) = (format!("not withdrawn: {why}"), extent(&process));
            let member = self.members.get_mut(&process).filter(|member| is_all(member, extent));
            if member.is_some_and(|member| member.stay(why, withdrawn.cost, self.now)) {
                actions.push(self.say(What::Refuse, &[process], Reason::Refused, told));
            }
        }
    }

    /// The host is not to be had for now.
    fn not_held(&mut self, why: String) {
        self.hold_after = self.now + AGAIN;
        self.busy = Some(why);
        // At the end it is tried once.
        self.stopping = self.stopping.map(|stopping| match stopping {
            Stopping::Unmerging => Stopping::Unmerged,
            other => other,
        });
    }

    fn failed(&mut self, why: String, actions: &mut Vec<Action>) {
        match self.work.take() {
            Some(Work::Hold) => self.not_held(why.clone()),
            Some(Work::Restore) => (self.held, self.restored) = (false, false),
            Some(Work::Census(processes, _)) => self.back_off(&processes),
            Some(Work::Merge(processes)) => {
                self.back_off(&processes);
                self.have_merged(&processes, false);
                // Any of them may be enrolled in part.
                let enrolled = |process: &ProcessId| self.members.get(process).is_some_and(|member| member.enrolled);
                let fresh: Vec<ProcessId> = processes.into_iter().filter(|process| !enrolled(process)).collect();
                for process in &fresh {
                    if let Some(member) = self.members.get_mut(process) {
                        member.enrolled = true;
                    }
                }
                self.leave(&fresh, Reason::Failed);
            }
            Some(Work::Withdraw(extents)) => {
                let refused = extents.keys().map(|process| (*process, why.clone())).collect();
                self.work = Some(Work::Withdraw(extents));
                return self.withdrawn(Withdrawn { refused, ..Withdrawn::default() }, actions);
            }
            Some(Work::Look | Work::Sweep) | None => self.watch = (self.now + WATCH, WATCH),
        }
        actions.push(self.say(What::Refuse, &[], Reason::Failed, why));
    }

    fn contest(&mut self, why: String, actions: &mut Vec<Action>) {
        if self.contested.is_none() {
            actions.push(self.say(What::Yield, &[], Reason::OtherWriter, why.clone()));
        }
        self.contested = Some(why);
    }
}
