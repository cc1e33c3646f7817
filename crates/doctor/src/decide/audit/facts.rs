//! What the rules about settings read of a host: files of sysfs and procfs as text, each with its mode, and the
//! virtual machines.

use crate::decide::{HostFacts, MissingReading, require};
use pagefold_base::guest::{GuestSystem, GuestVcpus};
use pagefold_base::identity::qemu_monitor::{MonitorAnswers, MonitorBackend};
use pagefold_base::identity::thread_role::ThreadRole;
use pagefold_base::identity::virtual_nodes::VirtualNode;
use pagefold_base::identity::vm_definition::VmDefinition;
use pagefold_base::libvirt::LibvirtDefinition;
use pagefold_base::memory::MAX_REMOTE_SHARE_OF_PLACED_MACHINE;
use pagefold_base::reading::{Absent, Reading};
use pagefold_base::units::{Pages, Pid, ProcessId};
use pagefold_base::{Bytes, IdSet};
use std::collections::BTreeMap;
use std::fmt;

/// A file that holds a setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingFile {
    /// Its text without blanks at the end.
    pub text: Reading<String>,
    /// Its permission bits: a parameter without a bit for writing changes only when its module is loaded again.
    pub mode: Reading<u32>,
}

/// Settings of a host and of its virtual machines.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SettingFacts {
    /// The files by path below the root. A path that is missing was not found.
    pub files: BTreeMap<String, SettingFile>,
    /// The names in directories, by path below the root.
    pub directories: BTreeMap<String, Reading<Vec<String>>>,
    /// The virtual machines, in any order.
    pub vms: Vec<VmFacts>,
    /// The domains of libvirt that are defined and do not run, by name. Their process is 0, and they have no threads.
    pub idle_domains: Vec<VmFacts>,
}

/// A virtual machine.
#[derive(Clone, Debug, PartialEq)]
pub struct VmFacts {
    /// Its process.
    pub process: ProcessId,
    /// Its name, or the name of its program.
    pub name: String,
    /// Its definition on the command line; `None` for a monitor other than QEMU.
    pub definition: Option<Reading<VmDefinition>>,
    /// The PCI addresses of devices of the host that are passed through.
    pub passed_through: Vec<String>,
    /// Its threads that run virtual CPUs or serve vhost devices, ascending.
    pub threads: Reading<Vec<VmThread>>,
    /// Its memory on each node that has some; `None` on a host with one node, and for a domain that does not run.
    pub node_memory: Option<Reading<BTreeMap<u32, Bytes>>>,
    /// Its pages that KSM has merged (`ksm_merging_pages`).
    pub merged_pages: Reading<u64>,
    /// Its iothreads that run for a minute at least, with the CPUs that each took on average since its start.
    pub iothread_loads: Reading<Vec<(ThreadRole, f64)>>,
    /// How its cgroup limits its CPU time, by the cgroup that limits it most; `None` if no cgroup has a limit.
    pub throttling: Reading<Option<CpuThrottling>>,
    /// libvirt's persistent definition, with which it starts the next time; `None` if libvirt has none.
    pub next_definition: Option<Reading<LibvirtDefinition>>,
    /// What QEMU's monitor answered; `None` if it was not asked.
    pub monitor: Option<Reading<MonitorAnswers>>,
    /// What the agent in the guest answered; `None` if it was not asked.
    pub guest: Option<Reading<GuestFacts>>,
}

/// The memory of a machine on each node that has some.
///
/// Merged pages do not count for where a machine is: NUMA balancing skips them (mm/mprotect.c, `change_pte_range`), and
/// moving one moves it for all machines that share it. `numa_maps` counts them with the other pages of each node, so only
/// bounds are known: all of them, or none, may be on other nodes.
#[derive(Clone, Copy)]
pub(super) struct MemoryByNode<'a> {
    by_node: &'a BTreeMap<u32, Bytes>,
    /// The most that can be merged.
    merged: Bytes,
}

