//! Files of other tools that contain events of the scheduler.
//!
//! [`perf_data`] reads the files of perf. [`event_format`] has the layouts of the kernel's tracepoints, which such files
//! contain. [`threads`] finds out which threads are vCPUs.

pub mod event_format;
pub mod perf_data;
pub mod threads;
