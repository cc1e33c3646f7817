//! Boots a fleet of real virtual machines, and ends it.
//!
//! QEMU translates the guests' code (`-accel tcg`), so the processor needs no virtualization support. A guest consists
//! of Debian's cloud kernel and the initramfs of `labs/guest/init`, which fills its memory according to the kernel's
//! command line and prints READY on its serial line. QEMU copies that line to a file, which this module polls.
//!
//! No guest outlives the lab: guests are killed and reaped when [`run`] returns, for any reason. If the lab is killed,
//! the kernel kills them (`PR_SET_PDEATHSIG`). A killed lab leaves only its directory of sockets and logs among the
//! temporary files.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pagefold_labs::assets::{GuestAssets, QEMU_PROGRAM};
use pagefold_labs::output_lines;
use rustix::process::{Pid, Signal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// Interval between two checks of guests, COMMAND and signals.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// How long COMMAND may take to end after SIGTERM.
const COMMAND_EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// Minimum memory with which Debian's cloud kernel boots, and the part that it and the init use, in MiB.
const MIN_GUEST_MIB: u32 = 96;
const GUEST_OVERHEAD_MIB: u32 = 72;

/// Fixed addresses, no timer checks that an emulated clock fails, power off after a panic. The last two options save a
/// sixth of a boot each: if the kernel patches its own code, QEMU must translate it again; and the self-tests of the
/// ciphers are not needed.
const GUEST_KERNEL_OPTIONS: &str = "console=ttyS0 nokaslr mitigations=off no_timer_check panic=-1 quiet \
                              noreplace-smp cryptomgr.notests";

/// The parameters of a fleet.
#[derive(Debug)]
pub struct FleetOptions {
    /// Number of guests.
    pub guests: u32,
    /// Memory of each guest, in MiB.
    pub memory_mib: u32,
    /// Data that all guests have, in MiB.
    pub shared_mib: u32,
    /// Data that only one guest has, in MiB.
    pub unique_mib: u32,
    /// Whether the first 4,086 bytes of all pages of data are equal.
    pub equal_start: bool,
    /// The prefix of their names.
    pub name_prefix: String,
    /// Whether their memory is mergeable.
    pub mergeable: bool,
    /// Kernel and initramfs.
    pub assets: GuestAssets,
    /// How long all guests together may take to become ready.
    pub timeout: Duration,
}

/// Boot a fleet, run `command` or wait until standard input closes, and end the fleet. The exit code is COMMAND's, or
/// 128 plus the number of the signal that interrupted it.
pub fn run(options: &FleetOptions, command: &[OsString]) -> Result<ExitCode> {
    let (memory, data) = (options.memory_mib, options.shared_mib.saturating_add(options.unique_mib));
    ensure!(memory >= MIN_GUEST_MIB, "a guest needs at least {MIN_GUEST_MIB} MiB of memory");
    ensure!(
        data <= memory - GUEST_OVERHEAD_MIB,
        "{data} MiB of data do not fit into guests of {memory} MiB, which need {GUEST_OVERHEAD_MIB} MiB for themselves"
    );
    // Before the first guest starts, so that no signal is missed.
    let signal = Arc::new(AtomicUsize::new(0));
    for number in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register_usize(number, Arc::clone(&signal), usize::try_from(number)?)?;
    }
    let interrupted = || match signal.load(Ordering::Relaxed) {
        0 => None,
        number => Some(ExitCode::from(128 + u8::try_from(number).unwrap_or(0))),
    };

    let directory = tempfile::Builder::new().prefix("pagefold-fleet-").tempdir().context("a directory for sockets")?;
    let mut fleet = GuestFleet { guests: Vec::new() };
    let begin = Instant::now();
    eprintln!("fleet: booting {} guests of {memory} MiB without KVM", options.guests);
    for number in 0..options.guests {
        fleet.guests.push(FleetGuest::boot(options, number, directory.path())?);
    }
    while let Some(waiting) = fleet.find_unready_guest()? {
        if let Some(code) = interrupted() {
            return Ok(code);
        }
        ensure!(
            begin.elapsed() < options.timeout,
            "{waiting} was not ready after {:.0} s; its serial line ends with:\n{}",
            options.timeout.as_secs_f64(),
            last_lines(&directory.path().join(format!("{waiting}.log")))
        );
        thread::sleep(POLL_INTERVAL);
    }
    eprintln!("fleet: all {} guests are ready after {:.1} s", options.guests, begin.elapsed().as_secs_f64());

    let mut work = FleetTask::start(command, &fleet, directory.path())?;
    loop {
        if let Some(code) = interrupted() {
            return Ok(code);
        }
        fleet.check_alive()?;
        if let Some(code) = work.exit_code_if_ended()? {
            return Ok(code);
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// The guests. Killed and reaped when dropped.
#[derive(Debug)]
struct GuestFleet {
    guests: Vec<FleetGuest>,
}

impl GuestFleet {
    /// Check the serial lines for READY. Returns a guest that has not printed it, if any.
    fn find_unready_guest(&mut self) -> Result<Option<String>> {
        self.check_alive()?;
        let mut waiting = None;
        for guest in &mut self.guests {
            if !guest.is_ready && !guest.check_ready()? && waiting.is_none() {
                waiting = Some(guest.line.name.clone());
            }
        }
        Ok(waiting)
    }

    fn check_alive(&mut self) -> Result<()> {
        for guest in &mut self.guests {
            if let Some(status) = guest.process.try_wait()? {
                bail!("{} ended ({status}); its serial line ends with:\n{}", guest.line.name, last_lines(&guest.log));
            }
        }
        Ok(())
    }
}

impl Drop for GuestFleet {
    fn drop(&mut self) {
        eprintln!("fleet: ending {} guests", self.guests.len());
        // Kill all guests before waiting for the first: freeing their memory takes time.
        for guest in &mut self.guests {
            let _ = guest.process.kill();
        }
        for guest in &mut self.guests {
            let _ = guest.process.wait();
        }
    }
}

#[derive(Debug)]
struct FleetGuest {
    line: output_lines::GuestLine,
    process: Child,
    log: PathBuf,
    is_ready: bool,
    started_at: Instant,
}

impl FleetGuest {
    fn boot(options: &FleetOptions, number: u32, directory: &Path) -> Result<Self> {
        let name = format!("{}-{number}", options.name_prefix);
        let file = |extension| directory.join(format!("{name}.{extension}"));
        let (qmp, serial, log) = (file("qmp"), file("serial"), file("log"));
        let machine = if options.mergeable { "pc" } else { "pc,mem-merge=off" };
        let (shared, unique) = (options.shared_mib, options.unique_mib);
        let start = if options.equal_start { "equal" } else { "different" };
        let process = command_killed_with_parent(QEMU_PROGRAM.as_ref())?
            .args(["-name", &name, "-accel", "tcg,thread=single,tb-size=32", "-M", machine])
            .args(["-m", &format!("{}M", options.memory_mib)])
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-nic", "none"])
            .arg("-kernel")
            .arg(&options.assets.kernel)
            .arg("-initrd")
            .arg(&options.assets.initramfs)
            .args([
                "-append",
                &format!("{GUEST_KERNEL_OPTIONS} lab.name={name} lab.same={shared} lab.own={unique} lab.start={start}"),
            ])
            .arg("-chardev")
            .arg(format!(
                "socket,id=serial,path={},server=on,wait=off,logfile={}",
                escape_qemu_option(&serial)?,
                escape_qemu_option(&log)?
            ))
            .args(["-serial", "chardev:serial", "-qmp"])
            .arg(format!("unix:{},server=on,wait=off", escape_qemu_option(&qmp)?))
            .stdin(Stdio::null())
            // A separate process group: the lab ends the guests, not the terminal.
            .process_group(0)
            .spawn()
            .with_context(|| format!("starting {name}"))?;
        let line = output_lines::GuestLine {
            pid: process.id(),
            memory_mib: options.memory_mib,
            qmp: qmp.display().to_string(),
            serial: serial.display().to_string(),
            name,
        };
        Ok(Self { line, process, log, is_ready: false, started_at: Instant::now() })
    }

    /// Check the serial line: whether the guest is ready, or reports a failure.
    fn check_ready(&mut self) -> Result<bool> {
        let log = match fs::read(&self.log) {
            Ok(log) => log,
            // QEMU has not opened it yet.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error).with_context(|| format!("reading {}", self.log.display())),
        };
        let name = &self.line.name;
        for line in String::from_utf8_lossy(&log).lines() {
            if let Some(reason) = line.strip_prefix("FAILED ") {
                bail!("{name} failed: {reason}");
            }
            self.is_ready |= line == "READY";
        }
        if self.is_ready {
            let seconds = self.started_at.elapsed().as_secs_f64();
            eprintln!("fleet: {name} (pid {}) is ready after {seconds:.1} s", self.line.pid);
        }
        Ok(self.is_ready)
    }
}

/// How long the fleet runs.
#[derive(Debug)]
enum FleetTask {
    /// Until standard input closes.
    UntilStdinCloses(Arc<AtomicBool>),
    /// Until a program ends.
    UntilExit(Child),
}

impl FleetTask {
    fn start(command: &[OsString], fleet: &GuestFleet, directory: &Path) -> Result<Self> {
        let Some((program, arguments)) = command.split_first() else {
            let mut output = io::stdout().lock();
            for guest in &fleet.guests {
                writeln!(output, "{}", serde_json::to_string(&guest.line)?)?;
            }
            writeln!(output, "{}guests={}", output_lines::READY_PREFIX, fleet.guests.len())?;
            output.flush()?;
            let closed = Arc::new(AtomicBool::new(false));
            let closed_by_reader = Arc::clone(&closed);
            thread::spawn(move || {
                // An unreadable standard input counts as closed.
                let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
                closed_by_reader.store(true, Ordering::Relaxed);
            });
            return Ok(Self::UntilStdinCloses(closed));
        };
        let pids: Vec<_> = fleet.guests.iter().map(|guest| guest.line.pid.to_string()).collect();
        eprintln!("fleet: running {}", program.to_string_lossy());
        let child = command_killed_with_parent(program)?
            .args(arguments)
            .env("PAGEFOLD_FLEET_PIDS", pids.join(" "))
            .env("PAGEFOLD_FLEET_DIR", directory)
            .spawn()
            .with_context(|| format!("starting {}", program.to_string_lossy()))?;
        Ok(Self::UntilExit(child))
    }

    fn exit_code_if_ended(&mut self) -> Result<Option<ExitCode>> {
        Ok(match self {
            Self::UntilStdinCloses(closed) => closed.load(Ordering::Relaxed).then_some(ExitCode::SUCCESS),
            Self::UntilExit(child) => child.try_wait()?.map(exit_code),
        })
    }
}

impl Drop for FleetTask {
    fn drop(&mut self) {
        let Self::UntilExit(child) = self else { return };
        let deadline = Instant::now() + COMMAND_EXIT_TIMEOUT;
        if let (Ok(None), Some(pid)) = (child.try_wait(), Pid::from_raw(child.id().cast_signed())) {
            // The program has not been reaped yet, so the number is still its own.
            let _ = rustix::process::kill_process(pid, Signal::TERM);
            while matches!(child.try_wait(), Ok(None)) && Instant::now() < deadline {
                thread::sleep(POLL_INTERVAL);
            }
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from)
}

/// A program that is killed when this process ends: see `run_killed_with_parent` in the main module.
fn command_killed_with_parent(program: &std::ffi::OsStr) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe().context("the path of pagefold-lab")?);
    command.arg("killed-with-parent").arg(std::process::id().to_string()).arg("--").arg(program);
    Ok(command)
}

/// A path as a value in QEMU's comma-separated options, with commas doubled.
fn escape_qemu_option(path: &Path) -> Result<String> {
    let path = path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))?;
    Ok(path.replace(',', ",,"))
}

fn last_lines(log: &Path) -> String {
    let log = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&log);
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(10)..].join("\n")
}
