//! The scope of a scan: the selected processes with their regions, sorted into trust domains.

use crate::Error;
use crate::foreign_processes::ForeignProcesses;
use crate::results::UnscannedProcess;
use globset::{Glob, GlobMatcher};
use pagefold_base::domain::{DomainConfig, TrustDomain};
use pagefold_base::identity::Vm;
use pagefold_base::process::Process;
use pagefold_base::region::{Ineligible, Region};
use pagefold_base::{Absent, AddressRange, Bytes, Pid, ProcessId, Reading};
use pagefold_host::activity::ActivityCounters;
use pagefold_host::{Host, ProcessHandle as Handle, ReadMethod, observe};
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// Which processes to scan. A process is selected if it matches every kind of condition that is given, and any one
/// condition of each kind.
#[derive(Clone, Debug, Default)]
pub struct ProcessSelection {
    /// Process numbers.
    pub pids: Vec<Pid>,
    /// Shell patterns of `comm`.
    pub comm_patterns: Vec<String>,
    /// Cgroup paths; each selects the cgroup and everything below it.
    pub cgroups: Vec<String>,
    /// Effective user IDs.
    pub users: Vec<u32>,
    /// Shell patterns of the names of virtual machines, or their UUIDs.
    pub vm_patterns: Vec<String>,
    /// A process to leave out unless it is selected by number: the scanning process, whose memory is mostly the census
    /// itself.
    pub excluded_pid: Option<Pid>,
    /// The parts of processes that are not scanned whole, ascending and disjoint.
    pub parts: BTreeMap<Pid, Vec<ScanPart>>,
}

/// A part of a process's memory: from the start of the range on, as many resident pages as fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScanPart {
    /// The addresses.
    pub range: AddressRange,
    /// Maximum resident memory. The part may exceed it by one step of [`crate::index::PART_STEP_PAGES`].
    pub max_bytes: Bytes,
}

impl ScanPart {
    /// All memory of a process.
    pub const WHOLE: Self = Self { range: AddressRange { start: 0, end: u64::MAX }, max_bytes: Bytes(u64::MAX) };
}

/// A selection with compiled patterns.
struct SelectionMatcher<'a> {
    selection: &'a ProcessSelection,
    comm_globs: Vec<GlobMatcher>,
    vm_name_globs: Vec<GlobMatcher>,
}

impl SelectionMatcher<'_> {
    fn matches(&self, process: &Process) -> bool {
        let ProcessSelection { cgroups, users, vm_patterns: vms, .. } = self.selection;
        // A name that contains pattern characters also matches literally.
        let has_name =
            |name: &String| vms.contains(name) || self.vm_name_globs.iter().any(|pattern| pattern.is_match(name));
        let has_uuid = |uuid: &String| vms.iter().any(|pattern| pattern.eq_ignore_ascii_case(uuid));
        let is_vm = |vm: &Vm| vm.name.as_ref().is_some_and(has_name) || vm.uuid.as_ref().is_some_and(has_uuid);
        let passes = |is_unset: bool, fits: bool| is_unset || fits;
        passes(self.comm_globs.is_empty(), self.comm_globs.iter().any(|name| name.is_match(&process.comm)))
            && passes(
                cgroups.is_empty(),
                process.cgroup.as_ref().is_ok_and(|path| cgroups.iter().any(|c| is_in_cgroup(path, c))),
            )
            && passes(users.is_empty(), process.uid.as_ref().is_ok_and(|uid| users.contains(uid)))
            && passes(vms.is_empty(), process.identity.vm.as_ref().is_some_and(is_vm))
    }
}

