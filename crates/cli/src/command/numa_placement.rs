//! `pagefold numa apply`, `verify` and `undo`: place virtual machines on NUMA nodes.

use super::numa::{PlanOptions, read_map, read_placeable_map};
use super::recover::{self, open_changeable_host, open_live_host, with_remedy};
use crate::command_line::{GlobalOptions, ProcessOptions, parse_bandwidth};
use crate::{CommandOutcome, host_selection, output, progress, stop_signal};
use anyhow::{Context, bail};
use clap::Args;
use pagefold_base::{Absent, Bytes, PageSize, Pid, ProcessId};
use pagefold_census::results::UnscannedProcess;
use pagefold_census::scan_scope;
use pagefold_host::qemu_monitor::MonitorAccess;
use pagefold_host::transaction::journal::StateDirectory;
use pagefold_host::transaction::session::{self, FailedUndo};
use pagefold_host::{Host, hold};
use pagefold_numa::apply::{self, ApplyLimits, MachineTarget, PlacementSessions, PreparedMachine, UnreadableMachine};
use pagefold_numa::decide::plan::{self, Pattern, PlacementPlan, PlacementProblem};
use pagefold_numa::decide::requested::RequestedNodes;
use pagefold_numa::map::{NumaMap, ProcessPlacement};
use pagefold_numa::placement_record::{self, PlacedMachine, PlacementRecord, VerifiedMachine};
use pagefold_numa::text;
use pagefold_numa::wire::apply::{NumaApplyReport, NumaVerifyReport};
use pagefold_output::wire;
use pagefold_tune::decide::conflict::{Conflict, find_placement_rivals};
use pagefold_tune::facts::running_tuners;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicBool;
use std::time::Instant;

const APPLY_EXAMPLES: &str = "\
Examples:
  sudo pagefold numa apply --dry-run            what would be done for all virtual machines
  sudo pagefold numa apply                      place all virtual machines as `numa plan` says
  sudo pagefold numa apply --vm db1 --to 1      all of db1 on node 1
  sudo pagefold numa apply --vm big --to 0=1,1=0   virtual node 0 on node 1, and virtual node 1 on node 0
  sudo pagefold numa apply --bandwidth 500MiB   at most 500 MiB a second
  sudo pagefold numa apply --working-set 10s    weight memory by its use in the next ten seconds

First each thread gets the CPUs of its node, then memory moves in batches of 32 MiB, as long as its new node has room \
and no task of the host waits for memory. If most of the memory of a machine stays elsewhere, its threads keep their \
previous CPUs. Memory that is mapped several times, such as pages merged by KSM, stays. Ctrl-C undoes everything; after \
kill -9, `pagefold recover` does. After success the placement stays until `pagefold numa undo`.

Exit status: 0 done, 2 usage error or failure; the message says which changes remain, 3 some threads or memory stay, \
other than memory that is mapped several times, something could not be read, or the command was interrupted.";

const VERIFY_EXAMPLES: &str = "\
Examples:
  sudo pagefold numa verify
  pagefold --host recording:DIR --state DIR2 numa verify   a recording of the same boot, and the record of placements
  sudo pagefold numa verify --json | jq '.machines[] | select(.state == \"changed\")'

It changes nothing. A change that another program has made is reported and stays. It asks the QMP monitor of each QEMU \
that no other client uses. A machine is incomplete if more than 2 % of its memory could not be moved and is still \
elsewhere, other than memory that is mapped several times.

Exit status: 0 all machines that run are as planned, 1 one has changed or is incomplete, 2 failure, 3 one could not be read.";

const UNDO_EXAMPLES: &str = "\
Examples:
  sudo pagefold numa undo              the placements of all machines
  sudo pagefold numa undo --vm db1     that of db1 only

Memory moves back to the nodes from which it was moved, and threads get back their CPUs, also those that `pagefold vcpu \
spread` has changed. CPUs that another program has changed since stay. A machine of which a change could not be undone \
stays in the record of `numa verify`.

Exit status: 0 everything is undone, 2 failure, or no process is selected, 3 some changes remain, or a process is \
missing or could not be read.";

