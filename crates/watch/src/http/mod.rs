//! The daemon's HTTP: what a [`StatusBoard`] shows, to read.
//!
//! | path | what |
//! |---|---|
//! | `/` | the page |
//! | `/metrics` | the status as metrics, in OpenMetrics where the request accepts it, else in Prometheus' older text format |
//! | `/api/status` | the status as JSON |
//! | `/api/history?since=` | points of the past after a moment (seconds since 1970) as JSON |
//! | `/api/events` | each status as it comes, as server-sent events |
//!
//! There is nothing but to GET. A request is compared with these paths and that is all: no file is opened, nothing is
//! decoded and no body is taken. Everything is bounded: a head to [`MAX_HEAD_BYTES`] in [`MAX_READ_TIME`], an answer to
//! [`MAX_SEND_TIME`] however slowly it is taken. One thread reads the heads of up to [`MAX_PENDING_CONNECTIONS`] connections; beyond that the
//! oldest of them is dropped. Up to [`MAX_CONNECTIONS`] are answered at a time, each by a thread, of which [`MAX_EVENT_STREAMS`] may be
//! streams of events; a stream too many is refused. Where more requests wait, `/metrics` comes first, which is what
//! probes of liveness ask for, and the oldest answer is cut off once it has taken [`MAX_RESPONSE_TIME_UNDER_LOAD`].
//!
//! Whoever can connect can read, so a server belongs on loopback, and a page of another site that a browser has been
//! made to load from this address (DNS rebinding) is refused by its name. Who can connect can also keep others waiting.
//! There is no TLS and no password: for more than loopback, put a proxy before it that has them.

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

/// Connections that are answered at a time.
pub const MAX_CONNECTIONS: usize = 64;

/// Requests that wait for a place at most: more are dropped.
const MAX_WAITING_REQUESTS: usize = 1024;

/// Between two looks for a free place while requests wait for one, and between two looks otherwise.
const SLOT_POLL_INTERVAL: Duration = Duration::from_millis(10);
const IDLE_POLL_INTERVAL: Duration = Duration::from_secs(60);

/// How many of them may be streams of events.
pub const MAX_EVENT_STREAMS: usize = 32;

/// The stack of a connection's thread: it holds no more than a few buffers.
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
    /// Host names that requests may name beside addresses and `localhost`.
    host_names: Vec<String>,
    board: Arc<StatusBoard>,
    slots: Arc<ResponseSlots>,
    closed: AtomicBool,
}

impl Server {
    /// Serve a board at an address; port 0 stands for any that is free. Requests may name the server by these names
    /// beside its address and `localhost`.
    ///
    /// # Errors
    /// The address cannot be listened at, or no thread is to be had.
    pub fn start(address: SocketAddr, host_names: Vec<String>, board: Arc<StatusBoard>) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        let address = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        let places = Arc::new(ResponseSlots::new(MAX_CONNECTIONS, MAX_EVENT_STREAMS));
        let shared =
            Arc::new(ServerState { listener, host_names, board, slots: places, closed: AtomicBool::new(false) });
        let accepting = thread::Builder::new().name("http".to_owned()).stack_size(THREAD_STACK_BYTES).spawn({
            let shared = Arc::clone(&shared);
            move || run_accept_loop(&shared)
        })?;
        Ok(Self { address, shared, accept_thread: Some(accepting) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Server {
    /// Refuse further connections. Those that are there end within their limits, streams at the closing of the board.
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Relaxed);
        // On Linux this ends a wait for connections.
        let _ = rustix::net::shutdown(&self.shared.listener, Shutdown::Both);
        if let Some(accepting) = self.accept_thread.take() {
            let _ = accepting.join();
        }
    }
}

/// Take in connections and their requests, and have them answered, until the server is dropped.
fn run_accept_loop(shared: &Arc<ServerState>) {
    let (mut queue, mut waiting) = (RequestQueue::new(), Vec::new());
    while !shared.closed.load(Ordering::Relaxed) {
        let pause = if waiting.is_empty() { IDLE_POLL_INTERVAL } else { SLOT_POLL_INTERVAL };
        queue.wait_for_requests(&shared.listener, &shared.host_names, pause, &mut waiting);
        waiting.sort_by_key(request_priority);
        waiting.truncate(MAX_WAITING_REQUESTS);
        let mut left = Vec::new();
        for (stream, request) in waiting.drain(..) {
            let stream = Arc::new(stream);
            match if left.is_empty() { shared.slots.acquire(&stream) } else { None } {
                Some(place) => spawn_response(stream, request, place, shared),
                None => left.extend(Arc::into_inner(stream).map(|stream| (stream, request))),
            }
        }
        waiting = left;
    }
}

/// What is answered first: a scrape, then other requests in the order in which they came, refusals last.
fn request_priority((_, request): &ReceivedRequest) -> u8 {
    match request {
        Ok(request) if request.path == "/metrics" => 0,
        Ok(_) => 1,
        Err(_) => 2,
    }
}

/// Answer on a thread of its own. Where none is to be had, the connection is dropped.
fn spawn_response(
    stream: Arc<TcpStream>,
    request: Result<request::HttpRequest, HttpResponse>,
    place: ResponseSlot,
    shared: &Arc<ServerState>,
) {
    let shared = Arc::clone(shared);
    let _ = thread::Builder::new().name("http".to_owned()).stack_size(THREAD_STACK_BYTES).spawn(move || {
        let reply = match request {
            Ok(request) => routes::route(&request, &shared.board),
            Err(refusal) => RouteReply::Response(refusal),
        };
        // Whatever goes wrong with a peer is the peer's.
        let _ = send_reply(&stream, reply, &place, &shared.board);
    });
}

fn send_reply(stream: &TcpStream, reply: RouteReply, place: &ResponseSlot, board: &StatusBoard) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    match reply {
        RouteReply::Response(answer) => answer.send(stream),
        RouteReply::EventStream if place.reserve_event_stream() => response::send_events(stream, board),
        RouteReply::EventStream => HttpResponse::refusal(503, "too many streams of events").send(stream),
    }
}
