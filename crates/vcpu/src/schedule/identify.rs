//! Which threads are vCPUs, and of which virtual machine.

/// The number of a vCPU by the name of its thread: QEMU calls it `CPU 3/KVM`, or `CPU 3/TCG` when it emulates each vCPU
/// by a thread (accel/kvm/kvm-accel-ops.c, accel/tcg/tcg-accel-ops-mttcg.c).
pub fn parse_vcpu_thread_name(name: &str) -> Option<u32> {
    let (number, accelerator) = name.strip_prefix("CPU ")?.split_once('/')?;
    (matches!(accelerator, "KVM" | "TCG") && number.bytes().all(|byte| byte.is_ascii_digit()))
        .then(|| number.parse().ok())
        .flatten()
}
