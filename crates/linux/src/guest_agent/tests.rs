//! Agents that answer well, late, falsely or not at all. The listener is this process, as QEMU's would be.

use super::socket::DELIMITER;
use super::*;
use pagefold_base::Pid;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

/// Short, because some agents here never answer.
const SHORT_TIMEOUT: Duration = Duration::from_millis(300);
/// Far longer than an answer takes.
const LONG_TIMEOUT: Duration = Duration::from_secs(60);
/// The longest time after its timeout at which a session may end on a busy machine.
const MAX_DELAY: Duration = Duration::from_secs(10);

const STAT: GuestQuestion = GuestQuestion::File { path: "/proc/stat", max_bytes: 4096 };

fn own_process_id() -> ProcessId {
    let stat = parse::stat(&std::fs::read("/proc/self/stat").unwrap()).unwrap();
    ProcessId { pid: stat.pid, start_time: stat.start_time }
}

/// Listens, lets `serve` talk to the client, and asks.
fn ask_server(
    serve: impl FnOnce(UnixStream) + Send,
    questions: &[GuestQuestion],
    timeout: Duration,
) -> Reading<Vec<Reading<Vec<u8>>>> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qga");
    let listener = UnixListener::bind(&path).unwrap();
    let start = Instant::now();
    let answers = thread::scope(|scope| {
        scope.spawn(move || serve(listener.accept().unwrap().0));
        ask_at(&path, own_process_id(), questions, timeout)
    });
    assert!(start.elapsed() < timeout + MAX_DELAY, "{:?}", start.elapsed());
    answers
}

fn encode(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let bits = chunk.iter().chain(&[0, 0]).take(3).fold(0u32, |bits, &byte| bits << 8 | u32::from(byte));
        for position in 0..4 {
            let digit = char::from(DIGITS[(bits >> (18 - 6 * position) & 63) as usize]);
            text.push(if position <= chunk.len() { digit } else { '=' });
        }
    }
    text
}

/// An agent with files, and the commands that it got.
#[derive(Default)]
pub(crate) struct Agent {
    files: BTreeMap<String, Vec<u8>>,
    commands: Mutex<Vec<String>>,
    /// The path of the open file, and how much of it was read.
    open_file: Mutex<(String, usize)>,
}

impl Agent {
    pub(crate) fn new(files: &[(&str, &str)]) -> Self {
        let files = files.iter().map(|(path, text)| ((*path).to_owned(), text.as_bytes().to_vec())).collect();
        Self { files, ..Self::default() }
    }

    /// Answers until the client leaves. `change` may replace the answer to a command.
    fn serve(&self, mut stream: UnixStream, change: impl Fn(&str, Value) -> Vec<u8>) {
        let (mut received, mut buffer) = (Vec::new(), [0; 4096]);
        while let Ok(count @ 1..) = stream.read(&mut buffer) {
            received.extend_from_slice(&buffer[..count]);
            while let Some(end) = received.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = received.drain(..=end).collect();
                let command: Value = serde_json::from_slice(line.strip_prefix(&[DELIMITER]).unwrap_or(&line)).unwrap();
                let name = command["execute"].as_str().unwrap();
                assert_eq!(line[0] == DELIMITER, name == "guest-sync-delimited");
                // The client may have left, with commands that are still to be read.
                let _ = stream.write_all(&change(name, self.answer(&command)));
            }
        }
    }

    /// Notes a command, and answers it.
    pub(crate) fn answer(&self, command: &Value) -> Value {
        let (name, arguments) = (command["execute"].as_str().unwrap(), &command["arguments"]);
        self.commands.lock().unwrap().push(name.to_owned());
        let mut open_file = self.open_file.lock().unwrap();
        let (open_path, position) = &mut *open_file;
        match name {
            "guest-sync-delimited" => json!({"return": arguments["id"]}),
            "guest-get-osinfo" => json!({"return": {"id": "debian", "kernel-release": "6.12.1-amd64"}}),
            "guest-get-vcpus" => json!({"return": [{"logical-id": 0, "online": true}]}),
            "guest-file-open" => {
                assert_eq!(arguments["mode"], "r", "files are opened for reading only");
                (*open_path, *position) = (arguments["path"].as_str().unwrap().to_owned(), 0);
                match self.files.contains_key(open_path) {
                    true => json!({"return": 1000}),
                    false => json!({"error": {"class": "GenericError", "desc": format!(
                        "failed to open file '{open_path}' (mode: 'r'): No such file or directory"
                    )}}),
                }
            }
            "guest-file-read" => {
                assert_eq!(arguments["handle"], 1000);
                let rest = &self.files[open_path][*position..];
                let part = &rest[..rest.len().min(arguments["count"].as_u64().unwrap() as usize)];
                *position += part.len();
                let eof = part.len() == rest.len();
                json!({"return": {"count": part.len(), "buf-b64": encode(part), "eof": eof}})
            }
            "guest-file-close" => json!({"return": {}}),
            other => panic!("{other}"),
        }
    }

    pub(crate) fn commands(&self, name: &str) -> usize {
        self.commands.lock().unwrap().iter().filter(|command| *command == name).count()
    }
}

