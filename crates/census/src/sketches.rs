//! Sketches of the contents of each process, made from an index.

use crate::decide::sketch::{ContentSketches, Sketch, rank};
use crate::index::PageIndex;
use crate::scan_scope::ScanScope;
use pagefold_base::{Fingerprint, PageClass, Pages, ProcessId};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// Sketches the selected processes whose pages could be listed. The sketches include stable pages other than zero
/// pages, which are the entries that classification leaves in an index. They use halves of the census's fingerprints,
/// because cached pages have no more.
pub(crate) fn sketch_processes(scope: &ScanScope, index: &PageIndex) -> BTreeMap<ProcessId, ContentSketches> {
    let pages = |subject: usize| Pages(index.subject_ordinals(subject).len() as u64);
    let is_sketched = |subject: &usize| {
        let unlisted = index.unlisted_subjects().iter().any(|(unlisted, _)| unlisted == subject);
        !unlisted && !scope.subjects[*subject].is_foreign
    };
    let subjects: Vec<usize> = (0..scope.subjects.len()).filter(is_sketched).collect();
    // Finding the process of a page takes a search and its class a cache miss, so the rank is checked first.
    let nonempty = subjects.iter().filter(|subject| pages(**subject) > Pages::ZERO);
    let min_rank = nonempty.map(|subject| Sketch::min_rank_for(pages(*subject))).min().unwrap_or(0);
    let mut sketched: Vec<(usize, Fingerprint, bool)> = index
        .entries
        .par_iter()
        .filter(|entry| entry.fingerprint() != Fingerprint::ZERO_PAGE)
        .map(|entry| (Fingerprint::from_half(entry.fingerprint().to_half()), entry.ordinal))
        .filter(|&(content, _)| rank(content) >= min_rank)
        .map(|(content, ordinal)| (index.subject_of_page(ordinal), content, ordinal))
        .filter(|&(subject, content, _)| rank(content) >= Sketch::min_rank_for(pages(subject)))
        // A frame shared since a fork counts for its first process only, because its mappings cannot merge with each
        // other.
        .filter(|&(.., ordinal)| index.first_page_of_frame(ordinal) == ordinal)
        .map(|(subject, content, ordinal)| (subject, content, index.mark(ordinal).class() == Some(PageClass::Merged)))
        .collect();
    sketched.par_sort_unstable();
    let sketch = |subject: usize| {
        let first = sketched.partition_point(|&(owner, ..)| owner < subject);
        let entries = sketched[first..].iter().take_while(move |&&(owner, ..)| owner == subject);
        let contents = entries.map(|&(_, fingerprint, merged)| (fingerprint, merged));
        let all = Sketch::from_contents(pages(subject), contents.clone().map(|(content, _)| content));
        let unmerged = contents.filter(|&(_, merged)| !merged).map(|(content, _)| content);
        ContentSketches { all, unmerged: Sketch::from_contents(pages(subject), unmerged) }
    };
    subjects.into_iter().map(|subject| (scope.subjects[subject].process.id, sketch(subject))).collect()
}
