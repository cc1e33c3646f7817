//! Withdrawing processes from KSM, with the memory for it made sure of.
//!
//! [`plan`] counts what each process has merged and what it takes to give it pages of its own, exactly where frames may
//! be looked at; [`carry_out`] withdraws part by part, and asks [`pagefold_base::guard`] before each part, since other
//! processes take memory meanwhile. Who needs least comes first: so most processes are through when memory runs out, and
//! each of the others but one is as it was. Within a process parts go by address, which cuts at most one region in two
//! at a time. A part is at most [`PART`] pages; a guest that is reached by its control socket is one part, whose backends are
//! withdrawn one by one, and the guard is asked before each for what is left of the guest.
//!
//! Unless it is staged, a process goes on only while all of the rest of it fits. So a neighbor that begins to grow finds
//! what is left, instead of a limit that is filled to the last page.
//!
//! # Ways
//! A process that is enrolled whole (`ksm_merge_any`) is withdrawn whole, regions marked by madvise region by region,
//! and a guest whose control socket is known by its memory backends, all at once. Who knows what it has enrolled of a
//! process withdraws that alone. Each unmerges what is merged (mm/ksm.c, `ksm_disable_merge_any`, `ksm_madvise`).
//!
//! Before 6.14 nothing tells from outside who is enrolled whole. So a process that is withdrawn region by region is
//! withdrawn whole there, too, which changes nothing of one that was not.
//!
//! # Limits
//! Before 6.14 a process that is enrolled whole and has nothing marked now is taken for one that is not enrolled.
//! A page table of a marked region is read whole, also where little is resident. Frames are kept in memory meanwhile, 8
//! bytes for each merged page. Which zero pages KSM placed cannot be seen from outside: each zero page of a part could
//! be one, and no more than `ksm_zero_pages` of a process are. Where frames may not be looked at, which takes root, a
//! process is one part.

mod remains;

pub use remains::Remains;

use pagefold_base::guard;
use pagefold_base::guard::{Judgement, Need, Verdict};
use pagefold_base::process::Process;
use pagefold_base::region::{Region, VmFlags};
use pagefold_base::{Absent, AddressRange, Bytes, Pages, Pfn, Reading};
use pagefold_census::results::Unseen;
use pagefold_census::{Selection, survey};
use pagefold_host::act::{Action, Advice};
use pagefold_host::hold as held;
use pagefold_host::transaction::session::{Error as SessionError, Session, Stays};
use pagefold_host::{Host, Process as Handle, observe, parse, room};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Page table entries read at once.
const BATCH: u64 = 64 * 1024;

/// Merged pages of one part: 32 MiB of 4 KiB pages, some tens of milliseconds of copying.
pub const PART: usize = 8192;

/// How often memory is looked at while it is waited for.
const TICK: Duration = Duration::from_millis(200);

/// How long the memory backends of a guest may take in all, and how much longer for each GiB that is merged of it, which
/// takes about 0.2 s.
const GUEST: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(2));

/// Huge pages put together between two looks at memory.
const COLLAPSED_AT_ONCE: usize = 64;

/// How a process is withdrawn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Way {
    /// It is enrolled whole: `PR_SET_MEMORY_MERGE`.
    Whole,
    /// Its regions are marked: `MADV_UNMERGEABLE`. Also one that may be enrolled whole, where the kernel does not tell.
    Regions,
    /// Only these ranges are withdrawn, as far as they are marked: ascending.
    Ranges(Vec<AddressRange>),
    /// It is a guest whose control socket is known.
    Guest {
        /// The socket.
        socket: PathBuf,
        /// The backends that are marked, with their sizes.
        backends: Vec<(String, Bytes)>,
    },
    /// It is a guest whose control socket is known and of no use, for this reason.
    Unreachable(String),
}

/// Ranges of a process that are withdrawn together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// Where: ascending.
    pub ranges: Vec<AddressRange>,
    /// Pages on KSM frames.
    pub merged: Pages,
    /// Pages of zeros that KSM may have placed.
    pub zeros: Pages,
    /// Frames that come free if what stands before it was withdrawn.
    pub returned: Pages,
}

