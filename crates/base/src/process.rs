//! A process, from its files in `/proc`.

use crate::identity::Identity;
use crate::ksm::ProcessKsm;
use crate::reading::{Absent, Reading};
use crate::units::{Bytes, ProcessId};

/// Clock ticks per second in `/proc/PID/stat`: `USER_HZ` (include/asm-generic/param.h), part of the user interface of
/// all architectures except alpha.
pub const USER_HZ: f64 = 100.0;

/// Data of a process that is known before its memory is scanned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// PID and start time.
    pub id: ProcessId,
    /// The kernel's name of the program; invalid UTF-8 is replaced.
    pub comm: String,
    /// The state letter of `/proc/PID/stat`.
    pub state: char,
    /// Whether it is a kernel thread (`PF_KTHREAD` in its flags): no memory of its own.
    pub kernel_thread: bool,
    /// The effective user.
    pub uid: Reading<u32>,
    /// Whether its real, effective and saved users differ or are not all known: a setuid program, which another user
    /// started.
    pub setuid: bool,
    /// The command line.
    pub arguments: Reading<Vec<String>>,
    /// The cgroup path: the unified hierarchy's, or the v1 memory controller's where that one is in use.
    pub cgroup: Reading<String>,
    /// Virtual machine, container, job.
    pub identity: Identity,
    /// Its KSM counters.
    pub ksm: ProcessKsm,
    /// `Seccomp` of `/proc/PID/status`: 0 none, 1 strict, 2 filter.
    pub seccomp: Reading<u64>,
    /// `VmPin`: memory pinned by drivers.
    pub pinned: Reading<Bytes>,
}

impl Process {
    /// A process with only its ID known, all else absent for one reason.
    pub fn absent(id: ProcessId, why: &Absent) -> Self {
        Self {
            id,
            comm: "?".to_owned(),
            state: '?',
            kernel_thread: false,
            uid: Err(why.clone()),
            setuid: true,
            arguments: Err(why.clone()),
            cgroup: Err(why.clone()),
            identity: Identity::default(),
            ksm: ProcessKsm::absent(why),
            seccomp: Err(why.clone()),
            pinned: Err(why.clone()),
        }
    }

    /// Whether it is dead and waits to be reaped.
    pub fn is_zombie(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }
}

/// `/proc/PID/smaps_rollup`: sums over all regions, current and not as of ksmd's last scan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SmapsRollup {
    /// Resident bytes; not affected by merging.
    pub rss: Reading<Bytes>,
    /// Resident bytes, each page divided by the number of its mappings.
    pub pss: Reading<Bytes>,
    /// Pages with one mapping, clean.
    pub private_clean: Reading<Bytes>,
    /// Pages with one mapping, dirty.
    pub private_dirty: Reading<Bytes>,
    /// Anonymous pages.
    pub anonymous: Reading<Bytes>,
    /// Anonymous pages mapped as huge pages.
    pub anon_huge: Reading<Bytes>,
    /// Pages that are KSM pages; zero pages placed by KSM are not among them (6.6).
    pub ksm: Reading<Bytes>,
    /// Swapped-out anonymous bytes.
    pub swap: Reading<Bytes>,
}