impl MemoryByNode<'_> {
    /// Whether all but a negligible part of the memory that is not merged is on these nodes. `None` if that depends on
    /// the nodes of merged pages.
    pub(super) fn is_on(self, nodes: &IdSet) -> Option<bool> {
        let sum = |sum: u64, bytes: &Bytes| sum.saturating_add(bytes.0);
        let total = self.by_node.values().fold(0, sum);
        let remote = self.by_node.iter().filter(|(node, _)| !nodes.contains(**node)).map(|(_, bytes)| bytes);
        let remote = remote.fold(0, sum);
        let limit = total.saturating_sub(self.merged.0) as f64 * MAX_REMOTE_SHARE_OF_PLACED_MACHINE;
        if remote as f64 <= limit {
            Some(true)
        } else if remote.saturating_sub(self.merged.0) as f64 > limit {
            Some(false)
        } else {
            None
        }
    }

    /// The nodes that have all but a negligible part of what is not merged: those with the most memory, as few as
    /// suffice.
    pub(super) fn nodes(self) -> Result<IdSet, MissingReading> {
        let mut by_size: Vec<(&u32, &Bytes)> = self.by_node.iter().collect();
        by_size.sort_by_key(|(node, bytes)| (std::cmp::Reverse(bytes.0), **node));
        let largest = |count: usize| by_size[..count].iter().map(|(node, _)| **node).collect::<IdSet>();
        let candidates = (0..=by_size.len()).map(largest).map(|nodes| (self.is_on(&nodes), nodes));
        match candidates.into_iter().find(|(is_on, _)| *is_on != Some(false)) {
            Some((None, _)) => Err(MissingReading {
                reading_name: format!("the nodes of merged pages ({self})"),
                absent: Absent::NotAsked(
                    "/proc/PID/numa_maps does not tell merged pages from others; `pagefold numa map` does".to_owned(),
                ),
            }),
            Some((_, nodes)) => Ok(nodes),
            None => Ok(IdSet::default()),
        }
    }
}

/// As `node 0: 20.4 MiB, node 3: 21.6 MiB, of which up to 3.20 MiB is merged`.
impl fmt::Display for MemoryByNode<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, (node, bytes)) in self.by_node.iter().enumerate() {
            write!(f, "{}node {node}: {bytes}", if position > 0 { ", " } else { "" })?;
        }
        if self.merged.0 > 0 { write!(f, ", of which up to {} is merged", self.merged) } else { Ok(()) }
    }
}

/// What a guest says of itself.
#[derive(Clone, Debug, PartialEq)]
pub struct GuestFacts {
    /// Its operating system.
    pub system: Reading<GuestSystem>,
    /// The virtual CPUs that it knows.
    pub vcpus: Reading<GuestVcpus>,
    /// The share of steal time in the time of all CPUs since its boot, in percent (`/proc/stat`).
    pub steal_percent: Reading<f64>,
    /// The first bytes of its other files, by path.
    pub files: BTreeMap<&'static str, Reading<Vec<u8>>>,
    /// The lines about the timer in the configuration of its kernel.
    pub timer_configuration: Reading<Vec<u8>>,
}

/// The maximum length of a clock's or driver's name (include/linux/cpuidle.h, `CPUIDLE_NAME_LEN` is 16).
const MAX_WORD_BYTES: usize = 64;

impl Default for GuestFacts {
    /// A guest that has answered nothing.
    fn default() -> Self {
        let none = Absent::NotOnThisKernel;
        Self {
            system: Err(none.clone()),
            vcpus: Err(none.clone()),
            steal_percent: Err(none.clone()),
            files: BTreeMap::new(),
            timer_configuration: Err(none),
        }
    }
}

impl GuestFacts {
    /// The bytes of a file that a rule needs; `None` if the guest does not have it.
    pub(super) fn find_file(&self, path: &str) -> Result<Option<&[u8]>, MissingReading> {
        match self.files.get(path) {
            None | Some(Err(Absent::NotOnThisKernel)) => Ok(None),
            Some(Ok(bytes)) => Ok(Some(bytes)),
            Some(Err(absent)) => {
                Err(MissingReading { reading_name: format!("{path} in the guest"), absent: absent.clone() })
            }
        }
    }

    /// The word in a file that a rule needs; `None` if the guest does not have the file.
    pub(super) fn find_word(&self, path: &str) -> Result<Option<&str>, MissingReading> {
        let Some(bytes) = self.find_file(path)? else { return Ok(None) };
        let text = std::str::from_utf8(bytes).unwrap_or_default().trim();
        let is_word = (1..=MAX_WORD_BYTES).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic());
        if is_word { Ok(Some(text)) } else { Err(malformed_in_guest(path, &String::from_utf8_lossy(bytes))) }
    }
}

