//! Contents that a plan counts on, page by page, by which one can tell afterwards why some gave back less than they
//! should: their pages were written, or withdrawn, or ended with their process, and left their partners alone.
//!
//! All contents are followed where the plan has few pages, and what is told is exact. Of a larger plan it is a sample
//! of contents by their fingerprints, which are as good as random numbers; of a content of many pages it is a sample of
//! its pages, each of which stands for its share. So does each page of zeros.

use crate::decide::outcome::{Fate, Fates};
use crate::decide::plan::Plan;
use pagefold_base::{Absent, AddressRange, Fingerprint, PageClass, Pfn, ProcessId, Reading};
use pagefold_census::choose::each_page;
use pagefold_census::group;
use pagefold_census::group::Member;
use pagefold_census::index::{Index, Mark};
use pagefold_census::results::Census;
use pagefold_host::{Host, PageContent, Process, Run, Way};
use pagefold_sys::fingerprint::Hasher;

/// How many pages are followed, about: half a GiB of them. To look at them takes some hundredths of a second.
const PROBES: u64 = 1 << 17;

/// Pages of which page tables are read at once at most, and those between two that are read along.
const SPAN: u64 = 1 << 16;
const GAP: u64 = 512;

/// A content of more pages is not followed as a whole in a sample.
const MANY: usize = 16;

/// A content that is followed, or a page of one.
#[derive(Debug)]
struct Followed {
    fingerprint: Fingerprint,
    /// The frames that it should give back.
    frees: f64,
    /// Its pages.
    pages: Vec<(ProcessId, u64)>,
}

/// A page that is looked at again.
struct Page {
    process: ProcessId,
    address: u64,
    /// The number of its content.
    content: usize,
    /// The frame, if it is merged with some content.
    frame: Option<Pfn>,
    /// What became of it, once that is known.
    fate: Option<Fate>,
}

/// Contents of a plan.
#[derive(Debug)]
pub struct Probes {
    hasher: Hasher,
    followed: Vec<Followed>,
}

impl Probes {
    /// Choose some of the contents that should merge by a plan of this census, which was taken under the hasher's key.
    pub fn of(plan: &Plan, census: &Census, index: &Index, hasher: &Hasher) -> Self {
        let step = plan.predicted.merging.0.div_ceil(PROBES).max(1);
        let ranges = |id| {
            let target = plan.targets.iter().find(|target| target.process.id == id);
            target.map(|target| target.ranges.iter().map(|planned| planned.range).collect()).unwrap_or_default()
        };
        let planned: Vec<Vec<AddressRange>> =
            census.subjects.iter().map(|subject| ranges(subject.process.id)).collect();
        let merges = |class: PageClass| match class {
            PageClass::DuplicateForeign => census.across_domains,
            class => class == PageClass::Zero || class.is_duplicate(),
        };
        let may =
            |mark: Mark| (plan.whole || mark.is_covered()) && !mark.is_forbidden() && mark.class().is_some_and(merges);
        let is_planned = |subject: usize, address: u64| {
            let ranges = &planned[subject];
            let inside = ranges.get(ranges.partition_point(|range| range.end <= address));
            inside.is_some_and(|range| range.contains(address))
        };
        let address = |member: &Member| index.place(member.ordinal).map(|(.., address)| address);
        let joins = |member: &Member| {
            may(index.mark(member.ordinal))
                && address(member).is_some_and(|address| is_planned(member.subject, address))
        };
        let domains = group::domain_numbers(census.subjects.iter().map(|subject| &subject.domain));
        let within_domains = !census.across_domains && plan.whole;
        let chosen = group::walk(index, &domains, |chosen: &mut Vec<Followed>, start, members| {
            let fingerprint = index.paired()[start].fingerprint();
            // The sum of products ends in bits that are as random as any.
            let whole = step == 1 || members.len() <= MANY;
            if whole && !fingerprint.0.is_multiple_of(step) {
                return;
            }
            let mut follow = |members: &[Member]| {
                let frees = group::freed(index, census.sharing, members, joins).0 as f64;
                let joining = members.iter().filter(|member| joins(member));
                let pages: Vec<(ProcessId, u64)> = joining
                    .filter_map(|member| Some((census.subjects[member.subject].process.id, address(member)?)))
                    .collect();
                if frees > 0.0 && whole {
                    chosen.push(Followed { fingerprint, frees, pages });
                } else if frees > 0.0 {
                    let share = frees / pages.len() as f64;
                    let some = pages.into_iter().skip((fingerprint.0 % step) as usize).step_by(step as usize);
                    chosen.extend(some.map(|page| Followed { fingerprint, frees: share, pages: vec![page] }));
                }
            };
            if within_domains {
                members.chunk_by(|a, b| a.domain == b.domain).for_each(follow);
            } else {
                follow(members);
            }
        });
        let mut followed: Vec<Followed> = chosen.into_iter().flatten().collect();
        // Pages of zeros that are not merged are in no group.
        let mut zeros = 0;
        for (number, subject) in census.subjects.iter().enumerate().filter(|&(number, _)| !planned[number].is_empty()) {
            for (_, ordinal, address) in each_page(index, &index.pages_of(number)) {
                let mark = index.mark(ordinal);
                let zero = mark.class() == Some(PageClass::Zero) && may(mark) && index.frame(ordinal) == ordinal;
                if zero && is_planned(number, address) {
                    if zeros % step == 0 {
                        let pages = vec![(subject.process.id, address)];
                        followed.push(Followed { fingerprint: Fingerprint::ZERO_PAGE, frees: 1.0, pages });
                    }
                    zeros += 1;
                }
            }
        }
        Self { hasher: hasher.clone(), followed }
    }

