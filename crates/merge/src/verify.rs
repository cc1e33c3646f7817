//! Pages of a plan that KSM really merged, from page tables and frame flags.
//!
//! KSM's counters date from ksmd's last visit: a page that was written since still counts as shared. Page tables are
//! exact, and with ksmd stopped they are a consistent snapshot. Reading them needs the privilege to see frame numbers.

use crate::decide::outcome::KsmPageCounts;
use crate::decide::plan::{MergePlan, PlanTarget};
use crate::process_pages;
use pagefold_base::ksm::{ProcessKsm, RMAP_ITEM_BYTES};
use pagefold_base::region::VmFlags;
use pagefold_base::{Absent, AddressRange, Bytes, NetBytes, PageSize, Pages, Pfn, Pid, ProcessId, Reading};
use pagefold_host::page_state::{FrameLookup, PageState, walk_page_states};
use pagefold_host::{Host, ProcessHandle, hold, observe, parse};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// Count the pages of a range that are mapped to a KSM frame, the pages that are mapped to the kernel's zero page, and
/// all resident pages. A KSM page without another mapping saves nothing and does not count. The KSM frames are added to
/// `frames`.
pub(crate) fn count_ksm_pages(
    host: &dyn Host,
    handle: &dyn ProcessHandle,
    range: AddressRange,
    frames: &mut Vec<Pfn>,
) -> Reading<KsmPageCounts> {
    let mut counts = KsmPageCounts::default();
    let mut is_hidden = false;
    walk_page_states(host, handle, range, FrameLookup::Shared, |_, state| {
        match state {
            PageState::Absent | PageState::Swapped | PageState::File => return,
            PageState::Ksm(frame) => {
                counts.merged.0 += 1;
                frames.push(frame);
            }
            PageState::ZeroPage { .. } => counts.zero.0 += 1,
            PageState::Hidden => is_hidden = true,
            PageState::Anonymous => {}
        }
        counts.present.0 += 1;
    })?;
    if is_hidden { Err(Absent::Denied) } else { Ok(counts) }
}

/// Count the KSM pages of a range of a process.
pub fn count_range_pages(host: &dyn Host, process: ProcessId, range: AddressRange) -> Reading<KsmPageCounts> {
    count_ksm_pages(host, &*hold(host, process)?, range, &mut Vec::new())
}

/// The merged pages of a target, and the KSM frames that they are mapped to.
#[derive(Debug)]
pub struct MergedTarget {
    counts: KsmPageCounts,
    /// Zero pages that KSM placed in the whole process, by its counter.
    ksm_zero_pages: Pages,
    /// Huge pages in the whole process; zero where the plan knows of none in its regions; `None` where unknown.
    huge: Option<Bytes>,
    /// Ascending, each once.
    frames: Vec<KsmFrame>,
}

impl MergedTarget {
    /// A process without merged pages and with so many bytes in huge pages.
    fn none(huge: Option<Bytes>) -> Self {
        Self { counts: KsmPageCounts::default(), ksm_zero_pages: Pages::ZERO, huge, frames: Vec::new() }
    }
}

/// A KSM frame.
#[derive(Clone, Copy, Debug)]
struct KsmFrame {
    frame: Pfn,
    /// How many pages of the target's ranges are mapped to it.
    own_mappings: u64,
    /// How many pages of all processes are mapped to it; 0 where the kernel does not show it.
    all_mappings: u64,
}

/// Visit each frame that unmerging these targets would free, with the positions of the targets that share it. A frame
/// that other processes map as well stays in any case, and joining it costs nothing.
fn visit_taken_frames<'h>(targets: impl Iterator<Item = (usize, &'h MergedTarget)>, mut visit: impl FnMut(&[usize])) {
    let mut remaining: Vec<(usize, &[KsmFrame])> =
        targets.map(|(position, target)| (position, &target.frames[..])).collect();
    let first_frame =
        |(index, (_, frames)): (usize, &(usize, &[KsmFrame]))| Some(Reverse((frames.first()?.frame, index)));
    let mut next: BinaryHeap<Reverse<(Pfn, usize)>> = remaining.iter().enumerate().filter_map(first_frame).collect();
    let mut sharers = Vec::new();
    while let Some(&Reverse((frame, _))) = next.peek() {
        sharers.clear();
        let (mut own_mappings, mut all_mappings) = (0, 0);
        while let Some(Reverse((_, index))) = next.peek().copied().filter(|Reverse((other, _))| *other == frame) {
            next.pop();
            let (position, frames) = &mut remaining[index];
            (own_mappings, all_mappings) =
                (own_mappings + frames[0].own_mappings, all_mappings.max(frames[0].all_mappings));
            sharers.push(*position);
            *frames = &frames[1..];
            next.extend(frames.first().map(|next| Reverse((next.frame, index))));
        }
        if all_mappings <= own_mappings {
            visit(&sharers);
        }
    }
}

