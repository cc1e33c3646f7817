//! Counts the possible savings without Pagefold's code: a cryptographic hash of every resident private anonymous page.

use anyhow::{Context, Result};
use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;

/// The possible savings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MergeablePages {
    /// Pages that are redundant: copies beyond the first, and all pages of zeros.
    pub redundant_pages: u64,
    /// Pages that are then mapped to shared frames, the first copies included: each costs metadata.
    pub mapped_to_shared: u64,
}

/// The maximum number of mappings of a frame (`max_page_sharing`, 256 by default).
const MAX_PAGE_SHARING: u64 = 256;

/// Pages per read.
const PAGES_PER_READ: usize = 512;

/// Count the mergeable pages of processes.
///
/// # Errors
/// If a process ends meanwhile or cannot be read.
pub fn count_mergeable(pids: &[u32]) -> Result<MergeablePages> {
    let mut copies = ContentCounts::new();
    for &pid in pids {
        add_process(pid, &mut copies)?;
    }
    let zeros = copies.remove(&zero_page_hash()).unwrap_or(0);
    Ok(tally_copies(zeros, copies.into_values()))
}

/// The number of pages with each content, by its hash.
pub type ContentCounts = HashMap<[u8; 32], u64>;

/// The hash of a page of zeros.
pub fn zero_page_hash() -> [u8; 32] {
    *blake3::hash(&vec![0; pagefold_sys::mapping::page_size()]).as_bytes()
}

/// Add the page contents of a process.
///
/// # Errors
/// If it ends meanwhile or cannot be read.
pub fn add_process(pid: u32, copies: &mut ContentCounts) -> Result<()> {
    let open = |name: &str| File::open(format!("/proc/{pid}/{name}")).with_context(|| format!("{name} of {pid}"));
    let (memory, pagemap) = (open("mem")?, open("pagemap")?);
    for (start, end) in private_regions(pid)? {
        add_region(&memory, &pagemap, start, end, copies)
            .with_context(|| format!("memory of process {pid} at {start:x}"))?;
    }
    Ok(())
}

/// The private regions of a process that map no file: start address and end address (exclusive).
///
/// # Errors
/// If it has ended or cannot be read.
pub fn private_regions(pid: u32) -> Result<Vec<(u64, u64)>> {
    Ok(fs::read_to_string(format!("/proc/{pid}/maps"))?.lines().filter_map(parse_private_anonymous).collect())
}

fn tally_copies(zeros: u64, copies: impl Iterator<Item = u64>) -> MergeablePages {
    copies.filter(|&copies| copies > 1).fold(
        MergeablePages { redundant_pages: zeros, mapped_to_shared: 0 },
        |sum, copies| MergeablePages {
            redundant_pages: sum.redundant_pages + copies - copies.div_ceil(MAX_PAGE_SHARING),
            mapped_to_shared: sum.mapped_to_shared + copies,
        },
    )
}

/// The region of a line of `maps`, if it is private and maps no file. Special mappings of the kernel are left out.
fn parse_private_anonymous(line: &str) -> Option<(u64, u64)> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let private = words.next()?.ends_with('p');
    let anonymous = words.nth(2)? == "0";
    let made_by_kernel = words.next().is_some_and(|name| name.starts_with("[v"));
    let address = |text| u64::from_str_radix(text, 16).ok();
    (private && anonymous && !made_by_kernel).then_some((address(start)?, address(end)?))
}

/// Hash the resident pages of a region that belong to no file (Documentation/admin-guide/mm/pagemap.rst, bits 61 to
/// 63). A page under migration appears swapped out, and the read waits for it. A read swaps swapped pages in.
fn add_region(memory: &File, pagemap: &File, start: u64, end: u64, copies: &mut ContentCounts) -> Result<()> {
    let page = pagefold_sys::mapping::page_size();
    let mut bytes = vec![0; PAGES_PER_READ * page];
    let mut entries = vec![0; PAGES_PER_READ * 8];
    for address in (start..end).step_by(bytes.len()) {
        let pages = ((end - address) as usize / page).min(PAGES_PER_READ);
        pagemap.read_exact_at(&mut entries[..pages * 8], address / page as u64 * 8)?;
        let is_present = |entry: &[u8; 8]| matches!(u64::from_ne_bytes(*entry) >> 61, 0b100 | 0b010);
        let present: Vec<bool> = entries[..pages * 8].as_chunks::<8>().0.iter().map(is_present).collect();
        let mut next = 0;
        while let Some(first) = (next..pages).find(|&page| present[page]) {
            let run = present[first..].iter().take_while(|&&present| present).count();
            let bytes = &mut bytes[..run * page];
            memory.read_exact_at(bytes, address + (first * page) as u64)?;
            for content in bytes.chunks_exact(page) {
                *copies.entry(*blake3::hash(content).as_bytes()).or_default() += 1;
            }
            next = first + run;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::process::{Command, Stdio};

    #[test]
    fn duplicate_and_zero_pages_are_redundant() {
        assert_eq!(
            tally_copies(7, [1, 2, 5].into_iter()),
            MergeablePages { redundant_pages: 7 + 1 + 4, mapped_to_shared: 7 }
        );
        assert_eq!(tally_copies(0, [257].into_iter()), MergeablePages { redundant_pages: 255, mapped_to_shared: 257 });
    }

    #[test]
    fn only_private_anonymous_regions_are_counted() {
        let check = |line, expected| assert_eq!(parse_private_anonymous(line), expected, "{line}");
        check("1000-3000 rw-p 00000000 00:00 0 ", Some((0x1000, 0x3000)));
        check("1000-3000 rw-p 00000000 00:00 0                          [heap]", Some((0x1000, 0x3000)));
        check("1000-3000 rw-s 00000000 00:01 7 /dev/zero", None);
        check("1000-3000 r-xp 00000000 08:01 9 /bin/true", None);
        check("1000-3000 r-xp 00000000 00:00 0 [vdso]", None);
    }

    #[test]
    fn contents_of_a_process_are_counted() -> Result<()> {
        let held = |program: &str| -> Result<MergeablePages> {
            let program = format!("$| = 1; {program}; print 'x'; <STDIN>");
            let mut perl =
                Command::new("perl").args(["-e", &program]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
            perl.stdout.take().context("a pipe")?.read_exact(&mut [0])?;
            let truth = count_mergeable(&[perl.id()]);
            drop(perl.stdin.take());
            perl.wait()?;
            truth
        };
        let nothing = held("")?;
        let same = held("$held .= 'a' x 4096 for 1 .. 1000")?;
        let zeros = held("$held .= chr(0) x 4096 for 1 .. 1000")?;
        let different = held("$held .= pack('N1024', $_ .. $_ + 1023) for map { $_ * 1024 } 0 .. 999")?;
        // A string starts and ends within a page. Some memory of the program itself differs from run to run.
        let near = |truth: u64, expected: u64| truth.abs_diff(expected) < 50;
        assert!(
            near(same.redundant_pages - nothing.redundant_pages, 999 - 999_u64.div_ceil(MAX_PAGE_SHARING)),
            "{nothing:?} {same:?}"
        );
        assert!(near(same.mapped_to_shared - nothing.mapped_to_shared, 999), "{nothing:?} {same:?}");
        assert!(near(zeros.redundant_pages - nothing.redundant_pages, 999), "{nothing:?} {zeros:?}");
        assert!(near(zeros.mapped_to_shared, nothing.mapped_to_shared), "{nothing:?} {zeros:?}");
        assert!(near(different.redundant_pages, nothing.redundant_pages), "{nothing:?} {different:?}");
        Ok(())
    }
}
