//! Replay of a trace by the daemon, as fast as it can be read.

use super::{DaemonArguments, resolve_settings, status};
use crate::command_line::GlobalOptions;
use crate::config::Config;
use crate::{CommandOutcome, output};
use anyhow::{Context, bail};
use pagefold_daemon::decide::{DaemonMode, TimeOfDay};
use pagefold_daemon::run::LoggedDecision;
use pagefold_daemon::run::replay::{DaemonReplay, ReplayStep};
use pagefold_output::text::escape_unprintable;
use pagefold_output::wire;
use pagefold_recording::trace;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// The maximum number of processes that a line names.
const MAX_NAMES_PER_LINE: usize = 4;

/// The directories of the recordings, if the host is a trace.
pub fn recording_folders(global: &GlobalOptions) -> anyhow::Result<Option<Vec<PathBuf>>> {
    let Some(("recording", path)) = global.host.split_once(':') else { return Ok(None) };
    let folders = trace::recording_folders(Path::new(path));
    folders.with_context(|| format!("cannot read the recording {path}: make one with `pagefold record DIR`"))
}

/// Replay the recordings, and print the daemon's decisions.
pub fn run(folders: &[PathBuf], config: &Config, options: &DaemonArguments) -> anyhow::Result<CommandOutcome> {
    let mut replay = None;
    for folder in folders {
        let recording =
            trace::TimedRecording::open(folder).with_context(|| format!("cannot read {}", folder.display()))?;
        let replay = match &mut replay {
            Some(replay) => replay,
            none => {
                let settings = resolve_settings(config, options, &recording.host, false)?;
                if settings.rules.mode == DaemonMode::Act {
                    bail!("a recording cannot be changed: give --mode advise");
                }
                none.insert(DaemonReplay::new(settings, options.seed, &recording.host)?)
            }
        };
        let mut lines = String::new();
        let step = ReplayStep {
            host: &recording.host,
            elapsed: recording.since_start,
            time_of_day: time_of_day(recording.unix_time, recording.utc_offset_seconds),
        };
        replay.run_step(&step, &mut |names, decision| {
            let logged = LoggedDecision {
                logged_at: SystemTime::UNIX_EPOCH + recording.unix_time,
                subject: format_names(names),
                decision: decision.clone(),
            };
            lines.push_str(&match options.json {
                true => wire::to_json_line(&status::decision_report(&logged)) + "\n",
                false => format_decision(recording.since_start.as_secs_f64(), &logged),
            });
        })?;
        output::print_stdout(&lines)?;
    }
    Ok(CommandOutcome::Done)
}

/// The time of day at a Unix time. Old recordings lack the host's UTC offset; their local time is taken as UTC.
fn time_of_day(time: Duration, utc_offset: Option<i64>) -> TimeOfDay {
    let second_of_day =
        |utc_offset: i64| (time.as_secs().cast_signed().saturating_add(utc_offset)).rem_euclid(86400) as u32;
    TimeOfDay { local: second_of_day(utc_offset.unwrap_or(0)), utc: second_of_day(0) }
}

fn format_names(names: &[String]) -> String {
    match names.len() {
        0 => "this host".to_owned(),
        count if count > MAX_NAMES_PER_LINE => {
            format!("{}, {} more", names[..MAX_NAMES_PER_LINE].join(", "), count - MAX_NAMES_PER_LINE)
        }
        _ => names.join(", "),
    }
}

fn format_decision(seconds: f64, LoggedDecision { subject, decision, .. }: &LoggedDecision) -> String {
    format!(
        "{seconds:>9.1} s  {} {}: {}\n",
        decision.kind.word(),
        escape_unprintable(subject),
        escape_unprintable(&decision.explanation)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_utc_offset_is_applied() {
        let noon = Duration::from_secs(1_700_000_000 / 86400 * 86400 + 12 * 3600);
        let at_noon = |utc_offset| time_of_day(noon, utc_offset);
        assert_eq!(at_noon(None), TimeOfDay { local: 12 * 3600, utc: 12 * 3600 });
        assert_eq!(at_noon(Some(13 * 3600)), TimeOfDay { local: 3600, utc: 12 * 3600 });
        assert_eq!(at_noon(Some(-12 * 3600 - 1)), TimeOfDay { local: 86399, utc: 12 * 3600 });
        assert!(at_noon(Some(i64::MAX)).local < 86400);
    }
}