    /// What became of them. `given_up` names for each process the ranges that were given up, and why.
    pub fn look(&self, host: &dyn Host, given_up: impl Fn(ProcessId) -> Vec<(AddressRange, Fate)>) -> Reading<Fates> {
        let of = |(content, followed): (usize, &Followed)| {
            let page = move |&(process, address): &(ProcessId, u64)| Page {
                process,
                address,
                content,
                frame: None,
                fate: Some(Fate::Ended),
            };
            followed.pages.iter().map(page).collect::<Vec<_>>()
        };
        let mut pages: Vec<Page> = self.followed.iter().enumerate().flat_map(of).collect();
        pages.sort_unstable_by_key(|page| (page.process, page.address));
        self.each_process(host, &mut pages, |handle, pages| self.find(host, handle, pages))?;
        // What was written may have merged since with something else. But pages that were equal and have one frame now
        // are as they were.
        let known = |(at, page): (usize, &Page)| Some((self.followed[page.content].fingerprint, page.frame?, at));
        let mut merged: Vec<(Fingerprint, Pfn, usize)> = pages.iter().enumerate().filter_map(known).collect();
        merged.sort_unstable();
        for same in merged.chunk_by(|a, b| (a.0, a.1) == (b.0, b.1)).filter(|same| same.len() > 1) {
            same.iter().for_each(|&(.., at)| pages[at].fate = Some(Fate::Merged));
        }
        self.each_process(host, &mut pages, |handle, pages| self.compare(handle, pages))?;
        let mut fates: Vec<Vec<Fate>> = vec![Vec::new(); self.followed.len()];
        for pages in pages.chunk_by(|a, b| a.process == b.process) {
            let given_up = given_up(pages[0].process);
            for page in pages {
                let reason = given_up.iter().find(|(range, _)| range.contains(page.address)).map(|&(_, reason)| reason);
                fates[page.content].push(match (page.fate.unwrap_or(Fate::Written), reason) {
                    (fate @ (Fate::Merged | Fate::Ended), _) => fate,
                    (fate, Some(Fate::Idle)) if fate != Fate::Alone => fate,
                    (fate, reason) => reason.unwrap_or(fate),
                });
            }
        }
        let mut sum = Fates::default();
        for (followed, fates) in self.followed.iter().zip(&fates) {
            sum.count(followed.frees, fates);
        }
        Ok(sum)
    }

