//! Connections with incomplete requests. One thread polls all of them, so a slow connection costs a descriptor but no
//! thread. If there are too many, the one that has waited longest is dropped.

use super::request::{HttpRequest, PartialRequest};
use super::response::HttpResponse;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// How long a request may take to arrive.
pub const MAX_READ_TIME: Duration = Duration::from_secs(5);

/// The maximum number of connections with incomplete requests.
pub const MAX_PENDING_CONNECTIONS: usize = 512;

/// The maximum number of connections accepted before existing ones are polled.
const MAX_ACCEPTS_PER_POLL: usize = 64;

/// A connection, with its request or the refusal of an invalid one.
pub type ReceivedRequest = (TcpStream, Result<HttpRequest, HttpResponse>);

/// A connection.
#[derive(Debug)]
struct PendingConnection {
    stream: TcpStream,
    head: PartialRequest,
    deadline: Instant,
}

/// All pending connections, the oldest first.
#[derive(Debug)]
pub struct RequestQueue {
    pending: VecDeque<PendingConnection>,
    max_pending: usize,
}

impl RequestQueue {
    /// An empty queue. It uses at most a quarter of the descriptors that this process may have.
    pub fn new() -> Self {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let max_pending = limit.map_or(MAX_PENDING_CONNECTIONS, |limit| {
            usize::try_from(limit / 4).unwrap_or(MAX_PENDING_CONNECTIONS).clamp(1, MAX_PENDING_CONNECTIONS)
        });
        Self { pending: VecDeque::new(), max_pending }
    }

    /// Wait until something happens, at most this long; then accept new connections and read available bytes. Complete
    /// requests, and refusals of invalid ones, go to `received`.
    pub fn wait_for_requests(
        &mut self,
        listener: &TcpListener,
        host_names: &[String],
        max_wait: Duration,
        received: &mut Vec<ReceivedRequest>,
    ) {
        let now = Instant::now();
        let until_deadline =
            self.pending.front().map_or(max_wait, |oldest| oldest.deadline.saturating_duration_since(now));
        let timeout = Timespec::try_from(until_deadline.min(max_wait)).unwrap_or_default();
        let streams = self.pending.iter().map(|connection| PollFd::new(&connection.stream, PollFlags::IN));
        let mut polled: Vec<PollFd<'_>> = [PollFd::new(listener, PollFlags::IN)].into_iter().chain(streams).collect();
        match poll(&mut polled, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            // Probably out of memory: retrying at once would not help.
            Err(_) => std::thread::sleep(Duration::from_millis(100)),
        }
        let ready: Vec<bool> = polled.iter().map(|polled| !polled.revents().is_empty()).collect();
        drop(polled);
        let now = Instant::now();
        let connections = std::mem::take(&mut self.pending);
        for (connection, ready) in connections.into_iter().zip(&ready[1..]) {
            self.read_request(connection, *ready, now, host_names, received);
        }
        if ready[0] {
            self.accept_connections(listener, host_names, received);
        }
    }

    /// Read the available bytes of a request.
    fn read_request(
        &mut self,
        mut connection: PendingConnection,
        ready: bool,
        now: Instant,
        names: &[String],
        received: &mut Vec<ReceivedRequest>,
    ) {
        match if ready { connection.head.read(&connection.stream, names) } else { Ok(None) } {
            Ok(Some(Some(request))) => received.push((connection.stream, Ok(request))),
            // The peer closed the connection without sending anything.
            Ok(Some(None)) => {}
            Ok(None) if now >= connection.deadline => {
                received.push((connection.stream, Err(HttpResponse::refusal(408, "the request took too long"))));
            }
            Ok(None) => self.pending.push_back(connection),
            Err(refusal) => received.push((connection.stream, Err(refusal))),
        }
    }

    fn accept_connections(&mut self, listener: &TcpListener, names: &[String], received: &mut Vec<ReceivedRequest>) {
        for _ in 0..MAX_ACCEPTS_PER_POLL {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // The peer closed the connection at once.
                Err(error) if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted) => continue,
                // Out of descriptors or memory, or the server ends.
                Err(_) => {
                    if self.pending.pop_front().is_none() {
                        std::thread::sleep(Duration::from_millis(100));
                    }
                    return;
                }
            };
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            if self.pending.len() >= self.max_pending {
                self.pending.pop_front();
            }
            let now = Instant::now();
            let connection =
                PendingConnection { stream, head: PartialRequest::default(), deadline: now + MAX_READ_TIME };
            // Most requests arrive together with their connection.
            self.read_request(connection, true, now, names, received);
        }
    }
}
