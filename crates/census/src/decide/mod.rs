//! Decisions about the results of a census, without I/O.

pub mod estimate;
pub mod sketch;
