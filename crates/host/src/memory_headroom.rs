//! How much memory is left under every limit that applies to given cgroups, and how short memory is there.
//! [`pagefold_base::guard`] decides by these figures.
//!
//! The memory controller is looked up where distributions mount it: `/sys/fs/cgroup/memory` (v1), `/sys/fs/cgroup`
//! (v2), or `/sys/fs/cgroup/unified` beside v1 hierarchies without it. Each cgroup is read with all its ancestors,
//! because their limits apply to it too.
//!
//! The paths of cgroups and the root of the mount are both relative to the cgroup namespace of this process
//! (kernel/cgroup/cgroup.c, `cgroup_show_path`, 6.18). If the mount shows another cgroup than `/`, no path resolves and
//! all limits are unknown. This happens in a container that has joined the host's namespace but kept its own mount.
//!
//! Limits: from within a cgroup namespace, cgroups outside of it cannot be found. A cgroup that cannot be found or read
//! is reported as unknown. The three files of a cgroup are read one after the other, so they may not match exactly.

use crate::{Host, observe, parse};
use pagefold_base::guard::{LimitKind, LimitScope, MemoryHeadroom, MemoryLimit, reserve};
use pagefold_base::memory::Shortage;
use pagefold_base::{Absent, Bytes, Reading};
use std::collections::{BTreeMap, BTreeSet};

/// The headroom of the host and of these cgroups, each given as in `/proc/PID/cgroup`.
pub fn measure_headroom(host: &dyn Host, cgroups: &BTreeSet<String>) -> MemoryHeadroom {
    let mut measured = MemoryHeadroom::default();
    let memory = observe::memory(host);
    let swap_headroom = memory.as_ref().ok().and_then(|memory| memory.swap_free.clone().ok()).unwrap_or(Bytes::ZERO);
    let limit = memory.and_then(|memory| {
        let min_free: u64 = parse::number(&host.read("proc/sys/vm/min_free_kbytes")?)?;
        let (available, reserved) = (memory.available?, reserve(memory.total?, Bytes::from_kib(min_free)));
        let headroom = available.saturating_sub(reserved);
        Ok(MemoryLimit {
            scope: LimitScope::Host,
            kind: LimitKind::Available,
            limit: available,
            headroom,
            swap_headroom,
        })
    });
    match limit {
        Ok(limit) => measured.limits.push(limit),
        Err(why) => measured.unreadable.push((LimitScope::Host, why)),
    }
    let Some(hierarchy) = (!cgroups.is_empty()).then(|| MemoryHierarchy::find(host, swap_headroom)) else {
        return measured;
    };
    for path in cgroups.iter().flat_map(|path| with_ancestors(path)).collect::<BTreeSet<&str>>() {
        let scope = LimitScope::Cgroup(path.to_owned());
        match hierarchy.as_ref().map_err(Absent::clone).and_then(|hierarchy| hierarchy.read_limits(path)) {
            Ok(limits) => measured.limits.extend(limits.into_iter().map(|(kind, limit, headroom, swap_headroom)| {
                MemoryLimit { scope: scope.clone(), kind, limit, headroom, swap_headroom }
            })),
            Err(why) => measured.unreadable.push((scope, why)),
        }
    }
    measured
}

/// How short memory is in these cgroups. Unreadable figures do not count as short; the guard decides about changes that
/// take memory.
///
/// A task that waits because of an ancestor's limit also counts in the cgroup's own pressure, so only that is read. v1
/// has no pressure file.
pub fn cgroup_shortages(host: &dyn Host, cgroups: &BTreeSet<String>) -> BTreeMap<String, Shortage> {
    let headroom = measure_headroom(host, cgroups);
    let hierarchy = MemoryHierarchy::find(host, Bytes::ZERO).ok().filter(|hierarchy| !hierarchy.is_v1);
    let shortage = |cgroup: &String| {
        let pressure = hierarchy.as_ref().and_then(|hierarchy| hierarchy.read(cgroup, "memory.pressure").ok());
        let pressure_percent = pressure.and_then(|bytes| parse::pressure_some(&bytes).ok()).map(|some| some.avg10);
        let limits = headroom
            .limits
            .iter()
            .filter(|limit| limit.scope != LimitScope::Host && limit.scope.contains_cgroup(cgroup));
        (cgroup.clone(), Shortage::for_cgroup(pressure_percent, limits.map(|limit| (limit.headroom, limit.limit))))
    };
    cgroups.iter().map(shortage).collect()
}

