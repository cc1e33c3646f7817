//! The memory of the program that this library may merge: large allocations, each in a mapping of its own, and large
//! mappings that the program has made itself.

use crate::lock::ForkSafeLock;
use pagefold_base::{AddressRange, Bytes};
use std::collections::BTreeMap;

/// All blocks. Lock it after [`crate::merger::MERGER`], never before.
pub static BLOCKS: ForkSafeLock<BlockTable> =
    ForkSafeLock::new(BlockTable { blocks: BTreeMap::new(), spare_ranges: Vec::new() });

/// The state of a block in the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    /// The engine does not know it: all its pages are as the kernel supplied them.
    Unknown,
    /// The engine has adopted it, and may have merged parts.
    Adopted,
    /// The engine does not merge it, but may have merged parts of it before.
    Excluded,
}

/// A range of whole pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdoptableBlock {
    /// Its addresses.
    pub range: AddressRange,
    /// Its state.
    pub state: BlockState,
    /// Whether malloc(3) or a related function allocated it; then free(3) frees it.
    pub is_heap: bool,
}

/// Freed memory that is kept for the next allocation, as the C library's heap does: bytes in total, and of one block
/// (`M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` of mallopt(3) grow to these).
const MAX_SPARE_BYTES: u64 = 64 << 20;
const MAX_SPARE_BLOCK_BYTES: u64 = 32 << 20;

/// Blocks by address.
#[derive(Debug)]
pub struct BlockTable {
    blocks: BTreeMap<u64, AdoptableBlock>,
    spare_ranges: Vec<AddressRange>,
}

impl BlockTable {
    /// Add a new block.
    pub fn insert(&mut self, block: AdoptableBlock) {
        self.blocks.insert(block.range.start, block);
    }

    /// The heap block that starts at an address.
    pub fn heap_block_at(&self, address: u64) -> Option<AdoptableBlock> {
        self.blocks.get(&address).copied().filter(|block| block.is_heap)
    }

    /// Remove the heap block that starts at an address, if the engine does not know it. Returns whether it was removed.
    pub fn remove_unknown(&mut self, address: u64) -> bool {
        let is_unknown = self.heap_block_at(address).is_some_and(|block| block.state == BlockState::Unknown);
        is_unknown && self.blocks.remove(&address).is_some()
    }

    /// Blocks that overlap a range, ascending.
    pub fn blocks_in(&self, range: AddressRange) -> Vec<AdoptableBlock> {
        let from_end = self.blocks.range(..range.end).rev();
        let mut overlapping: Vec<AdoptableBlock> =
            from_end.map(|(_, block)| *block).take_while(|b| b.range.end > range.start).collect();
        overlapping.reverse();
        overlapping
    }

    /// The range from an address in a block to the furthest end of a buffer that starts there. For malloc(3) that is
    /// the end of the block; for mmap(2) it includes adjoining blocks, which the program may use as one.
    pub fn buffer_range(&self, address: u64) -> AddressRange {
        let start = address;
        let mut end = start.saturating_add(1);
        for block in self.blocks_in(AddressRange { start, end }) {
            end = block.range.end;
            while let Some(next) = self.blocks.get(&end).filter(|next| !block.is_heap && !next.is_heap) {
                end = next.range.end;
            }
        }
        AddressRange { start, end }
    }

    /// `None` if no block overlaps the range; otherwise whether the engine knows one of those blocks.
    pub fn has_known_block(&self, range: AddressRange) -> Option<bool> {
        let from_end = self.blocks.range(..range.end).rev();
        let overlapping = from_end.map(|(_, block)| block).take_while(|block| block.range.end > range.start);
        overlapping.map(|block| block.state != BlockState::Unknown).reduce(|known, next| known || next)
    }

    /// Remove a range; the rest of overlapping blocks stays. Returns the removed parts.
    pub fn remove_range(&mut self, range: AddressRange) -> Vec<AdoptableBlock> {
        let mut removed = Vec::new();
        for block in self.blocks_in(range) {
            self.blocks.remove(&block.range.start);
            let block_part = |part: AddressRange| AdoptableBlock {
                range: part,
                is_heap: block.is_heap && part.start == block.range.start,
                ..block
            };
            for remaining in block.range.subtract(&[range]) {
                self.insert(block_part(remaining));
            }
            removed.extend(block.range.overlap(range).map(block_part));
        }
        removed
    }

    /// Set the state of a block.
    pub fn set_state(&mut self, block: AdoptableBlock, state: BlockState) {
        self.insert(AdoptableBlock { state, ..block });
    }

    /// Whether any block is in a state.
    pub fn has_any(&self, state: BlockState) -> bool {
        self.blocks.values().any(|block| block.state == state)
    }

