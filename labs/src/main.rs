//! `pagefold-lab`: workloads for tests and demonstrations of Pagefold. See `pagefold-lab --help`.

#![forbid(unsafe_code)]

mod advise;
mod fleet;
mod layout;
mod move_loop;
mod page_nodes;
mod place;
mod record_policies;
mod seccomp_refusal;
mod self_checking_threads;
mod vcpu_threads;

use std::ffi::OsString;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Parser, Subcommand};
use pagefold_labs::assets::GuestAssets;
use pagefold_labs::layout_spec::{self, SpecError, SpecItem};
use pagefold_labs::mixture::{Mixture, memory_checksum};
use pagefold_labs::output_lines::{READY_PREFIX, RegionLine};
use pagefold_sys::mapping;
use rustix::process::Signal;

/// Workloads for tests and demonstrations of Pagefold
#[derive(Parser)]
#[command(name = "pagefold-lab", version)]
struct LabCommandLine {
    #[command(subcommand)]
    command: LabCommand,
}

#[derive(Subcommand)]
enum LabCommand {
    /// Lay out memory with exactly known content in this process, and keep it until standard input closes
    ///
    /// Prints one line of JSON for each region, in the requested order, then `READY pid=PID`.
    #[command(after_help = layout_spec::SPEC_HELP)]
    Layout(LayoutArguments),
    /// Lay out memory with runs of duplicates among unique pages, and keep it until standard input closes
    ///
    /// Prints the region as one line of JSON, then `READY pid=PID`. Answers each line on standard input with a checksum
    /// of the memory.
    Mixture(MixtureArguments),
    /// Boot real QEMU guests with common and with private data, and keep them until standard input closes or COMMAND
    /// ends
    ///
    /// Without a COMMAND prints one line of JSON for each guest, then `READY guests=N`. The guests run without KVM and
    /// without network, and end with this program in any case. `labs/setup.sh` prepares what they need.
    Fleet(FleetArguments),
    /// Run a program under a seccomp filter that refuses prctl(PR_SET_MEMORY_MERGE) and close_range(2)
    RefusePrctl {
        /// The error that the calls return: 1 is EPERM, 22 is EINVAL as on a kernel without them
        #[arg(long, default_value_t = 1)]
        errno: u32,
        /// The program and its arguments
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
    /// Compute on several threads and check all results, until standard input closes
    ///
    /// Prints `READY pid=PID`, and at the end the number of correct rounds; a wrong result ends it at once.
    Busy(self_checking_threads::BusyArguments),
    /// Run threads that are named as vCPUs of QEMU and never sleep, until standard input closes
    ///
    /// Prints `READY pid=PID`.
    Vcpus(vcpu_threads::VcpuThreadArguments),
    /// Enroll, unenroll or collapse memory of a process, and print how long it was stopped
    Advise(advise::AdviseArguments),
    /// Place a process on CPUs and NUMA nodes, and undo that when standard input closes
    Place(place::PlaceArguments),
    /// Move the private memory of a process to a NUMA node by a bare loop, and print the seconds
    MoveLoop(move_loop::MoveLoopArguments),
    /// Print the NUMA nodes of pages of a process, page by page, or of those that KSM has merged
    PageNodes(page_nodes::PageNodeArguments),
    /// Record the scheduler under four policies, with guests of emulated KVM in an emulated machine (minutes)
    ///
    /// `labs/setup.sh` prepares what it needs.
    RecordPolicies(record_policies::RecordPoliciesArguments),
    /// Run a program that is killed when its parent ends
    #[command(hide = true)]
    KilledWithParent {
        /// The parent; if it has ended already, the program is not started
        parent: i32,
        /// The program and its arguments
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
}

#[derive(Args)]
struct LayoutArguments {
    /// Regions to lay out: kind=pages,... (see below)
    #[arg(required = true, value_parser = parse_spec_argument)]
    spec: Vec<SpecArgument>,
    /// Processes have unique content in common only if they have the same salt [default: the process number]
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
    /// Make each page of the regions a VMA of its own by write-protecting every other one
    ///
    /// Huge and volatile regions are not split.
    #[arg(long)]
    fragment: bool,
    /// As --fragment, but split each region into R VMAs
    #[arg(long, value_name = "R", conflicts_with = "fragment")]
    regions: Option<u64>,
    /// Milliseconds between two rewrites of volatile pages
    #[arg(long, value_name = "MS", default_value_t = 5)]
    interval: u64,
    /// Rewrite volatile pages only while pages of this process are merged
    #[arg(long)]
    await_merge: bool,
    /// Directory for the files of file mappings, which have no name there [default: the directory for temporary files]
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,
}

#[derive(Args)]
struct MixtureArguments {
    /// Size in MiB
    #[arg(long, value_name = "MiB", default_value_t = 1024, value_parser = clap::value_parser!(u64).range(1..))]
    mib: u64,
    /// Share of runs that every process with the same --seed has too, in percent
    #[arg(long, value_name = "PERCENT", default_value = "10%", value_parser = parse_share)]
    duplicate_share: f64,
    /// Share of runs that are unique except for one page, which every process with the same --seed has too
    #[arg(long, value_name = "PERCENT", default_value = "0%", value_parser = parse_share)]
    stray_share: f64,
    /// Length of a run in base pages
    #[arg(long, value_name = "PAGES", default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..))]
    run_pages: u64,
    /// Seed of the duplicates: equal seeds, equal duplicates
    #[arg(long, value_name = "NAME", default_value = "mixture")]
    seed: String,
    /// Seed of the unique content [default: the process number]
    #[arg(long)]
    salt: Option<String>,
    /// Use huge pages
    #[arg(long)]
    huge: bool,
}

#[derive(Args)]
struct FleetArguments {
    /// Number of guests
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    guests: u32,
    /// Memory of each guest, in MiB
    #[arg(long, value_name = "MiB", default_value_t = 128)]
    memory: u32,
    /// Data that all guests have, in MiB; no two pages of it are equal
    #[arg(long, value_name = "MiB", default_value_t = 16)]
    shared_mib: u32,
    /// Data that only one guest has, in MiB; no two pages of it are equal
    #[arg(long, value_name = "MiB", default_value_t = 16)]
    unique_mib: u32,
    /// Make the first 4,086 bytes of all data pages equal: ksmd must then read two pages to their end to compare them
    #[arg(long)]
    equal_start: bool,
    /// The guests are named PREFIX-0, PREFIX-1, ...
    #[arg(long, value_name = "PREFIX", default_value = "lab", value_parser = parse_name_prefix)]
    name_prefix: String,
    /// Exclude the guests' memory from merging (QEMU's mem-merge=off)
    #[arg(long)]
    no_mem_merge: bool,
    /// Directory of kernel and initramfs [default: .cache/fleet of the source tree]
    #[arg(long, value_name = "DIR")]
    assets: Option<PathBuf>,
    /// Fail if a guest is not ready after this many seconds [default: 60, and 10 more for each guest]
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<u64>,
    /// Command to run when all guests are ready
    ///
    /// PAGEFOLD_FLEET_PIDS has their process numbers, separated by spaces. The directory PAGEFOLD_FLEET_DIR has the
    /// sockets NAME.qmp and NAME.serial. The lab exits with the command's exit code.
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// The regions of one argument.
#[derive(Clone)]
struct SpecArgument(Vec<SpecItem>);

fn parse_spec_argument(text: &str) -> Result<SpecArgument, SpecError> {
    layout_spec::parse_spec(text).map(SpecArgument)
}

fn parse_share(text: &str) -> Result<f64, &'static str> {
    let percent: Option<f64> = text.trim_end_matches('%').parse().ok();
    percent.filter(|percent| (0.0..=100.0).contains(percent)).map(|percent| percent / 100.0).ok_or("0% to 100%")
}

/// A name is used in QEMU's options, on the kernel's command line and in file names.
fn parse_name_prefix(text: &str) -> Result<String, &'static str> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    if !text.is_empty() && text.len() <= 32 && text.bytes().all(is_allowed) {
        Ok(text.to_owned())
    } else {
        Err("a name must have at most 32 letters, digits, - and _")
    }
}

