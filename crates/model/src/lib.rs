//! The vocabulary of Pagefold and every pure decision.
//!
//! What is a page, a region, a process, a reading; which pages merging would free and at what price; what a sample says
//! about the whole; what is wrong with a host. Everything here is a function of its arguments: no I/O, no clock, no
//! thread, no environment, no global. Randomness and time come in as arguments. Types are plain data and are not
//! serializable by themselves: the wire forms live in `pagefold-report`.

#![forbid(unsafe_code)]

pub mod account;
pub mod allowance;
pub mod census;
pub mod class;
pub mod content;
pub mod daemon;
pub mod difference;
pub mod doctor;
pub mod domain;
pub mod engine;
pub mod estimate;
pub mod exclusion;
pub mod guard;
pub mod hot;
pub mod huge;
pub mod identity;
pub mod ksm;
pub mod lasting;
pub mod memory;
pub mod mix;
pub mod outcome;
pub mod pace;
pub mod plan;
pub mod policy;
pub mod process;
pub mod reading;
pub mod region;
pub mod savings;
pub mod segment;
pub mod sketch;
pub mod turn;
pub mod units;

pub use class::{Counts, PageClass};
pub use content::{ContentKind, Fingerprint};
pub use reading::{Absent, Reading};
pub use units::{AddressRange, Bytes, NetBytes, PageSize, Pages, Pfn, Pid, ProcessId};
