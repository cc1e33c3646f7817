//! Questions to agents through daemons that answer as libvirt does, lie, or hang.

use super::*;
use crate::guest_agent::AgentSession;
use crate::guest_agent::tests::Agent;
use crate::libvirt::tests::{Call, SHORT_TIMEOUT, UUID, domain, reply, reply_of_program, with_answering_daemon};
use crate::libvirt::{PROC_DOMAIN_LOOKUP_BY_UUID, STATUS_OK, parse_uuid};
use pagefold_host::guest_agent::GuestQuestion;
use serde_json::json;
use std::sync::Arc;

/// Far longer than an answer takes.
const LONG_TIMEOUT: Duration = Duration::from_secs(60);

const STAT: GuestQuestion = GuestQuestion::File { path: "/proc/stat", max_bytes: 4096 };

/// What libvirt does with a command.
enum Reaction {
    /// The agent's answer, as text.
    Answer(String),
    /// An error of libvirt, with its number.
    Error(u32, String),
    Silence,
}

/// libvirt's reaction to an answer of the agent.
fn react(name: &str, answer: &Value) -> Reaction {
    match answer.get("error") {
        Some(error) => {
            let desc = error["desc"].as_str().unwrap();
            Reaction::Error(1, format!("internal error: unable to execute QEMU agent command '{name}': {desc}"))
        }
        None => Reaction::Answer(answer.to_string()),
    }
}

/// The command of a call, whose other arguments must be those of the domain and of a time limit.
fn parse_command(arguments: &[u8]) -> Value {
    let mut arguments = XdrReader(arguments);
    assert_eq!(arguments.take_bytes().unwrap(), b"db numa,x=1");
    assert_eq!(arguments.take(16).unwrap(), parse_uuid(UUID).unwrap());
    assert_eq!(arguments.take_number().unwrap(), 7);
    let command = serde_json::from_slice(arguments.take_bytes().unwrap()).unwrap();
    assert!((1..=60).contains(&arguments.take_number().unwrap()), "libvirt must not wait without an end");
    assert_eq!((arguments.take_number().unwrap(), arguments.0), (0, &[][..]), "no flags");
    command
}

/// Asks an agent through a daemon. `change` may replace the reaction to a command.
fn ask(
    agent: &Arc<Agent>,
    timeout: Duration,
    change: impl Fn(&str, &Value) -> Reaction + Send + 'static,
    questions: &[GuestQuestion],
) -> Vec<Reading<Vec<u8>>> {
    let agent = Arc::clone(agent);
    let answer = move |call: &Call<'_>| {
        let Call { program, procedure, serial, arguments } = *call;
        if (program, procedure) != (QEMU_PROGRAM, QEMU_PROC_DOMAIN_AGENT_COMMAND) {
            let content = if procedure == PROC_DOMAIN_LOOKUP_BY_UUID { domain(UUID) } else { Vec::new() };
            return Some(reply(procedure, serial, STATUS_OK, &content));
        }
        let command = parse_command(arguments);
        let mut content = XdrWriter::default();
        let status = match change(command["execute"].as_str().unwrap(), &agent.answer(&command)) {
            Reaction::Silence => return None,
            Reaction::Answer(text) => {
                content.put_number(1);
                content.put_bytes(text.as_bytes());
                STATUS_OK
            }
            Reaction::Error(code, text) => {
                [code, 10, 1].into_iter().for_each(|number| content.put_number(number));
                content.put_bytes(text.as_bytes());
                1
            }
        };
        Some(reply_of_program(program, procedure, serial, status, &content.0))
    };
    with_answering_daemon(timeout, answer, |connection| {
        let mut connection = connection.unwrap();
        let domain = connection.look_up(parse_uuid(UUID).unwrap()).unwrap();
        AgentSession::new(DomainAgent { connection, domain, timeout, is_unresponsive: false }).answer_all(questions)
    })
}

fn text(answer: &Reading<Vec<u8>>) -> &str {
    std::str::from_utf8(answer.as_ref().unwrap()).unwrap()
}

fn is_no_answer(answer: &Reading<Vec<u8>>, part: &str) -> bool {
    matches!(answer, Err(Absent::NoAnswer(why)) if why.contains(part))
}

