//! How the virtual machines of the host run and wait for CPUs, for the daemon's status.

use pagefold_daemon::wire::{MAX_LISTED_VMS, VmCpuReport};
use pagefold_host::Host;
use pagefold_vcpu::monitor::{MachineFigures, MachineMonitor};

/// The machines of the status, the one that waits most first, and the number of those left out.
pub fn read_vm_cpus(monitor: &mut MachineMonitor, host: &dyn Host) -> (Vec<VmCpuReport>, u64) {
    let machines = monitor.read(host);
    let omitted = machines.len().saturating_sub(MAX_LISTED_VMS) as u64;
    let percent = |share: Option<f64>| share.map(|share| (share * 1e4).round() / 100.0);
    let report = |machine: MachineFigures| VmCpuReport {
        pid: machine.pid,
        name: machine.name,
        vcpus: machine.vcpus,
        run_seconds: machine.run.as_secs_f64(),
        ready_seconds: machine.ready.as_secs_f64(),
        run_percent: percent(machine.run_share),
        ready_percent: percent(machine.ready_share),
    };
    (machines.into_iter().take(MAX_LISTED_VMS).map(report).collect(), omitted)
}
