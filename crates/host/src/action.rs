//! What Pagefold changes on a host. Every effect is one value of [`Action`], performed by [`Host::apply`].
//!
//! Nothing else changes the host. Therefore a dry run is a run that stops before `apply`, and a test can make any
//! action fail. The journal written beforehand is complete: [`undo_actions`] computes the inverse of an action.

use crate::access_monitor::MonitorStep;
use crate::config_file::{ConfigContent, ConfigFile};
use crate::kernel_module::{KernelModule, ModuleParameters};
use crate::knob::Knob;
use crate::resource::ResourceClass;
use crate::{Host, ProcessHandle, hold, observe, parse};
use pagefold_base::memory::MemoryPolicy;
use pagefold_base::region::VmFlags;
use pagefold_base::{Absent, AddressRange, IdSet, Pages, Pid, ProcessId, Reading};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// One effect on a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Write a kernel setting.
    Write {
        /// The setting.
        knob: Knob,
        /// The value to write.
        value: String,
    },
    /// Advises ranges of a process (madvise(2)) from within it. The ranges are ascending, disjoint and consist of whole
    /// pages.
    Advise {
        /// The process.
        process: ProcessId,
        /// The advice.
        advice: MergeAdvice,
        /// The ranges.
        ranges: Vec<AddressRange>,
    },
    /// Enrolls a process whole, including later mappings, or unenrolls it (`PR_SET_MEMORY_MERGE`), from within it.
    /// Unenrolling unmerges.
    MergeAny {
        /// The process.
        process: ProcessId,
        /// Whether to enroll it.
        enable: bool,
    },
    /// Sets a property of an object of QEMU through its control socket (QMP `qom-set`). The property `merge` of a
    /// memory backend enrolls the backend; unenrolling unmerges.
    SetQomProperty {
        /// The QEMU process that must own the socket.
        process: ProcessId,
        /// The path of the socket.
        socket: PathBuf,
        /// The object's path in QEMU's object tree: `/objects/pc.ram`.
        object: String,
        /// The property.
        property: String,
        /// Its values.
        value: Exchange<serde_json::Value>,
    },
    /// Assembles huge pages again (`MADV_COLLAPSE`), from outside the process. This unmerges the merged pages in them.
    Collapse {
        /// The process.
        process: ProcessId,
        /// The ranges: ascending, whole huge pages.
        ranges: Vec<AddressRange>,
    },
    /// Restricts a thread to CPUs (sched_setaffinity(2)). The kernel leaves out CPUs that are offline or that the
    /// thread's cgroup does not permit, so a part of the set counts as success. All online CPUs stand for no restriction.
    SetAffinity {
        /// The thread.
        thread: ThreadId,
        /// The CPUs.
        cpus: Exchange<IdSet>,
        /// The domain of libvirt to which the thread belongs, if it does. Then libvirt sets the CPUs, so that its
        /// definition of the running domain agrees with them.
        pin: Option<LibvirtPin>,
    },
    /// Moves pages of a process to a NUMA node (move_pages(2)). Pages that are mapped several times, such as merged
    /// pages, stay and are reported as missed.
    MovePages {
        /// The process.
        process: ProcessId,
        /// The ranges: ascending, disjoint, whole pages.
        ranges: Vec<AddressRange>,
        /// The node.
        node: u32,
    },
    /// Sets from which node the kernel takes memory that the process touches first from now on (mbind(2)), by a call
    /// within the process. Ranges with another policy than the expected one stay and are reported as missed.
    SetMemoryPolicy {
        /// The process.
        process: ProcessId,
        /// The ranges: ascending, disjoint, whole mappings.
        ranges: Vec<AddressRange>,
        /// The policies.
        policy: Exchange<MemoryPolicy>,
    },
    /// Replaces a configuration file as a whole, creates it, or removes it. Owner and mode stay; a symbolic link is
    /// refused.
    ReplaceFile {
        /// The file.
        file: ConfigFile,
        /// Its contents.
        content: Exchange<ConfigContent>,
    },
    /// Replaces the persistent definition of a domain of libvirt, with which it starts next time. libvirt checks the new
    /// one against its schema, and stores it in its own form.
    DefineDomain {
        /// The UUID of the domain.
        uuid: String,
        /// Its name.
        name: String,
        /// The texts of the file in which libvirt keeps the definition.
        definition: Exchange<String>,
    },
    /// Unloads a module of KVM and loads it with other parameters. Refused while a process uses the module. A module
    /// that is not loaded, as after a kill between the two steps, is loaded.
    ReloadModule {
        /// The module.
        module: KernelModule,
        /// The parameters that differ, with the same names in both sets. All others are as modprobe(8) and its
        /// configuration set them.
        parameters: Exchange<ModuleParameters>,
    },
    /// Lets DAMON count which memory of processes is accessed. Refused while another program uses DAMON.
    MonitorAccesses(MonitorStep),
}

