//! Real virtual machines: they start with the requested memory, and none outlives the lab.

use std::fs;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use pagefold_labs::assets::GuestAssets;
use pagefold_labs::client::{RunningLab, lab_binary, query_guest};
use pagefold_labs::output_lines::GuestLine;
use rustix::process::{Pid, Signal};

/// Whether this machine cannot run guests; prints the reason.
fn is_skipped() -> bool {
    let missing = GuestAssets::find(&GuestAssets::default_directory()).err();
    if let Some(why) = &missing {
        println!("skipped: {why}");
    }
    missing.is_some()
}

/// The start time of a process, in clock ticks after boot: with its number, its identity. `None` if it has ended, even
/// if it is not reaped yet.
fn start_time(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is in parentheses and may contain anything; the third is the state, the 22nd the time.
    let fields: Vec<_> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    if fields[0] == "Z" { None } else { Some(fields[19].to_owned()) }
}

fn wait_until(event: &str, mut is_met: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !is_met() {
        assert!(Instant::now() < deadline, "this never happened: {event}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The flags of the VMA that holds a guest's memory: the only one of exactly that size.
fn memory_flags(guest: &GuestLine) -> Vec<String> {
    let smaps = fs::read_to_string(format!("/proc/{}/smaps", guest.pid)).unwrap();
    let size = (guest.memory_mib * 1024).to_string();
    let mut lines = smaps.lines();
    lines
        .find(|line| line.split_whitespace().eq(["Size:", &size, "kB"]))
        .unwrap_or_else(|| panic!("no region of {size} kB in {smaps}"));
    let flags = lines.find_map(|line| line.strip_prefix("VmFlags: ")).unwrap();
    flags.split_whitespace().map(str::to_owned).collect()
}

#[test]
fn guests_hold_their_data_and_end_with_the_lab() {
    if is_skipped() {
        return;
    }
    let arguments =
        ["--guests", "2", "--memory", "96", "--shared-mib", "4", "--unique-mib", "3", "--name-prefix", "pair"];
    let lab = RunningLab::start_fleet(&arguments).unwrap();
    let guests = lab.lines().to_vec();
    let names: Vec<_> = guests.iter().map(|guest| guest.name.as_str()).collect();
    assert_eq!(names, ["pair-0", "pair-1"]);
    let sums: Vec<_> = guests
        .iter()
        .map(|guest| {
            let command = fs::read_to_string(format!("/proc/{}/cmdline", guest.pid)).unwrap();
            assert!(command.contains(&format!("\0-name\0{}\0", guest.name)), "{command:?}");
            assert!(memory_flags(guest).contains(&"mg".to_owned()), "the guest's memory is mergeable");
            assert_eq!(
                query_guest(guest, "stat -c %s /data/same /data/own").unwrap(),
                format!("{}\n{}\n", 4 << 20, 3 << 20)
            );
            ["sha1sum /data/same", "sha1sum /data/own"].map(|line| query_guest(guest, line).unwrap())
        })
        .collect();
    assert_eq!(sums[0][0], sums[1][0]);
    assert_ne!(sums[0][1], sums[1][1]);

    let mut monitor = UnixStream::connect(&guests[0].qmp).unwrap();
    let mut greeting = [0; 8];
    monitor.read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting, br#"{"QMP": "#);

    let directory = Path::new(&guests[0].qmp).parent().unwrap().to_owned();
    drop(lab);
    for guest in &guests {
        assert!(!fs::exists(format!("/proc/{}", guest.pid)).unwrap(), "{} still exists", guest.name);
    }
    assert!(!directory.exists());
}

#[test]
fn lab_returns_exit_code_of_its_command() {
    if is_skipped() {
        return;
    }
    let script = r#"echo "$PAGEFOLD_FLEET_PIDS"; ls "$PAGEFOLD_FLEET_DIR"; kill -0 $PAGEFOLD_FLEET_PIDS && exit 7"#;
    let output = Command::new(lab_binary().unwrap())
        .args([
            "fleet",
            "--guests",
            "1",
            "--memory",
            "96",
            "--shared-mib",
            "1",
            "--unique-mib",
            "1",
            "--no-mem-merge",
            "--",
        ])
        .args(["sh", "-c", script])
        .output()
        .unwrap();
    let (text, progress) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert_eq!(output.status.code(), Some(7), "{progress}");
    let (pid, files) = text.split_once('\n').unwrap();
    assert_eq!(files, "lab-0.log\nlab-0.qmp\nlab-0.serial\n");
    assert!(progress.contains(&format!("lab-0 (pid {pid}) is ready")), "{progress}");
    assert!(!fs::exists(format!("/proc/{pid}")).unwrap());
}

#[test]
fn guests_end_when_the_lab_is_killed() {
    if is_skipped() {
        return;
    }
    for (signal, code) in [(Signal::KILL, None), (Signal::TERM, Some(143))] {
        // A lab that is killed leaves its directory of sockets.
        let temporary = tempfile::tempdir().unwrap();
        let mut lab = Command::new(lab_binary().unwrap())
            .args(["fleet", "--guests", "1", "--memory", "96", "--shared-mib", "1", "--unique-mib", "1"])
            .env("TMPDIR", temporary.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let children = format!("/proc/{0}/task/{0}/children", lab.id());
        // In the middle of booting, when the lab does not wait for a guest yet.
        let mut guest = None;
        wait_until("a guest is started", || {
            guest = fs::read_to_string(&children).unwrap().split_whitespace().next().map(|pid| pid.parse().unwrap());
            // The lab also asks QEMU for its version, and starts it through its own binary.
            guest.is_some_and(|pid: u32| {
                fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|command| {
                    command.starts_with(b"qemu") && command.windows(7).any(|word| word == b"-append")
                })
            })
        });
        let guest = guest.unwrap();
        let identity = start_time(guest).unwrap();
        rustix::process::kill_process(Pid::from_raw(lab.id().cast_signed()).unwrap(), signal).unwrap();
        assert_eq!(lab.wait().unwrap().code(), code);
        wait_until("the guest has ended", || start_time(guest).as_ref() != Some(&identity));
    }
}

#[test]
fn impossible_fleets_are_rejected_before_start() {
    if is_skipped() {
        return;
    }
    for (arguments, reason) in [
        (["--memory", "64"], "at least 96 MiB"),
        (["--shared-mib", "200"], "do not fit"),
        (["--name-prefix", "a,b"], "letters, digits"),
        (["--assets", "/nowhere"], "run labs/setup.sh"),
    ] {
        let output =
            Command::new(lab_binary().unwrap()).args(["fleet", "--guests", "1"]).args(arguments).output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.contains(reason) && !message.contains("booting"), "{message}");
    }
}
