//! Tests that boot guests, in one program: an emulated CPU takes one CPU of the host, so two of them run at the same time.

#![forbid(unsafe_code)]

mod libvirt_nodes;
mod numa_apply;
mod placement;
mod working_set;