/// The property of QEMU's memory backends that enrolls them.
pub const MERGE_PROPERTY: &str = "merge";

impl Action {
    /// Enrolls or unenrolls a memory backend that is not so yet.
    pub fn set_backend_merge(process: ProcessId, socket: PathBuf, backend: String, enable: bool) -> Self {
        let value = Exchange { from: (!enable).into(), to: enable.into() };
        Self::SetQomProperty { process, socket, object: backend, property: MERGE_PROPERTY.to_owned(), value }
    }

    /// The class whose lock it needs.
    pub fn class(&self) -> ResourceClass {
        match self {
            Self::Write { knob, .. } => knob.class(),
            Self::Advise { .. } | Self::MergeAny { .. } | Self::Collapse { .. } => ResourceClass::Ksm,
            Self::SetQomProperty { property, .. } if property == MERGE_PROPERTY => ResourceClass::Ksm,
            Self::SetQomProperty { .. } => ResourceClass::Settings,
            Self::SetAffinity { .. } => ResourceClass::CpuPlacement,
            Self::MovePages { .. } | Self::SetMemoryPolicy { .. } => ResourceClass::MemoryPlacement,
            Self::ReplaceFile { .. } | Self::DefineDomain { .. } => ResourceClass::Configuration,
            Self::ReloadModule { .. } | Self::MonitorAccesses(_) => ResourceClass::Settings,
        }
    }

    /// The process that it concerns, if it is one.
    pub fn process(&self) -> Option<ProcessId> {
        match self {
            Self::Advise { process, .. }
            | Self::MergeAny { process, .. }
            | Self::SetQomProperty { process, .. }
            | Self::Collapse { process, .. }
            | Self::MovePages { process, .. }
            | Self::SetMemoryPolicy { process, .. } => Some(*process),
            Self::SetAffinity { thread, .. } => Some(thread.process),
            Self::Write { .. }
            | Self::ReplaceFile { .. }
            | Self::DefineDomain { .. }
            | Self::ReloadModule { .. }
            | Self::MonitorAccesses(_) => None,
        }
    }

    /// Whether a session may leave it behind for a later session to undo: all but enrollments, which either stay for
    /// good or are undone at once.
    pub fn can_be_kept(&self) -> bool {
        matches!(self, Self::Write { .. }) || self.class() != ResourceClass::Ksm
    }

    /// The same action for parts of its ranges.
    #[must_use]
    pub fn with_ranges(&self, ranges: Vec<AddressRange>) -> Self {
        match self {
            Self::Advise { process, advice, .. } => Self::Advise { process: *process, advice: *advice, ranges },
            Self::Collapse { process, .. } => Self::Collapse { process: *process, ranges },
            Self::MovePages { process, node, .. } => Self::MovePages { process: *process, ranges, node: *node },
            Self::SetMemoryPolicy { process, policy, .. } => {
                Self::SetMemoryPolicy { process: *process, ranges, policy: policy.clone() }
            }
            Self::Write { .. }
            | Self::MergeAny { .. }
            | Self::SetQomProperty { .. }
            | Self::SetAffinity { .. }
            | Self::ReplaceFile { .. }
            | Self::DefineDomain { .. }
            | Self::ReloadModule { .. }
            | Self::MonitorAccesses(_) => self.clone(),
        }
    }

    /// The ranges of a process that it changes, if it names any.
    pub fn ranges(&self) -> &[AddressRange] {
        match self {
            Self::Advise { ranges, .. }
            | Self::Collapse { ranges, .. }
            | Self::MovePages { ranges, .. }
            | Self::SetMemoryPolicy { ranges, .. } => ranges,
            Self::Write { .. }
            | Self::MergeAny { .. }
            | Self::SetQomProperty { .. }
            | Self::SetAffinity { .. }
            | Self::ReplaceFile { .. }
            | Self::DefineDomain { .. }
            | Self::ReloadModule { .. }
            | Self::MonitorAccesses(_) => &[],
        }
    }

