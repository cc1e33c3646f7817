//! A gang scheduler for virtual machines: the vCPUs of a VM run at the same time, in one time slice.
//!
//! A vCPU that is preempted while it holds a lock of its guest makes its siblings spin until it runs again. The scheduler
//! of the kernel knows nothing of VMs and lets this happen often when a host is over-committed. Here a BPF program for
//! `sched_ext` (Linux 6.13 and later) decides instead, in `bpf/gang.bpf.c`. This crate finds the VMs
//! ([`members`]), checks the kernel ([`support`]), and loads the program ([`program`], feature `sched-ext`). The kernel
//! removes the program and returns to its own scheduler when this process ends, however it ends, and when a task waits
//! longer than 5 s. Nothing of a thread is changed: there is nothing to undo.

#![forbid(unsafe_code)]

pub mod decide;
pub mod members;
#[cfg(all(feature = "sched-ext", target_arch = "x86_64"))]
pub mod program;
pub mod support;
pub mod text;
pub mod wire;

/// Whether this build has the loader of the program.
pub const HAS_LOADER: bool = cfg!(all(feature = "sched-ext", target_arch = "x86_64"));
