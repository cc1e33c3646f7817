//! Monitors that answer well, late, falsely or not at all. The listener is this process, as QEMU's would be.

use super::*;
use crate::qmp::tests::{GREETING, own_process_id, read_to_end, serve_qemu, with_server};
use serde_json::Value;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::thread;
use std::time::Instant;

/// Short, because some monitors here never answer.
const SHORT_TIMEOUT: Duration = Duration::from_millis(300);
/// Far longer than an answer takes.
const LONG_TIMEOUT: Duration = Duration::from_secs(60);
/// The longest time after its timeout at which a session may end on a busy machine.
const MAX_DELAY: Duration = Duration::from_secs(10);

/// Listens, lets `serve` talk to the client, and asks everything.
fn ask_server(serve: impl FnOnce(UnixStream) + Send, timeout: Duration) -> Reading<Vec<Reading<Vec<u8>>>> {
    let start = Instant::now();
    let answers = with_server(serve, |path| ask_at(path, own_process_id(), &MonitorQuestion::ALL, timeout));
    assert!(start.elapsed() < timeout + MAX_DELAY, "{:?}", start.elapsed());
    answers
}

fn answer_of(command: &str) -> Value {
    match command {
        "qmp_capabilities" => json!({"return": {}}),
        "query-cpus-fast" => json!({"return": [{"cpu-index": 0}]}),
        _ => json!({"return": []}),
    }
}

