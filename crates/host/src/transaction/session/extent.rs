//! What memory of a process a range is part of, so that it can be known again.
//!
//! The kernel splits a region where advice differs and joins it again where it no longer does (mm/vma.c, 6.18), so a
//! region's bounds move with the very advice that is put back. What stays is the extent: a run of adjacent regions with
//! the same permissions of the same file, or of none.

use crate::{Host, observe};
use pagefold_base::region::Mapped;
use pagefold_base::{Absent, AddressRange, ProcessId, Reading};

/// What `maps` calls the memory that brk(2) moves the end of. Its start stays for the life of the program.
const HEAP: &str = "[heap]";

/// The extents of a process, ascending.
pub struct Extents(Vec<Mapped>);

impl Extents {
    /// As they are now. `Vanished` if the process has ended.
    pub fn of(host: &dyn Host, process: ProcessId) -> Reading<Self> {
        let handle = host.open(process.pid)?;
        if handle.id() != process {
            return Err(Absent::Vanished);
        }
        let mut extents: Vec<Mapped> = Vec::new();
        for region in observe::layout(&*handle)? {
            match extents.last_mut() {
                Some(last) if last.range.end == region.range.start && alike(last, &region) => {
                    last.range.end = region.range.end;
                }
                _ => extents.push(region),
            }
        }
        Ok(Self(extents))
    }

    /// The one that holds all of a range.
    pub fn around(&self, range: AddressRange) -> Option<AddressRange> {
        self.holding(range).map(|extent| extent.range)
    }

    /// Whether anything is mapped in a range.
    pub fn any(&self, range: AddressRange) -> bool {
        self.first(range).is_some_and(|extent| extent.range.overlap(range).is_some())
    }

    /// Whether a range still is part of what it was part of, or of what is left of that.
    pub fn still(&self, range: AddressRange, within: AddressRange) -> bool {
        self.holding(range).is_some_and(|extent| {
            let grown = extent.name == HEAP && extent.range.start == within.start;
            inside(extent.range, within) || grown
        })
    }

    fn holding(&self, range: AddressRange) -> Option<&Mapped> {
        self.first(range).filter(|extent| inside(range, extent.range))
    }

    /// The first that ends behind where a range starts.
    fn first(&self, range: AddressRange) -> Option<&Mapped> {
        self.0.get(self.0.partition_point(|extent| extent.range.end <= range.start))
    }
}

fn inside(inner: AddressRange, outer: AddressRange) -> bool {
    outer.start <= inner.start && inner.end <= outer.end
}

fn alike(a: &Mapped, b: &Mapped) -> bool {
    (a.permissions, a.inode, &a.name) == (b.permissions, b.inode, &b.name)
}
