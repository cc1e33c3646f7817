//! Parts common to all reports: JSON types, and tables, numbers and wrapped lines for the terminal.
//!
//! Field names of JSON types are stable. If a meaning changes, the number in `schema` changes.

#![forbid(unsafe_code)]

pub mod text;
pub mod wire;
