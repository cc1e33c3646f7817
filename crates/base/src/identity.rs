//! The identity of a process beyond its PID: a virtual machine, a process of a container, a rank of a job.
//!
//! It is derived from the command line, the environment and the cgroup. The process or its parent writes all of these,
//! so they are self-declared. Labels come from files of the container's runtime, which belong to root.

mod container;
pub mod guest_agent;
mod job;
pub mod qemu_monitor;
pub mod thread_role;
mod vcpu_topology;
pub mod virtual_nodes;
mod vm;
pub mod vm_definition;

use std::collections::BTreeMap;

/// The technique that protects the memory of the virtual machine of a command line from its host, if any, by its
/// monitor's name.
pub fn confidential_guest_technique(arguments: &[String]) -> Option<String> {
    vm::confidential_technique(arguments)
}

/// The virtual machine monitors that are recognized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Monitor {
    /// QEMU, alone or under libvirt.
    Qemu,
    /// Firecracker.
    Firecracker,
    /// cloud-hypervisor.
    CloudHypervisor,
}

/// A virtual machine, from its monitor's command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vm {
    /// Which monitor runs it.
    pub monitor: Monitor,
    /// The guest's name (`-name guest=`, `--id`), if the command line, the control socket of cloud-hypervisor or the
    /// cgroup of libvirt has one.
    pub name: Option<String>,
    /// The guest's UUID in lower case (`-uuid`, which libvirt always sets; `--platform uuid=`), if the command line has
    /// one.
    pub uuid: Option<String>,
    /// Guest RAM in bytes, if the command line states it.
    pub memory_bytes: Option<u64>,
    /// Memory backends by id, with their settings for KSM.
    pub backends: Vec<VmMemoryBackend>,
    /// Whether the monitor marks guest RAM for KSM: QEMU's `mem-merge`, on by default; cloud-hypervisor's `mergeable`,
    /// off by default; Firecracker never does.
    pub mem_merge: bool,
    /// Whether a host device is passed through, which pins guest RAM.
    pub vfio: bool,
    /// The control socket of the monitor (`-qmp unix:PATH`, `--api-sock`), if the command line has one. The path is as
    /// given there, so it may be relative to the monitor's directory or root.
    pub control_socket: Option<String>,
}

impl Vm {
    /// The setting by which the owner of the virtual machine forbids merging of its memory, or of a part of it: QEMU's
    /// `mem-merge=off` (libvirt's `<nosharepages/>`), or `merge=off` of a memory backend. The other monitors do not
    /// mark guest RAM by default; that is not an opt-out.
    pub fn opt_out(&self) -> Option<String> {
        let off: Vec<_> = self.backends.iter().filter(|backend| !backend.merge).collect();
        match (self.monitor, self.mem_merge, off.as_slice()) {
            (Monitor::Firecracker | Monitor::CloudHypervisor, ..) | (Monitor::Qemu, true, []) => None,
            (Monitor::Qemu, false, _) => Some("mem-merge=off".to_owned()),
            (Monitor::Qemu, true, off) => {
                let ids: Vec<_> = off.iter().map(|backend| backend.id.escape_debug().to_string()).collect();
                Some(format!("merge=off of {}", ids.join(", ")))
            }
        }
    }
}

/// A memory backend of a virtual machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmMemoryBackend {
    /// The object's id.
    pub id: String,
    /// The object's type, such as `memory-backend-memfd`.
    pub kind: String,
    /// `share=on`, explicit or the default of its type: KSM does not merge shared memory.
    pub share: bool,
    /// Whether its memory is marked for KSM: from its `merge=`, otherwise from the machine's setting.
    pub merge: bool,
}

/// A job with several processes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Job {
    /// The job's name, such as `slurm:1234.0` or `mpi:2882928641`; `mpi` for a rank whose job is unknown.
    pub name: String,
    /// The rank of the process in it.
    pub rank: Option<u32>,
}

