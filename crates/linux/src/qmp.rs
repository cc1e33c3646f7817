//! QEMU's control socket (QMP, docs/interop/qmp-spec.rst of QEMU): to see which memory backends of a guest are marked
//! for KSM, and to mark or withdraw them while it runs. Nothing is injected and no thread is stopped.
//!
//! A backend's property `merge` (backends/hostmem.c, `host_memory_backend_set_merge`) advises all its memory at once:
//! `MADV_MERGEABLE` or `MADV_UNMERGEABLE`. The latter unmerges before it answers, and QEMU's main loop stands still
//! meanwhile. It does not rule what is no backend: firmware and video memory, which `mem-merge=on` marks too.
//!
//! A socket is a path, and anything may listen there. So the peer's number (SO_PEERCRED, which is of whoever called
//! listen) and start time must be the expected process's before a word is sent; what it then says is held to be of a
//! guest that may have broken out, or of a program that only claims to be QEMU: lines, the number of backends and the
//! time of the whole conversation are bounded.
//!
//! Limits: QEMU serves one client of a monitor at a time and lets others wait without a word, so a monitor that
//! somebody holds is found busy by waiting [`PATIENCE`]. libvirt holds its guests' monitors, and opens the socket
//! itself.

use pagefold_base::identity::{Monitor as Kind, Vm};
use pagefold_base::{Bytes, ProcessId};
use pagefold_host::act::Refusal;
use pagefold_host::{Process, parse};
use pagefold_sys::fault;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use serde_json::{Value, json};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long an answer may take.
pub const PATIENCE: Duration = Duration::from_secs(3);

/// How long asking a guest for all its backends may take.
const CONVERSATION: Duration = Duration::from_secs(10);

/// How long marking a backend may take. It unmerges nothing.
const MARK_TIMEOUT: Duration = Duration::from_secs(30);

/// How long withdrawing a backend may take. It takes about 0.2 s a GiB where all of it is merged. A constant, since a
/// hostile process can inflate what is known of its memory.
const WITHDRAW_TIMEOUT: Duration = Duration::from_secs(300);

/// How often it is looked, while an answer is waited for, whether to stop.
const STOP_CHECK: Duration = Duration::from_millis(100);

/// The most memory backends that a guest is believed to have. QEMU has at most 256 DIMMs and 128 NUMA nodes.
pub const MAX_BACKENDS: usize = 512;

/// The longest line that is read. The list of objects of a large guest has some KiB.
const LONGEST_LINE: usize = 1 << 20;

/// A memory backend of a running guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backend {
    /// Its path in QEMU's object tree: `/objects/pc.ram`.
    pub path: String,
    /// Its type: `memory-backend-ram`.
    pub kind: String,
    /// Its size.
    pub size: Bytes,
    /// Whether its memory is shared, which KSM does not take.
    pub share: bool,
    /// Whether it is marked for KSM now.
    pub merge: bool,
}

/// Why a control socket is of no use.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is nobody, or not for us.
    #[error("cannot connect to {path}: {source}")]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Somebody listens who is not the guest's process.
    #[error("{path} is held by process {found}, not by {}: no word was sent", .expected.pid)]
    Stranger {
        /// The socket.
        path: PathBuf,
        /// Who listens.
        found: i32,
        /// Who should.
        expected: ProcessId,
    },
    /// It does not answer in time.
    #[error(
        "{path} does not answer: QEMU serves one client at a time, and somebody else may hold this one. Under libvirt \
         use `virsh qemu-monitor-command DOMAIN '{{\"execute\":\"qom-set\",...}}'`, which taints the domain"
    )]
    Busy {
        /// The socket.
        path: PathBuf,
    },
    /// It was asked to stop while it waited for an answer.
    #[error("{path} had not answered when the command was told to stop")]
    Stopped {
        /// The socket.
        path: PathBuf,
    },
    /// It claims more backends than a virtual machine can have.
    #[error("{path} names {found} memory backends, and QEMU has at most {MAX_BACKENDS}: it is left alone")]
    TooManyBackends {
        /// The socket.
        path: PathBuf,
        /// How many.
        found: usize,
    },
    /// The connection broke.
    #[error("{path}: {source}")]
    Io {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// What it says is no QMP.
    #[error("{path} does not speak QMP: {said:?}")]
    Garbage {
        /// The socket.
        path: PathBuf,
        /// What it said, cut.
        said: String,
    },
    /// QEMU refused a command.
    #[error("QEMU refuses {command}: {why}")]
    Refused {
        /// Which.
        command: String,
        /// In its words.
        why: String,
    },
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        let said = error.to_string();
        match error {
            Error::Busy { .. } => Self::Busy(said),
            Error::Connect { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => Self::Denied(said),
            Error::Refused { .. } => Self::Unsupported(said),
            _ => Self::Failed(said),
        }
    }
}

