//! `pagefold doctor`: why KSM merges nothing although it is on, and which settings of a host and of its virtual machines
//! are worth a change.

use crate::command_line::{GlobalOptions, GuestAgentOptions, MonitorOptions};
use crate::config::Config;
use crate::{CommandOutcome, host_selection, output};
use anyhow::bail;
use clap::Args;
use clap::builder::PossibleValuesParser;
use pagefold_base::Pid;
use pagefold_doctor::decide::audit::Topic;
use pagefold_doctor::decide::audit::facts::VmFacts;
use pagefold_doctor::doctor_facts;
use pagefold_doctor::doctor_facts::TrustPolicy;
use pagefold_doctor::text;
use pagefold_doctor::wire::{DoctorReport, VerdictName};
use pagefold_doctor::{guest_facts, monitor_facts};
use pagefold_output::wire;

const EXAMPLES: &str = "\
Examples:
  sudo pagefold doctor                find problems in the settings of this host and its machines
  pagefold doctor --topic vm          audit the definitions of virtual machines only
  sudo pagefold doctor --pid 1234     find out why nothing of this process merges
  sudo pagefold doctor --guest-agent  also ask the agents within guests
  sudo pagefold doctor --libvirt-monitor --libvirt-agent
                                      also ask monitors and agents of libvirt's machines
  pagefold doctor --verbose           also show the reasons for findings that are ok
  pagefold doctor --json | jq '.findings[] | select(.verdict == \"fail\")'

Nothing is changed: remedies are printed, not applied. The QMP monitor of each QEMU is asked for at most a second, \
unless another client uses it, as libvirt does. With --guest-agent only commands that read are sent to QEMU's \
guest agents, and an agent has one second. Monitors and agents of libvirt's machines are asked through libvirt, and \
only with --libvirt-monitor and --libvirt-agent: libvirt marks these machines as tainted until they end.

Exit status: 0 no finding fails, 1 a finding fails, 2 no such process or another error, 3 no finding \
fails but some are unknown, for lack of privilege, because ksmd has not scanned enough, or because an agent does not \
answer.";

/// Arguments of `doctor`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct DoctorArguments {
    /// Examine this process instead of the host; may be given several times
    #[arg(long, value_name = "N")]
    pid: Vec<u32>,
    /// Show only findings of this topic; may be given several times
    #[arg(long, value_name = "TOPIC", value_parser = PossibleValuesParser::new(Topic::ALL.map(Topic::name)))]
    topic: Vec<String>,
    #[command(flatten)]
    monitors: MonitorOptions,
    #[command(flatten)]
    agents: GuestAgentOptions,
    /// Also show findings that are ok in full
    #[arg(long, short)]
    verbose: bool,
    /// Print JSON (see `pagefold schema doctor`)
    #[arg(long)]
    json: bool,
}

/// Examine the host or some of its processes, and print the findings.
pub fn run(options: &DoctorArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let host = host_selection::open_host(global)?;
    let mut pids: Vec<Pid> = options.pid.iter().copied().map(Pid).collect();
    pids.sort();
    pids.dedup();
    let Config { domains, exclusions, .. } = Config::load(global)?;
    let mut facts = doctor_facts::gather_host_facts(&*host, &pids, &TrustPolicy { domains, exclusions });
    let is_selected = |vm: &VmFacts| pids.is_empty() || pids.contains(&vm.process.pid);
    let monitors = options.monitors.access();
    monitor_facts::gather_monitor_facts(&*host, facts.settings.vms.iter_mut().filter(|vm| is_selected(vm)), monitors);
    if let Some(agents) = options.agents.access() {
        guest_facts::gather_guest_facts(&*host, facts.settings.vms.iter_mut().filter(|vm| is_selected(vm)), agents);
    }
    let mut processes = Vec::new();
    for pid in &pids {
        match facts.processes.iter().find(|process| process.process.id.pid == *pid && pid.0 > 0) {
            Some(process) => processes.push(process),
            None => bail!("--pid {pid}: {} has no such process", host.describe()),
        }
    }
    let report = if pids.is_empty() {
        DoctorReport::from_host(host.describe(), &facts)
    } else {
        DoctorReport::from_processes(host.describe(), &facts, &processes)
    };
    let topics: Vec<&str> = options.topic.iter().map(String::as_str).collect();
    let report = if topics.is_empty() { report } else { report.retain_topics(&topics) };
    let report = match remedy_without_sudo(global) {
        Some(instead) => report.replace_privilege_remedies(instead),
        None => report,
    };
    output::print_stdout(&if options.json {
        wire::to_json(&report)
    } else {
        text::render(&report, options.verbose, output::stdout_style(global))
    })?;
    Ok(match report.verdict {
        VerdictName::Fail => CommandOutcome::NegativeVerdict,
        _ if report.counts.unknown > 0 || !report.unscanned_processes.is_empty() => CommandOutcome::Partial,
        _ => CommandOutcome::Done,
    })
}

/// The remedy where running again as root would change nothing.
fn remedy_without_sudo(global: &GlobalOptions) -> Option<&'static str> {
    if host_selection::is_recording(global) {
        Some("# it is not in the recording: record as root with pagefold record")
    } else if rustix::process::geteuid().is_root() {
        Some("# refused even to root: CAP_SYS_PTRACE is missing (a container?), or a security module forbids it")
    } else {
        None
    }
}
