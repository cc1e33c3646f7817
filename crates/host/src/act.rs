//! What Pagefold does to a host. Every effect is one value of [`Action`], carried out by [`Host::apply`].
//!
//! Nothing else changes anything, so that a dry run is a run that stops before `apply`, a test fails any one of them,
//! and the journal that is written beforehand ([`undo`] tells what puts an action back) knows all there is to know.

use crate::{Host, Process, observe, parse};
use pagefold_model::ksm::Setting;
use pagefold_model::region::VmFlags;
use pagefold_model::{Absent, AddressRange, Pid, ProcessId, Reading};
use std::path::PathBuf;
use std::time::Duration;

/// One effect on a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Write a file of `/sys/kernel/mm/ksm`.
    Set {
        /// Which.
        setting: Setting,
        /// What is written.
        value: String,
    },
    /// Advise ranges of a process (madvise(2)), from within: ascending and disjoint, whole pages.
    Advise {
        /// Which process.
        process: ProcessId,
        /// What.
        advice: Advice,
        /// Where.
        ranges: Vec<AddressRange>,
    },
    /// Enrol a process whole, with what it maps later, or withdraw it (`PR_SET_MEMORY_MERGE`), from within.
    /// Withdrawing unmerges.
    MergeAny {
        /// Which process.
        process: ProcessId,
        /// Whether it is to be enrolled.
        on: bool,
    },
    /// Enrol or withdraw a memory backend of a virtual machine by QEMU's control socket (QMP `qom-set` of the backend's
    /// property `merge`). Withdrawing unmerges.
    GuestMerge {
        /// The QEMU process that is expected at the other end.
        process: ProcessId,
        /// The path of the socket.
        socket: PathBuf,
        /// The backend's path in QEMU's object tree: `/objects/pc.ram`.
        backend: String,
        /// Whether it is to be enrolled.
        on: bool,
    },
    /// Put huge pages back together (`MADV_COLLAPSE`), from outside. Unmerges what is merged in them.
    Collapse {
        /// Which process.
        process: ProcessId,
        /// Where: ascending, whole huge pages.
        ranges: Vec<AddressRange>,
    },
}

/// How the reason begins for which a range, or a part of it, was missed because nothing is mapped there.
pub const NOT_MAPPED: &str = "not mapped any more";

/// Advice about a range (include/uapi/asm-generic/mman-common.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// `MADV_MERGEABLE`: ksmd may look at it.
    Mergeable,
    /// `MADV_UNMERGEABLE`: ksmd no longer looks at it, and what is merged in it gets pages of its own again.
    Unmergeable,
}

impl Advice {
    /// What takes it back.
    #[must_use]
    pub fn inverse(self) -> Self {
        match self {
            Self::Mergeable => Self::Unmergeable,
            Self::Unmergeable => Self::Mergeable,
        }
    }
}

/// What an action came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Effect {
    /// For how long a thread of the target was stopped, and how often; nothing where none was.
    pub stops: Vec<Duration>,
    /// Ranges that were no longer as they had to be, or that the kernel refused, with why; the others were taken.
    pub missed: Vec<(AddressRange, String)>,
}

/// Why an action was not carried out. Nothing was changed then, except perhaps by `Busy` and `Failed`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The host is a recording.
    #[error("a recording cannot be changed")]
    ReadOnly,
    /// The process has ended, or its number has been given to another.
    #[error("the process has ended")]
    Vanished,
    /// The privilege is missing.
    #[error("permission denied: {0}")]
    Denied(String),
    /// The kernel, the program or the machine cannot do it.
    #[error("{0}")]
    Unsupported(String),
    /// Another debugger or tracer holds the process.
    #[error("process {0} traces it")]
    Traced(Pid),
    /// It cannot be done now: the target does not stop, or the kernel answers EBUSY.
    #[error("busy: {0}")]
    Busy(String),
    /// Something else went wrong.
    #[error("{0}")]
    Failed(String),
}

impl From<Absent> for Refusal {
    fn from(why: Absent) -> Self {
        match why {
            Absent::Vanished => Self::Vanished,
            Absent::Denied => Self::Denied("cannot be read".to_owned()),
            Absent::NotOnThisKernel => Self::Unsupported("this kernel has no such file".to_owned()),
            Absent::Malformed(what) => Self::Failed(what),
        }
    }
}