fn reason(answer: Reading<Vec<u8>>) -> String {
    match answer {
        Err(Absent::NoAnswer(why)) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn only_questions_are_sent_and_the_monitor_is_released() {
    let sent = Mutex::new(Vec::new());
    let serve = |stream: UnixStream| {
        // Returns once the client has closed the connection.
        serve_qemu(stream, |command, arguments| {
            sent.lock().unwrap().push(format!("{command} {arguments}"));
            vec![json!({"event": "RTC_CHANGE"}), answer_of(command)]
        });
    };
    let answers = ask_server(serve, LONG_TIMEOUT).unwrap();
    assert_eq!(answers, [Ok(br#"[{"cpu-index":0}]"#.to_vec()), Ok(b"[]".to_vec()), Ok(b"[]".to_vec())]);
    let expected = ["qmp_capabilities {}", "query-cpus-fast {}", "query-memdev {}", "query-hotpluggable-cpus {}"];
    assert_eq!(sent.into_inner().unwrap(), expected);
}

#[test]
fn answers_over_several_lines_are_read() {
    let serve = |mut stream: UnixStream| {
        let pretty = |value: &Value| serde_json::to_string_pretty(value).unwrap();
        let greeting: Value = serde_json::from_str(GREETING).unwrap();
        writeln!(stream, "{}", pretty(&greeting)).unwrap();
        let lines = std::io::BufRead::lines(std::io::BufReader::new(stream.try_clone().unwrap()));
        for line in lines.map_while(Result::ok) {
            let command: Value = serde_json::from_str(&line).unwrap();
            let mut answer = answer_of(command["execute"].as_str().unwrap());
            answer["id"] = command["id"].clone();
            writeln!(stream, "{}", pretty(&answer)).unwrap();
        }
    };
    assert_eq!(ask_server(serve, LONG_TIMEOUT).unwrap()[0], Ok(br#"[{"cpu-index":0}]"#.to_vec()));
}

#[test]
fn refused_question_leaves_the_other_answers() {
    let serve = |stream: UnixStream| {
        serve_qemu(stream, |command, _| {
            let refusal = json!({"error": {"class": "GenericError", "desc": "machine does not support hot-plugging"}});
            vec![if command == "query-hotpluggable-cpus" { refusal } else { answer_of(command) }]
        });
    };
    let mut answers = ask_server(serve, LONG_TIMEOUT).unwrap();
    assert!(answers[0].is_ok() && answers[1].is_ok());
    let why = reason(answers.remove(2));
    assert_eq!(why, "QEMU refuses query-hotpluggable-cpus: machine does not support hot-plugging");
}

#[test]
fn hanging_monitors_end_in_time() {
    let silent = |stream: UnixStream| read_to_end(stream);
    let greets_only = |mut stream: UnixStream| {
        writeln!(stream, "{GREETING}").unwrap();
        read_to_end(stream);
    };
    let slow = |mut stream: UnixStream| {
        let bytes = GREETING.bytes().cycle();
        for byte in bytes {
            if stream.write_all(&[byte]).is_err() {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
    };
    let endless_events = |mut stream: UnixStream| {
        writeln!(stream, "{GREETING}").unwrap();
        while writeln!(stream, "{}", json!({"event": "RESUME"})).is_ok() {}
    };
    let servers: [Box<dyn FnOnce(UnixStream) + Send>; 4] =
        [Box::new(silent), Box::new(greets_only), Box::new(slow), Box::new(endless_events)];
    for (number, serve) in servers.into_iter().enumerate() {
        let why = ask_server(serve, SHORT_TIMEOUT).unwrap_err();
        let expected = "nothing within 300 ms: QEMU hangs, or another client uses the monitor";
        assert_eq!(why, Absent::NoAnswer(expected.to_owned()), "{number}");
    }
}

#[test]
fn monitor_that_hangs_later_leaves_the_first_answer() {
    let asked = Mutex::new(Vec::new());
    let serve = |stream: UnixStream| {
        serve_qemu(stream, |command, _| {
            asked.lock().unwrap().push(command.to_owned());
            if command == "query-memdev" { Vec::new() } else { vec![answer_of(command)] }
        });
    };
    let answers = ask_server(serve, SHORT_TIMEOUT).unwrap();
    assert!(answers[0].is_ok() && reason(answers[1].clone()).starts_with("nothing within") && answers[2] == answers[1]);
    assert_eq!(asked.into_inner().unwrap().last().map(String::as_str), Some("query-memdev"), "nothing more is sent");
}

#[test]
fn false_monitors_are_named() {
    let endless = |mut stream: UnixStream| while stream.write_all(&[b'x'; 65536]).is_ok() {};
    let endless_object = |mut stream: UnixStream| {
        writeln!(stream, "{{").unwrap();
        while stream.write_all(&[b'\n'; 4096]).is_ok() {}
    };
    let garbage = |mut stream: UnixStream| {
        let _ = stream.write_all(b"{\"QMP\": [[[[\xff\n");
        read_to_end(stream);
    };
    let no_greeting = |mut stream: UnixStream| {
        let _ = writeln!(stream, "{{\"return\": []}}");
        read_to_end(stream);
    };
    let deep = |mut stream: UnixStream| {
        let _ = writeln!(stream, "{{\"QMP\": {}", "[".repeat(100_000));
        read_to_end(stream);
    };
    let servers: [Box<dyn FnOnce(UnixStream) + Send>; 5] =
        [Box::new(endless), Box::new(endless_object), Box::new(garbage), Box::new(no_greeting), Box::new(deep)];
    for (number, serve) in servers.into_iter().enumerate() {
        let why = ask_server(serve, LONG_TIMEOUT).unwrap_err();
        assert!(matches!(&why, Absent::NoAnswer(why) if why.contains("does not speak QMP")), "{number}: {why:?}");
    }
    let why = ask_server(drop, LONG_TIMEOUT).unwrap_err();
    assert!(matches!(&why, Absent::NoAnswer(_)), "{why:?}");
}

#[test]
fn answers_to_other_questions_end_the_session() {
    let serve = |mut stream: UnixStream| {
        writeln!(stream, "{GREETING}").unwrap();
        let _ = stream.read(&mut [0; 4096]);
        let _ = writeln!(stream, "{}", json!({"return": {}, "id": 1}));
        let _ = stream.read(&mut [0; 4096]);
        let _ = writeln!(stream, "{}", json!({"return": [], "id": 7}));
        read_to_end(stream);
    };
    let answers = ask_server(serve, LONG_TIMEOUT).unwrap();
    assert!(answers.into_iter().all(|answer| reason(answer).contains("does not speak QMP")));
}

#[test]
fn clients_of_a_monitor_are_found() {
    let sockets = b"Num       RefCount Protocol Flags    Type St Inode Path\n\
        00000000d3a1cc36: 00000002 00000000 00010000 0001 01 13698 /run/q 1\n\
        00000000d3a1cc37: 00000003 00000000 00000000 0001 03 13699 /run/held\n\
        00000000d3a1cc38: 00000003 00000000 00000000 0001 02 13700 /run/waits\n\
        00000000d3a1cc39: 00000003 00000000 00000000 0001 03 13701\n";
    let found = ["/run/q 1", "/run/held", "/run/waits", "/run/hel", ""].map(|path| monitor_use(sockets, path));
    use MonitorUse::{Free, InUse, Waiting};
    assert_eq!(found, [Free, InUse, Waiting, Free, Free]);
    // QEMU accepts no second client.
    let both = [&sockets[..], b"00000000d3a1cc40: 00000003 00000000 00000000 0001 02 13702 /run/held\n"].concat();
    assert_eq!(monitor_use(&both, "/run/held"), InUse);
}

/// A socket of this process, with a client or without one.
#[test]
fn clients_are_seen_in_proc() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qmp");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let read_use = || monitor_use(&std::fs::read("/proc/self/net/unix").unwrap(), path.to_str().unwrap());
    assert_eq!(read_use(), MonitorUse::Free);
    let client = UnixStream::connect(&path).unwrap();
    assert_eq!(read_use(), MonitorUse::Waiting);
    let (accepted, _) = listener.accept().unwrap();
    assert_eq!(read_use(), MonitorUse::InUse);
    drop((client, accepted));
    assert_eq!(read_use(), MonitorUse::Free);
    // A client that has left still waits.
    drop(UnixStream::connect(&path).unwrap());
    assert_eq!(wait_for_acceptance(read_use), MonitorUse::Waiting);
    drop(listener.accept().unwrap());
    assert_eq!(wait_for_acceptance(read_use), MonitorUse::Free);
}
