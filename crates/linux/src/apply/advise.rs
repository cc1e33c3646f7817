//! Advice (`madvise`) about a process's memory, made inside that process.
//!
//! The ranges were chosen some time ago. Right before the advice they are compared with `smaps`; ranges that no longer
//! qualify are left out and reported. The rest is advised in as few stops of one thread as possible, each of about a
//! millisecond. Where the kernel supports it (any advice from 6.13, by `PIDFD_SELF_THREAD` from 6.15), one
//! `process_madvise(2)` on the target's own memory takes up to 256 ranges. Otherwise, and where that call ends early,
//! `madvise(2)` takes them one by one.
//!
//! A range that takes longer than a stop is advised in parts, so for a moment there is a region boundary inside it.
//! Parts end at huge page boundaries, because the kernel would split a huge page there (mm/huge_memory.c,
//! `vma_adjust_trans_huge`). Mirrors mm/madvise.c and mm/ksm.c (6.18). Limits: unenrolling a whole process
//! (`PR_SET_MEMORY_MERGE` off) is one call, and stops the thread until all its pages are unmerged.

use super::{action_error, errno_from_result, inject_target, push_missed_range};
use crate::process::LiveProcess;
use pagefold_base::AddressRange;
use pagefold_base::region::{Region, VmFlags};
use pagefold_host::action::{ActionError, ActionOutcome, MergeAdvice, MissedReason};
use pagefold_host::{PageRun, ProcessHandle, observe};
use pagefold_sys::fault;
use pagefold_sys::inject::{self, ARGUMENT_SPACE_BYTES, StoppedThread};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

#[cfg(target_arch = "x86_64")]
mod syscall_numbers {
    pub const MADVISE: i64 = 28;
    pub const PRCTL: i64 = 157;
    pub const PROCESS_MADVISE: i64 = 440;
}
#[cfg(target_arch = "aarch64")]
mod syscall_numbers {
    pub const MADVISE: i64 = 233;
    pub const PRCTL: i64 = 167;
    pub const PROCESS_MADVISE: i64 = 440;
}

/// PIDFD_SELF_THREAD (include/uapi/linux/fcntl.h): the calling thread.
const PIDFD_SELF_THREAD: i64 = -10_000;
const PR_SET_MEMORY_MERGE: u64 = 67;
const PR_GET_MEMORY_MERGE: u64 = 68;

/// A stop ends after this time. With the current call, and with stopping and releasing the thread, it takes about a
/// millisecond.
const MAX_STOP_DURATION: Duration = Duration::from_micros(400);
/// The target for the duration of one call.
const TARGET_CALL_DURATION: Duration = Duration::from_micros(250);
/// A kernel call processes at most 2 GiB less a page of a vector (MAX_RW_COUNT) and ignores the rest silently.
const MAX_ADVISE_BYTES: u64 = 1 << 30;
/// Bytes of one unmerge call: initial, minimum, maximum. Unmerging copies pages, at some microseconds each. A range
/// without merged pages does not predict the cost of the next one.
const INITIAL_UNMERGE_BYTES: u64 = 128 << 10;
const MIN_UNMERGE_BYTES: u64 = 64 << 10;
const MAX_UNMERGE_BYTES: u64 = 512 << 10;
/// `struct iovec` of the target.
const IOVEC_BYTES: usize = 16;
/// Ranges in a call, each of which may split a region: initial, minimum, maximum.
const INITIAL_RANGES_PER_CALL: usize = 128;
const MIN_RANGES_PER_CALL: usize = 16;
const MAX_RANGES_PER_CALL: usize = ARGUMENT_SPACE_BYTES / IOVEC_BYTES;

/// The number of the advice (include/uapi/asm-generic/mman-common.h).
fn madvise_code(advice: MergeAdvice) -> u64 {
    match advice {
        MergeAdvice::Mergeable => 12,
        MergeAdvice::Unmergeable => 13,
    }
}

