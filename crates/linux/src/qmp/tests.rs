//! Against servers that are not QEMU: the real one is met in the tests of the command.

use super::*;
use pagefold_base::Pid;
use std::io::BufRead;
use std::os::unix::net::UnixListener;
use std::thread;

const GREETING: &str = r#"{"QMP": {"version": {"qemu": {"micro": 0, "minor": 2, "major": 10}}, "capabilities": []}}"#;

/// Short, since some servers here never answer.
const SHORT: Duration = Duration::from_millis(300);

fn own() -> ProcessId {
    let stat = parse::stat(&std::fs::read("/proc/self/stat").unwrap()).unwrap();
    ProcessId { pid: stat.pid, start_time: stat.start_time }
}

/// Listen, let `serve` talk to the first client, and tell what `client` got. A server whose client goes away ends.
fn with<T>(serve: impl FnOnce(UnixStream) + Send, client: impl FnOnce(&Path) -> T) -> T {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    thread::scope(|scope| {
        scope.spawn(move || serve(listener.accept().unwrap().0));
        client(&path)
    })
}

/// Never set.
static NEVER: AtomicBool = AtomicBool::new(false);

fn connect(path: &Path) -> Result<Monitor<'static>, Error> {
    Monitor::connect(path, own(), (SHORT, CONVERSATION), &NEVER)
}

/// A server that greets and then answers each command by `answer`.
fn qemu(mut stream: UnixStream, mut answer: impl FnMut(&str, &Value) -> Vec<Value>) {
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

/// Wait until the client is gone.
fn drain(mut stream: UnixStream) {
    let _ = stream.read_to_end(&mut Vec::new());
}

#[test]
fn backends_are_found_among_objects_and_between_events() {
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
    let backends = with(|stream| qemu(stream, answer), |path| connect(path)?.backends()).unwrap();
    let expected = Backend {
        path: "/objects/pc.ram".to_owned(),
        kind: "memory-backend-ram".to_owned(),
        size: Bytes(128 << 20),
        share: false,
        merge: true,
    };
    assert_eq!(backends, [expected]);
}

#[test]
fn what_qemu_refuses_is_told_in_its_words() {
    let answer = |command: &str, _: &Value| {
        vec![match command {
            "qmp_capabilities" => json!({"return": {}}),
            _ => json!({"error": {"class": "GenericError", "desc": "Property 'x.merge' not found"}}),
        }]
    };
    let error = with(|stream| qemu(stream, answer), |path| set_merge(path, own(), "/objects/x", false, &NEVER))
        .unwrap_err()
        .to_string();
    assert_eq!(error, "QEMU refuses qom-set: Property 'x.merge' not found");
}

#[test]
fn a_switch_that_did_not_take_is_an_error() {
    let answer =
        |command: &str, _: &Value| vec![json!({"return": if command == "qom-get" { json!(true) } else { json!({}) }})];
    let error =
        with(|stream| qemu(stream, answer), |path| set_merge(path, own(), "/objects/x", false, &NEVER)).unwrap_err();
    assert!(error.to_string().ends_with("merge of /objects/x is true afterwards"), "{error}");
}

#[test]
fn strangers_hear_no_word() {
    for process in [ProcessId { pid: Pid(1), ..own() }, ProcessId { start_time: own().start_time + 1, ..own() }] {
        let (sender, heard) = std::sync::mpsc::channel();
        let serve = move |mut stream: UnixStream| {
            let mut bytes = Vec::new();
            let _ = stream.read_to_end(&mut bytes);
            sender.send(bytes).unwrap();
        };
        let result = with(serve, |path| Monitor::connect(path, process, (SHORT, CONVERSATION), &NEVER).map(|_| ()));
        assert!(matches!(result, Err(Error::Stranger { .. })), "{result:?}");
        assert_eq!(heard.recv().unwrap(), b"");
    }
}

#[test]
fn silence_is_a_monitor_that_somebody_holds() {
    let error = with(drain, connect).map(|_| ()).unwrap_err();
    assert!(matches!(error, Error::Busy { .. }), "{error}");
    assert!(matches!(Refusal::from(error), Refusal::Busy(said) if said.contains("virsh qemu-monitor-command")));
    // A greeting, and then nothing.
    let greet = |mut stream: UnixStream| {
        writeln!(stream, "{GREETING}").unwrap();
        drain(stream);
    };
    assert!(matches!(with(greet, connect).map(|_| ()), Err(Error::Busy { .. })));
}

#[test]
fn a_full_queue_is_not_waited_for_for_ever() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qmp");
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&socket, 0).unwrap();
    let _first = UnixStream::connect(&path).unwrap();
    assert!(matches!(connect(&path).map(|_| ()), Err(Error::Busy { .. })));
}

