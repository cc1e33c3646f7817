//! A plan in JSON.

use crate::decide::plan::baselines::{self, Baseline, BaselineResult};
use crate::decide::plan::{Alternative, Pattern, PlacementPlan, PlacementProblem, PlanReason, PlannedMove, PlannedVm};
use crate::decide::pricing::{PricedGain, Prices};
use crate::decide::working_set::{HotnessSource, WorkingSet};
use crate::map::{NumaMap, ProcessPlacement};
use pagefold_base::PageSize;
use pagefold_output::wire::{GainReport, ProcessInfo, UnscannedProcessReport};
use schemars::JsonSchema;
use serde::Serialize;

/// The result of `pagefold numa plan`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct NumaPlanReport {
    /// `pagefold.numa-plan/1`.
    pub schema: &'static str,
    /// What was read: `this host` or a recording.
    pub host: String,
    /// Bytes of a base page.
    pub page_size: u64,
    /// Wall time in seconds.
    pub seconds: f64,
    /// What the weights of pages are computed from.
    pub hotness_source: HotnessSourceReport,
    /// The prices.
    pub prices: PricesReport,
    /// What the nodes offer to these machines.
    pub nodes: Vec<NodeCapacityReport>,
    /// The planned placement of each machine.
    pub machines: Vec<MachinePlanReport>,
    /// Virtual machines that were not selected. Their virtual CPUs count where they run now.
    pub other_machines: usize,
    /// Their virtual CPUs.
    pub other_vcpus: f64,
    /// The plan and simple placements.
    pub comparison: Vec<ComparedPlacementReport>,
    /// The share of the plan's avoidable cost that a better choice of the listed placements could save at most. At
    /// most 256 placements are listed for each machine.
    pub gap: f64,
    /// Processes that were selected and could not be read.
    pub unscanned_processes: Vec<UnscannedProcessReport>,
}

impl From<PricedGain> for GainReport {
    fn from(gain: PricedGain) -> Self {
        Self {
            memory_saved: gain.memory,
            remote_reads: gain.remote_reads,
            cpu: gain.cpu,
            huge_pages: gain.huge_pages,
            crowding: gain.crowding,
            net: gain.net(),
        }
    }
}

/// The prices of a plan, in CPU seconds an hour.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct PricesReport {
    /// Of a page that is saved.
    pub saved_page: f64,
    /// Of the reads of a page of the hottest machine at twice the local distance.
    pub remote_page: f64,
    /// Of a page of the hottest machine that is no longer in a huge page.
    pub split_page: f64,
    /// Of a page that is moved.
    pub moved_page: f64,
    /// Of a page that ksmd merges.
    pub merged_page: f64,
    /// What moving a machine that was placed before must gain.
    pub min_gain: f64,
    /// What moving any other machine must gain.
    pub first_min_gain: f64,
    /// Of a virtual CPU above the even share of its node.
    pub crowded_vcpu: f64,
}

impl From<Prices> for PricesReport {
    fn from(prices: Prices) -> Self {
        let Prices {
            saved_page,
            remote_page,
            split_page,
            moved_page,
            merged_page,
            min_gain,
            first_min_gain,
            crowded_vcpu,
        } = prices;
        Self { saved_page, remote_page, split_page, moved_page, merged_page, min_gain, first_min_gain, crowded_vcpu }
    }
}

/// What the hotness of pages is computed from.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct HotnessSourceReport {
    /// `run_time`: CPU time for each page. `working_set`: CPU time and the memory that is accessed.
    pub figures: &'static str,
    /// Why the working sets were not measured, though requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_measured: Option<String>,
}

impl From<&HotnessSource> for HotnessSourceReport {
    fn from(source: &HotnessSource) -> Self {
        match source {
            HotnessSource::RunTime => Self { figures: "run_time", not_measured: None },
            HotnessSource::NotMeasured(why) => Self { figures: "run_time", not_measured: Some(why.clone()) },
            HotnessSource::WorkingSets(_) => Self { figures: "working_set", not_measured: None },
        }
    }
}

/// The capacity of a node.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct NodeCapacityReport {
    /// The node.
    pub node: u32,
    /// Virtual CPUs that it may run.
    pub vcpus: f64,
    /// Pages for the machines, including those that they have there now, without hugetlb pages.
    pub pages: u64,
    /// Base pages of hugetlb pages for the machines, including those that they have there now.
    pub hugetlb_pages: u64,
}

