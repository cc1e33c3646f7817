//! What members hold that nobody else does, remembered from census to census, so that of whom is looked at again only
//! what is new or may have changed is read.
//!
//! Most of what a host holds has no partner, and reading that again is most of what a census costs. Nothing tells from
//! outside which pages a running process has written, but for marks in its page tables that are one tool's at a time.
//! So it is found out piece by piece, 256 KiB of 4 KiB pages each. Of a piece that was found unchanged in the look
//! before a few pages are read, and where these hold what they held the others are taken to do so, too; the more looks
//! it has been so, the more seldom a piece is read whole all the same, down to one look in 16. A page that changes alone
//! in its piece is so found late. A page that holds something else in each of some looks running is taken to change on,
//! and read in one look of two, then of eight. All others are read, as is what has just come, and what is like others.
//! A process that has neither run nor had a page fault since it was looked at has changed nothing; for an hour, after
//! which it is taken to have run, since others may write to its memory.
//!
//! What is remembered decides nothing by itself. Whatever may have a partner among those that are looked at is read
//! before it counts, with its piece. What is not read, or holds something else then and so comes too late to be compared
//! with everything, is not enrolled. What KSM is told of, or has merged, is read each time: it may be merged, or keeps
//! others from merging the same.
//!
//! Halves of fingerprints are alike by chance, and each such page has its piece read: of a census of 4 million pages one
//! piece in 16, of 50 million one in two.
//!
//! Takes 4 bytes for each page that is remembered, half of its fingerprint, and 40 for each piece, of which those are
//! left out that would remember less than 8 pages; and 16 for each piece during a census.

use crate::choose::each_page;
use crate::index::{Entry, Index, Mark, RegionPages};
use crate::survey::{Subject, Survey, way};
use crate::witnesses::{LASTS, Standing};
use pagefold_base::mix::mix;
use pagefold_base::{Fingerprint, PageClass, Pages, ProcessId};
use pagefold_host::Way;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Pages of a piece.
const PIECE: u64 = 64;

/// Pages that are remembered of a piece, at least.
const LEAST: u32 = 8;

/// Pages of a piece that are read to see whether it has changed.
const TRIED: u64 = 4;

/// A piece is read whole in one of two to the power of so many looks at its process as it runs, at least.
const CALM: u8 = 4;

/// A page is read in one of two to the power of so many looks after it has changed in two running, and in more.
const HOT: [u8; 2] = [1, 3];

/// What is remembered of all members, under one key of fingerprints.
pub(crate) struct Recall {
    now: Instant,
    known: BTreeMap<ProcessId, Known>,
    /// How many pages of each process the last census has not read.
    spared: BTreeMap<ProcessId, Pages>,
}

struct Known {
    /// How often it was looked at and did not rest.
    looks: u64,
    /// How much it had run before it was read.
    standing: Option<Standing>,
    /// When it was last looked at without being taken to rest.
    seen: Instant,
    /// Ascending.
    pieces: Vec<Piece>,
    /// Of the pages that are remembered, in their order: half of their fingerprints.
    contents: Vec<u32>,
    /// What a look has found so far, for each piece.
    found: OnceLock<Vec<Found>>,
}

/// Whether anything is recalled of a subject's pages that are read in this way: KSM was never told of them. What else is
/// there may be merged, or keeps another trust domain from merging the same. Nor of witnesses.
pub(crate) fn is_recalled(subject: &Subject, way: Way) -> bool {
    !subject.witness && way == Way::Remote
}

/// The place of the piece of an address.
pub(crate) fn piece_at(index: &Index, address: u64) -> u64 {
    address / index.page_len() / PIECE
}

/// What is kept of a page of which nothing is remembered: half the fingerprint of the page of zeros, which is told apart.
const NOTHING: u32 = Fingerprint::ZERO_PAGE.half();

