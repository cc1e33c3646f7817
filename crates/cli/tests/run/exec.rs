//! `pagefold run` changes nothing about the program except the enrollment of its memory: the tests compare with a
//! direct start. The same holds for the methods with a companion process or a preloaded library.

use crate::test_programs::{
    self, ENV_DEFAULT_SIGNALS, PAGEFOLD_BINARY, ProgramTimeout, has_ksm, has_program, lossy_text, refusal_line,
    run_command, run_with_prctl_refused,
};
use nix::sys::wait::{Id as WaitId, WaitPidFlag};
use pagefold_labs::client::install_executable;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, Stdio};

/// Commands that start a program as the direct child of the caller: words to put before the program.
fn start_commands() -> Vec<Vec<String>> {
    let words = |command: Command| {
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        words.map(|word| word.to_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let mut preload = words(run_command());
    preload.extend(["--method", "preload"].map(str::to_owned));
    vec![words(run_command()), preload, words(run_with_prctl_refused(1))]
}

/// Compare the output of a shell script in which `{}` is `pagefold run`, for each method, with a direct start.
fn compare_with_direct_start(script: &str) {
    let output = |shell: &[&str], starter: &str| {
        let mut command = Command::new(shell[0]);
        command.args(&shell[1..]).arg(script.replace("{}", starter));
        command.env("PAGEFOLD_PRELOAD", test_programs::preload_library()).output().unwrap()
    };
    let lab = pagefold_labs::client::lab_binary().unwrap();
    let refused = [lab.to_str().unwrap(), "refuse-prctl", "--", "sh", "-c"];
    let expected = output(&["sh", "-c"], "env -u no-such-variable");
    for (shell, options) in [(&refused[3..], ""), (&refused[3..], "--method preload"), (&refused[..], "")] {
        let found = output(shell, &format!("{PAGEFOLD_BINARY} run --across-domains {options} --"));
        assert_eq!(lossy_text(&found.stderr), lossy_text(&expected.stderr), "{shell:?} {options}: {script}");
        assert_eq!(lossy_text(&found.stdout), lossy_text(&expected.stdout), "{shell:?} {options}: {script}");
        assert_eq!(found.status, expected.status, "{shell:?} {options}: {script}");
    }
}

#[test]
fn exit_status_and_signal_are_those_of_the_program() {
    if !has_ksm() {
        return;
    }
    for status in (0..=255).step_by(15).chain([1, 2, 125, 126, 127, 128]) {
        let found = run_command().args(["--", "sh", "-c", &format!("exit {status}")]).status().unwrap();
        assert_eq!(found.code(), Some(status));
    }
    for (signal, number) in [("TERM", 15), ("KILL", 9), ("SEGV", 11), ("PIPE", 13), ("INT", 2), ("USR1", 10)] {
        let found = run_command().args(["--", "sh", "-c", &format!("kill -{signal} $$")]).status().unwrap();
        assert_eq!((found.signal(), found.code()), (Some(number), None), "SIG{signal}");
    }
}

#[test]
fn unstartable_program_exits_as_in_a_shell() {
    if !has_ksm() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dull");
    fs::write(&path, "no program").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    for (program, status) in [
        ("no-such-program", 127),
        ("/no/such/program", 127),
        (path.to_str().unwrap(), 126),
        (folder.path().to_str().unwrap(), 126),
    ] {
        for options in [&[][..], &["--method", "preload"]] {
            let Output { status: found, stdout, stderr } =
                run_command().args(options).args(["--", program]).output().unwrap();
            let error = lossy_text(&stderr);
            assert_eq!((found.code(), lossy_text(&stdout).as_str()), (Some(status), ""), "{error}");
            assert!(error.starts_with(&format!("pagefold: {program}: ")) && error.lines().count() == 1, "{error}");
        }
    }
    // Neither ELF nor `#!`: execvp starts the shell for it.
    let script = folder.path().join("script");
    fs::write(&path, "echo $0 $1").unwrap();
    install_executable(&path, &script, 0o755).unwrap();
    let output = run_command().arg("--").arg(&script).arg("word").output().unwrap();
    assert_eq!(lossy_text(&output.stdout), format!("{} word\n", script.display()));
}

#[test]
fn signal_state_is_preserved() {
    if !has_ksm() {
        return;
    }
    for signals in [
        "--default-signal",
        "--ignore-signal=PIPE",
        "--ignore-signal=PIPE,CHLD,HUP,INT",
        "--block-signal=CHLD,USR1,PIPE",
        "--ignore-signal=SEGV,BUS --block-signal=CHLD,TERM",
    ] {
        // The first 28 signals: 32 and 33 are glibc's own, which it sets up together with the library's thread.
        compare_with_direct_start(&format!(
            "env {signals} {{}} grep -E '^(Sig[BIC]|ShdPnd|SigPnd)' /proc/self/status | sed -E 's/\t.{{9}}/ /'"
        ));
    }
    // A program that writes to a closed pipe dies of SIGPIPE without a message.
    compare_with_direct_start(
        "{ env --default-signal=PIPE {} sh -c 'while echo; do :; done'; echo $? >&2; } | head -n 1",
    );
}

#[test]
fn descriptors_arguments_and_environment_are_preserved() {
    if !has_ksm() {
        return;
    }
    let list = "sh -c 'for i in 0 1 2 3 4 5 6 7 8 9; do readlink /proc/$$/fd/$i && echo $i; done; :'";
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("output");
    for redirection in ["", "0<&-", "0<&- 2>&-", "</dev/zero 7</dev/null 2>/dev/full"] {
        // A file, because the names of pipes differ between runs.
        let file = file.display();
        compare_with_direct_start(&format!(
            "exec 3>&1 >{file}; {{}} {list} {redirection} 3>&-; sed s/pipe:.*/pipe/ {file} >&3; exec 3>&-"
        ));
    }
    compare_with_direct_start("{} sh -c 'printf \"%s|\" \"$0\" \"$@\"' zero '' 'a b' -- --help -x");
    compare_with_direct_start("A=1 env -u PAGEFOLD_PRELOAD {} env | grep -v -e ^_= -e ^PAGEFOLD_ -e ^LD_PRELOAD=");
    compare_with_direct_start("cd /; umask 027; ulimit -n 99; {} sh -c 'pwd; umask; ulimit -n'");
    // The program is not searched for in another directory or under another name.
    compare_with_direct_start("PATH=/nowhere:/usr/bin:/bin; {} sh -c 'echo $0'");
}

#[test]
fn program_keeps_the_pid() {
    if !has_ksm() {
        return;
    }
    for starter in start_commands() {
        let starter = starter.join(" ");
        // Pid, parent, process group, session and terminal: the fields of stat after the name and state.
        let script = format!(
            "cut -d' ' -f1,4-7 /proc/$$/stat; \
             exec {starter} -- sh -c 'cut -d\" \" -f1,4-7 /proc/$$/stat; cut -d\" \" -f1 /proc/$$/task/$$/children'"
        );
        let output =
            Command::new("sh").args(["-c", &script]).env("PAGEFOLD_PRELOAD", test_programs::preload_library()).output();
        let found = lossy_text(&output.unwrap().stdout);
        let lines: Vec<&str> = found.lines().collect();
        assert_eq!(lines[0], lines[1], "{starter}");
        // The only child is the `cut` that reads the list.
        assert_eq!(lines.len(), 3, "{found}");
    }
}

#[test]
fn program_controls_its_terminal() {
    if !has_ksm() || !has_program("script") {
        return;
    }
    for starter in [vec![], start_commands().remove(0), start_commands().remove(1)] {
        let prefix = if starter.is_empty() { String::new() } else { format!("{} --", starter.join(" ")) };
        let command = format!(
            "stty cols 91 rows 33; {prefix} stty size; \
             exec {prefix} sh -c 'test -t 0 && test -t 1 && echo waiting; exec sleep 1000'"
        );
        let mut script = Command::new("env")
            .args([ENV_DEFAULT_SIGNALS, "script", "--quiet", "--return", "--command", &command, "/dev/null"])
            .env("PAGEFOLD_PRELOAD", test_programs::preload_library())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let timeout = ProgramTimeout::new(&script);
        let (mut input, mut output) = (script.stdin.take().unwrap(), script.stdout.take().unwrap());
        let mut text = Vec::new();
        while !lossy_text(&text).contains("waiting") {
            let mut byte = [0];
            assert_eq!(output.read(&mut byte).unwrap(), 1, "{}", lossy_text(&text));
            text.push(byte[0]);
        }
        assert!(lossy_text(&text).contains("33 91"), "{}", lossy_text(&text));
        // Ctrl-C, which the terminal turns into a signal to its foreground process group.
        input.write_all(b"\x03").unwrap();
        input.flush().unwrap();
        // Read to the end of its output, that is, until it exits: the timeout must not outlive the program.
        output.read_to_end(&mut text).unwrap();
        drop(timeout);
        assert_eq!(script.wait().unwrap().code(), Some(128 + 2), "{prefix}: {}", lossy_text(&text));
    }
}

#[test]
fn program_can_be_stopped_and_continued() {
    if !has_ksm() {
        return;
    }
    for starter in start_commands() {
        let mut command = Command::new(&starter[0]);
        command.args(&starter[1..]).args(["--", "sh", "-c", "echo ready; read line; exit 7"]);
        command.env("PAGEFOLD_PRELOAD", test_programs::preload_library()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let timeout = ProgramTimeout::new(&child);
        let mut ready = [0; 6];
        child.stdout.take().unwrap().read_exact(&mut ready).unwrap();
        let pid = nix::unistd::Pid::from_raw(child.id() as i32);
        let stopped = nix::sys::wait::WaitStatus::Stopped(pid, nix::sys::signal::Signal::SIGSTOP);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGSTOP).unwrap();
        let wait = nix::sys::wait::waitpid(pid, Some(WaitPidFlag::WUNTRACED));
        assert_eq!(wait, Ok(stopped), "a wait for pagefold must report the program's stop");
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGCONT).unwrap();
        drop(child.stdin.take());
        let id = WaitId::Pid(pid);
        nix::sys::wait::waitid(id, WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT).unwrap();
        drop(timeout);
        assert_eq!(child.wait().unwrap().code(), Some(7));
    }
}

#[test]
fn usage_errors_are_one_line() {
    assert!(refusal_line(run_command().args(["--host", "recording:/tmp", "--", "true"])).contains("this machine only"));
    let missing = refusal_line(
        run_command().args(["--method", "preload", "--", "true"]).env("PAGEFOLD_PRELOAD", "/no/library.so"),
    );
    assert!(missing.contains("PAGEFOLD_PRELOAD=/no/library.so"), "{missing}");
    assert_eq!(run_command().output().unwrap().status.code(), Some(2));
}
