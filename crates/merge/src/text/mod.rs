//! The reports of merging as text.

pub mod merge;
pub mod policy;
pub mod unmerge;