/// The answer as the agent writes it.
fn encode_answer(command: &str, answer: &Value) -> Vec<u8> {
    let delimiter: &[u8] = if command == "guest-sync-delimited" { &[DELIMITER] } else { &[] };
    [delimiter, format!("{answer}\n").as_bytes()].concat()
}

fn unchanged(command: &str, answer: Value) -> Vec<u8> {
    encode_answer(command, &answer)
}

fn ask_agent(
    agent: &Agent,
    change: impl Fn(&str, Value) -> Vec<u8> + Send,
    questions: &[GuestQuestion],
) -> Reading<Vec<Reading<Vec<u8>>>> {
    ask_server(|stream| agent.serve(stream, change), questions, LONG_TIMEOUT)
}

fn text(answer: &Reading<Vec<u8>>) -> &str {
    std::str::from_utf8(answer.as_ref().unwrap()).unwrap()
}

fn is_no_answer<T>(reading: &Reading<T>, part: &str) -> bool {
    matches!(reading, Err(Absent::NoAnswer(why)) if why.contains(part))
}

#[test]
fn questions_are_answered_in_their_order() {
    let long = "x".repeat(3 * READ_BYTES);
    let agent = Agent::new(&[("/proc/stat", "cpu  1 2 3\n"), ("/long", &long), ("/empty", "")]);
    let questions = [
        GuestQuestion::Vcpus,
        STAT,
        GuestQuestion::File { path: "/empty", max_bytes: 10 },
        GuestQuestion::File { path: "/long", max_bytes: READ_BYTES + 5 },
        GuestQuestion::File { path: "/missing", max_bytes: 10 },
        GuestQuestion::OperatingSystem,
    ];
    let answers = ask_agent(&agent, unchanged, &questions).unwrap();
    assert_eq!(text(&answers[0]), r#"[{"logical-id":0,"online":true}]"#);
    assert_eq!((text(&answers[1]), text(&answers[2])), ("cpu  1 2 3\n", ""));
    assert_eq!(text(&answers[3]).len(), READ_BYTES + 5);
    assert_eq!(answers[4], Err(Absent::NotOnThisKernel));
    assert!(text(&answers[5]).contains("debian"));
    assert_eq!(agent.commands("guest-file-read"), 4, "no more than needed");
    assert_eq!(agent.commands("guest-file-close"), 3);
}

#[test]
fn timer_configuration_is_read_up_to_its_last_line() {
    let more = "CONFIG_X=y\n".repeat(READ_BYTES);
    let configuration =
        format!("CONFIG_NO_HZ_IDLE=y\n# CONFIG_HZ_100 is not set\nCONFIG_HZ_250=y\nCONFIG_HZ=250\n{more}");
    let agent = Agent::new(&[("/boot/config-6.12.1-amd64", &configuration)]);
    let answers = ask_agent(&agent, unchanged, &[GuestQuestion::TimerConfiguration]).unwrap();
    assert_eq!(text(&answers[0]), "CONFIG_NO_HZ_IDLE=y\nCONFIG_HZ_250=y\nCONFIG_HZ=250");
    assert_eq!(agent.commands("guest-file-read"), 1);
    assert_eq!(timer_lines(b"CONFIG_HZ=250\nCONFIG_HZ=1"), "\nCONFIG_HZ=250");
}

#[test]
fn release_of_the_kernel_cannot_name_another_file() {
    for release in ["", "../../etc/shadow", "a b", "x\n", &"1".repeat(65)] {
        let agent = Agent::new(&[]);
        let change = |command: &str, answer: Value| match command {
            "guest-get-osinfo" => encode_answer(command, &json!({"return": {"kernel-release": release}})),
            _ => unchanged(command, answer),
        };
        let answers = ask_agent(&agent, change, &[GuestQuestion::TimerConfiguration]).unwrap();
        assert!(matches!(answers[0], Err(Absent::Malformed(_))), "{release:?}: {answers:?}");
        assert_eq!(agent.commands("guest-file-open"), 0);
    }
}

#[test]
fn endless_configuration_is_bounded() {
    let agent = Agent::new(&[("/boot/config-6.12.1-amd64", &"CONFIG_X=y\n".repeat(2 * MAX_CONFIGURATION_BYTES / 11))]);
    let answers = ask_agent(&agent, unchanged, &[GuestQuestion::TimerConfiguration]).unwrap();
    assert_eq!(text(&answers[0]), "");
    assert!(agent.commands("guest-file-read") <= MAX_CONFIGURATION_BYTES / READ_BYTES + 1);
}

#[test]
fn leftovers_of_earlier_clients_are_skipped() {
    let change = |command: &str, answer: Value| match command {
        "guest-sync-delimited" => [
            b"{\"return\": {}}\n{\"ret".as_slice(),
            &encode_answer(command, &json!({"return": 7})),
            &[DELIMITER, DELIMITER],
            b"{\"error\": {}}\n",
            &[DELIMITER],
            b"{\"retu",
            &encode_answer(command, &answer),
        ]
        .concat(),
        _ => unchanged(command, answer),
    };
    let answers = ask_agent(&Agent::new(&[("/proc/stat", "cpu\n")]), change, &[STAT]).unwrap();
    assert_eq!(text(&answers[0]), "cpu\n");
}

#[test]
fn wrong_number_of_the_synchronization_is_no_session() {
    let agent = Agent::new(&[]);
    let change = |command: &str, _: Value| encode_answer(command, &json!({"return": 7}));
    let answers = ask_server(|stream| agent.serve(stream, change), &[STAT], SHORT_TIMEOUT);
    assert!(is_no_answer(&answers, "nothing within 300 ms"), "{answers:?}");
    assert_eq!(agent.commands("guest-file-open"), 0);
    // Without an end of such answers.
    let lie = |mut stream: UnixStream| while stream.write_all(b"\xff{\"return\": 7}\n").is_ok() {};
    assert!(is_no_answer(&ask_server(lie, &[STAT], SHORT_TIMEOUT), "nothing within 300 ms"));
    let delimiters = |mut stream: UnixStream| while stream.write_all(&[DELIMITER; 4096]).is_ok() {};
    assert!(is_no_answer(&ask_server(delimiters, &[STAT], SHORT_TIMEOUT), "nothing within 300 ms"));
}

/// Waits until the client disconnects.
fn stay_silent(mut stream: UnixStream) {
    let _ = stream.read_to_end(&mut Vec::new());
}

#[test]
fn silent_agent_has_no_answer() {
    let answers = ask_server(stay_silent, &[STAT], SHORT_TIMEOUT);
    assert!(is_no_answer(&answers, "no agent runs in the guest, it hangs, or another program"), "{answers:?}");
}

#[test]
fn slow_bytes_do_not_prolong_a_session() {
    let drip = |mut stream: UnixStream| {
        while stream.write_all(b"{").is_ok() {
            thread::sleep(Duration::from_millis(20));
        }
    };
    assert!(is_no_answer(&ask_server(drip, &[STAT], SHORT_TIMEOUT), "nothing within 300 ms"));
    // After the synchronization, too: answers so far stay. They come in time also on a loaded host.
    let timeout = Duration::from_secs(2);
    let agent = Agent::new(&[("/proc/stat", "cpu\n")]);
    let change = |command: &str, answer: Value| {
        if command == "guest-file-read" {
            thread::sleep(2 * timeout);
        }
        unchanged(command, answer)
    };
    let questions = [GuestQuestion::Vcpus, STAT, GuestQuestion::OperatingSystem];
    let answers = ask_server(|stream| agent.serve(stream, change), &questions, timeout).unwrap();
    assert!(answers[0].is_ok() && is_no_answer(&answers[1], "nothing") && is_no_answer(&answers[2], "nothing"));
    assert_eq!(agent.commands("guest-get-osinfo"), 0, "nothing is sent after the deadline");
    assert_eq!(agent.commands("guest-file-close"), 1, "except that the file is closed");
}

/// An agent of which so much time is left.
struct LateChannel(Arc<Agent>, Duration);

impl AgentChannelSession for LateChannel {
    fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value, CommandError> {
        Ok(self.0.answer(&json!({"execute": command, "arguments": arguments}))["return"].take())
    }

    fn remaining_time(&self) -> Duration {
        self.1
    }

    fn send_without_answer(&mut self, command: &str, _: &Value) {
        panic!("{command}");
    }
}

#[test]
fn no_file_is_opened_late_in_a_session() {
    let ask = |remaining| {
        let agent = Arc::new(Agent::new(&[("/proc/stat", "cpu\n")]));
        let session = AgentSession::new(LateChannel(Arc::clone(&agent), remaining));
        (session.answer_all(&[STAT, GuestQuestion::Vcpus]), agent.commands("guest-file-open"))
    };
    let (answers, opened) = ask(MIN_TIME_TO_OPEN - Duration::from_millis(1));
    assert!(is_no_answer(&answers[0], "does not suffice to read /proc/stat") && answers[1].is_ok(), "{answers:?}");
    assert_eq!(opened, 0, "its handle might come too late");
    let (answers, opened) = ask(MIN_TIME_TO_OPEN);
    assert!(answers.iter().all(Result::is_ok) && opened == 1, "{answers:?}");
}

#[test]
fn full_listen_queue_has_no_answer() {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qga");
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&socket, 0).unwrap();
    let _first = UnixStream::connect(&path).unwrap();
    assert!(is_no_answer(&ask_at(&path, own_process_id(), &[STAT], SHORT_TIMEOUT), "nothing within 300 ms"));
}

