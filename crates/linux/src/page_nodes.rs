//! The NUMA nodes of a process's pages, with as few queries as possible: the kernel takes 0.5 to 1 microsecond for each
//! address of a status query (move_pages(2)), and all pages of a huge page are on one node.

use crate::absence_reason;
use crate::process::{LiveProcess, lacks_pagemap_scan};
use pagefold_base::{AddressRange, Reading};
use pagefold_host::{Host, ProcessHandle, observe};
use pagefold_sys::numa;
use pagefold_sys::pagemap::{self, MappedRange, RangeContents};

/// Units in one status query.
const UNITS_PER_QUERY: usize = 8192;

/// Pages of a range that are on one node, and that move_pages(2) moves together: a base page, or the part of a huge page
/// that is in the range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageUnit {
    /// The address of the first page.
    pub address: u64,
    /// The address after the last page.
    pub end: u64,
}

/// The units of a range that are in memory, swapped out or being migrated, ascending. Before 6.7 each page of the range is a unit,
/// whether it is in memory or not.
pub fn page_units(process: &LiveProcess<'_>, range: AddressRange) -> Reading<Vec<PageUnit>> {
    let page_bytes = process.host.page_size().bytes();
    let huge_bytes = observe::huge_page_bytes(process.host).unwrap_or(page_bytes);
    let mut units = Vec::new();
    let mut add_range = |found: MappedRange| {
        // A page that the kernel is migrating looks swapped out.
        if !found.zero_page {
            push_units(&mut units, found.start..found.end, if found.huge { huge_bytes } else { page_bytes });
        }
    };
    match pagemap::scan_mapped_by_ioctl(
        process.pagemap()?,
        range.start..range.end,
        RangeContents::Anything,
        &mut add_range,
    ) {
        Ok(()) => {}
        Err(error) if lacks_pagemap_scan(&error) => push_units(&mut units, range.start..range.end, page_bytes),
        Err(error) => return Err(absence_reason(&error)),
    }
    Ok(units)
}

fn push_units(units: &mut Vec<PageUnit>, range: std::ops::Range<u64>, unit_bytes: u64) {
    let mut address = range.start;
    while address < range.end {
        let end = range.end.min((address + 1).next_multiple_of(unit_bytes));
        units.push(PageUnit { address, end });
        address = end;
    }
}

/// The node of each unit; `None` if it is not in memory.
pub fn unit_nodes(process: &LiveProcess<'_>, units: &[PageUnit]) -> Reading<Vec<Option<u32>>> {
    let mut nodes = Vec::with_capacity(units.len());
    for part in units.chunks(UNITS_PER_QUERY) {
        // The number may belong to another process only after this one has ended.
        process.read("stat")?;
        let addresses: Vec<u64> = part.iter().map(|unit| unit.address).collect();
        let status = numa::page_nodes(process.id().pid.0, &addresses).map_err(|error| absence_reason(&error))?;
        nodes.extend(status.into_iter().map(|node| u32::try_from(node).ok()));
    }
    Ok(nodes)
}

/// The node of each page of a range; `None` for pages that are not in memory.
pub fn page_nodes(process: &LiveProcess<'_>, range: AddressRange) -> Reading<Vec<Option<u32>>> {
    let page = process.host.page_size();
    let mut nodes = vec![None; page.pages_in(range.bytes()).0 as usize];
    let units = page_units(process, range)?;
    for (unit, node) in units.iter().zip(unit_nodes(process, &units)?) {
        let position = |address: u64| ((address - range.start) / page.bytes()) as usize;
        nodes[position(unit.address)..position(unit.end)].fill(node);
    }
    Ok(nodes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_end_at_boundaries_of_huge_pages() {
        let mut units = Vec::new();
        push_units(&mut units, 3..18, 8);
        let bounds: Vec<_> = units.iter().map(|unit| (unit.address, unit.end)).collect();
        assert_eq!(bounds, [(3, 8), (8, 16), (16, 18)]);
    }
}