/// A process that is enrolled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Who it is.
    pub process: Process,
    /// How it is withdrawn.
    pub way: Way,
    /// In the order in which they are withdrawn.
    pub parts: Vec<Part>,
    /// Pages of zeros that KSM placed in them, at most.
    pub zeros: Pages,
    /// Anonymous memory in huge pages.
    pub anon_huge: Bytes,
    /// Whether frames could be looked at; otherwise the pages are an upper bound, and none comes free.
    pub exact: Reading<()>,
}

impl Way {
    /// Whether a region is reached in this way. Of a guest those are as large as a backend; what QEMU marks beside, its
    /// firmware and video memory, is smaller.
    fn reaches(&self, region: &Region) -> bool {
        match self {
            Self::Guest { backends, .. } => backends.iter().any(|&(_, size)| region.range.bytes() >= size),
            _ => !self.within(region).is_empty(),
        }
    }

    /// What of a region is withdrawn in this way.
    fn within(&self, region: &Region) -> Vec<AddressRange> {
        match self {
            Self::Ranges(ranges) => {
                let first = ranges.partition_point(|range| range.end <= region.range.start);
                ranges[first..].iter().map_while(|range| region.range.overlap(*range)).collect()
            }
            _ => vec![region.range],
        }
    }
}

impl Target {
    /// Pages on KSM frames.
    pub fn merged(&self) -> Pages {
        self.parts.iter().map(|part| part.merged).sum()
    }

    /// Pages that get a frame of their own.
    pub fn copies(&self) -> Pages {
        self.merged() + self.zeros
    }

    /// Frames that come free.
    pub fn returned(&self) -> Pages {
        self.parts.iter().map(|part| part.returned).sum()
    }

    /// The frames it takes to withdraw it after those before it.
    pub fn need(&self) -> Need {
        Need::of(self.cgroup(), self.copies(), self.returned())
    }

    fn part_need(&self, part: &Part) -> Need {
        Need::of(self.cgroup(), part.merged + part.zeros.min(self.zeros), part.returned)
    }

    /// All that is marked, ascending.
    fn ranges(&self) -> Vec<AddressRange> {
        joined(self.parts.iter().flat_map(|part| part.ranges.clone()).collect())
    }

    fn cgroup(&self) -> Option<&str> {
        self.process.cgroup.as_deref().ok()
    }
}

/// Who is to be withdrawn.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// Those that are enrolled, who needs least first.
    pub targets: Vec<Target>,
    /// How many of the chosen processes are not enrolled.
    pub idle: usize,
    /// Those that were asked for and not seen.
    pub unseen: Vec<Unseen>,
}

impl Target {
    /// The frames that its first parts take.
    fn need_of(&self, parts: usize) -> Pages {
        if parts == self.parts.len() {
            return self.need().host;
        }
        self.parts.iter().take(parts).map(|part| self.part_need(part).host).sum()
    }
}

impl Plan {
    /// What all of it takes.
    pub fn need(&self) -> Need {
        let mut sum = Need::default();
        self.targets.iter().for_each(|target| sum += &target.need());
        sum
    }

    /// The cgroups of the processes.
    fn cgroups(&self) -> BTreeSet<String> {
        self.targets.iter().filter_map(|target| target.cgroup().map(str::to_owned)).collect()
    }

    /// What there is, and whether a need fits.
    pub fn judge(&self, host: &dyn Host, need: &Need) -> Judgement {
        guard::judge(need, &self.room(host), host.page_size())
    }

    /// How many parts, of how many, fit now one after the other.
    pub fn affordable(&self, host: &dyn Host) -> (usize, usize) {
        let needs: Vec<Need> = self
            .targets
            .iter()
            .flat_map(|target| target.parts.iter().map(move |part| target.part_need(part)))
            .collect();
        (guard::affordable(&needs, &self.room(host), host.page_size()), needs.len())
    }

