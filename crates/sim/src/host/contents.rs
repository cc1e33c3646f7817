//! The bytes of pages, from the numbers of their contents.

use crate::decide::memory::{Content, ZERO_CONTENT};
use pagefold_base::splitmix::splitmix64;

/// Bytes of a page.
pub(super) const PAGE_LEN: usize = 4096;

/// A buffer that shows one page after the other. Pages differ in their first four bytes, so that memcmp orders them as
/// the model does; the rest has no pattern.
pub(super) struct PageBytes {
    bytes: Box<[u8; PAGE_LEN]>,
}

static ZERO_PAGE: [u8; PAGE_LEN] = [0; PAGE_LEN];

impl PageBytes {
    pub(super) fn new() -> Self {
        let mut bytes = Box::new([0; PAGE_LEN]);
        let words = bytes.chunks_exact_mut(size_of::<u64>()).enumerate();
        words.for_each(|(position, word)| word.copy_from_slice(&splitmix64(position as u64).to_le_bytes()));
        Self { bytes }
    }

    /// The bytes of a content.
    pub(super) fn show(&mut self, content: Content) -> &[u8; PAGE_LEN] {
        if content == ZERO_CONTENT {
            return &ZERO_PAGE;
        }
        self.bytes[..size_of::<Content>()].copy_from_slice(&content.to_be_bytes());
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_ordered_as_contents() {
        let mut page = PageBytes::new();
        let mut bytes = |content| page.show(content).to_vec();
        let contents = [0, 1, 2, 255, 256, 65_536, 1 << 29];
        let pages = contents.map(&mut bytes);
        assert!(pages.is_sorted() && pages.windows(2).all(|pair| pair[0] != pair[1]));
        assert_eq!((bytes(0), bytes(7)), (vec![0; PAGE_LEN], bytes(7)));
    }
}
