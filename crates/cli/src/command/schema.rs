//! `pagefold schema`: the JSON schema of a report, or of the configuration.

use crate::command::engine::wire::EngineReport;
use crate::{Outcome, config, output};
use clap::{Args, ValueEnum};
use pagefold_account::wire::AccountReport;
use pagefold_census::wire::CensusReport;
use pagefold_daemon::wire::{Decision, Status};
use pagefold_doctor::wire::DoctorReport;
use pagefold_history::points::History;
use pagefold_history::report::HistoryReport;
use pagefold_merge::wire::merge::MergeReport;
use pagefold_merge::wire::policy::PolicyReport;
use pagefold_merge::wire::recover::RecoverReport;
use pagefold_merge::wire::unmerge::UnmergeReport;
use pagefold_output::wire;

/// Arguments of `schema`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  pagefold schema census > census.schema.json")]
pub struct Options {
    /// Of what
    #[arg(value_enum)]
    report: Report,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Report {
    /// `pagefold census --json`
    Census,
    /// `pagefold doctor --json`
    Doctor,
    /// `pagefold account --json`
    Account,
    /// `pagefold merge --json`
    Merge,
    /// `pagefold policy show --json` and `set --json`
    Policy,
    /// `pagefold recover --json` and `pagefold policy restore --json`
    Recover,
    /// `pagefold unmerge --json`
    Unmerge,
    /// `pagefold engine status --json`
    Engine,
    /// `pagefold status --json`, and `/api/status` of the daemon
    Status,
    /// `/api/history` of the daemon
    History,
    /// `pagefold report --json`
    #[value(name = "report")]
    OverTime,
    /// A line of `pagefold daemon --json` over a recording
    Decision,
    /// `/etc/pagefold/pagefold.toml`
    Config,
}

/// Print the schema.
pub fn run(options: &Options) -> anyhow::Result<Outcome> {
    output::print(&match options.report {
        Report::Census => wire::schema::<CensusReport>(),
        Report::Doctor => wire::schema::<DoctorReport>(),
        Report::Account => wire::schema::<AccountReport>(),
        Report::Merge => wire::schema::<MergeReport>(),
        Report::Policy => wire::schema::<PolicyReport>(),
        Report::Recover => wire::schema::<RecoverReport>(),
        Report::Unmerge => wire::schema::<UnmergeReport>(),
        Report::Engine => wire::schema::<EngineReport>(),
        Report::Status => wire::schema::<Status>(),
        Report::History => wire::schema::<History>(),
        Report::OverTime => wire::schema::<HistoryReport>(),
        Report::Decision => wire::schema::<Decision>(),
        Report::Config => config::schema(),
    })?;
    Ok(Outcome::Done)
}
