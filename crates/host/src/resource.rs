//! What Pagefold changes on a host, in classes. Each class has its own lock and its own journal, so that one Pagefold
//! process can place memory while another one merges.

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
}

impl ResourceClass {
    /// All classes, in the order in which a process must take their locks if it needs several.
    pub const ALL: [Self; 4] = [Self::Ksm, Self::MemoryPlacement, Self::CpuPlacement, Self::Settings];

    /// Its name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ksm => "KSM",
            Self::MemoryPlacement => "the placement of memory",
            Self::CpuPlacement => "the placement of threads",
            Self::Settings => "settings of the kernel or of virtual machines",
        }
    }

    /// The file in the state directory that is locked while this class is changed.
    pub const fn lock_file(self) -> &'static str {
        match self {
            Self::Ksm => "ksm.lock",
            Self::MemoryPlacement => "memory-placement.lock",
            Self::CpuPlacement => "cpu-placement.lock",
            Self::Settings => "settings.lock",
        }
    }

    /// The file in the state directory with the changes that are undone when the session ends.
    pub const fn journal_file(self) -> &'static str {
        match self {
            Self::Ksm => "ksm.journal.json",
            Self::MemoryPlacement => "memory-placement.journal.json",
            Self::CpuPlacement => "cpu-placement.journal.json",
            Self::Settings => "settings.journal.json",
        }
    }

    /// The file in the state directory with the changes that stay until a later session undoes them.
    pub const fn kept_changes_file(self) -> &'static str {
        match self {
            Self::Ksm => "ksm.policy.json",
            Self::MemoryPlacement => "memory-placement.kept.json",
            Self::CpuPlacement => "cpu-placement.kept.json",
            Self::Settings => "settings.kept.json",
        }
    }
}
