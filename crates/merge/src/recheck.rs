//! Watching whether merged pages stay merged.
//!
//! A page that holds the same bytes at every look may be written all the time: a program that fills its work arrays
//! with zeros in each step writes zero over zero. Contents cannot tell, and the kernel tells nothing of writes as such.
//! But each write to a merged page breaks the sharing, and page tables tell that. So the merge is its own trial: while
//! ksmd works, some pages of each piece of the plan are looked at again and again, and pieces whose pages break too
//! soon to pay are withdrawn while little has been merged ([`Trial`](crate::trial::Trial)).
//!
//! Two looks see a page that broke in between and was not merged again since; of one that broke and merged again they
//! see nothing, so that rates are underestimates where ksmd is faster than the looks. Between rounds of merging ksmd
//! rests, and the look that begins a round sees all that broke since the one before.

use crate::decide::plan::Plan;
use crate::verify::{self, Done};
use pagefold_base::lasting::{Churn, Seen};
use pagefold_base::mix::mix;
use pagefold_base::process::Process as Facts;
use pagefold_base::{AddressRange, Pages, Pfn, ProcessId, Reading};
use pagefold_host::{Host, Process, observe};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Pages of a piece at most: what is withdrawn together.
const PIECE: u64 = 1024;

/// Consecutive pages that are looked at, and how many such stripes of a piece are.
const STRIPE: u64 = 16;
const STRIPES: u64 = 8;

/// Frames that are asked for together, about: each takes 32 bytes meanwhile.
const FRAMES: usize = 1 << 18;

/// A part of a planned range that is judged by some of its pages.
#[derive(Debug)]
pub struct Piece {
    /// Whose.
    pub process: ProcessId,
    /// Where.
    pub range: AddressRange,
    /// Whether the program had enrolled it itself.
    pub own: bool,
    /// What was seen of it.
    pub seen: Seen,
    since: Instant,
    pages: Box<[Page]>,
}

/// A page that is looked at.
#[derive(Clone, Copy, Debug, Default)]
struct Page(u8);

impl Page {
    /// Whether it was merged when it was looked at before.
    const WAS: u8 = 1 << 7;
    /// Whether it is by the look under way.
    const IS: u8 = 1 << 6;

    fn was_merged(self) -> bool {
        self.0 & Self::WAS != 0
    }

    fn is_merged(self) -> bool {
        self.0 & Self::IS != 0
    }

    /// How often it broke, as far as it counts.
    fn broke(self) -> u8 {
        self.0 & (Self::IS - 1)
    }

    fn set(&mut self, is_merged: bool) {
        self.0 = self.0 & !Self::IS | if is_merged { Self::IS } else { 0 };
    }

    /// A look ends. Tells whether it broke.
    fn pass(&mut self) -> bool {
        let breaks = self.was_merged() && !self.is_merged();
        let times = (self.broke() + u8::from(breaks)).min(Self::IS - 1);
        self.0 = times | if self.is_merged() { Self::WAS | Self::IS } else { 0 };
        breaks
    }
}

/// Whose pages are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whom {
    /// Everybody's.
    All,
    /// Of those that have run since the last look: others write nothing.
    Ran,
    /// Of those that have had a page fault since the last look, as each write to a merged page is one. Only where ksmd
    /// has rested since, which merges pages without.
    Faulted,
}

/// When something is withdrawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// While ksmd works, or merged pages are watched.
    Meanwhile,
    /// Once a round has settled: also what holds nothing merged of processes that ran, for it was written before anybody
    /// looked, or has lost its partners, and would only be scanned.
    End,
    /// When a round was cut short: also all that ksmd has merged nothing of so far.
    Early,
    /// Between rounds: only what Pagefold enrolled.
    Between,
}

/// A process that is watched.
struct Watched {
    facts: Facts,
    /// What it had done at the last look at it, and when that was.
    done: Reading<Done>,
    looked: Instant,
    /// Whether it has run since it is watched.
    ever_ran: bool,
}

/// The pieces of plans, by process and address.
pub struct Watch<'h> {
    host: &'h dyn Host,
    processes: BTreeMap<ProcessId, Watched>,
    pieces: Vec<Piece>,
    ran: bool,
    /// Merged pages that the last look found written, those included that stand behind the ones that are looked at.
    broken: f64,
}

impl<'h> Watch<'h> {
    /// Nothing yet.
    pub fn new(host: &'h dyn Host) -> Self {
        Self { host, processes: BTreeMap::new(), pieces: Vec::new(), ran: false, broken: 0.0 }
    }