#[test]
fn other_protocols_end_the_session() {
    for reply in ["hello\n", "[]\n", "{\"ret\n", "{}\n", "1\n", "\u{0}\n", "\n", &"[".repeat(10_000)] {
        let agent = Agent::new(&[]);
        let change = |command: &str, answer: Value| match command {
            "guest-get-vcpus" => format!("{reply}\n").into_bytes(),
            _ => unchanged(command, answer),
        };
        let answers = ask_agent(&agent, change, &[GuestQuestion::Vcpus, GuestQuestion::OperatingSystem]).unwrap();
        for answer in &answers {
            assert!(is_no_answer(answer, "does not speak the agent's protocol"), "{reply:?}: {answers:?}");
        }
        assert_eq!(agent.commands("guest-get-osinfo"), 0, "answers would be those of other commands");
    }
}

#[test]
fn endless_line_ends_the_session() {
    let flood = |mut stream: UnixStream| while stream.write_all(&[b'x'; 65536]).is_ok() {};
    let answers = ask_server(flood, &[STAT], LONG_TIMEOUT);
    assert!(is_no_answer(&answers, "its answer is too long"), "{answers:?}");
    let agent = Agent::new(&[]);
    let change = |command: &str, answer: Value| match command {
        "guest-get-vcpus" => vec![b'x'; MAX_LINE_BYTES + 100_000],
        _ => unchanged(command, answer),
    };
    let answers = ask_agent(&agent, change, &[GuestQuestion::Vcpus]).unwrap();
    assert!(is_no_answer(&answers[0], "its answer is too long"), "{answers:?}");
}

