//! The agent within a guest (qemu-ga, docs/interop/qemu-ga.rst of QEMU), reached by the socket on which QEMU listens
//! for the guest's virtio-serial port. Only commands that read are sent: `guest-sync-delimited`, `guest-get-osinfo`,
//! `guest-get-vcpus`, and `guest-file-open` for reading, `guest-file-read`, `guest-file-close`.
//!
//! A session begins with the byte 0xFF, which ends any half command of an earlier client. The agent answers
//! `guest-sync-delimited` with 0xFF and the number that was sent; answers to earlier clients are skipped.
//!
//! The guest writes the answers, so they are not trusted: the length of a line and of a file, and the time of the whole
//! session are limited. As for QMP, nothing is sent unless the process that listens is QEMU itself.
//!
//! Limits: QEMU serves one client of the channel at a time, and does not tell whether an agent listens in the guest. So
//! a channel in use, a missing agent and a hung agent look the same: there is no answer within [`SESSION_TIMEOUT`]. An
//! agent that starts later reads what was sent meanwhile, and its answers stay in the channel until the next client's
//! synchronization.

use crate::unix_socket::{ConnectError, check_peer, connect_with_timeout, reachable_path};
use pagefold_base::identity::guest_agent::{AgentChannel, agent_channel};
use pagefold_base::{Absent, ProcessId, Reading};
use pagefold_host::guest_agent::GuestQuestion;
use pagefold_host::{ProcessHandle, parse};
use serde_json::{Value, json};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

/// How long a session with one guest may take, from the connection to the last answer.
pub(crate) const SESSION_TIMEOUT: Duration = Duration::from_secs(1);

/// Bytes of a file in one answer; in base64 a third more.
const READ_BYTES: usize = 48 << 10;

/// The maximum length of an answer, and of what earlier clients left in the channel: more than a read, and more than
/// the list of 4096 virtual CPUs.
const MAX_LINE_BYTES: usize = 512 << 10;

/// The maximum length of a kernel's configuration that is searched. Those of distributions have about 300 KiB.
const MAX_CONFIGURATION_BYTES: usize = 1 << 20;

/// The byte that separates a synchronization from anything before it.
const DELIMITER: u8 = 0xff;

/// Asks the agent in the guest that a process runs. Each question has an answer of its own, in the same order.
///
/// # Errors
/// `NotOnThisKernel` if the machine has no channel for an agent; `NoAnswer` if there is no session with an agent.
pub(crate) fn ask(process: &dyn ProcessHandle, questions: &[GuestQuestion]) -> Reading<Vec<Reading<Vec<u8>>>> {
    let arguments = parse::arguments(&process.read("cmdline")?);
    match agent_channel(&arguments).ok_or(Absent::NotOnThisKernel)? {
        AgentChannel::Socket(path) => ask_at(&reachable_path(process, &path), process.id(), questions, SESSION_TIMEOUT),
        AgentChannel::Managed => Err(Absent::NoAnswer(
            "the program that started QEMU, such as libvirt, has the channel, which serves one client at a time; use \
             virsh qemu-agent-command"
                .to_owned(),
        )),
        AgentChannel::OtherDevice(kind) => {
            let kind: String = kind.escape_debug().take(40).collect();
            Err(Absent::NoAnswer(format!("the channel of the agent is no Unix socket but: {kind}")))
        }
    }
}

fn ask_at(
    path: &Path,
    process: ProcessId,
    questions: &[GuestQuestion],
    timeout: Duration,
) -> Reading<Vec<Reading<Vec<u8>>>> {
    let mut session = AgentSession::open(path, process, timeout)?;
    Ok(questions.iter().map(|question| session.answer(question)).collect())
}

/// A session with an agent.
struct AgentSession {
    stream: UnixStream,
    /// Received bytes after the last complete line.
    receive_buffer: Vec<u8>,
    /// When the session ends in any case.
    deadline: Instant,
    timeout: Duration,
    /// Why the session cannot go on.
    failure: Option<Absent>,
    /// The file that is open in the guest.
    open_file: Option<i64>,
    /// The version of the kernel that runs, once the agent has told it.
    kernel_release: Option<String>,
}

impl AgentSession {
    fn open(path: &Path, process: ProcessId, timeout: Duration) -> Reading<Self> {
        let deadline = Instant::now() + timeout;
        let stream = connect_with_timeout(path, timeout).map_err(|error| match error {
            ConnectError::Busy => no_answer(timeout),
            ConnectError::Failed(error) if error.kind() == ErrorKind::PermissionDenied => Absent::Denied,
            ConnectError::Failed(error) => {
                Absent::NoAnswer(format!("cannot connect to {}: {error}", path.display().to_string().escape_debug()))
            }
        })?;
        match check_peer(&stream, process) {
            Ok(Ok(())) => {}
            Ok(Err(found)) => {
                let expected = process.pid;
                return Err(Absent::NoAnswer(format!(
                    "process {found} listens at the socket, not QEMU's process {expected}; nothing was sent"
                )));
            }
            Err(error) => return Err(Absent::NoAnswer(error.to_string())),
        }
        let mut session = Self {
            stream,
            receive_buffer: Vec::new(),
            deadline,
            timeout,
            failure: None,
            open_file: None,
            kernel_release: None,
        };
        session.synchronize()?;
        Ok(session)
    }

