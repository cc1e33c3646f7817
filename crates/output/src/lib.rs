//! What all reports share: wire types of common parts, and tables, numbers and wrapped lines for the terminal.
//!
//! Field names of wire types are a promise: a change of meaning is a new number in `schema`.

#![forbid(unsafe_code)]

pub mod text;
pub mod wire;
