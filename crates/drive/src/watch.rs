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
use pagefold_host::{Host, Process};
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
    began: Instant,
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
        let began = Instant::now();
        let last = plan.targets.iter().map(|target| (verify::ticks(host, target), began)).collect();
        Self { host, pieces, last, ran: false, began }
    }

    /// Whether any target has run since the watch began. One that does not run writes nothing.
    pub fn ran(&mut self, plan: &Plan) -> bool {
        let moved = |(target, (before, _)): (_, &(Reading<u64>, _))| {
            let now = verify::ticks(self.host, target);
            now.is_ok() && now != *before
        };
        self.ran = self.ran || plan.targets.iter().zip(&self.last).any(moved);
        self.ran
    }

    /// What was seen of all pieces.
    pub fn seen(&self) -> Seen {
        self.pieces.iter().fold(Seen::default(), |sum, piece| sum + piece.seen)
    }

    /// Look again at the pages of those targets that have run since the last look, and at the end of all that ever ran.
    pub fn look(&mut self, plan: &Plan, at_the_end: bool) -> Reading<()> {
        let looked = Instant::now();
        let elapsed: Vec<Option<Duration>> = plan
            .targets
            .iter()
            .zip(&mut self.last)
            .map(|(target, (before, then))| {
                // A process that ended wrote nothing; all of it went away.
                let ticks = verify::ticks(self.host, target);
                let ever_ran = at_the_end && *then > self.began;
                let moved = ticks.is_ok() && (ticks != *before || ever_ran);
                *before = ticks;
                moved.then(|| looked - std::mem::replace(then, looked))
            })
            .collect();
        self.ran |= elapsed.iter().any(Option::is_some);
        let page = self.host.page_size().bytes();
        // A page of which nothing is known now is taken to be as it was.
        let mut now: Vec<Vec<bool>> = self.pieces.iter().map(|piece| piece.merged.clone()).collect();
        let mut frames: Vec<(Pfn, usize, usize)> = Vec::new();
        let mut first = 0;
        for pieces in self.pieces.chunk_by(|a, b| a.target == b.target) {
            let target = pieces[0].target;
            if elapsed[target].is_some()
                && let Ok(handle) = verify::open(self.host, &plan.targets[target])
            {
                for (piece, number) in pieces.iter().zip(first..) {
                    piece.look(&*handle, page, &mut |at, frame| {
                        now[number][at] = false;
                        frames.extend(frame.map(|frame| (frame, number, at)));
                    });
                }
            }
            first += pieces.len();
        }
        frames.sort_unstable();
        let numbers: Vec<Pfn> = frames.iter().map(|&(frame, ..)| frame).collect();
        let flags = self.host.frame_flags(&numbers)?;
        for (&(_, piece, at), flags) in frames.iter().zip(&flags) {
            now[piece][at] = flags.is_ksm() || flags.is_zero_page();
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

    /// Give back pieces that could not be withdrawn yet.
    pub fn keep(&mut self, pieces: impl IntoIterator<Item = Piece>) {
        self.pieces.extend(pieces);
        self.pieces.sort_by_key(|piece| (piece.target, piece.range));
    }

    /// Take out the pieces that do not pay, and at the end those of which nothing is merged: they were written before
    /// anybody looked, or lost their partners, and would only be scanned.
    pub fn withdraw(&mut self, pays: impl Fn(&Seen) -> bool, at_the_end: bool) -> Vec<Piece> {
        let looked_at = |piece: &Piece| self.last[piece.target].1 > self.began;
        let idle = |piece: &Piece| at_the_end && looked_at(piece) && !piece.merged.contains(&true);
        let keep = |piece: &Piece| pays(&piece.seen) && !idle(piece);
        let (keep, drop) = std::mem::take(&mut self.pieces).into_iter().partition(keep);
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

    /// Look at the watched pages that are not swapped out, which is not to be written: `note` gets the position of each and
    /// its frame, if others map that too.
    fn look(&self, handle: &dyn Process, page: u64, note: &mut dyn FnMut(usize, Option<Pfn>)) {
        let mut position = 0;
        for stripe in &self.stripes {
            let mappings = handle.mappings(*stripe).unwrap_or_default();
            for (mapping, at) in mappings.iter().zip(position..).filter(|(mapping, _)| !mapping.swapped) {
                let shared = mapping.present && !mapping.file && !mapping.exclusive;
                note(at, mapping.frame.filter(|_| shared));
            }
            position += (stripe.bytes().0 / page) as usize;
        }
    }
}
