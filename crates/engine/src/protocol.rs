//! The protocol of `domain`, checked in all orders: whatever two or three members of a domain with one content and two
//! slots do, one step of one of them after another, no content goes away under anybody, and what nobody maps is freed.
//!
//! A step is one access to what members share: a load or an exchange of a word of the index (the transitions are the
//! index's own, [`State`]), a reference that is added or a file of references that is read, a slot that is written,
//! punched, taken or freed. That steps follow one another is what sequential consistency of these accesses means; it is
//! why loom is not used, which takes them for acquire and release only. A member may be killed, or forked, between any
//! two steps.
//!
//! Covered: referring and looking, reserving and publishing, giving back what was stored in vain, condemning and
//! freeing, references that are made anew, an index that takes the place of another, the lock's end with its process,
//! children that hold their parent's references, members that abandon the incarnation and give up references to what
//! they map. Not covered: founding a domain, files of members that others remove and the number by which that is
//! noticed, and what [`slots_mapped`](crate::survey::slots_mapped) finds: a member knows what it maps. Two incarnations
//! share nothing, and no name leads from one to the other ([`incarnation`](crate::incarnation)), so that one is enough.
//!
//! What the check is worth is shown by protocols that are wrong in one place: each must be found out.

use crate::index::State;
use std::collections::{HashSet, VecDeque};

const MEMBERS: usize = 3;
const CONTENTS: usize = 1;
const SLOTS: usize = 2;
/// Files of references that there may be at a time: one each, one that is being made, and those of a parent.
const FILES: usize = 5;

/// What is wrong with the protocol.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Defect {
    None,
    /// The entry is looked at before the slot is referred to.
    LookThenRefer,
    /// It is not looked at once more whether the index is the present one.
    TrustAnyIndex,
    /// Entries are not condemned before everybody's references are read for the last time.
    FreeWithoutCondemning,
    /// References are not read again after entries were condemned.
    LookOnce,
    /// Who frees uses the index that it knows.
    FreeByAnOldIndex,
    /// Slots are reserved without being referred to.
    ReserveWithoutReferring,
    /// A member's old references are given up before there are new ones.
    GiveUpFirst,
    /// Who finds entries condemned by one who died leaves them so.
    NoPardon,
    /// A slot is given back by who has stored, whether another was first or not.
    GiveBackThoughFirst,
    /// A member gives up references to what it maps without abandoning the incarnation.
    GiveUpWithoutAbandoning,
    /// References are given up first.
    AbandonLast,
    /// A member that frees looks whether the incarnation is abandoned before it looks for references.
    FindLast,
}

