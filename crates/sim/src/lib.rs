//! A model of a host's memory and of ksmd, exact to the counter.
//!
//! [`decide`] holds all of it: memory as the kernel maps it, ksmd's scan, its trees and its counters, and layouts that
//! are played on the model and on the real kernel side by side. Nothing here performs I/O, and time is an argument.

#![forbid(unsafe_code)]

pub mod decide;
