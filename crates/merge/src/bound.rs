//! What of a plan is kept where KSM may take so much metadata and no more: what gives back most for it, together with
//! what that merges with.
//!
//! What is worth least is left out, some of it at a time, and what the rest is worth without it is reckoned anew, so
//! that who has lost its partners is next. What is kept at the end gives back more than the metadata that it takes.

use crate::decide::plan::Plan;
use pagefold_base::ksm::RMAP_ITEM_BYTES;
use pagefold_base::{AddressRange, Bytes, PageClass, Pages, ProcessId};
use pagefold_census::choose::each_page;
use pagefold_census::group;
use pagefold_census::index::Index;
use pagefold_census::results::Census;
use std::collections::BTreeMap;

/// One of so many parts of what is too much is left out before the rest is reckoned anew.
const ROUND: u64 = 4;

/// A page that comes back: what its group shares among its pages.
const WHOLE: u64 = 64;

/// Keep a plan to ranges in which ksmd has no more pages to look at than its metadata allows, those apart that are
/// enrolled already. The prediction becomes that of the ranges that stay.
pub fn keep_within(plan: &mut Plan, census: &Census, index: &Index, metadata: Bytes) {
    let most = Pages(metadata.0 / RMAP_ITEM_BYTES);
    let mut parts = Parts::of(plan, census, index);
    if parts.pages() <= most {
        return;
    }
    let groups = Groups::of(&parts, census, index);
    loop {
        let worth = groups.worth(&parts);
        let least_first = parts.by_worth(&worth);
        let too_many = parts.pages().saturating_sub(most);
        let wanted = Pages(too_many.0.div_ceil(ROUND));
        let loses =
            |part: &&usize| worth[**part] * index.page_len() / WHOLE <= parts.all[**part].pages.0 * RMAP_ITEM_BYTES;
        let mut gone = Pages::ZERO;
        let out: Vec<usize> = least_first
            .iter()
            .take_while(|part| {
                let goes = gone < wanted || wanted == Pages::ZERO && loses(part);
                gone += parts.all[**part].pages;
                goes
            })
            .copied()
            .collect();
        if out.is_empty() {
            break;
        }
        out.into_iter().for_each(|part| parts.all[part].kept = false);
    }
    let mut left_out: BTreeMap<ProcessId, Vec<AddressRange>> = BTreeMap::new();
    for part in parts.all.iter().filter(|part| !part.kept) {
        left_out.entry(census.subjects[part.subject].process.id).or_default().push(part.range);
    }
    for (process, ranges) in left_out {
        plan.leave_out(process, ranges);
    }
}

/// A range of a plan. None is cut: that would add regions and split huge pages.
struct Part {
    subject: usize,
    range: AddressRange,
    /// Whether it is enrolled already.
    enrolled: bool,
    /// Pages in it of which ksmd would take note.
    pages: Pages,
    /// Those of them that hold zeros and should merge.
    zeros: Pages,
    kept: bool,
}

/// All of a plan, in the order of subjects and addresses.
struct Parts {
    all: Vec<Part>,
    /// Where those of each subject begin, and the last ones end.
    firsts: Vec<usize>,
}

impl Parts {
    fn of(plan: &Plan, census: &Census, index: &Index) -> Self {
        let mut parts = Self { all: Vec::new(), firsts: Vec::new() };
        for (subject, seen) in census.subjects.iter().enumerate() {
            let mut at = parts.all.len();
            parts.firsts.push(at);
            let target = plan.targets.iter().find(|target| target.process.id == seen.process.id);
            let ranges = target.map_or(&[][..], |target| &target.ranges);
            parts.all.extend(ranges.iter().map(|planned| Part {
                subject,
                range: planned.range,
                enrolled: planned.enrolled,
                pages: Pages::ZERO,
                zeros: Pages::ZERO,
                kept: true,
            }));
            for (_, ordinal, address) in each_page(index, &index.pages_of(subject)) {
                while parts.all.get(at).is_some_and(|part| part.range.end <= address) {
                    at += 1;
                }
                let Some(part) = parts.all.get_mut(at).filter(|part| part.range.start <= address) else { continue };
                let mark = index.mark(ordinal);
                let Some(class) = mark.class().filter(|class| *class != PageClass::Merged) else { continue };
                part.pages.0 += u64::from(!part.enrolled);
                part.zeros.0 += u64::from(class == PageClass::Zero && mark.is_covered());
            }
        }
        parts.firsts.push(parts.all.len());
        parts
    }