/// The plan for a machine.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct MachinePlanReport {
    /// The process.
    #[serde(flatten)]
    pub process: ProcessInfo,
    /// Its virtual nodes; one part for a machine without any.
    pub parts: Vec<PartPlanReport>,
    /// Whether anything is to be moved.
    pub moved: bool,
    /// Whether it stays where it is, and its virtual CPUs, which may run elsewhere now, shall be bound there.
    pub bound: bool,
    /// Pages to move.
    pub moved_pages: u64,
    /// Remote reads now, in pages of the hottest machine at twice the local distance.
    pub remote_reads_before: f64,
    /// The same as planned.
    pub remote_reads_after: f64,
    /// Pages that it will save by merging with equal ones of other machines, as it is now.
    pub saved_pages_before: u64,
    /// The same as planned.
    pub saved_pages_after: u64,
    /// What the plan for it gains against leaving it.
    pub gain: GainReport,
    /// How often a page of its hottest part is read, relative to the hottest machine.
    pub hotness: f64,
    /// `fixed`, `no_permitted_node`, `already_local`, `no_better_placement`, `not_worth_moving`, `nodes_full`, `near_equal_pages`, `one_node`, `node_per_part` or `no_single_node`.
    pub reason: &'static str,
    /// The next best placement of it, if all other machines are placed as planned; absent if there is no other.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_best: Option<AlternativeReport>,
}

/// Another placement of a machine.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct AlternativeReport {
    /// The nodes of each part; empty if it stays as it is.
    pub part_nodes: Vec<Vec<u32>>,
    /// What it gains against leaving the machine.
    pub gain: GainReport,
    /// Virtual CPUs above the capacity of nodes that it adds to the plan's.
    pub excess_vcpus: f64,
    /// The same for pages, also hugetlb pages.
    pub excess_pages: u64,
}

/// The plan for a part of a machine.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct PartPlanReport {
    /// Its virtual node; absent for a machine without any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtual_node: Option<u32>,
    /// Its virtual CPUs, or threads.
    pub vcpus: f64,
    /// Its movable pages.
    pub pages: u64,
    /// The nodes for its memory and virtual CPUs; as now if the machine is not moved.
    pub nodes: Vec<u32>,
    /// The only nodes that the policy of its memory backend permits (`policy=bind`), as a list; absent if it permits all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bound_nodes: Option<String>,
    /// Bytes of its memory that are accessed within 100 ms, on average; absent if not measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub working_set_bytes: Option<u64>,
    /// The share of its resident memory that this is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accessed_share: Option<f64>,
}

/// A placement of all machines.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct ComparedPlacementReport {
    /// `plan`, `nothing`, `interleave`, `first fit` or `numad`, which is its published heuristic and not the program.
    pub placement: &'static str,
    /// Remote reads of all machines.
    pub remote_reads: f64,
    /// Pages of all machines on other nodes than the CPUs that read them.
    pub remote_pages: u64,
    /// Pages to move.
    pub moved_pages: u64,
    /// What it gains against leaving everything.
    pub gain: GainReport,
    /// Virtual CPUs above the capacity of nodes.
    pub excess_vcpus: f64,
    /// Pages above the capacity of nodes, also hugetlb pages.
    pub excess_pages: u64,
    /// Machines on nodes that their CPUs, their cpuset or policies of their memory do not permit.
    pub unpermitted_machines: usize,
}

impl NumaPlanReport {
    /// The report of a plan for the processes of a map.
    pub fn new(
        host: String,
        page_size: PageSize,
        map: &NumaMap,
        (problem, plan): (&PlacementProblem, &PlacementPlan),
        hotness: &HotnessSource,
        seconds: f64,
    ) -> Self {
        let planned = BaselineResult {
            remote_reads: plan.remote_reads.1,
            remote_pages: plan.remote_pages,
            moved_pages: plan.moves.iter().map(|planned| planned.moved_pages).sum(),
            gain: plan.gain,
            overload: plan.overload,
            unpermitted_machines: 0,
        };
        let baselines = Baseline::ALL.map(|baseline| (baseline.name(), baselines::place(problem, baseline)));
        let comparison = [("plan", planned)].into_iter().chain(baselines);
        Self {
            schema: "pagefold.numa-plan/1",
            host,
            page_size: page_size.bytes(),
            seconds,
            hotness_source: hotness.into(),
            prices: problem.prices.into(),
            nodes: problem
                .nodes
                .iter()
                .map(|node| NodeCapacityReport {
                    node: node.id,
                    vcpus: node.vcpus,
                    pages: node.pages as u64,
                    hugetlb_pages: node.hugetlb_pages as u64,
                })
                .collect(),
            machines: map
                .processes
                .iter()
                .zip(&problem.vms)
                .zip(&plan.moves)
                .enumerate()
                .map(|(position, ((placement, vm), planned))| {
                    machine_report(placement, vm, planned, working_sets_of(hotness, position))
                })
                .collect(),
            other_machines: map.other_machines.len(),
            other_vcpus: problem.vms[map.processes.len()..]
                .iter()
                .flat_map(|vm| &vm.parts)
                .fold(0.0, |sum, part| sum + part.vcpus),
            comparison: comparison.map(|(name, result)| placement_report(name, result)).collect(),
            gap: plan.gap,
            unscanned_processes: super::map::unscanned_reports(map),
        }
    }

