//! The daemon's HTTP: what a [`Board`] shows, to read.
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
//! decoded and no body is taken. Everything is bounded: a head to [`HEAD_BYTES`] in [`READING`], an answer to
//! [`SENDING`] however slowly it is taken. One thread reads the heads of up to [`ARRIVING`] connections; beyond that the
//! oldest of them is dropped. Up to [`CONNECTIONS`] are answered at a time, each by a thread, of which [`STREAMS`] may be
//! streams of events; a stream too many is refused. Where more requests wait, `/metrics` comes first, which is what
//! probes of liveness ask for, and the oldest answer is cut off once it has taken [`PRESSED`].
//!
//! Whoever can connect can read, so a server belongs on loopback, and a page of another site that a browser has been
//! made to load from this address (DNS rebinding) is refused by its name. Who can connect can also keep others waiting.
//! There is no TLS and no password: for more than loopback, put a proxy before it that has them.

mod answer;
mod arriving;
mod places;
mod request;
mod site;

use crate::board::Board;
use answer::Answer;
use arriving::{Arrived, Queue};
use places::{Place, Places};
use rustix::net::Shutdown;
use site::Reply;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

pub use answer::SENDING;
pub use arriving::{ARRIVING, READING};
pub use places::PRESSED;
pub use request::{FIELDS, HEAD_BYTES};

/// Connections that are answered at a time.
pub const CONNECTIONS: usize = 64;

/// Requests that wait for a place at most: more are dropped.
const WAITING: usize = 1024;

/// Between two looks for a free place while requests wait for one, and between two looks otherwise.
const SOON: Duration = Duration::from_millis(10);
const CALM: Duration = Duration::from_secs(60);

/// How many of them may be streams of events.
pub const STREAMS: usize = 32;

/// The stack of a connection's thread: it holds no more than a few buffers.
const STACK: usize = 128 << 10;

/// A server, which ends when this is dropped.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    listener: TcpListener,
    /// Host names that requests may name beside addresses and `localhost`.
    names: Vec<String>,
    board: Arc<Board>,
    places: Arc<Places>,
    closed: AtomicBool,
}

impl Server {
    /// Serve a board at an address; port 0 stands for any that is free. Requests may name the server by these names
    /// beside its address and `localhost`.
    ///
    /// # Errors
    /// The address cannot be listened at, or no thread is to be had.
    pub fn start(address: SocketAddr, names: Vec<String>, board: Arc<Board>) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        let address = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        let places = Arc::new(Places::new(CONNECTIONS, STREAMS));
        let shared = Arc::new(Shared { listener, names, board, places, closed: AtomicBool::new(false) });
        let accepting = thread::Builder::new().name("http".to_owned()).stack_size(STACK).spawn({
            let shared = Arc::clone(&shared);
            move || accept(&shared)
        })?;
        Ok(Self { address, shared, accepting: Some(accepting) })
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
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
    }
}

/// Take in connections and their requests, and have them answered, until the server is dropped.
fn accept(shared: &Arc<Shared>) {
    let (mut queue, mut waiting) = (Queue::new(), Vec::new());
    while !shared.closed.load(Ordering::Relaxed) {
        let pause = if waiting.is_empty() { CALM } else { SOON };
        queue.wait(&shared.listener, &shared.names, pause, &mut waiting);
        waiting.sort_by_key(rank);
        waiting.truncate(WAITING);
        let mut left = Vec::new();
        for (stream, request) in waiting.drain(..) {
            let stream = Arc::new(stream);
            match if left.is_empty() { shared.places.take(&stream) } else { None } {
                Some(place) => answer(stream, request, place, shared),
                None => left.extend(Arc::into_inner(stream).map(|stream| (stream, request))),
            }
        }
        waiting = left;
    }
}

/// What is answered first: a scrape, then other requests in the order in which they came, refusals last.
fn rank((_, request): &Arrived) -> u8 {
    match request {
        Ok(request) if request.path == "/metrics" => 0,
        Ok(_) => 1,
        Err(_) => 2,
    }
}

/// Answer on a thread of its own. Where none is to be had, the connection is dropped.
fn answer(stream: Arc<TcpStream>, request: Result<request::Request, Answer>, place: Place, shared: &Arc<Shared>) {
    let shared = Arc::clone(shared);
    let _ = thread::Builder::new().name("http".to_owned()).stack_size(STACK).spawn(move || {
        let reply = match request {
            Ok(request) => site::reply(&request, &shared.board),
            Err(refusal) => Reply::Whole(refusal),
        };
        // Whatever goes wrong with a peer is the peer's.
        let _ = serve(&stream, reply, &place, &shared.board);
    });
}

fn serve(stream: &TcpStream, reply: Reply, place: &Place, board: &Board) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    match reply {
        Reply::Whole(answer) => answer.send(stream),
        Reply::Events if place.stream() => answer::events(stream, board),
        Reply::Events => Answer::refusal(503, "too many streams of events").send(stream),
    }
}