/// Whether memory is short on the host or in this cgroup. Memory is short if tasks wait at least this percentage of
/// time.
pub fn is_memory_short(host: &dyn Host, cgroup: Option<&str>, pressure_threshold_percent: f64) -> bool {
    let is_cgroup_short = |cgroup: &str| {
        cgroup_shortages(host, &BTreeSet::from([cgroup.to_owned()]))
            .values()
            .any(|s| s.is_short(pressure_threshold_percent))
    };
    observe::shortage(host).is_short(pressure_threshold_percent) || cgroup.is_some_and(is_cgroup_short)
}

/// A path and all its ancestors, including the root.
fn with_ancestors(path: &str) -> impl Iterator<Item = &str> {
    let path = path.trim_end_matches('/');
    let ancestors = path.match_indices('/').skip(1).map(|(end, _)| &path[..end]);
    ["/"].into_iter().chain(ancestors).chain((!path.is_empty()).then_some(path))
}

/// Why the limits of a cgroup like `/../other` are unknown.
pub const OUTSIDE_CGROUP_NAMESPACE: &str = "it is outside the cgroup namespace of this process: \
                           run pagefold in the namespace of the host's process 1, or with hostPID, CAP_SYS_ADMIN \
                           and CAP_SYS_PTRACE";

/// The cgroups of running processes whose limits cannot be read, with the reason. Their merged pages cannot be
/// unmerged.
pub fn unreadable_limits(host: &dyn Host) -> Vec<(LimitScope, Absent)> {
    let cgroup = |pid| host.open(pid).and_then(|handle| parse::cgroup(&handle.read("cgroup")?)).ok();
    let cgroups = host.pids().into_iter().flatten().filter_map(cgroup).collect();
    measure_headroom(host, &cgroups).unreadable
}

/// The cgroup hierarchy of the memory controller.
struct MemoryHierarchy<'h> {
    host: &'h dyn Host,
    mount_path: &'static str,
    is_v1: bool,
    /// `SwapFree`.
    free_swap: Bytes,
}

/// The kind of a limit, its value, the headroom below it, and the swap beyond it.
type LimitReading = (LimitKind, Bytes, Bytes, Bytes);

impl<'h> MemoryHierarchy<'h> {
    fn find(host: &'h dyn Host, swap: Bytes) -> Reading<Self> {
        let hierarchy = Self::find_mounted(host, swap)?;
        let mounts = host.read("proc/self/mountinfo").unwrap_or_default();
        match parse::mount_root(&String::from_utf8_lossy(&mounts), &format!("/{}", hierarchy.mount_path)) {
            None | Some("/") => Ok(hierarchy),
            Some(root) => Err(Absent::Malformed(format!(
                "/{} shows only the cgroups below {root} and not the host's: mount the host's /sys/fs/cgroup there, \
                 and run pagefold with hostPID, CAP_SYS_ADMIN and CAP_SYS_PTRACE",
                hierarchy.mount_path
            ))),
        }
    }

    fn find_mounted(host: &'h dyn Host, swap: Bytes) -> Reading<Self> {
        let hierarchy = |top, is_v1| Self { host, mount_path: top, is_v1, free_swap: swap };
        if host.read("sys/fs/cgroup/memory/memory.limit_in_bytes").is_ok() {
            return Ok(hierarchy("sys/fs/cgroup/memory", true));
        }
        for top in ["sys/fs/cgroup", "sys/fs/cgroup/unified"] {
            if host.read(&format!("{top}/cgroup.controllers")).is_ok() {
                return Ok(hierarchy(top, false));
            }
        }
        Err(Absent::Malformed("no hierarchy of the memory controller below /sys/fs/cgroup".to_owned()))
    }

    fn read(&self, path: &str, file: &str) -> Reading<Vec<u8>> {
        let path = path.trim_matches('/');
        let directory = if path.is_empty() { String::new() } else { format!("{path}/") };
        self.host.read(&format!("{}/{directory}{file}", self.mount_path))
    }

