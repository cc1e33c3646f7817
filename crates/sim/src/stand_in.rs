//! The process behind a stand-in: memory with known contents, enrolled, until its standard input ends.

use crate::calibration::{StandIn, StandInContents};
use crate::decide::memory::{Content, PAGES_IN_HUGE_PAGE};
use pagefold_sys::mapping::{MadviseAdvice, Mapping, page_size};
use std::io::{self, Read, Write};

/// Maps, fills and enrolls the memory of a stand-in whose pages hold `first` and the following numbers. Prints its address,
/// and returns when standard input ends, so also when the program that started it is killed.
///
/// # Errors
/// If the kernel refuses memory or advice.
pub fn hold(stand_in: &StandIn, first: Content) -> io::Result<()> {
    let page = page_size();
    let huge_bytes = PAGES_IN_HUGE_PAGE as usize * page;
    let bytes = stand_in.pages as usize * page;
    let alignment = if stand_in.is_huge { huge_bytes } else { page };
    let mut memory = Mapping::anonymous_aligned(bytes, alignment)?;
    let advice = if stand_in.is_huge { MadviseAdvice::HugePage } else { MadviseAdvice::NoHugePage };
    memory.advise(0..bytes, advice)?;
    for (page_bytes, content) in memory.as_mut_slice().chunks_exact_mut(page).zip(first..) {
        // A write makes a page resident, also a write of zeros.
        let content = if stand_in.contents == StandInContents::Zeros { 0 } else { content };
        page_bytes[..4].copy_from_slice(&content.to_be_bytes());
    }
    if stand_in.is_huge {
        memory.advise(0..bytes, MadviseAdvice::Collapse)?;
        // Keeps khugepaged from rebuilding what ksmd splits.
        memory.advise(0..bytes, MadviseAdvice::NoHugePage)?;
    }
    memory.advise(0..bytes, MadviseAdvice::Mergeable)?;
    println!("{}", memory.address());
    io::stdout().flush()?;
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
