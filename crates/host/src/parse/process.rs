//! What `/proc/PID` says of a process beside its memory: `stat` and `status` (fs/proc/array.c), `cmdline` and `environ`
//! (fs/proc/base.c), `cgroup` (kernel/cgroup/cgroup.c, `proc_cgroup_show`).

use super::text::{field, kib, lines, malformed, number};
use pagefold_model::identity::JOB_VARIABLES;
use pagefold_model::{Absent, Bytes, Pid, Reading};
use std::collections::BTreeMap;

/// The flag of a kernel thread in [`Stat::flags`] (include/linux/sched.h).
pub const PF_KTHREAD: u64 = 0x0020_0000;

/// The fields of `/proc/PID/stat` that Pagefold uses (Documentation/filesystems/proc.rst, table 1-4).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stat {
    /// Field 1.
    pub pid: Pid,
    /// Field 2, the kernel's name of the program without its parentheses, with bytes that are no UTF-8 replaced.
    pub comm: String,
    /// Field 3, the letter of the state.
    pub state: char,
    /// Field 4, the parent; 0 for none that can be seen.
    pub ppid: Pid,
    /// Field 9, the `PF_` flags.
    pub flags: u64,
    /// Field 14, clock ticks in user mode.
    pub utime: u64,
    /// Field 15, clock ticks in kernel mode.
    pub stime: u64,
    /// Field 22, clock ticks from boot to the start of the process.
    pub start_time: u64,
}

/// `/proc/PID/stat`. A program names itself, and may put spaces, parentheses and line feeds into its name: the fields
/// begin after the last parenthesis, since they have none.
pub fn stat(bytes: &[u8]) -> Reading<Stat> {
    let wrong = || malformed("not a line of stat", bytes);
    let open = bytes.iter().position(|&byte| byte == b'(').ok_or_else(wrong)?;
    let close = bytes.iter().rposition(|&byte| byte == b')').filter(|&close| close > open).ok_or_else(wrong)?;
    // What does not end in a blank was cut off, perhaps within a number.
    let tail = &bytes[close + 1..];
    let end = tail.iter().rposition(u8::is_ascii_whitespace).ok_or_else(wrong)?;
    let fields: Vec<&[u8]> = tail[..end].trim_ascii().split(|&byte| byte == b' ').collect();
    // Counted as in the documentation, from 1, where the third is the first after the name.
    let at = |position: usize| fields.get(position - 3).copied().ok_or_else(wrong);
    let state = match at(3)? {
        [letter] if letter.is_ascii_alphabetic() => char::from(*letter),
        _ => return Err(wrong()),
    };
    Ok(Stat {
        pid: Pid(number(&bytes[..open])?),
        comm: String::from_utf8_lossy(&bytes[open + 1..close]).into_owned(),
        state,
        ppid: Pid(at(4).and_then(number)?),
        flags: at(9).and_then(number)?,
        utime: at(14).and_then(number)?,
        stime: at(15).and_then(number)?,
        start_time: at(22).and_then(number)?,
    })
}

/// The fields of `/proc/PID/status` that Pagefold uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// The second number of `Uid:`: the effective user.
    pub uid: Reading<u32>,
    /// `Seccomp:`: 0 none, 1 strict, 2 filter.
    pub seccomp: Reading<u64>,
    /// `VmPin:`: memory that drivers hold pinned. A process without memory does not have the line.
    pub pinned: Reading<Bytes>,
    /// `Threads:`.
    pub threads: Reading<u64>,
}

/// `/proc/PID/status`.
pub fn status(bytes: &[u8]) -> Status {
    let effective = |ids: &[u8]| {
        let second = ids.split(u8::is_ascii_whitespace).filter(|id| !id.is_empty()).nth(1);
        second.ok_or_else(|| malformed("no effective user", ids)).and_then(number)
    };
    Status {
        uid: field(bytes, "Uid").and_then(effective),
        seccomp: field(bytes, "Seccomp").and_then(number),
        pinned: field(bytes, "VmPin").and_then(kib),
        threads: field(bytes, "Threads").and_then(number),
    }
}

/// The arguments in `/proc/PID/cmdline`; none for a kernel thread or a zombie. Empty ones at the end are left out: a
/// program that puts a title over its arguments leaves hundreds of them.
pub fn arguments(bytes: &[u8]) -> Vec<String> {
    let end = bytes.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
    if end == 0 {
        return Vec::new();
    }
    bytes[..end].split(|&byte| byte == 0).map(|argument| String::from_utf8_lossy(argument).into_owned()).collect()
}

/// The [`JOB_VARIABLES`] in `/proc/PID/environ`. Of a variable that is there twice the first counts, as for `getenv`;
/// one that was cut off is left out.
pub fn job_environment(bytes: &[u8]) -> BTreeMap<String, String> {
    let mut environment = BTreeMap::new();
    for entry in bytes.split_inclusive(|&byte| byte == 0).filter_map(|entry| entry.strip_suffix(b"\0")) {
        let Some(equals) = entry.iter().position(|&byte| byte == b'=') else { continue };
        if let Some(name) = JOB_VARIABLES.iter().find(|name| name.as_bytes() == &entry[..equals]) {
            let value = String::from_utf8_lossy(&entry[equals + 1..]).into_owned();
            environment.entry((*name).to_owned()).or_insert(value);
        }
    }
    environment
}

/// The cgroup whose memory a process counts to, from `/proc/PID/cgroup`: where a v1 hierarchy has the memory
/// controller, the path in it, otherwise the path in the unified hierarchy (`0::`). The ` (deleted)` after the path of
/// a removed cgroup stays.
pub fn cgroup(bytes: &[u8]) -> Reading<String> {
    let mut unified = Err(Absent::NotOnThisKernel);
    for line in lines(bytes) {
        let line = line?;
        // The path may hold colons, the others may not.
        let mut parts = line.splitn(3, |&byte| byte == b':');
        let (Some(id), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
            return Err(malformed("not a line of cgroup", line));
        };
        if controllers.split(|&byte| byte == b',').any(|controller| controller == b"memory") {
            return Ok(String::from_utf8_lossy(path).into_owned());
        }
        if id == b"0" && controllers.is_empty() {
            unified = Ok(String::from_utf8_lossy(path).into_owned());
        }
    }
    unified
}
