//! Answers: complete ones with their length, and the event stream.

use crate::board::StatusBoard;
use crate::page;
use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a peer may take to receive an answer or an event.
pub const MAX_SEND_TIME: Duration = Duration::from_secs(10);

/// The interval of heartbeats in an event stream without news. They detect a peer that has gone.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(15);

/// How many bytes a refused peer may still send, so that it receives the answer, and for how long.
const MAX_DRAIN_BYTES: usize = 2 << 20;
const MAX_DRAIN_TIME: Duration = Duration::from_secs(1);

/// An answer to a request.
#[derive(Debug)]
pub struct HttpResponse {
    /// The status code.
    pub status: u16,
    media_type: &'static str,
    body: ResponseBody,
}

#[derive(Debug)]
enum ResponseBody {
    Fixed(&'static str),
    Shared(Arc<str>),
    Owned(String),
}

impl HttpResponse {
    /// The page.
    pub fn page() -> Self {
        Self { status: 200, media_type: "text/html; charset=utf-8", body: ResponseBody::Fixed(page::PAGE_HTML) }
    }

    /// A JSON document.
    pub fn json(text: Arc<str>) -> Self {
        Self { status: 200, media_type: "application/json", body: ResponseBody::Shared(text) }
    }

    /// Text of this media type.
    pub fn text(media_type: &'static str, text: String) -> Self {
        Self { status: 200, media_type, body: ResponseBody::Owned(text) }
    }

    /// A refusal: the status and the reason.
    pub fn refusal(status: u16, why: &str) -> Self {
        Self {
            status,
            media_type: "text/plain; charset=utf-8",
            body: ResponseBody::Owned(format!("{status}: {why}\n")),
        }
    }

    /// Send it, and end the connection.
    ///
    /// # Errors
    /// The peer has closed the connection or takes too long.
    pub fn send(&self, stream: &TcpStream) -> io::Result<()> {
        let body = match &self.body {
            ResponseBody::Fixed(text) => text,
            ResponseBody::Shared(text) => &**text,
            ResponseBody::Owned(text) => text.as_str(),
        };
        let mut head = response_head(self.status, self.media_type);
        match self.status {
            405 => head.push_str("Allow: GET\r\n"),
            503 => head.push_str("Retry-After: 2\r\n"),
            _ => {}
        }
        let _ = write!(head, "Content-Length: {}\r\n\r\n", body.len());
        send_all(stream, head.as_bytes())?;
        send_all(stream, body.as_bytes())?;
        drain_peer(stream)
    }
}

/// Send each status when it is published, as server-sent events, until the peer closes the connection or the board is
/// closed.
///
/// # Errors
/// The peer has closed the connection or takes too long.
pub fn send_events(stream: &TcpStream, board: &StatusBoard) -> io::Result<()> {
    send_all(stream, format!("{}\r\nretry: 2000\n\n", response_head(200, "text/event-stream")).as_bytes())?;
    let mut last_number = 0;
    while !board.is_closed() {
        match board.wait_for_newer(last_number, HEARTBEAT_INTERVAL) {
            Some(published) => {
                last_number = published.number;
                send_all(stream, format!("id: {last_number}\nevent: status\ndata: {}\n\n", published.json).as_bytes())?;
            }
            None => send_all(stream, b":\n\n")?,
        }
    }
    Ok(())
}

/// The status line and the fields that all answers have.
fn response_head(status: u16, kind: &str) -> String {
    let phrase = match status {
        200 => "OK",
        400 => "Bad Request",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        421 => "Misdirected Request",
        431 => "Request Header Fields Too Large",
        503 => "Service Unavailable",
        // The reason phrase is optional (RFC 9112, 4).
        _ => "",
    };
    format!(
        "HTTP/1.1 {status} {phrase}\r\nContent-Type: {kind}\r\nConnection: close\r\nCache-Control: no-store\r\n\
         Content-Security-Policy: {}\r\nX-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY\r\n\
         Referrer-Policy: no-referrer\r\nCross-Origin-Resource-Policy: same-origin\r\n",
        page::CONTENT_SECURITY_POLICY
    )
}

/// Send bytes within [`MAX_SEND_TIME`], however slow the peer is.
fn send_all(mut stream: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    let deadline = Instant::now() + MAX_SEND_TIME;
    while !bytes.is_empty() {
        let remaining = deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_write_timeout(Some(remaining))?;
        match stream.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(sent) => bytes = &bytes[sent..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Read what the peer still sends. Closing earlier would reset the connection, and the peer could lose the answer.
fn drain_peer(mut stream: &TcpStream) -> io::Result<()> {
    stream.shutdown(Shutdown::Write)?;
    let deadline = Instant::now() + MAX_DRAIN_TIME;
    let mut chunk = [0; 8 << 10];
    let mut read = 0;
    while read < MAX_DRAIN_BYTES {
        let remaining = deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            break;
        }
        stream.set_read_timeout(Some(remaining))?;
        match stream.read(&mut chunk)? {
            0 => break,
            count => read += count,
        }
    }
    Ok(())
}
