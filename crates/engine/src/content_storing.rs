//! Store, the step of a merge that writes contents to the store of the domain and publishes their slots in the index.

use crate::EngineState;
use crate::memory;
use crate::merge_pass::unless_blocked;
use crate::run_selection::{PartnerPages, ScannedPage, SlotPlacement};
use crate::statistics::MergeCounters;
use crate::write_exclusion::WriteExclusion;
use pagefold_base::AddressRange;
use pagefold_sys::fault;
use std::io;
use std::ops::Range;

/// Contents that are stored at a time. Contents that another member stores at the same time are stored for nothing.
const CONTENTS_PER_STORE_CHUNK: usize = 64;

/// A content to store: its order, a page that contains it, and the slot reserved for it.
#[derive(Clone, Copy, Debug)]
pub struct ContentToStore {
    pub order: u32,
    source_page: ScannedPage,
    reserved_slot: u32,
}

impl ContentToStore {
    /// Whether the content is stored in its reserved slot.
    pub fn is_in_reserved_slot(&self, slot: Option<u32>) -> bool {
        slot == Some(self.reserved_slot)
    }
}

impl EngineState {
    /// The contents to store of each batch, with slots in the same order, contiguous like the contents. If there are
    /// too few slots, the last contents are left out.
    pub fn reserve_slots(
        &self,
        partners: &PartnerPages,
        batches: &[Vec<Range<usize>>],
        counters: &mut MergeCounters,
    ) -> io::Result<Vec<Vec<ContentToStore>>> {
        // The first page of each content: later pages with the same order number have the same content.
        let mut has_source = vec![false; partners.content_count as usize];
        let mut first_page = |index: usize| match partners.placements[index] {
            SlotPlacement::ToStore(order) if !std::mem::replace(&mut has_source[order as usize], true) => {
                Some((order, partners.pages[index]))
            }
            _ => None,
        };
        let batch_contents =
            |batch: &Vec<Range<usize>>| batch.iter().cloned().flatten().filter_map(&mut first_page).collect();
        let contents: Vec<Vec<(u32, ScannedPage)>> = batches.iter().map(batch_contents).collect();
        let content_count = has_source.iter().filter(|&&has_source| has_source).count() as u32;
        let reserved = match content_count {
            0 => Vec::new(),
            content_count => unless_blocked(self.domain.reserve_slots(content_count), counters)?.unwrap_or_default(),
        };
        let mut reserved = reserved.into_iter().flatten();
        let slots: Vec<Option<u32>> =
            has_source.into_iter().map(|has_source| has_source.then(|| reserved.next()).flatten()).collect();
        let with_slot = |(order, source_page): (u32, ScannedPage)| {
            Some(ContentToStore { order, source_page, reserved_slot: slots[order as usize]? })
        };
        Ok(contents.into_iter().map(|batch| batch.into_iter().filter_map(with_slot).collect()).collect())
    }

    /// Store contents, and record the slot of each, by its order number. Chunks are stored in order, so that contents
    /// stay adjacent. If another member has stored a chunk meanwhile, this member continues at a random position in the
    /// rest.
    pub fn store_contents(
        &self,
        contents: &[ContentToStore],
        exclusion: &WriteExclusion<'_>,
        stored: &mut [Option<u32>],
    ) {
        let page_bytes = self.domain.page_bytes();
        let is_adjacent = |a: &ContentToStore, b: &ContentToStore| {
            a.source_page.address + page_bytes == b.source_page.address && a.reserved_slot + 1 == b.reserved_slot
        };
        let chunks: Vec<&[ContentToStore]> =
            contents.chunk_by(is_adjacent).flat_map(|run| run.chunks(CONTENTS_PER_STORE_CHUNK)).collect();
        // Random numbers of this member (D. Knuth's MMIX generator, TAOCP 3.3.4); otherwise all members would continue
        // at the same chunk.
        let mut random = self.tag_number;
        let mut draw_position = |count: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as usize % count.max(1)
        };
        let mut pending = vec![&chunks[..]];
        while let Some(chunks) = pending.pop() {
            let Some((chunk, rest)) = chunks.split_first() else { continue };
            let slots = self.store_chunk(chunk, exclusion);
            let is_only_writer =
                chunk.iter().zip(&slots).all(|(content, &slot)| slot.is_none() || content.is_in_reserved_slot(slot));
            for (content, slot) in chunk.iter().zip(slots) {
                stored[content.order as usize] = slot;
            }
            let (deferred, next) = rest.split_at(if is_only_writer { 0 } else { draw_position(rest.len()) });
            pending.extend([deferred, next]);
        }
    }

    /// Store adjacent contents, unless all of them are stored already. Returns the slot of each content.
    fn store_chunk(&self, chunk: &[ContentToStore], exclusion: &WriteExclusion<'_>) -> Vec<Option<u32>> {
        let (page_bytes, index) = (self.domain.page_bytes(), &self.domain.index);
        let stored_slot =
            |content: &ContentToStore| index.state(content.source_page.index_entry).mappable_slot().map(Some);
        if let Some(slots) = chunk.iter().map(stored_slot).collect() {
            return slots;
        }
        let start = chunk[0].source_page.address;
        let range = AddressRange { start, end: start + chunk.len() as u64 * page_bytes };
        let Ok(frozen) = exclusion.freeze_to_read(range) else { return vec![None; chunk.len()] };
        // SAFETY: these pages were scanned, so they are resident, and no thread writes to or unmaps them meanwhile.
        let bytes = unsafe { memory::range_bytes(range) };
        // They may have been written since the scan, unless the caller promised otherwise.
        let has_scanned_content = |(content, bytes): (&ContentToStore, &[u8])| {
            self.hasher.fingerprint(bytes) == index.fingerprint(content.source_page.index_entry)
        };
        let unchanged = frozen.is_unchanged_since_scan()
            || chunk.iter().zip(bytes.chunks_exact(page_bytes as usize)).all(has_scanned_content);
        if !unchanged || self.domain.store.write_slots(chunk[0].reserved_slot, bytes).is_err() {
            return vec![None; chunk.len()];
        }
        drop(frozen);
        fault::point("between storing and publishing");
        let slots: Vec<_> = chunk
            .iter()
            .map(|content| index.publish(content.source_page.index_entry, content.reserved_slot).ok())
            .collect();
        // If another member stored a content meanwhile, the copy in this member's slot is useless, and no index entry
        // names it. Free its memory now if possible; its slot becomes free when the references are rebuilt.
        let slot_uses: Vec<(u32, bool)> = chunk
            .iter()
            .zip(&slots)
            .map(|(content, &slot)| (content.reserved_slot, content.is_in_reserved_slot(slot)))
            .collect();
        for run in slot_uses.chunk_by(|a, b| a.1 == b.1).filter(|uses| !uses[0].1) {
            let first = run[0].0;
            let _ = self.domain.store.punch_slots(first..first + run.len() as u32);
        }
        slots
    }
}
