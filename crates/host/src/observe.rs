//! Typed observations of a host, read through the port.