/// Some neighbouring pages, a bit for each.
#[derive(Clone, Copy, Debug, Default)]
struct Piece {
    /// Its place among all pieces of the address space.
    number: u64,
    /// Those that are remembered.
    pages: u64,
    /// How many looks running they have changed in, up to three: the lower bits and the upper ones.
    changes: [u64; 2],
    /// Where their contents begin.
    first: u32,
    /// How many looks running the others were found unchanged, up to [`CALM`].
    calm: u8,
}

/// The pages of a piece that hold something else than they did, and those that hold the same.
#[derive(Debug, Default)]
struct Found {
    changed: AtomicU64,
    same: AtomicU64,
}

/// What is remembered of some consecutive pages of the index.
pub(crate) struct Recalled<'a> {
    known: &'a Known,
    rests: bool,
    /// Those that anything is remembered of, ascending.
    pages: Vec<Page>,
    first: u32,
    /// For each page from the first on its place among those, and one more; 0 for others.
    places: Vec<u32>,
}

/// A page that is remembered.
#[derive(Clone, Copy)]
struct Page {
    ordinal: u32,
    /// The position of its piece.
    piece: u32,
    /// Its bit in its piece.
    bit: u64,
    half: u32,
}

impl Recall {
    /// Nothing remembered yet.
    pub fn new(now: Instant) -> Self {
        Self { now, known: BTreeMap::new(), spared: BTreeMap::new() }
    }

    /// A census begins at a time.
    pub fn begin(&mut self, now: Instant) {
        self.now = now;
        self.spared.clear();
        // What a look has found that was halted.
        self.known.values_mut().for_each(|known| known.found = OnceLock::new());
    }

    /// How many pages of a process the last census has not read, but for few.
    pub fn spared(&self, process: ProcessId) -> Pages {
        self.spared.get(&process).copied().unwrap_or(Pages::ZERO)
    }

    /// Forget the processes that do not fit.
    pub fn retain(&mut self, fits: impl Fn(ProcessId) -> bool) {
        self.known.retain(|&process, _| fits(process));
    }

