//! Merging: choose ranges, enroll them, pace ksmd, verify, unenroll what does not stay merged, unmerge.
//!
//! [`decide`] holds the pure decisions: the plan, the pace, the policies, the verdict. The other modules carry them out
//! over any [`Host`](pagefold_host::Host), within a [`Session`](pagefold_host::transaction::Session) that undoes what
//! is to be undone. [`wire`] and [`text`] are the reports.

#![forbid(unsafe_code)]

mod ages;
mod bound;
mod candidates;
pub mod decide;
pub mod execute;
pub mod follow;
pub mod ksmd;
pub mod policy;
pub mod prepare;
mod probes;
pub mod recheck;
mod sample;
pub mod splitting;
pub mod text;
pub mod trial;
pub mod unmerge;
pub mod verify;
pub mod wire;

pub use ages::Ages;
pub use bound::keep_within;
pub use candidates::plan;
pub use probes::Probes;
pub use sample::sample_pages;