/// Whether NUMA balancing is on (kernel/sched/core.c, `sysctl_numa_balancing`).
pub(super) const NUMA_BALANCING_FILE: &str = "proc/sys/kernel/numa_balancing";

/// Arguments of `numa apply`.
#[derive(Args, Debug)]
#[command(after_help = APPLY_EXAMPLES)]
pub struct ApplyArguments {
    /// Show what would be done, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Place the selected machines on this node, or each virtual node on its node (0=1,1=0), without a plan
    #[arg(long, value_name = "NODES", conflicts_with = "working_set")]
    to: Option<RequestedNodes>,
    /// Bytes of memory to move in a second at most, on average [default: no limit]
    #[arg(long, value_name = "BYTES", value_parser = parse_bandwidth)]
    bandwidth: Option<Bytes>,
    #[command(flatten)]
    plan: PlanOptions,
    /// Print JSON (see `pagefold schema numa-apply`)
    #[arg(long)]
    json: bool,
    // Last, because its help heading applies to all options after it.
    #[command(flatten)]
    targets: ProcessOptions,
}

/// Arguments of `numa verify`.
#[derive(Args, Debug)]
#[command(after_help = VERIFY_EXAMPLES)]
pub struct VerifyArguments {
    /// Print JSON (see `pagefold schema numa-verify`)
    #[arg(long)]
    json: bool,
}

/// Arguments of `numa undo`.
#[derive(Args, Debug)]
#[command(after_help = UNDO_EXAMPLES)]
pub struct UndoArguments {
    /// Print JSON (see `pagefold schema recover`)
    #[arg(long)]
    json: bool,
    // Last, because its help heading applies to all options after it.
    #[command(flatten)]
    targets: ProcessOptions,
}

/// Place machines.
pub fn run_apply(options: &ApplyArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    if options.to.is_some() && !options.targets.selects_some() {
        bail!("--to would place all virtual machines there: select machines with --vm or --pid");
    }
    options.plan.check_measurable(global)?;
    let host = if options.dry_run { host_selection::open_host(global)? } else { open_changeable_host(global)? };
    let started = Instant::now();
    let stop = stop_signal::stop_on_signal().context("cannot handle signals")?;
    // The locks are taken before the map is read, so that no other pagefold moves memory in between.
    let sessions = if options.dry_run { None } else { Some(begin_sessions(&*host, global)?) };
    let map = read_placeable_map(&*host, &options.targets, global)?;
    let mut problem = options.plan.problem(&map, host.page_size(), global)?;
    let hotness = options.plan.weight_problem(&*host, (&map, &mut problem), global, &stop)?;
    let (targets, planned_pages) = match &options.to {
        Some(nodes) => {
            let mut selected = map.processes.iter().zip(&problem.vms).map(|(_, vm)| vm);
            if let Some(vm) = selected.find(|vm| vm.has_pinned_memory) {
                bail!("--to: the memory of {} is pinned, as for a passed-through device, and cannot be moved", vm.name);
            }
            let requested = requested_targets(&map, &problem, nodes, |_| true)?;
            requested.iter().try_for_each(|(target, _)| check_permitted(&map, &problem, target))?;
            requested.into_iter().unzip()
        }
        None => planned_targets(&problem, &options.plan.make_plan(&problem)),
    };
    let prepared =
        apply::prepare(&*host, &map, &targets, &stop).map_err(|error| explain_unreadable_machine(&error, global))?;
    let placed: Vec<PlacedMachine> =
        targets.iter().zip(&prepared).map(|(target, prepared)| PlacedMachine::new(&map, target, prepared)).collect();
    let machines: Vec<(PlacedMachine, PreparedMachine, u64)> = placed
        .iter()
        .cloned()
        .zip(prepared)
        .zip(planned_pages)
        .map(|((placed, prepared), pages)| (placed, prepared, pages))
        .collect();
    warn_of_rivals(&*host);
    let placed_parts = targets.iter().map(|target| (target.position, &target.parts[..])).collect();
    let crowded = plan::crowded_nodes(&problem, &placed_parts);
    let mut report = NumaApplyReport::planned(host.describe(), host.page_size(), &map, &machines, crowded, &hotness);
    if let Some(sessions) = sessions.filter(|_| !machines.is_empty()) {
        let prepared: Vec<PreparedMachine> = machines.into_iter().map(|(_, prepared, _)| prepared).collect();
        let limits = ApplyLimits {
            bandwidth: options.bandwidth,
            headroom_share: options.plan.headroom,
            reserved: map.topology.reserved(),
        };
        report = carry_out(sessions, (&prepared, placed), (options, limits), global, &stop, report)?;
    }
    report.seconds = started.elapsed().as_secs_f64();
    if options.json {
        output::print_stdout(&wire::to_json(&report))?;
    } else {
        let remedy = host_selection::permission_remedy(global);
        let next_commands = match host_selection::is_simulated(global) {
            true => "The simulated host ends with this command, and so does the placement.",
            false => "`pagefold numa verify` compares the host with this plan later; `pagefold numa undo` reverts it.",
        };
        let text = text::apply::render_apply(&report, (remedy, next_commands), output::stdout_style(global));
        output::print_stdout(&text)?;
    }
    Ok(if report.is_incomplete() { CommandOutcome::Partial } else { CommandOutcome::Done })
}

