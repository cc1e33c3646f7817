//! What guests do: an operation is some thinking, perhaps a critical section, perhaps a TLB shootdown, perhaps a halt.

use super::run_queue::NICE_0_WEIGHT;

/// Mean time between critical sections of a file-system benchmark in memory, in nanoseconds (fitted).
pub(super) const THINK_NS: u64 = 9_800;
/// Its critical section, in nanoseconds (fitted).
pub(super) const CRITICAL_SECTION_NS: u64 = 9_000;
/// Its contended locks (fitted).
pub(super) const LOCKS: u32 = 4;

/// How a spin lock of the guest's kernel waits and hands over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockKind {
    /// First in, first out; the next waiter owns the lock even while it is preempted. Ticket locks, and queued (MCS)
    /// locks in a guest that does not know that it is one.
    Fifo,
    /// Test and set: any waiter that runs may take the lock. Queued locks of Linux in a guest without para-virtual
    /// locks (`virt_spin_lock`).
    TestAndSet,
    /// Para-virtual queued lock: a waiter halts after a while and is kicked; a free lock may be stolen.
    ParaVirtual,
}

/// What each vCPU of a VM does, over and over.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Workload {
    /// Mean time outside of critical sections in each operation (exponential), in nanoseconds.
    pub think_ns: u64,
    /// Whether that time is spent in the guest's kernel. Today's directed yield skips vCPUs preempted in user mode.
    pub think_in_kernel: bool,
    /// Time that a lock is held in each operation, in nanoseconds; 0 for none.
    pub critical_section_ns: u64,
    /// Locks of the VM; each operation takes one at random.
    pub locks: u32,
    /// How the locks wait.
    pub lock_kind: LockKind,
    /// Probability that an operation sends an interrupt to all siblings and waits for them (TLB shootdown).
    pub shootdown_probability: f64,
    /// Mean time of a halt (exponential), in nanoseconds; 0 for never.
    pub halt_ns: u64,
    /// Operations between two halts, on the mean; not zero.
    pub operations_per_halt: u32,
}

impl Workload {
    /// A workload that only computes.
    pub fn compute() -> Self {
        Self {
            think_ns: 100_000,
            think_in_kernel: false,
            critical_section_ns: 0,
            locks: 0,
            lock_kind: LockKind::Fifo,
            shootdown_probability: 0.0,
            halt_ns: 0,
            operations_per_halt: 1,
        }
    }

    /// A file-system benchmark in memory, as fitted to the published measurements (see
    /// [`calibration`](super::calibration)).
    pub fn kernel_locks() -> Self {
        Self {
            think_ns: THINK_NS,
            think_in_kernel: false,
            critical_section_ns: CRITICAL_SECTION_NS,
            locks: LOCKS,
            lock_kind: LockKind::Fifo,
            shootdown_probability: 0.0,
            halt_ns: 0,
            operations_per_halt: 1,
        }
    }
}

/// One virtual machine.
#[derive(Debug, Clone, PartialEq)]
pub struct VmSpec {
    /// The name in tables.
    pub name: String,
    /// Its vCPUs.
    pub vcpus: u32,
    /// The CPU weight of each vCPU; 1024 is the default.
    pub weight: u64,
    /// What it does.
    pub workload: Workload,
}

impl VmSpec {
    /// A VM of default weight.
    pub fn new(name: &str, vcpus: u32, workload: Workload) -> Self {
        Self { name: name.to_owned(), vcpus, weight: NICE_0_WEIGHT, workload }
    }
}
