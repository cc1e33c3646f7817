//! The reports in JSON.

pub mod sim;
pub mod spread;
pub mod status;