    /// Blocks in a state.
    pub fn blocks_in_state(&self, state: BlockState) -> Vec<AdoptableBlock> {
        self.blocks.values().copied().filter(|block| block.state == state).collect()
    }

    /// The total size of those blocks.
    pub fn bytes_in_state(&self, state: BlockState) -> Bytes {
        self.blocks.values().filter(|block| block.state == state).map(|block| block.range.bytes()).sum()
    }

    /// Keep freed memory for the next allocation. Returns whether there was space for it.
    pub fn keep_spare(&mut self, range: AddressRange) -> bool {
        let spare_bytes: u64 = self.spare_ranges.iter().map(|spare| spare.bytes().0).sum();
        let fits = range.bytes().0 <= MAX_SPARE_BLOCK_BYTES && spare_bytes + range.bytes().0 <= MAX_SPARE_BYTES;
        if fits {
            self.spare_ranges.push(range);
        }
        fits
    }

    /// Take freed memory of `bytes` bytes, or up to a quarter more.
    pub fn take_spare(&mut self, bytes: u64) -> Option<AddressRange> {
        let fits = |range: &&AddressRange| (bytes..=bytes + bytes / 4).contains(&range.bytes().0);
        let best = *self.spare_ranges.iter().filter(fits).min_by_key(|range| range.bytes().0)?;
        self.spare_ranges.retain(|range| *range != best);
        Some(best)
    }
}

/// Remove a range from the blocks, if `refuse` succeeds in making the engine merge nothing there from now on. Returns
/// the removed parts. Both steps hold the lock that a merge takes before it adopts a block, and that a fork takes: a
/// child finds both done, or neither. If `refuse` fails, the blocks are as before, and the result is `None`.
pub fn cut_and_refuse(
    blocks: &ForkSafeLock<BlockTable>,
    range: AddressRange,
    refuse: impl FnOnce() -> bool,
) -> Option<Vec<AdoptableBlock>> {
    let mut blocks = blocks.lock()?;
    refuse().then(|| blocks.remove_range(range))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test_block(start: u64, end: u64, state: BlockState) -> AdoptableBlock {
        AdoptableBlock { range: AddressRange { start, end }, state, is_heap: false }
    }

    fn table_of_two_blocks() -> ForkSafeLock<BlockTable> {
        let blocks = ForkSafeLock::new(BlockTable { blocks: BTreeMap::new(), spare_ranges: Vec::new() });
        let mut table = blocks.lock().expect("this thread does not have it");
        table.insert(test_block(0x1000, 0x3000, BlockState::Adopted));
        table.insert(test_block(0x3000, 0x5000, BlockState::Unknown));
        drop(table);
        blocks
    }

    fn ranges_in_state(blocks: &ForkSafeLock<BlockTable>, state: BlockState) -> Vec<AdoptableBlock> {
        blocks.lock().expect("this thread does not have it").blocks_in_state(state)
    }

    #[test]
    fn no_merge_and_no_fork_comes_between_the_blocks_and_the_engine() {
        let blocks = table_of_two_blocks();
        let range = AddressRange { start: 0x2000, end: 0x4000 };
        // A merge that adopts new blocks takes this lock, and so does a fork.
        let removed = cut_and_refuse(&blocks, range, || blocks.is_held_by_this_thread());
        assert_eq!(
            removed,
            Some(vec![
                test_block(0x2000, 0x3000, BlockState::Adopted),
                test_block(0x3000, 0x4000, BlockState::Unknown)
            ])
        );
        assert!(!blocks.is_held_by_this_thread(), "a thread that waits for a merge does not hold this lock");
        assert_eq!(ranges_in_state(&blocks, BlockState::Adopted), [test_block(0x1000, 0x2000, BlockState::Adopted)]);
        assert_eq!(ranges_in_state(&blocks, BlockState::Unknown), [test_block(0x4000, 0x5000, BlockState::Unknown)]);
    }

    #[test]
    fn blocks_are_as_before_if_the_engine_does_not_refuse_their_range() {
        let blocks = table_of_two_blocks();
        let heap = AdoptableBlock { is_heap: true, ..test_block(0x6000, 0x9000, BlockState::Adopted) };
        blocks.lock().expect("this thread does not have it").insert(heap);
        for range in [AddressRange { start: 0x1000, end: 0x5000 }, AddressRange { start: 0x7000, end: 0x8000 }] {
            assert_eq!(cut_and_refuse(&blocks, range, || false), None);
        }
        assert_eq!(
            ranges_in_state(&blocks, BlockState::Adopted),
            [test_block(0x1000, 0x3000, BlockState::Adopted), heap]
        );
        assert_eq!(ranges_in_state(&blocks, BlockState::Unknown), [test_block(0x3000, 0x5000, BlockState::Unknown)]);
    }
}
