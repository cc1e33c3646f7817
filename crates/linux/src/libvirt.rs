//! libvirt's remote protocol over its local socket: pins threads of a domain, so that libvirt's definition of the running
//! domain agrees with the CPUs that the kernel gives them, replaces the definition with which a domain starts, and asks
//! the monitor of a domain and the [`agent`] in its guest.
//!
//! Messages are XDR (RFC 4506) behind a length (src/rpc/virnetprotocol.x). Numbers of calls and their arguments are
//! those of src/remote/remote_protocol.x; they are never changed, so any version of libvirt from 1.0 on answers them (to
//! define domains: from 1.2.12 on; to pin iothreads: from 1.2.14 on). Which domain a process belongs to comes from
//! libvirt's own state files ([`observe::libvirt_domains`]). The socket's peer must be root. Its answers are not trusted:
//! their length, their number and the time for them are bounded.

pub(crate) mod agent;

use crate::LiveHost;
use crate::unix_socket::{ConnectError, connect_with_timeout};
use pagefold_base::{Absent, IdSet, ProcessId, Reading};
use pagefold_host::action::{
    ActionError, ActionOutcome, Exchange, LibvirtPin, LibvirtPinTarget, domain_definition_path,
};
use pagefold_host::qemu_monitor::MonitorQuestion;
use pagefold_host::{Host, hold, observe};
use pagefold_sys::fault;
use rustix::net::sockopt;
use serde_json::{Value, json};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// The socket of libvirtd, or of virtqemud where the daemons are separate.
const SOCKETS: [&str; 2] = ["/run/libvirt/virtqemud-sock", "/run/libvirt/libvirt-sock"];

/// How long a connection may take, with all its calls.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);

/// How long to wait for a new definition that libvirt did not confirm.
const CONFIRMATION_TIMEOUT: Duration = Duration::from_secs(5);
const CONFIRMATION_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The largest answer that is read. The list of 4096 vCPUs has about 1 MiB; other answers are smaller than a KiB.
const MAX_ANSWER_BYTES: usize = 2 << 20;

/// The longest text of an error that is reported about a domain that was asked.
const MAX_EXCERPT_CHARS: usize = 200;

/// Messages that are skipped while an answer is awaited, such as events.
const MAX_SKIPPED_MESSAGES: usize = 64;

/// Calls for all hypervisors, and those for QEMU only (src/remote/qemu_protocol.x).
const REMOTE_PROGRAM: u32 = 0x2000_8086;
const QEMU_PROGRAM: u32 = 0x2000_8087;
const PROTOCOL_VERSION: u32 = 1;
const MESSAGE_CALL: u32 = 0;
const MESSAGE_REPLY: u32 = 1;
const STATUS_OK: u32 = 0;

/// The size of a message without its content: length, program, version, procedure, type, serial, status.
const HEADER_BYTES: usize = 28;

const PROC_CONNECT_OPEN: u32 = 1;
const PROC_CONNECT_CLOSE: u32 = 2;
const PROC_DOMAIN_LOOKUP_BY_UUID: u32 = 24;
const PROC_AUTH_LIST: u32 = 66;
const PROC_DOMAIN_PIN_VCPU_FLAGS: u32 = 225;
const PROC_DOMAIN_PIN_EMULATOR: u32 = 279;
const PROC_DOMAIN_DEFINE_XML_FLAGS: u32 = 350;
const PROC_DOMAIN_PIN_IOTHREAD: u32 = 352;

const QEMU_PROC_DOMAIN_MONITOR_COMMAND: u32 = 1;
const QEMU_PROC_DOMAIN_AGENT_COMMAND: u32 = 3;

/// `VIR_DOMAIN_AFFECT_LIVE`: the running domain, not the definition with which it starts next time.
const AFFECT_LIVE: u32 = 1;

/// `VIR_DOMAIN_DEFINE_VALIDATE`: check the definition against libvirt's schema.
const DEFINE_VALIDATE: u32 = 1;