    /// Makes the agent forget half commands, and skips what it wrote to earlier clients.
    fn synchronize(&mut self) -> Reading<()> {
        // Another number than earlier sessions sent; it need not be secret.
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let id = since_epoch.as_micros() as u64 & ((1 << 52) - 1);
        let command = json!({"execute": "guest-sync-delimited", "arguments": {"id": id}});
        self.send([&[DELIMITER][..], format!("{command}\n").as_bytes()].concat().as_slice())?;
        // Each round takes at least one byte, and the session ends at its deadline.
        loop {
            let delimiter = self.find_received(|byte| byte == DELIMITER)?;
            self.receive_buffer.drain(..=delimiter);
            let end = self.find_received(|byte| byte == b'\n' || byte == DELIMITER)?;
            if self.receive_buffer[end] == DELIMITER {
                continue;
            }
            let line: Vec<u8> = self.receive_buffer.drain(..=end).collect();
            let answer: Option<Value> = serde_json::from_slice(&line).ok();
            if answer.and_then(|answer| answer.get("return")?.as_u64()) == Some(id) {
                return Ok(());
            }
        }
    }

    fn answer(&mut self, question: &GuestQuestion) -> Reading<Vec<u8>> {
        match question {
            GuestQuestion::OperatingSystem => {
                let system = self.execute("guest-get-osinfo", &json!({}))?;
                self.kernel_release = system.get("kernel-release").and_then(Value::as_str).map(str::to_owned);
                Ok(system.to_string().into_bytes())
            }
            GuestQuestion::Vcpus => Ok(self.execute("guest-get-vcpus", &json!({}))?.to_string().into_bytes()),
            GuestQuestion::File { path, max_bytes } => {
                self.read_file(path, |bytes| bytes.len() >= *max_bytes).map(|mut bytes| {
                    bytes.truncate(*max_bytes);
                    bytes
                })
            }
            GuestQuestion::TimerConfiguration => {
                if self.kernel_release.is_none() {
                    self.answer(&GuestQuestion::OperatingSystem)?;
                }
                let release = self.kernel_release.clone().unwrap_or_default();
                let is_name = !release.is_empty()
                    && release.len() <= 64
                    && release.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._+-~".contains(&byte));
                if !is_name {
                    let excerpt: String = release.chars().take(60).collect();
                    return Err(Absent::Malformed(format!("kernel-release: {excerpt:?}")));
                }
                let bytes = self.read_file(&format!("/boot/config-{release}"), |bytes| {
                    bytes.len() >= MAX_CONFIGURATION_BYTES || timer_lines(bytes).contains("\nCONFIG_HZ=")
                })?;
                Ok(timer_lines(&bytes).trim_start().as_bytes().to_vec())
            }
        }
    }

    /// The bytes of a file, to its end or until `is_enough`. It is closed afterwards, also after an error.
    fn read_file(&mut self, path: &str, is_enough: impl Fn(&[u8]) -> bool) -> Reading<Vec<u8>> {
        let handle = self.execute("guest-file-open", &json!({"path": path, "mode": "r"}))?;
        let handle = handle.as_i64().ok_or_else(|| malformed("guest-file-open", &handle))?;
        self.open_file = Some(handle);
        let bytes = self.read_open_file(handle, is_enough);
        if self.failure.is_none() {
            self.open_file = None;
            // The content counts, whatever the answer is.
            let _ = self.execute("guest-file-close", &json!({"handle": handle}));
        }
        bytes
    }

    fn read_open_file(&mut self, handle: i64, is_enough: impl Fn(&[u8]) -> bool) -> Reading<Vec<u8>> {
        let mut bytes = Vec::new();
        while !is_enough(&bytes) {
            let part = self.execute("guest-file-read", &json!({"handle": handle, "count": READ_BYTES}))?;
            let content = part.get("buf-b64").and_then(Value::as_str).and_then(parse::base64);
            let content = content.filter(|content| content.len() <= READ_BYTES);
            let content = content.ok_or_else(|| malformed("guest-file-read", &part))?;
            bytes.extend_from_slice(&content);
            if content.is_empty() || part.get("eof") == Some(&Value::Bool(true)) {
                break;
            }
        }
        Ok(bytes)
    }