/// Name running programs that move machines, too.
pub(super) fn warn_of_rivals(host: &dyn Host) {
    placement_rivals(host).for_each(|rival| eprintln!("pagefold: {rival}"));
}

/// What running programs do to placed machines, and what to do about it.
pub(super) fn placement_rivals(host: &dyn Host) -> impl Iterator<Item = String> + use<> {
    find_placement_rivals(&running_tuners(host)).into_iter().map(|Conflict { program, writes, remedy }| {
        format!("{program} runs and would move placed machines again: it changes {writes}. {remedy}")
    })
}

fn begin_sessions<'h>(host: &'h dyn Host, global: &GlobalOptions) -> anyhow::Result<PlacementSessions<'h>> {
    let (sessions, (undone, failed)) = PlacementSessions::begin(host, &global.state).map_err(with_remedy)?;
    recover::print_leftover(&undone, &failed);
    Ok(sessions)
}

fn explain_unreadable_machine(error: &UnreadableMachine, global: &GlobalOptions) -> anyhow::Error {
    let why = &error.source;
    match why {
        Absent::NotOnThisKernel if global.host != "live" => anyhow::anyhow!(
            "the recording does not have the pages of {}, which the steps depend on: record all of these machines, or \
             select others with --vm",
            error.machine
        ),
        Absent::Denied => anyhow::anyhow!("{error}: {why}. {}", host_selection::permission_remedy(global)),
        why => anyhow::anyhow!("{error}: {why}"),
    }
}

fn explain_unreadable_boot(why: &Absent) -> anyhow::Error {
    anyhow::anyhow!("cannot read the ID of the host's boot: {why}")
}

/// The machines that a plan moves or binds, with the pages to move.
fn planned_targets(problem: &PlacementProblem, plan: &PlacementPlan) -> (Vec<MachineTarget>, Vec<u64>) {
    let moves = plan.moves.iter().zip(&problem.vms).enumerate();
    let target = |(position, (planned, vm)): (usize, (&plan::PlannedMove, &plan::PlannedVm))| {
        let target = MachineTarget::planned(position, vm.parts.len(), planned, problem)?;
        Some((target, planned.moved_pages.round() as u64))
    };
    moves.filter_map(target).unzip()
}

