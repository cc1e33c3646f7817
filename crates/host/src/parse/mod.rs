//! The kernel's text formats, as functions of bytes and never of a system.
//!
//! What is read from `/proc` and `/sys` is written by the kernel and by the processes it describes, who choose their
//! names, their arguments and the names of their files. So every parser takes any bytes whatever, and answers with a
//! value or with the reason why there is none:
//! - a field that other kernel versions have and this one does not is [`Absent::NotOnThisKernel`];
//! - text that is not what the kernel prints, and numbers that do not fit, are [`Absent::Malformed`] and shown;
//! - a file whose last line has no end was cut off. The cut line is never taken for a value, since its digits may be
//!   the beginning of a longer number, and a field that is missing from such a file is malformed, not absent.
//!
//! What container runtimes write of a container's labels is read in the same way, and is none where it is malformed.
//! Names keep their bytes as far as they are UTF-8; the others become U+FFFD. Kernels from 4.18 to 6.18 were looked
//! at.

mod cgroup;
mod connector;
mod ksm;
mod labels;
mod memory;
mod process;
mod smaps;
mod text;

pub use cgroup::{mount_root, parse_limit as cgroup_limit, reclaimable_bytes as cgroup_reclaimable};
pub use connector::{PROC_EVENT_EXEC, ProcEvent, ProcRequest, encode_proc_request, proc_event};
pub use ksm::{ksm, process_ksm};
pub use labels::{labels, strip_to_labels};
pub use memory::{buffers_and_cached, meminfo, pressure, pressure_some, vmstat};
pub use process::{
    PF_EXITING, PF_KTHREAD, Stat, Statm, Status, arguments, bound_nodes, cgroup, is_at_secure, job_environment, stat,
    statm, status,
};
pub use smaps::{maps, rollup, smaps};
pub use text::{CpuTicks, Schedstat, bracketed_word, cpu_ticks, number, number_list, schedstat};

#[cfg(doc)]
use pagefold_base::Absent;
