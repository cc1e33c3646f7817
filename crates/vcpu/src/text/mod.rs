//! The reports as text for the terminal.

pub mod sim;