/// The memory backends of the guest that a process runs, by its control socket. Ends early once `stop` is set.
///
/// # Errors
/// Whatever keeps the socket from being used; nothing was changed then.
pub fn guests_backends(socket: &Path, process: ProcessId, stop: &AtomicBool) -> Result<Vec<Backend>, Error> {
    Monitor::connect(socket, process, (PATIENCE, CONVERSATION), stop)?.backends()
}

/// Mark a backend for KSM or withdraw it, and make sure that it took. Ends early once `stop` is set.
///
/// # Errors
/// As [`guests_backends`]. After [`Error::Stopped`] and [`Error::Busy`] QEMU may still switch the backend.
pub fn set_merge(socket: &Path, process: ProcessId, backend: &str, on: bool, stop: &AtomicBool) -> Result<(), Error> {
    let timeout = if on { MARK_TIMEOUT } else { WITHDRAW_TIMEOUT };
    let mut monitor = Monitor::connect(socket, process, (PATIENCE, timeout + 3 * PATIENCE), stop)?;
    monitor.patience = timeout;
    fault::point("before switching a backend");
    monitor.execute("qom-set", &json!({"path": backend, "property": "merge", "value": on}))?;
    fault::point("after switching a backend");
    monitor.patience = PATIENCE;
    let now = monitor.property(backend, "merge")?;
    if now == on {
        return Ok(());
    }
    Err(Error::Refused { command: "qom-set".to_owned(), why: format!("merge of {backend} is {now} afterwards") })
}

/// The path at which a guest's control socket can be reached from here, if its command line names one. Its process may
/// live in another directory or root.
pub fn socket_of(process: &dyn Process, vm: &Vm) -> Option<PathBuf> {
    let control = vm.control.as_ref().filter(|_| vm.monitor == Kind::Qemu)?;
    let within = |link: &str, path: &str| Path::new("/proc").join(process.id().pid.to_string()).join(link).join(path);
    match control.strip_prefix('/') {
        None => Some(within("cwd", control)),
        Some(_) if Path::new(control).exists() => Some(control.into()),
        Some(rest) => Some(within("root", rest)),
    }
}

/// A conversation with a monitor.
struct Monitor<'a> {
    path: PathBuf,
    stream: UnixStream,
    /// What was received beyond the last line.
    received: Vec<u8>,
    /// How long one answer may take.
    patience: Duration,
    /// When the conversation ends, whatever was answered.
    end: Instant,
    /// Ends it at once.
    stop: &'a AtomicBool,
    commands: u64,
}

impl<'a> Monitor<'a> {
    /// Begin a conversation: how long one answer may take, and how long all of it.
    fn connect(
        path: &Path,
        process: ProcessId,
        (patience, conversation): (Duration, Duration),
        stop: &'a AtomicBool,
    ) -> Result<Self, Error> {
        let end = Instant::now() + conversation;
        let stream = dial(path, patience)?;
        let failed = |source: io::Error| Error::Io { path: path.to_owned(), source };
        let peer = sockopt::socket_peercred(&stream).map_err(|errno| failed(errno.into()))?;
        let found = peer.pid.as_raw_nonzero().get();
        // Read after connecting: who holds the socket now has not given its number on.
        let start_time = std::fs::read(format!("/proc/{found}/stat")).ok().and_then(|stat| parse::stat(&stat).ok());
        let expected = start_time.map(|stat| stat.start_time) == Some(process.start_time);
        if found.cast_unsigned() != process.pid.0 || !expected {
            return Err(Error::Stranger { path: path.to_owned(), found, expected: process });
        }
        stream.set_write_timeout(Some(patience)).map_err(failed)?;
        let (path, received) = (path.to_owned(), Vec::new());
        let mut monitor = Self { path, stream, received, patience, end, stop, commands: 0 };
        let greeting = monitor.message(Instant::now() + patience)?;
        if greeting.get("QMP").is_none() {
            return Err(monitor.garbage(greeting.to_string().as_bytes()));
        }
        monitor.execute("qmp_capabilities", &json!({}))?;
        Ok(monitor)
    }

