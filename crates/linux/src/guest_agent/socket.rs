//! The socket on which QEMU listens for the guest's virtio-serial port of its agent.
//!
//! A session begins with the byte 0xFF, which ends any half command of an earlier client. The agent answers
//! `guest-sync-delimited` with 0xFF and the number that was sent; answers to earlier clients are skipped. As for QMP,
//! nothing is sent unless the process that listens is QEMU itself.
//!
//! Limits: QEMU serves one client of the channel at a time, and does not tell whether an agent listens in the guest. So
//! a channel in use, a missing agent and a hung agent look the same: there is no answer in time. An agent that starts
//! later reads what was sent meanwhile, and its answers stay in the channel until the next client's synchronization.

use super::{AgentChannelSession, CommandError, MAX_LINE_BYTES, command_text, excerpt};
use crate::unix_socket::{ConnectError, check_peer, connect_with_timeout};
use pagefold_base::{Absent, ProcessId, Reading};
use serde_json::{Value, json};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

/// The byte that separates a synchronization from anything before it.
pub(super) const DELIMITER: u8 = 0xff;

/// A connection to an agent that has synchronized.
pub(super) struct AgentSocket {
    stream: UnixStream,
    /// Received bytes after the last complete line.
    receive_buffer: Vec<u8>,
    /// When the session ends in any case.
    deadline: Instant,
    timeout: Duration,
}

impl AgentSocket {
    pub(super) fn open(path: &Path, process: ProcessId, timeout: Duration) -> Reading<Self> {
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
        let mut socket = Self { stream, receive_buffer: Vec::new(), deadline, timeout };
        socket.synchronize()?;
        Ok(socket)
    }

    /// Makes the agent forget half commands, and skips what it wrote to earlier clients.
    fn synchronize(&mut self) -> Reading<()> {
        // Another number than earlier sessions sent; it need not be secret.
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let id = since_epoch.as_micros() as u64 & ((1 << 52) - 1);
        let command = command_text("guest-sync-delimited", &json!({"id": id}));
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
                return Err(Absent::NoAnswer("its answer is too long".to_owned()));
            }
            self.receive()?;
        }
    }

    fn receive(&mut self) -> Reading<()> {
        let timeout = self.require_time()?;
        let mut buffer = [0; 16 << 10];
        match self.stream.set_read_timeout(Some(timeout)).and_then(|()| self.stream.read(&mut buffer)) {
            Ok(0) => return Err(Absent::NoAnswer("QEMU closed the connection".to_owned())),
            Ok(count) => self.receive_buffer.extend_from_slice(&buffer[..count]),
            // The remaining time is checked before the next read.
            Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
            Err(error) => return Err(Absent::NoAnswer(error.to_string())),
        }
        Ok(())
    }

    fn send(&mut self, mut bytes: &[u8]) -> Reading<()> {
        while !bytes.is_empty() {
            let timeout = self.require_time()?;
            match self.stream.set_write_timeout(Some(timeout)).and_then(|()| self.stream.write(bytes)) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
                Err(error) => return Err(Absent::NoAnswer(error.to_string())),
            }
        }
        Ok(())
    }

    /// The time until the deadline, which is not zero.
    fn require_time(&self) -> Reading<Duration> {
        let remaining = self.remaining_time();
        if remaining.is_zero() { Err(no_answer(self.timeout)) } else { Ok(remaining) }
    }
}

impl AgentChannelSession for AgentSocket {
    fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value, CommandError> {
        self.send(format!("{}\n", command_text(command, arguments)).as_bytes())?;
        let line = self.receive_line()?;
        let foreign = |excerpt| Absent::NoAnswer(format!("it does not speak the agent's protocol: {excerpt}"));
        let mut message: Value = serde_json::from_slice(&line).map_err(|_| {
            let start: String = String::from_utf8_lossy(&line).chars().take(60).collect();
            foreign(format!("{start:?}"))
        })?;
        if let Some(error) = message.get("error") {
            let reason = error.get("desc").and_then(Value::as_str).unwrap_or("no reason given");
            return Err(CommandError::Refused(reason.to_owned()));
        }
        match message.get_mut("return") {
            Some(result) => Ok(result.take()),
            None => Err(foreign(excerpt(&message)).into()),
        }
    }

    fn remaining_time(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    fn send_without_answer(&mut self, command: &str, arguments: &Value) {
        let line = format!("{}\n", command_text(command, arguments));
        let _ = self.stream.set_nonblocking(true).and_then(|()| self.stream.write(line.as_bytes()));
    }
}

fn no_answer(timeout: Duration) -> Absent {
    Absent::NoAnswer(format!(
        "nothing within {} ms: no agent runs in the guest, it hangs, or another program uses the channel",
        timeout.as_millis()
    ))
}
