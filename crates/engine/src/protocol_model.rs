//! The protocol of `domain`, checked in all orders of steps. Two or three members share one content and two slots, and
//! each takes its steps in any interleaving. The check: no mapped content is freed, and every slot that no member maps
//! is freed in the end.
//!
//! A step is one access to shared state. It loads or exchanges a word of the index (the transitions are the index's
//! own, [`IndexEntryState`]), adds a reference, reads a file of references, or writes, punches, takes or frees a slot.
//! These accesses are sequentially consistent, which means that the steps happen one after another. Loom is not used
//! because it treats them as acquire and release only. A member may be killed, or forked, between any two steps.
//!
//! Covered:
//! - referring and checking, reserving and publishing, returning slots stored for nothing, condemning and freeing;
//! - replacing references, replacing an index, the lock that ends with its process;
//! - children that keep their parent's references;
//! - members that abandon the incarnation and release references to slots that they map.
//!
//! Not covered:
//! - creating a domain, and members' files removed by other programs, with the count that detects that;
//! - the result of [`mapped_slots`](crate::survey::mapped_slots): a modeled member knows what it maps;
//! - a second incarnation: two incarnations share nothing, and no name leads from one to the other
//!   ([`incarnation`](crate::incarnation)).
//!
//! Protocols with one defect each validate the check: it must detect every one of them.

use crate::content_index::IndexEntryState;
use std::collections::{HashSet, VecDeque};

const MEMBER_COUNT: usize = 3;
const CONTENT_COUNT: usize = 1;
const SLOT_COUNT: usize = 2;
/// Maximum number of files of references at a time: one per member, one being made, and a parent's.
const MAX_REFERENCE_FILES: usize = 5;

