//! Applies actions on this machine.

mod advise;
mod collapse;
mod config_file;
mod damon;
mod kernel_module;
mod memory_policy;
mod placement;

pub use advise::ask_merge_any;
pub use placement::read_affinity;

use crate::LiveHost;
use crate::process::LiveProcess;
use pagefold_base::{AddressRange, Pid, ProcessId};
use pagefold_host::action::{Action, ActionError, ActionOutcome, MissedReason};
use pagefold_host::knob::Knob;
use pagefold_sys::fault;
use pagefold_sys::inject::{self, InjectTarget};
use rustix::io::Errno;
use std::fs;
use std::io::{self, Write};
use std::sync::atomic::AtomicBool;

/// Apply one action. Once `stop` is set, it does not wait for the answer of a guest.
pub fn apply(host: &LiveHost, action: &Action, stop: &AtomicBool) -> Result<ActionOutcome, ActionError> {
    match action {
        Action::Write { knob, value } => write_knob(knob, value).map(|()| ActionOutcome::default()),
        Action::Advise { process, advice, ranges } => {
            with_process(host, *process, |process| advise::advise(process, *advice, ranges))
        }
        Action::MergeAny { process, enable: on } => {
            with_process(host, *process, |process| advise::set_merge_any(process, *on))
        }
        Action::SetQomProperty { process, socket, object, property, value } => {
            let written = crate::qmp::set_property(socket, *process, (object, property), value, stop)?;
            Ok(ActionOutcome { unchanged: !written, ..ActionOutcome::default() })
        }
        Action::Collapse { process, ranges } => {
            with_process(host, *process, |process| collapse::collapse(host, process, ranges))
        }
        Action::SetAffinity { thread, cpus, pin } => placement::set_affinity(host, *thread, cpus, pin.as_ref()),
        Action::MovePages { process, ranges, node } => {
            with_process(host, *process, |process| placement::move_pages(process, ranges, *node))
        }
        Action::SetMemoryPolicy { process, ranges, policy } => {
            with_process(host, *process, |process| memory_policy::set_policy(process, ranges, policy))
        }
        Action::ReplaceFile { file, content } => config_file::replace_file(file, content),
        Action::DefineDomain { uuid, name, definition } => crate::libvirt::define(host, uuid, name, definition),
        Action::ReloadModule { module, parameters } => kernel_module::reload(host, *module, parameters),
        Action::MonitorAccesses(step) => damon::monitor(host, step),
    }
}

/// Write a setting of the kernel.
fn write_knob(knob: &Knob, value: &str) -> Result<(), ActionError> {
    write_setting(&knob.to_string(), value)
}

/// Write a file of sysfs, procfs or cgroupfs, by its absolute path.
fn write_setting(path: &str, value: &str) -> Result<(), ActionError> {
    // Without O_CREAT, because sysfs returns EACCES for it if the file does not exist.
    let write = || fs::OpenOptions::new().write(true).open(path)?.write_all(value.as_bytes());
    fault::point("before writing a setting");
    let written = write();
    fault::point("after writing a setting");
    written.map_err(|error| {
        let message = format!("writing {value} to {path}: {error}");
        match error.kind() {
            io::ErrorKind::NotFound => ActionError::Unsupported(format!("this kernel has no {path}")),
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => ActionError::Denied(message),
            io::ErrorKind::ResourceBusy => ActionError::Busy(message),
            _ => ActionError::Failed(message),
        }
    })
}

/// Act on exactly this process. It counts as vanished only once all of it has ended. While it lives, the tried threads
/// may have ended and other threads may live. A new program after exec inherits the enrollment (`mm_init`,
/// kernel/fork.c, 6.18).
fn with_process<'a>(
    host: &'a LiveHost,
    id: ProcessId,
    apply_to: impl FnOnce(&LiveProcess<'a>) -> Result<ActionOutcome, ActionError>,
) -> Result<ActionOutcome, ActionError> {
    let process = LiveProcess::open(host, id.pid)?;
    if pagefold_host::ProcessHandle::id(&process) != id {
        return Err(ActionError::Vanished);
    }
    apply_to(&process).map_err(|refusal| match refusal {
        ActionError::Vanished if process.has_live_thread() => ActionError::Busy(
            "its main thread has ended, its threads start and end all the time, or it has just called exec".to_owned(),
        ),
        refusal => refusal,
    })
}

/// Record a missed range. It extends the last one if it follows it directly.
fn push_missed_range(missed: &mut Vec<(AddressRange, MissedReason)>, range: AddressRange, why: MissedReason) {
    match missed.last_mut() {
        Some((last, same)) if last.end == range.start && *same == why => last.end = range.end,
        _ => missed.push((range, why)),
    }
}

/// A process in which system calls are to be made.
fn inject_target(process: &LiveProcess<'_>) -> Result<InjectTarget, ActionError> {
    let pid = pagefold_host::ProcessHandle::id(process).pid;
    InjectTarget::new(process.directory(), pid.0.cast_signed()).map_err(action_error)
}

/// The error that a system call returned in a process.
fn errno_from_result(result: i64) -> Option<Errno> {
    (result < 0).then(|| Errno::from_raw_os_error(i32::try_from(-result).unwrap_or(i32::MAX)))
}

/// Convert why nothing was injected to an action error.
fn action_error(error: inject::InjectError) -> ActionError {
    match error {
        inject::InjectError::Vanished => ActionError::Vanished,
        inject::InjectError::Denied(what) => ActionError::Denied(what),
        inject::InjectError::Traced(tracer) => ActionError::Traced(Pid(tracer)),
        inject::InjectError::Unsupported(what) => ActionError::Unsupported(what),
        inject::InjectError::Busy(what) => ActionError::Busy(what),
        inject::InjectError::Failed(what) => ActionError::Failed(what),
    }
}
