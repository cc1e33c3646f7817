//! Trust domains: who may share memory with whom.
//!
//! KSM has one tree: whoever is enrolled shares with everybody else who is, and a write to a shared page takes longer
//! than one to a page of one's own, so sharing tells a neighbour what one's memory holds. A census therefore counts
//! what lies within a domain and what crosses domains apart.

use crate::process::Process;
use std::fmt;

/// How processes are sorted into trust domains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DomainRule {
    /// One domain for each user; each virtual machine of root is a domain of its own.
    #[default]
    User,
    /// One domain for each cgroup.
    Cgroup,
    /// One domain for each virtual machine or process.
    Process,
    /// Everything is one domain.
    Host,
}

/// A trust domain.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Domain {
    /// All of it.
    Host,
    /// The processes of a user.
    User(u32),
    /// The processes of a cgroup.
    Cgroup(String),
    /// A virtual machine, by its name, if it has one, and its monitor's process number.
    Vm(Option<String>, u32),
    /// A process, by its number.
    Process(u32),
}

impl DomainRule {
    /// The domain of a process. A process whose user or cgroup cannot be read is a domain of its own.
    pub fn domain(self, process: &Process) -> Domain {
        let pid = process.id.pid.0;
        let alone = match &process.identity.vm {
            Some(vm) => Domain::Vm(vm.name.clone(), pid),
            None => Domain::Process(pid),
        };
        match self {
            Self::Host => Domain::Host,
            Self::Process => alone,
            Self::Cgroup => process.cgroup.clone().map_or(alone, Domain::Cgroup),
            Self::User => match process.uid {
                Ok(0) if process.identity.vm.is_some() => alone,
                Ok(uid) => Domain::User(uid),
                Err(_) => alone,
            },
        }
    }
}

impl fmt::Display for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::User(uid) => write!(f, "user {uid}"),
            Self::Cgroup(path) => write!(f, "cgroup {path}"),
            Self::Vm(Some(name), _) => write!(f, "vm {name}"),
            Self::Vm(None, pid) => write!(f, "vm of process {pid}"),
            Self::Process(pid) => write!(f, "process {pid}"),
        }
    }
}
