//! Carrying out actions on this machine.

mod advise;
mod collapse;

pub use advise::ask_merge_any;

use crate::LiveHost;
use crate::process::LiveProcess;
use pagefold_base::ksm::Setting;
use pagefold_base::{AddressRange, Pid, ProcessId};
use pagefold_host::act::{Action, Effect, Refusal};
use pagefold_sys::{fault, inject};
use std::fs;
use std::io::{self, Write};
use std::sync::atomic::AtomicBool;

/// Carry out one action. Once `stop` is set, no answer of a guest is waited for.
pub fn apply(host: &LiveHost, action: &Action, stop: &AtomicBool) -> Result<Effect, Refusal> {
    match action {
        Action::Set { setting, value } => set(*setting, value).map(|()| Effect::default()),
        Action::Advise { process, advice, ranges } => {
            upon(host, *process, |process| advise::advise(process, *advice, ranges))
        }
        Action::MergeAny { process, on } => upon(host, *process, |process| advise::merge_any(process, *on)),
        Action::GuestMerge { process, socket, backend, on } => {
            Ok(crate::qmp::set_merge(socket, *process, backend, *on, stop).map(|()| Effect::default())?)
        }
        Action::Collapse { process, ranges } => {
            upon(host, *process, |process| collapse::collapse(host, process, ranges))
        }
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

/// Act on the very process that is meant. It has vanished once all of it has: while it lives, the threads that were
/// tried may have ended and others not, and to another program it hands on that it is enrolled (`mm_init`,
/// kernel/fork.c, 6.18).
fn upon<'a>(
    host: &'a LiveHost,
    id: ProcessId,
    act: impl FnOnce(&LiveProcess<'a>) -> Result<Effect, Refusal>,
) -> Result<Effect, Refusal> {
    let process = LiveProcess::open(host, id.pid)?;
    if pagefold_host::Process::id(&process) != id {
        return Err(Refusal::Vanished);
    }
    act(&process).map_err(|refusal| match refusal {
        Refusal::Vanished if process.lives() => Refusal::Busy(
            "its main thread has ended, its threads come and go, or it has just begun another program".to_owned(),
        ),
        refusal => refusal,
    })
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
