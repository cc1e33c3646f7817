//! Selection of the host and of its processes.

use crate::command::sim::read_scenario;
use crate::command_line::{GlobalOptions, ProcessOptions};
use anyhow::{Context, anyhow, bail};
use pagefold_base::process::Process;
use pagefold_base::{Absent, Pid};
use pagefold_census::results::UnscannedProcess;
use pagefold_census::{ProcessSelection, scan_scope};
use pagefold_host::{Host, ProcessHandle};
use pagefold_linux::LiveHost;
use pagefold_output::text::escape_unprintable;
use pagefold_recording::Recording;
use pagefold_sim::decide::host_state::Exactness;
use pagefold_sim::host::SimulatedHost;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The most names of virtual machines that an error lists.
const MAX_LISTED_NAMES: usize = 20;

/// Open the host that `--host` names.
pub fn open_host(global: &GlobalOptions) -> anyhow::Result<Box<dyn Host>> {
    match global.host.split_once(':') {
        None if global.host == "live" => Ok(Box::new(LiveHost::new())),
        Some(("recording", path)) => {
            let recording = Recording::open(Path::new(path))
                .with_context(|| format!("cannot read the recording {path}: make one with `pagefold record DIR`"))?;
            Ok(Box::new(recording))
        }
        Some(("sim", path)) => {
            let scenario = read_scenario(path)?;
            let (name, seed) = (format!("simulation {path}"), scenario.seed);
            // Leaked, because the host borrows it for as long as the process runs.
            let scenario = Box::leak(Box::new(scenario));
            let host = SimulatedHost::with_scenario(&name, scenario, seed, Exactness::Approximate);
            match host.workload_failure() {
                Some(why) => Err(why).with_context(|| format!("the scenario {path} is too large")),
                None => Ok(Box::new(host)),
            }
        }
        _ => bail!("--host {}: expected `live`, `recording:DIR` or `sim:SCENARIO`", global.host),
    }
}

/// How long a simulated host runs; `None` for another host.
///
/// # Errors
/// Why the scenario cannot be read.
pub fn simulated_duration(global: &GlobalOptions) -> anyhow::Result<Option<Duration>> {
    let path = global.host.strip_prefix("sim:");
    path.map(|path| Ok(Duration::from_millis(read_scenario(path)?.duration_ms))).transpose()
}

/// Whether the host is a recording, which cannot be changed.
pub fn is_recording(global: &GlobalOptions) -> bool {
    global.host.starts_with("recording:")
}

/// Whether the host is a simulated one, whose time is virtual.
pub fn is_simulated(global: &GlobalOptions) -> bool {
    global.host.starts_with("sim:")
}

/// The state directory. That of a simulated host is a directory of its own, so that no journal, lock or socket of the
/// live host is touched.
pub fn state_directory(global: &GlobalOptions) -> PathBuf {
    if is_simulated(global) { global.state.join("simulated") } else { global.state.clone() }
}

/// Convert the selection options. On the live host, this process is excluded.
pub fn process_selection(targets: &ProcessOptions, global: &GlobalOptions) -> anyhow::Result<ProcessSelection> {
    let users = targets.user.iter().map(|user| parse_uid(user)).collect::<anyhow::Result<_>>()?;
    Ok(ProcessSelection {
        pids: targets.pid.iter().copied().map(Pid).collect(),
        comm_patterns: targets.name.clone(),
        cgroups: targets.cgroup.clone(),
        users,
        vm_patterns: targets.vm.clone(),
        excluded_pid: (global.host == "live").then(|| Pid(std::process::id())),
        ..ProcessSelection::default()
    })
}

/// Fail if none of the selected processes could be read.
pub fn check_any_seen(
    host: &dyn Host,
    any_seen: bool,
    selection: &ProcessSelection,
    unscanned: &[UnscannedProcess],
    global: &GlobalOptions,
) -> anyhow::Result<()> {
    if any_seen || (selection.pids.is_empty() && !unscanned.is_empty()) {
        return Ok(());
    }
    let Some(first) = unscanned.first() else {
        if !selection.vm_patterns.is_empty() {
            return Err(no_such_vm(host, &selection.vm_patterns));
        }
        bail!(
            "no process with memory of its own matches (kernel threads and zombies have none): \
             leave the selection options out to list all processes"
        );
    };
    let name = first.comm.as_deref().unwrap_or("?");
    match first.why {
        Absent::Vanished if global.host == "live" => bail!(
            "there is no process {}: `pagefold census` lists the processes. PIDs of another PID namespace (a \
             container's) are not valid here: give PIDs of this namespace, or run pagefold in the other one",
            first.pid
        ),
        Absent::Vanished | Absent::NotOnThisKernel if global.host != "live" => {
            bail!("there is no process {}: it is not on the host {}", first.pid, global.host)
        }
        Absent::Denied => bail!("process {} ({name}): permission denied. {}", first.pid, permission_remedy(global)),
        _ => bail!("process {} ({name}): {}", first.pid, first.why),
    }
}

/// The error if no virtual machine matches `--vm`. It lists those that run.
pub fn no_such_vm(host: &dyn Host, patterns: &[String]) -> anyhow::Error {
    let name = |_: &dyn ProcessHandle, process: Process| {
        Ok(process.identity.vm.map(|vm| vm.name.or(vm.uuid).unwrap_or_else(|| format!("--pid {}", process.id.pid))))
    };
    let machines = scan_scope::inspect_selected(host, &ProcessSelection::default(), name);
    let mut names: Vec<String> =
        machines.map_or_else(|_| Vec::new(), |(names, _)| names.into_iter().flatten().collect());
    names.sort();
    let patterns = patterns.join(", ");
    if names.is_empty() {
        return anyhow!("--vm {patterns}: no virtual machine is running");
    }
    let more = names.len().saturating_sub(MAX_LISTED_NAMES);
    names.truncate(MAX_LISTED_NAMES);
    let names = names.join(", ");
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    anyhow!(
        "--vm {patterns}: no virtual machine with this name or UUID matches all options; these are running: {}{more}",
        escape_unprintable(&names)
    )
}

/// The remedy for processes that could not be read for lack of permission.
pub fn permission_remedy(global: &GlobalOptions) -> &'static str {
    if is_recording(global) {
        "It is not in the recording: record as root to include it."
    } else if global.host != "live" {
        "It is not simulated."
    } else if rustix::process::geteuid().is_root() {
        "Refused even to root: CAP_SYS_PTRACE is missing (a container?), or a security module forbids it."
    } else {
        "Run as root to read all processes."
    }
}

/// The UID of a user that is given by name or UID.
pub fn parse_uid(user: &str) -> anyhow::Result<u32> {
    if let Ok(uid) = user.parse() {
        return Ok(uid);
    }
    nix::unistd::User::from_name(user)
        .with_context(|| format!("cannot look up the user {user:?}"))?
        .map(|user| user.uid.as_raw())
        .with_context(|| format!("there is no user {user:?}: see `getent passwd`, or give a UID"))
}
