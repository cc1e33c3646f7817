//! Merging all the time: the loop with a clock.
//!
//! [`decide`] is the state machine, `step(state, event) -> (state, actions)`, pure. [`run`] feeds it and carries out
//! what it orders. [`wire`] and [`text`] are its status.

#![forbid(unsafe_code)]

pub mod decide;
pub mod run;
pub mod text;
pub mod wire;