#[test]
fn refused_commands_are_reported_and_the_session_goes_on() {
    let refusals = [
        ("guest-get-osinfo", "Command guest-get-osinfo has been disabled"),
        ("guest-file-open", "failed to open file '/proc/stat' (mode: 'r'): Permission denied"),
        ("guest-file-read", "failed to read file: Input/output error"),
    ];
    for (refused, reason) in refusals {
        let agent = Agent::new(&[("/proc/stat", "cpu\n")]);
        let change = |command: &str, answer: Value| match command == refused {
            true => encode_answer(command, &json!({"error": {"class": "GenericError", "desc": reason}})),
            false => unchanged(command, answer),
        };
        let questions = [GuestQuestion::OperatingSystem, STAT, GuestQuestion::Vcpus];
        let answers = ask_agent(&agent, change, &questions).unwrap();
        let expected = format!("the agent refuses {refused}: ");
        let refused_answer = &answers[usize::from(refused.starts_with("guest-file"))];
        assert!(is_no_answer(refused_answer, &expected), "{answers:?}");
        assert!(answers[2].is_ok(), "{answers:?}");
        assert_eq!(
            agent.commands("guest-file-open"),
            agent.commands("guest-file-close") + usize::from(refused == "guest-file-open")
        );
    }
}

#[test]
fn false_contents_of_files_are_malformed() {
    let long = encode(&vec![b'x'; READ_BYTES + 1]);
    let contents = [
        json!({"count": 4, "eof": true}),
        json!({"buf-b64": "Zg"}),
        json!({"buf-b64": "????"}),
        json!({"buf-b64": long}),
        json!([]),
    ];
    for content in contents {
        let agent = Agent::new(&[("/proc/stat", "cpu\n")]);
        let change = |command: &str, answer: Value| match command {
            "guest-file-read" => encode_answer(command, &json!({"return": content})),
            _ => unchanged(command, answer),
        };
        let answers = ask_agent(&agent, change, &[STAT]).unwrap();
        assert!(matches!(answers[0], Err(Absent::Malformed(_))), "{content}: {answers:?}");
        assert_eq!(agent.commands("guest-file-close"), 1);
    }
    let change = |command: &str, answer: Value| match command {
        "guest-file-open" => encode_answer(command, &json!({"return": "x"})),
        _ => unchanged(command, answer),
    };
    let answers = ask_agent(&Agent::new(&[]), change, &[STAT]).unwrap();
    assert!(matches!(answers[0], Err(Absent::Malformed(_))), "{answers:?}");
}

