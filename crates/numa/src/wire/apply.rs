//! What `numa apply` did, and what `numa verify` found, in JSON.

use crate::apply::{ApplyOutcome, MachineOutcome, PartNodes, PreparedMachine};
use crate::decide::balancing::{self, BalancingAdvice};
use crate::decide::plan::CrowdedNode;
use crate::decide::working_set::HotnessSource;
use crate::map::NumaMap;
use crate::placement_record::{PlacedMachine, PlacementState, PresentPlacement, VerifiedMachine};
use crate::wire::plan::HotnessSourceReport;
use pagefold_base::{Bytes, PageSize};
use pagefold_output::wire::UnscannedProcessReport;
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;

/// The result of `pagefold numa apply`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct NumaApplyReport {
    /// `pagefold.numa-apply/1`.
    pub schema: &'static str,
    /// The host.
    pub host: String,
    /// Whether nothing was changed because of `--dry-run`.
    pub dry_run: bool,
    /// Bytes of a base page.
    pub page_size: u64,
    /// Wall time in seconds, with reading and planning.
    pub seconds: f64,
    /// What the weights of pages were computed from.
    pub hotness_source: HotnessSourceReport,
    /// The machines that were to be placed.
    pub machines: Vec<MachineApplyReport>,
    /// Nodes of these machines that would run more virtual CPUs than they may.
    pub crowded_nodes: Vec<CrowdedNodeReport>,
    /// Pages that were moved.
    pub moved_pages: u64,
    /// Seconds in which memory was moved, with pauses.
    pub moving_seconds: f64,
    /// Seconds of pauses for the bandwidth and for memory pressure.
    pub pause_seconds: f64,
    /// `done`, `planned`, `partial`, `interrupted` (all changes are undone) or `memory_pressure`.
    pub outcome: &'static str,
    /// Changes that should have been undone, and were not: after an interruption, or of a machine whose memory stays.
    pub failed_undos: Vec<String>,
    /// Processes that were selected and could not be read.
    pub unscanned_processes: Vec<UnscannedProcessReport>,
}

/// What was done with a machine.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct MachineApplyReport {
    /// Its process number.
    pub pid: u32,
    /// When the process began, in clock ticks since boot.
    pub start_time: u64,
    /// The name of the machine or program.
    pub name: String,
    /// The nodes of each virtual node, or of the whole machine.
    pub parts: Vec<PartNodesReport>,
    /// Pages that were to be moved, by the plan.
    pub planned_pages: u64,
    /// Threads that were to get other CPUs.
    pub planned_threads: u64,
    /// Pages that were moved.
    pub moved_pages: u64,
    /// Threads that got other CPUs.
    pub placed_threads: u64,
    /// Pages that stay on another node, by reason.
    pub kept_pages: BTreeMap<String, u64>,
    /// Threads that stay, with the reason.
    pub kept_threads: Vec<KeptThreadReport>,
    /// Bytes of memory that comes from the machine's node if it is touched later.
    pub preferring_bytes: u64,
    /// Bytes of memory whose policy stays, by reason.
    pub kept_policies: BTreeMap<String, u64>,
    /// Base pages that were in transparent huge pages before and are not afterwards, as the kernel splits a huge page
    /// where the node has no free one; absent if nothing was changed, or the machine could not be read afterwards.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split_pages: Option<u64>,
    /// Why the machine was given up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// The expected share of remote accesses before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remote_share_before: Option<f64>,
    /// The predicted share.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_remote_share: Option<f64>,
    /// The share as read afterwards.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured_remote_share: Option<f64>,
}

/// The nodes of a part of a machine.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct PartNodesReport {
    /// The nodes.
    pub nodes: Vec<u32>,
    /// The share of its memory for each.
    pub shares: Vec<f64>,
}

impl From<&PartNodes> for PartNodesReport {
    fn from(part: &PartNodes) -> Self {
        let (nodes, shares) = part.iter().copied().unzip();
        Self { nodes, shares }
    }
}

/// A node that would run more virtual CPUs than it may.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct CrowdedNodeReport {
    /// The node.
    pub node: u32,
    /// Virtual CPUs of all machines that would run on it; those of machines that stay count where they run now.
    pub vcpus: f64,
    /// Virtual CPUs that it may run.
    pub vcpu_capacity: f64,
}

/// A thread that stays where it was.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct KeptThreadReport {
    /// Its number.
    pub tid: u32,
    /// The reason.
    pub why: String,
}

