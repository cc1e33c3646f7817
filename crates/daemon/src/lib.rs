//! The daemon: continuous merging.
//!
//! [`decide`] is the pure state machine, `step(state, event) -> (state, effects)`. [`run`] feeds it with events and
//! executes its effects. [`wire`] and [`text`] are its status.

#![forbid(unsafe_code)]

pub mod decide;
pub mod run;
pub mod text;
pub mod wire;
