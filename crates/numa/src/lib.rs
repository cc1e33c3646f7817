//! NUMA placement: on which nodes the memory and the threads of processes and virtual machines are.
//!
//! [`topology`] reads the nodes of the host, [`page_nodes`] counts the pages of a process on each node, and [`threads`]
//! reads where its threads run and may run. [`map`] combines them for the selected processes, and
//! [`problem`] turns a map into a planning problem. [`decide`] computes which share of the accesses is remote, which merged frames
//! are read from other nodes, and a plan that moves machines to their memory or memory to its machines. [`working_set`]
//! measures which memory machines use, for the weights of a plan. [`wire`] and [`text`] produce the
//! report.

#![forbid(unsafe_code)]

pub mod apply;
pub mod decide;
pub mod keeper;
pub mod machine;
pub mod map;
pub mod page_nodes;
pub mod placement_record;
pub mod predict;
pub mod problem;
pub mod text;
pub mod threads;
pub mod topology;
pub mod wire;
pub mod working_set;