    fn read_bytes(&self, path: &str, file: &str) -> Reading<Bytes> {
        self.read(path, file).and_then(|bytes| parse::number(&bytes)).map(Bytes)
    }

    /// A limit; `None` if there is none. The root of v2 and cgroups without the controller have no such file.
    fn read_limit(&self, path: &str, file: &str) -> Reading<Option<Bytes>> {
        match self.read(path, file) {
            Err(Absent::NotOnThisKernel) => self.read(path, "cgroup.procs").map(|_| None),
            bytes => parse::cgroup_limit(&bytes?),
        }
    }

    fn read_limits(&self, path: &str) -> Reading<Vec<LimitReading>> {
        if path.split('/').any(|part| part == "..") {
            return Err(Absent::Malformed(OUTSIDE_CGROUP_NAMESPACE.to_owned()));
        }
        let (files, usage): (&[(LimitKind, &str)], _) = if self.is_v1 {
            (&[(LimitKind::Max, "memory.limit_in_bytes")], "memory.usage_in_bytes")
        } else {
            (&[(LimitKind::Max, "memory.max"), (LimitKind::High, "memory.high")], "memory.current")
        };
        let mut limits = BTreeMap::new();
        for &(kind, file) in files {
            if let Some(limit) = self.read_limit(path, file)? {
                limits.insert(kind.kernel_name(), (kind, limit, usage));
            }
        }
        if self.is_v1
            && let Some(limit) = self.read_limit(path, "memory.memsw.limit_in_bytes")?
        {
            limits.insert("memsw", (LimitKind::MemoryAndSwap, limit, "memory.memsw.usage_in_bytes"));
        }
        if limits.is_empty() {
            return Ok(Vec::new());
        }
        let free = parse::cgroup_reclaimable(&self.read(path, "memory.stat")?, self.is_v1)?;
        let swap = self.swap_headroom(path)?;
        let to_reading = |(kind, limit, usage): (LimitKind, Bytes, &str)| {
            let used = self.read_bytes(path, usage)?.saturating_sub(free);
            let swap = if kind == LimitKind::MemoryAndSwap { Bytes::ZERO } else { swap };
            Ok((kind, limit, limit.saturating_sub(used), swap))
        };
        limits.into_values().map(to_reading).collect()
    }

