//! What a member tells of itself, for whoever looks at the domain: a file of words that it alone writes.
//!
//! The file is mapped shared by the member and read with pread(2) by others ([`crate::observe`]), who take no lock and
//! map nothing. A number of the version is odd while the words are being changed; a reader takes what it read only if
//! the number was the same even one before and after. So nobody waits: not the member, nor for a member that died over
//! it. The file is locked by flock(2) through its mapping, as [`crate::references`] are, so that those of the dead are
//! found and removed by who comes next.

use crate::directory;
use crate::words::{WORD, Words};
use pagefold_base::engine::{Member, RegionTally, Spending, Tally};
use pagefold_base::{AddressRange, Bytes, Pages, Pid, ProcessId};
use rustix::fs::{FlockOperation, flock};
use rustix::rand::{GetRandomFlags, getrandom};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

/// How the names of these files begin; the process follows, and a random number.
pub const PREFIX: &str = "status-";

/// "pagefor", and the version of the layout in the lowest byte.
const MAGIC: u64 = u64::from_be_bytes(*b"pagefor\x01");

/// The longest that such a file is, in words: 64 KiB, for some 1,600 regions.
pub const MOST: usize = 8192;

/// What precedes the numbers: the magic word and the version.
const HEAD: usize = 2;

/// Where the version is.
pub const VERSION: usize = 1;

/// Numbers of a member, without its regions.
const NUMBERS: usize = 17;

/// Numbers of a region.
const OF_REGION: usize = 5;

/// The most memory that a member is believed to have: 256 TiB.
const MOST_BYTES: u64 = 1 << 48;

/// A member's file. Removed when dropped.
#[derive(Debug)]
pub struct Record {
    words: Words,
    path: PathBuf,
    /// The process that made it: in a child it is the parent's.
    process: ProcessId,
    /// So many words have blocks.
    backed: AtomicU64,
}

impl Record {
    /// A new one, that tells nothing yet. Under the domain's lock, so that nobody takes it for one of the dead.
    ///
    /// # Errors
    /// Those of files, and of reading `/proc/self/stat`.
    pub fn new(directory: &Path) -> io::Result<Self> {
        let mut random = [0; 8];
        getrandom(&mut random, GetRandomFlags::empty())?;
        let pid = std::process::id();
        let start_time = start_time(pid)?.ok_or(io::ErrorKind::InvalidData)?;
        let path = directory.join(format!("{PREFIX}{pid}-{:016x}", u64::from_ne_bytes(random)));
        let file = directory::open(&path, true)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        let words = Words::map(&file, MOST)?;
        let process = ProcessId { pid: Pid(pid), start_time };
        Ok(Self { words, path, process, backed: AtomicU64::new(0) })
    }

    /// Whether the file is still where others look for it.
    pub fn is_listed(&self) -> bool {
        self.path.exists()
    }

    /// Which process tells.
    pub fn process(&self) -> ProcessId {
        self.process
    }

