//! The commands.

pub mod account;
pub mod census;
pub mod completions;
pub mod doctor;
pub mod record;
pub mod schema;
pub mod unmerge;
