//! How the commands that enrol and withdraw reach a virtual machine: by QEMU's control socket where one is named or
//! found, and then by nothing else unless that is asked for.

use crate::arguments::Global;
use anyhow::bail;
use pagefold_host::Process as Handle;
use pagefold_linux::qmp::{self, Backend};
use pagefold_model::process::Process;
use std::path::{Path, PathBuf};

/// What a control socket is good for.
pub enum Control {
    /// There is none, or it is to be left alone: as any other process.
    None,
    /// The guest tells its memory backends at this socket.
    Answers(PathBuf, Vec<Backend>),
    /// There is one that is of no use, for this reason, which names what else can be done.
    Unreachable(String),
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
    match qmp::guests_backends(&socket, process.id) {
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
