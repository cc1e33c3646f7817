//! A model of a host's memory and of ksmd, exact to the counter.
//!
//! [`decide`] holds the model: memory as the kernel maps it, ksmd's scan, its trees and its counters, and layouts that
//! are played on the model and on the real kernel side by side. [`calibration`] measures the CPU time of the real ksmd,
//! by which the model tells that of a scan. [`scenario`] reads scenarios: a host, and the machines that
//! run on it; [`scenario_text`] writes them. [`comparison`] simulates one under several policies, and [`picture`] draws
//! the result; [`tuning`] searches one for a scenario. [`observation`] reads the memory of a host, from which
//! [`decide::estimate`] makes a scenario; [`estimate_notes`] says what that does not know, and [`prediction`] how policies
//! would do. [`host`] puts a scenario behind the host port, so that Pagefold's commands run on it.

#![forbid(unsafe_code)]

pub mod calibration;
pub mod comparison;
pub mod decide;
pub mod estimate_notes;
pub mod host;
pub mod observation;
#[cfg(feature = "parquet")]
pub mod parquet;
pub mod picture;
pub mod prediction;
pub mod scenario;
pub mod scenario_text;
pub mod stand_in;
pub mod text;
pub mod tuning;
pub mod wire;
