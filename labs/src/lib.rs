//! Workloads against which Pagefold is tested and demonstrated: one process with exactly known memory, and a fleet of
//! real virtual machines. The binary `pagefold-lab` runs both; this library is what it shares with the tests that
//! start it: the language of layouts ([`spec`]), the lines that the binary prints ([`lines`]), the way to start it
//! ([`client`]), how it is looked at ([`look`]), and what a fleet needs on this machine ([`assets`]).

#![forbid(unsafe_code)]

pub mod assets;
pub mod client;
pub mod content;
pub mod ksm;
pub mod lines;
pub mod look;
pub mod machine;
pub mod mixture;
pub mod spec;