    fn room(&self, host: &dyn Host) -> guard::Room {
        let mut room = room::room(host, &self.cgroups());
        for Target { process, .. } in &self.targets {
            if let Err(why) = &process.cgroup
                && *why != Absent::NotOnThisKernel
            {
                let place = guard::Place::Cgroup(format!("of process {}", process.id.pid));
                room.unknown.push((place, why.clone()));
            }
        }
        room
    }
}

/// Find out what is enrolled in the chosen processes, and what withdrawing it takes. `way` tells of a guest how it is
/// reached; of those of which it tells nothing the enrolment does.
pub fn plan(
    host: &dyn Host,
    selection: &Selection,
    way: &(dyn Fn(&dyn Handle, &Process) -> Option<Way> + Sync),
) -> Result<Plan, pagefold_census::Error> {
    let (found, unseen) = survey::choose(host, selection, |handle, process| {
        let regions: Vec<Region> = observe::regions(handle)?;
        let whole = process.ksm.merge_any == Ok(true);
        let merged: u64 = regions.iter().filter_map(|region| region.ksm.as_ref().ok()).map(|ksm| ksm.0).sum();
        if !whole && merged == 0 && !regions.iter().any(is_marked) {
            return Ok(None);
        }
        let way = way(handle, &process).unwrap_or(if whole { Way::Whole } else { Way::Regions });
        examine(host, handle, process, &regions, way).map(Some)
    })?;
    let idle = found.iter().filter(|found| found.is_none()).count();
    let mut found: Vec<(Target, Vec<Vec<Shared>>)> = found.into_iter().flatten().collect();
    found.sort_by_key(|(target, _)| (target.copies(), target.process.id));
    let mut left: HashMap<Pfn, u64> = HashMap::new();
    for (target, frames) in &mut found {
        for (part, frames) in target.parts.iter_mut().zip(frames) {
            part.returned = withdraw(&mut left, frames);
        }
    }
    Ok(Plan { targets: found.into_iter().map(|(target, _)| target).collect(), idle, unseen })
}

/// A merged page: its frame, with all mappings of it.
type Shared = (Pfn, u64);

/// Take mappings away from frames, and tell how many frames have none left.
fn withdraw(left: &mut HashMap<Pfn, u64>, pages: &[Shared]) -> Pages {
    let mut returned = 0;
    for &(frame, mappings) in pages {
        let left = left.entry(frame).or_insert(mappings);
        *left = left.saturating_sub(1);
        returned += u64::from(*left == 0);
    }
    Pages(returned)
}

fn is_marked(region: &Region) -> bool {
    region.flags.has(VmFlags::MERGEABLE)
}

/// A process with its parts, and for each part its merged pages.
fn examine(
    host: &dyn Host,
    handle: &dyn Handle,
    process: Process,
    regions: &[Region],
    way: Way,
) -> Reading<(Target, Vec<Vec<Shared>>)> {
    // Before 6.6 there is no such counter, and zero pages are not brought back.
    let zeros = match &process.ksm.zero_pages {
        Ok(pages) => Pages(u64::try_from(*pages).unwrap_or(0)),
        Err(_) => Pages::ZERO,
    };
    let marked: Vec<&Region> = regions.iter().filter(|region| is_marked(region) && way.reaches(region)).collect();
    let anon_huge = regions.iter().map(|region| region.anon_huge).sum();
    let at_most = if matches!(way, Way::Guest { .. }) { usize::MAX } else { PART };
    let mut parts = Parts { at_most, parts: Vec::new(), frames: Vec::new() };
    let exact = marked.iter().try_for_each(|region| {
        way.within(region).into_iter().try_for_each(|range| {
            let found = if may_hold(region, zeros) { count(host, handle, range)? } else { Found::default() };
            parts.add(range, &found);
            Ok(())
        })
    });
    if exact == Err(Absent::Vanished) {
        return Err(Absent::Vanished);
    }
    if exact.is_err() {
        parts = Parts { at_most, parts: vec![bound(host, &process, &way, &marked, zeros)?], frames: vec![Vec::new()] };
    }
    let zeros = zeros.min(parts.parts.iter().map(|part| part.zeros).sum());
    Ok((Target { process, way, parts: parts.parts, zeros, anon_huge, exact }, parts.frames))
}

