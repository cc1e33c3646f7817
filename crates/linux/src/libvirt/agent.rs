//! The agent within the guest of a domain, asked through libvirt, which is connected to it: the call behind
//! `virsh qemu-agent-command`. libvirt marks the domain as tainted (`custom-ga-command`).
//!
//! libvirt synchronizes with the agent itself. It reports a command that the agent refuses as an internal error, with the
//! agent's text at the end (src/qemu/qemu_agent.c, `qemuAgentCheckError`).
//!
//! Limits: libvirt waits up to five seconds for its synchronization, whatever the time limit of the command
//! (`QEMU_AGENT_WAIT_TIME`). If the agent hangs, its other clients may wait so long after this session has ended.

use super::{Connection, DomainHandle, LibvirtError, PROC_CONNECT_CLOSE, QEMU_PROC_DOMAIN_AGENT_COMMAND};
use super::{QEMU_PROGRAM, XdrReader, XdrWriter, open_domain};
use crate::LiveHost;
use crate::guest_agent::{AgentChannelSession, CommandError, MAX_LINE_BYTES, command_text};
use pagefold_base::{Absent, ProcessId, Reading};
use serde_json::Value;
use std::io::{ErrorKind, Write};
use std::time::{Duration, Instant};

/// `VIR_ERR_INTERNAL_ERROR` (include/libvirt/virterror.h).
const INTERNAL_ERROR: u32 = 1;

/// `VIR_ERR_AGENT_UNRESPONSIVE`.
const AGENT_UNRESPONSIVE: u32 = 86;

/// The agent of a domain.
pub(crate) struct DomainAgent {
    connection: Connection,
    domain: DomainHandle,
    timeout: Duration,
    /// Whether an answer did not come in time, for this session or for libvirt.
    is_unresponsive: bool,
}

/// Connects to libvirt for the agent of the domain that a process runs. Nothing is sent to the agent yet.
///
/// # Errors
/// As [`open_domain`], but `NoAnswer` in place of `NotAsked`.
pub(crate) fn open(host: &LiveHost, process: ProcessId, timeout: Duration) -> Reading<DomainAgent> {
    let opened = open_domain(host, process, timeout).map_err(|why| match why {
        // The agent may be asked, but this fails.
        Absent::NotAsked(why) => Absent::NoAnswer(why),
        why => why,
    });
    let (connection, domain) = opened?;
    Ok(DomainAgent { connection, domain, timeout, is_unresponsive: false })
}

impl DomainAgent {
    /// `qemu_domain_agent_command_args`: domain, command, seconds, flags.
    fn arguments(&self, command: &str, arguments: &Value) -> Vec<u8> {
        let seconds = self.remaining_time().as_millis().div_ceil(1000).max(1) as u32;
        let mut content = XdrWriter::default();
        content.put_domain(&self.domain);
        content.put_bytes(command_text(command, arguments).as_bytes());
        content.put_number(seconds);
        content.put_number(0);
        content.0
    }

    fn explain(&mut self, error: LibvirtError, command: &str) -> CommandError {
        let why = match error {
            LibvirtError::Refused { text, code: INTERNAL_ERROR } => {
                let reason = text.split_once(&format!("'{command}': ")).map(|(_, reason)| reason.to_owned());
                return CommandError::Refused(reason.unwrap_or(text));
            }
            LibvirtError::Io(source) if matches!(source.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                self.is_unresponsive = true;
                format!(
                    "nothing within {} ms through libvirt: the agent hangs, or another program uses it",
                    self.timeout.as_millis()
                )
            }
            error => {
                self.is_unresponsive |= matches!(error, LibvirtError::Refused { code: AGENT_UNRESPONSIVE, .. });
                error.excerpt()
            }
        };
        CommandError::SessionFailed(Absent::NoAnswer(why))
    }
}

impl AgentChannelSession for DomainAgent {
    fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value, CommandError> {
        let content = self.arguments(command, arguments);
        let answer = self.connection.call_program(QEMU_PROGRAM, QEMU_PROC_DOMAIN_AGENT_COMMAND, &content);
        answer.and_then(|answer| parse_result(&answer)).map_err(|error| self.explain(error, command))
    }

    fn remaining_time(&self) -> Duration {
        self.connection.deadline.saturating_duration_since(Instant::now())
    }

    /// While libvirt still waits for the agent, another command would wait behind it in another thread of libvirt.
    fn send_without_answer(&mut self, command: &str, arguments: &Value) {
        if self.is_unresponsive {
            return;
        }
        let content = self.arguments(command, arguments);
        let message = self.connection.next_call(QEMU_PROGRAM, QEMU_PROC_DOMAIN_AGENT_COMMAND, &content);
        let stream = &mut self.connection.stream;
        let _ = stream.set_nonblocking(true).and_then(|()| stream.write(&message));
    }
}

impl Drop for DomainAgent {
    /// Says goodbye, within the time of the session.
    fn drop(&mut self) {
        let _ = self.connection.call(PROC_CONNECT_CLOSE, &[]);
    }
}

/// `qemu_domain_agent_command_ret`: the agent's whole answer, which may be absent.
fn parse_result(content: &[u8]) -> Result<Value, LibvirtError> {
    let mut content = XdrReader(content);
    if content.take_number()? != 1 {
        return Err(LibvirtError::Malformed("no answer of the agent"));
    }
    let answer = content.take_bytes()?;
    if answer.len() > MAX_LINE_BYTES {
        return Err(LibvirtError::Malformed("an answer of the agent that is too long"));
    }
    let mut answer: Value =
        serde_json::from_slice(answer).map_err(|_| LibvirtError::Malformed("no JSON of the agent"))?;
    let result = answer.get_mut("return").ok_or(LibvirtError::Malformed("no result of the agent"))?;
    Ok(result.take())
}

#[cfg(test)]
mod tests;
