//! A program whose memory is merged, or that runs beside: started, awaited, queried, and ended on drop.
//!
//! Such programs print their output and then a line that begins with `READY`. They answer lines on standard input, and
//! exit when it closes. Therefore they exit with the benchmark, even if that is killed.

use anyhow::{Context, Result, bail, ensure};
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Lines, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A running program.
#[derive(Debug)]
pub struct RunningProgram {
    child: Child,
    input: Option<ChildStdin>,
    output: Option<Lines<BufReader<ChildStdout>>>,
}

/// A command that starts `program` through [`exec_as_first_oom_victim`].
pub fn command_through_hold(program: impl AsRef<OsStr>, enrolled: bool) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("held").arg(if enrolled { "enrolled" } else { "plain" }).arg(program);
    Ok(command)
}

/// Replace this process by a program that the OOM killer takes first. On request all its memory is mergeable
/// (`PR_SET_MEMORY_MERGE`, inherited over fork and exec).
pub fn exec_as_first_oom_victim(enrollment: &str, program: &str, arguments: &[&str]) -> Result<()> {
    std::fs::write("/proc/self/oom_score_adj", "1000").context("cannot write /proc/self/oom_score_adj")?;
    if enrollment == "enrolled" {
        pagefold_sys::mapping::set_merge_any(true).context("prctl(PR_SET_MEMORY_MERGE)")?;
    }
    Err(Command::new(program).args(arguments).exec()).with_context(|| format!("cannot start {program}"))
}

impl RunningProgram {
    /// Start the program.
    pub fn start(mut command: Command) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {command:?}"))?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().context("no output")?).lines();
        Ok(Self { child, input, output: Some(output) })
    }

    /// The process ID.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Wait until the program is ready, and return the lines that it printed before.
    pub fn wait_until_ready(&mut self) -> Result<Vec<String>> {
        let mut lines = Vec::new();
        for line in self.output.as_mut().context("its output was taken")? {
            let line = line?;
            if line.starts_with("READY") {
                return Ok(lines);
            }
            lines.push(line);
        }
        bail!("a program to measure exited before it was ready: {}; its output was {lines:?}", self.child.wait()?)
    }

    /// Send a line.
    pub fn send_line(&mut self, line: &str) -> Result<()> {
        writeln!(self.input.as_mut().context("no input")?, "{line}")
            .context("a program to measure has closed its standard input")
    }

    /// Send a line and wait for the answer.
    pub fn query(&mut self, line: &str) -> Result<String> {
        self.send_line(line)?;
        let output = self.output.as_mut().context("its output was taken")?;
        Ok(output.next().context("a program to measure gave no answer")??)
    }

    /// The further output, for a reader of its own.
    pub fn take_output(&mut self) -> Option<Lines<BufReader<ChildStdout>>> {
        self.output.take()
    }

    /// Check that the program still runs.
    pub fn check_alive(&mut self) -> Result<()> {
        let ended = self.child.try_wait()?;
        ensure!(ended.is_none(), "a program to measure exited: {ended:?}");
        Ok(())
    }
}

impl Drop for RunningProgram {
    fn drop(&mut self) {
        drop(self.input.take());
        // A program that ignores standard input is a probe: its reader is gone, and it exits at its next line.
        let _ = self.child.wait();
    }
}