/// The machines of a map that are selected by their position, on the requested nodes, with the pages to move.
pub(super) fn requested_targets(
    map: &NumaMap,
    problem: &PlacementProblem,
    nodes: &RequestedNodes,
    is_selected: impl Fn(&usize) -> bool,
) -> anyhow::Result<Vec<(MachineTarget, u64)>> {
    if let Some(unknown) = nodes.nodes().into_iter().find(|node| !map.topology.nodes.contains_key(node)) {
        let known: Vec<String> = map.topology.nodes.keys().map(u32::to_string).collect();
        bail!("--to: there is no node {unknown}; the nodes are {}", known.join(", "));
    }
    for (id, node) in map.topology.nodes.iter().filter(|(id, _)| nodes.nodes().contains(*id)) {
        let has_memory = !node.memory.as_ref().is_ok_and(|memory| memory.total == Bytes::ZERO);
        if node.cpus.is_empty() || !has_memory {
            let lacking = if has_memory { "online CPUs" } else { "memory" };
            bail!("--to: node {id} has no {lacking}: name a node that has CPUs and memory (see `pagefold numa map`)");
        }
    }
    let target = |(position, (placement, vm)): (usize, (&ProcessPlacement, &plan::PlannedVm))| {
        let virtual_nodes: Vec<u32> = match vm.parts.len() {
            1 => Vec::new(),
            _ => placement.virtual_nodes.iter().map(|node| node.node.id).collect(),
        };
        let pattern = nodes.pattern(&virtual_nodes).with_context(|| format!("--to: {}", vm.name))?;
        let target = MachineTarget::new(position, vm.parts.len(), &pattern, problem);
        let target = target.context("a requested placement has nodes")?;
        Ok((target, pages_to_move(vm, &pattern)))
    };
    let machines = map.processes.iter().zip(&problem.vms).enumerate();
    machines.filter(|(position, _)| is_selected(position)).map(target).collect()
}

/// Refuse requested nodes that a machine or one of its virtual nodes may not use.
fn check_permitted(map: &NumaMap, problem: &PlacementProblem, target: &MachineTarget) -> anyhow::Result<()> {
    let vm = &problem.vms[target.position];
    match map.processes[target.position].forbidden_nodes(vm, &target.parts).first() {
        Some(forbidden) => bail!(
            "--to: {} may not use node {}: {}",
            forbidden.describe_subject(&vm.name),
            forbidden.node,
            forbidden.reason
        ),
        None => Ok(()),
    }
}

/// The pages of a machine that are on other nodes than requested.
fn pages_to_move(vm: &plan::PlannedVm, pattern: &Pattern) -> u64 {
    let Pattern::Nodes(nodes) = pattern else { return 0 };
    let on_node = |part: &plan::PlannedPart, node: u32| part.pages.get(&node).copied().unwrap_or(0.0);
    let moved = vm.parts.iter().zip(nodes).map(|(part, &node)| part.total_pages() - on_node(part, node));
    moved.sum::<f64>().round() as u64
}

/// Carry out the steps, keep the changes or undo them, and measure the result.
fn carry_out(
    mut sessions: PlacementSessions<'_>,
    (prepared, placed): (&[PreparedMachine], Vec<PlacedMachine>),
    (options, limits): (&ApplyArguments, ApplyLimits),
    global: &GlobalOptions,
    stop: &AtomicBool,
    report: NumaApplyReport,
) -> anyhow::Result<NumaApplyReport> {
    let host = sessions.memory.host();
    let boot = session::read_boot_id(host).map_err(|why| explain_unreadable_boot(&why))?;
    let directory = StateDirectory::open(&global.state).context("cannot open the state directory")?;
    let mut record = PlacementRecord::load(&directory, &boot).context("cannot read the record of placements")?;
    record.forget_ended(host);
    record.counters = placement_record::read_counters(host);
    let total = Bytes(report.machines.iter().map(|machine| machine.planned_pages * report.page_size).sum());
    let outcome = progress::run_move_with_progress(total, stop, |progress| {
        apply::carry_out(&mut sessions, prepared, limits, progress, stop)
    });
    let outcome = match outcome {
        Ok(outcome) => outcome,
        // Dropping the memory session undoes its changes, too.
        Err(error) => return Err(with_remedy(sessions.cpus.abort(error))),
    };
    let mut report = report.with_outcome(&outcome);
    if outcome.interrupted {
        let failed = sessions.undo_all().map_err(with_remedy)?;
        report.failed_undos = failed.iter().map(FailedUndo::to_string).collect();
        return Ok(report);
    }
    let not_kept = sessions.keep().map_err(with_remedy)?;
    report.failed_undos.extend(not_kept.iter().map(FailedUndo::to_string));
    record.add(outcome.records(&placed));
    record.store(&directory).context(
        "the machines are placed, but the record that `numa verify` needs cannot be stored; `pagefold numa undo` undoes \
         the placement",
    )?;
    // Machines that have ended meanwhile have no measured placement.
    report = match read_map(host, &options.targets, Some(MonitorAccess::Socket), global) {
        Ok(map) => report.with_measured(&placement_record::verify_machines(&map, placed)),
        Err(_) => report,
    };
    Ok(report)
}

