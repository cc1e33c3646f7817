//! Parsers of the kernel's text formats. They take bytes and never access a system.
//!
//! The kernel writes `/proc` and `/sys`, but processes choose their own names, arguments and file names. Every parser
//! therefore accepts any bytes. It returns a value or the reason why there is none:
//! - A field that other kernel versions have and this one does not is [`Absent::NotOnThisKernel`].
//! - Text that the kernel does not print, and numbers that do not fit, are [`Absent::Malformed`], and the message shows
//!   them.
//! - A file whose last line has no newline was truncated. The truncated line is never used as a value, because its
//!   digits may be the beginning of a longer number. A field that is missing from such a file is malformed, not absent.
//!
//! The files in which container runtimes store labels are parsed in the same way, but malformed files have no labels.
//! Names keep their bytes as far as they are UTF-8; other bytes become U+FFFD. Kernels from 4.18 to 6.18 were examined.

mod cgroup;
mod connector;
mod definition_equality;
mod guest;
mod ksm;
mod labels;
mod libvirt;
mod libvirt_definition;
mod memory;
mod process;
mod qemu_monitor;
mod smaps;
mod text;

pub use cgroup::{
    CpuMax, cpu_max, mount_root, parse_limit as cgroup_limit, reclaimable_bytes as cgroup_reclaimable,
    throttled_periods,
};
pub use connector::{PROC_EVENT_EXEC, ProcEvent, ProcRequest, encode_proc_request, proc_event};
pub use definition_equality::is_same_definition;
pub use guest::{base64, guest_system, guest_vcpus, steal_percent};
pub use ksm::{ksm, process_ksm};
pub use labels::{labels, strip_to_labels};
pub use libvirt::{libvirt_domain_state, strip_libvirt_secrets};
pub use libvirt_definition::libvirt_definition;
pub use memory::{buffers_and_cached, meminfo, pressure, pressure_some, vmstat};
pub use process::{
    PF_EXITING, PF_KTHREAD, Stat, Statm, Status, arguments, bound_nodes, cgroup, context_switches, innermost_pid,
    is_at_secure, job_environment, memory_policies, node_memory, stat, statm, status,
};
pub use qemu_monitor::{monitor_backends, monitor_vcpus, vcpu_slots};
pub use smaps::{maps, rollup, smaps};
pub use text::{
    CpuTicks, IdleTicks, Schedstat, bracketed_word, cpu_ticks, file_mode, idle_ticks, number, number_list,
    parenthesized_word, schedstat,
};

#[cfg(doc)]
use pagefold_base::Absent;