    /// Whether it may unmerge pages, which takes memory for their copies.
    pub fn unmerges(&self) -> bool {
        match self {
            Self::Advise { advice, .. } => *advice == MergeAdvice::Unmergeable,
            Self::MergeAny { enable, .. } => !enable,
            Self::SetQomProperty { property, value, .. } => property == MERGE_PROPERTY && value.to == false,
            Self::Write { .. }
            | Self::Collapse { .. }
            | Self::SetAffinity { .. }
            | Self::MovePages { .. }
            | Self::SetMemoryPolicy { .. }
            | Self::ReplaceFile { .. }
            | Self::DefineDomain { .. }
            | Self::ReloadModule { .. }
            | Self::MonitorAccesses(_) => false,
        }
    }
}

/// A value that is replaced only if it is the expected one. If another program has changed it meanwhile, its value
/// stays and the action fails. If it is the new value already, nothing changes, and [`ActionOutcome::unchanged`] is
/// set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exchange<T> {
    /// The expected value.
    pub from: T,
    /// The new value.
    pub to: T,
}

/// The path below the root of the file in which libvirt keeps the persistent definition of a domain.
pub fn domain_definition_path(name: &str) -> String {
    format!("etc/libvirt/qemu/{name}.xml")
}

impl Exchange<String> {
    /// Whether the definition of a domain must be replaced. The expected one may have another form, because libvirt stores
    /// definitions in its own. Messages do not contain the texts.
    ///
    /// # Errors
    /// `ChangedByOthers` if the current text is neither of the two.
    pub fn must_define(&self, current: String, name: &str) -> Result<bool, ActionError> {
        if current != self.to && parse::is_same_definition(&current, &self.from) {
            return Ok(true);
        }
        let content = |text: &String| ConfigContent(Some(text.clone()));
        let contents = Exchange { from: content(&self.from), to: content(&self.to) };
        contents.must_write(&ConfigContent(Some(current)), format!("/{}", domain_definition_path(name)))
    }
}

impl<T: Clone + PartialEq + fmt::Display> Exchange<T> {
    /// The exchange that undoes this one.
    #[must_use]
    pub fn inverse(&self) -> Self {
        Self { from: self.to.clone(), to: self.from.clone() }
    }

    /// Whether the new value must be written if the present value is `current`.
    ///
    /// # Errors
    /// [`ActionError::ChangedByOthers`] if `current` is neither the expected nor the new value. `what` names the value.
    pub fn must_write(&self, current: &T, what: impl fmt::Display) -> Result<bool, ActionError> {
        match current {
            current if *current == self.to => Ok(false),
            current if *current == self.from => Ok(true),
            _ => Err(ActionError::ChangedByOthers(format!("{what} is {current}, not {}", self.from))),
        }
    }
}

/// A thread of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadId {
    /// The process.
    pub process: ProcessId,
    /// The thread's number.
    pub tid: Pid,
    /// When the thread began, in clock ticks since boot (field 22 of `/proc/PID/task/TID/stat`), which distinguishes it
    /// from later threads with the same number.
    pub start_time: u64,
}

/// What libvirt pins of a domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibvirtPin {
    /// The UUID of the domain, as libvirt prints it.
    pub domain: String,
    /// What is pinned.
    pub target: LibvirtPinTarget,
}

/// A thread of a domain, in libvirt's terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LibvirtPinTarget {
    /// The virtual CPU with this number.
    Vcpu(u32),
    /// The main thread of the emulator.
    Emulator,
    /// The iothread with this number.
    Iothread(u32),
}

/// Why a range was missed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum MissedReason {
    /// It is no longer mapped.
    #[error("not mapped any more")]
    NotMapped,
    /// Parts of it are no longer mapped. The other parts were changed.
    #[error("not mapped any more in parts; the other parts were changed")]
    PartlyNotMapped,
    /// Its pages cannot be moved, because they are mapped several times: by several processes, or by one at several
    /// addresses.
    #[error("it is mapped several times")]
    MappedSeveralTimes,
    /// It has this memory policy, which its owner has set.
    #[error("its owner has set {0}")]
    OtherPolicy(String),
    /// It cannot be merged, or the kernel refused it: as a phrase.
    #[error("{0}")]
    Refused(String),
}

