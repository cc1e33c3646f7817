//! Which memory of the program is ours to merge: large allocations, each a mapping of its own, and large mappings that
//! the program has made itself.

use crate::lock::Locked;
use pagefold_base::{AddressRange, Bytes};
use std::collections::BTreeMap;

/// All of them. Taken after the lock of the engine, never before.
pub static BLOCKS: Locked<Blocks> = Locked::new(Blocks { blocks: BTreeMap::new(), spare: Vec::new() });

/// How a block stands with the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The engine has not heard of it: all of it is as the kernel gave it.
    New,
    /// The engine has it, and may have merged parts.
    Adopted,
    /// The engine leaves it alone, and may have merged parts before.
    Left,
}

/// Memory of whole pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Where.
    pub range: AddressRange,
    /// How it stands.
    pub state: State,
    /// Whether it is of malloc(3) and its like, and ends with free(3).
    pub heap: bool,
}

/// Freed memory that is kept for the next who asks, as the C library's heap keeps some: bytes of all together, and of
/// one (`M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` of mallopt(3) grow to these).
const SPARE: u64 = 64 << 20;
const LARGEST_SPARE: u64 = 32 << 20;

/// Blocks by their addresses.
#[derive(Debug)]
pub struct Blocks {
    blocks: BTreeMap<u64, Block>,
    spare: Vec<AddressRange>,
}

impl Blocks {
    /// There is a new one.
    pub fn insert(&mut self, block: Block) {
        self.blocks.insert(block.range.start, block);
    }

    /// The one of malloc(3) that begins at an address.
    pub fn heap(&self, address: u64) -> Option<Block> {
        self.blocks.get(&address).copied().filter(|block| block.heap)
    }

    /// The one of malloc(3) that begins at an address is no more, if the engine does not know it; whether that was so.
    pub fn end_new(&mut self, address: u64) -> bool {
        let new = self.heap(address).is_some_and(|block| block.state == State::New);
        new && self.blocks.remove(&address).is_some()
    }

    /// Those that have part in a range, ascending.
    pub fn touching(&self, range: AddressRange) -> Vec<Block> {
        let below = self.blocks.range(..range.end).rev();
        let mut found: Vec<Block> = below.map(|(_, block)| *block).take_while(|b| b.range.end > range.start).collect();
        found.reverse();
        found
    }

    /// From an address in a block to the end of what a buffer that begins there can lie in: of malloc(3) that one, of
    /// mmap(2) with those that adjoin it, which the program may take for one.
    pub fn from(&self, address: u64) -> AddressRange {
        let start = address;
        let mut end = start.saturating_add(1);
        for block in self.touching(AddressRange { start, end }) {
            end = block.range.end;
            while let Some(next) = self.blocks.get(&end).filter(|next| !block.heap && !next.heap) {
                end = next.range.end;
            }
        }
        AddressRange { start, end }
    }

    /// Whether any has part in a range, and whether the engine knows one of those.
    pub fn touches(&self, range: AddressRange) -> Option<bool> {
        let below = self.blocks.range(..range.end).rev();
        let touching = below.map(|(_, block)| block).take_while(|block| block.range.end > range.start);
        touching.map(|block| block.state != State::New).reduce(|known, next| known || next)
    }

    /// Take a range out: what is left of blocks that have part in it stays. The parts that were taken out.
    pub fn cut(&mut self, range: AddressRange) -> Vec<Block> {
        let mut taken = Vec::new();
        for block in self.touching(range) {
            self.blocks.remove(&block.range.start);
            let part_of = |part: AddressRange| Block {
                range: part,
                heap: block.heap && part.start == block.range.start,
                ..block
            };
            for left in block.range.outside(&[range]) {
                self.insert(part_of(left));
            }
            taken.extend(block.range.overlap(range).map(part_of));
        }
        taken
    }

    /// Let a block stand otherwise with the engine.
    pub fn set(&mut self, block: Block, state: State) {
        self.insert(Block { state, ..block });
    }

    /// Whether any stands in a way with the engine.
    pub fn has(&self, state: State) -> bool {
        self.blocks.values().any(|block| block.state == state)
    }

