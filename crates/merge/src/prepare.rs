//! From a host to a plan: the census that a plan needs, and the plan.

use crate::decide::plan::{KsmdPageTimes, MergePlan, PlanConstraints, bytes_per_search};
use crate::make_plan;
use crate::verify::{self, EnrolledProcesses};
use crate::{MergeProbes, StableAges, sample_pages};
use pagefold_base::domain::DomainConfig;
use pagefold_base::ksm::merges_at_first_scan;
use pagefold_base::process::Process;
use pagefold_base::{AddressRange, Bytes, ProcessId};
use pagefold_census::decide::sketch::ContentSketches;
use pagefold_census::results::Census;
use pagefold_census::{DEFAULT_MAX_MAP_COUNT, ProcessSelection, SecondPass};
use pagefold_host::{Host, observe};
use pagefold_sys::fingerprint::Hasher;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// What is to be planned.
#[derive(Clone, Debug)]
pub struct PlanRequest {
    /// Which processes.
    pub selection: ProcessSelection,
    /// How they are sorted into trust domains.
    pub domains: DomainConfig,
    /// Whether pages of different domains may be merged.
    pub across_domains: bool,
    /// The pause between the two looks at each page that might merge.
    pub pass_interval: Duration,
    /// Threads of the census.
    pub threads: usize,
    /// Whether processes are enrolled whole.
    pub whole_processes: bool,
    /// Processes that would give back less, net, are left alone.
    pub min_profit: Bytes,
    /// ksmd's share of one CPU.
    pub ksmd_cpu_share: f64,
    /// Regions that enrolling may bring a process to, where that is less than the kernel lets it have.
    pub max_regions: Option<u64>,
    /// Metadata that KSM may take more than it does, if that is bounded.
    pub max_added_metadata: Option<Bytes>,
    /// Whether huge pages may be split.
    pub split_huge_pages: bool,
    /// What no plan is to have, whoever would share with it.
    pub excluded_ranges: BTreeMap<ProcessId, Vec<AddressRange>>,
    /// Rows of the census's sharing matrix at most.
    pub max_matrix_rows: usize,
}

/// What a merge begins with.
pub struct PreparedPlan {
    /// What there is.
    pub census: Census,
    /// What is to be done.
    pub plan: MergePlan,
    /// By what one can tell afterwards why it came out differently.
    pub probes: MergeProbes,
    /// What is left out because it, or all that it would merge with, is not old enough.
    pub unstable_bytes: BTreeMap<ProcessId, Bytes>,
    /// Whether others may be enrolled whom it is not told: what they hold was not kept apart.
    pub enrolled_may_be_hidden: bool,
    /// A sample of what each holds, comparable between censuses with the same ages; nothing without.
    pub sketches: BTreeMap<ProcessId, ContentSketches>,
}

/// Take the census and make the plan. `excluded` tells why a process must not be enrolled, if it must not. With `ages`,
/// what is not yet old enough now, at the time that is given, is left out.
///
/// The plan takes pages of zeros to be mapped to the kernel's page of zeros, as a merge has it done.
pub fn prepare_plan(
    host: &dyn Host,
    request: &PlanRequest,
    exclusion_reason: &dyn Fn(&Process) -> Option<String>,
    mut ages: Option<(&mut StableAges, Instant)>,
    progress: &pagefold_census::ScanProgress,
    stop: &AtomicBool,
) -> Result<PreparedPlan, pagefold_census::Error> {
    let kernels = observe::max_map_count(host).unwrap_or(DEFAULT_MAX_MAP_COUNT);
    let max_map_count = request.max_regions.map_or(kernels, |most| most.min(kernels));
    let apart = !request.across_domains && !request.whole_processes;
    // Who enrols processes whole wants all that they hold, and is told who else is enrolled.
    let enrolled = if apart { verify::find_enrolled(host) } else { Ok(EnrolledProcesses::default()) };
    let EnrolledProcesses { processes: enrolled, may_be_incomplete: others_hidden } =
        enrolled.map_err(|source| pagefold_census::Error::Processes { host: host.describe(), source })?;
    let options = pagefold_census::CensusOptions {
        selection: request.selection.clone(),
        domains: request.domains.clone(),
        pass_interval: request.pass_interval,
        second_pass: SecondPass::Candidates,
        threads: request.threads,
        across_domains: request.across_domains,
        max_map_count,
        use_zero_pages: true,
        max_matrix_rows: request.max_matrix_rows,
        enrolled_processes: enrolled,
        ..Default::default()
    };
    let (hasher, (census, mut index)) = match &mut ages {
        Some((ages, now)) => {
            let (remembered, hasher) = ages.cache_and_hasher();
            let taken =
                pagefold_census::take_incremental_census((remembered, *now), hasher, host, &options, progress, stop)?;
            (hasher.clone(), taken)
        }
        None => {
            let hasher =
                Hasher::with_random_key(host.page_size().as_len()).map_err(pagefold_census::Error::RandomKey)?;
            let taken = pagefold_census::take_census_with_hasher(&hasher, host, &options, progress, stop)?;
            (hasher, taken)
        }
    };
    let constraints = PlanConstraints {
        page_size: host.page_size(),
        whole_processes: request.whole_processes,
        min_profit: request.min_profit,
        max_map_count,
        region_counts: count_regions(host, &census),
        ksmd_cpu_share: request.ksmd_cpu_share,
        page_times: KsmdPageTimes::default(),
        merges_at_first_scan: observe::kernel_release(host).is_ok_and(|release| merges_at_first_scan(&release)),
    };
    let mut plan = make_plan(&census, &index, &constraints, exclusion_reason);
    index.drop_unique_entries();
    let held = ages.as_mut().map(|(ages, _)| ages.cache_and_hasher().0.take_sketches()).unwrap_or_default();
    let young = ages.map(|(ages, now)| ages.drop_unstable_ranges(&mut plan, &census, &index, now)).unwrap_or_default();
    for (process, ranges) in &request.excluded_ranges {
        plan.exclude_ranges(*process, ranges.clone());
    }
    if !request.split_huge_pages {
        plan.drop_huge_page_splits();
    }
    if let Some(metadata) = request.max_added_metadata {
        crate::limit_to_metadata(&mut plan, &census, &index, metadata);
    }
    plan.add_comparison_time(bytes_per_search(sample_pages(host, &plan), plan.contents()));
    let probes = MergeProbes::choose(&plan, &census, &index, &hasher);
    Ok(PreparedPlan {
        census,
        plan,
        probes,
        unstable_bytes: young,
        enrolled_may_be_hidden: others_hidden,
        sketches: held,
    })
}

/// How many regions each process with anything to enrol has now: the census keeps to what there was when it began, and
/// names only those that hold something.
fn count_regions(host: &dyn Host, census: &Census) -> BTreeMap<ProcessId, u64> {
    let subjects: BTreeSet<usize> = census.ranges.iter().map(|range| range.subject).collect();
    let count = |id: ProcessId| {
        let handle = host.open(id.pid).ok().filter(|handle| handle.id() == id)?;
        Some((id, observe::region_count(&*handle).ok()?))
    };
    subjects.into_iter().filter_map(|subject| count(census.subjects[subject].process.id)).collect()
}