impl MissedReason {
    /// Whether all that was missed is no longer mapped.
    pub fn is_not_mapped(&self) -> bool {
        matches!(self, Self::NotMapped | Self::PartlyNotMapped)
    }
}

/// Advice about a range (include/uapi/asm-generic/mman-common.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergeAdvice {
    /// `MADV_MERGEABLE`: ksmd may scan the range.
    Mergeable,
    /// `MADV_UNMERGEABLE`: ksmd no longer scans the range, and its merged pages become private again.
    Unmergeable,
}

impl MergeAdvice {
    /// The advice that reverts this one.
    #[must_use]
    pub fn inverse(self) -> Self {
        match self {
            Self::Mergeable => Self::Unmergeable,
            Self::Unmergeable => Self::Mergeable,
        }
    }
}

/// The result of an action.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ActionOutcome {
    /// How long a thread of the target was stopped, once for each stop; empty if none was stopped.
    pub stop_durations: Vec<Duration>,
    /// Ranges that had changed or that the kernel refused, with the reason. All other ranges were changed.
    pub missed_ranges: Vec<(AddressRange, MissedReason)>,
    /// Pages that were moved to another node.
    pub moved_pages: Pages,
    /// Whether the host was as requested before the action, as far as the action tests it. There is nothing to undo.
    pub unchanged: bool,
}

/// Why an action failed. Nothing was changed, except perhaps with `Busy` and `Failed`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ActionError {
    /// The host is a recording.
    #[error("a recording cannot be changed")]
    ReadOnly,
    /// The process has exited, or its number has been reused.
    #[error("the process has ended")]
    Vanished,
    /// The privilege is missing.
    #[error("permission denied: {0}")]
    Denied(String),
    /// The kernel, the program or the machine does not support it.
    #[error("{0}")]
    Unsupported(String),
    /// Another debugger or tracer is attached to the process.
    #[error("process {0} traces it already, such as a debugger: end that first")]
    Traced(Pid),
    /// It is not possible now: the target does not stop, or the kernel returns EBUSY.
    #[error("busy: {0}")]
    Busy(String),
    /// Another program has changed the value since it was read, and that change stays.
    #[error("{0}: another program has changed it")]
    ChangedByOthers(String),
    /// Another failure.
    #[error("{0}")]
    Failed(String),
}

impl From<Absent> for ActionError {
    fn from(why: Absent) -> Self {
        match why {
            Absent::Vanished => Self::Vanished,
            Absent::Denied => Self::Denied("the file cannot be read".to_owned()),
            Absent::NotOnThisKernel => Self::Unsupported("this kernel has no such file".to_owned()),
            Absent::Malformed(what) | Absent::NoAnswer(what) | Absent::NotAsked(what) => Self::Failed(what),
        }
    }
}