/// Compare the machines that were placed with the plan.
pub fn run_verify(options: &VerifyArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let host = host_selection::open_host(global)?;
    let boot = session::read_boot_id(&*host).map_err(|why| match why {
        Absent::NotOnThisKernel if global.host != "live" => {
            anyhow::anyhow!("the recording lacks the boot of its host: record it again with this version of pagefold")
        }
        why => explain_unreadable_boot(&why),
    })?;
    let record = match StateDirectory::open(&global.state) {
        Ok(directory) => PlacementRecord::load(&directory, &boot).context("cannot read the record of placements")?,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => PlacementRecord::default(),
        Err(error) => return Err(error).context("cannot open the state directory"),
    };
    let report = verify(&*host, record, global)?;
    if options.json {
        output::print_stdout(&wire::to_json(&report))?;
    } else {
        output::print_stdout(&text::apply::render_verify(&report, output::stdout_style(global)))?;
    }
    Ok(match (report.differs_from_plan(), report.is_incomplete()) {
        (true, _) => CommandOutcome::NegativeVerdict,
        (false, true) => CommandOutcome::Partial,
        (false, false) => CommandOutcome::Done,
    })
}

fn verify(host: &dyn Host, record: PlacementRecord, global: &GlobalOptions) -> anyhow::Result<NumaVerifyReport> {
    let report = |machines: &[(VerifiedMachine, bool)], counters, all_machines: &[(Option<f64>, bool)]| {
        let balancing = host.read(NUMA_BALANCING_FILE).ok();
        let balancing = balancing.map(|text| String::from_utf8_lossy(&text).trim() != "0");
        let page_size: PageSize = host.page_size();
        NumaVerifyReport::new(host.describe(), page_size, machines, counters, balancing, all_machines)
    };
    if record.machines.is_empty() {
        return Ok(report(&[], BTreeMap::new(), &[]));
    }
    let map = read_map(host, &ProcessOptions::default(), Some(MonitorAccess::Socket), global)?;
    let machines: Vec<(VerifiedMachine, bool)> = placement_record::verify_machines(&map, record.machines)
        .into_iter()
        .map(|machine| {
            let has_ended = matches!(hold(host, machine.placed.process()), Err(Absent::Vanished));
            (machine, has_ended)
        })
        .collect();
    let is_placed = |id| machines.iter().any(|(machine, _)| machine.placed.process() == id);
    let all_machines: Vec<(Option<f64>, bool)> = map
        .processes
        .iter()
        .filter(|placement| placement.process.identity.vm.is_some())
        .map(|placement| (placement.movable_remote_share, is_placed(placement.process.id)))
        .collect();
    let mut counters = placement_record::read_counters(host);
    for (name, before) in &record.counters {
        if let Some(now) = counters.get_mut(name) {
            *now = now.saturating_sub(*before);
        }
    }
    Ok(report(&machines, counters, &all_machines))
}

/// Undo placements since boot.
pub fn run_undo(options: &UndoArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let host = open_live_host(global)?;
    let (only, unselected) = match options.targets.selects_some() {
        true => {
            let (selected, unselected) = select_processes(&*host, &options.targets, global)?;
            (Some(selected), unselected)
        }
        false => (None, Vec::new()),
    };
    let mut sessions = begin_sessions(&*host, global)?;
    let (undone, failed) = sessions.undo_kept(only.as_ref()).map_err(with_remedy)?;
    let boot = session::read_boot_id(&*host).map_err(|why| explain_unreadable_boot(&why))?;
    let directory = StateDirectory::open(&global.state).context("cannot open the state directory")?;
    let mut record = PlacementRecord::load(&directory, &boot).context("cannot read the record of placements")?;
    record.forget_undone(only.as_ref(), &failed);
    record.store(&directory).context("cannot store the record of placements")?;
    let empty_text = match only {
        Some(_) => "None of these machines was placed since boot.",
        None => "No machine was placed since boot.",
    };
    let outcome = recover::print_result(&undone, &failed, options.json, empty_text)?;
    unselected.iter().for_each(|line| eprintln!("pagefold: {line}"));
    Ok(if unselected.is_empty() { outcome } else { CommandOutcome::Partial })
}