/// All of a process as one part, by the kernel's sums.
fn bound(host: &dyn Host, process: &Process, way: &Way, marked: &[&Region], zeros: Pages) -> Reading<Part> {
    let by_smaps: Reading<Bytes> = marked.iter().map(|region| region.ksm.clone()).sum();
    let merged = match by_smaps {
        Ok(bytes) => host.page_size().pages_in(bytes),
        Err(_) => Pages(process.ksm.merging_pages.clone()?),
    };
    let ranges = marked.iter().flat_map(|region| way.within(region)).collect();
    Ok(Part { ranges, merged, zeros, returned: Pages::ZERO })
}

fn may_hold(region: &Region, zeros: Pages) -> bool {
    zeros > Pages::ZERO || region.ksm.as_ref().is_ok_and(|ksm| *ksm > Bytes::ZERO) || region.ksm.is_err()
}

/// Regions put together to parts.
struct Parts {
    at_most: usize,
    parts: Vec<Part>,
    frames: Vec<Vec<Shared>>,
}

impl Parts {
    fn add(&mut self, range: AddressRange, found: &Found) {
        let addresses: Vec<u64> = found.pages.iter().map(|page| page.0).collect();
        let mut pages = found.pages.iter();
        for (range, count) in guard::split(range, &addresses, self.at_most) {
            let full =
                self.parts.last().is_none_or(|part| part.merged.0 + part.zeros.0 + count as u64 > self.at_most as u64);
            if full {
                self.parts.push(Part::default());
                self.frames.push(Vec::new());
            }
            let (Some(part), Some(frames)) = (self.parts.last_mut(), self.frames.last_mut()) else { return };
            part.ranges.push(range);
            for &(_, shared) in pages.by_ref().take(count) {
                match shared {
                    Some(shared) => {
                        part.merged += Pages(1);
                        frames.push(shared);
                    }
                    None => part.zeros += Pages(1),
                }
            }
        }
    }
}

/// What was found in a range: pages by address, each on a KSM frame or on the kernel's page of zeros.
#[derive(Default)]
struct Found {
    pages: Vec<(u64, Option<Shared>)>,
}

/// Look at the frames of a range.
fn count(host: &dyn Host, handle: &dyn Handle, range: AddressRange) -> Reading<Found> {
    let page = host.page_size();
    let mut found = Found::default();
    let mut start = range.start;
    while start < range.end {
        let end = range.end.min(start.saturating_add(page.of(Pages(BATCH)).0));
        let mut present = Vec::new();
        for (i, mapping) in handle.mappings(AddressRange { start, end })?.into_iter().enumerate() {
            if mapping.present {
                // The kernel hides frame numbers from those without CAP_SYS_ADMIN.
                present.push((start + page.of(Pages(i as u64)).0, mapping.frame.ok_or(Absent::Denied)?));
            }
        }
        let mut frames: Vec<Pfn> = present.iter().map(|&(_, frame)| frame).collect();
        frames.sort_unstable();
        frames.dedup();
        if !frames.is_empty() {
            let flags = host.frame_flags(&frames)?;
            let of: BTreeMap<Pfn, u64> = {
                let merged: Vec<Pfn> =
                    frames.iter().zip(&flags).filter(|(_, flags)| flags.is_ksm()).map(|(frame, _)| *frame).collect();
                let mappings = if merged.is_empty() { Vec::new() } else { host.frame_mappings(&merged)? };
                merged.into_iter().zip(mappings).collect()
            };
            for (address, frame) in present {
                let zero = || {
                    let flags = frames.binary_search(&frame).ok().and_then(|i| flags.get(i));
                    flags.is_some_and(|flags| flags.is_zero_page() && !flags.is_thp())
                };
                match of.get(&frame) {
                    Some(&mappings) => found.pages.push((address, Some((frame, mappings)))),
                    None if zero() => found.pages.push((address, None)),
                    None => {}
                }
            }
        }
        start = end;
    }
    Ok(found)
}

