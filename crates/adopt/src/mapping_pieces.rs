//! The mappings in a range of this process, read from `/proc/thread-self/maps`: `/proc/self` has none after the main
//! thread has ended.

use pagefold_base::AddressRange;
use std::ffi::c_int;
use std::fs::File;
use std::io::{BufRead, BufReader};

/// The part of a mapping that is in a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MappingPiece {
    /// Its addresses.
    pub range: AddressRange,
    /// Its protection, as mmap(2) takes it.
    pub protection: c_int,
    /// Whether a file is mapped; in blocks that is the engine's store.
    pub is_file: bool,
}

/// The mappings in a range, ascending; empty if they cannot be read.
pub fn read_pieces(range: AddressRange) -> Vec<MappingPiece> {
    let Ok(file) = File::open("/proc/thread-self/maps") else { return Vec::new() };
    let lines = BufReader::new(file).split(b'\n').map_while(Result::ok);
    let parts = lines.filter_map(|line| parse_piece(&String::from_utf8_lossy(&line)));
    let within = parts.skip_while(|part| part.range.end <= range.start).take_while(|part| part.range.start < range.end);
    within.filter_map(|part| Some(MappingPiece { range: part.range.overlap(range)?, ..part })).collect()
}

fn parse_piece(line: &str) -> Option<MappingPiece> {
    let hexadecimal = |text: &str| u64::from_str_radix(text, 16).ok();
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let range = AddressRange { start: hexadecimal(start)?, end: hexadecimal(end)? };
    let letters = words.next()?;
    let access = [('r', libc::PROT_READ), ('w', libc::PROT_WRITE), ('x', libc::PROT_EXEC)];
    let access = access.iter().filter(|(letter, _)| letters.contains(*letter)).fold(0, |all, (_, bit)| all | bit);
    let inode = words.nth(2)?;
    Some(MappingPiece { range, protection: access, is_file: inode != "0" })
}
