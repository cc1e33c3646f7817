//! Scheduling of vCPUs under over-commit: what a schedule looks like, what it costs, and which one would be better.
//!
//! [`decide`] has the measures of a schedule and the model of a host. [`machines`] finds the threads that run vCPUs,
//! [`sample`] reads their counters over an interval, and [`spread`] keeps siblings on different run queues by their
//! affinity. [`schedule`] describes which task ran on which CPU, and [`picture`] draws it. [`sources`]
//! reads it from files of other tools, and [`perfetto`] writes it for one.

#![forbid(unsafe_code)]

pub mod decide;
pub mod machines;
pub mod monitor;
pub mod perfetto;
pub mod picture;
pub mod recorder;
pub mod sample;
pub mod scenario;
pub mod schedule;
pub mod sources;
pub mod spread;
pub mod text;
pub mod wire;
