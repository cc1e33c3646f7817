//! The client against daemons that lie, hang or flood.

use super::*;
use proptest::prelude::*;
use std::os::unix::net::UnixListener;
use std::thread;

pub(super) const UUID: &str = "c7a5fdbd-cdaf-9455-926a-d65c16db1809";

/// Short, because some daemons here never answer.
pub(super) const SHORT_TIMEOUT: Duration = Duration::from_millis(500);

/// A call that a daemon got.
pub(super) struct Call<'a> {
    pub(super) program: u32,
    pub(super) procedure: u32,
    pub(super) serial: u32,
    pub(super) arguments: &'a [u8],
}

/// A daemon that answers each message by `answer`, which gets procedure and serial, and returns the bytes to send.
fn with_daemon<T>(
    answer: impl Fn(u32, u32) -> Option<Vec<u8>> + Send + 'static,
    ask: impl FnOnce(Result<Connection, LibvirtError>) -> T,
) -> T {
    with_answering_daemon(SHORT_TIMEOUT, move |call: &Call<'_>| answer(call.procedure, call.serial), ask)
}

/// The same with a time limit of the connection, and with all of each call.
pub(super) fn with_answering_daemon<T>(
    timeout: Duration,
    answer: impl Fn(&Call<'_>) -> Option<Vec<u8>> + Send + 'static,
    ask: impl FnOnce(Result<Connection, LibvirtError>) -> T,
) -> T {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let daemon = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        loop {
            let mut length = [0; 4];
            if stream.read_exact(&mut length).is_err() {
                return;
            }
            let mut message = vec![0; u32::from_be_bytes(length) as usize - 4];
            if stream.read_exact(&mut message).is_err() {
                return;
            }
            let mut reader = XdrReader(&message);
            let numbers: Vec<u32> = (0..6).map(|_| reader.take_number().unwrap()).collect();
            let [program, _, procedure, _, serial, _] = numbers[..] else { panic!("{numbers:?}") };
            let Some(bytes) = answer(&Call { program, procedure, serial, arguments: reader.0 }) else { continue };
            if stream.write_all(&bytes).is_err() {
                return;
            }
        }
    });
    let user = rustix::process::geteuid().as_raw();
    let result = ask(Connection::open(path.to_str().unwrap(), user, timeout));
    daemon.join().unwrap();
    result
}

pub(super) fn reply(procedure: u32, serial: u32, status: u32, content: &[u8]) -> Vec<u8> {
    reply_of_program(REMOTE_PROGRAM, procedure, serial, status, content)
}

pub(super) fn reply_of_program(program: u32, procedure: u32, serial: u32, status: u32, content: &[u8]) -> Vec<u8> {
    let mut message = XdrWriter::default();
    let length = (HEADER_BYTES + content.len()) as u32;
    for number in [length, program, PROTOCOL_VERSION, procedure, MESSAGE_REPLY, serial, status] {
        message.put_number(number);
    }
    message.0.extend(content);
    message.0
}

pub(super) fn domain(uuid: &str) -> Vec<u8> {
    let mut content = XdrWriter::default();
    content.put_bytes(b"db numa,x=1");
    content.0.extend(parse_uuid(uuid).unwrap());
    content.put_number(7);
    content.0
}

#[test]
fn monitor_of_a_domain_is_asked() {
    let ask = |text: &'static str| {
        let answer = move |procedure, serial| {
            // After two calls to connect, the domain is looked up, and then its monitor is asked.
            if serial < 4 {
                let content = if procedure == PROC_DOMAIN_LOOKUP_BY_UUID { domain(UUID) } else { Vec::new() };
                return Some(reply(procedure, serial, STATUS_OK, &content));
            }
            let mut content = XdrWriter::default();
            content.put_bytes(text.as_bytes());
            Some(reply_of_program(QEMU_PROGRAM, procedure, serial, STATUS_OK, &content.0))
        };
        with_daemon(answer, |connection| {
            let mut connection = connection.unwrap();
            let found = connection.look_up(parse_uuid(UUID).unwrap()).unwrap();
            let answer = connection.ask_monitor(&found, MonitorQuestion::Vcpus);
            answer.map(|bytes| String::from_utf8(bytes).unwrap()).map_err(|error| error.excerpt())
        })
    };
    assert_eq!(ask(r#"{"return":[{"cpu-index":0}],"id":"libvirt-7"}"#), Ok(r#"[{"cpu-index":0}]"#.to_owned()));
    assert_eq!(ask(r#"{"error":{"desc":"not now"}}"#), Err("QEMU refuses: not now".to_owned()));
    let long = json!({"error": {"desc": "no".repeat(1000)}}).to_string();
    assert_eq!(ask(long.leak()).unwrap_err().chars().count(), MAX_EXCERPT_CHARS);
    for text in ["", "[[[", "{}", "7"] {
        assert!(ask(text).unwrap_err().contains("malformed"), "{text}");
    }
}

#[test]
fn definition_that_is_no_text_is_compared_by_its_bytes() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), b"<domain\xff/>").unwrap();
    let path = file.path().to_str().unwrap().trim_start_matches('/');
    let is_replaced = |former| super::is_replaced(&LiveHost::new(), path, former, Duration::ZERO);
    assert!(!is_replaced(b"<domain\xff/>"));
    assert!(is_replaced(b"<domain/>"));
}

