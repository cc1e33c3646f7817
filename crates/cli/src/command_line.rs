//! The options of the command line, as text. The commands resolve them on a host.

use crate::command;
use clap::builder::{PathBufValueParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use pagefold_base::Bytes;
use pagefold_base::domain::DomainRule;
use pagefold_census::tally::MatrixRowKind;
use pagefold_host::guest_agent::AgentAccess;
use pagefold_host::qemu_monitor::MonitorAccess;
use std::path::PathBuf;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  pagefold census                       count identical pages on this host
  sudo pagefold merge --vm web1 --vm web2 --across-domains
                                        merge identical pages of two virtual machines
  sudo pagefold unmerge --vm web1       give one of them its own pages again
  pagefold run -- ./solver input.nml    start a program with its process tree enrolled
  pagefold account --by vm              show the true footprint; RSS ignores merging
  pagefold doctor                       find out why KSM is on and merges nothing
  pagefold record /tmp/host             write a directory to attach to a bug report
  pagefold --host recording:/tmp/host census

Exit status: 0 done, 1 negative verdict, 2 usage error or failure, 3 something could not be read or done.";

/// Save memory on a Linux host: find identical pages, have the kernel merge those with net savings, undo merges, and
/// report savings and costs.
#[derive(Debug, Parser)]
#[command(name = "pagefold", version, after_help = EXAMPLES, max_term_width = 100)]
pub struct CommandLine {
    #[command(flatten)]
    pub global: GlobalOptions,
    #[command(subcommand)]
    pub command: PagefoldCommand,
}

const GLOBAL_HEADING: &str = "Options of all commands";

#[derive(Args, Clone, Debug)]
pub struct GlobalOptions {
    /// The host: `live`, `recording:DIR`, or `sim:SCENARIO` for the simulated host of a scenario
    #[arg(long, global = true, help_heading = GLOBAL_HEADING, default_value = "live", value_name = "HOST")]
    pub host: String,
    /// When to use color
    #[arg(long, global = true, help_heading = GLOBAL_HEADING, value_name = "WHEN", value_enum, default_value_t = ColorChoice::Auto)]
    pub color: ColorChoice,
    /// Directory of the lock, the undo journal and the control socket of the daemon
    #[arg(long, global = true, help_heading = GLOBAL_HEADING, default_value = pagefold_host::transaction::session::DEFAULT_STATE_DIRECTORY, value_name = "DIR")]
    pub state: PathBuf,
    /// The configuration file [default: /etc/pagefold/pagefold.toml if it exists]
    #[arg(long, global = true, help_heading = GLOBAL_HEADING, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ColorChoice {
    Auto,
    Always,
    Never,
}

#[derive(Debug, Subcommand)]
pub enum PagefoldCommand {
    /// Count identical pages and predict what merging them would save
    Census(command::census::CensusArguments),
    /// Save what the read-only commands need in a directory, for a bug report or a replay
    Record(command::record::RecordArguments),
    /// Audit the settings of this host, its virtual machines and their guests, and explain why nothing merges
    Doctor(command::doctor::DoctorArguments),
    /// Merge pages with net savings now, within a CPU limit, and verify the result
    Merge(command::merge::MergeArguments),
    /// Show the true memory footprint of processes; RSS ignores merging
    Account(command::account::AccountArguments),
    /// Show on which NUMA nodes virtual machines and processes have their memory and threads
    Numa(command::numa::NumaArguments),
    /// Show how vCPUs are scheduled on an over-committed host, and spread them over CPUs
    Vcpu(command::vcpu::VcpuArguments),
    /// Measure what ksmd's operations cost on this machine, for a model of ksmd
    Sim(command::sim::SimArguments),
    /// Change the settings that findings of `doctor` ask for, verify them, and undo them
    Tune(command::tune::TuneArguments),
    /// Compare settings on a workload by an experiment with randomized, interleaved runs
    Ab(Box<command::ab::AbArguments>),
    /// Start a program with its process tree enrolled in KSM, or merged in user space
    Run(command::run::RunArguments),
    /// Merge pages with net savings continuously, within a CPU limit
    Daemon(command::daemon::DaemonArguments),
    /// Show the state of the daemon, its savings and its costs
    Status(command::daemon::StatusArguments),
    /// Show the status of the daemon in the terminal, updated live
    Top(command::top::TopArguments),
    /// Show the histories that daemons recorded: an HTML page, charts, tables
    Report(command::report::ReportArguments),
    /// Pause the daemon and restore KSM's settings; a placement on NUMA nodes that is under way is undone
    Pause,
    /// Resume the daemon
    Resume,
    /// Have the daemon scan a process now and merge what pays (mode act); also ends `unenroll`
    Enroll(command::daemon::ProcessArgument),
    /// Have the daemon unenroll a process and leave it alone
    Unenroll(command::daemon::ProcessArgument),
    /// Set KSM's settings by a policy, show them, or restore the previous ones
    Policy(command::policy::PolicyArguments),
    /// Undo the changes that a killed pagefold left behind
    Recover(command::recover::RecoverArguments),
    /// Print a configuration, or check it
    Config(command::config::ConfigArguments),
    /// Give merged processes their own pages again, if there is enough memory
    Unmerge(command::unmerge::UnmergeArguments),
    /// Show the programs that merge with libpagefold, and their savings
    Engine(command::engine::EngineArguments),
    /// Print the JSON schema of a report or of the configuration
    Schema(command::schema::SchemaArguments),
    /// Print a completion script for a shell
    Completions(command::completions::CompletionsArguments),
    /// Write the manual pages to a directory
    Man(command::man::ManArguments),
}

/// The selection of processes. A process must match one value of each option that is given.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Which processes")]
pub struct ProcessOptions {
    /// A process by its PID
    #[arg(long, value_name = "N")]
    pub pid: Vec<u32>,
    /// Processes by the kernel's name of their program (comm), with * and ?
    #[arg(long, value_name = "GLOB")]
    pub name: Vec<String>,
    /// Processes of a cgroup and its descendants, by its path on the host. In a container, pagefold needs permission to
    /// join the host's cgroup namespace
    #[arg(long, value_name = "PATH")]
    pub cgroup: Vec<String>,
    /// Processes of a user, by name or UID
    #[arg(long, value_name = "USER")]
    pub user: Vec<String>,
    /// Virtual machines by their name, with * and ?, or by their UUID
    #[arg(long, value_name = "GLOB")]
    pub vm: Vec<String>,
    /// All processes that pagefold may read; the default, but `unmerge` requires it explicitly
    #[arg(long, conflicts_with_all = ["pid", "name", "cgroup", "user", "vm"])]
    pub all: bool,
}

impl ProcessOptions {
    /// Whether it selects some processes rather than all.
    pub fn selects_some(&self) -> bool {
        let Self { pid, name, cgroup, user, vm, all: _ } = self;
        !(pid.is_empty() && name.is_empty() && cgroup.is_empty() && user.is_empty() && vm.is_empty())
    }
}

/// Which of QEMU's monitors are asked.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct MonitorOptions {
    /// Also ask QEMU's monitors of libvirt's domains, through libvirt: it marks these domains as tainted
    #[arg(long)]
    libvirt_monitor: bool,
}

