//! Starts `pagefold-lab` from a test: it is ready when [`RunningLab::start`] returns, and ends when the [`RunningLab`]
//! is dropped. Tests that execute other files they create copy them with [`install_executable`].

use std::fs::{self, Permissions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use serde::de::DeserializeOwned;

use crate::output_lines::{GuestLine, READY_PREFIX, RegionLine};

/// A running lab that ends when this is dropped.
#[derive(Debug)]
pub struct RunningLab<Line> {
    child: Child,
    lines: Vec<Line>,
}

impl RunningLab<RegionLine> {
    /// Start `pagefold-lab layout` with these arguments.
    ///
    /// # Errors
    /// The same as [`RunningLab::start`].
    pub fn start_layout(arguments: &[&str]) -> io::Result<Self> {
        Self::start("layout", arguments)
    }

    /// The first region of a kind.
    ///
    /// # Panics
    /// If the layout has none.
    #[must_use]
    pub fn first_region(&self, kind: &str) -> &RegionLine {
        self.lines.iter().find(|region| region.kind == kind).expect("the layout has a region of this kind")
    }
}

impl RunningLab<GuestLine> {
    /// Start `pagefold-lab fleet` with these arguments, without a COMMAND.
    ///
    /// # Errors
    /// The same as [`RunningLab::start`].
    pub fn start_fleet(arguments: &[&str]) -> io::Result<Self> {
        Self::start("fleet", arguments)
    }
}

impl<Line: DeserializeOwned> RunningLab<Line> {
    /// Start a subcommand and wait until it is ready.
    ///
    /// # Errors
    /// If the binary cannot be started, ends before it is ready (its standard error has the reason), or prints an
    /// unknown line.
    pub fn start(subcommand: &str, arguments: &[&str]) -> io::Result<Self> {
        Self::start_with(Command::new(lab_binary()?).arg(subcommand).args(arguments))
    }

    /// The same with a command that executes the [`lab_binary`] with all its arguments.
    ///
    /// # Errors
    /// The same as [`RunningLab::start`].
    pub fn start_with(command: &mut Command) -> io::Result<Self> {
        let child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| io::Error::new(error.kind(), format!("starting {command:?}: {error}")))?;
        let mut lab = Self { child, lines: Vec::new() };
        let output = lab.child.stdout.take().expect("standard output was piped");
        for line in BufReader::new(output).lines() {
            let line = line?;
            if line.starts_with(READY_PREFIX) {
                return Ok(lab);
            }
            lab.lines.push(serde_json::from_str(&line)?);
        }
        let status = lab.child.wait()?;
        Err(io::Error::other(format!("{command:?} ended before it was ready: {status}")))
    }
}

impl<Line> RunningLab<Line> {
    /// The process number of the lab.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// End the lab, and return its exit status.
    ///
    /// # Errors
    /// Those of waiting for it.
    pub fn stop(mut self) -> io::Result<ExitStatus> {
        drop(self.child.stdin.take());
        self.child.wait()
    }

    /// The lines that it printed before it was ready: its regions or guests, in the requested order.
    #[must_use]
    pub fn lines(&self) -> &[Line] {
        &self.lines
    }
}

impl<Line> Drop for RunningLab<Line> {
    fn drop(&mut self) {
        // It ends by itself, and cleans up, when its standard input closes.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// Run a line in a guest's shell, and return the answer.
///
/// # Errors
/// Those of its serial line; `WouldBlock` if the guest does not answer within two minutes.
pub fn query_guest(guest: &GuestLine, line: &str) -> io::Result<String> {
    let mut serial = UnixStream::connect(&guest.serial)?;
    serial.set_read_timeout(Some(Duration::from_secs(120)))?;
    serial.write_all(format!("echo begin; {line}; echo end\n").as_bytes())?;
    let mut answer = String::new();
    let mut byte = [0];
    while !answer.ends_with("end\r\n") {
        serial.read_exact(&mut byte)?;
        answer.push(char::from(byte[0]));
    }
    // Before it there may be the end of an earlier line, which no connection has read.
    let (_, answer) = answer.split_once("begin\r\n").ok_or(io::ErrorKind::InvalidData)?;
    Ok(answer.trim_end_matches("end\r\n").replace('\r', ""))
}

/// Copy a program or script to a new path, with a mode, so that it can be executed at once.
///
/// Another process copies it. If this process had the file open for writing, a child that another thread starts at that
/// time would inherit the descriptor until its exec. While any process has a file open for writing, execve(2) fails
/// with `ETXTBSY`.
///
/// # Errors
/// Those of starting cp(1) and of chmod(2). If cp fails, standard error has the reason.
pub fn install_executable(from: &Path, to: &Path, mode: u32) -> io::Result<()> {
    let status = Command::new("cp").arg(from).arg(to).status()?;
    if !status.success() {
        return Err(io::Error::other(format!("cp {} {}: {status}", from.display(), to.display())));
    }
    fs::set_permissions(to, Permissions::from_mode(mode))
}

/// The binary: `PAGEFOLD_LAB` if that is set, else the one that cargo built beside the running test.
///
/// # Errors
/// `NotFound` if it is missing: `cargo build -p pagefold-labs` builds it.
pub fn lab_binary() -> io::Result<PathBuf> {
    if let Some(path) = std::env::var_os("PAGEFOLD_LAB") {
        return Ok(path.into());
    }
    let test = std::env::current_exe()?;
    // A test is in target/PROFILE/deps, a benchmark or example may be elsewhere below target/PROFILE.
    test.ancestors().map(|directory| directory.join("pagefold-lab")).find(|path| path.is_file()).ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::NotFound,
            format!("no pagefold-lab above {}: run `cargo build -p pagefold-labs`", test.display()),
        )
    })
}
