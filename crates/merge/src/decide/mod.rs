//! Pure decisions about merging.

pub mod difference;
pub mod outcome;
pub mod pace;
pub mod plan;
pub mod policy;
