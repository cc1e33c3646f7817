//! The daemon's HTTP server: read access to a [`StatusBoard`].
//!
//! | path | content |
//! |---|---|
//! | `/` | the page |
//! | `/metrics` | the status as metrics, in OpenMetrics if the request accepts it, else in Prometheus' text format |
//! | `/api/status` | the status as JSON |
//! | `/api/history?since=` | history points after a time (seconds since 1970) as JSON |
//! | `/api/events` | each new status, as server-sent events |
//!
//! Only GET is allowed. A request is only compared with these paths: the server opens no file, decodes nothing and
//! reads no body. All resources are limited. A request head may have [`MAX_HEAD_BYTES`] and take [`MAX_READ_TIME`]; an
//! answer may take [`MAX_SEND_TIME`], however slow the peer is. One thread reads the heads of up to
//! [`MAX_PENDING_CONNECTIONS`] connections; beyond that the oldest one is dropped. Up to [`MAX_CONNECTIONS`] are
//! answered at a time, each by a thread. At most [`MAX_EVENT_STREAMS`] of these may be event streams; further streams
//! are refused. If more requests wait, `/metrics` comes first, which liveness probes request. The oldest answer is cut
//! off once it has taken [`MAX_RESPONSE_TIME_UNDER_LOAD`].
//!
//! Any client that can connect can read, so a server belongs on loopback. A page of another site that a browser loads
//! from this address (DNS rebinding) is refused by its host name. A client that can connect can also delay other
//! clients. There is no TLS and no password: for other addresses than loopback, use a proxy that has both.

mod request;
mod request_queue;
mod response;
mod routes;
mod slots;

use crate::board::StatusBoard;
use request_queue::{ReceivedRequest, RequestQueue};
use response::HttpResponse;
use routes::RouteReply;
use rustix::net::Shutdown;
use slots::{ResponseSlot, ResponseSlots};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

pub use request::{MAX_HEAD_BYTES, MAX_HEADER_FIELDS};
pub use request_queue::{MAX_PENDING_CONNECTIONS, MAX_READ_TIME};
pub use response::MAX_SEND_TIME;
pub use slots::MAX_RESPONSE_TIME_UNDER_LOAD;

/// The maximum number of connections answered at a time.
pub const MAX_CONNECTIONS: usize = 64;

/// The maximum number of requests that wait for a slot; more are dropped.
const MAX_WAITING_REQUESTS: usize = 1024;

/// The poll interval for a free slot while requests wait for one, and otherwise.
const SLOT_POLL_INTERVAL: Duration = Duration::from_millis(10);
const IDLE_POLL_INTERVAL: Duration = Duration::from_secs(60);

/// How many of these connections may be event streams.
pub const MAX_EVENT_STREAMS: usize = 32;

/// The stack of a connection's thread: it only needs a few buffers.
const THREAD_STACK_BYTES: usize = 128 << 10;

/// A server, which ends when this is dropped.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    shared: Arc<ServerState>,
    accept_thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct ServerState {
    listener: TcpListener,
    /// Host names that requests may use besides addresses and `localhost`.
    host_names: Vec<String>,
    board: Arc<StatusBoard>,
    slots: Arc<ResponseSlots>,
    closed: AtomicBool,
}

impl Server {
    /// Serve a board at an address; port 0 selects a free port. Requests may name the server by these names besides its
    /// address and `localhost`.
    ///
    /// # Errors
    /// The server cannot listen at the address, or cannot start a thread.
    pub fn start(address: SocketAddr, host_names: Vec<String>, board: Arc<StatusBoard>) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        let address = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        let slots = Arc::new(ResponseSlots::new(MAX_CONNECTIONS, MAX_EVENT_STREAMS));
        let shared = Arc::new(ServerState { listener, host_names, board, slots, closed: AtomicBool::new(false) });
        let accept_thread = thread::Builder::new().name("http".to_owned()).stack_size(THREAD_STACK_BYTES).spawn({
            let shared = Arc::clone(&shared);
            move || run_accept_loop(&shared)
        })?;
        Ok(Self { address, shared, accept_thread: Some(accept_thread) })
    }

    /// The address at which it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Server {
    /// Refuse further connections. Existing ones end within their limits, streams when the board closes.
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Relaxed);
        // On Linux this ends a wait for connections.
        let _ = rustix::net::shutdown(&self.shared.listener, Shutdown::Both);
        if let Some(accept_thread) = self.accept_thread.take() {
            let _ = accept_thread.join();
        }
    }
}

/// Accept connections, read their requests and have them answered, until the server is dropped.
fn run_accept_loop(shared: &Arc<ServerState>) {
    let (mut queue, mut waiting) = (RequestQueue::new(), Vec::new());
    while !shared.closed.load(Ordering::Relaxed) {
        let pause = if waiting.is_empty() { IDLE_POLL_INTERVAL } else { SLOT_POLL_INTERVAL };
        queue.wait_for_requests(&shared.listener, &shared.host_names, pause, &mut waiting);
        waiting.sort_by_key(request_priority);
        waiting.truncate(MAX_WAITING_REQUESTS);
        let mut remaining = Vec::new();
        for (stream, request) in waiting.drain(..) {
            let stream = Arc::new(stream);
            match if remaining.is_empty() { shared.slots.acquire(&stream) } else { None } {
                Some(slot) => spawn_response(stream, request, slot, shared),
                None => remaining.extend(Arc::into_inner(stream).map(|stream| (stream, request))),
            }
        }
        waiting = remaining;
    }
}

/// The order of answers: scrapes first, then other requests in order of arrival, refusals last.
fn request_priority((_, request): &ReceivedRequest) -> u8 {
    match request {
        Ok(request) if request.path == "/metrics" => 0,
        Ok(_) => 1,
        Err(_) => 2,
    }
}

/// Answer on a separate thread. If none can be started, the connection is dropped.
fn spawn_response(
    stream: Arc<TcpStream>,
    request: Result<request::HttpRequest, HttpResponse>,
    slot: ResponseSlot,
    shared: &Arc<ServerState>,
) {
    let shared = Arc::clone(shared);
    let _ = thread::Builder::new().name("http".to_owned()).stack_size(THREAD_STACK_BYTES).spawn(move || {
        let reply = match request {
            Ok(request) => routes::route(&request, &shared.board),
            Err(refusal) => RouteReply::Response(refusal),
        };
        // Errors concern only this peer.
        let _ = send_reply(&stream, reply, &slot, &shared.board);
    });
}

fn send_reply(stream: &TcpStream, reply: RouteReply, slot: &ResponseSlot, board: &StatusBoard) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    match reply {
        RouteReply::Response(answer) => answer.send(stream),
        RouteReply::EventStream if slot.reserve_event_stream() => response::send_events(stream, board),
        RouteReply::EventStream => HttpResponse::refusal(503, "too many event streams").send(stream),
    }
}