/// What may be done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// Each part as soon as it fits, whether the rest does or not.
    pub staged: bool,
    /// Whatever the guard says.
    pub force: bool,
    /// How long memory may be waited for.
    pub wait: Duration,
    /// Whether huge pages are put together afterwards.
    pub collapse: bool,
    /// Percent of ten seconds in which some task waited for memory, from which on it is short and no further part of
    /// whom it is short for is withdrawn, whatever the guard says.
    pub pressure: Option<f64>,
}

/// What became of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Withdrawn {
    /// Parts that were withdrawn.
    pub parts: usize,
    /// Whether all of it was, as far as it was taken.
    pub withdrawn: bool,
    /// For how long a thread of it was stopped, and how often.
    pub stops: Vec<Duration>,
    /// Ranges that were not taken, and why.
    pub missed: Vec<(AddressRange, String)>,
    /// What went wrong.
    pub error: Option<String>,
    /// Whether it ended meanwhile.
    pub ended: bool,
    /// What is still merged.
    pub remains: Option<Reading<Remains>>,
    /// Memory of it in huge pages after unmerging and after putting them together.
    pub huge: Option<(Bytes, Bytes)>,
}

impl Withdrawn {
    /// Whether nothing of it is enrolled or merged any more, also because it has ended.
    pub fn is_whole(&self) -> bool {
        let clean = self.error.is_none() && self.missed.is_empty();
        let none = |remains: &Remains| remains.merged == Pages::ZERO && remains.zeros == Pages::ZERO;
        self.ended || (self.withdrawn && clean && self.remains.as_ref().is_some_and(|r| r.as_ref().is_ok_and(none)))
    }
}

/// What was done.
#[derive(Clone, Debug)]
pub struct Done {
    /// In the order of the plan's targets.
    pub targets: Vec<Withdrawn>,
    /// Why it stopped before its end: the guard's word on the step that did not fit.
    pub stopped: Option<Judgement>,
    /// Whether it was asked to stop.
    pub interrupted: bool,
    /// The kernel's figures before and after.
    pub before: Figures,
    /// See `before`.
    pub after: Figures,
}

impl Done {
    /// The frames that were planned for what was withdrawn.
    pub fn planned(&self, plan: &Plan) -> Pages {
        plan.targets.iter().zip(&self.targets).map(|(target, done)| target.need_of(done.parts)).sum()
    }
}

/// The host's figures that tell what was taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Figures {
    /// `MemAvailable`.
    pub available: Reading<Bytes>,
    /// `AnonPages`.
    pub anon: Reading<Bytes>,
    /// `cow_ksm`: copies made of KSM pages since boot.
    pub cow_ksm: Reading<u64>,
    /// `oom_kill`: processes that the OOM killer ended since boot, on the host or in a cgroup.
    pub oom_kills: Reading<u64>,
}

impl Figures {
    /// As they are now.
    pub fn observe(host: &dyn Host) -> Self {
        let memory = observe::memory(host);
        let vmstat = observe::vmstat(host);
        let counter = |name: &str| vmstat.clone().and_then(|all| all.get(name).copied().ok_or(Absent::NotOnThisKernel));
        Self {
            available: memory.clone().and_then(|memory| memory.available),
            anon: memory.and_then(|memory| memory.anon),
            cow_ksm: counter("cow_ksm"),
            oom_kills: counter("oom_kill"),
        }
    }
}