    /// Tell others. Where there is no memory to tell all in, what was told before stays.
    pub fn tell(&self, member: &Member) {
        let numbers = numbers(member);
        let needed = (HEAD + numbers.len()) as u64;
        if needed > self.backed.load(Ordering::Relaxed) {
            let blocks = needed.next_multiple_of(512).min(MOST as u64);
            let file = directory::open(&self.path, false);
            if file.and_then(|file| Words::allocate(&file, 0..blocks)).is_err() {
                return;
            }
            self.backed.store(blocks, Ordering::Relaxed);
        }
        let version = self.words[VERSION].load(Ordering::Relaxed);
        self.words[VERSION].store(version | 1, Ordering::Relaxed);
        // Whoever sees one of the numbers sees the odd version before it.
        fence(Ordering::Release);
        for (word, number) in self.words[HEAD..].iter().zip(numbers) {
            word.store(number, Ordering::Relaxed);
        }
        self.words[0].store(MAGIC, Ordering::Relaxed);
        self.words[VERSION].store((version | 1) + 1, Ordering::Release);
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        if self.process.pid.0 == std::process::id() {
            // What cannot be removed now is removed by whoever comes next.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Remove the records of members that are no more. Under the domain's lock.
pub fn sweep(directory: &Path) {
    for name in directory::names(directory).unwrap_or_default() {
        let path = directory.join(&name);
        if name.to_str().is_some_and(|name| name.starts_with(PREFIX))
            && let Ok(file) = directory::open(&path, false)
            && flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
        {
            // What cannot be removed now is found again.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// When a process started, in clock ticks since the host was booted: field 22 of `/proc/PID/stat` (proc_pid_stat(5)).
/// `None` if there is no such process, or what it says has another form.
///
/// # Errors
/// Those of reading it, but for there being no such process.
pub fn start_time(pid: u32) -> io::Result<Option<u64>> {
    let text = match std::fs::read(format!("/proc/{pid}/stat")) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => return Ok(None),
        Err(error) => return Err(error),
    };
    let text = String::from_utf8_lossy(&text);
    // The name of the program may hold anything, brackets and blanks too.
    let fields = text.rsplit_once(')').map(|(_, fields)| fields);
    Ok(fields.and_then(|fields| fields.split_ascii_whitespace().nth(19)?.parse().ok()))
}

/// Now, since the host was booted.
pub fn now() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// In place of a number that there is none of.
const NONE: u64 = u64::MAX;

fn numbers(member: &Member) -> Vec<u64> {
    let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(NONE - 1);
    let Tally { pages, merged, zeros, hot } = member.tally;
    let room = (MOST - HEAD - NUMBERS) / OF_REGION;
    let regions = &member.regions[..member.regions.len().min(room)];
    let mut numbers = vec![
        u64::from(member.process.pid.0),
        member.process.start_time,
        nanoseconds(member.told),
        member.last_merge.map_or(NONE, nanoseconds),
        member.merges,
        nanoseconds(member.time),
        nanoseconds(member.spending.elapsed),
        nanoseconds(member.spending.spent),
        u64::from(member.spending.bound.is_some()),
        member.spending.bound.unwrap_or_default().to_bits(),
        member.notes.0,
        pages.0,
        merged.0,
        zeros.0,
        hot.0,
        member.region_count,
        regions.len() as u64,
    ];
    debug_assert_eq!(numbers.len(), NUMBERS);
    for RegionTally { range, tally } in regions {
        numbers.extend([range.start, range.end, tally.merged.0, tally.zeros.0, tally.hot.0]);
    }
    numbers
}

/// What the words of a record say, read while nobody changed them; `None` if they make no sense. `page` is the size of
/// a page.
pub fn member(words: &[u64], page: u64) -> Option<Member> {
    let (head, numbers) = words.split_at_checked(HEAD)?;
    if head[0] != MAGIC || head[VERSION] % 2 != 0 {
        return None;
    }
    let (own, regions) = numbers.split_at_checked(NUMBERS)?;
    let time = |at: usize| Duration::from_nanos(own[at]);
    let bound = f64::from_bits(own[9]);
    if !bound.is_finite() || bound < 0.0 {
        return None;
    }
    // No more than four levels of page tables map: sums over all members do not overflow.
    let pages = |number: u64| (number <= MOST_BYTES / page).then_some(Pages(number));
    let within = |tally: Tally| {
        let parts = tally.merged + tally.zeros + tally.hot;
        (parts <= tally.pages).then_some(tally)
    };
    let region = |numbers: &[u64]| {
        let range = AddressRange { start: numbers[0], end: numbers[1] };
        let tally = Tally {
            pages: pages(range.bytes().0 / page)?,
            merged: pages(numbers[2])?,
            zeros: pages(numbers[3])?,
            hot: pages(numbers[4])?,
        };
        Some(RegionTally { range, tally: within(tally)? })
    };
    let count = usize::try_from(own[16]).ok().filter(|&count| count <= regions.len() / OF_REGION)?;
    let tally = Tally { pages: pages(own[11])?, merged: pages(own[12])?, zeros: pages(own[13])?, hot: pages(own[14])? };
    Some(Member {
        process: ProcessId { pid: Pid(u32::try_from(own[0]).ok()?), start_time: own[1] },
        told: time(2),
        last_merge: (own[3] != NONE).then(|| time(3)),
        merges: own[4],
        time: time(5),
        spending: Spending { elapsed: time(6), spent: time(7), bound: (own[8] != 0).then_some(bound) },
        notes: Some(Bytes(own[10])).filter(|notes| notes.0 <= MOST_BYTES)?,
        tally: within(tally)?,
        region_count: own[15],
        regions: regions.chunks_exact(OF_REGION).take(count).map(region).collect::<Option<_>>()?,
    })
}

/// Bytes as words.
pub fn words(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks::<{ WORD as usize }>().0.iter().map(|word| u64::from_ne_bytes(*word)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn known(regions: usize) -> Member {
        let region = |at: u64| {
            let start = 0x7f00_0000_0000 + at * 0x10_0000;
            let tally = Tally { pages: Pages(16), merged: Pages(at % 8), zeros: Pages(2), hot: Pages(1) };
            RegionTally { range: AddressRange { start, end: start + 16 * 4096 }, tally }
        };
        let regions: Vec<_> = (0..regions as u64).map(region).collect();
        let mut tally = Tally::default();
        regions.iter().for_each(|region| tally += region.tally);
        Member {
            process: ProcessId { pid: Pid(std::process::id()), start_time: 77 },
            told: Duration::from_millis(1234),
            last_merge: Some(Duration::from_millis(1200)),
            merges: 3,
            time: Duration::from_micros(5),
            spending: Spending { elapsed: Duration::from_secs(9), spent: Duration::from_micros(6), bound: Some(0.02) },
            notes: Bytes(64),
            tally,
            region_count: regions.len() as u64,
            regions,
        }
    }

    fn told(member: &Member) -> Vec<u64> {
        [vec![MAGIC, 2], numbers(member)].concat()
    }

    #[test]
    fn what_is_told_is_what_is_read() {
        let full = known(3);
        assert_eq!(member(&told(&full), 4096), Some(full.clone()));
        let mut other = Member { last_merge: None, ..full.clone() };
        other.spending.bound = None;
        assert_eq!(member(&told(&other), 4096), Some(other));
        let many = known(5000);
        let words = told(&many);
        assert!(words.len() <= MOST);
        let read = member(&words, 4096).unwrap();
        assert_eq!((read.region_count, read.tally), (5000, many.tally));
        assert!(read.regions.len() > 1500 && many.regions.starts_with(&read.regions));
        assert_eq!(member(&told(&full)[..30], 4096), None, "cut off");
        let changing = [vec![MAGIC, 3], numbers(&full)].concat();
        assert_eq!(member(&changing, 4096), None);
    }

    #[test]
    fn figures_that_make_no_sense_are_none() {
        let check = |at: usize, number: u64| {
            let mut words = told(&known(1));
            words[HEAD + at] = number;
            assert_eq!(member(&words, 4096), None, "{at}: {number}");
        };
        check(0, 1 << 32);
        check(9, f64::NAN.to_bits());
        check(9, (-1.0f64).to_bits());
        check(12, 17);
        check(11, u64::MAX);
        check(16, 1_000_000);
        check(NUMBERS, 0x7f00_0000_0000 + 16 * 4096);
        check(NUMBERS + 2, 16);
    }

    proptest! {
        #[test]
        fn no_words_make_it_panic(words: Vec<u64>, changed: Vec<(u8, u64)>, length in 0..40usize) {
            prop_assert_eq!(member(&words, 4096), None);
            let mut words = told(&known(3));
            for (at, number) in changed {
                let at = usize::from(at) % words.len();
                words[at] = number;
            }
            // Whatever is believed can be told again, and means the same.
            if let Some(found) = member(&words[..length.min(words.len())], 4096) {
                prop_assert_eq!(member(&told(&found), 4096), Some(found));
            }
        }
    }

    #[test]
    fn records_last_as_long_as_their_member() {
        let directory = tempfile::tempdir().unwrap();
        let files = || directory.path().read_dir().unwrap().count();
        let record = Record::new(directory.path()).unwrap();
        record.tell(&known(2));
        sweep(directory.path());
        assert_eq!(files(), 1, "it is locked");
        let left = directory.path().join(format!("{PREFIX}1-0"));
        std::fs::write(left, "").unwrap();
        sweep(directory.path());
        assert_eq!(files(), 1);
        drop(record);
        assert_eq!(files(), 0);
    }

    #[test]
    fn when_a_process_started() {
        assert!(start_time(std::process::id()).unwrap().unwrap() > 0);
        assert_eq!(start_time(u32::MAX).unwrap(), None);
    }
}
