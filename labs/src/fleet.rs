//! Boots a fleet of real virtual machines and ends it again.
//!
//! QEMU translates the guests' code (`-accel tcg`), so no virtualisation by the processor is needed. A guest consists
//! of Debian's cloud kernel and the initramfs of `labs/guest/init`, which fills its memory as the kernel's command line
//! says and prints READY on its serial line; QEMU copies that line to a file, which is watched here.
//!
//! No guest outlives the lab: they are killed and reaped when [`run`] returns, for whatever reason, and the kernel
//! kills them (`PR_SET_PDEATHSIG`) should the lab be killed. What a killed lab does leave is its directory of sockets
//! and logs among the temporary files.

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
use pagefold_labs::assets::{Assets, QEMU};
use pagefold_labs::lines;
use rustix::process::{Pid, Signal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// How often guests, COMMAND and signals are looked at.
const TICK: Duration = Duration::from_millis(20);

/// The time COMMAND has to end after it was asked to.
const GRACE: Duration = Duration::from_secs(5);

/// The least memory with which Debian's cloud kernel boots, and what it and the init need of it, in MiB.
const LEAST_MEMORY: u32 = 96;
const BESIDES_DATA: u32 = 72;

/// At fixed addresses, without timer checks that an emulated clock fails, gone after a panic. The last two save a sixth
/// of a boot each: patching its own code makes QEMU translate it again, and the self-tests of the ciphers are of no
/// use.
const KERNEL_OPTIONS: &str = "console=ttyS0 nokaslr mitigations=off no_timer_check panic=-1 quiet \
                              noreplace-smp cryptomgr.notests";

/// What fleet to boot.
#[derive(Debug)]
pub struct Options {
    /// How many guests.
    pub guests: u32,
    /// Memory of each, in MiB.
    pub memory_mib: u32,
    /// Data that all hold, in MiB.
    pub same_mib: u32,
    /// Data that only one holds, in MiB.
    pub own_mib: u32,
    /// Whether the first 4,086 bytes of all pages of data are equal.
    pub equal_start: bool,
    /// What their names begin with.
    pub names: String,
    /// Whether their memory is mergeable.
    pub merge: bool,
    /// Kernel and initramfs.
    pub assets: Assets,
    /// How long all of them together may take to be ready.
    pub timeout: Duration,
}

/// Boot a fleet, run `command` or wait until standard input closes, and end the fleet. The exit code is COMMAND's, or
/// 128 and the number of the signal that interrupted it.
pub fn run(options: &Options, command: &[OsString]) -> Result<ExitCode> {
    let (memory, data) = (options.memory_mib, options.same_mib.saturating_add(options.own_mib));
    ensure!(memory >= LEAST_MEMORY, "a guest needs at least {LEAST_MEMORY} MiB of memory");
    ensure!(
        data <= memory - BESIDES_DATA,
        "{data} MiB of data do not fit into guests of {memory} MiB, which need {BESIDES_DATA} MiB for themselves"
    );
    // Before the first guest, so that no signal finds the lab unprepared.
    let signal = Arc::new(AtomicUsize::new(0));
    for number in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register_usize(number, Arc::clone(&signal), usize::try_from(number)?)?;
    }
    let interrupted = || match signal.load(Ordering::Relaxed) {
        0 => None,
        number => Some(ExitCode::from(128 + u8::try_from(number).unwrap_or(0))),
    };

    let directory = tempfile::Builder::new().prefix("pagefold-fleet-").tempdir().context("a directory for sockets")?;
    let mut fleet = Fleet { guests: Vec::new() };
    let begin = Instant::now();
    eprintln!("fleet: booting {} guests of {memory} MiB without KVM", options.guests);
    for number in 0..options.guests {
        fleet.guests.push(Guest::boot(options, number, directory.path())?);
    }
    while let Some(waiting) = fleet.first_not_ready()? {
        if let Some(code) = interrupted() {
            return Ok(code);
        }
        ensure!(
            begin.elapsed() < options.timeout,
            "{waiting} was not ready after {:.0} s; its serial line ends with:\n{}",
            options.timeout.as_secs_f64(),
            last_lines(&directory.path().join(format!("{waiting}.log")))
        );
        thread::sleep(TICK);
    }
    eprintln!("fleet: all {} guests are ready after {:.1} s", options.guests, begin.elapsed().as_secs_f64());

    let mut work = Work::start(command, &fleet, directory.path())?;
    loop {
        if let Some(code) = interrupted() {
            return Ok(code);
        }
        fleet.check_alive()?;
        if let Some(code) = work.ended()? {
            return Ok(code);
        }
        thread::sleep(TICK);
    }
}

/// The guests. Killed and reaped when dropped.
#[derive(Debug)]
struct Fleet {
    guests: Vec<Guest>,
}

