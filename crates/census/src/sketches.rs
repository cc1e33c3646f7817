//! A sample of what each process holds, from an index.

use crate::decide::sketch::{Held, Sketch, rank};
use crate::index::Index;
use crate::survey::Survey;
use pagefold_base::{Fingerprint, PageClass, Pages, ProcessId};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// What everybody holds whose pages could be listed, witnesses apart: what held still and is no zeros, which is what
/// classifying leaves in an index. Under the census's key, by halves of fingerprints, which is all that is known of pages
/// that are remembered.
pub(crate) fn sketches(survey: &Survey, index: &Index) -> BTreeMap<ProcessId, Held> {
    let pages = |subject: usize| Pages(index.pages_of(subject).len() as u64);
    let is_seen = |subject: &usize| {
        let unlisted = index.unlisted().iter().any(|(unlisted, _)| unlisted == subject);
        !unlisted && !survey.subjects[*subject].witness
    };
    let subjects: Vec<usize> = (0..survey.subjects.len()).filter(is_seen).collect();
    // One asks for a page's process, a search, and its class, a cache miss, only where somebody's sample may have it.
    let least = subjects.iter().filter(|subject| pages(**subject) > Pages::ZERO);
    let least = least.map(|subject| Sketch::least(pages(*subject))).min().unwrap_or(0);
    let mut kept: Vec<(usize, Fingerprint, bool)> = index
        .entries
        .par_iter()
        .filter(|entry| entry.fingerprint() != Fingerprint::ZERO_PAGE)
        .map(|entry| (Fingerprint::of_half(entry.fingerprint().half()), entry.ordinal))
        .filter(|&(content, _)| rank(content) >= least)
        .map(|(content, ordinal)| (index.subject(ordinal), content, ordinal))
        .filter(|&(subject, content, _)| rank(content) >= Sketch::least(pages(subject)))
        // What several map since a fork is the first one's: they cannot merge it with each other.
        .filter(|&(.., ordinal)| index.frame(ordinal) == ordinal)
        .map(|(subject, content, ordinal)| (subject, content, index.mark(ordinal).class() == Some(PageClass::Merged)))
        .collect();
    kept.par_sort_unstable();
    let of = |subject: usize| {
        let first = kept.partition_point(|&(whose, ..)| whose < subject);
        let own = kept[first..].iter().take_while(move |&&(whose, ..)| whose == subject);
        let contents = own.map(|&(_, fingerprint, merged)| (fingerprint, merged));
        let all = Sketch::of(pages(subject), contents.clone().map(|(content, _)| content));
        let unmerged = contents.filter(|&(_, merged)| !merged).map(|(content, _)| content);
        Held { all, unmerged: Sketch::of(pages(subject), unmerged) }
    };
    subjects.into_iter().map(|subject| (survey.subjects[subject].process.id, of(subject))).collect()
}