/// Withdraw. What does not fit is not done unless forced; errors of single processes are in what is returned.
///
/// # Errors
/// If the journal fails.
pub fn carry_out(
    session: &mut Session<'_>,
    plan: &Plan,
    limits: Limits,
    stop: &AtomicBool,
) -> Result<Done, SessionError> {
    let host = session.host();
    let mut work = Work { session, plan, limits, stop, deadline: Instant::now() + limits.wait, stopped: None };
    let before = Figures::observe(host);
    let mut targets = vec![Withdrawn::default(); plan.targets.len()];
    for (target, done) in plan.targets.iter().zip(&mut targets) {
        if work.is_over() {
            break;
        }
        work.withdraw(target, done)?;
    }
    for (target, done) in plan.targets.iter().zip(&mut targets) {
        if !done.ended {
            let remains = remains::remains(host, target);
            done.ended = remains == Err(Absent::Vanished) || remains::has_ended(host, target.process.id);
            done.remains = (!done.ended).then_some(remains);
        }
    }
    let after = Figures::observe(host);
    if limits.collapse && work.stopped.is_none() {
        for (target, done) in plan.targets.iter().zip(&mut targets) {
            if done.is_whole() && !done.ended && !stop.load(Ordering::Relaxed) {
                work.collapse(target, done)?;
            }
        }
    }
    let (stopped, interrupted) = (work.stopped, stop.load(Ordering::Relaxed));
    Ok(Done { targets, stopped, interrupted, before, after })
}

struct Work<'w, 'h> {
    session: &'w mut Session<'h>,
    plan: &'w Plan,
    limits: Limits,
    stop: &'w AtomicBool,
    deadline: Instant,
    stopped: Option<Judgement>,
}

impl Work<'_, '_> {
    fn is_over(&self) -> bool {
        self.stopped.is_some() || self.stop.load(Ordering::Relaxed)
    }

    fn withdraw(&mut self, target: &Target, done: &mut Withdrawn) -> Result<(), SessionError> {
        let process = target.process.id;
        if let Way::Unreachable(why) = &target.way {
            done.error = Some(why.clone());
            return Ok(());
        }
        match &target.way {
            Way::Guest { socket, backends } if !self.withdraw_guest(target, socket, backends, done)? => return Ok(()),
            Way::Guest { .. } => {}
            _ if !self.withdraw_parts(target, done)? => return Ok(()),
            Way::Whole => self.apply(&Action::MergeAny { process, on: false }, done)?,
            Way::Regions | Way::Ranges(_) | Way::Unreachable(_) => {}
        }
        if target.way == Way::Regions && target.process.ksm.merge_any.is_err() {
            self.apply(&Action::MergeAny { process, on: false }, done)?;
        }
        if done.error.is_none() && !done.ended {
            done.parts = target.parts.len();
            done.withdrawn = true;
        }
        Ok(())
    }

    /// Withdraw the backends of a guest one after the other, each once the guard allows what is left of the guest. Tells
    /// whether all of them were tried.
    fn withdraw_guest(
        &mut self,
        target: &Target,
        socket: &Path,
        backends: &[(String, Bytes)],
        done: &mut Withdrawn,
    ) -> Result<bool, SessionError> {
        let host = self.session.host();
        let gib = u32::try_from(host.page_size().of(target.merged()).0 >> 30).unwrap_or(u32::MAX);
        let (limit, mut spent) = (GUEST.0 + GUEST.1 * gib, Duration::ZERO);
        for (backend, _) in backends {
            if spent >= limit {
                done.error = Some(format!("{} answers too slowly; `--inject` goes from within", socket.display()));
            }
            if done.ended || done.error.is_some() || self.is_over() || self.is_pressed(target, done) {
                return Ok(false);
            }
            // Where frames can be read, the guard counts them; otherwise the kernel's sums tell what is left.
            let left = match &target.exact {
                Ok(()) => Err(Absent::NotOnThisKernel),
                Err(_) => remains::left_of_guest(host, target),
            };
            let parts = left.map_or_else(|_| target.parts.clone(), |part| vec![part]);
            if !self.allowed(target, &parts, &[])? {
                return Ok(false);
            }
            let (socket, backend) = (socket.to_owned(), backend.clone());
            let action = Action::GuestMerge { process: target.process.id, socket, backend, on: false };
            let started = Instant::now();
            self.apply(&action, done)?;
            spent += started.elapsed();
        }
        Ok(true)
    }

