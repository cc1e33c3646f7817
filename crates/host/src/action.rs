//! What Pagefold changes on a host. Every effect is one value of [`Action`], performed by [`Host::apply`].
//!
//! Nothing else changes the host. Therefore a dry run is a run that stops before `apply`, and a test can make any action
//! fail. The journal written beforehand is complete: [`undo_actions`] computes the inverse of an action.

use crate::knob::Knob;
use crate::{Host, ProcessHandle, hold, observe, parse};
use pagefold_base::region::VmFlags;
use pagefold_base::{Absent, AddressRange, Pid, ProcessId};
use std::path::PathBuf;
use std::time::Duration;

/// One effect on a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Write a kernel setting.
    Write {
        /// The setting.
        knob: Knob,
        /// The value to write.
        value: String,
    },
    /// Advises ranges of a process (madvise(2)) from within it. The ranges are ascending, disjoint and consist of whole
    /// pages.
    Advise {
        /// The process.
        process: ProcessId,
        /// The advice.
        advice: MergeAdvice,
        /// The ranges.
        ranges: Vec<AddressRange>,
    },
    /// Enrolls a process whole, including later mappings, or unenrolls it (`PR_SET_MEMORY_MERGE`), from within it.
    /// Unenrolling unmerges.
    MergeAny {
        /// The process.
        process: ProcessId,
        /// Whether to enroll it.
        enable: bool,
    },
    /// Enrolls or unenrolls a memory backend of a virtual machine through QEMU's control socket (QMP `qom-set` of the
    /// backend's property `merge`). Unenrolling unmerges.
    GuestMerge {
        /// The QEMU process that must own the socket.
        process: ProcessId,
        /// The path of the socket.
        socket: PathBuf,
        /// The backend's path in QEMU's object tree: `/objects/pc.ram`.
        backend: String,
        /// Whether to enroll it.
        enable: bool,
    },
    /// Assembles huge pages again (`MADV_COLLAPSE`), from outside the process. This unmerges the merged pages in them.
    Collapse {
        /// The process.
        process: ProcessId,
        /// The ranges: ascending, whole huge pages.
        ranges: Vec<AddressRange>,
    },
}

/// Why a range was missed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum MissedReason {
    /// It is no longer mapped.
    #[error("not mapped any more")]
    NotMapped,
    /// Parts of it are no longer mapped. The other parts were changed.
    #[error("not mapped any more in parts; the other parts were advised")]
    PartlyNotMapped,
    /// It cannot be merged, or the kernel refused it: as a phrase.
    #[error("{0}")]
    Refused(String),
}

impl MissedReason {
    /// Whether all that was missed is no longer mapped.
    pub fn is_not_mapped(&self) -> bool {
        matches!(self, Self::NotMapped | Self::PartlyNotMapped)
    }
}

/// Advice about a range (include/uapi/asm-generic/mman-common.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergeAdvice {
    /// `MADV_MERGEABLE`: ksmd may scan the range.
    Mergeable,
    /// `MADV_UNMERGEABLE`: ksmd no longer scans the range, and its merged pages become private again.
    Unmergeable,
}

impl MergeAdvice {
    /// The advice that reverts this one.
    #[must_use]
    pub fn inverse(self) -> Self {
        match self {
            Self::Mergeable => Self::Unmergeable,
            Self::Unmergeable => Self::Mergeable,
        }
    }
}

/// The result of an action.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ActionOutcome {
    /// How long a thread of the target was stopped, once for each stop; empty if none was stopped.
    pub stop_durations: Vec<Duration>,
    /// Ranges that had changed or that the kernel refused, with the reason. All other ranges were changed.
    pub missed_ranges: Vec<(AddressRange, MissedReason)>,
}

/// Why an action failed. Nothing was changed, except perhaps with `Busy` and `Failed`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ActionError {
    /// The host is a recording.
    #[error("a recording cannot be changed")]
    ReadOnly,
    /// The process has exited, or its number has been reused.
    #[error("the process has ended")]
    Vanished,
    /// The privilege is missing.
    #[error("permission denied: {0}")]
    Denied(String),
    /// The kernel, the program or the machine does not support it.
    #[error("{0}")]
    Unsupported(String),
    /// Another debugger or tracer is attached to the process.
    #[error("process {0} traces it already, such as a debugger: end that first")]
    Traced(Pid),
    /// It is not possible now: the target does not stop, or the kernel returns EBUSY.
    #[error("busy: {0}")]
    Busy(String),
    /// Another failure.
    #[error("{0}")]
    Failed(String),
}

