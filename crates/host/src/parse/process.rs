//! The files of `/proc/PID` other than its memory: `stat`, `statm` and `status` (fs/proc/array.c), `cmdline`,
//! `environ` and `auxv` (fs/proc/base.c), `numa_maps` (fs/proc/task_mmu.c), `cgroup` (kernel/cgroup/cgroup.c,
//! `proc_cgroup_show`).

use super::text::{field, kib, lines, malformed, number, number_list};
use pagefold_base::identity::JOB_VARIABLES;
use pagefold_base::{Absent, Bytes, IdSet, PageSize, Pages, Pid, Reading};
use std::collections::{BTreeMap, BTreeSet};

/// The flag of a kernel thread in [`Stat::flags`] (include/linux/sched.h).
pub const PF_KTHREAD: u64 = 0x0020_0000;
/// The flag of a thread that has begun to exit; it loses its memory soon afterwards (kernel/exit.c, `do_exit`).
pub const PF_EXITING: u64 = 0x0000_0004;

/// The fields of `/proc/PID/stat` that Pagefold uses (Documentation/filesystems/proc.rst, table 1-4).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stat {
    /// Field 1.
    pub pid: Pid,
    /// Field 2, the kernel's name of the program without its parentheses; bytes that are not UTF-8 are replaced.
    pub comm: String,
    /// Field 3, the letter of the state.
    pub state: char,
    /// Field 4, the parent; 0 if it is not visible.
    pub ppid: Pid,
    /// Field 9, the `PF_` flags.
    pub flags: u64,
    /// Fields 10 and 12, page faults so far, without those of children. Each write to a merged page is one.
    pub page_faults: u64,
    /// Field 14, clock ticks in user mode.
    pub utime: u64,
    /// Field 15, clock ticks in kernel mode.
    pub stime: u64,
    /// Field 22, clock ticks from boot to the start of the process.
    pub start_time: u64,
    /// Field 39, the CPU on which it ran last.
    pub last_cpu: Reading<u32>,
}

/// `/proc/PID/statm` (fs/proc/task_mmu.c, `task_statm`): resident memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Statm {
    /// All resident pages.
    pub resident: Pages,
    /// The resident pages of files and shared memory.
    pub shared: Pages,
}

impl Statm {
    /// Resident memory that is neither a file nor shared memory. The kernel's counters may not match exactly.
    pub fn anonymous_bytes(self, page: PageSize) -> Bytes {
        page.bytes_of(self.resident.saturating_sub(self.shared))
    }
}

/// Parses the second and third number.
pub fn statm(bytes: &[u8]) -> Reading<Statm> {
    let mut words = bytes.split(u8::is_ascii_whitespace).skip(1);
    let mut pages = || number(words.next().unwrap_or_default()).map(Pages);
    Ok(Statm { resident: pages()?, shared: pages()? })
}

/// Parses `/proc/PID/stat`. A program chooses its own name, which may contain spaces, parentheses and newlines. The
/// fields begin after the last parenthesis, because they contain none.
pub fn stat(bytes: &[u8]) -> Reading<Stat> {
    let wrong = || malformed("not a line of stat", bytes);
    let open = bytes.iter().position(|&byte| byte == b'(').ok_or_else(wrong)?;
    let close = bytes.iter().rposition(|&byte| byte == b')').filter(|&close| close > open).ok_or_else(wrong)?;
    let tail = &bytes[close + 1..];
    // Without a newline the line was truncated, perhaps within a number. Then only fields followed by a blank are
    // complete.
    let end = tail.iter().position(|&byte| byte == b'\n').or_else(|| tail.iter().rposition(|&byte| byte == b' '));
    let fields: Vec<&[u8]> = tail[..end.ok_or_else(wrong)?].trim_ascii().split(|&byte| byte == b' ').collect();
    // Numbered as in the documentation, from 1; field 3 is the first one after the name.
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
        page_faults: at(10).and_then(number::<u64>)?.saturating_add(at(12).and_then(number)?),
        utime: at(14).and_then(number)?,
        stime: at(15).and_then(number)?,
        start_time: at(22).and_then(number)?,
        last_cpu: at(39).and_then(number),
    })
}