/// Advise ranges.
pub fn advise(
    process: &LiveProcess<'_>,
    advice: MergeAdvice,
    ranges: &[AddressRange],
) -> Result<ActionOutcome, ActionError> {
    let (revalidated, mut missed) = revalidate(&observe::regions(process)?, advice, ranges);
    let mut stop_durations = Vec::new();
    if revalidated.is_empty() {
        return Ok(ActionOutcome { stop_durations, missed_ranges: missed, ..ActionOutcome::default() });
    }
    let target = inject_target(process)?;
    let batched = !target.has_seccomp().map_err(action_error)?;
    let huge_pages = if revalidated.iter().any(|range| range.bytes().0 > INITIAL_UNMERGE_BYTES) {
        list_huge_pages(process, &revalidated)
    } else {
        Vec::new()
    };
    let mut work = AdviceWork::new(advice, revalidated, huge_pages, batched);
    while !work.ranges.is_empty() {
        match inject::with_stopped_thread(&target, |thread| work.run_one_stop(thread)) {
            Ok(((), stop_duration)) => {
                stop_durations.push(stop_duration);
                fault::point("between two stops");
                if !work.ranges.is_empty() {
                    // The target runs at least as long as it was stopped.
                    std::thread::sleep(stop_duration.min(Duration::from_millis(5)));
                }
            }
            // Completed work stays, and is reported.
            Err(error) if work.started_calls > 0 && error != inject::InjectError::Vanished => {
                let why = MissedReason::Refused(action_error(error).to_string());
                work.ranges.drain(..).for_each(|range| work.missed_ranges.push((range, why.clone())));
            }
            Err(error) => return Err(action_error(error)),
        }
    }
    for (range, why) in work.missed_ranges {
        push_missed_range(&mut missed, range, why);
    }
    missed.sort_by_key(|&(range, _)| range);
    Ok(ActionOutcome { stop_durations, missed_ranges: missed, ..ActionOutcome::default() })
}

/// Enroll or unenroll a process as a whole. On a kernel that cannot enroll one, there is none to unenroll.
pub fn set_merge_any(process: &LiveProcess<'_>, enable: bool) -> Result<ActionOutcome, ActionError> {
    let (answer, stop_duration) = inject_prctl(process, [PR_SET_MEMORY_MERGE, u64::from(enable), 0, 0, 0, 0])?;
    match errno_from_result(answer) {
        Some(Errno::INVAL) if enable => Err(ActionError::Unsupported(
            "this kernel cannot enroll whole processes (PR_SET_MEMORY_MERGE, 6.4): enroll ranges".to_owned(),
        )),
        None | Some(Errno::INVAL) => {
            Ok(ActionOutcome { stop_durations: vec![stop_duration], ..ActionOutcome::default() })
        }
        Some(Errno::PERM) => Err(ActionError::Denied(
            "this kernel enrolls whole processes only with CAP_SYS_RESOURCE: enroll ranges".to_owned(),
        )),
        Some(errno) => Err(ActionError::Failed(format!("PR_SET_MEMORY_MERGE: {errno}"))),
    }
}

/// Whether a process is enrolled as a whole (kernel/sys.c). False on a kernel without this feature.
pub fn ask_merge_any(process: &LiveProcess<'_>) -> Result<bool, ActionError> {
    let (answer, _) = inject_prctl(process, [PR_GET_MEMORY_MERGE, 0, 0, 0, 0, 0])?;
    match errno_from_result(answer) {
        None => Ok(answer == 1),
        Some(Errno::INVAL) => Ok(false),
        Some(errno) => Err(ActionError::Failed(format!("PR_GET_MEMORY_MERGE: {errno}"))),
    }
}

/// The result of prctl(2) inside a process, and for how long a thread was stopped.
fn inject_prctl(process: &LiveProcess<'_>, arguments: [u64; 6]) -> Result<(i64, Duration), ActionError> {
    inject::with_stopped_thread(&inject_target(process)?, |thread| {
        thread.call_syscall(syscall_numbers::PRCTL, arguments)
    })
    .map_err(action_error)
}

