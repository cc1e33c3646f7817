//! The methods to enroll a program that is about to start. Each is first tried on a process of our own.

use super::{companion, program_loader};
use anyhow::{Context, bail};
use clap::ValueEnum;
use pagefold_base::Pid;
use pagefold_base::region::VmFlags;
use pagefold_host::{Host, observe};
use pagefold_linux::{LiveHost, launch};
use std::ffi::{CStr, CString, OsStr, OsString};
use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A library for `LD_PRELOAD`.
#[derive(Clone, Copy, Debug)]
pub struct PreloadLibrary {
    /// Its file name.
    pub file: &'static str,
    /// The environment variable with its path, for installations in other places.
    pub variable: &'static str,
}

/// The library that enrolls its program in KSM.
const ENROLL_LIBRARY: PreloadLibrary = PreloadLibrary { file: "libpagefold_preload.so", variable: "PAGEFOLD_PRELOAD" };

/// The methods to enroll a program, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ProgramEnrollMethod {
    /// pagefold enrolls itself, and the program inherits that (Linux 6.4)
    Prctl,
    /// A library in LD_PRELOAD enrolls the program from within
    Preload,
    /// A companion process enrolls the program by code injection
    Inject,
}

impl ProgramEnrollMethod {
    /// All methods, best first.
    pub const BEST_FIRST: [Self; 3] = [Self::Prctl, Self::Preload, Self::Inject];
}

impl fmt::Display for ProgramEnrollMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prctl => "prctl",
            Self::Preload => "preload",
            Self::Inject => "inject",
        })
    }
}

/// A method that works here, with its data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PreparedEnroll {
    /// This process is enrolled, and the program inherits it.
    Inherited,
    /// The value of `LD_PRELOAD`.
    Preload(CString),
    /// A companion process enrolls the program after exec.
    Companion,
}

impl PreparedEnroll {
    /// A description of the method for messages.
    pub fn describe(&self) -> &'static str {
        match self {
            Self::Inherited => "by prctl, inherited over fork and exec",
            Self::Preload(_) => "by a preloaded library",
            Self::Companion => "from outside, by injection",
        }
    }

    /// Undo the changes of the preparation.
    pub fn undo_preparation(&self) -> anyhow::Result<()> {
        match self {
            Self::Inherited => launch::set_merge_any(false).context("PR_SET_MEMORY_MERGE"),
            Self::Preload(_) | Self::Companion => Ok(()),
        }
    }
}

/// Prepare a method. Fails if it cannot work for the program, as far as that is known before exec.
pub fn prepare_method(method: ProgramEnrollMethod, name: &OsStr) -> anyhow::Result<PreparedEnroll> {
    match method {
        ProgramEnrollMethod::Prctl => {
            launch::set_merge_any(true).context("PR_SET_MEMORY_MERGE")?;
            if !EnrollProbe::start(None)?.is_enrolled()? {
                bail!("this kernel does not keep it over exec");
            }
            Ok(PreparedEnroll::Inherited)
        }
        ProgramEnrollMethod::Preload => {
            let value = ENROLL_LIBRARY.ld_preload_for(name)?;
            if !EnrollProbe::start(Some(&value))?.is_enrolled()? {
                bail!("{} does not take effect here", OsStr::from_bytes(value.as_bytes()).to_string_lossy());
            }
            Ok(PreparedEnroll::Preload(value))
        }
        ProgramEnrollMethod::Inject => {
            let mut probe = EnrollProbe::start(None)?;
            probe.is_enrolled()?;
            let host = LiveHost::new();
            let process = host.open(Pid(probe.child.id())).map_err(anyhow::Error::msg)?.id();
            companion::enroll_process(&host, process)?;
            Ok(PreparedEnroll::Companion)
        }
    }
}

impl PreloadLibrary {
    /// The value of `LD_PRELOAD` with which a program loads this library. Fails if it would not, as far as is known.
    pub fn ld_preload_for(self, name: &OsStr) -> anyhow::Result<CString> {
        let path = std::env::var_os("PATH");
        // If the program is not found, exec fails later, with status 127.
        if let Some(file) = program_loader::find_program(name, path.as_deref()) {
            let support = program_loader::preload_support(&file).with_context(|| file.display().to_string())?;
            if let program_loader::PreloadSupport::Ignored(why) = support {
                bail!("{} {why}", file.display());
            }
        }
        append_preload(&self.find_file()?, std::env::var_os("LD_PRELOAD"))
    }

