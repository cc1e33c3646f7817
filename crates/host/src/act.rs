//! What Pagefold does to a host. Every effect is one value of [`Action`], carried out by [`Host::apply`].
//!
//! Nothing else changes anything, so that a dry run is a run that stops before `apply`, a test fails any one of them,
//! and the journal that is written beforehand ([`undo`] tells what puts an action back) knows all there is to know.

use crate::{Host, observe, parse};
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

/// Why an action was not carried out. Nothing was changed then.
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
            vec![Action::GuestMerge { process: *process, socket: socket.clone(), backend: backend.clone(), on: !on }]
        }
        Action::Collapse { .. } => Vec::new(),
    })
}

/// The value of a setting: the bracketed word of a choice, otherwise all of it.
pub fn setting_now(host: &dyn Host, setting: Setting) -> Reading<String> {
    let bytes = host.read(&format!("sys/kernel/mm/ksm/{}", setting.file()))?;
    Ok(parse::bracketed(&bytes).unwrap_or_else(|_| String::from_utf8_lossy(&bytes).trim().to_owned()))
}
