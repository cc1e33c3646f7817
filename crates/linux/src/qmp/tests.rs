//! Tests against servers that are not QEMU. Tests of the command use a real QEMU.

use super::*;
use pagefold_base::Pid;
use pagefold_host::parse;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
use std::io::BufRead;
use std::os::unix::net::UnixListener;
use std::thread;

pub(super) const GREETING: &str =
    r#"{"QMP": {"version": {"qemu": {"micro": 0, "minor": 2, "major": 10}}, "capabilities": []}}"#;

/// Short, because some servers here never answer.
const SHORT_TIMEOUT: Duration = Duration::from_millis(300);

pub(super) fn own_process_id() -> ProcessId {
    let stat = parse::stat(&std::fs::read("/proc/self/stat").unwrap()).unwrap();
    ProcessId { pid: stat.pid, start_time: stat.start_time }
}

/// Listen, let `serve` talk to the first client, and return the result of `client`. A server whose client disconnects
/// ends.
pub(super) fn with_server<T>(serve: impl FnOnce(UnixStream) + Send, client: impl FnOnce(&Path) -> T) -> T {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    thread::scope(|scope| {
        scope.spawn(move || serve(listener.accept().unwrap().0));
        client(&path)
    })
}

/// Never set.
static NEVER_STOPPED: AtomicBool = AtomicBool::new(false);

fn connect(path: &Path) -> Result<QmpMonitor<'static>, QmpError> {
    QmpMonitor::connect(path, own_process_id(), (SHORT_TIMEOUT, LIST_BACKENDS_TIMEOUT), &NEVER_STOPPED)
}

/// A server that sends a greeting and then answers each command with `answer`.
pub(super) fn serve_qemu(mut stream: UnixStream, mut answer: impl FnMut(&str, &Value) -> Vec<Value>) {
    writeln!(stream, "{GREETING}").unwrap();
    let lines = io::BufReader::new(stream.try_clone().unwrap()).lines();
    for line in lines.map_while(Result::ok) {
        let command: Value = serde_json::from_str(&line).unwrap();
        for mut message in answer(command["execute"].as_str().unwrap(), &command["arguments"]) {
            if message.get("event").is_none() {
                message["id"] = command["id"].clone();
            }
            if writeln!(stream, "{message}").is_err() {
                return;
            }
        }
    }
}

/// Wait until the client disconnects.
pub(super) fn read_to_end(mut stream: UnixStream) {
    let _ = stream.read_to_end(&mut Vec::new());
}

#[test]
fn backends_are_listed_among_objects_and_events() {
    let answer = |command: &str, arguments: &Value| {
        let event = json!({"event": "RESUME", "data": {}});
        let result = match (command, arguments["property"].as_str()) {
            ("qmp_capabilities", _) => json!({}),
            ("qom-list", _) => json!([
                {"name": "type", "type": "string"},
                {"name": "pc.ram", "type": "child<memory-backend-ram>"},
                {"name": "io1", "type": "child<iothread>"},
            ]),
            ("qom-get", Some("size")) => json!(134_217_728),
            ("qom-get", Some("share")) => json!(false),
            ("qom-get", Some("merge")) => json!(true),
            other => panic!("{other:?}"),
        };
        vec![event.clone(), event, json!({"return": result})]
    };
    let backends = with_server(|stream| serve_qemu(stream, answer), |path| connect(path)?.list_backends()).unwrap();
    let expected = MemoryBackend {
        path: "/objects/pc.ram".to_owned(),
        kind: "memory-backend-ram".to_owned(),
        size: Bytes(128 << 20),
        is_shared: false,
        is_mergeable: true,
    };
    assert_eq!(backends, [expected]);
}

/// Marks or unmarks a backend.
fn set_merge(socket: &Path, enable: bool, stop: &AtomicBool) -> Result<bool, QmpError> {
    let value = Exchange { from: json!(!enable), to: json!(enable) };
    set_property(socket, own_process_id(), ("/objects/x", "merge"), &value, stop)
}

