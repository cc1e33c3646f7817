//! The model, as pure code: no I/O, clock, thread, environment or global.
//!
//! - [`rules`]: what differs between kernels, as a value.
//! - [`memory`]: processes, VMAs, page table entries and frames.
//! - [`entry_runs`]: the page table entries of a region, as runs.
//! - [`ksmd`]: the scan, and [`ksmd::KsmModel`], through which everything is changed.
//! - [`stable_tree`]: merged pages, chains and duplicates.
//! - [`unstable_tree`]: unchanged pages of a scan.
//! - [`red_black_tree`]: trees of the same shape as the kernel's.
//! - [`advisor`]: the scan-time advisor.
//! - [`counters`]: the counters of `/sys/kernel/mm/ksm` and `/proc/PID/ksm_stat`.
//! - [`cost`]: CPU time from what ksmd does, and its fit to measurements.
//! - [`ksmd_time`]: when ksmd works and when it sleeps.
//! - [`scenario`]: a host and the machines that arrive on it, as data.
//! - [`workload`]: machines, their memory and their writes, drawn from a scenario and a seed.
//! - [`layouts`]: steps that lay out and change memory, generated from a seed.
//! - [`layout_player`]: plays a layout on the model alone.

pub mod advisor;
pub mod cost;
pub mod counters;
pub mod entry_runs;
pub mod ksmd;
pub mod ksmd_time;
pub mod layout_player;
pub mod layouts;
pub mod memory;
pub mod red_black_tree;
pub mod rules;
pub mod scenario;
pub mod stable_tree;
pub mod unstable_tree;
pub mod workload;
