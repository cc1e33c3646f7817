//! Who is counted: the chosen processes with their regions, sorted into trust domains.

use crate::Error;
use globset::{Glob, GlobMatcher};
use pagefold_host::{Host, Process as Handle, Way, observe};
use pagefold_model::census::Unseen;
use pagefold_model::domain::{Domain, DomainRule};
use pagefold_model::process::Process;
use pagefold_model::region::{Ineligible, Region};
use pagefold_model::{Absent, Pid, Reading};
use rayon::prelude::*;

/// Which processes to look at. A process is chosen if it fits every kind of condition that is given, and within a kind
/// any one.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Process numbers.
    pub pids: Vec<Pid>,
    /// Patterns of `comm`, as a shell's.
    pub names: Vec<String>,
    /// Cgroup paths: the cgroup and everything below it.
    pub cgroups: Vec<String>,
    /// Effective users.
    pub users: Vec<u32>,
    /// Names of virtual machines.
    pub vms: Vec<String>,
    /// A process to leave out unless it is asked for by number: whoever counts, whose memory is the census itself.
    pub except: Option<Pid>,
}

/// A selection with its patterns ready for use.
struct Chooser<'a> {
    selection: &'a Selection,
    names: Vec<GlobMatcher>,
}

impl Chooser<'_> {
    fn fits(&self, process: &Process) -> bool {
        let Selection { cgroups, users, vms, .. } = self.selection;
        let any = |empty: bool, fits: bool| empty || fits;
        any(self.names.is_empty(), self.names.iter().any(|name| name.is_match(&process.comm)))
            && any(cgroups.is_empty(), process.cgroup.as_ref().is_ok_and(|path| cgroups.iter().any(|c| below(path, c))))
            && any(users.is_empty(), process.uid.as_ref().is_ok_and(|uid| users.contains(uid)))
            && any(
                vms.is_empty(),
                process.identity.vm.as_ref().is_some_and(|vm| vm.name.as_ref().is_some_and(|name| vms.contains(name))),
            )
    }
}

