//! The trust domains of processes that are already enrolled in KSM. KSM has one tree, so their pages merge with those
//! of any process that is enrolled next.

use anyhow::anyhow;
use pagefold_base::domain::{DomainConfig, TrustDomain};
use pagefold_base::{Pid, ProcessId};
use pagefold_host::{Host, observe};
use pagefold_merge::verify;
use std::collections::BTreeSet;

/// The host's initial PID namespace (include/linux/proc_ns.h, `PROC_PID_INIT_INO`).
const INITIAL_PID_NAMESPACE: &str = "pid:[4026531836]";

/// The side channel of sharing across trust domains.
pub const SIDE_CHANNEL_NOTE: &str =
    "a process that times its writes to a shared page learns that another process has it";

/// The trust domains of processes that are enrolled, wholly or in part, by any program.
#[derive(Debug)]
pub struct EnrolledDomains {
    /// The trust domains.
    pub domains: BTreeSet<TrustDomain>,
    /// Whether there may be enrolled processes that this process cannot see: those of other users without root, and
    /// those outside a container.
    pub may_be_incomplete: bool,
}

impl EnrolledDomains {
    /// Find the domains of all enrolled processes except the process `except`.
    pub fn observe(host: &dyn Host, domains: &DomainConfig, except: Option<ProcessId>) -> anyhow::Result<Self> {
        let enrolled =
            verify::find_enrolled(host).map_err(|why| anyhow!("cannot find the enrolled processes: {why}"))?;
        let domain = |id: &ProcessId| {
            // A process that has ended since shares nothing.
            let process = pagefold_host::hold(host, *id).and_then(|handle| observe::process(host, &*handle)).ok()?;
            Some(domains.domain(&process))
        };
        let other_processes = enrolled.processes.iter().filter(|id| Some(**id) != except);
        Ok(Self {
            domains: other_processes.filter_map(domain).collect(),
            may_be_incomplete: enrolled.may_be_incomplete || !lists_all_processes(host),
        })
    }
}

/// Whether `/proc` lists all processes. It does not in another PID namespace, nor with the mount option `hidepid`,
/// which hides process 1 from all users but root.
pub fn lists_all_processes(host: &dyn Host) -> bool {
    let namespaces = host.open(Pid(std::process::id())).and_then(|this| this.links("ns"));
    host.open(Pid(1)).is_ok()
        && namespaces.is_ok_and(|namespaces| namespaces.iter().any(|namespace| namespace == INITIAL_PID_NAMESPACE))
}
