//! The model, as pure code: no I/O, clock, thread, environment or global.
//!
//! - [`rules`]: what differs between kernels, as a value.
//! - [`memory`]: processes, VMAs, page table entries and frames.
//! - [`entry_runs`]: the page table entries of a region, as runs.
//! - [`ksmd`]: the scan, and [`ksmd::KsmModel`], through which everything is changed.
//! - [`stable_tree`]: merged pages, chains and duplicates.
//! - [`unstable_tree`]: unchanged pages of a scan.
//! - [`red_black_tree`]: trees of the same shape as the kernel's.
//! - [`counters`]: the counters of `/sys/kernel/mm/ksm` and `/proc/PID/ksm_stat`.
//! - [`cost`]: CPU time from what ksmd does, and its fit to measurements.
//! - [`ksmd_time`]: when ksmd works and when it sleeps.
//! - [`host_state`]: a host in virtual time: processes, ksmd, and machines that come and go. Beside it, `frame_numbers`
//!   numbers the frames of pages, and `machine_events` says what machines do next.
//! - [`scenario`]: a host and the machines that arrive on it, as data.
//! - [`observed_host`]: the memory of a host, as a scan found it.
//! - [`content_order`]: the order of its contents by their bytes.
//! - [`estimate`]: a scenario from that, and [`known_layouts`] its machines with the pages of its processes.
//! - [`scale`]: the same host with a part of its memory.
//! - [`what_if`]: changes of a scenario, as text.
//! - [`workload`]: machines, their memory and their writes, drawn from a scenario and a seed.
//! - [`content_pool`]: new contents for them.
//! - [`policies`]: the policies that set ksmd's pace.
//! - [`simulation`]: a scenario in virtual time under a policy.
//! - [`samples`]: what a simulated host looks like, and what a run has shown.
//! - [`measures`]: what a simulated run saved and cost.
//! - [`tuning`]: which policies a search for ksmd's pace simulates, and which of them it chooses.
//! - [`layouts`]: steps that lay out and change memory, generated from a seed.
//! - [`layout_player`]: plays a layout on the model alone.

pub mod content_order;
pub mod content_pool;
pub mod cost;
pub mod counters;
pub mod entry_runs;
pub mod estimate;
pub(crate) mod frame_numbers;
pub mod host_state;
pub mod known_layouts;
pub mod ksmd;
pub mod ksmd_time;
pub mod layout_player;
pub mod layouts;
mod machine_events;
pub mod measures;
pub mod memory;
pub mod observed_host;
pub mod policies;
pub mod red_black_tree;
pub mod rules;
pub mod samples;
pub mod scale;
pub mod scenario;
pub mod simulation;
pub mod stable_tree;
pub mod tuning;
pub mod unstable_tree;
pub mod what_if;
pub mod workload;