/// The actions that undo an action, computed before it is performed. For a setting this is its value, for ranges their
/// present advice, for a process whether it is enrolled whole. Perform the last one first. Empty if the action would
/// change nothing.
///
/// The inverse of an exchange swaps its values, without a look at the host. Pages are moved back to their present
/// nodes, and pages that are not in memory now are not. A collapse has no inverse and needs none, because the contents
/// do not change.
/// # Errors
/// Why the present state cannot be read. An action without a known inverse must not be performed.
pub fn undo_actions(host: &dyn Host, action: &Action) -> Result<Vec<Action>, ActionError> {
    Ok(match action {
        Action::Write { knob, value } => {
            let current = knob.read(host)?;
            if current == *value { Vec::new() } else { vec![Action::Write { knob: knob.clone(), value: current }] }
        }
        Action::Advise { process, advice, ranges } => {
            let handle = hold(host, *process)?;
            let enrolled = *advice == MergeAdvice::Unmergeable;
            let mut changed_ranges = Vec::new();
            for region in observe::regions(&*handle)? {
                if region.flags.has(VmFlags::MERGEABLE) == enrolled {
                    changed_ranges.extend(ranges.iter().filter_map(|range| range.overlap(region.range)));
                }
            }
            changed_ranges.sort_unstable_by_key(|range| range.start);
            let undo = Action::Advise { process: *process, advice: advice.inverse(), ranges: changed_ranges.clone() };
            if changed_ranges.is_empty() { Vec::new() } else { vec![undo] }
        }
        Action::MergeAny { process, enable: on } => {
            let handle = hold(host, *process)?;
            let current = query_merge_any(&*handle)?;
            if current == *on {
                return Ok(Vec::new());
            }
            let mut undo = vec![Action::MergeAny { process: *process, enable: current }];
            if *on {
                // Unenrolling the process whole removes its own marks too (mm/ksm.c, `ksm_del_vmas`). The undo restores
                // them.
                let regions = observe::regions(&*handle)?;
                let marked = regions.iter().filter(|region| region.flags.has(VmFlags::MERGEABLE));
                let ranges: Vec<AddressRange> = marked.map(|region| region.range).collect();
                if !ranges.is_empty() {
                    undo.insert(0, Action::Advise { process: *process, advice: MergeAdvice::Mergeable, ranges });
                }
            }
            undo
        }
        Action::SetQomProperty { process, socket, object, property, value } => {
            hold(host, *process)?;
            vec![Action::SetQomProperty {
                process: *process,
                socket: socket.clone(),
                object: object.clone(),
                property: property.clone(),
                value: value.inverse(),
            }]
        }
        Action::SetAffinity { thread, cpus, pin } => {
            hold(host, thread.process)?;
            vec![Action::SetAffinity { thread: *thread, cpus: cpus.inverse(), pin: pin.clone() }]
        }
        Action::MovePages { process, ranges, node } => {
            let moved_ranges = ranges_by_node(host, *process, ranges)?.into_iter().filter(|(from, _)| from != node);
            moved_ranges.map(|(node, ranges)| Action::MovePages { process: *process, ranges, node }).collect()
        }
        Action::SetMemoryPolicy { process, ranges, policy } => {
            hold(host, *process)?;
            let (process, ranges) = (*process, ranges.clone());
            vec![Action::SetMemoryPolicy { process, ranges, policy: policy.inverse() }]
        }
        Action::ReplaceFile { file, content } => {
            vec![Action::ReplaceFile { file: file.clone(), content: content.inverse() }]
        }
        Action::DefineDomain { uuid, name, definition } => {
            vec![Action::DefineDomain { uuid: uuid.clone(), name: name.clone(), definition: definition.inverse() }]
        }
        Action::ReloadModule { module, parameters } => {
            vec![Action::ReloadModule { module: *module, parameters: parameters.inverse() }]
        }
        Action::MonitorAccesses(step) => step.inverse().into_iter().map(Action::MonitorAccesses).collect(),
        Action::Collapse { .. } => Vec::new(),
    })
}

/// The parts of some ranges that lie on each NUMA node.
fn ranges_by_node(
    host: &dyn Host,
    process: ProcessId,
    ranges: &[AddressRange],
) -> Reading<BTreeMap<u32, Vec<AddressRange>>> {
    let handle = hold(host, process)?;
    let page_bytes = host.page_size().bytes();
    let mut by_node: BTreeMap<u32, Vec<AddressRange>> = BTreeMap::new();
    for range in ranges {
        let starts = (range.start..range.end).step_by(page_bytes as usize);
        for (start, node) in starts.zip(handle.page_nodes(*range)?) {
            let Some(ranges) = node.map(|node| by_node.entry(node).or_default()) else { continue };
            match ranges.last_mut() {
                // Adjacent ranges may be of different mappings, and are undone one by one.
                Some(last) if last.end == start && start > range.start => last.end += page_bytes,
                _ => ranges.push(AddressRange { start, end: start + page_bytes }),
            }
        }
    }
    Ok(by_node)
}

