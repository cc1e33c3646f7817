//! The reports as text for the terminal.

pub mod sim;
pub mod spread;
pub mod status;
