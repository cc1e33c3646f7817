//! `pagefold vcpu`: how the vCPUs of virtual machines are scheduled.

mod gang;
mod map;
mod record;
mod sim;
mod spread;
mod status;

use crate::command_line::{GlobalOptions, ProcessOptions, parse_duration};
use crate::{CommandOutcome, host_selection};
use anyhow::bail;
use clap::{Args, Subcommand};
use pagefold_base::IdSet;
use pagefold_census::ProcessSelection;
use pagefold_census::results::UnscannedProcess;
use pagefold_host::{Host, parse};
use pagefold_vcpu::machines::{Machine, find_machines};
use pagefold_vcpu::sample;
use std::time::Duration;

/// Arguments of `vcpu`.
#[derive(Args, Debug)]
pub struct VcpuArguments {
    #[command(subcommand)]
    command: VcpuCommand,
}

#[derive(Debug, Subcommand)]
enum VcpuCommand {
    /// Show how long vCPUs run and wait for a CPU, without tracing
    Status(status::VcpuStatusArguments),
    /// Run the vCPUs of each virtual machine at the same time, by a scheduler for sched_ext
    Gang(gang::GangArguments),
    /// Keep the vCPUs of each virtual machine on different run queues, by CPU affinity
    Spread(spread::SpreadArguments),
    /// Draw and measure a schedule: that of this host, or a recorded one
    Map(Box<map::MapArguments>),
    /// Record the schedule of this host into a file
    Record(Box<record::VcpuRecordArguments>),
    /// Simulate over-committed vCPUs under several policies, by a model
    Sim(Box<sim::VcpuSimArguments>),
}

/// Run the subcommand.
pub fn run(options: &VcpuArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    match &options.command {
        VcpuCommand::Status(options) => status::run(options, global),
        VcpuCommand::Gang(options) => gang::run(options, global),
        VcpuCommand::Spread(options) => spread::run(options, global),
        VcpuCommand::Map(options) => map::run(options, global),
        VcpuCommand::Record(options) => record::run(options, global),
        VcpuCommand::Sim(options) => sim::run(options, global),
    }
}

/// The machines of a host.
struct FoundMachines {
    /// All machines, and selected processes with threads named as those of vCPUs.
    all: Vec<Machine>,
    /// Whether each is selected.
    is_selected: Vec<bool>,
    /// Processes that were selected and could not be read.
    unscanned: Vec<UnscannedProcess>,
}

impl FoundMachines {
    /// The selected machines.
    fn selected(&self) -> Vec<Machine> {
        let selected = self.all.iter().zip(&self.is_selected).filter(|(_, is_selected)| **is_selected);
        selected.map(|(machine, _)| machine.clone()).collect()
    }
}

/// Find the machines of a host, and those that are selected. Without a selection, all are.
fn read_machines(host: &dyn Host, targets: &ProcessOptions, global: &GlobalOptions) -> anyhow::Result<FoundMachines> {
    let selection = host_selection::process_selection(targets, global)?;
    let (selected, unscanned) = find_machines(host, &selection)?;
    if selected.is_empty() {
        if targets.selects_some() {
            host_selection::check_any_seen(host, false, &selection, &unscanned, global).or_else(|error| {
                // The process was seen, and is no machine.
                if targets.pid.is_empty() || !unscanned.is_empty() { Err(error) } else { Ok(()) }
            })?;
            bail!(
                "no selected process has threads of vCPUs: they are recognized by their names, such as `CPU 0/KVM`; start \
                 QEMU with -name ...,debug-threads=on, as libvirt does"
            );
        }
        bail!("no virtual machine is running: name another process with threads of vCPUs by --pid");
    }
    let everything =
        ProcessSelection { pids: Vec::new(), ..host_selection::process_selection(&ProcessOptions::default(), global)? };
    let mut all = if targets.selects_some() { find_machines(host, &everything)?.0 } else { Vec::new() };
    let is_of =
        |machine: &Machine, others: &[Machine]| others.iter().any(|other| other.process.id == machine.process.id);
    all.retain(|machine| !is_of(machine, &selected));
    let is_selected = [vec![true; selected.len()], vec![false; all.len()]].concat();
    Ok(FoundMachines { all: [selected, all].concat(), is_selected, unscanned })
}

/// The online CPUs; none if they are not known.
fn online_cpus(host: &dyn Host) -> IdSet {
    let list = host.read("sys/devices/system/cpu/online").and_then(|bytes| parse::number_list(&bytes));
    list.unwrap_or_default().into_iter().collect()
}

/// Why a machine has no figures.
fn why_missing(host: &dyn Host, machine: &Machine) -> String {
    if machine.vcpus.is_empty() {
        return "its threads have no names of vCPUs, such as `CPU 0/KVM`: start QEMU with -name ...,debug-threads=on"
            .to_owned();
    }
    match sample::missing_reason(host, machine) {
        Some(why) => format!("the counters of its vCPUs cannot be read: {why}"),
        None => "its vCPUs began or ended during the observation".to_owned(),
    }
}

fn parse_interval(text: &str) -> Result<Duration, String> {
    let interval = parse_duration(text)?;
    if interval < sample::MIN_INTERVAL {
        return Err("give at least 200ms, which are two samples; 2s is accurate".to_owned());
    }
    Ok(interval)
}
