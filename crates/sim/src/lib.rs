//! A model of a host's memory and of ksmd, exact to the counter.
//!
//! [`decide`] holds the model: memory as the kernel maps it, ksmd's scan, its trees and its counters, and layouts that
//! are played on the model and on the real kernel side by side. [`calibration`] measures the CPU time of the real ksmd,
//! by which the model tells that of a scan. [`scenario`] reads scenarios: a host, and the machines that
//! run on it. [`comparison`] simulates one under several policies, and [`picture`] draws the result; [`tuning`]
//! searches one for a scenario. [`host`] puts a scenario behind the host port, so that Pagefold's commands run on it.

#![forbid(unsafe_code)]

pub mod calibration;
pub mod comparison;
pub mod decide;
pub mod host;
#[cfg(feature = "parquet")]
pub mod parquet;
pub mod picture;
pub mod scenario;
pub mod stand_in;
pub mod text;
pub mod tuning;
pub mod wire;
