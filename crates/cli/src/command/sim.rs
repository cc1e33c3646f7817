//! `pagefold sim`: a model of ksmd, what its operations cost on this machine, and policies compared or
//! searched on simulated hosts, which real hosts can become.

mod compare;
mod daemon_run;
mod from_recording;
mod predict;
mod tune;

pub use compare::read_scenario;

use crate::command::recover::{begin_session, check_ksm_present, check_no_tuner, open_live_host, with_remedy};
use crate::command_line::GlobalOptions;
use crate::{CommandOutcome, output, progress, stop_signal};
use anyhow::{Context, bail};
use clap::{Args, Subcommand, ValueEnum};
use pagefold_base::Bytes;
use pagefold_host::{Host, observe};
use pagefold_merge::verify;
use pagefold_output::wire;
use pagefold_sim::calibration::{self, CalibrationError, RunningStandIn, StandIn, StandInContents, StandInLauncher};
use pagefold_sim::wire::SimCalibrationReport;
use pagefold_sim::{stand_in, text};
use std::io::{self, BufRead, BufReader};
use std::process::{Child, Command, Stdio};

const EXAMPLES: &str = "\
Examples:
  sudo pagefold sim calibrate                       four minutes on an idle machine
  sudo pagefold sim calibrate --pages 8192 --rounds 1
  sudo pagefold sim calibrate --json > costs.json

Processes with known memory are started and scanned by ksmd, one scan at a time, beside a model that counts what ksmd \
does. KSM's settings are restored afterwards, also after Ctrl-C; after kill -9 `pagefold recover` does it. No other \
process may be enrolled meanwhile.

Exit status: 0 done, 2 refused or failed, 3 a setting could not be restored.";

/// Arguments of `sim`.
#[derive(Args, Debug)]
pub struct SimArguments {
    #[command(subcommand)]
    command: SimCommand,
}

#[derive(Debug, Subcommand)]
enum SimCommand {
    /// Measure the CPU time of ksmd's operations on this machine
    Calibrate(CalibrateArguments),
    /// Compare KSM policies on a simulated host
    Compare(compare::CompareArguments),
    /// Write a scenario of this host or of a recorded one
    FromRecording(from_recording::FromRecordingArguments),
    /// Predict what policies would save on this host in the next hours
    Predict(predict::PredictArguments),
    /// Search a policy for a simulated host
    Tune(tune::TuneArguments),
    /// Hold memory with known contents until standard input ends
    #[command(hide = true)]
    StandIn(StandInArguments),
}

#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
struct CalibrateArguments {
    /// Pages of most processes; the largest scenario has three times as many and a quarter
    #[arg(long, value_name = "N", default_value_t = 65_536, value_parser = clap::value_parser!(u64).range(1024..=16_777_216))]
    pages: u64,
    /// Repetitions of each scenario
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Measure although another program tunes KSM
    #[arg(long)]
    force: bool,
    /// Print JSON (see `pagefold schema sim-calibration`)
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
struct StandInArguments {
    #[arg(long)]
    contents: ContentsArgument,
    #[arg(long)]
    pages: u64,
    #[arg(long)]
    first: u32,
    #[arg(long)]
    huge: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ContentsArgument {
    Numbers,
    Zeros,
}

/// Run a subcommand.
pub fn run(options: &SimArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    match &options.command {
        SimCommand::Calibrate(options) => calibrate(options, global),
        SimCommand::Compare(options) => compare::run(options, global),
        SimCommand::FromRecording(options) => from_recording::run(options, global),
        SimCommand::Predict(options) => predict::run(options, global),
        SimCommand::Tune(options) => tune::run(options, global),
        SimCommand::StandIn(options) => {
            let contents = match options.contents {
                ContentsArgument::Numbers => StandInContents::Unique,
                ContentsArgument::Zeros => StandInContents::Zeros,
            };
            stand_in::hold(&StandIn { contents, pages: options.pages, is_huge: options.huge }, options.first)?;
            Ok(CommandOutcome::Done)
        }
    }
}

fn calibrate(options: &CalibrateArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let host = open_live_host(global)?;
    check_ksm_present(&*host)?;
    check_no_tuner(&*host, options.force)?;
    let scenarios = calibration::scenarios(options.pages);
    check_memory(&*host, calibration::needed_pages(&scenarios))?;
    let stop = stop_signal::stop_on_signal().context("cannot handle signals")?;
    let mut session = begin_session(&*host, global)?;
    check_nothing_enrolled(&*host)?;
    let result = progress::run_calibration_with_progress(&stop, |note_progress| {
        calibration::calibrate(&mut session, &scenarios, options.rounds, &mut ProcessLauncher, &stop, note_progress)
    });
    let failed_undos = session.undo_all().map_err(with_remedy)?;
    for failed in &failed_undos {
        eprintln!("pagefold: not restored: {failed}");
    }
    let calibration = match result {
        Err(CalibrationError::Session(error)) => return Err(with_remedy(error)),
        result => result?,
    };
    let kernel = host.read("proc/sys/kernel/osrelease").context("cannot read the kernel's release")?;
    let kernel = String::from_utf8_lossy(&kernel).trim().to_owned();
    let report = SimCalibrationReport::new(kernel, options.pages, options.rounds, &calibration);
    output::print_stdout(&if options.json {
        wire::to_json(&report)
    } else {
        text::render_calibration(&report, output::stdout_style(global))
    })?;
    Ok(if failed_undos.is_empty() { CommandOutcome::Done } else { CommandOutcome::Partial })
}

/// Check that the processes fit into half of the available memory.
fn check_memory(host: &dyn Host, pages: u64) -> anyhow::Result<()> {
    let available = observe::memory(host).and_then(|memory| memory.available).context("cannot read MemAvailable")?;
    let needed = Bytes(pages * host.page_size().bytes());
    if needed.0 > available.0 / 2 {
        bail!("the processes need {needed}, and half of the {available} that are available is less: use fewer --pages");
    }
    Ok(())
}

/// Check that ksmd has nothing else to scan.
fn check_nothing_enrolled(host: &dyn Host) -> anyhow::Result<()> {
    let enrolled = verify::find_enrolled(host).context("cannot list the processes")?;
    if let Some(process) = enrolled.processes.first() {
        bail!(
            "process {} is enrolled in KSM (one of {}), and ksmd would scan it too: end such processes, or \
             `pagefold unmerge` them",
            process.pid,
            enrolled.processes.len()
        );
    }
    Ok(())
}

/// Starts stand-ins as children of this program.
struct ProcessLauncher;

impl StandInLauncher for ProcessLauncher {
    fn launch(&mut self, stand_in: &StandIn, first: u32) -> io::Result<Box<dyn RunningStandIn>> {
        let contents = if stand_in.contents == StandInContents::Zeros { "zeros" } else { "numbers" };
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["sim", "stand-in", "--contents", contents]);
        command.args(["--pages", &stand_in.pages.to_string(), "--first", &first.to_string()]);
        command.args(stand_in.is_huge.then_some("--huge"));
        let mut process =
            ChildProcess { child: command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?, address: 0 };
        let output = process.child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        process.address = line.trim().parse().map_err(|_| io::Error::other("it ended before its memory was filled"))?;
        Ok(Box::new(process))
    }
}

/// A stand-in that is killed when it is dropped.
struct ChildProcess {
    child: Child,
    address: u64,
}

impl RunningStandIn for ChildProcess {
    fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