/// Whether a cgroup path is `top` or below it.
fn is_in_cgroup(path: &str, top: &str) -> bool {
    let top = top.trim_end_matches('/');
    path.strip_prefix(top).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// A process in the scan scope.
#[derive(Clone, Debug)]
pub struct Subject {
    /// The process.
    pub process: Process,
    /// Its trust domain, including the nodes that its memory is bound to if KSM merges across nodes.
    pub domain: TrustDomain,
    /// Its regions in address order, each with the reason why KSM cannot take its pages.
    pub regions: Vec<(Region, Option<Ineligible>)>,
    /// Whether it is a foreign process, scanned only so that its contents stay unmerged in other domains.
    pub is_foreign: bool,
    /// The parts of its memory to scan, ascending and disjoint. One part for a process that is scanned whole.
    pub parts: Vec<ScanPart>,
}

/// All processes of a scan.
#[derive(Clone, Debug, Default)]
pub struct ScanScope {
    /// Ordered by trust domain, then by process number.
    pub subjects: Vec<Subject>,
    /// Ordered by process number. Processes that exited are listed only if they were selected by number.
    pub unscanned: Vec<UnscannedProcess>,
    /// Inactive foreign processes with their trust domains. They are not subjects because their contents are cached.
    pub inactive_foreign: Vec<(TrustDomain, ProcessId)>,
    /// The activity of the other processes before they were scanned, if activity is cached and known.
    pub activity: BTreeMap<ProcessId, ActivityCounters>,
}

impl ScanScope {
    fn add_subject(&mut self, subject: Subject, activity: Option<ActivityCounters>) {
        self.activity.extend(activity.map(|activity| (subject.process.id, activity)));
        self.subjects.push(subject);
    }

    /// The number of each subject's trust domain, in the order of subjects.
    pub fn domain_numbers(&self) -> Vec<u32> {
        crate::content_groups::domain_numbers(self.subjects.iter().map(|subject| &subject.domain))
    }

    /// Whether each subject is a foreign process, in the order of subjects.
    pub fn foreign_flags(&self) -> Vec<bool> {
        self.subjects.iter().map(|subject| subject.is_foreign).collect()
    }
}

/// The result of inspecting an enrolled process that was not selected.
enum ForeignScan {
    /// Not needed: no selected process is in another domain.
    SameDomain,
    /// Inactive: its contents are cached.
    Inactive(TrustDomain, ProcessId),
    /// Scanned. Its activity before the scan may be unknown.
    Scanned(Box<Subject>, Option<ActivityCounters>),
}

/// Selects processes and reads their regions. Enrolled processes that are not selected are foreign processes if any
/// selected process is in another trust domain. Of these the enrolled regions are read, unless `foreign` has cached the
/// process and it is inactive. If only a part of a process is scanned, the scope has the selected processes of its
/// domain only.
pub fn determine_scope(
    host: &dyn Host,
    selection: &ProcessSelection,
    domains: &DomainConfig,
    enrolled_processes: &[ProcessId],
    foreign: Option<&ForeignProcesses>,
) -> Result<ScanScope, Error> {
    let nodes = observe::merging_nodes(host);
    let domain_of = |handle: &dyn Handle, process: &Process| {
        domains.domain(process).with_nodes(observe::bound_nodes(handle, &nodes))
    };
    let read_activity = |handle: &dyn Handle| foreign.and_then(|_| ActivityCounters::read_exact(host, handle).ok());
    // The activity is read before the regions, so that later activity is noticed.
    let inspect = |handle: &dyn Handle, process: Process, activity: Option<ActivityCounters>| {
        let regions = find_ineligible_regions(handle, &process, observe::regions(handle)?);
        let domain = domain_of(handle, &process);
        Ok((Subject { domain, process, regions, is_foreign: false, parts: vec![ScanPart::WHOLE] }, activity))
    };
    let (inspected, unscanned) =
        inspect_selected(host, selection, |handle, process| inspect(handle, process, read_activity(handle)))?;
    let mut scope = ScanScope { unscanned, ..ScanScope::default() };
    for (mut subject, activity) in inspected {
        if let Some(parts) = selection.parts.get(&subject.process.id.pid) {
            subject.parts.clone_from(parts);
        }
        scope.add_subject(subject, activity);
    }
    // What a process has enrolled outside of its part is not read, so no process of another domain may be planned.
    let is_partial = |subject: &&Subject| subject.parts != [ScanPart::WHOLE];
    if let Some(domain) = scope.subjects.iter().find(is_partial).map(|subject| subject.domain.clone()) {
        scope.subjects.retain(|subject| subject.domain == domain);
    }
    let subjects = &scope.subjects;
    let selected: BTreeSet<ProcessId> = subjects.iter().map(|subject| subject.process.id).collect();
    let selected_domains: BTreeSet<TrustDomain> = subjects.iter().map(|subject| subject.domain.clone()).collect();
    let pids: Vec<Pid> = enrolled_processes.iter().filter(|id| !selected.contains(id)).map(|id| id.pid).collect();
    if !pids.is_empty() {
        let inspect_foreign = |handle: &dyn Handle, process: Process| {
            let domain = domain_of(handle, &process);
            if !selected_domains.iter().any(|selected| *selected != domain) {
                return Ok(ForeignScan::SameDomain);
            }
            let activity = read_activity(handle);
            let is_inactive =
                foreign.zip(activity).is_some_and(|(foreign, activity)| foreign.is_inactive(process.id, activity));
            if is_inactive {
                return Ok(ForeignScan::Inactive(domain, process.id));
            }
            let (mut subject, activity) = inspect(handle, process, activity)?;
            subject.regions.retain(|(region, _)| region.may_have_merged_pages());
            subject.is_foreign = true;
            Ok(ForeignScan::Scanned(Box::new(subject), activity))
        };
        // Foreign processes that exited or cannot be read are skipped.
        let (foreign_scans, _) =
            inspect_selected(host, &ProcessSelection { pids, ..ProcessSelection::default() }, inspect_foreign)?;
        for scan in foreign_scans {
            match scan {
                ForeignScan::SameDomain => {}
                ForeignScan::Inactive(domain, process) => scope.inactive_foreign.push((domain, process)),
                ForeignScan::Scanned(subject, activity) => scope.add_subject(*subject, activity),
            }
        }
    }
    scope.subjects.sort_by(|a, b| (&a.domain, a.process.id).cmp(&(&b.domain, b.process.id)));
    Ok(scope)
}

/// Opens and inspects each selected process that has memory of its own, which excludes kernel threads and zombies.
/// Processes are inspected in parallel. Both results, inspected and unscanned, are ordered by process number.
///
/// Processes that exited are in neither list, unless they were selected by number.
pub fn inspect_selected<T: Send>(
    host: &dyn Host,
    selection: &ProcessSelection,
    inspect: impl Fn(&dyn Handle, Process) -> Reading<T> + Sync,
) -> Result<(Vec<T>, Vec<UnscannedProcess>), Error> {
    let matcher = SelectionMatcher {
        selection,
        comm_globs: compile_patterns(&selection.comm_patterns)?,
        vm_name_globs: compile_patterns(&selection.vm_patterns)?,
    };
    let mut pids = selection.pids.clone();
    if pids.is_empty() {
        pids = host.pids().map_err(|source| Error::Processes { host: host.describe(), source })?;
        pids.retain(|&pid| selection.excluded_pid != Some(pid));
    }
    pids.sort_unstable();
    pids.dedup();
    let results: Vec<Result<Option<T>, UnscannedProcess>> =
        pids.par_iter().map(|&pid| inspect_process(host, pid, &matcher, &inspect)).collect();
    let is_reported = |process: &UnscannedProcess| process.why != Absent::Vanished || !selection.pids.is_empty();
    let (mut inspected, mut unscanned) = (Vec::new(), Vec::new());
    for result in results {
        match result {
            Ok(result) => inspected.extend(result),
            Err(process) => unscanned.extend(Some(process).filter(is_reported)),
        }
    }
    Ok((inspected, unscanned))
}

fn compile_patterns(patterns: &[String]) -> Result<Vec<GlobMatcher>, Error> {
    patterns.iter().map(|pattern| Ok(Glob::new(pattern)?.compile_matcher())).collect()
}

/// Inspects one process: `None` if it is not selected or has no memory of its own.
fn inspect_process<T>(
    host: &dyn Host,
    pid: Pid,
    matcher: &SelectionMatcher<'_>,
    inspect: impl Fn(&dyn Handle, Process) -> Reading<T>,
) -> Result<Option<T>, UnscannedProcess> {
    let mut comm = None;
    let mut open = || -> Reading<Option<T>> {
        let handle = host.open(pid)?;
        let process = observe::process(host, &*handle)?;
        if !matcher.matches(&process) || process.kernel_thread {
            return Ok(None);
        }
        comm = Some(process.comm.clone());
        if process.is_zombie() {
            return Ok(None);
        }
        inspect(&*handle, process).map(Some)
    };
    open().map_err(|why| UnscannedProcess { pid, comm, why })
}

/// The regions, each with the reason why KSM cannot take its pages.
fn find_ineligible_regions(
    handle: &dyn Handle,
    process: &Process,
    regions: Vec<Region>,
) -> Vec<(Region, Option<Ineligible>)> {
    let pinned = if is_guest_ram_pinned(handle, process) { find_guest_ram(process, &regions) } else { Vec::new() };
    regions
        .into_iter()
        .enumerate()
        .map(|(i, region)| {
            let is_file = region.anonymous.0 == 0 && region.rss.0 > 0;
            let reason = region
                .ineligible()
                .or(pinned.contains(&i).then_some(Ineligible::Vfio))
                .or(is_file.then_some(Ineligible::File));
            (region, reason)
        })
        .collect()
}

/// Whether a device is passed through to the process's virtual machine, whose RAM is then pinned.
fn is_guest_ram_pinned(handle: &dyn Handle, process: &Process) -> bool {
    process.identity.vm.as_ref().is_some_and(|vm| {
        vm.vfio || handle.links("fd").is_ok_and(|links| links.iter().any(|link| link.starts_with("/dev/vfio/")))
    })
}

/// The regions that hold guest RAM. This is the smallest private region that is as large as the RAM on the command
/// line. If RAM comes from several backends, these are the largest regions that together are large enough.
fn find_guest_ram(process: &Process, regions: &[Region]) -> Vec<usize> {
    let Some(memory) = process.identity.vm.as_ref().and_then(|vm| vm.memory_bytes) else { return Vec::new() };
    let size = |i: &usize| regions[*i].range.bytes().0;
    let mut candidates: Vec<usize> =
        (0..regions.len()).filter(|&i| regions[i].ineligible().is_none() && regions[i].anonymous.0 > 0).collect();
    candidates.sort_by_key(size);
    if let Some(&whole) = candidates.iter().find(|i| size(i) >= memory) {
        return vec![whole];
    }
    let mut total = 0;
    let mut ram = Vec::new();
    for i in candidates.into_iter().rev() {
        if total >= memory {
            break;
        }
        total += size(&i);
        ram.push(i);
    }
    ram
}

/// The method that reads the pages of a region without side effects. `process_vm_readv` unshares merged pages, so it is
/// used only for regions that were never enrolled.
pub fn read_method(region: &Region) -> ReadMethod {
    if region.may_have_merged_pages() {
        ReadMethod::ProcMem { detect_merged: !matches!(&region.ksm, Ok(bytes) if bytes.0 == 0) }
    } else {
        ReadMethod::ProcessVmReadv
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::identity::Identity;
    use pagefold_base::region::VmFlags;

    #[test]
    fn cgroup_match_includes_descendants() {
        assert!(is_in_cgroup("/a/b", "/a"));
        assert!(is_in_cgroup("/a", "/a/"));
        assert!(is_in_cgroup("/a", "/"));
        assert!(!is_in_cgroup("/ab", "/a"));
    }

    #[test]
    fn guest_ram_is_found_in_one_or_several_regions() {
        let arguments = |memory: &str| ["qemu-system-x86_64", "-m", memory].map(str::to_owned).to_vec();
        let process = |memory| {
            let id = ProcessId { pid: Pid(1), start_time: 1 };
            let identity = Identity::new(&arguments(memory), &Default::default(), None);
            Process { identity, ..Process::absent(id, &Absent::Denied) }
        };
        let region = |mib: u64| {
            let range = AddressRange { start: 1 << 40, end: (1 << 40) + (mib << 20) };
            Region { anonymous: Bytes(4096), ..Region::empty(range) }
        };
        let regions = [region(8), region(512), region(512), region(2048)];
        assert_eq!(find_guest_ram(&process("512"), &regions), [1]);
        assert_eq!(find_guest_ram(&process("2048"), &regions), [3]);
        assert_eq!(find_guest_ram(&process("1024"), &regions[..3]), [2, 1]);
        assert_eq!(find_guest_ram(&process("16384"), &regions).len(), 4);
    }

    #[test]
    fn enrolled_regions_are_read_through_proc_mem() {
        let region = |flags, ksm| Region { flags, ksm, ..Region::empty(AddressRange { start: 0, end: 4096 }) };
        let mergeable = VmFlags::MERGEABLE;
        let check = |region: Region, expected| assert_eq!(read_method(&region), expected);
        check(region(VmFlags::default(), Ok(Bytes(0))), ReadMethod::ProcessVmReadv);
        check(region(VmFlags::default(), Ok(Bytes(4096))), ReadMethod::ProcMem { detect_merged: true });
        check(region(mergeable, Ok(Bytes(0))), ReadMethod::ProcMem { detect_merged: false });
        check(region(mergeable, Err(Absent::NotOnThisKernel)), ReadMethod::ProcMem { detect_merged: true });
    }
}
