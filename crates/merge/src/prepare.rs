//! From a host to a plan: the census that a plan needs, and the plan.

use crate::decide::plan::{Constraints, Plan, Speed, bytes_per_search};
use crate::plan;
use crate::verify::{self, Enrolled};
use crate::{Ages, Probes, sample_pages};
use pagefold_base::domain::Domains;
use pagefold_base::ksm::merges_at_first_look;
use pagefold_base::process::Process;
use pagefold_base::{AddressRange, Bytes, ProcessId};
use pagefold_census::decide::sketch::Held;
use pagefold_census::results::Census;
use pagefold_census::{DEFAULT_MAX_MAP_COUNT, Second, Selection};
use pagefold_host::{Host, observe};
use pagefold_sys::fingerprint::Hasher;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// What is to be planned.
#[derive(Clone, Debug)]
pub struct Request {
    /// Which processes.
    pub selection: Selection,
    /// How they are sorted into trust domains.
    pub domains: Domains,
    /// Whether pages of different domains may be merged.
    pub across_domains: bool,
    /// The pause between the two looks at each page that might merge.
    pub settle: Duration,
    /// Threads of the census.
    pub threads: usize,
    /// Whether processes are enrolled whole.
    pub whole: bool,
    /// Processes that would give back less, net, are left alone.
    pub min_profit: Bytes,
    /// ksmd's share of one CPU.
    pub share: f64,
    /// Regions that enrolling may bring a process to, where that is less than the kernel lets it have.
    pub max_regions: Option<u64>,
    /// Metadata that KSM may take more than it does, if that is bounded.
    pub metadata: Option<Bytes>,
    /// Whether huge pages may be split.
    pub split_huge_pages: bool,
    /// What no plan is to have, whoever would share with it.
    pub left_out: BTreeMap<ProcessId, Vec<AddressRange>>,
    /// Rows of the census's sharing matrix at most.
    pub parties: usize,
}

/// What a merge begins with.
pub struct Prepared {
    /// What there is.
    pub census: Census,
    /// What is to be done.
    pub plan: Plan,
    /// By what one can tell afterwards why it came out differently.
    pub probes: Probes,
    /// What is left out because it, or all that it would merge with, is not old enough.
    pub young: BTreeMap<ProcessId, Bytes>,
    /// Whether others may be enrolled whom it is not told: what they hold was not kept apart.
    pub others_hidden: bool,
    /// A sample of what each holds, comparable between censuses with the same ages; nothing without.
    pub held: BTreeMap<ProcessId, Held>,
}

/// Take the census and make the plan. `excluded` tells why a process must not be enrolled, if it must not. With `ages`,
/// what is not yet old enough now, at the time that is given, is left out.
///
/// The plan takes pages of zeros to be mapped to the kernel's page of zeros, as a merge has it done.
pub fn prepare(
    host: &dyn Host,
    request: &Request,
    excluded: &dyn Fn(&Process) -> Option<String>,
    mut ages: Option<(&mut Ages, Instant)>,
    progress: &pagefold_census::Progress,
    stop: &AtomicBool,
) -> Result<Prepared, pagefold_census::Error> {
    let kernels = observe::max_map_count(host).unwrap_or(DEFAULT_MAX_MAP_COUNT);
    let max_map_count = request.max_regions.map_or(kernels, |most| most.min(kernels));
    let apart = !request.across_domains && !request.whole;
    // Who enrols processes whole wants all that they hold, and is told who else is enrolled.
    let enrolled = if apart { verify::enrolled(host) } else { Ok(Enrolled::default()) };
    let Enrolled { processes: enrolled, hidden: others_hidden } =
        enrolled.map_err(|source| pagefold_census::Error::Processes { host: host.describe(), source })?;
    let options = pagefold_census::Options {
        selection: request.selection.clone(),
        domains: request.domains.clone(),
        settle: request.settle,
        second: Second::Candidates,
        threads: request.threads,
        across_domains: request.across_domains,
        max_map_count,
        use_zero_pages: true,
        rows: request.parties,
        enrolled,
        ..Default::default()
    };
    let (hasher, (census, mut index)) = match &mut ages {
        Some((ages, now)) => {
            let (remembered, hasher) = ages.remembered();
            let taken = pagefold_census::take_again((remembered, *now), hasher, host, &options, progress, stop)?;
            (hasher.clone(), taken)
        }
        None => {
            let hasher = Hasher::random(host.page_size().as_len()).map_err(pagefold_census::Error::Key)?;
            let taken = pagefold_census::take_under(&hasher, host, &options, progress, stop)?;
            (hasher, taken)
        }
    };
    let constraints = Constraints {
        page_size: host.page_size(),
        whole: request.whole,
        min_profit: request.min_profit,
        max_map_count,
        regions: regions(host, &census),
        cpu: request.share,
        speed: Speed::default(),
        first_look: observe::kernel(host).is_ok_and(|release| merges_at_first_look(&release)),
    };
    let mut plan = plan(&census, &index, &constraints, excluded);
    index.forget_unpaired();
    let held = ages.as_mut().map(|(ages, _)| ages.remembered().0.take_held()).unwrap_or_default();
    let young = ages.map(|(ages, now)| ages.sift(&mut plan, &census, &index, now)).unwrap_or_default();
    for (process, ranges) in &request.left_out {
        plan.leave_out(*process, ranges.clone());
    }
    if !request.split_huge_pages {
        plan.keep_huge_pages();
    }
    if let Some(metadata) = request.metadata {
        crate::keep_within(&mut plan, &census, &index, metadata);
    }
    plan.count_comparisons(bytes_per_search(sample_pages(host, &plan), plan.contents()));
    let probes = Probes::of(&plan, &census, &index, &hasher);
    Ok(Prepared { census, plan, probes, young, others_hidden, held })
}

/// How many regions each process with anything to enrol has now: the census keeps to what there was when it began, and
/// names only those that hold something.
fn regions(host: &dyn Host, census: &Census) -> BTreeMap<ProcessId, u64> {
    let subjects: BTreeSet<usize> = census.ranges.iter().map(|range| range.subject).collect();
    let count = |id: ProcessId| {
        let handle = host.open(id.pid).ok().filter(|handle| handle.id() == id)?;
        Some((id, observe::region_count(&*handle).ok()?))
    };
    subjects.into_iter().filter_map(|subject| count(census.subjects[subject].process.id)).collect()
}