    /// Whether something could not be read.
    pub fn is_incomplete(&self) -> bool {
        !self.unscanned_processes.is_empty() || self.hotness_source.not_measured.is_some()
    }
}

fn placement_report(placement: &'static str, result: BaselineResult) -> ComparedPlacementReport {
    ComparedPlacementReport {
        placement,
        remote_reads: result.remote_reads,
        remote_pages: result.remote_pages.round() as u64,
        moved_pages: result.moved_pages.round() as u64,
        gain: result.gain.into(),
        excess_vcpus: result.overload.vcpus,
        excess_pages: (result.overload.pages + result.overload.hugetlb_pages).round() as u64,
        unpermitted_machines: result.unpermitted_machines,
    }
}

/// The working sets of the parts of a machine; empty if not measured.
fn working_sets_of(hotness: &HotnessSource, position: usize) -> &[WorkingSet] {
    match hotness {
        HotnessSource::WorkingSets(machines) => &machines[position],
        HotnessSource::RunTime | HotnessSource::NotMeasured(_) => &[],
    }
}

fn machine_report(
    placement: &ProcessPlacement,
    vm: &PlannedVm,
    planned: &PlannedMove,
    working_sets: &[WorkingSet],
) -> MachinePlanReport {
    let has_parts = vm.parts.len() > 1;
    let part = |position: usize| {
        let part = &vm.parts[position];
        PartPlanReport {
            virtual_node: placement.virtual_nodes.get(position).filter(|_| has_parts).map(|node| node.node.id),
            vcpus: part.vcpus,
            pages: part.total_pages().round() as u64,
            nodes: match &planned.pattern {
                Pattern::Leave => part.pages.iter().filter(|(_, pages)| **pages > 0.0).map(|(&node, _)| node).collect(),
                Pattern::Nodes(nodes) => vec![nodes[position]],
                Pattern::Spread(nodes) => nodes.clone(),
            },
            bound_nodes: part.bound_nodes.as_ref().map(ToString::to_string),
            working_set_bytes: working_sets.get(position).map(|set| set.accessed.0),
            accessed_share: working_sets.get(position).map(|set| set.accessed_share()),
        }
    };
    MachinePlanReport {
        process: ProcessInfo::from_process(&placement.process, None),
        parts: (0..vm.parts.len()).map(part).collect(),
        moved: planned.pattern != Pattern::Leave,
        bound: planned.binds_to.is_some(),
        moved_pages: planned.moved_pages.round() as u64,
        remote_reads_before: planned.remote_reads.0,
        remote_reads_after: planned.remote_reads.1,
        saved_pages_before: planned.saved_pages.0.round() as u64,
        saved_pages_after: planned.saved_pages.1.round() as u64,
        gain: planned.gain.into(),
        hotness: vm.parts.iter().map(|part| part.hotness).fold(0.0, f64::max),
        reason: reason_word(planned.reason),
        next_best: planned.next_best.as_ref().map(|alternative| alternative_report(alternative, vm)),
    }
}

fn alternative_report(alternative: &Alternative, vm: &PlannedVm) -> AlternativeReport {
    AlternativeReport {
        part_nodes: match &alternative.pattern {
            Pattern::Leave => Vec::new(),
            Pattern::Nodes(nodes) => nodes.iter().map(|&node| vec![node]).collect(),
            Pattern::Spread(nodes) => vec![nodes.clone(); vm.parts.len()],
        },
        gain: alternative.gain.into(),
        excess_vcpus: alternative.excess.vcpus,
        excess_pages: (alternative.excess.pages + alternative.excess.hugetlb_pages).round() as u64,
    }
}

fn reason_word(reason: PlanReason) -> &'static str {
    match reason {
        PlanReason::Fixed => "fixed",
        PlanReason::NearPinnedMemory => "near_pinned_memory",
        PlanReason::NoPermittedNode => "no_permitted_node",
        PlanReason::AlreadyLocal => "already_local",
        PlanReason::NoBetterPlacement => "no_better_placement",
        PlanReason::NotWorthMoving => "not_worth_moving",
        PlanReason::NodesFull => "nodes_full",
        PlanReason::NearEqualPages => "near_equal_pages",
        PlanReason::OneNode => "one_node",
        PlanReason::NodePerPart => "node_per_part",
        PlanReason::NoSingleNode => "no_single_node",
        PlanReason::LessCrowded => "less_crowded",
    }
}
