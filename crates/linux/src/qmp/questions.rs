//! Questions about vCPUs and memory to the monitor of a machine, which may be another program's: only
//! `qmp_capabilities` and the commands of [`MonitorQuestion`] are sent, and the monitor is released within
//! [`SESSION_TIMEOUT`].
//!
//! QEMU serves one client of a monitor at a time. `/proc/PID/net/unix` shows whether a client is connected or waits
//! (net/unix/af_unix.c, `unix_seq_show`); such a monitor is left alone. If a connection waits although no client is
//! connected, QEMU hangs. A monitor with `wait=on` is left alone, too:
//! a machine that still waits for its first client would start.

use super::{QmpError, QmpMonitor};
use crate::LiveHost;
use crate::libvirt;
use crate::unix_socket::reachable_path;
use pagefold_base::identity::qemu_monitor::{MonitorChannel, monitor_channels};
use pagefold_base::{Absent, ProcessId, Reading};
use pagefold_host::machine_questions::SESSION_TIMEOUT;
use pagefold_host::qemu_monitor::{MonitorAccess, MonitorQuestion};
use pagefold_host::{ProcessHandle, parse};
use serde_json::json;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// `SS_CONNECTED` (include/uapi/linux/net.h), as `/proc/net/unix` shows a client that was accepted.
const CONNECTED_STATE: &str = "03";

/// `SS_CONNECTING`, as it shows a connection that was not accepted yet, even if its client has left (net/unix/af_unix.c,
/// `unix_seq_show`).
const WAITING_STATE: &str = "02";

/// How long a connection may wait to be accepted. A monitor without a client accepts at once, unless QEMU hangs.
const ACCEPT_TIME: Duration = Duration::from_millis(300);

/// How often the connections of a monitor are looked at meanwhile.
const ACCEPT_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A session cannot be stopped: it is short.
static NEVER_STOPPED: AtomicBool = AtomicBool::new(false);

/// Asks the monitor of the machine that a process runs. Each question has an answer of its own, in the same order.
///
/// # Errors
/// `NotOnThisKernel` if the machine has no monitor; `NotAsked` if it is left alone; `NoAnswer` if there is no session with
/// it.
pub(crate) fn ask(
    host: &LiveHost,
    process: &dyn ProcessHandle,
    questions: &[MonitorQuestion],
    access: MonitorAccess,
) -> Reading<Vec<Reading<Vec<u8>>>> {
    let arguments = parse::arguments(&process.read("cmdline")?);
    let channels = monitor_channels(&arguments);
    let mut is_in_use = false;
    for channel in &channels {
        let MonitorChannel::Socket(path) = channel else { continue };
        match wait_for_acceptance(|| monitor_use(&process.read("net/unix").unwrap_or_default(), path)) {
            MonitorUse::InUse => {
                is_in_use = true;
                continue;
            }
            MonitorUse::Waiting => {
                return Err(Absent::NoAnswer("QEMU hangs: it has not accepted a connection to the monitor".to_owned()));
            }
            MonitorUse::Free => {}
        }
        return ask_at(&reachable_path(process, path), process.id(), questions, SESSION_TIMEOUT);
    }
    if access == MonitorAccess::SocketOrLibvirt && channels.contains(&MonitorChannel::Managed) {
        return libvirt::ask_monitor(host, process.id(), questions, SESSION_TIMEOUT);
    }
    if is_in_use {
        return Err(Absent::NotAsked("another client uses the monitor".to_owned()));
    }
    match channels.into_iter().next() {
        None | Some(MonitorChannel::Socket(_)) => Err(Absent::NotOnThisKernel),
        Some(MonitorChannel::WaitsForClient(_)) => {
            Err(Absent::NotAsked("the monitor has wait=on: a client might start the machine".to_owned()))
        }
        Some(MonitorChannel::Managed) => {
            Err(Absent::NotAsked("the program that started QEMU, such as libvirt, has the monitor".to_owned()))
        }
        Some(MonitorChannel::OtherDevice(kind)) => {
            let kind: String = kind.chars().take(40).collect();
            Err(Absent::NotAsked(format!("the monitor is no Unix socket but: {}", kind.escape_debug())))
        }
    }
}

/// How a monitor is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum MonitorUse {
    /// It has no client.
    Free,
    /// A connection waits to be accepted, and no client is connected.
    Waiting,
    /// A client is connected.
    InUse,
}

/// The use of a monitor, once no connection waits or the time for that is over.
fn wait_for_acceptance(read_use: impl Fn() -> MonitorUse) -> MonitorUse {
    let mut polls = ACCEPT_TIME.as_millis() / ACCEPT_POLL_INTERVAL.as_millis();
    loop {
        let monitor_use = read_use();
        if monitor_use != MonitorUse::Waiting || polls == 0 {
            return monitor_use;
        }
        polls -= 1;
        std::thread::sleep(ACCEPT_POLL_INTERVAL);
    }
}

/// The use of the socket that is bound to this path, by `/proc/PID/net/unix`.
fn monitor_use(sockets: &[u8], path: &str) -> MonitorUse {
    let text = String::from_utf8_lossy(sockets);
    let use_of_line = |line: &str| {
        // Num, RefCount, Protocol, Flags, Type, St, Inode, Path.
        let mut fields = line.split_ascii_whitespace();
        let state = fields.nth(5);
        let inode = fields.next();
        let bound = inode.and_then(|inode| line.split_once(&format!(" {inode} "))).map(|(_, bound)| bound);
        match state.filter(|_| bound == Some(path)) {
            Some(CONNECTED_STATE) => MonitorUse::InUse,
            Some(WAITING_STATE) => MonitorUse::Waiting,
            _ => MonitorUse::Free,
        }
    };
    text.lines().skip(1).map(use_of_line).max().unwrap_or(MonitorUse::Free)
}

fn ask_at(
    path: &Path,
    process: ProcessId,
    questions: &[MonitorQuestion],
    timeout: Duration,
) -> Reading<Vec<Reading<Vec<u8>>>> {
    let absent = |error: QmpError| match error {
        QmpError::Busy { .. } => Absent::NoAnswer(format!(
            "nothing within {} ms: QEMU hangs, or another client uses the monitor",
            timeout.as_millis()
        )),
        QmpError::Connect { source, .. } if source.kind() == std::io::ErrorKind::PermissionDenied => Absent::Denied,
        error => Absent::NoAnswer(error.to_string()),
    };
    let mut monitor = QmpMonitor::connect(path, process, (timeout, timeout), &NEVER_STOPPED).map_err(absent)?;
    let mut failure = None;
    let answer = |question: &MonitorQuestion| {
        if let Some(why) = &failure {
            return Err(Absent::clone(why));
        }
        match monitor.execute(question.command(), &json!({})) {
            Ok(answer) => Ok(answer.to_string().into_bytes()),
            Err(error @ QmpError::Refused { .. }) => Err(Absent::NoAnswer(error.to_string())),
            // Answers that follow could belong to this question.
            Err(error) => Err(failure.insert(absent(error)).clone()),
        }
    };
    Ok(questions.iter().map(answer).collect())
}

#[cfg(test)]
mod tests;