/// The merged pages of each target of a plan; `None` for ended processes.
///
/// Zero pages are counted by page tables too: when ksmd has a huge page split, the kernel maps zero pages to its zero
/// page without any KSM counter (mm/migrate.c, `try_to_map_unused_to_zeropage`).
pub fn measure_targets(host: &dyn Host, plan: &MergePlan) -> Reading<Vec<Option<MergedTarget>>> {
    let measure = |target| match measure_target(host, target) {
        Ok(measured) => Ok(Some(measured)),
        Err(Absent::Vanished) => Ok(None),
        Err(why) => Err(why),
    };
    plan.targets.iter().map(measure).collect()
}

/// The sum over some targets; each frame that no other process maps counts once.
pub fn sum_targets<'f>(targets: impl Iterator<Item = &'f MergedTarget> + Clone) -> KsmPageCounts {
    let mut sum = KsmPageCounts::default();
    visit_taken_frames(targets.clone().enumerate(), |_| sum.frames += Pages(1));
    for MergedTarget { counts, .. } in targets {
        sum.merged += counts.merged;
        sum.zero += counts.zero;
        sum.present += counts.present;
        sum.rmap_items += counts.rmap_items;
    }
    sum
}

/// Net savings between two measurements for each target that still runs, less ksmd's metadata for it. They add up to
/// the savings of all targets.
pub fn net_savings(
    host: &dyn Host,
    plan: &MergePlan,
    before: &[Option<MergedTarget>],
    after: &[Option<MergedTarget>],
) -> BTreeMap<ProcessId, NetBytes> {
    // The share of a process that has ended now belongs to the processes that share its frames.
    let running_before: Vec<Option<&MergedTarget>> =
        before.iter().zip(after).map(|(before, after)| before.as_ref().filter(|_| after.is_some())).collect();
    let after: Vec<Option<&MergedTarget>> = after.iter().map(Option::as_ref).collect();
    let (saved_before, saved_after) = (pages_saved_per_target(&running_before), pages_saved_per_target(&after));
    let net = |position: usize| {
        let rmap_items = |target: Option<&MergedTarget>| target.map_or(Pages::ZERO, |target| target.counts.rmap_items);
        let metadata =
            rmap_items(after[position]).saturating_sub(rmap_items(running_before[position])).0 * RMAP_ITEM_BYTES;
        let pages = saved_after[position] - saved_before[position];
        NetBytes((pages * host.page_size().bytes() as f64) as i64 - metadata.cast_signed())
    };
    let running_targets = plan.targets.iter().enumerate().filter(|(position, _)| after[*position].is_some());
    running_targets.map(|(position, target)| (target.process.id, net(position))).collect()
}

/// Zero pages freed between two measurements in each target that still runs, without those that KSM counts. The kernel
/// frees them when it splits a huge page. Reads of memory that was never written map the same zero page. So the result
/// is at most the huge pages that the process lost meanwhile, and zero where they cannot be read.
pub fn split_zero_pages(
    plan: &MergePlan,
    page_size: PageSize,
    before: &[Option<MergedTarget>],
    after: &[Option<MergedTarget>],
) -> BTreeMap<ProcessId, Pages> {
    let measurements = before.iter().zip(after).zip(&plan.targets);
    let freed = measurements.filter_map(|((before, after), target)| {
        let (before, after) = (before.as_ref()?, after.as_ref()?);
        let zeros = after.counts.zero.saturating_sub(before.counts.zero);
        let uncounted = zeros.saturating_sub(after.ksm_zero_pages.saturating_sub(before.ksm_zero_pages));
        let split = before.huge?.saturating_sub(after.huge?);
        let freed = uncounted.min(page_size.pages_in(split));
        (freed > Pages::ZERO).then_some((target.process.id, freed))
    });
    freed.collect()
}

