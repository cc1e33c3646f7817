//! A plan: what is to be enrolled, what that should save, and what it should cost. Pure data, made from a census.

use crate::domain::Domain;
use crate::process::Process;
use crate::savings::Reach;
use crate::units::{AddressRange, Pages, Pid};
use std::time::Duration;

/// What is to be enrolled in KSM.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// Whether processes are enrolled whole instead of range by range.
    pub whole: bool,
    /// By process, in the order of the census. Processes of which nothing pays are not among them.
    pub targets: Vec<Target>,
    /// What it should come to.
    pub predicted: Predicted,
    /// Processes of the census that are left alone on purpose.
    pub left_alone: Vec<LeftAlone>,
}

/// A process in a plan.
#[derive(Clone, Debug)]
pub struct Target {
    /// Which one.
    pub process: Process,
    /// Its trust domain.
    pub domain: Domain,
    /// What is to be enrolled of it: ascending, disjoint, each within one region of the census.
    pub ranges: Vec<PlannedRange>,
    /// What the program enrolled itself and does not pay: withdrawn while ksmd works, and put back afterwards.
    /// Ascending and disjoint; nothing is merged in it.
    pub narrowed: Vec<AddressRange>,
}

/// A range in a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedRange {
    /// Where.
    pub range: AddressRange,
    /// Resident pages in it that are not merged yet: what ksmd has to scan.
    pub pages: Pages,
    /// Those of them that have a copy or hold zeros: what should merge.
    pub merging: Pages,
    /// Those of them that hold zeros.
    pub zero: Pages,
    /// Whether the program has enrolled it already.
    pub enrolled: bool,
}

/// What a plan should come to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Predicted {
    /// Frames freed, pages scanned, huge pages split.
    pub reach: Reach,
    /// Pages that should merge, kept copies included.
    pub merging: Pages,
    /// Regions that the ranges' boundaries add to the processes, at most.
    pub regions_added: u64,
    /// CPU time of ksmd.
    pub ksmd: Duration,
    /// Wall time from enrolling until merged, at the bound on ksmd's CPU.
    pub wall: Duration,
}

/// Why a process is left alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftAlone {
    /// Which.
    pub pid: Pid,
    /// Its name.
    pub comm: String,
    /// Why, in one phrase.
    pub why: String,
}
