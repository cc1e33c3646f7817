//! The published status of a member, for other processes: a file of words that only the member writes.
//!
//! The member maps the file shared; other processes read it with pread(2) ([`crate::observe`]), take no lock and map
//! nothing. The version is odd while the words are being changed. A reader accepts the words only if the version was
//! the same even number before and after. So no process waits: not the member, and no reader for a member that died
//! during a change. The member locks the file by flock(2) through its mapping, as for [`crate::slot_references`], so
//! that the next process to join finds and removes the files of dead members.

use crate::domain_directory;
use crate::shared_words::{SharedWords, WORD_BYTES};
use pagefold_base::engine::{EngineMember, EngineTimeUse, PageTally, RegionTally};
use pagefold_base::{AddressRange, Bytes, Pages, Pid, ProcessId};
use rustix::fs::{FlockOperation, flock};
use rustix::rand::{GetRandomFlags, getrandom};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

/// Prefix of the names of these files; the PID follows, and a random number.
pub const STATUS_FILE_PREFIX: &str = "status-";

/// "pagefor", and the version of the layout in the lowest byte.
const STATUS_FILE_MAGIC: u64 = u64::from_be_bytes(*b"pagefor\x01");

/// Maximum size of such a file, in words: 64 KiB, for some 1,600 regions.
pub const MAX_STATUS_WORDS: usize = 8192;

/// Words before the numbers: the magic word and the version.
const HEAD_WORDS: usize = 2;

/// Index of the version word.
pub const VERSION_WORD: usize = 1;

/// Number of words for a member, without its regions.
const MEMBER_WORDS: usize = 17;

/// Number of words per region.
const WORDS_PER_REGION: usize = 5;

/// Maximum plausible memory of a member: 256 TiB.
const MAX_PLAUSIBLE_BYTES: u64 = 1 << 48;

/// The status file of a member. Removed when dropped.
#[derive(Debug)]
pub struct StatusFile {
    words: SharedWords,
    path: PathBuf,
    /// The process that made it; in a forked child, the parent.
    owner: ProcessId,
    /// Number of words that have blocks.
    allocated_words: AtomicU64,
}

impl StatusFile {
    /// Create an empty status file. Requires the domain's lock, so that no process takes it for the file of a dead
    /// member.
    ///
    /// # Errors
    /// Those of files, and of reading `/proc/self/stat`.
    pub fn new(directory: &Path) -> io::Result<Self> {
        let mut random = [0; 8];
        getrandom(&mut random, GetRandomFlags::empty())?;
        let pid = std::process::id();
        let start_time = process_start_time(pid)?.ok_or(io::ErrorKind::InvalidData)?;
        let path = directory.join(format!("{STATUS_FILE_PREFIX}{pid}-{:016x}", u64::from_ne_bytes(random)));
        let file = domain_directory::open_file(&path, true)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        let words = SharedWords::map(&file, MAX_STATUS_WORDS)?;
        let process = ProcessId { pid: Pid(pid), start_time };
        Ok(Self { words, path, owner: process, allocated_words: AtomicU64::new(0) })
    }

    /// Whether the file still exists under its name.
    pub fn is_listed(&self) -> bool {
        self.path.exists()
    }

    /// The process whose status this is.
    pub fn owner(&self) -> ProcessId {
        self.owner
    }

    /// Publish the status. If there is no memory for all of it, the former status stays.
    pub fn publish(&self, member: &EngineMember) {
        let numbers = encode_member(member);
        let needed = (HEAD_WORDS + numbers.len()) as u64;
        if needed > self.allocated_words.load(Ordering::Relaxed) {
            let blocks = needed.next_multiple_of(512).min(MAX_STATUS_WORDS as u64);
            let file = domain_directory::open_file(&self.path, false);
            if file.and_then(|file| SharedWords::allocate_blocks(&file, 0..blocks)).is_err() {
                return;
            }
            self.allocated_words.store(blocks, Ordering::Relaxed);
        }
        let version = self.words[VERSION_WORD].load(Ordering::Relaxed);
        self.words[VERSION_WORD].store(version | 1, Ordering::Relaxed);
        // A reader that sees one of the numbers also sees the odd version stored before.
        fence(Ordering::Release);
        for (word, number) in self.words[HEAD_WORDS..].iter().zip(numbers) {
            word.store(number, Ordering::Relaxed);
        }
        self.words[0].store(STATUS_FILE_MAGIC, Ordering::Relaxed);
        self.words[VERSION_WORD].store((version | 1) + 1, Ordering::Release);
    }
}

