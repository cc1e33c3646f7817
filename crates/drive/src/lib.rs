//! The loop: observe, census, plan, apply, settle, verify, over any [`Host`](pagefold_host::Host).
//!
//! Decisions are the model's and effects are the host's; what is here is their order in time, and the promise that
//! whatever is changed is put back: see [`session`].

#![forbid(unsafe_code)]

pub mod journal;
pub mod session;
pub mod unmerge;

pub use session::Session;