/// Declares the defects, and a list of all of them, so that none is left unchecked.
macro_rules! declare_defects {
    ($($(#[$doc:meta])* $defect:ident,)*) => {
        /// Defect of the modeled protocol.
        #[derive(Clone, Copy, Debug, PartialEq)]
        enum ProtocolDefect {
            None,
            $($(#[$doc])* $defect,)*
        }

        impl ProtocolDefect {
            const EVERY_DEFECT: &[Self] = &[$(Self::$defect),*];
        }
    };
}

declare_defects! {
    /// The entry is read before the slot is referenced.
    ReadEntryBeforeReferring,
    /// The index is not checked again to be the present one.
    SkipPresentIndexCheck,
    /// Entries are not condemned before all references are read for the last time.
    FreeWithoutCondemning,
    /// References are not read again after entries were condemned.
    ReadReferencesOnce,
    /// A member that frees slots uses the index that it knows, not the present one.
    FreeByOldIndex,
    /// Slots are reserved without a reference.
    ReserveWithoutReferring,
    /// A member's old references are dropped before new ones exist.
    DropReferencesFirst,
    /// A member leaves entries condemned that a dead member had condemned.
    LeaveCondemned,
    /// A member returns the slot that it stored, even if it published it first.
    ReturnPublishedSlot,
    /// A member drops references to slots that it maps without abandoning the incarnation.
    DropReferencesWithoutAbandoning,
    /// References are dropped before the incarnation is abandoned.
    AbandonAfterDropping,
    /// A member that frees slots checks whether the incarnation is abandoned before it looks for references.
    CheckAbandonedTooEarly,
}

/// Next step of a member. `slots`, `contents`, `before` and `after` are sets with one bit per element; `next` counts
/// through a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum MemberStep {
    Idle,
    Unborn,
    Dead,
    /// `JoinedDomain::follow_index`, `find_partners`.
    FindEntry {
        content: u8,
    },
    /// `map_run`.
    Refer {
        content: u8,
        slot: u8,
    },
    CheckIndexPresent {
        content: u8,
        slot: u8,
    },
    CheckEntry {
        content: u8,
        slot: u8,
    },
    Map {
        content: u8,
        slot: u8,
    },
    /// `EngineState::reserve_slots`, `JoinedDomain::reserve_slots`, `EngineState::store_chunk`.
    Reserve {
        content: u8,
    },
    ReserveLocked {
        content: u8,
    },
    TakeSlot {
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
    PublishLost {
        content: u8,
        slot: u8,
    },
    /// `JoinedDomain::replace_references`, or joining as a child.
    RenewReferences,
    RenewReferencesLocked,
    DropOldReferences {
        new: u8,
    },
    /// `JoinedDomain::grow_index`.
    GrowIndex,
    GrowIndexLocked {
        next: u8,
    },
    AnnounceIndex,
    /// `EngineState::rejoin_domain`, if the domain was created again.
    Abandon,
    LeaveIncarnation,
    /// `JoinedDomain::collect_unreferenced_slots`. `files` are the files that were found and are open.
    Collect,
    CheckIntact {
        found: Option<u8>,
    },
    FindReferenceFiles {
        next: u8,
        files: u8,
    },
    ReadReferencesBefore {
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
    ReadReferencesAfter {
        files: u8,
        next: u8,
        contents: u8,
        slots: u8,
    },
    UncondemnOrClear {
        next: u8,
        contents: u8,
        after: u8,
    },
    KeepReferenced {
        next: u8,
        slots: u8,
    },
    PunchSlots {
        next: u8,
        kept_slots: u8,
    },
    FreeSlots {
        next: u8,
        kept_slots: u8,
    },
    /// The last step of each operation that needs the lock.
    Unlocked,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct ModelMember {
    step: MemberStep,
    /// Number of operations that it may still begin.
    steps_left: u8,
    /// The index that it knows.
    known_index: u8,
    /// Its own file of references, unless it is a child that has not joined.
    reference_file: Option<u8>,
    /// Slot that it maps for each content.
    mapped_slots: [Option<u8>; CONTENT_COUNT],
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct ModelReferenceFile {
    slots: u8,
    /// Members that have it mapped.
    mappers: u8,
    /// Members that have it open to read it.
    readers: u8,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct ModelSlot {
    taken: bool,
    content: Option<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ModelState {
    members: [ModelMember; MEMBER_COUNT],
    files: [ModelReferenceFile; MAX_REFERENCE_FILES],
    slots: [ModelSlot; SLOT_COUNT],
    index_tables: [[IndexEntryState; CONTENT_COUNT]; 2],
    present_index: u8,
    lock_holder: Option<u8>,
    abandoned: bool,
}

const fn slot_bit(number: u8) -> u8 {
    1 << number
}

impl ModelState {
    /// State of members that may begin `steps_left` operations each; a member with none is yet to be forked. The
    /// content may be in the store already, stored by a dead member.
    fn new(steps_left: [u8; MEMBER_COUNT], stored: bool) -> Self {
        let member = |index: usize| {
            let is_born = steps_left[index] > 0;
            let (first_step, reference_file) =
                if is_born { (MemberStep::Idle, Some(index as u8)) } else { (MemberStep::Unborn, None) };
            ModelMember {
                step: first_step,
                steps_left: steps_left[index],
                known_index: 0,
                reference_file,
                mapped_slots: [None; CONTENT_COUNT],
            }
        };
        let mut world = Self {
            members: std::array::from_fn(member),
            files: [ModelReferenceFile::default(); MAX_REFERENCE_FILES],
            slots: [ModelSlot::default(); SLOT_COUNT],
            index_tables: [[IndexEntryState::default(); CONTENT_COUNT]; 2],
            present_index: 0,
            lock_holder: None,
            abandoned: false,
        };
        for (index, _) in steps_left.iter().enumerate().filter(|(_, steps)| **steps > 0) {
            world.files[index].mappers = slot_bit(index as u8);
        }
        if stored {
            world.slots[0] = ModelSlot { taken: true, content: Some(0) };
            world.update_entry(0, 0, |state| state.to_published(0));
        }
        world
    }

    /// Whether all mapped contents are present.
    fn are_mapped_contents_present(&self) -> bool {
        let mapped = self.members.iter().flat_map(|member| member.mapped_slots.iter().enumerate());
        mapped
            .into_iter()
            .all(|(content, slot)| slot.is_none_or(|slot| self.content_of_slot(slot) == Some(content as u8)))
    }

    fn content_of_slot(&self, slot: u8) -> Option<u8> {
        self.slots[usize::from(slot)].content
    }

    /// Entry of a content in the index that a member knows.
    fn known_entry(&mut self, actor: usize, content: u8) -> &mut IndexEntryState {
        &mut self.index_tables[usize::from(self.members[actor].known_index)][usize::from(content)]
    }

    fn update_entry(
        &mut self,
        actor: usize,
        content: u8,
        update: impl FnOnce(IndexEntryState) -> Option<IndexEntryState>,
    ) {
        let entry = self.known_entry(actor, content);
        *entry = update(*entry).unwrap_or(*entry);
    }

    fn create_reference_file(&mut self, actor: usize) -> u8 {
        let index = self.files.iter().position(|file| file.mappers | file.readers == 0).expect("there are enough");
        self.files[index] = ModelReferenceFile { mappers: slot_bit(actor as u8), ..ModelReferenceFile::default() };
        index as u8
    }

    fn close_reference_file(&mut self, actor: usize) {
        for file in &mut self.files {
            file.readers &= !slot_bit(actor as u8);
        }
        self.clear_unused_files();
    }

    /// Files without members do not exist.
    fn clear_unused_files(&mut self) {
        for file in self.files.iter_mut().filter(|file| file.mappers | file.readers == 0) {
            *file = ModelReferenceFile::default();
        }
    }

    /// The set of slots that a member maps.
    fn mapped_slots(&self, actor: usize) -> u8 {
        self.members[actor].mapped_slots.iter().flatten().fold(0, |slots, &slot| slots | slot_bit(slot))
    }

    fn kill_member(&mut self, member: usize) {
        for file in &mut self.files {
            file.mappers &= !slot_bit(member as u8);
        }
        self.close_reference_file(member);
        if self.lock_holder == Some(member as u8) {
            self.lock_holder = None;
        }
        self.members[member] = ModelMember {
            step: MemberStep::Dead,
            steps_left: 0,
            known_index: 0,
            reference_file: None,
            mapped_slots: [None; CONTENT_COUNT],
        };
    }

    /// All possible next states.
    fn successors(&self, defect: ProtocolDefect) -> Vec<Self> {
        let mut worlds = Vec::new();
        for actor in 0..MEMBER_COUNT {
            let member = self.members[actor];
            if matches!(member.step, MemberStep::Unborn | MemberStep::Dead) {
                continue;
            }
            let mut add_successor = |change: &dyn Fn(&mut Self)| {
                let mut world = self.clone();
                change(&mut world);
                worlds.push(world);
            };
            add_successor(&|world| world.kill_member(actor));
            if let Some(child) = self.members.iter().position(|member| member.step == MemberStep::Unborn) {
                let (steps_left, known_index, mapped_slots) = (1, member.known_index, member.mapped_slots);
                let forked =
                    ModelMember { step: MemberStep::Idle, steps_left, known_index, reference_file: None, mapped_slots };
                add_successor(&|world| {
                    world.members[child] = forked;
                    for file in world.files.iter_mut().filter(|file| file.mappers & slot_bit(actor as u8) != 0) {
                        file.mappers |= slot_bit(child as u8);
                    }
                });
            }
            if member.step != MemberStep::Idle {
                if let Some(world) = self.step_member(actor, defect) {
                    worlds.push(world);
                }
                continue;
            }
            let mut begin_step = |step: MemberStep| {
                add_successor(&|world| {
                    world.members[actor].steps_left -= 1;
                    world.members[actor].step = step;
                });
            };
            if member.steps_left > 0 {
                begin_step(MemberStep::RenewReferences);
                if member.mapped_slots.iter().any(Option::is_some) {
                    begin_step(MemberStep::Abandon);
                }
                if member.reference_file.is_some() {
                    begin_step(MemberStep::Collect);
                    let unmapped =
                        (0..CONTENT_COUNT as u8).filter(|&content| member.mapped_slots[usize::from(content)].is_none());
                    unmapped.for_each(|content| begin_step(MemberStep::FindEntry { content }));
                    if self.present_index == 0 {
                        begin_step(MemberStep::GrowIndex);
                    }
                }
            }
            // A write, which does not involve the engine.
            for content in (0..CONTENT_COUNT).filter(|&content| member.mapped_slots[content].is_some()) {
                add_successor(&|world| world.members[actor].mapped_slots[content] = None);
            }
        }
        worlds
    }

    /// The next step of one member, unless it waits. One function because it is the table of transitions.
    fn step_member(&self, actor: usize, defect: ProtocolDefect) -> Option<Self> {
        let mut world = self.clone();
        let member = self.members[actor];
        let own_file = usize::from(member.reference_file.unwrap_or_default());
        let lock = |world: &mut Self| {
            world.lock_holder = Some(actor as u8);
            self.lock_holder.is_none().then_some(())
        };
        // Members, contents and slots are visited one by one.
        let slots_of = |file: u8| self.files[usize::from(file)].slots;
        // The first of the files from `next` on.
        let next_file =
            |files: u8, next: u8| (next..MAX_REFERENCE_FILES as u8).find(|&file| files & slot_bit(file) != 0);
        let listed_files = (0..MAX_REFERENCE_FILES as u8).filter(|&file| self.files[usize::from(file)].mappers != 0);
        let listed_files = listed_files.fold(0, |files, file| files | slot_bit(file));
        let next_step = match member.step {
            MemberStep::Idle | MemberStep::Unborn | MemberStep::Dead => return None,
            MemberStep::FindEntry { content } => {
                let state = *world.known_entry(actor, content);
                match state.mappable_slot() {
                    _ if self.present_index != member.known_index => {
                        world.members[actor].known_index = self.present_index;
                        member.step
                    }
                    Some(slot) if defect == ProtocolDefect::ReadEntryBeforeReferring => {
                        MemberStep::CheckIndexPresent { content, slot: slot as u8 }
                    }
                    Some(slot) => MemberStep::Refer { content, slot: slot as u8 },
                    None if state.is_condemned() => MemberStep::Idle,
                    None => MemberStep::Reserve { content },
                }
            }
            MemberStep::Refer { content, slot } => {
                world.files[own_file].slots |= slot_bit(slot);
                if defect == ProtocolDefect::ReadEntryBeforeReferring {
                    MemberStep::Map { content, slot }
                } else {
                    MemberStep::CheckIndexPresent { content, slot }
                }
            }
            MemberStep::CheckIndexPresent { content, slot } => {
                let is_present =
                    self.present_index == member.known_index || defect == ProtocolDefect::SkipPresentIndexCheck;
                if is_present { MemberStep::CheckEntry { content, slot } } else { MemberStep::Idle }
            }
            MemberStep::CheckEntry { content, slot } => match world.known_entry(actor, content).mappable_slot() {
                Some(entry_slot) if entry_slot == u32::from(slot) => match defect {
                    ProtocolDefect::ReadEntryBeforeReferring => MemberStep::Refer { content, slot },
                    _ => MemberStep::Map { content, slot },
                },
                _ => MemberStep::Idle,
            },
            MemberStep::Map { content, slot } => {
                // Bytes are compared before the mapping is replaced.
                if self.content_of_slot(slot) == Some(content) {
                    world.members[actor].mapped_slots[usize::from(content)] = Some(slot);
                }
                MemberStep::Idle
            }
            MemberStep::Reserve { content } => {
                lock(&mut world)?;
                MemberStep::ReserveLocked { content }
            }
            MemberStep::ReserveLocked { content } => match self.slots.iter().position(|slot| !slot.taken) {
                Some(slot) => {
                    if defect != ProtocolDefect::ReserveWithoutReferring {
                        world.files[own_file].slots |= slot_bit(slot as u8);
                    }
                    MemberStep::TakeSlot { content, slot: slot as u8 }
                }
                None => MemberStep::Unlocked,
            },
            MemberStep::TakeSlot { content, slot } => {
                world.slots[usize::from(slot)].taken = true;
                MemberStep::Unlock { content, slot }
            }
            MemberStep::Unlock { content, slot } => {
                world.lock_holder = None;
                MemberStep::Write { content, slot }
            }
            MemberStep::Write { content, slot } => {
                world.slots[usize::from(slot)].content = Some(content);
                MemberStep::Publish { content, slot }
            }
            MemberStep::Publish { content, slot } => {
                world.update_entry(actor, content, |state| state.to_published(slot.into()));
                let is_published = world.known_entry(actor, content).any_slot() == Some(slot.into());
                if is_published && defect != ProtocolDefect::ReturnPublishedSlot {
                    MemberStep::Refer { content, slot }
                } else {
                    MemberStep::PublishLost { content, slot }
                }
            }
            MemberStep::PublishLost { content, slot } => {
                world.slots[usize::from(slot)].content = None;
                match world.known_entry(actor, content).mappable_slot() {
                    Some(slot) => MemberStep::Refer { content, slot: slot as u8 },
                    None => MemberStep::Idle,
                }
            }
            MemberStep::RenewReferences => {
                lock(&mut world)?;
                MemberStep::RenewReferencesLocked
            }
            MemberStep::RenewReferencesLocked => {
                let new = world.create_reference_file(actor);
                if defect == ProtocolDefect::DropReferencesFirst {
                    world.drop_references_except(actor, new);
                } else {
                    world.files[usize::from(new)].slots = self.mapped_slots(actor);
                }
                MemberStep::DropOldReferences { new }
            }
            MemberStep::DropOldReferences { new } => {
                // It mapped all of these slots before: it has one thread, and a write only removes a mapping.
                world.files[usize::from(new)].slots = self.mapped_slots(actor) | self.files[usize::from(new)].slots;
                world.drop_references_except(actor, new);
                world.members[actor].reference_file = Some(new);
                MemberStep::Unlocked
            }
            MemberStep::GrowIndex => {
                lock(&mut world)?;
                world.members[actor].known_index = self.present_index;
                if self.present_index == 0 { MemberStep::GrowIndexLocked { next: 0 } } else { MemberStep::Unlocked }
            }
            MemberStep::GrowIndexLocked { next } if usize::from(next) < CONTENT_COUNT => {
                world.index_tables[1][usize::from(next)] = self.index_tables[0][usize::from(next)];
                MemberStep::GrowIndexLocked { next: next + 1 }
            }
            MemberStep::GrowIndexLocked { .. } => MemberStep::AnnounceIndex,
            MemberStep::AnnounceIndex => {
                world.present_index = 1;
                world.members[actor].known_index = 1;
                MemberStep::Unlocked
            }
            MemberStep::Abandon => {
                match defect {
                    ProtocolDefect::DropReferencesWithoutAbandoning => {}
                    ProtocolDefect::AbandonAfterDropping => world.leave_incarnation(actor),
                    _ => world.abandoned = true,
                }
                MemberStep::LeaveIncarnation
            }
            MemberStep::LeaveIncarnation => {
                world.leave_incarnation(actor);
                world.abandoned |= defect != ProtocolDefect::DropReferencesWithoutAbandoning;
                MemberStep::Idle
            }
            MemberStep::Collect => {
                lock(&mut world)?;
                if defect != ProtocolDefect::FreeByOldIndex {
                    world.members[actor].known_index = self.present_index;
                }
                if defect == ProtocolDefect::CheckAbandonedTooEarly {
                    MemberStep::CheckIntact { found: None }
                } else {
                    MemberStep::FindReferenceFiles { next: 0, files: 0 }
                }
            }
            MemberStep::FindReferenceFiles { next, files } => match next_file(listed_files, next) {
                Some(file) => {
                    world.files[usize::from(file)].readers |= slot_bit(actor as u8);
                    MemberStep::FindReferenceFiles { next: file + 1, files: files | slot_bit(file) }
                }
                None if defect == ProtocolDefect::CheckAbandonedTooEarly => {
                    MemberStep::ReadReferencesBefore { files, next: 0, slots: 0 }
                }
                None => MemberStep::CheckIntact { found: Some(files) },
            },
            MemberStep::CheckIntact { .. } if self.abandoned => {
                world.close_reference_file(actor);
                MemberStep::Unlocked
            }
            MemberStep::CheckIntact { found: None } => MemberStep::FindReferenceFiles { next: 0, files: 0 },
            MemberStep::CheckIntact { found: Some(files) } => {
                MemberStep::ReadReferencesBefore { files, next: 0, slots: 0 }
            }
            MemberStep::ReadReferencesBefore { files, next, slots } => match next_file(files, next) {
                Some(file) => MemberStep::ReadReferencesBefore { files, next: file + 1, slots: slots | slots_of(file) },
                None => MemberStep::Condemn { files, next: 0, before: slots, contents: 0 },
            },
            MemberStep::Condemn { files, next, before, mut contents } if usize::from(next) < CONTENT_COUNT => {
                let state = *world.known_entry(actor, next);
                if let Some(slot) = state.any_slot() {
                    if before & slot_bit(slot as u8) == 0 {
                        if defect != ProtocolDefect::FreeWithoutCondemning {
                            world.update_entry(actor, next, |state| state.to_condemned(true));
                        }
                        contents |= slot_bit(next);
                    } else if state.is_condemned() && defect != ProtocolDefect::LeaveCondemned {
                        world.update_entry(actor, next, |state| state.to_condemned(false));
                    }
                }
                MemberStep::Condemn { files, next: next + 1, before, contents }
            }
            MemberStep::Condemn { before, contents, .. } if defect == ProtocolDefect::ReadReferencesOnce => {
                world.close_reference_file(actor);
                MemberStep::UncondemnOrClear { next: 0, contents, after: before }
            }
            MemberStep::Condemn { files, contents, .. } => {
                MemberStep::ReadReferencesAfter { files, next: 0, contents, slots: 0 }
            }
            MemberStep::ReadReferencesAfter { files, next, contents, slots } => match next_file(files, next) {
                Some(file) => {
                    MemberStep::ReadReferencesAfter { files, next: file + 1, contents, slots: slots | slots_of(file) }
                }
                None => {
                    world.close_reference_file(actor);
                    MemberStep::UncondemnOrClear { next: 0, contents, after: slots }
                }
            },
            MemberStep::UncondemnOrClear { next, contents, after } if usize::from(next) < CONTENT_COUNT => {
                let state = *world.known_entry(actor, next);
                if let Some(slot) = state.any_slot()
                    && contents & slot_bit(next) != 0
                {
                    if after & slot_bit(slot as u8) != 0 {
                        world.update_entry(actor, next, |state| state.to_condemned(false));
                    } else if defect == ProtocolDefect::FreeWithoutCondemning {
                        world.update_entry(actor, next, |state| {
                            state.to_condemned(true).and_then(IndexEntryState::to_unstored)
                        });
                    } else {
                        world.update_entry(actor, next, IndexEntryState::to_unstored);
                    }
                }
                MemberStep::UncondemnOrClear { next: next + 1, contents, after }
            }
            MemberStep::UncondemnOrClear { after, .. } => MemberStep::KeepReferenced { next: 0, slots: after },
            MemberStep::KeepReferenced { next, slots } if usize::from(next) < CONTENT_COUNT => {
                let entry_slot = world.known_entry(actor, next).any_slot().map_or(0, |slot| slot_bit(slot as u8));
                MemberStep::KeepReferenced { next: next + 1, slots: slots | entry_slot }
            }
            MemberStep::KeepReferenced { slots, .. } => MemberStep::PunchSlots { next: 0, kept_slots: slots },
            MemberStep::PunchSlots { next, kept_slots } if usize::from(next) < SLOT_COUNT => {
                if self.slots[usize::from(next)].taken && kept_slots & slot_bit(next) == 0 {
                    world.slots[usize::from(next)].content = None;
                    MemberStep::FreeSlots { next, kept_slots }
                } else {
                    MemberStep::PunchSlots { next: next + 1, kept_slots }
                }
            }
            MemberStep::PunchSlots { .. } => MemberStep::Unlocked,
            MemberStep::FreeSlots { next, kept_slots } => {
                world.slots[usize::from(next)].taken = false;
                MemberStep::PunchSlots { next: next + 1, kept_slots }
            }
            MemberStep::Unlocked => {
                world.lock_holder = None;
                MemberStep::Idle
            }
        };
        world.members[actor].step = next_step;
        Some(world)
    }

    fn drop_references_except(&mut self, actor: usize, kept_file: u8) {
        for (_, file) in self.files.iter_mut().enumerate().filter(|(index, _)| *index != usize::from(kept_file)) {
            file.mappers &= !slot_bit(actor as u8);
        }
        self.clear_unused_files();
    }

    /// The member keeps its mappings, and does nothing more in this incarnation.
    fn leave_incarnation(&mut self, actor: usize) {
        for file in &mut self.files {
            file.mappers &= !slot_bit(actor as u8);
        }
        self.clear_unused_files();
        (self.members[actor].reference_file, self.members[actor].steps_left) = (None, 0);
    }

    /// Whether a new member's collection frees everything once all members are gone.
    fn is_eventually_freed(&self, defect: ProtocolDefect) -> bool {
        // The memory of an abandoned store is freed once no process maps it.
        if self.abandoned
            || !self.members.iter().all(|member| matches!(member.step, MemberStep::Unborn | MemberStep::Dead))
        {
            return true;
        }
        let mut world = self.clone();
        let known_index = world.present_index;
        world.members[0] = ModelMember {
            step: MemberStep::Collect,
            steps_left: 0,
            known_index,
            reference_file: Some(0),
            mapped_slots: [None; CONTENT_COUNT],
        };
        world.files[0].mappers = slot_bit(0);
        while world.members[0].step != MemberStep::Idle {
            world = world.step_member(0, defect).expect("the lock is free");
        }
        let tables = world.index_tables[usize::from(world.present_index)];
        world.slots.iter().all(|slot| *slot == ModelSlot::default())
            && tables.iter().all(|state| state.any_slot().is_none() && !state.is_condemned())
    }

    /// Whether other members can map an indexed content again after the next collection, if some member maps it.
    fn is_eventually_pardoned(&self, defect: ProtocolDefect) -> bool {
        if self.abandoned {
            return true;
        }
        let Some(actor) =
            self.members.iter().position(|member| member.step == MemberStep::Idle && member.reference_file.is_some())
        else {
            return true;
        };
        if self
            .members
            .iter()
            .any(|member| !matches!(member.step, MemberStep::Idle | MemberStep::Unborn | MemberStep::Dead))
        {
            return true;
        }
        let mut world = self.clone();
        world.members[actor].step = MemberStep::Collect;
        while world.members[actor].step != MemberStep::Idle {
            world = world.step_member(actor, defect).expect("the lock is free");
        }
        !world.index_tables[usize::from(world.present_index)].iter().any(|state| state.is_condemned())
    }
}

/// Explore all orders of all steps. Returns the number of states, or a wrong state.
fn explore_all_orders(first: ModelState, defect: ProtocolDefect) -> Result<usize, Box<ModelState>> {
    let mut visited = HashSet::from([first.clone()]);
    let mut pending = VecDeque::from([first]);
    while let Some(world) = pending.pop_front() {
        let is_correct = world.are_mapped_contents_present()
            && world.is_eventually_freed(defect)
            && world.is_eventually_pardoned(defect);
        if !is_correct {
            return Err(Box::new(world));
        }
        for next in world.successors(defect) {
            if visited.insert(next.clone()) {
                pending.push_back(next);
            }
        }
    }
    Ok(visited.len())
}

/// Operations per member, and whether the content is stored; for quick and for thorough runs.
const QUICK_SCENARIOS: &[([u8; MEMBER_COUNT], bool)] = &[([2, 1, 0], true), ([2, 1, 0], false), ([1, 1, 1], true)];
const THOROUGH_SCENARIOS: &[([u8; MEMBER_COUNT], bool)] =
    &[([2, 2, 0], false), ([3, 1, 0], false), ([2, 2, 0], true), ([2, 1, 1], true)];

#[test]
fn no_step_order_loses_a_mapped_content() {
    let thorough = if std::env::var_os("PAGEFOLD_SOAK").is_some() { THOROUGH_SCENARIOS } else { &[] };
    for &(steps_left, stored) in QUICK_SCENARIOS.iter().chain(thorough) {
        match explore_all_orders(ModelState::new(steps_left, stored), ProtocolDefect::None) {
            Ok(state_count) => println!("{steps_left:?}, {stored}: {state_count} states"),
            Err(world) => panic!("{steps_left:?}, {stored}: {world:#?}"),
        }
    }
}

#[test]
fn model_detects_every_defect() {
    use ProtocolDefect::{FreeByOldIndex, LeaveCondemned, ReserveWithoutReferring};
    for &defect in ProtocolDefect::EVERY_DEFECT {
        let wrong_state = QUICK_SCENARIOS
            .iter()
            .find_map(|&(steps_left, stored)| explore_all_orders(ModelState::new(steps_left, stored), defect).err());
        let wrong_state = wrong_state.unwrap_or_else(|| panic!("{defect:?} is not detected"));
        let loses_content = !matches!(defect, FreeByOldIndex | ReserveWithoutReferring | LeaveCondemned);
        assert!(
            !loses_content || !wrong_state.are_mapped_contents_present(),
            "{defect:?} is detected by another check: {wrong_state:#?}"
        );
    }
}