/// Where a member is in what it does. `slots`, `contents` and `before` are sets, a bit each; `next` counts through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum At {
    Rest,
    Unborn,
    Dead,
    /// `Domain::follow`, `places`.
    Look {
        content: u8,
    },
    /// `map`.
    Refer {
        content: u8,
        slot: u8,
    },
    IsPresent {
        content: u8,
        slot: u8,
    },
    Lies {
        content: u8,
        slot: u8,
    },
    Map {
        content: u8,
        slot: u8,
    },
    /// `State::reserve`, `Domain::reserve`, `State::store_piece`.
    Reserve {
        content: u8,
    },
    ReserveLocked {
        content: u8,
    },
    Take {
        content: u8,
        slot: u8,
    },
    Unlock {
        content: u8,
        slot: u8,
    },
    Write {
        content: u8,
        slot: u8,
    },
    Publish {
        content: u8,
        slot: u8,
    },
    Vain {
        content: u8,
        slot: u8,
    },
    /// `Domain::refer_only`, or joining as a child.
    Renew,
    RenewLocked,
    GiveUp {
        new: u8,
    },
    /// `Domain::make_room`.
    Grow,
    GrowLocked {
        next: u8,
    },
    Announce,
    /// `State::rejoin`, where the domain was founded anew.
    Abandon,
    Depart,
    /// `Domain::collect`. `files` are those that were found, and are open.
    Collect,
    IsWhole {
        found: Option<u8>,
    },
    Find {
        next: u8,
        files: u8,
    },
    Before {
        files: u8,
        next: u8,
        slots: u8,
    },
    Condemn {
        files: u8,
        next: u8,
        before: u8,
        contents: u8,
    },
    After {
        files: u8,
        next: u8,
        contents: u8,
        slots: u8,
    },
    Decide {
        next: u8,
        contents: u8,
        after: u8,
    },
    Stays {
        next: u8,
        slots: u8,
    },
    Punch {
        next: u8,
        stays: u8,
    },
    Free {
        next: u8,
        stays: u8,
    },
    /// The last step of whatever needed the lock.
    GiveBack,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Member {
    at: At,
    /// How much it may still begin.
    left: u8,
    /// The index that it knows.
    known: u8,
    /// Its own file of references, unless it is a child that has not joined.
    file: Option<u8>,
    /// Where it maps each content.
    maps: [Option<u8>; CONTENTS],
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct File {
    slots: u8,
    /// Members that have it mapped.
    held: u8,
    /// Members that have it open to read it.
    read: u8,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Slot {
    taken: bool,
    holds: Option<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    members: [Member; MEMBERS],
    files: [File; FILES],
    slots: [Slot; SLOTS],
    tables: [[State; CONTENTS]; 2],
    present: u8,
    lock: Option<u8>,
    abandoned: bool,
}

const fn bit(number: u8) -> u8 {
    1 << number
}

impl World {
    /// Members that may begin so much each; those that may begin nothing are yet to be forked. The content may lie in
    /// the store already, where one who died has put it.
    fn new(left: [u8; MEMBERS], stored: bool) -> Self {
        let member = |at: usize| {
            let born = left[at] > 0;
            let (first, file) = if born { (At::Rest, Some(at as u8)) } else { (At::Unborn, None) };
            Member { at: first, left: left[at], known: 0, file, maps: [None; CONTENTS] }
        };
        let mut world = Self {
            members: std::array::from_fn(member),
            files: [File::default(); FILES],
            slots: [Slot::default(); SLOTS],
            tables: [[State::default(); CONTENTS]; 2],
            present: 0,
            lock: None,
            abandoned: false,
        };
        for (at, _) in left.iter().enumerate().filter(|(_, left)| **left > 0) {
            world.files[at].held = bit(at as u8);
        }
        if stored {
            world.slots[0] = Slot { taken: true, holds: Some(0) };
            world.change(0, 0, |state| state.published(0));
        }
        world
    }

    /// Whether all that anybody maps is there.
    fn is_sound(&self) -> bool {
        let mapped = self.members.iter().flat_map(|member| member.maps.iter().enumerate());
        mapped.into_iter().all(|(content, slot)| slot.is_none_or(|slot| self.holds(slot) == Some(content as u8)))
    }

    fn holds(&self, slot: u8) -> Option<u8> {
        self.slots[usize::from(slot)].holds
    }

    /// How an entry of the index that a member knows stands.
    fn entry(&mut self, by: usize, content: u8) -> &mut State {
        &mut self.tables[usize::from(self.members[by].known)][usize::from(content)]
    }

    fn change(&mut self, by: usize, content: u8, to: impl FnOnce(State) -> Option<State>) {
        let entry = self.entry(by, content);
        *entry = to(*entry).unwrap_or(*entry);
    }

    fn new_file(&mut self, by: usize) -> u8 {
        let free = self.files.iter().position(|file| file.held | file.read == 0).expect("there are enough");
        self.files[free] = File { held: bit(by as u8), ..File::default() };
        free as u8
    }

    fn close(&mut self, by: usize) {
        for file in &mut self.files {
            file.read &= !bit(by as u8);
        }
        self.forget_files();
    }

    /// What no member has is not there.
    fn forget_files(&mut self) {
        for file in self.files.iter_mut().filter(|file| file.held | file.read == 0) {
            *file = File::default();
        }
    }

    /// What a member maps, as slots.
    fn mapped(&self, by: usize) -> u8 {
        self.members[by].maps.iter().flatten().fold(0, |slots, &slot| slots | bit(slot))
    }

    fn die(&mut self, who: usize) {
        for file in &mut self.files {
            file.held &= !bit(who as u8);
        }
        self.close(who);
        if self.lock == Some(who as u8) {
            self.lock = None;
        }
        self.members[who] = Member { at: At::Dead, left: 0, known: 0, file: None, maps: [None; CONTENTS] };
    }

    /// All that may come next.
    fn next(&self, defect: Defect) -> Vec<Self> {
        let mut worlds = Vec::new();
        for by in 0..MEMBERS {
            let member = self.members[by];
            if matches!(member.at, At::Unborn | At::Dead) {
                continue;
            }
            let mut then = |change: &dyn Fn(&mut Self)| {
                let mut world = self.clone();
                change(&mut world);
                worlds.push(world);
            };
            then(&|world| world.die(by));
            if let Some(child) = self.members.iter().position(|member| member.at == At::Unborn) {
                let (left, known, maps) = (1, member.known, member.maps);
                let forked = Member { at: At::Rest, left, known, file: None, maps };
                then(&|world| {
                    world.members[child] = forked;
                    for file in world.files.iter_mut().filter(|file| file.held & bit(by as u8) != 0) {
                        file.held |= bit(child as u8);
                    }
                });
            }
            if member.at != At::Rest {
                if let Some(world) = self.step(by, defect) {
                    worlds.push(world);
                }
                continue;
            }
            let mut begin = |at: At| {
                then(&|world| {
                    world.members[by].left -= 1;
                    world.members[by].at = at;
                });
            };
            if member.left > 0 {
                begin(At::Renew);
                if member.maps.iter().any(Option::is_some) {
                    begin(At::Abandon);
                }
                if member.file.is_some() {
                    begin(At::Collect);
                    let unmapped = (0..CONTENTS as u8).filter(|&content| member.maps[usize::from(content)].is_none());
                    unmapped.for_each(|content| begin(At::Look { content }));
                    if self.present == 0 {
                        begin(At::Grow);
                    }
                }
            }
            // A write, which takes no help of the engine.
            for content in (0..CONTENTS).filter(|&content| member.maps[content].is_some()) {
                then(&|world| world.members[by].maps[content] = None);
            }
        }
        worlds
    }

    /// The next step of one member, unless it waits.
    fn step(&self, by: usize, defect: Defect) -> Option<Self> {
        let mut world = self.clone();
        let member = self.members[by];
        let own = usize::from(member.file.unwrap_or_default());
        let lock = |world: &mut Self| {
            world.lock = Some(by as u8);
            self.lock.is_none().then_some(())
        };
        // Members, contents or slots are gone through one by one.
        let slots_of = |file: u8| self.files[usize::from(file)].slots;
        // The first of some files from one on, if there are any left.
        let next_of = |files: u8, next: u8| (next..FILES as u8).find(|&file| files & bit(file) != 0);
        let listed = (0..FILES as u8).filter(|&file| self.files[usize::from(file)].held != 0);
        let listed = listed.fold(0, |files, file| files | bit(file));
        let at = match member.at {
            At::Rest | At::Unborn | At::Dead => return None,
            At::Look { content } => {
                let state = *world.entry(by, content);
                match state.slot() {
                    _ if self.present != member.known => {
                        world.members[by].known = self.present;
                        member.at
                    }
                    Some(slot) if defect == Defect::LookThenRefer => At::IsPresent { content, slot: slot as u8 },
                    Some(slot) => At::Refer { content, slot: slot as u8 },
                    None if state.is_condemned() => At::Rest,
                    None => At::Reserve { content },
                }
            }
            At::Refer { content, slot } => {
                world.files[own].slots |= bit(slot);
                if defect == Defect::LookThenRefer {
                    At::Map { content, slot }
                } else {
                    At::IsPresent { content, slot }
                }
            }
            At::IsPresent { content, slot } => {
                let present = self.present == member.known || defect == Defect::TrustAnyIndex;
                if present { At::Lies { content, slot } } else { At::Rest }
            }
            At::Lies { content, slot } => match world.entry(by, content).slot() {
                Some(lies) if lies == u32::from(slot) => match defect {
                    Defect::LookThenRefer => At::Refer { content, slot },
                    _ => At::Map { content, slot },
                },
                _ => At::Rest,
            },
            At::Map { content, slot } => {
                // Bytes are compared before one takes the place of the other.
                if self.holds(slot) == Some(content) {
                    world.members[by].maps[usize::from(content)] = Some(slot);
                }
                At::Rest
            }
            At::Reserve { content } => {
                lock(&mut world)?;
                At::ReserveLocked { content }
            }
            At::ReserveLocked { content } => match self.slots.iter().position(|slot| !slot.taken) {
                Some(slot) => {
                    if defect != Defect::ReserveWithoutReferring {
                        world.files[own].slots |= bit(slot as u8);
                    }
                    At::Take { content, slot: slot as u8 }
                }
                None => At::GiveBack,
            },
            At::Take { content, slot } => {
                world.slots[usize::from(slot)].taken = true;
                At::Unlock { content, slot }
            }
            At::Unlock { content, slot } => {
                world.lock = None;
                At::Write { content, slot }
            }
            At::Write { content, slot } => {
                world.slots[usize::from(slot)].holds = Some(content);
                At::Publish { content, slot }
            }
            At::Publish { content, slot } => {
                world.change(by, content, |state| state.published(slot.into()));
                let first = world.entry(by, content).any_slot() == Some(slot.into());
                if first && defect != Defect::GiveBackThoughFirst {
                    At::Refer { content, slot }
                } else {
                    At::Vain { content, slot }
                }
            }
            At::Vain { content, slot } => {
                world.slots[usize::from(slot)].holds = None;
                match world.entry(by, content).slot() {
                    Some(slot) => At::Refer { content, slot: slot as u8 },
                    None => At::Rest,
                }
            }
            At::Renew => {
                lock(&mut world)?;
                At::RenewLocked
            }
            At::RenewLocked => {
                let new = world.new_file(by);
                if defect == Defect::GiveUpFirst {
                    world.give_up_all_but(by, new);
                } else {
                    world.files[usize::from(new)].slots = self.mapped(by);
                }
                At::GiveUp { new }
            }
            At::GiveUp { new } => {
                // What it maps now it has mapped before: it is one thread, and a write takes a mapping away only.
                world.files[usize::from(new)].slots = self.mapped(by) | self.files[usize::from(new)].slots;
                world.give_up_all_but(by, new);
                world.members[by].file = Some(new);
                At::GiveBack
            }
            At::Grow => {
                lock(&mut world)?;
                world.members[by].known = self.present;
                if self.present == 0 { At::GrowLocked { next: 0 } } else { At::GiveBack }
            }
            At::GrowLocked { next } if usize::from(next) < CONTENTS => {
                world.tables[1][usize::from(next)] = self.tables[0][usize::from(next)];
                At::GrowLocked { next: next + 1 }
            }
            At::GrowLocked { .. } => At::Announce,
            At::Announce => {
                world.present = 1;
                world.members[by].known = 1;
                At::GiveBack
            }
            At::Abandon => {
                match defect {
                    Defect::GiveUpWithoutAbandoning => {}
                    Defect::AbandonLast => world.depart(by),
                    _ => world.abandoned = true,
                }
                At::Depart
            }
            At::Depart => {
                world.depart(by);
                world.abandoned |= defect != Defect::GiveUpWithoutAbandoning;
                At::Rest
            }
            At::Collect => {
                lock(&mut world)?;
                if defect != Defect::FreeByAnOldIndex {
                    world.members[by].known = self.present;
                }
                if defect == Defect::FindLast { At::IsWhole { found: None } } else { At::Find { next: 0, files: 0 } }
            }
            At::Find { next, files } => match next_of(listed, next) {
                Some(file) => {
                    world.files[usize::from(file)].read |= bit(by as u8);
                    At::Find { next: file + 1, files: files | bit(file) }
                }
                None if defect == Defect::FindLast => At::Before { files, next: 0, slots: 0 },
                None => At::IsWhole { found: Some(files) },
            },
            At::IsWhole { .. } if self.abandoned => {
                world.close(by);
                At::GiveBack
            }
            At::IsWhole { found: None } => At::Find { next: 0, files: 0 },
            At::IsWhole { found: Some(files) } => At::Before { files, next: 0, slots: 0 },
            At::Before { files, next, slots } => match next_of(files, next) {
                Some(file) => At::Before { files, next: file + 1, slots: slots | slots_of(file) },
                None => At::Condemn { files, next: 0, before: slots, contents: 0 },
            },
            At::Condemn { files, next, before, mut contents } if usize::from(next) < CONTENTS => {
                let state = *world.entry(by, next);
                if let Some(slot) = state.any_slot() {
                    if before & bit(slot as u8) == 0 {
                        if defect != Defect::FreeWithoutCondemning {
                            world.change(by, next, |state| state.condemned(true));
                        }
                        contents |= bit(next);
                    } else if state.is_condemned() && defect != Defect::NoPardon {
                        world.change(by, next, |state| state.condemned(false));
                    }
                }
                At::Condemn { files, next: next + 1, before, contents }
            }
            At::Condemn { before, contents, .. } if defect == Defect::LookOnce => {
                world.close(by);
                At::Decide { next: 0, contents, after: before }
            }
            At::Condemn { files, contents, .. } => At::After { files, next: 0, contents, slots: 0 },
            At::After { files, next, contents, slots } => match next_of(files, next) {
                Some(file) => At::After { files, next: file + 1, contents, slots: slots | slots_of(file) },
                None => {
                    world.close(by);
                    At::Decide { next: 0, contents, after: slots }
                }
            },
            At::Decide { next, contents, after } if usize::from(next) < CONTENTS => {
                let state = *world.entry(by, next);
                if let Some(slot) = state.any_slot()
                    && contents & bit(next) != 0
                {
                    if after & bit(slot as u8) != 0 {
                        world.change(by, next, |state| state.condemned(false));
                    } else if defect == Defect::FreeWithoutCondemning {
                        world.change(by, next, |state| state.condemned(true).and_then(State::forgotten));
                    } else {
                        world.change(by, next, State::forgotten);
                    }
                }
                At::Decide { next: next + 1, contents, after }
            }
            At::Decide { after, .. } => At::Stays { next: 0, slots: after },
            At::Stays { next, slots } if usize::from(next) < CONTENTS => {
                let lies = world.entry(by, next).any_slot().map_or(0, |slot| bit(slot as u8));
                At::Stays { next: next + 1, slots: slots | lies }
            }
            At::Stays { slots, .. } => At::Punch { next: 0, stays: slots },
            At::Punch { next, stays } if usize::from(next) < SLOTS => {
                if self.slots[usize::from(next)].taken && stays & bit(next) == 0 {
                    world.slots[usize::from(next)].holds = None;
                    At::Free { next, stays }
                } else {
                    At::Punch { next: next + 1, stays }
                }
            }
            At::Punch { .. } => At::GiveBack,
            At::Free { next, stays } => {
                world.slots[usize::from(next)].taken = false;
                At::Punch { next: next + 1, stays }
            }
            At::GiveBack => {
                world.lock = None;
                At::Rest
            }
        };
        world.members[by].at = at;
        Some(world)
    }

    fn give_up_all_but(&mut self, by: usize, kept: u8) {
        for (_, file) in self.files.iter_mut().enumerate().filter(|(at, _)| *at != usize::from(kept)) {
            file.held &= !bit(by as u8);
        }
        self.forget_files();
    }

    /// The member keeps what it maps, and does nothing more in this incarnation.
    fn depart(&mut self, by: usize) {
        for file in &mut self.files {
            file.held &= !bit(by as u8);
        }
        self.forget_files();
        (self.members[by].file, self.members[by].left) = (None, 0);
    }

    /// Whether nothing is left once all members are gone and one that comes then has collected.
    fn is_freed_in_the_end(&self, defect: Defect) -> bool {
        // The memory of an abandoned store is free once no process maps it.
        if self.abandoned || !self.members.iter().all(|member| matches!(member.at, At::Unborn | At::Dead)) {
            return true;
        }
        let mut world = self.clone();
        let known = world.present;
        world.members[0] = Member { at: At::Collect, left: 0, known, file: Some(0), maps: [None; CONTENTS] };
        world.files[0].held = bit(0);
        while world.members[0].at != At::Rest {
            world = world.step(0, defect).expect("nobody has the lock");
        }
        let tables = world.tables[usize::from(world.present)];
        world.slots.iter().all(|slot| *slot == Slot::default())
            && tables.iter().all(|state| state.any_slot().is_none() && !state.is_condemned())
    }

    /// Whether a content that somebody maps and the index knows can be mapped by others after the next collection.
    fn is_pardoned_in_the_end(&self, defect: Defect) -> bool {
        if self.abandoned {
            return true;
        }
        let Some(by) = self.members.iter().position(|member| member.at == At::Rest && member.file.is_some()) else {
            return true;
        };
        if self.members.iter().any(|member| !matches!(member.at, At::Rest | At::Unborn | At::Dead)) {
            return true;
        }
        let mut world = self.clone();
        world.members[by].at = At::Collect;
        while world.members[by].at != At::Rest {
            world = world.step(by, defect).expect("nobody has the lock");
        }
        !world.tables[usize::from(world.present)].iter().any(|state| state.is_condemned())
    }
}

/// What is found in all orders of all that members may do: how many worlds there are, or one that is wrong.
fn explore(first: World, defect: Defect) -> Result<usize, Box<World>> {
    let mut known = HashSet::from([first.clone()]);
    let mut open = VecDeque::from([first]);
    while let Some(world) = open.pop_front() {
        let right = world.is_sound() && world.is_freed_in_the_end(defect) && world.is_pardoned_in_the_end(defect);
        if !right {
            return Err(Box::new(world));
        }
        for next in world.next(defect) {
            if known.insert(next.clone()) {
                open.push_back(next);
            }
        }
    }
    Ok(known.len())
}

/// How much members begin, and whether the content is stored, where little time is, and more of it.
const SHORT: &[([u8; MEMBERS], bool)] = &[([2, 1, 0], true), ([2, 1, 0], false), ([1, 1, 1], true)];
const LONG: &[([u8; MEMBERS], bool)] = &[([2, 2, 0], false), ([3, 1, 0], false), ([2, 2, 0], true), ([2, 1, 1], true)];

#[test]
fn no_order_of_steps_takes_a_content_away() {
    let long = if std::env::var_os("PAGEFOLD_SOAK").is_some() { LONG } else { &[] };
    for &(left, stored) in SHORT.iter().chain(long) {
        match explore(World::new(left, stored), Defect::None) {
            Ok(worlds) => println!("{left:?}, {stored}: {worlds} worlds"),
            Err(world) => panic!("{left:?}, {stored}: {world:#?}"),
        }
    }
}

#[test]
fn every_defect_is_found() {
    use Defect::*;
    for defect in [
        LookThenRefer,
        TrustAnyIndex,
        FreeWithoutCondemning,
        LookOnce,
        FreeByAnOldIndex,
        ReserveWithoutReferring,
        GiveUpFirst,
        NoPardon,
        GiveBackThoughFirst,
        GiveUpWithoutAbandoning,
        AbandonLast,
        FindLast,
    ] {
        let wrong = SHORT.iter().find_map(|&(left, stored)| explore(World::new(left, stored), defect).err());
        let wrong = wrong.unwrap_or_else(|| panic!("{defect:?} is not found"));
        let takes_away = !matches!(defect, FreeByAnOldIndex | ReserveWithoutReferring | NoPardon);
        assert!(!takes_away || !wrong.is_sound(), "{defect:?} is found by something else: {wrong:#?}");
    }
}
