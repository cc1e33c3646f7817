//! Advice about a process's memory, given from within it.
//!
//! The ranges were found some time ago. They are held against `smaps` right before, and what is no longer as it has to
//! be is left out and named. The rest goes in as few stops of one thread as keep each near a millisecond: up to 256
//! ranges by one `process_madvise(2)` on the target's own memory where the kernel takes that (any advice from 6.13, by
//! `PIDFD_SELF_THREAD` from 6.15), otherwise and where that stops short one by one by `madvise(2)`. A range that takes
//! longer than a stop is advised in parts, and for a moment a region begins and ends in between: parts end where huge
//! pages do, which the kernel would split there (mm/huge_memory.c, `vma_adjust_trans_huge`). Mirrors mm/madvise.c and
//! mm/ksm.c (6.18). Limits: withdrawing a whole process (`PR_SET_MEMORY_MERGE` off) is one call, and
//! stops the thread for as long as unmerging it takes.

use super::{miss, refusal};
use crate::process::LiveProcess;
use pagefold_base::AddressRange;
use pagefold_base::region::{Region, VmFlags};
use pagefold_host::act::{Advice, Effect, NOT_MAPPED, Refusal};
use pagefold_host::{Process, Run, observe};
use pagefold_sys::fault;
use pagefold_sys::inject::{self, Inside, ROOM, Target};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

#[cfg(target_arch = "x86_64")]
mod number {
    pub const MADVISE: i64 = 28;
    pub const PRCTL: i64 = 157;
    pub const PROCESS_MADVISE: i64 = 440;
}
#[cfg(target_arch = "aarch64")]
mod number {
    pub const MADVISE: i64 = 233;
    pub const PRCTL: i64 = 167;
    pub const PROCESS_MADVISE: i64 = 440;
}

/// PIDFD_SELF_THREAD (include/uapi/linux/fcntl.h): the caller.
const PIDFD_SELF: i64 = -10_000;
const PR_SET_MEMORY_MERGE: u64 = 67;
const PR_GET_MEMORY_MERGE: u64 = 68;

/// A stop is ended when it has taken so long: with the call under way, and with stopping and leaving, that is about a
/// millisecond.
const STOP: Duration = Duration::from_micros(400);
/// What one call is meant to take at most.
const CALL: Duration = Duration::from_micros(250);
/// A kernel call takes at most 2 GiB less a page of a vector (MAX_RW_COUNT) and drops the rest without a word.
const LARGEST: u64 = 1 << 30;
/// Unmerging copies pages, at some microseconds each, and what has none merged says nothing of what comes behind it:
/// how many bytes to begin with, at least and at most.
const FIRST_UNMERGE: u64 = 128 << 10;
const SMALLEST: u64 = 64 << 10;
const MOST_UNMERGE: u64 = 512 << 10;
/// `struct iovec` of the target.
const VECTOR: usize = 16;
/// Ranges in a call, each of which may split a region: to begin with, at least and at most.
const FIRST_RANGES: usize = 128;
const FEWEST_RANGES: usize = 16;
const MOST_RANGES: usize = ROOM / VECTOR;

/// The number of the advice (include/uapi/asm-generic/mman-common.h).
fn code(advice: Advice) -> u64 {
    match advice {
        Advice::Mergeable => 12,
        Advice::Unmergeable => 13,
    }
}

/// Give advice about ranges.
pub fn advise(process: &LiveProcess<'_>, advice: Advice, ranges: &[AddressRange]) -> Result<Effect, Refusal> {
    let (wanted, mut missed) = revalidate(&observe::regions(process)?, advice, ranges);
    let mut stops = Vec::new();
    if wanted.is_empty() {
        return Ok(Effect { stops, missed });
    }
    let target = target(process)?;
    let batched = !target.is_filtered().map_err(refusal)?;
    let huge =
        if wanted.iter().any(|range| range.bytes().0 > FIRST_UNMERGE) { huge(process, &wanted) } else { Vec::new() };
    let mut work = Work::new(advice, wanted, huge, batched);
    while !work.ranges.is_empty() {
        match inject::inside(&target, |inside| work.step(inside)) {
            Ok(((), stopped)) => {
                stops.push(stopped);
                fault::point("between two stops");
                if !work.ranges.is_empty() {
                    // The target gets at least as much time as was taken from it.
                    std::thread::sleep(stopped.min(Duration::from_millis(5)));
                }
            }
            // What was done stays done, and is told.
            Err(error) if work.begun > 0 && error != inject::Error::Gone => {
                let why = refusal(error).to_string();
                work.ranges.drain(..).for_each(|range| work.missed.push((range, why.clone())));
            }
            Err(error) => return Err(refusal(error)),
        }
    }
    for (range, why) in work.missed {
        miss(&mut missed, range, why);
    }
    missed.sort_by_key(|&(range, _)| range);
    Ok(Effect { stops, missed })
}

