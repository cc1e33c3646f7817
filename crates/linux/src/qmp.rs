//! QEMU's control socket (QMP, docs/interop/qmp-spec.rst of QEMU). It shows which memory backends of a guest are marked
//! for KSM, and marks or unmarks them at run time. Nothing is injected and no thread is stopped.
//!
//! A backend's property `merge` (backends/hostmem.c, `host_memory_backend_set_merge`) advises all its memory at once:
//! `MADV_MERGEABLE` or `MADV_UNMERGEABLE`. The latter unmerges before QEMU answers, and QEMU's main loop is blocked
//! meanwhile. The property does not control memory without a backend: firmware and video memory, which `mem-merge=on`
//! also marks.
//!
//! A socket is a path, and any program may listen there. So the peer's PID (SO_PEERCRED: the process that called
//! listen) and start time must be those of the expected process before anything is sent. The answers are not trusted:
//! the guest may have broken out, or the program may only claim to be QEMU. Line length, number of backends and total
//! session time are limited.
//!
//! Limits: QEMU serves one client of a monitor at a time and lets others wait silently. So a monitor in use is only
//! detected by waiting for [`ANSWER_TIMEOUT`]. libvirt keeps its guests' monitors connected, and opens the socket
//! itself.

use crate::unix_socket::{ConnectError, check_peer, connect_with_timeout, reachable_path};
use pagefold_base::identity::{Monitor as Kind, Vm};
use pagefold_base::{Bytes, ProcessId};
use pagefold_host::ProcessHandle;
use pagefold_host::action::{ActionError, Exchange, MERGE_PROPERTY};
use pagefold_sys::fault;
use serde_json::{Value, json};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long an answer may take.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

/// How long listing all backends of a guest may take.
const LIST_BACKENDS_TIMEOUT: Duration = Duration::from_secs(10);

/// How long setting a property may take that unmerges nothing.
const SET_PROPERTY_TIMEOUT: Duration = Duration::from_secs(30);

/// How long unmarking a backend may take. It takes about 0.2 s per GiB if all of it is merged. It is a constant,
/// because a hostile process can inflate its apparent memory size.
const UNENROLL_TIMEOUT: Duration = Duration::from_secs(300);

/// How often the stop flag is checked while waiting for an answer.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The maximum number of memory backends accepted from a guest. QEMU has at most 256 DIMMs and 128 NUMA nodes.
pub const MAX_BACKENDS: usize = 512;

/// The maximum length of a message. The object list of a large guest has some KiB.
const MAX_LINE_BYTES: usize = 1 << 20;

/// A memory backend of a running guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryBackend {
    /// Its path in QEMU's object tree: `/objects/pc.ram`.
    pub path: String,
    /// Its type: `memory-backend-ram`.
    pub kind: String,
    /// Its size.
    pub size: Bytes,
    /// Whether its memory is shared: KSM does not merge shared memory.
    pub is_shared: bool,
    /// Whether it is marked for KSM now.
    pub is_mergeable: bool,
}