    fn at(&self, subject: usize, address: u64) -> Option<usize> {
        let (first, end) = (self.firsts[subject], self.firsts[subject + 1]);
        let at = first + self.all[first..end].partition_point(|part| part.range.end <= address);
        (at < end && self.all[at].range.start <= address).then_some(at)
    }

    /// Pages of those that are kept of which ksmd would take note.
    fn pages(&self) -> Pages {
        self.all.iter().filter(|part| part.kept).map(|part| part.pages).sum()
    }

    /// Those that are kept and take metadata: what is worth least for it first, and of the same the last.
    fn by_worth(&self, worth: &[u64]) -> Vec<usize> {
        let of = |part: usize, other: usize| u128::from(worth[part]) * u128::from(self.all[other].pages.0);
        let takes = |part: &usize| self.all[*part].kept && self.all[*part].pages > Pages::ZERO;
        let mut order: Vec<usize> = (0..self.all.len()).filter(takes).collect();
        order.sort_unstable_by(|&a, &b| of(a, b).cmp(&of(b, a)).then(b.cmp(&a)));
        order
    }
}

/// The groups of equal pages that should merge and can free anything, each by the parts that its pages lie in. Of pages
/// that have one frame since a fork each counts, but for groups of one frame.
#[derive(Default)]
struct Groups {
    members: Vec<u32>,
    /// How many each has, and whether any is merged already.
    groups: Vec<(u32, bool)>,
}

impl Groups {
    fn of(parts: &Parts, census: &Census, index: &Index) -> Self {
        let domains = group::domain_numbers(census.subjects.iter().map(|subject| &subject.domain));
        let found = group::walk(index, &domains, |groups: &mut Self, _, members| {
            let before = groups.members.len();
            let merged = members.iter().any(|member| member.merged);
            if !merged && members.iter().all(|member| member.frame == members[0].frame) {
                return;
            }
            let merges = |member: &&group::Member| !member.merged && index.mark(member.ordinal).is_covered();
            groups.members.extend(members.iter().filter(merges).filter_map(|member| {
                let (.., address) = index.place(member.ordinal)?;
                Some(parts.at(member.subject, address)? as u32)
            }));
            let count = groups.members.len() - before;
            if count > 0 {
                groups.groups.push((count as u32, merged));
            }
        });
        found.into_iter().fold(Self::default(), |mut all, more| {
            all.members.extend(more.members);
            all.groups.extend(more.groups);
            all
        })
    }

    /// What each part is worth beside those that are kept: of n equal pages each stands for `1 - 1/n`, and for a whole
    /// one where one is merged already, as do zeros.
    fn worth(&self, parts: &Parts) -> Vec<u64> {
        let mut worth: Vec<u64> = parts.all.iter().map(|part| part.zeros.0 * WHOLE).collect();
        let mut rest = &self.members[..];
        for &(members, merged) in &self.groups {
            let (own, others) = rest.split_at(members as usize);
            rest = others;
            let kept = || own.iter().map(|&part| part as usize).filter(|&part| parts.all[part].kept);
            let each = match kept().count() as u64 {
                0 => continue,
                _ if merged => WHOLE,
                count => (count - 1) * WHOLE / count,
            };
            kept().for_each(|part| worth[part] += each);
        }
        worth
    }
}
