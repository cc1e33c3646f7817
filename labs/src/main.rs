//! `pagefold-lab`: workloads for tests and demonstrations of Pagefold. See `pagefold-lab --help`.

#![forbid(unsafe_code)]

mod advise;
mod busy;
mod fleet;
mod layout;

use std::ffi::OsString;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand};
use pagefold_labs::assets::Assets;
use pagefold_labs::lines::READY;
use pagefold_labs::spec::{self, Item, SpecError};
use rustix::process::Signal;

/// Workloads against which Pagefold is tested and demonstrated
#[derive(Parser)]
#[command(name = "pagefold-lab", version)]
struct Lab {
    #[command(subcommand)]
    workload: Workload,
}

#[derive(Subcommand)]
enum Workload {
    /// Lay out memory with exactly known content in this process, and hold it until standard input closes
    ///
    /// Prints one line of JSON for each region, in the order asked for, then `READY pid=PID`.
    #[command(after_help = spec::HELP)]
    Layout(LayoutArguments),
    /// Boot real QEMU guests with the same and with own data, and hold them until standard input closes or COMMAND ends
    ///
    /// Without a COMMAND prints one line of JSON for each guest, then `READY guests=N`. The guests run without KVM and
    /// without network, and are gone when this ends, however it ends. `labs/setup.sh` prepares what they need.
    Fleet(FleetArguments),
    /// Work on several threads, checking all that is computed, until standard input closes
    ///
    /// Prints `READY pid=PID`, and ends with how many rounds were made and found right; a wrong one ends it at once.
    Busy(busy::Arguments),
    /// Enrol, withdraw or collapse memory of a process, and print for how long it was stopped
    Advise(advise::Arguments),
    /// Run a program that is killed when its parent ends
    #[command(hide = true)]
    Bound {
        /// The parent; if it is gone already the program is not started
        parent: i32,
        /// The program and its arguments
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
}

#[derive(Args)]
struct LayoutArguments {
    /// What to lay out: kind=pages,... (see below)
    #[arg(required = true, value_parser = parse_spec)]
    spec: Vec<Spec>,
    /// Two processes have unique content in common only if they are given the same salt [default: the process number]
    #[arg(long)]
    salt: Option<String>,
    /// Advise the kernel that all regions are mergeable (MADV_MERGEABLE)
    #[arg(long)]
    mergeable: bool,
    /// Make the whole process mergeable (PR_SET_MEMORY_MERGE)
    #[arg(long)]
    merge_any: bool,
    /// Become user U, and group U, once everything is set up
    #[arg(long, value_name = "U")]
    uid: Option<u32>,
    /// Make each page of the regions a VMA of its own by protecting every other one from writing
    ///
    /// Huge and volatile regions stay whole.
    #[arg(long)]
    fragment: bool,
    /// As --fragment, but cut each region into R VMAs
    #[arg(long, value_name = "R", conflicts_with = "fragment")]
    regions: Option<u64>,
    /// Milliseconds between two rewritings of volatile pages
    #[arg(long, value_name = "MS", default_value_t = 5)]
    interval: u64,
    /// Where the files of file mappings are made; they have no name there [default: the directory for temporary files]
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,
}

#[derive(Args)]
struct FleetArguments {
    /// How many guests
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    guests: u32,
    /// Memory of each guest, in MiB
    #[arg(long, value_name = "MiB", default_value_t = 128)]
    memory: u32,
    /// Data that all guests hold, in MiB; no two pages of it are equal
    #[arg(long, value_name = "MiB", default_value_t = 16)]
    same: u32,
    /// Data that only one guest holds, in MiB; no two pages of it are equal
    #[arg(long, value_name = "MiB", default_value_t = 16)]
    own: u32,
    /// The guests are named PREFIX-0, PREFIX-1, ...
    #[arg(long, value_name = "PREFIX", default_value = "lab", value_parser = parse_names)]
    names: String,
    /// Do not let the guests' memory be merged (QEMU's mem-merge=off)
    #[arg(long)]
    no_mem_merge: bool,
    /// Where kernel and initramfs are [default: .cache/fleet of the source tree]
    #[arg(long, value_name = "DIR")]
    assets: Option<PathBuf>,
    /// Give up when a guest is not ready after so many seconds [default: 60, and 10 more for each guest]
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<u64>,
    /// What to run when all guests are ready
    ///
    /// It finds their process numbers in PAGEFOLD_FLEET_PIDS, separated by spaces, and the sockets NAME.qmp and
    /// NAME.serial in the directory PAGEFOLD_FLEET_DIR. Its exit code becomes that of the lab.
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// The regions of one argument.
#[derive(Clone)]
struct Spec(Vec<Item>);

fn parse_spec(text: &str) -> Result<Spec, SpecError> {
    spec::parse(text).map(Spec)
}

/// A name ends up in QEMU's options, on the kernel's command line and in file names.
fn parse_names(text: &str) -> Result<String, &'static str> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    if !text.is_empty() && text.len() <= 32 && text.bytes().all(plain) {
        Ok(text.to_owned())
    } else {
        Err("a name is made of at most 32 letters, digits, - and _")
    }
}