/// The fields of `/proc/PID/status` that Pagefold uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// The second number of `Uid:`: the effective user.
    pub uid: Reading<u32>,
    /// Whether the real, effective and saved user (the first three numbers of `Uid:`) differ.
    pub setuid: Reading<bool>,
    /// `Seccomp:`: 0 none, 1 strict, 2 filter.
    pub seccomp: Reading<u64>,
    /// `VmPin:`: memory that drivers have pinned. Absent for a process without memory.
    pub pinned: Reading<Bytes>,
    /// `Threads:`.
    pub threads: Reading<u64>,
    /// `RssAnon:`: anonymous memory, including merged pages but not zero pages merged by KSM. Absent for a process
    /// without memory.
    pub rss_anon: Reading<Bytes>,
    /// `Cpus_allowed_list:`: the CPUs on which the thread may run.
    pub allowed_cpus: Reading<IdSet>,
    /// `Mems_allowed_list:`: the nodes from which it may allocate memory.
    pub allowed_nodes: Reading<IdSet>,
}

/// Parses `/proc/PID/status`.
pub fn status(bytes: &[u8]) -> Status {
    let user_id = |ids: &[u8], position: usize, what: &str| {
        let id = ids.split(u8::is_ascii_whitespace).filter(|id| !id.is_empty()).nth(position);
        id.ok_or_else(|| malformed(what, ids)).and_then(number::<u32>)
    };
    let effective = |ids: &[u8]| user_id(ids, 1, "no effective user");
    let setuid = |ids: &[u8]| {
        let (real, saved) = (user_id(ids, 0, "no real user")?, user_id(ids, 2, "no saved user")?);
        Ok([real, saved] != [effective(ids)?; 2])
    };
    let ids = |list: &[u8]| Ok(number_list(list)?.into_iter().collect::<IdSet>());
    Status {
        uid: field(bytes, "Uid").and_then(effective),
        setuid: field(bytes, "Uid").and_then(setuid),
        seccomp: field(bytes, "Seccomp").and_then(number),
        pinned: field(bytes, "VmPin").and_then(kib),
        threads: field(bytes, "Threads").and_then(number),
        rss_anon: field(bytes, "RssAnon").and_then(kib),
        allowed_cpus: field(bytes, "Cpus_allowed_list").and_then(ids),
        allowed_nodes: field(bytes, "Mems_allowed_list").and_then(ids),
    }
}

/// The number of a thread in its own PID namespace, the last one of `NSpid:` in its `status` (fs/proc/array.c,
/// `task_state`).
///
/// # Errors
/// `NotOnThisKernel` without namespaces of PIDs; `Malformed` if it is no number.
pub fn innermost_pid(bytes: &[u8]) -> Reading<Pid> {
    let numbers = field(bytes, "NSpid")?;
    let last = numbers.split(u8::is_ascii_whitespace).rfind(|number| !number.is_empty());
    number(last.unwrap_or_default()).map(Pid)
}

/// How often a thread has given up its CPU: because it waited for something (`voluntary_ctxt_switches:`), and because
/// another thread got the CPU (`nonvoluntary_ctxt_switches:`), from its `status` (fs/proc/array.c,
/// `task_context_switch_counts`).
pub fn context_switches(bytes: &[u8]) -> Reading<(u64, u64)> {
    let count = |name| field(bytes, name).and_then(number);
    Ok((count("voluntary_ctxt_switches")?, count("nonvoluntary_ctxt_switches")?))
}

/// The nodes that the memory of a process is bound to. The bindings come from policies (`bind`, set_mempolicy(2) and
/// mbind(2)) in `/proc/PID/numa_maps`, or from its cpuset (`Mems_allowed_list:` of its `status`, cpuset(7)). `None` if
/// neither excludes any of `nodes`, the nodes with memory. Other policies prefer a node and do not bind to it.
///
/// Several policies are joined: `0 and 1`. A line of `numa_maps` is `ADDRESS POLICY ...` (fs/proc/task_mmu.c,
/// `show_numa_map`), and a policy `bind:0-1` or `bind=static:0-1` (mm/mempolicy.c, `mpol_to_str`).
pub fn bound_nodes(numa_maps: &[u8], status: &[u8], nodes: &[u32]) -> Option<String> {
    let binds = |list: &&[u8]| number_list(list).is_ok_and(|list| !nodes.iter().all(|node| list.contains(node)));
    let policies = numa_maps.split(|&byte| byte == b'\n').filter_map(|line| line.split(u8::is_ascii_whitespace).nth(1));
    let lists = policies.filter(|policy| policy.starts_with(b"bind")).filter_map(|policy| {
        let colon = policy.iter().position(|&byte| byte == b':')?;
        Some(&policy[colon + 1..])
    });
    let lists: BTreeSet<&[u8]> = lists.filter(binds).collect();
    let text = |list: &[u8]| String::from_utf8_lossy(list).into_owned();
    if !lists.is_empty() {
        return Some(lists.into_iter().map(text).collect::<Vec<_>>().join(" and "));
    }
    let allowed = field(status, "Mems_allowed_list").ok()?;
    Some(allowed).filter(binds).map(text)
}

