//! Pure figures of vCPU scheduling.