/// What puts an action back, found out before it is carried out: for a setting its value, for ranges the advice they
/// have now. Empty where nothing would change.
///
/// A collapse has no inverse, and needs none: the contents stay what they are.
pub fn undo(host: &dyn Host, action: &Action) -> Reading<Vec<Action>> {
    Ok(match action {
        Action::Set { setting, value } => {
            let now = setting_now(host, *setting)?;
            if now == *value { Vec::new() } else { vec![Action::Set { setting: *setting, value: now }] }
        }
        Action::Advise { process, advice, ranges } => {
            let handle = host.open(process.pid)?;
            if handle.id() != *process {
                return Err(Absent::Vanished);
            }
            let enrolled = *advice == Advice::Unmergeable;
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
        Action::MergeAny { process, on } => {
            let handle = host.open(process.pid)?;
            if handle.id() != *process {
                return Err(Absent::Vanished);
            }
            let now = parse::process_ksm(handle.read("ksm_stat"), Err(Absent::NotOnThisKernel)).merge_any;
            let undo = Action::MergeAny { process: *process, on: !on };
            if now == Ok(*on) { Vec::new() } else { vec![undo] }
        }
        Action::GuestMerge { process, socket, backend, on } => {
            let handle = host.open(process.pid)?;
            if handle.id() != *process {
                return Err(Absent::Vanished);
            }
            let (socket, backend) = (socket.clone(), backend.clone());
            let undo = Action::GuestMerge { process: *process, socket, backend, on: !on };
            if guest_is(&*handle, *on)? { Vec::new() } else { vec![undo] }
        }
        Action::Collapse { .. } => Vec::new(),
    })
}

/// Whether all memory backends of a guest are marked for KSM, or none is, as told by its regions.
///
/// QEMU's socket would tell it of each, but only the host's files are asked here. A guest's backends are its largest
/// regions that KSM could take and that can be read and written, as many as its command line names and at least one:
/// arenas of malloc are reserved without access, and the buffer of translated code is executable. Where some of them are
/// marked and others are not, neither is so, and an action is then taken to change what it names.
fn guest_is(handle: &dyn Process, on: bool) -> Reading<bool> {
    let backends =
        observe::process(handle)?.identity.vm.map_or(0, |vm| vm.backends.iter().filter(|b| !b.share).count());
    let mut regions = observe::regions(handle)?;
    regions.retain(|region| region.ineligible().is_none() && region.permissions == *b"rw-p");
    regions.sort_by_key(|region| std::cmp::Reverse(region.range.bytes()));
    Ok(regions.iter().take(backends.max(1)).all(|region| region.flags.has(VmFlags::MERGEABLE) == on))
}

/// The value of a setting: the bracketed word of a choice, otherwise all of it.
pub fn setting_now(host: &dyn Host, setting: Setting) -> Reading<String> {
    let bytes = host.read(&format!("sys/kernel/mm/ksm/{}", setting.file()))?;
    Ok(parse::bracketed(&bytes).unwrap_or_else(|_| String::from_utf8_lossy(&bytes).trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recording::Recording;
    use std::fs;

    /// What undoes switching the guest whose regions are these: size in pages, permissions, whether marked.
    fn undo_of(backends: usize, regions: &[(u64, &str, bool)], on: bool) -> Vec<Action> {
        let directory = tempfile::tempdir().unwrap();
        let process = directory.path().join("files/proc/7");
        fs::create_dir_all(&process).unwrap();
        let write = |name: &str, text: &str| fs::write(process.join(name), text).unwrap();
        fs::write(directory.path().join("recording.toml"), "schema = \"pagefold.recording/1\"\npage_size = 4096\n")
            .unwrap();
        write("stat", &format!("7 (qemu) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4711 0 0{}\n", " 0".repeat(28)));
        let objects: String = (0..backends).map(|n| format!("\0-object\0memory-backend-ram,id=m{n},size=1G")).collect();
        write("cmdline", &format!("qemu-system-x86_64{objects}\0"));
        let mut start = 1 << 20;
        let mut smaps = String::new();
        for (pages, permissions, marked) in regions {
            let end = start + pages * 4096;
            let flag = if *marked { " mg" } else { "" };
            smaps += &format!(
                "{start:x}-{end:x} {permissions} 00000000 00:00 0 \nRss: 0 kB\nAnonymous: 0 kB\nVmFlags: rd wr{flag}\n"
            );
            start = end + 4096;
        }
        write("smaps", &smaps);
        let host = Recording::open(directory.path()).unwrap();
        let process = ProcessId { pid: Pid(7), start_time: 4711 };
        let backend = "/objects/m0".to_owned();
        undo(&host, &Action::GuestMerge { process, socket: "/q".into(), backend, on }).unwrap()
    }

    #[test]
    fn a_guest_that_is_already_as_asked_for_stays_so() {
        let check = |backends, regions: &[(u64, &str, bool)], on, expected: Option<bool>| {
            let found: Vec<_> = undo_of(backends, regions, on)
                .iter()
                .map(|undo| matches!(undo, Action::GuestMerge { on: true, .. }))
                .collect();
            assert_eq!(found, expected.into_iter().collect::<Vec<_>>(), "{backends} {regions:?} {on}");
        };
        // The heap is not marked, the reserved arena and the translated code are larger than the guest's memory.
        let guest = |marked| [(90, "rw-p", marked), (8, "rw-p", false), (200, "---p", false), (300, "rwxp", false)];
        check(0, &guest(true), true, None);
        check(0, &guest(true), false, Some(true));
        check(1, &guest(false), false, None);
        check(1, &guest(false), true, Some(false));
        let two = |first, second| [(90, "rw-p", first), (8, "rw-p", false), (80, "rw-p", second)];
        check(2, &two(true, true), true, None);
        check(2, &two(true, false), true, Some(false));
        check(2, &two(true, false), false, Some(true));
        check(2, &two(false, false), false, None);
    }
}