fn main() -> ExitCode {
    let outcome = match Lab::parse().workload {
        Workload::Layout(arguments) => run_layout(arguments),
        Workload::Fleet(arguments) => run_fleet(arguments),
        Workload::Busy(arguments) => busy::run(&arguments).map(|()| ExitCode::SUCCESS),
        Workload::Advise(arguments) => advise::run(&arguments).map(|()| ExitCode::SUCCESS),
        Workload::Bound { parent, command } => run_bound(parent, &command),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("pagefold-lab: {error:#}");
        ExitCode::from(2)
    })
}

fn run_layout(arguments: LayoutArguments) -> Result<ExitCode> {
    let items: Vec<Item> = arguments.spec.into_iter().flat_map(|spec| spec.0).collect();
    let options = layout::Options {
        salt: arguments.salt.unwrap_or_else(|| std::process::id().to_string()),
        mergeable: arguments.mergeable,
        merge_any: arguments.merge_any,
        uid: arguments.uid,
        cut: match arguments.regions {
            Some(regions) => layout::Cut::Regions(regions),
            None if arguments.fragment => layout::Cut::Pages,
            None => layout::Cut::Whole,
        },
        interval: Duration::from_millis(arguments.interval),
        directory: arguments.directory.unwrap_or_else(std::env::temp_dir),
    };
    let layout = layout::lay_out(&items, &options)?;
    let mut output = io::stdout().lock();
    for region in &layout.regions {
        writeln!(output, "{}", serde_json::to_string(region)?)?;
    }
    writeln!(output, "{READY}pid={}", std::process::id())?;
    output.flush()?;
    io::copy(&mut io::stdin().lock(), &mut io::sink()).context("waiting for standard input to close")?;
    Ok(ExitCode::SUCCESS)
}

fn run_fleet(arguments: FleetArguments) -> Result<ExitCode> {
    let directory = arguments.assets.unwrap_or_else(Assets::directory);
    let timeout = arguments.timeout.unwrap_or(60 + 10 * u64::from(arguments.guests));
    let options = fleet::Options {
        guests: arguments.guests,
        memory_mib: arguments.memory,
        same_mib: arguments.same,
        own_mib: arguments.own,
        names: arguments.names,
        merge: !arguments.no_mem_merge,
        assets: Assets::find(&directory)?,
        timeout: Duration::from_secs(timeout),
    };
    fleet::run(&options, &arguments.command)
}

fn run_bound(parent: i32, command: &[OsString]) -> Result<ExitCode> {
    let (program, arguments) = command.split_first().context("no program")?;
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).context("PR_SET_PDEATHSIG")?;
    // A parent that ended before the signal was asked for sends none.
    if rustix::process::Pid::as_raw(rustix::process::getppid()) != parent {
        bail!("the parent {parent} is gone");
    }
    Err(Command::new(program).args(arguments).exec()).with_context(|| format!("starting {}", program.to_string_lossy()))
}
