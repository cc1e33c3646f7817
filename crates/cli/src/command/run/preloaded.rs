//! What came of preloading, seen from beside the program once it is there.
//!
//! What files say before exec ([`program`]) is not all that decides: a program may be started by one that it does not
//! get `LD_PRELOAD` from, be linked statically though a launcher is not, or live where the kernel lets nobody be
//! enrolled. So a process stays beside it for some seconds, and tells on standard error who was not enrolled, once for
//! each program. Limits: what begins later, or ends between two looks, is not seen; and where somebody may wait for the
//! end of standard error, as of a pipe, nothing is looked at but what the program is first found to be.

use super::companion::{FIRST_PAUSE, LONGEST_PAUSE, Tree};
use super::program::{self, Loading};
use super::way;
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
const WATCH: Duration = Duration::from_secs(10);

/// What glibc's own library is called, which is mapped after what is preloaded (elf/rtld.c, `dl_main`): `libc-2.31.so`
/// and the like before 2.34.
const C_LIBRARIES: [&[u8]; 2] = [b"/libc.so.", b"/libc-2."];

/// What is seen of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Seen {
    /// It is enrolled.
    Enrolled,
    /// Its loader has come to nothing yet.
    Begins,
    /// The library is in it, and has not enrolled it yet.
    Loaded,
    /// It is not and will not be enrolled, and why.
    Not(String),
    /// Nothing: it is setuid, or does not let itself be looked at.
    Hidden,
}

/// Look at a process and at what it starts, and tell who has not been enrolled by a library, by the name of its file.
pub fn watch(host: &dyn Host, first: ProcessId, library: &[u8]) {
    let stays = launch::has_no_reader(io::stderr().as_fd());
    let mut tree = Tree::of(first);
    let (mut judged, mut late, mut told) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    let (began, mut pause) = (Instant::now(), FIRST_PAUSE);
    while tree.observe(host).is_ok() && !tree.has_ended() {
        let last = began.elapsed() >= WATCH;
        for process in tree.members() {
            // By exec it becomes another.
            let Some(which) = executed(process).map(|program| (process, program)) else { continue };
            if judged.contains(&which) {
                continue;
            }
            let why = match look(host, process, &which.1, library) {
                Seen::Enrolled => None,
                Seen::Not(why) => Some(format!("is not enrolled in KSM: {} {why}", which.1.display())),
                Seen::Hidden => Some("cannot be looked at, and is not enrolled in KSM if it is setuid".to_owned()),
                Seen::Loaded if last && late.contains(&which) => Some(format!(
                    "is not enrolled in KSM: {} has loaded the library, which could not do it",
                    which.1.display()
                )),
                Seen::Loaded => {
                    late.insert(which);
                    continue;
                }
                Seen::Begins => continue,
            };
            if let Some(why) = why.filter(|_| told.insert(which.1.clone())) {
                // Nobody may be left to read it.
                let _ = writeln!(io::stderr(), "pagefold: process {} {why}", process.pid);
            }
            judged.insert(which);
        }
        let is_judged = || judged.iter().any(|(process, _)| *process == first);
        if last || !stays && (is_judged() || !tree.members().any(|process| process == first)) {
            return;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// The program of a process: a file, by which it is told, or nothing but that it is kept from us.
fn executed(process: ProcessId) -> Option<PathBuf> {
    match fs::read_link(format!("/proc/{}/exe", process.pid)) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Some(PathBuf::new()),
        file => file.ok(),
    }
}

/// What came of the library in a process, which executed `file` just before.
fn look(host: &dyn Host, process: ProcessId, file: &Path, library: &[u8]) -> Seen {
    let Ok(handle) = pagefold_host::hold(host, process) else { return Seen::Begins };
    if verify::has_enrolled(&*handle) == Ok(true) {
        return Seen::Enrolled;
    }
    let maps = match handle.read("maps") {
        Ok(maps) => maps,
        Err(Absent::Denied) => return Seen::Hidden,
        Err(_) => return Seen::Begins,
    };
    if way::is_mapped(&maps, library) {
        return Seen::Loaded;
    }
    let loading = program::loading(Path::new(&format!("/proc/{}/exe", process.pid)));
    let why = match loading {
        Ok(Loading::Ignores(why)) => why,
        Ok(Loading::Preloads) if C_LIBRARIES.iter().any(|name| way::is_mapped(&maps, name)) => {
            format!("was started without LD_PRELOAD, or could not load {}", String::from_utf8_lossy(library))
        }
        _ => return Seen::Begins,
    };
    // What was seen was of the same program.
    if executed(process).is_some_and(|now| now == file) { Seen::Not(why) } else { Seen::Begins }
}