#[test]
fn agent_of_a_domain_answers_through_libvirt() {
    let long = "x".repeat(100_000);
    let agent = Arc::new(Agent::new(&[("/proc/stat", "cpu  1\n"), ("/long", &long)]));
    let questions = [
        GuestQuestion::Vcpus,
        STAT,
        GuestQuestion::File { path: "/missing", max_bytes: 10 },
        GuestQuestion::File { path: "/long", max_bytes: 70_000 },
        GuestQuestion::OperatingSystem,
    ];
    let answers = ask(&agent, LONG_TIMEOUT, react, &questions);
    assert_eq!(text(&answers[0]), r#"[{"logical-id":0,"online":true}]"#);
    assert_eq!(text(&answers[1]), "cpu  1\n");
    assert_eq!(answers[2], Err(Absent::NotOnThisKernel));
    assert_eq!(text(&answers[3]).len(), 70_000);
    assert!(text(&answers[4]).contains("debian"));
    assert_eq!((agent.commands("guest-file-read"), agent.commands("guest-file-close")), (3, 2));
    assert_eq!(agent.commands("guest-sync-delimited"), 0, "libvirt synchronizes");
}

#[test]
fn refused_command_is_reported_and_the_session_goes_on() {
    let agent = Arc::new(Agent::new(&[("/proc/stat", "cpu\n")]));
    let change = |name: &str, answer: &Value| match name {
        "guest-get-osinfo" => react(name, &json!({"error": {"desc": "it has been disabled\u{1b}"}})),
        _ => react(name, answer),
    };
    let answers = ask(&agent, LONG_TIMEOUT, change, &[GuestQuestion::OperatingSystem, STAT]);
    let expected = "the agent refuses guest-get-osinfo: it has been disabled\\u{1b}";
    assert_eq!(answers[0], Err(Absent::NoAnswer(expected.to_owned())));
    assert_eq!(text(&answers[1]), "cpu\n");
}

#[test]
fn unresponsive_agent_ends_the_session() {
    let agent = Arc::new(Agent::new(&[]));
    let change = |_: &str, _: &Value| Reaction::Error(86, "Guest agent is not responding".to_owned());
    let answers = ask(&agent, LONG_TIMEOUT, change, &[GuestQuestion::OperatingSystem, STAT]);
    assert!(
        answers.iter().all(|answer| is_no_answer(answer, "Guest agent is not responding (error 86)")),
        "{answers:?}"
    );
    assert_eq!(agent.commands("guest-file-open"), 0);
}

#[test]
fn hanging_agent_is_left_in_time_and_gets_no_more_commands() {
    let agent = Arc::new(Agent::new(&[("/proc/stat", "cpu\n")]));
    let change = |name: &str, answer: &Value| match name {
        "guest-file-read" => Reaction::Silence,
        _ => react(name, answer),
    };
    let questions = [GuestQuestion::Vcpus, STAT, GuestQuestion::OperatingSystem];
    // Answers so far come in time also on a loaded host.
    let answers = ask(&agent, 4 * SHORT_TIMEOUT, change, &questions);
    assert!(answers[0].is_ok(), "{answers:?}");
    assert!(
        answers[1..].iter().all(|answer| is_no_answer(answer, "nothing within 2000 ms through libvirt")),
        "{answers:?}"
    );
    let commands = ["guest-file-read", "guest-get-osinfo", "guest-file-close"].map(|name| agent.commands(name));
    assert_eq!(commands, [1, 0, 0], "they would wait in libvirt behind the read");
}

#[test]
fn file_is_closed_after_a_failure_unless_the_agent_is_unresponsive() {
    for (code, closed) in [(38, 1), (AGENT_UNRESPONSIVE, 0)] {
        let agent = Arc::new(Agent::new(&[("/proc/stat", "cpu\n")]));
        let change = move |name: &str, answer: &Value| match name {
            "guest-file-read" => Reaction::Error(code, "failed".to_owned()),
            _ => react(name, answer),
        };
        let answers = ask(&agent, LONG_TIMEOUT, change, &[STAT, GuestQuestion::Vcpus]);
        assert!(answers.iter().all(|answer| is_no_answer(answer, "libvirt refuses: failed")), "{answers:?}");
        assert_eq!((agent.commands("guest-get-vcpus"), agent.commands("guest-file-close")), (0, closed));
    }
}

#[test]
fn false_answers_end_the_session() {
    let long = format!("{{\"return\": \"{}\"}}", "x".repeat(MAX_LINE_BYTES));
    for (answer, why) in
        [("[[[", "no JSON"), ("{}", "no result"), ("7", "no result"), ("", "no JSON"), (&long, "too long")]
    {
        let agent = Arc::new(Agent::new(&[]));
        let lie = answer.to_owned();
        let change = move |_: &str, _: &Value| Reaction::Answer(lie.clone());
        let answers = ask(&agent, LONG_TIMEOUT, change, &[GuestQuestion::Vcpus, GuestQuestion::OperatingSystem]);
        assert!(answers.iter().all(|answer| is_no_answer(answer, why)), "{answers:?}");
        assert_eq!(agent.commands("guest-get-osinfo"), 0);
    }
    assert!(parse_result(&[0; 4]).unwrap_err().to_string().contains("no answer of the agent"));
    assert!(parse_result(&[]).is_err());
}
