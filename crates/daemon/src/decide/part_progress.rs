//! Progress of a scan that takes several censuses, because the process or its partner is too large for one.
//!
//! A scan visits the parts of a process in address order. The first scan only records their pages. Each later scan
//! compares every part with a partner, and with the parts of the same process behind it. A large partner is taken part
//! by part as well. Each part has a sketch of its contents from the last scan: parts that have too little in common to pay
//! for their comparison are not compared. What a part was found to hold stays cached in between, so a repeated part costs
//! a fraction. A process that fits into one census has one part, and its scan is complete after one census.
//!
//! Parts are ranges of addresses that the census itself limits by resident memory. A process may map or unmap memory
//! in between: the part is then shorter or longer, and the next one begins where it ended.

use pagefold_base::units::{AddressRange, Pages, ProcessId};
use pagefold_census::ScanPart;
use pagefold_census::decide::sketch::ContentSketches;

/// Repeated censuses of one part and its partner, where these have contents in common that are not stable yet.
const MAX_PART_REPEATS: u32 = 2;

/// What a census found of a process that was due.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PartResult {
    /// Where its part ended, if memory is left behind it.
    pub end: Option<u64>,
    /// The process of which one part was scanned beside it, and where that part ended, if memory is left behind it.
    pub partner: Option<(ProcessId, Option<u64>)>,
    /// Whether it found anything to merge.
    pub is_profitable: bool,
    /// Whether it found contents that are not stable yet.
    pub is_unstable: bool,
}

/// What follows a census in the scan of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextStep {
    /// The same part and partner again, once their contents are stable.
    Repeat,
    /// Another part or another partner.
    Continue,
    /// Nothing: all parts are scanned.
    Complete,
}

/// The sketches of a part of a process.
#[derive(Clone, Debug, PartialEq)]
pub struct PartSketches {
    /// Its addresses.
    pub range: AddressRange,
    /// Its sketches.
    pub sketches: ContentSketches,
}

/// The sketches of a process with this many pages.
pub fn joined_sketches(parts: &[PartSketches], pages: Pages) -> Option<ContentSketches> {
    let sketches = parts.iter().map(|part| part.sketches.clone());
    sketches.reduce(|sum, part| ContentSketches {
        all: sum.all.joined(&part.all, pages),
        unmerged: sum.unmerged.joined(&part.unmerged, pages),
    })
}

/// Where the next part of a process at or behind an address begins that is worth a comparison with a part that has these
/// sketches; `None` if there is none.
pub type NextPart<'f> = &'f dyn Fn(Option<&ContentSketches>, ProcessId, u64) -> Option<u64>;

/// Progress of the current scan of a process.
#[derive(Clone, Debug, PartialEq)]
pub struct PartProgress {
    /// The current part. Its end is not known before it was scanned.
    part: AddressRange,
    /// The process that it is compared with next, and the address from which on.
    partner: Option<(ProcessId, u64)>,
    /// Censuses that repeated this part and partner.
    repeats: u32,
    /// Whether any part so far had something to merge.
    pub found_profitable: bool,
    /// Whether any part so far had contents that were not stable yet in its last census.
    pub found_unstable: bool,
    /// The parts so far, each with its sketches.
    pub sketches: Vec<PartSketches>,
}

impl Default for PartProgress {
    fn default() -> Self {
        Self {
            part: ScanPart::WHOLE.range,
            partner: None,
            repeats: 0,
            found_profitable: false,
            found_unstable: false,
            sketches: Vec::new(),
        }
    }
}

impl PartProgress {
    /// Whether no census of this scan is complete.
    pub fn is_at_start(&self) -> bool {
        self.part == ScanPart::WHOLE.range && self.partner.is_none() && self.repeats == 0
    }

    /// The addresses of the current part.
    pub fn part(&self) -> AddressRange {
        self.part
    }

    /// The process that the current part is compared with next, and the address from which on. It may be the process
    /// itself.
    pub fn partner(&self) -> Option<(ProcessId, u64)> {
        self.partner
    }

    /// Record a census of the current part. A first scan compares nothing.
    pub fn record(
        &mut self,
        process: ProcessId,
        result: &PartResult,
        is_first_scan: bool,
        next_part: NextPart<'_>,
    ) -> NextStep {
        self.found_profitable |= result.is_profitable;
        let was_at_start = self.is_at_start();
        if let Some(end) = result.end.filter(|end| *end > self.part.start) {
            self.part.end = end;
        }
        let rest = result.partner.and_then(|(partner, end)| Some((partner, end?)));
        let is_one_census = was_at_start && self.part == ScanPart::WHOLE.range && rest.is_none();
        let is_repeated = !is_first_scan && result.is_unstable && !is_one_census && self.repeats < MAX_PART_REPEATS;
        self.found_unstable |= result.is_unstable && !is_repeated;
        if is_first_scan {
            return self.finish_part();
        }
        if is_repeated {
            self.partner = self.partner.or(result.partner.map(|(partner, _)| (partner, 0)));
            self.repeats += 1;
            return NextStep::Repeat;
        }
        self.repeats = 0;
        match rest.and_then(|(partner, end)| Some((partner, next_part(self.current_sketches(), partner, end)?))) {
            Some(next) => {
                self.partner = Some(next);
                NextStep::Continue
            }
            None => self.finish_partner(process, result.partner.map(|(partner, _)| partner), next_part),
        }
    }

    /// The partner was lost: it has exited or may not be scanned any more.
    pub fn drop_partner(&mut self, process: ProcessId, next_part: NextPart<'_>) -> NextStep {
        // The census that was to judge the part again does not follow.
        self.found_unstable |= self.repeats > 0;
        self.repeats = 0;
        let partner = self.partner.map(|(partner, _)| partner);
        self.finish_partner(process, partner, next_part)
    }

    /// The sketches of the current part, once it was scanned.
    fn current_sketches(&self) -> Option<&ContentSketches> {
        self.sketches.last().filter(|part| part.range.start == self.part.start).map(|part| &part.sketches)
    }

    /// The current part was compared with all of a partner. The last partner is the rest of the process itself.
    fn finish_partner(&mut self, process: ProcessId, partner: Option<ProcessId>, next_part: NextPart<'_>) -> NextStep {
        if self.part.end == ScanPart::WHOLE.range.end || partner == Some(process) {
            return self.finish_part();
        }
        match next_part(self.current_sketches(), process, self.part.end) {
            Some(start) => {
                self.partner = Some((process, start));
                NextStep::Continue
            }
            None => self.finish_part(),
        }
    }

    fn finish_part(&mut self) -> NextStep {
        self.partner = None;
        if self.part.end == ScanPart::WHOLE.range.end {
            return NextStep::Complete;
        }
        self.part = AddressRange { start: self.part.end, end: ScanPart::WHOLE.range.end };
        NextStep::Continue
    }

    /// Add the sketches of a part. Those of an earlier census of the same part are replaced.
    pub fn add_sketches(&mut self, range: AddressRange, sketches: ContentSketches) {
        self.sketches.retain(|part| part.range.start != range.start);
        self.sketches.push(PartSketches { range, sketches });
    }
}
