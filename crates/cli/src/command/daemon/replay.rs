//! The daemon over a recording of many moments, as fast as they are read.

use super::{Options, status};
use crate::arguments::Global;
use crate::{Outcome, output};
use anyhow::{Context, bail};
use pagefold_daemon::decide::{Mode, TimeOfDay};
use pagefold_daemon::run::replay::{Moment, Replay};
use pagefold_daemon::run::{Said, Settings};
use pagefold_host::Host;
use pagefold_output::text::printable;
use pagefold_output::wire;
use pagefold_recording::moments;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

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
        let now = Moment { host: &moment.host, at: moment.at, time: time_of_day(moment.time, moment.utc_offset) };
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

/// What clocks showed at a Unix time. Recordings of before it was kept do not say by how much the host's own was ahead:
/// it is taken to have shown UTC.
fn time_of_day(time: Duration, ahead: Option<i64>) -> TimeOfDay {
    let second = |ahead: i64| (time.as_secs().cast_signed().saturating_add(ahead)).rem_euclid(86400) as u32;
    TimeOfDay { local: second(ahead.unwrap_or(0)), utc: second(0) }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_own_clock_is_ahead_or_behind() {
        let noon = Duration::from_secs(1_700_000_000 / 86400 * 86400 + 12 * 3600);
        let shown = |ahead| time_of_day(noon, ahead);
        assert_eq!(shown(None), TimeOfDay { local: 12 * 3600, utc: 12 * 3600 });
        assert_eq!(shown(Some(13 * 3600)), TimeOfDay { local: 3600, utc: 12 * 3600 });
        assert_eq!(shown(Some(-12 * 3600 - 1)), TimeOfDay { local: 86399, utc: 12 * 3600 });
        assert!(shown(Some(i64::MAX)).local < 86400);
    }
}
