use super::*;
use std::path::Path;

fn fixture_json() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/status.json");
    std::fs::read_to_string(path).expect("the fixture")
}

#[test]
fn status_json_round_trips() {
    let text = fixture_json();
    let status: StatusReport = serde_json::from_str(&text).expect("a status");
    assert_eq!(status.schema, STATUS_SCHEMA);
    let written = serde_json::to_value(&status).unwrap();
    assert_eq!(written, serde_json::from_str::<serde_json::Value>(&text).unwrap(), "no field is lost");
    let schema = serde_json::from_str(&pagefold_output::wire::json_schema::<StatusReport>()).unwrap();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let wrong: Vec<String> = validator.iter_errors(&written).map(|error| error.to_string()).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The fixture must be consistent.
#[test]
fn fixture_figures_are_consistent() {
    let status: StatusReport = serde_json::from_str(&fixture_json()).unwrap();
    let saved = status.saved;
    assert_eq!(saved.net, Some(saved.gross.unwrap() as i64 - saved.metadata.unwrap() as i64));
    let ksm = status.ksm.unwrap();
    let pages = ksm.pages_sharing.unwrap() + ksm.ksm_zero_pages.unwrap() as u64;
    assert_eq!(saved.gross, Some(pages * 4096));
    assert_eq!(saved.gross, Some(saved.duplicate.unwrap() + saved.zero.unwrap()));
    assert_eq!(ksm.general_profit, saved.net);
    let sharing = status.sharing.unwrap();
    assert!(sharing.shared_bytes.len() == sharing.parties.len() && sharing.parties.len() <= MAX_MATRIX_PARTIES + 1);
    assert!(sharing.shared_bytes.iter().all(|row| row.len() == sharing.parties.len()));
    let classes = status.census.unwrap().classes;
    let parts = classes.zero + classes.duplicate + classes.unique + classes.merged + classes.volatile;
    assert_eq!(classes.resident, parts);
    assert!(status.tracked_processes.is_sorted_by_key(|process| std::cmp::Reverse(process.resident)));
    assert!(status.decisions.is_sorted_by_key(|decision| std::cmp::Reverse(decision.time_ms)));
    let counted: u64 = status.decisions_by_reason.values().sum();
    assert!(status.decisions.len() as u64 <= counted);
    let of_domains: u64 = status.domains.iter().filter_map(|domain| domain.saved).sum();
    assert!(of_domains <= saved.gross.unwrap());
    // The listed processes only, which are the largest.
    assert_eq!(group_footprints::sum_by_workload(&status.tracked_processes), status.workloads);
    assert_eq!(group_footprints::sum_by_cgroup(&status.tracked_processes), status.cgroups);
    for domain in &status.domains {
        let merged = status
            .tracked_processes
            .iter()
            .filter(|process| process.domain == domain.name)
            .map(|process| process.merged);
        assert_eq!(domain.merged, merged.sum());
    }
    assert!(status.tracked_processes.iter().all(|process| process.file_and_shmem <= process.resident));
    assert!(status.findings.iter().all(|finding| status.findings_by_verdict[&finding.verdict] > 0));
}
