//! Memory policies of mappings (mbind(2)), set by a call within their process: the kernel has no call for another one.
//!
//! Mirrors mm/mempolicy.c (6.18). The call moves no memory and looks at no page, so a stop of one thread usually takes
//! less than a millisecond, and longer while another program reads `smaps` of the process. NUMA balancing leaves memory with such a policy where it is (`vma_policy_mof`).

use super::{action_error, errno_from_result, inject_target, push_missed_range};
use crate::process::LiveProcess;
use pagefold_base::AddressRange;
use pagefold_base::memory::MemoryPolicy;
use pagefold_host::action::{ActionError, ActionOutcome, Exchange, MissedReason};
use pagefold_host::{ProcessHandle, parse};
use pagefold_sys::inject::{self, InjectError, StoppedThread};
use rustix::io::Errno;

#[cfg(target_arch = "x86_64")]
const MBIND: i64 = 237;
#[cfg(target_arch = "aarch64")]
const MBIND: i64 = 235;

/// Modes (include/uapi/linux/mempolicy.h).
const MPOL_DEFAULT: u64 = 0;
const MPOL_PREFERRED: u64 = 1;

/// Ranges for which one stop makes calls. Each call waits for programs that read `smaps` of the process at this moment.
const MAX_RANGES_PER_STOP: usize = 16;

/// Set the policy of the parts of ranges that have the expected one now.
pub fn set_policy(
    process: &LiveProcess<'_>,
    ranges: &[AddressRange],
    policy: &Exchange<MemoryPolicy>,
) -> Result<ActionOutcome, ActionError> {
    let policies = parse::memory_policies(&process.read("numa_maps")?);
    let mappings = parse::maps(&process.read("maps")?)?;
    let mappings: Vec<(AddressRange, &str)> = mappings
        .iter()
        .filter_map(|mapping| Some((mapping.range, policies.get(&mapping.range.start)?.as_str())))
        .collect();
    let (waiting, missed_ranges) = revalidate(&mappings, ranges, policy);
    let mut outcome = ActionOutcome { missed_ranges, unchanged: waiting.is_empty(), ..ActionOutcome::default() };
    if waiting.is_empty() {
        return Ok(outcome);
    }
    let target = inject_target(process)?;
    for (position, ranges) in waiting.chunks(MAX_RANGES_PER_STOP).enumerate() {
        match inject::with_stopped_thread(&target, |thread| bind_ranges(thread, ranges, policy.to)) {
            Ok((results, stop_duration)) => {
                outcome.stop_durations.push(stop_duration);
                let refused = ranges.iter().zip(results).filter_map(|(&range, why)| Some((range, why?)));
                outcome.missed_ranges.extend(refused);
            }
            // The policies of the stops before stay, and are reported.
            Err(error) if position > 0 && error != InjectError::Vanished => {
                let why = MissedReason::Refused(action_error(error).to_string());
                outcome.missed_ranges.extend(ranges.iter().map(|&range| (range, why.clone())));
            }
            Err(error) => return Err(action_error(error)),
        }
    }
    outcome.missed_ranges.sort_by_key(|&(range, _)| range);
    Ok(outcome)
}

/// The parts of ranges whose mappings have the expected policy now, and those that have another one or are not mapped.
/// Parts that have the new one already are neither. The kernel joins and splits mappings: `mappings` are those of now,
/// ascending, with their policies.
fn revalidate(
    mappings: &[(AddressRange, &str)],
    ranges: &[AddressRange],
    policy: &Exchange<MemoryPolicy>,
) -> (Vec<AddressRange>, Vec<(AddressRange, MissedReason)>) {
    let (from, to) = (policy.from.to_string(), policy.to.to_string());
    let mut waiting: Vec<AddressRange> = Vec::new();
    let mut missed = Vec::new();
    for &range in ranges {
        let mut checked_until = range.start;
        let first = mappings.partition_point(|(mapping, _)| mapping.end <= range.start);
        for (mapping, current) in &mappings[first..] {
            let Some(part) = mapping.overlap(range) else { break };
            if checked_until < part.start {
                let hole = AddressRange { start: checked_until, end: part.start };
                push_missed_range(&mut missed, hole, MissedReason::NotMapped);
            }
            checked_until = part.end;
            if *current == from {
                match waiting.last_mut() {
                    Some(last) if last.end == part.start => last.end = part.end,
                    _ => waiting.push(part),
                }
            } else if *current != to {
                push_missed_range(&mut missed, part, MissedReason::OtherPolicy((*current).to_owned()));
            }
        }
        if checked_until < range.end {
            let hole = AddressRange { start: checked_until, end: range.end };
            push_missed_range(&mut missed, hole, MissedReason::NotMapped);
        }
    }
    (waiting, missed)
}

