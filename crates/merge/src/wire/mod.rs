//! The serialized reports of merging.

pub mod merge;
pub mod policy;
pub mod recover;
pub mod unmerge;
