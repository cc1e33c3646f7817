//! What injection reads about a process before and while a thread of it is stopped.
//!
//! The process is given by its open directory below `/proc`, which always refers to the same process. Its memory is
//! accessed through an open `/proc/PID/mem`. That file refers to the address space, and reads return nothing after exit
//! or exec.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, Dir, FlockOperation, Mode, OFlags, flock, openat, statat};
use rustix::io::Errno;

use super::{ARGUMENT_SPACE_BYTES, InjectError, InjectionSites, arch, operation_failed, stack};
use crate::mapping::page_size;
use crate::{ofd_lock, pagemap};

/// How long to wait for one of several threads before the next one is tried: in the first and in the second round.
const FIRST_STOP_TIMEOUT: Duration = Duration::from_millis(20);
const RETRY_STOP_TIMEOUT: Duration = Duration::from_millis(500);
/// How many threads are tried, and from how many these are chosen. The number of files read must not grow with the
/// number of threads.
const MAX_THREADS_TRIED: usize = 6;
const MAX_THREADS_EXAMINED: usize = 32;
/// How long to wait while another tracer has the lock of the process. A tracer of Pagefold releases it within
/// milliseconds.
const LOCK_TIMEOUT: Duration = Duration::from_millis(500);
/// How long the kernel may take to map a new program in exec.
const EXEC_MAPPING_DELAY: Duration = Duration::from_millis(2);

/// PF_KTHREAD (include/linux/sched.h).
const PF_KTHREAD: u64 = 0x0020_0000;

/// Bytes of code in one read, and the overlap of two reads so that no site is missed between them.
const CODE_BYTES_PER_READ: usize = 1 << 20;
const CODE_OVERLAP_BYTES: usize = 16;

/// A process whose threads may be stopped.
#[derive(Debug)]
pub struct InjectTarget {
    pub(super) directory: OwnedFd,
    pub(super) pid: i32,
    pub(super) memory: File,
    pub(super) maps: File,
    pub(super) pagemap: File,
    /// The end of the main stack, or of the part that was used first. Nothing above it matters.
    pub(super) stack_end: Option<u64>,
    pub(super) sites: InjectionSites,
    /// The thread that was visited last; 0 before the first visit and after a failed one.
    last_visited_tid: AtomicI32,
}

/// Locked while a thread of a process is visited, so that two Pagefold processes never use its stack at once.
///
/// It is a flock(2) lock on the `maps` file of the process. If another program has that lock, it is a mark instead: an
/// OFD read lock ([`ofd_lock`]), which is compatible with the lock and with other marks.
#[derive(Debug)]
pub(super) struct VisitLock {
    maps: File,
    /// Whether it is a lock and not a mark.
    is_exclusive: bool,
}

impl VisitLock {
    /// Whether another Pagefold process may visit the process at the same time;
    /// [`InjectTarget::tracer_of_other_thread`] then detects it. The lock can be free while a visit with a mark
    /// continues, after the other program has released it.
    pub fn may_be_shared(&self) -> bool {
        !self.is_exclusive || ofd_lock::is_locked_beside(&self.maps).unwrap_or(true)
    }
}

/// A line of `/proc/PID/maps`.
pub(super) struct MapsLine<'a> {
    pub start: u64,
    pub end: u64,
    pub permissions: &'a str,
    pub inode: u64,
    pub name: &'a str,
}

pub(super) fn parse_maps_line(line: &str) -> Option<MapsLine<'_>> {
    let mut fields = line.splitn(6, ' ');
    let (start, end) = fields.next()?.split_once('-')?;
    let permissions = fields.next()?;
    let inode = fields.nth(2)?.parse().ok()?;
    let name = fields.next().unwrap_or_default().trim_start();
    let parse_address = |text| u64::from_str_radix(text, 16).ok();
    Some(MapsLine { start: parse_address(start)?, end: parse_address(end)?, permissions, inode, name })
}

/// A system call in which a thread waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockedCall {
    pub number: u64,
    pub arguments: [u64; 6],
    pub stack_pointer: u64,
    /// The return address of the call.
    pub return_address: u64,
}