#[test]
fn domain_is_looked_up_and_pinned() {
    let answer = |procedure, serial| {
        let content = if procedure == PROC_DOMAIN_LOOKUP_BY_UUID { domain(UUID) } else { Vec::new() };
        // An event comes first.
        let mut bytes = reply(procedure + 1, 0, STATUS_OK, b"    ");
        bytes.extend(reply(procedure, serial, STATUS_OK, &content));
        Some(bytes)
    };
    with_daemon(answer, |connection| {
        let mut connection = connection.unwrap();
        let found = connection.look_up(parse_uuid(UUID).unwrap()).unwrap();
        assert_eq!((found.name.as_slice(), found.id), (b"db numa,x=1".as_slice(), 7));
        connection.pin(&found, LibvirtPinTarget::Vcpu(3), &"0,9".parse().unwrap()).unwrap();
        connection.pin(&found, LibvirtPinTarget::Emulator, &"0".parse().unwrap()).unwrap();
        connection.pin(&found, LibvirtPinTarget::Iothread(1), &"0".parse().unwrap()).unwrap();
        connection.close();
    });
}

#[test]
fn definition_is_sent_and_answer_names_the_domain() {
    let answer = |procedure, serial| {
        let content = if procedure == PROC_DOMAIN_DEFINE_XML_FLAGS { domain(UUID) } else { Vec::new() };
        Some(reply(procedure, serial, STATUS_OK, &content))
    };
    with_daemon(answer, |connection| {
        let mut connection = connection.unwrap();
        connection.define(parse_uuid(UUID).unwrap(), "<domain/>").unwrap();
        let error = connection.define([0; 16], "<domain/>").unwrap_err();
        assert!(error.to_string().contains("another domain"), "{error}");
    });
}

#[test]
fn refusal_has_the_text_of_libvirt() {
    let answer = |procedure, serial| {
        if procedure != PROC_DOMAIN_LOOKUP_BY_UUID {
            return Some(reply(procedure, serial, STATUS_OK, &[]));
        }
        let mut content = XdrWriter::default();
        [42, 10, 1].into_iter().for_each(|number| content.put_number(number));
        content.put_bytes(b"Domain not found\x1b");
        Some(reply(procedure, serial, 1, &content.0))
    };
    let error = with_daemon(answer, |connection| connection.unwrap().look_up(parse_uuid(UUID).unwrap()).unwrap_err());
    assert_eq!(error.to_string(), "libvirt refuses: Domain not found\\u{1b} (error 42)");
}

#[test]
fn lying_daemons_are_reported() {
    type Answer = fn(u32, u32) -> Option<Vec<u8>>;
    let cases: [(&str, Answer); 7] = [
        ("does not answer", |_, _| None),
        ("impossible length", |_, _| Some(u32::MAX.to_be_bytes().to_vec())),
        ("impossible length", |_, _| Some(3_u32.to_be_bytes().to_vec())),
        ("too many messages", |procedure, _| {
            Some(reply(procedure, 0, STATUS_OK, &[]).repeat(2 * MAX_SKIPPED_MESSAGES))
        }),
        ("cut off", |procedure, serial| Some(reply(procedure, serial, 1, &[0; 3]))),
        ("cut off", |procedure, serial| {
            let lie = [0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff];
            Some(reply(procedure, serial, 1, &lie))
        }),
        // Half of a message, and then nothing.
        ("does not answer", |procedure, serial| Some(reply(procedure, serial, STATUS_OK, &[0; 8])[..30].to_vec())),
    ];
    for (expected, answer) in cases {
        let error = with_daemon(answer, |connection| connection.err().map(|error| error.to_string()));
        assert!(error.as_ref().is_some_and(|error| error.contains(expected)), "{expected}: {error:?}");
    }
    let other = "00000000-0000-0000-0000-000000000000";
    let answer = |procedure, serial| Some(reply(procedure, serial, STATUS_OK, &domain(UUID)));
    let error = with_daemon(answer, |connection| connection.unwrap().look_up(parse_uuid(other).unwrap()).unwrap_err());
    assert!(error.to_string().contains("another domain"), "{error}");
}

#[test]
fn daemon_that_accepts_nobody_is_given_up() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let socket = rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &rustix::net::SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&socket, 0).unwrap();
    // The queue has room for one.
    let _first = UnixStream::connect(&path).unwrap();
    let error = Connection::open(path.to_str().unwrap(), 0, Duration::from_millis(50)).err().unwrap();
    assert!(matches!(ActionError::from(error), ActionError::Busy(_)));
}

#[test]
fn peer_of_another_user_gets_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let _listener = UnixListener::bind(&path).unwrap();
    let other = rustix::process::geteuid().as_raw() + 1;
    let result = Connection::open(path.to_str().unwrap(), other, Duration::from_secs(1));
    assert!(matches!(result.err(), Some(LibvirtError::UnexpectedPeer { .. })));
    let missing = Connection::open("/nonexistent", 0, Duration::from_secs(1)).err().unwrap();
    assert!(missing.to_string().starts_with("cannot connect to libvirt at /nonexistent"), "{missing}");
}

#[test]
fn uuids_and_maps_have_their_forms() {
    assert_eq!(parse_uuid(UUID).map(|uuid| (uuid[0], uuid[15])), Some((0xc7, 0x09)));
    assert_eq!(["", "c7a5", "zz".repeat(16).as_str(), "é".repeat(16).as_str()].map(parse_uuid), [None; 4]);
    assert_eq!(cpu_map(&"0-1,9".parse().unwrap()), [3, 2]);
    assert_eq!(cpu_map(&IdSet::default()), [0]);
}

proptest! {
    #[test]
    fn no_message_makes_the_parser_panic(message in prop::collection::vec(any::<u8>(), 0..200), keep in any::<bool>()) {
        let mut bytes = reply(5, 9, 1, &message);
        if !keep {
            bytes = message;
        }
        let _ = parse_answer(bytes.get(4..).unwrap_or_default(), (REMOTE_PROGRAM, 5, 9));
    }
}