#[test]
fn property_with_an_unexpected_value_stays() {
    let sent = std::sync::Mutex::new(Vec::new());
    let answer = |command: &str, _: &Value| {
        sent.lock().unwrap().push(command.to_owned());
        vec![json!({"return": if command == "qom-get" { json!(500) } else { json!({}) }})]
    };
    let set = |from: u64, to: u64| {
        let value = Exchange { from: json!(from), to: json!(to) };
        with_server(
            |stream| serve_qemu(stream, answer),
            |path| set_property(path, own_process_id(), ("/objects/io0", "poll-max-ns"), &value, &NEVER_STOPPED),
        )
    };
    let error = set(1000, 0).unwrap_err().to_string();
    assert_eq!(error, "poll-max-ns of /objects/io0 is 500, not 1000: another program has changed it");
    assert!(!set(1000, 500).unwrap(), "it has the value already");
    assert!(!sent.into_inner().unwrap().contains(&"qom-set".to_owned()));
}

#[test]
fn qemu_error_text_is_reported() {
    let answer = |command: &str, _: &Value| {
        vec![match command {
            "qmp_capabilities" => json!({"return": {}}),
            "qom-get" => json!({"return": true}),
            _ => json!({"error": {"class": "GenericError", "desc": "Property 'x.merge' not found"}}),
        }]
    };
    let error = with_server(|stream| serve_qemu(stream, answer), |path| set_merge(path, false, &NEVER_STOPPED))
        .unwrap_err()
        .to_string();
    assert_eq!(error, "QEMU refuses qom-set: Property 'x.merge' not found");
}

#[test]
fn unchanged_merge_property_is_an_error() {
    let answer =
        |command: &str, _: &Value| vec![json!({"return": if command == "qom-get" { json!(true) } else { json!({}) }})];
    let error =
        with_server(|stream| serve_qemu(stream, answer), |path| set_merge(path, false, &NEVER_STOPPED)).unwrap_err();
    assert!(error.to_string().ends_with("merge of /objects/x is true afterwards"), "{error}");
}

#[test]
fn nothing_is_sent_to_an_unexpected_peer() {
    for process in [
        ProcessId { pid: Pid(1), ..own_process_id() },
        ProcessId { start_time: own_process_id().start_time + 1, ..own_process_id() },
    ] {
        let (sender, heard) = std::sync::mpsc::channel();
        let serve = move |mut stream: UnixStream| {
            let mut bytes = Vec::new();
            let _ = stream.read_to_end(&mut bytes);
            sender.send(bytes).unwrap();
        };
        let result = with_server(serve, |path| {
            QmpMonitor::connect(path, process, (SHORT_TIMEOUT, LIST_BACKENDS_TIMEOUT), &NEVER_STOPPED).map(|_| ())
        });
        assert!(matches!(result, Err(QmpError::UnexpectedPeer { .. })), "{result:?}");
        assert_eq!(heard.recv().unwrap(), b"");
    }
}

#[test]
fn silent_monitor_is_busy() {
    let error = with_server(read_to_end, connect).map(|_| ()).unwrap_err();
    assert!(matches!(error, QmpError::Busy { .. }), "{error}");
    assert!(
        matches!(ActionError::from(error), ActionError::Busy(message) if message.contains("virsh qemu-monitor-command"))
    );
    // A greeting, and then nothing.
    let greet = |mut stream: UnixStream| {
        writeln!(stream, "{GREETING}").unwrap();
        read_to_end(stream);
    };
    assert!(matches!(with_server(greet, connect).map(|_| ()), Err(QmpError::Busy { .. })));
}

#[test]
fn full_listen_queue_times_out() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qmp");
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&socket, 0).unwrap();
    let _first = UnixStream::connect(&path).unwrap();
    assert!(matches!(connect(&path).map(|_| ()), Err(QmpError::Busy { .. })));
}

#[test]
fn invalid_messages_are_rejected() {
    for reply in ["hello\n", "[]\n", "{\"QMP\n", "{\"event\": \"RESUME\"}\n", "\u{0}\n", "\n", "1\n"] {
        let serve = move |mut stream: UnixStream| {
            let _ = stream.write_all(reply.as_bytes());
            read_to_end(stream);
        };
        let result = with_server(serve, connect).map(|_| ());
        assert!(matches!(result, Err(QmpError::NotQmp { .. })), "{reply:?}: {result:?}");
    }
    let unasked = |mut stream: UnixStream| {
        let _ = write!(stream, "{GREETING}\n{{\"return\": {{}}, \"id\": 99}}\n");
        read_to_end(stream);
    };
    assert!(matches!(with_server(unasked, connect).map(|_| ()), Err(QmpError::NotQmp { .. })));
}