/// Zero pages that KSM placed, by its counter. The counter is signed and can be below zero, which means none.
pub(crate) fn ksm_zero_pages(ksm: &ProcessKsm) -> Pages {
    Pages(ksm.zero_pages.as_ref().map_or(0, |pages| (*pages).max(0).unsigned_abs()))
}

/// Pages that each target saves. A frame that only these targets map is divided equally among them.
fn pages_saved_per_target(targets: &[Option<&MergedTarget>]) -> Vec<f64> {
    let pages = |target: &Option<&MergedTarget>| {
        target.map_or(0.0, |target| (target.counts.merged + target.counts.zero).0 as f64)
    };
    let mut saved: Vec<f64> = targets.iter().map(pages).collect();
    let running = targets.iter().enumerate().filter_map(|(position, target)| Some((position, (*target)?)));
    visit_taken_frames(running, |sharers| {
        sharers.iter().for_each(|position| saved[*position] -= 1.0 / sharers.len() as f64)
    });
    saved
}

fn measure_target(host: &dyn Host, target: &PlanTarget) -> Reading<MergedTarget> {
    let handle = hold(host, target.process.id)?;
    let huge = match target.huge_page_bytes {
        Bytes::ZERO => Some(Bytes::ZERO),
        _ => process_pages::huge_page_bytes(&*handle, host.page_size()).ok(),
    };
    let (mut measured, mut frames) = (MergedTarget::none(huge), Vec::new());
    for range in &target.ranges {
        let counts = count_ksm_pages(host, &*handle, range.range, &mut frames)?;
        measured.counts.merged += counts.merged;
        measured.counts.zero += counts.zero;
        measured.counts.present += counts.present;
    }
    frames.sort_unstable();
    let ksm_frame = |same: &[Pfn]| KsmFrame { frame: same[0], own_mappings: same.len() as u64, all_mappings: 0 };
    measured.frames = frames.chunk_by(|a, b| a == b).map(ksm_frame).collect();
    measured.frames.shrink_to_fit();
    frames.dedup();
    if let Ok(mappings) = host.frame_mappings(&frames) {
        measured.frames.iter_mut().zip(mappings).for_each(|(frame, mappings)| frame.all_mappings = mappings);
    }
    let ksm = parse::process_ksm(handle.read("ksm_stat"), handle.read("ksm_merging_pages"));
    measured.ksm_zero_pages = ksm_zero_pages(&ksm);
    measured.counts.rmap_items.0 += ksm.rmap_items.unwrap_or(0);
    Ok(measured)
}

/// The enrolled processes, as far as they are visible.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EnrolledProcesses {
    /// Processes that are enrolled, wholly or in part. Before 6.14: processes for which ksmd has metadata.
    pub processes: Vec<ProcessId>,
    /// Whether more processes may be enrolled: without root, those of other users; before 6.14, those for which ksmd
    /// has no metadata yet.
    pub may_be_incomplete: bool,
}

/// Find the enrolled processes. On newer kernels this reads one file of each process.
pub fn find_enrolled(host: &dyn Host) -> Reading<EnrolledProcesses> {
    let mut enrolled = EnrolledProcesses::default();
    for pid in host.pids()? {
        // The PID alone can only rule a process out; a match is opened and checked again.
        match is_enrolled(|file| host.read(&format!("proc/{pid}/{file}"))) {
            Ok(false) => continue,
            Err(why) => {
                enrolled.may_be_incomplete |= matches!(why, Absent::Denied | Absent::NotOnThisKernel);
                continue;
            }
            Ok(true) => {}
        }
        if let Ok(handle) = host.open(pid)
            && is_enrolled(|file| handle.read(file)) == Ok(true)
        {
            enrolled.processes.push(handle.id());
        }
    }
    Ok(enrolled)
}

