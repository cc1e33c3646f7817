//! Accounting: what each process, VM, container and job costs in physical memory, by fair shares of each frame.
//!
//! [`footprint`] reads who maps which frame, [`decide`] divides the frames; [`wire`] and [`text`] are the report.

#![forbid(unsafe_code)]

pub mod decide;
pub mod footprint;
pub mod text;
pub mod wire;
