//! The reports as text for the terminal.

pub mod map;
pub mod plan;