/// Whether a process is enrolled whole: from the kernel's report (6.14), otherwise from a system call in
/// the process, for which one of its threads is stopped.
pub fn query_merge_any(handle: &dyn ProcessHandle) -> Result<bool, ActionError> {
    match parse::process_ksm(handle.read("ksm_stat"), Err(Absent::NotOnThisKernel)).merge_any {
        Err(Absent::NotOnThisKernel) => handle.ask_merge_any(),
        reading => Ok(reading?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_host::FakeHost;
    use crate::faulty_host::{FaultyHost, InjectedFault};

    const PROCESS: ProcessId = ProcessId { pid: Pid(7), start_time: 1 };

    /// A host with one process that has the given files.
    fn host(files: &[(&str, &str)]) -> FakeHost {
        let host = FakeHost::booted();
        host.set_cpu_ticks(7, 0);
        for (name, text) in files {
            host.put_file(&format!("proc/7/{name}"), text);
        }
        host
    }

    /// An entry of smaps.
    fn smaps_entry(start: u64, flags: &str) -> String {
        let end = start + 0x10_0000;
        format!("{start:x}-{end:x} rw-p 00000000 00:00 0 \nRss: 0 kB\nAnonymous: 0 kB\nVmFlags: rd wr{flags}\n")
    }

    #[test]
    fn undo_restores_ranges_the_program_enrolled() {
        let smaps = smaps_entry(0x10_0000, " mg") + &smaps_entry(0x30_0000, "") + &smaps_entry(0x50_0000, " mg");
        let host = host(&[("ksm_stat", "ksm_merge_any: no\n"), ("smaps", &smaps)]);
        let ranges = [0x10_0000, 0x50_0000].map(|start| AddressRange { start, end: start + 0x10_0000 }).to_vec();
        let marks = Action::Advise { process: PROCESS, advice: MergeAdvice::Mergeable, ranges };
        let off = Action::MergeAny { process: PROCESS, enable: false };
        assert_eq!(undo_actions(&host, &Action::MergeAny { process: PROCESS, enable: true }), Ok(vec![marks, off]));
    }

    #[test]
    fn undo_keeps_a_process_that_had_merge_any_set() {
        // The file of 6.13, and of 6.14 and later.
        const KSM_STAT_6_13: &str = "ksm_rmap_items 0\nksm_zero_pages 0\nksm_merging_pages 0\nksm_process_profit 0\n";
        let new = |told: &str| format!("{KSM_STAT_6_13}ksm_merge_any: {told}\nksm_mergeable: {told}\n");
        let check = |ksm_stat: &str, says: Option<&str>, on, expected: Option<Option<bool>>| {
            let smaps = smaps_entry(0x10_0000, "");
            let plain = host(&[("ksm_stat", ksm_stat), ("smaps", &smaps)]);
            let host = FaultyHost::new(&plain, |path| {
                let answer = says.map_or(InjectedFault::Absent(Absent::NotOnThisKernel), |said| {
                    InjectedFault::Replaced(said.into())
                });
                (path == "proc/7#ask_merge_any").then_some(answer)
            });
            let expected = expected.map(|on| {
                on.into_iter().map(|on| Action::MergeAny { process: PROCESS, enable: on }).collect::<Vec<_>>()
            });
            let found = undo_actions(&host, &Action::MergeAny { process: PROCESS, enable: on });
            assert_eq!(found.as_ref().ok(), expected.as_ref(), "{ksm_stat} {says:?} {on}: {found:?}");
        };
        for (was, word) in [(true, "yes"), (false, "no")] {
            for on in [true, false] {
                let back = (was != on).then_some(was);
                check(KSM_STAT_6_13, Some(word), on, Some(back));
                // The process is not asked if the kernel reports the state.
                check(&new(word), Some(if was { "no" } else { "yes" }), on, Some(back));
            }
        }
        check(KSM_STAT_6_13, None, true, None);
    }

    #[test]
    fn undo_of_guest_merge_ignores_region_flags() {
        // The first backend is marked and the hot-plugged one is not; no file tells which region belongs to which
        // backend.
        let smaps = smaps_entry(0x10_0000, " mg") + &smaps_entry(0x30_0000, "");
        let cmdline = "qemu-system-x86_64\0-object\0memory-backend-ram,id=pc.ram,size=1M\0";
        let host = host(&[("smaps", &smaps), ("cmdline", cmdline)]);
        let backend = |id: &str, on| Action::set_backend_merge(PROCESS, "/q".into(), format!("/objects/{id}"), on);
        for id in ["pc.ram", "plugged"] {
            for on in [true, false] {
                assert_eq!(undo_actions(&host, &backend(id, on)), Ok(vec![backend(id, !on)]));
            }
        }
        let another = ProcessId { start_time: 4712, ..PROCESS };
        let gone = Action::set_backend_merge(another, "/q".into(), String::new(), true);
        assert_eq!(undo_actions(&host, &gone), Err(ActionError::Vanished));
    }
}