    /// Cut a plan into pieces, and watch those that are not watched yet, but for what lies in `without`.
    pub fn add(&mut self, plan: &Plan, without: impl Fn(ProcessId) -> Vec<AddressRange>) {
        let page = self.host.page_size().bytes();
        // Withdrawing a piece splits no huge page that lies beside it.
        let piece = (PIECE * page).max(observe::huge_page_bytes(self.host).unwrap_or(0));
        self.ran = false;
        let mut pieces = Vec::new();
        for target in &plan.targets {
            let process = target.process.id;
            self.processes.entry(process).or_insert_with(|| Watched {
                facts: target.process.clone(),
                done: verify::done(self.host, process),
                looked: Instant::now(),
                ever_ran: false,
            });
            let mut known = without(process);
            known.extend(self.pieces.iter().filter(|piece| piece.process == process).map(|piece| piece.range));
            let known = AddressRange::union(known);
            for planned in &target.ranges {
                for part in planned.range.outside(&known) {
                    pieces.extend(
                        part.cut_at_multiples(piece).map(|range| Piece::new(process, range, planned.enrolled, page)),
                    );
                }
            }
        }
        self.keep(pieces);
    }

    /// Whether there is nothing to watch.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// What is known of a process that is watched.
    pub fn process(&self, process: ProcessId) -> Option<&Facts> {
        self.processes.get(&process).map(|watched| &watched.facts)
    }

    /// Whether any process has run since a plan was added. One that does not run writes nothing.
    pub fn ran(&mut self) -> bool {
        let moved = |(&process, watched): (&ProcessId, &Watched)| {
            let now = verify::done(self.host, process);
            now.is_ok() && now != watched.done
        };
        self.ran = self.ran || self.processes.iter().any(moved);
        self.ran
    }

    /// What was seen of all pieces.
    pub fn seen(&self) -> Seen {
        self.pieces.iter().fold(Seen::default(), |sum, piece| sum + piece.seen)
    }

    /// About how many merged pages the last look found written.
    pub fn broken(&self) -> Pages {
        Pages(self.broken as u64)
    }

    /// What keeping each piece merged costs, as far as any of it was written.
    pub fn churn(&self) -> Vec<Churn> {
        let page = self.host.page_size().bytes();
        let of = |piece: &Piece| {
            let rate = piece.seen.rate_at_least();
            let seconds = piece.since.elapsed().as_secs_f64();
            let breaks = piece.seen.broken.0 as f64 * piece.stands_for(page) / seconds;
            (rate > 0.0 && seconds > 0.0).then(|| Churn { lasts: 1.0 / rate, breaks })
        };
        self.pieces.iter().filter_map(of).collect()
    }

    /// Look again at pages. Time counts for those processes that ever ran: one that never did cannot have written.
    /// Processes that have ended are forgotten: all of their pages went away, and nothing of it was written.
    pub fn look(&mut self, whom: Whom) -> Reading<()> {
        let now = Instant::now();
        let mut elapsed: BTreeMap<ProcessId, Duration> = BTreeMap::new();
        let mut still: BTreeSet<ProcessId> = BTreeSet::new();
        self.processes.retain(|&process, watched| {
            let done = verify::done(self.host, process);
            let there = done.is_ok();
            let ran = there && done != watched.done;
            watched.ever_ran |= ran;
            self.ran |= ran;
            if there && (ran || whom == Whom::All) {
                let since = now - std::mem::replace(&mut watched.looked, now);
                elapsed.insert(process, if watched.ever_ran { since } else { Duration::ZERO });
            }
            let faults = |done: &Reading<Done>| done.as_ref().ok().map(|done| done.faults);
            if whom == Whom::Faulted && faults(&done) == faults(&watched.done) {
                still.insert(process);
            }
            watched.done = done;
            there
        });
        self.pieces.retain(|piece| self.processes.contains_key(&piece.process));
        let page = self.host.page_size().bytes();
        // A page of which nothing is known now is taken to be as it was.
        for page in self.pieces.iter_mut().flat_map(|piece| &mut piece.pages) {
            page.set(page.was_merged());
        }
        let mut frames: Vec<(Pfn, u32, u32)> = Vec::new();
        let mut first = 0;
        while let Some(process) = self.pieces.get(first).map(|piece| piece.process) {
            let count = self.pieces[first..].partition_point(|piece| piece.process == process);
            if elapsed.contains_key(&process)
                && !still.contains(&process)
                && let Ok(handle) = pagefold_host::hold(self.host, process)
            {
                for number in first..first + count {
                    self.pieces[number].look(&*handle, page, &mut |at, frame| {
                        frames.extend(frame.map(|frame| (frame, number as u32, at as u32)));
                    });
                    if frames.len() >= FRAMES {
                        self.tell(&mut frames)?;
                    }
                }
            }
            first += count;
        }
        self.tell(&mut frames)?;
        self.broken = 0.0;
        for piece in &mut self.pieces {
            let Some(&elapsed) = elapsed.get(&piece.process) else { continue };
            let were = piece.pages.iter().filter(|page| page.was_merged()).count() as u64;
            let (mut broken, mut twice) = (Pages::ZERO, Pages::ZERO);
            for page in &mut piece.pages {
                if page.pass() {
                    broken += Pages(1);
                    twice += Pages(u64::from(page.broke() == 2));
                }
            }
            piece.seen.count(Pages(were), (broken, twice), elapsed);
            self.broken += broken.0 as f64 * piece.stands_for(page);
        }
        Ok(())
    }