    /// How much a cgroup may still swap out. Under v1 a separate limit applies, see [`LimitKind::MemoryAndSwap`].
    fn swap_headroom(&self, path: &str) -> Reading<Bytes> {
        if self.is_v1 {
            return Ok(self.free_swap);
        }
        match self.read_limit(path, "memory.swap.max")? {
            Some(limit) => Ok(limit.saturating_sub(self.read_bytes(path, "memory.swap.current")?).min(self.free_swap)),
            None => Ok(self.free_swap),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_host::FakeHost;

    const MIB: u64 = 1 << 20;

    /// A host with the given files.
    fn host(files: &[(&str, &str)]) -> FakeHost {
        let host = FakeHost::booted();
        host.put_file("proc/meminfo", "MemTotal: 102400 kB\nMemAvailable: 51200 kB\nSwapFree: 1024 kB\n");
        host.put_file("proc/sys/vm/min_free_kbytes", "1024\n");
        for (path, text) in files {
            host.put_file(path, text);
        }
        host
    }

    fn headroom_of_cgroup(files: &[(&str, &str)], cgroup: &str) -> MemoryHeadroom {
        measure_headroom(&host(files), &BTreeSet::from([cgroup.to_owned()]))
    }

    fn limit_summaries(room: &MemoryHeadroom) -> Vec<(String, &'static str, u64, u64)> {
        room.limits
            .iter()
            .map(|l| (l.scope.to_string(), l.kind.kernel_name(), l.headroom.0 / 1024, l.swap_headroom.0 / 1024))
            .collect()
    }

    #[test]
    fn ancestors_include_the_root() {
        let above = |path| with_ancestors(path).collect::<Vec<_>>();
        assert_eq!(above("/"), ["/"]);
        assert_eq!(above("/a"), ["/", "/a"]);
        assert_eq!(above("/a/b/c"), ["/", "/a", "/a/b", "/a/b/c"]);
    }

    #[test]
    fn limits_of_v2_ancestors_are_read() {
        let files = [
            ("sys/fs/cgroup/cgroup.controllers", "memory\n"),
            ("sys/fs/cgroup/cgroup.procs", ""),
            ("sys/fs/cgroup/a/memory.max", "20971520\n"),
            ("sys/fs/cgroup/a/memory.high", "max\n"),
            ("sys/fs/cgroup/a/memory.current", "10485760\n"),
            ("sys/fs/cgroup/a/memory.stat", "inactive_file 2097152\nfile_dirty 1048576\n"),
            ("sys/fs/cgroup/a/memory.swap.max", "524288\n"),
            ("sys/fs/cgroup/a/memory.swap.current", "0\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/b/memory.high", "4194304\n"),
            ("sys/fs/cgroup/a/b/memory.current", "5242880\n"),
            ("sys/fs/cgroup/a/b/memory.stat", "inactive_file 0\n"),
            ("sys/fs/cgroup/a/b/memory.swap.max", "max\n"),
        ];
        let room = headroom_of_cgroup(&files, "/a/b");
        assert_eq!(room.unreadable, []);
        assert_eq!(
            limit_summaries(&room),
            [
                // 50 MiB minus 1 MiB and a hundredth of 100 MiB.
                ("this host".to_owned(), "MemAvailable", 48 * 1024, 1024),
                ("/a".to_owned(), "memory.max", 11 * 1024, 512),
                ("/a/b".to_owned(), "memory.high", 0, 1024),
            ]
        );
    }

    #[test]
    fn memsw_limit_of_v1_counts_swap() {
        let files = [
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/cgroup.procs", ""),
            ("sys/fs/cgroup/memory/memory.memsw.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "8388608\n"),
            ("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "6291456\n"),
            ("sys/fs/cgroup/memory/a/memory.memsw.limit_in_bytes", "9437184\n"),
            ("sys/fs/cgroup/memory/a/memory.memsw.usage_in_bytes", "6291456\n"),
            ("sys/fs/cgroup/memory/a/memory.stat", "total_inactive_file 1048576\n"),
        ];
        let room = headroom_of_cgroup(&files, "/a");
        assert_eq!(
            limit_summaries(&room)[1..],
            [("/a".to_owned(), "memory.max", 3 * 1024, 1024), ("/a".to_owned(), "memory.memsw", 4 * 1024, 0)]
        );
    }

    #[test]
    fn memory_shortage_by_pressure_or_ancestor_limit() {
        let short = |files: &[(&str, &str)], cgroup: &str| is_memory_short(&host(files), Some(cgroup), 10.0);
        let pressure = |avg10: &str| format!("some avg10={avg10} avg60=0.00 avg300=0.00 total=1\n");
        let (calm, high) = (pressure("9.99"), pressure("10.00"));
        let v2 = |current: &'static str, pressure| {
            [
                ("sys/fs/cgroup/cgroup.controllers", "memory\n"),
                ("sys/fs/cgroup/cgroup.procs", ""),
                ("sys/fs/cgroup/a/memory.max", "20971520\n"),
                ("sys/fs/cgroup/a/memory.high", "max\n"),
                ("sys/fs/cgroup/a/memory.current", current),
                ("sys/fs/cgroup/a/memory.stat", "inactive_file 1048576\n"),
                ("sys/fs/cgroup/a/memory.swap.max", "0\n"),
                ("sys/fs/cgroup/a/memory.swap.current", "0\n"),
                ("sys/fs/cgroup/a/b/cgroup.procs", ""),
                ("sys/fs/cgroup/a/b/memory.pressure", pressure),
            ]
        };
        assert!(!short(&v2("10485760\n", &calm), "/a/b") && short(&v2("10485760\n", &high), "/a/b"));
        assert!(!short(&v2("20971520\n", &calm), "/a/b"), "reclaimable memory counts as free: a twentieth is left");
        assert!(short(&v2("20971521\n", &calm), "/a/b") && short(&v2("20971521\n", &calm), "/a"));
        assert!(!short(&v2("20971521\n", &high), "/"), "other cgroups are not short");
        let v1 = |usage: &'static str| {
            [
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
                ("sys/fs/cgroup/memory/cgroup.procs", ""),
                ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "8388608\n"),
                ("sys/fs/cgroup/memory/a/memory.usage_in_bytes", usage),
                ("sys/fs/cgroup/memory/a/memory.stat", "total_inactive_file 0\n"),
                ("sys/fs/cgroup/memory/a/cgroup.procs", ""),
                ("sys/fs/cgroup/memory/a/b/cgroup.procs", ""),
                ("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "9223372036854771712\n"),
            ]
        };
        assert!(short(&v1("8000000\n"), "/a/b") && !short(&v1("4000000\n"), "/a/b"));
        let both = format!("{high}{}", high.replace("some", "full"));
        assert!(short(&[("proc/pressure/memory", &both)], "/a"), "the whole host is short");
        assert!(!short(&[], "/a"), "an unreadable figure does not count as short");
        let little = ("proc/meminfo", "MemTotal: 102400 kB\nMemAvailable: 5119 kB\nSwapFree: 0 kB\n");
        assert!(short(&[little], "/a"), "without pressure figures, free memory counts");
    }

    #[test]
    fn limits_are_unknown_under_a_private_cgroup_mount() {
        let mounts = |root: &str| {
            format!(
                "31 23 0:28 / /sys rw - sysfs sysfs rw\n32 31 0:29 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
                 41 31 0:38 {root} /sys/fs/cgroup ro,nosuid shared:9 - cgroup2 cgroup rw\n"
            )
        };
        let judged = |root: &str| {
            let files = [
                ("proc/self/mountinfo", &*mounts(root)),
                ("sys/fs/cgroup/cgroup.controllers", "memory\n"),
                ("sys/fs/cgroup/cgroup.procs", ""),
                ("sys/fs/cgroup/memory.max", "1048576\n"),
                ("sys/fs/cgroup/memory.current", "1048576\n"),
                ("sys/fs/cgroup/memory.stat", "inactive_file 0\n"),
                ("sys/fs/cgroup/memory.swap.max", "0\n"),
                ("sys/fs/cgroup/memory.swap.current", "0\n"),
            ];
            let host = host(&files);
            (measure_headroom(&host, &BTreeSet::from(["/".to_owned()])), is_memory_short(&host, Some("/"), 10.0))
        };
        let (host, short) = judged("/");
        assert_eq!((host.unreadable.len(), host.limits.len(), short), (0, 2, true));
        for root in ["/system.slice/docker-4c01db0b339c.scope", "/../.."] {
            let (container, short) = judged(root);
            assert_eq!((container.unreadable.len(), container.limits.len(), short), (1, 1, false), "{container:?}");
            let why = container.unreadable[0].1.to_string();
            assert!(
                why.contains(&format!("below {root} ")) && why.contains("mount the host's /sys/fs/cgroup"),
                "{why}"
            );
        }
    }

    #[test]
    fn unreadable_limits_are_unknown_not_unlimited() {
        let places =
            |room: MemoryHeadroom| room.unreadable.into_iter().map(|(place, _)| place.to_string()).collect::<Vec<_>>();
        assert_eq!(places(headroom_of_cgroup(&[], "/a")), ["/", "/a"]);
        let top = ("sys/fs/cgroup/cgroup.controllers", "memory\n");
        let root = ("sys/fs/cgroup/cgroup.procs", "");
        assert_eq!(places(headroom_of_cgroup(&[top, root], "/gone")), ["/gone"]);
        let outside = headroom_of_cgroup(&[top, root], "/../other");
        assert!(
            outside.unreadable.iter().all(|(_, why)| why.to_string().ends_with(OUTSIDE_CGROUP_NAMESPACE)),
            "{outside:?}"
        );
        assert_eq!(outside.unreadable.len(), 2);
        assert_eq!(places(outside), ["/..", "/../other"]);
        let garbage = [top, root, ("sys/fs/cgroup/a/memory.max", "much\n")];
        assert_eq!(places(headroom_of_cgroup(&garbage, "/a")), ["/a"]);
        let no_usage = [top, root, ("sys/fs/cgroup/a/memory.max", "1048576\n"), ("sys/fs/cgroup/a/cgroup.procs", "")];
        assert_eq!(places(headroom_of_cgroup(&no_usage, "/a")), ["/a"]);
        assert_eq!(headroom_of_cgroup(&[], "/a").limits[0].headroom, Bytes(48 * MIB));
    }
}
