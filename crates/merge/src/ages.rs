//! For how long pages have held what they hold, over several censuses under one key.
//!
//! Two looks within a census tell what changes all the time from what holds still. A work array that is filled anew
//! every few seconds holds still between them, and merging it is a loss. So who takes censuses again and again asks for
//! an age: [`ripe_after`] says which, and what is younger is left for a later census.
//!
//! A census that has no partner of a page tells nothing of it but that it held still, or is taken to: what was seen of it
//! before stays.
//!
//! Takes 4 bytes for each page that a plan covers and that has anything to gain, and 24 for each stretch of neighbours
//! that were first seen together. What is written with the bytes that were there grows old like anything else: only the
//! kernel's page tables tell, once it is merged ([`pagefold_base::lasting`]).

use crate::decide::plan::{Plan, Target};
use pagefold_base::lasting::ripe_after;
use pagefold_base::{AddressRange, Bytes, Fingerprint, PageClass, PageSize, Pages, ProcessId};
use pagefold_census::Error;
use pagefold_census::Remembered;
use pagefold_census::choose::each_page;
use pagefold_census::group;
use pagefold_census::index::Index;
use pagefold_census::results::{Census, SubjectCensus};
use pagefold_sys::fingerprint::Hasher;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

/// Pages of a piece at most: what is left out together.
const PIECE: u64 = 1024;

/// How often at most it is asked who has lost what it had to merge with to what was just left out.
const ROUNDS: u32 = 8;

/// What was seen when.
pub struct Ages {
    hasher: Hasher,
    page_size: PageSize,
    began: Instant,
    processes: BTreeMap<ProcessId, Seen>,
    remembered: Remembered,
}

/// Pages of a process, ascending by address.
#[derive(Default)]
struct Seen {
    stretches: Vec<Stretch>,
    /// Half of the fingerprint of each page: one change in four billion is missed by it.
    contents: Vec<u32>,
}

/// Neighbouring pages that have held what they hold since the same moment.
struct Stretch {
    range: AddressRange,
    /// Milliseconds from the beginning until they were first seen with it.
    since: u64,
}

impl Seen {
    /// Take note of the page that follows.
    fn push(&mut self, page: AddressRange, content: u32, since: u64) {
        self.contents.push(content);
        match self.stretches.last_mut().filter(|last| last.range.end == page.start && last.since == since) {
            Some(last) => last.range.end = page.end,
            None => self.stretches.push(Stretch { range: page, since }),
        }
    }

    /// The address of each page, its content, and since when it holds that.
    fn pages(&self, page_bytes: u64) -> impl Iterator<Item = (u64, u32, u64)> {
        let each = move |stretch: &Stretch| {
            let (range, since) = (stretch.range, stretch.since);
            (range.start..range.end).step_by(page_bytes as usize).map(move |address| (address, since))
        };
        self.stretches
            .iter()
            .flat_map(each)
            .zip(&self.contents)
            .map(|((address, since), &content)| (address, content, since))
    }

    /// What was seen of a range, and since when it holds that.
    fn overlaps(&self, range: AddressRange) -> impl Iterator<Item = (u64, AddressRange)> {
        let first = self.stretches.partition_point(|stretch| stretch.range.end <= range.start);
        let within = self.stretches[first..].iter().take_while(move |stretch| stretch.range.start < range.end);
        within.filter_map(move |stretch| Some((stretch.since, stretch.range.overlap(range)?)))
    }

    /// The pieces of a range of which most pages that were seen are not ripe.
    fn young(&self, range: AddressRange, page_bytes: u64, now: u64, least: u64) -> Vec<AddressRange> {
        let is_young = |piece: &AddressRange| {
            let (mut all, mut ripe) = (0, 0);
            for (since, range) in self.overlaps(*piece) {
                all += range.bytes().0;
                ripe += if now.saturating_sub(since) >= least { range.bytes().0 } else { 0 };
            }
            ripe * 2 < all
        };
        range.cut_at_multiples(PIECE * page_bytes).filter(is_young).collect()
    }
}

impl Ages {
    /// Nothing seen yet. The key is drawn here.
    pub fn new(page_size: PageSize) -> Result<Self, Error> {
        Self::since(page_size, Instant::now())
    }

    /// Nothing seen before a time.
    pub fn since(page_size: PageSize, began: Instant) -> Result<Self, Error> {
        let hasher = Hasher::random(page_size.as_len()).map_err(Error::Key)?;
        Ok(Self { hasher, page_size, began, processes: BTreeMap::new(), remembered: Remembered::new(began) })
    }

    /// What is remembered between the censuses, with the key of all of them.
    pub fn remembered(&mut self) -> (&mut Remembered, &Hasher) {
        (&mut self.remembered, &self.hasher)
    }

    /// How many pages of a process the last census has not read, since it was remembered what they held.
    pub fn spared(&self, process: ProcessId) -> Pages {
        self.remembered.spared(process)
    }

    /// The fingerprint of all censuses that are compared.
    pub fn hasher(&self) -> &Hasher {
        &self.hasher
    }

