//! From a host to a plan: takes the census that a plan needs and makes the plan.

use crate::count_plan_contents;
use crate::decide::plan::{
    ComparisonCost, EnrollMethod, KsmdModel, KsmdPageTimes, MergePlan, PlanConstraints, PlanContents, PlanTarget,
    make_plan,
};
use crate::verify::{self, EnrolledProcesses};
use crate::{MergeProbes, StableAges, sample_pages};
use pagefold_base::domain::DomainConfig;
use pagefold_base::ksm::merges_at_first_scan;
use pagefold_base::process::Process;
use pagefold_base::{AddressRange, Bytes, ProcessId};
use pagefold_census::decide::sketch::ContentSketches;
use pagefold_census::results::Census;
use pagefold_census::{DEFAULT_MAX_MAP_COUNT, PageIndex, ProcessSelection, SecondPass};
use pagefold_host::{Host, observe};
use pagefold_sys::fingerprint::Hasher;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// The request for a plan.
#[derive(Clone, Debug)]
pub struct PlanRequest {
    /// The processes to plan for.
    pub selection: ProcessSelection,
    /// How processes are assigned to trust domains.
    pub domains: DomainConfig,
    /// Whether pages of different domains may be merged.
    pub across_domains: bool,
    /// The pause between the two reads of each page that might merge.
    pub pass_interval: Duration,
    /// Threads of the census.
    pub threads: usize,
    /// Whether processes are enrolled whole.
    pub whole_processes: bool,
    /// Processes with lower net savings are left out.
    pub min_profit: Bytes,
    /// ksmd's share of one CPU.
    pub ksmd_cpu_share: f64,
    /// Maximum regions of a process after enrolling, where that is below the kernel's limit.
    pub max_regions: Option<u64>,
    /// Maximum metadata that KSM may add, if limited.
    pub max_added_metadata: Option<Bytes>,
    /// Whether huge pages may be split.
    pub split_huge_pages: bool,
    /// Ranges that no plan may contain, whatever partners they have.
    pub excluded_ranges: BTreeMap<ProcessId, Vec<AddressRange>>,
    /// Maximum rows of the census's sharing matrix.
    pub max_matrix_rows: usize,
    /// Whether contents are followed, to explain afterwards why the savings differ from the prediction.
    pub explain_differences: bool,
}

/// The input of a merge.
pub struct PreparedPlan {
    /// The census.
    pub census: Census,
    /// The plan. Its prediction is of exactly its ranges.
    pub plan: MergePlan,
    /// Probes that show afterwards why the savings differ from the prediction, if the request asks for that.
    pub probes: Option<MergeProbes>,
    /// Bytes left out because they, or all of their partners, are not stable for long enough.
    pub unstable_bytes: BTreeMap<ProcessId, Bytes>,
    /// Whether processes may be enrolled that this host does not show: their contents were not kept apart.
    pub enrolled_may_be_hidden: bool,
    /// A sample of the contents of each process, comparable between censuses with the same ages; empty without ages.
    pub sketches: BTreeMap<ProcessId, ContentSketches>,
    /// The contents of the plan's ranges, and how ksmd merges them: the plan is predicted from both.
    contents: PlanContents,
    ksmd: KsmdModel,
}

impl PreparedPlan {
    /// Keep only some processes of the plan, and predict what is left. The probes are of the whole plan and are
    /// dropped.
    pub fn retain_processes(&mut self, is_kept: impl Fn(ProcessId) -> bool) {
        self.plan.retain_processes(is_kept);
        self.plan.predict(&self.contents, &self.ksmd);
        self.probes = None;
    }

    /// Set the method to enroll each target, and predict the plan again: ranges that a method does not reach free
    /// nothing, and are no partners of the others. Targets that cannot be enrolled stay in the plan.
    pub fn set_enroll_methods<E>(&mut self, method: impl Fn(&PlanTarget) -> Result<EnrollMethod, E>) -> Result<(), E> {
        for target in &mut self.plan.targets {
            target.enroll_method = method(target)?;
        }
        self.plan.predict(&self.contents, &self.ksmd);
        if let Some(probes) = &mut self.probes {
            probes.retain_reachable(&self.plan);
        }
        Ok(())
    }
}

