//! The loop: observe, census, plan, apply, settle, verify, over any [`Host`](pagefold_host::Host).
//!
//! Decisions are the model's and effects are the host's; what is here is their order in time, and the promise that
//! whatever is changed is put back: see [`session`].

#![forbid(unsafe_code)]

pub mod daemon;
#[cfg(test)]
mod fake;
pub mod follow;
pub mod journal;
pub mod ksmd;
pub mod merge;
pub mod policy;
pub mod prepare;
pub mod session;
pub mod splitting;
pub mod trial;
pub mod unmerge;
pub mod verify;
mod watch;

pub use session::Session;
