//! Pagefold's daemon on the host of a scenario, in virtual time and without output.

use crate::command::daemon::scenario_end::ScenarioEnd;
use crate::command_line::GlobalOptions;
use crate::config::Config;
use anyhow::{Context, ensure};
use pagefold_daemon::decide::{CpuRate, DaemonMode, DaemonState};
use pagefold_daemon::run as daemon;
use pagefold_host::Host;
use pagefold_sim::comparison::{DaemonRun, DaemonRunner, SimulationError};
use pagefold_sim::decide::policies::ComparedPolicy;
use pagefold_sim::decide::samples::{ScanWait, SimulatedRun};
use pagefold_sim::host::SimulatedHost;
use std::collections::VecDeque;
use std::sync::mpsc;
use std::time::Duration;

/// Last lines of a daemon's log that an error shows.
const SHOWN_LOG_LINES: usize = 3;

/// What runs daemons by the user's configuration, in mode act; `None` if no policy needs it.
pub fn daemon_runner(policies: &[ComparedPolicy], global: &GlobalOptions) -> anyhow::Result<Option<Box<DaemonRunner>>> {
    if !policies.iter().any(ComparedPolicy::is_guided) {
        return Ok(None);
    }
    let config = Config::load(global)?;
    Ok(Some(Box::new(move |run: DaemonRun<'_>, note_progress: &mut dyn FnMut(u64)| {
        let host = SimulatedHost::with_scenario(&run.scenario.description, run.scenario, run.seed, run.exactness);
        let mut scan_wait = ScanWait::default();
        let mut note_state = |state: &DaemonState, elapsed_ms: u64| {
            note_progress(elapsed_ms);
            let now = ScanWait { longest_ms: to_ms(state.longest_wait()), priority_ms: to_ms(state.max_wait()) };
            scan_wait = scan_wait.worse(now);
        };
        let result = run_daemon(&host, &config, run, &mut note_state);
        if let Some(failure) = host.workload_failure() {
            return Err(failure.into());
        }
        result.map_err(|error| SimulationError::Daemon(error.into()))?;
        Ok(SimulatedRun { scan_wait: Some(scan_wait), ..host.simulated_run() })
    })))
}

fn to_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Runs the daemon to the end of the scenario. `note_state` gets its state and the virtual time in milliseconds from time
/// to time.
fn run_daemon(
    host: &SimulatedHost<'_>,
    config: &Config,
    run: DaemonRun<'_>,
    note_state: &mut dyn FnMut(&DaemonState, u64),
) -> anyhow::Result<()> {
    let scenario = run.scenario;
    let cpu_rate = run.cpu_permille.map(|permille| CpuRate::OfOneCpu(f64::from(permille) / 1000.0));
    let mut settings = config.with_cpu_rate(cpu_rate).daemon_settings(Some(scenario.host.cpus as usize))?;
    settings.rules = settings.rules.for_part(scenario.divisor.get());
    settings.rules.mode = DaemonMode::Act;
    settings.rules.across_domains |= run.across_domains;
    settings.max_census_threads = 1;
    let directory = tempfile::tempdir().context("cannot create a directory for the daemon's state")?;
    let (sender, messages) = mpsc::channel();
    let start = host.now();
    let mut end = ScenarioEnd::new(host, Duration::from_millis(scenario.duration_ms), sender.clone(), false);
    let mut on_alive = |state: &DaemonState| {
        end.stop_if_over(host);
        let elapsed_ms = to_ms(host.now().saturating_duration_since(start));
        note_state(state, elapsed_ms.min(scenario.duration_ms));
    };
    let mut last_lines = VecDeque::new();
    let mut log = |line: &str| {
        if last_lines.len() == SHOWN_LOG_LINES {
            last_lines.pop_front();
        }
        last_lines.push_back(line.to_owned());
    };
    let all_undone =
        daemon::run(host, directory.path(), settings, run.seed, (sender, messages), &mut on_alive, &mut log)?;
    let last_lines: Vec<String> = last_lines.into();
    ensure!(all_undone, "it ended early, or could not undo all changes: {}", last_lines.join("; "));
    Ok(())
}