/// Set the policy of each range. The result has the reason for each one that the kernel refused.
fn bind_ranges(
    thread: &StoppedThread<'_>,
    ranges: &[AddressRange],
    policy: MemoryPolicy,
) -> Result<Vec<Option<MissedReason>>, InjectError> {
    let (mode, node_mask) = match policy {
        MemoryPolicy::Default => (MPOL_DEFAULT, Vec::new()),
        MemoryPolicy::Prefer(node) => (MPOL_PREFERRED, node_mask(node)),
    };
    // The kernel reads one bit less than it is told (`get_nodes`).
    let max_node = if node_mask.is_empty() { 0 } else { 8 * node_mask.len() as u64 + 1 };
    let address = if node_mask.is_empty() { 0 } else { thread.write_arguments(&node_mask)? };
    let bind = |range: &AddressRange| {
        let arguments = [range.start, range.bytes().0, mode, address, max_node, 0];
        Ok(errno_from_result(thread.call_syscall(MBIND, arguments)?).map(refusal))
    };
    ranges.iter().map(bind).collect()
}

/// The mask of a single node, in the words of the kernel (unsigned long).
fn node_mask(node: u32) -> Vec<u8> {
    let mut words = vec![0u64; node as usize / 64 + 1];
    words[node as usize / 64] = 1 << (node % 64);
    words.into_iter().flat_map(u64::to_ne_bytes).collect()
}

fn refusal(errno: Errno) -> MissedReason {
    match errno {
        Errno::FAULT => {
            MissedReason::Refused("a part of it is no longer mapped, so nothing of it was changed".to_owned())
        }
        Errno::INVAL => {
            MissedReason::Refused("its cpuset does not permit the node, or the node has no memory".to_owned())
        }
        errno => MissedReason::Refused(format!("mbind: {errno}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, end: u64) -> AddressRange {
        AddressRange { start, end }
    }

    #[test]
    fn joined_and_split_mappings_are_found() {
        let undo = Exchange { from: MemoryPolicy::Prefer(1), to: MemoryPolicy::Default };
        let check = |mappings: &[(AddressRange, &str)]| revalidate(mappings, &[range(10, 20), range(20, 30)], &undo);
        // The kernel has joined the two mappings.
        assert_eq!(check(&[(range(5, 40), "prefer:1")]), (vec![range(10, 30)], Vec::new()));
        // Another program has set a policy in the middle of the first one, and a part of the second one is gone.
        let (waiting, missed) = check(&[
            (range(10, 14), "prefer:1"),
            (range(14, 16), "bind:0"),
            (range(16, 20), "prefer:1"),
            (range(20, 22), "default"),
            (range(24, 30), "prefer:1"),
        ]);
        assert_eq!(waiting, [range(10, 14), range(16, 20), range(24, 30)]);
        let expected =
            [(range(14, 16), MissedReason::OtherPolicy("bind:0".to_owned())), (range(22, 24), MissedReason::NotMapped)];
        assert_eq!(missed, expected);
        assert_eq!(check(&[]).1, [(range(10, 30), MissedReason::NotMapped)]);
    }

    #[test]
    fn node_mask_has_whole_words() {
        assert_eq!(node_mask(1), [2, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(node_mask(64), [[0; 8], [1, 0, 0, 0, 0, 0, 0, 0]].concat());
    }
}