impl NumaApplyReport {
    /// The report of a dry run. `planned_pages` is for each machine.
    pub fn planned(
        host: String,
        page_size: PageSize,
        map: &NumaMap,
        machines: &[(PlacedMachine, PreparedMachine, u64)],
        crowded_nodes: Vec<CrowdedNode>,
        hotness: &HotnessSource,
    ) -> Self {
        let crowded_nodes = crowded_nodes
            .into_iter()
            .map(|CrowdedNode { node, vcpus, vcpu_capacity }| CrowdedNodeReport { node, vcpus, vcpu_capacity })
            .collect();
        let report = |(placed, prepared, planned_pages): &(PlacedMachine, PreparedMachine, u64)| MachineApplyReport {
            pid: placed.pid,
            start_time: placed.start_time,
            name: placed.name.clone(),
            parts: placed.parts.iter().map(Into::into).collect(),
            planned_pages: *planned_pages,
            planned_threads: prepared.steps().threads.len() as u64,
            moved_pages: 0,
            placed_threads: 0,
            kept_pages: BTreeMap::new(),
            kept_threads: Vec::new(),
            preferring_bytes: 0,
            kept_policies: bytes_by_reason(&prepared.steps().kept_policies).collect(),
            split_pages: None,
            failure: None,
            remote_share_before: placed.remote_share_before,
            predicted_remote_share: placed.predicted_remote_share,
            measured_remote_share: None,
        };
        Self {
            schema: "pagefold.numa-apply/1",
            host,
            dry_run: true,
            page_size: page_size.bytes(),
            seconds: 0.0,
            hotness_source: hotness.into(),
            machines: machines.iter().map(report).collect(),
            crowded_nodes,
            moved_pages: 0,
            moving_seconds: 0.0,
            pause_seconds: 0.0,
            outcome: "planned",
            failed_undos: Vec::new(),
            unscanned_processes: super::map::unscanned_reports(map),
        }
    }

    /// The report with what was done.
    #[must_use]
    pub fn with_outcome(mut self, outcome: &ApplyOutcome) -> Self {
        self.dry_run = false;
        for (report, done) in self.machines.iter_mut().zip(&outcome.machines) {
            report.add_outcome(done);
        }
        self.failed_undos.extend(outcome.failed_undos.iter().map(ToString::to_string));
        self.moved_pages = outcome.machines.iter().map(|machine| machine.moved_pages.0).sum();
        self.moving_seconds = outcome.moving_time.as_secs_f64();
        self.pause_seconds = outcome.pause_time.as_secs_f64();
        self.outcome = match outcome {
            ApplyOutcome { interrupted: true, .. } => "interrupted",
            ApplyOutcome { stopped_by_pressure: true, .. } => "memory_pressure",
            outcome if outcome.is_complete() => "done",
            _ => "partial",
        };
        self
    }

    /// The report with the placement as read afterwards.
    #[must_use]
    pub fn with_measured(mut self, verified: &[VerifiedMachine]) -> Self {
        for (report, verified) in self.machines.iter_mut().zip(verified) {
            report.measured_remote_share = verified.now.as_ref().and_then(|now| now.remote_share);
            report.split_pages = verified.now.as_ref().map(|now| now.split_pages.0);
        }
        self
    }

    /// Whether something was not done or not read.
    pub fn is_incomplete(&self) -> bool {
        !matches!(self.outcome, "done" | "planned")
            || !self.unscanned_processes.is_empty()
            || !self.failed_undos.is_empty()
            || self.hotness_source.not_measured.is_some()
    }
}

fn bytes_by_reason(bytes: &BTreeMap<String, Bytes>) -> impl Iterator<Item = (String, u64)> {
    bytes.iter().map(|(why, bytes)| (why.clone(), bytes.0))
}

impl MachineApplyReport {
    fn add_outcome(&mut self, done: &MachineOutcome) {
        self.moved_pages = done.moved_pages.0;
        self.placed_threads = (done.placed_threads.len() + done.following_threads.len()) as u64;
        self.kept_pages = done.kept_pages.iter().map(|(why, pages)| (why.to_string(), pages.0)).collect();
        let kept = |(tid, why): &(pagefold_base::Pid, String)| KeptThreadReport { tid: tid.0, why: why.clone() };
        self.kept_threads = done.kept_threads.iter().map(kept).collect();
        self.preferring_bytes = done.preferring_bytes.0;
        self.kept_policies.extend(bytes_by_reason(&done.refused_policies));
        self.failure.clone_from(&done.failure);
    }
}