    /// Take note of what a census under this key found at `now`, and leave those pieces out of its plan of which most
    /// pages that should merge are not ripe, and those of which most have nobody else to merge with then. What a program
    /// enrolled itself of them is withdrawn while ksmd works, unless some of it is merged. Of processes that the census
    /// has not what is known stays. Tells how much of each was left out.
    pub fn sift(
        &mut self,
        plan: &mut Plan,
        census: &Census,
        index: &Index,
        now: Instant,
    ) -> BTreeMap<ProcessId, Bytes> {
        let now = now.saturating_duration_since(self.began).as_millis() as u64;
        self.note(census, index, now);
        let least = ripe_after(self.page_size.bytes()).as_millis() as u64;
        let (page_bytes, nothing) = (self.page_size.bytes(), Seen::default());
        let (mut young, mut ripe) = (BTreeMap::new(), BTreeMap::new());
        for target in &plan.targets {
            let seen = self.processes.get(&target.process.id).unwrap_or(&nothing);
            let (mut not, mut old) = (Vec::new(), Vec::new());
            for range in &target.ranges {
                let pieces = seen.young(range.range, page_bytes, now, least);
                old.extend(
                    range.range.outside(&pieces).into_iter().flat_map(|rest| rest.cut_at_multiples(PIECE * page_bytes)),
                );
                not.extend(pieces);
            }
            young.insert(target.process.id, not);
            ripe.insert(target.process.id, old);
        }
        // Each piece may be all that another has to merge with.
        for _ in 0..ROUNDS {
            if young.values().all(Vec::is_empty) {
                break;
            }
            let alone = alone(census, index, &ripe);
            if alone.is_empty() {
                break;
            }
            for (process, pieces) in alone {
                ripe.entry(process).or_default().retain(|piece| pieces.binary_search(piece).is_err());
                young.entry(process).or_default().extend(pieces);
            }
        }
        let mut left_out = BTreeMap::new();
        for (process, ranges) in young {
            left_out.insert(process, Bytes(ranges.iter().map(|range| range.bytes().0).sum()));
            let target = plan.targets.iter().find(|target| target.process.id == process);
            let subject = census.subjects.iter().position(|subject| subject.process.id == process);
            if let Some((target, subject)) = target.zip(subject) {
                let own = unmerged(target, subject, index, &ranges);
                plan.narrow(&census.subjects[subject], &own);
            }
            plan.leave_out(process, ranges);
        }
        left_out
    }

    fn note(&mut self, census: &Census, index: &Index, now: u64) {
        let content = |fingerprint: Fingerprint| fingerprint.0 as u32;
        let mut known: Vec<(u32, u32)> = index
            .paired()
            .par_iter()
            .filter(|entry| index.mark(entry.ordinal).is_covered())
            .map(|entry| (entry.ordinal, content(entry.fingerprint())))
            .collect();
        known.par_sort_unstable();
        let page_bytes = self.page_size.bytes();
        for (subject, seen) in census.subjects.iter().enumerate() {
            let older = self.processes.remove(&seen.process.id).unwrap_or_default();
            let mut older = older.pages(page_bytes).peekable();
            let ordinals = index.pages_of(subject);
            let mut known = known[known.partition_point(|&(page, _)| page < ordinals.start)..].iter().peekable();
            let mut pages = Seen::default();
            for (_, ordinal, address) in each_page(index, &ordinals) {
                let mark = index.mark(ordinal);
                while older.next_if(|&(before, ..)| before < address).is_some() {}
                let before = older.next_if(|&(before, ..)| before == address);
                let content = match mark.class() {
                    Some(PageClass::Zero) if mark.is_covered() => content(Fingerprint::ZERO_PAGE),
                    Some(class) if class.is_duplicate() && mark.is_covered() => {
                        while known.next_if(|&&(page, _)| page < ordinal).is_some() {}
                        let Some(&&(_, content)) = known.peek().filter(|&&&(page, _)| page == ordinal) else {
                            continue;
                        };
                        content
                    }
                    Some(PageClass::Unique) => {
                        let Some((_, held, _)) = before else { continue };
                        held
                    }
                    _ => continue,
                };
                let since = before.filter(|&(_, held, _)| held == content).map_or(now, |(.., since)| since);
                pages.push(AddressRange { start: address, end: address + page_bytes }, content, since);
            }
            if !pages.contents.is_empty() {
                pages.contents.shrink_to_fit();
                pages.stretches.shrink_to_fit();
                self.processes.insert(seen.process.id, pages);
            }
        }
    }

    /// Forget the processes that do not fit.
    pub fn retain(&mut self, fits: impl Fn(ProcessId) -> bool) {
        self.processes.retain(|&process, _| fits(process));
        self.remembered.retain(fits);
    }
}