fn main() -> ExitCode {
    let outcome = match LabCommandLine::parse().command {
        LabCommand::Layout(arguments) => run_layout(arguments),
        LabCommand::Mixture(arguments) => run_mixture(&arguments),
        LabCommand::Fleet(arguments) => run_fleet(arguments),
        LabCommand::RefusePrctl { errno, command } => run_refused(errno, &command),
        LabCommand::Vcpus(arguments) => vcpu_threads::run(&arguments).map(|()| ExitCode::SUCCESS),
        LabCommand::Busy(arguments) => self_checking_threads::run(&arguments).map(|()| ExitCode::SUCCESS),
        LabCommand::Advise(arguments) => advise::run(&arguments).map(|()| ExitCode::SUCCESS),
        LabCommand::Place(arguments) => place::run(&arguments).map(|()| ExitCode::SUCCESS),
        LabCommand::RecordPolicies(arguments) => record_policies::run(&arguments).map(|()| ExitCode::SUCCESS),
        LabCommand::MoveLoop(arguments) => move_loop::run(&arguments).map(|()| ExitCode::SUCCESS),
        LabCommand::PageNodes(arguments) => page_nodes::run(&arguments).map(|()| ExitCode::SUCCESS),
        LabCommand::KilledWithParent { parent, command } => run_killed_with_parent(parent, &command),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("pagefold-lab: {error:#}");
        ExitCode::from(2)
    })
}

