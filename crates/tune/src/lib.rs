//! `pagefold tune`: carries out what the findings of `pagefold doctor` ask for, and undoes it.
//!
//! [`facts`] reads the state of the host, [`decide`] plans, [`apply`] makes the live changes through transactions,
//! [`kept`] reads back what is in force, and [`counters`] reads what shows their effect. Boot parameters and definitions of virtual machines are printed as commands and
//! diffs; only `virsh define` is run, on request, by the command.

#![forbid(unsafe_code)]

pub mod apply;
pub mod counters;
pub mod decide;
pub mod facts;
pub mod kept;
pub mod text;
pub mod vcpus;
pub mod wire;
