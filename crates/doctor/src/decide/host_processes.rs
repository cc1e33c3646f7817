//! All processes of the host, sorted and summed once for the rules.
//!
//! Sums saturate: facts come from files, and a wrong file must not stop the doctor.

use super::{HostFacts, MissingReading, ProcessFacts};
use pagefold_base::reading::{Absent, Reading};
use pagefold_base::region::{Ineligible, Region, VmFlags};
use pagefold_base::units::{Bytes, PageSize, Pages};

/// The processes that have memory, sorted by pid and start time.
pub(super) struct HostProcesses<'a> {
    pub processes: Vec<&'a ProcessFacts>,
}

impl ProcessFacts {
    /// Whether ksmd scans it: the whole process (prctl) or at least one region (madvise) is enrolled.
    pub(super) fn is_enrolled(&self) -> Reading<bool> {
        if self.process.ksm.merge_any == Ok(true) || self.process.ksm.mergeable == Ok(true) {
            return Ok(true);
        }
        match &self.regions {
            Ok(regions) => Ok(regions.iter().any(|region| region.flags.has(VmFlags::MERGEABLE))),
            Err(absent) => self.process.ksm.mergeable.clone().map_err(|_| absent.clone()),
        }
    }

    /// Enrolled bytes that KSM can merge; 0 if the regions cannot be read.
    pub(super) fn mergeable(&self) -> Bytes {
        self.sum(|region| if is_mergeable(region) { region.anonymous } else { Bytes::ZERO })
    }

    /// The part of [`Self::mergeable`] in huge pages.
    pub(super) fn mergeable_huge(&self) -> Bytes {
        self.sum(|region| if is_mergeable(region) { region.anon_huge } else { Bytes::ZERO })
    }

    /// Bytes that KSM could merge, enrolled or not.
    pub(super) fn eligible(&self) -> Bytes {
        self.sum(|region| if region.ineligible().is_none() { region.anonymous } else { Bytes::ZERO })
    }

    /// The setting by which a virtual machine's owner forbids merging.
    pub(super) fn opt_out(&self) -> Option<String> {
        self.process.identity.vm.as_ref()?.opt_out()
    }

    /// Whether its owner forbids merging of all its memory, so that QEMU itself enrolls none.
    pub(super) fn forbids_all(&self) -> bool {
        self.opt_out().is_some()
            && self.process.identity.vm.as_ref().is_some_and(|vm| {
                vm.backends.iter().all(|backend| !backend.merge) && (!vm.mem_merge || !vm.backends.is_empty())
            })
    }

    /// Whether it is excluded for the secrets it holds, and not by its owner's setting.
    pub(super) fn holds_secrets(&self) -> bool {
        self.exclusion_reason.is_some() && self.opt_out().is_none()
    }

    fn sum(&self, bytes: impl Fn(&Region) -> Bytes) -> Bytes {
        total(self.regions.iter().flatten().map(bytes))
    }

    /// Name and pid for reports. No process has pid 0: it stands for processes that are not listed.
    pub(super) fn name(&self) -> String {
        if self.process.id.pid.0 == 0 {
            return "hidden processes".to_owned();
        }
        format!("{} ({})", self.process.comm.escape_debug(), self.process.id.pid)
    }
}

fn is_mergeable(region: &Region) -> bool {
    region.flags.has(VmFlags::MERGEABLE) && region.ineligible().is_none()
}

/// Why KSM cannot merge the memory of a region, and how much memory that is. `None` if it can, and for memory that is
/// not the process's own: device registers, and files, which the page cache shares already.
pub(super) fn ineligible_bytes(facts: &ProcessFacts, region: &Region) -> Option<(Ineligible, Bytes)> {
    let why = region.ineligible()?;
    // Guest RAM may be any file if a memory backend of the machine is shared.
    let has_shared_backend = facts.process.identity.vm.iter().flat_map(|vm| &vm.backends).any(|backend| backend.share);
    let bytes = match why {
        Ineligible::Hugetlb => region.hugetlb,
        Ineligible::Shared if !has_shared_backend && !region.is_memory_object() => return None,
        Ineligible::Shared | Ineligible::Secret => region.rss,
        _ => region.anonymous,
    };
    (bytes > Bytes::ZERO).then_some((why, bytes))
}

/// Saturating sum.
pub(super) fn total(values: impl Iterator<Item = Bytes>) -> Bytes {
    values.fold(Bytes::ZERO, |sum, value| Bytes(sum.0.saturating_add(value.0)))
}

