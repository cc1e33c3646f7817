//! The reports in JSON.

pub mod map;
pub mod sim;
pub mod spread;
pub mod status;
