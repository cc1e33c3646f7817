//! The commands.

pub mod census;
pub mod completions;
pub mod doctor;
pub mod schema;
