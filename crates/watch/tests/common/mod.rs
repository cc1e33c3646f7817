//! The fixture, and a server for it.
#![allow(dead_code, reason = "each test uses what it needs")]

use pagefold_daemon::wire::StatusReport;
use pagefold_watch::StatusBoard;
use pagefold_watch::http::Server;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A path relative to the root of the repository.
pub fn repository_path(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// The status of the shared test fixture.
pub fn fixture_status() -> StatusReport {
    let text = std::fs::read_to_string(repository_path("fixtures/status.json")).expect("the fixture");
    serde_json::from_str(&text).expect("a status")
}

/// A status without its optional fields.
pub fn status_without_optional_fields() -> StatusReport {
    let mut document = serde_json::to_value(fixture_status()).unwrap();
    for name in ["ksm", "resident", "huge_pages_split", "cow_breaks", "census", "sharing", "placement", "vm_cpus"] {
        document.as_object_mut().unwrap().remove(name);
    }
    for name in ["memory", "goal", "saved", "cpu", "decisions_by_reason", "findings_by_verdict"] {
        document[name] = serde_json::json!({});
    }
    for name in ["domains", "tracked_processes", "workloads", "cgroups", "decisions", "findings"] {
        document[name] = serde_json::json!([]);
    }
    document["passes"].as_object_mut().unwrap().remove("last");
    serde_json::from_value(document).expect("a status without optional fields")
}

/// A board with the fixture.
pub fn fixture_board() -> Arc<StatusBoard> {
    let board = Arc::new(StatusBoard::default());
    board.publish(fixture_status());
    board
}

/// Start a server for a board at a free loopback port.
pub fn start_server(board: &Arc<StatusBoard>) -> Server {
    Server::start("127.0.0.1:0".parse().unwrap(), vec!["node17".to_owned()], Arc::clone(board)).expect("a server")
}

/// The path of a program, from PATH or where `labs/setup-watch.sh` installs it.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let mut places: Vec<PathBuf> = std::env::split_paths(&path).collect();
    places.push(repository_path(".cache/watch"));
    places.into_iter().map(|folder| folder.join(name)).find(|file| file.is_file())
}