/// A thread of a virtual machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmThread {
    /// Its number.
    pub tid: Pid,
    /// What it does.
    pub role: ThreadRole,
    /// The CPU on which it ran last.
    pub last_cpu: u32,
    /// The CPUs on which it may run.
    pub allowed_cpus: IdSet,
}

/// The limit of a cgroup on CPU time (kernel/sched/core.c, `cpu_max_show` and `cpu_cfs_stat_show`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuThrottling {
    /// The cgroup, by its path below the mount point.
    pub cgroup: String,
    /// The first word of `cpu.max` in microseconds for each `period`.
    pub quota: u64,
    /// The second word of `cpu.max`, in microseconds.
    pub period: u64,
    /// Periods in which it had something to run.
    pub periods: u64,
    /// Periods in which it used up its quota.
    pub throttled_periods: u64,
}

impl VmFacts {
    /// The threads that run virtual CPUs, as far as the monitor or their names show. QEMU names them with
    /// `debug-threads=on` only.
    pub(super) fn vcpu_threads(&self) -> Result<Vec<&VmThread>, MissingReading> {
        let threads = require("the threads of the machine", &self.threads)?;
        Ok(threads.iter().filter(|thread| matches!(thread.role, ThreadRole::Vcpu(_))).collect())
    }

    /// The CPUs on which each virtual CPU of a virtual node may run.
    pub(super) fn allowed_cpus_of(&self, node: &VirtualNode) -> Result<Vec<&IdSet>, MissingReading> {
        let runs_on =
            |thread: &&VmThread| matches!(thread.role, ThreadRole::Vcpu(number) if node.vcpus.contains(number));
        Ok(self.vcpu_threads()?.into_iter().filter(runs_on).map(|thread| &thread.allowed_cpus).collect())
    }

    /// The number of virtual CPUs: by threads, else by definition.
    pub(super) fn vcpu_count(&self) -> Result<u64, MissingReading> {
        let threads = self.vcpu_threads()?.len() as u64;
        if threads > 0 {
            return Ok(threads);
        }
        let defined = match &self.definition {
            Some(Ok(definition)) => definition.vcpus.map(u64::from),
            _ => None,
        };
        defined.ok_or_else(|| MissingReading {
            reading_name: "the number of virtual CPUs".to_owned(),
            absent: Absent::NotOnThisKernel,
        })
    }
}

impl VmFacts {
    /// Its memory on each node, on a host with several nodes.
    pub(super) fn require_node_memory(&self, facts: &HostFacts) -> Result<MemoryByNode<'_>, MissingReading> {
        let reading_name = format!("/proc/{}/numa_maps", self.process.pid);
        match &self.node_memory {
            Some(memory) => {
                Ok(MemoryByNode { by_node: require(&reading_name, memory)?, merged: self.max_merged(facts)? })
            }
            None => Err(MissingReading { reading_name, absent: Absent::NotOnThisKernel }),
        }
    }

    /// The most of its memory that can be merged: on a kernel that does not tell it for each process (before 5.19), what is
    /// merged on the host.
    fn max_merged(&self, facts: &HostFacts) -> Result<Bytes, MissingReading> {
        let pages = match (&self.merged_pages, &facts.ksm) {
            (Err(Absent::NotOnThisKernel), Err(Absent::NotOnThisKernel)) => 0,
            (Err(Absent::NotOnThisKernel), ksm) => {
                let ksm = require("/sys/kernel/mm/ksm", ksm)?;
                let frames = require("/sys/kernel/mm/ksm/pages_shared", &ksm.pages_shared)?;
                let further_copies = require("/sys/kernel/mm/ksm/pages_sharing", &ksm.pages_sharing)?;
                frames.saturating_add(*further_copies)
            }
            (pages, _) => *require(&format!("ksm_merging_pages of process {}", self.process.pid), pages)?,
        };
        Ok(facts.page_size.bytes_of(Pages(pages)))
    }

    /// The memory backends that the monitor lists.
    fn backends(&self) -> &[MonitorBackend] {
        let answers = self.monitor.as_ref().and_then(|monitor| monitor.as_ref().ok());
        answers.and_then(|answers| answers.backends.as_deref().ok()).unwrap_or_default()
    }

    /// The size of its memory: that of its definition, and memory that was plugged later.
    pub(super) fn memory_bytes(&self, definition: &VmDefinition) -> Option<u64> {
        let listed = self.backends().iter().fold(0, |sum: u64, backend| sum.saturating_add(backend.bytes));
        definition.memory_bytes.map(|bytes| bytes.max(listed)).or((listed > 0).then_some(listed))
    }

    /// Why KSM cannot merge memory: that of its definition, and memory that was plugged later.
    pub(super) fn unmergeable(&self, definition: &VmDefinition) -> Vec<String> {
        let mut reasons = definition.unmergeable.clone();
        for backend in self.backends().iter().filter(|backend| backend.is_shared == Some(true)) {
            let name = backend.id.as_deref().unwrap_or("memory");
            if !reasons.iter().any(|reason| reason.starts_with(&format!("{name} is "))) {
                reasons.push(format!("{name} is shared"));
            }
        }
        reasons
    }
}