/// The memory policy of each mapping, by its start, from `/proc/PID/numa_maps`: `default`, `prefer:1`, `bind:0-1`. Of a
/// mapping without a policy of its own it is that of the main thread (fs/proc/task_mmu.c, `show_numa_map`).
pub fn memory_policies(numa_maps: &[u8]) -> BTreeMap<u64, String> {
    let policy = |line: &str| {
        let (address, rest) = line.split_once(' ')?;
        let mut words = rest.split(' ');
        let first = words.next()?;
        // Two policies have two words: `prefer (many):0-1` and `weighted interleave:0-1`.
        let second = words.next().filter(|word| word.starts_with("(many)") || word.starts_with("interleave"));
        let policy = second.map_or_else(|| first.to_owned(), |second| format!("{first} {second}"));
        Some((u64::from_str_radix(address, 16).ok()?, policy))
    };
    String::from_utf8_lossy(numa_maps).lines().filter_map(policy).collect()
}

/// The memory of a process on each node that has some, from `/proc/PID/numa_maps` (fs/proc/task_mmu.c, `show_numa_map`):
/// `N1=512` counts pages of the size `kernelpagesize_kB=4`, also for transparent huge pages.
///
/// Anonymous memory counts, and what guest RAM is made of besides it: memfd, shared memory and huge pages of the pool.
/// Other files do not count, for their pages belong to the page cache. Empty for a process without memory, such as one
/// that has ended.
pub fn node_memory(numa_maps: &[u8]) -> Reading<BTreeMap<u32, Bytes>> {
    /// Files that hold memory of a process. `/SYSV` is System V shared memory (ipc/shm.c, `newseg`).
    const MEMORY_FILES: [&str; 4] = ["/memfd:", "/dev/shm/", "/dev/zero", "/SYSV"];
    let mut nodes = BTreeMap::<u32, Bytes>::new();
    for line in String::from_utf8_lossy(numa_maps).lines() {
        let words = || line.split(' ').skip(2);
        let is_file_memory = |path: &str| MEMORY_FILES.iter().any(|start| path.starts_with(start));
        let is_memory = words().all(|word| word.strip_prefix("file=").is_none_or(is_file_memory));
        if !is_memory && !words().any(|word| word == "huge") {
            continue;
        }
        let counts = || words().filter_map(|word| word.strip_prefix('N')?.split_once('='));
        if counts().next().is_none() {
            continue;
        }
        let page_size = words().find_map(|word| word.strip_prefix("kernelpagesize_kB=")?.parse::<u64>().ok());
        let page_size = page_size.and_then(|kibibytes| kibibytes.checked_mul(1 << 10));
        let page_size = page_size.ok_or_else(|| malformed("numa_maps", line.as_bytes()))?;
        for (node, pages) in counts() {
            let parsed = node.parse::<u32>().ok().zip(pages.parse::<u64>().ok());
            let (node, pages) = parsed.ok_or_else(|| malformed("numa_maps", line.as_bytes()))?;
            let bytes = nodes.entry(node).or_default();
            *bytes = Bytes(bytes.0.saturating_add(pages.saturating_mul(page_size)));
        }
    }
    Ok(nodes)
}

/// Whether the program was started with more privileges than its caller (`AT_SECURE` in `/proc/PID/auxv`,
/// getauxval(3)): setuid, setgid or with file capabilities. `None` if the file does not contain it.
///
/// The file has pairs of words, 4 bytes each for a 32-bit program (fs/binfmt_elf.c, `create_elf_tables`), and ends with
/// `AT_NULL`.
pub fn is_at_secure(auxv: &[u8]) -> Option<bool> {
    const AT_SECURE: u64 = 23;
    // Two 32-bit words read as one 64-bit word are far above all keys.
    let word = match auxv.first_chunk::<8>() {
        Some(first) if u64::from_ne_bytes(*first) >> 32 == 0 => 8,
        _ => 4,
    };
    let number = |bytes: &[u8]| match bytes.try_into() {
        Ok(bytes) => u64::from_ne_bytes(bytes),
        Err(_) => bytes.try_into().map_or(0, |bytes| u64::from(u32::from_ne_bytes(bytes))),
    };
    let pairs = auxv.chunks_exact(2 * word).map(|pair| (number(&pair[..word]), number(&pair[word..])));
    pairs.take_while(|(key, _)| *key != 0).find(|(key, _)| *key == AT_SECURE).map(|(_, value)| value != 0)
}

