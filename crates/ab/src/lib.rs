//! Experiments on a host: whether a change of its settings changes a workload, by how much, and how sure that is.
//!
//! [`decide`] has the design of an experiment and the statistics of its samples.

#![forbid(unsafe_code)]

pub mod decide;