/// Why a control socket cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// No process listens, or access is denied.
    #[error("cannot connect to {path}: {source}")]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A process other than the guest's listens.
    #[error("{path}: process {found} listens there, not process {}; nothing was sent", .expected.pid)]
    UnexpectedPeer {
        /// The socket.
        path: PathBuf,
        /// The PID of the listening process.
        found: i32,
        /// The expected process.
        expected: ProcessId,
    },
    /// It does not answer in time.
    #[error(
        "{path} does not answer: QEMU serves one client at a time, and another may be connected. Under libvirt \
         use `virsh qemu-monitor-command DOMAIN '{{\"execute\":\"qom-set\",...}}'`, which taints the domain"
    )]
    Busy {
        /// The socket.
        path: PathBuf,
    },
    /// The command was stopped while it waited for an answer.
    #[error("{path} had not answered when the command was stopped")]
    Stopped {
        /// The socket.
        path: PathBuf,
    },
    /// It reports more backends than a virtual machine can have.
    #[error("{path} reports {found} memory backends, and QEMU has at most {MAX_BACKENDS}: nothing was changed")]
    TooManyBackends {
        /// The socket.
        path: PathBuf,
        /// The reported number.
        found: usize,
    },
    /// The connection failed.
    #[error("{path}: {source}")]
    Io {
        /// The socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The answer is not QMP.
    #[error("{path} does not speak QMP: {reply:?}")]
    NotQmp {
        /// The socket.
        path: PathBuf,
        /// The answer, truncated.
        reply: String,
    },
    /// QEMU refused a command.
    #[error("QEMU refuses {command}: {why}")]
    Refused {
        /// The command.
        command: String,
        /// QEMU's error text.
        why: String,
    },
    /// A property has another value than expected, before or after it was written.
    #[error(transparent)]
    UnexpectedValue(#[from] ActionError),
}

impl From<QmpError> for ActionError {
    fn from(error: QmpError) -> Self {
        let message = error.to_string();
        match error {
            QmpError::Busy { .. } => Self::Busy(message),
            QmpError::Connect { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                Self::Denied(message)
            }
            QmpError::Refused { .. } => Self::Unsupported(message),
            QmpError::UnexpectedValue(error) => error,
            _ => Self::Failed(message),
        }
    }
}

/// The memory backends of the guest that a process runs, read from its control socket. Ends early once `stop` is set.
///
/// # Errors
/// Any error that prevents the use of the socket; nothing was changed then.
pub fn list_backends(socket: &Path, process: ProcessId, stop: &AtomicBool) -> Result<Vec<MemoryBackend>, QmpError> {
    QmpMonitor::connect(socket, process, (ANSWER_TIMEOUT, LIST_BACKENDS_TIMEOUT), stop)?.list_backends()
}

/// Set a property of an object, and verify the result. Returns whether it was written. Ends early once `stop` is set.
///
/// # Errors
/// As [`list_backends`], if another program has changed the value, and if QEMU refuses it. If QEMU reports another
/// value than the written one, the old value is written back. After [`QmpError::Stopped`] and [`QmpError::Busy`] QEMU
/// may still change the property.
pub fn set_property(
    socket: &Path,
    process: ProcessId,
    (object, property): (&str, &str),
    value: &Exchange<Value>,
    stop: &AtomicBool,
) -> Result<bool, QmpError> {
    // Switching off the property `merge` unmerges.
    let timeout = if property == MERGE_PROPERTY && value.to == false { UNENROLL_TIMEOUT } else { SET_PROPERTY_TIMEOUT };
    let mut monitor = QmpMonitor::connect(socket, process, (ANSWER_TIMEOUT, timeout + 4 * ANSWER_TIMEOUT), stop)?;
    let read = json!({"path": object, "property": property});
    let current = monitor.execute("qom-get", &read)?;
    if !value.must_write(&current, format_args!("{property} of {object}"))? {
        return Ok(false);
    }
    monitor.answer_timeout = timeout;
    fault::point("before setting a QEMU property");
    monitor.execute("qom-set", &json!({"path": object, "property": property, "value": value.to}))?;
    fault::point("after setting a QEMU property");
    monitor.answer_timeout = ANSWER_TIMEOUT;
    let current = monitor.execute("qom-get", &read)?;
    if current == value.to {
        return Ok(true);
    }
    monitor.execute("qom-set", &json!({"path": object, "property": property, "value": value.from}))?;
    let why = format!("{property} of {object} is {current} afterwards");
    Err(ActionError::Failed(why).into())
}

/// The path at which this process reaches a guest's control socket, if its command line names one. The guest's process
/// may have another working directory or root.
pub fn control_socket_path(process: &dyn ProcessHandle, vm: &Vm) -> Option<PathBuf> {
    let control = vm.control_socket.as_ref().filter(|_| vm.monitor == Kind::Qemu)?;
    Some(reachable_path(process, control))
}

/// A session with a monitor.
struct QmpMonitor<'a> {
    path: PathBuf,
    stream: UnixStream,
    /// Received bytes after the last complete line.
    receive_buffer: Vec<u8>,
    /// How long one answer may take.
    answer_timeout: Duration,
    /// When the session ends in any case.
    deadline: Instant,
    /// Ends the session at once.
    stop: &'a AtomicBool,
    commands_sent: u64,
}

impl<'a> QmpMonitor<'a> {
    /// Start a session, with the timeout of one answer and of the whole session.
    fn connect(
        path: &Path,
        process: ProcessId,
        (answer_timeout, session_timeout): (Duration, Duration),
        stop: &'a AtomicBool,
    ) -> Result<Self, QmpError> {
        let deadline = Instant::now() + session_timeout;
        let stream = connect_with_timeout(path, answer_timeout).map_err(|error| match error {
            ConnectError::Busy => QmpError::Busy { path: path.to_owned() },
            ConnectError::Failed(source) => QmpError::Connect { path: path.to_owned(), source },
        })?;
        let failed = |source: io::Error| QmpError::Io { path: path.to_owned(), source };
        if let Err(found) = check_peer(&stream, process).map_err(failed)? {
            return Err(QmpError::UnexpectedPeer { path: path.to_owned(), found, expected: process });
        }
        stream.set_write_timeout(Some(answer_timeout)).map_err(failed)?;
        let (path, receive_buffer) = (path.to_owned(), Vec::new());
        let mut monitor = Self { path, stream, receive_buffer, answer_timeout, deadline, stop, commands_sent: 0 };
        let greeting = monitor.read_message(Instant::now() + answer_timeout)?;
        if greeting.get("QMP").is_none() {
            return Err(monitor.not_qmp_error(greeting.to_string().as_bytes()));
        }
        monitor.execute("qmp_capabilities", &json!({}))?;
        Ok(monitor)
    }

