//! Recordings over time (traces): unchanged data is stored once, each recording can be read by itself, and the daemon
//! replays them by the recorded clock.

use pagefold_labs::client::RunningLab;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Output};

fn run_pagefold(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pagefold")).args(arguments).output().expect("the binary runs")
}

fn stdout_text(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_folder(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// Write a trace of an unchanging host, with recordings at the given seconds after 2023-11-14 22:13:20 UTC.
/// `extra_lines` are added to the description of each recording.
fn write_trace(root: &Path, seconds: &[f64], extra_lines: &str) {
    let recording = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/recordings/linux-6.18");
    fs::create_dir(root).unwrap();
    fs::write(root.join("recording.toml"), "schema = \"pagefold.recording.moments/1\"\n").unwrap();
    for (number, second) in seconds.iter().enumerate() {
        let folder = root.join(format!("{number:06}"));
        copy_folder(&recording, &folder);
        let description = fs::read_to_string(folder.join("recording.toml")).unwrap();
        let description =
            format!("{description}at_seconds = {second}\ntime = {}\n{extra_lines}", 1_700_000_000.0 + second);
        fs::write(folder.join("recording.toml"), description).unwrap();
    }
}

#[test]
fn trace_replay_is_deterministic() {
    let folder = tempfile::tempdir().unwrap();
    let (root, config) = (folder.path().join("day"), folder.path().join("pagefold.toml"));
    // One hour, in which all processes start at the beginning.
    let seconds: Vec<f64> = (0..20).map(f64::from).chain((1..=6).map(|tens| f64::from(tens) * 600.0)).collect();
    write_trace(&root, &seconds, "");
    fs::write(&config, "[daemon]\nmin_memory = \"4KiB\"\nmin_profit = \"4KiB\"\nmax_cpu_seconds_per_mib = 1000.0\n")
        .unwrap();
    let (host, config) = (format!("recording:{}", root.display()), config.display().to_string());
    let run = |more: &[&str]| {
        let arguments = ["--config", &config, "--host", &host, "daemon"];
        run_pagefold(&[&arguments[..], more].concat())
    };
    let text = stdout_text(&run(&[]));
    assert_eq!(text, stdout_text(&run(&[])), "two replays of one trace differ");
    assert!(text.contains("census") && text.contains("new process"), "{text}");
    assert!(text.contains("it should save"), "{text}");

    let decisions: Vec<serde_json::Value> =
        stdout_text(&run(&["--json"])).lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(decisions.len(), text.lines().count());
    let times: Vec<u64> = decisions.iter().map(|decision| decision["time_ms"].as_u64().unwrap()).collect();
    assert!(times.is_sorted() && times[0] >= 1_700_000_000_000, "{times:?}");
    assert!(times.iter().any(|time| *time >= 1_700_000_600_000), "the daemon must scan again later: {times:?}");
    let merge = decisions.iter().find(|decision| decision["kind"] == "merge").expect("the daemon decided on no merge");
    assert!(merge["predicted"].as_u64() > Some(0) && merge["carried_out"] == false, "{merge}");

    assert_eq!(run(&["--mode", "act"]).status.code(), Some(2), "a recording cannot be changed");
    assert_eq!(run(&["--mode", "observe"]).stdout, b"", "a daemon in observe mode must decide nothing");
}

#[test]
fn quiet_hours_use_the_recorded_clock() {
    let replay = |extra_lines: &str, hours: &str| {
        let folder = tempfile::tempdir().unwrap();
        let (root, config) = (folder.path().join("day"), folder.path().join("pagefold.toml"));
        write_trace(&root, &(0..20).map(f64::from).collect::<Vec<_>>(), extra_lines);
        fs::write(&config, format!("[daemon]\nmin_memory = \"4KiB\"\nquiet_hours = [{hours:?}]\n")).unwrap();
        let (host, config) = (format!("recording:{}", root.display()), config.display().to_string());
        stdout_text(&run_pagefold(&["--config", &config, "--host", &host, "daemon"]))
    };
    let offset_line = "utc_offset_seconds = 7200\n";
    for (extra_lines, hours, quiet) in [
        (offset_line, "00:00-01:00", true),
        (offset_line, "22:00-23:00", false),
        (offset_line, "22:00-23:00Z", true),
        ("", "22:00-23:00", true),
        ("", "00:00-01:00", false),
    ] {
        let text = replay(extra_lines, hours);
        assert_eq!(text.contains("quiet hours"), quiet, "{extra_lines}{hours}: {text}");
        assert_eq!(text.contains("census"), !quiet, "{extra_lines}{hours}: {text}");
    }
}

/// The flags and content that a page file has for each page. Frames are left out, because the kernel may move a page at
/// any time.
fn page_lines_without_frames(pages: &Path) -> BTreeSet<(u64, [String; 2])> {
    let text = fs::read_to_string(pages).unwrap();
    let pages_of_line = |line: &str| {
        let words: Vec<_> = line.split(' ').collect();
        let [address, pages, _frame, flags, content] = words[..] else { panic!("not a line of a page file: {line}") };
        let (address, pages) = (u64::from_str_radix(address, 16).unwrap(), pages.parse::<u64>().unwrap());
        let flags_and_content = [flags.to_owned(), content.to_owned()];
        (0..pages).map(move |page| (address + page * 4096, flags_and_content.clone()))
    };
    text.lines().flat_map(pages_of_line).collect()
}

#[test]
fn trace_recording_ends_after_its_length() {
    let lab = RunningLab::start_layout(&["within=512", "zero=64"]).expect("cannot start pagefold-lab");
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("moments");
    let (path, pid) = (root.display().to_string(), format!("--pid={}", lab.pid()));
    let output =
        run_pagefold(&["record", "--interval", "200ms", "--duration", "500ms", "--pass-interval", "0", &pid, &path]);
    let text = stdout_text(&output);
    assert!(text.contains("the time limit is reached"), "{text}");
    let pages = |number: u32| root.join(format!("{number:06}/pages/{}.txt", lab.pid()));
    // On a busy machine a recording takes longer, so there are fewer of them. The last one began before the end.
    let count = (0..3).take_while(|number| pages(*number).exists()).count();
    assert!(
        count >= 1 && text.contains(&format!("Recorded a trace of {count} recordings of up to 1 process")),
        "{text}"
    );
    let inode =
        |number: u32| fs::metadata(root.join(format!("{number:06}/files/proc/{}/cmdline", lab.pid()))).unwrap().ino();
    assert!((1..count as u32).all(|number| inode(number) == inode(0)), "unchanged files must be stored once");
    let first = page_lines_without_frames(&pages(0));
    for number in 1..count as u32 {
        let later = page_lines_without_frames(&pages(number));
        let changed: Vec<_> = first.symmetric_difference(&later).collect();
        assert!(changed.is_empty(), "recording {number} has changed pages of a sleeping process: {changed:?}");
    }

    for host in [root.clone(), root.join("000000")] {
        let census = stdout_text(&run_pagefold(&[&format!("--host=recording:{}", host.display()), "census", "--json"]));
        let census: serde_json::Value = serde_json::from_str(&census).unwrap();
        assert_eq!(census["processes"].as_array().map(Vec::len), Some(1), "{census}");
    }
    stdout_text(&run_pagefold(&[&format!("--host=recording:{path}"), "daemon"]));
    let full = run_pagefold(&["record", "--interval", "1s", &pid, &path]);
    assert_eq!(full.status.code(), Some(2), "record must not overwrite an existing trace: {full:?}");
}

#[test]
fn trace_recording_ends_at_its_size_limit() {
    let lab = RunningLab::start_layout(&["unique=64"]).expect("cannot start pagefold-lab");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("moments").display().to_string();
    let pid = format!("--pid={}", lab.pid());
    let text = stdout_text(&run_pagefold(&[
        "record",
        "--interval",
        "10ms",
        "--max-bytes",
        "1KiB",
        "--pass-interval",
        "0",
        &pid,
        &path,
    ]));
    assert!(text.contains("Recorded a trace of 1 recording ") && text.contains("--max-bytes"), "{text}");
}