/// The huge pages in these ranges, in ascending order. Empty if they cannot be read.
fn list_huge_pages(process: &LiveProcess<'_>, ranges: &VecDeque<AddressRange>) -> Vec<AddressRange> {
    let Ok(huge_bytes) = observe::huge_page_bytes(process.host) else { return Vec::new() };
    let page_bytes = pagefold_host::Host::page_size(process.host).bytes();
    let runs = process.resident(&ranges.iter().copied().collect::<Vec<_>>()).unwrap_or_default();
    let page_starts = |run: PageRun| {
        let end = run.address + u64::from(run.pages) * page_bytes;
        (run.address / huge_bytes * huge_bytes..end).step_by(huge_bytes as usize)
    };
    let starts = runs.into_iter().filter(|run| run.huge).flat_map(page_starts);
    let mut pages: Vec<_> = starts.map(|start| AddressRange { start, end: start + huge_bytes }).collect();
    pages.dedup();
    pages
}

/// The parts of the ranges that the advice would change, and the parts that it cannot change, with the reason.
fn revalidate(
    regions: &[Region],
    advice: MergeAdvice,
    ranges: &[AddressRange],
) -> (VecDeque<AddressRange>, Vec<(AddressRange, MissedReason)>) {
    let mut advisable: VecDeque<AddressRange> = VecDeque::new();
    let mut missed = Vec::new();
    for &range in ranges {
        let mut checked_until = range.start;
        let first = regions.partition_point(|region| region.range.end <= range.start);
        for region in &regions[first..] {
            let Some(part) = region.range.overlap(range) else { break };
            if checked_until < part.start {
                push_missed_range(
                    &mut missed,
                    AddressRange { start: checked_until, end: part.start },
                    MissedReason::NotMapped,
                );
            }
            checked_until = part.end;
            if let Some(why) = region.ineligible() {
                let why = MissedReason::Refused(format!("cannot be merged: {}", why.phrase()));
                push_missed_range(&mut missed, part, why);
            } else if region.flags.has(VmFlags::MERGEABLE) == (advice == MergeAdvice::Unmergeable) {
                match advisable.back_mut() {
                    Some(last) if last.end == part.start => last.end = part.end,
                    _ => advisable.push_back(part),
                }
            }
        }
        if checked_until < range.end {
            push_missed_range(
                &mut missed,
                AddressRange { start: checked_until, end: range.end },
                MissedReason::NotMapped,
            );
        }
    }
    (advisable, missed)
}

/// The remaining advice.
struct AdviceWork {
    advice: MergeAdvice,
    ranges: VecDeque<AddressRange>,
    /// Huge pages in these ranges, ascending.
    huge_pages: Vec<AddressRange>,
    missed_ranges: Vec<(AddressRange, MissedReason)>,
    /// Whether the kernel accepts many ranges in a call.
    batched: bool,
    /// The maximum number of bytes in a call.
    bytes_per_call: u64,
    /// The maximum number of ranges in a call.
    ranges_per_call: usize,
    /// How many calls were started. A call whose end was not seen may have changed something.
    started_calls: usize,
}

impl AdviceWork {
    fn new(advice: MergeAdvice, ranges: VecDeque<AddressRange>, huge_pages: Vec<AddressRange>, batched: bool) -> Self {
        let bytes_per_call = if advice == MergeAdvice::Mergeable { MAX_ADVISE_BYTES } else { INITIAL_UNMERGE_BYTES };
        Self {
            advice,
            ranges,
            huge_pages,
            missed_ranges: Vec::new(),
            batched,
            bytes_per_call,
            ranges_per_call: INITIAL_RANGES_PER_CALL,
            started_calls: 0,
        }
    }

