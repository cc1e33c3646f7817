//! How commands that enroll and unenroll reach a virtual machine: by QEMU's control socket (QMP) if one is named or
//! found. Then they use no other method unless `--inject` is given.

use crate::command_line::GlobalOptions;
use anyhow::bail;
use pagefold_base::process::Process;
use pagefold_host::ProcessHandle as Handle;
use pagefold_linux::qmp::{self, MemoryBackend};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The state of a process's control socket.
pub enum GuestControl {
    /// There is no socket, or it must not be used: treat the process like any other.
    Unused,
    /// The socket, with the memory backends that QEMU listed there.
    Reachable(PathBuf, Vec<MemoryBackend>),
    /// The socket cannot be used. The text has the reason and a remedy.
    Unreachable(String),
}

/// The time limit for the control sockets of all processes together. Any process may claim to be a virtual machine.
const TOTAL_SOCKET_TIMEOUT: Duration = Duration::from_secs(60);

/// The control socket queries of one command, with their time limit and stop flag.
pub struct GuestSocketQueries<'a> {
    stop: &'a AtomicBool,
    /// Time spent on queries so far, in milliseconds.
    elapsed_millis: AtomicU64,
}

impl<'a> GuestSocketQueries<'a> {
    /// No queries yet.
    pub fn new(stop: &'a AtomicBool) -> Self {
        Self { stop, elapsed_millis: AtomicU64::new(0) }
    }

    fn query_backends(&self, socket: &Path, process: &Process) -> Result<Vec<MemoryBackend>, String> {
        if Duration::from_millis(self.elapsed_millis.load(Ordering::Relaxed)) >= TOTAL_SOCKET_TIMEOUT {
            let seconds = TOTAL_SOCKET_TIMEOUT.as_secs();
            return Err(format!("{} was not queried: other control sockets took {seconds} s", socket.display()));
        }
        let started = Instant::now();
        let backends = qmp::list_backends(socket, process.id, self.stop).map_err(|error| error.to_string());
        let elapsed_millis = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.elapsed_millis.fetch_add(elapsed_millis, Ordering::Relaxed);
        backends
    }
}

/// Refuse a control socket given by `--qmp` if several virtual machines are selected: it belongs to only one.
pub fn check_single_guest<'p>(
    named_socket: Option<&Path>,
    processes: impl Iterator<Item = &'p Process>,
) -> anyhow::Result<()> {
    let guests = processes.filter(|process| process.identity.vm.is_some()).count();
    if named_socket.is_some() && guests > 1 {
        bail!("--qmp applies to one virtual machine, but {guests} are selected: select one by --vm or --pid");
    }
    Ok(())
}

/// Query the control socket of a process that runs a virtual machine: `named_socket`, or the one on its command line.
///
/// # Errors
/// If `named_socket` cannot be used, or the process is not a virtual machine.
pub fn find_control(
    handle: &dyn Handle,
    process: &Process,
    named_socket: Option<&Path>,
    inject: bool,
    global: &GlobalOptions,
    queries: &GuestSocketQueries<'_>,
) -> anyhow::Result<GuestControl> {
    if inject || global.host != "live" {
        return Ok(GuestControl::Unused);
    }
    let Some(vm) = &process.identity.vm else {
        if named_socket.is_some() {
            let (comm, pid) = (&process.comm, process.id.pid);
            bail!("{comm}[{pid}] is not a virtual machine according to its command line: leave --qmp out");
        }
        return Ok(GuestControl::Unused);
    };
    let Some(socket) = named_socket.map(Path::to_owned).or_else(|| qmp::control_socket_path(handle, vm)) else {
        return Ok(GuestControl::Unused);
    };
    match queries.query_backends(&socket, process) {
        Ok(backends) => Ok(GuestControl::Reachable(socket, backends)),
        Err(error) => {
            let why = format!("{error}; `--inject` uses code injection instead");
            if named_socket.is_some() {
                bail!(why);
            }
            Ok(GuestControl::Unreachable(why))
        }
    }
}
