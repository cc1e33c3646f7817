//! Contents that a plan counts on, followed page by page. They show afterwards why some contents freed fewer frames
//! than predicted: pages were written or unenrolled, or their process ended, and their partners had no duplicate left.
//!
//! A plan with few pages has all of its contents followed, and the result is exact. For a larger plan the fingerprints,
//! which are as good as random numbers, select a sample of contents. Of a content with many pages, a sample of its
//! pages is followed; each page stands for its share. Zero pages are sampled one by one too.

use crate::decide::outcome::{FrameFates, PageFate};
use crate::decide::plan::{MergePlan, PlanTarget};
use pagefold_base::{Absent, AddressRange, Fingerprint, PageClass, Pfn, ProcessId, Reading};
use pagefold_census::content_groups;
use pagefold_census::content_groups::GroupPage;
use pagefold_census::index::{PageIndex, PageMark};
use pagefold_census::range_selection::each_page;
use pagefold_census::results::Census;
use pagefold_host::page_state::{EntryState, FrameLookup, PageState, PageStates};
use pagefold_host::{Host, PageContent, PageRun, ProcessHandle, ReadMethod};
use pagefold_sys::fingerprint::Hasher;
use std::collections::BTreeMap;

/// Approximate maximum number of pages to follow: half a GiB. Checking them takes some hundredths of a second.
const MAX_PROBED_PAGES: u64 = 1 << 17;

/// Maximum span of one page table read, and the largest gap between two pages that the read includes.
const MAX_PAGEMAP_SPAN_PAGES: u64 = 1 << 16;
const MAX_PAGEMAP_GAP_PAGES: u64 = 512;

/// A content with more pages is sampled page by page when the plan is sampled.
const MAX_FULLY_PROBED_GROUP_PAGES: usize = 16;

/// A followed content, or one page of it.
#[derive(Debug)]
struct ProbedContent {
    fingerprint: Fingerprint,
    /// The frames that it should free.
    predicted_frames: f64,
    /// Its pages.
    pages: Vec<(ProcessId, u64)>,
}

/// A page that is checked again.
struct ProbedPage {
    process: ProcessId,
    address: u64,
    /// The position of its content in the list.
    content_position: usize,
    /// The frame, if the page is merged with any content.
    ksm_frame: Option<Pfn>,
    /// The fate of the page, once known.
    fate: Option<PageFate>,
}

/// Followed contents of a plan.
#[derive(Debug)]
pub struct MergeProbes {
    hasher: Hasher,
    contents: Vec<ProbedContent>,
}

impl MergeProbes {
    /// Choose contents that should merge by a plan of this census; the census used the hasher's key.
    pub fn choose(plan: &MergePlan, census: &Census, index: &PageIndex, hasher: &Hasher) -> Self {
        let chooser = ProbeChooser::new(plan, census, index);
        let mut contents = chooser.choose_contents();
        contents.extend(chooser.choose_zero_pages());
        Self { hasher: hasher.clone(), contents }
    }

    /// Stop following pages that the plan, as it is now, does not merge. Each of them reduces the frames that its
    /// content should free by one.
    pub fn retain_reachable(&mut self, plan: &MergePlan) {
        let ranges = |target: &PlanTarget| {
            let ranges = target.reachable_ranges(plan.whole_processes).map(|planned| planned.range);
            (target.process.id, AddressRange::union(ranges.collect()))
        };
        let planned: BTreeMap<ProcessId, Vec<AddressRange>> = plan.targets.iter().map(ranges).collect();
        let is_planned = |(process, address): &(ProcessId, u64)| {
            let Some(ranges) = planned.get(process) else { return false };
            let inside = ranges.get(ranges.partition_point(|range| range.end <= *address));
            inside.is_some_and(|range| range.contains(*address))
        };
        self.contents.retain_mut(|content| {
            let before = content.pages.len();
            content.pages.retain(is_planned);
            content.predicted_frames -= (before - content.pages.len()) as f64;
            content.predicted_frames > 0.0
        });
    }

