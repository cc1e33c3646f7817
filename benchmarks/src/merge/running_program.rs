//! A program that holds memory to be merged, or runs beside: started, waited for, asked, and ended when dropped.
//!
//! Such programs print what they have to say and then a line that begins with `READY`, answer lines of standard input,
//! and end when that closes. So they end with the benchmark, however that ends.

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

/// Become a program that is killed first should memory run short and, if asked for, whose memory is all mergeable
/// (`PR_SET_MEMORY_MERGE`, inherited over fork and exec).
pub fn exec_as_first_oom_victim(enrollment: &str, program: &str, arguments: &[&str]) -> Result<()> {
    std::fs::write("/proc/self/oom_score_adj", "1000").context("cannot offer to be killed first")?;
    if enrollment == "enrolled" {
        pagefold_sys::mapping::set_merge_any(true).context("prctl(PR_SET_MEMORY_MERGE)")?;
    }
    Err(Command::new(program).args(arguments).exec()).with_context(|| format!("cannot start {program}"))
}

impl RunningProgram {
    /// Start it.
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

    /// Its number.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Wait until it is ready, and tell what it said before.
    pub fn wait_until_ready(&mut self) -> Result<Vec<String>> {
        let mut said = Vec::new();
        for line in self.output.as_mut().context("its output was taken")? {
            let line = line?;
            if line.starts_with("READY") {
                return Ok(said);
            }
            said.push(line);
        }
        bail!("a program to measure ended before it was ready: {}; it said {said:?}", self.child.wait()?)
    }

    /// Say a line.
    pub fn send_line(&mut self, line: &str) -> Result<()> {
        writeln!(self.input.as_mut().context("no input")?, "{line}").context("a program to measure does not listen")
    }

    /// Say a line and wait for the answer.
    pub fn query(&mut self, line: &str) -> Result<String> {
        self.send_line(line)?;
        let output = self.output.as_mut().context("its output was taken")?;
        Ok(output.next().context("a program to measure gave no answer")??)
    }

    /// What it says from now on, for a reader of its own.
    pub fn take_output(&mut self) -> Option<Lines<BufReader<ChildStdout>>> {
        self.output.take()
    }

    /// That it is still there.
    pub fn check_alive(&mut self) -> Result<()> {
        let ended = self.child.try_wait()?;
        ensure!(ended.is_none(), "a program to measure ended: {ended:?}");
        Ok(())
    }
}

impl Drop for RunningProgram {
    fn drop(&mut self) {
        drop(self.input.take());
        // What does not listen to standard input is a probe: its reader is gone, and so is it at its next line.
        let _ = self.child.wait();
    }
}