/// The identity of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// The virtual machine that it runs.
    pub vm: Option<Vm>,
    /// The innermost container that it belongs to, from its cgroup: the runtime and the first 12 digits of the
    /// container's id, or its name. Examples: `docker:4c01db0b339c`, `lxc:web`.
    pub container: Option<String>,
    /// The job it belongs to.
    pub job: Option<Job>,
    /// The labels of the outermost container that it belongs to, as `KEY=VALUE`, if the runtime stores them in a file
    /// (see [`label_files`]).
    pub labels: Vec<String>,
}

/// The environment variables that identify a job. No other variable is kept.
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
    /// From the arguments, the [`JOB_VARIABLES`] and the cgroup path of a process; without labels.
    pub fn new(arguments: &[String], environment: &BTreeMap<String, String>, cgroup: Option<&str>) -> Self {
        let container = cgroup.and_then(container::container_name);
        Self {
            vm: vm::identify_vm(arguments, cgroup),
            container,
            job: job::identify_job(environment),
            labels: Vec::new(),
        }
    }
}

/// The files that may contain the labels of a cgroup's container, as paths below the root. The first existing one is
/// used. None if its runtime stores no labels.
pub fn label_files(cgroup: &str) -> Vec<String> {
    container::label_files(cgroup)
}

/// Whether a path below the root is a file that [`label_files`] names. Such a file also contains a container's
/// environment.
pub fn is_label_file(path: &str) -> bool {
    container::is_label_file(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Text that a process may write, made of tokens that the parsers search for.
    fn text() -> impl Strategy<Value = String> {
        let pieces = prop::sample::select(vec![
            "qemu-system-x86_64",
            "firecracker",
            "cloud-hypervisor",
            "-name",
            "-m",
            "-object",
            "-device",
            "-machine",
            "-qmp",
            "-chardev",
            "-mon",
            "-mem-path",
            "--memory",
            "--memory-zone",
            "--api-socket",
            "--id",
            "guest=",
            "size=",
            "mem-merge=off",
            "memory-backend-ram",
            "{\"qom-type\":",
            "\"memory-backend-memfd\"",
            "unix:",
            "server",
            "path=",
            "/",
            ",",
            ",,",
            "=",
            "{",
            "}",
            "[",
            ":",
            "9",
            "K",
            "G",
            ".",
            "-",
            "machine-qemu\\x2d",
            "\\x",
            ".scope",
            "docker",
            "lxc.payload.",
            "kubepods",
            "0123456789abcdef",
            "\u{fffd}",
            "\u{e9}",
            " (deleted)",
        ]);
        prop_oneof![prop::collection::vec(pieces, 0..8).prop_map(|pieces| pieces.concat()), any::<String>()]
    }

    proptest! {
        #[test]
        fn nothing_panics(
            arguments in prop::collection::vec(text(), 0..12),
            values in prop::collection::vec(text(), JOB_VARIABLES.len()),
            cgroup in prop::option::of(text()),
        ) {
            let environment = JOB_VARIABLES.iter().map(|name| (*name).to_owned()).zip(values).collect();
            let named = |program: &str| [vec![program.to_owned()], arguments.clone()].concat();
            for program in ["qemu-kvm", "firecracker", "cloud-hypervisor"] {
                prop_assert!(Identity::new(&named(program), &environment, cgroup.as_deref()).vm.is_some());
            }
            let _ = Identity::new(&arguments, &environment, cgroup.as_deref());
        }
    }

    #[test]
    fn process_can_be_vm_container_and_job() {
        let arguments = ["/usr/bin/qemu-system-x86_64", "-name", "db"].map(String::from);
        let environment = BTreeMap::from([("SLURM_JOB_ID".to_owned(), "7".to_owned())]);
        let cgroup = format!("/docker/{}", "ab".repeat(32));
        let identity = Identity::new(&arguments, &environment, Some(&cgroup));
        assert_eq!(identity.vm.and_then(|vm| vm.name).as_deref(), Some("db"));
        assert_eq!(identity.container.as_deref(), Some("docker:abababababab"));
        assert_eq!(identity.job.map(|job| job.name).as_deref(), Some("slurm:7"));
        assert_eq!(Identity::new(&[], &BTreeMap::new(), None), Identity::default());
    }
}