/// Parse `/proc/PID/task/TID/syscall`. None for a thread that runs or waits outside a system call.
fn parse_syscall_line(syscall_line: &str) -> Option<BlockedCall> {
    let mut fields = syscall_line.split_ascii_whitespace();
    let number = fields.next()?.parse().ok()?;
    let mut words = [0; 8];
    for word in &mut words {
        *word = u64::from_str_radix(fields.next()?.strip_prefix("0x")?, 16).ok()?;
    }
    let [arguments @ .., stack_pointer, ip] = words;
    Some(BlockedCall { number, arguments, stack_pointer, return_address: ip })
}

/// The value of a field of `/proc/PID/status`.
fn status_field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

pub(super) fn status_number<T: std::str::FromStr>(status: &str, name: &str) -> Option<T> {
    status_field(status, name)?.parse().ok()
}

/// Whether the main thread runs with a shadow stack (arch/x86/kernel/cpu/proc.c, `arch_proc_pid_thread_features`, 6.6).
fn has_shadow_stack(status: &str) -> bool {
    let features = status_field(status, "x86_Thread_features").unwrap_or_default();
    features.split(' ').any(|feature| feature == "shstk")
}

/// Whether a thread has ended, according to its status.
fn has_ended(status: &str) -> bool {
    status_field(status, "State").is_some_and(|state| state.starts_with(['Z', 'X']))
}

