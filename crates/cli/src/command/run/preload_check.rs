//! What came of preloading, seen from beside the program once it is there.
//!
//! What files say before exec ([`program_loader`]) is not all that decides: a program may be started by one that it does not
//! get `LD_PRELOAD` from, be linked statically though a launcher is not, or live where the kernel lets nobody be
//! enrolled. So a process stays beside it for some seconds, and tells on standard error who was not enrolled, once for
//! each program. Limits: what begins later, or ends between two looks, is not seen; and where somebody may wait for the
//! end of standard error, as of a pipe, nothing is looked at but what the program is first found to be.

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

/// For how long a tree is looked at: launchers have started their programs by then.
const CHECK_TIME: Duration = Duration::from_secs(10);

/// What glibc's own library is called, which is mapped after what is preloaded (elf/rtld.c, `dl_main`): `libc-2.31.so`
/// and the like before 2.34.
const LIBC_NAMES: [&[u8]; 2] = [b"/libc.so.", b"/libc-2."];

/// What is seen of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
enum PreloadState {
    /// It is enrolled.
    Enrolled,
    /// Its loader has come to nothing yet.
    Starting,
    /// The library is in it, and has not enrolled it yet.
    Loaded,
    /// It is not and will not be enrolled, and why.
    NotEnrolled(String),
    /// Nothing: it is setuid, or does not let itself be looked at.
    Unknown,
}

/// Look at a process and at what it starts, and tell who has not been enrolled by a library, by the name of its file.
pub fn check_tree(host: &dyn Host, root: ProcessId, library: &[u8]) {
    let stays = launch::has_no_reader(io::stderr().as_fd());
    let mut tree = ProcessTree::new(root);
    let (mut judged, mut late, mut told) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    let (began, mut pause) = (Instant::now(), FIRST_POLL_INTERVAL);
    while tree.update(host).is_ok() && !tree.has_ended() {
        let last = began.elapsed() >= CHECK_TIME;
        for process in tree.processes() {
            // By exec it becomes another.
            let Some(which) = executable_path(process).map(|program| (process, program)) else { continue };
            if judged.contains(&which) {
                continue;
            }
            let why = match check_process(host, process, &which.1, library) {
                PreloadState::Enrolled => None,
                PreloadState::NotEnrolled(why) => Some(format!("is not enrolled in KSM: {} {why}", which.1.display())),
                PreloadState::Unknown => {
                    Some("cannot be looked at, and is not enrolled in KSM if it is setuid".to_owned())
                }
                PreloadState::Loaded if last && late.contains(&which) => Some(format!(
                    "is not enrolled in KSM: {} has loaded the library, which could not do it",
                    which.1.display()
                )),
                PreloadState::Loaded => {
                    late.insert(which);
                    continue;
                }
                PreloadState::Starting => continue,
            };
            if let Some(why) = why.filter(|_| told.insert(which.1.clone())) {
                // Nobody may be left to read it.
                let _ = writeln!(io::stderr(), "pagefold: process {} {why}", process.pid);
            }
            judged.insert(which);
        }
        let is_judged = || judged.iter().any(|(process, _)| *process == root);
        if last || !stays && (is_judged() || !tree.processes().any(|process| process == root)) {
            return;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(MAX_POLL_INTERVAL);
    }
}

/// The program of a process: a file, by which it is told, or nothing but that it is kept from us.
fn executable_path(process: ProcessId) -> Option<PathBuf> {
    match fs::read_link(format!("/proc/{}/exe", process.pid)) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Some(PathBuf::new()),
        file => file.ok(),
    }
}

/// What came of the library in a process, which executed `file` just before.
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
    let loading = program_loader::preload_support(Path::new(&format!("/proc/{}/exe", process.pid)));
    let why = match loading {
        Ok(PreloadSupport::Ignored(why)) => why,
        Ok(PreloadSupport::Honored) if LIBC_NAMES.iter().any(|name| enroll_method::is_mapped(&maps, name)) => {
            format!("was started without LD_PRELOAD, or could not load {}", String::from_utf8_lossy(library))
        }
        _ => return PreloadState::Starting,
    };
    // What was seen was of the same program.
    if executable_path(process).is_some_and(|now| now == executable) {
        PreloadState::NotEnrolled(why)
    } else {
        PreloadState::Starting
    }
}