/// The selected processes, of which there must be one at least, and what is not known of others.
fn select_processes(
    host: &dyn Host,
    targets: &ProcessOptions,
    global: &GlobalOptions,
) -> anyhow::Result<(BTreeSet<ProcessId>, Vec<String>)> {
    let selection = host_selection::process_selection(targets, global)?;
    let (processes, unscanned) = scan_scope::inspect_selected(host, &selection, |_, process| Ok(process.id))?;
    host_selection::check_any_seen(host, !processes.is_empty(), &selection, &unscanned, global)?;
    let selected: BTreeSet<ProcessId> = processes.into_iter().collect();
    let unselected = describe_unselected(&selection.pids, &selected, &unscanned);
    if selected.is_empty() {
        let why = match selection.vm_patterns.is_empty() {
            true => anyhow::anyhow!("no process matches"),
            false => host_selection::no_such_vm(host, &selection.vm_patterns),
        };
        bail!("{why}; {}", unselected.join("; "));
    }
    Ok((selected, unselected))
}

/// The most processes that a message names.
const MAX_NAMED_PROCESSES: usize = 8;

/// Names requested processes that are not selected. Without numbers, any process that could not be read may match.
fn describe_unselected(
    requested: &[Pid],
    selected: &BTreeSet<ProcessId>,
    unscanned: &[UnscannedProcess],
) -> Vec<String> {
    let reason = |pid| unscanned.iter().find(|process| process.pid == pid).map(|process| &process.why);
    let is_selected = |pid| selected.iter().any(|process| process.pid == pid);
    let requested: BTreeSet<Pid> = requested.iter().copied().collect();
    let describe = |&pid: &Pid| match reason(pid) {
        Some(why) => format!("process {pid} is not undone: {why}"),
        None => format!("process {pid} is not undone: it has no memory, or another option excludes it"),
    };
    if !requested.is_empty() {
        return requested.iter().filter(|&&pid| !is_selected(pid)).map(describe).collect();
    }
    if unscanned.is_empty() {
        return Vec::new();
    }
    let name = |process: &UnscannedProcess| format!("{} ({})", process.pid, process.why);
    let named: Vec<String> = unscanned.iter().take(MAX_NAMED_PROCESSES).map(name).collect();
    let more = if unscanned.len() > MAX_NAMED_PROCESSES { ", ..." } else { "" };
    vec![format!("some processes cannot be read, and may match: {}{more}", named.join(", "))]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_that_are_not_selected_are_named() {
        let unscanned = |pid, why| UnscannedProcess { pid: Pid(pid), comm: None, why };
        let selected: BTreeSet<ProcessId> = [ProcessId { pid: Pid(7), start_time: 1 }].into();
        let missing = [unscanned(99999, Absent::Vanished)];
        let lines = describe_unselected(&[Pid(99999), Pid(7), Pid(7), Pid(2)], &selected, &missing);
        let kernel_thread = "process 2 is not undone: it has no memory, or another option excludes it";
        assert_eq!(lines, [kernel_thread, "process 99999 is not undone: vanished"]);
        assert_eq!(describe_unselected(&[Pid(7)], &selected, &[]), [""; 0]);
        assert_eq!(describe_unselected(&[], &selected, &[]), [""; 0]);
        let many: Vec<UnscannedProcess> = (1..=9).map(|pid| unscanned(pid, Absent::Denied)).collect();
        let lines = describe_unselected(&[], &selected, &many);
        assert!(lines.len() == 1 && lines[0].contains("may match: 1 (permission denied), 2 (pe"), "{lines:?}");
        assert!(lines[0].ends_with("8 (permission denied), ..."), "{lines:?}");
    }
}
