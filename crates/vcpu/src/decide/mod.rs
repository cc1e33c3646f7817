//! Pure figures and decisions of vCPU scheduling.

pub mod measures;
pub mod model;
pub mod ready_time;
pub mod spread;