    /// What is remembered of some pages of a subject, if anything is.
    pub fn of(&self, survey: &Survey, index: &Index, subject: usize, ordinals: Range<u32>) -> Option<Recalled<'_>> {
        let process = survey.subjects[subject].process.id;
        let known = self.known.get(&process)?;
        let rests = self.rests(known, survey.standings.get(&process));
        let (first, mut places) = (ordinals.start, vec![0; ordinals.len()]);
        let pages = known.within(index, ordinals);
        for (page, place) in pages.iter().zip(1..) {
            places[(page.ordinal - first) as usize] = place;
        }
        (!pages.is_empty()).then_some(Recalled { known, rests, pages, first, places })
    }

    /// Whether a process can have written nothing since it was looked at.
    fn rests(&self, known: &Known, standing: Option<&Standing>) -> bool {
        let is_fresh = self.now.saturating_duration_since(known.seen) < LASTS;
        is_fresh && standing.is_some() && standing == known.standing.as_ref()
    }

    /// Take note of what was looked at and will be recalled, once the index is classified, which lets go of what no two
    /// pages hold; of whom not all could be read nothing is kept.
    pub fn note(&mut self, survey: &Survey, index: &mut Index, unread: &BTreeSet<usize>) {
        let mut kept = Kept::none(index.pages());
        let mut noted: Vec<Option<Known>> = Vec::new();
        let is_recalled = |pages: &RegionPages| {
            let subject = &survey.subjects[pages.subject];
            is_recalled(subject, way(&subject.regions[pages.region].0))
        };
        let regions: Vec<RegionPages> = index.regions().filter(is_recalled).collect();
        for (position, subject) in survey.subjects.iter().enumerate() {
            let process = subject.process.id;
            let before = if subject.witness { None } else { self.known.remove(&process) };
            let standing = survey.standings.get(&process);
            let rests = before.as_ref().is_some_and(|before| self.rests(before, standing));
            let is_noted = !subject.witness && !unread.contains(&position);
            noted.push(is_noted.then(|| {
                let first = regions.partition_point(|pages| pages.subject < position);
                let own = regions[first..].iter().take_while(|pages| pages.subject == position);
                let before = before.as_ref().map(|known| (known, rests));
                let (pieces, passed_by) = pieces(index, own.map(|pages| &pages.ordinals), before, &mut kept);
                self.spared.insert(process, passed_by);
                let (looks, seen) =
                    before.map_or((0, self.now), |(known, _)| (known.looks + u64::from(!rests), known.seen));
                let seen = if rests { seen } else { self.now };
                Known { looks, standing: standing.copied(), seen, pieces, contents: Vec::new(), found: OnceLock::new() }
            }));
        }
        kept.count();
        let firsts: Vec<usize> = (0..noted.len()).map(|subject| kept.before(index.pages_of(subject).start)).collect();
        for (subject, known) in noted.iter_mut().enumerate() {
            if let Some(known) = known {
                known.contents = vec![NOTHING; kept.before(index.pages_of(subject).end) - firsts[subject]];
            }
        }
        let mut put = |index: &Index, ordinal: u32, half: u32| {
            let subject = index.subject(ordinal);
            if let Some(known) = &mut noted[subject] {
                known.contents[kept.before(ordinal) - firsts[subject]] = half;
            }
            if index.mark(ordinal) == Mark::RECALLED {
                self.spared.entry(survey.subjects[subject].process.id).or_default().0 += 1;
            }
        };
        let mut note = |index: &Index, entry: Entry| {
            if kept.has(entry.ordinal) {
                put(index, entry.ordinal, entry.fingerprint().half());
            }
        };
        // Neighbours after neighbours, while the index lets go of them: only what is filled is in memory.
        index.tell_unpaired(&mut note);
        index.entries.iter().for_each(|entry| note(index, *entry));
        for &(ordinal, half) in &kept.passed_by {
            put(index, ordinal, half);
        }
        for (known, subject) in noted.into_iter().zip(&survey.subjects) {
            let some = known.filter(|known| !known.pieces.is_empty());
            self.known.extend(some.map(|known| (subject.process.id, known)));
        }
    }
}

/// The pieces of some of a subject's pages of which enough can be remembered, whose pages are `kept`, and how many of
/// these were passed by. `before` is what was remembered of it, and whether it rested.
fn pieces<'a>(
    index: &Index,
    regions: impl Iterator<Item = &'a Range<u32>>,
    before: Option<(&Known, bool)>,
    kept: &mut Kept,
) -> (Vec<Piece>, Pages) {
    let (mut pieces, mut first, mut passed_by) = (Vec::new(), 0, Pages::ZERO);
    let mut older = before.map_or(&[][..], |(known, _)| &known.pieces).iter().enumerate().peekable();
    let page_of = |(_, ordinal, address): (_, u32, u64)| (ordinal, address / index.page_len());
    let mut pages = regions.flat_map(|ordinals| each_page(index, ordinals)).map(page_of).peekable();
    while let Some(&(_, page)) = pages.peek() {
        let number = page / PIECE;
        while older.next_if(|(_, older)| older.number < number).is_some() {}
        let old = older.next_if(|(_, older)| older.number == number).zip(before);
        let (mut there, mut bits, mut unread, mut volatile) = (Vec::new(), 0_u64, 0_u64, 0);
        while let Some((ordinal, page)) = pages.next_if(|(_, page)| page / PIECE == number) {
            let bit = 1 << (page % PIECE);
            let mark = index.mark(ordinal);
            match mark.class() {
                Some(PageClass::Volatile) if mark != Mark::PASSED_BY => volatile |= bit,
                Some(PageClass::Volatile | PageClass::Unique) => {
                    there.push((ordinal, bit));
                    bits |= bit;
                    unread |= if mark == Mark::PASSED_BY { bit } else { 0 };
                }
                _ => {}
            }
        }
        if bits.count_ones() < LEAST {
            continue;
        }
        let mut piece = Piece { number, pages: bits, first, ..Piece::default() };
        first += bits.count_ones();
        for &(ordinal, _) in &there {
            kept.keep(ordinal);
        }
        if let Some(((position, old), (known, rests))) = old {
            piece.heed(old, &known.found()[position], volatile, rests);
            let unread = there.iter().filter(|(_, bit)| unread & old.pages & bit != 0);
            kept.passed_by.extend(unread.map(|&(ordinal, bit)| (ordinal, known.content(old, bit))));
        }
        passed_by.0 += u64::from(unread.count_ones());
        pieces.push(piece);
    }
    pieces.shrink_to_fit();
    (pieces, passed_by)
}

