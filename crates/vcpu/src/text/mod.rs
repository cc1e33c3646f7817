//! The reports as text for the terminal.

pub mod map;
pub mod record;
pub mod sim;
pub mod spread;
pub mod status;
