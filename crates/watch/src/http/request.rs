//! Reads requests within limits, and refuses all ambiguous ones.

use super::response::HttpResponse;
use std::io::{self, Read};
use std::net::{IpAddr, TcpStream};

/// The maximum length of a request head in bytes. A browser's head has some hundred.
pub const MAX_HEAD_BYTES: usize = 8 << 10;

/// The maximum number of header fields in a request.
pub const MAX_HEADER_FIELDS: usize = 64;

/// A parsed request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpRequest {
    /// The path, as sent.
    pub path: String,
    /// The text after the question mark.
    pub query: Option<String>,
    /// Whether the client accepts OpenMetrics; otherwise it gets the text format of Prometheus.
    pub accepts_openmetrics: bool,
}

/// The received part of a request.
#[derive(Debug, Default)]
pub struct PartialRequest(Vec<u8>);

impl PartialRequest {
    /// Read available bytes of a non-blocking connection. `None` while the head is incomplete, `Some(None)` if the peer
    /// closed the connection without sending anything.
    ///
    /// # Errors
    /// The answer to a malformed, forbidden or too long request.
    pub fn read(
        &mut self,
        mut stream: &TcpStream,
        host_names: &[String],
    ) -> Result<Option<Option<HttpRequest>>, HttpResponse> {
        let mut chunk = [0; 2048];
        loop {
            let read = match stream.read(&mut chunk) {
                Ok(0) if self.0.is_empty() => return Ok(Some(None)),
                Ok(0) => return Err(HttpResponse::refusal(400, "the request ends within its head")),
                Ok(read) => &chunk[..read],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return Ok(Some(None)),
            };
            self.0.extend_from_slice(read);
            // A head ends with a line end, so parsing makes sense only after one.
            if read.contains(&b'\n')
                && let Some(request) = HttpRequest::parse(&self.0, host_names)?
            {
                return Ok(Some(Some(request)));
            }
            if self.0.len() > MAX_HEAD_BYTES {
                return Err(HttpResponse::refusal(431, "the head of the request is longer than 8 KiB"));
            }
        }
    }
}

impl HttpRequest {
    /// Parse the bytes of a head; `None` while it is incomplete.
    fn parse(head: &[u8], names: &[String]) -> Result<Option<Self>, HttpResponse> {
        let mut fields = [httparse::EMPTY_HEADER; MAX_HEADER_FIELDS];
        let mut request = httparse::Request::new(&mut fields);
        match request.parse(head) {
            Ok(httparse::Status::Complete(_)) => {}
            Ok(httparse::Status::Partial) => return Ok(None),
            Err(httparse::Error::TooManyHeaders) => {
                return Err(HttpResponse::refusal(431, "the request has more than 64 header fields"));
            }
            Err(_) => return Err(HttpResponse::refusal(400, "this is not an HTTP request")),
        }
        if request.method != Some("GET") {
            return Err(HttpResponse::refusal(405, "only GET is allowed"));
        }
        let values = |name: &'static str| {
            request.headers.iter().filter(move |field| field.name.eq_ignore_ascii_case(name)).map(|field| field.value)
        };
        let mut hosts = values("host");
        match (hosts.next().map(str::from_utf8), hosts.next()) {
            (Some(Ok(host)), None) if is_own_host(host, names) => {}
            (Some(Ok(_)), None) => {
                return Err(HttpResponse::refusal(
                    421,
                    "this server does not have the requested host name: use its address or a configured name",
                ));
            }
            _ => return Err(HttpResponse::refusal(400, "a request must have exactly one Host field")),
        }
        let target = request.path.unwrap_or_default();
        let (path, query) = match target.split_once('?') {
            Some((path, query)) => (path.to_owned(), Some(query.to_owned())),
            None => (target.to_owned(), None),
        };
        let accepted = |value: &[u8]| {
            value
                .windows(OPENMETRICS_MEDIA_TYPE.len())
                .any(|window| window.eq_ignore_ascii_case(OPENMETRICS_MEDIA_TYPE))
        };
        Ok(Some(Self { path, query, accepts_openmetrics: values("accept").any(accepted) }))
    }
}

const OPENMETRICS_MEDIA_TYPE: &[u8] = b"application/openmetrics-text";

