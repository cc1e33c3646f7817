//! Watching whether merged pages stay merged.
//!
//! A page that holds the same bytes at every look may be written all the time: a program that fills its work arrays
//! with zeros in each step writes zero over zero. Contents cannot tell, and the kernel tells nothing of writes as such.
//! But each write to a merged page breaks the sharing, and page tables tell that. So the merge is its own trial: while
//! ksmd works, some pages of each piece of the plan are looked at again and again, and pieces whose pages break too
//! soon to pay are withdrawn while little has been merged.
//!
//! Two looks see a page that broke in between and was not merged again since; of one that broke and merged again they
//! see nothing, so that rates are underestimates where ksmd is faster than the looks.

use crate::verify;
use pagefold_host::Host;
use pagefold_model::lasting::Seen;
use pagefold_model::plan::Plan;
use pagefold_model::{AddressRange, Pages, Pfn, Reading};
use std::time::{Duration, Instant};

/// Pages of a piece at most: what is withdrawn together.
const PIECE: u64 = 1024;

/// Consecutive pages that are looked at, and how many such stripes of a piece are.
const STRIPE: u64 = 16;
const STRIPES: u64 = 8;

/// A part of a planned range that is judged by some of its pages.
#[derive(Debug)]
pub struct Piece {
    /// Position of the target in the plan.
    pub target: usize,
    /// Where.
    pub range: AddressRange,
    /// What was seen of it.
    pub seen: Seen,
    stripes: Vec<AddressRange>,
    merged: Vec<bool>,
}

/// The pieces of a plan.
pub struct Watch<'h> {
    host: &'h dyn Host,
    pieces: Vec<Piece>,
    /// By target, the CPU ticks it had used at the last look at it, and when that was.
    last: Vec<(Reading<u64>, Instant)>,
    ran: bool,
}

impl<'h> Watch<'h> {
    /// Cut the plan into pieces.
    pub fn new(host: &'h dyn Host, plan: &Plan) -> Self {
        let page = host.page_size().bytes();
        let mut pieces = Vec::new();
        for (target, planned) in plan.targets.iter().enumerate() {
            for range in &planned.ranges {
                let mut start = range.range.start;
                while start < range.range.end {
                    let end = range.range.end.min(start + PIECE * page);
                    pieces.push(Piece::new(target, AddressRange { start, end }, page));
                    start = end;
                }
            }
        }
        let last = plan.targets.iter().map(|target| (verify::ticks(host, target), Instant::now())).collect();
        Self { host, pieces, last, ran: false }
    }

    /// Whether any target has run since the watch began. One that does not run writes nothing.
    pub fn ran(&mut self, plan: &Plan) -> bool {
        let moved = |(target, (before, _)): (_, &(Reading<u64>, _))| verify::ticks(self.host, target) != *before;
        self.ran = self.ran || plan.targets.iter().zip(&self.last).any(moved);
        self.ran
    }

    /// What was seen of all pieces.
    pub fn seen(&self) -> Seen {
        self.pieces.iter().fold(Seen::default(), |sum, piece| sum + piece.seen)
    }

    /// Look again at the pages of those targets that have run since the last look.
    pub fn look(&mut self, plan: &Plan) -> Reading<()> {
        let now = Instant::now();
        let elapsed: Vec<Option<Duration>> = plan
            .targets
            .iter()
            .zip(&mut self.last)
            .map(|(target, (before, then))| {
                let ticks = verify::ticks(self.host, target);
                let moved = ticks != *before;
                *before = ticks;
                moved.then(|| now - std::mem::replace(then, now))
            })
            .collect();
        self.ran |= elapsed.iter().any(Option::is_some);
        let mut frames: Vec<(Pfn, usize, usize)> = Vec::new();
        let mut first = 0;
        for pieces in self.pieces.chunk_by(|a, b| a.target == b.target) {
            let target = pieces[0].target;
            // A process that ended has nothing left that could break.
            if elapsed[target].is_some()
                && let Ok(handle) = verify::open(self.host, &plan.targets[target])
            {
                for (number, piece) in pieces.iter().enumerate() {
                    let mut position = 0;
                    for stripe in &piece.stripes {
                        for mapping in handle.mappings(*stripe).unwrap_or_default() {
                            let shared = mapping.present && !mapping.file && !mapping.exclusive;
                            let frame = mapping.frame.filter(|_| shared);
                            frames.extend(frame.map(|frame| (frame, first + number, position)));
                            position += 1;
                        }
                    }
                }
            }
            first += pieces.len();
        }
        frames.sort_unstable();
        let numbers: Vec<Pfn> = frames.iter().map(|&(frame, ..)| frame).collect();
        let flags = self.host.frame_flags(&numbers)?;
        let mut now: Vec<Vec<bool>> = self.pieces.iter().map(|piece| vec![false; piece.merged.len()]).collect();
        for (&(_, piece, position), flags) in frames.iter().zip(&flags) {
            if let Some(merged) = now[piece].get_mut(position) {
                *merged = flags.is_ksm() || flags.is_zero_page();
            }
        }
        for (piece, now) in self.pieces.iter_mut().zip(now) {
            let Some(elapsed) = elapsed[piece.target] else { continue };
            let were = piece.merged.iter().filter(|&&merged| merged).count() as u64;
            let broken = piece.merged.iter().zip(&now).filter(|&(&was, &is)| was && !is).count() as u64;
            piece.seen.count(Pages(were), Pages(broken), elapsed);
            piece.merged = now;
        }
        Ok(())
    }

    /// Take out the pieces that do not pay.
    pub fn withdraw(&mut self, pays: impl Fn(&Seen) -> bool) -> Vec<Piece> {
        let (keep, drop) = std::mem::take(&mut self.pieces).into_iter().partition(|piece| pays(&piece.seen));
        self.pieces = keep;
        drop
    }
}

impl Piece {
    fn new(target: usize, range: AddressRange, page: u64) -> Self {
        let pages = range.bytes().0 / page;
        let stripes: Vec<AddressRange> = if pages <= STRIPE * STRIPES {
            vec![range]
        } else {
            (0..STRIPES)
                .map(|i| range.start + i * pages / STRIPES * page)
                .map(|start| AddressRange { start, end: start + STRIPE * page })
                .collect()
        };
        let watched: u64 = stripes.iter().map(|stripe| stripe.bytes().0 / page).sum();
        Self { target, range, seen: Seen::default(), stripes, merged: vec![false; watched as usize] }
    }
}
