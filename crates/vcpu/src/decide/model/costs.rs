//! Constants of the host that the model needs, each with its unit and where its value comes from.

/// What operations of the host cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HostCosts {
    /// A VM exit that handles a pause loop, with the entry after it, in nanoseconds.
    pub exit_ns: u64,
    /// The time that a guest may spin before the CPU exits (`ple_window`), in nanoseconds.
    pub spin_window_ns: u64,
    /// Looking at one sibling as a candidate for a directed yield, in nanoseconds.
    pub candidate_ns: u64,
    /// Holding the locks of two run queues, in nanoseconds.
    pub double_lock_ns: u64,
    /// What each waiter adds to the time of a lock of a run queue, in nanoseconds.
    pub double_lock_per_waiter_ns: u64,
    /// A switch to another vCPU, in nanoseconds.
    pub switch_ns: u64,
    /// A call into the scheduler that ends without a switch, such as a yield on an otherwise empty queue, in nanoseconds.
    pub yield_ns: u64,
    /// From sending an interrupt to another vCPU until a running vCPU has handled it, in nanoseconds.
    pub ipi_ns: u64,
    /// What an interrupt costs the vCPU that receives it, in nanoseconds.
    pub ipi_receive_ns: u64,
    /// The period of the host's timer tick (a jiffy), in nanoseconds.
    pub tick_ns: u64,
    /// The time slice of a gang, in nanoseconds.
    pub gang_slice_ns: u64,
    /// How long a para-virtual lock spins before it halts, in nanoseconds.
    pub pv_spin_ns: u64,
}

impl Default for HostCosts {
    fn default() -> Self {
        Self {
            exit_ns: 2_200,
            spin_window_ns: 1_707,
            candidate_ns: 50,
            double_lock_ns: 1_100,
            double_lock_per_waiter_ns: 455,
            switch_ns: 1_400,
            yield_ns: 300,
            ipi_ns: 5_000,
            ipi_receive_ns: 2_200,
            tick_ns: 1_000_000,
            gang_slice_ns: 12_000_000,
            pv_spin_ns: 136_000,
        }
    }
}
