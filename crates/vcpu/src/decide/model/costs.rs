//! Constants of the host that the model needs, each with its unit and where its value comes from.
//!
//! "Fitted" is a value that was chosen so that the model meets the published figures of
//! [`calibration`](super::calibration). "Derived" follows from a source. "Assumed" is a plausible value that the results
//! hardly depend on, or only through sums with a fitted value.

/// Where the value of a constant comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConstantOrigin {
    /// Chosen to meet published figures.
    Fitted,
    /// Computed from a documented value.
    Derived,
    /// Plausible, neither fitted nor measured.
    Assumed,
}

/// A constant of the model, for reports.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModelConstant {
    /// What it is, with its unit.
    pub quantity: &'static str,
    /// Its value in the unit.
    pub value: f64,
    /// Where it comes from.
    pub origin: ConstantOrigin,
    /// How.
    pub basis: &'static str,
}

/// A VM exit on a pause loop with the entry after it, in nanoseconds (assumed).
pub const EXIT_NS: u64 = 3_000;
/// `ple_window`: 4096 cycles at the 2.4 GHz of the talk's processors (Xeon E7-4870), in nanoseconds (derived).
pub const SPIN_WINDOW_NS: u64 = 1_707;
/// Looking at one sibling in the search for a candidate, in nanoseconds (assumed).
pub const CANDIDATE_NS: u64 = 100;
/// Holding the locks of two run queues, in nanoseconds (fitted).
pub const DOUBLE_LOCK_NS: u64 = 500;
/// What each waiter adds to it, in nanoseconds (fitted).
pub const DOUBLE_LOCK_PER_WAITER_NS: u64 = 950;
/// A switch between vCPUs, in nanoseconds (assumed).
pub const SWITCH_NS: u64 = 3_000;
/// A yield without a switch, in nanoseconds (assumed).
pub const YIELD_NS: u64 = 300;
/// Delivery of an interrupt to a running vCPU and its acknowledgement, in nanoseconds (assumed).
pub const IPI_NS: u64 = 5_000;
/// Cost of an interrupt for its receiver, in nanoseconds (assumed).
pub const IPI_RECEIVE_NS: u64 = 2_200;
/// A jiffy of a kernel with 1000 ticks a second, in nanoseconds (derived).
pub const TICK_NS: u64 = 1_000_000;
/// The time slice of a gang: that of two tasks of Linux 3.6 on one queue, in nanoseconds (derived).
pub const GANG_SLICE_NS: u64 = 12_000_000;
/// `SPIN_THRESHOLD` of `kernel/locking/qspinlock_paravirt.h`: 2^15 turns of 10 cycles at 2.4 GHz, in nanoseconds
/// (derived; the cycles of a turn are assumed).
pub const PV_SPIN_NS: u64 = 136_000;

/// All constants of the model.
pub fn model_constants() -> Vec<ModelConstant> {
    use super::workload::{CRITICAL_SECTION_NS, LOCKS, THINK_NS};
    use ConstantOrigin::{Assumed, Derived, Fitted};
    let constant = |quantity, value, origin, basis| ModelConstant { quantity, value, origin, basis };
    vec![
        constant("critical section, ns", CRITICAL_SECTION_NS as f64, Fitted, "dbench and boot"),
        constant("think time, ns", THINK_NS as f64, Fitted, "dbench and boot"),
        constant("locks of a VM", f64::from(LOCKS), Fitted, "dbench and boot"),
        constant("both run queues locked, ns", DOUBLE_LOCK_NS as f64, Fitted, "dbench and boot"),
        constant("each waiter for them, ns", DOUBLE_LOCK_PER_WAITER_NS as f64, Fitted, "dbench and boot"),
        constant("spin window, ns", SPIN_WINDOW_NS as f64, Derived, "ple_window 4096 at 2.4 GHz"),
        constant("timer tick, ns", TICK_NS as f64, Derived, "HZ=1000"),
        constant("gang slice, ns", GANG_SLICE_NS as f64, Derived, "sched_latency of 24 ms for two tasks"),
        constant("spin of a para-virtual lock, ns", PV_SPIN_NS as f64, Derived, "SPIN_THRESHOLD, 10 cycles a turn"),
        constant("exit on a pause loop, ns", EXIT_NS as f64, Assumed, "2 to 3 us on processors of 2011"),
        constant("switch between vCPUs, ns", SWITCH_NS as f64, Assumed, "2 to 4 us with the state of KVM"),
        constant("candidate looked at, ns", CANDIDATE_NS as f64, Assumed, "a lookup of a task"),
        constant("yield without a switch, ns", YIELD_NS as f64, Assumed, "a system call"),
        constant("interrupt to a sibling, ns", IPI_NS as f64, Assumed, "an exit on each side"),
        constant("interrupt received, ns", IPI_RECEIVE_NS as f64, Assumed, "an exit"),
    ]
}

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
            exit_ns: EXIT_NS,
            spin_window_ns: SPIN_WINDOW_NS,
            candidate_ns: CANDIDATE_NS,
            double_lock_ns: DOUBLE_LOCK_NS,
            double_lock_per_waiter_ns: DOUBLE_LOCK_PER_WAITER_NS,
            switch_ns: SWITCH_NS,
            yield_ns: YIELD_NS,
            ipi_ns: IPI_NS,
            ipi_receive_ns: IPI_RECEIVE_NS,
            tick_ns: TICK_NS,
            gang_slice_ns: GANG_SLICE_NS,
            pv_spin_ns: PV_SPIN_NS,
        }
    }
}