    /// Tell of the pages of these frames, each with its piece and its position there, whether they are merged.
    fn tell(&mut self, frames: &mut Vec<(Pfn, u32, u32)>) -> Reading<()> {
        frames.sort_unstable();
        let numbers: Vec<Pfn> = frames.iter().map(|&(frame, ..)| frame).collect();
        let flags = self.host.frame_flags(&numbers)?;
        for ((_, piece, at), flags) in frames.drain(..).zip(flags) {
            self.pieces[piece as usize].pages[at as usize].set(flags.is_ksm() || flags.is_zero_page());
        }
        Ok(())
    }

    /// Take up pieces.
    pub fn keep(&mut self, pieces: impl IntoIterator<Item = Piece>) {
        self.pieces.extend(pieces);
        self.pieces.sort_by_key(|piece| (piece.process, piece.range));
    }

    /// Watch a process no longer.
    pub fn forget(&mut self, process: ProcessId) {
        self.processes.remove(&process);
        self.pieces.retain(|piece| piece.process != process);
    }

    /// Whether any piece does not pay of those that programs had not enrolled themselves.
    pub fn has_losses(&self, pays: impl Fn(&Seen) -> bool) -> bool {
        !self.pieces.iter().all(|piece| piece.own || pays(&piece.seen))
    }

    /// Take out the pieces that do not pay, and those of which nothing is merged where it is the moment for it: of what is
    /// looked at of them, and then of all of them.
    pub fn withdraw(&mut self, pays: impl Fn(&Seen) -> bool, moment: Moment) -> Vec<Piece> {
        let ran = |piece: &Piece| self.processes.get(&piece.process).is_some_and(|watched| watched.ever_ran);
        let idle = |piece: &Piece| match moment {
            Moment::End => ran(piece),
            Moment::Early => true,
            Moment::Meanwhile | Moment::Between => false,
        };
        let merged = |piece: &Piece| {
            piece.pages.iter().any(|page| page.was_merged())
                || !verify::look_at(self.host, piece.process, piece.range)
                    .is_ok_and(|found| found.merged + found.zero == Pages::ZERO)
        };
        let keep = |piece: &Piece| pays(&piece.seen) && (!idle(piece) || merged(piece));
        let (keep, drop) = std::mem::take(&mut self.pieces).into_iter().partition(keep);
        self.pieces = keep;
        drop
    }
}

impl Piece {
    fn new(process: ProcessId, range: AddressRange, own: bool, page: u64) -> Self {
        let watched = (range.bytes().0 / page).min(STRIPE * STRIPES);
        let pages = vec![Page::default(); watched as usize].into();
        Self { process, range, own, seen: Seen::default(), since: Instant::now(), pages }
    }

    /// For how many pages each of those stands that are looked at.
    fn stands_for(&self, page: u64) -> f64 {
        (self.range.bytes().0 / page) as f64 / self.pages.len().max(1) as f64
    }

    /// What of it is looked at: a stripe of each part of it, somewhere in that part, or programs that do the same to the
    /// same page of each part would be taken for that.
    fn stripes(&self, page: u64) -> impl Iterator<Item = AddressRange> + use<> {
        let (range, pages) = (self.range, self.range.bytes().0 / page);
        let (stripes, len) = if pages <= STRIPE * STRIPES { (1, pages) } else { (STRIPES, STRIPE) };
        let seed = mix(u64::from(self.process.pid.0) ^ range.start);
        (0..stripes).map(move |i| {
            let (first, next) = (i * pages / stripes, (i + 1) * pages / stripes);
            let start = range.start + (first + mix(seed ^ i) % (next - first - len + 1)) * page;
            AddressRange { start, end: start + len * page }
        })
    }