/// Whether a cgroup path is `top` or below it.
fn below(path: &str, top: &str) -> bool {
    let top = top.trim_end_matches('/');
    path.strip_prefix(top).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// A process that is counted.
#[derive(Clone, Debug)]
pub struct Subject {
    /// Who it is.
    pub process: Process,
    /// Its trust domain.
    pub domain: Domain,
    /// Its regions in address order, each with why KSM cannot take its pages.
    pub regions: Vec<(Region, Option<Ineligible>)>,
}

/// Everybody who is counted.
#[derive(Clone, Debug, Default)]
pub struct Survey {
    /// Ordered by trust domain, then by number.
    pub subjects: Vec<Subject>,
    /// Ordered by number. Processes that went away on their own are not among them unless they were asked for by number.
    pub unseen: Vec<Unseen>,
}

/// Choose processes and read their regions.
pub fn survey(host: &dyn Host, selection: &Selection, rule: DomainRule) -> Result<Survey, Error> {
    let (mut subjects, unseen) = choose(host, selection, |handle, process| {
        let regions = judge(handle, &process, observe::regions(handle)?);
        Ok(Subject { domain: rule.domain(&process), process, regions })
    })?;
    subjects.sort_by(|a, b| (&a.domain, a.process.id).cmp(&(&b.domain, b.process.id)));
    Ok(Survey { subjects, unseen })
}

/// Take hold of each chosen process that has memory of its own, which kernel threads and zombies have not, and look at
/// it. Several are looked at at once; what was seen and what was not is in the order of their numbers.
///
/// Processes that went away on their own are in neither list, unless they were asked for by number.
pub fn choose<T: Send>(
    host: &dyn Host,
    selection: &Selection,
    look: impl Fn(&dyn Handle, Process) -> Reading<T> + Sync,
) -> Result<(Vec<T>, Vec<Unseen>), Error> {
    let names: Result<Vec<_>, _> = selection.names.iter().map(|name| Ok(Glob::new(name)?.compile_matcher())).collect();
    let chooser = Chooser { selection, names: names.map_err(Error::Pattern)? };
    let mut pids = selection.pids.clone();
    if pids.is_empty() {
        pids = host.pids().map_err(|source| Error::Processes { host: host.describe(), source })?;
        pids.retain(|&pid| selection.except != Some(pid));
    }
    pids.sort_unstable();
    pids.dedup();
    let looked_at: Vec<Result<Option<T>, Unseen>> =
        pids.par_iter().map(|&pid| one(host, pid, &chooser, &look)).collect();
    let asked_for = |unseen: &Unseen| unseen.why != Absent::Vanished || !selection.pids.is_empty();
    let (mut seen, mut unseen) = (Vec::new(), Vec::new());
    for result in looked_at {
        match result {
            Ok(found) => seen.extend(found),
            Err(missed) => unseen.extend(Some(missed).filter(asked_for)),
        }
    }
    Ok((seen, unseen))
}

/// One process: `None` if it is not chosen or has no memory of its own.
fn one<T>(
    host: &dyn Host,
    pid: Pid,
    chooser: &Chooser<'_>,
    look: impl Fn(&dyn Handle, Process) -> Reading<T>,
) -> Result<Option<T>, Unseen> {
    let mut comm = None;
    let mut open = || -> Reading<Option<T>> {
        let handle = host.open(pid)?;
        let process = observe::process(&*handle)?;
        if !chooser.fits(&process) || process.kernel_thread {
            return Ok(None);
        }
        comm = Some(process.comm.clone());
        if process.is_zombie() {
            return Ok(None);
        }
        look(&*handle, process).map(Some)
    };
    open().map_err(|why| Unseen { pid, comm, why })
}

/// Why KSM cannot take the pages of each region.
fn judge(handle: &dyn Handle, process: &Process, regions: Vec<Region>) -> Vec<(Region, Option<Ineligible>)> {
    let pinned = guest_ram_pinned(handle, process).then(|| guest_ram(process, &regions)).flatten();
    regions
        .into_iter()
        .enumerate()
        .map(|(i, region)| {
            let file = region.anonymous.0 == 0 && region.rss.0 > 0;
            let reason = region
                .ineligible()
                .or((pinned == Some(i)).then_some(Ineligible::Vfio))
                .or(file.then_some(Ineligible::File));
            (region, reason)
        })
        .collect()
}

/// Whether a device is passed through to the virtual machine that the process runs: its RAM is pinned then.
fn guest_ram_pinned(handle: &dyn Handle, process: &Process) -> bool {
    process.identity.vm.as_ref().is_some_and(|vm| {
        vm.vfio || handle.links("fd").is_ok_and(|links| links.iter().any(|link| link.starts_with("/dev/vfio/")))
    })
}

/// The region that holds guest RAM: the smallest private one that is large enough for what the command line says.
fn guest_ram(process: &Process, regions: &[Region]) -> Option<usize> {
    let memory = process.identity.vm.as_ref()?.memory?;
    regions
        .iter()
        .enumerate()
        .filter(|(_, region)| region.ineligible().is_none() && region.range.bytes().0 >= memory)
        .min_by_key(|(_, region)| region.range.bytes())
        .map(|(i, _)| i)
}

/// How the pages of a region may be read without a trace: `process_vm_readv` only where KSM was never told of the
/// region, since it unshares what it reads.
pub fn way(region: &Region) -> Way {
    if region.may_hold_merged() {
        Way::Memory { merged: !matches!(&region.ksm, Ok(bytes) if bytes.0 == 0) }
    } else {
        Way::Remote
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_model::region::VmFlags;
    use pagefold_model::{AddressRange, Bytes};

    #[test]
    fn cgroups_contain_what_is_below_them() {
        assert!(below("/a/b", "/a"));
        assert!(below("/a", "/a/"));
        assert!(below("/a", "/"));
        assert!(!below("/ab", "/a"));
    }

    #[test]
    fn enrolled_regions_are_never_pinned() {
        let region = |flags, ksm| Region { flags, ksm, ..Region::empty(AddressRange { start: 0, end: 4096 }) };
        let mergeable = VmFlags::MERGEABLE;
        let check = |region: Region, expected| assert_eq!(way(&region), expected);
        check(region(VmFlags::default(), Ok(Bytes(0))), Way::Remote);
        check(region(VmFlags::default(), Ok(Bytes(4096))), Way::Memory { merged: true });
        check(region(mergeable, Ok(Bytes(0))), Way::Memory { merged: false });
        check(region(mergeable, Err(Absent::NotOnThisKernel)), Way::Memory { merged: true });
    }
}
