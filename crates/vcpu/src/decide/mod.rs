//! Pure figures of vCPU scheduling.

pub mod model;