    /// Look at the watched pages that are not swapped out, which is not to be written: each counts as not merged until
    /// it is told, and `note` gets the position of each with its frame, if others map that too.
    fn look(&mut self, handle: &dyn Process, page: u64, note: &mut dyn FnMut(usize, Option<Pfn>)) {
        let mut position = 0;
        for stripe in self.stripes(page) {
            let mappings = handle.mappings(stripe).unwrap_or_default();
            for (mapping, at) in mappings.iter().zip(position..).filter(|(mapping, _)| !mapping.swapped) {
                self.pages[at].set(false);
                let shared = mapping.present && !mapping.file && !mapping.exclusive;
                note(at, mapping.frame.filter(|_| shared));
            }
            position += (stripe.bytes().0 / page) as usize;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::plan::{PlannedRange, Target, Way};
    use pagefold_base::domain::Domain;
    use pagefold_base::{Absent, Bytes, Pid};
    use pagefold_host::fake::{Fake, MERGED};

    const PAGE: u64 = 4096;
    const PID: u32 = 7;
    /// As many pages as lie between two stripes of a whole piece.
    const PART: u64 = PIECE / STRIPES;

    /// A process of two whole pieces, of which in each part so many pages are not there and the others are merged, and
    /// what watches it.
    fn watched(host: &Fake, missing: u64) -> Watch<'_> {
        let range = AddressRange { start: PIECE * PAGE, end: 3 * PIECE * PAGE };
        host.map(PID, (range.start, range.end), MERGED, true);
        for start in (range.start..range.end).step_by((PART * PAGE) as usize) {
            host.unmap(PID, (start, start + missing * PAGE));
        }
        let planned = PlannedRange {
            range,
            region: range,
            pages: Pages(2 * PIECE),
            merging: Pages(2 * PIECE),
            zero: Pages::ZERO,
            freed: Bytes(PIECE * PAGE),
            huge_split: Pages::ZERO,
            enrolled: false,
            late: false,
        };
        let target = Target {
            process: Facts::absent(ProcessId { pid: Pid(PID), start_time: 1 }, &Absent::Denied),
            domain: Domain::Host,
            ranges: vec![planned],
            huge: Bytes::ZERO,
            way: Way::Within,
        };
        let mut watch = Watch::new(host);
        watch.add(&Plan { targets: vec![target], ..Plan::default() }, |_| Vec::new());
        watch
    }

    /// However its pages are laid out: also where none of those that are looked at is there.
    #[test]
    fn what_holds_anything_merged_is_not_idle() {
        for missing in [0, STRIPE, PART - STRIPE, PART - 1, PART] {
            for moment in [Moment::Meanwhile, Moment::Between, Moment::Early, Moment::End] {
                for ran in [0, 1] {
                    let host = Fake::booted();
                    let mut watch = watched(&host, missing);
                    host.ran(PID, ran);
                    watch.look(Whom::All).unwrap();
                    let idle = watch.withdraw(|_| true, moment);
                    let is_moment = moment == Moment::Early || moment == Moment::End && ran > 0;
                    let expected = if missing == PART && is_moment { 2 } else { 0 };
                    assert_eq!(idle.len(), expected, "{missing} {moment:?} {ran}");
                }
            }
        }
    }

    /// A program that writes the same pages of each part, and rests in the first ones.
    #[test]
    fn what_breaks_in_step_is_seen() {
        let host = Fake::booted();
        let mut watch = watched(&host, 0);
        watch.look(Whom::All).unwrap();
        for start in (PIECE..3 * PIECE).step_by(PART as usize) {
            host.map(PID, ((start + STRIPE) * PAGE, (start + PART) * PAGE), "", true);
        }
        host.ran(PID, 1);
        watch.look(Whom::Ran).unwrap();
        let broken = watch.seen().broken;
        // Seven of eight pages are.
        assert!(broken.0 > STRIPES * STRIPE, "{broken:?}");
    }

    #[test]
    fn stripes_lie_within_their_parts() {
        for pages in [1, 16, 127, 128, 129, 512, 513, 1023, 1024] {
            let range = AddressRange { start: 77 * PAGE, end: (77 + pages) * PAGE };
            let process = ProcessId { pid: Pid(PID), start_time: 1 };
            let stripes: Vec<AddressRange> = Piece::new(process, range, false, PAGE).stripes(PAGE).collect();
            assert!(stripes.is_sorted_by(|a, b| a.end <= b.start), "{stripes:?}");
            assert!(stripes[0].start >= range.start && stripes.last().unwrap().end <= range.end, "{stripes:?}");
            let watched: u64 = stripes.iter().map(|stripe| stripe.bytes().0 / PAGE).sum();
            assert_eq!(watched, pages.min(STRIPES * STRIPE), "{pages}");
        }
    }
}
