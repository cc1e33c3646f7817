//! Scheduling of vCPUs under over-commit: what a schedule looks like, what it costs, and which one would be better.
//!
//! [`decide`] has the measures of a schedule and the model of a host.

#![forbid(unsafe_code)]

pub mod decide;
pub mod scenario;
pub mod text;
pub mod wire;