    /// Find out what became of the pages. `given_up` returns the unenrolled ranges of a process, and why.
    pub fn determine_fates(
        &self,
        host: &dyn Host,
        given_up: impl Fn(ProcessId) -> Vec<(AddressRange, PageFate)>,
    ) -> Reading<FrameFates> {
        let probed_pages = |(content, probed): (usize, &ProbedContent)| {
            let page = move |&(process, address): &(ProcessId, u64)| ProbedPage {
                process,
                address,
                content_position: content,
                ksm_frame: None,
                fate: Some(PageFate::ProcessEnded),
            };
            probed.pages.iter().map(page).collect::<Vec<_>>()
        };
        let mut pages: Vec<ProbedPage> = self.contents.iter().enumerate().flat_map(probed_pages).collect();
        pages.sort_unstable_by_key(|page| (page.process, page.address));
        self.for_each_live_process(host, &mut pages, |handle, pages| self.check_mappings(host, handle, pages))?;
        // A written page may have merged since with another content. Pages that were equal and share one frame now are
        // unchanged.
        let ksm_page = |(position, page): (usize, &ProbedPage)| {
            Some((self.contents[page.content_position].fingerprint, page.ksm_frame?, position))
        };
        let mut merged: Vec<(Fingerprint, Pfn, usize)> = pages.iter().enumerate().filter_map(ksm_page).collect();
        merged.sort_unstable();
        for group in merged.chunk_by(|a, b| (a.0, a.1) == (b.0, b.1)).filter(|group| group.len() > 1) {
            group.iter().for_each(|&(.., position)| pages[position].fate = Some(PageFate::Merged));
        }
        self.for_each_live_process(host, &mut pages, |handle, pages| self.compare_contents(handle, pages))?;
        let mut fates: Vec<Vec<PageFate>> = vec![Vec::new(); self.contents.len()];
        for pages in pages.chunk_by(|a, b| a.process == b.process) {
            let given_up = given_up(pages[0].process);
            for page in pages {
                let reason = given_up.iter().find(|(range, _)| range.contains(page.address)).map(|&(_, reason)| reason);
                fates[page.content_position].push(match (page.fate.unwrap_or(PageFate::Written), reason) {
                    (fate @ (PageFate::Merged | PageFate::ProcessEnded), _) => fate,
                    (fate, Some(PageFate::UnenrolledUnmerged)) if fate != PageFate::UnchangedUnmerged => fate,
                    (fate, reason) => reason.unwrap_or(fate),
                });
            }
        }
        let mut sum = FrameFates::default();
        for (probed, fates) in self.contents.iter().zip(&fates) {
            sum.add_content(probed.predicted_frames, fates);
        }
        Ok(sum)
    }

    /// Visit the pages of each running process. Pages of a process that ends meanwhile get the fate `ProcessEnded`.
    fn for_each_live_process(
        &self,
        host: &dyn Host,
        pages: &mut [ProbedPage],
        visit: impl Fn(&dyn ProcessHandle, &mut [ProbedPage]) -> Reading<()>,
    ) -> Reading<()> {
        for pages in pages.chunk_by_mut(|a, b| a.process == b.process) {
            let process = pages[0].process;
            match pagefold_host::hold(host, process).and_then(|handle| visit(&*handle, pages)) {
                Err(Absent::Vanished) => pages.iter_mut().for_each(|page| page.fate = Some(PageFate::ProcessEnded)),
                result => result?,
            }
        }
        Ok(())
    }

