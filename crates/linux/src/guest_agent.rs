//! The agent within a guest (qemu-ga, docs/interop/qemu-ga.rst of QEMU), reached by the [`socket`] on which QEMU listens
//! for the guest's virtio-serial port, or through libvirt ([`libvirt::agent`](crate::libvirt)). Only commands that read
//! are sent: `guest-sync-delimited`, `guest-get-osinfo`, `guest-get-vcpus`, and `guest-file-open` for reading,
//! `guest-file-read`, `guest-file-close`.
//!
//! The guest writes the answers, so they are not trusted: the length of an answer and of a file, and the time of the whole
//! session are limited.

mod socket;

use crate::unix_socket::reachable_path;
use crate::{LiveHost, libvirt};
use pagefold_base::identity::guest_agent::{AgentChannel, agent_channel};
use pagefold_base::{Absent, ProcessId, Reading};
use pagefold_host::guest_agent::{AgentAccess, GuestQuestion};
use pagefold_host::machine_questions::SESSION_TIMEOUT;
use pagefold_host::{ProcessHandle, parse};
use serde_json::{Value, json};
use socket::AgentSocket;
use std::path::Path;
use std::time::Duration;

/// The time that must be left of a session to open a file. A file that the agent opens after the end of the session stays
/// open in the guest, because its handle is not known.
const MIN_TIME_TO_OPEN: Duration = Duration::from_millis(300);

/// Bytes of a file in one answer; in base64 a third more.
const READ_BYTES: usize = 48 << 10;

/// The maximum length of an answer, and of what earlier clients left in the channel: more than a read, and more than
/// the list of 4096 virtual CPUs.
pub(crate) const MAX_LINE_BYTES: usize = 512 << 10;

/// The maximum length of a kernel's configuration that is searched. Those of distributions have about 300 KiB.
const MAX_CONFIGURATION_BYTES: usize = 1 << 20;

/// A way to one agent.
pub(crate) trait AgentChannelSession {
    /// Sends a command and waits for its result.
    fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value, CommandError>;

    /// The time until the session ends in any case.
    fn remaining_time(&self) -> Duration;

    /// Sends a command after the session has failed, if it is of use. Its answer is not awaited.
    fn send_without_answer(&mut self, command: &str, arguments: &Value);
}

/// Why a command has no result.
#[derive(Debug)]
pub(crate) enum CommandError {
    /// The agent refuses it, for this reason. The session can go on.
    Refused(String),
    /// The session has failed: answers that follow could not be told apart, or would come too late.
    SessionFailed(Absent),
}

impl From<Absent> for CommandError {
    fn from(why: Absent) -> Self {
        Self::SessionFailed(why)
    }
}

/// A command as the agent reads it.
pub(crate) fn command_text(command: &str, arguments: &Value) -> String {
    json!({"execute": command, "arguments": arguments}).to_string()
}

/// Asks the agent in the guest that a process runs. Each question has an answer of its own, in the same order.
///
/// # Errors
/// `NotOnThisKernel` if the machine has no channel for an agent; `NotAsked` if it is left alone; `NoAnswer` if there is no
/// session with an agent.
pub(crate) fn ask(
    host: &LiveHost,
    process: &dyn ProcessHandle,
    questions: &[GuestQuestion],
    access: AgentAccess,
) -> Reading<Vec<Reading<Vec<u8>>>> {
    let arguments = parse::arguments(&process.read("cmdline")?);
    match agent_channel(&arguments).ok_or(Absent::NotOnThisKernel)? {
        AgentChannel::Socket(path) => ask_at(&reachable_path(process, &path), process.id(), questions, SESSION_TIMEOUT),
        AgentChannel::Managed if access == AgentAccess::SocketOrLibvirt => {
            let channel = libvirt::agent::open(host, process.id(), SESSION_TIMEOUT)?;
            Ok(AgentSession::new(channel).answer_all(questions))
        }
        AgentChannel::Managed => Err(Absent::NotAsked(
            "the program that started QEMU, such as libvirt, has the channel, which serves one client at a time"
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
    Ok(AgentSession::new(AgentSocket::open(path, process, timeout)?).answer_all(questions))
}

/// A session with an agent.
pub(crate) struct AgentSession<C: AgentChannelSession> {
    channel: C,
    /// Why the session cannot go on.
    failure: Option<Absent>,
    /// The file that is open in the guest.
    open_file: Option<i64>,
    /// The version of the kernel that runs, once the agent has told it.
    kernel_release: Option<String>,
}

impl<C: AgentChannelSession> AgentSession<C> {
    pub(crate) fn new(channel: C) -> Self {
        Self { channel, failure: None, open_file: None, kernel_release: None }
    }

    /// The answer to each question, in the same order.
    pub(crate) fn answer_all(mut self, questions: &[GuestQuestion]) -> Vec<Reading<Vec<u8>>> {
        questions.iter().map(|question| self.answer(question)).collect()
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
        if self.failure.is_none() && self.channel.remaining_time() < MIN_TIME_TO_OPEN {
            return Err(Absent::NoAnswer(format!(
                "the time of the session does not suffice to read {path}: less than {} ms are left",
                MIN_TIME_TO_OPEN.as_millis()
            )));
        }
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

    /// Sends a command and waits for its result.
    fn execute(&mut self, command: &str, arguments: &Value) -> Reading<Value> {
        if let Some(why) = &self.failure {
            return Err(why.clone());
        }
        self.channel.execute(command, arguments).map_err(|error| match error {
            CommandError::Refused(reason) => refusal(command, &reason),
            CommandError::SessionFailed(why) => self.failure.insert(why).clone(),
        })
    }
}

impl<C: AgentChannelSession> Drop for AgentSession<C> {
    /// Closes the file that a failed session left open in the guest.
    fn drop(&mut self) {
        if let Some(handle) = self.open_file {
            self.channel.send_without_answer("guest-file-close", &json!({"handle": handle}));
        }
    }
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
pub(crate) mod tests;