#[test]
fn endless_line_is_rejected() {
    let serve = |mut stream: UnixStream| while stream.write_all(&[b'x'; 65536]).is_ok() {};
    let result = with_server(serve, |path| {
        QmpMonitor::connect(path, own_process_id(), (Duration::from_secs(60), LIST_BACKENDS_TIMEOUT), &NEVER_STOPPED)
            .map(|_| ())
    });
    assert!(matches!(result, Err(QmpError::NotQmp { ref reply, .. }) if reply.len() == 80), "{result:?}");
}

#[test]
fn closed_or_missing_socket_is_an_error() {
    assert!(matches!(with_server(drop, connect).map(|_| ()), Err(QmpError::Io { .. })));
    let missing = connect(Path::new("/nonexistent/qmp")).map(|_| ()).unwrap_err();
    assert!(matches!(missing, QmpError::Connect { .. }), "{missing}");
    let long = connect(Path::new(&"x".repeat(200))).map(|_| ());
    assert!(matches!(long, Err(QmpError::Connect { .. })));
}

/// A server that reports many backends and delays each answer.
fn slow_answers(backends: usize, pause: Duration) -> impl FnMut(&str, &Value) -> Vec<Value> {
    move |command, arguments| {
        let objects = || (0..backends).map(|n| json!({"name": format!("m{n}"), "type": "child<memory-backend-ram>"}));
        let result = match (command, arguments["property"].as_str()) {
            ("qmp_capabilities", _) => json!({}),
            ("qom-list", _) => json!(objects().collect::<Vec<_>>()),
            (_, Some("size")) => json!(4096),
            _ => json!(true),
        };
        if command == "qom-get" {
            thread::sleep(pause);
        }
        vec![json!({"return": result})]
    }
}

#[test]
fn too_many_backends_are_rejected() {
    let error = with_server(
        |stream| serve_qemu(stream, slow_answers(MAX_BACKENDS + 1, Duration::ZERO)),
        |path| connect(path)?.list_backends(),
    );
    assert!(matches!(error, Err(QmpError::TooManyBackends { found, .. }) if found == MAX_BACKENDS + 1), "{error:?}");
}

#[test]
fn session_ends_at_its_deadline() {
    let (answer_timeout, session_timeout) = (Duration::from_secs(60), Duration::from_millis(500));
    let request_count = std::sync::atomic::AtomicUsize::new(0);
    let mut answer = slow_answers(MAX_BACKENDS, Duration::from_millis(50));
    let counted = |command: &str, arguments: &Value| {
        request_count.fetch_add(1, Ordering::Relaxed);
        answer(command, arguments)
    };
    let ask = |path: &Path| {
        QmpMonitor::connect(path, own_process_id(), (answer_timeout, session_timeout), &NEVER_STOPPED)?.list_backends()
    };
    let error = with_server(|stream| serve_qemu(stream, counted), ask);
    assert!(matches!(error, Err(QmpError::Busy { .. })), "{error:?}");
    assert!(request_count.load(Ordering::Relaxed) < 3 * MAX_BACKENDS, "it went on to the end");
}

#[test]
fn stop_flag_ends_a_session() {
    let stop = AtomicBool::new(false);
    let ask = |path: &Path| {
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(300));
                stop.store(true, Ordering::Relaxed);
            });
            let long = Duration::from_secs(600);
            QmpMonitor::connect(path, own_process_id(), (long, long), &stop).map(|_| ())
        })
    };
    let error = with_server(read_to_end, ask);
    assert!(matches!(error, Err(QmpError::Stopped { .. })), "{error:?}");
}

/// The server sends a greeting, accepts the capabilities and then never answers `qom-set`. The flag is set when that
/// command arrives.
#[test]
fn stop_flag_ends_wait_for_qom_set() {
    for on in [false, true] {
        let stop = AtomicBool::new(false);
        let answer = |command: &str, _: &Value| match command {
            "qmp_capabilities" => vec![json!({"return": {}})],
            "qom-get" => vec![json!({"return": !on})],
            _ => {
                stop.store(true, Ordering::Relaxed);
                vec![]
            }
        };
        let ended = with_server(|stream| serve_qemu(stream, answer), |path| set_merge(path, on, &stop));
        assert!(matches!(ended, Err(QmpError::Stopped { .. })), "{ended:?}");
    }
}