impl MonitorOptions {
    /// The ways to monitors that may be used.
    pub fn access(self) -> MonitorAccess {
        if self.libvirt_monitor { MonitorAccess::SocketOrLibvirt } else { MonitorAccess::Socket }
    }
}

/// Which agents within guests are asked.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct GuestAgentOptions {
    /// Also ask the guest agent of each QEMU machine. It serves one client at a time, so another program has to wait
    /// meanwhile
    #[arg(long)]
    guest_agent: bool,
    /// As --guest-agent, and also ask the agents of libvirt's domains, through libvirt: it marks these domains as tainted
    #[arg(long)]
    libvirt_agent: bool,
}

impl GuestAgentOptions {
    /// The ways to agents that may be used; `None` if none is to be asked.
    pub fn access(self) -> Option<AgentAccess> {
        match (self.guest_agent, self.libvirt_agent) {
            (_, true) => Some(AgentAccess::SocketOrLibvirt),
            (true, false) => Some(AgentAccess::Socket),
            (false, false) => None,
        }
    }
}

/// How processes are sorted into trust domains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DomainRuleArgument {
    /// A domain for each user, and one for each virtual machine and each setuid program
    User,
    /// A domain for each cgroup
    Cgroup,
    /// A domain for each process
    Process,
    /// One domain
    Host,
}

impl From<DomainRuleArgument> for DomainRule {
    fn from(by: DomainRuleArgument) -> Self {
        match by {
            DomainRuleArgument::User => Self::User,
            DomainRuleArgument::Cgroup => Self::Cgroup,
            DomainRuleArgument::Process => Self::Process,
            DomainRuleArgument::Host => Self::Host,
        }
    }
}

/// The rows of the sharing matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MatrixRowsArgument {
    /// Processes; virtual machines by their names
    Process,
    /// Virtual machines only
    Vm,
    /// Cgroups
    Cgroup,
    /// Users
    User,
}

impl From<MatrixRowsArgument> for MatrixRowKind {
    fn from(by: MatrixRowsArgument) -> Self {
        match by {
            MatrixRowsArgument::Process => Self::Process,
            MatrixRowsArgument::Vm => Self::Vm,
            MatrixRowsArgument::Cgroup => Self::Cgroup,
            MatrixRowsArgument::User => Self::User,
        }
    }
}

/// A duration with a unit, such as `500ms` or `2s`; `0` needs none.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    humantime::parse_duration(text).map_err(|error| format!("{error}; write for example 500ms or 2s"))
}

