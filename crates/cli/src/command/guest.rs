//! How the commands that enrol and withdraw reach a virtual machine: by QEMU's control socket where one is named or
//! found, and then by nothing else unless that is asked for.

use crate::arguments::Global;
use anyhow::bail;
use pagefold_base::process::Process;
use pagefold_host::Process as Handle;
use pagefold_linux::qmp::{self, Backend};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What a control socket is good for.
pub enum Control {
    /// There is none, or it is to be left alone: as any other process.
    None,
    /// The guest tells its memory backends at this socket.
    Answers(PathBuf, Vec<Backend>),
    /// There is one that is of no use, for this reason, which names what else can be done.
    Unreachable(String),
}

/// How long the control sockets of all processes may take in all. Any process may claim to be a virtual machine.
const ALL_SOCKETS: Duration = Duration::from_secs(60);

/// What one command asks control sockets for: for how long it has, and whether it is told to stop.
pub struct Asked<'a> {
    stop: &'a AtomicBool,
    /// Milliseconds.
    spent: AtomicU64,
}

impl<'a> Asked<'a> {
    /// Nothing was asked for yet.
    pub fn new(stop: &'a AtomicBool) -> Self {
        Self { stop, spent: AtomicU64::new(0) }
    }

    fn backends(&self, socket: &Path, process: &Process) -> Result<Vec<Backend>, String> {
        if Duration::from_millis(self.spent.load(Ordering::Relaxed)) >= ALL_SOCKETS {
            let seconds = ALL_SOCKETS.as_secs();
            return Err(format!("{} was not asked: other control sockets took {seconds} s", socket.display()));
        }
        let started = Instant::now();
        let backends = qmp::guests_backends(socket, process.id, self.stop).map_err(|error| error.to_string());
        let spent = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.spent.fetch_add(spent, Ordering::Relaxed);
        backends
    }
}

/// Refuse a control socket that is `named` where several virtual machines are among those chosen: it is of one.
pub fn is_of_one<'p>(named: Option<&Path>, chosen: impl Iterator<Item = &'p Process>) -> anyhow::Result<()> {
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
pub fn control(
    handle: &dyn Handle,
    process: &Process,
    named: Option<&Path>,
    inject: bool,
    global: &Global,
    asked: &Asked<'_>,
) -> anyhow::Result<Control> {
    if inject || global.host != "live" {
        return Ok(Control::None);
    }
    let Some(vm) = &process.identity.vm else {
        if named.is_some() {
            let (comm, pid) = (&process.comm, process.id.pid);
            bail!("{comm}[{pid}] is no virtual machine as far as its command line tells: leave --qmp out");
        }
        return Ok(Control::None);
    };
    let Some(socket) = named.map(Path::to_owned).or_else(|| qmp::socket_of(handle, vm)) else {
        return Ok(Control::None);
    };
    match asked.backends(&socket, process) {
        Ok(backends) => Ok(Control::Answers(socket, backends)),
        Err(error) => {
            let why = format!("{error}; `--inject` goes from within");
            if named.is_some() {
                bail!(why);
            }
            Ok(Control::Unreachable(why))
        }
    }
}