impl SettingFacts {
    /// The text of a file. `NotOnThisKernel` if it does not exist.
    pub fn text(&self, path: &str) -> Reading<&str> {
        let file = self.files.get(path).ok_or(Absent::NotOnThisKernel)?;
        file.text.as_deref().map_err(Clone::clone)
    }

    /// The names in a directory. `NotOnThisKernel` if it does not exist.
    pub fn names(&self, directory: &str) -> Reading<&[String]> {
        let names = self.directories.get(directory).ok_or(Absent::NotOnThisKernel)?;
        names.as_deref().map_err(Clone::clone)
    }

    /// The text of a file that a rule needs; `None` if this kernel does not have the file.
    pub(super) fn find_text(&self, path: &str) -> Result<Option<&str>, MissingReading> {
        match self.text(path) {
            Ok(text) => Ok(Some(text)),
            Err(Absent::NotOnThisKernel) => Ok(None),
            Err(absent) => Err(MissingReading { reading_name: format!("/{path}"), absent }),
        }
    }

    /// The number in a file that a rule needs; `None` if this kernel does not have the file.
    pub(super) fn find_number(&self, path: &str) -> Result<Option<u64>, MissingReading> {
        let Some(text) = self.find_text(path)? else { return Ok(None) };
        text.parse().map(Some).map_err(|_| malformed(path, text))
    }

    /// The truth value in a file that a rule needs: `Y`, `N`, or a number (kernel/params.c, `param_get_bool`); `None`
    /// if this kernel does not have the file.
    pub(super) fn find_flag(&self, path: &str) -> Result<Option<bool>, MissingReading> {
        match self.find_text(path)? {
            None => Ok(None),
            Some("Y" | "y") => Ok(Some(true)),
            Some("N" | "n") => Ok(Some(false)),
            Some(text) => text.parse::<i64>().map(|number| Some(number != 0)).map_err(|_| malformed(path, text)),
        }
    }

    /// The names in a directory that a rule needs; empty if this kernel does not have it.
    pub(super) fn find_names(&self, directory: &str) -> Result<&[String], MissingReading> {
        match self.names(directory) {
            Ok(names) => Ok(names),
            Err(Absent::NotOnThisKernel) => Ok(&[]),
            Err(absent) => Err(MissingReading { reading_name: format!("/{directory}"), absent }),
        }
    }

    /// Whether a file can be written. An unknown mode counts as not writable.
    pub(super) fn is_writable(&self, path: &str) -> bool {
        self.files.get(path).and_then(|file| file.mode.clone().ok()).is_some_and(|mode| mode & 0o222 != 0)
    }

    /// The numbers at the ends of names in a directory: `node0` and `node1` have 0 and 1. Ascending.
    pub(super) fn numbered(&self, directory: &str, prefix: &str) -> Result<Vec<u32>, MissingReading> {
        let names = self.find_names(directory)?;
        let mut numbers: Vec<u32> = names.iter().filter_map(|name| name.strip_prefix(prefix)?.parse().ok()).collect();
        numbers.sort_unstable();
        Ok(numbers)
    }
}

/// The reading that a file of a guest does not have the expected format.
pub(super) fn malformed_in_guest(path: &str, text: &str) -> MissingReading {
    MissingReading { reading_name: format!("{path} in the guest"), ..malformed(path, text) }
}

/// The reading that a file does not have the expected format.
pub(super) fn malformed(path: &str, text: &str) -> MissingReading {
    let excerpt: String = text.chars().take(60).collect();
    MissingReading { reading_name: format!("/{path}"), absent: Absent::Malformed(format!("{excerpt:?}")) }
}
