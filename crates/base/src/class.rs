//! The page classes of a census, and page counts by class.

use crate::units::Pages;
use std::ops::AddAssign;

/// The class of a resident page in a census. Each page has exactly one class. If several fit, the first of this order
/// applies: merged, volatile, zero, then the nearest duplicate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum PageClass {
    /// Already shared by KSM.
    Merged,
    /// Its content changed between the two passes.
    Volatile,
    /// Only zero bytes.
    Zero,
    /// Another copy is in the same process.
    DuplicateWithinProcess,
    /// The nearest other copy is in another process of the same trust domain.
    DuplicateWithinDomain,
    /// The nearest other copy is in another trust domain.
    DuplicateAcrossDomains,
    /// No other copy was found.
    Unique,
}

impl PageClass {
    /// All classes, in order of precedence.
    pub const ALL: [Self; 7] = [
        Self::Merged,
        Self::Volatile,
        Self::Zero,
        Self::DuplicateWithinProcess,
        Self::DuplicateWithinDomain,
        Self::DuplicateAcrossDomains,
        Self::Unique,
    ];

    /// Whether the page has another copy and is not a zero page.
    pub fn is_duplicate(self) -> bool {
        matches!(self, Self::DuplicateWithinProcess | Self::DuplicateWithinDomain | Self::DuplicateAcrossDomains)
    }

    /// Whether merging could free the page or a copy of it.
    pub fn is_mergeable(self) -> bool {
        self == Self::Zero || self.is_duplicate()
    }
}

/// Resident private anonymous pages by class. Each resident page is counted in exactly one field. Only `redundant`
/// overlaps: it counts the duplicates beyond the copy that each group keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCounts {
    /// Already shared by KSM.
    pub merged: Pages,
    /// Changed between the passes.
    pub volatile: Pages,
    /// Only zero bytes.
    pub zero: Pages,
    /// Duplicates whose nearest copy is in the same process.
    pub within_process: Pages,
    /// Duplicates whose nearest copy is in another process of the same trust domain.
    pub within_domain: Pages,
    /// Duplicates whose nearest copy is in another trust domain.
    pub across_domains: Pages,
    /// Without another copy.
    pub unique: Pages,
    /// Duplicates beyond the one copy that each group keeps.
    pub redundant: Pages,
}

impl PageCounts {
    /// Count one page; `redundant` says that it is not the copy that its group keeps.
    pub fn count(&mut self, class: PageClass, redundant: bool) {
        let field = match class {
            PageClass::Merged => &mut self.merged,
            PageClass::Volatile => &mut self.volatile,
            PageClass::Zero => &mut self.zero,
            PageClass::DuplicateWithinProcess => &mut self.within_process,
            PageClass::DuplicateWithinDomain => &mut self.within_domain,
            PageClass::DuplicateAcrossDomains => &mut self.across_domains,
            PageClass::Unique => &mut self.unique,
        };
        field.0 += 1;
        self.redundant.0 += u64::from(redundant && class.is_duplicate());
    }

    /// All duplicates, wherever their nearest copy is.
    pub fn duplicate(&self) -> Pages {
        self.within_process + self.within_domain + self.across_domains
    }

    /// All pages that were classified.
    pub fn resident(&self) -> Pages {
        self.merged + self.volatile + self.zero + self.duplicate() + self.unique
    }

    /// A share of each count, rounded.
    ///
    /// # Panics
    /// If `whole` is zero.
    #[must_use]
    pub fn share(&self, part: u64, whole: u64) -> Self {
        // The cast cannot truncate as long as `part` is at most `whole`.
        let share = |pages: Pages| {
            let (part, whole) = (u128::from(part), u128::from(whole));
            Pages(((u128::from(pages.0) * part + whole / 2) / whole) as u64)
        };
        Self {
            merged: share(self.merged),
            volatile: share(self.volatile),
            zero: share(self.zero),
            within_process: share(self.within_process),
            within_domain: share(self.within_domain),
            across_domains: share(self.across_domains),
            unique: share(self.unique),
            redundant: share(self.redundant),
        }
    }
}

impl AddAssign for PageCounts {
    fn add_assign(&mut self, other: Self) {
        self.merged += other.merged;
        self.volatile += other.volatile;
        self.zero += other.zero;
        self.within_process += other.within_process;
        self.within_domain += other.within_domain;
        self.across_domains += other.across_domains;
        self.unique += other.unique;
        self.redundant += other.redundant;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_is_counted_once() {
        let mut counts = PageCounts::default();
        for class in PageClass::ALL {
            counts.count(class, true);
        }
        assert_eq!(counts.resident(), Pages(7));
        assert_eq!(counts.duplicate(), Pages(3));
        assert_eq!(counts.redundant, Pages(3), "zero and unique pages are never redundant");
        counts.unique = Pages(u64::MAX);
        assert_eq!(counts.share(1, 1), counts);
        let half = counts.share(u64::MAX / 2, u64::MAX - 1);
        assert_eq!((half.unique, half.zero, half.redundant), (Pages(1 << 63), Pages(1), Pages(2)));
    }
}