    /// Find the file: by the variable, beside this program (as cargo builds both), or where packages install it.
    fn find_file(self) -> anyhow::Result<PathBuf> {
        let Self { file, variable } = self;
        if let Some(path) = std::env::var_os(variable) {
            let path = PathBuf::from(path);
            return path.canonicalize().with_context(|| format!("{variable}={}", path.display()));
        }
        let program = std::env::current_exe().context("cannot find the path of this program")?;
        let folder = program.parent().unwrap_or(Path::new("/"));
        let candidates = [folder.join(file), folder.join("../lib/pagefold").join(file)];
        let found = candidates.iter().find_map(|path| path.canonicalize().ok());
        found.with_context(|| format!("{file} is not beside {}: set {variable} to its path", program.display()))
    }
}

/// Append the library to an existing value of `LD_PRELOAD`.
fn append_preload(library: &Path, existing: Option<OsString>) -> anyhow::Result<CString> {
    // ld.so(8): spaces and colons separate entries and cannot be escaped.
    if library.as_os_str().as_bytes().iter().any(|byte| b": ".contains(byte)) {
        bail!("LD_PRELOAD cannot name {}: move it to a path without spaces and colons", library.display());
    }
    let mut value = existing.unwrap_or_default().into_vec();
    if !value.is_empty() {
        value.push(b':');
    }
    value.extend(library.as_os_str().as_bytes());
    Ok(CString::new(value)?)
}

/// The file name at the end of an `LD_PRELOAD` value of [`append_preload`].
pub fn last_preloaded_file(preload: &CStr) -> &[u8] {
    preload.to_bytes().rsplit(|&byte| byte == b'/').next().unwrap_or_default()
}

/// Whether `maps` (`/proc/PID/maps`) contains a part of a file name.
pub fn is_mapped(maps: &[u8], name: &[u8]) -> bool {
    maps.windows(name.len()).any(|window| window == name)
}

/// A copy of this program, started like the real program, that reports whether it is enrolled. It ends when dropped.
pub struct EnrollProbe {
    child: std::process::Child,
    answers: BufReader<std::process::ChildStdout>,
}

impl EnrollProbe {
    /// Start the copy with this `LD_PRELOAD`.
    pub fn start(preload: Option<&CString>) -> anyhow::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.args(["run", "--probe"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        if let Some(preload) = preload {
            command.env("LD_PRELOAD", OsStr::from_bytes(preload.as_bytes()));
        }
        let mut child =
            command.spawn().context("cannot start a copy of this program for a test (is /proc mounted?)")?;
        let answers = BufReader::new(child.stdout.take().context("the copy has no output pipe")?);
        Ok(Self { child, answers })
    }

    fn is_enrolled(&mut self) -> anyhow::Result<bool> {
        let mut answer = String::new();
        self.answers.read_line(&mut answer).context("the copy of this program, started for a test, does not answer")?;
        Ok(answer.trim() == "enrolled")
    }

    /// Whether the copy has loaded a library.
    pub fn has_loaded(&mut self, library: PreloadLibrary) -> anyhow::Result<bool> {
        // An answer means that the copy has started.
        self.is_enrolled()?;
        let maps = std::fs::read(format!("/proc/{}/maps", self.child.id()))?;
        Ok(is_mapped(&maps, library.file.as_bytes()))
    }
}

impl Drop for EnrollProbe {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        // If this process ignores SIGCHLD, wait fails with ECHILD once the child has ended.
        let _ = self.child.wait();
    }
}

/// Run as the copy: print whether this process is enrolled, then wait until standard input closes.
pub fn run_probe() -> anyhow::Result<()> {
    let host = LiveHost::new();
    let regions = host.open(Pid(std::process::id())).and_then(|handle| observe::regions(&*handle));
    // Regions are checked, not the process flag: a flag without marked regions merges nothing.
    let is_enrolled = regions.is_ok_and(|regions| regions.iter().any(|region| region.flags.has(VmFlags::MERGEABLE)));
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{}", if is_enrolled { "enrolled" } else { "not" })?;
    stdout.flush()?;
    std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_is_appended_to_existing_ld_preload() {
        let value = |before: Option<&str>| append_preload(Path::new("/l.so"), before.map(OsString::from)).unwrap();
        assert_eq!(value(None).as_c_str(), c"/l.so");
        assert_eq!(value(Some("")).as_c_str(), c"/l.so");
        assert_eq!(value(Some("a.so b.so")).as_c_str(), c"a.so b.so:/l.so");
        assert!(append_preload(Path::new("/a folder/l.so"), None).is_err());
    }
}
