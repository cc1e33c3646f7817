//! What can be said on the command line, as text. What the text means on a host is found out by the commands.

use crate::command;
use clap::builder::{PathBufValueParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use pagefold_base::Bytes;
use pagefold_base::domain::DomainRule;
use pagefold_census::tally::MatrixRowKind;
use std::path::PathBuf;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  pagefold census                       what the memory of this host holds twice
  sudo pagefold merge --vm web1 --vm web2 --across-domains
                                        have the kernel merge what two virtual machines share
  sudo pagefold unmerge --vm web1       and give one of them pages of its own again
  pagefold run -- ./solver input.nml    a program with all that it starts, enrolled from its start
  pagefold account --by vm              the true footprint, where RSS is blind to merging
  pagefold doctor                       KSM is on and merges nothing: why?
  pagefold record /tmp/host             a folder to attach to a bug report
  pagefold --host recording:/tmp/host census

Exit status: 0 done, 1 the verdict is no, 2 usage or failure, 3 something was not seen, or not done.";

/// Have a Linux host hold more: find identical memory pages, have the kernel merge those that pay, take that back, and
/// tell what it saves and costs.
#[derive(Debug, Parser)]
#[command(name = "pagefold", version, after_help = EXAMPLES, max_term_width = 100)]
pub struct CommandLine {
    #[command(flatten)]
    pub global: GlobalOptions,
    #[command(subcommand)]
    pub command: PagefoldCommand,
}

#[derive(Args, Clone, Debug)]
pub struct GlobalOptions {
    /// What to look at: `live` or `recording:DIR`
    #[arg(long, global = true, default_value = "live", value_name = "HOST")]
    pub host: String,
    /// When to use colour
    #[arg(long, global = true, value_enum, default_value_t = ColorChoice::Auto)]
    pub color: ColorChoice,
    /// Where the lock and the journal of what is to be put back are kept
    #[arg(long, global = true, default_value = pagefold_host::transaction::session::DEFAULT_STATE_DIRECTORY, value_name = "DIR")]
    pub state: PathBuf,
    /// The configuration [default: /etc/pagefold/pagefold.toml where it is there]
    #[arg(long, global = true, value_name = "FILE")]
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
    /// Count identical pages, and what merging them would give back
    Census(command::census::CensusArguments),
    /// Keep what the read-only commands read in a folder, for a bug report
    Record(command::record::RecordArguments),
    /// Say why nothing merges, and what is wrong with how this host merges
    Doctor(command::doctor::DoctorArguments),
    /// Merge what pays: in seconds, within a bound on CPU, verified
    Merge(command::merge::MergeArguments),
    /// Tell the true footprint of processes, where RSS is blind to merging
    Account(command::account::AccountArguments),
    /// Start a program with its whole process tree enrolled in KSM, or merged in user space
    Run(command::run::RunArguments),
    /// Merge what pays all the time, within a bound on CPU
    Daemon(command::daemon::DaemonArguments),
    /// Show what the daemon does, what it saves and what it costs
    Status(command::daemon::StatusArguments),
    /// Watch the daemon in the terminal
    Top(command::top::TopArguments),
    /// Show what daemons have kept of hosts over time: a page, pictures, tables
    Report(command::report::ReportArguments),
    /// Have the daemon do nothing, and KSM's settings put back
    Pause,
    /// Have the daemon go on
    Resume,
    /// Have the daemon look at a process now
    Enrol(command::daemon::ProcessArgument),
    /// Have the daemon leave a process alone, and withdraw what is merged of it
    Withdraw(command::daemon::ProcessArgument),
    /// Set KSM's settings by a rule, show them, or put back what was before
    Policy(command::policy::PolicyArguments),
    /// Put back what a killed run left
    Recover(command::recover::RecoverArguments),
    /// Print a configuration, or check it
    Config(command::config::ConfigArguments),
    /// Give merged processes pages of their own again, if the memory is there
    Unmerge(command::unmerge::UnmergeArguments),
    /// Show who merges by libpagefold, and what that saves
    Engine(command::engine::EngineArguments),
    /// Print the JSON schema of a report or of the configuration
    Schema(command::schema::SchemaArguments),
    /// Print a completion script for a shell
    Completions(command::completions::CompletionsArguments),
    /// Write the manual pages to a folder
    Man(command::man::ManArguments),
}

/// Which processes. Kinds of conditions narrow each other down; within a kind any one is enough.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Which processes")]
pub struct ProcessOptions {
    /// A process by its number
    #[arg(long, value_name = "N")]
    pub pid: Vec<u32>,
    /// Processes by the kernel's name of their program, with * and ?
    #[arg(long, value_name = "GLOB")]
    pub name: Vec<String>,
    /// Processes of a cgroup and of those below it, by its path on the host, also in a container that may join the
    /// host's cgroup namespace
    #[arg(long, value_name = "PATH")]
    pub cgroup: Vec<String>,
    /// Processes of a user, by name or number
    #[arg(long, value_name = "USER")]
    pub user: Vec<String>,
    /// Virtual machines by their name, with * and ?
    #[arg(long, value_name = "GLOB")]
    pub vm: Vec<String>,
    /// Everything that may be read; the default, but for `unmerge`, to which it must be said
    #[arg(long, conflicts_with_all = ["pid", "name", "cgroup", "user", "vm"])]
    pub all: bool,
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

/// Who the rows of the sharing matrix are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MatrixRowsArgument {
    /// Processes, virtual machines by their names
    Process,
    /// Virtual machines alone
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

/// The file of `--parquet`, which a build without the feature refuses before it does any work.
pub fn parquet_path_parser() -> impl TypedValueParser<Value = PathBuf> {
    let remedy = "this build writes no Parquet; `cargo install --path crates/cli --features parquet` makes one that \
                  does, and `report --csv` has the same columns";
    PathBufValueParser::new().try_map(move |path| if cfg!(feature = "parquet") { Ok(path) } else { Err(remedy) })
}

/// A share of one CPU, from a percentage such as `50` or `50%`.
pub fn parse_cpu_share(text: &str) -> Result<f64, String> {
    match text.trim_end_matches('%').trim().parse::<f64>() {
        Ok(value) if value > 0.0 && value <= 100.0 => Ok(value / 100.0),
        _ => Err("a percentage above 0 and at most 100 is needed, such as 50".to_owned()),
    }
}

/// An amount of memory, such as `64MiB`; a plain number is bytes.
pub fn parse_bytes(text: &str) -> Result<Bytes, String> {
    match text.parse::<bytesize::ByteSize>() {
        Ok(size) => Ok(Bytes(size.as_u64())),
        Err(error) => Err(format!("{error}; write for example 64MiB")),
    }
}

/// A probability above 0 and at most 1, as `0.05` or `5%`.
pub fn parse_probability(text: &str) -> Result<f64, String> {
    let (number, scale) = text.strip_suffix('%').map_or((text, 1.0), |number| (number, 100.0));
    match number.trim().parse::<f64>() {
        Ok(value) if value / scale > 0.0 && value / scale <= 1.0 => Ok(value / scale),
        _ => Err("a share above 0 and at most 1 is needed, such as 0.05 or 5%".to_owned()),
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
            let refused = CommandLine::try_parse_from(arguments).err().map(|error| error.to_string());
            assert_eq!(refused.is_none(), cfg!(feature = "parquet"), "{refused:?}");
            assert!(refused.is_none_or(|said| said.contains("--features parquet")));
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
