//! What KSM really holds of a plan, from page tables and frame flags.
//!
//! KSM's counters are those of ksmd's last look: a page that was written since still counts as shared. Page tables tell
//! the truth, and with ksmd stopped they tell one moment. Without the privilege to see frames, `smaps` tells merged
//! pages (6.6) and the number of frames stays unknown.

use pagefold_host::{FrameFlags, Host, Process, observe, parse};
use pagefold_model::outcome::Found;
use pagefold_model::plan::{Plan, Target};
use pagefold_model::{Absent, AddressRange, Bytes, Pages, Pfn, Reading};

/// Pages looked at at once.
const BATCH: u64 = 1 << 16;

/// What KSM holds of one range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Pages mapped to a KSM frame that others map too.
    pub merged: u64,
    /// Pages mapped to the kernel's page of zeros.
    pub zero: u64,
    /// Other resident pages.
    pub apart: u64,
}

/// Look at one range of a process. The KSM frames it is mapped to are added to `frames`.
pub fn held(host: &dyn Host, handle: &dyn Process, range: AddressRange, frames: &mut Vec<Pfn>) -> Reading<Held> {
    let page_size = host.page_size().bytes();
    let mut held = Held::default();
    let mut start = range.start;
    while start < range.end {
        let end = range.end.min(start + BATCH * page_size);
        let mappings = handle.mappings(AddressRange { start, end })?;
        let present = || mappings.iter().filter(|mapping| mapping.present && !mapping.file);
        // A frame that nobody else maps saves nothing, KSM's or not.
        let shared = || present().filter(|mapping| !mapping.exclusive);
        held.apart += present().filter(|mapping| mapping.exclusive).count() as u64;
        let mut seen: Vec<Pfn> = shared().filter_map(|mapping| mapping.frame).collect();
        if seen.len() < shared().count() {
            return Err(Absent::Denied);
        }
        seen.sort_unstable();
        let flags = host.frame_flags(&seen)?;
        for (&frame, flags) in seen.iter().zip(&flags) {
            if flags.is_ksm() {
                held.merged += 1;
                frames.push(frame);
            } else if FrameFlags::is_zero_page(*flags) {
                held.zero += 1;
            } else {
                held.apart += 1;
            }
        }
        start = end;
    }
    Ok(held)
}

/// What KSM holds of all targets of a plan.
pub fn found(host: &dyn Host, plan: &Plan) -> Reading<Found> {
    let mut found = Found::default();
    let mut frames = Vec::new();
    for target in &plan.targets {
        // A process that ended holds nothing.
        match look(host, target, &mut frames, &mut found) {
            Ok(()) | Err(Absent::Vanished) => {}
            Err(why) => return Err(why),
        }
    }
    frames.sort_unstable();
    frames.dedup();
    found.frames = Pages(frames.len() as u64);
    Ok(found)
}

fn look(host: &dyn Host, target: &Target, frames: &mut Vec<Pfn>, found: &mut Found) -> Reading<()> {
    let handle = open(host, target)?;
    for range in &target.ranges {
        let held = held(host, &*handle, range.range, frames)?;
        found.merged.0 += held.merged;
        found.apart.0 += held.apart;
    }
    let ksm = parse::process_ksm(handle.read("ksm_stat"), handle.read("ksm_merging_pages"));
    found.zero.0 += ksm.zero_pages.unwrap_or(0).max(0) as u64;
    found.rmap_items.0 += ksm.rmap_items.unwrap_or(0);
    Ok(())
}

/// Take hold of a target again: the same process or none.
pub fn open<'a>(host: &'a dyn Host, target: &Target) -> Reading<Box<dyn Process + 'a>> {
    let handle = host.open(target.process.id.pid)?;
    if handle.id() == target.process.id { Ok(handle) } else { Err(Absent::Vanished) }
}

/// Whether KSM may hold anything of the targets of a plan: by its own counts, which are never too low for that.
pub fn may_hold(plan: &Plan) -> bool {
    plan.targets.iter().any(|target| {
        let ksm = &target.process.ksm;
        ksm.merging_pages != Ok(0) || ksm.zero_pages.as_ref().is_ok_and(|&pages| pages != 0)
    })
}

/// Bytes of huge pages in the targets of a plan.
pub fn huge(host: &dyn Host, plan: &Plan) -> Reading<Bytes> {
    let mut sum = Bytes::ZERO;
    for target in &plan.targets {
        match open(host, target).and_then(|handle| observe::rollup(&*handle)?.anon_huge) {
            Ok(bytes) => sum += bytes,
            Err(Absent::Vanished) => {}
            Err(why) => return Err(why),
        }
    }
    Ok(sum)
}

/// The CPU time that a target has used, in ticks.
pub fn ticks(host: &dyn Host, target: &Target) -> Reading<u64> {
    let stat = parse::stat(&open(host, target)?.read("stat")?)?;
    Ok(stat.utime.saturating_add(stat.stime))
}
