//! Contents of pages that no page has yet.

use super::memory::{CONTENT_LIMIT, Content};
use std::collections::VecDeque;
use thiserror::Error;

/// Contents of the model are used up.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error(
    "the scenario needs more than {CONTENT_LIMIT} different contents: give shorter run_pages, fewer machines or less \
     unique memory"
)]
pub struct ContentsUsedUp;

/// Contents that no page has, in blocks whose length is a power of two. A block that is given back is used again
/// after all others, so that ksmd hardly takes a new content for the one that the page had before.
#[derive(Clone, Debug)]
pub(super) struct ContentPool {
    /// The length of a block.
    pub(super) block_pages: u64,
    next_block: u64,
    unused: VecDeque<Content>,
}

impl ContentPool {
    pub(super) fn new(block_pages: u64) -> Self {
        Self { block_pages, next_block: 0, unused: VecDeque::new() }
    }

    /// The first content of a block. The order of contents tells nothing about their place.
    pub(super) fn take(&mut self) -> Result<Content, ContentsUsedUp> {
        let blocks = u64::from(CONTENT_LIMIT).next_power_of_two() / self.block_pages;
        while self.next_block + 1 < blocks {
            self.next_block += 1;
            // An odd multiple permutes the blocks. The first has zero, and the last exceeds the limit.
            let place = self.next_block.wrapping_mul(0x9e37_79b1) % blocks;
            if place != 0 && place != blocks - 1 {
                return Content::try_from(place * self.block_pages).map_err(|_| ContentsUsedUp);
            }
        }
        self.unused.pop_front().ok_or(ContentsUsedUp)
    }

    pub(super) fn give_back(&mut self, content: Content) {
        self.unused.push_back(content);
    }
}
