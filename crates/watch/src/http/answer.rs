//! Answers: whole ones with their length, and the stream of events.

use crate::board::Board;
use crate::page;
use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a peer may take to receive an answer, or an event.
pub const SENDING: Duration = Duration::from_secs(10);

/// How often a stream of events gives a sign of life where there is no news: then a peer that has gone is found out.
const HEARTBEAT: Duration = Duration::from_secs(15);

/// How much of what a refused peer still sends is read, so that it gets to see the answer, and how long at most.
const LINGER_BYTES: usize = 2 << 20;
const LINGER: Duration = Duration::from_secs(1);

/// An answer to a request.
#[derive(Debug)]
pub struct Answer {
    /// The status code.
    pub status: u16,
    kind: &'static str,
    body: Body,
}

#[derive(Debug)]
enum Body {
    Fixed(&'static str),
    Shared(Arc<str>),
    Owned(String),
}

impl Answer {
    /// The page.
    pub fn page() -> Self {
        Self { status: 200, kind: "text/html; charset=utf-8", body: Body::Fixed(page::HTML) }
    }

    /// A JSON document.
    pub fn json(text: Arc<str>) -> Self {
        Self { status: 200, kind: "application/json", body: Body::Shared(text) }
    }

    /// Text of this media type.
    pub fn text(kind: &'static str, text: String) -> Self {
        Self { status: 200, kind, body: Body::Owned(text) }
    }

    /// A refusal: the status and why.
    pub fn refusal(status: u16, why: &str) -> Self {
        Self { status, kind: "text/plain; charset=utf-8", body: Body::Owned(format!("{status}: {why}\n")) }
    }

    /// Send it, and end the connection.
    ///
    /// # Errors
    /// The peer has gone or takes too long.
    pub fn send(&self, stream: &TcpStream) -> io::Result<()> {
        let body = match &self.body {
            Body::Fixed(text) => text,
            Body::Shared(text) => &**text,
            Body::Owned(text) => text.as_str(),
        };
        let mut head = head(self.status, self.kind);
        match self.status {
            405 => head.push_str("Allow: GET\r\n"),
            503 => head.push_str("Retry-After: 2\r\n"),
            _ => {}
        }
        let _ = write!(head, "Content-Length: {}\r\n\r\n", body.len());
        send(stream, head.as_bytes())?;
        send(stream, body.as_bytes())?;
        linger(stream)
    }
}

/// Send each status as it is published, as server-sent events, until the peer goes or the board is closed.
///
/// # Errors
/// The peer has gone or takes too long.
pub fn events(stream: &TcpStream, board: &Board) -> io::Result<()> {
    send(stream, format!("{}\r\nretry: 2000\n\n", head(200, "text/event-stream")).as_bytes())?;
    let mut seen = 0;
    while !board.is_closed() {
        match board.newer(seen, HEARTBEAT) {
            Some(sheet) => {
                seen = sheet.number;
                send(stream, format!("id: {seen}\nevent: status\ndata: {}\n\n", sheet.json).as_bytes())?;
            }
            None => send(stream, b":\n\n")?,
        }
    }
    Ok(())
}

/// The status line and the fields that all answers have.
fn head(status: u16, kind: &str) -> String {
    let phrase = match status {
        200 => "OK",
        400 => "Bad Request",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        421 => "Misdirected Request",
        431 => "Request Header Fields Too Large",
        503 => "Service Unavailable",
        // Any three digits may go without a phrase (RFC 9112, 4).
        _ => "",
    };
    format!(
        "HTTP/1.1 {status} {phrase}\r\nContent-Type: {kind}\r\nConnection: close\r\nCache-Control: no-store\r\n\
         Content-Security-Policy: {}\r\nX-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY\r\n\
         Referrer-Policy: no-referrer\r\nCross-Origin-Resource-Policy: same-origin\r\n",
        page::POLICY
    )
}

/// Send bytes within [`SENDING`], however slowly the peer takes them.
fn send(mut stream: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    let until = Instant::now() + SENDING;
    while !bytes.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_write_timeout(Some(left))?;
        match stream.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(sent) => bytes = &bytes[sent..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Read what the peer still sends: to close on it would reset the connection, and take the answer away again.
fn linger(mut stream: &TcpStream) -> io::Result<()> {
    stream.shutdown(Shutdown::Write)?;
    let until = Instant::now() + LINGER;
    let mut chunk = [0; 8 << 10];
    let mut read = 0;
    while read < LINGER_BYTES {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut chunk)? {
            0 => break,
            more => read += more,
        }
    }
    Ok(())
}