    /// Do as much as fits in one stop.
    fn run_one_stop(&mut self, thread: &StoppedThread<'_>) -> Result<(), inject::InjectError> {
        let max_bytes = if self.advice == MergeAdvice::Mergeable { MAX_ADVISE_BYTES } else { MAX_UNMERGE_BYTES };
        while !self.ranges.is_empty() {
            let start = Instant::now();
            if self.batched {
                self.advise_batch(thread)?
            } else {
                self.advise_first_range(thread).map(|_| ())?
            }
            let duration = start.elapsed();
            if duration < TARGET_CALL_DURATION / 2 {
                self.bytes_per_call = (self.bytes_per_call * 2).min(max_bytes);
                self.ranges_per_call = (self.ranges_per_call * 2).min(MAX_RANGES_PER_CALL);
            } else if duration > TARGET_CALL_DURATION * 2 {
                self.bytes_per_call = (self.bytes_per_call / 2).max(MIN_UNMERGE_BYTES);
                self.ranges_per_call = (self.ranges_per_call / 2).max(MIN_RANGES_PER_CALL);
            }
            if thread.stopped_for() > MAX_STOP_DURATION {
                break;
            }
        }
        Ok(())
    }

    /// The front of a range: this many bytes, extended to the end of a huge page that would be cut. A huge page has no
    /// merged pages, so the extension takes almost no time.
    fn clip_front(&self, range: AddressRange, max_bytes: u64) -> AddressRange {
        let end = range.start.saturating_add(max_bytes);
        let position = self.huge_pages.partition_point(|page| page.end <= end);
        let end = self.huge_pages.get(position).filter(|page| page.start < end).map_or(end, |page| page.end);
        AddressRange { start: range.start, end: range.end.min(end) }
    }

    /// The first ranges that fit in one call.
    fn next_batch(&self) -> Vec<AddressRange> {
        let mut remaining_bytes = self.bytes_per_call;
        let mut batch = Vec::new();
        for &range in self.ranges.iter().take(self.ranges_per_call) {
            let part = self.clip_front(range, remaining_bytes);
            remaining_bytes = remaining_bytes.saturating_sub(part.bytes().0);
            batch.push(part);
            if remaining_bytes == 0 {
                break;
            }
        }
        batch
    }

    /// Remove this many bytes from the front.
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

    fn advise_batch(&mut self, thread: &StoppedThread<'_>) -> Result<(), inject::InjectError> {
        let batch = self.next_batch();
        let vectors: Vec<u8> =
            batch.iter().flat_map(|range| [range.start, range.bytes().0]).flat_map(u64::to_ne_bytes).collect();
        let address = thread.write_arguments(&vectors)?;
        let arguments =
            [PIDFD_SELF_THREAD.cast_unsigned(), address, batch.len() as u64, madvise_code(self.advice), 0, 0];
        self.started_calls += 1;
        let answer = thread.call_syscall(syscall_numbers::PROCESS_MADVISE, arguments)?;
        let batch_bytes: u64 = batch.iter().map(|range| range.bytes().0).sum();
        let advised_bytes = answer.max(0).cast_unsigned();
        self.advance(advised_bytes);
        if advised_bytes < batch_bytes {
            // It ended at a range that it refuses, or it does not support batches: advise one range to find out.
            let is_accepted = self.advise_first_range(thread)?;
            let is_unsupported =
                matches!(errno_from_result(answer), Some(Errno::BADF | Errno::INVAL | Errno::PERM | Errno::NOSYS));
            self.batched = !(is_accepted && is_unsupported);
        }
        Ok(())
    }

    /// Advise the first range, as far as it fits in one call. Returns whether the kernel accepted it.
    fn advise_first_range(&mut self, thread: &StoppedThread<'_>) -> Result<bool, inject::InjectError> {
        let Some(&range) = self.ranges.front() else { return Ok(true) };
        let range = self.clip_front(range, self.bytes_per_call);
        let bytes = range.bytes().0;
        self.started_calls += 1;
        let answer =
            thread.call_syscall(syscall_numbers::MADVISE, [range.start, bytes, madvise_code(self.advice), 0, 0, 0])?;
        self.advance(bytes);
        if let Some(errno) = errno_from_result(answer) {
            self.missed_ranges.push((range, refusal_reason(errno)));
            return Ok(false);
        }
        Ok(true)
    }
}

