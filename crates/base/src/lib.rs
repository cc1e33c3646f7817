//! Types shared by all of Pagefold: units, readings, processes and their identity, regions, trust domains.
//!
//! All items are plain data and functions of their arguments: no I/O, no clock, no thread, no environment, no global
//! state. Types are not serializable: wire formats are in the crates that use them and in `pagefold-output`.

#![forbid(unsafe_code)]

pub mod class;
pub mod content;
pub mod count_text;
pub mod domain;
pub mod engine;
pub mod exclusion;
pub mod guard;
pub mod guest;
pub mod id_set;
pub mod identity;
pub mod ksm;
pub mod libvirt;
pub mod memory;
pub mod merge_lifetime;
pub mod process;
pub mod range_optimizer;
pub mod reading;
pub mod region;
pub mod savings;
pub mod setting;
pub mod splitmix;
pub mod tuner;
pub mod units;

pub use class::{PageClass, PageCounts};
pub use content::{ContentKind, Fingerprint, OrderKey};
pub use count_text::count_text;
pub use id_set::IdSet;
pub use reading::{Absent, Reading};
pub use units::{AddressRange, Bytes, NetBytes, PageSize, Pages, Pfn, Pid, ProcessId};
