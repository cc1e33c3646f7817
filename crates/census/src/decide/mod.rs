//! Pure decisions about what a census shows.

pub mod estimate;
pub mod sketch;
