//! The server with real sockets: its answers, and its limits for peers.

mod common;

use common::{fixture_board, fixture_status, start_server};
use pagefold_history::points::HistoryResponse;
use pagefold_watch::StatusBoard;
use pagefold_watch::http::{MAX_CONNECTIONS, MAX_EVENT_STREAMS, Server};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// The timeout for any answer, far more than the server needs.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(120);

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).expect("the server listens");
    stream.set_read_timeout(Some(RESPONSE_TIMEOUT)).unwrap();
    stream.set_write_timeout(Some(RESPONSE_TIMEOUT)).unwrap();
    stream
}

/// Send these bytes and return the answer.
fn send(server: &Server, bytes: &[u8]) -> String {
    let mut stream = connect(server.address());
    // The server may have answered and closed before it has read everything.
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("an answer");
    String::from_utf8(answer).expect("text")
}

fn get(server: &Server, target: &str) -> String {
    send(server, format!("GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes())
}

fn status_code(answer: &str) -> u16 {
    answer
        .strip_prefix("HTTP/1.1 ")
        .and_then(|rest| rest.get(..3)?.parse().ok())
        .unwrap_or_else(|| panic!("{answer:?}"))
}

fn body(answer: &str) -> &str {
    answer.split_once("\r\n\r\n").expect("a head").1
}

fn has_field(answer: &str, field: &str) -> bool {
    answer.split_once("\r\n\r\n").expect("a head").0.lines().any(|line| line == field)
}

#[test]
fn all_paths_have_security_headers() {
    let server = start_server(&fixture_board());
    for (target, kind) in [
        ("/", "text/html; charset=utf-8"),
        ("/metrics", "text/plain; version=0.0.4; charset=utf-8"),
        ("/api/status", "application/json"),
        ("/api/history", "application/json"),
        ("/api/history?since=1.5", "application/json"),
    ] {
        let answer = get(&server, target);
        assert_eq!(status_code(&answer), 200, "{target}");
        let length = format!("Content-Length: {}", body(&answer).len());
        for field in [
            &format!("Content-Type: {kind}"),
            &length,
            "Connection: close",
            "Cache-Control: no-store",
            "X-Content-Type-Options: nosniff",
            "X-Frame-Options: DENY",
            "Cross-Origin-Resource-Policy: same-origin",
            "Referrer-Policy: no-referrer",
        ] {
            assert!(has_field(&answer, field), "{target} lacks {field}");
        }
        assert!(answer.contains("\r\nContent-Security-Policy: default-src 'none'; "), "{target}");
        assert!(!answer.to_ascii_lowercase().contains("access-control-allow"), "{target}");
    }
    let document: serde_json::Value = serde_json::from_str(body(&get(&server, "/api/status"))).unwrap();
    assert_eq!(document, serde_json::to_value(fixture_status()).unwrap());
}

#[test]
fn metrics_use_the_accepted_format() {
    let server = start_server(&fixture_board());
    let accept = "Accept: application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.3";
    let answer = send(&server, format!("GET /metrics HTTP/1.1\r\nHost: [::1]:9\r\n{accept}\r\n\r\n").as_bytes());
    assert!(has_field(&answer, "Content-Type: application/openmetrics-text; version=1.0.0; charset=utf-8"));
    assert!(answer.ends_with("\n# EOF\n"));
}

#[test]
fn only_the_page_is_served_before_a_status() {
    let server = start_server(&Arc::new(StatusBoard::default()));
    for target in ["/metrics", "/api/status"] {
        let answer = get(&server, target);
        assert_eq!(status_code(&answer), 503, "{target}");
        assert!(has_field(&answer, "Retry-After: 2"));
    }
    assert_eq!(status_code(&get(&server, "/")), 200);
    let history: HistoryResponse = serde_json::from_str(body(&get(&server, "/api/history"))).unwrap();
    assert_eq!(history.points, []);
}

#[test]
fn history_starts_at_the_since_time() {
    let board = fixture_board();
    let server = start_server(&board);
    let mut later = fixture_status();
    later.time += 5.0;
    board.publish(later.clone());
    let times = |target: &str| {
        let history: HistoryResponse = serde_json::from_str(body(&get(&server, target))).unwrap();
        history.points.iter().map(|point| point.time).collect::<Vec<_>>()
    };
    let first = fixture_status().time;
    assert_eq!(times("/api/history"), [first, later.time]);
    assert_eq!(times(&format!("/api/history?since={first}")), [later.time]);
    assert_eq!(times("/api/history?since=1e300"), [0.0; 0]);
    for target in ["/api/history?since=", "/api/history?since=soon", "/api/history?since=NaN", "/api/history?from=1"] {
        assert_eq!(status_code(&get(&server, target)), 400, "{target}");
    }
}

#[test]
fn unknown_paths_are_not_found() {
    let server = start_server(&fixture_board());
    for target in [
        "/../etc/passwd",
        "/../../../../etc/passwd",
        "/..%2f..%2fetc%2fpasswd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/metrics/../../etc/passwd",
        "//etc/passwd",
        "/etc/passwd",
        "/./",
        "/%00",
        "/metrics%00.html",
        "/metrics/",
        "/METRICS",
        "/api",
        "/api/",
        "/page.js",
        "/favicon.ico",
        "http://localhost/metrics",
        "file:///etc/passwd",
        "*",
    ] {
        let answer = get(&server, target);
        assert_eq!(status_code(&answer), 404, "{target}");
        assert!(!answer.contains("root:"), "{target}");
    }
    for target in ["/api/status?x=1", "/api/events?x"] {
        assert_eq!(status_code(&get(&server, target)), 400, "{target}");
    }
}

#[test]
fn only_get_is_allowed() {
    let server = start_server(&fixture_board());
    for method in ["POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "get"] {
        let request = format!("{method} /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nsome body");
        let answer = send(&server, request.as_bytes());
        assert_eq!(status_code(&answer), 405, "{method}");
        assert!(has_field(&answer, "Allow: GET"), "{method}");
    }
}

#[test]
fn foreign_hosts_are_refused() {
    let server = start_server(&fixture_board());
    let ask = |hosts: &str| status_code(&send(&server, format!("GET /api/status HTTP/1.1\r\n{hosts}\r\n").as_bytes()));
    for host in ["localhost", "127.0.0.1:9750", "[::1]", "192.0.2.7", "node17:9750"] {
        assert_eq!(ask(&format!("Host: {host}\r\n")), 200, "{host}");
    }
    for host in ["attacker.example", "attacker.example:9750", "localhost.attacker.example", "node18"] {
        assert_eq!(ask(&format!("Host: {host}\r\n")), 421, "{host}");
    }
    assert_eq!(ask(""), 400);
    assert_eq!(ask("Host: localhost\r\nHost: attacker.example\r\n"), 400);
}

#[test]
fn malformed_requests_are_refused() {
    let server = start_server(&fixture_board());
    for bytes in [
        &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n"[..],
        b"hello\r\n\r\n",
        b"GET / HTTP/2.0\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nbad name: x\r\n\r\n",
    ] {
        assert_eq!(status_code(&send(&server, bytes)), 400, "{bytes:?}");
    }
    // Half a request, and then the end of the peer's data.
    let mut stream = connect(server.address());
    stream.write_all(b"GET / HTTP/1.1\r\nHost: lo").unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert_eq!(status_code(&answer), 400);
    assert_eq!(status_code(&get(&server, "/api/status")), 200);
}

#[test]
fn long_request_heads_are_refused() {
    let server = start_server(&fixture_board());
    let megabyte = "x".repeat(1 << 20);
    for head in [
        format!("GET / HTTP/1.1\r\nHost: localhost\r\nCookie: {megabyte}\r\n\r\n"),
        format!("GET /{megabyte} HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        megabyte.clone(),
        format!("GET / HTTP/1.1\r\nHost: localhost\r\n{}\r\n", "A: b\r\n".repeat(1000)),
    ] {
        assert_eq!(status_code(&send(&server, head.as_bytes())), 431, "{}", &head[..40]);
    }
    assert_eq!(status_code(&get(&server, "/api/status")), 200);
}

/// As many peers as the server answers at once send single bytes slowly: they get the answer that it takes too long.
#[test]
fn slow_peers_do_not_block_requests() {
    let server = start_server(&fixture_board());
    let slow: Vec<TcpStream> = (0..MAX_CONNECTIONS).map(|_| connect(server.address())).collect();
    let dripping: Vec<_> = slow
        .into_iter()
        .map(|mut stream| {
            thread::spawn(move || {
                let mut writer = stream.try_clone().unwrap();
                let drip = thread::spawn(move || {
                    // Until the server refuses it.
                    for byte in b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ".iter().chain([&b'x'; 1000]) {
                        if writer.write_all(&[*byte]).is_err() {
                            return;
                        }
                        thread::sleep(Duration::from_millis(300));
                    }
                });
                let mut answer = String::new();
                // Bytes sent after the answer may reset the connection.
                let _ = stream.read_to_string(&mut answer);
                drop(stream);
                drip.join().unwrap();
                status_code(&answer)
            })
        })
        .collect();
    assert_eq!(status_code(&get(&server, "/api/status")), 200);
    for peer in dripping {
        assert_eq!(peer.join().unwrap(), 408);
    }
}

/// Hundreds of connections that send half a request do not delay a scrape until they time out, which their end would
/// show. The machine may be busy, so one success in five rounds is enough.
#[test]
fn scrape_is_answered_before_slow_peers() {
    // Each connection takes two descriptors here.
    let mut limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    limit.current = limit.maximum.map_or(Some(1 << 16), |most| Some(most.min(1 << 16)));
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    let server = start_server(&fixture_board());
    let slow = |request: &[u8]| {
        let mut stream = connect(server.address());
        stream.write_all(request).unwrap();
        stream
    };
    let is_open = |stream: &TcpStream| {
        stream.set_nonblocking(true).unwrap();
        matches!(stream.peek(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    };
    let answered_first = (0..5).any(|_| {
        let peers: Vec<TcpStream> = (0..500).map(|_| slow(b"GET /metrics HTTP/1.1\r\nHost: lo")).collect();
        assert_eq!(status_code(&get(&server, "/metrics")), 200);
        // A server that reads connections in order has ended at least 436 of them by then.
        peers.iter().filter(|peer| is_open(peer)).count() >= 100
    });
    assert!(answered_first);
}

#[test]
fn two_hundred_requests_are_all_answered() {
    let server = start_server(&fixture_board());
    let address = server.address();
    let peers: Vec<_> = (0..200)
        .map(|_| {
            thread::spawn(move || {
                let mut stream = connect(address);
                stream.write_all(b"GET /api/status HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
                let mut answer = String::new();
                stream.read_to_string(&mut answer).unwrap();
                (status_code(&answer), body(&answer).len())
            })
        })
        .collect();
    let length = body(&get(&server, "/api/status")).len();
    for peer in peers {
        assert_eq!(peer.join().unwrap(), (200, length));
    }
}

/// Reads events.
struct EventReader(BufReader<TcpStream>);

impl EventReader {
    fn open(server: &Server) -> (u16, Self) {
        let mut stream = connect(server.address());
        stream.write_all(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n").unwrap();
        let mut reader = BufReader::new(stream);
        let mut first = String::new();
        reader.read_line(&mut first).unwrap();
        (status_code(&first), Self(reader))
    }

    /// The time in the next status; `None` at the end.
    fn next_time(&mut self) -> Option<f64> {
        for line in self.0.by_ref().lines() {
            if let Some(data) = line.unwrap().strip_prefix("data: ") {
                return serde_json::from_str::<serde_json::Value>(data).unwrap()["time"].as_f64();
            }
        }
        None
    }
}

#[test]
fn events_follow_the_status() {
    let board = fixture_board();
    let server = start_server(&board);
    let (answer, mut stream) = EventReader::open(&server);
    assert_eq!(answer, 200);
    let mut status = fixture_status();
    assert_eq!(stream.next_time(), Some(status.time));
    for _ in 0..3 {
        status.time += 1.0;
        board.publish(status.clone());
        assert_eq!(stream.next_time(), Some(status.time));
    }
    board.close();
    assert_eq!(stream.next_time(), None);
}

#[test]
fn streams_leave_room_for_requests() {
    let board = fixture_board();
    let server = start_server(&board);
    let mut open: Vec<EventReader> = (0..MAX_EVENT_STREAMS).map(|_| EventReader::open(&server).1).collect();
    assert!(open.iter_mut().all(|stream| stream.next_time().is_some()));
    assert_eq!(EventReader::open(&server).0, 503);
    assert_eq!(status_code(&get(&server, "/metrics")), 200);
    // The slot of a closed stream becomes free once the server notices that it is closed.
    drop(open.pop());
    let restarted = (0..600).any(|_| {
        board.publish(fixture_status());
        thread::sleep(Duration::from_millis(100));
        EventReader::open(&server).0 == 200
    });
    assert!(restarted);
}

/// A peer that opens streams and reads nothing loses them.
#[test]
fn peer_that_does_not_read_is_dropped() {
    let board = fixture_board();
    let server = start_server(&board);
    let mut deaf: Vec<EventReader> = (0..MAX_EVENT_STREAMS).map(|_| EventReader::open(&server).1).collect();
    let freed = (0..6000).any(|round| {
        board.publish(fixture_status());
        thread::sleep(Duration::from_millis(10));
        round % 50 == 0 && EventReader::open(&server).0 == 200
    });
    assert!(freed);
    // Already sent data arrives; then the connection ends, possibly with a reset.
    let ended = loop {
        match deaf[0].0.read_until(b'\n', &mut Vec::new()) {
            Ok(0) => break true,
            Ok(_) => {}
            Err(error) => break !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut),
        }
    };
    assert!(ended);
}

#[test]
fn server_stops_when_dropped() {
    let board = fixture_board();
    let server = start_server(&board);
    let address = server.address();
    let (_, mut stream) = EventReader::open(&server);
    assert!(stream.next_time().is_some());
    board.close();
    drop(server);
    assert_eq!(stream.next_time(), None);
    TcpStream::connect(address).expect_err("the server has closed its socket");
    // As after a restart: the address is free, although connections existed.
    let board = common::fixture_board();
    let restarted = Server::start(address, Vec::new(), board).expect("the address is free");
    assert_eq!(status_code(&get(&restarted, "/api/status")), 200);
}
