//! Choosing what is done next.

use super::{Action, Cause, Extent, Leaving, Member, Mode, Reason, State, Stopping, What, Work};
use pagefold_base::domain::Domain;
use pagefold_base::units::{Bytes, Pages, ProcessId};
use pagefold_census::decide::sketch::Sketch;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Of so many of those whose turn it is partners are sought for what they hold.
const HEEDED: usize = 8;

/// Of so many of those who were looked at it is asked whom they have missed: that takes a microsecond for each of whom it
/// may be.
const ASKED: usize = 32;

/// The part of what somebody has not merged, and the least, for which it is looked at soon with whoever holds that.
const MUCH: (u64, Pages) = (16, Pages(256));

/// One look in so many has a partner that is chosen by chance.
const BY_CHANCE: u64 = 4;

/// What the index of a census may take, in bytes: so much, and this part of all memory that is managed. That, with what
/// the daemon takes beside it, some 0.11 % for what is remembered of members among it, is below 32 MiB and 0.4 % of it,
/// unless two alone take more, or members of other domains that are read beside them, or what is remembered of these.
const INDEX: (u64, u64) = (16 << 20, 640);

/// The part of the memory it is of that an index takes while it is grouped: at most 33 bytes for a page of 4 KiB.
const INDEXED: u64 = 124;

/// The part of what may be saved up for which it is waited before a merge that was halted: others have turns, too.
const MOST: f64 = 0.75;

/// For how long that is waited for: in times of what it takes to save up all that may be, and in seconds at least.
const PATIENCE: (f64, f64) = (2.0, 60.0);

/// The part of its pause by which somebody is looked at earlier, where others are looked at now.
const TOGETHER: f64 = 0.25;