/// The file of `--parquet`. A build without the feature refuses it before it does any work.
pub fn parquet_path_parser() -> impl TypedValueParser<Value = PathBuf> {
    let remedy = "this build cannot write Parquet; build with `cargo install --path crates/cli --features parquet`";
    PathBufValueParser::new().try_map(move |path| if cfg!(feature = "parquet") { Ok(path) } else { Err(remedy) })
}

/// A share of one CPU, from a percentage such as `50` or `50%`.
pub fn parse_cpu_share(text: &str) -> Result<f64, String> {
    match text.trim_end_matches('%').trim().parse::<f64>() {
        Ok(value) if value > 0.0 && value <= 100.0 => Ok(value / 100.0),
        _ => Err("expected a percentage above 0 and at most 100, such as 50".to_owned()),
    }
}

/// The number of vCPUs that a node may run for each of its CPUs.
pub fn parse_vcpus_per_cpu(text: &str) -> Result<f64, String> {
    text.parse().map_err(|_| VCPUS_PER_CPU_EXPECTED.to_owned()).and_then(check_vcpus_per_cpu)
}

/// Check that a number of vCPUs for each CPU is in range.
pub fn check_vcpus_per_cpu(ratio: f64) -> Result<f64, String> {
    if (0.1..=100.0).contains(&ratio) { Ok(ratio) } else { Err(VCPUS_PER_CPU_EXPECTED.to_owned()) }
}

const VCPUS_PER_CPU_EXPECTED: &str = "expected a number of vCPUs for each CPU from 0.1 to 100, such as 1.5";

/// An amount of memory, such as `64MiB`; a plain number is bytes.
pub fn parse_bytes(text: &str) -> Result<Bytes, String> {
    match text.parse::<bytesize::ByteSize>() {
        Ok(size) => Ok(Bytes(size.as_u64())),
        Err(error) => Err(format!("{error}; write for example 64MiB")),
    }
}

/// Bytes in a second, such as `500MiB`, and more than none.
pub fn parse_bandwidth(text: &str) -> Result<Bytes, String> {
    match parse_bytes(text)? {
        Bytes::ZERO => Err("nothing would ever be moved; write for example 500MiB".to_owned()),
        bandwidth => Ok(bandwidth),
    }
}

/// A probability above 0 and at most 1, as `0.05` or `5%`.
pub fn parse_probability(text: &str) -> Result<f64, String> {
    let (number, scale) = text.strip_suffix('%').map_or((text, 1.0), |number| (number, 100.0));
    match number.trim().parse::<f64>() {
        Ok(value) if value / scale > 0.0 && value / scale <= 1.0 => Ok(value / scale),
        _ => Err("expected a probability above 0 and at most 1, such as 0.05 or 5%".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        CommandLine::command().debug_assert();
    }

    #[test]
    fn build_without_parquet_names_the_feature() {
        for arguments in [["pagefold", "census", "--parquet", "a.parquet"], ["pagefold", "report", "--parquet", "a.b"]]
        {
            let error = CommandLine::try_parse_from(arguments).err().map(|error| error.to_string());
            assert_eq!(error.is_none(), cfg!(feature = "parquet"), "{error:?}");
            assert!(error.is_none_or(|message| message.contains("--features parquet")));
        }
    }

    #[test]
    fn bandwidth_is_above_zero() {
        assert_eq!(parse_bandwidth("500MiB"), Ok(Bytes(500 << 20)));
        for text in ["0", "0MiB", "fast"] {
            assert!(parse_bandwidth(text).is_err_and(|message| message.contains("write for example")), "{text}");
        }
    }

    #[test]
    fn durations_need_a_unit() {
        assert_eq!(parse_duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_duration("0"), Ok(Duration::ZERO));
        assert!(parse_duration("5").is_err());
        assert!(parse_duration("soon").is_err());
    }

    #[test]
    fn amounts_of_memory_have_binary_and_decimal_units() {
        for (text, expected) in [("0", 0), ("4096", 4096), ("64MiB", 64 << 20), ("1 GiB", 1 << 30), ("2MB", 2_000_000)]
        {
            assert_eq!(parse_bytes(text), Ok(Bytes(expected)), "{text}");
        }
        assert!(parse_bytes("much").is_err() && parse_bytes("-1").is_err());
    }

    #[test]
    fn percentages_are_shares_of_one_cpu() {
        assert_eq!(parse_cpu_share("50"), Ok(0.5));
        assert_eq!(parse_cpu_share("7.5%"), Ok(0.075));
        for bad in ["0", "-1", "101", "nan", "half"] {
            assert!(parse_cpu_share(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn probabilities_are_between_zero_and_one() {
        assert_eq!(parse_probability("0.05"), Ok(0.05));
        assert_eq!(parse_probability("5%"), Ok(0.05));
        assert_eq!(parse_probability("1"), Ok(1.0));
        for bad in ["0", "-1", "1.1", "101%", "nan", "inf", "half"] {
            assert!(parse_probability(bad).is_err(), "{bad}");
        }
    }
}
