//! The schemas in `docs/schema` equal those that the binary prints. `UPDATE_SCHEMAS=1` rewrites them.

use std::path::Path;
use std::process::Command;

#[test]
fn published_schemas_are_current() {
    for report in [
        "census",
        "account",
        "doctor",
        "merge",
        "unmerge",
        "policy",
        "recover",
        "engine",
        "status",
        "history",
        "report",
        "decision",
        "numa-map",
        "numa-plan",
        "numa-predict",
        "numa-apply",
        "numa-verify",
        "vcpu-status",
        "vcpu-spread",
        "vcpu-gang",
        "tune-plan",
        "tune-apply",
        "tune-verify",
        "ab",
        "ab-study",
        "vcpu-map",
        "vcpu-record",
        "vcpu-sim",
        "vcpu-capacity",
        "vcpu-residuals",
        "sim-calibration",
        "sim-compare",
        "sim-tune",
        "config",
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_pagefold")).args(["schema", report]).output().unwrap();
        assert!(output.status.success());
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../docs/schema/{report}.json"));
        if std::env::var_os("UPDATE_SCHEMAS").is_some() {
            std::fs::write(&path, &output.stdout).unwrap();
        }
        let published = std::fs::read(&path).unwrap_or_default();
        assert!(published == output.stdout, "{} is not current: run with UPDATE_SCHEMAS=1", path.display());
    }
}