/// Whether a Host field names this server: by an address, which no resolver can give to a foreign page (DNS rebinding),
/// by `localhost`, or by a configured name.
fn is_own_host(host: &str, names: &[String]) -> bool {
    let (name, port) = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, port)) => return address.parse().is_ok_and(|ip: IpAddr| ip.is_ipv6()) && is_port(port),
        None => host.split_at(host.find(':').unwrap_or(host.len())),
    };
    let is_own = name.parse().is_ok_and(|ip: IpAddr| ip.is_ipv4())
        || name.eq_ignore_ascii_case("localhost")
        || names.iter().any(|own_name| own_name.eq_ignore_ascii_case(name));
    is_own && is_port(port)
}

/// Empty, or a colon and a number.
fn is_port(text: &str) -> bool {
    text.is_empty() || text.strip_prefix(':').is_some_and(|port| port.parse::<u16>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(head: &str) -> Result<Option<HttpRequest>, u16> {
        HttpRequest::parse(head.as_bytes(), &["node17".to_owned()]).map_err(|answer| answer.status)
    }

    #[test]
    fn only_own_hosts_are_accepted() {
        let check = |host: &str, expected| assert_eq!(is_own_host(host, &["node17".to_owned()]), expected, "{host}");
        for host in ["127.0.0.1", "127.0.0.1:9750", "[::1]:9750", "[::1]", "localhost", "LOCALHOST:1", "Node17:9750"] {
            check(host, true);
        }
        for host in [
            "",
            "evil.example",
            "evil.example:9750",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "127.0.0.1:evil",
            "::1",
            "[::1",
            "[::1]x",
            "[127.0.0.1]",
            "localhost:99999",
            "evil@127.0.0.1",
            "node17.",
            "0x7f.1",
        ] {
            check(host, false);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_without_panic(bytes: Vec<u8>, path in "[ -~]{0,40}", value: Vec<u8>) {
            let _ = HttpRequest::parse(&bytes, &[]);
            let head = [b"GET ", path.as_bytes(), b" HTTP/1.1\r\nHost: ", &value, b"\r\n\r\n"].concat();
            let _ = HttpRequest::parse(&head, &[]);
        }

        /// No resolver can give a foreign page a name that counts as the server's own.
        #[test]
        fn foreign_names_are_never_own_hosts(host in "[a-z0-9.:\\[\\]-]{1,20}") {
            let name = host.split(':').next().unwrap_or_default();
            let addressed = host.starts_with('[') || name.parse::<IpAddr>().is_ok() || name == "localhost";
            prop_assert!(addressed || !is_own_host(&host, &["node17".to_owned()]) || name == "node17");
        }
    }

    #[test]
    fn request_heads_are_parsed() {
        let request = |path: &str, query: Option<&str>, openmetrics| {
            Ok(Some(HttpRequest {
                path: path.to_owned(),
                query: query.map(ToOwned::to_owned),
                accepts_openmetrics: openmetrics,
            }))
        };
        let check = |head: &str, expect: Result<Option<HttpRequest>, u16>| assert_eq!(parse(head), expect, "{head:?}");
        check("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", request("/", None, false));
        check("GET /a?b=c?d HTTP/1.0\nhost: [::1]:80\n\n", request("/a", Some("b=c?d"), false));
        check(
            "GET /metrics HTTP/1.1\r\nHost: node17\r\nAccept: application/OpenMetrics-Text;version=1.0.0,*/*\r\n\r\n",
            request("/metrics", None, true),
        );
        check("GET / HTTP/1.1\r\nHost: localhost\r\n", Ok(None));
        check("", Ok(None));
        check("POST / HTTP/1.1\r\nHost: localhost\r\n\r\n", Err(405));
        check("get / HTTP/1.1\r\nHost: localhost\r\n\r\n", Err(405));
        check("GET / HTTP/1.1\r\n\r\n", Err(400));
        check("GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", Err(400));
        check("GET / HTTP/1.1\r\nHost: \u{e9}vil\r\n\r\n", Err(421));
        check("GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", Err(421));
        check("GET / HTTP/1.1\r\nHost : localhost\r\n\r\n", Err(400));
        check("GET /\r\n\r\n", Err(400));
        check("GET / HTTP/3.0\r\nHost: localhost\r\n\r\n", Err(400));
        check("\u{16}\u{3}\u{1}\n", Err(400));
        check(&format!("GET / HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(MAX_HEADER_FIELDS + 1)), Err(431));
    }
}
