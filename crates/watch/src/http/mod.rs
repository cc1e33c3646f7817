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
//! [`SENDING`] however slowly it is taken, a server to [`CONNECTIONS`] at a time, of which [`STREAMS`] may be streams
//! of events. Who comes when there are so many waits in the kernel's queue; a stream too many is refused.
//!
//! Whoever can connect can read, so a server belongs on loopback, and a page of another site that a browser has been
//! made to load from this address (DNS rebinding) is refused by its name. Who can connect can also keep others waiting.
//! There is no TLS and no password: for more than loopback, put a proxy before it that has them.

mod answer;
mod request;
mod site;

use crate::board::Board;
use answer::Answer;
use request::Request;
use rustix::net::Shutdown;
use site::Reply;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

pub use answer::SENDING;
pub use request::{FIELDS, HEAD_BYTES};

/// Connections that are served at a time.
pub const CONNECTIONS: usize = 64;

/// How many of them may be streams of events.
pub const STREAMS: usize = 32;

/// How long a request may take to arrive.
pub const READING: Duration = Duration::from_secs(5);

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
    connections: Slots,
    streams: Slots,
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
        let (connections, streams) = (Slots::new(CONNECTIONS), Slots::new(STREAMS));
        let shared = Arc::new(Shared { listener, names, board, connections, streams });
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
        self.shared.connections.close();
        // On Linux this ends a wait in accept(2) with EINVAL.
        let _ = rustix::net::shutdown(&self.shared.listener, Shutdown::Both);
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
    }
}

fn accept(shared: &Arc<Shared>) {
    while shared.connections.take() {
        let slot = Slot { shared: Arc::clone(shared), of: |shared| &shared.connections };
        match shared.listener.accept() {
            Ok((stream, _)) => {
                // Where no thread is to be had, the connection is dropped.
                let _ = thread::Builder::new().name("http".to_owned()).stack_size(STACK).spawn(move || {
                    // Whatever goes wrong with a peer is the peer's.
                    let _ = serve(stream, &slot.shared);
                });
            }
            // Out of descriptors or memory, or the peer went at once: nothing that haste would mend.
            Err(_) => thread::sleep(Duration::from_millis(100)),
        }
    }
}

fn serve(mut stream: TcpStream, shared: &Arc<Shared>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let reply = match Request::read(&mut stream, Instant::now() + READING, &shared.names) {
        Ok(None) => return Ok(()),
        Ok(Some(request)) => site::reply(&request, &shared.board),
        Err(refusal) => Reply::Whole(refusal),
    };
    match reply {
        Reply::Whole(answer) => answer.send(&mut stream),
        Reply::Events if shared.streams.try_take() => {
            let _slot = Slot { shared: Arc::clone(shared), of: |shared| &shared.streams };
            answer::events(&mut stream, &shared.board)
        }
        Reply::Events => Answer::refusal(503, "too many streams of events").send(&mut stream),
    }
}

/// Places, of which there are so many.
#[derive(Debug)]
struct Slots {
    free: Mutex<Option<usize>>,
    change: Condvar,
}

impl Slots {
    fn new(count: usize) -> Self {
        Self { free: Mutex::new(Some(count)), change: Condvar::new() }
    }

    /// Take one as soon as there is one; false once they are closed.
    fn take(&self) -> bool {
        let free = self.change.wait_while(self.free(), |free| *free == Some(0));
        match &mut *free.unwrap_or_else(PoisonError::into_inner) {
            Some(free) => {
                *free -= 1;
                true
            }
            None => false,
        }
    }

    /// Take one if there is one.
    fn try_take(&self) -> bool {
        match &mut *self.free() {
            Some(0) | None => false,
            Some(free) => {
                *free -= 1;
                true
            }
        }
    }

    fn give_back(&self) {
        if let Some(free) = &mut *self.free() {
            *free += 1;
        }
        self.change.notify_one();
    }

    fn close(&self) {
        *self.free() = None;
        self.change.notify_all();
    }

    fn free(&self) -> MutexGuard<'_, Option<usize>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place that was taken, until it is dropped.
struct Slot {
    shared: Arc<Shared>,
    of: fn(&Shared) -> &Slots,
}

impl Drop for Slot {
    fn drop(&mut self) {
        (self.of)(&self.shared).give_back();
    }
}
