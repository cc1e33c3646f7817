//! The commands.

pub mod ab;
pub mod account;
pub mod census;
pub mod completions;
pub mod config;
pub mod daemon;
pub mod doctor;
pub mod engine;
pub mod enrolled_domains;
pub mod guest;
pub mod man;
pub mod merge;
pub mod numa;
mod numa_placement;
pub mod policy;
pub mod record;
pub mod recover;
pub mod report;
pub mod run;
pub mod schema;
pub mod sim;
pub mod top;
pub mod tune;
pub mod unmerge;
pub mod vcpu;