    /// Sends a command and waits for its answer.
    fn execute(&mut self, command: &str, arguments: &Value) -> Reading<Value> {
        let line = format!("{}\n", json!({"execute": command, "arguments": arguments}));
        self.send(line.as_bytes())?;
        let line = self.receive_line()?;
        let mut message: Value = match serde_json::from_slice(&line) {
            Ok(message) => message,
            Err(_) => {
                let excerpt: String = String::from_utf8_lossy(&line).chars().take(60).collect();
                return Err(self.fail(&format!("it does not speak the agent's protocol: {excerpt:?}")));
            }
        };
        if let Some(error) = message.get("error") {
            let reason = error.get("desc").and_then(Value::as_str).unwrap_or("no reason given");
            return Err(refusal(command, reason));
        }
        match message.get_mut("return") {
            Some(result) => Ok(result.take()),
            None => Err(self.fail(&format!("it does not speak the agent's protocol: {}", excerpt(&message)))),
        }
    }

    /// The next line, with its newline.
    fn receive_line(&mut self) -> Reading<Vec<u8>> {
        let end = self.find_received(|byte| byte == b'\n')?;
        Ok(self.receive_buffer.drain(..=end).collect())
    }

    /// The position of the next byte of this kind, once it has been received.
    fn find_received(&mut self, is_wanted: impl Fn(u8) -> bool) -> Reading<usize> {
        let mut searched = 0;
        loop {
            if let Some(position) = self.receive_buffer[searched..].iter().position(|&byte| is_wanted(byte)) {
                return Ok(searched + position);
            }
            searched = self.receive_buffer.len();
            if searched > MAX_LINE_BYTES {
                return Err(self.fail("its answer is too long"));
            }
            self.receive()?;
        }
    }

    fn receive(&mut self) -> Reading<()> {
        let timeout = self.remaining_time()?;
        let mut buffer = [0; 16 << 10];
        match self.stream.set_read_timeout(Some(timeout)).and_then(|()| self.stream.read(&mut buffer)) {
            Ok(0) => return Err(self.fail("QEMU closed the connection")),
            Ok(count) => self.receive_buffer.extend_from_slice(&buffer[..count]),
            // The remaining time is checked before the next read.
            Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
            Err(error) => return Err(self.fail(&error.to_string())),
        }
        Ok(())
    }

    fn send(&mut self, mut bytes: &[u8]) -> Reading<()> {
        while !bytes.is_empty() {
            let timeout = self.remaining_time()?;
            match self.stream.set_write_timeout(Some(timeout)).and_then(|()| self.stream.write(bytes)) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
                Err(error) => return Err(self.fail(&error.to_string())),
            }
        }
        Ok(())
    }

    /// The time until the deadline, which is not zero; after a failure, that failure.
    fn remaining_time(&mut self) -> Reading<Duration> {
        if let Some(why) = &self.failure {
            return Err(why.clone());
        }
        let remaining = self.deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            self.failure = Some(no_answer(self.timeout));
            return Err(no_answer(self.timeout));
        }
        Ok(remaining)
    }

    /// Ends the session: the answers that follow cannot be told apart any more.
    fn fail(&mut self, why: &str) -> Absent {
        let why = Absent::NoAnswer(why.to_owned());
        self.failure = Some(why.clone());
        why
    }
}

impl Drop for AgentSession {
    /// Closes the file that a failed session left open in the guest. Its answer is not awaited.
    fn drop(&mut self) {
        if let Some(handle) = self.open_file {
            let line = format!("{}\n", json!({"execute": "guest-file-close", "arguments": {"handle": handle}}));
            let _ = self.stream.set_nonblocking(true).and_then(|()| self.stream.write(line.as_bytes()));
        }
    }
}

fn no_answer(timeout: Duration) -> Absent {
    Absent::NoAnswer(format!(
        "nothing within {} ms: no agent runs in the guest, it hangs, or another program uses the channel",
        timeout.as_millis()
    ))
}

/// What an error of the agent means. Its texts are those of qga/commands-posix.c, with the error of the system.
fn refusal(command: &str, reason: &str) -> Absent {
    if command == "guest-file-open" && reason.ends_with("No such file or directory") {
        return Absent::NotOnThisKernel;
    }
    let reason: String = reason.chars().take(160).collect();
    Absent::NoAnswer(format!("the agent refuses {command}: {}", reason.escape_debug()))
}

/// The lines about the timer, each after a newline. A last line without a newline may be cut, and is left out.
fn timer_lines(configuration: &[u8]) -> String {
    let text = String::from_utf8_lossy(configuration);
    let complete = text.rsplit_once('\n').map_or("", |(lines, _)| lines);
    let is_timer = |line: &&str| line.starts_with("CONFIG_HZ") || line.starts_with("CONFIG_NO_HZ");
    complete.lines().filter(is_timer).flat_map(|line| ["\n", line]).collect()
}

fn malformed(command: &str, answer: &Value) -> Absent {
    Absent::Malformed(format!("{command}: {}", excerpt(answer)))
}

fn excerpt(answer: &Value) -> String {
    format!("{:?}", answer.to_string().chars().take(60).collect::<String>())
}

#[cfg(test)]
mod tests;
