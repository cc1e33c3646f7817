//! What KSM really holds of a plan, from page tables and frame flags.
//!
//! KSM's counters are those of ksmd's last look: a page that was written since still counts as shared. Page tables tell
//! the truth, and with ksmd stopped they tell one moment. It takes the privilege to see frames.

use pagefold_host::{Host, Process, observe, parse};
use pagefold_model::outcome::Found;
use pagefold_model::plan::{Plan, Target};
use pagefold_model::{Absent, AddressRange, Bytes, Pages, Pfn, Pid, ProcessId, Reading};
use std::collections::{BTreeMap, BTreeSet};

/// Pages looked at at once.
const BATCH: u64 = 1 << 16;

/// Pages of a range that are mapped to a KSM frame that others map too (one that nobody else maps saves nothing), pages
/// that are mapped to the kernel's page of zeros, and all that are in memory. The KSM frames are added to `frames`.
fn count(host: &dyn Host, handle: &dyn Process, range: AddressRange, frames: &mut Vec<Pfn>) -> Reading<Found> {
    let page_size = host.page_size().bytes();
    let mut found = Found::default();
    let mut start = range.start;
    while start < range.end {
        let end = range.end.min(start + BATCH * page_size);
        let mappings = handle.mappings(AddressRange { start, end })?;
        let present = || mappings.iter().filter(|mapping| mapping.present && !mapping.file);
        let shared = || present().filter(|mapping| !mapping.exclusive);
        found.present.0 += present().count() as u64;
        let mut seen: Vec<Pfn> = shared().filter_map(|mapping| mapping.frame).collect();
        if seen.len() < shared().count() {
            return Err(Absent::Denied);
        }
        seen.sort_unstable();
        for (&frame, flags) in seen.iter().zip(host.frame_flags(&seen)?) {
            if flags.is_ksm() {
                found.merged.0 += 1;
                frames.push(frame);
            } else if flags.is_zero_page() {
                found.zero.0 += 1;
            }
        }
        start = end;
    }
    Ok(found)
}

/// Whether any page of a range of a target is merged.
pub fn has_merged(host: &dyn Host, target: &Target, range: AddressRange) -> Reading<bool> {
    Ok(count(host, &*open(host, target.process.id)?, range, &mut Vec::new())?.merged > Pages::ZERO)
}

/// What is merged of a target, and the KSM frames that it is mapped to.
#[derive(Debug, Default)]
pub struct Held {
    found: Found,
    frames: Vec<Pfn>,
}

/// What is merged of each target of a plan; nothing of those that have ended.
///
/// Pages of zeros are counted by page tables too: those that the kernel maps to its page of zeros when ksmd has a huge
/// page split are in no counter of KSM (mm/migrate.c, `try_to_map_unused_to_zeropage`).
pub fn found(host: &dyn Host, plan: &Plan) -> Reading<Vec<Option<Held>>> {
    let held = |target| match look(host, target) {
        Ok(held) => Ok(Some(held)),
        Err(Absent::Vanished) => Ok(None),
        Err(why) => Err(why),
    };
    plan.targets.iter().map(held).collect()
}

/// The sum over some targets, in which each frame counts once.
pub fn sum<'f>(held: impl Iterator<Item = &'f Held>) -> Found {
    let mut frames = Vec::new();
    let mut sum = Found::default();
    for Held { found, frames: own } in held {
        frames.extend_from_slice(own);
        sum.merged += found.merged;
        sum.zero += found.zero;
        sum.present += found.present;
        sum.rmap_items += found.rmap_items;
    }
    frames.sort_unstable();
    frames.dedup();
    sum.frames = Pages(frames.len() as u64);
    sum
}

fn look(host: &dyn Host, target: &Target) -> Reading<Held> {
    let handle = open(host, target.process.id)?;
    let mut held = Held::default();
    for range in &target.ranges {
        let found = count(host, &*handle, range.range, &mut held.frames)?;
        held.found.merged += found.merged;
        held.found.zero += found.zero;
        held.found.present += found.present;
    }
    held.frames.sort_unstable();
    held.frames.dedup();
    let ksm = parse::process_ksm(handle.read("ksm_stat"), handle.read("ksm_merging_pages"));
    held.found.rmap_items.0 += ksm.rmap_items.unwrap_or(0);
    Ok(held)
}

/// Processes that are enrolled, wholly or in part. Before 6.14 those of which ksmd keeps track of something.
pub fn enrolled(host: &dyn Host) -> Reading<Vec<ProcessId>> {
    let is = |handle: &dyn Process| {
        let ksm = parse::process_ksm(handle.read("ksm_stat"), handle.read("ksm_merging_pages"));
        let tracked = ksm.rmap_items.is_ok_and(|pages| pages > 0) || ksm.merging_pages.is_ok_and(|pages| pages > 0);
        ksm.mergeable.unwrap_or(false) || tracked
    };
    let handles = host.pids()?.into_iter().filter_map(|pid| host.open(pid).ok());
    Ok(handles.filter(|handle| is(&**handle)).map(|handle| handle.id()).collect())
}

/// How many processes outside of a plan are enrolled.
pub fn bystanders(host: &dyn Host, plan: &Plan) -> Reading<u64> {
    let targets: BTreeSet<ProcessId> = plan.targets.iter().map(|target| target.process.id).collect();
    Ok(enrolled(host)?.iter().filter(|id| !targets.contains(id)).count() as u64)
}

/// Take hold of a process again: the same or none.
pub fn open(host: &dyn Host, process: ProcessId) -> Reading<Box<dyn Process + '_>> {
    let handle = host.open(process.pid)?;
    if handle.id() == process { Ok(handle) } else { Err(Absent::Vanished) }
}

/// Bytes of huge pages in the targets of a plan.
pub fn huge(host: &dyn Host, plan: &Plan) -> Reading<Bytes> {
    let mut sum = Bytes::ZERO;
    for target in &plan.targets {
        match open(host, target.process.id).and_then(|handle| observe::rollup(&*handle)?.anon_huge) {
            Ok(bytes) => sum += bytes,
            Err(Absent::Vanished) => {}
            Err(why) => return Err(why),
        }
    }
    Ok(sum)
}

/// Anonymous memory of the targets that live, and of this process.
pub fn resident(host: &dyn Host, plan: &Plan) -> Reading<(Bytes, Bytes)> {
    let of = |handle: &dyn Process| parse::status(&handle.read("status")?).anonymous;
    let mut sum = Bytes::ZERO;
    for target in &plan.targets {
        match open(host, target.process.id).and_then(|handle| of(&*handle)) {
            Ok(bytes) => sum += bytes,
            // Ended, or a zombie.
            Err(Absent::Vanished | Absent::NotOnThisKernel) => {}
            Err(why) => return Err(why),
        }
    }
    Ok((sum, of(&*host.open(Pid(std::process::id()))?)?))
}

/// How many regions each target has that lives on.
pub fn regions(host: &dyn Host, plan: &Plan) -> BTreeMap<ProcessId, u64> {
    let count = |id| Some((id, observe::region_count(&*open(host, id).ok()?).ok()?));
    plan.targets.iter().filter_map(|target| count(target.process.id)).collect()
}

/// What a process has done so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// The CPU time that it has used, in ticks.
    pub ticks: u64,
    /// Its page faults.
    pub faults: u64,
}

/// What a process has done so far.
pub fn done(host: &dyn Host, process: ProcessId) -> Reading<Done> {
    let stat = parse::stat(&open(host, process)?.read("stat")?)?;
    Ok(Done { ticks: stat.utime.saturating_add(stat.stime), faults: stat.faults })
}
