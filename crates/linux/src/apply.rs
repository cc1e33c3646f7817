//! Carrying out actions on this machine.

mod advise;
mod collapse;

pub use advise::ask_merge_any;

use crate::LiveHost;
use crate::process::LiveProcess;
use pagefold_host::act::{Action, Effect, Refusal};
use pagefold_model::ksm::Setting;
use pagefold_model::{AddressRange, Pid, ProcessId};
use pagefold_sys::{fault, inject};
use std::fs;
use std::io::{self, Write};

/// Carry out one action.
pub fn apply(host: &LiveHost, action: &Action) -> Result<Effect, Refusal> {
    match action {
        Action::Set { setting, value } => set(*setting, value).map(|()| Effect::default()),
        Action::Advise { process, advice, ranges } => advise::advise(&hold(host, *process)?, *advice, ranges),
        Action::MergeAny { process, on } => advise::merge_any(&hold(host, *process)?, *on),
        Action::GuestMerge { process, socket, backend, on } => {
            Ok(crate::qmp::set_merge(socket, *process, backend, *on).map(|()| Effect::default())?)
        }
        Action::Collapse { process, ranges } => collapse::collapse(host, &hold(host, *process)?, ranges),
    }
}

/// Write a file of `/sys/kernel/mm/ksm`.
fn set(setting: Setting, value: &str) -> Result<(), Refusal> {
    let path = format!("/sys/kernel/mm/ksm/{}", setting.file());
    // Without O_CREAT, which sysfs answers with EACCES where there is no such file.
    let write = || fs::OpenOptions::new().write(true).open(&path)?.write_all(value.as_bytes());
    fault::point("before writing a setting");
    let written = write();
    fault::point("after writing a setting");
    written.map_err(|error| {
        let said = format!("writing {value} to {path}: {error}");
        match error.kind() {
            io::ErrorKind::NotFound => Refusal::Unsupported(format!("this kernel has no {path}")),
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => Refusal::Denied(said),
            io::ErrorKind::ResourceBusy => Refusal::Busy(said),
            _ => Refusal::Failed(said),
        }
    })
}

/// Take hold of the very process that is meant.
fn hold(host: &LiveHost, id: ProcessId) -> Result<LiveProcess<'_>, Refusal> {
    let process = LiveProcess::open(host, id.pid)?;
    if pagefold_host::Process::id(&process) == id { Ok(process) } else { Err(Refusal::Vanished) }
}

/// Note a range that was missed, as one with the last where it goes on from it.
fn miss(missed: &mut Vec<(AddressRange, String)>, range: AddressRange, why: String) {
    match missed.last_mut() {
        Some((last, same)) if last.end == range.start && *same == why => last.end = range.end,
        _ => missed.push((range, why)),
    }
}

/// Why nothing was injected, in the words of the port.
fn refusal(error: inject::Error) -> Refusal {
    match error {
        inject::Error::Gone => Refusal::Vanished,
        inject::Error::Denied(what) => Refusal::Denied(what),
        inject::Error::Traced(tracer) => Refusal::Traced(Pid(tracer)),
        inject::Error::Unsupported(what) => Refusal::Unsupported(what),
        inject::Error::Busy(what) => Refusal::Busy(what),
        inject::Error::Failed(what) => Refusal::Failed(what),
    }
}