/// Which of some ranges the program of a target has enrolled itself, and nothing is merged in: ksmd would take them all
/// the same. `subject` is the target's position among the subjects of the census.
fn unmerged(target: &Target, subject: usize, index: &Index, ranges: &[AddressRange]) -> Vec<AddressRange> {
    let is_own = |range: &&AddressRange| {
        target.ranges.iter().any(|planned| planned.enrolled && planned.range.overlap(**range).is_some())
    };
    let own: Vec<AddressRange> = ranges.iter().filter(is_own).copied().collect();
    if own.is_empty() {
        return own;
    }
    let is_merged = |ordinal: u32| index.mark(ordinal).class() == Some(PageClass::Merged);
    let merged: Vec<u64> = each_page(index, &index.pages_of(subject))
        .filter(|&(_, ordinal, _)| is_merged(ordinal))
        .map(|(.., address)| address)
        .collect();
    let has_none = |range: &AddressRange| {
        let first = merged.partition_point(|&address| address < range.start);
        merged.get(first).is_none_or(|&address| address >= range.end)
    };
    own.into_iter().filter(has_none).collect()
}

/// Of some pieces, ascending for each process, those of which most of what should merge is in groups of which nothing
/// else is in any of the pieces, or merged.
fn alone(
    census: &Census,
    index: &Index,
    pieces: &BTreeMap<ProcessId, Vec<AddressRange>>,
) -> Vec<(ProcessId, Vec<AddressRange>)> {
    let of = |subject: &SubjectCensus| pieces.get(&subject.process.id).map_or(&[][..], Vec::as_slice);
    let pieces: Vec<&[AddressRange]> = census.subjects.iter().map(of).collect();
    let none = || pieces.iter().map(|pieces| pieces.iter().map(|_| AtomicU32::new(0)).collect()).collect();
    let (alone, others): (Vec<Vec<AtomicU32>>, Vec<Vec<AtomicU32>>) = (none(), none());
    let piece_at = |subject: usize, address: u64| {
        let at = pieces[subject].partition_point(|piece| piece.end <= address);
        pieces[subject].get(at).is_some_and(|piece| piece.start <= address).then_some((subject, at))
    };
    let domains = group::domain_numbers(census.subjects.iter().map(|subject| &subject.domain));
    group::walk(index, &domains, |there: &mut Vec<(u32, (usize, usize))>, _, members| {
        there.clear();
        there.extend(members.iter().filter(|member| index.mark(member.ordinal).is_covered()).filter_map(|member| {
            let (.., address) = index.place(member.ordinal)?;
            Some((member.frame, piece_at(member.subject, address)?))
        }));
        // What has one frame since a fork is one.
        let is_one = there.iter().all(|(frame, _)| *frame == there[0].0);
        let counts = if is_one && !members.iter().any(|member| member.merged) { &alone } else { &others };
        for &(_, (subject, at)) in there.iter() {
            counts[subject][at].fetch_add(1, Ordering::Relaxed);
        }
    });
    let count = |counts: &[Vec<AtomicU32>], (subject, at): (usize, usize)| counts[subject][at].load(Ordering::Relaxed);
    let most = |subject: usize| {
        let is_alone = |at: &usize| count(&alone, (subject, *at)) > count(&others, (subject, *at));
        if (0..pieces[subject].len()).any(|at| is_alone(&at)) {
            let is_zero = |ordinal: u32| {
                let mark = index.mark(ordinal);
                mark.is_covered() && mark.class() == Some(PageClass::Zero)
            };
            for (_, _, address) in each_page(index, &index.pages_of(subject)).filter(|page| is_zero(page.1)) {
                if let Some((_, at)) = piece_at(subject, address) {
                    others[subject][at].fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        let pieces: Vec<AddressRange> =
            (0..pieces[subject].len()).filter(is_alone).map(|at| pieces[subject][at]).collect();
        (!pieces.is_empty()).then_some((census.subjects[subject].process.id, pieces))
    };
    (0..pieces.len()).filter_map(most).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: u64 = 4096;

    proptest! {
        /// Stretches say of each page what was said of it, and of each piece what its pages say one by one.
        #[test]
        fn stretches_tell_what_their_pages_do(
            pages in prop::collection::btree_map(0u64..4096, (0u32..3, 0u64..3), 0..300),
            planned in (0u64..2048, 1u64..2048),
            now in 2u64..6,
        ) {
            let page = |at: u64| AddressRange { start: at * PAGE, end: (at + 1) * PAGE };
            let mut seen = Seen::default();
            for (&at, &(content, since)) in &pages {
                seen.push(page(at), content, since);
            }
            let told: Vec<_> = seen.pages(PAGE).map(|(address, content, since)| (address / PAGE, (content, since))).collect();
            prop_assert_eq!(told, pages.clone().into_iter().collect::<Vec<_>>());

            let range = AddressRange { start: planned.0 * PAGE, end: (planned.0 + planned.1) * PAGE };
            let young: Vec<AddressRange> = range
                .cut_at_multiples(PIECE * PAGE)
                .filter(|piece| {
                    let within = pages.range(piece.start / PAGE..piece.end / PAGE);
                    let ripe: Vec<bool> = within.map(|(_, &(_, since))| now - since >= 3).collect();
                    ripe.iter().filter(|ripe| **ripe).count() * 2 < ripe.len()
                })
                .collect();
            prop_assert_eq!(seen.young(range, PAGE, now, 3), young);
        }
    }
}
