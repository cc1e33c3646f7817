//! What people and programs get to see: the wire types of `--json` with their schemas, and the tables of the terminal.
//!
//! The types here are the only ones that are serialized. Their field names are a promise: a change of meaning is a new
//! number in `schema`.

#![forbid(unsafe_code)]

pub mod account;
pub mod census;
pub mod daemon;
pub mod doctor;
pub mod engine;
pub mod history;
pub mod merge;
pub mod policy;
pub mod recover;
pub mod text;
pub mod unmerge;
pub mod wire;
