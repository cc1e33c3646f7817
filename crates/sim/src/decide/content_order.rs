//! The order of contents by their bytes, in which ksmd sorts its trees.
//!
//! Which node a walk meets depends on that order only. Where a walk ends at a page that is gone (see
//! [`super::known_layouts`]), contents that sort beside that page cannot be inserted, so the order decides how many pages
//! a scan merges.

use pagefold_base::OrderKey;

/// The content of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OrderedPage {
    /// The number of its content, which pages with the same content share; `None` if no other page has it.
    pub number: Option<u32>,
    /// The place of its bytes, if they were read.
    pub key: Option<OrderKey>,
}

/// The rank of each page's content, from 1 and in the order of the keys. Pages with one number have one rank. Contents
/// without a key come first, and contents with equal keys are in the order of their first pages.
#[must_use]
pub fn rank_contents(pages: &[OrderedPage]) -> Vec<u32> {
    let numbers = pages.iter().filter_map(|page| page.number).max().map_or(0, |largest| largest as usize + 1);
    // The first page of each number, and the first key that is known: a page may have been recognized without a read.
    let mut first_pages: Vec<Option<usize>> = vec![None; numbers];
    let mut keys: Vec<Option<OrderKey>> = vec![None; numbers];
    let mut contents: Vec<(Option<OrderKey>, usize)> = Vec::new();
    for (position, page) in pages.iter().enumerate() {
        match page.number {
            None => contents.push((page.key, position)),
            Some(number) => {
                first_pages[number as usize].get_or_insert(position);
                keys[number as usize] = keys[number as usize].or(page.key);
            }
        }
    }
    contents.extend(keys.iter().zip(&first_pages).filter_map(|(key, first)| Some((*key, (*first)?))));
    contents.sort_unstable();
    let mut ranks = vec![0; pages.len()];
    for ((_, first), rank) in contents.iter().zip(1..) {
        ranks[*first] = rank;
    }
    for (position, page) in pages.iter().enumerate() {
        if let Some(first) = page.number.and_then(|number| first_pages[number as usize]) {
            ranks[position] = ranks[first];
        }
    }
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(bytes: &[u8]) -> Option<OrderKey> {
        OrderKey::of_page(bytes)
    }

    #[test]
    fn contents_are_ranked_by_their_bytes() {
        let page = |number, bytes: &[u8]| OrderedPage { number, key: key(bytes) };
        let pages = [
            page(None, &[9, 0]),
            page(Some(4), &[5, 1]),
            page(None, &[0, 7]),
            // Recognized without a read: its content has the key of another page.
            OrderedPage { number: Some(4), key: None },
            page(Some(0), &[5, 0]),
            // Equal keys are in the order of their pages.
            page(None, &[9, 0]),
            // Not read.
            OrderedPage { number: None, key: None },
        ];
        assert_eq!(rank_contents(&pages), [5, 4, 2, 4, 3, 6, 1]);
        assert_eq!(rank_contents(&[]), [0; 0]);
    }

    proptest! {
        #[test]
        fn ranks_sort_as_contents_do(bytes in proptest::collection::vec(0..40u8, 1..60)) {
            // Contents below 20 have numbers, whether other pages have them or not.
            let page = |(position, &byte): (usize, &u8)| OrderedPage {
                number: (byte < 20).then(|| u32::from(byte)),
                key: key(&[byte + 1, position as u8 * u8::from(byte >= 20)]),
            };
            let pages: Vec<_> = bytes.iter().enumerate().map(page).collect();
            let ranks = rank_contents(&pages);
            for (one, rank) in pages.iter().zip(&ranks) {
                for (other, other_rank) in pages.iter().zip(&ranks) {
                    prop_assert_eq!(one.key.cmp(&other.key), rank.cmp(other_rank));
                }
            }
            let distinct: std::collections::BTreeSet<_> = ranks.iter().copied().collect();
            prop_assert_eq!(distinct, (1..=*ranks.iter().max().unwrap()).collect());
        }
    }
}
