//! Accounting: what processes, VMs, containers and jobs cost in physical memory, by fair shares of each frame.
//!
//! [`footprint`] reads which processes map which frames, [`decide`] divides the frames among them, and [`wire`] and
//! [`text`] produce the report.

#![forbid(unsafe_code)]

pub mod decide;
pub mod footprint;
pub mod text;
pub mod wire;