/// Whether a process is enrolled, by its files.
fn is_enrolled(read: impl Fn(&str) -> Reading<Vec<u8>>) -> Reading<bool> {
    let stat = read("ksm_stat");
    let mut ksm = parse::process_ksm(stat.clone(), Err(Absent::NotOnThisKernel));
    if ksm.merging_pages == Err(Absent::NotOnThisKernel) {
        ksm = parse::process_ksm(stat, read("ksm_merging_pages"));
    }
    match ksm.mergeable {
        // ksmd's metadata dates from its last visit.
        Ok(mergeable) => Ok(mergeable),
        Err(_) if ksm.rmap_items.is_ok_and(|items| items > 0) || ksm.merging_pages? > 0 => Ok(true),
        Err(_) => Err(Absent::NotOnThisKernel),
    }
}

/// Whether a process has enrolled memory now. Before 6.14 its regions show it; that takes longer the more there are.
pub fn has_enrolled_memory(handle: &dyn ProcessHandle) -> Reading<bool> {
    let ksm = parse::process_ksm(handle.read("ksm_stat"), Err(Absent::NotOnThisKernel));
    match ksm.mergeable {
        Err(Absent::NotOnThisKernel) => {
            Ok(observe::regions(handle)?.iter().any(|region| region.flags.has(VmFlags::MERGEABLE)))
        }
        mergeable => Ok(ksm.merge_any == Ok(true) || mergeable?),
    }
}

/// Number of enrolled processes outside a plan.
pub fn count_unplanned_enrolled(host: &dyn Host, plan: &MergePlan) -> Reading<u64> {
    let planned = plan.processes();
    Ok(find_enrolled(host)?.processes.iter().filter(|id| !planned.contains(id)).count() as u64)
}

/// Bytes of huge pages in the targets of a plan.
pub fn targets_huge_bytes(host: &dyn Host, plan: &MergePlan) -> Reading<Bytes> {
    let mut sum = Bytes::ZERO;
    for target in &plan.targets {
        match hold(host, target.process.id).and_then(|handle| observe::rollup(&*handle)?.anon_huge) {
            Ok(bytes) => sum += bytes,
            Err(Absent::Vanished) => {}
            Err(why) => return Err(why),
        }
    }
    Ok(sum)
}

/// Anonymous memory of the running targets, and of this process.
pub fn resident_anonymous(host: &dyn Host, plan: &MergePlan) -> Reading<(Bytes, Bytes)> {
    let read_anonymous = |handle: &dyn ProcessHandle| parse::status(&handle.read("status")?).rss_anon;
    let mut sum = Bytes::ZERO;
    for target in &plan.targets {
        match hold(host, target.process.id).and_then(|handle| read_anonymous(&*handle)) {
            Ok(bytes) => sum += bytes,
            // Ended, or a zombie.
            Err(Absent::Vanished | Absent::NotOnThisKernel) => {}
            Err(why) => return Err(why),
        }
    }
    Ok((sum, read_anonymous(&*host.open(Pid(std::process::id()))?)?))
}

