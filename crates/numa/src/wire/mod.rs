//! The reports in JSON.

pub mod map;
pub mod plan;