    /// Withdraw the parts of a process one after the other, each once the guard allows it. Tells whether all of them
    /// were tried.
    fn withdraw_parts(&mut self, target: &Target, done: &mut Withdrawn) -> Result<bool, SessionError> {
        for (position, part) in target.parts.iter().enumerate() {
            let rest = if self.limits.staged { &[] } else { &target.parts[position + 1..] };
            if done.ended
                || done.error.is_some()
                || self.is_over()
                || self.is_pressed(target, done)
                || !self.allowed(target, std::slice::from_ref(part), rest)?
            {
                return Ok(false);
            }
            let (process, ranges) = (target.process.id, part.ranges.clone());
            self.apply(&Action::Advise { process, advice: Advice::Unmergeable, ranges }, done)?;
            done.parts += usize::from(done.error.is_none() && !done.ended);
        }
        Ok(true)
    }

    fn apply(&mut self, action: &Action, done: &mut Withdrawn) -> Result<(), SessionError> {
        if done.ended || done.error.is_some() {
            return Ok(());
        }
        match self.session.apply_until_stopped(action, Stays::ForGood, self.stop) {
            Ok(effect) => {
                done.stops.extend(effect.stops);
                done.missed.extend(effect.missed);
            }
            Err(SessionError::Refused(pagefold_host::act::Refusal::Vanished)) => done.ended = true,
            Err(SessionError::Refused(why)) => done.error = Some(why.to_string()),
            Err(other) => return Err(other),
        }
        Ok(())
    }

    /// Whether memory is short for a process, and that is heeded. Notes it.
    fn is_pressed(&self, target: &Target, done: &mut Withdrawn) -> bool {
        let short = |percent| room::is_short(self.session.host(), target.cgroup(), percent);
        let pressed = self.limits.pressure.is_some_and(short);
        if pressed {
            done.error = Some("memory is short".to_owned());
        }
        pressed
    }

    /// Whether parts of a process, as they are now, fit together with the rest as it was planned; waits as long as may be
    /// waited. Remembers why not.
    fn allowed(&mut self, target: &Target, parts: &[Part], rest: &[Part]) -> Result<bool, SessionError> {
        if self.limits.force {
            return Ok(true);
        }
        loop {
            let need = self.need_now(target, parts, rest);
            let judgement = self.plan.judge(self.session.host(), &need);
            if judgement.verdict == Verdict::Fits {
                return Ok(true);
            }
            if self.stop.load(Ordering::Relaxed) {
                return Ok(false);
            }
            if Instant::now() >= self.deadline {
                self.stopped = Some(judgement);
                return Ok(false);
            }
            std::thread::sleep(TICK);
        }
    }

    /// What parts of a process take now, since after the plan pages were merged, written and unmapped, with the rest of
    /// it as it was planned. What cannot be counted takes what was planned.
    fn need_now(&self, target: &Target, parts: &[Part], rest: &[Part]) -> Need {
        let host = self.session.host();
        let look = || -> Reading<Need> {
            target.exact.clone()?;
            let handle = held(host, target.process.id)?;
            let ksm = parse::process_ksm(handle.read("ksm_stat"), Err(Absent::NotOnThisKernel));
            let cap = ksm.zero_pages.map_or(0, |pages| u64::try_from(pages).unwrap_or(0));
            let mut merged = rest.iter().map(|part| part.merged).sum::<Pages>().0;
            let mut zeros = rest.iter().map(|part| part.zeros).sum::<Pages>().0;
            let mut returned: Pages = rest.iter().map(|part| part.returned).sum();
            let mut left = HashMap::new();
            for part in parts {
                for range in &part.ranges {
                    let found = count(host, &*handle, *range)?;
                    let shared: Vec<Shared> = found.pages.iter().filter_map(|page| page.1).collect();
                    returned += withdraw(&mut left, &shared);
                    merged += shared.len() as u64;
                    zeros += (found.pages.len() - shared.len()) as u64;
                }
            }
            Ok(Need::of(target.cgroup(), Pages(merged + zeros.min(cap)), returned))
        };
        match look() {
            Ok(need) => need,
            Err(Absent::Vanished) => Need::default(),
            Err(_) => {
                let mut sum = Need::default();
                parts.iter().chain(rest).for_each(|part| sum += &target.part_need(part));
                sum
            }
        }
    }