/// Enrol or withdraw a process as a whole. A kernel that cannot enrol one has none to withdraw.
pub fn merge_any(process: &LiveProcess<'_>, on: bool) -> Result<Effect, Refusal> {
    let (answer, stopped) = prctl(process, [PR_SET_MEMORY_MERGE, u64::from(on), 0, 0, 0, 0])?;
    match errno(answer) {
        Some(Errno::INVAL) if on => Err(Refusal::Unsupported(
            "this kernel cannot enrol whole processes (PR_SET_MEMORY_MERGE, 6.4): enrol ranges".to_owned(),
        )),
        None | Some(Errno::INVAL) => Ok(Effect { stops: vec![stopped], missed: Vec::new() }),
        Some(Errno::PERM) => Err(Refusal::Denied(
            "this kernel lets only processes with CAP_SYS_RESOURCE be enrolled whole: enrol ranges".to_owned(),
        )),
        Some(errno) => Err(Refusal::Failed(format!("PR_SET_MEMORY_MERGE: {errno}"))),
    }
}

/// Whether a process is enrolled as a whole (kernel/sys.c). None is where the kernel does not know of it.
pub fn ask_merge_any(process: &LiveProcess<'_>) -> Result<bool, Refusal> {
    let (answer, _) = prctl(process, [PR_GET_MEMORY_MERGE, 0, 0, 0, 0, 0])?;
    match errno(answer) {
        None => Ok(answer == 1),
        Some(Errno::INVAL) => Ok(false),
        Some(errno) => Err(Refusal::Failed(format!("PR_GET_MEMORY_MERGE: {errno}"))),
    }
}

/// What prctl(2) answers from within a process, and for how long a thread was stopped.
fn prctl(process: &LiveProcess<'_>, arguments: [u64; 6]) -> Result<(i64, Duration), Refusal> {
    inject::inside(&target(process)?, |inside| inside.call(number::PRCTL, arguments)).map_err(refusal)
}

/// The huge pages in some ranges, one by one and ascending. None where they cannot be seen.
fn huge(process: &LiveProcess<'_>, ranges: &VecDeque<AddressRange>) -> Vec<AddressRange> {
    let Ok(bytes) = observe::huge_page_bytes(process.host) else { return Vec::new() };
    let page = pagefold_host::Host::page_size(process.host).bytes();
    let runs = process.resident(&ranges.iter().copied().collect::<Vec<_>>()).unwrap_or_default();
    let of = |run: Run| {
        let end = run.address + u64::from(run.pages) * page;
        (run.address / bytes * bytes..end).step_by(bytes as usize)
    };
    let starts = runs.into_iter().filter(|run| run.huge).flat_map(of);
    let mut pages: Vec<_> = starts.map(|start| AddressRange { start, end: start + bytes }).collect();
    pages.dedup();
    pages
}

fn target(process: &LiveProcess<'_>) -> Result<Target, Refusal> {
    Target::new(process.directory(), process.id().pid.0.cast_signed()).map_err(refusal)
}

fn errno(answer: i64) -> Option<Errno> {
    (answer < 0).then(|| Errno::from_raw_os_error(i32::try_from(-answer).unwrap_or(i32::MAX)))
}

/// Which parts of the ranges the advice would change, and which it cannot, with why.
fn revalidate(
    regions: &[Region],
    advice: Advice,
    ranges: &[AddressRange],
) -> (VecDeque<AddressRange>, Vec<(AddressRange, String)>) {
    let mut wanted: VecDeque<AddressRange> = VecDeque::new();
    let mut missed = Vec::new();
    let unmapped = || NOT_MAPPED.to_owned();
    for &range in ranges {
        let mut at = range.start;
        let first = regions.partition_point(|region| region.range.end <= range.start);
        for region in &regions[first..] {
            let Some(part) = region.range.overlap(range) else { break };
            if at < part.start {
                miss(&mut missed, AddressRange { start: at, end: part.start }, unmapped());
            }
            at = part.end;
            if let Some(why) = region.ineligible() {
                miss(&mut missed, part, format!("cannot be merged: {}", why.phrase()));
            } else if region.flags.has(VmFlags::MERGEABLE) == (advice == Advice::Unmergeable) {
                match wanted.back_mut() {
                    Some(last) if last.end == part.start => last.end = part.end,
                    _ => wanted.push_back(part),
                }
            }
        }
        if at < range.end {
            miss(&mut missed, AddressRange { start: at, end: range.end }, unmapped());
        }
    }
    (wanted, missed)
}