#[test]
fn garbage_is_no_qmp() {
    for said in ["hello\n", "[]\n", "{\"QMP\n", "{\"event\": \"RESUME\"}\n", "\u{0}\n", "\n", "1\n"] {
        let serve = move |mut stream: UnixStream| {
            let _ = stream.write_all(said.as_bytes());
            drain(stream);
        };
        let result = with(serve, connect).map(|_| ());
        assert!(matches!(result, Err(Error::Garbage { .. })), "{said:?}: {result:?}");
    }
    let unasked = |mut stream: UnixStream| {
        let _ = write!(stream, "{GREETING}\n{{\"return\": {{}}, \"id\": 99}}\n");
        drain(stream);
    };
    assert!(matches!(with(unasked, connect).map(|_| ()), Err(Error::Garbage { .. })));
}

#[test]
fn a_line_without_end_is_left() {
    let serve = |mut stream: UnixStream| while stream.write_all(&[b'x'; 65536]).is_ok() {};
    let result =
        with(serve, |path| Monitor::connect(path, own(), (Duration::from_secs(60), CONVERSATION), &NEVER).map(|_| ()));
    assert!(matches!(result, Err(Error::Garbage { ref said, .. }) if said.len() == 80), "{result:?}");
}

#[test]
fn one_that_hangs_up_or_is_not_there_is_said_to() {
    assert!(matches!(with(drop, connect).map(|_| ()), Err(Error::Io { .. })));
    let missing = connect(Path::new("/nonexistent/qmp")).map(|_| ()).unwrap_err();
    assert!(matches!(missing, Error::Connect { .. }), "{missing}");
    let long = connect(Path::new(&"x".repeat(200))).map(|_| ());
    assert!(matches!(long, Err(Error::Connect { .. })));
}

/// A program that claims many backends and lets each answer take its time.
fn slow(backends: usize, pause: Duration) -> impl FnMut(&str, &Value) -> Vec<Value> {
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
fn more_backends_than_qemu_has_are_not_asked_for() {
    let error = with(|stream| qemu(stream, slow(MAX_BACKENDS + 1, Duration::ZERO)), |path| connect(path)?.backends());
    assert!(matches!(error, Err(Error::TooManyBackends { found, .. }) if found == MAX_BACKENDS + 1), "{error:?}");
}

#[test]
fn conversation_ends_at_its_deadline_though_each_answer_is_in_time() {
    let (patience, all) = (Duration::from_secs(60), Duration::from_millis(500));
    let asked = std::sync::atomic::AtomicUsize::new(0);
    let mut answer = slow(MAX_BACKENDS, Duration::from_millis(50));
    let counted = |command: &str, arguments: &Value| {
        asked.fetch_add(1, Ordering::Relaxed);
        answer(command, arguments)
    };
    let ask = |path: &Path| Monitor::connect(path, own(), (patience, all), &NEVER)?.backends();
    let error = with(|stream| qemu(stream, counted), ask);
    assert!(matches!(error, Err(Error::Busy { .. })), "{error:?}");
    assert!(asked.load(Ordering::Relaxed) < 3 * MAX_BACKENDS, "it went on to the end");
}

#[test]
fn stop_ends_a_conversation() {
    let stop = AtomicBool::new(false);
    let ask = |path: &Path| {
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(300));
                stop.store(true, Ordering::Relaxed);
            });
            let long = Duration::from_secs(600);
            Monitor::connect(path, own(), (long, long), &stop).map(|_| ())
        })
    };
    let error = with(drain, ask);
    assert!(matches!(error, Err(Error::Stopped { .. })), "{error:?}");
}

/// The server greets, takes the capabilities and then never answers the switch: the flag is set once that was asked for.
#[test]
fn stop_ends_the_wait_for_a_switch() {
    for on in [false, true] {
        let stop = AtomicBool::new(false);
        let answer = |command: &str, _: &Value| match command {
            "qmp_capabilities" => vec![json!({"return": {}})],
            _ => {
                stop.store(true, Ordering::Relaxed);
                vec![]
            }
        };
        let ended = with(|stream| qemu(stream, answer), |path| set_merge(path, own(), "/objects/x", on, &stop));
        assert!(matches!(ended, Err(Error::Stopped { .. })), "{ended:?}");
    }
}
