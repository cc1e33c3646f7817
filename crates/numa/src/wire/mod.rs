//! The reports in JSON.

pub mod apply;
pub mod map;
pub mod plan;
pub mod predict;
