//! Serves a status from a file, to test the page and the metrics without a daemon:
//!
//!     cargo run -p pagefold-watch --example page -- fixtures/status.json 127.0.0.1:9750
//!
//! The status of the file gets the current time. Ends with standard input.

use pagefold_daemon::wire::StatusReport;
use pagefold_watch::StatusBoard;
use pagefold_watch::http::Server;
use std::error::Error;
use std::io::Read;
use std::sync::Arc;
use std::time::SystemTime;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let file = arguments.next().ok_or("which file?")?;
    let address = arguments.next().unwrap_or_else(|| "127.0.0.1:9750".to_owned());
    let mut status: StatusReport = serde_json::from_str(&std::fs::read_to_string(file)?)?;
    status.time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs_f64();
    let board = Arc::new(StatusBoard::default());
    board.publish(status);
    let server = Server::start(address.parse()?, Vec::new(), Arc::clone(&board))?;
    println!("http://{}/", server.address());
    std::io::stdin().read_to_end(&mut Vec::new())?;
    board.close();
    Ok(())
}
