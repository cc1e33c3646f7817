//! Workloads for tests and demonstrations of Pagefold: one process with exactly known memory, and a fleet of real
//! virtual machines. The binary `pagefold-lab` runs both. This library is the code that the binary shares with the
//! tests: the language of layouts ([`layout_spec`]), the lines that the binary prints ([`output_lines`]), starting the
//! binary ([`client`]), checks of a process ([`process_checks`]), the files that a fleet needs ([`assets`]), and tests
//! inside an emulated machine ([`machine`], [`scenes`]). [`campaigns`] simulates experiments with known effects.

#![forbid(unsafe_code)]

pub mod assets;
pub mod campaigns;
pub mod client;
pub mod content;
pub mod fault_points;
pub mod gang_machine;
pub mod ksm;
pub mod layout_spec;
pub mod machine;
pub mod mixture;
pub mod output_lines;
pub mod process_checks;
pub mod scenes;
