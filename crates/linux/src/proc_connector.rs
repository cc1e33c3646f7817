//! Reports programs when they start, with the process connector (drivers/connector/cn_proc.c; CONFIG_PROC_EVENTS).
//!
//! The kernel sends an event for each execve(2) to its listeners. Other events are filtered out, so a process that
//! forks constantly costs nothing. Kernels before 6.6 send all events, and the buffer limits how many are received.
//! Events that do not fit are reported as lost.
//!
//! It needs CAP_NET_ADMIN, the initial network namespace (the protocol is not registered in others) and the initial PID
//! namespace, to which the PIDs in the events belong. In another PID namespace the kernel does not answer.

use crate::absence_reason;
use pagefold_base::{Absent, Reading};
use pagefold_host::parse::{self, ProcEvent, ProcRequest};
use pagefold_host::{ExecEvents, StartedPrograms};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::netlink::{CONNECTOR, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use rustix::net::{bind, recvfrom, send, socket_with, sockopt};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// `CN_IDX_PROC`, as a group mask.
const PROC_MULTICAST_GROUP: u32 = 1;

/// Bytes of waiting events; each takes about 800 of them.
const RECEIVE_BUFFER_BYTES: usize = 1 << 20;

/// The maximum number of events received in one call. More remain in the buffer.
const MAX_EVENTS_PER_CALL: usize = 4096;

/// How long the kernel may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);

/// A socket of the process connector.
pub struct ProcConnector {
    socket: OwnedFd,
}

impl ProcConnector {
    /// Start to listen. `Denied` without the privilege, `NotOnThisKernel` if the kernel does not send events to this
    /// process.
    pub fn open() -> Reading<Self> {
        let to_absent = |errno: Errno| match errno {
            Errno::PROTONOSUPPORT | Errno::NOENT => Absent::NotOnThisKernel,
            Errno::PERM | Errno::ACCESS => Absent::Denied,
            errno => absence_reason(&errno.into()),
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, Some(CONNECTOR)).map_err(to_absent)?;
        bind(&socket, &SocketAddrNetlink::new(0, PROC_MULTICAST_GROUP)).map_err(to_absent)?;
        // With the default buffer more events are lost, and reported as lost.
        let _ = sockopt::set_socket_recv_buffer_size_force(&socket, RECEIVE_BUFFER_BYTES);
        let connector = Self { socket };
        // The kernel does not answer a request for selected events. If it does not answer the general one, no event
        // will arrive.
        let request_number = std::process::id();
        connector.send_request(ProcRequest::Listen, request_number).map_err(to_absent)?;
        connector.wait_for_answer(request_number)?;
        connector.send_request(ProcRequest::ListenFor(parse::PROC_EVENT_EXEC), request_number).map_err(to_absent)?;
        Ok(connector)
    }

    fn send_request(&self, request: ProcRequest, request_number: u32) -> Result<(), Errno> {
        send(&self.socket, &parse::encode_proc_request(request, request_number), SendFlags::empty()).map(drop)
    }

    fn wait_for_answer(&self, request_number: u32) -> Reading<()> {
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        while Instant::now() < deadline {
            match self.receive_event() {
                Ok(Some(ProcEvent::Ack { request, error: 0 })) if request == request_number => return Ok(()),
                Ok(Some(ProcEvent::Ack { request, .. })) if request == request_number => return Err(Absent::Denied),
                // Events lost here are from programs that started before anything is reported.
                Ok(Some(_)) | Err(Errno::NOBUFS) => {}
                Ok(None) => {
                    let timeout = deadline.saturating_duration_since(Instant::now());
                    let timeout = timeout.try_into().map_err(|_| Absent::NotOnThisKernel)?;
                    // The result does not matter: the answer has arrived or not.
                    let _ = poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&timeout));
                }
                Err(errno) => return Err(absence_reason(&errno.into())),
            }
        }
        Err(Absent::NotOnThisKernel)
    }

    /// The next event, if there is one. Messages that are not from the kernel are ignored.
    fn receive_event(&self) -> Result<Option<ProcEvent>, Errno> {
        let mut datagram = [0; 256];
        match recvfrom(&self.socket, &mut datagram[..], RecvFlags::empty()) {
            Ok((length, _, from)) => {
                let from = from.and_then(|from| SocketAddrNetlink::try_from(from).ok());
                let kernel = from.is_some_and(|from| from.pid() == 0);
                let event = parse::proc_event(&datagram[..length]).ok().filter(|_| kernel);
                Ok(Some(event.unwrap_or(ProcEvent::Other)))
            }
            Err(Errno::AGAIN) => Ok(None),
            Err(Errno::INTR) => Ok(Some(ProcEvent::Other)),
            Err(errno) => Err(errno),
        }
    }
}

impl ExecEvents for ProcConnector {
    fn take_started(&mut self) -> Reading<StartedPrograms> {
        let mut begun = StartedPrograms::default();
        for _ in 0..MAX_EVENTS_PER_CALL {
            match self.receive_event() {
                Ok(Some(ProcEvent::Exec(pid))) => drop(begun.pids.insert(pid)),
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(Errno::NOBUFS) => begun.overflowed = true,
                Err(errno) => return Err(absence_reason(&errno.into())),
            }
        }
        Ok(begun)
    }
}

impl Drop for ProcConnector {
    fn drop(&mut self) {
        // Kernels before 6.6 count the listeners, and do not notice that one has gone.
        let _ = self.send_request(ProcRequest::Ignore, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::Pid;
    use std::process::Command;

    /// Each started program is reported; forks and exits are not.
    #[test]
    fn started_programs_are_reported_once() {
        let mut connector = match ProcConnector::open() {
            Ok(connector) => connector,
            Err(why) => return eprintln!("skipped: the process connector is {why}"),
        };
        let mut child = Command::new("true").spawn().unwrap();
        let pid = Pid(child.id());
        child.wait().unwrap();
        assert!(connector.take_started().unwrap().pids.contains(&pid), "it started before it ended");
        let begun = connector.take_started().unwrap();
        assert!(!begun.pids.contains(&pid), "it is reported once");
    }

    /// Events that do not fit are reported as lost, and later events are reported again.
    #[test]
    fn lost_exec_events_are_reported() {
        let Ok(mut connector) = ProcConnector::open() else { return eprintln!("skipped: no process connector") };
        sockopt::set_socket_recv_buffer_size(&connector.socket, 1).unwrap();
        for _ in 0..20 {
            assert!(Command::new("true").status().unwrap().success());
        }
        assert!(connector.take_started().unwrap().overflowed);
        let mut child = Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        assert!(connector.take_started().unwrap().pids.contains(&Pid(child.id())));
    }
}
