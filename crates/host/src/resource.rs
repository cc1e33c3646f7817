//! What Pagefold changes on a host, in classes. Each class has its own lock and its own journal, so that one Pagefold
//! process can place memory while another one merges.

use crate::transaction::session::DEFAULT_STATE_DIRECTORY;
use std::path::{Path, PathBuf};

/// The directory of locks and journals that outlive a reboot.
pub const PERSISTENT_STATE_DIRECTORY: &str = "/var/lib/pagefold/tune";

/// A class of resources that only one Pagefold process at a time may change. The numbers identify the host-wide locks,
/// so they must stay the same in all versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ResourceClass {
    /// KSM: its settings, and which memory is enrolled.
    Ksm = 0,
    /// On which NUMA nodes memory lies and may be allocated.
    MemoryPlacement = 1,
    /// On which CPUs threads may run.
    CpuPlacement = 2,
    /// All other settings of the kernel and of virtual machines.
    Settings = 3,
    /// Configuration files, which outlive a reboot.
    Configuration = 4,
}

impl ResourceClass {
    /// All classes, in the order in which a process must take their locks if it needs several.
    pub const ALL: [Self; 5] =
        [Self::Ksm, Self::MemoryPlacement, Self::CpuPlacement, Self::Settings, Self::Configuration];

    /// Its name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ksm => "KSM",
            Self::MemoryPlacement => "the placement of memory",
            Self::CpuPlacement => "the placement of threads",
            Self::Settings => "settings of the kernel or of virtual machines",
            Self::Configuration => "configuration files",
        }
    }

    /// The file in the state directory that is locked while this class is changed.
    pub const fn lock_file(self) -> &'static str {
        match self {
            Self::Ksm => "ksm.lock",
            Self::MemoryPlacement => "memory-placement.lock",
            Self::CpuPlacement => "cpu-placement.lock",
            Self::Settings => "settings.lock",
            Self::Configuration => "configuration.lock",
        }
    }

    /// The file in the state directory with the changes that are undone when the session ends.
    pub const fn journal_file(self) -> &'static str {
        match self {
            Self::Ksm => "ksm.journal.json",
            Self::MemoryPlacement => "memory-placement.journal.json",
            Self::CpuPlacement => "cpu-placement.journal.json",
            Self::Settings => "settings.journal.json",
            Self::Configuration => "configuration.journal.json",
        }
    }

    /// The file in the state directory with the changes that stay until a later session undoes them.
    pub const fn kept_changes_file(self) -> &'static str {
        match self {
            Self::Ksm => "ksm.policy.json",
            Self::MemoryPlacement => "memory-placement.kept.json",
            Self::CpuPlacement => "cpu-placement.kept.json",
            Self::Settings => "settings.kept.json",
            Self::Configuration => "configuration.kept.json",
        }
    }

    /// Whether its changes, and therefore its journal, outlive a reboot.
    pub const fn survives_reboot(self) -> bool {
        matches!(self, Self::Configuration)
    }

    /// The directory of its lock and journals for a state directory. The default one does not outlive a reboot, so a
    /// class that does has another one. A state directory that the operator chose holds all classes.
    pub fn directory(self, state_directory: &Path) -> PathBuf {
        let is_default = state_directory == Path::new(DEFAULT_STATE_DIRECTORY);
        let directory =
            if is_default && self.survives_reboot() { Path::new(PERSISTENT_STATE_DIRECTORY) } else { state_directory };
        directory.to_owned()
    }
}
