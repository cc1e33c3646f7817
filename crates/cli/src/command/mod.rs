//! The commands.

pub mod account;
pub mod census;
pub mod completions;
pub mod record;
pub mod doctor;
pub mod schema;