#[test]
fn file_without_end_is_cut() {
    let agent = Agent::new(&[("/proc/stat", "")]);
    let change = |command: &str, answer: Value| match command {
        "guest-file-read" => encode_answer(command, &json!({"return": {"buf-b64": "eHh4", "eof": false}})),
        _ => unchanged(command, answer),
    };
    let answers = ask_agent(&agent, change, &[GuestQuestion::File { path: "/proc/stat", max_bytes: 10 }]).unwrap();
    assert_eq!(text(&answers[0]), "x".repeat(10));
}

#[test]
fn nothing_is_sent_to_another_process() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qga");
    let own = own_process_id();
    for expected in [ProcessId { pid: Pid(1), ..own }, ProcessId { start_time: own.start_time + 1, ..own }] {
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        let heard = thread::scope(|scope| {
            let heard = scope.spawn(|| {
                let mut bytes = Vec::new();
                let _ = listener.accept().unwrap().0.read_to_end(&mut bytes);
                bytes
            });
            let answers = ask_at(&path, expected, &[STAT], LONG_TIMEOUT);
            assert!(is_no_answer(&answers, "nothing was sent"), "{answers:?}");
            heard.join().unwrap()
        });
        assert_eq!(heard, b"");
    }
}

#[test]
fn closed_or_missing_socket_has_no_answer() {
    assert!(is_no_answer(&ask_server(drop, &[STAT], LONG_TIMEOUT), ""));
    let missing = ask_at(Path::new("/nonexistent/qga"), own_process_id(), &[STAT], SHORT_TIMEOUT);
    assert!(is_no_answer(&missing, "cannot connect to /nonexistent/qga"), "{missing:?}");
}