impl From<Absent> for ActionError {
    fn from(why: Absent) -> Self {
        match why {
            Absent::Vanished => Self::Vanished,
            Absent::Denied => Self::Denied("the file cannot be read".to_owned()),
            Absent::NotOnThisKernel => Self::Unsupported("this kernel has no such file".to_owned()),
            Absent::Malformed(what) => Self::Failed(what),
        }
    }
}

/// The actions that undo an action, computed before it is performed. For a setting this is its value, for ranges their
/// present advice, for a process whether it is enrolled whole. Perform the last one first. Empty if the action would
/// change nothing.
///
/// Only QEMU knows whether a backend is enrolled. The caller must therefore pass only backends that QEMU reported as
/// different from the wanted state. A collapse has no inverse and needs none, because the contents do not change.
/// # Errors
/// Why the present state cannot be read. An action without a known inverse must not be performed.
pub fn undo_actions(host: &dyn Host, action: &Action) -> Result<Vec<Action>, ActionError> {
    Ok(match action {
        Action::Write { knob, value } => {
            let now = knob.read(host)?;
            if now == *value { Vec::new() } else { vec![Action::Write { knob: *knob, value: now }] }
        }
        Action::Advise { process, advice, ranges } => {
            let handle = hold(host, *process)?;
            let enrolled = *advice == MergeAdvice::Unmergeable;
            let mut changing = Vec::new();
            for region in observe::regions(&*handle)? {
                if region.flags.has(VmFlags::MERGEABLE) == enrolled {
                    changing.extend(ranges.iter().filter_map(|range| range.overlap(region.range)));
                }
            }
            changing.sort_unstable_by_key(|range| range.start);
            let undo = Action::Advise { process: *process, advice: advice.inverse(), ranges: changing.clone() };
            if changing.is_empty() { Vec::new() } else { vec![undo] }
        }
        Action::MergeAny { process, enable: on } => {
            let handle = hold(host, *process)?;
            let now = query_merge_any(&*handle)?;
            if now == *on {
                return Ok(Vec::new());
            }
            let mut undo = vec![Action::MergeAny { process: *process, enable: now }];
            if *on {
                // Unenrolling the process whole removes its own marks too (mm/ksm.c, `ksm_del_vmas`). The undo restores
                // them.
                let regions = observe::regions(&*handle)?;
                let marked = regions.iter().filter(|region| region.flags.has(VmFlags::MERGEABLE));
                let ranges: Vec<AddressRange> = marked.map(|region| region.range).collect();
                if !ranges.is_empty() {
                    undo.insert(0, Action::Advise { process: *process, advice: MergeAdvice::Mergeable, ranges });
                }
            }
            undo
        }
        Action::GuestMerge { process, socket, backend, enable: on } => {
            hold(host, *process)?;
            let (socket, backend) = (socket.clone(), backend.clone());
            vec![Action::GuestMerge { process: *process, socket, backend, enable: !on }]
        }
        Action::Collapse { .. } => Vec::new(),
    })
}

