//! Checks after exec, from a companion process, whether the preloaded library enrolled the program.
//!
//! The check of files before exec ([`program_loader`]) is not enough. A launcher may start a program without
//! `LD_PRELOAD`, or start one that is linked statically, or the kernel may refuse to enroll it. So a companion process
//! checks the process tree for some seconds and reports on standard error which programs were not enrolled, once for
//! each. Limits: it does not see processes that start later, or that end between two polls. If standard error may have
//! a reader that waits for its end, such as a pipe, it checks only the first program.

use super::companion::{FIRST_POLL_INTERVAL, MAX_POLL_INTERVAL, ProcessTree};
use super::enroll_method;
use super::program_loader::{self, PreloadSupport};
use pagefold_base::{Absent, ProcessId};
use pagefold_host::Host;
use pagefold_linux::launch;
use pagefold_merge::verify;
use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a tree is checked: launchers have started their programs by then.
const CHECK_TIME: Duration = Duration::from_secs(10);

/// The file names of glibc, which is mapped after preloaded libraries (elf/rtld.c, `dl_main`): before 2.34 names such
/// as `libc-2.31.so`.
const LIBC_NAMES: [&[u8]; 2] = [b"/libc.so.", b"/libc-2."];

/// The observed state of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
enum PreloadState {
    /// It is enrolled.
    Enrolled,
    /// Its loader has not loaded libraries yet.
    Starting,
    /// It has loaded the library, which has not enrolled it yet.
    Loaded,
    /// It will not be enrolled, with the reason.
    NotEnrolled(String),
    /// It cannot be read: it is setuid, or refuses access.
    Unknown,
}

/// Check a process and its descendants, and report which ones the library with this file name has not enrolled.
pub fn check_tree(host: &dyn Host, root: ProcessId, library: &[u8]) {
    let has_no_reader = launch::has_no_reader(io::stderr().as_fd());
    let mut tree = ProcessTree::new(root);
    let (mut checked, mut loaded, mut reported_programs) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    let (started, mut pause) = (Instant::now(), FIRST_POLL_INTERVAL);
    while tree.update(host).is_ok() && !tree.has_ended() {
        let is_last_poll = started.elapsed() >= CHECK_TIME;
        for process in tree.processes() {
            // After exec, the process runs another program.
            let Some(running) = executable_path(process).map(|program| (process, program)) else { continue };
            if checked.contains(&running) {
                continue;
            }
            let why = match check_process(host, process, &running.1, library) {
                PreloadState::Enrolled => None,
                PreloadState::NotEnrolled(why) => {
                    Some(format!("is not enrolled in KSM: {} {why}", running.1.display()))
                }
                PreloadState::Unknown => Some("cannot be read, and is not enrolled in KSM if it is setuid".to_owned()),
                PreloadState::Loaded if is_last_poll && loaded.contains(&running) => Some(format!(
                    "is not enrolled in KSM: {} has loaded the library, which could not enroll it",
                    running.1.display()
                )),
                PreloadState::Loaded => {
                    loaded.insert(running);
                    continue;
                }
                PreloadState::Starting => continue,
            };
            if let Some(why) = why.filter(|_| reported_programs.insert(running.1.clone())) {
                // Standard error may have no reader.
                let _ = writeln!(io::stderr(), "pagefold: process {} {why}", process.pid);
            }
            checked.insert(running);
        }
        let is_root_checked = || checked.iter().any(|(process, _)| *process == root);
        if is_last_poll || !has_no_reader && (is_root_checked() || !tree.processes().any(|process| process == root)) {
            return;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(MAX_POLL_INTERVAL);
    }
}

/// The program file of a process. Empty if reading it is not permitted, `None` if it has none.
fn executable_path(process: ProcessId) -> Option<PathBuf> {
    match fs::read_link(format!("/proc/{}/exe", process.pid)) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Some(PathBuf::new()),
        file => file.ok(),
    }
}

/// The state of the library in a process that was seen running `executable` just before.
fn check_process(host: &dyn Host, process: ProcessId, executable: &Path, library: &[u8]) -> PreloadState {
    let Ok(handle) = pagefold_host::hold(host, process) else { return PreloadState::Starting };
    if verify::has_enrolled_memory(&*handle) == Ok(true) {
        return PreloadState::Enrolled;
    }
    let maps = match handle.read("maps") {
        Ok(maps) => maps,
        Err(Absent::Denied) => return PreloadState::Unknown,
        Err(_) => return PreloadState::Starting,
    };
    if enroll_method::is_mapped(&maps, library) {
        return PreloadState::Loaded;
    }
    let support = program_loader::preload_support(Path::new(&format!("/proc/{}/exe", process.pid)));
    let why = match support {
        Ok(PreloadSupport::Ignored(why)) => why,
        Ok(PreloadSupport::Honored) if LIBC_NAMES.iter().any(|name| enroll_method::is_mapped(&maps, name)) => {
            format!("was started without LD_PRELOAD, or could not load {}", String::from_utf8_lossy(library))
        }
        _ => return PreloadState::Starting,
    };
    // Only valid if the process still runs the same program.
    if executable_path(process).is_some_and(|now| now == executable) {
        PreloadState::NotEnrolled(why)
    } else {
        PreloadState::Starting
    }
}
