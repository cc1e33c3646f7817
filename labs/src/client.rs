//! Starting `pagefold-lab` from a test: it is ready when [`RunningLab::start`] returns, and gone when the [`RunningLab`] is dropped.
//! What else a test makes to have it executed, it has put in its place by [`install_executable`].

use std::fs::{self, Permissions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use serde::de::DeserializeOwned;

use crate::output_lines::{GuestLine, READY_PREFIX, RegionLine};

/// A running lab that holds until it is dropped.
#[derive(Debug)]
pub struct RunningLab<Line> {
    child: Child,
    lines: Vec<Line>,
}

impl RunningLab<RegionLine> {
    /// Start `pagefold-lab layout` with these arguments.
    ///
    /// # Errors
    /// As [`RunningLab::start`].
    pub fn start_layout(arguments: &[&str]) -> io::Result<Self> {
        Self::start("layout", arguments)
    }

    /// The first region of a kind.
    ///
    /// # Panics
    /// When the layout has none.
    #[must_use]
    pub fn first_region(&self, kind: &str) -> &RegionLine {
        self.lines.iter().find(|region| region.kind == kind).expect("a region of a kind that was asked for")
    }
}

impl RunningLab<GuestLine> {
    /// Start `pagefold-lab fleet` with these arguments, without a COMMAND.
    ///
    /// # Errors
    /// As [`RunningLab::start`].
    pub fn start_fleet(arguments: &[&str]) -> io::Result<Self> {
        Self::start("fleet", arguments)
    }
}

impl<Line: DeserializeOwned> RunningLab<Line> {
    /// Start a subcommand and wait until it is ready.
    ///
    /// # Errors
    /// When the binary cannot be started, ends before it is ready (it has said why on standard error), or prints what
    /// is not understood.
    pub fn start(subcommand: &str, arguments: &[&str]) -> io::Result<Self> {
        Self::start_with(Command::new(lab_binary()?).arg(subcommand).args(arguments))
    }

    /// The same by a command that becomes the [`lab_binary`] with all its arguments.
    ///
    /// # Errors
    /// As [`RunningLab::start`].
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
    /// The lab's own process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Have it end, and tell how it did.
    ///
    /// # Errors
    /// Those of waiting for it.
    pub fn stop(mut self) -> io::Result<ExitStatus> {
        drop(self.child.stdin.take());
        self.child.wait()
    }

    /// What it printed before it was ready: its regions or guests, in the order in which they were asked for.
    #[must_use]
    pub fn lines(&self) -> &[Line] {
        &self.lines
    }
}

impl<Line> Drop for RunningLab<Line> {
    fn drop(&mut self) {
        // It ends by itself, and tidies up, when its standard input closes.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// What a guest's shell answers to a line.
///
/// # Errors
/// Those of its serial line; `WouldBlock` when it does not answer within two minutes.
pub fn query_guest(guest: &GuestLine, line: &str) -> io::Result<String> {
    let mut serial = UnixStream::connect(&guest.serial)?;
    serial.set_read_timeout(Some(Duration::from_secs(120)))?;
    serial.write_all(format!("{line}; echo end\n").as_bytes())?;
    let mut answer = String::new();
    let mut byte = [0];
    while !answer.ends_with("end\r\n") {
        serial.read_exact(&mut byte)?;
        answer.push(char::from(byte[0]));
    }
    Ok(answer.trim_end_matches("end\r\n").replace('\r', ""))
}

/// Copy a program or script to where nothing is yet, with a mode, so that it can be executed at once.
///
/// Another process copies it. What this one has open for writing, so has each child that another thread starts
/// meanwhile, until that becomes its program; and as long as anybody has a file open for writing, execve(2) fails with
/// `ETXTBSY`.
///
/// # Errors
/// Those of starting cp(1) and of chmod(2), and when cp fails, which has said why on standard error.
pub fn install_executable(from: &Path, to: &Path, mode: u32) -> io::Result<()> {
    let status = Command::new("cp").arg(from).arg(to).status()?;
    if !status.success() {
        return Err(io::Error::other(format!("cp {} {}: {status}", from.display(), to.display())));
    }
    fs::set_permissions(to, Permissions::from_mode(mode))
}

/// The binary: `PAGEFOLD_LAB` when that is set, else the one that cargo built beside the running test.
///
/// # Errors
/// `NotFound` when it is not there: `cargo build -p pagefold-labs` makes it.
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