impl InjectTarget {
    /// Check whether and how a process can be visited. `directory` is its open directory below `/proc`, `pid` its PID
    /// there.
    ///
    /// # Errors
    /// Why it cannot be visited. The process is unchanged.
    pub fn new(directory: impl AsFd, pid: i32) -> Result<Self, InjectError> {
        let directory = directory.as_fd().try_clone_to_owned().map_err(operation_failed("holding its directory"))?;
        let status = read_text(&directory, "status")?;
        if status_number(&status, "Tgid") == Some(std::process::id()) {
            return Err(InjectError::Unsupported("a process cannot trace itself".to_owned()));
        }
        let stat = read_text(&directory, "stat")?;
        let flags =
            stat.rsplit(')').next().and_then(|rest| rest.split(' ').nth(7)).and_then(|flags| flags.parse().ok());
        if flags.is_some_and(|flags: u64| flags & PF_KTHREAD != 0) {
            return Err(InjectError::Unsupported("it is a thread of the kernel".to_owned()));
        }
        if has_shadow_stack(&status) {
            return Err(InjectError::Unsupported("it runs with a shadow stack".to_owned()));
        }
        // Open its memory first: the memory of the stopped thread is compared with it (`park_thread`).
        let open_and_search = || {
            let memory = openat(&directory, "mem", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map(File::from);
            let memory = memory.map_err(|errno| match errno {
                Errno::NOENT | Errno::SRCH => InjectError::Vanished,
                Errno::PERM | Errno::ACCESS => {
                    InjectError::Denied("tracing it needs its owner or CAP_SYS_PTRACE".to_owned())
                }
                _ => InjectError::Failed(format!("opening its memory: {errno}")),
            })?;
            let listing = read_text(&directory, "maps")?;
            let sites = find_injection_sites(&memory, &listing)?;
            Ok((memory, listing, sites))
        };
        let (memory, listing, sites) = match open_and_search() {
            // The process may have called exec in between, so that memory and listing belong to different programs. Or
            // it is still in exec, and not all code is mapped.
            Err(InjectError::Unsupported(_)) => {
                std::thread::sleep(EXEC_MAPPING_DELAY);
                open_and_search()
            }
            result => result,
        }?;
        let open_file = |name: &str| {
            let file = openat(&directory, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
            file.map(File::from).map_err(|_| InjectError::Vanished)
        };
        let (maps, pagemap) = (open_file("maps")?, open_file("pagemap")?);
        let (stack_end, last_visited_tid) = (stack::main_stack_end(&listing), AtomicI32::new(0));
        Ok(Self { directory, pid, memory, maps, pagemap, stack_end, sites, last_visited_tid })
    }

    /// Take the lock for a visit. Only a lock of another Pagefold process is waited for.
    pub(super) fn lock(&self) -> Result<VisitLock, InjectError> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let file =
            openat(&self.directory, "maps", flags, Mode::empty()).map(File::from).map_err(|_| InjectError::Vanished)?;
        let start = Instant::now();
        let mut holder = None;
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(VisitLock { maps: file, is_exclusive: true }),
                Err(Errno::WOULDBLOCK) => {}
                Err(errno) => return Err(operation_failed("locking it")(errno.into())),
            }
            let is_expired = start.elapsed() > LOCK_TIMEOUT;
            if holder.is_none() || is_expired {
                let locks = std::fs::read_to_string("/proc/locks").unwrap_or_default();
                let found = file.metadata().ok().and_then(|file| flock_holder(&locks, file.dev(), file.ino()));
                // The kernel prints the file in parts, and a lock moves between them if others are released meanwhile.
                holder = found.or(holder);
            }
            match holder {
                Some(pid)
                    if pid == self.pid
                        || !may_be_pagefold(executable_path(pid).as_deref(), executable_path("self").as_deref()) =>
                {
                    // This fails only beside a write lock of a program that runs as root. That is no reason to refuse
                    // the visit.
                    let _ = ofd_lock::lock_for_reading(&file);
                    return Ok(VisitLock { maps: file, is_exclusive: false });
                }
                _ if !is_expired => std::thread::sleep(Duration::from_millis(1)),
                Some(pid) => {
                    return Err(InjectError::Busy(format!("process {pid} has locked /proc/{}/maps", self.pid)));
                }
                None => return Err(InjectError::Busy("another pagefold process is injecting into it".to_owned())),
            }
        }
    }

    /// The tracer of any other thread of the process than `tid`.
    pub(super) fn tracer_of_other_thread(&self, tid: i32) -> Option<u32> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let entries = Dir::new(openat(&self.directory, "task", flags, Mode::empty()).ok()?).ok()?;
        let mut statuses = entries.flatten().filter_map(|entry| {
            let other_tid: i32 = entry.file_name().to_str().ok()?.parse().ok()?;
            (other_tid != tid).then(|| read_text(&self.directory, &format!("task/{other_tid}/status")).ok())?
        });
        statuses.find_map(|status| status_number(&status, "TracerPid").filter(|&tracer| tracer != 0))
    }

    /// The thread to try before listing others: the last visited thread, at first the main one. None for a process with
    /// one thread, and if stopping the thread would end its call early.
    pub(super) fn preferred_thread(&self) -> Option<(i32, Duration)> {
        // A directory has one link for itself, one from its parent and one for each thread (fs/proc/base.c,
        // `proc_task_getattr`).
        let links = statat(&self.directory, "task", AtFlags::empty()).ok()?.st_nlink;
        let tid = Some(self.last_visited_tid.load(Ordering::Relaxed)).filter(|&tid| tid != 0).unwrap_or(self.pid);
        (links > 3 && !self.is_in_stop_sensitive_call(tid)).then_some((tid, FIRST_STOP_TIMEOUT))
    }

    /// Record which thread was visited, or that the visit failed.
    pub(super) fn note_visit(&self, tid: i32, succeeded: bool) {
        self.last_visited_tid.store(if succeeded { tid } else { 0 }, Ordering::Relaxed);
    }

    /// The threads to try, with the stop timeout of each: the main thread first. Threads that have ended are left out.
    pub(super) fn candidate_threads(&self) -> Result<Vec<(i32, Duration)>, InjectError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let task_directory =
            openat(&self.directory, "task", flags, Mode::empty()).map_err(|_| InjectError::Vanished)?;
        let mut threads = Vec::new();
        for entry in Dir::new(task_directory).map_err(|_| InjectError::Vanished)?.flatten() {
            if let Some(tid) = entry.file_name().to_str().ok().and_then(|name| name.parse().ok()) {
                threads.push(tid);
            }
            if threads.len() == MAX_THREADS_EXAMINED {
                break;
            }
        }
        // A thread whose call would end early by a stop is used only if there is no other.
        let is_last_resort = |tid| {
            self.is_in_stop_sensitive_call(tid)
                && (tid != self.pid || self.leaves_main_thread_space(4 * ARGUMENT_SPACE_BYTES as u64))
        };
        threads.sort_by_cached_key(|&tid: &i32| (is_last_resort(tid), tid != self.pid, tid));
        threads.retain(|tid| {
            let status = read_text(&self.directory, &format!("task/{tid}/status")).unwrap_or_default();
            status_field(&status, "State").is_some() && !has_ended(&status)
        });
        // The main thread is always included: other threads need more of its stack.
        if let Some(main_index) =
            threads.iter().position(|&tid| tid == self.pid).filter(|&main_index| main_index >= MAX_THREADS_TRIED)
        {
            threads.swap(main_index, MAX_THREADS_TRIED - 1);
        }
        threads.truncate(MAX_THREADS_TRIED);
        if threads.is_empty() {
            return Err(InjectError::Vanished);
        }
        let round = |stop_timeout| threads.iter().map(move |&tid| (tid, stop_timeout));
        let first_round = if threads.len() > 1 { Some(FIRST_STOP_TIMEOUT) } else { None };
        Ok(first_round.into_iter().chain([RETRY_STOP_TIMEOUT]).flat_map(round).collect())
    }

    /// Whether a thread waits in a call that the kernel ends with EINTR when the thread is stopped.
    fn is_in_stop_sensitive_call(&self, tid: i32) -> bool {
        self.blocked_call(tid).is_some_and(|call| arch::INTERRUPTED_BY_STOP.contains(&call.number))
    }

    /// The system call in which a thread waits.
    pub(super) fn blocked_call(&self, tid: i32) -> Option<BlockedCall> {
        parse_syscall_line(&read_text(&self.directory, &format!("task/{tid}/syscall")).ok()?)
    }

    /// The CPU on which a thread ran last.
    pub(super) fn last_cpu(&self, tid: i32) -> Option<usize> {
        let stat = read_text(&self.directory, &format!("task/{tid}/stat")).ok()?;
        stat.rsplit(')').next()?.split(' ').nth(37)?.parse().ok()
    }

    /// Whether a thread runs or only waits for a CPU.
    pub(super) fn is_runnable(&self, tid: i32) -> bool {
        let stat = read_text(&self.directory, &format!("task/{tid}/stat")).unwrap_or_default();
        stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('R'))
    }

    pub(super) fn has_thread(&self, tid: i32) -> bool {
        read_text(&self.directory, &format!("task/{tid}/stat")).is_ok()
    }

    /// Refuse a stopped thread whose calls a seccomp filter would check.
    pub(super) fn check_seccomp(&self, tid: i32, is_suspended: bool) -> Result<(), InjectError> {
        let status = read_text(&self.directory, &format!("task/{tid}/status"))?;
        match status_number(&status, "Seccomp") {
            Some(1) => Err(InjectError::Unsupported("it runs under strict seccomp".to_owned())),
            Some(mode) if mode > 1 && !is_suspended => Err(InjectError::Denied(
                "it runs under a seccomp filter, which only CAP_SYS_ADMIN may suspend, where pagefold itself runs under \
                 none and the kernel has CONFIG_CHECKPOINT_RESTORE"
                    .to_owned(),
            )),
            _ => Ok(()),
        }
    }

    /// Whether the process runs under seccomp.
    ///
    /// # Errors
    /// `Vanished` when it ended.
    pub fn has_seccomp(&self) -> Result<bool, InjectError> {
        Ok(status_number(&read_text(&self.directory, "status")?, "Seccomp").is_some_and(|mode: u32| mode != 0))
    }

    /// Why a thread could not be seized.
    pub(super) fn seize_error(&self, tid: i32, error: &io::Error) -> InjectError {
        let Ok(status) = read_text(&self.directory, &format!("task/{tid}/status")) else {
            return InjectError::Vanished;
        };
        let tracer = status_number(&status, "TracerPid").unwrap_or(0);
        match error.raw_os_error() {
            Some(libc::ESRCH) => InjectError::Vanished,
            // The kernel returns EPERM for such a thread.
            _ if has_ended(&status) => InjectError::Vanished,
            _ if tracer != 0 => InjectError::Traced(tracer),
            Some(libc::EPERM) => InjectError::Denied("tracing it needs its owner or CAP_SYS_PTRACE".to_owned()),
            _ => InjectError::Failed(format!("seizing thread {tid}: {error}")),
        }
    }

    /// Verify that the code is still at its sites. `Busy` if it is no longer in memory.
    pub(super) fn verify_sites(&self) -> Result<InjectionSites, InjectError> {
        let mut stub = [0; 16];
        let mut return_code = [0; 16];
        self.read_if_present(&mut stub, self.sites.sigreturn_stub)?;
        self.read_if_present(&mut return_code, arch::return_code_address(self.sites.return_site))?;
        if arch::are_sites_intact(&stub, &return_code) { Ok(self.sites) } else { Err(InjectError::Vanished) }
    }

    /// Read memory that may belong to a file, while a thread is stopped. `Busy` if a page of it is not in memory: a
    /// file server that does not answer would keep the thread stopped. A swapped-out page is anonymous, so it is read.
    pub(super) fn read_if_present(&self, bytes: &mut [u8], address: u64) -> Result<(), InjectError> {
        let page_bytes = page_size() as u64;
        let end = address.checked_add(bytes.len() as u64).and_then(|end| end.checked_next_multiple_of(page_bytes));
        let range = address / page_bytes * page_bytes..end.ok_or(InjectError::Vanished)?;
        let mut present_bytes = 0;
        pagemap::scan_mapped(&self.pagemap, range.clone(), pagemap::RangeContents::Anything, |mapped| {
            present_bytes += mapped.end - mapped.start;
        })
        .map_err(operation_failed("reading which pages of it are in memory"))?;
        if present_bytes != range.end - range.start {
            return Err(InjectError::Busy(format!(
                "its memory at {address:#x} would have to be read from a file first"
            )));
        }
        self.memory.read_exact_at(bytes, address).map_err(|_| InjectError::Vanished)
    }

    /// The address at which a thread that was stopped within a restartable sequence must continue. The kernel forgets
    /// the sequence once it sees the thread elsewhere (kernel/rseq.c, `rseq_ip_fixup`), so the tracer must do what
    /// preemption would do. `Busy` if the sequence is not in memory.
    pub(super) fn rseq_abort_address(&self, rseq: u64, ip: u64) -> Result<Option<u64>, InjectError> {
        let read = |address: u64| {
            let mut bytes = [0; 8];
            self.read_if_present(&mut bytes, address).map(|()| u64::from_le_bytes(bytes))
        };
        // `struct rseq` has `rseq_cs` at 8; `struct rseq_cs` is version and flags, start_ip, post_commit_offset,
        // abort_ip.
        let sequence = read(rseq.wrapping_add(8))?;
        if sequence == 0 {
            return Ok(None);
        }
        let field = |offset| read(sequence.wrapping_add(offset));
        let (start, length, abort) = (field(8)?, field(16)?, field(24)?);
        Ok((ip.wrapping_sub(start) < length).then_some(abort))
    }
}

