//! Workloads against which Pagefold is tested and demonstrated: one process with exactly known memory, and a fleet of
//! real virtual machines. The binary `pagefold-lab` runs both; this library is what it shares with the tests that
//! start it: the language of layouts ([`layout_spec`]), the lines that the binary prints ([`output_lines`]), the way to start it
//! ([`client`]), how it is looked at ([`process_checks`]), and what a fleet needs on this machine ([`assets`]).

#![forbid(unsafe_code)]

pub mod assets;
pub mod client;
pub mod content;
pub mod ksm;
pub mod layout_spec;
pub mod machine;
pub mod mixture;
pub mod output_lines;
pub mod process_checks;
