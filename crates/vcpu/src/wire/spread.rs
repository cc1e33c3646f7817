//! What `vcpu spread` did, in JSON.

use crate::machines::Machine;
use crate::spread::{PreparedSpread, SpreadOutcome};
use crate::wire::status::{ObservationReport, OvercommitReport};
use pagefold_census::results::UnscannedProcess;
use pagefold_output::wire::UnscannedProcessReport;
use schemars::JsonSchema;
use serde::Serialize;

/// The result of `pagefold vcpu spread`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct VcpuSpreadReport {
    /// `pagefold.vcpu-spread/1`.
    pub schema: &'static str,
    /// The host.
    pub host: String,
    /// Whether nothing was changed because of `--dry-run`.
    pub dry_run: bool,
    /// `planned`, `done`, `partial` or `interrupted` (all changes are undone).
    pub outcome: &'static str,
    /// Online CPUs, and the vCPUs of all machines of the host.
    #[serde(flatten)]
    pub overcommit: OvercommitReport,
    /// The machines.
    pub machines: Vec<MachineSpreadReport>,
    /// What the machines did before.
    pub before: ObservationReport,
    /// What they did after; absent if nothing was changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<ObservationReport>,
    /// Changes that should have been undone, and were not.
    pub failed_undos: Vec<String>,
    /// Processes that were selected and could not be read.
    pub unscanned_processes: Vec<UnscannedProcessReport>,
}

/// What is done with a machine.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct MachineSpreadReport {
    /// Its process number.
    pub pid: u32,
    /// When the process began, in clock ticks since boot.
    pub start_time: u64,
    /// The name of the machine or program.
    pub name: String,
    /// Whether an earlier spread keeps its vCPUs apart already.
    pub is_spread: bool,
    /// Why siblings stay on one run queue, if they must.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub conflict: Option<String>,
    /// The vCPUs with other CPUs.
    pub vcpus: Vec<VcpuSpreadStep>,
}

/// A vCPU that gets other CPUs.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct VcpuSpreadStep {
    /// Its number.
    pub vcpu: u32,
    /// Its thread.
    pub tid: u32,
    /// The CPUs on which it could run, as a list.
    pub from: String,
    /// Those on which it may run now.
    pub to: String,
    /// Whether libvirt sets them.
    pub by_libvirt: bool,
    /// Why it keeps its CPUs, if it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

impl VcpuSpreadReport {
    /// The report of a plan for the selected machines.
    pub fn planned(
        host: String,
        overcommit: OvercommitReport,
        (machines, is_selected, prepared): (&[Machine], &[bool], &PreparedSpread),
        before: ObservationReport,
        unscanned: &[UnscannedProcess],
    ) -> Self {
        let machine = |(position, machine): (usize, &Machine)| MachineSpreadReport {
            pid: machine.process.id.pid.0,
            start_time: machine.process.id.start_time,
            name: machine.name(),
            is_spread: prepared.is_spread[position],
            conflict: prepared.conflicts[position].clone(),
            vcpus: prepared
                .steps
                .iter()
                .filter(|step| step.machine == position)
                .map(|step| VcpuSpreadStep {
                    vcpu: step.vcpu,
                    tid: step.thread.tid.0,
                    from: step.from.to_string(),
                    to: step.to.to_string(),
                    by_libvirt: step.pin.is_some(),
                    refused: None,
                })
                .collect(),
        };
        Self {
            schema: "pagefold.vcpu-spread/1",
            host,
            dry_run: true,
            outcome: "planned",
            overcommit,
            machines: machines.iter().enumerate().filter(|(position, _)| is_selected[*position]).map(machine).collect(),
            before,
            after: None,
            failed_undos: Vec::new(),
            unscanned_processes: unscanned
                .iter()
                .map(|process| UnscannedProcessReport::new(process.pid.0, process.comm.clone(), &process.why))
                .collect(),
        }
    }

    /// The report of what was done.
    #[must_use]
    pub fn with_outcome(mut self, outcome: &SpreadOutcome) -> Self {
        for machine in &mut self.machines {
            for step in &mut machine.vcpus {
                let refused = outcome.refused.iter().find(|(process, tid, _)| {
                    (process.pid.0, process.start_time, tid.0) == (machine.pid, machine.start_time, step.tid)
                });
                step.refused = refused.map(|(_, _, why)| why.clone());
            }
        }
        let is_partial = !outcome.refused.is_empty() || self.machines.iter().any(|machine| machine.conflict.is_some());
        self.outcome = match (outcome.interrupted, is_partial) {
            (true, _) => "interrupted",
            (false, true) => "partial",
            (false, false) => "done",
        };
        Self { dry_run: false, ..self }
    }

    /// Whether something was not done or not read.
    pub fn is_incomplete(&self) -> bool {
        matches!(self.outcome, "partial" | "interrupted")
            || self.machines.iter().any(|machine| machine.conflict.is_some())
            || !self.failed_undos.is_empty()
            || !self.unscanned_processes.is_empty()
    }
}
