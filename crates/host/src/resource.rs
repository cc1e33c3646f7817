//! What Pagefold changes on a host, in classes. Each class has its own lock and its own journal, so that one Pagefold
//! process can place memory while another one merges.

/// A class of resources that only one Pagefold process at a time may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ResourceClass {
    /// KSM: its settings, and which memory is enrolled.
    Ksm,
    /// On which NUMA nodes memory lies and may be allocated.
    MemoryPlacement,
    /// On which CPUs threads may run.
    CpuPlacement,
    /// All other settings of the kernel and of virtual machines.
    Settings,
}

impl ResourceClass {
    /// All classes, in the order in which a process must take their locks if it needs several.
    pub const ALL: [Self; 4] = [Self::Ksm, Self::MemoryPlacement, Self::CpuPlacement, Self::Settings];

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

    /// The file in the state directory with the changes that are undone when the policy is removed.
    pub const fn policy_file(self) -> &'static str {
        match self {
            Self::Ksm => "ksm.policy.json",
            Self::MemoryPlacement => "memory-placement.policy.json",
            Self::CpuPlacement => "cpu-placement.policy.json",
            Self::Settings => "settings.policy.json",
        }
    }
}
