//! `pagefold vcpu map`: a picture and measures of a recorded schedule.

use crate::command_line::{GlobalOptions, parse_duration};
use crate::{CommandOutcome, output};
use anyhow::{Context, bail};
use clap::Args;
use pagefold_output::wire;
use pagefold_vcpu::perfetto;
use pagefold_vcpu::picture::svg::{self, SchedulePanel};
use pagefold_vcpu::schedule::CpuSchedule;
use pagefold_vcpu::sources::perf_data::read_perf_data;
use pagefold_vcpu::sources::threads::Grouping;
use pagefold_vcpu::text;
use pagefold_vcpu::wire::map::VcpuMapReport;
use regex::Regex;
use std::fs::File;
use std::io::BufReader;
use std::path::PathBuf;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  sudo perf record -e sched:sched_switch,sched:sched_wakeup -a -o vms.data sleep 2
  pagefold vcpu map vms.data --svg vms.svg
  pagefold vcpu map vms.data --svg vms.svg --from 500ms --for 50ms
  pagefold vcpu map job.data --group '^worker-([0-9]+)'     threads of a job instead of vCPUs
  pagefold vcpu map vms.data --json | jq '.machines[].co_run_percent'

It reads the file only. vCPUs are recognized by the names of their threads, such as `CPU 0/KVM`; a machine is a process \
with vCPUs. The picture has a row for each CPU, a color for each machine and a brightness for each vCPU; a column shows \
what ran longest in it.

Exit status: 0 done, 2 usage error or failure.";

/// Arguments of `vcpu map`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct MapArguments {
    /// A file of `perf record -e sched:sched_switch,sched:sched_wakeup -a`
    file: PathBuf,
    /// Write a picture of the schedule
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Begin the picture at this time after the first event
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = parse_duration, requires = "svg")]
    from: Duration,
    /// Time that the picture shows
    #[arg(long = "for", value_name = "TIME", default_value = "200ms", value_parser = parse_duration, requires = "svg")]
    shown: Duration,
    /// Write the whole schedule as a trace that ui.perfetto.dev opens
    #[arg(long, value_name = "FILE")]
    perfetto: Option<PathBuf>,
    /// Measure threads whose names match instead of vCPUs; those with the same first capture, or of the same process,
    /// belong together
    #[arg(long, value_name = "REGEX")]
    group: Option<Regex>,
    /// Print JSON (see `pagefold schema vcpu-map`)
    #[arg(long)]
    json: bool,
}

/// Measure and draw a recorded schedule.
pub fn run(options: &MapArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let path = options.file.display();
    let file = File::open(&options.file).with_context(|| format!("cannot open {path}"))?;
    let grouping = options.group.as_ref().map_or(Grouping::Machines, Grouping::Pattern);
    let recorded = read_perf_data(BufReader::new(file), grouping)
        .with_context(|| format!("cannot read the schedule of {path}"))?;
    if recorded.schedule.vms.is_empty() {
        match &options.group {
            Some(pattern) => bail!("{path}: no recorded thread has a name that matches {pattern}"),
            None => bail!(
                "{path}: no recorded thread has the name of a vCPU, such as `CPU 0/KVM`: start QEMU with -name \
                 ...,debug-threads=on, as libvirt does, or name other threads by --group REGEX"
            ),
        }
    }
    if let Some(svg_path) = &options.svg {
        let svg = draw(&recorded.schedule, options, &path.to_string())?;
        std::fs::write(svg_path, svg).with_context(|| format!("cannot write the picture {}", svg_path.display()))?;
    }
    if let Some(trace_path) = &options.perfetto {
        std::fs::write(trace_path, perfetto::encode(&recorded.schedule))
            .with_context(|| format!("cannot write the trace {}", trace_path.display()))?;
    }
    let report = VcpuMapReport::new(path.to_string(), &recorded);
    output::print_stdout(&if options.json {
        wire::to_json(&report)
    } else {
        text::map::render(&report, output::stdout_style(global))
    })?;
    Ok(CommandOutcome::Done)
}

fn draw(schedule: &CpuSchedule, options: &MapArguments, title: &str) -> anyhow::Result<String> {
    let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let from = schedule.start.saturating_add(nanoseconds(options.from));
    let to = from.saturating_add(nanoseconds(options.shown)).min(schedule.end);
    if from >= to {
        bail!("--from and --for select no time of the recording, which has {:.3} s", schedule.duration() as f64 / 1e9);
    }
    let caption = format!(
        "Rows are CPUs; a color for each machine, a brightness for each vCPU. Times are after {:.3} s of {:.3} s.",
        options.from.as_secs_f64(),
        schedule.duration() as f64 / 1e9
    );
    Ok(svg::draw(&[SchedulePanel { title, schedule, span: (from, to) }], &caption))
}
