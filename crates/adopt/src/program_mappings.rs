//! The mappings in a range of this process, read from `/proc/thread-self/maps`: `/proc/self` has none after the main
//! thread has ended.

use pagefold_base::AddressRange;
use std::ffi::c_int;
use std::fs::File;
use std::io::{BufRead, BufReader};

/// The part of a mapping that is in a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgramMapping {
    /// Its addresses.
    pub range: AddressRange,
    /// Its protection, as mmap(2) takes it.
    pub protection: c_int,
    /// Whether a file is mapped; in blocks that is the engine's store.
    pub is_file: bool,
}

/// The mappings in a range, ascending; empty if they cannot be read.
pub fn read_mappings(range: AddressRange) -> Vec<ProgramMapping> {
    let Ok(file) = File::open("/proc/thread-self/maps") else { return Vec::new() };
    let lines = BufReader::new(file).split(b'\n').map_while(Result::ok);
    let mappings = lines.filter_map(|line| parse_maps_line(&String::from_utf8_lossy(&line)));
    let overlapping = mappings
        .skip_while(|mapping| mapping.range.end <= range.start)
        .take_while(|mapping| mapping.range.start < range.end);
    overlapping.filter_map(|mapping| Some(ProgramMapping { range: mapping.range.overlap(range)?, ..mapping })).collect()
}

fn parse_maps_line(line: &str) -> Option<ProgramMapping> {
    let parse_hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let range = AddressRange { start: parse_hex(start)?, end: parse_hex(end)? };
    let permissions = words.next()?;
    let protection = [('r', libc::PROT_READ), ('w', libc::PROT_WRITE), ('x', libc::PROT_EXEC)];
    let protection =
        protection.iter().filter(|(letter, _)| permissions.contains(*letter)).fold(0, |all, (_, bit)| all | bit);
    let inode = words.nth(2)?;
    Some(ProgramMapping { range, protection, is_file: inode != "0" })
}
