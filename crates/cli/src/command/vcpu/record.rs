//! `pagefold vcpu record`: records the schedule of this host.

use super::read_machines;
use crate::command_line::{GlobalOptions, ProcessOptions, parse_bytes, parse_duration};
use crate::{CommandOutcome, host_selection, output, progress, stop_signal};
use anyhow::Context;
use clap::Args;
use pagefold_base::{Bytes, Pid};
use pagefold_host::Host;
use pagefold_output::wire;
use pagefold_vcpu::recorder::{self, RecordingOptions, ScheduleRecordingSummary};
use pagefold_vcpu::text;
use pagefold_vcpu::wire::record::VcpuRecordReport;
use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::{BufWriter, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  sudo pagefold vcpu record vms.data
  sudo pagefold vcpu record vms.data --duration 10s
  sudo pagefold vcpu record web.data --vm 'web*'     without the names of other threads
  pagefold vcpu map vms.data --svg vms.svg
  perf script -i vms.data | head

It records sched_switch, sched_wakeup, sched_wakeup_new and sched_migrate_task on all CPUs by perf_event_open(2), and \
changes nothing: the kernel ends the recording with this command, however it ends. The file is one of perf. Ctrl-C ends \
the recording early, and the file is complete. An event takes about 100 bytes.

Exit status: 0 done, 2 usage error or failure, 3 events were lost.";

/// Arguments of `vcpu record`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct VcpuRecordArguments {
    /// The file to write; an existing one is replaced
    file: PathBuf,
    /// How long to record
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = parse_duration)]
    duration: Duration,
    /// Memory for each of four events on each CPU; events that do not fit are lost and counted
    #[arg(long, value_name = "SIZE", default_value = "256KiB", value_parser = parse_bytes)]
    buffer: Bytes,
    /// Print JSON (see `pagefold schema vcpu-record`)
    #[arg(long)]
    json: bool,
    // Last, because its help heading applies to all options after it. Other threads stay without names in the file.
    #[command(flatten)]
    targets: ProcessOptions,
}

/// Record.
pub fn run(options: &VcpuRecordArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let host = host_selection::open_host(global)?;
    let processes = selected_processes(&*host, &options.targets, global)?;
    let path = options.file.display();
    // The names of threads are not for all users.
    let mut created = OpenOptions::new();
    created.write(true).create(true).truncate(true).mode(0o600);
    let file = created.open(&options.file).with_context(|| format!("cannot create {path}"))?;
    let recording =
        RecordingOptions { duration: options.duration, processes, buffer_bytes: buffer_bytes(options.buffer) };
    let summary = record_with_progress(&*host, &recording, BufWriter::new(&file));
    let metadata = file.metadata().with_context(|| format!("cannot read the size of {path}"))?;
    if summary.is_err() && metadata.is_file() {
        // It is empty or incomplete.
        let _ = std::fs::remove_file(&options.file);
    }
    let report = VcpuRecordReport::new(path.to_string(), metadata.len(), summary?);
    output::print_stdout(&if options.json {
        wire::to_json(&report)
    } else {
        text::record::render(&report, output::stdout_style(global))
    })?;
    Ok(if report.lost_events > 0 { CommandOutcome::Partial } else { CommandOutcome::Done })
}

/// The processes of the selected machines; none without a selection.
pub(super) fn selected_processes(
    host: &dyn Host,
    targets: &ProcessOptions,
    global: &GlobalOptions,
) -> anyhow::Result<BTreeSet<Pid>> {
    if !targets.selects_some() {
        return Ok(BTreeSet::new());
    }
    let machines = read_machines(host, targets, global)?.selected();
    Ok(machines.iter().map(|machine| machine.process.id.pid).collect())
}

/// Record, and show how much time is left.
pub(super) fn record_with_progress(
    host: &dyn Host,
    options: &RecordingOptions,
    file: impl Write + Seek + Send,
) -> anyhow::Result<ScheduleRecordingSummary> {
    let stop = stop_signal::stop_on_signal().context("cannot handle signals")?;
    let record = || recorder::record(host, options, &stop, file);
    Ok(progress::run_observation_with_progress(options.duration, record)?)
}

fn buffer_bytes(bytes: Bytes) -> usize {
    usize::try_from(bytes.0).unwrap_or(usize::MAX)
}