/// The PID of the process that has a flock(2) lock on a file, from `/proc/locks` (fs/locks.c, `lock_get_status`, 6.18).
fn flock_holder(locks: &str, device: u64, inode: u64) -> Option<i32> {
    let file_id = format!("{:02x}:{:02x}:{inode}", rustix::fs::major(device), rustix::fs::minor(device));
    locks.lines().find_map(|line| match line.split_ascii_whitespace().collect::<Vec<_>>()[..] {
        // A process that waits for the lock has an arrow in the second field.
        [_, "FLOCK", _, _, pid, id, ..] if id == file_id => pid.parse().ok(),
        _ => None,
    })
}

/// The program that a process runs. Only the link is read, because the file may be on a server that does not answer.
fn executable_path(process: impl std::fmt::Display) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/{process}/exe")).ok()
}

/// Whether a process that runs `program` may be Pagefold: it runs the same program as this process, or has its name, or
/// its program cannot be read. A Pagefold process with another program name is not recognized, and may visit the same
/// process at the same time.
fn may_be_pagefold(program: Option<&Path>, own_program: Option<&Path>) -> bool {
    let Some(program) = program else { return true };
    let is_named = program.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"pagefold"));
    is_named || own_program == Some(program)
}

/// Read a file of the process. `Vanished` when the process has ended.
pub(super) fn read_text(directory: &OwnedFd, file: &str) -> Result<String, InjectError> {
    let mut bytes = Vec::new();
    let file = openat(directory, file, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map(File::from);
    match file.map_err(io::Error::from).and_then(|mut file| file.read_to_end(&mut bytes)) {
        Ok(_) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(InjectError::Vanished),
        Err(error) => Err(operation_failed("reading its state")(error)),
    }
}

/// Search the target's libraries and its program for the code.
fn find_injection_sites(memory: &File, maps: &str) -> Result<InjectionSites, InjectError> {
    let code = maps.lines().filter_map(parse_maps_line).filter(|mapping| {
        let is_vdso_stub = arch::STUB_IN_VDSO && mapping.name == "[vdso]";
        mapping.permissions.starts_with("r-xp") && (mapping.inode != 0 || is_vdso_stub)
    });
    let mut code: Vec<MapsLine<'_>> = code.collect();
    if code.is_empty() {
        return Err(InjectError::Vanished);
    }
    // A program of gigabytes need not be searched if the C library is mapped.
    code.sort_by_key(|mapping| {
        let file = mapping.name.rsplit('/').next().unwrap_or_default();
        !(["libc.so", "libc-", "libc.musl", "ld-musl"].iter().any(|name| file.starts_with(name)) || file == "[vdso]")
    });
    let (mut stub, mut return_site) = (None, None);
    let mut buffer = vec![0; CODE_BYTES_PER_READ + CODE_OVERLAP_BYTES];
    for mapping in &code {
        let mut start = mapping.start;
        while start < mapping.end {
            let len = (mapping.end - start).min(buffer.len() as u64) as usize;
            // Unreadable bytes, beyond the end of a truncated file, contain no code.
            if memory.read_exact_at(&mut buffer[..len], start).is_ok() {
                let (stub_offset, return_offset) = arch::find_sites(&buffer[..len]);
                stub = stub.or(stub_offset.map(|offset| start + offset as u64));
                return_site = return_site.or(return_offset.map(|offset| start + offset as u64));
                if let (Some(stub), Some(return_site)) = (stub, return_site) {
                    return Ok(InjectionSites { sigreturn_stub: stub, return_site });
                }
            }
            start += CODE_BYTES_PER_READ as u64;
        }
    }
    Err(InjectError::Unsupported(
        "its code has no return from signal handlers (rt_sigreturn), which injection needs".to_owned(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flock_holder_ignores_waiting_processes() {
        let locks = "1: POSIX  ADVISORY  WRITE 71 00:14:881 0 EOF\n\
                     2: FLOCK  ADVISORY  WRITE 812 00:14:882 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 4711 00:14:881 0 EOF\n\
                     3: -> FLOCK  ADVISORY  WRITE 9 00:14:881 0 EOF\n";
        let device = rustix::fs::makedev(0, 0x14);
        assert_eq!(flock_holder(locks, device, 881), Some(4711));
        assert_eq!(flock_holder(locks, device, 88), None);
        assert_eq!(flock_holder(locks, rustix::fs::makedev(8, 0x14), 881), None);
    }

    #[test]
    fn other_programs_are_not_taken_for_pagefold() {
        let own_program = Some(Path::new("/tmp/deps/inject-1"));
        for program in ["/tmp/deps/inject-1", "/usr/bin/pagefold", "/usr/bin/pagefold (deleted)", "/a/pagefold-lab"] {
            assert!(may_be_pagefold(Some(Path::new(program)), own_program), "{program}");
        }
        assert!(may_be_pagefold(None, own_program));
        assert!(!may_be_pagefold(Some(Path::new("/opt/pagefold/helper")), own_program));
        assert!(!may_be_pagefold(Some(Path::new("/usr/bin/flock")), None));
    }

    #[test]
    fn shadow_stack_is_detected_from_thread_features() {
        let status = |features: &str| format!("Name:\tcat\nx86_Thread_features:\t{features}\nThreads:\t1\n");
        assert!(has_shadow_stack(&status("shstk wrss ")));
        assert!(!has_shadow_stack(&status("")) && !has_shadow_stack(&status("wrss ")));
        // The line of locked features does not list active features.
        assert!(!has_shadow_stack("Name:\tcat\nx86_Thread_features_locked:\tshstk wrss \n"));
    }

    #[test]
    fn blocked_call_is_parsed() {
        let line = "22 0x4 0xffffe0 0x1 0xffffffff 0x0 0x8 0xfffff780 0xffff8001\n";
        let arguments = [4, 0xff_ffe0, 1, 0xffff_ffff, 0, 8];
        assert_eq!(
            parse_syscall_line(line),
            Some(BlockedCall { number: 22, arguments, stack_pointer: 0xffff_f780, return_address: 0xffff_8001 })
        );
        for line in ["-1 0x7fff12345678 0x7f0012345678\n", "running\n", "22 0x4 0xff\n", ""] {
            assert_eq!(parse_syscall_line(line), None, "{line}");
        }
    }
}
