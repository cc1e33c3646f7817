//! `pagefold vcpu status`: how long vCPUs run and wait for a CPU.

use super::{online_cpus, parse_interval, read_machines, why_missing};
use crate::command_line::{GlobalOptions, ProcessOptions};
use crate::{CommandOutcome, host_selection, output, progress, stop_signal};
use anyhow::{Context, anyhow, bail};
use clap::Args;
use pagefold_host::Host;
use pagefold_output::wire;
use pagefold_recording::Recording;
use pagefold_vcpu::decide::ready_time::HostSample;
use pagefold_vcpu::machines::Machine;
use pagefold_vcpu::sample;
use pagefold_vcpu::text;
use pagefold_vcpu::wire::status::{ObservationReport, VcpuStatusReport};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  sudo pagefold vcpu status                     all virtual machines of this host, for two seconds
  sudo pagefold vcpu status --vm 'web*' --interval 10s
  sudo pagefold vcpu status --vm db1 --json | jq '.machines[].usage.ready_percent'
  pagefold --host recording:/var/tmp/day vcpu status

It reads counters of the kernel and changes nothing. \"ready\" is the time in which a vCPU could run and waited for a \
CPU, which other hypervisors show as \"CPU ready\". Guests on KVM see it as steal time. \"idle\" is the rest: the guest \
had halted the vCPU. A recording needs two readings: make it with `pagefold record --interval`.

Exit status: 0 done, 2 usage error or failure, 3 something could not be read.";

/// Arguments of `vcpu status`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct VcpuStatusArguments {
    /// Time over which the vCPUs are observed; of a recording, it is that between its last two readings
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = parse_interval)]
    interval: Duration,
    /// List the vCPUs of all machines, not only those of the four with most ready time
    #[arg(long)]
    all_vcpus: bool,
    /// Print JSON (see `pagefold schema vcpu-status`)
    #[arg(long)]
    json: bool,
    // Last, because its help heading applies to all options after it.
    #[command(flatten)]
    targets: ProcessOptions,
}

/// Show the status.
pub fn run(options: &VcpuStatusArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let host = host_selection::open_host(global)?;
    let stop = stop_signal::stop_on_signal().context("cannot handle signals")?;
    let found = read_machines(&*host, &options.targets, global)?;
    let machines = found.selected();
    let samples = match global.host.strip_prefix("recording:") {
        Some(root) => recorded_samples(&*host, Path::new(root), &machines)?,
        None => progress::run_observation_with_progress(options.interval, || {
            sample::observe(&*host, &machines, options.interval, &stop)
        }),
    };
    if stop.load(Ordering::Relaxed) {
        bail!("interrupted during the observation");
    }
    let online = online_cpus(&*host);
    let observation = ObservationReport::new(&machines, &samples, &online, |machine| why_missing(&*host, machine));
    let report = VcpuStatusReport::new(host.describe(), &found.all, observation, &found.unscanned, &online);
    if options.json {
        output::print_stdout(&wire::to_json(&report))?;
    } else {
        let remedy = host_selection::permission_remedy(global);
        let style = output::stdout_style(global);
        output::print_stdout(&text::status::render(&report, options.all_vcpus, remedy, style))?;
    }
    Ok(if report.is_incomplete() { CommandOutcome::Partial } else { CommandOutcome::Done })
}

/// The samples of the last two recordings of a trace.
pub(super) fn recorded_samples(host: &dyn Host, root: &Path, machines: &[Machine]) -> anyhow::Result<Vec<HostSample>> {
    let previous = Recording::open_previous(root)?.ok_or_else(|| {
        anyhow!(
            "{} is a single recording, and these figures need two: record again with `pagefold record --interval 2s \
             --duration 4s DIR`",
            root.display()
        )
    })?;
    let read = |host: &dyn Host| {
        sample::read_recorded_sample(host, machines)
            .map_err(|why| anyhow!("{} does not say when it was made (proc/uptime: {why})", host.describe()))
    };
    Ok(vec![read(&previous)?, read(host)?])
}