/// The arguments in `/proc/PID/cmdline`; none for a kernel thread or a zombie. Empty ones at the end are dropped,
/// because a program that overwrites its arguments with a title leaves hundreds of them.
pub fn arguments(bytes: &[u8]) -> Vec<String> {
    let end = bytes.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
    if end == 0 {
        return Vec::new();
    }
    bytes[..end].split(|&byte| byte == 0).map(|argument| String::from_utf8_lossy(argument).into_owned()).collect()
}

/// The [`JOB_VARIABLES`] in `/proc/PID/environ`. The first of several equal names counts, as for `getenv`; a truncated
/// variable is left out.
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

/// The cgroup that a process's memory is charged to, from `/proc/PID/cgroup`. If a v1 hierarchy has the memory
/// controller, this is the path in it, otherwise the path in the unified hierarchy (`0::`). The ` (deleted)` after the
/// path of a removed cgroup stays.
pub fn cgroup(bytes: &[u8]) -> Reading<String> {
    let mut unified = Err(Absent::NotOnThisKernel);
    for line in lines(bytes) {
        let line = line?;
        // The path may contain colons, the other fields may not.
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STAT_SAMPLE: &[u8] = include_bytes!("samples/stat");

    fn is_malformed<T>(reading: &Reading<T>) -> bool {
        matches!(reading, Err(Absent::Malformed(_)))
    }

    #[test]
    fn statm_fields_are_parsed() {
        let found = statm(b"900 500 20 1 0 60 0\n").unwrap();
        assert_eq!(found, Statm { resident: Pages(500), shared: Pages(20) });
        let page = PageSize::new(4096).unwrap();
        assert_eq!(found.anonymous_bytes(page), Bytes(480 * 4096));
        assert_eq!(Statm { shared: Pages(501), ..found }.anonymous_bytes(page), Bytes::ZERO);
        for bad in [&b""[..], b"900 500", b"900 500 much 1", b"900  20 1"] {
            assert!(statm(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn stat_with_parentheses_in_comm_is_parsed() {
        let expected = Stat {
            pid: Pid(12289),
            comm: "a) (b\\ \n\u{fffd}c".into(),
            state: 'S',
            ppid: Pid(12281),
            flags: 4_194_304,
            page_faults: 3255,
            utime: 4,
            stime: 3,
            start_time: 206_924,
            last_cpu: Ok(1),
        };
        assert_eq!(stat(STAT_SAMPLE), Ok(expected));
        let anonymous = Ok(Bytes(10_571_776));
        let (uid, setuid, pinned) = (Ok(0), Ok(false), Ok(Bytes::ZERO));
        let (allowed_cpus, allowed_nodes) = (Ok([0, 1].into_iter().collect()), Ok([0].into_iter().collect()));
        let expected = Status {
            uid,
            setuid,
            seccomp: Ok(0),
            pinned,
            threads: Ok(1),
            rss_anon: anonymous,
            allowed_cpus,
            allowed_nodes,
        };
        assert_eq!(status(include_bytes!("samples/status")), expected);
    }

    #[test]
    fn context_switches_are_parsed() {
        let found = context_switches(b"Name:\ta\nvoluntary_ctxt_switches:\t12\nnonvoluntary_ctxt_switches:\t3\n");
        assert_eq!(found, Ok((12, 3)));
        assert_eq!(context_switches(b"voluntary_ctxt_switches:\t12\n"), Err(Absent::NotOnThisKernel));
        assert!(is_malformed(&context_switches(b"voluntary_ctxt_switches:\t12\nnonvoluntary_ctxt_switches:\t3")));
    }

    #[test]
    fn kernel_thread_flag_is_parsed() {
        let text = "2 (kthreadd) S 0 0 0 0 -1 2129984 0 0 0 0 0 12 0 0 20 0 2 0 7 0 0 18446744073709551615 0 0 0 0\n";
        let thread = stat(text.as_bytes()).unwrap();
        assert_eq!((thread.comm.as_str(), thread.stime, thread.start_time), ("kthreadd", 12, 7));
        assert!(thread.flags & PF_KTHREAD != 0);
        assert!(stat(STAT_SAMPLE).unwrap().flags & PF_KTHREAD == 0);
    }

    #[test]
    fn truncated_stat_is_malformed_or_equal() {
        let whole = stat(STAT_SAMPLE);
        let start = STAT_SAMPLE.windows(8).position(|window| window == b" 206924 ").unwrap();
        for length in 0..=STAT_SAMPLE.len() {
            // The last field that is read is absent from a line that ends before it.
            let with_cpu = |stat| Stat { last_cpu: Ok(1), ..stat };
            let cut = stat(&STAT_SAMPLE[..length]).map(with_cpu);
            assert_eq!(cut == whole, length >= start + 8, "cut at {length}: {cut:?}");
            assert!(cut == whole || is_malformed(&cut));
        }
    }

    #[test]
    fn invalid_stat_lines_are_malformed() {
        for text in [
            "",
            "\n",
            "1 init S 0 0\n",
            ")1 (\n",
            "1 (a) S 0\n",
            "x (a) S 0 0 0 0 0 0 0 0 0 0 1 1 0 0 0 0 0 0 5 0\n",
            "1 (a) SS 0 0 0 0 0 0 0 0 0 0 1 1 0 0 0 0 0 0 5 0\n",
            "4294967296 (a) S 0 0 0 0 0 0 0 0 0 0 1 1 0 0 0 0 0 0 5 0\n",
            "1 (a) S 0 0 0 0 0 0 0 0 0 0 1 1 0 0 0 0 0 0 18446744073709551616 0\n",
            "1 (a) S 0 0 0 0 0 0 0 0 0 0 1 1 0 0 0 0 0 0\n5 0",
        ] {
            assert!(is_malformed(&stat(text.as_bytes())), "{text:?}");
        }
    }

    #[test]
    fn status_without_memory_fields_is_parsed() {
        let thread = status(b"Name:\tkthreadd\nUid:\t0\t1000\t0\t0\nThreads:\t1\nSeccomp:\t2\n");
        assert_eq!((thread.uid, thread.seccomp), (Ok(1000), Ok(2)));
        assert_eq!(thread.setuid, Ok(true));
        assert_eq!(status(b"Uid:\t7\t7\t0\t7\n").setuid, Ok(true), "the process may become root again");
        assert_eq!(status(b"Uid:\t7\t7\t7\t0\n").setuid, Ok(false));
        assert_eq!(thread.pinned, Err(Absent::NotOnThisKernel));
        let odd = status(b"Uid:\t0\nSeccomp:\t\nVmPin:\t  7 MB\nThreads:\t1");
        assert!(is_malformed(&odd.uid) && is_malformed(&odd.seccomp));
        assert!(odd.setuid.is_err() && status(b"Uid:\t0\t0\n").setuid.is_err());
        assert!(is_malformed(&odd.pinned) && is_malformed(&odd.threads));
    }

    #[test]
    fn number_in_the_innermost_namespace_is_the_last_one() {
        assert_eq!(innermost_pid(b"Tgid:\t1\nNSpid:\t4711\t12\t3\nNSsid:\t9\n"), Ok(Pid(3)));
        assert_eq!(innermost_pid(b"NSpid:\t4711\n"), Ok(Pid(4711)));
        assert_eq!(innermost_pid(b"Tgid:\t1\n"), Err(Absent::NotOnThisKernel));
        assert!(is_malformed(&innermost_pid(b"NSpid:\t\n")) && is_malformed(&innermost_pid(b"NSpid:\t1 x\n")));
    }

    #[test]
    fn memory_policies_and_cpusets_bind_to_nodes() {
        let check = |numa_maps: &str, allowed: &str, expected: Option<&str>| {
            let status = format!("Name:\ta\nMems_allowed:\t3\nMems_allowed_list:\t{allowed}\n");
            let found = bound_nodes(numa_maps.as_bytes(), status.as_bytes(), &[0, 1]);
            assert_eq!(found.as_deref(), expected, "{numa_maps:?} {allowed}");
        };
        let default = "7f00 default file=/usr/bin/a mapped=2 N0=1 N1=1 kernelpagesize_kB=4\n";
        check(default, "0-1", None);
        check(default, "0", Some("0"));
        check("", "1", Some("1"));
        check(&format!("{default}7f10 bind:0 anon=8 dirty=8 N0=8\n"), "0-1", Some("0"));
        check("7f00 bind:1 anon=1\n7f10 bind:0 anon=8\n7f20 bind=static:1 anon=1\n", "0-1", Some("0 and 1"));
        check("7f00 bind:0-1 anon=1\n", "0-1", None);
        check("7f00 prefer:1 anon=1\n7f10 prefer (many):1 x\n7f20 interleave:0-1\n7f30 local\n", "0-3", None);
        check("7f00 bind\n7f10\nbind:0\n7f20 bind:x\n", "0-1", None);
        assert_eq!(bound_nodes(b"", b"", &[0, 1]), None);
    }

    #[test]
    fn each_mapping_has_a_memory_policy() {
        let numa_maps = "7f00 default file=/a\n7f10 prefer:1 anon=1\n7f20 prefer (many):0-1 x\nzz bind:1 x\n7f30\n";
        let expected = [(0x7f00, "default"), (0x7f10, "prefer:1"), (0x7f20, "prefer (many):0-1")];
        assert_eq!(memory_policies(numa_maps.as_bytes()), expected.map(|(at, policy)| (at, policy.to_owned())).into());
        assert_eq!(memory_policies(b""), BTreeMap::new());
    }

    #[test]
    fn memory_of_each_node_is_summed_in_bytes() {
        let numa_maps = "55d0 default file=/usr/bin/qemu mapped=9 N0=9 kernelpagesize_kB=4\n\
                         7f00 default anon=3 dirty=3 active=0 N0=1 N3=2 kernelpagesize_kB=4\n\
                         7f10 bind:3 file=/dev/hugepages/x\\040(deleted) huge dirty=2 N3=2 kernelpagesize_kB=2048\n\
                         7f20 prefer (many):0-1 file=/memfd:ram\\040(deleted) mapmax=2 N0=5 kernelpagesize_kB=4\n\
                         7f30 default stack anon=1 N0=1 kernelpagesize_kB=4\n7f40 default\n";
        let expected = BTreeMap::from([(0, Bytes(7 << 12)), (3, Bytes((2 << 12) + (4 << 20)))]);
        assert_eq!(node_memory(numa_maps.as_bytes()), Ok(expected));
        assert_eq!(node_memory(b""), Ok(BTreeMap::new()));
        for malformed in ["7f00 default anon=1 N0=1\n", "7f00 default anon=1 N0=x kernelpagesize_kB=4\n"] {
            assert!(matches!(node_memory(malformed.as_bytes()), Err(Absent::Malformed(_))), "{malformed}");
        }
    }

    #[test]
    fn at_secure_is_read_from_auxv() {
        let wide =
            |pairs: &[[u64; 2]]| -> Vec<u8> { pairs.iter().flatten().flat_map(|word| word.to_ne_bytes()).collect() };
        let narrow =
            |pairs: &[[u32; 2]]| -> Vec<u8> { pairs.iter().flatten().flat_map(|word| word.to_ne_bytes()).collect() };
        assert_eq!(is_at_secure(&wide(&[[33, 1 << 40], [6, 4096], [23, 1], [0, 0]])), Some(true));
        assert_eq!(is_at_secure(&wide(&[[6, 4096], [23, 0], [0, 0]])), Some(false));
        assert_eq!(is_at_secure(&narrow(&[[32, 7], [6, 4096], [23, 1], [0, 0]])), Some(true));
        assert_eq!(is_at_secure(&narrow(&[[6, 4096], [23, 0], [0, 0]])), Some(false));
        assert_eq!(is_at_secure(&narrow(&[[6, 4096], [7, 1], [23, 0], [8, 1], [0, 0]])), Some(false));
        assert_eq!(is_at_secure(&wide(&[[6, 4096], [0, 0], [23, 1]])), None);
        assert_eq!((is_at_secure(b""), is_at_secure(b"abc")), (None, None));
        let own = std::fs::read("/proc/self/auxv").unwrap();
        assert_eq!(is_at_secure(&own), Some(false), "tests must not run setuid");
    }

    #[test]
    fn nul_separated_arguments_are_parsed() {
        let check = |bytes: &[u8], expected: &[&str]| assert_eq!(arguments(bytes), expected, "{bytes:?}");
        check(b"", &[]);
        check(b"\0\0", &[]);
        check(b"qemu\0-name\0a b\0", &["qemu", "-name", "a b"]);
        check(b"sh\0\0-c\0", &["sh", "", "-c"]);
        check(b"nginx: master process\0\0\0\0\0", &["nginx: master process"]);
        check(b"cut\0of", &["cut", "of"]);
        check(b"\xff\0", &["\u{fffd}"]);
    }

    #[test]
    fn job_environment_keeps_only_job_variables() {
        let bytes =
            b"HOME=/root\0SLURM_PROCID=3\0SECRET=x\0=\0PMI_RANK\0SLURM_PROCID=4\0PMIX_NAMESPACE=a=\xffb\0PMI_RANK=1";
        let expected =
            [("PMIX_NAMESPACE", "a=\u{fffd}b"), ("SLURM_PROCID", "3")].map(|(name, value)| (name.into(), value.into()));
        assert_eq!(job_environment(bytes), BTreeMap::from(expected));
    }

    #[test]
    fn memory_cgroup_path_is_found() {
        let check = |text: &str, expected: Reading<&str>| {
            assert_eq!(cgroup(text.as_bytes()).as_deref(), expected.as_ref().copied(), "{text:?}");
        };
        check("0::/user.slice/session-1.scope\n", Ok("/user.slice/session-1.scope"));
        check("0::/a:b::c\n", Ok("/a:b::c"));
        check("0::/gone (deleted)\n", Ok("/gone (deleted)"));
        check("9:name=systemd:/x\n4:memory:/docker/abc\n3:cpuset:/\n0::/\n", Ok("/docker/abc"));
        check("0::/u\n4:hugetlb,memory:/m\n", Ok("/m"));
        check("9:name=memory:/x\n0::/u\n", Ok("/u"));
        check("1:cpu:/\n", Err(Absent::NotOnThisKernel));
        check("", Err(Absent::NotOnThisKernel));
        assert_eq!(cgroup(b"0::/\xff\n").as_deref(), Ok("/\u{fffd}"));
        assert!(is_malformed(&cgroup(b"0::/user.sl")));
        assert!(is_malformed(&cgroup(b"garbage\n")));
        assert!(is_malformed(&cgroup(b"1:cpu\n0::/\n")));
    }

    proptest! {
        #[test]
        fn stat_round_trips(
            (pid, ppid) in any::<(u32, u32)>(),
            comm in "(?s).{0,15}",
            state in "[RSDZTtXI]",
            (flags, utime, stime, start_time) in any::<(u64, u64, u64, u64)>(),
            cpu in any::<u32>(),
        ) {
            let text = format!(
                "{pid} ({comm}) {state} {ppid} 1 1 0 -1 {flags} 9 9 9 9 {utime} {stime} 0 0 20 0 1 0 {start_time}{} {cpu} 0\n",
                " 0".repeat(16)
            );
            let state = state.chars().next().unwrap();
            let expected = Stat { pid: Pid(pid), comm, state, ppid: Pid(ppid), flags, page_faults: 18, utime, stime, start_time, last_cpu: Ok(cpu) };
            prop_assert_eq!(stat(text.as_bytes()), Ok(expected));
        }

        #[test]
        fn cgroup_round_trips(path in "(/[^/\n]{1,12}){1,5}", v1: bool) {
            let text = if v1 { format!("2:cpu:/\n7:memory:{path}\n0::/\n") } else { format!("1:cpu:/no\n0::{path}\n") };
            prop_assert_eq!(cgroup(text.as_bytes()), Ok(path));
        }

        #[test]
        fn arguments_round_trip(arguments in prop::collection::vec("[^\0]{0,8}", 0..6), last in "[^\0]{1,8}") {
            let expected: Vec<String> = arguments.into_iter().chain([last]).collect();
            let text: String = expected.iter().map(|argument| format!("{argument}\0")).collect();
            prop_assert_eq!(super::arguments(text.as_bytes()), expected);
        }

        #[test]
        fn arbitrary_input_does_not_panic(bytes: Vec<u8>) {
            let _ = (is_at_secure(&bytes), bound_nodes(&bytes, &bytes, &[0, 1]));
            let _ = (stat(&bytes), status(&bytes), arguments(&bytes), job_environment(&bytes), cgroup(&bytes));
            let _ = stat(&[b"1 (".as_slice(), &bytes, b") ", &bytes].concat());
        }
    }
}
