//! `pagefold doctor --guest-agent` and `pagefold tune verify --guest-agent` with QEMU's agent in an emulated guest.

use pagefold_labs::machine::{EmulatedMachine, find_agent_assets};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// The emulated machine boots within seconds, and within minutes on a loaded host.
const TIMEOUT: Duration = Duration::from_secs(300);

/// The process of QEMU whose command line names this socket.
fn find_qemu(socket: &Path) -> Option<String> {
    let name = socket.to_str()?;
    let processes = fs::read_dir("/proc").ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    processes.filter(|pid| pid.parse::<u32>().is_ok()).find(|pid| {
        let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command);
        command.starts_with("qemu-system") && command.contains(name)
    })
}

/// Verdict and value of each finding about guests.
fn examine_guest(arguments: &[&str]) -> Findings {
    let arguments = [&["doctor", "--guest-agent", "--topic", "guest"], arguments].concat();
    findings_of(&run_json(&arguments).1["findings"])
}

/// The same by `tune verify`, which must fail as soon as it has all answers: a CPU of the guest is offline.
fn verify_guest(arguments: &[&str]) -> Findings {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().to_str().unwrap();
    let (code, report) = run_json(&[&["tune", "verify", "--guest-agent", "--state", state], arguments].concat());
    let findings = findings_of(&report["guests"]);
    let is_failed = findings.values().any(|(verdict, _)| verdict == "fail");
    let is_unknown = findings.values().any(|(verdict, _)| verdict == "unknown");
    assert_eq!(
        code,
        if is_failed {
            1
        } else if is_unknown {
            3
        } else {
            0
        },
        "{report}"
    );
    findings
}

/// The exit status and the report of a command.
fn run_json(arguments: &[&str]) -> (i32, Value) {
    let output = Command::new(env!("CARGO_BIN_EXE_pagefold")).args(arguments).arg("--json").output().unwrap();
    let report = serde_json::from_slice(&output.stdout).unwrap_or_else(|why| panic!("{why}: {output:?}"));
    (output.status.code().expect("pagefold was killed by a signal"), report)
}

fn findings_of(findings: &Value) -> Findings {
    let text = |finding: &Value, key: &str| finding[key].as_str().unwrap().to_owned();
    let findings = findings.as_array().unwrap().iter();
    findings.map(|finding| (text(finding, "rule"), (text(finding, "verdict"), text(finding, "value")))).collect()
}

type Findings = BTreeMap<String, (String, String)>;

/// Whether all answers came in time. On a loaded host, an emulated guest may take longer for some.
fn is_answered(findings: &Findings) -> bool {
    assert_eq!(findings.len(), 5);
    let mut unknown = findings.iter().filter(|(_, (verdict, _))| verdict == "unknown");
    for (rule, (_, value)) in unknown.clone() {
        let is_late = ["nothing within 1000 ms", "the time of the session does not suffice to read"];
        assert!(is_late.iter().any(|why| value.contains(why)), "{rule}: {value}");
    }
    unknown.next().is_none()
}

/// The first findings with all answers.
fn wait_for_answers(mut examine: impl FnMut() -> Findings) -> Findings {
    let start = Instant::now();
    loop {
        let findings = examine();
        if is_answered(&findings) {
            return findings;
        }
        assert!(start.elapsed() < TIMEOUT, "{findings:?}");
    }
}

/// Makes a recording with the answers of the guest, and examines it by a command.
fn examine_recording(pid: &str, examine: fn(&[&str]) -> Findings) -> Findings {
    let folder = tempfile::tempdir().unwrap();
    let recording = folder.path().join("recording");
    let arguments = ["record", "--guest-agent", "--pass-interval", "0", "--pid", pid];
    let recorded = Command::new(env!("CARGO_BIN_EXE_pagefold")).args(arguments).arg(&recording).output().unwrap();
    assert!(recorded.status.success(), "{recorded:?}");
    examine(&["--host", &format!("recording:{}", recording.display())])
}

#[test]
fn agent_of_a_guest_is_asked() {
    let (kernel, agent) = match find_agent_assets() {
        Ok(assets) => assets,
        Err(why) => return println!("skipped: {why}"),
    };
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("agent.sock");
    let channel = format!("socket,id=agent,path={},server=on,wait=off", socket.display());
    let machine = EmulatedMachine {
        kernel: &kernel,
        init: &Path::new(env!("CARGO_MANIFEST_DIR")).join("../../labs/guest/init-agent"),
        programs: &[(&agent, "bin/qemu-ga")],
        files: &[],
        options: &[
            ["-smp", "2"],
            ["-m", "512M"],
            ["-device", "virtio-serial"],
            ["-chardev", &channel],
            ["-device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0"],
        ]
        .concat(),
        kernel_arguments: "",
    };
    let mut is_checked = false;
    let ended = machine.run(folder.path(), TIMEOUT, &mut || {
        let Some(pid) = find_qemu(&socket).filter(|_| socket.exists()) else { return Ok(()) };
        // Before the agent starts, each attempt ends in time, and does no harm to later ones.
        let findings = wait_for_answers(|| examine_guest(&["--pid", &pid]));
        check_answers(&findings);
        // While another program uses the channel, the agent is not reached, and later it is again.
        let other = UnixStream::connect(&socket).unwrap();
        let busy = examine_guest(&["--pid", &pid]);
        assert!(!is_answered(&busy) && busy.values().all(|(verdict, _)| verdict == "unknown"), "{busy:?}");
        drop(other);
        assert_eq!(wait_for_answers(|| examine_guest(&["--pid", &pid])), findings);
        assert_eq!(wait_for_answers(|| verify_guest(&["--pid", &pid])), findings);
        for examine in [examine_guest, verify_guest] {
            assert_eq!(wait_for_answers(|| examine_recording(&pid, examine)), findings);
        }
        assert_eq!(findings_of(&run_json(&["tune", "verify", "--pid", &pid]).1["guests"]), Findings::new());
        is_checked = true;
        Err(io::Error::other("the checks have ended"))
    });
    assert!(is_checked, "{ended:?}");
}

/// The machine is emulated, so rules about KVM do not apply.
fn check_answers(findings: &Findings) {
    let finding = |rule: &str| (findings[rule].0.as_str(), findings[rule].1.as_str());
    assert_eq!(finding("guest-cpus-online"), ("fail", "1 online and 1 offline in the guest, 2 of the machine"));
    assert_eq!(finding("guest-timer-frequency"), ("ok", "250 Hz, periodic"));
    for rule in ["guest-clocksource", "guest-haltpoll", "guest-steal"] {
        assert_eq!(finding(rule), ("not_applicable", "not KVM"));
    }
}
