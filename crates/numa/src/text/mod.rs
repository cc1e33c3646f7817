//! The reports as text for the terminal.

pub mod apply;
pub mod map;
pub mod plan;
pub mod predict;
