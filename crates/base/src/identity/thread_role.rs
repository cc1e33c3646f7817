//! What the threads of a virtual machine monitor do, by their names.

/// The longest name of an iothread: a thread's name has 15 bytes (`TASK_COMM_LEN`, include/linux/sched.h), of which QEMU
/// needs three.
const MAX_IOTHREAD_NAME_BYTES: usize = 12;

/// What a thread of a virtual machine monitor does.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ThreadRole {
    /// Runs the virtual CPU with this number.
    Vcpu(u32),
    /// Serves block devices: the iothread with this name.
    Iothread(String),
    /// Serves a vhost device in the kernel.
    Vhost,
    /// Everything else: the main loop of a monitor, or any thread of another program.
    Other,
}

impl ThreadRole {
    /// The role by the name of a thread. QEMU names its threads with `-name debug-threads=on`, which libvirt sets:
    /// `CPU 0/KVM` (accel/kvm/kvm-accel-ops.c) and `IO iothread1` (iothread.c), cut to 15 bytes. The names of
    /// cloud-hypervisor and Firecracker are `vcpu0` and `fc_vcpu 0`. A vhost worker is named after its owner,
    /// `vhost-1234` (drivers/vhost/vhost.c), and is a thread of it since 6.4.
    pub fn from_thread_name(name: &str) -> Self {
        let number = |digits: &str| digits.trim().parse().ok();
        let qemu = name.strip_prefix("CPU ").and_then(|rest| number(rest.split('/').next()?));
        let others = || name.strip_prefix("vcpu").or_else(|| name.strip_prefix("fc_vcpu ")).and_then(number);
        if let Some(vcpu) = qemu.or_else(others) {
            Self::Vcpu(vcpu)
        } else if let Some(iothread) = name.strip_prefix("IO ").filter(|iothread| *iothread != "mon_iothread") {
            Self::Iothread(iothread.to_owned())
        } else if name.strip_prefix("vhost-").is_some_and(|owner| owner.bytes().all(|byte| byte.is_ascii_digit())) {
            Self::Vhost
        } else {
            Self::Other
        }
    }

    /// Whether it is the iothread with this name, of which the kernel may have cut the end.
    pub fn is_iothread(&self, name: &str) -> bool {
        let Self::Iothread(shown) = self else { return false };
        shown == name || shown.len() >= MAX_IOTHREAD_NAME_BYTES && name.starts_with(shown.as_str())
    }

    /// The number of an iothread of libvirt, which names the object `iothread1` (src/qemu/qemu_command.c,
    /// `qemuBuildIOThreadCommandLine`). `None` for other threads, and where the kernel may have cut the name.
    pub fn libvirt_iothread(&self) -> Option<u32> {
        let Self::Iothread(name) = self else { return None };
        let digits = name.strip_prefix("iothread").filter(|_| name.len() < MAX_IOTHREAD_NAME_BYTES)?;
        digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn iothreads_of_libvirt_have_numbers() {
        let iothread = |name: &str| ThreadRole::from_thread_name(name).libvirt_iothread();
        assert_eq!(["IO iothread1", "IO iothread999"].map(iothread), [Some(1), Some(999)]);
        // 12345, cut by the kernel, and names that libvirt does not give.
        for name in ["IO iothread1234", "IO iothread", "IO iothread+1", "IO io1", "IO mon_iothread", "CPU 1/KVM"] {
            assert_eq!(iothread(name), None, "{name}");
        }
    }

    #[test]
    fn iothread_is_known_by_the_start_of_its_name() {
        let is = |shown: &str, name: &str| ThreadRole::from_thread_name(shown).is_iothread(name);
        assert!(is("IO iothread1", "iothread1") && is("IO virtio-disk0", "virtio-disk0-io0"));
        assert!(!is("IO iothread1", "iothread12") && !is("CPU 1/KVM", "iothread1") && !is("IO iothread2", "iothread1"));
    }

    #[test]
    fn names_of_threads_show_roles() {
        let role = ThreadRole::from_thread_name;
        assert_eq!(role("CPU 0/KVM"), ThreadRole::Vcpu(0));
        assert_eq!(role("CPU 127/TCG"), ThreadRole::Vcpu(127));
        assert_eq!(role("vcpu3"), ThreadRole::Vcpu(3));
        assert_eq!(role("fc_vcpu 2"), ThreadRole::Vcpu(2));
        assert_eq!(role("IO iothread1"), ThreadRole::Iothread("iothread1".to_owned()));
        assert_eq!(role("vhost-4711"), ThreadRole::Vhost);
        for name in ["IO mon_iothread", "qemu-system-x86", "CPU x/KVM", "vhost-net", "CPU", "worker", ""] {
            assert_eq!(role(name), ThreadRole::Other, "{name}");
        }
    }
}
