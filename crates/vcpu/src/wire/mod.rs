//! The reports in JSON.

pub mod map;
pub mod record;
pub mod sim;
pub mod spread;
pub mod status;
