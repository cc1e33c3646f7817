//! The reports in JSON.

pub mod spread;
pub mod status;