impl Piece {
    /// The pages that are taken to change on, and not to be read in this look at their process. What rests does not.
    fn skipped(&self, looks: u64, rests: bool) -> u64 {
        let [low, high] = self.changes;
        let unless_due = |pages: u64, times: u8| if rests || self.is_due(looks, times) { 0 } else { pages };
        unless_due(high & !low, HOT[0]) | unless_due(high & low, HOT[1])
    }

    /// The pages that are not taken to change on.
    fn still(&self) -> u64 {
        self.pages & !self.changes[1]
    }

    /// Whether it is this look's turn, of two to the power of so many. Not all pieces' turns come in the same look.
    fn is_due(&self, looks: u64, times: u8) -> bool {
        mix(self.number).wrapping_add(looks).is_multiple_of(1 << times)
    }

    /// Take note of what a look has found of it, as it was remembered before, and of which of its pages changed within
    /// the look. Where nothing was compared nothing is known of it, unless its process `rests`.
    fn heed(&mut self, before: &Self, found: &Found, volatile: u64, rests: bool) {
        let [changed, same] = [&found.changed, &found.same].map(|pages| pages.load(Ordering::Relaxed));
        let [low, high] = before.changes;
        // One more, up to three; none for what has not changed.
        let more = changed & !(low & high);
        let counted = [low ^ more, high | low & more];
        self.changes = counted.map(|bits| bits & !same & self.pages);
        self.calm = match changed & before.still() | volatile {
            0 if same & before.still() != 0 => (before.calm + 1).min(CALM),
            0 if rests => before.calm,
            _ => 0,
        };
    }
}

impl Known {
    /// Half the fingerprint of a page that is remembered.
    fn content(&self, piece: &Piece, bit: u64) -> u32 {
        self.contents[(piece.first + (piece.pages & (bit - 1)).count_ones()) as usize]
    }

    /// What this look has found, by piece.
    fn found(&self) -> &[Found] {
        self.found.get_or_init(|| self.pieces.iter().map(|_| Found::default()).collect())
    }

    /// Those of some consecutive pages that anything is remembered of.
    fn within(&self, index: &Index, ordinals: Range<u32>) -> Vec<Page> {
        let mut within = Vec::new();
        let mut at = 0;
        for (run, first) in index.runs(ordinals) {
            let start = run.address / index.page_len();
            let end = start + u64::from(run.pages);
            at += self.pieces[at..].partition_point(|piece| (piece.number + 1) * PIECE <= start);
            let pieces = self.pieces[at..].iter().zip(at as u32..);
            for (piece, position) in pieces.take_while(|(piece, _)| piece.number * PIECE < end) {
                let base = piece.number * PIECE;
                within.extend((start.max(base)..end.min(base + PIECE)).filter_map(|page| {
                    let (bit, ordinal) = (1 << (page - base), first + (page - start) as u32);
                    let half = if piece.pages & bit != 0 { self.content(piece, bit) } else { NOTHING };
                    (half != NOTHING).then_some(Page { ordinal, piece: position, bit, half })
                }));
            }
        }
        within
    }
}