/// The result of `pagefold numa verify`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct NumaVerifyReport {
    /// `pagefold.numa-verify/1`.
    pub schema: &'static str,
    /// The host.
    pub host: String,
    /// Bytes of a base page.
    pub page_size: u64,
    /// The machines that `numa apply` has placed since boot.
    pub machines: Vec<MachineVerifyReport>,
    /// Counters of `/proc/vmstat` since the last placement.
    pub counters: BTreeMap<String, u64>,
    /// The share of NUMA balancing's page faults since then, of all processes of the host, that found the page on the node
    /// of the CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub local_hint_fault_share: Option<f64>,
    /// Whether NUMA balancing is on; absent on a kernel without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa_balancing: Option<bool>,
    /// `turn_off`, `turn_on` or `keep`: what to do about NUMA balancing.
    pub balancing_advice: &'static str,
}

/// A machine that was placed, as it is now.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct MachineVerifyReport {
    /// Its process number.
    pub pid: u32,
    /// When the process began, in clock ticks since boot.
    pub start_time: u64,
    /// The name of the machine or program.
    pub name: String,
    /// The nodes of each virtual node, or of the whole machine.
    pub parts: Vec<PartNodesReport>,
    /// `as_planned`, `changed`, `incomplete` (much of its memory could not be moved), `ended` or `unreadable`.
    pub state: &'static str,
    /// Movable pages.
    pub movable_pages: u64,
    /// The part of them on other nodes than planned.
    pub misplaced_pages: u64,
    /// Threads of which another program has changed the CPUs.
    pub changed_threads: Vec<u32>,
    /// The expected share of remote accesses before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remote_share_before: Option<f64>,
    /// The predicted share.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_remote_share: Option<f64>,
    /// The present share.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured_remote_share: Option<f64>,
}

impl NumaVerifyReport {
    /// The report of a verification. `counters` are the counters since the placement, and `all_machines` has the share
    /// of remote accesses of each virtual machine of the host, and whether it was placed.
    pub fn new(
        host: String,
        page_size: PageSize,
        machines: &[(VerifiedMachine, bool)],
        counters: BTreeMap<String, u64>,
        numa_balancing: Option<bool>,
        all_machines: &[(Option<f64>, bool)],
    ) -> Self {
        let faults = counters.get("numa_hint_faults").copied().filter(|&faults| faults > 0);
        let local = counters.get("numa_hint_faults_local").copied();
        let advice = numa_balancing.map(|is_on| balancing::balancing_advice(is_on, all_machines));
        Self {
            schema: "pagefold.numa-verify/1",
            host,
            page_size: page_size.bytes(),
            machines: machines.iter().map(|(machine, has_ended)| verify_report(machine, *has_ended)).collect(),
            local_hint_fault_share: faults.zip(local).map(|(all, local)| local as f64 / all as f64),
            counters,
            numa_balancing,
            balancing_advice: match advice {
                Some(BalancingAdvice::TurnOff) => "turn_off",
                Some(BalancingAdvice::TurnOn) => "turn_on",
                Some(BalancingAdvice::Keep) | None => "keep",
            },
        }
    }

    /// Whether a machine is not as planned.
    pub fn differs_from_plan(&self) -> bool {
        self.machines.iter().any(|machine| matches!(machine.state, "changed" | "incomplete"))
    }

    /// Whether a machine could not be read.
    pub fn is_incomplete(&self) -> bool {
        self.machines.iter().any(|machine| machine.state == "unreadable")
    }
}

fn verify_report(machine: &VerifiedMachine, has_ended: bool) -> MachineVerifyReport {
    let VerifiedMachine { placed, now } = machine;
    MachineVerifyReport {
        pid: placed.pid,
        start_time: placed.start_time,
        name: placed.name.clone(),
        parts: placed.parts.iter().map(Into::into).collect(),
        state: match now.as_ref().map(PresentPlacement::state) {
            Some(PlacementState::AsPlanned) => "as_planned",
            Some(PlacementState::Incomplete) => "incomplete",
            Some(PlacementState::Changed) => "changed",
            None if has_ended => "ended",
            None => "unreadable",
        },
        movable_pages: now.as_ref().map_or(0, |now| now.movable_pages.0),
        misplaced_pages: now.as_ref().map_or(0, |now| now.misplaced_pages.0),
        changed_threads: now.iter().flat_map(|now| &now.changed_threads).map(|tid| tid.0).collect(),
        remote_share_before: placed.remote_share_before,
        predicted_remote_share: placed.predicted_remote_share,
        measured_remote_share: now.as_ref().and_then(|now| now.remote_share),
    }
}
