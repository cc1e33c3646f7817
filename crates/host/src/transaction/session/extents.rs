//! The extents of a process: used to decide whether a range still belongs to the memory that was advised.
//!
//! The kernel splits a region where advice differs and joins it again where it no longer does (mm/vma.c, 6.18). Undoing
//! advice therefore changes the bounds of regions. The extent does not change: a run of adjacent regions with the same
//! permissions of the same file, or of none.

use crate::{Host, observe};
use pagefold_base::region::MapsEntry;
use pagefold_base::{AddressRange, ProcessId, Reading};

/// The name in `maps` of the memory whose end brk(2) moves. Its start is constant for the life of the program.
const HEAP_NAME: &str = "[heap]";

/// The name in `maps` of the main thread's stack. Its end is constant for the life of the program, and it grows downward.
const STACK_NAME: &str = "[stack]";

/// The extents of a process, ascending.
pub struct Extents(Vec<MapsEntry>);

impl Extents {
    /// Reads the present extents. `Vanished` if the process has exited.
    pub fn read(host: &dyn Host, process: ProcessId) -> Reading<Self> {
        let handle = crate::hold(host, process)?;
        let mut extents: Vec<MapsEntry> = Vec::new();
        for region in observe::mapped_regions(&*handle)? {
            match extents.last_mut() {
                Some(last) if last.range.end == region.range.start && last.backing() == region.backing() => {
                    last.range.end = region.range.end;
                }
                _ => extents.push(region),
            }
        }
        Ok(Self(extents))
    }

    /// The extent that contains a whole range.
    pub fn enclosing(&self, range: AddressRange) -> Option<AddressRange> {
        self.enclosing_mapping(range).map(|extent| extent.range)
    }

    /// Whether anything is mapped in a range.
    pub fn is_mapped(&self, range: AddressRange) -> bool {
        self.first_ending_after(range).is_some_and(|extent| extent.range.overlap(range).is_some())
    }

    /// Whether a range still belongs to the extent that contained it, or to what remains of it.
    pub fn is_unchanged(&self, range: AddressRange, enclosing: AddressRange) -> bool {
        self.enclosing_mapping(range).is_some_and(|extent| {
            let is_grown_heap = extent.name == HEAP_NAME && extent.range.start == enclosing.start;
            let is_grown_stack = extent.name == STACK_NAME && extent.range.end == enclosing.end;
            contains(extent.range, enclosing) || is_grown_heap || is_grown_stack
        })
    }

    fn enclosing_mapping(&self, range: AddressRange) -> Option<&MapsEntry> {
        self.first_ending_after(range).filter(|extent| contains(range, extent.range))
    }

    /// The first extent that ends after the start of a range.
    fn first_ending_after(&self, range: AddressRange) -> Option<&MapsEntry> {
        self.0.get(self.0.partition_point(|extent| extent.range.end <= range.start))
    }
}

fn contains(inner: AddressRange, outer: AddressRange) -> bool {
    outer.start <= inner.start && inner.end <= outer.end
}
