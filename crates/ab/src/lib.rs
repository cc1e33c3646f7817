//! Experiments on a host: whether a change of its settings changes a workload, by how much, and how sure that is.
//!
//! [`decide`] has the design of an experiment and the statistics of its samples. [`experiment`] is what the operator
//! writes, [`record`] what a campaign keeps, and [`campaign`] carries it out with [`arms`] and [`workload`].

#![forbid(unsafe_code)]

pub mod arms;
pub mod campaign;
pub mod decide;
pub mod environment;
pub mod experiment;
pub mod html;
#[cfg(test)]
mod made_up_campaign;
pub mod metric;
pub mod record;
pub mod samples;
pub mod text;
pub mod wire;
pub mod workload;
