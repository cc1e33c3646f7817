//! Shows a status from a file like `pagefold top`, read again each second; NO_COLOR applies, too:
//!
//!     cargo run -p pagefold-watch --example top -- fixtures/status.json

use pagefold_daemon::wire::StatusReport;
use pagefold_watch::top;
use std::error::Error;
use std::time::Duration;

fn main() -> Result<(), Box<dyn Error>> {
    let file = std::env::args().nth(1).ok_or("which file?")?;
    let read =
        move || -> Result<StatusReport, Box<dyn Error>> { Ok(serde_json::from_str(&std::fs::read_to_string(&file)?)?) };
    let color = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    Ok(top::run(read, Duration::from_secs(1), color)?)
}