impl Recalled<'_> {
    /// The pages that are taken to change on, and are not read.
    pub fn skipped(&self) -> impl Iterator<Item = u32> + '_ {
        self.pages
            .iter()
            .filter(|page| self.piece(page).skipped(self.known.looks, self.rests) & page.bit != 0)
            .map(|page| page.ordinal)
    }

    /// The pages to read before others, one of each quarter of a piece: by them it is told whether the others may be taken
    /// to hold what they did.
    pub fn tried(&self) -> impl Iterator<Item = u32> + '_ {
        let trusted = self.trusted().filter(|_| !self.rests);
        trusted.flat_map(|(piece, _, pages)| {
            let (draw, count) = (mix(piece.number ^ mix(self.known.looks)), pages.len() as u64);
            (0..TRIED.min(count))
                .map(move |turn| pages[((turn * count + draw % count) / TRIED.min(count)) as usize].ordinal)
        })
    }

    /// The pages that are taken to hold what they did, with the fingerprints that stand for it, once those that were to
    /// be tried are compared.
    pub fn told(&self) -> impl Iterator<Item = (u32, Fingerprint)> + '_ {
        let holds = |found: &Found| self.rests || found.same.load(Ordering::Relaxed) != 0;
        let told = self.trusted().filter(move |(_, found, _)| holds(found)).flat_map(|(.., pages)| pages);
        told.map(|page| (page.ordinal, Fingerprint::of_half(page.half)))
    }

    /// Compare what was read of a page with what is remembered of it, if anything is.
    pub fn compare(&self, ordinal: u32, content: Option<Fingerprint>) {
        let place = self.places[(ordinal - self.first) as usize].checked_sub(1);
        let Some(page) = place.map(|place| self.pages[place as usize]) else { return };
        let found = &self.known.found()[page.piece as usize];
        let is_same = content.map(Fingerprint::half) == Some(page.half);
        (if is_same { &found.same } else { &found.changed }).fetch_or(page.bit, Ordering::Relaxed);
    }

    fn piece(&self, page: &Page) -> &Piece {
        &self.known.pieces[page.piece as usize]
    }

    /// The pieces that need not be read whole, as far as it is known, with those pages that are not taken to change on.
    fn trusted(&self) -> impl Iterator<Item = (&Piece, &Found, Vec<Page>)> + '_ {
        self.pages.chunk_by(|a, b| a.piece == b.piece).filter_map(|pages| {
            let (piece, found) = (self.piece(&pages[0]), &self.known.found()[pages[0].piece as usize]);
            let changed = found.changed.load(Ordering::Relaxed) & piece.still();
            let holds = changed == 0 && !piece.is_due(self.known.looks, piece.calm);
            let still = || pages.iter().filter(|page| piece.still() & page.bit != 0).copied().collect::<Vec<_>>();
            (self.rests || holds).then(|| (piece, found, still())).filter(|(.., pages)| !pages.is_empty())
        })
    }
}

/// Which pages of an index are remembered, a bit for each, and how many before each sixty-fourth.
struct Kept {
    bits: Vec<u64>,
    before: Vec<u32>,
    /// Those of them that were passed by, with what is remembered of them.
    passed_by: Vec<(u32, u32)>,
}

impl Kept {
    fn none(pages: usize) -> Self {
        Self { bits: vec![0; pages / 64 + 1], before: Vec::new(), passed_by: Vec::new() }
    }

    fn keep(&mut self, ordinal: u32) {
        self.bits[ordinal as usize / 64] |= 1 << (ordinal % 64);
    }

    fn has(&self, ordinal: u32) -> bool {
        self.bits[ordinal as usize / 64] >> (ordinal % 64) & 1 == 1
    }

    /// All are known that are kept.
    fn count(&mut self) {
        let mut sum = 0;
        self.before = Vec::with_capacity(self.bits.len());
        for bits in &self.bits {
            self.before.push(sum);
            sum += bits.count_ones();
        }
    }

    /// How many are kept before a page.
    fn before(&self, ordinal: u32) -> usize {
        let (word, bit) = (ordinal as usize / 64, 1 << (ordinal % 64));
        (self.before[word] + (self.bits[word] & (bit - 1)).count_ones()) as usize
    }
}