    /// Look at the pages of each process that lives. Those of one that ends meanwhile have ended with it.
    fn each_process(
        &self,
        host: &dyn Host,
        pages: &mut [Page],
        look: impl Fn(&dyn Process, &mut [Page]) -> Reading<()>,
    ) -> Reading<()> {
        for pages in pages.chunk_by_mut(|a, b| a.process == b.process) {
            let process = pages[0].process;
            let handle = host
                .open(process.pid)
                .and_then(|handle| if handle.id() == process { Ok(handle) } else { Err(Absent::Vanished) });
            match handle.and_then(|handle| look(&*handle, pages)) {
                Err(Absent::Vanished) => pages.iter_mut().for_each(|page| page.fate = Some(Fate::Ended)),
                looked => looked?,
            }
        }
        Ok(())
    }

    /// What page tables tell of some pages of a process: of those that are in memory whether they are merged, and of
    /// the others their fate.
    fn find(&self, host: &dyn Host, handle: &dyn Process, pages: &mut [Page]) -> Reading<()> {
        let page_len = host.page_size().bytes();
        let mut shared: Vec<(Pfn, usize)> = Vec::new();
        let mut first = 0;
        while first < pages.len() {
            let start = pages[first].address;
            let near = |pair: &[Page]| pair[1].address - pair[0].address <= GAP * page_len;
            let reach =
                pages[first..].windows(2).take_while(|pair| near(pair) && pair[1].address - start < SPAN * page_len);
            let last = first + reach.count();
            let mappings = handle.mappings(AddressRange { start, end: pages[last].address + page_len })?;
            for (at, page) in pages.iter_mut().enumerate().take(last + 1).skip(first) {
                let mapping = mappings.get(((page.address - start) / page_len) as usize).copied().unwrap_or_default();
                page.fate = match mapping {
                    _ if mapping.swapped => Some(Fate::Swapped),
                    _ if mapping.present && !mapping.file => None,
                    _ => Some(Fate::Written),
                };
                shared.extend(
                    mapping.frame.filter(|_| page.fate.is_none() && !mapping.exclusive).map(|frame| (frame, at)),
                );
            }
            first = last + 1;
        }
        shared.sort_unstable();
        let frames: Vec<Pfn> = shared.iter().map(|&(frame, _)| frame).collect();
        for (&(frame, at), flags) in shared.iter().zip(host.frame_flags(&frames)?) {
            let page = &mut pages[at];
            if flags.is_ksm() {
                page.frame = Some(frame);
            } else if flags.is_zero_page() {
                let was_zero = self.followed[page.content].fingerprint == Fingerprint::ZERO_PAGE;
                page.fate = Some(if was_zero { Fate::Merged } else { Fate::Written });
            }
        }
        Ok(())
    }

    /// Tell by their contents the fate of those pages of a process of which it is not known.
    fn compare(&self, handle: &dyn Process, pages: &mut [Page]) -> Reading<()> {
        let open: Vec<usize> = (0..pages.len()).filter(|&at| pages[at].fate.is_none()).collect();
        let runs: Vec<Run> = open.iter().map(|&at| Run { address: pages[at].address, pages: 1, huge: false }).collect();
        handle.contents(Way::Memory { merged: false }, &runs, &mut |position, view| {
            let page = &mut pages[open[position]];
            let was = self.followed[page.content].fingerprint;
            let same = match view.content {
                PageContent::Bytes(bytes) => Fingerprint(self.hasher.fingerprint(bytes)) == was,
                PageContent::Fingerprint(fingerprint, _) => fingerprint == was,
                PageContent::Volatile | PageContent::Gone => false,
            };
            page.fate = Some(match (same, page.frame) {
                (true, Some(_)) => Fate::Merged,
                (true, None) => Fate::Alone,
                (false, _) => Fate::Written,
            });
        })
    }
}
