//! Pure decisions about merging.

pub mod outcome;
pub mod pace;
pub mod plan;
pub mod policy;
pub mod prediction_error;