/// The number of regions of each running process of a plan.
pub fn region_counts(host: &dyn Host, plan: &MergePlan) -> BTreeMap<ProcessId, u64> {
    let count = |id| Some((id, observe::region_count(&*hold(host, id).ok()?).ok()?));
    plan.processes().into_iter().filter_map(count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::plan::EnrollMethod;
    use pagefold_base::domain::TrustDomain;
    use pagefold_base::process::Process as Facts;
    use pagefold_host::fake_host::FakeHost;
    use pagefold_host::faulty_host::{FaultyHost, InjectedFault};

    /// A target with so many merged pages on these frames.
    fn merged_target(merged: u64, frames: &[u64], rmap_items: u64) -> MergedTarget {
        merged_target_shared_by(merged, frames, rmap_items, 0)
    }

    /// Such a target, with each frame mapped so many times in all processes.
    fn merged_target_shared_by(merged: u64, frames: &[u64], rmap_items: u64, all_mappings: u64) -> MergedTarget {
        let counts = KsmPageCounts { merged: Pages(merged), rmap_items: Pages(rmap_items), ..KsmPageCounts::default() };
        let own_mappings = merged / (frames.len() as u64).max(1);
        MergedTarget {
            counts,
            frames: frames.iter().map(|&frame| KsmFrame { frame: Pfn(frame), own_mappings, all_mappings }).collect(),
            ..MergedTarget::none(Some(Bytes::ZERO))
        }
    }

    /// The frames exist already: other processes merged before this target.
    #[test]
    fn frame_mapped_elsewhere_costs_nothing() {
        let nothing = [Some(merged_target(0, &[], 0)), Some(merged_target(0, &[], 0))];
        let gain = |after: &[Option<MergedTarget>]| {
            (net_by_pid(&nothing[..after.len()], after)[&0], sum_targets(after.iter().flatten()).frames)
        };
        // Two pages on two frames, each mapped once more elsewhere.
        assert_eq!(gain(&[Some(merged_target_shared_by(2, &[1, 2], 2, 2))]), (2 * 4096 - 128, Pages(0)));
        assert_eq!(gain(&[Some(merged_target_shared_by(2, &[1, 2], 2, 1))]), (-128, Pages(2)), "its own alone");
        // The two only mappers of a frame share it; with a third mapper outside, the frame costs them nothing.
        let two =
            |all| [Some(merged_target_shared_by(1, &[1], 1, all)), Some(merged_target_shared_by(1, &[1], 1, all))];
        assert_eq!(gain(&two(2)), (2048 - 64, Pages(1)));
        assert_eq!(gain(&two(3)), (4096 - 64, Pages(0)));
    }

    fn plan(targets: u32) -> MergePlan {
        let target = |pid| PlanTarget {
            process: Facts::absent(ProcessId { pid: Pid(pid), start_time: 1 }, &Absent::Denied),
            domain: TrustDomain::Host,
            ranges: Vec::new(),
            huge_page_bytes: Bytes::ZERO,
            enroll_method: EnrollMethod::InProcess,
        };
        MergePlan { targets: (0..targets).map(target).collect(), ..MergePlan::default() }
    }

    #[test]
    fn uncounted_zeros_come_from_splits() {
        let page_size = PageSize::new(4096).unwrap();
        let measured = |all: u64, counted: u64, huge: Option<u64>| {
            let counts = KsmPageCounts { zero: Pages(all), ..KsmPageCounts::default() };
            let huge = huge.map(|pages| page_size.bytes_of(Pages(pages)));
            Some(MergedTarget { counts, ksm_zero_pages: Pages(counted), ..MergedTarget::none(huge) })
        };
        let freed = |before: Option<MergedTarget>, after: Option<MergedTarget>| {
            let freed = split_zero_pages(&plan(1), page_size, &[before], &[after]);
            freed.into_values().map(|pages| pages.0).sum::<u64>()
        };
        let before = |all, counted| measured(all, counted, Some(1024));
        let after = |all, counted| measured(all, counted, Some(0));
        assert_eq!(freed(before(5, 0), after(105, 0)), 100, "five were read and never written");
        assert_eq!(freed(before(5, 5), after(105, 45)), 60, "40 more are counted by KSM");
        assert_eq!(freed(before(0, 0), after(40, 40)), 0);
        assert_eq!(freed(before(50, 0), after(10, 0)), 0, "written since");
        assert_eq!(freed(before(0, 0), None), 0, "its process has ended");
        // Reads of memory that was never written split no huge page.
        assert_eq!(freed(measured(0, 0, Some(0)), measured(8192, 0, Some(0))), 0, "there were no huge pages");
        assert_eq!(
            freed(measured(0, 0, Some(1024)), measured(8192, 0, Some(1024))),
            0,
            "all huge pages are there still"
        );
        assert_eq!(
            freed(measured(0, 0, Some(1024)), measured(8192, 0, Some(512))),
            512,
            "no more than one huge page had"
        );
        assert_eq!(freed(measured(0, 0, Some(0)), measured(8192, 0, Some(1024))), 0, "huge pages were made");
        assert_eq!(freed(before(0, 0), measured(100, 0, None)), 0, "it is not known what was split");
    }

    /// In bytes, by PID.
    fn net_by_pid(before: &[Option<MergedTarget>], after: &[Option<MergedTarget>]) -> BTreeMap<u32, i64> {
        let nets = net_savings(&FakeHost::booted(), &plan(after.len() as u32), before, after);
        nets.into_iter().map(|(process, net)| (process.pid.0, net.0)).collect()
    }

    #[test]
    fn frame_is_split_among_its_targets() {
        let nothing =
            || [Some(merged_target(0, &[], 0)), Some(merged_target(0, &[], 0)), Some(merged_target(0, &[], 100))];
        // Ten pages on one frame, one on the same, and one target with metadata only.
        let after =
            [Some(merged_target(10, &[1], 10)), Some(merged_target(1, &[1], 1)), Some(merged_target(0, &[], 200))];
        assert_eq!(
            net_by_pid(&nothing(), &after),
            BTreeMap::from([(0, 10 * 4096 - 2048 - 640), (1, 4096 - 2048 - 64), (2, -6400)])
        );
    }

    #[test]
    fn enrollment_is_detected_on_each_kernel() {
        let fake = FakeHost::booted();
        let process = |pid: u32, files: &[(&str, &str)]| {
            fake.set_cpu_ticks(pid, 0);
            files.iter().for_each(|(name, text)| fake.put_file(&format!("proc/{pid}/{name}"), text));
        };
        let newest = "ksm_rmap_items 0\nksm_merging_pages 0\nksm_merge_any: no\nksm_mergeable: ";
        process(2, &[("ksm_stat", &format!("{newest}no\n"))]);
        process(3, &[("ksm_stat", &format!("{newest}yes\n"))]);
        // Unenrolled since ksmd's last visit.
        process(10, &[("ksm_stat", "ksm_rmap_items 9\nksm_merging_pages 9\nksm_merge_any: no\nksm_mergeable: no\n")]);
        process(4, &[("ksm_stat", "ksm_rmap_items 0\nksm_merging_pages 0\n")]);
        process(5, &[("ksm_stat", "ksm_rmap_items 7\nksm_merging_pages 0\n")]);
        // 6.1 has one count in each file; earlier kernels have only one file.
        process(6, &[("ksm_stat", "ksm_rmap_items 7\n"), ("ksm_merging_pages", "0\n")]);
        process(7, &[("ksm_merging_pages", "2\n")]);
        process(8, &[("ksm_merging_pages", "0\n")]);
        // A kernel thread.
        process(9, &[("ksm_stat", ""), ("ksm_merging_pages", "")]);
        let find = || {
            let EnrolledProcesses { processes, may_be_incomplete: hidden } = find_enrolled(&fake).unwrap();
            (processes.len(), hidden)
        };
        assert_eq!(find(), (4, true));
        // Now the kernel shows the state of all remaining processes.
        [4, 6, 7, 8].iter().for_each(|pid| fake.put_file(&format!("proc/{pid}/ksm_stat"), &format!("{newest}no\n")));
        assert_eq!(find(), (2, false));
        let found = |denied: &str| {
            let host =
                FaultyHost::new(&fake, |path| path.contains(denied).then_some(InjectedFault::Absent(Absent::Denied)));
            let EnrolledProcesses { processes, may_be_incomplete: hidden } = find_enrolled(&host).unwrap();
            (processes.iter().map(|id| id.pid.0).collect::<Vec<_>>(), hidden)
        };
        assert_eq!(found("nothing"), (vec![3, 5], false));
        assert_eq!(found("proc/3/"), (vec![5], true));
    }

    #[test]
    fn ended_process_takes_no_savings() {
        let before = [Some(merged_target(2, &[1, 2], 2)), Some(merged_target(2, &[1, 2], 2))];
        let after = [Some(merged_target(2, &[1, 2], 2)), None];
        assert_eq!(net_by_pid(&before, &after), BTreeMap::from([(0, 0)]));
    }

    #[test]
    fn target_shares_sum_to_total_savings() {
        let targets = [
            merged_target(9, &[1, 2, 3], 0),
            merged_target(3, &[2, 3, 4], 0),
            merged_target(0, &[], 0),
            merged_target(5, &[3, 9], 0),
        ];
        let sum: f64 = pages_saved_per_target(&targets.iter().map(Some).collect::<Vec<_>>()).iter().sum();
        assert!((sum - sum_targets(targets.iter()).saved().0 as f64).abs() < 1e-9, "{sum}");
    }
}
