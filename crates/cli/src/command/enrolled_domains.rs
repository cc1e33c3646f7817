//! Who is enrolled in KSM already, by trust domain: in its one tree their pages meet those of whoever is enrolled next.

use anyhow::anyhow;
use pagefold_base::domain::{DomainConfig, TrustDomain};
use pagefold_base::{Pid, ProcessId};
use pagefold_host::{Host, observe};
use pagefold_merge::verify;
use std::collections::BTreeSet;

/// The namespace of process numbers in which a host begins (include/linux/proc_ns.h, `PROC_PID_INIT_INO`).
const INITIAL_PID_NAMESPACE: &str = "pid:[4026531836]";

/// What sharing across trust domains gives away.
pub const SIDE_CHANNEL_NOTE: &str = "whoever times writes to such a page learns that another has it";

/// Processes that are enrolled, wholly or in part, by whoever enrolled them.
#[derive(Debug)]
pub struct EnrolledDomains {
    /// Their trust domains.
    pub domains: BTreeSet<TrustDomain>,
    /// Whether there may be others that cannot be seen from here: those of other users without root, and those outside
    /// of a container.
    pub may_be_incomplete: bool,
}

impl EnrolledDomains {
    /// All but one, if that is whose neighbours they are.
    pub fn observe(host: &dyn Host, domains: &DomainConfig, except: Option<ProcessId>) -> anyhow::Result<Self> {
        let enrolled =
            verify::find_enrolled(host).map_err(|why| anyhow!("cannot tell who is enrolled already: {why}"))?;
        let domain = |id: &ProcessId| {
            // Who has ended since shares nothing.
            let process = pagefold_host::hold(host, *id).and_then(|handle| observe::process(host, &*handle)).ok()?;
            Some(domains.domain(&process))
        };
        let others = enrolled.processes.iter().filter(|id| Some(**id) != except);
        Ok(Self {
            domains: others.filter_map(domain).collect(),
            may_be_incomplete: enrolled.may_be_incomplete || !lists_all_processes(host),
        })
    }
}

/// Whether `/proc` lists everybody: it does not in another namespace, nor where it is mounted with `hidepid`, which
/// hides the first process from all but root.
pub fn lists_all_processes(host: &dyn Host) -> bool {
    let spaces = host.open(Pid(std::process::id())).and_then(|this| this.links("ns"));
    host.open(Pid(1)).is_ok() && spaces.is_ok_and(|spaces| spaces.iter().any(|space| space == INITIAL_PID_NAMESPACE))
}
