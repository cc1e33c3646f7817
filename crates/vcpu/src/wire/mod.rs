//! The reports in JSON.

pub mod sim;
