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
    fn other_scheduler_is_named() {
        let host = FakeHost::booted();
        host.put_file(STATE, "enabled\n");
        host.put_file(OPERATIONS, "lavd\n");
        assert_eq!(check(&host), Err(Unsupported::OtherScheduler("lavd".to_owned())));
    }
}