    fn list_backends(&mut self) -> Result<Vec<MemoryBackend>, QmpError> {
        let objects = self.execute("qom-list", &json!({"path": "/objects"}))?;
        let objects = objects.as_array().map(Vec::as_slice).unwrap_or_default();
        let named: Vec<(&str, &str)> = objects.iter().filter_map(parse_backend).collect();
        if named.len() > MAX_BACKENDS {
            return Err(QmpError::TooManyBackends { path: self.path.clone(), found: named.len() });
        }
        let mut backends = Vec::new();
        for (name, kind) in named {
            let path = format!("/objects/{name}");
            let size = self.execute("qom-get", &json!({"path": path, "property": "size"}))?;
            let size = Bytes(size.as_u64().ok_or_else(|| self.not_qmp_error(size.to_string().as_bytes()))?);
            let (share, merge) = (self.read_bool_property(&path, "share")?, self.read_bool_property(&path, "merge")?);
            backends.push(MemoryBackend { path, kind: kind.to_owned(), size, is_shared: share, is_mergeable: merge });
        }
        Ok(backends)
    }

    /// Read a boolean property.
    fn read_bool_property(&mut self, path: &str, property: &str) -> Result<bool, QmpError> {
        let value = self.execute("qom-get", &json!({"path": path, "property": property}))?;
        value.as_bool().ok_or_else(|| self.not_qmp_error(value.to_string().as_bytes()))
    }

    /// Send a command and wait for its answer.
    fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value, QmpError> {
        self.commands_sent += 1;
        let id = self.commands_sent;
        let line = format!("{}\n", json!({"execute": command, "arguments": arguments, "id": id}));
        self.stream.write_all(line.as_bytes()).map_err(|source| self.io_error(source))?;
        let deadline = Instant::now() + self.answer_timeout;
        loop {
            let mut message = self.read_message(deadline)?;
            // Events may arrive at any time; an answer has the id of its command.
            if message.get("event").is_some() {
                continue;
            }
            let is_answer = message.get("id").and_then(Value::as_u64) == Some(id);
            if let Some(error) = message.get("error").filter(|_| is_answer || message.get("id").is_none()) {
                let why = error.get("desc").and_then(Value::as_str).unwrap_or("no reason given").to_owned();
                return Err(QmpError::Refused { command: command.to_owned(), why });
            }
            match message.get_mut("return").filter(|_| is_answer) {
                Some(result) => return Ok(result.take()),
                None => return Err(self.not_qmp_error(message.to_string().as_bytes())),
            }
        }
    }

    /// The next message, parsed: a line, or with `-qmp-pretty` several, of which the last one begins with `}`.
    fn read_message(&mut self, deadline: Instant) -> Result<Value, QmpError> {
        let mut searched = 0;
        let mut line_start = 0;
        loop {
            while let Some(length) = self.receive_buffer[searched..].iter().position(|&byte| byte == b'\n') {
                let end = searched + length + 1;
                let is_inner_line = line_start > 0 && self.receive_buffer[line_start] != b'}';
                (searched, line_start) = (end, end);
                if is_inner_line {
                    continue;
                }
                let message = &self.receive_buffer[..end];
                let parsed = serde_json::from_slice(message);
                let is_first_line = message.iter().position(|&byte| byte == b'\n') == Some(end - 1);
                if is_first_line && message[0] == b'{' && parsed.as_ref().is_err_and(serde_json::Error::is_eof) {
                    continue;
                }
                let rest = self.receive_buffer.split_off(end);
                let message = std::mem::replace(&mut self.receive_buffer, rest);
                let value: Option<Value> = parsed.ok();
                return value.filter(Value::is_object).ok_or_else(|| self.not_qmp_error(&message));
            }
            searched = self.receive_buffer.len();
            if searched > MAX_LINE_BYTES {
                return Err(self.not_qmp_error(&self.receive_buffer));
            }
            if self.stop.load(Ordering::Relaxed) {
                return Err(QmpError::Stopped { path: self.path.clone() });
            }
            let timeout = deadline.min(self.deadline).saturating_duration_since(Instant::now());
            if timeout.is_zero() {
                return Err(QmpError::Busy { path: self.path.clone() });
            }
            self.stream
                .set_read_timeout(Some(timeout.min(STOP_POLL_INTERVAL)))
                .map_err(|source| self.io_error(source))?;
            let mut buffer = [0; 4096];
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err(self.io_error(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => self.receive_buffer.extend_from_slice(&buffer[..count]),
                Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
                Err(source) => return Err(self.io_error(source)),
            }
        }
    }

    fn io_error(&self, source: io::Error) -> QmpError {
        match source.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => QmpError::Busy { path: self.path.clone() },
            _ => QmpError::Io { path: self.path.clone(), source },
        }
    }

    fn not_qmp_error(&self, received: &[u8]) -> QmpError {
        let received = String::from_utf8_lossy(&received[..received.len().min(80)]).trim().to_owned();
        QmpError::NotQmp { path: self.path.clone(), reply: received }
    }
}

/// The name and the type of an object of the list, if it is a memory backend.
fn parse_backend(object: &Value) -> Option<(&str, &str)> {
    let text = |key: &str| object.get(key).and_then(Value::as_str).unwrap_or_default();
    let kind = text("type").strip_prefix("child<").and_then(|kind| kind.strip_suffix('>')).unwrap_or_default();
    kind.starts_with("memory-backend-").then(|| (text("name"), kind))
}

mod questions;

pub(crate) use questions::ask;

#[cfg(test)]
mod tests;
