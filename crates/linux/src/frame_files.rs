//! `/proc/kpageflags` and `/proc/kpagecount`: one 64-bit word for each frame (fs/proc/page.c).

use crate::absence_reason;
use pagefold_base::{Absent, Pfn, Reading};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Unneeded words between two needed ones that are read rather than skipped. A `pread` costs as much as some tens of
/// words (measured: 14 M words/s in bulk, 3.4 M single reads/s).
const MAX_SKIPPED_WORDS: u64 = 16;

/// The maximum number of words in one read.
const MAX_WORDS_PER_READ: usize = 8192;

/// The two files, or why they cannot be opened.
#[derive(Debug)]
pub struct FrameFiles {
    flags: Reading<File>,
    mappings: Reading<File>,
}

impl FrameFiles {
    /// Open both files.
    pub fn open() -> Self {
        let open = |path| File::open(path).map_err(|error| absence_reason(&error));
        Self { flags: open("/proc/kpageflags"), mappings: open("/proc/kpagecount") }
    }

    /// The flags of ascending frames.
    pub fn flags(&self, frames: &[Pfn]) -> Reading<Vec<u64>> {
        read_words(self.flags.as_ref().map_err(Absent::clone)?, frames)
    }

    /// The number of mappings of ascending frames.
    pub fn mappings(&self, frames: &[Pfn]) -> Reading<Vec<u64>> {
        read_words(self.mappings.as_ref().map_err(Absent::clone)?, frames)
    }
}

/// The words of ascending frames. A frame beyond the end of memory has no word and reads as 0.
fn read_words(file: &File, frames: &[Pfn]) -> Reading<Vec<u64>> {
    let mut frame_words = Vec::with_capacity(frames.len());
    let mut buffer = Vec::new();
    for cluster in nearby_frames(frames) {
        let first = cluster[0].0;
        let span = (cluster[cluster.len() - 1].0 - first + 1) as usize;
        buffer.clear();
        buffer.resize(span * 8, 0);
        let mut filled = 0;
        while filled < buffer.len() {
            match file.read_at(&mut buffer[filled..], first * 8 + filled as u64) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) => return Err(absence_reason(&error)),
            }
        }
        let words = buffer.as_chunks::<8>().0;
        frame_words.extend(cluster.iter().map(|frame| u64::from_ne_bytes(words[(frame.0 - first) as usize])));
    }
    Ok(frame_words)
}

/// Group ascending frames into clusters, each for one read.
fn nearby_frames(frames: &[Pfn]) -> impl Iterator<Item = &[Pfn]> {
    let mut rest = frames;
    std::iter::from_fn(move || {
        let first = rest.first()?.0;
        let mut last = first;
        let end = rest
            .iter()
            .position(|frame| {
                let is_far = frame.0 > last + MAX_SKIPPED_WORDS || frame.0 - first >= MAX_WORDS_PER_READ as u64;
                last = frame.0;
                is_far
            })
            .unwrap_or(rest.len());
        let (cluster, after) = rest.split_at(end);
        rest = after;
        Some(cluster)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_bound_reads_and_keep_every_frame() {
        let check = |frames: &[u64], sizes: &[usize]| {
            let frames: Vec<Pfn> = frames.iter().copied().map(Pfn).collect();
            let clusters: Vec<&[Pfn]> = nearby_frames(&frames).collect();
            assert_eq!(clusters.concat(), frames);
            assert_eq!(clusters.iter().map(|cluster| cluster.len()).collect::<Vec<_>>(), sizes);
        };
        check(&[], &[]);
        check(&[5], &[1]);
        check(&[5, 5, 6, 22, 39], &[4, 1]);
        let dense: Vec<u64> = (0..20_000).collect();
        check(&dense, &[8192, 8192, 3616]);
    }
}