/// The size of these pages in bytes; saturates.
pub(super) fn bytes_of(page_size: PageSize, pages: Pages) -> Bytes {
    Bytes(pages.0.saturating_mul(page_size.bytes()))
}

/// Whether `part` is at least `percent` of `whole`, and not zero.
pub(super) fn is_at_least_percent(part: u64, whole: u64, percent: u64) -> bool {
    part > 0 && u128::from(part) * 100 >= u128::from(whole) * u128::from(percent)
}

impl<'a> HostProcesses<'a> {
    pub fn new(facts: &'a HostFacts) -> Self {
        let mut processes: Vec<_> = facts.processes.iter().filter(|p| has_memory(p)).collect();
        processes.sort_by_key(|p| p.process.id);
        Self { processes }
    }

    pub fn enrolled(&self) -> impl Iterator<Item = &'a ProcessFacts> {
        self.processes.iter().copied().filter(|p| p.is_enrolled() == Ok(true))
    }

    /// Saturating sum over the processes.
    pub fn sum(&self, bytes: impl Fn(&ProcessFacts) -> Bytes) -> Bytes {
        total(self.processes.iter().map(|p| bytes(p)))
    }

    /// Fails if a relevant process could not be read; `read` returns the reading that the rule needs of each process.
    /// Processes that have exited are not relevant.
    pub fn require_readable<T>(
        &self,
        reading_name: &str,
        read: impl Fn(&ProcessFacts) -> Reading<T>,
    ) -> Result<(), MissingReading> {
        let unreadable = self.processes.iter().filter_map(|p| Some((p, read(p).err()?)));
        let unreadable: Vec<_> = unreadable.filter(|(_, absent)| *absent != Absent::Vanished).collect();
        let Some((first, _)) = unreadable.first() else { return Ok(()) };
        let subject = if unreadable.len() == 1 { first.name() } else { process_count_text(unreadable.len()) };
        // The smallest reason, so that the result does not depend on the order of processes.
        let absent = unreadable.iter().map(|(_, absent)| absent).min().cloned().unwrap_or(Absent::Denied);
        Err(MissingReading { reading_name: format!("{reading_name} of {subject}"), absent })
    }
}

/// Number of processes, as text.
pub(super) fn process_count_text(count: usize) -> String {
    if count == 1 { "1 process".to_owned() } else { format!("{count} processes") }
}

/// Kernel threads and zombies have no memory.
pub(super) fn has_memory(facts: &ProcessFacts) -> bool {
    !facts.process.kernel_thread && !facts.process.is_zombie()
}

/// Pages for which ksmd has metadata. `pages_volatile` is defined as the remainder (mm/ksm.c, `pages_volatile_show`),
/// so the four counters sum to `ksm_rmap_items`.
pub(super) fn tracked(ksm: &pagefold_base::ksm::Ksm) -> Result<Pages, MissingReading> {
    let readings = [
        ("pages_shared", &ksm.pages_shared),
        ("pages_sharing", &ksm.pages_sharing),
        ("pages_unshared", &ksm.pages_unshared),
        ("pages_volatile", &ksm.pages_volatile),
    ];
    readings
        .into_iter()
        .try_fold(Pages::ZERO, |sum, (name, reading)| Ok(Pages(sum.0.saturating_add(*super::require(name, reading)?))))
}

/// The memory that ksmd has to scan.
pub(super) struct ScanWorkload {
    pub pages: Pages,
    /// An error if some processes could not be read, so that the number is a lower bound.
    pub complete: Result<(), MissingReading>,
}

/// The larger of the enrolled memory of readable processes and the pages with ksmd metadata. The latter covers all
/// processes once a pass is complete, even those whose regions cannot be read.
pub(super) fn workload(facts: &HostFacts, host_processes: &HostProcesses) -> Result<ScanWorkload, MissingReading> {
    let ksm = super::require("/sys/kernel/mm/ksm", &facts.ksm)?;
    let mergeable = facts.page_size.pages_in(host_processes.sum(ProcessFacts::mergeable));
    let tracked = tracked(ksm)?;
    let has_completed_pass = *super::require("full_scans", &ksm.full_scans)? > 0 && tracked > Pages::ZERO;
    let complete = if has_completed_pass {
        Ok(())
    } else {
        host_processes.require_readable("regions", |p| p.regions.clone().map(drop))
    };
    Ok(ScanWorkload { pages: mergeable.max(tracked), complete })
}