impl Drop for StatusFile {
    fn drop(&mut self) {
        if self.owner.pid.0 == std::process::id() {
            // If it cannot be removed now, another process removes it later.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Remove the status files of dead members. Requires the domain's lock.
pub fn remove_dead_status_files(directory: &Path) {
    for name in domain_directory::list_names(directory).unwrap_or_default() {
        let path = directory.join(&name);
        if name.to_str().is_some_and(|name| name.starts_with(STATUS_FILE_PREFIX))
            && let Ok(file) = domain_directory::open_file(&path, false)
            && flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
        {
            // A file that cannot be removed now is found again later.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Start time of a process, in clock ticks since boot: field 22 of `/proc/PID/stat` (proc_pid_stat(5)). `None` if the
/// process does not exist, or the file is malformed.
///
/// # Errors
/// Those of reading it, except that the process does not exist.
pub fn process_start_time(pid: u32) -> io::Result<Option<u64>> {
    let text = match std::fs::read(format!("/proc/{pid}/stat")) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => return Ok(None),
        Err(error) => return Err(error),
    };
    let text = String::from_utf8_lossy(&text);
    // The name of the program may contain any characters, including brackets and blanks.
    let fields = text.rsplit_once(')').map(|(_, fields)| fields);
    Ok(fields.and_then(|fields| fields.split_ascii_whitespace().nth(19)?.parse().ok()))
}

/// Current time since boot.
pub fn time_since_boot() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// Encodes an absent number.
const ABSENT_NUMBER: u64 = u64::MAX;

fn encode_member(member: &EngineMember) -> Vec<u64> {
    let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(ABSENT_NUMBER - 1);
    let PageTally { pages, merged, zeros, rewritten_pages } = member.tally;
    let max_regions = (MAX_STATUS_WORDS - HEAD_WORDS - MEMBER_WORDS) / WORDS_PER_REGION;
    let regions = &member.regions[..member.regions.len().min(max_regions)];
    let mut numbers = vec![
        u64::from(member.process.pid.0),
        member.process.start_time,
        nanoseconds(member.reported_at),
        member.last_merge.map_or(ABSENT_NUMBER, nanoseconds),
        member.merges,
        nanoseconds(member.merge_time),
        nanoseconds(member.time_use.elapsed),
        nanoseconds(member.time_use.spent),
        u64::from(member.time_use.max_slowdown.is_some()),
        member.time_use.max_slowdown.unwrap_or_default().to_bits(),
        member.notes.0,
        pages.0,
        merged.0,
        zeros.0,
        rewritten_pages.0,
        member.region_count,
        regions.len() as u64,
    ];
    debug_assert_eq!(numbers.len(), MEMBER_WORDS);
    for RegionTally { range, tally } in regions {
        numbers.extend([range.start, range.end, tally.merged.0, tally.zeros.0, tally.rewritten_pages.0]);
    }
    numbers
}

/// Decode the words of a status file, read while they did not change; `None` if they are invalid.
pub fn decode_member(words: &[u64], page_bytes: u64) -> Option<EngineMember> {
    let (head, numbers) = words.split_at_checked(HEAD_WORDS)?;
    if head[0] != STATUS_FILE_MAGIC || head[VERSION_WORD] % 2 != 0 {
        return None;
    }
    let (fields, regions) = numbers.split_at_checked(MEMBER_WORDS)?;
    let time = |index: usize| Duration::from_nanos(fields[index]);
    let bound = f64::from_bits(fields[9]);
    if !bound.is_finite() || bound < 0.0 {
        return None;
    }
    // At most what four levels of page tables map, so that sums over all members do not overflow.
    let pages = |number: u64| (number <= MAX_PLAUSIBLE_BYTES / page_bytes).then_some(Pages(number));
    let check_tally = |tally: PageTally| {
        let used_pages = tally.merged + tally.zeros + tally.rewritten_pages;
        (used_pages <= tally.pages).then_some(tally)
    };
    let region = |numbers: &[u64]| {
        let range = AddressRange { start: numbers[0], end: numbers[1] };
        let tally = PageTally {
            pages: pages(range.bytes().0 / page_bytes)?,
            merged: pages(numbers[2])?,
            zeros: pages(numbers[3])?,
            rewritten_pages: pages(numbers[4])?,
        };
        Some(RegionTally { range, tally: check_tally(tally)? })
    };
    let count = usize::try_from(fields[16]).ok().filter(|&count| count <= regions.len() / WORDS_PER_REGION)?;
    let tally = PageTally {
        pages: pages(fields[11])?,
        merged: pages(fields[12])?,
        zeros: pages(fields[13])?,
        rewritten_pages: pages(fields[14])?,
    };
    Some(EngineMember {
        process: ProcessId { pid: Pid(u32::try_from(fields[0]).ok()?), start_time: fields[1] },
        reported_at: time(2),
        last_merge: (fields[3] != ABSENT_NUMBER).then(|| time(3)),
        merges: fields[4],
        merge_time: time(5),
        time_use: EngineTimeUse { elapsed: time(6), spent: time(7), max_slowdown: (fields[8] != 0).then_some(bound) },
        notes: Some(Bytes(fields[10])).filter(|notes| notes.0 <= MAX_PLAUSIBLE_BYTES)?,
        tally: check_tally(tally)?,
        region_count: fields[15],
        regions: regions.chunks_exact(WORDS_PER_REGION).take(count).map(region).collect::<Option<_>>()?,
    })
}

/// Convert bytes to words.
pub fn bytes_to_words(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks::<{ WORD_BYTES as usize }>().0.iter().map(|word| u64::from_ne_bytes(*word)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample_member(regions: usize) -> EngineMember {
        let region = |index: u64| {
            let start = 0x7f00_0000_0000 + index * 0x10_0000;
            let tally =
                PageTally { pages: Pages(16), merged: Pages(index % 8), zeros: Pages(2), rewritten_pages: Pages(1) };
            RegionTally { range: AddressRange { start, end: start + 16 * 4096 }, tally }
        };
        let regions: Vec<_> = (0..regions as u64).map(region).collect();
        let mut tally = PageTally::default();
        regions.iter().for_each(|region| tally += region.tally);
        EngineMember {
            process: ProcessId { pid: Pid(std::process::id()), start_time: 77 },
            reported_at: Duration::from_millis(1234),
            last_merge: Some(Duration::from_millis(1200)),
            merges: 3,
            merge_time: Duration::from_micros(5),
            time_use: EngineTimeUse {
                elapsed: Duration::from_secs(9),
                spent: Duration::from_micros(6),
                max_slowdown: Some(0.02),
            },
            notes: Bytes(64),
            tally,
            region_count: regions.len() as u64,
            regions,
        }
    }

    fn publish_and_read(member: &EngineMember) -> Vec<u64> {
        [vec![STATUS_FILE_MAGIC, 2], encode_member(member)].concat()
    }

    #[test]
    fn published_status_round_trips() {
        let full = sample_member(3);
        assert_eq!(decode_member(&publish_and_read(&full), 4096), Some(full.clone()));
        let mut other = EngineMember { last_merge: None, ..full.clone() };
        other.time_use.max_slowdown = None;
        assert_eq!(decode_member(&publish_and_read(&other), 4096), Some(other));
        let many = sample_member(5000);
        let words = publish_and_read(&many);
        assert!(words.len() <= MAX_STATUS_WORDS);
        let read = decode_member(&words, 4096).unwrap();
        assert_eq!((read.region_count, read.tally), (5000, many.tally));
        assert!(read.regions.len() > 1500 && many.regions.starts_with(&read.regions));
        assert_eq!(decode_member(&publish_and_read(&full)[..30], 4096), None, "truncated");
        let changing = [vec![STATUS_FILE_MAGIC, 3], encode_member(&full)].concat();
        assert_eq!(decode_member(&changing, 4096), None);
    }

    #[test]
    fn implausible_figures_are_rejected() {
        let check = |index: usize, number: u64| {
            let mut words = publish_and_read(&sample_member(1));
            words[HEAD_WORDS + index] = number;
            assert_eq!(decode_member(&words, 4096), None, "{index}: {number}");
        };
        check(0, 1 << 32);
        check(9, f64::NAN.to_bits());
        check(9, (-1.0f64).to_bits());
        check(12, 17);
        check(11, u64::MAX);
        check(16, 1_000_000);
        check(MEMBER_WORDS, 0x7f00_0000_0000 + 16 * 4096);
        check(MEMBER_WORDS + 2, 16);
    }

    proptest! {
        #[test]
        fn arbitrary_words_do_not_panic(words: Vec<u64>, changed: Vec<(u8, u64)>, length in 0..40usize) {
            prop_assert_eq!(decode_member(&words, 4096), None);
            let mut words = publish_and_read(&sample_member(3));
            for (index, number) in changed {
                let index = usize::from(index) % words.len();
                words[index] = number;
            }
            // Any accepted status can be encoded again, and then decodes to the same.
            if let Some(member) = decode_member(&words[..length.min(words.len())], 4096) {
                prop_assert_eq!(decode_member(&publish_and_read(&member), 4096), Some(member));
            }
        }
    }

    #[test]
    fn status_file_lives_as_long_as_its_member() {
        let directory = tempfile::tempdir().unwrap();
        let files = || directory.path().read_dir().unwrap().count();
        let status_file = StatusFile::new(directory.path()).unwrap();
        status_file.publish(&sample_member(2));
        remove_dead_status_files(directory.path());
        assert_eq!(files(), 1, "the file is locked");
        let abandoned = directory.path().join(format!("{STATUS_FILE_PREFIX}1-0"));
        std::fs::write(abandoned, "").unwrap();
        remove_dead_status_files(directory.path());
        assert_eq!(files(), 1);
        drop(status_file);
        assert_eq!(files(), 0);
    }

    #[test]
    fn start_time_of_own_process_is_read() {
        assert!(process_start_time(std::process::id()).unwrap().unwrap() > 0);
        assert_eq!(process_start_time(u32::MAX).unwrap(), None);
    }
}
