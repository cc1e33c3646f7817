//! `pagefold vcpu map`: a picture and measures of a schedule, that of this host or a recorded one.

use super::record::{record_with_progress, selected_processes};
use crate::command_line::{GlobalOptions, ProcessOptions, parse_duration};
use crate::{CommandOutcome, host_selection, output};
use anyhow::{Context, bail};
use clap::Args;
use pagefold_base::IdSet;
use pagefold_output::wire;
use pagefold_vcpu::perfetto;
use pagefold_vcpu::picture::svg::{self, SchedulePanel};
use pagefold_vcpu::recorder::{self, RecordingOptions};
use pagefold_vcpu::schedule::CpuSchedule;
use pagefold_vcpu::sources::threads::Grouping;
use pagefold_vcpu::sources::{RecordedSchedule, read_schedule};
use pagefold_vcpu::text;
use pagefold_vcpu::wire::map::VcpuMapReport;
use regex::Regex;
use std::fs::File;
use std::io::{BufReader, Cursor};
use std::path::{Path, PathBuf};
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  sudo pagefold vcpu map                                    this host, for two seconds
  sudo pagefold vcpu map --duration 500ms --vm web1 --svg web1.svg
  sudo pagefold vcpu record vms.data
  pagefold vcpu map vms.data --svg vms.svg
  pagefold vcpu map vms.data --svg vms.svg --from 500ms --for 50ms
  pagefold vcpu map before.data --beside after.data --svg both.svg
  pagefold vcpu map trace.dat --threads web1=4711-4714 --threads web2=4801-4804
  pagefold vcpu map job.data --group '^worker-([0-9]+)'     threads of a job instead of vCPUs
  pagefold vcpu map vms.data --json | jq '.machines[].co_run_percent'

FILE is one of `pagefold vcpu record`, of \
`perf record -e sched:sched_switch,sched:sched_wakeup -a`, or of \
`trace-cmd record --compression none -C mono -e sched:sched_switch -e sched:sched_wakeup`. Without a file, it records this host first. It changes \
nothing. vCPUs are recognized by the names of their threads, such as `CPU 0/KVM`; a machine is a process \
with vCPUs. The picture has a row for each CPU, a color for each machine and a brightness for each vCPU; a column shows \
what ran longest in it.

Exit status: 0 done, 2 usage error or failure.";

/// Arguments of `vcpu map`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct MapArguments {
    /// A recorded schedule; without it, that of this host is recorded
    file: Option<PathBuf>,
    /// Without a file: how long to record [default: 2s]
    #[arg(long, value_name = "TIME", value_parser = parse_duration, conflicts_with = "file")]
    duration: Option<Duration>,
    /// Write a picture of the schedule
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Begin the picture at this time after the first event
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = parse_duration, requires = "svg")]
    from: Duration,
    /// Time that the picture shows
    #[arg(long = "for", value_name = "TIME", default_value = "200ms", value_parser = parse_duration, requires = "svg")]
    shown: Duration,
    /// Draw another recording beside the first, for the same time after its start
    #[arg(long, value_name = "FILE", requires_all = ["svg", "file"])]
    beside: Vec<PathBuf>,
    /// Write the whole schedule as a trace that ui.perfetto.dev opens
    #[arg(long, value_name = "FILE")]
    perfetto: Option<PathBuf>,
    /// Measure threads whose names match instead of vCPUs; those with the same first capture, or of the same process,
    /// belong together
    #[arg(long, value_name = "REGEX")]
    group: Option<Regex>,
    /// Measure these threads as a machine, such as `web1=4711-4714`; for files that do not tell the processes of threads
    #[arg(long, value_name = "NAME=THREADS", value_parser = parse_threads, conflicts_with = "group")]
    threads: Vec<(String, IdSet)>,
    /// Print JSON (see `pagefold schema vcpu-map`)
    #[arg(long)]
    json: bool,
    // Last, because its help heading applies to all options after it.
    #[command(flatten)]
    targets: ProcessOptions,
}

/// How long to record by default.
const DEFAULT_DURATION: Duration = Duration::from_secs(2);

