//! Merging: choose ranges, enroll them, pace ksmd, verify, unenroll ranges that do not stay merged, unmerge.
//!
//! [`decide`] makes the pure decisions: the plan, the pace, the policies, the verdict. The other modules carry them out
//! over any [`Host`](pagefold_host::Host), within a [`Session`](pagefold_host::transaction::Session) that undoes
//! temporary changes. [`wire`] and [`text`] are the reports.

#![forbid(unsafe_code)]

pub mod continuous_merge;
pub mod decide;
pub mod execute;
pub mod ksmd;
pub mod merge_monitor;
mod merge_probes;
mod page_sample;
mod plan_contents;
pub mod policy;
pub mod prepare;
pub mod process_pages;
pub mod recheck;
pub mod split_zeros;
mod stable_ages;
pub mod text;
pub mod unmerge;
pub mod verify;
pub mod wire;

pub use merge_probes::MergeProbes;
pub use page_sample::sample_pages;
pub use plan_contents::count_plan_contents;
pub use stable_ages::StableAges;