    fn backends(&mut self) -> Result<Vec<Backend>, Error> {
        let objects = self.execute("qom-list", &json!({"path": "/objects"}))?;
        let objects = objects.as_array().map(Vec::as_slice).unwrap_or_default();
        let named: Vec<(&str, &str)> = objects.iter().filter_map(backend_of).collect();
        if named.len() > MAX_BACKENDS {
            return Err(Error::TooManyBackends { path: self.path.clone(), found: named.len() });
        }
        let mut backends = Vec::new();
        for (name, kind) in named {
            let path = format!("/objects/{name}");
            let size = self.execute("qom-get", &json!({"path": path, "property": "size"}))?;
            let size = Bytes(size.as_u64().ok_or_else(|| self.garbage(size.to_string().as_bytes()))?);
            let (share, merge) = (self.property(&path, "share")?, self.property(&path, "merge")?);
            backends.push(Backend { path, kind: kind.to_owned(), size, share, merge });
        }
        Ok(backends)
    }

    /// A property that is on or off.
    fn property(&mut self, path: &str, property: &str) -> Result<bool, Error> {
        let value = self.execute("qom-get", &json!({"path": path, "property": property}))?;
        value.as_bool().ok_or_else(|| self.garbage(value.to_string().as_bytes()))
    }

    /// Give a command and wait for its answer.
    fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value, Error> {
        self.commands += 1;
        let id = self.commands;
        let line = format!("{}\n", json!({"execute": command, "arguments": arguments, "id": id}));
        self.stream.write_all(line.as_bytes()).map_err(|source| self.broken(source))?;
        let deadline = Instant::now() + self.patience;
        loop {
            let mut message = self.message(deadline)?;
            // Events come at any time; an answer is to the command that it names.
            if message.get("event").is_some() {
                continue;
            }
            let answers = message.get("id").and_then(Value::as_u64) == Some(id);
            if let Some(error) = message.get("error").filter(|_| answers || message.get("id").is_none()) {
                let why = error.get("desc").and_then(Value::as_str).unwrap_or("without a word").to_owned();
                return Err(Error::Refused { command: command.to_owned(), why });
            }
            match message.get_mut("return").filter(|_| answers) {
                Some(result) => return Ok(result.take()),
                None => return Err(self.garbage(message.to_string().as_bytes())),
            }
        }
    }

    /// The next line, parsed.
    fn message(&mut self, deadline: Instant) -> Result<Value, Error> {
        let mut searched = 0;
        loop {
            if let Some(end) = self.received[searched..].iter().position(|&byte| byte == b'\n') {
                let rest = self.received.split_off(searched + end + 1);
                let line = std::mem::replace(&mut self.received, rest);
                let value: Option<Value> = serde_json::from_slice(&line).ok();
                return value.filter(Value::is_object).ok_or_else(|| self.garbage(&line));
            }
            searched = self.received.len();
            if searched > LONGEST_LINE {
                return Err(self.garbage(&self.received));
            }
            if self.stop.load(Ordering::Relaxed) {
                return Err(Error::Stopped { path: self.path.clone() });
            }
            let left = deadline.min(self.end).saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Busy { path: self.path.clone() });
            }
            self.stream.set_read_timeout(Some(left.min(STOP_CHECK))).map_err(|source| self.broken(source))?;
            let mut buffer = [0; 4096];
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err(self.broken(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => self.received.extend_from_slice(&buffer[..count]),
                Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
                Err(source) => return Err(self.broken(source)),
            }
        }
    }

    fn broken(&self, source: io::Error) -> Error {
        match source.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Error::Busy { path: self.path.clone() },
            _ => Error::Io { path: self.path.clone(), source },
        }
    }

    fn garbage(&self, said: &[u8]) -> Error {
        let said = String::from_utf8_lossy(&said[..said.len().min(80)]).trim().to_owned();
        Error::Garbage { path: self.path.clone(), said }
    }
}

/// The name and the type of an object of the list, if it is a memory backend.
fn backend_of(object: &Value) -> Option<(&str, &str)> {
    let text = |key: &str| object.get(key).and_then(Value::as_str).unwrap_or_default();
    let kind = text("type").strip_prefix("child<").and_then(|kind| kind.strip_suffix('>')).unwrap_or_default();
    kind.starts_with("memory-backend-").then(|| (text("name"), kind))
}

/// Connect without waiting for ever: where the queue of a listener is full, a blocking connect would.
fn dial(path: &Path, patience: Duration) -> Result<UnixStream, Error> {
    let failed = |source: io::Error| Error::Connect { path: path.to_owned(), source };
    let address = SocketAddrUnix::new(path).map_err(|errno| failed(errno.into()))?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(|errno| failed(errno.into()))?;
    let deadline = Instant::now() + patience;
    loop {
        match rustix::net::connect(&socket, &address) {
            Ok(()) => break,
            Err(rustix::io::Errno::AGAIN) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(rustix::io::Errno::AGAIN) => return Err(Error::Busy { path: path.to_owned() }),
            Err(errno) => return Err(failed(errno.into())),
        }
    }
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false).map_err(failed)?;
    Ok(stream)
}

#[cfg(test)]
mod tests;
