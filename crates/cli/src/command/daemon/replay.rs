//! The daemon over a recording of many moments, as fast as they are read.

use super::{Options, status};
use crate::arguments::Global;
use crate::{Outcome, output};
use anyhow::{Context, bail};
use pagefold_drive::daemon::replay::{Moment, Replay};
use pagefold_drive::daemon::{Said, Settings};
use pagefold_host::Host;
use pagefold_host::recording::moments;
use pagefold_model::daemon::{Mode, TimeOfDay};
use pagefold_report::text::printable;
use pagefold_report::wire;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Processes that a line names at most.
const NAMES: usize = 4;

/// The folders of the moments, where the host is a recording of many.
pub fn folders(global: &Global) -> anyhow::Result<Option<Vec<PathBuf>>> {
    let Some(("recording", path)) = global.host.split_once(':') else { return Ok(None) };
    let folders = moments::folders(Path::new(path));
    folders.with_context(|| format!("cannot read the recording {path}: make one with `pagefold record DIR`"))
}

/// Go through them, and print what is decided.
pub fn run(folders: &[PathBuf], settings: Settings, options: &Options) -> anyhow::Result<Outcome> {
    if settings.rules.mode == Mode::Act {
        bail!("a recording cannot be changed: give --mode advise");
    }
    let mut settings = Some(settings);
    let mut replay = None;
    for folder in folders {
        let moment = moments::Moment::open(folder).with_context(|| format!("the moment {}", folder.display()))?;
        let replay = match &mut replay {
            Some(replay) => replay,
            none => {
                let settings = settings.take().unwrap_or_default();
                none.insert(Replay::new(settings, options.seed, moment.host.page_size())?)
            }
        };
        let mut lines = String::new();
        // In which time zone it was recorded is not recorded.
        let second = (moment.time.as_secs() % 86400) as u32;
        let now = Moment { host: &moment.host, at: moment.at, time: TimeOfDay { local: second, utc: second } };
        replay.moment(&now, &mut |names, decision| {
            let said = Said { at: SystemTime::UNIX_EPOCH + moment.time, whom: whom(names), decision: decision.clone() };
            lines.push_str(&match options.json {
                true => wire::line(&status::told(&said)) + "\n",
                false => line(moment.at.as_secs_f64(), &said),
            });
        })?;
        output::print(&lines)?;
    }
    Ok(Outcome::Done)
}

fn whom(names: &[String]) -> String {
    match names.len() {
        0 => "this host".to_owned(),
        count if count > NAMES => format!("{}, {} more", names[..NAMES].join(", "), count - NAMES),
        _ => names.join(", "),
    }
}

fn line(at: f64, Said { whom, decision, .. }: &Said) -> String {
    format!("{at:>9.1} s  {} {}: {}\n", decision.what.word(), printable(whom), printable(&decision.why))
}