/// What is still to be advised.
struct Work {
    advice: Advice,
    ranges: VecDeque<AddressRange>,
    /// Huge pages in them, ascending.
    huge: Vec<AddressRange>,
    missed: Vec<(AddressRange, String)>,
    /// Whether the kernel takes many ranges in a call.
    batched: bool,
    /// At most so many bytes in a call.
    bytes: u64,
    /// At most so many ranges in a call.
    count: usize,
    /// How many calls were begun: one that was not seen to end may have changed something.
    begun: usize,
}

impl Work {
    fn new(advice: Advice, ranges: VecDeque<AddressRange>, huge: Vec<AddressRange>, batched: bool) -> Self {
        let bytes = if advice == Advice::Mergeable { LARGEST } else { FIRST_UNMERGE };
        Self { advice, ranges, huge, missed: Vec::new(), batched, bytes, count: FIRST_RANGES, begun: 0 }
    }

    /// Do as much as fits in one stop.
    fn step(&mut self, inside: &Inside<'_>) -> Result<(), inject::Error> {
        let most = if self.advice == Advice::Mergeable { LARGEST } else { MOST_UNMERGE };
        while !self.ranges.is_empty() {
            let began = Instant::now();
            if self.batched {
                self.many(inside)?
            } else {
                self.one(inside).map(|_| ())?
            }
            let took = began.elapsed();
            if took < CALL / 2 {
                self.bytes = (self.bytes * 2).min(most);
                self.count = (self.count * 2).min(MOST_RANGES);
            } else if took > CALL * 2 {
                self.bytes = (self.bytes / 2).max(SMALLEST);
                self.count = (self.count / 2).max(FEWEST_RANGES);
            }
            if inside.stopped() > STOP {
                break;
            }
        }
        Ok(())
    }

    /// The front of a range, so many bytes of it and the rest of the huge page that would be cut. In that nothing is
    /// merged, so that it takes next to no time.
    fn part(&self, range: AddressRange, bytes: u64) -> AddressRange {
        let end = range.start.saturating_add(bytes);
        let next = self.huge.partition_point(|page| page.end <= end);
        let end = self.huge.get(next).filter(|page| page.start < end).map_or(end, |page| page.end);
        AddressRange { start: range.start, end: range.end.min(end) }
    }

    /// The first ranges, as far as fits in one call.
    fn batch(&self) -> Vec<AddressRange> {
        let mut left = self.bytes;
        let mut batch = Vec::new();
        for &range in self.ranges.iter().take(self.count) {
            let part = self.part(range, left);
            left = left.saturating_sub(part.bytes().0);
            batch.push(part);
            if left == 0 {
                break;
            }
        }
        batch
    }

    /// Take so many bytes off the front.
    fn advance(&mut self, mut bytes: u64) {
        while let Some(first) = self.ranges.front_mut().filter(|_| bytes > 0) {
            let len = first.bytes().0;
            if bytes < len {
                first.start += bytes;
                return;
            }
            bytes -= len;
            self.ranges.pop_front();
        }
    }

    fn many(&mut self, inside: &Inside<'_>) -> Result<(), inject::Error> {
        let batch = self.batch();
        let vectors: Vec<u8> =
            batch.iter().flat_map(|range| [range.start, range.bytes().0]).flat_map(u64::to_ne_bytes).collect();
        let place = inside.place(&vectors)?;
        let arguments = [PIDFD_SELF.cast_unsigned(), place, batch.len() as u64, code(self.advice), 0, 0];
        self.begun += 1;
        let answer = inside.call(number::PROCESS_MADVISE, arguments)?;
        let whole: u64 = batch.iter().map(|range| range.bytes().0).sum();
        let done = answer.max(0).cast_unsigned();
        self.advance(done);
        if done < whole {
            // It stopped at a range that it does not take, or takes nothing of the kind at all: one by one tells.
            let taken = self.one(inside)?;
            let unknown = matches!(errno(answer), Some(Errno::BADF | Errno::INVAL | Errno::PERM | Errno::NOSYS));
            self.batched = !(taken && unknown);
        }
        Ok(())
    }