impl Fleet {
    /// Look for READY on the serial lines, and tell one guest that has not said it.
    fn first_not_ready(&mut self) -> Result<Option<String>> {
        self.check_alive()?;
        let mut waiting = None;
        for guest in &mut self.guests {
            if !guest.ready && !guest.look()? && waiting.is_none() {
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

impl Drop for Fleet {
    fn drop(&mut self) {
        eprintln!("fleet: ending {} guests", self.guests.len());
        // All are killed before the first is waited for: freeing their memory takes a while.
        for guest in &mut self.guests {
            let _ = guest.process.kill();
        }
        for guest in &mut self.guests {
            let _ = guest.process.wait();
        }
    }
}

#[derive(Debug)]
struct Guest {
    line: lines::Guest,
    process: Child,
    log: PathBuf,
    ready: bool,
    begin: Instant,
}

impl Guest {
    fn boot(options: &Options, number: u32, directory: &Path) -> Result<Self> {
        let name = format!("{}-{number}", options.names);
        let file = |extension| directory.join(format!("{name}.{extension}"));
        let (qmp, serial, log) = (file("qmp"), file("serial"), file("log"));
        let machine = if options.merge { "pc" } else { "pc,mem-merge=off" };
        let (same, own) = (options.same_mib, options.own_mib);
        let start = if options.equal_start { "equal" } else { "different" };
        let process = bound(QEMU.as_ref())?
            .args(["-name", &name, "-accel", "tcg,thread=single,tb-size=32", "-M", machine])
            .args(["-m", &format!("{}M", options.memory_mib)])
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-nic", "none"])
            .arg("-kernel")
            .arg(&options.assets.kernel)
            .arg("-initrd")
            .arg(&options.assets.initramfs)
            .args([
                "-append",
                &format!("{KERNEL_OPTIONS} lab.name={name} lab.same={same} lab.own={own} lab.start={start}"),
            ])
            .arg("-chardev")
            .arg(format!("socket,id=serial,path={},server=on,wait=off,logfile={}", escaped(&serial)?, escaped(&log)?))
            .args(["-serial", "chardev:serial", "-qmp"])
            .arg(format!("unix:{},server=on,wait=off", escaped(&qmp)?))
            .stdin(Stdio::null())
            // A group of its own: the lab ends the guests, not the terminal.
            .process_group(0)
            .spawn()
            .with_context(|| format!("starting {name}"))?;
        let line = lines::Guest {
            pid: process.id(),
            memory_mib: options.memory_mib,
            qmp: qmp.display().to_string(),
            serial: serial.display().to_string(),
            name,
        };
        Ok(Self { line, process, log, ready: false, begin: Instant::now() })
    }

    /// Look at the serial line: whether the guest is ready, or says that it failed.
    fn look(&mut self) -> Result<bool> {
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
            self.ready |= line == "READY";
        }
        if self.ready {
            let seconds = self.begin.elapsed().as_secs_f64();
            eprintln!("fleet: {name} (pid {}) is ready after {seconds:.1} s", self.line.pid);
        }
        Ok(self.ready)
    }
}

/// What the fleet is there for.
#[derive(Debug)]
enum Work {
    /// Until standard input closes.
    Hold(Arc<AtomicBool>),
    /// Until a program ends.
    Run(Child),
}

impl Work {
    fn start(command: &[OsString], fleet: &Fleet, directory: &Path) -> Result<Self> {
        let Some((program, arguments)) = command.split_first() else {
            let mut output = io::stdout().lock();
            for guest in &fleet.guests {
                writeln!(output, "{}", serde_json::to_string(&guest.line)?)?;
            }
            writeln!(output, "{}guests={}", lines::READY, fleet.guests.len())?;
            output.flush()?;
            let closed = Arc::new(AtomicBool::new(false));
            let seen = Arc::clone(&closed);
            thread::spawn(move || {
                // What cannot be read any more is closed.
                let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
                seen.store(true, Ordering::Relaxed);
            });
            return Ok(Self::Hold(closed));
        };
        let pids: Vec<_> = fleet.guests.iter().map(|guest| guest.line.pid.to_string()).collect();
        eprintln!("fleet: running {}", program.to_string_lossy());
        let child = bound(program)?
            .args(arguments)
            .env("PAGEFOLD_FLEET_PIDS", pids.join(" "))
            .env("PAGEFOLD_FLEET_DIR", directory)
            .spawn()
            .with_context(|| format!("starting {}", program.to_string_lossy()))?;
        Ok(Self::Run(child))
    }

    fn ended(&mut self) -> Result<Option<ExitCode>> {
        Ok(match self {
            Self::Hold(closed) => closed.load(Ordering::Relaxed).then_some(ExitCode::SUCCESS),
            Self::Run(child) => child.try_wait()?.map(exit_code),
        })
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        let Self::Run(child) = self else { return };
        let deadline = Instant::now() + GRACE;
        if let (Ok(None), Some(pid)) = (child.try_wait(), Pid::from_raw(child.id().cast_signed())) {
            // Not waited for yet, so the number is still the program's.
            let _ = rustix::process::kill_process(pid, Signal::TERM);
            while matches!(child.try_wait(), Ok(None)) && Instant::now() < deadline {
                thread::sleep(TICK);
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

/// A program that is killed when this process ends: see `run_bound` in the main module.
fn bound(program: &std::ffi::OsStr) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe().context("the path of pagefold-lab")?);
    command.arg("bound").arg(std::process::id().to_string()).arg("--").arg(program);
    Ok(command)
}

/// A path as a value among QEMU's comma-separated options, where a comma is doubled.
fn escaped(path: &Path) -> Result<String> {
    let path = path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))?;
    Ok(path.replace(',', ",,"))
}

fn last_lines(log: &Path) -> String {
    let log = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&log);
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(10)..].join("\n")
}