/// Whether a process is enrolled whole: from the kernel's report (6.14), otherwise from the process itself, one thread
/// of which is stopped for that.
pub fn query_merge_any(handle: &dyn ProcessHandle) -> Result<bool, ActionError> {
    match parse::process_ksm(handle.read("ksm_stat"), Err(Absent::NotOnThisKernel)).merge_any {
        Err(Absent::NotOnThisKernel) => handle.ask_merge_any(),
        told => Ok(told?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_host::FakeHost;
    use crate::faulty_host::{FaultyHost, InjectedFault};

    const PROCESS: ProcessId = ProcessId { pid: Pid(7), start_time: 1 };

    /// A host with one process that has the given files.
    fn host(files: &[(&str, &str)]) -> FakeHost {
        let host = FakeHost::booted();
        host.set_cpu_ticks(7, 0);
        for (name, text) in files {
            host.put_file(&format!("proc/7/{name}"), text);
        }
        host
    }

    /// An entry of smaps.
    fn smaps_entry(start: u64, flags: &str) -> String {
        let end = start + 0x10_0000;
        format!("{start:x}-{end:x} rw-p 00000000 00:00 0 \nRss: 0 kB\nAnonymous: 0 kB\nVmFlags: rd wr{flags}\n")
    }

    #[test]
    fn undo_restores_ranges_the_program_enrolled() {
        let smaps = smaps_entry(0x10_0000, " mg") + &smaps_entry(0x30_0000, "") + &smaps_entry(0x50_0000, " mg");
        let host = host(&[("ksm_stat", "ksm_merge_any: no\n"), ("smaps", &smaps)]);
        let ranges = [0x10_0000, 0x50_0000].map(|start| AddressRange { start, end: start + 0x10_0000 }).to_vec();
        let marks = Action::Advise { process: PROCESS, advice: MergeAdvice::Mergeable, ranges };
        let off = Action::MergeAny { process: PROCESS, enable: false };
        assert_eq!(undo_actions(&host, &Action::MergeAny { process: PROCESS, enable: true }), Ok(vec![marks, off]));
    }

    #[test]
    fn undo_keeps_a_process_that_had_merge_any_set() {
        // The file of 6.13, and of 6.14 and later.
        const KSM_STAT_6_13: &str = "ksm_rmap_items 0\nksm_zero_pages 0\nksm_merging_pages 0\nksm_process_profit 0\n";
        let new = |told: &str| format!("{KSM_STAT_6_13}ksm_merge_any: {told}\nksm_mergeable: {told}\n");
        let check = |ksm_stat: &str, says: Option<&str>, on, expected: Option<Option<bool>>| {
            let smaps = smaps_entry(0x10_0000, "");
            let plain = host(&[("ksm_stat", ksm_stat), ("smaps", &smaps)]);
            let host = FaultyHost::new(&plain, |path| {
                let answer = says.map_or(InjectedFault::Absent(Absent::NotOnThisKernel), |said| {
                    InjectedFault::Replaced(said.into())
                });
                (path == "proc/7#ask_merge_any").then_some(answer)
            });
            let expected = expected.map(|on| {
                on.into_iter().map(|on| Action::MergeAny { process: PROCESS, enable: on }).collect::<Vec<_>>()
            });
            let found = undo_actions(&host, &Action::MergeAny { process: PROCESS, enable: on });
            assert_eq!(found.as_ref().ok(), expected.as_ref(), "{ksm_stat} {says:?} {on}: {found:?}");
        };
        for (was, word) in [(true, "yes"), (false, "no")] {
            for on in [true, false] {
                let back = (was != on).then_some(was);
                check(KSM_STAT_6_13, Some(word), on, Some(back));
                // The process is not asked if the kernel reports the state.
                check(&new(word), Some(if was { "no" } else { "yes" }), on, Some(back));
            }
        }
        check(KSM_STAT_6_13, None, true, None);
    }

    #[test]
    fn undo_of_guest_merge_ignores_region_flags() {
        // The first backend is marked and the hot-plugged one is not; no file tells which region belongs to which
        // backend.
        let smaps = smaps_entry(0x10_0000, " mg") + &smaps_entry(0x30_0000, "");
        let cmdline = "qemu-system-x86_64\0-object\0memory-backend-ram,id=pc.ram,size=1M\0";
        let host = host(&[("smaps", &smaps), ("cmdline", cmdline)]);
        let backend = |id: &str, on| {
            let (socket, backend) = ("/q".into(), format!("/objects/{id}"));
            Action::GuestMerge { process: PROCESS, socket, backend, enable: on }
        };
        for id in ["pc.ram", "plugged"] {
            for on in [true, false] {
                assert_eq!(undo_actions(&host, &backend(id, on)), Ok(vec![backend(id, !on)]));
            }
        }
        let another = ProcessId { start_time: 4712, ..PROCESS };
        let gone = Action::GuestMerge { process: another, socket: "/q".into(), backend: String::new(), enable: true };
        assert_eq!(undo_actions(&host, &gone), Err(ActionError::Vanished));
    }
}