    /// The first range, as far as fits in one call; whether the kernel took it.
    fn one(&mut self, inside: &Inside<'_>) -> Result<bool, inject::Error> {
        let Some(&range) = self.ranges.front() else { return Ok(true) };
        let range = self.part(range, self.bytes);
        let bytes = range.bytes().0;
        self.begun += 1;
        let answer = inside.call(number::MADVISE, [range.start, bytes, code(self.advice), 0, 0, 0])?;
        self.advance(bytes);
        if let Some(errno) = errno(answer) {
            self.missed.push((range, words(errno)));
            return Ok(false);
        }
        Ok(true)
    }
}

/// Why a range was not taken (mm/madvise.c: `madvise_walk_vmas` goes on behind a hole, and `madvise_vma_behavior` turns
/// each want of memory, and of regions to split into, into EAGAIN).
fn words(errno: Errno) -> String {
    match errno {
        Errno::NOMEM => format!("{NOT_MAPPED} in places, the others were taken"),
        Errno::AGAIN => "the process has vm.max_map_count regions, or the kernel no memory for it".to_owned(),
        Errno::INVAL => "this kernel has no KSM".to_owned(),
        errno => format!("refused by the kernel: {errno}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, end: u64) -> AddressRange {
        AddressRange { start, end }
    }

    fn region(start: u64, end: u64, flags: &[VmFlags]) -> Region {
        let flags = flags.iter().fold(VmFlags::default(), |all, &flag| all.with(flag));
        Region { flags, ..Region::empty(range(start, end)) }
    }

    #[test]
    fn what_changed_since_is_left_out_and_named() {
        let regions = [
            region(0x1000, 0x3000, &[]),
            region(0x3000, 0x4000, &[VmFlags::MERGEABLE]),
            region(0x5000, 0x6000, &[VmFlags::SHARED]),
            region(0x6000, 0x9000, &[]),
        ];
        let (wanted, missed) = revalidate(&regions, Advice::Mergeable, &[range(0, 0x7000), range(0x8000, 0xa000)]);
        assert_eq!(wanted, [range(0x1000, 0x3000), range(0x6000, 0x7000), range(0x8000, 0x9000)]);
        let missed: Vec<_> = missed.iter().map(|(range, why)| (*range, why.as_str())).collect();
        let unmapped = "not mapped any more";
        assert_eq!(
            missed,
            [
                (range(0, 0x1000), unmapped),
                (range(0x4000, 0x5000), unmapped),
                (range(0x5000, 0x6000), "cannot be merged: shared memory"),
                (range(0x9000, 0xa000), unmapped),
            ]
        );
        let (wanted, _) = revalidate(&regions, Advice::Unmergeable, &[range(0, 0x7000)]);
        assert_eq!(wanted, [range(0x3000, 0x4000)]);
    }

    #[test]
    fn a_call_takes_no_more_than_its_share() {
        let mut work = Work::new(
            Advice::Mergeable,
            [range(0, LARGEST + 0x1000), range(LARGEST * 2, LARGEST * 3)].into(),
            Vec::new(),
            true,
        );
        assert_eq!(work.batch(), [range(0, LARGEST)]);
        work.advance(LARGEST);
        assert_eq!(work.batch(), [range(LARGEST, LARGEST + 0x1000), range(LARGEST * 2, LARGEST * 3 - 0x1000)]);
        work.advance(0x1000);
        assert_eq!(work.batch(), [range(LARGEST * 2, LARGEST * 3)]);
        work.advance(LARGEST);
        assert!(work.batch().is_empty());
    }

    #[test]
    fn no_part_ends_in_a_huge_page() {
        let huge = vec![range(0x20_0000, 0x40_0000), range(0x60_0000, 0x80_0000)];
        let mut work = Work::new(Advice::Unmergeable, [range(0x1f_0000, 0x61_0000)].into(), huge, true);
        work.bytes = SMALLEST;
        let mut ends = Vec::new();
        while let [part] = work.batch()[..] {
            ends.push(part.end);
            work.advance(part.bytes().0);
        }
        assert_eq!(ends[..3], [0x20_0000, 0x40_0000, 0x41_0000]);
        assert_eq!(ends[ends.len() - 2..], [0x60_0000, 0x61_0000], "not beyond what was asked for");
    }
}