    /// Read the page tables of some pages of a process: whether each resident page is merged, and the fate of all other
    /// pages.
    fn check_mappings(&self, host: &dyn Host, handle: &dyn ProcessHandle, pages: &mut [ProbedPage]) -> Reading<()> {
        let page_len = host.page_size().bytes();
        let mut states: PageStates<usize> = PageStates::default();
        let mut first = 0;
        while first < pages.len() {
            let start = pages[first].address;
            let is_near = |pair: &[ProbedPage]| pair[1].address - pair[0].address <= MAX_PAGEMAP_GAP_PAGES * page_len;
            let near_pairs = pages[first..]
                .windows(2)
                .take_while(|pair| is_near(pair) && pair[1].address - start < MAX_PAGEMAP_SPAN_PAGES * page_len);
            let last = first + near_pairs.count();
            let mappings = handle.mappings(AddressRange { start, end: pages[last].address + page_len })?;
            for (position, page) in pages.iter_mut().enumerate().take(last + 1).skip(first) {
                let mapping = mappings.get(((page.address - start) / page_len) as usize).copied().unwrap_or_default();
                page.fate = match EntryState::from_entry(&mapping, FrameLookup::Shared) {
                    EntryState::InFrame(frame) => {
                        states.push(frame, position);
                        None
                    }
                    EntryState::Known(PageState::Swapped) => Some(PageFate::Swapped),
                    EntryState::Known(PageState::Absent | PageState::File) => Some(PageFate::Written),
                    EntryState::Known(_) => None,
                };
            }
            first = last + 1;
        }
        states.resolve(host, |position, state| {
            let page = &mut pages[position];
            match state {
                PageState::Ksm(frame) => page.ksm_frame = Some(frame),
                PageState::ZeroPage { .. } => {
                    let was_zero = self.contents[page.content_position].fingerprint == Fingerprint::ZERO_PAGE;
                    page.fate = Some(if was_zero { PageFate::Merged } else { PageFate::Written });
                }
                _ => {}
            }
        })
    }

    /// Compare the contents of all pages whose fate is still unknown.
    fn compare_contents(&self, handle: &dyn ProcessHandle, pages: &mut [ProbedPage]) -> Reading<()> {
        let undecided: Vec<usize> = (0..pages.len()).filter(|&position| pages[position].fate.is_none()).collect();
        let runs: Vec<PageRun> = undecided
            .iter()
            .map(|&position| PageRun { address: pages[position].address, pages: 1, huge: false })
            .collect();
        handle.contents(ReadMethod::ProcMem { detect_merged: false }, &runs, &mut |number, view| {
            let page = &mut pages[undecided[number]];
            let expected = self.contents[page.content_position].fingerprint;
            let is_same = match view.content {
                PageContent::Bytes(bytes) => Fingerprint(self.hasher.fingerprint(bytes)) == expected,
                PageContent::Fingerprint(fingerprint, _) => fingerprint == expected,
                PageContent::Volatile | PageContent::NotResident => false,
            };
            page.fate = Some(match (is_same, page.ksm_frame) {
                (true, Some(_)) => PageFate::Merged,
                (true, None) => PageFate::UnchangedUnmerged,
                (false, _) => PageFate::Written,
            });
        })
    }
}

/// Chooses which contents of a plan are followed.
struct ProbeChooser<'a> {
    census: &'a Census,
    index: &'a PageIndex,
    is_whole: bool,
    /// One content in so many is followed.
    step: u64,
    /// The planned ranges of each subject.
    planned: Vec<Vec<AddressRange>>,
}

impl<'a> ProbeChooser<'a> {
    fn new(plan: &MergePlan, census: &'a Census, index: &'a PageIndex) -> Self {
        let ranges = |id| {
            let target = plan.targets.iter().find(|target| target.process.id == id);
            target.map(|target| target.ranges.iter().map(|planned| planned.range).collect()).unwrap_or_default()
        };
        Self {
            census,
            index,
            is_whole: plan.whole_processes,
            step: plan.predicted.merging.0.div_ceil(MAX_PROBED_PAGES).max(1),
            planned: census.subjects.iter().map(|subject| ranges(subject.process.id)).collect(),
        }
    }

    /// Whether a page with this mark should merge if it is in the plan.
    fn may_merge(&self, mark: PageMark) -> bool {
        let merges = |class: PageClass| match class {
            PageClass::DuplicateAcrossDomains => self.census.across_domains,
            class => class.is_mergeable(),
        };
        (self.is_whole || mark.is_covered()) && !mark.is_forbidden() && mark.class().is_some_and(merges)
    }