/// A process of which only the command line is read.
struct QemuProcess(String);

impl ProcessHandle for QemuProcess {
    fn id(&self) -> ProcessId {
        own_process_id()
    }

    fn read(&self, file: &str) -> Reading<Vec<u8>> {
        assert_eq!(file, "cmdline");
        Ok(self.0.replace(' ', "\0").into_bytes())
    }

    fn links(&self, _: &str) -> Reading<Vec<String>> {
        Err(Absent::Denied)
    }

    fn resident(&self, _: &[pagefold_base::AddressRange]) -> Reading<Vec<pagefold_host::PageRun>> {
        Err(Absent::Denied)
    }

    fn mappings(&self, _: pagefold_base::AddressRange) -> Reading<Vec<pagefold_host::PagemapEntry>> {
        Err(Absent::Denied)
    }

    fn contents(
        &self,
        _: pagefold_host::ReadMethod,
        _: &[pagefold_host::PageRun],
        _: &mut dyn FnMut(usize, pagefold_host::PageView<'_>),
    ) -> Reading<()> {
        Err(Absent::Denied)
    }
}

#[test]
fn channel_is_found_on_the_command_line() {
    let ask_by = |access: AgentAccess, device: &str| {
        let port = "-device virtserialport,chardev=a,name=org.qemu.guest_agent.0";
        let process = QemuProcess(format!("qemu-system-x86_64 -chardev {device} {port}"));
        super::ask(&LiveHost::new(), &process, &[GuestQuestion::Vcpus], access)
    };
    let ask = |device: &str| ask_by(AgentAccess::Socket, device);
    let managed = ask("socket,id=a,fd=3,server=on");
    assert!(matches!(&managed, Err(Absent::NotAsked(why)) if why.contains("libvirt")), "{managed:?}");
    // Where it is permitted to ask through libvirt, a failure is no lack of permission. This process is no domain.
    let failed = ask_by(AgentAccess::SocketOrLibvirt, "socket,id=a,fd=3,server=on");
    let is_hidden = failed == Err(Absent::Denied);
    assert!(is_hidden || is_no_answer(&failed, "libvirt does not know the process"), "{failed:?}");
    assert!(is_no_answer(&ask("pty,id=a"), "no Unix socket but: pty"));
    assert_eq!(ask("socket,id=b,path=/x,server=on"), Err(Absent::NotOnThisKernel));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qga");
    let listener = UnixListener::bind(&path).unwrap();
    let agent = Agent::new(&[]);
    let answers = thread::scope(|scope| {
        scope.spawn(|| agent.serve(listener.accept().unwrap().0, unchanged));
        ask(&format!("socket,id=a,path={},server=on,wait=off", path.display()))
    });
    assert!(text(&answers.unwrap()[0]).contains("logical-id"));
}