/// Measure and draw a schedule.
pub fn run(options: &MapArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let grouping = match &options.group {
        Some(pattern) => Grouping::Pattern(pattern),
        None if options.threads.is_empty() => Grouping::Machines,
        None => Grouping::Threads(&options.threads),
    };
    let (path, recorded) = match &options.file {
        Some(file) => (file.display().to_string(), read_file(file, options, grouping)?),
        None => record_now(options, grouping, global)?,
    };
    if recorded.schedule.vms.is_empty() {
        match &options.group {
            Some(pattern) => bail!("{path}: no recorded thread has a name that matches {pattern}"),
            None if !options.threads.is_empty() => bail!("{path}: none of the threads of --threads was recorded"),
            None if !recorded.unassigned_vcpus.is_empty() => {
                let tids: IdSet = recorded.unassigned_vcpus.iter().copied().collect();
                bail!(
                    "{path}: the threads {tids} have names of vCPUs, and the file does not say of which machines: give \
                     them by --threads, such as --threads web1={tids}"
                )
            }
            None => bail!(
                "{path}: no recorded thread has the name of a vCPU, such as `CPU 0/KVM`: start QEMU with -name \
                 ...,debug-threads=on, as libvirt does, or name other threads by --group REGEX"
            ),
        }
    }
    if let Some(svg_path) = &options.svg {
        let mut schedules = vec![(path.clone(), recorded.schedule.clone())];
        for file in &options.beside {
            schedules.push((file.display().to_string(), read_file(file, options, grouping)?.schedule));
        }
        let svg = draw(&schedules, options)?;
        std::fs::write(svg_path, svg).with_context(|| format!("cannot write the picture {}", svg_path.display()))?;
    }
    if let Some(trace_path) = &options.perfetto {
        std::fs::write(trace_path, perfetto::encode(&recorded.schedule))
            .with_context(|| format!("cannot write the trace {}", trace_path.display()))?;
    }
    let report = VcpuMapReport::new(path, &recorded);
    output::print_stdout(&if options.json {
        wire::to_json(&report)
    } else {
        text::map::render(&report, output::stdout_style(global))
    })?;
    Ok(CommandOutcome::Done)
}

fn parse_threads(text: &str) -> Result<(String, IdSet), String> {
    let (name, tids) = text.split_once('=').ok_or("give NAME=THREADS, such as web1=4711-4714")?;
    let tids: IdSet = tids.parse().map_err(|error| format!("{tids}: {error}"))?;
    Ok((name.to_owned(), tids))
}

fn read_file(file: &Path, options: &MapArguments, grouping: Grouping<'_>) -> anyhow::Result<RecordedSchedule> {
    let path = file.display();
    if options.targets.selects_some() {
        bail!(
            "{path} is a recording: select its threads by --group REGEX; machines are selected while this host records"
        );
    }
    let opened = File::open(file).with_context(|| format!("cannot open {path}"))?;
    read_schedule(BufReader::new(opened), grouping).with_context(|| format!("cannot read the schedule of {path}"))
}

/// The schedule of this host from now on, with the host's description.
fn record_now(
    options: &MapArguments,
    grouping: Grouping<'_>,
    global: &GlobalOptions,
) -> anyhow::Result<(String, RecordedSchedule)> {
    let host = host_selection::open_host(global)?;
    let processes = selected_processes(&*host, &options.targets, global)?;
    let duration = options.duration.unwrap_or(DEFAULT_DURATION);
    let recording = RecordingOptions { duration, processes, buffer_bytes: recorder::BUFFER_BYTES };
    let mut file = Cursor::new(Vec::new());
    record_with_progress(&*host, &recording, &mut file)?;
    file.set_position(0);
    let recorded = read_schedule(file, grouping).context("cannot read the schedule that was recorded")?;
    Ok((host.describe(), recorded))
}

/// The picture of the selected time of each schedule.
fn draw(schedules: &[(String, CpuSchedule)], options: &MapArguments) -> anyhow::Result<String> {
    let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let mut panels = Vec::new();
    for (title, schedule) in schedules {
        let from = schedule.start.saturating_add(nanoseconds(options.from));
        let to = from.saturating_add(nanoseconds(options.shown)).min(schedule.end);
        if from >= to {
            bail!(
                "--from and --for select no time of the recording, which has {:.3} s: {title}",
                schedule.duration() as f64 / 1e9
            );
        }
        panels.push(SchedulePanel { title, schedule, span: (from, to) });
    }
    let lengths: Vec<String> =
        schedules.iter().map(|(_, schedule)| format!("{:.3} s", schedule.duration() as f64 / 1e9)).collect();
    let caption = format!(
        "Rows are CPUs; a color for each machine, a brightness for each vCPU. Times are after {:.3} s of {}.",
        options.from.as_secs_f64(),
        lengths.join(", ")
    );
    Ok(svg::draw(&panels, &caption))
}