    fn is_planned(&self, subject: usize, address: u64) -> bool {
        let ranges = &self.planned[subject];
        let inside = ranges.get(ranges.partition_point(|range| range.end <= address));
        inside.is_some_and(|range| range.contains(address))
    }

    fn address(&self, page: &GroupPage) -> Option<u64> {
        self.index.locate(page.ordinal).map(|(.., address)| address)
    }

    /// Whether the plan merges a page.
    fn is_merging(&self, page: &GroupPage) -> bool {
        self.may_merge(self.index.mark(page.ordinal))
            && self.address(page).is_some_and(|address| self.is_planned(page.subject, address))
    }

    fn choose_contents(&self) -> Vec<ProbedContent> {
        let (census, index) = (self.census, self.index);
        let domains = content_groups::domain_numbers(census.subjects.iter().map(|subject| &subject.domain));
        let within_domains = !census.across_domains && self.is_whole;
        let chosen = content_groups::fold_groups(index, &domains, |chosen: &mut Vec<ProbedContent>, start, members| {
            let fingerprint = index.paired()[start].fingerprint();
            // The fingerprint is a sum of products; its last bits are as random as any.
            let is_followed_whole = self.step == 1 || members.len() <= MAX_FULLY_PROBED_GROUP_PAGES;
            if is_followed_whole && !fingerprint.0.is_multiple_of(self.step) {
                return;
            }
            if within_domains {
                let domains = members.chunk_by(|a, b| a.domain == b.domain);
                domains.for_each(|members| self.follow(fingerprint, members, is_followed_whole, chosen));
            } else {
                self.follow(fingerprint, members, is_followed_whole, chosen);
            }
        });
        chosen.into_iter().flatten().collect()
    }

    /// Follow a content: all of its pages, or some of them one by one.
    fn follow(
        &self,
        fingerprint: Fingerprint,
        members: &[GroupPage],
        is_followed_whole: bool,
        chosen: &mut Vec<ProbedContent>,
    ) {
        let is_merging = |page: &GroupPage| self.is_merging(page);
        let freed_frames = content_groups::freed_frames(self.index, self.census.sharing, members, is_merging).0 as f64;
        if freed_frames == 0.0 {
            return;
        }
        let id = |page: &GroupPage| self.census.subjects[page.subject].process.id;
        let merging = members.iter().filter(|page| is_merging(page));
        let pages: Vec<(ProcessId, u64)> = merging.filter_map(|page| Some((id(page), self.address(page)?))).collect();
        if is_followed_whole {
            chosen.push(ProbedContent { fingerprint, predicted_frames: freed_frames, pages });
            return;
        }
        let predicted_frames = freed_frames / pages.len() as f64;
        let sample = pages.into_iter().skip((fingerprint.0 % self.step) as usize).step_by(self.step as usize);
        chosen.extend(sample.map(|page| ProbedContent { fingerprint, predicted_frames, pages: vec![page] }));
    }

    /// Zero pages that are not merged: they are in no group.
    fn choose_zero_pages(&self) -> Vec<ProbedContent> {
        let index = self.index;
        let subjects = self.census.subjects.iter().enumerate().filter(|(number, _)| !self.planned[*number].is_empty());
        let addresses = subjects.flat_map(|(number, subject)| {
            let pages = each_page(index, &index.subject_ordinals(number)).filter(move |&(_, ordinal, address)| {
                let mark = index.mark(ordinal);
                mark.class() == Some(PageClass::Zero)
                    && self.may_merge(mark)
                    && index.first_page_of_frame(ordinal) == ordinal
                    && self.is_planned(number, address)
            });
            pages.map(move |(.., address)| (subject.process.id, address))
        });
        let probed =
            |page| ProbedContent { fingerprint: Fingerprint::ZERO_PAGE, predicted_frames: 1.0, pages: vec![page] };
        addresses.step_by(self.step as usize).map(probed).collect()
    }
}
