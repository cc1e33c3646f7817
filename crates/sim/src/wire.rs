//! The results of `pagefold sim` in JSON.

pub mod comparison;
pub mod prediction;
pub mod tuning;

use crate::calibration::{Calibration, CalibrationScan};
use crate::decide::cost::{CostModel, Operation};
use crate::decide::rules::KernelVersion;
use crate::scenario::MAX_COST_NS;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A kernel as `6.12.54`.
fn kernel_name(kernel: KernelVersion) -> String {
    format!("{}.{}.{}", kernel.major, kernel.minor, kernel.stable)
}

/// The schema of a calibration.
const CALIBRATION_SCHEMA: &str = "pagefold.sim-calibration/1";

/// The result of `pagefold sim calibrate`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct SimCalibrationReport {
    /// `pagefold.sim-calibration/1`.
    pub schema: &'static str,
    /// The kernel's release.
    pub kernel: String,
    /// Pages of most processes.
    pub pages: u64,
    /// Repetitions of each scenario.
    pub rounds: u32,
    /// The fitted costs.
    pub costs: Vec<OperationCostReport>,
    /// Errors of the scans to which the costs were fitted.
    pub fitted: ErrorReport,
    /// Errors of the scans that were left out of the fit.
    pub held_out: ErrorReport,
    /// All scans.
    pub scans: Vec<CalibrationScanReport>,
}

/// The CPU time of an operation.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct OperationCostReport {
    /// `visit`, `skip`, `checksum`, `stable comparison`, `unstable comparison`, `merge`, `split`, `allocation` or
    /// `batch`.
    pub operation: &'static str,
    /// CPU time in nanoseconds.
    pub nanoseconds: f64,
}

/// How far the model's CPU time is from the measured one.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct ErrorReport {
    /// Scans.
    pub scans: usize,
    /// The median of the absolute relative errors.
    pub median_error: f64,
    /// The largest one.
    pub worst_error: f64,
}

/// A scan of ksmd and of the model.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct CalibrationScanReport {
    /// The scenario.
    pub scenario: &'static str,
    /// Whether it was left out of the fit.
    pub held_out: bool,
    /// The repetition, from 1.
    pub round: u32,
    /// The scan, from 1.
    pub scan: u32,
    /// What ksmd did in it by the model.
    pub operations: Vec<OperationCountReport>,
    /// The CPU time of ksmd, in milliseconds.
    pub cpu_ms: f64,
    /// That of the model.
    pub modeled_cpu_ms: f64,
    /// The model's CPU time relative to the measured one, minus 1.
    pub relative_error: f64,
    /// Page table entries that ksmd had merged after it, also with the zero page.
    pub merged_pages: u64,
    /// Those of the model.
    pub modeled_merged_pages: u64,
}

/// How often an operation happened.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct OperationCountReport {
    /// As in the costs.
    pub operation: &'static str,
    /// How often.
    pub count: u64,
}

impl SimCalibrationReport {
    /// The report of a calibration with these settings.
    pub fn new(kernel: String, pages: u64, rounds: u32, calibration: &Calibration) -> Self {
        let costs = &calibration.costs;
        let errors = |held_out: bool| {
            let scans = calibration.scans.iter().filter(|scan| (scan.scenario == calibration.held_out) == held_out);
            summarize(scans.map(|scan| costs.relative_error(&scan.measured).abs()).collect())
        };
        let scan = |scan: &CalibrationScan| CalibrationScanReport {
            scenario: scan.scenario,
            held_out: scan.scenario == calibration.held_out,
            round: scan.round,
            scan: scan.scan,
            operations: Operation::ALL
                .into_iter()
                .map(|operation| OperationCountReport {
                    operation: operation.name(),
                    count: scan.measured.operations.count(operation),
                })
                .collect(),
            cpu_ms: scan.measured.cpu_ns / 1e6,
            modeled_cpu_ms: costs.cpu_ns(&scan.measured.operations) / 1e6,
            relative_error: costs.relative_error(&scan.measured),
            merged_pages: scan.merged_pages.0,
            modeled_merged_pages: scan.merged_pages.1,
        };
        Self {
            schema: CALIBRATION_SCHEMA,
            kernel,
            pages,
            rounds,
            costs: Operation::ALL
                .into_iter()
                .map(|operation| OperationCostReport {
                    operation: operation.name(),
                    nanoseconds: costs.nanoseconds(operation),
                })
                .collect(),
            fitted: errors(false),
            held_out: errors(true),
            scans: calibration.scans.iter().map(scan).collect(),
        }
    }
}

/// What is read of a calibration.
#[derive(Deserialize)]
struct WrittenCalibration {
    schema: String,
    costs: Vec<WrittenCost>,
}

#[derive(Deserialize)]
struct WrittenCost {
    operation: String,
    nanoseconds: f64,
}

/// The costs in the JSON of `pagefold sim calibrate`.
///
/// # Errors
/// What is wrong with it.
pub fn parse_costs(json: &str) -> Result<CostModel, String> {
    let report: WrittenCalibration = serde_json::from_str(json).map_err(|error| error.to_string())?;
    if report.schema != CALIBRATION_SCHEMA {
        return Err(format!("its schema is {:?} and not {CALIBRATION_SCHEMA:?}", report.schema));
    }
    let cost_of = |operation: Operation| {
        let written = report.costs.iter().find(|cost| cost.operation == operation.name());
        let cost = written.ok_or_else(|| format!("it has no cost of {:?}", operation.name()))?.nanoseconds;
        let is_valid = (0.0..=MAX_COST_NS).contains(&cost);
        if is_valid { Ok((operation, cost)) } else { Err(format!("{:?} cannot cost {cost} ns", operation.name())) }
    };
    Ok(CostModel::new(Operation::ALL.into_iter().map(cost_of).collect::<Result<Vec<_>, _>>()?))
}

fn summarize(mut errors: Vec<f64>) -> ErrorReport {
    errors.sort_by(f64::total_cmp);
    ErrorReport {
        scans: errors.len(),
        median_error: errors.get(errors.len() / 2).copied().unwrap_or(0.0),
        worst_error: errors.last().copied().unwrap_or(0.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_of_a_calibration_are_read() {
        let costs = CostModel::new([(Operation::Visit, 200.5), (Operation::Merge, 700.0)]);
        let calibration = Calibration { costs, scans: Vec::new(), held_out: "" };
        let report = SimCalibrationReport::new("6.18".to_owned(), 8192, 1, &calibration);
        let json = serde_json::to_string(&report).unwrap();
        assert_eq!(parse_costs(&json), Ok(costs));
        let wrong = [
            (json.replace("\"visit\"", "\"walk\""), "it has no cost of \"visit\""),
            (json.replace("200.5", "-1.0"), "\"visit\" cannot cost -1 ns"),
            (json.replace("calibration/1", "compare/1"), "its schema is"),
            ("{}".to_owned(), "missing field `schema`"),
        ];
        for (json, message) in wrong {
            assert!(parse_costs(&json).unwrap_err().contains(message), "{json}");
        }
    }
}