impl State {
    /// Begin the next piece of work, if none is under way and there is one.
    pub(super) fn begin(&mut self, actions: &mut Vec<Action>) {
        if self.work.is_some() {
            return;
        }
        if let Some(stopping) = self.stopping {
            return self.end(stopping, actions);
        }
        match (self.may_act(), self.held) {
            (false, true) => {
                let others = !self.paused && self.yields().is_some();
                let reason = if others { Reason::OtherWriter } else { Reason::Operator };
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
        if self.held && !self.is_pressed() {
            // Where there was no memory for it, looking whether there is comes out of the budget as all looks.
            let tries =
                |leaving: &Leaving| leaving.next <= self.now && (leaving.refused.is_none() || self.budget.left() > 0.0);
            let leaving =
                self.those(|member| member.leaving.as_ref().is_some_and(tries) && !member.is_squeezed(&self.rules));
            if !leaving.is_empty() {
                return self.withdraw(leaving, actions);
            }
        }
        if self.held && self.now >= self.watch.0 && self.members.values().any(|member| member.enrolled) {
            return self.start(Work::Look, Action::Look { withdraw: !self.is_pressed() }, actions);
        }
        if self.time.is_some_and(|time| self.rules.quiet.iter().any(|hours| hours.contain(time))) {
            return self.rest(Reason::QuietHours, "these are quiet hours", actions);
        }
        // Until ksmd comes by, the kernel counts as merged what has ended, and keeps its metadata.
        if self.held && self.sweep.is_some_and(|at| at <= self.now) && self.budget.left() > 0.0 {
            self.sweep = None;
            return self.start(Work::Sweep, Action::Sweep, actions);
        }
        let enough = |keep: Bytes| self.available.is_some_and(|available| available >= keep);
        let at_goal = self.rules.keep_available.is_some_and(enough);
        let rests = (at_goal || self.now < self.slowdown.until()) && !self.is_pressed();
        let due = self.due(rests);
        if rests && due.is_empty() {
            if at_goal {
                return self.rest(Reason::Goal, "there is as much memory as it is to keep", actions);
            }
            self.told = Some(Reason::SlowDown);
            return;
        }
        let told = self.told;
        self.census(due, actions);
        // All others rest on.
        self.told = self.told.or(told.filter(|_| rests));
    }

    /// Come to the end: with what is enrolled withdrawn, where that is asked for and may be, and with settings back.
    fn end(&mut self, stopping: Stopping, actions: &mut Vec<Action>) {
        let merged = self.those(|member| member.enrolled || member.leaving.is_some());
        if stopping == Stopping::Unmerging && !merged.is_empty() {
            if self.held {
                self.stopping = Some(Stopping::Unmerged);
                self.leave(&merged, Reason::Stopped);
                actions.push(self.say(What::Withdraw, &merged, Reason::Stopped, Reason::Stopped.of_leaving()));
                return self.start_withdrawing(merged, actions);
            }
            // Who has paused it and ends it so wants that to be done all the same.
            if self.may_hold() {
                return self.start(Work::Hold, Action::Hold, actions);
            }
        }
        if self.held {
            return self.start(Work::Restore, Action::Restore, actions);
        }
        // What is merged may stay, but of those who were to be withdrawn before.
        let to_leave = |member: &Member| member.leaving.is_some();
        let stay = if stopping == Stopping::Kept { self.those(to_leave) } else { merged };
        let rests =
            self.yields().or_else(|| self.holds_back()).unwrap_or_else(|| "there was no time for it".to_owned());
        for process in &stay {
            let leaving = self.members[process].leaving.as_ref();
            let why = leaving.and_then(|leaving| leaving.refused.as_ref()).unwrap_or(&rests);
            let why = format!("it stays merged: {why}");
            actions.push(self.say(What::Refuse, &[*process], Reason::Stopped, why));
        }
        self.ended = true;
        actions.push(Action::End { whole: self.restored && stay.is_empty() });
    }

    /// The members that fit.
    pub(super) fn those(&self, fits: impl Fn(&Member) -> bool) -> Vec<ProcessId> {
        self.members.iter().filter(|(_, member)| fits(member)).map(|(process, _)| *process).collect()
    }

    fn withdraw(&mut self, processes: Vec<ProcessId>, actions: &mut Vec<Action>) {
        for &process in &processes {
            // What is tried again was told.
            let first = self.members[&process].leaving.as_ref().filter(|leaving| leaving.refused.is_none());
            if let Some(reason) = first.map(|leaving| leaving.reason) {
                actions.push(self.say(What::Withdraw, &[process], reason, reason.of_leaving()));
            }
        }
        self.start_withdrawing(processes, actions);
    }

    fn start_withdrawing(&mut self, processes: Vec<ProcessId>, actions: &mut Vec<Action>) {
        let extent = |process| self.members[process].leaving.as_ref().map_or(Extent::Ours, Leaving::extent);
        let extents: BTreeMap<_, _> = processes.iter().map(|process| (*process, extent(process))).collect();
        self.start(Work::Withdraw(extents.clone()), Action::Withdraw(extents), actions);
    }

    /// Say once why nothing is done.
    fn rest(&mut self, reason: Reason, why: &str, actions: &mut Vec<Action>) {
        if self.told != Some(reason) {
            self.told = Some(reason);
            actions.push(self.say(What::Rest, &[], reason, why));
        }
    }

    /// CPU seconds of looking at somebody.
    fn cost(&self, member: &Member) -> f64 {
        member.resident.0 as f64 / 1048576.0 * self.census_seconds * member.weight()
    }

    /// CPU seconds to save up for a merge of somebody that was halted: none where memory is short, nor where others
    /// have used them up for longer than [`PATIENCE`].
    fn unmerged(&self, process: ProcessId) -> f64 {
        let member = &self.members[&process];
        let patience = (self.budget.burst() / self.rules.cpu * PATIENCE.0).max(PATIENCE.1);
        let waited = self.now.saturating_sub(member.next.max(member.halted)).as_secs_f64();
        if waited < patience && !self.is_needed(&[process]) { member.unmerged } else { 0.0 }
    }

    /// CPU seconds to save up before some are looked at: where merges of them were halted, for all of these besides, or
    /// looking would use them up each time. No more than most of what may be saved up, unless looking alone takes more.
    fn outlay(&self, looks: f64, unmerged: f64) -> f64 {
        (looks + unmerged).min(looks.max(self.budget.burst() * MOST))
    }

    /// Take a census of those whose turn it is, as far as there is CPU time for it.
    fn census(&mut self, due: Vec<ProcessId>, actions: &mut Vec<Action>) {
        if due.is_empty() {
            self.told = None;
            return;
        }
        let never = |&process: &ProcessId| self.budget.until(self.cost(&self.members[&process])).is_none();
        let (impossible, possible): (Vec<ProcessId>, Vec<ProcessId>) = due.iter().copied().partition(never);
        let chosen = self.affordable(&possible);
        if !impossible.is_empty() {
            let why = "a census of it takes more CPU time than may be saved up: give it a larger burst";
            actions.push(self.say(What::Refuse, &impossible, Reason::Budget, why));
            self.back_off(&impossible);
        }
        let Some(chosen) = chosen else {
            if !possible.is_empty() {
                self.rest(Reason::Budget, "the CPU time that it may use is used up for now", actions);
            }
            return;
        };
        self.told = None;
        let turns: Vec<ProcessId> = possible.into_iter().filter(|process| chosen.contains(process)).collect();
        let cause = self.members[&turns[0]].cause;
        let why = match cause {
            Cause::Arrived => "new here",
            Cause::Filled => "it has grown, or been at work, since it was looked at",
            Cause::Due if self.members[&turns[0]].pause <= self.rules.ripens => {
                "what it holds may be old enough by now"
            }
            Cause::Due => "not looked at for long",
        };
        actions.push(self.say(What::Census, &turns, cause.into(), why));
        if self.is_alone(&chosen) {
            let why = "a census of it and another takes more CPU time than may be saved up, so that it is looked at \
                       alone and nothing is found that it shares: give it a larger burst";
            actions.push(self.say(What::Refuse, &turns, Reason::Budget, why));
        }
        for process in &turns {
            if let Some(member) = self.members.get_mut(process) {
                member.begin(self.now);
            }
        }
        let processes: Vec<ProcessId> = chosen.into_iter().collect();
        self.start(Work::Census(turns, processes.clone()), Action::Census(processes), actions);
    }

    /// Whose turn it is, in the order in which they come; only of those in whose cgroups memory is short, if it is so.
    fn due(&self, squeezed: bool) -> Vec<ProcessId> {
        let all = |sooner: f64| -> Vec<(Cause, Duration, u64, ProcessId)> {
            let turn = |(_, member): &(&ProcessId, &Member)| {
                // Who waits for long may be what is needed when memory is short.
                let short = member.is_squeezed(&self.rules);
                let sooner = if short || self.is_pressed() { 0.75 } else { sooner };
                (short || !squeezed)
                    && member.is_open()
                    && member.next.saturating_sub(member.pause.mul_f64(sooner)) <= self.now
            };
            let due = self.members.iter().filter(turn);
            // Of those who have come together not the same ones are first each time.
            due.map(|(process, member)| (member.cause, member.next, self.dice(*process), *process)).collect()
        };
        if all(0.0).is_empty() {
            return Vec::new();
        }
        // One census of several is less work than several.
        let mut due = all(TOGETHER);
        due.sort_unstable();
        let mut due: Vec<ProcessId> = due.into_iter().map(|(.., process)| process).collect();
        let member = |process: &ProcessId| &self.members[process];
        if self.is_scarce(&due) {
            // Where CPU time is short, taking note of ever more would leave none to merge what was noted. Those who were
            // there before wait for both.
            due.sort_by_key(|process| member(process).urgency(&self.rules));
        } else {
            due.sort_by_key(|process| !member(process).is_new());
        }
        // Where there is not room for all, alike ones are looked at together: others have little in common.
        let mut places: BTreeMap<_, usize> = BTreeMap::new();
        for (place, process) in due.iter().enumerate() {
            places.entry(self.kind(process)).or_insert(place);
        }
        due.sort_by_key(|process| places[&self.kind(process)]);
        due.sort_by_key(|process| !member(process).is_squeezed(&self.rules));
        due.sort_by_key(|process| member(process).overran);
        if member(&due[0]).overran == 0 {
            due.retain(|process| member(process).overran == 0);
        }
        // Those who are new are only taken note of, which others need not wait for, nor spoil.
        let new = member(&due[0]).is_new();
        due.retain(|process| member(process).is_new() == new);
        due
    }

    /// Those of whose turn it is, and of others beside them, for whom there is CPU time now; `None` while it is waited
    /// for.
    pub(super) fn affordable(&self, due: &[ProcessId]) -> Option<BTreeSet<ProcessId>> {
        let alone = |process: &ProcessId| self.outlay(self.cost(&self.members[process]), self.unmerged(*process));
        if !due.iter().any(|process| alone(process) <= self.budget.left()) {
            return None;
        }
        // Who was in a look that used up the budget is looked at with one other alone, so that it is found out who
        // costs it.
        let apart = due.first().is_some_and(|process| self.members[process].overran > 0);
        let most = if apart { 1 } else { usize::MAX };
        let managed: u64 = self.members.values().map(|member| member.resident.0).sum();
        let room = (INDEX.0 + managed / INDEX.1) * INDEXED;
        let (mut turns, mut chosen, mut looks, mut unmerged, mut looked) = (Vec::new(), BTreeSet::new(), 0.0, 0.0, 0);
        let mut companions = 0;
        let mut join = |chosen: &mut BTreeSet<ProcessId>, process: ProcessId, most: usize| {
            let member = &self.members[&process];
            let (seconds, bytes) = (looks + self.cost(member), member.resident.0);
            let more = unmerged + self.unmerged(process);
            // A big host is looked at in portions, of two members at least.
            let fits = chosen.len() < most.min(2) || chosen.len() < most && looked + bytes <= room;
            let joins = fits && self.outlay(seconds, more) <= self.budget.left();
            if joins {
                chosen.insert(process);
                (looks, unmerged, looked) = (seconds, more, looked + bytes);
            }
            joins
        };
        let scarce = self.is_scarce(due);
        for alike in due.chunk_by(|a, b| self.kind(a) == self.kind(b)) {
            let before = turns.len();
            for process in self.by_content(alike, scarce) {
                if chosen.contains(&process) || join(&mut chosen, process, most) {
                    turns.push(process);
                    // With whoever holds much of the same, before others take the room.
                    if companions < HEEDED
                        && let Some((like, true)) = self.companion(process, &chosen)
                    {
                        companions += usize::from(join(&mut chosen, like, most));
                    }
                }
            }
            // One comes with another like it.
            if let [one] = turns[before..]
                && chosen.iter().all(|other| *other == one || self.kind(other) != self.kind(&one))
                && let Some((like, _)) = self.companion(one, &chosen)
            {
                join(&mut chosen, like, most);
            }
        }
        let first = *turns.first()?;
        let (alone, mut partners) = (chosen.len() == 1, self.partners(&turns, &chosen));
        // The most alike one, also if it has to be waited for: a cheaper one may have nothing in common.
        partners.truncate(if apart { 1 } else { usize::MAX });
        let joined = partners.iter().filter(|partner| join(&mut chosen, **partner, most.saturating_add(1))).count();
        // Without anybody to share with there is little to be found: that is waited for.
        let waits = alone && joined == 0 && partners.iter().any(|partner| self.may_save_up_for(&first, partner));
        (!waits).then_some(chosen)
    }

    /// Whether there is CPU time to look at fewer than all of these.
    fn is_scarce(&self, due: &[ProcessId]) -> bool {
        due.iter().map(|process| self.cost(&self.members[process])).sum::<f64>() > self.budget.left()
    }

    /// Members of one kind are likely to share: they may, and are alike by what is known of them.
    fn kind(&self, process: &ProcessId) -> (&Domain, &str) {
        let member = &self.members[process];
        (&member.domain, &member.likeness)
    }

    /// Those of one kind in their order; of those none of whom needs it more, first who holds most of what the first
    /// one does.
    fn by_content(&self, alike: &[ProcessId], scarce: bool) -> Vec<ProcessId> {
        let mut ordered = alike.to_vec();
        if let [first, others @ ..] = &mut ordered[..] {
            let sought = self.sought(&[*first], &BTreeSet::new());
            others.sort_by_cached_key(|process| {
                let member = &self.members[process];
                let urgency = if scarce { member.urgency(&self.rules) } else { 0 };
                (!member.is_squeezed(&self.rules), member.overran, urgency, Reverse(self.closeness(&sought, process)))
            });
        }
        ordered
    }

    /// What some hold that is not merged, each without what others hold that are looked at beside it; of the first who
    /// seek anything.
    fn sought(&self, turns: &[ProcessId], beside: &BTreeSet<ProcessId>) -> Vec<Sketch> {
        turns.iter().map(|turn| self.lack(turn, beside)).filter(|rest| !rest.is_empty()).take(HEEDED).collect()
    }

    /// What one holds that is not merged, without what others hold that are looked at beside it.
    fn lack(&self, one: &ProcessId, beside: &BTreeSet<ProcessId>) -> Sketch {
        let Some((domain, held)) = self.members.get(one).and_then(|one| Some((&one.domain, one.held.as_ref()?))) else {
            return Sketch::default();
        };
        let beside = beside.iter().filter(|other| *other != one).filter_map(|other| self.members.get(other));
        let beside = beside.filter(|other| other.domain == *domain).filter_map(|other| other.held.as_ref());
        beside.fold(held.unmerged.clone(), |rest, other| rest.without(&other.all))
    }

    /// How much somebody holds of what is sought, as far as it is known: 0 for nothing, and one more for twice as many
    /// pages, since a sample tells little more.
    fn closeness(&self, sought: &[Sketch], process: &ProcessId) -> u32 {
        let Some(held) = &self.members[process].held else { return 0 };
        let shared: Pages = sought.iter().map(|sketch| sketch.shared(&held.all)).sum();
        shared.0.checked_ilog2().map_or(0, |power| power + 1)
    }

    /// For whom of these, who were looked at, somebody else of its domain holds much of what it has not merged, and those
    /// it was looked at with do not.
    pub(super) fn who_missed(&self, turns: &[ProcessId], beside: &BTreeSet<ProcessId>) -> Vec<ProcessId> {
        let others: Vec<&Member> = self
            .members
            .iter()
            .filter(|(other, member)| !beside.contains(other) && member.is_open())
            .map(|(_, member)| member)
            .collect();
        let has_missed = |turn: &&ProcessId| {
            let Some(one) = self.members.get(turn).filter(|_| !others.is_empty()) else { return false };
            let rest = self.lack(turn, beside);
            others.iter().any(|other| other.domain == one.domain && holds_much(one, &rest, other))
        };
        turns.iter().take(ASKED).filter(has_missed).copied().collect()
    }

    /// Whether there will be CPU time at all for a census of these two.
    fn may_save_up_for(&self, one: &ProcessId, other: &ProcessId) -> bool {
        self.budget.until(self.cost(&self.members[one]) + self.cost(&self.members[other])).is_some()
    }

    /// Whether this is one, for whom with anybody else there will never be CPU time.
    fn is_alone(&self, chosen: &BTreeSet<ProcessId>) -> bool {
        let (Some(one), 1) = (chosen.first(), chosen.len()) else { return false };
        let partners = self.partners(&[*one], chosen);
        !partners.is_empty() && !partners.iter().any(|partner| self.may_save_up_for(one, partner))
    }

    /// Who of its kind is best looked at beside somebody, and whether it is known to hold much of what that one has not
    /// merged, and those who are chosen do not hold.
    fn companion(&self, one: ProcessId, chosen: &BTreeSet<ProcessId>) -> Option<(ProcessId, bool)> {
        let is_like = |other: &ProcessId| !chosen.contains(other) && self.kind(other) == self.kind(&one);
        let known = self.members.iter().filter(|(other, member)| is_like(other) && member.is_open());
        let rest = self.lack(&one, chosen);
        let promise = |other: &ProcessId| self.promise(std::slice::from_ref(&rest), other);
        let best = take_best(&mut known.map(|(other, _)| *other).collect(), promise)?;
        Some((best, holds_much(&self.members[&one], &rest, &self.members[&best])))
    }

    /// Known members of the domains of those whose turn it is: of those that look alike, the one that holds most of what
    /// they seek, and the one that holds most of the rest; of the others the former, and the biggest that holds anything
    /// of it, or of which nothing is known. In some looks one of each is drawn, since not all that they hold is in a
    /// sample.
    fn partners(&self, turns: &[ProcessId], chosen: &BTreeSet<ProcessId>) -> Vec<ProcessId> {
        let mut partners = Vec::new();
        let domains: BTreeSet<_> = turns.iter().map(|process| &self.members[process].domain).collect();
        for domain in domains {
            let of_domain = |process: &ProcessId| &self.members[process].domain == domain;
            let turns: Vec<ProcessId> = turns.iter().copied().filter(of_domain).collect();
            let likenesses: BTreeSet<_> = turns.iter().map(|process| &self.members[process].likeness).collect();
            let is_known = |process: &ProcessId| !chosen.contains(process) && self.members[process].is_open();
            let known = self.members.keys().copied().filter(of_domain).filter(is_known);
            let (mut like, mut other): (Vec<_>, Vec<_>) =
                known.partition(|process| likenesses.contains(&self.members[process].likeness));
            let sought = self.sought(&turns, chosen);
            let promise = |process: &ProcessId| self.promise(&sought, process);
            let first = take_best(&mut like, promise);
            let known = first.and_then(|first| self.members[&first].held.as_ref());
            let without =
                |sketch: &Sketch| known.map_or_else(Sketch::default, |held| sketch.clone().without(&held.all));
            let by_chance = turns.first().is_some_and(|turn| self.dice(*turn).is_multiple_of(BY_CHANCE));
            let rest: Vec<Sketch> = if by_chance { Vec::new() } else { sought.iter().map(without).collect() };
            let cheap = |process: &ProcessId| Reverse(self.members[process].overran);
            let second = take_best(&mut like, |process| (self.merit(&rest, process), self.dice(*process)));
            let is_unknown = |process: &ProcessId| self.members[process].held.is_none();
            let others = if turns.iter().any(is_unknown) {
                [take_best(&mut other, promise), take_best(&mut other, |process| self.promise(&[], process))]
            } else if by_chance {
                [take_best(&mut other, |process| (cheap(process), self.dice(*process))), None]
            } else {
                other.retain(|process| is_unknown(process) || self.closeness(&sought, process) > 0);
                [take_best(&mut other, promise), take_best(&mut other, |process| self.promise(&[], process))]
            };
            partners.extend([first, second].into_iter().chain(others).flatten());
        }
        partners
    }

    /// What to expect of looking at somebody beside those who seek that, the more the greater: who holds most of it for
    /// what looking costs comes first, then who costs little, has something merged, and is biggest.
    fn promise(&self, sought: &[Sketch], process: &ProcessId) -> impl Ord + use<> {
        let member = &self.members[process];
        (self.merit(sought, process), member.enrolled, member.resident, *process)
    }

    /// How much somebody holds of what is sought, half of that for each doubling of what a look is taken to cost; then
    /// how few of these there are. A dear look is worth more than one at somebody who holds nothing of it.
    fn merit(&self, sought: &[Sketch], process: &ProcessId) -> (u32, Reverse<u32>) {
        let overran = self.members[process].overran;
        (self.closeness(sought, process).saturating_sub(overran), Reverse(overran))
    }
}

/// Whether another holds much of what one has not merged, of the rest of that which is sought.
fn holds_much(one: &Member, rest: &Sketch, other: &Member) -> bool {
    let unmerged = one.held.as_ref().map_or(Pages::ZERO, |held| held.unmerged.contents());
    let much = MUCH.1.max(Pages(unmerged.0.div_ceil(MUCH.0)));
    other.held.as_ref().is_some_and(|held| rest.shared(&held.all) >= much)
}

/// Take out who ranks highest.
fn take_best<K: Ord>(from: &mut Vec<ProcessId>, rank: impl Fn(&ProcessId) -> K) -> Option<ProcessId> {
    let (at, _) = from.iter().enumerate().max_by_key(|(_, process)| rank(process))?;
    Some(from.swap_remove(at))
}
