//! `pagefold schema`: the JSON schema of a report, or of the configuration.

use crate::command::engine::wire::EngineReport;
use crate::{CommandOutcome, config, output};
use clap::{Args, ValueEnum};
use pagefold_ab::wire::AbReport;
use pagefold_ab::wire::study::StudyReport;
use pagefold_account::wire::AccountReport;
use pagefold_census::wire::CensusReport;
use pagefold_daemon::wire::{DecisionReport, StatusReport};
use pagefold_doctor::wire::DoctorReport;
use pagefold_gang::wire::GangRunReport;
use pagefold_history::points::HistoryResponse;
use pagefold_history::report::HistoryReport;
use pagefold_merge::wire::merge::MergeReport;
use pagefold_merge::wire::policy::PolicyReport;
use pagefold_merge::wire::recover::RecoverReport;
use pagefold_merge::wire::unmerge::UnmergeReport;
use pagefold_numa::wire::apply::{NumaApplyReport, NumaVerifyReport};
use pagefold_numa::wire::map::NumaMapReport;
use pagefold_numa::wire::plan::NumaPlanReport;
use pagefold_numa::wire::predict::NumaPredictReport;
use pagefold_output::wire;
use pagefold_sim::wire::SimCalibrationReport;
use pagefold_sim::wire::comparison::SimCompareReport;
use pagefold_sim::wire::tuning::SimTuneReport;
use pagefold_tune::wire::{TuneApplyReport, TunePlanReport, TuneVerifyReport};
use pagefold_vcpu::wire::map::VcpuMapReport;
use pagefold_vcpu::wire::record::VcpuRecordReport;
use pagefold_vcpu::wire::sim::{VcpuCapacityReport, VcpuResidualsReport, VcpuSimReport};
use pagefold_vcpu::wire::spread::VcpuSpreadReport;
use pagefold_vcpu::wire::status::VcpuStatusReport;

/// Arguments of `schema`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  pagefold schema census > census.schema.json")]
pub struct SchemaArguments {
    /// The report, or `config`
    #[arg(value_enum)]
    report: SchemaName,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum SchemaName {
    /// `pagefold census --json`
    Census,
    /// `pagefold doctor --json`
    Doctor,
    /// `pagefold account --json`
    Account,
    /// `pagefold numa map --json`
    NumaMap,
    /// `pagefold numa plan --json`
    NumaPlan,
    /// `pagefold numa predict --json`
    NumaPredict,
    /// `pagefold numa apply --json`
    NumaApply,
    /// `pagefold numa verify --json`
    NumaVerify,
    /// `pagefold vcpu status --json`
    VcpuStatus,
    /// `pagefold vcpu spread --json`
    VcpuSpread,
    /// `pagefold vcpu gang --json`
    VcpuGang,
    /// `pagefold vcpu map --json`
    VcpuMap,
    /// `pagefold vcpu record --json`
    VcpuRecord,
    /// `pagefold vcpu sim SCENARIO --json`
    VcpuSim,
    /// `pagefold vcpu sim capacity --json`
    VcpuCapacity,
    /// `pagefold vcpu sim residuals --json`
    VcpuResiduals,
    /// `pagefold sim calibrate --json`
    SimCalibration,
    /// `pagefold sim compare --json`
    SimCompare,
    /// `pagefold sim tune --json`
    SimTune,
    /// `pagefold tune plan --json` and `pagefold tune import --json`
    TunePlan,
    /// `pagefold tune apply --json`
    TuneApply,
    /// `pagefold tune verify --json`
    TuneVerify,
    /// `pagefold ab --json`, and `report.json` of a campaign
    Ab,
    /// `pagefold ab study --json`
    AbStudy,
    /// `pagefold merge --json`
    Merge,
    /// `pagefold policy show --json` and `set --json`
    Policy,
    /// `pagefold recover --json`, `pagefold policy restore --json`, and `--json` of `undo` of `numa`, `tune` and
    /// `vcpu spread`
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
    /// A line of `pagefold daemon --json` over a trace
    Decision,
    /// `/etc/pagefold/pagefold.toml`
    Config,
}

/// Print the schema.
pub fn run(options: &SchemaArguments) -> anyhow::Result<CommandOutcome> {
    output::print_stdout(&match options.report {
        SchemaName::Census => wire::json_schema::<CensusReport>(),
        SchemaName::Doctor => wire::json_schema::<DoctorReport>(),
        SchemaName::Account => wire::json_schema::<AccountReport>(),
        SchemaName::NumaMap => wire::json_schema::<NumaMapReport>(),
        SchemaName::NumaPlan => wire::json_schema::<NumaPlanReport>(),
        SchemaName::NumaPredict => wire::json_schema::<NumaPredictReport>(),
        SchemaName::NumaApply => wire::json_schema::<NumaApplyReport>(),
        SchemaName::NumaVerify => wire::json_schema::<NumaVerifyReport>(),
        SchemaName::VcpuStatus => wire::json_schema::<VcpuStatusReport>(),
        SchemaName::VcpuGang => wire::json_schema::<GangRunReport>(),
        SchemaName::VcpuMap => wire::json_schema::<VcpuMapReport>(),
        SchemaName::VcpuRecord => wire::json_schema::<VcpuRecordReport>(),
        SchemaName::VcpuSim => wire::json_schema::<VcpuSimReport>(),
        SchemaName::VcpuCapacity => wire::json_schema::<VcpuCapacityReport>(),
        SchemaName::VcpuResiduals => wire::json_schema::<VcpuResidualsReport>(),
        SchemaName::SimCalibration => wire::json_schema::<SimCalibrationReport>(),
        SchemaName::SimCompare => wire::json_schema::<SimCompareReport>(),
        SchemaName::SimTune => wire::json_schema::<SimTuneReport>(),
        SchemaName::VcpuSpread => wire::json_schema::<VcpuSpreadReport>(),
        SchemaName::TunePlan => wire::json_schema::<TunePlanReport>(),
        SchemaName::TuneApply => wire::json_schema::<TuneApplyReport>(),
        SchemaName::TuneVerify => wire::json_schema::<TuneVerifyReport>(),
        SchemaName::Ab => wire::json_schema::<AbReport>(),
        SchemaName::AbStudy => wire::json_schema::<StudyReport>(),
        SchemaName::Merge => wire::json_schema::<MergeReport>(),
        SchemaName::Policy => wire::json_schema::<PolicyReport>(),
        SchemaName::Recover => wire::json_schema::<RecoverReport>(),
        SchemaName::Unmerge => wire::json_schema::<UnmergeReport>(),
        SchemaName::Engine => wire::json_schema::<EngineReport>(),
        SchemaName::Status => wire::json_schema::<StatusReport>(),
        SchemaName::History => wire::json_schema::<HistoryResponse>(),
        SchemaName::OverTime => wire::json_schema::<HistoryReport>(),
        SchemaName::Decision => wire::json_schema::<DecisionReport>(),
        SchemaName::Config => config::config_schema(),
    })?;
    Ok(CommandOutcome::Done)
}
