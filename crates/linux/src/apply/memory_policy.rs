//! Memory policies of mappings (mbind(2)), set by a call within their process: the kernel has no call for another one.
//!
//! Mirrors mm/mempolicy.c (6.18). The call moves no memory and looks at no page, so a stop of one thread takes less than
//! a millisecond. NUMA balancing leaves memory with such a policy where it is (`vma_policy_mof`).

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

/// Mappings for which one stop makes calls.
const MAX_RANGES_PER_STOP: usize = 64;

/// Set the policy of ranges that have the expected one now.
pub fn set_policy(
    process: &LiveProcess<'_>,
    ranges: &[AddressRange],
    policy: &Exchange<MemoryPolicy>,
) -> Result<ActionOutcome, ActionError> {
    let current = parse::memory_policies(&process.read("numa_maps")?);
    let mut outcome = ActionOutcome::default();
    let mut waiting = Vec::new();
    for &range in ranges {
        match current.get(&range.start) {
            Some(text) if *text == policy.from.to_string() => waiting.push(range),
            // It is set already.
            Some(text) if *text == policy.to.to_string() => {}
            Some(text) => outcome.missed_ranges.push((range, MissedReason::OtherPolicy(text.clone()))),
            None => outcome.missed_ranges.push((range, MissedReason::NotMapped)),
        }
    }
    if waiting.is_empty() {
        outcome.unchanged = true;
        return Ok(outcome);
    }
    let target = inject_target(process)?;
    for (position, ranges) in waiting.chunks(MAX_RANGES_PER_STOP).enumerate() {
        match inject::with_stopped_thread(&target, |thread| bind_ranges(thread, ranges, policy.to)) {
            Ok((results, stop_duration)) => {
                outcome.stop_durations.push(stop_duration);
                let refused = ranges.iter().zip(results).filter_map(|(&range, why)| Some((range, why?)));
                refused.for_each(|(range, why)| push_missed_range(&mut outcome.missed_ranges, range, why));
            }
            // The policies of the stops before stay, and are reported.
            Err(error) if position > 0 && error != InjectError::Vanished => {
                let why = MissedReason::Refused(action_error(error).to_string());
                ranges.iter().for_each(|&range| outcome.missed_ranges.push((range, why.clone())));
            }
            Err(error) => return Err(action_error(error)),
        }
    }
    outcome.missed_ranges.sort_by_key(|&(range, _)| range);
    Ok(outcome)
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
        Errno::FAULT => MissedReason::PartlyNotMapped,
        Errno::INVAL => {
            MissedReason::Refused("its cpuset does not permit the node, or the node has no memory".to_owned())
        }
        errno => MissedReason::Refused(format!("mbind: {errno}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_mask_has_whole_words() {
        assert_eq!(node_mask(1), [2, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(node_mask(64), [[0; 8], [1, 0, 0, 0, 0, 0, 0, 0]].concat());
    }
}