    /// Put huge pages together where all of one is resident and the host allows it. That takes one free huge page at a
    /// time, whose frames are given back by those it replaces; what is not resident would take memory for good.
    fn collapse(&mut self, target: &Target, done: &mut Withdrawn) -> Result<(), SessionError> {
        let host = self.session.host();
        let Ok((before, ranges)) = collapsible(host, target) else { return Ok(()) };
        let huge = observe::huge_page_bytes(host).unwrap_or(0);
        // Two, since the pages that are replaced are freed in batches.
        let pages = host.page_size().pages_in(Bytes(2 * huge));
        let need = Need::of(target.cgroup(), pages, Pages::ZERO);
        for ranges in ranges.chunks(COLLAPSED_AT_ONCE) {
            if self.stop.load(Ordering::Relaxed) || self.plan.judge(host, &need).verdict != Verdict::Fits {
                break;
            }
            let action = Action::Collapse { process: target.process.id, ranges: ranges.to_vec() };
            match self.session.apply(&action, Stays::ForGood) {
                // What was not put together is seen by what came back.
                Ok(effect) => done.stops.extend(effect.stops),
                Err(SessionError::Refused(why)) => {
                    done.error = Some(format!("huge pages could not be put together: {why}"));
                    break;
                }
                Err(other) => return Err(other),
            }
        }
        let handle = held(host, target.process.id);
        let after = handle.and_then(|handle| observe::rollup(&*handle)).and_then(|rollup| rollup.anon_huge);
        done.huge = after.ok().map(|after| (before, after));
        Ok(())
    }
}

/// Ranges in the order of their addresses, those that meet as one.
pub fn joined(mut ranges: Vec<AddressRange>) -> Vec<AddressRange> {
    ranges.sort_unstable();
    let mut all: Vec<AddressRange> = Vec::new();
    for range in ranges {
        match all.last_mut() {
            Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
            _ => all.push(range),
        }
    }
    all
}

/// Memory of a process in huge pages now, and the ranges that could be but are not: aligned, wholly resident, in what
/// was withdrawn, where huge pages are allowed.
fn collapsible(host: &dyn Host, target: &Target) -> Reading<(Bytes, Vec<AddressRange>)> {
    let huge = observe::huge_page_bytes(host)?;
    let mode = observe::huge_page_mode(host)?;
    let handle = held(host, target.process.id)?;
    let withdrawn = target.ranges();
    let regions = observe::regions(&*handle)?;
    let before = regions.iter().map(|region| region.anon_huge).sum();
    let allowed = |region: &&Region| mode == "always" || (mode == "madvise" && region.flags.has(VmFlags::HUGE_PAGE));
    let mut ranges = Vec::new();
    for region in regions.iter().filter(allowed) {
        for part in withdrawn.iter().filter_map(|range| range.overlap(region.range)) {
            for run in handle.resident(&[part])?.into_iter().filter(|run| !run.huge) {
                let end = run.address + host.page_size().of(Pages(run.pages.into())).0;
                let (mut start, end) = (run.address.next_multiple_of(huge), end - end % huge);
                while start < end {
                    ranges.push(AddressRange { start, end: start + huge });
                    start += huge;
                }
            }
        }
    }
    Ok((before, ranges))
}

#[cfg(test)]
mod tests;
