//! Sets of CPU or NUMA node numbers, in the list format of the kernel: `0-3,8` (lib/bitmap.c, `bitmap_parselist` and
//! `bitmap_print_to_pagebuf`).

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// The highest number in a set: more than any kernel has CPUs (`NR_CPUS` is at most 8192) or nodes.
const MAX_ID: u32 = 65_535;

/// A set of CPU or NUMA node numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct IdSet(BTreeSet<u32>);

impl IdSet {
    /// The numbers, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.0.iter().copied()
    }

    /// Whether a number is in the set.
    pub fn contains(&self, id: u32) -> bool {
        self.0.contains(&id)
    }

    /// Whether there is no number.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether `other` contains all numbers.
    pub fn is_subset(&self, other: &Self) -> bool {
        self.0.is_subset(&other.0)
    }

    /// The numbers that are in both.
    pub fn intersection(&self, other: &Self) -> Self {
        Self(&self.0 & &other.0)
    }
}

impl FromIterator<u32> for IdSet {
    fn from_iter<I: IntoIterator<Item = u32>>(ids: I) -> Self {
        Self(ids.into_iter().collect())
    }
}

/// Why a text is no set of numbers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no list of numbers such as 0-3,8")]
pub struct InvalidIdSet(String);

impl FromStr for IdSet {
    type Err = InvalidIdSet;

    fn from_str(text: &str) -> Result<Self, InvalidIdSet> {
        let invalid = || InvalidIdSet(text.to_owned());
        let number = |digits: &str| digits.parse().ok().filter(|&id| id <= MAX_ID).ok_or_else(invalid);
        let mut ids = BTreeSet::new();
        for part in text.trim().split(',').filter(|part| !part.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last): (u32, u32) = (number(first)?, number(last)?);
            if first > last {
                return Err(invalid());
            }
            ids.extend(first..=last);
        }
        Ok(Self(ids))
    }
}

impl fmt::Display for IdSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        let mut ids = self.iter().peekable();
        while let Some(first) = ids.next() {
            let mut last = first;
            while let Some(next) = ids.next_if_eq(&(last + 1)) {
                last = next;
            }
            write!(f, "{separator}{first}")?;
            if last > first {
                write!(f, "-{last}")?;
            }
            separator = ",";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn kernel_lists_are_parsed_and_printed() {
        for (text, ids) in [("", vec![]), ("0", vec![0]), ("0-3,8", vec![0, 1, 2, 3, 8]), ("1-2,4-5", vec![1, 2, 4, 5])]
        {
            let set: IdSet = text.parse().unwrap();
            assert_eq!((set.iter().collect::<Vec<_>>(), set.to_string()), (ids, text.to_owned()));
        }
        assert_eq!("0-1\n".parse::<IdSet>().unwrap().to_string(), "0-1");
        for text in ["a", "3-1", "-", "1-", "70000", "0-4294967295", "0 1"] {
            assert!(text.parse::<IdSet>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn printed_sets_parse_to_themselves(ids in proptest::collection::btree_set(0..200_u32, 0..50)) {
            let set: IdSet = ids.into_iter().collect();
            prop_assert_eq!(set.to_string().parse::<IdSet>(), Ok(set));
        }
    }
}