fn run_layout(arguments: LayoutArguments) -> Result<ExitCode> {
    let items: Vec<SpecItem> = arguments.spec.into_iter().flat_map(|spec| spec.0).collect();
    let options = layout::LayoutOptions {
        salt: arguments.salt.unwrap_or_else(|| std::process::id().to_string()),
        mergeable: arguments.mergeable,
        merge_any: arguments.merge_any,
        uid: arguments.uid,
        vma_split: match arguments.regions {
            Some(regions) => layout::VmaSplit::Count(regions),
            None if arguments.fragment => layout::VmaSplit::PerPage,
            None => layout::VmaSplit::Unsplit,
        },
        rewrite_interval: Duration::from_millis(arguments.interval),
        awaits_merge: arguments.await_merge,
        file_directory: arguments.directory.unwrap_or_else(std::env::temp_dir),
    };
    let layout = layout::create_layout(&items, &options)?;
    let mut output = io::stdout().lock();
    for region in &layout.regions {
        writeln!(output, "{}", serde_json::to_string(region)?)?;
    }
    writeln!(output, "{READY_PREFIX}pid={}", std::process::id())?;
    output.flush()?;
    io::copy(&mut io::stdin().lock(), &mut io::sink()).context("waiting for standard input to close")?;
    Ok(ExitCode::SUCCESS)
}

fn run_mixture(arguments: &MixtureArguments) -> Result<ExitCode> {
    let page_size = mapping::page_size();
    let mixture = Mixture {
        pages: (arguments.mib << 20) / page_size as u64,
        run_pages: arguments.run_pages,
        duplicate_share: arguments.duplicate_share,
        stray_share: arguments.stray_share,
    };
    ensure!(
        mixture.pages.is_multiple_of(mixture.run_pages),
        "{} MiB are not a multiple of runs of {}",
        arguments.mib,
        mixture.run_pages
    );
    ensure!(
        mixture.duplicate_share + mixture.stray_share <= 1.0,
        "--duplicate-share and --stray-share add up to more than 100%"
    );
    let salt = arguments.salt.clone().unwrap_or_else(|| std::process::id().to_string());
    let memory = layout::create_mixture(&mixture, arguments.huge, &arguments.seed, &salt)?;
    let region = RegionLine {
        kind: "mixture".to_owned(),
        name: Some(arguments.seed.clone()),
        start: memory.address(),
        pages: mixture.pages,
        page_size: page_size as u64,
        vmas: 1,
        resident: mixture.pages,
        zero: 0,
        distinct: mixture.pages,
        child: None,
    };
    println!("{}", serde_json::to_string(&region)?);
    println!("{READY_PREFIX}pid={}", std::process::id());
    for line in io::stdin().lines() {
        line.context("waiting for standard input to close")?;
        println!("{:016x}", memory_checksum(memory.as_slice()));
    }
    Ok(ExitCode::SUCCESS)
}

fn run_fleet(arguments: FleetArguments) -> Result<ExitCode> {
    let directory = arguments.assets.unwrap_or_else(GuestAssets::default_directory);
    let timeout = arguments.timeout.unwrap_or(60 + 10 * u64::from(arguments.guests));
    let options = fleet::FleetOptions {
        guests: arguments.guests,
        memory_mib: arguments.memory,
        shared_mib: arguments.shared_mib,
        unique_mib: arguments.unique_mib,
        equal_start: arguments.equal_start,
        name_prefix: arguments.name_prefix,
        mergeable: !arguments.no_mem_merge,
        assets: GuestAssets::find(&directory)?,
        timeout: Duration::from_secs(timeout),
    };
    fleet::run(&options, &arguments.command)
}

fn run_refused(errno: u32, command: &[OsString]) -> Result<ExitCode> {
    let (program, arguments) = command.split_first().context("no program")?;
    seccomp_refusal::refuse_merge_any(errno).context("seccomp")?;
    Err(Command::new(program).args(arguments).exec()).with_context(|| format!("starting {}", program.to_string_lossy()))
}

fn run_killed_with_parent(parent: i32, command: &[OsString]) -> Result<ExitCode> {
    let (program, arguments) = command.split_first().context("no program")?;
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).context("PR_SET_PDEATHSIG")?;
    // If the parent ended before this call, the kernel sends no signal.
    if rustix::process::Pid::as_raw(rustix::process::getppid()) != parent {
        bail!("the parent {parent} has ended");
    }
    Err(Command::new(program).args(arguments).exec()).with_context(|| format!("starting {}", program.to_string_lossy()))
}