/// Why libvirt did not do something.
#[derive(Debug, thiserror::Error)]
pub enum LibvirtError {
    /// No socket can be used.
    #[error("cannot connect to libvirt at {path}: {source}")]
    Connect {
        /// The socket.
        path: String,
        /// The system's error.
        source: io::Error,
    },
    /// Another user listens on the socket.
    #[error("{path}: its peer is user {uid}, not root; nothing was sent")]
    UnexpectedPeer {
        /// The socket.
        path: String,
        /// The user.
        uid: u32,
    },
    /// It did not answer in time, or the connection failed.
    #[error("libvirt does not answer: {0}")]
    Io(#[from] io::Error),
    /// Its answer is not of the protocol.
    #[error("libvirt's answer is malformed: {0}")]
    Malformed(&'static str),
    /// It refused the call.
    #[error("libvirt refuses: {} (error {code})", text.escape_debug())]
    Refused {
        /// Its text, which may be that of a guest.
        text: String,
        /// The number of the error (include/libvirt/virterror.h).
        code: u32,
    },
    /// QEMU's monitor refused the command.
    #[error("QEMU refuses: {}", .0.escape_debug())]
    RefusedByMonitor(String),
}

impl LibvirtError {
    /// Its text, which is cut, because parts of it may come from QEMU or a guest.
    fn excerpt(&self) -> String {
        self.to_string().chars().take(MAX_EXCERPT_CHARS).collect()
    }
}

impl From<LibvirtError> for ActionError {
    fn from(error: LibvirtError) -> Self {
        let message = error.to_string();
        match error {
            LibvirtError::Connect { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                Self::Denied(message)
            }
            LibvirtError::Io(source) | LibvirtError::Connect { source, .. }
                if source.kind() == io::ErrorKind::WouldBlock =>
            {
                Self::Busy(message)
            }
            _ => Self::Failed(message),
        }
    }
}

/// Pin a thread of the domain that a process runs.
///
/// # Errors
/// `Vanished` if the process has ended; `Busy` if libvirt does not answer in time.
pub fn pin(host: &LiveHost, process: ProcessId, pin: &LibvirtPin, cpus: &IdSet) -> Result<(), ActionError> {
    hold(host, process)?;
    let domains = observe::libvirt_domains(host)?;
    if !domains.iter().any(|domain| domain.pid == process.pid && domain.uuid == pin.domain) {
        let (pid, uuid) = (process.pid, &pin.domain);
        return Err(ActionError::Failed(format!("libvirt does not know process {pid} as domain {uuid} any more")));
    }
    let uuid = parse_uuid(&pin.domain).ok_or_else(|| ActionError::Failed(format!("{:?} is no UUID", pin.domain)))?;
    let mut connection = Connection::open_any(CONNECTION_TIMEOUT)?;
    let domain = connection.look_up(uuid)?;
    connection.pin(&domain, pin.target, cpus)?;
    connection.close();
    Ok(())
}

/// Asks the monitor of the domain that a process runs. libvirt marks the domain as tainted. Each question has an answer
/// of its own, in the same order.
///
/// # Errors
/// As [`open_domain`].
pub(crate) fn ask_monitor(
    host: &LiveHost,
    process: ProcessId,
    questions: &[MonitorQuestion],
    timeout: Duration,
) -> Reading<Vec<Reading<Vec<u8>>>> {
    let (mut connection, domain) = open_domain(host, process, timeout)?;
    let answers = questions
        .iter()
        .map(|question| connection.ask_monitor(&domain, *question).map_err(|error| Absent::NoAnswer(error.excerpt())));
    let answers = answers.collect();
    connection.close();
    Ok(answers)
}

/// A connection for questions about the domain that a process runs, and the domain.
///
/// # Errors
/// `Vanished` if the process has ended; `Denied` if libvirt may not be used; `NotAsked` with the reason if the domain cannot
/// be asked.
fn open_domain(host: &LiveHost, process: ProcessId, timeout: Duration) -> Reading<(Connection, DomainHandle)> {
    hold(host, process)?;
    let domains = observe::libvirt_domains(host)?;
    let domain = domains.iter().find(|domain| domain.pid == process.pid);
    let uuid = domain.and_then(|domain| parse_uuid(&domain.uuid));
    let uuid = uuid.ok_or_else(|| Absent::NotAsked("libvirt does not know the process".to_owned()))?;
    let open = || {
        let mut connection = Connection::open_any(timeout)?;
        let domain = connection.look_up(uuid)?;
        Ok((connection, domain))
    };
    open().map_err(|error: LibvirtError| match error {
        LibvirtError::Connect { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => Absent::Denied,
        error => Absent::NotAsked(error.excerpt()),
    })
}

/// Replace the persistent definition of a domain.
///
/// # Errors
/// `ChangedByOthers` if its file has another text than the expected one; `Vanished` if it has none; `Busy` if libvirt
/// got the request and did not confirm it, so that it may still carry it out; `Failed` if nothing changes.
pub fn define(
    host: &LiveHost,
    uuid: &str,
    name: &str,
    definition: &Exchange<String>,
) -> Result<ActionOutcome, ActionError> {
    let bytes = parse_uuid(uuid).ok_or_else(|| ActionError::Failed(format!("{uuid:?} is no UUID")))?;
    if name.contains('/') {
        return Err(ActionError::Failed(format!("{name:?} is no name of a domain")));
    }
    let path = domain_definition_path(name);
    let current = match host.read(&path) {
        Err(Absent::NotOnThisKernel) => return Err(ActionError::Vanished),
        current => current?,
    };
    if !definition.must_define(String::from_utf8_lossy(&current).into_owned(), name)? {
        return Ok(ActionOutcome { unchanged: true, ..ActionOutcome::default() });
    }
    let unsent = |error: LibvirtError| ActionError::Failed(error.to_string());
    let mut connection = Connection::open_any(CONNECTION_TIMEOUT).map_err(unsent)?;
    if connection.look_up(bytes).map_err(unsent)?.name != name.as_bytes() {
        return Err(ActionError::ChangedByOthers(format!("domain {uuid} is not named {name:?} any more")));
    }
    fault::point("before defining a domain");
    let defined = connection.define(bytes, &definition.to);
    fault::point("after defining a domain");
    match defined {
        Ok(()) => connection.close(),
        Err(error @ LibvirtError::Refused { .. }) => return Err(unsent(error)),
        Err(error) if !is_replaced(host, &path, &current, CONFIRMATION_TIMEOUT) => {
            return Err(ActionError::Busy(error.to_string()));
        }
        Err(_) => {}
    }
    Ok(ActionOutcome::default())
}

/// Whether libvirt replaces a definition in time.
fn is_replaced(host: &LiveHost, path: &str, former: &[u8], timeout: Duration) -> bool {
    let deadline = Instant::now() + timeout;
    loop {
        if host.read(path).is_ok_and(|bytes| bytes != former) {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        thread::sleep(CONFIRMATION_POLL_INTERVAL);
    }
}

/// The bytes of a UUID such as `c7a5fdbd-cdaf-9455-926a-d65c16db1809`.
fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits: Vec<u8> = text.bytes().filter(|&byte| byte != b'-').collect();
    let digits: &[u8; 32] = digits.as_slice().try_into().ok()?;
    let mut uuid = [0; 16];
    for (byte, pair) in uuid.iter_mut().zip(digits.chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(uuid)
}

/// A domain, as calls name it.
#[derive(Debug, PartialEq, Eq)]
struct DomainHandle {
    name: Vec<u8>,
    uuid: [u8; 16],
    id: u32,
}

/// A connection to libvirt's daemon.
struct Connection {
    stream: UnixStream,
    serial: u32,
    deadline: Instant,
}

impl Connection {
    fn open_any(timeout: Duration) -> Result<Self, LibvirtError> {
        let socket = SOCKETS.into_iter().find(|path| Path::new(path).exists()).unwrap_or(SOCKETS[1]);
        Self::open(socket, 0, timeout)
    }

    /// Connect to a socket on which a user listens.
    fn open(path: &str, user: u32, timeout: Duration) -> Result<Self, LibvirtError> {
        let connect = |source| LibvirtError::Connect { path: path.to_owned(), source };
        let deadline = Instant::now() + timeout;
        let stream = connect_with_timeout(Path::new(path), timeout).map_err(|error| match error {
            ConnectError::Busy => connect(io::ErrorKind::WouldBlock.into()),
            ConnectError::Failed(error) => connect(error),
        })?;
        let peer = sockopt::socket_peercred(&stream).map_err(|errno| connect(errno.into()))?;
        if peer.uid.as_raw() != user {
            return Err(LibvirtError::UnexpectedPeer { path: path.to_owned(), uid: peer.uid.as_raw() });
        }
        let mut connection = Self { stream, serial: 0, deadline };
        connection.call(PROC_AUTH_LIST, &[])?;
        let mut arguments = XdrWriter::default();
        arguments.put_number(1);
        arguments.put_bytes(b"qemu:///system");
        arguments.put_number(0);
        connection.call(PROC_CONNECT_OPEN, &arguments.0)?;
        Ok(connection)
    }

    fn look_up(&mut self, uuid: [u8; 16]) -> Result<DomainHandle, LibvirtError> {
        let answer = self.call(PROC_DOMAIN_LOOKUP_BY_UUID, &uuid)?;
        let mut answer = XdrReader(&answer);
        let name = answer.take_bytes()?.to_vec();
        let found = answer.take(16)?;
        if found != uuid {
            return Err(LibvirtError::Malformed("another domain than the requested one"));
        }
        Ok(DomainHandle { name, uuid, id: answer.take_number()? })
    }

    fn pin(&mut self, domain: &DomainHandle, target: LibvirtPinTarget, cpus: &IdSet) -> Result<(), LibvirtError> {
        let mut arguments = XdrWriter::default();
        arguments.put_domain(domain);
        let procedure = match target {
            LibvirtPinTarget::Vcpu(vcpu) => {
                arguments.put_number(vcpu);
                PROC_DOMAIN_PIN_VCPU_FLAGS
            }
            LibvirtPinTarget::Emulator => PROC_DOMAIN_PIN_EMULATOR,
            LibvirtPinTarget::Iothread(iothread) => {
                arguments.put_number(iothread);
                PROC_DOMAIN_PIN_IOTHREAD
            }
        };
        arguments.put_bytes(&cpu_map(cpus));
        arguments.put_number(AFFECT_LIVE);
        self.call(procedure, &arguments.0).map(drop)
    }

    /// The content of the monitor's answer to a question.
    fn ask_monitor(&mut self, domain: &DomainHandle, question: MonitorQuestion) -> Result<Vec<u8>, LibvirtError> {
        let mut arguments = XdrWriter::default();
        arguments.put_domain(domain);
        arguments.put_bytes(json!({"execute": question.command()}).to_string().as_bytes());
        arguments.put_number(0);
        let answer = self.call_program(QEMU_PROGRAM, QEMU_PROC_DOMAIN_MONITOR_COMMAND, &arguments.0)?;
        let mut answer: Value = serde_json::from_slice(XdrReader(&answer).take_bytes()?)
            .map_err(|_| LibvirtError::Malformed("no JSON of QEMU's monitor"))?;
        if let Some(error) = answer.get("error") {
            let why = error.get("desc").and_then(Value::as_str).unwrap_or("no reason given");
            return Err(LibvirtError::RefusedByMonitor(why.to_owned()));
        }
        let result = answer.get_mut("return").ok_or(LibvirtError::Malformed("no result of QEMU's monitor"))?;
        Ok(result.take().to_string().into_bytes())
    }

    fn define(&mut self, uuid: [u8; 16], definition: &str) -> Result<(), LibvirtError> {
        let mut arguments = XdrWriter::default();
        arguments.put_bytes(definition.as_bytes());
        arguments.put_number(DEFINE_VALIDATE);
        let answer = self.call(PROC_DOMAIN_DEFINE_XML_FLAGS, &arguments.0)?;
        let mut answer = XdrReader(&answer);
        answer.take_bytes()?;
        if answer.take(16)? != uuid {
            return Err(LibvirtError::Malformed("another domain than the defined one"));
        }
        Ok(())
    }

    /// Says goodbye. An error does not matter any more.
    fn close(mut self) {
        let _ = self.call(PROC_CONNECT_CLOSE, &[]);
    }

    /// Make a call, and return the content of its answer.
    fn call(&mut self, procedure: u32, arguments: &[u8]) -> Result<Vec<u8>, LibvirtError> {
        self.call_program(REMOTE_PROGRAM, procedure, arguments)
    }

    fn call_program(&mut self, program: u32, procedure: u32, arguments: &[u8]) -> Result<Vec<u8>, LibvirtError> {
        let message = self.next_call(program, procedure, arguments);
        self.set_timeouts()?;
        self.stream.write_all(&message)?;
        for _ in 0..MAX_SKIPPED_MESSAGES {
            let answer = self.read_message()?;
            if let Some(content) = parse_answer(&answer, (program, procedure, self.serial))? {
                return Ok(content.to_vec());
            }
        }
        Err(LibvirtError::Malformed("too many messages before the answer"))
    }

    /// The message of a call, with a serial number of its own.
    fn next_call(&mut self, program: u32, procedure: u32, arguments: &[u8]) -> Vec<u8> {
        self.serial += 1;
        let mut message = XdrWriter::default();
        let length = (HEADER_BYTES + arguments.len()) as u32;
        for number in [length, program, PROTOCOL_VERSION, procedure, MESSAGE_CALL, self.serial, STATUS_OK] {
            message.put_number(number);
        }
        message.0.extend(arguments);
        message.0
    }

    fn read_message(&mut self) -> Result<Vec<u8>, LibvirtError> {
        let mut length = [0; 4];
        self.read_exact(&mut length)?;
        let length = u32::from_be_bytes(length) as usize;
        if !(HEADER_BYTES..=MAX_ANSWER_BYTES).contains(&length) {
            return Err(LibvirtError::Malformed("a message of an impossible length"));
        }
        let mut message = vec![0; length - 4];
        self.read_exact(&mut message)?;
        Ok(message)
    }

    /// Reads so many bytes before the deadline, however slowly they come.
    fn read_exact(&mut self, bytes: &mut [u8]) -> Result<(), LibvirtError> {
        let mut filled = 0;
        while filled < bytes.len() {
            self.set_timeouts()?;
            match self.stream.read(&mut bytes[filled..]) {
                Ok(0) => return Err(LibvirtError::Malformed("the connection ended within a message")),
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn set_timeouts(&self) -> io::Result<()> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let left = if left.is_zero() { Err(io::Error::from(io::ErrorKind::WouldBlock)) } else { Ok(Some(left)) }?;
        self.stream.set_read_timeout(left)?;
        self.stream.set_write_timeout(left)
    }
}

/// The content of an answer; `None` if the message does not answer the call (program, procedure, serial).
fn parse_answer(message: &[u8], call: (u32, u32, u32)) -> Result<Option<&[u8]>, LibvirtError> {
    let mut reader = XdrReader(message);
    let mut header = [0; 6];
    for number in &mut header {
        *number = reader.take_number()?;
    }
    let [program, _version, answered, kind, number, status] = header;
    if (program, answered, number) != call || kind != MESSAGE_REPLY {
        return Ok(None);
    }
    if status == STATUS_OK {
        return Ok(Some(reader.0));
    }
    // `virNetMessageError`: code, domain, an optional text.
    let (code, _domain, has_text) = (reader.take_number()?, reader.take_number()?, reader.take_number()?);
    let text = if has_text == 1 { String::from_utf8_lossy(reader.take_bytes()?).into_owned() } else { String::new() };
    Err(LibvirtError::Refused { text, code })
}

/// A map of CPUs: bit N of the map is CPU N.
fn cpu_map(cpus: &IdSet) -> Vec<u8> {
    let bytes = cpus.iter().max().map_or(1, |last| last as usize / 8 + 1);
    let mut map = vec![0; bytes];
    for cpu in cpus.iter() {
        map[cpu as usize / 8] |= 1 << (cpu % 8);
    }
    map
}

/// Writes XDR: numbers of four bytes, big-endian; bytes with their length, filled up to a multiple of four.
#[derive(Default)]
struct XdrWriter(Vec<u8>);

impl XdrWriter {
    fn put_domain(&mut self, domain: &DomainHandle) {
        self.put_bytes(&domain.name);
        self.0.extend(domain.uuid);
        self.put_number(domain.id);
    }

    fn put_number(&mut self, number: u32) {
        self.0.extend(number.to_be_bytes());
    }

    fn put_bytes(&mut self, bytes: &[u8]) {
        self.put_number(bytes.len() as u32);
        self.0.extend(bytes);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }
}

/// Reads XDR.
struct XdrReader<'a>(&'a [u8]);

impl<'a> XdrReader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], LibvirtError> {
        let (taken, rest) =
            self.0.split_at_checked(count).ok_or(LibvirtError::Malformed("a message that is cut off"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn take_number(&mut self) -> Result<u32, LibvirtError> {
        let bytes = self.take(4)?;
        Ok(bytes.iter().fold(0, |number, &byte| number << 8 | u32::from(byte)))
    }

    fn take_bytes(&mut self) -> Result<&'a [u8], LibvirtError> {
        let length = self.take_number()? as usize;
        let bytes = self.take(length)?;
        self.take(length.next_multiple_of(4) - length)?;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests;