    /// Those that stand in a way with the engine.
    pub fn all(&self, state: State) -> Vec<Block> {
        self.blocks.values().copied().filter(|block| block.state == state).collect()
    }

    /// How large those are together.
    pub fn bytes(&self, state: State) -> Bytes {
        self.blocks.values().filter(|block| block.state == state).map(|block| block.range.bytes()).sum()
    }

    /// Keep freed memory for the next who asks; whether there is room for it.
    pub fn keep(&mut self, range: AddressRange) -> bool {
        let kept: u64 = self.spare.iter().map(|spare| spare.bytes().0).sum();
        let fits = range.bytes().0 <= LARGEST_SPARE && kept + range.bytes().0 <= SPARE;
        if fits {
            self.spare.push(range);
        }
        fits
    }

    /// Freed memory of so many bytes, or a quarter more.
    pub fn reuse(&mut self, bytes: u64) -> Option<AddressRange> {
        let fits = |range: &&AddressRange| (bytes..=bytes + bytes / 4).contains(&range.bytes().0);
        let best = *self.spare.iter().filter(fits).min_by_key(|range| range.bytes().0)?;
        self.spare.retain(|range| *range != best);
        Some(best)
    }
}

/// Take a range out of the blocks, if the engine merges nothing there from now on, as `refuse` says; the parts that were
/// taken out. Both with the lock, without which no merge adopts a block, and which is held over a fork: a child finds
/// both done, or neither. If `refuse` fails, the blocks are as before, and the answer is `None`.
pub fn cut_and_refuse(
    blocks: &Locked<Blocks>,
    range: AddressRange,
    refuse: impl FnOnce() -> bool,
) -> Option<Vec<Block>> {
    let mut blocks = blocks.lock()?;
    refuse().then(|| blocks.cut(range))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(start: u64, end: u64, state: State) -> Block {
        Block { range: AddressRange { start, end }, state, heap: false }
    }

    fn two_blocks() -> Locked<Blocks> {
        let blocks = Locked::new(Blocks { blocks: BTreeMap::new(), spare: Vec::new() });
        let mut held = blocks.lock().expect("this thread does not have it");
        held.insert(block(0x1000, 0x3000, State::Adopted));
        held.insert(block(0x3000, 0x5000, State::New));
        drop(held);
        blocks
    }

    fn in_state(blocks: &Locked<Blocks>, state: State) -> Vec<Block> {
        blocks.lock().expect("this thread does not have it").all(state)
    }

    #[test]
    fn no_merge_and_no_fork_comes_between_the_blocks_and_the_engine() {
        let blocks = two_blocks();
        let range = AddressRange { start: 0x2000, end: 0x4000 };
        // A merge that adopts new blocks takes this lock, and so does a fork.
        let taken = cut_and_refuse(&blocks, range, || blocks.is_own());
        assert_eq!(taken, Some(vec![block(0x2000, 0x3000, State::Adopted), block(0x3000, 0x4000, State::New)]));
        assert!(!blocks.is_own(), "whoever waits for a merge does so without it");
        assert_eq!(in_state(&blocks, State::Adopted), [block(0x1000, 0x2000, State::Adopted)]);
        assert_eq!(in_state(&blocks, State::New), [block(0x4000, 0x5000, State::New)]);
    }

    #[test]
    fn blocks_are_as_before_if_the_engine_does_not_refuse_their_range() {
        let blocks = two_blocks();
        let heap = Block { heap: true, ..block(0x6000, 0x9000, State::Adopted) };
        blocks.lock().expect("this thread does not have it").insert(heap);
        for range in [AddressRange { start: 0x1000, end: 0x5000 }, AddressRange { start: 0x7000, end: 0x8000 }] {
            assert_eq!(cut_and_refuse(&blocks, range, || false), None);
        }
        assert_eq!(in_state(&blocks, State::Adopted), [block(0x1000, 0x3000, State::Adopted), heap]);
        assert_eq!(in_state(&blocks, State::New), [block(0x3000, 0x5000, State::New)]);
    }
}