/// Why a range was refused. In mm/madvise.c `madvise_walk_vmas` continues after a hole, and `madvise_vma_behavior`
/// returns EAGAIN for a lack of memory or of regions.
fn refusal_reason(errno: Errno) -> MissedReason {
    MissedReason::Refused(match errno {
        Errno::NOMEM => return MissedReason::PartlyNotMapped,
        Errno::AGAIN => "the process has vm.max_map_count regions, or the kernel is out of memory".to_owned(),
        Errno::INVAL => "this kernel has no KSM".to_owned(),
        errno => format!("refused by the kernel: {errno}"),
    })
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
    fn changed_ranges_are_skipped_and_reported() {
        let regions = [
            region(0x1000, 0x3000, &[]),
            region(0x3000, 0x4000, &[VmFlags::MERGEABLE]),
            region(0x5000, 0x6000, &[VmFlags::SHARED]),
            region(0x6000, 0x9000, &[]),
        ];
        let (wanted, missed) = revalidate(&regions, MergeAdvice::Mergeable, &[range(0, 0x7000), range(0x8000, 0xa000)]);
        assert_eq!(wanted, [range(0x1000, 0x3000), range(0x6000, 0x7000), range(0x8000, 0x9000)]);
        let unmapped = || MissedReason::NotMapped;
        assert_eq!(
            missed,
            [
                (range(0, 0x1000), unmapped()),
                (range(0x4000, 0x5000), unmapped()),
                (range(0x5000, 0x6000), MissedReason::Refused("cannot be merged: shared memory".to_owned())),
                (range(0x9000, 0xa000), unmapped()),
            ]
        );
        let (wanted, _) = revalidate(&regions, MergeAdvice::Unmergeable, &[range(0, 0x7000)]);
        assert_eq!(wanted, [range(0x3000, 0x4000)]);
    }

    #[test]
    fn batch_stays_within_its_byte_limit() {
        let mut work = AdviceWork::new(
            MergeAdvice::Mergeable,
            [range(0, MAX_ADVISE_BYTES + 0x1000), range(MAX_ADVISE_BYTES * 2, MAX_ADVISE_BYTES * 3)].into(),
            Vec::new(),
            true,
        );
        assert_eq!(work.next_batch(), [range(0, MAX_ADVISE_BYTES)]);
        work.advance(MAX_ADVISE_BYTES);
        assert_eq!(
            work.next_batch(),
            [
                range(MAX_ADVISE_BYTES, MAX_ADVISE_BYTES + 0x1000),
                range(MAX_ADVISE_BYTES * 2, MAX_ADVISE_BYTES * 3 - 0x1000)
            ]
        );
        work.advance(0x1000);
        assert_eq!(work.next_batch(), [range(MAX_ADVISE_BYTES * 2, MAX_ADVISE_BYTES * 3)]);
        work.advance(MAX_ADVISE_BYTES);
        assert!(work.next_batch().is_empty());
    }

    #[test]
    fn batches_do_not_split_huge_pages() {
        let huge = vec![range(0x20_0000, 0x40_0000), range(0x60_0000, 0x80_0000)];
        let mut work = AdviceWork::new(MergeAdvice::Unmergeable, [range(0x1f_0000, 0x61_0000)].into(), huge, true);
        work.bytes_per_call = MIN_UNMERGE_BYTES;
        let mut ends = Vec::new();
        while let [part] = work.next_batch()[..] {
            ends.push(part.end);
            work.advance(part.bytes().0);
        }
        assert_eq!(ends[..3], [0x20_0000, 0x40_0000, 0x41_0000]);
        assert_eq!(ends[ends.len() - 2..], [0x60_0000, 0x61_0000], "not beyond the requested range");
    }
}
