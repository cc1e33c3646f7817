//! The reports as text for the terminal.

pub mod spread;
pub mod status;
