//! The commands.

pub mod account;
pub mod census;
pub mod completions;
pub mod doctor;
pub mod merge;
pub mod record;
pub mod run;
pub mod schema;
