//! How the commands that enrol and withdraw reach a virtual machine: by QEMU's control socket where one is named or
//! found, and then by nothing else unless that is asked for.

use crate::command_line::GlobalOptions;
use anyhow::bail;
use pagefold_base::process::Process;
use pagefold_host::ProcessHandle as Handle;
use pagefold_linux::qmp::{self, MemoryBackend};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What a control socket is good for.
pub enum GuestControl {
    /// There is none, or it is to be left alone: as any other process.
    Unused,
    /// The guest tells its memory backends at this socket.
    Reachable(PathBuf, Vec<MemoryBackend>),
    /// There is one that is of no use, for this reason, which names what else can be done.
    Unreachable(String),
}

/// How long the control sockets of all processes may take in all. Any process may claim to be a virtual machine.
const TOTAL_SOCKET_TIMEOUT: Duration = Duration::from_secs(60);

/// What one command asks control sockets for: for how long it has, and whether it is told to stop.
pub struct GuestSocketQueries<'a> {
    stop: &'a AtomicBool,
    /// Milliseconds.
    elapsed_millis: AtomicU64,
}

impl<'a> GuestSocketQueries<'a> {
    /// Nothing was asked for yet.
    pub fn new(stop: &'a AtomicBool) -> Self {
        Self { stop, elapsed_millis: AtomicU64::new(0) }
    }

    fn query_backends(&self, socket: &Path, process: &Process) -> Result<Vec<MemoryBackend>, String> {
        if Duration::from_millis(self.elapsed_millis.load(Ordering::Relaxed)) >= TOTAL_SOCKET_TIMEOUT {
            let seconds = TOTAL_SOCKET_TIMEOUT.as_secs();
            return Err(format!("{} was not asked: other control sockets took {seconds} s", socket.display()));
        }
        let started = Instant::now();
        let backends = qmp::list_backends(socket, process.id, self.stop).map_err(|error| error.to_string());
        let spent = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.elapsed_millis.fetch_add(spent, Ordering::Relaxed);
        backends
    }
}

/// Refuse a control socket that is `named` where several virtual machines are among those chosen: it is of one.
pub fn check_single_guest<'p>(named: Option<&Path>, chosen: impl Iterator<Item = &'p Process>) -> anyhow::Result<()> {
    let guests = chosen.filter(|process| process.identity.vm.is_some()).count();
    if named.is_some() && guests > 1 {
        bail!("--qmp is of one virtual machine, and {guests} are chosen: choose one by --vm or --pid");
    }
    Ok(())
}

/// Ask a process that runs a virtual machine at its control socket: at `named` or where its command line says.
///
/// # Errors
/// If a socket was named that is of no use, or for a process that is no virtual machine.
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
            bail!("{comm}[{pid}] is no virtual machine as far as its command line tells: leave --qmp out");
        }
        return Ok(GuestControl::Unused);
    };
    let Some(socket) = named_socket.map(Path::to_owned).or_else(|| qmp::control_socket_path(handle, vm)) else {
        return Ok(GuestControl::Unused);
    };
    match queries.query_backends(&socket, process) {
        Ok(backends) => Ok(GuestControl::Reachable(socket, backends)),
        Err(error) => {
            let why = format!("{error}; `--inject` goes from within");
            if named_socket.is_some() {
                bail!(why);
            }
            Ok(GuestControl::Unreachable(why))
        }
    }
}