/// Take the census and make the plan. `exclusion_reason` returns why a process must not be enrolled, or nothing. With
/// `ages`, ranges that are not stable for long enough at the given time are left out.
///
/// The plan assumes that KSM maps zero pages to the kernel's zero page; a merge switches that on.
pub fn prepare_plan(
    host: &dyn Host,
    request: &PlanRequest,
    exclusion_reason: &dyn Fn(&Process) -> Option<String>,
    mut ages: Option<(&mut StableAges, Instant)>,
    progress: &pagefold_census::ScanProgress,
    stop: &AtomicBool,
) -> Result<PreparedPlan, pagefold_census::Error> {
    let kernel_limit = observe::max_map_count(host).unwrap_or(DEFAULT_MAX_MAP_COUNT);
    let max_map_count = request.max_regions.map_or(kernel_limit, |limit| limit.min(kernel_limit));
    let enrolled = find_enrolled_elsewhere(host, request)?;
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
        enrolled_processes: enrolled.processes,
        ..Default::default()
    };
    let (census, mut index, hasher) = take_plan_census(host, &options, &mut ages, progress, stop)?;
    index.drop_unique_entries();
    let constraints = PlanConstraints {
        page_size: host.page_size(),
        whole_processes: request.whole_processes,
        min_profit: request.min_profit,
        max_map_count,
        region_counts: count_regions(host, &census),
    };
    let mut plan = make_plan(&census, &constraints, exclusion_reason);
    let sketches = ages.as_mut().map(|(ages, _)| ages.cache_and_hasher().0.take_sketches()).unwrap_or_default();
    let unstable_bytes =
        ages.map(|(ages, now)| ages.drop_unstable_ranges(&mut plan, &census, &index, now)).unwrap_or_default();
    for (process, ranges) in &request.excluded_ranges {
        plan.exclude_ranges(*process, ranges.clone());
    }
    // From here on filters drop whole ranges only.
    let huge_page_size = pagefold_census::huge_page_size(host);
    let contents = count_plan_contents(&mut plan, &census, &index, host.page_size(), huge_page_size);
    if !request.split_huge_pages {
        plan.drop_huge_page_splits();
    }
    if let Some(metadata) = request.max_added_metadata {
        plan.limit_to_metadata(&contents, metadata);
    }
    plan.skip_unprofitable_targets(&contents, request.min_profit);
    let ksmd = KsmdModel {
        cpu_share: request.ksmd_cpu_share,
        page_times: KsmdPageTimes::default(),
        comparison_cost: ComparisonCost::from_sample(sample_pages(host, &plan)),
        merges_at_first_scan: observe::kernel_release(host).is_ok_and(|release| merges_at_first_scan(&release)),
    };
    plan.predict(&contents, &ksmd);
    let probes = request.explain_differences.then(|| MergeProbes::choose(&plan, &census, &index, &hasher));
    let enrolled_may_be_hidden = enrolled.may_be_incomplete;
    Ok(PreparedPlan { census, plan, probes, unstable_bytes, enrolled_may_be_hidden, sketches, contents, ksmd })
}

/// The enrolled processes whose contents a plan keeps apart from those of other domains. A merge of whole processes
/// takes all of their contents and finds enrolled processes elsewhere.
fn find_enrolled_elsewhere(
    host: &dyn Host,
    request: &PlanRequest,
) -> Result<EnrolledProcesses, pagefold_census::Error> {
    if request.across_domains || request.whole_processes {
        return Ok(EnrolledProcesses::default());
    }
    verify::find_enrolled(host).map_err(|source| pagefold_census::Error::Processes { host: host.describe(), source })
}

/// The census of a plan and its index, and the hasher that it used: with ages, that of all their censuses.
fn take_plan_census(
    host: &dyn Host,
    options: &pagefold_census::CensusOptions,
    ages: &mut Option<(&mut StableAges, Instant)>,
    progress: &pagefold_census::ScanProgress,
    stop: &AtomicBool,
) -> Result<(Census, PageIndex, Hasher), pagefold_census::Error> {
    let Some((ages, now)) = ages else {
        let hasher = pagefold_census::page_hasher(host)?;
        let (census, index) = pagefold_census::take_census_with_hasher(&hasher, host, options, progress, stop)?;
        return Ok((census, index, hasher));
    };
    let (cache, hasher) = ages.cache_and_hasher();
    let (census, index) =
        pagefold_census::take_incremental_census((cache, *now), hasher, host, options, progress, stop)?;
    Ok((census, index, hasher.clone()))
}

/// The current number of regions of each process that has ranges to enroll: the census keeps only the regions at its
/// start that have pages.
fn count_regions(host: &dyn Host, census: &Census) -> BTreeMap<ProcessId, u64> {
    let subjects: BTreeSet<usize> = census.ranges.iter().map(|range| range.subject).collect();
    let count = |id: ProcessId| Some((id, observe::region_count(&*pagefold_host::hold(host, id).ok()?).ok()?));
    subjects.into_iter().filter_map(|subject| count(census.subjects[subject].process.id)).collect()
}
