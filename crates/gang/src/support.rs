//! Whether the kernel can run the scheduler.

use pagefold_base::Absent;
use pagefold_host::Host;
use thiserror::Error;

/// State of the scheduler class (kernel/sched/ext.c): `disabled`, `enabling`, `enabled`, `disabling`.
const STATE: &str = "sys/kernel/sched_ext/state";
/// The name of the loaded scheduler.
const OPERATIONS: &str = "sys/kernel/sched_ext/root/ops";
/// The types of the kernel, by which the program finds members of its structures.
const TYPES: &str = "sys/kernel/btf/vmlinux";
/// The hierarchy of cgroups.
const CGROUP_ROOT: &str = "sys/fs/cgroup";
/// The kernel's release.
const RELEASE: &str = "proc/sys/kernel/osrelease";

/// Why the scheduler cannot run.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Unsupported {
    /// The kernel has no `sched_ext`.
    #[error(
        "this kernel ({0}) has no sched_ext: it was built without CONFIG_SCHED_CLASS_EXT (Linux 6.12 and later). Boot a \
         kernel with it: `grep SCHED_CLASS_EXT /boot/config-*` prints =y for such a kernel"
    )]
    NoSchedExt(String),
    /// The kernel has no BTF.
    #[error("this kernel ({0}) has no BTF: it was built without CONFIG_DEBUG_INFO_BTF, which the program needs")]
    NoBtf(String),
    /// Another scheduler is loaded, or a second Pagefold.
    #[error("another sched_ext scheduler is loaded ({0}), and the kernel runs one at a time: end it first")]
    OtherScheduler(String),
    /// The state cannot be read.
    #[error("cannot read /{STATE}: {0}")]
    Unreadable(Absent),
    /// Cgroups limit the CPU time of their threads.
    #[error(
        "CPU time is limited for {}, and the kernel does not enforce that for threads of a sched_ext scheduler. Remove \
         the limits, or give --only-sched-ext for the threads of other programs, or --ignore-cpu-limits to accept that",
        describe_limits(.0)
    )]
    CpuLimits(Vec<CpuLimit>),
}

/// A limit of CPU time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuLimit {
    /// The cgroup, by its path below the root of cgroups.
    pub cgroup: String,
    /// `cpu.max` or `cpu.cfs_quota_us`, with its value.
    pub setting: String,
}

/// Limits that a message names.
const NAMED_LIMITS: usize = 3;

fn describe_limits(limits: &[CpuLimit]) -> String {
    let named: Vec<String> =
        limits.iter().take(NAMED_LIMITS).map(|limit| format!("{} ({})", limit.cgroup, limit.setting)).collect();
    let more = limits.len().saturating_sub(NAMED_LIMITS);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    named.join(", ") + &more
}

/// Checks that the scheduler can run on this kernel, and that no other one is loaded.
///
/// # Errors
/// [`Unsupported`], with the remedy.
pub fn check(host: &dyn Host) -> Result<(), Unsupported> {
    let release = || read_line(host, RELEASE).unwrap_or_else(|_| "of an unknown release".to_owned());
    match read_line(host, STATE) {
        Err(Absent::NotOnThisKernel) => return Err(Unsupported::NoSchedExt(release())),
        Err(why) => return Err(Unsupported::Unreadable(why)),
        Ok(state) if state != "disabled" => {
            return Err(Unsupported::OtherScheduler(loaded_scheduler(host).unwrap_or(state)));
        }
        Ok(_) => {}
    }
    match host.file_mode(TYPES) {
        Err(Absent::NotOnThisKernel) => Err(Unsupported::NoBtf(release())),
        _ => Ok(()),
    }
}

/// Checks that no cgroup limits the CPU time of its threads. The class of `sched_ext` leaves such limits to its program,
/// which hears of them by `cgroup_set_bandwidth` (kernel/sched/ext.c, 6.17), and ours has none.
///
/// # Errors
/// [`Unsupported::CpuLimits`].
pub fn check_cpu_limits(host: &dyn Host) -> Result<(), Unsupported> {
    let has_v2 = host.read(&format!("{CGROUP_ROOT}/cgroup.controllers")).is_ok();
    let root = if has_v2 { CGROUP_ROOT.to_owned() } else { format!("{CGROUP_ROOT}/cpu") };
    let mut limits = Vec::new();
    let mut directories = vec![root.clone()];
    while let Some(directory) = directories.pop() {
        // Files cannot be listed; a cgroup may vanish.
        for name in host.list(&directory).unwrap_or_default() {
            let path = format!("{directory}/{name}");
            match name.as_str() {
                "cpu.max" | "cpu.cfs_quota_us" => {
                    let value = read_line(host, &path).unwrap_or_default();
                    if value.split(' ').next().is_some_and(|quota| quota.parse::<u64>().is_ok()) {
                        let cgroup = directory.strip_prefix(&root).unwrap_or_default().to_owned();
                        limits.push(CpuLimit { cgroup, setting: format!("{name} {value}") });
                    }
                }
                _ => directories.push(path),
            }
        }
    }
    limits.sort_by(|left, right| left.cgroup.cmp(&right.cgroup));
    if limits.is_empty() { Ok(()) } else { Err(Unsupported::CpuLimits(limits)) }
}

/// The name of the scheduler that is loaded now, if one is.
pub fn loaded_scheduler(host: &dyn Host) -> Option<String> {
    read_line(host, OPERATIONS).ok().filter(|name| !name.is_empty())
}

fn read_line(host: &dyn Host, path: &str) -> Result<String, Absent> {
    Ok(String::from_utf8_lossy(&host.read(path)?).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_host::fake_host::FakeHost;

    #[test]
    fn kernel_without_sched_ext_is_refused_with_the_option() {
        let host = FakeHost::booted();
        host.put_file(RELEASE, "6.12.0\n");
        let message = check(&host).unwrap_err().to_string();
        assert!(message.contains("(6.12.0)") && message.contains("CONFIG_SCHED_CLASS_EXT"), "{message}");
    }

    #[test]
    fn limits_of_cpu_time_are_refused_by_name() {
        let host = FakeHost::booted();
        host.put_file("sys/fs/cgroup/cgroup.controllers", "cpu memory\n");
        host.put_file("sys/fs/cgroup/machine.slice/cpu.max", "max 100000\n");
        assert_eq!(check_cpu_limits(&host), Ok(()));
        for number in 1..=4 {
            host.put_file(&format!("sys/fs/cgroup/machine.slice/vm{number}/cpu.max"), "50000 100000\n");
        }
        let message = check_cpu_limits(&host).unwrap_err().to_string();
        assert!(message.contains("/machine.slice/vm1 (cpu.max 50000 100000), /machine.slice/vm2"), "{message}");
        assert!(message.contains("and 1 more") && message.contains("--ignore-cpu-limits"), "{message}");

        let host = FakeHost::booted();
        host.put_file("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "-1\n");
        assert_eq!(check_cpu_limits(&host), Ok(()));
        host.put_file("sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us", "20000\n");
        let limit = CpuLimit { cgroup: "/a/b".to_owned(), setting: "cpu.cfs_quota_us 20000".to_owned() };
        assert_eq!(check_cpu_limits(&host), Err(Unsupported::CpuLimits(vec![limit])));
    }

    #[test]
    fn other_scheduler_is_named() {
        let host = FakeHost::booted();
        host.put_file(STATE, "enabled\n");
        host.put_file(OPERATIONS, "lavd\n");
        assert_eq!(check(&host), Err(Unsupported::OtherScheduler("lavd".to_owned())));
    }
}
